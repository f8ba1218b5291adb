"""Kernels by name, their instances and overloads, function constants, and the indices of arguments."""

from __future__ import annotations

import warnings
from typing import Any

import metalmm
import numpy as np
import pytest
from support.four_threads import HEAD, by_nvrtc, run

TWICE = """
namespace a { template <int N> kernel void f(device int* o, uint i); }
namespace a { template <int N> [[kernel]] void f(device int* o [[buffer(0)]], uint i [[thread_position_in_grid]]) { o[i] = N; } }
namespace b { template <int N> [[kernel]] void f(device int* o [[buffer(0)]], uint i [[thread_position_in_grid]]) { o[i] = 10 * N; } }
template [[host_name("ka")]] [[kernel]] decltype(a::f<1>) a::f<1>;
template [[host_name("kb")]] [[kernel]] decltype(b::f<1>) b::f<1>;
namespace b { template [[host_name("kc")]] [[kernel]] decltype(f<2>) f<2>; }
namespace a { kernel void plain(device int* o, uint i [[thread_position_in_grid]]) { o[i] = 100; } }
namespace b { kernel void plain(device int* o, uint i [[thread_position_in_grid]]) { o[i] = 200; } }
"""


@pytest.mark.usefixtures("each_compiler")
def test_kernels_of_one_name_in_two_namespaces(device: metalmm.Device) -> None:
    assert [run(device, TWICE, name)[0] for name in ("ka", "kb", "kc", "a::plain", "b::plain")] == [1, 10, 20, 100, 200]
    assert device.compile(HEAD + TWICE).kernel_names == ["a::plain", "b::plain", "ka", "kb", "kc"]


OVERLOADS = """
template <typename T, int W> [[kernel, max_total_threads_per_threadgroup(W * 32)]] void f(device T* o [[buffer(0)]], uint i [[thread_position_in_grid]]) { o[i] = 1; }
template <typename T, typename M, int W> [[kernel, max_total_threads_per_threadgroup(W * 32)]] void f(device T* o [[buffer(0)]], device M* m [[buffer(1)]], uint i [[thread_position_in_grid]]) { o[i] = 2; }
template [[host_name("k1")]] [[kernel]] void f<int, 1>(device int* o, uint i);
template [[host_name("k2")]] [[kernel]] void f<int, float, 2>(device int* o, device float* m, uint i);
"""


@pytest.mark.usefixtures("each_compiler")
def test_overloads_of_a_kernel_template(device: metalmm.Device) -> None:
    assert run(device, OVERLOADS, "k1")[0] == 1
    kernel, out = device.compile(HEAD + OVERLOADS).kernel("k2"), np.zeros(4, np.int32)
    kernel(out, np.zeros(4, np.float32), grid=1, threadgroup=4)
    assert out[0] == 2
    assert kernel.max_total_threads_per_threadgroup == 64


def test_two_kernels_of_one_host_name_are_a_mistake(device: metalmm.Device) -> None:
    source = 'template <int N> [[kernel]] void f(device int* o) { o[0] = N; }\ntemplate [[host_name("k")]] [[kernel]] decltype(f<1>) f<1>;\ntemplate [[host_name("k")]] [[kernel]] decltype(f<2>) f<2>;'
    with pytest.raises(metalmm.CompileError, match=r"2 kernels have the host name 'k': <source>:4, <source>:5"):
        run(device, source)


@pytest.mark.parametrize(
    ("source", "index"),
    [
        ("void g() { int N = 5; }\nconstant int N = 2;", 2),  # a local variable is not it
        ("enum { M = 5 };\nconstant int N = M + 1;", 6),
        ("enum Index { A, B = 4, N };", 5),
        ("namespace other { constant int N = 9; }\nconstant int N = 3;", 3),
        ("#define N (1 << 2)", 4),
        ("constant constexpr uint N = 0x7u;", 7),
    ],
)
def test_which_constant_an_index_is(source: str, index: int, device: metalmm.Device) -> None:
    kernel = device.compile(HEAD + source + "\nkernel void k(device int* o [[buffer(N)]]) { o[0] = 7; }").kernel("k")
    assert kernel.buffer_indices == [index]


def test_an_index_that_only_a_local_variable_gives_is_refused(device: metalmm.Device) -> None:
    with pytest.raises(metalmm.LoweringError, match=r"'N' is not an integer constant expression"):
        device.compile(HEAD + "void g() { int N = 5; }\nkernel void k(device int* o [[buffer(N)]]) { o[0] = 7; }").kernel("k")


@pytest.mark.parametrize("macro", ["SIMDGROUP_MATRIX", "SIMDGROUP", "SIMDGROUP_REDUCTION", "QUADGROUP", "BFLOAT", "INT64", "ATOMIC_FLOAT"])
def test_macros_of_apples_compiler(macro: str, device: metalmm.Device) -> None:
    assert (
        run(device, f"kernel void k(device int* o, uint i [[thread_position_in_grid]]) {{\n#ifdef __HAVE_{macro}__\no[i] = 1;\n#endif\n}}")
        == [1] * 4
    )


CONSTANTS = "constant {kind} n [[function_constant(0)]];\nkernel void k(device float* o) {{ o[0] = float(n); }}"


