#!/usr/bin/env python3
"""How long `metalmm profile analyze` takes, and what memory, on a log that is made up to look like an inference run's: names by layer,
durations drawn anew for each event.

    python benchmarks/profile_log.py [--events 210372] [--runs 5]
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

BLOCK = "Generation Loop/block_{0}/mlp_swiglu_block_{0}_op/Generation Loop/block_{0}/mlp_swiglu_block_{0}_op"
GEMV = "metallic::kernels::matmul_gemv::base::MatmulGemvAddmmOp/matmul/gemv_addmm (Q)"
MEASURE = (
    "import resource, sys, time; start = time.perf_counter(); from metalmm import cli; code = cli.main(sys.argv[1:]); "
    "print(time.perf_counter() - start, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, file=sys.stderr); sys.exit(code)"
)


def events(count: int) -> None:
    """Writes them to standard output's file."""
    draw = random.Random(0)
    for i in range(count):
        block, us = draw.randrange(24), draw.randrange(100, 2000)
        if i % 25 == 0:
            kind, data = "InternalKernelCompleted", {"parent_op_name": "generation_loop", "internal_kernel_name": f"block_{block}_total"}
        elif i % 3 == 0:
            kind, data = (
                "GpuOpCompleted",
                {"op_name": f"Generation Loop/block_{block}/{draw.choice(['cb_wait', 'cb_gpu'])}", "backend": "metal"},
            )
        elif i % 3 == 1:
            kind, data = "GpuOpCompleted", {"op_name": f"{BLOCK.format(block)}/metallic::kernels::rmsnorm::RMSNormOp", "backend": "metal"}
        else:
            n, k = draw.choice([("896", "4864"), ("896", "896"), ("64", str(draw.randrange(16, 160)))])
            pairs = {"op": "matmul", "backend": "gemv", "batch": "1", "m": "1", "n": n, "k": k, "tA": "0", "tB": "1"}
            kind, data = "GpuOpCompleted", {"op_name": f"{BLOCK.format(block)}/{GEMV}", "backend": "gemv", "data": pairs}
        rest = {"timestamp": "2025-11-04T10:00:00.123456Z", "span_id": None, "parent_span_id": None, "span_name": None}
        print(json.dumps({**rest, "event": {"type": kind, "data": {**data, "duration_us": us}}}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, default=210_372)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--make", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.make:
        events(args.events)
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "log.jsonl"
        with open(path, "w") as file:
            subprocess.run([sys.executable, __file__, "--make", "--events", str(args.events)], stdout=file, check=True)
        seconds, memory = [], []
        for _ in range(args.runs):
            command = [sys.executable, "-c", MEASURE, "profile", "analyze", str(path)]
            start = time.perf_counter()
            done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=True)
            seconds.append(time.perf_counter() - start)
            memory.append(float(done.stderr.split()[-1]))
        size = path.stat().st_size
    print(
        f"{args.events} events, {size / 1e6:.0f} MB: {statistics.median(seconds):.2f} s (median of {args.runs}, {min(seconds):.2f} to {max(seconds):.2f}, "
        f"the process from its start), {max(memory):.0f} MB of memory at most"
    )


if __name__ == "__main__":
    main()
