"""Runs variants on shapes: the same inputs, warm-up and rule for each, by turns."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from .. import (
    Device,
    DTypeError,
    Error,
    PreparedCall,
    Recording,
    Variant,
    __version__,
    backends,
    manifest,
    numerics,
    pipelines,
    quantized,
    variants,
)
from ..device import cpu_name
from ..terminal import Progress
from .report import Result
from .sizes import Shape
from .statistics import median_of

COLD_LIMIT_BYTES = 4 << 30
_MOST_COPIES = 512  # each has a prepared call of every variant


def np_dtype(name: str) -> np.dtype[Any]:
    """NumPy's type of that name; ml_dtypes' for bfloat16. Raises DTypeError where that is not installed."""
    if name == "bfloat16":
        try:
            import ml_dtypes  # type: ignore[import-untyped,unused-ignore]
        except ImportError:
            raise DTypeError("bfloat16 needs the package ml_dtypes: pip install ml_dtypes") from None
        name = ml_dtypes.bfloat16
    found: np.dtype[Any] = np.dtype(name)
    return found


class Inputs:
    """Fresh normal draws for one shape, the float64 reference and its bound. Weights in `copies` device arrays."""

    def __init__(self, device: Device, shape: Shape, seed: int, copies: int, given: Sequence[Any] = ()) -> None:
        """given: B, or each B of a fused call, in place of drawn ones."""
        rng = np.random.default_rng(seed)

        def draw(*size: int) -> np.ndarray[Any, Any]:
            return rng.standard_normal(size, dtype=np.float32).astype(np_dtype(shape.dtype))

        lead = (shape.batch,) if shape.batch > 1 else ()

        def stored(n: int) -> Any:
            if shape.storage == "dense":
                shared = lead if not shape.also_n else ()
                return draw(*shared, *((n, shape.k) if shape.transpose_b else (shape.k, n)))
            form, group, layout = quantized.parts_of_storage(shape.storage)
            return quantized.quantize(draw(n, shape.k), form, group=group, layout=layout)

        self.shape = shape
        a = draw(*lead, *((shape.k, shape.m) if shape.transpose_a else (shape.m, shape.k)))
        widths = (shape.n, *shape.also_n)
        b = list(given) or [stored(n) for n in widths]
        bias = [draw(n) if shape.bias else None for n in widths]
        c = draw(*lead, shape.m, shape.n) if shape.beta else None
        self.options: dict[str, Any] = {
            "alpha": shape.alpha,
            "beta": shape.beta,
            "transpose_a": shape.transpose_a,
            "transpose_b": shape.transpose_b,
        }
        if shape.swiglu:
            self.reference, self.bound = numerics.judged_swiglu(a, b, bias=bias if shape.bias else None)
            self.likely = self.bound
        else:
            judged = [_reference(a, w, x, c, self.options) for w, x in zip(b, bias, strict=True)]
            self.reference, self.bound, self.likely = (np.concatenate(parts, axis=-1) for parts in zip(*judged, strict=True))
        placed = [_copies(device, w, copies) for w in b]
        self.a, self.weights = device.array(a), placed[0] if not shape.also_n else list(zip(*placed, strict=True))
        self.bias = [None if x is None else device.array(x) for x in bias]
        self.c = None if c is None else device.array(c)
        self.out = device.empty((*lead, shape.m, shape.columns), shape.dtype)
        self._poison: Any = None

    def prepare(self, device: Device, v: Variant, weights: Any) -> PreparedCall[Any]:
        """weights: one of self.weights, of a fused call as many as it has."""
        alike: Any = {"row_invariant": self.shape.row_invariant}
        if not self.shape.also_n:
            return device.prepare(v, self.a, weights, bias=self.bias[0], c=self.c, out=self.out, **self.options, **alike)
        bias = [x for x in self.bias if x is not None] or None
        if self.shape.swiglu:
            return device.prepare_fused(v, self.a, weights, bias=bias, activation="swiglu", out=self.out, **alike)
        ends = np.cumsum([0, self.shape.n, *self.shape.also_n])
        outs = [self.out[..., start:end] for start, end in itertools.pairwise(ends)]
        return device.prepare_fused(v, self.a, weights, bias=bias, out=outs, **alike)

    def judge(self, device: Device, v: Variant) -> str:
        """Runs it once on the first weights; empty, or how the result misses the bound. Raises what the device raises."""
        call = self.prepare(device, v, self.weights[0])
        self.poison()
        call()
        return numerics.mismatch(np.asarray(self.out), self.reference, self.bound)

    def poison(self) -> None:
        """NaN, wherever a kernel does not write."""
        if self._poison is None:
            self._poison = np.full(self.out.nbytes, 0xFF, np.uint8).view(self.out.dtype).reshape(self.out.shape)
        self.out.write(self._poison)


def _copies(device: Device, b: Any, count: int) -> list[Any]:
    """Small ones are slices of one array: a device may have few thousands of those."""
    if isinstance(b, quantized.QuantizedArray):
        parts = [[None] * count if x is None else _copies(device, x, count) for x in (b.values, b.scales, b.biases)]
        return [replace(b, values=v, scales=s, biases=z) for v, s, z in zip(*parts, strict=True)]
    if count == 1 or b.nbytes >= 1 << 20:
        return [device.array(b) for _ in range(count)]
    room = device.empty((count, *b.shape), b.dtype)
    room.write(np.broadcast_to(b, room.shape))
    return [room[i] for i in range(count)]


def _reference(a: Any, b: Any, bias: Any, c: Any, options: dict[str, Any]) -> tuple[Any, ...]:
    """In slices of n, so that a large B is never held in float64 as a whole."""
    n_axis = -2 if options["transpose_b"] else -1
    n = b.shape[n_axis]
    parts = []
    for start in range(0, n, 8192):
        piece = slice(start, min(start + 8192, n))
        kw = {"bias": None if bias is None else bias[piece], "c": None if c is None else c[..., piece], **options}
        is_quantized = isinstance(b, quantized.QuantizedArray)
        columns = b[piece] if is_quantized else b[..., piece, :] if options["transpose_b"] else b[..., piece]
        parts.append(numerics.judged(a, columns, **kw))
    return tuple(np.concatenate(pieces, axis=-1) for pieces in zip(*parts, strict=True))


def last_level_cache(device: Device) -> int:
    """Bytes of the largest cache between the device and its memory. It is what the device says, else the most that one of its kind has, else
    what this machine reports, else 32 MB."""
    if own := int(device.info.get("l2_bytes", 0)) or device.backend.cache_bytes:
        return own
    sizes = []
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        sizes.append(int(path.read_text().strip().removesuffix("K")) << 10)  # in KB, as Linux says them
    return max(sizes, default=32 << 20)


def cold_copies(shape: Shape, device: Device) -> int:
    """Copies of B that together are twice the last-level cache, within COLD_LIMIT_BYTES and _MOST_COPIES: what is smaller than that
    leaves room for may still come from a cache."""
    weight = shape.spec.b_bytes
    return max(1, min(math.ceil(2 * last_level_cache(device) / weight), COLD_LIMIT_BYTES // weight, _MOST_COPIES))


TIMEOUT_SECONDS = 60.0  # of a dispatch on the CPU device; its slowest GEMM tiles take four


def measuring_device(name: str | None = None, timeout: float = TIMEOUT_SECONDS) -> Device:
    """The kind of the default device, with guards round all memory and an end to what never ends, where it has those."""
    name = name or os.environ.get("METALMM_DEVICE") or backends.first_available()
    return Device(name, **backends.get(name).watching(timeout))


@dataclass(frozen=True)
class Rule:
    """When a variant has been measured enough.

    It has been when its median's spread is small and `least` seconds of its turns are over, or when `most` seconds are.

    Attributes:
        spread: The median's spread (half its 95% interval) is at most so much of the median.
        least: Seconds of its turns that are over at least.
        most: Seconds of its turns that are enough, whatever the spread.
        slow: One that is so many times slower than the best can be after six samples stops there.
        hopeless: One that is so many times slower in the passes before does not begin.
        rounds: Turns of each shape, apart in time. A machine changes its pace from minute to minute.
        fixed: So many samples instead, of every variant.
    """

    spread: float = 0.02
    least: float = 0.02
    most: float = 0.15
    slow: float = 2.0
    hopeless: float = 4.0
    warmup: int = 1
    rounds: int = 2
    fixed: int | None = None

    def is_enough(self, r: Result, spent: float) -> bool:
        if self.fixed is not None:
            return len(r.cpu) >= self.fixed
        median = r.median()
        return spent >= self.most or (median is not None and spent >= self.least and len(r.cpu) >= 6 and median.spread <= self.spread)


_NEAR = 1.5  # times the best's median: one that was stopped and is nearer gets another round
_SHORT_MS = 5.0  # of a run that some tens of microseconds would change
_LONG_MS = 1000.0  # of a run that is not worth a second one to see that it is slow
Failures = dict[tuple[str, int], str]


def compile_all(device: Device, work: Sequence[tuple[Shape, Sequence[Variant]]], progress: Progress) -> Failures:
    """Every pipeline that the runs will need; what did not compile, by variant and specialization."""
    operations = ((v, s.spec) for s, vs in work for v in vs)
    failed = pipelines.compile_all(device, operations, lambda count: progress.begin("compiling", count), progress.step)
    return {one: f"does not compile: {first_lines(str(error))}" for one, error in failed.items()}


def first_lines(text: str) -> str:
    """What of a compiler's text a line of a report can hold."""
    lines = [row.strip() for row in text.splitlines() if row.strip()]
    told = next((row for row in lines if "error" in row), lines[0] if lines else "")
    return told if len(lines) < 2 else f"{told[:300]} ({len(lines)} lines in all)"


