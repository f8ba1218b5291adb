"""Shapes to measure, with their production times and call counts: of a profile summary, of a profile log, or written by hand."""

from __future__ import annotations

import argparse
import difflib
import math
import re
import sys
import typing
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from .. import MatmulSpec, _core, files
from ..errors import ArgumentError, DTypeError, Error, ShapeError
from ..profile import analysis, log
from ..profile.trace import op_of, pairs_of
from ..variant import LAYOUTS, OPERAND_TYPES, STORAGES, kind_of

_T = typing.TypeVar("_T")
DEFAULT = Path(__file__).with_name("qwen25_sizes.md")
_FIGURE = re.compile(r"(count|total|avg)=(\d{1,15}(?:\.\d{1,9})?)")
NO_TIMES: dict[str, Any] = {"orig_ms": None, "orig_backend": None, "calls": None, "total_ms": None}
_OPERATION = re.compile(r"(\w+ @ [^:]+): count=")
_NEEDED = ("op", "batch", "m", "n", "k", "tA", "tB")


class SizesError(Error, ValueError):
    """A sizes file that cannot be read, or has no shapes."""


@dataclass(frozen=True)
class Shape:
    """One operation of the profile.

    Attributes:
        op: Its name without ``_cache``.
        orig_ms: The production average in milliseconds.
        orig_backend: The family it ran on.
        calls: How often it was called.
        total_ms: What the calls took together, in milliseconds.
        dtype: Of the operands.
        storage: Of B, as QuantizedArray.storage says.
        also_n: Of a fused call, n of the second and third B.
        swiglu: Whether a fused call ends in it.
        row_invariant: Whether a row's bits depend on neither m nor its place.
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
    calls: int | None = None
    total_ms: float | None = None
    dtype: str = "float16"
    storage: str = "dense"
    also_n: tuple[int, ...] = ()
    swiglu: bool = False
    row_invariant: bool = False

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
            dtype=self.dtype,
            b_storage=self.storage,
            also_n=self.also_n,
            swiglu=self.swiglu,
            row_invariant=self.row_invariant,
        )

    @property
    def columns(self) -> int:
        """Of all results."""
        return self.n if self.swiglu else self.n + sum(self.also_n)

    @property
    def n_text(self) -> str:
        """n, of a fused call those of all: 896+128+128."""
        return "+".join(map(str, (self.n, *self.also_n)))

    @property
    def bytes(self) -> int:
        """The least that must move; see MatmulSpec.least_bytes."""
        return self.spec.least_bytes

    def rel_limit(self, bad_rel: float) -> float:
        """The maxRel of a wrong result: `bad_rel` is float16's, and bfloat16 has three bits less."""
        return bad_rel * 8 if self.dtype == "bfloat16" else bad_rel

    @property
    def short(self) -> str:
        """As --spec takes it, without the calls."""
        if self.op == "step":
            return "the step"
        words = [f"m={self.m} n={self.n_text} k={self.k} {self.layout}"]
        words += [f"batch={self.batch}"] * (self.batch > 1) + ["bias"] * self.bias
        words += [f"alpha={self.alpha:.9g}"] * (self.alpha != 1) + [f"beta={self.beta:.9g}"] * (self.beta != 0)
        words += [self.dtype] * (self.dtype != "float16") + [self.storage] * (self.storage != "dense") + ["swiglu"] * self.swiglu
        words += ["row_invariant"] * self.row_invariant
        return " ".join(words)

    def __str__(self) -> str:
        return (
            f"op={self.op} | batch={self.batch} | m={self.m} | n={self.n_text} | k={self.k} | "
            f"tA={int(self.transpose_a)} | tB={int(self.transpose_b)}" + f" | {self.storage}" * (self.storage != "dense")
        )

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "also_n": list(self.also_n)}

    @staticmethod
    def from_json(data: dict[str, Any]) -> Shape:
        return typed(Shape, {**data, "also_n": tuple(data.get("also_n", ()))})


def typed(cls: type[_T], data: dict[str, Any]) -> _T:
    """A dataclass of what a file holds. Raises TypeError for a field that is unknown, missing or of another type."""
    made = cls(**data)
    for name, wanted in typing.get_type_hints(cls).items():
        value, kinds = data.get(name), typing.get_args(wanted) or (wanted,)
        if isinstance(value, tuple):
            good = typing.get_origin(wanted) is tuple and all(type(x) is int for x in value)
        else:
            good = name not in data or type(value) in kinds or (float in kinds and type(value) is int)
        good = good and not (isinstance(value, int) and abs(value) >= 2**63)
        if not good or (isinstance(value, float) and not math.isfinite(value)):
            raise TypeError(f"{name} is {str(value)[:40]!r}")
    return made


