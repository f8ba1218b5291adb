"""metalmm doctor: which of our assumptions about a device hold, on one screen and in one file.

Nobody who wrote metalmm had a Mac. Each check is one that README calls unverified, or a choice that hardware alone decides; a check that
fails does not keep the others from running.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import math
import mmap
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from . import __version__, _core, doctor_rows, files, matmul, numerics, pipelines
from .bench import copy, runner
from .bench.sizes import Shape
from .device import Device, capture
from .errors import Error, UnsupportedError
from .manifest import variants
from .variant import Variant, end_of

_WORTH = 0.1  # of the time, which an option must save to be recommended
_BATCH = 170  # the matmuls of a decode step
_RISKY_SECONDS = 10.0  # kept for what comes last
_ROUNDS = 15
_V = "gemv/baseline"


@dataclass
class Check:
    """state: ok; wrong, which makes the exit status 1; without: it does not work here, and `what` says what we do instead; skipped.

    In the file alone a state may be running: what was at work when the process ended.
    """

    section: str
    name: str
    state: str
    what: str
    seconds: float
    data: dict[str, Any] = field(default_factory=dict)


class Without(Exception):
    """A feature that is not there: its words say what is done instead."""


class Wrong(Exception):
    """Something that is not as it must be; with data, all that is known of it."""

    def __init__(self, what: str, data: dict[str, Any] | None = None) -> None:
        super().__init__(what)
        self.data = data or {}


class Doctor:
    """The checks of one device. Each runs under `check`, which notes what came of it."""

    def __init__(self, name: str | None, seconds: float, quiet: bool, file: str | None = None) -> None:
        """file: where all that is known is written before and after each check, so that an abort keeps it."""
        self.device = Device(name)
        self.checks: list[Check] = []
        self.rows: list[doctor_rows.Row] = []
        self.finished = False
        self._file = file
        self._end, self._quiet, self._section = time.monotonic() + seconds, quiet, ""
        self._facts: dict[str, Any] = {}

    @property
    def left(self) -> float:
        return self._end - time.monotonic()

    def say(self, text: str) -> None:
        if not self._quiet:
            print(text, flush=True)

    def section(self, name: str) -> None:
        self._section = name
        self.say(f"\n{name}")

    def check(self, name: str, work: Callable[[], tuple[str, dict[str, Any]] | str]) -> dict[str, Any] | None:
        """Runs it; its data where it is well."""
        start, state, data = time.monotonic(), "ok", dict[str, Any]()
        self.checks.append(Check(self._section, name, "running", "the process ended in this check", 0.0))
        self.save()
        try:
            if self.left <= 0:
                state, what = "skipped", "no time was left for it"
            else:
                done = work()
                what, data = done if isinstance(done, tuple) else (done, {})
        except Without as gone:
            state, what = "without", str(gone)
        except Wrong as bad:
            state, what, data = "wrong", str(bad), bad.data
        except (Error, MemoryError, OSError, RuntimeError, ValueError) as error:
            state, what, data = "wrong", f"{type(error).__name__}: {runner.first_lines(str(error))}", {"message": str(error)}
        self.checks[-1] = Check(self._section, name, state, what, time.monotonic() - start, data)
        self.save()
        self.say(f"  {state.upper() if state == 'wrong' else state:8s}{name:34s}{what}")
        return data if state == "ok" else None

    def data(self) -> dict[str, Any]:
        checks = [asdict(c) for c in self.checks]
        return {"schema": "metalmm-doctor", "version": 2, **self._facts, "finished": self.finished, "checks": checks}

    def save(self) -> None:
        if self._file:
            files.write_json(self._file, self.data())

    # -- sections ------------------------------------------------------------------------------------------------------

    def facts(self) -> dict[str, Any]:
        environment = runner.environment(self.device)
        switches = {k: v for k, v in os.environ.items() if k.startswith(("MTL_", "METAL"))}
        info = dict(self.device.info)
        self.section(f"metalmm {__version__} on {runner.describe(self.device, environment)}")
        cores = self.device.backend.cores(self.device)
        if cores:
            info["gpu_cores"] = cores
        for key, value in {**info, "lacking": " ".join(self.device.lacking) or "nothing", **switches}.items():
            self.say(f"  {key:42s}{value}")
        self._facts = {"environment": environment, "info": info, "lacking": self.device.lacking, "switches": switches}
        return self._facts

    def kernels(self) -> None:
        self.section("kernels: of each strategy one variant's pipelines, for all types of operands and kinds of B")
        self._compile_all([(kind, t) for v in self._first_of_each() for kind, t in _kinds_and_types(v)], keep=0)

    def pipelines(self) -> None:
        self.section("pipelines: of every other variant")
        firsts = set(map(str, self._first_of_each()))
        self._compile_all([(v, v.types[0]) for v in variants(device=self.device) if str(v) not in firsts], keep=_RISKY_SECONDS)

    def _first_of_each(self) -> list[Variant]:
        first = dict[str, Variant]()
        for v in variants(device=self.device, enabled=True):
            first.setdefault(v.family, v)
        return list(first.values())

    def _compile_all(self, chosen: list[tuple[Variant, str]], keep: float) -> None:
        """keep: seconds that are left for others."""
        shapes = [(v, s) for v, t in chosen if (s := small_shape(v, t))]
        self._end -= keep
        for family in dict.fromkeys(v.family for v, _ in shapes):
            self.check(family, lambda family=family: self._compile([c for c in shapes if c[0].family == family]))  # type: ignore[misc]
        self._end += keep

    def _compile(self, chosen: list[tuple[Variant, Shape]]) -> tuple[str, dict[str, Any]]:
        times, failures = dict[str, float](), dict[str, str]()

        def build(group: list[tuple[Variant, Shape]]) -> None:
            start = time.perf_counter()
            self._together(group)
            for v, shape in group:
                try:
                    _core._prepare_pipeline(self.device, v, shape.spec)
                except Error as error:
                    failures[f"{v} {_what(shape)}"] = str(error)
            share = (time.perf_counter() - start) / len(group)
            times.update({f"{v} {_what(shape)}": share for v, shape in group})

        self._in_groups(chosen, build)
        left_out = len(chosen) - len(times)
        if failures:
            name, why = next(iter(failures.items()))
            what = f"{len(failures)} of {len(chosen)} do not compile; {name}: {runner.first_lines(why)}"
            raise Wrong(what, {"failures": failures, "seconds": times, "left_out": left_out})
        text = f"{len(times)} pipelines, {sum(times.values()):.1f} s" + (f"; {left_out} left out for want of time" if left_out else "")
        return text, {"seconds": times, "left_out": left_out}

    def _together(self, group: list[tuple[Variant, Shape]]) -> None:
        if len(group) > 1:
            pipelines.compile_together(self.device, [(str(v), _core._specialization(s.spec)) for v, s in group])

    def _in_groups(self, chosen: list[tuple[Variant, Shape]], build: Callable[[list[tuple[Variant, Shape]]], None]) -> None:
        """What compiles together, while time is left."""
        with ThreadPoolExecutor(self.device.threads or 1) as pool:  # a GPU's compiler by itself: its times are looked at
            for _ in pool.map(lambda group: build(group) if self.left > 0 else None, pipelines.in_groups(self.device, chosen)):
                pass

    def families(self) -> None:
        self.section("results: one variant of each family, float64 the reference")
        first = self._first_of_each()
        kinds = [x for v in first if v.kernel for x in _kinds_and_types(v)]
        shapes = [(v, small_shape(v, dtype, odd)) for v, dtype in kinds for odd in (False, True)]
        self._in_groups([(v, shape) for v, shape in shapes if shape], self._together)
        for v in first:
            self.check(v.family, lambda v=v: self._judge(v))  # type: ignore[misc]

    def _judge(self, v: Variant) -> str:
        done, left_out, failures = 0, 0, dict[str, str]()
        missing = importlib.util.find_spec("ml_dtypes") is None
        for kind, dtype in _kinds_and_types(v):
            for odd in (False, True) if dtype != "bfloat16" or not missing else ():
                shape = small_shape(kind, dtype, odd)
                if shape is None or self.left <= 0:
                    left_out += shape is not None
                    continue
                try:
                    wrong = runner.Inputs(self.device, shape, 7, 1).judge(self.device, v)
                except Error as error:
                    wrong = f"{type(error).__name__}: {error}"
                if wrong:
                    failures[f"{shape.short} {_what(shape)}"] = wrong
                done += not wrong
        if failures:
            where, wrong = next(iter(failures.items()))
            raise Wrong(
                f"{v}, {len(failures)} of {done + len(failures)} shapes; {where}: {runner.first_lines(wrong)}", {"failures": failures}
            )
        less = "; no bfloat16 without the package ml_dtypes" if missing else ""
        return f"{v}: right on {done} shapes{less}" + (f"; {left_out} left out for want of time" if left_out else "")

    def sums_of_mps(self) -> None:
        def look() -> tuple[str, dict[str, Any]]:
            library = next((v for v in variants(device=self.device) if v.library), None)
            if library is None:
                raise Without(f"no library multiplies on this device; it lacks {', '.join(self.device.lacking) or 'one'}")
            worst, coarse = dict[str, float](), False
            for k in (896, 4864, 16384):
                rng = np.random.default_rng(k)
                a = rng.standard_normal((1, k)).astype(np.float16)
                b = rng.standard_normal((k, 64)).astype(np.float16)
                b[k // 2 :], a[:, k // 2 :] = -b[: k - k // 2], a[:, : k - k // 2]  # sums that cancel, in no order
                order = rng.permutation(k)
                a, b = a[:, order], b[order]
                error = np.abs(np.asarray(matmul(library, a, b, device=self.device)) - numerics.reference(a, b))
                worst[str(k)] = float(error.max())
                # Sums walk as far as the root of k, and each step is rounded there: between what float32 and float16 would lose.
                far = math.sqrt(k)
                coarse |= not worst[str(k)] <= far * math.sqrt(float(np.spacing(np.float16(far))) * float(np.spacing(np.float32(far)))) / 2
                if not (error <= numerics.error_bound(a, b)).all():
                    raise Wrong(f"{library}, k={k}: an error of {worst[str(k)]:.3g}, past the bound of sums in float32")
            text = f"{library}: worst error " + ", ".join(f"{x:.2g} at k={k}" for k, x in worst.items())
            if coarse:
                raise Wrong(text + ": within the bound, and more than sums in float32 lose; are they in float16?")
            return text, {"worst": worst}

        self.section("the library's sums of float16, in float32 or not")
        self.check("sums that cancel", look)

    def features(self) -> None:
        self.section("features: they work, or what is done instead")
        info = self.device.info
        self.check("times of each dispatch", self._counters)
        self.check("recordings", self._recordings)
        self.check("pages of NumPy's in place", self._pages)
        self.check("many submissions in flight", self._in_flight)
        if "binary_archives" in info:
            self.check("archives of pipelines", self._archives)
            self.check("residency sets", self._residency)
            self.check("GPU capture", self._capture)

    def _counters(self) -> str:
        x, w = self._operands()
        with self.device.batch(per_dispatch=True) as batch:
            for _ in range(8):
                batch.matmul(_V, x, w)
        each, whole = batch.timing.dispatches, batch.timing.device
        if not each or None in each:
            raise Without("the device does not tell; a batch's time is known as a whole")
        if whole is not None and sum(t or 0 for t in each) > whole * 1.05:
            raise Wrong(f"eight dispatches take {sum(t or 0 for t in each) * 1e6:.1f} us by themselves, and all together {whole * 1e6:.1f}")
        return f"eight take {sum(t or 0 for t in each) * 1e6:.1f} us" + (f" of {whole * 1e6:.1f} in all" if whole is not None else "")

    def _recordings(self) -> str:
        out = _recorded(self.device)
        indirect = self.device.info.get("indirect_command_buffers")
        if indirect is False:
            raise Without(f"{out}; the commands are encoded anew each time, not indirect (GPUs before Apple9; see the options below)")
        return out

    def _pages(self) -> str:
        x, w = np.ones((1, 64), np.float16), pages((64, 256))
        before = self.device.counters.get("wrapped")
        for _ in range(3):
            y = matmul(_V, x, w, device=self.device)
        if not (np.asarray(y) == 64).all():
            raise Wrong("the result of weights on whole pages is wrong")
        if before is None:
            return "used in place"
        made = self.device.counters["wrapped"] - before
        if made == 0:
            raise Without("the GPU does not map them (a virtual machine, or memory of its own); they are copied for each call")
        return f"wrapped {made} time{'s' * (made > 1)} in three calls"

    def _in_flight(self) -> str:
        x, w = self._operands()
        batches, y = [], x
        for _ in range(40):
            batch = self.device.batch()
            y = batch.matmul(_V, y, w)
            batch.submit()
            batches.append(batch)
        del batches
        if not np.array_equal(np.asarray(y), np.asarray(x)):
            raise Wrong("40 submissions, each of which reads what the one before wrote, give a wrong result")
        return "40, each reading what the one before wrote"

    def _archives(self) -> str:
        if not self.device.info["binary_archives"]:
            raise Without("off under MTL_SHADER_VALIDATION; every pipeline is compiled in each process")
        with tempfile.TemporaryDirectory() as folder, _environment("METALMM_CACHE", folder):
            seconds, hits = [], 0
            for _ in range(2):
                with Device(self.device.name) as fresh:
                    start = time.perf_counter()
                    matmul(_V, np.ones((1, 8), np.float16), np.ones((8, 8), np.float16), device=fresh)
                    seconds.append(time.perf_counter() - start)
                    hits = int(fresh.counters["archive_hits"])
        if hits == 0:
            raise Wrong("a pipeline that was put into an archive is not found there")
        return f"found again; the first use of a kernel {seconds[0] * 1e3:.1f} ms, with the archive {seconds[1] * 1e3:.1f} (the source is compiled both times)"

    def _residency(self) -> str:
        if not self.device.info["residency_sets"]:
            raise Without("not before macOS 15; Metal makes resident what each command buffer names")
        held = self.device.counters["resident_bytes"]
        return f"{held / 1e6:.1f} MB of a budget of {int(self.device.info['residency_budget']) / 1e6:.0f}"

    def _capture(self) -> str:
        if os.environ.get("METAL_CAPTURE_ENABLED") != "1":
            raise Without("not asked for: start with METAL_CAPTURE_ENABLED=1 in the environment")
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "doctor.gputrace"
            with capture(path, self.device):
                matmul(_V, *self._operands())
            if not path.exists():
                raise Wrong("no trace was written")
        return "a trace was written"

    def options(self) -> None:
        """What hardware alone decides, both ways."""
        if "untracked" not in self.device.backend.options:
            return
        self._try({"return_on_event": True, "untracked": True, "first_commit": 48, **({} if self._is_risky else {"indirect": False})})

    def risky(self) -> None:
        """What may take the process with it: on GPUs before Apple9 indirect commands were seen to."""
        if "untracked" in self.device.backend.options and self._is_risky:
            self._try({"indirect": True})

    @property
    def _is_risky(self) -> bool:
        return not self.device.info["indirect_command_buffers"]

    def _try(self, trials: dict[str, Any]) -> None:
        self.section(f"options of Device(): right with each, and the time of {_BATCH} matmuls, of one, and of a replay")
        bases = [self._timed("the defaults", {})]
        found = {name: self._timed(f"{name}={value}", {name: value}) for name, value in trials.items()}
        bases.append(self._timed("the defaults, again", {}))
        recommended = dict[str, Any]()
        for name, times in found.items():
            key = {"first_commit": "batch_us", "untracked": "batch_us", "indirect": "replay_us"}.get(name, "call_us")
            if times and all(base and times[key] < (1 - _WORTH) * base[key] for base in bases):
                recommended[name] = trials[name]
        text = ", ".join(f"{k}={v}" for k, v in recommended.items())
        self.check(
            "recommended",
            lambda: (f"Device({text})" if text else f"the defaults: none of them saves {_WORTH:.0%}", {"options": recommended}),
        )

    def _timed(self, name: str, options: dict[str, Any]) -> dict[str, Any] | None:
        def measure() -> tuple[str, dict[str, Any]]:
            with Device(self.device.name, **options) as device:
                _recorded(device)
                x, w = device.array(np.ones((1, 64), np.float16)), device.array(np.eye(64, dtype=np.float16))
                y = x
                with device.batch() as batch:
                    for _ in range(_BATCH):
                        y = batch.matmul(_V, y, w)
                if not np.array_equal(np.asarray(y), np.asarray(x)):
                    raise Wrong(f"{_BATCH} matmuls, each of which reads what the one before wrote, give a wrong result")
                if "mps" not in device.lacking:
                    with device.batch() as batch:
                        z = batch.matmul(_V, batch.matmul("mps/baseline", batch.matmul(_V, x, w), w), w)
                    if not np.array_equal(np.asarray(z), np.asarray(x)):
                        raise Wrong("MPS between two kernels of ours gives a wrong result")
                call = device.prepare(_V, x, w)
                weights = [device.array(np.eye(64, dtype=np.float16)) for _ in range(_BATCH)]
                calls = [device.prepare(_V, x, w) for w in weights]
                recorded = device.batch()
                for c in calls:
                    recorded.add(c)
                recording = recorded.record()

                def step() -> None:
                    with device.batch() as batch:
                        for c in calls:
                            batch.add(c)

                def replay() -> None:
                    recording.replay()
                    recording.wait()

                times = {"batch_us": median_us(step), "call_us": median_us(call, 20), "replay_us": median_us(replay)}
            return f"right; {times['batch_us']:.0f} us, {times['call_us']:.1f}, {times['replay_us']:.0f}", times

        return self.check(name, measure)

    def host(self) -> None:
        def measure() -> tuple[str, dict[str, Any]]:
            x, w = self._operands()
            out, host = self.device.empty((1, 64)), np.ones((1, 64), np.float16)
            call = self.device.prepare(_V, x, w, out=out)
            numbers = np.asarray(w).copy()
            times = {
                "prepared()": median_us(call, 20),
                "matmul(out=)": median_us(lambda: matmul(_V, x, w, out=out), 20),
                "matmul()": median_us(lambda: matmul(_V, x, w), 20),
                "matmul(NumPy)": median_us(lambda: matmul(_V, host, numbers, device=self.device), 20),
            }
            own = call.device_seconds
            text = ", ".join(f"{name} {us:.1f}" for name, us in times.items())
            return text + (f" us, the kernel's own {own * 1e6:.1f} us among them" if own else " us"), {"us": times, "kernel_seconds": own}

        self.section("a whole call from Python, n=k=64, medians (benchmarks/host_overhead.py takes them apart)")
        self.check("calls", measure)

    def shapes(self) -> None:
        self.section("shapes: what auto takes, weights not in the caches and hot in them; `metalmm bench` compares all variants")
        self.check("a copy", self._copy)
        for shape in doctor_rows.shapes():
            self.check(shape.short, lambda shape=shape: self._row(shape))  # type: ignore[misc]

    def _copy(self) -> tuple[str, dict[str, Any]]:
        gbps = copy.measured_copy(self.device)
        return f"{gbps:.0f} GB/s, read and written", {"gbps": gbps}

    def _row(self, shape: Shape) -> tuple[str, dict[str, Any]]:
        try:
            row = doctor_rows.measure(self.device, shape)
        except UnsupportedError as error:
            raise Without(str(error)) from None
        self.rows.append(row)
        return row.text(), {"cold_seconds": row.cold, "hot_seconds": row.hot, "bytes": shape.bytes}

    def _operands(self) -> tuple[Any, Any]:
        return self.device.array(np.ones((1, 64), np.float16)), self.device.array(np.eye(64, dtype=np.float16))


@contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _recorded(device: Device) -> str:
    """A recording of a chain, replayed with other inputs each time."""
    x, y = device.array(np.ones((1, 32), np.float16)), device.empty((1, 32))
    w = device.array(np.eye(32, dtype=np.float16)[::-1] * np.float16(-1))
    batch = device.batch()
    middle = batch.matmul(_V, x, w)
    batch.matmul(_V, middle, w, out=y)
    recording = batch.record()
    for i in range(5):
        x.write((np.arange(32) + i).astype(np.float16).reshape(1, 32))
        recording.replay()
        recording.replay()
        recording.wait()
        if not np.array_equal(np.asarray(y), np.asarray(x)):
            raise Wrong("a recording that is replayed gives a wrong result")
    return "five replays with other inputs are right"


def pages(shape: tuple[int, ...]) -> Any:
    """Ones in an array that begins on a page."""
    count = math.prod(shape)
    array = np.frombuffer(mmap.mmap(-1, count * 2), np.float16, count).reshape(shape)
    array[...] = 1
    return array


def small_shape(v: Variant, dtype: str, odd: bool = False) -> Shape | None:
    """One that a variant takes, of odd sizes and with all of an epilogue or plain; None where there is none."""
    layout = v.supports["layouts"][-1]
    for m in (1, 3, 5, 8):
        for n in (67, 8) if odd else (128, 8):
            for k in (131, 128) if odd else (128,):
                alpha = 0.5 if odd and v.supports.get("alpha", True) else 1.0
                others: dict[str, Any] = {"storage": v.storage, "also_n": (n,) * (v.matrix_count - 1), "swiglu": v.swiglu}
                s = Shape("doctor", 1, m, n, k, layout[0] == "t", layout[1] == "t", odd, alpha, 0.0, dtype=dtype, **others)
                if not v.lacks(s.spec):
                    return s
    return None


def _kinds_and_types(v: Variant) -> list[tuple[Variant, str]]:
    """A variant for each B that it takes, with a type of operands: the first B with each, the others with the first."""
    first, *others = v.kinds()
    return [*((first, t) for t in first.types), *((kind, kind.types[0]) for kind in others)]


def _what(shape: Shape) -> str:
    """What an instance is compiled for."""
    words = [shape.dtype, *([shape.storage] if shape.storage != "dense" else [])]
    return " ".join([*words, end_of(shape.also_n, shape.swiglu)] if shape.also_n else words)


def median_us(call: Callable[[], object], repeat: int = 1) -> float:
    """Of a call, in microseconds; each sample is of `repeat` of them."""
    samples = []
    for _ in range(_ROUNDS):
        start = time.perf_counter()
        for _ in range(repeat):
            call()
        samples.append((time.perf_counter() - start) / repeat)
    return statistics.median(samples) * 1e6


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seconds", type=float, default=110.0, help="that it may take; what does not fit is left out and named")
    parser.add_argument(
        "--share", type=Path, metavar="FILE", help="write there, too, what others can use of it: nothing of whose machine it is"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """0; 1 where something is wrong; 130 if it was interrupted, with what was finished kept."""
    if not args.seconds >= 0:
        print(f"metalmm doctor: --seconds {args.seconds}; it takes 0 or more", file=sys.stderr)
        return 2
    if args.share:
        if args.json and args.json != "-" and os.path.realpath(args.json) == os.path.realpath(args.share):
            print(f"metalmm doctor: --json and --share are both {args.share}", file=sys.stderr)
            return 2
        files.check_output(args.share, f'"from": "{doctor_rows.SHARED}"', "file of doctor --share")
    doctor = Doctor(None, args.seconds, args.json == "-", args.json if args.json != "-" else None)
    doctor.facts()
    parts = [doctor.kernels, doctor.families, doctor.features, doctor.sums_of_mps, doctor.host, doctor.shapes, doctor.options]
    with contextlib.suppress(KeyboardInterrupt):
        for part in (*parts, doctor.pipelines, doctor.risky):
            part()
        doctor.finished = True
    states = [c.state for c in doctor.checks]
    wrong = [c for c in doctor.checks if c.state == "wrong"]
    counted = ", ".join(f"{states.count(s)} {s}" for s in ("ok", "without", "skipped", "wrong") if s in states)
    doctor.say(f"\n{counted}" + "".join(f"\n  WRONG {c.section.split(':')[0]}, {c.name}: {c.what}" for c in wrong))
    data = doctor.data()
    files.give_json(args.json, data)
    if args.share:
        choices = [row.choice(data["environment"]["time"]) for row in doctor.rows if len(row.cold) > 1]
        if choices:
            files.write_json(args.share, doctor_rows.shared(doctor.device, data, choices))
            doctor.say(f"{args.share}: for others with such a device (docs/mac.md)")
        else:
            doctor.say(f"{args.share} is not written: no shape was measured with two variants; --seconds 300 gives it more time")
    if not args.json:
        doctor.say("metalmm doctor --json doctor.json writes all of it to a file")
    sys.stdout.flush()
    if not doctor.finished:
        print("metalmm doctor: interrupted; what was finished is above", file=sys.stderr)
        return 130
    return int(bool(wrong))
