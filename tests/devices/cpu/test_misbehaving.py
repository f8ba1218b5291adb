"""Kernels that write outside what they were given, trap, misalign or never end: an error that names what and where, and a device that
still works."""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import metalmm
import numpy as np
import pytest

HEAD = "#include <metal_stdlib>\nusing namespace metal;\n"
KERNELS = (
    HEAD
    + """
kernel void writes(device half* x [[buffer(0)]], device half* y [[buffer(1)]], constant int& at [[buffer(2)]]) { y[at] = x[0]; }
kernel void reads(const device half* x [[buffer(0)]], device half* y [[buffer(1)]], constant int& at [[buffer(2)]]) { y[0] = x[at]; }
kernel void threadgroup_(device half* y [[buffer(0)]], constant int& at [[buffer(1)]], uint t [[thread_index_in_threadgroup]]) {
  threadgroup half x[8];
  threadgroup half* p = x;
  p[at] = half(t);
  y[t] = x[0];
}
kernel void dynamic_(device half* y [[buffer(0)]], constant int& at [[buffer(1)]], threadgroup half* x [[threadgroup(0)]]) { x[at] = 1.0h; y[0] = 1.0h; }
kernel void loads4(const device half* x [[buffer(0)]], device half* y [[buffer(1)]], constant int& at [[buffer(2)]]) {
  float4 v = float4(*reinterpret_cast<const device half4*>(x + at));
  y[0] = half((v.x + v.y) + (v.z + v.w));
}
kernel void copies4(const device half* x [[buffer(0)]], device half* y [[buffer(1)]], constant int& at [[buffer(2)]]) {
  half4 v = *reinterpret_cast<const device half4*>(x + at);
  for (int i = 0; i < 4; i++) y[i] = v[i];
}
kernel void stores4(device float* y [[buffer(0)]], constant int& at [[buffer(1)]]) { *reinterpret_cast<device float4*>(y + at) = float4(1.0f); }
kernel void packed4(const device float* x [[buffer(0)]], device float* y [[buffer(1)]], constant int& at [[buffer(2)]]) {
  packed_float4 v = *reinterpret_cast<const device packed_float4*>(x + at);
  y[0] = v[3];
}
kernel void doubles(const device half* x [[buffer(0)]], device half* y [[buffer(1)]], uint i [[thread_position_in_grid]]) { y[i] = x[i] * 2.0h; }
kernel void copies(const device half* x [[buffer(0)]], device half* y [[buffer(1)]], uint i [[thread_position_in_grid]]) { y[i] = x[i]; }
kernel void adds(volatile device int* y, constant int& n, uint i [[thread_position_in_grid]]) { while (true) { y[i] += 1; } }
kernel void never_down(device int* y, constant int& n, uint i [[thread_position_in_grid]]) { uint s = 0; for (uint j = 10; j >= 0; j--) s += j; y[i] = s; }
kernel void until(device int* y, constant int& n, uint i [[thread_position_in_grid]]) { while (y[i] == 0) {} y[i] = 2; }
kernel void traps(device float* y, constant int& n) { if (n == 0) __builtin_trap(); y[0] = 1.0f; }
kernel void spins(device int* y, constant int& n, uint g [[threadgroup_position_in_grid]]) {
  volatile int i = 0;
  while (i >= 0 && g == uint(n)) i = (i + 1) & 1023;
  y[g] = 7;
}
kernel void waits(device int* y, constant int& n, uint t [[thread_index_in_threadgroup]]) {
  volatile int i = 0;
  while (i >= 0) {
    i = (i + 1) & 1023;
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  y[t] = 7;
}
kernel void slow(device int* y, constant int& n, uint g [[threadgroup_position_in_grid]]) {
  volatile int s = 0;
  for (int i = 0; i < n; i++) s = s + i;
  y[g] = 7;
}
"""
)
ONE = {"grid": 1, "threadgroup": 1}


def at(i: int) -> bytes:
    return np.int32(i).tobytes()


@pytest.fixture(scope="module")
def guarded() -> metalmm.Device:
    return metalmm.Device("cpu", guards=True)


@pytest.fixture(scope="module")
def debug() -> metalmm.Device:
    return metalmm.Device("cpu", debug=True)


