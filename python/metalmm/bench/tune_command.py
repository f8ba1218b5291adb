"""``metalmm tune``: measures the variants on each shape and keeps the choice for "auto"; with --search points that do not ship, too."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from pathlib import Path
from typing import Any

from .. import files, manifest, terminal, tuning
from . import command, page, report, results, runner, search
from .copy import measured_copy
from .results import decide
from .runner import ShapeRun


def add_arguments(parser: argparse.ArgumentParser) -> None:
    command.add_shape_arguments(parser)
    command.add_run_arguments(parser)
    parser.add_argument(
        "--warm", dest="cold", action="store_false", help="one copy of the weights; default: cold ones, as a step finds them"
    )
    parser.add_argument("-o", "--output", type=Path, help="the tuning file; default: $METALMM_TUNING, else the one that 'auto' reads")
    parser.add_argument("--search", action="store_true", help="also try points of the strategies that do not ship")
    parser.add_argument("--budget", type=int, default=32, help="candidates of a shape that --search measures (32)")
    parser.set_defaults(run=main)


def main(args: argparse.Namespace) -> int:
    """0; 1 where a variant was wrong or failed; 130 if it was interrupted, with what was finished kept."""
    rule, found = command.rule_of(args), command.read_sizes(args)
    if args.budget < 2:
        raise command.UsageError("--budget takes at least 2")
    path = args.output or tuning.default_path()
    if args.json not in (None, "-") and os.path.realpath(args.json) == os.path.realpath(path):
        raise command.UsageError(f"--json {args.json}: that is the tuning file")
    if not args.output:
        path.parent.mkdir(parents=True, exist_ok=True)
    files.check_output(path, f'"schema": "{tuning.SCHEMA}"', "tuning file")
    if path.exists():
        tuning.read(path)  # a damaged one is refused before the run
    device = runner.measuring_device(args.device, args.timeout)
    work, skipped = command.choose(found.shapes, args, device)
    run = command.start_run(args, device, found, skipped, rule)
    searched: list[search.Found] = []
    interrupted = False
    with terminal.Progress() as progress, contextlib.redirect_stdout(sys.stderr if args.json == "-" else sys.stdout):
        try:
            run.copy_readings.append(measured_copy(device))
            if args.search:
                paths = [manifest.BUILTIN, *(p.resolve() for p in args.manifest)]
                for shape, ids in work:
                    families = {v.family for v in ids} if args.backends else None
                    copies = runner.cold_copies(shape, device) if args.cold else 1
                    one = search.search(
                        device, shape, paths, ids, families, budget=args.budget, rule=rule, copies=copies, seed=args.seed, progress=progress
                    )
                    searched.append(one)
                    run.shapes.append(one.last)
                    tuning.write(path, tuning.device_key(device), _choices(run, run.shapes[-1:]))
            else:
                for done in command.measure(device, work, rule, run, args, progress):
                    tuning.write(path, tuning.device_key(device), _choices(run, [done]))
        except KeyboardInterrupt:
            interrupted = True
    choices = _choices(run, run.shapes)
    data: dict[str, Any] = {
        "schema": "metalmm-tune",
        "version": 1,
        "file": str(path),
        "device": tuning.device_key(device),
        "choices": [c.as_json() for c in choices],
        "search": [_search_json(one) for one in searched],
        "bench": run.as_json(),
    }
    if args.json != "-":
        _show(run, searched, choices, path, device_key=tuning.device_key(device))
    files.give_json(args.json, data)
    if interrupted:
        print(f"metalmm tune: interrupted; the choices of {len(choices)} of {run.planned} shapes are in {path}", file=sys.stderr)
        return 130
    return 1 if run.bad() else 0


def _choices(run: results.Run, shapes: list[ShapeRun]) -> list[tuning.Choice]:
    found = []
    for s in shapes:
        if d := decide(s, run.bad_rel):
            found.append(tuning.Choice.of(s.shape.spec, d.winner.variant, d.median.value, run.environment["time"]))
    return found


def _show(run: results.Run, searched: list[search.Found], choices: list[tuning.Choice], path: Path, device_key: str) -> None:
    rows = []
    for s in run.shapes:
        d = decide(s, run.bad_rel)
        over = d.over_baseline if d else None
        rows.append(
            [
                s.shape.short,
                d.winner.variant if d else "none is right" if s.results else "no variant supports it",
                report.ms(d.median.value) if d else "",
                f"{over:.2f}x" if over else "",
                str(len(d.ties)) if d and d.ties else "",
                f"±{page.percent(s.noise)}" if s.twin else "",
            ]
        )
    terminal.table(("shape", "choice", "ms", "over base", "ties", "noise"), rows, numbers=(2, 3, 4, 5))
    for one in searched:
        _show_search(one)
    for shape, r in run.bad():
        terminal.say(f"{shape.short}: {r.variant} {'FAILED' if r.failed else 'WRONG'}: {r.failed or r.wrong}", "red")
    for gone in run.left_out:
        terminal.say(f"not run: {gone.text}: {gone.why}")
    terminal.say(f"{len(choices)} choices for {device_key} in {path}; metalmm.matmul('auto', …) goes by them")


def _show_search(one: search.Found) -> None:
    measured = [t for _, t, _ in one.tried if t is not None]
    failed = [why for _, t, why in one.tried if t is None]
    terminal.say(
        f"{one.shape.short}: {len(one.tried)} candidates, {len(measured)} measured, {len(failed)} not{': ' if failed else ''}{'; '.join(sorted(set(failed)))[:300]}",
        "bold",
    )
    ships = [r for r in one.last.results if manifest.get(r.variant).is_listed and r.is_right and not r.stopped]
    best = min(ships, key=lambda r: sorted(r.times)[len(r.times) // 2], default=None)
    median = best.median() if best else None
    for r in one.last.results:
        m = r.median()
        if r.variant in one.best and m and r.is_right and not r.stopped:
            against = f", {m.value / median.value - 1:+.1%} of {best.variant}" if median and best else ""
            tie = " (a tie)" if median and abs(m.value / median.value - 1) <= one.last.noise else ""
            terminal.say(f"  {report.ms(m.value)}{against}{tie}: {r.variant}")
    terminal.say("  percentages are of the time of the best variant that ships")


def _search_json(one: search.Found) -> dict[str, Any]:
    medians = {r.variant: m.value for r in one.last.results if (m := r.median())}
    return {
        "shape": one.shape.as_json(),
        "tried": [{"variant": c.id, "ms": t, "why": why} for c, t, why in one.tried],
        "finalists": [{"variant": name, "median_ms": medians.get(name)} for name in one.best],
    }
