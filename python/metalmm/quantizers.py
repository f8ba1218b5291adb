"""From blocks of weights, float32 [n, groups, weights of a group], to stored values, scales and biases."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from .errors import ArgumentError

if TYPE_CHECKING:
    from .quantized import Format

_Numbers = np.ndarray[Any, np.dtype[Any]]


def _inverse(d: _Numbers) -> _Numbers:
    """0 where there is none: such a scale is 0 in float16, too."""
    inverse = np.float32(1) / d
    return np.where(np.isfinite(inverse), inverse, np.float32(0))


def _q8_0(blocks: _Numbers, f: Format) -> tuple[_Numbers, _Numbers, None]:
    """Rounds halves away from zero, with the scale before it is rounded to float16: as GGUF's own does."""
    scale = np.abs(blocks).max(axis=2) / np.float32(127)
    x = blocks * _inverse(scale)[..., None]
    whole = np.trunc(x)
    return whole + np.trunc(2 * (x - whole)), scale, None


def _q4_0(blocks: _Numbers, f: Format) -> tuple[_Numbers, _Numbers, None]:
    """The element of greatest magnitude, the first of equals, becomes -8."""
    far = np.take_along_axis(blocks, np.abs(blocks).argmax(axis=2, keepdims=True), axis=2)[..., 0]
    scale = far / np.float32(-8)
    return np.clip(np.trunc(blocks * _inverse(scale)[..., None] + np.float32(8.5)), 0, 15), scale, None


def _affine(blocks: _Numbers, f: Format) -> tuple[_Numbers, _Numbers, _Numbers]:
    """The end that is further from zero is hit exactly, and zero by one of the steps."""
    steps = np.float32(2**f.bits - 1)
    least, most = blocks.min(axis=2), blocks.max(axis=2)
    scale = np.maximum((most - least) / steps, np.float32(1e-7))
    low = np.abs(least) > np.abs(most)
    scale, edge = np.where(low, scale, -scale), np.where(low, least, most)
    at = np.rint(edge / scale)
    scale = np.where(at == 0, scale, edge / np.where(at == 0, np.float32(1), at))
    bias = np.where(at == 0, np.float32(0), edge)
    return np.clip(np.rint((blocks - bias[..., None]) / scale[..., None]), 0, steps), scale, bias


def _bytes_of(x: _Numbers, most: int) -> tuple[_Numbers, _Numbers]:
    """Of numbers [n, blocks of 32, halves or 1] whole ones of up to `most`, and the float16 factor of each eight blocks."""
    n, count, each = x.shape
    padded = np.pad(x, ((0, 0), (0, -count % 8), (0, 0))).reshape(n, -1, 8, each)
    needed = np.abs(padded).max(axis=(2, 3)) / np.float32(most)
    factor = needed.astype(np.float16)
    factor = np.where(factor < needed, np.nextafter(factor, np.float16(np.inf)), factor)  # else the largest would be cut off
    whole = np.rint(padded * _inverse(factor.astype(np.float32))[..., None, None])
    return np.clip(whole, -most, most).reshape(n, -1, each)[:, :count], factor


def _as_stored(whole: _Numbers, factors: _Numbers) -> _Numbers:
    """Of whole numbers for each block, and factors for each 256 weights, the scales as a kernel has them."""
    return np.repeat(factors.astype(np.float32), 8, axis=1)[:, : whole.shape[1], None] * whole


def _of_halves(blocks: _Numbers, f: Format) -> tuple[_Numbers, _Numbers, _Numbers]:
    """Rounds to nearest, with the scales as they are stored: the greatest of 16 becomes 31, or 127."""
    most, halves = 2 ** (f.bits + f.upper - 1) - 1, blocks.reshape(*blocks.shape[:2], 2, -1)
    scales, factors = _bytes_of(np.abs(halves).max(axis=3) / np.float32(most), 127)
    values = np.clip(np.rint(halves * _inverse(_as_stored(scales, factors))[..., None]), -most - 1, most) + f.offset
    return values.reshape(blocks.shape), scales, factors