@pytest.fixture(scope="module", params=["guards", "debug"])
def watchful(request: pytest.FixtureRequest) -> metalmm.Device:
    return request.getfixturevalue("guarded" if request.param == "guards" else "debug")


@pytest.fixture(scope="module")
def kernels(watchful: metalmm.Device) -> metalmm.Library:
    return watchful.compile(KERNELS)


@pytest.fixture(scope="module")
def guarded_kernels(guarded: metalmm.Device) -> metalmm.Library:
    """Where a store outside is found behind it; test_debug_mode.py has those that are refused before."""
    return guarded.compile(KERNELS)


def half(n: int) -> Any:
    return np.arange(1, n + 1).astype(np.float16)


@pytest.mark.parametrize("numpy", [False, True], ids=["device arrays", "numpy arrays"])
@pytest.mark.parametrize(
    ("index", "message"),
    [
        (60, r"buffer 1 was written to past its end, at byte 120 of 120"),
        (63, r"buffer 1 was written to past its end, at byte 126 of 120"),
        (150, r"buffer 1 was written to past its end, at byte 300 of 120"),
        (-1, r"buffer 1 was written to 2 bytes before its beginning"),
        (-40, r"buffer 1 was written to 80 bytes before its beginning"),
        (20_000, r"a memory access at 0x\w+, 39880 bytes past the end of buffer 1 \(120 bytes\)"),
        (-20_000, r"a memory access at 0x\w+, 40000 bytes before the beginning of buffer 1 \(120 bytes\)"),
    ],
)
def test_a_write_outside_an_array_names_it(
    numpy: bool, index: int, message: str, guarded: metalmm.Device, guarded_kernels: metalmm.Library
) -> None:
    kernel = guarded_kernels.kernel("writes")
    x, y = (half(8), half(60)) if numpy else (guarded.array(half(8)), guarded.array(half(60)))
    with pytest.raises(metalmm.KernelError, match=f"kernel 'writes': .*{message}"):
        kernel(x, y, at(index), **ONE)
    kernel(x, y, at(59), **ONE)  # neither blamed again, nor unusable
    np.testing.assert_array_equal(np.asarray(y), [*range(1, 60), 1])


def test_a_write_outside_an_array_fails_its_batch(guarded: metalmm.Device, guarded_kernels: metalmm.Library) -> None:
    y = guarded.array(half(60))
    batch = guarded.batch()
    guarded_kernels.kernel("writes")(guarded.array(half(8)), y, at(61), **ONE, batch=batch)
    batch.submit()
    with pytest.raises(metalmm.KernelError, match=r"buffer 1 was written to past its end, at byte 122 of 120"):
        batch.wait()


@pytest.mark.parametrize("kernel", ["doubles", "copies"])
def test_poison_that_is_read_and_written_on_shows(kernel: str, guarded: metalmm.Device, guarded_kernels: metalmm.Library) -> None:
    for x, y in ((half(30), half(30)), (guarded.array(half(30)), guarded.array(half(30)))):
        with pytest.raises(metalmm.KernelError, match=r"buffer 1 was written to past its end, at byte \d+ of 60"):
            guarded_kernels.kernel(kernel)(x, y, grid=1, threadgroup=64)


def test_what_a_kernel_leaves_unwritten_is_nan(watchful: metalmm.Device) -> None:
    assert np.isnan(watchful.empty((3, 5)).numpy()).all()
    assert np.isnan(watchful.empty(70_000, np.float32).numpy()).all()


def test_a_zone_that_was_broken_before_is_nobody_elses_fault(watchful: metalmm.Device, kernels: metalmm.Library) -> None:
    y = watchful.array(half(60))
    outside = np.lib.stride_tricks.as_strided(y.numpy(), (62,), (2,))
    outside[61] = 1
    with pytest.raises(metalmm.KernelError, match=r"before it ran, buffer 1 had been written to past its end, at byte 122 of 120"):
        kernels.kernel("writes")(watchful.array(half(8)), y, at(0), **ONE)
    kernels.kernel("writes")(watchful.array(half(8)), y, at(0), **ONE)


