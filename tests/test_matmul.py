"""Every variant against the float64 bound: shapes on both sides of every threshold, each epilogue, batches, layouts."""

from __future__ import annotations

import functools
import os
from typing import Any

import metalmm
import numpy as np
import pytest
from conftest import REAL_GPU, allowed, count_case
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from metalmm import kernel_source, numerics

ONLY = os.environ.get("METALMM_TEST_VARIANTS", "").split()  # some ids; tests/mutants asks for those that a mutant touches
DENSE = [v for v in metalmm.variants() if v.storage == "dense" and v.weights == 1]  # the others: test_quantized_matmul.py
ALL = [v for v in DENSE if v.runs_on(metalmm.default_device()) and (not ONLY or v in ONLY)]
# (m, n, k): aligned, one off, primes, tiny, k below and above every tile, k = 16 to 151, and the user's own shapes.
M1 = [
    (1, 1, 1),
    (1, 64, 64),
    (1, 63, 65),
    (1, 65, 63),
    (1, 127, 129),
    (1, 128, 128),
    (1, 131, 257),
    (1, 256, 3),
    (1, 257, 16),
    (1, 5, 1031),
]
M1 += [(1, 64, 95), (1, 51, 64), (1, 17, 23), (1, 97, 37), (1, 40, 52), (1, 192, 80), (1, 33, 107), (1, 72, 151), (1, 896, 512)]
HOT = [(1, 896, 896), (1, 896, 4864), (1, 1152, 896), (1, 4096, 896)]  # of which n = 9728 and 151936 are cut
MANY = [(2, 33, 17), (3, 31, 16), (8, 32, 15), (17, 64, 48), (31, 1, 33), (32, 32, 16), (33, 65, 31), (64, 7, 100), (64, 128, 64), (129, 40, 9),
        (257, 19, 37), (40, 256, 192)]  # fmt: skip
FEW = [(m, n, k) for m in (2, 3, 5, 8) for n, k in ((1, 1), (64, 64), (67, 133), (131, 1031), (240, 96), (256, 512))]
SMALL_N = [(m, n, k) for m, k in [(1, 1), (1, 33), (2, 64), (7, 31), (8, 127), (9, 32), (65, 100), (257, 5)] for n in (1, 2, 4, 8, 16)]
EPILOGUES: dict[str, dict[str, Any]] = {
    "plain": {},
    "bias": {"bias": True},
    "alpha_beta": {"c": True, "alpha": 0.75, "beta": -1.5},
    "batch": {"batch": 14, "bias": True, "c": True, "alpha": 0.125, "beta": 0.5},
}


def shapes_of(v: metalmm.Variant, epilogue: str) -> list[tuple[int, int, int]]:
    if v == "gemv/smalln":
        return SMALL_N
    if v.family == "small_m":
        return FEW
    if v.supports.get("m") != 1:
        return [*M1, *MANY, *(HOT if v.enabled and epilogue == "bias" else [])]
    return [*M1, *(HOT if epilogue in ("plain", "bias") else [])]


def draw(rng: np.random.Generator, spec: metalmm.MatmulSpec, c: bool = False) -> tuple[Any, Any, dict[str, Any]]:
    lead = (spec.batch,) if spec.batch > 1 else ()

    def half(*size: int) -> Any:
        return rng.standard_normal(size, dtype=np.float32).astype(np.float16)

    a = half(*lead, *((spec.k, spec.m) if spec.transpose_a else (spec.m, spec.k)))
    b = half(*lead, *((spec.n, spec.k) if spec.transpose_b else (spec.k, spec.n)))
    options: dict[str, Any] = {"alpha": spec.alpha, "beta": spec.beta, "transpose_a": spec.transpose_a, "transpose_b": spec.transpose_b}
    if spec.bias:
        options["bias"] = half(spec.n)
    if c:
        options["c"] = half(*lead, spec.m, spec.n)
    return a, b, options


