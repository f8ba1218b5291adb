"""The Metal device: what it asks of Metal, what it makes of Metal's failures. On the fake, some faults are injected."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import metalmm
import ml_dtypes
import numpy as np
import pytest
from support.here import FAKE, ROOT
from support.metal import GEMM, V, needs_fake, pages
from support.numbers import half, right


@needs_fake
def test_a_failing_command_buffer_names_its_variants_and_nothing_else_suffers(like: Callable[..., metalmm.Device]) -> None:
    device = like({"max_operations": 2})
    a, b = device.array(half(1, 16)), device.array(half(16, 16))
    good, bad = device.batch(), device.batch()
    y = good.matmul(V, a, b)
    for v in (V, V, GEMM, V, V):
        bad.matmul(v, a, b)
    good.submit()
    bad.submit()
    good.wait()
    FAKE.inject("command_buffer_status", 1, code=3)
    message = r"command buffer 1 of 3 \(2 dispatches of gemv/baseline\) failed: injected: the GPU hung \(code 3\)"
    for _ in range(2):
        with pytest.raises(metalmm.KernelError, match=message):
            bad.wait()
    right(y, np.asarray(a), np.asarray(b))
    FAKE.inject("command_buffer_status", 1, code=8)  # out of memory
    with pytest.raises(metalmm.DeviceError, match="code 8"):
        metalmm.matmul(V, a, b)
    right(metalmm.matmul(V, a, b), np.asarray(a), np.asarray(b))


@needs_fake
def test_later_command_buffers_are_read_too(like: Callable[..., metalmm.Device]) -> None:
    device = like({"max_operations": 1})
    kernel = device.compile(
        "#include <metal_stdlib>\nusing namespace metal;\nkernel void divide(constant int& n, device int* y) { y[0] = 10 / n; }"
    ).kernel("divide")
    y = np.zeros(3, np.int32)
    batch = device.batch()
    for i, n in enumerate((1, 0, 2)):
        kernel(np.int32(n).tobytes(), y[i : i + 1], grid=1, threadgroup=1, batch=batch)
    batch.submit()
    with pytest.raises(metalmm.KernelError, match=r"command buffer 2 of 3 \(1 dispatches of divide\) failed: kernel 'divide'"):
        batch.wait()


def test_a_dropped_batch_keeps_its_memory_until_the_gpu_is_done(device: metalmm.Device) -> None:
    for _ in range(3):
        batch = device.batch()
        batch.matmul(V, device.array(half(1, 64)), device.array(half(64, 64)))
        batch.matmul(V, half(1, 64), pages((64, 64)))
        batch.submit()
        del batch
        gc.collect()
    right(metalmm.matmul(V, half(1, 64), half(64, 64), device=device), half(1, 64), half(64, 64))


@needs_fake
def test_a_dropped_batch_that_fails_is_a_warning(device: metalmm.Device) -> None:
    FAKE.inject("command_buffer_status")
    batch = device.batch()
    batch.matmul(V, half(1, 16), half(16, 16))
    batch.submit()
    del batch
    with pytest.warns(RuntimeWarning, match="a submission that nobody waited for failed: .*injected"):
        result = metalmm.matmul(V, half(1, 16), half(16, 16), device=device)
    right(result, half(1, 16), half(16, 16))


@needs_fake
def test_what_a_failed_wait_held_is_let_go() -> None:
    device = metalmm.Device("metal")

    def fail() -> None:
        batch = device.batch()
        batch.matmul(V, device.array(half(1, 16)), device.array(half(16, 16)))
        batch.submit()
        FAKE.inject("command_buffer_status")
        with pytest.raises(metalmm.KernelError):
            batch.wait()

    fail()
    gc.collect()
    before = FAKE.live()
    for _ in range(8):
        fail()
    gc.collect()
    new = {name: count - before.get(name, 0) for name, count in FAKE.live().items()}
    # A buffer that another thread gives back a moment late is made once more, and kept idle. What leaks is there eight times.
    assert max(new.values()) < 4, new


@needs_fake
@pytest.mark.parametrize("settings", [{}, {"run_on_commit": 1}, {"residency_sets": 0}, {"apple_family": 7}, {"unified_memory": 0}])
def test_every_kind_of_device_computes(settings: dict[str, int], like: Callable[..., metalmm.Device]) -> None:
    device = like(**settings)
    a, b = half(1, 48), half(48, 80, seed=1)
    da, db = device.array(a), device.array(b)
    with device.batch() as batch:
        y = batch.matmul(V, da, db)
        z = batch.matmul(V, y, device.array(np.eye(80, dtype=np.float16)))
        w = batch.matmul("mps/baseline", da, b, bias=half(80, seed=2))
    right(y, a, b)
    np.testing.assert_array_equal(np.asarray(z), np.asarray(y))
    right(w, a, b, bias=half(80, seed=2))
    view = da.numpy()
    view *= 2  # the host writes; the GPU must see it
    right(metalmm.matmul(V, da, db), a * 2, b)
    big = "#include <metal_stdlib>\nusing namespace metal;\nkernel void k(constant int* x, device int* y) { y[0] = x[4999]; }"
    number = np.zeros(1, np.int32)
    device.compile(big).kernel("k")(np.arange(5000, dtype=np.int32).tobytes(), number, grid=1, threadgroup=1)
    assert number[0] == 4999
    recorded = device.batch()
    recorded.matmul(V, da, db, out=y)
    replay = recorded.record()
    for scale in (1, 0.5):
        view[...] = a * np.float16(scale)
        replay.replay()
        replay.wait()
        right(y, a * np.float16(scale), b)


@needs_fake
def test_missing_times_are_not_zero(like: Callable[..., metalmm.Device]) -> None:
    device = like(timestamps=0, counters=0)
    assert device.info["per_dispatch_times"] is False
    call = device.prepare(V, half(1, 16), half(16, 16))
    assert call.device_seconds is None
    call()
    assert call.device_seconds is None
    with device.batch(per_dispatch=True) as batch:
        batch.add(call)
    assert batch.timing.device is None
    assert batch.timing.dispatches == []
    assert "device=n/a" in repr(batch.timing)


@needs_fake
@pytest.mark.parametrize("fault", ["counters", "resolve_counters"])
def test_times_that_cannot_be_had_are_none(fault: str) -> None:
    device = metalmm.Device("metal")
    FAKE.inject(fault)
    with device.batch(per_dispatch=True) as batch:
        y = batch.matmul(V, half(1, 16), half(16, 16))
    right(y, half(1, 16), half(16, 16))
    assert batch.timing.dispatches in ([], [None])
    assert batch.timing.device is not None


def test_each_dispatch_can_be_timed(device: metalmm.Device) -> None:
    with device.batch(per_dispatch=True) as batch:
        y = batch.matmul(V, half(1, 64), half(64, 64))
        z = batch.matmul("mps/matvec", y, half(64, 64))
        batch.matmul(GEMM, z, half(64, 64))
        batch.matmul("mps/baseline", z, half(64, 64), bias=half(64))
    if device.info["per_dispatch_times"]:
        times = batch.timing.dispatches
        assert len(times) == 4
        assert times[0] > 0
        assert times[1] is None is times[3], "MPS makes its own pass, which nobody can sample"
        assert times[2] > 0
    assert batch.timing.encode > 0
    assert batch.timing.commit > 0
    assert batch.timing.wait > 0
    assert batch.timing.device > 0


def test_a_timed_batch_may_be_dropped(device: metalmm.Device) -> None:
    batch = device.batch(per_dispatch=True)
    batch.matmul(V, half(1, 16), half(16, 16))
    batch.submit()
    del batch
    gc.collect()
    right(metalmm.matmul(V, half(1, 16), half(16, 16), device=device), half(1, 16), half(16, 16))


@needs_fake
def test_closing_a_device_tells_of_what_failed() -> None:
    device = metalmm.Device("metal")
    FAKE.inject("command_buffer_status")
    batch = device.batch()
    batch.matmul(V, half(1, 16), half(16, 16))
    batch.submit()
    del batch
    with pytest.warns(RuntimeWarning, match="nobody waited for failed"):
        device.close()
    assert repr(device) == "metalmm.Device(closed)"


def test_two_threads_on_one_device(device: metalmm.Device) -> None:
    a, b = half(1, 64), half(64, 64, seed=1)
    problems: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(60):
                right(metalmm.matmul(V, a, b, device=device), a, b)
                with device.batch() as batch:
                    y = batch.matmul("mps/baseline", a, device.array(b), c=np.ones((1, 64), np.float16), beta=1.0)
                right(y, a, b, c=np.ones((1, 64), np.float16), beta=1.0)
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not problems


def chain(device: metalmm.Device, length: int, variant: str = V) -> tuple[Any, Any, Any]:
    x, w = device.array(half(1, 32)), device.array(np.eye(32, dtype=np.float16)[::-1] * np.float16(-1))
    batch, y = device.batch(), x
    for _ in range(length):
        y = batch.matmul(variant, y, w, bias=np.zeros(32, np.float16) if variant != V else None)
    return batch, x, y


@pytest.mark.parametrize("variant", [V, "mps/baseline"])
def test_a_recording_runs_again_and_again(variant: str, device: metalmm.Device) -> None:
    batch, x, y = chain(device, 5, variant)
    recording = batch.record()
    assert len(recording) == 5
    with pytest.raises(metalmm.ClosedError, match="was not submitted"):
        batch.wait()
    with pytest.raises(metalmm.ClosedError, match="recorded"):
        batch.submit()
    del batch
    for i in range(3):
        x.numpy()[...] = half(1, 32, seed=i)
        recording.replay()
        recording.wait()
        np.testing.assert_array_equal(np.asarray(y), -np.asarray(x)[:, ::-1])
    for _ in range(100):
        recording.replay()
    recording.wait()
    assert recording.timing.wait > 0


def test_a_replay_does_not_grow_with_its_length(device: metalmm.Device) -> None:
    if not device.info["indirect_command_buffers"]:
        pytest.skip("this GPU has no indirect command buffers that can be used")
    calls = []
    for length in (2, 64):
        recording = chain(device, length)[0].record()
        recording.replay()
        recording.wait()
        calls.append(recording.timing.calls)
    assert calls[0] == calls[1] <= 8


def test_arrays_of_numpy_in_a_recording_are_read_anew(device: metalmm.Device) -> None:
    a, b, out = half(1, 16), half(16, 16, seed=1), np.zeros((1, 16), np.float16)
    batch = device.batch()
    batch.matmul(V, a, b, out=out)
    recording = batch.record()
    for scale in (1, 2):
        a *= scale
        recording.replay()
        recording.wait()
        right(out, a, b)


@needs_fake
def test_a_replay_that_fails(device: metalmm.Device) -> None:
    batch, x, y = chain(device, 2)
    recording = batch.record()
    recording.replay()
    recording.replay()
    FAKE.inject("command_buffer_status")
    with pytest.raises(metalmm.KernelError, match="2 dispatches of gemv/baseline"):
        recording.wait()
    recording.replay()
    recording.wait()
    np.testing.assert_array_equal(np.asarray(y), np.asarray(x))
    FAKE.inject("indirect")
    with pytest.raises(metalmm.DeviceError, match="no indirect command buffer of 2 commands"):
        chain(device, 2)[0].record()


def test_mps_kernels_are_kept_by_shape(device: metalmm.Device) -> None:
    a, b = half(3, 21), half(21, 13, seed=1)
    before = device.counters["mps_kernels"]
    for _ in range(3):
        right(metalmm.matmul("mps/baseline", a, b, device=device), a, b)
    assert device.counters["mps_kernels"] == before + 1
    right(metalmm.matmul("mps/baseline", a, b, alpha=0.5, device=device), a, b, alpha=0.5)
    assert device.counters["mps_kernels"] == before + 2


def test_a_nan_in_alpha_is_the_key_of_itself_alone(device: metalmm.Device) -> None:
    a, b = half(2, 11), half(11, 7, seed=1)
    assert np.isnan(metalmm.matmul("mps/baseline", a, b, alpha=float("nan"), device=device)).all()
    right(metalmm.matmul("mps/baseline", a, b, device=device), a, b)


def test_mps_adds_c_in_place_and_from_elsewhere(device: metalmm.Device) -> None:
    a, b, c = half(3, 20), half(20, 12, seed=1), half(3, 12, seed=2)
    options = {"alpha": 0.5, "beta": -2.0}
    right(metalmm.matmul("mps/baseline", a, b, c=c, device=device, **options), a, b, c=c, **options)
    out = device.array(c)
    metalmm.matmul("mps/baseline", device.array(a), device.array(b), c=out, out=out, **options)
    right(out, a, b, c=c, **options)


def test_arguments_are_what_metals_compiler_makes_of_the_text(device: metalmm.Device) -> None:
    """Comments, macros, conditions and aliases of a user's text decide nothing by themselves."""
    source = """
    #include <metal_stdlib>
    using namespace metal;
    using Out = device float*;
    #define TO device float*
    kernel void k(const device float* x [[buffer(0)]],  // const device float* y,
                  TO y [[buffer(1)]], Out z [[buffer(2)]],
    #ifdef SCALED
                  constant float& f [[buffer(3)]],  // the factor, const
    #endif
                  uint i [[thread_position_in_grid]]) {
    #ifdef SCALED
      y[i] = f * x[i];
    #else
      y[i] = x[i];
    #endif
      z[i] = y[i] + 1.0f;
    }
    """
    for defines, numbers in ({}, ()), ({"SCALED": 1}, (2.0,)):
        kernel = device.compile(source, defines=defines).kernel("k")
        assert kernel.buffer_indices == [0, 1, 2, *([3] if numbers else [])]
        x, y, z = (np.full(8, v, np.float32) for v in (3, 0, 0))
        with device.batch() as batch:  # each dispatch reads what the one before wrote
            kernel(x, y, z, *numbers, threads=8, threadgroup=8, batch=batch)
            kernel(z, y, x, *numbers, threads=8, threadgroup=8, batch=batch)
        factor = numbers[0] if numbers else 1.0
        np.testing.assert_array_equal(z, np.full(8, 3 * factor + 1))
        np.testing.assert_array_equal(x, np.full(8, (3 * factor + 1) * factor + 1))


