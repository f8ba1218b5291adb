"""Debug mode of device cuda: an access outside of what is bound, or off its alignment, is an error with its line, and costs nobody else."""

from __future__ import annotations

from collections.abc import Iterator

import metalmm
import numpy as np
import pytest
from support.cuda import FAKE, GEMM, OCTETS, STEP, batch_of_steps, computes, needs_fake
from support.here import DEVICE
from support.numbers import half, right

pytestmark = pytest.mark.skipif(DEVICE != "cuda", reason="of device cuda")
on_a_gpu = pytest.mark.skipif(bool(FAKE), reason="the fake driver's kernels do not ask before an access")


@pytest.fixture(name="debug", scope="module")
def _debug() -> Iterator[metalmm.Device]:
    with metalmm.Device("cuda", debug=True) as device:
        yield device


@pytest.mark.parametrize("variant", [GEMM, OCTETS, "gemm/bm32_bn32_bk32", "small_m/t2_s8_d2_tg256"])
def test_what_is_right_is_right_in_debug_mode(variant: str, debug: metalmm.Device) -> None:
    m = 1 if variant.startswith("gemv") else 5
    a, b = half(m, 256), half(96, 256, seed=1)
    for make in (lambda x: x, debug.array):
        right(metalmm.matmul(variant, make(a), make(b), transpose_b=True, device=debug), a, b.T)
    q = metalmm.quantize(b, "q8_0")
    right(metalmm.matmul("gemv_nt/l4_s4_d4_x_tg128", half(1, 256), q, transpose_b=True, device=debug), half(1, 256), q.dequantize().T)


def test_a_recording_is_looked_at_too(debug: metalmm.Device) -> None:
    y = debug.array(np.zeros(8, np.float32))
    recording = batch_of_steps(debug, y, 3).record()
    recording.replay()
    recording.wait()
    np.testing.assert_array_equal(y.numpy(), np.full(8, 7, np.float32))


@needs_fake
@pytest.mark.parametrize("how", ["call", "numpy", "batch", "recording"])
def test_what_a_kernel_was_refused_is_its_error(how: str, debug: metalmm.Device) -> None:
    computes(debug)
    x = np.zeros(8, np.float32)
    y = x if how == "numpy" else debug.array(np.zeros(16, np.float32))[8:]  # what is bound begins within an array
    batch = batch_of_steps(debug, y, 2)
    recording = batch_of_steps(debug, debug.array(x), 2).record()
    FAKE.inject("access", code=32, skip=1 if how == "batch" else 0)
    says = r"kernel 'step': a store of 16 bytes outside what is bound at of_the_fake.metal:7, by thread 5 of threadgroup \(0, 0, 0\), 32 bytes past the end of buffer 0 \(32 bytes\)$"
    with pytest.raises(metalmm.KernelError, match=says):
        if how == "batch":
            batch.submit()
            batch.wait()
        elif how == "recording":
            recording.replay()
            recording.wait()
        else:
            debug.compile(STEP).kernel("step")(y, threads=8, threadgroup=8)
    computes(debug)


@needs_fake
def test_it_is_not_aligned(debug: metalmm.Device) -> None:
    FAKE.inject("access", code=4)
    with pytest.raises(metalmm.KernelError, match=r"a load or store at of_the_fake.metal:7 that is not aligned to 16 bytes, by thread 5"):
        debug.compile(STEP).kernel("step")(debug.array(np.zeros(8, np.float32)), threads=8, threadgroup=8)


WRONG = """#include <metal_stdlib>
using namespace metal;
constant float table[3] = {1, 2, 4};
struct Pair { uint a; float4 b; };
float at(const device float4* p, uint i) {
  return dot(p[i], float4(1));
}
kernel void k(const device float4* a [[buffer(0)]], device float* y [[buffer(1)]], device atomic_uint* c [[buffer(2)]],
              constant uint& what [[buffer(3)]], constant Pair& by [[buffer(4)]], threadgroup float* t [[threadgroup(0)]],
              uint i [[thread_position_in_threadgroup]], uint g [[threadgroup_position_in_grid]]) {
  float sum = table[(i + what) % 3] + by.b.x;
  if (what == 1) sum += at(a, i + 16 * g);
  if (what == 2 && i == 3) y[100] = 1;
  if (what == 3) atomic_fetch_add_explicit(c + i, 1u, memory_order_relaxed);
  if (what == 4) sum += at(reinterpret_cast<const device float4*>(y + 1), 0);
  if (what == 5 && i == 2) t[60000] = 1;
  if (what == 6) y[-1] = 3;
  thread float own[4] = {1, 2, 3, 4};
  t[i] = sum + own[(what + i) % 4];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  y[i] = t[i];
}
"""
SAYS = {
    1: r"a load of 16 bytes outside what is bound at <source>:6, by thread 0 of threadgroup \(1, 0, 0\), 0 bytes past the end of buffer 0 \(256 bytes\); 7 more",
    2: r"a store of 4 bytes outside what is bound at <source>:13, by thread 3 of threadgroup \(., 0, 0\), .*; 1 more",
    3: r"(a load|an atomic operation) of 4 bytes outside what is bound at <source>:14, by thread . of threadgroup \(., 0, 0\), . bytes past the end of buffer 2",
    4: r"a load or store at <source>:6 that is not aligned to 16 bytes, .* at byte 4 of buffer 1",
    5: r"a store of 4 bytes outside what is bound at <source>:16, by thread 2 .*, in threadgroup memory",
    6: r"a store of 4 bytes outside what is bound at <source>:17, .* 4 bytes before the beginning of buffer 1",
}


@on_a_gpu
@pytest.mark.parametrize("what", sorted(SAYS))
def test_a_wrong_access_is_an_error_with_its_line(what: int, debug: metalmm.Device) -> None:
    kernel = debug.compile(WRONG).kernel("k")
    a, y, c = (debug.array(np.zeros(n, np.float32)) for n in (64, 8, 1))

    def run(what: int) -> None:
        kernel(a, y, c, np.uint32(what), np.zeros(8, np.float32), grid=2, threadgroup=8, threadgroup_memory={0: 256})

    run(0)
    with pytest.raises(metalmm.KernelError, match=SAYS[what]):
        run(what)
    run(0)  # the GPU's context is there
    np.testing.assert_array_equal(y.numpy(), [1 + 1, 2 + 2, 4 + 3, 1 + 4, 2 + 1, 4 + 2, 1 + 3, 2 + 4])
