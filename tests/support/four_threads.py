"""What tests of the language share: a kernel of four threads, and what it wrote."""

from __future__ import annotations

from typing import Any

import metalmm
import numpy as np
import pytest
from metalmm import compiler, nvrtc
from metalmm.backends import cuda
from metalmm.kernel_source import KernelText

HEAD = "#include <metal_stdlib>\nusing namespace metal;\n"


def run(device: metalmm.Device, source: str, kernel: str = "k", constants: Any = None, dtype: str = "i4") -> list[Any]:
    out = np.zeros(4, dtype)
    device.compile(HEAD + source).kernel(kernel, constants)(out, grid=1, threadgroup=4)
    return out.tolist()


def by_nvrtc(source: str, kernel: str = "k", constants: Any = None) -> bytes:
    """Machine code for NVIDIA's GPUs, without one; skips the test where their compiler is not."""
    try:
        nvrtc.find()
    except metalmm.Error as error:
        pytest.skip(f"{error}: NOT compiled for NVIDIA's GPUs")
    text = compiler.preprocess(source, "k.metal", for_metal=True)
    return cuda.build(KernelText(text, "k.metal", is_preprocessed=True), kernel, constants or {}, 90).read_bytes()
