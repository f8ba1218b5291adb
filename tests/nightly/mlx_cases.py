"""Kernels of MLX with numbers, as MLX launches them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import metalmm
import numpy as np
from corpora_numbers import Case, numbers

TYPES = {"float32": np.float32, "float16": np.float16}
KINDS = {"float32": "float", "float16": "float16_t"}  # as MLX has it in some names
NOTHING = np.zeros(1, np.int64)


def close_to(name: str) -> float:
    return 2e-5 if name == "float32" else 4e-3


def elementwise() -> Iterator[Case]:
    x, y = np.abs(numbers(1003)) + 0.1, numbers(1003, seed=1)
    one = {
        "Exp": np.exp,
        "Log": np.log,
        "Sin": np.sin,
        "Tanh": np.tanh,
        "Sqrt": np.sqrt,
        "Abs": np.abs,
        "Square": np.square,
        "Ceil": np.ceil,
    }
    one |= {"Erf": np.vectorize(math.erf), "Sigmoid": lambda x: 1 / (1 + np.exp(-x)), "Rsqrt": lambda x: 1 / np.sqrt(x), "Log1p": np.log1p}
    two = {"Add": np.add, "Multiply": np.multiply, "Maximum": np.maximum, "Divide": np.divide, "Power": np.power, "Remainder": np.mod}
    two |= {"ArcTan2": np.arctan2, "LogAddExp": np.logaddexp}
    for name, dtype in TYPES.items():
        a, b = x.astype(dtype), y.astype(dtype)
        wide_a, wide_b, out = a.astype(np.float64), b.astype(np.float64), np.zeros_like(a)
        size, launch, close = np.uint32(a.size), {"threads": a.size, "threadgroup": 64}, close_to(name)
        for op, of_one in one.items():
            yield Case("unary.metal", f"v_{op}{name}{name}", (a, out, size), launch, 1, of_one(wide_a), close)
        for op, of_two in two.items():
            yield Case("binary.metal", f"vv_{op}{name}", (a, b, out, size), launch, 2, of_two(wide_a, wide_b), close)
        yield Case("arange.metal", f"arange{name}", (dtype(1), dtype(0.5), out), launch, 2, 1 + 0.5 * np.arange(a.size), close)


def along_rows() -> Iterator[Case]:
    for name, dtype in TYPES.items():
        # Of a threadgroup, with a rest, in a loop. layer_norm writes before its array where a thread has nothing of the row, as of 1000.
        for width in (256, 1019, 4099):
            x, w, b = (numbers(*shape, seed=width).astype(dtype) for shape in ((3, width), (width,), (width,)))
            wide, out, close = x.astype(np.float64), np.zeros_like(x), close_to(name)
            way, looped = ("looped", "_looped") if width > 4096 else ("block", "")
            threads, of_eight = (1024 if looped else -(-width // (32 * each)) * 32 for each in (4, 8))
            launch, eps, size, one = {"grid": 3, "threadgroup": threads}, np.float32(1e-5), np.uint32(width), np.uint32(1)
            rms = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-5) * w
            yield Case("rms_norm.metal", f"rms{looped}{name}", (x, w, out, eps, size, one), launch, 2, rms, close, {20: True})
            centred = wide - wide.mean(-1, keepdims=True)
            normal = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * w + b.astype(np.float64)
            norm = {"grid": 3, "threadgroup": of_eight}
            yield Case(
                "layer_norm.metal", f"layer_norm{looped}{name}", (x, w, b, out, eps, size, one, one), norm, 3, normal, close, {20: True}
            )
            powers = np.exp(wide - wide.max(-1, keepdims=True))
            soft = powers / powers.sum(-1, keepdims=True)
            yield Case("softmax.metal", f"{way}_softmax_{name}", (x, out, np.int32(width)), launch, 1, soft, close)
            sums = np.log(np.exp(wide).sum(-1))
            yield Case("logsumexp.metal", f"{way}_logsumexp_{name}", (x, np.zeros(3, dtype), np.int32(width)), launch, 1, sums, close)
            scan, kernel = {"grid": (1, 3, 1), "threadgroup": (threads, 1, 1)}, f"contig_scan_inclusive_sum_{name}_{name}"
            yield Case("scan.metal", kernel, (x, out, np.uint64(width)), scan, 1, np.cumsum(wide, -1), 16 * close)


def products() -> Iterator[Case]:
    zero, one, shape = np.int32(0), np.int32(1), np.zeros(4, np.int32)
    of_gemv = (np.float32(1), np.float32(0), one, np.ones(1, np.int32), NOTHING, NOTHING, NOTHING, one)  # alpha, beta, no batch
    of_qmv = (zero, shape, NOTHING, zero, shape, NOTHING, NOTHING, NOTHING)
    for name, dtype in TYPES.items():
        close, kind = 4 * close_to(name), KINDS[name]
        for n, k in ((64, 512), (67, 1024), (136, 640)):
            w, x = (numbers(*shape, seed=n).astype(dtype) for shape in ((n, k), (k,)))
            out, rows, columns, wide = np.zeros(n, dtype), np.int32(n), np.int32(k), x.astype(np.float64)
            launch = {"grid": (-(-n // 16), 1, 1), "threadgroup": (32, 1, 4)}
            kernel, arguments = f"gemv_{name}_bm4_bn1_sm1_sn32_tm4_tn4_nc0_axpby0", (w, x, x, out, columns, rows, columns, *of_gemv)
            yield Case("gemv.metal", kernel, arguments, launch, 3, w.astype(np.float64) @ wide, close)
            for bits in (4, 8):
                q = metalmm.quantize(w, f"affine{bits}")
                arguments = (np.ascontiguousarray(q.values).view(np.uint32), q.scales, q.biases, x, out, columns, rows, *of_qmv)
                launch = {"grid": (1, -(-n // 8), 1), "threadgroup": (32, 2, 1)}
                for way in ("qmv", "qmv_fast") if n % 8 == 0 and k % 512 == 0 else ("qmv",):
                    kernel, expected = f"affine_{way}_{kind}_gs_64_b_{bits}_batch_0", q.dequantize().astype(np.float64) @ wide
                    yield Case("quantized.metal", kernel, arguments, launch, 4, expected, close)


def attention() -> Iterator[Case]:
    heads, groups, length = 4, 2, 77
    constants: dict[str | int, Any] = {20: False, 21: False, 22: False, 23: False, 24: False, 25: False, 26: 1}
    for name, dtype in TYPES.items():
        for d in (64, 128):
            shapes = ((heads, d), (heads // groups, length, d), (heads // groups, length, d))
            q, k, v = (numbers(*shape, seed=d).astype(dtype) for shape in shapes)
            scale, wide_q, (wide_k, wide_v) = (
                1 / math.sqrt(d),
                q.astype(np.float64),
                (np.repeat(x.astype(np.float64), groups, 0) for x in (k, v)),
            )
            scores = np.einsum("hd,hld->hl", wide_q * scale, wide_k)
            powers = np.exp(scores - scores.max(-1, keepdims=True))
            expected = np.einsum("hl,hld->hd", powers / powers.sum(-1, keepdims=True), wide_v)
            strides = (np.uint64(length * d), np.uint64(d)) * 2
            arguments = (q, k, v, np.zeros_like(q), np.int32(groups), np.int32(length), *strides, np.float32(scale))
            kernel, launch = f"sdpa_vector_{KINDS[name]}_{d}_{d}", {"grid": (heads, 1, 1), "threadgroup": (1024, 1, 1)}
            yield Case("scaled_dot_product_attention.metal", kernel, arguments, launch, 3, expected, 4 * close_to(name), constants)


def cases(root: Path) -> Iterator[Case]:
    """root: MLX's folder."""
    for make in (elementwise, along_rows, products, attention):
        for case in make():
            case.file = f"mlx/backend/metal/kernels/{case.file}"
            yield case
