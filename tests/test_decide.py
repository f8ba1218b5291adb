"""From shapes to a decision: bench by its rule, broken and interrupted runs, tune and "auto", the step, comparisons, the page."""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import metalmm
import numpy as np
import pytest
from conftest import DEVICE, ROOT
from metalmm import backends, cli, manifest, tuning
from metalmm.bench import check, command, compare, copy, frameworks, html, page, results, runner, search, sizes, statistics, step
from metalmm.bench.report import Result
from metalmm.bench.runner import Rule, ShapeRun

QUICK = ["--least-time", "0", "--most-time", "0.02"]
SMALL = ["--spec", "n=64 k=64 nt calls=24", "--spec", "m=1 n=96 k=33 nn bias calls=2"]
FEW = ["--backends", "gemv,m1_optimized,m1_optimized_v6"]


@pytest.fixture(autouse=True)
def _files_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("METALMM_TUNING", str(tmp_path / "tuning.json"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tuning, "_loaded", None)
    monkeypatch.setattr(runner, "last_level_cache", lambda device: 1 << 20)
    monkeypatch.setattr(copy, "last_level_cache", lambda device: 1 << 20)
    monkeypatch.setattr(copy, "_LEAST", 1 << 20)
    metalmm._core._forget_choices()
    yield
    monkeypatch.setattr(tuning, "_loaded", None)
    metalmm._core._forget_choices()


def bench(*arguments: str, name: str = "run.json") -> tuple[int, Any]:
    code = cli.main(["bench", "--json", name, *QUICK, *arguments])
    return code, json.loads(Path(name).read_text()) if Path(name).exists() else None


# -- statistics ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [6, 9, 20, 55, 200])
def test_the_interval_holds_the_median_as_often_as_it_says(count: int) -> None:
    draw = np.random.default_rng(count)
    inside = 0
    for _ in range(2000):
        m = statistics.median_of(list(draw.exponential(size=count)))
        inside += m.low <= np.log(2) <= m.high
    assert inside / 2000 >= 0.94  # 95% with three standard deviations of the count


def test_few_samples_say_little() -> None:
    assert statistics.median_of([2.0]) == statistics.Median(2.0, 2.0 / 1.5, 3.0, 1)
    assert statistics.verdict(statistics.median_of([1.0]), statistics.median_of([1.4])) != "slower"
    assert statistics.verdict(statistics.median_of([1.0]), statistics.median_of([4.0])) == "slower"


def test_verdicts() -> None:
    def of(value: float, spread: float, noise: float = 0.0) -> statistics.Median:
        return statistics.Median(value, value * (1 - spread), value * (1 + spread), 50, noise)

    assert statistics.verdict(of(1, 0.01), of(1.1, 0.01)) == "slower"
    assert statistics.verdict(of(1.1, 0.01), of(1, 0.01)) == "faster"
    assert statistics.verdict(of(1, 0.01), of(1.1, 0.01, noise=0.2)) == "unclear"
    assert statistics.verdict(of(1, 0.2), of(1.1, 0.2)) == "unclear"
    assert statistics.verdict(of(1, 0.1), of(1.05, 0.1, noise=0.06)) == "same"


def made(variant: str, *times: float, **fields: Any) -> Result:
    return Result(variant, list(times), list(times), **fields)


def a_run(*found: Result, twin: Result | None = None, baseline: str | None = None) -> ShapeRun:
    return ShapeRun(sizes.from_specs(["n=64 k=64 nt calls=24"]).shapes[0], list(found), twin, 1, baseline)


def test_winners_by_median_ties_by_the_noise_of_twins() -> None:
    a, b, c = made("f/a", *[1.0] * 9, 30.0), made("f/b", *[1.1] * 10), made("f/c", *[2.0] * 10)
    wrong, stopped = made("f/w", *[0.1] * 10, wrong="yes"), made("f/s", 0.5, stopped="early")
    decision = results.decide(a_run(a, b, c, wrong, stopped, baseline="f/c"))
    assert decision and decision.winner is a and decision.ties == () and decision.runner_up is b and decision.over_baseline == 2.0
    noisy = a_run(a, b, c, twin=made("f/a", *[1.2] * 10), baseline=None)
    assert noisy.noise == pytest.approx(0.2)
    decision = results.decide(noisy)
    assert decision and decision.ties == ("f/b",) and decision.over_baseline is None
    assert results.decide(a_run(wrong)) is None and results.decide(a_run()) is None


def test_two_rounds_are_one_result_with_their_drift() -> None:
    first, again = a_run(made("f/a", 1.0, 1.0), made("f/b", 3.0)), a_run(made("f/a", 2.0, 2.0))
    first.results[1].stopped = "slow"
    assert first.survivors() == ["f/a"]
    first.merge(again)
    assert first.results[0].gpu == [1.0, 1.0, 2.0, 2.0] and first.drift == first.noise == 1.0 and first.rounds == 2


# -- bench --------------------------------------------------------------------------------------------------------------


def test_a_page_and_a_file_by_the_schema(capsys: pytest.CaptureFixture[str]) -> None:
    code, data = bench(*SMALL, *FEW, "--spread", "0.99", "--most-time", "9")  # six samples of each, however busy the machine
    text = capsys.readouterr().out
    assert code == 0
    jsonschema.validate(data, json.loads((ROOT / "docs" / "bench.schema.json").read_text()))
    assert data["complete"] and data["copy_gbps"] > 0 and len(data["shapes"]) == 2
    for s in data["shapes"]:
        right = [r for r in s["results"] if not r["stopped"]]
        assert s["winner"] == min(right, key=lambda r: r["median_ms"])["variant"] and s["twin"] and s["rounds"] == 2
        assert all(len(r["gpu_ms"]) >= 6 for r in right) and len(s["twin"]["gpu_ms"]) >= 6
        assert s["winner"] in text
    assert len(text.splitlines()) < 40 and "avg_gpu=" not in text and "vs orig" not in text
    assert re.search(r"skipped: not their layout: \d+ variants", text) and "is not one of n" not in text.replace("n is not one of", "")
    again = results.load("run.json")
    assert again.as_json() == data, "what was read is what was written"


def test_every_iteration_runs_every_variant_and_stops_by_the_rule(device: metalmm.Device) -> None:
    shape = sizes.from_specs(["n=64 k=64 nt"]).shapes[0]
    chosen = [manifest.get("m1_optimized_v6/nt_simd_c4_s1_tg64"), manifest.get("m1_optimized_v6/nt_simd_c8_s1_tg64")]
    quiet = runner.Progress(quiet=True)
    fixed = runner.run_shape(device, shape, chosen, rule=Rule(fixed=3), copies=2, seed=0, progress=quiet)
    assert [len(r.cpu) for r in fixed.results] == [3, 3] and fixed.twin is None
    ruled = runner.run_shape(device, shape, chosen, rule=Rule(least=0, most=0, slow=1e9, hopeless=1e9), copies=1, seed=0, progress=quiet)
    assert [len(r.cpu) for r in ruled.results] == [1, 1], "the most time of zero is over after one"
    ruled = runner.run_shape(
        device, shape, chosen, rule=Rule(spread=1e9, least=0, most=9, slow=1e9, hopeless=1e9), copies=1, seed=0, progress=quiet
    )
    assert [len(r.cpu) for r in ruled.results] == [6, 6], "six samples have an interval"
    assert ruled.twin and len(ruled.twin.cpu) == 6


@pytest.fixture
def bad_manifest(tmp_path: Path) -> Path:
    """One that does not compile, one that is wrong, one that writes outside, one that never ends, and a good one."""
    head = '#include <metal_stdlib>\n#include "params.h"\nusing namespace metal;\n'
    signature = "device half* D [[buffer(2)]], constant MatmulParams& p [[buffer(5)]], uint i [[thread_position_in_grid]]"
    bodies = {
        "broken": "this is no MSL;",
        "wrong": "if (i < p.n) D[i] = 1.0h;",
        "outside": "D[i + p.n * 8] = 0.0h;",
        "endless": "volatile device half* d = D; while (p.n > 0) d[0] = 0.0h;",
    }
    rows = []
    text = head
    for name, body in bodies.items():
        (tmp_path / f"{name}.metal").write_text(f"{head}template <int T>\nkernel void {name}({signature}) {{ {body} }}\n")
        rows.append(f'[kernels.{name}]\ntemplate = ["threads"]\ntile = [1, 32]\nsupports = {{ m = 1, layouts = ["nt"] }}\n')
    rows.append("[families.bad.variants]\n" + "".join(f'{name} = {{ kernel = "{name}", threads = 32 }}\n' for name in bodies))
    (tmp_path / "bad.toml").write_text("format = 2\n" + "\n".join(rows))
    assert text == head
    return tmp_path / "bad.toml"


@pytest.mark.skipif(DEVICE != "cpu", reason="a GPU has no guards, and an endless kernel ends where the system says")
@pytest.mark.parametrize("checks", [[], ["--no-check"]])
def test_bad_variants_are_lines_and_the_others_go_on(bad_manifest: Path, checks: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    families = ["--backends", "bad,m1_optimized_v6"]
    code, data = bench("--manifest", str(bad_manifest), "--spec", "n=64 k=64 nt", *families, "--timeout", "0.5", *checks)
    out = capsys.readouterr().out
    assert code == 1
    by_name = {r["variant"].split("/")[1]: r for r in data["shapes"][0]["results"]}
    assert "does not compile" in by_name["broken"]["failed"] or "no MSL" in by_name["broken"]["failed"] or by_name["broken"]["failed"]
    assert "64 of 64 elements" in by_name["wrong"]["wrong"]
    assert "past its end" in by_name["outside"]["failed"] or "outside" in by_name["outside"]["failed"]
    assert "0.5" in by_name["endless"]["failed"] or "seconds" in by_name["endless"]["failed"]
    assert data["shapes"][0]["winner"].startswith("m1_optimized_v6/")
    assert out.count("bad/broken FAILED") == out.count("bad/wrong WRONG") == out.count("bad/endless FAILED") == 1
    own = [r for r in data["shapes"][0]["results"] if r["variant"].startswith("bad/")]
    assert all(bool(r["checked"]) == (not checks) for r in own), "one's own variants are checked unless told otherwise"
    assert not any(r["checked"] for r in data["shapes"][0]["results"] if r not in own)


def test_a_check_sees_the_same_edges_on_fewer_columns() -> None:
    v = manifest.get("m1_optimized_v2/nt_bn64_col_vec4_bk128_tg128")
    small = check.reduced(v, sizes.from_specs(["n=151937 k=895 nt batch=30"]).shapes[0])
    assert (small.k, small.batch, small.n % 64) == (895, 2, 151937 % 64) and small.m * small.n * small.k * small.batch <= 1 << 24
    assert check.reduced(v, small) == small


def started(*arguments: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "METALMM_DEVICE": "cpu"}
    return subprocess.Popen(
        [sys.executable, "-m", "metalmm", *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )


@pytest.mark.skipif(DEVICE != "cpu", reason="another process, without the fake")
def test_interrupted_and_resumed(tmp_path: Path) -> None:
    arguments = [
        "bench",
        "--json",
        "part.json",
        "--backends",
        "m1_optimized_v6",
        "--most-time",
        "0.15",
        "--least-time",
        "0.15",
        "--shapes",
        "4,6,7,8,9,10,11,12,13",
    ]
    run = started(*arguments)
    for _ in range(3000):
        time.sleep(0.1)
        with_shapes = Path("part.json").exists() and len(json.loads(Path("part.json").read_text())["shapes"]) >= 2
        if with_shapes or run.poll() is not None:
            break
    run.send_signal(signal.SIGINT)
    out, err = run.communicate(timeout=60)
    assert run.returncode == 130, err
    data = json.loads(Path("part.json").read_text())
    assert not data["complete"] and 2 <= len(data["shapes"]) <= 9
    assert data["shapes"][0]["winner"] in out and "--resume goes on" in err and "Traceback" not in err
    code = cli.main([*arguments, "--resume", "--most-time", "0.3"])
    assert code == 2, "another rule is another run"
    again = started(*arguments, "--resume")
    out, err = again.communicate(timeout=240)
    assert again.returncode == 0, err
    whole = json.loads(Path("part.json").read_text())
    assert whole["complete"] and len(whole["shapes"]) == 9 and whole["arguments"]["resumed"] == 1
    first, kept = data["shapes"][0]["results"][0], whole["shapes"][0]["results"][0]
    assert kept["gpu_ms"][: len(first["gpu_ms"])] == first["gpu_ms"], "what was measured stays"
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".part")]


def test_what_bench_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "sizes.md").write_text(
        "  op=matmul | batch=1 | m=1 | n=? | k=896 | tA=? | tB=? | loader=q9nk_split | n0=4864 | n1=4864:\n    backend=x: count=3 | total=1ms\n"
    )
    (tmp_path / "precious.txt").write_text("precious")
    for arguments, message in [
        (["--spec", "n=4"], "k is missing"),
        (["--spec", "n=64 k=64 q8_0", "--backends", "gemv"], "no variant of gemv takes any of the shapes on device"),
        (["--spec", "n=64 k=64 m=3", "--backends", "gemv"], "m=3 is not"),
        (["--spec", "n=4 k=4 calls=x"], "calls=x"),
        (["--spec", "n=4 k=4", "--sizes", "sizes.md"], "give one of them"),
        (["--sizes", "sizes.md"], "loader=q9nk_split"),
        (["--spec", "n=4 k=4", "--json", "precious.txt"], "no metalmm-bench JSON of ours"),
        (["--spec", "n=4 k=4", "--json", "."], "a folder"),
        (["--spec", "n=4 k=4", "--json", "none/x.json"], "none/x.json: there is no folder"),
        (["--spec", "n=4 k=4", "--resume", "--json", "none.json"], "there is no none.json"),
        (["--spec", "n=4 k=4", "--spread", "0"], "--spread"),
        (["--spec", "n=4 k=4", "--rounds", "0"], "--rounds"),
        (["--spec", "n=4 k=4", "--timeout", "0"], "--timeout"),
        (["--spec", "n=4 k=4", "--warmup", "0"], "--warmup"),
        (["--spec", "n=4 k=4", "--manifest", "none.toml"], "none.toml"),
        (["--spec", "n=4 k=4", "--device", "abacus"], "invalid choice"),
        (["--sizes", "none.md"], "none.md"),
    ]:
        assert cli.main(["bench", *arguments]) == 2, arguments
        err = capsys.readouterr().err
        assert message in err and "Traceback" not in err, (arguments, err)
    assert (tmp_path / "precious.txt").read_text() == "precious"


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    target = tmp_path / "x.json"
    results.write_json(target, {"a": 1})
    with pytest.raises(TypeError):
        results.write_json(target, {"a": object()})
    assert json.loads(target.read_text()) == {"a": 1} and list(tmp_path.iterdir()) == [target]
    assert oct(target.stat().st_mode & 0o777) == oct(0o666 & ~_umask())


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_json_to_standard_output_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "--spec", "n=32 k=32 nn", *FEW, *QUICK, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["schema"] == "metalmm-bench"
    assert not Path(command.DEFAULT_JSON).exists()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_specs_of_other_types(dtype: str) -> None:
    code, data = bench("--spec", f"n=40 k=36 nt {dtype}", "--backends", "m1_optimized_v6")
    assert code == 0 and data["shapes"][0]["shape"]["dtype"] == dtype


