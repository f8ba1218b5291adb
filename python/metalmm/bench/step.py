"""``metalmm step``: a whole decode step as one recording, each call with weights of its own, under one choice of variants or another."""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import statistics as numbers
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from .. import Device, Error, QuantizedArray, Recording, Variant, files, manifest, terminal, tuning, variants
from ..weight_files import WeightFile, load_gguf
from . import command, page, results, runner
from .copy import measured_copy
from .report import ms
from .results import decide
from .runner import Inputs, Rule
from .sizes import NO_TIMES, LeftOut, Shape, Sizes
from .statistics import median_of, verdict

_LONG_MS = 500.0  # of a step that need not run twice in its turn
POLICIES = ("recorded", "best", "tuned")


@dataclass
class Plan:
    """The calls of one step: shapes with how often each is called, and what is left out of it, with its share of the profile's time."""

    calls: list[tuple[Shape, int]]
    left_out: list[LeftOut]
    steps: int | None


def plan_of(found: Sizes, steps: int | None) -> Plan:
    """steps: how many the profile saw; by default Sizes.steps, and one where the shapes were written by hand. Shapes that differ in n or k
    alone, such as a context that grows, are one call site: it is given its middle shape. Without counts, each shape is called once."""
    if not any(s.calls for s in found.shapes):
        return Plan([(s, 1) for s in found.shapes], list(found.left_out), None)
    steps = steps or found.steps or 1
    chosen: list[tuple[Shape, int]] = []
    left = list(found.left_out)
    rest = []
    for s in found.shapes:
        if (s.calls or 0) / steps >= 0.5:
            chosen.append((s, max(1, round((s.calls or 0) / steps))))
        else:
            rest.append(s)
    for group in _sites(rest):
        total = sum(s.calls or 0 for s in group)
        count = round(total / steps)
        if count:
            ordered, seen = sorted(group, key=lambda s: (s.n, s.k)), 0
            for middle in ordered:
                seen += middle.calls or 0
                if 2 * seen >= total:
                    break
            chosen.append((middle, count))
        else:
            why = f"{total} calls in {steps} steps are not one a step"
            left += [LeftOut(s.short, why, s.calls, s.total_ms) for s in group]
    return Plan(chosen, left, steps)


def _sites(shapes: Sequence[Shape]) -> list[list[Shape]]:
    """Shapes that differ in n alone, or in k alone, together: by which of the two more of them agree."""
    groups: dict[tuple[Any, ...], list[Shape]] = {}
    keys = {s: [(replace(s, n=0, **NO_TIMES), "k"), (replace(s, k=0, **NO_TIMES), "n")] for s in shapes}
    for s in shapes:
        for key in keys[s]:
            groups.setdefault(key, []).append(s)
    chosen: dict[tuple[Any, ...], list[Shape]] = {}
    for s in shapes:
        chosen.setdefault(max(keys[s], key=lambda key: len(groups[key])), []).append(s)
    return list(chosen.values())


def in_order(calls: Sequence[tuple[Shape, int]]) -> list[int]:
    """The calls of a step by their shape's place. The calls of each shape are spread evenly over the step, as layers make them. A shape
    that is called once stands in the middle of its turn."""
    spread = [((j + 0.5) / count, i) for i, (_, count) in enumerate(calls) for j in range(count)]
    return [i for _, i in sorted(spread)]


@dataclass
class Policy:
    """Which variant each shape runs on; None where there is none, which leaves the calls out."""

    name: str
    variants: list[Variant | None]
    why: list[str] = field(default_factory=list)


def policy_of(name: str, plan: Plan, device: Device, best: dict[Shape, str]) -> Policy:
    """Raises UnknownVariantError for a name that is no policy, family or variant."""
    found: list[Variant | None] = []
    why = []
    for shape, _ in plan.calls:
        chosen: str | None = None
        reason = ""
        if name == "recorded":
            chosen = runner.baseline_of(shape, device)
            reason = f"production ran on {shape.orig_backend}" if shape.orig_backend else "the profile does not say what it ran on"
        elif name == "best":
            chosen, reason = best.get(shape), "measured best"
        elif name == "tuned":
            chosen, reason = tuning.choose(device, shape.spec)
        elif "/" in name:
            chosen, reason = manifest.get(name), "asked for"
        else:
            members = variants(shape.spec, family=name, device=device)
            members.sort(key=lambda v: (not v.enabled, shape.layout not in v.baseline))
            chosen, reason = (str(members[0]) if members else None), "the family's baseline for the layout, else its first"
        v = manifest.get(chosen) if chosen else None
        if v and (v.lacks(shape.spec) or not v.runs_on(device)):
            reason, v = v.lacks(shape.spec) or f"{v} does not run on device {device.name}", None
        found.append(v)
        why.append(reason)
    return Policy(name, found, why)


