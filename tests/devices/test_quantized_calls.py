"""Calls with quantized weights and fused calls: operands, arrays on the device, batches, what is refused."""

from __future__ import annotations

import functools
import gc
import pickle
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import metalmm
import ml_dtypes
import numpy as np
import pytest
from metalmm import manifest, numerics
from metalmm.variant import STORAGES
from support.counting import count_case
from support.here import ALL_OF_IT, BY_TURNS, ON_A_FAKE, REAL_GPU
from support.numbers import carry_out
from support.weights import blocks_of

DTYPES: dict[str, Any] = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32}


@functools.lru_cache(maxsize=256)
def weights(n: int, k: int, storage: str, dtype: str = "float16", group: int | None = None, seed: int = 0) -> Any:
    """A QuantizedArray of a variant's storage, or a dense array."""
    w = np.random.default_rng(seed + 7919 * n + k).standard_normal((n, k)).astype(DTYPES[dtype])
    form, _, layout = storage.partition(":")
    return w if form == "dense" else metalmm.quantize(w, form, group=group, layout=layout or "nk")


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


def test_a_global_scale_is_part_of_alpha(device: metalmm.Device) -> None:
    for scale in (0.37, -2.0):
        q = replace(weights(40, 96, "nvfp4"), global_scale=scale)
        for m, epilogue in ((1, {}), (1, {"alpha": 0.5, "bias": True}), (9, {"alpha": -3.0, "beta": 2.0, "c": True})):
            a, options = draw(m, 40, 96, **epilogue)
            check("auto", a, q, options, device)
        call = device.prepare("auto", device.array(a[:1]), q.to(device), out=device.empty((1, 40), "float16"))
        reference, bound, _ = numerics.judged(a[:1], q)
        assert not numerics.mismatch(np.asarray(call()), reference, bound)
    with pytest.raises(metalmm.ArgumentError, match=r"weights\[1\] has a global scale of -2.0.*no alpha: ask for each by matmul"):
        metalmm.matmul_fused("auto", a[:1], [weights(40, 96, "nvfp4"), q], device=device)
    with pytest.raises(metalmm.UnsupportedError, match=r"a global scale of -2\.0, and it has no alpha"):
        metalmm.matmul_gathered(a, q, np.zeros((9, 1), np.int32), device=device)
    with pytest.raises(metalmm.ArgumentError, match=r"alpha times b's global_scale is -"):
        metalmm.matmul("auto", a, q, alpha=3e38, device=device)


def test_every_format_layout_and_number_of_rows_has_a_variant() -> None:
    for storage in STORAGES[1:]:
        for m in (1, 2, 3, 8, 17):
            spec = metalmm.MatmulSpec(m, 37, 95, b_storage=storage)
            assert [v for v in metalmm.variants(spec, enabled=True) if v.kernel], (storage, m)
    for storage in ("dense", "q8_0", "q8_0:canonical", "q4_0", "affine8", "affine4"):
        for also_n, swiglu in (((37,), False), ((5, 9), False), ((37,), True)):
            spec = metalmm.MatmulSpec(1, 37, 95, b_storage=storage, also_n=also_n, swiglu=swiglu)
            assert metalmm.variants(spec, enabled=True), (storage, also_n, swiglu)


@pytest.mark.rest
@pytest.mark.parametrize("rows", [slice(1, 5), slice(4, 5)])
def test_wide_operands_with_rows_that_begin_off_four_bytes(rows: slice, device: metalmm.Device) -> None:
    """A scale of two bytes cannot stand where a bias of four is not."""
    q = metalmm.quantize(np.random.default_rng(4).standard_normal((5, 96)).astype(np.float32), "q8_0")[rows]
    for v in ("gemv_nt/l4_d7_tg64", "gemm/bm32_bn32_bk32"):
        check(v, np.ones((1, 96), np.float32), q, {}, device)
    fused = next(v for v in metalmm.variants() if v == "gemv_nt/l4_s7_tg448")
    check_fused(fused, np.ones((1, 96), np.float32), [q, q, q], None, device)


@pytest.mark.rest
@pytest.mark.parametrize("point", ["r8_l4_c3_tg64", "r3_l8_c7_tg64"])
def test_points_whose_columns_make_no_whole_parts(point: str, device: metalmm.Device) -> None:
    """Of rows and columns that no point which ships has: their kernel compiles, what a thread alone would do in it too."""
    x, w = np.ones((3, 64), np.float16), np.ones((40, 64), np.float16)
    for out in (
        metalmm.matmul(f"gemv_nt/{point}", x, w, transpose_b=True, device=device),
        metalmm.matmul_fused(f"gemv_nt/{point}", x, [w, w], device=device)[1],
    ):
        assert (np.asarray(out) == 64).all()


