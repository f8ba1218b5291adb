"""The Metal device where hardware is unkind: older GPUs, virtual ones, those with memory of their own; time-outs, a GPU that is gone,
limits, work that overlaps in time. On the fake Metal alone, whose Settings (tests/fakes/fake_metal/fake.h) say what the GPU is like."""

from __future__ import annotations

import gc
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
from metalmm import backends, manifest, tuning
from metalmm.backends.protocol import names_of
from metalmm.bench import sizes
from support.here import FAKE, ROOT
from support.numbers import half, right
from support.unkind import HEAD, MPS, Make, V, aside, pages

pytestmark = pytest.mark.skipif(not FAKE, reason="the fake Metal alone can be told what its GPU is like")


GEMM = "gemm_tiled/baseline"


def work(device: metalmm.Device) -> None:
    """Something of all that a device does, each result looked at."""
    a, b, bias = half(1, 48), half(48, 40, seed=1), half(40, seed=2)
    right(metalmm.matmul(V, a, b, bias=bias, device=device), a, b, bias=bias)
    right(metalmm.matmul(V, pages(1, 48), pages(48, 40, seed=1), device=device), a, b)
    da, db, eye = device.array(a), device.array(b), device.array(np.eye(40, dtype=np.float16) * np.float16(2))
    with device.batch() as batch:
        y = batch.matmul(V, da, db)
        for _ in range(5):
            y = batch.matmul(V, y, eye)
        z = batch.matmul(V, a, db, c=np.ones((1, 40), np.float16), beta=2.0)
    right(y, a, b * np.float16(32))
    right(z, a, b, c=np.ones((1, 40), np.float16), beta=2.0)
    recorded, y, z = device.batch(), device.empty((1, 40)), device.empty((1, 40))
    recorded.matmul(V, da, db, out=y)
    recorded.matmul(V, y, eye, out=z)
    recording = recorded.record()
    for seed in range(3):
        da.numpy()[...] = half(1, 48, seed=seed + 5)
        recording.replay()
        recording.replay()
        recording.wait()
        right(z, np.asarray(da), b * np.float16(2))
    first, second = device.batch(), device.batch()  # in flight together
    x = first.matmul(V, da, db)
    y = second.matmul(V, x, eye)
    first.submit()
    second.submit()
    second.wait()
    right(y, np.asarray(da), b * np.float16(2))
    with device.batch(per_dispatch=True) as timed:
        y = timed.matmul(V, timed.matmul(V, da, db), eye)
    right(y, np.asarray(da), b * np.float16(2))
    if "simdgroup_matrix" not in device.lacking:
        right(metalmm.matmul(GEMM, half(9, 48), b, device=device), half(9, 48), b)
    if "mps" not in device.lacking:
        with device.batch() as batch:
            x = batch.matmul(V, da, db)
            y = batch.matmul(MPS, x, eye, bias=bias)
            z = batch.matmul(V, y, eye)
        np.testing.assert_allclose(np.asarray(z), 2 * np.asarray(y))
        right(y, np.asarray(x), np.asarray(eye), bias=bias)


GPUS: dict[str, tuple[dict[str, Any], dict[str, int]]] = {
    "M5": ({}, {"apple_family": 10}),
    "M3": ({}, {}),
    "M2": ({}, {"apple_family": 8}),
    "M1": ({}, {"apple_family": 7}),
    "M1, indirect": ({"indirect": True}, {"apple_family": 7}),
    "M3, not indirect": ({"indirect": False}, {}),
    "virtual": ({}, {"apple_family": 5, "mps": 0, "no_copy_zero": 1, "counters": 0}),
    "discrete": ({}, {"unified_memory": 0}),
    "macOS 14": ({}, {"residency_sets": 0}),
    "in time": ({}, {"in_time": 1, "start_us": 200}),
    "in time, late status": ({}, {"in_time": 1, "start_us": 200, "status_lag_us": 500}),
    "returns on the event": ({"return_on_event": True}, {"in_time": 1, "start_us": 200, "status_lag_us": 500}),
    "untracked": ({"untracked": True}, {}),
    "untracked, in time": ({"untracked": True, "return_on_event": True}, {"in_time": 1, "start_us": 100}),
    "untracked, discrete": ({"untracked": True}, {"unified_memory": 0}),
    "untracked, M2, indirect": ({"untracked": True, "indirect": True}, {"apple_family": 8}),
    "begins early": ({"first_commit": 2}, {"in_time": 1}),
    "all at once": ({"first_commit": 2, "untracked": True, "return_on_event": True}, {"in_time": 1, "status_lag_us": 300}),
    "small": ({"max_operations": 2}, {"working_set_mb": 1, "max_buffer_mb": 1}),
}


