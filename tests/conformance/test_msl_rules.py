"""MSL that Metal refuses and C++ takes: what lowering says of it."""

from __future__ import annotations

import contextlib
import random
from pathlib import Path

import metalmm
import numpy as np
import pytest
from metalmm import compiler
from metalmm.msl.program import Program
from metalmm.msl.targets import cpu
from support.four_threads import HEAD, run
from support.here import REAL_GPU, SEED

REFUSED = [
    (  # a copy of the first that went before is no reason to drop the third
        "inline int f(device int& a) { return a; }\ninline int f(threadgroup int& a) { return a; }\ninline int f(thread int& a) { return a + 100; }\n"
        "kernel void k(device int* o) { int t = 7; o[0] = f(t); }",
        5,
        "'f' differs from its overload at .* in the address space alone, and their bodies differ",
    ),
    (  # one that asks another of a copy of itself is not the same
        "struct Z { int a; int f() const { return a; } int f() device const { return Z(*this).f() + 1; } };\nkernel void k(device Z* z) { z[0].a = z[1].f(); }",
        3,
        "'f' differs from its overload at .* in the address space alone, and their bodies differ",
    ),
    (
        "struct S {\nprivate:\n  int x;\npublic:\n  int f() { static int n = 1; return n; }\n};\nkernel void k(device int* o) { S s; o[0] = s.f(); }",
        7,
        "static",
    ),
    ("struct S { virtual int f() { return 1; } };\nkernel void k(device int* o) { S s; o[0] = s.f(); }", 3, "'virtual' is not part of MSL"),
    ("kernel void k(device int* o) {\n  int* p = new int;\n}", 4, "'new' is not part of MSL"),
    ("kernel void k(device int* o) {\n  int x;\n  delete &x;\n}", 5, "'delete' is not part of MSL"),
    ("kernel void k(device int* o) {\n\n  goto end;\nend:\n  o[0] = 1;\n}", 5, "'goto' is not part of MSL"),
    (
        "struct A { int x; };\nkernel void k(device int* o) {\n  A a;\n  o[0] = dynamic_cast<thread A*>(&a)->x;\n}",
        6,
        "'dynamic_cast' is not part of MSL",
    ),
    ("kernel void k(device int* o) { try { o[0] = 1; } catch (...) {} }", 3, "'try' is not part of MSL"),
    (
        "kernel void k(device int* o [[buffer(0)]], device int* p [[buffer(0)]]) { o[0] = p[0]; }",
        3,
        "two arguments of kernel 'k' at buffer index 0",
    ),
    (
        "constant int A = 1;\nconstant int B = A;\nkernel void k(device int* o [[buffer(A)]], device int* p [[buffer(B)]]) { o[0] = p[0]; }",
        5,
        "two arguments of kernel 'k' at buffer index 1",
    ),
    (
        "kernel void k(device int* o, int i [[thread_position_in_grid]]) { o[i] = 1; }",
        3,
        r"\[\[thread_position_in_grid\]\] is of type int; it takes ushort or uint",
    ),
    ("kernel void k(device int* o, float3 i [[thread_position_in_grid]]) { o[0] = 1; }", 3, r"is of type float3"),
    ("kernel void k(device int* o, uint4 i [[threads_per_grid]]) { o[0] = 1; }", 3, r"is of type uint4"),
    (
        "kernel void k(device int* o, uint3 i [[thread_index_in_threadgroup]]) { o[0] = 1; }",
        3,
        r"is of type uint3; it takes ushort or uint",
    ),
    ("kernel void k(device int* o) {\n  static int n = 0;\n  o[0] = n++;\n}", 4, "a static variable inside a function"),
    ("int f() { static int n; return n++; }\nkernel void k(device int* o) { o[0] = f(); }", 3, "a static variable inside a function"),
    *(
        ("uint n [[thread_position_in_grid]];\n" + other, 3, "at program scope is taken where kernels alone name it; give it to functions")
        for other in (
            "struct S { uint f() { return n; } };\nkernel void k(device int* o) { o[S().f()] = 1; }",
            "uint f() { return n; }\nkernel void k(device int* o) { o[f()] = 1; }",
            "int f(thread int& n) { return n; }\nkernel void k(device int* o) { int i = 0; o[n] = f(i); }",
            "namespace a { constant int n = 5; }\nkernel void k(device int* o) { o[n] = 1; }",
            "namespace a { uint n [[threads_per_grid]]; }\nkernel void k(device int* o) { o[n] = 1; }",
        )
    ),
    ("struct S { device int* o; };\nkernel void k(S s) { s.o[0] = 1; }", 4, "each is an argument of its own here"),
    (
        "template <typename T> kernel void t(device T* o) { o[0] = 1; }\ntemplate <> kernel void t<int>(device int* o) { o[0] = 2; }\n"
        'template [[host_name("k")]] kernel void t<int>(device int*);',
        4,
        "kernel 't' is specialized for what is instantiated",
    ),
    ("int n = 3;\nkernel void k(device int* o) { o[0] = n; }", 3, "the variable 'n' at program scope is not in the constant address space"),
    ("constexpr int n = 3;\nkernel void k(device int* o) { o[0] = n; }", 3, "the variable 'n' at program scope"),
    ("static const float t[2] = {1, 2};\nkernel void k(device int* o) { o[0] = t[0]; }", 3, "the variable 't' at program scope"),
    ("threadgroup float x[4];\nkernel void k(device float* o) { o[0] = x[0]; }", 3, "the threadgroup variable 'x' stands outside a kernel"),
    (
        "struct S {\n  int g() { return 1; };\n  struct T {\n    int f() { static int n; return n++; }\n  };\n};\n"
        "kernel void k(device int* o) { S::T t; o[0] = t.f(); }",
        6,
        "a static variable inside a function",
    ),
    (
        "float f() { threadgroup float x[4]; return x[0]; }\nkernel void k(device float* o) { o[0] = f(); }",
        3,
        "the threadgroup variable 'x' stands outside a kernel",
    ),
]


