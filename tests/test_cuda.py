"""The CUDA device: what it asks of NVIDIA's driver, what it makes of the driver's failures. On the fake, some faults are injected; a GPU
whose kernel fails is lost to its process, so that those tests have GPUs of their own."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import itertools
import mmap
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import metalmm
import numpy as np
import pytest
from conftest import DEVICE, ROOT, allowed, carry_out, half, right
from metalmm import manifest, numerics, nvrtc
from metalmm.backends import cuda
from metalmm.bench import runner, sizes

FAKE: Any = getattr(sys.modules.get("on_fake_cuda"), "fake", None)
pytestmark = pytest.mark.skipif(DEVICE != "cuda", reason="of device cuda")
needs_fake = pytest.mark.skipif(not FAKE, reason="breaks rules or injects faults, which only the fake driver allows")

V = "gemv/baseline"
GEMM = "gemm_tiled/baseline"
HEAD = "#include <metal_stdlib>\nusing namespace metal;\n"
ADDS = HEAD + "kernel void adds(device float* y, constant uint& n, uint i [[thread_position_in_grid]]) { y[i] += float(n); }"
STEP = HEAD + "kernel void step(device float* y, uint i [[thread_position_in_grid]]) { y[i] = y[i] * 2.0f + 1.0f; }"
ILLEGAL, FAILED, OUT_OF_MEMORY, OUT_OF_RESOURCES = 700, 719, 2, 701
fresh = itertools.count(10)  # GPUs that nobody has used; the first few are of all


@pytest.fixture(scope="module")
def device() -> Iterator[metalmm.Device]:
    """Of this file, so that its end is seen."""
    with metalmm.Device("cuda") as device:
        yield device


@pytest.fixture(autouse=True)
def no_rule_of_cuda_is_broken() -> Iterator[None]:
    yield
    if FAKE:
        assert FAKE.take_violations() == []
        assert FAKE.clear_faults() == 0, "a fault that nothing came by"


@pytest.fixture
def like() -> Iterator[Callable[..., None]]:
    """The fake GPU is like that from now on."""
    before: dict[str, int] = {}

    def change(**settings: int) -> None:
        for name, value in settings.items():
            before.setdefault(name, FAKE.set(name, value))

    yield change
    gc.collect()
    for name, value in before.items():
        FAKE.set(name, value)


@pytest.fixture
def index(like: Callable[..., None]) -> int:
    """Of a GPU that may be lost."""
    like(devices=next(fresh) + 1)
    return len(metalmm._core._device_names("cuda")) - 1


@pytest.fixture
def other(index: int) -> Iterator[metalmm.Device]:
    with metalmm.Device("cuda", index=index) as device:
        yield device


def adds(device: metalmm.Device) -> metalmm.Kernel:
    return device.compile(ADDS).kernel("adds")


def computes(device: metalmm.Device) -> None:
    a, b = half(4, 64), half(64, 48, seed=1)
    right(metalmm.matmul(GEMM, a, b, device=device), a, b)
    right(metalmm.matmul(GEMM, device.array(a), device.array(b), device=device), a, b)


# -- the fake is strict ------------------------------------------------------------------------------------------------


class Raw:
    """The driver's own calls on a GPU that metalmm does not use."""

    GPU = 2

    def __init__(self) -> None:
        self.cu = FAKE.driver
        self.cu.cuInit(0)
        context = ctypes.c_void_p()
        assert self.cu.cuDevicePrimaryCtxRetain(ctypes.byref(context), self.GPU) == 0
        assert self.cu.cuCtxSetCurrent(context) == 0
        self.stream = self.make("cuStreamCreate", 1)
        self.memory = self.allocate(256)

    def make(self, call: str, *arguments: Any) -> ctypes.c_void_p:
        handle = ctypes.c_void_p()
        assert getattr(self.cu, call)(ctypes.byref(handle), *arguments) == 0
        return handle

    def allocate(self, size: int) -> ctypes.c_ulonglong:
        address = ctypes.c_ulonglong()
        assert self.cu.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(size)) == 0
        return address

    def copy_in(self, size: int, address: ctypes.c_ulonglong | None = None) -> int:
        return int(
            self.cu.cuMemcpyHtoDAsync_v2(address or self.memory, ctypes.create_string_buffer(size), ctypes.c_size_t(size), self.stream)
        )

    def captured(self) -> ctypes.c_void_p:
        """A graph of one copy."""
        graph, made = ctypes.c_void_p(), ctypes.c_void_p()
        self.bytes = ctypes.create_string_buffer(256)
        assert self.cu.cuStreamBeginCapture_v2(self.stream, 1) == 0
        assert self.cu.cuMemcpyHtoDAsync_v2(self.memory, self.bytes, ctypes.c_size_t(256), self.stream) == 0
        assert self.cu.cuStreamEndCapture(self.stream, ctypes.byref(graph)) == 0
        assert self.cu.cuGraphInstantiateWithFlags(ctypes.byref(made), graph, ctypes.c_ulonglong(0)) == 0
        assert self.cu.cuGraphDestroy(graph) == 0
        return made

    def end(self) -> None:
        self.cu.cuDevicePrimaryCtxReset_v2(self.GPU)
        self.cu.cuCtxSetCurrent(None)


def _behind(raw: Raw) -> None:
    """Work that waits for nobody to ask: the first keeps what follows from running at once."""
    raw.cu.cuMemsetD8Async(raw.memory, 0, ctypes.c_size_t(1), raw.stream)


def _use_after_destroy(raw: Raw) -> None:
    assert raw.cu.cuStreamDestroy_v2(raw.stream) == 0
    assert raw.cu.cuStreamSynchronize(raw.stream) == 400


def _another_kind(raw: Raw) -> None:
    raw.cu.cuEventQuery(raw.stream)


def _double_free(raw: Raw) -> None:
    assert [raw.cu.cuMemFree_v2(raw.memory) for _ in range(2)] == [0, 1]


def _free_inside(raw: Raw) -> None:
    raw.cu.cuMemFree_v2(ctypes.c_ulonglong(raw.memory.value + 16))


def _free_in_flight(raw: Raw) -> None:
    _behind(raw)
    raw.cu.cuMemFree_v2(raw.memory)


def _bounds(raw: Raw) -> None:
    assert raw.copy_in(257) == 1


def _freed(raw: Raw) -> None:
    raw.cu.cuMemFree_v2(raw.memory)
    raw.copy_in(4)


def _no_context(raw: Raw) -> None:
    def work() -> None:
        assert raw.copy_in(4) == 201

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def _lost_context(raw: Raw) -> None:
    raw.cu.cuDevicePrimaryCtxReset_v2(raw.GPU)
    assert raw.copy_in(4) == 709


def _never_recorded(raw: Raw) -> None:
    assert raw.cu.cuEventQuery(raw.make("cuEventCreate", 0)) == 0


def _elapsed_too_early(raw: Raw) -> None:
    first, last = raw.make("cuEventCreate", 0), raw.make("cuEventCreate", 0)
    raw.cu.cuEventRecord(first, raw.stream)
    raw.cu.cuStreamSynchronize(raw.stream)
    _behind(raw)
    raw.cu.cuEventRecord(last, raw.stream)
    assert raw.cu.cuEventElapsedTime(ctypes.byref(ctypes.c_float()), first, last) == 600


def _without_timing(raw: Raw) -> None:
    event = raw.make("cuEventCreate", 2)
    raw.cu.cuEventRecord(event, raw.stream)
    assert raw.cu.cuEventElapsedTime(ctypes.byref(ctypes.c_float()), event, event) == 400


def _synchronize_capture(raw: Raw) -> None:
    raw.cu.cuStreamBeginCapture_v2(raw.stream, 1)
    assert raw.cu.cuStreamSynchronize(raw.stream) == 900
    assert raw.cu.cuStreamEndCapture(raw.stream, ctypes.byref(ctypes.c_void_p())) == 901


def _allocate_in_capture(raw: Raw) -> None:
    raw.cu.cuStreamBeginCapture_v2(raw.stream, 1)
    assert raw.cu.cuMemAlloc_v2(ctypes.byref(ctypes.c_ulonglong()), ctypes.c_size_t(4)) == 900


def _query_captured(raw: Raw) -> None:
    event = raw.make("cuEventCreate", 0)
    raw.cu.cuStreamBeginCapture_v2(raw.stream, 1)
    raw.cu.cuEventRecord(event, raw.stream)
    raw.cu.cuStreamEndCapture(raw.stream, ctypes.byref(ctypes.c_void_p()))
    assert raw.cu.cuEventQuery(event) == 907


