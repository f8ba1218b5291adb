#!/usr/bin/env python3
"""Kernels of other projects with numbers, against NumPy: how many of them are right on a device.

    python tests/nightly/corpora_numbers.py mlx|ggml|candle|pytorch [--device cpu] [--debug] [--mirror FOLDER | --root FOLDER] [--part 1/1]

METALMM_CXX chooses device cpu's compiler. corpora.toml has the projects' commits. Exit status 1 where a case is not right. How a kernel is
launched is written down in mlx_cases.py, ggml_cases.py, candle_cases.py and pytorch_cases.py; the kernels' text is not part of this project.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import tempfile
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import metalmm
import numpy as np
from corpora import HERE, checked_out


@dataclass
class Case:
    """A kernel of a file, with its arguments; the one at `out` is its result, which `expected` is compared with to `close` of the largest.

    before: what the result is full of when the kernel starts. read: what is compared, of the result in float64.
    """

    file: str
    kernel: str
    arguments: Sequence[Any]
    launch: dict[str, Any]
    out: int
    expected: Any
    close: float
    constants: dict[str | int, Any] = field(default_factory=dict)
    before: float = np.nan
    read: Callable[[Any], Any] = np.asarray


def numbers(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal(shape)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("project", choices=["mlx", "ggml", "candle", "pytorch"])
    parser.add_argument("--device", default=os.environ.get("METALMM_DEVICE", "cpu"))
    parser.add_argument("--debug", action="store_true", help="device cpu in debug mode: a finding is not right")
    parser.add_argument("--mirror", type=Path)
    parser.add_argument("--root", type=Path, help="the project's files, as they lie there")
    parser.add_argument("--part", default="1/1", metavar="I/N", help="every Nth case, from the Ith on: NVRTC takes some seconds for each")
    parser.add_argument("--after", default="0/0", metavar="COUNT/RIGHT", help="what was run, in a process that lost its GPU")
    args = parser.parse_args()
    first, step = map(int, args.part.split("/"))
    os.environ["METALMM_LINT"] = "0"
    corpus = tomllib.loads((HERE / "corpora.toml").read_text())[args.project]
    count, right = map(int, args.after.split("/"))
    with tempfile.TemporaryDirectory() as folder, metalmm.Device(args.device, **{"debug": True} if args.debug else {}) as device:
        root, libraries = args.root or checked_out(corpus, args.mirror, Path(folder)), dict[str, Any]()
        for case in [*importlib.import_module(f"{args.project}_cases").cases(root)][first - 1 :: step][count:]:
            count += 1
            case.arguments[case.out].fill(case.before)  # cases share it
            try:
                if case.file not in libraries:
                    libraries[case.file] = device.compile(root / case.file, [root / name for name in corpus.get("include", [])])
                libraries[case.file].kernel(case.kernel, case.constants)(dict(enumerate(case.arguments)), **case.launch)
            except (metalmm.Error, ValueError, TypeError) as error:
                print(f"{case.file} {case.kernel}: {str(error)[:300]}", flush=True)
                if "start another" in str(error):  # a fault ends CUDA for a process
                    os.execv(sys.executable, [sys.executable, *sys.argv, "--after", f"{count}/{right}"])
                continue
            out = case.read(case.arguments[case.out].astype(np.float64)).reshape(case.expected.shape)
            off = np.abs(out - case.expected).max() / max(np.abs(case.expected).max(), 1e-9)
            right += bool(off <= case.close)
            if not off <= case.close:
                print(f"{case.file} {case.kernel}: off by {off:.2g} of the largest; {case.close:g} is allowed", flush=True)
    print(f"{args.project} on device {args.device}: {right} of {count} cases are right")
    return right != count


if __name__ == "__main__":
    sys.exit(main())
