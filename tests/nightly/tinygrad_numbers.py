#!/usr/bin/env python3
"""Tensors of tinygrad (pip install tinygrad) against NumPy, its kernels for Metal on a device of metalmm: how many are right.

    python tests/nightly/tinygrad_numbers.py [--device cpu]

tinygrad loads its module of a device by name; here that name is this file's. METALMM_CXX chooses device cpu's compiler. Exit status 1 where a
case is not right.
"""

from __future__ import annotations

import argparse
import os
import sys
import types
from collections.abc import Callable
from typing import Any

import numpy as np

os.environ |= {"DEV": "METAL", "CACHELEVEL": "0", "PARALLEL": "0", "METALMM_LINT": "0"}

import metalmm
import tinygrad.device as of_tinygrad  # ships types for part of its modules alone

KERNELS = set[str]()
METALMM: list[metalmm.Device] = []


class MetalCompiler(of_tinygrad.Compiler):  # the name that MetalRenderer asks for
    def __init__(self) -> None:
        super().__init__(None)

    def compile(self, text: str) -> bytes:
        return text.encode()


class Program(of_tinygrad.Program):
    """One kernel: the device compiles it, and runs it on memory that the allocator gave."""

    def __init__(self, device: Any, made: Any) -> None:
        text = made.lib.decode()
        KERNELS.add(text)
        self.kernel, self.signature = METALMM[0].compile(text).kernel(made.name), made.signature

    def __call__(self, *bufs: Any, global_size: Any = (1, 1, 1), local_size: Any = (1, 1, 1), vals: Any = (), **_: Any) -> float:
        given = {
            at: np.array(value, f"i{dtype.itemsize}") for value, (_, at, dtype, _) in zip(vals, self.signature[len(bufs) :], strict=True)
        }
        self.kernel({**dict(enumerate(bufs)), **given}, grid=global_size, threadgroup=local_size)
        return 0.0


class Allocator(of_tinygrad.Allocator):
    def _alloc(self, size: int, options: Any) -> Any:
        return np.zeros(size, np.uint8)

    def _copyin(self, dest: Any, src: memoryview) -> None:
        dest[:] = np.frombuffer(src, np.uint8)

    def _copyout(self, dest: memoryview, src: Any) -> None:
        np.frombuffer(dest, np.uint8)[:] = src

    def _offset(self, buf: Any, size: int, offset: int) -> Any:
        return buf[offset : offset + size]


class MetalDevice(of_tinygrad.Compiled):
    def __init__(self, name: str) -> None:
        from tinygrad.renderer.cstyle import MetalRenderer

        super().__init__(name, Allocator(self), [MetalRenderer], Program, arch="Apple8")  # with simdgroup matrices


