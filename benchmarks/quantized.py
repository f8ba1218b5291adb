#!/usr/bin/env python3
"""Quantized weights against our own float16, fused calls against separate ones, and a decode step in both: times are the device's.

Each contender is one recording in which weights take turns in copies, together past the last-level cache, every copy read once before the
first comes again; all calls of a recording write one result, so that each waits for the one before it. On a GPU a recording has 48 calls or
more, which share the cost of its start. A contender is the fastest of the strategies' points that take the operation, each checked against
float64 first, the best three measured by turns; it is then measured anew, by turns with what it is compared with. Of separate calls, which
write a result each, every combination of the best three is measured, and the least counts. 256 copies at most: at n = 128 they stay in a large cache. The step: 24 layers of q-k-v, scores at 95
positions, heads, o, gate and up, down, and the head of Qwen2.5-0.5B, each reading what the one before it wrote; attention stays float16.
Its variants are those with which the step itself takes least: one shape after the other, twice, of the best twelve of each alone, then two
that follow each other in a layer, of the best six of each, none twice as slow as its first (float16 has the most that are left out), then
one after the other again; and all that four times (device cpu: once), once from the best of each alone and else from some of the best six,
drawn. Or the best of each alone, if with them it takes less.

    METALMM_DEVICE=cuda python benchmarks/quantized.py [--json FILE] [--skip shapes,fused,step]
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import os
import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import metalmm
import numpy as np
from metalmm import _core, manifest
from metalmm.bench import runner, sizes
from metalmm.bench.copy import measured_copy
from metalmm.quantized import FORMATS, parts_of_storage
from peers_cuda import CALLS, LAYERS, REPLAYS, activations, chain, medians, of_ours

FAMILIES = {s.family for s in manifest.strategies(manifest.BUILTIN)}
STORAGES = ("dense", "q8_0", "q8_0:canonical", "affine8", "q4_0", "affine4")
LAYER = ("n=1152 k=896 {s}", "batch=14 n=95 k=64 nt", "batch=14 n=64 k=95", "n=896 k=896 {s}", "n=9728 k=896 {s}", "n=896 k=4864 {s}")
HEAD = "n=151936 k=896 {s}"
STARTS = 4  # of the search of a step's variants


def shape_of(spec: str, storage: str = "dense") -> sizes.Shape:
    return sizes.from_specs([spec.format(s="nt" if storage == "dense" else storage)]).shapes[0]


class Contender:
    """The fastest variant for a shape, and its recording over the copies of the weights."""

    def __init__(self, device: metalmm.Device, shape: sizes.Shape, copies: int | None = None) -> None:
        self.shape, self.device = shape, device
        self.inputs = runner.Inputs(device, shape, 0, copies or max(3, min(256, runner.cold_copies(shape, device))))
        self.timed = dict[str, float]()  # microseconds, of a few replays
        candidates = [v for v in metalmm.variants(shape.spec, device=device, enabled=True) if v.family in FAMILIES and v.family != "gemm"]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(lambda v: _core._prepare_pipeline(device, v, shape.spec), candidates))
        for v in candidates:
            if wrong := self.inputs.judge(device, v):
                print(f"{shape.short}: {v} is WRONG: {wrong}")
            else:
                self.timed[str(v)] = medians([self.run(v)], 5)[0]
        self.ranked = sorted(self.timed, key=self.timed.__getitem__)
        # A few replays do not tell the first three apart.
        self.finalists = self.ranked[:3]
        times = medians([self.run(v) for v in self.finalists])
        self.variant = self.finalists[times.index(min(times))]

    def calls(self, variant: str | None = None) -> list[Any]:
        v = next(v for v in metalmm.variants() if v == (variant or self.variant))
        weights = self.inputs.weights
        turns = 1 if self.device.name == "cpu" else -(-CALLS // len(weights))
        return [self.inputs.prepare(self.device, v, w) for w in weights] * turns

    def run(self, variant: str | None = None) -> Callable[[], float]:
        calls = self.calls(variant)
        run = of_ours(self.device, calls)
        return lambda: run() / len(calls)


def of_mlx(contender: Contender, storage: str) -> Callable[[], float]:
    """Seconds of one call of mlx's own on the CPU, over copies of the same weights. Raises ImportError."""
    import mlx.core as mx

    mx.set_default_device(mx.cpu)
    x = mx.array(contender.inputs.a.numpy())
    if storage == "dense":
        weights = [mx.array(w.numpy()) for w in contender.inputs.weights]
        calls = [lambda w=w: mx.eval(mx.matmul(x, w.T)) for w in weights]  # type: ignore[misc]
    else:
        form, group, _ = parts_of_storage(storage)
        options = {"transpose": True, "group_size": group, "bits": FORMATS[form].bits}
        weights = [[mx.array(part) for part in w.numpy().to_mlx()] for w in contender.inputs.weights]
        calls = [lambda w=w: mx.eval(mx.quantized_matmul(x, *w, **options)) for w in weights]  # type: ignore[misc]
    mx.eval(weights)

    def run() -> float:
        begin = time.perf_counter()
        for call in calls:
            call()
        return (time.perf_counter() - begin) / len(calls)

    return run


