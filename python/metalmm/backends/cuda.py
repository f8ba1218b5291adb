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
# scale each, and floats with one; None where it is not offered. Fitted to an H200's times (docs/lab/cuda.md): dense weights and 4 bits by
# "The rule knows models' matrices", five dense tiles by "What clusters leave the next kernel", affine ones and two scales by "Weights as two
# halves", the rest by "Every format on wgmma". In `_FEW` numbers of dense weights, bytes and affine ones are of "Whole turns, and one row's
# bits for sixteen", but for their `small_m`; the rest is of "Every format on wgmma". `small_m/t4_s8_d2_tg256` is of "Several matrices, few
# rows", `r4_c2_s4_d2_tg128` and two points of bytes of "Few rows, more points".
_Times = TileTimes | None
_DENSE, _BYTES, _NIBBLES, _AFFINE, _HALVES, _FLOATS = range(6)
_TILES: Mapping[str, Sequence[_Times]] = {
    "small_m/t2_s16_d2_tg512": ((22, 24, 1452, 1), (27, 34, 678, 1), (23, 27, 895, 1), (25, 71, 981, 1), None, None),
    "small_m_mma/t2_s16_d4_tg512": (None, (11, 21, 1306, 1), (12, 10, 1316, 1), (19, 5, 1218, 1), (18, 23, 743, 1), (8, 23, 1124, 1)),
    "small_m_mma/r2_t2_s4_d2_tg128": (None, (101, 19, 1725, 7), (92, 22, 579, 7), (161, 10, 376, 5), (103, 36, 2115, 6), (135, 20, 18, 8)),
    "small_m_mma/r2_t2_s4_d4_tg128": (None, (88, 14, 732, 4), (90, 9, 794, 5), (74, 25, 1846, 4), (91, 33, 1150, 4), (64, 11, 2158, 5)),
    "small_m_mma/r2_t2_s8_d4_tg256": (None, (45, 20, 932, 2), (38, 12, 1065, 2), (50, 16, 1239, 2), (48, 43, 842, 2), (45, 17, 1130, 2)),
    "small_m_mma/r2_t2_s16_d4_tg512": (None, (22, 11, 1849, 1), (15, 10, 1945, 1), (23, 6, 2258, 1), (27, 33, 1469, 1), (18, 13, 2012, 1)),
    "small_m_mma/r4_t2_s2_d4_tg128": (None, (176, 80, 723, 1), (205, 27, 924, 4), (217, 54, 1551, 1), (415, 40, 2, 1), (211, 32, 1, 4)),
    "small_m_mma/r4_t2_s16_d2_tg512": (None, (27, 33, 2954, 1), (30, 20, 2465, 1), (27, 26, 4049, 1), (54, 18, 1309, 1), (31, 24, 1627, 1)),
    "gemm/bm16_bn32_bk128_wm1_wn1_wk4": (
        (60, 27, 1759, 4),
        (149, 38, 1597, 2),
        (117, 15, 1857, 3),
        (138, 6, 2171, 1),
        (101, 69, 3752, 8),
        (120, 71, 1808, 3),
    ),
    "gemm/bm32_bn32_bk32": ((161, 76, 1245, 3), (283, 146, 1288, 2), (239, 152, 1551, 6), (404, 96, 1709, 3), None, None),
    "gemm/bm32_bn32_bk128_wm1_wn1_wk4": (
        (83, 32, 3308, 4),
        (117, 18, 6419, 4),
        (95, 33, 4356, 4),
        (141, 75, 3775, 4),
        (161, 71, 2818, 4),
        (106, 67, 3664, 3),
    ),
    "gemm/bm128_bn64_bk64": (
        (391, 184, 2188, 1),
        (392, 284, 4212, 1),
        (390, 220, 4087, 1),
        (430, 279, 6472, 1),
        (604, 299, 3294, 1),
        (472, 248, 3291, 1),
    ),
    "gemm_wgmma/bm64_bn64": (
        (72, 85, 3321, 2),
        (166, 43, 2585, 2),
        (166, 60, 3344, 2),
        (268, 103, 5009, 2),
        (269, 119, 4148, 2),
        (167, 67, 4765, 2),
    ),
    "gemm_wgmma/bm64_bn64_k2": (
        (54, 53, 4049, 2),
        (73, 14, 4619, 2),
        (66, 33, 5271, 2),
        (117, 64, 4795, 2),
        (119, 58, 4689, 2),
        (70, 44, 4696, 2),
    ),
    "gemm_wgmma/bm64_bn64_k4": (
        (10, 39, 6946, 2),
        (26, 39, 7860, 2),
        (15, 41, 8660, 2),
        (16, 75, 9554, 2),
        (27, 71, 10407, 2),
        (14, 52, 7800, 2),
    ),
    "gemm_wgmma/bm64_bn64_s4": (
        (121, 108, 2921, 3),
        (197, 32, 2867, 3),
        (190, 53, 4210, 3),
        (235, 170, 6236, 7),
        (282, 172, 5784, 6),
        (196, 127, 2138, 3),
    ),
    "gemm_wgmma/bm64_bn64_s4_k2": (
        (69, 65, 3520, 1),
        (90, 19, 5759, 3),
        (90, 37, 6294, 3),
        (171, 60, 5766, 3),
        (147, 53, 6100, 3),
        (74, 67, 4032, 3),
    ),
    "gemm_wgmma/bm64_bn64_s8_k2": ((40, 43, 4503, 1), None, None, None, None, (43, 44, 11408, 1)),
    "gemm_wgmma/bm128_bn128": (
        (166, 129, 4628, 1),
        (249, 59, 4753, 1),
        (259, 40, 5386, 1),
        (464, 31, 5535, 1),
        (486, 25, 5655, 1),
        (257, 75, 5117, 1),
    ),
    "gemm_wgmma/bm128_bn128_s4_k2": (
        (98, 79, 9941, 1),
        (124, 51, 7231, 1),
        (143, 33, 7240, 1),
        (252, 42, 6866, 1),
        (256, 33, 5919, 1),
        (151, 39, 7839, 1),
    ),
}


