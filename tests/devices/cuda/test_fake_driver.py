"""The CUDA device: what it asks of NVIDIA's driver, what it makes of the driver's failures. On the fake, some faults are injected; a GPU
whose kernel fails is lost to its process, so that those tests have GPUs of their own."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import metalmm
import numpy as np
import pytest
from support.cuda import FAKE, needs_fake
from support.here import DEVICE, ROOT
from support.numbers import right

pytestmark = pytest.mark.skipif(DEVICE != "cuda", reason="of device cuda")


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
    """Kernels that no other device has (kernels/cuda/tensor.h): over windows of K."""
    rng = np.random.default_rng(5)
    those = [v for v in metalmm.variants(device=device) if v.params.get("mma") and v.matrix_count == 1]
    for v in {v.kernel: v for v in those}.values() if FAKE else those:
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
        done = subprocess.run(
            [sys.executable, str(ROOT / "tests" / "fakes" / "on_fake_cuda.py"), str(script)], capture_output=True, text=True
        )
        assert done.returncode == (86 if message else 0), done.stderr
        assert message in done.stderr
