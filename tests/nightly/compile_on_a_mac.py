#!/usr/bin/env python3
"""Compiles on a Mac every kernel that one can ask for: to AIR with Xcode's compiler, then to a pipeline state of this machine's GPU.

    metalmm export --all -o FOLDER
    python tests/nightly/compile_on_a_mac.py FOLDER [--jobs 3] [--json FILE]

A compile to AIR needs no GPU of the M series; a pipeline state does, where a kernel needs what the GPU lacks. Of each kernel the file says
which of the two was made. Exit status 1 where one that could be made was not.
"""

from __future__ import annotations

import argparse
import functools
import json
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import metalmm


@functools.cache
def sdk() -> tuple[int, ...]:
    said = subprocess.run(["xcrun", "-sdk", "macosx", "--show-sdk-version"], capture_output=True, text=True, check=True).stdout
    return tuple(int(x) for x in said.strip().split("."))


def to_air(path: Path, kernel: dict[str, Any]) -> str:
    if "tensor_ops" in kernel["needs"] and sdk() < (26, 2):
        return f"not asked for: the SDK is {sdk()}, and tensors are of 26.2"
    language = ["-std=metal4.0", "-mmacosx-version-min=26.2"] if "tensor_ops" in kernel["needs"] else ["-std=metal3.1"]
    command = ["xcrun", "-sdk", "macosx", "metal", *language, "-c", str(path), "-o", str(path.with_suffix(".air"))]
    done = subprocess.run(command, capture_output=True, text=True)
    path.with_suffix(".air").unlink(missing_ok=True)
    return "made" if done.returncode == 0 else f"refused: {done.stderr[:2000]}"


def to_pipeline(device: metalmm.Device, path: Path, kernel: dict[str, Any]) -> str:
    if missing := [need for need in kernel["needs"] if need in device.lacking]:
        return f"not asked for: this GPU lacks {missing[0]}"
    try:
        device.compile(path.read_text()).kernel(kernel["function"])
    except metalmm.Error as error:
        return f"refused: {str(error)[:2000]}"
    return "made"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--jobs", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    kernels = json.loads((args.folder / "index.json").read_text())["kernels"]
    paths = [args.folder / k["file"] for k in kernels]
    with ThreadPoolExecutor(args.jobs) as pool, metalmm.Device("metal") as device:
        for kernel, air in zip(kernels, pool.map(to_air, paths, kernels), strict=True):
            kernel["air"] = air
        for kernel, path in zip(kernels, paths, strict=True):  # Metal's own compiler: one after another
            kernel["pipeline"] = to_pipeline(device, path, kernel)
    wrong = [(k["function"], what, k[what]) for k in kernels for what in ("air", "pipeline") if k[what].startswith("refused")]
    for what in ("air", "pipeline"):
        print(f"{what}: " + ", ".join(f"{n} {state}" for state, n in Counter(k[what].partition(":")[0] for k in kernels).items()))
    for function, what, why in wrong[:20]:
        print(f"{function}: {what} {why.splitlines()[0]}")
    if args.json:
        args.json.write_text(json.dumps({"gpu": metalmm.metal_devices(), "kernels": kernels}, indent=1))
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
