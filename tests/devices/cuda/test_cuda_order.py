"""The CUDA device: what it asks of NVIDIA's driver, what it makes of the driver's failures. On the fake, some faults are injected; a GPU
whose kernel fails is lost to its process, so that those tests have GPUs of their own."""

from __future__ import annotations

import gc
import itertools
import threading
from collections.abc import Callable
from typing import Any

import metalmm
import numpy as np
import pytest
from support.cuda import BLAS, COLUMNS, FAKE, GEMM, HEAD, OCTETS, ROWS, STEP, OfAnother, V, batch_of_steps, computes, needs_fake
from support.here import DEVICE
from support.numbers import carry_out, half, right

pytestmark = pytest.mark.skipif(DEVICE != "cuda", reason="of device cuda")


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


@pytest.mark.rest
def test_chains_in_which_weights_are_written_too(device: metalmm.Device) -> None:
    """Vectors and weights that matmuls read and write in any order give in a recording, again and again, what they give one by one."""
    rng, size = np.random.default_rng(3), 64 if FAKE else 128
    for _ in range(4):
        vectors = [rng.standard_normal((1, size)).astype(np.float16) for _ in range(5)]
        matrices = [(rng.standard_normal((size, size)) / size**0.5).astype(np.float16) for _ in range(5)]
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
                options |= {"bias": {"bias": v[k].reshape((size,))}, "c": {"c": v[k], "beta": 0.5}}.get(kind, {})
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
@pytest.mark.parametrize("recorded", [False, True])
def test_what_was_written_before_two_that_stand_beside_it_is_not_read_early(recorded: bool, device: metalmm.Device) -> None:
    """The two wait for nothing, so that what is before them may run yet when the last one begins."""
    x, h, y, z = (device.array(half(1, 64, seed=i)) for i in range(4))
    w, u = device.array(half(64, 64)), device.array(half(64, 64))
    batch = device.batch()
    batch.matmul(OCTETS, x, u, transpose_b=True, out=w[3:4])
    for out in (h, y):
        batch.matmul(GEMM, x, u, out=out)
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
@pytest.mark.parametrize("others", [0, 1])
def test_what_a_batch_before_wrote_is_not_read_early(others: int, device: metalmm.Device, like: Callable[..., None]) -> None:
    """It is at work when this batch begins: an event between them, so the fake has it, holds nothing up. Nor do `others`, which wait
    for what is before them and are not early."""
    like(kernel_us=50_000)
    x, h, y, z = (device.array(half(1, 64, seed=i)) for i in range(4))
    w, u = device.array(half(64, 64)), device.array(half(64, 64))
    first, second = device.batch(), device.batch()
    first.matmul(GEMM, x, u, out=h)
    first.matmul(OCTETS, x, u, transpose_b=True, out=w[3:4])
    second.matmul(GEMM, h, u, out=y)
    for _ in range(others):
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
