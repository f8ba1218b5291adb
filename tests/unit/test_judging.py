"""Files, folders, compilers and words that are not as they should be: each gets an error or a warning that says what, and the library
stays usable."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import metalmm
import ml_dtypes
import numpy as np
import pytest
from metalmm import backends, cli, compiler, numerics
from metalmm.bench import report, runner, sizes


@pytest.mark.parametrize(
    ("text", "expected"), [("1", True), ("0", False), ("yes", True), ("True", True), ("true", True), ("no", False), ("False", False)]
)
def test_flags_of_a_sizes_file(text: str, expected: bool) -> None:
    shape = sizes.parse(f"op=x | batch=1 | m=1 | n=2 | k=3 | tA={text} | tB={text} | bias={text}:").shapes[0]
    assert (shape.transpose_a, shape.transpose_b, shape.bias) == (expected,) * 3


def test_a_flag_that_says_nothing_names_its_line() -> None:
    with pytest.raises(ValueError, match=r"line 2: .*'maybe' is neither 0 nor 1"):
        sizes.parse("\nop=x | batch=1 | m=1 | n=2 | k=3 | tA=maybe | tB=0:")


def test_right_results_without_a_time_are_right() -> None:
    shape = sizes.Shape("matmul", 1, 1, 8, 8, False, True, False, 1.0, 0.0)
    row = report.winners([(shape, [report.Result("a/b", [None], [0.1])])], 1e-3).splitlines()[1]
    assert "1 right, none with a device time" in row
    row = report.winners([(shape, [report.Result("a/b", [0.1], [0.1], wrong="by far")])], 1e-3).splitlines()[1]
    assert "none right" in row


def test_the_commit_is_our_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not that of the repository that an installed package, or the reader, stands in."""
    package = tmp_path / "metalmm" / "bench"
    package.mkdir(parents=True)
    run = {"cwd": tmp_path, "check": True, "capture_output": True}
    for command in ("init -q", "-c user.name=a -c user.email=b -c commit.gpgsign=false commit -q --allow-empty -m x"):
        subprocess.run(["git", *command.split()], **run)
    monkeypatch.setattr(runner, "__file__", str(package / "runner.py"))
    assert runner.environment(metalmm.Device("cpu"))["commit"] is None


def test_the_judge_itself() -> None:
    """What every other test relies on."""

    def judge(out: float, ref: float, bound: float = 1e-3) -> bool:
        return not numerics.mismatch(np.array([out]), np.array([ref]), np.array([bound]))

    assert judge(1.0005, 1.0) and not judge(1.0015, 1.0) and not judge(0.9985, 1.0)
    assert judge(np.inf, np.inf) and judge(-np.inf, -np.inf) and not judge(-np.inf, np.inf) and not judge(np.inf, 1.0)
    assert judge(np.nan, np.nan) and not judge(1.0, np.nan) and not judge(np.inf, np.nan) and not judge(np.nan, 1.0)
    assert judge(np.inf, 1e6, 1.0) and not judge(-np.inf, 1e6, 1.0) and not judge(np.inf, 60000.0, 1.0) and judge(65504, 65520.0, 20.0)
    assert judge(-np.inf, 1e9, 3.5e27) and judge(np.inf, -1.0, 1e6) and not judge(-np.inf, 1e9, 1e6) and not judge(np.nan, 1e9, 3.5e27)
    assert numerics.max_abs_rel(np.array([np.nan]), np.array([1.0])) == (np.inf, np.inf)
    assert numerics.max_abs_rel(np.array([-np.inf]), np.array([np.inf])) == (np.inf, np.inf)
    assert numerics.max_abs_rel(np.array([3.0]), np.array([2.0])) == (1.0, 1 / 3)


def test_numbers_past_float16_make_no_noise() -> None:
    reference = np.array([1e6, -1e6, 1.0])
    assert not numerics.mismatch(np.array([np.inf, -np.inf, 1.0], np.float16), reference, np.array([1e4, 1e4, 1e-3]))


def test_the_statistical_bound_sees_a_dropped_term() -> None:
    rng, k = np.random.default_rng(0), 9728
    a, b = rng.standard_normal((1, k)).astype(np.float16), rng.standard_normal((k, 400)).astype(np.float16)
    whole, short = metalmm.reference(a, b), metalmm.reference(a[:, :-1], b[:-1])
    hard, likely = metalmm.error_bound(a, b), metalmm.error_bound(a, b, statistical=True)
    assert (likely <= hard).all()
    assert (abs(short - whole) > hard).mean() < 0.05, "the hard bound lets a whole term pass"
    assert (abs(short - whole) > likely).mean() > 0.3
    out = (a.astype(np.float32) @ b.astype(np.float32)).astype(np.float16)
    assert not numerics.mismatch(out, whole, likely)
    one = metalmm.error_bound(a[:, :9], b[:9]), metalmm.error_bound(a[:, :9], b[:9], statistical=True)
    np.testing.assert_array_equal(*one)


