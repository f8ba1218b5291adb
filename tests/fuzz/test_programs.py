"""Programs drawn at random give what Python makes of the same steps."""

from __future__ import annotations

import metalmm
import numpy as np
import pytest
from support.here import ALL_OF_IT, SEED
from support.programs import THREADS, Program

COUNT = 60 if ALL_OF_IT else 4


@pytest.mark.parametrize("seed", range(SEED, SEED + COUNT))
@pytest.mark.usefixtures("each_compiler")
def test_a_program(seed: int, device: metalmm.Device) -> None:
    program, rng = Program(seed), np.random.default_rng(seed)
    a, b, y = rng.integers(0, 1 << 32, THREADS, np.uint32), rng.integers(-1000, 1000, THREADS, np.int32), np.zeros(THREADS, np.uint32)
    a[:8] = range(8)
    with np.errstate(all="ignore"):
        want = program.result(a, b)
    device.compile(program.text).kernel("k")(a, b, y, grid=1, threadgroup=THREADS)
    wrong = np.flatnonzero(y != want)
    assert not wrong.size, f"seed {seed}: thread {wrong[0]} has {y[wrong[0]]}, not {want[wrong[0]]}\n{program.text}"
