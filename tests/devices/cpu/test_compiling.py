"""The compiler, the cache, and what lowering refuses."""

from __future__ import annotations

import ctypes
import re
import shutil
import stat
import subprocess
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import metalmm
import numpy as np
import pytest
from metalmm import cache, compiler, kernel_source, manifest, modules
from metalmm.msl.program import Program
from metalmm.msl.targets import cpu as lowering
from metalmm.variant import specialization_of
from support.here import COMPILERS

HEAD = "#include <metal_stdlib>\nusing namespace metal;\n"
GOOD = HEAD + "kernel void k(device float* y) { y[0] = 7.0f; }\n"


@pytest.fixture
def device() -> metalmm.Device:
    """Lowering and the cache of modules are the CPU device's."""
    return metalmm.Device("cpu")


def result(device: metalmm.Device, source: str = GOOD) -> float:
    y = np.zeros(1, np.float32)
    device.compile(source).kernel("k")(y, grid=(1,), threadgroup=(1,))
    return float(y[0])


def counting(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    calls: list[Any] = []
    real = compiler.run

    def run(command: Any, text: str | None = None) -> str:
        calls.append(command)
        return real(command, text)

    monkeypatch.setattr(compiler, "run", run)
    return calls


def builds(calls: list[Any]) -> int:
    return sum("-shared" in c for c in calls)


def test_entries_are_kept_and_found(fresh: Path, monkeypatch: pytest.MonkeyPatch, device: metalmm.Device) -> None:
    calls = counting(monkeypatch)
    assert result(device) == 7
    assert builds(calls) == 1
    assert result(device) == 7
    assert builds(calls) == 1
    assert result(device, GOOD.replace("7.0f", "8.0f")) == 8
    assert builds(calls) == 2
    assert not list(fresh.glob(".new-*"))


@pytest.mark.parametrize("damage", ["truncate", "garbage", "no checksum", "empty checksum"])
def test_a_corrupt_entry_is_rebuilt(damage: str, fresh: Path, monkeypatch: pytest.MonkeyPatch, device: metalmm.Device) -> None:
    result(device)
    entry = next(fresh.glob("*.so"))
    checksum = entry.with_name(entry.name + ".sha256")
    if damage == "truncate":
        entry.write_bytes(entry.read_bytes()[:1000])
    elif damage == "garbage":
        entry.write_bytes(b"\x7fELF" + bytes(5000))
    elif damage == "no checksum":
        checksum.unlink()
    else:
        checksum.write_text("")
    calls = counting(monkeypatch)
    assert result(device) == 7
    assert builds(calls) == 1


PARSED = {"gcc": ("-include", "*.gch"), "clang": ("-include-pch", "*.pch")}


@pytest.mark.usefixtures("each_compiler")
def test_headers_are_parsed_once(fresh: Path, monkeypatch: pytest.MonkeyPatch, device: metalmm.Device) -> None:
    """And where what is kept of them is no good, or gone, a kernel is compiled all the same."""
    monkeypatch.setattr(modules, "_parsed", {})
    calls, (flag, files) = counting(monkeypatch), PARSED[compiler.find_compiler().kind]

    def parsed() -> int:
        return sum("c++-header" in c for c in calls)

    assert result(device) == 7 and result(device, GOOD.replace("7.0f", "8.0f")) == 8
    assert parsed() == 1 and [sum(what in c for c in calls if "-shared" in c) for what in ("-shared", flag)] == [2, 2]
    kept = next(fresh.glob(files))
    kept.write_bytes(b"nothing that a compiler has parsed")
    assert result(device, GOOD.replace("7.0f", "9.0f")) == 9
    assert parsed() == 1 and builds(calls) == 4 and not kept.exists()
    assert result(device, GOOD.replace("7.0f", "10.0f")) == 10
    assert parsed() == 1 and builds(calls) == 5, "not tried again in this process"
    modules._parsed.clear()
    assert result(device, GOOD.replace("7.0f", "11.0f")) == 11 and kept.exists() and parsed() == 2
    kept.unlink()
    assert result(device, GOOD.replace("7.0f", "12.0f")) == 12 and parsed() == 3
    with pytest.raises(metalmm.CompileError, match="nobody"):
        result(device, GOOD.replace("7.0f", "nobody"))
    assert builds(calls) == 8, "a mistake is compiled once"
    monkeypatch.setenv("METALMM_LINT", "0")
    swaps = GOOD.replace("y[0] = 7.0f;", "float a = 7.0f, b = 1.0f; metal::swap(a, b); y[0] = b;")
    assert result(device, swaps) == 7 and builds(calls) == 9 and parsed() == 4, "other headers, which are parsed once, too"
    assert {flag, "-DMETALMM_UTILITIES"} <= set(next(c for c in reversed(calls) if "-shared" in c))
    with metalmm.Device("cpu", debug=True) as strict:
        assert result(strict) == 7 and parsed() == 5
        assert any(flag in c and "-c" in c for c in calls)
    a, flags = compiler.find_compiler(), ["-O1"]
    keys = {modules._header_key(a, flags), modules._header_key(a, ["-O2"])}
    monkeypatch.setattr(modules, "header_digest", lambda: "another")
    assert len(keys | {modules._header_key(a, flags)}) == 3


@pytest.mark.usefixtures("each_compiler")
def test_parsed_headers_that_are_not_to_be_had(fresh: Path, monkeypatch: pytest.MonkeyPatch, device: metalmm.Device) -> None:
    monkeypatch.setattr(modules, "_parsed", {})
    monkeypatch.setenv("METALMM_LINT", "0")  # whose declarations are parsed, too
    calls, run, (flag, files) = counting(monkeypatch), compiler.run, PARSED[compiler.find_compiler().kind]
    monkeypatch.setattr(compiler, "run", lambda command, text=None: "" if "c++-header" in command else run(command, text))
    assert result(device) == 7 and result(device, GOOD.replace("7.0f", "8.0f")) == 8
    assert builds(calls) == 2 and not any(flag in c for c in calls) and not list(fresh.glob(f"{files}*"))


FALLS = {
    "gcc": "g++ failed:\ninternal compiler error: Segmentation fault",
    "clang": "clang++ failed:\nfatal error: error in backend: Invalid abbrev number",
}


@pytest.mark.usefixtures("each_compiler")
def test_parsed_headers_at_which_a_compiler_falls_over(fresh: Path, monkeypatch: pytest.MonkeyPatch, device: metalmm.Device) -> None:
    """Damaged where it looks late, it does not say of what."""
    monkeypatch.setattr(modules, "_parsed", {})
    monkeypatch.setenv("METALMM_LINT", "0")  # whose declarations are parsed, too
    calls, run, (flag, files) = counting(monkeypatch), compiler.run, PARSED[compiler.find_compiler().kind]

    def fall(command: Any, text: str | None = None) -> str:
        if flag in command:
            raise metalmm.CompileError(FALLS[compiler.find_compiler().kind])
        return run(command, text)

    monkeypatch.setattr(compiler, "run", fall)
    assert result(device) == 7 and result(device, GOOD.replace("7.0f", "8.0f")) == 8
    assert builds(calls) == 2 and not list(fresh.glob(files))


@pytest.mark.usefixtures("each_compiler")
def test_headers_that_changed_under_a_process(fresh: Path, monkeypatch: pytest.MonkeyPatch, device: metalmm.Device, tmp_path: Path) -> None:
    """What is made of them would be kept under the name of those that it has read, for every process."""
    shutil.copytree(compiler.MSL, tmp_path / "msl")
    monkeypatch.setattr(compiler, "MSL", tmp_path / "msl")
    monkeypatch.setattr(modules, "_parsed", {})
    for cached in (modules.header_digest,):
        cached.cache_clear()
    try:
        source = GOOD.replace("7.0f", "metal::exp(y[0])")
        assert result(device) == 7
        math, other = tmp_path / "msl" / "runtime" / "math.h", "(100.0f + __builtin_expf(x))"
        before = math.read_text()
        math.write_text(before.replace("__builtin_expf(x)", other))
        assert other in math.read_text()
        with pytest.raises(metalmm.CompileError, match="have changed since this process began; begin another"):
            result(device, source)
        assert result(device) == 7, "what was made before is there"
        math.write_text(before)
        assert result(device, source) == 1
    finally:
        monkeypatch.undo()
        for cached in (modules.header_digest,):
            cached.cache_clear()


def test_a_compiler_without_room(fresh: Path, monkeypatch: pytest.MonkeyPatch, device: metalmm.Device) -> None:
    """A full disk is no mistake of the kernel's: another folder is taken, and said."""
    run = compiler.run
    monkeypatch.setattr(cache, "_temporary", None)  # which is said once

    def full(command: Any, text: str | None = None) -> str:
        if any(str(fresh) in c and c.endswith(".so") for c in command):
            raise metalmm.CompileError("clang++ failed:\n/usr/bin/ld: final link failed: No space left on device")
        return run(command, text)

    monkeypatch.setattr(compiler, "run", full)
    with pytest.warns(UserWarning, match="takes no more"):
        assert result(device) == 7


def test_an_unwritable_cache_falls_back_with_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: metalmm.Device) -> None:
    (tmp_path / "file").write_text("")  # as root, permissions stop nobody; a file in the way does
    monkeypatch.setenv("METALMM_CACHE", str(tmp_path / "file" / "cache"))
    monkeypatch.setattr(cache, "_folder", None)
    with pytest.warns(UserWarning, match="cannot be written .*; using .* Set METALMM_CACHE to a writable folder"):
        assert result(device) == 7
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # once
        assert result(device) == 7


