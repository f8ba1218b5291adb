"""What the CPU device refuses, and how it says so: rules of Metal that a kernel or dispatch breaks."""

from __future__ import annotations

import os
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import metalmm
import numpy as np
import pytest
from support.here import ARM

HEAD = "#include <metal_stdlib>\nusing namespace metal;\n"
DIVERGE = (
    HEAD
    + """
kernel void returns(device float* y, uint t [[thread_index_in_threadgroup]]) {
  if (t >= 40) return;
  threadgroup_barrier(mem_flags::mem_threadgroup);  // line 6
  y[t] = 1.0f;
}
kernel void elsewhere(device float* y, uint t [[thread_index_in_threadgroup]]) {
  if (t < 32) {
    threadgroup_barrier(mem_flags::mem_threadgroup);  // line 11
  } else {
    threadgroup_barrier(mem_flags::mem_threadgroup);  // line 13
  }
  y[t] = 1.0f;
}
kernel void uneven(device float* y, uint t [[thread_index_in_threadgroup]]) {
  for (uint i = 0; i < t; i++) threadgroup_barrier(mem_flags::mem_threadgroup);
  y[t] = 1.0f;
}
kernel void none(device float* y, uint t [[thread_index_in_threadgroup]]) {
  if (t >= 40) return;
  threadgroup_barrier(mem_flags::mem_none);
  y[t] = 1.0f;
}
kernel void edges(device float* y, uint t [[thread_index_in_threadgroup]]) {
  if (t < 3 || t == 63) return;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  y[t] = 1.0f;
}
"""
)


@pytest.fixture(scope="module")
def diverging(device: metalmm.Device) -> metalmm.Library:
    return device.compile(DIVERGE)


@pytest.mark.parametrize(
    ("kernel", "message"),
    [
        (
            "returns",
            r"kernel 'returns': threadgroup \(\d, 0, 0\): barrier divergence: of 64 threads, 40 wait at threadgroup_barrier \(<source>:6\), 24 have returned",
        ),
        (
            "elsewhere",
            r"kernel 'elsewhere'.*32 wait at threadgroup_barrier \(<source>:11\), 32 wait at threadgroup_barrier \(<source>:13\)",
        ),
        ("uneven", r"kernel 'uneven'.*63 wait at threadgroup_barrier \(<source>:18\), 1 have returned"),
    ],
)
def test_barrier_divergence_is_an_error(diverging: metalmm.Library, kernel: str, message: str) -> None:
    y = np.zeros(64, np.float32)
    with pytest.raises(metalmm.KernelError, match=message):
        diverging.kernel(kernel)(y, grid=(2,), threadgroup=(64,))
    # The device is usable afterwards.
    diverging.kernel("none")(y, grid=(1,), threadgroup=(64,))
    np.testing.assert_array_equal(y, [1] * 40 + [0] * 24)


def test_lenient_barriers_let_returned_threads_count() -> None:
    device = metalmm.Device("cpu", lenient_barriers=True)
    y = np.zeros(64, np.float32)
    device.compile(DIVERGE).kernel("returns")(y, grid=(1,), threadgroup=(64,))
    np.testing.assert_array_equal(y, [1] * 40 + [0] * 24)
    y[:] = 0
    device.compile(DIVERGE).kernel("edges")(y, grid=(1,), threadgroup=(64,))
    np.testing.assert_array_equal(y, [0] * 3 + [1] * 60 + [0])


def test_a_matmul_that_fails_names_its_threadgroup_and_spares_the_batch(diverging: metalmm.Library, device: metalmm.Device) -> None:
    y = np.zeros(64, np.float32)
    batch = device.batch()
    diverging.kernel("returns")(y, grid=(1,), threadgroup=(64,), batch=batch)
    batch.submit()
    with pytest.raises(metalmm.KernelError, match="kernel 'returns'"):
        batch.wait()


