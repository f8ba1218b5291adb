"""Rows of quantized weights: the extremes of each format, biases near and far, infinities in one column."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import metalmm
import numpy as np
from metalmm import numerics
from support.operands import DTYPES, Call, draw, made, of_one_scale, scaled, scales_of
from support.rows import Row

TOPS = {"affine8": 255, "affine4": 15, "q5_k": 31, "q4_k": 15, "q2_k": 15}


def with_weights(row: Row, change: Any, n: int, k: int, seed: int = 0) -> Call:
    """A call whose matrices are what `change` makes of them."""
    call = draw(row, 3, n, k, seed=seed)
    call.b = [change(q) for q in call.b]
    return call


def form_of(row: Row) -> tuple[str, str]:
    """Format and layout."""
    form, _, layout = row.variant.storage.partition(":")
    return form, layout


def test_the_extremes_of_a_format(quantized_row: Row, device: metalmm.Device) -> None:
    """Every value of a byte or half, scales that are zero, least, negative; A's zeros of both signs; infinities and NaN as in float64."""

    def change(q: Any, last: float = 1.0) -> Any:
        values = np.arange(q.values.size, dtype=np.int64).astype(np.uint8).view(q.values.dtype).reshape(q.values.shape)

        def extremes(scales: Any) -> None:
            scales.flat[::5], scales.flat[1::5], scales.flat[2::5] = 0, -0.5, 6e-8
            scales.flat[7 % scales.size] = last

        if q.scales.dtype == np.int8:
            q = replace(q, scales=np.resize([-128, 127, 0, 1, -1, 63, 5], q.scales.shape).astype(np.int8))
        return replace(scaled(q, extremes), values=values)

    for infinite, last in ((False, 1.0), (True, 1.0), (True, np.nan)):
        call = with_weights(quantized_row, functools.partial(change, last=last), 6, 256)
        rows = call.a if quantized_row.layout[0] == "n" else np.swapaxes(call.a, -1, -2)
        rows[:, 3], rows[:, 4] = 0.0, -0.0
        if infinite:
            rows[0, 200] = np.inf
        call.check(device)


def test_infinities_stay_in_their_column(quantized_row: Row, device: metalmm.Device) -> None:
    """Of which a lane may have read a piece before one of another column, or in place of one that is not there: of 1024, behind 896."""

    def change(q: Any) -> Any:
        def infinite(scales: Any) -> None:
            (scales if q.layout == "nk" else scales.swapaxes(0, 1))[np.arange(q.shape[0]) % 37 == 36] = np.inf

        return scaled(q, infinite)

    call = with_weights(quantized_row, change, 150, 1024)
    for out, (reference, bound) in zip(call.run(device), call.judged(), strict=True):
        columns = np.arange(reference.shape[-1]) % 37 == 36
        assert not (wrong := numerics.mismatch(out[:, ~columns], reference[:, ~columns], bound[:, ~columns])), f"{quantized_row}: {wrong}"
        assert quantized_row.variant.swiglu or not np.isfinite(out[:, columns].astype(np.float32)).any()


