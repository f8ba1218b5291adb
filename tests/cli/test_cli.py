"""The command line."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
import time
from typing import Any

import metalmm
import pytest
from metalmm import backends, cli, manifest
from support.here import DEVICE


def test_variants_lists_every_id_and_why_one_is_off(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["variants", "--all"]) == 0
    text = capsys.readouterr().out
    for v in metalmm.variants():
        assert any(row.split()[0] == v for row in text.splitlines()), v
    assert "off: staging B" in text
    assert next(row for row in text.splitlines() if row.startswith("gemv_nt/r8")).split()[3:] == [
        "any",
        "B",
        "1,2,3,swiglu",
        "of",
        "one",
        "A",
        "nt",
        "m=2..8",
        "on",
    ]
    assert cli.main(["variants"]) == 0
    rows = capsys.readouterr().out.splitlines()
    assert len(rows) < 40, "it fits on a screen"
    for v in metalmm.variants():
        assert any(row.split()[0] == v.family for row in rows), v
    assert any(row.startswith("gemv_split_k ") and row.endswith(" bnN_tgN") for row in rows), "also a strategy of which no point ships"
    assert cli.main(["variants", "--family", "gemv_nt", "--json"]) == 0
    listed = {v["id"]: v for v in json.loads(capsys.readouterr().out)["variants"]}
    kernels = {k["kernel"]: k for k in listed["gemv_nt/l4_d7_tg64"]["kernels"]}
    assert kernels["weight_columns"]["matrices"] == ["1"] and kernels["fused_columns"]["matrices"] == ["2", "3", "swiglu"]
    assert "affine4:canonical" in kernels["fused_columns"]["storages"] and kernels["dense_columns"]["storages"] == ["dense"]
    assert cli.main(["variants", "--family", "m1_optimized_v3"]) == 0
    text = capsys.readouterr().out
    assert "_tg64 " not in text
    assert "5 variants; 21 more are off (--all)" in text
    assert cli.main(["variants", "--family", "nobody"]) == 2
    assert "no family 'nobody'" in capsys.readouterr().err


@pytest.mark.needs("simdgroup_matrix")
def test_explain_says_what_a_dispatch_is_made_of(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", "m1_optimized_v2/nt_bn64_col_vec4_bk128_tg128", "m=1", "n=896", "k=896", "nt"]) == 0
    text = capsys.readouterr().out
    assert "14 x 1 x 1 threadgroups of 1 x 64 outputs" in text
    assert "128 a threadgroup (limit 128), 1792 in all, 2 an output" in text
    assert "1024 bytes of 32768" in text
    assert "barriers            8 a threadgroup" in text, "one before the first of 7 tiles, one after each"
    assert f"at least {2 * (896 + 896 * 896 + 896)}" in text
    assert cli.main(["explain", "mlx/m1_fast_nt", "n=130", "k=64", "m=20", "batch=2", "nt"]) == 0
    assert "gemm_simdgroup<half, Blocks<8, 128, 64, 1, 4, 1>, false, true>" in capsys.readouterr().out
    assert cli.main(["explain", "gemv_nt_vec4/c4_tg128", "n=64", "k=64", "batch=14", "nt"]) == 0
    text = capsys.readouterr().out
    assert "barriers            0 a threadgroup" in text
    assert cli.main(["explain", "gemv_nt_vec4/c4_tg128", "n=64 k=64 batch=14 nt calls=24"]) == 0
    assert capsys.readouterr().out == text, "a shape in one argument"
    assert cli.main(["explain", "gemv_nt_vec4/c4_tg128", "n=64", "--device", DEVICE, "k=64", "batch=14", "nt"]) == 0
    assert capsys.readouterr().out == text, "on both sides of an option"
    for words in ("explain gemv/baseline n=4 --devic cpu k=4", "variants n=4", "check --device cuda --all"):
        assert cli.main(words.split()) == 2 and "unrecognized arguments" in capsys.readouterr().err


def test_a_misspelt_command_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bnech"]) == 2
    assert "there is no command 'bnech'; did you mean bench?" in capsys.readouterr().err
    assert cli.main(["qqqq"]) == 2
    assert "'qqqq'" in capsys.readouterr().err


def test_explain_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    for words, code, message in [
        ("gemv/baseline m=2 n=4 k=4", 1, "m=2 is not 1; supported by"),
        ("gemv/basline n=4 k=4", 2, "did you mean gemv/baseline"),
        ("gemv/baseline n=4", 2, "k is missing"),
        ("gemv/baseline n=4 k=4 xyz", 2, "'xyz' is no part of a shape; write for example"),
        ("gemv/baseline n=4 k=4 fp16", 2, "'fp16' is no part of a shape; did you mean float16?"),
        ("gemv/baseline n=4 k=4 f16", 2, "did you mean float16?"),
        ("gemv/baseline n=4 k=4 q8-0", 2, "did you mean q8_0?"),
        ("gemv/baseline M=1 n=4 k=4", 2, "did you mean m=1?"),
        ("gemv/baseline n=0 k=4", 2, "a size of 0"),
        ("gemv/baseline n=4 k=4 nn nt", 2, "'nn' and 'nt': a shape has one layout"),
        ("gemv/baseline n=4 k=4 n=5", 2, "'n=4' and 'n=5': a shape has one n"),
        ("gemv/baseline n=4 k=4 float16 float32", 2, "a shape has one type"),
        ("gemv_nt/l4_d7_tg64 n=4 k=4 q8_0 q4_0:canonical", 2, "a shape has one format"),
        ("gemv/baseline n=4 k=4 nt", 1, "layout nt is not one of nn (nn: transpose_b=False)"),
    ]:
        assert cli.main(["explain", *words.split()]) == code
        assert message in capsys.readouterr().err
    if DEVICE == "cpu" and not metalmm.metal_devices():
        assert cli.main(["explain", "mps/baseline", "n=4", "k=4"]) == 2
        assert "mps/baseline is of device metal alone: no Metal device" in capsys.readouterr().err


@pytest.mark.skipif(DEVICE != "cpu" or bool(metalmm.metal_devices()), reason="of a machine without a Metal device")
def test_explain_auto_of_a_device_that_is_not_here() -> None:
    def explain(*words: str) -> Any:
        command = [sys.executable, "-m", "metalmm", "explain", *words, "m=1", "n=4096", "k=4096", "q8_0", "--device", "metal"]
        return subprocess.run(command, capture_output=True, text=True)  # where there is no default device yet

    found = explain("auto")
    assert found.returncode == 0 and found.stdout.startswith("gemv_nt/") and "of 10 cores" in found.stdout
    assert json.loads(explain("auto", "--json", "-").stdout)["device"] == "metal"
    assert explain("gemv_nt/l4_d2_tg64").returncode == 2, "the limits of a device are its own"


def test_explain_auto_of_no_device_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        raise metalmm.DeviceError("none")

    monkeypatch.setattr(cli, "default_device", fails)
    assert cli.main(["explain", "auto", "m=1", "n=4096", "k=4096"]) == 2


def test_explain_counts_the_barriers_of_what_was_asked(capsys: pytest.CaptureFixture[str]) -> None:
    for extra in ("", "bias", "beta=0.5", "alpha=2 beta=0.5 bias"):
        assert cli.main(["explain", "gemv/baseline", "n=300", "k=600", *extra.split()]) == 0
        assert "barriers            6 a threadgroup" in capsys.readouterr().out
    start = time.monotonic()
    assert cli.main(["explain", "gemv/baseline", "n=60000", "k=60000"]) == 0
    assert "barriers            470 a threadgroup" in capsys.readouterr().out
    assert time.monotonic() - start < 20, "not all of it is run for that"


def test_ctrl_c_while_the_package_is_imported() -> None:
    code = """
