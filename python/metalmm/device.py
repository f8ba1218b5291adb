"""Devices, and MSL libraries compiled at run time."""

from __future__ import annotations

import atexit
import contextlib
import os
import platform
import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, Unpack

import numpy as np

from . import _core, backends, kernel_source
from .errors import ArgumentError, ClosedError, CompileError, DeviceError
from .fork import Lock

open_devices: weakref.WeakSet[Device] = weakref.WeakSet()


class Device(_core.Device):
    """A device that kernels run on. A context manager: leaving it closes the device.

    Args:
        name: "metal", an Apple GPU; "cpu", the machine's cores running the same .metal files; or "cuda", an NVIDIA GPU. By default it is
            $METALMM_DEVICE, else metal where there is one, else cpu.
        autotune: When a shape is first used, the best few of the rule behind "auto" are measured, for a second or two. The fastest is kept
            in the tuning file (docs/decide.md).
        options: Of that device, as the class Options in metalmm.backends.metal, metalmm.backends.cpu or metalmm.backends.cuda has them.

    Attributes:
        backend: Its metalmm.backends.Backend.
        options: Those it was made with, defaults included.

    Raises DeviceError for an unknown name, an option that the device does not have, a GPU that is not there, and threads that the system
    does not give.
    """

    def __init__(self, name: str | None = None, *, autotune: bool = False, **options: Unpack[backends.Options]) -> None:
        if not isinstance(autotune, bool):
            raise ArgumentError(f"Device: autotune is {autotune!r}; it takes True or False")
        if name is not None and not isinstance(name, str):
            raise ArgumentError(f"Device: name is {name!r}; it takes one of {', '.join(backends.names())}")
        self.backend = backends.get(name or os.environ.get("METALMM_DEVICE") or backends.first_available())
        self.options = backends.options_of(self.backend, options)
        self.autotune = autotune
        self._kernels: dict[tuple[str, str], _core.Kernel] = {}  # of matmul_gathered
        super().__init__(self.backend.name, self.options)
        open_devices.add(self)

    def close(self) -> None:
        """Waits for all that was submitted and ends the device. Its arrays, prepared calls and batches raise ClosedError afterwards."""
        self._kernels.clear()
        super().close()

    def __enter__(self) -> Self:
        if self.closed:
            raise ClosedError("the device was closed; make a new metalmm.Device")
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def threads(self) -> int | None:
        """OS threads that work for it; None on a GPU."""
        threads = self.info.get("threads")
        return None if threads is None else int(threads)

    def compile(
        self,
        source: str | Path,
        include_dirs: Sequence[str | Path] = (),
        defines: Mapping[str, bool | int | float | str | None] | None = None,
    ) -> Library:
        """A library of the kernels in MSL source text, or in a file if `source` is a Path or a path that ends in .metal or .h.

        include_dirs: where its quoted includes are looked for, beside its own folder and metalmm's headers. defines: macros.
        Raises CompileError with the compiler's text, LoweringError naming file, line and construct.
        """
        return Library(self, source, include_dirs, defines)

    def count_writes(self, out: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Counts, for each two bytes of `out` (a C-contiguous NumPy array), of the writes of kernels from now on; on a debug device. A
        count of 255 means that many or more.

        Raises DeviceError on any other.
        """
        if not isinstance(out, np.ndarray):
            raise ArgumentError(f"count_writes: out is {type(out).__name__}; it takes a NumPy array")
        counts = np.zeros(out.nbytes // 2, np.uint8)
        self._watch(out, counts)
        self._watched = (out, counts)  # kernels write there for as long as the device lives
        return counts

    def __repr__(self) -> str:
        if self not in open_devices:  # an error made it no device
            return "metalmm.Device(not made)"
        try:
            info = self.info
        except ClosedError:
            return "metalmm.Device(closed)"
        return f"metalmm.Device('{self.name}'" + (f": {info['name']})" if "name" in info else f", threads={self.threads})")


class Library:
    """MSL that is preprocessed and parsed; each kernel is compiled when it is asked for, and kept on disk. Made by Device.compile()."""

    def __init__(self, device: Device, source: str | Path, include_dirs: Sequence[str | Path], defines: Mapping[str, Any] | None) -> None:
        if not isinstance(source, (str, Path)):
            raise ArgumentError(f"compile: source is {type(source).__name__}; it takes MSL as text, or the path of a file")
        self._device = device
        is_path = isinstance(source, Path) or ("\n" not in source and source.endswith((".metal", ".h")))
        self._name = str(source) if is_path else "<source>"
        folders = [Path(d) for d in include_dirs]
        if is_path:
            path = Path(source)
            text = kernel_source.read_text(path)
            folders.insert(0, path.resolve().parent)
        else:
            text = str(source)
        found = device.backend.library_text(device, text, self._name, folders, defines or {})
        self._text, self._kernels = found.text, found.kernel_names

    @property
    def kernel_names(self) -> list[str]:
        """Host names, sorted."""
        return list(self._kernels)

    def kernel(self, name: str, constants: kernel_source.Constants | None = None) -> _core.Kernel:
        """The kernel of that host name; constants: function constants by index or name.

        Raises CompileError for the name of a kernel or constant that is not there, and for source that does not compile. Values for indices
        that this source does not have are left alone, as Metal does.
        """
        if constants is not None and not isinstance(constants, Mapping):
            raise ArgumentError(f"kernel: constants is {constants!r}; it takes a dict of values by index or name")
        chosen = dict(constants or {})
        for key, value in chosen.items():
            if isinstance(value, int) and not -(2**63) <= value < 2**64:
                raise CompileError(f"constants: the value of {key!r} is a whole number of more than 64 bits")
        code = self._device.backend.code(self._device, self._text, name, chosen)
        return _core.Kernel(self._device, code.as_tuple(), name, chosen)

    def __repr__(self) -> str:
        return f"metalmm.Library({self._name}: {len(self._kernels)} kernels, on {self._device!r})"


def cpu_name() -> str:
    """Of this machine, as a report calls it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(row.split(":", 1)[1].strip() for row in lines if row.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def metal_devices() -> list[str]:
    """Names of this machine's Metal devices; empty off macOS."""
    return backends.available("metal")


@contextlib.contextmanager
def capture(path: str | Path, device: Device | None = None) -> Iterator[None]:
    """Writes all that `device` (the default one) runs inside the with block to a .gputrace, for Xcode.

    Raises DeviceError where there is no GPU capture: on device cpu, for a path that exists, and unless the process was started
    with METAL_CAPTURE_ENABLED=1.
    """
    device = device or default_device()
    if not isinstance(device, Device):
        raise DeviceError(f"capture: device is {device!r}; it takes a metalmm.Device")
    device._start_capture(str(path))
    try:
        yield
    finally:
        device._stop_capture()


_default: Device | None = None
_lock = Lock()


def default_device() -> Device:
    """The device of calls that name none, made on first use: ``Device()``. Another one after that was closed."""
    global _default
    with _lock():
        if _default is None or _default.closed:
            made = Device()
            if _default is None or _default.closed:  # a signal's handler may have come before
                _default = made
        return _default


@atexit.register
def _close_all() -> None:
    # Before the interpreter takes its modules apart, and before a driver's own clean-up runs.
    for device in list(open_devices):
        device.close()
    _core._end()  # threads go on, and find that they are told so
