"""The Metal device: what it asks of Metal, what it makes of Metal's failures. On the fake, some faults are injected."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import metalmm
import numpy as np
import pytest
from support.here import FAKE, ROOT
from support.metal import GEMM, V, needs_fake, pages
from support.numbers import half, right

MISUSES = {
    "indirect-type": "a dispatch of a type that its descriptor's commandTypes does not have",
    "unbound": "nothing is bound to buffer index 1",
    "too-small": "holds 256 bytes, less than offset 256 and 4",
    "misaligned": "offset 2 of buffer index 0",
    "set-bytes": "setBytes: of 4097 bytes; the limit is 4096",
    "threadgroup-limit": "1025 threads in a threadgroup; the limit is 1024",
    "zero-grid": "a grid of (0, 1, 1) threadgroups",
    "no-pipeline": "a dispatch with no pipeline set",
    "use-after-end": "a call of an encoder after endEncoding",
    "use-after-commit": "an encoder is asked of a command buffer after its commit",
    "double-commit": "commit of a command buffer that was committed",
    "not-ended": "commit before endEncoding",
    "encoder-open": "a second encoder is opened before endEncoding of the first",
    "freed-in-flight": "is deallocated while a command buffer that uses it is in flight",
    "missing-barrier": "depends on an earlier dispatch of this concurrent encoder",
    "indirect": "a pipeline made without supportIndirectCommandBuffers",
    "indirect-index": "is not below maxKernelBufferBindCount",
    "not-resident": "an indirect command buffer without useResource:",
    "mps-rows": "MPSMatrix: 512 bytes in a buffer of 256",
    "mps-row-bytes": "MPSMatrix: rowBytes 6 for 4 columns",
    "mps-columns": "left matrix is 4 x 8; the kernel takes 4 x 4",
    "mps-batch": "batches that differ",
    "mps-matrix-bytes": "MPSMatrix: matrixBytes 36 for 4 rows of 8",
    "threadgroup-memory": "a length of 20, which is no multiple of 16",
    "bytes-written": "bytes at buffer index 1, which the kernel may write",
    "index": "buffer index 31",
    "barrier": "a barrier that does not order buffers",
    "wait": "waitUntilCompleted before commit",
    "unread-status": "nobody has read its status after it was done",
    "event": "an event's value that does not rise",
    "did-modify": "of a buffer that is not managed",
    "synchronize": "of a buffer that is not managed",
    "residency": "of something that was not added",
    "buffer-length": "newBufferWithLength: of 0",
    "mps-unretained": "a command buffer that does not retain what it uses",
    "queue-full": "more command buffers than the queue has",
    "samples": "more than 32 KB of samples",
    "no-copy": "memory that is not whole pages",
    "unordered": "untracked, and neither a fence nor an event stands after an earlier pass that uses it",
    "lingering": "32784 bytes of threadgroup memory; the limit is 32768",
    "working-set": "more than the working set may have",
    "too-long": "newBufferWithLength: of 17179869185",
    "misaligned-vector": "offset 4 of buffer index 0",
}


@needs_fake
@pytest.mark.parametrize("name", MISUSES)
def test_the_fake_sees_each_misuse(name: str) -> None:
    FAKE.misuse("nothing")
    assert FAKE.take_violations() == []
    FAKE.misuse(name)
    assert any(MISUSES[name] in v for v in FAKE.take_violations())


@needs_fake
def test_leaks_and_broken_rules_at_exit_end_the_process_in_failure(tmp_path: Path) -> None:
    for name, message in [("leak", "alive at exit: {'FakeBuffer': 1}"), ("unbound", "nothing is bound"), ("nothing", "")]:
        script = tmp_path / "s.py"
        script.write_text(f"import on_fake_metal\non_fake_metal.fake.misuse({name!r})\n")
        done = subprocess.run(
            [sys.executable, str(ROOT / "tests" / "fakes" / "on_fake_metal.py"), str(script)], capture_output=True, text=True
        )
        assert done.returncode == (86 if message else 0), done.stderr
        assert message in done.stderr


def test_info_names_limits_families_and_memory(device: metalmm.Device) -> None:
    info = device.info
    assert device.name == "metal"
    assert info["name"] == metalmm.metal_devices()[0]
    assert "metal3" in info["families"].split()
    assert info["max_threadgroup_memory_length"] >= 32768
    assert info["max_buffer_length"] > 1 << 30
    assert isinstance(info["unified_memory"], bool)
    assert device.threads is None
    assert repr(metalmm.Device("metal", index=0)) == repr(device)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"index": 99}, "index is 99; there are"),
        ({"spin": -1}, "spin is -1"),
        ({"spin": 1.5}, "spin is 1.5"),
        ({"max_operations": 0}, "max_operations 0"),
        ({"max_bytes": 0}, "max_bytes 0"),
        ({"first_commit": -1}, "first_commit -1"),
    ],
)
def test_options_out_of_range(options: dict[str, Any], message: str) -> None:
    with pytest.raises(metalmm.DeviceError, match=message):
        metalmm.Device("metal", **options)


def test_sizes_beyond_the_device(device: metalmm.Device) -> None:
    with pytest.raises(metalmm.DeviceError, match=r"cannot allocate \d+ bytes; the limit of a buffer is"):
        device.empty(1 << 44)
    assert device.empty(0).nbytes == 0


def calls_of(device: metalmm.Device, encode: Callable[[Any], Any]) -> int:
    batch = device.batch()
    encode(batch)
    if FAKE:
        FAKE.take_calls()
    batch.submit()
    batch.wait()
    if FAKE:  # which does not count what is not asked of a compute encoder: open, begin, end, signal, commit
        assert batch.timing.calls == FAKE.take_calls() + 5
    return batch.timing.calls


def test_barriers_stand_only_where_memory_is_shared(device: metalmm.Device) -> None:
    x, w = device.array(half(1, 32)), device.array(half(32, 32, seed=1))
    y, z, u = (device.empty((1, 32)) for _ in range(3))
    base = calls_of(device, lambda t: t.matmul(V, x, w, out=y))

    def extra(*pairs: tuple[Any, Any]) -> int:
        """Calls beyond the first matmul's, its like having been measured: bindings, dispatch, and a barrier or none."""
        return calls_of(device, lambda t: (t.matmul(V, x, w, out=y), [t.matmul(V, a, w, out=o) for a, o in pairs])) - base

    one_more = 2  # a binding and the dispatch
    assert extra((x, z)) == one_more  # apart
    assert extra((x, z), (x, u)) == 2 * one_more  # two that read the same
    assert extra((y, z)) == one_more + 1  # read after write
    assert extra((x, y)) == 2  # write after write: nothing to bind, a barrier
    assert extra((z, x)) == one_more + 1  # write after read
    assert extra((y, z), (x, u)) == one_more + 1 + one_more  # the barrier before orders the third, too
    assert extra((y, z), (z, u)) == 2 * (one_more + 1)
    # What is read behind a barrier is known, though the dispatch before the barrier read the same.
    assert extra((x, y), (z, x)) == extra((x, y), (z, u)) + 1