def test_a_last_scale_that_is_infinite(quantized_row: Row, device: metalmm.Device) -> None:
    """Times A's zeros behind K it is a NaN, where a kernel adds those. K ends in a group, in half of a block, in a tile."""

    def change(q: Any) -> Any:
        def infinite(scales: Any) -> None:
            (scales if q.layout == "nk" else scales.swapaxes(0, 1))[q.shape[0] // 2, -1] = np.inf

        return scaled(metalmm.quantize(np.ones(q.shape, DTYPES[quantized_row.dtype]), q.format, layout=q.layout), infinite)

    for i, (m, n, k) in enumerate(((3, 40, 160), (35, 71, 263), (3, 33, 33), (3, 40, 289), (3, 40, 304))):
        call = draw(quantized_row, m, n, k, seed=i)
        call.b = [change(q) for q in call.b]
        np.abs(call.a, out=call.a)
        call.check(device)


def test_a_bias_of_any_size(affine_row: Row, device: metalmm.Device) -> None:
    """Weights near zero between terms that are not, wherever -bias / scale lies: on an integer, between two, far outside of them."""
    rng = np.random.default_rng(5)

    def change(q: Any, are_zero: bool) -> Any:
        shape, dtype = q.scales.shape, q.scales.dtype
        if are_zero:  # or what the bias's rounding leaves of them
            scales = np.where(np.arange(q.scales.size).reshape(shape) % 2, 0.5, 0.37).astype(dtype)
            zero = 0xDD if q.format.startswith("affine8") else 0xD
            return replace(q, values=np.full_like(q.values, 0xDD), scales=scales, biases=(-zero * scales.astype(np.float32)).astype(dtype))
        scales = (rng.choice([1e-4, 0.01, -0.02, 1.0, 0.0], shape) * rng.uniform(0.5, 1, shape)).astype(dtype)
        zeros = rng.choice([1, 0.5, 0.03], shape) * rng.integers(-20, 300, shape) * rng.choice([1, 1, 1, 100], shape)
        return replace(q, scales=scales, biases=np.clip(-zeros * scales.astype(np.float64), -2000, 2000).astype(dtype))

    for k in (1, 40, 256):
        for are_zero in (False, True):
            with_weights(affine_row, functools.partial(change, are_zero=are_zero), 24, k).check(device)


def test_a_bias_that_is_tiny_beside_its_scale(affine_row: Row, device: metalmm.Device) -> None:
    """Integers that are zero leave the bias alone, of which nothing may be lost: in some groups of a column, in some columns, and in all, where
    no other term hides it."""
    rng = np.random.default_rng(6)

    def change(q: Any, share: float) -> Any:
        shape, dtype = q.scales.shape, q.scales.dtype
        scales, biases = rng.uniform(0.5, 2, shape).astype(dtype), q.biases.copy()
        tiny = rng.random(shape) < share
        biases[tiny] = (scales.astype(np.float64) * rng.choice([0, 1 / 3, -1e-3, 1e-5], shape)).astype(dtype)[tiny]
        return replace(q, values=np.where(rng.random(q.values.shape) < max(share, 0.9), 0, q.values), scales=scales, biases=biases)

    for n, k, share in ((9, 96, 0.1), (130, 896, 0.1), (70, 2000, 0.1), (24, 256, 1.0)):
        with_weights(affine_row, functools.partial(change, share=share), n, k).check(device)


def test_terms_that_cancel(single_affine_row: Row, device: metalmm.Device) -> None:
    """Weights of half a scale, between two integers: their terms are three times as large, and one element of A hides the others'. And
    scales and biases that are infinite, where one sum would be of both signs."""
    row = single_affine_row
    for k in (4, 32, 64, 127, 256):
        call = draw(row, 3, 8, k)
        k = call.b[0].shape[1]
        form, layout = form_of(row)
        integers, groups = np.ones((call.b[0].shape[0], k), np.int64), scales_of(form, call.b[0].shape[0], k)
        integers[:, 0] = 3
        rows = call.a if row.layout[0] == "n" else np.swapaxes(call.a, -1, -2)
        rows[...] = 1023 * 2.0**-24
        rows[:, 0] = 1025
        infinite = ((np.inf, 1), (np.inf, -1), (-np.inf, 0), (2, np.inf), (-1, -np.inf)) if "affine" in form else ()
        for scale, bias in ((1, -2.5), *infinite):
            by = 1 if "affine" in form else 0.5
            b = made(form, layout, integers, np.full(groups, scale / by), np.full(groups, bias / by), dtype=DTYPES[row.dtype], factor=by)
            plain = Call(row, call.a, [b])
            if scale == 1:
                plain.c, plain.beta = np.full(plain.judged()[0][0].shape, -512.5, np.float16), 1.0
                plain._judged.clear()
            plain.check(device)


def test_weights_beside_their_zero(single_affine_row: Row, device: metalmm.Device) -> None:
    """At most a scale from zero between terms that are many, of each group another: one element of A, and C, leave nothing of the result
    but what small ones of A give."""
    row = single_affine_row
    form, layout = form_of(row)
    rng, top = np.random.default_rng(8), TOPS[form]
    for k in (128, 288, 896):
        call = draw(row, 3, 24, k)
        n, k = call.b[0].shape
        groups, by = scales_of(form, n, k), 1.0
        scales = rng.choice([0.37, 1, 0.011, -3.3], groups).astype(np.float16)
        if "affine" not in form:  # whole numbers, times a factor
            scales, by = rng.choice([4, 1, -3], groups).astype(np.float16), 0.37
        biases = (-scales * (rng.integers(0, top, groups) + rng.choice([0, 0.25, 0.499, 0.5], groups))).astype(np.float16)
        if "affine" not in form:
            biases = np.rint(biases)
        zeros = np.repeat(-biases.astype(np.float64) / scales, of_one_scale(form), axis=1)[:, :k]
        integers = np.clip(np.floor(zeros) + rng.integers(0, 2, (n, k)), 0, top).astype(np.int64)
        rows = call.a if row.layout[0] == "n" else np.swapaxes(call.a, -1, -2)
        rows[...] = 1023 * 2.0**-24
        rows[:, 0] = 1025
        plain = Call(row, call.a, [made(form, layout, integers, scales, biases, dtype=DTYPES[row.dtype], factor=by)])
        plain.c, plain.beta = -plain.judged()[0][0].astype(np.float16), 1.0
        plain._judged.clear()
        plain.check(device)


def test_sums_before_the_scale_do_not_overflow(wide_row: Row, device: metalmm.Device) -> None:
    """x * 127 may be past the largest float where x * 127 * scale is not."""
    row = wide_row
    call = with_weights(row, lambda q: scaled(q, lambda scales: scales.fill(0.001)), 8, 64)
    rows = call.a if row.layout[0] == "n" else np.swapaxes(call.a, -1, -2)
    rows[...] = 0
    rows[0, 0] = rows[0, 33] = 1e37
    call.check(device)


def test_the_half_block_behind_k_is_not_read(halves_row: Row, device: metalmm.Device) -> None:
    """Its scale may be anything: K may end in the first half."""

    def change(q: Any) -> Any:
        scales = q.scales.copy()
        last = scales[:, -1] if q.layout == "nk" else scales[-1]
        last[:, 1] = 0x7FC0
        return replace(q, scales=scales)

    for k in (33, 48, 304):
        with_weights(halves_row, change, 9, k).check(device)
