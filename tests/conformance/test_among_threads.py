"""What threads do together: atomics, barriers, and functions of a simdgroup or a quad. What each lane must get follows, in Python, from who is
there."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from math import prod
from operator import and_, or_, xor
from typing import Any

import metalmm
import numpy as np
import pytest
from support.here import ALL_OF_IT, COMPILERS, DEVICE
from support.msl import FLOATS, INTEGERS

HEAD = "#include <metal_stdlib>\nusing namespace metal;\n"
LANES = range(32)
Values = dict[int, Any]  # of the lanes that are there
Of = Callable[[Values, int], Any]  # what a lane gets; None where MSL does not say

# Of all lanes of a simdgroup, or those of a quad: the same functions.
REDUCTIONS: dict[str, Callable[[list[Any]], Any]] = {"sum": sum, "product": prod, "min": min, "max": max}
REDUCTIONS |= {name: lambda x, f=f: reduce(f, x) for name, f in (("and", and_), ("or", or_), ("xor", xor))}


def before(x: Values, lane: int, inclusive: bool) -> list[Any]:
    return [v for i, v in sorted(x.items()) if i < lane + inclusive]


def moved(step: int, width: int, rotates: bool) -> Of:
    def f(x: Values, lane: int) -> Any:
        place = lane % width + step
        return x.get(lane - lane % width + place % width) if rotates or 0 <= place < width else x[lane]

    return f


def filled(step: int, width: int) -> Of:
    """What moves in from outside is the other operand's, 40 more than the first."""

    def f(x: Values, lane: int) -> Any:
        place = lane % width + step
        found = x.get(lane - lane % width + place % width)
        return found if found is None or 0 <= place < width else found + 40

    return f