def _capture_of_another_thread(raw: Raw) -> None:
    thread = threading.Thread(target=lambda: (raw.cu.cuDevicePrimaryCtxRetain(ctypes.byref(c := ctypes.c_void_p()), raw.GPU), raw.cu.cuCtxSetCurrent(c), raw.cu.cuStreamBeginCapture_v2(raw.stream, 1)))  # fmt: skip
    thread.start()
    thread.join()
    assert raw.cu.cuStreamEndCapture(raw.stream, ctypes.byref(ctypes.c_void_p())) == 908


def _graph_in_flight(raw: Raw) -> None:
    graph = raw.captured()
    raw.cu.cuGraphLaunch(graph, raw.stream)
    raw.cu.cuGraphExecDestroy(graph)


def _graph_of_what_is_gone(raw: Raw) -> None:
    graph = raw.captured()
    raw.cu.cuMemFree_v2(raw.memory)
    assert raw.cu.cuGraphLaunch(graph, raw.stream) == 1


def _leak(raw: Raw) -> None:
    raw.cu.cuDevicePrimaryCtxRelease_v2(raw.GPU)


def _no_image(raw: Raw) -> None:
    assert raw.cu.cuModuleLoadData(ctypes.byref(ctypes.c_void_p()), b"not machine code") == 200
    raw.cu.cuModuleUnload(None)


MISUSES: dict[Callable[[Raw], None], str] = {
    _use_after_destroy: "handle: stream_synchronize: Stream that was destroyed",
    _another_kind: "handle: event_query: Stream where Event is due",
    _double_free: "is freed already",
    _free_inside: "is not where an allocation begins",
    _free_in_flight: "lifetime: free: memory that queued work uses",
    _bounds: "bounds: copy_in: 257 bytes",
    _freed: "bounds: copy_in: 4 bytes",
    _no_context: "context: copy_in: no current context",
    _lost_context: "context: copy_in: the current context is destroyed",
    _never_recorded: "event: event_query: an event that was never recorded",
    _elapsed_too_early: "event: event_elapsed: an event that is not through",
    _without_timing: "event: event_elapsed: an event without timing",
    _synchronize_capture: "capture: stream_synchronize: of a stream that is capturing",
    _allocate_in_capture: "capture: allocate: while this thread captures",
    _query_captured: "capture: event_query: an event that was recorded in a capture",
    _capture_of_another_thread: "capture: capture_end: ended by another thread",
    _graph_in_flight: "lifetime: graph_exec_destroy: a graph in flight",
    _graph_of_what_is_gone: "lifetime: graph_launch: Memory that the graph uses is gone",
    _leak: "leak: context_release: with 1 Memory, 1 Stream",
    _no_image: "handle: module_unload: Module that never was one",
}


def test_products_on_tensor_cores(device: metalmm.Device) -> None:
    """Kernels that no other device has (kernels/include/tensor.h): over windows of K."""
    rng = np.random.default_rng(5)
    for v in [v for v in metalmm.variants(device=device) if v.params.get("mma") and v.weights == 1]:
        form, _, layout = v.storage.partition(":")
        a, w = (
            rng.standard_normal((1 if v.supports["m"] == 1 else 5, 1376)).astype(np.float16),
            rng.standard_normal((37, 1376)).astype(np.float16),
        )
        q = metalmm.quantize(w, form, layout=layout or "nk")
        right(metalmm.matmul(v, a, q, device=device), a, q)


@needs_fake
@pytest.mark.parametrize("misuse", MISUSES, ids=lambda f: f.__name__)
def test_the_fake_sees_each_misuse(misuse: Callable[[Raw], None], like: Callable[..., None]) -> None:
    like(devices=3, in_time=0)
    raw = Raw()
    try:
        assert raw.copy_in(256) == 0
        assert raw.cu.cuStreamSynchronize(raw.stream) == 0
        assert FAKE.take_violations() == []
        misuse(raw)
        seen = FAKE.take_violations()
        assert len(seen) == 1 and MISUSES[misuse] in seen[0]
    finally:
        raw.end()
        FAKE.take_violations()


@needs_fake
def test_what_is_not_asked_for_is_in_flight(like: Callable[..., None]) -> None:
    like(devices=3, in_time=0)
    raw = Raw()
    event = raw.make("cuEventCreate", 0)
    _behind(raw)
    raw.cu.cuEventRecord(event, raw.stream)
    time.sleep(0.05)
    assert raw.cu.cuEventQuery(event) == 600
    assert raw.cu.cuStreamSynchronize(raw.stream) == 0
    assert raw.cu.cuEventQuery(event) == 0
    back = ctypes.create_string_buffer(256)
    fresh = raw.allocate(256)
    assert raw.cu.cuMemcpyDtoHAsync_v2(back, fresh, ctypes.c_size_t(256), raw.stream) == 0
    assert back.raw == b"\xff" * 256
    raw.end()


@needs_fake
def test_leaks_and_broken_rules_at_exit_end_the_process_in_failure(tmp_path: Path) -> None:
    start = "import ctypes, on_fake_cuda, metalmm\ncu = on_fake_cuda.fake.driver\ndevice = metalmm.Device('cuda')\n"
    leak = "stream = ctypes.c_void_p()\ncu.cuStreamCreate(ctypes.byref(stream), 1)\n"
    for text, message in [
        (leak, "alive at exit: {'Stream': 1}"),
        ("cu.cuMemFree_v2(ctypes.c_ulonglong(7))\n", "never was allocated"),
        ("", ""),
    ]:
        script = tmp_path / "s.py"
        script.write_text(start + text)
        done = subprocess.run([sys.executable, str(ROOT / "tests" / "on_fake_cuda.py"), str(script)], capture_output=True, text=True)
        assert done.returncode == (86 if message else 0), done.stderr
        assert message in done.stderr


# -- the device --------------------------------------------------------------------------------------------------------


def test_info_names_the_gpu_and_its_driver(device: metalmm.Device) -> None:
    info = device.info
    assert device.name == "cuda"
    assert info["name"] == metalmm._core._device_names("cuda")[0]
    assert info["compute_capability"] >= 80
    assert info["max_threadgroup_memory_length"] >= 32768
    assert info["memory_bytes"] > 1 << 30
    assert info["unified_memory"] is False
    if FAKE:
        assert (info["driver"], info["compute_capability"], info["multiprocessors"]) == ("13.0", FAKE.set("capability", 90), 132)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"index": 99}, "index is 99; there are"),
        ({"index": -1}, "index is -1; there are"),
        ({"index": 0.5}, "index is 0.5; it takes a whole number"),
        ({"index": True}, "index is True; it takes a whole number"),
        ({"spin": -1}, "spin is -1"),
        ({"spin": "long"}, "spin is 'long'; it takes a number"),
        ({"timeout": float("nan")}, "timeout nan"),
        ({"overlap": 1}, "overlap is 1; it takes True or False"),
        ({"threads": 4}, "threads"),
    ],
)
def test_options_out_of_range(options: dict[str, Any], message: str) -> None:
    with pytest.raises(metalmm.DeviceError, match=message):
        metalmm.Device("cuda", **options)


@pytest.mark.parametrize("options", [{"overlap": False}, {"spin": 0}, {"spin": 1}, {"timeout": 60}, {"index": 0}])
def test_every_option_computes(options: dict[str, Any]) -> None:
    with metalmm.Device("cuda", **options) as device:
        computes(device)


@needs_fake
@pytest.mark.parametrize("settings", [{}, {"in_time": 1}, {"capability": 80}, {"capability": 121}, {"driver_version": 12040}])
def test_every_kind_of_gpu_computes(settings: dict[str, int], like: Callable[..., None]) -> None:
    like(**settings)
    with metalmm.Device("cuda") as device:
        assert device.info["driver"] == ("12.4" if "driver_version" in settings else "13.0")
        computes(device)


@needs_fake
def test_an_older_gpu_is_refused_by_name(like: Callable[..., None]) -> None:
    like(capability=75)
    with metalmm.Device("cuda") as device, pytest.raises(metalmm.DeviceError, match=r"Fake GPU 0 has compute capability 7.5; .* needs 8.0"):
        computes(device)