def test_a_jump_out_of_an_expression_is_none_out_of_a_lambda() -> None:
    """On device cuda, whose compiler refuses the expression then."""
    for jump, lambdas in (("if (x) return;", 0), ("if (x) { x = 2; }", 1)):
        source = HEAD + f"kernel void k(device int* o) {{ int x = o[0]; int y = ({{ {jump} x + 5; }}); o[1] = y; }}"
        text = compiler.preprocess(source, "k.metal", for_metal=True)
        assert cpu.lower(text, "k", {}, name="k.metal", compiler="nvrtc").count("[&]") == lambdas


@pytest.mark.parametrize(("source", "line", "message"), REFUSED)
def test_what_metal_refuses_is_refused_with_its_line(source: str, line: int, message: str, device: metalmm.Device) -> None:
    with pytest.raises(metalmm.LoweringError, match=f"<source>:{line}: .*{message}"):
        device.compile(HEAD + source).kernel("k")


@pytest.mark.usefixtures("each_compiler")
def test_arrays_of_variable_length_are_refused(device: metalmm.Device) -> None:
    with pytest.raises(
        metalmm.CompileError,
        match=r"<source>(:4:\d+|\(4\)): error: .*(variable length array|vla|variable-length|must have a constant value)",
    ):
        device.compile(HEAD + "kernel void k(device int* o, constant int& n) {\n  int x[n];\n  x[0] = 1; o[0] = x[0];\n}").kernel("k")


@pytest.mark.usefixtures("each_compiler")
def test_a_buffer_by_value_is_refused(device: metalmm.Device) -> None:
    with pytest.raises(metalmm.CompileError, match="an argument with a buffer or threadgroup index is a pointer or a reference"):
        device.compile(HEAD + "kernel void k(device int* o [[buffer(0)]], int n [[buffer(1)]]) { o[0] = n; }").kernel("k")


def test_what_gcc_cannot_pack_is_an_error(device: metalmm.Device, each_compiler: str) -> None:
    source = "struct __attribute__((packed)) V { uchar c; packed_float3 p; };\nkernel void k(device int* o) { o[0] = sizeof(V); }"
    if "clang" in each_compiler or REAL_GPU:
        assert run(device, source)[0] == 13
    else:
        with pytest.raises(metalmm.CompileError, match="cannot pack a struct of vectors"):
            run(device, source)


