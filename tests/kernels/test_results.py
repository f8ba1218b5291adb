"""Every row against float64: sizes on both sides of every threshold, each epilogue, batches, strides, addresses, special values."""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import metalmm
import numpy as np
import pytest
from metalmm import numerics
from support.here import ALL_OF_IT, DEVICE, LINUX, SEED
from support.operands import draw, fit, placed, sizes_of
from support.pages import Pages
from support.rows import Row, is_large

EPILOGUES: dict[str, dict[str, Any]] = {
    "plain": {},
    "bias": {"bias": True},
    "alpha and beta": {"c": True, "alpha": 0.75, "beta": -1.5},
    "batch": {"batch": 3, "bias": True, "c": True, "alpha": 0.125, "beta": 0.5},
}


def turn_of(row: Row) -> int:
    return zlib.crc32(str(row).encode())


def in_turn(row: Row, of: tuple[Any, ...], count: int) -> tuple[Any, ...]:
    """So many of them, by turns of rows: of a tall tile, most of which is computed for nothing, that is enough."""
    return tuple(of[(turn_of(row) + i) % len(of)] for i in range(count))


def test_each_shape_and_epilogue_is_within_the_bound(row: Row, device: metalmm.Device) -> None:
    for i, (m, n, k) in enumerate(sizes_of(row)):
        chosen = list(EPILOGUES.values()) if (m, n, k) == fit(row, 8, 67, 133) else [list(EPILOGUES.values())[i % len(EPILOGUES)]]
        for j, epilogue in enumerate(chosen):
            draw(row, m, n, k, pad=i % 3, seed=i + i // 3 + j, **epilogue).check(device)


def test_long_sums_are_exact(row: Row, device: metalmm.Device) -> None:
    """The float64 bound at k = 4096 and more lets a whole term pass; here none may be missing, nor taken twice."""
    most = 1 if is_large(row.variant) else 2 if row.variant.tile[0] > 8 else 3
    for i, (n, k) in enumerate(((37, 4097), (16, 4096), (5, 9731))[:most]):
        call = draw(row, 3, n, k, exact=True, pad=i, seed=i)
        rows = np.swapaxes(call.a, -1, -2) if row.layout[0] == "t" else call.a
        rows[..., -1] = 1  # the last term is there
        call.check_equal(device)


def test_long_sums_are_as_good_as_those_of_float32(dense_row: Row, device: metalmm.Device) -> None:
    """The bound grows with k, and lets tensor cores' sums pass, which cut off what they add: here is what a benchmark asks, and twice
    what NumPy's float32 is off by."""
    row = dense_row
    call = draw(row, 9, 40, 8200, seed=5)
    (out,), ((reference, _),) = call.run(device), call.judged()
    a, b = (np.swapaxes(x, -1, -2) if swapped else x for x, swapped in ((call.a, row.layout[0] == "t"), (call.b[0], row.layout[1] == "t")))
    of_float32 = (a.astype(np.float32) @ b.astype(np.float32)).astype(out.dtype)
    (error, relative), (allowed, _) = numerics.max_abs_rel(out, reference), numerics.max_abs_rel(of_float32, reference)
    assert error <= 2 * allowed and relative <= (8e-3 if row.dtype == "bfloat16" else 1e-3), (row, error, allowed, relative)


def test_rows_further_apart_than_they_are_long(row: Row, device: metalmm.Device) -> None:
    """Padded operands, NaN between their rows; c among them, whose rows are at a distance of their own."""
    sizes = ((67, 130, 2), (64, 133, 3), (33, 1027, 5))
    for i, (n, k, pad) in enumerate(in_turn(row, sizes, 1) if row.variant.tile[0] > 8 else sizes):
        call = draw(row, 37, n, k, batch=2, bias=True, c=True, beta=1.0, exact=True, pad=pad, seed=i)
        if call.c is not None:
            call.c = placed(call.c, 2 * pad + 1, pad)
        call.check_equal(device)


@pytest.mark.skipif(DEVICE != "cpu" or not LINUX, reason="a GPU has a copy of the memory")
def test_nothing_is_read_or_written_outside_an_operand(row: Row, device: metalmm.Device, pages: list[Pages]) -> None:
    """Operands end, or begin, where a page does: by turns, of another row's sizes the other way."""
    sizes = ((3, 1, 1, 1), (3, 67, 133, 1), (3, 130, 61, 2), (3, 37, 896, 1), (3, 21, 928, 1), (3, 3, 1039, 1))
    sizes = in_turn(row, sizes, 3) if row.variant.tile[0] > 8 else sizes
    for i, (m, n, k, batch) in enumerate((*sizes, (40, 120, 128, 1))):  # the last: rows on vectors, cut off in a tile
        call = draw(row, m, n, k, batch=batch, bias=True, c=True, beta=1.0, exact=True, seed=i)
        free, end = iter(pages), (turn_of(row) + i) % 2 == 0

        def put(x: Any, free: Iterator[Pages] = free, end: bool = end) -> Any:
            if isinstance(x, metalmm.QuantizedArray):
                return replace(x, **{name: put(part) for name in ("values", "scales", "biases") if (part := getattr(x, name)) is not None})
            return next(free).put(x, end)

        call.a, call.b = put(call.a), [put(x) for x in call.b]
        call.bias, call.c = [put(x) for x in call.bias or []], None if call.c is None else put(call.c)
        outs = [put(np.zeros(reference.shape, call.a.dtype)) for reference, _ in call.judged()]
        call.out = outs[0] if row.variant.swiglu else outs
        call.check_equal(device)


def test_nan_and_infinity_are_where_float64_has_them(row: Row, device: metalmm.Device) -> None:
    call = draw(row, 3, 67, 133, bias=True, seed=3)
    assert call.bias
    for b in call.b:
        if isinstance(b, np.ndarray):
            rows = b if row.layout[1] == "t" else b.T  # (n, k)
            n, k = rows.shape
            for i, j, value in ((3, 5, np.nan), (4, 132, np.inf), (9, 0, -np.inf), (n - 1, 131, np.nan), (7, 1, np.inf), (7, 2, -np.inf)):
                rows[i % n, j % k] = value
    call.bias[0][1 % call.bias[0].size], call.bias[-1][2 % call.bias[-1].size] = np.inf, np.nan
    call.check(device)
    call.a[..., 0, 50 % call.a.shape[-1]] = np.inf
    call._judged.clear()
    call.check(device)


@pytest.mark.parametrize("turn", range(2 if ALL_OF_IT else 1))
def test_skewed_shapes_strides_and_special_values(row: Row, device: metalmm.Device, turn: int) -> None:
    drawn = random.Random(f"{row} {turn + SEED}")

    def size() -> int:
        return drawn.randint(1, 40) if drawn.random() < 0.5 else drawn.randint(41, 400)

    call = draw(
        row, drawn.randint(1, 70), size(), size(), batch=drawn.randint(1, 3), bias=drawn.random() < 0.5, c=True,
        alpha=drawn.choice([1.0, 0.125, -2.0, 0.0, 3.1e4]), beta=drawn.choice([0.0, 1.0, 0.3]), pad=drawn.randint(0, 5), seed=drawn.randint(0, 99),
    )  # fmt: skip
    greatest = 65504.0 if row.dtype == "float16" else 1e18  # of two the product is still a float32
    for x in (call.a, *(b for b in call.b if isinstance(b, np.ndarray)), call.c, *(call.bias or [])):
        for value in drawn.choices([np.nan, np.inf, -np.inf, greatest, 6e-8], k=drawn.randint(0, 2)) if x is not None else []:
            x[np.unravel_index(drawn.randrange(x.size), x.shape)] = value
    with np.errstate(all="ignore"):
        call.check(device)
