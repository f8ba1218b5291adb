"""Products by one matrix or another of many, as a mixture of experts has them: ggml's mul_mat_id, MLX's gather_qmm."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

import numpy as np

from . import _core, kernel_source
from .errors import ArgumentError, DTypeError, LayoutError, ShapeError, UnsupportedError
from .quantized import FORMATS, QuantizedArray, parts_of_storage
from .variant import MSL_TYPES

if TYPE_CHECKING:
    from .device import Device

# How threads share a row of weights: Lanes of kernels/include/lanes.h, whether a thread walks alone, threads, and columns of a threadgroup.
_ALONE = ("Lanes<1, 4, 1, 1, 32, false, false>", "true", 32, 128)
_DENSE = ("Lanes<16, 1, 2, 4, 128, false, false>", "false", 128, 4)
_QUANTIZED = ("Lanes<4, 1, 4, 4, 128, false, false>", "false", 128, 8)


def _kernel(device: Device, dtype: str, form: str) -> _core.Kernel:
    if made := device._kernels.get((dtype, form)):
        return made
    way, alone, _, _ = _way(device, form)
    kind = MSL_TYPES[dtype]
    source = kernel_source.KERNELS / "weight_columns.metal"
    instance = f"gathered_columns<{kind}, Weights<{kind}, {form.upper()}, false>, {way}, {alone}>"
    name = kernel_source.host_name(instance)
    code = device.backend.code(device, kernel_source.KernelText(kernel_source.assemble(source, instance), str(source)), name, {})
    device._kernels[dtype, form] = made = _core.Kernel(device, code.as_tuple(), name, {})
    return made


def _way(device: Device, form: str) -> tuple[str, str, int, int]:
    return _ALONE if device.name == "cpu" else _DENSE if form == "dense" else _QUANTIZED


def _address(x: Any) -> int:
    return int(x.ctypes.data if isinstance(x, np.ndarray) else x.device_address)


def _checked(x: Any, name: str, dimensions: tuple[int, ...], kinds: tuple[str, ...]) -> Any:
    if not isinstance(x, (np.ndarray, _core.Array)):
        raise DTypeError(f"matmul_gathered: {name} is {type(x).__name__}; it takes an array of NumPy or a metalmm.Array")
    if x.dtype.name not in kinds:
        raise DTypeError(f"matmul_gathered: {name} is {x.dtype}; it takes {', '.join(kinds)}")
    if x.ndim not in dimensions or 0 in x.shape:
        raise ShapeError(f"matmul_gathered: {name} has shape {x.shape}; it takes {' or '.join(map(str, dimensions))} dimensions, none of 0")
    _contiguous(x, name, x.itemsize)
    return x


def _contiguous(x: Any, name: str, size: int) -> None:
    """And on `size` bytes."""
    try:
        is_contiguous = x.flags.c_contiguous if isinstance(x, np.ndarray) else x.reshape(x.shape).ndim > 0
    except LayoutError:
        is_contiguous = False
    if not is_contiguous:
        raise LayoutError(f"matmul_gathered: {name}: not C-contiguous; pass numpy.ascontiguousarray of it")
    if _address(x) % size:
        raise LayoutError(f"matmul_gathered: {name}: not aligned to {size} bytes")


def matmul_gathered(
    x: Any, experts: Any, ids: Any, *, out: Any = None, device: Device | None = None, batch: _core.Batch | None = None
) -> Any:
    """``out[t, j] = x[t] @ experts[ids[t, j]].T``: each token by the matrices that a router chose for it.

    Args:
        x: [tokens, k], or [tokens, chosen, k] with a row for each choice. float16, bfloat16 or float32.
        experts: [experts, n, k] of x's type, or a :class:`QuantizedArray` with ``experts`` matrices, in layout nk.
        ids: int32 [tokens, chosen], 0 to experts - 1. Others in a NumPy array are an error. In memory of a device nobody has looked at
            them: their rows of the result are NaN.
        out: [tokens, chosen, n] of x's type; made anew where it is not given.
        device: Where x is no Array; the default device otherwise.
        batch: Takes the call in place of running it. Everything is an Array then.

    Returns out: of NumPy, or an Array where x is one. Sums are as those of ``matmul`` with m = 1, within its bound. Raises DTypeError,
    ShapeError, LayoutError (out may not overlap what is read), ArgumentError, UnsupportedError.
    """
    from .device import Device, default_device

    x = _checked(x, "x", (2, 3), tuple(MSL_TYPES))
    ids = _checked(ids, "ids", (2,), ("int32",))
    on_device = isinstance(x, _core.Array)
    if on_device and device is not None and device is not x.device:
        raise ArgumentError(f"matmul_gathered: x is on {x.device!r}, and device is {device!r}")
    device = x.device if on_device else device or default_device()
    if not isinstance(device, Device):
        raise ArgumentError(f"matmul_gathered: device is {device!r}; it takes a metalmm.Device")
    count, n, k, arrays, form, group = _parts(experts, x.dtype.name)
    tokens, chosen = ids.shape
    if x.shape[0] != tokens or x.shape[-1] != k or (x.ndim == 3 and x.shape[1] != chosen):
        raise ShapeError(
            f"matmul_gathered: x {x.shape} and ids {ids.shape} for experts of {n} x {k}; x is (tokens, k) or (tokens, chosen, k)"
        )
    if isinstance(ids, np.ndarray) and (ids.min() < 0 or ids.max() >= count):
        raise ArgumentError(f"matmul_gathered: ids are {ids.min()} to {ids.max()}; there are {count} experts, from 0 on")
    if tokens * chosen * max(n, k) > 0xFFFFFFFF or count * n * k > 0xFFFFFFFF:
        raise ShapeError(f"matmul_gathered: {count} experts of {n} x {k}, {tokens * chosen} rows: more than 2^32 - 1 numbers")
    shape = (tokens, chosen, n)
    if out is None:
        out = device.empty(shape, x.dtype) if on_device else np.empty(shape, x.dtype)
    elif _checked(out, "out", (3,), (x.dtype.name,)).shape != shape:
        raise ShapeError(f"matmul_gathered: out has shape {out.shape}; it takes {shape}")
    if isinstance(out, np.ndarray) and not out.flags.writeable:
        raise LayoutError("matmul_gathered: out is read-only")
    for name, read in (("x", x), ("ids", ids), *zip(("experts", "their scales", "their biases"), arrays, strict=True)):
        if type(read) is type(out) and _address(read) < _address(out) + out.nbytes and _address(out) < _address(read) + read.nbytes:
            raise LayoutError(f"matmul_gathered: out overlaps {name}")
    if batch is not None and any(isinstance(array, np.ndarray) for array in (x, ids, out, *arrays)):
        raise DTypeError("matmul_gathered: a batch takes Arrays alone: device.array(x), experts.to(device)")
    f = FORMATS.get(form)
    row_bytes = k if f is None else -(-k // (8 // f.bits))
    offset = 0 if f is None else _address(arrays[0]) % 16
    params = struct.pack(
        "<12I2f6I", 1, n, k, 1, k, row_bytes, n, n, 0, 0, 0, 0, 1.0, 0.0, 0, 0, _address(x) // x.itemsize % 8,
        offset if f else _address(arrays[0]) // x.itemsize % 8, group.bit_length() - 1 if f else 0, 255,
    )  # fmt: skip
    _, _, threads, columns = _way(device, form)
    buffers = {
        0: x, 1: arrays[0], 2: out, 3: ids, 5: params, 6: arrays[1], 7: arrays[2],
        8: struct.pack("<I", count), 9: struct.pack("<I", chosen if x.ndim == 2 else 1),
    }  # fmt: skip
    _kernel(device, x.dtype.name, form)(buffers, grid=(-(-n // columns), tokens * chosen), threadgroup=threads, batch=batch)
    return out


def _parts(experts: Any, dtype: str) -> tuple[int, int, int, list[Any], str, int]:
    """How many, n, k, the buffers, format and group."""
    if not isinstance(experts, QuantizedArray):
        experts = _checked(experts, "experts", (3,), (dtype,))
        count, n, k = experts.shape
        return count, n, k, [experts] * 3, "dense", 1
    experts.__post_init__()  # arrays may have been changed since
    if experts.global_scale != 1:
        raise UnsupportedError(
            f"matmul_gathered: experts have a global scale of {experts.global_scale}, and it has no alpha: multiply x or the result by it, and give"
            " dataclasses.replace(experts, global_scale=1.0)"
        )
    form, group, layout = parts_of_storage(experts.storage)
    if layout != "nk":
        raise UnsupportedError("matmul_gathered: experts are in layout canonical; it takes nk: to_layout('nk')")
    (rows, k), f = experts.shape, FORMATS[form]
    if f.is_affine and experts.scales.dtype.name != dtype:
        raise DTypeError(f"matmul_gathered: scales of {form} are {experts.scales.dtype}; x is {dtype}")
    biases = experts.scales if experts.biases is None else experts.biases
    for name, array, each in zip(("scales", "biases"), (experts.scales, biases), f.each, strict=True):
        count = each[0] if each else 1  # twelve bytes stand on four
        _contiguous(array, f"experts' {name}", array.itemsize * (count & -count))
    return experts.experts, rows // experts.experts, k, [experts.values, experts.scales, biases], form, group
