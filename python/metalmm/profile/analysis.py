"""What a log says, in sections: event types, backends, kernels, matmuls by shape, waits, command buffers."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from .log import Log, Name, Samples

_SHAPE = ("op", "batch", "m", "n", "k", "tA", "tB")
_BLOCK = (
    (re.compile(r"sdpa_block_\d+_op"), "sdpa"),
    (re.compile(r"mlp_swiglu_block_\d+_op"), "mlp_swiglu"),
    (re.compile(r"forward_cpu_block_\d+"), "forward_cpu"),
)
_STARTS = ("matmul", "matmul_cache")


def kernel_type(op_name: str) -> str:
    """The last path segment, without what numbers it."""
    last = op_name.rsplit("/", 1)[-1]
    for pattern, name in _BLOCK:
        if pattern.fullmatch(last):
            return name
    return last.rsplit("_", 1)[0] if last.endswith("_op") else last


def place(op_name: str) -> str:
    """Which section a GPU operation belongs to: command_buffer, wait or kernel."""
    if "/cb_gpu" in op_name:
        return "command_buffer"
    return "wait" if "cb_wait" in op_name or op_name.endswith("wait") else "kernel"


def matmul_pairs(key: Name) -> dict[str, str] | None:
    """The pairs that describe a matmul, by an event's op_name and data map; None for what is no matmul. Older logs have them as path
    segments of the name."""
    op_name, pairs = key[0], key[1:]
    if pairs:
        found = {str(name): _plain(value) for name, value in pairs}
        if "op" in found:
            return found if found["op"].startswith("matmul") else None
    segments = op_name.split("/")
    for start in [i for i, segment in enumerate(segments) if segment in _STARTS]:
        found = {}
        for segment in segments[start + 1 :]:
            if "::" in segment:
                break
            name, equals, value = segment.split("#", 1)[0].partition("=")
            if equals:
                found[name] = value
        if found:
            return found
    return None


def _plain(value: object) -> str:
    """On one line, whatever a log has there."""
    text = value if isinstance(value, str) else str(value).lower()
    return text if text.isprintable() else repr(text)


def shape_key(pairs: dict[str, str]) -> tuple[tuple[str, str], ...]:
    """What a matmul's shape is known by, in the order in which it is printed."""
    more = sorted(set(pairs) - set(_SHAPE) - {"backend"})
    return tuple((name, pairs.get(name, "?")) for name in (*_SHAPE, *more))


def shape_text(key: Iterable[tuple[str, str]]) -> str:
    """As a sizes file has it; a bar in a name or value would be the next one's."""
    return " | ".join(f"{name}={value}".replace("|", "\\x7c") for name, value in key)


@dataclass
class Row:
    """One name's durations. count: events, also those without one."""

    name: str
    count: int
    samples: Samples | None
    rows: tuple[Row, ...] = ()  # a shape's backends

    @property
    def total(self) -> float:
        return self.samples.total if self.samples else 0.0

    def figures(self) -> dict[str, float]:
        """Milliseconds; nothing without a sample."""
        if not self.samples or not self.samples.seen:
            return {}
        count, total = self.samples.count, self.samples.total
        p95, p99 = self.samples.quantiles(0.95, 0.99)
        return {
            "total_ms": total / 1000,
            "avg_ms": total / 1000 / count,
            "min_ms": min(self.samples.seen) / 1000,
            "max_ms": max(self.samples.seen) / 1000,
            "p95_ms": p95,
            "p99_ms": p99,
        }

    def text(self) -> str:
        found = self.figures()
        if not found:
            return f"{self.name}: no samples"
        return f"{self.name}: {figures_text(self.samples.count if self.samples else 0, found)}"

    def as_json(self) -> dict[str, Any]:
        if self.rows:
            return {"name": self.name, "backends": [row.as_json() for row in self.rows]}
        return {"name": self.name, "count": self.count, **self.figures()}


def figures_text(count: int, f: dict[str, float]) -> str:
    return (
        f"count={count} | total={f['total_ms']:.2f}ms | avg={f['avg_ms']:.3f}ms | min={f['min_ms']:.3f}ms | max={f['max_ms']:.3f}ms | "
        f"p95_ms={f['p95_ms']:.3f}ms, p99_ms={f['p99_ms']:.3f}ms"
    )


@dataclass
class Section:
    """A heading with its rows, those of most time first."""

    title: str
    rows: list[Row]
    counts_only: bool = False

    def text(self) -> str:
        lines = [f"{self.title}:"]
        for row in self.rows:
            if row.rows:
                lines += [f"  {row.name}:", *(f"    {backend.text()}" for backend in row.rows)]
            else:
                lines.append(f"  {row.name}: count={row.count}" if self.counts_only else f"  {row.text()}")
        return "\n".join(lines)


def _grouped(groups: dict[Name, Samples], name_of: Callable[[Name], str | None]) -> list[Row]:
    """Rows by name, those of most time first, else in order of appearance; None leaves one out."""
    merged: dict[str, Samples] = {}
    for key, samples in groups.items():
        name = name_of(key)
        if name is not None:
            merged.setdefault(name, Samples()).merge(samples)
    rows = [Row(name, samples.count, samples) for name, samples in merged.items() if samples.seen]
    return sorted(rows, key=lambda row: -row.total)


