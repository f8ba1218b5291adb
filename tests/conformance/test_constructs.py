"""Constructs that kernels of other projects use, in our words: MLX, ggml and PyTorch compile by them."""

from __future__ import annotations

import functools
import itertools
import math
import operator
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import metalmm
import numpy as np
import pytest
from support.here import DEVICE, REAL_GPU
from support.msl import COMPARISONS, FLOATS, INTEGERS

HEAD = "#include <metal_stdlib>\nusing namespace metal;\n"
TYPES = ("bfloat", "half", "float", "int", "uint", "short", "uchar", "bool", "long")


@pytest.mark.usefixtures("each_compiler")
def test_comparisons_of_bfloat(device: metalmm.Device) -> None:
    """Each with each type of number on either side, and vectors: a bfloat holds what a comparison of floats says."""
    cases = list(itertools.product(COMPARISONS, TYPES, (True, False)))
    body, expected = "", []
    for i, (op, kind, is_first) in enumerate(cases):
        left, right = f"bfloat(x[{i} % 3])", f"{kind}(x[{i} % 2])"
        values = float(i % 3), float(i % 2)
        if not is_first:
            left, right, values = right, left, values[::-1]
        body += f"y[{i}] = ({left}) {op} ({right});\n"
        expected.append(COMPARISONS[op](*values))
    body += f"y[{len(cases) + 1}] = bfloat(256.0f) == 257 && bfloat(256.0f) < 257.0f;\n"
    body += f"bfloat4 v(x[0], x[1], x[2], x[0]); bool4 b = v < bfloat4(x[1]); y[{len(cases)}] = b.x && !b.y && !b.z && b.w;\n"
    source = HEAD + f"kernel void k(device uint* y [[buffer(0)]], constant float* x [[buffer(1)]]) {{ {body} }}"
    x, y = np.arange(3, dtype=np.float32), np.full(len(cases) + 2, 7, np.uint32)
    device.compile(source).kernel("k")(y, x, grid=1, threadgroup=1)
    np.testing.assert_array_equal(y, [*expected, 1, 1])


@pytest.mark.usefixtures("each_compiler")
def test_an_anonymous_union_behind_extension(device: metalmm.Device) -> None:
    source = HEAD + (
        "struct Q { __extension__ union { struct { half d; half m; }; half2 dm; }; uchar q[4]; };\n"
        "kernel void k(device float* y) { Q q; q.dm = half2(1.5h, 2.5h); y[0] = float(q.d) + 10 * float(q.m) + 100 * sizeof(Q); }"
    )
    y = np.zeros(1, np.float32)
    device.compile(source).kernel("k")(y, grid=1, threadgroup=1)
    assert y[0] == 1.5 + 25 + 800


@pytest.mark.usefixtures("each_compiler")
def test_a_half_goes_to_the_function_of_floats(device: metalmm.Device) -> None:
    """As MLX calls its own log1p: of float, bfloat and complex numbers, none of half."""
    source = (
        HEAD
        + """struct Both { float re, im; template <class T> Both(T x) : re(float(x)), im(0) {} };
inline float own(float x, float y) { return x + y; }
inline bfloat own(bfloat x, bfloat y) { return bfloat(100.0f); }
inline Both own(Both x, Both y) { return x; }
template <typename T> struct Op { T operator()(T x) { return own(x, x); } };
kernel void k(device half* x [[buffer(0)]], device float* y [[buffer(1)]]) {
  y[0] = own(x[0], x[1]);
  x[0] = Op<half>()(x[1]);
  y[1] = own(y[0], y[0]);
  y[2] = float(own(bfloat(y[0]), bfloat(1.0f)));
}"""
    )
    x, y = np.array([1.5, 2.25], np.float16), np.zeros(3, np.float32)
    device.compile(source).kernel("k")(x, y, grid=1, threadgroup=1)
    assert (x[0], *y) == (4.5, 3.75, 7.5, 100)


@pytest.mark.usefixtures("each_compiler")
def test_which_numbers_a_type_has(device: metalmm.Device) -> None:
    """As templates ask for it, of a constant's type, too."""
    traits = {"is_floating_point": "f", "is_integral": "iu", "is_arithmetic": "fiu", "is_signed": "fi", "is_unsigned": "u"}
    kinds = {**dict.fromkeys(FLOATS, "f"), **{name: np.dtype(kind).kind for name, kind in INTEGERS.items()}}
    cases = [(trait, kind) for trait in traits for kind in kinds]
    body = "".join(f"y[{i}] = {t}_v<{kind}> + 2 * {t}<const {kind}>::value;\n" for i, (t, kind) in enumerate(cases))
    y = np.zeros(len(cases), np.int32)
    device.compile(HEAD + f"kernel void k(device int* y) {{ {body} }}").kernel("k")(y, grid=1, threadgroup=1)
    np.testing.assert_array_equal(y, [3 * (kinds[kind] in traits[trait]) for trait, kind in cases])