def compare_shapes(device: metalmm.Device, copy: float) -> list[dict[str, Any]]:
    rows = []
    has_mlx = device.name == "cpu" and importlib.util.find_spec("mlx") is not None
    for m, n in itertools.product((1,) if device.name == "cpu" else (1, 2, 8), (9728, 151936)):
        contenders = [Contender(device, shape_of(f"m={m} n={n} k=896 {{s}}", s)) for s in STORAGES]
        for storage, c, us in zip(STORAGES, contenders, times := medians([c.run() for c in contenders]), strict=True):
            gbps = c.shape.spec.b_bytes / us / 1e3
            row = {"m": m, "n": n, "k": 896, "storage": storage, "us": us, "ratio": times[0] / us, "gbps": gbps, "variant": c.variant}
            rows.append(row)
            print(
                f"{m} x {n} x 896 {storage:16s}{us:9.2f} us{times[0] / us:7.2f}{gbps:8.0f} GB/s{gbps / copy:6.0%}  {c.variant}", flush=True
            )
        for storage, c in zip(STORAGES, contenders, strict=True):
            if has_mlx and n == 9728 and storage in ("dense", "affine8", "affine4"):
                ours, theirs = medians([c.run(), of_mlx(c, storage)], 3)  # it takes half a second for each call
                rows.append({"m": m, "n": n, "k": 896, "storage": storage, "us": theirs, "ratio": theirs / ours, "variant": "mlx"})
                print(
                    f"{m} x {n} x 896 {storage:16s}{theirs:9.2f} us  mlx on the CPU; ours by turns {ours:.2f}, {theirs / ours:.2f}",
                    flush=True,
                )
    return rows


def compare_fused(device: metalmm.Device) -> list[dict[str, Any]]:
    rows = []
    for widths in ((4864, 4864), (896, 128, 128)):
        for storage in ("dense", "q8_0", "q4_0", "affine8"):
            shapes = [shape_of(f"n={n} k=896 {{s}}", storage) for n in widths]
            copies = min(256, max(runner.cold_copies(s, device) for s in shapes))  # of both
            fused = Contender(device, shape_of(f"n={'+'.join(map(str, widths))} k=896 {{s}}", storage), copies)
            apart = [Contender(device, s, copies) for s in shapes]
            # Each combination of the separate ones' three best: as fast alone, one may bear others beside it worse.
            best = {c.shape.n: c.finalists for c in apart}
            together = [dict(zip(best, variants, strict=True)) for variants in itertools.product(*best.values())]
            runs = []
            for variant in together:
                turns = list(zip(*(c.calls(variant[c.shape.n]) for c in apart), strict=True))
                runs.append(of_ours(device, [call for turn in turns for call in turn]))
            one, *each = medians([fused.run(), *runs])
            many = min(each) / len(turns)
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


