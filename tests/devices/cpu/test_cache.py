"""Files, folders, compilers and words that are not as they should be: each gets an error or a warning that says what, and the library
stays usable."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import metalmm
import numpy as np
import pytest
from metalmm import cache, compiler
from support.here import COMPILERS
from support.surroundings import HEAD

GOOD = HEAD + "kernel void k(device float* y) { y[0] = 7.0f; }\n"


def result(device: metalmm.Device, source: str = GOOD) -> float:
    y = np.zeros(1, np.float32)
    device.compile(source).kernel("k")(y, grid=1, threadgroup=1)
    return float(y[0])


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


def script(path: Path, text: str) -> Path:
    path.write_text("#!/bin/sh\n" + text)
    path.chmod(0o700)
    return path


ASKED = f'case "$*" in *-dM*) exec {COMPILERS[-1]} "$@";; esac\n'


def test_a_wrapper_is_asked_each_time(fresh: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = [c for c in ("g++", "clang++") if shutil.which(c)]
    wrapper = script(tmp_path / "cxx", f'case "$*" in *c++-header*) exit 1;; esac; exec "$(cat {tmp_path}/target)" "$@"\n')
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
            ASKED + f'case "$*" in *-shared*) exit 0;; esac; exec {COMPILERS[-1]} "$@"\n',
            metalmm.CompileError,
            "ended as if all were well, and made no file",
        ),
        (
            ASKED + f'case "$*" in *-shared*) kill -9 $$;; esac; exec {COMPILERS[-1]} "$@"\n',
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
