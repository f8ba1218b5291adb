"""Shapes to measure, with their production times, from a profile summary such as qwen25_sizes.md."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from .. import MatmulSpec

DEFAULT = Path(__file__).with_name("qwen25_sizes.md")
_MS = re.compile(r"avg=([\d.]+)ms")


@dataclass(frozen=True)
class Shape:
    """One operation of the profile.

    op: its name without ``_cache``; orig_ms: the production average in milliseconds; orig_backend: the family it ran on.
    """

    op: str
    batch: int
    m: int
    n: int
    k: int
    transpose_a: bool
    transpose_b: bool
    bias: bool
    alpha: float
    beta: float
    orig_ms: float | None = None
    orig_backend: str | None = None

    @property
    def layout(self) -> str:
        return "nt"[self.transpose_a] + "nt"[self.transpose_b]

    @property
    def spec(self) -> MatmulSpec:
        return MatmulSpec(
            m=self.m,
            n=self.n,
            k=self.k,
            batch=self.batch,
            transpose_a=self.transpose_a,
            transpose_b=self.transpose_b,
            bias=self.bias,
            alpha=self.alpha,
            beta=self.beta,
        )

    @property
    def bytes(self) -> int:
        """The least that must move; see MatmulSpec.least_bytes."""
        return self.spec.least_bytes

    def __str__(self) -> str:
        return (
            f"op={self.op} | batch={self.batch} | m={self.m} | n={self.n} | k={self.k} | "
            f"tA={int(self.transpose_a)} | tB={int(self.transpose_b)}"
        )


def parse(text: str) -> list[Shape]:
    """The shapes of every ``op=… | batch=… | m=… | n=… | k=… | tA=… | tB=…:`` line; its first backend line gives the production
    time. Raises ValueError, with the line's number, for one that lacks a field or holds no number."""
    shapes: list[Shape] = []
    waiting: Shape | None = None
    for number, line in enumerate(text.splitlines(), 1):
        row = line.strip()
        if row.startswith("op=") and "|" in row and row.endswith(":"):
            if waiting:
                shapes.append(waiting)
            waiting = _shape(row.rstrip(":"), number)
        elif waiting and row.startswith("backend="):
            average = _MS.search(row)
            shapes.append(_timed(waiting, row[len("backend=") :].split(":")[0], float(average[1]) if average else None))
            waiting = None
    return [*shapes, waiting] if waiting else shapes


def _timed(shape: Shape, backend: str, average: float | None) -> Shape:
    return Shape(**{**shape.__dict__, "orig_ms": average, "orig_backend": backend})


def _shape(row: str, number: int) -> Shape:
    fields = dict(part.strip().split("=", 1) for part in row.split("|") if "=" in part)
    try:
        return Shape(
            op=fields["op"].removesuffix("_cache"),
            batch=int(fields["batch"]),
            m=int(fields["m"]),
            n=int(fields["n"]),
            k=int(fields["k"]),
            transpose_a=_flag(fields["tA"]),
            transpose_b=_flag(fields["tB"]),
            bias=_flag(fields.get("bias", "0")),
            alpha=float(fields.get("alpha", "1")),
            beta=float(fields.get("beta", "0")),
        )
    except (KeyError, ValueError) as error:
        raise ValueError(f"line {number}: {error!r} in '{row}'; a shape needs op, batch, m, n, k, tA and tB") from error


def _flag(text: str) -> bool:
    if text.lower() not in ("0", "1", "false", "true", "no", "yes"):
        raise ValueError(f"{text!r} is neither 0 nor 1")
    return text.lower() in ("1", "true", "yes")


def load(path: Path = DEFAULT) -> list[Shape]:
    shapes = parse(path.read_text())
    if not shapes:
        raise ValueError(f"{path}: no shapes; they stand in lines 'op=… | batch=… | m=… | n=… | k=… | tA=… | tB=…:'")
    return shapes


def select(shapes: list[Shape], pattern: str | None) -> list[Shape]:
    """Shapes by number ("1,3"), or whose text holds every space-separated word of one of the comma-separated patterns."""
    if not pattern:
        return shapes
    chosen: list[Shape] = []
    for part in pattern.split(","):
        if part.strip().isdigit():
            index = int(part)
            if not 1 <= index <= len(shapes):
                raise ValueError(f"--shapes {part}: there are shapes 1 to {len(shapes)}")
            found = [shapes[index - 1]]
        else:
            words = [set(str(s).replace("|", " ").split()) for s in shapes]
            found = [s for s, has in zip(shapes, words, strict=True) if set(part.split()) <= has]
        if not found:
            raise ValueError(
                f"--shapes '{part.strip()}': no shape has it; write for example 'n=896 k=4864' or a number from 1 to {len(shapes)}"
            )
        chosen += [s for s in found if s not in chosen]
    return chosen
