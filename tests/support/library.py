"""The tables of MSL's functions: <metal_math>, <metal_common>, <metal_relational>, <metal_integer>, <metal_pack>."""

from __future__ import annotations

from typing import Any

import numpy as np

from .functions import UNSIGNED, Function, bits, unsigned
from .msl import FLOATS, INTEGERS


def one(names: str, ulps: float = 0.0, least: float = -1e3, most: float = 1e3, **more: Any) -> list[Function]:
    """Functions of one operand that NumPy has under a name like it."""
    return [Function(name, f"auto r = {name}(x);", getattr(np, numpys or name), ulps, least, most, **more)
            for name, _, numpys in (word.partition("=") for word in names.split())]  # fmt: skip


def sinpi(x: Any) -> Any:
    """Exact at multiples of a half."""
    r = x - 2 * np.rint(x / 2)
    return np.sin(np.pi * np.where(r > 0.5, 1 - r, np.where(r < -0.5, -1 - r, r)))


def cospi(x: Any) -> Any:
    return sinpi(np.abs(x) + 0.5)


def next_to(x: Any, y: Any, kind: str) -> Any:
    return np.nextafter(np.asarray(x, FLOATS[kind]), np.asarray(y, FLOATS[kind])).astype(np.float64)


def rounded(x: Any) -> Any:
    return np.copysign(np.floor(np.abs(x) + 0.5), x)


OF_FLOATS = [
    *one("acos=arccos asin=arcsin atanh=arctanh", 5, -1, 1), *one("acosh=arccosh", 5, 1, 1e4), *one("asinh=arcsinh atan=arctan", 5),
    *one("ceil floor trunc rint fabs", is_exact=True), *one("cos sin", 4, -50, 50), *one("tan", 6, -50, 50), *one("cosh sinh exp exp2", 5, -10, 10),
    *one("tanh", 5, -5, 5), *one("log log2 log10", 4, 1e-3, 1e4), *one("sqrt", 0, 0, 1e4), *one("isnan isinf isfinite", result="bool"), *one("signbit", result="bool", first="bfloat"),
    Function("abs", "auto r = abs(x);", np.abs, is_exact=True), Function("sign", "auto r = sign(x);", lambda x: np.where(np.isnan(x), 0, np.sign(x))),
    Function("exp10", "auto r = exp10(x);", lambda x: 10.0**x, 5, -4, 4),
    Function("rsqrt", "auto r = rsqrt(x);", lambda x: 1 / np.sqrt(x), 2, 1e-3, 1e4, is_finite=True),
    Function("isnormal", "auto r = isnormal(x);", lambda x, kind: np.isfinite(x) & (np.abs(x) >= (2.0**-14 if kind == "half" else 2.0**-126)), result="bool", of_type=True),
    Function("round", "auto r = round(x);", rounded, is_exact=True),
    Function("sinpi", "auto r = sinpi(x);", sinpi, 4, -20, 20, is_finite=True, first="half"),
    Function("cospi", "auto r = cospi(x);", cospi, 4, -20, 20, is_finite=True, first="half"),
    Function("tanpi", "auto r = tanpi(x);", lambda x: sinpi(x) / cospi(x), 6, -0.45, 0.45, is_finite=True, first="half"),
    Function("saturate", "auto r = saturate(x);", lambda x: np.where(np.isnan(x), 0, np.clip(x, 0, 1)), 0, -2, 2),
    Function("fract", "auto r = fract(x);", lambda x, kind: np.minimum(x - np.floor(x), next_to(1.0, 0.0, kind)), is_finite=True, of_type=True, first="bfloat"),
    Function("atan2", "auto r = atan2(x, y);", np.arctan2, 6), Function("copysign", "auto r = copysign(x, y);", np.copysign, is_exact=True),
    Function("fdim", "auto r = fdim(x, y);", lambda x, y: np.where(x > y, x - y, np.where(np.isnan(x) | np.isnan(y), np.nan, 0)), 0.5),
    Function("fmin", "auto r = fmin(x, y);", np.fmin), Function("fmax", "auto r = fmax(x, y);", np.fmax),
    Function("min", "auto r = min(x, y);", np.fmin), Function("max", "auto r = max(x, y);", np.fmax),
    Function("fmod", "auto r = fmod(x, y);", np.fmod, is_finite=True), Function("divide", "auto r = divide(x, y);", lambda x, y: x / y, 0.5),
    Function("fast::divide", "auto r = fast::divide(x, y);", lambda x, y: x / y, 2.5, 1e-3, 1e3, is_finite=True, kinds=("float",)),
    Function("pow", "auto r = pow(x, y);", np.power, 16, 0.1, 4), Function("powr", "auto r = powr(x, y);", np.power, 16, 0.1, 4, is_finite=True),
    Function("step", "auto r = step(x, y);", lambda x, y: np.where(y < x, 0.0, 1.0), is_finite=True),
    Function("ldexp", "auto r = ldexp(x, I(y));", lambda x, y: np.ldexp(x, y.astype(int)), 0.5, -6, 6, is_finite=True),
    Function("nextafter", "auto r = nextafter(x, y);", next_to, 0, -4, 4, of_type=True, first="bfloat"),
    Function("isordered", "auto r = isordered(x, y);", lambda x, y: ~(np.isnan(x) | np.isnan(y)), result="bool"),
    Function("isunordered", "auto r = isunordered(x, y);", lambda x, y: np.isnan(x) | np.isnan(y), result="bool"),
    Function("fma", "auto r = fma(x, y, z);", lambda x, y, z: x * y + z, 0.5, -8, 8),
    Function("mix", "auto r = mix(x, y, V(0.25f));", lambda x, y: x + (y - x) * 0.25, 4, 1, 8, is_finite=True),
    Function("clamp", "auto r = clamp(x, V(-1.5f), V(2.0f));", lambda x: np.fmin(np.fmax(x, -1.5), 2.0), 0, -4, 4),
    Function("smoothstep", "auto r = smoothstep(V(-1.0f), V(1.0f), x);", lambda x: (t := np.clip((x + 1) / 2, 0, 1)) ** 2 * (3 - 2 * t), 4, -2, 2, is_finite=True),
    *(Function(name, f"auto r = {name}(x, y, z);", value, is_finite=True) for name, value in {
        "fmin3": lambda x, y, z: np.fmin(np.fmin(x, y), z), "fmax3": lambda x, y, z: np.fmax(np.fmax(x, y), z),
        "min3": lambda x, y, z: np.fmin(np.fmin(x, y), z), "max3": lambda x, y, z: np.fmax(np.fmax(x, y), z),
        "fmedian3": lambda x, y, z: np.median([x, y, z], axis=0), "median3": lambda x, y, z: np.median([x, y, z], axis=0)}.items()),
    Function("select", "auto r = select(x, y, x < y);", np.fmax, is_finite=True),
    Function("frexp", "I e; auto r = frexp(x, e);", lambda x: np.frexp(x)[0]),
    Function("frexp's exponent", "I r; frexp(x, r);", lambda x: np.frexp(x)[1], result="int", is_finite=True),
    Function("ilogb", "auto r = ilogb(x);", lambda x: np.floor(np.log2(x)), 0, 0.1, 1e3, result="int", is_finite=True, first="half"),
    Function("modf", "V w; auto r = modf(x, w);", lambda x: np.copysign(np.modf(x)[0], x), is_exact=True),
    Function("modf's whole", "V r; modf(x, r);", lambda x: np.modf(x)[1]),
    Function("sincos", "V c; auto r = sincos(x, c);", np.sin, 4, -50, 50), Function("sincos's cosine", "V r; sincos(x, r);", np.cos, 4, -50, 50),
]  # fmt: skip


