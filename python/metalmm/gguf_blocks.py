"""Blocks of weights as GGUF has them: which of our formats says the same, and how a block is taken apart.

A weight keeps its value bit for bit. One of 5 bits, and one that a table gives, takes a byte here; scales that GGUF has in 6 bits are
multiplied out, as float32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from .errors import ArgumentError

BLOCK = 32  # weights that share a scale, in all of these
_Numbers = np.ndarray[Any, np.dtype[Any]]
_Parts = tuple[_Numbers, _Numbers, "_Numbers | None"]
_IQ4 = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int16)
_MXFP4 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int16)  # twice what e2m1 says


@dataclass(frozen=True)
class Blocks:
    """A format of GGUF.

    Attributes:
        format: Ours that holds its weights.
        weights: Of a block.
        size: Of a block, bytes.
        apart: Of uint8 [blocks, size]: stored values [blocks, weights], and scales and biases [blocks, weights / 32].
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


def _of_k(values: _Numbers, data: _Numbers) -> _Parts:
    """d * scale * q - dmin * minimum: products of 11 bits by 6, exact in float32."""
    both, (scales, minima) = _halves(data, 2).astype(np.float32), _scales_of_k(data[:, 4:16])
    with np.errstate(invalid="ignore"):  # a scale may be no number, and stays none
        return values, both[:, :1] * scales, -(both[:, 1:] * minima)


def _q4_k(data: _Numbers) -> _Parts:
    return _of_k(_nibbles(data[:, 16:], 32), data)


def _q5_k(data: _Numbers) -> _Parts:
    fifth = data[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & 1  # bit i of byte j: of weight 32 * i + j
    return _of_k(_nibbles(data[:, 48:], 32) | fifth.reshape(len(data), -1) << 4, data)


def _by_table(indices: _Numbers, table: _Numbers, scales: _Numbers) -> _Parts:
    """scale * (t - least) + scale * least is scale * t, rounded once."""
    least = int(table.min())
    with np.errstate(over="ignore", invalid="ignore"):
        biases = scales * np.float32(least)
    if not np.isfinite(biases).all():
        raise ArgumentError("from_gguf: a block's scale is no number, or its weights are past float32")
    return (table[indices] - least).astype(np.uint8), scales, biases


def _iq4_xs(data: _Numbers) -> _Parts:
    high = np.ascontiguousarray(data[:, 2:4]).view("<u2") >> 2 * np.arange(8, dtype=np.uint16) & 3
    low = np.repeat(data[:, 4:8], 2, axis=1) >> np.tile(np.array([0, 4], np.uint8), 4) & 15
    by = (low | high << 4).astype(np.float32) - np.float32(32)
    with np.errstate(invalid="ignore"):  # a scale may be no number: told below
        return _by_table(_nibbles(data[:, 8:], 16), _IQ4, _halves(data, 1).astype(np.float32) * by)


def _mxfp4(data: _Numbers) -> _Parts:
    exponents = data[:, :1].astype(np.uint32)  # of half of a power of two; of the least two the number is denormal
    bits = np.where(exponents < 2, np.uint32(0x200000) << np.minimum(exponents, 1), (exponents - 1) << 23)
    return _by_table(_nibbles(data[:, 1:], 16), _MXFP4, bits.astype(np.uint32).view(np.float32))


GGUF = {
    "q8_0": Blocks("q8_0", 32, 34, _q8_0),
    "q4_0": Blocks("q4_0", 32, 18, _q4_0),
    "q4_1": Blocks("affine4", 32, 20, _q4_1),
    "q5_0": Blocks("q8_0", 32, 22, _q5_0),
    "q5_1": Blocks("affine8", 32, 24, _q5_1),
    "q4_k": Blocks("affine4f", 256, 144, _q4_k),
    "q5_k": Blocks("affine8f", 256, 176, _q5_k),
    "iq4_nl": Blocks("q8_0", 32, 18, _iq4_nl),
    "iq4_xs": Blocks("affine8f", 256, 136, _iq4_xs),
    "mxfp4": Blocks("affine8f", 32, 17, _mxfp4),
}