def test_what_is_refused_elsewhere_does_not_spoil_a_kernel(device: metalmm.Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("METALMM_LINT", "0")
    source = "int n = 3;\nint f() { static int m; return m; }\nkernel void bad(device int* o) { o[0] = n + f(); }\nkernel void k(device int* o) { o[0] = 7; }"
    assert run(device, source)[0] == 7


@pytest.mark.usefixtures("each_compiler")
def test_a_quote_in_a_path(tmp_path: Path, device: metalmm.Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("METALMM_LINT", "0")
    folder = tmp_path / 'a "b" \\c'
    folder.mkdir()
    (folder / "x.metal").write_text(
        HEAD + "kernel void k(device int* o) { o[0] = 7; }\nkernel void bad(device int* o) { o[0] = nothing; }\n"
    )
    library = device.compile(folder / "x.metal")
    out = np.zeros(1, np.int32)
    library.kernel("k")(out, grid=1, threadgroup=1)
    assert out[0] == 7
    with pytest.raises(metalmm.CompileError, match=r"nothing"):
        library.kernel("bad")


def test_a_loop_over_a_declaration_that_can_be_stopped() -> None:
    """On device cuda: test_constructs.py runs it on the fake."""

    def lowered(loops: str) -> str:
        text = compiler.preprocess(HEAD + f"kernel void k(device int* y) {{ int i = 3; {loops} }}", "k.metal", for_metal=True)
        return cpu.lower(text, "k", {}, name="k.metal", compiler="clang", stops=True)

    for kind in ("int x", "device int* x"):
        text = lowered(f"while ({kind} = next(y, i--)) {{ y[0] += 1; }} for (i = 4; {kind} = next(y, i); i--) {{ y[1] += 1; }}")
        assert text.count("goes_on()") == text.count("else break;") == 2, kind
    with pytest.raises(metalmm.LoweringError, match="a loop over a declaration whose body has no braces, under a timeout"):
        lowered("while (int x = i--) y[0] += x;")


@pytest.mark.parametrize("text", ["kernel void k(device int* x", "struct S {", "template <", "namespace"])
def test_a_file_that_ends_in_the_middle_is_refused(text: str) -> None:
    with pytest.raises(metalmm.LoweringError, match=r"<source>:2: ('.' is never closed|the file ends in the middle of a declaration)"):
        Program(f"\n{text}", "<source>")


BROKEN = [
    "]]",
    "template",
    "constexpr",
    "constant int c; [[function_constant(0)]];",
    'template [[host_name("\\x")]]',
    "operator",
    ">",
    "(",
    "{",
]


def test_a_broken_text_is_refused_in_words() -> None:
    """By what reads it, or later by a compiler: cut anywhere, and with something put in anywhere."""
    text = compiler.preprocess((Path(__file__).parent / "msl" / "language.metal").read_text()[:4000], "k.metal", for_metal=True)
    draw = random.Random(SEED)
    for _ in range(150):
        at = draw.randrange(len(text))
        for broken in (text[:at], text[:at] + draw.choice(BROKEN) + " " + text[at:]):
            with contextlib.suppress(metalmm.Error):
                for kernel in Program(broken, "<source>").kernel_names()[:1]:
                    cpu.lower(broken, kernel, {}, compiler=draw.choice(["gcc", "clang", "nvrtc"]))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("constant int c; [[function_constant(0)]];", "<source>:2: a function constant has no name"),
        ("constexpr", "<source>:2: the file ends in the middle of a declaration"),
        ('template [[host_name("k")]]', "<source>:2: the file ends in the middle of a declaration"),
        ('template <int N> kernel void f() {}\ntemplate [[host_name("\\x")]] kernel void f<1>();', r'<source>:3: "\\x" is no string'),
        ("template kernel void f>;", "<source>:2: '>' was never opened"),
    ],
)
def test_a_broken_declaration_is_told(text: str, message: str) -> None:
    with pytest.raises(metalmm.LoweringError, match=message):
        cpu.lower(f"kernel void k(device float* y) {{}}\n{text}", "k", {})


@pytest.mark.usefixtures("each_compiler")
def test_a_call_that_nobody_decides_is_told_in_the_compilers_words(device: metalmm.Device) -> None:
    templates = "template <class T> void g(T, float) {}\ntemplate <class T> void g(float, T) {}\n"
    with pytest.raises(
        metalmm.CompileError, match=r"<source>(:5:.*'g.*' is ambiguous|\(5\): error: more than one instance of overloaded function \"g\")"
    ):
        device.compile(HEAD + templates + "kernel void k(device float* f) { g(f[0], f[1]); }\n").kernel("k")