@dataclass
class Measured:
    """What a step took under one policy, in milliseconds. shares: of the device's time, by the plan's shapes; None where it does not
    tell. bytes: that its calls must move."""

    policy: Policy
    device_ms: list[float | None]
    host_ms: list[float]
    bytes: int
    calls: int
    shares: list[float | None]
    wrong: list[str]


class _Weights:
    """B of each call, of its own, and what the calls of a shape share. file, tensors: what B is, where it is not drawn."""

    def __init__(
        self, device: Device, plan: Plan, seed: int, file: WeightFile | None = None, tensors: Mapping[Any, Sequence[tuple[str, ...]]] = {}
    ) -> None:
        self.inputs: list[Inputs] = []
        self.calls: list[list[Any]] = []
        for shape, count in plan.calls:
            names = tensors.get(shape.spec, ()) if file is not None else ()
            own = [file[name] for name in names[0]] if file is not None and names else []
            inputs = Inputs(device, shape, seed, 1, own)
            first = inputs.weights[0]
            self.inputs.append(inputs)
            self.calls.append([first])
            for i in range(1, count):
                again = first
                if file is not None and names:
                    parts = tuple(file[name] for name in names[i])
                    again = parts if shape.also_n else parts[0]
                self.calls[-1].append(_again(device, again))
        # One row for all of m=1: calls that write the same memory run one after another, as a step's do, also where a device could overlap them.
        widest = max((s.columns for s, _ in plan.calls if s.m == 1 and s.batch == 1), default=1)
        rows = {dtype: device.empty((1, widest), dtype) for dtype in {s.dtype for s, _ in plan.calls}}
        for inputs, (s, _) in zip(self.inputs, plan.calls, strict=True):
            if s.m == 1 and s.batch == 1:
                inputs.out = rows[s.dtype][:, : s.columns]


def _again(device: Device, weights: Any) -> Any:
    """A copy of an array, a QuantizedArray or several."""
    if isinstance(weights, tuple):
        return tuple(_again(device, w) for w in weights)
    return weights.to(device) if isinstance(weights, QuantizedArray) else device.array(weights)


def _record(device: Device, plan: Plan, weights: _Weights, policy: Policy, per_dispatch: bool = False) -> tuple[Any, list[int]]:
    """A batch with the step's calls, and the shape of each."""
    turn = [0] * len(plan.calls)
    batch, order = device.batch(per_dispatch=per_dispatch), []
    for i in in_order(plan.calls):
        v = policy.variants[i]
        if v is None:
            continue
        inputs = weights.inputs[i]
        w = weights.calls[i][turn[i] % len(weights.calls[i])]
        turn[i] += 1
        batch.add(inputs.prepare(device, v, w))
        order.append(i)
    return batch, order


def _wrong(device: Device, plan: Plan, weights: _Weights, policy: Policy) -> dict[int, str]:
    """Every shape's call judged once: of the calls that are wrong, by their index in the plan, what is."""
    found = {}
    for i, ((shape, _), v) in enumerate(zip(plan.calls, policy.variants, strict=True)):
        if v is None:
            continue
        try:
            text = weights.inputs[i].judge(device, v)
        except Error as error:
            text = runner.first_lines(str(error))
        if text:
            found[i] = f"{shape.short}: {v}: {text}"
    return found


def measure(
    device: Device, plan: Plan, policies: Sequence[Policy], rule: Rule, weights: _Weights, progress: terminal.Progress
) -> list[Measured]:
    """Each policy's step as a recording; they take turns, of two replays, the second of which counts."""
    found: list[Measured] = []
    recordings: list[Recording] = []
    progress.begin("recording", len(policies))
    for policy in policies:
        progress.note(policy.name)
        wrong = _wrong(device, plan, weights, policy)
        policy = replace(policy, variants=[None if i in wrong else v for i, v in enumerate(policy.variants)])
        batch, order = _record(device, plan, weights, policy)
        size = sum(plan.calls[i][0].bytes for i in order)
        found.append(Measured(policy, [], [], size, len(order), _shares(device, plan, weights, policy), list(wrong.values())))
        recordings.append(batch.record())
        progress.step()
    begin, spent = time.monotonic(), 0.0
    most = rule.most * 20 * len(policies)  # a step is hundreds of calls
    progress.begin("steps", most)
    for turn in range(10_000):
        for m, recording in zip(found, recordings, strict=True):
            if not m.calls:
                continue
            progress.note(m.policy.name)
            # What ran before it leaves caches and threads (OpenBLAS's go on spinning) behind.
            if m.host_ms and m.host_ms[-1] < _LONG_MS:
                recording.replay()
                recording.wait()
            start = time.perf_counter()
            recording.replay()
            recording.wait()
            taken = time.perf_counter() - start
            if turn >= rule.warmup:
                seconds = recording.timing.device
                m.host_ms.append(taken * 1e3)
                m.device_ms.append(None if seconds is None else seconds * 1e3)
        now = time.monotonic() - begin
        progress.step(now - spent)
        spent = now
        counted = turn + 1 - rule.warmup
        if (rule.fixed and counted >= rule.fixed) or (not rule.fixed and counted >= 6 and (spent >= most or _settled(found, rule))):
            break
    return found


