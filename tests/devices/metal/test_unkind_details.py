"""The Metal device where hardware is unkind: older GPUs, virtual ones, those with memory of their own; time-outs, a GPU that is gone,
limits, work that overlaps in time. On the fake Metal alone, whose Settings (tests/fakes/fake_metal/fake.h) say what the GPU is like."""

from __future__ import annotations

import gc
import mmap
import shutil
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import metalmm
import numpy as np
import pytest
from support.here import FAKE, ROOT
from support.numbers import half, right
from support.unkind import HEAD, MPS, Make, V, aside, pages

pytestmark = pytest.mark.skipif(not FAKE, reason="the fake Metal alone can be told what its GPU is like")


def test_a_failed_submission_is_told_though_a_later_one_has_signalled(like: Make) -> None:
    device = like({"return_on_event": True})
    a, eye = device.array(half(1, 16)), device.array(np.eye(16, dtype=np.float16))
    first, second = device.batch(), device.batch()
    first.matmul(V, a, eye)
    y = second.matmul(V, a, eye)
    FAKE.inject("command_buffer_status", 1, code=2)
    first.submit()
    second.submit()
    with pytest.warns(RuntimeWarning, match="code 2"):
        second.wait()
    with pytest.raises(metalmm.KernelError, match="code 2"):
        first.wait()
    np.testing.assert_array_equal(np.asarray(y), np.asarray(a))


def test_what_runs_when_an_array_dies_may_use_the_device(like: Make) -> None:
    """A finalizer is Python code of any kind; the last to hold the array is a submission."""
    device, seen = like(), list[float]()
    y = device.array(np.ones((1, 4), np.float16))
    for _ in range(3):
        w = pages(64, 64)
        weakref.finalize(w, lambda: seen.append(float(y.numpy()[0, 0])))
        batch = device.batch()
        out = batch.matmul(V, device.array(half(1, 64)), w)
        batch.submit()
        del w, batch
        np.asarray(out)
    gc.collect()
    assert seen == [1, 1, 1]


