"""Kernels of PyTorch's MPS backend with numbers: one by one, and along rows."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import chain, cycle
from typing import Any

import ml_dtypes
import numpy as np
from corpora_numbers import Case, numbers

FLOATS: dict[str, Any] = {"float": np.float32, "half": np.float16, "bfloat": ml_dtypes.bfloat16}
TYPES = FLOATS | {"long": np.int64, "int": np.int32, "short": np.int16, "char": np.int8, "uchar": np.uint8, "bool": np.bool_}
CLOSE = dict.fromkeys(TYPES, 0.0) | {"float": 8e-6, "half": 4e-3, "bfloat": 2e-2}  # some roundings
SIZE, SHAPE = 1001, (7, 11, 13)


def case(file: str, kernel: str, args: Any, launch: Any, expected: Any, close: float, out: int = 0, **more: Any) -> Case:
    if not isinstance(launch, tuple):  # how many threads in all
        launch = {"threads": launch, "threadgroup": 64}
    elif len(launch) > 1:
        launch = dict(zip(("grid", "threadgroup", "threadgroup_memory"), launch, strict=False))
    else:
        launch = {"threads": launch[0], "threadgroup": (13, 4, 1)[: len(launch[0])]}
    path, more = f"aten/src/ATen/native/mps/kernels/{file}.metal", {"before": 3.0} | more
    return Case(path, kernel, args, launch, out, np.asarray(expected) * 1.0, close, **more)


def values(name: str, *shape: int, seed: int = 0) -> Any:
    return (numbers(*shape, seed=seed) if name in FLOATS else np.random.default_rng(seed).integers(1, 100, shape)).astype(TYPES[name])


def wide(x: Any) -> Any:
    return x if x.dtype.kind in "iub" else x.astype(np.float64)  # whole numbers wrap in their own type


def u32(*numbers: Any) -> Any:
    return np.array(numbers, np.uint32)


def i64(*numbers: Any) -> Any:
    return np.array(numbers, np.int64)


def lists(kind: str, *lists: Any) -> bytes:  # each with room for 16, as PyTorch's have
    return b"".join(np.array([*some, *[0] * (16 - len(some))], kind).tobytes() for some in lists)


def turned(x: Any) -> tuple[Any, Any]:
    """Of SIZE numbers a view that is not contiguous, and its strides in bytes, from the innermost axis on."""
    view = x.reshape(13, 7, 11).transpose(1, 2, 0)
    return view, i64(*view.strides[::-1])


def erfinv(x: Any) -> Any:
    y = x * 0.9
    for _ in range(60):
        y = y - (np.vectorize(math.erf)(y) - x) * math.sqrt(math.pi) / 2 * np.exp(y * y)
    return y


def unary() -> Iterator[Case]:
    args: Any
    plain: list[Any] = [np.exp, np.expm1, np.sin, np.tanh, np.exp2, np.floor, np.sinh, np.trunc, np.sinc]
    of = {f.__name__: f for f in plain} | {"round": np.rint, "neg": np.negative, "sqr": np.square, "abs": np.abs}
    of |= {"erf": np.vectorize(math.erf), "erfc": np.vectorize(math.erfc), "sigmoid": lambda x: 1 / (1 + np.exp(-x))}
    of |= {"logical_not": lambda x: x == 0, "angle": lambda x: (x < 0) * math.pi}
    over = {"log": np.log, "log1p": np.log1p, "sqrt": np.sqrt, "lgamma": np.vectorize(math.lgamma), "reciprocal": np.reciprocal}
    over |= {"rsqrt": lambda x: 1 / np.sqrt(x), "erfcx": lambda x: np.exp(x * x) * np.vectorize(math.erfc)(x)}  # of what is positive
    inside = {"asin": np.arcsin, "erfinv": erfinv, "tan": np.tan}
    names, ways = cycle(FLOATS), cycle(("dense", "strided", "dense_scalar", "strided", "dense"))
    for (op, f), name, way in zip(chain(of.items(), over.items(), inside.items()), names, ways, strict=False):
        x = values(name, SIZE)
        x = np.abs(x) + x.dtype.type(0.5) if op in over else (wide(x) / 4).clip(-0.9, 0.9).astype(x.dtype) if op in inside else x
        out, kind = np.zeros(SIZE, bool if op == "logical_not" else x.dtype), "bool" if op == "logical_not" else name
        view, strides = turned(x)
        args = (out, x, i64(*SHAPE[::-1]), strides, i64(*np.array(out.itemsize) * (1, 13, 143)), 3)
        args = args if way == "strided" else (out, x, SIZE)[: 3 - (way == "dense_scalar")]
        launch = ((13, 77),) if way == "strided" else -(-SIZE // 4) if way == "dense" else SIZE
        expected = f(wide(view if way == "strided" else x))
        yield case("UnaryKernel", f"{op}_{way}_{kind}_{name}", args, launch, expected, CLOSE[name])
    z = numbers(SIZE, 2).astype(np.float32)
    c = z[:, 0].astype(float) + 1j * z[:, 1]
    of = {f.__name__: f for f in (np.exp, np.log, np.sqrt, np.sin, np.sinh, np.tanh, np.expm1, np.reciprocal)}
    of |= {"abs": lambda c: np.abs(c) * (1 + 1j), "sigmoid": lambda c: 1 / (1 + np.exp(-c)), "rsqrt": lambda c: 1 / np.sqrt(c)}
    for op, f in (of | {"sqr": np.square, "asin": np.arcsin}).items():  # asin loses digits to its logarithms
        expected, close = np.stack((f(c).real, f(c).imag), -1), 1e-3 if op == "asin" else 1e-5
        yield case("UnaryKernel", f"{op}_dense_float2_float2", (np.zeros_like(z), z, SIZE), -(-SIZE // 4), expected, close)
    for name in FLOATS:
        x, out, close = values(name, SIZE), np.zeros(SIZE, FLOATS[name]), CLOSE[name]
        of, half, same = wide(x), np.array(0.5, x.dtype).tobytes(), f"{name}_{name}_{name}"
        shrunk, leaky = np.sign(of) * np.maximum(np.abs(of) - 0.5, 0), np.where(of < 0, of * 0.5, of)
        yield case("ActivationKernel", f"softshrink_dense_{same}", (out, x, half), SIZE, shrunk, close)
        yield case("ActivationKernel", f"leaky_relu_dense_{same}", (out, x, half), SIZE, leaky, close)
        swish, powers, pair = of * np.clip((of + 3) / 6, 0, 1), np.abs(of) ** 2.5, np.array((-0.5, 0.25), x.dtype).tobytes()
        yield case("ActivationKernel", f"hardswish_dense_{name}_{name}", (out, x, SIZE), -(-SIZE // 4), swish, close)
        kernel = f"clamp_scalar_dense_{name}_{name}_ClampScalarParams_{name}"
        yield case("TensorCompare", kernel, (out, x, pair), SIZE, of.clip(-0.5, 0.25), 0)
        yield case("UnaryKernel", f"pow_scalar_dense_{name}_{name}_float", (out, np.abs(x), 2.5), SIZE, powers, close)


def binary() -> Iterator[Case]:
    args: Any
    plain: list[Any] = [np.add, np.hypot, np.copysign, np.maximum, np.logaddexp, np.fmod, np.fmax]
    of = {f.__name__: f for f in plain} | {"sub": np.subtract, "mul": np.multiply, "atan2": np.arctan2}
    of |= {"div_true": np.divide, "div_floor": np.floor_divide, "div_trunc": lambda a, b: np.trunc(a / b), "remainder": np.mod}
    todo = [(op, name, name, f) for (op, f), name in zip([*of.items()] * 2, cycle(("float", "half", "float", "bfloat")), strict=False)]
    whole = {"gcd": np.gcd, "lcm": np.lcm, "bitwise_and": np.bitwise_and, "remainder": np.mod, "div_floor": np.floor_divide}
    todo += [(op, name, name, f) for (op, f), name in zip(whole.items(), ("long", "int", "uchar", "char", "short"), strict=True)]
    todo += [("lt", name, "bool", np.less) for name in FLOATS]
    ways = cycle(("dense", "dense_ilp4", "strided", "dense_broadcast", "dense_broadcast_rhs"))
    for (op, name, kind, f), way in zip(todo, ways, strict=False):
        a, b, out = values(name, SIZE), values(name, SIZE, seed=1), np.zeros(SIZE, TYPES[kind])
        if name in FLOATS and op in ("div_true", "div_floor", "div_trunc", "fmod", "remainder"):  # not where they jump
            a, b = np.full_like(a, 2.25) * (values("long", SIZE) % 5 - 2).astype(a.dtype), np.full_like(b, 1.5)
        a, b = a[:13] if way == "dense_broadcast_rhs" else a, b[:13] if way == "dense_broadcast" else b
        args = (out, a, b, *((SIZE,) if way == "dense_ilp4" else (13,) if "broadcast" in way else ()))
        left, right = np.resize(a, SIZE), np.resize(b, SIZE)
        if way == "strided":
            (left, lefts), (right, rights) = turned(a), turned(b)
            args = (*args, i64(*SHAPE[::-1]), i64(*np.array(out.itemsize) * (1, 13, 143)), lefts, rights, u32(3, 0, 0, 0))
        threads = -(-SIZE // 4) if way == "dense_ilp4" else SIZE
        yield case("BinaryKernel", f"{op}_{way}_{kind}_{name}", args, threads, f(wide(left), wide(right)), CLOSE[name])


def along_rows() -> Iterator[Case]:
    args: Any
    for name, width in zip(FLOATS, (1019, 40, 5000), strict=True):
        x, w, b = (values(name, *shape, seed=width) for shape in ((5, width), (width,), (width,)))
        of, out, looped, close = wide(x), np.zeros_like(x), "_looped" * (width > 4096), CLOSE[name]
        threads, y = 1024 if looped else -(-width // 128) * 32, np.tile(w, (5, 1))
        rms = of / np.sqrt((of**2).mean(-1, keepdims=True) + 1e-5) * wide(w)
        yield case("RMSNorm", f"rms_norm{looped}_{name}", (x, w, out, 1e-5, width, 1), (5, threads), rms, close, 2)
        normal = (of - of.mean(-1, keepdims=True)) / np.sqrt(of.var(-1, keepdims=True) + 1e-5) * wide(w) + wide(b)
        args, kernel = (x, out, *np.zeros((2, 5), x.dtype), width, 1e-5, 1, 1, w, b), f"layer_norm{looped or '_single_row'}_{name}"
        yield case("LayerNorm", kernel, args, (5, threads), normal, close, 1)
        powers, chunks = np.exp(of - of.max(-1, keepdims=True)), -(-width // 300)
        soft = powers / powers.sum(-1, keepdims=True)
        sizes = u32(width, 5, 1, 300, chunks, 2, 1).tobytes() + lists("u4", (5, width), (width, 1))
        of_chunks = [(p.max(-1), np.exp(p - p.max(-1, keepdims=True)).sum(-1)) for p in np.split(of, range(300, width, 300), 1)]
        parts, split = np.stack(of_chunks).transpose(2, 0, 1).astype(np.float32, "C"), ((chunks, 5), (256, 1))
        yield case("SoftMax", f"softmax_row_{name}_u32", (x, out, sizes), (1, 256), soft, close, 1)
        yield case("SoftMax", f"log_softmax_row_{name}_u32", (x, out, sizes), (1, 256), np.log(soft), close, 1)
        yield case("SoftMax", f"softmax_partial_{name}_u32", (x, np.zeros_like(parts), sizes), split, parts, 1e-5, 1)
        yield case("SoftMax", f"log_softmax_finalize_{name}_u32", (x, out, parts, sizes), split, np.log(soft), close, 1)
        kernel = f"softmax_backward_{'row' if name == 'float' else 'looped'}_{name}_u32"
        grad = wide(y) * (of - (of * wide(y)).sum(-1, keepdims=True))
        yield case("SoftMax", kernel, (x, y, out, sizes), ((5, 1, 1), (threads, 1, 1)), grad, close, 2)
        down, grid = u32(5, width, width, 3, 2, 2, 0).tobytes() + lists("u4", (5, width), (width, 1)), (-(-width // 32), 1)
        yield case("SoftMax", f"softmax_{name}_u32", (x, out, down), (grid, (32, 4)), np.exp(of) / np.exp(of).sum(0), close, 1)
        x, n = values(name, 2, 6, 35), values(name, 6, seed=3)  # groups of three channels
        of, stats = wide(x).reshape(4, 105), np.zeros((2, 4), np.float32)
        args = (np.zeros_like(x), *stats, x, n, None, u32(35, 2, 3, 105, 6, 70).tobytes() + np.float32(1e-5).tobytes())
        normal = (of - of.mean(-1, keepdims=True)) / np.sqrt(of.var(-1, keepdims=True) + 1e-5)
        normal = normal.reshape(x.shape) * wide(n)[:, None]
        yield case("GroupNorm", f"group_norm_{name}_float_{name}_void_uint32_t", args, (4, 64), normal, close)
