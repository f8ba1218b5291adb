"""A log of JSON lines, read once: what is kept is a count for each duration of each name, so that memory does not grow with its length."""

from __future__ import annotations

import gc
import gzip
import io
import json
import math
import sys
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from ..errors import Error
from ..files import harmless

KNOWN_EVENTS = frozenset(
    [
        "GpuKernelDispatched",
        "GpuOpCompleted",
        "InternalKernelCompleted",
        "KernelBackendSelected",
        "ResourceCacheAccess",
        "ResourceCacheSummary",
        "CacheEviction",
        "TensorPreparationStats",
        "HostMemory",
        "TensorMemory",
        "ForwardStep",
        "ModelWeights",
        "GgufFileMmap",
    ]
)
_MOST_US = 2**53
_LONGEST = 16 << 20  # bytes of a line: a gzip file of megabytes may hold one of gigabytes
_NAMED_LINES = 20  # broken lines whose numbers are kept


class LogError(Error, ValueError):
    """A log that cannot be opened."""


class Samples:
    """Durations in microseconds, as how often each was seen; exact, whatever their number."""

    __slots__ = ("seen",)

    def __init__(self) -> None:
        self.seen: dict[float, int] = {}

    def merge(self, other: Samples) -> None:
        seen = self.seen
        for value, times in other.seen.items():
            seen[value] = seen.get(value, 0) + times

    @property
    def count(self) -> int:
        return sum(self.seen.values())

    @property
    def total(self) -> float:
        return math.fsum(value * times for value, times in self.seen.items())

    def quantiles(self, *at: float) -> list[float]:
        """Milliseconds, by linear interpolation between ranks, as numpy.quantile has it. Of at least one sample."""
        values = sorted(self.seen)
        ordered, ends, count = [value / 1000 for value in values], [], 0
        for value in values:
            count += self.seen[value]
            ends.append(count)

        def ranked(rank: int) -> float:
            low, high = 0, len(ends) - 1
            while low < high:
                middle = (low + high) // 2
                low, high = (low, middle) if ends[middle] > rank else (middle + 1, high)
            return ordered[low]

        found = []
        for q in at:
            place = q * (count - 1)
            rank = int(place)
            below, above = ranked(rank), ranked(min(rank + 1, count - 1))
            part = place - rank  # from the nearer end, as numpy does, so that roundings are the same
            found.append(below + (above - below) * part if part < 0.5 else above - (above - below) * (1 - part))
        return found


Name = tuple[Any, ...]


@dataclass
class Log:
    """What was read.

    Attributes:
        types: How often each event type came, in order of first appearance.
        gpu: Samples by (op_name, *pairs of its data map).
        internal: Samples by (parent, kernel).
        other: Samples of other events that have a duration, by (event type, name).
        backends: How often each (op, backend, reason) was selected.
        broken: How many lines are no event.
        broken_lines: The first numbers of those lines, each with why.
    """

    name: str
    lines: int = 0
    types: dict[str, int] = field(default_factory=dict)
    gpu: dict[Name, Samples] = field(default_factory=dict)
    internal: dict[Name, Samples] = field(default_factory=dict)
    other: dict[Name, Samples] = field(default_factory=dict)
    backends: dict[tuple[str, str, str], int] = field(default_factory=dict)
    broken: int = 0
    broken_lines: list[tuple[int, str]] = field(default_factory=list)

    @property
    def events(self) -> int:
        return sum(self.types.values())

    @property
    def unknown(self) -> dict[str, int]:
        """Event types that this reader does not know, with their counts."""
        return {name: count for name, count in self.types.items() if name not in KNOWN_EVENTS}

    def problems(self) -> list[str]:
        """What a reader must be told of, in words."""
        found = []
        if self.broken:
            named = ", ".join(f"{number} ({why})" for number, why in self.broken_lines)
            more = f" and {self.broken - len(self.broken_lines)} more" if self.broken > len(self.broken_lines) else ""
            found.append(f"{self.broken} of {self.lines} lines could not be read, or not all of their data: {named}{more}")
        if self.unknown:
            found.append("unknown event types, counted: " + ", ".join(f"{name} ({count})" for name, count in self.unknown.items()))
        return found