import sys, metalmm_cli
class Interrupts:
    def find_spec(self, name, *rest):
        if name == "metalmm": raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupts())
sys.exit(metalmm_cli.main())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "metalmm: interrupted\n")


def test_a_python_without_its_lock_is_refused() -> None:
    code = "import sys; sys._is_gil_enabled = lambda: False\nimport metalmm"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1 and "ImportError: metalmm needs Python's global interpreter lock" in done.stderr


def test_the_command_begins_outside_of_the_package() -> None:
    (entry,) = importlib.metadata.entry_points(group="console_scripts", name="metalmm")
    assert entry.value == "metalmm_cli:main"


def test_explain_auto_of_a_model(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Each of its matmuls, on the device and on one that is not here."""
    assert cli.main(["explain", "auto", "--model", "Qwen2.5-0.5B", "--m", "1,4", "--storage", "q4_0"]) == 0
    here = capsys.readouterr().out
    assert "m=4 n=151936 k=896 nt q4_0 calls=1" in here and here.count(" calls=") == here.count("\n  ") >= 10
    away = next(name for name in ("metal", "cuda") if not backends.available(name))
    monkeypatch.setenv("METALMM_DEVICE", away)  # as --device does, and back
    monkeypatch.setattr(cli, "default_device", lambda: metalmm.Device(away))
    assert cli.main(["explain", "auto", "--model", "Qwen2.5-0.5B", "--device", away, "--json", "-"]) == 0
    shapes = json.loads(capsys.readouterr().out)["shapes"]
    for shape in shapes:
        assert shape["variant"] is None or manifest.get(shape["variant"]).runs_on(away)
    assert len(shapes) >= 5
    for words in ("auto n=4 k=4 --model Qwen2.5-0.5B", "gemv/baseline --model Qwen2.5-0.5B"):
        assert cli.main(["explain", *words.split()]) == 2
        assert "--model goes with auto" in capsys.readouterr().err
