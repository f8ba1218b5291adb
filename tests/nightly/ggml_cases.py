"""Kernels of ggml with numbers, as ggml launches them. Weights are blocks of each format; what they mean is the gguf package's word."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from corpora_numbers import Case, numbers

FILE = "src/ggml-metal/ggml-metal.metal"
# Of each format the places of a block's scales, which are halves; all else in it is any bits.
SCALES = dict.fromkeys(("q4_0", "q5_0", "q8_0", "iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs", "iq3_s", "iq1_s", "iq4_nl", "iq4_xs"), (0,))
SCALES |= dict.fromkeys(("q4_1", "q5_1", "q4_K", "q5_K"), (0, 2))
SCALES |= {"q2_K": (80, 82), "q3_K": (108,), "q6_K": (208,), "tq2_0": (64,), "mxfp4": ()}
SMALL = {"iq2_xxs": 256 * 8 + 128, "iq2_xs": 512 * 8 + 128, "iq3_xxs": 256 * 4 + 128, "iq3_s": 512 * 4}  # bytes of threadgroup memory
SMALL |= dict.fromkeys(("iq4_nl", "iq4_xs", "mxfp4"), 128)
EXT = ("f16", "f32", "q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "mxfp4", "iq4_nl", "q4_K", "q5_K", "q6_K")  # that have kernels for some rows


def packed(**fields: tuple[str, Any]) -> bytes:
    """A structure of C: of each member its type and value."""
    kinds = [(name, kind, np.shape(value)) for name, (kind, value) in fields.items()]
    return np.array([tuple(value for _, value in fields.values())], np.dtype(kinds, align=True)).tobytes()


def int32(**values: Any) -> dict[str, tuple[str, Any]]:
    return {name: ("i4", value) for name, value in values.items()}


def uint64(**values: Any) -> dict[str, tuple[str, Any]]:
    return {name: ("u8", value) for name, value in values.items()}


def weights(kind: str, n: int, k: int) -> tuple[Any, Any, int]:
    """Rows as they lie in memory, the same in float64, and bytes of a block."""
    if kind in ("f16", "f32"):
        dense = (numbers(n, k, seed=k) / 8).astype({"f16": np.float16, "f32": np.float32}[kind])
        return dense.view(np.uint8).reshape(n, -1), dense.astype(np.float64), dense.itemsize
    of = getattr(gguf.GGMLQuantizationType, kind.upper())
    each, size = gguf.GGML_QUANT_SIZES[of]
    rng = np.random.default_rng(k)
    blocks = rng.integers(0, 256, (n * k // each, size), np.uint8)
    for place in SCALES[kind]:
        blocks[:, place : place + 2] = rng.uniform(0.01, 0.1, (len(blocks), 1)).astype(np.float16).view(np.uint8)
    if kind == "mxfp4":
        blocks[:, 0] = rng.integers(118, 126, len(blocks))  # a power of two
    rows = blocks.reshape(n, -1)
    return rows, gguf.dequantize(rows, of).astype(np.float64), size


def of_matrices(n: int, k: int, m: int, row: int, block: int) -> dict[str, tuple[str, Any]]:
    """What the products of a matrix and a vector, or several, take first. row, block: bytes of the weights'."""
    return {
        **int32(ne00=k, ne01=n, ne02=1),
        **uint64(nb00=block, nb01=row, nb02=n * row, nb03=n * row),
        **int32(ne10=k, ne11=m, ne12=1),
        **uint64(nb10=4, nb11=4 * k, nb12=4 * m * k, nb13=4 * m * k),
        **int32(ne0=n, ne1=m),
    }


def defined(root: Path) -> dict[str, int]:
    """Numbers that ggml's host and kernels share."""
    return {name: int(x) for name, x in re.findall(r"#define (\w+) +(\d+)", (root / "src/ggml-metal/ggml-metal-impl.h").read_text())}


