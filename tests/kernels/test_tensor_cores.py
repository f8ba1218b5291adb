"""The GEMM as device cuda runs it, kernels/cuda/products.h, on the CPU device's stand-in for tensor cores. Rows of the
array have `gemm_wgmma` with each format; here are tiles that they may lack."""

from __future__ import annotations

from collections.abc import Mapping

import metalmm
import numpy as np
import pytest
from metalmm import kernel_source
from support.changed import changed_kernels
from support.here import DEVICE
from support.operands import DTYPES

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="a GPU has them, and the whole array runs there")

# Whole tiles and more steps than stages; edges of each size and K; rows of nothing on vectors; less K than a tile.
SHAPES = ((32, 64, 512), (33, 40, 136), (50, 71, 263), (17, 33, 31))


@pytest.fixture(scope="module")
def device() -> metalmm.Device:
    return metalmm.Device("cpu", threadgroup_memory_limit=48 * 1024)


@pytest.fixture(scope="module")
def large() -> metalmm.Device:
    """With what the host may give a kernel beyond what it may declare."""
    return metalmm.Device("cpu", threadgroup_memory_limit=227 << 10)


@pytest.fixture(scope="module")
def on_cpu() -> Mapping[str, metalmm.Variant]:
    return changed_kernels("cpu_")


