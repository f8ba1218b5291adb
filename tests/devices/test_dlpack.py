"""Producers of DLPack that say what cannot be: an error, before anybody reads by it."""

from __future__ import annotations

import ctypes
from typing import Any

import metalmm
import numpy as np
import pytest


class DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p), ("device", ctypes.c_int * 2), ("ndim", ctypes.c_int), ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16), ("shape", ctypes.POINTER(ctypes.c_int64)), ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("offset", ctypes.c_uint64), ("manager", ctypes.c_void_p), ("deleter", ctypes.c_void_p),
    ]  # fmt: skip


class Producer:
    """Hands over 64 numbers of float16 as if they were of that shape and those strides."""

    def __init__(self, ndim: int, shape: tuple[int, ...] | None, strides: tuple[int, ...] | None = None, offset: int = 0) -> None:
        self.memory = np.ones(64, np.float16)
        self.arrays = [None if x is None else (ctypes.c_int64 * max(1, len(x)))(*x) for x in (shape, strides)]
        pointers = [None if x is None else ctypes.cast(x, ctypes.POINTER(ctypes.c_int64)) for x in self.arrays]
        self.tensor = DLTensor(self.memory.ctypes.data, (1, 0), ndim, 2, 16, 1, *pointers, offset, None, None)

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0

    def __dlpack__(self, **options: Any) -> Any:
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        return new(ctypes.addressof(self.tensor), b"dltensor", None)


BAD = {
    "no shape": (Producer(2, None), "without a shape"),
    "a negative size": (Producer(2, (8, -8)), "a negative size"),
    "strides past all memory": (Producer(2, (8, 8), (1 << 60, 1)), "reach past all memory"),
    "strides before all memory": (Producer(2, (8, 8), (-(1 << 60), 1)), "reach past all memory"),
    "sizes past all memory": (Producer(2, (1 << 40, 1 << 40)), "reach past all memory"),
    "an offset past all memory": (Producer(2, (8, 8), None, 1 << 60), "reach past all memory"),
    "dimensions without end": (Producer(1 << 30, (8, 8)), "dimensions"),
    "less than none": (Producer(-3, (8, 8)), "cannot be read"),
}


@pytest.mark.parametrize(("producer", "message"), BAD.values(), ids=BAD)
def test_what_cannot_be_is_an_error(producer: Producer, message: str, device: metalmm.Device) -> None:
    with pytest.raises(metalmm.Error, match=message):
        metalmm.matmul("gemv/baseline", producer, np.ones((8, 8), np.float16), device=device)


def test_what_can_be_is_taken(device: metalmm.Device) -> None:
    out = metalmm.matmul("gemv/baseline", Producer(2, (1, 8)), Producer(2, (8, 8), (8, 1)), device=device)
    assert (np.asarray(out) == 8).all()
