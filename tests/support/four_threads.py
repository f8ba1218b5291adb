"""What tests of the language share: a kernel of four threads, and what it wrote."""

from __future__ import annotations

from typing import Any

import metalmm
import numpy as np

HEAD = "#include <metal_stdlib>\nusing namespace metal;\n"


def run(device: metalmm.Device, source: str, kernel: str = "k", constants: Any = None, dtype: str = "i4") -> list[Any]:
    out = np.zeros(4, dtype)
    device.compile(HEAD + source).kernel(kernel, constants)(out, grid=1, threadgroup=4)
    return out.tolist()
