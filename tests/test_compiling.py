"""The compiler, the cache, and what lowering refuses."""

from __future__ import annotations

import stat
import warnings
from pathlib import Path
from typing import Any

import metalmm
import numpy as np
import pytest
from metalmm import cache, compiler
from metalmm.msl.targets import cpu as lowering

HEAD = "#include <metal_stdlib>\nusing namespace metal;\n"
GOOD = HEAD + "kernel void k(device float* y) { y[0] = 7.0f; }\n"


@pytest.fixture
def device() -> metalmm.Device:
    """Lowering and the cache of modules are the CPU device's."""
    return metalmm.Device("cpu")


def result(device: metalmm.Device, source: str = GOOD) -> float:
    y = np.zeros(1, np.float32)
    device.compile(source).kernel("k")(y, grid=(1,), threadgroup=(1,))
    return float(y[0])


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("METALMM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(cache, "_folder", None)
    compiler._remembered.cache_clear()
    yield tmp_path / "cache"
    compiler._remembered.cache_clear()


def counting(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    calls: list[Any] = []
    real = compiler._run

    def run(command: Any, text: str | None = None) -> str:
        calls.append(command)
        return real(command, text)

    monkeypatch.setattr(compiler, "_run", run)
    return calls


def builds(calls: list[Any]) -> int:
    return sum("-shared" in c for c in calls)


def test_entries_are_kept_and_found(fresh: Path, monkeypatch: pytest.MonkeyPatch, device: metalmm.Device) -> None:
    calls = counting(monkeypatch)
    assert result(device) == 7
    assert builds(calls) == 1
    assert result(device) == 7
    assert builds(calls) == 1
    assert result(device, GOOD.replace("7.0f", "8.0f")) == 8
    assert builds(calls) == 2
    assert not list(fresh.glob(".new-*"))


@pytest.mark.parametrize("damage", ["truncate", "garbage", "no checksum", "empty checksum"])
def test_a_corrupt_entry_is_rebuilt(damage: str, fresh: Path, monkeypatch: pytest.MonkeyPatch, device: metalmm.Device) -> None:
    result(device)
    entry = next(fresh.glob("*.so"))
    checksum = entry.with_name(entry.name + ".sha256")
    if damage == "truncate":
        entry.write_bytes(entry.read_bytes()[:1000])
    elif damage == "garbage":
        entry.write_bytes(b"\x7fELF" + bytes(5000))
    elif damage == "no checksum":
        checksum.unlink()
    else:
        checksum.write_text("")
    calls = counting(monkeypatch)
    assert result(device) == 7
    assert builds(calls) == 1


def test_an_unwritable_cache_falls_back_with_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: metalmm.Device) -> None:
    (tmp_path / "file").write_text("")  # as root, permissions stop nobody; a file in the way does
    monkeypatch.setenv("METALMM_CACHE", str(tmp_path / "file" / "cache"))
    monkeypatch.setattr(cache, "_folder", None)
    with pytest.warns(UserWarning, match="cannot be written .*; using .* Set METALMM_CACHE to a writable folder"):
        assert result(device) == 7
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # once
        assert result(device) == 7


def test_no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, device: metalmm.Device) -> None:
    monkeypatch.setenv("METALMM_CXX", "no-such-compiler")
    with pytest.raises(metalmm.CompilerNotFoundError, match="METALMM_CXX is 'no-such-compiler'"):
        device.compile(GOOD)
    monkeypatch.delenv("METALMM_CXX")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(metalmm.CompilerNotFoundError, match=r"needs clang\+\+ or g\+\+"):
        device.compile(GOOD)


