"""In debug mode: every element of every result is written once, no order of threads changes a bit, no vector is off its alignment."""

from __future__ import annotations

import dataclasses
from typing import Any

import metalmm
import numpy as np
import pytest
from metalmm import numerics
from support.here import DEVICE
from support.operands import Call, draw, placed
from support.rows import Row

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="the CPU device's debug mode")


def sizes(row: Row) -> list[tuple[int, int, int]]:
    """Three threadgroups along n, the last cut off: a debug device takes a hundred times as long for each."""
    if row.variant.tile[0] > 8:
        return [(33, 67, 37), (64, 128, 64)]
    n = min(2 * (row.variant.tile[1] or 64) + 3, 131)
    return [(3, n, 133), (2, n + 1, 276)]


def run_counted(call: Call, device: metalmm.Device) -> tuple[list[Any], list[Any]]:
    """Results, and how often each element of them was written."""
    outs = [np.full(reference.shape, np.nan, call.a.dtype) for reference, _ in call.judged()]
    counts = []
    for i in range(len(outs)):  # a device watches one array
        watched = dataclasses.replace(call, out=outs[0] if call.row.variant.swiglu else outs)
        of_this = device.count_writes(outs[i])
        watched.run(device)
        counts.append(of_this)
    return outs, counts


def test_every_element_is_written_once_in_any_order(debug_row: Row, device: metalmm.Device) -> None:
    """Threads, simdgroups and threadgroups in another order each time; no variant uses atomics, so that no bit may differ."""
    for m, n, k in sizes(debug_row):
        call = draw(debug_row, m, n, k, batch=2, bias=True)
        first: list[Any] = []
        for turn in range(2):
            outs, counts = run_counted(call, device)
            for out, count, (reference, bound) in zip(outs, counts, call.judged(), strict=True):
                assert (count == 1).all(), f"{debug_row}: elements are written {count.min()} to {count.max()} times"
                assert not numerics.mismatch(out, reference, bound)
            first = first or outs
            for one, other in zip(first, outs, strict=True):
                np.testing.assert_array_equal(one.view(np.uint16), other.view(np.uint16), err_msg=f"turn {turn}")


def test_no_vector_is_loaded_off_its_alignment(debug_row: Row, device: metalmm.Device) -> None:
    """Right on x86 either way, and not on a GPU."""
    for i, (m, n, k, seed) in enumerate(((3, 66, 128, 1), (37, 33, 131, 3), (3, 40, 448, 7))):  # of WAYS, those with a part off
        draw(debug_row, m, n, k, batch=2, bias=True, c=True, beta=1.0, exact=True, pad=i, seed=seed).check_equal(device)
    if ":" not in (storage := debug_row.variant.storage) and storage != "dense":  # rows of integers off 16 bytes beside an A on them
        call = draw(debug_row, 3, 66, 40, exact=True)
        call.a = placed(call.a, -call.a.shape[-1] % 8)
        call.check_equal(device)


def test_one_thing_alone_off_vectors(debug_row: Row, device: metalmm.Device) -> None:
    """Rows, matrices of a batch or the first element, of A or of one B: a kernel must look at each. Of quantized weights, their bytes. By
    ten elements, so that rows are a multiple of five apart. And a first element and matrices that are as far off: what is even in their
    difference is not in their sum. Of a tall tile, most of which is computed for nothing, half of it by turns."""
    every = ({"rows": 10}, {"matrices": 10}, {"begin": 10}, {"matrices": 5, "begin": 5})
    is_tall = debug_row.variant.tile[0] > 8
    call = draw(debug_row, max(3, debug_row.variant.tile[0]), 40, 160, batch=2, exact=True)
    given = [call.a, *call.b]
    for off in every[len(str(debug_row)) % 2 :: 2] if is_tall else every:
        for which in dict.fromkeys((0, 1, len(call.b))):  # A, the first B, the last
            offs = [off if i == which else {} for i in range(len(given))]
            call.a, *call.b = (standing(x, **its) if isinstance(x, np.ndarray) else x for x, its in zip(given, offs, strict=True))
            if isinstance(quantized := given[which], metalmm.QuantizedArray):
                line = standing(quantized.values.reshape(1, 1, -1), begin=4 if "begin" in off else 8)
                call.b[which - 1] = dataclasses.replace(quantized, values=line.reshape(quantized.values.shape))
            call.check_equal(device)
    zeros = [np.zeros(reference.shape, call.a.dtype) for reference, _ in call.judged()]
    outs = [standing(x, begin=5) for x in zeros]  # the result, too
    call.out = outs[0] if debug_row.variant.swiglu else outs
    call.check_equal(device)


def standing(x: Any, rows: int = 0, matrices: int = 0, begin: int = 0) -> Any:
    """The same numbers on vectors of eight, of bytes of sixteen, but for what is so many elements off them."""
    vector = 16 if x.itemsize == 1 else 8
    count, height = (x.shape[0] if x.ndim == 3 else 1), x.shape[-2]
    ld = -(-x.shape[-1] // vector) * vector + rows
    each = -(-height * ld // vector) * vector + matrices
    store = np.zeros(count * each + 64, x.dtype)
    flat = store[-(store.ctypes.data // x.itemsize) % vector + begin :]
    view = np.lib.stride_tricks.as_strided(flat, (count, height, x.shape[-1]), (each * x.itemsize, ld * x.itemsize, x.itemsize))
    view[...] = x
    return view if x.ndim == 3 else view[0]