def test_more_rows_than_a_fused_call_takes(device: metalmm.Device) -> None:
    x, w = np.ones((9, 64), np.float16), np.ones((8, 64), np.float16)
    if device.name == "cpu":
        assert (metalmm.matmul_fused("auto", x, [w, w], device=device)[0] == 64).all()
        return
    with pytest.raises(metalmm.UnsupportedError, match="take m up to 8, some on device cuda up to 16: multiply by each matrix"):
        metalmm.matmul_fused("auto", x, [w, w], device=device)


def test_weights_are_kept_on_the_device(device: metalmm.Device) -> None:
    q = weights(37, 96, "q8_0")
    on = q.to(device)
    assert isinstance(on.values, metalmm.Array) and on.storage == "q8_0" and on.nbytes == q.nbytes
    a, _ = draw(1, 37, 96)
    out = metalmm.matmul("gemv_nt/l4_d7_tg64", device.array(a), on)
    assert isinstance(out, metalmm.Array)
    np.testing.assert_array_equal(np.asarray(out), metalmm.matmul("gemv_nt/l4_d7_tg64", a, q, device=device))
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


def storages() -> Sequence[str]:
    """All quantized ones; without METALMM_TEST_ALL rows of one format and blocks of the next."""
    if ON_A_FAKE:
        return STORAGES[1:3]
    return STORAGES[1:] if ALL_OF_IT or REAL_GPU else [x for i, x in enumerate(STORAGES[1:]) if i % 4 in (0, 3)]


@pytest.mark.rest
def test_auto_takes_every_storage(device: metalmm.Device) -> None:
    for turn, storage in enumerate(storages()):
        a, options = draw((1, 4, 17)[turn % 3] if not ON_A_FAKE else 1, 33, 129, bias=True)
        check("auto", a, weights(33, 129, storage), options, device)
    for storage in ("dense", "q8_0", "q4_0", "affine8", "affine4") if not ON_A_FAKE else ("dense", "q8_0"):
        parts = [weights(n, 96, storage) for n in (20, 9)]
        a, _ = draw(1, 20, 96)
        for out, w in zip(metalmm.matmul_fused("auto", a, parts, device=device), parts, strict=True):
            reference, bound, _ = numerics.judged(a, w, transpose_b=True)
            assert not numerics.mismatch(out, reference, bound)


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


def test_results_may_be_columns_of_one_array(device: metalmm.Device) -> None:
    a, _ = draw(1, 1, 96, batch=2)
    parts = [weights(n, 96, "q8_0", seed=n) for n in (20, 9, 7)]
    apart = metalmm.matmul_fused("gemv_nt/l4_s7_tg448", a, parts, device=device)
    room = np.full((2, 1, 40), np.nan, np.float16)
    outs = [room[..., 2:22], room[..., 22:31], room[..., 33:40]]
    found = metalmm.matmul_fused("gemv_nt/l4_s7_tg448", a, parts, out=outs, device=device)
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


def test_a_manifest_gives_a_library_no_quantized_weights(tmp_path: Any) -> None:
    for what in ('storage = "q8_0"', "matrices = ['2']"):
        (tmp_path / "m.toml").write_text(
            f'format = 2\n[families.lib]\nlibrary = "blas"\nthreads = 1\ntile = [1, 1]\nsupports = {{ layouts = ["nt"] }}\n{what}\n'
            "[families.lib.variants]\none = {}\n"
        )
        with pytest.raises(metalmm.ManifestError, match="a library multiplies one dense B"):
            metalmm.load_variants(tmp_path / "m.toml")


def bad(q: Any, **parts: Any) -> Any:
    """With parts that its class would not take."""
    copy = object.__new__(type(q))
    for name in ("format", "layout", "shape", "group", "values", "scales", "biases", "storage"):
        object.__setattr__(copy, name, parts.get(name, getattr(q, name)))
    return copy


