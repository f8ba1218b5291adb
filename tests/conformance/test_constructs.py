"""Constructs that kernels of other projects use, in our words: MLX, ggml and PyTorch compile by them."""

from __future__ import annotations

import itertools
import operator

import metalmm
import numpy as np
import pytest

HEAD = "#include <metal_stdlib>\nusing namespace metal;\n"
COMPARISONS = {"==": operator.eq, "!=": operator.ne, "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}
TYPES = ("bfloat", "half", "float", "int", "uint", "short", "uchar", "bool", "long")


@pytest.mark.usefixtures("each_compiler")
def test_comparisons_of_bfloat(device: metalmm.Device) -> None:
    """Each with each type of number on either side, and vectors: a bfloat holds what a comparison of floats says."""
    cases = list(itertools.product(COMPARISONS, TYPES, (True, False)))
    body, expected = "", []
    for i, (op, kind, is_first) in enumerate(cases):
        left, right = f"bfloat(x[{i} % 3])", f"{kind}(x[{i} % 2])"
        values = float(i % 3), float(i % 2)
        if not is_first:
            left, right, values = right, left, values[::-1]
        body += f"y[{i}] = ({left}) {op} ({right});\n"
        expected.append(COMPARISONS[op](*values))
    body += f"y[{len(cases) + 1}] = bfloat(256.0f) == 257 && bfloat(256.0f) < 257.0f;\n"
    body += f"bfloat4 v(x[0], x[1], x[2], x[0]); bool4 b = v < bfloat4(x[1]); y[{len(cases)}] = b.x && !b.y && !b.z && b.w;\n"
    source = HEAD + f"kernel void k(device uint* y [[buffer(0)]], constant float* x [[buffer(1)]]) {{ {body} }}"
    x, y = np.arange(3, dtype=np.float32), np.full(len(cases) + 2, 7, np.uint32)
    device.compile(source).kernel("k")(y, x, grid=1, threadgroup=1)
    np.testing.assert_array_equal(y, [*expected, 1, 1])


@pytest.mark.usefixtures("each_compiler")
def test_an_anonymous_union_behind_extension(device: metalmm.Device) -> None:
    source = HEAD + (
        "struct Q { __extension__ union { struct { half d; half m; }; half2 dm; }; uchar q[4]; };\n"
        "kernel void k(device float* y) { Q q; q.dm = half2(1.5h, 2.5h); y[0] = float(q.d) + 10 * float(q.m) + 100 * sizeof(Q); }"
    )
    y = np.zeros(1, np.float32)
    device.compile(source).kernel("k")(y, grid=1, threadgroup=1)
    assert y[0] == 1.5 + 25 + 800