def test_hazards_go_by_range_not_by_buffer(device: metalmm.Device) -> None:
    """Rows of one NumPy array share a buffer on the GPU."""
    source = "#include <metal_stdlib>\nusing namespace metal;\nkernel void next(const device float* x, device float* y, uint i [[thread_position_in_grid]]) { y[i] = x[i] + 1.0f; }"
    kernel = device.compile(source).kernel("next")
    rows = np.zeros((4, 64), np.float32)

    def run(*pairs: tuple[int, int]) -> int:
        batch = device.batch()
        for a, b in pairs:
            kernel(rows[a], rows[b], grid=1, threadgroup=64, batch=batch)
        batch.submit()
        batch.wait()
        return batch.timing.calls

    apart = run((0, 1), (2, 3))
    assert run((0, 1), (1, 2)) == apart + 1
    # What the first read too is a read of the second, behind whose barrier the first is forgotten.
    assert run((0, 1), (0, 1), (3, 0)) == run((0, 1), (0, 1), (3, 2)) + 1
    rows[:] = 0
    run((0, 1), (1, 2), (2, 3))
    np.testing.assert_array_equal(rows, np.repeat([[0], [1], [2], [3]], 64, axis=1))


def test_steady_state_takes_at_most_six_calls(device: metalmm.Device) -> None:
    """Every matmul with other weights and results, and another variant than the one before."""
    x = device.array(half(1, 64))
    weights = [device.array(half(64, 64, seed=i)) for i in range(64)]

    def run(count: int) -> int:
        return calls_of(device, lambda t: [t.matmul((V, GEMM)[i % 2], x, weights[i]) for i in range(count)])

    assert (run(64) - run(32)) / 32 <= 6
    assert run(64) - run(32) == 32 * 3  # pipeline, buffers, dispatch: params are the same
    same = calls_of(device, lambda t: [t.matmul(V, x, weights[0]) for _ in range(9)]) - calls_of(
        device, lambda t: t.matmul(V, x, weights[0])
    )
    assert same == 8 * 2  # D and the dispatch


