"""On the CPU device's debug mode: every element of every result is written once, and no order of threads changes a bit."""

from __future__ import annotations

import metalmm
import numpy as np
import pytest
from metalmm import numerics
from test_edges import columns_of, equal, integers, placed, rows_of
from test_matmul import ALL, case

MSL = [v for v in ALL if not v.library]


@pytest.fixture(scope="module")
def debug_device() -> metalmm.Device:
    return metalmm.Device("cpu", debug=True)


@pytest.mark.parametrize("v", MSL)
def test_every_element_is_written_once_and_the_order_of_threads_does_not_matter(v: metalmm.Variant, debug_device: metalmm.Device) -> None:
    """Threads, simdgroups and threadgroups in another order each time; no variant uses atomics, so that no bit may differ."""
    layout = v.supports["layouts"][-1]
    sizes = [(33, 67, 37), (64, 128, 64)]
    if v.supports.get("m") == 1 or v.family == "small_m":  # with and without half4 loads
        m = 1 if v.supports.get("m") == 1 else 3
        sizes = [(m, 131, 133), (m, 132, 260)]
    for m, n, k in [(m, 16 if v == "gemv/smalln" else n, k) for m, n, k in sizes]:
        spec = metalmm.MatmulSpec(m=m, n=n, k=k, batch=2, transpose_a=layout[0] == "t", transpose_b=layout[1] == "t", bias=True)
        a, b, options, reference, bound = case(spec, False)
        out = np.empty(reference.shape, np.float16)
        results = []
        for _ in range(3):
            out.view(np.uint16)[...] = 0xFFFF
            counts = debug_device.count_writes(out)
            metalmm.matmul(v, a, b, out=out, device=debug_device, **options)
            assert (counts == 1).all(), f"{v}: elements are written {counts.min()} to {counts.max()} times"
            results.append(out.copy())
        assert not numerics.mismatch(out, reference, bound)
        for other in results[1:]:
            np.testing.assert_array_equal(results[0].view(np.uint16), other.view(np.uint16))


@pytest.mark.parametrize("v", MSL)
def test_no_vector_is_loaded_off_its_alignment(v: metalmm.Variant, debug_device: metalmm.Device) -> None:
    """Operands that begin anywhere in 8 bytes, in rows and batches that do, too: right on x86 either way, and not on a GPU."""
    rng, m = np.random.default_rng(14), rows_of(v)
    for layout in v.supports["layouts"]:
        for n, k, pad_a, pad_b, offset in [(66, 128, 0, 2, 1), (33, 131, 1, 1, 2), (64, 128, 4, 4, 3), (40, 128, 0, 0, 0)]:
            n = columns_of(v, n)
            a = placed(integers(rng, 3, *((k, m) if layout[0] == "t" else (m, k))), pad_a, offset)
            b = placed(integers(rng, 3, *((n, k) if layout[1] == "t" else (k, n))), pad_b, offset)
            equal(v, a, b, debug_device, layout)
        # Each matrix of a batch begins elsewhere in its 8 bytes.
        a, b = (
            integers(rng, 3, *((128, m) if layout[0] == "t" else (m, 128))),
            integers(rng, 3, *((n, 128) if layout[1] == "t" else (128, n))),
        )
        apart = [
            np.lib.stride_tricks.as_strided(placed(np.zeros((1, x.size + 9), np.float16)), x.shape, (2 * (x[0].size + 1), *x[0].strides))
            for x in (a, b)
        ]
        apart[0][...], apart[1][...] = a, b
        equal(v, *apart, debug_device, layout)


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
