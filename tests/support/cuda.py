"""What several files of tests share: cuda."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from typing import Any

import metalmm
import pytest

from support.numbers import half, right

FAKE: Any = getattr(sys.modules.get("on_fake_cuda"), "fake", None)


needs_fake = pytest.mark.skipif(not FAKE, reason="breaks rules or injects faults, which only the fake driver allows")


V = "gemv/baseline"


GEMM = "gemm_tiled/baseline"


HEAD = "#include <metal_stdlib>\nusing namespace metal;\n"


ADDS = HEAD + "kernel void adds(device float* y, constant uint& n, uint i [[thread_position_in_grid]]) { y[i] += float(n); }"


STEP = HEAD + "kernel void step(device float* y, uint i [[thread_position_in_grid]]) { y[i] = y[i] * 2.0f + 1.0f; }"


ILLEGAL, FAILED, OUT_OF_MEMORY, OUT_OF_RESOURCES = 700, 719, 2, 701


fresh = itertools.count(10)  # GPUs that nobody has used; the first few are of all


def adds(device: metalmm.Device) -> metalmm.Kernel:
    return device.compile(ADDS).kernel("adds")


def computes(device: metalmm.Device) -> None:
    a, b = half(4, 64), half(64, 48, seed=1)
    right(metalmm.matmul(GEMM, a, b, device=device), a, b)
    right(metalmm.matmul(GEMM, device.array(a), device.array(b), device=device), a, b)


def run(script: str, **environment: str) -> subprocess.CompletedProcess[str]:
    given = {**os.environ, **environment}
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=given, timeout=60)


OCTETS, COLUMNS, ROWS = (
    "gemv_nt_octet/c2_s4_tg128",
    "gemv_nt/l8_s7_d2_tg224",
    "gemv_nn_octet/o2_d4_tg512",
)


def batch_of_steps(device: metalmm.Device, y: Any, count: int) -> metalmm.Batch:
    step, batch = device.compile(STEP).kernel("step"), device.batch()
    for _ in range(count):
        step(y, threads=8, threadgroup=8, batch=batch)
    return batch


class OfAnother:
    """An array of another library on the same GPU: DLPack alone."""

    def __init__(self, array: metalmm.Array) -> None:
        self.array, self.asked = array, dict[str, Any]()

    def __dlpack__(self, **options: Any) -> Any:
        self.asked = options
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.array.__dlpack_device__()


BLAS = "blas/baseline"
