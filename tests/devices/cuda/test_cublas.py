"""The CUDA device: what it asks of NVIDIA's driver, what it makes of the driver's failures. On the fake, some faults are injected; a GPU
whose kernel fails is lost to its process, so that those tests have GPUs of their own."""

from __future__ import annotations

import gc
import itertools
import mmap
import threading
import time
from pathlib import Path
from typing import Any

import metalmm
import numpy as np
import pytest
from metalmm import manifest, numerics, nvrtc
from metalmm.backends import cuda
from metalmm.bench import runner, sizes
from support.cuda import BLAS, FAKE, GEMM, HEAD, ILLEGAL, ROWS, STEP, V, needs_fake, run
from support.here import DEVICE
from support.numbers import carry_out, half, right
from support.operands import allowed

pytestmark = pytest.mark.skipif(DEVICE != "cuda", reason="of device cuda")


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
    v = manifest.get("gemv_nt_vec4/c4_tg64")
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
            assert metalmm.matmul("gemv_nt_octet/c2_d2_tg128", x, w, transpose_b=True, out=out, device=device) is out
            assert torch.allclose(out.float(), x.float() @ w.float().T, atol=0.5, rtol=0.01)
        array = device.array(w)
        assert torch.equal(torch.from_dlpack(array), w) and torch.from_dlpack(array).data_ptr() == array.device_address