def test_a_recording_of_both_kinds_of_grid(device: metalmm.Device) -> None:
    source = "#include <metal_stdlib>\nusing namespace metal;\nkernel void k(device float* y, uint i [[thread_position_in_grid]]) { y[i] += 1.0f; }"
    kernel, y = device.compile(source).kernel("k"), device.array(np.zeros(12, np.float32))
    batch = device.batch()
    kernel(y, threads=10, threadgroup=4, batch=batch)
    kernel(y, grid=3, threadgroup=4, batch=batch)
    recording = batch.record()
    for _ in range(2):
        recording.replay()
    recording.wait()
    np.testing.assert_array_equal(y.numpy(), [4] * 10 + [2] * 2)


def test_mps_refuses_a_slice_without_room_for_its_last_row(device: metalmm.Device) -> None:
    big, x = device.array(half(8, 256)), device.array(half(1, 3))  # 4,096 bytes: the buffer ends where the array does
    right(metalmm.matmul("mps/baseline", x, big[2:5, 128:]), np.asarray(x), np.asarray(big)[2:5, 128:])
    for variant in ("mps/baseline", "mps/matvec"):
        with pytest.raises(metalmm.LayoutError, match="b is a slice whose last row ends before its distance to a next one"):
            metalmm.matmul(variant, x, big[5:, 128:])
    right(metalmm.matmul("mps/baseline", x, device.array(big[5:, 128:])), np.asarray(x), np.asarray(big)[5:, 128:])
    right(metalmm.matmul(GEMM, x, big[5:, 128:]), np.asarray(x), np.asarray(big)[5:, 128:])


