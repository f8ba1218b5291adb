"""Functions and operators of MSL on numbers of every type and width, many in one kernel, beside what NumPy or Python makes of the same."""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import metalmm
import numpy as np
import pytest

from .here import ALL_OF_IT, COMPILERS, DEVICE
from .msl import FLOATS, INTEGERS

WIDTHS = (1, 2, 3, 4)
EACH = sum(WIDTHS)  # numbers of a thread
AT = {1: 0, 2: 1, 3: 3, 4: 6}  # the first of a width
THREADS = 24
UNSIGNED = {"char": "uchar", "short": "ushort", "int": "uint", "long": "ulong"}
HEAD = """#include <metal_stdlib>
using namespace metal;
template <class Want, int N, class Out, class Got> void put(device Out* y, device uint* wrong, Got r) {
  for (int i = 0; i < N; i++) y[i] = Out(r[i]);
  if (!is_same<Want, Got>::value) wrong[0] = 1;
}
template <class Want, int N, class Out, class Got> void put_one(device Out* y, device uint* wrong, Got r) {
  y[0] = Out(r);
  if (!is_same<Want, Got>::value) wrong[0] = 1;
}
"""


@dataclass(frozen=True)
class Function:
    """code: MSL that makes r of x, y and z; V is their type, I that of as many ints; s is one number. value: the same of float64, or of a
    Python int and its type. ulps: of float32. least, most: of the operands. result: T, that of the operands; U, unsigned; int; bool."""

    name: str
    code: str
    value: Callable[..., Any]
    ulps: float = 0.0
    least: float = -1e3
    most: float = 1e3
    result: str = "T"
    is_finite: bool = False  # what it gives of an infinity or NaN is not said
    widths: Sequence[int] = WIDTHS
    kinds: Sequence[str] = ()  # that it has; empty: all
    first: str = ""  # of which something was wrong before: what `make test` takes
    is_small: bool = False  # of signed numbers, so that the result does not overflow
    is_exact: bool = False  # zeros have the sign that they should, too
    of_type: bool = False  # value takes the type's name, too, as it does of integers

    @property
    def operands(self) -> list[str]:
        return [name for name in "xyzs" if re.search(rf"\b{name}\b", self.code)]

    def has(self, kind: str) -> bool:
        return not self.kinds or kind in self.kinds


def bits(kind: str) -> int:
    return int(np.dtype(INTEGERS[kind]).itemsize) * 8


def unsigned(x: int, kind: str) -> int:
    return x % (1 << bits(kind))


def type_of(kind: str, width: int) -> str:
    return kind if width == 1 else f"{kind}{width}"


def result_of(f: Function, kind: str) -> str:
    return {"T": kind, "U": UNSIGNED.get(kind, kind)}.get(f.result, f.result)


def source(functions: Sequence[Function], kind: str) -> str:
    """A kernel that calls a function for each; a thread has a number, two, three and four."""
    text, calls = HEAD, ""
    for i, f in enumerate(functions):
        result = result_of(f, kind)
        stored = "uchar" if result == "bool" else result
        operands = ", ".join(f"device const {kind}* {name}" for name in "abc")
        text += f"__attribute__((noinline)) void f{i}({operands}, device {stored}* to, device uint* wrong) {{\n"
        for width in f.widths:
            at = AT[width]
            of = {
                name: f"V {name} = V({', '.join(f'{array}[{at + j}]' for j in range(width))});"
                for name, array in zip("xyz", "abc", strict=True)
            }
            made = " ".join({**of, "s": f"const {kind} s = b[0];"}[name] for name in f.operands)
            text += f"  {{ typedef {type_of(kind, width)} V; typedef {type_of('int', width)} I; {made} {f.code} "
            text += f"put{'_one' * (width == 1)}<{type_of(result, width)}, {width}, {stored}>(to + {at}, wrong, r); }}\n"
        text += "}\n"
        first = f"{i * EACH * THREADS} + {EACH} * t"
        calls += f"f{i}(a + {first}, b + {first}, c + {first}, reinterpret_cast<device {stored}*>(to + {i * EACH * THREADS}) + {EACH} * t, wrong + {i});\n"
    parameters = ", ".join(f"device const {kind}* {name}" for name in "abc")
    return f"{text}kernel void k({parameters}, device ulong* to, device uint* wrong, uint t [[thread_position_in_grid]]) {{\n{calls}}}\n"


SPECIAL = [0.0, -0.0, np.inf, -np.inf, np.nan, 1.0, -1.0, 0.5, -0.5, 1.5, 2.5, -2.5, 2.0, -2.0, 3.0, 0.25]


def floats(f: Function, kind: str, which: int) -> Any:
    """Operands between least and most, some of whole halves; and, where something is said of it, what is special."""
    rng = np.random.default_rng(zlib.crc32(f"{f.name} {kind} {which}".encode()))
    found = rng.uniform(f.least, f.most, EACH * THREADS)
    found[1::7] = np.rint(found[1::7] * 2) / 2
    found[3::11] *= 2.0**-20
    found[4::11] *= 2.0**-44
    if which:  # some are equal
        found[::5] = floats(f, kind, 0).astype(np.float64)[::5]
    if not f.is_finite:
        found[rng.permutation(found.size)[:64]] = SPECIAL * 4
    else:
        found = np.clip(found, f.least, f.most)
    return found.astype(np.float32).astype(FLOATS[kind])


