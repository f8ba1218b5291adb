"""The door of benchmarks/hot_shapes.py: ``metalmm bench`` in the older harness's format, with its fixed number of samples."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from .. import cli


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; 0 if every variant was right everywhere, 1 if one was wrong, 2 for arguments it cannot use."""
    iters = os.environ.get("MATMUL_BENCH_ITERS", "").strip() or "5"
    return cli.main(["bench", "--format", "seeds", "--iters", iters, *(sys.argv[1:] if argv is None else argv)])
