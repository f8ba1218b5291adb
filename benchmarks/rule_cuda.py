#!/usr/bin/env python3
"""On an NVIDIA GPU: what the rule behind "auto" takes against the best of many points, for sizes that --seed draws; times are the GPU's.

Sizes are drawn evenly in their logarithm: m of 1 to 2048, n and k of 256 to 16384, in multiples of 32; the storage evenly. The rule knows
no table of winners and no tuning file. Against it stand the points that ship and --budget others, drawn from the families' search
spaces (kernels/variants.toml), one of each in turn. Each is timed as in rows_cuda.py, in a row; the fastest five and the rule's once
more, by turns. Of each result up to three rows are checked against the bound.

--compile CAPABILITY compiles all kernels into the cache, such as 90 for an H200, on a machine without a GPU. METALMM_CACHE names the cache.

    python benchmarks/rule_cuda.py [--seed 1] [--count 24] [--budget 48] [--json FILE] [--compile CAPABILITY]
"""

from __future__ import annotations

import argparse
import json
import math
import random
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import metalmm
import numpy as np
from metalmm import manifest, tuning
from peers_cuda import compile_all, medians
from rows_cuda import checked, copies_on, turns_of

STORED = ("dense", "q8_0", "q4_0", "affine4")


def drawn(seed: int, count: int) -> list[metalmm.MatmulSpec]:
    draw = random.Random(seed)

    def size(least: int, most: int, step: int) -> int:
        return max(1, round(math.exp(draw.uniform(math.log(least), math.log(most))) / step)) * step

    sizes = [(size(1, 2048, 1), size(256, 16384, 32), size(256, 16384, 32), draw.choice(STORED)) for _ in range(count)]
    return [metalmm.MatmulSpec(m, n, k, transpose_b=True, b_storage=stored) for m, n, k, stored in sizes]


def points(device: metalmm.Device | str, spec: metalmm.MatmulSpec, budget: int, draw: random.Random) -> list[metalmm.Variant]:
    """Those that ship, and others of the families in turn."""
    found = {v: None for v in metalmm.variants(spec) if v.runs_on(device) and v.kernel}
    pools = []
    for s in manifest.strategies():
        names = [f"{s.family}/{s.name(values)}" for values in s.searched({"m": spec.m, "n": spec.n, "k": spec.k, "batch": 1})]
        pools.append(draw.sample(names, len(names)))
    most = len(found) + budget
    while len(found) < most and any(pools):
        for name in (pool.pop() for pool in pools if pool):
            if len(found) < most and tuning.usable(name, device, spec, libraries=False):
                found[manifest.get(name)] = None
    return list(found)


def measured(device: metalmm.Device, spec: metalmm.MatmulSpec, ids: list[metalmm.Variant], rule: str) -> dict[str, Any]:
    rng, dense = np.random.default_rng(0), spec.b_storage == "dense"
    w = (rng.standard_normal((spec.n, spec.k)) / 8).astype(np.float16)
    b = w if dense else metalmm.quantize(w, spec.b_storage)
    options = {"transpose_b": True} if dense else {}
    held = copies_on(device, b)
    calls = len(held) * turns_of(spec.m, len(held))
    a = rng.standard_normal((spec.m, spec.k)).astype(np.float16)
    some = sorted({0, spec.m // 2, spec.m - 1})
    expected = some, metalmm.reference(a[some], b, **options), metalmm.error_bound(a[some], b, **options)
    runs = {v: checked(device, v, a, held, expected, repr(spec), **options) for v in ids}
    first = {v: t / calls for v, t in zip(runs, medians(list(runs.values()), 2), strict=True)}
    last = list(dict.fromkeys([rule, *sorted(first, key=lambda v: first[v])[:5]]))
    us = {v: t / calls for v, t in zip(last, medians([runs[v] for v in last], 9), strict=True)}
    best = min(us, key=lambda v: us[v])
    of_best = us[best] / us[rule]
    print(
        f"{spec.m} x {spec.n} x {spec.k} {spec.b_storage}: {us[rule]:.1f} µs {rule}; of {len(ids)} {us[best]:.1f} {best}: {of_best:.2f}",
        flush=True,
    )
    return {
        "m": spec.m,
        "n": spec.n,
        "k": spec.k,
        "stored": spec.b_storage,
        "rule": rule,
        "of_best": of_best,
        "us": first | us,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("seed", 1), ("count", 24), ("budget", 48), ("compile", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    draw = random.Random(args.seed)
    device = None if args.compile else metalmm.Device("cuda")
    ids = {spec: points(device or "cuda", spec, args.budget, draw) for spec in drawn(args.seed, args.count)}
    print(f"seed {args.seed}: {sum(map(len, ids.values()))} times of {len({v for vs in ids.values() for v in vs})} points")
    calls = [(v, spec) for spec, vs in ids.items() for v in vs]
    compile_all(device.info["compute_capability"] if device else args.compile, calls)
    if not device:
        return
    found = []
    for spec, vs in ids.items():
        rule, _ = next(tuning._ranked(device, *tuning._stands_for(spec, device, libraries=False)))
        found.append(measured(device, spec, list(dict.fromkeys([*vs, manifest.get(rule)])), rule))
        if args.json:
            args.json.write_text(json.dumps(found, indent=1))
    ratios = [row["of_best"] for row in found]
    print(f"the best by the rule's: {geometric_mean(ratios):.3f} in geometric mean, at least {min(ratios):.2f}")


if __name__ == "__main__":
    main()