# -- compare ------------------------------------------------------------------------------------------------------------


def slowed(data: dict[str, Any], variant: str, factor: float) -> dict[str, Any]:
    changed = json.loads(json.dumps(data))
    for s in changed["shapes"]:
        for r in [*s["results"], s["twin"]]:
            if r["variant"] == variant:
                r["gpu_ms"], r["cpu_ms"] = [t * factor for t in r["gpu_ms"]], [t * factor for t in r["cpu_ms"]]
    return changed


def test_compare_with_itself_and_with_a_slowed_down_run(capsys: pytest.CaptureFixture[str]) -> None:
    _, data = bench("--spec", "n=64 k=64 nt", "--backends", "m1_optimized_v6")
    winner = data["shapes"][0]["winner"]
    for r in [*data["shapes"][0]["results"], data["shapes"][0]["twin"]]:  # a quiet machine: 1% apart, and the twins too
        r["gpu_ms"] = r["cpu_ms"] = [1.0 + 0.01 * (i % 3) for i in range(30)]
        r["stopped"] = ""
    data["shapes"][0]["drift"] = 0.0
    results.write_json("old.json", data)
    assert cli.main(["compare", "old.json", "old.json"]) == 0
    assert " same" in capsys.readouterr().out
    for factor, code, word in ((1.3, 1, "slower"), (0.7, 0, "faster"), (1.01, 0, "same")):
        results.write_json("new.json", slowed(data, winner, factor))
        assert cli.main(["compare", "old.json", "new.json", "--json", "c.json"]) == code
        change = next(c for c in json.loads(Path("c.json").read_text())["changes"] if c["variant"] == winner)
        assert change["verdict"] == word and change["new_ms"] == pytest.approx(factor * change["old_ms"], rel=0.02)
    broken = json.loads(json.dumps(data))
    broken["shapes"][0]["results"][0]["failed"] = "fell over"
    results.write_json("new.json", broken)
    assert cli.main(["compare", "old.json", "new.json"]) == 1
    assert "broke" in capsys.readouterr().out
    stopped = slowed(data, winner, 50.0)
    row = next(r for r in stopped["shapes"][0]["results"] if r["variant"] == winner)
    row.update(stopped="early", gpu_ms=row["gpu_ms"][:3], cpu_ms=row["cpu_ms"][:3])
    results.write_json("new.json", stopped)
    assert cli.main(["compare", "old.json", "new.json"]) == 1, "one that fell so far behind that it was stopped is slower"