def close(got: Any, want: Any, ulps: float, kind: str) -> Any:
    """Whether each is within so many units in the last place of the type; what rounds once, half of one."""
    bits, lowest = {"half": (11, -14), "bfloat": (8, -126), "float": (24, -126)}[kind]
    if ulps == 0:  # rounded once
        want = want.astype(np.float32).astype(FLOATS[kind]).astype(np.float64)
        return (got == want) | (np.isnan(got) & np.isnan(want))
    unit = 2.0 ** (np.maximum(np.floor(np.log2(np.abs(want))), lowest) - bits + 1)
    allowed = (ulps if kind == "float" else 0.5 + ulps * 2.0 ** (bits - 24)) * unit + 2.0**-126
    most = 65504.0 if kind == "half" else float(np.finfo(np.float32).max)
    same = (got == want) | (np.isnan(got) & np.isnan(want)) | (np.isinf(got) & (np.abs(want) > most) & (np.sign(got) == np.sign(want)))
    return same | (np.abs(got - want) <= allowed)


def sample(functions: Sequence[Function], kinds: Sequence[str]) -> list[Any]:
    """Parameters of a test: compiler, type, functions. Of each function one type that it has, by compilers in turn; or all by each."""
    compilers = COMPILERS if DEVICE == "cpu" else COMPILERS[-1:]
    if ALL_OF_IT:
        found = [(compiler, kind, [f for f in functions if f.has(kind)]) for compiler in compilers for kind in kinds]
    else:
        chosen = {
            f: f.first or [kind for kind in kinds if f.has(kind)][i % sum(f.has(kind) for kind in kinds)] for i, f in enumerate(functions)
        }
        found = [(compilers[i % len(compilers)], kind, [f for f in functions if chosen[f] == kind]) for i, kind in enumerate(kinds)]
    return [pytest.param(*x, id=f"{x[0]}-{x[1]}") for x in found]


def run(
    functions: Sequence[Function], kind: str, operands: Callable[[Function, str, int], Any], device: metalmm.Device
) -> list[tuple[Any, list[Any], bool]]:
    """Of each its results, its operands, and whether a type was wrong."""
    given = [[operands(f, kind, which) for f in functions] for which in range(3)]
    y, wrong = np.zeros((len(functions), EACH * THREADS), np.uint64), np.zeros(len(functions), np.uint32)
    whole = [np.concatenate(x) for x in given]
    device.compile(source(functions, kind)).kernel("k")(*whole, y, wrong, threads=THREADS, threadgroup=THREADS)
    types = {**FLOATS, **INTEGERS, "bool": np.bool_}

    def operand(name: str, i: int) -> Any:
        return np.repeat(given[1][i][::EACH], EACH) if name == "s" else given["xyz".index(name)][i]

    def used(f: Function) -> Any:
        return np.concatenate([t * EACH + AT[w] + np.arange(w) for t in range(THREADS) for w in f.widths])

    return [
        (
            y[i].view(types[result_of(f, kind)])[: EACH * THREADS][used(f)],
            [operand(name, i)[used(f)] for name in f.operands],
            bool(wrong[i]),
        )
        for i, f in enumerate(functions)
    ]


def integers(f: Function, kind: str, which: int) -> Any:
    """Of all bits, small ones, and the type's ends."""
    rng, info = np.random.default_rng(zlib.crc32(f"{f.name} {kind} {which}".encode())), np.iinfo(INTEGERS[kind])
    found = rng.integers(info.min, info.max, EACH * THREADS, INTEGERS[kind], endpoint=True)
    found[::3] = rng.integers(0, 9, found[::3].size)
    found[rng.permutation(found.size)[:24]] = [info.min, info.max, 0, 1] * 6
    if f.is_small and info.min < 0:
        return np.fmod(found, INTEGERS[kind](2 ** (bits(kind) // 2 - 1) - 1))
    if f.name == "rotate" and which == 1:
        return found & INTEGERS[kind](bits(kind) - 1)
    return found


def mistakes(functions: Sequence[Function], kind: str, device: metalmm.Device) -> list[str]:
    """What is wrong of them on that type; empty: nothing."""
    found = list[str]()
    for f, (got, given, is_wrong) in zip(functions, run(functions, kind, floats if kind in FLOATS else integers, device), strict=True):
        want: Any
        if kind in FLOATS:
            with np.errstate(all="ignore"):
                want = np.asarray(f.value(*(x.astype(np.float64) for x in given), *([kind] if f.of_type else [])), np.float64)
                good = got.astype(np.float64) == want if f.result != "T" else close(got.astype(np.float64), want, f.ulps, kind)
                good &= (np.signbit(got.astype(np.float64)) == np.signbit(want)) | np.isnan(want) | (not f.is_exact)
        else:
            want = [f.value(*(int(x[i]) for x in given), kind) for i in range(got.size)]
            good = np.array([(int(x) - y) % (1 << bits(kind)) == 0 for x, y in zip(got, want, strict=True)])
        found += [f"{f.code} another type"] * is_wrong
        found += [f"{f.code} of {', '.join(str(x[i]) for x in given)} is {got[i]}, not {want[i]}" for i in np.flatnonzero(~good)[:2]]
    return found