def run(script: str, **environment: str) -> subprocess.CompletedProcess[str]:
    given = {**os.environ, **environment}
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=given, timeout=60)


@needs_fake
def test_a_driver_without_gpus(tmp_path: Path) -> None:
    script = tmp_path / "s.py"
    script.write_text("import metalmm\nprint(metalmm._core._device_names('cuda'))\nmetalmm.Device('cuda')\n")
    command = [sys.executable, str(ROOT / "tests" / "on_fake_cuda.py"), str(script)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "METALMM_FAKE": "devices=0"})
    assert done.stdout == "[]\n"
    assert "DeviceError: cuda: NVIDIA's driver does not start: CUDA_ERROR_NO_DEVICE, no CUDA-capable device is detected" in done.stderr


def test_a_machine_without_a_driver_or_a_compiler() -> None:
    done = run("import metalmm; metalmm.Device('cuda')", METALMM_LIBCUDA="/nonexistent.so")
    assert "DeviceError: cuda: /nonexistent.so cannot be loaded" in done.stderr
    assert "it comes with NVIDIA's driver" in done.stderr
    done = run("import metalmm; print(metalmm._core._device_names('cuda'), metalmm.Device('cpu'))", METALMM_LIBCUDA="/nonexistent.so")
    assert done.stdout.startswith("[] "), done.stderr
    done = run("import metalmm; metalmm.Device('cuda')", METALMM_LIBCUDA="libc.so.6")
    assert "libc.so.6 has no cuInit; metalmm needs a driver of CUDA 12 or newer" in done.stderr
    script = "import metalmm, numpy as np; x = np.ones((8, 8), np.float16); metalmm.matmul('gemm_tiled/baseline', x, x, device=metalmm.Device('cuda'))"
    done = run(script, METALMM_LIBNVRTC="/nonexistent.so")
    assert (
        "CompilerNotFoundError: device cuda needs NVRTC 12.0 or newer, and no newer than the driver's 13.x (/nonexistent.so" in done.stderr
    )
    assert "pip install 'metalmm[cuda]'" in done.stderr
    done = run(script, METALMM_LIBNVRTC="libc.so.6")
    assert "CompilerNotFoundError: device cuda needs NVRTC" in done.stderr


def test_source_that_does_not_compile(device: metalmm.Device, tmp_path: Path) -> None:
    path = tmp_path / "mine.metal"
    path.write_text(HEAD + "kernel void k(device int* y) {\n  y[0] = nobody();\n}")
    with pytest.raises(metalmm.CompileError, match=r"(?s)kernel 'k': NVRTC failed:.*mine\.metal[:(]4.*nobody"):
        device.compile(path).kernel("k")


# -- launches ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_grids_past_the_limit_of_cudas_axes(axis: int, device: metalmm.Device) -> None:
    source = (
        HEAD
        + """
    kernel void k(device uint* y, uint3 g [[threadgroup_position_in_grid]], uint3 n [[threadgroups_per_grid]], uint3 p [[thread_position_in_grid]]) {
      y[(g.z * n.y + g.y) * n.x + g.x] += p.x * 3 + p.y * 5 + p.z * 7 + n.x + n.y + n.z;
    }"""
    )
    count = 2 * 65535 + 3
    grid = tuple(count if i == axis else 1 for i in range(3))
    y = device.array(np.zeros(count, np.uint32))
    kernel = device.compile(source).kernel("k")
    kernel(y, grid=grid, threadgroup=1)
    np.testing.assert_array_equal(y.numpy(), np.arange(count, dtype=np.uint32) * (3, 5, 7)[axis] + count + 2)