@dataclass(frozen=True)
class LeftOut:
    """A shape of the profile that no variant can be asked to run, and why."""

    text: str
    why: str
    calls: int | None = None
    total_ms: float | None = None
    columns: int | None = None  # of an unbatched call with m=1, where the profile says them: what steps are counted by


@dataclass
class Sizes:
    """What a profile holds of matmuls, in its order."""

    shapes: list[Shape] = field(default_factory=list)
    left_out: list[LeftOut] = field(default_factory=list)
    steps: int | None = None  # that the profile saw, as counted by steps_of(); None where it has no counts
    tensors: dict[MatmulSpec, list[tuple[str, ...]]] = field(default_factory=dict)  # of a model's file: what B each call has
    _places: dict[Shape, int] = field(
        default_factory=dict, repr=False, compare=False
    )  # of each shape without its times, while a file is read

    @property
    def total_ms(self) -> float:
        return sum(s.total_ms or 0.0 for s in self.shapes) + sum(s.total_ms or 0.0 for s in self.left_out)

    def left_out_lines(self) -> list[str]:
        """What a reader must know of them, one line each."""
        lines = []
        for gone in self.left_out:
            share = f", {gone.total_ms / self.total_ms:.1%} of the profile's matmul time" if gone.total_ms and self.total_ms else ""
            calls = f" ({gone.calls} calls{share})" if gone.calls else ""
            lines.append(f"not run: {gone.text}{calls}: {gone.why}")
        return lines


def keep_top(found: Sizes, count: int) -> None:
    """The shapes of most time; the others are left out."""
    ranked = sorted(found.shapes, key=lambda s: -(s.total_ms or 0.0))
    kept = set(ranked[:count])
    found.left_out += [LeftOut(s.short, "not among those of most time (--top)", s.calls, s.total_ms) for s in found.shapes if s not in kept]
    found.shapes = [s for s in found.shapes if s in kept]


def parse(text: str, *, of_log: bool = False) -> Sizes:
    """The shapes of every ``op=… | batch=… | m=… | n=… | k=… | tA=… | tB=…:`` line, with the counts and times of the lines under it.

    The first of these backend lines says where it ran. Lines that say the same of one shape are one. Where a line has calls=, they are of
    one step. A ? where the profile did not say is no mistake, and leaves the shape out. In a log (`of_log`) a line that would be a mistake
    leaves its shape out, too.

    Raises SizesError, with the line's number, for a line that lacks a field or holds no number.
    """
    found = Sizes()
    totals: dict[str, tuple[int, float]] = {}  # of each operation on a backend, as the summary above the shapes has them
    listed: dict[str, tuple[int, float]] = {}
    waiting: Shape | LeftOut | None = None
    op, is_step = "", False
    for number, line in enumerate(text.splitlines(), 1):
        row = files.harmless(line.strip())
        if row.startswith("op=") and "|" in row and row.endswith(":"):
            _keep(found, waiting)
            try:
                waiting = _shape(row.rstrip(":"), number)
            except SizesError as error:
                if not of_log:
                    raise
                waiting = LeftOut(row.rstrip(":"), str(error.__cause__ or error))
            is_step = is_step or waiting.calls is not None
            op = row[len("op=") :].split("|")[0].strip()
        elif waiting and row.startswith("backend="):
            figures = dict(_FIGURE.findall(row))
            _sum_up(listed, f"{op} @ {row[len('backend=') :].split(':')[0]}", figures)
            waiting = _timed(waiting, row[len("backend=") :].split(":")[0], figures)
        elif row and not row.startswith("backend="):
            _keep(found, waiting)
            waiting = None
            if matched := _OPERATION.match(row):
                _sum_up(totals, matched[1], dict(_FIGURE.findall(row)))
    _keep(found, waiting)
    for name, (calls, total) in totals.items():
        seen, known = listed.get(name, (0, 0.0))
        if calls > seen:
            found.left_out.append(
                LeftOut(name, "shapes that the profile's summary does not list one by one", calls - seen, max(total - known, 0.0))
            )
    found.steps = 1 if is_step else steps_of(found)
    return found


