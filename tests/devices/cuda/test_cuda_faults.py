"""The CUDA device: what it asks of NVIDIA's driver, what it makes of the driver's failures. On the fake, some faults are injected; a GPU
whose kernel fails is lost to its process, so that those tests have GPUs of their own."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import metalmm
import numpy as np
import pytest
from support.cuda import (
    FAILED,
    FAKE,
    GEMM,
    HEAD,
    ILLEGAL,
    OUT_OF_MEMORY,
    OUT_OF_RESOURCES,
    STEP,
    OfAnother,
    adds,
    batch_of_steps,
    computes,
    needs_fake,
)
from support.here import DEVICE, ROOT
from support.numbers import half, right

pytestmark = pytest.mark.skipif(DEVICE != "cuda", reason="of device cuda")


@needs_fake
@pytest.mark.parametrize("code", [ILLEGAL, FAILED])
@pytest.mark.parametrize("how", ["batch", "call", "numpy", "recording"])
def test_a_kernels_fault_is_the_end_of_its_gpu_alone(
    how: str, code: int, index: int, other: metalmm.Device, device: metalmm.Device
) -> None:
    y = other.array(np.zeros(8, np.float32))
    step = other.compile(STEP).kernel("step")
    step(y, threads=8, threadgroup=8)
    late = batch_of_steps(other, np.zeros(8, np.float32), 1)
    if how == "recording":
        recording = batch_of_steps(other, y, 2).record()
    FAKE.inject("kernel", code=code)
    with pytest.raises(metalmm.KernelError, match=r"kernel 'step'.*: CUDA_ERROR_.*this process cannot use the GPU any more"):
        if how == "recording":
            recording.replay()
            recording.wait()
        elif how == "batch":
            batch = batch_of_steps(other, y, 2)
            batch.submit()
            batch.wait()
        else:
            step(np.zeros(8, np.float32) if how == "numpy" else y, threads=8, threadgroup=8)
    uses: list[Callable[[], Any]] = [y.numpy, lambda: computes(other), late.submit]
    for use in uses:
        with pytest.raises(
            metalmm.DeviceError, match=r"context was lost \(.*'step'.*\); this process cannot use it any more, start another"
        ):
            use()
    computes(device)  # of another GPU
    with pytest.raises(metalmm.DeviceError, match=r"after a kernel's fault \(.*'step'.*\) CUDA gives this process no context any more"):
        metalmm.Device("cuda", index=index)
    del y, step, late, use, uses
    if how == "recording":
        del recording
    gc.collect()  # quietly


@needs_fake
def test_what_was_in_flight_when_the_context_was_lost(other: metalmm.Device, like: Callable[..., None]) -> None:
    like(in_time=0)
    y = other.array(np.zeros(8, np.float32))
    first, second, third = (batch_of_steps(other, y, 1) for _ in range(3))
    FAKE.inject("kernel", code=FAILED)
    first.submit()
    submitted = []
    with contextlib.suppress(metalmm.KernelError, metalmm.DeviceError), warnings.catch_warnings():  # the driver may tell it already
        warnings.simplefilter("ignore")  # of the first, which nobody has waited for
        for batch in (second, third):
            batch.submit()
            submitted.append(batch)
    with pytest.raises(metalmm.KernelError, match="kernel 'step'"):
        first.wait()
    if second in submitted:
        with pytest.raises(metalmm.KernelError):
            second.wait()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the third, which nobody waits for
        other.close()
        del first, second, third, batch, submitted
        gc.collect()


@needs_fake
def test_a_fault_that_turns_up_at_another_call_is_still_a_kernels(other: metalmm.Device, like: Callable[..., None]) -> None:
    like(in_time=1)
    y = other.array(np.zeros(8, np.float32))
    kernel = adds(other)
    batch, next = batch_of_steps(other, y, 1), other.batch()
    kernel(y, 1, threads=8, threadgroup=8, batch=next)
    FAKE.inject("kernel", code=FAILED)
    with pytest.raises(metalmm.KernelError):
        batch.submit()  # a call of it may be told already
        time.sleep(0.1)
        with pytest.raises((metalmm.DeviceError, metalmm.KernelError)):
            next.submit()
            next.wait()
        batch.wait()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of those that nobody waited for
        other.close()


@needs_fake
def test_a_kernel_that_really_faults(other: metalmm.Device) -> None:
    source = HEAD + "kernel void wild(device uint* y) { y[1 << 28] = 1; }"
    with pytest.raises(metalmm.KernelError, match="kernel 'wild': CUDA_ERROR_ILLEGAL_ADDRESS"):
        other.compile(source).kernel("wild")(other.array(np.zeros(1, np.uint32)), grid=1, threadgroup=1)
    assert "a memory access at" in FAKE.last_error()


ENDLESS = {
    "while": "while (y[1] == 0) y[0] += 1;",
    "do": "do { y[0] += 1; } while (y[1] == 0);",
    "for": "for (uint i = 0; y[1] == 0; i++) y[0] = i;",
    "for ever": "for (;;) { y[0] += 1; if (y[1] != 0) break; }",
    "without braces": "for (uint i = 0; y[1] == 0; i++) for (uint j = 0; y[1] == 0; j++) y[0] += 1;",
}


@needs_fake
@pytest.mark.parametrize("loop", ENDLESS)
def test_a_kernel_that_does_not_end_is_stopped(loop: str, tmp_path: Path) -> None:
    """In a process of its own: one that is not stopped never ends."""
    source = HEAD + f"kernel void endless(device volatile uint* y) {{ {ENDLESS[loop]} }}"
    script = tmp_path / "s.py"
    script.write_text(f"""