@pytest.mark.parametrize("name", GPUS)
def test_all_works_on(name: str, like: Make) -> None:
    options, settings = GPUS[name]
    device = like(options, **settings)
    work(device)
    device.close()


@pytest.mark.parametrize("name", ["untracked", "in time", "all at once", "M1, indirect"])
def test_threads_at_once_on(name: str, like: Make) -> None:
    options, settings = GPUS[name]
    device, problems = like(options, **settings), list[BaseException]()

    def run() -> None:
        try:
            for _ in range(3):
                work(device)
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=run) for _ in range(3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not problems
    device.close()


def run_on_fake(tmp_path: Path, script: str, **settings: int) -> subprocess.CompletedProcess[str]:
    (tmp_path / "s.py").write_text(script)
    environment = {**os.environ, "METALMM_FAKE": ",".join(f"{k}={v}" for k, v in settings.items())}
    command = [sys.executable, str(ROOT / "tests" / "fakes" / "on_fake_metal.py"), str(tmp_path / "s.py")]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)


def test_validation_ends_the_process_where_a_rule_is_broken(tmp_path: Path) -> None:
    done = run_on_fake(tmp_path, "import on_fake_metal\non_fake_metal.fake.misuse('too-long')\n", validation=1)
    assert done.returncode == -signal.SIGABRT
    assert "failed assertion: newBufferWithLength: of 17179869185" in done.stderr


def test_lengths_over_the_limit_are_refused_before_metal_sees_them(like: Make) -> None:
    device = like(max_buffer_mb=1)
    with pytest.raises(metalmm.DeviceError, match="cannot allocate 1048578 bytes; the limit of a buffer is 1048576"):
        device.empty(524289)
    assert device.empty(524288).nbytes == 1 << 20
    big = pages(1024, 1024)  # 2 MB, which could be wrapped but for the limit
    with pytest.raises(metalmm.DeviceError, match="the limit of a buffer is 1048576"):
        metalmm.matmul(V, half(1, 1024), big, device=device)
    work(device)


def test_buffers_of_no_bytes_over_pages_are_not_used(like: Make) -> None:
    device = like(no_copy_zero=1)
    a, b, out = pages(1, 64), pages(64, 64, seed=1), pages(1, 64)
    metalmm.matmul(V, a, b, out=out, device=device)
    right(out, a, b)
    assert device.counters["wrapped"] == 0


def test_residency_stays_below_the_working_set(like: Make) -> None:
    device = like(working_set_mb=8)
    assert device.info["residency_budget"] == 7 << 20
    arrays = [device.array(half(1, 1 << 20, seed=i)) for i in range(6)]  # 2 MB each
    assert device.counters["resident_bytes"] <= 7 << 20
    w = device.array(np.full((1, 8), 2, np.float16))
    for i, array in enumerate(arrays):
        with device.batch() as batch:
            y = batch.matmul(V, array[:, :1], w)
        np.testing.assert_array_equal(np.asarray(y), np.full((1, 8), 2) * half(1, 1 << 20, seed=i)[0, 0])
    del arrays, array
    gc.collect()


def test_large_removals_are_committed_at_once(like: Make) -> None:
    device = like()
    array = device.empty(40 << 20)  # 80 MB, more than is kept
    metalmm.matmul(V, array[:1].numpy().reshape(1, 1), half(1, 1), device=device)
    before = device.counters
    del array
    gc.collect()
    after = device.counters
    assert after["resident_bytes"] <= before["resident_bytes"] - (80 << 20)
    assert after["residency_calls"] == before["residency_calls"] + 2, "its removal, and a commit"


def test_new_memory_is_asked_for_before_work_waits_for_it(like: Make) -> None:
    device = like()
    FAKE.take_waited_for()
    x, w = device.array(half(1, 896)), device.array(half(896, 1152, seed=1))
    right(metalmm.matmul(V, x, w), np.asarray(x), np.asarray(w))
    assert FAKE.take_waited_for() == 0