def test_what_is_read_outside_is_nan(guarded: metalmm.Device, guarded_kernels: metalmm.Library) -> None:
    y = half(1)
    for index in (60, 61, 63, -1, -2):
        y[0] = 0
        guarded_kernels.kernel("reads")(guarded.array(half(60)), y, at(index), **ONE)
        assert np.isnan(y[0])


@pytest.mark.parametrize(
    ("kernel", "index", "message"),
    [
        ("threadgroup_", 8, "threadgroup memory was written past its end, at byte 16 of 16"),
        ("threadgroup_", 20, "threadgroup memory was written past its end, at byte 40 of 16"),
        ("threadgroup_", -3, "threadgroup memory was written up to 6 bytes before its beginning"),
        ("dynamic_", 16, "threadgroup memory was written past its end, at byte 32 of 32"),
    ],
)
def test_a_write_outside_threadgroup_memory_is_told(kernel: str, index: int, message: str, guarded_kernels: metalmm.Library) -> None:
    memory = {0: 32} if kernel == "dynamic_" else None
    run = guarded_kernels.kernel(kernel)
    with pytest.raises(metalmm.KernelError, match=rf"kernel '{kernel}': threadgroup \(0, 0, 0\): {message}"):
        run(half(8), at(index), **ONE, threadgroup_memory=memory)
    run(half(8), at(0), **ONE, threadgroup_memory=memory)


def test_arrays_that_share_memory_share_their_guarded_copy(watchful: metalmm.Device) -> None:
    a, w = np.full((1, 64), 3, np.float16), np.eye(64, dtype=np.float16)
    y = np.full((1, 64), 2, np.float16)
    metalmm.matmul("gemv/baseline", a, w, c=y, beta=1.0, out=y, device=watchful)
    np.testing.assert_array_equal(y, np.full((1, 64), 5))


def test_arrays_that_share_a_part_share_their_guarded_copy(watchful: metalmm.Device) -> None:
    source = "kernel void k(device half* x, device half* y) { x[5] = 3.0h; y[3] = y[1] + x[0]; y[0] = 7.0h; }"
    store = np.arange(10, dtype=np.float16)
    watchful.compile(HEAD + source).kernel("k")(store[:6], store[4:], grid=1, threadgroup=1)
    np.testing.assert_array_equal(store, [0, 1, 2, 3, 7, 3, 6, 3, 8, 9])


def test_arrays_that_touch_have_copies_of_their_own(watchful: metalmm.Device) -> None:
    store = np.zeros(64 + 64 * 64 + 64, np.float16)
    y, a, w = store[:64].reshape(1, 64), store[64:128].reshape(1, 64), store[128:].reshape(64, 64)
    a[...], w[...] = 3, 2 * np.eye(64)
    counts = watchful.count_writes(y) if watchful.options["debug"] else np.ones(64)
    metalmm.matmul("gemv/baseline", a, w, out=y, device=watchful)
    assert (counts == 1).all()
    np.testing.assert_array_equal(y, np.full((1, 64), 6))
    np.testing.assert_array_equal(a, np.full((1, 64), 3))


def test_what_the_kernel_has_no_argument_for_is_not_copied_back(watchful: metalmm.Device) -> None:
    source = HEAD + (
        "constant bool has [[function_constant(0)]];\n"
        "kernel void k(device half* y, const device half* x [[buffer(1), function_constant(has)]]) { y[0] = has ? x[0] : 3.0h; }"
    )
    y, x = half(1), np.frombuffer(mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ), np.float16)  # a store there would be a fault
    watchful.compile(source).kernel("k", constants={0: False})({0: y, 1: x}, **ONE)
    assert y[0] == 3