@pytest.mark.usefixtures("each_compiler")
def test_what_public_kernels_ask_of_a_type(device: metalmm.Device) -> None:
    source = (
        HEAD
        + """template <typename T> struct Found { uint i; T value; };
template <typename T> struct _numeric_limits_impl<Found<T>> { static constexpr METAL_FUNC Found<T> lowest() { return {7, numeric_limits<T>::lowest()}; } };
static constexpr constant int3 CONSTANT = {1, 2, 4};
kernel void k(device float* y) {
  constexpr int3 LOCAL = int3(1, 0, 2);
  y[0] = numeric_limits<Found<float>>::lowest().value; y[1] = numeric_limits<Found<int>>::lowest().value; y[2] = numeric_limits<half>::max();
  y[3] = vec_elements<float3>::value + 10 * vec_elements<half>::value; y[4] = numeric_limits<Found<uchar>>::lowest().i;
  y[6] = __is_valid_simdgroup_type<half2>::value + 10 * __is_valid_simdgroup_type<long>::value + 100 * __is_valid_simdgroup_type<Found<int>>::value;
  for (int j = 0; j < 3; j++) y[6] += 1000 * CONSTANT[j] + 10000 * LOCAL[j];
  y[5] = is_vector_v<uint2> + 10 * is_vector<uint>::value + 100 * is_scalar_v<half> + 1000 * is_scalar<bool2>::value;
}"""
    )
    y = np.zeros(7, np.float32)
    device.compile(source).kernel("k")(y, grid=1, threadgroup=1)
    np.testing.assert_array_equal(y, [np.finfo(np.float32).min, -(2.0**31), 65504, 3, 7, 101, 37001])


@pytest.mark.usefixtures("each_compiler")
def test_every_packed_vector(device: metalmm.Device) -> None:
    """Its size, and that its last element is the vector's."""
    numbers = {**INTEGERS, **FLOATS}
    kinds = [(kind, n) for kind in numbers for n in (2, 3, 4)]
    body = "".join(f"{{ {t}{n} v({t}(1)); v[{n - 1}] = {t}({n + 5}); packed_{t}{n} p(v); y[{i}] = sizeof(p) * 100 + int(p[{n - 1}]); }}\n"
                   for i, (t, n) in enumerate(kinds))  # fmt: skip
    y = np.zeros(len(kinds), np.int32)
    device.compile(HEAD + f"kernel void k(device int* y) {{ {body} }}").kernel("k")(y, grid=1, threadgroup=1)
    np.testing.assert_array_equal(y, [np.dtype(numbers[kind]).itemsize * n * 100 + n + 5 for kind, n in kinds])


@pytest.mark.usefixtures("each_compiler")
def test_a_matrix_of_each_shape_from_another_types(device: metalmm.Device) -> None:
    shapes = list(itertools.product((2, 3, 4), repeat=2))
    body = "".join(f"{{ {one}{c}x{r} a; for (int i = 0; i < {c * r}; i++) a[i / {r}][i % {r}] = {one}(x[i]); {other}{c}x{r} b(a);"
                   f" for (int i = 0; i < {c * r}; i++) y[0] += abs(float(b[i / {r}][i % {r}]) - i - 1), y[1]++; }}\n"
                   for c, r in shapes for one, other in (("half", "float"), ("float", "half")))  # fmt: skip
    x, y = np.arange(1, 17, dtype=np.float32), np.zeros(2, np.float32)
    device.compile(HEAD + f"kernel void k(device float* y, constant float* x) {{ {body} }}").kernel("k")(y, x, grid=1, threadgroup=1)
    assert (*y,) == (0, 2 * sum(c * r for c, r in shapes))


AT_TURNS = {
    "for": "for (uint n = 0; n < 4; n++) if ((i + n) % 3 != 0) s += simd_sum(1u) * (n + 1);",
    "continue": "for (uint n = 0; n < 4; n++) { if ((i + n) % 3 == 0) continue; s += simd_sum(1u) * (n + 1); }",
    "while": "uint n = 0; while (n < 4) { if ((i + n) % 3 != 0) s += simd_sum(1u) * (n + 1); n++; }",
    "do": "uint n = 0; do { if ((i + n) % 3 != 0) s += simd_sum(1u) * (n + 1); n++; } while (n < 4);",
    "without an end": "for (uint n = 0;; n++) { if (n == 4) break; if ((i + n) % 3 != 0) s += simd_sum(1u) * (n + 1); }",
    "a loop of others": "for (uint n = 0; n < 4; n++) for (uint j = (i + n) % 3; j != 0; j = 0) s += simd_sum(1u) * (n + 1);",
    "a function": "for (uint n = 0; n < 4; n++) if ((i + n) % 3 != 0) s += of_all(n);",
    "a function that has the branch": "for (uint n = 0; n < 4; n++) s += of_some(i, n);",
    "a function that returns": "for (uint n = 0; n < 4; n++) s += or_none(i, n);",
    "a function of a class": "Summed f; for (uint n = 0; n < 4; n++) if ((i + n) % 3 != 0) s += f.of(n);",
    "a condition": "uint n = 0; while (((i + n) % 3 == 0 || (s += simd_sum(1u) * (n + 1)) > 0) && ++n < 4) {}",
    "behind &&": "for (uint n = 0; n < 4; n++) s += ((i + n) % 3 != 0 && simd_sum(1u) > 21) ? (i + n) % 3 == 1 ? 11 * (n + 1) : 11 * (n + 1) : 0;",
}


