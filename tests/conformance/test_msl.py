"""Conformance of MSL on the CPU device: small .metal files, a feature each, against NumPy; with every compiler."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

import metalmm
import numpy as np
import pytest
from support.here import DEVICE, REAL_GPU

HERE = Path(__file__).parent / "msl"
pytestmark = pytest.mark.usefixtures("each_compiler")
N = 64
not_known_of_apple = pytest.mark.xfail(
    REAL_GPU and DEVICE == "metal", strict=False, reason="how Apple's compiler rounds and gathers lanes is not known yet"
)


def u32(x: int) -> bytes:
    return np.uint32(x).tobytes()


def run(
    device: metalmm.Device,
    file: str,
    kernel: str,
    *args: Any,
    groups: Any = (1,),
    threads: Any = (1,),
    constants: Any = None,
    memory: Any = None,
) -> None:
    k = device.compile(HERE / file).kernel(kernel, constants=constants)
    k(*args, grid=groups, threadgroup=threads, threadgroup_memory=memory)


def test_swizzles(device: metalmm.Device) -> None:
    v = np.array([1.5, -2.0, 3.25, 7.0], np.float32)
    y = np.zeros((8, 4), np.float32)
    run(device, "vectors.metal", "swizzles", v, y)
    a, b, c, d = v
    expected = [
        [d, c, b, a],
        [a, a, b, b],
        [a, b, 2 * c, 2 * d],
        [b, b, d, d + 1],
        [b, a, 3 * c, 4 * d],
        [a, c, b, a],
        [1, 1, c, d],
        [d, c, a * c + b * d, a * a + b * b + c * c],
    ]
    np.testing.assert_array_equal(y, np.array(expected, np.float32))


def rounded_once(a: np.float16, b: np.float16, c: np.float16) -> float:
    """a * b + c of finite halfs, as a half."""
    exact = Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c))
    if abs(exact) >= 65520:
        return float("inf") if exact > 0 else float("-inf")
    near = np.float16(float(exact))  # rounded twice: one of two neighbours
    beside = [near, np.nextafter(near, np.float16(np.inf)), np.nextafter(near, np.float16(-np.inf))]
    return float(min((x for x in beside if np.isfinite(x)), key=lambda x: (abs(Fraction(float(x)) - exact), int(x.view(np.uint16)) & 1)))


def test_halfs_in_pairs_round_once(device: metalmm.Device) -> None:
    """A GPU may take two at once."""
    rng = np.random.default_rng(5)
    special = np.array(
        [0, 0x8000, 1, 0x8001, 0x3FF, 0x400, 0x3C00, 0x3C01, 0xBC00, 0x6400, 0x7BFF, 0xFBFF, 0x7C00, 0xFC00, 0x7E00], np.uint16
    )
    grid = np.array(np.meshgrid(special, special, special)).reshape(3, -1)
    near = rng.integers(0x3000, 0x4800, (3, 1000), dtype=np.uint16) | rng.integers(0, 2, (3, 1000), dtype=np.uint16) << 15
    a, b, c = np.concatenate([grid, rng.integers(0, 1 << 16, (3, 2001), dtype=np.uint16), near], axis=1).view(np.float16)
    out = [np.zeros_like(a) for _ in range(4)]
    run(device, "pairs.metal", "pairs", a, b, c, *out, groups=(a.size // 2,))
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(out[0], a + b)
        np.testing.assert_array_equal(out[1], a - b)
        np.testing.assert_array_equal(out[2], a * b)
        finite = np.isfinite(a) & np.isfinite(b) & np.isfinite(c)
        np.testing.assert_array_equal(out[3][~finite], (a.astype(np.float32) * b + c)[~finite].astype(np.float16))
        expected = [rounded_once(*x) for x in zip(a[finite], b[finite], c[finite], strict=True)]
    np.testing.assert_array_equal(out[3][finite], np.array(expected, np.float16))


def test_vector_arithmetic(device: metalmm.Device) -> None:
    x = np.array([9, -7, 3, 0], np.int32)
    f = np.array([[1.5, 2.0], [-0.5, 4.0]], np.float32)
    y, g = np.zeros((6, 4), np.int32), np.zeros((3, 2), np.float32)
    run(device, "vectors.metal", "arithmetic", x, y, f, g)
    toward_zero = np.trunc(x / 3).astype(np.int32)
    np.testing.assert_array_equal(y[0], (x + 3) * x - 7)
    np.testing.assert_array_equal(y[1], toward_zero)
    np.testing.assert_array_equal(y[2], np.fmod(x, 5))
    np.testing.assert_array_equal(y[3], ((x << 2) ^ (x >> 1)) | (np.array([1, 2, 4, 8]) & ~x))
    np.testing.assert_array_equal(y[4], np.where(x > 2, -x, x))
    np.testing.assert_array_equal(y[5], [4, -3, 1, 1])
    np.testing.assert_array_equal(g, [f[0] * 2 + f[1] / f[0], -f[0] + f[1][0], f[0]])


def test_packed_vectors(device: metalmm.Device) -> None:
    """In debug mode, too, which refuses an index past an element's array."""
    for each in (device, *([metalmm.Device("cpu", debug=True)] if DEVICE == "cpu" else [])):
        x = np.arange(6, dtype=np.float16)
        y, z = np.zeros((3, 3), np.float32), np.zeros(4, np.float16)
        run(each, "vectors.metal", "packed", x, y, z)
        np.testing.assert_array_equal(y, [[3, 4, 5], [4, 5, 6], [6, 5, 4]])
        np.testing.assert_array_equal(z, [0, 1, 2, 1])