import metalmm, numpy as np, pytest
with metalmm.Device("cuda", timeout=0.2) as device:
    kernel, y = device.compile({source!r}).kernel("endless"), device.array(np.zeros(2, np.uint32))
    for _ in range(2):
        with pytest.raises(metalmm.KernelError, match=r"kernel 'endless': it was ended after 0\\.2 s, its timeout"):
            kernel(y, grid=1, threadgroup=1)
    x = np.ones((8, 8), np.float16)
    assert (metalmm.matmul("gemm_tiled/baseline", x, x, device=device) == 8).all()
""")
    command = [sys.executable, str(ROOT / "tests" / "fakes" / "on_fake_cuda.py"), str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


@needs_fake
@pytest.mark.parametrize("before", [False, True])
def test_a_kernel_that_writes_numpy_memory_is_stopped_too(before: bool, tmp_path: Path) -> None:
    """The copy back blocks in the driver. before: so does one behind a submission that nobody waited for."""
    source = HEAD + "kernel void endless(device volatile uint* y) { while (y[1] == 0) y[0]++; }"
    script = tmp_path / "s.py"
    script.write_text(f"""
import metalmm, numpy as np, pytest, warnings
warnings.simplefilter("ignore")
with metalmm.Device("cuda", timeout=0.2) as device:
    kernel, y = device.compile({source!r}).kernel("endless"), np.array([0, {int(before)}], np.uint32)
    if {before}:
        batch = device.batch()
        kernel(device.array(np.zeros(2, np.uint32)), grid=1, threadgroup=1, batch=batch)
        batch.submit()
        kernel(y, grid=1, threadgroup=1)
        with pytest.raises(metalmm.KernelError, match="its timeout"):
            batch.wait()
    else:
        with pytest.raises(metalmm.KernelError, match="its timeout"):
            kernel(y, grid=1, threadgroup=1)
