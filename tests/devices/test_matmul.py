"""A call of matmul on every device: one id of each strategy and each library, what is refused, what C and B may be."""

from __future__ import annotations

from typing import Any

import metalmm
import numpy as np
import pytest
from metalmm.variant import LAYOUTS
from support.here import DEVICE, ON_A_FAKE
from support.numbers import right
from support.operands import Call, draw, placed
from support.rows import Row, What, array, known

ALL = [v for v in metalmm.variants(device=metalmm.default_device()) if v.storage == "dense"]
LIBRARIES = [v for v in ALL if v.library]
# Of each strategy, format and end the last row. On a fake, of each strategy and end.
STRATEGIES = {
    (row.variant.kernel, row.variant.end) if ON_A_FAKE else What.of(row.variant): row
    for row in (array(known()) if DEVICE != "cpu" else ())  # there tests/kernels runs every row
    if row.dtype == "float16" or not ON_A_FAKE
}
OF_ALL = [Row(v, dtype, layout, "-") for v in LIBRARIES for dtype in v.types for layout in v.supports["layouts"]]
OF_LIBRARIES = [row for row in OF_ALL if row.variant.supports.get("bias", True)]


@pytest.mark.parametrize("row", [*STRATEGIES.values(), *OF_LIBRARIES], ids=str)
def test_each_strategy_computes(row: Row, device: metalmm.Device) -> None:
    for i, (m, n, k) in enumerate(((3, 67, 133), (5, 64, 96))):
        draw(row, m, n, k, batch=2, bias=True, c=True, alpha=0.5, beta=-1.5, seed=i).check(device)


@pytest.mark.parametrize("row", OF_LIBRARIES, ids=str)
def test_libraries_are_within_the_bound(row: Row, device: metalmm.Device) -> None:
    epilogues: list[dict[str, Any]] = [{}, {"bias": True}, {"c": True, "alpha": 0.75, "beta": -1.5}]
    for i, (m, n, k) in enumerate(((1, 1, 1), (1, 64, 64), (17, 63, 65), (2, 131, 257), (64, 5, 1031), (1, 51, 896), (257, 19, 37))):
        draw(row, m, n, k, pad=i % 3, seed=i, **epilogues[i % 3]).check(device)
        draw(row, m, n, 4 * k, pad=i % 2, seed=i, exact=True).check_equal(device)
    call = draw(row, 5, 67, 133, batch=2, bias=True, c=True, beta=1.0, exact=True, pad=3)
    call.a, call.c = placed(call.a, 2, 1), placed(call.c, 5, 3)
    call.check_equal(device)
    call = draw(row, 3, 40, 70, bias=True)
    assert call.bias
    call.a.flat[5], call.b[0].flat[7], call.bias[0][1] = np.inf, np.nan, -np.inf
    call.check(device)


@pytest.mark.parametrize("row", [row for row in OF_ALL if row not in OF_LIBRARIES], ids=str)
def test_a_library_without_bias_and_gaps_is_within_the_bound(row: Row, device: metalmm.Device) -> None:
    for i, (m, n, k) in enumerate(((1, 1, 1), (1, 64, 64), (17, 63, 65), (2, 131, 257), (64, 5, 1031), (1, 51, 896), (257, 19, 37))):
        packed(draw(row, m, n, k, alpha=0.75, seed=i)).check(device)
        packed(draw(row, m, n, 4 * k, seed=i, exact=True)).check_equal(device)
    packed(draw(row, 5, 67, 133, batch=2, exact=True)).check_equal(device)


def packed(call: Call) -> Call:
    """Without gaps between rows."""
    call.a, call.b = np.ascontiguousarray(call.a), [np.ascontiguousarray(b) for b in call.b]
    return call


@pytest.mark.parametrize("v", [v for v in ALL if v.supports.get("m") == 1])
def test_one_row_families_refuse_more_rows(v: metalmm.Variant, device: metalmm.Device) -> None:
    transpose_b = "nt" in v.supports["layouts"]
    a, b = np.ones((2, 9), np.float16), np.ones((9, 9), np.float16)
    with pytest.raises(metalmm.UnsupportedError, match=r"m=2 is not 1; supported by .* and \d+ more"):
        metalmm.matmul(v, a, b, transpose_b=transpose_b, device=device)


