"""A run's results: what is kept, how a winner is chosen, and the file that they are written to (docs/bench.schema.json)."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from .. import manifest
from ..files import FileError, read_json
from .report import Result, tags
from .runner import ShapeRun
from .sizes import LeftOut, Shape, typed
from .statistics import Median, verdict

SCHEMA, VERSION = "metalmm-bench", 1
_Number = TypeVar("_Number", int, float)


@dataclass(frozen=True)
class Decision:
    """A shape's winner by the median. ties: those that the run cannot tell from it; runner_up: the next by median, a tie or not."""

    winner: Result
    median: Median
    ties: tuple[str, ...]
    runner_up: Result | None
    baseline: Result | None

    @property
    def over_baseline(self) -> float | None:
        """How many times the winner's median the baseline's is."""
        if self.baseline is None or not self.baseline.is_right:
            return None
        return statistics.median(self.baseline.times) / self.median.value if self.median.value else None


def decide(run: ShapeRun, bad_rel: float = 1e-3) -> Decision | None:
    """Among those that ran to the end; None where nothing is right."""
    noise = run.noise
    ranked: list[tuple[float, int, Result, Median]] = []
    for r in run.results:
        median = r.median(noise)
        # One that was stopped was many times slower than the best beside it; its few samples are of another moment than the others' many.
        if r.is_right and not r.stopped and r.max_rel <= run.shape.rel_limit(bad_rel) and median:
            ranked.append((median.value, len(ranked), r, median))
    ranked.sort()
    if not ranked:
        return None
    _, _, winner, best = ranked[0]
    ties = tuple(r.variant for _, _, r, m in ranked[1:] if verdict(best, m) != "slower")
    return Decision(winner, best, ties, ranked[1][2] if len(ranked) > 1 else None, run.of(run.baseline))


@dataclass
class Run:
    """One benchmark run, whole or interrupted."""

    environment: dict[str, Any]
    arguments: dict[str, Any]
    shapes: list[ShapeRun] = field(default_factory=list)
    skipped: list[dict[str, Any]] = field(default_factory=list)
    left_out: list[LeftOut] = field(default_factory=list)
    copy_readings: list[float] = field(default_factory=list)
    planned: int = 0

    @property
    def is_complete(self) -> bool:
        return len(self.shapes) >= self.planned and all(s.rounds >= self.rounds for s in self.shapes)

    @property
    def rounds(self) -> int:
        return _number_of(self.arguments, "rounds", 1)

    @property
    def copy_gbps(self) -> float | None:
        """The best reading: a machine that others use reads low, never high."""
        return max(self.copy_readings, default=None)

    @property
    def bad_rel(self) -> float:
        return _number_of(self.arguments, "bad_rel", 1e-3)

    def bad(self) -> list[tuple[Shape, Result]]:
        """Results that are wrong or failed."""
        return [(s.shape, r) for s in self.shapes for r in s.results if r.failed or r.wrong or r.max_rel > s.shape.rel_limit(self.bad_rel)]

    def as_json(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "version": VERSION,
            "complete": self.is_complete,
            "planned": self.planned,
            "environment": self.environment,
            "arguments": self.arguments,
            "copy_gbps": self.copy_gbps,
            "copy_readings_gbps": self.copy_readings,
            "skipped": self.skipped,
            "left_out": [vars(gone) for gone in self.left_out],
            "shapes": [_shape_json(s, self.bad_rel) for s in self.shapes],
        }

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Run:
        for key in ("environment", "arguments"):
            if not isinstance(data[key], dict):
                raise TypeError(f"{key} is no object")
        run = Run(
            environment=data["environment"],
            arguments=data["arguments"],
            shapes=[_shape_from(s) for s in data["shapes"]],
            skipped=data["skipped"],
            left_out=[typed(LeftOut, gone) for gone in data["left_out"]],
            copy_readings=[float(g) for g in data["copy_readings_gbps"]],
            planned=int(data["planned"]),
        )
        _ = run.rounds, run.bad_rel, run.is_complete
        return run


def _number_of(arguments: Mapping[str, Any], name: str, default: _Number) -> _Number:
    """An argument of a run; raises TypeError, ValueError, OverflowError for what is none."""
    given = arguments.get(name)
    return default if given is None else type(default)(given)


def _shape_json(s: ShapeRun, bad_rel: float) -> dict[str, Any]:
    marked = tags(s.results, s.baseline, s.shape.rel_limit(bad_rel))
    decision = decide(s, bad_rel)
    return {
        "shape": s.shape.as_json(),
        "bytes": s.shape.bytes,
        "weight_copies": s.copies,
        "baseline": s.baseline,
        "rounds": s.rounds,
        "drift": s.drift,
        "noise": s.noise,
        "winner": decision.winner.variant if decision else None,
        "ties": list(decision.ties) if decision else [],
        "twin": _result_json(s.twin) if s.twin else None,
        "results": [{**_result_json(r), "tags": marked[r.variant]} for r in s.results],
    }


def _result_json(r: Result) -> dict[str, Any]:
    median = r.median()
    return {
        "variant": r.variant,
        "kernel_sha256": r.kernel_sha256,
        "gpu_ms": r.gpu,
        "cpu_ms": r.cpu,
        "avg_gpu_ms": r.avg_gpu,
        "avg_cpu_ms": r.avg_cpu if r.cpu else None,
        "median_ms": median.value if median else None,
        "interval_ms": [median.low, median.high] if median else None,
        "max_abs": r.max_abs if math.isfinite(r.max_abs) else None,
        "max_rel": r.max_rel if math.isfinite(r.max_rel) else None,
        "wrong": r.wrong,
        "failed": r.failed,
        "unlikely": r.unlikely,
        "stopped": r.stopped,
        "checked": r.checked,
    }


def _shape_from(data: Mapping[str, Any]) -> ShapeRun:
    twin = _result_from(data["twin"]) if data["twin"] else None
    found = [_result_from(r) for r in data["results"]]
    copies, rounds, drift = int(data["weight_copies"]), int(data["rounds"]), float(data["drift"])
    return ShapeRun(
        Shape.from_json(data["shape"]),
        found,
        twin,
        copies,
        data["baseline"] and manifest.read_id(data["baseline"], "the result file"),
        rounds,
        drift,
    )


def _result_from(data: Mapping[str, Any]) -> Result:
    names = ("wrong", "failed", "unlikely", "stopped", "checked")
    abs_rel = [math.inf if data[key] is None else float(data[key]) for key in ("max_abs", "max_rel")]
    gpu, cpu = [None if g is None else float(g) for g in data["gpu_ms"]], [float(c) for c in data["cpu_ms"]]
    found = Result(
        gpu=gpu, cpu=cpu, max_abs=abs_rel[0], max_rel=abs_rel[1], variant=manifest.read_id(str(data["variant"]), "the result file")
    )
    for name in names:
        setattr(found, name, str(data[name]))
    found.kernel_sha256 = data["kernel_sha256"]
    return found


def load(path: str | Path, part: str | None = None) -> Run:
    """A bench's results; part: those within a tune's. Raises FileError."""
    data = read_json(path, "metalmm-tune", 1) if part else read_json(path, SCHEMA, VERSION)
    try:
        return Run.from_json(data[part] if part else data)
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as error:
        raise FileError(f"{path}: a part of it is missing or of another kind: {error!r}") from error


def same_runs(a: Mapping[str, Any], b: Mapping[str, Any], keys: Sequence[str]) -> list[str]:
    """Which of `keys` differ."""
    return [key for key in keys if a.get(key) != b.get(key)]
