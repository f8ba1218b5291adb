"""Weights to quantize, and blocks of quantized ones as GGUF has them."""

from __future__ import annotations

from typing import Any

import numpy as np
from metalmm.gguf_blocks import GGUF


def weights(n: int, k: int, dtype: Any = np.float16, scale: float = 1.0, tiny: bool = True) -> Any:
    """With rows that are zero, of one value, of one sign, of two values; `tiny`: of values that barely are, from which gguf divides by 0."""
    w = np.random.default_rng(0).standard_normal((n, k)) * scale
    odd = [0 * w[0], 0 * w[0] + w[0, 0], abs(w[0]), -abs(w[0]), scale * (-1.0) ** np.arange(k)]
    odd += [1e-30 * w[0], 1e-42 + 0 * w[0]] if tiny else []
    w[: len(odd)] = odd[:n]
    return w.astype(dtype)


def blocks_of(name: str, n: int, k: int) -> Any:
    """Of any bytes, with scales that a file may have; uint8 [n, bytes of a row]."""
    form, rng = GGUF[name], np.random.default_rng(3)
    count = n * k // form.weights
    data = rng.integers(0, 256, (count, form.size), np.uint8)
    if name == "mxfp4":
        data[:, 0] = rng.integers(0, 250, count)  # past that weights are past float32; 255 is no number
    if "fp4" in name:
        return data.reshape(n, -1)
    halves = 2 if name in ("q4_1", "q5_1", "q2_k", "q4_k", "q5_k") else 1
    at = form.size - 2 * halves if name in ("q2_k", "q3_k", "q6_k") else 0
    scales = rng.standard_normal((count, halves)) * 10.0 ** rng.integers(-4, 4, (count, 1))
    data[:, at : at + 2 * halves] = scales.astype("<f2").view(np.uint8)
    return data.reshape(n, -1)
