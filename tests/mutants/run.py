#!/usr/bin/env python3
"""Breaks the kernels and the C++ behind them, one place at a time, and runs the tests until one fails: mutants.toml beside this file.

    python tests/mutants/run.py [--only TEXT]       mutants whose file or description holds TEXT

Says which were killed and by which test. Exit status 1 if one survives that mutants.toml does not explain, or one dies that it does.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
WORK = ROOT / "build" / "mutants"
FIRST_OF_KERNELS = ["test_edges.py", "test_debug_mode.py", "test_matmul.py", "test_types.py"]
FIRST_OF_CORE = [
    "test_order.py",
    "test_bad_input.py",
    "test_api.py",
    "test_arrays.py",
    "test_cpu_device.py",
    "test_misbehaving.py",
    *FIRST_OF_KERNELS,
]
# What all kernels share is tried on these; else an id of each way through each template that the mutant touches.
CORE_VARIANTS = "gemv/baseline gemm_tiled/baseline mlx/baseline mlx/m1_fast_nt m1_optimized_v6/nt_simd_c4_s1_tg128 small_m/nt_c4_s4_tg128"


def tree() -> Path:
    """A copy of the sources that a mutant may change."""
    files = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    copy = WORK / "tree"
    for name in files.splitlines():
        source, target = ROOT / name, copy / name
        if not source.is_file() or (target.exists() and target.read_bytes() == source.read_bytes()):
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)
    return copy


def build(copy: Path) -> str:
    """Empty, or what the compiler said."""
    where = WORK / "build"
    if not (where / "build.ninja").exists():
        prefix = subprocess.run(
            [sys.executable, "-m", "nanobind", "--cmake_dir"], capture_output=True, text=True, check=True
        ).stdout.strip()
        options = [
            f"-DCMAKE_PREFIX_PATH={prefix}",
            f"-DPython_EXECUTABLE={sys.executable}",
            "-DCMAKE_CXX_FLAGS_RELEASE=-O1",
        ]
        subprocess.run(["cmake", "-S", str(copy), "-B", str(where), "-G", "Ninja", *options], capture_output=True, check=True)
    done = subprocess.run(["cmake", "--build", str(where)], capture_output=True, text=True)
    if done.returncode:
        return done.stdout
    shutil.copyfile(next(where.glob("_core*.so")), copy / "python" / "metalmm" / next(where.glob("_core*.so")).name)
    return ""


# Without the finder of an editable install, which would find what is not broken.
START = "import sys; sys.meta_path[:] = [f for f in sys.meta_path if 'ScikitBuild' not in type(f).__name__]; "


def run_tests(copy: Path, tests: list[str], variants: str) -> str:
    """The first test that failed, or nothing."""
    start = START + "import pytest; sys.exit(pytest.main(sys.argv[1:]))"
    command = [sys.executable, "-c", start, "-x", "-q", "-p", "no:cacheprovider", "-k", "not every_compiler", *tests]
    environment = {**os.environ, "PYTHONPATH": str(copy / "python"), "METALMM_DEVICE": "cpu", "METALMM_CACHE": str(WORK / "cache")}
    environment |= {"METALMM_TEST_VARIANTS": variants}
    return first_failure(subprocess.run(command, cwd=copy / "tests", env=environment, capture_output=True, text=True, timeout=1200))


def run_on_fake_metal(copy: Path) -> str:
    environment = {**os.environ, "METALMM_DEVICE": "metal", "METALMM_CACHE": str(WORK / "cache")}
    made = subprocess.run(["bash", "tests/fakes/fake_metal.sh", sys.executable], cwd=copy, env=environment, capture_output=True, text=True)
    if made.returncode:
        return "does not compile"
    command = [sys.executable, "tests/fakes/on_fake_metal.py", "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "tests/devices/metal"]
    return first_failure(subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, timeout=1200))


def run_on_fake_cuda(copy: Path) -> str:
    environment = {**os.environ, "METALMM_DEVICE": "cuda", "METALMM_CACHE": str(WORK / "cache")}
    environment |= {"PYTHONPATH": f"{copy / 'python'}:{copy / 'tests'}"}
    if subprocess.run(["bash", "tests/fakes/fake_cuda.sh"], cwd=copy, env=environment, capture_output=True).returncode:
        return "does not compile"
    start = START + "import runpy; runpy.run_path('tests/fakes/on_fake_cuda.py', run_name='__main__')"
    command = [sys.executable, "-c", start, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "tests/test_cuda.py"]
    return first_failure(subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, timeout=1200))


def first_failure(done: subprocess.CompletedProcess[str]) -> str:
    if done.returncode == 0:
        return ""
    found = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    return found[1] if found else (done.stdout + done.stderr).strip().splitlines()[-1][:100]


def variants_of(copy: Path, file: str) -> str:
    """Some ids of every template that the file is part of."""
    manifest = tomllib.loads((copy / "kernels" / "variants.toml").read_text())
    chosen: dict[tuple[Any, ...], str] = {}
    for name, family in manifest["families"].items():
        for row, entry in family["variants"].items():
            merged = {**family, **entry}
            if merged.get("library"):
                continue
            merged = {"source": f"{merged['kernel']}.metal", **manifest["kernels"][merged["kernel"]], **merged}
            source = copy / "kernels" / merged["source"]
            if Path(file).name in (merged["source"], *re.findall(r'"include/(\w+\.h)"', source.read_text())):
                way = [merged.get(key) for key in ("vec4", "read", "pipelined", "width", "stage", "split", "rows")]
                chosen.setdefault((merged["source"], merged["kernel"], *way), f"{name}/{row}")
    return " ".join(chosen.values())


def judge(copy: Path, mutant: dict[str, str]) -> str:
    """Who killed it."""
    path = copy / mutant["file"]
    whole = path.read_text()
    if whole.count(mutant["old"]) != 1:
        raise SystemExit(
            f"{mutant['file']}: {mutant['what']}: its text stands there {whole.count(mutant['old'])} times; mutants.toml is out of date"
        )
    path.write_text(whole.replace(mutant["old"], mutant["new"]))
    try:
        if mutant.get("tests") == "metal":
            return run_on_fake_metal(copy)
        if mutant.get("tests") == "cuda":
            return "does not compile" if build(copy) else run_on_fake_cuda(copy)
        if mutant["file"].startswith("kernels/"):
            shared = mutant["file"].endswith("epilogue.h")
            return run_tests(copy, FIRST_OF_KERNELS, CORE_VARIANTS if shared else variants_of(copy, mutant["file"]))
        return "does not compile" if build(copy) else run_tests(copy, FIRST_OF_CORE, CORE_VARIANTS)
    finally:
        path.write_text(whole)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="a part of a file's name or of a description")
    args = parser.parse_args()
    mutants = tomllib.loads((Path(__file__).parent / "mutants.toml").read_text())["mutant"]
    mutants = [m for m in mutants if args.only in m["file"] or args.only in m["what"]]
    copy = tree()
    if said := build(copy):
        raise SystemExit(said)
    if failed := run_tests(copy, FIRST_OF_CORE, CORE_VARIANTS):
        raise SystemExit(f"{failed} fails without a mutant")
    if any(m.get("tests") == "cuda" for m in mutants) and (failed := run_on_fake_cuda(copy)):
        raise SystemExit(f"{failed} fails without a mutant")
    killed, explained, wrong = 0, 0, 0
    for mutant in mutants:
        start = time.monotonic()
        killer = judge(copy, mutant)
        expected = mutant.get("survives", "")
        if bool(killer) == bool(expected) or killer == "does not compile":
            wrong += 1
        killed, explained = killed + bool(killer), explained + (not killer and bool(expected))
        verdict = f"killed by {killer}" if killer else f"SURVIVES{': ' + expected if expected else ', and nobody says why'}"
        print(f"{mutant['file']}: {mutant['what']}: {verdict} ({time.monotonic() - start:.0f} s)", flush=True)
        if not mutant["file"].startswith("kernels/"):
            build(copy)
    print(f"{len(mutants)} mutants: {killed} killed, {explained} survive for a reason given, {wrong} not as mutants.toml says")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
