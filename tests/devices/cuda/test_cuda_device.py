"""The CUDA device: what it asks of NVIDIA's driver, what it makes of the driver's failures. On the fake, some faults are injected; a GPU
whose kernel fails is lost to its process, so that those tests have GPUs of their own."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import metalmm
import numpy as np
import pytest
from metalmm import nvrtc, tuning
from support.cuda import FAKE, GEMM, HEAD, OUT_OF_MEMORY, STEP, V, adds, computes, needs_fake, run
from support.here import DEVICE, ROOT
from support.numbers import half

pytestmark = pytest.mark.skipif(DEVICE != "cuda", reason="of device cuda")


def test_info_names_the_gpu_and_its_driver(device: metalmm.Device) -> None:
    info = device.info
    assert device.name == "cuda"
    assert info["name"] == metalmm._core._device_names("cuda")[0]
    assert info["compute_capability"] >= 80
    assert info["max_threadgroup_memory_length"] == 232192
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
        ({"ahead": -1}, "ahead -1"),
        ({"ahead": 2**31}, "ahead 2147483648"),
        ({"overlap": 1}, "overlap is 1; it takes True or False"),
        ({"threads": 4}, "threads"),
    ],
)
def test_options_out_of_range(options: dict[str, Any], message: str) -> None:
    with pytest.raises(metalmm.DeviceError, match=message):
        metalmm.Device("cuda", **options)


@pytest.mark.parametrize(
    "options", [{"overlap": False}, {"spin": 0}, {"spin": 1}, {"timeout": 60}, {"timeout": 1e6}, {"ahead": 0}, {"index": 0}]
)
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


@needs_fake
def test_a_driver_without_gpus(tmp_path: Path) -> None:
    script = tmp_path / "s.py"
    script.write_text("import metalmm\nprint(metalmm._core._device_names('cuda'))\nmetalmm.Device('cuda')\n")
    command = [sys.executable, str(ROOT / "tests" / "fakes" / "on_fake_cuda.py"), str(script)]
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
    assert "pip install nvidia-cuda-nvrtc" in done.stderr
    done = run(script, METALMM_LIBNVRTC="libc.so.6")
    assert "CompilerNotFoundError: device cuda needs NVRTC" in done.stderr


def test_code_is_kept_by_its_compilers_file_and_not_by_the_folder(tmp_path: Path) -> None:
    one = nvrtc.find()
    (tmp_path / "elsewhere").mkdir()
    names = [tmp_path / "elsewhere" / Path(one.path).name, tmp_path / "another.so"]
    for name in names:
        name.symlink_to(Path(one.path).resolve())
    alike, other = (nvrtc.Compiler(str(name)).identity for name in names)
    assert alike == one.identity and other != one.identity


def test_source_that_does_not_compile(device: metalmm.Device, tmp_path: Path) -> None:
    path = tmp_path / "mine.metal"
    path.write_text(HEAD + "kernel void k(device int* y) {\n  y[0] = nobody();\n}")
    with pytest.raises(metalmm.CompileError, match=r"(?s)kernel 'k': NVRTC failed:.*mine\.metal[:(]4.*nobody"):
        device.compile(path).kernel("k")


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
    kernel(y, grid=1, threadgroup=40, threadgroup_memory={0: 160, 1: 200000})  # more than a kernel may declare
    np.testing.assert_array_equal(y.numpy(), np.arange(39, -1, -1) * 10101)
    with pytest.raises(metalmm.KernelError, match="232368 bytes of threadgroup memory; the limit is 232192"):
        kernel(y, grid=1, threadgroup=40, threadgroup_memory={0: 232192, 1: 16})


def test_a_device_that_stops_kernels_lacks_wgmma() -> None:
    """Lanes stop one by one, and wgmma waits for all of its four simdgroups."""
    spec = metalmm.MatmulSpec(512, 4096, 4096, transpose_b=True)
    with metalmm.Device("cuda", timeout=1.0) as stops, metalmm.Device("cuda") as device:
        assert "wgmma" in stops.lacking
        assert not tuning.choose(stops, spec)[0].startswith("gemm_wgmma/")
        if device.info["compute_capability"] == 90:
            for stored in ("dense", "q8_0"):
                spec = metalmm.MatmulSpec(512, 4096, 4096, transpose_b=True, b_storage=stored)
                assert tuning.choose(device, spec)[0] == "gemm_wgmma/bm128_bn128"
        with pytest.raises(metalmm.UnsupportedError, match="it needs wgmma, which this device lacks"):
            metalmm.matmul("gemm_wgmma/bm128_bn128", half(64, 128), half(128, 64), device=stops)


@pytest.mark.rest(but=2)
@pytest.mark.parametrize("split", [2, 4])
@pytest.mark.parametrize("stored", ["dense", "q8_0", "affine4"])
def test_threadgroups_of_a_cluster_share_k(device: metalmm.Device, stored: str, split: int) -> None:
    """Of a last cluster that n does not fill, of parts of K that are empty or end in the middle of a step; each result is stored once."""
    if "wgmma" in device.lacking:
        pytest.skip("clusters are of compute capability 9.0")
    for m, n, k in ((65, 72, 1024), (16, 200, 64 if stored == "affine4" else 160), (64, 64, 2080 if stored == "q8_0" else 2048)):
        a, w = half(m, k), half(n, k, seed=1)
        b, options = (w, {"transpose_b": True}) if stored == "dense" else (metalmm.quantize(w, stored), {})
        options |= {"bias": half(1, n, seed=2)[0], "c": half(m, n, seed=3), "beta": 1.0}
        out = metalmm.matmul(f"gemm_wgmma/bm64_bn64_k{split}", a, b, device=device, **options).astype(np.float64)
        assert (abs(out - metalmm.reference(a, b, **options)) <= metalmm.error_bound(a, b, **options)).all(), (m, n, k)


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