@not_known_of_apple
def test_half_rounds_every_operation(device: metalmm.Device) -> None:
    rng = np.random.default_rng(1)
    x, y = (rng.standard_normal(4096).astype(np.float16) * np.float16(s) for s in (40, 3))
    special = np.array([0, -0.0, np.inf, -np.inf, np.nan, 65504, 6e-8, 6.1e-5, 2049, 0.5], np.float16)
    x[:100], y[:100] = np.repeat(special, 10), np.tile(special, 10)
    outs = [np.zeros_like(x) for _ in range(5)]
    run(device, "half.metal", "rounding", x, y, *outs, groups=(32,), threads=(128,))
    with np.errstate(all="ignore"):
        exact = x.astype(np.float64) * y.astype(np.float64) + np.float64(np.float16(0.333))
        expected = [x + y, x * y, x / y, exact.astype(np.float16), x * y + x]
    for out, ref in zip(outs, expected, strict=True):
        np.testing.assert_array_equal(out, ref)


def test_half_conversions(device: metalmm.Device) -> None:
    rng = np.random.default_rng(2)
    x = (rng.standard_normal(4096) * 10.0 ** rng.integers(-8, 6, 4096)).astype(np.float32)
    x[:6] = [65519.99, 65520, np.nan, np.inf, 2.98e-8, 1.0 + 2.0**-11]
    y, v, w = np.zeros(4096, np.float16), np.zeros((4, 4), np.float16), np.array([1.25, -2, 1e6, 0.1], np.float32)
    run(device, "half.metal", "conversions", x, y, v, w, groups=(32,), threads=(128,))
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(y, x.astype(np.float16))
        w16 = w.astype(np.float16)
    expected = [w16, w16 * np.float16(2) + np.float16(1), np.array([3, 1.5, 0, 2]), np.array([1, 65504, 2.0**-14, 1e-3])]
    np.testing.assert_array_equal(v, np.array(expected).astype(np.float16))


@not_known_of_apple
def test_math(device: metalmm.Device) -> None:
    x = np.random.default_rng(3).uniform(-4, 4, N).astype(np.float32)
    x[:2] = [0.5, -3.0]
    y = np.zeros((17, N), np.float32)
    run(device, "math.metal", "functions", x, y, u32(N), groups=(1,), threads=(N,))
    w = x.astype(np.float64)
    t = np.clip((w + 1) / 2, 0, 1)
    expected = [
        np.exp(w),
        np.log(abs(w) + 1),
        np.sin(w),
        np.sqrt(abs(w)),
        1 / np.sqrt(abs(w) + 1),
        np.tanh(w),
        np.floor(w) + np.ceil(w) * 2 + np.trunc(w) * 4 + np.rint(w) * 8,
        w - np.floor(w),
        np.clip(w, -1, 1) + np.clip(w, 0, 1) + np.sign(w),
        w + (2 - w) * 0.25 + (w >= 0.5) + t * t * (3 - 2 * t),
        w * w - w,
        abs(w) ** 1.5 + 2**w + np.log2(abs(w) + 1),
        np.minimum(w, 0.5) + np.maximum(w, 0) + np.clip(w, 0, 1),
        w,
        np.copysign(2.0, w) + np.fmod(w, np.float64(np.float32(0.7))),
        np.ones(N),
        4.0 + 8 * (w < 0),
    ]
    np.testing.assert_allclose(y, expected, rtol=2e-6, atol=2e-6)


