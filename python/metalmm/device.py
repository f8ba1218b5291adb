"""Devices, and MSL libraries compiled at run time."""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from . import _core, cache, compiler, manifest
from .errors import ClosedError, CompileError, DeviceError
from .msl_program import Program


class Device(_core.Device):
    """A device that kernels run on.

    name: "metal", an Apple GPU, or "cpu", the machine's cores running the same .metal files; by default $METALMM_DEVICE, else
    metal where there is one.

    Of metal: index, of the GPU in metalmm.metal_devices(), by default the system's own choice; spin: seconds that wait() watches
    for completion before it blocks, 50e-6; most_operations (512), most_bytes (4 GB): what one command buffer takes before a batch
    begins another.

    Of cpu: threads, OS threads, by default $METALMM_CPU_THREADS or the CPUs that the process may use; threadgroup_memory_limit:
    bytes, 32 KB as on Apple GPUs; lenient_barriers: threads that have returned count as having reached every barrier; by
    default that is an error; guards: poison around every array and threadgroup block, looked at after each dispatch, so that a kernel
    that writes outside is a KernelError (NumPy arrays are copied there and back); debug: guards, threads and threadgroups in another
    order each time, vector loads off their alignment are errors, and count_writes() works; slow; timeout: seconds after which a
    dispatch is ended with a KernelError, by default never.

    Raises DeviceError for an unknown name, an option that the device does not have, a GPU that is not there, threads that the
    system does not give.
    """

    def __init__(
        self,
        name: str | None = None,
        *,
        index: int | None = None,
        spin: float | None = None,
        most_operations: int | None = None,
        most_bytes: int | None = None,
        threads: int | None = None,
        threadgroup_memory_limit: int | None = None,
        lenient_barriers: bool | None = None,
        debug: bool | None = None,
        guards: bool | None = None,
        timeout: float | None = None,
    ) -> None:
        of_metal: dict[str, Any] = {"index": index, "spin": spin, "most_operations": most_operations, "most_bytes": most_bytes}
        of_cpu: dict[str, Any] = {
            "threads": threads,
            "threadgroup_memory_limit": threadgroup_memory_limit,
            "lenient_barriers": lenient_barriers,
            "debug": debug,
            "guards": guards,
            "timeout": timeout,
        }
        self._debug = bool(debug)
        name = name or os.environ.get("METALMM_DEVICE") or ("metal" if metal_devices() else "cpu")
        if name not in manifest.DEVICES:
            raise DeviceError(f"no device '{name}'; there are: {', '.join(manifest.DEVICES)}")
        own, others = (of_metal, of_cpu) if name == "metal" else (of_cpu, of_metal)
        if foreign := [key for key, value in others.items() if value is not None]:
            raise DeviceError(f"{foreign[0]}: device {name} has no such option; it has {', '.join(own)}")
        given = {key: value for key, value in own.items() if value is not None}
        if name == "metal":
            self._init_metal(**given)
        else:
            self._init_cpu(**given)
        manifest._devices.add(self)

    def _init_cpu(
        self,
        threads: int | None = None,
        threadgroup_memory_limit: int = 32768,
        lenient_barriers: bool = False,
        debug: bool = False,
        guards: bool = False,
        timeout: float = 0.0,
    ) -> None:
        if threads is None:
            text = os.environ.get("METALMM_CPU_THREADS", "0")
            try:
                threads = int(text)
            except ValueError:
                raise DeviceError(f"METALMM_CPU_THREADS is {text!r}; it takes a number of threads") from None
        for key, value in {"lenient_barriers": lenient_barriers, "debug": debug, "guards": guards}.items():
            if not isinstance(value, bool):
                raise DeviceError(f"{key} is {value!r}; it takes True or False")
        for key, number in {"threads": threads, "threadgroup_memory_limit": threadgroup_memory_limit, "timeout": timeout}.items():
            if not isinstance(number, (int, float)) or isinstance(number, bool):
                raise DeviceError(f"{key} is {number!r}; it takes a number")
        if threads < 0 or threads > 1024:
            raise DeviceError(f"threads is {threads}; it takes 1 to 1024, or None for all CPUs")
        if not 0 <= threadgroup_memory_limit < 2**32:
            raise DeviceError(f"threadgroup_memory_limit is {threadgroup_memory_limit}; it takes bytes, up to 2^32 - 1")
        if not 0 <= timeout <= 1e6:
            raise DeviceError(f"timeout is {timeout}; it takes seconds, up to a million, or None for none")
        super().__init__(
            threads=threads,
            threadgroup_memory_limit=threadgroup_memory_limit,
            lenient_barriers=lenient_barriers,
            debug=debug,
            guards=guards or debug,
            timeout=timeout,
        )

    def _init_metal(self, index: int | None = None, spin: float = 50e-6, most_operations: int = 512, most_bytes: int = 4 << 30) -> None:
        found = metal_devices()
        if not found:
            raise DeviceError("no Metal device; metalmm needs macOS 14 on a machine with a GPU for device 'metal'; 'cpu' runs anywhere")
        if index is not None and not 0 <= index < len(found):
            raise DeviceError(f"index is {index}; there are {len(found)} Metal devices: {', '.join(found)}")
        if not 0 <= spin <= 1 or not 1 <= most_operations < 2**32 or not 1 <= most_bytes < 2**64:
            raise DeviceError(
                f"spin is {spin}, most_operations {most_operations}, most_bytes {most_bytes}; spin is 0 to 1 second, the others at least 1"
            )
        super().__init__(index=-1 if index is None else index, spin=spin, most_operations=most_operations, most_bytes=most_bytes)

    def compile(self, source: str | Path, include_dirs: Sequence[str | Path] = (), defines: Mapping[str, Any] | None = None) -> Library:
        """A library of the kernels in MSL source text, or in a file if `source` is a Path or a path that ends in .metal or .h.

        Raises CompileError with the compiler's text, LoweringError naming file, line and construct.
        """
        return Library(self, source, include_dirs, defines)

    def count_writes(self, out: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Counts, for each two bytes of `out` (a C-contiguous NumPy array), of the writes of kernels from now on; on a debug device. A
        count of 255 means that many or more.

        Raises DeviceError on any other.
        """
        if not self._debug or self.name != "cpu":
            raise DeviceError("count_writes takes a device made by Device('cpu', debug=True)")
        counts = np.zeros(out.nbytes // 2, np.uint8)
        self._watch(out, counts)
        self._watched = (out, counts)  # kernels write there for as long as the device lives
        return counts

    def _code(self, text: str, kernel: str, name: str, constants: compiler.Constants | None = None) -> tuple[str, str]:
        """MSL as the extension takes it, and the file that keeps its machine code."""
        if self.name == "cpu":
            return str(compiler.build(text, kernel, constants, name, debug=self._debug)), ""
        chosen = sorted((str(k), repr(v)) for k, v in (constants or {}).items())
        info = self.info
        parts = [str(info["name"]), str(info["os"]), text, kernel, repr(chosen)]
        key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:40]
        return text, str(cache.folder() / f"{key}.metalarchive")

    def __repr__(self) -> str:
        try:
            self.name  # noqa: B018
        except ClosedError:
            return "metalmm.Device(closed)"
        if self.name == "metal":
            return f"metalmm.Device('metal': {self.info['name']})"
        return f"metalmm.Device('cpu', threads={self.threads})"


class Library:
    """MSL that is preprocessed and parsed; each kernel is compiled when it is asked for, and kept on disk."""

    def __init__(self, device: Device, source: str | Path, include_dirs: Sequence[str | Path], defines: Mapping[str, Any] | None) -> None:
        self._device = device
        is_path = isinstance(source, Path) or ("\n" not in source and source.endswith((".metal", ".h")))
        self._name = str(source) if is_path else "<source>"
        folders = [Path(d) for d in include_dirs]
        if is_path:
            path = Path(source)
            try:
                text = path.read_text()
            except (OSError, UnicodeDecodeError) as error:
                raise CompileError(f"{path}: {error}") from error
            folders.insert(0, path.resolve().parent)
        else:
            text = str(source)
        if device.name == "cpu":
            self._text = compiler.preprocess(text, self._name, folders, defines)
            self._kernels = Program(self._text, self._name).kernel_names()
        else:  # Metal's run-time compiler opens no files
            macros = "".join(f"#define {key} {compiler.define_text(value)}\n" for key, value in (defines or {}).items())
            self._text = macros + manifest.inline_text(text, self._name, folders, set())
            self._kernels = _core._kernel_names(device, self._text)

    @property
    def kernel_names(self) -> list[str]:
        """Host names, sorted."""
        return list(self._kernels)

    def kernel(self, name: str, constants: compiler.Constants | None = None) -> _core.Kernel:
        """The kernel of that host name; constants: function constants by index or name.

        Raises CompileError for an unknown name or constant and for source that does not compile.
        """
        if self._device.name == "cpu":
            code = str(compiler.build(self._text, name, constants, self._name, is_preprocessed=True, debug=self._device._debug)), ""
        else:
            code = self._device._code(self._text, name, self._name, constants)
        return _core.Kernel(self._device, *code, name, dict(constants or {}))


def metal_devices() -> list[str]:
    """Names of this machine's Metal devices; empty off macOS."""
    return _core._metal_devices()


@contextlib.contextmanager
def capture(path: str | Path, device: Device | None = None) -> Iterator[None]:
    """Writes all that `device` (the default one) runs inside the with block to a .gputrace, for Xcode.

    Raises DeviceError where there is no GPU capture: on device cpu, for a path that exists, and unless the process was started
    with METAL_CAPTURE_ENABLED=1.
    """
    _core._start_capture(device or default_device(), str(path))
    try:
        yield
    finally:
        _core._stop_capture()


_default: Device | None = None
_lock = threading.RLock()


def _after_fork() -> None:
    global _lock
    _lock = threading.RLock()  # a thread that is not here may hold it


os.register_at_fork(after_in_child=_after_fork)


def default_device() -> Device:
    """The device of calls that name none, made on first use: ``Device()``."""
    global _default
    with _lock:
        if _default is None:
            made = Device()
            _default = _default or made  # a signal's handler may have come before
        return _default


@atexit.register
def _close_all() -> None:
    # Before the interpreter takes its modules apart, and before a driver's own clean-up runs.
    for device in list(manifest._devices):
        device.close()
