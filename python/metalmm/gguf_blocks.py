"""Blocks of 32 weights as GGUF has them: which of our formats says the same, and how a block is taken apart.

A weight keeps its value bit for bit. One of 5 bits takes a byte here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

BLOCK = 32
_Numbers = np.ndarray[Any, np.dtype[Any]]
_IQ4_NL = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int16)


@dataclass(frozen=True)
class Blocks:
    """A format of GGUF.

    Attributes:
        format: Ours that holds its weights.
        halves: Scale, or scale and minimum, in front of a block.
        high: Bytes of fifth bits behind them.
        bits: Of the rest of a value.
        stored: Of a block's integers, what our format stores.
    """

    format: str
    halves: int
    high: int
    bits: int
    stored: Callable[[_Numbers], _Numbers]

    @property
    def size(self) -> int:
        """Of a block, bytes."""
        return 2 * self.halves + self.high + BLOCK * self.bits // 8

    def apart(self, data: _Numbers) -> tuple[_Numbers, _Numbers, _Numbers | None]:
        """Of uint8 [n, blocks, size]: stored values [n, k], scales and minima [n, blocks]."""
        n, count, _ = data.shape
        halves = np.ascontiguousarray(data[..., : 2 * self.halves]).view("<f2")
        values = data[..., 2 * self.halves + self.high :]
        if self.bits == 4:  # elements i and i + 16 share a byte
            values = np.concatenate([values & 15, values >> 4], axis=2)
        if self.high:
            bits = np.unpackbits(np.ascontiguousarray(data[..., 2 * self.halves :][..., : self.high]), axis=2, bitorder="little")
            values = values | bits << 4
        minima = halves[..., 1].copy() if self.halves == 2 else None
        return self.stored(values).reshape(n, count * BLOCK), halves[..., 0].copy(), minima


GGUF = {
    "q8_0": Blocks("q8_0", 1, 0, 8, lambda v: v.view(np.int8)),
    "q4_0": Blocks("q4_0", 1, 0, 4, lambda v: v),
    "q4_1": Blocks("affine4", 2, 0, 4, lambda v: v),
    "q5_0": Blocks("q8_0", 1, 4, 4, lambda v: v.astype(np.int8) - np.int8(16)),
    "q5_1": Blocks("affine8", 2, 4, 4, lambda v: v),
    "iq4_nl": Blocks("q8_0", 1, 0, 4, lambda v: _IQ4_NL[v].astype(np.int8)),
}
