"""Device metal: Apple's GPUs, whose own compiler takes MSL as text."""

from __future__ import annotations

import contextlib
import functools
import plistlib
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict
from xml.parsers.expat import ExpatError

from .. import _core, cache
from ..errors import DeviceError
from ..kernel_source import Code, Constants, KernelText, LibraryText, define_text, inline_text
from .protocol import Device, Preferred, Splits, Winner


class Options(TypedDict, total=False):
    """Options of Device("metal").

    Hardware alone can decide first_commit, untracked, return_on_event and indirect. Their defaults are the safe choice; `metalmm doctor`
    tries both.

    Attributes:
        index: Of the GPU in metalmm.metal_devices(). By default the system's own choice.
        spin: Seconds that wait() watches for completion before it blocks. By default 50e-6.
        max_operations: Operations that one command buffer takes before a batch begins another. By default 512.
        max_bytes: Bytes that one command buffer takes before a batch begins another. By default 4 GB.
        first_commit: So many dispatches of a batch of at least twice as many go out while the rest is encoded. By default 0: none goes
            out before the rest.
        untracked: Our fences order what uses one buffer, and Metal's own tracking is off. By default False.
        return_on_event: The call of wait() returns when the GPU has signalled, before Metal reports the command buffer's status. Times
            are read when somebody asks. By default False.
        indirect: Recordings are indirect command buffers. By default None: on GPUs from Apple9 (M3) on. True: On Apple7 and 8 as well,
            with each pipeline set beforehand. False: Never.
        keep_resident: Seconds after the last work for which the device's memory is kept in the GPU's reach. A thread asks for it twice a
            second, for macOS lets go of what was idle for about a second. By default 0: no thread. From macOS 15 on.
    """

    index: int | None
    spin: float | None
    max_operations: int | None
    max_bytes: int | None
    first_commit: int | None
    untracked: bool | None
    return_on_event: bool | None
    indirect: bool | None
    keep_resident: float | None


_DEFAULTS: dict[str, Any] = {
    "index": None,
    "spin": 50e-6,
    "max_operations": 512,
    "max_bytes": 4 << 30,
    "first_commit": 0,
    "untracked": False,
    "return_on_event": False,
    "indirect": None,
    "keep_resident": 0.0,
}

# Bytes in flight a core: twice what half a microsecond of latency asks for. That is 4 to 6 KB: an M1 has 68 GB/s and 8 cores, an M4 120 and 10.
_IN_FLIGHT = 10e3
# GB/s of memory, of the families of GPUs; docs/method.md says where they are from.
_GBPS = {
    "M1": 68, "M1 Pro": 200, "M1 Max": 400, "M2": 100, "M2 Pro": 200, "M2 Max": 400, "M3": 100, "M3 Pro": 150, "M4": 120,
}  # fmt: skip


@functools.cache
def _cores() -> int | None:
    """Of the GPU, as the system's registry says. PyTorch asks the same entry."""
    command = ["ioreg", "-a", "-r", "-d", "1", "-c", "AGXAccelerator"]
    with contextlib.suppress(OSError, subprocess.SubprocessError, ExpatError, ValueError, LookupError, TypeError):
        return int(plistlib.loads(subprocess.run(command, capture_output=True, timeout=5, check=True).stdout)[0]["gpu-core-count"])
    return None


