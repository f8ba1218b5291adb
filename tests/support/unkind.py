"""What several files of tests share: unkind."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from typing import Any

import metalmm
import numpy as np

from support.numbers import half

V = "gemv/baseline"


MPS = "mps/baseline"


def pages(*shape: int, seed: int = 0) -> Any:
    """An array that begins on a page."""
    count = int(np.prod(shape))
    array = np.frombuffer(mmap.mmap(-1, max(count * 2, 1)), np.float16, count).reshape(shape)
    array[...] = half(*shape, seed=seed)
    return array


def aside(size: int) -> Any:
    """A row that begins on no page, which what NumPy allocates may do by chance and is then wrapped, too."""
    return half(1, size + 1)[:, 1:]


Make = Callable[..., metalmm.Device]


HEAD = "#include <metal_stdlib>\nusing namespace metal;\n"
