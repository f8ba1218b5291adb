"""From shapes to a decision: bench by its rule, broken and interrupted runs, tune and "auto", the step, comparisons, the page."""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import metalmm
import numpy as np
import pytest
from metalmm import backends, cli, files, manifest, tuning
from metalmm.bench import frameworks, page, products, results, runner, sizes, step
from metalmm.bench.runner import Rule
from metalmm.expressions import evaluate
from metalmm.strategy import Strategy
from support.decide import QUICK, a_run, bench, made
from support.here import DEVICE, ROOT
from support.logs import drawn_events, event, written


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


def test_bce_is_of_probabilities_and_targets() -> None:
    odds, targets = frameworks.draw(frameworks.Row("BCE", ((1000,), (1000,))), 0)
    assert odds.dtype == targets.dtype == np.float32
    assert abs(np.median(odds) - 0.5) < 0.05 and 0 < odds.min() < 0.1 and 0.9 < odds.max() < 1
    assert set(targets) == {0, 1}


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


CONFIG = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 128, "intermediate_size": 96, "num_attention_heads": 2,
    "num_key_value_heads": 1, "num_hidden_layers": 1, "vocab_size": 70,
}  # fmt: skip


class Doubles:
    """Of each product twice."""

    name, version = "doubles", "1"

    def __init__(self) -> None:
        self.turns = 0

    def products(self, a: Any, b: Any, copies: int, times: int) -> frameworks.Products | None:
        if isinstance(b, metalmm.QuantizedArray):
            return None

        def turn() -> None:
            self.turns += 1

        return turn, lambda: 2 * a.astype(np.float32) @ b.astype(np.float32).T