def test_wrong_operands_are_refused(device: metalmm.Device) -> None:
    q, v = weights(37, 96, "q8_0"), "gemv_nt/l4_d7_tg64"
    a, _ = draw(1, 37, 96)
    affine = weights(37, 96, "affine4")
    for error, text, call in [
        (metalmm.ShapeError, r"a \(1, 95\) and b q8_0 \(37, 96\) differ in k: 95 and 96", lambda: metalmm.matmul(v, a[:, :95].copy(), q)),
        (metalmm.UnsupportedError, "b is q8_0; it takes dense", lambda: metalmm.matmul("gemv/baseline", a, q)),
        (metalmm.UnsupportedError, "there are 2 matrices B of q8_0; it takes 1;", lambda: metalmm.matmul_fused("gemm/bm32_bn32_bk32", a, [q, q])),
        (metalmm.UnsupportedError, "it has no swiglu of dense weights", lambda: metalmm.matmul_fused("gemv_nt_vec4/c4_tg128", a, [q.dequantize(np.float16)] * 2, activation="swiglu")),
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
        *((metalmm.ShapeError, "b's values .* does not fit", lambda s=s: metalmm.matmul(v, a, bad(q, shape=s))) for s in ((2**32 - 1, 96), (37, 2**32 - 1))),
        (metalmm.ShapeError, "has dimensions|2 dimensions|does not fit", lambda: metalmm.matmul(v, a, bad(q, values=q.values.reshape(-1)))),
        (metalmm.LayoutError, "out .* overlaps b's scales", lambda: metalmm.matmul(v, a[:, :32].copy(), replace(weights(3, 32, "q8_0"), scales=(room := np.zeros((3, 1), np.float16))), out=room.reshape(1, 3))),
        (metalmm.ArgumentError, r"to\(\) takes a metalmm.Device, such as metalmm.Device\('cpu'\), and not 'cpu'", lambda: q.to("cpu")),  # type: ignore[arg-type]
        (metalmm.ArgumentError, "b_storage is q9", lambda: metalmm.MatmulSpec(1, 2, 3, b_storage="q9")),
        (metalmm.ArgumentError, "transpose_b is False", lambda: metalmm.MatmulSpec(1, 2, 3, transpose_b=False, b_storage="q8_0")),
    ]:  # fmt: skip
        with pytest.raises(error, match=text):
            call()
    for form, off, on in (("q6_k", 2, 4), ("q5_k", 4, 8), ("q2_k", 2, 4), ("q4_k", 1, 2)):  # what a record is loaded by
        k_quant = weights(37, 96, form)
        store = np.zeros(k_quant.scales.nbytes + 32, np.int8)
        start = -store.ctypes.data % 16 + off
        moved = store[start : start + k_quant.scales.nbytes].reshape(k_quant.scales.shape)
        with pytest.raises(metalmm.LayoutError, match=f"b's scales .* is not aligned to {on} bytes"):
            metalmm.matmul("auto", a, bad(k_quant, scales=moved))
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
        (metalmm.UnsupportedError, "there are 3 matrices B; it takes 1", lambda: fused("gemv/baseline", a, [*w[:2], three])),
        (metalmm.UnsupportedError, "there are 2 matrices B; it takes 1", lambda: fused("gemm_tiled/baseline", a, w[:2])),
        (metalmm.UnsupportedError, "it has no swiglu of dense weights", lambda: fused("gemm/bm32_bn32_bk32", a, w[:2], activation="swiglu")),
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
    check_fused(manifest.get("gemv_nt/l8_d7_x_tg320"), a, w[:2], None, device)


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


OTHERS = ["q4_1", "q5_0", "q5_1", "q2_k", "q4_k", "q5_k", "iq4_nl", "iq4_xs"]


@pytest.mark.rest(but=1)
@pytest.mark.parametrize("name", ["q2_k", "iq4_xs"] if BY_TURNS else OTHERS)
def test_products_with_other_formats_of_gguf(name: str, device: metalmm.Device) -> None:
    for dtype, m in ((np.float16, 1), (np.float32, 2)):
        x, q = (
            np.random.default_rng(5).standard_normal((m, 512)).astype(dtype),
            metalmm.from_gguf(blocks_of(name, 40, 512), name, (40, 512), dtype=dtype),
        )
        y, bound = metalmm.matmul("auto", x, q, device=device), metalmm.error_bound(x, q)
        expected = metalmm.reference(x, q)
        inside = abs(expected) + bound < np.finfo(dtype).max  # of such scales some results are past float16
        assert inside.any() and (abs(y - expected) <= bound)[inside].all()