@pytest.mark.parametrize("most", [1, 3, 4, 100])
def test_long_batches_are_split(most: int) -> None:
    device = metalmm.Device("metal", max_operations=most)
    x = device.array(half(1, 16))
    w = device.array(np.eye(16, dtype=np.float16) * np.float16(2))
    with device.batch() as batch:
        y = x
        for _ in range(8):
            y = batch.matmul(V, y, w)
    np.testing.assert_array_equal(np.asarray(y), np.asarray(x) * 256)
    assert batch.timing.calls >= 8 + 3 * (8 // most)
    small = metalmm.Device("metal", max_bytes=1)
    with small.batch() as batch:
        outs = [batch.matmul(V, np.asarray(x), np.asarray(w)) for _ in range(3)]
    np.testing.assert_array_equal(outs[2], np.asarray(x) * 2)


def test_long_bytes_go_through_a_buffer(device: metalmm.Device) -> None:
    source = "#include <metal_stdlib>\nusing namespace metal;\nkernel void k(constant int* x, device int* y) { y[0] = x[0] + x[4999]; }"
    numbers, y = np.arange(5000, dtype=np.int32), np.zeros(1, np.int32)
    device.compile(source).kernel("k")(numbers.tobytes(), y, grid=1, threadgroup=1)
    assert y[0] == 4999


def test_arrays_on_whole_pages_are_not_copied() -> None:
    device = metalmm.Device("metal")
    before = device.counters["pooled_bytes"]
    a, b, out = pages((1, 4096)), pages((4096, 256)), pages((1, 256))
    a[...], b[...] = half(1, 4096), half(4096, 256, seed=1)
    metalmm.matmul(V, a, b, out=out, device=device)
    right(out, a, b)
    assert device.counters["pooled_bytes"] == before, "nothing was taken from the pool"
    c = pages((4097,))[1:].reshape(1, 4096)  # NumPy's own memory may begin on a page by chance
    c[...] = half(1, 4096)
    metalmm.matmul(V, c, b, out=out, device=device)
    right(out, c, b)
    assert device.counters["pooled_bytes"] > before
    held = device.counters["pooled_bytes"]
    metalmm.matmul(V, c, b, out=out, device=device)
    assert device.counters["pooled_bytes"] == held, "taken from the pool and given back"


def test_copies_stand_as_the_host_memory_does(device: metalmm.Device) -> None:
    """Kernels are told where rows begin within 8 bytes, by the host's address."""
    source = "#include <metal_stdlib>\nusing namespace metal;\nkernel void k(const device half* x, device uint* y) { y[0] = uint(reinterpret_cast<ulong>(x) % 16); }"
    kernel, store = device.compile(source).kernel("k"), half(64)
    for offset in range(8):
        y = np.zeros(1, np.uint32)
        kernel(store[offset:], y, grid=1, threadgroup=1)
        assert y[0] == store[offset:].ctypes.data % 16


@pytest.mark.parametrize("aligned", [False, True])
def test_submissions_that_share_numpy_memory_run_in_order(aligned: bool, device: metalmm.Device) -> None:
    x = pages((1, 64)) if aligned else np.zeros((1, 64), np.float16)
    a, w = half(1, 64), np.eye(64, dtype=np.float16) * np.float16(2)
    first, second = device.batch(), device.batch()
    first.matmul(V, a, w, out=x)
    y = second.matmul(V, x, w)
    first.submit()
    second.submit()
    second.wait()
    first.wait()
    np.testing.assert_array_equal(y, a * 4)
    x[...] = 0
    batch = device.batch()
    batch.matmul(V, a, w, c=x, beta=1.0, out=x)
    recording = batch.record()
    for _ in range(3):
        recording.replay()
    recording.wait()
    np.testing.assert_array_equal(x, a * 2 + a * 2 + a * 2)


def test_a_view_of_a_device_array_is_that_array(device: metalmm.Device) -> None:
    w = np.eye(64, dtype=np.float16) * np.float16(2)
    x = device.empty((1, 64))
    with device.batch() as batch:
        batch.matmul(V, half(1, 64), w, out=x)
        y = batch.matmul(V, x.numpy(), w)
        batch.matmul(V, half(1, 64, seed=1), w, out=x.numpy())
    np.testing.assert_array_equal(y, half(1, 64) * 4)
    np.testing.assert_array_equal(np.asarray(x), half(1, 64, seed=1) * 2)


def test_arrays_of_no_bytes_can_be_bound(device: metalmm.Device) -> None:
    source = "#include <metal_stdlib>\nusing namespace metal;\nkernel void k(device float* y) { y[0] = 1.0f; }"
    y = np.zeros(1, np.float32)
    device.compile(source).kernel("k")({0: y, 7: np.zeros(0, np.float32)}, grid=1, threadgroup=1)
    assert y[0] == 1


def test_bytes_are_bound_anew_after_others(device: metalmm.Device) -> None:
    source = "#include <metal_stdlib>\nusing namespace metal;\nkernel void k(constant int* x, device int* y) { y[0] = x[0]; }"
    kernel, y = device.compile(source).kernel("k"), np.zeros((4, 1), np.int32)
    small = np.int32([1, 0, 0, 0]).tobytes()
    with device.batch() as batch:
        for i, data in enumerate((small, np.full(64, 2, np.int32).tobytes(), small, np.full(2000, 3, np.int32).tobytes())):
            assert kernel(data, y[i], grid=1, threadgroup=1, batch=batch) is None
    np.testing.assert_array_equal(y[:, 0], [1, 2, 1, 3])


@needs_fake
def test_pages_that_the_gpu_cannot_map_are_copied(device: metalmm.Device) -> None:
    a, b, out = half(1, 64), pages((64, 64)), pages((1, 64))
    b[...] = half(64, 64, seed=1)
    FAKE.inject("wrap", 2)
    metalmm.matmul(V, a, b, out=out, device=device)
    right(out, a, b)


@pytest.mark.parametrize("aligned", [False, True])
def test_views_of_one_array_in_one_batch(aligned: bool, device: metalmm.Device) -> None:
    memory = pages((6, 64)) if aligned else np.zeros((6, 64), np.float16)
    w = np.eye(64, dtype=np.float16) * np.float16(2)
    memory[...] = 0
    memory[0] = 1
    with device.batch() as batch:
        for i in range(3):
            batch.matmul(V, memory[i : i + 1], w, out=memory[i + 1 : i + 2])
        batch.matmul(GEMM, memory[0:2], w, out=memory[4:6])  # reads what the rows above are, as two at once
    np.testing.assert_array_equal(memory[:, 0], [1, 2, 4, 8, 2, 4])
    assert (memory == memory[:, :1]).all()


def test_a_failed_batch_leaves_numpy_arrays_alone(device: metalmm.Device) -> None:
    if not FAKE:
        pytest.skip("needs an injected fault")
    a, b, out = half(1, 16), half(16, 16), np.full((1, 16), 7, np.float16)
    FAKE.inject("command_buffer_status")
    with pytest.raises(metalmm.KernelError):
        metalmm.matmul(V, a, b, out=out, device=device)
    assert (out == 7).all()
