"""matmul and matmul_fused with quantized weights, and matmul_fused with dense ones, against float64 of the dequantized weights."""

from __future__ import annotations

import functools
import gc
import pickle
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import metalmm
import ml_dtypes
import numpy as np
import pytest
from conftest import DEVICE, FAKE, carry_out, changed_kernels, count_case
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from metalmm import numerics, quantized
from metalmm.manifest import STORAGES
from test_edges import Pages

ALL = metalmm.variants(device=metalmm.default_device())
QUANTIZED = [v for v in ALL if v.storage != "dense" and v.weights == 1]
FUSED = [v for v in ALL if v.weights > 1]
# One of each kernel, storage and number of matrices: the other variants differ in how they share the work.
FIRST = list({(v.kernel, v.storage, v.weights, v.swiglu, v.supports.get("m") == 1): v for v in reversed(QUANTIZED + FUSED)}.values())
# The fake Metal runs the CPU device's code: what is its own, the host's, is one variant's of each kernel and storage.
ASKED_QUANTIZED, ASKED_FUSED = ([v for v in those if not FAKE or v in FIRST] for those in (QUANTIZED, FUSED))
DTYPES: dict[str, Any] = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32}
# (n, k): odd, off every block, lane and tile; a whole number of them; more than a window; tiny.
SHAPES = [(1, 1), (5, 31), (37, 95), (70, 160), (33, 896), (131, 321), (3, 4095), (9, 4864)]
EPILOGUES: dict[str, dict[str, Any]] = {
    "plain": {},
    "bias": {"bias": True},
    "alpha_beta": {"c": True, "alpha": 0.75, "beta": -1.5},
    "batch": {"batch": 3, "bias": True, "c": True, "alpha": 0.125, "beta": 0.5},
}


@functools.lru_cache(maxsize=256)
def weights(n: int, k: int, storage: str, dtype: str = "float16", group: int | None = None, seed: int = 0) -> Any:
    """A QuantizedArray of a variant's storage, or a dense array."""
    w = np.random.default_rng(seed + 7919 * n + k).standard_normal((n, k)).astype(DTYPES[dtype])
    form, _, layout = storage.partition(":")
    return w if form == "dense" else metalmm.quantize(w, form, group=group, layout=layout or "nk")


def rows_of(v: metalmm.Variant) -> list[int]:
    least, most = 1, 17
    if v.supports.get("m") == 1:
        most = 1
    elif isinstance(limits := v.supports.get("m"), dict):
        least, most = limits.get("min", 1), limits.get("max", 17)
    return [m for m in (1, 2, 3, 8, 17) if least <= m <= most]


def groups_of(v: metalmm.Variant) -> list[int | None]:
    return [32, 64, 128] if "affine" in v.storage else [None]


def draw(m: int, n: int, k: int, dtype: str = "float16", seed: int = 1, **epilogue: Any) -> tuple[Any, dict[str, Any]]:
    rng = np.random.default_rng(seed)
    lead = (epilogue["batch"],) if "batch" in epilogue else ()
    options: dict[str, Any] = {key: epilogue[key] for key in ("alpha", "beta") if key in epilogue}
    if epilogue.get("bias"):
        options["bias"] = rng.standard_normal(n).astype(DTYPES[dtype])
    if epilogue.get("c"):
        options["c"] = rng.standard_normal((*lead, m, n)).astype(DTYPES[dtype])
    return rng.standard_normal((*lead, m, k)).astype(DTYPES[dtype]), options


def check(v: str, a: Any, q: Any, options: dict[str, Any], device: metalmm.Device) -> None:
    with np.errstate(all="ignore"):
        reference, bound, _ = numerics.judged(a, q, **options)
    out = np.full(reference.shape, np.nan, a.dtype)
    assert metalmm.matmul(v, a, q, out=out, device=device, **options) is out
    assert not (wrong := numerics.mismatch(out, reference, bound)), f"{v} {a.shape} {q!r}: {wrong}"
    count_case()


@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize("v", ASKED_QUANTIZED)
def test_variant_is_within_the_bound(v: metalmm.Variant, epilogue: str, device: metalmm.Device) -> None:
    checked = 0
    for m in rows_of(v):
        for n, k in SHAPES if m in (1, 3) else SHAPES[1:6]:
            for group in groups_of(v):
                q = weights(n, k, v.storage, group=group)
                a, options = draw(m, n, k, **EPILOGUES[epilogue])
                check(v, a, q, options, device)
                checked += 1
    assert checked >= 8


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("v", [v for v in FIRST if v.weights == 1])
def test_other_types(v: metalmm.Variant, dtype: str, device: metalmm.Device) -> None:
    m = rows_of(v)[-1]
    for n, k in ((37, 95), (40, 320)):
        a, options = draw(m, n, k, dtype, bias=True, c=True, beta=0.5)
        q = weights(n, k, v.storage, dtype)
        if dtype in v.types:
            check(v, a, q, options, device)
        else:
            with pytest.raises(metalmm.UnsupportedError, match=f"{v}: it does not take {dtype}: .{{20,}}; supported by"):
                metalmm.matmul(v, a, q, device=device, **options)


