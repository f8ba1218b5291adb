"""The GEMM as device cuda runs it, kernels/cuda/products.h, on the CPU device's stand-in for tensor cores."""

from __future__ import annotations

from collections.abc import Mapping

import metalmm
import numpy as np
import pytest
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
def on_cpu() -> Mapping[str, metalmm.Variant]:
    return changed_kernels("cpu_")


def operand(rng: np.random.Generator, dtype: str, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(DTYPES[dtype])


@pytest.mark.parametrize(
    ("point", "dtype", "layout"),
    [
        *(("bm32_bn32_bk128_wm1", "float16", x) for x in ("nn", "nt", "tn", "tt")),
        ("bm64_bn32_bk64_wn1", "bfloat16", "nt"),
        ("bm32_bn32_bk32", "bfloat16", "nn"),
    ],
)
def test_dense_weights(device: metalmm.Device, on_cpu: Mapping[str, metalmm.Variant], point: str, dtype: str, layout: str) -> None:
    rng, (ta, tb) = np.random.default_rng(1), (x == "t" for x in layout)
    for m, n, k in SHAPES:
        a, b = operand(rng, dtype, *((k, m) if ta else (m, k))), operand(rng, dtype, *((n, k) if tb else (k, n)))
        options = {"transpose_a": ta, "transpose_b": tb, "bias": operand(rng, dtype, n)}
        found = metalmm.matmul(on_cpu[f"gemm/{point}"], a, b, device=device, **options).astype(np.float64)
        assert (abs(found - metalmm.reference(a, b, **options)) <= metalmm.error_bound(a, b, **options)).all(), (m, n, k)


@pytest.mark.parametrize("storage", ["q8_0", "q4_0", "affine8", "affine4"])
@pytest.mark.parametrize(
    ("layout", "dtype", "point"), [("nk", "float16", "bm32_bn32_bk128_wm1"), ("canonical", "bfloat16", "bm64_bn32_bk64_wn1")]
)
def test_quantized_weights(
    device: metalmm.Device, on_cpu: Mapping[str, metalmm.Variant], storage: str, layout: str, dtype: str, point: str
) -> None:
    """Groups of one step and of more; K that ends in a group, and in a tile; a last scale that is infinite."""
    rng = np.random.default_rng(2)
    for (m, n, k), group in zip(((32, 64, 512), (33, 40, 160), (50, 71, 263), (17, 33, 96)), (64, 32, 32, 64), strict=True):
        a, w = operand(rng, dtype, m, k), operand(rng, dtype, n, k)
        q = metalmm.quantize(w, storage, group=group if storage.startswith("affine") else None, layout=layout)
        found = metalmm.matmul(on_cpu[f"gemm/{point}"], a, q, device=device).astype(np.float64)
        assert (abs(found - metalmm.reference(a, q)) <= metalmm.error_bound(a, q)).all(), (m, n, k)
        a, q = abs(a), metalmm.quantize(np.ones_like(w), storage, layout=layout)
        (q.scales if q.layout == "nk" else q.scales.T)[3, -1] = np.inf  # times what is beyond K it would be a NaN
        found = metalmm.matmul(on_cpu[f"gemm/{point}"], a, q, device=device).astype(np.float64)
        np.testing.assert_array_equal(np.isnan(found), np.isnan(metalmm.reference(a, q)), str((m, n, k)))


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
    found = metalmm.matmul(on_cpu["gemm/bm32_bn32_bk128_wm1"], a, b, device=device, **options).astype(np.float64)
    assert (abs(found - metalmm.reference(a, b, **options)) <= metalmm.error_bound(a, b, **options)).all()
