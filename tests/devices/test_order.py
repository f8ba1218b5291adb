"""The one rule of order, on every device: submissions run as they were made, and whatever reads memory comes after all of them."""

from __future__ import annotations

import contextlib
import gc
import threading
import warnings
from typing import Any

import metalmm
import numpy as np
import pytest
from support.here import DEVICE, REAL_GPU

V = "gemv/baseline"
N = 64
DIVIDES = """#include <metal_stdlib>
using namespace metal;
kernel void diverges(device half* y, uint t [[thread_index_in_threadgroup]]) {
  if (t > 3) return;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  y[t] = 1.0h;
}
"""


class Chain:
    """x = 3, and two matmuls by 2: out is 12 if mid was made first."""

    def __init__(self, device: metalmm.Device, numpy: bool = False) -> None:
        self.device = device

        def place(x: Any) -> Any:
            return x.astype(np.float16) if numpy else device.array(x.astype(np.float16))

        self.x, self.w = place(np.full((1, N), 3)), place(2 * np.eye(N))
        self.mid, self.out = place(np.zeros((1, N))), place(np.zeros((1, N)))

    def batch(self, a: Any, out: Any) -> metalmm.Batch:
        batch = self.device.batch()
        batch.matmul(V, a, self.w, out=out)
        return batch

    def submit(self, a: Any, out: Any) -> metalmm.Batch:
        batch = self.batch(a, out)
        batch.submit()
        return batch


@pytest.fixture(params=[False, True], ids=["device arrays", "numpy arrays"])
def chain(request: pytest.FixtureRequest, device: metalmm.Device) -> Chain:
    return Chain(device, request.param)


def first(x: Any) -> float:
    return float(np.asarray(x)[0, 0])


def test_the_second_of_two_batches_may_be_waited_for_alone(chain: Chain) -> None:
    earlier = chain.submit(chain.x, chain.mid)
    later = chain.submit(chain.mid, chain.out)
    later.wait()
    assert first(chain.out) == 12
    assert first(chain.mid) == 6
    earlier.wait()


def test_a_matmul_comes_after_what_was_submitted(chain: Chain) -> None:
    batch = chain.submit(chain.x, chain.mid)
    assert first(metalmm.matmul(V, chain.mid, chain.w, device=chain.device)) == 12
    batch.wait()


def test_a_prepared_call_and_a_kernel_come_after_what_was_submitted(device: metalmm.Device) -> None:
    chain = Chain(device)
    call = device.prepare(V, chain.mid, chain.w)
    chain.submit(chain.x, chain.mid)
    assert first(call()) == 12
    source = DIVIDES + "kernel void copy(const device half* x, device half* y, uint i [[thread_position_in_grid]]) { y[i] = x[i]; }"
    copy = device.compile(source).kernel("copy")
    chain.mid.write(np.zeros_like(chain.mid.numpy()))
    chain.submit(chain.x, chain.mid)
    copy(chain.mid, chain.out, grid=1, threadgroup=N)
    assert first(chain.out) == 6


@pytest.mark.parametrize(
    "read", [lambda a: a.numpy(), np.asarray, *([np.from_dlpack] if DEVICE != "cuda" else []), lambda a: a.device.array(a).numpy()]
)
def test_a_view_comes_after_what_was_submitted(read: Any, device: metalmm.Device) -> None:
    chain = Chain(device)
    chain.submit(chain.x, chain.mid)
    chain.submit(chain.mid, chain.out)
    assert read(chain.out)[0, 0] == 12


def test_recordings_replay_in_order(chain: Chain) -> None:
    one, two = chain.batch(chain.x, chain.mid).record(), chain.batch(chain.mid, chain.out).record()
    one.replay()
    two.replay()
    two.wait()
    assert first(chain.out) == 12
    one.wait()


def test_batches_recordings_and_matmuls_keep_one_order(chain: Chain) -> None:
    twice = chain.batch(chain.mid, chain.out).record()
    chain.submit(chain.x, chain.mid)
    twice.replay()
    again = chain.submit(chain.out, chain.mid)  # 24
    twice.replay()  # 48
    assert first(metalmm.matmul(V, chain.out, chain.w, device=chain.device)) == 96
    again.wait()
    twice.wait()
    assert first(chain.mid) == 24


def test_what_was_submitted_and_dropped_runs(chain: Chain) -> None:
    chain.submit(chain.x, chain.mid)
    gc.collect()
    chain.submit(chain.mid, chain.out).wait()
    assert first(chain.out) == 12
    recording = chain.batch(chain.out, chain.mid).record()
    recording.replay()
    del recording
    gc.collect()
    assert first(metalmm.matmul(V, chain.mid, chain.w, device=chain.device)) == 48


def test_closing_finishes_what_was_submitted() -> None:
    device = metalmm.Device()
    chain = Chain(device, numpy=True)
    chain.submit(chain.x, chain.mid)
    chain.submit(chain.mid, chain.out)
    device.close()
    assert first(chain.out) == 12


def test_a_device_that_nobody_holds_finishes_what_was_submitted() -> None:
    chain = Chain(metalmm.Device(), numpy=True)
    chain.submit(chain.x, chain.mid)
    chain.submit(chain.mid, chain.out)
    out = chain.out
    del chain
    gc.collect()
    assert first(out) == 12