class _Contender:
    """A variant's turns on one shape."""

    def __init__(self, name: str, calls: list[Any]) -> None:
        self.result, self.calls, self.done, self.spent, self.runs = Result(name), calls, False, 0.0, 0
        self.recording: Recording | None = None  # of its calls, where the device's samples are replays
        self.before: list[float] = []  # its times in the passes that do not count
        self.before_gpu: list[float | None] = []
        self.good: bytes | None = None  # a result that was found right


class _Turns:
    """Every variant on one shape: passes in which each that is not done runs once."""

    def __init__(self, device: Device, inputs: Inputs, rule: Rule) -> None:
        self.device, self.inputs, self.rule, self.turn = device, inputs, rule, 0
        self.contenders: list[_Contender] = []
        self.twin: _Contender | None = None

    def timed(self, one: _Contender) -> tuple[float, float | None]:
        """Seconds of a call, the host's and the device's: of one by itself, or of a replay of all, of `replays` at least."""
        batch, least = self.device.batch(), self.device.backend.replays
        if least:
            count = -(-least // len(one.calls)) * len(one.calls)
            if not one.recording:
                for i in range(count):
                    batch.add(one.calls[i % len(one.calls)])
                one.recording = batch.record()
            start = time.perf_counter()
            one.recording.replay()
            one.recording.wait()
            timing = one.recording.timing
        else:
            count = 1
            self.turn += 1
            batch.add(one.calls[self.turn % len(one.calls)])  # cold: never the copy that the variant before used
            start = time.perf_counter()
            batch.submit()
            batch.wait()
            timing = batch.timing
        cpu = time.perf_counter() - start
        return cpu / count, None if timing.device is None else timing.device / count

    def run(self, one: _Contender, counted: bool) -> None:
        self.inputs.poison()
        try:
            cpu, seconds = self.timed(one)
        except Error as error:
            one.result.failed, one.done = str(error), True
            return
        gpu = None if seconds is None else seconds * 1e3
        one.runs += 1
        if counted:
            one.result.gpu.append(gpu)
            one.result.cpu.append(cpu * 1e3)
        else:
            one.before.append(cpu * 1e3)
            one.before_gpu.append(gpu)
        out = np.asarray(self.inputs.out)
        written = out.tobytes()
        if written != one.good:  # the same bits need not be judged again
            _check(one.result, out, self.inputs)
            one.good = written if not one.result.wrong else None
        one.done |= bool(one.result.wrong)

    def take(self, one: _Contender) -> None:
        """A turn: one run for what the variant before leaves behind, and one that counts. Threads of OpenBLAS that go on spinning made the
        next run of a small shape three times slower, as twins showed."""
        start = time.perf_counter()
        if (one.result.cpu or one.before or [0.0])[-1] < _SHORT_MS:
            self.run(one, counted=False)
        if not one.done:
            self.run(one, counted=True)
        one.spent += time.perf_counter() - start

    def choose_twin(self, known: str | None) -> None:
        """The fastest so far, or the one of an earlier round, takes part twice: how far the two come out apart is the noise of this run on
        this shape."""
        right = [c for c in self.contenders if c.before and not c.result.wrong]
        if right:
            first = min(right, key=lambda c: (c.result.variant != known, min(c.before)))
            self.twin = _Contender(first.result.variant, first.calls)
            self.twin.result.kernel_sha256 = first.result.kernel_sha256
            self.contenders.insert((self.contenders.index(first) + len(self.contenders) // 2) % len(self.contenders), self.twin)

    def drop_hopeless(self, baseline: str | None) -> None:
        """Those that are many times slower than the best, by their second run unless that would take long. What the others are compared with
        stays."""
        best = min((min(c.before) for c in self.contenders if c.before and not c.result.wrong), default=0.0)
        limit = self.rule.hopeless * best
        for c in self.contenders:
            if c.before and min(c.before) > limit and c.before[-1] < _LONG_MS and not c.done:
                self.run(c, counted=False)
            if c.done or not c.before or min(c.before) <= limit or (c.result.variant == baseline and c.before[-1] < _LONG_MS):
                continue
            c.done, c.result.cpu, c.result.gpu = True, list(c.before), list(c.before_gpu)
            c.result.stopped = f"after {c.runs} runs before those that count, {min(c.before) / best:.3g} times slower than the best"

    def drop_slow(self, baseline: str | None) -> None:
        """Those whose fastest run is slower than all that the best's median can be, several times. What the others are compared with goes
        on until it has been measured enough, and no longer: its passes would hold up the others'."""
        medians = [m for c in self.contenders if c.result.is_right and (m := c.result.median())]
        best = min(medians, key=lambda m: m.value, default=None)
        for c in self.contenders:
            times = c.result.times
            if not best or c.done or len(times) < 6 or min(times) <= self.rule.slow * best.high:
                continue
            if c.result.variant == baseline:
                c.done = self.rule.is_enough(c.result, c.spent)
            else:
                c.done, c.result.stopped = True, f"after {len(times)} samples, {min(times) / best.value:.3g} times slower than the best"

    def convert(self) -> None:
        """A library may keep a converted copy of each array of weights: made before anything counts."""
        for c in self.contenders:
            if manifest.get(c.result.variant).library:
                for _ in c.calls:
                    if not c.done:
                        self.run(c, counted=False)
                c.before.clear()
                c.before_gpu.clear()


@dataclass
class ShapeRun:
    """What came out on one shape.

    Attributes:
        twin: The second series of the variant it names.
        rounds: How often the shape had its turn.
        drift: How far apart, relative, a variant's medians in two rounds were at most.
    """

    shape: Shape
    results: list[Result]
    twin: Result | None
    copies: int
    baseline: str | None
    rounds: int = 1
    drift: float = 0.0

    @property
    def noise(self) -> float:
        """Relative: how far apart the twins' medians are, or those of two rounds, and no less than the twins' spread."""
        first = self.of(self.twin.variant) if self.twin else None
        if not self.twin or not first or not self.twin.times or not first.times:
            return self.drift
        a, b = median_of(first.times), median_of(self.twin.times)
        return max(_apart(a.value, b.value), a.spread, b.spread, self.drift)

    def of(self, variant: str | None) -> Result | None:
        return next((r for r in self.results if r.variant == variant), None)

    def survivors(self) -> list[str]:
        """Those that a further round is for: what ran to the end, and what was stopped though its fastest run is near that of the best."""
        ran = [median_of(r.times).value for r in self.results if r.is_right and not r.stopped]
        limit = _NEAR * min(ran, default=0.0)
        return [r.variant for r in self.results if r.is_right and (not r.stopped or min(r.times) <= limit)]

    def merge(self, again: ShapeRun) -> None:
        """Takes in a further round of the survivors."""
        for r in again.results:
            mine = self.of(r.variant)
            assert mine
            if mine.stopped and r.is_right and not r.stopped:  # not so slow after all
                mine.gpu, mine.cpu, mine.stopped = [], [], ""
            elif r.is_right and not r.stopped:
                self.drift = max(self.drift, _apart(median_of(mine.times).value, median_of(r.times).value))
            if not r.stopped:
                mine.gpu += r.gpu
                mine.cpu += r.cpu
            mine.max_abs, mine.max_rel = max(mine.max_abs, r.max_abs), max(mine.max_rel, r.max_rel)
            mine.wrong, mine.failed, mine.unlikely = mine.wrong or r.wrong, mine.failed or r.failed, mine.unlikely or r.unlikely
            mine.stopped = mine.stopped or r.stopped
        if self.twin and again.twin and again.twin.variant == self.twin.variant:
            self.twin.gpu += again.twin.gpu
            self.twin.cpu += again.twin.cpu
        self.rounds += 1


def _apart(a: float, b: float) -> float:
    return abs(a - b) / min(a, b) if min(a, b) > 0 else 0.0


def run_shape(
    device: Device,
    shape: Shape,
    chosen: Sequence[Variant],
    *,
    rule: Rule,
    copies: int,
    seed: int,
    progress: Progress,
    failures: Mapping[str, str] | None = None,
    twin: str | None = None,
) -> ShapeRun:
    """Runs the variants on one shape, in their order; those among `failures` do not run. The variant `twin` takes part twice. By default
    it is the fastest in the passes that do not count."""
    inputs, baseline = Inputs(device, shape, seed, copies), baseline_of(shape, device)
    turns, results = _Turns(device, inputs, rule), list[Result]()
    for v in chosen:
        one = _Contender(str(v), [])
        one.result.kernel_sha256 = manifest.kernel_sha256(v, shape.spec)
        one.result.failed = (failures or {}).get(str(v), "")
        if not one.result.failed:
            try:
                one.calls = [inputs.prepare(device, v, w) for w in inputs.weights]
                turns.contenders.append(one)
            except Error as error:
                one.result.failed = first_lines(str(error))
        results.append(one.result)
    turns.convert()
    for _ in range(rule.warmup):
        for one in turns.contenders:
            progress.note(f"{shape.short}: {one.result.variant}")
            if not one.done:
                turns.run(one, counted=False)
    if rule.warmup and rule.fixed is None:
        turns.choose_twin(twin)
        turns.drop_hopeless(baseline)
    look, passes = 1, 0
    while active := [c for c in turns.contenders if not c.done]:
        for one in active:
            progress.note(f"{shape.short}: {one.result.variant}, {len(active)} to go")
            turns.take(one)
        passes += 1
        if rule.fixed is None and passes < look:
            continue
        look = passes + 1 + passes // 8  # of many passes not after each: looking takes time, too
        # They go on together until the last is through: a machine that changes its pace half way changes it for all of them.
        if all(c.done or rule.is_enough(c.result, c.spent) for c in active):
            break
        if rule.fixed is None:
            turns.drop_slow(baseline)
    return ShapeRun(shape, results, turns.twin.result if turns.twin else None, copies, baseline)


def _check(result: Result, out: Any, inputs: Inputs) -> None:
    max_abs, max_rel = numerics.max_abs_rel(out, inputs.reference)
    result.max_abs, result.max_rel = max(result.max_abs, max_abs), max(result.max_rel, max_rel)
    result.wrong = result.wrong or numerics.mismatch(out, inputs.reference, inputs.bound)
    result.unlikely = result.unlikely or numerics.mismatch(out, inputs.reference, inputs.likely)


def baseline_of(shape: Shape, device: Device) -> str | None:
    """The id that the shape ran on in production; the device's BLAS stands in for one that it does not have."""
    if not shape.orig_backend:
        return None
    if "/" in shape.orig_backend:  # of our own trace, which says the variant
        with contextlib.suppress(Error):
            v = manifest.get(manifest.read_id(shape.orig_backend, "the sizes"))
            if v.runs_on(device) and not v.lacks(shape.spec):
                return str(v)
    ours = "gemv_nt" if shape.storage != "dense" else shape.orig_backend.split("/")[0]  # an engine's own kernels have other names
    for family in (ours, "blas"):
        found = [v for v in variants(shape.spec, device=device) if v.family == family and shape.layout in v.baseline]
        if found:
            return str(found[0])
    return None


def describe(device: Device, info: dict[str, Any]) -> str:
    """A line of a report's head: what it ran on."""
    return f"device={device.name} " + str(device.backend.facts(device)["summary"]).format(cpu=info["cpu"], os=info["os"])


def environment(device: Device) -> dict[str, Any]:
    """What a result file must carry to be compared with another."""
    commit = None
    here = Path(__file__).resolve().parent
    try:
        # Of our own history, not of whatever repository an installed package happens to lie in.
        subprocess.run(["git", "-C", str(here), "ls-files", "--error-unmatch", Path(__file__).name], capture_output=True, check=True)
        git = subprocess.run(["git", "-C", str(here), "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
        commit = git.stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        pass
    return {
        "device": device.name,
        "threads": device.threads,
        "cpu": cpu_name(),
        "os": platform.platform(),
        "python": sys.version.split()[0],
        "numpy": np.__version__,
        "metalmm": __version__,
        "compiler": device.backend.facts(device)["compiler"],
        "gpu": device.info.get("name"),
        "note": device.backend.note + (" Host times hold what guards cost." if device.options.get("guards") else ""),
        "commit": commit,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "environment": {k: v for k, v in os.environ.items() if k.startswith(("MATMUL_", "METALMM_"))},
    }