def test_mps_takes_shared_and_strided_matrices(device: metalmm.Device) -> None:
    store = half(4, 6, 40)
    a = store[:, :3, :20]  # rows 40 apart, matrices 240
    for b in (half(20, 9, seed=1), half(4, 20, 9, seed=2)):
        right(metalmm.matmul("mps/baseline", a, b, device=device), a, b)
    odd = np.lib.stride_tricks.as_strided(half(200), (3, 2, 20), (2 * 50, 2 * 20, 2))  # matrices no whole number of rows apart
    right(metalmm.matmul("mps/baseline", odd, half(3, 20, 9), device=device), odd, half(3, 20, 9))


@needs_fake
def test_an_ndarray_multiplies_rows_without_gaps(device: metalmm.Device) -> None:
    """Both layouts, every type, a batch with one B, alpha; one kernel of MPS for all of it but alpha. Refused: what is not known to work."""
    before = device.counters["mps_kernels"]
    for dtype in (np.float16, np.float32, ml_dtypes.bfloat16):
        a, b = (half(*shape, seed=seed).astype(dtype) for seed, shape in enumerate(((3, 21), (21, 13))))
        right(metalmm.matmul("mps/ndarray", a, b, device=device), a, b)
        right(metalmm.matmul("mps/ndarray", a, np.ascontiguousarray(b.T), transpose_b=True, device=device), a, b)
    right(metalmm.matmul("mps/ndarray", half(4, 5, 20), half(20, 9), device=device), half(4, 5, 20), half(20, 9))
    assert device.counters["mps_kernels"] == before + 1
    right(metalmm.matmul("mps/ndarray", half(3, 21), half(21, 13), alpha=0.5, device=device), half(3, 21), half(21, 13), alpha=0.5)
    assert device.counters["mps_kernels"] == before + 2
    with pytest.raises(metalmm.LayoutError, match="rows of a have 20 elements and are 40 apart; it takes rows without gaps"):
        metalmm.matmul("mps/ndarray", half(3, 40)[:, :20], half(20, 9), device=device)
    with pytest.raises(metalmm.UnsupportedError, match="bias"):
        metalmm.matmul("mps/ndarray", half(3, 21), half(21, 13), bias=half(13), device=device)
    FAKE.inject("mps_kernel")
    with pytest.raises(metalmm.DeviceError, match="no kernel for this shape"):
        metalmm.matmul("mps/ndarray", half(3, 21), half(21, 13), alpha=0.25, device=device)


