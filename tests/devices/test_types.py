"""Operand types: mixtures and conversions are refused, overlaps are found in bytes."""

from __future__ import annotations

import metalmm
import numpy as np
import pytest
from support.operands import DTYPES, draw
from support.rows import Row

LACKING = [(v, dtype) for v in metalmm.variants(device=metalmm.default_device()) for dtype in v.without]


@pytest.mark.parametrize(("v", "dtype"), LACKING, ids=str)
def test_a_type_that_a_variant_lacks_is_refused_with_the_reason(v: metalmm.Variant, dtype: str, device: metalmm.Device) -> None:
    call = draw(Row(v, dtype, v.supports["layouts"][0], frozenset(), "-"), 2, 32, 64)
    assert len(v.without[dtype]) > 20
    with pytest.raises(metalmm.UnsupportedError, match=f"{v}: it does not take {dtype}: .{{20,}}; supported by"):
        call.run(device)


def test_a_mixture_is_refused_and_names_the_operand(device: metalmm.Device) -> None:
    arrays = {t: np.ones((1, 8), d) for t, d in DTYPES.items()}
    w = {t: np.ones((8, 8), d) for t, d in DTYPES.items()}
    for first in DTYPES:
        for other in DTYPES:
            if first == other:
                assert metalmm.matmul("gemv/baseline", arrays[first], w[first], device=device).dtype == DTYPES[first]
                continue
            with pytest.raises(metalmm.DTypeError, match=rf"b \(8, 8\) is {other} and a is {first}"):
                metalmm.matmul("gemv/baseline", arrays[first], w[other], device=device)
            with pytest.raises(metalmm.DTypeError, match=rf"c \(1, 8\) is {other} and a is {first}"):
                metalmm.matmul("gemv/baseline", arrays[first], w[first], c=arrays[other], beta=1.0, device=device)
            with pytest.raises(metalmm.DTypeError, match=rf"bias \(8,\) is {other}"):
                metalmm.matmul("gemv/baseline", arrays[first], w[first], bias=arrays[other][0], device=device)
            with pytest.raises(metalmm.DTypeError, match=rf"out \(1, 8\) is {other}"):
                metalmm.matmul("gemv/baseline", arrays[first], w[first], out=arrays[other].copy(), device=device)
    with pytest.raises(metalmm.DTypeError, match="is float64; it takes float16, bfloat16 or float32"):
        metalmm.matmul("gemv/baseline", np.ones((1, 8)), np.ones((8, 8)), device=device)


def test_overlaps_are_found_in_bytes(device: metalmm.Device) -> None:
    for dtype in DTYPES.values():
        store, b = np.ones(40, dtype), np.ones((12, 20), dtype)
        a = store[:12].reshape(1, 12)
        for first in (0, 5, 8, 11):
            with pytest.raises(metalmm.LayoutError, match=r"out .* overlaps a"):
                metalmm.matmul("gemv/baseline", a, b, out=store[first : first + 20].reshape(1, 20), device=device)
        assert (metalmm.matmul("gemv/baseline", a, b, out=store[12:32].reshape(1, 20), device=device) == 12).all()
