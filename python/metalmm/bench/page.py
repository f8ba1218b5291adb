"""A run as a page to read: the winner of each shape, what failed, why variants were left out."""

from __future__ import annotations

import re

from .. import backends, manifest, terminal
from ..errors import Error
from .report import ms
from .results import Run, decide
from .runner import ShapeRun

_NOISY = 0.2  # past this another run may well choose another winner


def step_share(run: Run) -> dict[int, float]:
    """Each shape's part of calls times winner's time, by its place in the run; empty where no shape says its calls."""
    times = {}
    for i, s in enumerate(run.shapes):
        decision = decide(s, run.bad_rel)
        if decision and s.shape.calls:
            times[i] = s.shape.calls * decision.median.value
    total = sum(times.values())
    return {i: t / total for i, t in times.items()} if total else {}


def percent(value: float | None) -> str:
    return "" if value is None else f"{value:.0%}" if abs(value) >= 0.1 else f"{value:.1%}"


def gbps(s: ShapeRun, milliseconds: float) -> float:
    return s.shape.bytes / milliseconds / 1e6 if milliseconds else 0.0


def is_emulated(run: Run, baseline: str | None) -> bool:
    """A baseline that no comparison should be made with."""
    try:
        return bool({*manifest.get(baseline or "").needs} & {*backends.get(run.environment["device"]).emulated})
    except Error:  # a file of another process may name what is not here
        return False


def _row(run: Run, i: int, s: ShapeRun, share: float | None) -> list[str]:
    d = decide(s, run.bad_rel)
    head = ["" if run.arguments.get("shapes") else str(i + 1), s.shape.short, str(s.shape.calls or "")]
    if not d:
        return [*head, "none is right" if s.results else "no variant supports it", *[""] * 8]
    ahead = d.runner_up.median() if d.runner_up else None
    runner_up = ""
    if d.runner_up and ahead and d.median.value:
        runner_up = f"{'= ' * (d.runner_up.variant in d.ties)}{d.runner_up.variant} +{percent(ahead.value / d.median.value - 1)}"
    times = None if is_emulated(run, s.baseline) else d.over_baseline
    rate = gbps(s, d.median.value)
    return [
        *head,
        d.winner.variant,
        ms(d.median.value),
        f"±{percent(s.noise)}{' !' * (s.noise > _NOISY)}" if s.twin else "",
        percent(share),
        f"{times:.2f}x" if times else "",
        f"{len(d.ties)}" if d.ties else "",
        runner_up,
        f"{rate:.1f}",
        percent(rate / run.copy_gbps) if run.copy_gbps else "",
    ]


def skip_lines(run: Run) -> list[str]:
    """One line for each reason, without what differs from shape to shape in it."""
    reasons: dict[str, list[str]] = {}
    for skip in run.skipped:
        why = re.sub(r"^layout \w+ is not one of .*", "not their layout", skip["why"])
        reasons.setdefault(re.sub(r"^(\w+)=\d+ is", r"\1 is", why), []).append(skip["variant"])
    return [f"skipped: {why}: {len(set(names))} variant{'s' * (len(set(names)) > 1)}" for why, names in reasons.items()]


COLUMNS = ("#", "shape", "calls", "winner", "ms", "noise", "share", "over base", "ties", "runner-up", "GB/s", "of copy")


def copy_text(run: Run) -> str:
    readings = run.copy_readings
    return (
        f"a copy moves {max(readings):.1f} GB/s (the best of {len(readings)} readings from {min(readings):.1f})"
        if readings
        else "no copy was timed"
    )


def baseline_lines(run: Run) -> list[str]:
    """What the baselines are, and what production ran on: by pairs of the two."""
    counts: dict[tuple[str, str], int] = {}
    for s in run.shapes:
        if s.baseline and s.shape.orig_backend:
            counts[s.shape.orig_backend, s.baseline] = counts.get((s.shape.orig_backend, s.baseline), 0) + 1
    lines = []
    for (ran, base), count in counts.items():
        is_same = ran in (base, base.split("/")[0])
        what = f"{base} is what {ran} of production ran on" if is_same else f"{base} in place of {ran}, which production ran on"
        lines.append(f"base: {what}, {count} shapes")
    return lines


def show(run: Run, path: str, interrupted: bool) -> None:
    info, args = run.environment, run.arguments
    weights = "cold weights, rotated through copies" if args.get("cold") else "warm weights, one copy"
    where = info["gpu"] or f"{info['cpu']}, {info['threads']} threads"
    terminal.say(f"metalmm {info['metalmm']} on device {info['device']} ({where}); {weights}; {copy_text(run)}", "bold")
    if note := info.get("note"):
        terminal.say(note)
    if not run.shapes:
        return
    shares = step_share(run)
    rows = [_row(run, i, s, shares.get(i)) for i, s in enumerate(run.shapes)]
    numbers = [0, 2, 4, 5, 6, 7, 8, 10, 11]
    terminal.table(COLUMNS, rows, numbers=numbers, first_to_go=(11, 8, 10, 9, 7, 6, 2, 0))
    terminal.say(
        "ms: median of the device's time. noise: how far two series of one variant came out apart. share: of calls x ms. over base: the baseline's "
        "median over it, of one that is not emulated. ties, =: not to be told from the winner in this run. of copy: bytes that must move over the copy's rate; warm weights may come from a cache, above 100%."
    )
    noisy = sum(1 for s in run.shapes if s.twin and s.noise > _NOISY)
    if noisy:
        terminal.say(f"!: {noisy} shapes were measured with a noise above {_NOISY:.0%}; another run may choose another winner", "yellow")
    for line in baseline_lines(run):
        terminal.say(line)
    for shape, r in run.bad():
        terminal.say(
            f"{shape.short}: {r.variant} {'FAILED' if r.failed else 'WRONG'}: {r.failed or r.wrong or f'maxRel {r.max_rel:.2e}'}", "red"
        )
    for gone in run.left_out:
        share = f" ({gone.calls} calls, {gone.total_ms or 0:.1f} ms in production)" if gone.calls else ""
        terminal.say(f"not run: {gone.text}{share}: {gone.why}")
    for line in skip_lines(run):
        terminal.say(line)
    total, bad = sum(len(s.results) for s in run.shapes), len(run.bad())
    stopped = sum(1 for s in run.shapes for r in s.results if r.stopped)
    terminal.say(
        f"{total - bad} of {total} results right"
        + (f", {bad} wrong or failed" if bad else ", each within the float64 bound of docs/method.md")
        + (f"; {stopped} stopped early, many times slower than the best" if stopped else "")
        + (f"; {len(run.shapes)} of {run.planned} shapes" if interrupted else "")
        + f". Every sample: {path}"
    )
