"""The CPU device's debug mode sees what it is for."""

from __future__ import annotations

import metalmm
import numpy as np
import pytest


@pytest.mark.usefixtures("each_compiler")
def test_debug_mode_sees_what_it_is_for() -> None:
    device = metalmm.Device("cpu", debug=True)
    head = "#include <metal_stdlib>\nusing namespace metal;\n"
    twice = "kernel void k(device half* y, uint i [[thread_position_in_grid]]) { y[i] = 1.0h; if (i == 3) y[2] = 2.0h; if (i == 5) *(device half4*)(y + 8) = half4(1.0h); }"
    y = np.zeros(64, np.float16)
    counts = device.count_writes(y)
    device.compile(head + twice).kernel("k")(y, grid=2, threadgroup=32)
    expected = np.ones(64, int)
    expected[[2, 8, 9, 10, 11]] = 2
    np.testing.assert_array_equal(counts, expected)
    # Who comes last wins: the order of threads, simdgroups and threadgroups shows.
    last = "kernel void k(device uint* y, uint g [[threadgroup_position_in_grid]], uint t [[thread_index_in_threadgroup]]) { threadgroup uint x; x = t; threadgroup_barrier(mem_flags::mem_threadgroup); if (t == x) y[g] = t; y[40] = g; }"
    kernel = device.compile(head + last).kernel("k")
    seen: list[set[int]] = [set(), set()]
    for _ in range(20):
        z = np.zeros(41, np.uint32)
        kernel(z, grid=40, threadgroup=64)
        seen[0] |= {int(x) for x in z[:40]}
        seen[1].add(int(z[40]))
    assert min(len(s) for s in seen) > 3, seen
    with pytest.raises(metalmm.DeviceError, match="debug=True"):
        metalmm.Device("cpu").count_writes(y)
