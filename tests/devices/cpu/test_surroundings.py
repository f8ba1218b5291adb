"""Files, folders, compilers and words that are not as they should be: each gets an error or a warning that says what, and the library
stays usable."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import metalmm
import numpy as np
import pytest
from support.surroundings import ANEW, HEAD, MANIFEST, _write


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
        and "WRONG: in a process of its own, m=1 n=896 k=896 nt: kernel 'mine_one': buffer 2 was written to past its end, at byte 1792 of 1792"
        in line.replace("mine/one", "mine_one")
    )
    assert any("blas/baseline" in x and "WRONG" not in x for x in lines)


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


def test_options_of_odd_values() -> None:
    for value in (float("nan"), float("inf"), 1.5, True, "2"):
        with pytest.raises(metalmm.DeviceError, match="threads is"):
            metalmm.Device("cpu", threads=value)  # type: ignore[arg-type]
    with pytest.raises(metalmm.DeviceError, match="spin: device cpu has no such option"):
        metalmm.Device("cpu", spin=None)
