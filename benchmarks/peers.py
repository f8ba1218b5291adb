#!/usr/bin/env python3
"""The five m=1 shapes of the profile, plain epilogue: metalmm's best variant on the CPU device against NumPy float32, torch
float16 and mlx on the CPU, each where installed, interleaved in one run on the same number of threads.

    python benchmarks/peers.py [--threads 2] [--iters 20]
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable

ARGS = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
ARGS.add_argument("--threads", type=int, default=2)
ARGS.add_argument("--iters", type=int, default=20)
ARGS.add_argument("--all", action="store_true", help="print every variant, not the best alone")
ARGS = ARGS.parse_args()
for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "METALMM_CPU_THREADS"):
    os.environ[name] = str(ARGS.threads)  # before the libraries read them

import metalmm  # noqa: E402
import numpy as np  # noqa: E402
from metalmm.bench import runner, sizes  # noqa: E402


def peers(a: np.ndarray, b: np.ndarray, transpose_b: bool) -> dict[str, Callable[[], object]]:
    """Calls that compute the same product; weights converted and placed beforehand, as a server would have them."""
    found: dict[str, Callable[[], object]] = {}
    a32, b32 = a.astype(np.float32), b.astype(np.float32)
    wide = b32.T if transpose_b else b32
    out = np.empty((a.shape[0], wide.shape[1]), np.float32)
    found["numpy float32"] = lambda: np.matmul(a32, wide, out=out)
    try:
        import torch

        torch.set_num_threads(ARGS.threads)
        ta, tb = torch.from_numpy(a), torch.from_numpy(b)
        tw = tb.T if transpose_b else tb
        t_out = torch.empty((a.shape[0], tw.shape[1]), dtype=torch.float16)
        found["torch float16"] = lambda: torch.matmul(ta, tw, out=t_out)
    except ImportError:
        pass
    try:
        import mlx.core as mx

        mx.set_default_device(mx.cpu)
        ma, mb = mx.array(a), mx.array(b)
        mw = mb.T if transpose_b else mb
        found["mlx cpu float16"] = lambda: mx.eval(mx.matmul(ma, mw))
    except ImportError:
        pass
    return found


def main() -> int:
    shapes = [s for s in sizes.load() if s.batch == 1]
    device = metalmm.default_device()
    info = runner.environment(device)
    print(f"{runner.describe(device, info)} iters={ARGS.iters}")
    worst = float("inf")
    for shape in shapes:
        rng = np.random.default_rng(0)
        a = rng.standard_normal((1, shape.k), dtype=np.float32).astype(np.float16)
        size = (shape.n, shape.k) if shape.transpose_b else (shape.k, shape.n)
        b = rng.standard_normal(size, dtype=np.float32).astype(np.float16)
        spec = metalmm.MatmulSpec(m=1, n=shape.n, k=shape.k, transpose_b=shape.transpose_b)
        da, db = device.array(a), device.array(b)
        calls: dict[str, Callable[[], object]] = dict(peers(a, b, shape.transpose_b))
        names = list(calls)
        mine = [v for v in metalmm.variants(spec, device=device, enabled=True) if v.family not in ("gemm_tiled", "blas", "mps")]
        for v in mine:
            calls[v] = device.prepare(v, da, db, transpose_b=shape.transpose_b)
        samples: dict[str, list[float]] = {name: [] for name in calls}
        for step in range(ARGS.iters + 2):
            for name, call in calls.items():
                start = time.perf_counter()
                call()
                if step >= 2:
                    samples[name].append(time.perf_counter() - start)
        median = {name: statistics.median(s) for name, s in samples.items()}
        best, peer = min(mine, key=lambda v: median[v]), min(names, key=lambda v: median[v])
        ratio = median[peer] / median[best]
        worst = min(worst, ratio)
        print(f"n={shape.n} k={shape.k} {shape.layout}: {best} {median[best] * 1e3:.3f} ms ({2 * shape.n * shape.k / median[best] / 1e9:.1f} GB/s)"
              f" = {ratio:.2f} of the speed of {peer}")  # fmt: skip
        for name in [*names, *(sorted(mine, key=lambda v: median[v]) if ARGS.all else [])]:
            print(f"    {name:48s} {median[name] * 1e3:9.3f} ms")
    print(f"least ratio to the fastest peer: {worst:.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
