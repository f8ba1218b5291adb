"""The array of kernels: which instances of which variants the suite compiles, with which compiler.

`array()` has each kernel by number and end of matrices. Dense weights have it by transposition of B, operand type and compiler. Quantized
ones have it by format and type, rows and blocks by turns. Where matrices are fused, and of formats of `own_scales`, types take turns, too.
So do compilers: each is there with each kernel and with each format. A's layouts take turns: each is there with each of these alone. So are
four ways to walk: one row of A or several, by lanes that share a column or by threads alone.
The axes are the fields of MatmulSpec and what the registry says that a strategy takes. Every id has a row at least, so that each pair of
tuning parameters that an id has is there. Each of their values is there with each kernel that takes it.
"""

from __future__ import annotations

import itertools
import os
import re
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import metalmm
from metalmm import kernel_source, manifest
from metalmm.quantized import FORMATS
from metalmm.variant import OPERAND_TYPES, specialization_of

from .here import ALL_OF_IT, COMPILERS, DEVICE, REAL_GPU


@dataclass(frozen=True)
class What:
    """What a kernel computes: a template with what the operands say. Two and three matrices have one kernel."""

    kernel: str
    storage: str
    end: str
    tensor_cores: bool

    @property
    def form(self) -> str:
        return self.storage.partition(":")[0]

    @property
    def layout(self) -> str:
        return self.storage.partition(":")[2]

    @staticmethod
    def of(v: metalmm.Variant) -> What:
        return What(v.kernel, v.storage, v.end.replace("3", "2"), on_tensor_cores(v))

    def pairs(self) -> set[tuple[Any, ...]]:
        """What debug mode looks at: the kernel with each end, with rows and blocks, and with each format where nothing is fused. Those of
        `own_scales` are one."""
        has = {(self.kernel, self.end), (self.kernel, self.tensor_cores), (self.kernel, self.tensor_cores, self.layout)}
        stored = "own" if own_scales(self) else self.form
        return has if self.tensor_cores or self.end != "1" else has | {(self.kernel, "storage", stored)}


@dataclass(frozen=True)
class Row:
    """An instance of a variant that is compiled: for which B, type and layout, by which compiler."""

    variant: metalmm.Variant  # of one kind
    dtype: str
    layout: str
    compiler: str
    debug: bool = False
    b: tuple[str, str] = field(init=False)  # a variant's kinds are equal, as its id is

    def __post_init__(self) -> None:
        object.__setattr__(self, "b", (self.variant.storage, self.variant.end))

    @property
    def specialization(self) -> int:
        return specialization_of(self.dtype, self.layout, self.variant.storage, self.variant.end)

    def __str__(self) -> str:
        b = f"-{self.variant.storage}" * (self.variant.storage != "dense") + f"-{self.variant.end}" * (self.variant.end != "1")
        return f"{self.variant}{b}-{self.dtype}-{self.layout}-{self.compiler}{'-debug' if self.debug else ''}"


def own_scales(what: What) -> bool:
    """Of the formats whose scales have nothing to do with the operands' type."""
    return what.form in FORMATS and (FORMATS[what.form].is_k or FORMATS[what.form].is_float)


def one_type_is_enough(what: What) -> bool:
    """Quantized, and with scales of no operand's type or in matrices that are fused."""
    return own_scales(what) or (what.form in FORMATS and what.end != "1")


def is_elsewhere(what: What) -> bool:
    """Whether the other layout has it: formats have rows and blocks by turns."""
    return (turn_of(what) + [*FORMATS].index(what.form)) % 2 == bool(what.layout)


def turn_of(what: What) -> int:
    """Another for each kernel and end."""
    return zlib.crc32(f"{what.kernel} {what.end} {what.tensor_cores}".encode())


def on_tensor_cores(v: metalmm.Variant) -> bool:
    """Whether NVIDIA's alone run it."""
    return v.devices == ("cuda",)


SOURCES = set(os.environ.get("METALMM_TEST_SOURCES", "").split())  # kernels made of one of these files alone: tests/mutants


