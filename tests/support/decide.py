"""What several files of tests share: decide."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from metalmm import cli
from metalmm.bench import sizes
from metalmm.bench.report import Result
from metalmm.bench.runner import ShapeRun

QUICK = ["--least-time", "0", "--most-time", "0.02"]


SMALL = ["--spec", "n=64 k=64 nt calls=24", "--spec", "m=1 n=96 k=33 nn bias calls=2"]


FEW = ["--backends", "gemv,m1_optimized,gemv_nt_vec4"]


def bench(*arguments: str, name: str = "run.json") -> tuple[int, Any]:
    code = cli.main(["bench", "--json", name, *QUICK, *arguments])
    return code, json.loads(Path(name).read_text()) if Path(name).exists() else None


def made(variant: str, *times: float, **fields: Any) -> Result:
    return Result(variant, list(times), list(times), **fields)


def a_run(*found: Result, twin: Result | None = None, baseline: str | None = None) -> ShapeRun:
    return ShapeRun(sizes.from_specs(["n=64 k=64 nt calls=24"]).shapes[0], list(found), twin, 1, baseline)


def started(*arguments: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "METALMM_DEVICE": "cpu"}
    return subprocess.Popen(
        [sys.executable, "-m", "metalmm", *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )
