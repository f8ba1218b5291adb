"""What a device with debug=True promises: it counts writes, shuffles its order, and refuses what a kernel must not do before it is done."""

from __future__ import annotations

import contextlib
import functools
import re
from typing import Any

import metalmm
import numpy as np
import pytest

HEAD = "#include <metal_stdlib>\nusing namespace metal;\n"


@pytest.fixture
def debug(each_compiler: str) -> metalmm.Device:
    return metalmm.Device("cpu", debug=True, timeout=10.0)


@functools.lru_cache(maxsize=4)
def made(device: metalmm.Device, body: str) -> metalmm.Kernel:
    """A kernel of x and y with the constant `at`; t: a thread's number in its threadgroup, lane and group those of its simdgroup."""
    arguments = "device float* x, device float* y, constant int& at, uint i [[thread_position_in_grid]], "
    arguments += (
        "uint t [[thread_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]], uint group [[simdgroup_index_in_threadgroup]]"
    )
    return device.compile(f"{HEAD}constant float table[3] = {{1, 2, 3}};\nkernel void k({arguments}) {{\n{body}\n}}\n").kernel("k")


def run(device: metalmm.Device, body: str, *arrays: Any, threads: int = 64, threadgroup: int = 64, number: int = 0) -> None:
    made(device, body)(*arrays, np.int32(number).tobytes(), threads=threads, threadgroup=threadgroup)


def floats(n: int = 64) -> Any:
    return np.zeros(n, np.float32)


def test_writes_are_counted_and_the_order_is_another_each_time(debug: metalmm.Device) -> None:
    twice = "kernel void k(device half* y, uint i [[thread_position_in_grid]]) { y[i] = 1.0h; if (i == 3) y[2] = 2.0h; if (i == 5) *(device half4*)(y + 8) = half4(1.0h); }"
    debug._take_findings(True)  # they race, and go on
    y = np.zeros(64, np.float16)
    counts = debug.count_writes(y)
    debug.compile(HEAD + twice).kernel("k")(y, grid=2, threadgroup=32)
    expected = np.ones(64, int)
    expected[[2, 8, 9, 10, 11]] = 2
    np.testing.assert_array_equal(counts, expected)
    # Who comes last wins: the order of threads, simdgroups and threadgroups shows.
    last = "kernel void k(device uint* y, uint g [[threadgroup_position_in_grid]], uint t [[thread_index_in_threadgroup]]) { y[g] = t; y[40] = g; }"
    kernel = debug.compile(HEAD + last).kernel("k")
    seen: list[set[int]] = [set(), set()]
    for _ in range(20):
        z = np.zeros(41, np.uint32)
        kernel(z, grid=40, threadgroup=64)
        seen[0] |= {int(x) for x in z[:40]}
        seen[1].add(int(z[40]))
    assert min(len(s) for s in seen) > 3, seen
    assert debug._take_findings(False)
    with pytest.raises(metalmm.DeviceError, match="debug=True"):
        metalmm.Device("cpu").count_writes(y)


DISTANCES = [1, 2, 7, 1000, -1, -5, -1000, 100_000, -100_000, 2_000_000, -2_000_000]
OUTSIDE = {
    "a device array": ("y[at < 0 ? at : 63 + at] = 1.0f;", "a store of 4 bytes outside what is bound, by thread 0"),
    "a device array, read": ("x[0] = y[at < 0 ? at : 63 + at];", "a load of 4 bytes outside what is bound"),
    "a vector": (
        "*(device float4*)(y + (at < 0 ? 4 * at : 60 + 4 * at)) = float4(1.0f);",
        "a store of (4|8|16) bytes outside what is bound",
    ),
    "threadgroup memory": (
        "threadgroup float p[64]; threadgroup float* q = p; q[at < 0 ? at : 63 + at] = 1.0f;",
        "a store of 4 bytes outside",
    ),
    "threadgroup memory by name": (
        "threadgroup float p[64]; p[at < 0 ? at : 63 + at] = 1.0f;",
        r"index -?\d+ is outside of 'float ?\[64\]'.*:5",
    ),
    "rows of it": ("threadgroup float p[8][8]; p[0][at < 0 ? at : 7 + at] = 1.0f;", r"index -?\d+ is outside of 'float ?\[8\]'"),
    "atomics": (
        "atomic_fetch_add_explicit((device atomic_int*)y + (at < 0 ? at : 63 + at), 1, memory_order_relaxed);",
        "an atomic operation of 4 bytes",
    ),
    "a thread's array": (
        "float v[4]; v[at < 0 ? at : 3 + at] = 3; y[0] = v[0];",
        r"index -?\d+ is outside of 'float ?\[4\]' at <source>:5",
    ),
    "an array in a struct": (
        "struct { int n; float v[4]; } s; s.v[at < 0 ? at : 3 + at] = 3; y[0] = s.v[0];",
        r"index -?\d+ is outside of 'float ?\[4\]'",
    ),
    "an array of the library": ("array<float, 3> v; v[at < 0 ? at : 2 + at] = 3; y[0] = v[0];", r"index -?\d+ is outside of 3 elements"),
    "an array that is read": (
        "array<float, 3> v{}; float z = v[at < 0 ? at : 2 + at]; if (z > 9) y[0] = z;",
        r"index -?\d+ is outside of 3 elements",
    ),
    "a vector's elements": ("float4 v = 0; v[at < 0 ? at : 3 + at] = 3; y[0] = v[0] * 0;", r"index -?\d+ is outside of 4 elements"),
    "a packed vector's": ("packed_half3 v; v[at < 0 ? at : 2 + at] = 3; if (v[0] > 9) y[0] = 1;", r"index -?\d+ is outside of 3 elements"),
    "a matrix's columns": ("float2x4 v(0); v[at < 0 ? at : 1 + at] = 3; y[0] = v[0][0] * 0;", r"index -?\d+ is outside of 2 elements"),
    "a table": ("y[0] = table[at < 0 ? at : 2 + at];", r"index -?\d+ is outside of '(const )?float ?\[3\]'"),
}


@pytest.mark.rest(but=5)
@pytest.mark.parametrize(("body", "message"), OUTSIDE.values(), ids=OUTSIDE)
def test_nothing_outside_is_read_or_written(body: str, message: str, debug: metalmm.Device) -> None:
    for arrays in ((floats(), floats()), (debug.array(floats()), debug.array(floats()))):
        for distance in DISTANCES:
            with pytest.raises(metalmm.KernelError, match=f"kernel 'k': threadgroup \\(0, 0, 0\\): {message}"):
                run(debug, "if (i == 0) {" + body + "}", *arrays, number=distance)
            assert not np.asarray(arrays[1]).any()
    run(debug, body.replace("at < 0 ? at : ", "").replace("at < 0 ? 4 * at : ", ""), floats(), floats(), threads=1, threadgroup=1)


def test_a_refusal_says_where(debug: metalmm.Device) -> None:
    with pytest.raises(
        metalmm.KernelError,
        match=r"a store of 4 bytes outside what is bound, by thread 3 \(<source>:5\), 8 bytes past the end of buffer 1 \(256 bytes\)",
    ):
        run(debug, "if (t == 3) y[66] = 1;", floats(), floats())
    with pytest.raises(metalmm.KernelError, match=r"by thread 3 \(<source>:5\), at byte 280 of the 256 bytes of threadgroup memory"):
        run(debug, "threadgroup float p[64]; threadgroup float* q = p; if (t == 3) q[70] = 1; y[0] = p[at];", floats(), floats())
    with pytest.raises(
        metalmm.KernelError,
        match=r"a load of 4 bytes outside what is bound, by thread 0 \(<source>:5\), 4 bytes before the beginning of buffer 0",
    ):
        run(debug, "if (t == 0) y[0] = x[at - 1];", floats(), floats())


def test_what_is_not_written_yet_is_no_number_that_fits(debug: metalmm.Device) -> None:
    y = floats()
    with np.errstate(all="ignore"):
        run(
            debug,
            "float v[8]; if (at) for (int j = 0; j < 8; j++) v[j] = 1; float s = 0; for (int j = 0; j < 8; j++) s += v[j]; y[t] = s;",
            floats(),
            y,
        )
    assert not (np.abs(y) < 1e30).any()


SUM = "threadgroup float part[2]; if (t < 2) part[t] = 0; threadgroup_barrier(mem_flags::mem_threadgroup);"
END = "threadgroup_barrier(mem_flags::mem_threadgroup); y[t] = part[0];"
RACES = {
    "all add to one": f"{SUM} part[0] += x[t]; {END}",
    "one of each simdgroup adds": f"{SUM} float s = simd_sum(x[t]); if (lane == 0) part[0] += s; {END}",
    "written and read without a barrier": "threadgroup float p[64]; p[t] = x[t]; y[t] = p[(t + 1) % 64];",
    "the same, of another simdgroup": "threadgroup float p[64]; p[t] = x[t]; y[t] = p[(t + 32) % 64];",
    "a simdgroup's barrier for all": "threadgroup float p[64]; p[t] = x[t]; simdgroup_barrier(mem_flags::mem_threadgroup); y[t] = p[(t + 32) % 64];",
    "read, then written": "threadgroup float p[64]; p[t] = x[t]; threadgroup_barrier(mem_flags::mem_threadgroup); y[t] = p[63 - t]; p[t] = x[t] + 1;",
    "the last write": "threadgroup float p[2]; p[0] = float(t); threadgroup_barrier(mem_flags::mem_threadgroup); y[t] = p[0];",
    "at the end": "threadgroup float p[2]; p[0] = float(t);",
    "vectors that overlap": "threadgroup float p[68]; *(threadgroup packed_float4*)(p + t) = packed_float4(float4(x[t] + t)); y[t] = 0;",
    "many bytes at once": "threadgroup float4x4 s; float4x4 m = float4x4(float(t)); s = m; threadgroup_barrier(mem_flags::mem_threadgroup);"
    " y[t] = s[1][1];",
    "a reader beside several writers of one value": "threadgroup float p[1]; if (t < 40) p[0] = 3; else y[t] = p[0];",
    "read by all but the first, which wrote": "threadgroup float p[1]; if (t == 0) p[0] = 3; y[t] = p[0];",
    "bytes": "threadgroup uchar p[64]; p[t / 2] = uchar(t); threadgroup_barrier(mem_flags::mem_threadgroup); y[t] = p[t];",
}


@pytest.mark.rest(but=4)
@pytest.mark.parametrize("body", RACES.values(), ids=RACES)
def test_a_race_in_threadgroup_memory_is_an_error(body: str, debug: metalmm.Device) -> None:
    x, thread = np.arange(1, 65, dtype=np.float32), r"thread \d+ \(<source>:5\)"
    with pytest.raises(
        metalmm.KernelError, match=rf"a race: {thread} (reads|writes) byte \d+ of the \d+ bytes of threadgroup memory, which {thread}"
    ):
        run(debug, body, x, floats())


NO_RACES = {
    "a barrier between": "threadgroup float p[64]; p[t] = x[t]; threadgroup_barrier(mem_flags::mem_threadgroup); y[t] = p[63 - t];",
    "an exchange in a simdgroup": "threadgroup float p[64]; p[t] = x[t]; simdgroup_barrier(mem_flags::mem_threadgroup); y[t] = p[t ^ 31];",
    "one value by all": "threadgroup float p[2]; p[0] = 3; threadgroup_barrier(mem_flags::mem_threadgroup); y[t] = p[0];",
    "one value by each simdgroup": "threadgroup float p[2]; p[group] = simd_sum(x[t]); threadgroup_barrier(mem_flags::mem_threadgroup); y[t] = p[1];",
    "one value, read at once": "threadgroup int p[1]; p[0] = 3; y[t] = p[0];",
    "neighbours": "threadgroup uchar p[64]; p[t] = uchar(t); y[t] = p[t];",
    "atomics": "threadgroup atomic_uint n; if (t == 0) atomic_store_explicit(&n, 0u, memory_order_relaxed);"
    " threadgroup_barrier(mem_flags::mem_threadgroup); atomic_fetch_add_explicit(&n, 1u, memory_order_relaxed);"
    " threadgroup_barrier(mem_flags::mem_threadgroup); y[t] = atomic_load_explicit(&n, memory_order_relaxed);",
    "one value by all, then atomics": "threadgroup uint a[1]; a[0] = 0u; threadgroup_barrier(mem_flags::mem_threadgroup);"
    " atomic_fetch_add_explicit((threadgroup atomic_uint*)a, 1u, memory_order_relaxed);"
    " threadgroup_barrier(mem_flags::mem_threadgroup); y[t] = a[0];",
    "a store whose other bytes change": "threadgroup float p[8]; if (t == 1) p[0] = 5; "
    "if (t == 2) *(threadgroup float4*)p = float4(5, 1, 2, 3); threadgroup_barrier(mem_flags::mem_threadgroup); y[t] = p[0];",
    "a tree": "threadgroup float p[64]; p[t] = x[t]; for (uint s = 32; s; s /= 2) { threadgroup_barrier(mem_flags::mem_threadgroup);"
    " if (t < s) p[t] += p[t + s]; } threadgroup_barrier(mem_flags::mem_threadgroup); y[t] = p[0];",
    "matrices": "threadgroup float p[128]; simdgroup_float8x8 m(1.0f); simdgroup_store(m, p + 64 * group, 8);"
    " threadgroup_barrier(mem_flags::mem_threadgroup); y[t] = p[t] + p[127 - t];",
    "in turns": "threadgroup float p[64]; for (int j = 0; j < 5; j++) { p[t] = x[t] + j; threadgroup_barrier(mem_flags::mem_threadgroup);"
    " y[t] = p[63 - t]; threadgroup_barrier(mem_flags::mem_threadgroup); }",
}


@pytest.mark.rest(but=4)
@pytest.mark.parametrize("body", NO_RACES.values(), ids=NO_RACES)
def test_what_is_no_race_is_none(body: str, debug: metalmm.Device) -> None:
    x = np.arange(1, 1 + 5 * 64, dtype=np.float32)
    for _ in range(5):  # in another order each time
        run(debug, body.replace("y[t]", "y[i]"), x, floats(5 * 64), threads=5 * 64)


def test_many_meetings_are_counted(debug: metalmm.Device) -> None:
    body = "threadgroup float p[32]; p[t] = x[t]; for (int j = 0; j < 65536; j++) simdgroup_barrier(mem_flags::mem_threadgroup); y[t] = p[t ^ 1];"
    run(debug, body, floats(), floats(), threads=32, threadgroup=32)


ORDER = "p[t] = x[t]; threadgroup_barrier(mem_flags::{}); y[i] = p[63 - t];"
ATOMIC = "atomic_fetch_add_explicit({}, 1, memory_order_relaxed)"
WIDE = "atomic_thread_fence(mem_flags::mem_device, memory_order_seq_cst);"
LAST = f"if ({ATOMIC.format('(device atomic_int*)y')} == 1)"
FENCED = "if (t == 0) {{ y[i + 4] = 1; {} {} {{ {} x[0] = y[4] + y[68]; }} }}"
COUNTED = (
    "threadgroup atomic_int n; threadgroup float p[2]; if (t == 0) atomic_store_explicit(&n, 0, memory_order_relaxed);"
    " threadgroup_barrier(mem_flags::mem_threadgroup); if (lane == 0) p[group] = 1;"
)
NEAR = "atomic_thread_fence(mem_flags::mem_threadgroup, memory_order_seq_cst);"
LAST_SIMDGROUP = f"if (lane == 0 && {ATOMIC.format('&n')} == 1) {{ {NEAR} y[i] = p[0] + p[1]; }}"
# The first threadgroup tells the second by one atomic, the second the third by another.
FIRST, SECOND = (ATOMIC.format(f"((device atomic_int*)y + {at})") for at in range(2))
CHAIN = (
    "if (t == 0) {{ uint g = i / 64; if (g == 0) {{ y[8] = 1; "
    + WIDE
    + f" {FIRST}; }}}} if (g == 1 && {FIRST} == 1) {{{{ {{}} {SECOND}; }}}}"
    f" if (g == 2 && {SECOND} == 1) {{{{ {WIDE} x[0] = y[8]; }}}} }}}}"
)
PLANTED = {
    "a barrier that orders nothing": ("threadgroup float p[64]; " + ORDER.format("mem_none"), "a race: .*no barrier that orders threadgroup memory stands between"),
    "one of device memory": ("threadgroup float p[64]; " + ORDER.format("mem_device"), "a race: .*no barrier that orders threadgroup memory stands between"),
    "one of threadgroup memory, for a device's": (
        "y[i] = float(t); threadgroup_barrier(mem_flags::mem_threadgroup); y[i + 128] = y[i ^ 63];",
        r"a race: thread \d+ \(<source>:5\) reads byte \d+ of buffer 1 \(\d+ bytes\), .*no barrier that orders device memory stands between",
    ),
    "a simdgroup's, for a device's, of other memory": (
        "y[i] = float(t); simdgroup_barrier(mem_flags::mem_threadgroup); y[i + 128] = y[i ^ 1];", "no barrier that orders device memory",
    ),
    "threadgroups that write one element": ("y[t] = float(i);", r"which thread \d+ of another threadgroup .* and nothing orders threadgroups"),
    "threadgroups that read each other's": ("y[i] = 1; x[i] = y[i ^ 64];", "nothing orders threadgroups"),
    "a counter that is not atomic": ("if (t == 0) y[0] += 1;", "nothing orders threadgroups"),
    "an atomic and a load": (
        "atomic_fetch_add_explicit((device atomic_int*)y, 1, memory_order_relaxed); x[i] = y[0];", "a race: thread",
    ),
    "an atomic that nobody set": (
        "threadgroup atomic_uint n; atomic_fetch_add_explicit(&n, 1u, memory_order_relaxed);"
        " threadgroup_barrier(mem_flags::mem_threadgroup); y[t] = atomic_load_explicit(&n, memory_order_relaxed);",
        r"thread \d+ \(<source>:5\) reads byte 0 of the \d+ bytes of threadgroup memory, which no thread wrote",
    ),
    "what other threadgroups read, written by the last": (
        "threadgroup int last; y[i + 4] = x[400]; if (t == 0) last = atomic_fetch_add_explicit((device atomic_int*)y, 1, memory_order_relaxed);"
        " threadgroup_barrier(mem_flags::mem_device | mem_flags::mem_threadgroup); if (last == 1 && t == 0) x[400] = 9;",
        "a race: .*nothing orders threadgroups",
    ),
    "threadgroups after their atomics": (
        "if (t == 0) { atomic_fetch_add_explicit((device atomic_int*)x, 1, memory_order_relaxed); y[0] = i; }",
        "a race: .*nothing orders threadgroups",
    ),
    "threadgroups before their atomics, without a barrier": (
        "if (t == 0) { y[0] = i; atomic_fetch_add_explicit((device atomic_int*)x, 1, memory_order_relaxed); }",
        "a race: .*nothing orders threadgroups",
    ),
    "the last threadgroup, without a barrier behind its atomic": (
        "y[i + 4] = 1; threadgroup_barrier(mem_flags::mem_device); threadgroup int last; if (t == 0) last ="
        " atomic_fetch_add_explicit((device atomic_int*)y, 1, memory_order_relaxed); threadgroup_barrier(mem_flags::mem_threadgroup);"
        " if (last == 1) x[t] = y[t + 4] + y[t + 68];",
        "a race: .*reads .*nothing orders threadgroups",
    ),
    "no fence behind an atomic": (
        "if (t == 0) { y[i + 4] = 1; atomic_thread_fence(mem_flags::mem_device, memory_order_seq_cst); if"
        " (atomic_fetch_add_explicit((device atomic_int*)y, 1, memory_order_relaxed) == 1) x[0] = y[4] + y[68]; }",
        "a race: .*reads .*nothing orders threadgroups",
    ),
    "no fence behind an atomic, of simdgroups": (
        "threadgroup atomic_int n; threadgroup float p[2]; if (t == 0) atomic_store_explicit(&n, 0,"
        " memory_order_relaxed); threadgroup_barrier(mem_flags::mem_threadgroup); if (lane == 0) { p[group] = 1;"
        " atomic_thread_fence(mem_flags::mem_threadgroup, memory_order_seq_cst); if (atomic_fetch_add_explicit(&n, 1, memory_order_relaxed) == 1)"
        " y[i] = p[0] + p[1]; }",
        "a race: .*reads .*no barrier that orders threadgroup memory stands between",
    ),
    "a simdgroup's operation in place of a fence": (FENCED.format("if (simd_sum(1) > 0)", LAST, WIDE), "a race: .*nothing orders threadgroups"),
    "the same behind the atomic": (FENCED.format(WIDE, LAST, "simd_sum(1);"), "nothing orders threadgroups"),
    "a relaxed fence": (FENCED.format(WIDE.replace("seq_cst", "relaxed"), LAST, WIDE), "nothing orders threadgroups"),
    "a fence of one thread": (FENCED.format(WIDE[:-2] + ", thread_scope_thread);", LAST, WIDE), "nothing orders threadgroups"),
    "a fence of one threadgroup": (FENCED.format(WIDE, LAST, WIDE[:-2] + ", thread_scope_threadgroup);"), "nothing orders threadgroups"),
    "a simdgroup's operation in place of a fence among simdgroups": (
        COUNTED + " simd_sum(1); " + LAST_SIMDGROUP, "a race: .*no barrier that orders threadgroup memory stands between",
    ),
    "an atomic of another place": (
        "threadgroup atomic_int n, m; if (t == 0) { atomic_store_explicit(&n, 0, memory_order_relaxed); atomic_store_explicit(&m, 0,"
        " memory_order_relaxed); } threadgroup_barrier(mem_flags::mem_threadgroup); if (lane == 0) { "
        f"{NEAR} if ({ATOMIC.format('&n')} == 0) {ATOMIC.format('&m')}; else {{ {NEAR} y[i] = *(threadgroup int*)&m; }} }}",
        "a race: .*no barrier that orders threadgroup memory",
    ),
    "a barrier that half of a simdgroup skips": (
        "if (lane < 16) { simdgroup_barrier(mem_flags::mem_threadgroup); } threadgroup_barrier(mem_flags::mem_none); y[i] = 1;",
        r"barrier divergence: of the 32 threads of simdgroup [01], 16 wait at simdgroup_barrier \(<source>:5\), 16 are elsewhere",
    ),
    "the same, behind which nobody waits": (
        "if (lane < 16) { simdgroup_barrier(mem_flags::mem_threadgroup); y[i] = 1; }",
        r"barrier divergence: .* 16 wait at simdgroup_barrier \(<source>:5\), 16 have returned; .*lenient_barriers",
    ),
    "memory that nobody set": (
        "threadgroup float p[64]; if (t < 60) p[t] = x[t]; threadgroup_barrier(mem_flags::mem_threadgroup); y[i] = p[t ^ 1];",
        r"thread 6[0-3] \(<source>:5\) reads byte \d+ of the 256 bytes of threadgroup memory, which no thread wrote",
    ),
}  # fmt: skip
TWINS = {
    "a barrier of both": "threadgroup float p[64]; " + ORDER.format("mem_threadgroup"),
    "one of device memory, for a device's": "y[i] = float(t); threadgroup_barrier(mem_flags::mem_device); y[i + 128] = y[i ^ 63];",
    "a simdgroup's": "y[i] = float(t); simdgroup_barrier(mem_flags::mem_device); y[i + 128] = y[i ^ 1];",
    "threadgroups that write one value": "y[t] = 3;",
    "the last threadgroup": "y[i + 4] = 1; threadgroup_barrier(mem_flags::mem_device); threadgroup int last; if (t == 0) last ="
    " atomic_fetch_add_explicit((device atomic_int*)y, 1, memory_order_relaxed); threadgroup_barrier(mem_flags::mem_threadgroup |"
    " mem_flags::mem_device); if (last == 1) x[t] = y[t + 4] + y[t + 68];",
    "fences in place of barriers": "if (t == 0) { y[i + 4] = 1; atomic_thread_fence(mem_flags::mem_device, memory_order_seq_cst); if"
    " (atomic_fetch_add_explicit((device atomic_int*)y, 1, memory_order_relaxed) == 1) { atomic_thread_fence(mem_flags::mem_device,"
    " memory_order_seq_cst); x[0] = y[4] + y[68]; } }",
    "a counter that the last threadgroup resets": "threadgroup int last; if (t == 0) last = atomic_fetch_add_explicit((device atomic_int*)y,"
    " 1, memory_order_relaxed); threadgroup_barrier(mem_flags::mem_device | mem_flags::mem_threadgroup); if (last == 1 && t == 0) y[0] = 0;",
    "loads, plain and atomic": "y[i] = x[400] + atomic_load_explicit((device atomic_uint*)(x + 400), memory_order_relaxed) + x[400];",
    "the last simdgroup of a threadgroup": "threadgroup atomic_int n; threadgroup float p[2]; if (t == 0) atomic_store_explicit(&n, 0,"
    " memory_order_relaxed); threadgroup_barrier(mem_flags::mem_threadgroup); if (lane == 0) { p[group] = 1;"
    " atomic_thread_fence(mem_flags::mem_threadgroup, memory_order_seq_cst); if (atomic_fetch_add_explicit(&n, 1, memory_order_relaxed) == 1)"
    " { atomic_thread_fence(mem_flags::mem_threadgroup, memory_order_seq_cst); y[i] = p[0] + p[1]; } }",
    "a counter": "atomic_fetch_add_explicit((device atomic_int*)y, 1, memory_order_relaxed);",
    "a vector of three": "threadgroup float3 q[64]; q[t].x = 1; q[t].y = 2; q[t].z = x[t]; threadgroup_barrier(mem_flags::mem_threadgroup);"
    " float3 z = q[63 - t]; y[i] = z.x + z.z;",
    "memory that its reader alone sets": "threadgroup float p[64]; float v = p[t]; if (t > 64) x[t] = v; p[t] = 1; y[i] = p[t];",
    "a fence before and behind": FENCED.format(WIDE, LAST, WIDE),
    "a fence among simdgroups": COUNTED + NEAR + LAST_SIMDGROUP,
    "a fence, then a barrier": f"threadgroup int l; if (t == 0) {{ y[i + 4] = 1; {WIDE} l = {ATOMIC.format('(device atomic_int*)y')} == 1;"
    f" {WIDE} if (l) x[64] = y[4] + y[68]; }} threadgroup_barrier(mem_flags::mem_threadgroup | mem_flags::mem_device); if (l) x[t] = y[4] + y[68];",
    "a fence among simdgroups, of device memory": f"if (lane == 0) {{ uint g = i / 64; x[i] = 1; {WIDE} if"
    f" ({ATOMIC.format('((device atomic_int*)y + g)')} == 1) {{ {WIDE} y[i + 8] = x[64 * g] + x[64 * g + 32]; }} }}",
    "fences of a threadgroup's scope": (COUNTED + NEAR + LAST_SIMDGROUP).replace("seq_cst)", "seq_cst, thread_scope_threadgroup)"),
    "a barrier that all of a simdgroup reach": "simdgroup_barrier(mem_flags::mem_threadgroup); y[i] = 1; if (group == 1)"
    " simdgroup_barrier(mem_flags::mem_device);",
    "memory that is set": "threadgroup float p[64]; p[t] = x[t]; simdgroup_barrier(mem_flags::mem_threadgroup); y[i] = p[t ^ 1];",
}


@pytest.mark.rest(but=8)
@pytest.mark.parametrize(("body", "message"), PLANTED.values(), ids=PLANTED)
def test_what_is_not_ordered_or_set_is_an_error(body: str, message: str, debug: metalmm.Device) -> None:
    with pytest.raises(metalmm.KernelError, match=message):
        run(debug, body, floats(512) + 1, floats(512), threads=128)


@pytest.mark.rest(but=6)
@pytest.mark.parametrize("body", TWINS.values(), ids=TWINS)
def test_their_twins_are_none(body: str, debug: metalmm.Device) -> None:
    for _ in range(5):
        run(debug, body, floats(512) + 1, floats(512), threads=128)


@pytest.mark.rest(but=3)
@pytest.mark.parametrize(
    ("body", "is_right"),
    [
        ("{}", True), ("if (t < 36) {}", False), ("if (t < 32) {}", True), ("if (t >= 36) return; {}", False), ("if (t >= 32) return; {}", True),
        ("for (uint j = 0; j < 1 + t / 32; j++) {}", True), ("for (uint j = 0; j < 1 + t % 2; j++) {}", False), ("if (t % 2) {0} else {0}", False),
    ],
)  # fmt: skip
def test_a_simdgroups_barrier_is_for_its_own_lanes(body: str, is_right: bool, debug: metalmm.Device) -> None:
    """The second simdgroup of 40 threads has eight."""
    with contextlib.nullcontext() if is_right else pytest.raises(metalmm.KernelError, match=r"barrier divergence: .* simdgroup [01], "):
        run(
            debug,
            body.format("simdgroup_barrier(mem_flags::mem_threadgroup);") + " y[i] = 1;",
            floats(),
            floats(),
            threads=40,
            threadgroup=40,
        )


def test_a_lenient_device_lets_returned_lanes_count(each_compiler: str) -> None:
    body = PLANTED["the same, behind which nobody waits"][0]
    run(metalmm.Device("cpu", debug=True, lenient_barriers=True), body, floats(512), floats(512), threads=128)


def test_a_chain_of_threadgroups_needs_a_fence_in_its_middle(debug: metalmm.Device) -> None:
    found = set()
    for _ in range(40):  # in other orders
        run(debug, CHAIN.format(WIDE), floats(512), floats(512), threads=192)
        try:
            run(debug, CHAIN.format(""), floats(512), floats(512), threads=192)
        except metalmm.KernelError as e:
            found.add(bool(re.search("a race: .*reads .*nothing orders threadgroups", str(e))))
    assert found == {True}


def test_a_device_goes_on_and_says_each_finding_once(debug: metalmm.Device) -> None:
    body = "threadgroup float p[64]; p[t] = x[t]; y[i] = p[63 - t];\n p[t] = 1; y[i] = p[t ^ 33];"
    debug._take_findings(True)
    run(debug, body, floats(512), floats(512), threads=128)
    found = debug._take_findings(False)
    assert found and len({text for text, *_ in found}) == len(found)
    assert all({place.rpartition(":")[2] for place in places} <= {"5", "6"} and len(places) == 2 for _, places, _ in found)
    with pytest.raises(metalmm.KernelError, match="a race"):
        run(debug, body, floats(512), floats(512), threads=128)
    assert debug._take_findings(True) == []
    with pytest.raises(metalmm.DeviceError, match="debug=True"):
        metalmm.Device("cpu")._take_findings(True)


def test_a_pointer_in_an_argument_buffer_reaches_its_array(debug: metalmm.Device) -> None:
    """Of an array whose address somebody asked for, and of no other; not past its end."""
    source = HEAD + "struct P { device float* to; };\nkernel void k(constant P& p, constant int& at) { p.to[at] = 7; }"
    kernel, array, other = debug.compile(source).kernel("k"), debug.array(floats()), debug.array(floats())
    kernel(np.uint64(array.device_address).tobytes(), np.int32(63).tobytes(), threads=1, threadgroup=1)
    assert np.asarray(array)[63] == 7
    for at in (64, -1, 1 << 20):
        with pytest.raises(metalmm.KernelError, match="a store of 4 bytes outside what is bound"):
            kernel(np.uint64(array.device_address).tobytes(), np.int32(at).tobytes(), threads=1, threadgroup=1)
    address = np.uint64(other.__array__().ctypes.data)
    with pytest.raises(metalmm.KernelError, match="a store of 4 bytes outside what is bound"):
        kernel(address.tobytes(), np.int32(0).tobytes(), threads=1, threadgroup=1)


def test_what_a_function_constant_switched_off_may_be_loaded_and_dropped(debug: metalmm.Device) -> None:
    source = HEAD + (
        "constant bool has [[function_constant(0)]];\nkernel void k(device float* y, "
        "const device volatile float* bias [[buffer(1), function_constant(has)]]) { float b = bias[0]; y[0] = has ? b : 1; }"
    )
    y = floats(1)
    debug.compile(source).kernel("k", constants={0: False})(y, threads=1, threadgroup=1)
    assert y[0] == 1


def test_a_diagonal_matrix_is_made_of_its_own_elements(debug: metalmm.Device) -> None:
    y = floats()
    run(debug, "simdgroup_float8x8 m(3.0f); simdgroup_store(m, y, 8);", floats(), y, threads=32, threadgroup=32)
    np.testing.assert_array_equal(y.reshape(8, 8), 3 * np.eye(8, dtype=np.float32))
