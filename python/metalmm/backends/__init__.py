"""What a device needs of Python, one file for each kind: whether it is there, its options, how MSL becomes code for it, facts.

A file defines a class after :class:`protocol.Backend` and is named in `_BACKENDS`; a device's C++ is a folder of csrc that adds itself under the
same name. Nobody else compares the name of a device.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from .. import _core
from ..errors import DeviceError
from ..kernel_source import Constants, KernelText
from . import cpu, cuda, metal
from .protocol import Backend


class Options(cpu.Options, cuda.Options, metal.Options, total=False):
    """All that a device may be told when it is made."""


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


def registers(source: KernelText, kernel: str, constants: Constants) -> int:
    """How many a thread of the kernel has, as the first backend says that knows; 0: none does."""
    return next((count for b in _BACKENDS.values() if (count := b.registers(source, kernel, constants))), 0)


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
