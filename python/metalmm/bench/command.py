"""``metalmm bench``: which variant is right and which is fastest on each shape, as a page to read or in the format of the older harness."""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from .. import Device, Variant, _core, backends, files, manifest, terminal, variants
from ..errors import Error
from ..variant import end_of, kind_of
from . import check, models, page, report, results, runner, sizes
from .copy import measured_copy
from .results import Run
from .runner import Rule
from .sizes import Shape, Sizes

DEFAULT_JSON = "metalmm-bench.json"
Work = list[tuple[Shape, list[Variant]]]
# What a run must have in common with the one that it goes on from.
_SAME_ARGUMENTS = ("sizes", "spec", *models.ARGUMENTS, "shapes", "top", "backends", "manifest", "cold", "all", "seed", "rule", "check")
_SAME_ENVIRONMENT = ("device", "threads", "cpu", "gpu", "metalmm", "compiler", "commit")


class UsageError(Error, ValueError):
    """Arguments that say nothing, or contradict each other."""


def add_shape_arguments(parser: argparse.ArgumentParser) -> None:
    """What to run: a sizes file or log, or shapes written by hand."""
    parser.add_argument(
        "sizes", nargs="?", type=Path, metavar="SIZES|LOG", help="profile summary or log with the shapes (default: a Qwen2.5-0.5B decode)"
    )
    parser.add_argument("--sizes", dest="sizes_by_name", type=Path, metavar="SIZES|LOG", help="the same")
    parser.add_argument(
        "--spec", action="append", default=[], help="a shape instead, such as 'm=1 n=4864 k=896 nt bias calls=24'; again for more"
    )
    models.add_model_arguments(parser)
    parser.add_argument("--top", type=int, help="only so many shapes, those of most time in the profile")
    parser.add_argument("--shapes", help="numbers ('1,3') or words that a shape must have ('n=896 k=4864')")


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """How to measure."""
    env = {key: value for key, value in os.environ.items() if value.strip()}
    parser.add_argument("--backends", default=env.get("MATMUL_BACKENDS"), help="families, comma-separated [MATMUL_BACKENDS]")
    parser.add_argument("--all", action="store_true", help="include the variants that are off")
    parser.add_argument(
        "--iters", type=int, default=env.get("MATMUL_BENCH_ITERS"), help="so many samples of each, instead of the rule [MATMUL_BENCH_ITERS]"
    )
    parser.add_argument(
        "--warmup", type=int, default=env.get("MATMUL_BENCH_WARMUP", "1"), help="passes that do not count [MATMUL_BENCH_WARMUP]"
    )
    parser.add_argument(
        "--spread", type=float, default=Rule.spread, help="measure until half the median's 95%% interval is at most this part of it"
    )
    parser.add_argument("--least-time", type=float, default=Rule.least, help="seconds of a variant's turns, at least")
    parser.add_argument("--most-time", type=float, default=Rule.most, help="and at most")
    parser.add_argument(
        "--bad-rel",
        type=positive,
        default=env.get("MATMUL_BAD_REL_THRESHOLD", "1e-3"),
        help="maxRel of a wrong variant [MATMUL_BAD_REL_THRESHOLD]",
    )
    parser.add_argument("--rounds", type=int, default=Rule.rounds, help="turns of each shape, apart in time")
    parser.add_argument(
        "--timeout", type=float, default=runner.TIMEOUT_SECONDS, help="seconds after which a dispatch is ended, on device cpu (60)"
    )
    parser.add_argument("--seed", type=seed, default=0, help="of the operands")
    parser.add_argument(
        "--check",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="run each variant in debug mode first; default: those of your own manifests",
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_shape_arguments(parser)
    add_run_arguments(parser)
    parser.add_argument("--format", choices=["page", "seeds"], default="page", help="seeds: the older harness's lines, with its tags")
    parser.add_argument("--sort", choices=["gpu", "cpu"], help="of --format seeds; default: the manifest's order")
    parser.add_argument("--best-only", action="store_true", help="of --format seeds: only lines with a tag")
    parser.add_argument(
        "--cold", action="store_true", help="rotate the weights through copies that together are twice the last-level cache"
    )
    parser.add_argument("--resume", action="store_true", help="go on with the run in the --json file")
    parser.set_defaults(run=main)


def read_sizes(args: argparse.Namespace) -> Sizes:
    """The shapes that the arguments ask for. Raises SizesError, UsageError."""
    given = [x for x in (args.sizes, args.sizes_by_name) if x]
    if len(given) + bool(args.spec) + (args.model is not None) > 1:
        raise UsageError("a sizes file, --spec and --model, or two sizes files: give one of them")
    found = models.sizes_of(args) or (sizes.from_specs(args.spec) if args.spec else sizes.load(given[0] if given else sizes.DEFAULT))
    found.shapes = sizes.select(found.shapes, args.shapes)
    if args.top is not None:
        if args.top < 1:
            raise UsageError("--top takes at least 1")
        sizes.keep_top(found, args.top)
    if len(found.shapes) > 100:
        print(f"metalmm: {len(found.shapes)} shapes; --top 50 keeps those of most time", file=sys.stderr)
    if not found.shapes:
        raise UsageError("there is no shape that can be run\n" + "\n".join(found.left_out_lines()))
    return found


def seed(text: str) -> int:
    """For argparse."""
    if not text.isdecimal() or len(text) > 18:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least 0")
    return int(text)


def positive(text: str) -> float:
    """For argparse."""
    with contextlib.suppress(ValueError):
        if 0 < (found := float(text)) < math.inf:
            return found
    raise argparse.ArgumentTypeError(f"{text!r} is no number above 0")


def rule_of(args: argparse.Namespace) -> Rule:
    iters = None if args.iters is None else int(args.iters)
    if (iters is not None and iters < 1) or args.warmup < 0 or (iters is None and args.warmup < 1):
        raise UsageError("--iters takes at least 1, --warmup at least 0, and 1 without --iters")
    if not 1 <= args.rounds <= 100:
        raise UsageError("--rounds takes 1 to 100")
    if not 0 < args.timeout <= 1e6:
        raise UsageError("--timeout takes seconds, up to a million")
    if not 0 < args.spread < 1:
        raise UsageError("--spread takes a number between 0 and 1")
    if not 0 <= args.least_time <= args.most_time < 1e6:
        raise UsageError("--least-time and --most-time take seconds, up to a million, the first at most the second")
    return Rule(
        spread=args.spread, least=args.least_time, most=args.most_time, warmup=args.warmup, rounds=1 if iters else args.rounds, fixed=iters
    )


def choose(shapes: Sequence[Shape], args: argparse.Namespace, device: Device) -> tuple[Work, dict[tuple[str, str], int]]:
    """The variants for each shape, and those that are left out, by why, with on how many shapes."""
    families = [f.strip() for f in args.backends.split(",")] if args.backends else None
    known = manifest.families()
    if families and (unknown := [f for f in families if f not in known]):
        raise UsageError(f"--backends {unknown[0]}: no such family; there are {', '.join(sorted(known))}")
    candidates = [v for v in variants() if not families or v.family in families]
    work, skipped = Work(), dict[tuple[str, str], int]()
    for shape in shapes:
        chosen = []
        for v in candidates:
            if not any(f.takes(kind_of(shape.storage), end_of(shape.also_n, shape.swiglu)) for f in v.forms):
                continue  # of another operation
            why = v.unavailable(device) or v.lacks(shape.spec) or ("" if v.enabled or args.all else f"off: {v.reason}")
            if why:
                skipped[str(v), why] = skipped.get((str(v), why), 0) + 1
            else:
                chosen.append(v)
        work.append((shape, chosen))
    return work, skipped


def measure(
    device: Device, work: Work, rule: Rule, run: Run, args: argparse.Namespace, progress: terminal.Progress
) -> Iterator[runner.ShapeRun]:
    """Runs what `run` does not have yet, shape by shape, into it."""
    known = {s.shape: s for s in run.shapes}
    todo = [(shape, vs) for shape, vs in work if shape not in known]
    left = [(shape, vs) for shape, vs in work if shape not in known or known[shape].rounds < rule.rounds]
    trials = check.check_all([(s, [v for v in vs if _is_checked(v, args.check)]) for s, vs in todo], args.seed, args.timeout, progress)
    untried = [(s, [v for v in vs if check.is_own(v) and not _is_tried(device, trials.get((str(v), s)))]) for s, vs in todo]
    for pair, why in check.try_all(device, untried, args.seed, args.timeout, progress).items():
        trials[pair] = replace(trials.get(pair, check.Checked()), failed=why)
    uncompiled = runner.compile_all(device, left, progress)
    progress.begin("measuring", sum(_work(shape, vs) for shape, vs in todo) + (rule.rounds - 1) * sum(_work(s, []) for s, _ in left))
    for turn in range(rule.rounds):
        for shape, vs in left:
            before = known.get(shape)
            if before and before.rounds > turn:
                continue
            tried = {str(v): trials.get((str(v), shape), check.Checked()) for v in vs}
            failures = {str(v): text for v in vs if (text := uncompiled.get((str(v), _core._specialization(shape.spec))))}
            failures |= {name: text for name, trial in tried.items() if (text := trial.failed or trial.wrong)}
            copies = runner.cold_copies(shape, device) if args.cold else 1
            chosen = [v for v in vs if str(v) in before.survivors()] if before else vs
            twin = before.twin.variant if before and before.twin else None
            done = runner.ShapeRun(shape, [], None, copies, None)
            if chosen:
                done = runner.run_shape(
                    device, shape, chosen, rule=rule, copies=copies, seed=args.seed + turn, progress=progress, failures=failures, twin=twin
                )
            if before:
                before.merge(done)
            else:
                known[shape] = done
                run.shapes.append(done)
                for r in done.results:
                    r.checked = tried[r.variant].ran
                    if wrong := tried[r.variant].wrong:
                        r.wrong, r.failed = wrong, ""
            progress.step(_work(shape, [] if before else vs))
            yield known[shape]


def _is_checked(v: Variant, asked: bool | None) -> bool:
    return check.is_own(v) if asked is None else asked


def _is_tried(device: Device, checked: check.Checked | None) -> bool:
    """Whether the check said all that a trial on this device can."""
    if not device.backend.ends_processes:
        return True
    return bool(checked and (checked.failed or checked.wrong or device.name == backends.debugging()))


def _work(shape: Shape, vs: Sequence[Variant]) -> float:
    """What it is likely to take, beside others: variants times megabytes, and a share that does not grow with them."""
    return (len(vs) + 8) * (1.0 + shape.bytes / 4e6)


def start_run(args: argparse.Namespace, device: Device, found: Sizes, skipped: dict[tuple[str, str], int], rule: Rule) -> Run:
    kept = {key: value for key, value in vars(args).items() if key not in ("run", "command")}
    arguments = {key: value if isinstance(value, (bool, int, float, type(None))) else str(value) for key, value in kept.items()}
    arguments["rule"], arguments["rounds"] = str(rule), rule.rounds
    skips = [{"variant": v, "why": why, "shapes": count} for (v, why), count in skipped.items()]
    return Run(runner.environment(device), arguments, skipped=skips, left_out=found.left_out, planned=len(found.shapes))


def go_on(run: Run, path: Path) -> None:
    """Takes what an earlier run of the same measured from its file. Raises UsageError where it was not the same."""
    if not path.exists():
        raise UsageError(f"--resume: there is no {path}")
    before = results.load(path)
    before.shapes = [s for s in before.shapes if _has_same_kernels(s)]
    different = results.same_runs(before.arguments, run.arguments, _SAME_ARGUMENTS)
    different += results.same_runs(before.environment, run.environment, _SAME_ENVIRONMENT)
    if different:
        raise UsageError(f"--resume: {path} was measured with another {', '.join(different)}; run it as it was, or without --resume")
    run.shapes, run.copy_readings = before.shapes, before.copy_readings
    resumed = before.arguments.get("resumed")
    run.arguments["resumed"] = (resumed if isinstance(resumed, int) else 0) + 1


def _has_same_kernels(s: runner.ShapeRun) -> bool:
    """A shape whose kernels have changed since is measured anew."""
    return all(r.kernel_sha256 == manifest.kernel_sha256(r.variant, s.shape.spec) for r in s.results)


def _check_no_rest(path: Path) -> None:
    """Raises UsageError for a file that holds the finished part of an interrupted run."""
    try:
        before = results.load(path)
    except files.FileError:
        return
    if before.shapes and not before.is_complete:
        raise UsageError(
            f"{path} holds {len(before.shapes)} shapes of an interrupted run; --resume goes on with it, or give another --json, or remove it"
        )


def main(args: argparse.Namespace) -> int:
    """0 if every variant was right everywhere, 1 if one was wrong or failed, 130 if it was interrupted."""
    seeds_format = args.format == "seeds"
    rule = rule_of(args)
    found = read_sizes(args)
    to_stdout = args.json == "-"
    path = None if to_stdout else Path(args.json) if args.json else None if seeds_format else Path(DEFAULT_JSON)
    device = runner.measuring_device(args.device, args.timeout)
    work, skipped = choose(found.shapes, args, device)
    if not any(chosen for _, chosen in work):
        why = "; ".join([*dict.fromkeys(why for _, why in skipped)][:3]) or "metalmm variants lists what each takes"
        raise UsageError(
            f"no variant {f'of {args.backends} ' if args.backends else ''}takes any of the shapes on device {device.name}: {why}"
        )
    run = start_run(args, device, found, skipped, rule)
    if args.resume:
        if path is None:
            raise UsageError("--resume goes on with the run in the file of --json FILE")
        go_on(run, path)
    elif path:
        files.check_output(path, f'"schema": "{results.SCHEMA}"', f"{results.SCHEMA} JSON")
        _check_no_rest(path)
    show = _Seeds(args, device, run, len(found.shapes)) if seeds_format else None
    interrupted = False
    with terminal.Progress() as progress, contextlib.redirect_stdout(sys.stderr if to_stdout else sys.stdout):
        try:
            if show:
                print(show.head(), flush=True)
                for gone in found.left_out_lines():
                    print(gone)
            else:
                run.copy_readings.append(measured_copy(device))
            for done in measure(device, work, rule, run, args, progress):
                if show:
                    print(show.section(done), flush=True)
                if path:
                    files.write_json(path, run.as_json())
            if not show:
                run.copy_readings.append(measured_copy(device))
        except KeyboardInterrupt:
            interrupted = True
    if path and (run.shapes or not interrupted):
        files.write_json(path, run.as_json())
    if to_stdout:
        files.give_json("-", run.as_json())
    elif show:
        print(show.end(skipped))
    else:
        page.show(run, str(path), interrupted)
    if interrupted:
        kept = f"what is finished is kept in {path}; --resume goes on" if path and run.shapes else "nothing was kept"
        print(f"metalmm bench: interrupted; {kept}", file=sys.stderr)
        return 130
    return 1 if run.bad() else 0


class _Seeds:
    """The older harness's format."""

    def __init__(self, args: argparse.Namespace, device: Device, run: Run, shapes: int) -> None:
        self.args, self.device, self.run, self.shapes = args, device, run, shapes

    def head(self) -> str:
        args, info = self.args, self.run.environment
        weights = "cold weights (rotated through copies)" if args.cold else "warm weights (one copy)"
        lines = [
            f"Matmul benchmark summary (iterations={args.iters or 'by rule'})",
            runner.describe(self.device, info),
            f"metalmm={info['metalmm']} commit={info['commit']} warmup={args.warmup} {weights}",
        ]
        if note := info["note"]:
            lines.append(f"{note} 'vs orig' compares with an Apple GPU in production.")
        return "\n".join(lines)

    def section(self, done: runner.ShapeRun) -> str:
        shape, args = done.shape, self.args
        if not done.results:
            return f"Spec {shape}:\n   - no variant supports it"
        text = report.section(shape, done.results, done.baseline, bad_rel=args.bad_rel, sort=args.sort, best_only=args.best_only)
        if shape.orig_backend and (done.baseline is None or done.baseline.split("/")[0] != shape.orig_backend):
            instead = f"; {done.baseline} stands in for it" if done.baseline in {r.variant for r in done.results} else ""
            text += f"\n     (production ran on {shape.orig_backend}, which device {self.device.name} does not have{instead})"
        return text

    def end(self, skipped: dict[tuple[str, str], int]) -> str:
        lines = []
        if skipped:
            lines.append("Skipped:")
            lines += [f"   - {v} on {'all' if n == self.shapes else n} of {self.shapes} shapes: {why}" for (v, why), n in skipped.items()]
        lines.append(
            "Winners by shape:\n" + report.winners([(s.shape, s.results) for s in self.run.shapes if s.results], self.args.bad_rel)
        )
        total, wrong = sum(len(s.results) for s in self.run.shapes), len(self.run.bad())
        verdict = f", {wrong} WRONG" if wrong else "; each within the float64 bound of docs/method.md"
        lines.append(f"{total - wrong} of {total} results right{verdict}")
        return "\n".join(lines)
