"""Device cuda without a GPU: MSL becomes machine code for NVIDIA's GPUs, by NVRTC from PyPI."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import metalmm
import pytest
from metalmm import kernel_source, manifest, nvrtc
from metalmm.backends import cuda
from metalmm.errors import CompileError
from metalmm.kernel_source import KernelText
from metalmm.msl.program import Program
from metalmm.msl.targets import cpu
from metalmm.msl.tokens import Source
from support.here import ALL_OF_IT, ROOT
from support.rows import kinds

try:
    nvrtc.find()
except metalmm.Error as error:
    pytest.skip(f"{error}: device cuda's kernels are NOT compiled", allow_module_level=True)

HEAD = "#include <metal_stdlib>\nusing namespace metal;\n"


def built(text: str, kernel: str = "k", capability: int = 90, **options: object) -> bytes:
    expanded = metalmm.compiler.preprocess(text, "own.metal", for_metal=True)
    return cuda.build(KernelText(expanded, "own.metal", is_preprocessed=True), kernel, {}, capability, **options).read_bytes()  # type: ignore[arg-type]


def ptx_of(text: str) -> str:
    source = KernelText(metalmm.compiler.preprocess(text, "own.metal", for_metal=True), "own.metal", is_preprocessed=True)
    lowered = cuda.cxx.lower(source.text, "k", {}, compiler="nvrtc")
    return nvrtc.find().ptx(lowered, source.name, cuda.options(90, source, stops=False)).decode()


def instances() -> Iterator[tuple[Path, str, int]]:
    """By capability: of each kernel with dense and with quantized weights, each end and use of tensor cores one instance, by turns for 9.0 and
    8.0. With METALMM_TEST_ALL of each variant all, by turns."""
    asked = set[tuple[Path, str]]()
    ways = set[tuple[object, ...]]()
    for v in kinds(metalmm.variants()):
        way = (v.kernel, v.storage == "dense", v.swiglu, v.params.get("mma"))
        every = list(v.instances())
        of_first_type = [x for x in every if x.partition(",")[0] == every[0].partition(",")[0]]
        found = every if ALL_OF_IT else of_first_type[-1:] if way not in ways else []
        ways.add(way)
        for instance in found:
            if (v.source, instance) not in asked:
                asked.add((v.source, instance))
                yield v.source, instance, 90 if "wgmma" in v.needs or len(asked) % 2 else 80


@pytest.mark.rest(but=3)
@pytest.mark.parametrize(("source", "instance", "capability"), list(instances()), ids=lambda x: "" if isinstance(x, Path) else str(x))
def test_an_instance_becomes_machine_code(source: Path, instance: str, capability: int) -> None:
    text = KernelText(kernel_source.assemble(source, instance), str(source))
    assert cuda.build(text, kernel_source.host_name(instance), {}, capability).read_bytes().startswith(b"\x7fELF")


PTXAS = next(iter(nvrtc._packaged("cu*/bin/ptxas")), "")  # of nvidia-cuda-nvcc


@pytest.mark.rest
@pytest.mark.skipif(not PTXAS, reason="no ptxas: that debug mode's PTX is taken is NOT tested")
def test_debug_mode_is_taken(tmp_path: Path) -> None:
    """As PTX every access but those to parameters, constants and a lane's own memory is looked at, and the simdgroup's ldmatrix, which no lane
    may leave out; of that machine code can be made."""
    bare = re.compile(r"^\t(ld|st|atom|red)(?!matrix|\.(param|const|local))[.\w:]* [^;]*\[%(?!mm)[^;]*;", re.MULTILINE)
    for source, instance, capability in [*instances()][:: 25 if ALL_OF_IT else 8]:
        text = KernelText(kernel_source.assemble(source, instance), str(source))
        made = cuda.build(text, kernel_source.host_name(instance), {}, capability, debug=True)
        assert not bare.search(made.read_text()) and "@%mm_may ld" in made.read_text()
        architecture = f"-arch=sm_{capability}{'a' * (capability == 90)}"
        done = subprocess.run([PTXAS, architecture, str(made), "-o", str(tmp_path / "out")], capture_output=True, text=True)
        assert done.returncode == 0, (instance, done.stderr[:2000])


@pytest.mark.rest
@pytest.mark.parametrize("point", ["bm128_bn128_s4", "bm64_bn64_s3", "bm128_bn64_s9"])
def test_the_corners_of_wgmma_become_machine_code(point: str) -> None:
    v = manifest.get(f"gemm_wgmma/{point}")
    instance = next(iter(v.instances()))
    text = KernelText(kernel_source.assemble(v.source, instance), str(v.source))
    assert cuda.build(text, kernel_source.host_name(instance), {}, 90).read_bytes().startswith(b"\x7fELF")
    for larger in ("bm192_bn64_s3", "bm256_bn64_s3", "bm64_bn64_s15"):
        with pytest.raises(metalmm.UnknownVariantError):
            manifest.get(f"gemm_wgmma/{larger}")


@pytest.mark.rest(but=1)
@pytest.mark.parametrize(
    ("point", "storage", "beside"),
    [
        ("bm64_bn64_s4", "affine4", 3),
        ("bm64_bn64_s4", "dense", 3),
        ("bm64_bn64", "q8_0", 2),
        ("bm64_bn64_s8_k2", "dense", 2),
        ("bm128_bn128", "q8_0", 1),
        ("bm128_bn128", "q2_k", 1),
    ],
)
def test_a_core_has_registers_for_threadgroups_of_wgmma(
    point: str, storage: str, beside: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """65,536 of them. A thread begins with its part, whatever it needs: setmaxnreg moves them from those that bring tiles to those that multiply,
    and would wait forever for registers that nobody has. And ptxas does not make each product wait for the one before, which it says."""
    said, text_of, cubin = list[str](), nvrtc.Compiler._text, nvrtc.Compiler.cubin

    def text_and_log(self: nvrtc.Compiler, program: Any, what: str) -> bytes:
        said.append(text_of(self, program, "ProgramLog").decode(errors="replace"))
        return text_of(self, program, what)

    monkeypatch.setattr(nvrtc.Compiler, "_text", text_and_log)
    monkeypatch.setattr(
        nvrtc.Compiler, "cubin", lambda self, text, name, options: cubin(self, text, name, [*options, "--ptxas-options=-v"])
    )
    monkeypatch.setenv("METALMM_CACHE", str(tmp_path))  # what is there already says nothing
    spec = metalmm.MatmulSpec(64, 256, 256, transpose_b=True, b_storage=storage)
    _, text, kernel = manifest.kernel_text(v := manifest.get(f"gemm_wgmma/{point}"), manifest._core._specialization(spec))
    assert cuda.BACKEND.registers(text, kernel, {}) == 65536 // (v.threads * beside) // 8 * 8
    assert "ptxas info" in "".join(said)
    assert "wgmma.mma_async instructions are serialized" not in "".join(said)


@pytest.mark.parametrize("also", [(), (256,)])
def test_a_core_has_registers_for_threadgroups_of_few_rows(also: tuple[int, ...]) -> None:
    """As many as the rule counts with. With 82 registers two fitted in place of three, and took 1.3 times as long (docs/lab/cuda.md)."""
    spec = metalmm.MatmulSpec(8, 256, 256, transpose_b=True, also_n=also)
    _, text, kernel = manifest.kernel_text(v := manifest.get("small_m/t2_s8_d2_tg256"), manifest._core._specialization(spec))
    (*_, beside) = cuda._FEW[v][0] or (0,)
    assert beside == 3 and cuda.BACKEND.registers(text, kernel, {}) <= 65536 // (v.threads * beside) // 8 * 8


@pytest.mark.rest(but=1)
@pytest.mark.parametrize("path", sorted((ROOT / "tests" / "conformance" / "msl").glob("*.metal")), ids=lambda p: p.stem)
def test_what_the_language_tests_use(path: Path) -> None:
    text = metalmm.compiler.preprocess(path.read_text(), str(path), for_metal=True)
    names = Program(text, str(path)).kernel_names()
    for kernel in names if ALL_OF_IT else names[:1]:
        constants = {0: True, 1: 3} if kernel == "spaces" else {}
        for stops in (False, True) if ALL_OF_IT else (len(kernel) % 2 == 0,):
            cuda.build(KernelText(text, str(path), is_preprocessed=True), kernel, constants, 90, stops=stops)


def test_the_compilers_words_point_into_the_file() -> None:
    with pytest.raises(CompileError, match=r"(?s)kernel 'k'.*own\.metal\(3\).*nowhere"):
        built(HEAD + "kernel void k(device float* y) { y[0] = nowhere; }\n")


def test_too_much_threadgroup_memory_is_said_in_bytes() -> None:
    body = "threadgroup float a[16384]; a[i] = y[i]; threadgroup_barrier(mem_flags::mem_threadgroup); y[i] = a[i + 1];"
    with pytest.raises(CompileError, match="kernel 'k': 65536 bytes of threadgroup memory; the limit is 49152"):
        built(HEAD + f"kernel void k(device float* y, uint i [[thread_index_in_threadgroup]]) {{ {body} }}\n")


def test_loads_are_as_wide_as_the_kernel_says() -> None:
    """16 bytes in one instruction, and nothing in local memory: what simd_octets is for."""
    source = kernel_source.KERNELS / "simd_octets.metal"
    instance = "simd_octets<half, 1, 2, 1, 4, 128>"
    text = KernelText(kernel_source.assemble(source, instance), str(source))
    msl = metalmm.compiler.preprocess(text.text, text.name, for_metal=True)
    lowered = cuda.cxx.lower(msl, kernel_source.host_name(instance), {}, compiler="nvrtc", converged=True)
    ptx = nvrtc.find().ptx(lowered, text.name, cuda.options(90, text, stops=False)).decode()
    ptx = ptx.partition(".entry")[2]
    assert ptx.count("ld.global.v4.u32") + ptx.count("ld.global.v2.u64") == 12  # 8 of B, 4 of A
    assert "st.local" not in ptx and "ld.local" not in ptx


ARGS = "device half* h [[buffer(0)]], device float* f [[buffer(1)]], device int* n [[buffer(2)]], uint i [[thread_position_in_grid]]"
BODIES = {
    "half to others": "int x = h[0]; uint u; u = h[1]; bool b = h[2]; n[0] = h[3]; n[1] = x + u + b; f[0] = n[0] ? h[0] : 1.0f;",
    "half beside float": "f[0] = max(h[0], f[0]); f[1] = clamp(h[0], 0.0f, 1.0f); h[1] = fma(h[0], f[0], h[2]); h[2] = max(h[0], 0);",
    "constant infinity": "constexpr half a = numeric_limits<half>::infinity(); constexpr float b = -INFINITY, c = NAN; h[0] = a; f[0] = b + c;",
    "volatile": "volatile half x = h[0]; half y = x; x = y; volatile device half* p = h; p[2] = p[3];",
    "comma in an arm": "int q = 0; f[0] = n[0] ? q++, h[0] : f[1];",
    "arms beside an undecided one": "n[0] ? void(n[1]++) : void(n[1]--);\ndevice half* p = n[0] ? h + 1 : 0;\nf[0] = n[0] ? *p : 1.0f;",
    "brackets behind an arm": "for (int j = 0; j < 2; j++) { if (i < 8) { f[j] += n[0] ? bfloat(2) : max(f[1], 0.5f); f[0] += n[0] ? half(1) : float(2); } }"
    " switch (int(n[1] ? half(1) : float(1))) { case 1: f[2] += simd_sum(f[3]); }",
    "declared conditions": "int q = 3; while (int z = q--) { f[q] = z; } for (int k = 0; bool go = k < 3; k++) { f[k] = go; }",
    "lambda in a loop's head": "for (int q = [&] { int z = 1; return z; }(); q < 3; q++) f[q] = 1;"
    " for (auto z : [&] { array<float, 3> a = {1, 2, 3}; return a; }()) f[0] += z;",
    "a reference to elements": "simdgroup_half8x8 a(1.0h), d(0.0h); thread auto& e = a.thread_elements(); e[0] = h[i];"
    " simdgroup_multiply_accumulate(d, a, a, d); if (i < 5) h[i] = d.thread_elements()[0];",
}
PROGRAMS = {
    "a matrix in a union": "kernel void k(device float* o [[buffer(0)]], uint i [[thread_index_in_simdgroup]]) { union { simdgroup_float8x8 m; float2 v; } u;"
    " u.v = float2(1.0f); o[i] = u.v.x; }",
    "vectors in constant memory": "constant float4 a[2] = {float4(1, 2, 3, 4), float4(5)}; constant half2 b[] = {{1, 2}, {3, 4}};\n"
    "constant float4x4 c = float4x4(float4(1), float4(2), float4(3), float4(4)); constant float d = -INFINITY; constant float3 e = -float3(1, 2, 3);\n"
    "template <class T> struct L { static constexpr constant T least = -numeric_limits<T>::infinity(); };\n"
    f"kernel void k({ARGS}) {{ f[i] = a[i & 1].x + b[i & 1].y + c[i & 3].x + d + e.x + L<half>::least; }}",
    "ggml's structs": "typedef struct { half d; uchar qs[16]; } block;\n"
    "kernel void k(device block* x [[buffer(0)]], device float* f [[buffer(1)]]) { f[0] = x->d * x->qs[0] - 8.h * x->d; }",
    "braces behind a type": "template <typename T> struct P { T a, b; }; struct S { int a; float b; S operator++(int) { S t = *this; a++; return t; } };\n"
    "S operator-(S) { return (S) {}; }\n"
    f"kernel void k({ARGS}) {{ float4 u = (metal::float4) {{f[2], f[3],}}; f[i + 9] = u.z + (float4) {{1.0f}}.y; float4 v = 2 * (float4) {{f[0], f[1], 2, 3}}; S s = (S) {{ .a = int(i), .b = v.w, }}; f[i] = s.b + ((P<float>) {{1, f[1]}}).b + ((S) {{n[0], 1}}).a; }}",
    "a bfloat and others in one call": f"kernel void k({ARGS}) {{ bfloat b = bfloat(f[0]); f[i] = fma(b, 2.0f, f[1]) + max(1.0f, b) + min(b, b); }}",
    "lanes that part": "uint of_few(uint x) { return simd_sum(x); }\n"
    "uint of_all(uint x) { if (x > 9) return simd_sum(x); for (uint j = x & 3; j < 4; j++) { if (j == 2) continue; x += simd_max(j); }\n"
    "switch (x & 3) { case 1: return of_few(x); default: x++; } do { if (simd_any(x == 3)) { x++; break; } } while (++x < 99); return x; }\n"
    f"kernel void k({ARGS}) {{ if (i > 40) return; while (n[i] > 0) {{ if (i & 1) n[i] -= of_all(i); else {{ n[i]--; }} }}\n"
    "for (;;) { n[i] += of_all(3u) + of_all(4u); if (n[i] > 5) break; } }",
    "branches that a template decides among lanes": "template <bool B, int N> int g(int x) { if (B) x = simd_sum(x); if (!B && N > 2) return x;\n"
    "for (int j = 0; j < x; j++) { if (N == 1) break; x = simd_sum(x); } if (B) { if (x > 9) return 2; x += 1; } else return 5; return simd_max(x); }\n"
    f"kernel void k({ARGS}) {{ n[i] = g<true, 1>(i) + g<false, 3>(i); }}",
    "limits of a type of its own": "template <class T> struct Of { T x; };\n"
    "template <class T> struct _numeric_limits_impl<Of<T>> { static constexpr Of<T> max() { return {numeric_limits<T>::max()}; } };\n"
    f"kernel void k({ARGS}) {{ f[0] = numeric_limits<Of<float>>::max().x + vec_elements<half4>::value; }}",
    "an own template beside metal's function": "namespace own { template <typename T, typename U> float fma(T a, U b, decltype(a + b) c) { return c; } }\n"
    f"using namespace own; kernel void k({ARGS}) {{ f[0] = fma(f[1], f[2], 1.0f) + fma(f[1], h[0], 1.0f); }}",
    "bits of constants": f"kernel void k({ARGS}) {{ constexpr short a = __builtin_ctz(24), b = __builtin_clz(24), c = __builtin_popcount(24);\n"
    'static_assert(a == 3 && b == 27 && c == 2, ""); n[0] = a + __builtin_ctz(n[1]) + __builtin_clz(n[2]) + __builtin_popcount(n[3]); }',
    "names of CUDA's": "struct dim3 { int x; }; namespace own { inline float expm1f(float x) { return x; } } using namespace own; inline float j1(float x) { return x; } inline int lrint(float x) { return x; }\n"
    f"inline float rcbrt(float x) {{ return x; }} kernel void k({ARGS}) {{ dim3 d; d.x = 1; f[0] = j1(1) + expm1f(f[1]) + lrint(f[0]) + rcbrt(2) + d.x; }}",
    "constexpr loop": "constexpr int fact(int q) { int r = 1; for (int i = 2; i <= q; i++) r *= i; return r; }\n"
    f'kernel void k({ARGS}) {{ float a[fact(3)]; a[0] = f[1]; f[0] = a[0]; static_assert(fact(3) == 6, ""); }}',
}
ALL = {**{name: f"kernel void k({ARGS}) {{\n{body}\n}}" for name, body in BODIES.items()}, **PROGRAMS}


@pytest.mark.rest(but=3)
@pytest.mark.parametrize(("name", "stops"), [(name, s) for i, name in enumerate(ALL) for s in (False, True) if ALL_OF_IT or s == i % 2])
def test_what_the_cpu_takes_so_does_nvrtc(name: str, stops: bool) -> None:
    assert built(HEAD + ALL[name] + "\n", stops=stops).startswith(b"\x7fELF")


PARTED = {
    "in a branch": ("if (i < 3) n[i] = simd_sum(n[i]);", True),
    "behind who left": ("if (i < 3) return; n[i] = simd_sum(n[i]);", True),
    "in a loop": ("for (int j = 0; j < n[0]; j++) n[i] = simd_sum(n[i]);", True),
    "in a loop of each lane's": ("for (int j = 0; j < 3; j++) n[i] = simd_sum(n[i]);", False),
    "in such a loop that some leave": ("for (int j = 0; j < 3; j++) { n[i] = simd_sum(n[i]); if (n[i] == j) break; }", True),
    "in one that counts as it likes": ("for (int j = 0; j < 3; j++) { n[i] = simd_sum(n[i]); j += n[i]; }", True),
    "in one to a lane's own number": ("n[i] = to_own(uint(n[i]), i);", True),
    "in one to a constant": ("n[i] = to_four(i);", False),
    "in one of each lane's, to a constant at most": ("for (int j = 0; j < 4 && j < n[i]; j++) n[i] += simd_sum(1) + j;", True),
    "in one to that, but that goes on by itself": (
        "for (int j = 0; j < 4 && j < n[i]; j++) { if (i & 1) ++j; n[i] += simd_sum(1); }",
        True,
    ),
    "in one to that or else": ("for (int j = 0; j < 4 && j < n[i] || j < n[0]; j++) n[i] += simd_sum(1);", True),
    "beside a function of that name": ("if (i < 3) n[i] = simd_sum(n[i]); n[i] += own::simd_sum(2);", True),
    "whose result is a vote": ("if (i < 3) n[i] = int(ulong(simd_vote::vote_t(simd_ballot(n[i] > 1))));", True),
    "in a function": ("while (n[i] > 3) n[i] -= of_all(1u);", True),
    "nowhere": ("if (i < 3) n[i] = 1;", False),
    "beside a branch": ("if (i < 3) n[i] = 1; n[i] = simd_sum(n[i]);", False),
    "behind &&": ("if (i < 3 && simd_any(n[i] > 3)) n[i] = 1;", False),
    "where a condition declares": ("while (int x = n[i]--) n[i] -= simd_sum(x);", False),
    "in a switch with a comma": (
        "switch (n[0]++, n[i] & 3) { case 0: case 1: n[i] = simd_sum(1); break; case 2: default: n[i] = simd_sum(2); }",
        True,
    ),
    "in a loop under a pragma": (
        "\n#pragma unroll\nfor (int j = 0; j < 4; j++) { if ((i + j) % 3 == 0) continue; n[i] += simd_sum(1); }",
        True,
    ),
    "in one that goes on by itself": ("for (int j = 0; j < 4; j++) { if (i & 1) ++j; n[i] += simd_sum(1); }", True),
    "in one whose counter is given away": ("for (int j = 0; j < 4; j++) { bump(j, i); n[i] += simd_sum(1); }", True),
    "in one to what is a constant elsewhere": ("ulong four = n[i] & 3; for (uint j = 0; j < four; j++) n[i] += simd_sum(1);", True),
    "in a function with kernel in its name": ("n[i] = kernel_part(i); n[i] += simd_sum(1);", True),
    "behind and": ("if (i < 3 and simd_any(n[i] > 3)) n[i] = 1;", False),
    "behind ? in braces": ("uint2 v = i & 1 ? uint2{1, 1} : uint2{simd_sum(1u), 2}; if (i & 2) n[i] = simd_sum(1); n[i] += v.x;", False),
    "in a lambda": ("auto g = [n](uint x) { if (x & 1) return 1u; return simd_sum(1u); }; n[i] = g(i);", False),
}


CHANGES = [
    "thread int& r = j; r += n[i];", "thread int& r(j); r += 1;", "(j) += n[i];", "++(j);", "thread int* p = &(j); *p += 1;", "bump(j, i);",
    "n[0] = int(twice(bumped(j)));", "A a(j); a.x += n[i];",
]  # fmt: skip


@pytest.mark.parametrize("change", [*CHANGES, "&& bumped(j) < 9"])
def test_a_counter_that_something_may_change_is_asked_for(change: str) -> None:
    """All of the head: what compilers unroll by stays in it only where nothing but the head changes the counter."""
    own = "void bump(thread int& j, uint i) { j += i; } int bumped(thread int& j) { return j++; } int twice(int j) { return 2 * j; }\n"
    own += "struct A { thread int& x; A(thread int& x) : x(x) {} };\n"
    rest, body = (change, "") if change.startswith("&&") else ("", change)
    text = HEAD + own + f"kernel void k({ARGS}) {{ for (int j = 0; j < 4 && j < n[i] {rest}; j++) {{ {body} n[i] += simd_sum(1); }} }}\n"
    text = metalmm.compiler.preprocess(text, "own.metal", for_metal=True)
    assert re.search(r"fiber::goes\(\(j < 4 &&", cuda.cxx.lower(text, "k", {}, compiler="nvrtc", converged=False))


@pytest.mark.rest(but=3)
@pytest.mark.parametrize(("body", "kept"), PARTED.values(), ids=PARTED)
def test_who_is_with_a_lane_is_kept_where_lanes_part(body: str, kept: bool) -> None:
    """And an operation comes there. Never of a kernel of ours."""
    text = HEAD + f"uint of_all(uint x) {{ return simd_sum(x); }} kernel void k({ARGS}) {{ {body} }}\n"
    text = text.replace("kernel void", "uint to_own(uint n, uint i) { for (uint j = 0; j < n; j++) i = simd_sum(i); return i; }\n"
        "void bump(thread int& j, uint i) { if (i & 1) j++; } uint kernel_part(uint i) { if (i & 1) return 0; return simd_sum(1u); }\n"
        "namespace own { bool either(uint x, uint y) { return x || y; } } namespace own { uint simd_sum(uint x) { return x; } }\n"
        "uint to_four(uint i) { constexpr uint four = 4; for (uint j = 0; j < four; ++j) i = simd_sum(i); return i; } kernel void", 1)  # fmt: skip
    text = metalmm.compiler.preprocess(text, "own.metal", for_metal=True)
    lowered = [cuda.cxx.lower(text, "k", {}, compiler="nvrtc", converged=converged) for converged in (False, True)]
    assert ["METALMM_MASKS" in x for x in lowered] == [kept, False] == [bool(re.search("fiber::(Scope|Branch|leaves)", x)) for x in lowered]
    assert cuda.build(KernelText(text, "own.metal", is_preprocessed=True), "k", {}, 90).read_bytes().startswith(b"\x7fELF")
    is_bounded = bool(re.search(r"; j < 4 *; [^;]*j\+\+\)\s*\{ if \(!::metalmm::fiber::goes", lowered[0]))
    assert is_bounded == ("j < 4 &&" in body and "++j" not in body and "||" not in body), "what compilers unroll by stays in the head"


def test_a_word_of_a_class_that_is_aligned_less_comes_in_parts() -> None:
    """As Apple's GPUs load it; as one it is a fault here, that ends the context."""
    text = HEAD + "struct B { half d; uchar qh[4], qs[16]; }; struct P { device const float* p; }; struct G { uint2 d; uint v[8]; };\n" + (
        "kernel void k(device const B* b, device uint* y, device float* f, device const G* g, device uint4* v) {"
        " device const B* x = b + 1; device const B& r = b[2]; P s{f}; device const uint* p = &((device const uint*)x->qs)[1];"
        " y[0] = 0x50005u & *((device const uint*)x->qh); y[1] = ((device const uint *)r.qs)[1]; f[0] = ((device const float*)s.p)[3];"
        " v[0] = *(device const uint4*)g->v; if (f[1] > 9) y[2] = *p; }\n"
    )  # fmt: skip
    ptx = ptx_of(text)
    assert re.findall(r"ld\.global[.\w]*\.([uf]\d+)", ptx) == ["u16"] * 4 + ["f32"] + ["u32"] * 4 + ["f32", "u32"]