class _Metal:
    name = "metal"
    options: Sequence[str] = tuple(Options.__annotations__)
    libraries: Sequence[str] = ("mps_matmul", "mps_matvec", "mps_ndarray")
    counts_barriers = False
    emulated: Sequence[str] = ()
    replays = 0
    ends_processes = False
    together = 1
    note = ""
    cache_bytes = 128 << 20  # the system-level cache of an Ultra has 96 MB, as far as is known; nothing tells a program

    # Of the client's own runs, on one Apple-silicon machine; those whose winner gave wrong results are not among them, nor those that MPS won
    # (896 x 896 and 1152 x 896): it cannot be part of an indirect recording, without which a decode step is encoded again each time.
    winners: Sequence[Winner] = (
        ("dense", "nt", 9728, 896, "m1_optimized_v2/nt_bn64_col_vec4_bk128_tg128"),
        ("dense", "nt", 896, 4864, "m1_optimized_v5/nt_bn4_largek_smalln_tg256"),
        ("dense", "nt", 151936, 896, "m1_optimized_v2/nt_bn64_col_bk64_tg128"),
    )
    # Nothing of this was measured on an Apple GPU; docs/variants.md has the reasons.
    usual_cores = 10  # an M4's
    preferred: Sequence[Preferred] = (
        ("dense", "1", Splits.of(_IN_FLIGHT, "gemv_nt_vec4", "c4_tg128", "c2_tg128", "c4_s4_tg128", "c2_s4_tg128", "c1_s8_tg256")),
        ("dense", "1", "gemv_nn/w4_s8_tg256"),
        ("dense", "1", "gemv_nt_vec4/r2_c4_tg128", 2),
        ("dense", "1", "gemv_nt_vec4/r4_c4_tg128", 4),
        ("dense", "1", "gemv_nt_vec4/r8_c4_tg128", 8),
        ("dense", "1", "gemv_nn/r8_w4_s4_tg128", 8),
        ("dense", "1", "gemm_tensor/bm32_bn64_tg128", 32),  # from M5 on
        ("dense", "1", "gemm_tensor/bm64_bn64_tg128"),
        ("dense", "1", "mps/baseline"),
        ("dense", "1", "gemm/bm32_bn32_bk32"),  # what MPS does not take
        ("dense", "", Splits.of(_IN_FLIGHT, "gemv_nt", "l16_d4_tg64", "l32_d4_tg64", "l32_s4_d4_tg128")),
        ("", "", Splits.of(_IN_FLIGHT, "gemv_nt", "l4_d2_tg64", "l8_d2_tg64", "l16_d2_tg64", "l16_s4_d2_tg128")),
        *(("", "", f"gemv_nt/r{rows}_l4_d2_tg64", rows) for rows in (2, 4, 8)),
        ("", "1", "gemm/bm32_bn32_bk32"),
    )

    def checked(self, given: Mapping[str, Any]) -> dict[str, bool | int | float]:
        found = _core._device_names(self.name)
        if not found:
            raise DeviceError("no Metal device; metalmm needs macOS 14 on a machine with a GPU for device 'metal'; 'cpu' runs anywhere")
        options: dict[str, Any] = {**_DEFAULTS, **given}
        for key, value in options.items():
            is_flag = isinstance(_DEFAULTS[key], bool) or key == "indirect"
            kinds = bool if is_flag else (int, float) if isinstance(_DEFAULTS[key], float) else int
            if value is not None and (not isinstance(value, kinds) or isinstance(value, bool) != is_flag):
                takes = "True or False" if is_flag else "a number" if isinstance(_DEFAULTS[key], float) else "a whole number"
                raise DeviceError(f"{key} is {value!r}; it takes {takes}")
        index, spin, operations, size, first = (options[key] for key in ("index", "spin", "max_operations", "max_bytes", "first_commit"))
        if index is not None and not 0 <= index < len(found):
            raise DeviceError(f"index is {index}; there are {len(found)} Metal devices: {', '.join(found)}")
        if not 0 <= spin <= 1 or not 1 <= operations < 2**32 or not 1 <= size < 2**63 or not 0 <= first < 2**32:
            raise DeviceError(
                f"spin is {spin}, max_operations {operations}, max_bytes {size}, first_commit {first}; spin is 0 to 1 second, first_commit"
                " at least 0, the others at least 1"
            )
        if not 0 <= options["keep_resident"] <= 86400:
            raise DeviceError(f"keep_resident is {options['keep_resident']}; it takes seconds, from 0 to 86400")
        indirect = -1 if options["indirect"] is None else int(options["indirect"])
        return {
            **options,
            "index": -1 if index is None else index,
            "spin": float(spin),
            "indirect": indirect,
            "keep_resident": float(options["keep_resident"]),
        }

    def library_text(self, device: Device, text: str, name: str, folders: Sequence[Path], defines: Mapping[str, Any]) -> LibraryText:
        # Metal's run-time compiler opens no files.
        macros = "".join(f"#define {key} {define_text(value)}\n" for key, value in defines.items())
        whole = macros + inline_text(text, name, folders, set())
        return LibraryText(KernelText(whole, name), device._kernel_names(whole))

    def code(self, device: Device, source: KernelText, kernel: str, constants: Constants) -> Code:
        chosen = sorted((str(k), repr(v)) for k, v in constants.items())
        info = device.info
        parts = [str(info["name"]), str(info["os"]), source.text, kernel, repr(chosen)]
        key = cache.key_of(*parts)
        # Without arguments: Metal's compiler tells them, of the text as its preprocessor leaves it.
        return Code(kernel, source.text, str(cache.folder() / f"{key}.metalarchive"))

    def code_together(self, device: Device, sources: Sequence[tuple[KernelText, str]]) -> None:
        """Its compiler takes one at a time."""

    def registers(self, source: KernelText, kernel: str, constants: Constants) -> int:
        return 0

    def library_file(self, library: str) -> str:
        return ""

    def watching(self, timeout: float) -> dict[str, Any]:
        return {}

    def memory_gbps(self, device: Device) -> float | None:
        return _GBPS.get(str(device.info["name"]).removeprefix("Apple "))

    def cores(self, device: Device) -> int | None:
        return _cores()

    def facts(self, device: Device) -> dict[str, str | None]:
        return {"compiler": None, "summary": f"gpu={device.info['name']} cpu={{cpu}} os={{os}}"}


BACKEND = _Metal()
