#!/usr/bin/env python3
"""On an NVIDIA GPU: any number of rows of A, what "auto" takes without a tuning file against cuBLAS; times are the GPU's.

Contenders are CUDA graphs of their own, measured by turns, as in peers_cuda.py, over copies of the weights that together are past the
second-level cache. cuBLAS multiplies numbers of --type (torch.matmul), ours what --stored says. `chain`: calls that wait for each other,
with the early start of programmatic launches; `alone`: Device("cuda", overlap=False). --row-invariant adds what "auto" takes with
row_invariant=True (`alike`), and prints what that costs. Of each result up to 18 rows are checked against the bound. A wrong one ends the
run.

    python benchmarks/rows_cuda.py [--m 1,4,16,512] [--shapes 4096x4096,9728x896] [--stored dense,q8_0] [--type bfloat16]
        [--variants ID,ID] [--row-invariant] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import metalmm
import ml_dtypes  # noqa: F401  (NumPy then knows "bfloat16")
import numpy as np
from metalmm import manifest, tuning
from metalmm.variant import OPERAND_TYPES
from peers_cuda import CALLS, compile_all, medians, of_ours, of_torch

CACHE = 256 << 20  # bytes of copies as they are stored: four times an H200's second-level cache


def specs_of(m: int, n: int, k: int, stored: str, dtype: str, row_invariant: bool) -> list[metalmm.MatmulSpec]:
    """The call, and that with row_invariant where m is not too large."""
    kinds = (False, True) if row_invariant and m <= manifest._core._ROWS_ALIKE else (False,)
    return [metalmm.MatmulSpec(m, n, k, transpose_b=True, b_storage=stored, dtype=dtype, row_invariant=alike) for alike in kinds]


def copies_on(device: metalmm.Device, b: Any) -> list[Any]:
    """Of a matrix so many that they are together past the second-level cache."""
    count = max(3, min(64, CACHE // b.nbytes + 1))
    return [device.array(b) if isinstance(b, np.ndarray) else b.to(device) for _ in range(count)]


def turns_of(m: int, copies: int) -> int:
    """How often a recording goes over the copies."""
    return 1 if m >= 512 else -(-CALLS // copies)


Expected = tuple[list[int], np.ndarray, np.ndarray]  # some rows of a result, what they are and the bound


def checked(
    device: metalmm.Device, v: str, a: np.ndarray, held: list[Any], expected: Expected, what: str, **options: Any
) -> Callable[[], float]:
    """A recording of one variant's products by each of the copies, run once. A wrong result ends the run."""
    some, reference, bound = expected
    left, out = device.array(a), device.empty((len(a), reference.shape[1]), a.dtype.name)
    run = of_ours(device, [device.prepare(v, left, each, out=out, **options) for each in held] * turns_of(len(a), len(held)))
    run()
    if not (abs(np.asarray(out)[some] - reference) <= bound).all():
        raise SystemExit(f"{what}: {v} is WRONG")
    return run


def chosen(device: metalmm.Device, spec: metalmm.MatmulSpec, variants: list[str]) -> list[str]:
    return [v for v in variants if not manifest.get(v).lacks(spec)] if variants else [tuning.choose(device, spec)[0]]