def test_compare_names_shapes_of_one_run_alone_and_what_differs() -> None:
    environment, shape = {"device": "cpu"}, sizes.from_specs(["n=8 k=8"]).shapes[0]
    one = results.Run(environment, {"rounds": 1}, [ShapeRun(shape, [made("f/a", *[1.0] * 9)], None, 1, None)])
    other = results.Run({"device": "gpu"}, {"rounds": 1}, [])
    assert compare.changes(one, other) == [] and compare.only_in(one, other) == ["m=1 n=8 k=8 nn"]
    assert results.same_runs(one.environment, other.environment, ("device", "cpu")) == ["device"]


def test_files_of_other_kinds_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for text, message in [
        ("{}", "it holds None"),
        ("[]", "it holds 'list'"),
        ("{", "no JSON, such as bench, tune and step write: Expecting"),
        ('{"schema": "metalmm-bench", "version": 9}', "version 9"),
        ('{"schema": "metalmm-bench", "version": 1}', "missing"),
        ('{"schema": "metalmm-bench", "version": 1, "environment": 3, "arguments": 4, "shapes": 5}', "missing"),
    ]:
        (tmp_path / "x.json").write_text(text)
        for words in (["compare", "x.json", "x.json"], ["report", "x.json", "-o", "p.html"]):
            assert cli.main(words) == 2, text
            err = capsys.readouterr().err
            assert "x.json" in err and "Traceback" not in err
            assert words[0] == "report" or message in err


# -- tune and auto -------------------------------------------------------------------------------------------------------


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
    ids = set(metalmm.variants())
    for backend in map(backends.get, ("cpu", "cuda", "metal")):
        assert {*backend.preferred, *(name for *_, name in backend.winners)} <= ids
        for layout, n, k, name in backend.winners:
            v = manifest.get(name)
            spec = metalmm.MatmulSpec(2 if "tiles" in name else 1, n, k, transpose_b=layout == "nt", b_storage=v.storage)
            assert not v.lacks(spec), name