def test_headers_that_changed_under_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    source = HEAD + f"kernel void k({ARGS}) {{ f[0] = 0.{os.urandom(4).hex().translate(str.maketrans('abcdef', '012345'))}f; }}\n"
    with monkeypatch.context() as changed:
        changed.setattr(metalmm.modules.header_digest, "__wrapped__", lambda: "of others")
        with pytest.raises(CompileError, match="have changed since this process began"):
            built(source)
    assert built(source).startswith(b"\x7fELF"), "what was made of the others is not kept"


def test_a_product_on_tensor_cores_has_its_operands_in_order() -> None:
    """The one instruction that the fake GPU has its own version of: runtime/matrix.h, beside runtime/cuda/matrix.h."""
    source = HEAD + (
        "kernel void k(device const float4* c, device const uint4* a, device const uint2* b, device float4* d) {"
        " d[0] = metal::mma_16x8x16(c[0], a[0], b[0]); }\n"
    )
    ptx = ptx_of(source)
    loads = {re.sub(r"\s", "", row[1]) for row in re.finditer(r"ld\.global[.\w]*\.v[24]\.\w+\s+\{([^}]*)\}", ptx)}
    product = re.search(
        r"mma\.sync\.aligned\.m16n8k16\.row\.col\.f32\.f16\.f16\.f32\s+\{([^}]*)\},\s*\{([^}]*)\},\s*\{([^}]*)\},\s*\{([^}]*)\}", ptx
    )
    stored = re.search(r"st\.global[.\w]*\.v4\.\w+\s+\[[^]]*\],\s*\{([^}]*)\}", ptx)
    assert product and stored, ptx
    d, a, b, c = (re.sub(r"\s", "", part) for part in product.groups())
    assert {a, b, c} <= loads and d == re.sub(r"\s", "", stored[1]), ptx