@needs_fake
def test_an_ndarray_that_would_read_past_its_operands_is_refused() -> None:
    """On GPUs before Apple9; and on a system without arrays over a buffer there is none."""
    before = FAKE.set("apple_family", 8)
    try:
        with metalmm.Device("metal") as old:
            a, b = np.ones((16, 32767), np.float16), np.ones((32767, 16), np.float16)
            with pytest.raises(metalmm.UnsupportedError, match="reads past its operands on this GPU where k reaches 32767"):
                metalmm.matmul("mps/ndarray", a, b, device=old)
            right(metalmm.matmul("mps/ndarray", a[:15], b, device=old), a[:15], b)
    finally:
        FAKE.set("apple_family", before)
    before = FAKE.set("mps_ndarray", 0)
    try:
        with metalmm.Device("metal") as old:
            assert "mps_ndarray" in old.lacking
            with pytest.raises(metalmm.UnsupportedError, match="mps_ndarray"):
                metalmm.matmul("mps/ndarray", half(3, 21), half(21, 13), device=old)
    finally:
        FAKE.set("mps_ndarray", before)


SOURCE = "#include <metal_stdlib>\nusing namespace metal;\nkernel void k(device float* y) { y[0] = 1.0f; }\n"


def run_batch(device: metalmm.Device) -> None:
    with device.batch() as batch:
        batch.matmul(V, device.array(half(1, 16)), device.array(half(16, 16)))