@pytest.mark.rest
@pytest.mark.parametrize("keep", [0, 60])
def test_idle_memory_stays_in_reach_where_somebody_asks(keep: float, like: Make) -> None:
    device = like({"keep_resident": keep}, unwire_ms=1000)
    x, w, y = device.array(half(1, 64)), device.array(half(64, 64, seed=1)), device.empty((1, 64))
    for _ in range(2):
        metalmm.matmul(V, x, w, out=y)
        FAKE.take_waited_for()
        time.sleep(1.6)
    metalmm.matmul(V, x, w, out=y)
    assert (FAKE.take_waited_for() == 0) == bool(keep)
    device.close()


def test_the_thread_that_asks_rests_and_wakes_with_work(like: Make) -> None:
    device = like({"keep_resident": 0.6})
    x, w, y = device.array(half(1, 64)), device.array(half(64, 64, seed=1)), device.empty((1, 64))
    metalmm.matmul(V, x, w, out=y)
    time.sleep(2)
    rested = device.counters["residency_calls"]
    time.sleep(1.2)
    assert device.counters["residency_calls"] == rested
    metalmm.matmul(V, x, w, out=y)
    time.sleep(0.8)
    assert device.counters["residency_calls"] > rested


def test_a_child_of_fork_has_no_thread_that_asks_and_ends(like: Make) -> None:
    device = like({"keep_resident": 60})
    x, w, y = device.array(half(1, 64)), device.array(half(64, 64, seed=1)), device.empty((1, 64))
    metalmm.matmul(V, x, w, out=y)
    child = os.fork()
    if not child:
        del device  # and its end in the child, which must not wait for the parent's thread
        gc.collect()
        os._exit(len(os.listdir("/proc/self/task")) != 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    metalmm.matmul(V, x, w, out=y)
    device.close()


def test_auto_takes_another_where_mps_would_raise(like: Make) -> None:
    device = like(apple_family=8)
    wide = metalmm.MatmulSpec(9, 151936, 4096, transpose_b=True)
    assert tuning.choose(device, wide)[0] == "gemm/bm32_bn32_bk32" and not tuning.choose(device, wide)[0].startswith("mps")
    assert tuning.choose(device, metalmm.MatmulSpec(9, 896, 896, transpose_b=True))[0] == MPS
    x, big = device.array(half(9, 128)), device.array(half(16, 256, seed=1))
    w = big[:, 128:]  # the memory ends before its last row's whole pitch does
    with pytest.raises(metalmm.LayoutError, match="mps: b is a slice"):
        metalmm.matmul(MPS, x, w, transpose_b=True)
    right(metalmm.matmul("auto", x, w, transpose_b=True), np.asarray(x), np.asarray(w), transpose_b=True)
    right(metalmm.matmul("auto", x, big[:, :128], transpose_b=True), np.asarray(x), np.asarray(big[:, :128]), transpose_b=True)


def test_a_decode_step_of_auto_records_as_one_indirect_buffer(like: Make) -> None:
    device = like()
    batch = device.batch()
    for shape in {(s.n, s.k, s.layout, s.batch, s.bias): s for s in sizes.load().shapes if s.m == 1 and s.n < 10000}.values():
        lead = (shape.batch,) if shape.batch > 1 else ()
        b = device.empty((*lead, shape.n, shape.k) if shape.transpose_b else (*lead, shape.k, shape.n))
        bias = device.empty(shape.n) if shape.bias else None
        batch.matmul("auto", device.empty((*lead, 1, shape.k)), b, bias=bias, alpha=shape.alpha, transpose_b=shape.transpose_b)
    recording = batch.record()
    assert FAKE.live()["FakeIndirect"] == 1
    FAKE.take_calls()
    recording.replay()
    recording.wait()
    assert FAKE.take_calls() < 20, "the dispatches were encoded again"


def offered() -> list[metalmm.Variant]:
    """Kernels that "auto" may take on a Mac; not all are ids that ship, whose rows the array of kernels has."""
    names = [name for *_, name in backends.metal.BACKEND.winners]
    for _, _, name, *_ in backends.metal.BACKEND.preferred:
        names += names_of(name)
    return [v for v in map(manifest.get, dict.fromkeys(names)) if not v.library]


@pytest.mark.rest(but=2)
@pytest.mark.parametrize(("turn", "v"), [pytest.param(turn, v, id=str(v)) for turn, v in enumerate(offered())])
def test_what_auto_offers_on_a_mac_is_right_and_fills_its_simdgroups(turn: int, v: metalmm.Variant, like: Make) -> None:
    device = like()
    assert v.threads in (32, 64, 128, 256, 512)
    takes = {kind.storage for kind in v.kinds()}
    of_turn = ("q8_0", "q4_0:canonical", "affine4")[turn % 3]
    for storage in [s for s in ("dense", of_turn) if s in takes]:
        m = next(
            m
            for m in (1, 2, 3, 7)
            if not v.lacks(metalmm.MatmulSpec(m, 67, 320, transpose_b="nt" in v.supports["layouts"], b_storage=storage))
        )
        a, w = half(m, 320), half(67, 320, seed=1)
        form, _, blocks = storage.partition(":")
        b = w if storage == "dense" else metalmm.quantize(w, form, layout=blocks or "nk")
        nt = "nt" in v.supports["layouts"]
        given = {"transpose_b": True} if nt and storage == "dense" else {}
        right(metalmm.matmul(v, a, b if nt else w.T.copy(), device=device, **given), a, b if nt else w.T, **given)


def test_a_result_in_steady_state_costs_no_allocation_and_no_residency_call(like: Make) -> None:
    device = like()
    x, w = device.array(half(1, 896)), device.array(half(896, 1152, seed=1))
    for _ in range(3):
        y = metalmm.matmul(V, x, w)
    before = device.counters
    for _ in range(50):
        y = metalmm.matmul(V, x, w)
    assert device.counters["allocations"] == before["allocations"]
    assert device.counters["residency_calls"] == before["residency_calls"]
    right(y, np.asarray(x), np.asarray(w))


def test_arrays_that_live_are_never_given_the_same_memory(like: Make) -> None:
    device, rng, held = like(), np.random.default_rng(0), dict[int, tuple[Any, int]]()
    for i in range(300):
        if len(held) > 8 or (held and rng.integers(3) == 0):
            array, value = held.pop(list(held)[rng.integers(len(held))])
            assert (array.numpy() == value).all()
        array = device.empty(int(rng.integers(1, 40000)), "int32")
        array.numpy()[...] = i
        held[i] = array, i
    for array, value in held.values():
        assert (array.numpy() == value).all()


def test_classes_waste_little(like: Make) -> None:
    device = like()
    for size in (4096, 5000, 100_001, 1 << 20, (1 << 20) + 1, 5_000_000):
        before = FAKE.live().get("FakeBuffer", 0)
        array = device.empty(size, "uint8")
        assert FAKE.live()["FakeBuffer"] == before + 1
        pooled = device.counters["pooled_bytes"]
        del array
        gc.collect()
        kept = device.counters["pooled_bytes"] - pooled
        assert size <= kept <= max(size * 9 / 8 + 4096, 4096)
        device = metalmm.Device("metal")  # whose pool is empty


def test_weights_on_pages_keep_their_buffer_for_as_long_as_they_live(like: Make) -> None:
    device = like()
    x, w = aside(64), pages(64, 128, seed=1)
    for scale in (1, 2, 3):
        w *= np.float16(scale)
        right(metalmm.matmul(V, x, w, out=aside(128), device=device), x, w)
        right(metalmm.matmul(V, x, w[:, :64], out=aside(64), device=device), x, w[:, :64])
    assert device.counters["wrapped"] == 1
    before = FAKE.live()["FakeBuffer"]
    view = w[:]
    del w
    right(metalmm.matmul(V, x, view, out=aside(128), device=device), x, view)  # the view keeps the memory
    assert device.counters["wrapped"] == 1
    del view
    gc.collect()
    assert FAKE.live()["FakeBuffer"] == before - 1
    for seed in range(5):  # addresses that are used again
        w = pages(64, 128, seed=seed)
        right(metalmm.matmul(V, x, w, out=aside(128), device=device), x, w)
        del w
    assert device.counters["wrapped"] == 6


@pytest.mark.rest
def test_views_that_wander_over_an_array_are_not_kept_without_end(like: Make) -> None:
    device = like()
    store, x = pages(3000, 2048), half(1, 64)  # a row is a page
    before = FAKE.live().get("FakeBuffer", 0)
    for i in range(0, 3000):
        w = store[i].reshape(64, 32)
        if i % 500 == 0:
            right(metalmm.matmul(V, x, w, device=device), x, w)
        else:
            metalmm.matmul(V, x, w, device=device)
    assert FAKE.live().get("FakeBuffer", 0) <= before + 1024 + 8
    del store, w
    gc.collect()
    assert FAKE.live().get("FakeBuffer", 0) <= before + 8


def test_an_array_whose_memory_a_device_keeps_cannot_be_resized() -> None:
    """A weak reference stands on it, which NumPy asks about."""
    w = np.empty(1 << 22, np.float16)
    if w.ctypes.data % mmap.PAGESIZE:
        store = mmap.mmap(-1, 1 << 16)
        w = np.frombuffer(store, np.float16)
    y = np.zeros((1, 8), np.float16)
    metalmm.matmul(V, half(1, 8), w[:64].reshape(8, 8), out=y)
    with pytest.raises(ValueError, match="resize"):
        w.resize(8, refcheck=False)


def test_wrapped_memory_outlives_what_is_in_flight(like: Make) -> None:
    device = like(in_time=1, start_us=3000)
    x = half(1, 64)
    for seed in range(4):
        w = pages(64, 64, seed=seed)
        expected = metalmm.reference(x, w)
        batch = device.batch()
        y = batch.matmul(V, device.array(x), w)
        batch.submit()
        del w
        gc.collect()
        batch.wait()
        np.testing.assert_allclose(np.asarray(y), expected, rtol=0.02, atol=0.05)


def test_variants_say_what_a_virtual_gpu_lacks(like: Make) -> None:
    device = like(apple_family=5, mps=0)
    assert device.lacking == ["simdgroup_matrix", "mps", "tensor_ops"]
    a, b = half(5, 32), half(32, 16)
    for variant, missing in ((GEMM, "simdgroup_matrix"), ("mlx/baseline", "simdgroup_matrix"), (MPS, "mps")):
        with pytest.raises(metalmm.UnsupportedError, match=f"{variant}: it needs {missing}, which this device lacks"):
            metalmm.matmul(variant, a, b, device=device)
    found = metalmm.variants(device=device)
    assert found and not any(v.family in ("gemm_tiled", "mlx", "mps") for v in found)
    x = half(1, 32)
    right(metalmm.matmul("auto", x, b, device=device), x, b)
    assert "apple5" in device.info["families"].split()


def test_tensor_operations_are_those_of_an_m5_whose_compiler_takes_them(like: Make) -> None:
    a, b = half(70, 96), half(96, 80)
    chosen = {9: "mps/baseline", 10: "gemm_tensor/bm64_bn64_tg128"}
    for family, name in chosen.items():
        device = like(apple_family=family)
        assert ("tensor_ops" in device.lacking) == (family < 10)
        assert tuning.choose(device, metalmm.MatmulSpec(70, 80, 96))[0] == name
        right(metalmm.matmul("auto", a, b, device=device), a, b)
    FAKE.inject("tensors")
    assert "tensor_ops" in like(apple_family=10).lacking


def test_every_variant_says_what_it_needs(like: Make) -> None:
    """No kernel of a variant that runs on a GPU before Apple7 uses its matrices."""
    device = like(apple_family=5, mps=0)
    for v in metalmm.variants(device=device):
        assert "simdgroup_matrix" not in v.source.read_text() or v.library, v


def test_mps_is_guarded_where_it_gives_nan(like: Make) -> None:
    device = like(apple_family=8)
    a, b = device.empty((1, 8192)), device.empty((8192, 65536))
    with pytest.raises(metalmm.UnsupportedError, match=r"\(m \+ 2k\) \* n \* 2 reaches 2\^31; use gemm_tiled"):
        metalmm.matmul(MPS, a, b)


def test_pipelines_may_allow_fewer_threads_than_the_device(like: Make) -> None:
    device = like(max_threads=192)
    with pytest.raises(metalmm.KernelError, match="the manifest gives 256 threads; the kernel allows 192"):
        metalmm.matmul(V, half(1, 32), half(32, 16), device=device)
    right(metalmm.matmul("m1_optimized/simd_basic", half(1, 32), half(32, 16), device=device), half(1, 32), half(32, 16))


def test_buffers_begin_where_their_type_must(like: Make) -> None:
    source = HEAD + "kernel void k(const device half4* x, device half* y, uint i [[thread_position_in_grid]]) { y[i] = x[i].x; }"
    device = like()
    kernel, x, y = device.compile(source).kernel("k"), device.array(half(64)), device.empty(8)
    kernel(x[4:], y, threads=8, threadgroup=8)
    np.testing.assert_array_equal(np.asarray(y), np.asarray(x)[4:36:4])
    for bad in (x[1:], x[2:], half(64)[1:]):
        with pytest.raises(metalmm.KernelError, match="buffer 0 begins at an address that is no multiple of 8"):
            kernel(bad, y, threads=8, threadgroup=8)


def test_threadgroup_memory_of_one_kernel_does_not_count_for_the_next(like: Make) -> None:
    source = HEAD + (
        "kernel void a(device float* y, threadgroup float* t [[threadgroup(0)]]) { t[0] = 1; y[0] += t[0]; }\n"
        "kernel void b(device float* y) { threadgroup float t[4096]; t[4095] = 2; y[0] += t[4095]; }\n"
    )
    device = like()
    library, y = device.compile(source), device.array(np.zeros(1, np.float32))
    a, b = library.kernel("a"), library.kernel("b")
    with device.batch() as batch:
        for _ in range(2):
            a(y, grid=1, threadgroup=1, threadgroup_memory={0: 20000}, batch=batch)
            b(y, grid=1, threadgroup=1, batch=batch)
    assert y.numpy()[0] == 6


@pytest.mark.parametrize("settings", [{}, {"in_time": 1}, {"signal_on_error": 1}], ids=str)
@pytest.mark.parametrize("options", [{}, {"return_on_event": True}, {"max_operations": 1, "return_on_event": True}], ids=str)
def test_an_error_is_told_whatever_the_event_says(settings: dict[str, int], options: dict[str, Any], like: Make) -> None:
    if settings.get("signal_on_error") and options.get("return_on_event"):
        pytest.skip("an event after an error would be taken for success: what the option trusts in, and doctor looks at")
    device = like(options, **settings)
    a, b = half(1, 16), half(16, 16)
    for code, kind in ((2, metalmm.KernelError), (8, metalmm.DeviceError), (3, metalmm.KernelError)):
        FAKE.inject("command_buffer_status", 1, code=code)
        with pytest.raises(kind, match=f"code {code}"), device.batch() as batch:
            for _ in range(3):
                batch.matmul(V, a, device.array(b))
        right(metalmm.matmul(V, a, b, device=device), a, b)


@pytest.mark.parametrize("settings", [{}, {"in_time": 1}], ids=str)
def test_a_gpu_that_is_gone_ends_the_device_and_not_the_process(settings: dict[str, int], like: Make) -> None:
    device = like(**settings, revoked=0)
    a, b = half(1, 16), half(16, 16)
    recorded = device.batch()
    recorded.matmul(V, device.array(a), device.array(b))
    recording = recorded.record()
    FAKE.inject("command_buffer_status", 1, code=4)
    with pytest.raises(metalmm.DeviceError, match="code 4"):
        metalmm.matmul(V, a, b, device=device)
    for use in (lambda: metalmm.matmul(V, a, b, device=device), recording.replay):
        with pytest.raises(metalmm.DeviceError, match=r"the GPU does no more for this device \(.*\); make a new metalmm.Device"):
            use()
    device.close()
    FAKE.set("revoked", 0)
    right(metalmm.matmul(V, a, b, device=metalmm.Device("metal")), a, b)


def test_times_are_read_when_somebody_asks(like: Make) -> None:
    device = like({"return_on_event": True}, in_time=1, status_lag_us=300_000)
    x, w = device.array(half(1, 64)), device.array(half(64, 64))
    call = device.prepare(V, x, w)
    call()  # compiled, and one status behind it
    assert call.device_seconds is not None
    start = time.perf_counter()
    call()
    returned = time.perf_counter()
    assert call.device_seconds is not None
    told = time.perf_counter()
    assert returned - start < 0.2 < told - start, "the call does not wait for the status; its time does"
    with device.batch() as batch:
        batch.add(call)
    assert batch.timing.device is not None


def test_no_archives_under_shader_validation(like: Make, fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MTL_SHADER_VALIDATION", "1")
    device = like()
    assert device.info["binary_archives"] is False
    right(metalmm.matmul(V, half(1, 16), half(16, 16), device=device), half(1, 16), half(16, 16))
    assert device.counters["archive_misses"] == 0
    assert not list(fresh.glob("*.metalarchive*"))