def test_every_format_layout_and_number_of_rows_has_a_variant() -> None:
    for storage in STORAGES[1:]:
        for m in (1, 2, 3, 8, 17):
            spec = metalmm.MatmulSpec(m, 37, 95, b_storage=storage)
            assert [v for v in metalmm.variants(spec, enabled=True) if v.storage == storage], (storage, m)
    for storage in ("dense", "q8_0", "q8_0:canonical", "q4_0", "affine8", "affine4"):
        for also_n, swiglu in (((37,), False), ((5, 9), False), ((37,), True)):
            spec = metalmm.MatmulSpec(1, 37, 95, b_storage=storage, also_n=also_n, swiglu=swiglu)
            assert metalmm.variants(spec, enabled=True), (storage, also_n, swiglu)


@pytest.mark.parametrize("v", ASKED_QUANTIZED)
def test_the_extremes_of_a_format(v: metalmm.Variant, device: metalmm.Device) -> None:
    """Every value of a byte or half, scales that are zero, least, negative; A's zeros of both signs; infinities and NaN as in float64."""
    n, k = 6, 256
    q = weights(n, k, v.storage)
    values = np.arange(q.values.size, dtype=np.int64).astype(np.uint8).view(q.values.dtype).reshape(q.values.shape)
    scales = q.scales.copy()
    scales.flat[::5], scales.flat[1::5], scales.flat[2::5] = 0, -0.5, 6e-8
    q = replace(q, values=values, scales=scales)
    a, options = draw(rows_of(v)[0], n, k, bias=True)
    a[:, 3], a[:, 4] = 0.0, -0.0
    check(v, a, q, options, device)
    a[0, 200] = np.inf
    check(v, a, q, options, device)
    scales.flat[7] = np.nan
    check(v, a, replace(q, scales=scales), options, device)


@pytest.mark.parametrize("v", [v for v in ASKED_QUANTIZED if "affine" in v.storage])
def test_a_bias_of_any_size(v: metalmm.Variant, device: metalmm.Device) -> None:
    """Weights near zero between terms that are not, wherever -bias / scale lies: on an integer, between two, far outside of them."""
    rng = np.random.default_rng(5)
    for k in (1, 40, 256):
        q = weights(24, k, v.storage)
        shape = q.scales.shape
        scales = (rng.choice([1e-4, 0.01, -0.02, 1.0, 0.0], shape) * rng.uniform(0.5, 1, shape)).astype(np.float16)
        zeros = rng.choice([1, 0.5, 0.03], shape) * rng.integers(-20, 300, shape) * rng.choice([1, 1, 1, 100], shape)
        biases = np.clip(-zeros * scales, -2000, 2000).astype(np.float16)
        a, options = draw(rows_of(v)[0], 24, k)
        check(v, a, replace(q, scales=scales, biases=biases), options, device)
        # Weights that are zero, or what the bias's rounding leaves of them.
        same, scales = np.full_like(q.values, 0xDD), np.where(np.arange(scales.size).reshape(shape) % 2, 0.5, 0.37).astype(np.float16)
        zero = np.float16(0xDD if "8" in v.storage else 0xD)
        check(v, a, replace(q, values=same, scales=scales, biases=-zero * scales), options, device)


@pytest.mark.parametrize("v", [v for v in ASKED_QUANTIZED + ASKED_FUSED if "affine" in v.storage])
def test_a_bias_that_is_tiny_beside_its_scale(v: metalmm.Variant, device: metalmm.Device) -> None:
    """Integers that are zero leave the bias alone, of which nothing may be lost: in some groups of a column, in some columns."""
    rng = np.random.default_rng(6)

    def made(n: int, k: int) -> Any:
        q = weights(n, k, v.storage)
        scales, biases = rng.uniform(0.5, 2, q.scales.shape).astype(np.float16), q.biases.copy()
        tiny = rng.random(q.scales.shape) < 0.1
        biases[tiny] = (scales * rng.choice([0, 1 / 3, -1e-3, 1e-5], q.scales.shape))[tiny]
        return replace(q, values=np.where(rng.random(q.values.shape) < 0.9, 0, q.values), scales=scales, biases=biases)

    for n, k in ((9, 96), (600, 896), (70, 2000)):
        a, options = draw(rows_of(v)[0], n, k)
        if v.weights == 1:
            check(v, a, made(n, k), options, device)
        else:
            check_fused(v, a, [made(n if v.swiglu else n - i, k) for i in range(v.weights)], None, device)


@pytest.mark.parametrize("v", ASKED_QUANTIZED)
def test_infinities_stay_in_their_column(v: metalmm.Variant, device: metalmm.Device) -> None:
    """Of which a lane may have read a piece before one of another column, or in place of one that is not there: of 1024, behind 896."""
    m, n, k = rows_of(v)[0], 600, 1024
    q = weights(n, k, v.storage)
    scales, columns = q.scales.copy(), np.arange(n) % 37 == 36
    (scales if q.layout == "nk" else scales.T)[columns] = np.inf
    a, options = draw(m, n, k)
    reference, bound, _ = numerics.judged(a, q, **options)
    out = metalmm.matmul(v, a, replace(q, scales=scales), device=device, **options)
    rest = ~columns
    assert not (wrong := numerics.mismatch(out[:, rest], reference[:, rest], bound[:, rest])), f"{v}: {wrong}"
    assert not np.isfinite(out[:, columns]).any()
    count_case()