def run_mps(device: metalmm.Device) -> None:
    metalmm.matmul("mps/baseline", half(5, 16), half(16, 16), bias=half(16), device=device)


def off_a_page(x: Any) -> Any:
    """All rows but one, which the GPU has to have a copy of: whole pages would be used in place."""
    return x[1:] if x.ctypes.data % 4096 == 0 else x[:-1]


FAULTS: list[tuple[str, Callable[[metalmm.Device], Any], type[Exception], str]] = [
    ("library", lambda d: metalmm.matmul(GEMM, half(1, 16), half(16, 16), device=d), metalmm.CompileError, "kernel 'gemm_tiled/baseline': .*error: injected"),
    ("library", lambda d: d.compile(SOURCE), metalmm.CompileError, "error: injected"),
    ("pipeline", lambda d: metalmm.matmul(GEMM, half(1, 16), half(16, 16), device=d), metalmm.CompileError, "no pipeline: injected: the compiler gave up"),
    ("allocation", lambda d: d.empty(30000), metalmm.DeviceError, "cannot allocate 60000 bytes; there is no memory left for it"),
    ("allocation", lambda d: metalmm.matmul(V, half(1, 160), off_a_page(half(161, 160)), device=d), metalmm.DeviceError, "cannot allocate"),
    ("no_queue", lambda d: metalmm.Device("metal"), metalmm.DeviceError, "gives no command queue"),
    ("encoder", run_batch, metalmm.DeviceError, "gives no compute encoder"),
    ("command_buffer_status", run_batch, metalmm.KernelError, "gemv/baseline"),
    ("mps", run_mps, metalmm.KernelError, "mps/baseline.*injected: MPS failed"),
    ("mps_kernel", run_mps, metalmm.DeviceError, "no kernel for this shape"),
    ("mps_matrix", run_mps, metalmm.DeviceError, "no matrix of 5 x 16"),
]  # fmt: skip


