"""Formats of quantized weights: against the gguf package and, where it is installed, MLX, bit for bit; and by what a format promises."""

from __future__ import annotations

import dataclasses
import itertools
import re
from types import SimpleNamespace
from typing import Any

import metalmm
import ml_dtypes
import numpy as np
import pytest
from metalmm import _core, gguf_blocks, quantized, variant
from metalmm.kernel_source import KERNELS
from metalmm.quantized import FORMATS, LAYOUTS
from support.weights import blocks_of, weights

gguf = pytest.importorskip("gguf", reason="gguf is not installed: quantized formats are NOT tested")
CASES = [(f, group) for f in FORMATS for group in FORMATS[f].groups]
TYPES = [np.float16, np.float32, ml_dtypes.bfloat16]


def step(q: metalmm.QuantizedArray) -> Any:
    """Of each weight: how far two neighbouring values of its group are apart."""
    return np.abs(q.factors()[0])


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("name", "group"), CASES)
def test_what_it_stands_for_is_near(name: str, group: int, layout: str, dtype: Any) -> None:
    for n, k in ((9, 256), (1, 1), (8, 33), (11, 95), (7, 131)):
        w = weights(n, k, dtype)
        q = metalmm.quantize(w, name, group=group, layout=layout)
        assert q.shape == (n, k) and q.group == group and f"shape=({n}, {k})" in repr(q)
        off = np.abs(q.dequantize(np.float64) - w.astype(np.float64))
        # Half a step; a whole one where -max meets the end of q4_0's range, or a step was made to fit zero; and what a scale and bias lose by
        # their own type.
        lost = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24}.get(q.scales.dtype.name, 2.0**-11)
        widest = np.abs(w.astype(np.float64)).max(axis=1, keepdims=True)
        steps = (0.5 if name == "q8_0" else 1.0) * step(q)
        # Scales of a K-quant are whole numbers of 6 or 7 bits; fp4 has one bit of a number, and scales that are powers of two.
        rough = 0.35 if FORMATS[name].is_float else 1 / 31 if FORMATS[name].is_k else 0
        assert (off <= steps * 1.001 + (3 * lost + rough) * widest + 3 * lost * 256 * step(q) + 2.0**-24 * 128).all()
        assert q.nbytes == q.values.nbytes + q.scales.nbytes + (q.biases.nbytes if q.biases is not None else 0)
        other = q.to_layout(LAYOUTS[1 - LAYOUTS.index(layout)])
        direct = metalmm.quantize(w, name, group=group, layout=other.layout)
        for x, y in ((other.values, direct.values), (other.scales, direct.scales), (other.biases, direct.biases)):
            np.testing.assert_array_equal(x, y)
        np.testing.assert_array_equal(other.dequantize(), q.dequantize())
        assert q.to_layout(layout) is q


@pytest.mark.parametrize("name", [name for name, f in FORMATS.items() if f.is_k])
def test_small_weights_are_as_near_as_others(name: str) -> None:
    """A factor of 256 weights that float16 has as denormal, or as too small, must not cut off the largest of them."""

    def off(size: float) -> float:
        w = (np.random.default_rng(3).uniform(-1, 1, (8, 512)) * size).astype(np.float32)
        return float(np.abs(metalmm.quantize(w, name).dequantize(np.float64) - w).max() / size)

    f = FORMATS[name]
    assert off(1.0) < 1.1 / (2 ** (f.bits + f.upper) - 1), "half a step of all its bits"
    assert all(off(size) < off(1.0) * 1.1 + 0.004 for size in (1e-1, 1e-2, 3e-3, 1e-3))
    for size in (3e-4, 1e-5, 1e-7):  # a scale is a few times the least there is
        assert off(size) < off(1.0) + 2**-24 * 127 / size


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e4])
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", ["q8_0", "q4_0"])
def test_gguf_bit_for_bit(name: str, dtype: Any, scale: float) -> None:
    kind = gguf.GGMLQuantizationType[name.upper()]
    w = weights(24, 224, dtype, scale, tiny=False)
    theirs = gguf.quants.quantize(w.astype(np.float32), kind)
    for layout in LAYOUTS:
        ours = metalmm.quantize(w, name, layout=layout)
        np.testing.assert_array_equal(ours.to_gguf(), theirs)
        taken = metalmm.from_gguf(theirs, name, w.shape, layout=layout)
        np.testing.assert_array_equal(taken.to_gguf(), theirs)
        np.testing.assert_array_equal(taken.dequantize(), gguf.quants.dequantize(theirs, kind))
        for x, y in ((taken.values, ours.values), (taken.scales, ours.scales)):
            np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("name", ["q8_0", "q4_0"])