def of_group(name: str, width: int) -> dict[str, Of]:
    """By the code that makes r of x, y and lane. Of a quad the lanes of another are not there."""
    near = width // 4  # 8 or 1
    found: dict[str, Of] = {f"{name}_{op}(x)": lambda x, lane, f=f: f(list(x.values())) for op, f in REDUCTIONS.items()}
    for form, inclusive in (("inclusive", True), ("exclusive", False)):
        found[f"{name}_prefix_{form}_sum(x)"] = lambda x, lane, i=inclusive: sum(before(x, lane, i))
        found[f"{name}_prefix_{form}_product(x)"] = lambda x, lane, i=inclusive: prod(before(x, lane, i))
    found[f"{name}_broadcast_first(x)"] = lambda x, lane: x[min(x)]
    found[f"{name}_broadcast(x, {width // 2})"] = lambda x, lane: x.get(lane - lane % width + width // 2)
    found[f"{name}_shuffle(x, ushort(lane * 3 % {width}))"] = lambda x, lane: x.get(lane - lane % width + lane * 3 % width)
    found[f"{name}_shuffle_xor(x, {width // 2 - 1})"] = lambda x, lane: x.get(lane ^ width // 2 - 1)
    for sign, way in ((1, "down"), (-1, "up")):
        found[f"{name}_shuffle_{way}(x, {near})"] = moved(sign * near, width, False)
        found[f"{name}_shuffle_rotate_{way}(x, {near + 1})"] = moved(sign * (near + 1), width, True)
        found[f"{name}_shuffle_and_fill_{way}(x, y, {near})"] = filled(sign * near, width)
        found[f"{name}_shuffle_and_fill_{way}(x, y, 1, {width // 2})"] = filled(sign, width // 2)
    return found


def mask(x: Values, width: int) -> int:
    return sum(1 << i % width for i, v in x.items() if v)


def votes(name: str, width: int) -> dict[str, Of]:
    """Of whether x is more than 1. Half a word at a time, which a float has exactly."""
    vote = f"ulong({name}_vote::vote_t({name}_ballot(x > 1)))"
    there = f"ulong({name}_vote::vote_t({name}_active_threads_mask()))"
    found: dict[str, Of] = {
        f"{name}_any(x > 1)": lambda x, lane: any(v > 1 for v in x.values()),
        f"{name}_all(x > 1)": lambda x, lane: all(v > 1 for v in x.values()),
        f"{name}_is_first()": lambda x, lane: lane == min(x),
        f"{name}_ballot(x > 1).any()": lambda x, lane: any(v > 1 for v in x.values()),
        f"{name}_is_helper_thread()": lambda x, lane: False,
    }
    for shift in (0, 16):
        found[f"{vote} >> {shift} & 0xffff"] = lambda x, lane, s=shift: mask({i: v > 1 for i, v in x.items()}, width) >> s & 0xFFFF
        found[f"{there} >> {shift} & 0xffff"] = lambda x, lane, s=shift: mask(dict.fromkeys(x, 1), width) >> s & 0xFFFF
    return found


AMONG: dict[str, Of] = of_group("simd", 32) | of_group("quad", 4)
VOTES: dict[str, Of] = votes("simd", 32) | votes("quad", 4)

# The code around an operation, and which lanes come to it together, one time after another. What a lane got last is looked at.
AROUND: dict[str, tuple[str, list[list[int]]]] = {
    "all": ("OP;", [[*LANES]]),
    "a branch": ("if (lane % 3 == 1) { OP; }", [[i for i in LANES if i % 3 == 1]]),
    "else": ("if (lane < 7) { r = R(0); } else { OP; }", [[i for i in LANES if i >= 7]]),
    "both arms": ("if (lane % 8 < 3) { OP; } else { OP; }", [[i for i in LANES if (i % 8 < 3) == arm] for arm in (True, False)]),
    "who stays": ("if (lane == 5 || lane > 20) return; OP;", [[i for i in LANES if i != 5 and i <= 20]]),
    "a loop": ("for (uint j = 0; j <= lane % 4; j++) { OP; }", [[i for i in LANES if i % 4 >= j] for j in range(4)]),
    "a bounded loop": ("for (uint j = 0; j < 4 && j <= lane / 8; j++) { OP; }", [[i for i in LANES if i // 8 >= j] for j in range(4)]),
    "a loop that lanes leave": (
        "for (uint j = 0;; j++) { if (j > lane / 8) break; OP; }",
        [[i for i in LANES if i // 8 >= j] for j in range(4)],
    ),
    "turns passed by": (
        "for (uint j = 0; j < 3; j++) { if (lane % 3 == j) continue; OP; }",
        [[i for i in LANES if i % 3 != j] for j in range(3)],
    ),
    "while": ("uint j = lane % 2; while (j < 3) { j += 2; OP; }", [[*LANES], [*LANES[::2]]]),
    "a switch": (
        "switch (lane % 4) { case 0: OP; break; case 2: case 3: OP; break; default: r = R(0); }",
        [[*LANES[::4]], [i for i in LANES if i % 4 >= 2]],
    ),
}
TYPES = [
    (kind, width) for i, kind in enumerate(("half", "float", "char", "uchar", "short", "ushort", "int", "uint")) for width in (1, 1 + i % 4)
]


def value(kind: str, lane: int) -> Any:
    """Such that no product of all overflows: at most six are 2, the others 1 or, of a signed type, -1."""
    x = 2 if lane % 6 == 1 else -1 if lane % 5 == 3 and kind[0] != "u" else 1
    return float(x) if kind in FLOATS else x


ON_CPU = ALL_OF_IT and DEVICE == "cpu"
CASES = [(by, around) for i, around in enumerate(AROUND) for by in (COMPILERS if ON_CPU else [COMPILERS[i % len(COMPILERS)]])]
PART = len(COMPILERS) if ON_CPU else 1 if ALL_OF_IT else 4 if DEVICE == "cpu" else 12


@pytest.mark.rest(but=2)
@pytest.mark.parametrize(("compiler", "around"), CASES)
def test_of_a_simdgroup_or_a_quad(compiler: str, around: str, device: metalmm.Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each function with one type, by compilers in turn, or every fourth. Results are whole numbers."""
    monkeypatch.setenv("METALMM_CXX", compiler)
    code, times = AROUND[around]
    lines, calls, expected, turn = "", "", list[tuple[str, Any]](), [*AROUND].index(around)
    for i, (call, of) in enumerate((AMONG | VOTES).items()):
        if (i + turn + COMPILERS.index(compiler)) % PART:
            continue
        kind, width = TYPES[(i + turn) % len(TYPES)]
        if call in VOTES or (any(f"_{op}(" in call for op in ("and", "or", "xor")) and "shuffle" not in call and kind in FLOATS):
            kind, width = "uint", 1
        type_name, group = kind if width == 1 else f"{kind}{width}", 4 if "quad_" in call else 32
        result = "float" if call in VOTES else type_name
        made = f"{type_name} x = {type_name}({', '.join(f'a[(lane + {c}) % 32]' for c in range(width))}), y = {type_name}(x + {type_name}(40));"
        stored = " ".join(f"o[{c}] = float(r{f'[{c}]' * (width > 1)});" for c in range(width))
        op = f"r = {result}({call}); {stored}"
        lines += f"void f{i}(device const {kind}* a, device float* o, uint lane) {{ typedef {result} R; R r; {made} {code.replace('OP;', op)} }}\n"
        calls += f"f{i}(a_{kind}, o + {4 * len(expected)} * 32 + 4 * lane, lane);\n"
        want = np.full((32, 4), np.nan)
        for lanes in times:
            for c in range(width):
                x = {lane: value(kind, (lane + c) % 32) for lane in lanes}
                for lane in lanes:
                    near = {j: v for j, v in x.items() if j // group == lane // group}
                    want[lane, c] = np.nan if (y := of(near, lane)) is None else float(y)
        expected.append((f"{call} of {type_name}", want))
    kinds = sorted({kind for kind, _ in TYPES})
    arguments = ", ".join(f"device const {kind}* a_{kind}" for kind in kinds)
    source = f"{HEAD}{lines}kernel void k({arguments}, device float* o, uint lane [[thread_position_in_grid]]) {{\n{calls}}}\n"
    operands = [np.array([value(kind, lane) for lane in LANES], (FLOATS | INTEGERS)[kind]) for kind in kinds]
    got = np.full((len(expected), 32, 4), -99, np.float32)
    device.compile(source).kernel("k")(*operands, got, threads=32, threadgroup=32)
    wrong = [name for (name, want), r in zip(expected, got, strict=True) if not (np.isnan(want) | (want == r)).all()]
    assert wrong == []


def in_memory(*kinds: str) -> list[tuple[str, str]]:
    """Each type with each memory, or with one in turn."""
    found = [(kind, memory) for kind in kinds for memory in ("device", "threadgroup")]
    return [x for i, x in enumerate(found) if ALL_OF_IT or i % 2 == i // 2 % 2]


# Of an atomic in a memory: what threads do with it at once, and whether what they saw and what is left agree. x: a thread's operand; old:
# what it saw, by thread; left: what is in memory at the end, where START was at first.
START, THREADS = 200, 192
Agree = Callable[[Any, Any, int], bool]


def one_after_another(step: int) -> Agree:
    return lambda x, old, left: (
        sorted(old) == [START + min(0, step * (THREADS - 1)) + i for i in range(THREADS)] and left == START + step * THREADS
    )


FETCHED: dict[str, tuple[str, Agree]] = {
    "add": ("1", one_after_another(1)),
    "sub": ("1", one_after_another(-1)),
    "min": ("x", lambda x, old, left: left == min(START, *x) and all(o in (START, *x) and o >= left for o in old) and START in old),
    "max": ("x", lambda x, old, left: left == max(START, *x) and all(o in (START, *x) and o <= left for o in old) and START in old),
    "or": ("1u << t % 32", lambda x, old, left: left in (-1, 0xFFFFFFFF) and all(o & START == START for o in old)),
    "and": ("~(1u << t % 32)", lambda x, old, left: left == 0 and all(o & ~START == 0 for o in old)),
    "xor": ("1u << t % 31", lambda x, old, left: left == reduce(xor, (1 << t % 31 for t in range(THREADS)), START) and START in old),
}
ATOMICS: dict[str, tuple[str, Agree]] = {
    f"fetch_{name}": (f"atomic_fetch_{name}_explicit(p, T({x}), memory_order_relaxed)", agree) for name, (x, agree) in FETCHED.items()
}
ATOMICS["exchange"] = (
    "atomic_exchange_explicit(p, x, memory_order_relaxed)",
    lambda x, old, left: sorted([*old, left]) == sorted([*x, START]),
)
ATOMICS["compare_exchange"] = ("next(p)", one_after_another(1))
ATOMICS["load and store"] = ("through(p, x)", lambda x, old, left: left in x and all(o in (START, *x) for o in old))
NEXT = """template <class A, class T> T next(A p, T) { T old = atomic_load_explicit(p, memory_order_relaxed);
  while (!atomic_compare_exchange_weak_explicit(p, &old, old + 1, memory_order_relaxed, memory_order_relaxed)) {} return old; }
template <class A, class T> T through(A p, T x) { atomic_store_explicit(p, x, memory_order_relaxed); return atomic_load_explicit(p, memory_order_relaxed); }
"""


@pytest.mark.usefixtures("each_compiler")
@pytest.mark.parametrize(("kind", "memory"), in_memory("int", "uint", "float"))
def test_atomics_under_contention(kind: str, memory: str, device: metalmm.Device) -> None:
    """Each operation that the type has, by threads of one threadgroup, or of several where the memory is the device's."""
    names = [n for n in ATOMICS if kind != "float" or n in ("fetch_add", "fetch_sub", "exchange", "compare_exchange", "load and store")]
    body = "".join(
        f"  {{ {memory} atomic_{kind}* p = all + {i}; old[{i} * {THREADS} + t] = {ATOMICS[name][0].replace('next(p)', 'next(p, x)')}; }}\n"
        for i, name in enumerate(names)
    )
    # In threadgroup memory, what was there comes from the device's, and goes back.
    local = memory == "threadgroup"
    given = f"threadgroup atomic_{kind} all[{len(names)}];\n" if local else ""
    copies = f"for (uint i = 0; i < {len(names)}; i++) atomic_store_explicit({{}} + i, atomic_load_explicit({{}} + i, memory_order_relaxed), memory_order_relaxed);"
    barrier = "threadgroup_barrier(mem_flags::mem_threadgroup);"
    first, last = (
        (f"if (t == 0) {copies.format('all', 'kept')} {barrier}", f"{barrier} if (t == 0) {copies.format('kept', 'all')}")
        if local
        else ("", "")
    )
    source = (
        f"{HEAD}{NEXT}kernel void k(device atomic_{kind}* {'kept' if local else 'all'}, device {kind}* old, device const {kind}* xs, "
        f"uint t [[thread_position_in_grid]]) {{ typedef {kind} T; const T x = xs[t];\n{given}{first}\n{body}{last} }}\n"
    )
    dtype = {**FLOATS, **INTEGERS}[kind]
    left, old = np.full(len(names), START, dtype), np.zeros((len(names), THREADS), dtype)
    xs = (np.random.default_rng(1).permutation(THREADS) - (0 if kind == "uint" else 60)).astype(dtype)
    device.compile(source).kernel("k")(left, old, xs, threads=THREADS, threadgroup=THREADS if local else 32)
    wrong = [name for i, name in enumerate(names) if not ATOMICS[name][1]([*map(int, xs)], [*map(int, old[i])], int(left[i]))]
    assert wrong == []


@pytest.mark.usefixtures("each_compiler")
def test_atomics_of_a_bool_and_of_64_bits(device: metalmm.Device) -> None:
    source = (
        HEAD
        + """kernel void k(device atomic_bool* b, device atomic_ulong* most, device uint* won, uint t [[thread_position_in_grid]]) {
  won[t] = !atomic_exchange_explicit(b, true, memory_order_relaxed);
  bool no = false; if (t == 7) won[t] += 2 * atomic_compare_exchange_weak_explicit(b + 1, &no, true, memory_order_relaxed, memory_order_relaxed);
  if (t == 9) atomic_store_explicit(b + 2, !atomic_load_explicit(b + 3, memory_order_relaxed), memory_order_relaxed);
  atomic_max_explicit(most, (ulong(t) << 40) + 5, memory_order_relaxed);
  atomic_min_explicit(most + 1, (ulong(t + 1) << 33) - 5, memory_order_relaxed);
}"""
    )
    b, most, won = np.zeros(4, np.bool_), np.array([3, 1 << 60], np.uint64), np.zeros(THREADS, np.uint32)
    device.compile(source).kernel("k")(b, most, won, threads=THREADS, threadgroup=32)
    assert b.tolist() == [True, True, True, False] and (won & 1).sum() == 1 and won[7] & 2
    assert most.tolist() == [((THREADS - 1) << 40) + 5, (1 << 33) - 5]


FLAGS = {"mem_none": "", "mem_device": "device", "mem_threadgroup": "threadgroup", "mem_texture": ""}
FLAGS["mem_device | mem_flags::mem_threadgroup"] = "device"


@pytest.mark.usefixtures("each_compiler")
def test_barriers_of_each_flag(device: metalmm.Device) -> None:
    """Every thread has come to one before another goes on, whatever memory it orders; that of its flags then holds what others wrote. A
    thread reads what its mirror wrote, a hundred times."""
    body = ""
    for i, (flags, memory) in enumerate(FLAGS.items()):
        barrier, mine = f"threadgroup_barrier(mem_flags::{flags});", "near" if memory == "threadgroup" else "(room + g * size)"
        exchange = f"{mine}[t] = t + r; {barrier} bad += {mine}[size - 1 - t] != size - 1 - t + r; {barrier}" if memory else ""
        body += f"""  for (uint r = 0; r < 100; r++) {{
    atomic_fetch_add_explicit(&n[{i}], 1u, memory_order_relaxed); {barrier}
    bad += atomic_load_explicit(&n[{i}], memory_order_relaxed) != (r + 1) * size; {barrier}
    {exchange}
  }}\n"""
    for memory, mine in (("device", "(room + g * size)"), ("threadgroup", "near")):
        barrier = f"simdgroup_barrier(mem_flags::mem_{memory});"
        body += f"  for (uint r = 0; size % 32 == 0 && r < 100; r++) {{ {mine}[t] = t * r; {barrier} bad += {mine}[t ^ 31] != (t ^ 31) * r; {barrier} }}\n"
        body += "  threadgroup_barrier(mem_flags::mem_device | mem_flags::mem_threadgroup);\n"
    source = (
        HEAD
        + f"""kernel void k(device uint* y, device uint* room, uint t [[thread_index_in_threadgroup]],
    uint g [[threadgroup_position_in_grid]], uint size [[threads_per_threadgroup]]) {{
  threadgroup atomic_uint n[{len(FLAGS)}]; threadgroup uint near[1024]; uint bad = 0;
  near[t] = 0;
  if (t < {len(FLAGS)}) atomic_store_explicit(&n[t], 0u, memory_order_relaxed);
  threadgroup_barrier(mem_flags::mem_threadgroup);\n{body}  y[g * size + t] = bad;
}}"""
    )
    kernel = device.compile(source).kernel("k")
    for size in (32, 100, 1024):
        y, room = np.full(3 * size, 9, np.uint32), np.zeros(3 * size, np.uint32)
        kernel(y, room, grid=3, threadgroup=size)
        assert not y.any(), size


@pytest.mark.usefixtures("each_compiler")
def test_a_fence_orders_what_a_flag_says(device: metalmm.Device) -> None:
    """Of two threadgroups one writes, then sets a flag behind a fence; who sees the flag sees what was written."""
    source = (
        HEAD
        + """kernel void k(device uint* data, device atomic_uint* flag, device uint* bad, uint t [[thread_position_in_grid]]) {
  if (t < 32) { for (uint i = 0; i < 64; i++) data[t * 64 + i] = i + 1;
    atomic_thread_fence(mem_flags::mem_device, memory_order_seq_cst, thread_scope_device);
    atomic_store_explicit(flag + t, 1u, memory_order_relaxed);
  } else if (atomic_load_explicit(flag + t - 32, memory_order_relaxed)) {
    atomic_thread_fence(mem_flags::mem_device, memory_order_seq_cst, thread_scope_device);
    for (uint i = 0; i < 64; i++) bad[t - 32] += data[(t - 32) * 64 + i] != i + 1;
  }
}"""
    )
    data, flag, bad = np.zeros(2048, np.uint32), np.zeros(32, np.uint32), np.zeros(32, np.uint32)
    device.compile(source).kernel("k")(data, flag, bad, threads=64, threadgroup=32)
    assert flag.all() and not bad.any()


# Of a load or a store: elements of a row, where the matrix begins in it, whether it is transposed; in a place of 10 rows of 24.
PLACES = [(8, (0, 0), False), (24, (0, 0), False), (24, (13, 1), False), (24, (5, 2), True), (8, (0, 0), True), (20, (3, 0), False)]


@pytest.mark.usefixtures("each_compiler")
@pytest.mark.parametrize(("kind", "memory"), in_memory(*FLOATS))
def test_matrices_of_a_simdgroup(kind: str, memory: str, device: metalmm.Device) -> None:
    """Each is loaded from a place and stored plainly, and the other way; then products and those that are made of a number."""
    made = [
        "x * z",
        f"make_filled_simdgroup_matrix<{kind}, 8, 8>({kind}(3))",
        f"make_diagonal_simdgroup_matrix<{kind}, 8, 8>({kind}(2))",
        f"simdgroup_{kind}8x8({kind}(5))",
    ]
    body = ""
    for i, (row, (column, line), transposed) in enumerate(PLACES):
        place = f"{row}, ulong2({column}, {line}), {str(transposed).lower()}"
        body += (
            f"{{ M m; simdgroup_load(m, from, {place}); simdgroup_store(m, y + {64 * i}); simdgroup_store(x, to + {240 * i}, {place}); }}\n"
        )
    for i, code in enumerate(made, len(PLACES)):
        body += f"{{ M m = {code}; simdgroup_store(m, y + {64 * i}); }}\n"
    i = 64 * (len(PLACES) + len(made))
    body += f"{{ M m; simdgroup_multiply(m, x, z); simdgroup_store(m, y + {i}); simdgroup_multiply_accumulate(m, z, x, m); simdgroup_store(m, y + {i + 64});\n"
    body += f"y[{i + 128} + 2 * lane] = x.thread_elements()[0]; y[{i + 129} + 2 * lane] = x.thread_elements()[1]; }}\n"
    count, room = len(PLACES) + len(made) + 3, 240 * len(PLACES)
    first, last = "device const T* from = a; device T* to = b;", ""
    if memory == "threadgroup":
        first = f"threadgroup T from[240], to[{room}]; for (uint i = lane; i < {room}; i += 32) {{ to[i] = b[i]; if (i < 240) from[i] = a[i]; }}\n"
        first += "simdgroup_barrier(mem_flags::mem_threadgroup);"
        last = f"simdgroup_barrier(mem_flags::mem_threadgroup); for (uint i = lane; i < {room}; i += 32) b[i] = to[i];"
    arguments = f"device const {kind}* a, device {kind}* b, device {kind}* y, uint lane [[thread_index_in_simdgroup]]"
    source = f"{HEAD}#include <metal_simdgroup_matrix>\nkernel void k({arguments}) {{ typedef {kind} T; typedef simdgroup_{kind}8x8 M;\n{first}\n"
    source += f"M x, z; simdgroup_load(x, a); simdgroup_load(z, a + 100, 8);\n{body}{last} }}\n"
    a = np.random.default_rng(7).integers(-3, 4, 240)
    b, y = np.full((len(PLACES), 240), 9, FLOATS[kind]), np.zeros((count, 64), FLOATS[kind])
    device.compile(source).kernel("k")(a.astype(FLOATS[kind]), b, y, threads=32, threadgroup=32)
    x, z, expected = a[:64].reshape(8, 8), a[100:164].reshape(8, 8), list[Any]()
    for i, (row, (column, line), transposed) in enumerate(PLACES):
        at = row * (line + np.arange(8)[:, None]) + column + np.arange(8)
        expected.append(a[at.T if transposed else at])
        want = np.full(240, 9)
        want[at.T if transposed else at] = x
        np.testing.assert_array_equal(b[i].astype(int), want, err_msg=f"stored: {PLACES[i]}")
    lanes = [((lane // 4 & 4) + lane // 2 % 4, (lane // 4 & 2) * 2 + lane % 2 * 2 + j) for lane in LANES for j in range(2)]
    expected += [x @ z, np.full((8, 8), 3), 2 * np.eye(8), 5 * np.eye(8), x @ z, z @ x + x @ z, [x[place] for place in lanes]]
    for want, got, what in zip(expected, y.astype(int), [*PLACES, *made, "product", "with a sum", "elements"], strict=True):
        np.testing.assert_array_equal(got, np.ravel(want), err_msg=str(what))
