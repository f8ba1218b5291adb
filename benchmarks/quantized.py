#!/usr/bin/env python3
"""Quantized weights against our own float16, fused calls against separate ones, and a decode step in both: times are the device's.

Each contender is one recording in which weights take turns in copies, together past the last-level cache, every copy read once before the
first comes again; all calls of a recording write one result, so that each waits for the one before it. A contender is the fastest of the
variants of m1_optimized_v6, _v7, small_m and of the quantized and fused families that take the operation, each checked against float64
first, the best three measured by turns; it is then measured anew, by turns with what it is compared with. Of separate calls, which write a
result each, the best three are measured in that recording. The step: 24 layers of q-k-v, scores at 95 positions, heads, o, gate and up,
down, and the head of Qwen2.5-0.5B, weights in copies by turns likewise; attention stays float16.

    METALMM_DEVICE=cuda python benchmarks/quantized.py [--json FILE] [--skip shapes,fused,step]
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import metalmm
from metalmm import _core
from metalmm.bench import runner, sizes
from metalmm.bench.copy import measured_copy
from peers_cuda import of_ours

REPLAYS = 25
FAMILIES = ("m1_optimized_v6", "m1_optimized_v7", "small_m", "q8", "q4", "affine", "fused")
STORAGES = ("dense", "q8_0", "q8_0:canonical", "affine8", "q4_0", "affine4")
LAYER = ("n=1152 k=896 {s}", "batch=14 n=95 k=64 nt", "batch=14 n=64 k=95", "n=896 k=896 {s}", "n=9728 k=896 {s}", "n=896 k=4864 {s}")
LAYERS, HEAD = 24, "n=151936 k=896 {s}"


def shape_of(spec: str, storage: str = "dense") -> sizes.Shape:
    return sizes.from_specs([spec.format(s="nt" if storage == "dense" else storage)]).shapes[0]


def medians(contenders: Sequence[Callable[[], float]], replays: int = REPLAYS) -> list[float]:
    """Microseconds of each, by turns; the first three do not count."""
    samples: list[list[float]] = [[] for _ in contenders]
    for _ in range(replays + 3):
        for run, mine in zip(contenders, samples, strict=True):
            mine.append(run() * 1e6)
    return [statistics.median(s[3:]) for s in samples]


class Contender:
    """The fastest variant for a shape, and its recording over the copies of the weights."""

    def __init__(self, device: metalmm.Device, shape: sizes.Shape, copies: int | None = None) -> None:
        self.shape, self.device = shape, device
        self.inputs = runner.Inputs(device, shape, 0, copies or max(3, min(256, runner.cold_copies(shape, device))))
        timed = {}
        candidates = [v for v in metalmm.variants(shape.spec, device=device, enabled=True) if v.family in FAMILIES and "gemm" not in v]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(lambda v: _core._prepare_pipeline(device, v, shape.spec), candidates))
        for v in candidates:
            if wrong := self.inputs.judge(device, v):
                print(f"{shape.short}: {v} is WRONG: {wrong}")
            else:
                timed[str(v)] = medians([self.run(v)], 5)[0]
        # A few replays do not tell the first three apart.
        self.finalists = sorted(timed, key=timed.__getitem__)[:3]
        times = medians([self.run(v) for v in self.finalists])
        self.variant = self.finalists[times.index(min(times))]

    def calls(self, variant: str | None = None) -> list[Any]:
        v = next(v for v in metalmm.variants() if v == (variant or self.variant))
        return [self.inputs.prepare(self.device, v, w) for w in self.inputs.weights]

    def run(self, variant: str | None = None) -> Callable[[], float]:
        calls = self.calls(variant)
        run = of_ours(self.device, calls)
        return lambda: run() / len(calls)


def compare_shapes(device: metalmm.Device, copy: float) -> list[dict[str, Any]]:
    rows = []
    for m, n in itertools.product((1, 2, 8), (9728, 151936)):
        contenders = [Contender(device, shape_of(f"m={m} n={n} k=896 {{s}}", s)) for s in STORAGES]
        for storage, c, us in zip(STORAGES, contenders, times := medians([c.run() for c in contenders]), strict=True):
            gbps = c.shape.spec.b_bytes / us / 1e3
            row = {"m": m, "n": n, "k": 896, "storage": storage, "us": us, "ratio": times[0] / us, "gbps": gbps, "variant": c.variant}
            rows.append(row)
            print(
                f"{m} x {n} x 896 {storage:16s}{us:9.2f} us{times[0] / us:7.2f}{gbps:8.0f} GB/s{gbps / copy:6.0%}  {c.variant}", flush=True
            )
    return rows


def compare_fused(device: metalmm.Device) -> list[dict[str, Any]]:
    rows = []
    for widths in ((4864, 4864), (896, 128, 128)):
        for storage in ("dense", "q8_0", "q4_0", "affine8"):
            fused = Contender(device, shape_of(f"n={'+'.join(map(str, widths))} k=896 {{s}}", storage))
            shapes = [shape_of(f"n={n} k=896 {{s}}", storage) for n in widths]
            copies = min(256, max(runner.cold_copies(s, device) for s in shapes))  # each is chosen cold, too
            apart = [Contender(device, s, copies) for s in shapes]
            # The separate ones' best in this company: as fast alone, a variant may bear others beside it worse.
            together = [[c.finalists[min(i, len(c.finalists) - 1)] for c in apart] for i in range(3)]
            runs = []
            for variants in together:
                calls = [c.calls(v) for c, v in zip(apart, variants, strict=True)]
                runs.append(of_ours(device, [call for turn in zip(*calls, strict=True) for call in turn]))
            one, *each = medians([fused.run(), *runs])
            many = min(each) / copies
            rows.append(
                {
                    "n": widths,
                    "storage": storage,
                    "fused": one,
                    "separate": many,
                    "variant": fused.variant,
                    "of": together[each.index(min(each))],
                }
            )
            print(
                f"n={'+'.join(map(str, widths)):14s}{storage:10s} fused {one:7.2f} us, separate {many:7.2f} us{many / one:6.2f}  {fused.variant}",
                flush=True,
            )
    return rows


def compare_steps(device: metalmm.Device) -> dict[str, Any]:
    runs, found = [], dict[str, Any]()
    for storage in ("dense", "q8_0", "q4_0"):
        layer = [Contender(device, shape_of(spec, storage)) for spec in LAYER]
        own = [(c, c.calls(), len(c.inputs.weights)) for c in layer]
        calls = [calls[i % count] for i in range(LAYERS) for _, calls, count in own] + Contender(device, shape_of(HEAD, storage)).calls()[
            :1
        ]
        size = sum(c.shape.spec.b_bytes for c in layer) * LAYERS + shape_of(HEAD, storage).spec.b_bytes
        runs.append(of_ours(device, calls))
        found[storage] = {"bytes": size, "matmuls": len(calls), "variants": [c.variant for c in layer]}
    for storage, us in zip(found, times := medians(runs), strict=True):
        found[storage] |= {"us": us, "ratio": times[0] / us}
        size = found[storage]["bytes"]
        print(
            f"step in {storage:10s}{us:9.0f} us{times[0] / us:7.2f}  {found[storage]['matmuls']} matmuls, {size / 1e6:.0f} MB, {size / us / 1e3:.0f} GB/s"
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--skip", default="", help="of shapes, fused, step")
    args = parser.parse_args()
    skipped = args.skip.split(",")
    device = metalmm.Device()
    copy = measured_copy(device)
    print(f"{runner.describe(device, runner.environment(device))}; metalmm {metalmm.__version__}; a copy moves {copy:.0f} GB/s")
    print("ratio: to float16 of the same table; percent: of the copy")
    result: dict[str, Any] = {"device": {k: str(v) for k, v in device.info.items()}, "copy_gbps": copy}
    if "shapes" not in skipped:
        result["shapes"] = compare_shapes(device, copy)
    if "fused" not in skipped:
        result["fused"] = compare_fused(device)
    if "step" not in skipped:
        result["step"] = compare_steps(device)
    if args.json:
        args.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
