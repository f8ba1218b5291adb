#!/usr/bin/env python3
"""The five m=1 shapes of the profile, plain and with bias: the best of our strategies and of the harness's families on this device against NumPy
float32, torch float16 and mlx float16 on the CPU, each where installed.

Each library has its turn alone, in a process of its own: OpenBLAS's threads go on spinning after a call. Two tables:
hot, the same weights call after call; cold, copies of the weights by turns, together past the last-level cache as far as --memory
goes, every copy read before the first comes again. NumPy reads float32, twice the bytes of the others, and adds a bias in a second pass;
torch and mlx read float16. Weights are converted and placed beforehand; all but mlx write into one result again and again. Huge pages:
our device asks for them for arrays of 1 MB and more, NumPy from 4 MB on (its copies and torch's lie in one array, so they have them), mlx
not. Each has --rounds turns, in changing order, and the least median counts, for another process that takes a core makes spinning threads
wait for whole ticks. Our ids are screened with a few calls in the first round, the three best of each group measured, and the one that won
is measured anew in every round, like the peers. With METALMM_DEVICE=cuda it is benchmarks/peers_cuda.py, with that one's options.

    python benchmarks/peers.py [--threads 2] [--iters 60] [--shapes 1,3] [--memory 4] [--rounds 2] [--all]
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

if os.environ.get("METALMM_DEVICE") == "cuda":
    os.execv(sys.executable, [sys.executable, str(Path(__file__).with_name("peers_cuda.py")), *sys.argv[1:]])

ARGS = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
ARGS.add_argument("--threads", type=int, default=2)
ARGS.add_argument("--iters", type=int, default=60, help="calls a median is of, at least")
ARGS.add_argument("--shapes", help="numbers, or words of a shape, as for hot_shapes.py; default: the five")
ARGS.add_argument("--memory", type=float, default=4.0, help="GB of copies at most, for each library in its turn")
ARGS.add_argument("--rounds", type=int, default=2, help="turns of each library, one after another's; the least median of them counts")
ARGS.add_argument("--no-bias", action="store_true", help="plain products alone")
ARGS.add_argument("--only", help="ids of ours that match this regular expression alone")
ARGS.add_argument("--all", action="store_true", help="print every variant as it was screened, not the best alone")
ARGS.add_argument("--turn", help=argparse.SUPPRESS)  # [library, shape, bias, ids]: measures, prints JSON
ARGS = ARGS.parse_args()
for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "METALMM_CPU_THREADS"):
    os.environ[name] = str(ARGS.threads)  # before the libraries read them

import metalmm  # noqa: E402
import numpy as np  # noqa: E402
from metalmm.bench import runner, sizes  # noqa: E402

Call = Callable[[], object]
SCREENING, MEASURING, FINALISTS = (8, 0.02), 0.3, 3  # calls and seconds; seconds; ids a table


def cache_bytes() -> int:
    """The last-level cache, as the kernel tells; 32 MB where it does not."""
    found = [32 << 20]
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        if size := re.fullmatch(r"(\d+)([KM])", path.read_text().strip()):
            found.append(int(size[1]) << (10 if size[2] == "K" else 20))
    return max(found[1:], default=found[0])


def copies(bytes_each: int) -> int:
    """Of the weights, so that together they are past the cache twice over, as far as memory goes."""
    return max(2, min(-(-2 * cache_bytes() // bytes_each), int(ARGS.memory * 1e9) // bytes_each))


def repeated(x: Any) -> Any:
    """Copies of x, in one array."""
    many = np.empty((copies(x.nbytes), *x.shape), x.dtype)
    many[:] = x
    return many


def median(calls: list[Call], iters: int, seconds: float, places: Iterator[int]) -> float:
    """Seconds a call; the calls by turns, at least so many and for so long, after half as long to wake threads up and place them.
    `places` goes on from one measurement to the next: none finds in the cache what the one before has just read."""
    samples, begin = [], time.perf_counter()
    now = begin
    while len(samples) < iters or now - begin < 1.5 * seconds:
        call = calls[next(places) % len(calls)]
        start = time.perf_counter()
        call()
        now = time.perf_counter()
        if start - begin >= 0.5 * seconds:
            samples.append(now - start)
    return statistics.median(samples)


def numpy_float32(a: Any, b: Any, bias: Any, transpose_b: bool) -> list[Call]:
    many = repeated(b.astype(np.float32))
    a32, out = a.astype(np.float32), np.empty((1, b.shape[0 if transpose_b else 1]), np.float32)
    wide = [w.T if transpose_b else w for w in many]
    if bias is None:
        return [lambda w=w: np.matmul(a32, w, out=out) for w in wide]
    bias32 = bias.astype(np.float32)
    return [lambda w=w: np.add(np.matmul(a32, w, out=out), bias32, out=out) for w in wide]


def torch_float16(a: Any, b: Any, bias: Any, transpose_b: bool) -> list[Call]:
    import torch

    torch.set_num_threads(ARGS.threads)
    ta, t_bias = torch.from_numpy(a), None if bias is None else torch.from_numpy(bias)
    out = torch.empty((1, b.shape[0 if transpose_b else 1]), dtype=torch.float16)
    wide = [w.T if transpose_b else w for w in torch.from_numpy(repeated(b))]
    if t_bias is None:
        return [lambda w=w: torch.matmul(ta, w, out=out) for w in wide]
    return [lambda w=w: torch.addmm(t_bias, ta, w, out=out) for w in wide]


def mlx_float16(a: Any, b: Any, bias: Any, transpose_b: bool) -> list[Call]:
    import mlx.core as mx

    mx.set_default_device(mx.cpu)
    ma, m_bias = mx.array(a), None if bias is None else mx.array(bias)
    wide = [mx.array(b) for _ in range(copies(b.nbytes))]
    mx.eval(wide)
    wide = [w.T if transpose_b else w for w in wide]
    if m_bias is None:
        return [lambda w=w: mx.eval(mx.matmul(ma, w)) for w in wide]
    return [lambda w=w: mx.eval(mx.addmm(m_bias, ma, w)) for w in wide]


PEERS = {"numpy float32": numpy_float32, "torch float16": torch_float16, "mlx float16": mlx_float16}


def ours(a: Any, b: Any, bias: Any, transpose_b: bool) -> dict[str, list[Call]]:
    device = metalmm.default_device()
    n, k = b.shape if transpose_b else b.shape[::-1]
    spec = metalmm.MatmulSpec(m=1, n=n, k=k, transpose_b=transpose_b, bias=bias is not None)
    found = [v for v in metalmm.variants(spec, device=device, enabled=True) if v.family.startswith("m1_optimized")]
    da, d_bias = device.array(a), None if bias is None else device.array(bias)
    out, wide = device.empty((1, n)), [device.array(b) for _ in range(copies(b.nbytes))]
    return {
        v: [device.prepare(v, da, w, bias=d_bias, transpose_b=transpose_b, out=out) for w in wide]
        for v in found
        if not ARGS.only or re.search(ARGS.only, v)
    }


def turn(library: str, shape: sizes.Shape, has_bias: bool, chosen: dict[str, list[str]]) -> dict[str, Any]:
    """Name -> [hot, cold] seconds; of ours [id, seconds] twice for each group, of the ids `chosen` or of those that this turn finds best,
    and under "screened" all of them."""
    rng, places = np.random.default_rng(0), itertools.count()

    def half(*size: int) -> Any:
        return rng.standard_normal(size, dtype=np.float32).astype(np.float16)

    def both(calls: list[Call]) -> list[float]:
        return [median(calls[:1], ARGS.iters, MEASURING, places), median(calls, ARGS.iters, MEASURING, places)]

    a, bias = half(1, shape.k), half(shape.n) if has_bias else None
    b = half(*((shape.n, shape.k) if shape.transpose_b else (shape.k, shape.n)))
    if library in PEERS:
        try:
            calls = PEERS[library](a, b, bias, shape.transpose_b)
        except ImportError:
            return {}
        both(calls)  # as long a start as ours have had
        return {library: both(calls)}
    mine = ours(a, b, bias, shape.transpose_b)
    screened: dict[str, list[float]] = {}
    if not chosen:
        screened = {v: [median(mine[v][:1], *SCREENING, places), median(mine[v], *SCREENING, places)] for v in mine}
        for group in ("ours", "older"):
            ids = [v for v in mine if v.startswith("gemv_") == (group == "ours")]
            for table in (0, 1):
                first = sorted(ids, key=lambda v: screened[v][table])[:FINALISTS]
                if seconds := {v: both(mine[v])[table] for v in first}:
                    chosen.setdefault(group, []).append(min(seconds, key=lambda v: seconds[v]))
    # Measured anew: the least of three is too good for the one that won.
    best = {group: [[v, both(mine[v])[table]] for table, v in enumerate(ids)] for group, ids in chosen.items()}
    return {**best, "screened": screened}


def in_its_own_process(library: str, shape: str, has_bias: bool, chosen: dict[str, list[str]]) -> dict[str, Any]:
    command = [sys.executable, *sys.argv, "--turn", json.dumps([library, shape, has_bias, chosen])]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def quieter(before: list[Any] | None, now: list[Any], key: Callable[[Any], float]) -> list[Any]:
    """Of two rounds the faster, table by table."""
    return now if before is None else [min(pair, key=key) for pair in zip(before, now, strict=True)]


def show(results: list[tuple[str, sizes.Shape, dict[str, Any], dict[str, Any]]], table: int) -> float:
    print(("hot: one array of weights, back to back", "cold: copies of the weights by turns")[table])
    print(
        f"| m=1 shape | ours, ms (GB/s of half weights) | harness, ms | {', '.join(f'{p}' for p in PEERS)}, ms | ours against the fastest |\n"
        + "|---" * 5
        + "|"
    )
    worst = float("inf")
    for title, shape, mine, peers in results:
        (best, seconds), older = mine["ours"][table], mine.get("older", [["", float("nan")]] * 2)[table][1]
        theirs = [f"{peers[p][table] * 1e3:.3f}" if p in peers else "-" for p in PEERS]
        ratio = min(t[table] for t in peers.values()) / seconds
        worst = min(worst, ratio)
        rate = 2 * shape.n * shape.k / seconds / 1e9
        print(f"| {title} | {seconds * 1e3:.3f} ({rate:.1f}) {best} | {older * 1e3:.3f} | {', '.join(theirs)} | {ratio:.2f} |")
        if ARGS.all:
            for v, t in sorted(mine["screened"].items(), key=lambda item: item[1][table]):
                print(f"    {v:56s} {t[table] * 1e3:9.3f} ms")
    print(f"least ratio of ours to the fastest peer: {worst:.2f}\n")
    return worst


def main() -> int:
    shapes = [s for s in sizes.load().shapes if s.batch == 1]
    shapes = sizes.select(shapes, ARGS.shapes)
    if ARGS.turn:
        library, wanted, has_bias, chosen = json.loads(ARGS.turn)
        print(json.dumps(turn(library, next(s for s in shapes if str(s) == wanted), has_bias, chosen)))
        return 0
    device = metalmm.default_device()
    print(f"{runner.describe(device, runner.environment(device))} threads={ARGS.threads} iters={ARGS.iters}")
    print(f"last-level cache: {cache_bytes() >> 20} MB; copies: twice that, at most {ARGS.memory:g} GB\n")
    results = []
    for shape in shapes:
        for has_bias in (False,) if ARGS.no_bias else (False, True):
            title = f"n={shape.n} k={shape.k} {shape.layout.upper()}{' bias' if has_bias else ''}"
            mine: dict[str, Any] = {}
            peers: dict[str, Any] = {}
            chosen: dict[str, list[str]] = {}
            for number in range(ARGS.rounds):
                for library in (["metalmm", *PEERS], [*PEERS, "metalmm"])[number % 2]:
                    found = in_its_own_process(library, str(shape), has_bias, chosen if library == "metalmm" else {})
                    if library == "metalmm":
                        mine["screened"] = found.pop("screened") or mine["screened"]
                        for group, pairs in found.items():
                            mine[group] = quieter(mine.get(group), pairs, key=lambda pair: pair[1])
                            chosen[group] = [v for v, _ in pairs]
                    else:
                        for name, seconds in found.items():
                            peers[name] = quieter(peers.get(name), seconds, key=lambda found: found)
            results.append((title, shape, mine, peers))
    for table in (0, 1):
        show(results, table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