def test_threadgroups_at_the_edge_are_smaller(device: metalmm.Device) -> None:
    source = (
        HEAD
        + """
    kernel void k(device uint* y, uint2 p [[thread_position_in_grid]], uint2 n [[threads_per_grid]], uint2 size [[threads_per_threadgroup]],
                  uint2 full [[dispatch_threads_per_threadgroup]], uint lane [[thread_index_in_threadgroup]]) {
      y[p.y * n.x + p.x] += 1 + 10 * size.x + 100 * size.y + 1000 * full.x + 10000 * full.y + 100000 * lane;
    }"""
    )
    width, height = 7, 5
    y = device.array(np.zeros((height, width), np.uint32))
    device.compile(source).kernel("k")(y, threads=(width, height), threadgroup=(4, 3))
    column, row = np.arange(width), np.arange(height)[:, None]
    size_x, size_y = np.minimum(4, width - column // 4 * 4), np.minimum(3, height - row // 3 * 3)
    expected = 1 + 10 * size_x + 100 * size_y + 1000 * 4 + 10000 * 3 + 100000 * (row % 3 * size_x + column % 4)
    np.testing.assert_array_equal(y.numpy(), expected)


@pytest.mark.parametrize("recorded", [False, True])
def test_a_number_may_come_as_bytes_or_in_a_buffer(recorded: bool, device: metalmm.Device) -> None:
    kernel, y = adds(device), device.array(np.zeros(3, np.float32))
    numbers: list[Any] = [5, np.uint32(6), device.array(np.array([7, 8], np.uint32)), np.array([9], np.uint32)]
    numbers.append(numbers[2][1:])  # an address of a buffer, off its beginning
    batch = device.batch()
    for n in numbers:
        kernel(y, n, threads=3, threadgroup=3, batch=batch)
    if recorded:
        recording = batch.record()
        recording.replay()
        recording.replay()
        recording.wait()
    else:
        batch.submit()
        batch.wait()
    np.testing.assert_array_equal(y.numpy(), [(5 + 6 + 7 + 9 + 8) * (1 + recorded)] * 3)


@pytest.mark.parametrize("recorded", [False, True])
def test_numbers_that_the_block_does_not_hold(recorded: bool, device: metalmm.Device) -> None:
    """References to more than 1,024 bytes, to more in all than CUDA takes, and pointers: each goes through memory."""
    source = HEAD + "struct Big { uint x[300]; }; struct Some { uint x[250]; };\n"
    source += "kernel void k(device uint* y, constant Big& a, constant uint* b"
    source += (
        "".join(f", constant Some& s{i}" for i in range(5))
        + ") { y[0] = a.x[299] + b[2]"
        + "".join(f" + s{i}.x[249]" for i in range(5))
        + "; }"
    )
    big, few = np.arange(300, dtype=np.uint32), np.array([1, 2, 3], np.uint32)
    some = [np.arange(250, dtype=np.uint32) * 10**i for i in range(5)]
    y = device.array(np.zeros(1, np.uint32))
    kernel = device.compile(source).kernel("k")
    batch = device.batch()
    kernel(y, big.tobytes(), few.tobytes(), *(s.tobytes() for s in some), grid=1, threadgroup=1, batch=batch)
    if recorded:
        recording = batch.record()
        del batch
        gc.collect()
        recording.replay()
        recording.wait()
    else:
        batch.submit()
        batch.wait()
    assert y.numpy()[0] == 299 + 3 + 249 * 11111


@pytest.mark.parametrize("given", [False, True])
def test_arguments_that_a_constant_switches_off(given: bool, device: metalmm.Device) -> None:
    source = (
        HEAD
        + """
    constant bool given [[function_constant(0)]];
    kernel void k(device uint* y [[buffer(0)]], constant uint& n [[buffer(1), function_constant(given)]],
                  const device uint* x [[buffer(2), function_constant(given)]]) { y[0] = 1; if (given) y[0] = n + x[1]; }"""
    )
    y = device.array(np.zeros(1, np.uint32))
    kernel = device.compile(source).kernel("k", {0: given})
    kernel(y, *((4, device.array(np.array([8, 16], np.uint32))) if given else ()), grid=1, threadgroup=1)
    assert y.numpy()[0] == (20 if given else 1)


def test_threadgroup_memory_of_both_kinds(device: metalmm.Device) -> None:
    source = (
        HEAD
        + """
    kernel void k(device uint* y, threadgroup uint* a [[threadgroup(0)]], threadgroup uint* b [[threadgroup(1)]], uint i [[thread_index_in_threadgroup]]) {
      threadgroup uint c[40];
      a[i] = i; b[i] = 100 * i; c[i] = 10000 * i;
      threadgroup_barrier(mem_flags::mem_threadgroup);
      y[i] = a[39 - i] + b[39 - i] + c[39 - i];
    }"""
    )
    y = device.array(np.zeros(40, np.uint32))
    kernel = device.compile(source).kernel("k")
    assert kernel.static_threadgroup_memory_length == 160
    kernel(y, grid=1, threadgroup=40, threadgroup_memory={0: 160, 1: 168})
    np.testing.assert_array_equal(y.numpy(), np.arange(39, -1, -1) * 10101)
    with pytest.raises(metalmm.KernelError, match="threadgroup memory"):
        kernel(y, grid=1, threadgroup=40, threadgroup_memory={0: 32768, 1: 16})


def test_a_kernels_own_limit_of_threads(device: metalmm.Device) -> None:
    source = (
        HEAD + "[[max_total_threads_per_threadgroup(64)]] kernel void k(device uint* y, uint i [[thread_position_in_grid]]) { y[i] = i; }"
    )
    kernel, y = device.compile(source).kernel("k"), device.array(np.zeros(64, np.uint32))
    assert kernel.max_total_threads_per_threadgroup == 64
    kernel(y, grid=1, threadgroup=64)
    np.testing.assert_array_equal(y.numpy(), np.arange(64))
    with pytest.raises(metalmm.KernelError, match="65"):
        kernel(y, grid=1, threadgroup=65)


# -- memory ------------------------------------------------------------------------------------------------------------


def test_numpy_arrays_are_copied_in_and_out(device: metalmm.Device) -> None:
    source = (
        HEAD + "kernel void k(const device float* x, device float* y, uint i [[thread_position_in_grid]]) { y[i] = x[i] + 0.5f * y[i]; }"
    )
    kernel = device.compile(source).kernel("k")
    x, y = np.arange(9, dtype=np.float32), np.full(9, 8, np.float32)
    x.setflags(write=False)
    kernel(x, y, threads=9, threadgroup=4)
    np.testing.assert_array_equal(y, np.arange(9) + 4)
    kernel(x[2:7], y[1:6], threads=5, threadgroup=4)  # within a larger array, whose rest stays
    np.testing.assert_array_equal(y[[0, 6, 7, 8]], np.array([0, 6, 7, 8]) + 4)
    np.testing.assert_array_equal(y[1:6], np.arange(2, 7) + 0.5 * (np.arange(1, 6) + 4))


def test_views_of_one_numpy_array_in_one_dispatch(device: metalmm.Device) -> None:
    source = HEAD + "kernel void k(device float* a, device float* b, uint i [[thread_position_in_grid]]) { a[i] += 1.0f; b[i] += 2.0f; }"
    kernel, x = device.compile(source).kernel("k"), np.zeros(8, np.float32)
    kernel(x[:4], x[4:], threads=4, threadgroup=4)
    np.testing.assert_array_equal(x, [1] * 4 + [2] * 4)
    kernel(x, x[4:], threads=4, threadgroup=4)
    np.testing.assert_array_equal(x, [2] * 4 + [4] * 4)
    kernel(x[4:], x, threads=4, threadgroup=4)
    np.testing.assert_array_equal(x, [4] * 4 + [5] * 4)


def test_copies_stand_as_the_host_memory_does(device: metalmm.Device) -> None:
    """Kernels are told where rows begin within 8 bytes, by the host's address."""
    source = HEAD + "kernel void k(const device half* x, device uint* y) { y[0] = uint(reinterpret_cast<ulong>(x) % 16); }"
    kernel, store = device.compile(source).kernel("k"), half(64)
    for offset in range(8):
        y = np.zeros(1, np.uint32)
        kernel(store[offset:], y, grid=1, threadgroup=1)
        assert y[0] == store[offset:].ctypes.data % 16


def test_submissions_that_share_numpy_memory_run_in_order(device: metalmm.Device) -> None:
    x, a, w = np.zeros((1, 64), np.float16), half(1, 64), np.eye(64, dtype=np.float16) * np.float16(2)
    first, second = device.batch(), device.batch()
    first.matmul(V, a, w, out=x)
    y = second.matmul(V, x, w)
    first.submit()
    second.submit()
    second.wait()
    first.wait()
    np.testing.assert_array_equal(y, a * 4)
    with device.batch() as batch:  # within one
        batch.matmul(V, a, w, out=x)
        z = batch.matmul(V, x, w)
    np.testing.assert_array_equal(z, a * 4)


def test_steady_state_takes_no_memory_of_the_driver(device: metalmm.Device) -> None:
    a, b, bias = half(8, 64), half(64, 48, seed=1), np.zeros(48, np.float16)
    x, w, out = device.array(a), device.array(b), device.empty((8, 48))
    batch = device.batch()
    batch.matmul(GEMM, x, w, out=out)
    recording = batch.record()
    kernel, y = adds(device), np.zeros(3, np.float32)

    def round() -> None:
        metalmm.matmul(GEMM, a, b, bias=bias, device=device)
        metalmm.matmul(GEMM, x, w, out=out, device=device)
        kernel(y, 1, threads=3, threadgroup=3)
        recording.replay()
        recording.wait()
        device.array(a).numpy()

    for _ in range(2):
        round()
    before = device.counters["allocations"]
    live = FAKE.live() if FAKE else None
    assert before > 0
    for _ in range(5):
        round()
    assert device.counters["allocations"] == before
    if FAKE:
        assert FAKE.live() == live, "events and streams, too"


@needs_fake
def test_memory_that_nobody_has_any_more_is_used_before_an_error(index: int, like: Callable[..., None]) -> None:
    like(memory_bytes=8 << 20)
    with metalmm.Device("cuda", index=index) as device:
        for shape in [(1 << 10, 1 << 10), (3 << 10, 1 << 10), (3 << 9, 1 << 10)]:
            array = device.array(np.ones(shape, np.float16))
            assert (array.numpy() == 1).all()
            del array
        kept = device.array(np.ones(1 << 20, np.float16))
        with pytest.raises(metalmm.DeviceError, match=r"the GPU has no \d+ bytes left"):
            device.empty((8 << 20,))
        assert (kept.numpy() == 1).all()
        computes(device)


@needs_fake
def test_memory_is_not_taken_from_work_in_flight(other: metalmm.Device, like: Callable[..., None]) -> None:
    """A batch whose second launch fails leaves its first on the stream, which uses copies that are the pool's again."""
    like(in_time=0)
    step, x = other.compile(STEP).kernel("step"), np.zeros(8, np.float32)
    batch = other.batch()
    adds(other)(np.zeros(8, np.float32), other.array(np.ones(1, np.uint32)), threads=8, threadgroup=8, batch=batch)
    step(other.array(x), threads=8, threadgroup=8, batch=batch)
    FAKE.inject("copy_out", 1, 1)
    with pytest.raises(metalmm.DeviceError, match="copying"):
        batch.submit()
        batch.wait()
    FAKE.inject("allocate", 1, OUT_OF_MEMORY)
    other.empty((1 << 16,))
    computes(other)


@needs_fake
@pytest.mark.parametrize("at", [0, 1, 2])
def test_out_of_memory_is_an_error_and_no_more(at: int, other: metalmm.Device) -> None:
    a, b = half(4, 64), half(64, 48, seed=1)
    FAKE.inject("allocate", 2, OUT_OF_MEMORY, skip=at)  # twice: it is tried again once the pool is empty
    with pytest.raises(metalmm.DeviceError, match=r"the GPU has no \d+ bytes left"):
        for _ in range(4):
            other.array(np.zeros(1000, np.float32))
            metalmm.matmul(GEMM, a, b, device=other)
            fresh = [other.empty((100 * i,)) for i in range(1, 9)]
    fresh = []
    assert not fresh
    computes(other)


# -- order and time ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_time", [0, 1])
def test_submissions_run_in_their_order(in_time: int, device: metalmm.Device, like: Callable[..., None]) -> None:
    if FAKE:
        like(in_time=in_time)
    step, y = device.compile(STEP).kernel("step"), device.array(np.zeros(8, np.float32))
    double = device.batch()
    for _ in range(2):
        step(y, threads=8, threadgroup=8, batch=double)
    recording = double.record()
    batches = []
    for i in range(6):
        if i % 2:
            recording.replay()
            continue
        batch = device.batch()
        step(y, threads=8, threadgroup=8, batch=batch)
        batch.submit()
        batches.append(batch)
    batches[0].wait()
    step(y, threads=8, threadgroup=8)
    assert y.numpy()[0] == 2 ** (3 + 6 + 1) - 1
    recording.wait()
    for batch in batches[1:]:
        batch.wait()


@needs_fake
@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("third", [("h", "z"), ("z", "x")])
def test_nothing_runs_beside_one_that_waits_for_what_it_shares(third: tuple[str, str], recorded: bool, device: metalmm.Device) -> None:
    """x to h, h to y: that waits. The third shares nothing with the second, but with the first, which may still run."""
    copies = device.compile(
        HEAD + "kernel void k(device const float* x, device float* y, uint i [[thread_position_in_grid]]) { y[i] = x[i]; }"
    )
    arrays = {name: device.array(np.full(8, i, np.float32)) for i, name in enumerate("xhyz")}
    batch = device.batch()
    for source, target in (("x", "h"), ("h", "y"), third):
        copies.kernel("k")(arrays[source], arrays[target], threads=8, threadgroup=8, batch=batch)
    carry_out(batch, recorded)
    assert FAKE.take_violations() == []


OCTETS, COLUMNS, ROWS = (
    "m1_optimized_v7/nt_octet_c2_s4_d1_tg128",
    "m1_optimized_v7/nt_l8_c1_s7_d2_tg224",
    "m1_optimized_v7/nn_octet_o2_d4_tg512",
)


@needs_fake
@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize(
    "written, early",
    # The first of a batch has none before it; the second writes what the name says of the third.
    [("a", 3), ("c", 3), ("b", 2), ("bias", 2), ("line", 2)],
)
def test_weights_that_nobody_writes_are_read_early(written: str, early: int, recorded: bool, device: metalmm.Device) -> None:
    store, w = device.array(half(1, 512)), [device.array(half(64, 64, seed=i)) for i in range(4)]
    x, h, y, z = (device.array(half(1, 64, seed=i)) for i in range(4))
    thin, bias = device.array(half(1, 64, seed=9)), device.array(half(64, seed=8))
    batch = device.batch()
    batch.matmul(OCTETS, x, w[0], transpose_b=True, out=h)
    if written == "line":  # of a cache, 128 bytes; arrays of other libraries may stand in one
        near, weights = OfAnother(store[:, :48]), OfAnother(store[:, 48:96])
        batch.matmul(COLUMNS, h, w[1][:48], transpose_b=True, out=near)
        tiny = device.empty((1, 1))
        batch.matmul(COLUMNS, near, weights, transpose_b=True, out=tiny)
        batch.matmul(ROWS, h, w[3][:, :1], c=tiny, beta=1.0, out=device.empty((1, 1)))
    else:
        into = {"a": y, "c": thin, "b": w[2][3:4], "bias": bias.reshape((1, 64))}[written]
        batch.matmul(COLUMNS, h, w[1], transpose_b=True, out=into)
        batch.matmul(OCTETS, into if written == "a" else h, w[2], transpose_b=True, c=thin, beta=1.0, bias=bias, out=z)
        batch.matmul(ROWS, z, w[3], out=y)
    before = FAKE.early()
    carry_out(batch, recorded)
    assert FAKE.early() - before == early
    assert FAKE.take_violations() == []


@needs_fake
def test_nothing_is_early_beside_another_nor_alone_nor_timed(device: metalmm.Device) -> None:
    x, w = device.array(half(1, 64)), device.array(half(64, 64))
    before = FAKE.early()
    for count, options in ((1, {}), (3, {}), (3, {"per_dispatch": True})):
        with device.batch(**options) as batch:
            for out in [device.empty((1, 64)) for _ in range(count)]:
                batch.matmul(OCTETS, x, w, transpose_b=True, out=out)
    with device.batch() as batch:  # the second would be, but for the third beside it
        h, y, z = (device.empty((1, 64)) for _ in range(3))
        batch.matmul(OCTETS, x, w, transpose_b=True, out=h)
        batch.matmul(OCTETS, h, w, transpose_b=True, out=y)
        batch.matmul(OCTETS, x, w, transpose_b=True, out=z)
    assert FAKE.early() == before


def test_chains_in_which_weights_are_written_too(device: metalmm.Device) -> None:
    """Vectors and weights that matmuls read and write in any order give in a recording, again and again, what they give one by one."""
    rng = np.random.default_rng(3)
    for _ in range(4):
        vectors = [rng.standard_normal((1, 128)).astype(np.float16) for _ in range(5)]
        matrices = [(rng.standard_normal((128, 128)) / 12).astype(np.float16) for _ in range(5)]
        steps: list[tuple[str, Any]] = []
        for _ in range(24):
            i, j, k = rng.permutation(5)[:3]
            kind = rng.choice(["vector", "vector", "bias", "c", "matrix"])
            steps.append((str(kind), (str(rng.choice([OCTETS, COLUMNS, ROWS])), int(i), int(j), int(k))))

        def state(batched: bool, vectors: Any = vectors, matrices: Any = matrices, steps: Any = steps) -> list[bytes]:
            v, w = [device.array(x) for x in vectors], [device.array(x) for x in matrices]
            batch = device.batch()
            for kind, (variant, i, j, k) in steps:
                options: dict[str, Any] = {"transpose_b": variant != ROWS}
                options |= {"bias": {"bias": v[k].reshape((128,))}, "c": {"c": v[k], "beta": 0.5}}.get(kind, {})
                call = (GEMM, w[i], w[j]) if kind == "matrix" else (variant, v[i], w[j])
                options = {"out": w[k], "alpha": 0.1} if kind == "matrix" else {**options, "out": v[j], "alpha": 0.5}
                batch.matmul(*call, **options) if batched else metalmm.matmul(*call, device=device, **options)
            if batched:
                carry_out(batch, recorded=True)
            return [x.numpy().tobytes() for x in v + w]

        one_by_one = state(False)
        assert all(state(True) == one_by_one for _ in range(3 if FAKE else 30))


@needs_fake
def test_each_dispatch_can_be_timed(device: metalmm.Device, like: Callable[..., None]) -> None:
    like(kernel_us=3000)
    step, y = device.compile(STEP).kernel("step"), device.array(np.zeros(8, np.float32))
    with device.batch(per_dispatch=True) as batch:
        for _ in range(3):
            step(y, threads=8, threadgroup=8, batch=batch)
    timing = batch.timing
    assert len(timing.dispatches) == 3
    assert all(t is not None and 2.9e-3 < t < 1 for t in timing.dispatches)
    assert timing.device == pytest.approx(sum(t or 0 for t in timing.dispatches), rel=1e-3)
    with device.batch() as batch:
        for _ in range(2):
            step(y, threads=8, threadgroup=8, batch=batch)
    assert batch.timing.dispatches == []
    assert batch.timing.device is not None and 5.8e-3 < batch.timing.device < 1
    seconds = step(y, threads=8, threadgroup=8)
    assert seconds is not None and 2.9e-3 < seconds < 1
    recording = batch_of_steps(device, y, 4).record()
    recording.replay()
    recording.wait()
    assert recording.timing.device is not None and 11e-3 < recording.timing.device < 1


def batch_of_steps(device: metalmm.Device, y: Any, count: int) -> metalmm.Batch:
    step, batch = device.compile(STEP).kernel("step"), device.batch()
    for _ in range(count):
        step(y, threads=8, threadgroup=8, batch=batch)
    return batch


def test_two_threads_issue_at_once(device: metalmm.Device) -> None:
    a, b = half(4, 64), half(64, 48, seed=1)
    problems: list[BaseException] = []

    def work(kind: int) -> None:
        try:
            y = device.array(np.zeros(8, np.float32))
            for i in range(12):
                right(metalmm.matmul(GEMM, a, b, device=device), a, b)
                if kind:
                    recording = batch_of_steps(device, y, 2).record()
                    recording.replay()
                    recording.wait()
                else:
                    batch = batch_of_steps(device, y, 2)
                    batch.submit()
                    batch.wait()
                assert y.numpy()[0] == 4.0 ** (i + 1) - 1
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=work, args=(i % 2,)) for i in range(3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not problems


def test_a_dropped_batch_keeps_its_memory_until_the_gpu_is_done(device: metalmm.Device) -> None:
    x, w = device.array(half(1, 64)), device.array(half(64, 64, seed=1))
    for _ in range(3):
        batch = device.batch()
        y = batch.matmul(V, x, w)
        batch.submit()
        del batch
        gc.collect()
    right(np.asarray(y), np.asarray(x), np.asarray(w))


def test_closing_with_work_in_flight() -> None:
    device = metalmm.Device("cuda")
    y = np.zeros(8, np.float32)
    z = device.array(y)
    for array in (y, z):
        batch = batch_of_steps(device, array, 3)
        batch.submit()
    device.close()
    assert y[0] == 7
    with pytest.raises(metalmm.ClosedError):
        z.numpy()


@needs_fake
def test_nothing_is_left_of_a_device() -> None:
    gc.collect()
    before = FAKE.live()
    device = metalmm.Device("cuda")
    computes(device)
    recording = batch_of_steps(device, device.array(np.zeros(8, np.float32)), 2).record()
    recording.replay()
    assert FAKE.live() != before
    device.close()
    del device, recording
    gc.collect()
    assert FAKE.live() == before


# -- recordings --------------------------------------------------------------------------------------------------------


def test_a_recording_runs_again_and_again(device: metalmm.Device) -> None:
    x, w = device.array(half(1, 32)), device.array(np.eye(32, dtype=np.float16)[::-1] * np.float16(-1))
    batch, y = device.batch(), x
    for _ in range(5):
        y = batch.matmul(V, y, w)
    recording = batch.record()
    assert len(recording) == 5
    del batch
    gc.collect()
    for i in range(3):
        metalmm.matmul(V, half(1, 32, seed=i), np.eye(32, dtype=np.float16), out=x, device=device)
        recording.replay()
        recording.wait()
        np.testing.assert_array_equal(np.asarray(y), -half(1, 32, seed=i)[:, ::-1])
    for _ in range(100):
        recording.replay()
    recording.wait()


@needs_fake
def test_a_recording_is_a_graph_and_goes_when_nothing_runs_it(device: metalmm.Device, like: Callable[..., None]) -> None:
    like(in_time=0)
    gc.collect()
    assert "GraphExec" not in FAKE.live()
    y = device.array(np.zeros(8, np.float32))
    recording = batch_of_steps(device, y, 3).record()
    assert FAKE.live()["GraphExec"] == 1
    assert "Graph" not in FAKE.live()
    for _ in range(2):
        recording.replay()
    del recording
    gc.collect()
    assert FAKE.live()["GraphExec"] == 1, "in flight"
    assert y.numpy()[0] == 2**6 - 1
    gc.collect()
    assert "GraphExec" not in FAKE.live()


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


# -- faults ------------------------------------------------------------------------------------------------------------


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
    command = [sys.executable, str(ROOT / "tests" / "on_fake_cuda.py"), str(script)]
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
    command = [sys.executable, str(ROOT / "tests" / "on_fake_cuda.py"), str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env={**os.environ, "METALMM_FAKE": "in_time=1"})
    assert done.returncode == 0, done.stderr


@needs_fake
def test_two_threads_wait_for_what_a_timeout_ends(like: Callable[..., None]) -> None:
    like(in_time=1)
    source = HEAD + "kernel void k(device volatile uint* y, constant uint& n) { for (uint i = 0; i < n; i++) y[0] = i; y[1] = 7; }"
    with metalmm.Device("cuda", timeout=0.3) as device:
        kernel, y = device.compile(source).kernel("k"), device.array(np.zeros(2, np.uint32))

        def wait(batch: metalmm.Batch) -> None:
            with contextlib.suppress(metalmm.KernelError):
                batch.wait()

        for _ in range(3):
            batch = device.batch()
            for n in [2**32 - 1, *[1] * 2000]:
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


# -- fork --------------------------------------------------------------------------------------------------------------


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


class OfAnother:
    """An array of another library on the same GPU: DLPack alone."""

    def __init__(self, array: metalmm.Array) -> None:
        self.array, self.asked = array, dict[str, Any]()

    def __dlpack__(self, **options: Any) -> Any:
        self.asked = options
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.array.__dlpack_device__()


def test_arrays_of_other_libraries_on_the_gpu_are_taken_where_they_lie(device: metalmm.Device) -> None:
    assert device.empty((2, 2)).__dlpack_device__() == (2, 0)
    a, b, out = half(1, 96), half(40, 96, seed=1), OfAnother(device.empty((1, 40)))
    x, w = OfAnother(device.array(a)), OfAnother(device.array(b))
    before = device.counters["allocations"]
    assert metalmm.matmul("m1_optimized_v6/nt_simd_c4_s1_tg64", x, w, transpose_b=True, out=out, device=device) is out
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


# -- cuBLAS -------------------------------------------------------------------------------------------------------------

BLAS = "blas/baseline"
CUBLAS = [f"{what}_{how}" for what in ("description", "layout", "preference") for how in ("create", "set")] + [
    "create",
    "heuristic",
    "matmul",
]
needs_cublas = pytest.mark.skipif(DEVICE == "cuda" and not nvrtc.find_cublas(), reason="cuBLAS is not installed: it is NOT tested")


def drawn(layout: str, m: int, n: int, k: int, batch: int, dtype: Any) -> tuple[Any, Any, Any, Any]:
    rng = np.random.default_rng(m * n + k)
    shapes = (k, m) if layout[0] == "t" else (m, k), (n, k) if layout[1] == "t" else (k, n), (n,), (m, n)
    lead = [(batch,) if batch > 1 and len(shape) == 2 else () for shape in shapes]
    a, b, bias, c = (rng.standard_normal((*ahead, *shape)).astype(dtype) for ahead, shape in zip(lead, shapes, strict=True))
    return a, b, bias, c


@needs_cublas
@pytest.mark.parametrize("dtype", [np.float16, np.float32])
@pytest.mark.parametrize("layout", ["nn", "nt", "tn", "tt"])
def test_cublas_multiplies(device: metalmm.Device, layout: str, dtype: Any) -> None:
    transposed: dict[str, Any] = {"transpose_a": layout[0] == "t", "transpose_b": layout[1] == "t"}
    for m, n, k, batch in ((1, 7, 5, 1), (3, 8, 16, 2), (5, 1, 33, 3), (17, 64, 1, 1), (8, 96, 128, 1)):
        a, b, bias, c = drawn(layout, m, n, k, batch, dtype)
        da, db, dbias, dc = (device.array(x) for x in (a, b, bias, c))
        out = device.empty(c.shape, c.dtype)
        for options in ({}, {"bias": dbias}, {"c": dc, "beta": 0.5}, {"c": dc, "beta": -2.0, "bias": dbias, "alpha": 0.25}):
            metalmm.matmul(BLAS, da, db, out=out, **transposed, **options)
            host = {key: np.asarray(x) if isinstance(x, metalmm.Array) else x for key, x in options.items()}
            reference, bound, _ = numerics.judged(a, b, **transposed, **host)
            assert not numerics.mismatch(np.asarray(out), reference, allowed(BLAS, bound, reference, host))
        # One matrix C for all of a batch; a bias that begins anywhere.
        one, long = c.reshape(-1, m, n)[0], device.array(np.concatenate([bias[:1], bias]))
        host = {**transposed, "c": one, "beta": 0.5, "bias": bias}
        reference, bound, _ = numerics.judged(a, b, **host)
        metalmm.matmul(BLAS, da, db, out=out, **{**host, "c": device.array(one), "bias": long[1:]})
        assert not numerics.mismatch(np.asarray(out), reference, allowed(BLAS, bound, reference, host))
        # NumPy arrays, and the result in place of c.
        right(metalmm.matmul(BLAS, a, b, device=device, **transposed), a, b, **transposed)
        host = {**transposed, "c": c, "beta": 1.0}
        reference, bound, _ = numerics.judged(a, b, **host)
        metalmm.matmul(BLAS, da, db, **{**host, "c": dc}, out=dc)
        assert not numerics.mismatch(np.asarray(dc), reference, allowed(BLAS, bound, reference, host))
    wide = np.random.default_rng(0).standard_normal((40, 50)).astype(dtype)  # rows apart, and off every vector
    a, b = device.array(wide)[3:8, 1:12], device.array(wide)[9:20, 3:20]
    right(metalmm.matmul(BLAS, a, b), wide[3:8, 1:12], wide[9:20, 3:20])


@needs_cublas
def test_cublas_among_kernels(device: metalmm.Device) -> None:
    """In the order of a batch or recording, each reading what the one before wrote; a bias of its own each time."""
    x, w = half(1, 64), (half(64, 64, seed=1) / 8).astype(np.float16)
    biases = [half(64, seed=i) for i in range(6)]
    held, dw, dx = [device.array(b) for b in biases], device.array(w), device.array(x)
    y, z = device.empty((1, 64)), device.empty((1, 64))
    batch = device.batch()
    for i, bias in enumerate(held):
        source, target = (dx if i == 0 else (z, y)[i % 2], (y, z)[i % 2])
        source = source if i == 0 else (y if target is z else z)
        batch.matmul(BLAS if i % 2 else V, source, dw, bias=bias, out=target)
    expected = x.astype(np.float64)
    for bias in biases:
        expected = (expected @ w + bias).astype(np.float16).astype(np.float64)
    recording = batch.record()
    for _ in range(3):
        z.write(np.full((1, 64), np.nan, np.float16))
        recording.replay()
        recording.wait()
        np.testing.assert_allclose(z.numpy(), expected, rtol=0.02, atol=0.05)


def test_without_cublas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "find_cublas", lambda: "")
    with metalmm.Device("cuda") as other:
        assert BLAS not in metalmm.variants(device=other) and "blas" in other.lacking
        with pytest.raises(metalmm.UnsupportedError, match="needs blas, which this device lacks"):
            metalmm.matmul(BLAS, half(1, 8), half(8, 8), device=other)
    monkeypatch.setattr(nvrtc, "find_cublas", lambda: "/nowhere/libcublasLt.so.13")
    with metalmm.Device("cuda") as other:
        with pytest.raises(metalmm.DeviceError, match=r"cuBLAS: /nowhere/libcublasLt.so.13 cannot be loaded"):
            metalmm.matmul(BLAS, half(1, 8), half(8, 8), device=other)
        right(metalmm.matmul(V, half(1, 8), half(8, 8, seed=1), device=other), half(1, 8), half(8, 8, seed=1))


