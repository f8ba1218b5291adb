"""blas/baseline: a matmul by NumPy's BLAS in float32, for comparison where there is no MPS."""

from __future__ import annotations

from typing import Any

import numpy as np


def matmul(
    a: Any, b32: Any, c: Any | None, bias: Any | None, out: Any, alpha: float, beta: float, transpose_a: bool, transpose_b: bool
) -> None:
    """out = alpha * op(a) @ op(b32) + beta * c + bias; 3-D views, float16 but for b32, which is float32."""
    a32 = a.astype(np.float32)
    with np.errstate(all="ignore"):  # NaN and Inf come and go as in a kernel
        ab = np.matmul(a32.swapaxes(1, 2) if transpose_a else a32, b32.swapaxes(1, 2) if transpose_b else b32)
        if alpha != 1.0:
            ab *= np.float32(alpha)
        if c is not None:
            ab += np.float32(beta) * c.astype(np.float32)
        if bias is not None:
            ab += bias.astype(np.float32)
        out[...] = ab