def _sum_up(sums: dict[str, tuple[int, float]], name: str, figures: dict[str, str]) -> None:
    calls, total = sums.get(name, (0, 0.0))
    sums[name] = (calls + int(float(figures.get("count", 0))), total + float(figures.get("total", 0)))


def steps_of(found: Sizes) -> int | None:
    """The calls of the widest unbatched operation with m=1, also of one that cannot be run: the projection to the vocabulary, which a decode
    step makes once."""
    heads = [(s.columns, s.calls) for s in found.shapes if s.calls and s.m == 1 and s.batch == 1]
    heads += [(gone.columns, gone.calls) for gone in found.left_out if gone.calls and gone.columns]
    return max(heads)[1] if heads else max((s.calls for s in found.shapes if s.calls), default=None)


def _keep(found: Sizes, shape: Shape | LeftOut | None) -> None:
    if isinstance(shape, Shape):
        place = found._places.setdefault(replace(shape, **NO_TIMES), len(found.shapes))
        if place < len(found.shapes):
            first = found.shapes[place]
            calls, total = (first.calls or 0) + (shape.calls or 0), (first.total_ms or 0.0) + (shape.total_ms or 0.0)
            found.shapes[place] = replace(first, calls=calls or None, total_ms=total or None)
        else:
            found.shapes.append(shape)
    elif shape:
        found.left_out.append(shape)


def _timed(shape: Shape | LeftOut, backend: str, figures: dict[str, str]) -> Shape | LeftOut:
    calls = int(float(figures["count"])) + (shape.calls or 0) if "count" in figures else shape.calls
    total = float(figures["total"]) + (shape.total_ms or 0.0) if "total" in figures else shape.total_ms
    shape = replace(shape, calls=calls, total_ms=total)
    if isinstance(shape, Shape) and shape.orig_backend is None:
        average = float(figures["avg"]) if "avg" in figures else None
        shape = replace(shape, orig_backend=backend, orig_ms=average)
    return shape


def _shape(row: str, number: int) -> Shape | LeftOut:
    fields = dict(part.strip().split("=", 1) for part in row.split("|") if "=" in part)
    columns = _columns(fields)
    try:
        if unknown := [p for p in _PARTS if fields.get(p) == "?"]:
            return LeftOut(row, f"the profile does not say its {unknown[0]}", columns=columns)
        parts = [int(fields[p]) for p in _PARTS if p in fields]
        storage = _storage_of(fields, bool(parts))
        if storage is None:
            why = f"its weights are of a format that no variant takes (loader={fields['loader']})"
            return LeftOut(row, why, columns=columns)
        if parts or storage != "dense":  # rows of weights, whatever the profile says of their transpose
            fields = {**fields, "tA": fields["tA"].replace("?", "0"), "tB": "1"}
        if parts:
            fields["n"], fields["batch"] = str(parts[0]), fields["batch"].replace("?", "1")
        for name in _NEEDED:
            if fields[name] == "?":
                return LeftOut(row, f"the profile does not say its {name}", columns=columns)
        shape = Shape(
            op=fields["op"].removesuffix("_cache"),
            batch=int(fields["batch"]),
            m=int(fields["m"]),
            n=int(fields["n"]),
            k=int(fields["k"]),
            transpose_a=_flag(fields["tA"]),
            transpose_b=_flag(fields["tB"]),
            storage=storage,
            also_n=tuple(parts[1:]),
            swiglu=fields.get("activation") == "swiglu",
            bias=_flag(fields.get("bias", "0")),
            alpha=float(fields.get("alpha", "1")),
            beta=float(fields.get("beta", "0")),
            dtype=fields.get("dtype", "float16"),
            calls=_count(fields["calls"]) if "calls" in fields else None,
        )
    except (KeyError, ValueError) as error:
        raise SizesError(f"line {number}: {error!r} in '{row}'; a shape needs op, batch, m, n, k, tA and tB") from error
    try:
        _ = shape.spec
    except (ShapeError, ArgumentError, DTypeError) as error:
        return LeftOut(row, str(error), columns=columns)
    return shape


_PARTS = ("n0", "n1", "nq", "nk", "nv")  # of a fused call


# What an engine's loaders read, by their names in a log. Its fused kernels, which say none, are those of q8_0: their names say it.
_LOADERS = {"dense": "dense", "q8nk_split": "q8_0", "q8_canonical": "q8_0:canonical"}


