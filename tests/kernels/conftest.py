"""One fixture: a row of the array, compiled with its neighbours, on a device of its own for each compiler."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import metalmm
import pytest
from metalmm import kernel_source, modules, pipelines
from metalmm.compiler import Compiler
from metalmm.quantized import FORMATS
from support import coverage, parts
from support.changed import changed_kernels
from support.here import DEVICE
from support.pages import Pages
from support.rows import SOURCES, Row, array, debug_array, first_of, known, on_tensor_cores


def _is_changed(source: kernel_source.KernelText) -> bool:
    """Ours but for a line."""
    return "changed-kernels" in source.name


class _Kernel(modules._Kernel):
    """Changed copies, as what stands in for tensor cores, serve no user: -O1 saves a third of their compilation."""

    def __init__(self, job: modules.Job, cxx: Compiler) -> None:
        super().__init__(job, cxx)
        if _is_changed(job.source) and not job.debug:
            self.flags = ["-O1" if flag == "-O3" else flag for flag in self.flags]


modules._Kernel = _Kernel
modules.may_stand_beside_others = lambda source: source.is_ours or _is_changed(source)
_inlined, _inlined_once = kernel_source.inline_includes, functools.cache(kernel_source.inline_includes)
kernel_source.inline_includes = lambda path: (_inlined_once if path.is_relative_to(kernel_source.KERNELS) else _inlined)(path)
TENSOR_CORES = coverage.tensor_cores() if DEVICE == "cpu" else []


_ROW_FIXTURES = ("row", "dense_row", "quantized_row", "affine_row", "single_affine_row", "halves_row", "wide_row", "debug_row")


def sort_key(row: Row) -> tuple[Any, ...]:
    return row.debug, row.compiler, on_tensor_cores(row.variant), row.variant.kernel, row.variant.storage, str(row)


def spread(rows: list[Row]) -> list[Row]:
    """What has something new of its strategy comes before the rest: the sooner fails what a mutant has broken."""
    seen, first = set[tuple[str, str]](), dict[Row, None]()
    for row in rows:
        v = row.variant
        has = {(v.family, x) for x in (v.kernel, v.storage, v.end, v.family, row.dtype, row.layout)}
        if has - seen:
            seen |= has
            first[row] = None
    return [*first, *(row for row in rows if row not in first)]


def of_this_part(rows: list[Row]) -> list[Row]:
    first = set(first_of(rows)) if parts.PART else ()
    return sorted((row for row in rows if parts.takes(row in first, str(row))), key=sort_key)


ROWS = of_this_part([*array(), *array(TENSOR_CORES)])
ROWS = spread(ROWS)[:60] if SOURCES else ROWS
DEBUG_ROWS = of_this_part(debug_array([*known(), *TENSOR_CORES])) if DEVICE == "cpu" else []


@functools.cache
def _on_cpu() -> dict[str, metalmm.Variant]:
    return changed_kernels("cpu_")


def _runnable(row: Row) -> Row:
    """Of one that tensor cores alone run, the same on a stand-in for them."""
    if DEVICE != "cpu" or not on_tensor_cores(row.variant):
        return row
    return replace(row, variant=_on_cpu()[row.variant].of(row.variant.storage, row.variant.end))


@functools.cache
def device_for(compiler: str, debug: bool, memory: int = 32 << 10) -> metalmm.Device:
    return metalmm.Device(DEVICE, **({"debug": debug, "threadgroup_memory_limit": memory} if DEVICE == "cpu" else {}))


@contextlib.contextmanager
def compiled_by(row: Row) -> Iterator[None]:
    before = os.environ.get("METALMM_CXX")
    if DEVICE == "cpu":
        os.environ["METALMM_CXX"] = row.compiler
    try:
        yield
    finally:
        os.environ.pop("METALMM_CXX", None)
        if before is not None:
            os.environ["METALMM_CXX"] = before


@functools.cache
def _compile_group(rows: tuple[Row, ...]) -> None:
    runnable = [_runnable(row) for row in rows]
    with compiled_by(rows[0]):
        pipelines.compile_together(device_for(rows[0].compiler, rows[0].debug), [(str(r.variant), r.specialization) for r in runnable])


def groups_of(rows: list[Row]) -> dict[Row, tuple[Row, ...]]:
    """Neighbours of one compiler."""
    found, most = dict[Row, tuple[Row, ...]](), modules.MOST_TOGETHER
    for compiler in dict.fromkeys(row.compiler for row in rows):
        those = [row for row in rows if row.compiler == compiler]
        for i in range(0, len(those), most):
            found.update(dict.fromkeys(those[i : i + most], tuple(those[i : i + most])))
    return found


GROUPS = {**groups_of(ROWS), **groups_of(DEBUG_ROWS)}


def _prepared(row: Row) -> Iterator[Row]:
    if DEVICE == "cpu":
        _compile_group(GROUPS[row])
    with compiled_by(row):
        yield _runnable(row)


@pytest.fixture(scope="session", params=ROWS, ids=str)
def row(request: pytest.FixtureRequest) -> Iterator[Row]:
    yield from _prepared(request.param)


DENSE_ROWS = [row for row in ROWS if row.variant.storage == "dense" and row.variant.matrix_count == 1 and row.dtype != "float32"]


@pytest.fixture(scope="session", params=DENSE_ROWS, ids=str)
def dense_row(request: pytest.FixtureRequest) -> Iterator[Row]:
    """Of one matrix of 16-bit numbers."""
    yield from _prepared(request.param)


QUANTIZED_ROWS = [row for row in ROWS if row.variant.storage != "dense"]
BIASED_ROWS = [row for row in QUANTIZED_ROWS if FORMATS[row.variant.storage.partition(":")[0]].has_bias]
AFFINE_ROWS = [row for row in BIASED_ROWS if "affine" in row.variant.storage]


@pytest.fixture(scope="session", params=QUANTIZED_ROWS, ids=str)
def quantized_row(request: pytest.FixtureRequest) -> Iterator[Row]:
    yield from _prepared(request.param)


@pytest.fixture(scope="session", params=AFFINE_ROWS, ids=str)
def affine_row(request: pytest.FixtureRequest) -> Iterator[Row]:
    yield from _prepared(request.param)


@pytest.fixture(scope="session", params=[r for r in BIASED_ROWS if r.variant.matrix_count == 1 and r.dtype == "float16"], ids=str)
def single_affine_row(request: pytest.FixtureRequest) -> Iterator[Row]:
    """Of one matrix, in float16."""
    yield from _prepared(request.param)


@pytest.fixture(scope="session", params=[r for r in QUANTIZED_ROWS if r.variant.storage.startswith("nvfp4")], ids=str)
def halves_row(request: pytest.FixtureRequest) -> Iterator[Row]:
    yield from _prepared(request.param)


WIDE_ROWS = [r for r in QUANTIZED_ROWS if r.dtype != "float16" and not r.variant.swiglu and r not in BIASED_ROWS]


@pytest.fixture(scope="session", params=WIDE_ROWS, ids=str)
def wide_row(request: pytest.FixtureRequest) -> Iterator[Row]:
    """Of types whose numbers may be large, without biases."""
    yield from _prepared(request.param)


@pytest.fixture(scope="session", params=DEBUG_ROWS, ids=str)
def debug_row(request: pytest.FixtureRequest) -> Iterator[Row]:
    yield from _prepared(request.param)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All tests of a group one after another, so that one process compiles it."""
    number = {row: i for i, row in enumerate([*ROWS, *DEBUG_ROWS])}

    def of(item: pytest.Item) -> int:
        params = item.callspec.params.values() if isinstance(item, pytest.Function) and hasattr(item, "callspec") else ()
        return next((number.get(x, -1) for x in params if isinstance(x, Row)), -1)

    mine = [item for item in items if of(item) >= 0]
    others = [item for item in items if of(item) < 0]
    items[:] = [*others, *sorted(mine, key=of)]


@pytest.fixture
def device(request: pytest.FixtureRequest) -> metalmm.Device:
    """Of the row's compiler."""
    row: Row = request.getfixturevalue(next(name for name in _ROW_FIXTURES if name in request.fixturenames))
    return device_for(row.compiler, row.debug, (227 if "wgmma" in row.variant.needs else 32) << 10)


@pytest.fixture(autouse=True)
def _nothing_else_is_compiled(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A case that does not fit its row's instance would cost a compilation, and prove it of another instance."""
    if DEVICE != "cpu" or not set(_ROW_FIXTURES) & set(request.fixturenames):
        return
    real = modules._compile

    def refuse(kernel: Any, lowered: str, target: Any) -> None:
        if "metalmm_unit" in lowered:
            return real(kernel, lowered, target)
        raise AssertionError(f"{kernel.job.kernel} is compiled outside of its group")

    monkeypatch.setattr(modules, "_compile", refuse)


@pytest.fixture(scope="session")
def pages() -> list[Pages]:
    return [Pages() for _ in range(18)]


@pytest.fixture(scope="session")
def every_variant() -> list[metalmm.Variant]:
    return [*known(), *TENSOR_CORES]
