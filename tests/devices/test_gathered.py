"""Products by the experts that ids name: each row against the product by its own matrix."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import metalmm
import numpy as np
import pytest
from metalmm import numerics
from metalmm.quantized import FORMATS
from support.here import BY_TURNS, DEVICE
from support.operands import DTYPES

EXPERTS, N, K = 5, 37, 288


def experts_of(form: str, dtype: Any, k: int = K, seed: int = 0) -> Any:
    w = np.random.default_rng(seed).standard_normal((EXPERTS * N, k)).astype(dtype)
    return w.reshape(EXPERTS, N, k) if form == "dense" else replace(metalmm.quantize(w, form), experts=EXPERTS)


def check(out: Any, x: Any, experts: Any, ids: Any) -> None:
    for t, j in np.ndindex(ids.shape):
        a, e = (x[t] if x.ndim == 2 else x[t, j])[None], int(ids[t, j])
        b = experts[e] if isinstance(experts, np.ndarray) else experts[e * N : (e + 1) * N]
        reference, bound, _ = numerics.judged(a, b, transpose_b=True)
        assert not (wrong := numerics.mismatch(np.asarray(out)[t, j][None], reference, bound)), (t, j, wrong)


@pytest.fixture(scope="module")
def device() -> metalmm.Device:
    return metalmm.Device(DEVICE)


# A fake runs the CPU's kernels: there one format of each arrangement of buffers will do.
FORMS = ["dense", "q8_0", "affine4", "q2_k"] if BY_TURNS else ["dense", *FORMATS]
TYPES = ("float16", "float32")
CASES = [(x, TYPES[i % 2]) for i, x in enumerate(FORMS)] if BY_TURNS else [*itertools.product(FORMS, TYPES)]


@pytest.mark.rest(but=4)
@pytest.mark.parametrize(("form", "dtype"), CASES)
def test_each_row_is_by_its_own_matrix(form: str, dtype: str, device: metalmm.Device) -> None:
    """Rows that share a token and rows that do not; k that begins groups off vectors; one expert many times, others never."""
    rng = np.random.default_rng(1)
    for k, tokens, chosen in ((K, 3, 2), (40, 9, 1)):
        experts = experts_of(form, DTYPES[dtype], k)
        ids = rng.integers(0, EXPERTS, (tokens, chosen)).astype(np.int32)
        ids[0] = EXPERTS - 1
        for shape in ((tokens, k), (tokens, chosen, k)):
            x = rng.standard_normal(shape).astype(DTYPES[dtype])
            check(metalmm.matmul_gathered(x, experts, ids, device=device), x, experts, ids)


@pytest.mark.rest
def test_bfloat16_in_a_batch_of_arrays_and_ids_that_name_nobody(device: metalmm.Device) -> None:
    rng, dtype = np.random.default_rng(2), DTYPES["bfloat16"]
    for form in ("dense", "affine4", "q4_k"):
        experts = experts_of(form, dtype)
        x, ids = rng.standard_normal((4, K)).astype(dtype), np.array([[0, 4], [5, 1], [-1, 2], [3, 3]], np.int32)
        held = experts.to(device) if form != "dense" else device.array(experts)
        on_device, of_ids = device.array(x), device.array(ids)
        out = device.empty((4, 2, N), dtype)
        with device.batch() as batch:
            assert metalmm.matmul_gathered(on_device, held, of_ids, out=out, batch=batch) is out
        got, known = np.asarray(out), (ids >= 0) & (ids < EXPERTS)
        assert np.isnan(got[~known].astype(np.float32)).all()
        for t in range(4):
            for j in np.flatnonzero(known[t]):
                check(got[t : t + 1, j : j + 1], x[t : t + 1], experts, ids[t : t + 1, j : j + 1])


def test_ids_that_the_call_before_made(device: metalmm.Device) -> None:
    """A kernel that reads weights before anything else must not read these so."""
    library = device.compile(
        "kernel void route(device int* ids [[buffer(0)]], uint i [[thread_position_in_grid]]) { ids[i] = int(i) % 5; }"
    )
    experts, x = experts_of("q8_0", np.float16), np.random.default_rng(3).standard_normal((6, K)).astype(np.float16)
    held, on_device, ids = experts.to(device), device.array(x), device.array(np.full((6, 1), 99, np.int32))
    out = device.empty((6, 1, N), np.float16)
    with device.batch() as batch:
        library.kernel("route")(ids, threads=6, threadgroup=6, batch=batch)
        metalmm.matmul_gathered(on_device, held, ids, out=out, batch=batch)
    check(out, x, experts, (np.arange(6, dtype=np.int32) % 5)[:, None])


X, IDS = np.ones((2, K), np.float16), np.zeros((2, 2), np.int32)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"x": X.tolist()}, metalmm.DTypeError, "x is list"),
        ({"x": X.astype(np.float64)}, metalmm.DTypeError, "x is float64; it takes float16, bfloat16, float32"),
        ({"x": X[0]}, metalmm.ShapeError, r"x has shape \(288,\); it takes 2 or 3 dimensions"),
        ({"x": X[:, ::2]}, metalmm.LayoutError, "x: not C-contiguous"),
        ({"x": X[:1]}, metalmm.ShapeError, r"x \(1, 288\) and ids \(2, 2\) for experts of 37 x 288"),
        ({"ids": IDS.astype(np.int64)}, metalmm.DTypeError, "ids is int64; it takes int32"),
        ({"ids": IDS + 5}, metalmm.ArgumentError, "ids are 5 to 5; there are 5 experts"),
        ({"ids": IDS - 1}, metalmm.ArgumentError, "ids are -1 to -1"),
        ({"out": np.empty((2, 2, 36), np.float16)}, metalmm.ShapeError, r"out has shape \(2, 2, 36\); it takes \(2, 2, 37\)"),
        ({"out": np.empty((2, 2, 37), np.float32)}, metalmm.DTypeError, "out is float32; it takes float16"),
        ({"device": 3}, metalmm.ArgumentError, "device is 3"),
        ({"experts": experts_of("q8_0", np.float16).to_layout("canonical")}, metalmm.UnsupportedError, "it takes nk"),
        ({"experts": experts_of("affine4", np.float32)}, metalmm.DTypeError, "scales of affine4 are float32; x is float16"),
        ({"experts": experts_of("dense", np.float32)}, metalmm.DTypeError, "experts is float32; it takes float16"),
        ({"experts": X}, metalmm.ShapeError, "experts has shape"),
    ],
)
def test_bad_input(change: dict[str, Any], error: type[Exception], message: str, device: metalmm.Device) -> None:
    given: dict[str, Any] = {"x": X, "experts": experts_of("q8_0", np.float16), "ids": IDS, "device": device, **change}
    x, experts, ids = (given.pop(name) for name in ("x", "experts", "ids"))
    with pytest.raises(error, match=message):
        metalmm.matmul_gathered(x, experts, ids, **given)


def test_nothing_that_is_read_is_overwritten_or_misplaced(device: metalmm.Device) -> None:
    room, experts = np.zeros(4096, np.float16), experts_of("q2_k", np.float16)
    x = room[: 2 * K].reshape(2, K)
    with pytest.raises(metalmm.LayoutError, match="out overlaps x"):
        metalmm.matmul_gathered(x, experts, IDS, out=room[: 4 * N].reshape(2, 2, N), device=device)
    dense = device.array(experts_of("dense", np.float16))
    with pytest.raises(metalmm.LayoutError, match="out overlaps experts"):
        metalmm.matmul_gathered(
            device.array(X), dense, device.array(IDS), out=dense.reshape((EXPERTS * N * K,))[: 4 * N].reshape((2, 2, N))
        )
    with pytest.raises(metalmm.LayoutError, match="x: not C-contiguous"):
        metalmm.matmul_gathered(device.array(np.ones((2, 2 * K), np.float16))[:, :K], experts.to(device), device.array(IDS))
    with pytest.raises(metalmm.LayoutError, match="out is read-only"):
        out = np.empty((2, 2, N), np.float16)
        out.flags.writeable = False
        metalmm.matmul_gathered(X, experts, IDS, out=out, device=device)
    off = np.frombuffer(bytearray(experts.scales.nbytes + 2), np.int8)[2:].reshape(experts.scales.shape)
    with pytest.raises(metalmm.LayoutError, match="experts' scales: not aligned to 4 bytes"):
        metalmm.matmul_gathered(X, replace(experts, scales=off), IDS, device=device)
    object.__setattr__(experts, "values", experts.values[:10])
    with pytest.raises(metalmm.ShapeError, match="values: shape"):
        metalmm.matmul_gathered(X, experts, IDS, device=device)
    with device.batch() as batch, pytest.raises(metalmm.DTypeError, match="a batch takes Arrays alone"):
        metalmm.matmul_gathered(X, experts_of("q8_0", np.float16), IDS, device=device, batch=batch)
    with metalmm.Device("cpu") as other, pytest.raises(metalmm.ArgumentError, match="x is on"):
        metalmm.matmul_gathered(device.array(X), dense, device.array(IDS), device=other)


def test_experts_must_divide_the_rows() -> None:
    q = metalmm.quantize(np.ones((6, 64), np.float16), "q8_0")
    for experts in (4, 0, -1, 2.0, True):
        with pytest.raises(metalmm.ArgumentError, match="a whole number that divides 6 rows"):
            replace(q, experts=experts)
    assert replace(q, experts=np.int64(3)).to_layout("canonical").experts == 3 and "experts=3" in repr(replace(q, experts=3))
    assert replace(q, experts=3)[2:4].experts == 1
