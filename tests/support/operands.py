"""Operands that a row's variant takes, and the call that takes them."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import metalmm
import ml_dtypes
import numpy as np
from metalmm import numerics, quantized

from .counting import count_case
from .here import DEVICE, FAKE_CUDA
from .rows import Row

DTYPES: dict[str, Any] = {"float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16), "float32": np.dtype(np.float32)}


@dataclass
class Call:
    """A matmul with its operands. b, bias: lists, one for each matrix."""

    row: Row
    a: Any
    b: list[Any]
    bias: list[Any] | None = None
    c: Any = None
    alpha: float = 1.0
    beta: float = 0.0
    out: Any = None
    _judged: list[tuple[Any, Any]] = field(default_factory=list)

    @property
    def options(self) -> dict[str, Any]:
        layout = self.row.layout
        found = {"alpha": self.alpha, "beta": self.beta, "transpose_a": layout[0] == "t", "transpose_b": layout[1] == "t"}
        return {**found, "bias": self.bias[0] if self.bias else None, "c": self.c}

    def judged(self) -> list[tuple[Any, Any]]:
        """Of each result the float64 reference and its bound."""
        if self._judged:
            return self._judged
        with np.errstate(all="ignore"):
            if self.row.variant.swiglu:
                self._judged = [numerics.judged_swiglu(self.a, self.b, bias=self.bias)]
            else:
                biases = self.bias or [None] * len(self.b)
                self._judged = [
                    numerics.judged(self.a, b, **{**self.options, "bias": bias})[:2] for b, bias in zip(self.b, biases, strict=True)
                ]
        return self._judged

    def run(self, device: metalmm.Device) -> list[Any]:
        """The results."""
        v = self.row.variant
        if v.matrix_count == 1:
            out = self.out[0] if self.out is not None else np.full(self.judged()[0][0].shape, np.nan, DTYPES[self.row.dtype])
            assert metalmm.matmul(v, self.a, self.b[0], out=out, device=device, **self.options) is out
            return [out]
        assert self.c is None and (self.alpha, self.beta) == (1.0, 0.0), "a fused call has neither"
        activation, out = "swiglu" if v.swiglu else None, self.out
        if out is None:  # NaN where nobody writes
            out = [np.full(reference.shape, np.nan, DTYPES[self.row.dtype]) for reference, _ in self.judged()]
            out = out[0] if v.swiglu else out
        found = metalmm.matmul_fused(v, self.a, self.b, bias=self.bias, activation=activation, device=device, out=out)
        return [found] if v.swiglu else list(found)

    def check(self, device: metalmm.Device) -> None:
        """Runs it; every element is within its bound."""
        for i, (out, (reference, bound)) in enumerate(zip(self.run(device), self.judged(), strict=True)):
            wrong = numerics.mismatch(np.asarray(out), reference, allowed(self.row.variant, bound, reference, self.options))
            assert not wrong, f"{self.row}, result {i}, a {self.a.shape} b {self.b[i].shape}: {wrong}"
            count_case()

    def check_equal(self, device: metalmm.Device) -> None:
        """Runs it on whole numbers whose sums are exact in any order; every bit is right."""
        if self.row.variant.swiglu:
            return self.check(device)
        for out, (reference, _) in zip(self.run(device), self.judged(), strict=True):
            assert np.abs(reference).max() <= (256 if self.row.dtype == "bfloat16" else 2048), "the type holds it"
            np.testing.assert_array_equal(np.asarray(out).astype(np.float64), reference, err_msg=str(self.row))
            count_case()


def allowed(v: str, bound: Any, reference: Any, options: dict[str, Any]) -> Any:
    """The bound, and for cuBLAS another rounding to the operands' type before C and bias: it has kernels, of batches above all, that do
    not add them in float32."""
    if v != "blas/baseline" or DEVICE != "cuda" or FAKE_CUDA or (options.get("bias") is None and not options.get("beta")):
        return bound
    before = abs(reference) + sum(abs(np.asarray(options[x], np.float64)) for x in ("bias", "c") if options.get(x) is not None)
    return bound + numerics.half_ulp(before * max(1.0, abs(options.get("beta", 0.0))))


def size_limits(v: metalmm.Variant, size: str) -> tuple[int, int]:
    """The least and the most that a variant takes of a size."""
    limit = v.supports.get(size, {})
    return (
        (limit, limit)
        if isinstance(limit, int)
        else (limit.get("min", 1), limit.get("max", 2**32 - 1))
        if isinstance(limit, dict)
        else (1, 16)
    )


def fit(row: Row, m: int, n: int, k: int) -> tuple[int, int, int]:
    """Near sizes that the variant takes."""
    least, most = size_limits(row.variant, "m")
    if isinstance(values := row.variant.supports.get("n"), list):
        n = min(values, key=lambda x: abs(x - n))
    return min(max(m, least), most), n, max(k, size_limits(row.variant, "k")[0])


# How far rows of A, and of B, begin behind a vector of eight: on one, on one of four, on none. Kernels look whether all do.
WAYS = ((0, 0), (4, 0), (0, 0), (0, 1), (0, 0), (0, 4), (0, 0), (1, 0), (0, 0), (1, 1))


def placed(x: Any, pad: int = 0, offset: int = 0) -> Any:
    """The same numbers in rows `pad` further apart, `offset` elements behind an address of eight; NaN between them."""
    need = int(np.prod(x.shape[:-1])) * (x.shape[-1] + pad)
    store = np.full(need + offset + 16, np.nan, x.dtype)
    start = -(store.ctypes.data // x.itemsize) % 8 + offset
    view = store[start : start + need].reshape(*x.shape[:-1], x.shape[-1] + pad)[..., : x.shape[-1]]
    view[...] = x
    return view


def aligned(x: Any, offset: int, pad: int = 0) -> Any:
    """`placed`, every row of it: eight times some elements apart, but where they stand on no vector."""
    return placed(x, pad if offset % 4 else pad + -(x.shape[-1] + pad) % 8, offset)


def stored(row: Row, w: Any, group: int | None = None) -> Any:
    """A matrix of weights, n by k, as the variant takes it."""
    form, _, layout = row.variant.storage.partition(":")
    if form == "dense":
        return w if row.layout[1] == "t" else np.ascontiguousarray(w.swapaxes(-1, -2))
    return metalmm.quantize(w, form, group=group, layout=layout or "nk")


def stored_whole(row: Row, w: Any, group: int | None = None, turn: int = 0) -> Any:
    """Weights of -1, 0 and 1, each stored exactly: with scales of 1 and -1, so that another group's gives another sum."""
    form, _, layout = row.variant.storage.partition(":")
    if form == "dense":
        return stored(row, w)
    f, whole = quantized.FORMATS[form], w.astype(np.int64)
    size = of_one_scale(form, group or f.groups[0])
    signs = 2.0 * np.random.default_rng(turn).integers(0, 2, scales_of(form, *w.shape, group or f.groups[0])) - 1
    values = whole * np.repeat(signs, size, axis=1)[:, : w.shape[1]].astype(np.int64)
    if f.is_float:
        one = 1 if f.bits == 4 else 0x38  # its code
        return made(form, layout, np.where(values < 0, one + 2 ** (f.bits - 1), values * one), signs, size=group)
    if not f.has_bias:
        return made(form, layout, values + f.offset, signs, size=group)
    return made(form, layout, values + 1, signs, -signs, size=group, dtype=w.dtype)