def saturated(x: int, kind: str) -> int:
    info = np.iinfo(INTEGERS[kind])
    return min(max(x, int(info.min)), int(info.max))


def extracted(x: int, kind: str) -> int:
    found = unsigned(x, kind) >> 2 & 15
    return found - 16 if kind in UNSIGNED and found & 8 else found


def reversed_bits(x: int, kind: str) -> int:
    return int(f"{unsigned(x, kind):0{bits(kind)}b}"[::-1], 2)


def rotated(x: int, y: int, kind: str) -> int:
    n = y % bits(kind)
    return unsigned(x, kind) << n | unsigned(x, kind) >> (bits(kind) - n)


OF_INTEGERS = [
    *(Function(name, f"auto r = {name}({operands});", value, result="U" if name == "absdiff" else "T", first="ulong" if name == "madsat" else "short" if name in ("madhi", "absdiff") else "", is_small=name == "madhi") for operands, functions in {
        "x": {
            "abs": lambda x, kind: abs(x), "popcount": lambda x, kind: unsigned(x, kind).bit_count(),
            "clz": lambda x, kind: bits(kind) - unsigned(x, kind).bit_length(), "reverse_bits": reversed_bits,
            "ctz": lambda x, kind: bits(kind) if x == 0 else (x & -x).bit_length() - 1,
        },
        "x, 2u, 4u": {"extract_bits": extracted},
        "x, y": {
            "absdiff": lambda x, y, kind: abs(x - y), "addsat": lambda x, y, kind: saturated(x + y, kind),
            "subsat": lambda x, y, kind: saturated(x - y, kind), "hadd": lambda x, y, kind: (x + y) >> 1,
            "rhadd": lambda x, y, kind: (x + y + 1) >> 1, "mulhi": lambda x, y, kind: x * y >> bits(kind),
            "min": lambda x, y, kind: min(x, y), "max": lambda x, y, kind: max(x, y), "rotate": rotated,
        },
        "x, y, 3u, 4u": {"insert_bits": lambda x, y, kind: unsigned(x, kind) & ~(15 << 3) | (y & 15) << 3},
        "x, y, z": {
            "madsat": lambda x, y, z, kind: saturated(x * y + z, kind), "madhi": lambda x, y, z, kind: (x * y >> bits(kind)) + z,
            "min3": lambda x, y, z, kind: min(x, y, z), "max3": lambda x, y, z, kind: max(x, y, z),
            "median3": lambda x, y, z, kind: sorted((x, y, z))[1],
        },
        "x, min(y, z), max(y, z)": {"clamp": lambda x, y, z, kind: min(max(x, min(y, z)), max(y, z))},
    }.items() for name, value in functions.items()),
    Function("mul24", "auto r = mul24(x >> V(8), y >> V(8));", lambda x, y, kind: (x >> 8) * (y >> 8), kinds=("int", "uint")),
    Function("mad24", "auto r = mad24(x >> V(8), y >> V(8), z);", lambda x, y, z, kind: (x >> 8) * (y >> 8) + z, kinds=("int", "uint"), is_small=True),
]  # fmt: skip

# <metal_pack>: of each part its bits; of which kind.
PACKED = {
    "unorm4x8": ((8, 8, 8, 8), "unsigned"), "snorm4x8": ((8, 8, 8, 8), "signed"), "unorm2x16": ((16, 16), "unsigned"),
    "snorm2x16": ((16, 16), "signed"), "unorm10a2": ((10, 10, 10, 2), "unsigned"), "unorm4x8_srgb": ((8, 8, 8, 8), "srgb"),
}  # fmt: skip