def _settled(found: Sequence[Measured], rule: Rule) -> bool:
    return all(median_of(m.host_ms).spread <= rule.spread for m in found if m.host_ms)


def _shares(device: Device, plan: Plan, weights: _Weights, policy: Policy) -> list[float | None]:
    """Of two runs that time each dispatch, the second."""
    for _ in range(2):
        batch, order = _record(device, plan, weights, policy, per_dispatch=True)
        with batch:
            pass
        times = batch.timing.dispatches
    if len(times) != len(order) or any(t is None for t in times) or not order:
        return [None] * len(plan.calls)
    sums = [0.0] * len(plan.calls)
    for i, seconds in zip(order, times, strict=True):
        sums[i] += seconds or 0.0
    return [s / sum(sums) if sum(sums) else None for s in sums]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    command.add_shape_arguments(parser)
    command.add_run_arguments(parser)
    parser.add_argument(
        "--choice", action="append", help="recorded, best, tuned, a family or a variant; again for more (default: recorded, best and tuned)"
    )
    parser.add_argument("--steps", type=int, help="steps that the profile saw; default: the calls of the widest m=1 shape")
    parser.add_argument("--results", metavar="RUN.json", help="what 'best' means; default: measured first, with cold weights")
    parser.add_argument(
        "--weights", action="store_true", help="of --model FILE.gguf its own weights, each call its tensor; A and biases stay drawn"
    )
    parser.add_argument("--memory", type=command.positive, help="GB that the weights may take; default: three quarters of what is free")
    parser.set_defaults(run=main, cold=True)  # what it benches on the way


def main(args: argparse.Namespace) -> int:
    """0; 1 where a call was wrong or failed."""
    rule, found = command.rule_of(args), command.read_sizes(args)
    if args.steps is not None and args.steps < 1:
        raise command.UsageError("--steps takes at least 1")
    if args.model is not None and "," in (args.m or ""):
        raise command.UsageError(f"--m {args.m}: a step has one number of rows")
    if args.weights and not found.tensors:
        raise command.UsageError("--weights takes --model FILE.gguf")
    plan = plan_of(found, args.steps)
    if not plan.calls:
        raise command.UsageError("there is no call in a step")
    size = sum(count * shape.bytes for shape, count in plan.calls)
    limit = args.memory * 1e9 if args.memory is not None else 0.75 * free_memory()
    if size > limit:
        raise command.UsageError(
            f"the step's weights take {size / 1e9:.2f} GB of {limit / 1e9:.2f} GB that are allowed; --memory or --shapes changes that"
        )
    device = Device(args.device)  # without guards, which the host's time would hold; each call is judged once before
    names = list(dict.fromkeys(args.choice or POLICIES))
    with terminal.Progress() as progress, contextlib.redirect_stdout(sys.stderr if args.json == "-" else sys.stdout):
        best = _best(args, plan, rule, progress) if "best" in names else {}
        policies = [policy_of(name, plan, device, best) for name in names]
        idle = [policy for policy in policies if not any(policy.variants)]  # of the default ones "recorded", where there is no profile
        if idle and (args.choice or len(idle) == len(policies)):
            raise command.UsageError(f"--choice {idle[0].name}: it runs no call of the step: {idle[0].why[0] or 'none was measured'}")
        policies = [policy for policy in policies if policy not in idle]
        progress.begin("copy", 1)
        copy = measured_copy(device)
        progress.begin("weights", 1)
        file = load_gguf(args.model, dtype=args.type or "float16") if args.weights else None
        done = measure(device, plan, policies, rule, _Weights(device, plan, args.seed, file, found.tensors), progress)
    data = as_json(plan, done, copy, runner.environment(device))
    if args.json != "-":
        show(plan, done, copy, device, found, f"weights of {args.model}" if args.weights else "")
    files.give_json(args.json, data)
    return 1 if any(m.wrong for m in done) else 0


