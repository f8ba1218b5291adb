"""Files, folders, compilers and words that are not as they should be: each gets an error or a warning that says what, and the library
stays usable."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import metalmm
import numpy as np
import pytest
from conftest import ROOT
from metalmm import cache, cli, compiler, numerics
from metalmm.bench import report, runner, sizes

HEAD = "#include <metal_stdlib>\nusing namespace metal;\n"
GOOD = HEAD + "kernel void k(device float* y) { y[0] = 7.0f; }\n"


@pytest.fixture
def device() -> metalmm.Device:
    return metalmm.Device("cpu")


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("METALMM_CACHE", str(tmp_path / "cache"))
    for name in ("_folder", "_wanted", "_temporary"):
        monkeypatch.setattr(cache, name, None)
    compiler._remembered.cache_clear()
    yield tmp_path / "cache"
    compiler._remembered.cache_clear()


def result(device: metalmm.Device, source: str = GOOD) -> float:
    y = np.zeros(1, np.float32)
    device.compile(source).kernel("k")(y, grid=1, threadgroup=1)
    return float(y[0])


# -- the cache --------------------------------------------------------------------------------------------------------


def test_a_folder_that_somebody_removed_is_made_again(fresh: Path, device: metalmm.Device) -> None:
    assert result(device) == 7
    shutil.rmtree(fresh)
    assert result(device) == 7
    assert any(fresh.glob("*.so"))


def test_a_relative_folder_stays_where_it_was(fresh: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: metalmm.Device) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "one")
    for relative in ("kernels", "."):
        monkeypatch.setenv("METALMM_CACHE", relative)
        (tmp_path / "one").chmod(0o700)
        assert result(device) == 7
        monkeypatch.chdir(tmp_path / "two")
        assert result(device) == 7
        assert not any((tmp_path / "two").iterdir())
        monkeypatch.chdir(tmp_path / "one")


def test_a_folder_that_others_may_write_is_not_trusted(fresh: Path, device: metalmm.Device) -> None:
    fresh.mkdir()
    for mode in (0o770, 0o702):
        fresh.chmod(mode)
        cache._folder = cache._temporary = None
        with pytest.warns(UserWarning, match=rf"can be written by others .mode {mode:o}; chmod go-w mends that.; using .*metalmm-"):
            assert result(device) == 7
    assert not any(fresh.iterdir())


@pytest.mark.skipif(os.geteuid() != 0, reason="takes root to give a folder away")
def test_a_folder_of_another_user_is_not_trusted(fresh: Path, device: metalmm.Device) -> None:
    fresh.mkdir()
    os.chown(fresh, 12345, 12345)
    with pytest.warns(UserWarning, match=r"belongs to user 12345, who could put code there"):
        assert result(device) == 7


def test_a_folder_that_is_made_is_ones_own(fresh: Path, device: metalmm.Device) -> None:
    old = os.umask(0)
    try:
        result(device)
    finally:
        os.umask(old)
    assert fresh.stat().st_mode & 0o077 == 0


def full_disk(monkeypatch: pytest.MonkeyPatch, *places: Path) -> None:
    real = cache._write

    def write(path: Path, build: Any) -> None:
        if not places or path.parent in places:
            raise OSError(28, "No space left on device")
        real(path, build)

    monkeypatch.setattr(cache, "_write", write)


def test_a_full_disk_is_a_warning_and_then_an_error(fresh: Path, monkeypatch: pytest.MonkeyPatch, device: metalmm.Device) -> None:
    with monkeypatch.context() as patch:
        full_disk(patch, fresh)
        with pytest.warns(UserWarning, match=r"takes no more .No space left on device.; using"):
            assert result(device) == 7
    full_disk(monkeypatch)
    with pytest.raises(metalmm.DeviceError, match=r"No space left on device; set METALMM_CACHE to a folder with room"):
        result(device, GOOD.replace("7.0f", "8.0f"))
    monkeypatch.undo()
    assert result(device) == 7


def test_no_home_is_a_warning() -> None:
    script = (
        "import os; [os.environ.pop(k, None) for k in ('HOME', 'METALMM_CACHE', 'XDG_CACHE_HOME')]\n"
        "import pwd, warnings; pwd.getpwuid = lambda uid: (_ for _ in ()).throw(KeyError(uid)); warnings.simplefilter('always')\n"
        "import metalmm; print(metalmm.matmul('gemv/baseline', *[__import__('numpy').ones(s, 'f2') for s in ((1, 4), (4, 4))])[0, 0])\n"
    )
    environment = {k: v for k, v in os.environ.items() if k not in ("HOME", "METALMM_CACHE", "XDG_CACHE_HOME")} | {"METALMM_DEVICE": "cpu"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "4.0"
    assert "there is no home folder; using" in done.stderr
    folder = done.stderr.split("; using ")[1].split(". Set")[0]
    assert not Path(folder).exists(), "a temporary folder goes with its process"


def test_what_is_old_is_pruned(fresh: Path, monkeypatch: pytest.MonkeyPatch, device: metalmm.Device) -> None:
    result(device)
    (fresh / ".new-killed").mkdir()
    os.utime(fresh / ".new-killed", (1, 1))
    (fresh / ".new-alive").mkdir()
    for i in range(6):
        (fresh / f"old{i}.so").write_bytes(bytes(200_000))
        (fresh / f"old{i}.so.sha256").write_text("x")
        os.utime(fresh / f"old{i}.so", (i + 1, i + 1))
    kept = next(p for p in fresh.glob("*.so") if not p.name.startswith("old"))
    monkeypatch.setattr(cache, "LIMIT_BYTES", kept.stat().st_size + 500_000)
    os.utime(fresh / ".pruned", (1, 1))
    assert result(device, GOOD.replace("7.0f", "9.0f")) == 9
    assert kept.exists() and (fresh / ".new-alive").exists() and not (fresh / ".new-killed").exists()
    assert not (fresh / "old0.so").exists() and not (fresh / "old0.so.sha256").exists()
    assert result(device) == 7


def test_an_entry_in_use_stays_young(fresh: Path, device: metalmm.Device) -> None:
    result(device)
    entry = next(fresh.glob("*.so"))
    os.utime(entry, (1, 1))
    result(device)
    assert time.time() - entry.stat().st_mtime < 3600


# -- compilers --------------------------------------------------------------------------------------------------------


def script(path: Path, text: str) -> Path:
    path.write_text("#!/bin/sh\n" + text)
    path.chmod(0o700)
    return path


ASKED = 'case "$*" in *-dM*) exec g++ "$@";; esac\n'


def test_a_wrapper_is_asked_each_time(fresh: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = [c for c in ("g++", "clang++") if shutil.which(c)]
    wrapper = script(tmp_path / "cxx", f'exec "$(cat {tmp_path}/target)" "$@"\n')
    monkeypatch.setenv("METALMM_CXX", str(wrapper))
    for name in found:
        (tmp_path / "target").write_text(name)
        assert compiler.find_compiler().kind == ("clang" if "clang" in name else "gcc")
        assert result(metalmm.Device("cpu")) == 7


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("exit 0\n", metalmm.CompilerNotFoundError, "is no C\\+\\+ compiler that metalmm knows"),
        ("exit 3\n", metalmm.CompilerNotFoundError, "does not work as a C\\+\\+ compiler: (?s:.*)exit status 3, and it said nothing"),
        (
            ASKED + 'case "$*" in *-shared*) exit 0;; esac; exec g++ "$@"\n',
            metalmm.CompileError,
            "ended as if all were well, and made no file",
        ),
        (
            ASKED + 'case "$*" in *-shared*) kill -9 $$;; esac; exec g++ "$@"\n',
            metalmm.CompileError,
            "was ended by SIGKILL; there may have been too little memory",
        ),
    ],
)
def test_compilers_that_do_not_work(
    text: str, error: type[Exception], message: str, fresh: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("METALMM_CXX", str(script(tmp_path / "cxx", text)))
    with pytest.raises(error, match=message):
        result(metalmm.Device("cpu"))


@pytest.mark.usefixtures("each_compiler")
def test_a_message_holds_errors_alone_with_the_files_own_lines(tmp_path: Path, device: metalmm.Device) -> None:
    path = tmp_path / "broken.metal"
    warned = "".join(f"static int unused{i}(int x) {{ int y; return x + y; }}\n#pragma nothing {i}\n" for i in range(40))
    path.write_text(HEAD + warned + "kernel void k(device half4* y) {\n  y[0].xy = undeclared;\n}\n")
    with pytest.raises(metalmm.CompileError) as caught:
        device.compile(path).kernel("k")
    lines = str(caught.value).splitlines()
    assert len(lines) < 12 and "warning" not in str(caught.value)
    assert f"{path}:84:" in str(caught.value) and "error" in lines[1]
    assert any(line.strip() == "y[0].xy = undeclared;" for line in lines), "the line as it stands in the file"


# -- manifests --------------------------------------------------------------------------------------------------------

MANIFEST = """format = 1
[[family]]
name = "mine"
source = "mine.metal"
kernel = "f"
template = ["threads"]
threads = 64
tile = [1, 64]
supports = { m = 1, layouts = ["nn"] }
  [[family.variant]]
  name = "one"
  [[family.variant]]
  name = "two"
