"""Functions of a kernel's own: their names, and who meets in them."""

from __future__ import annotations

import metalmm
import numpy as np
import pytest

HEAD = "#include <metal_stdlib>\nusing namespace metal;\n"


@pytest.mark.usefixtures("each_compiler")
def test_a_function_has_a_name_of_the_runtimes(device: metalmm.Device) -> None:
    """A call with a vector finds what stands beside the vector, too: no function of the runtime that takes any type."""
    names = [
        "arm",
        "at",
        "beside_bfloat",
        "both_fma",
        "by_words",
        "chosen",
        "elementwise",
        "exchange",
        "has",
        "multiply",
        "place_of",
        "position",
        "promoted",
        "same",
    ]
    source = HEAD + "".join(f"uint {name}(float4 x, uint i) {{ return uint(x[i % 4]); }}\n" for name in names)
    calls = "".join(f"y[{i}] = {name}(float4(1, 2, 3, {i}), 3);\n" for i, name in enumerate(names))
    y = np.zeros(len(names), np.uint32)
    device.compile(source + f"kernel void k(device uint* y) {{ {calls} }}").kernel("k")(y, grid=1, threadgroup=1)
    np.testing.assert_array_equal(y, np.arange(len(names)))


@pytest.mark.usefixtures("each_compiler")
def test_a_call_with_an_operation_is_all_of_a_branch(device: metalmm.Device) -> None:
    source = (
        HEAD
        + """void count(device uint* y, uint i) { y[i] += simd_sum(1u); }
kernel void k(device uint* y, uint i [[thread_position_in_grid]]) {
  for (uint n = 0; n < 4; n++)
    if (i % 4 <= n) count(y, i);
    else if (n == 1) count(y, i);
  if (i < 5) count(y, i);
}"""
    )
    y = np.zeros(32, np.uint32)
    device.compile(source).kernel("k")(y, threads=32, threadgroup=32)
    lane = np.arange(32)
    expected = sum(np.where(lane % 4 <= n, 8 * (n + 1), np.where(n == 1, 8 * (3 - n), 0)) for n in range(4)) + 5 * (lane < 5)
    np.testing.assert_array_equal(y, expected)


@pytest.mark.usefixtures("each_compiler")
def test_two_calls_of_one_function_under_its_whole_name(device: metalmm.Device) -> None:
    source = (
        HEAD
        + """namespace a { namespace b { uint f(uint x) { if (x & 2) return 0; return 100 * simd_sum(1u); } } }
kernel void k(device uint* y, uint i [[thread_position_in_grid]]) { y[i] = a::b::f(i) + ::a::b::f(i + 1); }"""
    )
    y, lane = np.zeros(32, np.uint32), np.arange(32)
    device.compile(source).kernel("k")(y, threads=32, threadgroup=32)
    np.testing.assert_array_equal(y, 1600 * (lane & 2 == 0) + 1600 * (lane + 1 & 2 == 0))


@pytest.mark.usefixtures("each_compiler")
def test_a_call_behind_a_branch_waits_for_the_branch(device: metalmm.Device) -> None:
    """Though the function stands before it, and lanes come to its operation first."""
    source = (
        HEAD
        + """uint f(uint x) { if (x & 2) return 0; return 100 * simd_sum(1u); }
kernel void k(device uint* y, uint i [[thread_position_in_grid]]) { uint s = 0; if (i & 1) s = simd_sum(1u); s += f(i); y[i] = s; }"""
    )
    y, lane = np.zeros(32, np.uint32), np.arange(32)
    device.compile(source).kernel("k")(y, threads=32, threadgroup=32)
    np.testing.assert_array_equal(y, 16 * (lane & 1) + 1600 * (lane & 2 == 0))
