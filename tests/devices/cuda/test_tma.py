"""Tiles that the GPU's own copies bring, kernels/cuda/tma.h: what a copy's map says of A and B is made with a launch (csrc/cuda/tile_maps.cpp).
Canonical blocks are brought by the threads that multiply."""

from __future__ import annotations

from typing import Any

import metalmm
import numpy as np
import pytest
from support.cuda import FAKE, needs_fake
from support.here import DEVICE
from support.operands import DTYPES

pytestmark = pytest.mark.skipif(DEVICE != "cuda", reason="of device cuda")


@pytest.fixture(scope="module")
def gpu(device: metalmm.Device) -> metalmm.Device:
    if "wgmma" in device.lacking:
        pytest.skip("such copies are of compute capability 9.0")
    return device


def operand(seed: int, *shape: int, dtype: str = "float16") -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(DTYPES[dtype])


def computes(gpu: metalmm.Device, point: str, a: Any, b: Any, **options: Any) -> None:
    found = np.asarray(metalmm.matmul(f"gemm_wgmma/{point}", a, b, device=gpu, **options)).astype(np.float64)
    a, b = (np.asarray(x) if isinstance(x, metalmm.Array) else x for x in (a, b))
    assert (abs(found - metalmm.reference(a, b, **options)) <= metalmm.error_bound(a, b, **options)).all()


@pytest.mark.rest(but=1)
@pytest.mark.parametrize(
    ("storage", "point"),
    [
        *(("dense", x) for x in ("bm64_bn64_s3", "bm128_bn128", "bm64_bn64_k2")),
        *(("q8_0", "bm128_bn128"), ("q8_0:canonical", "bm64_bn64_s3"), ("q4_0", "bm128_bn64_s4"), ("affine4", "bm64_bn64_s3")),
        ("q5_k", "bm64_bn64_k2"),
    ],
)
def test_more_steps_than_stages_and_edges(gpu: metalmm.Device, storage: str, point: str) -> None:
    """Tiles that rows, columns and K end in; of bfloat, too."""
    form, _, layout = storage.partition(":")
    for i, (m, n, k) in enumerate(((128, 128, 1024), (65, 72, 1088), (17, 200, 544), (130, 33, 256))):
        dtype = "bfloat16" if i % 2 else "float16"
        a, w = operand(1, m, k, dtype=dtype), operand(2, n, k, dtype=dtype)
        if form == "dense":
            computes(gpu, point, gpu.array(a), gpu.array(w), transpose_b=True)
        else:
            computes(gpu, point, a, metalmm.quantize(w, form, layout=layout or "nk"))


@pytest.mark.parametrize(("storage", "point", "tile"), [("dense", "bm64_bn64_s3", 64), ("q4_0", "bm128_bn128", 128)])
def test_rows_that_end_anywhere_in_a_tile(gpu: metalmm.Device, storage: str, point: str, tile: int) -> None:
    """Where many of a tile's rows are past the last, A comes by copies of few rows."""
    w = operand(15, 64, 256)
    b = w if storage == "dense" else metalmm.quantize(w, storage)
    for m in (1, 16, tile - 33, tile - 32, tile - 31, tile, tile + 1, tile + 32, 2 * tile - 32):
        computes(gpu, point, operand(m, m, 256), b, **({"transpose_b": True} if storage == "dense" else {}))


@pytest.mark.parametrize("shared", [False, True])
def test_a_batch_has_its_own_b_or_one(gpu: metalmm.Device, shared: bool) -> None:
    a, b = operand(3, 3, 70, 256), operand(4, *(() if shared else (3,)), 80, 256)
    computes(gpu, "bm64_bn64_s4", a, b, transpose_b=True)


def test_what_lies_between_rows_is_not_read(gpu: metalmm.Device) -> None:
    """Views whose rows and matrices are apart: a NaN times anything would be seen, where K ends in a step."""
    a, b = np.full((2, 70, 272), np.nan, np.float16), np.full((80, 288), np.nan, np.float16)
    a[:, :65, :200], b[:72, :200] = operand(5, 2, 65, 200), operand(6, 72, 200)
    computes(gpu, "bm64_bn64_s4", a[:, :65, :200], b[:72, :200], transpose_b=True)


@pytest.mark.parametrize("case", ["the first element of A", "the rows of A", "the first element of B"])
def test_rows_that_no_copy_could_begin_at(gpu: metalmm.Device, case: str) -> None:
    """Off 16 bytes: each element is loaded for itself."""
    a, b = operand(7, 66, 136), operand(8, 64, 136)
    views = {"the first element of A": (a[:, 1:129], b[:, :128]), "the first element of B": (a[:, :128], b[:, 3:131])}
    a, b = views.get(case, (operand(9, 66, 132)[:, :128], b[:, :128]))
    computes(gpu, "bm64_bn64_s4", a, b, transpose_b=True)


def test_a_recording_keeps_its_maps(gpu: metalmm.Device) -> None:
    """Replayed, with other numbers in the same arrays."""
    a, b, out = gpu.array(operand(9, 64, 256)), gpu.array(operand(10, 64, 256)), gpu.empty((64, 64), "float16")
    batch = gpu.batch()
    batch.add(gpu.prepare("gemm_wgmma/bm64_bn64_s4", a, b, transpose_b=True, out=out))
    recording = batch.record()
    for seed in (11, 12):
        x = operand(seed, 64, 256)
        a.write(x)
        recording.replay()
        recording.wait()
        y = b.numpy()
        bound = metalmm.error_bound(x, y, transpose_b=True)
        assert (abs(out.numpy().astype(np.float64) - metalmm.reference(x, y, transpose_b=True)) <= bound).all()


def test_a_kernel_of_the_users_keeps_what_is_bound_there(device: metalmm.Device) -> None:
    """As large as the maps, at their index, and last."""
    source = """#include <metal_stdlib>
struct alignas(64) Large { ulong x[40]; };
kernel void k(device ulong* y [[buffer(0)]], constant Large& large [[buffer(8)]], uint i [[thread_position_in_grid]]) {
  y[i] = large.x[i];
}"""
    numbers, y = np.arange(40, dtype=np.uint64) + 7, device.array(np.zeros(40, np.uint64))
    kernel = device.compile(source).kernel("k")
    kernel(y, numbers.tobytes(), grid=1, threadgroup=40)
    np.testing.assert_array_equal(y.numpy(), numbers)


@needs_fake
def test_a_driver_that_refuses_a_map(gpu: metalmm.Device) -> None:
    FAKE.inject("encode_tiles", 1, 801)
    computes(gpu, "bm64_bn64_s4", operand(13, 64, 128), operand(14, 64, 128), transpose_b=True)
    assert FAKE.clear_faults() == 0, "no map was asked for"