@pytest.mark.parametrize(
    ("kernel", "arrays", "good", "bad", "message"),
    [
        (
            "loads4",
            (half(64), half(1)),
            4,
            3,
            r"a load or store at <source>:\d+ that is not aligned to 8 bytes, at byte 6 of buffer 0 \(128 bytes\)",
        ),
        ("copies4", (half(64), half(4)), 4, 2, r"a load or store (at <source>:\d+ )?that is not aligned to 8 bytes, at byte 4 of buffer 0"),
        (
            "stores4",
            (np.zeros(64, np.float32),),
            8,
            6,
            r"(not aligned to 16 bytes, at byte 24 of buffer 0|a vector load or store that is not aligned)",
        ),
    ],
)
def test_debug_mode_checks_the_alignment_of_vectors(
    kernel: str, arrays: Any, good: int, bad: int, message: str, each_compiler: str
) -> None:
    if kernel == "stores4" and "clang" in each_compiler:
        return  # which copies 16 bytes by a call that knows no alignment
    device = metalmm.Device("cpu", debug=True)
    run = device.compile(KERNELS).kernel(kernel)
    on_device = [device.array(x) for x in arrays]
    run(*on_device, at(good), **ONE)
    with pytest.raises(metalmm.KernelError, match=f"kernel '{kernel}': .*{message}"):
        run(*on_device, at(bad), **ONE)
    run(*on_device, at(good), **ONE)
    packed = device.compile(KERNELS).kernel("packed4")
    y = np.zeros(1, np.float32)
    packed(device.array(np.arange(64, dtype=np.float32)), y, at(3), **ONE)
    assert y[0] == 6


@pytest.mark.usefixtures("each_compiler")
def test_a_trap_is_an_error_not_the_end_of_the_process() -> None:
    device = metalmm.Device("cpu")
    kernel, y = device.compile(KERNELS).kernel("traps"), np.zeros(1, np.float32)
    for _ in range(2):
        with pytest.raises(metalmm.KernelError, match=r"kernel 'traps': threadgroup \(0, 0, 0\): it trapped"):
            kernel(y, at(0), **ONE)
    kernel(y, at(1), **ONE)
    assert y[0] == 1


@pytest.mark.skipif(sys.platform != "linux" or os.uname().machine != "x86_64", reason="other processors load vectors from anywhere")
def test_a_misaligned_vector_that_the_processor_refuses_is_named_as_one(device: metalmm.Device) -> None:
    source = HEAD + "typedef float wide __attribute__((vector_size(16)));\n"
    source += "kernel void k(device float* y, constant int& at) { *reinterpret_cast<device wide*>(y + at) = wide{1, 1, 1, 1}; }"
    kernel = metalmm.Device("cpu").compile(source).kernel("k")
    with pytest.raises(metalmm.KernelError, match=r"a vector load or store that is not aligned"):
        kernel(np.zeros(64, np.float32), at(1), **ONE)


# -- what never ends --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.usefixtures("each_compiler")
@pytest.mark.parametrize(
    ("kernel", "n", "grid", "threadgroup"),
    [("spins", 0, 1, 1), ("spins", 5, 40, 1), ("waits", 0, 3, 64), ("adds", 0, 1, 8), ("never_down", 0, 1, 8), ("until", 0, 2, 4)],
)
def test_a_timeout_ends_what_spins(threads: int, kernel: str, n: int, grid: int, threadgroup: int) -> None:
    device = metalmm.Device("cpu", threads=threads, timeout=0.05)
    run = device.compile(KERNELS).kernel(kernel)
    start = time.monotonic()
    for _ in range(2):
        with pytest.raises(
            metalmm.KernelError, match=rf"kernel '{kernel}': .*stopped.*: it took longer than the device's timeout of 0.05 s"
        ):
            run(np.zeros(64, np.int32), at(n), grid=grid, threadgroup=threadgroup)
    assert time.monotonic() - start < 20
    y = np.zeros(64, np.int32)
    device.compile(KERNELS).kernel("slow")(y, at(10), grid=64, threadgroup=1)
    assert (y == 7).all()


def test_a_timeout_ends_many_short_threadgroups_and_is_of_one_dispatch() -> None:
    device = metalmm.Device("cpu", threads=2, timeout=0.5)
    slow, y = device.compile(KERNELS).kernel("slow"), np.zeros(1 << 20, np.int32)
    with pytest.raises(metalmm.KernelError, match=r"kernel 'slow': .*stopped: it took longer"):
        slow(y, at(200_000), grid=1 << 20, threadgroup=1)
    assert not y.all()
    with device.batch() as batch:  # together longer than the timeout
        for _ in range(30):
            slow(y, at(200_000), grid=100, threadgroup=1, batch=batch)


