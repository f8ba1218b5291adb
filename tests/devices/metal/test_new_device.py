"""That a new device needs nothing but a folder of C++ (tests/fakes/toy_device), a backend file (below) and a lowering target: every family
runs on one whose memory the host cannot reach, and which has nothing of its compiler's to say about a kernel's arguments."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import metalmm
import numpy as np
import pytest
from metalmm import backends, compiler, modules
from metalmm.kernel_source import Code, Constants, KernelText, LibraryText
from metalmm.msl.program import Program
from support.here import ALL_OF_IT, ROOT
from support.operands import draw
from support.rows import Row, What, array, known


class Toy:
    name = "toy"
    options: Sequence[str] = ()
    libraries: Sequence[str] = ()
    replays = 0
    ends_processes = False
    together = 1
    counts_barriers = False
    cache_bytes = 0
    note = ""

    def checked(self, given: Mapping[str, Any]) -> dict[str, Any]:
        return {}

    def library_text(self, device: metalmm.Device, text: str, name: str, folders: Any, defines: Any) -> LibraryText:
        expanded = compiler.preprocess(text, name, folders, defines)
        return LibraryText(KernelText(expanded, name, is_preprocessed=True), Program(expanded, name).kernel_names())

    def code(self, device: metalmm.Device, source: KernelText, kernel: str, constants: Constants) -> Code:
        text = source.text if source.is_preprocessed else compiler.preprocess(source.text, source.name)
        module = modules.build(modules.Job(KernelText(text, source.name, is_preprocessed=True), kernel, constants))
        return Code(kernel, file=str(module), arguments=Program(text, source.name).arguments(kernel, constants))

    def code_together(self, device: metalmm.Device, sources: Any) -> None: ...

    def library_file(self, library: str) -> str:
        return ""

    def watching(self, timeout: float) -> dict[str, Any]:
        return {}

    def facts(self, device: metalmm.Device) -> dict[str, str | None]:
        return {"compiler": None, "summary": "a toy"}


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> Iterator[metalmm.Device]:
    if not metalmm._core._device_names("toy"):
        pytest.skip("the toy is built with the fake Metal: make test-on-fake-metal")
    monkeypatch.setattr(backends, "_BACKENDS", dict(backends._BACKENDS))
    backends.register(Toy())
    with metalmm.Device("toy") as device:
        yield device


def test_the_list_of_what_a_device_is_has_under_200_lines() -> None:
    assert len((ROOT / "tests" / "fakes" / "toy_device" / "toy_device.cpp").read_text().splitlines()) < 200


FIRST = {What.of(row.variant): row for row in array(known()) if row.variant.storage == "dense" and row.dtype == "float16"}


WHERE = ("host", "device")  # by turns


@pytest.mark.rest(but=6)
@pytest.mark.parametrize(
    ("where", "row"), [(x, row) for i, row in enumerate(FIRST.values()) for x in (WHERE if ALL_OF_IT else [WHERE[i % 2]])], ids=str
)
def test_every_strategy_runs_on_it(where: str, row: Row, toy: metalmm.Device) -> None:
    assert row.variant.runs_on("toy")
    call = draw(row, 2, 133, 300, bias=True, c=True, beta=0.5)
    if where == "device":
        call.judged()
        call.a, call.b = toy.array(np.ascontiguousarray(call.a)), [toy.array(np.ascontiguousarray(b)) for b in call.b]
        out = toy.empty(call.judged()[0][0].shape, row.dtype)
        call.bias, call.c = [toy.array(x) for x in call.bias or []], None if call.c is None else toy.array(call.c)
        call.out = out if row.variant.swiglu else [out]
        if row.variant.matrix_count > 1 and not row.variant.swiglu:
            call.out = [toy.empty(reference.shape, row.dtype) for reference, _ in call.judged()]
    call.check(toy)


def test_arrays_batches_kernels_and_errors(toy: metalmm.Device) -> None:
    numbers = np.arange(12).reshape(3, 4) % 5
    x = toy.array(numbers.astype(np.float16))
    assert x.device_address >= 1 << 52
    view = x[1:].numpy()
    np.testing.assert_array_equal(view, numbers[1:])
    assert not view.flags.writeable, "a copy: what is written there would be lost"
    with toy.batch(per_dispatch=True) as batch:
        first = batch.matmul("gemm_tiled/baseline", x, x, transpose_b=True)
        second = batch.matmul("gemm_tiled/baseline", first, x)
    np.testing.assert_array_equal(np.asarray(second), numbers @ numbers.T @ numbers)
    assert len(batch.timing.dispatches) == 2
    replayed = toy.batch()
    replayed.add(toy.prepare("gemm_tiled/baseline", x, x, transpose_b=True, out=first))
    recording = replayed.record()
    recording.replay()
    recording.wait()
    source = "#include <metal_stdlib>\nusing namespace metal;\n"
    source += "kernel void k(device float* y, constant uint& n, uint i [[thread_position_in_grid]]) { y[i] = n + i; }"
    kernel = toy.compile(source).kernel("k")
    y = toy.empty((10,), np.float32)
    kernel(y, 5, threads=10, threadgroup=4)
    np.testing.assert_array_equal(y.numpy(), np.arange(5, 15))
    with pytest.raises(
        metalmm.KernelError, match=r"grid \(1, 70000, 1\) has 70000 threadgroups in axis y; the limit of the device is 65535"
    ):
        kernel(y, 5, grid=(1, 70000), threadgroup=1)
    with pytest.raises(metalmm.UnsupportedError, match="unavailable on device toy, it needs device cpu"):
        metalmm.matmul("blas/baseline", np.ones((1, 2), np.float16), np.ones((2, 2), np.float16), device=toy)
    with pytest.raises(metalmm.DeviceError, match="counts no writes"):
        toy.count_writes(np.zeros(4, np.float16))


def test_an_option_is_refused(toy: metalmm.Device) -> None:
    with pytest.raises(metalmm.DeviceError, match="threads: device toy has no such option"):
        metalmm.Device("toy", threads=2)