@needs_fake
@pytest.mark.parametrize("call", CUBLAS)
@pytest.mark.parametrize("recorded", [False, True])
def test_cublas_fails_at(call: str, recorded: bool, device: metalmm.Device) -> None:
    """At any of its calls, of a call or while a recording is made: an error, and the next one is right."""
    a, b, bias = half(1, 24), half(24, 40, seed=1), half(40, seed=2)
    with metalmm.Device("cuda") as other:  # a pipeline of its own
        da, db, dbias = (other.array(x) for x in (a, b, bias))
        FAKE.inject(f"cublas_{call}", code=801 if call == "heuristic" else 999)
        error = metalmm.UnsupportedError if call == "heuristic" else metalmm.DeviceError
        with pytest.raises(error, match="cuBLAS"):
            if recorded:
                made = other.batch()
                made.matmul(BLAS, da, db, bias=dbias)
                made.record()
            else:
                metalmm.matmul(BLAS, da, db, bias=dbias)
        right(metalmm.matmul(BLAS, da, db, bias=dbias), a, b, bias=bias)


@needs_cublas
def test_c_with_rows_apart_and_shared_by_a_batch(device: metalmm.Device) -> None:
    for dtype in (np.float16, np.float32):
        a, b, _, _ = drawn("nn", 5, 12, 9, 2, dtype)
        wide = np.random.default_rng(3).standard_normal((2, 8, 40)).astype(dtype)
        held, whole = device.array(wide)[:, 2:7, 3:15], wide[:, 2:7, 3:15]  # rows and matrices further apart than the result's
        for x, c in ((held, whole), (held[1], whole[1])):
            host = {"c": np.ascontiguousarray(np.broadcast_to(c, (2, 5, 12))), "beta": 0.5}
            reference, bound, _ = numerics.judged(a, b, **host)
            out = metalmm.matmul(BLAS, device.array(a), device.array(b), c=x, beta=0.5)
            assert not numerics.mismatch(np.asarray(out), reference, allowed(BLAS, bound, reference, host))


