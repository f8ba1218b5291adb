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

# What each tile takes (protocol.Tiles) with dense weights, scaled ones of 8 bits and of 4, affine ones, those whose halves of a block have a
# scale each, and floats with one; None where it is not offered: `gemm_wgmma` adds 32 of k, for which halves have two scales. Fitted by
# benchmarks/fit_tiles.py on an H200 (docs/lab/cuda.md, "The rule counts waves").
_Times = TileTimes | None
_DENSE, _BYTES, _NIBBLES, _AFFINE, _HALVES, _FLOATS = range(6)
_TILES: Mapping[str, Sequence[_Times]] = {
    "small_m/t2_s16_d2_tg512": ((24, 26, 1817, 1), None, None, None, None, None),
    "small_m_mma/r2_t2_s4_d2_tg128": (None, (112, 30, 549, 7), (69, 32, 1135, 7), (100, 32, 1134, 6), (135, 43, 2, 5), (111, 40, 1386, 8)),
    "small_m_mma/r2_t2_s4_d4_tg128": (None, (85, 25, 1259, 4), (72, 18, 1930, 5), (79, 22, 1972, 4), (98, 31, 1879, 4), (54, 23, 2258, 4)),
    "small_m_mma/r2_t2_s8_d4_tg256": (None, (47, 22, 1337, 2), (43, 15, 1378, 2), (49, 19, 1590, 2), (64, 25, 1157, 2), (45, 17, 1508, 2)),
    "small_m_mma/r2_t2_s16_d2_tg512": (None, (28, 22, 1799, 1), (18, 25, 2123, 1), (26, 24, 2267, 1), (31, 36, 2293, 1), (39, 31, 1634, 2)),
    "small_m_mma/r2_t2_s16_d4_tg512": (None, (28, 9, 1883, 1), (22, 11, 1932, 1), (23, 16, 2656, 1), (31, 20, 2461, 1), (26, 1, 2309, 1)),
    "small_m_mma/r4_t2_s4_d4_tg128": (None, (93, 33, 2226, 3), (87, 26, 2620, 4), (98, 29, 3413, 3), (82, 53, 4771, 3), (71, 35, 4269, 3)),
    "small_m_mma/r4_t2_s16_d2_tg512": (None, (30, 34, 2901, 1), (22, 36, 3232, 1), (27, 36, 4002, 1), (39, 47, 3437, 1), (29, 34, 3470, 1)),
    "gemm/bm16_bn32_bk128_wm1_wn1_wk4": (
        (57, 40, 3278, 4),
        (90, 48, 4011, 6),
        (83, 49, 3906, 7),
        (115, 47, 5115, 6),
        (207, 58, 4295, 6),
        (90, 49, 4749, 6),
    ),
    "gemm/bm32_bn32_bk128_wm1_wn1_wk4": (
        (78, 61, 4532, 4),
        (99, 64, 3952, 4),
        (93, 64, 3899, 4),
        (107, 78, 5722, 4),
        (207, 93, 6289, 4),
        (85, 75, 5712, 4),
    ),
    "gemm/bm64_bn32_bk128_wm1_wn1_wk4": (
        (180, 62, 4722, 3),
        (199, 51, 2341, 2),
        (196, 60, 1465, 2),
        (192, 81, 5213, 2),
        (273, 68, 3858, 2),
        (178, 58, 4271, 2),
    ),
    "gemm/bm128_bn64_bk64": (
        (370, 158, 7317, 2),
        (373, 240, 10773, 2),
        (337, 224, 10585, 2),
        (388, 264, 15471, 2),
        (494, 288, 12174, 2),
        (360, 255, 11299, 2),
    ),
    "gemm_wgmma/bm64_bn64": ((121, 93, 3975, 2), (191, 119, 6639, 2), (196, 138, 5998, 2), (434, 183, 8491, 2), None, (182, 136, 6836, 2)),
    "gemm_wgmma/bm64_bn64_k2": ((61, 55, 4118, 2), (105, 58, 5493, 2), (104, 62, 2751, 2), (205, 101, 6518, 2), None, (107, 65, 5555, 2)),
    "gemm_wgmma/bm64_bn64_k4": ((16, 46, 5266, 2), (25, 64, 8182, 3), (33, 48, 8034, 3), (57, 101, 11267, 3), None, (6, 59, 11286, 3)),
    "gemm_wgmma/bm64_bn64_s4": (None, (239, 113, 5493, 3), (241, 113, 5547, 3), (431, 192, 8999, 3), None, (232, 118, 7036, 3)),
    "gemm_wgmma/bm64_bn64_s12_k2": ((54, 35, 3727, 1), None, None, None, None, None),
    "gemm_wgmma/bm128_bn128": ((200, 137, 5420, 1), (370, 113, 9359, 1), (354, 47, 8627, 1), (756, 78, 11322, 1), None, (383, 99, 9384, 1)),
}