def test_a_timeout_in_a_batch_spares_the_next_batch() -> None:
    device = metalmm.Device("cpu", timeout=0.2)
    spins, y = device.compile(KERNELS).kernel("spins"), np.zeros(4, np.int32)
    batch, later = device.batch(), device.batch()
    spins(y, at(0), grid=1, threadgroup=1, batch=batch)
    spins(y, at(-1), grid=4, threadgroup=1, batch=later)
    batch.submit()
    later.submit()
    with pytest.raises(metalmm.KernelError, match=r"timeout"):
        batch.wait()
    later.wait()
    assert (y == 7).all()


@pytest.mark.parametrize(
    "options",
    [
        {"timeout": -1},
        {"timeout": float("nan")},
        {"timeout": 1e9},
        {"timeout": "x"},
        {"guards": "yes"},
        {"debug": 1},
        {"threads": "2"},
        {"threads": -1},
        {"threadgroup_memory_limit": -5},
    ],
)
def test_options_out_of_range(options: dict[str, Any]) -> None:
    with pytest.raises(metalmm.DeviceError, match=next(iter(options))):
        metalmm.Device("cpu", **options)


def test_an_option_of_another_device_is_refused() -> None:
    for options in ({"index": 3}, {"spin": 1e-3}, {"max_operations": 5}, {"max_bytes": 5}):
        with pytest.raises(metalmm.DeviceError, match=f"{next(iter(options))}: device cpu has no such option; it has threads"):
            metalmm.Device("cpu", **options)


def interrupt_after(seconds: float) -> None:
    threading.Timer(seconds, lambda: os.kill(os.getpid(), signal.SIGINT)).start()


@pytest.mark.parametrize("threads", [1, 4])
def test_ctrl_c_acts_between_threadgroups(threads: int) -> None:
    device = metalmm.Device("cpu", threads=threads)
    slow, y = device.compile(KERNELS).kernel("slow"), np.zeros(1 << 20, np.int32)
    start = time.monotonic()
    interrupt_after(0.2)
    with pytest.raises(KeyboardInterrupt):
        slow(y, at(200_000), grid=1 << 20, threadgroup=1)  # minutes
    batch = device.batch()
    for _ in range(5):
        slow(y, at(200_000), grid=1 << 20, threadgroup=1, batch=batch)
    batch.submit()
    interrupt_after(0.2)
    with pytest.raises(KeyboardInterrupt):
        batch.wait()
    assert time.monotonic() - start < 30
    with pytest.raises(metalmm.KernelError, match=r"it was interrupted; its results are not valid"):
        batch.wait()
    y[:] = 0
    slow(y, at(1), grid=64, threadgroup=1)
    assert y.sum() == 64 * 7


def test_a_handler_that_returns_lets_the_kernel_finish() -> None:
    device = metalmm.Device("cpu")
    slow, y = device.compile(KERNELS).kernel("slow"), np.zeros(4000, np.int32)
    seen: list[str] = []

    def handler(*_: Any) -> None:
        try:
            metalmm.matmul("gemv/baseline", np.ones((1, 4), np.float16), np.ones((4, 4), np.float16), device=device)
        except metalmm.DeviceError as error:
            seen.append(str(error))

    before = signal.signal(signal.SIGINT, handler)
    try:
        interrupt_after(0.1)
        slow(y, at(300_000), grid=4000, threadgroup=1)
        deadline = time.monotonic() + 5
        while not seen and time.monotonic() < deadline:  # a fast machine is through before the signal
            time.sleep(0.01)
    finally:
        signal.signal(signal.SIGINT, before)
    assert (y == 7).all()
    assert not seen or "at work for this very thread" in seen[0]


