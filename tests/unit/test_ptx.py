"""What debug mode of device cuda makes of PTX: each access to memory is looked at first, and says where in the kernel's text it stands."""

from __future__ import annotations

import re

import pytest
from metalmm import ptx

HEAD = """\
//
.version 9.5
.target sm_90
.address_size 64

.global .align 4 .b8 lut[20] = {0, 0, 128, 63};
.global .align 4 .u32 unused = 3;
.global .align 8 .b8 metalmm_watch[4144];
.visible .entry metalmm_kernel(
	.param .align 16 .b8 metalmm_kernel_param_0[144]
)
{
	.loc	1 4 0
	mov.u64 	%rd40, lut;
"""
TAIL = """\
	ret;
}
	.file	1 "/runtime/cuda/kernel.h"
	.file	2 "own.metal"
	.file	3 "/runtime/types.h"
	.section	.debug_str
	{
$L__info_string0:
.b8 95,90
	}
"""


def watched(*lines: str) -> str:
    text = HEAD + "".join(f"\t{line}\n" for line in lines) + TAIL
    return ptx.watched(text.encode() + b"\0", "/runtime", 90).decode()


@pytest.mark.parametrize(
    ("instruction", "size", "kind", "address"),
    [
        ("ld.global.u32 \t%r1, [%rd5];", 4, 0, "add.s64 \t%mm_at, %rd5, 0;"),
        ("ld.global.nc.v4.f32 \t{%f1, %f2, %f3, %f4}, [%rd5+-16];", 16, 0, "add.s64 \t%mm_at, %rd5, -16;"),
        ("ld.volatile.u64 \t%rd1, [%rd5+8];", 8, 0, "add.s64 \t%mm_at, %rd5, 8;"),
        ("st.global.v2.b16 \t[%rd5+2], {%rs1, %rs2};", 4, 1, "add.s64 \t%mm_at, %rd5, 2;"),
        ("st.u8 \t[%rd5], %rs1;", 1, 1, "add.s64 \t%mm_at, %rd5, 0;"),
        ("atom.global.add.f32 \t%f1, [%rd5], %f2;", 4, 2, "add.s64 \t%mm_at, %rd5, 0;"),
        ("atom.relaxed.gpu.global.cas.b64 \t%rd1, [%rd5], %rd2, %rd3;", 8, 2, "add.s64 \t%mm_at, %rd5, 0;"),
        ("red.global.add.noftz.f16x2 \t[%rd5+4], %r1;", 4, 2, "add.s64 \t%mm_at, %rd5, 4;"),
        ("ld.shared.v4.u32 \t{%r1, %r2, %r3, %r4}, [%r5+32];", 16, 4, "cvt.u64.u32 \t%mm_at, %r5;\n\tadd.s64 \t%mm_at, %mm_at, 32;"),
        ("st.shared.b16 \t[%r5], %rs1;", 2, 5, "cvt.u64.u32 \t%mm_at, %r5;"),
        ("ld.global.u32 \t%r1, [lut+4];", 4, 0, "mov.u64 \t%mm_at, lut;\n\tadd.s64 \t%mm_at, %mm_at, 4;"),
        ("st.shared.u32 \t[tile+280000], %r1;", 4, 5, "mov.u64 \t%mm_at, tile;\n\tadd.s64 \t%mm_at, %mm_at, 280000;"),
        ("cp.async.cg.shared.global [%r1], [%rd5], 16;", 16, 0, "add.s64 \t%mm_at, %rd5, 0;"),
        ("cp.async.cg.shared.global [%r1], [%rd5], 16, %r2;", 16, 0, "setp.eq.u32 \t%mm_may, %r2, 0;"),
        ("@%p3 ld.global.u16 \t%rs1, [%rd5];", 2, 0, "@!%p3 bra $mm_skip"),
        ("@!%p3 st.global.u16 \t[%rd5], %rs1;", 2, 1, "@%p3 bra $mm_skip"),
    ],
)
def test_an_access_is_looked_at(instruction: str, size: int, kind: int, address: str) -> None:
    text = watched(instruction)
    assert f"[metalmm_watch+4104], {size | kind << 8};" in text and address in text
    assert f"and.b64 \t%mm_x, %mm_at, {size - 1};" in text
    bare = re.sub(r"^@!?%p3 ", "", instruction)
    assert f"@%mm_may {bare}" in text and text.count(bare) == 1


@pytest.mark.parametrize(
    "instruction",
    [
        "ld.param.v2.u32 \t{%r1, %r2}, [%rd10+80];",
        "ld.const.u32 \t%r1, [%rd5];",
        "ld.local.u32 \t%r1, [%rd5];",
        "ldmatrix.sync.aligned.m8n8.x4.shared.b16 \t{%r1, %r2, %r3, %r4}, [%r5];",
        "cp.async.commit_group;",
        "cp.async.bulk.prefetch.L2.global [%rd5], %r1;",
        "shared_thing \t%r1, [%rd5];",
    ],
)
def test_what_cannot_go_wrong_is_left_as_it_is(instruction: str) -> None:
    assert f"\t{instruction}\n" in watched(instruction)


def test_where_an_access_stands() -> None:
    """In the kernel's text, even where a header of the runtime has the instruction; of two calls of one function the one before it."""
    load = "ld.global.u32 \t%r1, [%rd5];"
    text = watched(
        ".loc\t2 7 3",
        load,
        ".loc\t3 90 1, function_name $L__info_string0, inlined_at 2 8 5",
        load,
        ".loc\t2 30 2, function_name $L__info_string0, inlined_at 2 9 5",
        ".loc\t3 91 1, function_name $L__info_string0, inlined_at 2 30 2",
        ".loc\t3 92 1, function_name $L__info_string0, inlined_at 3 91 1",
        load,
        ".loc\t1 4 0",
        load,
    )
    sites = [int(n) for n in re.findall(r"\[metalmm_watch\+4108\], (\d+);", text)]
    assert [(n >> 20, n & (1 << 20) - 1) for n in sites] == [(1, 7), (1, 8), (1, 30), (0, 4)]
    files = re.search(r"metalmm_files\[(\d+)\] = \{([^}]*)\};", text)
    assert files and bytes(map(int, files[2].split(","))) == b"/runtime/cuda/kernel.h\nown.metal\n/runtime/types.h\0"
    assert int(files[1]) == len(files[2].split(","))
    assert "metalmm_own[2] = {generic(lut), 20};" in text  # of what it uses
    assert not re.search(r"\.loc|\.file|\.section|info_string", text) and text.startswith(".version 8.0\n") and text.count(".version") == 1


def test_a_driver_takes_no_newer_version_than_its_gpu_asks_for() -> None:
    assert ptx.watched((HEAD + TAIL).encode(), "/runtime", 120).startswith(b".version 8.8\n")
    assert b"metalmm_own[1] = {0};" in ptx.watched((HEAD.replace("mov.u64 \t%rd40, lut;", "") + TAIL).encode(), "/runtime", 90)