@pytest.mark.rest
@pytest.mark.needs("simdgroup_matrix")
def test_a_models_products_in_each_framework(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours are right in every type and format; what gives another product has no time; a k without whole groups is told."""
    Path("config.json").write_text(json.dumps(CONFIG))
    doubles, ours = Doubles(), frameworks.Metalmm("metalmm", DEVICE)
    monkeypatch.setattr(frameworks, "installed", lambda device: ([ours, doubles], ["mlx: not installed"]))
    command = ["frameworks", "--model", "config.json", "--m", "1,3", "--time", "0"]
    assert cli.main([*command, "--json", "f.json"]) == 1
    data, text = json.loads(Path("f.json").read_text()), capsys.readouterr().out
    for stored in products.STORED:
        assert data["us"][f"3 x 70 x 128 bfloat16 {stored}"]["metalmm"] > 0
    assert not any("doubles" in row for row in data["us"].values()) and doubles.turns >= 2
    assert data["skipped"]["1 x 70 x 128 float16 dense on doubles"] == "another product: 1 of the largest result away"
    assert data["skipped"]["1 x 128 x 96 float16 affine4"] == "MLX's groups have 64 of k" and "not here: mlx: not installed" in text
    assert cli.main([*command, "--only", "metalmm"]) == 0 and cli.main([*command, "--operations", "MatMul"]) == 2
    assert cli.main(["frameworks", "--m", "4"]) == 2  # of no model
    assert cli.main([*command, "--memory", "0.000001"]) == 0 and "that are allowed (--memory)" in capsys.readouterr().out


@pytest.mark.parametrize("stored", products.STORED)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("library", ["mlx", "torch"])
def test_others_multiply_the_same(library: str, dtype: str, stored: str) -> None:
    pytest.importorskip(
        f"{library}.core" if library == "mlx" else library, reason=f"{library} is not installed: its products are NOT tested"
    )
    other: Any = frameworks.Mlx("mlx_cpu", "cpu", False) if library == "mlx" else frameworks.Torch("cpu", "cpu")
    rng = np.random.default_rng(0)
    a, w = (rng.standard_normal(shape, np.float32).astype(runner.np_dtype(dtype)) for shape in ((3, 128), (40, 128)))
    b: Any = w if stored == "dense" else metalmm.quantize(w, stored, group=64)
    made = other.products(a, b, 3, 2)
    assert (made is None) == (library == "torch" and stored != "dense")
    if made:
        turn, result = made
        turn()
        wanted = a.astype(np.float32) @ (w if stored == "dense" else b.dequantize()).astype(np.float32).T
        assert abs(result() - wanted).max() <= 0.1 * abs(wanted).max()


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
    """On a device whose own memory nobody measured: a thread a column with four scalars keeps 7 KB in flight at n=896."""
    monkeypatch.setattr(type(backends.get(DEVICE)), "memory_gbps", lambda self, device: None)
    for name, k, kilobytes, keeps in (
        ("m1_optimized_v2/nt_bn64_col", 4864, 7.2, False),
        ("gemv_nt_vec4/c4_tg128", 4864, 917.5, True),
        ("gemv_nt_vec4/c4_tg128", 100, 179.2, True),  # all of B: of 512 weights of a round most are past its end
    ):
        assert cli.main(["explain", name, "--spec", f"n=896 k={k} nt", "--json", "e.json"]) == 0
        text, data = capsys.readouterr().out, json.loads(Path("e.json").read_text())["loads"]
        assert f"{kilobytes} KB over the whole GPU" in text and ("CANNOT KEEP A GPU'S MEMORY BUSY" in text) != keeps
        assert data["keeps_memory_busy"] is keeps and data["needed"] == 71000.0
    spec = metalmm.MatmulSpec(1, 896, 4864, transpose_b=True)
    assert manifest.get("m1_optimized_v2/nt_bn64_col").loads(spec) == (1216, 8, 7168)
    assert manifest.get("m1_optimized_v5/nt_ultra_tiny_single_tg32").loads(spec) == (8512, 32, 1024)
    short = metalmm.MatmulSpec(1, 896, 100, transpose_b=True)
    assert manifest.get("gemv_nt_vec4/c4_tg128").loads(short) == (1, 128, 56 * 128 * 128), "what is asked for, not what there is"
    assert manifest.get("blas/baseline").loads(spec) is None
    fused = functools.partial(metalmm.MatmulSpec, 1, 896, 4864, transpose_b=True, also_n=(896,))
    assert manifest.get("gemv_nt/l8_d7_x_tg320").loads(fused()) == (11, 112, 1648640)  # 23 threadgroups for each matrix
    assert manifest.get("gemv_nt/l8_d14_x_tg128").loads(fused(swiglu=True)) == (6, 448, 3211264)  # of both matrices


def test_every_kernel_of_ours_says_what_is_in_flight() -> None:
    silent = {v.family for v in metalmm.variants() if not v.library and not all(f.flight for f in v.forms)}
    assert silent == {"gemm_tensor"}, "what Apple's library loads it does not say"


@pytest.mark.rest
def test_commands_without_their_library(tmp_path: Path) -> None:
    code = "import sys; sys.modules['rich'] = None\nimport metalmm.cli as c\nsys.exit(c.main(sys.argv[1:]))"
    for words, status in ((["variants", "--family", "gemv"], 0), (["bench", "--spec", "n=8 k=8"], 2)):
        done = subprocess.run(
            [sys.executable, "-c", code, *words], capture_output=True, text=True, env={**os.environ, "METALMM_DEVICE": "cpu"}
        )
        assert done.returncode == status, done.stderr
        assert status == 0 or "pip install rich" in done.stderr


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0 and metalmm.__version__ in capsys.readouterr().out
    assert cli.main(["--help"]) == 0
    commands = capsys.readouterr().out
    for name in ("bench", "step", "tune", "compare", "profile", "frameworks", "report", "variants", "explain"):
        assert name in commands
        assert cli.main([name, "--help"]) == 0
        text = capsys.readouterr().out
        assert all(word in text for word in ("--manifest", "--json")) or name == "profile"
        assert ("--device" in text) == (name not in ("compare", "profile", "report")), "there where it is used"
    assert cli.main([]) == 2 and cli.main(["nothing"]) == 2


def test_page_numbers() -> None:
    assert [page.percent(x) for x in (None, 0.012, 0.1, 2.5)] == ["", "1.2%", "10%", "250%"]


@pytest.mark.skipif(DEVICE != "cpu", reason="another process, without the fake")
def test_the_walk_of_the_documentation(tmp_path: Path) -> None:
    """Every block of docs/decide.md, in its order, on a small log."""
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
    assert [line.split()[1] for line in commands] == ["profile", "profile", "sizes", "bench", "tune", "step", "compare", "report"]
    for line in commands:
        words = line.split()[1:]
        quick = [*QUICK, "--backends", "gemv,m1_optimized,gemv_nt_vec4,mlx"] if words[0] in ("bench", "tune", "step") else []
        assert cli.main([*words, *quick]) == 0, line
    assert "The step: 3 matmuls" in Path("page.html").read_text()


def test_an_interrupted_run_is_not_overwritten(capsys: pytest.CaptureFixture[str]) -> None:
    _, data = bench("--spec", "n=64 k=64 nt", "--backends", "gemv,mlx")
    data["planned"] = 2
    files.write_json("run.json", data)
    assert bench("--spec", "n=64 k=64 nt", "--backends", "gemv,mlx")[0] == 2
    assert "--resume goes on with it" in capsys.readouterr().err
    assert json.loads(Path("run.json").read_text()) == data


def test_a_shape_whose_kernel_changed_is_not_resumed() -> None:
    spec = ["--spec", "n=64 k=64 nt", "--backends", "m1_optimized_v5"]
    _, data = bench(*spec)
    assert bench(*spec, "--resume")[1]["shapes"] == data["shapes"], "nothing was left to do"
    data["shapes"][0]["results"][0]["kernel_sha256"] = "0" * 64
    files.write_json("run.json", data)
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
    files.write_text("link", "x")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "target").read_text() == "x"
    files.write_text("/dev/null", "x")
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


@pytest.mark.rest
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
    policies = [step.policy_of(name, plan, device, {}) for name in ("recorded", "tuned", "gemv_nt")]
    assert all(v and v.family in ("gemv_nt", "gemv_nt_thread") for p in policies for v in p.variants), (
        "what stands for the engine's own kernels, too"
    )
    weights = step._Weights(device, plan, 0)
    for policy in policies:
        assert not step._wrong(device, plan, weights, policy)
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


def test_what_follows_another_line_is_no_figure_of_a_shape() -> None:
    shape = "op=x | batch=1 | m=1 | n=2 | k=3 | tA=0 | tB=0:\n  backend=a: count=4 | total=1ms\n"
    assert (
        sizes.parse(f"{shape}something else: count=5 | total=2ms\n  backend=a: count=9 | total=9ms\n").shapes == sizes.parse(shape).shapes
    )


def test_odd_things_in_a_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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


def test_a_space_that_is_too_large_or_divides_by_zero() -> None:
    def space(**search: Any) -> Strategy:
        names = {"a": "a", "b": "b", "c": "c"}
        return Strategy.read(Path("m.toml"), "f", {"name": names, "where": None, "points": None, "search": search}, [{"b": 1, "c": 1}], {})

    big = list(range(1, 2999))
    with pytest.raises(metalmm.ManifestError, match="the limit is 1000000"):
        space(a=[1, 2], b=big, c=big)
    assert list(space(a=[1, 2], where=["m % (a - 2) == 0"]).searched({"m": 1, "n": 8, "k": 8, "batch": 1})) == [{"a": 1}]
    with pytest.raises(ValueError):
        evaluate("-" * 100_000 + "1", {})


def test_steps_are_compared(capsys: pytest.CaptureFixture[str]) -> None:
    policies = [
        {"name": name, "device_ms": [t * f for f in (1, 1.01, 0.99) * 5], "host_ms": [t * f for f in (1, 1.01, 0.99) * 5], "wrong": []}
        for name, t in (("best", 4.0), ("tuned", 5.0))
    ]
    files.write_json("old.json", {"schema": "metalmm-step", "version": 1, "environment": {}, "policies": policies})
    policies[1]["device_ms"] = [7.0] * 15
    files.write_json("new.json", {"schema": "metalmm-step", "version": 1, "environment": {}, "policies": policies})
    assert cli.main(["compare", "old.json", "old.json"]) == 0 and cli.main(["compare", "old.json", "new.json"]) == 1
    assert re.search(r"slower +the step +tuned +5ms +7ms +\+40.0%", capsys.readouterr().out)


def test_a_variant_that_was_stopped_gets_another_round_if_it_is_near() -> None:
    near, far = made("f/near", 1.2, stopped="early"), made("f/far", 9.0, stopped="early")
    first = a_run(made("f/a", *[1.0] * 9), near, far)
    assert first.survivors() == ["f/a", "f/near"]
    first.merge(a_run(made("f/a", *[1.0] * 9), made("f/near", *[0.9] * 9)))
    decision = results.decide(first)
    assert decision and decision.winner is near and near.gpu == [0.9] * 9 and not near.stopped


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
    one = runner._Contender("gemv_nt_vec4/c4_tg64", [])
    one.calls = [device.prepare(one.result.variant, inputs.a, inputs.weights[0], out=inputs.out, **inputs.options)]
    for _ in range(3):
        turns.run(one, counted=True)
    assert not one.result.wrong and not one.done
    changed = np.array(inputs.weights[0])
    changed[5] += 1
    inputs.weights[0].write(changed)
    turns.run(one, counted=True)
    assert "1 of 64 elements; first at (0, 5)" in one.result.wrong and one.done
