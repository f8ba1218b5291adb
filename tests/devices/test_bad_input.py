"""Bad input is refused before anything runs, with what, where, the limit and the way out; the library stays usable."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import metalmm
import numpy as np
import pytest
from metalmm import backends

V = "gemm_tiled/baseline"


def half(*shape: int) -> Any:
    return np.ones(shape, np.float16)


def read_only(x: Any) -> Any:
    x.flags.writeable = False
    return x


STORE = half(64)
CASES: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"c": half(2, 4)}, metalmm.ArgumentError, r"c is given and beta is not.*pass beta=1\.0 to add c"),
    ({"a": half(1, 4).astype(">f2")}, metalmm.DTypeError, "a is an array of format '>e'; it takes a plain little-endian number type"),
    ({"a": half(4)}, metalmm.ShapeError, r"a \(4,\) has 1 dimension; it takes 2, or 3 with a batch"),
    ({"b": half(1, 1, 4, 4)}, metalmm.ShapeError, r"b \(1, 1, 4, 4\) has 4 dimensions"),
    (
        {"b": half(5, 4)},
        metalmm.ShapeError,
        r"a \(2, 4\) and b \(5, 4\) differ in k: 4 and 5 \(transpose_a=False, transpose_b=False\); b would fit with transpose_b=True",
    ),
    (
        {"b": half(5, 4), "transpose_b": True, "a": half(2, 3)},
        metalmm.ShapeError,
        r"differ in k: 3 and 4 \(transpose_a=False, transpose_b=True\)",
    ),
    ({"b": half(2, 4, 4)}, metalmm.ShapeError, r"b \(2, 4, 4\) has a batch and a \(2, 4\) has none"),
    ({"a": half(3, 2, 4), "b": half(2, 4, 4)}, metalmm.ShapeError, r"differ in batch: 3 and 2"),
    ({"a": half(0, 4)}, metalmm.ShapeError, r"a \(0, 4\) has a dimension of size zero"),
    ({"b": half(4, 0)}, metalmm.ShapeError, r"b \(4, 0\) has a dimension of size zero"),
    ({"a": np.ones((2, 4), np.float32)}, metalmm.DTypeError, r"b \(4, 4\) is float16 and a is float32; it takes a.s type"),
    ({"b": np.ones((4, 4), np.int8)}, metalmm.DTypeError, r"b \(4, 4\) is int8"),
    ({"b": np.ones((4, 4), ">f2")}, metalmm.DTypeError, r"format '>e'"),
    ({"a": [[1.0] * 4] * 2}, metalmm.DTypeError, r"a is list; pass a numpy array, a metalmm.Array or an array with __dlpack__"),
    ({"a": None}, metalmm.DTypeError, r"a and b must be arrays, not None"),
    ({"b": half(4, 4).T[:, ::2]}, metalmm.LayoutError, r"b \(4, 2\) is not contiguous along its rows; pass transpose_a or transpose_b"),
    ({"b": half(8, 4)[::-2]}, metalmm.LayoutError, r"rows that overlap or run backwards"),
    ({"a": half(3, 2, 4)[::-1]}, metalmm.LayoutError, r"rows that overlap or run backwards"),
    ({"a": half(3, 1, 4)[::-1]}, metalmm.LayoutError, r"rows that overlap or run backwards"),
    ({"b": np.broadcast_to(half(1, 4), (4, 4))}, metalmm.LayoutError, r"rows that overlap"),
    ({"b": np.zeros(33, np.uint8)[1:].view(np.float16).reshape(4, 4)}, metalmm.LayoutError, r"b \(4, 4\) is not aligned to 2 bytes"),
    ({"bias": half(5)}, metalmm.ShapeError, r"bias \(5,\) does not fit; it takes \(4,\)"),
    ({"bias": half(1, 4)}, metalmm.ShapeError, r"bias \(1, 4\) does not fit"),
    ({"bias": half(8)[::2]}, metalmm.LayoutError, r"bias \(4,\) is not contiguous"),
    ({"bias": np.ones(4)}, metalmm.DTypeError, r"bias \(4,\) is float64"),
    ({"beta": 1.0}, metalmm.ShapeError, r"beta is 1.0+ and there is no c"),
    ({"c": half(3, 4), "beta": 1.0}, metalmm.ShapeError, r"c \(3, 4\) does not fit; it takes \(2, 4\)"),
    ({"c": half(3, 4), "beta": 0.0}, metalmm.ShapeError, r"c \(3, 4\) does not fit"),
    ({"out": half(4, 2)}, metalmm.ShapeError, r"out \(4, 2\) does not fit; the result is \(2, 4\)"),
    ({"out": half(1, 2, 4)}, metalmm.ShapeError, r"out \(1, 2, 4\) does not fit"),
    ({"out": np.ones((2, 4), np.float32)}, metalmm.DTypeError, r"out \(2, 4\) is float32"),
    ({"out": half(2, 8)[:, :4]}, metalmm.LayoutError, r"out \(2, 4\) is not C-contiguous"),
    ({"out": half(4, 2).T}, metalmm.LayoutError, r"not C-contiguous"),
    ({"out": read_only(half(2, 4))}, metalmm.LayoutError, r"out \(2, 4\) is read-only"),
    ({"a": STORE[:8].reshape(2, 4), "out": STORE[4:12].reshape(2, 4)}, metalmm.LayoutError, r"out \(2, 4\) overlaps a"),
    ({"b": STORE[:16].reshape(4, 4), "out": STORE[15:23].reshape(2, 4)}, metalmm.LayoutError, r"overlaps b"),
    ({"bias": STORE[:4], "out": STORE[:8].reshape(2, 4)}, metalmm.LayoutError, r"overlaps bias"),
    ({"c": STORE[:8].reshape(2, 4), "beta": 0.0, "out": STORE[1:9].reshape(2, 4)}, metalmm.LayoutError, r"overlaps c"),
    ({"variant": "gemm_tiled/basline"}, metalmm.UnknownVariantError, r"no variant 'gemm_tiled/basline'; did you mean gemm_tiled/baseline"),
    ({"variant": "zzz"}, metalmm.UnknownVariantError, r"no variant 'zzz'; metalmm.variants\(\) lists all"),
    ({"variant": 3}, metalmm.UnknownVariantError, r"a variant is named by a string"),
    (
        {"variant": "gemv/smalln", "b": half(4, 3)},
        metalmm.UnsupportedError,
        r"gemv/smalln: n=3 is not one of 1, 2, 4, 8, 16; supported by ",
    ),
    (
        {"variant": "gemv/baseline", "a": half(1, 4), "transpose_b": True},
        metalmm.UnsupportedError,
        r"gemv/baseline: layout nt is not one of nn \(nn: transpose_b=False\); supported by ",
    ),
    ({"device": "cpu"}, metalmm.DeviceError, r"device is 'cpu'; it takes a metalmm.Device"),
]


@pytest.mark.parametrize(("change", "error", "message"), CASES)
def test_matmul_refuses(change: dict[str, Any], error: type[Exception], message: str, device: metalmm.Device) -> None:
    arguments: dict[str, Any] = {"variant": V, "a": half(2, 4), "b": half(4, 4), "device": device, **change}
    with pytest.raises(error, match=message) as caught:
        metalmm.matmul(**arguments)
    assert isinstance(caught.value, metalmm.Error)
    assert error.__mro__[2] in (RuntimeError, ValueError, TypeError, LookupError)
    np.testing.assert_array_equal(metalmm.matmul(V, half(2, 4), half(4, 4), device=device), np.full((2, 4), 4))


def test_sizes_past_32_bit_counts() -> None:
    big = np.empty((1 << 17, (1 << 15) + 1), np.float16)  # never touched, so never backed by memory
    with pytest.raises(metalmm.ShapeError, match=r"more than 2\^32 - 1 elements; kernels count in 32 bits"):
        metalmm.matmul(V, half(1, (1 << 15) + 1), big, transpose_b=True)
    with pytest.raises(metalmm.ShapeError, match=r"b \(131072, 8\) spans \d+ elements; kernels count in 32 bits"):
        metalmm.matmul(V, half(1, 8), big[:, :8], transpose_b=True)
    with pytest.raises(metalmm.ShapeError, match=r"b of m=1 n=131072 k=65536"):
        metalmm.MatmulSpec(m=1, n=131072, k=65536)
    for sizes in ({"m": 0, "n": 1, "k": 1}, {"m": 1, "n": -3, "k": 1}, {"m": 1, "n": 1 << 40, "k": 1}):
        with pytest.raises(metalmm.ShapeError, match="sizes are 1 to"):
            metalmm.MatmulSpec(**sizes)


def test_factors_that_are_no_float32(device: metalmm.Device) -> None:
    """Rounded they would be Inf and 0."""
    for name, bad in (("alpha", 1e300), ("alpha", 1e-300), ("beta", -1e-46)):
        with pytest.raises(metalmm.ArgumentError, match=f"{name} is {re.escape(str(bad))}; it is a float32"):
            metalmm.matmul(V, half(1, 8), half(8, 8), c=half(1, 8), device=device, **{"beta": 1.0, name: bad})
    q = replace(metalmm.quantize(np.ones((8, 32), np.float16), "q8_0"), global_scale=2.0**-100)
    with pytest.raises(metalmm.ArgumentError, match=r"alpha times b's global_scale is 6\.8\d*e-49; it is a float32"):
        metalmm.matmul(V, half(1, 32), q, alpha=2.0**-60, device=device)


def test_arrays_of_another_device(device: metalmm.Device) -> None:
    other = metalmm.Device("cpu", threads=1)
    x, w = other.array(half(1, 4)), device.array(half(4, 4))
    with pytest.raises(metalmm.DeviceError, match="a lies on another device; copy it"):
        metalmm.matmul(V, x, w, device=device)
    with pytest.raises(metalmm.DeviceError, match="b lies on another device"):
        metalmm.matmul(V, x, w)
    with pytest.raises(metalmm.DeviceError, match="another device"):
        device.batch().add(other.prepare(V, x, half(4, 4)))


def test_devices() -> None:
    with pytest.raises(metalmm.DeviceError, match="no device 'gpu'; there are: cpu, cuda, metal"):
        metalmm.Device("gpu")
    with pytest.raises(metalmm.DeviceError, match="threads is -1"):
        metalmm.Device("cpu", threads=-1)
    with pytest.raises(metalmm.ShapeError, match="1 to 8 dimensions"):
        metalmm.Device("cpu").empty(())


def test_options_of_cuda_may_be_at_their_limits() -> None:
    """Checked without a driver; test_cuda_device.py has those that are out of range."""
    for options in ({"spin": 0}, {"spin": 1}, {"timeout": 0}, {"timeout": 1e6}, {"ahead": 0}, {"ahead": 2**31 - 1}):
        assert backends.get("cuda").checked(options).items() >= options.items()


def test_c_that_shares_out_in_another_order(device: metalmm.Device) -> None:
    out = half(4, 3, 16)
    c = out.reshape(3, 4, 16).transpose(1, 0, 2)  # the same memory, other elements
    with pytest.raises(metalmm.LayoutError, match="overlaps c"):
        metalmm.matmul(V, half(4, 3, 8), half(8, 16), c=c, beta=1.0, out=out, device=device)


def test_sizes_that_would_wrap() -> None:
    with pytest.raises(metalmm.ShapeError, match=r"k=4294967295; the limit is 2\^32 - 4097"):
        metalmm.MatmulSpec(m=1, n=1, k=2**32 - 1)
    for shape in ((2**60,), (2**32, 2**32)):
        with pytest.raises(metalmm.ShapeError, match="more bytes than memory can have"):
            metalmm.Device("cpu", threads=1).empty(shape)
    with pytest.raises(metalmm.ShapeError, match=r"empty: shape: 2.5 is not a whole number"):
        metalmm.Device("cpu", threads=1).empty((2.5, 2))  # type: ignore[arg-type]
    with pytest.raises(metalmm.CompileError, match=r"missing\.metal"):
        metalmm.Device("cpu", threads=1).compile("missing.metal")


def test_a_mask_is_not_dropped(device: metalmm.Device) -> None:
    x, plain = np.ma.masked_array(np.ones((4, 64), np.float16), mask=False), np.ones((4, 64), np.float16)
    for call in (
        lambda: metalmm.matmul("auto", x, plain, transpose_b=True, device=device),
        lambda: metalmm.matmul("auto", plain, x, transpose_b=True, device=device),
        lambda: metalmm.matmul("auto", plain, plain, transpose_b=True, out=np.ma.zeros((4, 4), np.float16), device=device),
        lambda: device.array(x),
        lambda: metalmm.quantize(x, "q8_0"),
    ):
        with pytest.raises(metalmm.DTypeError, match=r"MaskedArray, whose mask would not count; pass its \.filled\(0\) or \.data"):
            call()
    assert (metalmm.matmul("auto", x.data, plain, transpose_b=True, device=device) == 64).all()