def test_ctrl_c_while_another_thread_works() -> None:
    """In a process of its own: the other thread never comes back."""
    script = f"""
import metalmm, numpy as np, os, signal, threading, time
device = metalmm.Device("cpu", threads=1)
adds, y = device.compile({KERNELS!r}).kernel("adds"), np.zeros(4, np.int32)
threading.Thread(target=lambda: adds(y, bytes(4), grid=1, threadgroup=1), daemon=True).start()
while not y[0]: time.sleep(0.01)
threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
try:
    metalmm.matmul("gemv/baseline", np.ones((1, 4), np.float16), np.ones((4, 4), np.float16), device=device)
except KeyboardInterrupt:
    print("interrupted", flush=True)
os._exit(0)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "interrupted", done.stderr


def test_what_ctrl_c_kept_from_its_turn_runs_later() -> None:
    device, y = metalmm.Device("cpu", threads=1), np.zeros((1, 4), np.float16)
    slow = device.compile(KERNELS).kernel("slow")
    other = threading.Thread(target=lambda: slow(np.zeros(4000, np.int32), at(400_000), grid=4000, threadgroup=1))
    batch = device.batch()
    batch.matmul("gemv/baseline", np.ones((1, 4), np.float16), np.ones((4, 4), np.float16), out=y)
    batch.submit()
    other.start()
    time.sleep(0.05)
    interrupt_after(0.1)
    with pytest.raises(KeyboardInterrupt):
        while other.is_alive():
            metalmm.matmul("gemv/baseline", np.ones((1, 4), np.float16), np.ones((4, 4), np.float16), device=device)
        time.sleep(1)  # a fast machine is through before the signal
    other.join()
    batch.wait()
    assert (y == 4).all()


def test_a_fault_after_lint_and_ctrl_c_is_still_an_error(tmp_path: Path) -> None:
    """LLVM, which lint uses, gives signals back at Ctrl-C as it found them."""
    source = "#include <metal_stdlib>\nusing namespace metal;\nkernel void k(device float* y, constant ulong& n) { y[n] = 1.0f; }\n"
    script = f"""
import metalmm, numpy as np, os, signal, time
device = metalmm.Device("cpu", threads=1)
kernel, y = device.compile({source!r}).kernel("k"), np.zeros(4, np.float32)
kernel(y, bytes(8), grid=1, threadgroup=1)
for _ in range(2):
    try:
        kernel(y, (1 << 40).to_bytes(8, "little"), grid=1, threadgroup=1)
    except metalmm.KernelError as error:
        print("told:", error)
    try:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(5)
    except KeyboardInterrupt:
        pass