""")
    command = [sys.executable, str(ROOT / "tests" / "fakes" / "on_fake_cuda.py"), str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env={**os.environ, "METALMM_FAKE": "in_time=1"})
    assert done.returncode == 0, done.stderr


@needs_fake
def test_two_threads_wait_for_what_a_timeout_ends(like: Callable[..., None]) -> None:
    like(in_time=1)
    source = HEAD + "kernel void k(device volatile uint* y, constant uint& n) { for (uint i = 0; i < n; i++) y[0] = i; y[1] = 7; }"
    with metalmm.Device("cuda", timeout=0.2) as device:
        kernel, y = device.compile(source).kernel("k"), device.array(np.zeros(2, np.uint32))

        def wait(batch: metalmm.Batch) -> None:
            with contextlib.suppress(metalmm.KernelError):
                batch.wait()

        for _ in range(2):
            batch = device.batch()
            for n in [2**32 - 1, *[1] * 500]:
                kernel(y, np.uint32(n), grid=1, threadgroup=1, batch=batch)
            batch.submit()
            threads = [threading.Thread(target=wait, args=(batch,)) for _ in range(3)]
            for t in threads:
                t.start()
            for t in threads:
                t.join()
            y.write(np.zeros(2, np.uint32))
            kernel(y, np.uint32(10), grid=1, threadgroup=1)
            assert y.numpy().tolist() == [9, 7]


@needs_fake
def test_what_comes_after_a_kernel_that_was_stopped_is_whole_or_an_error(like: Callable[..., None]) -> None:
    like(in_time=1)
    source = HEAD + "kernel void k(device volatile uint* y) { uint i = 0; while (i < 1000 || y[1] == 1) i++; y[0] = i; }"
    with metalmm.Device("cuda", timeout=0.2) as device:
        kernel = device.compile(source).kernel("k")
        outs = [device.array(np.array([0, endless], np.uint32)) for endless in (1, 0, 0)]
        batches = [device.batch() for _ in outs]
        for batch, y in zip(batches, outs, strict=True):
            kernel(y, grid=1, threadgroup=1, batch=batch)
            batch.submit()
        with pytest.raises(metalmm.KernelError, match="its timeout"):
            batches[0].wait()
        for batch, y in zip(batches[1:], outs[1:], strict=True):
            with contextlib.suppress(metalmm.KernelError):
                batch.wait()
                assert y.numpy()[0] == 1000
        kernel(outs[1], grid=1, threadgroup=1)
        assert outs[1].numpy()[0] == 1000


def _matmul(device: metalmm.Device) -> None:
    metalmm.matmul(GEMM, half(4, 64), half(64, 48, seed=1), device=device)


def _compile_and_run(device: metalmm.Device) -> None:
    device.compile(STEP).kernel("step")(device.array(np.zeros(8, np.float32)), threads=8, threadgroup=8)


def _record(device: metalmm.Device) -> None:
    batch_of_steps(device, device.array(np.zeros(8, np.float32)), 2).record()


FAULTS = [
    (
        "module_load",
        200,
        0,
        _compile_and_run,
        metalmm.CompileError,
        "kernel 'step': the driver does not take its machine code: CUDA_ERROR_INVALID_IMAGE",
    ),
    ("module_function", 500, 0, _compile_and_run, metalmm.DeviceError, "looking for the kernel in its module"),
    ("module_global", 500, 0, _compile_and_run, metalmm.DeviceError, "looking for the table"),
    ("function_attribute", 1, 1, _compile_and_run, metalmm.DeviceError, "asking what a kernel takes"),
    ("launch", OUT_OF_RESOURCES, 0, _compile_and_run, metalmm.DeviceError, "launching kernel 'step': CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES"),
    ("launch", OUT_OF_RESOURCES, 0, _matmul, metalmm.DeviceError, "launching kernel"),
    ("event_create", OUT_OF_MEMORY, 0, _compile_and_run, metalmm.DeviceError, "making an event"),
    ("event_record", 1, 1, _compile_and_run, metalmm.DeviceError, "recording an event"),
    ("copy_in", 1, 0, _matmul, metalmm.DeviceError, "copying to the GPU"),
    ("copy_in", 1, 1, _matmul, metalmm.DeviceError, "copying to the GPU"),
    ("copy_out", 1, 1, _matmul, metalmm.DeviceError, "copying"),
    ("stream_synchronize", 1, 1, _compile_and_run, metalmm.DeviceError, "copying to the GPU|reading the table"),
    ("capture_begin", 1, 0, _record, metalmm.DeviceError, "beginning a recording"),
    ("launch", OUT_OF_RESOURCES, 1, _record, metalmm.DeviceError, "launching kernel 'step'"),
    ("capture_end", 901, 0, _record, metalmm.DeviceError, "ending a recording"),
    ("graph_instantiate", OUT_OF_MEMORY, 0, _record, metalmm.DeviceError, "making a graph of a recording"),
]


@needs_fake
@pytest.mark.parametrize(("fault", "code", "skip", "use", "error", "message"), FAULTS)
def test_faults(
    fault: str, code: int, skip: int, use: Callable[[metalmm.Device], Any], error: type[Exception], message: str, index: int
) -> None:
    """Of one call alone: what was made for it is gone, and the device goes on."""
    gc.collect()
    before = FAKE.live()
    with metalmm.Device("cuda", index=index) as device:
        FAKE.inject(fault, 1, code, skip)
        with pytest.raises(error, match=message):
            use(device)
        use(device)
        computes(device)
    del device
    gc.collect()
    assert FAKE.live() == before


@needs_fake
@pytest.mark.parametrize("fault", ["stream_create", "allocate", "fill", "context_retain"])
@pytest.mark.parametrize("skip", [0, 1])
def test_a_device_that_cannot_be_made(fault: str, skip: int, index: int) -> None:
    if skip and fault != "stream_create":
        pytest.skip("asked for once")
    gc.collect()
    before = FAKE.live()
    FAKE.inject(fault, 2 if fault == "allocate" else 1, OUT_OF_MEMORY, skip)
    with pytest.raises(metalmm.DeviceError):
        metalmm.Device("cuda", index=index)
    gc.collect()
    assert FAKE.live() == before
    with metalmm.Device("cuda", index=index) as device:
        computes(device)


@needs_fake
def test_a_launch_that_fails_within_a_batch(other: metalmm.Device) -> None:
    y = other.array(np.zeros(8, np.float32))
    batch = batch_of_steps(other, y, 3)
    FAKE.inject("launch", 1, OUT_OF_RESOURCES, 1)
    with pytest.raises(metalmm.DeviceError, match="launching kernel 'step'"):
        batch.submit()
        batch.wait()
    batch_of_steps(other, y, 1).submit()
    assert y.numpy()[0] in (1, 3)  # of the batch, what came before the failure may have run
    computes(other)


def child(work: Callable[[], Any]) -> int:
    """The exit status of a child that does it; minus a signal's number where it hung or died."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # newer Pythons warn of threads
        pid = os.fork()
    if pid == 0:
        signal.alarm(20)
        try:
            work()
            os._exit(0)
        except BaseException as error:
            os.write(2, f"child: {error!r}\n".encode())
            os._exit(3)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_a_child_of_fork_is_told_and_the_parent_goes_on(device: metalmm.Device) -> None:
    y = device.array(np.zeros(8, np.float32))
    batch = batch_of_steps(device, y, 1)
    batch.submit()

    def look() -> None:
        for use in (lambda: computes(device), lambda: y.numpy(), lambda: device.empty((1,)), lambda: metalmm.Device("cuda")):
            with pytest.raises(metalmm.DeviceError):
                use()
        with pytest.raises(metalmm.DeviceError, match="before the process was forked"):
            batch.wait()

    def close() -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            device.close()

    assert child(look) == 0
    assert child(close) == 0
    batch.wait()
    assert y.numpy()[0] == 1
    computes(device)


