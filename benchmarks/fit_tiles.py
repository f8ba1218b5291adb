#!/usr/bin/env python3
"""From what rows_cuda.py --variants or rule_cuda.py measured, the three times of each tile for `_TILES` of python/metalmm/backends/cuda.py,
and how good they are.

A tile's three times (python/metalmm/backends/protocol.py: Tiles) are those with the least squared error of the logarithm, in which a time
of twice the fastest tile's counts a quarter. They are held near the table's, for few sizes say little. How many a core has at once is what
the table says. Then shapes are drawn: times of a random half of them choose tiles for the other half, five times. "of the best" is the
geometric mean over pairs of shape and format of the fastest tile's time by the chosen one's, and the least.

    python benchmarks/fit_tiles.py --cores 132 FILE.json [FILE.json ...]
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import random
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

import metalmm
import numpy as np
from metalmm import manifest
from metalmm.backends.cuda import _FEW, _TILES, weights_of
from metalmm.backends.protocol import Tiles, TileTimes

HOLD = 0.01  # how much a number counts that is e times the table's, as an error of a tenth
NAMES = ("dense", "8 bits", "4 bits", "affine", "halves", "floats")
Pair = tuple[int, int, int, str]  # m, n, k, stored
Times = Mapping[Pair, Mapping[str, float]]  # of each tile, µs


def read(paths: Iterable[str]) -> dict[Pair, dict[str, float]]:
    """In a row."""
    found: dict[Pair, dict[str, float]] = {}
    for row in (row for path in paths for row in json.loads(Path(path).read_text())):
        times = found.setdefault((row["m"], row["n"], row["k"], row["stored"]), {})
        times |= {name.removesuffix(" chain"): us for name, us in row["us"].items() if not name.endswith(" alone")}
    return found


def in_table(weights: int, v: str) -> TileTimes | None:
    return next((ns for table in (_TILES, _FEW) if v in table and (ns := table[v][weights])), None)


@functools.cache
def work(v: str, pair: Pair, cores: int) -> tuple[float, float]:
    m, n, k, stored = pair
    return Tiles.work(manifest.get(v), metalmm.MatmulSpec(m, n, k, transpose_b=True, b_storage=stored, dtype="float16"), cores)


def fitted(times: Times, pairs: Collection[Pair], cores: int) -> dict[tuple[int, str], np.ndarray]:
    found = {}
    for weights, v in {(weights_of(pair[3]), v) for pair in pairs for v in times[pair]}:
        if not (table := in_table(weights, v)):
            continue
        number, near = table[3], np.log(np.array(table[:3]) + 1)
        own = [pair for pair in pairs if weights_of(pair[3]) == weights and v in times[pair]]
        rows = np.array([(*work(v, pair, cores), times[pair][v], min(times[pair].values())) for pair in own], float).T

        def errors(ns: np.ndarray, rows: np.ndarray = rows, number: int = number, near: np.ndarray = near) -> np.ndarray:
            of_core, steps, us, fastest = rows
            took = Tiles.took((*ns.T[:, :, None], number), of_core, steps)
            held = HOLD * ((np.log(ns + 1) - near) ** 2).sum(axis=1)
            return np.asarray(((fastest / us * np.log(took / us / 1000)) ** 2).sum(axis=1) + held)

        rng = np.random.default_rng(0)
        ns, step = np.exp(rng.uniform((2, 2, 4), (6, 6, 8), (256, 3))), 0.6
        for _ in range(70):  # of many some survive, and have others beside them, nearer each time
            ns = ns[np.argsort(errors(ns))[:24]]
            ns = np.concatenate([ns, np.repeat(ns, 10, 0) * np.exp(rng.normal(0, step, (240, 3)) * (rng.random((240, 3)) < 0.7))])
            step = max(0.01, step * 0.94)
        found[weights, v] = np.array([*ns[errors(ns).argmin()], number])
    return found


def of_the_best(times: Times, pairs: Collection[Pair], ns: Mapping[tuple[int, str], np.ndarray], cores: int) -> str:
    ratios = []
    for pair in pairs:
        weights = weights_of(pair[3])
        known = {v: Tiles.took(ns[weights, v], *work(v, pair, cores)) for v in times[pair] if (weights, v) in ns}
        if known:  # of a half of the shapes there may be none of its kind
            ratios.append(min(times[pair].values()) / times[pair][min(known, key=lambda v, known=known: known[v])])
    return f"{math.exp(np.mean(np.log(ratios))):.3f} of the best, at least {min(ratios):.2f}, {len(ratios)} pairs"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", metavar="FILE.json")
    parser.add_argument("--cores", type=int, required=True)
    args = parser.parse_args()
    times = read(args.files)
    ns = fitted(times, times, args.cores)
    for weights, v in sorted(ns):
        print(NAMES[weights], v, *(round(x) for x in ns[weights, v]))
    print("all:", of_the_best(times, times, ns, args.cores))
    shapes = sorted({pair[1:3] for pair in times})
    for seed in range(5):
        half = set(random.Random(seed).sample(shapes, len(shapes) // 2))
        seen, unseen = [p for p in times if p[1:3] in half], [p for p in times if p[1:3] not in half]
        print("half of the shapes, for the others:", of_the_best(times, unseen, fitted(times, seen, args.cores), args.cores))


if __name__ == "__main__":
    main()
