"""Every operator between every two types of numbers: the result's type, and its value, as MSL's specification says (2.1, 3.1, 3.2)."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import metalmm
import numpy as np
import pytest
from support.functions import Function, bits, mistakes, sample
from support.here import BY_TURNS
from support.msl import COMPARISONS, FLOATS, INTEGERS

TYPES: dict[str, Any] = {"bool": np.bool_, **INTEGERS, **FLOATS}
ARITHMETIC = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}
OF_INTEGERS = {"%": lambda a, b: a - b * int(a / b), "&": operator.and_, "|": operator.or_, "^": operator.xor}
SHIFTS = {"<<": operator.lshift, ">>": operator.rshift}
LOGICAL = {"&&": lambda a, b: bool(a) and bool(b), "||": lambda a, b: bool(a) or bool(b)}
ALL = {**ARITHMETIC, **OF_INTEGERS, **SHIFTS, **COMPARISONS, **LOGICAL}
HEAD = """#include <metal_stdlib>
using namespace metal;
template <class Want, class Got> __attribute__((noinline)) void put(device float* y, device uint* wrong, uint i, Got x) {
  y[i] = float(x);
  wrong[i] = is_same<Want, Got>::value ? 0 : 1;
}
"""
ARGUMENTS = "device float* y{}, device uint* wrong{}, constant float* x{}"
FEWER = slice(None, None, 3 if BY_TURNS else 1)  # of vectors none of float and bfloat
Case = tuple[str, str, str, float]  # two operands, of x[0], which is 1; the result's type; and what it is


def value(kind: str, i: int) -> float:
    """Small, no result of an operator overflows; never 0."""
    if kind == "bool":
        return 1
    x = ((7, 3, 5, 2) if kind.startswith("u") else (7, -3, 5, -2))[i % 4]
    return x if kind in INTEGERS else x / 2


def common(a: str, b: str) -> str | None:
    """Of the usual arithmetic conversions; None of half with bfloat, which the specification does not name."""
    of_floats = {kind for kind in (a, b) if kind in FLOATS}
    if of_floats:
        return "float" if "float" in of_floats else of_floats.pop() if len(of_floats) == 1 else None
    order = ["int", "uint", "long", "ulong"]
    return max((kind if kind in order else "int" for kind in (a, b)), key=order.index)


def as_type(x: Any, kind: str) -> Any:
    """A number as another type has it: integers modulo 2 to their bits, what is no integer towards zero."""
    if kind == "bool":
        return bool(x)
    if kind in FLOATS:
        return float(np.float32(x).astype(FLOATS[kind]))
    bits = np.dtype(INTEGERS[kind]).itemsize * 8
    wrapped = int(x) % (1 << bits)
    return wrapped - (1 << bits) if not kind.startswith("u") and wrapped >> (bits - 1) else wrapped


def apply(op: str, a: Any, b: Any, kind: str) -> Any:
    """Of two numbers of a type."""
    if op == "/" and kind not in FLOATS:
        return as_type(int(a / b), kind)
    found = ALL[op](a, b)
    return found if op in COMPARISONS or op in LOGICAL else as_type(found, kind)


def number(kind: str, x: float) -> str:
    return f"{kind}({float(x)}f * x[0])"


def of_numbers(op: str) -> Iterator[Case]:
    for i, (a, b) in enumerate((a, b) for a in TYPES for b in TYPES):
        kind = common(a, "int") if op in SHIFTS else common(a, b)
        if kind is None or ((op in OF_INTEGERS or op in SHIFTS) and (a in FLOATS or b in FLOATS)):
            continue
        left, right = value(a, i), abs(value(b, i // 4)) if op in SHIFTS else value(b, i // 4)
        kept = [x if op in LOGICAL else as_type(x, kind) for x in (left, right)]
        result = "bool" if op in COMPARISONS or op in LOGICAL else kind
        yield number(a, left), number(b, right), result, apply(op, *kept, kind)


def in_place(op: str) -> Iterator[Case]:
    """Of the left operand's type, whatever the two have in common."""
    for left, right, kind, result in of_numbers(op):
        a = left.partition("(")[0]
        if result >= 0 or kind not in FLOATS or not (a.startswith("u") or a == "bool"):  # else no number of that type
            yield left, right, a, as_type(result, a)


def part(number: int, first: int, cases: list[Case], form: str) -> str:
    """A function of some cases; an operand of several is made once. Compilers take squares of a function's length."""
    names = {operand: f"v{i}" for i, operand in enumerate(dict.fromkeys(x for case in cases for x in case[:2]))}
    rows = [f"const auto {name} = {operand};" for operand, name in names.items()]
    rows += [f"put<{kind}>(y, wrong, {first + i}, {form.format(names[a], names[b])});" for i, (a, b, kind, _) in enumerate(cases)]
    return f"__attribute__((noinline)) void part{number}({ARGUMENTS.format('', '', '')}) {{\n  " + "\n  ".join(rows) + "\n}\n"


