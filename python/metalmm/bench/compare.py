"""``metalmm compare OLD.json NEW.json``: what became faster or slower, by the spread of the samples."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

from .. import terminal
from . import results
from .report import Result, ms
from .results import Run
from .runner import ShapeRun
from .statistics import verdict

_FAR = 3.0  # times
_FLOOR = 0.02  # relative: less is no change, whatever the intervals say


@dataclass(frozen=True)
class Change:
    """One variant on one shape in two runs; ms: medians, None where it did not run or was not right."""

    shape: str
    variant: str
    verdict: str  # same, faster, slower, unclear, broke, mended, gone, new
    old_ms: float | None
    new_ms: float | None
    noise: float = 0.0

    @property
    def is_regression(self) -> bool:
        return self.verdict in ("slower", "broke")


def changes(old: Run, new: Run) -> list[Change]:
    """Every variant of every shape that both runs have."""
    before = {s.shape.short: s for s in old.shapes}
    found = []
    for s in new.shapes:
        was = before.get(s.shape.short)
        if was is None:
            continue
        earlier = {r.variant: r for r in was.results}
        for r in s.results:
            found.append(_change(s, was, r, earlier.pop(r.variant, None)))
        found += [Change(s.shape.short, r.variant, "gone", _value(r), None) for r in earlier.values()]
    return found


def only_in(one: Run, other: Run) -> list[str]:
    """Shapes that `other` does not have."""
    known = {s.shape.short for s in other.shapes}
    return [s.shape.short for s in one.shapes if s.shape.short not in known]


def _value(r: Result) -> float | None:
    median = r.median() if r.is_right else None
    return median.value if median else None


def _change(s: ShapeRun, was: ShapeRun, new: Result, old: Result | None) -> Change:
    name = s.shape.short
    if old is None:
        return Change(name, new.variant, "new", None, _value(new))
    if old.is_right != new.is_right:
        return Change(name, new.variant, "broke" if old.is_right else "mended", _value(old), _value(new))
    noise = max(s.noise, was.noise, _FLOOR)
    a, b = old.median(noise), new.median(noise)
    if not old.is_right or not a or not b:
        return Change(name, new.variant, "same", None, None)
    found = verdict(a, b)
    if old.stopped or new.stopped:  # a few samples of a moment of their own: only what is far outside counts
        slower = new.stopped and not old.stopped and min(new.times) > _FAR * a.high
        faster = old.stopped and not new.stopped and min(old.times) > _FAR * b.high
        found = "slower" if slower else "faster" if faster else "unclear"
    return Change(name, new.variant, found, a.value, b.value, noise)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("old", metavar="OLD.json")
    parser.add_argument("new", metavar="NEW.json")
    parser.add_argument("--all", action="store_true", help="every variant, not the changes and winners alone")
    parser.set_defaults(run=main)


def main(args: argparse.Namespace) -> int:
    """0; 1 where something became slower or broke."""
    old, new = results.load(args.old), results.load(args.new)
    found = changes(old, new)
    counts = {v: sum(c.verdict == v for c in found) for v in ("faster", "slower", "broke", "mended", "same", "unclear", "gone", "new")}
    different = results.same_runs(old.environment, new.environment, ("device", "threads", "cpu", "gpu", "compiler", "metalmm"))
    different += results.same_runs(old.arguments, new.arguments, ("cold", "rule"))
    if args.json != "-":
        winners = {(s.shape.short, d.winner.variant) for run in (old, new) for s in run.shapes if (d := results.decide(s, run.bad_rel))}
        shown = [c for c in found if args.all or c.verdict not in ("same", "unclear") or (c.shape, c.variant) in winners]
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
            f"twins and {_FLOOR:.0%}; same: neither; unclear: one of the two, and what was stopped early, unless three times apart."
        )
    data: dict[str, Any] = {
        "schema": "metalmm-compare",
        "version": 1,
        "counts": counts,
        "different": different,
        "changes": [vars(c) for c in found],
    }
    results.give_json(args.json, data)
    return 1 if any(c.is_regression for c in found) else 0


def _of(run: Run, what: str) -> object:
    return run.environment.get(what, run.arguments.get(what))


def _percent(c: Change) -> str:
    return f"{c.new_ms / c.old_ms - 1:+.1%}" if c.old_ms and c.new_ms else ""