@pytest.mark.parametrize("v", [v for v in ASKED_QUANTIZED if "affine" in v.storage])
def test_terms_that_cancel(v: metalmm.Variant, device: metalmm.Device) -> None:
    """Weights of half a scale, between two integers: their terms are three times as large, and one element of A hides the others'. And
    scales and biases that are infinite, where one sum would be of both signs."""
    form, _, layout = v.storage.partition(":")
    m, n = rows_of(v)[0], 8
    for k in (4, 16, 32, 64, 96, 127, 128, 256):
        integers, groups = np.ones((n, k), np.int64), (n, -(-k // 32))
        integers[:, 0] = 3
        made = functools.partial(quantized._stored, form, layout or "nk", integers, 32)
        a = np.full((m, k), 1023 * 2.0**-24, np.float16)
        a[:, 0] = 1025
        q = made(np.full(groups, 1, np.float16), np.full(groups, -2.5, np.float16))
        check(v, a, q, {"c": np.full((m, n), -512.5, np.float16), "beta": 1.0}, device)
        for scale, bias in ((np.inf, 1), (np.inf, -1), (-np.inf, 0), (2, np.inf), (-1, -np.inf)):
            check(v, a, made(np.full(groups, scale, np.float16), np.full(groups, bias, np.float16)), {}, device)


@pytest.mark.parametrize("v", [v for v in ASKED_QUANTIZED if "affine" in v.storage])
def test_weights_beside_their_zero(v: metalmm.Variant, device: metalmm.Device) -> None:
    """At most a scale from zero between terms that are many, of each group another: one element of A, and C, leave nothing of the result
    but what small ones of A give."""
    rng = np.random.default_rng(8)
    form, _, layout = v.storage.partition(":")
    m, n, top = rows_of(v)[0], 24, 255 if "8" in form else 15
    for k in (128, 288, 896):
        groups = (n, k // 32)
        scales = rng.choice([0.37, 1, 0.011, -3.3], groups).astype(np.float16)
        biases = (-scales * (rng.integers(0, top, groups) + rng.choice([0, 0.25, 0.499, 0.5], groups))).astype(np.float16)
        zeros = np.repeat(-biases.astype(np.float64) / scales, 32, axis=1)
        integers = np.clip(np.floor(zeros) + rng.integers(0, 2, (n, k)), 0, top).astype(np.int64)
        q = quantized._stored(form, layout or "nk", integers, 32, scales, biases)
        a = np.full((m, k), 1023 * 2.0**-24, np.float16)
        a[:, 0] = 1025
        check(v, a, q, {"c": -metalmm.reference(a, q).astype(np.float16), "beta": 1.0}, device)


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_shape_alignment_and_group(data: st.DataObject, device: metalmm.Device) -> None:
    v = data.draw(st.sampled_from(QUANTIZED))
    m, n = data.draw(st.sampled_from(rows_of(v))), data.draw(st.integers(1, 90))
    k = data.draw(st.one_of(st.integers(1, 300), st.integers(1, 40).map(lambda x: 32 * x)))
    q = weights(n, k, v.storage, group=data.draw(st.sampled_from(groups_of(v))), seed=data.draw(st.integers(0, 3)))

    def moved(x: Any) -> Any:
        offset = data.draw(st.integers(0, 9)) * x.itemsize
        room = np.full(x.nbytes + offset, 0xFF, np.uint8)
        view = room[offset:].view(x.dtype).reshape(x.shape)
        view[...] = x
        return view

    q = replace(q, values=moved(q.values), scales=moved(q.scales), biases=None if q.biases is None else moved(q.biases))
    a, options = draw(m, n, k, bias=data.draw(st.booleans()), c=True, beta=data.draw(st.sampled_from([0.0, 1.0])))
    room = np.full((m, k + 16), np.nan, np.float16)
    start = data.draw(st.integers(0, 16))
    room[:, start : start + k] = a
    check(v, room[:, start : start + k], q, options, device)


@pytest.mark.parametrize("rows", [slice(1, 5), slice(4, 5)])
def test_wide_operands_with_rows_that_begin_off_four_bytes(rows: slice, device: metalmm.Device) -> None:
    """A scale of two bytes cannot stand where a bias of four is not."""
    q = metalmm.quantize(np.random.default_rng(4).standard_normal((5, 96)).astype(np.float32), "q8_0")[rows]
    for v in ("q8/nk_l4_c1_s1_d7_tg64", "q8/nk_gemm_bm32_bn32_bk32"):
        check(v, np.ones((1, 96), np.float32), q, {}, device)
    fused = next(v for v in metalmm.variants() if v == "q8/nk_fused3_l4_c1_s7_d1_tg448")
    check_fused(fused, np.ones((1, 96), np.float32), [q, q, q], None, device)


def test_weights_are_kept_on_the_device(device: metalmm.Device) -> None:
    q = weights(37, 96, "q8_0")
    on = q.to(device)
    assert isinstance(on.values, metalmm.Array) and on.storage == "q8_0" and on.nbytes == q.nbytes
    a, _ = draw(1, 37, 96)
    out = metalmm.matmul("q8/nk_l4_c1_s1_d7_tg64", device.array(a), on)
    assert isinstance(out, metalmm.Array)
    np.testing.assert_array_equal(np.asarray(out), metalmm.matmul("q8/nk_l4_c1_s1_d7_tg64", a, q, device=device))
    np.testing.assert_array_equal(on.dequantize(), q.dequantize())
    assert (on.numpy().values == q.values).all() and (on.to_layout("canonical").numpy().values == q.to_layout("canonical").values).all()
    np.testing.assert_array_equal(metalmm.reference(a, on), metalmm.reference(a, q))


def test_prepared_batched_and_recorded(device: metalmm.Device) -> None:
    q = weights(70, 160, "affine4", group=32).to(device)
    a, options = draw(1, 70, 160, bias=True)
    x, bias = device.array(a), device.array(options["bias"])
    expected = np.asarray(metalmm.matmul("auto", x, q, bias=bias))
    call = device.prepare("auto", x, q, bias=bias)
    assert call.spec == metalmm.MatmulSpec(1, 70, 160, bias=True, b_storage="affine4:32") and "affine4:32" in repr(call)
    del q
    gc.collect()
    np.testing.assert_array_equal(np.asarray(call()), expected)
    for recorded in (False, True):
        batch, out = device.batch(), device.empty((1, 70))
        batch.add(call)
        batch.matmul("auto", x, weights(70, 160, "affine4", group=32).to(device), bias=bias, out=out)
        carry_out(batch, recorded)
        np.testing.assert_array_equal(np.asarray(out), expected)


def test_auto_takes_every_storage(device: metalmm.Device) -> None:
    for storage in STORAGES[1:]:
        for m in (1, 4, 17):
            a, options = draw(m, 33, 129, bias=True)
            check("auto", a, weights(33, 129, storage), options, device)
    for storage in ("dense", "q8_0", "q4_0", "affine8", "affine4"):
        parts = [weights(n, 96, storage) for n in (20, 9)]
        a, _ = draw(1, 20, 96)
        for out, w in zip(metalmm.matmul_fused("auto", a, parts, device=device), parts, strict=True):
            reference, bound, _ = numerics.judged(a, w, transpose_b=True)
            assert not numerics.mismatch(out, reference, bound)


# -- fused --------------------------------------------------------------------------------------------------------------


def parts_of(v: metalmm.Variant, k: int, dtype: str = "float16", group: int | None = None, ns: tuple[int, ...] = (37, 5, 70)) -> list[Any]:
    ns = (ns[0], ns[0]) if v.swiglu else ns[: v.weights]
    return [weights(n, k, v.storage, dtype, group, seed=i) for i, n in enumerate(ns)]


def check_fused(v: metalmm.Variant, a: Any, parts: list[Any], bias: list[Any] | None, device: metalmm.Device, outs: Any = None) -> None:
    activation = "swiglu" if v.swiglu else None
    found = metalmm.matmul_fused(v, a, parts, bias=bias, activation=activation, device=device, out=outs)
    judged = [numerics.judged(a, w, bias=None if bias is None else bias[i], transpose_b=True)[:2] for i, w in enumerate(parts)]
    if v.swiglu:
        found, judged = [found], [numerics.judged_swiglu(a, parts, bias=bias)]
    assert len(found) == len(judged)
    for i, (out, (reference, bound)) in enumerate(zip(found, judged, strict=True)):
        assert not (wrong := numerics.mismatch(out, reference, bound)), f"{v}, result {i}: {wrong}"
        count_case()


def biases_of(parts: list[Any]) -> list[Any]:
    return [np.random.default_rng(i).standard_normal(w.shape[0]).astype(np.float16) for i, w in enumerate(parts)]


@pytest.mark.parametrize("v", ASKED_FUSED)
def test_fused_is_within_the_bound(v: metalmm.Variant, device: metalmm.Device) -> None:
    for k in (1, 95, 160, 896, 4864):
        for group in groups_of(v):
            for ns in ((37, 5, 70), (128, 64, 64), (1, 1, 200)):
                parts = parts_of(v, k, group=group, ns=ns)
                a, _ = draw(1, 1, k)
                check_fused(v, a, parts, None, device)
                check_fused(v, a, parts, biases_of(parts), device)
    a, _ = draw(1, 1, 160, batch=3)
    check_fused(v, a, parts_of(v, 160), None, device)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("v", [v for v in FIRST if v.weights == 2])
def test_fused_of_other_types(v: metalmm.Variant, dtype: str, device: metalmm.Device) -> None:
    a, _ = draw(1, 1, 160, dtype)
    check_fused(v, a, parts_of(v, 160, dtype), None, device)


def test_results_may_be_columns_of_one_array(device: metalmm.Device) -> None:
    a, _ = draw(1, 1, 96, batch=2)
    parts = [weights(n, 96, "q8_0", seed=n) for n in (20, 9, 7)]
    apart = metalmm.matmul_fused("q8/nk_fused3_l4_c1_s7_d1_tg448", a, parts, device=device)
    room = np.full((2, 1, 40), np.nan, np.float16)
    outs = [room[..., 2:22], room[..., 22:31], room[..., 33:40]]
    found = metalmm.matmul_fused("q8/nk_fused3_l4_c1_s7_d1_tg448", a, parts, out=outs, device=device)
    for one, other, view in zip(found, apart, outs, strict=True):
        assert one is view
        np.testing.assert_array_equal(one, other)
    assert np.isnan(room[..., [0, 1, 31, 32]]).all(), "nothing else was written"
    whole = device.empty((1, 40))
    views = [whole[:, :20], whole[:, 20:29], whole[:, 29:36]]
    x, on = device.array(a[0]), [w.to(device) for w in parts]
    for recorded in (False, True):
        batch = device.batch()
        assert batch.matmul_fused("auto", x, on, out=views)[1] is views[1]
        batch.add(device.prepare_fused("auto", x, on, out=views))
        carry_out(batch, recorded)
        np.testing.assert_array_equal(np.asarray(whole)[:, :36], np.concatenate([o[0] for o in apart], axis=1))


def test_prepared_fused(device: metalmm.Device) -> None:
    parts = [device.array(weights(24, 64, "dense", seed=i)) for i in range(2)]
    a, _ = draw(1, 24, 64)
    call = device.prepare_fused("auto", device.array(a), parts, activation="swiglu")
    assert call.spec == metalmm.MatmulSpec(1, 24, 64, also_n=(24,), swiglu=True) and "n=24+24" in repr(call) and "swiglu" in repr(call)
    del parts
    gc.collect()
    reference, bound = numerics.judged_swiglu(a, [weights(24, 64, "dense", seed=i) for i in range(2)])
    assert not numerics.mismatch(np.asarray(call()), reference, bound)


def test_results_are_nobody_elses_to_take(device: metalmm.Device) -> None:
    """An attack emptied the list of results that a prepared call wrote to."""
    a, w = device.array(draw(1, 8, 32)[0]), [device.array(weights(8, 32, "dense", seed=i)) for i in range(2)]
    call = device.prepare_fused("auto", a, w)
    assert isinstance(call.out, tuple) and isinstance(metalmm.matmul_fused("auto", a, w), tuple)


@pytest.mark.parametrize("storage", ["q8_0", "q4_0", "q8_0:canonical"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_sums_before_the_scale_do_not_overflow(storage: str, dtype: str, device: metalmm.Device) -> None:
    """x * 127 may be past the largest float where x * 127 * scale is not."""
    q = weights(8, 64, storage)
    q = replace(q, scales=np.full_like(q.scales, 0.001))
    a = np.zeros((1, 64), DTYPES[dtype])
    a[0, 0] = a[0, 33] = 1e37
    for v in metalmm.variants(metalmm.MatmulSpec(1, 8, 64, dtype=dtype, b_storage=storage), device=device):
        check(v, a, q, {}, device)


def test_a_manifest_gives_a_library_no_quantized_weights(tmp_path: Any) -> None:
    for what in ('storage = "q8_0"', "weights = 2"):
        (tmp_path / "m.toml").write_text(
            f'format = 2\n[families.lib]\nlibrary = "blas"\nthreads = 1\ntile = [1, 1]\nsupports = {{ layouts = ["nt"] }}\n{what}\n'
            "[families.lib.variants]\none = {}\n"
        )
        with pytest.raises(metalmm.ManifestError, match="a library multiplies one dense B"):
            metalmm.load_variants(tmp_path / "m.toml")


# -- what is refused ----------------------------------------------------------------------------------------------------


def bad(q: Any, **parts: Any) -> Any:
    """With parts that its class would not take."""
    copy = object.__new__(type(q))
    for name in ("format", "layout", "shape", "group", "values", "scales", "biases", "storage"):
        object.__setattr__(copy, name, parts.get(name, getattr(q, name)))
    return copy


def test_wrong_operands_are_refused(device: metalmm.Device) -> None:
    q, v = weights(37, 96, "q8_0"), "q8/nk_l4_c1_s1_d7_tg64"
    a, _ = draw(1, 37, 96)
    affine = weights(37, 96, "affine4")
    for error, text, call in [
        (metalmm.ShapeError, r"a \(1, 95\) and b q8_0 \(37, 96\) differ in k: 95 and 96", lambda: metalmm.matmul(v, a[:, :95].copy(), q)),
        (metalmm.UnsupportedError, "b is q8_0; it takes dense", lambda: metalmm.matmul("gemv/baseline", a, q)),
        (metalmm.UnsupportedError, "b is q8_0; it takes q8_0:canonical", lambda: metalmm.matmul("q8/canonical_wide_c4_tg32", a, q)),
        (metalmm.UnsupportedError, "b is dense; it takes q8_0", lambda: metalmm.matmul(v, a, q.dequantize(np.float16), transpose_b=True)),
        (metalmm.UnsupportedError, "m=2 is not 1", lambda: metalmm.matmul(v, np.ones((2, 96), np.float16), q)),
        (metalmm.ArgumentError, "transpose_b is False and b is quantized", lambda: metalmm.matmul(v, a, q, transpose_b=False)),
        (metalmm.DTypeError, "b's scales .* is float16; it takes float32, a's type: convert a, or quantize", lambda: metalmm.matmul("auto", a.astype(np.float32), affine)),
        (metalmm.ShapeError, r"b's scales \(37, 2\) does not fit; it takes \(37, 3\)", lambda: metalmm.matmul(v, a, bad(q, scales=q.scales[:, :2].copy()))),
        (metalmm.ShapeError, r"b's values \(36, 96\) does not fit; it takes \(37, 96\)", lambda: metalmm.matmul(v, a, bad(q, values=q.values[:36]))),
        (metalmm.DTypeError, "b's values .* is uint8; it takes int8", lambda: metalmm.matmul(v, a, bad(q, values=q.values.view(np.uint8)))),
        (metalmm.LayoutError, "b's scales .* is not C-contiguous", lambda: metalmm.matmul(v, a, bad(q, scales=np.asfortranarray(q.scales)))),
        (metalmm.ArgumentError, "without biases", lambda: metalmm.matmul("auto", a, bad(affine, biases=None))),
        (metalmm.ArgumentError, "with biases", lambda: metalmm.matmul(v, a, bad(q, biases=q.scales))),
        (metalmm.ArgumentError, "storage 'q5_1'", lambda: metalmm.matmul(v, a, bad(q, storage="q5_1"))),
        (metalmm.ShapeError, r"sizes are 1 to 2\^32 - 1", lambda: metalmm.matmul(v, a, bad(q, shape=(0, 96)))),
        (metalmm.ShapeError, "has dimensions|2 dimensions|does not fit", lambda: metalmm.matmul(v, a, bad(q, values=q.values.reshape(-1)))),
        (metalmm.LayoutError, "out .* overlaps b's scales", lambda: metalmm.matmul(v, a[:, :32].copy(), replace(weights(3, 32, "q8_0"), scales=(room := np.zeros((3, 1), np.float16))), out=room.reshape(1, 3))),
        (metalmm.ArgumentError, r"to\(\) takes a metalmm.Device, such as metalmm.Device\('cpu'\), and not 'cpu'", lambda: q.to("cpu")),  # type: ignore[arg-type]
        (metalmm.ArgumentError, "b_storage is q9", lambda: metalmm.MatmulSpec(1, 2, 3, b_storage="q9")),
        (metalmm.ArgumentError, "transpose_b is False", lambda: metalmm.MatmulSpec(1, 2, 3, transpose_b=False, b_storage="q8_0")),
    ]:  # fmt: skip
        with pytest.raises(error, match=text):
            call()
    check(v, a, q, {}, device)


def test_wrong_fused_calls_are_refused(device: metalmm.Device) -> None:
    w, q = [weights(8, 32, "dense", seed=i) for i in range(4)], [weights(8, 32, "q8_0", seed=i) for i in range(2)]
    a, _ = draw(1, 8, 32)
    fused = functools.partial(metalmm.matmul_fused, device=device)
    one, three = np.zeros(8, np.float16), weights(5, 32, "dense")
    same = np.zeros((1, 8), np.float16)
    for error, text, call in [
        (metalmm.ArgumentError, "weights has 1; it takes two or three", lambda: fused("auto", a, w[:1])),
        (metalmm.ArgumentError, "weights has 4; it takes two or three", lambda: fused("auto", a, w)),
        (metalmm.ArgumentError, "weights is array", lambda: fused("auto", a, w[0])),
        (metalmm.ArgumentError, "bias has 1; it takes 2", lambda: fused("auto", a, w[:2], bias=[one])),
        (metalmm.ShapeError, "biases are given for some", lambda: fused("auto", a, w[:2], bias=[one, None])),
        (metalmm.ArgumentError, "activation is 'gelu'", lambda: fused("auto", a, w[:2], activation="gelu")),
        (metalmm.ShapeError, "swiglu takes two B of one n", lambda: fused("auto", a, [w[0], three], activation="swiglu")),
        (metalmm.ShapeError, "swiglu takes two B", lambda: fused("auto", a, w[:3], activation="swiglu")),
        (metalmm.DTypeError, "the first B is dense and another q8_0", lambda: fused("auto", a, [w[0], q[0]])),
        (metalmm.ShapeError, "differ in k", lambda: fused("auto", a, [w[0], weights(8, 31, "dense")])),
        (metalmm.UnsupportedError, "there are 2 matrices B; it takes 3", lambda: fused("fused/nt_fused3_wide_c4_tg32", a, w[:2])),
        (metalmm.UnsupportedError, "there are 2 matrices B; it takes 1", lambda: fused("gemm_tiled/baseline", a, w[:2])),
        (metalmm.UnsupportedError, "it ends in swiglu", lambda: fused("fused/nt_swiglu_wide_c4_tg32", a, w[:2])),
        (metalmm.UnsupportedError, "there are 1 matrices B; it takes 2", lambda: metalmm.matmul("fused/nt_fused2_wide_c4_tg32", a, w[0], transpose_b=True)),
        (metalmm.LayoutError, "another result overlap", lambda: fused("auto", a, w[:2], out=[same, same])),
        (metalmm.LayoutError, "another result overlap", lambda: fused("auto", device.array(a), [device.array(x) for x in w[:2]], out=[(on := device.empty((1, 8))), on])),
        (metalmm.LayoutError, "matrices that overlap", lambda: fused("auto", np.ones((2, 1, 32), np.float16), w[:2], out=[np.lib.stride_tricks.as_strided(np.zeros(64, np.float16), (2, 1, 8), (8, 16, 2)), np.zeros((2, 1, 8), np.float16)])),
        (metalmm.ShapeError, "has a batch; those of a fused call", lambda: fused("auto", np.ones((2, 1, 32), np.float16), [np.stack([w[0], w[1]])] * 2)),
        (metalmm.ArgumentError, "transpose_b is False", lambda: metalmm.MatmulSpec(1, 2, 3, transpose_b=False, also_n=(2,))),
        (metalmm.ShapeError, "more than 2\\^32 - 1 elements", lambda: metalmm.MatmulSpec(1, 1, 65536, also_n=(2**32 - 1,))),
        (metalmm.LayoutError, "overlaps what another B", lambda: fused("auto", a, [w[0], (own := w[1].copy())], out=[own[:1, :8], same])),
        (metalmm.ShapeError, "does not fit; the result is", lambda: fused("auto", a, w[:2], out=[same, np.zeros((1, 7), np.float16)])),
        (metalmm.DTypeError, "not None", lambda: fused("auto", a, [w[0], None])),
        (metalmm.ArgumentError, "two or three matrices B", lambda: metalmm.MatmulSpec(1, 2, 3, also_n=(1, 2, 3))),
        (metalmm.ArgumentError, "swiglu takes two matrices B of one n", lambda: metalmm.MatmulSpec(1, 2, 3, also_n=(1,), swiglu=True)),
    ]:  # fmt: skip
        with pytest.raises(error, match=text):
            call()
    check_fused(metalmm.variants(family="fused")[1], a, w[:2], None, device)


def test_specs_of_stored_and_fused() -> None:
    spec = metalmm.MatmulSpec(1, 896, 896, bias=True, b_storage="affine8:32:canonical", also_n=(128, 128))
    assert spec.transpose_b and spec.b_storage == "affine8:32:canonical" and spec.also_n == (128, 128) and not spec.swiglu
    assert (
        "n=896+128+128" in repr(spec) and pickle.loads(pickle.dumps(spec)) == spec and hash(pickle.loads(pickle.dumps(spec))) == hash(spec)
    )
    assert spec != metalmm.MatmulSpec(1, 896, 896, bias=True, b_storage="affine8:canonical", also_n=(128, 128))
    for storage in STORAGES:
        assert metalmm.MatmulSpec(1, 2, 32, b_storage=storage).b_storage == storage
    q = weights(37, 95, "affine4", group=32)
    a = 95 * 2 + 37 * 2
    assert metalmm.MatmulSpec(1, 37, 95, b_storage=q.storage).least_bytes == q.nbytes + a
    twice = metalmm.MatmulSpec(1, 37, 95, b_storage=q.storage, also_n=(37,))
    assert twice.least_bytes == 2 * q.nbytes + 95 * 2 + 2 * 37 * 2
    assert metalmm.MatmulSpec(1, 37, 95, b_storage=q.storage, also_n=(37,), swiglu=True).least_bytes == 2 * q.nbytes + a


@pytest.mark.skipif(DEVICE != "cpu" or not sys.platform.startswith("linux"), reason="a GPU has a copy of the memory")
@pytest.mark.parametrize("v", QUANTIZED)
def test_nothing_is_read_or_written_outside_an_operand(v: metalmm.Variant, pages: list[Pages], device: metalmm.Device) -> None:
    for n, k in ((37, 161), (5, 101), (9, 320), (3, 896), (1, 1039)):
        m = next((m for m in rows_of(v) if m in (1, 3)), 3)
        a, options = draw(m, n, k, bias=True)
        q = weights(n, k, v.storage)
        reference, bound, _ = numerics.judged(a, q, **options)
        for end in (True, False):
            parts = [q.values, q.scales, q.biases, a, options["bias"], np.zeros((m, n), np.float16)]
            values, scales, biases, x, bias, out = [None if p is None else page.put(p, end) for page, p in zip(pages, parts, strict=True)]
            placed = replace(q, values=values, scales=scales, biases=biases)
            metalmm.matmul(v, x, placed, bias=bias, out=out, device=device)
            assert not (wrong := numerics.mismatch(out, reference, bound)), f"{v} {a.shape} {q!r}: {wrong}"
            count_case()


@pytest.fixture(scope="module")
def pages() -> list[Pages]:
    return [Pages() for _ in range(6)]


@pytest.mark.skipif(not sys.platform.startswith("linux") or DEVICE != "cpu", reason="pages that no one may touch")
@pytest.mark.parametrize("v", FUSED)
def test_no_bias_is_read_behind_its_end(v: metalmm.Variant, pages: list[Pages], device: metalmm.Device) -> None:
    for n in (37, 2041):
        parts = parts_of(v, 160, ns=(n, n, n))
        check_fused(v, draw(1, n, 160)[0], parts, [page.put(b, True) for page, b in zip(pages, biases_of(parts), strict=False)], device)


@pytest.mark.parametrize("v", ASKED_QUANTIZED)
def test_rows_of_a_further_apart_than_they_are_long(v: metalmm.Variant, device: metalmm.Device) -> None:
    """Whole loads of A, though k is off them; what lies between rows must not count."""
    m = rows_of(v)[-1]
    for n, k in ((37, 95), (5, 161), (5, 1039), (9, 172)):
        a, options = draw(m, n, k)
        wide = np.full((m, (k + 7) // 8 * 8 + 8), np.nan, np.float16)
        wide[:, :k] = a
        check(v, wide[:, :k], weights(n, k, v.storage), options, device)


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, metalmm.Variant]]:
    first = "\nnk_swiglu_l4_c1_s4_d2_x_tg256 = {"
    other = '\ntwo_by_two = { kernel = "fused_columns", weights = 2, swiglu = true, lanes = 4, columns = 2, split = 4, depth = 2, threads = 128 }'
    yield from changed_kernels(tmp_path_factory.mktemp("mma") / "kernels", "cpu_", ("variants.toml", first, other + first))


# One of each way through include/tensor.h; the others differ in how they share the work, and a GPU runs them all.
MMA = {
    (v.kernel, v.storage.partition(":")[0], v.weights > 1, *map(v.params.get, ("columns", "tiles"))): v
    for v in metalmm.variants()
    if v.params.get("mma")
}


@pytest.mark.skipif(
    DEVICE != "cpu" or not sys.platform.startswith("linux"), reason="the CPU device's debug mode, and pages that no one may touch"
)
@pytest.mark.parametrize("name", MMA.values())
def test_products_on_tensor_cores(name: str, on_cpu: dict[str, metalmm.Variant], pages: list[Pages], device: metalmm.Device) -> None:
    """What device cuda alone has: as other variants; several turns of several windows; lanes in any order; infinities among A."""
    v = on_cpu[name]
    if v.weights == 1:
        test_variant_is_within_the_bound(v, "batch", device)
        test_nothing_is_read_or_written_outside_an_operand(v, pages, device)
        check(v, draw(rows_of(v)[-1], 800, 1056)[0], weights(800, 1056, v.storage), {}, device)
    else:
        test_fused_is_within_the_bound(v, device)
    if "affine" in v.storage:
        test_a_bias_that_is_tiny_beside_its_scale(v, device)
        if v.weights == 1:
            test_a_bias_of_any_size(v, device)
            test_terms_that_cancel(v, device)
            test_weights_beside_their_zero(v, device)
        # Infinities in a lane's last column alone, none of both signs.
        parts = [weights(16, 256, v.storage, group=32, seed=i) for i in range(v.weights)]
        last = parts[-1]
        scales, biases, columns = last.scales.copy(), last.biases.copy(), slice(0 if v.weights > 1 else 8, None)
        for values, to in ((scales, np.inf), (biases, 1)):
            (values if last.layout == "nk" else values.T)[columns] = to
        parts[-1] = replace(last, scales=scales, biases=biases, values=last.values | 0x11)
        a = abs(draw(rows_of(v)[-1], 16, 256)[0])
        if v.weights > 1:
            check_fused(v, a, parts, None, device)
        else:
            check(v, a, parts[0], {}, device)
    with metalmm.Device("cpu", debug=True) as strict:
        for n, k in ((9, 1040), (70, 896), (5, 2112)):
            if v.weights > 1:
                check_fused(v, draw(1, n, k)[0], parts_of(v, k), None, strict)
                continue
            a, options = draw(rows_of(v)[-1], n, k, bias=True)
            a[0, k // 2] = np.inf if n == 5 else a[0, k // 2]
            check(v, a, weights(n, k, v.storage), options, strict)


@pytest.mark.skipif(DEVICE != "cpu", reason="how the CPU device goes from lane to lane")
@pytest.mark.usefixtures("every_compiler")
def test_two_columns_of_two_matrices(on_cpu: dict[str, metalmm.Variant]) -> None:
    """Of which clang 14 made a switch to another lane the wrong way round (csrc/msl/runtime/fiber.h)."""
    v = on_cpu["q4/two_by_two"]
    with metalmm.Device("cpu") as device:
        check_fused(v, draw(1, 9, 200)[0], parts_of(v, 200), None, device)


@pytest.mark.skipif(DEVICE != "cpu", reason="the CPU device's debug mode")
def test_in_debug_mode() -> None:
    """Lanes in any order, memory guarded, alignment looked at."""
    with metalmm.Device("cpu", debug=True) as device:
        for v in [v for v in FIRST if v.storage in ("q8_0", "q4_0:canonical", "affine4") and not v.swiglu]:
            a, options = draw(rows_of(v)[0], 37, 160, bias=v.weights == 1)
            if v.weights == 1:
                check(v, a, weights(37, 160, v.storage), options, device)
            else:
                check_fused(v, a, parts_of(v, 160), None, device)
        for v in [v for v in FIRST if v.kernel == "weight_tiles"]:
            for n, k in ((37, 161), (9, 1039)):  # rows off sixteen bytes, with and without a whole step
                a, options = draw(3, n, k)
                check(v, a, weights(n, k, v.storage), options, device)
