"""Arrays, prepared calls, batches, custom variants: what the library promises besides right numbers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import metalmm
import numpy as np
import pytest
from metalmm import manifest
from metalmm.variant import LAYOUTS
from support.here import ARM, DEVICE, REAL_GPU, ROOT

V = "gemv/baseline"


@pytest.fixture
def arrays() -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    return rng.standard_normal((1, 40)).astype(np.float16), rng.standard_normal((40, 30)).astype(np.float16)


def test_numpy_in_numpy_out(arrays: Any) -> None:
    a, b = arrays
    out = metalmm.matmul(V, a, b)
    assert type(out) is np.ndarray
    assert out.dtype == np.float16
    assert out.shape == (1, 30)
    batched = metalmm.matmul(V, np.stack([a, a]), b)
    assert batched.shape == (2, 1, 30)
    np.testing.assert_array_equal(batched[1], out)


def test_device_arrays_in_device_array_out(arrays: Any, device: metalmm.Device) -> None:
    a, b = arrays
    da, db = device.array(a), device.array(b)
    out = metalmm.matmul(V, da, db)
    assert isinstance(out, metalmm.Array)
    assert (out.shape, out.dtype, out.ndim, out.nbytes, out.device) == ((1, 30), "float16", 2, 60, device)
    np.testing.assert_array_equal(np.asarray(out), metalmm.matmul(V, a, b))
    mixed = metalmm.matmul(V, a, db)
    assert isinstance(mixed, metalmm.Array)


@pytest.mark.needs("memory shared with the host")
def test_array_shares_memory_with_numpy_and_dlpack(device: metalmm.Device) -> None:
    source = np.arange(12, dtype=np.float32).reshape(3, 4)
    array = device.array(source[:, ::-1])  # any strides; a copy
    np.testing.assert_array_equal(np.asarray(array), source[:, ::-1])
    view = array.numpy()
    view[0, 0] = 100
    assert np.from_dlpack(array)[0, 0] == 100
    assert array.__dlpack_device__() == (1, 0)
    assert np.asarray(array, dtype=np.float64).dtype == np.float64
    assert np.array(array, copy=True).base is None
    with pytest.raises(ValueError, match="needs a copy"):
        np.asarray(array, dtype=np.float64, copy=False)
    del array  # the view keeps the memory
    assert view[0, 0] == 100
    assert device.empty((2, 3, 4), "int32").dtype == "int32"


def test_blas_sees_what_is_written_to_its_weights() -> None:
    cpu = metalmm.Device("cpu")
    a, w = np.ones((1, 4), np.float16), cpu.array(np.ones((4, 4), np.float16))
    assert (np.asarray(metalmm.matmul("blas/baseline", a, w, device=cpu)) == 4).all()
    w.numpy()[...] = 5
    assert (np.asarray(metalmm.matmul("blas/baseline", a, w, device=cpu)) == 20).all()
    metalmm.matmul("gemv/baseline", np.ones((1, 4), np.float16), np.eye(4, dtype=np.float16), out=(x := cpu.empty((1, 4))))
    assert (np.asarray(metalmm.matmul("blas/baseline", np.ones((1, 1), np.float16), x, device=cpu)) == 1).all()


def test_prepared_call_reads_its_arrays_each_time(arrays: Any, device: metalmm.Device) -> None:
    a, b = arrays
    x, y = a.copy(), np.zeros((1, 30), np.float16)
    call = device.prepare(V, x, device.array(b), out=y)
    assert call() is y
    np.testing.assert_array_equal(y, metalmm.matmul(V, a, b))
    x *= 2
    call()
    np.testing.assert_array_equal(y, metalmm.matmul(V, a * 2, b))
    assert call.variant == V
    assert call.device_seconds > 0


def test_batch_runs_in_order_and_reports_times_apart(arrays: Any, device: metalmm.Device) -> None:
    a, b = arrays
    square = np.eye(30, dtype=np.float16) * np.float16(2)
    with device.batch() as batch:
        y = batch.matmul(V, a, b)
        z = batch.matmul(V, y, square)  # reads what the one before writes
        prepared = device.prepare(V, a, b)
        assert batch.add(prepared) is prepared.out
        assert len(batch) == 3
    np.testing.assert_array_equal(z, 2 * y)
    np.testing.assert_array_equal(np.asarray(prepared.out), y)
    timing = batch.timing
    assert timing.encode > 0
    assert timing.commit >= 0
    assert timing.wait > 0
    assert timing.device is not None
    assert "encode=" in repr(timing)


def test_an_abandoned_batch_runs_nothing(arrays: Any, device: metalmm.Device) -> None:
    a, b = arrays
    y = np.zeros((1, 30), np.float16)
    with pytest.raises(ZeroDivisionError), device.batch() as batch:
        batch.matmul(V, a, b, out=y)
        raise ZeroDivisionError
    np.testing.assert_array_equal(y, 0)
    batch = device.batch()
    batch.submit()
    with pytest.raises(metalmm.ClosedError, match="submitted or recorded already"):
        batch.matmul(V, a, b, out=y)
    with pytest.raises(metalmm.ClosedError, match="submitted or recorded already"):
        batch.submit()
    batch.wait()
    with pytest.raises(metalmm.ClosedError, match="before submit"):
        device.batch().wait()


def test_a_batch_keeps_its_arrays_alive(device: metalmm.Device) -> None:
    batch = device.batch()
    outs = [batch.matmul(V, device.array(np.ones((1, 8), np.float16)), device.array(np.ones((8, 8), np.float16) * i)) for i in range(20)]
    batch.submit()
    batch.wait()
    for i, y in enumerate(outs):
        np.testing.assert_array_equal(np.asarray(y), np.full((1, 8), 8 * i))


def test_close(arrays: Any) -> None:
    a, b = arrays
    device = metalmm.Device(DEVICE)
    x, w = device.array(a), device.array(b)
    call, batch = device.prepare(V, x, w), device.batch()
    batch.matmul(V, x, w)
    view = x.numpy()
    device.close()
    device.close()
    for use in (
        lambda: device.array(a),
        lambda: metalmm.matmul(V, x, w),
        call,
        batch.wait,
        lambda: x.numpy(),
        lambda: device.batch(),
        lambda: device.name,
    ):
        with pytest.raises(metalmm.ClosedError, match="closed"):
            use()
    np.testing.assert_array_equal(view, a)


def test_variants_by_spec_family_and_state() -> None:
    spec = metalmm.MatmulSpec(m=1, n=896, k=896, transpose_b=True, bias=True)
    found = metalmm.variants(spec)
    assert "m1_optimized_v4/nt_bn4_largek_smalln_tg256" in found
    assert all("nt" in v.supports["layouts"] for v in found)
    assert {v.family for v in metalmm.variants(family="gemv")} == {"gemv"}
    assert not any(v.enabled for v in metalmm.variants(enabled=False))
    assert metalmm.variants(metalmm.MatmulSpec(m=3, n=4, k=5), device=metalmm.Device("cpu"), enabled=True)[:3] == [
        "gemv_nn/r8_w4_s4_tg128",
        "gemm/bm32_bn32_bk32",
        "gemm/bm16_bn32_bk128_wm1_wn1_wk4",
    ]
    with pytest.raises(metalmm.UnknownVariantError, match=r"no family 'gemw'; there are:.*gemv"):
        metalmm.variants(family="gemw")
    assert (spec.m, spec.n, spec.k, spec.batch, spec.layout, spec.bias) == (1, 896, 896, 1, "nt", True)
    assert repr(spec) == "MatmulSpec(m=1 n=896 k=896 batch=1 nt bias)"


def test_manifest_parameters_agree_with_names() -> None:
    """Tokens of a name count only when digits follow: tg64, but not tgread. Without one: bn128, tg128; `single`: all columns."""
    for v in metalmm.variants():
        if not v.family.startswith("m1_optimized_v"):
            continue
        tokens = dict(re.findall(r"(?:^|_)(bn|bk|tg)(\d+)", v.name))
        columns = 0 if "single" in v.name else int(tokens.get("bn", 128))
        assert v.tile == (1, columns), v
        assert v.threads == (columns if v.kernel == "gemv" else int(tokens.get("tg", 128))), v
        assert v.params["bn"] == columns, v
        if "bk" in tokens:
            assert v.params["bk"] == int(tokens["bk"]), v
        assert v.params.get("unroll", 0) == (16 if "unroll16" in v.name or "ultra" in v.name else v.params.get("unroll", 0))
        assert v.params.get("read", 0) == (1 if "sgbr" in v.name else 2 if "_vA" in v.name else 0), v


def test_tiles_of_mlx_are_those_of_their_names() -> None:
    tiles = {"baseline": (32, 32, 16, 2, 2), "m1_fast": (8, 128, 64, 1, 4), "bk64": (32, 32, 64, 2, 2), "nn_fast": (32, 64, 32, 2, 2),
             "nn_wide": (16, 128, 32, 1, 4), "nn_transposed": (32, 64, 32, 2, 2)}  # fmt: skip
    for v in metalmm.variants(family="mlx"):
        kind = next(key for key in tiles if v.name.startswith(key))
        assert tuple(v.params[p] for p in ("bm", "bn", "bk", "wm", "wn")) == tiles[kind], v
        assert v.supports["layouts"] == [
            {"baseline": "nt", "nn_transposed": "nt"}.get(v.name, v.name[-2:] if v.name[-2:] in LAYOUTS else "nn")
        ]


def each(pattern: str) -> set[str]:
    """a{1,2}b -> a1b, a2b"""
    found = re.search(r"\{([^}]*)\}", pattern)
    if not found:
        return {pattern}
    return set().union(*(each(pattern[: found.start()] + x + pattern[found.end() :]) for x in found[1].split(",")))


# Every id of the project's list that is not quantized, as the list writes them.
IDS = [
    "gemv/{baseline,smalln}", "gemm_tiled/baseline", "m1_optimized/simd_{basic,tiled_1,tiled_2,tiled_4}", "mps/baseline",
    "m1_optimized_v2/nt_bn{64,128}_col", "m1_optimized_v2/nt_bn{64,128}_col_bk{64,128}_tg128", "m1_optimized_v2/nt_bn{64,128}_col_bk64_tg64",
    "m1_optimized_v2/nt_bn{64,128}_col_vec4_bk{64,128}_tg128", "m1_optimized_v2/nt_bn{64,128}_col_bt_bk{64,128}_tg128",
    "m1_optimized_v2/nt_bn{64,128}_col_bt_bk64_tg64", "m1_optimized_v2/nt_bn{64,128}_row",
    "m1_optimized_v3/nt_bn{64,128,256}_col_vec4_sgbr_bk{64,128}_tg128", "m1_optimized_v3/nt_bn{64,128}_col_vec4_tgread_bk{64,128}_tg128",
    "m1_optimized_v3/nt_bn{64,128}_col_vec4_tgread_bk64_tg64", "m1_optimized_v3/nt_bn{64,128}_col_vec4_tgread_vA_bk{64,128}_tg128",
    "m1_optimized_v3/nt_bn{64,128}_col_vec4_tgread_vA_bk64_tg64", "m1_optimized_v3/nt_bn{64,128}_col_vec4_tgread_unroll16_bk{64,128}_tg128",
    "m1_optimized_v3/nt_bn{64,128}_col_vec4_tgread_vA_unroll16_bk{64,128}_tg128",
    "m1_optimized_v4/nt_bn256_col_vec4_tgread_bk{64,128}_tg128", "m1_optimized_v4/nt_tiny_bn{32,64}_tg64",
    "m1_optimized_v4/nt_bn{4,8,16}_largek_smalln_tg256", "m1_optimized_v4/nt_bn8_largek_smalln_tg128",
    "m1_optimized_v5/nt_ultra_tiny_{bn32,single}_tg32", "m1_optimized_v5/nt_bn{4,8,16}_largek_smalln_tg{256,512}",
    "mlx/{baseline,baseline_nn,nn_fast,nn_wide,nn_transposed}", "mlx/{m1_fast,bk64}_{nt,nn,tn,tt}",
]  # fmt: skip
ON_IN_V3 = {f"m1_optimized_v3/nt_bn{x}_tg128" for x in ("128_col_vec4_tgread_bk64", "128_col_vec4_tgread_bk128", "64_col_vec4_tgread_bk128",
                                                        "128_col_vec4_sgbr_bk64", "128_col_vec4_tgread_vA_bk64")}  # fmt: skip


def test_every_id_of_the_list_is_there() -> None:
    wanted = set().union(*(each(pattern) for pattern in IDS))
    assert len(wanted) == 83
    there = {str(v) for v in metalmm.variants()}
    assert wanted <= there
    points = {f"{s.family}/{p}" for s in manifest.strategies(manifest.BUILTIN) for p in s.points}
    assert {v for v in there - wanted - points if not v.startswith("my_")} == {"mps/matvec", "mps/ndarray", "blas/baseline"}
    assert len(points) <= 80
    page = (ROOT / "docs" / "variants.md").read_text()
    assert f"| points of our own strategies that ship | {len(points)} |" in page
    for s in manifest.strategies(manifest.BUILTIN):
        assert not s.points or f"| `{s.family}` | {len(s.points)} |" in page, s.family
    off = {str(v) for v in metalmm.variants(enabled=False)}
    assert off == {v for v in wanted if "_bt_" in v or v.endswith("_row")} | {v for v in wanted if "_v3/" in v} - ON_IN_V3
    assert all(v.reason for v in metalmm.variants(enabled=False))


MINE = """
#include <metal_stdlib>
#include "epilogue.h"
using namespace metal;
template <int TG>
kernel void plain(const device half* A [[buffer(0)]], const device half* B [[buffer(1)]], device half* D [[buffer(2)]],
                  const device half* C [[buffer(3)]], const device half* bias [[buffer(4)]], constant MatmulParams& p [[buffer(5)]],
                  uint3 at [[thread_position_in_grid]]) {
  if (at.x >= p.n || at.y >= p.m) return;
  float sum = 0.0f;
  for (uint k = 0; k < p.k; k++) sum += float(A[at.z * p.stride_a + at.y * p.lda + k]) * float(B[at.z * p.stride_b + k * p.ldb + at.x]);
  store_result(D, C, bias, p, at.z, at.y, at.x, SIGN * sum);
}
"""
MANIFEST = """
format = 2
[kernels.plain]
source = "mine.metal"
template = ["threads"]
tile = [1, 64]
supports = { layouts = ["nn"] }
[families.my_gemm.variants]
plain = { kernel = "plain", threads = 64 }
"""


def test_a_users_own_variant_takes_part(tmp_path: Path, device: metalmm.Device) -> None:
    (tmp_path / "my.toml").write_text(MANIFEST)
    (tmp_path / "mine.metal").write_text(MINE.replace("SIGN", "1.0f"))
    assert metalmm.load_variants(tmp_path / "my.toml") == ["my_gemm/plain"]
    rng = np.random.default_rng(1)
    a, b = rng.standard_normal((3, 5, 33)).astype(np.float16), rng.standard_normal((33, 70)).astype(np.float16)
    options = {"bias": rng.standard_normal(70).astype(np.float16), "alpha": 0.5}
    out = metalmm.matmul("my_gemm/plain", a, b, device=device, **options)
    assert (abs(out - metalmm.reference(a, b, **options)) <= metalmm.error_bound(a, b, **options)).all()
    assert "my_gemm/plain" in metalmm.variants(metalmm.MatmulSpec(m=5, n=70, k=33))
    # Edited and loaded again, the new text counts.
    (tmp_path / "mine.metal").write_text(MINE.replace("SIGN", "-1.0f"))
    metalmm.load_variants(tmp_path / "my.toml")
    np.testing.assert_array_equal(
        metalmm.matmul("my_gemm/plain", a, b, device=device), -metalmm.matmul("gemm_tiled/baseline", a, b, device=device) * 1
    )


@pytest.mark.skipif(DEVICE == "metal", reason="its reflection does not tell a reference from a pointer")
def test_threadgroup_memory_of_a_users_variant(tmp_path: Path, device: metalmm.Device) -> None:
    """A reference says how much it takes. A pointer does not: a matmul would give it one element."""
    a, b = np.ones((5, 33), np.float16), np.ones((33, 70), np.float16)
    for name, argument, use in (
        ("told", "threadgroup Own& own", "own.of[at.x % 64]"),
        ("untold", "threadgroup float* own", "own[at.x % 64]"),
    ):
        text = MINE.replace("SIGN", use).replace("template <int TG>", "struct Own { float of[64]; };\ntemplate <int TG>")
        text = text.replace("uint3 at [[", f"{argument} [[threadgroup(0)]], uint3 at [[").replace(
            "  if (at.x >=", f"  {use} = 1.0f;\n  if (at.x >="
        )
        (tmp_path / f"{name}.metal").write_text(text)
        (tmp_path / f"{name}.toml").write_text(MANIFEST.replace("mine.metal", f"{name}.metal").replace("my_gemm", f"my_{name}"))
        metalmm.load_variants(tmp_path / f"{name}.toml")
    np.testing.assert_array_equal(metalmm.matmul("my_told/plain", a, b, device=device), np.full((5, 70), 33))
    assert metalmm._core._describe(device, "my_told/plain", metalmm.MatmulSpec(5, 70, 33))[2] == 256
    with pytest.raises(metalmm.KernelError, match="no size is given for threadgroup memory 0"):
        metalmm.matmul("my_untold/plain", a, b, device=device)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (("format = 2", "format = 3"), r"format is 3; this metalmm reads format = 2"),
        (("format = 2", "format"), r"my.toml: "),
        (("mine.metal", "other.metal"), r"my_gemm/plain: there is no file"),
        (('template = ["threads"]', 'template = ["bk"]'), r"template argument 'bk' has no value"),
        (("tile = [1, 64]", "tile = [0, 64]"), r"tile is \[0, 64\]"),
        (("threads = 64", "threads = 2048"), r"threads is 2048; Metal allows 1 to 1024"),
        ((", threads = 64", ""), r"'threads' is missing"),
        (('layouts = ["nn"]', 'layouts = ["xx"]'), r"supports.layouts is \['xx'\]"),
        (('layouts = ["nn"]', 'layouts = ["nn"], q8 = true'), r"supports knows nothing of 'q8'"),
        (('layouts = ["nn"]', 'layouts = ["nn"], m = "one"'), r"supports.m is 'one'"),
    ],
)
def test_bad_manifests_name_the_entry(edit: tuple[str, str], message: str, tmp_path: Path) -> None:
    (tmp_path / "my.toml").write_text(MANIFEST.replace(*edit))
    (tmp_path / "mine.metal").write_text(MINE)
    with pytest.raises(metalmm.ManifestError, match=message):
        metalmm.load_variants(tmp_path / "my.toml")


def test_a_builtin_variant_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "mine.metal").write_text(MINE)
    (tmp_path / "my.toml").write_text(MANIFEST.replace("my_gemm", "gemv").replace("plain = {", "baseline = {"))
    with pytest.raises(metalmm.ManifestError, match="gemv/baseline: there is a variant of this id"):
        metalmm.load_variants(tmp_path / "my.toml")


def test_sources_from_text_files_includes_and_defines(tmp_path: Path, device: metalmm.Device) -> None:
    (tmp_path / "inc").mkdir()
    (tmp_path / "inc" / "scale.h").write_text("constant float kScale = SCALE;\n")
    (tmp_path / "beside.h").write_text("#define OFFSET 1.0f\n")
    text = '#include <metal_stdlib>\n#include "scale.h"\n#include "beside.h"\nkernel void k(device float* y) { y[0] = kScale + OFFSET; }\n'
    path = tmp_path / "k.metal"
    path.write_text(text)
    y = np.zeros(1, np.float32)
    library = device.compile(path, include_dirs=[tmp_path / "inc"], defines={"SCALE": "2.5f"})
    assert library.kernel_names == ["k"]
    assert library.kernel("k")(y, grid=(1,), threadgroup=(1,)) >= 0
    assert y[0] == 3.5
    device.compile(str(path), include_dirs=[str(tmp_path / "inc")], defines={"SCALE": "4.5f"}).kernel("k")(y, grid=(1,), threadgroup=(1,))
    assert y[0] == 5.5


def test_leaving_a_batch_early_or_late(arrays: Any, device: metalmm.Device) -> None:
    a, b = arrays
    with device.batch() as batch:
        y = batch.matmul(V, a, b)
        batch.submit()
        batch.wait()
    np.testing.assert_array_equal(y, metalmm.matmul(V, a, b))
    z = np.zeros((1, 30), np.float16)
    with pytest.raises(ZeroDivisionError), device.batch() as dropped:
        dropped.matmul(V, a, b, out=z)
        raise ZeroDivisionError
    dropped.submit()
    dropped.wait()
    np.testing.assert_array_equal(z, 0)


@pytest.mark.needs("work after a fault")
@pytest.mark.skipif(REAL_GPU or ARM, reason="a GPU, and an Arm CPU, divides by zero without a word")
def test_a_batch_that_failed_fails_again(device: metalmm.Device) -> None:
    source = "#include <metal_stdlib>\nusing namespace metal;\nkernel void k(device int* y, constant int& n) { y[0] = 10 / n; }\n"
    batch = device.batch()
    device.compile(source).kernel("k")(np.zeros(1, np.int32), bytes(4), grid=1, threadgroup=1, batch=batch)
    batch.submit()
    for _ in range(2):
        with pytest.raises(metalmm.KernelError, match="kernel 'k'"):
            batch.wait()
    other = metalmm.Device("cpu", threads=1)
    with pytest.raises(metalmm.DeviceError, match="belongs to another device"):
        device.compile(source).kernel("k")(np.zeros(1, np.int32), bytes(4), grid=1, threadgroup=1, batch=other.batch())


def test_a_prepared_call_outlives_a_reload(tmp_path: Path, device: metalmm.Device) -> None:
    (tmp_path / "mine.metal").write_text(MINE.replace("SIGN", "1.0f"))
    (tmp_path / "my.toml").write_text(MANIFEST.replace("threads = 64", "threads = 32").replace("[1, 64]", "[1, 32]"))
    metalmm.load_variants(tmp_path / "my.toml")
    y = np.zeros((1, 256), np.float16)
    call = device.prepare("my_gemm/plain", np.ones((1, 8), np.float16), np.ones((8, 256), np.float16), out=y)
    (tmp_path / "my.toml").write_text(MANIFEST.replace("threads = 64", "threads = 128").replace("[1, 64]", "[1, 128]"))
    gone = metalmm.Device("cpu", threads=1)
    gone.close()  # a closed device does not stand in the way
    metalmm.load_variants(tmp_path / "my.toml")
    call()
    np.testing.assert_array_equal(y, 8)


def test_specs_compare_and_devices_are_found_in_every_argument(arrays: Any) -> None:
    assert metalmm.MatmulSpec(m=1, n=2, k=3) == metalmm.MatmulSpec(m=1, n=2, k=3)
    assert metalmm.MatmulSpec(m=1, n=2, k=3) != metalmm.MatmulSpec(m=1, n=2, k=3, bias=True)
    assert len({metalmm.MatmulSpec(m=1, n=2, k=3), metalmm.MatmulSpec(m=1, n=2, k=3)}) == 1
    a, b = arrays
    other = metalmm.Device("cpu", threads=1)
    out = other.empty((1, 30))
    assert metalmm.matmul(V, a, b, out=out) is out
    np.testing.assert_array_equal(np.asarray(other.array(out)), metalmm.matmul(V, a, b))
    with pytest.raises(metalmm.DeviceError, match=r"not a metalmm\.Device"):
        metalmm.variants(device="cpu")  # type: ignore[arg-type]