# The same of up to eight rows of A.
_FEW: Mapping[str, Sequence[_Times]] = {
    "small_m/t2_s8_d2_tg256": (
        (51, 29, 1519, 3),
        (44, 31, 1352, 1),
        (49, 30, 801, 2),
        (42, 35, 1250, 2),
        (64, 37, 668, 1),
        (46, 34, 766, 3),
    ),
    "small_m/t2_s16_d2_tg512": (
        (27, 22, 1576, 1),
        (31, 35, 868, 1),
        (28, 25, 1357, 1),
        (25, 73, 938, 1),
        (34, 99, 794, 1),
        (23, 63, 938, 1),
    ),
    "small_m/t4_s8_d2_tg256": ((54, 47, 1173, 1), None, None, None, None, None),
    "gemv_nt_mma/r2_c2_s4_d2_tg128": (None, (40, 19, 1199, 6), (44, 10, 1324, 7), (52, 15, 1294, 7), (52, 15, 819, 6), (32, 13, 1745, 7)),
    "gemv_nt_mma/r2_c2_s4_d4_tg128": (None, (37, 14, 422, 4), (30, 9, 1255, 4), (42, 10, 668, 4), (34, 12, 1008, 3), (22, 12, 1428, 4)),
    "gemv_nt_mma/r2_c2_s8_d2_tg256": (None, (35, 16, 264, 3), (18, 11, 1045, 3), (29, 12, 1490, 3), (24, 14, 574, 1), (19, 12, 1466, 3)),
    "gemv_nt_mma/r2_c2_s16_d2_tg512": (None, (9, 15, 1941, 1), (8, 10, 1488, 1), (7, 14, 2305, 1), (14, 11, 830, 1), (11, 13, 1076, 1)),
    "gemv_nt_mma/r4_c2_s4_d2_tg128": (None, None, None, (63, 11, 2601, 5), (57, 15, 1881, 4), (55, 14, 560, 4)),
    "gemv_nt_mma/r4_c2_s8_d2_tg256": (None, (29, 15, 1534, 2), (22, 10, 1916, 2), (32, 11, 1889, 2), (31, 16, 1202, 2), (20, 15, 1631, 2)),
    "small_m_mma/t2_s4_d4_tg128": (None, (87, 25, 377, 6), (80, 14, 910, 1), (55, 20, 1777, 5), (126, 20, 3, 5), (108, 10, 2, 7)),
    "small_m_mma/t2_s4_d8_tg128": (None, (46, 20, 1617, 4), (56, 10, 1620, 5), (41, 19, 1941, 3), None, None),
    "small_m_mma/t2_s8_d4_tg256": (None, (48, 20, 820, 3), (36, 13, 683, 3), (31, 16, 1540, 2), (43, 25, 881, 2), (26, 19, 1195, 3)),
    "small_m_mma/t2_s16_d4_tg512": (None, (14, 18, 1681, 1), (14, 19, 1440, 1), (16, 20, 1549, 1), (26, 15, 1000, 1), (15, 18, 1067, 1)),
    "small_m_mma/t4_s4_d4_tg128": (None, (94, 42, 779, 3), (72, 20, 990, 4), (93, 36, 1545, 3), (140, 39, 1079, 3), (85, 21, 983, 4)),
    "small_m_mma/t4_s8_d4_tg256": (None, (34, 37, 1827, 1), (29, 24, 2142, 2), (57, 33, 1648, 2), (71, 27, 954, 1), (37, 40, 1567, 1)),
    "gemm/bm16_bn32_bk128_wm1_wn1_wk4": ((48, 66, 3058, 4), None, None, None, None, None),
    "gemm_wgmma/bm64_bn64_s8_k2": ((51, 33, 3290, 1), None, None, None, None, None),
}
# Of swiglu, of which `_FEW` has no numbers: with 5 to 8 rows, in bfloat16 and of dense weights from 2 on ("Few rows, more points").
_SWIGLU: Mapping[int, Mapping[str, TileTimes]] = {
    _DENSE: {"small_m/t2_s4_d2_tg128": (95, 32, 1880, 5), "small_m/t2_s8_d2_tg256": (67, 25, 1984, 3)},
    _BYTES: {"small_m_mma/t4_s4_d4_tg128": (78, 39, 966, 2), "small_m_mma/r2_t2_s8_d4_tg256": (38, 16, 1479, 2)},
    _NIBBLES: {"small_m_mma/t4_s8_d4_tg256": (24, 37, 517, 1), "small_m_mma/t2_s8_d4_tg256": (45, 14, 831, 3)},
    _AFFINE: {"small_m_mma/t2_s4_d8_tg128": (29, 32, 964, 4), "small_m_mma/t2_s8_d4_tg256": (39, 17, 1054, 2)},
    _HALVES: {"small_m_mma/t2_s4_d8_tg128": (57, 25, 2285, 3)},
    _FLOATS: {"small_m_mma/t4_s8_d4_tg256": (50, 30, 1495, 2), "small_m_mma/t2_s8_d4_tg256": (45, 15, 1052, 3)},
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
        # Tiles are taken in 16 bits alone.
        ("", "swiglu", "gemv_nt_mma/r2_c2_s4_d2_tg128", 2),
        ("", "swiglu", "gemv_nt_mma/r4_c2_s4_d2_tg128", 4),
        *((storage, "swiglu", Tiles(_SWIGLU[weights_of(storage)]), 8) for storage in _core._STORAGES),
        # Up to four rows wgmma is slower.
        ("dense", "1", _tiles({v: ns for v, ns in _FEW.items() if not v.startswith("gemm_wgmma/")}, "dense"), 4),
        *((storage, "", _tiles(_FEW, storage), 8) for storage in _core._STORAGES),
        # float32, of which tensor cores have no products
        ("dense", "", "gemv_nt/r2_l32_c2_s4_tg128", 2),
        ("dense", "", "gemv_nt/r4_l16_c2_s8_tg256", 4),
        ("dense", "", Splits.of(24e3, "small_m", "t2_s8_d2_tg256", "t2_s16_d2_tg512"), 16),
        *(("", "", f"gemv_nt/r{rows}_l4_c2_s8_tg256", rows) for rows in (2, 4, 8)),
        *((storage, "", _tiles(_TILES, storage)) for storage in _core._STORAGES),
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
    parts = [source.text, kernel, repr(chosen), nvcc.identity, " ".join(given), modules.source_digest()]
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