@pytest.mark.parametrize("v", ALL)
def test_other_layouts_are_refused(v: metalmm.Variant) -> None:
    for layout in LAYOUTS:
        m = 2 if v.supports.get("m") != 1 else 1
        k = v.supports.get("k", {}).get("min", 8)
        spec = metalmm.MatmulSpec(m=m, n=4, k=k, transpose_a=layout[0] == "t", transpose_b=layout[1] == "t")
        assert (layout in v.supports["layouts"]) != ("layout" in v.lacks(spec))


def test_shared_b_and_batched_b_agree(device: metalmm.Device) -> None:
    rng = np.random.default_rng(5)
    a, b = rng.standard_normal((5, 3, 40)).astype(np.float16), rng.standard_normal((40, 24)).astype(np.float16)
    shared = metalmm.matmul("gemm_tiled/baseline", a, b, device=device)
    batched = metalmm.matmul("gemm_tiled/baseline", a, np.broadcast_to(b, (5, 40, 24)).copy(), device=device)
    np.testing.assert_array_equal(shared, batched)
    nowhere = metalmm.matmul("gemm_tiled/baseline", a, np.broadcast_to(b, (5, 40, 24)), device=device)  # its matrices are one
    np.testing.assert_array_equal(shared, nowhere)
    options: dict[str, Any] = {"c": rng.standard_normal((3, 24)).astype(np.float16), "beta": 2.0}
    right(metalmm.matmul("gemm_tiled/baseline", a, b, device=device, **options), a, b, **options)


def test_rows_of_a_batch_of_one_may_stand_apart(device: metalmm.Device) -> None:
    rng = np.random.default_rng(6)
    a, b = rng.standard_normal((1, 3, 48)).astype(np.float16)[:, :, :40], rng.standard_normal((1, 40, 32)).astype(np.float16)[:, :, :24]
    right(metalmm.matmul("gemm_tiled/baseline", a, b, device=device), a, b)


def test_distances_that_nobody_walks_do_not_count(device: metalmm.Device) -> None:
    """Of a single row, or a single column: NumPy leaves any number there."""
    one = np.lib.stride_tricks.as_strided(np.ones(8, np.float16), (1, 8), (0, 2))
    column = np.lib.stride_tricks.as_strided(np.ones(8, np.float16), (8, 1), (2, 0))
    np.testing.assert_array_equal(metalmm.matmul("gemm_tiled/baseline", one, column, device=device), [[8]])
    with pytest.raises(metalmm.LayoutError, match="rows that overlap"):
        metalmm.matmul("gemm_tiled/baseline", one, np.lib.stride_tricks.as_strided(column, (8, 1), (0, 0)), device=device)


def test_c_is_not_read_where_beta_is_zero(device: metalmm.Device) -> None:
    a, b = np.ones((1, 8), np.float16), np.ones((8, 8), np.float16)
    out = metalmm.matmul("gemv/baseline", a, b, c=np.full((1, 8), np.nan, np.float16), beta=0.0, device=device)
    np.testing.assert_array_equal(out, np.full((1, 8), 8))


def test_c_may_be_out(device: metalmm.Device) -> None:
    a, b = np.ones((1, 8), np.float16), np.ones((8, 8), np.float16)
    y = np.full((1, 8), 3, np.float16)
    metalmm.matmul("gemv/baseline", a, b, c=y, beta=1.0, out=y, device=device)
    np.testing.assert_array_equal(y, np.full((1, 8), 11))


def test_a_point_that_does_not_ship_is_called_and_not_listed(device: metalmm.Device) -> None:
    known = metalmm.variants()
    assert "gemv_nt/l16_c3_d2_tg96" not in known
    a = np.ones((1, 40), np.float16)
    out = metalmm.matmul("gemv_nt/l16_c3_d2_tg96", a, np.ones((7, 40), np.float16), transpose_b=True, device=device)
    np.testing.assert_array_equal(out, np.full((1, 7), 40.0, np.float16))
    assert metalmm.variants() == known, "what was called is no choice of anyone's"
