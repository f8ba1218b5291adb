#!/usr/bin/env python3
"""What the host pays for a matmul, in microseconds, medians: per call, prepared, in batches, replayed; peers where installed.

The kernel is empty by default: it takes a matmul's arguments and does nothing, so that only the host is left. --variant measures a
real one. The device's own time, as it reports it, is taken off where it is inside the measured call. Peers do their work at the
same shape, and their figures hold it.

    python benchmarks/host_overhead.py [--n 64] [--k 64] [--rounds 200] [--variant ID]
    python tests/fakes/on_fake_metal.py benchmarks/host_overhead.py        # the Metal device's host code, off a Mac
    METALMM_FAKE=commit_us=20,call_ns=100 python tests/fakes/on_fake_metal.py benchmarks/host_overhead.py    # with costs of Metal's calls
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import metalmm
import numpy as np
from metalmm.bench import runner

BATCHES = (1, 4, 16, 64, 170, 256)  # 170: the matmuls of a decode step of Qwen2.5-0.5B, its heads one by one left out
EMPTY = """
#include <metal_stdlib>
#include "params.h"
using namespace metal;
template <int TG>
[[kernel, max_total_threads_per_threadgroup(TG)]] void empty(const device half* A [[buffer(0)]], const device half* B [[buffer(1)]],
    device half* D [[buffer(2)]], const device half* C [[buffer(3)]], const device half* bias [[buffer(4)]],
    constant MatmulParams& p [[buffer(5)]]) {}