@needs_fake
def test_a_child_of_fork_lets_go_of_arrays_while_a_thread_of_the_parent_uses_the_pool(device: metalmm.Device) -> None:
    """Out of memory, the pool gives back one after another all that lies idle, for long enough that the fork falls within."""
    step = device.compile(STEP).kernel("step")
    step(np.zeros(8, np.float32), threads=8, threadgroup=8)
    idle = [device.empty((16,)) for _ in range(8000)]
    own = [device.empty((16,))]
    del idle
    FAKE.inject("allocate", 1, OUT_OF_MEMORY)
    thread = threading.Thread(target=lambda: step(np.zeros(1 << 21, np.float32), threads=8, threadgroup=8))
    thread.start()
    time.sleep(0.004)
    try:
        assert child(own.clear) == 0
    finally:
        thread.join()


def test_arrays_of_other_libraries_on_the_gpu_are_taken_where_they_lie(device: metalmm.Device) -> None:
    assert device.empty((2, 2)).__dlpack_device__() == (2, 0)
    a, b, out = half(1, 96), half(40, 96, seed=1), OfAnother(device.empty((1, 40)))
    x, w = OfAnother(device.array(a)), OfAnother(device.array(b))
    before = device.counters["allocations"]
    assert metalmm.matmul("gemv_nt_vec4/c4_tg64", x, w, transpose_b=True, out=out, device=device) is out
    assert device.counters["allocations"] == before, "nothing was copied"
    right(out.array, a, b, transpose_b=True)
    assert x.asked["stream"] not in (None, 0, -1), "what wrote it is waited for on our stream"
    np.testing.assert_array_equal(device.array(w).numpy(), b)
    piece = OfAnother(w.array[10:20, 8:24])
    np.testing.assert_array_equal(device.array(piece).numpy(), b[10:20, 8:24])
    target = device.empty((10, 16))
    target.write(piece)
    np.testing.assert_array_equal(target.numpy(), b[10:20, 8:24])
    with pytest.raises(metalmm.DeviceError, match="in the memory of another device"):
        metalmm.matmul("gemv/baseline", x, x, device=metalmm.Device("cpu", threads=1))
    for options in ({"copy": True}, {"dl_device": (1, 0)}):
        with pytest.raises(BufferError, match="own memory on the GPU"):
            x.array.__dlpack__(**options)
