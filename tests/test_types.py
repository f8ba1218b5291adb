"""Operand types: every variant in each that it takes, the others refused with the manifest's reason; mixtures and conversions never."""

from __future__ import annotations

from typing import Any

import metalmm
import ml_dtypes
import numpy as np
import pytest
from conftest import DEVICE, count_case
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from metalmm import numerics
from test_matmul import ALL, TEMPLATES

DTYPES = {"float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16), "float32": np.dtype(np.float32)}
OTHERS = ("bfloat16", "float32")  # tests/test_matmul.py has float16


def draw(rng: np.random.Generator, spec: metalmm.MatmulSpec) -> tuple[Any, Any, dict[str, Any]]:
    lead = (spec.batch,) if spec.batch > 1 else ()

    def numbers(*size: int) -> Any:
        return rng.standard_normal(size, dtype=np.float32).astype(DTYPES[spec.dtype])

    a = numbers(*lead, *((spec.k, spec.m) if spec.transpose_a else (spec.m, spec.k)))
    b = numbers(*lead, *((spec.n, spec.k) if spec.transpose_b else (spec.k, spec.n)))
    options: dict[str, Any] = {"alpha": spec.alpha, "beta": spec.beta, "transpose_a": spec.transpose_a, "transpose_b": spec.transpose_b}
    if spec.bias:
        options["bias"] = numbers(spec.n)
    if spec.beta:
        options["c"] = numbers(*lead, spec.m, spec.n)
    return a, b, options


def check(v: str, a: Any, b: Any, options: dict[str, Any], device: metalmm.Device) -> None:
    reference, bound, _ = numerics.judged(a, b, **options)
    out = np.full(reference.shape, np.nan, a.dtype)
    assert metalmm.matmul(v, a, b, out=out, device=device, **options) is out
    assert not (wrong := numerics.mismatch(out, reference, bound)), f"{v} {a.dtype} {a.shape} {b.shape}: {wrong}"
    count_case()


def specs(v: metalmm.Variant, dtype: str) -> list[metalmm.MatmulSpec]:
    """A shape with an edge on every side and the whole epilogue, in a batch; and one of whole tiles, aligned."""
    m = 1 if v.supports.get("m") == 1 else 3
    found = []
    for layout in (v.supports["layouts"][0], v.supports["layouts"][-1]):
        transposes = {"transpose_a": layout[0] == "t", "transpose_b": layout[1] == "t"}
        n, whole = (8, 16) if v == "gemv/smalln" else (131, 256)
        found.append(metalmm.MatmulSpec(m, n, 77, 3, bias=True, alpha=0.75, beta=-1.5, dtype=dtype, **transposes))
        found.append(metalmm.MatmulSpec(m if m == 1 or v.family == "small_m" else 32, whole, 192, dtype=dtype, **transposes))
    return list(dict.fromkeys(found))


@pytest.mark.parametrize("dtype", OTHERS)
@pytest.mark.parametrize("v", ALL)
def test_each_variant_in_each_type(v: metalmm.Variant, dtype: str, device: metalmm.Device) -> None:
    rng = np.random.default_rng(11)
    for spec in specs(v, dtype):
        a, b, options = draw(rng, spec)
        if dtype in v.types:
            assert not v.lacks(spec)
            check(v, a, b, options, device)
        else:
            with pytest.raises(metalmm.UnsupportedError, match=f"{v}: it does not take {dtype}: .{{20,}}; supported by"):
                metalmm.matmul(v, a, b, device=device, **options)


def test_every_family_takes_every_type_but_what_a_library_lacks() -> None:
    known = metalmm.variants(device=metalmm.default_device())
    without = [v for v in known if v.without and v.kernel != "weight_tiles" and not v.params.get("mma")]
    assert {v.family for v in without} <= {"mps", "blas", "mlx", "m1_optimized_v2"}
    assert all(set(v.without) == ({"bfloat16"} if v.library else {"float32"}) for v in without)
    assert sum(not v.library for v in without) == 5, "four tiles of mlx and one of v2 need more than 32 KB in float32"
    halves = [v for v in known if v.kernel == "weight_tiles" or v.params.get("mma")]
    assert {v.types for v in halves} == {("float16",)}, "8 bits of an integer are exact in half, not in bfloat"


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_special_values_and_any_alignment(data: st.DataObject, device: metalmm.Device) -> None:
    v, dtype = data.draw(st.sampled_from(list(TEMPLATES.values()))), data.draw(st.sampled_from(OTHERS))
    layout = v.supports["layouts"][0]
    n = 16 if v == "gemv/smalln" else data.draw(st.integers(1, 300))
    m = 2 if v.family == "small_m" else 1
    spec = metalmm.MatmulSpec(m, n, data.draw(st.integers(1, 300)), 1, layout[0] == "t", layout[1] == "t", True, beta=0.5, dtype=dtype)
    a, b, options = draw(np.random.default_rng(data.draw(st.integers(0, 9))), spec)

    def moved(x: Any) -> Any:
        pad, offset = data.draw(st.integers(0, 5)), data.draw(st.integers(0, 7))
        store = np.full(offset + x.shape[0] * (x.shape[1] + pad), np.nan, x.dtype)
        view = store[offset:].reshape(x.shape[0], x.shape[1] + pad)[:, : x.shape[1]]
        view[...] = x
        return view

    a, b = moved(a), moved(b)
    for x in (a, b, options["c"], options["bias"]):  # 1e18: of two the product is still a float32
        for value in data.draw(st.lists(st.sampled_from([np.nan, np.inf, -np.inf, 1e18, 1e-30]), max_size=1)):
            x[np.unravel_index(data.draw(st.integers(0, x.size - 1)), x.shape)] = value
    with np.errstate(all="ignore"):
        check(v, a, b, options, device)


def test_float32_loses_nothing(device: metalmm.Device) -> None:
    """Whole numbers that no float16 and no bfloat16 holds."""
    rng = np.random.default_rng(2)
    for v in ALL:
        if "float32" not in v.types or not v.enabled or v == "gemv/smalln":
            continue
        layout, m = v.supports["layouts"][0], 2 if v.family == "small_m" else 1
        a, b = rng.integers(-999, 1000, (m, 15)).astype(np.float32), rng.integers(-999, 1000, (15, 40)).astype(np.float32)
        w = np.ascontiguousarray(b.T) if layout[1] == "t" else b
        x = np.ascontiguousarray(a.T) if layout[0] == "t" else a
        out = metalmm.matmul(v, x, w, transpose_a=layout[0] == "t", transpose_b=layout[1] == "t", device=device)
        assert out.dtype == np.float32
        np.testing.assert_array_equal(out, a.astype(np.float64) @ b.astype(np.float64), err_msg=v)


def test_a_mixture_is_refused_and_names_the_operand(device: metalmm.Device) -> None:
    arrays = {t: np.ones((1, 8), d) for t, d in DTYPES.items()}
    w = {t: np.ones((8, 8), d) for t, d in DTYPES.items()}
    for first in DTYPES:
        for other in DTYPES:
            if first == other:
                assert metalmm.matmul("gemv/baseline", arrays[first], w[first], device=device).dtype == DTYPES[first]
                continue
            with pytest.raises(metalmm.DTypeError, match=rf"b \(8, 8\) is {other} and a is {first}"):
                metalmm.matmul("gemv/baseline", arrays[first], w[other], device=device)
            with pytest.raises(metalmm.DTypeError, match=rf"c \(1, 8\) is {other} and a is {first}"):
                metalmm.matmul("gemv/baseline", arrays[first], w[first], c=arrays[other], beta=1.0, device=device)
            with pytest.raises(metalmm.DTypeError, match=rf"bias \(8,\) is {other}"):
                metalmm.matmul("gemv/baseline", arrays[first], w[first], bias=arrays[other][0], device=device)
            with pytest.raises(metalmm.DTypeError, match=rf"out \(1, 8\) is {other}"):
                metalmm.matmul("gemv/baseline", arrays[first], w[first], out=arrays[other].copy(), device=device)
    with pytest.raises(metalmm.DTypeError, match="is float64; it takes float16, bfloat16 or float32"):
        metalmm.matmul("gemv/baseline", np.ones((1, 8)), np.ones((8, 8)), device=device)


def test_overlaps_are_found_in_bytes(device: metalmm.Device) -> None:
    for dtype in DTYPES.values():
        store, b = np.ones(40, dtype), np.ones((12, 20), dtype)
        a = store[:12].reshape(1, 12)
        for first in (0, 5, 8, 11):
            with pytest.raises(metalmm.LayoutError, match=r"out .* overlaps a"):
                metalmm.matmul("gemv/baseline", a, b, out=store[first : first + 20].reshape(1, 20), device=device)
        assert (metalmm.matmul("gemv/baseline", a, b, out=store[12:32].reshape(1, 20), device=device) == 12).all()


def test_the_bound_is_that_of_the_type() -> None:
    """Half an ulp at 1 is 2^-11, 2^-8, 2^-24; a result one ulp further is a mistake, in each."""
    for dtype, half_ulp in (("float16", 2.0**-11), ("bfloat16", 2.0**-8), ("float32", 2.0**-24)):
        one = np.ones((1, 1), DTYPES[dtype])
        reference, bound, _ = numerics.judged(one, one)
        assert bound[0, 0] == half_ulp + 2.0**-24
        assert not numerics.mismatch(one, reference, bound)
        assert numerics.mismatch((one.astype(np.float64) * (1 + 4 * half_ulp)).astype(DTYPES[dtype]), reference, bound)
        largest = float(ml_dtypes.finfo(DTYPES[dtype]).max)
        with np.errstate(all="ignore"):
            infinite = np.full((1, 1), np.inf).astype(DTYPES[dtype])
        assert not numerics.mismatch(infinite, np.full((1, 1), largest * 1.01), np.full((1, 1), largest * 1e-9))
        assert numerics.mismatch(infinite, np.full((1, 1), largest * 0.9), np.full((1, 1), largest * 1e-9))


def test_the_spec_says_type_and_bytes() -> None:
    for dtype, size in (("float16", 2), ("bfloat16", 2), ("float32", 4)):
        spec = metalmm.MatmulSpec(3, 5, 7, 2, bias=True, beta=1.0, dtype=dtype)
        assert spec.dtype == dtype
        assert spec.least_bytes == size * (2 * (3 * 7 + 7 * 5 + 2 * 3 * 5) + 5)
        assert dtype == "float16" or dtype in repr(spec)
        assert spec != metalmm.MatmulSpec(3, 5, 7, 2, bias=True, beta=1.0, dtype="float32" if size == 2 else "float16")
    with pytest.raises(metalmm.DTypeError, match="operands of int8; they are float16, bfloat16 or float32"):
        metalmm.MatmulSpec(1, 1, 1, dtype="int8")


@pytest.mark.skipif(DEVICE != "cpu", reason="what a manifest says is the same everywhere")
def test_a_manifest_says_which_types_a_variant_lacks_and_why(tmp_path: Any) -> None:
    (tmp_path / "mine.metal").write_text("")
    base = """format = 2
[reasons]
slow = "nobody wants it"
[kernels.mine]
template = ["type", "threads"]
tile = [1, "threads * 2"]
supports = { layouts = ["nn"] }
[families.my]
kernel = "mine"
[families.my.variants]
one = { threads = 32, without = { bfloat16 = "slow", float32 = "in words" } }
"""
    (tmp_path / "my.toml").write_text(base)
    (one,) = metalmm.load_variants(tmp_path / "my.toml")
    assert (one.types, one.tile, one.without) == (("float16",), (1, 64), {"bfloat16": "nobody wants it", "float32": "in words"})
    for old, new, message in [
        ('without = { bfloat16 = "slow"', 'without = { int8 = "slow"', "without knows nothing of 'int8'"),
        ('float32 = "in words"', 'float32 = "x", float16 = "y"', "without names all types"),
        ('"threads * 2"', '"threads ** 2"', r"tile has 'threads \*\* 2'; it takes a number, a parameter"),
        ('"threads * 2"', '"thread"', "tile has 'thread'"),
        ('tile = [1, "threads * 2"]', 'tiles = [1, "threads * 2"]', r"kernels.mine: unknown key 'tiles'; did you mean 'tile'\?"),
        ("threads = 32", "thread = 32", r"my/one: unknown key 'thread'; did you mean 'threads'\?"),
        ('kernel = "mine"', 'kernel = "mind"', r"my/one: there is no table \[kernels.mind\]; did you mean 'mine'\?"),
        ('kernel = "mine"', 'kernel = "mine"\nwidth = 3', "family my: unknown key 'width'"),
        ("[families.my]", "[familie.my]", r"'familie' is no part of a manifest; did you mean 'families'\?"),
        ("[families.my]", "[[family]]\n[families.my]", r"\[\[family\]\] tables are of format = 1"),
        ('slow = "nobody wants it"', "slow = 3", "'without.bfloat16' is 'slow', of the wrong type"),
    ]:
        (tmp_path / "my.toml").write_text(base.replace(old, new))
        with pytest.raises(metalmm.ManifestError, match=message):
            metalmm.load_variants(tmp_path / "my.toml")