LIMITS = (
    HEAD
    + """
[[max_total_threads_per_threadgroup(64)]] kernel void limited(device float* y, uint t [[thread_index_in_threadgroup]]) { y[t] = 1; }
kernel void open(device float* y, uint t [[thread_index_in_threadgroup]]) { y[t] = 1; }
kernel void big(device float* y, uint t [[thread_index_in_threadgroup]]) { threadgroup float x[9000]; x[t] = 1; y[t] = x[t]; }
kernel void dynamic(device float* y, threadgroup float* x [[threadgroup(1)]], uint t [[thread_index_in_threadgroup]]) { x[t] = 1; y[t] = x[t]; }
kernel void twice(device float* y, threadgroup float* a [[threadgroup(0)]], threadgroup float* b [[threadgroup(1)]]) {
  threadgroup float c[4];
  a[0] = b[0] = c[0] = 1;
  y[0] = a[0] + b[0] + c[0];
}
kernel void reads(const device float* x, device float* y, constant uint4& n) { y[0] = x[0] + n.w; }
"""
)


@pytest.fixture(scope="module")
def limits(device: metalmm.Device) -> metalmm.Library:
    return device.compile(LIMITS)


@pytest.mark.parametrize(
    ("kernel", "threads", "message"),
    [
        ("limited", (65,), r"threadgroup \(65, 1, 1\) has 65 threads; the limit of this kernel is 64"),
        ("open", (1025,), r"1025 threads; the limit of this kernel is 1024"),
        ("open", (32, 33), r"1056 threads"),
        ("open", (32, 1, 33), r"1056 threads"),
        ("big", (1,), r"36000 bytes of threadgroup memory; the limit is 32768"),
        ("dynamic", (1,), r"no size is given for threadgroup memory 1"),
    ],
)
def test_limits(limits: metalmm.Library, kernel: str, threads: Any, message: str) -> None:
    with pytest.raises(metalmm.KernelError, match=f"kernel '{kernel}': .*{message}"):
        limits.kernel(kernel)(np.zeros(2048, np.float32), grid=(1,), threadgroup=threads)


def test_threadgroup_memory_limit_is_configurable() -> None:
    device = metalmm.Device("cpu", threadgroup_memory_limit=65536)
    y = np.zeros(8, np.float32)
    library = device.compile(LIMITS)
    library.kernel("big")(y, grid=(1,), threadgroup=(8,))
    np.testing.assert_array_equal(y, np.ones(8))
    with pytest.raises(metalmm.KernelError, match="65540 bytes of threadgroup memory"):
        library.kernel("dynamic")(y, grid=(1,), threadgroup=(8,), threadgroup_memory={1: 65540})


def test_the_last_index_is_30(device: metalmm.Device) -> None:
    source = HEAD + "kernel void k(device float* y [[buffer(30)]], threadgroup float* x [[threadgroup(30)]]) { x[0] = 5; y[0] = x[0]; }"
    kernel, y = device.compile(source).kernel("k"), np.zeros(1, np.float32)
    kernel({30: y}, grid=1, threadgroup=1, threadgroup_memory={30: 16})
    np.testing.assert_array_equal(y, [5])


def test_threadgroup_memory_adds_up_to_the_limit(limits: metalmm.Library) -> None:
    kernel, y = limits.kernel("twice"), np.zeros(1, np.float32)
    kernel(y, grid=1, threadgroup=1, threadgroup_memory={0: 16384, 1: 16384 - 16})
    np.testing.assert_array_equal(y, [3])
    with pytest.raises(metalmm.KernelError, match="32784 bytes of threadgroup memory; the limit is 32768"):
        kernel(y, grid=1, threadgroup=1, threadgroup_memory={0: 16384, 1: 16384})


def test_a_buffer_holds_its_argument(limits: metalmm.Library) -> None:
    x, y, n = np.ones(4, np.float32), np.zeros(4, np.float32), np.arange(16, dtype=np.uint8)
    kernel = limits.kernel("reads")
    kernel(x, y, n, grid=1, threadgroup=1)
    with pytest.raises(metalmm.KernelError, match="buffer 2 holds 15 bytes; the argument takes at least 16"):
        kernel(x, y, n[:15], grid=1, threadgroup=1)


