"""What a matmul should have given: a float64 reference, its error bound, and the figures that reports print."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from .errors import DTypeError
from .quantized import QuantizedArray

Float64 = npt.NDArray[np.float64]


# Of each type of operands: bits of the significand with the leading one, least and greatest exponent (IEEE 754; bfloat16 is the
# upper half of a float32).
_FORMATS = {"float16": (11, -14, 15), "bfloat16": (8, -126, 127), "float32": (24, -126, 127)}


def _array(x: Any) -> npt.NDArray[Any]:
    """An array of NumPy; of what DLPack alone can say, such as another library's bfloat16, by way of a device. Raises DTypeError."""
    try:
        found = np.asarray(x)
    except (TypeError, ValueError, RuntimeError, BufferError):  # of bfloat16 in torch's words and MLX's, of a GPU's memory; ragged lists
        found = np.asarray(None)
    if found.dtype.kind not in "OUSmM":
        return found
    if hasattr(x, "__dlpack__") and not isinstance(x, np.ndarray):
        from .device import default_device

        return default_device().array(x).numpy()
    raise DTypeError(f"an operand is {type(x).__name__}, of which NumPy makes no array of numbers")


def _type_of(x: Any) -> str:
    """The operand type that results for x are rounded to; float16 for what is none."""
    name = _array(x).dtype.name
    return name if name in _FORMATS else "float16"


def _wide(x: Any) -> Float64:
    if isinstance(x, QuantizedArray):
        return x.dequantize(np.float64)
    return _array(x).astype(np.float64, copy=False)


def _oriented(x: Any, transpose: bool) -> Float64:
    wide = _wide(x)
    return wide.swapaxes(-1, -2) if transpose or isinstance(x, QuantizedArray) else wide


def reference(
    a: Any,
    b: Any,
    *,
    bias: Any = None,
    c: Any = None,
    alpha: float = 1.0,
    beta: float = 0.0,
    transpose_a: bool = False,
    transpose_b: bool = False,
) -> Float64:
    """alpha * op(a) @ op(b) + beta * c + bias in float64; shapes as metalmm.matmul. c is not read where beta is 0; a QuantizedArray is
    dequantized in float64."""
    alpha, beta = float(np.float32(alpha)), float(np.float32(beta))
    with np.errstate(all="ignore"):
        out = alpha * (_oriented(a, transpose_a) @ _oriented(b, transpose_b))
        if c is not None and beta != 0.0:
            out = out + beta * _wide(c)
        return out if bias is None else out + _wide(bias)


def half_ulp(x: Float64, dtype: str = "float16") -> Float64:
    """Half a unit of `dtype` in the last place at the magnitude of x: the error of rounding to nearest."""
    bits, least, greatest = _FORMATS[dtype]
    with np.errstate(all="ignore"):
        exponent = np.floor(np.log2(np.maximum(np.abs(x), 2.0**least)))
    return 2.0 ** (np.clip(exponent, least, greatest) - bits)


def error_bound(
    a: Any,
    b: Any,
    *,
    bias: Any = None,
    c: Any = None,
    alpha: float = 1.0,
    beta: float = 0.0,
    transpose_a: bool = False,
    transpose_b: bool = False,
    statistical: bool = False,
) -> Float64:
    """What float32 accumulation and one rounding to the type of `a` may be off by, for each element.

    It is half an ulp of the reference in a's type plus K * 2^-24 * sum |a||b|. Types are float16, bfloat16 and float32; any other counts
    as float16. The second term is the standard bound of a float32 dot product in any order, the rounding of float32 products included.
    The terms of the epilogue (alpha, beta * c, bias) add three float32 roundings of what they sum.

    At large K that is more than a whole term. With `statistical` it is 4 * sqrt(K) in place of K, after Higham and Mary ("A New Approach
    to Probabilistic Rounding Error Analysis", 2019). That is seven standard deviations of a plain sum whose terms have one sign and whose
    roundings fall like coins. Roundings of few different values do not: rows of one constant were seen at ten times this bound. So a
    result beyond it is no proof of a mistake, and a reason to look for one. It is never more than the other bound.

    Of a QuantizedArray it is the bound of the dense product of its dequantized weights. With biases it has K + 1 in place of K, for the
    rounding of scale * q + bias. A global scale adds two roundings of what the epilogue sums. In any, K products below 2^-126, the least
    normal float32, may be zero.
    """
    options = {"bias": bias, "c": c, "alpha": alpha, "beta": beta, "transpose_a": transpose_a, "transpose_b": transpose_b}
    return judged(a, b, **options)[2 if statistical else 1]