@needs_fake
@pytest.mark.parametrize(("fault", "use", "error", "message"), FAULTS, ids=[f"{f[0]}-{i}" for i, f in enumerate(FAULTS)])
def test_faults(fault: str, use: Callable[[metalmm.Device], Any], error: type[Exception], message: str, fresh: Path) -> None:
    device = metalmm.Device("metal")
    metalmm.matmul(V, half(1, 16), half(16, 16), device=device)
    gc.collect()
    before = FAKE.live()
    FAKE.inject(fault, 2 if fault == "allocation" else 1)  # which is tried again without what lay idle
    with pytest.raises(error, match=f"(?s){message}"):
        use(device)
    FAKE.inject(fault, 0)
    gc.collect()
    after = FAKE.live()
    new = {name for name in after if after[name] != before.get(name)}
    # Buffers that went to the pool, pipelines and kernels that the device keeps, are no leak: they go with the device.
    assert new <= {"FakeBuffer", "FakePipeline", "MPSMatrixMultiplication", "FakeCommandBuffer"}, new  # the one made for the next time
    right(metalmm.matmul(V, half(1, 16), half(16, 16), device=device), half(1, 16), half(16, 16))
    use_again = use(device)
    device.close()
    del use_again, device


@needs_fake
def test_a_command_buffer_that_cannot_be_made_beforehand_is_asked_for_again(device: metalmm.Device) -> None:
    run_batch(device)
    FAKE.inject("command_buffer", 2)
    run_batch(device)
    with pytest.raises(metalmm.DeviceError, match="gives no command buffer"):
        run_batch(device)
    run_batch(device)


@needs_fake
def test_nothing_is_left_of_a_device() -> None:
    gc.collect()
    before = FAKE.live()
    device = metalmm.Device("metal")
    run_batch(device)
    run_mps(device)
    recording = chain(device, 3)[0].record()
    recording.replay()
    del recording
    library = device.compile(SOURCE)
    library.kernel("k")(np.zeros(1, np.float32), grid=1, threadgroup=1)
    device.close()
    del device, library
    gc.collect()
    assert FAKE.live() == before