def test_unbound_buffers_and_wrong_arguments(limits: metalmm.Library) -> None:
    x, y = np.ones(4, np.float32), np.zeros(4, np.float32)
    kernel = limits.kernel("reads")
    size = {"grid": (1,), "threadgroup": (1,)}
    with pytest.raises(metalmm.KernelError, match=r"nothing is bound to buffer index 2"):
        kernel({0: x, 1: y}, **size)
    with pytest.raises(metalmm.KernelError, match=r"2 arguments; it takes 3, for the buffer indices 0, 1, 2"):
        kernel(x, y, **size)
    with pytest.raises(metalmm.KernelError, match=r"bytes at index 2 are 4; the argument takes at least 16"):
        kernel(x, y, bytes(4), **size)
    with pytest.raises(metalmm.KernelError, match=r"argument 1 is not const; bind a buffer, not bytes"):
        kernel(x, bytes(16), bytes(16), **size)
    y.flags.writeable = False
    with pytest.raises(metalmm.KernelError, match=r"buffer 1 is read-only memory"):
        kernel(x, y, bytes(16), **size)
    with pytest.raises(metalmm.LayoutError, match=r"buffer 0 is not C-contiguous"):
        kernel(np.ones((4, 4), np.float32)[:, ::2], np.zeros(4, np.float32), bytes(16), **size)
    with pytest.raises(metalmm.DTypeError, match=r"buffer 0 is list"):
        kernel([1.0], np.zeros(4, np.float32), bytes(16), **size)
    with pytest.raises(metalmm.KernelError, match=r"grid takes up to three sizes"):
        kernel(x, np.zeros(4, np.float32), bytes(16), grid=(0,), threadgroup=(1,))


def test_threadgroup_memory_holds_nan_before_it_is_written(device: metalmm.Device) -> None:
    source = HEAD + "kernel void k(device float* y, uint t [[thread_index_in_threadgroup]]) { threadgroup float x[32]; y[t] = x[t]; }"
    y = np.zeros(32, np.float32)
    device.compile(source).kernel("k")(y, grid=(1,), threadgroup=(32,))
    assert np.isnan(y).all()


