"""MSL programs drawn at random, and what each thread's result is: Python carries out the same steps for all threads at once."""

from __future__ import annotations

import functools
import operator
import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .msl import COMPARISONS

THREADS, LANES = 64, 32
BITS = {"bool": 1, "uchar": 8, "char": 8, "ushort": 16, "short": 16, "uint": 32, "int": 32, "ulong": 64}
SCALARS = ["uchar", "char", "ushort", "short", "uint", "uint", "int", "int", "ulong"]
VECTORS = ["uchar4", "ushort2", "ushort4", "uint2", "uint3", "uint4"]  # of unsigned numbers, whose sums may overflow
# By the bits that both have: wrapped, it is right whatever overflows.
OF_BITS: dict[str, Callable[[Any, Any], Any]] = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "&": operator.and_, "|": operator.or_, "^": operator.xor,
}  # fmt: skip
# What the jth of the lanes that are there gets.
OF_LANES: dict[str, Callable[[list[int], int], int]] = {
    "simd_sum": lambda of, j: sum(of), "simd_max": lambda of, j: max(of), "simd_min": lambda of, j: min(of),
    "simd_and": lambda of, j: functools.reduce(operator.and_, of), "simd_or": lambda of, j: functools.reduce(operator.or_, of),
    "simd_xor": lambda of, j: functools.reduce(operator.xor, of), "simd_broadcast_first": lambda of, j: of[0],
    "simd_prefix_exclusive_sum": lambda of, j: sum(of[:j]),
}  # fmt: skip
# Of a and b in a floating-point type T, which has each of these exactly where a and b are small: whatever is contracted, the same.
OF_FLOATS: dict[str, Callable[[Any, Any], Any]] = {
    "a + b": operator.add, "a - b": operator.sub, "a * b": operator.mul, "fma(a, b, a)": lambda a, b: a * b + a, "min(a, b)": np.minimum,
    "max(a, b)": np.maximum, "abs(a)": lambda a, b: abs(a), "copysign(a, b + T(0.5))": lambda a, b: np.copysign(a, b + 0.5),
    "floor(a * T(0.25))": lambda a, b: np.floor(a / 4), "ceil(a * T(0.25))": lambda a, b: np.ceil(a / 4),
    "rint(a * T(0.5))": lambda a, b: np.rint(a / 2), "round(a * T(0.5))": lambda a, b: np.trunc(a / 2 + np.copysign(0.5, a)),
    "trunc(b / T(4))": lambda a, b: np.trunc(b / 4), "clamp(a, T(-5), T(5))": lambda a, b: np.clip(a, -5, 5),
    "(a < b ? b : -a)": lambda a, b: np.where(a < b, b, -a), "select(a, b, a >= b)": lambda a, b: np.where(a >= b, b, a),
    "T4(a, b, -a, 1).wzyx.z": lambda a, b: b, "(T2(a, b) * T2(b, 2)).y": lambda a, b: 2 * b, "(T3(a, b, 3) - b).x": operator.sub,
    "max(T4(a), T4(b, a, a, a)).x": np.maximum,
}  # fmt: skip
Values = Any  # of a scalar [threads], of a vector [threads, n]; whole numbers in uint64 or int64
Evaluate = Callable[["State"], Values]
Step = Callable[["State"], None]


def element(kind: str) -> str:
    return kind.rstrip("234")


def width(kind: str) -> int:
    return int(kind[len(element(kind)) :] or 1)


def is_signed(kind: str) -> bool:
    return not kind.startswith("u") and kind != "bool"


def wrapped(x: Values, kind: str) -> Values:
    """As the type has them."""
    bits = BITS[element(kind)]
    low = x.astype(np.uint64) & np.uint64((1 << bits) - 1)
    if not is_signed(kind):
        return low
    shift = np.uint64(64 - bits)
    return (low << shift).astype(np.int64) >> np.int64(64 - bits)


@dataclass
class State:
    """gone: threads that have left this turn of the loop; broken: have left the loop."""

    values: dict[str, Values] = field(default_factory=dict)
    active: Any = field(default_factory=lambda: np.ones(THREADS, bool))
    gone: Any = field(default_factory=lambda: np.zeros(THREADS, bool))
    broken: Any = field(default_factory=lambda: np.zeros(THREADS, bool))

    def put(self, name: str, x: Values) -> None:
        where = self.active if x.ndim == 1 else self.active[:, None]
        self.values[name] = np.where(where, x, self.values[name]) if name in self.values else x.copy()


