"""Device cpu: MSL lowered to C++ and compiled for the machine's own cores."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

from .. import compiler, modules
from ..errors import DeviceError
from ..kernel_source import Code, Constants, KernelText, LibraryText, known_arguments, library_text
from ..msl import lint
from ..msl.program import Argument
from .protocol import Device, Preferred, Winner


class Options(TypedDict, total=False):
    """Options of Device("cpu").

    Attributes:
        threads: OS threads. By default $METALMM_CPU_THREADS, else 0: the CPUs that the process may use.
        threadgroup_memory_limit: Bytes. By default 32 KB, as on Apple GPUs.
        lenient_barriers: Threads that have returned count as having reached every barrier. By default that is an error.
        guards: Poison stands around every array and threadgroup block, and is looked at after each dispatch. A kernel that writes
            outside is then a KernelError. NumPy arrays are copied there and back.
        debug: Has guards, too. Accesses outside of what is bound, indices outside of an array, races in threadgroup memory and vectors
            off their alignment are errors. Threads and threadgroups take turns in another order each time. The method count_writes()
            works. A debug device is slow.
        timeout: Seconds after which a dispatch is ended with a KernelError. By default 0: never.
    """

    threads: int | None
    threadgroup_memory_limit: int | None
    lenient_barriers: bool | None
    debug: bool | None
    guards: bool | None
    timeout: float | None


class _Cpu:
    name = "cpu"
    options: Sequence[str] = tuple(Options.__annotations__)
    libraries: Sequence[str] = ("blas",)
    counts_barriers = True
    emulated: Sequence[str] = ("simdgroup_matrix",)
    replays = 0
    ends_processes = True
    together = modules.MOST_TOGETHER
    cache_bytes = 0
    note = (
        "Times are the CPU device's own and say nothing about a GPU; simdgroup_matrix (mlx, gemm_tiled) is emulated, tens of times slower."
    )

    winners: Sequence[Winner] = ()
    usual_cores = 10  # as the GPU's that it stands for
    preferred: Sequence[Preferred] = (
        ("", "", "gemv_nt_thread/c4_tg32"),
        ("", "", "gemv_nn_thread/q2_s8_tg32"),
        ("", "", "gemv_nt_thread/r4_c4_tg32", 4),
        ("", "", "gemv_nt_thread/r8_c4_tg32", 64),
        ("", "", "blas/baseline"),
        ("", "", "gemv_nt_thread/r8_c4_tg32"),
        ("", "", "gemv_nn/r8_w4_s4_tg128"),
        ("", "", "gemm_tiled/baseline"),
        ("", "1", "gemm/bm32_bn32_bk32"),
    )

    def checked(self, given: Mapping[str, Any]) -> dict[str, bool | int | float]:
        options: dict[str, Any] = {
            "threads": None,
            "threadgroup_memory_limit": 32768,
            "lenient_barriers": False,
            "debug": False,
            "guards": False,
            "timeout": 0.0,
            **given,
        }
        if options["threads"] is None:
            text = os.environ.get("METALMM_CPU_THREADS", "0")
            try:
                options["threads"] = int(text)
            except ValueError:
                raise DeviceError(f"METALMM_CPU_THREADS is {text!r}; it takes a number of threads") from None
        for key in ("lenient_barriers", "debug", "guards"):
            if not isinstance(options[key], bool):
                raise DeviceError(f"{key} is {options[key]!r}; it takes True or False")
        for key in ("threads", "threadgroup_memory_limit", "timeout"):
            value = options[key]
            if not isinstance(value, (int, float)) or isinstance(value, bool) or not abs(value) < math.inf:
                raise DeviceError(f"{key} is {value!r}; it takes a number")
        threads, limit, timeout = options["threads"], options["threadgroup_memory_limit"], options["timeout"]
        if threads != int(threads) or not 0 <= threads <= 1024:
            raise DeviceError(f"threads is {threads}; it takes 1 to 1024, or None or 0 for all CPUs")
        if limit != int(limit) or not 0 <= limit < 2**32:
            raise DeviceError(f"threadgroup_memory_limit is {limit}; it takes bytes, up to 2^32 - 1")
        if not 0 <= timeout <= 1e6:
            raise DeviceError(f"timeout is {timeout}; it takes seconds, up to a million, or None or 0 for no timeout")
        return {**options, "threads": int(threads), "threadgroup_memory_limit": int(limit), "timeout": float(timeout)}

    def library_text(self, device: Device, text: str, name: str, folders: Sequence[Path], defines: Mapping[str, Any]) -> LibraryText:
        return library_text(compiler.preprocess(text, name, folders, defines), name)

    def code(self, device: Device, source: KernelText, kernel: str, constants: Constants) -> Code:
        module = modules.build(modules.Job(source, kernel, constants, debug=bool(device.options["debug"])))
        # The module's tables say its arguments; the names of their types are of use for numbers, which nobody gives a variant.
        arguments: Sequence[Argument] = ()
        if source.is_preprocessed:
            arguments = known_arguments(source, kernel, constants)
            _warn_of_what_apples_compiler_refuses(source)
        return Code(kernel, file=str(module), arguments=arguments)

    def code_together(self, device: Device, sources: Sequence[tuple[KernelText, str]]) -> None:
        modules.build_together(modules.Job(source, kernel, debug=bool(device.options["debug"])) for source, kernel in sources)

    def registers(self, source: KernelText, kernel: str, constants: Constants) -> int:
        return 0

    def library_file(self, library: str) -> str:
        return ""

    def watching(self, timeout: float) -> dict[str, Any]:
        return {"guards": True, "timeout": timeout}

    def memory_gbps(self, device: Device) -> float | None:
        return None

    def cores(self, device: Device) -> int | None:
        return None

    def facts(self, device: Device) -> dict[str, str | None]:
        version = compiler.find_compiler().version
        return {"compiler": version, "summary": f"threads={device.threads} cpu={{cpu}} compiler={version}"}


_linted = set[str]()  # in this process


def _warn_of_what_apples_compiler_refuses(source: KernelText) -> None:
    """Address spaces vanish in C++, and its overloads are others: what only a type checker tells, where there is one."""
    if source.text in _linted or os.environ.get("METALMM_LINT") == "0" or not lint.available():
        return
    _linted.add(source.text)
    if found := lint.check_preprocessed(source.text, source.name):
        shown = "\n".join(f"  {f}" for f in found[:8]) + (f"\n  and {len(found) - 8} more" if len(found) > 8 else "")
        warnings.warn(
            f"device cpu takes this MSL, and Apple's compiler will not (METALMM_LINT=0 is silent):\n{shown}", RuntimeWarning, stacklevel=4
        )


BACKEND = _Cpu()