def test_a_compiler_that_fails_passes_its_words_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, device: metalmm.Device) -> None:
    fake = tmp_path / "fake-c++"
    fake.write_text('#!/bin/sh\ncase "$*" in *-dM*) exec g++ "$@";; esac\necho "out of ideas" >&2\nexit 1\n')
    fake.chmod(fake.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("METALMM_CXX", str(fake))
    with pytest.raises(metalmm.CompileError, match="out of ideas"):
        device.compile(GOOD)


@pytest.mark.usefixtures("each_compiler")
def test_messages_point_into_the_metal_file(tmp_path: Path, device: metalmm.Device) -> None:
    path = tmp_path / "broken.metal"
    path.write_text(
        HEAD
        + "\n#define TWICE(x) \\\n  ((x) + \\\n   (x))\nkernel void k(device float* y) {\n  y[0] = TWICE(1.0f);\n  y[1] = undefined_name;\n}\n"
    )
    with pytest.raises(metalmm.CompileError, match=r"kernel 'k': .*\n(.*\n)*.*broken\.metal:9:.*undefined_name"):
        device.compile(path).kernel("k")
    with pytest.raises(metalmm.CompileError, match=r"broken\.metal:2.*\n*.*missing\.h|missing\.h"):
        device.compile(path.read_text().replace("#define", '#include "missing.h"\n#define'))


REFUSED = [
    ("kernel void k(texture2d<float> t [[texture(0)]], device float* y) {}", r"<source>:3: 'texture2d' is not supported on the CPU device"),
    ("kernel void k(device float* y) {\n  constexpr sampler s;\n}", r"<source>:4: 'sampler' is not supported"),
    (
        "kernel void k(device float* y, uint i [[sample_id]]) {}",
        r"<source>:3: the attribute \[\[sample_id\]\] of a kernel argument is not supported",
    ),
    ("kernel void k(device float* y, uint i) {}", r"<source>:3: the kernel argument 'uint i' has no attribute"),
    ("kernel void k(device float* y [[buffer(40)]]) {}", r"buffer index 40 is not in 0 to 30"),
    ("kernel void k(device float* y [[buffer(N)]]) {}", r"'N' is not an integer constant expression"),
    ("kernel void k(device float* y) {\n  for (threadgroup float x; ;) {}\n}", r"<source>:4: 'threadgroup' in a position"),
    (
        "float f(device float* p) { return 1; }\nfloat f(threadgroup float* p) { return 2; }\nkernel void k(device float* y) {}",
        r"<source>:4: 'f' differs from its overload at <source>:3",
    ),
    ("kernel void k(device float* y) { float x[3] = {[1 ... 2] = 1.0f}; }", r"designators"),
    ("kernel void k(device float* y) {", r"is never closed"),
    ("template", r"the file ends in the middle of a declaration"),
    ("kernel void k(device float* y) { double d = 1; y[0] = d; }", r"<source>:3: 'double' is not supported"),
    (
        "constant int n [[function_constant(2)]];\nkernel void k(device float* y) { y[0] = n; }",
        r"function constant 'n' \(index 2\) is used and not given; pass constants=\{2",
    ),
]


@pytest.mark.parametrize(("source", "message"), REFUSED)
def test_what_lowering_refuses(source: str, message: str, device: metalmm.Device) -> None:
    with pytest.raises(metalmm.LoweringError, match=message):
        device.compile(HEAD + source).kernel("k")


def test_a_refused_kernel_does_not_spoil_its_file(device: metalmm.Device) -> None:
    source = (
        HEAD
        + "constant int n [[function_constant(0)]];\nkernel void t(texture2d<float> x [[texture(0)]]) {}\nkernel void u(device int* y) { y[0] = n; }\n"
    )
    assert result(device, source + "kernel void k(device float* y) { y[0] = 7.0f; }") == 7


def test_unknown_kernels_and_constants(device: metalmm.Device) -> None:
    library = device.compile(GOOD)
    with pytest.raises(metalmm.CompileError, match=r"no kernel 'q'; there are: k"):
        library.kernel("q")
    with pytest.raises(metalmm.CompileError, match=r"no function constant 'five'; there are: none"):
        library.kernel("k", constants={"five": 1})
    library.kernel("k", constants={5: 1})  # Metal takes values for indices that a function does not have


def test_lines_stay_where_they_were() -> None:
    text = (
        HEAD
        + "\n\nkernel void k(device float* y,\n              constant int& n) {\n  threadgroup float x[4],\n      z[2];\n  y[0] = 1.0h;\n}\n"
    )
    lowered = lowering.lower(compiler.preprocess(text, "a.metal"), "k", name="a.metal")
    line = next(i for i, row in enumerate(lowered.splitlines()) if "half(1.0)" in row)
    marker = max(i for i, row in enumerate(lowered.splitlines()[:line]) if row.startswith("#"))
    assert int(lowered.splitlines()[marker].split()[1]) + line - marker - 1 == 9