@functools.lru_cache(maxsize=512)
def case(spec: metalmm.MatmulSpec, c: bool) -> tuple[Any, Any, dict[str, Any], Any, Any]:
    """Inputs with their reference and bound: the same for every variant, since computing them in float64 costs most."""
    a, b, options = draw(np.random.default_rng(spec.n * 7919 + spec.k), spec, c)
    return a, b, options, *numerics.judged(a, b, **options)[:2]


def check(v: str, a: Any, b: Any, options: dict[str, Any], device: metalmm.Device, expected: tuple[Any, Any] | None = None) -> None:
    reference, bound = expected or numerics.judged(a, b, **options)[:2]
    out = np.full(reference.shape, np.nan, np.float16)
    assert metalmm.matmul(v, a, b, out=out, device=device, **options) is out
    bound = allowed(v, bound, reference, options)
    assert not (wrong := numerics.mismatch(out, reference, bound)), f"{v} {a.shape} {b.shape}: {wrong}"
    count_case()


@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize("v", ALL)
def test_variant_is_within_the_bound(v: metalmm.Variant, epilogue: str, device: metalmm.Device) -> None:
    wanted, checked = EPILOGUES[epilogue], 0
    for layout in v.supports["layouts"]:
        for m, n, k in shapes_of(v, epilogue):
            spec = metalmm.MatmulSpec(
                m=m, n=n, k=k, batch=wanted.get("batch", 1), transpose_a=layout[0] == "t", transpose_b=layout[1] == "t",
                bias=wanted.get("bias", False), alpha=wanted.get("alpha", 1.0), beta=wanted.get("beta", 0.0),
            )  # fmt: skip
            assert not v.lacks(spec), "the manifest says that this variant takes every epilogue, batch and size"
            a, b, options, reference, bound = case(spec, wanted.get("c", False))
            check(v, a, b, options, device, (reference, bound))
            checked += 1
    assert checked >= 19


@pytest.mark.parametrize("v", [v for v in ALL if v.supports.get("m") == 1])
def test_one_row_families_refuse_more_rows(v: metalmm.Variant, device: metalmm.Device) -> None:
    transpose_b = "nt" in v.supports["layouts"]
    a, b = np.ones((2, 9), np.float16), np.ones((9, 9), np.float16)
    with pytest.raises(metalmm.UnsupportedError, match=r"m=2 is not 1; supported by .*(gemm_tiled/baseline|small_m/)"):
        metalmm.matmul(v, a, b, transpose_b=transpose_b, device=device)


@pytest.mark.parametrize("v", ALL)
def test_other_layouts_are_refused(v: metalmm.Variant) -> None:
    for layout in ("nn", "nt", "tn", "tt"):
        m = 2 if v.family == "small_m" else 1
        spec = metalmm.MatmulSpec(m=m, n=4, k=8, transpose_a=layout[0] == "t", transpose_b=layout[1] == "t")
        assert (layout in v.supports["layouts"]) != ("layout" in v.lacks(spec))


@pytest.mark.parametrize("v", ALL)
def test_nan_and_inf_propagate(v: metalmm.Variant, device: metalmm.Device) -> None:
    rng = np.random.default_rng(3)
    layout = v.supports["layouts"][0]
    n = 16 if v == "gemv/smalln" else 67
    m = 2 if v.family == "small_m" else 1
    spec = metalmm.MatmulSpec(m=m, n=n, k=133, transpose_a=layout[0] == "t", transpose_b=layout[1] == "t", bias=True)
    a, b, options = draw(rng, spec)
    rows = b if spec.transpose_b else b.T  # (n, k)
    rows[3, 5], rows[4, 132], rows[9, 0], rows[n - 1, 131] = np.nan, np.inf, -np.inf, np.nan
    rows[7, 1], rows[7, 2] = np.inf, -np.inf
    options["bias"][1] = np.inf
    options["bias"][2] = np.nan
    check(v, a, b, options, device)
    a.flat[50] = np.inf
    check(v, a, b, options, device)