"""


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('name = "mine"', "name = []", "the name \\[\\]; it takes letters"),
        ('name = "one"', "name = 5", "the name 5"),
        ('name = "one"', 'name = "a/b"', "the name 'a/b'"),
        ('name = "two"', 'name = "one"', "mine/one: there are two variants of this id in the file"),
        ('["nn"]', '["nn", "nn"]', "supports.layouts is \\['nn', 'nn'\\]; it names one of them twice"),
        ('["nn"]', "5", "'layouts' is 5; it takes a list of strings"),
        ('["nn"]', "[[]]", "'layouts' is \\[\\[\\]\\]"),
        ("threads = 64", 'threads = 64\ndevices = ["cpu", "cpu"]', "devices is \\['cpu', 'cpu'\\]; it names one of them twice"),
        ("threads = 64", "threads = 64\ndevices = 3", "'devices' is 3; it takes a list"),
        ("threads = 64", "threads = 64\nbaseline = 3", "'baseline' is 3"),
        ("threads = 64", "threads = 0", "threads is 0; Metal allows 1 to 1024"),
        ("tile = [1, 64]", "tile = [0, 64]", "tile is \\[0, 64\\]"),
        ("m = 1", "n = [0]", "supports.n is \\[0\\]"),
        ("threads = 64", "threads = true", "'threads' is True, of the wrong type"),
        ("threads = 64", "threads = 64\nbk = 4294967296", "parameter 'bk' is 4294967296; it takes 1 to 2\\^32 - 1"),
        ("threads = 64", "threads = 64\nbk = 0", "parameter 'bk' is 0"),
        ("tile = [1, 64]", "tile = [1, 4294967296]", "tile is \\[1, 4294967296\\]"),
        ("m = 1", "m = 4294967296", "supports.m goes from"),
        ("m = 1", "m = true", "supports.m is True"),
        ("m = 1", "n = [1, 4294967296]", "supports.n is"),
        ("m = 1", "n = []", "supports.n is \\[\\]"),
        ("tile = [1, 64]", "tile = [1, 64]\ntiles = [1, 64]", "unknown key 'tiles'; did you mean 'tile'\\?"),
        ("threads = 64", "threads = 64\nquantum = 3", "unknown key 'quantum'; it is neither a field nor among the template's arguments"),
        ('source = "mine.metal"', f'source = "{"x" * 5000}"', "source .*"),
        ('source = "mine.metal"', 'source = "a\\u0000b"', "mine/one: "),
        ("threads = 64", 'threads = 64\nbuiltin = "mps_matmul"\ndevices = ["cpu"]', "mps_matmul is there on metal alone"),
        ("threads = 64", 'threads = 64\nbuiltin = "nobodys"', "library is 'nobodys'"),
        ("format = 1", "format = 1\nfamilly = 3", "'familly' is no part of a manifest"),
        ("format = 1", f"format = 1\nx = {'[' * 5000}{']' * 5000}", "nested too deeply|my.toml: "),
        ('  [[family.variant]]\n  name = "two"', "", None),
    ],
)
def test_manifests(old: str, new: str, message: str | None, tmp_path: Path) -> None:
    (tmp_path / "mine.metal").write_text("")
    (tmp_path / "my.toml").write_text(MANIFEST.replace(old, new))
    before = metalmm.variants()
    if message is None:
        assert metalmm.load_variants(tmp_path / "my.toml") == ["mine/one"]
        return
    with pytest.raises(metalmm.ManifestError, match=message):
        metalmm.load_variants(tmp_path / "my.toml")
    assert metalmm.variants() == before, "nothing of it is loaded"
    assert metalmm.matmul("gemv/baseline", np.ones((1, 4), np.float16), np.ones((4, 4), np.float16))[0, 0] == 4


def test_a_manifest_that_fails_at_its_end_loads_nothing(tmp_path: Path) -> None:
    (tmp_path / "mine.metal").write_text("")
    (tmp_path / "my.toml").write_text(MANIFEST + "  threads = 5000\n")
    with pytest.raises(metalmm.ManifestError, match=r"mine/two: threads is 5000"):
        metalmm.load_variants(tmp_path / "my.toml")
    with pytest.raises(metalmm.UnknownVariantError):
        metalmm.matmul("mine/one", np.ones((1, 4), np.float16), np.ones((4, 4), np.float16))


def test_a_library_runs_where_it_is(tmp_path: Path) -> None:
    (tmp_path / "my.toml").write_text(
        MANIFEST.replace("threads = 64", 'threads = 64\nbuiltin = "blas"').replace('source = "mine.metal"\n', "")
    )
    loaded = metalmm.load_variants(tmp_path / "my.toml")
    assert {v.devices for v in loaded} == {("cpu", "cuda")}


def test_a_family_where_a_variant_is_wanted_lists_its_members() -> None:
    with pytest.raises(metalmm.UnknownVariantError, match=r"'gemv'; it is a family; its members are gemv/baseline, gemv/smalln"):
        metalmm.matmul("gemv", np.ones((1, 4), np.float16), np.ones((4, 4), np.float16))


# -- sizes, reports, numbers ------------------------------------------------------------------------------------------


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
    out = metalmm.matmul("gemv/baseline", a, b)
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


def test_a_variant_that_fails_is_a_line_of_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from metalmm.bench import hot_shapes

    kernel = HEAD + '#include "epilogue.h"\n' + (
        "template <int TG> [[kernel]] void f(const device half* A [[buffer(0)]], const device half* B [[buffer(1)]], device half* D [[buffer(2)]],"
        " const device half* C [[buffer(3)]], const device half* bias [[buffer(4)]], constant MatmulParams& p [[buffer(5)]],"
        " uint i [[thread_position_in_grid]]) { D[i + 1] = A[0]; }\n"
    )  # fmt: skip
    (tmp_path / "mine.metal").write_text(kernel)
    (tmp_path / "my.toml").write_text(MANIFEST.replace('["nn"]', '["nt"]'))
    monkeypatch.setenv("METALMM_DEVICE", "cpu")
    arguments = ["--manifest", str(tmp_path / "my.toml"), "--shapes", "4", "--backends", "mine,blas", "--iters", "1", "--no-check"]
    assert hot_shapes.main([*arguments, "--json", str(tmp_path / "out.json")]) == 1
    lines = capsys.readouterr().out.splitlines()
    line = next(x for x in lines if "mine/one" in x)
    assert (
        "avg_gpu=n/a" in line
        and "[bad-rel]" in line
        and "WRONG: kernel 'mine_one': buffer 2 was written to past its end, at byte 1792 of 1792" in line.replace("mine/one", "mine_one")
    )
    assert any("blas/baseline" in x and "WRONG" not in x for x in lines)


# -- the command line and the API -------------------------------------------------------------------------------------


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


def test_explain_counts_the_barriers_of_what_was_asked(capsys: pytest.CaptureFixture[str]) -> None:
    for extra in ("", "bias", "beta=0.5", "alpha=2 beta=0.5 bias"):
        assert cli.main(["explain", "gemv/baseline", "n=300", "k=600", *extra.split()]) == 0
        assert "barriers            6 a threadgroup" in capsys.readouterr().out
    start = time.monotonic()
    assert cli.main(["explain", "gemv/baseline", "n=60000", "k=60000"]) == 0
    assert "barriers            470 a threadgroup" in capsys.readouterr().out
    assert time.monotonic() - start < 20, "not all of it is run for that"


def test_a_reader_that_stops_ends_the_listing_quietly() -> None:
    command = f"{sys.executable} -m metalmm variants --all | head -1"
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command}"], capture_output=True, text=True, env={**os.environ, "METALMM_DEVICE": "cpu"}
    )
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.startswith("id")


def test_threads_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("METALMM_CPU_THREADS", "abc")
    with pytest.raises(metalmm.DeviceError, match=r"METALMM_CPU_THREADS is 'abc'; it takes a number of threads"):
        metalmm.Device("cpu")


KERNEL = HEAD + "kernel void k(device float* y, threadgroup float* x [[threadgroup(0)]]) { x[0] = 7.0f; y[0] = x[0]; }"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"threadgroup_memory": [4]}, "threadgroup_memory: \\[4\\] is not a dict of {index: bytes}"),
        ({"grid": ()}, "grid takes up to three sizes of 1 to 2\\^32 - 1, and at least one"),
        ({"grid": None}, "grid: None is not a whole number"),
        ({"grid": 1.5}, "grid: 1.5 is not a whole number"),
        ({"threadgroup": (1, 1, 1, 1)}, "threadgroup takes up to three sizes"),
        ({"batch": 3}, "batch: it takes what Device.batch\\(\\) gives"),
    ],
)
def test_dispatches_that_say_nothing(change: dict[str, Any], message: str, device: metalmm.Device) -> None:
    kernel, y = device.compile(KERNEL).kernel("k"), np.zeros(4, np.float32)
    with pytest.raises(metalmm.KernelError, match=message):
        kernel(y, **{"grid": 1, "threadgroup": 1, "threadgroup_memory": {0: 16}, **change})


def test_numpys_numbers_are_numbers(device: metalmm.Device) -> None:
    kernel, y = device.compile(KERNEL).kernel("k"), np.zeros(4, np.float32)
    kernel(y, grid=np.int64(1), threadgroup=(np.int32(1), np.uint8(1)), threadgroup_memory={np.int64(0): np.int64(16)})
    assert y[0] == 7
    assert device.empty(np.int64(5)).shape == (5,)
    assert device.empty((np.int32(2), 3), np.float32).dtype == "float32"


def test_dtypes_and_numbers_that_are_none(device: metalmm.Device) -> None:
    for dtype in ("nothing", 3.5):
        with pytest.raises(metalmm.DTypeError, match=r"NumPy knows no dtype"):
            device.empty(4, dtype)
    with pytest.raises(metalmm.DTypeError, match=r"buffer 0 is int; pass .* or a number whose type says its size, such as numpy.int32"):
        device.compile(KERNEL).kernel("k")(5, grid=1, threadgroup=1, threadgroup_memory={0: 16})
    with contextlib.suppress(metalmm.Error):
        device.batch().add(3)


@pytest.mark.usefixtures("each_compiler")
def test_counts_of_writes_end_at_255(each_compiler: str) -> None:
    device, y = metalmm.Device("cpu", debug=True), np.zeros(2, np.float32)
    counts = device.count_writes(y)
    source = HEAD + "kernel void k(device float* y) { for (int i = 0; i < 300; i++) *(volatile device float*)y = i; y[1] = 1; }"
    device.compile(source).kernel("k")(y, grid=1, threadgroup=1)
    assert counts.tolist() == [255, 255, 1, 1]


# -- manifests that are loaded again, and odd ones --------------------------------------------------------------------

ANEW = """format = 2
[kernels.fill]
template = ["threads"]
tile = [1, "threads"]
supports = { layouts = ["nn"] }
[families.anew]
kernel = "fill"
[families.anew.variants]
one = { threads = 32 }
two = { threads = 64 }
"""
FILL = """#include <metal_stdlib>
#include "epilogue.h"
using namespace metal;
template <int TG> [[kernel]] void fill(const device half* A [[buffer(0)]], const device half* B [[buffer(1)]], device half* D [[buffer(2)]],
  const device half* C [[buffer(3)]], const device half* bias [[buffer(4)]], constant MatmulParams& p [[buffer(5)]],
  uint3 at [[thread_position_in_grid]]) { if (at.x < p.n && at.y < p.m) D[at.y * p.ldd + at.x] = VALUE; }