def is_wanted(v: metalmm.Variant) -> bool:
    if v.manifest != manifest.BUILTIN:  # support/changed.py may have loaded copies
        return False
    return not SOURCES or bool(
        SOURCES & {v.source.name, *re.findall(r"/(?:include|cpu|cuda)/(\w+\.h)", kernel_source.inline_includes(v.source))}
    )


def known() -> list[metalmm.Variant]:
    """Every variant with a kernel of ours that the device runs, for each B that it takes."""
    return kinds(metalmm.variants(device=metalmm.default_device()))


def kinds(variants: Sequence[metalmm.Variant]) -> list[metalmm.Variant]:
    """Of those with a kernel of ours, for each B that they take."""
    return [kind for v in variants if v.kernel and not v.library for kind in v.kinds() if is_wanted(kind)]


def array(variants: Sequence[metalmm.Variant] | None = None, compilers: Sequence[str] = COMPILERS) -> list[Row]:
    """The rows; with METALMM_TEST_ALL every instance of every variant."""
    compilers = compilers if DEVICE == "cpu" else ["-"]
    # Clang, where there is one. Of an id, of tensor cores' stand-in and in debug mode one compiler is enough.
    quickest = compilers[-1]
    members = defaultdict[What, list[metalmm.Variant]](list)
    for v in known() if variants is None else variants:
        members[What.of(v)].append(v)
    if ALL_OF_IT and not REAL_GPU:
        return [*possible([*itertools.chain.from_iterable(members.values())], compilers)]
    have, by = Counter[tuple[Any, ...]](), {what: [quickest] if what.tensor_cores else compilers for what in members}
    rows, types = list[Row](), itertools.cycle(OPERAND_TYPES)
    for what, vs in members.items():
        if what.form == "dense":
            chosen = [(dtype, [c]) for dtype, c in itertools.product(OPERAND_TYPES, by[what])]
        elif not one_type_is_enough(what):
            chosen = [(dtype, by[what]) for dtype in _types_of(what)]
        else:
            chosen = [] if is_elsewhere(what) else [(next(types), by[what])]
        rows += _product(vs, chosen, have)
    known_ids = {row.variant for row in rows}
    turn = itertools.count()
    for v in itertools.chain.from_iterable(members.values()):
        if v not in known_ids or any(not value[-1] and value not in have for value in values_of(v, v.types[0])):
            known_ids.add(v)
            layouts = v.supports["layouts"]
            rows.append(_newest([Row(v, v.types[0], layouts[next(turn) % len(layouts)], quickest)], have))
    for what, vs in members.items():
        for row in () if one_type_is_enough(what) else possible(vs, by[what]):
            if not all(way in have for way in ways_of(row)):
                rows.append(_newest([row], have))
    return rows


def _types_of(what: What) -> Iterator[str]:
    """Rows and blocks together have each: blocks one of them, by turns."""
    for i, dtype in enumerate(OPERAND_TYPES):
        if (i == (turn_of(what) + [*FORMATS].index(what.form)) % len(OPERAND_TYPES)) == bool(what.layout):
            yield dtype


def possible(vs: Sequence[metalmm.Variant], compilers: Sequence[str]) -> Iterator[Row]:
    """Every instance of these."""
    for v in vs:
        for dtype, layout, compiler in itertools.product(v.types, v.supports["layouts"], compilers):
            yield Row(v, dtype, layout, compiler)


def _newest(rows: Sequence[Row], have: Counter[tuple[Any, ...]]) -> Row:
    """The one that has most pairs which no row before has; of these, by the compiler that has had least of its kind."""

    def pairs(row: Row) -> set[tuple[Any, ...]]:
        return values_of(row.variant, row.dtype) | ways_of(row)

    def compiled(row: Row) -> list[tuple[Any, ...]]:
        v = row.variant
        return [(row.compiler, *x) for x in ((v.kernel, v.end), (v.kernel, row.dtype), (v.storage,), (v.storage, row.dtype))]

    newest = max(rows, key=lambda row: (sum(x not in have for x in pairs(row)), -sum(have[x] for x in compiled(row))))
    have.update(pairs(newest))
    have.update(compiled(newest))
    return newest


