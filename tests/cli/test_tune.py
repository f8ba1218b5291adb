"""From shapes to a decision: bench by its rule, broken and interrupted runs, tune and "auto", the step, comparisons, the page."""

from __future__ import annotations

import itertools
import json
import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import metalmm
import numpy as np
import pytest
from metalmm import backends, cli, manifest, pipelines, tuning
from metalmm.backends.protocol import Splits, Tiles, names_of
from metalmm.bench import search, sizes
from metalmm.expressions import holds
from metalmm.quantized import FORMATS
from metalmm.variant import OPERAND_TYPES
from support.decide import QUICK
from support.here import DEVICE
from support.surroundings import refused


def test_auto_goes_by_what_was_tuned(device: metalmm.Device, capsys: pytest.CaptureFixture[str]) -> None:
    x, w = np.ones((1, 64), np.float16), np.ones((64, 64), np.float16)
    before = device.prepare("auto", x, w, transpose_b=True)
    assert before.variant == tuning.choose(device, before.spec)[0]
    assert cli.main(["tune", "--spec", "n=64 k=64 nt", "--backends", "m1_optimized_v2", *QUICK, "--json", "t.json"]) == 0
    chosen = json.loads(Path("t.json").read_text())["choices"][0]["variant"]
    assert chosen.startswith("m1_optimized_v2/") and metalmm.load_tuning() == 1
    assert device.prepare("auto", x, w, transpose_b=True).variant == chosen
    assert device.prepare("auto", x[:, :60].copy(), w[:, :60].copy(), transpose_b=True).variant == chosen, "a near shape"
    assert device.prepare("auto", x, np.ones((64, 200), np.float16)).variant != chosen, "another layout"
    assert before.variant == str(before.variant), "a prepared call stays what it was"
    capsys.readouterr()
    assert cli.main(["explain", "auto", "n=64", "k=64", "nt"]) == 0
    text = capsys.readouterr().out
    assert f"{chosen}: " in text and "tuned on this shape" in text
    assert cli.main(["explain", "auto", "n=100", "k=64", "nt"]) == 0
    assert "tuned on the near shape MatmulSpec(m=1 n=64 k=64" in capsys.readouterr().out
    assert cli.main(["explain", "auto", "n=1000", "k=64", "nt"]) == 0
    assert "preferred" in capsys.readouterr().out


@pytest.mark.needs("simdgroup_matrix")
def test_auto_gives_right_results_for_every_kind_of_operation(device: metalmm.Device) -> None:
    draw = np.random.default_rng(0)
    for m, n, k, batch, ta, tb, dtype in [
        (1, 33, 65, 1, 0, 1, "float16"),
        (1, 33, 65, 1, 0, 0, "float32"),
        (5, 40, 64, 1, 0, 1, "float16"),
        (70, 33, 20, 2, 1, 1, "float16"),
    ]:
        lead = (batch,) if batch > 1 else ()
        a = draw.standard_normal((*lead, *((k, m) if ta else (m, k)))).astype(dtype)
        b = draw.standard_normal((*lead, *((n, k) if tb else (k, n)))).astype(dtype)
        bias, options = draw.standard_normal(n).astype(dtype), {"transpose_a": bool(ta), "transpose_b": bool(tb)}
        for epilogue in ({}, {"bias": bias, "alpha": 0.5}):
            out = metalmm.matmul("auto", a, b, device=device, **options, **epilogue)
            bound = metalmm.error_bound(a, b, **options, **epilogue)
            assert (np.abs(out - metalmm.reference(a, b, **options, **epilogue)) <= bound).all()


