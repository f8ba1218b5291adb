"""Device cuda: MSL lowered to CUDA C++ and compiled by NVRTC for an NVIDIA GPU."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

from .. import _core, cache, compiler, modules, nvrtc, ptx
from ..errors import CompileError, DeviceError, Error
from ..kernel_source import Code, Constants, KernelText, LibraryText, known_arguments, library_text
from ..msl.targets import cpu as cxx
from ..quantized import FORMATS
from .protocol import Device, Preferred, Splits, Tiles, TileTimes, Winner

_REGISTERS = re.compile(rb"\x04\x2f\x08\x00.{4}(.{4})", re.DOTALL)  # of machine code's notes: EIATTR_REGCOUNT, 8 bytes, whose, how many


class Options(TypedDict, total=False):
    """Options of Device("cuda").

    Attributes:
        index: Of the GPU in the order of its driver. By default 0.
        spin: Seconds that wait() watches for completion before it sleeps. By default 100e-6.
        timeout: Seconds after which a kernel is ended with a KernelError. Kernels are then compiled to look at a word of memory in
            every loop. By default never.
        overlap: The next kernel is started while one ends. This is programmatic dependent launch, of compute capability 9.0 on. By
            default True.
        ahead: Bytes, by default 4 MB. With overlap, one array of a batch's or recording's next dispatch is brought to the second-level
            cache meanwhile. It is the largest array that the dispatch only reads, if that has no more bytes. Larger ones lose by it.
            With 0 none is brought.
        debug: Kernels ask before each access to memory. One outside of what is bound, or off its alignment, does not happen, and is a
            KernelError with the line. It also refuses threadgroup memory beyond what the threadgroup has. Launches then wait for each
            other, recordings are not graphs, and a kernel is slow. device cpu's debug mode looks at more. By default False.
    """

    index: int | None
    spin: float | None
    timeout: float | None
    overlap: bool | None
    ahead: int | None
    debug: bool | None


_DESIGNATED = re.compile(r"[{,]\s*\.\w+\s*=[^=]")  # {.x = 1}
_HALF_CONVERTS = re.compile(r'conversion function from "(const |volatile )*half" to')
_LEAST = 80  # compute capability: mma of bfloat, cp.async
_GBPS = {"NVIDIA H200": 4250}  # benchmarks/peers_cuda.py

# What each tile takes (protocol.Tiles) with dense weights, scaled ones, affine ones, those whose halves of a block have a scale each, and
# floats with one; None where it is not offered: `gemm_wgmma` adds 32 of k, for which halves have two scales. Fitted by benchmarks/fit_tiles.py
# on an H200 (docs/lab/cuda.md, "The rule counts waves").
_Times = TileTimes | None
_DENSE, _SCALED, _AFFINE, _HALVES, _FLOATS = range(5)
_TILES: Mapping[str, Sequence[_Times]] = {
    "small_m/t2_s16_d2_tg512": ((28, 21, 1760, 1), None, None, None, None),
    "small_m_mma/r2_t2_s4_d2_tg128": (None, (103, 32, 741, 7), (88, 31, 1706, 6), (139, 33, 728, 5), (117, 34, 929, 8)),
    "small_m_mma/r2_t2_s8_d2_tg256": (None, (48, 27, 1941, 3), (58, 26, 2289, 3), (58, 36, 1967, 2), (62, 31, 1619, 4)),
    "small_m_mma/r2_t2_s16_d2_tg512": (None, (32, 10, 1679, 1), (33, 2, 1958, 1), (40, 2, 2120, 1), (37, 29, 2134, 2)),
    "small_m_mma/r4_t2_s4_d2_tg128": (None, (86, 44, 1638, 4), (100, 40, 3112, 4), (116, 56, 2258, 4), (100, 37, 1997, 5)),
    "small_m_mma/r4_t2_s16_d2_tg512": (None, (25, 35, 3025, 1), (31, 25, 3717, 1), (39, 35, 3566, 1), (24, 42, 2965, 1)),
    "gemm/bm16_bn32_bk128_wm1_wn1_wk4": ((60, 33, 3589, 4), (91, 45, 3562, 6), (104, 49, 4158, 6), (200, 60, 3582, 6), (94, 51, 3819, 6)),
    "gemm/bm32_bn32_bk64_wm1_wn1_wk2": ((116, 45, 4362, 6), None, None, None, None),
    "gemm/bm64_bn32_bk128_wm1_wn1_wk4": (
        (180, 59, 5273, 3),
        (192, 62, 2379, 2),
        (187, 89, 4890, 2),
        (278, 71, 3595, 2),
        (186, 57, 3915, 2),
    ),
    "gemm/bm64_bn64_bk64_wm1_wk2": (
        (182, 134, 6817, 3),
        (214, 186, 8521, 3),
        (283, 196, 9557, 2),
        (379, 171, 7658, 2),
        (215, 173, 8297, 3),
    ),
    "gemm/bm128_bn64_bk64": ((364, 158, 8092, 2), (362, 235, 10511, 2), (390, 267, 15132, 2), (479, 304, 12652, 2), (365, 260, 11024, 2)),
    "gemm/bm128_bn128_bk32": ((515, 456, 7027, 2), (607, 527, 8846, 2), (849, 778, 8501, 2), (1383, 1166, 2645, 2), (643, 670, 8955, 2)),
    "gemm_wgmma/bm64_bn64_s4": (None, (233, 118, 5402, 3), (430, 195, 8601, 3), None, (239, 128, 6024, 3)),
    "gemm_wgmma/bm64_bn64": ((112, 77, 4236, 2), (185, 122, 6449, 2), (434, 182, 8076, 2), None, (192, 135, 6802, 2)),
    "gemm_wgmma/bm64_bn64_k2": ((63, 47, 4017, 2), (102, 62, 4617, 2), (206, 101, 6279, 2), None, (100, 70, 5706, 2)),
    "gemm_wgmma/bm64_bn64_k4": ((13, 45, 5594, 2), (22, 58, 8664, 3), (62, 103, 10357, 3), None, (20, 67, 8958, 3)),
    "gemm_wgmma/bm64_bn64_s4_k4": (None, (34, 46, 7818, 3), (77, 71, 8759, 3), None, (38, 49, 8038, 3)),
    "gemm_wgmma/bm64_bn64_s12_k2": ((49, 44, 3901, 1), None, None, None, None),
    "gemm_wgmma/bm128_bn128": ((184, 152, 5853, 1), (365, 92, 9052, 1), (756, 87, 11129, 1), None, (381, 116, 9176, 1)),
}


# The same of up to eight rows of A.
_FEW: Mapping[str, Sequence[_Times]] = {
    "small_m/t2_s4_d2_tg128": ((79, 33, 1982, 6), None, None, None, None),
    "small_m/t2_s8_d2_tg256": ((49, 30, 1843, 3), None, None, None, None),
    "small_m/t2_s16_d2_tg512": ((29, 20, 1599, 1), None, None, None, None),
    "small_m_mma/t2_s4_d2_tg128": (None, (86, 27, 1160, 9), (85, 29, 1594, 7), (106, 42, 1710, 8), (103, 33, 851, 9)),
    "small_m_mma/t2_s4_d4_tg128": (None, (63, 30, 1339, 8), (84, 26, 1033, 5), (78, 39, 1646, 5), (51, 31, 1986, 8)),
    "small_m_mma/t2_s8_d2_tg256": (None, (47, 25, 1405, 4), (44, 25, 1615, 3), (57, 41, 833, 3), (49, 28, 1044, 4)),
    "small_m_mma/t2_s8_d4_tg256": (None, (44, 23, 1145, 3), (37, 17, 1645, 2), None, None),
    "small_m_mma/t4_s8_d2_tg256": (None, (53, 49, 1780, 3), None, None, None),
    "small_m_mma/t2_s16_d2_tg512": (None, (25, 21, 1665, 2), (24, 23, 2165, 2), (43, 31, 1853, 2), (36, 25, 1218, 2)),
}


def weights_of(storage: str) -> int:
    """The column of `_TILES`."""
    if storage == "dense":
        return _DENSE
    form = FORMATS[storage.partition(":")[0]]
    return _HALVES if form.halves else _FLOATS if form.is_float else _AFFINE if form.has_bias else _SCALED


def _tiles(table: Mapping[str, Sequence[_Times]], storage: str) -> Tiles:
    return Tiles({tile: ns for tile, of_weights in table.items() if (ns := of_weights[weights_of(storage)])})


class _Cuda:
    name = "cuda"
    options: Sequence[str] = tuple(Options.__annotations__)
    libraries: Sequence[str] = ("blas",)
    counts_barriers = False
    emulated: Sequence[str] = ()
    replays = 16
    ends_processes = True
    together = 1
    cache_bytes = 0
    note = (
        "Times are an NVIDIA GPU's, of recordings of 16 calls and more, a call's share; of an Apple GPU they say what to try, not how long it"
        " takes."
    )
    # Of benchmarks/peers_cuda.py on an H200: docs/cuda.md.
    winners: Sequence[Winner] = (
        ("dense", "nt", 9728, 896, "gemv_nt/l8_d7_tg256"),
        ("dense", "nt", 896, 4864, "gemv_nt_octet/s8_tg256"),
        ("dense", "nt", 896, 896, "gemv_nt/l8_s7_d2_tg448"),
        ("dense", "nt", 1152, 896, "gemv_nt/l8_s7_d2_tg448"),
        ("dense", "nn", 1152, 896, "gemv_nn_octet/o2_d4_tg512"),
        ("dense", "nt", 151936, 896, "gemv_nt/l8_d7_tg256"),
        # Of benchmarks/quantized.py and, affine, blocks and k = 4864, of tuning runs: docs/quantized.md.
        ("q8_0", "nt", 896, 896, "gemv_nt/l4_s7_tg448"),
        ("q8_0:canonical", "nt", 151936, 896, "gemv_nt/l2_d7_x_tg128"),
        ("q4_0", "nt", 9728, 896, "gemv_nt_mma/c2_d7_tg320"),
        ("q4_0", "nt", 896, 896, "gemv_nt/l4_s7_tg448"),
        ("q4_0:canonical", "nt", 896, 4864, "gemv_nt_mma/c2_s10_d4_tg320"),
        ("affine8", "nt", 896, 4864, "gemv_nt_mma/c2_s19_d2_tg608"),
        ("affine8", "nt", 896, 896, "gemv_nt/l4_s7_tg448"),
        ("affine8:canonical", "nt", 896, 4864, "gemv_nt_mma/c2_s10_d4_tg320"),
        ("q4_k", "nt", 14336, 4096, "gemv_nt_mma/c2_s2_d4_tg64"),
        ("fp4", "nt", 14336, 4096, "gemv_nt_mma/c2_s4_d2_tg128"),
        ("fp4", "nt", 4096, 14336, "gemv_nt_mma/c2_s8_d4_tg256"),
        *((form, "nt", 4096, 4096, "gemv_nt_mma/c2_s8_d4_tg256") for form in ("q5_k", "q6_k")),
        ("affine4", "nt", 9728, 896, "gemv_nt_mma/d7_tg128"),
        ("affine4", "nt", 896, 4864, "gemv_nt_mma/c2_s19_d2_tg608"),
        ("affine4", "nt", 896, 896, "gemv_nt/l4_s4_d2_x_tg128"),
        # m of 2 to 8
        ("affine4", "nt", 9728, 896, "small_m_mma/t2_s4_d7_tg128"),
        ("q8_0", "nt", 9728, 896, "small_m_mma/t2_s4_d7_tg128"),
        ("q4_0", "nt", 9728, 896, "small_m_mma/t2_s4_d7_tg128"),
        ("dense", "nt", 151936, 896, "small_m/t3_s4_d2_tg128"),
        ("q8_0:canonical", "nt", 151936, 896, "small_m_mma/t4_d3_tg64"),
        ("q4_0:canonical", "nt", 151936, 896, "small_m_mma/t2_d4_tg64"),
        ("affine8", "nt", 151936, 896, "small_m_mma/t4_d3_tg64"),
        ("affine8:canonical", "nt", 151936, 896, "small_m_mma/t2_d2_tg64"),
        ("affine4", "nt", 151936, 896, "small_m_mma/t2_d4_tg64"),
        ("affine4:canonical", "nt", 151936, 896, "small_m_mma/t2_d4_tg64"),
    )
    usual_cores = 132  # an H200's
    preferred: Sequence[Preferred] = (
        ("dense", "2", "gemv_nt/l8_d7_x_tg320"),
        ("dense", "3", "gemv_nt/l8_s7_d2_tg224"),
        ("dense", "swiglu", "gemv_nt/l8_d14_x_tg128"),
        ("dense", "1", Splits.of(48e3, "gemv_nt_octet", "c4_tg128", "c2_d2_tg128", "c2_s4_tg128")),
        ("dense", "1", "gemv_nn_octet/o4_d4_tg512"),
        ("dense", "1", "gemv_nn/r8_w4_s4_tg128"),
        ("q4_0", "2", "gemv_nt_mma/c2_d7_tg128"),
        ("affine4", "2", "gemv_nt_mma/d7_tg64"),
        *((storage, end, "gemv_nt/l4_s4_d2_x_tg128") for storage in _core._STORAGES[2::2] for end in ("2", "3", "swiglu")),
        ("", "swiglu", Splits.of(96e3, "gemv_nt_mma", "d7_tg32", "s2_d4_tg64")),
        ("", "swiglu", "gemv_nt/l4_s2_d4_x_tg128"),  # no tensor cores but of half
        ("", "3", Splits(64e3, ("gemv_nt/l4_s7_tg448", "gemv_nt_mma/c2_s4_d4_tg128"))),
        ("", "1", Splits.of(48e3, "gemv_nt_mma", "s4_d7_tg128", "s10_d4_tg320", "c2_s4_d2_tg128", "c2_s4_d4_tg128", "c2_s8_d4_tg256")),
        ("", "", "gemv_nt_mma/d7_tg128"),
        ("", "1", Splits.of(48e3, "gemv_nt", "l4_s2_d4_x_tg64", "l4_s4_d4_x_tg128", "l4_s10_d4_x_tg320")),  # no tensor cores but of half
        ("q4_0", "", "gemv_nt/l4_c2_s4_d2_x_tg128"),
        ("", "", "gemv_nt/l4_d7_x_tg128"),
        *((storage, "1", _tiles(_FEW, storage), 8) for storage in _core._STORAGES),
        *((storage, "1", _tiles(_TILES, storage)) for storage in _core._STORAGES),
        ("dense", "1", Splits.of(24e3, "small_m", "t2_s4_d2_tg128", "t2_s8_d2_tg256", "t2_s16_d2_tg512"), 16),  # float32
        ("", "1", "gemm/bm32_bn32_bk32"),
        ("", "", "gemm_tiled/baseline"),
    )

    def checked(self, given: Mapping[str, Any]) -> dict[str, bool | int | float]:
        options: dict[str, Any] = {"index": 0, "spin": 100e-6, "timeout": 0.0, "overlap": True, "ahead": 4 << 20, "debug": False, **given}
        for key in ("overlap", "debug"):
            if not isinstance(options[key], bool):
                raise DeviceError(f"{key} is {options[key]!r}; it takes True or False")
        for key in ("index", "spin", "timeout", "ahead"):
            kinds = int if key in ("index", "ahead") else (int, float)
            if not isinstance(options[key], kinds) or isinstance(options[key], bool):
                raise DeviceError(f"{key} is {options[key]!r}; it takes a {'whole ' if kinds is int else ''}number")
        found = _core._device_names(self.name)
        index, spin, timeout = options["index"], options["spin"], options["timeout"]
        if found and not 0 <= index < len(found):
            raise DeviceError(f"index is {index}; there are {len(found)} GPUs: {', '.join(found)}")
        if not 0 <= spin <= 1 or not 0 <= timeout <= 1e6 or not 0 <= options["ahead"] < 2**31:
            raise DeviceError(
                f"spin is {spin}, timeout {timeout}, ahead {options['ahead']}; spin is 0 to 1 second, timeout up to a million, ahead less than 2^31"
            )
        return {**options, "spin": float(spin), "timeout": float(timeout), "blas": bool(nvrtc.find_cublas())}

    def library_text(self, device: Device, text: str, name: str, folders: Sequence[Path], defines: Mapping[str, Any]) -> LibraryText:
        return library_text(compiler.preprocess(text, name, folders, defines, for_metal=True), name)

    def code(self, device: Device, source: KernelText, kernel: str, constants: Constants) -> Code:
        capability = int(device.info["compute_capability"])
        if capability < _LEAST:
            raise DeviceError(f"{device.info['name']} has compute capability {capability / 10}; device cuda needs {_LEAST / 10} or newer")
        nvcc = nvrtc.find(str(device.info["driver"]))
        options = device.options
        module = build(source, kernel, constants, capability, nvcc, stops=options["timeout"] > 0, debug=bool(options["debug"]))
        arguments = known_arguments(source, kernel, constants) if source.is_preprocessed else ()
        return Code(kernel, file=str(module), arguments=arguments)

    def code_together(self, device: Device, sources: Sequence[tuple[KernelText, str]]) -> None:
        """Its compiler takes one at a time."""

    def registers(self, source: KernelText, kernel: str, constants: Constants) -> int:
        with contextlib.suppress(Error):
            return max(
                (int.from_bytes(row, "little") for row in _REGISTERS.findall(build(source, kernel, constants, 90).read_bytes())), default=0
            )
        return 0

    def library_file(self, library: str) -> str:
        return nvrtc.find_cublas()

    def watching(self, timeout: float) -> dict[str, Any]:
        return {}  # with a timeout it runs other code, which looks at a word in every loop

    def memory_gbps(self, device: Device) -> float | None:
        return _GBPS.get(str(device.info["name"]))

    def cores(self, device: Device) -> int | None:
        return device.info.get("multiprocessors")

    def facts(self, device: Device) -> dict[str, str | None]:
        version = "NVRTC {}.{}".format(*nvrtc.find(str(device.info["driver"])).version)
        return {"compiler": version, "summary": f"gpu={device.info['name']} driver={device.info['driver']} cpu={{cpu}} compiler={version}"}


def options(capability: int, source: KernelText, *, stops: bool, debug: bool = False) -> list[str]:
    """NVRTC's. sm_90a, for kernels of ours alone, has wgmma. A matmul's parameters are never a buffer, and its threadgroups are whole. A kernel
    of ours has whole simdgroups, together at each of their operations."""
    given = [
        f"-arch=sm_{capability}{'a' * (capability == 90 and source.is_ours)}",
        f"-std=c++{20 if not source.is_ours and _DESIGNATED.search(source.text) else 17}",
        "-default-device",
        "--device-int128",
        f"-I{compiler.MSL / 'runtime'}",
    ]
    given += [] if source.is_preprocessed else ["-DMETALMM_MATMUL"]
    given += ["-DMETALMM_CONVERGED"] if source.is_ours else []
    given += ["-DMETALMM_EARLY"] if source.is_early else []
    given += ["-DMETALMM_LETS_NEXT"] if source.lets_next else []
    given += ["-DMETALMM_WATCHED", "-lineinfo"] if debug else []
    return [*given, "-DMETALMM_STOPS"] if stops else given


def build(
    source: KernelText,
    kernel: str,
    constants: Constants,
    capability: int,
    nvcc: nvrtc.Compiler | None = None,
    *,
    stops: bool = False,
    debug: bool = False,
) -> Path:
    """The machine code of one kernel, from the cache or made now; for a debug device PTX, of which its driver makes it. Raises
    CompileError, LoweringError."""
    nvcc = nvcc or nvrtc.find()
    given = options(capability, source, stops=stops, debug=debug)
    chosen = sorted((str(k), repr(v)) for k, v in constants.items())
    parts = [source.text, kernel, repr(chosen), nvcc.path, repr(nvcc.version), " ".join(given), modules.source_digest()]
    parts += [cache.digest_of([Path(ptx.__file__)])] if debug else []
    key = cache.key_of(*parts)

    def compile_to(target: Path) -> None:
        text = modules.preprocessed(source, {"__METALMM_CUDA__": 1}, for_metal=True)  # kernels/cuda/tensor.h asks
        extra = list[str]()  # what the compiler is told after the first time

        def lower(places: set[str]) -> str:
            return cxx.lower(
                text, kernel, constants, name=source.name, compiler="nvrtc", stops=stops, converged=source.is_ours, choose=places
            )

        def attempt(lowered: str, places: set[str]) -> bytes:
            try:
                return (nvcc.ptx if debug else nvcc.cubin)(lowered, source.name, [*given, *extra])
            except CompileError as error:
                if extra or modules.undecided(str(error)) - places or not _HALF_CONVERTS.search(str(error)):
                    raise
            extra.append("-DMETALMM_HALF_CONVERTS")
            return attempt(lowered, places)

        code = modules.compile_decided(lower, attempt)
        compiler.check_headers()
        target.write_bytes(ptx.watched(code, str(compiler.MSL / "runtime"), capability) if debug else code)

    try:
        return cache.fetch(f"{key}.{'ptx' if debug else 'cubin'}", compile_to)
    except CompileError as error:
        error.args = (f"kernel '{kernel}': {error}",)
        raise


BACKEND = _Cuda()