def values_of(v: metalmm.Variant, dtype: str) -> set[tuple[Any, ...]]:
    """Pairs of a tuning parameter's value with the kernel, and with what the kernel computes."""
    values = [(name, value) for name, value in {**v.params, "threads": v.threads}.items() if name not in ("ta", "tb")]
    return {(v.kernel, *value, beside) for value in values for beside in ("", v.storage, v.end, dtype)}


def ways_of(row: Row) -> set[tuple[Any, ...]]:
    """Pairs of A's layout, and of how a thread has its columns and rows of A, with all else that the product is of."""
    v = row.variant
    ways = {"layout of A": row.layout[0], "walk": (v.params.get("wide", False), v.params.get("rows", 1) > 1)}
    return {(v.kernel, *way, beside) for way in ways.items() for beside in (v.storage, v.end, row.dtype, row.layout, row.compiler)}


def _product(vs: Sequence[metalmm.Variant], chosen: Sequence[tuple[str, Sequence[str]]], have: Counter[tuple[Any, ...]]) -> Iterator[Row]:
    """Of what one kernel computes: layout of B by types, each by one of the compilers. Where it takes none of these types, one that it takes."""
    if chosen and not any(dtype in v.types for v in vs for dtype, _ in chosen):
        chosen = [(vs[0].types[0], chosen[0][1])]
    for b, (dtype, compilers) in itertools.product(("n", "t"), chosen):
        fitting = [(v, a + b) for a in ("n", "t") for v in vs if a + b in v.supports["layouts"] and dtype in v.types]
        if fitting:
            yield _newest([Row(v, dtype, layout, c) for v, layout in fitting for c in compilers], have)


def is_large(v: metalmm.Variant) -> bool:
    """Of a tile of which most is computed for nothing at the sizes of the tests: it gets fewer long sums."""
    return v.tile[0] * v.tile[1] > 64 * 64


def _ways(v: metalmm.Variant) -> tuple[Any, ...]:
    """The more, the more a debug device may find: simdgroups that share a column, several sets of them, wide vectors; few threads."""
    split = v.params.get("split", 1)
    return split > 1, split > 1 and v.threads > 32 * split, *_vectors(v), -v.threads


def _vectors(v: metalmm.Variant) -> tuple[Any, ...]:
    """How wide a kernel loads by its parameters."""
    return tuple(v.params.get(name, 0) for name in ("wide", "vec4", "width"))


def debug_array(variants: Sequence[metalmm.Variant]) -> list[Row]:
    """Compiled for a debug device: of each kernel the id of most ways and the one of fewest; of its formats and ends one of these, by turns. Of
    each kernel one that splits K and one that does not; one row of A and several.
    Of tiles no large one. With METALMM_TEST_ALL every id."""
    members = defaultdict[What, list[metalmm.Variant]](list)
    for v in variants:
        members[What.of(v)].append(v)
    rows, have = dict[Row, None](), set[tuple[Any, ...]]()
    for turn, (what, vs) in enumerate(members.items()):
        small = [v for v in vs if not is_large(v)]
        ranked = sorted(vs if ALL_OF_IT else small or vs, key=_ways)
        for v in dict.fromkeys((ranked[-1 + turn % 2], ranked[-(turn % 2)], *ranked)):
            layout = v.supports["layouts"][-(turn % 2)]
            ways: dict[str, Any] = {"layout": layout, **{name: v.params.get(name, 1) > 1 for name in ("split", "rows")}}
            ways["walk"] = (v.params.get("wide", False), ways["rows"])
            new = {*what.pairs(), (what.kernel, *_vectors(v)), *((what.kernel, *way) for way in ways.items())}
            if ALL_OF_IT or new - have:
                have |= new
                rows[Row(v, "float16", layout, COMPILERS[-1], debug=True)] = None
    return list(rows)