def test_any_block_of_gguf_survives(name: str) -> None:
    """Integers that no quantizer makes, too: -128; scales that are NaN or infinite."""
    size = 2 + FORMATS[name].bits * 4
    blocks = np.random.default_rng(1).integers(0, 256, (7, 3 * size), np.uint8)
    for layout in LAYOUTS:
        np.testing.assert_array_equal(metalmm.from_gguf(blocks, name, (7, 96), layout=layout).to_gguf(), blocks)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("name", "group"), [c for c in CASES if "affine" in c[0]])
def test_mlx_bit_for_bit(name: str, group: int, dtype: Any) -> None:
    mx = pytest.importorskip("mlx.core", reason="mlx is not installed: that its arrays are taken is NOT tested", exc_type=ImportError)
    mx.set_default_device(mx.cpu)
    w, bits = weights(16, 256, dtype), FORMATS[name].bits
    given = mx.array(w.astype(np.float32)).astype({"float16": mx.float16, "float32": mx.float32, "bfloat16": mx.bfloat16}[w.dtype.name])
    theirs = mx.quantize(given, group_size=group, bits=bits)
    packed, scales, biases = (np.array(x.astype(mx.float32) if x.dtype == mx.bfloat16 else x) for x in theirs)
    ours = metalmm.quantize(w, name, group=group)
    for x, y in zip(ours.to_mlx(), (packed, scales.astype(dtype), biases.astype(dtype)), strict=True):
        np.testing.assert_array_equal(x, y)
    near = np.array(mx.dequantize(*theirs, group_size=group, bits=bits).astype(mx.float32))
    np.testing.assert_allclose(ours.dequantize(), near, rtol=2.0 ** -(7 if dtype == ml_dtypes.bfloat16 else 10), atol=0.05)