def operand(rng: np.random.Generator, dtype: str, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(DTYPES[dtype])


@pytest.mark.rest(but=1)
@pytest.mark.parametrize(
    ("point", "dtype", "layout"),
    [
        *(("bm32_bn32_bk128_wm1_wn1_wk4", "float16", x) for x in ("nn", "nt", "tn", "tt")),
        *(("bm32_bn32_bk128_wm1_wn1_wk4", "bfloat16", x) for x in ("nt", "nn")),  # four simdgroups add to the same results
        ("bm32_bn32_bk32", "bfloat16", "nn"),
    ],
)
def test_dense_weights(device: metalmm.Device, on_cpu: Mapping[str, metalmm.Variant], point: str, dtype: str, layout: str) -> None:
    rng, (ta, tb) = np.random.default_rng(1), (x == "t" for x in layout)
    for m, n, k in SHAPES:
        a, b = operand(rng, dtype, *((k, m) if ta else (m, k))), operand(rng, dtype, *((n, k) if tb else (k, n)))
        options = {"transpose_a": ta, "transpose_b": tb, "bias": operand(rng, dtype, n)}
        if m % 2:
            options |= {"alpha": 0.5, "beta": -2.0, "c": operand(rng, dtype, m, n)}
        found = metalmm.matmul(on_cpu[f"gemm/{point}"], a, b, device=device, **options).astype(np.float64)
        assert (abs(found - metalmm.reference(a, b, **options)) <= metalmm.error_bound(a, b, **options)).all(), (m, n, k)


@pytest.mark.rest(but=1)
@pytest.mark.parametrize("storage", ["q8_0", "q4_0", "affine8", "affine4"])
@pytest.mark.parametrize(
    ("layout", "dtype", "variant"),
    [("nk", "float16", "gemm/bm128_bn64_bk64"), ("canonical", "bfloat16", "gemm/bm32_bn32_bk128_wm1_wn1_wk4")],
)
def test_quantized_weights(
    large: metalmm.Device, on_cpu: Mapping[str, metalmm.Variant], storage: str, layout: str, dtype: str, variant: str
) -> None:
    """Groups of one step and of more; K that ends in a group, and in a tile; a last scale that is infinite."""
    rng = np.random.default_rng(2)
    sizes = ((32, 64, 512), (33, 40, 160), (50, 71, 263), (17, 33, 96), (33, 40, 352), (33, 40, 289), (17, 33, 384))
    for (m, n, k), group in zip(sizes, (64, 32, 32, 64, 64, 64, 128), strict=True):
        a, w = operand(rng, dtype, m, k), operand(rng, dtype, n, k)
        q = metalmm.quantize(w, storage, group=group if storage.startswith("affine") else None, layout=layout)
        if storage.startswith("affine"):  # quantize() has whole multiples of the scale, of which little is left to add
            q.biases[...] = rng.standard_normal(q.biases.shape)
        found = metalmm.matmul(on_cpu[variant], a, q, device=large).astype(np.float64)
        assert (abs(found - metalmm.reference(a, q)) <= metalmm.error_bound(a, q)).all(), (m, n, k)
        a, q = abs(a), metalmm.quantize(np.ones_like(w), storage, layout=layout)
        (q.scales if q.layout == "nk" else q.scales.T)[3, -1] = np.inf  # times what is beyond K it would be a NaN
        found = metalmm.matmul(on_cpu[variant], a, q, device=large).astype(np.float64)
        np.testing.assert_array_equal(np.isnan(found), np.isnan(metalmm.reference(a, q)), str((m, n, k)))


_SIMDGROUPS = ("gemm/bm128_bn64_bk64", "gemm/bm16_bn32_bk128_wm1_wn1_wk4")


@pytest.mark.rest(but=1)
@pytest.mark.parametrize(
    ("storage", "points", "dtype"),
    [
        *((x, _SIMDGROUPS, "float16") for x in ("q5_k", "q6_k", "q8_k:canonical", "q2_k", "nvfp4", "fp8:canonical")),
        ("q6_k", ("gemm_wgmma/bm64_bn64_s4",), "float16"),  # each sum is waited for
        ("q8_k:canonical", ("gemm_wgmma/bm128_bn128",), "float16"),  # two scales in a large tile
        ("q2_k", ("gemm_wgmma/bm128_bn128",), "bfloat16"),  # with sums of A's rows, by those that multiply
        ("q2_k:canonical", ("gemm_wgmma/bm64_bn64_s4",), "bfloat16"),  # and by others
    ],
)
def test_formats_with_upper_bits_and_with_two_scales(
    large: metalmm.Device, on_cpu: Mapping[str, metalmm.Variant], storage: str, points: tuple[str, ...], dtype: str
) -> None:
    """K that ends in either half of a block, in a block, and in a tile. The scale of a half behind K may be anything, and a factor infinite."""
    rng, (form, _, layout) = np.random.default_rng(2), storage.partition(":")
    for i, (m, n, k) in enumerate(((32, 64, 512), (33, 40, 160), (50, 71, 263), (17, 33, 113), (17, 33, 33), (33, 40, 304))):
        a, q = operand(rng, dtype, m, k), metalmm.quantize(operand(rng, dtype, n, k), form, layout=layout or "nk")
        if form == "nvfp4" and 0 < k % 32 <= 16:
            (q.scales[:, -1] if q.layout == "nk" else q.scales[-1])[..., 1] = 0x7FC0
        found = metalmm.matmul(on_cpu[points[i % len(points)]], a, q, device=large).astype(np.float64)
        assert (abs(found - metalmm.reference(a, q)) <= metalmm.error_bound(a, q)).all(), (m, n, k)
        if q.biases is None:
            continue
        a, q = abs(a), metalmm.quantize(np.ones((n, k), a.dtype), form, layout=layout or "nk")
        q.biases[(3, -1) if q.layout == "nk" else (-1, 3)] = np.inf  # of a block whose last half may lie behind K
        found = metalmm.matmul(on_cpu[points[i % len(points)]], a, q, device=large).astype(np.float64)
        np.testing.assert_array_equal(np.isnan(found), np.isnan(metalmm.reference(a, q)), str((m, n, k)))


@pytest.mark.rest(but=1)
@pytest.mark.parametrize(("storage", "k"), [("dense", 64), ("dense", 128), ("affine8", 128), ("affine8", 256)])
def test_what_tensor_cores_cut_off(device: metalmm.Device, on_cpu: Mapping[str, metalmm.Variant], storage: str, k: int) -> None:
    """One large product, and 63 that are each just below the last bit that is kept of it: no random draw has that."""
    a, c = np.zeros((32, k), np.float16), np.full((32, 32), -(2.0**11), np.float16)
    a[:, 0], a[:, 1:64] = 2.0**12, 0.999 * 2.0**-12
    q, options = np.full((32, k), 10, np.uint8), {"c": c, "beta": 1.0}
    q[:, 0], q[:, 1:64] = 11, 9
    b = metalmm.QuantizedArray(
        "affine8", "nk", (32, k), 64, q, np.ones((32, k // 64), np.float16), np.full((32, k // 64), -10.5, np.float16)
    )
    if storage == "dense":
        a[:, 1:64] *= 2
        a[:, 8:64:8] /= 2
        b, options = np.ones((32, k), np.float16), {"c": 2 * c, "beta": 1.0, "transpose_b": True}
    found = metalmm.matmul(on_cpu["gemm/bm128_bn64_bk64"], a, b, device=device, **options).astype(np.float64)
    assert (abs(found - metalmm.reference(a, b, **options)) <= metalmm.error_bound(a, b, **options)).all()


@pytest.mark.parametrize("k", [128, 256, 512, 1024, 4096])
def test_what_groups_of_simdgroups_cut_off(large: metalmm.Device, on_cpu: Mapping[str, metalmm.Variant], k: int) -> None:
    """The same of as many of k as are added to each other there: each product but the first is just below the last bit that is kept."""
    a, b = np.zeros((64, k), np.float16), np.ones((64, k), np.float16)
    a[:, :: min(k // 2, 512)] = 2.0**12
    a[a == 0] = 0.999 * 2.0**-12
    c, options = np.full((64, 64), -a.astype(np.float64)[0, :: min(k // 2, 512)].sum(), np.float16), {"beta": 1.0, "transpose_b": True}
    found = metalmm.matmul(on_cpu["gemm_wgmma/bm64_bn64_s8_k2"], a, b, c=c, device=large, **options).astype(np.float64)
    assert (abs(found - metalmm.reference(a, b, c=c, **options)) <= metalmm.error_bound(a, b, c=c, **options)).all()


@pytest.mark.rest
@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize(
    ("point", "dtype", "storage"),
    [
        ("small_m_mma/r4_t2_s2_d4_tg128", "float16", "q8_0"),  # sums of sixteen rows share threadgroup memory
        ("small_m_mma/r2_t8_s16_d2_tg512", "float16", "q8_0"),  # of eight: sixteen do not fit
        ("gemm_wgmma/bm64_bn64_s4", "bfloat16", "affine4"),  # those that bring tiles store sums of A's rows
    ],
)
def test_who_shares_threadgroup_memory(point: str, dtype: str, storage: str) -> None:
    """Threads take turns in any order. Races, and reads of what nobody wrote, are errors."""
    rng = np.random.default_rng(5)
    a, q = operand(rng, dtype, 43, 264), metalmm.quantize(operand(rng, dtype, 40, 264), storage)
    with metalmm.Device("cpu", debug=True, threadgroup_memory_limit=227 << 10) as device:
        found = metalmm.matmul(f"cpu_{point}", a, q, device=device).astype(np.float64)
    assert (abs(found - metalmm.reference(a, q)) <= metalmm.error_bound(a, q)).all()


def test_tiles_of_many_bands(device: metalmm.Device, on_cpu: Mapping[str, metalmm.Variant]) -> None:
    """More than sixteen rows of tiles, and a last band of fewer: each tile is multiplied once."""
    rng = np.random.default_rng(3)
    for m, n in ((33 * 16 + 5, 70), (16 * 16, 33), (17 * 16, 3)):
        a, b = operand(rng, "float16", m, 40), operand(rng, "float16", n, 40)
        found = metalmm.matmul(on_cpu["gemm/bm16_bn32_bk128_wm1_wn1_wk4"], a, b, transpose_b=True, device=device).astype(np.float64)
        assert (abs(found - metalmm.reference(a, b, transpose_b=True)) <= metalmm.error_bound(a, b, transpose_b=True)).all(), (m, n)


def test_results_that_stand_on_no_vector(large: metalmm.Device, on_cpu: Mapping[str, metalmm.Variant]) -> None:
    """Eight are stored at once where they do; a batch's second result may not, though its first does."""
    rng = np.random.default_rng(4)
    for m, n, offset in ((40, 136, 0), (40, 136, 1), (40, 136, 8), (33, 130, 0), (33, 129, 4)):
        a, b = operand(rng, "float16", 2, m, 128), operand(rng, "float16", n, 128)
        store = np.full(2 * m * n + 64, np.nan, np.float16)
        start = -(store.ctypes.data // 2) % 8 + offset
        out, options = store[start : start + 2 * m * n].reshape(2, m, n), {"transpose_b": True, "bias": operand(rng, "float16", n)}
        metalmm.matmul(on_cpu["gemm_wgmma/bm128_bn128"], a, b, out=out, device=large, **options)
        right = abs(out - metalmm.reference(a, b, **options)) <= metalmm.error_bound(a, b, **options)
        assert right.all() and np.isnan(store[:start]).all() and np.isnan(store[start + 2 * m * n :]).all(), (m, n, offset)


def test_the_order_of_tiles_is_one_to_one(device: metalmm.Device) -> None:
    """At sizes up to the largest: each tile has one threadgroup, and none is outside."""
    text = kernel_source.inline_includes(kernel_source.KERNELS / "gemm_simdgroup.metal") + (
        "\nkernel void order(device uint2* o [[buffer(0)]], constant MatmulParams& p [[buffer(1)]], constant uint4& first [[buffer(2)]],"
        " uint i [[thread_position_in_grid]]) { uint number = first.x + i;"
        " o[i] = tile_of<Blocks<32, 32, 32, 2, 2, 1>>(p, uint3(number % first.y, number / first.y, 0)); }\n"
    )
    kernel = device.compile(text).kernel("order")
    for m, n, first, count in ((700, 1200, 0, 836), (33 * 32, 70, 0, 99), (1, 2**32 - 1, 2**27 - 9, 9), (2**32 - 1, 1, 2**27 - 9, 9)):
        params = np.zeros(20, np.uint32)
        params[:2], columns, rows = (m, n), -(-n // 32), -(-m // 32)
        out = np.zeros((count, 2), np.uint32)
        kernel(out, params, np.array([first, columns, 0, 0], np.uint32), threads=count, threadgroup=64)
        assert (out[:, 0] < columns).all() and (out[:, 1] < rows).all()
        assert len({tuple(x) for x in out.tolist()}) == count