@dataclass
class Expression:
    text: str
    kind: str
    value: Evaluate


@dataclass
class Helper:
    name: str
    value: Callable[[State, Values, Values], Values]


class Program:
    """Its text, and what it gives: `result` of every thread."""

    def __init__(self, seed: int) -> None:
        self.rng, self.count, self.loops = random.Random(seed), 0, 0
        self.is_uniform, self.may_leave, self.words, self.helpers = True, False, list[str](), list[Helper]()
        self.depth = 3 if seed % 4 == 0 else 2
        helpers = "".join(self.helper() for _ in range(self.rng.randrange(3)))
        self.names = {"a": "uint", "b": "int", "i": "uint"}
        body, run = self.block(4 + self.rng.randrange(5), self.depth)
        kept = [name if width(kind) == 1 else f"{name}.{part}" for name, kind in self.names.items() for part in "xyzw"[: width(kind)]]
        last = "".join(f"h = h * 31u + uint({name});\n" for name in kept)
        self.text = (
            f"#include <metal_stdlib>\nusing namespace metal;\n{helpers}"
            "kernel void k(device const uint* xa, device const int* xb, device uint* y, uint i [[thread_index_in_threadgroup]]) {\n"
            f"threadgroup uint shared[{THREADS}];\nuint a = xa[i]; int b = xb[i]; shared[i] = 0;\n"
            f"threadgroup_barrier(mem_flags::mem_threadgroup);\n{body}uint h = 0;\n{last}y[i] = h;\n}}\n"
        )
        self._run, self._kept = run, kept

    def result(self, a: Any, b: Any) -> Any:
        state = State({"a": a.astype(np.uint64), "b": b.astype(np.int64), "i": np.arange(THREADS, dtype=np.uint64)})
        self._run(state)
        found = np.zeros(THREADS, np.uint64)
        for name in self._kept:
            x = state.values[name.partition(".")[0]]
            x = x if x.ndim == 1 else x[:, "xyzw".index(name[-1])]
            found = wrapped(found * np.uint64(31) + wrapped(x, "uint"), "uint")
        return found.astype(np.uint32)

    # -- expressions: of signed numbers the operands are small, so that none overflows -------------------------------------------

    def leaf(self, kind: str) -> Expression:
        fitting = [name for name, k in self.names.items() if k == kind]
        if fitting and self.rng.random() < 0.75:
            name = self.rng.choice(fitting)
            return Expression(name, kind, lambda s: s.values[name])
        if width(kind) > 1:
            parts = [self.expression(0, element(kind)) for _ in range(width(kind))]
            return Expression(f"{kind}({', '.join(p.text for p in parts)})", kind, lambda s: np.stack([p.value(s) for p in parts], 1))
        others = [name for name, k in self.names.items() if width(k) == 1]
        if others and self.rng.random() < 0.6:
            name = self.rng.choice(others)
            return Expression(
                f"{kind}({name})",
                kind,
                lambda s: wrapped(s.values[name], kind) if kind != "bool" else (s.values[name] != 0).astype(np.uint64),
            )
        n = self.rng.randrange(2) if kind == "bool" else self.rng.randrange(-100, 100) if is_signed(kind) else self.rng.randrange(200)
        made: Any = np.full(THREADS, n, np.int64 if is_signed(kind) else np.uint64)
        return Expression(f"{kind}({n})", kind, lambda s: made)

    def small(self, x: Expression, most: int) -> Expression:
        """Of a signed number, between -most and most."""
        return Expression(f"({x.text} % {most})", x.kind, lambda s: np.fmod(x.value(s), most))

    def expression(self, depth: int, kind: str) -> Expression:
        if depth == 0 or self.rng.random() < 0.15:
            return self.leaf(kind)
        if kind == "bool":
            return self.condition(depth - 1)
        if width(kind) > 1:
            return self.of_vectors(depth - 1, kind)
        return self.rng.choice(
            [self.arithmetic, self.arithmetic, self.conversion, self.choice, self.component, self.function, self.floats]
        )(depth - 1, kind)

    def arithmetic(self, depth: int, kind: str) -> Expression:
        """In int or uint, to which narrower numbers are converted before."""
        wide = kind if BITS[kind] >= 32 else "int"
        op = self.rng.choice(["+", "-", "*", "&", "|", "^", "/", "%", ">>", *(["<<"] if wide != "int" else [])])
        left, right = self.expression(depth, kind), self.expression(depth, kind)
        if wide == "int":
            most = 181 if op == "*" else 10007
            left, right = self.small(left, most), self.small(right, most)
        if op in "/%":
            least = right
            right = Expression(
                f"(({least.text} & {wide}(7)) + {wide}(1))",
                wide,
                lambda s: (least.value(s) & least.value(s).dtype.type(7)) + least.value(s).dtype.type(1),
            )
        elif op in ("<<", ">>"):
            by = right
            right = Expression(f"({by.text} & {wide}(15))", wide, lambda s: by.value(s) & by.value(s).dtype.type(15))

        def value(s: State) -> Values:
            x, y = left.value(s), right.value(s)
            x, y = (v.astype(np.int64 if wide == "int" else np.uint64) for v in (x, y))
            by = {
                **OF_BITS, "/": lambda x, y: np.trunc(x / y).astype(x.dtype) if wide == "int" else x // y, "%": np.fmod,
                ">>": operator.rshift, "<<": operator.lshift,
            }  # fmt: skip
            found = by[op](x, y)
            return wrapped(wrapped(found, wide), kind)

        text = f"({left.text} {op} {right.text})"
        return Expression(text if wide == kind else f"{kind}({text})", kind, value)

    def conversion(self, depth: int, kind: str) -> Expression:
        x = self.expression(depth, self.rng.choice(SCALARS))
        return Expression(f"{kind}({x.text})", kind, lambda s: wrapped(x.value(s), kind))

    def choice(self, depth: int, kind: str) -> Expression:
        c, x, y = self.condition(depth), self.expression(depth, kind), self.expression(depth, kind)
        text = self.rng.choice([f"({c.text} ? {x.text} : {y.text})", f"select({y.text}, {x.text}, {c.text})"])
        return Expression(f"{kind}({text})", kind, lambda s: np.where(c.value(s) != 0, x.value(s), y.value(s)))

    def component(self, depth: int, kind: str) -> Expression:
        fitting = [k for k in VECTORS if element(k) == kind]
        if not fitting:
            return self.leaf(kind)
        x = self.expression(depth, self.rng.choice(fitting))
        at = self.rng.randrange(width(x.kind))
        return Expression(f"{x.text}.{'xyzw'[at]}" if self.rng.random() < 0.5 else f"{x.text}[{at}]", kind, lambda s: x.value(s)[:, at])

    def function(self, depth: int, kind: str) -> Expression:
        name = self.rng.choice(["min", "max", "popcount", "clz", "absdiff", "rotate"])
        x, y = self.expression(depth, kind), self.expression(depth, kind)
        bits, signed = BITS[kind], is_signed(kind)
        if name in ("absdiff", "rotate") and signed:
            name = "min"
        if name in ("min", "max"):
            return Expression(f"{name}({x.text}, {y.text})", kind, lambda s: getattr(np, name + "imum")(x.value(s), y.value(s)))
        if name == "absdiff":
            return Expression(
                f"absdiff({x.text}, {y.text})", kind, lambda s: np.maximum(x.value(s), y.value(s)) - np.minimum(x.value(s), y.value(s))
            )
        if name == "rotate":
            by = self.rng.randrange(1, bits)
            n = np.uint64(by), np.uint64(bits - by)
            return Expression(f"rotate({x.text}, {kind}({by}))", kind, lambda s: wrapped(x.value(s) << n[0] | x.value(s) >> n[1], kind))
        count: Callable[[int], int] = int.bit_count if name == "popcount" else lambda v: bits - v.bit_length()
        return Expression(
            f"{name}({x.text})", kind, lambda s: wrapped(np.array([count(int(v) % (1 << bits)) for v in x.value(s)], np.uint64), kind)
        )

    def floats(self, depth: int, kind: str) -> Expression:
        of, most = self.rng.choice([("float", 1000), ("half", 31), ("bfloat", 7)])
        x, y = (self.small(self.expression(depth, "int"), most) for _ in range(2))
        forms = [form for form in OF_FLOATS if of != "bfloat" or not re.search(r"[a-z]\w*\(", form)]  # bfloat has no functions
        form = self.rng.choice(forms)
        words = {"a": f"{of}({x.text})", "b": f"{of}({y.text})", "T": of}
        text, value = re.sub(r"\b(?:[ab]\b|T(?=\(|\d))", lambda m: words[m[0]], form), OF_FLOATS[form]
        return Expression(f"{kind}(int({text}))", kind, lambda s: wrapped(value(x.value(s) / 1.0, y.value(s) / 1.0).astype(np.int64), kind))

    def condition(self, depth: int) -> Expression:
        counters = [name for name in self.names if name.startswith("n")]
        if counters and self.rng.random() < 0.5:  # of other threads at each turn
            name, by, least = self.rng.choice(counters), self.rng.randrange(1, 4), self.rng.randrange(1, 4)
            text = f"(((i + {by}u * {name}) & 3u) < {least}u)"
            return Expression(
                text, "bool", lambda s: ((s.values["i"] + np.uint64(by) * s.values[name] & np.uint64(3)) < least).astype(np.uint64)
            )
        kind = self.rng.choice(["uint", "int", "ushort", "ulong"])
        x, y = self.expression(depth, kind), self.expression(depth, kind)
        op = self.rng.choice(["<", "<=", ">", ">=", "==", "!="])
        if depth > 0 and self.rng.random() < 0.3:
            first, other, word = self.condition(depth - 1), self.condition(depth - 1), self.rng.choice(["&&", "||"])
            both: Any = np.logical_and if word == "&&" else np.logical_or
            return Expression(
                f"({first.text} {word} {other.text})", "bool", lambda s: both(first.value(s), other.value(s)).astype(np.uint64)
            )
        return Expression(f"({x.text} {op} {y.text})", "bool", lambda s: COMPARISONS[op](x.value(s), y.value(s)).astype(np.uint64))

    def of_vectors(self, depth: int, kind: str) -> Expression:
        if self.rng.random() < 0.25:
            x = self.expression(depth, kind)
            order = [self.rng.randrange(width(kind)) for _ in range(width(kind))]
            return Expression(f"{x.text}.{''.join('xyzw'[at] for at in order)}", kind, lambda s: x.value(s)[:, order])
        op = self.rng.choice("+-*&|^")
        x, is_number = self.expression(depth, kind), self.rng.random() < 0.3
        y = self.expression(depth, element(kind) if is_number else kind)

        def value(s: State) -> Values:
            left, right = x.value(s), y.value(s)
            right = right[:, None] if is_number else right
            return wrapped(OF_BITS[op](left, right), kind)

        return Expression(f"({x.text} {op} {y.text})", kind, value)

    # -- statements ------------------------------------------------------------------------------------------------------------------

    def block(self, count: int, depth: int) -> tuple[str, Step]:
        before = dict(self.names)
        made = [self.statement(depth) for _ in range(count)]
        self.names = before if depth < self.depth else self.names

        def run(s: State) -> None:
            for _, step in made:
                if s.active.any():
                    step(s)

        return "".join(f"{text}\n" for text, _ in made), run

    def statement(self, depth: int) -> tuple[str, Step]:
        kinds = [self.declaration, self.declaration, self.assignment, self.assignment, self.of_lanes]
        if depth:
            kinds += [self.branch, self.loop, self.switch]
        if self.may_leave:
            kinds.append(self.leave)
        if self.is_uniform:
            kinds.append(self.exchange)
        if self.helpers:
            kinds.append(self.call)
        return self.rng.choice(kinds)(depth)

    def declaration(self, depth: int) -> tuple[str, Step]:
        kind, name = self.rng.choice([*SCALARS, *VECTORS, "bool"]), f"v{self.count}"
        self.count += 1
        x = self.expression(3, kind)
        self.names[name] = kind

        def run(s: State) -> None:
            s.values.pop(name, None)
            s.put(name, x.value(s))

        return f"{kind} {name} = {x.text};", run

    def assignment(self, depth: int) -> tuple[str, Step]:
        own = [name for name in self.names if name != "i" and not name.startswith("n")]
        name = self.rng.choice(own)
        kind = self.names[name]
        x = self.expression(3, kind)
        if not is_signed(kind) and kind != "bool" and self.rng.random() < 0.4:
            op = self.rng.choice("+-*^&|")
            return f"{name} {op}= {x.text};", lambda s: s.put(name, wrapped(OF_BITS[op](s.values[name], x.value(s)), kind))
        if width(kind) > 1 and self.rng.random() < 0.4:
            at, part = self.rng.randrange(width(kind)), self.expression(2, element(kind))

            def run(s: State) -> None:
                new = s.values[name].copy()
                new[:, at] = part.value(s)
                s.put(name, new)

            return f"{name}.{'xyzw'[at]} = {part.text};", run
        return f"{name} = {x.text};", lambda s: s.put(name, x.value(s))

    def switch(self, depth: int) -> tuple[str, Step]:
        """Each arm ends with `break`, so that nobody comes from one to the next."""
        x, labels = self.expression(2, "uint"), self.rng.sample(range(4), 4)
        cut, other = self.rng.randrange(1, 4), self.rng.randrange(3)
        groups = [labels[:cut], labels[cut : self.rng.randrange(cut, 5)]]
        groups.insert(other, [n for n in range(4) if n not in [*groups[0], *groups[1]]])
        uniform, words, self.is_uniform, self.words = self.is_uniform, self.words, False, ["continue"]
        blocks = [self.block(1 + self.rng.randrange(2), depth - 1) for _ in groups]
        self.is_uniform, self.words = uniform, words

        def run(s: State) -> None:
            before, chosen = s.active, x.value(s) & np.uint64(3)
            for group, (_, step) in zip(groups, blocks, strict=True):
                s.active = before & np.isin(chosen, group)
                if s.active.any():
                    step(s)
            s.active = before & ~s.gone

        text = ""
        for i, (group, (body, _)) in enumerate(zip(groups, blocks, strict=True)):
            text += "default: " if i == other else "".join(f"case {n}: " for n in group) or "case 77: "
            text += f"{{\n{body}}} break;\n"
        return f"switch ({x.text} & 3u) {{\n{text}}}", run

    def branch(self, depth: int) -> tuple[str, Step]:
        c = self.condition(2)
        uniform, self.is_uniform = self.is_uniform, False
        first, then = self.block(1 + self.rng.randrange(3), depth - 1)
        second, otherwise = self.block(self.rng.randrange(3), depth - 1)
        self.is_uniform = uniform

        def run(s: State) -> None:
            before, holds = s.active, c.value(s) != 0
            for step, active in ((then, before & holds), (otherwise, before & ~holds)):
                s.active = active
                if active.any():
                    step(s)
            s.active = before & ~s.gone

        return f"if {c.text} {{\n{first}}} else {{\n{second}}}", run

    def loop(self, depth: int) -> tuple[str, Step]:
        """As many times for each thread, or not."""
        name, is_same, form = f"n{self.loops}", self.rng.random() < 0.4, self.rng.choice(["for", "bounded", "while", "do"])
        self.loops += 1
        times = Expression("3u", "uint", lambda s: np.full(THREADS, 3, np.uint64))
        if not is_same:
            x = self.expression(1, "uint")
            times = Expression(f"({x.text} & 3u)", "uint", lambda s: x.value(s) & np.uint64(3))
        uniform, self.is_uniform = self.is_uniform, self.is_uniform and is_same
        may_leave, words = self.may_leave, self.words
        self.may_leave, self.words = not self.is_uniform, ["break", "continue"]
        self.names[name] = "uint"
        body, step = self.block(1 + self.rng.randrange(4), depth - 1)
        del self.names[name]
        self.is_uniform, self.may_leave, self.words = uniform, may_leave, words

        def run(s: State) -> None:
            before, gone, broken, most = s.active, s.gone, s.broken, times.value(s)
            s.values[name] = np.zeros(THREADS, np.uint64)
            s.broken, running, turn = np.zeros(THREADS, bool), before.copy(), 0
            while (running := running & ~s.broken & ((s.values[name] < most) | (turn == 0 and form == "do"))).any():
                s.active, s.gone, turn = running, np.zeros(THREADS, bool), turn + 1
                if form in ("for", "bounded"):
                    step(s)
                s.values[name] = s.values[name] + np.where(running, np.uint64(1), np.uint64(0))
                if form in ("while", "do"):  # the turns are counted first, where a `continue` does not pass by
                    step(s)
            s.active, s.gone, s.broken = before, gone, broken
            del s.values[name]

        # The number of times is fixed before the first: the body may change what it is made of.
        head = f"{{ const uint most{name} = {times.text}; "
        if form in ("for", "bounded"):
            bound = f"{name} < 3 && " * (form == "bounded")
            return f"{head}for (uint {name} = 0; {bound}{name} < most{name}; {name}++) {{\n{body}}} }}", run
        if form == "while":
            return f"{head}uint {name} = 0; while ({name} < most{name}) {{\n{name}++;\n{body}}} }}", run
        return f"{head}uint {name} = 0; do {{\n{name}++;\n{body}}} while ({name} < most{name}); }}", run

    def leave(self, depth: int) -> tuple[str, Step]:
        """Where a condition holds, out of the loop or to its next turn."""
        c, word = self.condition(1), self.rng.choice(self.words)

        def run(s: State) -> None:
            out = s.active & (c.value(s) != 0)
            s.gone, s.active = s.gone | out, s.active & ~out
            if word == "break":
                s.broken = s.broken | out

        return f"if {c.text} {word};", run

    def helper(self) -> str:
        """A function with operations of lanes, which some leave early."""
        self.names, self.is_uniform = {"a": "uint", "b": "int", "i": "uint"}, False
        body, step = self.block(1 + self.rng.randrange(3), 1)
        early, (rest, last) = self.condition(1), self.block(1 + self.rng.randrange(2), 0)
        name, self.is_uniform = f"f{len(self.helpers)}", True

        def value(s: State, a: Values, b: Values) -> Values:
            inner = State({"a": a, "b": b, "i": s.values["i"]}, s.active)
            step(inner)
            out, result = inner.active & (early.value(inner) != 0), inner.values["a"].copy()
            inner.active = inner.active & ~out
            if inner.active.any():
                last(inner)
            return np.where(out, result, wrapped(inner.values["a"] + np.uint64(1), "uint"))

        self.helpers.append(Helper(name, value))
        return f"uint {name}(uint a, int b, uint i) {{\n{body}if {early.text} return a;\n{rest}return a + 1u;\n}}\n"

    def call(self, depth: int) -> tuple[str, Step]:
        f, x, y = self.rng.choice(self.helpers), self.expression(1, "uint"), self.expression(1, "int")
        return f"a = {f.name}({x.text}, {y.text}, i);", lambda s: s.put("a", f.value(s, x.value(s), y.value(s)))

    def of_lanes(self, depth: int) -> tuple[str, Step]:
        """Among the lanes of a simdgroup that are there."""
        function, x = self.rng.choice(list(OF_LANES)), self.expression(2, "uint")

        def run(s: State) -> None:
            given, found = x.value(s), np.zeros(THREADS, np.uint64)
            for first in range(0, THREADS, LANES):
                lanes = [t for t in range(first, first + LANES) if s.active[t]]
                of = [int(given[t]) for t in lanes]
                for j, t in enumerate(lanes):
                    found[t] = OF_LANES[function](of, j) & 0xFFFFFFFF
            s.put("a", wrapped(s.values["a"] * np.uint64(3) + found, "uint"))

        return f"a = a * 3u + {function}({x.text});", run

    def exchange(self, depth: int) -> tuple[str, Step]:
        """By way of threadgroup memory, where all threads come by."""
        name, x, away = f"v{self.count}", self.expression(2, "uint"), self.rng.randrange(1, THREADS)
        self.count += 1
        self.names[name] = "uint"

        def run(s: State) -> None:
            s.values.pop(name, None)
            s.put(name, np.roll(x.value(s), -away))

        barrier = "threadgroup_barrier(mem_flags::mem_threadgroup);"
        return f"shared[i] = {x.text};\n{barrier}\nuint {name} = shared[(i + {away}) % {THREADS}];\n{barrier}", run
