"""MSL that Metal takes and C++ does not: what lowering makes of it."""

from __future__ import annotations

from typing import Any

import metalmm
import pytest
from support.four_threads import HEAD, by_nvrtc, run
from support.here import ALL_OF_IT, DEVICE

I = "uint i [[thread_position_in_grid]]"  # noqa: E741


TAKEN: dict[str, tuple[str, dict[str, Any], list[Any]]] = {
    "textures of others": (
        "constexpr sampler s(coord::pixel, filter::nearest);\nstruct A { texture2d<float> x; };\n"
        "static float4 f(texture2d<float> x, float2 p) { return x.sample(s, p); }\nstatic float g(A a) { return f(a.x, float2(0)).x; }\n"
        "kernel void other(device float* y, texture2d<float> x [[texture(0)]]) { A a = {x}; y[0] = g(a); }\n"
        f"kernel void k(device int* o, {I}) {{ o[i] = i; }}",
        {},
        [0, 1, 2, 3],
    ),
    "a constexpr pointer to constant memory": (
        f"constant half table[4] = {{1, 2, 3, 4}};\nkernel void k(device int* o, {I}) {{ constexpr constant half* p = table; "
        "o[i] = int(p[i]); }",
        {},
        [1, 2, 3, 4],
    ),
    "a bfloat and others in one call": (
        f"kernel void k(device int* o, {I}) {{ bfloat b = bfloat(i); o[i] = int(fma(b, 2.0f, 1.0f) + max(1.0f, b) + min(b, bfloat(2))); }}",
        {},
        [2, 5, 9, 12],
    ),
    "braces behind a type": (
        "struct S { int a; float b; }; template <typename T> struct P { T a, b; };\n"
        f"kernel void k(device int* o, {I}) {{ int4 v = 2 * (metal::int4) {{1, 2, 3, int(i)}}; S s = (S) {{ .a = v.w, .b = float(i), }}; float4 z = (float4) {{7}}; "
        "o[i] = s.a + int(s.b + z.y + ((P<float>) {0, 0}).b); }",
        {},
        [0, 3, 6, 9],
    ),
    "a constant array in threadgroup memory, by reference": (
        "template <int N> int last(const threadgroup int (&x)[N], const thread int (&y)[N]) { return x[N - 1] + y[0]; }\n"
        f"kernel void k(device int* o, {I}) {{ assert(i < 4); threadgroup int x[4]; x[i] = i; threadgroup_barrier(mem_flags::mem_threadgroup);"
        " int y[4] = {7, 0, 0, 0}; o[i] = last(x, y); }",
        {},
        [10] * 4,
    ),
    "a specialized constexpr function that returns a vector": (
        "template <typename T> constexpr T one() { return static_cast<T>(1); }\n"
        "template <> constexpr float2 one<float2>() { return float2(1, 5); }\n"
        f"kernel void k(device int* o, {I}) {{ o[i] = int(one<float2>().y) + one<int>() * int(i); }}",
        {},
        [5, 6, 7, 8],
    ),
    "a global template of a name that metal has": (
        "template <typename T, typename U> float pow(T a, U b) { return 200.0f; }\n"
        f"kernel void k(device int* o, {I}) {{ o[i] = int(pow(float(i), 2.0f)) + int(::pow(float(i), 2.0f)); }}",
        {},
        [200, 201, 204, 209],
    ),
    "a constexpr comparison that returns a vector": (
        "struct P { int a; }; constexpr bool2 operator<(P p, P q) { return bool2(p.a < q.a, q.a < p.a); }\n"
        f"kernel void k(device int* o, {I}) {{ o[i] = (P{{1}} < P{{int(i)}}).x; }}",
        {},
        [0, 0, 1, 1],
    ),
    "a global name that metal has, and a template of another namespace": (
        "namespace n { template <typename T, typename U> float pow(T a, U b) { return 100.0f; } }\nusing namespace n;\n"
        f"kernel void k(device int* o, {I}) {{ o[i] = int(::pow(float(i), 2.0f) * 2.0f) + int(n::pow(1.0f, 1.0f)); }}",
        {},
        [100, 102, 108, 118],
    ),
    "a kernel template's arguments of its own namespace": (
        "namespace n { enum class E : int { A, B }; struct S { enum : int { LIMIT = 4 }; };\n"
        "template <E e, typename T> [[kernel, max_total_threads_per_threadgroup(T::LIMIT)]] void f(device int* o, "
        f"{I}) {{ o[i] = e == E::B ? int(i) + 3 : 0; }}\n"
        'template [[host_name("k")]] [[kernel]] void f<E::B, S>(device int* o, '
        f"{I}); }}",
        {},
        [3, 4, 5, 6],
    ),
    "the elements of a constant array": (
        "struct P { array<int, 4> x; };\nstatic int last(constant int* x) { return x[3]; }\nconstant P p = {{1, 2, 3, 4}};\n"
        f"kernel void k(device int* o, {I}) {{ auto x = p.x.data(); o[i] = x[i] + last(x); }}",
        {},
        [5, 6, 7, 8],
    ),
    "limits and signs of integers": (
        f"kernel void k(device int* o, {I}) {{ make_signed_t<uint> a = -3; metal::make_signed<uchar>::type b = -1; o[i] = a + b + "
        "(is_floating_point_v<char> ? numeric_limits<char>::infinity() : numeric_limits<char>::max()); }",
        {},
        [123] * 4,
    ),
    "conversions of one name as two arguments": (
        "int f(int(x), int(y)); int f(int(x), int(y)) { return x - y; }\n"
        f"kernel void k(device int* o, {I}) {{ if (ushort(select(ushort(i), ushort(i), i > 1)) != ushort(7)) o[i] = f(1, 1) + "
        "((ushort2(ushort(i), ushort(i)) - ushort2(1)) * ushort2(2)).x; }",
        {},
        [-2 & 0xFFFF, 0, 2, 4],
    ),
    "a comparison among template arguments": (
        f"template <typename T, metal::enable_if_t<sizeof(T) < 8, bool> = true> T f(T x) {{ return x; }}\nkernel void k(device int* o, {I}) {{ o[i] = f(int(i)); }}",
        {},
        [0, 1, 2, 3],
    ),
    "a comparison in a member's return type": (
        "struct S { template <typename T> metal::enable_if_t<sizeof(T) < 8, T> f(T x) thread { return x; } };\n"
        f"kernel void k(device int* o, {I}) {{ S s; o[i] = s.f(int(i)); }}",
        {},
        [0, 1, 2, 3],
    ),
    "a comparison of two constants": (
        f"constant int a = 3; template <bool B, typename T> T f(T x) {{ return B ? x : -x; }}\nkernel void k(device int* o, {I}) {{ o[i] = f<(a < 8), int>(int(i)); }}",
        {},
        [0, 1, 2, 3],
    ),
    **{
        f"a global named {name}": (
            f"constant int {name} [[function_constant(1)]];\nkernel void k(device int* o, {I}) {{ o[i] = {name} + 1; }}",
            {"constants": {1: 3}},
            [4] * 4,
        )
        for name in ("forward", "move", "swap", "declval", "decay")
    },
    "constant and const of a member function, whichever is first": (
        "struct S { int x; int f() const constant { return x; } int g() constant const { return x; } };\nconstant S s = {2};\n"
        f"kernel void k(device int* o, {I}) {{ o[i] = s.f() + s.g(); }}",
        {},
        [4] * 4,
    ),
    "a member template that is defined outside of its class": (
        "template <class T> struct S { T x, y; template <class U> S(U u); };\n"
        "template <class T> template <class U> S<T>::S(U u) : x(T(u)), y{T(u)} {}\n"
        f"kernel void k(device int* o, {I}) {{ S<int> s(2.5f); o[i] = s.x + s.y; }}",
        {},
        [4] * 4,
    ),
    "threadgroup array with initializer": (
        f"kernel void k(device float* o, {I}) {{ threadgroup float b[32] = {{7}}; o[i] = b[i]; }}",
        {"dtype": "f4"},
        [7, 0, 0, 0],
    ),
    "threadgroup scalars with initializers": (
        f"kernel void k(device int* o, {I}) {{ threadgroup int s = 2, t = s + 3; o[i] = s + t; }}",
        {},
        [7] * 4,
    ),
    "fewer values in braces": (
        f"kernel void k(device uint* o, {I}) {{ uint4 v = {{i, i, i ^ 1u}}; o[i] = v.x + 10 * v.z + 100 * v.w; }}",
        {"dtype": "u4"},
        [10, 1, 32, 23],
    ),
    "one value in braces": (f"kernel void k(device float* o, {I}) {{ float4 v = {{5}}; o[i] = v[i]; }}", {"dtype": "f4"}, [5, 0, 0, 0]),
    "values of other types in braces": (
        f"kernel void k(device float* o, {I}) {{ float4 v = {{1, 2.5h, i, true}}; o[i] = v[i]; }}",
        {"dtype": "f4"},
        [1, 2.5, 2, 1],
    ),
    "vectors in braces": (
        f"kernel void k(device float* o, {I}) {{ float2 a = {{1, 2}}; float4 v = {{a, a}}; o[i] = v[i]; }}",
        {"dtype": "f4"},
        [1, 2, 1, 2],
    ),
    "instantiation with deduced arguments": (
        "template <typename T> [[kernel]] void f(device T* o [[buffer(0)]], uint i [[thread_position_in_grid]]) { o[i] = T(i); }\n"
        'template [[host_name("k")]] [[kernel]] void f(device int* o [[buffer(0)]], uint i [[thread_position_in_grid]]);',
        {},
        [0, 1, 2, 3],
    ),
    "deduced arguments that set the thread limit": (
        "template <typename T> [[kernel, max_total_threads_per_threadgroup(sizeof(T) * 8)]] void f(device T* o, uint i [[thread_position_in_grid]]) { o[i] = T(i); }\n"
        'template [[host_name("k")]] [[kernel]] void f(device int* o, uint i);',
        {},
        [0, 1, 2, 3],
    ),
    "a struct or a constant as the argument that tells templates apart": (
        "struct Five { int x = 5; };\nconstant constexpr int N = 3;\n"
        f"template <typename T> [[kernel]] void f(device int* o, {I}) {{ o[i] = T().x; }}\n"
        f"template <int M> [[kernel]] void f(device int* o, {I}) {{ o[i] += 10 * M; }}\n"
        'template [[host_name("k")]] [[kernel]] void f<Five>(device int* o, uint i);\n'
        'template [[host_name("other")]] [[kernel]] void f<N>(device int* o, uint i);',
        {},
        [5] * 4,
    ),
    "functions whose unnamed parameters have types of one namespace": (
        "namespace s { struct A {}; struct B {}; }\nint f(s::A) { return 1; }\nint f(s::B) { return 2; }\n"
        f"kernel void k(device int* o, {I}) {{ o[i] = f(s::A()) + 10 * f(s::B()); }}",
        {},
        [21] * 4,
    ),
    "an operator that is a bracket": (
        "struct S { int x; };\nbool operator<(S a, S b);\nint operator<<(S a, S b);\nbool operator<(S a, S b) { return a.x < b.x; }\n"
        f"kernel void k(device int* o, {I}) {{ S a = {{2}}, b = {{int(i)}}; o[i] = b < a; }}",
        {},
        [1, 1, 0, 0],
    ),
    "const before constant, in an overload of the same": (
        "int f(const device int* p) { return *p; }\nint f(const constant int* p) { return *p; }\nconstant int n = 3;\n"
        f"kernel void k(device int* o, {I}) {{ o[i] = f(&n) + f(o + i); }}",
        {},
        [3] * 4,
    ),
    "an own template beside metal's function: that one for arguments of one type": (
        "template <typename T, typename U> using Sum = decltype(T(0) + U(0));\n"
        "namespace own { template <typename T, typename U> Sum<T, U> fma(T a, U b, Sum<T, U> c) { return a * b + c + 100; } }\n"
        "using namespace own;\n"
        f"kernel void k(device int* o, {I}) {{ float x = i; o[i] = int(fma(x, 2.0f, 1.0f)) + int(fma(x, half(2), 1.0f)); }}",
        {},
        [102, 106, 110, 114],
    ),
    "a bfloat among numbers": (
        f"kernel void k(device int* o, {I}) {{ const bfloat b = bfloat(i); bool any = b != 0; bfloat c = +b; long n = long(c++); n += int(c-- - 1 - n); ++c; --c; n += int(c - bfloat(i)); half h = i > 1 ? half(b) : 0.5f; "
        "o[i] = 100 * any + 10 * n + int((i > 1 ? b : 0.5f) + (i < 1 ? 0.25f : b) + h); }",
        {},
        [1, 112, 126, 139],
    ),
    "a bfloat that takes another number": (
        f"kernel void k(device int* o, {I}) {{ bfloat b = 2, c = 2, d = 2, e = 512; b += 257; c *= 257u; d += 257.0f; e -= short(257); "
        "o[i] = i == 0 ? int(b) : i == 1 ? int(c) : i == 2 ? int(d) : int(e); }",
        {},
        [258, 512, 260, 256],
    ),
    "a long chain of bfloat and float": (
        f"kernel void k(device int* o, {I}) {{ bfloat b = 2; o[i] = 4 * ({' : '.join(f'i == {n} ? {x}' for n, x in enumerate(['b', '(0.25f)', '1.5h', '-b'] * 8))} : b); }}",
        {},
        [8, 1, 6, -8],
    ),
    "a designator of a range": (
        f"kernel void k(device int* o, {I}) {{ float a[2] = {{ [0 ... 1] = i * 0.1 + i * 0.3 }}; half h[3] = {{ [0 ... 2] = 0.5h }}; int n = 0, c[2] = {{ [0 ... 1] = max(int(i), ++n) }}; "
        "float2 v = float2(1, 2); float2 w[2] = { [0 ... 1] = v.yx }; o[i] = 100 * (a[1] == i * 0.1 + i * 0.3) + 10 * int(w[1].x + 2 * h[2]) + c[1] + n; }",
        {},
        [132, 132, 133, 134],
    ),
    "a designator of a range by any value": (
        "struct S { int x, y; }; template <int N> int sum() { S s[3] = { [0 ... 2] = {N} }; int a[N] = { [0 ... N - 1] = {} }; return s[2].x + s[1].y + a[0]; }\n"
        f"kernel void k(device int* o, {I}) {{ int a[3] = {{ [0 ... 2] = {{5}} }}; float4 v[2] = {{ [0 ... 1] = {{1, 2, 3, 4}} }}; S s[2] = {{ [0 ... 1] = {{1, 2}}, }}; thread int* p[2] = {{ [0 ... 1] = 0 }}; "
        "bfloat b = 2; float x = 3; float c[2] = { [0 ... 1] = i > 1 ? b : max(x, 0.5f) }; o[i] = a[2] + int(v[1].w) + s[1].y + (p[0] == nullptr) + sum<4>() + int(c[1]); }",
        {},
        [19, 19, 18, 18],
    ),
    "what a template alone decides and must not be dropped": (
        "template <int N> int f(int x) { if (N < 0) return x; if ((1 << N) > 3) return 9; return 7; }\n"
        "template <int N> auto g(int x) { if (N == 1) return x; else if (N == 2) return x + 5; return x; }\n"
        "template <bool B> int h(int x) { int r = 0; switch (x) { case 0: r = 5; if (B) { r += 10; case 1: r += 1; } break; default: r = 7; } return r; }\n"
        "enum E { A, Z }; inline bool operator!(E e) { return e == A; } template <E X> int e(int x) { if (!X) return x; return 2 * x; }\n"
        f"kernel void k(device int* o, {I}) {{ o[i] = 1000 * f<-1>(i) + 100 * f<2>(i) + 10 * h<false>(i) + g<3>(i) + e<A>(i); }}",
        {},
        [950, 1912, 2974, 3976],
    ),
    "a bfloat beside an enum": (
        f"enum E {{ N = 257 }};\nkernel void k(device int* o, {I}) {{ bfloat b = 1, c = 2; b += N; o[i] = int(b) + 1000 * int(c + N) + 100000 * (c < N) + int(N - c); }}",
        {},
        [358510] * 4,
    ),
    "a branch that a template argument rules out": (
        "template <typename T, bool B, int N> kernel void f(device int* o, uint i [[thread_position_in_grid]]) {\n"
        "  T x = T(i); if (B) { threadgroup int a[6000]; a[i] = N; o[i] = a[i]; } else if (N > 2 && !B) { threadgroup float a[6000]; a[i] = 1; o[i] = int(x); } else o[i] = x; }\n"
        'template [[host_name("k")]] kernel void f<bfloat, true, 3>(device int*, uint);\n',
        {},
        [3, 3, 3, 3],
    ),
    "traits of vectors, own functions with metal's names and constexpr ones of vectors": (
        "template <typename T, enable_if_t<is_floating_point_v<T>, bool> = true> T twice(T x) { return x + x; }\n"
        "namespace own { template <typename T> T simd_max(T v) { return ::metal::simd_max(v); } inline float expm1f(float x) { return x + 1; } }\n"
        "using namespace own;\nconstexpr uint2 split(ulong v) { return uint2(v, v >> 32); }\n"
        f"kernel void k(device int* o, {I}) {{ float2 v = twice(float2(1, i)); bool is_last = any(v == numeric_limits<float2>::infinity()); "
        "o[i] = int(v.y + expm1f(v.x)) + own::simd_max(int(7)) + split(5).x + is_last; }",
        {},
        [15, 17, 19, 21],
    ),
    "cond ? bfloat : 0": (
        f"kernel void k(device bfloat* o, {I}) {{ bfloat b = bfloat(2.0f); o[i] = i < 2 ? b : 0; }}",
        {"dtype": "u2"},
        [0x4000, 0x4000, 0, 0],
    ),
    "coherent(system)": (f"kernel void k(volatile coherent(system) device int* o, {I}) {{ o[i] = 1; }}", {}, [1] * 4),
    "explicit specialization in a class": (
        "struct L { int x; bool operator<(L o) const thread { return x < o.x; } };\n"
        "struct F { template <typename T> T operator()(T x) thread { return x; }\n template <> float operator()(float x) thread { return x + 1; } };\n"
        f"kernel void k(device int* o, {I}) {{ o[i] = int(F()(float(i))) + 10 * F()(int(i)); }}",
        {},
        [1, 12, 23, 34],
    ),
    "an octal index of a function constant": (
        f"constant int n [[function_constant(010)]];\nkernel void k(device int* o, {I}) {{ o[i] = n; }}",
        {"constants": {8: 6}},
        [6] * 4,
    ),
    "remainders in an index": (
        f"constant int n [[function_constant(-7 % 4 + 11)]];\nconstant int q [[function_constant(7 % 4)]];\nkernel void k(device int* o, {I}) {{ o[i] = n + 10 * q; }}",
        {"constants": {8: 6, 3: 2}},
        [26] * 4,
    ),
    "metal::_disjunction": (
        f"kernel void k(device int* o, {I}) {{ o[i] = metal::_disjunction<metal::is_same<int, float>, metal::is_integral<int>>::value; }}",
        {},
        [1] * 4,
    ),
    "v.xy++": (
        f"kernel void k(device int* o, {I}) {{ int4 v = int4(1, 2, 3, 4); int2 w = v.xy++; v.zw--; ++v.xz; o[i] = v[i] + 10 * w.y; }}",
        {},
        [23, 23, 23, 23],
    ),
    "v.xy + +1": (f"kernel void k(device int* o, {I}) {{ int4 v = int4(1, 2, 3, 4); int2 w = v.xy + +1; o[i] = w.y; }}", {}, [3] * 4),
    "os_log": (f'#include <metal_logging>\nkernel void k(device int* o, {I}) {{ os_log_default.log("%d", i); o[i] = 1; }}', {}, [1] * 4),
    "= delete": (
        f"struct S {{ S() = delete; S(int x) : x(x) {{}} int x; }};\nkernel void k(device int* o, {I}) {{ S s(3); o[i] = s.x; }}",
        {},
        [3] * 4,
    ),
    "static members and static functions": (
        f"struct S {{ static constexpr constant int n = 4; static int f() {{ return n; }} }}; static int g() {{ return 1; }}\nkernel void k(device int* o, {I}) {{ o[i] = S::f() + g(); }}",
        {},
        [5] * 4,
    ),
    "a static constant in a function": (
        f"kernel void k(device int* o, {I}) {{ static constexpr constant int t[2] = {{1, 2}}; o[i] = t[i & 1]; }}",
        {},
        [1, 2, 1, 2],
    ),
    "alignas before threadgroup": (
        "kernel void k(device float* o, uint i [[thread_index_in_threadgroup]]) { alignas(16) threadgroup float s[4]; "
        "__attribute__((aligned(8))) volatile threadgroup float t[4]; s[i] = i; t[i] = i; threadgroup_barrier(mem_flags::mem_threadgroup); o[i] = s[3 - i] + 10 * t[i ^ 1]; }",
        {"dtype": "f4"},
        [13, 2, 31, 20],
    ),
    "shifts in threadgroup declarations": (
        f"template <int N> struct B {{ int x[N]; }};\nkernel void k(device int* o, {I}) {{ threadgroup int a[1u << 3], b[4][8 >> 1]; threadgroup int s = 1 << 3; threadgroup B<(8 >> 1)> q;"
        " q.x[i] = sizeof(a) + sizeof(b); o[i] = q.x[i] + s; }",
        {},
        [32 + 64 + 8] * 4,
    ),
    "shifts in template arguments and limits": (
        "template <typename T, int N> [[kernel, max_total_threads_per_threadgroup((N >> 1) << 3)]] void f(device T* o, uint i [[thread_position_in_grid]]) { o[i] = N; }\n"
        'template [[host_name("k")]] [[kernel]] decltype(f<int, 1 << 2>) f<int, 1 << 2>;',
        {},
        [4] * 4,
    ),
    "defaulted constructors for each address space": (
        f"struct S {{ int x; S() thread = default; S() threadgroup = default; S() device = default; S() constant = default; }};\nkernel void k(device int* o, {I}) {{ S s; s.x = 3; o[i] = s.x; }}",
        {},
        [3] * 4,
    ),
    "metal::declval": (
        "template <class F, class A> using result_of = decltype(::metal::declval<F>()(::metal::declval<A>()));\nstruct F { float operator()(int x) thread { return x + 0.5f; } };\n"
        f"kernel void k(device int* o, {I}) {{ o[i] = metal::is_same_v<result_of<F, int>, float>; }}",
        {},
        [1] * 4,
    ),
    "const before a type that constant follows": (
        f"struct P {{ float4 v; }};\nfloat f(const vec<float, 4> constant& p) {{ return p.y; }}\nfloat g(const metal::float4 constant& p) {{ return p.z; }}\n"
        f"constant float4 c = float4(1, 2, 3, 4);\nkernel void k(device float* o, {I}) {{ o[i] = f(c) + g(c); }}",
        {"dtype": "f4"},
        [5] * 4,
    ),
    "arithmetic of matrices": (
        f"kernel void k(device float* o, {I}) {{ float2x2 a = float2x2(float2(1, 2), float2(3, 4)), b = float2x2(float2(5, 7), float2(9, 11));"
        " float4x4 p(2.0f), q(3.0f); p *= 2.0f; float4x4 d = p - q; float2 v = float2(1, 10) * a; float2 w = a * float2(1, 10);"
        " o[0] = d[1][1] + 10 * (q - p)[0][0]; o[1] = v.x + 100 * v.y; o[2] = w.x + 100 * w.y; o[3] = (b - a)[1][0] + 10 * (a * b)[1][0]; }",
        {"dtype": "f4"},
        [-9, 21 + 4300, 31 + 4200, 6 + 420],
    ),
    "coherent device": (f"kernel void k(coherent device int* o, {I}) {{ o[i] = 1; }}", {}, [1] * 4),
    "unsigned short int positions": (
        "kernel void k(device int* o, unsigned short int i [[thread_position_in_grid]]) { o[i] = 1; }",
        {},
        [1] * 4,
    ),
    "a global of an anonymous struct, in constant": (
        f"constant struct {{ int a; }} g = {{3}};\nkernel void k(device int* o, {I}) {{ o[i] = g.a; }}",
        {},
        [3] * 4,
    ),
    "constexpr vectors of a class, of a namespace, and with parentheses": (
        "struct S { static constexpr constant int2 v = int2(1, 5); static constexpr constant float4 w = {1, 2, 3, 4}; };\n"
        "namespace n { constexpr int2 g(int); constant constexpr float3 b(1, 2, 3); }\nconstexpr int2 n::g(int x) { return int2(2, x); }\n"
        f"kernel void k(device int* o, {I}) {{ constexpr int2 a(1, 7); o[i] = S::v.y + int(S::w.z) + n::g(3).y + int(n::b.z) + a.y; }}",
        {},
        [21] * 4,
    ),
    "an attribute's words of its namespace": (
        "namespace n { constant bool on [[function_constant(0)]]; constant constexpr uint MOST = 4;\n[[max_total_threads_per_threadgroup(MOST)]] "
        f"kernel void k(device int* o [[function_constant(on)]], {I}) {{ o[i] = 1; }} }}",
        {"constants": {0: True}, "kernel": "n::k"},
        [1] * 4,
    ),
    "matrices of numbers, negative ones, determinants": (
        f"kernel void k(device int* o, {I}) {{ float2x2 a(1, 2, 3, 4); half3x2 h = half3x2(1, 2, 3, 4, 5, 6); float3x3 b(2, 0, 1, 1, 3, 2, 0, 1, 4);"
        " float4x4 c(1, 2, 0, 1, 0, 1, 3, 2, 2, 0, 1, 1, 1, 1, 0, 2); a -= float2x2(1); o[0] = int((-a)[1][1]) * 10 + int(h[2][1]);"
        " o[1] = int(determinant(a)); o[2] = int(determinant(b)); o[3] = int(round(determinant(c))); }",
        {},
        [-30 + 6, -6, 21, 18],
    ),
    "what is known of a type's numbers": (
        f"kernel void k(device int* o, {I}) {{ static_assert(numeric_limits<uint>::is_modulo && numeric_limits<half>::radix == 2 && "
        'numeric_limits<float>::is_iec559, ""); o[0] = numeric_limits<float>::max_digits10 + 100 * numeric_limits<half>::digits10;'
        " o[1] = numeric_limits<bfloat>::min_exponent10; o[2] = isnan(numeric_limits<half>::signaling_NaN()) + isinf(HUGE_VALH) + isinf(HUGE_VALBF)"
        " + is_same_v<packed_vec<float, 3>, packed_float3>;"
        " o[3] = int(float(M_PI_BF) * 100) + (float(MAXBFLOAT) > 1e38f); }",
        {},
        [309, -37, 4, 315],
    ),
    "constexpr vectors in functions, and those whose type is auto or vec": (
        "constant constexpr auto a = int2(1, 2); constant constexpr vec<int, 2> b = vec<int, 2>(3, 4);\n"
        "template <class T> auto behind(int) -> T { static constexpr constant int2 x = int2(0, 9); return T(x.y); }\n"
        "struct alignas(16) S { static constexpr constant vec<int, 2> v = vec<int, 2>(5, 6); int f() const { static constexpr constant int2 w = int2(7, 8); return w.y + v.y; } };\n"
        f"kernel void k(device int* o, {I}) {{ static constexpr constant int2 c = int2(10, 20); constexpr auto d = int4(30); constexpr auto n = 2; S s; int e[n] = {{1, 2}};"
        " o[i] = a.y + b.y + c.y + d.w + e[1] + s.f() + behind<int>(0); }",
        {},
        [2 + 4 + 20 + 30 + 2 + 8 + 6 + 9] * 4,
    ),
    "a vector's width that is no int": (
        "template <typename T, uint N> T total(vec<T, N> v) { T s = 0; for (uint j = 0; j < N; j++) s += v[j]; return s; }\n"
        "template <ushort N, typename T> vec<T, N> f(thread const vec<T, N>& v, metal::vec<T, N> u) { return v + u * T(N - 1); }\n"
        "template <uint N> static int below(vec<int, N> v);\ntemplate <uint N> static int below(vec<int, N> v) { return N - 9 > 100u ? v[0] : 0; } template <int N> int last(vec<int, N> v) { return v[N - 1]; }\n"
        "struct S { template <uint N> int f(vec<int, N> v) const; }; template <uint N> int S::f(vec<int, N> v) const { return v[N - 1]; }\n"
        "template <uint N, typename = enable_if_t<(N > 1)>> int g(int2 v) { return v[N - 2]; }\n"
        f"kernel void k(device int* o, {I}) {{ int4 v(i, 1, 2, 3); o[i] = total(v) + 10 * total<int, 2>(v.xy) + f<3, int>(v.xyz, v.yzw).y * below(v.yz) + last(v) + S().f(v.zw) - g<3>(v.zw); }}",
        {},
        [24, 35, 46, 57],
    ),
    "a bfloat, or a constant half, that becomes a bool": (
        f"constant half h[4] = {{0, 1}};\nkernel void k(device int* o, {I}) {{ bfloat4 b = bfloat4(0, 1, 2, 0); bool yes = true; yes = b[i]; bool no = true; no = h[i]; o[i] = yes + 10 * (b[i] && true) + 100 * !b[i] + 1000 * no; }}",
        {},
        [100, 1011, 11, 100],
    ),
    "members of a list added to a vector": (
        f"kernel void k(device int* o, {I}) {{ int2 v = 1; v += {{1, 2}}; v *= {{2, 3}}; o[i] = v.x * 10 + v.y; }}",
        {},
        [49] * 4,
    ),
    "what Metal has for calls of a size that the GPU decides": (
        f"kernel void k(device MTLDispatchThreadgroupsIndirectArguments* o, {I}) {{ if (i == 0) o[0] = {{7, 8, 9}}; "
        "if (i == 0) ((device int*)o)[3] = sizeof(MTLDrawIndexedPrimitivesIndirectArguments); }",
        {},
        [7, 8, 9, 20],
    ),
    "overloads by address space alone that nobody calls": (
        f"int f(device int* p) {{ return p[0]; }} int f(threadgroup int* p) {{ return p[1]; }}\nkernel void k(device int* o, {I}) {{ o[i] = i; }}",
        {},
        [0, 1, 2, 3],
    ),
    "bytes in the other order, and a volatile half": (
        f"int f(const volatile thread half& h) {{ return int(float(h)); }}\nkernel void k(device int* o, {I}) {{ volatile half h = half(i); "
        "o[i] = int(__builtin_bswap32(0x01000000u + (i << 16))) + f(h) + int(__builtin_bswap64(0x0100000000000000ul)); }",
        {},
        [2, 2 + 256 + 1, 2 + 512 + 2, 2 + 768 + 3],
    ),
    "a member of a member as a template's vector": (
        "template <int N> int first(vec<int, N> v) { return v[0] * N; }\n"
        f"kernel void k(device int* o, {I}) {{ int4 v(1, 2, 3, i); auto p = v.zw.yx; o[i] = first(v.yzw.yx) + p.y + p.x; }}",
        {},
        [9, 10, 11, 12],
    ),
    "members written in parentheses, and counted up in front": (
        "#define ADD(a, b) (a) += (b)\nstruct S { int4 v; };\n"
        "kernel void k(device int* o) { int4 v(1, 2, 3, 4); (v.xy) += 1; (v.zw)++; ADD(v.xw, int2(5)); (v.yx) = int2(v.yx) * 2; ++v.xy; --(v.zw);"
        " int4 m[2] = {v, v}; ((m[1].yx)) += int2(10, 20); S s{v}; thread S* p = &s; (p->v.xy)++; (*p).v.xw *= 2; v.xyz.yx = int2(6, 4);"
        " o[0] = int(v.x) * 1000 + int(v.y) * 100 + int(v.z) * 10 + int(v.w); o[1] = int(m[1].x + m[1].y); o[2] = int(s.v.x + s.v.w); o[3] = int((v.xy).y); }",
        {},
        [4639, 52, 50, 6],
    ),
    "scalars by metal's name": (
        f"using metal::uint;\nkernel void k(device int* o, {I}) {{ metal::uint a = i; metal::size_t b = 2; metal::int32_t c = 3; metal::uchar d = 4; o[i] = a + b + c + d; }}",
        {},
        [9, 10, 11, 12],
    ),
    "members for each address space": (
        "struct F { int v; F(int x) : v(x) {} void operator=(int r) { v = r; } void operator=(int r) device { v = r; } F operator+(F r) const { return F(v + r.v); }"
        " F operator+(F r) const device { return F(*this) + r; } };\n"
        f"kernel void k(device int* o, {I}) {{ F a(2); a = 3; device F* f = (device F*)o + i; *f = 4; o[i] = (f[0] + a).v; }}",
        {},
        [7] * 4,
    ),
    "vertex and fragment functions beside a kernel": (
        "struct V { float4 p [[position]]; };\nvertex V v(uint i [[vertex_id]], constant float4* p [[buffer(0)]]) { V r; r.p = p[i]; return r; }\n"
        f"fragment float4 f(V v [[stage_in]]) {{ return v.p; }}\n[[vertex]] float4 w() {{ return float4(0); }}\nkernel void k(device int* o, {I}) {{ o[i] = 1; }}",
        {},
        [1] * 4,
    ),
    "constexpr functions that call others": (
        "struct B { int v; constexpr B operator+=(B s) { *this = half_of(s); return *this; } static B half_of(B s); };\ninline B B::half_of(B s) { return B{s.v / 2}; }\n"
        "inline B plus(B a, B b) { return B{a.v + b.v}; }\nconstexpr B operator+(const B a, const B b) { return plus(a, b); }\nconstexpr int three() { return 3; }\n"
        f"kernel void k(device int* o, {I}) {{ int t[three()] = {{1, 2, 3}}; B c = B{{int(i)}}; B d = c + B{{2}}; d += B{{8}}; o[i] = d.v + t[2] + c.v; }}",
        {},
        [7, 8, 9, 10],
    ),
    "constants of constants": (
        "constant uint M[2] = {5, 6}; constant uint C = M[1]; struct B { uint a, b; }; constant B V = {M[0], M[1]};\n"
        f"constant uint n [[function_constant(0)]]; constant uint2 v = uint2(n, n * 2);\nkernel void k(device int* o, {I}) {{ o[i] = C + V.b + v.y; }}",
        {"constants": {0: 3}},
        [18] * 4,
    ),
    "shifts of a vector by one of another type": (
        f"kernel void k(device int* o, {I}) {{ uint4 s = uint4(3u, 2, 1, 0); int4 v(1, -8, 3, 4); int4 r = (v << s) >> uint4(1); v <<= s; o[i] = r[i] * 100 + v[i]; }}",
        {},
        [408, -1632, 306, 204],
    ),
    "a member named as a swizzle": (
        f"struct B {{ float x; float y; }}; struct S {{ B bar; }};\nkernel void k(device int* o, {I}) {{ S s[2]; s[1].bar.x = 2; s[1].bar.y = 3; thread S* p = s + 1; o[i] = int(s[1].bar.x + p->bar.y); }}",
        {},
        [5] * 4,
    ),
    "a vector member named as a swizzle": (
        "struct R { int2 xy; int x, y; };\n"
        "kernel void k(device int* o) { R r; r.x = 1; r.y = 2; r.xy = int2(3); r.xy.x += 4; r.xy.y = 9; o[0] = r.x; o[1] = r.y; o[2] = r.xy.x; o[3] = r.xy.y; }",
        {},
        [1, 2, 7, 9],
    ),
    "a variable named as a swizzle": (
        f"kernel void k(device int* o, {I}) {{ int4 v(1, 2, 3, 4); auto xy = v.zw; int zw = 5; o[i] = xy.x + v.xy.x + zw + v.zw.y; }}",
        {},
        [13] * 4,
    ),
    "a write behind a keyword": (
        f"kernel void k(device int* o, {I}) {{ int4 v(1, 2, 3, 4); if (i < 2) v.x = 9; else (v.xy) = int2(7, 8); do (v.zw) += 1; while (v.z < 4); o[i] = v.x + v.w; }}",
        {},
        [14, 14, 12, 12],
    ),
    "classes that are numbers, in metal's functions": (
        "template <int N> using Int = integral_constant<int, N>;\nstruct Q { float v; operator float() const { return v; } };\n"
        f"kernel void k(device int* o, {I}) {{ Int<5> n; o[i] = min(n, 3) + clamp(n, 1, 4) + int(pow(Q{{4}}, 2.0f)) + int(mix(0.0f, 10.0f, Q{{1}})); }}",
        {},
        [33] * 4,
    ),
    "classes with the names of a picture's functions": (
        "struct object { int a; operator int() const { return 100; } };\nobject operator+(object x, object y) { return object{x.a + y.a}; }\n"
        f"int g(object x) {{ return x.a; }}\nkernel void k(device int* o, {I}) {{ o[i] = g(object{{3}} + object{{4}}); }}",
        {},
        [7] * 4,
    ),
    "a prototype without names": (
        f"struct Q {{ int a; }}; constexpr int2 f(Q); constexpr int2 f(Q q) {{ return int2(1, q.a); }}\nkernel void k(device int* o, {I}) {{ o[i] = f(Q{{5}}).y; }}",
        {},
        [5] * 4,
    ),
    "an initializer_list": (
        "template <typename T> struct V { T e[2]; V(initializer_list<T> l) { auto p = l.begin(); for (size_t i = 0; i < l.size(); i++) e[i] = *(p + i); } };\n"
        f"kernel void k(device int* o, {I}) {{ V<float> v{{1.0f, 2.0f}}; o[i] = int(v.e[1]); }}",
        {},
        [2] * 4,
    ),
    "functions of a class's own that have metal's names": (
        "struct F { int v; F(int x) : v(x) {} F operator*(F r) const { return F(v * r.v); } };\nF pow(F x, size_t n) { F r(1); for (size_t i = 0; i < n; i++) r = r * x; return r; }\n"
        "F min(F a, float b) { return F(int(b)); }\nF mix(F a, F b, F c) { return c; }\nF select(F a, F b, bool c) { return c ? b : a; }\nF fma(F a, F b, F c) { return F(a.v * b.v + c.v); }\n"
        f"kernel void k(device int* o, {I}) {{ F a(2); o[i] = pow(F(3), i).v + min(a, 2).v + mix(a, a, a).v + select(a, a, true).v + fma(a, a, a).v; }}",
        {},
        [13, 15, 21, 39],
    ),
    "statements in an expression": (
        "#define PUT(p, x) ({ if (b) { p[o] = x; } o++; })\n"
        "kernel void k(device int* y) { bool b = true; uint o = 0; PUT(y, 3); PUT(y, 4); int z = ({ int q = 2; if (b) { q++; } q + 1; }); y[2] = z; y[3] = o; }",
        {},
        [3, 4, 4, 2],
    ),
    "a variable that has a function's name": (
        f"float total(float x) {{ return simd_sum(x); }}\nkernel void k(device int* y, {I}) {{ for (int j = 0; j < 4; ++j) {{ float s = total(1.0f); int total = j; if (total < 4) y[total] = s; }} }}",
        {},
        [4] * 4,
    ),
    "coherence in parentheses": (f"kernel void k(coherent(device) device int* p, {I}) {{ p[i] = 1; }}", {}, [1] * 4),
    "a function that has the kernel's name": (
        f"int act(int x, int s) {{ return x > 0 ? x : x * s; }}\nkernel void act(device int* y, {I}) {{ y[i] = act(int(i) - 2, 5); }}",
        {"kernel": "act"},
        [-10, -5, 0, 1],
    ),
    "an assumption": (f"kernel void k(device int* o, {I}) {{ __builtin_assume(i < 32u); o[i] = 1; }}", {}, [1] * 4),
    "two arguments that take turns at one index": (
        "constant bool wide [[function_constant(0)]]; constant bool narrow = !wide;\n"
        "kernel void k(device int* o [[buffer(0), function_constant(wide)]], device short* s [[buffer(0), function_constant(narrow)]], "
        f"{I}) {{ if (wide) o[i] = 1; else s[i] = 2; }}",
        {"constants": {0: True}},
        [1] * 4,
    ),
}


@pytest.mark.rest(but=12)
@pytest.mark.usefixtures("each_compiler")
@pytest.mark.parametrize("name", TAKEN)
def test_what_metal_takes_is_taken(name: str, device: metalmm.Device, monkeypatch: pytest.MonkeyPatch) -> None:
    # The lint has metal::declval, of which nobody here knows whether Apple's headers do, no function of bfloat and nothing of one and an enum, no samplers and no initializer_list.
    if name in (
        "a global named declval",
        "a bfloat and others in one call",
        "a bfloat beside an enum",
        "textures of others",
        "an initializer_list",
    ):
        monkeypatch.setenv("METALMM_LINT", "0")
    source, options, expected = TAKEN[name]
    assert run(device, source, **options) == expected


@pytest.mark.skipif(not ALL_OF_IT or DEVICE != "cpu", reason="takes a minute")
@pytest.mark.parametrize("name", TAKEN)
def test_nvrtc_takes_it_too(name: str) -> None:
    source, options, _ = TAKEN[name]
    by_nvrtc(HEAD + source, options.get("kernel", "k"), options.get("constants"))