@pytest.mark.parametrize(
    ("kind", "value", "message"),
    [
        ("int", 2.7, "its type int holds whole numbers"),
        ("bool", 1.5, "its type bool holds whole numbers of 0 to 1"),
        ("bool", 2, "its type bool"),
        ("int", 2**31, "its type int holds whole numbers of -2147483648 to 2147483647"),
        ("int", 7 * 10**10, "its type int"),
        ("uint", -1, "its type uint holds whole numbers of 0 to"),
        ("uchar", 256, "its type uchar holds whole numbers of 0 to 255"),
        ("int", float("nan"), "its type int"),
        ("half", 65510.0, "its type half does not reach that far"),
        ("half", 1e6, "its type half does not reach that far"),
        ("float", 1e39, "its type float does not reach"),
        ("int", "3", "it takes a bool, an int or a float"),
    ],
)
def test_nothing_of_a_function_constant_is_lost(kind: str, value: Any, message: str, device: metalmm.Device) -> None:
    with pytest.raises(metalmm.CompileError, match=f"function constant 'n' is .*{message}"):
        device.compile(HEAD + CONSTANTS.format(kind=kind)).kernel("k", constants={0: value})


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("int", -(2**31)),
        ("int", 3.0),
        ("bool", 1),
        ("bool", np.True_),
        ("uint", 2**32 - 1),
        ("long", -(2**63)),
        ("float", 7),
        ("float", np.float32(1.5)),
        ("float", float("-inf")),
        ("float", float("inf")),
        ("half", 65504.0),
        ("short", np.int64(-5)),
    ],
)
def test_function_constants_arrive(kind: str, value: Any, device: metalmm.Device) -> None:
    out = np.zeros(1, np.float32)
    device.compile(HEAD + CONSTANTS.format(kind=kind)).kernel("k", constants={0: value})(out, grid=1, threadgroup=1)
    assert out[0] == np.float32(value)


def test_a_constant_given_twice_and_constants_that_are_missing(device: metalmm.Device) -> None:
    library = device.compile(
        HEAD
        + "constant int a [[function_constant(0)]]; constant int b [[function_constant(5)]];\nkernel void k(device int* o) { o[0] = a + b; }"
    )
    with pytest.raises(metalmm.CompileError, match=r"constants: 0 and 'a' are one function constant; give it once"):
        library.kernel("k", constants={0: 1, "a": 2, "b": 3})
    with pytest.raises(
        metalmm.LoweringError,
        match=r"function constants 'a' \(index 0\), 'b' \(index 5\) are used and not given; pass constants=\{0: …, 5: …\}",
    ):
        library.kernel("k")


def test_an_index_that_a_kernel_does_not_have(device: metalmm.Device) -> None:
    kernel = device.compile(HEAD + "kernel void k(device int* o [[buffer(2)]]) { o[0] = 7; }").kernel("k")
    with pytest.raises(metalmm.KernelError, match=r"kernel 'k': it has no argument at buffer index 7; it has the buffer indices 2"):
        kernel({2: np.zeros(1, np.int32), 7: np.zeros(1, np.int32)}, grid=1, threadgroup=1)


def test_a_type_by_default_names_no_other(device: metalmm.Device) -> None:
    """Of `typename M = float` the parameter is M: what an instance gives it was taken for what float means."""
    source = (
        "template <typename T, typename M = float>\nkernel void f(device T* o, constant float& x [[buffer(1)]], uint i [[thread_position_in_grid]])"
        ' { o[i] = T(x * 8) + sizeof(M); }\ntemplate [[host_name("k")]] kernel void f<int, bool>(device int*, constant float&, uint);'
    )
    out = np.zeros(4, np.int32)
    device.compile(HEAD + source).kernel("k")(out, 0.125, grid=1, threadgroup=4)
    assert out.tolist() == [2] * 4


AT = "uint3 at [[thread_position_in_grid]];\n"
POSITIONS = {
    "a kernel": (AT + "kernel void k(device int* o) { o[at.x] = 10 + at.x; }", [10, 11, 12, 13]),
    "two, and another kernel that has none": (
        AT + "const ushort lane [[thread_index_in_simdgroup]];\nkernel void other(device int* o) { o[0] = 1; }\n"
        "kernel void k(device int* o [[buffer(0)]]) { o[at.x] = 10 * at.x + lane; }",
        [0, 11, 22, 33],
    ),
    "an instance by its signature": (
        AT
        + 'template <typename T> kernel void t(device T* o) { o[at.x] = T(at.x * 2); }\ntemplate [[host_name("k")]] kernel void t<int>(device int*);',
        [0, 2, 4, 6],
    ),
    "an instance by its type": (
        AT
        + 'template <typename T> kernel void t(device T* o) { o[at.x] = T(at.x * 2); }\ntemplate [[host_name("k")]] kernel decltype(t<int>) t<int>;',
        [0, 2, 4, 6],
    ),
    "names that hide it, and members": (
        AT
        + "struct S { int x; };\nint h(int at) { return at; }\nkernel void other(device int* o, uint at [[threads_per_grid]]) { o[at] = 1; }\n"
        "kernel void k(device int* o) { S s = {int(at.x)}; { uint at = 7; o[s.x] = 100 * at + 10 * h(2); } o[s.x] += at.x; }",
        [720, 721, 722, 723],
    ),
}


@pytest.mark.parametrize("name", POSITIONS)
@pytest.mark.usefixtures("each_compiler")
def test_positions_at_program_scope(device: metalmm.Device, name: str) -> None:
    source, expected = POSITIONS[name]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the lint's
        assert run(device, source) == expected
    by_nvrtc(HEAD + source)
