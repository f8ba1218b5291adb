"""Pipelines of variants: one when a call first asks for it, or all of a run's beforehand on all cores."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from . import _core, kernel_source, manifest
from .device import Device
from .errors import Error
from .variant import Variant

T = TypeVar("T")
Needed = tuple[str, int]  # a variant's id and a specialization: what Variant.instance takes


def build_pipeline(device: Device, variant: str, specialization: int) -> tuple[Any, ...]:
    """A variant's kernel as the device takes it; the extension asks for it on the first use."""
    v, text, name = manifest.kernel_text(variant, specialization)
    if not text:
        return kernel_source.Code("", file=device.backend.library_file(v.library)).as_tuple()
    return device.backend.code(device, text, name, {}).as_tuple()


def compile_together(device: Device, needed: Iterable[Needed]) -> None:
    """Makes the code of some kernels at once, so that building each pipeline finds it; what goes wrong says so then."""
    with contextlib.suppress(Error, OSError):
        made = [manifest.kernel_text(*one) for one in needed]
        device.backend.code_together(device, [(text, name) for _, text, name in made if text])


def compilers(device: Device) -> int:
    """How many compile at a time: as many as threads work for the device; for a GPU, all CPUs that this process may use.

    On device metal it is untried: the system may compile fewer at a time."""
    return device.threads or (len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1)


def in_groups(device: Device, work: Sequence[T]) -> list[list[T]]:
    """Neighbours that are compiled together, in groups small enough that every compiler has work."""
    most = max(1, min(device.backend.together, -(-len(work) // compilers(device))))
    return [list(work[i : i + most]) for i in range(0, len(work), most)]


def compile_all(
    device: Device, operations: Iterable[tuple[Variant, _core.MatmulSpec]], begin: Callable[[int], None], step: Callable[[], None]
) -> dict[Needed, Error]:
    """The pipeline of every operation, on all cores. begin and step: told how many there are, and of each that is through.

    Returns the errors of those that do not compile.
    """
    specs = {(str(v), _core._specialization(spec)): spec for v, spec in operations}
    failures: dict[Needed, Error] = {}

    def build(group: list[Needed]) -> None:
        if len(group) > 1:
            compile_together(device, group)
        for one in group:
            try:
                _core._prepare_pipeline(device, one[0], specs[one])
            except Error as error:
                failures[one] = error
            step()

    begin(len(specs))
    pool = ThreadPoolExecutor(max_workers=compilers(device))
    try:
        for _ in pool.map(build, in_groups(device, sorted(specs, key=lambda one: (manifest.get(one[0]).kernel, one)))):
            pass
    finally:
        pool.shutdown(cancel_futures=True)  # Ctrl-C: what has begun ends, the rest does not begin
    return failures