def best_together(shapes: list[Contender], recorded: Callable[[Sequence[str]], Callable[[], float]]) -> list[str]:
    """A variant for each shape, with which `recorded` takes least of those that were tried: what follows what matters."""

    def best(i: int, most: int) -> list[str]:
        timed, ranked = shapes[i].timed, shapes[i].ranked
        return [v for v in ranked[:most] if timed[v] <= 2 * timed[ranked[0]]]

    draw, each = random.Random(0), range(len(shapes))
    singly = [((i,), 12) for i in each]
    rounds = [*singly * 2, *(((i, (i + 1) % len(LAYER)), 6) for i in range(len(LAYER))), *singly]
    ends = []
    for start in range(1 if shapes[0].device.name == "cpu" else STARTS):
        picked = [draw.choice(best(i, 6)) if start else shapes[i].variant for i in each]
        for together, most in rounds:
            tried = []
            for choice in itertools.product(*(dict.fromkeys([picked[i], *best(i, most)]) for i in together)):  # the first: what is picked
                other = dict(zip(together, choice, strict=True))
                tried.append([other.get(i, v) for i, v in enumerate(picked)])
            times = medians([recorded(t) for t in tried], REPLAYS // 2)
            if min(times) < 0.995 * times[0]:  # less is noise
                picked = tried[times.index(min(times))]
        ends.append(picked)
    times = medians([recorded(end) for end in ends])
    return ends[times.index(min(times))]


def compare_steps(device: metalmm.Device) -> dict[str, Any]:
    runs, found = [], dict[str, Any]()
    x = np.random.default_rng(0).standard_normal((1, 896)).astype(np.float16)
    for storage in ("dense", "q8_0", "q4_0"):
        shapes = [Contender(device, shape_of(spec, storage)) for spec in (*LAYER, HEAD)]
        between = activations(device, x)

        def recorded(picked: Sequence[str], shapes: Any = shapes, between: Any = between) -> Callable[[], float]:
            calls: list[Any] = []

            def matmul(which: int, a: Any, layer: int, out: Any) -> None:
                c = shapes[which]
                weights = c.inputs.weights[layer % len(c.inputs.weights)]
                calls.append(device.prepare(picked[which], a, weights, transpose_b=c.shape.transpose_b, out=out))

            chain(matmul, between)
            return of_ours(device, calls)

        picked = best_together(shapes, recorded)
        size = sum(c.shape.spec.b_bytes for c in shapes[:-1]) * LAYERS + shapes[-1].shape.spec.b_bytes
        alone = [c.variant for c in shapes]
        runs += [recorded(picked), recorded(alone)]
        found[storage] = {"bytes": size, "matmuls": len(LAYER) * LAYERS + 1, "variants": picked, "alone": alone}
    times = medians(runs)
    best = [min(pair) for pair in zip(times[::2], times[1::2], strict=True)]
    for us, us_of_alone, (storage, step) in zip(best, times[1::2], found.items(), strict=True):
        step |= {"us": us, "ratio": best[0] / us, "us_of_alone": us_of_alone}
        if us == us_of_alone:
            step["variants"] = step["alone"]
        print(
            f"step in {storage:10s}{us:9.0f} us{step['ratio']:7.2f}  {step['matmuls']} matmuls, {step['bytes'] / 1e6:.0f} MB, "
            f"{step['bytes'] / us / 1e3:.0f} GB/s; with the best of each alone {us_of_alone:.0f} us"
        )
        print("  " + " ".join(dict.fromkeys(step["variants"])))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--skip", default="", help="some of shapes, fused, step, with commas; on device cpu each takes minutes")
    args = parser.parse_args()
    skipped = args.skip.split(",") if args.skip else []
    if unknown := set(skipped) - {"shapes", "fused", "step"}:
        parser.error(f"--skip {', '.join(sorted(unknown))}: it takes some of shapes, fused, step")
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