@pytest.mark.parametrize(
    "v",
    [
        "gemm_tiled/baseline",
        "m1_optimized/simd_tiled_4",
        "m1_optimized_v2/nt_bn64_col_vec4_bk64_tg128",
        "m1_optimized_v4/nt_bn8_largek_smalln_tg256",
    ],
)
def test_views_with_leading_dimensions_and_any_alignment(v: str, device: metalmm.Device) -> None:
    rng = np.random.default_rng(4)
    nt = (
        "nt" in metalmm.MatmulSpec(m=1, n=1, k=1, transpose_b=True).layout
        and "nt" in next(x for x in metalmm.variants() if x == v).supports["layouts"]
    )
    for k, n, pad, offset in [(64, 70, 0, 1), (96, 33, 3, 2), (130, 64, 1, 3), (61, 129, 4, 0)]:
        size = (n, k) if nt else (k, n)
        store = rng.standard_normal(size[0] * (size[1] + pad) + 8).astype(np.float16)
        b = np.lib.stride_tricks.as_strided(store[offset:], size, (2 * (size[1] + pad), 2))
        a = rng.standard_normal(k + 4).astype(np.float16)[offset : offset + k].reshape(1, k)
        check(v, a, b, {"transpose_b": nt}, device)


def test_shared_b_and_batched_b_agree(device: metalmm.Device) -> None:
    rng = np.random.default_rng(5)
    a, b = rng.standard_normal((5, 3, 40)).astype(np.float16), rng.standard_normal((40, 24)).astype(np.float16)
    shared = metalmm.matmul("gemm_tiled/baseline", a, b, device=device)
    batched = metalmm.matmul("gemm_tiled/baseline", a, np.broadcast_to(b, (5, 40, 24)).copy(), device=device)
    np.testing.assert_array_equal(shared, batched)
    check("gemm_tiled/baseline", a, b, {"c": rng.standard_normal((3, 24)).astype(np.float16), "beta": 2.0}, device)


def test_c_is_not_read_where_beta_is_zero(device: metalmm.Device) -> None:
    a, b = np.ones((1, 8), np.float16), np.ones((8, 8), np.float16)
    out = metalmm.matmul("gemv/baseline", a, b, c=np.full((1, 8), np.nan, np.float16), beta=0.0, device=device)
    np.testing.assert_array_equal(out, np.full((1, 8), 8))


def test_c_may_be_out(device: metalmm.Device) -> None:
    a, b = np.ones((1, 8), np.float16), np.ones((8, 8), np.float16)
    y = np.full((1, 8), 3, np.float16)
    metalmm.matmul("gemv/baseline", a, b, c=y, beta=1.0, out=y, device=device)
    np.testing.assert_array_equal(y, np.full((1, 8), 11))


def padded(data: st.DataObject, x: Any) -> Any:
    """The same numbers in rows further apart, from any address on."""
    pad, offset = data.draw(st.integers(0, 5)), data.draw(st.integers(0, 7))
    rows = x.shape[:-1]
    store = np.full(offset + int(np.prod(rows)) * (x.shape[-1] + pad), np.nan, np.float16)
    view = store[offset:].reshape(*rows, x.shape[-1] + pad)[..., : x.shape[-1]]
    view[...] = x
    return view


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_skewed_shapes_strides_and_special_values(data: st.DataObject, device: metalmm.Device) -> None:
    v = data.draw(st.sampled_from([v for v in ALL if not (REAL_GPU and v == "blas/baseline")]))  # cuBLAS overflows before it adds C
    layout = data.draw(st.sampled_from(v.supports["layouts"]))
    size = st.one_of(st.integers(1, 40), st.integers(41, 700))
    m = 1 if v.supports.get("m") == 1 else data.draw(st.integers(2, 8) if v.family == "small_m" else st.integers(1, 70))
    n = data.draw(st.sampled_from([1, 2, 4, 8, 16])) if v == "gemv/smalln" else data.draw(size)
    alphas = st.sampled_from([1.0, 0.125, -2.0, 0.0, 3.1e4])
    spec = metalmm.MatmulSpec(
        m=m, n=n, k=data.draw(size), batch=data.draw(st.integers(1, 3)), transpose_a=layout[0] == "t", transpose_b=layout[1] == "t",
        bias=data.draw(st.booleans()), alpha=data.draw(alphas), beta=data.draw(st.sampled_from([0.0, 1.0, 0.3])),
    )  # fmt: skip
    a, b, options = draw(np.random.default_rng(data.draw(st.integers(0, 99))), spec, spec.beta != 0)
    a, b = padded(data, a), padded(data, b)
    for x in (a, b, options.get("c"), options.get("bias")):
        for value in data.draw(st.lists(st.sampled_from([np.nan, np.inf, -np.inf, 65504.0, 6e-8]), max_size=2)) if x is not None else []:
            index = data.draw(st.integers(0, x.size - 1))
            x[np.unravel_index(index, x.shape)] = value
    with np.errstate(all="ignore"):
        check(v, a, b, options, device)