def test_no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, device: metalmm.Device) -> None:
    monkeypatch.setenv("METALMM_CXX", "no-such-compiler")
    with pytest.raises(metalmm.CompilerNotFoundError, match="METALMM_CXX is 'no-such-compiler'"):
        device.compile(GOOD)
    monkeypatch.delenv("METALMM_CXX")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(metalmm.CompilerNotFoundError, match=r"needs clang\+\+ or g\+\+"):
        device.compile(GOOD)


def test_a_compiler_that_fails_passes_its_words_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, device: metalmm.Device) -> None:
    fake = tmp_path / "fake-c++"
    fake.write_text(f'#!/bin/sh\ncase "$*" in *-dM*) exec {COMPILERS[0]} "$@";; esac\necho "out of ideas" >&2\nexit 1\n')
    fake.chmod(fake.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("METALMM_CXX", str(fake))
    with pytest.raises(metalmm.CompileError, match="out of ideas"):
        device.compile(GOOD)


@pytest.mark.usefixtures("each_compiler")
def test_messages_point_into_the_metal_file(tmp_path: Path, device: metalmm.Device) -> None:
    path = tmp_path / "broken.metal"
    path.write_text(
        HEAD
        + "\n#define TWICE(x) \\\n  ((x) + \\\n   (x))\nkernel void k(device float* y) {\n  y[0] = TWICE(1.0f);\n  y[1] = undefined_name;\n}\n"
    )
    with pytest.raises(metalmm.CompileError, match=r"kernel 'k': .*\n(.*\n)*.*broken\.metal:9:.*undefined_name"):
        device.compile(path).kernel("k")
    with pytest.raises(metalmm.CompileError, match=r"broken\.metal:2.*\n*.*missing\.h|missing\.h"):
        device.compile(path.read_text().replace("#define", '#include "missing.h"\n#define'))


REFUSED = [
    ("kernel void k(texture2d<float> t [[texture(0)]], device float* y) {}", r"<source>:3: 'texture2d' is not supported on the CPU device"),
    ("kernel void k(device float* y) {\n  constexpr sampler s;\n}", r"<source>:4: 'sampler' is not supported"),
    (
        "kernel void k(device float* y, uint i [[sample_id]]) {}",
        r"<source>:3: the attribute \[\[sample_id\]\] of a kernel argument is not supported",
    ),
    ("kernel void k(device float* y, uint i) {}", r"<source>:3: the kernel argument 'uint i' has no attribute"),
    ("kernel void k(device float* y [[buffer(40)]]) {}", r"buffer index 40 is not in 0 to 30"),
    ("kernel void k(device float* y [[buffer(31)]]) {}", r"buffer index 31 is not in 0 to 30"),
    ("kernel void k(device float* y [[buffer(N)]]) {}", r"'N' is not an integer constant expression"),
    ("kernel void k(device float* y) {\n  for (threadgroup float x; ;) {}\n}", r"<source>:4: 'threadgroup' in a position"),
    (
        "float f(device float* p) { return 1; }\nfloat f(threadgroup float* p) { return 2; }\nkernel void k(device float* y) { y[0] = f(y); }",
        r"<source>:4: 'f' differs from its overload at <source>:3",
    ),
    ("kernel void k(device float* y) { float x[3] = {[1 ... 2] = 1.0f}; }", r"designators"),
    ("kernel void k(device float* y) {", r"is never closed"),
    ("template", r"the file ends in the middle of a declaration"),
    ("kernel void k(device float* y) { double d = 1; y[0] = d; }", r"<source>:3: 'double' is not supported"),
    (
        "constant int n [[function_constant(2)]];\nkernel void k(device float* y) { y[0] = n; }",
        r"function constant 'n' \(index 2\) is used and not given; pass constants=\{2",
    ),
]


@pytest.mark.parametrize(("source", "message"), REFUSED)
def test_what_lowering_refuses(source: str, message: str, device: metalmm.Device) -> None:
    with pytest.raises(metalmm.LoweringError, match=message):
        device.compile(HEAD + source).kernel("k")


def test_a_refused_kernel_does_not_spoil_its_file(device: metalmm.Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("METALMM_LINT", "0")
    source = (
        HEAD
        + "constant int n [[function_constant(0)]];\nkernel void t(texture2d<float> x [[texture(0)]]) {}\nkernel void u(device int* y) { y[0] = n; }\n"
    )
    assert result(device, source + "kernel void k(device float* y) { y[0] = 7.0f; }") == 7


def test_unknown_kernels_and_constants(device: metalmm.Device) -> None:
    library = device.compile(GOOD)
    with pytest.raises(metalmm.CompileError, match=r"no kernel 'q'; there are: k"):
        library.kernel("q")
    with pytest.raises(metalmm.CompileError, match=r"no function constant 'five'; there are: none"):
        library.kernel("k", constants={"five": 1})
    library.kernel("k", constants={5: 1})  # Metal takes values for indices that a function does not have


def test_lines_stay_where_they_were() -> None:
    text = (
        HEAD
        + "\n\nkernel void k(device float* y,\n              constant int& n) {\n  threadgroup float x[4],\n      z[2];\n  y[0] = 1.0h;\n}\n"
    )
    lowered = lowering.lower(compiler.preprocess(text, "a.metal"), "k", name="a.metal")
    line = next(i for i, row in enumerate(lowered.splitlines()) if "half(1.0)" in row)
    marker = max(i for i, row in enumerate(lowered.splitlines()[:line]) if row.startswith("#"))
    assert int(lowered.splitlines()[marker].split()[1]) + line - marker - 1 == 9


@pytest.mark.usefixtures("fresh")
def test_what_the_preprocessor_leaves_is_kept_but_of_files_that_may_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    calls, text = counting(monkeypatch), f'{HEAD}#line 7 "{tmp_path}"\n#if __has_include("mine.h")\n#include "mine.h"\n#endif\nMINE\n'
    with pytest.raises(metalmm.CompileError):  # the compiler's words, of a name that no file system takes
        compiler.preprocess(f'#include "{"a" * 5000}"\n', "a.metal")
    calls.clear()
    for defines, mine, runs in ((None, "", 1), (None, "", 1), ({"MINE": 5}, "", 2), (None, "five", 3), (None, "six", 4)):
        if mine:
            Path("mine.h").write_text(f"#define MINE {mine}\n")
        found = compiler.preprocess(text, "a.metal", defines=defines).split()[-1]
        assert (found, len([c for c in calls if "-undef" in c])) == (mine or ("5" if defines else "MINE"), runs)


def test_swizzles_that_few_use_are_asked_for() -> None:
    """They cost every other text a quarter of its compilation."""
    for expression, asks in (
        ("v.xy", False),
        ("v.x", False),
        ("p->zw", False),
        ("v.xyz", True),
        ("v.xyxy.xy", True),
        ("p->rg", True),
        ("q.xyzzy", False),
    ):
        text = f"{HEAD}struct Q {{ float xyzzy; }};\nkernel void k(device float4* p) {{ float4 v = *p; Q q; auto x = {expression}; }}\n"
        assert ("METALMM_ALL_SWIZZLES" in lowering.lower(text, "k", name="a.metal")) == asks, expression


def test_what_a_kernel_says_of_unrolling() -> None:
    """Of a whole loop it is for a GPU's compiler: a CPU's would take twice as long. A number is kept."""
    loops = {
        "clang loop unroll(full)": None,
        "unroll": None,
        "clang loop unroll_count(4)": 4,
        "unroll(2)": 2,
        "clang loop unroll(disable)": 0,
    }
    text = "".join(f"#pragma {said}\n  for (int i = 0; i < 9; i++) y[i] += {i}.0f;\n" for i, said in enumerate(loops))
    for kind, whole, some in (("clang", "", "unroll"), ("gcc", "", "GCC unroll"), ("nvrtc", "unroll", "unroll")):
        lowered = lowering.lower(f"{HEAD}kernel void k(device float* y [[buffer(0)]]) {{\n{text}}}\n", "k", name="a.metal", compiler=kind)
        wanted = [whole if count is None else f"{some} {count}" if count else "" for count in loops.values()]
        assert re.findall(r"#pragma (.*unroll.*)", lowered) == list(filter(None, wanted)), kind


class _ArgInfo(ctypes.Structure):
    _fields_ = (
        ("kind", ctypes.c_uint8),
        ("index", ctypes.c_uint8),
        ("enabled", ctypes.c_bool),
        ("is_const", ctypes.c_bool),
        ("bytes", ctypes.c_uint32),
    )


class _KernelInfo(ctypes.Structure):  # the beginning of abi::KernelInfo
    _fields_ = (
        ("version", ctypes.c_uint32),
        ("max_threads", ctypes.c_uint32),
        ("count", ctypes.c_uint32),
        ("args", ctypes.POINTER(_ArgInfo)),
    )


ARGUMENTS = (
    HEAD
    + """
constant bool with_c [[function_constant(3)]];
constant bool without = !with_c;
constexpr constant int N = 3;
struct Inner { half h; float4 f; };
struct P { uint m, n; float alpha[N]; packed_float3 p; Inner inner; uchar flag; };
struct Empty {};
template <class T> struct Pair { T a, b; };
kernel void a(device float* x, const device half* y, constant P& p, device const packed_half3* z, half const device* w,
              device atomic_uint& count, threadgroup float* t [[threadgroup(1)]], constant uint4* v [[buffer(9)]], uint i [[thread_position_in_grid]]) {}
kernel void b(device float3* x [[buffer(4)]], const device float2x3* m [[buffer(2)]], constant short& s [[buffer(7)]],
              const device float* c [[buffer(1), function_constant(with_c)]], device void* raw [[buffer(3)]]) {}
kernel void c(const device Pair<float>* x, device bool* y, const constant P* q, device metal::vec<ushort, 3>& r) {}
template <class T, int N> kernel void d(const device T* x, device vec<T, 4>* y, constant int (&sizes)[2]) {}
template [[host_name("d_half")]] kernel void d<half, 3>(const device half*, device vec<half, 4>*, constant int (&)[2]);
template [[host_name("d_bfloat")]] kernel decltype(d<bfloat, 3>) d<bfloat, 3>;
"""
)


@pytest.mark.parametrize("kernel", ["a", "b", "c", "d_half", "d_bfloat"])
@pytest.mark.parametrize("with_c", [True, False])
def test_a_text_says_of_arguments_what_the_compiler_says(kernel: str, with_c: bool) -> None:
    """Index, kind and const of each; sizes where the text alone says them, else less than they are."""
    text = compiler.preprocess(ARGUMENTS, "a.metal")
    constants: dict[int | str, Any] = {3: with_c}
    module = ctypes.CDLL(
        str(modules.build(modules.Job(kernel_source.KernelText(text, "a.metal", is_preprocessed=True), kernel, constants)))
    )
    info = _KernelInfo.in_dll(module, "metalmm_kernel")
    expected = {(a.index, a.kind): a for a in info.args[: info.count] if a.kind <= 1 and a.enabled}
    found = {(a.index, int(not a.is_buffer)): a for a in Program(text, "a.metal").arguments(kernel, constants)}
    assert set(found) == set(expected)
    for place, a in found.items():
        assert a.is_const == expected[place].is_const or place[1] == 1
        unknown = "Pair" in a.type or a.type == "int ("
        pointed = place[1] == 1 and expected[place].bytes == 0  # a pointer to threadgroup memory: nobody says how much it needs
        assert pointed or a.bytes == expected[place].bytes or (unknown and a.bytes == 1), f"{a} {expected[place].bytes}"


def test_types_of_arguments() -> None:
    found = {a.index: a.type for a in Program(compiler.preprocess(ARGUMENTS, "a.metal"), "a.metal").arguments("d_half")}
    assert (found[0], found[1]) == ("half", "vec < half , 4 >")
    for v in {v.kernel: v for u in metalmm.variants() for v in u.kinds() if v.kernel}.values():
        first = next(v.specializations())
        arguments = Program(compiler.preprocess(v.assemble(first), "v"), "v").arguments(kernel_source.host_name(v.instance(first)))
        found_all = [a for a in arguments if a.is_buffer]
        no_scales = v.storage == "dense" and v.kernel != "fused_columns"  # which has them of any B
        if v.matrix_count > 1:
            expected, written = [0, 1, 2, *((4, 5, 8, 9, 10, 13, 14, 15) if no_scales else range(4, 18))], (2, 9, 14)
        else:
            maps = [8] if "wgmma" in v.needs else []  # kernels/cuda/tma.h
            expected, written = [0, 2, 3, 4, 5] if v.library else [*range(6), *([6, 7] if v.storage != "dense" else []), *maps], (2,)
        assert [a.index for a in found_all] == expected
        assert [a.is_const for a in found_all] == [a.index not in written for a in found_all]
        assert found_all[expected.index(5)].bytes == 20 * 4 * (3 if v.matrix_count > 1 else 1), "MatmulParams"
        assert {a.bytes for a in found_all if a.index != 5 and (a.index != 8 or v.matrix_count > 1)} == (
            {2, 4} if v.library else {2} if no_scales else {1, 2}
        )


def test_constants_of_odd_values() -> None:
    """An enumerator that 2,000 others come before; constants made of themselves; shifts and numbers beyond any type."""
    many = ", ".join(f"e{i}" for i in range(2000))
    text = HEAD + f"enum {{ {many}, at = e1500 - 1497 }};\nkernel void k(device float* y [[buffer(at)]]) {{ y[0] = 1.0f; }}\n"
    assert [a.index for a in Program(text).arguments("k")] == [3]
    assert metalmm.Device("cpu").compile(text).kernel("k").buffer_indices == [3]
    for index in ("A", "B", "1 << 99999999999", "1.5", "1 / 0"):
        source = (
            HEAD
            + f"constant int A = A;\nconstant int B = C;\nconstant int C = B;\nkernel void k(device float* y [[buffer({index})]]) {{}}\n"
        )
        with pytest.raises(metalmm.CompileError, match=r"<source>:\d+: .*(integer constant|made of itself)"):
            metalmm.Device("cpu").compile(source).kernel("k")
    nested = "struct S0 { float x; };\n" + "".join(f"struct S{i + 1} {{ S{i} {', '.join('abcdefghijkl')}; }};\n" for i in range(12))
    (argument,) = Program(nested + "kernel void k(constant S7& s) {}").arguments("k")
    assert argument.bytes == 4 * 12**7


def test_a_text_with_comments_aliases_and_derived_constants() -> None:
    source = """
    using Out = device float*;  // const, so they say
    typedef const float In;
    constant int N [[function_constant(0)]];
    constant bool has_c = N > 4 && N != 7;  /* , device float* z */
    kernel void k(Out y [[buffer(0)]],  // const device float* x [[buffer(7)]],
                  device In* x [[buffer(1)]], constant unsigned short& s [[buffer(2)]],
                  const device float* c [[buffer(3), function_constant(has_c)]]) {}
    """
    for n, indices in ((3, [0, 1, 2]), (5, [0, 1, 2, 3]), (7, [0, 1, 2])):
        found = Program(source).arguments("k", {0: n})
        assert [(a.index, a.is_const) for a in found] == [(i, i > 0) for i in indices]
        assert found[2].type == "ushort"


def test_a_constant_that_is_not_there_is_named(device: metalmm.Device) -> None:
    source = HEAD + "constant bool doubled [[function_constant(2)]];\nkernel void k(device float* y) { y[0] = doubled ? 2.0f : 1.0f; }\n"
    library = device.compile(source)
    with pytest.raises(metalmm.CompileError, match="no function constant 'doubld'; there are: 2, doubled"):
        library.kernel("k", {"doubld": True})
    with pytest.raises(metalmm.ArgumentError, match=r"constants is \[1\]"):
        library.kernel("k", [1])  # type: ignore[arg-type]
    with pytest.raises(metalmm.CompileError, match="more than 64 bits"):
        library.kernel("k", {2: 10**5000})


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("struct P { int s[sizeof(int4) / 4]; };\nkernel void k(constant P& p) {}", [(0, True, 1, "P")]),
        ("constexpr constant int N{4};\nstruct P { float x[int(N)]; };\nkernel void k(constant P& p) {}", [(0, True, 1, "P")]),
        (
            "namespace c { constant int A = 1; constant int B = A + 1; }\nkernel void k(device float* y [[buffer(c::B)]]) {}",
            [(2, False, 4, "float")],
        ),
        (
            "namespace c { constant int base = 3; enum { X = base, Y }; }\nkernel void k(device float* y [[buffer(c::Y)]]) {}",
            [(4, False, 4, "float")],
        ),
        ("constant int N = -7 / 2 + 6;\nkernel void k(device float* y [[buffer(N)]]) {}", [(3, False, 4, "float")]),
        ("constant int N = 6 & 3 == 2;\nkernel void k(device float* y [[buffer(N)]]) {}", [(0, False, 4, "float")]),
        (
            "typedef half H;\nusing T = int;\ntemplate <class T> kernel void k(constant T& x, device H* y) {}\n"
            'template [[host_name("k")]] kernel void k<float>(constant float&, device H*);',
            [(0, True, 4, "float"), (1, False, 2, "half")],
        ),
        ("typedef struct S S;\nstruct S { float4 v; int n; };\nkernel void k(constant S& s) {}", [(0, True, 32, "S")]),
        (
            '/* # 7 "other.metal" */ kernel void k(const device void* p, constant unsigned char& b) {}',
            [(0, True, 1, "void"), (1, True, 1, "uchar")],
        ),
        (
            "constant int a [[function_constant(0)]];\nconstant bool b = is_function_constant_defined(a) ? a > 0 : true;\n"
            "kernel void k(const device float* x [[buffer(0), function_constant(b)]], constant int& y [[buffer(0), function_constant(b)]]) {}",
            [(0, True, 4, ""), (0, True, 4, "")],
        ),
    ],
)
def test_what_a_parser_makes_of_texts_that_need_a_compiler(source: str, expected: list[tuple[int, bool, int, str]]) -> None:
    found = [(a.index, a.is_const, a.bytes, a.type) for a in Program(source).arguments("k", {0: 1})]
    assert found == expected


