"""metalmm lint: mistakes that Apple's compiler refuses are found, and right kernels are not accused."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import metalmm
import pytest
from metalmm import cache, cli, lint_command
from metalmm.msl import lint
from support.here import ALL_OF_IT, ROOT
from support.rows import What

if not lint.available():
    assert not os.environ.get("CI"), "CI checks the kernels as MSL: libclang must be there"
    pytest.skip("libclang is not installed", allow_module_level=True)

HEAD = "#include <metal_stdlib>\nusing namespace metal;\n"
ARGUMENTS = "const device half* A [[buffer(0)]], device float* D [[buffer(1)]], constant uint& n [[buffer(2)]], uint tid [[thread_index_in_threadgroup]]"


def kernel(body: str, before: str = "", arguments: str = ARGUMENTS, head: str = "kernel void") -> str:
    return f"{HEAD}{before}\n{head} k({arguments}) {{ {body} }}\n"


D0 = "device float* D [[buffer(0)]]"
MISTAKES = {
    # address spaces
    "threadgroup memory to a device parameter": (kernel("threadgroup float t[4]; t[0] = 1; f(t);", "void f(device float* p) { p[0] = 1; }"), "no matching function for call to 'f'"),
    "device memory to a thread parameter": (kernel("D[1] = f(D);", "float f(thread float* p) { return p[0]; }"), "no matching function for call to 'f'"),
    "a cast between them": (kernel("threadgroup float* t = (threadgroup float*)D; t[0] = 1;"), "C-style cast from 'device float *' to 'threadgroup float *'"),
    "a pointer parameter of none": (kernel("float x = 1; D[0] = f(&x);", "float f(float* p) { return *p; }"), "must have an address space"),
    "a reference parameter of none": (kernel("float x = 1; f(x); D[0] = x;", "void f(float& p) { p = 2; }"), "reference type must have an address space"),
    "a local pointer of none": (kernel("float x[2] = {1, 2}; float* p = x; D[0] = p[1];"), "'p' is float *"),
    "a template's pointer of none": (kernel("float x = 1; D[0] = f(&x);", "template <class T> T f(T* p) { return *p; }"), "must have an address space"),
    "auto& of none": (kernel("float x[2] = {1, 2}; auto& y = x[0]; D[0] = y;"), "an auto pointer or reference"),
    "a result of none": (kernel("float x[1] = {1}; D[0] = *f(x);", "float* f(thread float* p) { return p; }"), "the result of 'f'"),
    "writing to constant": (kernel("c[0] = 1; D[0] = c[0];", arguments=f"constant float* c [[buffer(1)]], {D0}"), "read-only variable is not assignable"),
    "writing through const": (kernel("A[0] = 1;"), "read-only variable is not assignable"),
    "a method for thread on a device object": (kernel("D[0] = s->get();", "struct S { float x; float get() { return x; } };", f"device S* s [[buffer(1)]], {D0}"), "cannot initialize object parameter of type 'thread S' with an expression of type 'device S'"),
    "atomics in thread memory": (kernel("atomic_uint c; atomic_fetch_add_explicit(&c, 1u, memory_order_relaxed); D[0] = 1;"), "no matching function"),
    "atomics on a plain number": (kernel("atomic_fetch_add_explicit(c, 1u, memory_order_relaxed);", arguments="device uint* c [[buffer(0)]]"), "no matching function"),
    "the address of a vector's element": (kernel("float4 f = float4(1); thread float* p = &f.x; D[0] = *p;"), "address of vector element"),
    "a reference to a vector's element": (kernel("float4 f = float4(1); g(f.x); D[0] = f.x;", "void g(thread float& x) { x = 2; }"), "cannot bind to vector element"),
    "threadgroup memory in a function": (kernel("f(D);", "void f(device float* d) { threadgroup float t[4]; t[0] = 1; d[0] = t[0]; }"), "cannot be declared in local address space"),
    "a global that is not constant": (kernel("D[0] = table[0];", "const float table[2] = {1, 2};"), "constant address space"),
    # vectors and overloads
    "half4 for float4": (kernel("half4 h = half4(1); float4 f = h; D[0] = f.x;"), "cannot initialize a variable"),
    "half4 times float4": (kernel("half4 h = half4(1); float4 f = float4(2); D[0] = (f * h).x;"), "implicit conversions between vector types"),
    "bfloat4 for half4": (kernel("bfloat4 b = bfloat4(1); half4 h = b; D[0] = float(h.x);"), "cannot initialize"),
    "float4 of three": (kernel("float4 f = float4(1, 2, 3); D[0] = f.x;"), "as many components as the vector has"),
    "a component past the end": (kernel("float3 f = float3(1, 2, 3); D[0] = f.w;"), "vector component access exceeds"),
    "min of int and uint": (kernel("D[0] = min(3, n);"), "call to 'min' is ambiguous"),
    "max of float and half": (kernel("D[0] = max(1.0f, A[0]);"), "call to 'max' is ambiguous"),
    "an if of a vector": (kernel("float4 f = float4(1); if (f > 0.0f) D[0] = 1;"), "value of type"),
    "as_type of another size": (kernel("D[0] = as_type<float>(A[0]);"), "as_type between types of different sizes"),
    "simd_sum of a structure": (kernel("S s; s.x = 1; D[0] = simd_sum(s).x;", "struct S { float x; };"), "no matching function for call to 'simd_sum'"),
    "matrices of 16": (kernel("simdgroup_matrix<float, 16, 16> m; D[0] = 1;"), "simdgroup matrices are 8 x 8"),
    "half into a float matrix": (kernel("simdgroup_float8x8 m; simdgroup_load(m, A, 8); simdgroup_store(m, D, 8);"), "no matching function for call to 'simdgroup_load'"),
    "void as a value": (kernel("int x = threadgroup_barrier(mem_flags::mem_threadgroup); D[0] = x;"), "cannot initialize"),
    # the language
    "a static local": (kernel("static int x = 0; x++; D[0] = x;"), "static local"),
    "recursion": (kernel("D[0] = f(n);", "int f(int n) { return n ? n * f(n - 1) : 1; }"), "recursion: 'f'"),
    "recursion of two": (kernel("D[0] = f(n);", "int g(int);\nint f(int n) { return n ? g(n - 1) : 1; }\nint g(int n) { return n ? f(n - 1) : 2; }"), "recursion"),
    "virtual": (kernel("S s; D[0] = s.f();", "struct S { virtual int f() { return 1; } };"), "virtual functions"),
    "exceptions": (kernel("try { D[0] = 1; } catch (...) { }"), "exceptions"),
    "new": (kernel("thread int* p = new int(3); D[0] = *p;"), "operator new"),
    "double": (kernel("double x = 1.0; D[0] = x;"), "double: 'double'"),
    "goto": (kernel("int i = 0; again: i++; if (i < 3) goto again; D[0] = i;"), "goto"),
    "a pointer to a function": (kernel("int (*p)(int) = f; D[0] = p(1);", "int f(int n) { return n; }"), "function pointer"),
    "dynamic_cast": (kernel("B b; D[0] = dynamic_cast<thread B*>(&b) != nullptr;", "struct B { int x; };"), "run-time type information"),
    "an array of a length found at run time": (kernel("float x[n]; x[0] = 1; D[0] = x[0];"), "array size is not a constant expression"),
    "a variadic function": (kernel("D[0] = f(1, 2);", "int f(int n, ...) { return n; }"), "variadic"),
    "printf": (kernel('printf("%d", 1); D[0] = 1;'), "printf"),
    "std": (kernel("D[0] = std::max(1, 2);"), "undeclared identifier 'std'"),
    "a function constant as a template's argument": (kernel("D[0] = f<big>();", "constant int big [[function_constant(0)]];\ntemplate <int N> int f() { return N; }"), "no matching function for call to 'f'"),
    "a function constant as a length": (kernel("float x[big]; x[0] = 1; D[0] = x[0];", "constant int big [[function_constant(0)]];"), "array size is not a constant expression"),
    "no using namespace, simd_sum": (kernel("D[0] = simd_sum(1.0f);").replace("using namespace metal;\n", ""), "undeclared identifier 'simd_sum'"),
    "no using namespace, a type": (kernel("simdgroup_float8x8 m; D[0] = 1;").replace("using namespace metal;\n", ""), "simdgroup_float8x8"),
    # kernels
    "a kernel that returns": (kernel("return 1;", head="kernel int"), "a kernel returns void, not int"),
    "an unknown attribute": (kernel("D[0] = t;", arguments=f"{D0}, uint t [[thread_index_in_treadgroup]]"), "unknown attribute [[thread_index_in_treadgroup]]"),
    "two buffers at one index": (kernel("D[0] = E[0];", arguments=f"{D0}, device float* E [[buffer(0)]]"), "two arguments at [[buffer(0)]]"),
    "buffer 31": (kernel("D[0] = 1;", arguments="device float* D [[buffer(31)]]"), "indices go from 0 to 30"),
    "a number without attribute": (kernel("D[0] = n;", arguments=f"{D0}, uint n"), "'uint n' has no attribute"),
    "a position of float": (kernel("D[0] = g;", arguments=f"{D0}, float g [[thread_position_in_grid]]"), "[[thread_position_in_grid]] of type float"),
    "a buffer in threadgroup": (kernel("D[0] = t[0];", arguments=f"{D0}, threadgroup float* t [[buffer(1)]]"), "a buffer is in device or constant"),
    "delete": (kernel("thread int* p = nullptr; delete p; D[0] = 1;"), "operator delete"),
    "thread_local": (kernel("D[0] = x;", "thread_local int x = 1;"), "thread_local: 'thread_local'"),
    "assembly": (kernel('asm("nop"); D[0] = 1;'), "inline assembly"),
    "coroutines": (kernel("co_return;"), "coroutines"),
    "concepts": (kernel("D[0] = f(1);", "template <class T> requires true T f(T x) { return x; }"), "C++20"),
    "two kernels of one name": (HEAD+'[[host_name("k")]] kernel void k1(device float* D [[buffer(0)]]) { D[0] = 1; }\n[[host_name("k")]] kernel void k2(device float* D [[buffer(0)]]) { D[0] = 2; }\n', "two kernels are called k"),
    "an unknown attribute of a kernel": (kernel("D[0] = 1;", head="[[kernel, max_threads(4)]] void"), "unknown attribute [[max_threads]] of a kernel"),
    "a number at a buffer": (kernel("D[0] = m;", arguments=f"{D0}, uint m [[buffer(1)]]"), "neither pointer nor reference"),
    "threadgroup index on device": (kernel("D[0] = t[0];", arguments=f"{D0}, device float* t [[threadgroup(0)]]"), "not in threadgroup memory"),
    "a lane of two numbers": (kernel("D[0] = t.x;", arguments=f"{D0}, uint2 t [[thread_index_in_simdgroup]]"), "[[thread_index_in_simdgroup]] of type uint2"),
    "an array of pointers": (kernel("float x = 1; float* p[2] = {&x, &x}; D[0] = *p[0];"), "pointer type must have an address space: 'p'"),
    "a pointer to a pointer of none": (kernel("float* thread* p = nullptr; D[0] = p ? 1 : 0;"), "pointer type must have an address space: 'p'"),
    "a member of none": (kernel("S s; D[0] = s.p ? 1 : 0;", "struct S { float* p; };"), "'p' is float *"),
    "a cast to none": (kernel("float x = 1; D[0] = *(float*)&x;"), "must have an address space"),
    "an alias of none": (kernel("D[0] = 1;", "typedef float* P;"), "'P' is float *"),
    "a method's result of none": (kernel("D[0] = 1;", "struct S { float x; float* get() thread { return nullptr; } };"), "the result of 'get'"),
    "no return": (kernel("D[0] = f(1);", "int f(int n) { }"), "non-void function"),
    "a bracket that is not closed": (HEAD+"kernel void k(device float* D [[buffer(0)]]) { D[0] = (1; }\n", ""),
    "a sum of bools": (kernel("D[0] = simd_sum(n > 3) ? 1 : 0;"), "no matching function for call to 'simd_sum'"),
    "a sum of 64 bits": (kernel("D[0] = simd_sum(long(n));"), "no matching function for call to 'simd_sum'"),
    "dot of whole numbers": (kernel("int4 v = int4(1); D[0] = dot(v, v);"), "dot"),
    "an order of atomics that MSL has not": (kernel("atomic_fetch_add_explicit(c, 1u, memory_order_seq_cst);", arguments="device atomic_uint* c [[buffer(0)]]"), "order"),
    "long long": (kernel("long long x = 1; D[0] = x;"), "long long"),
    "a vector of two in place of a matrix's elements": (HEAD + "#include <metal_simdgroup_matrix>\nkernel void k(device float* D [[buffer(0)]]) { simdgroup_float8x8 m(1.0f); m.thread_elements() = float2(1, 2); D[0] = 1; }", "incompatible type"),
    "a vector as a condition": (kernel("float4 v = float4(1); v = (v > 0) ? v : -v; D[0] = v.x;"), "the first operand of ?: must be a scalar"),
}  # fmt: skip
RIGHT = {
    "all kinds of memory": kernel("threadgroup float t[32]; t[tid] = float(A[tid]); threadgroup_barrier(mem_flags::mem_threadgroup); D[tid] = t[31 - tid] * float4(1.0, 2, 3, 4).x;"),
    "a literal without suffix": kernel("float x = 1.0 * 2.5; D[0] = x;"),
    "methods": kernel("thread S s; D[0] = s.get() + d->get();", "struct S { float x; float get() const thread { return x; } float get() const device { return x; } };", f"device S* d [[buffer(1)]], {D0}"),
    "vectors of vectors": kernel("float4 v = float4(float2(1, 2), 3, 4); half4 h = half4(v); v = float4(h) * 2.0f + v.wzyx; D[0] = v.x + float3(h.xyz).y;"),
    "matrices": kernel("float4x4 a = float4x4(1.0f), b = a; a = a + b - b; a[1][2] += 1; D[0] = (a * float4(1)).x;"),
    "templates with threadgroup memory": HEAD + "template <typename T, int N> [[kernel]] void k(device T* D [[buffer(0)]], uint i [[thread_index_in_threadgroup]]) { threadgroup T t[N]; t[i] = D[i]; D[i] = t[N - 1 - i]; }\ntemplate [[host_name(\"k8\")]] [[kernel]] void k<half, 8>(device half*, uint);",
    "simdgroup matrices": HEAD + "#include <metal_simdgroup_matrix>\nkernel void k(const device half* A [[buffer(0)]], device half* D [[buffer(1)]]) { simdgroup_half8x8 a, b, c = make_filled_simdgroup_matrix<half, 8>(0.0h); simdgroup_load(a, A, 8); simdgroup_load(b, A + 64, 8, ulong2(0, 0), true); simdgroup_multiply_accumulate(c, a, b, c); c.thread_elements()[0] = 0; simdgroup_store(c, D, 8); }",
    "atomics": kernel("atomic_fetch_add_explicit(&c[0], 1u, memory_order_relaxed); threadgroup atomic_int t; atomic_store_explicit(&t, 0, memory_order_relaxed); D[0] = 1;", arguments=f"device atomic_uint* c [[buffer(1)]], {D0}"),
    "function constants": kernel("D[0] = on ? scale : 1.0f; if (is_function_constant_defined(scale)) D[1] = 0;", "constant bool on [[function_constant(0)]];\nconstant float scale [[function_constant(1)]];"),
    "a function as a template's argument": HEAD + "template <typename T> void load(const device half* x, short i, thread T& to) { to = T(x[i]); }\ntemplate <short N, void (*f)(const device half*, short, thread float4&)> kernel void k(const device half* x [[buffer(0)]], device float* y [[buffer(1)]]) { float4 t; f(x, N, t); y[0] = t.x; }\ntypedef decltype(k<1, load>) k_t;\ntemplate [[host_name(\"k2\")]] kernel k_t k<2, load>;",
    "a vector behind a comparison": kernel("ushort a = ushort(A[0]); bool b = a > ushort2(a, 2).x, c = (a < 3) == (a > ushort2(a, a).y); D[0] = b + c;"),
    "numbers beside vectors": kernel("float4 v = fmax(0, float4(1, 2, 3, 4)) + max(0.5f, float4(1)); half3 h = clamp(half3(2), 0, 1); D[0] = v.x + h.x;"),
    "a vector made of variables, and a function declared before": kernel("float x = 1; float y = x; float4 v(x, y, x, y); D[0] = f(v).x;", "float4 f(float4 a);\nfloat4 f(float4 a) { return a; }"),
    "arrays as parameters": kernel("float x[2] = {1, 2}; D[0] = f(x);", "float f(float x[2]) { return x[1]; }"),
    "textures of another kernel": HEAD + "kernel void t(texture2d<float, access::read_write> x [[texture(0)]], sampler s [[sampler(0)]], uint2 i [[thread_position_in_grid]]) { constexpr sampler c(filter::linear); x.write(x.read(i) * 2.0f, i); }",
    "what MLX's bfloat needs": HEAD + "namespace metal { bfloat max(bfloat a, bfloat b) { return a < b ? b : a; } }\nkernel void k(device bfloat* y [[buffer(0)]]) { y[0] = metal::max(y[1], y[2]); }",
    "names that OpenCL keeps": kernel("float local = 1, global = 2, generic = 3; D[0] = local + global + generic;"),
    "a deleted member": kernel("S s; s.x = 1; D[0] = s.x;", "struct S { float x; void f() = delete; };"),
    "two arguments that function constants choose from": kernel("D[0] = a ? E[0] : 1.0f;", "constant bool a [[function_constant(0)]];\nconstant bool b [[function_constant(1)]];", f"{D0}, device float* E [[buffer(1), function_constant(a)]], device half* F [[buffer(1), function_constant(b)]]"),
    "a pointer without attribute": HEAD+"kernel void k(device float* D, constant uint& n) { D[0] = n; }\n",
    "a vector times a scalar of more bits": kernel("half4 h = half4(1); float s = 2; h = h * s; D[0] = h.x;"),
    "a temporary for const thread&": kernel("D[0] = f(float4(1));", "float f(const thread float4& v) { return v.x; }"),
    "a list for a vector": kernel("D[0] = f({1, 2, 3, 4});", "float f(float4 v) { return v.x; }"),
    "a structure copied from constant": kernel("S t = s; D[0] = t.x;", "struct S { float x; };", f"{D0}, constant S& s [[buffer(1)]]"),
    "coherent": HEAD+"kernel void k(coherent(device) device float* D [[buffer(0)]]) { D[0] = 1; }\n",
    "a cast as in C": kernel("float4 v = (float4)half4(1); D[0] = v.x;"),
    "metal::as_type": kernel("D[0] = metal::as_type<float>(n);"),
    "a constructor for thread": kernel("S s(1.0f); D[0] = s.x;", "struct S { float x; S(float y) thread : x(y) {} };"),
    "a static member function": kernel("D[0] = S::f();", "struct S { static float f() { return 1; } };"),
    "a friend": kernel("S s; s.x = 1; D[0] = g(s);", "struct S { float x; friend float g(S s) { return s.x; } };"),
    "threadgroup memory with a value": kernel("threadgroup float t[2] = {0, 0}; t[0] = 1; D[0] = t[0];"),
    "a typedef of a vector": kernel("V t = V(1, 2, 3, 4); D[0] = t.x;", "typedef float4 V;"),
    "a parameter named as a structure": kernel("S s = S(1); D[0] = s.x;", "template <class S> float f(S x) { return 1; }\nstruct S { float x; S(float y) : x(y) {} };"),
    "temporaries for const thread& in operators": kernel("S a{1}; S b = a - mk(); a += mk(); D[0] = b.x + a.x;", "struct S { float x; S operator-(const thread S& o) const thread { return S{x - o.x}; } thread S& operator+=(const thread S& o) thread { x += o.x; return *this; } };\nS mk() { return S{2}; }"),
    "packed vectors in expressions": kernel("D[0] = (p[0] * 2.0f + p[1]).x + dot(p[0], p[1]);", arguments=f"const device packed_float3* p [[buffer(1)]], {D0}"),
    "select by a scalar and by a vector": kernel("float4 v = select(float4(1), float4(2), n > 3u); v = select(v, float4(0), isnan(v)); D[0] = v.x;"),
    "an attribute of a parameter": kernel("D[0] = f(1, 2);", "float f([[maybe_unused]] float x, float y) { return y; }"),
    "half to bfloat": kernel("D[0] = float(bfloat(A[0])) + float(half(bfloat(1.0f)));"),
    "metal::atomic_int": kernel("atomic_store_explicit(c, 1, memory_order_relaxed);", arguments="device metal::atomic_int* c [[buffer(0)]]"),
}  # fmt: skip


@pytest.mark.parametrize("what", MISTAKES)
def test_a_mistake_is_found_where_it_stands(what: str) -> None:
    text, message = MISTAKES[what]
    found = lint.check(text, "seed.metal")
    assert any(message in f.text for f in found), found
    assert all(re.fullmatch(r"seed\.metal:\d+", f.place) for f in found), found
    assert max(int(f.place.split(":")[1]) for f in found) <= text.count("\n") + 1


@pytest.mark.parametrize("what", RIGHT)
def test_what_is_right_is_not_accused(what: str) -> None:
    assert lint.check(RIGHT[what], "right.metal") == []


KINDS = [kind for v in metalmm.variants() if v.kernel and (not v.devices or "metal" in v.devices) for kind in v.kinds()]
CHOSEN = KINDS if ALL_OF_IT else list({What.of(kind): kind for kind in KINDS}.values())  # numbers of one kernel change little
SOURCES = sorted({kind.source for kind in KINDS})


@pytest.mark.rest(but=4)
@pytest.mark.parametrize("source", SOURCES, ids=lambda p: p.name)
def test_instances_of_every_kernel_are_msl(source: Path) -> None:
    ((count, found),) = lint_command.check_instances([kind for kind in CHOSEN if kind.source == source]).values()
    assert count >= 2 and found == []


OTHER = {"device": "threadgroup", "threadgroup": "device", "constant": "device", "thread": "device"}


def address_spaces(text: str) -> Iterator[tuple[str, int, str]]:
    """The text with one address space changed or taken away, its line, and the space."""
    code = re.sub(r"//[^\n]*", lambda m: " " * len(m[0]), text)
    for m in re.finditer(r"\b(device|threadgroup|constant|thread)\b(?!_)", code):
        declares = re.match(r"threadgroup [\w<> ]+\w(\[[^;]*\])+;", code[m.start() :])  # without it, an array of the thread's own
        for new in (OTHER[m[1]], *(() if declares else ("",))):
            yield text[: m.start()] + new + text[m.end() :], text.count("\n", 0, m.start()) + 1, m[1]


@pytest.mark.rest
def test_an_address_space_changed_or_left_out_is_found() -> None:
    (source,) = (s for s in SOURCES if s.name == "simd_columns.metal")
    v = next(v for v in metalmm.variants() if v.source == source)
    instance = next(iter(v.instances()))
    missed = []
    for text, line, space in address_spaces(source.read_text()):
        whole = f'{text}\ntemplate [[host_name("one")]] [[kernel]] decltype({instance}) {instance};\n'
        if not lint.check(whole, str(source), [source.parent]):
            missed.append((line, space))
    assert missed == []


def test_branches_are_metals(tmp_path: Path) -> None:
    text = kernel("#ifdef __METALMM_CPU__\nD[0] = nothing;\n#else\nD[0] = 1;\n#endif\n".replace("#", "\n#"))
    assert lint.check(text, "branches.metal") == []


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, bad = tmp_path / "good.metal", tmp_path / "bad.metal"
    (tmp_path / "part.h").write_text("#pragma once\nfloat f(float* p) { return *p; }\n")
    good.write_text('#include "params.h"\n' + kernel("D[0] = WIDTH;"))  # a header of ours, as in a manifest's kernels
    bad.write_text(kernel("float x = 1; D[0] = f(&x);", '#include "part.h"'))
    assert cli.main(["lint", str(good), "-D", "WIDTH=8"]) == 0
    assert "no findings" in capsys.readouterr().out
    assert cli.main(["lint", str(good), str(bad), "-D", "WIDTH=8", "--json", str(tmp_path / "o.json")]) == 1
    out = capsys.readouterr().out
    assert re.search(r"part\.h:2: pointer type must have an address space: 'p' is float \* \[space\]", out)
    files = json.loads((tmp_path / "o.json").read_text())["files"]
    assert [len(f["findings"]) for f in files] == [0, 1]
    latin = tmp_path / "latin.metal"
    latin.write_bytes(b"// caf\xe9\n" + kernel("D[0] = 1;").encode())
    assert cli.main(["lint", str(latin)]) == 0, "bytes that are no UTF-8, in a comment"
    assert cli.main(["lint"]) == 2
    assert cli.main(["lint", str(tmp_path / "absent.metal")]) == 2


def test_without_libclang_it_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "clang.py").write_text("raise ImportError('none here')\n")
    (tmp_path / "x.metal").write_text(kernel("D[0] = 1;"))
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-m", "metalmm", "lint", str(tmp_path / "x.metal")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)
    assert done.returncode == 2
    assert "lint needs libclang (none here); pip install libclang" in done.stderr


def test_declarations_are_parsed_once_and_not_kept_where_nothing_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clang, wrong = lint._clang(), kernel("float x = 1; float* y = &x; D[0] = *y;")
    (said, kept), found = lint._declarations(clang), lint.check(wrong, "x.metal")
    assert said == "-include-pch" and found
    monkeypatch.setattr(clang.Index, "create", None)
    assert lint._declarations(clang) == [said, kept], "nothing is parsed"
    monkeypatch.undo()
    header = lint._DECLARATIONS.parent / "functions.h"
    before = header.stat()
    try:
        os.utime(header)  # installed anew
        assert lint._unit(clang, "").spelling and lint.check(wrong, "x.metal") == found
    finally:
        os.utime(header, ns=(before.st_atime_ns, before.st_mtime_ns))

    def full(name: str, build: object) -> Path:
        raise metalmm.DeviceError("no room")

    damaged = tmp_path / "damaged.pch"  # not the cache's own: libclang has that mapped, in the other workers of this run, too
    damaged.write_bytes(b"damaged")
    fetch = cache.fetch
    monkeypatch.setattr(cache, "fetch", lambda name, build: damaged if name in kept else fetch(name, build))
    assert lint.check(wrong, "x.metal") == found
    monkeypatch.setattr(cache, "fetch", full)
    assert lint._declarations(clang)[0] == "-include" and lint.check(wrong, "x.metal") == found