@needs_cublas
def test_a_plan_of_cublas_is_of_its_strides_and_alignments() -> None:
    """The same size, laid out in another way."""
    rng = np.random.default_rng(1)
    wide, store = rng.standard_normal((40, 64)).astype(np.float16), rng.standard_normal(200).astype(np.float16)
    with metalmm.Device("cuda") as other:
        for ra, rb, ca, cb in ((0, 8, 0, 0), (3, 11, 5, 8)):
            for ld in (64, 32):
                h = wide.reshape(-1)[: 40 * ld].reshape(40, ld)
                d = other.array(h)
                a, b = (slice(ra, ra + 5), slice(ca, ca + 8)), (slice(rb, rb + 8), slice(cb, cb + 16))
                right(metalmm.matmul(BLAS, d[a], d[b], device=other), h[a], h[b])
        a, b, _, _ = drawn("nn", 5, 12, 9, 1, np.float16)
        held = other.array(store)
        for begin in (0, 1):  # C off its alignment alone
            host = {"c": store[begin : begin + 60].reshape(5, 12), "beta": 1.0}
            reference, bound, _ = numerics.judged(a, b, **host)
            c = held[begin : begin + 60].reshape((5, 12))
            out = metalmm.matmul(BLAS, other.array(a), other.array(b), c=c, beta=1.0, out=other.empty((5, 12)))
            assert not numerics.mismatch(np.asarray(out), reference, allowed(BLAS, bound, reference, host))