def measured(
    devices: dict[str, metalmm.Device], n: int, k: int, stored: str, dtype: str, rows: list[int], variants: list[str], row_invariant: bool
) -> list[dict[str, Any]]:
    import torch

    def to_torch(x: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(x.view(np.uint8)).cuda().view(getattr(torch, dtype))

    rng, found = np.random.default_rng(0), []
    w = (rng.standard_normal((n, k)) / 8).astype(dtype)
    b = w if stored == "dense" else metalmm.quantize(w, stored)
    held = {name: copies_on(d, b) for name, d in devices.items()}
    copies = len(held["chain"])
    others = [to_torch(w) for _ in range(copies)]
    options = {"transpose_b": True} if stored == "dense" else {}
    for m in rows:
        a, turns = rng.standard_normal((m, k)).astype(dtype), turns_of(m, copies)
        x, y = to_torch(a), torch.empty((m, n), dtype=getattr(torch, dtype), device="cuda")
        contenders = {"cublas": of_torch([lambda x=x, y=y, o=o: torch.matmul(x, o.t(), out=y) for o in others * turns])}
        some = sorted({0, m - 1, *rng.integers(0, m, 16).tolist()})  # of every tile, whichever they are
        few = a[some]
        expected = some, metalmm.reference(few, b, **options), metalmm.error_bound(few, b, **options)
        specs = specs_of(m, n, k, stored, dtype, row_invariant)
        for spec, v in [(one, v) for one in specs for v in chosen(devices["chain"], one, variants)]:
            for name, d in devices.items():
                label = f"{v} alike {name}" if spec.row_invariant else f"{v} {name}"
                what = f"{m} x {n} x {k} {stored} {dtype}"
                contenders[label] = checked(d, v, a, held[name], expected, what, row_invariant=spec.row_invariant, **options)
        times = medians(list(contenders.values()), 9)
        us = {name: t / copies / turns for name, t in zip(contenders, times, strict=True)}
        line = "; ".join(
            f"{name} {t:.1f} ({us['cublas'] / t:.2f})" for name, t in sorted(us.items(), key=lambda x: x[1]) if name != "cublas"
        )
        alike = {name.replace(" alike", ""): us.pop(name) for name in list(us) if " alike " in name}
        found.append({"m": m, "n": n, "k": k, "stored": stored, "type": dtype, "cublas": us.pop("cublas"), "us": us, "alike": alike})
        print(f"{m} x {n} x {k} {stored} {dtype}: cuBLAS {found[-1]['cublas']:.1f}; {line}", flush=True)
    return found


def least(us: dict[str, float], which: str) -> float:
    """Of the contenders on the device of that name."""
    return min(t for name, t in us.items() if name.endswith(f" {which}"))


def shown(what: str, ratios: list[float]) -> None:
    if ratios:
        print(f"{what} {geometric_mean(ratios):.2f} in geometric mean, {min(ratios):.2f} to {max(ratios):.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--m", default="1,2,4,8,16,32,64,128,512,2048")
    parser.add_argument("--shapes", default="4096x4096,2048x8192,9728x896,896x4864")
    parser.add_argument("--stored", default="dense,q8_0,q4_0,affine4")
    parser.add_argument("--type", choices=OPERAND_TYPES, default="float16")
    parser.add_argument("--variants", default="")
    parser.add_argument("--row-invariant", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    devices = {"chain": metalmm.Device("cuda"), "alone": metalmm.Device("cuda", overlap=False)}
    rows, variants = [int(m) for m in args.m.split(",")], [v for v in args.variants.split(",") if v]
    shapes = [tuple(map(int, s.split("x"))) for s in args.shapes.split(",")]
    stored = args.stored.split(",")
    calls = [spec for m in rows for n, k in shapes for s in stored for spec in specs_of(m, n, k, s, args.type, args.row_invariant)]
    device = devices["chain"]
    compile_all(device.info["compute_capability"], [(manifest.get(v), spec) for spec in calls for v in chosen(device, spec, variants)])
    found = [row for n, k in shapes for s in stored for row in measured(devices, n, k, s, args.type, rows, variants, args.row_invariant)]
    for s in stored:
        for m in rows:
            here = [row for row in found if (row["m"], row["stored"]) == (m, s) and row["us"]]
            shown(f"m={m} {s}: cuBLAS / ours", [row["cublas"] / min(row["us"].values()) for row in here])
            for name in devices:
                costs = [least(row["alike"], name) / least(row["us"], name) for row in here if row["alike"]]
                shown(f"m={m} {s}: row_invariant / not, {name}", costs)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