def read(path: str | Path) -> Log:
    """Reads a log: a path, or "-" for standard input; gzip is recognised by its first bytes. Raises LogError where it cannot be opened."""
    if str(path) == "-":
        if sys.stdin is None:
            raise LogError("-: standard input is closed")
        return read_stream(sys.stdin.buffer, "<stdin>")
    try:
        with open(path, "rb") as file:
            return read_stream(file, Path(path).name)
    except OSError as error:
        raise LogError(f"{path}: {error.strerror or error}") from error


def read_stream(stream: BinaryIO, name: str) -> Log:
    log = Log(name)
    buffered = stream if isinstance(stream, io.BufferedReader) else io.BufferedReader(stream)  # type: ignore[type-var]
    zipped = buffered.peek(2)[:2] == b"\x1f\x8b"
    number = 0
    source = _lines(gzip.GzipFile(fileobj=buffered) if zipped else buffered)
    collects = gc.isenabled()
    gc.disable()  # nothing here makes cycles, and looking for them takes a fifth of the time
    try:
        number = _read_lines(log, source)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        number = log.lines + 1
        _broken(log, number, f"the gzip data ends or breaks here: {error}")
    finally:
        if collects:
            gc.enable()
    log.lines = number
    return log


def _broken(log: Log, number: int, why: str) -> None:
    log.broken += 1
    if len(log.broken_lines) < _NAMED_LINES:
        log.broken_lines.append((number, why))


class _NoEventError(Exception):
    """A line is no event; says why."""


def _lines(stream: Any) -> Iterator[bytes]:
    """Those of a stream; of one that is too long the beginning."""
    while line := stream.readline(_LONGEST):
        yield line
        while len(line) == _LONGEST and not line.endswith(b"\n"):
            line = stream.readline(_LONGEST)


def _read_lines(log: Log, lines: Iterator[bytes]) -> int:
    decode = json.JSONDecoder().decode
    types = log.types
    number = 0
    for number, line in enumerate(lines, 1):
        log.lines = number
        try:
            event = decode(line.decode() if number > 1 else line.decode("utf-8-sig"))["event"]
            kind = event["type"]
            if not isinstance(kind, str):
                raise _NoEventError("its type is no string")
            kind = harmless(kind)
            types[kind] = types.get(kind, 0) + 1  # an event, whatever is wrong with its data
            data = event.get("data") or {}
            if kind == "GpuOpCompleted":
                extra, name = data.get("data"), data.get("op_name", "?")
                _add(log.gpu, (name, *extra.items()) if extra else (name,), data.get("duration_us"))
            elif kind == "InternalKernelCompleted":
                _add(log.internal, (data.get("parent_op_name", "?"), data.get("internal_kernel_name", "?")), data.get("duration_us"))
            elif kind == "KernelBackendSelected":
                name, backend, reason = (harmless(str(data.get(part, "?"))) for part in ("op_name", "backend", "reason"))
                log.backends[name, backend, reason] = log.backends.get((name, backend, reason), 0) + 1
            elif "duration_us" in data:
                _add(log.other, (kind, str(data.get("op_name", "?"))), data["duration_us"])
        except _NoEventError as error:
            _broken(log, number, str(error))
        except json.JSONDecodeError as error:
            if len(line) == _LONGEST:
                _broken(log, number, f"longer than {_LONGEST >> 20} MB")
            elif not line.isspace():
                _broken(log, number, f"no JSON at column {error.colno}" if line.endswith(b"\n") else "cut off")
        except UnicodeDecodeError:
            _broken(log, number, "not UTF-8")
        except KeyError as error:
            _broken(log, number, f"no {error.args[0]!r} in it")
        except (AttributeError, TypeError, RecursionError, ValueError):
            _broken(log, number, "not an event object, or its data is of another kind")
    return number


def _add(groups: dict[Name, Samples], key: Name, duration: Any) -> None:
    if duration is not None and not (type(duration) in (int, float) and 0 <= duration <= _MOST_US):  # a NaN is neither
        raise _NoEventError(
            "duration_us is " + (f"{duration!r}"[:40] if type(duration) is not int or abs(duration) < 1e30 else "out of range")
        )
    samples = groups.get(key)
    if samples is None:
        if not all(isinstance(part, str) for part in key if type(part) is not tuple):
            raise _NoEventError("a name is no string")
        key = tuple(harmless(part) if isinstance(part, str) else tuple(harmless(str(x)) for x in part) for part in key)
        samples = groups.setdefault(key, Samples())
    if duration is not None:
        seen = samples.seen
        seen[duration] = seen.get(duration, 0) + 1
