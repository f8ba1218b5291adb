"""``metalmm frameworks --model``: a model's products in MLX, PyTorch and metalmm, with weights that no cache holds.

Operands are of float16 and bfloat16. Weights are dense, and in MLX's affine formats of 8 and 4 bits, by groups of 64. All that take them have the
same numbers. Copies of the weights are together past the last-level cache of metalmm's device.

A turn multiplies by each copy, and waits once, at its end. No call reads another's result. A time is a turn's, divided by its calls. So it holds
what the host does, where that takes longer. metalmm replays a recording. The others are asked for each product in Python.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from .. import Device, MatmulSpec, files, quantize, terminal
from . import command, frameworks, models, runner, sizes
from .frameworks import Framework, Metalmm
from .step import free_memory

STORED = ("dense", "affine8", "affine4")
_CALLS = 16  # of a turn at least, which share what its end costs
_FAR = 0.1  # of the largest result: what is farther off is another product; MLX's CPU adds up in bfloat16, and is up to 0.05 off
_ENOUGH = 5.0  # seconds after which one turn is


def add_arguments(parser: argparse.ArgumentParser) -> None:
    frameworks.add_arguments(parser)
    parser.add_argument(
        "--model", help="its products instead, in float16 and bfloat16, with cold weights: a .gguf file, a config.json, or a name"
    )
    parser.add_argument("--m", help="with --model: rows of A, such as 1,4,512 (default: 1)")
    parser.set_defaults(run=main, context=None, storage=None, type=None)  # what models.sizes_of asks for besides


def main(args: argparse.Namespace) -> int:
    """0; 1 where a product failed or is another; 130 if it was interrupted, with what was finished printed."""
    if (listed := models.sizes_of(args)) is None:
        return frameworks.main(args)
    if args.operations:
        raise command.UsageError("--operations: with --model there are products alone; leave out one of them")
    rows = list(dict.fromkeys((s.m, n, s.k) for s in listed.shapes if s.batch == 1 and s.transpose_b for n in (s.n, *s.also_n)))
    found, missing = frameworks.installed(args.device)
    found = frameworks.wanted(args.only, found, missing)
    device = next((f.device for f in found if isinstance(f, Metalmm)), None) or Device(args.device)
    limit = args.memory * 1e9 if args.memory is not None else free_memory() / 2
    times: dict[str, dict[str, float]] = {}
    skipped: dict[str, str] = {}
    interrupted = False
    with terminal.Progress() as progress, contextlib.redirect_stdout(sys.stderr if args.json == "-" else sys.stdout):
        progress.begin("measuring", 2 * len(STORED) * len(rows))
        try:
            for (m, n, k), dtype, stored in itertools.product(rows, ("float16", "bfloat16"), STORED):
                text = f"{m} x {n} x {k} {dtype} {stored}"
                progress.note(text)
                spec = MatmulSpec(m, n, k, transpose_b=True, dtype=dtype, b_storage=stored)
                copies = runner.cold_copies(sizes.of_spec(spec), device)
                if spec.k % 64 and stored != "dense":
                    skipped[text] = "MLX's groups have 64 of k"
                elif (need := (copies + 3) * spec.n * spec.k * 2) > limit:  # 3: as drawn, and twice on its way
                    skipped[text] = frameworks.too_large(need, limit)
                else:
                    times[text] = _row(found, spec, copies, args, text, skipped)
                progress.step()
        except KeyboardInterrupt:
            interrupted = True
    data = {
        "schema": "metalmm-products",
        "version": 1,
        "model": files.harmless(args.model),
        "environment": runner.environment(device),
        "frameworks": {f.name: f.version for f in found},
        "missing": missing,
        "us": times,
        "skipped": skipped,
    }
    if args.json != "-":
        _show(found, times, skipped, missing)
    files.give_json(args.json, data)
    return 130 if interrupted else 1 if any("failed" in why or "another" in why for why in skipped.values()) else 0


def _row(
    found: Sequence[Framework], spec: MatmulSpec, copies: int, args: argparse.Namespace, text: str, skipped: dict[str, str]
) -> dict[str, float]:
    """Of each that takes it, µs."""
    rng = np.random.default_rng(args.seed)
    a = rng.standard_normal((spec.m, spec.k), np.float32).astype(runner.np_dtype(spec.dtype))
    w = (rng.standard_normal((spec.n, spec.k), np.float32) / 8).astype(a.dtype)
    b: Any = w if spec.b_storage == "dense" else quantize(w, spec.b_storage, group=64)
    dense = (w if spec.b_storage == "dense" else b.dequantize()).astype(np.float32)
    reference, times = a.astype(np.float32) @ dense.T, {}
    for framework in found:
        try:
            if (measured := _one(framework, a, b, copies, args.time, reference)) is None:
                continue
            us, off = measured
            if off <= _FAR:
                times[framework.name] = us
            else:
                skipped[f"{text} on {framework.name}"] = f"another product: {off:.2g} of the largest result away"
        except frameworks.FAILURES as error:
            skipped[f"{text} on {framework.name}"] = frameworks.failed(error)
    return times


def _one(framework: Framework, a: Any, b: Any, copies: int, seconds: float, reference: Any) -> tuple[float, float] | None:
    """Its µs of a call, and how far off its last result is; its copies are gone then."""
    again = -(-_CALLS // copies)
    if (made := framework.products(a, b, copies, again)) is None:
        return None
    us = frameworks.median(made[0], seconds, _ENOUGH) / (copies * again) * 1e6
    off = float(np.max(abs(made[1]() - reference)) / np.max(abs(reference)))
    return us, off if off == off else np.inf


def _show(found: Sequence[Framework], times: dict[str, dict[str, float]], skipped: dict[str, str], missing: Sequence[str]) -> None:
    names = [f.name for f in found]
    others = [name for name in names if name != "metalmm"]
    terminal.say("; ".join(f"{f.name}: {f.version}" for f in found) + "; µs of a call, cold weights, calls that do not wait for each other")
    lines = []
    for text, row in times.items():
        cells = [f"{row[name]:.1f}" if name in row else "-" for name in names]
        cells += [f"{row[name] / row['metalmm']:.2f}" if name in row and "metalmm" in row else "-" for name in others if "metalmm" in names]
        lines.append([text, *cells])
    head = ("m x n x k", *names, *(f"{name} / ours" for name in others if "metalmm" in names))
    terminal.table(head, lines, numbers=range(1, len(head)))
    frameworks.show_rest(skipped, missing)
