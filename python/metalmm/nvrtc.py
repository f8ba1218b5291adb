"""NVIDIA's libraries, found when they are first asked for: the run-time compiler ($METALMM_LIBNVRTC, the PyPI package nvidia-cuda-nvrtc,
the system's), and cuBLAS."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
import re
from collections.abc import Sequence
from pathlib import Path

from .errors import CompileError, CompilerNotFoundError

_LEAST = (12, 0)  # what the runtime's headers ask of the language


def _packaged(*patterns: str) -> list[str]:
    """Libraries in PyPI's packages of NVIDIA's, of each pattern the newest first."""
    spec = importlib.util.find_spec("nvidia")
    folders = spec.submodule_search_locations or () if spec else ()
    return [str(path) for pattern in patterns for folder in folders for path in sorted(Path(folder).glob(pattern), reverse=True)]


def _candidates() -> list[str]:
    if chosen := os.environ.get("METALMM_LIBNVRTC"):
        return [chosen]
    found = [path for path in _packaged("cu*/lib/libnvrtc.so.*", "cuda_nvrtc/lib/libnvrtc.so.*") if "builtins" not in path]
    return [*found, *(f"libnvrtc.so.{major}" for major in (13, 12)), "libnvrtc.so", "/usr/local/cuda/lib64/libnvrtc.so"]


def find_cublas() -> str:
    """Where cuBLAS (cublasLt) lies: $METALMM_LIBCUBLAS, the PyPI package nvidia-cublas (torch brings it), the system's. Empty: nowhere."""
    if chosen := os.environ.get("METALMM_LIBCUBLAS"):
        return chosen
    folders = [*os.environ.get("LD_LIBRARY_PATH", "").split(":"), "/usr/local/cuda/lib64", "/usr/lib/x86_64-linux-gnu", "/usr/lib64"]
    found = _packaged("cu*/lib/libcublasLt.so.*", "cublas/lib/libcublasLt.so.*")
    found += [str(path) for folder in filter(None, folders) for path in sorted(Path(folder).glob("libcublasLt.so.*"), reverse=True)]
    return found[0] if found else ""


class Compiler:
    """A library of NVRTC. path: where it was found; version: its own numbers."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._library = ctypes.CDLL(path)
        self._library.nvrtcGetErrorString.restype = ctypes.c_char_p
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
        self.version = (major.value, minor.value)
        file = Path(path)
        # The file by its name and size, in whatever folder: what a machine without a GPU has compiled serves one that has it.
        self.identity = f"{file.name} {file.stat().st_size if file.is_file() else 0} {self.version}"

    def _text(self, program: ctypes.c_void_p, what: str) -> bytes:
        size = ctypes.c_size_t()
        if getattr(self._library, f"nvrtcGet{what}Size")(program, ctypes.byref(size)):
            return b""
        text = ctypes.create_string_buffer(size.value)
        getattr(self._library, f"nvrtcGet{what}")(program, text)
        return text.raw

    def cubin(self, source: str, name: str, options: Sequence[str]) -> bytes:
        """Machine code of CUDA C++. Raises CompileError with the compiler's text."""
        return self._compiled(source, name, options, "CUBIN")

    def ptx(self, source: str, name: str, options: Sequence[str]) -> bytes:
        """The same as PTX, to look at."""
        return self._compiled(source, name, options, "PTX")

    def _compiled(self, source: str, name: str, options: Sequence[str], what: str) -> bytes:
        program = ctypes.c_void_p()
        status = self._library.nvrtcCreateProgram(ctypes.byref(program), source.encode(), name.encode(), 0, None, None)
        if status:
            raise CompileError(f"NVRTC: {self._library.nvrtcGetErrorString(status).decode()}")
        try:
            given = (ctypes.c_char_p * len(options))(*(o.encode() for o in options))
            status = self._library.nvrtcCompileProgram(program, len(options), given)
            if status:
                log = self._text(program, "ProgramLog").rstrip(b"\0").decode(errors="replace").strip()
                if large := re.search(r"uses too much shared data \(0x(\w+) bytes, 0x(\w+) max\)", log):
                    used, most = (int(x, 16) for x in large.groups())
                    raise CompileError(f"{used} bytes of threadgroup memory; the limit is {most}")
                raise CompileError(f"NVRTC failed:\n{log or self._library.nvrtcGetErrorString(status).decode()}")
            return self._text(program, what)
        finally:
            self._library.nvrtcDestroyProgram(ctypes.byref(program))


@functools.cache
def _found(candidates: tuple[str, ...], most: int) -> Compiler | str:
    why = "no such library"
    for path in candidates:
        try:
            compiler = Compiler(path)
        except (OSError, AttributeError) as error:
            why = str(error)
            continue
        if compiler.version >= _LEAST and compiler.version[0] <= most:
            return compiler
        why = f"{path} is version {compiler.version[0]}.{compiler.version[1]}"
    return why


def find(driver: str = "99") -> Compiler:
    """driver: its version of CUDA, whose major one takes no machine code of a newer major one. Raises CompilerNotFoundError that says what
    to install."""
    most = int(driver.partition(".")[0])
    found = _found(tuple(_candidates()), most)
    if isinstance(found, str):
        limit = f", and no newer than the driver's {most}.x" if most < 99 else ""
        package = "nvidia-cuda-nvrtc" if most > 12 else f"nvidia-cuda-nvrtc-cu{most}"
        raise CompilerNotFoundError(
            f"device cuda needs NVRTC {_LEAST[0]}.{_LEAST[1]} or newer{limit} ({found}); pip install {package}, or name the library in"
            " METALMM_LIBNVRTC"
        )
    return found