def test_what_was_not_submitted_never_runs(chain: Chain) -> None:
    chain.batch(chain.x, chain.mid)
    gc.collect()
    metalmm.matmul(V, chain.x, chain.w, device=chain.device)
    assert first(chain.mid) == 0


def test_any_number_of_submissions_may_wait(chain: Chain) -> None:
    step = np.zeros((1, N), np.float16)
    step[0, 0] = 1
    total = chain.mid
    one = chain.device.array(np.eye(N, dtype=np.float16)) if isinstance(total, metalmm.Array) else np.eye(N, dtype=np.float16)
    kept = []
    for _ in range(200):
        batch = chain.device.batch()
        batch.matmul(V, step, one, c=total, beta=1.0, out=total)
        batch.submit()
        kept.append(batch)
        if len(kept) % 3 == 0:
            kept.pop()
    batch.wait()
    assert first(total) == 200


tells_of_divergence = pytest.mark.skipif(REAL_GPU, reason="a GPU does not tell of threads that miss a barrier")


def failing(device: metalmm.Device) -> metalmm.Batch:
    batch = device.batch()
    kernel = device.compile(DIVIDES).kernel("diverges")
    kernel(device.array(np.zeros(N, np.float16)), grid=1, threadgroup=N, batch=batch)
    batch.submit()
    return batch


def looks(device: metalmm.Device) -> list[Any]:
    a = np.ones((1, N), np.float16)
    w = np.eye(N, dtype=np.float16)
    array = device.array(a)
    call = device.prepare(V, a, w)
    later = device.batch()
    later.matmul(V, a, w)
    return [lambda: metalmm.matmul(V, a, w, device=device), array.numpy, call, lambda: (later.submit(), later.wait())]


@pytest.mark.needs("work after a fault")
@tells_of_divergence
@pytest.mark.parametrize("index", range(4))
def test_the_failure_of_a_dropped_submission_is_told_where_the_next_caller_looks(index: int, device: metalmm.Device) -> None:
    look = looks(device)[index]
    failing(device)
    gc.collect()
    with pytest.warns(RuntimeWarning, match=r"a submission that nobody waited for failed: .*diverges"):
        look()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # once
        assert first(metalmm.matmul(V, np.ones((1, N), np.float16), np.eye(N, dtype=np.float16), device=device)) == 1


@pytest.mark.needs("work after a fault")
@tells_of_divergence
def test_closing_tells_of_the_failure_of_a_dropped_submission() -> None:
    device = metalmm.Device()
    failing(device)
    with pytest.warns(RuntimeWarning, match=r"nobody waited for failed: .*diverges"):
        device.close()


@pytest.mark.needs("work after a fault")
@tells_of_divergence
def test_a_failure_does_not_stop_what_comes_after_it(chain: Chain) -> None:
    broken = failing(chain.device)
    with pytest.warns(RuntimeWarning, match=r"nobody waited for failed"):  # a fast device knows it when the next is submitted
        chain.submit(chain.x, chain.mid).wait()
    assert first(chain.mid) == 6
    for _ in range(2):
        with pytest.raises(metalmm.KernelError, match=r"diverges"):
            broken.wait()


def test_threads_that_submit_and_wait_across_each_other(device: metalmm.Device) -> None:
    problems: list[BaseException] = []

    def work() -> None:
        try:
            chain = Chain(device)
            for _ in range(30):
                chain.mid.write(np.zeros_like(chain.mid.numpy()))
                earlier = chain.submit(chain.x, chain.mid)
                later = chain.submit(chain.mid, chain.out)
                later.wait()
                assert first(chain.out) == 12
                del earlier
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not problems


def test_closing_while_another_thread_waits() -> None:
    for _ in range(20):
        own = metalmm.Device()
        chain = Chain(own)
        for _ in range(8):
            chain.submit(chain.x, chain.mid)
        closing = threading.Thread(target=own.close)
        closing.start()
        with contextlib.suppress(metalmm.ClosedError):
            assert first(chain.mid) == 6
        closing.join()


@pytest.mark.needs("work after a fault")
@tells_of_divergence
def test_a_recording_remembers_the_first_failure_once(device: metalmm.Device) -> None:
    kernel = device.compile(DIVIDES + "kernel void good(device half* y) { y[0] = 1.0h; }").kernel
    bad, good = device.batch(), device.batch()
    y = device.array(np.zeros(N, np.float16))
    kernel("diverges")(y, grid=1, threadgroup=N, batch=bad)
    kernel("good")(y, grid=1, threadgroup=1, batch=good)
    broken = bad.record()
    for _ in range(3):
        broken.replay()
    with pytest.raises(metalmm.KernelError, match="diverges"):
        broken.wait()
    broken.wait()  # told once
    right = good.record()
    right.replay()
    right.wait()
    assert y.numpy()[0] == 1


@pytest.mark.needs("work after a fault")
@tells_of_divergence
def test_every_dropped_failure_is_told(device: metalmm.Device) -> None:
    with pytest.warns(RuntimeWarning) as told:
        for _ in range(3):
            failing(device)
        gc.collect()
        device.array(np.zeros(4, np.float16)).numpy()
    assert sum("nobody waited for failed" in str(w.message) for w in told) == 3
