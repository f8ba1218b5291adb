"""Quantized weights: blocks of integers along K with a scale each, in the formats of GGUF and MLX. Values and scales lie apart.

| format | a value is | groups of | from |
|---|---|---|---|
| q8_0 | scale * q, q of -128 to 127 | 32 | GGUF |
| q4_0 | scale * (q - 8), q of 0 to 15 | 32 | GGUF |
| affine8, affine4 | scale * q + bias, q of 0 to 255, to 15 | 32, 64 or 128 | MLX's quantize |
| q4_k, q5_k | scale * q - minimum, q of 0 to 15, to 31 | 32 | GGUF: q4_K, q5_K |
| q2_k | the same, q of 0 to 15 | 16 | GGUF: q2_K |
| q6_k | scale * (q - 32), q of 0 to 63 | 16 | GGUF: q6_K, q3_K |
| q8_k | scale * q, q of -128 to 127 | 16 | GGUF: iq4_xs |
| fp4, fp8 | scale * q, q a number of 4 or 8 bits | 32 | mxfp4 and mxfp8 |
| nvfp4 | the same, of 4 bits | 16 | nvfp4 |

| format | scales, and what stands beside them |
|---|---|
| q8_0, q4_0 | float16 |
| affine8, affine4 | scales and biases, of the weights' type |
| K-quants (q2_k, q4_k, q5_k, q6_k, q8_k) | int8, and minima of int8; both times a float16 of 256 weights, their factor |
| fp4, fp8, nvfp4 | the upper 16 bits of a float32, as uint16 |

Values of q5_k and q6_k have 4 bits. The upper ones stand behind their group's scales and two zeros, in little-endian words of four bytes:

| format | a word is of | upper bits of value i stand from bit |
|---|---|---|
| q5_k | 32 values, one bit each | 4 * (i % 8) + i // 8 |
| q6_k | 16 values, two bits each | 4 * (i % 8) + 2 * (i // 8) |

The last group of a row may be short. Of fp4 and nvfp4 q is e2m1, times 2: 0, 1, 2, 3, 4, 6, 8, 12 and these below zero. Of fp8 it is e4m3, whose
NaNs no format has.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ._core import Array
from ._core import Device as _CoreDevice
from .errors import ArgumentError, DTypeError, ShapeError, UnsupportedError
from .gguf_blocks import BLOCK, GGUF, SUPER
from .quantizers import NUMBERS, QUANTIZERS, upper_half

if TYPE_CHECKING:
    from .device import Device

_Numbers = np.ndarray[Any, np.dtype[Any]]

LAYOUTS = ("nk", "canonical")
_MLX_BITS = (2, 3, 4, 5, 6, 8)


@dataclass(frozen=True)
class Format:
    """A format of quantized weights.

    Attributes:
        bits: Of a value, as ``values`` has it.
        upper: Further bits of a value, in ``scales``.
        groups: How many neighbours along K may share a scale, the default first.
        offset: Subtracted from a stored value.
        has_bias: A group has a bias, or a minimum, beside its scale.
        is_k: Scales are of int8, with factors of 256 weights in place of biases.
        is_float: A value is a number of few bits, and scales are upper halves of float32.
        halves: Each half of a group has a scale of its own.
    """

    name: str
    bits: int
    groups: tuple[int, ...]
    offset: int = 0
    has_bias: bool = False
    is_k: bool = False
    is_float: bool = False
    halves: bool = False
    upper: int = 0

    def scale_type(self, operands: Any) -> Any:
        """The type of scales, by that of the operands."""
        return "int8" if self.is_k else "uint16" if self.is_float else operands if self.has_bias else "float16"

    def bias_type(self, operands: Any) -> Any:
        """The type of what stands in ``biases``, None where nothing does."""
        return "float16" if self.is_k else operands if self.has_bias else None

    @property
    def is_affine(self) -> bool:
        """Whether scales and biases are of the operands' type."""
        return self.has_bias and not self.is_k

    @property
    def value_type(self) -> type[np.generic]:
        return np.int8 if self.name in ("q8_0", "q8_k") else np.uint8

    @property
    def each(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Axes of ``scales`` and of ``biases`` behind the group's, or the 256 weights'."""
        has_minima = self.is_k and self.has_bias
        scales = (1 + self.halves) * (1 + has_minima) + (2 + 4 * self.upper) * (self.upper > 0)
        return (scales,) if scales > 1 else (), (2,) if has_minima else ()

    def shapes(self, n: int, k: int, group: int, layout: str) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """Of values, scales and biases."""
        per_byte, of_scales, of_biases = 8 // self.bits, -(-k // group), -(-k // (SUPER if self.is_k else group))
        if layout == "nk":
            return (n, -(-k // per_byte)), (n, of_scales, *self.each[0]), (n, of_biases, *self.each[1])
        return (-(-k // BLOCK), n, BLOCK // per_byte), (of_scales, n, *self.each[0]), (of_biases, n, *self.each[1])


FORMATS = {
    f.name: f
    for f in (
        Format("q8_0", 8, (32,)),
        Format("q4_0", 4, (32,), offset=8),
        Format("affine8", 8, (64, 32, 128), has_bias=True),
        Format("affine4", 4, (64, 32, 128), has_bias=True),
        Format("q5_k", 4, (32,), has_bias=True, is_k=True, upper=1),
        Format("q4_k", 4, (32,), has_bias=True, is_k=True),
        Format("q8_k", 8, (32,), is_k=True, halves=True),
        Format("q6_k", 4, (32,), offset=32, is_k=True, halves=True, upper=2),
        Format("q2_k", 4, (32,), has_bias=True, is_k=True, halves=True),
        Format("nvfp4", 4, (32,), is_float=True, halves=True),
        Format("fp4", 4, (32,), is_float=True),
        Format("fp8", 8, (32,), is_float=True),
    )
}


@dataclass(frozen=True, eq=False)
class QuantizedArray:
    """A matrix of n rows of k weights, as :func:`quantize` makes it.

    All its arrays are C-contiguous, and not to be written to. They are NumPy arrays, or Arrays of a device: :meth:`to`.

    Attributes:
        values: Of int8 (q8_0, q8_k) or uint8. Formats of 4 bits have two to a byte, the even element in the low half. Layout ``nk`` is [n, k],
            or [n, (k + 1) // 2] where two share a byte. Layout ``canonical`` is [ceil(k / 32), n, 32] or [..., 16], zeros behind the last
            of k.
        scales: Layout ``nk`` is [n, ceil(k / group)]. Layout ``canonical`` is [ceil(k / group), n]. Formats q8_k and nvfp4 have [..., 2], of
            each half of the group; q6_k [..., 12], upper bits behind them. Format q4_k has [..., 2], scale and minimum; q5_k [..., 8],
            upper bits behind them. Format q2_k has [..., 4], scale and minimum for each half.
        biases: Of the affine formats, like scales. Of q6_k and q8_k factors of each 256 weights, [n, ceil(k / 256)]; of q2_k, q4_k and q5_k
            [..., 2], those of scales and of minima. None in the other formats.
        experts: Matrices that it is made of, one behind another: each of n / experts rows (:func:`matmul_gathered`).
        global_scale: A float32 that every scale and bias is multiplied by, as nvfp4 may have one. A matmul multiplies its alpha by it; fused and
            gathered calls, which have no alpha, refuse others than 1.
        storage: Format, group and layout in one word, as MatmulSpec has it.
    """

    format: str
    layout: str
    shape: tuple[int, int]
    group: int
    values: Any  # NumPy's arrays, or a device's
    scales: Any
    biases: Any = None
    experts: int = 1
    global_scale: float = 1.0

    storage: str = field(init=False)

    def __post_init__(self) -> None:
        f = _format(self.format)
        sizes = self.shape if isinstance(self.shape, tuple | list) else ()
        if len(sizes) != 2 or not all(isinstance(size, int | np.integer) for size in sizes):
            raise ArgumentError(f"shape is {self.shape!r}; it takes (n, k)")
        n, k = (int(size) for size in self.shape)
        object.__setattr__(self, "shape", (n, k))
        _check_group(f, self.group)
        _check_layout(self.layout)
        if not isinstance(self.experts, int | np.integer) or self.experts is True or self.experts < 1 or n % self.experts:
            raise ArgumentError(f"experts is {self.experts!r}; it takes a whole number that divides {n} rows")
        object.__setattr__(self, "experts", int(self.experts))
        scale = self.global_scale
        if (
            isinstance(scale, bool)
            or not isinstance(scale, int | float | np.integer | np.floating)
            or not abs(float(scale)) <= 3.4028234663852886e38
            or (scale != 0 and np.float32(scale) == 0)
        ):
            raise ArgumentError(f"global_scale is {scale!r}; it takes a float32: 0, or of a size from 1.4e-45 to 3.4e38")
        object.__setattr__(self, "global_scale", float(np.float32(scale)))
        values, scales, biases = f.shapes(n, k, self.group, self.layout)
        _check(self.values, "values", values, (f.value_type,))
        kinds = ("float16", "float32", "bfloat16") if f.is_affine else (f.scale_type(""),)
        _check(self.scales, "scales", scales, _types(*kinds))
        kind = f.bias_type(self.scales.dtype)
        if (kind is None) != (self.biases is None):
            has = "none" if kind is None else "factors of 256 weights" if f.is_k else "one for each scale"
            raise ArgumentError(f"biases: format {f.name} has {has}")
        if kind is not None:
            _check(self.biases, "biases", biases, (np.dtype(kind),))
        group = "" if self.group == f.groups[0] else f":{self.group}"
        object.__setattr__(self, "storage", f"{f.name}{group}{'' if self.layout == 'nk' else ':canonical'}")

    def __getitem__(self, rows: slice) -> QuantizedArray:
        """Some of its n rows, neighbours: ``q[128:256]``. Views where they lie so."""
        if not isinstance(rows, slice) or not (rows.step is None or (isinstance(rows.step, int) and rows.step == 1)):
            raise ArgumentError(f"a QuantizedArray is indexed by a slice of neighbouring rows, not by {rows!r}")
        try:
            start, stop, _ = rows.indices(self.shape[0])
        except TypeError as error:
            raise ArgumentError(f"a QuantizedArray: {rows!r}: {error}") from None
        if stop <= start:
            raise ShapeError(f"{self!r}: rows {start} to {stop} are none")

        def part(x: Any) -> _Numbers:
            return np.asarray(x)[start:stop] if self.layout == "nk" else np.ascontiguousarray(np.asarray(x)[:, start:stop])

        return self._each(part, shape=(stop - start, self.shape[1]), experts=1)

    def _each(self, change: Callable[[Any], Any], **others: Any) -> QuantizedArray:
        """With values, scales and biases changed."""
        biases = None if self.biases is None else change(self.biases)
        return replace(self, values=change(self.values), scales=change(self.scales), biases=biases, **others)

    def __repr__(self) -> str:
        of = f", experts={self.experts}" if self.experts > 1 else ""
        of += f", global_scale={self.global_scale}" if self.global_scale != 1 else ""
        return f"metalmm.QuantizedArray({self.format}, shape={self.shape}{of}, group={self.group}, layout={self.layout!r}, {self.nbytes} bytes)"

    @property
    def nbytes(self) -> int:
        """Of values, scales and biases."""
        return int(self.values.nbytes + self.scales.nbytes + (0 if self.biases is None else self.biases.nbytes))

    def to(self, device: Device) -> QuantizedArray:
        """The same in memory of the device, which then need not be copied there for each call."""
        if not isinstance(device, _CoreDevice):
            raise ArgumentError(f"to() takes a metalmm.Device, such as metalmm.Device('cpu'), and not {device!r}")
        return self._each(device.array)

    def numpy(self) -> QuantizedArray:
        """The same in NumPy arrays: itself, or views or copies of what lies on a device."""
        if all(x is None or isinstance(x, np.ndarray) for x in (self.values, self.scales, self.biases)):
            return self
        return self._each(np.asarray)

    def _by_row(self, x: _Numbers) -> _Numbers:
        """Scales or biases as [n, groups, ...]."""
        return np.asarray(x) if self.layout == "nk" else np.asarray(x).swapaxes(0, 1)

    def factors(self) -> tuple[_Numbers, _Numbers | None]:
        """What each weight's value is multiplied with, and what is added: float64 [n, k]. None where nothing is."""
        f, k = FORMATS[self.format], self.shape[1]

        def each(x: _Numbers, by: int) -> _Numbers:
            return np.repeat(x, by, axis=1)[:, :k]

        scales, biases = self._by_row(self.scales), None if self.biases is None else self._by_row(self.biases).astype(np.float64)
        if f.is_float:
            wide = (scales.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
            return each(wide.reshape(len(wide), -1), BLOCK // (1 + f.halves)), None
        if not f.is_k:
            return each(scales.astype(np.float64), self.group), None if biases is None else each(biases, self.group)
        assert biases is not None
        halves = 1 + f.halves
        if f.upper:
            scales = scales[..., :2]
        parts = scales.astype(np.float64).reshape(*scales.shape[:2], halves, -1)  # of each: scale, or scale and minimum
        parts *= np.repeat(biases.reshape(*biases.shape[:2], 1, -1), SUPER // BLOCK, axis=1)[:, : parts.shape[1]]
        parts = each(parts.reshape(len(parts), halves * parts.shape[1], -1), BLOCK // halves)
        return parts[..., 0], -parts[..., 1] if f.has_bias else None

    def integers(self) -> _Numbers:
        """The stored values one by one, less the format's offset, int16 [n, k]; of fp4, fp8 and nvfp4 their codes."""
        f, (n, k) = FORMATS[self.format], self.shape
        values = np.asarray(self.values)
        rows = values if self.layout == "nk" else values.transpose(1, 0, 2).reshape(n, -1)
        found = (_unpacked(rows) if f.bits == 4 else rows)[:, :k].astype(np.int16) - np.int16(f.offset)
        if f.upper:
            words = np.ascontiguousarray(self._by_row(self.scales)[..., 4:]).view("<u4")[..., None]
            found += (words >> _places(f) & (1 << f.upper) - 1).reshape(n, -1)[:, :k].astype(np.int16) << 4
        return found

    def dequantize(self, dtype: Any = np.float32) -> _Numbers:
        """The weights that the integers stand for, [n, k]: computed in float64, rounded to `dtype` once. Raises DTypeError for no type of
        numbers."""
        try:
            kind = np.dtype(dtype)
        except (TypeError, ValueError) as error:
            raise DTypeError(f"dequantize: dtype is {dtype!r}: {error}") from None
        if kind.kind not in "iuf" and kind.name != "bfloat16":
            raise DTypeError(f"dequantize: dtype is {kind}; it takes one of numbers")

        f, values = FORMATS[self.format], self.integers()
        with np.errstate(all="ignore"):
            scales, biases = self.factors()
            if self.global_scale != 1:  # as MLX rounds
                scales = (scales * self.global_scale).astype(np.float32).astype(np.float64)
                biases = biases if biases is None else (biases * self.global_scale).astype(np.float32).astype(np.float64)
            wide = scales * (NUMBERS[f.bits][values] if f.is_float else values)
            return (wide if biases is None else wide + biases).astype(kind)

    def to_layout(self, layout: str) -> QuantizedArray:
        """The same numbers in the other layout, or itself."""
        _check_layout(layout)
        if layout == self.layout:
            return self
        stored = self.integers() + FORMATS[self.format].offset
        biases = None if self.biases is None else self._by_row(self.biases)
        found = _array_of(self.format, layout, stored, self.group, self._by_row(self.scales), biases)
        return replace(found, experts=self.experts, global_scale=self.global_scale)

    def to_gguf(self) -> _Numbers:
        """Blocks as GGUF has them, uint8 [n, k / 32 * bytes of a block]. Raises UnsupportedError for what GGUF has not."""
        f, (n, k) = FORMATS[self.format], self.shape
        if self.format not in ("q8_0", "q4_0") or k % BLOCK or self.global_scale != 1:
            raise UnsupportedError(f"{self!r}: GGUF has q8_0 and q4_0 with a k that is a multiple of {BLOCK}, and no global scale")
        stored = (self.integers() + f.offset).astype(f.value_type).reshape(n, k // BLOCK, BLOCK)
        if f.bits == 4:  # element i and i + 16 share a byte
            stored = stored[..., : BLOCK // 2] | stored[..., BLOCK // 2 :] << 4
        scales = np.ascontiguousarray(self._by_row(self.scales)).view(np.uint8).reshape(n, k // BLOCK, 2)
        return np.concatenate([scales, stored.view(np.uint8)], axis=2).reshape(n, -1)

    def to_mlx(self) -> tuple[_Numbers, _Numbers, _Numbers]:
        """What mlx.core.quantize returns: values packed in uint32 [n, k * bits / 32], scales and biases [n, k / group]. Raises
        UnsupportedError for what MLX has not."""
        if not FORMATS[self.format].is_affine or self.shape[1] % self.group or self.global_scale != 1:
            raise UnsupportedError(
                f"{self!r}: MLX has affine8 and affine4 with a k that is a multiple of the group, without a global scale"
            )
        rows = self.to_layout("nk").numpy()
        return rows.values.view(np.dtype("<u4")), rows.scales, rows.biases


def quantize(w: Any, format: str, *, group: int | None = None, layout: str = "nk") -> QuantizedArray:
    """Weights [n, k] (rows of B in ``x @ B.T``) of float16, bfloat16 or float32, quantized along k.

    The numbers are those of GGUF's and of MLX's own quantizers. group: neighbours that share a scale, a format's default otherwise. Raises
    DTypeError, ShapeError, ArgumentError: for NaN, infinities and scales past float16, which no format has, too.
    """
    f = _format(format)
    group = f.groups[0] if group is None else group
    _check_group(f, group)
    w = _host_array(w, "quantize: w")
    if w.dtype not in _types("float16", "float32", "bfloat16"):
        raise DTypeError(f"quantize: w is {w.dtype}; it takes float16, bfloat16 or float32")
    if w.ndim != 2 or 0 in w.shape:
        raise ShapeError(f"quantize: w has shape {w.shape}; it takes [n, k], both at least 1")
    n, k = w.shape
    wide = w.astype(np.float32)
    if not np.isfinite(wide).all():
        raise ArgumentError(f"quantize: w{list(map(int, np.argwhere(~np.isfinite(wide))[0]))} is not finite")
    groups = -(-k // group)
    # A short group is filled with its own last element, which changes neither the least nor the greatest of it.
    blocks = np.concatenate([wide, np.repeat(wide[:, -1:], groups * group - k, axis=1)], axis=1).reshape(n, groups, group)
    with np.errstate(all="ignore"):  # a scale of zero has no inverse; one that is past its type is refused below
        stored, scales, biases = QUANTIZERS[format](blocks, f)
        kept = scales.astype(f.scale_type(w.dtype)), None if biases is None else biases.astype(f.bias_type(w.dtype))
    for x in kept:
        if x is not None and not np.isfinite(x.astype(np.float32)).all():
            raise ArgumentError(f"quantize: weights of up to {np.abs(wide).max():g} need a scale past {x.dtype.name}")
    return _array_of(format, layout, stored.reshape(n, -1)[:, :k], group, *kept)


def from_gguf(blocks: Any, format: str, shape: tuple[int, ...], *, layout: str = "nk", dtype: Any = np.float16) -> QuantizedArray:
    """A tensor's data as it lies in a GGUF file: uint8, blocks of 32 to 256 weights along k. shape: (n, k), or (experts, n, k).

    Weights keep their values bit for bit, whatever holds them. q5_0 and iq4_nl become q8_0; q4_1 affine4; q5_1 affine8; q3_k q6_k;
    iq4_xs q8_k; mxfp4 fp4; nvfp4 itself.

    dtype: of the scales and biases of q4_1 and q5_1, float16 or float32. It is the type of the operands that they go with. Raises UnsupportedError, DTypeError, ShapeError, ArgumentError.
    """
    if not isinstance(format, str) or format not in GGUF:
        raise UnsupportedError(f"from_gguf: format is {format!r}; it takes {', '.join(GGUF)}")
    data = _host_array(blocks, "from_gguf: blocks")
    if data.dtype != np.uint8:
        raise DTypeError(f"from_gguf: blocks are {data.dtype}; it takes uint8")
    form = GGUF[format]
    f = FORMATS[form.format]
    if f.is_affine and not (isinstance(dtype, (str, type, np.dtype)) and dtype in ("float16", "float32", np.float16, np.float32)):
        raise DTypeError(f"from_gguf: dtype is {dtype!r}; {format} takes float16, as the file has it, or float32")
    if (
        not isinstance(shape, tuple | list)
        or len(shape) not in (2, 3)
        or not all(type(x) is int or isinstance(x, np.integer) for x in shape)
    ):
        raise ArgumentError(f"from_gguf: shape is {shape!r}; it takes (n, k) or (experts, n, k)")
    if min(shape) < 1:
        raise ShapeError(f"from_gguf: shape is {tuple(shape)}; no size may be less than 1")
    n, k = int(np.prod(shape[:-1], dtype=object)), int(shape[-1])
    if k % form.weights or data.size != n * k // form.weights * form.size:
        raise ShapeError(
            f"from_gguf: {data.size} bytes for shape {tuple(shape)} in {format}; k is a multiple of {form.weights}, and n * k / {form.weights}"
            f" blocks have {form.size} bytes each"
        )
    stored, scales, biases = form.apart(data.reshape(-1, form.size))
    scales, biases = scales.reshape(n, -1, *scales.shape[2:]), None if biases is None else biases.reshape(n, -1, *f.each[1])
    if biases is not None and f.is_affine:
        scales, biases = scales.astype(dtype), biases.astype(dtype)
    found = _array_of(form.format, layout, stored.reshape(n, k), BLOCK, scales, biases)
    return replace(found, experts=int(shape[0])) if len(shape) == 3 else found


def from_mlx(
    packed: Any,
    scales: Any = None,
    biases: Any = None,
    *,
    bits: int | None = None,
    group: int | None = None,
    mode: str = "affine",
    global_scale: Any = None,
    layout: str = "nk",
) -> QuantizedArray:
    """Takes what mlx.core.quantize(w, group_size=group, bits=bits, mode=mode) returns, as its own arrays or NumPy's.

    They are uint32 [n, k * bits / 32], and two of [n, k / group]; of experts, [experts, n, ...]. bits: 2, 3, 4, 5, 6 or 8; a value of 2 or 3 takes 4 bits here, one of 5
    or 6 a byte. The group is 64 if it is not given. Modes mxfp4, mxfp8 and nvfp4 have no biases, scales of uint8, and say bits and group
    themselves. global_scale: What nvfp4 was quantized with, one number; 1 / 2688 of it is in the result's. A layer alone, an
    mlx.nn.QuantizedLinear, will do as well. It knows all of them; its `bias` is not taken.

    Raises ArgumentError, DTypeError, ShapeError, UnsupportedError for bits or a mode of quantization that no format has.
    """
    if hasattr(packed, "group_size") and hasattr(packed, "scales"):
        if any(x is not None for x in (scales, biases, bits, group, global_scale)):
            raise ArgumentError("from_mlx: a layer comes alone: it knows its scales, biases, bits and group")
        global_scale = getattr(packed, "global_scale", None)
        mode = getattr(packed, "mode", "affine")
        names = ("weight", "scales", "bits", "group_size", "biases")
        packed, scales, bits, group, biases = parts = [getattr(packed, name, None) for name in names]
        if missing := [name for name, part in zip(names[: 5 if mode == "affine" else 4], parts, strict=False) if part is None]:
            raise ArgumentError(f"from_mlx: the layer has no {missing[0]}")
    if (experts := _experts(packed)) is not None:
        given = {name: x for name, x in (("packed", packed), ("scales", scales), ("biases", biases)) if x is not None}
        arrays = {name: _host_array(x, f"from_mlx: {name}") for name, x in given.items()}
        if len({x.shape[:-1] for x in arrays.values()}) > 1:
            raise ShapeError(f"from_mlx: packed, scales and biases have shapes {', '.join(str(x.shape) for x in arrays.values())}")
        flat = [arrays[name].reshape(-1, arrays[name].shape[-1]) if name in arrays else None for name in ("packed", "scales", "biases")]
        return replace(from_mlx(*flat, bits=bits, group=group, mode=mode, global_scale=global_scale, layout=layout), experts=experts)
    if global_scale is not None and mode != "nvfp4":
        raise ArgumentError(f"from_mlx: mode {mode!r} has no global scale; nvfp4 has")
    if mode != "affine":
        found = _from_mx(packed, scales, biases, bits, group, mode, layout)
        return found if global_scale is None else replace(found, global_scale=_of_mlx(global_scale))
    if scales is None or biases is None or bits is None:
        raise ArgumentError("from_mlx takes packed, scales, biases and bits=, or a QuantizedLinear alone")
    group = 64 if group is None else group
    if not isinstance(bits, (int, np.integer)) or bits not in _MLX_BITS:
        raise UnsupportedError(f"from_mlx: bits is {bits!r}; there are {', '.join(map(str, _MLX_BITS))}")
    name = "affine4" if bits <= 4 else "affine8"
    packed, scales, biases = (
        _host_array(x, f"from_mlx: {name}") for x, name in ((packed, "packed"), (scales, "scales"), (biases, "biases"))
    )
    _check_group(FORMATS[name], group)
    _check_packed(packed)
    n, k = packed.shape[0], packed.shape[1] * 32 // bits
    if scales.shape != (n, k // group) or biases.shape != scales.shape or k % group:
        raise ShapeError(f"from_mlx: scales {scales.shape} and biases {biases.shape} for {n} rows of {k} in groups of {group}")
    rows = np.ascontiguousarray(packed.astype(np.dtype("<u4"))).view(np.uint8)
    if bits == 4:
        rows = _unpacked(rows)
    elif bits != 8:  # one after another, each from its lowest bit on
        values = np.unpackbits(rows, axis=1, bitorder="little").reshape(n, k, bits)
        rows = np.packbits(values, axis=2, bitorder="little")[..., 0]
    return _array_of(name, layout, rows, group, scales, biases)


# -- the parts ----------------------------------------------------------------------------------------------------------


def _check_packed(packed: _Numbers) -> None:
    if packed.dtype != np.uint32:
        raise DTypeError(f"from_mlx: packed is {packed.dtype}; it takes uint32")
    if packed.ndim != 2 or 0 in packed.shape:
        raise ShapeError(f"from_mlx: packed has shape {packed.shape}; it takes [n, k * bits / 32], or [experts, n, ...]")


def _of_mlx(global_scale: Any) -> float:
    """MLX's is the largest weight, which the largest scale and code, 448 * 6, stand for."""
    value = _host_array(global_scale, "from_mlx: global_scale")
    if value.size != 1 or value.dtype.kind not in "iuf":
        raise ArgumentError(f"from_mlx: global_scale is {global_scale!r}; it takes one number")
    return float(np.float32(value.reshape(())) / np.float32(448 * 6))


def _experts(packed: Any) -> int | None:
    shape: Any = getattr(packed, "shape", ())
    return int(shape[0]) if len(shape) == 3 and 0 not in shape else None


_MX = {"mxfp4": ("fp4", 32), "mxfp8": ("fp8", 32), "nvfp4": ("nvfp4", 16)}  # modes of MLX: format, and weights with one scale


def _from_mx(packed: Any, scales: Any, biases: Any, bits: Any, group: Any, mode: Any, layout: str) -> QuantizedArray:
    if not isinstance(mode, str) or mode not in _MX:
        raise UnsupportedError(f"from_mlx: mode is {mode!r}; it takes affine, {', '.join(_MX)}")
    f, of_one = FORMATS[_MX[mode][0]], _MX[mode][1]
    if biases is not None or bits not in (None, f.bits) or group not in (None, of_one):
        raise ArgumentError(f"from_mlx: {mode} has {f.bits} bits, groups of {of_one} and no biases")
    packed, scales = _host_array(packed, "from_mlx: packed"), _host_array(scales, "from_mlx: scales")
    _check_packed(packed)
    if scales.dtype != np.uint8:
        raise DTypeError(f"from_mlx: scales are {scales.dtype}; {mode} has uint8")
    n, k = packed.shape[0], packed.shape[1] * 32 // f.bits
    if scales.shape != (n, k // of_one) or k % BLOCK:
        raise ShapeError(f"from_mlx: scales {scales.shape} for {n} rows of {k} in groups of {of_one}")
    codes = np.ascontiguousarray(packed.astype(np.dtype("<u4"))).view(np.uint8)
    if ((scales & 127 == 127) if mode == "nvfp4" else (scales == 255)).any() or (f.bits == 8 and (codes & 127 == 127).any()):
        raise ArgumentError(f"from_mlx: a scale or a weight of {mode} is no number")
    wide = NUMBERS[8][scales].astype(np.float32) if mode == "nvfp4" else np.ldexp(np.float32(1), scales.astype(np.int32) - 127)
    upper = upper_half(np.ldexp(wide, -int(f.bits == 4)).astype(np.float32)).reshape(n, -1, *f.each[0])
    return _array_of(f.name, layout, _unpacked(codes) if f.bits == 4 else codes, BLOCK, upper, None)


def _host_array(x: Any, name: str) -> _Numbers:
    """As NumPy has it: arrays of torch and MLX, too, in bfloat16 and with a gradient to come. Raises DTypeError for what is no array."""
    if isinstance(x, np.ma.MaskedArray):
        raise DTypeError(f"{name} is a MaskedArray, whose mask would not count; pass its .filled(0) or .data")
    if isinstance(x, np.ndarray):
        return x
    if isinstance(x, Array):
        return np.asarray(x)
    if callable(detach := getattr(x, "detach", None)):  # torch's Parameter
        x = detach()
    try:
        if hasattr(x, "__dlpack__"):
            from .device import Device

            with Device("cpu", threads=1) as device:
                return np.array(device.array(x))
        return np.asarray(x)
    except (TypeError, ValueError) as error:
        raise DTypeError(f"{name} is {type(x).__name__}, of which NumPy makes no array: {error}") from error


def _types(*names: str) -> tuple[Any, ...]:
    found: list[Any] = [np.dtype(n) for n in names if n != "bfloat16"]
    if "bfloat16" in names:
        try:
            import ml_dtypes

            found.append(np.dtype(ml_dtypes.bfloat16))
        except ImportError:
            pass  # then nobody has an array of it
    return tuple(found)


def parts_of_storage(storage: str) -> tuple[str, int, str]:
    """Format, group and layout of what QuantizedArray.storage says."""
    form, *words = storage.split(":")
    group = next((int(w) for w in words if w.isdecimal()), _format(form).groups[0])
    return form, group, "canonical" if "canonical" in words else "nk"


def _format(name: str) -> Format:
    if not isinstance(name, str) or name not in FORMATS:
        raise UnsupportedError(f"format is {name!r}; it takes one of {', '.join(FORMATS)}")
    return FORMATS[name]


def _check_layout(layout: Any) -> None:
    if not isinstance(layout, str) or layout not in LAYOUTS:
        raise ArgumentError(f"layout is {layout!r}; it takes one of {', '.join(LAYOUTS)}")


def _check_group(f: Format, group: int) -> None:
    if not isinstance(group, (int, np.integer)) or group not in f.groups:
        raise UnsupportedError(f"group is {group!r}; format {f.name} takes {', '.join(map(str, sorted(f.groups)))}")


def _check(x: Any, name: str, shape: tuple[int, ...], kinds: tuple[Any, ...]) -> None:
    if not isinstance(x, (np.ndarray, Array)) or x.dtype not in kinds:
        what = x.dtype if isinstance(x, (np.ndarray, Array)) else type(x).__name__
        raise DTypeError(f"{name}: {what}; it takes an array of {' or '.join(np.dtype(k).name for k in kinds)}")
    if x.shape != shape:
        raise ShapeError(f"{name}: shape {x.shape}; it takes {shape}")


def _places(f: Format) -> _Numbers:
    """Where in their word the upper bits of values stand."""
    i: _Numbers = np.arange(BLOCK // f.upper, dtype="<u4")
    places: _Numbers = 4 * (i % 8) + f.upper * (i // 8)
    return places


def _unpacked(rows: _Numbers) -> _Numbers:
    return np.stack([rows & 15, rows >> 4], axis=-1).reshape(*rows.shape[:-1], -1)


def _array_of(name: str, layout: str, stored: _Numbers, group: int, scales: _Numbers, biases: _Numbers | None) -> QuantizedArray:
    """Of stored values [n, k], scales and biases [n, groups, ...]."""
    _check_layout(layout)
    f, (n, k) = FORMATS[name], stored.shape
    values = stored.astype(f.value_type)
    if f.upper:
        upper = np.pad(values >> 4, ((0, 0), (0, -k % BLOCK))).reshape(n, -1, f.upper, BLOCK // f.upper).astype("<u4") << _places(f)
        words = np.bitwise_or.reduce(upper, axis=3)
        scales, values = np.concatenate([scales[..., :2], np.zeros_like(scales[..., :2]), words.view(np.int8)], axis=2), values & 15
    if layout == "canonical":
        values = np.pad(values, ((0, 0), (0, -k % BLOCK)))
    if f.bits == 4:
        values = np.pad(values, ((0, 0), (0, values.shape[1] % 2)))
        values = values[:, ::2] | values[:, 1::2] << 4
    if layout == "canonical":
        values = values.reshape(n, -1, BLOCK * f.bits // 8).transpose(1, 0, 2)
        scales, biases = scales.swapaxes(0, 1), None if biases is None else biases.swapaxes(0, 1)
    parts = [None if x is None else np.ascontiguousarray(x) for x in (values, scales, biases)]
    assert parts[0] is not None and parts[1] is not None
    return QuantizedArray(name, layout, (n, k), group, parts[0], parts[1], parts[2])
