#!/usr/bin/env python3
"""Breaks kernels, C++ and Python, one place at a time, and runs the tests until one fails.

    python tests/mutants/run.py [--only TEXT] [--draw 100] [--seed N] [--json FILE]

The mutants of by_hand/*.toml, and as many as --draw says drawn at random. Each worker has a copy of the sources, a build and its own turn;
the tests that look at the mutant's lines come first, and a survivor is cut after 90 seconds. Exit status 1 if a mutant by hand survives that
its file does not explain, or dies that it does; or if a drawn one survives that explained.toml does not explain.
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
from dataclasses import asdict
from pathlib import Path

from draw import Mutant, draw

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
WORK = ROOT / "build" / "mutants"
LIMIT = 90.0  # seconds of a survivor
# What looks at a file: of the first pattern that fits, tests in the order in which they are run.
_KERNELS = "kernels/test_results.py kernels/test_formats.py kernels/test_debug.py kernels/test_early.py"
_DEVICES = "devices/test_order.py devices/test_bad_input.py devices/test_api.py devices/test_arrays.py devices/cpu devices/test_matmul.py"
_LOWERING = "conformance/test_msl.py conformance/test_msl_rules.py devices/cpu/test_compiling.py devices/cpu/test_rounding.py devices/test_matmul.py"
TESTS = (
    (r"kernels/", _KERNELS),
    (r"csrc/core/hazards", "devices/metal"),
    (
        r"csrc/core/(matmul|variant|storage|tensor)",
        f"devices/test_types.py devices/test_quantized_calls.py devices/test_bad_input.py kernels/test_results.py {_DEVICES}",
    ),
    (r"csrc/(core|python)/", f"{_DEVICES} devices/test_quantized_calls.py devices/test_lifetimes.py"),
    (r"csrc/cpu/", f"devices/cpu {_DEVICES} devices/test_lifetimes.py kernels/test_debug.py"),
    (r"csrc/msl/runtime/", f"{_LOWERING} devices/cpu kernels/test_results.py"),
    (r"python/metalmm/msl/lint|python/metalmm/msl/opencl", "conformance/test_lint.py"),
    (r"python/metalmm/msl/", f"{_LOWERING} conformance/test_lint.py devices/test_api.py"),
    (r"python/metalmm/(cache|compiler|modules|kernel_source)", "devices/cpu devices/test_api.py conformance cli/test_bench.py"),
    (r"python/metalmm/(manifest|quantized|numerics)", "unit devices/test_quantized_calls.py devices/test_matmul.py cli"),
    (r"python/metalmm/profile/", "cli/test_profile.py cli/test_step_and_page.py cli"),
    (r"python/metalmm/(bench|tuning|doctor|terminal|cli)", "cli unit"),
    (r"", "unit devices cli conformance docs"),
)
# Without the finder of an editable install, which would find what is not broken.
START = "import sys; sys.meta_path[:] = [f for f in sys.meta_path if 'ScikitBuild' not in type(f).__name__]; "


class Worker:
    """A copy of the sources that a mutant may change, with a build of its own."""

    def __init__(self, number: int) -> None:
        self.folder = WORK / str(number)
        self.tree, self.build_folder = self.folder / "tree", self.folder / "build"
        files = subprocess.run(
            ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout
        for name in files.splitlines():
            source, target = ROOT / name, self.tree / name
            if not source.is_file() or (target.exists() and target.read_bytes() == source.read_bytes()):
                continue
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)
        if said := self.build():
            raise SystemExit(said)

    def check(self, mutants: list[Mutant]) -> None:
        """Nothing fails without a mutant. Of kernels the suite says it: their rows are others for each file."""
        asked = {next(tests for pattern, tests in TESTS if re.match(pattern, m.file)) for m in mutants if not m.tests}
        paths = sorted({path for tests in asked for path in tests.split() if not path.startswith("kernels/")})
        if failed := self.run(" ".join(paths), limit=900.0, more=("-n", "2", "--dist", "worksteal")):
            raise SystemExit(f"{failed} fails without a mutant")

    def build(self) -> str:
        """Empty, or what the compiler said."""
        if not (self.build_folder / "build.ninja").exists():
            nanobind = subprocess.run([sys.executable, "-m", "nanobind", "--cmake_dir"], capture_output=True, text=True, check=True)
            options = [
                f"-DCMAKE_PREFIX_PATH={nanobind.stdout.strip()}",
                f"-DPython_EXECUTABLE={sys.executable}",
                "-DCMAKE_CXX_FLAGS_RELEASE=-O1",
            ]
            subprocess.run(
                ["cmake", "-S", str(self.tree), "-B", str(self.build_folder), "-G", "Ninja", *options], capture_output=True, check=True
            )
        done = subprocess.run(["cmake", "--build", str(self.build_folder)], capture_output=True, text=True)
        if done.returncode:
            return done.stdout
        made = next(self.build_folder.glob("_core*.so"))
        shutil.copyfile(made, self.tree / "python" / "metalmm" / made.name)
        return ""

    def judge(self, mutant: Mutant) -> str:
        """Who killed it, or nothing."""
        path = self.tree / mutant.file
        whole = path.read_text()
        path.write_text(whole[: mutant.offset] + mutant.new + whole[mutant.offset + len(mutant.old) :])
        is_built = mutant.file.startswith(("csrc/core", "csrc/cpu", "csrc/python", "csrc/cuda"))
        try:
            if mutant.tests == "metal" or "hazards" in mutant.file:
                return self.run("devices/metal devices/test_matmul.py", fake="metal")
            if is_built and self.build():
                return "does not compile"
            if mutant.tests == "cuda":
                return self.run("devices/cuda", fake="cuda")
            tests = next(tests for pattern, tests in TESTS if re.match(pattern, mutant.file))
            of_core = "weight_columns.metal simd_tiles.metal" if "kernels/" in tests else ""  # some rows, of both kinds of B
            return self.run(tests, sources=path.name if mutant.file.startswith("kernels/") else of_core)
        finally:
            path.write_text(whole)
            if is_built:
                self.build()

    def run(self, tests: str, *, sources: str = "", fake: str = "", limit: float = LIMIT, more: tuple[str, ...] = ()) -> str:
        """The first test that failed, or nothing."""
        environment = {
            **os.environ, "METALMM_CACHE": str(self.folder / "cache"), "METALMM_DEVICE": fake or "cpu", "METALMM_CPU_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1", "METALMM_TEST_SOURCES": sources, "METALMM_TEST_COMPILERS": shutil.which("clang++") or "g++",
            "METALMM_LINT": "0", "PYTHONPATH": f"{self.tree / 'python'}:{self.tree / 'tests' / 'fakes'}",
        }  # fmt: skip
        pytest = ["-m", "pytest"] if fake else []
        pytest += [
            "-x",
            "-q",
            "-p",
            "no:cacheprovider",
            "-k",
            "not every_compiler and not mutants and not readme",
            *more,
            *dict.fromkeys(tests.split()),
        ]
        if fake:
            made = subprocess.run(
                ["bash", f"tests/fakes/fake_{fake}.sh", sys.executable], cwd=self.tree, env=environment, capture_output=True
            )
            if made.returncode:
                return "does not compile"
            start = f"{START}import runpy; runpy.run_path('fakes/on_fake_{fake}.py', run_name='__main__')"
        else:
            start = START + "import pytest; sys.exit(pytest.main(sys.argv[1:]))"
        process = subprocess.Popen(
            [sys.executable, "-c", start, *pytest], cwd=self.tree / "tests", env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, start_new_session=True,
        )  # fmt: skip
        try:
            out, _ = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            out, _ = process.communicate()
            return first_failure(out)  # what hangs where it did not is no kill: the clock is not a test
        return "" if process.returncode in (0, 5) else first_failure(out) or out.strip().splitlines()[-1][:100]


def first_failure(out: str) -> str:
    found = re.search(r"^(?:FAILED|ERROR) (\S+)", out, re.MULTILINE)
    return found[1] if found else ""


def by_hand() -> list[Mutant]:
    found = []
    for path in sorted((HERE / "by_hand").glob("*.toml")):
        for m in tomllib.loads(path.read_text())["mutant"]:
            text = (ROOT / m["file"]).read_text()
            if text.count(m["old"]) != 1:
                raise SystemExit(f"{path.name}: {m['file']}: {m['what']}: its text stands there {text.count(m['old'])} times")
            found.append(
                Mutant(m["file"], m["what"], text.index(m["old"]), m["old"], m["new"], "by hand", m.get("survives", ""), m.get("tests", ""))
            )
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
    parser.add_argument("--draw", type=int, default=100, help="how many are drawn at random (100)")
    parser.add_argument("--seed", type=int, default=int(time.time()) % 100000, help="of the drawn ones; printed")
    parser.add_argument("--no-check", action="store_true", help="do not run the tests without a mutant first")
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
            killer = worker.judge(mutant)
            verdict = (
                f"killed by {killer}" if killer else f"SURVIVES{': ' + mutant.survives if mutant.survives else ', and nobody says why'}"
            )
            with lock:
                results.append({**asdict(mutant), "killer": killer, "seconds": time.monotonic() - start})
                print(f"{mutant.file}: {mutant.what}: {verdict} ({time.monotonic() - start:.0f} s)", flush=True)
                if args.json:
                    args.json.write_text(json.dumps(results, indent=1))

    if not args.no_check:
        Worker(0).check(mutants)
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