def _event_types(log: Log) -> list[Row]:
    merged = {name: Samples() for name in log.types}
    for kind, groups in (("GpuOpCompleted", log.gpu), ("InternalKernelCompleted", log.internal)):
        for samples in groups.values():
            merged[kind].merge(samples)
    for key, samples in log.other.items():
        merged[key[0]].merge(samples)
    rows = [Row(f"{name} (count={log.types[name]})", log.types[name], samples) for name, samples in merged.items()]
    return sorted(rows, key=lambda row: (-row.total, -row.count))


def _selections(log: Log, name_of: Callable[[tuple[str, str, str]], str]) -> list[Row]:
    counts: dict[str, int] = {}
    for key, count in log.backends.items():
        counts[name_of(key)] = counts.get(name_of(key), 0) + count
    return sorted((Row(name, count, None) for name, count in counts.items()), key=lambda row: -row.count)


def matmul_shapes(log: Log) -> list[tuple[tuple[tuple[str, str], ...], list[Row]]]:
    """Each shape's key with its backends, those of most time first."""
    shapes: dict[tuple[tuple[str, str], ...], dict[str, Samples]] = {}
    for key, samples in log.gpu.items():
        pairs = matmul_pairs(key) if place(key[0]) == "kernel" else None
        if pairs is not None and samples.seen:
            shapes.setdefault(shape_key(pairs), {}).setdefault(pairs.get("backend", "?"), Samples()).merge(samples)
    found = []
    for shape, backends in shapes.items():
        rows = [Row(f"backend={name}", samples.count, samples) for name, samples in backends.items()]
        found.append((shape, sorted(rows, key=lambda row: -row.total)))
    return sorted(found, key=lambda pair: -sum(row.total for row in pair[1]))


def shape_rows(log: Log) -> list[Row]:
    return [Row(shape_text(key), sum(r.count for r in rows), None, tuple(rows)) for key, rows in matmul_shapes(log)]


def _sync(log: Log) -> list[Row]:
    everything = {**log.gpu, **{(key[1],): s for key, s in log.other.items()}}
    merged = Samples()
    for key, samples in [*everything.items(), *(((key[1],), s) for key, s in log.internal.items())]:
        if "sync" in key[0]:
            merged.merge(samples)
    return [Row("sync kernels", merged.count, merged)]


def sections(
    log: Log, *, top: int = 20, kernel_top: int = 50, include_kernel_totals: bool = False, kernel_filter: str | None = None
) -> list[Section]:
    """What `metalmm profile analyze` prints. top, kernel_top: rows of a section; kernel_filter: a part of the name, case aside."""
    wanted = (kernel_filter or "").lower()

    def kept(rows: list[Row], limit: int) -> list[Row]:
        return [r for r in rows if wanted in r.name.lower() or any(wanted in b.name.lower() for b in r.rows)][:limit]

    def internal_name(key: Name) -> str | None:
        name = str(key[1])
        return name if include_kernel_totals or not name.endswith(("_total", "cb_wait")) else None

    places = {key: place(key[0]) for key in log.gpu}
    described = {key: pairs for key in log.gpu if places[key] == "kernel" and (pairs := matmul_pairs(key)) is not None}

    def of_place(where: str, name_of: Callable[[str], str]) -> list[Row]:
        return _grouped(log.gpu, lambda key: name_of(key[0]) if places[key] == where else None)

    def matmuls(name_of: Callable[[dict[str, str]], str]) -> list[Row]:
        return _grouped(log.gpu, lambda key: name_of(described[key]) if key in described else None)

    found = [
        Section("Backend selection summary", kept(_selections(log, lambda key: f"backend={key[1]}"), top), counts_only=True),
        Section("Backend selection reasons", kept(_selections(log, lambda key: f"reason={key[2]}"), top), counts_only=True),
        Section(
            "Backend selection by op/backend", kept(_selections(log, lambda key: f"op={key[0]} backend={key[1]}"), top), counts_only=True
        ),
        Section("Internal kernel by parent", kept(_grouped(log.internal, lambda key: key[0]), top)),
        Section("Internal kernel by parent/op", kept(_grouped(log.internal, lambda key: f"{key[0]} :: {key[1]}"), top)),
        Section("Kernel aggregate (all parents)", kept(_grouped(log.internal, internal_name), kernel_top)),
        Section("GPU kernel durations (excluding waits)", kept(of_place("kernel", str), top)),
        Section("GPU kernel aggregate (by kernel type)", kept(of_place("kernel", kernel_type), top)),
        Section("Matmul backend summary", kept(matmuls(lambda p: f"backend={p.get('backend', '?')}"), top)),
        Section("Matmul op/backend summary", kept(matmuls(lambda p: f"{p.get('op', '?')} @ {p.get('backend', '?')}"), top)),
        Section("Matmul shape backend summary", kept(shape_rows(log), top)),
        Section("GPU wait breakdown", kept(of_place("wait", str), top)),
        Section("Command buffer GPU timing", kept(of_place("command_buffer", str), top)),
    ]
    return [Section("Event type summary", _event_types(log)), *(s for s in found if s.rows), Section("Sync operations", _sync(log))]


def text(log: Log, found: list[Section]) -> str:
    head = f"=== Analyzing {log.name} ===\nTotal events: {log.events}"
    return "\n\n".join([head, *(section.text() for section in found)])


def as_json(log: Log, found: list[Section]) -> dict[str, Any]:
    return {
        "schema": "metalmm-profile",
        "version": 1,
        "log": log.name,
        "events": log.events,
        "lines": log.lines,
        "broken": {"count": log.broken, "first": [{"line": number, "why": why} for number, why in log.broken_lines]},
        "unknown": log.unknown,
        "sections": [{"title": s.title, "rows": [row.as_json() for row in s.rows]} for s in found],
    }
