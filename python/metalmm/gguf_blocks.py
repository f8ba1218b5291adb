"""Blocks of weights as GGUF has them: which of our formats says the same, and how a block is taken apart.

A weight keeps its value bit for bit. Those of q5_K and q6_K keep their bits, and those of q3_K take six. Those of q5_0 and q5_1, and those
that a table gives, take a byte; those of q2_K take 4 bits. A scale of 4 or 6 bits takes a byte.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from .quantizers import upper_half

BLOCK = 32  # weights of a block here; in half of these formats they share a scale
SUPER = 256  # weights of a K-quant's factors
_Numbers = np.ndarray[Any, np.dtype[Any]]
_Parts = tuple[_Numbers, _Numbers, "_Numbers | None"]
_IQ4 = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int16)


@dataclass(frozen=True)
class Blocks:
    """A format of GGUF.

    Attributes:
        format: Ours that holds its weights.
        weights: Of a block.
        size: Of a block, bytes.
        apart: Of uint8 [blocks, size]: stored values [blocks, weights], and what QuantizedArray has as scales, without upper bits, and
            biases, block by block.
    """

    format: str
    weights: int
    size: int
    apart: Callable[[_Numbers], _Parts]

    @property
    def storage(self) -> str:
        """As QuantizedArray.storage says it."""
        return f"{self.format}:{BLOCK}" if self.format in ("affine4", "affine8") else self.format


def _halves(data: _Numbers, count: int) -> _Numbers:
    found: _Numbers = np.ascontiguousarray(data[:, : 2 * count]).view("<f2")
    return found


def _nibbles(data: _Numbers, of: int) -> _Numbers:
    """Of each `of` bytes the low halves, then the high ones."""
    pieces = data.reshape(len(data), -1, of)
    return np.concatenate([pieces & 15, pieces >> 4], axis=2).reshape(len(data), -1)


def _with_fifth_bits(values: _Numbers, data: _Numbers) -> _Numbers:
    found: _Numbers = values | np.unpackbits(np.ascontiguousarray(data), axis=1, bitorder="little") << 4
    return found


def _q8_0(data: _Numbers) -> _Parts:
    return np.ascontiguousarray(data[:, 2:]).view(np.int8), _halves(data, 1), None


def _q4_0(data: _Numbers) -> _Parts:
    return _nibbles(data[:, 2:], 16), _halves(data, 1), None


def _q4_1(data: _Numbers) -> _Parts:
    both = _halves(data, 2)
    return _nibbles(data[:, 4:], 16), both[:, :1], both[:, 1:]


def _q5_0(data: _Numbers) -> _Parts:
    return _with_fifth_bits(_nibbles(data[:, 6:], 16), data[:, 2:6]).astype(np.int8) - np.int8(16), _halves(data, 1), None


def _q5_1(data: _Numbers) -> _Parts:
    both = _halves(data, 2)
    return _with_fifth_bits(_nibbles(data[:, 8:], 16), data[:, 4:8]), both[:, :1], both[:, 1:]


def _iq4_nl(data: _Numbers) -> _Parts:
    return _IQ4[_nibbles(data[:, 2:], 16)].astype(np.int8), _halves(data, 1), None


def _scales_of_k(data: _Numbers) -> tuple[_Numbers, _Numbers]:
    """Of 12 bytes eight scales and eight minima of 6 bits: the first four of each in the low bits, the others' high bits above them."""
    low, middle, both = data[:, :4], data[:, 4:8], data[:, 8:12]
    scales = np.concatenate([low & 63, both & 15 | low >> 6 << 4], axis=1)
    return scales, np.concatenate([middle & 63, both >> 4 | middle >> 6 << 4], axis=1)