TEMPLATES = {(v.source.name, v.kernel): v for v in reversed(DENSE) if v.kernel and not v.library}


@pytest.mark.usefixtures("every_compiler")
def test_every_compiler_gives_right_results() -> None:
    """Every kernel template of every .metal file; the whole matrix above runs with the default compiler."""
    device, rng = metalmm.Device("cpu"), np.random.default_rng(6)
    assert {v.source.name for v in DENSE if v.kernel} == {name for name, _ in TEMPLATES} | {"mps_epilogue.metal"}
    for v in TEMPLATES.values():
        layout, m = v.supports["layouts"][0], 2 if v.family == "small_m" else 1
        n = 16 if v == "gemv/smalln" else 133
        spec = metalmm.MatmulSpec(m=m, n=n, k=300, transpose_a=layout[0] == "t", transpose_b=layout[1] == "t", bias=True)
        check(v, *draw(rng, spec), device)


@pytest.mark.usefixtures("every_compiler")
def test_every_compiler_gives_the_right_epilogue_of_mps() -> None:
    v = next(v for v in metalmm.variants() if v.source.name == "mps_epilogue.metal")
    kernel = metalmm.Device("cpu").compile(v.assemble(0)).kernel(kernel_source.host_name(v))
    rng, n = np.random.default_rng(7), 133
    ab, bias, out = rng.standard_normal(n).astype(np.float32), rng.standard_normal(n).astype(np.float16), np.zeros(n, np.float16)
    params = np.array([1, n, 4, 1, 4, n, 0, n, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0xFF], np.uint32)
    params[12:14] = np.array([0.5, 0.0], np.float32).view(np.uint32)
    kernel({0: ab, 2: out, 3: bias, 4: bias, 5: params}, grid=(-(-n // v.threads), 1, 1), threadgroup=v.threads)
    np.testing.assert_array_equal(out, (np.float32(0.5) * ab + bias.astype(np.float32)).astype(np.float16))


@pytest.mark.usefixtures("every_compiler")
def test_every_compiler_rounds_each_half_operation() -> None:
    """No a * b + c with one rounding, as the machine's own half arithmetic would have it; vectors too."""
    source = "#include <metal_stdlib>\nusing namespace metal;\nkernel void k(const device half* x, device half* y, uint i [[thread_position_in_grid]])"
    source += "{ y[i] = x[i] * x[i + 1] + x[i + 2]; half4 v = half4(x[i]) * half4(x[i + 1]) + half4(x[i + 2]); y[i + 512] = v.w; }"
    x = np.random.default_rng(8).standard_normal(514).astype(np.float16)
    y = np.zeros(1024, np.float16)
    metalmm.Device("cpu").compile(source).kernel("k")(x, y, grid=8, threadgroup=64)
    np.testing.assert_array_equal(y[:512], x[:512] * x[1:513] + x[2:514])
    np.testing.assert_array_equal(y[512:], y[:512])


def test_large_k(device: metalmm.Device) -> None:
    rng = np.random.default_rng(7)
    for v in ALL:
        if v.enabled and v != "gemv/smalln":
            layout, m = v.supports["layouts"][-1], 2 if v.family == "small_m" else 1
            spec = metalmm.MatmulSpec(m=m, n=40, k=4864, transpose_a=layout[0] == "t", transpose_b=layout[1] == "t")
            check(v, *draw(rng, spec), device)