# The same of up to eight rows of A.
_FEW: Mapping[str, Sequence[_Times]] = {
    "small_m/t2_s8_d2_tg256": ((48, 30, 1547, 3), None, None, None, None, None),
    "small_m/t2_s16_d2_tg512": ((27, 22, 1555, 1), None, None, None, None, None),
    "gemv_nt_mma/r2_c2_s4_d2_tg128": (None, (39, 19, 1208, 6), (45, 11, 1126, 7), (52, 15, 1297, 7), (36, 17, 2508, 5), (35, 21, 2200, 5)),
    "gemv_nt_mma/r2_c2_s4_d4_tg128": (None, (37, 14, 421, 4), (30, 11, 763, 4), (42, 10, 661, 4), (31, 17, 871, 3), (29, 17, 934, 4)),
    "gemv_nt_mma/r2_c2_s8_d2_tg256": (None, (35, 16, 261, 3), (22, 11, 1087, 3), (29, 12, 1496, 3), (26, 18, 713, 2), (26, 18, 742, 2)),
    "gemv_nt_mma/r2_c2_s16_d2_tg512": (None, (7, 18, 1770, 1), (5, 14, 1876, 1), (7, 14, 2287, 1), (7, 15, 2679, 1), (8, 14, 2374, 1)),
    "gemv_nt_mma/r4_c2_s4_d2_tg128": (None, (51, 16, 1667, 4), (43, 12, 1728, 4), (76, 9, 1, 4), (59, 15, 1837, 4), (49, 17, 2108, 4)),
    "gemv_nt_mma/r4_c2_s8_d2_tg256": (None, (28, 15, 1591, 2), (25, 11, 1755, 2), (32, 11, 1902, 2), (30, 20, 1651, 2), (28, 18, 1639, 2)),
    "small_m_mma/t2_s4_d4_tg128": (None, (77, 29, 781, 6), (72, 21, 1391, 8), (57, 22, 1895, 5), (82, 32, 1399, 5), (64, 19, 1213, 4)),
    "small_m_mma/t2_s8_d4_tg256": (None, (50, 19, 792, 3), (38, 14, 1033, 3), (31, 18, 1589, 2), (47, 23, 757, 2), (38, 15, 1092, 2)),
    "small_m_mma/t2_s16_d2_tg512": (None, (21, 23, 1682, 2), (19, 20, 1795, 2), (21, 26, 2053, 2), (48, 34, 1102, 2), (37, 25, 1032, 2)),
    "small_m_mma/t2_s16_d4_tg512": (None, (20, 7, 1686, 1), (15, 17, 1619, 1), (17, 17, 1905, 1), (19, 26, 2056, 1), (19, 11, 2083, 1)),
    "small_m_mma/t4_s4_d4_tg128": (None, (56, 47, 2288, 3), (53, 32, 2534, 4), (89, 33, 2432, 3), (91, 56, 3064, 3), (63, 42, 2137, 2)),
    "small_m_mma/t4_s8_d2_tg256": (None, (53, 54, 1559, 3), (44, 46, 1616, 3), (59, 51, 1456, 2), (71, 76, 767, 2), (65, 59, 1045, 3)),
    "gemm/bm16_bn32_bk128_wm1_wn1_wk4": ((48, 66, 3058, 4), None, None, None, None, None),
    "gemm_wgmma/bm64_bn64_s12_k2": ((55, 35, 3495, 1), None, None, None, None, None),
}


def weights_of(storage: str) -> int:
    """The column of `_TILES`."""
    if storage == "dense":
        return _DENSE
    form = FORMATS[storage.partition(":")[0]]
    if form.halves:
        return _HALVES
    if form.is_float:
        return _FLOATS
    return _AFFINE if form.has_bias else _NIBBLES if form.bits == 4 else _BYTES


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
        *(
            (storage, "nt", 151936, 896, "small_m_mma/t2_d4_tg64")
            for storage in ("q8_0:canonical", "q4_0:canonical", "affine8", "affine8:canonical", "affine4", "affine4:canonical")
        ),
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
        ("dense", "1", Splits.of(24e3, "small_m", "t2_s8_d2_tg256", "t2_s16_d2_tg512"), 16),  # float32
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
