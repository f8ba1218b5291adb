"""From shapes to a decision: bench by its rule, broken and interrupted runs, tune and "auto", the step, comparisons, the page."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema
import metalmm
import numpy as np
import pytest
from metalmm import cli, files, manifest
from metalmm.bench import check, command, compare, results, runner, sizes, statistics
from metalmm.bench.report import Result
from metalmm.bench.runner import Rule, ShapeRun
from support.decide import FEW, QUICK, SMALL, a_run, bench, made, started
from support.here import DEVICE, ROOT


@pytest.mark.parametrize("count", [6, 9, 20, 55, 200])
def test_the_interval_holds_the_median_as_often_as_it_says(count: int) -> None:
    draw = np.random.default_rng(count)
    inside = 0
    for _ in range(2000):
        m = statistics.median_of(list(draw.exponential(size=count)))
        inside += m.low <= np.log(2) <= m.high
    assert inside / 2000 >= 0.94  # 95% with three standard deviations of the count


def test_few_samples_say_little() -> None:
    assert [statistics._rank(count) for count in (201, 400, 10_000)] == [86, 180, 4902]  # by the binomial distribution 86, 180, 4902
    assert runner._apart(2.0, 1.0) == runner._apart(1.0, 2.0) == 1.0 and runner._apart(0.0, 1.0) == 0.0
    steady, wild = Result("f/a", [], [1.0] * 8), Result("f/a", [], [1.0, 2.0] * 4)
    rule = Rule(least=0.02, most=0.15)
    assert (
        rule.is_enough(steady, 0.03) and not rule.is_enough(steady, 0.01) and not rule.is_enough(wild, 0.03) and rule.is_enough(wild, 0.2)
    )
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
    first, again = a_run(made("f/a", 2.0, 2.0), made("f/b", 5.0)), a_run(made("f/a", 3.0, 3.0))
    first.results[1].stopped = "slow"
    assert first.survivors() == ["f/a"]
    first.merge(again)
    assert first.results[0].gpu == [2.0, 2.0, 3.0, 3.0] and first.drift == first.noise == 0.5 and first.rounds == 2


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
    chosen = [manifest.get("gemv_nt_vec4/c4_tg64"), manifest.get("gemv_nt_vec4/c8_tg64")]
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


def test_of_many_passes_not_each_is_looked_at(device: metalmm.Device, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = list[int]()

    def is_enough(_: Rule, r: Result, __: float) -> bool:
        looks.append(len(r.cpu))
        return len(r.cpu) >= 40

    monkeypatch.setattr(Rule, "is_enough", is_enough)
    monkeypatch.setattr(runner._Turns, "take", lambda _, one: one.result.cpu.append(1.0))
    shape, chosen = sizes.from_specs(["n=64 k=64 nt"]).shapes[0], [manifest.get("gemv_nt_vec4/c4_tg64")]
    runner.run_shape(device, shape, chosen, rule=Rule(warmup=0), copies=1, seed=0, progress=runner.Progress(quiet=True))
    assert looks[:8] == [*range(1, 9)] and 40 <= looks[-1] < 46 and len(looks) < 20


def test_each_that_is_slow_is_stopped() -> None:
    nothing: Any = None
    turns = runner._Turns(nothing, nothing, Rule(slow=2.0))
    for ms in (1.0, 9.0, 1.5, 9.0):
        turns.contenders.append(runner._Contender("f/a", []))
        turns.contenders[-1].result.cpu += [ms] * 9
    turns.drop_slow(None)
    assert [c.done for c in turns.contenders] == [False, True, False, True]


def test_a_sample_is_one_call_where_nothing_is_replayed() -> None:
    added = list[str]()
    batch = SimpleNamespace(add=added.append, submit=lambda: None, wait=lambda: None, timing=SimpleNamespace(device=0.25))
    device: Any = SimpleNamespace(batch=lambda: batch, backend=SimpleNamespace(replays=0))
    turns, one = runner._Turns(device, device, Rule()), runner._Contender("f/a", ["first", "second"])
    assert [turns.timed(one)[1] for _ in range(3)] == [0.25] * 3
    assert added == ["second", "first", "second"], "never the copy that was used before"


def test_times_are_kept_in_milliseconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner._Turns, "timed", lambda *_: (0.5, 0.25))
    nothing: Any = None
    inputs: Any = SimpleNamespace(poison=lambda: None, out=np.ones(1))
    turns, one = runner._Turns(nothing, inputs, Rule()), runner._Contender("f/a", [])
    one.good = inputs.out.tobytes()
    turns.run(one, counted=False)
    turns.run(one, counted=True)
    assert one.result.cpu == one.before == [500.0] and one.result.gpu == one.before_gpu == [250.0]


@pytest.fixture
def bad_manifest(tmp_path: Path) -> Path:
    """One that does not compile, one that is wrong, one that writes outside, one that never ends; two that only debug mode sees: a race that
    leaves the result right, and a store that would end the process."""
    head = '#include <metal_stdlib>\n#include "params.h"\nusing namespace metal;\n'
    signature = "const device half* A [[buffer(0)]], const device half* B [[buffer(1)]], device half* D [[buffer(2)]], constant MatmulParams& p [[buffer(5)]], uint i [[thread_position_in_grid]]"
    bodies = {
        "broken": "this is no MSL;",
        "wrong": "if (i < p.n) D[i] = 1.0h;",
        "outside": "D[i + p.n * 8] = 0.0h;",
        "endless": "volatile device half* d = D; while (p.n > 0) d[0] = 0.0h;",
        "racing": "threadgroup float last[1]; float s = 0; for (uint k = 0; k < p.k; k++) s += float(A[k]) * float(B[i * p.ldb + k]);"
        " last[0] = s; D[i] = half(s);",
        "wild": "threadgroup half t[32]; threadgroup half* far = t; for (int j = -2000; j < 0; j++) far[j] = 1.0h; D[i] = t[0];",
    }
    rows = []
    text = head
    for name, body in bodies.items():
        (tmp_path / f"{name}.metal").write_text(f"{head}template <int T>\nkernel void {name}({signature}) {{ {body} }}\n")
        rows.append(f'[kernels.{name}]\ntemplate = ["threads"]\ntile = [1, 32]\nsupports = {{ m = 1, layouts = ["nt"] }}\n')
    for family, names in (("bad", list(bodies)[:4]), ("unsafe", list(bodies)[4:])):
        rows.append(f"[families.{family}.variants]\n" + "".join(f'{name} = {{ kernel = "{name}", threads = 32 }}\n' for name in names))
    (tmp_path / "bad.toml").write_text("format = 2\n" + "\n".join(rows))
    assert text == head
    return tmp_path / "bad.toml"


@pytest.mark.rest
@pytest.mark.skipif(DEVICE != "cpu", reason="a GPU has no guards, and an endless kernel ends where the system says")
@pytest.mark.parametrize("checks", [[], ["--no-check"]])
def test_bad_variants_are_lines_and_the_others_go_on(bad_manifest: Path, checks: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    families = ["--backends", "bad,unsafe,gemv_nt_vec4"]
    code, data = bench("--manifest", str(bad_manifest), "--spec", "n=64 k=64 nt", *families, "--timeout", "0.5", *checks)
    out = capsys.readouterr().out
    assert code == 1
    by_name = {r["variant"].split("/")[1]: r for r in data["shapes"][0]["results"]}
    assert "does not compile" in by_name["broken"]["failed"] or "no MSL" in by_name["broken"]["failed"] or by_name["broken"]["failed"]
    assert "64 of 64 elements" in by_name["wrong"]["wrong"]
    assert "past its end" in by_name["outside"]["failed"] or "outside" in by_name["outside"]["failed"]
    assert "0.5" in by_name["endless"]["failed"] or "seconds" in by_name["endless"]["failed"]
    assert checks or "a race: thread" in by_name["racing"]["failed"]
    # What writes over memory may stop where that memory is waited for.
    what = ("it ended the process (SIG", "it did not end within") if checks else ("a store of 2 bytes outside what is bound",)
    assert any(w in by_name["wild"]["failed"] for w in what)
    winner = data["shapes"][0]["winner"]  # unchecked, what races may be right and first
    assert winner.startswith("gemv_nt_vec4/") or (checks and winner == "unsafe/racing")
    assert out.count("bad/broken FAILED") == out.count("bad/wrong WRONG") == out.count("bad/endless FAILED") == 1
    own = [r for r in data["shapes"][0]["results"] if r["variant"].startswith(("bad/", "unsafe/"))]
    assert all(bool(r["checked"]) == (not checks) for r in own), "one's own variants are checked unless told otherwise"
    assert not any(r["checked"] for r in data["shapes"][0]["results"] if r not in own)


def test_a_check_sees_the_same_edges_on_fewer_columns() -> None:
    v = manifest.get("m1_optimized_v2/nt_bn64_col_vec4_bk128_tg128")
    small = check.reduced(v, sizes.from_specs(["n=151937 k=895 nt batch=30"]).shapes[0])
    assert (small.k, small.batch, small.n % 64) == (895, 2, 151937 % 64) and small.m * small.n * small.k * small.batch <= 1 << 24
    assert check.reduced(v, small) == small


@pytest.mark.rest
@pytest.mark.skipif(DEVICE != "cpu", reason="another process, without the fake")
def test_interrupted_and_resumed(tmp_path: Path) -> None:
    shapes = [word for n in (64, 128, 192) for word in ("--spec", f"n={n} k=64")]
    arguments = ["bench", "--json", "part.json", "--backends", "m1_optimized", *shapes]
    arguments += ["--most-time", "0.05", "--least-time", "0.05"]
    run = started(*arguments)
    for _ in range(10_000):
        time.sleep(0.03)
        with_shapes = Path("part.json").exists() and len(json.loads(Path("part.json").read_text())["shapes"]) >= 1
        if with_shapes or run.poll() is not None:
            break
    run.send_signal(signal.SIGINT)
    out, err = run.communicate(timeout=60)
    assert run.returncode == 130, err
    data = json.loads(Path("part.json").read_text())
    assert not data["complete"] and 1 <= len(data["shapes"]) <= 3
    assert data["shapes"][0]["winner"] in out and "--resume goes on" in err and "Traceback" not in err
    code = cli.main([*arguments, "--resume", "--most-time", "0.3"])
    assert code == 2, "another rule is another run"
    again = started(*arguments, "--resume")
    out, err = again.communicate(timeout=240)
    assert again.returncode == 0, err
    whole = json.loads(Path("part.json").read_text())
    assert whole["complete"] and len(whole["shapes"]) == 3 and whole["arguments"]["resumed"] == 1
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
        (["--spec", "n=4 k=4", "--least-time", "2", "--most-time", "1"], "the first at most the second"),
        (["--spec", "n=4 k=4", "--bad-rel", "nan"], "'nan' is no number above 0"),
        (["--spec", "n=4 k=4", "--bad-rel", "-1"], "'-1' is no number above 0"),
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
    assert (
        cli.main(["tune", "--spec", "n=4 k=4", "-o", "none/x.json"]) == 2 and "none/x.json: there is no folder" in capsys.readouterr().err
    )


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    target = tmp_path / "x.json"
    files.write_json(target, {"a": 1})
    with pytest.raises(TypeError):
        files.write_json(target, {"a": object()})
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
    code, data = bench("--spec", f"n=40 k=36 nt {dtype}", "--backends", "gemv_nt_vec4")
    assert code == 0 and data["shapes"][0]["shape"]["dtype"] == dtype


def slowed(data: dict[str, Any], variant: str, factor: float) -> dict[str, Any]:
    changed = json.loads(json.dumps(data))
    for s in changed["shapes"]:
        for r in [*s["results"], s["twin"]]:
            if r["variant"] == variant:
                r["gpu_ms"], r["cpu_ms"] = [t * factor for t in r["gpu_ms"]], [t * factor for t in r["cpu_ms"]]
    return changed


def test_compare_with_itself_and_with_a_slowed_down_run(capsys: pytest.CaptureFixture[str]) -> None:
    _, data = bench("--spec", "n=64 k=64 nt", "--backends", "gemv_nt_vec4")
    winner = data["shapes"][0]["winner"]
    for r in [*data["shapes"][0]["results"], data["shapes"][0]["twin"]]:  # a quiet machine: 1% apart, and the twins too
        r["gpu_ms"] = r["cpu_ms"] = [1.0 + 0.01 * (i % 3) for i in range(30)]
        r["stopped"] = ""
    data["shapes"][0]["drift"] = 0.0
    files.write_json("old.json", data)
    assert cli.main(["compare", "old.json", "old.json"]) == 0
    assert " same" in capsys.readouterr().out
    for factor, code, word in ((1.3, 1, "slower"), (0.7, 0, "faster"), (1.01, 0, "same")):
        files.write_json("new.json", slowed(data, winner, factor))
        assert cli.main(["compare", "old.json", "new.json", "--json", "c.json"]) == code
        change = next(c for c in json.loads(Path("c.json").read_text())["changes"] if c["variant"] == winner)
        assert change["verdict"] == word and change["new_ms"] == pytest.approx(factor * change["old_ms"], rel=0.02)
    broken = json.loads(json.dumps(data))
    broken["shapes"][0]["results"][0]["failed"] = "fell over"
    files.write_json("new.json", broken)
    assert cli.main(["compare", "old.json", "new.json"]) == 1
    assert "broke" in capsys.readouterr().out
    stopped = slowed(data, winner, 50.0)
    row = next(r for r in stopped["shapes"][0]["results"] if r["variant"] == winner)
    row.update(stopped="early", gpu_ms=row["gpu_ms"][:3], cpu_ms=row["cpu_ms"][:3])
    files.write_json("new.json", stopped)
    assert cli.main(["compare", "old.json", "new.json"]) == 1, "one that fell so far behind that it was stopped is slower"
    elsewhere = json.loads(json.dumps(data))
    for shape in elsewhere["shapes"]:
        shape["shape"]["k"] += 1
    files.write_json("new.json", elsewhere)
    assert cli.main(["compare", "old.json", "new.json"]) == 2
    assert "the runs share no shape: old.json has m=1" in capsys.readouterr().err


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