@pytest.mark.parametrize("alpha", [np.float16(100), np.uint8(1), np.float64(1e-3), np.float32(np.inf)])
def test_an_alpha_of_any_type(alpha: Any) -> None:
    a, b = np.ones((1, 896), np.float16), np.ones((896, 2), np.float16)
    np.testing.assert_array_equal(metalmm.error_bound(a, b, alpha=alpha), metalmm.error_bound(a, b, alpha=float(alpha)))


def test_what_falls_below_float32_may_be_zero() -> None:
    a, b = np.full((1, 3), 1e-20, np.float32), np.full((3, 1), 1e-19, np.float32)
    ref, bound = metalmm.reference(a, b), metalmm.error_bound(a, b)
    assert not numerics.mismatch(np.zeros((1, 1), np.float32), ref, bound)
    assert numerics.mismatch(np.zeros((1, 1), np.float32), *(f(100 * a, b) for f in (metalmm.reference, metalmm.error_bound)))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("gemv/baseline n=² k=4", "'n=²' is no part of a shape"),
        ("gemv/baseline n=4 k=4 alpha=abc", "'alpha=abc' is no part of a shape"),
        ("gemv/baseline n=99999999999999999999 k=4", "sizes are 1 to"),
        ("gemv/baseline n= k=4", "'n=' is no part of a shape"),
        ("gemv n=4 k=4", "it is a family; its members are gemv/baseline, gemv/smalln"),
    ],
)
def test_words_that_explain_cannot_use(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", *words.split()]) == 2
    assert message in capsys.readouterr().err


def test_a_reader_that_stops_ends_the_listing_quietly() -> None:
    command = f"{sys.executable} -m metalmm variants --all | head -1"
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command}"], capture_output=True, text=True, env={**os.environ, "METALMM_DEVICE": "cpu"}
    )
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.startswith("id")


class OnlyDlpack:
    """What another library has of bfloat16, for which NumPy has no type."""

    def __init__(self, array: metalmm.Array) -> None:
        self.array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.array.__dlpack_device__()


def test_what_dlpack_alone_can_say_is_judged() -> None:
    a = np.arange(8).reshape(2, 4).astype(ml_dtypes.bfloat16)
    with metalmm.Device("cpu") as device:
        only = OnlyDlpack(device.array(a))
        np.testing.assert_array_equal(metalmm.reference(only, only, transpose_b=True), metalmm.reference(a, a, transpose_b=True))
        np.testing.assert_array_equal(metalmm.error_bound(only, a.T), metalmm.error_bound(a, a.T))


@pytest.mark.parametrize(
    "bad", [object(), "x", [[1, 2], [3]], np.array([1, object()]), None], ids=("object", "text", "list", "array", "None")
)
def test_what_is_no_array_of_numbers_is_refused(bad: Any) -> None:
    with pytest.raises(metalmm.DTypeError, match="of which NumPy makes no array of numbers"):
        metalmm.reference(bad, np.ones((4, 2), np.float32))


def test_the_last_level_cache_is_the_largest_that_linux_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for i, size in enumerate(("48K", "2048K", "36608K", "32K")):
        (tmp_path / f"index{i}").mkdir()
        (tmp_path / f"index{i}" / "size").write_text(size + "\n")
    monkeypatch.setattr(runner, "Path", lambda path: tmp_path)
    assert runner.last_level_cache(SimpleNamespace(info={}, backend=backends.get("cpu"))) == 36608 << 10  # type: ignore[arg-type]


def test_cold_means_256_megabytes_on_any_mac() -> None:
    mac = SimpleNamespace(info={}, backend=backends.get("metal"))
    shape = sizes.Shape("", 1, 1, 896, 896, False, True, False, 1.0, 0.0)
    assert runner.cold_copies(shape, mac) * shape.spec.b_bytes >= 256 << 20  # type: ignore[arg-type]


def test_of_many_errors_the_first_twenty_are_shown() -> None:
    text = "\n".join(f"a.cpp:{i}:1: error: number {i}" for i in range(1, 24))
    shown = compiler._errors_of(text).splitlines()
    assert [x.rpartition(" ")[2] for x in shown[:-1]] == [str(i) for i in range(1, 21)] and shown[-1] == "and 3 errors more"


@pytest.mark.parametrize(("says", "cores"), [("<integer>10</integer>", 10), ("<string>ten</string>", None), ("<integer>", None)])
def test_a_mac_says_how_many_cores_its_gpu_has(says: str, cores: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ioreg").write_text(f"#!/bin/sh\necho '<plist><array><dict><key>gpu-core-count</key>{says}</dict></array></plist>'\n")
    (tmp_path / "ioreg").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert backends.metal._cores.__wrapped__() == cores
    (tmp_path / "ioreg").unlink()
    assert backends.metal._cores.__wrapped__() is None
