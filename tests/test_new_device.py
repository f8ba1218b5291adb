"""That a new device needs nothing but a folder of C++ (tests/toy_device), a backend file (below) and a lowering target: every family
runs on one whose memory the host cannot reach, and which has nothing of its compiler's to say about a kernel's arguments."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import metalmm
import numpy as np
import pytest
from metalmm import backends, compiler, numerics
from metalmm.kernel_source import Code, Constants, KernelText, LibraryText
from metalmm.msl.program import Program
from test_matmul import TEMPLATES
from test_types import draw


class Toy:
    name = "toy"
    options: Sequence[str] = ()
    libraries: Sequence[str] = ()
    replays = 0
    counts_barriers = False
    note = ""

    def checked(self, given: Mapping[str, Any]) -> dict[str, Any]:
        return {}

    def library_text(self, device: metalmm.Device, text: str, name: str, folders: Any, defines: Any) -> LibraryText:
        expanded = compiler.preprocess(text, name, folders, defines)
        return LibraryText(KernelText(expanded, name, is_preprocessed=True), Program(expanded, name).kernel_names())

    def code(self, device: metalmm.Device, source: KernelText, kernel: str, constants: Constants) -> Code:
        text = source.text if source.is_preprocessed else compiler.preprocess(source.text, source.name)
        module = compiler.build(text, kernel, constants, source.name, is_preprocessed=True)
        return Code(kernel, file=str(module), arguments=Program(text, source.name).arguments(kernel, constants))

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
    assert len((Path(__file__).parent / "toy_device" / "toy_device.cpp").read_text().splitlines()) < 200


@pytest.mark.parametrize("v", TEMPLATES.values())
@pytest.mark.parametrize("where", ["host", "device"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_every_kernel_runs_on_it(v: metalmm.Variant, where: str, dtype: str, toy: metalmm.Device) -> None:
    assert v.runs_on("toy")
    layout, m = v.supports["layouts"][0], 2 if v.family == "small_m" else 1
    n = 16 if v == "gemv/smalln" else 133
    spec = metalmm.MatmulSpec(m=m, n=n, k=300, transpose_a=layout[0] == "t", transpose_b=layout[1] == "t", bias=True, beta=0.5, dtype=dtype)
    a, b, options = draw(np.random.default_rng(1), spec)
    if where == "host":  # off every alignment but the elements'
        a, b = (np.concatenate([x.ravel()[:3], x.ravel()])[3:].reshape(x.shape) for x in (a, b))
    if where == "device":
        options.update(bias=toy.array(options["bias"]), c=toy.array(options["c"]))
    out = metalmm.matmul(v, *((toy.array(a), toy.array(b)) if where == "device" else (a, b)), device=toy, **options)
    reference, bound, _ = numerics.judged(a, b, **{**options, "bias": np.asarray(options["bias"]), "c": np.asarray(options["c"])})
    assert not numerics.mismatch(np.asarray(out), reference, bound)


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
