#!/usr/bin/env python3
"""On an NVIDIA GPU: our variants against cuBLAS (torch), shape by shape, and the matmuls of a decode step; times are the GPU's.

Each contender runs as one CUDA graph: ours a recording, torch's a torch.cuda.CUDAGraph of torch.matmul(out=) and torch.addmm(out=). The
weights are copies by turns, every copy read once before the first comes again, together far past the second-level cache (but of the small
matrices of a batch, 256 of which stay in it); each contender has its own. Two columns of ours: `chain`, all calls write one result, so that each
waits for the one before it, as a model's layers do; `apart`, each has a result of its own, and a recording lets calls that share nothing run
beside each other, which a graph captured from one stream does not. `baseline` is blas/baseline in a recording of ours: cuBLAS without torch.
`no overlap` is the chain on Device("cuda", overlap=False): kernels alone, without programmatic launches. A copy is torch's own, read and
written bytes. Results are checked against float64. cuBLAS, `baseline`, `chain` and those with a bias are measured by
turns, in an order that changes.

    python benchmarks/peers_cuda.py [--only REGEX] [--shapes 1,3] [--json FILE] [--skip shapes,step,host]
"""

from __future__ import annotations

import argparse
import json
import random
import re
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import metalmm
import numpy as np
from metalmm import kernel_source, manifest, nvrtc
from metalmm.backends import cuda

REPLAYS, SCREENING, FINALISTS = 25, 6, 4
CALLS = 48  # of a recording at least, which share the cost of its start
LAYERS, HEADS, POSITIONS = 24, 14, 95  # Qwen2.5-0.5B


@dataclass(frozen=True)
class Shape:
    m: int
    n: int
    k: int
    layout: str = "nt"
    batch: int = 1

    def __str__(self) -> str:
        return (f"{self.batch} x " if self.batch > 1 else "") + f"{self.m} x {self.n} x {self.k} {self.layout}"

    @property
    def spec(self) -> metalmm.MatmulSpec:
        return metalmm.MatmulSpec(m=self.m, n=self.n, k=self.k, batch=self.batch, transpose_b=self.layout == "nt")


SHAPES = [
    *(Shape(1, n, k) for n, k in ((9728, 896), (896, 4864), (896, 896), (1152, 896), (151936, 896))),
    Shape(1, 1152, 896, "nn"),
    Shape(1, 64, POSITIONS, "nn", HEADS),
    Shape(1, 91, 64, "nt", HEADS),
    *(Shape(m, n, 896) for n in (9728, 151936) for m in (2, 4, 8)),
]
Calls = list[Callable[[], object]]


def medians(contenders: Sequence[Callable[[], float]], replays: int = REPLAYS) -> list[float]:
    """Microseconds of each, by turns, none always after the same other; the first three do not count."""
    samples: list[list[float]] = [[] for _ in contenders]
    order, draw = list(range(len(contenders))), random.Random(0)
    for _ in range(replays + 3):
        draw.shuffle(order)
        for i in order:
            samples[i].append(contenders[i]() * 1e6)
    return [statistics.median(s[3:]) for s in samples]


def of_torch(calls: Calls) -> Callable[[], float]:
    """Seconds of one replay of a graph of the calls."""
    import torch

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls[:3]:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for call in calls:
            call()

    def run() -> float:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) * 1e-3

    return run


def of_ours(device: metalmm.Device, calls: list[Any]) -> Callable[[], float]:
    batch = device.batch()
    for call in calls:
        batch.add(call)
    recording = batch.record()

    def run() -> float:
        recording.replay()
        recording.wait()
        return recording.timing.device or 0.0

    return run


def copy_gbps() -> float:
    import torch

    x = torch.empty(1 << 30, dtype=torch.float16, device="cuda").normal_()
    y, times = torch.empty_like(x), []
    for _ in range(8):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        y.copy_(x)
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e-3)
    return 2 * x.nbytes / statistics.median(times) / 1e9


def _compile(job: tuple[kernel_source.KernelText, str, int]) -> None:
    text, kernel, capability = job
    cuda.build(text, kernel, {}, capability)


def compile_all(capability: Any, calls: Iterable[tuple[metalmm.Variant, metalmm.MatmulSpec]]) -> None:
    """Every instance that they ask for, on all cores, into the cache."""
    jobs: dict[tuple[kernel_source.KernelText, str, int], None] = {}
    for v, spec in calls:
        _, text, kernel = manifest.kernel_text(v, manifest._core._specialization(spec))
        if text:
            jobs[text, kernel, int(capability)] = None
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        list(pool.map(_compile, jobs, chunksize=2))


