"""Kernels of candle with numbers, as candle launches them; q2_K over its rows only, where candle goes on for as many behind them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle, permutations, product
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from corpora_numbers import Case, numbers
from ggml_cases import weights

FLOATS: dict[str, Any] = {"f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16}
TYPES = FLOATS | {"u8": np.uint8, "u32": np.uint32, "i64": np.int64}
CLOSE = dict.fromkeys(TYPES, 0.0) | {"f32": 3e-6, "f16": 2e-3, "bf16": 1.6e-2}  # some roundings
SIZE, SHAPE, SDPA = 1001, np.array((7, 11, 13), np.uint64), "scaled_dot_product_attention"


def case(file: str, kernel: str, args: Any, launch: Any, expected: Any, close: float, out: int = -1, **more: Any) -> Case:
    launch = launch if isinstance(launch, tuple) else (-(-launch // 1024), min(launch, 1024))  # how many threads in all
    launch = dict(zip(("grid", "threadgroup", "threadgroup_memory"), launch, strict=False))
    return Case(f"candle-metal-kernels/src/metal_src/{file}.metal", kernel, args, launch, out, expected * 1.0, close, before=3.0, **more)


def values(name: str, *shape: int, seed: int = 0) -> Any:
    return (numbers(*shape, seed=seed) if name in FLOATS else np.random.default_rng(seed).integers(1, 100, shape)).astype(TYPES[name])


def wide(x: Any) -> Any:
    return x if x.dtype.kind in "iu" else x.astype(np.float64)  # whole numbers wrap in their own type


def strides(x: Any) -> Any:
    return (np.array(x.strides) // x.itemsize).astype(np.uint64)


def seen(x: Any, way: str) -> Any:  # as a tensor of SHAPE: contiguous, strided or one number
    return {"c": x.reshape(7, 11, 13), "s": x.reshape(13, 7, 11).transpose(1, 2, 0), "1": np.broadcast_to(x[0], (7, 11, 13))}[way]


def one_by_one() -> Iterator[Case]:
    of: dict[str, Any] = {f.__name__: f for f in (np.cos, np.sin, np.exp, np.ceil, np.floor, np.sign, np.tanh, np.sqrt, np.log)}
    of |= {"abs": np.abs, "sqr": np.square, "recip": np.reciprocal, "neg": np.negative, "silu": lambda x: x / (1 + np.exp(-x))}
    todo = [("unary", f"{op}_{name}", name, name, f, ()) for (op, f), name in zip(of.items(), cycle(FLOATS), strict=False)]
    todo += [("affine", f"affine_{name}", name, name, lambda x: x * 2 + 3, (2.0, 3.0)) for name in TYPES]
    todo += [("cast", f"cast_{a}_{b}", a, b, np.array if b in FLOATS else np.floor, ()) for a, b in [*permutations(TYPES, 2)][::4]]
    for way, (file, kernel, a, b, f, before) in zip(cycle("cs"), todo, strict=False):
        x = np.abs(values(a, SIZE)) + TYPES[a](1) if file == "cast" or kernel[:3] in ("sqr", "log", "rec") else values(a, SIZE)
        before = (SIZE, *before) if way == "c" else (SIZE, 3, SHAPE, strides(seen(x, way)), *before)
        args, kernel, expected = (*before, x, np.zeros(SIZE, TYPES[b])), kernel + "_strided" * (way == "s"), f(wide(seen(x, way)))
        yield case(file, kernel, args, SIZE if way == "s" else -(-SIZE * x.itemsize // 8), expected, max(CLOSE[a], CLOSE[b]))
    ways = {"": "cc", "_strided": "ss", "_lstrided": "sc", "_rstrided": "cs", "_scalar": "11", "_cs": "c1", "_sc": "1c"}
    pairs = {"badd": np.add, "bsub": np.subtract, "bmul": np.multiply, "bmaximum": np.maximum, "bdiv": np.divide, "lt": np.less}
    for (op, f), name, (way, sides) in zip([*pairs.items()] * 3, cycle(["bf16", *TYPES]), cycle(ways.items()), strict=False):
        two, out = (values(name, SIZE), values(name, SIZE, seed=1)), np.zeros(SIZE, bool if op == "lt" else TYPES[name])
        left, right = map(seen, two, sides)
        args = (SIZE, *((3, SHAPE, strides(left), strides(right)) if way else ()), *two, out)
        expected = f(wide(left), wide(right)) if name in FLOATS else np.floor(f(left, right))
        yield case("binary", f"{op}_{name}{way}", args, -(-SIZE * two[0].itemsize // 8), expected, CLOSE[name])
    for ids, name, sides in zip(cycle(("u8", "u32", "i64")), TYPES, cycle(("ccc", "scs", "csc")), strict=False):
        three = (values(ids, SIZE) % 2 << (6 if ids == "u8" else 31), values(name, SIZE), values(name, SIZE, seed=1))
        views, constants = [*map(seen, three, sides)], {i: way == "c" for i, way in enumerate(sides)}
        args = (SIZE, 3, SHAPE, *map(strides, views), *three, np.zeros(SIZE, TYPES[name]))
        yield case("ternary", f"where_{ids}_{name}", args, SIZE, np.where(*map(wide, views)), 0, constants=constants)
        yield case("fill", f"fill_{name}", (np.zeros(35, TYPES[name]), 9, 33), 33, np.array([9] * 33 + [3] * 2), 0, out=0)
    for (way, expected), name in product((("uniform", [1, 4 / 12**0.5]), ("normal", [-1, 3])), FLOATS):
        args = (10007, -1, 3, np.array([299792458, 7], np.uint32), np.zeros(10007, TYPES[name]))
        yield case("random", f"rand_{way}_{name}", args, 5004, np.array(expected), 0.05, read=lambda x: np.array([x.mean(), x.std()]))


def cases(root: Path) -> Iterator[Case]:
    yield from one_by_one()
    for (name, p, s), ids in zip((("f32", 2, 2), ("f16", 1, 1), ("bf16", 2, 3)), ("u32", "i64", "u8"), strict=True):
        x, which = values(name, 7, 9, 3, 2).transpose(3, 2, 1, 0), np.array([2, 0, 1], TYPES[ids])
        image, pad = (np.array(x.shape, np.uint64), strides(x), x.base), np.pad(wide(x), [(0, 0), (0, 0), (p, p), (p, p)])
        args = (378, 2, 3, 63, 3, True, *image[:2], np.ascontiguousarray(x), which, np.zeros(378, x.dtype))
        yield case("indexing", f"is_{ids}_{name}", args, 378, wide(x)[:, which], 0)
        columns = np.lib.stride_tricks.sliding_window_view(pad, (3, 2), (2, 3))[:, :, ::s, ::s].transpose(0, 2, 3, 1, 4, 5)
        args = (columns.size, *columns.shape[1:3], 3, 2, s, p, 1, *image, np.zeros(columns.size, x.dtype))
        yield case("conv", f"im2col_{name}", args, columns.size, columns, 0)
    for name, width in zip(TYPES, (1019, 40, 5000, 1019, 3, 40), strict=True):
        x, launch = values(name, width, 6).T, (6, min(1024, 1 << (width // 2 - 1).bit_length()))
        for op in ("sum", "max", "argmin"):
            out = np.zeros(6, np.uint32 if op == "argmin" else x.dtype)
            args = (x.size, 2, np.array(x.shape, np.uint32), np.array((1, 6), np.uint32), width, x.base, out)
            expected = getattr(np, op)(wide(x), -1).astype(out.dtype if name not in FLOATS else float)
            yield case("reduce", f"fast_{op}_{name}_strided", args, launch, expected, 4 * CLOSE[name])
        x = np.random.default_rng(width).permuted(np.tile(np.arange(100), (6, 1)), axis=1).astype(x.dtype)  # none twice
        out, order = np.zeros(x.shape, np.uint32), np.argsort(x.astype(float), 1)
        yield case("sort", f"asort_desc_{name}", (x, out, 100, 128), ((1, 6), 128, {0: 512}), order[:, ::-1], 0, out=1)
        yield case("mlx_sort", f"carg_block_sort_{x.dtype}_uint32_bn128_tn8", (x, out, 100, 1, 1, 100, 100), ((1, 6), 128), order, 0, out=1)
    for name, width in zip(FLOATS, (1019, 40, 5000), strict=True):
        x, w, b = (values(name, *shape, seed=width) for shape in ((6, width), (width,), (width,)))
        of, before, launch = wide(x), (x.size, width, x, np.zeros_like(x)), (6, min(1024, 1 << (width // 2 - 1).bit_length()))
        rms = of / np.sqrt((of**2).mean(-1, keepdims=True) + 1e-5) * wide(w)
        normal = (of - of.mean(-1, keepdims=True)) / np.sqrt(of.var(-1, keepdims=True) + 1e-5) * wide(w) + wide(b)
        soft = np.exp(of) / np.exp(of).sum(-1, keepdims=True)
        for kernel, more, expected in (("softmax", (), soft), ("rmsnorm", (w, 1e-5), rms), ("layernorm", (w, b, 1e-5), normal)):
            yield case("reduce", f"{kernel}_{name}", (*before, *more), launch, expected, CLOSE[name], out=3)
        x, (c, s) = values(name, 6, 5, 16), numbers(2, 5, 8).astype(x.dtype)
        z = (wide(x)[..., :8] + 1j * wide(x)[..., 8:]) * (wide(c) + 1j * wide(s))
        yield case("reduce", f"rope_{name}", (6, 80, 16, 0, x, c, s, np.zeros_like(x)), 240, np.block([z.real, z.imag]), CLOSE[name])
    groups = dict.fromkeys(("q4_0", "q4_1", "q5_0", "q5_1", "q8_0"), (8, 8, 8)) | {"q2_K": (2, 32, 8), "q3_K": (2, 32, 4)}
    for kind, (one, two, rows) in (groups | {"q4_K": (4, 8, 4), "q5_K": (2, 32, 4), "q6_K": (2, 32, 2)}).items():
        (x, of, _), y, out = weights(kind, 72, 512), values("f32", 35, 512), np.zeros((35, 72), np.float32)
        args, expected = (x, y, out, 512, 72, 1, 0, 0, 0, 512, 35, 1, 0, 0, 0, 72, 35, 1, 1), wide(y) @ of.T
        yield case("quantized", f"kernel_mul_mv_{kind}_f32", args, ((72 // rows, 35), (one, two)), expected, 1e-5, out=2)
    todo = (("nn", "f32", "64_32_32_2_2"), ("nt", "bf16", "32_32_16_2_2"), ("tn", "f16", "64_64_16_1_2"))
    for (ways, name, tile), (batch, m, n, k) in product(todo, ((1, 128, 64, 96), (2, 70, 53, 45))):
        a, b, (bm, bn, bk, wm, wn) = values(name, batch, m, k), values(name, batch, k, n, seed=1), map(int, tile.split("_"))
        stored = [np.ascontiguousarray(x.swapaxes(1, 2) if way == "t" else x) for x, way in zip((a, b), ways, strict=True)]
        grid, steps, sides = (-(-n // bn), -(-m // bm), batch), np.array((m * k, k * n, m * n)), [x.shape[2] for x in stored]
        params = np.array([m, n, k, *sides, n, *grid[:2]], "i4").tobytes() + steps.tobytes() + np.array([0, k // bk, 1, 0], "i4").tobytes()
        args = (*stored, None, np.zeros((batch, m, n), a.dtype), params, None, np.int32(batch), steps[:2])
        more = {"out": 3, "constants": {10: batch > 1, 100: False, 110: False, 200: m == 128, 201: n == 64, 202: k == 96, 300: False}}
        yield case("mlx_gemm", f"gemm_{ways}_{name}_{name}_{tile}", args, (grid, (32, wn, wm)), wide(a) @ wide(b), CLOSE[name], **more)
    for name, kind, d, bk in (("f32", "float", 64, 32), ("f16", "float16_t", 128, 16), ("bf16", "bfloat16_t", 96, 32)):
        q, k, v, mask = (values(name, 2, *of, seed=i) for i, of in enumerate(((4, 45, d), (2, 83, d), (2, 83, d), (4, 45, 83))))
        of_v, powers, out = wide(v).repeat(2, 1), np.exp(wide(q) @ wide(k).repeat(2, 1).swapaxes(2, 3) / d**0.5), np.zeros_like(q)
        args, more = (q[0, :, 0].copy(), k[0], v[0], out[0, :, 0].copy(), 2, 83, 83 * d, 83 * d, d**-0.5, 1.0), {20: False}
        expected = powers[0, :, :1] @ of_v[0] / powers[0, :, :1].sum(-1, keepdims=True)
        yield case(SDPA, f"sdpa_vector_{kind}_{d}", args, ((1, 4), 1024), expected, CLOSE[name], out=3, constants=more)
        sides = np.array([2, 4, d, 45, 83, 2, 0, 0, 2, -(-83 // bk), 1, 83 // bk, 13, 83 % bk, 38, 0], "i4")
        sides[6:8] = np.array([d**-0.5, 1], "f4").view("i4")  # scale, no soft caps
        args = (q, k, v, out, sides.tobytes() + np.array([strides(x)[:3] for x in (q, k, v, out)]).tobytes(), strides(mask)[:3], mask)
        powers, constants = powers * np.exp(wide(mask)), {200: False, 201: False, 300: True, 301: False}
        kernel, more = f"steel_attention_{q.dtype}_bq32_bk{bk}_bd{d}_wm4_wn1_mask{q.dtype}", {"out": 3, "constants": constants}
        yield case(SDPA, kernel, args, ((2, 4, 2), (32, 4)), powers @ of_v / powers.sum(-1, keepdims=True), CLOSE[name], **more)