@pytest.mark.usefixtures("each_compiler")
def test_loops_whose_turns_nobody_counts_compile(device: metalmm.Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("METALMM_LINT", "0")
    body = "uint n = 0; while (bool b{n < 4}) { if ((i & 1) == 0) s += simd_sum(1u); n++; } for (uint j : {1u, 2u}) if (i < 8) s += j * simd_sum(1u);"
    body += " n = 0; switch (i & 1) { case 0: for (; n < 4; n++) { case 1: if (n < 9) s += 1 + 0 * simd_sum(0u); } }"
    y = np.zeros(32, np.uint32)
    device.compile(HEAD + f"kernel void k(device uint* y, uint i [[thread_position_in_grid]]) {{ uint s = 0; {body} y[i] = s; }}").kernel(
        "k"
    )
    assert not y.any()


@pytest.mark.rest(but=8)
@pytest.mark.usefixtures("each_compiler")
@pytest.mark.parametrize("timeout", [None, 20.0] if DEVICE == "cpu" or REAL_GPU else [None])
@pytest.mark.parametrize("body", AT_TURNS.values(), ids=AT_TURNS)
def test_lanes_of_one_turn_of_a_loop_meet(body: str, timeout: float | None) -> None:
    """Though others pass by, and come to the same place at their next turn before them."""
    device, i = metalmm.Device(DEVICE, **({"timeout": timeout} if timeout else {})), np.arange(64)
    of_all = "uint of_all(uint n) { return simd_sum(1u) * (n + 1); }\n"
    of_all += "uint of_some(uint i, uint n) { uint s = 0; if ((i + n) % 3 != 0) s = of_all(n); return s; }\n"
    of_all += "struct Summed { uint of(uint n) const { return of_all(n); } };\n"
    of_all += "uint or_none(uint i, uint n) { if ((i + n) % 3 == 0) return 0; return of_all(n); }\n"
    y, want = np.zeros(64, np.uint32), np.zeros(64, np.uint32)
    source = f"{HEAD}{of_all}kernel void k(device uint* y, uint i [[thread_position_in_grid]]) {{ uint s = 0; {body} y[i] = s; }}"
    device.compile(source).kernel("k")(y, grid=1, threadgroup=64)
    for n in range(4):
        there = (i + n) % 3 != 0
        for first in (0, 32):
            lanes = there & (i // 32 == first // 32)
            count = int(lanes.sum())
            want[lanes] += (11 if count > 21 else 0) * (n + 1) if "> 21" in body else count * (n + 1)
    np.testing.assert_array_equal(y, want)


@pytest.mark.usefixtures("each_compiler")
def test_lanes_in_two_calls_of_a_function_do_not_meet(device: metalmm.Device) -> None:
    source = f"""{HEAD}uint f(uint x) {{ return simd_sum(x); }}
kernel void k(device uint* y, uint i [[thread_position_in_grid]]) {{
  uint s = 0;
  if (i < 16) s = f(1u);
  s += 100 * f(1u) + 10000 * f(1u);
  switch (i & 3) {{ case 1: s += f(1u); break; case 2: for (uint n = 0; n < 3; n++) {{ if (n == 1) continue; s += f(1u); }} break;
    case 3: if (i & 4) break; s += 1000000 * f(1u); break; default: break; }}
  y[i] = s;
}}"""
    y = np.zeros(32, np.uint32)
    device.compile(source).kernel("k")(y, grid=1, threadgroup=32)
    np.testing.assert_array_equal(
        y, [16 * (i < 16) + 323200 + 8 * (i % 4 == 1) + 16 * (i % 4 == 2) + 4000000 * (i % 8 == 3) for i in range(32)]
    )


@pytest.mark.usefixtures("each_compiler")
def test_a_vector_of_one_name_behind_two_parentheses(device: metalmm.Device) -> None:
    """g++ takes its arguments for parameters, until it sees that they are none. NVRTC does not, for which g++ may stand on the fake."""
    if Path(os.environ.get("METALMM_FAKE_NVRTC", "").partition(" ")[0]).name.startswith("g++"):
        pytest.skip("the fake NVRTC is g++")
    y, body = (
        np.zeros(1, np.int32),
        "short a = x[0], b = 5; y[0] = ((short2(short(a), short(a)) - short(b)) * short2(short(b), short(a))).y;",
    )
    device.compile(HEAD + f"kernel void k(device int* y, constant int* x) {{ {body} }}").kernel("k")(
        y, np.array([9], np.int32), grid=1, threadgroup=1
    )
    assert y[0] == 36


@pytest.mark.usefixtures("each_compiler")
def test_loops_over_a_declaration(device: metalmm.Device) -> None:
    """Which device cuda takes apart, so that it can stop them."""
    y = np.zeros(2, np.int32)
    loops = "int i = 3; while (int x = i--) { y[0] += x; } for (i = 4; int x = i; i--) { y[1] += x; }"
    device.compile(HEAD + f"kernel void k(device int* y) {{ {loops} }}").kernel("k")(y, grid=1, threadgroup=1)
    assert (*y,) == (6, 10)


@pytest.mark.usefixtures("each_compiler")
def test_functions_of_c(device: metalmm.Device) -> None:
    y = np.zeros(1, np.int32)
    source = (
        HEAD + 'extern "C" { int three() { return 3; }\nkernel void k(device int* y) { y[0] = three() + 1; } }\nint four() { return 4; }\n'
    )
    device.compile(source).kernel("k")(y, grid=1, threadgroup=1)
    assert y[0] == 4


@pytest.mark.usefixtures("each_compiler")
def test_one_value_for_a_whole_array(device: metalmm.Device) -> None:
    y = np.zeros(3, np.float32)
    source = HEAD + "kernel void k(device float* y) { float x[3] = {[0 ... 2] = 1.5f}; for (int i = 0; i < 3; i++) y[i] = x[i]; }"
    device.compile(source).kernel("k")(y, grid=1, threadgroup=1)
    assert (*y,) == (1.5, 1.5, 1.5)


MATRIX = "simdgroup_float8x8 m(1.0f);"
ELEMENTS = {
    "indexed": "m.thread_elements()[0] = lane; m.thread_elements()[1] = lane + 0.5f; float2 v = float2(m.thread_elements()[0], m.thread_elements()[1]);",
    "by reference": "thread auto& e = m.thread_elements(); e[0] = lane; e[1] = lane + 0.5f; float2 v = float2(e[0], e[1]);",
    "as a vector of two": "reinterpret_cast<thread float2&>(m.thread_elements()) = float2(lane, lane + 0.5f);"
    " float2 v = reinterpret_cast<thread float2&>(m.thread_elements());",
}


@pytest.mark.usefixtures("each_compiler")
@pytest.mark.parametrize("body", ELEMENTS.values(), ids=ELEMENTS)
def test_elements_of_a_matrix(body: str, device: metalmm.Device) -> None:
    """Through a reference to a vector of 64, as Apple declares it, of which a lane has two."""
    arguments = "device float* y [[buffer(0)]], uint lane [[thread_index_in_simdgroup]]"
    source = HEAD + f"kernel void k({arguments}) {{ {MATRIX} {body} y[2 * lane] = v.x; y[2 * lane + 1] = v.y; }}"
    y = np.zeros(64, np.float32)
    device.compile(source).kernel("k")(y, threads=32, threadgroup=32)
    np.testing.assert_array_equal(y, np.arange(64) / 2)
    with pytest.raises(metalmm.CompileError):
        device.compile(source.replace(body, "m.thread_elements() = float2(1, 2); float2 v(1);")).kernel("k")


PARTED = {
    "an atomic of one lane": "if (lane == 0) x = atomic_fetch_add_explicit(&n, 1u, memory_order_relaxed);",
    "behind else": "if (lane != 0) x = 77; else x = atomic_fetch_add_explicit(&n, 1u, memory_order_relaxed);",
    "in a function": "if (lane == 0) x = next(&n);",
    "in a function of a function": "if (lane == 0) { x = after(&n) - 1; }",
    "in a loop": "for (uint j = lane; j < 1; j++) x = next(&n);",
    "in a loop of others": "while (lane == 0 && x == 0) { x = after(&n); } x -= lane == 0;",
    "an exchange that is tried again": "if (lane == 0) { uint old = 0; do { x = old; } while (!atomic_compare_exchange_weak_explicit(&n, &old, old + 1,"
    " memory_order_relaxed, memory_order_relaxed)); }",
    "do": "do { if (lane == 0) x = next(&n); } while (false);",
    "left by break": "for (;;) { if (lane == 0) { x = next(&n); break; } if (lane < 40) break; }",
    "a switch": "switch (lane) { case 0: x = next(&n); break; default: x = 3; }",
}


@pytest.mark.rest(but=4)
@pytest.mark.parametrize("body", PARTED.values(), ids=PARTED)
def test_lanes_are_together_behind_a_branch(body: str, device: metalmm.Device) -> None:
    """Where one lane counts in threadgroup memory and hands what it got to its simdgroup: each simdgroup has a number of its own."""
    functions = "uint next(threadgroup atomic_uint* n) { return atomic_fetch_add_explicit(n, 1u, memory_order_relaxed); }\n"
    functions += "uint after(threadgroup atomic_uint* n) { return next(n) + 1; }\n"
    arguments = "device uint* y [[buffer(0)]], constant uint& rounds [[buffer(1)]], uint i [[thread_position_in_grid]],"
    arguments += " uint t [[thread_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]]"
    barrier = "threadgroup_barrier(mem_flags::mem_threadgroup);"
    source = (
        HEAD
        + functions
        + f"""kernel void k({arguments}) {{
  threadgroup atomic_uint n; threadgroup uint seen[8]; uint bad = 0;
  for (uint r = 0; r < rounds; r++) {{
    if (t == 0) atomic_store_explicit(&n, 0u, memory_order_relaxed);
    {barrier}
    uint x = 0;
    {body}
    x = simd_broadcast_first(x);
    if (lane == 31) seen[t / 32] = x;
    {barrier}
    uint all = 0;
    for (uint s = 0; s < 8; s++) all |= 1u << seen[s];
    bad += all != 255u;
    {barrier}
  }}
  y[i] = bad;
}}"""
    )
    y = np.full(512, 7, np.uint32)
    device.compile(source).kernel("k")(y, np.uint32(20), threads=512, threadgroup=256)
    assert not y.any()


def lenient(device: metalmm.Device) -> metalmm.Device:
    """One on which threads may miss a barrier."""
    return metalmm.Device("cpu", lenient_barriers=True) if device.name == "cpu" else device


def test_lanes_that_leave_before_a_barrier(device: metalmm.Device) -> None:
    """A product of a transposed matrix as others compute it: lanes return before a barrier of their simdgroup's others, at the edge and
    behind the sum, and threadgroup memory is read behind it."""
    source = (
        HEAD
        + """kernel void k(device const float* w [[buffer(0)]], device const float* x [[buffer(1)]], device float* y [[buffer(2)]],
    constant uint& m [[buffer(3)]], constant uint& rows [[buffer(4)]], uint g [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]], uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  threadgroup float part[64];
  uint column = g * 4 + lane % 4;
  if (column >= m) return;
  float sum = 0;
  for (uint r = simdgroup * 8 + lane / 4; r < rows; r += 128) sum += w[r * m + column] * x[r];
  for (ushort step = 16; step >= 4; step /= 2) sum += simd_shuffle_down(sum, step);
  if (lane < 4) {
    part[simdgroup * 4 + lane] = sum;
    threadgroup_barrier(mem_flags::mem_none);
    if (simdgroup == 0) {
      for (uint s = 1; s < 16; s++) sum += part[s * 4 + lane];
      y[column] = sum;
    }
  }
}"""
    )
    kernel = lenient(device).compile(source).kernel("k")
    for m, rows in ((64, 333), (2050, 333), (4097, 130)):
        rng = np.random.default_rng(m)
        w, x, y = (rng.integers(-3, 4, shape).astype(np.float32) for shape in ((rows, m), rows, m))
        kernel(w, x, y, np.uint32(m), np.uint32(rows), grid=-(-m // 4), threadgroup=512)
        np.testing.assert_array_equal(y, x @ w)


def test_lanes_that_skip_a_barrier(device: metalmm.Device) -> None:
    """The same as MLX computes it: lanes at the edge skip a loop with a barrier in it, and are there again where the simdgroup adds up."""
    source = (
        HEAD
        + """kernel void k(device const float* w [[buffer(0)]], device const float* x [[buffer(1)]], device float* y [[buffer(2)]],
    constant int& m [[buffer(3)]], constant int& rows [[buffer(4)]], uint g [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]], uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  int column = int(g * 128 + simdgroup * 32 + lane % 8 * 4), row = int(lane / 8);
  float sum[4] = {};
  if (column < m) {
    column = column + 4 < m ? column : m - 4;
    for (int i = 0; i < rows / 4; i++, row += 4) {
      threadgroup_barrier(mem_flags::mem_none);
      for (int j = 0; j < 4; j++) sum[j] += w[row * m + column + j] * x[row];
    }
    if (row < rows)
      for (int j = 0; j < 4; j++) sum[j] += w[row * m + column + j] * x[row];
  }
  for (int j = 0; j < 4; j++)
    for (ushort step = 2; step >= 1; step /= 2) sum[j] += simd_shuffle_down(sum[j], 8 * step);
  if (lane < 8 && column < m)
    for (int j = 0; j < 4; j++) y[column + j] = sum[j];
}"""
    )
    kernel = lenient(device).compile(source).kernel("k")
    for m, rows in ((64, 333), (333, 2050), (2050, 333), (4097, 130), (1000, 1027)):
        rng = np.random.default_rng(m)
        w, x, y = (rng.integers(-3, 4, shape).astype(np.float32) for shape in ((rows, m), rows, m))
        kernel(w, x, y, np.int32(m), np.int32(rows), grid=-(-m // 128), threadgroup=128)
        np.testing.assert_array_equal(y, x @ w)


SKIPPED = {
    "a branch": "if (lane % 3 == r % 3) { part[t] = t + r; threadgroup_barrier(mem_flags::mem_threadgroup); x = part[(t + 96) % 256]; }",
    "else": "if (lane % 3 != r % 3) x = 5; else { part[t] = t + r; threadgroup_barrier(mem_flags::mem_threadgroup); x = part[(t + 96) % 256]; }",
    "a loop in a branch": "if (lane % 3 == r % 3) { for (uint j = 0; j < 3; j++) { part[t] = t + r + j; threadgroup_barrier(mem_flags::mem_none);"
    " x = part[(t + 96) % 256] - j; threadgroup_barrier(mem_flags::mem_none); } }",
    "a function": "if (lane % 3 == r % 3) { part[t] = t + r; meet(); x = part[(t + 96) % 256]; }",
    "a switch": "switch (lane % 3 == r % 3) { case true: part[t] = t + r; threadgroup_barrier(mem_flags::mem_threadgroup);"
    " x = part[(t + 96) % 256]; break; default: x = 5; }",
    "both arms": "if (lane % 3 == r % 3) { part[t] = t + r; threadgroup_barrier(mem_flags::mem_threadgroup); x = part[(t + 96) % 256]; }"
    " else { threadgroup_barrier(mem_flags::mem_threadgroup); }",
}


@pytest.mark.skipif(not REAL_GPU, reason="the CPU device names it as an error")
@pytest.mark.parametrize("last", (256, 200))
@pytest.mark.parametrize("body", SKIPPED.values(), ids=SKIPPED)
def test_a_barrier_that_lanes_skip_is_one_for_the_others(body: str, last: int, device: metalmm.Device) -> None:
    """Each simdgroup's lanes of one kind meet, and what the threadgroup's others wrote is there; lanes and simdgroups from `last` on have
    ended before."""
    source = (
        HEAD
        + f"""void meet() {{ threadgroup_barrier(mem_flags::mem_threadgroup); }}
kernel void k(device uint* y [[buffer(0)]], constant uint& rounds [[buffer(1)]], constant uint& last [[buffer(2)]],
    uint i [[thread_position_in_grid]], uint t [[thread_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {{
  threadgroup uint part[256];
  part[t] = 0;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (t >= last) return;
  uint bad = 0;
  for (uint r = 0; r < rounds; r++) {{
    uint x = 0;
    {body}
    uint from = (t + 96) % 256, all = simd_sum(1u);
    bad += lane % 3 == r % 3 && from < last && from / 32 != last / 32 && x != from + r;
    bad += all != (t / 32 == last / 32 ? last % 32 : 32);
    threadgroup_barrier(mem_flags::mem_none);
  }}
  y[i] = bad;
}}"""
    )
    y = np.zeros(1024, np.uint32)
    device.compile(source).kernel("k")(y, np.uint32(20), np.uint32(last), threads=1024, threadgroup=256)
    assert not y.any()


def test_all_of_threadgroup_memory_beside_a_barrier_in_a_branch(device: metalmm.Device) -> None:
    source = HEAD + (
        "kernel void k(device uint* y [[buffer(0)]], constant uint& n [[buffer(1)]], uint t [[thread_index_in_threadgroup]]) {"
        " threadgroup uint all[8192]; for (uint i = t; i < 8192; i += n) all[i] = i;"
        " if (n > 1) { threadgroup_barrier(mem_flags::mem_threadgroup); } y[t] = all[8191 - t]; }"
    )
    kernel = device.compile(source).kernel("k")
    assert kernel.static_threadgroup_memory_length == 32768
    y = np.zeros(256, np.uint32)
    kernel(y, np.uint32(256), threads=256, threadgroup=256)
    np.testing.assert_array_equal(y, 8191 - np.arange(256))


def test_a_half_fma_rounds_once(device: metalmm.Device) -> None:
    """683 x 3 is in the middle between two halves; what is added says which, though a float next to the middle holds the sum."""
    source = (
        HEAD
        + "kernel void k(device const half* x, device half* y, uint i [[thread_position_in_grid]]) { y[i] = fma(x[3 * i], x[3 * i + 1], x[3 * i + 2]); }"
    )
    x, expected = [], []
    for factor in (683.0, 681.0):  # 2049 is between 2048 and 2050, 2043 is a half itself
        for sign in (1.0, -1.0):
            for part in (1, 2, 3, 4, 5, 6, 7, 9, 11):
                for side in (1.0, -1.0):
                    x += [factor * sign, 3.0, side * part * 2.0**-14]
                    exact = factor * sign * 3.0 + x[-1]  # in float64
                    expected.append(np.float16(exact))
    y = np.zeros(len(expected), np.float16)
    device.compile(source).kernel("k")(np.array(x, np.float16), y, threads=len(y), threadgroup=8)
    np.testing.assert_array_equal(y, expected)


Lanes = Sequence[int]


def _product(v: Lanes) -> int:
    """Of what the kernel calls f."""
    return math.prod(1 + (x == 9) for x in v)


_OF_LANES: dict[str, Callable[[Lanes, int], int]] = {
    "sum(x)": lambda v, i: sum(v),
    "product(f)": lambda v, i: _product(v),
    "min(x)": lambda v, i: min(v),
    "max(x)": lambda v, i: max(v),
    "and(x)": lambda v, i: functools.reduce(operator.and_, v),
    "or(x)": lambda v, i: functools.reduce(operator.or_, v),
    "xor(x)": lambda v, i: functools.reduce(operator.xor, v),
    "any(x == 9)": lambda v, i: 9 in v,
    "all(x > 2)": lambda v, i: min(v) > 2,
    "prefix_inclusive_sum(x)": lambda v, i: sum(v[: i + 1]),
    "prefix_exclusive_sum(x)": lambda v, i: sum(v[:i]),
    "prefix_inclusive_product(f)": lambda v, i: _product(v[: i + 1]),
    "prefix_exclusive_product(f)": lambda v, i: _product(v[:i]),
    "broadcast(x, ushort(2))": lambda v, i: v[2],
    "broadcast_first(x)": lambda v, i: v[0],
    "shuffle(x, ushort(3 - i % 4))": lambda v, i: v[3 - i % 4],
    "shuffle_xor(x, ushort(3))": lambda v, i: v[i ^ 3],
    "shuffle_up(x, ushort(1))": lambda v, i: v[max(i - 1, 0)],
    "shuffle_down(x, ushort(1))": lambda v, i: v[min(i + 1, len(v) - 1)],
    "shuffle_rotate_up(x, ushort(1))": lambda v, i: v[i - 1],
    "shuffle_rotate_down(x, ushort(3))": lambda v, i: v[(i + 3) % len(v)],
}


@pytest.mark.parametrize(("group", "size"), [("simd", 32), ("quad", 4)])
def test_every_function_of_a_group_of_lanes(group: str, size: int, device: metalmm.Device) -> None:
    """Of simdgroups and of quads, at lanes of which each has another number. Past the end of a shuffle a lane reads anything: not asked."""
    rows = "".join(f" y[{i} * 64 + i] = int({group}_{call});" for i, call in enumerate(_OF_LANES))
    source = f"{HEAD}kernel void k(device const int* a, device int* y, uint i [[thread_position_in_grid]]) {{ int x = a[i]; float f = 1 + (x == 9);{rows} }}"
    a, y = np.random.default_rng(4).integers(1, 11, 64).astype(np.int32), np.zeros((len(_OF_LANES), 64), np.int32)
    a[:32] = a[:32] % 2 + 7  # of which none is 9, and all are over 2
    device.compile(source).kernel("k")(a, y, threads=64, threadgroup=64)
    for (call, function), got in zip(_OF_LANES.items(), y, strict=True):
        for i, found in enumerate(got):
            lanes, at = [int(x) for x in a[i // size * size :][:size]], i % size
            is_past = ("shuffle_up" in call and at == 0) or ("shuffle_down" in call and at == size - 1)
            assert is_past or found == int(function(lanes, at)), f"{group}_{call}, lane {i}: {found}"


def test_functions_of_a_simdgroup_among_every_other_lane(device: metalmm.Device) -> None:
    calls = ("sum(x)", "prefix_inclusive_sum(x)", "prefix_exclusive_sum(x)", "shuffle_and_fill_up(x, 10 * x, ushort(2))")
    rows = "".join(f" y[{i} * 32 + t] = simd_{call};" for i, call in enumerate(calls))
    source = f"{HEAD}kernel void k(device const int* a, device int* y, uint t [[thread_position_in_grid]]) {{ int x = a[t]; if (t % 2) {{{rows} }} }}"
    a, y = np.arange(1, 33, dtype=np.int32) ** 2, np.zeros((len(calls), 32), np.int32)
    device.compile(source).kernel("k")(a, y, threads=32, threadgroup=32)
    odd, sums = a[1::2], np.cumsum(a[1::2])
    np.testing.assert_array_equal(y[:, 1::2], [[sums[-1]] * 16, sums, sums - odd, [10 * odd[-1], *odd[:-1]]])
    assert not y[:, ::2].any()


def test_a_name_of_apples_headers(device: metalmm.Device) -> None:
    """MLX asks by it where it has no argument for it."""
    source = HEAD + ("kernel void k(device uint* y, uint t [[thread_position_in_grid]]) { y[t] = __metal_get_simdgroup_size(ushort()); }")
    y = np.zeros(64, np.uint32)
    device.compile(source).kernel("k")(y, threads=64, threadgroup=64)
    np.testing.assert_array_equal(y, 32)


def test_counts_of_simdgroups_and_quads(device: metalmm.Device) -> None:
    names = [f"{who}{kind}groups_per_threadgroup" for who in ("", "dispatch_") for kind in ("simd", "quad")]
    arguments = ", ".join(f"uint {name} [[{name}]]" for name in names)
    stores = " ".join(f"y[{i}] = {name};" for i, name in enumerate(names))
    source = HEAD + f"kernel void k(device uint* y, {arguments}) {{ {stores} }}"
    y = np.zeros(4, np.uint32)
    for size in ((4, 3, 5), (1, 40, 1), (7, 1, 9)):
        device.compile(source).kernel("k")(y, grid=1, threadgroup=size)
        threads = int(np.prod(size))
        np.testing.assert_array_equal(y, [-(-threads // 32), -(-threads // 4)] * 2)


@pytest.mark.usefixtures("each_compiler")
def test_what_no_other_test_asks_for(device: metalmm.Device) -> None:
    """Conversions, operators and functions that were taken out of the runtime, and none of the others fell."""
    cases = {
        "float(half(bfloat(x[2])) + half4(bfloat4(x[2])).y)": 4,
        "float3(float2(x[1], x[2]), x[3]).z + 10 * float3(x[1], float2(x[2], x[3])).z": 33,
        "float(as_type<uint4>(float4(x[1])).w == 0x3f800000u) + as_type<uchar>(char(-1))": 256,
        "float((~uint2(1, uint(x[2])).yx).x == ~2u) + float(!bool2(x[0] > 0, true).x) + float3(x[1], x[2], x[3]).yz.y": 5,
        "(-packed_float3(x[1], x[2], x[3])).z + float3(packed_half3(half3(x[1]))).x + 2": 0,
        "(x[2] * float2x2(x[3])).columns[1].y": 6,
        "numeric_limits<float>::epsilon() == 0x1p-23f && numeric_limits<half>::epsilon() == half(0x1p-10f)": 1,
        "numeric_limits<float>::denorm_min() == 0x1p-149f && isnan(numeric_limits<float>::quiet_NaN())": 1,
        "is_convertible_v<int, float> && !is_convertible_v<float*, float>": 1,
        "own.at[1] + own.at.size()": 5,
        "(own.at[2] = 4) + 0 * third(own)": 4,
        "second(packed_float3(x[1], x[2], x[3]))": 2,
        "float(integral_constant<int, 3>() + is_same<int, int>())": 4,
    }
    places = {
        "v.xy -= float2(x[1]);": 8,
        "v.xy /= float2(x[2]);": 4.5,
        "p -= packed_float3(x[1]);": 2,
        "p *= packed_float3(x[2]);": 6,
        "p /= packed_float3(x[2]);": 1.5,
    }
    whole = {"w.xy |= uint2(8);": 11, "w.xy &= uint2(1);": 1, "w.xy ^= uint2(1);": 2, "w.xy %= uint2(2);": 1, "w.xy >>= uint2(1);": 1}
    body = "".join(f"y[{i}] = {code};\n" for i, code in enumerate(cases))
    for i, code in enumerate([*places, *whole], len(cases)):
        shown = "p.x" if code.startswith("p") else "w.x" if code.startswith("w") else "v.x"
        body += f"{{ float4 v(9); packed_float3 p(3); uint4 w(3); {code} y[{i}] = {shown}; }}\n"
    source = HEAD + (
        "struct Own { array<float, 3> at; }; float third(const thread Own& own) { return own.at[2]; }\n"
        "float second(const thread packed_float3& p) { return p[1]; }\n"
        f"kernel void k(device float* y [[buffer(0)]], constant float* x [[buffer(1)]], device atomic_uint* a [[buffer(2)]]) {{\n"
        f"Own own = {{{{1, x[2], 3}}}};\n{body}"
        "atomic_fetch_sub_explicit(a, 3u, memory_order_relaxed); atomic_fetch_xor_explicit(a + 1, 5u, memory_order_relaxed);\n"
        "y[40] = atomic_exchange_explicit(a + 2, 9u, memory_order_relaxed);\n"
        "threadgroup_barrier(mem_flags::mem_device | mem_flags::mem_threadgroup); }"
    )
    y, a = np.zeros(41, np.float32), np.array([10, 12, 7], np.uint32)
    device.compile(source).kernel("k")(y, np.arange(4, dtype=np.float32), a, grid=1, threadgroup=1)
    expected = [*cases.values(), *places.values(), *whole.values()]
    np.testing.assert_array_equal(y[: len(expected)], expected)
    assert y[40] == 7 and a.tolist() == [7, 9, 9]