def test_a_capture_holds_what_is_made_after_it_began(like: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("METAL_CAPTURE_ENABLED", "1")
    device = like()
    metalmm.matmul(V, half(1, 16), half(16, 16), device=device)
    with metalmm.capture(tmp_path / "a.gputrace", device):
        metalmm.matmul(V, half(1, 16), half(16, 16), device=device)


def test_a_base_of_another_meaning_is_not_asked(like: Make) -> None:
    class Odd(np.ndarray[Any, Any]):
        @property
        def base(self) -> Any:  # type: ignore[override]
            raise RuntimeError("not for you")

    device, w = like(), pages(64, 64).view(Odd)
    right(metalmm.matmul(V, half(1, 64), w, device=device), half(1, 64), np.asarray(w))


def test_two_owners_of_one_memory_keep_nothing(like: Make) -> None:
    device, store = like(), mmap.mmap(-1, 4 * mmap.PAGESIZE)
    x = np.frombuffer(store, np.float16, 64).reshape(1, 64)
    w = np.frombuffer(store, np.float16, 64 * 64).reshape(64, 64)
    w[...] = half(64, 64)
    for calls in (1, 2):
        right(metalmm.matmul(V, x, w, out=aside(64), device=device), x, w)
        assert device.counters["wrapped"] == calls


def test_windows_over_an_array_keep_the_last(like: Make) -> None:
    device, store, x = like(), pages(512, 2048), aside(64)
    before = device.counters["resident_bytes"]
    for i in range(500):
        w = store[i : i + 4].reshape(-1)[: 64 * 128].reshape(64, 128)
        if i % 100 == 0:
            right(metalmm.matmul(V, x, w, device=device), x, w)
        else:
            metalmm.matmul(V, x, w, device=device)
    assert device.counters["resident_bytes"] - before <= 1 << 20


def test_a_longer_part_of_a_kept_array_is_wrapped_anew_and_a_part_of_it_is_not(like: Make) -> None:
    device, x, w = like(), aside(64), pages(64, 2048, seed=1)
    right(metalmm.matmul(V, x[:, :4], w[:4], out=aside(2048), device=device), x[:, :4], w[:4])
    right(metalmm.matmul(V, x, w, out=aside(2048), device=device), x, w)
    assert device.counters["wrapped"] == 2
    right(metalmm.matmul(V, x[:, :8], w[8:16], out=aside(2048), device=device), x[:, :8], w[8:16])
    assert device.counters["wrapped"] == 2


def test_kept_pages_leave_the_residency_set(like: Make) -> None:
    first, second = like(), like()
    x, w = half(1, 65)[:, 1:], pages(64, 256)
    for device in (first, second):
        right(metalmm.matmul(V, x, w, device=device), x, w)
    held = [d.counters["resident_bytes"] for d in (first, second)]
    del w
    gc.collect()
    assert [d.counters["resident_bytes"] for d in (first, second)] == [h - 64 * 256 * 2 for h in held]


def test_what_follows_mps_in_another_command_buffer_comes_after_it(like: Make) -> None:
    device = like({"untracked": True})
    x, eye = device.array(half(1, 48)), device.array(np.eye(48, dtype=np.float16))
    first, second = device.batch(), device.batch()
    y = first.matmul(MPS, x, eye)
    z = second.matmul(V, y, eye)
    first.submit()
    second.submit()
    second.wait()
    np.testing.assert_array_equal(np.asarray(z), np.asarray(x))


def test_each_pipeline_of_a_recording_is_set_beforehand(like: Make) -> None:
    device = like({"indirect": True}, apple_family=7)
    x, eye = device.array(half(1, 64)), device.array(np.eye(64, dtype=np.float16))
    recorded, y, z = device.batch(), device.empty((1, 64)), device.empty((1, 64))
    recorded.matmul(V, x, eye, out=y)
    recorded.matmul("m1_optimized/simd_basic", y, eye, out=z)
    recording = recorded.record()
    recording.replay()
    recording.wait()
    np.testing.assert_array_equal(np.asarray(z), np.asarray(x))


def test_far_offsets_are_not_indirect(like: Make) -> None:
    device = like()
    whole, eye = device.empty((1, (1 << 31) + 64)), device.array(np.eye(64, dtype=np.float16))
    recorded, y = device.batch(), device.empty((1, 64))
    recorded.matmul(V, whole[:, 1 << 31 :], eye, out=y)
    recording = recorded.record()
    assert len(recording) == 1 and not [k for k in FAKE.live() if "Indirect" in k]


@pytest.mark.parametrize("value", ["0", ""])
def test_shader_validation_that_is_off_leaves_archives_on(value: str, like: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MTL_SHADER_VALIDATION", value)
    assert like().info["binary_archives"] is True


def test_indirect_commands_ask_for_apple7(like: Make) -> None:
    assert like({"indirect": True}, apple_family=5).info["indirect_command_buffers"] is False
    assert like({"indirect": True}, apple_family=7).info["indirect_command_buffers"] is True


def test_a_gpu_that_was_removed_ends_the_device_too(like: Make) -> None:
    device, a, b = like(revoked=0), half(1, 16), half(16, 16)
    FAKE.inject("command_buffer_status", 1, code=11)
    with pytest.raises(metalmm.DeviceError, match="code 11"):
        metalmm.matmul(V, a, b, device=device)
    with pytest.raises(metalmm.DeviceError, match="the GPU does no more for this device"):
        metalmm.matmul(V, a, b, device=device)


def test_the_pool_has_a_limit_and_gives_back_where_memory_is_short(like: Make) -> None:
    device = like()
    arrays = [device.empty(15 << 20) for _ in range(12)]
    del arrays
    gc.collect()
    assert 0 < device.counters["pooled_bytes"] <= 256 << 20
    FAKE.inject("allocation", 1)
    kept = device.empty(3 << 20)
    assert kept.nbytes == 6 << 20 and device.counters["pooled_bytes"] == 0


def test_an_array_may_be_as_long_as_the_limit_which_is_no_class(like: Make) -> None:
    assert like(max_buffer_mb=17).empty((17 << 20) - 100, "uint8").nbytes == (17 << 20) - 100


def test_the_first_commit_alone_is_early(like: Make) -> None:
    def calls(**options: int) -> int:
        device = like(options)
        x, w = device.array(half(1, 16)), device.array(half(16, 16))
        with device.batch() as batch:
            for _ in range(12):
                batch.matmul(V, x, w)
        return batch.timing.calls

    assert calls(first_commit=2) == calls(first_commit=6) > calls(first_commit=0)


def test_timed_batches_keep_to_the_samples_of_a_buffer(like: Make) -> None:
    device = like({"max_operations": 4096})
    x, w = device.array(half(1, 16)), device.array(half(16, 16))
    with device.batch(per_dispatch=True) as batch:
        for _ in range(2100):
            batch.matmul(V, x, w)
    assert len(batch.timing.dispatches) == 2100 and None not in batch.timing.dispatches


SUM = HEAD + (
    "kernel void k(const device half* x, const device half* z, device half* y, uint i [[thread_position_in_grid]]) { y[i] = x[i] + z[i]; }"
)


@pytest.mark.parametrize("spans", [((0, 64), (0, 8192), (4096, 8192)), ((0, 1000), (500, 3000), (2000, 2064))])
def test_a_write_waits_for_all_that_was_read(spans: tuple[tuple[int, int], ...], like: Make) -> None:
    device, m = like(), np.zeros(8192, np.float16)
    k, one = device.compile(SUM).kernel("k"), device.array(np.ones(64, np.float16))
    (a, b), (c, d), (e, f) = spans
    with device.batch() as batch:
        if a == c:
            k(m[a:b], m[c:d], device.empty(64), grid=1, threadgroup=64, batch=batch)
        else:
            k(m[a:b], one, device.empty(64), grid=1, threadgroup=64, batch=batch)
            k(m[c:d], one, device.empty(64), grid=1, threadgroup=64, batch=batch)
        k(one, one, m[e:f], grid=1, threadgroup=64, batch=batch)


def test_no_buffer_stands_in_a_page_of_the_host(like: Make) -> None:
    """A page that is wrapped is a whole buffer: the fake took a dispatch on another buffer in it for one that a barrier must part."""
    device = like()
    assert {device.array(half(1, n)).numpy().ctypes.data % mmap.PAGESIZE for n in (1, 64, 100, 4000)} == {0}


CHECK = ROOT / "tests" / "fakes" / "fake_metal" / "check_for_macos.sh"


PLANTED = {
    "in the SDK of macOS 26 alone": ("bool f(id<MTLDevice> d) { return [d supportsFamily:MTLGPUFamilyApple10]; }", "MTLGPUFamilyApple10"),
    "a method of it": ("id f(id<MTLDevice> d) { return [d newMTL4CommandQueue]; }", "newMTL4CommandQueue"),
    "new in macOS 15, unguarded": (
        "id f(id<MTLDevice> d) { return [d newResidencySetWithDescriptor:nil error:nullptr]; }",
        "only available on macOS 15.0 or newer",
    ),
    "a value of macOS 15, unguarded": ("MTLMathMode f() { return MTLMathModeSafe; }", "only available on macOS 15.0 or newer"),
    "a selector that nobody has": ("void f(id<MTLDevice> d) { [d newEventWithNothing]; }", "newEventWithNothing"),
    "": (
        "id f(id<MTLDevice> d) {\n  if (@available(macOS 15.0, *)) return [d newResidencySetWithDescriptor:nil error:nullptr];\n  return nil;\n}",
        "",
    ),
}


CHECKS = not shutil.which("clang++") or not Path("/usr/aarch64-linux-gnu").exists() or not [*Path("/usr/lib").glob("llvm-*/include/c++/v1")]


@pytest.mark.skipif(CHECKS, reason="needs g++-aarch64-linux-gnu and libc++-dev")
@pytest.mark.parametrize("what", PLANTED)
def test_a_name_newer_than_what_we_build_for_is_caught(what: str, tmp_path: Path) -> None:
    code, message = PLANTED[what]
    (tmp_path / "planted.mm").write_text(f"#import <Metal/Metal.h>\n{code}\n")
    done = subprocess.run(["bash", str(CHECK), sys.executable, str(tmp_path / "planted.mm")], capture_output=True, text=True)
    assert (done.returncode != 0) == bool(message), done.stderr
    assert message in done.stderr


@pytest.mark.skipif(CHECKS, reason="needs g++-aarch64-linux-gnu and libc++-dev")
@pytest.mark.parametrize("other", ["uint64_t", "size_t"])
def test_integers_that_are_other_types_on_darwin_are_caught(other: str, tmp_path: Path) -> None:
    text = f'#include "{ROOT}/csrc/python/array.h"\nsize_t f(size_t a, {other} b) {{ return std::min(a, b); }}\n'
    (tmp_path / "planted.cpp").write_text(text)
    done = subprocess.run(["bash", str(CHECK), sys.executable, str(tmp_path / "planted.cpp")], capture_output=True, text=True)
    assert ("no matching function for call to 'min'" in done.stderr) == (done.returncode != 0) == (other == "uint64_t"), done.stderr