@not_known_of_apple
def test_sines_and_cosines_of_half_turns_are_exact(device: metalmm.Device) -> None:
    """However many turns there are."""
    x = np.array([0.5, 1, 3, 4.5, -7, -8.5, 1e6 + 0.5, 2**22 - 0.5, 2**23 - 1, 2**24], np.float32)
    y = np.zeros((2, len(x)), np.float32)
    run(device, "math.metal", "turns", x, y, u32(len(x)), threads=(len(x),))
    quarters = (2 * x).astype(np.int64) % 4
    np.testing.assert_array_equal(y, [np.array([0, 1, 0, -1])[quarters], np.array([1, 0, -1, 0])[quarters]])


@not_known_of_apple
def test_geometry(device: metalmm.Device) -> None:
    x = np.array([[1, 2, 3, 0], [-2, 0.5, 4, 0]], np.float32)
    y = np.zeros((4, 4), np.float32)
    run(device, "math.metal", "geometry", x, y)
    a, b = x[0, :3].astype(np.float64), x[1, :3].astype(np.float64)
    n = b / np.linalg.norm(b)
    expected = [
        [*np.cross(a, b), a @ b],
        [*(a / np.linalg.norm(a)), np.linalg.norm(b)],
        [*(a - 2 * (a @ n) * n), np.linalg.norm(a - b)],
        [*(a if a @ b < 0 else -a), (a - b) @ (a - b)],
    ]
    np.testing.assert_allclose(y, expected, rtol=1e-6, atol=1e-6)


def test_integers(device: metalmm.Device) -> None:
    x = np.random.default_rng(4).integers(0, 2**32, N, dtype=np.uint32)
    x[:5] = [0, 1, 2**31, 2**32 - 1, 7]
    y = np.zeros((14, N), np.uint32)
    run(device, "math.metal", "integers", x, y, u32(N), threads=(N,))
    words = [int(v) for v in x]
    signed = [v - 2**32 if v >= 2**31 else v for v in words]
    reverse = [int(f"{v:032b}"[::-1], 2) for v in words]
    expected = [
        [v.bit_count() for v in words],
        [32 - v.bit_length() for v in words],
        [(v & -v).bit_length() - 1 if v else 32 for v in words],
        [(v << 7 | v >> 25) & 0xFFFFFFFF for v in words],
        reverse,
        [v >> 3 & 0x1FF for v in words],
        [(v & ~0x70) | 0x50 for v in words],
        [v * 0x9E3779B9 >> 32 for v in words],
        [min(v + 2**31, 2**32 - 1) for v in words],
        [max(v - 0x7FFFFFFF, -(2**31)) & 0xFFFFFFFF for v in signed],
        [abs(v - 1000) for v in words],
        [(v + 3) >> 1 for v in words],
        [16 - (v & 0xFFFF).bit_length() + (v & 0xFF).bit_count() for v in words],
        [abs(v) & 0xFFFFFFFF for v in signed],
    ]
    np.testing.assert_array_equal(y, np.array(expected, np.uint32))


def test_products_of_integers(device: metalmm.Device) -> None:
    """What wraps, what stops at the type's ends, and quotients and powers of floats beside them."""
    rng = np.random.default_rng(8)
    u = rng.integers(0, 2**32, (3, N), dtype=np.uint32) >> rng.integers(0, 32, (3, N), dtype=np.uint32)
    u[:, :4] = [[0, 1, 2**31, 2**32 - 1], [0, 2**32 - 1, 2**31, 2**32 - 1], [1, 1, 2**31, 2**32 - 1]]
    x = u.view(np.int32) * rng.choice(np.array([-1, 1], np.int32), (3, N))
    f = np.stack([rng.uniform(-4, 4, N), rng.uniform(0.5, 4, N)]).astype(np.float32)
    y, v, g = np.zeros((4, N), np.int32), np.zeros((2, N), np.uint32), np.zeros((2, N), np.float32)
    run(device, "math.metal", "products", x, y, u, v, f, g, u32(N), threads=(N,))
    (a, b, c), (d, e, h) = x.astype(object), u.astype(object)

    def wrapped(value: Any) -> Any:
        return (value + 2**31) % 2**32 - 2**31

    expected = [np.clip(a * b + c, -(2**31), 2**31 - 1), wrapped((a * b >> 32) + (c >> 1))]
    expected += [wrapped((a >> 8) * (b >> 8) + c), wrapped((a >> 8) * (b >> 8))]
    np.testing.assert_array_equal(y, np.array(expected, np.int64))
    np.testing.assert_array_equal(v, np.array([np.minimum(d * e + h, 2**32 - 1), (d >> 8) * (e >> 8) % 2**32], np.int64))
    w = f.astype(np.float64)
    np.testing.assert_allclose(g, [w[0] / w[1], abs(w[0]) ** w[1]], rtol=2e-6)