def test_stack_frames_near_the_limit_do_not_compile(device: metalmm.Device) -> None:
    source = HEAD + (
        "kernel void k(device float* y, constant uint& n) { volatile float x[40000]; for (uint i = 0; i < n; i++) x[i * 7 % 40000] = i; y[0] = x[n]; }"
    )
    with pytest.raises(metalmm.CompileError, match="frame"):
        device.compile(source).kernel("k")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        *(() if ARM else (("y[0] = float(10 / n);", "an integer division by zero"),)),
        *(() if ARM else (("int4 v = int4(10) / n; y[0] = v.x;", "an integer division by zero"),)),
        ("y[1099511627776ul * (n + 1)] = 1.0f;", "a memory access at 0x"),
        ("y[0] = deep(y, 100000000 + n);", "a stack deeper than 256 KB"),
    ],
)
def test_a_kernels_fault_is_an_error_not_the_end_of_the_process(
    body: str, message: str, device: metalmm.Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    # MSL has no recursion; it is the plainest way to the end of a stack here.
    monkeypatch.setenv("METALMM_LINT", "0")
    deep = "static float deep(device float* y, int n) { volatile float x[64]; x[n & 63] = y[0]; return n <= 0 ? x[1] : deep(y, n - 1) + x[n & 63]; }\n"
    kernel = device.compile(HEAD + deep + "kernel void k(device float* y, constant int& n) { " + body + " }").kernel("k")
    y = np.zeros(4, np.float32)
    for _ in range(3):
        with pytest.raises(metalmm.KernelError, match=rf"kernel 'k': threadgroup \(0, 0, 0\): .*{message}"):
            kernel(y, np.int32(0).tobytes(), grid=(1,), threadgroup=(1,))
    np.testing.assert_array_equal(
        metalmm.matmul("gemv/baseline", np.ones((1, 2), np.float16), np.ones((2, 2), np.float16), device=device), [[2, 2]]
    )


def test_a_stack_that_runs_into_its_neighbours_is_found(device: metalmm.Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other lanes' stacks are below it, once all have begun: without a page between them nothing would fault."""
    monkeypatch.setenv("METALMM_LINT", "0")
    deep = "static float deep(device float* y, int n) { volatile float x[64]; x[n & 63] = y[0]; return n <= 0 ? x[1] : deep(y, n - 1) + x[n & 63]; }\n"
    source = f"{HEAD}{deep}kernel void k(device float* y, constant int& n, uint i [[thread_position_in_grid]]) {{ threadgroup_barrier(mem_flags::mem_none); y[i] = i == 40 ? deep(y, n) : 0; }}"
    kernel, y = device.compile(source).kernel("k"), np.zeros(64, np.float32)
    kernel(y, 600, grid=1, threadgroup=64)
    with pytest.raises(metalmm.KernelError, match="a stack deeper than 256 KB"):
        kernel(y, 1200, grid=1, threadgroup=64)


def test_a_place_in_a_file_is_named_without_its_folder(tmp_path: Path, device: metalmm.Device) -> None:
    (tmp_path / "own.metal").write_text(DIVERGE)
    with pytest.raises(metalmm.KernelError, match=r"wait at threadgroup_barrier \(own\.metal:6\)"):
        device.compile(tmp_path / "own.metal").kernel("returns")(np.zeros(64, np.float32), grid=1, threadgroup=64)


def test_two_threads_of_a_device_work_at_once() -> None:
    """One that sleeps is woken: each of two threadgroups waits for the other."""
    device = metalmm.Device("cpu", threads=2, timeout=20.0)
    source = "kernel void k(volatile device uint* there, uint g [[threadgroup_position_in_grid]]) { there[g] = 1; while (!there[1 - g]) {} there[2 + g] = 1; }"
    kernel = device.compile(HEAD + source).kernel("k")
    for pause in (0.0, 0.3):
        time.sleep(pause)  # its threads go to sleep
        there = np.zeros(4, np.uint32)
        kernel(there, grid=2, threadgroup=1)
        assert there.all()


def test_two_python_threads_issue_at_once(device: metalmm.Device) -> None:
    rng = np.random.default_rng(8)
    problems: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            a = rng.standard_normal((1, 300)).astype(np.float16)
            b = rng.standard_normal((200, 300)).astype(np.float16)
            expected = metalmm.matmul("m1_optimized_v2/nt_bn64_col", a, b, transpose_b=True, device=device)
            for i in range(150):
                v = ("m1_optimized_v2/nt_bn64_col", "m1_optimized_v2/nt_bn128_col")[(i + seed) % 2]
                out = metalmm.matmul(v, a, b, transpose_b=True, device=device)
                np.testing.assert_array_equal(out, expected)
                with device.batch() as batch:
                    y = batch.matmul(v, a, b, transpose_b=True)
                np.testing.assert_array_equal(y, expected)
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not problems


def test_threadgroup_memory_indices_and_sizes_are_checked(limits: metalmm.Library, device: metalmm.Device) -> None:
    kernel, y = limits.kernel("dynamic"), np.zeros(4, np.float32)
    for memory, message in [
        ({1: 128, 60: 16}, "threadgroup memory index 60 is not in 0 to 30"),
        ({1: 2**64 - 1}, "18446744073709551615 bytes of threadgroup memory; the limit is 32768"),
        ({1: -1}, "threadgroup_memory: -1 is not a whole number in range"),
        ({"a": 16}, "threadgroup_memory: 'a' is not a whole number"),
    ]:
        for batch in (None, device.batch()):
            with pytest.raises(metalmm.KernelError, match=message):
                kernel(y, grid=1, threadgroup=4, threadgroup_memory=memory, batch=batch)
    with pytest.raises(metalmm.KernelError, match=r"grid: 1.0 is not a whole number"):
        kernel(y, grid=(1.0,), threadgroup=4, threadgroup_memory={1: 16})
    kernel(y, grid=1, threadgroup=4, threadgroup_memory={1: 16})
    np.testing.assert_array_equal(y, np.ones(4))


def test_what_a_kernel_writes_to_none_stays_there(device: metalmm.Device) -> None:
    kernel = device.compile(HEAD + "kernel void k(device float* x, device float* y) { y[0] = x[0]; x[0] = 7.0f; }").kernel("k")
    y = np.ones(1, np.float32)
    for _ in range(2):
        kernel(None, y, grid=1, threadgroup=1)
        assert y[0] == 0


def test_a_child_of_fork_can_work(device: metalmm.Device) -> None:
    a, b = np.ones((1, 64), np.float16), np.ones((500, 64), np.float16)
    metalmm.matmul("m1_optimized_v2/nt_bn64_col", a, b, transpose_b=True, device=device)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # newer Pythons warn of threads
        child = os.fork()
    if child == 0:
        out = metalmm.matmul("m1_optimized_v2/nt_bn64_col", a, b, transpose_b=True, device=device)
        device.close()
        os._exit(0 if (out == 64).all() else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
