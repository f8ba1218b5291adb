"""Compares the variants on every shape of a profile: which are right, which is fastest. See docs/method.md."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from .. import Device, Variant, load_variants, variants
from . import report, runner, sizes
from .sizes import Shape


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    env = {key: value for key, value in os.environ.items() if value.strip()}
    parser = argparse.ArgumentParser(prog="hot_shapes", description=__doc__)
    parser.add_argument("--sizes", type=Path, default=sizes.DEFAULT, help="profile summary with the shapes (default: Qwen2.5-0.5B decode)")
    parser.add_argument("--manifest", type=Path, action="append", default=[], help="variants of your own (docs/add_a_variant.md)")
    parser.add_argument("--shapes", help="numbers ('1,3') or words that a shape must have ('n=896 k=4864')")
    parser.add_argument("--backends", default=env.get("MATMUL_BACKENDS"), help="families, comma-separated [MATMUL_BACKENDS]")
    parser.add_argument("--iters", type=int, default=env.get("MATMUL_BENCH_ITERS", "5"), help="measured runs [MATMUL_BENCH_ITERS]")
    parser.add_argument("--warmup", type=int, default=env.get("MATMUL_BENCH_WARMUP", "1"), help="runs before them [MATMUL_BENCH_WARMUP]")
    parser.add_argument(
        "--bad-rel",
        type=float,
        default=env.get("MATMUL_BAD_REL_THRESHOLD", "1e-3"),
        help="maxRel of a wrong variant [MATMUL_BAD_REL_THRESHOLD]",
    )
    parser.add_argument("--sort", choices=["gpu", "cpu"], help="order of the lines; default: the manifest's")
    parser.add_argument("--best-only", action="store_true", help="only lines with a tag")
    parser.add_argument(
        "--cold", action="store_true", help="rotate the weights through copies that together are twice the last-level cache"
    )
    parser.add_argument("--all", action="store_true", help="include the variants that are off")
    parser.add_argument("--json", type=Path, help="write every sample and the environment there")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    if args.iters < 1 or args.warmup < 0:
        parser.error("--iters takes at least 1, --warmup at least 0")
    return args


class _Progress:
    """A line on stderr that is rewritten on a terminal, and now and then a plain line elsewhere."""

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self._last = 0.0

    def __call__(self, text: str) -> None:
        now = time.monotonic()
        if now - self._last < (0.1 if self._terminal else 10.0):
            return
        self._last = now
        sys.stderr.write(f"\r\x1b[K{text[:110]}" if self._terminal else f"... {text}\n")
        sys.stderr.flush()

    def clear(self) -> None:
        if self._terminal:
            sys.stderr.write("\r\x1b[K")


def _choose(
    shapes: list[Shape], args: argparse.Namespace, device: Device
) -> tuple[list[tuple[Shape, list[Variant]]], dict[tuple[str, str], int]]:
    families = [f.strip() for f in args.backends.split(",")] if args.backends else None
    known = {v.family for v in variants()}
    if families and (unknown := [f for f in families if f not in known]):
        raise ValueError(f"--backends {unknown[0]}: no such family; there are {', '.join(sorted(known))}")
    candidates = [v for v in variants() if not families or v.family in families]
    work, skipped = [], dict[tuple[str, str], int]()
    for shape in shapes:
        chosen = []
        for v in candidates:
            why = "" if v.runs_on(device.name) else f"unavailable on device {device.name}"
            why = why or v.lacks(shape.spec) or ("" if v.enabled or args.all else f"off: {v.reason}")
            if why:
                skipped[str(v), why] = skipped.get((str(v), why), 0) + 1
            else:
                chosen.append(v)
        work.append((shape, chosen))
    return work, skipped


def _header(device: Device, args: argparse.Namespace, info: dict[str, Any]) -> str:
    weights = "cold weights (rotated through copies)" if args.cold else "warm weights (one copy)"
    lines = [
        f"Matmul benchmark summary (iterations={args.iters})",
        runner.describe(device, info),
        f"metalmm={info['metalmm']} commit={info['commit']} warmup={args.warmup} {weights}",
    ]
    if device.backend.note:
        lines.append(device.backend.note)
    return "\n".join(lines)


def _skip_lines(skipped: dict[tuple[str, str], int], total: int) -> str:
    lines = ["Skipped:"]
    lines += [f"   - {v} on {'all' if count == total else count} of {total} shapes: {why}" for (v, why), count in skipped.items()]
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Runs the benchmark; 0 if every variant was right everywhere, 1 if one was wrong, 2 for arguments it cannot use."""
    args = _arguments(argv)
    try:
        for manifest in args.manifest:
            load_variants(manifest)
        shapes = sizes.select(sizes.load(args.sizes), args.shapes)
        device, progress = runner.measuring_device(), _Progress()
        work, skipped = _choose(shapes, args, device)
        if args.json:
            args.json.touch()  # a path that cannot be written shows before the run, not after
    except (OSError, ValueError) as error:
        print(f"hot_shapes: {error}", file=sys.stderr)
        return 2
    info = runner.environment(device)
    print(_header(device, args, info), flush=True)
    runner.compile_all(device, work, progress)
    sections, records, wrong = [], [], 0
    for shape, chosen in work:
        if not chosen:
            print(f"Spec {shape}:\n   - no variant supports it", flush=True)
            continue
        copies = runner.cold_copies(shape) if args.cold else 1
        results = runner.run_shape(
            device, shape, chosen, iters=args.iters, warmup=args.warmup, copies=copies, seed=args.seed, progress=progress
        )
        progress.clear()
        baseline = runner.baseline_of(shape, device)
        print(report.section(shape, results, baseline, bad_rel=args.bad_rel, sort=args.sort, best_only=args.best_only), flush=True)
        if shape.orig_backend and (baseline is None or baseline.split("/")[0] != shape.orig_backend):
            instead = f"; {baseline} stands in for it" if baseline in {r.variant for r in results} else ""
            print(f"     (production ran on {shape.orig_backend}, which device {device.name} does not have{instead})")
        sections.append((shape, results))
        records.append(runner.as_json(shape, results, baseline, report.tags(results, baseline, args.bad_rel), copies))
        wrong += sum(1 for r in results if r.wrong or r.max_rel > args.bad_rel)
    if skipped:
        print(_skip_lines(skipped, len(shapes)))
    print("Winners by shape:\n" + report.winners(sections, args.bad_rel))
    total = sum(len(results) for _, results in sections)
    print(
        f"{total - wrong} of {total} results right" + (f", {wrong} WRONG" if wrong else "; each within the float64 bound of docs/method.md")
    )
    if args.json:
        skips = [{"variant": v, "why": why, "shapes": count} for (v, why), count in skipped.items()]
        args.json.write_text(
            json.dumps(
                {"environment": info, "arguments": {k: str(v) for k, v in vars(args).items()}, "skipped": skips, "shapes": records},
                indent=1,
            )
        )
    return 1 if wrong else 0