def _with_minima(blocks: _Numbers, f: Format) -> tuple[_Numbers, _Numbers, _Numbers]:
    """Rounds to nearest, with scales and minima as they are stored: of 6 bits, of halves the same for both. No minimum is above zero."""
    steps = np.float32(2 ** (f.bits + f.upper) - 1)
    least = np.minimum(blocks.min(axis=2), 0)
    scales, of_scales = _bytes_of((np.maximum(blocks.max(axis=2), 0) - least)[..., None] / steps, 63)
    minima, of_minima = _bytes_of(-least[..., None], 63)
    scale, minimum = _as_stored(scales, of_scales), _as_stored(minima, of_minima)
    values = np.clip(np.rint((blocks + minimum) * _inverse(scale)), 0, steps)
    return values, np.tile(np.concatenate([scales, minima], axis=2), 1 + f.halves), np.stack([of_scales, of_minima], axis=2)


def _of_e4m3(codes: _Numbers) -> _Numbers:
    e, m = codes >> 3 & 15, codes & 7
    found: _Numbers = np.where(codes & 128, -1.0, 1.0) * np.where(e == 0, np.ldexp(m, -9), np.ldexp(8 + m, e - 10))
    return found


_E2M1 = np.array([0, 1, 2, 3, 4, 6, 8, 12], np.float64)  # twice what the code says
NUMBERS = {4: np.concatenate([_E2M1, -_E2M1]), 8: _of_e4m3(np.arange(256))}  # what a code of so many bits says


def upper_half(x: _Numbers) -> _Numbers:
    """Of float32 the upper 16 bits, which hold all of these."""
    return (x.view(np.uint32) >> 16).astype(np.uint16)


def _nearest(x: _Numbers, numbers: _Numbers, even: bool) -> _Numbers:
    """Indices of those nearest to x; of two the `even` one, or the lower one."""
    between = (numbers[:-1] + numbers[1:]) / 2
    found = np.searchsorted(between, x)
    if even:
        found += (found % 2 == 1) & (found < len(between)) & (x == between[np.minimum(found, len(between) - 1)])
    return found


def _power_of_two(greatest: _Numbers, f: Format) -> _Numbers:
    """The least that no value is past the end of. Of no value 1."""
    raw = 6 if f.bits == 4 else 448
    exponents = np.clip(np.ceil(np.log2(np.where(greatest > 0, greatest, 1).astype(np.float64) / raw)), -127, 127)
    exponents = np.where(greatest > 0, exponents, 0)
    if (exponents > (most := 125 if f.bits == 4 else 119)).any():
        raise ArgumentError(f"quantize: a group's scale is 2^{int(exponents.max())}, past 2^{most}: its weights could be past float32")
    return np.ldexp(np.float32(1), exponents.astype(np.int32))


def _few_bits(blocks: _Numbers, f: Format) -> tuple[_Numbers, _Numbers, None]:
    """As MLX's modes mxfp4, mxfp8 and nvfp4. Scales are powers of two; of nvfp4 e4m3, the nearest one, 448 at most. A value becomes the nearest
    code; of two, in 4 bits the one nearer to zero, in 8 the even one. In 4 bits zero has no sign."""
    parts = blocks.reshape(*blocks.shape[:2], 1 + f.halves, -1)
    greatest = np.abs(parts).max(axis=3)
    e4m3 = NUMBERS[8][:127]
    scale = e4m3[_nearest(greatest / np.float32(6), e4m3, even=True)] if f.halves else _power_of_two(greatest, f)
    scale = (scale / (1 + (f.bits == 4))).astype(np.float32)  # a value of 4 bits is stored twice as large
    codes = NUMBERS[f.bits][: 8 if f.bits == 4 else 127]
    sizes = np.abs(parts).astype(np.float64) / np.where(scale > 0, scale, np.inf)[..., None]
    found = _nearest(sizes, codes, even=f.bits == 8)
    signs = np.signbit(parts) & ((f.bits == 8) | (found > 0))
    upper = upper_half(scale).reshape(*blocks.shape[:2], *f.each[0])
    return (found | signs.astype(found.dtype) << f.bits - 1).reshape(blocks.shape), upper, None


QUANTIZERS: dict[str, Callable[[_Numbers, Format], tuple[_Numbers, _Numbers, _Numbers | None]]] = {
    "q8_0": _q8_0, "q4_0": _q4_0, "affine8": _affine, "affine4": _affine, "q8_k": _of_halves, "q6_k": _of_halves, "q5_k": _with_minima, "q4_k": _with_minima,
    "q2_k": _with_minima,
    "nvfp4": _few_bits, "fp4": _few_bits, "fp8": _few_bits,
}  # fmt: skip