"""


def _write(folder: Path, value: str = "1.0h", manifest: str = ANEW) -> Path:
    (folder / "fill.metal").write_text(FILL.replace("VALUE", value))
    (folder / "anew.toml").write_text(manifest)
    return folder / "anew.toml"


def test_a_row_that_is_gone_is_gone(tmp_path: Path) -> None:
    x = np.ones((2, 4), np.float16)
    metalmm.load_variants(path := _write(tmp_path))
    name = "anew/two"
    assert metalmm.matmul(name, x, x.T.copy())[0, 0] == 1
    call = metalmm.default_device().prepare(name, x, x.T.copy())
    _write(tmp_path, manifest=ANEW.replace("two = { threads = 64 }\n", ""))
    assert metalmm.load_variants(path) == ["anew/one"] == metalmm.variants(family="anew")
    with pytest.raises(metalmm.UnknownVariantError):
        metalmm.matmul(name, x, x.T.copy())
    assert call()[0, 0] == 1, "what was prepared stays as it was"
    _write(tmp_path)
    metalmm.load_variants(path)
    assert metalmm.matmul(name, x, x.T.copy())[0, 0] == 1


def test_a_manifest_loaded_while_a_kernel_compiles_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x, device = np.ones((2, 4), np.float16), metalmm.Device("cpu")
    metalmm.load_variants(path := _write(tmp_path, "11.0h"))
    code, loads = device.backend.code, []

    def slow(*arguments: Any) -> Any:
        made = code(*arguments)
        if not loads:
            loads.append(metalmm.load_variants(_write(tmp_path, "22.0h")))
        return made

    monkeypatch.setattr(type(device.backend), "code", lambda self, *arguments: slow(*arguments))
    for _ in range(2):
        assert metalmm.matmul("anew/one", x, x.T.copy(), device=device)[0, 0] == 22
    assert path.exists()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('template = ["threads"]', 'template = ["threads", "align_k"]\nbk = false', "'bk' is False; it takes a number"),
        ("one = { threads = 32 }", 'one = { threads = 32, without = { float32 = "" } }', "'without.float32' is empty; it says why"),
        ("one = { threads = 32 }", 'one = { threads = 32, builtin = "blas" }', "in format = 2 it is 'library'"),
        ("one = { threads = 32 }", "one = { threads = 32, type = 1 }", "unknown key 'type'|what the call decides"),
        ('tile = [1, "threads"]', 'tyle = [1, "threads"]', r"unknown key 'tyle'; did you mean 'tile'\?"),
        ('tile = [1, "threads"]', f'tile = [1, "{"-" * 100000}1"]', "tile is"),
        ("supports = { layouts", "supports = { layout", r"supports knows nothing of 'layout'; did you mean 'layouts'\?"),
        ("[families.anew]\n", '[families.empty]\nkernel = "fill"\n[families.anew]\n', "family empty has no variants"),
        ("format = 2", "format = 1", r"\[families\] is of format = 2; this file says format = 1"),
        ('kernel = "fill"\n', "", "anew/one: 'kernel' is missing"),
        ('kernel = "fill"\n', "kernel = 3\n", "'kernel' is 3; it takes the name of a table"),
    ],
)
def test_manifests_of_format_2(old: str, new: str, message: str, tmp_path: Path) -> None:
    before = metalmm.variants()
    with pytest.raises(metalmm.ManifestError, match=message):
        metalmm.load_variants(_write(tmp_path, manifest=ANEW.replace(old, new)))
    assert metalmm.variants() == before


def test_manifests_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "m.toml").write_text('format = 1\n[[family]]\nfoo = "x"\n')
    for path in (tmp_path / "m.toml", "\0", "\ud800", tmp_path / "not there.toml"):
        with pytest.raises(metalmm.ManifestError):
            metalmm.load_variants(path)
    for wrong in (3, None, b"x"):
        with pytest.raises(metalmm.ArgumentError, match="load_variants: path is"):
            metalmm.load_variants(wrong)  # type: ignore[arg-type]
    (tmp_path / "m.toml").write_text("format = 2\n")
    with pytest.raises(metalmm.ManifestError, match="there are no variants in it"):
        metalmm.load_variants(tmp_path / "m.toml")
    kernels = Path(metalmm.variants()[0].source).parent
    stolen = f'format = 2\n[kernels.gemv]\nsource = "{kernels / "gemv.metal"}"\ntemplate = ["type", "threads"]\ntile = [1, 32]\n'
    (tmp_path / "m.toml").write_text(
        stolen + 'supports = { layouts = ["nn"] }\n[families.gemv.variants]\nbaseline = { kernel = "gemv", threads = 32 }\n'
    )
    with pytest.raises(metalmm.ManifestError, match=r"gemv/baseline: there is a variant of this id in .*variants\.toml"):
        metalmm.load_variants(tmp_path / "m.toml")


def test_options_of_odd_values() -> None:
    for value in (float("nan"), float("inf"), 1.5, True, "2"):
        with pytest.raises(metalmm.DeviceError, match="threads is"):
            metalmm.Device("cpu", threads=value)  # type: ignore[arg-type]
    with pytest.raises(metalmm.DeviceError, match="spin: device cpu has no such option"):
        metalmm.Device("cpu", spin=None)


def test_the_wheel_for_macos_says_14(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not the macOS of who builds it; CMakeLists.txt, whose compiler flags it must fit, is not asked for the tag."""
    macos = pytest.importorskip("scikit_build_core.builder.macos")
    settings = pytest.importorskip("scikit_build_core.settings.skbuild_read_settings")
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr("platform.mac_ver", lambda: ("15.4", ("", "", ""), "arm64"))
    monkeypatch.delenv("MACOSX_DEPLOYMENT_TARGET", raising=False)
    define = settings.SettingsReader.from_file(ROOT / "pyproject.toml", {}).settings.cmake.define
    assert str(macos.get_macosx_deployment_target(arm=True, cmake_defines=define)) == "14.0"
    assert "set(CMAKE_OSX_DEPLOYMENT_TARGET 14.0 " in (ROOT / "CMakeLists.txt").read_text()
