"""Metal 4's tensors and mpp::tensor_ops::matmul2d, as public kernels use them, against NumPy."""

from __future__ import annotations

import itertools

import metalmm
import numpy as np
import pytest
from support.four_threads import by_nvrtc
from support.here import DEVICE, REAL_GPU

HEAD = """#include <metal_stdlib>
#include <metal_tensor>
#include <MetalPerformancePrimitives/MetalPerformancePrimitives.h>
using namespace metal;
using namespace mpp::tensor_ops;
"""
# A tile of 32 x 16 a threadgroup, of all of K at once, clipped by the store.
WHOLE = """kernel void k(device TYPE* A, device TYPE* B, device OUT* C, constant int3& size, uint2 group [[threadgroup_position_in_grid]]) {
  int m = size.x, n = size.y, k = size.z;
  auto a = tensor(A, dextents<int32_t, 2>(TA ? m : k, TA ? k : m), array<int, 2>({1, (TA ? m : k) + 3}));
  auto b = tensor<device TYPE, dextents<int32_t, 2>, tensor_inline>(B, dextents<int32_t, 2>(TB ? k : n, TB ? n : k));
  tensor<device OUT, dextents<int32_t, 2>, tensor_inline> c(C, dextents<int32_t, 2>(n, m));
  constexpr auto what = matmul2d_descriptor(32, 16, dynamic_length_v<int>, TA, TB);
  matmul2d<what, execution_simdgroups<2>> op;
  int row = group.y * 32, column = group.x * 16;
  auto of_a = a.slice(TA ? row : 0, TA ? 0 : row);
  auto of_b = b.slice(TB ? 0 : column, TB ? column : 0);
  auto of_c = c.slice(column, row);
  auto sums = op.get_destination_cooperative_tensor<decltype(of_a), decltype(of_b), OUT>();
  op.run(of_a, of_b, sums);
  sums.store(of_c);
}
"""
# One simdgroup, steps of 32 of K that are added, B from threadgroup memory, and what is left of K by an operation of its own.
STEPS = """kernel void k(device half* A, device half* B, device float* C, constant int3& size, uint lane [[thread_index_in_simdgroup]]) {
  threadgroup half staged[32 * 16];
  int n = size.y, k = size.z;
  typedef tensor<device half, dextents<int, 2>, tensor_inline> Halves;
  Halves a(A, dextents<int, 2>(k, 16));
  auto b = tensor<threadgroup half, dextents<int, 2>, tensor_inline>(staged, dextents<int, 2>(16, 32));
  constexpr auto step = matmul2d_descriptor(16, 16, 32, false, false, false, matmul2d_descriptor::mode::multiply_accumulate);
  constexpr auto rest = matmul2d_descriptor(16, 16, static_cast<int>(dynamic_extent), false, false, true, matmul2d_descriptor::mode::multiply_accumulate);
  matmul2d<step, execution_simdgroup> op;
  matmul2d<rest, execution_simdgroup> last;
  typedef decltype(a.slice<32, 16>(0, 0)) Left;
  typedef decltype(b) Right;
  auto sums = op.get_destination_cooperative_tensor<Left, Right, float>();
  auto more = last.get_destination_cooperative_tensor<Halves, Right, float>();
#pragma clang loop unroll(full)
  for (uint16_t i = 0; i < sums.get_capacity(); ++i)
    if (sums.is_valid_element(i)) sums[i] = 0;
  for (int at = 0; at < k; at += 32) {
    for (int i = lane; i < 32 * 16; i += 32) staged[i] = i % 16 < n && at + i / 16 < k ? B[(at + i / 16) * n + i % 16] : half(0);
    simdgroup_barrier(mem_flags::mem_threadgroup);
    if (at + 32 <= k) {
      auto left = a.slice<32, 16>(at, 0);
      op.run(left, b, sums);
    } else {
      auto left = a.slice(at, 0);
      for (uint16_t i = 0; i < more.get_capacity(); ++i) more.set(i, sums.get(i));
      last.run(left, b, more);
      for (uint16_t i = 0; i < more.get_capacity(); ++i) sums.set(i, more.get(i));
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);
  }
  tensor<device float, dextents<int, 2>, tensor_inline> before(C, dextents<int, 2>(n, 16));
  auto added = op.get_destination_cooperative_tensor<Left, Right, float>();
  added.load(before);
  for (uint16_t i = 0; i < sums.get_capacity(); ++i) {
    auto at = sums.get_multidimensional_index(i);
    if (sums.is_valid_element(i) && at[0] < n) C[at[1] * n + at[0]] = sums[i] + added[i];
  }
}
"""
pytestmark = pytest.mark.skipif(REAL_GPU, reason="a GPU has no other way to them than an M5's own")


def whole(kind: str, out: str, ta: bool, tb: bool, text: str = WHOLE) -> str:
    words = {"TYPE": kind, "OUT": out, "TA": str(ta).lower(), "TB": str(tb).lower()}
    return "".join(f"#define {name} {value}\n" for name, value in words.items()) + HEAD + text


def draw(rng: np.random.Generator, kind: str, *shape: int) -> np.ndarray:
    return rng.integers(-9, 10, shape).astype({"half": np.float16, "float": np.float32, "char": np.int8}[kind])