"""
MANIFEST = """
format = 2
[kernels.empty]
template = ["threads"]
tile = [1, 0]
supports = { layouts = ["nn"] }
[families.host_overhead.variants]
empty = { kernel = "empty", threads = 32 }
"""


def load_empty(folder: Path) -> str:
    """The variant that does nothing; its source must be there until it is compiled."""
    (folder / "empty.metal").write_text(EMPTY)
    (folder / "empty.toml").write_text(MANIFEST)
    return str(metalmm.load_variants(folder / "empty.toml")[0])


def peers(x: Any, w: Any, on: str) -> dict[str, Callable[[], object]]:
    """The same shape in other libraries, as they would be called in a loop."""
    x32, w32, y32 = x.astype(np.float32), w.astype(np.float32), np.empty((1, w.shape[1]), np.float32)
    found: dict[str, Callable[[], object]] = {"numpy.matmul(float32, out=)": lambda: np.matmul(x32, w32, out=y32)}
    try:
        import torch

        device = "mps" if torch.backends.mps.is_available() else "cuda" if on == "cuda" and torch.cuda.is_available() else "cpu"
        tx, tw = torch.from_numpy(x).to(device), torch.from_numpy(w).to(device)
        ty = torch.empty((1, w.shape[1]), dtype=torch.float16, device=device)
        wait = getattr(torch, device).synchronize
        found[f"torch.matmul(float16, out=) {device}"] = lambda: (torch.matmul(tx, tw, out=ty), wait())
    except ImportError:
        pass
    try:
        import mlx.core as mx

        mx_x, mx_w = mx.array(x), mx.array(w)
        found[f"mlx eval(matmul) {mx.default_device()}"] = lambda: mx.eval(mx.matmul(mx_x, mx_w))
    except ImportError:
        pass
    return found


def per_call(call: Callable[[], object], count: int) -> float:
    """Seconds of one call, over `count` of them."""
    start = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - start) / count


def us(values: list[float]) -> float:
    return statistics.median(values) * 1e6


def single_calls(dev: metalmm.Device, variant: str, x: Any, w: Any, rounds: int) -> None:
    dx, dw, dy, y = dev.array(x), dev.array(w), dev.empty((1, w.shape[1])), np.empty((1, w.shape[1]), np.float16)
    prepared = dev.prepare(variant, dx, dw, out=dy)
    others = peers(x, w, dev.name)
    calls: dict[str, Callable[[], object]] = {
        "prepared()": prepared,
        "matmul(device arrays, out=)": lambda: metalmm.matmul(variant, dx, dw, out=dy),
        "matmul(numpy arrays, out=)": lambda: metalmm.matmul(variant, x, w, out=y, device=dev),
        "matmul(device arrays)": lambda: metalmm.matmul(variant, dx, dw),
        **others,
    }
    samples: dict[str, list[float]] = {name: [] for name in calls}
    steady = dev.counters
    own: list[float] = []
    for _ in range(rounds):
        for name, call in calls.items():
            samples[name].append(per_call(call, 20))
        for _ in range(20):
            prepared()
            own.append(prepared.device_seconds or 0.0)
    kernel = us(own)
    print(f"one at a time; the kernel's own time {kernel:.2f} us" + ("" if any(own) else " (n/a: counted as the host's)"))
    print(f"{'':42s}{'total us':>9s}{'host us':>9s}")
    for name, s in samples.items():
        host = "" if name in others else f"{us(s) - kernel:9.3f}"
        print(f"{name:42s}{us(s):9.3f}{host}")
    if "allocations" in steady:  # of all the calls above, most of which wrote a result of their own
        made, moved = (dev.counters.get(key, 0) - steady.get(key, 0) for key in ("allocations", "residency_calls"))
        print(f"buffers allocated in these calls {made}, calls of the residency set {moved}")


class Row:
    """Samples of one size of batch."""

    def __init__(self) -> None:
        self.python: list[float] = []
        self.encode: list[float] = []
        self.add: list[float] = []
        self.commit: list[float] = []
        self.wait: list[float] = []
        self.device: list[float] = []
        self.total: list[float] = []
        self.replay: list[float] = []
        self.replay_total: list[float] = []
        self.calls = 0


def batches(dev: metalmm.Device, variant: str, x: Any, w: Any, rounds: int) -> dict[int, Row]:
    """Each matmul has weights and a result of its own, as the layers of a model have."""
    most = max(BATCHES)
    dx, weights = dev.array(x), [dev.array(w) for _ in range(most)]
    results = [dev.empty((1, w.shape[1])) for _ in range(most)]
    prepared = [dev.prepare(variant, dx, weights[i], out=results[i]) for i in range(most)]
    rows = {size: Row() for size in BATCHES}
    recordings = {}
    for size in BATCHES:
        batch = dev.batch()
        for call in prepared[:size]:
            batch.add(call)
        recordings[size] = batch.record()
    pairs = list(zip(weights, results, strict=True))
    for _ in range(rounds):
        for size, row in rows.items():
            start = time.perf_counter()
            batch = dev.batch()
            matmul = batch.matmul
            for b, y in pairs[:size]:
                matmul(variant, dx, b, out=y)
            encoded = time.perf_counter()
            batch.submit()
            submitted = time.perf_counter()
            batch.wait()
            end = time.perf_counter()
            timing = batch.timing
            row.python.append((encoded - start) / size)
            row.encode.append((submitted - start - timing.commit) / size)
            row.commit.append(timing.commit)
            row.wait.append(timing.wait)
            row.device.append(timing.device or 0.0)
            row.total.append(end - start)
            row.calls = timing.calls
            start = time.perf_counter()
            batch = dev.batch()
            add = batch.add
            for call in prepared[:size]:
                add(call)
            batch.submit()
            row.add.append((time.perf_counter() - start - batch.timing.commit) / size)
            batch.wait()
            start = time.perf_counter()
            recordings[size].replay()
            row.replay.append(time.perf_counter() - start)
            recordings[size].wait()
            row.replay_total.append(time.perf_counter() - start)
    return rows


def print_batches(rows: dict[int, Row]) -> None:
    print(
        "\nin batches, us; encode is from opening the batch to the last call before commit, the caller's loop in Python included; host is that and commit"
    )
    print(f"{'':9s}{'--- of one matmul ---':>32s}{'--- of the batch ---':>51s}")
    print(
        f"{'matmuls':>7s}{'matmul()':>11s}{'encode':>9s}{'add: enc.':>11s}{'total':>9s}{'commit':>9s}{'host':>9s}{'wait':>10s}{'device':>10s}{'total':>10s}"
    )
    for size, r in rows.items():
        print(
            f"{size:7d}{us(r.python):11.3f}{us(r.encode):9.3f}{us(r.add):11.3f}{us(r.total) / size:9.3f}"
            f"{us(r.commit):9.3f}{us(r.encode) * size + us(r.commit):9.1f}{us(r.wait):10.1f}{us(r.device):10.1f}{us(r.total):10.1f}"
        )
    print(f"\nrecorded, us\n{'matmuls':>7s}{'replay()':>11s}{'of encoding':>13s}{'with wait':>11s}{'a matmul':>10s}")
    for size, r in rows.items():
        share = us(r.replay) / (us(r.encode) * size)
        print(f"{size:7d}{us(r.replay):11.3f}{share:12.1%}{us(r.replay_total):12.1f}{us(r.replay_total) / size:10.3f}")
    if rows[64].calls:
        steady = (rows[256].calls - rows[64].calls) / (256 - 64)
        print(f"\ncalls of Metal a matmul in steady state: {steady:g} (each with weights and a result of its own); at most 6 are allowed")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, default=64)
    parser.add_argument("--k", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--variant", help="an NN variant; default: one that does nothing")
    parser.add_argument("--spin", type=float, default=50, help="us that wait() watches before it blocks; device metal")
    args = parser.parse_args()
    rng = np.random.default_rng(0)
    x = rng.standard_normal((1, args.k)).astype(np.float16)
    w = rng.standard_normal((args.k, args.n)).astype(np.float16)
    dev = metalmm.default_device()
    if "spin" in dev.backend.options:
        dev = metalmm.Device(spin=args.spin * 1e-6)
    print(runner.describe(dev, runner.environment(dev)))
    with tempfile.TemporaryDirectory() as folder:
        variant = args.variant or load_empty(Path(folder))
        print(f"{variant} m=1 n={args.n} k={args.k} nn, rounds={args.rounds}")
        single_calls(dev, variant, x, w, args.rounds)
        print_batches(batches(dev, variant, x, w, max(5, args.rounds // 2)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
