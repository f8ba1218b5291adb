"""Devices, and MSL libraries compiled at run time."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from . import _core, compiler, manifest
from .errors import CompileError, DeviceError
from .msl_program import Program


class Device(_core.Device):
    """A device that kernels run on.

    name: "cpu", the machine's cores running the same .metal files (the only one so far). threads: OS threads, by default
    $METALMM_CPU_THREADS or the CPUs that the process may use. threadgroup_memory_limit: bytes, 32 KB as on Apple GPUs.
    lenient_barriers: threads that have returned count as having reached every barrier; by default that is an error.

    Raises DeviceError for an unknown name.
    """

    def __init__(
        self, name: str = "cpu", *, threads: int | None = None, threadgroup_memory_limit: int = 32768, lenient_barriers: bool = False
    ) -> None:
        if name != "cpu":
            raise DeviceError(f"no device '{name}'; there is: cpu")
        if threads is None:
            threads = int(os.environ.get("METALMM_CPU_THREADS", "0"))
        if threads < 0 or threads > 1024:
            raise DeviceError(f"threads is {threads}; it takes 1 to 1024, or None for all CPUs")
        super().__init__(threads=threads, threadgroup_memory_limit=threadgroup_memory_limit, lenient_barriers=lenient_barriers)
        manifest._devices.add(self)

    def compile(self, source: str | Path, include_dirs: Sequence[str | Path] = (), defines: Mapping[str, Any] | None = None) -> Library:
        """A library of the kernels in MSL source text, or in a file if `source` is a Path or a path that ends in .metal or .h.

        Raises CompileError with the compiler's text, LoweringError naming file, line and construct.
        """
        return Library(self, source, include_dirs, defines)

    def __repr__(self) -> str:
        return f"metalmm.Device({self.name!r}, threads={self.threads})"


class Library:
    """MSL that is preprocessed and parsed; each kernel is compiled when it is asked for, and kept on disk."""

    def __init__(self, device: Device, source: str | Path, include_dirs: Sequence[str | Path], defines: Mapping[str, Any] | None) -> None:
        self._device = device
        is_path = isinstance(source, Path) or ("\n" not in source and source.endswith((".metal", ".h")))
        self._name = str(source) if is_path else "<source>"
        if is_path:
            path = Path(source)
            try:
                text = path.read_text()
            except (OSError, UnicodeDecodeError) as error:
                raise CompileError(f"{path}: {error}") from error
            include_dirs = [path.resolve().parent, *include_dirs]
        else:
            text = str(source)
        self._text = compiler.preprocess(text, self._name, include_dirs, defines)
        self._kernels = Program(self._text, self._name).kernel_names()

    @property
    def kernel_names(self) -> list[str]:
        """Host names, sorted."""
        return list(self._kernels)

    def kernel(self, name: str, constants: compiler.Constants | None = None) -> _core.Kernel:
        """The kernel of that host name; constants: function constants by index or name.

        Raises CompileError for an unknown name or constant and for source that does not compile.
        """
        return _core.Kernel(self._device, str(compiler.build(self._text, name, constants, self._name, is_preprocessed=True)), name)


_default: Device | None = None
_lock = threading.Lock()


def default_device() -> Device:
    """The device of calls that name none: the CPU device, made on first use."""
    global _default
    with _lock:
        if _default is None:
            _default = Device("cpu")
        return _default
