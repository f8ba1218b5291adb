"""Small helpers of tests that run a matmul."""

from __future__ import annotations

from typing import Any

import metalmm
import numpy as np


def half(*shape: int, seed: int = 0) -> Any:
    """Normal draws in float16."""
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float16)


def carry_out(batch: metalmm.Batch, recorded: bool) -> None:
    """All of it, as it is or as a recording."""
    if recorded:
        recording = batch.record()
        recording.replay()
        recording.wait()
    else:
        batch.submit()
        batch.wait()


def right(out: Any, a: Any, b: Any, **options: Any) -> None:
    """The result is within the float64 bound."""
    assert (abs(np.asarray(out) - metalmm.reference(a, b, **options)) <= metalmm.error_bound(a, b, **options)).all()