def test_texts_that_only_a_compiler_understands_still_compile(device: metalmm.Device) -> None:
    source = HEAD + "constexpr constant int N{4};\nstruct P { int s[sizeof(int4) / 4]; float x[N > 3 ? N : 3]; };\n"
    source += "kernel void k(device float* y, constant P& p) { y[0] = p.x[3]; }"
    y = np.zeros(1, np.float32)
    device.compile(source).kernel("k")(y, np.arange(8, dtype=np.float32).tobytes(), threads=1, threadgroup=1)
    assert y[0] == 7


def test_kernels_of_one_library_from_many_threads(device: metalmm.Device) -> None:
    source = HEAD + "enum { kA, kB, kC = 5 };\nstruct P { float x[kC]; };\n"
    source += "".join(
        f"kernel void k{i}(constant P& p [[buffer(kB)]], device float* y [[buffer(kC)]]) {{ y[0] = p.x[4]; }}\n" for i in range(4)
    )
    library = device.compile(source)
    with ThreadPoolExecutor(8) as pool:
        kernels = list(pool.map(lambda i: library.kernel(f"k{i % 4}"), range(64)))
    assert {tuple(k.buffer_indices) for k in kernels} == {(1, 5)}


@pytest.mark.parametrize("is_quantized", [True, False])
def test_loops_over_sixteen_become_vectors(is_quantized: bool, fresh: Path, each_compiler: str, device: metalmm.Device) -> None:
    """Five times the speed hangs on it, and in g++ on how a conversion is written (csrc/msl/runtime/types.h)."""
    cpu = Path("/proc/cpuinfo")
    if not shutil.which("objdump") or not cpu.exists() or "avx512f" not in cpu.read_text().split():
        pytest.skip("NOT run: it looks for AVX-512 by objdump")
    x, w, variant = np.ones((1, 64), np.float16), np.ones((8, 64), np.float16), "gemv_nt_thread/c4_tg32"
    if is_quantized:
        metalmm.matmul(variant, x, metalmm.quantize(w, "q8_0"), device=device)
    else:
        metalmm.matmul_fused(variant, x, [w, w], device=device)
    (library,) = fresh.glob("*.so")
    code = subprocess.run(["objdump", "-d", library], capture_output=True, text=True, check=True).stdout

    def count(pattern: str) -> int:
        return len(re.findall(pattern, code, re.MULTILINE))

    vectors = count(r"v(?:mul|fmadd\w+)ps\s.*%[yz]mm\d+$")
    assert vectors >= 2
    # clang 14 unrolls loops eightfold, both, where it takes the machine for a Zen 3: 60 and 80 of them.
    assert count(r"v(?:mul|fmadd\w+)ss\s") <= max(24, 2 * vectors), "tails alone are done one by one"
    assert not is_quantized or count(r"vcvtdq2ps\s.*%[yz]mm\d+$") >= 2


def test_kernels_of_one_file_are_lowered_at_once(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Instances of one template, to what each is alone: else `build` would compile it anew, by another key."""
    jobs, parses, groups = list[modules.Job](), list[str](), list[dict[str, Any]]()
    for end, dtype in (("1", "float16"), ("2", "bfloat16"), ("swiglu", "float32"), ("1", "float32")):  # two templates
        for v in ("small_m/t2_s8_d2_tg256", "small_m/t4_s8_d2_tg256", "gemv_nt/l8_d7_tg256"):
            _, source, kernel = manifest.kernel_text(v, specialization_of(dtype, "nt", "dense", end))
            assert source
            jobs.append(modules.Job(source, kernel))
    parsed = lowering.parsed
    monkeypatch.setattr(lowering, "parsed", lambda kind, text, name: parses.append(name) or parsed(kind, text, name))
    monkeypatch.setattr(modules, "_build_group", groups.append)
    modules.build_together(jobs)
    assert len(parses) == 4, "two files of two templates each"
    (group,) = groups
    assert len(group) == len(jobs)
    for kernel in group.values():
        assert kernel.lowered() == modules._Kernel(kernel.job, kernel.cxx).lowered()