@not_known_of_apple
def test_refraction_is_snells(device: metalmm.Device) -> None:
    """Bent in the plane of both, by the sines' ratio; none where the angle is too flat."""
    x = np.array([[1, -2, 0.5, 0], [0.25, 1, -1, 0]], np.float32)
    eta = np.array([0.5, 0.9, 1.0, 1.1, 3.0], np.float32)
    y = np.zeros((len(eta), 4), np.float32)
    run(device, "math.metal", "refracted", x, eta, y, threads=(len(eta),))
    i, n = (v[:3] / np.linalg.norm(v[:3]) for v in x.astype(np.float64))
    np.testing.assert_array_equal(y[-1], 0)
    for bent, ratio in zip(y[:-1, :3], eta, strict=False):
        np.testing.assert_allclose(np.cross(bent, n), ratio * np.cross(i, n), atol=2e-6)
        np.testing.assert_allclose([bent @ bent, np.sign(bent @ n)], [1, np.sign(i @ n)], atol=2e-6)


@pytest.mark.parametrize("doubled", [False, True])
@pytest.mark.parametrize("scale", [None, 2.5])
def test_address_spaces_and_function_constants(device: metalmm.Device, doubled: bool, scale: float | None) -> None:
    x = np.random.default_rng(7).integers(-8, 9, 128).astype(np.float32)
    y, extra = np.zeros(128, np.float32), np.array([17], np.float32)
    params = np.array([(5, 0.25)], [("n", np.uint32), ("offset", np.float32)]).tobytes()
    constants: dict[Any, Any] = {0: doubled, "shift": 3}
    if scale is not None:
        constants[2] = scale
    arguments = (x, y, params, extra) if doubled else (x, y, params)
    run(device, "language.metal", "spaces", *arguments, groups=(2,), threads=(64,), constants=constants, memory={0: 256})
    groups = x.reshape(2, 64)
    total = groups.sum(1) + x[0] + 2 * groups[:, 32] + 3 + (17 if doubled else 0)
    expected = total[:, None] * (scale or 1) + np.arange(63, -1, -1) + 4.25 + 0.25 + 8
    np.testing.assert_array_equal(y.reshape(2, 64), expected.astype(np.float32))


@pytest.mark.parametrize(
    ("name", "dtype", "n", "is_reversed"),
    [("copy_half_32", "f2", 32, False), ("copy_reversed", "f4", 16, True), ("copy_int_8", "i4", 8, True)],
)
def test_instantiations(device: metalmm.Device, name: str, dtype: str, n: int, is_reversed: bool) -> None:
    kernel = device.compile(HERE / "language.metal").kernel(name, constants={"doubled": False, "shift": 0})
    assert kernel.max_total_threads_per_threadgroup == 2 * n
    x = np.arange(n).astype(dtype)
    y = np.zeros_like(x)
    kernel(x, y, grid=(1,), threadgroup=(n,))
    np.testing.assert_array_equal(y, x[::-1] if is_reversed else x)


def test_positions(device: metalmm.Device) -> None:
    groups, threads = (2, 3, 2), (5, 4, 3)
    sizes = [g * t for g, t in zip(groups, threads, strict=True)]
    y = np.zeros((*sizes[::-1], 12), np.uint32)
    run(device, "language.metal", "positions", y, groups=groups, threads=threads)
    z, yy, x = np.meshgrid(*(np.arange(s) for s in sizes[::-1]), indexing="ij")
    tx, ty, tz = x % 5, yy % 4, z % 3
    i = (tz * 4 + ty) * 5 + tx
    expected = [
        x,
        yy,
        z,
        tx,
        ty,
        x // 5 + 10 * (yy // 4) + 100 * (z // 3),
        504 + 0 * x,
        2 + 0 * x,
        i,
        i % 32 + 100 * (i // 32),
        232 + 0 * x,
        i // 4,
    ]
    np.testing.assert_array_equal(y, np.stack(expected, axis=-1))


def test_spellings_that_public_kernels_use(device: metalmm.Device) -> None:
    x, y = np.array([1, 2, 3, 4], np.float32), np.zeros(20, np.float32)
    run(device, "language.metal", "spellings", x, y, constants={"doubled": False})
    # v becomes (3, 4, 6, 8)
    expected = [1, 3, 3, 6, -4, 6, 3, 5, 2, 8, 2, 4, 4, 3, 3, 2, 0, 1, 1, 6]
    np.testing.assert_array_equal(y, np.array(expected, np.float32))
