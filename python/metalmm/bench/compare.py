"""``metalmm compare OLD.json NEW.json``: what became faster or slower, by the spread of the samples."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

from .. import files, terminal
from . import results
from .report import Result, ms
from .results import Run
from .runner import ShapeRun
from .sizes import Shape
from .statistics import verdict

_FAR = 3.0  # times
FLOOR = 0.10  # relative: less is no change; between sessions identical kernels differ by that much


@dataclass(frozen=True)
class Change:
    """One variant on one shape in two runs; ms: medians, None where it did not run or was not right."""

    shape: str
    variant: str
    verdict: str  # same, faster, slower, unclear, stopped (early, in both), broke, mended, gone, new
    old_ms: float | None
    new_ms: float | None
    noise: float = 0.0

    @property
    def is_regression(self) -> bool:
        return self.verdict in ("slower", "broke")


def changes(old: Run, new: Run, floor: float = FLOOR) -> list[Change]:
    """Every variant of every shape that both runs have; of several of one spec the first with the first. floor: what is no change."""
    before: dict[str, list[ShapeRun]] = {}
    for s in old.shapes:
        before.setdefault(s.shape.short, []).append(s)
    found = []
    for s in new.shapes:
        if not before.get(s.shape.short):
            continue
        was = before[s.shape.short].pop(0)
        earlier = {r.variant: r for r in was.results}
        for r in s.results:
            found.append(_change(s, was, r, earlier.pop(r.variant, None), floor))
        found += [Change(s.shape.short, r.variant, "gone", _value(r), None) for r in earlier.values()]
    return found


def only_in(one: Run, other: Run) -> list[str]:
    """Shapes that `other` does not have."""
    known = {s.shape.short for s in other.shapes}
    return [s.shape.short for s in one.shapes if s.shape.short not in known]


def _value(r: Result) -> float | None:
    median = r.median() if r.is_right else None
    return median.value if median else None


def _change(s: ShapeRun, was: ShapeRun, new: Result, old: Result | None, floor: float) -> Change:
    name = s.shape.short
    if old is None:
        return Change(name, new.variant, "new", None, _value(new))
    if old.is_right != new.is_right:
        return Change(name, new.variant, "broke" if old.is_right else "mended", _value(old), _value(new))
    noise = max(s.noise, was.noise, floor)
    a, b = old.median(noise), new.median(noise)
    if not old.is_right or not a or not b:
        return Change(name, new.variant, "same", None, None)
    found = verdict(a, b)
    if old.stopped or new.stopped:  # a few samples of a moment of their own: only what is far outside counts
        slower = new.stopped and not old.stopped and min(new.times) > _FAR * a.high
        faster = old.stopped and not new.stopped and min(old.times) > _FAR * b.high
        found = "slower" if slower else "faster" if faster else "stopped" if old.stopped and new.stopped else "unclear"
    return Change(name, new.variant, found, a.value, b.value, noise)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("old", metavar="OLD.json")
    parser.add_argument("new", metavar="NEW.json")
    parser.add_argument("--all", action="store_true", help="every variant, not the changes and winners alone")
    parser.add_argument(
        "--least", type=float, default=FLOOR, help="the part of a median that is no change, whatever the intervals say (0.1)"
    )
    parser.set_defaults(run=main)


def main(args: argparse.Namespace) -> int:
    """0; 1 where something became slower or broke. Results of bench, of tune or of step, two of a kind."""
    if not 0 <= args.least < 10:
        raise files.FileError("--least takes a part such as 0.1")
    old, new = _load(args.old), _load(args.new)
    if (_STEP in [s.shape for s in old.shapes]) != (_STEP in [s.shape for s in new.shapes]):
        raise files.FileError(f"{args.old} and {args.new}: one is of step and one is not; compare takes two of a kind")
    found = changes(old, new, args.least)
    if len(only_in(old, new)) == len(old.shapes):
        has = (
            f"{path} has {'; '.join(s.shape.short for s in run.shapes[:3]) or 'none'}" for path, run in ((args.old, old), (args.new, new))
        )
        raise files.FileError(f"the runs share no shape: {', '.join(has)}")
    counts = {
        v: sum(c.verdict == v for c in found) for v in ("faster", "slower", "broke", "mended", "same", "unclear", "stopped", "gone", "new")
    }
    different = results.same_runs(old.environment, new.environment, ("device", "threads", "cpu", "gpu", "compiler", "metalmm"))
    different += results.same_runs(old.arguments, new.arguments, ("cold", "rule"))
    if args.json != "-":
        winners = {(s.shape.short, d.winner.variant) for run in (old, new) for s in run.shapes if (d := results.decide(s, run.bad_rel))}
        shown = [c for c in found if args.all or c.verdict not in ("same", "unclear", "stopped") or (c.shape, c.variant) in winners]
        rows = [
            [c.verdict, c.shape, c.variant, ms(c.old_ms), ms(c.new_ms), _percent(c), f"{c.noise:.1%}" if c.noise else ""] for c in shown
        ]
        terminal.table(
            ("", "shape", "variant", "old", "new", "change", "noise"),
            rows,
            numbers=(3, 4, 5, 6),
            marked=[i for i, c in enumerate(shown) if c.is_regression],
        )
        for what in different:
            terminal.say(f"the runs differ in {what}: {_of(old, what)} and {_of(new, what)}", "yellow")
        for which, missing in (("OLD", only_in(old, new)), ("NEW", only_in(new, old))):
            if missing:
                terminal.say(f"{len(missing)} shapes are in {which} alone: {', '.join(missing)}")
        terminal.say(", ".join(f"{n} {name}" for name, n in counts.items() if n) or "nothing in common")
        terminal.say(
            "faster, slower: the 95% intervals of the medians (order statistics) are apart, and the medians by more than the noise of either run's "
            f"twins and {args.least:.0%} (--least); same: neither; unclear: one of the two (a noisy machine: measure longer, --most-time). What was stopped "
            "early in both is not compared, in one of them only if it lies three times outside."
        )
    data: dict[str, Any] = {
        "schema": "metalmm-compare",
        "version": 1,
        "counts": counts,
        "different": different,
        "changes": [vars(c) for c in found],
    }
    files.give_json(args.json, data)
    return 1 if any(c.is_regression for c in found) else 0


def _load(path: str) -> Run:
    """A bench; a tune's bench; a step, each choice of it as a variant of one shape."""
    schema = files.schema_of(path)
    if schema == "metalmm-tune":
        return results.load(path, part="bench")
    if schema != "metalmm-step":
        return results.load(path)
    data = files.read_json(path, schema, 1)
    try:
        if not isinstance(data["environment"], dict):
            raise TypeError(f"environment is {str(data['environment'])[:40]}")
        rows = [
            Result(
                str(p["name"]),
                [None if t is None else float(t) for t in p["device_ms"]],
                [float(t) for t in p["host_ms"]],
                wrong="; ".join(p["wrong"]),
            )
            for p in data["policies"]
        ]
        return Run(data["environment"], {"rounds": 1}, [ShapeRun(_STEP, rows, None, 1, None)], planned=1)
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise files.FileError(f"{path}: a part of it is missing or of another kind: {error!r}") from error


# Stands for the whole step.
_STEP = Shape("step", 1, 1, 1, 1, False, False, False, 1.0, 0.0)


def _of(run: Run, what: str) -> object:
    return run.environment.get(what, run.arguments.get(what))


def _percent(c: Change) -> str:
    return f"{c.new_ms / c.old_ms - 1:+.1%}" if c.old_ms and c.new_ms else ""
