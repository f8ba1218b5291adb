#!/usr/bin/env python3
"""Breaks kernels, C++ and Python, one place at a time, and runs the tests until one fails.

    python tests/mutants/run.py [--only TEXT] [--draw 112] [--seed N] [--json FILE]

The mutants of by_hand/*.toml, and as many as --draw says drawn at random. Each worker has a copy of the sources, a build and its own turn.
The tests that execute the mutant's line are run (lines.py), the quick ones first. Each part of them is cut after 90 seconds. Exit status 1 if
a mutant by hand survives, or a drawn one that explained.toml does not explain.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import lines
from draw import Mutant, draw

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
WORK = ROOT / "build" / "mutants"
LIMIT = 90.0  # seconds of a survivor, for each part of the tests
# Of what is compiled while a program runs, no line is known to be executed: the tests that look at such a file, in their order. Rows apart
# from others, which tests/kernels/conftest.py lets come first.
_RESULTS = "tests/kernels/test_results.py"
_ROWS, _CORES, _EARLY = (
    ["tests/kernels/test_formats.py", _RESULTS, "tests/kernels/test_debug.py"],
    ["tests/kernels/test_tensor_cores.py"],
    ["tests/kernels/test_early.py"],
)
COMPILED = {
    "csrc/msl/runtime/matrix.h": [_CORES, ["tests/conformance/test_msl.py"], [_RESULTS]],
    "kernels/cuda/": [_CORES, _ROWS, _EARLY],
    "kernels/": [_ROWS, _EARLY, _CORES],
    "csrc/msl/": [
        [f"tests/conformance/test_{name}.py" for name in ("msl", "msl_rules", "constructs")],
        ["tests/devices/cpu"],
        [_RESULTS, "tests/kernels/test_debug.py", "tests/devices/test_matmul.py"],
    ],
}
SOME_ROWS = "weight_columns.metal simd_tiles.metal"  # of both kinds of B, where no kernel is the mutant
WRITES_TO_CACHE = re.compile(r"python/metalmm/(cache|compiler|modules|pipelines|kernel_source)\.py")  # into one of its own, for once
BUILT = ("csrc/core", "csrc/cpu", "csrc/python", "csrc/cuda")


class Worker:
    """A copy of the sources that a mutant may change, with a build of its own."""

    def __init__(self, number: int) -> None:
        self.folder = WORK / str(number)
        self.tree, self.is_stale = self.folder / "tree", True
        self.is_python = False  # what is broken: of it no bytecode is kept, which knows its source by second and size
        files = subprocess.run(
            ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout
        for name in files.splitlines():
            source, target = ROOT / name, self.tree / name
            if not source.is_file() or (target.exists() and target.read_bytes() == source.read_bytes()):
                continue
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)

    def lines(self, jobs: int) -> lines.Lines:
        """Which tests execute what; nothing fails without a mutant. Of kernels the suite says it: their rows are others for each file."""
        if said := self.build("counted", "-O0 --coverage"):
            raise SystemExit(said)
        return lines.measure(self.tree, WORK / "lines", self.pytest, jobs)

    def build(self, name: str = "build", flags: str = "-O0") -> str:
        """Empty, or what the compiler said."""
        folder = self.folder / name
        if not (folder / "build.ninja").exists():
            nanobind = subprocess.run([sys.executable, "-m", "nanobind", "--cmake_dir"], capture_output=True, text=True, check=True)
            options = [
                f"-DCMAKE_PREFIX_PATH={nanobind.stdout.strip()}",
                f"-DPython_EXECUTABLE={sys.executable}",
                f"-DCMAKE_CXX_FLAGS_RELEASE={flags}",
                "-DCMAKE_UNITY_BUILD=OFF",  # a mutant costs its own file
            ]
            subprocess.run(["cmake", "-S", str(self.tree), "-B", str(folder), "-G", "Ninja", *options], capture_output=True, check=True)
        done = subprocess.run(["cmake", "--build", str(folder)], capture_output=True, text=True)
        if done.returncode:
            return done.stdout
        made = next(folder.glob("_core*.so"))
        shutil.copyfile(made, self.tree / "python" / "metalmm" / made.name)
        return ""

    def judge(self, mutant: Mutant, of_line: lines.Lines) -> str:
        """Who killed it, or nothing."""
        path = self.tree / mutant.file
        whole = path.read_text()
        path.write_text(whole[: mutant.offset] + mutant.new + whole[mutant.offset + len(mutant.old) :])
        is_built, self.is_python = mutant.file.startswith(BUILT), mutant.file.endswith(".py")
        try:
            if mutant.tests == "metal" or "hazards" in mutant.file:
                return self.first_failure(["tests/devices/metal", "tests/devices/test_matmul.py"], fake="metal")
            if (is_built or self.is_stale) and self.build():
                return "does not compile"
            self.is_stale = False
            if mutant.tests == "cuda":
                return self.first_failure(["tests/devices/cuda"], fake="cuda")
            for folder, tests in COMPILED.items():
                if mutant.file.startswith(folder):
                    sources = path.name if folder.startswith("kernels/") else SOME_ROWS
                    return next(filter(None, (self.first_failure(some, sources) for some in (mutant.tests.split(), *tests))), "")
            cache = "throwaway" if WRITES_TO_CACHE.match(mutant.file) else "cache"
            killer = self.first_failure(of_line.tests(mutant.file, whole.count("\n", 0, mutant.offset) + 1, LIMIT), cache=cache)
            return killer or (self.first_failure([_RESULTS], SOME_ROWS) if is_built else "")
        finally:
            path.write_text(whole)
            self.is_stale |= is_built
            shutil.rmtree(self.folder / "throwaway", ignore_errors=True)

    def first_failure(self, tests: Sequence[str], sources: str = "", fake: str = "", cache: str = "cache") -> str:
        """The first test that failed, or nothing."""
        if not tests:
            return ""
        if fake:
            made = subprocess.run(["bash", f"tests/fakes/fake_{fake}.sh", sys.executable], cwd=self.tree, capture_output=True)
            if made.returncode:
                return "does not compile"
        more = {"METALMM_TEST_SOURCES": sources, "METALMM_CACHE": str(self.folder / cache)}
        done = self.pytest(["-x", *tests], more, fake, LIMIT)
        found = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
        if done.returncode in (0, 5) or (done.returncode == _CUT and not found):
            return ""  # what hangs where it did not is no kill: the clock is not a test
        return found[1] if found else done.stdout.strip().splitlines()[-1][:100]

    def pytest(
        self, words: Sequence[str], more: Mapping[str, str], fake: str = "", limit: float = 900.0
    ) -> subprocess.CompletedProcess[str]:
        """On the worker's tree. `more`: of the environment."""
        environment = {
            **os.environ, "METALMM_CACHE": str(self.folder / "cache"), "METALMM_DEVICE": fake or "cpu", "METALMM_CPU_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1", "METALMM_LINT": "0", "PYTHONPYCACHEPREFIX": str(self.folder / "pycache"),
            "PYTHONDONTWRITEBYTECODE": "1" if self.is_python else "",
            "PYTHONPATH": os.pathsep.join(map(str, (self.tree / "python", self.tree / "tests" / "fakes", HERE))), **more,
        }  # fmt: skip
        start = [f"tests/fakes/on_fake_{fake}.py"] if fake else []
        options = ["-q", "-p", "no:cacheprovider", "-k", "not every_compiler and not mutants and not readme"]
        process = subprocess.Popen(
            [sys.executable, *start, "-m", "pytest", *options, *words], cwd=self.tree, env=environment, text=True, start_new_session=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        try:
            out, _ = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            out, _ = process.communicate()
            return subprocess.CompletedProcess(words, _CUT, out)
        return subprocess.CompletedProcess(words, process.returncode, out)


_CUT = -1000  # in place of an exit status


def by_hand() -> list[Mutant]:
    found = []
    for path in sorted((HERE / "by_hand").glob("*.toml")):
        for m in tomllib.loads(path.read_text())["mutant"]:
            text = (ROOT / m["file"]).read_text()
            if text.count(m["old"]) != 1:
                raise SystemExit(f"{path.name}: {m['file']}: {m['what']}: its text stands there {text.count(m['old'])} times")
            found.append(Mutant(m["file"], m["what"], text.index(m["old"]), m["old"], m["new"], "by hand", "", m.get("tests", "")))
    return found


def explained(mutants: list[Mutant]) -> list[Mutant]:
    """Drawn ones, with the reason why one survives where explained.toml has it: by file, line of code and change."""
    path = HERE / "explained.toml"
    known = tomllib.loads(path.read_text()).get("mutant", []) if path.exists() else []
    reasons = {(k["file"], k["change"]): k["reason"] for k in known}
    return [Mutant(**{**asdict(m), "survives": reasons.get((m.file, m.what.partition(": ")[2]), "")}) for m in mutants]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="a part of a file's name or of a description")
    parser.add_argument("--draw", type=int, default=112, help="how many are drawn at random (112)")
    parser.add_argument("--seed", type=int, default=int(time.time()) % 100000, help="of the drawn ones; printed")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--json", type=Path, help="what came of each")
    args = parser.parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background ignores it, and so would the tests that send it
    mutants = [m for m in (*by_hand(), *explained(draw(ROOT, args.draw, args.seed))) if args.only in m.file or args.only in m.what]
    print(f"{len(mutants)} mutants, drawn with --seed {args.seed}", flush=True)
    waiting: queue.Queue[Mutant] = queue.Queue()
    for m in sorted(mutants, key=lambda m: (bool(m.tests), m.file)):
        waiting.put(m)
    results, lock = list[dict[str, object]](), threading.Lock()

    def work(number: int) -> None:
        worker = Worker(number)
        while True:
            try:
                mutant = waiting.get_nowait()
            except queue.Empty:
                return
            start = time.monotonic()
            killer = worker.judge(mutant, of_line)
            verdict = (
                f"killed by {killer}" if killer else f"SURVIVES{': ' + mutant.survives if mutant.survives else ', and nobody says why'}"
            )
            with lock:
                results.append({**asdict(mutant), "killer": killer, "seconds": time.monotonic() - start})
                print(f"{mutant.file}: {mutant.what}: {verdict} ({time.monotonic() - start:.0f} s)", flush=True)
                if args.json:
                    args.json.write_text(json.dumps(results, indent=1))

    of_line = Worker(0).lines(args.workers)
    threads = [threading.Thread(target=work, args=(i,)) for i in range(args.workers)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    lived = [r for r in results if not r["killer"]]
    wrong = [
        r for r in results if bool(r["killer"]) == bool(r["survives"]) or (r["killer"] == "does not compile" and r["area"] == "by hand")
    ]
    invalid = sum(r["killer"] == "does not compile" for r in results)
    print(
        f"{len(results)} mutants: {len(results) - len(lived) - invalid} killed, {invalid} do not compile, {len(lived)} survive, {len(wrong)} unexplained"
    )
    return 1 if wrong or len(results) < len(mutants) else 0


if __name__ == "__main__":
    sys.exit(main())