"""
    environment = {**os.environ, "METALMM_CACHE": str(tmp_path), "METALMM_LINT": "1"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, env=environment)
    assert done.stdout.count("told: kernel 'k': threadgroup (0, 0, 0): a") == 2, done.stderr


def test_ctrl_c_in_close_leaves_the_device_and_its_work() -> None:
    device, y = metalmm.Device("cpu", threads=2), np.zeros(3000, np.int32)
    slow = device.compile(KERNELS).kernel("slow")
    last = np.zeros((1, 4), np.float16)
    long, after = device.batch(), device.batch()
    for _ in range(50):
        slow(y, at(400_000), grid=3000, threadgroup=1, batch=long)
    after.matmul("gemv/baseline", np.ones((1, 4), np.float16), np.ones((4, 4), np.float16), out=last)
    long.submit()
    after.submit()
    interrupt_after(0.2)
    with pytest.raises(KeyboardInterrupt):
        device.close()
    device.close()
    assert (last == 4).all()
    assert repr(device) == "metalmm.Device(closed)"


@pytest.mark.parametrize("spoil", ["block", "ignore"])
def test_a_timeout_reaches_threads_that_do_not_want_its_signal(spoil: str) -> None:
    device = metalmm.Device("cpu", timeout=0.2)
    run = device.compile(KERNELS).kernel("spins")
    before = signal.getsignal(signal.SIGURG)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    if spoil == "block":
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGURG])
    else:
        signal.signal(signal.SIGURG, signal.SIG_IGN)
    try:
        with pytest.raises(metalmm.KernelError, match=r"timeout of 0.2 s"):
            run(np.zeros(4, np.int32), at(0), grid=1, threadgroup=1)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if spoil == "ignore":
            signal.signal(signal.SIGURG, before)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"grid": 2**32 + 1}, "grid takes up to three sizes"),
        ({"grid": (65536, 65537)}, "more than 2\\^32 threadgroups"),
        ({"grid": (65536, 1, 65537)}, "more than 2\\^32 threadgroups"),
        ({"grid": (65535, 65537), "threadgroup": 1025}, "1025 threads; the limit"),  # 2^32 - 1 threadgroups
        ({"threadgroup": 2**32 - 1}, "4294967295 threads; the limit"),
        ({"threadgroup_memory": {31: 16}}, "threadgroup memory index 31 is not in 0 to 30"),
    ],
)
def test_dispatches_past_every_limit(options: dict[str, Any], message: str) -> None:
    kernel = metalmm.Device("cpu").compile(KERNELS).kernel("dynamic_")
    with pytest.raises(metalmm.KernelError, match=message):
        kernel(half(8), at(0), **{**ONE, "threadgroup_memory": {0: 32}, **options})


def test_a_signal_that_somebody_sends_is_no_fault_of_a_kernel() -> None:
    script = "import metalmm, numpy as np, os, signal\nmetalmm.matmul('gemv/baseline', np.ones((1, 4), 'f2'), np.ones((4, 4), 'f2'))\n"
    script += "os.kill(os.getpid(), signal.SIGSEGV)\nprint('alive')"
    environment = {**os.environ, "METALMM_DEVICE": "cpu"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, env=environment)
    assert done.returncode != 0 and "alive" not in done.stdout  # -11, or what a sanitizer's handler makes of it


def test_a_fault_of_the_host_ends_the_process() -> None:
    script = "import ctypes, metalmm, numpy as np\nmetalmm.matmul('gemv/baseline', np.ones((1, 4), 'f2'), np.ones((4, 4), 'f2'))\n"
    script += "print('before', flush=True)\nctypes.string_at(8)\nprint('alive')"
    environment = {**os.environ, "METALMM_DEVICE": "cpu"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=20, env=environment)
    assert done.returncode != 0 and done.stdout == "before\n"


@pytest.mark.parametrize("debug", [False, True])
def test_a_lane_that_is_left_leaves_no_marks_of_the_address_sanitizer(debug: bool) -> None:
    """Functions that it was in never end, and kernels that come after it have their frames there: one in twenty runs ended so."""
    marked = getattr(ctypes.CDLL(None), "__asan_region_is_poisoned", None)
    if marked is None:
        pytest.skip("no address sanitizer here")
    marked.restype, marked.argtypes = ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_size_t]
    device = metalmm.Device("cpu", debug=debug)
    tells = "kernel void k(device ulong* y) { int x; y[0] = (ulong)&x; }"
    faults = "kernel void k(device ulong* y, device int* z) { z[1l << 40] = 1; }"
    y = np.zeros(1, np.uint64)
    device.compile(HEAD + tells).kernel("k")(y, grid=1, threadgroup=1)
    with pytest.raises(metalmm.KernelError, match="outside"):
        device.compile(HEAD + faults).kernel("k")(y, np.zeros(1, np.int32), grid=1, threadgroup=1)
    assert not marked(int(y[0]) - 8192, 8192)


def test_counts_of_a_part_of_what_is_watched() -> None:
    device = metalmm.Device("cpu", debug=True)
    source = HEAD + "kernel void k(device half* y, uint i [[thread_position_in_grid]]) { y[i] = 1.0h; }"
    kernel, out = device.compile(source).kernel("k"), np.zeros(4096, np.float16)
    counts = device.count_writes(out)
    kernel(out[1024:2048], grid=32, threadgroup=32)
    assert counts[1024:2048].all() and counts.sum() == 1024
    kernel(np.zeros(64, np.float16), grid=2, threadgroup=32)
    assert counts.sum() == 1024
    small = device.count_writes(out[10:20])
    kernel(out[:64], grid=2, threadgroup=32)
    np.testing.assert_array_equal(small, np.ones(10))


def test_every_lane_has_its_turn() -> None:
    """Lanes that wait for others ask the next one, round and round; whoever comes to none runs into the timeout."""
    source = "kernel void k(device uint* y, uint i [[thread_position_in_grid]]) { if (i % 3 != 1) y[i] = simd_sum(i); }"
    y = np.zeros(64, np.uint32)
    metalmm.Device("cpu", timeout=10).compile(HEAD + source).kernel("k")(y, grid=1, threadgroup=64)
    i = np.arange(64)
    expected = [i[(i // 32 == half) & (i % 3 != 1)].sum() for half in (0, 1)]
    np.testing.assert_array_equal(y, np.where(i % 3 != 1, np.repeat(expected, 32), 0))
