"""What a device needs of Python, one file for each kind: whether it is there, its options, how MSL becomes code for it, facts.

A file defines a class after :class:`Backend` and is named in `_BACKENDS`; a device's C++ is a folder of csrc that adds itself under the
same name. Nobody else compares the name of a device.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from .. import _core
from ..errors import DeviceError
from ..kernel_source import Code, Constants, KernelText, LibraryText
from . import cpu, cuda, metal

if TYPE_CHECKING:
    from ..device import Device


class Options(cpu.Options, cuda.Options, metal.Options, total=False):
    """All that a device may be told when it is made."""


class Backend(Protocol):
    """One kind of device.

    name: its own and that of its C++; options: what Device() may give it; libraries: matmuls that it has beside kernels; counts_barriers:
    whether Device.counters says how often threadgroups met; emulated: what variants may need and this device computes step by step; replays: where a launch costs more than a kernel, so many calls at least are
    recorded, and a benchmark's sample is a replay's time by their number; 0: a call by itself; together: how many kernels code_together takes at most; note: what a reader of its times must know; winners: what was measured best
    on such a device, as (layout, n, k, variant) of m=1 in float16; preferred: what "auto" takes of what is not known, the first that
    takes the operation.
    """

    name: str
    options: Sequence[str]
    libraries: Sequence[str]
    counts_barriers: bool
    emulated: Sequence[str]
    replays: int
    together: int
    note: str
    winners: Sequence[tuple[str, int, int, str]]
    preferred: Sequence[str]

    def checked(self, given: Mapping[str, Any]) -> dict[str, bool | int | float]:
        """All options for the C++, those of the user checked. Raises DeviceError naming the option, its value and the limit."""
        ...

    def library_text(self, device: Device, text: str, name: str, folders: Sequence[Path], defines: Mapping[str, Any]) -> LibraryText:
        """A user's MSL, preprocessed as far as the device's compiler wants it. Raises CompileError, LoweringError."""
        ...

    def code(self, device: Device, source: KernelText, kernel: str, constants: Constants) -> Code:
        """One kernel for the device. Raises CompileError, LoweringError."""
        ...

    def code_together(self, device: Device, sources: Sequence[tuple[KernelText, str]]) -> None:
        """Makes the code of up to `together` kernels at once where that is cheaper; `code` then finds it, or says what is wrong."""
        ...

    def library_file(self, library: str) -> str:
        """Where one of `libraries` lies, for one that is loaded when it is first asked for; empty for what the extension has."""
        ...

    def watching(self, timeout: float) -> dict[str, Any]:
        """Options of a device that tells of kernels which write elsewhere or take longer than `timeout` seconds, where it can."""
        ...

    def memory_gbps(self, device: Device) -> float | None:
        """What its memory moves, where somebody measured it on a GPU of that name."""
        ...

    def facts(self, device: Device) -> dict[str, str | None]:
        """What a report says of it beside Device.info: compiler, and summary, a line for its head."""
        ...


# In the order in which Device() looks for one; cpu is everywhere, so that cuda is for those who name it.
_BACKENDS: dict[str, Backend] = {b.name: b for b in (metal.BACKEND, cpu.BACKEND, cuda.BACKEND)}


def register(backend: Backend) -> None:
    """Adds a kind of device, whose C++ is in this build of the extension."""
    _BACKENDS[backend.name] = backend


def names() -> list[str]:
    return sorted(_BACKENDS)


def get(name: str) -> Backend:
    """Raises DeviceError for a name that no backend has."""
    if name not in _BACKENDS:
        raise DeviceError(f"no device '{name}'; there are: {', '.join(names())}")
    return _BACKENDS[name]


def available(name: str) -> list[str]:
    """Names of the devices of that kind on this machine."""
    return _core._device_names(name)


def first_available() -> str:
    """The kind of device that Device() makes where nobody names one."""
    return next(name for name in _BACKENDS if available(name))


def counting_barriers() -> str:
    """The name of the backend that does."""
    return next(name for name, b in _BACKENDS.items() if b.counts_barriers)


def debugging() -> str:
    """The name of the backend that has a debug mode."""
    return next(name for name, b in _BACKENDS.items() if "debug" in b.options)


def with_library(library: str) -> list[str]:
    """Names of the backends that have it."""
    return [name for name in names() if library in _BACKENDS[name].libraries]


def libraries() -> list[str]:
    return sorted({library for b in _BACKENDS.values() for library in b.libraries})


def options_of(backend: Backend, given: Mapping[str, Any]) -> dict[str, bool | int | float]:
    """Raises DeviceError for an option that the device does not have."""
    for key in given:
        if key not in backend.options:
            near = difflib.get_close_matches(key, backend.options, n=1)
            hint = f"; did you mean {near[0]}?" if near else f"; it has {', '.join(backend.options)}"
            raise DeviceError(f"{key}: device {backend.name} has no such option{hint}")
    return backend.checked({key: value for key, value in given.items() if value is not None})
