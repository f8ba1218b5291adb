#!/usr/bin/env python3
"""What the host pays for a matmul, in microseconds, medians: per call, prepared, encoded into batches.

The kernel's own time (as the device reports it) is taken off where it is inside the measured call, so that only the host is
left; numpy.matmul of the same shape runs interleaved.

    python benchmarks/host_overhead.py [--n 64] [--k 64] [--rounds 200]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable

import metalmm
import numpy as np
from metalmm.bench import runner

BATCHES = (1, 4, 16, 64, 256)


def per_call(call: Callable[[], object], count: int) -> float:
    """Seconds of one call, over `count` of them."""
    start = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - start) / count


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, default=64)
    parser.add_argument("--k", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--variant", default="gemv/baseline", help="an NN variant")
    args = parser.parse_args()
    rng = np.random.default_rng(0)
    x = rng.standard_normal((1, args.k)).astype(np.float16)
    w = rng.standard_normal((args.k, args.n)).astype(np.float16)
    y = np.empty((1, args.n), np.float16)
    x32, w32, y32 = x.astype(np.float32), w.astype(np.float32), np.empty((1, args.n), np.float32)
    dev = metalmm.default_device()
    dx, dw, dy = dev.array(x), dev.array(w), dev.empty((1, args.n))
    prepared = dev.prepare(args.variant, dx, dw, out=dy)
    metalmm.matmul(args.variant, x, w, out=y)

    calls: dict[str, Callable[[], object]] = {
        "numpy.matmul(float32, out=)": lambda: np.matmul(x32, w32, out=y32),
        "prepared()": prepared,
        "matmul(device arrays, out=)": lambda: metalmm.matmul(args.variant, dx, dw, out=dy),
        "matmul(numpy arrays, out=)": lambda: metalmm.matmul(args.variant, x, w, out=y),
        "matmul(device arrays)": lambda: metalmm.matmul(args.variant, dx, dw),
    }
    samples: dict[str, list[float]] = {name: [] for name in calls}
    kernel: list[float] = []
    for _ in range(args.rounds):
        for name, call in calls.items():
            samples[name].append(per_call(call, 20))
        prepared()
        kernel.append(prepared.device_seconds)
    own = statistics.median(kernel)
    info = runner.environment(dev)
    print(f"device={dev.name} threads={dev.threads} cpu={info['cpu']} compiler={info['compiler']}")
    print(f"{args.variant} m=1 n={args.n} k={args.k} nn; the kernel's own time {own * 1e6:.2f} us")
    print(f"{'':34s}{'total us':>9s}{'host us':>9s}")
    for name, s in samples.items():
        total = statistics.median(s)
        host = total if name.startswith("numpy") else total - own
        print(f"{name:34s}{total * 1e6:9.3f}{host * 1e6:9.3f}")
    limit = statistics.median(samples["numpy.matmul(float32, out=)"]) + own
    met = statistics.median(samples["prepared()"]) <= limit
    print(f"prepared() against numpy's time plus the kernel's own ({limit * 1e6:.3f} us): {'within' if met else 'OVER'}")

    print(f"\nbatch of   {'encode us/matmul':>18s}{'add(prepared)':>15s}{'submit us':>11s}{'wait us':>9s}{'device us':>11s}")
    for size in BATCHES:
        encode, add, submit, wait, device = [], [], [], [], []
        for _ in range(max(5, args.rounds // 4)):
            batch = dev.batch()
            matmul = batch.matmul
            start = time.perf_counter()
            for _ in range(size):
                matmul(args.variant, dx, dw, out=dy)
            encode.append((time.perf_counter() - start) / size)
            batch.submit()
            batch.wait()
            timing = batch.timing
            submit.append(timing.submit)
            wait.append(timing.wait)
            device.append(timing.device)
            batch = dev.batch()
            start = time.perf_counter()
            for _ in range(size):
                batch.add(prepared)
            add.append((time.perf_counter() - start) / size)
        row = [statistics.median(v) * 1e6 for v in (encode, add, submit, wait, device)]
        print(f"{size:8d}   {row[0]:18.3f}{row[1]:15.3f}{row[2]:11.3f}{row[3]:9.1f}{row[4]:11.1f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