def cases() -> dict[str, tuple[Callable[..., Any], Callable[..., Any], list[Any], float]]:
    """By name: of tensors, the same of NumPy's arrays, these arrays, and how close."""
    drawn = np.random.default_rng(0)
    x, y = (drawn.standard_normal((37, 53)).astype(np.float32) for _ in range(2))
    found: dict[str, Any] = {}
    one: dict[str, Any] = {"exp": np.exp, "sin": np.sin, "tanh": np.tanh, "square": np.square, "abs": np.abs, "floor": np.floor}
    one |= {"relu": lambda x: np.maximum(x, 0), "sigmoid": lambda x: 1 / (1 + np.exp(-x)), "silu": lambda x: x / (1 + np.exp(-x))}
    for name, of in one.items():
        found[name] = lambda t, name=name: getattr(t, name)(), of, [x], 1e-5
    for name, of in {"log": np.log, "sqrt": np.sqrt, "rsqrt": lambda x: 1 / np.sqrt(x), "log2": np.log2}.items():
        found[name] = lambda t, name=name: getattr(t, name)(), of, [np.abs(x) + 0.1], 1e-5
    two = {"add": np.add, "mul": np.multiply, "sub": np.subtract, "div": np.divide, "maximum": np.maximum}
    for name, of in two.items():
        found[name] = lambda a, b, name=name: getattr(a, name)(b), of, [x, y], 1e-5
    for axis in (None, 0, 1):
        found[f"sum {axis}"] = lambda t, axis=axis: t.sum(axis), lambda x, axis=axis: x.sum(axis), [x], 1e-5
        found[f"max {axis}"] = lambda t, axis=axis: t.max(axis), lambda x, axis=axis: x.max(axis), [x], 0
    found["softmax"] = lambda t: t.softmax(), lambda x: np.exp(x) / np.exp(x).sum(-1, keepdims=True), [x], 1e-5
    found["layernorm"] = (
        lambda t: t.layernorm(),
        lambda x: (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5),
        [x],
        1e-5,
    )
    found["cumsum"] = lambda t: t.cumsum(1), lambda x: x.cumsum(1), [x], 1e-5
    found["argmax"] = lambda t: t.argmax(1), lambda x: x.argmax(1), [x], 0
    found["sort"] = lambda t: t.sort(1)[0], lambda x: np.sort(x, 1), [x], 0
    found["where"] = lambda a, b: (a > b).where(a, b * 2), lambda a, b: np.where(a > b, a, b * 2), [x, y], 1e-6
    found["transposed"] = lambda t: t.T.contiguous(), lambda x: x.T, [x], 0
    found["padded"] = lambda t: t.pad(((1, 2), (3, 0))), lambda x: np.pad(x, ((1, 2), (3, 0))), [x], 0
    found["gathered"] = lambda t, i: t[i], lambda x, i: x[i], [x, drawn.integers(0, 37, 20).astype(np.int32)], 0
    pixels, weights = drawn.standard_normal((1, 3, 12, 12)).astype(np.float32), drawn.standard_normal((4, 3, 3, 3)).astype(np.float32)

    def convolved(x: Any, w: Any) -> Any:
        windows = np.lib.stride_tricks.sliding_window_view(x, (3, 3), (2, 3))
        return np.einsum("bcyxij,ocij->boyx", windows, w)

    found["conv2d"] = lambda x, w: x.conv2d(w), convolved, [pixels, weights], 1e-5
    for dtype, close in ((np.float32, 1e-5), (np.float16, 4e-3)):
        for m, n, k in ((1, 64, 96), (16, 64, 64), (64, 128, 96), (33, 65, 17)):
            a, b = drawn.standard_normal((m, k)).astype(dtype), drawn.standard_normal((k, n)).astype(dtype)
            found[f"matmul {m} {n} {k} {dtype.__name__}"] = lambda a, b: a @ b, lambda a, b: a.astype(np.float64) @ b, [a, b], close
    whole = drawn.integers(-90, 90, (20, 30)).astype(np.int8), drawn.integers(1, 9, (20, 30)).astype(np.int32)
    found["int8 to int32"] = lambda a, b: a.cast("int") * b, lambda a, b: a.astype(np.int32) * b, list(whole), 0
    found["shifts"] = lambda a, b: (a << 3) ^ (b >> 1), lambda a, b: (a << 3) ^ (b >> 1), [whole[1], whole[1] * 5], 0
    found["bfloat16"] = lambda t: (t.cast("bfloat16") * 3).float(), lambda x: x * 3, [x], 1e-2
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default=os.environ.get("METALMM_DEVICE", "cpu"))
    args = parser.parse_args()
    METALMM.append(metalmm.Device(args.device))
    module = types.ModuleType("tinygrad.runtime.ops_metal")
    module.__dict__.update(MetalCompiler=MetalCompiler, MetalDevice=MetalDevice)
    sys.modules[module.__name__] = module
    MetalDevice.__module__ = module.__name__
    from tinygrad import Tensor

    right, found = 0, cases()
    for name, (of_tensors, of_arrays, arrays, close) in found.items():
        expected = np.asarray(of_arrays(*arrays), np.float64)
        try:
            out = of_tensors(*map(Tensor, arrays)).numpy().astype(np.float64)
        except metalmm.Error as error:
            print(f"{name}: {str(error)[:300]}", flush=True)
            continue
        off = np.abs(out - expected).max() / np.abs(expected).max() if out.shape == expected.shape else np.inf
        right += bool(off <= close)
        if not off <= close:
            print(f"{name}: off by {off:.2g} of the largest; {close:g} is allowed", flush=True)
    print(f"tinygrad on device {args.device}: {right} of {len(found)} cases are right, by {len(KERNELS)} kernels")
    return right != len(found)


if __name__ == "__main__":
    sys.exit(main())
