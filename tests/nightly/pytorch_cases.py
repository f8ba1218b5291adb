"""Kernels of PyTorch's MPS backend with numbers, as it launches them; those that the folder lacks are left out."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from corpora_numbers import Case, numbers
from pytorch_elementwise import CLOSE, FLOATS, TYPES, along_rows, binary, case, i64, lists, u32, unary, values, wide


def of_places() -> Iterator[Case]:
    args: Any
    launch: Any
    counts: Any
    for name in ("float", "half", "bfloat", "int"):
        x, y = values(name, 4, 3, 5), values(name, 5, 3, 4, seed=1).transpose(2, 1, 0)
        cross = np.cross(wide(x), wide(y), axis=1)
        yield case("CrossKernel", f"cross_dense_{name}", (np.zeros_like(x), x, np.ascontiguousarray(y), 5), 20, cross, CLOSE[name])
        steps = (i64(4, 5), *(i64(*v.strides) // v.itemsize for v in (x, x, y)), 3, 1)
        yield case("CrossKernel", f"cross_strided_{name}", (np.zeros_like(x), x, y.base, *steps), 20, cross, CLOSE[name])
        out, all_of = np.zeros((3, 7, 5), np.float32), np.full((3, 7, 5), 3.0)
        all_of[:, 2:6] = wide(values(name, 3, 4, 5))
        for kind, bits in (("int32_t", "i4"), ("int64_t", "i8")):
            shared = np.array((3, 1), "i4").tobytes() + lists(bits, (35, 5, 1), (3, 7, 5))
            args = (values(name, 3, 4, 5), out, shared, np.array((2, 0), bits).tobytes() + lists(bits, (20, 5, 1), (3, 4, 5)))
            yield case("Shape", f"cat_{kind}_{name}_float", args, 60, all_of, 0, 1)
        edges, x = np.sort(values(name, 83, seed=2)), values(name, 501)
        order = np.random.default_rng(1).permutation(83)
        mixed = np.empty_like(edges)
        mixed[order] = edges
        for side in (0, 1):
            found = np.searchsorted(wide(edges), wide(x), ("left", "right")[side])
            args, launch = (x, edges, np.zeros(501, np.int32), 501, 83, 501, side, 1), ((1, 1), (256, 1))
            yield case("Bucketization", f"searchsorted_{name}_int", args, launch, found, 0, 2)
            args = (x, mixed, np.zeros(501, np.int64), 501, 83, 501, side, 1, order)
            yield case("Bucketization", f"searchsorted_{name}_long_sorter", args, launch, found, 0, 2)
        out, se = np.zeros((501, 2), TYPES[name]), np.array((3, 2), np.int64 if name == "int" else np.float32).tobytes()
        expected = np.stack((3 + 2 * np.arange(501.0), np.full(501, 3)), -1)
        yield case("RangeFactories", f"arange_{name}_i32", (out, se, 2), 501, expected, CLOSE[name])
        if name != "int":
            args = (np.zeros(501, TYPES[name]), np.array((-1, 0.01, 4), "f4").tobytes(), np.array((501, 1), "i4").tobytes())
            yield case("RangeFactories", f"linspace_{name}_i32", args, 501, np.linspace(-1, 4, 501), CLOSE[name])
            norm = np.abs(values(name, 501))
            expected = np.where(wide(norm) > 0.75, 0.75 / (wide(norm) + 1e-7), 1)
            yield case("RenormKernel", f"renorm_{name}", (norm, np.zeros_like(norm), 0.75), 501, expected, CLOSE[name], 1)
            x = values(name, 9, 13)
            one, two = np.triu_indices(9, 1)
            for p, mode in ((1, 1), (2, 2), (math.inf, 3), (3, 4)):
                far = np.linalg.norm(wide(x)[one] - wide(x)[two], p, -1)
                args = (np.zeros(36, x.dtype), x, 9, 13, float(p), mode)
                yield case("Distance", f"pdist_forward_{name}", args, 36, far, 2 * CLOSE[name])
            far, g = np.linalg.norm(wide(x)[one] - wide(x)[two], 2, -1), values(name, 36)
            grad = np.zeros((9, 13))
            np.add.at(grad, one, (wide(g) / far)[:, None] * (wide(x)[one] - wide(x)[two]))
            np.add.at(grad, two, (wide(g) / far)[:, None] * (wide(x)[two] - wide(x)[one]))
            args = (np.zeros((8, 9, 13), x.dtype), g, x, far.astype(x.dtype), 1, 9, 13, 36, 2.0, 2)
            yield case(
                "Distance", f"pdist_backward_{name}", args, 36 * 13, grad, 2 * CLOSE[name], read=lambda b: b.reshape(8, 9, 13).sum(0)
            )
            which, g = np.random.default_rng(3).integers(0, 7, 41).astype(np.int64), values(name, 41, 10)
            params = lists("u4", (41,), (10,), (1,)) + u32(1, 1, 10, 0).tobytes() + i64(5).tobytes() + bytes([1] + [0] * 7)
            counts = np.bincount(which, minlength=7).astype(np.uint32)
            grad = np.stack([wide(g)[which == i].sum(0) / max(counts[i], 1) * (i != 5) for i in range(7)])
            args = (g, which, counts, np.zeros((7, 10), g.dtype), params)
            yield case("Embedding", f"embedding_dense_backward_{name}_long_32", args, 410, grad, 4 * CLOSE[name], 3, before=0)
            x, bins = values(name, 1001), np.linspace(-2, 2, 18).astype(TYPES[name])
            inside = wide(x)[(wide(x) >= -2) & (wide(x) <= 2)]
            counts = np.bincount(np.minimum((inside + 2) * 17 / 4, 16).astype(int), minlength=17)
            args = (x, np.zeros(17, np.int64), np.zeros(1, np.uint32), 1001, 17, bins)
            close = 0 if name == "float" else 0.2  # a half's bin is not always this one
            yield case("HistogramKernel", f"histc_atomic_global_dense_{name}", args, 1001, counts, close, 1, before=0)
            kernel, launch = f"histc_atomic_threadgroup_dense_{name}", (4, 96, {0: 80})
            yield case("HistogramKernel", kernel, (*args, 4 * 96), launch, counts, close, 1, before=0)
            x, windows = values(name, 2, 3, 9, 8), np.lib.stride_tricks.sliding_window_view
            pad = np.pad(wide(x), ((0, 0), (0, 0), (2, 2), (1, 1)))
            columns = windows(pad, (3, 2), (2, 3))[:, :, ::2, ::1].transpose(0, 1, 4, 5, 2, 3).reshape(2, 18, 54)
            args = (x, np.zeros((2, 18, 54), x.dtype), u32(2, 3, 1, 1), np.array((1, 2, 1, 2), "i4"), u32(1, 8, 72, 216))
            args = (*args, u32(1, 54, 18 * 54, 9), np.array((8, 9, 0, 0), "i4"))
            yield case("Im2Col", f"im2col_{name}_u32", args, ((54, 3, 2),), columns, 0, 1)
    for name in ("int", "long"):
        lower, upper, rows = np.stack(np.tril_indices(37, 2, 23)), np.stack(np.triu_indices(37, -2, 23)), 37 - 21
        args = (np.zeros(lower.shape, TYPES[name]), 0, 3, 23, lower.shape[1] - rows * 23, lower.shape[1])
        yield case("TriangularOps", f"tril_indices_{name}", args, lower.shape[1], lower, 0)
        args = (np.zeros(upper.shape, TYPES[name]), 0, 23, 23, 46, upper.shape[1])
        yield case("TriangularOps", f"triu_indices_{name}", args, upper.shape[1], upper, 0)
        times = np.array((3, 0, 5, 2), TYPES[name])
        args, kernel = (times, times.cumsum().astype(np.int64), np.zeros(10, TYPES[name])), f"repeat_interleave_int{times.itemsize * 8}_t"
        yield case("Repeat", kernel, args, 4, np.repeat(np.arange(4), times), 0, 2)
        args = (np.zeros(501, TYPES[name]), i64(-700, 1301, 4, 1), np.array((501, 1), "i4").tobytes())
        whole = [int(-700 + 2001 * i / 500) for i in range(501)]
        yield case("RangeFactories", f"linspace_integral_{name}_i32", args, 501, whole, 0)


def products() -> Iterator[Case]:
    args: Any
    for name in (*FLOATS, "int", "uchar"):
        a, b, c = (values(name, *shape, seed=n) for n, shape in enumerate(((2, 35, 45), (2, 45, 53), (2, 35, 53))))
        plane, sides = (np.ascontiguousarray(b[0].T), u32(35, 45, 53, 2)), np.zeros((2, 35, 53), a.dtype)
        product, grid, close = wide(a) @ wide(b), (-(-53 // 16), -(-35 // 16)), 4 * CLOSE[name]
        steps = i64(45, 1, 1, 45, 53, 1)
        yield case("LinearAlgebra", f"matmul_{name}", (a[0], plane[0], sides[0], steps, plane[1]), (grid, (16, 16)), product[0], close, 2)
        args = (a, b, sides, i64(1, 45, 35 * 45, 1, 53, 45 * 53, 1, 53, 35 * 53), plane[1])
        yield case("LinearAlgebra", f"naive_bmm_{name}", args, ((*grid, 2), (16, 16)), product, close, 2)
        if name in FLOATS:
            args = (a[0], plane[0], sides[0], c[0], np.array((0.5, 2), "f4"), i64(*steps, 53, 1), plane[1])
            yield case("LinearAlgebra", f"addmm_{name}", args, (grid, (16, 16)), product[0] / 2 + 2 * wide(c[0]), close, 2)
    for name, vec in zip(FLOATS, (4, 8, 8), strict=True):
        dtype, close = FLOATS[name], 4 * CLOSE[name]
        w, x, y = (values(name, *shape, seed=n) for n, shape in enumerate(((67, 1024), (1024,), (1024,))))
        k, bias, two = 1019, y[:67].copy(), np.array((0.5, 2), "f4")
        rows, columns = wide(w)[:, :k] @ wide(x)[:k], wide(x)[:67] @ wide(w)[:, :k]
        args = (w, x, np.zeros(67, dtype), i64(67, k, 1024, 1, 1, 1, 0), bias, two)
        for kernel, expected in ((f"{vec}_ab_xc", rows / 2 + 2 * wide(bias)), ("1_none_xs", rows), (f"{vec}_none_xs", rows)):
            yield case("Gemm", f"gemv_nt_{name}_4_{kernel}", args, (17, 128), expected, close, 2)
        args = (w, x, np.zeros(k, dtype), i64(k, 67, 1024, 1, 1, 0, 1), y[:k].copy(), two)
        yield case("Gemm", f"gemv_t_{name}_16_2_ab", args, (16, 512), columns / 2 + 2 * wide(y)[:k], close, 2)
        yield case("Gemm", f"gemv_t2d_{name}_16_{vec}_none", args, (-(-k // 32), 512), columns, close, 2)
        m, n, k = 5, 68, 256
        a, q = values(name, m, k), np.random.default_rng(0).integers(0, 16, (n, k)).astype(np.uint8)
        scales = (np.abs(numbers(k // 64, n, 2)) / 16).astype(dtype)
        dense = (q.reshape(n, k // 64, 64) - 8.0) * wide(scales)[..., 0].T[..., None] + wide(scales)[..., 1].T[..., None]
        args = (a, q[:, ::2] | q[:, 1::2] << 4, scales, np.zeros((m, n), dtype), u32(m, k, n, 0))
        launch = ((n // 4, 1, m), (32, 1, 1))
        yield case("Quantized", f"int4pack_mm_64_{name}", args, launch, wide(a) @ dense.reshape(n, k).T, close, 3)
        m, n, k = 33, 136, 96  # large_m_int8pack_mm lacks two barriers: after its loop, and before it copies
        a, q = values(name, m, k), np.random.default_rng(0).integers(-128, 128, (n, k)).astype(np.int8)
        scales = (np.abs(numbers(n)) / 64).astype(dtype)
        args, expected = (a, q, scales, np.zeros((m, n), dtype), u32(m, k, n, 0)), wide(a) @ (q * wide(scales)[:, None]).T
        yield case("Quantized", f"int8pack_mv_{name}", args, ((n // 8, m), 64, {0: 32}), expected, close, 3)


def sorts_and_attention() -> Iterator[Case]:
    args: Any
    for name in ("float", "half", "long", "uchar"):
        x = values(name, 5, 501)
        order, out = np.argsort(x, -1, kind="stable"), (np.zeros_like(x), np.zeros(x.shape, np.int64))
        kernel, args, ranked = f"sort_block_{name}_tptg128", (x, *out, 501, i64(1, 501), False), np.take_along_axis(x, order, -1)
        yield case("Sort", kernel, args, ((1, 5), 128), wide(ranked), 0, 1)
        yield case("Sort", f"{kernel}_stable", args, ((1, 5), 128), order, 0, 2)
        args = (x, *(np.zeros((5, 7), o.dtype) for o in out), 501, i64(1, 501), True, np.array((2, 7), "i4"))
        yield case("Sort", f"sort_block_topk_{name}_tptg128", args, ((1, 5), 128), wide(ranked)[:, ::-1][:, 2:9], 0, 1)
        blocks, one = [x[:, i : i + 128] for i in range(0, 501, 128)], np.zeros(x.shape, np.uint32)
        run = np.concatenate([np.sort(b, -1) for b in blocks], -1)
        args = (x, out[0], one, 501, i64(1, 501), False)
        yield case("Sort", f"mb_sort_block_{name}_tptg32", args, ((4, 5), 32), wide(run), 0, 1)
        runs = np.concatenate([np.sort(x[:, i : i + 256], -1) for i in (0, 256)], -1)
        args = (run, one, out[0], out[1], np.array((501, 2, 0, 0), "i4"), False)
        yield case("Sort", f"mb_merge_final_{name}_tptg32", args, ((4, 5), 32), wide(runs), 0, 2)
    for (name, dtype), d, long in zip(FLOATS.items(), (64, 128, 96), ("float32", "float16", "bfloat16"), strict=True):
        q, k, v, mask = (values(name, 2, *of, seed=i) for i, of in enumerate(((4, 45, d), (2, 83, d), (2, 83, d), (4, 45, 83))))
        scores, of_v = wide(q) @ wide(k).repeat(2, 1).swapaxes(2, 3) / d**0.5, wide(v).repeat(2, 1)
        yes = (wide(mask) > -0.5) | (np.arange(83) == 7)
        masks = {"none": (None, scores), "bool": (yes, np.where(yes, scores, -np.inf)), name: (mask, scores + wide(mask))}
        masks["none_causal"] = (None, np.where(np.arange(83) <= np.arange(45)[:, None], scores, -np.inf))
        few = np.ascontiguousarray(q[:, :, :3])
        sides = (u32(3 * d, 83 * d, 83 * d, 0), u32(d, d, d, 0), d**-0.5), (u32(1, 83, 3735, 14940), u32(12 * d, 166 * d, 166 * d, 4))
        for kind, (some, seen) in masks.items():
            powers = np.exp(seen - seen.max(-1, keepdims=True))
            expected, close = powers @ of_v / powers.sum(-1, keepdims=True), 4 * CLOSE[name]
            args, kernel = (few, k, v, np.zeros_like(few), 2, 83, *sides[0], some, *sides[1]), f"{name}_{d}_{d}_mask{kind}"
            yield case("Attention", f"sdpa_vector_{kernel}", args, ((8, 3), 1024), expected[:, :, :3], close, 3)
            most = np.full((2, 4, 3, 32), -1e9)  # of each block's eight keys
            most[..., :11] = np.stack([seen[:, :, :3, i : i + 8].max(-1) for i in range(0, 83, 8)], -1).clip(-1e9)
            args = (few, k, v, np.zeros((24, 32, d), dtype), *np.zeros((2, 24, 32), "f4"), 2, 83, *sides[0], some, *sides[1])
            yield case("Attention", f"sdpa_vector_2pass_1_{kernel}", args, ((8, 3, 32), 256), most, CLOSE[name], 5)
            if "causal" not in kind:  # there prefill_attention counts from the last row
                steps = b"".join((i64(*x.strides[:3]) // x.itemsize).tobytes() for x in (q, k, v, q))
                params = np.array((2, 4, d, 45, 83, 2), "i4").tobytes() + np.array((d**-0.5, 1), "f4").tobytes() + steps
                args = (q, k, v, np.zeros_like(q), params, i64(14940, 3735, 83, 1), some)
                tile, what = f"bq32_bk{16 if d == 128 else 32}_bd{d}", {"bool": "bool_"}.get(kind, long)
                kernel = f"prefill_attention_{long}_{tile}_wm4_wn1_hm{int(kind != 'none')}_dc0_mask{what}"
                yield case("Attention", kernel, args, ((2, 4, 2), (32, 4)), expected, close, 3)


# Not in every commit: what a file must have for its cases.
HAS = {"SoftMax": "softmax_row", "LayerNorm": "layer_norm_single_row", "Distance": "pdist_forward", "HistogramKernel": "histc_atomic"}


def cases(root: Path) -> Iterator[Case]:
    for make in (unary, binary, along_rows, of_places, products, sorts_and_attention):
        for found in make():
            path = root / found.file
            if path.exists() and HAS.get(path.stem, "") in path.read_text():
                yield found