def judged(
    a: Any,
    b: Any,
    *,
    bias: Any = None,
    c: Any = None,
    alpha: float = 1.0,
    beta: float = 0.0,
    transpose_a: bool = False,
    transpose_b: bool = False,
) -> tuple[Float64, Float64, Float64]:
    """The reference, error_bound and its statistical form, for the cost of two products in float64."""
    alpha, beta = float(np.float32(alpha)), float(np.float32(beta))
    left, right = _oriented(a, transpose_a), _oriented(b, transpose_b)
    ref = reference(left, right, bias=bias, c=c, alpha=alpha, beta=beta)
    k = _array(a).shape[-2 if transpose_a else -1] + (isinstance(b, QuantizedArray) and b.biases is not None)
    magnitude = np.abs(alpha) * (np.abs(left) @ np.abs(right))
    summed = magnitude + (np.abs(beta * _wide(c)) if c is not None and beta != 0.0 else 0.0)
    summed = summed + (np.abs(_wide(bias)) if bias is not None else 0.0)
    of_all = b.global_scale if isinstance(b, QuantizedArray) else 1.0
    factor, roundings = alpha * of_all, 3 + 2 * (of_all != 1)  # of each scale times it, and of alpha times it
    fixed = half_ulp(ref, _type_of(a)) + (roundings * 2.0**-24 * summed if (bias is not None or beta != 0.0 or factor != 1.0) else 0.0)
    fixed = fixed + abs(factor) * k * 2.0**-126
    return ref, fixed + k * 2.0**-24 * magnitude, fixed + min(k, 4.0 * np.sqrt(k)) * 2.0**-24 * magnitude


def mismatch(out: Any, ref: Float64, bound: Float64) -> str:
    """Empty, or where and by how much `out` misses `ref`. NaN and Inf must stand where the reference has them."""
    given = _array(out)
    bits, _, greatest = _FORMATS[_type_of(given)]
    largest = (2.0 - 2.0 ** (1 - bits)) * 2.0**greatest
    overflow = (2.0 - 2.0**-bits) * 2.0**greatest  # what rounds to infinity
    out = given.astype(np.float64)
    if out.shape != ref.shape:
        return f"shape {out.shape} instead of {ref.shape}"
    finite = np.isfinite(ref) & np.isfinite(bound)
    with np.errstate(all="ignore"):
        rounded = np.where(np.abs(ref) >= overflow, np.sign(ref) * np.inf, ref)
        # Within the bound of the largest number either side may overflow; where the bound is past the reference, to either end.
        edge = finite & (np.where(out > 0, ref, -ref) + bound >= overflow)
        good = np.where(finite, np.abs(out - ref) <= bound, (out == ref) | (np.isnan(out) & np.isnan(ref)))
        good |= edge & ((out == rounded) | (np.abs(out) >= largest))
    if good.all():
        return ""
    first = tuple(int(i) for i in np.argwhere(~good)[0])
    return (
        f"{int((~good).sum())} of {good.size} elements; first at {first}: {out[first]} instead of {ref[first]} (bound {bound[first]:.3g})"
    )


def max_abs_rel(out: Any, ref: Float64) -> tuple[float, float]:
    """max |out - ref| and max |out - ref| / max(1, |out|, |ref|); inf where NaN or Inf stands against a finite reference."""
    out = _array(out).astype(np.float64)
    with np.errstate(all="ignore"):
        difference = np.abs(out - ref)
        same = (out == ref) | (np.isnan(out) & np.isnan(ref))
        # np.max would drop no NaN, but a NaN in a report hides how wrong the rest is.
        difference = np.where(same, 0.0, np.where(np.isnan(difference), np.inf, difference))
        relative = difference / np.maximum(1.0, np.maximum(np.abs(out), np.abs(ref)))
    relative = np.where(same, 0.0, np.where(np.isnan(relative), np.inf, relative))
    return float(difference.max(initial=0.0)), float(relative.max(initial=0.0))


def judged_swiglu(a: Any, weights: Any, *, bias: Any = None) -> tuple[Float64, Float64]:
    """The reference of ``matmul_fused(..., activation="swiglu")``, silu(a w0 + b0) * (a w1 + b1), and what float32 may be off by.

    That is the errors of both sums through it (silu is nowhere steeper than 1.1). Sixteen float32 roundings for the exponential, the
    quotient and the product come on top, and half an ulp of the result. Of x below -88.7, exp(-x) is past float32. There silu(x) is -0,
    so that an infinite second product gives NaN.
    """
    dtype = _type_of(a)
    sums = []
    for i, w in enumerate(weights):
        ref, bound, _ = judged(a, w, bias=None if bias is None else bias[i], transpose_b=True)
        sums.append((ref, bound - half_ulp(ref, dtype)))  # it is not rounded to a's type
    (gate, of_gate), (up, of_up) = sums
    with np.errstate(all="ignore"):
        power = np.exp(-gate)
        silu = np.where(power > np.finfo(np.float32).max, gate * 0.0, gate / (1.0 + power))
        out = silu * up
        bound = 1.1 * of_gate * (np.abs(up) + of_up) + np.abs(silu) * of_up + 2.0**-20 * np.abs(out) + half_ulp(out, dtype)
    return out, bound