@needs_fake
@pytest.mark.parametrize("recorded", [False, True])
def test_nothing_runs_beside_what_is_before_cublas(recorded: bool, device: metalmm.Device) -> None:
    text = "kernel void k(device const half* x, device half* y, uint i [[thread_position_in_grid]]) { y[i] = x[i]; }"
    kernel = device.compile(HEAD + text).kernel("k")
    x, h, u, v = (device.array(np.ones((8, 8), np.float16)) for _ in range(4))
    batch = device.batch()
    kernel(x, h, threads=64, threadgroup=32, batch=batch)
    batch.matmul(BLAS, h, u, out=v)  # waits for the first
    kernel(u, x, threads=64, threadgroup=32, batch=batch)  # shares x with the first alone
    carry_out(batch, recorded)


@needs_fake
@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("between", [0, 1])
def test_what_was_written_before_cublas_is_not_read_early(between: int, recorded: bool, device: metalmm.Device) -> None:
    x, h, y, z = (device.array(half(1, 64, seed=i)) for i in range(4))
    w, u = device.array(half(64, 64)), device.array(half(64, 64))
    batch = device.batch()
    batch.matmul(OCTETS, x, u, transpose_b=True, out=w[3:4])
    batch.matmul(BLAS, x, u, out=h)  # may let the next begin before it has waited
    batch.matmul(OCTETS, h, u, transpose_b=True, out=y)
    for _ in range(between):  # neither early nor late
        batch.matmul(GEMM, y, u, out=h)
        batch.matmul(GEMM, h, u, out=y)
    batch.matmul(OCTETS, y, w, transpose_b=True, out=z)
    carry_out(batch, recorded)
    assert FAKE.take_violations() == []


@needs_fake
def test_what_a_dispatch_with_numpy_memory_wrote_is_not_read_early(device: metalmm.Device) -> None:
    x, h, y, z = (device.array(half(1, 64, seed=i)) for i in range(4))
    w, u = device.array(half(64, 64)), device.array(half(64, 64))
    batch = device.batch()
    batch.matmul(OCTETS, half(1, 64), u, transpose_b=True, out=w[3:4])
    batch.matmul(GEMM, x, u, out=h)
    batch.matmul(GEMM, h, u, out=y)
    batch.matmul(OCTETS, y, w, transpose_b=True, out=z)
    carry_out(batch, recorded=False)
    assert FAKE.take_violations() == []


@needs_fake
def test_what_a_batch_before_wrote_is_not_read_early(device: metalmm.Device) -> None:
    """It may be at work when this batch begins: an event between them, so the fake has it, holds nothing up."""
    x, h, y, z = (device.array(half(1, 64, seed=i)) for i in range(4))
    w, u = device.array(half(64, 64)), device.array(half(64, 64))
    first, second = device.batch(), device.batch()
    first.matmul(GEMM, x, u, out=h)
    first.matmul(OCTETS, x, u, transpose_b=True, out=w[3:4])
    second.matmul(GEMM, h, u, out=y)
    second.matmul(OCTETS, y, w, transpose_b=True, out=z)
    before = FAKE.early()
    for batch in (first, second):
        batch.submit()
    for batch in (first, second):
        batch.wait()
    assert FAKE.take_violations() == []
    assert FAKE.early() - before == 1, "the second's first waits, and lets nothing begin before"