def test_a_choice_whose_kernel_has_changed_is_not_used(device: metalmm.Device, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = metalmm.MatmulSpec(1, 64, 64, transpose_b=True)
    key, name = tuning.Key.of(spec), "m1_optimized_v2/nt_bn64_col"
    for digest, used in ((manifest.kernel_sha256(name, spec), True), ("0" * 64, False)):
        tuning.write(Path("t.json"), tuning.device_key(device), [tuning.Choice(key, name, digest, 1.0, "today")])
        assert metalmm.load_tuning("t.json") == 1
        chosen, why = tuning.choose(device, spec)
        assert (chosen == name) == used and ("its kernel has changed" in why) != used
    tuning.write(Path("t.json"), "another device", [tuning.Choice(key, name, None, 1.0, "today")])
    assert set(tuning.read(Path("t.json"))) == {tuning.device_key(device), "another device"}


def test_what_devices_prefer_is_there() -> None:
    """A winner that no manifest has is passed over: for a user's. Ours are ids, and take the shapes they won."""
    for backend in map(backends.get, ("cpu", "cuda", "metal")):
        for storage, layout, n, k, name in backend.winners:
            v = manifest.get(name)
            least = v.supports.get("m", 1)
            spec = metalmm.MatmulSpec(least["min"] if isinstance(least, dict) else 1, n, k, transpose_b=layout == "nt", b_storage=storage)
            assert not v.lacks(spec), name
        for storage, end, name, *most in backend.preferred:
            for v in names_of(name):
                takes = {(kind.storage, kind.end) for kind in manifest.get(v).kinds()}
                assert any(storage in ("", s) and end in ("", e) for s, e in takes) and most in ([], [2], [4], [8], [16], [32], [64]), v


def test_the_tile_with_which_the_cores_are_done_first(device: metalmm.Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """By hand, on ten cores: how many tiles a core has, in how many waves, and what they take it. Of float32 none is taken."""
    backend = type(device.backend)
    large, small, other = "gemm/bm64_bn64_bk64", "gemm/bm32_bn32_bk64", "gemm_tiled/baseline"
    tiles = Tiles({large: (200.0, 150.0, 0.0, 2), small: (90.0, 35.0, 10.0, 2)})
    monkeypatch.setattr(backend, "winners", ())
    monkeypatch.setattr(backend, "preferred", (("", "1", other, 8), ("", "1", tiles, 512), ("", "1", "gemv/baseline")))
    monkeypatch.setattr(backend, "cores", lambda self, device: 10)
    chosen = {
        (32, 32 * 10, 1): (small, "1 of 32 x 32", "0.202"),  # 190 and 70; half of a large one 400 and 150
        (64, 64 * 10, 1): (small, "4 of 32 x 32", "0.472"),  # 2 * 190 and 280; 400 and 300
        (64, 64 * 10 + 1, 1): (large, "2 of 64 x 64", "0.519"),  # 400 and 330; 3 * 190 and 294
        (128, 64 * 10, 1): (large, "2 of 64 x 64", "0.721"),  # 400 and 600; 4 * 190 and 560
        (64, 64 * 10, 2): (large, "2 of 64 x 64", "0.721"),
        (33, 64 * 10, 1): (small, "4 of 32 x 32", "0.472"),  # 31 of the rows are nobody's
        (10, 100, 1): (small, "1 of 32 x 32", "0.192"),
        (8, 640, 1): (other, "", ""),
        (513, 640, 1): (None, "", ""),
    }
    for (m, n, batch), (name, what, us) in chosen.items():
        found = tuning.choose(device, metalmm.MatmulSpec(m, n, 64, batch, transpose_b=True))
        assert found[0] == name or (name is None and found[0] not in tiles.ns), (m, n, batch, found)
        why = f"the busiest of 10 cores has {what} results, 2 at once, whose products take it about {us} µs"
        assert found[1].endswith(why) == (name in tiles.ns), (m, n, batch, found)
    assert tuning.choose(device, metalmm.MatmulSpec(128, 640, 64, transpose_b=True, dtype="float32"))[0] not in tiles.ns
    monkeypatch.setattr(backend, "cores", lambda self, device: None)
    monkeypatch.setattr(backend, "usual_cores", 5)
    assert "the busiest of 5 cores" in tuning.choose(device, metalmm.MatmulSpec(128, 640, 64, transpose_b=True))[1]


THREE = "c2_d2_tg64 c2_s2_d4_tg64 c2_s8_d4_tg256"


@pytest.mark.parametrize(
    ("n", "k", "offered", "taken", "why"),
    [
        (64, 8192, THREE, "c2_s8_d4_tg256", "105 KB of B in flight a core, 1 round"),  # else 6.6 and 26 KB
        (400, 4096, THREE, "c2_s2_d4_tg64", "164 KB of B in flight a core, 2 rounds"),  # else 41, or halved twice more
        (64, 300, "c2_d2_tg64 c2_s2_d4_tg64", "c2_d2_tg64", "3.84 KB of B in flight a core, 1 round"),  # the same bytes, of fewer loads
        (9000, 640, "c2_d2_tg64 c4_tg64", "c4_tg64", "3 rounds"),  # of two rounds of 512 three eighths are skipped
        (9000, 2048, "c2_s2_d2_tg64 c2_d2_tg64", "c2_d2_tg64", "4 rounds"),  # in place of two rounds of halves
        (9000, 4096, "c2_d2_tg64 c2_d4_tg64", "c2_d4_tg64", "4 rounds"),
    ],
)
def test_how_k_is_shared(
    n: int, k: int, offered: str, taken: str, why: str, device: metalmm.Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By hand: float16 on ten cores that want 50 KB in flight. A load of the family is of 256 of K, dD of them at once."""
    backend, rest = type(device.backend), "gemm_tiled/baseline"
    monkeypatch.setattr(backend, "winners", ())
    points = Splits(50e3, [f"gemv_nt_octet/{name}" for name in offered.split()])
    monkeypatch.setattr(backend, "preferred", (("", "1", points, 1), ("", "", rest)))
    monkeypatch.setattr(backend, "cores", lambda self, device: 10)
    found = tuning.choose(device, metalmm.MatmulSpec(1, n, k, transpose_b=True))
    assert found[0] == f"gemv_nt_octet/{taken}" and why in found[1], found
    assert tuning.choose(device, metalmm.MatmulSpec(2, n, k, transpose_b=True))[0] == rest
    assert tuning.choose(device, metalmm.MatmulSpec(1, n, k))[0] == rest  # none of them takes it
    monkeypatch.setattr(backend, "cores", lambda self, device: None)  # then as many are taken for granted
    assert tuning.choose(device, metalmm.MatmulSpec(1, n, k, transpose_b=True))[0] == f"gemv_nt_octet/{taken}"


def test_what_an_h200_takes_of_quantized_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/lab/quantized.md: what was timed as the fastest there, or what the rule makes of it."""
    cuda = backends.get("cuda")
    monkeypatch.setattr(type(cuda), "cores", lambda self, device: 132)
    for form, n, k, point in (
        ("q4_k", 14336, 4096, "c2_s2_d4_tg64"), ("fp4", 14336, 4096, "c2_s4_d2_tg128"), ("q5_k", 14336, 4096, "c2_s4_d4_tg128"),
        ("q6_k", 4096, 4096, "c2_s8_d4_tg256"), ("q4_0", 4096, 4096, "c2_s8_d4_tg256"), ("q6_k", 4096, 14336, "s4_d7_tg128"),
        ("affine4", 4096, 14336, "s4_d7_tg128"), ("q8_0", 1536, 8960, "s10_d4_tg320"), ("fp8", 9728, 896, "c2_s4_d2_tg128"),
    ):  # fmt: skip
        spec = metalmm.MatmulSpec(1, n, k, transpose_b=True, b_storage=form)
        winner = next((name for *where, name in cuda.winners if where == [form, "nt", n, k]), "")
        assert (winner or tuning.choose_unseen("cuda", spec)[0]) == f"gemv_nt_mma/{point}", (form, n, k)
    for k, also, v in ((896, (128, 128), "gemv_nt/l4_s7_tg448"), (4096, (1024, 1024), "gemv_nt_mma/c2_s4_d4_tg128")):
        spec = metalmm.MatmulSpec(1, k, k, transpose_b=True, b_storage="q4_0", also_n=also)
        assert tuning.choose_unseen("cuda", spec)[0] == v


@pytest.mark.parametrize("storage", ["dense", *FORMATS])
def test_few_rows_have_a_kernel_for_few_rows(storage: str) -> None:
    """On a GPU that is not here, of any type and of several matrices. What the rule had no row for took up to 12 times as long
    (docs/lab/cuda.md)."""
    ends = (((), False), ((128, 128), False), ((896,), False), ((896,), True))
    for m, (also, swiglu), dtype in itertools.product((2, 3, 4, 8), ends, OPERAND_TYPES):
        spec = metalmm.MatmulSpec(m, 896, 896, transpose_b=True, b_storage=storage, also_n=also, swiglu=swiglu, dtype=dtype)
        chosen = manifest.get(tuning.choose_unseen("cuda", spec)[0])
        on_vectors = dtype == "float32" and (storage != "dense" or m <= 4)
        assert not chosen.lacks(spec) and chosen.family in (("gemv_nt",) if on_vectors else ("gemv_nt_mma", "small_m", "small_m_mma"))
        assert not on_vectors or m <= chosen.tile[0] < 2 * m, (spec, chosen)


def test_a_gpu_s_kernels_are_compiled_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two wait for each other. One after another, 23 kernels took 3 times as long on 16 CPUs."""
    gpu: Any = SimpleNamespace(threads=None, backend=SimpleNamespace(together=1))
    both = threading.Barrier(2, timeout=10)
    monkeypatch.setattr(pipelines._core, "_prepare_pipeline", lambda *_: both.wait())
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1}, raising=False)
    v = manifest.get("gemm/bm32_bn32_bk32")
    specs = [metalmm.MatmulSpec(64, 64, 64, dtype=dtype) for dtype in ("float16", "float32")]
    assert not pipelines.compile_all(gpu, [(v, spec) for spec in specs], lambda count: None, lambda: None)


def test_which_numbers_of_the_rule_are_a_format_s() -> None:
    kinds = ("dense", "q8_0", "q4_0", "affine8 affine4 q5_k q4_k", "q8_k q6_k q2_k nvfp4", "fp4 fp8")
    found = {stored: column for column, of_kind in enumerate(kinds) for stored in of_kind.split()}
    assert {stored: backends.cuda.weights_of(stored) for stored in ("dense", *FORMATS)} == found


@pytest.mark.parametrize("stored", ["dense", *FORMATS])
def test_one_row_more_is_no_cliff(stored: str) -> None:
    """By the numbers for an H200. By older ones 65 rows took 3.7 times as long as 64 where a block has two scales. Twice the tiles are 2.0."""
    device: Any = SimpleNamespace(name="cuda", backend=backends.get("cuda"), info={})

    def least(m: int, n: int, k: int) -> float:
        spec = metalmm.MatmulSpec(m, n, k, transpose_b=True, b_storage=stored)
        offered = next(x for x in tuning._offered(device, spec) if isinstance(x, Tiles))
        points = {manifest.get(name): ns for name, ns in offered.ns.items()}
        return min(float(Tiles.took(ns, *Tiles.work(v, spec, 132))) for v, ns in points.items() if not v.lacks(spec))

    for n, k in ((512, 512), (896, 4864), (4096, 4096), (4096, 14336), (1024, 16384), (16384, 1024), (28672, 4096)):
        for m in (8, 16, 32, 64, 128, 256, 512):
            assert least(m + 1, n, k) < 2.3 * least(m, n, k), (m, n, k)


@pytest.mark.parametrize("name, cores", [("cuda", 132), ("metal", 10)])
def test_auto_is_explained_of_a_device_that_is_not_here(
    name: str, cores: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def gone() -> metalmm.Device:
        raise metalmm.DeviceError("none")

    monkeypatch.setenv("METALMM_DEVICE", name)  # as --device does, and back
    monkeypatch.setattr(cli, "default_device", gone)
    for form in ("q4_0", "dense"):
        assert cli.main(["explain", "auto", "m=4", "n=4096", "k=4096", "nt", *([form] if form != "dense" else []), "--device", name]) == 0
        assert f"of a GPU of {cores} cores" in capsys.readouterr().out


def test_rows_of_a_that_load_b_anew_are_no_loads_past_its_end() -> None:
    """Of 64 rows `r4` has two groups. Its loads are in B all the same."""
    gpu: Any = SimpleNamespace(backend=SimpleNamespace(cores=lambda device: 132))
    r4, r8 = (manifest.get(f"small_m_mma/{name}") for name in ("r4_t4_s4_tg128", "r8_t2_s8_tg256"))
    spec = metalmm.MatmulSpec(64, 9728, 896, transpose_b=True, b_storage="q4_0")
    assert next(tuning._splits(gpu, spec, 4e3, [r8, r4]))[0] == r4


def test_the_rule_behind_auto(device: metalmm.Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nearer choices first; winners of the client's runs near their shapes alone; then the preferred; a choice for another kind never."""
    spec = metalmm.MatmulSpec(1, 900, 4000, transpose_b=True)
    monkeypatch.setattr(
        type(device.backend),
        "winners",
        (
            ("dense", "nt", 896, 4300, "m1_optimized_v5/nt_bn4_largek_smalln_tg256"),
            ("dense", "nn", 900, 4000, "gemv/baseline"),
            ("q8_0", "nt", 900, 4000, "gemv_nt_thread/c4_tg32"),
            ("q8_0", "nt", 900, 4000, "in no/manifest"),
            ("q8_0", "nt", 900, 4000, "small_m/t4_d3_tg64"),
            ("affine4", "nt", 900, 4000, "gemm/bm32_bn32_bk32"),
        ),
    )
    for m in (2, 5, 8):  # what takes no m of 1, of every m that it takes
        assert tuning.choose(device, metalmm.MatmulSpec(m, 900, 4000, b_storage="q8_0"))[0] == "small_m/t4_d3_tg64"
    assert tuning.choose(device, metalmm.MatmulSpec(1, 900, 4000, b_storage="affine4"))[0] == "gemm/bm32_bn32_bk32"
    for m, batch, storage in ((9, 1, "q8_0"), (2, 1, "affine4"), (9, 1, "affine4"), (1, 2, "affine4"), (1, 1, "affine4:32")):
        other = metalmm.MatmulSpec(m, 900, 4000, batch, b_storage=storage)
        assert "measured best" not in tuning.choose(device, other)[1]
    assert tuning.choose(device, metalmm.MatmulSpec(1, 900, 4000, b_storage="q8_0"))[0] == "gemv_nt_thread/c4_tg32"
    assert tuning.choose(device, spec) == (
        "m1_optimized_v5/nt_bn4_largek_smalln_tg256",
        "measured best on n=896 k=4300 on such a device; not tuned on this one",
    )
    for other in (
        metalmm.MatmulSpec(1, 900, 400, transpose_b=True),
        metalmm.MatmulSpec(1, 900, 4000, transpose_b=True, dtype="float32"),
        metalmm.MatmulSpec(2, 900, 4000, transpose_b=True),
    ):
        assert "measured best" not in tuning.choose(device, other)[1]
    name = "m1_optimized_v2/nt_bn64_col"
    choices = [
        tuning.Choice(
            tuning.Key.of(metalmm.MatmulSpec(1, n, 4000, transpose_b=True)),
            v,
            manifest.kernel_sha256(v, metalmm.MatmulSpec(1, n, 4000, transpose_b=True)),
            1.0,
            "t",
        )
        for n, v in ((500, "m1_optimized_v2/nt_bn128_col"), (1000, name))
    ]
    tuning.write(Path("t.json"), tuning.device_key(device), choices)
    metalmm.load_tuning("t.json")
    assert tuning.choose(device, spec)[0] == name
    with pytest.raises(metalmm.UnknownVariantError, match="'auto' is no variant"):
        manifest.get("auto")
    for text in ("{", '{"schema": "metalmm-tuning", "version": 2}', '{"schema": "metalmm-tuning", "version": 1, "devices": {"cpu": [{}]}}'):
        Path("bad.json").write_text(text)
        with pytest.raises(tuning.TuningError, match=r"bad\.json"):
            metalmm.load_tuning("bad.json")
    assert tuning.choose(device, spec)[0] == name, "what was loaded before stays"


def test_a_new_manifest_is_seen_by_auto(tmp_path: Path, device: metalmm.Device) -> None:
    x, w = np.ones((1, 64), np.float16), np.ones((64, 64), np.float16)
    first = device.prepare("auto", x, w, transpose_b=True).variant
    key = tuning.Key.of(metalmm.MatmulSpec(1, 64, 64, transpose_b=True))
    (tmp_path / "m.toml").write_text(
        f'format = 2\n[kernels.columns_direct]\nsource = "{manifest.get("m1_optimized_v4/nt_tiny_bn32_tg64").source}"\ntemplate = ["type", "bn", "threads", "unroll"]\n'
        'tile = [1, "bn"]\nsupports = { m = 1, layouts = ["nt"] }\n[families.mine.variants]\none = { kernel = "columns_direct", bn = 32, unroll = 4, threads = 32 }\n'
    )
    metalmm.load_variants(tmp_path / "m.toml")
    tuning.write(
        Path("t.json"),
        tuning.device_key(device),
        [tuning.Choice(key, "mine/one", manifest.kernel_sha256("mine/one", tuning.spec_of(key)), 1.0, "t")],
    )
    metalmm.load_tuning("t.json")
    assert device.prepare("auto", x, w, transpose_b=True).variant == "mine/one"
    manifest.unload(tmp_path / "m.toml")
    assert device.prepare("auto", x, w, transpose_b=True).variant == first


@pytest.mark.rest
@pytest.mark.skipif(DEVICE != "cpu", reason="some dozens of kernels to compile; the fake's turn would add nothing")
def test_search_tries_what_does_not_ship() -> None:
    ids = set(metalmm.variants())
    assert (
        cli.main(
            [
                "tune",
                "--search",
                "--budget",
                "8",
                "--spec",
                "n=96 k=64 nt",
                "--backends",
                "gemv_nt_vec4,gemv_nt",
                *QUICK,
                "--json",
                "t.json",
                "--seed",
                "3",
            ]
        )
        == 0
    )
    found = json.loads(Path("t.json").read_text())["search"][0]
    assert len(found["tried"]) == 8 and any(t["ms"] for t in found["tried"])
    tried = {t["variant"].split("/")[0] for t in found["tried"]}
    assert tried == {"gemv_nt_vec4", "gemv_nt"}, "of each of these families something"
    assert set(metalmm.variants()) == ids, "none of it is listed"
    name = found["finalists"][0]["variant"]
    a = np.ones((1, 64), np.float16)
    np.testing.assert_array_equal(metalmm.matmul(name, a, np.ones((96, 64), np.float16), transpose_b=True), np.full((1, 96), 64.0))


def test_candidates_follow_the_rules_of_the_manifest() -> None:
    for shape in sizes.from_specs(["n=896 k=896 nt", "m=4 n=64 k=64 nn", "m=64 n=64 k=64 tt"]).shapes:
        space = search.Space([manifest.BUILTIN], shape, None)
        for name, all_of_it in space.candidates.items():
            for c in all_of_it:
                values = dict(zip(space.strategies[name].search, c.values, strict=True))
                if name == "gemv_nt_vec4":
                    assert values["threads"] // 32 % values["split"] == 0 and shape.m <= values["rows"] < 2 * shape.m
                if name == "gemm":
                    assert shape.m > 1 and values["bm"] % (8 * values["wm"]) == 0
            if all_of_it:
                assert all(
                    sum(a != b for a, b in zip(all_of_it[0].values, n.values, strict=True)) == 1 for n in space.neighbours(all_of_it[0])
                )
    assert holds("a % 2 == 0 and b > 1 or a == 1", {"a": 4, "b": 2}) and not holds("a >= b", {"a": 1, "b": 2})
    for bad in ("__import__('os')", "a.b", "a if b else c", "'x'", "a <", "1 < a < 3", "a // 0 == 1"):
        with pytest.raises(ValueError):
            holds(bad, {"a": 1, "b": 1, "c": 1})


@pytest.mark.parametrize(("line", "message"), [('search = { bm = [] }', "no parameter in a name"), ("search = 3", "takes a table"), ('search = { threads = [32], where = ["threads >"] }', "comparisons"), ('search = { threads = ["a"] }', "whole numbers"), ('where = ["x == 1"]', "comparisons"), ('name = { threads = "t g" }', "prefix of each"), ("points = 3", "a list of names"), ('points = ["tg032"]', "does not know 'tg032'"), ('points = ["tg32_tg32"]', "does not know 'tg32'"), ('threads = 32\npoints = ["tg32"]', "all of them have defaults; take one away"), ('flight = "x"', "flight"), ('busy = "1 +"', "busy")])  # fmt: skip
def test_a_manifest_whose_search_is_wrong(line: str, message: str, tmp_path: Path) -> None:
    text = (
        'format = 2\n[kernels.k]\ntemplate = ["threads"]\ntile = [1, 32]\nsupports = { layouts = ["nt"] }\n[families.f]\nkernel = "k"\n'
        + ("" if "name =" in line else 'name = { threads = "tg" }\n')
        + ("" if "points =" in line else 'points = ["tg32"]\n')
    )
    refused(tmp_path, f"{text}{line}\n", message)
