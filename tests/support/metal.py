"""What several files of tests share: metal."""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np
import pytest

from support.here import FAKE

V = "gemv/baseline"


GEMM = "gemm_tiled/baseline"


needs_fake = pytest.mark.skipif(not FAKE, reason="breaks rules or injects faults, which only the fake Metal allows")


def pages(shape: tuple[int, ...]) -> Any:
    """An array that begins on a page."""
    count = int(np.prod(shape))
    return np.frombuffer(mmap.mmap(-1, max(count * 2, 1)), np.float16, count).reshape(shape)