def _with_minima(values: _Numbers, data: _Numbers, scales: _Numbers, minima: _Numbers) -> _Parts:
    """scales, minima: of each 16 weights, or of each 32; data: the float16 factors of both."""
    return values, np.stack([scales, minima], axis=2).astype(np.int8).reshape(len(values), SUPER // BLOCK, -1), _halves(data, 2)


def _with_scales(values: _Numbers, data: _Numbers, scales: _Numbers) -> _Parts:
    """scales: int8, of each 16 weights, or of each 32; data: their float16 factor."""
    return values, np.repeat(scales, 16 // scales.shape[1], axis=1).reshape(len(values), -1, 2), _halves(data, 1)


def _q4_k(data: _Numbers) -> _Parts:
    return _with_minima(_nibbles(data[:, 16:], 32), data, *_scales_of_k(data[:, 4:16]))


def _q5_k(data: _Numbers) -> _Parts:
    fifth = data[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & 1  # bit i of byte j: of weight 32 * i + j
    return _with_minima(_nibbles(data[:, 48:], 32) | fifth.reshape(len(data), -1) << 4, data, *_scales_of_k(data[:, 4:16]))


def _pairs(data: _Numbers) -> _Numbers:
    """Of each 32 bytes the lowest two bits, then the next, up to the highest."""
    found: _Numbers = data.reshape(len(data), -1, 1, 32) >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & 3
    return found.reshape(len(data), -1)


def _q2_k(data: _Numbers) -> _Parts:
    return _with_minima(_pairs(data[:, 16:80]), data[:, 80:], data[:, :16] & 15, data[:, :16] >> 4)


def _q3_k(data: _Numbers) -> _Parts:
    third = data[:, None, :32] >> np.arange(8, dtype=np.uint8)[:, None] & 1  # 0: four less
    values = (_pairs(data[:, 32:96]) | third.reshape(len(data), -1) << 2) + np.uint8(32 - 4)
    low, high = data[:, 96:104], data[:, 104:108]
    scales = np.concatenate([low & 15, low >> 4], axis=1) | np.concatenate([high >> i & 3 for i in (0, 2, 4, 6)], axis=1) << 4
    return _with_scales(values, data[:, 108:], scales.astype(np.int8) - np.int8(32))


def _q6_k(data: _Numbers) -> _Parts:
    low = _nibbles(data[:, :128], 64).reshape(len(data), 2, 128) | _pairs(data[:, 128:192]).reshape(len(data), 2, 128) << 4
    return _with_scales(low.reshape(len(data), -1), data[:, 208:], np.ascontiguousarray(data[:, 192:208]).view(np.int8))


def _iq4_xs(data: _Numbers) -> _Parts:
    high = np.ascontiguousarray(data[:, 2:4]).view("<u2") >> 2 * np.arange(8, dtype=np.uint16) & 3
    low = np.repeat(data[:, 4:8], 2, axis=1) >> np.tile(np.array([0, 4], np.uint8), 4) & 15
    scales = (low | high << 4).astype(np.int8) - np.int8(32)
    return _with_scales(_IQ4[_nibbles(data[:, 8:], 16)].astype(np.int8), data, scales)


def _of_plus_zero(codes: _Numbers) -> _Numbers:
    """GGUF has one zero."""
    return np.where(codes == 8, np.uint8(0), codes)


def _mxfp4(data: _Numbers) -> _Parts:
    exponents = data[:, :1].astype(np.uint32)  # of half of a power of two; of the least two the number is denormal
    bits = np.where(exponents < 2, np.uint32(0x200000) << np.minimum(exponents, 1), (exponents - 1) << 23)
    return _of_plus_zero(_nibbles(data[:, 1:], 16)), (bits >> 16).astype(np.uint16), None


def _nvfp4(data: _Numbers) -> _Parts:
    e, m = (data[:, :4] >> 3 & 15).astype(np.int32), (data[:, :4] & 7).astype(np.float32)  # e4m3, without a sign
    scales = np.where(e == 0, np.ldexp(m, -10), np.ldexp(8 + m, e - 11)).astype(np.float32)  # half of it
    upper = upper_half(np.where(data[:, :4] == 0x7F, np.float32(0), scales))
    return _of_plus_zero(_nibbles(data[:, 4:], 8)), upper.reshape(len(data), -1, 2), None


GGUF = {
    "q8_0": Blocks("q8_0", 32, 34, _q8_0),
    "q4_0": Blocks("q4_0", 32, 18, _q4_0),
    "q4_1": Blocks("affine4", 32, 20, _q4_1),
    "q5_0": Blocks("q8_0", 32, 22, _q5_0),
    "q5_1": Blocks("affine8", 32, 24, _q5_1),
    "q2_k": Blocks("q2_k", 256, 84, _q2_k),
    "q3_k": Blocks("q6_k", 256, 110, _q3_k),
    "q4_k": Blocks("q4_k", 256, 144, _q4_k),
    "q5_k": Blocks("q5_k", 256, 176, _q5_k),
    "q6_k": Blocks("q6_k", 256, 210, _q6_k),
    "iq4_nl": Blocks("q8_0", 32, 18, _iq4_nl),
    "iq4_xs": Blocks("q8_k", 256, 136, _iq4_xs),
    "mxfp4": Blocks("fp4", 32, 17, _mxfp4),
    "nvfp4": Blocks("nvfp4", 64, 36, _nvfp4),
}