def candidates(shape: Shape, device: metalmm.Device, only: str) -> list[metalmm.Variant]:
    return [v for v in metalmm.variants(shape.spec, device=device) if v.kernel and re.search(only, v)]


def measured(shape: Shape, device: metalmm.Device, alone: metalmm.Device, only: str, rng: np.random.Generator) -> dict[str, Any]:
    import torch

    lead = (shape.batch,) if shape.batch > 1 else ()
    is_nt = shape.layout == "nt"
    a = rng.standard_normal((*lead, shape.m, shape.k)).astype(np.float16)
    b = rng.standard_normal((*lead, shape.n, shape.k) if is_nt else (*lead, shape.k, shape.n)).astype(np.float16)
    bias = rng.standard_normal(shape.n).astype(np.float16)
    count = max(3, min(256, (512 << 20) // b.nbytes + 1))
    turns = -(-CALLS // count)

    ta, t_bias = torch.from_numpy(a).cuda(), torch.from_numpy(bias).cuda()
    weights = [torch.from_numpy(b).cuda() for _ in range(count)]
    seen = [w.transpose(-1, -2) if is_nt else w for w in weights] * turns
    out = torch.empty((*lead, shape.m, shape.n), dtype=torch.float16, device="cuda")
    plain = of_torch([lambda w=w: torch.matmul(ta, w, out=out) for w in seen])
    biased = of_torch([lambda w=w: torch.addmm(t_bias, ta, w, out=out) for w in seen]) if not lead else None
    found: dict[str, Any] = {"shape": str(shape), "bytes": b.nbytes, "copies": count}

    held: dict[str, Any] = {}

    def place(on: metalmm.Device) -> None:
        held.clear()
        held.update(a=on.array(a), bias=on.array(bias), b=[on.array(b) for _ in range(count)], out=on.empty(out.shape))

    def recorded(on: metalmm.Device, v: str, outs: list[Any] | None = None, **options: Any) -> Callable[[], float]:
        outs = outs or [held["out"]]
        calls = [
            on.prepare(v, held["a"], w, transpose_b=is_nt, out=outs[i % len(outs)], **options) for i, w in enumerate(held["b"] * turns)
        ]
        return of_ours(on, calls)

    def ours(on: metalmm.Device, v: str, replays: int, outs: list[Any] | None = None, **options: Any) -> float:
        return medians([recorded(on, v, outs, **options)], replays)[0] / (count * turns)

    place(device)
    reference, bound = metalmm.reference(a, b, transpose_b=is_nt), metalmm.error_bound(a, b, transpose_b=is_nt)
    right = []
    for v in candidates(shape, device, only):
        result = np.asarray(metalmm.matmul(v, held["a"], held["b"][0], transpose_b=is_nt, out=held["out"]))
        if (abs(result - reference) <= bound).all():
            right.append(v)
        else:
            print(f"{shape}: {v} is WRONG")
    screened = sorted((ours(device, v, SCREENING), str(v)) for v in right)
    found["screened"] = [(v, us) for us, v in screened]
    best = [v for _, v in screened[:FINALISTS]]
    pick = {v: ours(device, v, REPLAYS) for v in best}
    winner = min(pick, key=pick.__getitem__)
    contenders = {"cublas": plain, "chain": recorded(device, winner), "chain_bias": recorded(device, winner, bias=held["bias"])}
    contenders |= {"cublas_bias": biased} if biased else {}
    contenders |= {"baseline": recorded(device, "blas/baseline")} if nvrtc.find_cublas() else {}
    times = medians(list(contenders.values()))
    found |= {"cublas_bias": None, "variant": winner, **{name: us / len(seen) for name, us in zip(contenders, times, strict=True)}}
    del weights, seen, plain, biased, contenders
    torch.cuda.empty_cache()
    own = [device.empty(out.shape) for _ in range(len(held["b"]) * turns)]
    apart = {v: ours(device, v, REPLAYS, own) for v in best}
    found["apart_variant"] = min(apart, key=apart.__getitem__)
    found["apart"] = apart[found["apart_variant"]]
    assert all((abs(np.asarray(o) - reference) <= bound).all() for o in own), f"{shape}: wrong beside each other"
    place(alone)
    alone_us = {v: ours(alone, v, REPLAYS) for v in best}
    found["no_overlap"] = min(alone_us.values())
    return found


STEP_SIZES = {"qkv": (1, 1152), "scores": (HEADS, 1, POSITIONS), "heads": (HEADS, 1, 64), "up": (1, 9728), "logits": (1, 151936)}


def chain(matmul: Callable[[int, Any, int, Any], None], act: dict[str, Any]) -> None:
    """The matmuls of a decode step, each with what the one before it wrote: matmul(which of the seven shapes, a, layer, out)."""
    for layer in range(LAYERS):
        matmul(0, act["x"], layer, act["qkv"])
        matmul(1, act["q"], layer, act["scores"])
        matmul(2, act["scores"], layer, act["heads"])
        matmul(3, act["attention"], layer, act["x"])
        matmul(4, act["x"], layer, act["up"])
        matmul(5, act["gated"], layer, act["x"])
    matmul(6, act["x"], 0, act["logits"])


def activations(device: metalmm.Device, x: Any) -> dict[str, Any]:
    """What chain() takes, on a device."""
    act = {name: device.empty(size) for name, size in STEP_SIZES.items()} | {"x": device.array(x)}
    return act | {
        "q": act["qkv"][:, :896].reshape((HEADS, 1, 64)),
        "attention": act["heads"].reshape((1, 896)),
        "gated": act["up"][:, :4864],
    }


def step(device: metalmm.Device, picked: dict[str, str], rng: np.random.Generator) -> dict[str, Any]:
    """All matmuls of a decode step, each reading what the one before it wrote."""
    import torch

    shapes = [
        Shape(1, 1152, 896), Shape(1, POSITIONS, 64, "nt", HEADS), Shape(1, 64, POSITIONS, "nn", HEADS),
        Shape(1, 896, 896), Shape(1, 9728, 896), Shape(1, 896, 4864), Shape(1, 151936, 896),
    ]  # fmt: skip

    def weights(s: Shape) -> Any:
        lead = (s.batch,) if s.batch > 1 else ()
        x = rng.standard_normal((*lead, s.n, s.k) if s.layout == "nt" else (*lead, s.k, s.n), dtype=np.float32)
        return (x / np.sqrt(s.k)).astype(np.float16)

    host = [weights(s) for s in shapes]
    x = rng.standard_normal((1, 896)).astype(np.float16)

    # torch
    tw = [[torch.from_numpy(w).cuda() for _ in range(LAYERS if i < 6 else 1)] for i, w in enumerate(host)]
    ta = {name: torch.zeros(size, dtype=torch.float16, device="cuda") for name, size in STEP_SIZES.items()} | {
        "x": torch.from_numpy(x).cuda()
    }
    ta |= {"q": ta["qkv"][:, :896].view(HEADS, 1, 64), "attention": ta["heads"].view(1, 896), "gated": ta["up"][:, :4864]}
    calls: Calls = []

    def with_torch(which: int, a: Any, layer: int, out: Any) -> None:
        w = tw[which][layer]
        w = w.transpose(-1, -2) if shapes[which].layout == "nt" else w
        calls.append(lambda: torch.matmul(a, w, out=out))

    chain(with_torch, ta)
    theirs = of_torch(calls)
    # ours
    ow = [[device.array(w) for _ in range(LAYERS if i < 6 else 1)] for i, w in enumerate(host)]
    oa = activations(device, x)
    prepared: list[Any] = []

    def with_ours(which: int, a: Any, layer: int, out: Any) -> None:
        s = shapes[which]
        v = picked.get(str(s)) or metalmm.explain(s.spec, device=device)[0]
        prepared.append(device.prepare(v, a, ow[which][layer], transpose_b=s.layout == "nt", out=out))

    chain(with_ours, oa)
    ours = of_ours(device, prepared)
    size = sum(w.nbytes * (LAYERS if i < 6 else 1) for i, w in enumerate(host))
    return {"matmuls": len(prepared), "bytes": size, **dict(zip(("torch", "ours"), medians([theirs, ours]), strict=True))}


def host(device: metalmm.Device, rng: np.random.Generator) -> dict[str, float]:
    """Microseconds a call of 64 x 64, whose kernels take next to nothing: from the call until the result is there, and of 64 at once."""
    import torch

    a, b = rng.standard_normal((1, 64)).astype(np.float16), rng.standard_normal((64, 64)).astype(np.float16)
    ta, tb = torch.from_numpy(a).cuda(), torch.from_numpy(b).cuda().T
    to = torch.empty((1, 64), dtype=torch.float16, device="cuda")
    oa, ob, oo = device.array(a), device.array(b), device.empty((1, 64))
    call = device.prepare("gemv_nt_octet/c2_d4_tg64", oa, ob, transpose_b=True, out=oo)

    def batch() -> None:
        with device.batch() as made:
            for _ in range(64):
                made.add(call)

    def many() -> None:
        for _ in range(64):
            torch.matmul(ta, tb, out=to)
        torch.cuda.synchronize()

    recorded = device.batch()
    for _ in range(64):
        recorded.add(call)
    recording = recorded.record()

    def replay() -> None:
        recording.replay()
        recording.wait()

    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(64):
            torch.matmul(ta, tb, out=to)

    def one() -> None:
        torch.matmul(ta, tb, out=to)
        torch.cuda.synchronize()

    def launch() -> None:
        graph.replay()
        torch.cuda.synchronize()

    def issue() -> None:
        torch.matmul(ta, tb, out=to)

    timed: dict[str, Callable[[], object]] = {
        "prepared()": call, "torch.matmul(out=), synchronized": one, "torch.matmul(out=), not waited for": issue,
        "64 prepared in a batch": batch, "64 torch.matmul(out=), one synchronize": many, "replay of 64": replay, "CUDAGraph of 64": launch,
    }  # fmt: skip
    samples: dict[str, list[float]] = {name: [] for name in timed}
    for _ in range(300):
        for name, f in timed.items():
            start = time.perf_counter()
            f()
            samples[name].append(time.perf_counter() - start)
        torch.cuda.synchronize()
    found = {name: statistics.median(s[20:]) * 1e6 for name, s in samples.items()}
    call()
    return {**found, "the kernel's own time in prepared()": (call.device_seconds or 0.0) * 1e6}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="_v[67]/|small_m/", help="ids of ours that match this regular expression alone")
    parser.add_argument("--shapes", help="numbers, from 1; default: all")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--skip", default="", help="of shapes, step, host")
    args = parser.parse_args()
    chosen = [SHAPES[int(i) - 1] for i in args.shapes.split(",")] if args.shapes else SHAPES
    device, alone, rng = metalmm.Device("cuda"), metalmm.Device("cuda", overlap=False), np.random.default_rng(0)
    skipped = args.skip.split(",")
    compile_all(device.info["compute_capability"], [(v, shape.spec) for shape in SHAPES for v in candidates(shape, device, args.only)])
    copy = copy_gbps()
    print(f"{device.info['name']}, driver {device.info['driver']}; {metalmm.__version__}; a copy moves {copy:.0f} GB/s")
    result: dict[str, Any] = {"device": device.info, "copy_gbps": copy, "shapes": []}
    picked: dict[str, str] = {}
    print(
        f"{'float16':24s}{'cuBLAS':>8s}{'baseline':>9s}{'chain':>8s}{'ratio':>7s}{'GB/s':>7s}{'copy':>6s}{'bias':>7s}{'no overlap':>12s}{'apart':>8s}{'ratio':>7s}  variants"
    )
    for shape in chosen if "shapes" not in skipped else []:
        r = measured(shape, device, alone, args.only, rng)
        result["shapes"].append(r)
        picked[str(shape)] = r["variant"]
        gbps = r["bytes"] / r["chain"] / 1e3
        print(
            f"{r['shape']:24s}{r['cublas']:8.2f}{r.get('baseline', float('nan')):9.2f}{r['chain']:8.2f}{r['cublas'] / r['chain']:7.2f}{gbps:7.0f}{gbps / copy:6.0%}"
            f"{r['chain_bias'] / r['chain'] - 1:+7.1%}{r['cublas'] / r['no_overlap']:12.2f}{r['apart']:8.2f}{r['cublas'] / r['apart']:7.2f}"
            f"  {r['variant']}; {r['apart_variant'].partition('/')[2]}",
            flush=True,
        )
    picked[str(Shape(1, POSITIONS, 64, "nt", HEADS))] = picked.get(str(Shape(1, 91, 64, "nt", HEADS)), "gemv_nt_octet/tg128")
    if "step" not in skipped:
        result["step"] = s = step(device, picked, rng)
        print(
            f"decode step, {s['matmuls']} matmuls, {s['bytes'] / 1e6:.0f} MB: torch CUDAGraph {s['torch']:.0f} us, one recording {s['ours']:.0f} us,"
            f" ratio {s['torch'] / s['ours']:.2f}, {s['bytes'] / s['ours'] / 1e3:.0f} GB/s"
        )
    if "host" not in skipped:
        result["host"] = host(device, rng)
        for name, us in result["host"].items():
            print(f"{name:42s}{us:9.2f} us")
    if args.json:
        args.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