@needs_fake
def test_a_long_chain_of_results_is_early_nearly_everywhere(device: metalmm.Device) -> None:
    """What was written is forgotten where one waits before it lets the next begin, which then happens now and then."""
    w, x = device.array(half(8, 8)), [device.array(half(1, 8)) for _ in range(1000)]
    before = FAKE.early()
    with device.batch() as batch:
        for a, out in itertools.pairwise(x):
            batch.matmul(OCTETS, a, w, transpose_b=True, out=out)
    assert 980 < FAKE.early() - before < 998
    assert FAKE.take_violations() == []


@needs_cublas
def test_two_threads_multiply_with_biases_of_their_own(device: metalmm.Device) -> None:
    """One records while another submits: the plan of cuBLAS is one."""
    a, w = device.array(np.zeros((1, 64), np.float16)), device.array(np.zeros((64, 64), np.float16))
    wrong: list[int] = []

    def work(value: int) -> None:
        bias, out = device.array(np.full(64, value, np.float16)), device.empty((1, 64))
        for _ in range(200):
            batch = device.batch()
            for _ in range(8):
                batch.matmul(BLAS, a, w, bias=bias, out=out)
            carry_out(batch, recorded=value == 2)
            if not (out.numpy() == value).all():
                wrong.append(value)

    threads = [threading.Thread(target=work, args=(value,)) for value in (1, 2)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


@needs_fake
def test_the_end_while_a_thread_launches_cublas() -> None:
    script = """
import metalmm, numpy as np, threading, time
d = metalmm.Device("cuda")
x, w, out = (d.array(np.zeros(s, np.float16)) for s in ((1, 8), (8, 8), (1, 8)))
metalmm.matmul("blas/baseline", x, w, out=out)
b = d.batch()
for _ in range(100000): b.matmul("blas/baseline", x, w, out=out)
def work():
    try: b.submit()
    except metalmm.Error as e: print("told", e, flush=True)
threading.Thread(target=work, daemon=True).start()
time.sleep(0.02)
"""
    done = run(script)
    assert done.returncode == 0 and "after its end" not in done.stderr, (done.returncode, done.stderr[-500:])


@needs_fake
def test_cublas_of_a_lost_context(index: int) -> None:
    with metalmm.Device("cuda", index=index) as lost:
        a, b = lost.array(half(4, 8)), lost.array(half(8, 8))
        metalmm.matmul(BLAS, a, b)
        FAKE.inject("kernel", 1, ILLEGAL)
        with pytest.raises(metalmm.KernelError):
            lost.compile(STEP).kernel("step")(lost.array(np.zeros(8, np.float32)), threads=8, threadgroup=8)
    del a, b, lost
    gc.collect()


# -- what mutants showed to be looked at by no test ---------------------------------------------------------------------


def test_which_kernels_are_converged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of this package alone are compiled so that all lanes are waited for, and of them those with kernels/include/wait.h to read early."""
    seen: list[tuple[bool, bool]] = []
    before = cuda.options

    def options(capability: int, source: Any, **given: bool) -> list[str]:
        made = before(capability, source, **given)
        seen.append(("-DMETALMM_CONVERGED" in made, "-DMETALMM_EARLY" in made))
        return made

    monkeypatch.setattr(cuda, "options", options)
    with metalmm.Device("cuda") as other:
        other.compile(STEP).kernel("step")
        metalmm.matmul(GEMM, half(4, 64), half(64, 48), device=other)
        metalmm.matmul(ROWS, half(1, 64), half(64, 48), device=other)
    assert seen == [(False, False), (True, False), (True, True)]


@pytest.mark.parametrize("copies", [1, 2, 3, 5])
def test_a_sample_is_a_share_of_whole_rounds_of_the_copies(copies: int, device: metalmm.Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device.backend, "replays", 4)
    inputs = runner.Inputs(device, sizes.from_specs(["n=64 k=64 nt"]).shapes[0], 0, copies)
    turns = runner._Turns(device, inputs, runner.Rule(fixed=1))
    v = manifest.get("m1_optimized_v6/nt_simd_c4_s1_tg64")
    one = runner._Contender(str(v), [inputs.prepare(device, v, w) for w in inputs.weights])
    added: list[Any] = []

    class Spy:
        def __init__(self) -> None:
            self.batch = device.batch()

        def add(self, call: Any) -> None:
            added.append(call)
            self.batch.add(call)

        def record(self) -> metalmm.Recording:
            return self.batch.record()

    class Spied:
        backend = device.backend
        batch = Spy

    turns.device = Spied()  # type: ignore[assignment]
    start = time.perf_counter()
    cpu, gpu = turns.timed(one)
    elapsed = time.perf_counter() - start
    each = [sum(x is call for x in added) for call in one.calls]
    assert len(added) >= 4 and min(each) == max(each) > 0
    assert copies == 1 or all(x is not y for x, y in itertools.pairwise(added))
    assert one.recording and gpu == pytest.approx((one.recording.timing.device or 0) / len(added))
    assert 0 < cpu * len(added) <= elapsed


def test_numbers_in_a_recording_of_a_fresh_device() -> None:
    """Nothing is allocated while it is made, and here the pool has nothing yet."""
    text = (
        "struct N { float v[1000]; };\nkernel void k(device float* y, constant N& n, uint i [[thread_position_in_grid]]) { y[i] = n.v[i]; }"
    )
    with metalmm.Device("cuda") as other:
        y = other.empty((8,), np.float32)
        kernel, batch = other.compile(HEAD + text).kernel("k"), other.batch()
        kernel(y, np.arange(1000, dtype=np.float32).tobytes(), threads=8, threadgroup=8, batch=batch)
        carry_out(batch, recorded=True)
        assert y.numpy().tolist() == list(range(8))


@needs_fake
@pytest.mark.parametrize("per_dispatch", [False, True])
def test_only_a_launch_has_another_beside_it(per_dispatch: bool, device: metalmm.Device) -> None:
    """None stands beside a copy to the GPU, nor beside one that is timed."""
    kernel = device.compile(STEP).kernel("step")
    x, y = device.array(np.ones(8, np.float32)), device.array(np.ones(8, np.float32))
    with device.batch(per_dispatch=per_dispatch) as batch:
        kernel(x, threads=8, threadgroup=8, batch=batch)
        if not per_dispatch:
            kernel(np.ones(8, np.float32), threads=8, threadgroup=8, batch=batch)
        kernel(y, threads=8, threadgroup=8, batch=batch)


def test_numpy_memory_written_and_read_by_one_kernel(device: metalmm.Device) -> None:
    text = "kernel void k(device float* a, const device float* b, uint i [[thread_position_in_grid]]) { a[i] = b[i + 4]; }"
    x = np.arange(8, dtype=np.float32)
    device.compile(HEAD + text).kernel("k")(x[:4], x, threads=4, threadgroup=4)
    np.testing.assert_array_equal(x, [4, 5, 6, 7] * 2)


def test_memory_that_cannot_be_written_is_read(device: metalmm.Device, tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(np.arange(1024, dtype=np.float32).tobytes())
    with path.open("rb") as f:
        x = np.frombuffer(mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ), np.float32)
    text = "kernel void k(const device float* x, device float* y, uint i [[thread_position_in_grid]]) { y[i] = x[i]; }"
    y = np.zeros(8, np.float32)
    device.compile(HEAD + text).kernel("k")(x, y, threads=8, threadgroup=8)
    np.testing.assert_array_equal(y, x[:8])


def test_torch_on_the_gpu(device: metalmm.Device) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed: its tensors on the GPU are NOT tested")
    if FAKE or not torch.cuda.is_available():
        pytest.skip("no GPU of torch's: its tensors there are NOT tested")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(20):
            x, w = torch.randn(1, 896, dtype=torch.float16, device="cuda"), torch.randn(9728, 896, dtype=torch.float16, device="cuda")
            w *= 2  # on torch's stream, and not waited for
            out = torch.full((1, 9728), torch.nan, dtype=torch.float16, device="cuda")
            assert metalmm.matmul("m1_optimized_v7/nt_octet_c2_s1_d4_tg128", x, w, transpose_b=True, out=out, device=device) is out
            assert torch.allclose(out.float(), x.float() @ w.float().T, atol=0.5, rtol=0.01)
        array = device.array(w)
        assert torch.equal(torch.from_dlpack(array), w) and torch.from_dlpack(array).data_ptr() == array.device_address