def free_memory() -> float:
    """Bytes; infinite where the system does not say."""
    try:
        return float(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    except (ValueError, OSError):
        return math.inf


def _best(args: argparse.Namespace, plan: Plan, rule: Rule, progress: terminal.Progress) -> dict[Shape, str]:
    if args.results:
        run = results.load(args.results)
        by_name = {s.shape.short: d.winner.variant for s in run.shapes if (d := decide(s, run.bad_rel))}
        return {shape: by_name[shape.short] for shape, _ in plan.calls if shape.short in by_name}
    device = runner.measuring_device(args.device, args.timeout)
    wanted = Sizes([shape for shape, _ in plan.calls])
    work, skipped = command.choose(wanted.shapes, args, device)
    run = command.start_run(args, device, wanted, skipped, rule)
    for _ in command.measure(device, work, rule, run, args, progress):
        pass
    return {s.shape: d.winner.variant for s in run.shapes if (d := decide(s, run.bad_rel))}


def _median(values: Sequence[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return numbers.median(known) if known and len(known) == len(values) else None


def as_json(plan: Plan, done: Sequence[Measured], copy: float, environment: dict[str, Any]) -> dict[str, Any]:
    return {
        "schema": "metalmm-step",
        "version": 1,
        "environment": environment,
        "copy_gbps": copy,
        "steps": plan.steps,
        "calls": [{"shape": s.as_json(), "calls": count} for s, count in plan.calls],
        "left_out": [vars(gone) for gone in plan.left_out],
        "policies": [
            {
                "name": m.policy.name,
                "device_ms": m.device_ms,
                "host_ms": m.host_ms,
                "median_device_ms": _median(m.device_ms),
                "median_host_ms": _median(m.host_ms),
                "bytes": m.bytes,
                "calls": m.calls,
                "wrong": m.wrong,
                "variants": [None if v is None else str(v) for v in m.policy.variants],
                "why": m.policy.why,
                "shares": m.shares,
            }
            for m in done
        ],
    }


def show(plan: Plan, done: Sequence[Measured], copy: float, device: Device, found: Sizes, source: str = "") -> None:
    """source: whose weights they are, where they were not drawn."""
    count = sum(c for _, c in plan.calls)
    size = sum(c * s.bytes for s, c in plan.calls)
    steps = f", from a profile of {plan.steps} steps" if plan.steps and plan.steps > 1 else ""
    terminal.say(
        f"A step of {count} matmuls, {size / 1e6:.0f} MB of operands and results, each call with {source or 'weights of its own'}{steps}; "
        f"device {device.name}, where a copy moves {copy:.1f} GB/s",
        "bold",
    )
    if note := device.backend.note:
        terminal.say(note)
    rows = []
    medians = {m.policy.name: median_of(m.host_ms) for m in done if m.host_ms}
    best = min(medians.values(), key=lambda m: m.value, default=None)
    for m in done:
        device_ms, host_ms = _median(m.device_ms), _median(m.host_ms)
        mine = medians.get(m.policy.name)
        against = "" if not mine or not best else "=" if verdict(best, mine) != "slower" else f"{mine.value / best.value:.2f}x"
        rate = m.bytes / (device_ms or host_ms or math.inf) / 1e6
        missing = sum(c for (_, c), v in zip(plan.calls, m.policy.variants, strict=True) if v is None)
        low, high = (min(m.host_ms), max(m.host_ms)) if m.host_ms else (0.0, 0.0)
        rows.append(
            [
                m.policy.name,
                ms(device_ms),
                ms(host_ms),
                f"{low:.1f}-{high:.1f}",
                f"{m.calls}",
                f"{missing or ''}",
                f"{rate:.1f}",
                f"{1e3 / host_ms:.3g}" if host_ms and not missing else "",
                page.percent(rate / copy),
                against,
            ]
        )
    terminal.table(
        ("choice", "device", "host", "host range", "calls", "without", "GB/s", "steps/s", "of copy", "host to best"),
        rows,
        numbers=range(1, 10),
    )
    detail = []
    for i, (shape, calls) in enumerate(plan.calls):
        cells = [
            f"{m.policy.variants[i] or 'none: ' + m.policy.why[i]} {page.percent(m.shares[i]) if m.policy.variants[i] else ''}"
            for m in done
        ]
        detail.append([shape.short, str(calls), *cells])
    terminal.table(("shape", "calls", *(m.policy.name for m in done)), detail, numbers=(1,))
    for m in done:
        if m.policy.name == "recorded":
            ran = {
                f"{shape.orig_backend} in production, here {v}" for (shape, _), v in zip(plan.calls, m.policy.variants, strict=True) if v
            }
            terminal.say(f"recorded: {'; '.join(sorted(ran))}")
    terminal.say(
        "host: from replay() to the end of wait(), medians; =: not to be told from the best. The percentage beside a variant is its share of the device's time in that step."
    )
    for m in done:
        for text in m.wrong:
            terminal.say(f"{m.policy.name}: {text}; its calls are left out", "red")
    total = found.total_ms
    for gone in plan.left_out:
        share = f" ({gone.total_ms / total:.1%} of the profile's matmul time)" if gone.total_ms and total else ""
        terminal.say(f"left out: {gone.text}{share}: {gone.why}")