def archived(device: metalmm.Device) -> tuple[int, int]:
    right(metalmm.matmul(V, half(1, 16), half(16, 16), device=device), half(1, 16), half(16, 16))
    return device.counters["archive_hits"], device.counters["archive_misses"]


def test_pipelines_are_found_in_archives(fresh: Path) -> None:
    assert archived(metalmm.Device("metal")) == (0, 1)
    assert archived(metalmm.Device("metal")) == (1, 0)
    assert len(list(fresh.glob("*.metalarchive*"))) == 1, "no temporary file is left"


@pytest.mark.parametrize("content", [b"", b"rubbish"])
def test_a_corrupt_archive_is_dropped_with_a_warning(content: bytes, fresh: Path) -> None:
    archived(metalmm.Device("metal"))
    (archive,) = fresh.glob("*.metalarchive")
    archive.write_bytes(content)
    with pytest.warns(RuntimeWarning, match=rf"the archive {archive} is of no use .*; it is built again"):
        assert archived(metalmm.Device("metal")) == (0, 1)
    assert archived(metalmm.Device("metal")) == (1, 0)


@needs_fake
def test_a_foreign_archive_is_dropped_with_a_warning(fresh: Path) -> None:
    archived(metalmm.Device("metal"))
    (archive,) = fresh.glob("*.metalarchive")
    archive.write_text("fake archive\n12345\n")  # another kernel's
    with pytest.warns(RuntimeWarning, match="does not have this pipeline"):
        assert archived(metalmm.Device("metal")) == (0, 1)
    assert archived(metalmm.Device("metal")) == (1, 0)


@needs_fake
@pytest.mark.parametrize("fault", ["archive_add", "archive_save"])
def test_an_archive_that_cannot_be_written_is_a_warning(fault: str, fresh: Path) -> None:
    FAKE.inject(fault)
    with pytest.warns(RuntimeWarning, match="cannot write the archive"):
        assert archived(metalmm.Device("metal")) == (0, 1)
    assert list(fresh.glob("*.metalarchive*")) == []


@needs_fake
def test_an_archive_that_metal_refuses(fresh: Path) -> None:
    archived(metalmm.Device("metal"))
    FAKE.inject("archive_load")
    with pytest.warns(RuntimeWarning, match="not an archive"):
        assert archived(metalmm.Device("metal")) == (0, 1)


def test_capture_needs_leave(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: metalmm.Device) -> None:
    monkeypatch.delenv("METAL_CAPTURE_ENABLED", raising=False)
    if FAKE:
        with pytest.raises(metalmm.DeviceError, match="METAL_CAPTURE_ENABLED=1"), metalmm.capture(tmp_path / "a.gputrace", device):
            pass
    with (
        pytest.raises(metalmm.DeviceError, match="device cpu has no GPU capture"),
        metalmm.capture(tmp_path / "a.gputrace", metalmm.Device("cpu")),
    ):
        pass


@needs_fake
def test_capture_writes_a_trace(tmp_path: Path) -> None:
    script = textwrap.dedent("""
        import sys, metalmm, numpy as np
        path = sys.argv[1]
        with metalmm.capture(path):
            metalmm.matmul("gemv/baseline", np.ones((1, 8), np.float16), np.ones((8, 8), np.float16))
        try:
            with metalmm.capture(path):
                raise AssertionError
        except metalmm.DeviceError as error:
            assert "exists" in str(error), error
        with metalmm.capture(path + "2"):
            pass
    """)
    (tmp_path / "s.py").write_text(script)
    command = [sys.executable, str(ROOT / "tests" / "fakes" / "on_fake_metal.py"), str(tmp_path / "s.py"), str(tmp_path / "a.gputrace")]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "METAL_CAPTURE_ENABLED": "1"})
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "a.gputrace").exists()