def check(op: str, cases: list[Case], device: metalmm.Device, form: str = "") -> None:
    starts = range(0, len(cases), 24)
    source = HEAD + f"template <class A, class B> A in_place(A a, B b) {{ a {op}= b; return a; }}\n" * bool(form)
    source += "".join(part(i, start, cases[start : start + 24], form or f"{{}} {op} {{}}") for i, start in enumerate(starts))
    calls = " ".join(f"part{i}(y, wrong, x);" for i in range(len(starts)))
    source += f"kernel void k({ARGUMENTS.format(*(f' [[buffer({i})]]' for i in range(3)))}) {{ {calls} }}\n"
    y, wrong = np.zeros(len(cases), np.float32), np.ones(len(cases), np.uint32)
    device.compile(source).kernel("k")(y, wrong, np.ones(1, np.float32), grid=1, threadgroup=1)
    bad = []
    for (a, b, kind, expected), is_wrong, got in zip(cases, wrong, y, strict=True):
        if is_wrong:
            bad.append(f"{a} {op} {b} is no {kind}")
        elif not np.allclose(got, np.float32(expected), rtol=2e-3 if "half" in kind else 1e-2 if "bfloat" in kind else 1e-6, atol=0):
            bad.append(f"{a} {op} {b} is {got}, not {expected}")
    assert not bad, f"{len(bad)} of {len(cases)}: " + "; ".join(bad[:9])


@pytest.mark.rest(but=4)
@pytest.mark.usefixtures("each_compiler")
@pytest.mark.parametrize("op", [*ALL][FEWER])
def test_between_numbers(op: str, device: metalmm.Device) -> None:
    check(op, list(of_numbers(op)), device)


@pytest.mark.rest(but=4)
@pytest.mark.usefixtures("each_compiler")
@pytest.mark.parametrize("op", [*ARITHMETIC, *OF_INTEGERS, *SHIFTS][FEWER])
def test_in_place_between_numbers(op: str, device: metalmm.Device) -> None:
    check(op, list(in_place(op)), device, "in_place({}, {})")


VECTORS = (2, 3, 4)


def forms(op: str, value: Any, **more: Any) -> list[Function]:
    """Of two vectors, of a vector and a number either way, and in place."""
    codes = [(f"x {op} y", value), (f"x {op} s", value), (f"s {op} x", lambda x, s, *kind: value(s, x, *kind))]
    if "result" not in more:
        codes += [(f"V(x); r {op}= y", value), (f"V(x); r {op}= s", value)]
    return [Function(f"{op} {i}", f"auto r = {code};", f, 0.5, -9, 9, widths=VECTORS, **more) for i, (code, f) in enumerate(codes)]


def truncated(a: int, b: int) -> int:
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


OF_FLOATS = [
    *(f for op, value in ARITHMETIC.items() for f in forms(op, value)),
    *(f for op, value in COMPARISONS.items() for f in forms(op, value, result="bool")),
    Function("minus", "auto r = -x;", operator.neg, widths=VECTORS), Function("not", "auto r = !(x < y);", lambda x, y: ~(x < y), result="bool", widths=VECTORS),
]  # fmt: skip
OF_WHOLE = [
    *(f for op in ("+", "-", "*") for f in forms(op, lambda a, b, kind, value=ARITHMETIC[op]: value(a, b), is_small=True)),
    *(f for op in "&|^" for f in forms(op, lambda a, b, kind, value=OF_INTEGERS[op]: value(a, b))),
    *(f for op, value in COMPARISONS.items() for f in forms(op, lambda a, b, kind, value=value: value(a, b), result="bool")),
    *(Function(f"{op} {i}", f"auto r = {code};", value, widths=VECTORS) for op, value in {
        "/": lambda a, b, kind: truncated(a, b & 7 | 2), "%": lambda a, b, kind: a - truncated(a, b & 7 | 2) * (b & 7 | 2)}.items()
        for i, code in enumerate((f"x {op} ((y & V(7)) | V(2))", f"V(x); r {op}= (y & V(7)) | V(2)"))),
    *(Function(f"{op} {i}", f"auto r = {code};", value, widths=VECTORS) for op, value in {
        "<<": lambda a, b, kind: a << (b & bits(kind) - 1), ">>": lambda a, b, kind: a >> (b & bits(kind) - 1)}.items()
        for i, code in enumerate((f"x {op} (y & V(8 * sizeof(x[0]) - 1))", f"V(x); r {op}= y & V(8 * sizeof(x[0]) - 1)"))),
    Function("minus", "auto r = -x;", lambda x, kind: -x, widths=VECTORS, is_small=True), Function("bits", "auto r = ~x;", lambda x, kind: ~x, widths=VECTORS),
    Function("increment", "V r = x; r++;", lambda x, kind: x + 1, widths=VECTORS, is_small=True), Function("decrement", "V r = x; --r;", lambda x, kind: x - 1, widths=VECTORS, is_small=True),
    Function("and", "auto r = (x < y) && (y < z);", lambda x, y, z, kind: x < y < z, result="bool", widths=VECTORS),
    Function("or", "auto r = (x < y) || (y < z);", lambda x, y, z, kind: x < y or y < z, result="bool", widths=VECTORS),
]  # fmt: skip


@pytest.mark.rest(but=4)
@pytest.mark.parametrize("compiler, kind, functions", [*sample(OF_FLOATS, list(FLOATS)), *sample(OF_WHOLE, list(INTEGERS))][FEWER])
def test_between_vectors(
    compiler: str, kind: str, functions: list[Function], device: metalmm.Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("METALMM_CXX", compiler)
    assert mistakes(functions, kind, device) == []