@pytest.mark.rest(but=1)
@pytest.mark.usefixtures("each_compiler")
@pytest.mark.parametrize(("kind", "out"), [("half", "float"), ("float", "float"), ("half", "half"), ("char", "int")])
def test_a_product_of_slices_is_clipped_where_the_matrix_ends(kind: str, out: str, device: metalmm.Device) -> None:
    rng = np.random.default_rng(7)
    for (ta, tb), (m, n, k) in itertools.product(itertools.product((0, 1), repeat=2), [(32, 16, 32), (37, 41, 19), (1, 1, 1)]):
        a, b = draw(rng, kind, m, k), draw(rng, kind, k, n)
        rows = np.ascontiguousarray(a.T if ta else a)
        padded = np.full((rows.shape[0], rows.shape[1] + 3), 77, a.dtype)
        padded[:, :-3] = rows
        result = np.full((m * n + 8,), 5, {"float": np.float32, "half": np.float16, "int": np.int32}[out])
        size = np.array([m, n, k, 0], np.int32)
        device.compile(whole(kind, out, bool(ta), bool(tb))).kernel("k")(
            padded, np.ascontiguousarray(b.T if tb else b), result, size, grid=(-(-n // 16), -(-m // 32)), threadgroup=64
        )
        expected = a.astype(np.int64) @ b.astype(np.int64)
        np.testing.assert_array_equal(result[: m * n].reshape(m, n), expected)
        assert (result[m * n :] == 5).all()


@pytest.mark.usefixtures("each_compiler")
@pytest.mark.parametrize(("n", "k"), [(16, 64), (16, 33), (7, 90), (1, 3)])
def test_steps_of_k_are_added(n: int, k: int, device: metalmm.Device) -> None:
    rng = np.random.default_rng(k)
    a, b, c = draw(rng, "half", 16, k), draw(rng, "half", k, n), draw(rng, "float", 16, n)
    expected = c + a.astype(np.float32) @ b.astype(np.float32)
    device.compile(HEAD + STEPS).kernel("k")(a, b, c, np.array([16, n, k, 0], np.int32), grid=1, threadgroup=32)
    np.testing.assert_array_equal(c, expected)


@pytest.mark.usefixtures("each_compiler")
def test_a_fixed_k_is_taken_whole(device: metalmm.Device) -> None:
    """Past the end of an operand nothing is read; and it may be long."""
    for length, k in ((40000, 40000), (65536, 65536), (16, 32)):
        a, b, c = np.ones((16, length), np.float32), np.ones((length, 16), np.float32), np.zeros((16, 16), np.float32)
        text = whole("float", "float", False, False, WHOLE.replace("32, 16, dynamic_length_v<int>", f"16, 16, {k}").replace("* 32", "* 16"))
        text = text.replace("execution_simdgroups<2>", "execution_simdgroup").replace("(TA ? m : k) + 3", "k")
        device.compile(text).kernel("k")(a, b, c, np.array([16, 16, length, 0], np.int32), grid=1, threadgroup=32)
        np.testing.assert_array_equal(c, np.full((16, 16), k if k <= length else np.nan, np.float32))


@pytest.mark.skipif(DEVICE != "cpu", reason="gemm_tensor is none of device cuda's; the fake Metal's is an M3")
def test_rows_far_apart_are_multiplied_without_tensors(device: metalmm.Device) -> None:
    rng = np.random.default_rng(5)
    a, b = rng.standard_normal((35, 65600)).astype(np.float16), rng.standard_normal((40, 33)).astype(np.float16)
    for left, right, layout in (
        (a[:, :40], b, {}),
        (a[:33, :40], b[:33], {"transpose_a": True}),
        (np.ascontiguousarray(b.T), a[:35, :40], {"transpose_b": True}),
    ):
        out = metalmm.matmul("gemm_tensor/bm32_bn64_tg128", left, right, device=device, **layout)
        assert (abs(out - metalmm.reference(left, right, **layout)) <= metalmm.error_bound(left, right, **layout)).all()


@pytest.mark.parametrize(
    ("was", "becomes", "message"),
    [
        ("32, 16, dynamic", "24, 24, dynamic", "At least one of M or N must be a multiple of 16"),
        ("dynamic_length_v<int>", "8", "K must be dynamic or a multiple of 16"),
        ("sums.store(of_c)", "sums.store(of_a)", "datatype does not match cooperative tensor"),
        ("op.run(of_a, of_b", "op.run(of_b, of_a", "no matching|cannot convert|no instance"),
    ],
)
def test_what_apples_header_refuses_is_refused(was: str, becomes: str, message: str, device: metalmm.Device) -> None:
    assert was in WHOLE
    text = whole("half", "float", False, True, WHOLE.replace(was, becomes))
    if "run" in was:
        text = text.replace("device TYPE* B", "device float* B").replace("tensor<device TYPE", "tensor<device float")
    with pytest.raises(metalmm.CompileError, match=message):
        device.compile(text).kernel("k")


def test_nvrtc_takes_them() -> None:
    for text in (whole("half", "float", False, True), HEAD + STEPS):
        by_nvrtc(text)
