"""What each C++ compiler makes of MSL where C++ would let it do otherwise."""

from __future__ import annotations

import metalmm
import numpy as np
import pytest
from metalmm import manifest
from support.operands import draw
from support.rows import Row

HEAD = "#include <metal_stdlib>\nusing namespace metal;\n"


@pytest.mark.rest(but=2)
@pytest.mark.usefixtures("every_compiler")
def test_each_half_operation_is_rounded() -> None:
    """No a * b + c with one rounding, as the machine's own half arithmetic would have it; vectors too."""
    source = HEAD + "kernel void k(device const half* x, device half* y, uint i [[thread_position_in_grid]])"
    source += "{ y[i] = x[i] * x[i + 1] + x[i + 2]; half4 v = half4(x[i]) * half4(x[i + 1]) + half4(x[i + 2]); y[i + 512] = v.w; }"
    x = np.random.default_rng(8).standard_normal(514).astype(np.float16)
    y = np.zeros(1024, np.float16)
    metalmm.Device("cpu").compile(source).kernel("k")(x, y, grid=8, threadgroup=64)
    np.testing.assert_array_equal(y[:512], x[:512] * x[1:513] + x[2:514])
    np.testing.assert_array_equal(y[512:], y[:512])


INDEXED = {
    "a call in the index": "y[i] = (i % 2 == 0 ? a : b)[min(i, 63u)];",
    "in a loop": "for (uint c = 0; c < 2; c++) if (c == i % 2) y[i] = (c == 0 ? a : b)[min(i, 63u)];",
    "parentheses in parentheses": "y[i] = ((i % 2 == 0 ? a : b))[max(i, 0u)];",
    "returned": "auto f = [&] { return (i % 2 == 0 ? a : b)[min(i, 63u)]; }; y[i] = f();",
    "of a conditional": "y[i] = i < 1000 ? float((i % 2 == 0 ? a : b)[min(i, 63u)]) : 0.0f;",
    "written": "(i < 1000 ? y : z)[min(i, 63u)] = i % 2 == 0 ? a[i] : b[i];",
    "a store behind if": "if (i < 1000) (i < 1000 ? y : z)[min(i, 63u)] = i % 2 == 0 ? a[i] : b[i];",
    "a store behind else": "if (i > 1000) y[i] = 9.0f; else (i < 1000 ? y : z)[min(i, 63u)] = i % 2 == 0 ? a[i] : b[i];",
    "a store behind for": "for (uint j = i; j <= i; j++) (i < 1000 ? y : z)[min(i, 63u)] = i % 2 == 0 ? a[i] : b[i];",
    "a store behind a block": "if (i > 1000) { y[i] = 9.0f; } (i < 1000 ? y : z)[min(i, 63u)] = i % 2 == 0 ? a[i] : b[i];",
    "cast": "y[i] = (int)(i % 2 == 0 ? a : b)[min(i, 63u)];",
    "compared": "y[i] = 1000.0f > (i % 2 == 0 ? a : b)[min(i, 63u)] ? (i % 2 == 0 ? a : b)[min(i, 63u)] : 0.0f;",
    "behind and": "y[i] = i < 1000 and (i % 2 == 0 ? a : b)[min(i, 63u)] >= 0.0f ? (i % 2 == 0 ? a : b)[min(i, 63u)] : -1.0f;",
    "a comma": "uint n = 0; y[i] = (n++, i % 2 == 0 ? a : b)[min(i, 63u)];",
    "a lambda's call": "y[i] = [&](bool c) { return c ? a : b; }(i % 2 == 0 ? true : false)[min(i, 63u)];",
    "a template's call": "y[i] = same_as<float>(i % 2 == 0 ? a : b)[min(i, 63u)];",
    "what braces make": "y[i] = Pick{a, b}(i % 2 == 0 ? 0 : 1)[min(i, 63u)];",
    "vectors": "float4 u(a[i]), v(b[i]); y[i] = (i % 2 == 0 ? u : v)[min(i, 3u)];",
}


@pytest.mark.rest(but=2)
@pytest.mark.usefixtures("every_compiler")
def test_an_indexed_conditional() -> None:
    """g++ takes (c ? p : q)[f(x)] for c ? p[f(x)] : q[f(x)], and computes f's argument in one arm alone: swiglu with a bias was wrong by it.
    Each form is a function of one kernel."""
    more = "template <class T> device const T* same_as(device const T* p) { return p; }\n"
    more += "struct Pick { device const float *a, *b; device const float* operator()(int i) const { return i == 0 ? a : b; } };\n"
    operands = "device float* y, device const float* a, device const float* b, uint i"
    for number, body in enumerate(INDEXED.values()):
        more += f"void form_{number}({operands}) {{ device float* z = y; (void)z; {body} }}\n"
    calls = " ".join(f"form_{number}(y + {64 * number}, a, b, i);" for number in range(len(INDEXED)))
    source = HEAD + more + f"kernel void k({operands} [[thread_position_in_grid]]) {{ {calls} }}"
    a, b, y = np.arange(64, dtype=np.float32), np.arange(100, 164, dtype=np.float32), np.zeros((len(INDEXED), 64), np.float32)
    metalmm.Device("cpu").compile(source).kernel("k")(y, a, b, threads=64, threadgroup=32)
    for form, row in zip(INDEXED, y, strict=True):
        np.testing.assert_array_equal(row, np.where(np.arange(64) % 2 == 0, a, b), err_msg=form)


@pytest.mark.rest(but=1)
@pytest.mark.usefixtures("every_compiler")
def test_two_columns_of_two_matrices() -> None:
    """Of which clang 14 made a switch to another lane the wrong way round (csrc/msl/runtime/fiber.h)."""
    v = manifest.get("gemv_nt/l4_c2_s4_d2_tg128").of("q4_0", "swiglu")
    with metalmm.Device("cpu") as device:
        draw(Row(v, "float16", "nt", "-"), 1, 9, 192).check(device)