def test_the_rule_behind_auto(device: metalmm.Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nearer choices first; winners of the user's runs near their shapes alone; then the preferred; a choice for another kind never."""
    spec = metalmm.MatmulSpec(1, 900, 4000, transpose_b=True)
    monkeypatch.setattr(
        type(device.backend),
        "winners",
        (
            ("nt", 896, 4864, "m1_optimized_v5/nt_bn4_largek_smalln_tg256"),
            ("nn", 900, 4000, "gemv/baseline"),
            ("nt", 900, 4000, "q8/nk_wide_c4_tg32"),
            ("nt", 900, 4000, "in no/manifest"),
            ("nt", 900, 4000, "q8/nk_tiles_t4_s1_d3_tg64"),
            ("nt", 900, 4000, "affine/a4_nk_gemm_bm32_bn32_bk32"),
        ),
    )
    for m in (2, 5, 8):  # what takes no m of 1, of every m that it takes
        assert tuning.choose(device, metalmm.MatmulSpec(m, 900, 4000, b_storage="q8_0"))[0] == "q8/nk_tiles_t4_s1_d3_tg64"
    assert tuning.choose(device, metalmm.MatmulSpec(1, 900, 4000, b_storage="affine4"))[0] == "affine/a4_nk_gemm_bm32_bn32_bk32"
    for m, batch, storage in ((9, 1, "q8_0"), (2, 1, "affine4"), (9, 1, "affine4"), (1, 2, "affine4"), (1, 1, "affine4:32")):
        other = metalmm.MatmulSpec(m, 900, 4000, batch, b_storage=storage)
        assert "measured best" not in tuning.choose(device, other)[1]
    assert tuning.choose(device, metalmm.MatmulSpec(1, 900, 4000, b_storage="q8_0"))[0] == "q8/nk_wide_c4_tg32"
    assert tuning.choose(device, spec) == (
        "m1_optimized_v5/nt_bn4_largek_smalln_tg256",
        "measured best on n=896 k=4864 on such a device; not tuned on this one",
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


@pytest.mark.skipif(DEVICE != "cpu", reason="some dozens of kernels to compile; the fake's turn would add nothing")
def test_search_tries_what_no_id_has(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
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
                "m1_optimized_v2,m1_optimized_v5,m1_optimized_v6,m1_optimized_v7",
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
    own = {v.kernel for v in metalmm.variants() if v.family in ("m1_optimized_v2", "m1_optimized_v5", "m1_optimized_v6", "m1_optimized_v7")}
    assert len(tried := {t["kernel"] for t in found["tried"]}) >= 3 and tried <= own, "of every kernel of these families something"
    assert set(metalmm.variants()) == ids, "nothing of it stays registered"
    capsys.readouterr()
    row = found["finalists"][0]["row"]
    kernel = re.search(r'kernel = "(\w+)"', row)
    assert kernel
    table = (ROOT / "kernels" / "variants.toml").read_text()
    text = re.search(rf"\[kernels\.{kernel[1]}\]\n(.*?)\n\n", table, re.S)
    assert text
    body = re.sub(r'source = "(\w+\.metal)"', "", text[1])
    source = manifest.search_space(manifest.BUILTIN)[kernel[1]]["source"]
    (tmp_path / "mine.toml").write_text(
        f'format = 2\n[kernels.{kernel[1]}]\nsource = "{ROOT / "kernels" / source}"\n{body}\n[families.mine.variants]\n{row}\n'
    )
    assert len(metalmm.load_variants(tmp_path / "mine.toml")) == 1, "a printed row is a manifest's"


def test_candidates_follow_the_rules_of_the_manifest() -> None:
    for shape in sizes.from_specs(["n=896 k=896 nt", "m=4 n=64 k=64 nn", "m=64 n=64 k=64 tt"]).shapes:
        space = search.Space([manifest.BUILTIN], shape)
        for name, all_of_it in space.candidates.items():
            for c in all_of_it:
                values = dict(c.values)
                if name == "simd_columns":
                    assert values["threads"] // 32 % values["split"] == 0 and shape.m <= values["rows"] < 2 * shape.m
                if name == "gemm_simdgroup":
                    assert shape.m > 1 and values["threads"] == 32 * values["wm"] * values["wn"]
            if all_of_it:
                assert all(
                    sum(a != b for a, b in zip(all_of_it[0].values, n.values, strict=True)) == 1 for n in space.neighbours(all_of_it[0])
                )
    assert manifest.holds("a % 2 == 0 and b > 1 or a == 1", {"a": 4, "b": 2}) and not manifest.holds("a >= b", {"a": 1, "b": 2})
    for bad in ("__import__('os')", "a.b", "a if b else c", "'x'", "a <", "1 < a < 3", "a // 0 == 1"):
        with pytest.raises(ValueError):
            manifest.holds(bad, {"a": 1, "b": 1, "c": 1})


@pytest.mark.parametrize(("line", "message"), [('search = { bm = [] }', "bm"), ("search = 3", "takes a table"), ('search = { threads = [32], where = ["threads >"] }', "comparisons"), ('search = { threads = ["a"] }', "whole numbers"), ('flight = "x"', "flight"), ('busy = "1 +"', "busy")])  # fmt: skip
def test_a_manifest_whose_search_is_wrong(line: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "k.metal").write_text("")
    (tmp_path / "m.toml").write_text(
        f'format = 2\n[kernels.k]\ntemplate = ["threads"]\ntile = [1, 32]\nsupports = {{ layouts = ["nt"] }}\n{line}\n[families.f.variants]\nv = {{ kernel = "k", threads = 32 }}\n'
    )
    with pytest.raises(metalmm.ManifestError, match=message):
        metalmm.load_variants(tmp_path / "m.toml")


# -- the step -------------------------------------------------------------------------------------------------------------


def test_the_plan_of_the_seeds_profile() -> None:
    plan = step.plan_of(sizes.load(), None)
    assert plan.steps == 95
    assert [(s.n, s.k, count) for s, count in plan.calls[:5]] == [
        (9728, 896, 24),
        (896, 4864, 24),
        (1152, 896, 24),
        (896, 896, 24),
        (151936, 896, 1),
    ]
    attention = plan.calls[5:]
    assert all(s.batch == 14 for s, _ in attention) and {s.layout for s, _ in attention} == {"nn", "nt"}
    recorded = sum(s.calls or 0 for s in sizes.load().shapes if s.batch == 14)
    assert sum(count for _, count in attention) == round(
        sum(s.calls or 0 for s in sizes.load().shapes if s.layout == "nn" and s.batch == 14) / 95
    ) + round(sum(s.calls or 0 for s in sizes.load().shapes if s.layout == "nt" and s.batch == 14) / 95)
    unlisted = [g for g in plan.left_out if g.text == "matmul_alpha_beta_cache @ mlx"]
    assert recorded and len(unlisted) == len(plan.left_out) == 1
    assert (unlisted[0].calls, unlisted[0].total_ms) == (
        4560 - recorded,
        pytest.approx(723.39 - sum(s.total_ms or 0 for s in sizes.load().shapes if s.batch == 14)),
    )
    assert step.plan_of(sizes.load(), 2280).calls[0][1] == 1
    by_hand = step.plan_of(sizes.from_specs(["n=8 k=8 calls=3", "n=9 k=8 calls=1"]), None)
    assert [count for _, count in by_hand.calls] in ([3, 1],)
    assert step.in_order([(by_hand.calls[0][0], 3), (by_hand.calls[1][0], 1)]) == [0, 0, 1, 0]


def test_steps_written_by_hand_are_one_step() -> None:
    plan = step.plan_of(sizes.from_specs(["n=8 k=8 calls=24", "n=900 k=8 calls=2"]), None)
    assert sorted((s.n, c) for s, c in plan.calls) == [(8, 24), (900, 2)]


@pytest.mark.needs("simdgroup_matrix")
def test_a_step_under_several_choices(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    Path("sizes.md").write_text(
        "Matmul shape backend summary:\n"
        "  op=matmul | batch=1 | m=1 | n=64 | k=64 | tA=0 | tB=1:\n    backend=mlx: count=30 | total=3.00ms | avg=0.1ms\n"
        "  op=matmul_bias_add | batch=1 | m=1 | n=96 | k=33 | tA=0 | tB=0 | bias=1:\n    backend=gemv: count=20 | total=2.00ms | avg=0.1ms\n"
        "  op=matmul | batch=1 | m=1 | n=500 | k=64 | tA=0 | tB=1:\n    backend=mlx: count=10 | total=4.00ms | avg=0.4ms\n"
        "  op=matmul | batch=1 | m=1 | n=? | k=64 | tA=? | tB=? | loader=q9 | n0=4 | n1=4:\n    backend=x: count=10 | total=1.00ms | avg=0.1ms\n"
    )
    choices = [word for name in ("recorded", "best", "tuned", "m1_optimized_v6", "gemv/baseline") for word in ("--choice", name)]
    assert (
        cli.main(["step", "sizes.md", *choices, "--iters", "3", *QUICK, "--backends", "gemv,mlx,m1_optimized_v6", "--json", "step.json"])
        == 0
    )
    data, text = json.loads(Path("step.json").read_text()), capsys.readouterr().out
    assert data["steps"] == 10 and [c["calls"] for c in data["calls"]] == [3, 2, 1]
    by_name = {p["name"]: p for p in data["policies"]}
    assert [v.split("/")[0] for v in by_name["recorded"]["variants"]] == ["mlx", "gemv", "mlx"]
    assert [v.split("/")[0] for v in by_name["m1_optimized_v6"]["variants"]] == ["m1_optimized_v6"] * 3
    assert by_name["gemv/baseline"]["variants"] == [None, "gemv/baseline", None] and by_name["gemv/baseline"]["calls"] == 2
    for p in data["policies"]:
        assert len(p["host_ms"]) == 3 and p["wrong"] == []
        sizes_of = [2 * (64 + 64 * 64 + 64), 2 * (33 + 33 * 96 + 96 + 96), 2 * (64 + 64 * 500 + 500)]
        assert p["bytes"] == sum(c * b for c, b, v in zip((3, 2, 1), sizes_of, p["variants"], strict=True) if v)
        if p["shares"][1] is not None:
            assert sum(s or 0 for s in p["shares"]) == pytest.approx(1)
    assert "left out: op=matmul | batch=1 | m=1 | n=?" in text and "10.0% of the profile's matmul time" in text
    assert cli.main(["step", "sizes.md", "--choice", "best", "--results", "none.json"]) == 2
    assert cli.main(["step", "--spec", "m=3 n=4 k=4", "--choice", "gemv/baseline"]) == 2
    assert "--choice gemv/baseline: it runs no call of the step" in capsys.readouterr().err
    assert cli.main(["step", "sizes.md", "--choice", "nobody"]) == 2
    assert "no family 'nobody'" in capsys.readouterr().err
    assert cli.main(["step", "sizes.md", "--memory", "0.00001"]) == 2
    assert "--memory or --shapes changes that" in capsys.readouterr().err


@pytest.mark.needs("simdgroup_matrix")
def test_each_call_of_a_step_has_weights_of_its_own(device: metalmm.Device) -> None:
    plan = step.plan_of(sizes.from_specs(["n=64 k=64 nt calls=5", "m=2 n=32 k=64 nn calls=2"]), None)
    weights = step._Weights(device, plan, 0)
    addresses = [w.device_address for calls in weights.calls for w in calls]
    assert len(set(addresses)) == 7
    policy = step.policy_of("gemm_tiled", plan, device, {})
    batch, order = step._record(device, plan, weights, policy)
    assert len(batch) == 7 and order == [0, 1, 0, 0, 0, 1, 0]
    with batch:
        pass
    assert step._wrong(device, plan, weights, policy) == []


# -- the page -------------------------------------------------------------------------------------------------------------

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def a_page(tmp_path: Path) -> str:
    """Of two runs, one of them of another device, and a step, with everything long in it."""
    bench(*SMALL, "--spec", "m=1 n=64 k=65 nn batch=14 alpha=0.125 calls=24", *FEW, name="one.json")
    _, data = bench(*SMALL, *FEW, name="two.json")
    data["environment"].update(gpu="Apple M9 Ultra <Max> & Co", device="metal", note=None)
    data["shapes"][0]["results"][0].update(failed="a very_long_reason_without_a_space_" * 20)
    results.write_json("two.json", data)
    assert cli.main(["step", *SMALL, "--choice", "best", "--choice", "tuned", "--iters", "3", *FEW, *QUICK, "--json", "step.json"]) == 0
    assert cli.main(["report", "one.json", "two.json", "step.json", "-o", "page.html"]) == 0
    return Path("page.html").read_text()


def test_the_page_needs_nothing_else(tmp_path: Path) -> None:
    text = a_page(tmp_path)
    assert "http" not in re.sub(r"<title>.*?</title>", "", text) and "<script" not in text and "<link" not in text
    assert "Apple M9 Ultra &lt;Max&gt; &amp; Co" in text and "<Max>" not in text
    for word in (
        "The step: 26 matmuls",
        "Winners",
        "Variants by shape: one",
        "Wrong or failed: two",
        "prefers-color-scheme: dark",
        "m1_optimized",
    ):
        assert word in text, word


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium (Debian: chromium); the page's layout was NOT tested")
def test_the_page_in_a_browser(tmp_path: Path) -> None:
    """No horizontal scroll, and nothing that is cut off, wide and narrow."""
    text = a_page(tmp_path)
    frames = "".join(
        f'<iframe id="w{w}" style="width:{w}px;height:900px;border:0" srcdoc="{html.escape(text)}"></iframe>' for w in (1280, 390)
    )
    script = """<script>onload = () => { for (const f of document.querySelectorAll('iframe')) { const d = f.contentDocument, r = d.documentElement;
      const wide = [...d.querySelectorAll('main *')].filter(e => !e.closest('.scroll') && e.getBoundingClientRect().right > r.clientWidth + 0.5);
      document.body.append(`${f.id}: ${r.scrollWidth} of ${r.clientWidth}, ${wide.length} stick out ${wide.slice(0, 3).map(e => e.className)}, h1 ${d.querySelectorAll('h1').length};`); } }</script>"""
    Path("frames.html").write_text(f"<!doctype html><meta charset=utf-8><body>{frames}{script}</body>")
    assert CHROMIUM
    done = subprocess.run(
        [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--window-size=1800,1000", f"--user-data-dir={tmp_path}/chromium", "--virtual-time-budget=5000", "--dump-dom", f"file://{tmp_path}/frames.html"],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    for width in (1280, 390):
        found = re.search(rf"w{width}: (\d+) of (\d+), (\d+) stick out (\S*), h1 (\d)", done.stdout)
        assert found, done.stderr[-2000:]
        assert (int(found[1]), int(found[3]), found[5]) == (int(found[2]), 0, "1"), found[0]


# -- frameworks, explain --------------------------------------------------------------------------------------------------


def test_frameworks_has_the_rows_of_the_table() -> None:
    counts: dict[str, int] = {}
    for row in frameworks.ROWS:
        counts[row.operation] = counts.get(row.operation, 0) + 1
    assert counts == {"Argmax": 4, "BCE": 4, "Concat": 4, "Conv1d": 4, "Conv2d": 5, "Gather": 6, "LeakyReLU": 2, "Linear": 5, "MatMul": 6, "PReLU": 2, "ReLU": 2, "Scatter": 6, "ScatterSum": 6, "ScatterMax": 6, "SeLU": 2, "Sigmoid": 2, "Softmax": 6, "Softplus": 2, "Sort": 3, "Sum": 4, "SumAll": 4}  # fmt: skip
    assert {row.text for row in frameworks.ROWS} >= {
        "Linear / dim=100x1024x32 dim=32x1024 dim=1024",
        "Softmax / dim=64x1000000 axi=-1",
        "Gather / dim=64x256 dim=10",
        "SumAll / dim=1000000",
    }


def test_frameworks_measures_our_matmul_and_skips_what_is_too_large(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        cli.main(
            ["frameworks", "--only", "metalmm", "--operations", "matmul,linear,relu", "--time", "0", "--memory", "0.1", "--json", "f.json"]
        )
        == 0
    )
    data, text = json.loads(Path("f.json").read_text()), capsys.readouterr().out
    assert list(data["rows"]["MatMul / dim=32x1x1000 dim=32x1000x128"]) == ["metalmm"]
    assert data["rows"]["MatMul / dim=32x1x1000 dim=32x1000x128"]["metalmm"] > 0
    assert data["rows"]["ReLU / dim=128x16x1024"]["metalmm"] is None
    assert "13.1 GB of 0.1 GB that are allowed" in data["skipped"]["MatMul / dim=1000000x64 dim=64x1024"]
    assert "Detailed benchmark:" in text and "Average benchmark:" in text
    assert cli.main(["frameworks", "--only", "abacus"]) == 2 and cli.main(["frameworks", "--operations", "Mat"]) == 2


@pytest.mark.needs("simdgroup_matrix")
def test_our_matmuls_of_the_table_are_right() -> None:
    ours = frameworks.Metalmm("metalmm", DEVICE)
    for row in (
        frameworks.Row("MatMul", ((6, 1, 50), (6, 50, 12))),
        frameworks.Row("MatMul", ((6, 4, 50), (50, 12))),
        frameworks.Row("Linear", ((3, 5, 20), (20, 8), (8,))),
    ):
        operands = frameworks.draw(row, 0)
        call = ours.call(row, operands)
        assert call
        wanted = operands[0].astype(np.float64) @ operands[1] + (operands[2] if len(operands) > 2 else 0)
        np.testing.assert_allclose(np.asarray(call()).reshape(wanted.shape), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("row", [r for r in frameworks.ROWS if r.bytes < 4e7], ids=lambda r: r.text)
def test_torch_runs_the_rows(row: frameworks.Row) -> None:
    pytest.importorskip("torch")
    if DEVICE != "cpu":
        pytest.skip("torch's own matter, once is enough")
    call = frameworks.Torch("cpu", "cpu").call(row, frameworks.draw(row, 0))
    assert call and call() is not None


def test_explain_says_what_is_in_flight(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The figures of shared/reference/apple_gpu.md, on a device whose own memory nobody measured: a thread a column with four scalars keeps 7 KB in flight at n=896."""
    monkeypatch.setattr(type(backends.get(DEVICE)), "memory_gbps", lambda self, device: None)
    for name, kilobytes, keeps in (("m1_optimized_v2/nt_bn64_col", 7.2, False), ("m1_optimized_v6/nt_simd_c4_s1_tg128", 917.5, True)):
        assert cli.main(["explain", name, "--spec", "n=896 k=4864 nt", "--json", "e.json"]) == 0
        text, data = capsys.readouterr().out, json.loads(Path("e.json").read_text())["loads"]
        assert f"{kilobytes} KB over the whole GPU" in text and ("CANNOT KEEP A GPU'S MEMORY BUSY" in text) != keeps
        assert data["keeps_memory_busy"] is keeps and data["needed"] == 71000.0
    spec = metalmm.MatmulSpec(1, 896, 4864, transpose_b=True)
    assert manifest.get("m1_optimized_v2/nt_bn64_col").loads(spec) == (1216, 8, 7168)
    assert manifest.get("m1_optimized_v5/nt_ultra_tiny_single_tg32").loads(spec) == (8512, 32, 1024)
    assert manifest.get("blas/baseline").loads(spec) is None
    fused = functools.partial(metalmm.MatmulSpec, 1, 896, 4864, transpose_b=True, also_n=(896,))
    assert manifest.get("fused/nt_fused2_l8_c1_s1_d7_x_tg320").loads(fused()) == (11, 112, 1648640)  # 23 threadgroups for each matrix
    assert manifest.get("fused/nt_swiglu_l8_c1_s1_d14_x_tg128").loads(fused(swiglu=True)) == (6, 448, 3211264)  # of both matrices


def test_every_kernel_of_ours_says_what_is_in_flight() -> None:
    assert [str(v) for v in metalmm.variants() if not v.flight and not v.library] == []


def test_commands_without_their_library(tmp_path: Path) -> None:
    code = "import sys; sys.modules['rich'] = None\nimport metalmm.cli as c\nsys.exit(c.main(sys.argv[1:]))"
    for words, status in ((["variants", "--family", "gemv"], 0), (["bench", "--spec", "n=8 k=8"], 2)):
        done = subprocess.run(
            [sys.executable, "-c", code, *words], capture_output=True, text=True, env={**os.environ, "METALMM_DEVICE": "cpu"}
        )
        assert done.returncode == status, done.stderr
        assert status == 0 or "pip install 'metalmm[cli]'" in done.stderr


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0 and metalmm.__version__ in capsys.readouterr().out
    assert cli.main(["--help"]) == 0
    commands = capsys.readouterr().out
    for name in ("bench", "step", "tune", "compare", "profile", "frameworks", "report", "variants", "explain"):
        assert name in commands
        assert cli.main([name, "--help"]) == 0
        text = capsys.readouterr().out
        assert all(word in text for word in ("--manifest", "--device", "--json")) or name == "profile"
    assert cli.main([]) == 2 and cli.main(["nothing"]) == 2


def test_page_numbers() -> None:
    assert [page.percent(x) for x in (None, 0.012, 0.1, 2.5)] == ["", "1.2%", "10%", "250%"]


@pytest.mark.skipif(DEVICE != "cpu", reason="another process, without the fake")
def test_the_walk_of_the_documentation(tmp_path: Path) -> None:
    """Every block of docs/decide.md, in its order, on a small log."""
    from test_profile import event, written

    shapes = [
        {"m": "1", "n": "64", "k": "96", "tA": "0", "tB": "1"},
        {"m": "1", "n": "96", "k": "64", "tA": "0", "tB": "0", "bias": "1"},
        {"m": "1", "k": "64", "n0": "4", "n1": "4"},
    ]
    events = []
    for i in range(30):
        pairs = {"op": "matmul", "backend": "mlx", "batch": "1", **shapes[i % 3]}
        events.append(event("GpuOpCompleted", op_name="x/matmul/mlx", backend="mlx", duration_us=100 + i, data=pairs))
    written(tmp_path / "run.jsonl", events)
    blocks = re.findall(r"```sh\n(.*?)```", (ROOT / "docs" / "decide.md").read_text(), re.S)
    commands = [line for block in blocks for line in block.splitlines()]
    assert [line.split()[1] for line in commands] == ["profile", "profile", "bench", "tune", "step", "compare", "report"]
    for line in commands:
        words = line.split()[1:]
        quick = [*QUICK, "--backends", "gemv,m1_optimized,m1_optimized_v6,mlx"] if words[0] in ("bench", "tune", "step") else []
        run = started(*words, *quick)
        out, err = run.communicate(timeout=200)
        assert run.returncode == 0, (line, out, err)
    assert "The step: 3 matmuls" in Path("page.html").read_text()


# -- what an attack found --------------------------------------------------------------------------------------------------


def test_an_interrupted_run_is_not_overwritten(capsys: pytest.CaptureFixture[str]) -> None:
    _, data = bench("--spec", "n=64 k=64 nt", "--backends", "gemv,mlx")
    data["planned"] = 2
    results.write_json("run.json", data)
    assert bench("--spec", "n=64 k=64 nt", "--backends", "gemv,mlx")[0] == 2
    assert "--resume goes on with it" in capsys.readouterr().err
    assert json.loads(Path("run.json").read_text()) == data


def test_a_shape_whose_kernel_changed_is_not_resumed() -> None:
    spec = ["--spec", "n=64 k=64 nt", "--backends", "m1_optimized_v5"]
    _, data = bench(*spec)
    assert bench(*spec, "--resume")[1]["shapes"] == data["shapes"], "nothing was left to do"
    data["shapes"][0]["results"][0]["kernel_sha256"] = "0" * 64
    results.write_json("run.json", data)
    assert bench(*spec, "--resume")[1]["shapes"][0]["results"][0]["gpu_ms"] != data["shapes"][0]["results"][0]["gpu_ms"]


def test_outputs_replace_nothing_of_another_kind(tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").write_text('{"event": {"type": "Odd"}}\n')
    (tmp_path / "t.json").write_text('{"schema": "metalmm-tuning", "version": 1, "devices": {}}')
    for words in (
        ["profile", "sizes", "log.jsonl", "-o", "log.jsonl"],
        ["bench", "--spec", "n=4 k=4", "--json", "t.json"],
        ["variants", "--json", "log.jsonl"],
        ["tune", "--spec", "n=4 k=4", "-o", "log.jsonl"],
        ["tune", "--spec", "n=4 k=4", "-o", "t.json", "--json", "t.json"],
        ["report", "t.json", "-o", "t.json"],
    ):
        before = [(tmp_path / name).read_text() for name in ("log.jsonl", "t.json")]
        assert cli.main(words) == 2, words
        assert [(tmp_path / name).read_text() for name in ("log.jsonl", "t.json")] == before, words
    (tmp_path / "link").symlink_to("target")
    results.write_text("link", "x")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "target").read_text() == "x"
    results.write_text("/dev/null", "x")
    assert not Path("/dev/null").is_file()


def test_choices_of_processes_that_tune_at_once_are_all_kept() -> None:
    code = (
        "import sys; from pathlib import Path; from metalmm import tuning, MatmulSpec\n"
        "for i in range(15): tuning.write(Path('t.json'), 'd', [tuning.Choice(tuning.Key.of(MatmulSpec(1, 1 + i, int(sys.argv[1]))), 'x/y', None, 1.0, 't')])"
    )
    runs = [subprocess.Popen([sys.executable, "-c", code, str(k)]) for k in (1, 2)]
    assert [run.wait(timeout=60) for run in runs] == [0, 0]
    assert len(tuning.read(Path("t.json"))["d"]) == 30


def test_sizes_and_logs_from_a_pipe(tmp_path: Path) -> None:
    import threading

    from test_profile import drawn_events, written

    for name, raw in (
        ("sizes", sizes.DEFAULT.read_bytes()),
        ("log", written(tmp_path / "x.jsonl", drawn_events(1, 900)).read_bytes()),
        ("bom", b"\xef\xbb\xbf" + sizes.DEFAULT.read_bytes()),
    ):
        (tmp_path / name).write_bytes(raw)
        os.mkfifo(tmp_path / f"{name}.pipe")
        writer = threading.Thread(target=(tmp_path / f"{name}.pipe").write_bytes, args=(raw,))
        writer.start()
        assert sizes.load(tmp_path / f"{name}.pipe") == sizes.load(tmp_path / name)
        writer.join()


def test_a_shape_that_stands_there_twice_is_one() -> None:
    row = "op=matmul | batch=1 | m=1 | n=8 | k=4 | tA=0 | tB=1:\n  backend=mlx: count=3 | total=1.50ms | avg=0.5ms\n"
    found = sizes.parse(row * 3 + row.replace("n=8", "n=9"))
    assert [(s.n, s.calls, s.total_ms) for s in found.shapes] == [(8, 9, 4.5), (9, 3, 1.5)]
    sizes.keep_top(found, 1)
    assert [s.n for s in found.shapes] == [8] and found.left_out[0].calls == 3


def test_steps_are_counted_by_a_head_that_cannot_be_run() -> None:
    """As the seeds' q8 profile, of a format that no variant takes."""
    rows = [
        ("n=896 | k=4864 | tA=0 | tB=1", 3480),
        ("n=? | k=896 | tA=? | tB=? | loader=q9nk_split | n0=4864 | n1=4864", 3480),
        ("n=151936 | k=896 | tA=0 | tB=0 | loader=q9nk_split", 144),
    ]
    found = sizes.parse("".join(f"op=matmul | batch=1 | m=1 | {row}:\n backend=x: count={count} | total=9.0ms\n" for row, count in rows))
    plan = step.plan_of(found, None)
    assert plan.steps == 144 and [(s.k, count) for s, count in plan.calls] == [(4864, 24)] and len(plan.left_out) == 2


def test_odd_fused_shapes_are_left_out() -> None:
    head = "op=matmul | batch=1 | m=1 | n=? | k=96 | tA=0 | tB=1 | "
    for rest, why in (
        ("n0=8 | n1=8 | alpha=0.5", "alpha"),
        ("n0=? | n1=8", "does not say its n0"),
        ("n0=1 | n1=2 | nq=3 | nk=4", "two or three"),
    ):
        found = sizes.parse(f"{head}{rest}:\n backend=x: count=3 | total=9.0ms\n")
        assert not found.shapes and why in found.left_out[0].why, rest
    assert sizes.parse(f"{head.replace('k=96', 'k=?')}n0=8 | n1=8:\n").left_out[0].columns == 16


def test_a_trace_names_stored_and_fused(tmp_path: Path, device: metalmm.Device) -> None:
    w, a = np.random.default_rng(0).standard_normal((16, 64)).astype(np.float16), np.ones((1, 64), np.float16)
    q = [metalmm.quantize(w, "affine4", group=32)] * 2
    with metalmm.trace(tmp_path / "t.jsonl"):
        metalmm.matmul("auto", a, metalmm.quantize(w, "q8_0", layout="canonical"), device=device)
        metalmm.matmul_fused("auto", a, q, activation="swiglu", device=device)
        metalmm.matmul_fused("auto", a, [w, w[:4], w[:4]], device=device)
    found = [(s.n, s.also_n, s.storage, s.swiglu) for s in sizes.load(tmp_path / "t.jsonl").shapes]
    assert sorted(found) == [(16, (), "q8_0:canonical", False), (16, (4, 4), "dense", False), (16, (16,), "affine4:32", True)]


def test_the_quantized_profile_of_the_seeds_can_be_run(device: metalmm.Device) -> None:
    """The head is quantized, gate and up and q, k and v are fused."""
    rows = [
        ("gemv_q8_fused2", "n=? | k=96 | tA=? | tB=? | n0=64 | n1=64", 240),
        ("gemv_qkv_fused", "n=? | k=96 | tA=? | tB=? | nq=64 | nk=16 | nv=16", 240),
        ("mlx", "n=333 | k=96 | tA=0 | tB=0 | loader=q8nk_split", 10),
    ]
    found = sizes.parse(
        "".join(f"op=matmul | batch=1 | m=1 | {row}:\n backend={b}: count={count} | total=9.0ms\n" for b, row, count in rows)
    )
    assert [(s.n, s.also_n, s.storage, s.transpose_b) for s in found.shapes] == [
        (64, (64,), "q8_0", True),
        (64, (16, 16), "q8_0", True),
        (333, (), "q8_0", True),
    ]
    plan = step.plan_of(found, None)
    assert plan.steps == 10 and [count for _, count in plan.calls] == [24, 24, 1] and not plan.left_out
    policies = [step.policy_of(name, plan, device, {}) for name in ("recorded", "tuned", "q8")]
    assert all(v and v.family == "q8" for p in policies for v in p.variants), "what stands for the engine's own kernels, too"
    weights = step._Weights(device, plan, 0)
    for policy in policies:
        assert step._wrong(device, plan, weights, policy) == []
        batch, order = step._record(device, plan, weights, policy)
        assert len(order) == 49
        batch.record().replay()


@pytest.mark.parametrize(
    "line",
    [
        "op=x | batch=1 | m=1 | n=2 | k=3 | tA=0 | tB=0:\n  backend=a: count=1.2.3 | total=. | avg=9e9",
        "op=x | batch=1 | m=1 | n=2 | k=3 | tA=0 | tB=0:\n  backend=a: count=" + "9" * 400,
    ],
)
def test_odd_figures_of_a_sizes_file(line: str) -> None:
    assert sizes.parse(line).shapes[0].n == 2


def test_odd_things_in_a_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from test_profile import event, written

    pairs = {"op": "matmul", "backend": "x", "batch": "1", "m": "1", "n": "8", "k": "4", "tA": "0", "tB": "1"}
    events = [event("GpuOpCompleted", op_name="k", duration_us=us) for us in (10**400, -5, 1.7e308, 3)]
    events += [event("GpuOpCompleted", op_name="\ud800", duration_us=4), event("\ud800")]
    events += [
        event("GpuOpCompleted", op_name="m", duration_us=5, data={**pairs, **odd})
        for odd in ({}, {"m": 1.0}, {"n": "8\nop=evil"}, {"k": "x"})
    ]
    written(tmp_path / "x.jsonl", events)
    assert cli.main(["profile", "analyze", "x.jsonl"]) == 0
    out = capsys.readouterr()
    assert "k: count=1 | total=0.00ms" in out.out and "3 of 10 lines could not be read" in out.err
    found = sizes.load("x.jsonl")
    assert len(found.shapes) == 1 and len(found.left_out) == 3
    (tmp_path / "junk").write_text("junk\n")
    assert cli.main(["profile", "analyze", "junk"]) == 2 and cli.main(["profile", "sizes", "junk", "-o", "s.md"]) == 2
    assert not Path("s.md").exists()


DAMAGE: list[tuple[tuple[Any, ...], Any]] = [
    (("arguments",), []), (("environment",), 3), (("arguments", "bad_rel"), "None"), (("shapes", 0, "rounds"), "x"), (("shapes", 0, "drift"), "x"), (("planned",), None),
    (("shapes", 0, "weight_copies"), {}), (("shapes", 0, "results", 0, "gpu_ms"), ["x"]), (("shapes", 0, "results", 0, "max_rel"), "x"), (("shapes", 0, "shape", "n"), "x"), (("shapes", 0, "results"), 5),
]  # fmt: skip


@pytest.mark.parametrize(("place", "value"), DAMAGE, ids=lambda x: str(x)[:40])
def test_damaged_results_are_named(place: tuple[Any, ...], value: Any, capsys: pytest.CaptureFixture[str]) -> None:
    run = results.Run({"device": "x"}, {"rounds": 1}, [a_run(made("f/a", *[1.0] * 9))], planned=1)
    data = run.as_json()
    at = data
    for key in place[:-1]:
        at = at[key]
    at[place[-1]] = value
    Path("x.json").write_text(json.dumps(data))
    for words in (["compare", "x.json", "x.json"], ["report", "x.json", "-o", "p.html"]):
        assert cli.main(words) in (0, 2), words
        assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 0),
        ("n", -4),
        ("n", "x"),
        ("n", None),
        ("k", 10**400),
        ("batch", "x"),
        ("n", 80.5),
        ("layout", "xx"),
        ("layout", ""),
        ("dtype", "int8"),
    ],
)
def test_damaged_tunings_are_named(name: str, value: Any) -> None:
    choice = tuning.Choice(tuning.Key(1, 8, 8, 1, "nt", False, False, False, "float16"), "x/y", None, 1.0, "t").as_json()
    choice["key"][name] = value
    Path("t.json").write_text(json.dumps({"schema": "metalmm-tuning", "version": 1, "devices": {"d": [choice]}}))
    with pytest.raises(tuning.TuningError, match=r"t\.json"):
        metalmm.load_tuning("t.json")
    os.mkfifo("pipe")
    with pytest.raises(tuning.TuningError, match="no file"):
        metalmm.load_tuning("pipe")


def test_auto_while_its_choice_comes_and_goes(tmp_path: Path, device: metalmm.Device) -> None:
    import threading

    source = manifest.get("m1_optimized_v4/nt_tiny_bn32_tg64").source
    (tmp_path / "m.toml").write_text(
        f'format = 2\n[kernels.columns_direct]\nsource = "{source}"\ntemplate = ["type", "bn", "threads", "unroll"]\ntile = [1, "bn"]\n'
        'supports = { m = 1, layouts = ["nt"] }\n[families.mine.variants]\none = { kernel = "columns_direct", bn = 32, unroll = 4, threads = 32 }\n'
    )
    metalmm.load_variants(tmp_path / "m.toml")
    key = tuning.Key.of(metalmm.MatmulSpec(1, 64, 64, transpose_b=True))
    tuning.write(
        Path("t.json"),
        tuning.device_key(device),
        [tuning.Choice(key, "mine/one", manifest.kernel_sha256("mine/one", tuning.spec_of(key)), 1.0, "t")],
    )
    metalmm.load_tuning("t.json")
    x, w, over, problems = np.ones((1, 64), np.float16), np.ones((64, 64), np.float16), threading.Event(), list[BaseException]()

    def work() -> None:
        try:
            while not over.is_set():
                assert metalmm.matmul("auto", x, w, transpose_b=True, device=device)[0, 0] == 64
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for t in threads:
        t.start()
    for _ in range(40):
        manifest.unload(tmp_path / "m.toml")
        metalmm.load_variants(tmp_path / "m.toml")
    over.set()
    for t in threads:
        t.join()
    assert problems == []


def test_a_space_that_is_too_large_or_divides_by_zero(tmp_path: Path) -> None:
    shape = sizes.from_specs(["n=8 k=8 nt"]).shapes[0]
    for search_text, candidates in (("a = [1, 2], b = BIG, c = BIG", None), ('a = [1, 2], where = ["m % (a - 2) == 0"]', 1)):
        text = search_text.replace("BIG", str(list(range(1, 2999))))
        (tmp_path / "m.toml").write_text(f'format = 2\n[kernels.k]\ntemplate = ["a", "b", "c"]\nsearch = {{ {text} }}\n')
        if candidates is None:
            with pytest.raises(search.SearchError, match="the limit is 1000000"):
                search.Space([tmp_path / "m.toml"], shape)
        else:
            assert len(search.Space([tmp_path / "m.toml"], shape).candidates["k"]) == candidates
    with pytest.raises(ValueError):
        manifest.evaluate("-" * 100_000 + "1", {})


def test_steps_are_compared(capsys: pytest.CaptureFixture[str]) -> None:
    policies = [
        {"name": name, "device_ms": [t * f for f in (1, 1.01, 0.99) * 5], "host_ms": [t * f for f in (1, 1.01, 0.99) * 5], "wrong": []}
        for name, t in (("best", 4.0), ("tuned", 5.0))
    ]
    results.write_json("old.json", {"schema": "metalmm-step", "version": 1, "environment": {}, "policies": policies})
    policies[1]["device_ms"] = [7.0] * 15
    results.write_json("new.json", {"schema": "metalmm-step", "version": 1, "environment": {}, "policies": policies})
    assert cli.main(["compare", "old.json", "old.json"]) == 0 and cli.main(["compare", "old.json", "new.json"]) == 1
    assert re.search(r"slower +the step +tuned +5ms +7ms +\+40.0%", capsys.readouterr().out)


def test_a_variant_that_was_stopped_gets_another_round_if_it_is_near() -> None:
    near, far = made("f/near", 1.2, stopped="early"), made("f/far", 9.0, stopped="early")
    first = a_run(made("f/a", *[1.0] * 9), near, far)
    assert first.survivors() == ["f/a", "f/near"]
    first.merge(a_run(made("f/a", *[1.0] * 9), made("f/near", *[0.9] * 9)))
    decision = results.decide(first)
    assert decision and decision.winner is near and near.gpu == [0.9] * 9 and not near.stopped


def test_a_narrow_terminal_gets_lines(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from metalmm import terminal

    for width, wanted in ((200, "a  "), (30, "first: a_long_name_that_has_no_place; second: 12")):
        real = terminal.console
        monkeypatch.setattr(terminal, "console", lambda file=None, width=width, real=real: _sized(real(file), width))
        terminal.table(("first", "second"), [["a_long_name_that_has_no_place", "12"]])
        monkeypatch.setattr(terminal, "console", real)
        assert wanted.strip() in capsys.readouterr().out


def _sized(console: Any, width: int) -> Any:
    console.width = width
    return console


def test_who_tunes_waits_for_who_tunes() -> None:
    import threading

    choice = tuning.Choice(tuning.Key.of(metalmm.MatmulSpec(1, 8, 8)), "x/y", None, 1.0, "t")
    writer = threading.Thread(target=tuning.write, args=(Path("t.json"), "d", [choice]))
    with tuning._alone(Path("t.json")):
        writer.start()
        writer.join(0.3)
        assert writer.is_alive() and not Path("t.json").exists()
    writer.join()
    assert tuning.read(Path("t.json"))["d"] == [choice]


def test_a_result_that_is_wrong_later_is_seen(device: metalmm.Device) -> None:
    inputs = runner.Inputs(device, sizes.from_specs(["n=64 k=64 nt"]).shapes[0], 0, 1)
    turns = runner._Turns(device, inputs, Rule())
    one = runner._Contender("m1_optimized_v6/nt_simd_c4_s1_tg64", [])
    one.calls = [device.prepare(one.result.variant, inputs.a, inputs.weights[0], out=inputs.out, **inputs.options)]
    for _ in range(3):
        turns.run(one, counted=True)
    assert not one.result.wrong and not one.done
    changed = np.array(inputs.weights[0])
    changed[5] += 1
    inputs.weights[0].write(changed)
    turns.run(one, counted=True)
    assert "1 of 64 elements; first at (0, 5)" in one.result.wrong and one.done
