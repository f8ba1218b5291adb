"""The benchmark's own rules, fed with synthetic numbers; one small run end to end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import metalmm
import numpy as np
import pytest
from metalmm import numerics
from metalmm.bench import hot_shapes, report, runner, sizes
from support.here import DEVICE, FAKE, FAKE_CUDA

SHAPE = sizes.Shape("matmul", 1, 1, 9728, 896, False, True, False, 1.0, 0.0, 0.324, "mps")


def made(variant: str, gpu: float | None, cpu: float, rel: float = 4.8e-4) -> report.Result:
    return report.Result(variant, [gpu, gpu], [cpu, cpu], 1.5522e-2, rel)


def test_sizes_of_the_embedded_table() -> None:
    shapes = sizes.load().shapes
    assert len(shapes) == 39
    assert [(s.n, s.k, s.layout, s.orig_ms, s.orig_backend) for s in shapes[:5]] == [
        (9728, 896, "nt", 0.324, "mps"),
        (896, 4864, "nt", 0.240, "mps"),
        (1152, 896, "nn", 0.235, "mlx"),
        (896, 896, "nt", 0.234, "mlx"),
        (151936, 896, "nt", 2.507, "mps"),
    ]
    assert shapes[2].bias
    assert str(shapes[2]) == "op=matmul_bias_add | batch=1 | m=1 | n=1152 | k=896 | tA=0 | tB=0"
    batched = shapes[6]
    assert (batched.op, batched.batch, batched.n, batched.k, batched.alpha, batched.beta) == ("matmul_alpha_beta", 14, 86, 64, 0.125, 0.0)
    assert shapes[0].bytes == 2 * (896 + 9728 * 896 + 9728)


@pytest.mark.parametrize(
    ("text", "message"),
    [("op=matmul | batch=1 | m=1 | n=2:", "line 1: KeyError"), ("op=x | batch=1 | m=1 | n=a | k=1 | tA=0 | tB=0:", "line 1: ValueError")],
)
def test_sizes_that_cannot_be_read_name_the_line(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sizes.parse(text)


def test_selection_of_shapes() -> None:
    shapes = sizes.load().shapes
    assert sizes.select(shapes, "1,3") == [shapes[0], shapes[2]]
    assert sizes.select(shapes, "n=896 k=4864,n=896 k=896") == [shapes[1], shapes[3]]
    for pattern in ("n=7", "0", "99"):
        with pytest.raises(ValueError, match="--shapes"):
            sizes.select(shapes, pattern)


def test_tags_best_and_baseline() -> None:
    results = [made("mlx/a", 0.2, 0.4), made("gemv/b", 0.1, 0.5), made("m1/c", 0.3, 0.3)]
    assert report.tags(results, "mlx/a", 1e-3) == {"mlx/a": ["baseline"], "gemv/b": ["best-gpu"], "m1/c": ["best-cpu"]}


def test_wrong_variants_get_no_best_tag() -> None:
    results = [made("a/a", 0.1, 0.1, rel=1.1e-3), made("b/b", 0.2, 0.2, rel=1e-3)]
    assert report.tags(results, None, 1e-3) == {"a/a": ["bad-rel"], "b/b": ["best-gpu", "best-cpu"]}
    assert report.tags(results, None, 1e-2)["a/a"] == ["best-gpu", "best-cpu"]
    bad = made("c/c", 0.05, 0.05)
    bad.wrong = "1 of 4 elements"
    assert report.tags([bad, *results], None, 1e-3)["c/c"] == ["bad-rel"]


def test_closest_where_mps_is_best() -> None:
    results = [made("mps/baseline", 0.1, 0.1), made("b/b", 0.2, 0.3), made("c/c", 0.3, 0.2)]
    assert report.tags(results, None, 1e-3) == {"mps/baseline": ["best-gpu", "best-cpu"], "b/b": ["closest-gpu"], "c/c": ["closest-cpu"]}


def test_host_gap() -> None:
    results = [made("a/a", 0.100, 0.50), made("b/b", 0.110, 0.40), made("c/c", 0.111, 0.30), made("d/d", 0.105, 0.41)]
    found = report.tags(results, None, 1e-3)
    assert found["b/b"] == ["host-gap"]
    assert found["c/c"] == ["best-cpu"]
    assert found["d/d"] == []


def test_a_missing_time_is_na_never_zero() -> None:
    results = [made("a/a", None, 0.5), made("b/b", 0.2, 0.6)]
    found = report.tags(results, None, 1e-3)
    assert found == {"a/a": ["best-cpu"], "b/b": ["best-gpu"]}
    assert "avg_gpu=n/a | avg_cpu=0.5ms" in report.line(SHAPE, results[0], [])
    mixed = report.Result("c/c", [0.1, None], [1.0, 1.0])
    assert mixed.avg_gpu is None
    assert report.ms(0.0) == "0ms"


def test_lines_have_the_format_of_the_seeds() -> None:
    text = report.section(SHAPE, [made("mlx/baseline", 0.485, 0.7178), made("m1/best", 0.139, 0.3135)], "mlx/baseline", bad_rel=1e-3)
    lines = text.splitlines()
    assert lines[0] == "Spec op=matmul | batch=1 | m=1 | n=9728 | k=896 | tA=0 | tB=1:"
    assert lines[1].startswith(
        "   - mlx/baseline [baseline]: avg_gpu=0.485ms | avg_cpu=0.718ms [vs orig 0.324ms] (+121.54%) maxAbs=1.5522e-02 maxRel=4.8000e-04"
    )
    assert lines[2].startswith("   - m1/best [best-gpu] [best-cpu]: avg_gpu=0.139ms | avg_cpu=0.314ms [vs orig 0.324ms] (-3.24%)")
    assert lines[2].endswith("med_gpu=0.139ms range=0ms eff_bw=125.57GB/s")
    by_cpu = report.section(
        SHAPE, [made("x/x", 0.1, 0.5), made("y/y", 0.2, 0.4), made("z/z", 0.3, 0.6)], None, bad_rel=1e-3, sort="cpu", best_only=True
    )
    assert [row.split()[1] for row in by_cpu.splitlines()[1:]] == ["y/y", "x/x"]


def test_mismatch_catches_what_a_max_would_drop() -> None:
    a, b = np.ones((1, 4), np.float16), np.ones((4, 3), np.float16)
    ref, bound = metalmm.reference(a, b), metalmm.error_bound(a, b)
    out = np.full((1, 3), 4, np.float16)
    assert numerics.mismatch(out, ref, bound) == ""
    out[0, 1] = np.nan
    assert "1 of 3 elements; first at (0, 1)" in numerics.mismatch(out, ref, bound)
    assert numerics.max_abs_rel(out, ref) == (np.inf, np.inf)
    ref[0, 1] = np.nan
    assert numerics.mismatch(out, ref, bound) == ""
    assert numerics.max_abs_rel(out, ref) == (0.0, 0.0)
    out[0, 2] = 4.008  # one unit in the last place off: 4.004 would be half of one
    assert "(0, 2)" in numerics.mismatch(out, ref, bound)


def test_baseline_is_what_production_ran_on() -> None:
    cpu = metalmm.Device("cpu")
    assert SHAPE.orig_backend == "mps"
    assert runner.baseline_of(SHAPE, cpu) == "blas/baseline"
    gemv = sizes.Shape("matmul", 1, 1, 8, 8, False, False, False, 1.0, 0.0, 0.1, "gemv")
    assert runner.baseline_of(gemv, cpu) == "gemv/baseline"


def test_cold_copies_exceed_the_cache(device: metalmm.Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "_MOST_COPIES", 512)
    assert runner.cold_copies(SHAPE, device) * 2 * 9728 * 896 >= min(
        2 * runner.last_level_cache(device), runner.COLD_LIMIT_BYTES - 2 * 9728 * 896
    )


def run(tmp_path: Path, *arguments: str) -> tuple[int, Any]:
    out = tmp_path / "out.json"
    code = hot_shapes.main(["--json", str(out), "--iters", "2", *arguments])
    return code, json.loads(out.read_text()) if out.exists() else None


@pytest.mark.needs("simdgroup_matrix")
@pytest.mark.skipif(bool(FAKE or FAKE_CUDA), reason="some dozens of kernels to compile; the fake's turn would add nothing")
def test_a_small_run_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    families = "gemv,gemm_tiled,mlx,gemv_nn,m1_optimized,m1_optimized_v2,m1_optimized_v5"
    code, data = run(tmp_path, "--shapes", "6,7", "--sort", "gpu", "--cold", "--backends", families)
    text = capsys.readouterr().out
    assert code == 0
    assert "[best-gpu]" in text
    assert ("say nothing about a GPU" in text) == (DEVICE == "cpu")
    assert "[baseline]" in text
    assert "cold weights" in text
    assert "gemv/smalln on 2 of 2 shapes: n=64" in text or "gemv/smalln on 1 of 2 shapes" in text
    assert "off: staging B" in text
    assert "Winners by shape:" in text
    assert data["environment"]["device"] == DEVICE
    first = data["shapes"][0]
    assert first["shape"]["batch"] == 14
    assert first["weight_copies"] > 1
    assert all(len(r["gpu_ms"]) == 2 and r["max_rel"] < 1e-3 and len(r["kernel_sha256"]) == 64 for r in first["results"])


def test_a_wrong_variant_is_shown_and_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "my.toml").write_text(
        'format = 2\n[kernels.wrong]\nsource = "w.metal"\ntemplate = ["threads"]\ntile = [1, 32]\n'
        'supports = { m = 1, layouts = ["nn"] }\n[families.my_wrong.variants]\nzero = { kernel = "wrong", threads = 32 }\n'
    )
    (tmp_path / "w.metal").write_text(
        '#include <metal_stdlib>\n#include "params.h"\nusing namespace metal;\ntemplate <int T>\nkernel void wrong(device half* D [[buffer(2)]], constant MatmulParams& p '
        "[[buffer(5)]],\n uint i [[thread_position_in_grid]]) {\n  if (i < p.n) D[i] = 0.0h;  // and nothing for the rest of the batch\n}\n"
    )
    code, data = run(tmp_path, "--manifest", str(tmp_path / "my.toml"), "--shapes", "6", "--backends", "my_wrong,gemv")
    text = capsys.readouterr().out
    assert code == 1
    assert "my_wrong/zero [bad-rel]" in text
    assert "WRONG" in text
    assert data["shapes"][0]["results"][-1]["wrong"]


def test_arguments_it_cannot_use(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(tmp_path, "--backends", "gemw")[0] == 2
    assert "--backends gemw: no such family" in capsys.readouterr().err
    assert run(tmp_path, "--shapes", "n=7")[0] == 2
    assert run(tmp_path, "--top", "0")[0] == 2 and "--top takes at least 1" in capsys.readouterr().err
    specs = [word for n, calls in ((64, 2), (32, 9)) for word in ("--spec", f"n={n} k=32 nt calls={calls}")]
    assert len(run(tmp_path, *specs, "--top", "1", "--backends", "gemv_nt_vec4")[1]["shapes"]) == 1
    assert run(tmp_path, "--sizes", str(tmp_path / "none.md"))[0] == 2
    monkeypatch.setenv("MATMUL_BACKENDS", "nothing")
    assert run(tmp_path)[0] == 2
