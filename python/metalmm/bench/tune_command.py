"""``metalmm tune``: measures the variants on each shape and keeps the choice for "auto"; with --search parameters that no id has, too."""

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
    parser.add_argument("--search", action="store_true", help="also try parameters that no id has")
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
                    kernels = {v.kernel for v in ids} if args.backends else None
                    copies = runner.cold_copies(shape, device) if args.cold else 1
                    one = search.search(
                        device, shape, paths, ids, kernels, budget=args.budget, rule=rule, copies=copies, seed=args.seed, progress=progress
                    )
                    searched.append(one)
                    run.shapes.append(_ids_alone(one))
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


def _ids_alone(one: search.Found) -> ShapeRun:
    """The last comparison without the candidates that have no id."""
    kept = [r for r in one.last.results if r.variant not in one.names]
    twin = one.last.twin if one.last.twin and one.last.twin.variant not in one.names else None
    return ShapeRun(one.shape, kept, twin, one.last.copies, one.last.baseline)


def _choices(run: results.Run, shapes: list[ShapeRun]) -> list[tuning.Choice]:
    found = []
    for s in shapes:
        if d := decide(s, run.bad_rel):
            digest = manifest.kernel_sha256(d.winner.variant, tuning.spec_of(tuning.Key.of(s.shape.spec)))
            found.append(tuning.Choice(tuning.Key.of(s.shape.spec), d.winner.variant, digest, d.median.value, run.environment["time"]))
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
    d = decide(one.last)
    if d is None:
        return
    ids = [r for r in one.last.results if r.variant not in one.names and r.is_right and not r.stopped]
    best_id = min(ids, key=lambda r: sorted(r.times)[len(r.times) // 2], default=None)
    median = best_id.median() if best_id else None
    for name, candidate in one.names.items():
        r = next(r for r in one.last.results if r.variant == name)
        m = r.median()
        if m and r.is_right and not r.stopped:
            against = f", {m.value / median.value - 1:+.1%} of {best_id.variant}" if median and best_id else ""
            tie = " (a tie)" if median and abs(m.value / median.value - 1) <= one.last.noise else ""
            terminal.say(f"  {report.ms(m.value)}{against}{tie}: {candidate.row()}")
    terminal.say(
        "  percentages are of the best id's time; a row goes under [families.NAME.variants] of a manifest whose [kernels] table is the one that it names"
    )


def _search_json(one: search.Found) -> dict[str, Any]:
    return {
        "shape": one.shape.as_json(),
        "tried": [{"kernel": c.kernel, "values": dict(c.values), "row": c.row(), "ms": t, "why": why} for c, t, why in one.tried],
        "finalists": [{"row": c.row(), "median_ms": _median(one, name)} for name, c in one.names.items()],
    }


def _median(one: search.Found, name: str) -> float | None:
    median = next(r for r in one.last.results if r.variant == name).median()
    return median.value if median else None