def products(root: Path) -> Iterator[Case]:
    number = defined(root)
    ones = {"r2": ("i2", 1), "r3": ("i2", 1)}
    for kind in ("f32", "f16", *SCALES):
        for n, k in ((64, 512), (67, 768)):
            w, wide, block = weights(kind, n, k)
            dense = kind in ("f32", "f16")
            ids = np.array([3, n - 1, 0], np.int32)
            rows = {
                **int32(ne00t=k if dense else k // 16, ne00=k),
                **uint64(nb01=w.shape[1], nb02=w.nbytes, nb03=w.nbytes),
                **int32(ne10=3),
            }
            args = packed(**rows, **uint64(nb10=4, nb11=12, nb12=12, nb1=4 * k, nb2=12 * k, nb3=12 * k))
            threads = min(k if dense else k // 16, 1024)
            yield Case(
                FILE,
                f"kernel_get_rows_{kind}",
                (args, w, ids, np.zeros((3, k), np.float32)),
                {"grid": 3, "threadgroup": threads},
                3,
                wide[ids],
                1e-6,
            )

            x, out = numbers(1, k, seed=n).astype(np.float32), np.zeros((1, n), np.float32)
            each, groups = (2, min(4, -(-k // 128))) if dense else (number[f"N_R0_{kind.upper()}"], number[f"N_SG_{kind.upper()}"])
            memory = 256 if dense else 128 * each if kind == "q8_0" else SMALL.get(kind, 16)
            grid = -(-n // (each if dense or kind == "q8_0" else each * groups))
            launch: dict[str, Any] = {"grid": grid, "threadgroup": (32, groups, 1), "threadgroup_memory": {0: memory}}
            constants: dict[str | int, Any] = {600: groups, 602: 1, 603: 1, 604: 1}
            args = packed(**of_matrices(n, k, 1, w.shape[1], block), **int32(nr0=each), **ones)
            name = f"kernel_mul_mv_{kind}_f32{'_4' * dense}"
            yield Case(FILE, name, (args, w, x, out), launch, 3, x.astype(np.float64) @ wide.T, 1e-5, constants)

            if kind in EXT:
                m = 4
                x, out = numbers(m, k, seed=n).astype(np.float32), np.zeros((m, n), np.float32)
                launch = {"grid": (-(-n // 8), 1, 1), "threadgroup": (32, 2, 1)}
                args = packed(**of_matrices(n, k, m, w.shape[1], block), **ones)
                name, constants = f"kernel_mul_mv_ext_{kind}_f32_r1_4", {600: 2, 601: 8, 602: 1, 603: 1, 604: 1}
                yield Case(FILE, name, (args, w, x, out), launch, 3, x.astype(np.float64) @ wide.T, 1e-5, constants)

            m = 33 if n % 64 else 32
            x, out = numbers(m, k, seed=n).astype(np.float32), np.zeros((m, n), np.float32)
            sizes = {**int32(ne00=k, ne02=1), **uint64(nb01=w.shape[1], nb02=w.nbytes, nb03=w.nbytes), **int32(ne12=1)}
            sizes |= {**uint64(nb10=4, nb11=4 * k, nb12=x.nbytes, nb13=x.nbytes), **int32(ne0=n, ne1=m), **ones}
            edges = bool(n % 64 or m % 32)
            launch = {"grid": (-(-m // 32), -(-n // 64), 1), "threadgroup": (32, 4, 1), "threadgroup_memory": {0: 8192 if edges else 6144}}
            constants = {700: k % 32 != 0, 701: edges, 702: 1, 703: 1, 704: 1, 705: 1}
            yield Case(
                FILE, f"kernel_mul_mm_{kind}_f32", (packed(**sizes), w, x, out), launch, 3, x.astype(np.float64) @ wide.T, 2e-3, constants
            )


def along_rows() -> Iterator[Case]:
    for width in (256, 1019, 4100):
        x, out = numbers(3, width, seed=width).astype(np.float32), np.zeros((3, width), np.float32)
        wide, row, four = x.astype(np.float64), 4 * width, "_4" * (width % 4 == 0)
        each = width // 4 if four else width
        three = {**int32(nef1=[3] * 3, nef2=[1] * 3, nef3=[1] * 3), **uint64(nbf1=[row] * 3, nbf2=[3 * row] * 3, nbf3=[3 * row] * 3)}
        args = packed(**int32(ne00=width, ne00_t=each), **uint64(nb1=row, nb2=3 * row, nb3=3 * row), eps=("f4", 1e-5), **three)
        launch = {"grid": 3, "threadgroup": min(-(-each // 32) * 32, 1024), "threadgroup_memory": {0: 128}}
        centred = wide - wide.mean(-1, keepdims=True)
        normal = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
        rms = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-5)
        for name, expected in (("norm", normal), ("rms_norm", rms)):
            yield Case(FILE, f"kernel_{name}_f32{four}", (args, x, x, x, out), launch, 4, expected, 1e-5)
        for kind, dtype in (("f32", np.float32), ("f16", np.float16)):
            mask = (numbers(3, width, seed=1) * 2).astype(dtype)
            powers = np.exp(wide * 0.5 + mask.astype(np.float64) - (wide * 0.5 + mask).max(-1, keepdims=True))
            sizes = {**int32(ne00=width, ne01=3, ne02=1), **uint64(nb01=row, nb02=3 * row, nb03=3 * row), **int32(ne11=3, ne12=1, ne13=1)}
            sizes |= uint64(nb11=mask.strides[0], nb12=mask.nbytes, nb13=mask.nbytes, nb1=row, nb2=3 * row, nb3=3 * row)
            args_of = packed(**sizes, scale=("f4", 0.5), max_bias=("f4", 0), m0=("f4", 1), m1=("f4", 1), **int32(n_head_log2=1))
            arguments = (args_of, x, mask, np.full(1, -1e30, np.float32), out)  # a sink that takes nothing
            some_launch = {"grid": (3, 1, 1), "threadgroup": 64, "threadgroup_memory": {0: 128}}
            yield Case(FILE, f"kernel_soft_max_{kind}{four}", arguments, some_launch, 4, powers / powers.sum(-1, keepdims=True), 1e-5)


def one_by_one(root: Path) -> Iterator[Case]:
    number, x = defined(root), numbers(1000, seed=3).astype(np.float32)
    wide = x.astype(np.float64)
    functions: dict[str, Any] = {"TANH": np.tanh, "NEG": np.negative, "ABS": np.abs, "SGN": np.sign, "EXP": np.exp, "SQR": np.square}
    functions |= {"SIN": np.sin, "COS": np.cos, "FLOOR": np.floor, "CEIL": np.ceil, "TRUNC": np.trunc, "EXPM1": np.expm1}
    functions |= {"RELU": lambda x: np.maximum(x, 0), "SIGMOID": lambda x: 1 / (1 + np.exp(-x)), "SILU": lambda x: x / (1 + np.exp(-x))}
    functions |= {"STEP": lambda x: x > 0, "HARDSWISH": lambda x: x * np.clip((x + 3) / 6, 0, 1), "SOFTPLUS": lambda x: np.log1p(np.exp(x))}
    functions |= {"ELU": lambda x: np.where(x > 0, x, np.expm1(x))}
    for name, f in functions.items():
        for four in (False, True):
            count = len(x) // 4 if four else len(x)
            sizes = {**int32(ne00=count, ne01=1, ne02=1, ne03=1), **uint64(nb00=4, nb01=x.nbytes, nb02=x.nbytes, nb03=x.nbytes)}
            sizes |= {**int32(ne0=count, ne1=1, ne2=1, ne3=1), **uint64(nb0=4, nb1=x.nbytes, nb2=x.nbytes, nb3=x.nbytes)}
            args = packed(**sizes, **{f: ("f4", 0.0) for f in ("slope", "scale", "bias", "val", "min", "max")})
            launch = {"grid": count, "threadgroup": 1}
            constants: dict[str | int, Any] = {1200: number[f"OP_UNARY_NUM_{name}"], 1201: True}
            yield Case(FILE, f"kernel_unary_f32_f32{'_4' * four}", (args, x, np.zeros_like(x)), launch, 2, f(wide) * 1.0, 2e-6, constants)


def cases(root: Path) -> Iterator[Case]:
    """root: ggml's folder."""
    yield from products(root)
    yield from along_rows()
    yield from one_by_one(root)
