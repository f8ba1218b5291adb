"""What the array covers: a gap is an error here, and the figures are what README says."""

from __future__ import annotations

from typing import Any

import metalmm
import pytest
from support import coverage
from support.here import ALL_OF_IT, COMPILERS, DEVICE
from support.operands import sizes_of
from support.rows import (
    Row,
    What,
    array,
    debug_array,
    first_of,
    format_pairs_of,
    kinds,
    known,
    on_tensor_cores,
    possible,
    values_of,
    walks_are_free,
    ways_of,
)

ROWS = array()


def test_every_id_has_a_row(every_variant: list[metalmm.Variant]) -> None:
    without = {str(v) for v in every_variant} - {str(row.variant) for row in [*ROWS, *array(every_variant)]}
    assert not without
    assert set(every_variant) >= set(kinds(metalmm.variants())) or DEVICE != "cpu"


def what_is_there(row: Row) -> set[tuple[Any, ...]]:
    """What the array has to have of this instance."""
    what, b = What.of(row.variant), row.layout[1]
    if what.form == "dense":
        return {(what, b, row.dtype), (what, row.compiler), (row.dtype, row.compiler)}
    alike, of_form = (what.kernel, what.end, what.tensor_cores), (what.form, what.tensor_cores)
    found = format_pairs_of(row) | {(*alike, x) for x in (what.layout, row.dtype)}
    if what.end == "1":
        found |= {(*alike, what.form), (*of_form, what.layout)}
        found |= {(*alike, what.form, "float16")} if row.dtype == "float16" else set()
    if not what.tensor_cores:
        found |= {(*alike, row.compiler), (what.form, row.compiler), (row.dtype, row.compiler)}
    return found


def test_every_kernel_has_each_type_layout_and_compiler() -> None:
    """As the registry says what each takes; A's layouts and ways through the columns with each part of it."""
    have = set[tuple[Any, ...]]().union(*map(what_is_there, ROWS))
    ways = set[tuple[Any, ...]]().union(*map(ways_of, ROWS))
    for row in possible(known(), COMPILERS if DEVICE == "cpu" else ["-"]):
        assert what_is_there(row) <= have, row
        assert walks_are_free(What.of(row.variant)) or ways_of(row) <= ways, row
    cores = coverage.tensor_cores() if DEVICE == "cpu" else []
    have = set().union(*map(what_is_there, array(cores))) if cores else set()
    for row in possible(cores, COMPILERS[-1:]):
        assert what_is_there(row) <= have, row


@pytest.mark.skipif(DEVICE != "cpu", reason="of device cpu alone")
def test_what_each_change_needs_has_each_template(every_variant: list[metalmm.Variant]) -> None:
    """With all that its rows of the array have, if not in pairs; and of debug mode each file."""
    rows = [*ROWS, *array(coverage.tensor_cores())]
    debug = debug_array(every_variant)
    first, of_debug = first_of(rows), first_of(debug)
    assert {*first} < {*rows} and {*of_debug} < {*debug}, "it is a part"

    def parts(row: Row) -> set[tuple[Any, ...]]:
        v = row.variant
        its = (v.end.replace("3", "2"), row.dtype, row.layout, row.compiler, *((name, value > 1) for name, value in v.params.items()))
        return {(v.kernel, x) for x in its} | {(on_tensor_cores(v), What.of(v).form)}

    assert set().union(*map(parts, first)) == set().union(*map(parts, rows))
    assert {row.variant.source for row in of_debug} == {row.variant.source for row in debug}


def test_each_format_is_there_at_each_end(every_variant: list[metalmm.Variant]) -> None:
    """On device cpu, or with the stand-in for tensor cores."""
    if DEVICE != "cpu":
        pytest.skip("with the stand-in both are one suite")
    ends = {(what.form, what.end) for what in map(What.of, every_variant)}
    assert ends == {(what.form, what.end) for what in (What.of(row.variant) for row in [*ROWS, *array(coverage.tensor_cores())])}


def test_debug_mode_has_each_strategy_with_each_format_and_end(every_variant: list[metalmm.Variant]) -> None:
    if DEVICE != "cpu":
        pytest.skip("debug mode is the CPU device's")
    have = set().union(*(What.of(row.variant).pairs() for row in debug_array(every_variant)))
    assert have == set().union(*(What.of(v).pairs() for v in every_variant))
    compiled = [row.variant for row in debug_array(every_variant)]
    for way in (lambda p: p.get("split", 1) > 1, lambda p: (p.get("wide", False), p.get("rows", 1) > 1)):
        assert {(v.kernel, way(v.params)) for v in compiled} == {(v.kernel, way(v.params)) for v in every_variant}


def test_every_field_of_an_operation_is_an_axis() -> None:
    """A new field of MatmulSpec, or a new entry of what a variant supports, has to be added to the array or to its calls; row_invariant has
    tests/devices/test_row_invariant.py."""
    fields = {name for name in dir(metalmm.MatmulSpec) if not name.startswith("_")}
    axes = {"m", "n", "k", "batch", "transpose_a", "transpose_b", "bias", "alpha", "beta", "dtype", "b_storage", "also_n", "swiglu"}
    assert fields - axes == {"layout", "least_bytes", "b_bytes", "row_invariant"}
    supports = {key for row in ROWS for key in row.variant.supports}
    assert supports <= {"m", "n", "k", "batch", "layouts", "bias", "c", "alpha", "row_invariant"}


def test_the_figures_are_what_readme_says() -> None:
    if DEVICE != "cpu" or len(COMPILERS) < 2 or ALL_OF_IT:
        pytest.skip("README has those of the CPU suite with both compilers")
    assert coverage.sentence() in coverage.README.read_text(), f"README should say: {coverage.sentence()}"


def test_the_shapes_of_every_row_have_both_sides_of_its_tile() -> None:
    """Below, at and above bn."""
    for row in ROWS:
        columns, bn = {n for _, n, _ in sizes_of(row)}, row.variant.tile[1]
        assert bn <= 1 or (any(n % bn == 0 for n in columns) and any(n % bn for n in columns)), row


def test_every_value_of_a_parameter_is_there_with_each_kernel(every_variant: list[metalmm.Variant]) -> None:
    rows = [*ROWS, *array([v for v in every_variant if on_tensor_cores(v)])]
    have = set().union(*(values_of(row.variant, row.dtype) for row in rows))
    missing = set().union(*(values_of(v, "") for v in every_variant)) - have
    assert not [value for value in missing if not value[-1]]