@pytest.mark.parametrize(("name", "group"), [c for c in CASES if "affine" in c[0]])
def test_mlx_arrays_there_and_back(name: str, group: int) -> None:
    bits, rng = FORMATS[name].bits, np.random.default_rng(2)
    packed = rng.integers(0, 2**32, (5, 256 * bits // 32), np.uint32)
    scales, biases = (rng.standard_normal((5, 256 // group)).astype(np.float16) for _ in range(2))
    for layout in LAYOUTS:
        q = metalmm.from_mlx(packed, scales, biases, bits=bits, group=group, layout=layout)
        for x, y in zip(q.to_mlx(), (packed, scales, biases), strict=True):
            np.testing.assert_array_equal(x, y)
        # By the format's own words: element i of a row is in the word i * bits / 32, the first in the lowest bits.
        i = 77
        value = packed[3, i * bits // 32] >> (i * bits % 32) & (2**bits - 1)
        expected = float(scales[3, i // group]) * float(value) + float(biases[3, i // group])
        assert q.dequantize(np.float64)[3, i] == expected


@pytest.mark.parametrize("mode", ["mxfp4", "mxfp8", "nvfp4"])
def test_floats_of_mlx_bit_for_bit(mode: str) -> None:
    """What MLX quantized, and any codes and scales that are numbers."""
    mx = pytest.importorskip("mlx.core", reason="mlx is not installed: that its arrays are taken is NOT tested", exc_type=ImportError)
    mx.set_default_device(mx.cpu)
    rng = np.random.default_rng(4)
    made = [np.array(x) for x in mx.quantize(mx.array(weights(16, 256, np.float32, tiny=False)), mode=mode)]
    drawn = [rng.integers(0, 2**32, made[0].shape, np.uint32), rng.integers(1, 250 if mode != "nvfp4" else 126, made[1].shape, np.uint8)]
    if mode == "mxfp8":
        drawn[0] &= 0x77777777
        with pytest.raises(metalmm.ArgumentError, match="a scale or a weight of mxfp8 is no number"):
            metalmm.from_mlx(drawn[0] | 0x7F, drawn[1], mode=mode)
    with pytest.raises(metalmm.ArgumentError, match=f"a scale or a weight of {mode} is no number"):
        metalmm.from_mlx(made[0], np.full_like(made[1], 127 if mode == "nvfp4" else 255), mode=mode)
    with pytest.raises(metalmm.ShapeError, match="packed, scales and biases have shapes"):
        metalmm.from_mlx(made[0].reshape(2, 8, -1), made[1].reshape(4, 4, -1), mode=mode)
    experts = metalmm.from_mlx(made[0].reshape(2, 8, -1), made[1].reshape(2, 8, -1), mode=mode)
    assert experts.experts == 2 and experts.shape == (16, 256)
    for packed, scales in (made, drawn):
        theirs = np.array(mx.dequantize(mx.array(packed), mx.array(scales), mode=mode, dtype=mx.float32))
        for layout in LAYOUTS:
            ours = metalmm.from_mlx(packed, scales, mode=mode, layout=layout).dequantize()
            np.testing.assert_array_equal(ours.view(np.uint32), theirs.view(np.uint32))
    w = weights(16, 256, np.float32, tiny=False)
    q = metalmm.from_mlx(*made, mode=mode)
    np.testing.assert_array_equal(metalmm.quantize(w, q.format).dequantize(), q.dequantize())
    with pytest.raises(metalmm.ArgumentError, match="and no biases"):
        metalmm.from_mlx(*made, made[1], mode=mode)
    with pytest.raises(metalmm.UnsupportedError, match="mode is 'mxfp6'"):
        metalmm.from_mlx(*made, mode="mxfp6")


@pytest.mark.parametrize(("mode", "form", "largest"), [("mxfp4", "fp4", 6.0), ("mxfp8", "fp8", 448.0)])
def test_scales_beside_a_power_of_two_are_mlxs(mode: str, form: str, largest: float) -> None:
    """A group's largest that is next to what a scale reaches, on either side; the least scale."""
    mx = pytest.importorskip("mlx.core", reason="mlx is not installed: that its arrays are taken is NOT tested", exc_type=ImportError)
    mx.set_default_device(mx.cpu)
    at = np.ldexp(np.float32(largest), np.arange(-119, 100, dtype=np.int32)).astype(np.float32)
    least = np.ldexp(np.float32(largest), [-127]).astype(np.float32)
    w = np.concatenate([at, np.nextafter(at, np.float32(np.inf)), np.nextafter(at, np.float32(0)), least])
    rows = np.repeat(w[:, None], 32, axis=1)
    theirs = metalmm.from_mlx(*mx.quantize(mx.array(rows), mode=mode)[:2], mode=mode)
    ours = metalmm.quantize(rows, form)
    np.testing.assert_array_equal(ours.scales, theirs.scales)
    np.testing.assert_array_equal(ours.values, theirs.values)
    metalmm.quantize(np.full((1, 32), 1e-45, np.float32), form)  # without a warning


def test_a_global_scale_of_mlx_bit_for_bit() -> None:
    mx = pytest.importorskip("mlx.core", reason="mlx is not installed: that its arrays are taken is NOT tested", exc_type=ImportError)
    mx.set_default_device(mx.cpu)
    w = weights(16, 256, np.float32, tiny=False)
    for by in (mx.array(np.abs(w).max()), mx.array(0.37), mx.array([1e-3])):
        packed, scales = mx.quantize(mx.array(w), mode="nvfp4", global_scale=by)
        q = metalmm.from_mlx(packed, scales, mode="nvfp4", global_scale=by)
        theirs = np.array(mx.dequantize(packed, scales, mode="nvfp4", global_scale=by, dtype=mx.float32))
        np.testing.assert_array_equal(q.dequantize().view(np.uint32), theirs.view(np.uint32))
        assert q.to_layout("canonical")[3:9].global_scale == q.global_scale == np.float32(np.array(by).item()) / np.float32(2688)
    for wrong, message in ((mx.array([1.0, 2.0]), "takes one number"), ("1", "takes one number")):
        with pytest.raises(metalmm.ArgumentError, match=message):
            metalmm.from_mlx(packed, scales, mode="nvfp4", global_scale=wrong)
    with pytest.raises(metalmm.ArgumentError, match="mode 'mxfp4' has no global scale"):
        metalmm.from_mlx(packed, scales, mode="mxfp4", global_scale=1.0)


def test_bad_global_scales() -> None:
    q = metalmm.quantize(np.ones((2, 32), np.float32), "q8_0")
    for bad in (np.inf, np.nan, 1e39, 1e-46, True, "1", None):
        with pytest.raises(metalmm.ArgumentError, match="global_scale is"):
            dataclasses.replace(q, global_scale=bad)
    scaled = dataclasses.replace(q, global_scale=0.1)
    assert scaled.global_scale == float(np.float32(0.1)) and "global_scale=0.1" in repr(scaled)
    with pytest.raises(metalmm.UnsupportedError, match="no global scale"):
        scaled.to_gguf()
    with pytest.raises(metalmm.UnsupportedError, match="without a global scale"):
        dataclasses.replace(metalmm.quantize(np.ones((2, 64), np.float32), "affine8"), global_scale=2).to_mlx()


def test_the_ends_of_a_group_are_hit() -> None:
    w = weights(12, 128, np.float32)
    for group in (32, 64, 128):
        for name in ("affine8", "affine4"):
            near = metalmm.quantize(w, name, group=group).dequantize().reshape(12, -1, group)
            blocks = w.reshape(12, -1, group)
            at = np.abs(blocks).argmax(axis=2)[..., None]
            far = np.take_along_axis(blocks, at, 2)
            np.testing.assert_allclose(np.take_along_axis(near, at, 2)[abs(far) > 1e-4], far[abs(far) > 1e-4], rtol=1e-6)
    near = metalmm.quantize(w, "q4_0").dequantize().reshape(12, -1, 32)
    at = np.abs(w.reshape(12, -1, 32)).argmax(axis=2)[..., None]
    np.testing.assert_allclose(np.take_along_axis(near, at, 2), np.take_along_axis(w.reshape(12, -1, 32), at, 2), rtol=2.0**-10, atol=1e-6)


@pytest.mark.parametrize("name", [f for f in gguf_blocks.GGUF if f not in ("q8_0", "q4_0")])
def test_other_formats_of_gguf_keep_each_weight(name: str) -> None:
    """On blocks of any bytes, and on those that ggml's rules make; whatever format of ours holds them."""
    kind = gguf.GGMLQuantizationType[name.upper()]
    form = gguf_blocks.GGUF[name]
    assert gguf.GGML_QUANT_SIZES[kind] == (form.weights, form.size)
    sources = [blocks_of(name, 9, 1280)]
    if name in ("q4_1", "q5_0", "q5_1", "mxfp4"):  # others the package only reads
        sources.append(gguf.quants.quantize(weights(9, 1280, np.float32, tiny=False), kind))
    for data in sources:
        theirs = gguf.quants.dequantize(data, kind)
        for layout, dtype in itertools.product(LAYOUTS, (np.float16, np.float32)):
            q = metalmm.from_gguf(data, name, (9, 1280), layout=layout, dtype=dtype)
            assert q.format == form.format and (q.biases is None or FORMATS[q.format].is_k or q.scales.dtype == q.biases.dtype == dtype)
            np.testing.assert_array_equal(q.dequantize(np.float32), theirs)
            assert (np.signbit(q.dequantize()) == np.signbit(theirs)).all()


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_each_width_of_mlx_keeps_each_weight(bits: int, group: int) -> None:
    rng = np.random.default_rng(4)
    packed = rng.integers(0, 2**32, (5, 256 * bits // 32), np.uint32)
    scales, biases = (rng.standard_normal((5, 256 // group)).astype(np.float32) for _ in range(2))
    stream = [int("".join(f"{word:032b}" for word in row[::-1]), 2) for row in packed.tolist()]  # the first value in the lowest bits
    expected = np.array([[row >> bits * i & (2**bits - 1) for i in range(256)] for row in stream])
    for layout in LAYOUTS:
        q = metalmm.from_mlx(packed, scales, biases, bits=bits, group=group, layout=layout)
        np.testing.assert_array_equal(q.integers(), expected)
        assert q.format == ("affine4" if bits <= 4 else "affine8") and q.group == group


@pytest.mark.parametrize("bits", [2, 3, 5, 6])
def test_narrow_widths_of_mlx_bit_for_bit(bits: int) -> None:
    mx = pytest.importorskip("mlx.core", reason="mlx is not installed: that its arrays are taken is NOT tested", exc_type=ImportError)
    mx.set_default_device(mx.cpu)
    theirs = mx.quantize(mx.array(weights(16, 256, np.float32)), group_size=64, bits=bits)
    ours = metalmm.from_mlx(*(np.array(x) for x in theirs), bits=bits)
    np.testing.assert_allclose(ours.dequantize(), np.array(mx.dequantize(*theirs, group_size=64, bits=bits)), rtol=2e-6, atol=1e-6)


# -- bad input ----------------------------------------------------------------------------------------------------------

W = np.ones((4, 64), np.float16)
Q = metalmm.quantize(W, "q8_0")
A = metalmm.quantize(W, "affine4")


def layer(q: metalmm.QuantizedArray = A, **more: Any) -> SimpleNamespace:
    """What mlx.nn.QuantizedLinear has of it."""
    weight, scales, biases = q.to_mlx()
    return SimpleNamespace(
        **{"weight": weight, "scales": scales, "biases": biases, "bits": 4, "group_size": q.group, "mode": "affine"} | more
    )


NO_WORDS = [None, [], [[1.0]], 3, object(), np.array(None), np.ones((4, 64)), np.array(["a"]), -1, 1.5, {}, b"1", "x"]


@pytest.mark.parametrize("word", NO_WORDS, ids=[type(x).__name__ + str(i) for i, x in enumerate(NO_WORDS)])
def test_words_and_numbers_of_any_type_are_refused_by_name(word: Any) -> None:
    mlx = A.to_mlx()
    for call in (
        lambda: metalmm.quantize(W, word),
        lambda: metalmm.quantize(W, "q8_0", layout=word),
        lambda: metalmm.from_gguf(Q.to_gguf(), word, (4, 64)),
        lambda: metalmm.from_gguf(Q.to_gguf(), "q8_0", (4, 64), layout=word),
        lambda: metalmm.from_gguf(Q.to_gguf(), "q8_0", word),
        lambda: metalmm.from_gguf(Q.to_gguf(), "q8_0", (4, word)),
        lambda: metalmm.from_mlx(*mlx, bits=word),
        lambda: metalmm.from_mlx(*mlx, bits=4, layout=word),
        lambda: Q.to_layout(word),
        *(
            [lambda: metalmm.quantize(W, "affine4", group=word), lambda: metalmm.from_mlx(*mlx, bits=4, group=word)]
            if word is not None
            else []
        ),
        *([lambda: Q.dequantize(word)] if not isinstance(word, (bytes, type(None), list, dict)) else []),
    ):
        with pytest.raises(metalmm.Error):
            call()


def test_a_layer_of_mlx_knows_its_bits_and_group() -> None:
    q = metalmm.quantize(np.random.default_rng(3).standard_normal((5, 96)).astype(np.float16), "affine4", group=32)
    for form in LAYOUTS:
        taken = metalmm.from_mlx(layer(q), layout=form)
        assert taken.storage == metalmm.from_mlx(*q.to_mlx(), bits=4, group=32, layout=form).storage
        np.testing.assert_array_equal(taken.dequantize(), q.dequantize())


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: metalmm.quantize(W, "q5_1"), metalmm.UnsupportedError, "format is 'q5_1'; it takes one of q8_0, q4_0, affine8, affine4"),
        (lambda: metalmm.quantize(W, "q8_0", group=64), metalmm.UnsupportedError, "group is 64; format q8_0 takes 32"),
        (lambda: metalmm.quantize(W, "affine8", group=16), metalmm.UnsupportedError, "group is 16; format affine8 takes 32, 64, 128"),
        (lambda: metalmm.quantize(W, "q8_0", layout="kn"), metalmm.ArgumentError, "layout is 'kn'; it takes one of nk, canonical"),
        (lambda: metalmm.quantize(W.astype(np.float64), "q8_0"), metalmm.DTypeError, "w is float64; it takes float16, bfloat16 or float32"),
        (lambda: metalmm.quantize(W[0], "q8_0"), metalmm.ShapeError, r"w has shape \(64,\); it takes \[n, k\]"),
        (lambda: metalmm.quantize(W[:, :0], "q8_0"), metalmm.ShapeError, r"w has shape \(4, 0\)"),
        (lambda: metalmm.quantize(W * np.float16(np.nan), "q4_0"), metalmm.ArgumentError, r"w\[0, 0\] is not finite"),
        (lambda: metalmm.quantize(W.astype(np.float32) * 1e9, "q8_0"), metalmm.ArgumentError, r"weights of up to 1e\+09 need a scale past float16"),
        (lambda: metalmm.quantize(np.full((1, 256), 7e7, np.float32), "q4_k"), metalmm.ArgumentError, r"weights of up to 7e\+07 need a scale past float16"),
        (lambda: metalmm.from_gguf(Q.to_gguf()[:, 1:], "q8_0", (4, 64)), metalmm.ShapeError, r"268 bytes for shape \(4, 64\) in q8_0"),
        (lambda: metalmm.from_gguf(Q.to_gguf(), "q8_0", (4, 65)), metalmm.ShapeError, "k is a multiple of 32"),
        (lambda: metalmm.from_gguf(Q.to_gguf().view(np.int8), "q8_0", (4, 64)), metalmm.DTypeError, "blocks are int8; it takes uint8"),
        (lambda: metalmm.from_gguf(Q.to_gguf(), "affine8", (4, 64)), metalmm.UnsupportedError, "format is 'affine8'; it takes q8_0, q4_0, q4_1, q5_0"),
        (lambda: metalmm.from_mlx(*A.to_mlx(), bits=7), metalmm.UnsupportedError, "bits is 7; there are 2, 3, 4, 5, 6, 8"),
        (lambda: metalmm.from_mlx(*A.to_mlx(), bits=8), metalmm.ShapeError, r"scales \(4, 1\) and biases \(4, 1\) for 4 rows of 32 in groups of 64"),
        (lambda: metalmm.from_mlx(A.values, A.scales, A.biases, bits=4), metalmm.DTypeError, "packed is uint8"),
        (lambda: metalmm.from_mlx(*A.to_mlx()), metalmm.ArgumentError, "takes packed, scales, biases and bits="),
        (lambda: metalmm.from_mlx(A.to_mlx()[0], bits=8), metalmm.ArgumentError, "takes packed, scales, biases and bits="),
        (lambda: metalmm.from_mlx(layer(), bits=4), metalmm.ArgumentError, "a layer comes alone"),
        (lambda: metalmm.from_mlx(layer(bits="4")), metalmm.UnsupportedError, "bits is '4'; there are 2, 3, 4, 5, 6, 8"),
        (lambda: metalmm.from_mlx(layer(biases=None)), metalmm.ArgumentError, "the layer has no biases"),
        (lambda: metalmm.from_mlx(layer(global_scale=np.float32(2))), metalmm.ArgumentError, "mode 'affine' has no global scale"),
        *[
            (lambda word=word: A.dequantize(word), metalmm.DTypeError, "dequantize: dtype is")
            for word in ("U4", "S3", "M8[s]", "M8", "i4,i4", object, "c8", {"names": ["a"], "formats": []})
        ],
        (lambda: metalmm.from_mlx(layer(mode="mxfp6")), metalmm.UnsupportedError, "mode is 'mxfp6'; it takes affine, mxfp4, mxfp8, nvfp4"),
        (lambda: metalmm.from_mlx(layer(mode="mxfp4")), metalmm.ArgumentError, "mxfp4 has 4 bits, groups of 32 and no biases"),
        (lambda: metalmm.quantize(np.full((1, 32), 3e38, np.float32), "fp4"), metalmm.ArgumentError, r"scale is 2\^126, past 2\^125"),
        (lambda: A.to_gguf(), metalmm.UnsupportedError, "GGUF has q8_0 and q4_0"),
        (lambda: Q.to_mlx(), metalmm.UnsupportedError, "MLX has affine8 and affine4"),
        (lambda: metalmm.quantize(W[:, :33], "q8_0").to_gguf(), metalmm.UnsupportedError, "multiple of 32"),
        (lambda: metalmm.quantize(W[:, :33], "affine8").to_mlx(), metalmm.UnsupportedError, "multiple of the group"),
        (lambda: changed(Q, scales=Q.scales.astype(np.float32)), metalmm.DTypeError, "scales: float32; it takes an array of float16"),
        (lambda: changed(Q, scales=Q.scales[:, :1]), metalmm.ShapeError, r"scales: shape \(4, 1\); it takes \(4, 2\)"),
        (lambda: changed(Q, values=Q.values[:, :-1]), metalmm.ShapeError, r"values: shape \(4, 63\); it takes \(4, 64\)"),
        (lambda: changed(Q, values=Q.values.view(np.uint8)), metalmm.DTypeError, "values: uint8; it takes an array of int8"),
        (lambda: changed(Q, biases=Q.scales), metalmm.ArgumentError, "biases: format q8_0 has none"),
        (lambda: changed(A, biases=None), metalmm.ArgumentError, "biases: format affine4 has one for each scale"),
        (lambda: changed(A, biases=A.scales.astype(np.float32)), metalmm.DTypeError, "biases: float32; it takes an array of float16"),
    ],
)  # fmt: skip
def test_bad_input(call: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        call()


def changed(q: metalmm.QuantizedArray, **fields: Any) -> metalmm.QuantizedArray:
    given = {name: getattr(q, name) for name in ("format", "layout", "shape", "group", "values", "scales", "biases")}
    return quantized.QuantizedArray(**{**given, **fields})


def test_arrays_of_torch_and_of_nothing_known() -> None:
    for wrong in (object(), [[1.0], [2.0, 3.0]], "words"):
        with pytest.raises(metalmm.DTypeError, match="quantize: w is"):
            metalmm.quantize(wrong, "q8_0")
    with pytest.raises(metalmm.DTypeError, match="from_gguf: blocks are"):
        metalmm.from_gguf([1.5], "q8_0", (1, 32))
    with pytest.raises(metalmm.ArgumentError, match=r"from_gguf: shape is 32; it takes \(n, k\)"):
        metalmm.from_gguf(np.zeros(34, np.uint8), "q8_0", 32)  # type: ignore[arg-type]


def test_a_parameter_of_torch_in_bfloat16() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed: that its parameters are taken is NOT tested")
    w = torch.nn.Parameter(torch.randn(4, 64, dtype=torch.bfloat16))
    q = metalmm.quantize(w, "q8_0")
    np.testing.assert_array_equal(q.values, metalmm.quantize(w.detach().float().numpy(), "q8_0").values)


def test_mlx_in_bfloat16() -> None:
    mx = pytest.importorskip("mlx.core", reason="mlx is not installed: that its arrays are taken is NOT tested")
    w = mx.array(np.random.default_rng(0).standard_normal((4, 64)).astype(np.float32)).astype(mx.bfloat16)
    q = metalmm.quantize(w, "q8_0")
    np.testing.assert_array_equal(q.values, metalmm.quantize(np.array(w.astype(mx.float32)), "q8_0").values)


@pytest.mark.parametrize("layout", ["nk", "canonical"])
@pytest.mark.parametrize("format", FORMATS)
def test_an_operation_knows_how_many_bytes_its_weights_have(format: str, layout: str) -> None:
    for k in (32, 40, 64, 896):
        q = metalmm.quantize(np.ones((8, k), np.float16), format, layout=layout)
        have = sum(part.nbytes for part in (q.values, q.scales, q.biases) if part is not None)
        storage = format + ":canonical" * (layout == "canonical")
        spec = metalmm.MatmulSpec(1, 8, k, transpose_b=True, b_storage=storage)
        assert spec.b_bytes == have
    assert abs(variant._bits(spec) - 8 * have / (8 * k)) <= 1, "what the rules of auto reckon with"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_upper_bits_stand_where_the_page_says(layout: str) -> None:
    """Of one value that is all ones among others of nothing; docs/quantized.md."""
    for name, of_word in (("q5_k", 32), ("q6_k", 16)):
        f, bits = FORMATS[name], 32 // of_word
        for at in range(64):
            stored = np.zeros((3, 70), np.uint8)
            stored[1, at] = 2 ** (4 + bits) - 1
            q = quantized._array_of(name, layout, stored, 32, np.ones((3, 3, 2), np.int8), np.ones((3, 1, *f.each[1]), np.float16))
            records = q.scales if layout == "nk" else q.scales.swapaxes(0, 1)
            assert (records[..., :2] == 1).all() and (records[..., 2:4] == 0).all()
            words = np.ascontiguousarray(records[..., 4:]).view("<u4")
            i = at % of_word
            expected = np.zeros_like(words)
            expected[1, at // 32, at % 32 // of_word] = (2**bits - 1) << 4 * (i % 8) + bits * (i // 8)
            np.testing.assert_array_equal(words, expected)
            np.testing.assert_array_equal(q.integers() + f.offset, stored)


def test_rows_of_quantized_weights() -> None:
    q = metalmm.quantize(np.random.default_rng(1).standard_normal((8, 64)).astype(np.float16), "q8_0")
    for rows in (slice(2, 5), slice(2, 5, 1), slice(-3, None)):
        np.testing.assert_array_equal(q[rows].dequantize(), q.dequantize()[rows])
    for wrong in (slice(0, 8, 2), slice(None, None, -1), 3):
        with pytest.raises(metalmm.ArgumentError, match="a slice of neighbouring rows"):
            q[wrong]  # type: ignore[index]


def test_formats_have_one_order() -> None:
    """Kernels and the extension know a format by its number."""
    found = re.search(r"enum Format \{([^}]+)\}", (KERNELS / "include/packing.h").read_text())
    assert found is not None
    assert [x.strip().lower() for x in found[1].split(",")] == list(_core._FORMATS) == ["dense", *FORMATS]