def _storage_of(fields: dict[str, str], is_fused: bool) -> str | None:
    loader = fields.get("loader")
    if not loader:
        return "q8_0" if is_fused else "dense"
    return _LOADERS.get(loader) or (loader if kind_of(loader) in STORAGES else None)


def _columns(fields: dict[str, str]) -> int | None:
    if (fields.get("m"), fields.get("batch")) != ("1", "1"):
        return None
    widths = [fields[name] for name in ("n", *_PARTS) if fields.get(name, "").isdecimal()]
    return sum(map(int, widths)) or None


def is_count(text: str) -> bool:
    """Whether it is a whole number from 1 on that somebody may mean."""
    return text.isdecimal() and len(text) < 10 and int(text) > 0


def _count(text: str) -> int:
    if not is_count(text):
        raise ValueError(f"calls is {text[:20]!r}; it takes a whole number from 1 on")
    return int(text)


def _flag(text: str) -> bool:
    if text.lower() not in ("0", "1", "false", "true", "no", "yes"):
        raise ValueError(f"{text!r} is neither 0 nor 1")
    return text.lower() in ("1", "true", "yes")


def text_of(shapes: Iterable[Shape]) -> str:
    """Their lines in a sizes file, with the calls of a step."""
    lines = []
    for shape in shapes:
        pairs = {**pairs_of(shape.spec), "op": shape.op, **({"calls": str(shape.calls)} if shape.calls else {})}
        lines.append(f"  {' | '.join(f'{key}={value}' for key, value in pairs.items())}:\n")
    return "".join(lines)


def give(args: argparse.Namespace, found: Sizes, text: str, who: str) -> None:
    """A command's results: the sizes file to --output or standard output, --json, and on standard error what is left out."""
    if args.output:
        files.write_text(args.output, text)
    elif args.json != "-":
        print(text, end="")
    shapes = [s.as_json() for s in found.shapes]
    files.give_json(args.json, {"schema": "metalmm-sizes", "version": 1, "shapes": shapes, "left_out": [vars(g) for g in found.left_out]})
    for line in found.left_out_lines():
        print(f"{who}: {line}", file=sys.stderr)


def text_of_log(found: log.Log) -> str:
    """A sizes file of a log: every matmul shape with its backends, as `metalmm profile sizes` writes it."""
    section = analysis.Section("Matmul shape backend summary", analysis.shape_rows(found))
    return f"# Matmuls of {found.name} by shape, with their production times\n\n{section.text()}\n"


def load(path: str | Path = DEFAULT) -> Sizes:
    """A sizes file, or a profile log, which begins with { or is gzip; "-" is a log on standard input. Raises SizesError."""
    try:
        if str(path) == "-":
            found = parse(text_of_log(log.read(path)), of_log=True)
        else:
            with open(path, "rb") as file:  # once: it may be a pipe
                start = file.peek(64)[:64].removeprefix(b"\xef\xbb\xbf").lstrip()
                if start[:1] == b"{" or start[:2] == b"\x1f\x8b":
                    found = parse(text_of_log(log.read_stream(file, Path(path).name)), of_log=True)
                else:
                    found = parse(file.read().decode("utf-8-sig"))
    except (OSError, UnicodeDecodeError) as error:
        raise SizesError(f"{path}: {error}") from error
    except SizesError as error:
        raise SizesError(f"{path}: {error}") from error
    if not found.shapes and not found.left_out:
        raise SizesError(f"{path}: no shapes; they stand in lines 'op=… | batch=… | m=… | n=… | k=… | tA=… | tB=…:'")
    return found


def select(shapes: list[Shape], pattern: str | None) -> list[Shape]:
    """Shapes by number ("1,3"), or whose text holds every space-separated word of one of the comma-separated patterns."""
    if not pattern:
        return shapes
    chosen: list[Shape] = []
    for part in pattern.split(","):
        if part.strip().isdecimal() and len(part) < 10:
            index = int(part)
            if not 1 <= index <= len(shapes):
                raise SizesError(f"--shapes {part}: there are shapes 1 to {len(shapes)}")
            found = [shapes[index - 1]]
        else:
            words = [set(str(s).replace("|", " ").split()) for s in shapes]
            found = [s for s, has in zip(shapes, words, strict=True) if set(part.split()) <= has]
        if not found:
            raise SizesError(
                f"--shapes '{part.strip()}': no shape has it; write for example 'n=896 k=4864' or a number from 1 to {len(shapes)}"
            )
        chosen += [s for s in found if s not in chosen]
    return chosen


