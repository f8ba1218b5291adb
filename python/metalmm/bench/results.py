"""A run's results: what is kept, how a winner is chosen, and the file that they are written to (docs/bench.schema.json)."""

from __future__ import annotations

import json
import math
import os
import stat
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from ..errors import Error
from ..profile.log import harmless
from .report import Result, tags
from .runner import ShapeRun
from .sizes import LeftOut, Shape, typed
from .statistics import Median, verdict

SCHEMA, VERSION = "metalmm-bench", 1
_Number = TypeVar("_Number", int, float)


class ResultError(Error, ValueError):
    """A file that holds no results, or others than were asked for."""


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
    return ShapeRun(Shape.from_json(data["shape"]), found, twin, copies, data["baseline"], rounds, drift)


def _result_from(data: Mapping[str, Any]) -> Result:
    names = ("wrong", "failed", "unlikely", "stopped", "checked")
    abs_rel = [math.inf if data[key] is None else float(data[key]) for key in ("max_abs", "max_rel")]
    gpu, cpu = [None if g is None else float(g) for g in data["gpu_ms"]], [float(c) for c in data["cpu_ms"]]
    found = Result(gpu=gpu, cpu=cpu, max_abs=abs_rel[0], max_rel=abs_rel[1], variant=str(data["variant"]))
    for name in names:
        setattr(found, name, str(data[name]))
    found.kernel_sha256 = data["kernel_sha256"]
    return found


def write_text(path: str | Path, text: str) -> None:
    """Whole or not at all: beside the file first, then in its place; a link's target, not the link. What is no file (a pipe, /dev/null) is
    written to as it is. Raises OSError."""
    path = Path(os.path.realpath(path))
    if path.exists() and not path.is_file():
        with open(path, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
        return
    handle, fresh = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(fresh, 0o666 & ~mask)  # as open() would have made it
        os.replace(fresh, path)
    except BaseException:
        os.unlink(fresh)
        raise


def write_json(path: str | Path, data: Any) -> None:
    """On one line: json's fast encoder has no indentation, and a bench writes after each shape."""
    write_text(path, json.dumps(data) + "\n")


def give_json(where: str | None, data: Any) -> None:
    """What --json asks for: nothing, a file (which check_output() has seen before the work), or standard output. Raises OSError."""
    if where == "-":
        print(json.dumps(data, indent=1))
    elif where is not None:
        write_json(where, data)


def check_output(path: Path, mark: str, what: str) -> None:
    """Before the work, not after it: that the path can be written, and that what is there and would be replaced is of the same kind, by
    `mark` near its beginning. Raises ResultError, OSError."""
    if path.is_dir():
        raise ResultError(f"{path}: it is a folder")
    if path.exists() and not path.is_file():
        return
    if path.exists():
        with open(path, "rb") as file:
            start = file.read(400)
        if start.strip() and mark.encode() not in start:
            raise ResultError(f"{path}: there is a file that is no {what} of ours; it would be overwritten")
    target = Path(os.path.realpath(path))
    if not target.parent.is_dir():
        raise ResultError(f"{path}: there is no folder {target.parent}")
    handle, probe = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    os.close(handle)
    os.unlink(probe)


def check_json(where: str | None, schema: str) -> None:
    """check_output() of a --json option."""
    if where not in (None, "-"):
        check_output(Path(str(where)), f'"schema": "{schema}"', f"{schema} JSON")


def _text_of(path: str | Path) -> str:
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise OSError("it is no file")
    return Path(path).read_text()


def _harmless(data: Any) -> Any:
    """The same with its texts' control characters spelled out, but ends of lines and tabs."""
    if isinstance(data, str):
        return harmless(data, "\n\t")
    if isinstance(data, dict):
        return {_harmless(key): _harmless(value) for key, value in data.items()}
    return [_harmless(value) for value in data] if isinstance(data, list) else data


def _json_of(path: str | Path) -> tuple[object, Any]:
    """What a file says that it is, and what it holds."""
    try:
        data = _harmless(json.loads(_text_of(path)))
    except OSError as error:
        raise ResultError(f"{path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise ResultError(f"{path}: no JSON, such as bench, tune and step write: {error}") from error
    return data.get("schema") if isinstance(data, dict) else type(data).__name__, data


def schema_of(path: str | Path) -> object:
    """What a file says that it is. Raises ResultError."""
    return _json_of(path)[0]


def read_json(path: str | Path, schema: str, version: int) -> dict[str, Any]:
    """What such a file holds. Raises ResultError naming what is there instead."""
    found, data = _json_of(path)
    if not isinstance(data, dict) or found != schema:
        raise ResultError(f"{path}: it holds {found!r}, not {schema!r}")
    if data.get("version") != version:
        raise ResultError(f"{path}: version {data.get('version')!r} of {schema}; this metalmm reads version {version}")
    return data


def load(path: str | Path, part: str | None = None) -> Run:
    """A bench's results; part: those within a tune's. Raises ResultError."""
    data = read_json(path, "metalmm-tune", 1) if part else read_json(path, SCHEMA, VERSION)
    try:
        return Run.from_json(data[part] if part else data)
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as error:
        raise ResultError(f"{path}: a part of it is missing or of another kind: {error!r}") from error


def same_runs(a: Mapping[str, Any], b: Mapping[str, Any], keys: Sequence[str]) -> list[str]:
    """Which of `keys` differ."""
    return [key for key in keys if a.get(key) != b.get(key)]
