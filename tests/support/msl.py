"""MSL's types of numbers and its comparisons, as NumPy and Python have them."""

from __future__ import annotations

import operator
from typing import Any

import ml_dtypes
import numpy as np

FLOATS: dict[str, Any] = {"half": np.float16, "bfloat": ml_dtypes.bfloat16, "float": np.float32}
INTEGERS: dict[str, Any] = {
    "char": np.int8, "uchar": np.uint8, "short": np.int16, "ushort": np.uint16, "int": np.int32, "uint": np.uint32, "long": np.int64,
    "ulong": np.uint64,
}  # fmt: skip
COMPARISONS = {"==": operator.eq, "!=": operator.ne, "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}
