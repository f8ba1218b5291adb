#!/usr/bin/env python3
"""The five m=1 shapes of the profile, plain and with bias: the best of v6 and of the older families on this device against NumPy
float32, torch float16 and mlx on the CPU, each where installed, interleaved in one run on the same number of threads.

    python benchmarks/peers.py [--threads 2] [--iters 20] [--all]
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

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

Calls = dict[str, Callable[[], object]]


def peers(a: Any, b: Any, bias: Any, transpose_b: bool) -> Calls:
    """Calls that compute the same; weights converted and placed beforehand, as a server would have them."""
    found: Calls = {}
    a32, b32 = a.astype(np.float32), b.astype(np.float32)
    wide = b32.T if transpose_b else b32
    out = np.empty((a.shape[0], wide.shape[1]), np.float32)
    if bias is None:
        found["numpy float32"] = lambda: np.matmul(a32, wide, out=out)
    else:
        bias32 = bias.astype(np.float32)
        found["numpy float32"] = lambda: np.add(np.matmul(a32, wide, out=out), bias32, out=out)
    try:
        import torch

        torch.set_num_threads(ARGS.threads)
        ta, tb = torch.from_numpy(a), torch.from_numpy(b)
        tw = tb.T if transpose_b else tb
        t_out = torch.empty((a.shape[0], tw.shape[1]), dtype=torch.float16)
        t_bias = None if bias is None else torch.from_numpy(bias)
        found["torch float16"] = lambda: torch.matmul(ta, tw, out=t_out) if t_bias is None else torch.addmm(t_bias, ta, tw, out=t_out)
    except ImportError:
        pass
    try:
        import mlx.core as mx

        mx.set_default_device(mx.cpu)
        ma, mb = mx.array(a), mx.array(b)
        mw = mb.T if transpose_b else mb
        m_bias = None if bias is None else mx.array(bias)
        found["mlx cpu float16"] = lambda: mx.eval(mx.matmul(ma, mw) if m_bias is None else mx.addmm(m_bias, ma, mw))
    except ImportError:
        pass
    return found


def measure(calls: Calls) -> dict[str, float]:
    """Median seconds of each, interleaved."""
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for step in range(ARGS.iters + 2):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            if step >= 2:
                samples[name].append(time.perf_counter() - start)
    return {name: statistics.median(s) for name, s in samples.items()}


def run(device: metalmm.Device, shape: sizes.Shape, has_bias: bool) -> float:
    """Prints one shape; the speed of the best of v6 against the fastest peer."""
    rng = np.random.default_rng(0)

    def half(*size: int) -> Any:
        return rng.standard_normal(size, dtype=np.float32).astype(np.float16)

    a, bias = half(1, shape.k), half(shape.n) if has_bias else None
    b = half(*((shape.n, shape.k) if shape.transpose_b else (shape.k, shape.n)))
    spec = metalmm.MatmulSpec(m=1, n=shape.n, k=shape.k, transpose_b=shape.transpose_b, bias=has_bias)
    calls = peers(a, b, bias, shape.transpose_b)
    others = list(calls)
    da, db, d_bias = device.array(a), device.array(b), None if bias is None else device.array(bias)
    mine = [v for v in metalmm.variants(spec, device=device, enabled=True) if v.family.startswith("m1_optimized")]
    for v in mine:
        calls[v] = device.prepare(v, da, db, bias=d_bias, transpose_b=shape.transpose_b)
    median = measure(calls)
    v6 = min((v for v in mine if v.family == "m1_optimized_v6"), key=lambda v: median[v])
    older = min((v for v in mine if v.family != "m1_optimized_v6"), key=lambda v: median[v])
    peer = min(others, key=lambda v: median[v])
    gb = 2 * shape.n * shape.k / 1e9
    print(f"n={shape.n} k={shape.k} {shape.layout}{' bias' if has_bias else ''}: v6 at {median[older] / median[v6]:.2f} of the older families' speed, "
          f"{median[peer] / median[v6]:.2f} of the fastest peer's")  # fmt: skip
    for name in [v6, older, *others, *(sorted(mine, key=lambda v: median[v]) if ARGS.all else [])]:
        print(f"    {name:56s} {median[name] * 1e3:9.3f} ms {gb / median[name]:6.1f} GB/s")
    return median[peer] / median[v6]


def main() -> int:
    device = metalmm.default_device()
    print(f"{runner.describe(device, runner.environment(device))} iters={ARGS.iters}; GB/s: of half weights")
    shapes = [s for s in sizes.load() if s.batch == 1]
    ratios = [run(device, shape, has_bias) for shape in shapes for has_bias in (False, True)]
    print(f"least ratio of v6 to the fastest peer: {min(ratios):.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
