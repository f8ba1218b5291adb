"""The array of kernels: which instances of which variants the suite compiles, with which compiler.

`array()` has each kernel by number and end of matrices: of dense weights by transposition of B and operand type, of quantized ones by format,
in float16. Of fused matrices each format is there once with each end. All else is there in pairs: `format_pairs_of`, `ways_of`, `_newest`.
The axes are the fields of MatmulSpec and what the registry says that a strategy takes. Every id has a row at least, so that each pair of
tuning parameters that an id has is there. Each of their values is there with each kernel that takes it.
"""

from __future__ import annotations

import itertools
import os
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import metalmm
from metalmm import backends, kernel_source, manifest
from metalmm.backends.protocol import names_of
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


def walks_are_free(what: What) -> bool:
    """A's layouts and ways to walk are not asked of it: quantized, and with scales of no operand's type or in matrices that are fused."""
    return own_scales(what) or (what.form in FORMATS and what.end != "1")


def is_elsewhere(what: What) -> bool:
    """Of fused matrices a format is there once with each end: in rows or in blocks, on device cpu or on tensor cores, by turns."""
    turn = [*FORMATS].index(what.form) + (what.end == "swiglu")
    other_kind = DEVICE != "metal" and (turn // 2 + turn) % 2 == what.tensor_cores  # device metal has no tensor cores
    return what.end != "1" and (turn % 2 == bool(what.layout) or other_kind)


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
    """Every variant with a kernel of ours that the device runs, and every point that "auto" prefers on some device, for each B that it takes."""
    device = metalmm.default_device()
    preferred = [name for kind in backends.names() for row in backends.get(kind).preferred for name in names_of(row[2])]
    found = [*metalmm.variants(device=device), *filter(lambda v: v.runs_on(device), map(manifest.get, preferred))]
    return kinds(list({str(v): v for v in found}.values()))


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
    if ALL_OF_IT and not (REAL_GPU and DEVICE == "metal"):  # whose suite runs in one process
        return [*possible([*itertools.chain.from_iterable(members.values())], compilers)]
    have = Counter[Any]()
    rows, both = list[Row](), defaultdict[What, list[metalmm.Variant]](list)  # rows and blocks

    def compilers_of(what: What) -> Sequence[str]:
        return [quickest] if what.tensor_cores else compilers

    for what, vs in members.items():
        if what.form == "dense":
            for b, dtype in itertools.product("nt", OPERAND_TYPES):
                rows += _next(vs, b, [dtype], compilers_of(what), have)
        else:
            both[replace(what, storage=what.form)] += [] if is_elsewhere(what) else vs
    for what, vs in both.items():
        types = [x for x in OPERAND_TYPES if any(x in v.types for v in vs)]
        rows += _next(vs, "t", types if what.end != "1" else types[:1], compilers_of(what), have)  # types[0]: float16
    turn = itertools.count()
    for v in itertools.chain.from_iterable(members.values()):
        if v not in have or any(not value[-1] and value not in have for value in values_of(v, v.types[0])):
            layouts = v.supports["layouts"]
            rows.append(_newest([Row(v, v.types[0], layouts[next(turn) % len(layouts)], quickest)], have))
    left = {row: pairs_of(row) for what, vs in members.items() for row in possible(vs, compilers_of(what))}
    while left := {row: new for row, pairs in left.items() if (new := {pair for pair in pairs if pair not in have})}:
        best = with_most(left)
        rows.append(_newest(best[:: len(best) // 32 + 1], have))  # of some of them: thousands would take seconds
    return rows


def possible(vs: Sequence[metalmm.Variant], compilers: Sequence[str]) -> Iterator[Row]:
    """Every instance of these."""
    for v in vs:
        for dtype, layout, compiler in itertools.product(v.types, v.supports["layouts"], compilers):
            yield Row(v, dtype, layout, compiler)


def with_most(left: Mapping[Row, Collection[Any]]) -> list[Row]:
    """Those that have most of what is left."""
    most = max(map(len, left.values()))
    return [row for row, new in left.items() if len(new) == most]


def _newest(rows: Sequence[Row], have: Counter[Any]) -> Row:
    """What has had fewest rows; an id that no row before has; the layout, type and compiler that its format, its kernel and the kernel's end have
    had least of; most new pairs. `have` counts all of these."""

    def pairs(row: Row) -> set[tuple[Any, ...]]:
        return values_of(row.variant, row.dtype) | ways_of(row) | format_pairs_of(row)

    def taken(row: Row) -> list[tuple[Any, ...]]:
        what = What.of(row.variant)
        by_turns = (what.layout, row.dtype, row.compiler)
        return [*itertools.product((what.form, what.kernel), by_turns), *itertools.product([what.kernel], [what.end], by_turns)]

    def newness(row: Row) -> tuple[int, ...]:
        fewest, new_pairs = -sum(have[x] for x in taken(row)), sum(x not in have for x in pairs(row))
        return -have[What.of(row.variant)], row.variant not in have, fewest, new_pairs

    newest = max(rows, key=newness)
    have.update([What.of(newest.variant), newest.variant, *pairs(newest), *taken(newest)])
    return newest


def values_of(v: metalmm.Variant, dtype: str) -> set[tuple[Any, ...]]:
    """Pairs of a tuning parameter's value with the kernel, and with what the kernel computes."""
    values = [(name, value) for name, value in {**v.params, "threads": v.threads}.items() if name not in ("ta", "tb")]
    return {(v.kernel, *value, beside) for value in values for beside in ("", v.storage, v.end, dtype)}


def walk_of(v: metalmm.Variant) -> tuple[bool, bool]:
    """Whether threads alone have columns, and whether they have several rows of A."""
    return v.params.get("wide", False), v.params.get("rows", 1) > 1


def ways_of(row: Row) -> set[tuple[Any, ...]]:
    """Pairs of A's layout, and of how a thread has its columns and rows of A, with all else that the product is of."""
    v, what = row.variant, What.of(row.variant)
    ways = {"layout of A": row.layout[0], "walk": walk_of(v)}
    parts = (what.form, what.layout, v.end, row.dtype, row.layout, row.compiler)
    return {(v.kernel, *way, beside) for way in ways.items() for beside in parts}


def format_pairs_of(row: Row) -> set[tuple[Any, ...]]:
    """Of quantized weights: the operand type, or an end of fused matrices, with all that a kernel does by the format. In one matrix the type with
    the format, too, where to one of `own_scales` all types but float16 are one; and columns by threads alone, or not, with the format."""
    v, what = row.variant, What.of(row.variant)
    if what.form not in FORMATS:
        return set()
    form, wide, is_one = FORMATS[what.form], v.params.get("wide", False), what.end == "1"
    does = {"bits": form.bits, "halves": form.halves, "upper": form.upper, "float": form.is_float, "at": what.layout}
    does["bias"] = form.has_bias if is_one else (form.has_bias, wide)
    found = {(what.kernel, what.tensor_cores, row.dtype if is_one else what.end, *way) for way in does.items()}
    of_type = row.dtype == "float16" if own_scales(what) else row.dtype
    return found | {(what.form, what.tensor_cores, of_type), (what.form, "wide", wide)} if is_one else found


def pairs_of(row: Row) -> set[tuple[Any, ...]]:
    """What the array has to have of this instance, beside what `array` begins with."""
    what = What.of(row.variant)
    found = format_pairs_of(row) | (set() if walks_are_free(what) else ways_of(row))
    by_compiler = {(what.form, row.compiler), (what.kernel, what.end, row.compiler)}
    return found if what.form == "dense" or what.tensor_cores else found | by_compiler


def _next(vs: Sequence[metalmm.Variant], b: str, types: Sequence[str], compilers: Sequence[str], have: Counter[Any]) -> list[Row]:
    """One row of these with B so, of one of the types, by one of the compilers; none where they take none."""
    fitting = [
        Row(v, dtype, a + b, compiler)
        for a, v, dtype, compiler in itertools.product("nt", vs, types, compilers)
        if a + b in v.supports["layouts"] and dtype in v.types
    ]
    return [_newest(fitting, have)] if fitting else []


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
    """Compiled for a debug device: as few as have each kernel with each format, each end, each of its ways to load; splitting K and not; with one
    row of A and with several. By turns it is the id of most ways through the kernel and of fewest. Of tiles no large one.
    With METALMM_TEST_ALL every id."""
    members = defaultdict[What, list[metalmm.Variant]](list)
    for v in variants:
        members[What.of(v)].append(v)
    left = dict[Row, set[tuple[Any, ...]]]()
    for turn, (what, vs) in enumerate(members.items()):
        for v in vs if ALL_OF_IT else [v for v in vs if not is_large(v)] or vs:
            layout = v.supports["layouts"][-(turn % 2)]
            ways = {"layout": layout, "end": v.end, "walk": walk_of(v), **{x: v.params.get(x, 1) > 1 for x in ("split", "rows", "wk")}}
            row = Row(v, "float16", layout, COMPILERS[-1], debug=True)
            left[row] = {*what.pairs(), (what.kernel, *_vectors(v)), *((what.kernel, *way) for way in ways.items())}
    if ALL_OF_IT:
        return [*left]

    def by_turns(best: list[Row], turn: int) -> Row:
        return sorted(best, key=lambda row: _ways(row.variant))[-(turn % 2)]

    return fewest(left, by_turns)


def fewest(left: Mapping[Row, set[Any]], choose: Callable[[list[Row], int], Row] = lambda best, _: best[0]) -> list[Row]:
    """So few that they have all that there is: by turns one of those that have most of what is left."""
    rows = list[Row]()
    while left:
        rows.append(choose(with_most(left), len(rows)))
        taken = left[rows[-1]]
        left = {row: rest for row, new in left.items() if (rest := new - taken)}
    return rows


def first_of(rows: Sequence[Row]) -> list[Row]:
    """What each change needs of an array: each template with each end, type, layout and compiler, with each tuning parameter at one and above;
    each format with tensor cores and without. In debug mode each file."""

    def has(row: Row) -> set[tuple[Any, ...]]:
        v, what = row.variant, What.of(row.variant)
        if row.debug:
            return {(v.source.name,)}
        of_all = {"end": what.end, "type": row.dtype, "layout": row.layout, "compiler": row.compiler}
        of_all |= {name: value > 1 for name, value in v.params.items()}
        return {(what.tensor_cores, what.form), *((what.kernel, *each) for each in of_all.items())}

    return fewest({row: has(row) for row in rows})