def of_one_scale(form: str, group: int = 32) -> int:
    """Weights along k."""
    return 16 if quantized.FORMATS[form].halves else group


def scales_of(form: str, n: int, k: int, group: int = 32) -> tuple[int, int]:
    """How many there are; of half blocks the last block has two, whatever k is."""
    return n, -(-k // group) * (group // of_one_scale(form, group))


def made(
    form: str, layout: str, integers: Any, scales: Any, biases: Any = None, *, size: int | None = None, dtype: Any = np.float16, factor: Any = 1.0
) -> Any:  # fmt: skip
    """A matrix of stored integers [n, k], with scales and biases of `scales_of`. Of K-quants they are whole numbers times `factor`, of each 256
    weights or of all."""
    f = quantized.FORMATS[form]
    if f.is_float:
        upper = (scales.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16).reshape(len(scales), -1, *f.each[0])
        return quantized._array_of(form, layout or "nk", integers, 32, upper, None)
    if not f.is_k:
        kind = dtype if f.has_bias else np.float16
        of_biases = None if biases is None else biases.astype(kind)
        return quantized._array_of(form, layout or "nk", integers, size or 32, scales.astype(kind), of_biases)
    parts = [scales] if biases is None else [scales, -biases]
    halves = 1 + f.halves
    whole = np.stack([x.reshape(len(scales), -1, halves) for x in parts], axis=3).reshape(len(scales), -1, halves * len(parts))
    factors = np.broadcast_to(np.asarray(factor, np.float16), (len(scales), -(-whole.shape[1] // 8)))
    both = factors if biases is None else np.stack([factors, factors], axis=2)
    return quantized._array_of(form, layout or "nk", integers, 32, whole.astype(np.int8), both)


def scaled(q: Any, change: Callable[[Any], None]) -> Any:
    """Its scales as floats, changed in place. Of K-quants these are the factors of 256 weights."""
    f = quantized.FORMATS[q.format]
    if f.is_k:
        factors = q.biases.copy()
        change(factors)
        return replace(q, biases=factors)
    scales = (q.scales.astype(np.uint32) << 16).view(np.float32) if f.is_float else q.scales.copy()
    change(scales)
    return replace(q, scales=(scales.view(np.uint32) >> 16).astype(np.uint16) if f.is_float else scales)


@functools.cache
def _pool(dtype: str, is_whole: bool) -> Any:
    """Random numbers, drawn and rounded once: operands are parts of it."""
    rng, count = np.random.default_rng(8), 1 << 20
    found = rng.integers(-1, 2, count) if is_whole else rng.standard_normal(count, dtype=np.float32)
    return found.astype(DTYPES[dtype])


def numbers(rng: np.random.Generator, row: Row, *shape: int, is_whole: bool) -> Any:
    """Of -1, 0 and 1, or normally distributed."""
    pool, count = _pool(row.dtype, is_whole), math.prod(shape)
    start = rng.integers(pool.size - min(count, pool.size) + 1)
    found = pool[start : start + count]
    return found.reshape(shape).copy() if found.size == count else np.resize(found, shape)


def widths(row: Row, n: int) -> list[int]:
    """Of the matrices: equal ones for swiglu; a whole threadgroup's columns beside whole ones."""
    v, columns = row.variant, row.variant.tile[1]
    second = columns if columns and n % columns == 0 else max(1, n // 7)
    return [n] * v.matrix_count if v.swiglu else [n, second, n + 33][: v.matrix_count]


def draw(
    row: Row, m: int, n: int, k: int, *, batch: int = 1, bias: bool = False, c: bool = False, alpha: float = 1.0, beta: float = 0.0,
    pad: int = 0, seed: int = 0, exact: bool = False, group: int | None = None,
) -> Call:  # fmt: skip
    """A call of about that size; exact: of whole numbers."""
    rng, v = np.random.default_rng(seed * 7919 + n * 31 + k), row.variant
    (m, n, k), (of_a, of_b) = fit(row, m, n, k), WAYS[seed % len(WAYS)]
    lead, is_fused = (batch,) if batch > 1 else (), v.matrix_count > 1
    make = functools.partial(numbers, rng, row, is_whole=exact)
    groups = () if v.storage == "dense" else quantized.FORMATS[v.storage.partition(":")[0]].groups
    group = (group if group in groups else sorted(groups)[seed % 3]) if len(groups) > 1 else None

    def store(row: Row, w: Any) -> Any:
        return stored_whole(row, w, group, seed) if exact else stored(row, w, group)

    shared = () if is_fused or v.storage != "dense" else lead
    b = [store(row, make(*shared, width, k)) for width in widths(row, n)]
    a = make(*lead, *((k, m) if row.layout[0] == "t" else (m, k)))
    return Call(
        row,
        aligned(a, of_a, pad),
        [aligned(x, of_b, pad) if v.storage == "dense" else x for x in b],
        [make(width) for width in widths(row, n)] if bias else None,
        make(*lead, m, n) if c and not is_fused else None,
        alpha if not is_fused else 1.0,
        beta if not is_fused else 0.0,
    )


# (m, n, k): tiny, aligned, one off, primes, below and above every tile, k of one window and of many.
SHAPES = [(1, 1, 1), (3, 64, 64), (17, 63, 65), (1, 65, 63), (2, 131, 257), (64, 5, 1031), (1, 97, 37), (5, 192, 80), (33, 31, 16), (2, 131, 896),
          (8, 67, 133), (129, 40, 9), (1, 9, 4864), (3, 256, 3)]  # fmt: skip

OF_FEW_ROWS = {(1, 97, 37), (2, 131, 257), (1, 9, 4864)}  # of tall tiles: others have their edges, and test_long_sums_are_exact a long K


def sizes_of(row: Row) -> list[tuple[int, int, int]]:
    """The shapes, and those on both sides of the row's tile, as the instance takes them."""
    bm, bn = row.variant.tile
    least, most = size_limits(row.variant, "m")
    tiles = [(m, n, 77) for m, n in zip((bm - 1, bm, bm + 1, 2 * bm + 1), (bn + 1, bn - 1, bn, 2 * bn + 3), strict=True)]
    shapes = [shape for shape in SHAPES if bm <= 8 or shape not in OF_FEW_ROWS]
    wanted = [*shapes, *((max(m, least), max(n, 1), k) for m, n, k in tiles), (most if most < 999 else 7, 33, 95)]
    return list(dict.fromkeys(fit(row, *shape) for shape in wanted))