def test_a_half_goes_to_the_function_of_floats() -> None:
    """NVRTC, to which half is a class, cannot choose; as MLX's log1p is called."""
    source = HEAD + (
        "inline float own(float x, float y) { return x + y; }\n"
        "inline bfloat own(bfloat x, bfloat y) { return x; }\n"
        "template <typename T> struct Op { T operator()(T x) { return own(x, x); } };\n"
        "kernel void k(device half* x, device float* y) {\n  y[0] = own(x[0], x[1]);\n  x[0] = Op<half>()(x[1]);\n}\n"
    )
    assert built(source).startswith(b"\x7fELF")
    assert built(
        HEAD
        + "float f(float x) { return x; } float f(bfloat x) { return x; } kernel void k(device float* y) { half h = half(y[1]); y[0] = f(h); }"
    )
    assert built(HEAD + "kernel void k(device half* x, device float* y) {\n  y[0] = x[0] > 1.0h\n      ? x[1]\n      : (x[2] + y[1]);\n}\n")
    both = "struct Both { operator float() const { return 0; } operator bfloat() const { return bfloat(0.0f); } };\n"
    with pytest.raises(CompileError, match="more than one instance of overloaded function"):  # Apple's compiler cannot choose, either
        built(source.replace("inline bfloat", both + "inline bfloat").replace("own(x[0], x[1])", "own(Both(), Both())"))