_SHORT = {"fp16": "float16", "f16": "float16", "bf16": "bfloat16", "fp32": "float32", "f32": "float32"}


def _near(word: str) -> str:
    """The part of a shape that was meant, or nothing: fp16, q4_k, M=1."""
    word = word.lower()
    if re.fullmatch(r"(m|n|k|batch)=\d+", word):
        return word
    known = [*LAYOUTS, *OPERAND_TYPES, *_core._FORMATS[1:], "bias", "swiglu", "row_invariant"]
    return _SHORT.get(word) or next(iter(difflib.get_close_matches(word, known, 1)), "")


def parse_spec(words: Sequence[str]) -> MatmulSpec:
    """The shape that words say: ``m=1 n=9728 k=896 batch=1 nt bias alpha=1 beta=0 float16``. Quantized weights add ``q8_0`` and the like. A
    fused call has ``n=896+128+128`` or ``n=4864+4864 swiglu``. Only n and k must be there. Raises ShapeError."""
    options: dict[str, Any] = {"m": 1}
    said: dict[str, str] = {}
    for word in words:
        key, _, value = word.partition("=")
        what = "layout" if word in LAYOUTS else "type" if word in OPERAND_TYPES else key.split(":")[0]
        what = "format" if what in _core._FORMATS else what
        if what in said:
            raise ShapeError(f"'{said[what]}' and '{word}': a shape has one {what}")
        said[what] = word
        try:
            if word in LAYOUTS:
                options.update(transpose_a=word[0] == "t", transpose_b=word[1] == "t")
            elif word in OPERAND_TYPES:
                options["dtype"] = word
            elif word.split(":")[0] in _core._FORMATS:
                options["b_storage"] = word
            elif word in ("bias", "swiglu", "row_invariant"):
                options[word] = True
            elif key == "n" and "+" in value:
                options["n"], *options["also_n"] = map(int, value.split("+"))
            elif key in ("m", "n", "k", "batch"):
                if value.strip("+-").isdecimal() and len(value) > 20:
                    raise ShapeError(f"{key}={value[:12]}…: a size of {len(value)} digits; sizes are 1 to 2^32 - 1")
                options[key] = int(value)
                if not 1 <= options[key] < 2**32:
                    raise ShapeError(f"'{word}': a size of {options[key]}; sizes are 1 to 2^32 - 1")
            elif key in ("alpha", "beta"):
                options[key] = float(value)
                if not math.isfinite(options[key]):
                    raise ValueError
            else:
                raise ValueError
        except ValueError as error:
            if isinstance(error, ShapeError):
                raise
            near = _near(word)
            raise ShapeError(
                f"'{word[:60]}{'…' * (len(word) > 60)}' is no part of a shape; {f'did you mean {near}? Write' if near else 'write'} for example: m=1 n=9728 k=896 nt bias bfloat16, or n=4864+4864 k=896 q8_0 swiglu"
            ) from None
    if missing := {"n", "k"} - set(options):
        raise ShapeError(f"{sorted(missing)[0]} is missing; write for example: m=1 n=9728 k=896 nt bias")
    try:
        return MatmulSpec(**options)
    except ArgumentError as error:
        raise ShapeError(str(error)) from None


def from_specs(texts: Iterable[str]) -> Sizes:
    """Shapes written by hand, as parse_spec() has them, with ``calls=24`` for how often a step makes the call. One that stands there twice is
    one, with the calls of both."""
    found = Sizes()
    for text in texts:
        words = text.replace(",", " ").split()
        counts = [word[len("calls=") :] for word in words if word.startswith("calls=")]
        if not all(map(is_count, counts)):
            raise ShapeError(f"'calls={counts[0][:20]}' in '{text[:60]}': it takes a whole number of at least 1")
        spec = parse_spec([word for word in words if not word.startswith("calls=")])
        _keep(found, of_spec(spec, int(counts[-1]) if counts else None))
    return found


def of_spec(spec: MatmulSpec, calls: int | None = None) -> Shape:
    return Shape(
        op_of(spec),
        spec.batch,
        spec.m,
        spec.n,
        spec.k,
        spec.transpose_a,
        spec.transpose_b,
        spec.bias,
        spec.alpha,
        spec.beta,
        calls=calls,
        dtype=spec.dtype,
        storage=spec.b_storage,
        also_n=spec.also_n,
        swiglu=spec.swiglu,
        row_invariant=spec.row_invariant,
    )
