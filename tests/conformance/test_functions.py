"""Every function of <metal_math>, <metal_common>, <metal_integer> and <metal_relational>: of each type and width its result's type and its
value. Values are NumPy's in float64, or Python's whole numbers; how far off one may be the specification says (8.1, in ulps)."""

from __future__ import annotations

from typing import Any

import metalmm
import numpy as np
import pytest
from metalmm import nvrtc
from metalmm.backends import cuda
from metalmm.kernel_source import KernelText
from support.functions import UNSIGNED, Function, bits, mistakes_of_floats, mistakes_of_integers, sample, source, unsigned
from support.here import ALL_OF_LANGUAGE, DEVICE
from support.msl import FLOATS, INTEGERS


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
    *one("ceil floor trunc rint fabs"), *one("cos sin", 4, -50, 50), *one("tan", 6, -50, 50), *one("cosh sinh exp exp2", 5, -10, 10),
    *one("tanh", 5, -5, 5), *one("log log2 log10", 4, 1e-3, 1e4), *one("sqrt", 0, 0, 1e4), *one("isnan isinf isfinite signbit", result="bool"),
    Function("abs", "auto r = abs(x);", np.abs), Function("sign", "auto r = sign(x);", lambda x: np.where(np.isnan(x), 0, np.sign(x))),
    Function("exp10", "auto r = exp10(x);", lambda x: 10.0**x, 5, -4, 4),
    Function("rsqrt", "auto r = rsqrt(x);", lambda x: 1 / np.sqrt(x), 2, 1e-3, 1e4, is_finite=True),
    Function("round", "auto r = round(x);", rounded),
    Function("sinpi", "auto r = sinpi(x);", sinpi, 4, -20, 20, is_finite=True),
    Function("cospi", "auto r = cospi(x);", cospi, 4, -20, 20, is_finite=True),
    Function("tanpi", "auto r = tanpi(x);", lambda x: sinpi(x) / cospi(x), 6, -0.45, 0.45, is_finite=True),
    Function("saturate", "auto r = saturate(x);", lambda x: np.where(np.isnan(x), 0, np.clip(x, 0, 1)), 0, -2, 2),
    Function("fract", "auto r = fract(x);", lambda x, kind: np.minimum(x - np.floor(x), next_to(1.0, 0.0, kind)), is_finite=True, of_type=True),
    Function("atan2", "auto r = atan2(x, y);", np.arctan2, 6), Function("copysign", "auto r = copysign(x, y);", np.copysign),
    Function("fdim", "auto r = fdim(x, y);", lambda x, y: np.where(x > y, x - y, np.where(np.isnan(x) | np.isnan(y), np.nan, 0)), 0.5),
    Function("fmin", "auto r = fmin(x, y);", np.fmin), Function("fmax", "auto r = fmax(x, y);", np.fmax),
    Function("min", "auto r = min(x, y);", np.fmin), Function("max", "auto r = max(x, y);", np.fmax),
    Function("fmod", "auto r = fmod(x, y);", np.fmod, is_finite=True), Function("divide", "auto r = divide(x, y);", lambda x, y: x / y, 0.5),
    Function("pow", "auto r = pow(x, y);", np.power, 16, 0.1, 4), Function("powr", "auto r = powr(x, y);", np.power, 16, 0.1, 4, is_finite=True),
    Function("step", "auto r = step(x, y);", lambda x, y: np.where(y < x, 0.0, 1.0), is_finite=True),
    Function("ldexp", "auto r = ldexp(x, I(y));", lambda x, y: np.ldexp(x, y.astype(int)), 0.5, -6, 6, is_finite=True),
    Function("nextafter", "auto r = nextafter(x, y);", next_to, 0, -4, 4, of_type=True),
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
    Function("ilogb", "auto r = ilogb(x);", lambda x: np.floor(np.log2(x)), 0, 0.1, 1e3, result="int", is_finite=True),
    Function("modf", "V w; auto r = modf(x, w);", lambda x: np.copysign(np.modf(x)[0], x)),
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
    *(Function(name, f"auto r = {name}({operands});", value, result="U" if name == "absdiff" else "T") for operands, functions in {
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
    Function("mul24", "auto r = mul24(x >> V(8), y >> V(8));", lambda x, y, kind: (x >> 8) * (y >> 8)),
    Function("mad24", "auto r = mad24(x >> V(8), y >> V(8), z);", lambda x, y, z, kind: (x >> 8) * (y >> 8) + z),
]  # fmt: skip


@pytest.mark.usefixtures("each_compiler")
@pytest.mark.parametrize("kind, functions", sample(OF_FLOATS, list(FLOATS)), ids=list(FLOATS))
def test_of_floats(kind: str, functions: list[Function], device: metalmm.Device, monkeypatch: pytest.MonkeyPatch) -> None:
    if kind == "bfloat":  # Apple's compiler has none of these, and a library's own are by way of float
        monkeypatch.setenv("METALMM_LINT", "0")
    assert mistakes_of_floats(functions, kind, device) == []


@pytest.mark.usefixtures("each_compiler")
@pytest.mark.parametrize("kind, functions", sample(OF_INTEGERS, list(INTEGERS)), ids=list(INTEGERS))
def test_of_integers(kind: str, functions: list[Function], device: metalmm.Device) -> None:
    assert mistakes_of_integers([f for f in functions if "24" not in f.name or kind in ("int", "uint")], kind, device) == []


# <metal_pack>: of each part its bits; of which kind.
PACKED = {
    "unorm4x8": ((8, 8, 8, 8), "unsigned"), "snorm4x8": ((8, 8, 8, 8), "signed"), "unorm2x16": ((16, 16), "unsigned"),
    "snorm2x16": ((16, 16), "signed"), "unorm10a2": ((10, 10, 10, 2), "unsigned"), "unorm4x8_srgb": ((8, 8, 8, 8), "srgb"),
}  # fmt: skip


def unpacked(word: int, bits: tuple[int, ...], form: str) -> list[float]:
    found, first = list[float](), 0
    for i, n in enumerate(bits):
        part, most = word >> first & (1 << n) - 1, (1 << n) - 1
        x = max((part - (part >> n - 1 << n)) / (most // 2), -1.0) if form == "signed" else part / most
        found.append((x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4) if form == "srgb" and i < 3 else x)
        first += n
    return found


@pytest.mark.usefixtures("each_compiler")
@pytest.mark.parametrize("kind", ["float", "half"])
def test_numbers_in_parts_of_a_word(kind: str, device: metalmm.Device) -> None:
    words = np.random.default_rng(1).integers(0, 1 << 32, 64, np.uint32)
    words[:6] = 0, 0xFFFFFFFF, 0x80808080, 0x7F7F7F7F, 0x80008000, 0x7FFF8001
    wild = np.array([-2, -1, -0.0, 0, 0.5, 1, 1.5, np.nan], FLOATS[kind])
    body, source = "", "#include <metal_stdlib>\nusing namespace metal;\n"
    for i, (name, (parts, form)) in enumerate(PACKED.items()):
        n, to = len(parts), "srgb_unorm4x8" if form == "srgb" else name
        body += f"{kind}{n} v{i} = unpack_{name}_to_{kind}(x[t]); for (uint j = 0; j < {n}; j++) y[({i} * 64 + t) * 4 + j] = v{i}[j];\n"
        body += f"z[{i} * 64 + t] = pack_{kind}_to_{to}(v{i}); if (t < 8) w[{i} * 8 + t] = pack_{kind}_to_{to}({kind}{n}(a[t]));\n"
    arguments = f"device const uint* x, device const {kind}* a, device {kind}* y, device uint* z, device uint* w"
    source += f"kernel void k({arguments}, uint t [[thread_position_in_grid]]) {{\n{body}}}\n"
    y, z, w = np.zeros((len(PACKED), 64, 4), FLOATS[kind]), np.zeros((len(PACKED), 64), np.uint32), np.zeros((len(PACKED), 8), np.uint32)
    device.compile(source).kernel("k")(words, wild, y, z, w, threads=64, threadgroup=64)
    for i, (name, (parts, form)) in enumerate(PACKED.items()):
        want = np.array([unpacked(int(word), parts, form) for word in words])
        np.testing.assert_allclose(
            y[i, :, : len(parts)].astype(np.float64), want, rtol=1e-3 if kind == "half" else 2e-6, atol=2e-7, err_msg=name
        )
        if kind == "float" or max(parts) < 10:  # and back; of two that mean -1 the greater comes
            again = np.array([unpacked(int(word), parts, form) for word in z[i]])
            np.testing.assert_allclose(again, want, rtol=1e-6, atol=1e-7, err_msg=name)
        ends = np.array([unpacked(int(word), parts, form) for word in w[i]])
        low = -1.0 if form == "signed" else 0.0
        for j, x in ((0, low), (1, low), (2, 0), (3, 0), (5, 1), (6, 1), (7, 0)):
            assert (ends[j] == x).all(), (name, wild[j], ends[j])
        assert np.abs(ends[4] - 0.5).max() <= (0.17 if 2 in parts else 0.01), (name, ends[4])


@pytest.mark.skipif(not ALL_OF_LANGUAGE or DEVICE != "cpu", reason="takes a minute")
@pytest.mark.parametrize("kind", [*FLOATS, *INTEGERS])
def test_nvrtc_takes_them(kind: str) -> None:
    """Without a GPU; NVRTC has no function of its own for some."""
    try:
        nvrtc.find()
    except metalmm.Error as error:
        pytest.skip(f"{error}: NOT compiled for NVIDIA's GPUs")
    functions = OF_FLOATS if kind in FLOATS else [f for f in OF_INTEGERS if "24" not in f.name or kind in ("int", "uint")]
    text = metalmm.compiler.preprocess(source(functions, kind), "functions.metal", for_metal=True)
    assert cuda.build(KernelText(text, "functions.metal", is_preprocessed=True), "k", {}, 90).read_bytes().startswith(b"\x7fELF")