def test_what_was_left_out_is_not_walked_over_for_each_word(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of MLX's binary.metal all but one operator is; the lowering for its log1p of a half then took minutes."""
    other = "".join(f"kernel void other{i}(device float* y) {{ y[0] = {i}.0f; }}\n" for i in range(400))
    source = HEAD + other + "kernel void k(device half* x) { x[0] = log1p(exp(x[1] - x[0])); }\n"
    previous, walked = Source.previous, list[int]()
    monkeypatch.setattr(Source, "previous", lambda self, i: walked.append(i) or previous(self, i))
    text = metalmm.compiler.preprocess(source, "own.metal", for_metal=True)
    lowered = cpu.lower(text, "k", {}, name="own.metal", compiler="nvrtc", choose={f"own.metal:{source.count(chr(10))} log1p"})
    assert "promoted(" in lowered and len(walked) < 400


BARRIERS = {
    "in a branch": ("if (i < 3) threadgroup_barrier(mem_flags::mem_none);", True),
    "in a branch of a function": ("if (i < 3) load();", True),
    "in a switch": ("switch (i) { case 1: load(); }", True),
    "in else": ("if (i > 3) h[0] = 1.0h; else { load(); }", True),
    "of a simdgroup": ("if (i < 3) simdgroup_barrier(mem_flags::mem_none);", False),
    "in a loop": ("for (uint j = 0; j < 3; j++) load();", False),
    "beside a branch": ("if (i < 3) h[0] = 1.0h; load();", False),
    "in a branch of the compiler's": ("if constexpr (sizeof(half) == 2) load();", False),
}


@pytest.mark.parametrize(("body", "may_skip"), BARRIERS.values(), ids=BARRIERS)
def test_barriers_that_lanes_may_skip_count_simdgroups(body: str, may_skip: bool) -> None:
    """And nothing else does: neither a kernel of ours nor a word that names such a function elsewhere."""
    text = HEAD + (
        "void load() { threadgroup_barrier(mem_flags::mem_threadgroup); }\n"
        "constexpr uint tiles(uint n) { uint load = 0; for (uint j = 0; j < n; j++) load += 2; return load; }\n"
        f"kernel void k({ARGS}) {{ uint tile[tiles(3)]; for (uint j = 0; j < 6; j++) tile[j] = j; {body} n[i] = tile[i % 6]; }}\n"
    )
    text = metalmm.compiler.preprocess(text, "own.metal", for_metal=True)
    lowered = [cuda.cxx.lower(text, "k", {}, compiler="nvrtc", converged=converged) for converged in (False, True)]
    assert ["METALMM_SKIPPED_BARRIERS" in x for x in lowered] == [may_skip, False]
    assert may_skip == ("Join" in lowered[0]) and "Join" not in lowered[1]
    if may_skip:
        assert cuda.build(KernelText(text, "own.metal", is_preprocessed=True), "k", {}, 90).read_bytes().startswith(b"\x7fELF")
