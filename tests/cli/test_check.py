"""metalmm check: bugs that cost others days, in our words, with the lines of both sides; their mended twins; the command and what it writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import metalmm
import numpy as np
import pytest
from metalmm import check_command, checking, cli, compiler
from metalmm.pytest_plugin import metalmm_check  # noqa: F401  (a fixture)
from support.here import DEVICE

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="it runs on device cpu, whatever the default device is")

HEAD = "#include <metal_stdlib>\nusing namespace metal;\n"
ARGUMENTS = (
    "const device float* x [[buffer(0)]], device float* y [[buffer(1)]], uint t [[thread_index_in_threadgroup]], uint g"
    " [[threadgroup_position_in_grid]], uint lane [[thread_index_in_simdgroup]], uint sg [[simdgroup_index_in_threadgroup]]"
)
MET = "threadgroup_barrier(mem_flags::mem_threadgroup);"
# By whose thread it is: kinds, and the kernel from its line 4 on, where @ is what was missing.
KNOWN: dict[str, tuple[str, set[str], str, str]] = {
    "mlx-lm #1719: sums in the slots that others still read maxima from": ("race", {"k.metal:8", "k.metal:10"}, MET, f"""
  threadgroup float part[4];
  float m = simd_max(x[g * 128 + t]);
  if (lane == 0) part[sg] = m;
  {MET}
  for (uint i = 0; i < 4; i++) m = max(m, part[i]); @
  float s = simd_sum(exp(x[g * 128 + t] - m));
  if (lane == 0) part[sg] = s;
  {MET}
  if (t == 0) y[g] = part[0] + part[1] + part[2] + part[3];"""),
    "llama.cpp #3057: the mean is read while the next sum begins": ("race", {"k.metal:10", "k.metal:11"}, MET, f"""
  threadgroup float sums[128];
  sums[t] = x[g * 128 + t];
  for (uint step = 64; step > 0; step /= 2) {{
    {MET}
    if (t < step) sums[t] += sums[t + step];
  }}
  {MET} float mean = sums[0] / 128; @
  sums[t] = (x[g * 128 + t] - mean) * (x[g * 128 + t] - mean);
  {MET}
  if (t == 0) y[g] = sums[127];"""),
    "tilelang #2970: a tile stored by one simdgroup and loaded by another": ("race", {"k.metal:5", "k.metal:7"}, MET, """
  threadgroup float tile[4 * 64];
  simdgroup_float8x8 own = simdgroup_float8x8(float(sg)); simdgroup_store(own, tile + 64 * sg, 8);
  @ simdgroup_float8x8 other;
  simdgroup_load(other, tile + 64 * (sg ^ 1), 8);
  simdgroup_store(other, y + 64 * (4 * g + sg), 8);"""),
    "vllm-mlx #721: threads that return before a barrier": ("barrier", {"k.metal:5"}, "", f"""
  threadgroup float part[128]; if (t >= 96) @;
  part[t] = x[t]; {MET}
  y[g * 128 + t] = part[95 - min(t, 95u)];"""),
    "ds4 #837: one threadgroup reads what another writes in the same dispatch": ("race", {"k.metal:4", "k.metal:6"}, "", """
  if (g == 0) y[t] = x[t] + 1;
  threadgroup_barrier(mem_flags::mem_device);
  if (@) y[128 * (g + 1) + t] = y[t];"""),
}  # fmt: skip
# What stands for @ in the bug, and in its mended twin.
CHANGES = {"vllm-mlx #721": ("return", "y[0 * t + g * 128 + t] = 0"), "ds4 #837": ("true", "g == 0")}


def text_of(name: str, mended: bool) -> str:
    _, _, missing, body = KNOWN[name]
    bug, twin = CHANGES.get(name.partition(":")[0], ("", missing))
    return f"{HEAD}kernel void k({ARGUMENTS}) {{{body.replace('@', twin if mended else bug)}\n}}\n"


def x() -> Any:
    return np.random.default_rng(0).standard_normal(4 * 128).astype(np.float32)


@pytest.mark.rest(but=2)
@pytest.mark.parametrize("name", KNOWN, ids=lambda name: name.partition(":")[0])
def test_what_cost_others_days(name: str, each_compiler: str) -> None:
    kind, lines = KNOWN[name][:2]
    options: dict[str, Any] = {"grid": 2, "threadgroup": 128, "buffers": {0: x(), 1: np.zeros(1024, np.float32)}}
    Path("k.metal").write_text(text_of(name, False))
    found = metalmm.check(Path("k.metal"), **options)
    assert kind in {f.kind for f in found}, found
    assert lines <= {Path(place).name for f in found for place in f.places}, found
    Path("twin.metal").write_text(text_of(name, True))
    assert metalmm.check(Path("twin.metal"), **options) == []


OTHERS = {
    "bounds": "if (t == 3) y[g + 5000] = 1;",
    "alignment": "y[4 * t] = (*(const device float4*)(x + t)).x;",
    "coverage": "if (t != 7) y[t] = 1;",
    "order": "float v[2]; if (x[t] > 1e9f) v[t % 2] = 1; y[g * 128 + t] = as_type<float>((as_type<uint>(v[0]) & 0u) | g) * 0 + *(&v[t % 2]);",
}


@pytest.mark.parametrize("kind", ["bounds", "alignment", "coverage"])
def test_other_kinds(kind: str) -> None:
    buffers = {0: x(), 1: np.zeros(1024, np.float32)}
    found = metalmm.check(HEAD + f"kernel void k({ARGUMENTS}) {{ {OTHERS[kind]} }}", grid=1, threadgroup=128, buffers=buffers, outputs=[1])
    assert kind in {f.kind for f in found}, found


@pytest.mark.parametrize("body", ["int v; if (x[t] > 9) v = 1; y[t] = as_type<float>(v);", "float4 v; v.x = x[t]; y[t] = v.y;"])
def test_a_variable_that_nobody_set_shows_in_what_is_stored(body: str, each_compiler: str) -> None:
    options: dict[str, Any] = {"grid": 1, "threadgroup": 128, "buffers": {0: x(), 1: np.zeros(1024, np.float32)}}
    found = metalmm.check(HEAD + f"kernel void k({ARGUMENTS}) {{ {body} }}", **options)
    assert [(f.kind, f.text) for f in found] == [
        ("unset", "buffer 1: 128 of 1024 elements are a variable that was never set, the first is 0")
    ]
    twin = body.replace(" v;", " v = 0;", 1)
    assert metalmm.check(HEAD + f"kernel void k({ARGUMENTS}) {{ {twin} }}", **options) == []


def test_numbers_that_look_like_what_a_compiler_fills_with_are_numbers(each_compiler: str) -> None:
    """A second module, whose variables begin with zeros, tells."""
    halfs = np.arange(65536, dtype=np.uint16).view(np.float16)
    copies = "kernel void k(const device ushort* x, device ushort* y, uint i [[thread_position_in_grid]]) { y[i] = x[i]; }"
    assert metalmm.check(HEAD + copies, grid=64, threadgroup=1024, buffers={0: halfs, 1: np.zeros(65536, np.float16)}) == []
    masks = f"kernel void k({ARGUMENTS}) {{ y[t] = as_type<float>(t & 1 ? 0xaaaaaaaau : t & 2 ? 0xfefefefeu : 0xffffffffu); }}"
    assert metalmm.check(HEAD + masks, grid=1, threadgroup=128, buffers={0: x(), 1: np.zeros(128, np.float32)}) == []


def test_an_element_is_written_where_all_of_it_is() -> None:
    for body, kinds in (
        ("y[t] = 1;", []),
        ("((device half*)y)[2 * t] = 1;", ["coverage"]),
        ("y[t] = 1; ((device half*)y)[2 * t] = 1;", ["coverage"]),
    ):
        found = metalmm.check(
            HEAD + f"kernel void k({ARGUMENTS}) {{ {body} }}", grid=1, threadgroup=128, buffers={0: x(), 1: np.zeros(128, np.float32)}, outputs=1
        )  # fmt: skip
        assert [f.kind for f in found] == kinds, body


def test_unset_memory_that_its_reader_sets_is_told_where_bits_depend_on_it(each_compiler: str) -> None:
    """MLX's scan reads all of an array, and takes no notice of what nobody wrote."""
    options: dict[str, Any] = {"grid": 1, "threadgroup": 128, "buffers": {0: x(), 1: np.zeros(1024, np.float32)}}
    for body, kinds in (
        (f"s[t] += x[t]; {MET} y[t] = s[127 - t];", ["unset"]),
        (f"float v = simd_max(s[t]); s[t] = x[t] + 0 * (v > 3 ? 1 : 2); {MET} y[t] = s[127 - t];", []),
    ):
        found = metalmm.check(HEAD + f"kernel void k({ARGUMENTS}) {{ threadgroup float s[128]; {body} }}", **options)
        assert [f.kind for f in found] == kinds and all("which no thread wrote" in f.text and f.places for f in found), found


def test_what_is_bound_twice_is_one_array() -> None:
    array = np.zeros(1024, np.float32)
    source = HEAD + f"kernel void k({ARGUMENTS}) {{ y[t] = x[t + 1]; }}"
    assert {f.kind for f in metalmm.check(source, grid=1, threadgroup=128, buffers={0: array, 1: array})} == {"race"}
    assert metalmm.check(source, grid=1, threadgroup=128, buffers={0: array, 1: array.copy()}) == []


def test_kinds_and_places_do_not_come_from_names() -> None:
    """Of a kernel `outside`, in a folder with brackets."""
    folder = Path("which no thread wrote (1) at x:5")
    folder.mkdir()
    (folder / "k.metal").write_text(
        HEAD + f"kernel void outside({ARGUMENTS}) {{\n  threadgroup float p[128]; p[t] = 1;\n y[t] = p[127 - t]; }}"
    )
    found = metalmm.check(folder / "k.metal", grid=1, threadgroup=128, buffers={0: x(), 1: np.zeros(1024, np.float32)})
    assert [f.kind for f in found] == ["race"]
    assert {Path(place).parts[-2:] for place in found[0].places} == {(folder.name, "k.metal:5"), (folder.name, "k.metal:4")}
    location = check_command.sarif(found)["runs"][0]["results"][0]["locations"][0]["physicalLocation"]
    assert location["artifactLocation"]["uri"].endswith("which%20no%20thread%20wrote%20%281%29%20at%20x%3A5/k.metal")


def test_the_order_of_threads_shows_in_bits() -> None:
    """Atomics are no race; who comes first is."""
    body = "y[g * 128 + t] = float(atomic_fetch_add_explicit((device atomic_int*)(y + 512), 1, memory_order_relaxed));"
    found = metalmm.check(
        HEAD + f"kernel void k({ARGUMENTS}) {{ {body} }}", grid=2, threadgroup=128, buffers={0: x(), 1: np.zeros(1024, np.float32)}
    )
    assert [f.kind for f in found] == ["order"] and "depends on the order of threads" in found[0].text


def test_a_buffer_of_msls_types_is_of_msls_widths() -> None:
    for word, kind in (
        ("float", "float32"),
        ("int", "int32"),
        ("half", "float16"),
        ("uint", "uint32"),
        ("long", "int64"),
        ("float32", "float32"),
    ):
        assert check_command._buffer(f"0={word}[3,2]")[1].dtype == kind == check_command._buffer(f"0={word}[3]:1")[1].dtype


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    source = text_of("llama.cpp #3057: the mean is read while the next sum begins", False)
    Path("k.metal").write_text(
        source.replace("* (x[g", "* scale * (x[g").replace(HEAD, HEAD + "constant float scale [[function_constant(0)]];")
    )
    run = ["check", "k.metal", "--grid", "2", "--threadgroup", "128", "--set", "scale=2.0", "--buffer", "0=float32[256]"]
    assert cli.main([*run, "--buffer", "1=float32[2]:0", "--json", "check.json", "--sarif", "check.sarif"]) == 1
    out = capsys.readouterr().out
    assert "race: k" in out and "k.metal:1" in out and "1 checked," in out
    data, log = json.loads(Path("check.json").read_text()), json.loads(Path("check.sarif").read_text())
    assert {f["kind"] for f in data["findings"]} == {"race"} and data["checked"] == 1
    result = log["runs"][0]["results"][0]
    assert log["version"] == "2.1.0" and result["ruleId"] == "race"
    assert result["locations"][0]["physicalLocation"]["artifactLocation"]["uri"].endswith("k.metal")
    assert {rule["id"] for rule in log["runs"][0]["tool"]["driver"]["rules"]} >= {f["kind"] for f in data["findings"]}
    for words, why in (
        (["check"], "name variants, a .metal file or a manifest"),
        (["check", "k.metal"], "a .metal file takes --grid"),
        (["check", "nope.metal"], "nope.metal: there is no such file"),
        (["check", "k.metal", "gemv/baseline"], "one .metal file at a time"),
        (["check", "gemv/baseline", "--grid", "2"], "--grid is of a .metal file"),
        ([*run[:3], "0", *run[4:]], "--grid '0': it takes up to three whole numbers"),
        ([*run, "--buffer", "1=float32"], "--buffer '1=float32': it takes 0=float32[4096]"),
        ([*run, "--buffer", "1=floaty[3]"], "--buffer '1=floaty[3]'"),
        ([*run, "--buffer", "9=float32[3]"], "the kernel has no buffer 9; it has [0, 1]"),
        ([*run, "--set", "scale"], "--set 'scale': it takes NAME=VALUE"),
        ([*run, "--kernel", "nobody"], "nobody"),
        ([*run, "--runs", "1"], "runs is 1"),
        ([*run[:3], "2,2,2,2", *run[4:]], "--grid '2,2,2,2'"),
        ([*run[:5], "2000", *run[6:]], "threadgroup (2000, 1, 1) has 2000 threads; the limit"),
        ([*run, "--memory", "0=70000"], "70000 bytes of threadgroup memory; the limit is"),
    ):
        assert cli.main(words) == 2, words
        assert why in capsys.readouterr().err, words


def test_variants_and_manifests(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", "gemv_columns/bn64_bk64_vec4_tg128", "--spec", "m=1 n=67 k=200 nt"]) == 0
    assert "1 checked, no findings" in capsys.readouterr().out
    assert cli.main(["check", "gemv_columns/bn64_bk64_vec4_tg128", "--spec", "m=1 n=67 k=200 nt q8_0"]) == 2
    assert "it takes no --spec that is given" in capsys.readouterr().err
    invocation = check_command.sarif([], ["what could not be checked"])["runs"][0]["invocations"][0]
    assert not invocation["executionSuccessful"] and "could not" in invocation["toolExecutionNotifications"][0]["message"]["text"]
    Path("own.metal").write_text(
        '#include "params.h"\nusing namespace metal;\ntemplate <class T, int TG>\n[[kernel]] void own(const device T* A [[buffer(0)]],'
        " const device T* B [[buffer(1)]], device T* D [[buffer(2)]], constant MatmulParams& p [[buffer(5)]], uint t"
        " [[thread_position_in_grid]]) {\n  if (t >= p.n) return;\n  float s = 0;\n  for (uint k = 0; k < p.k; k++) s += float(A[k]) *"
        " float(B[t * p.ldb + k]);\n  D[0] = T(s);\n}\n"
    )
    Path("own.toml").write_text(
        'format = 2\n[kernels.own]\ntemplate = ["type", "threads"]\ntile = [1, "threads"]\n'
        'supports = { m = 1, layouts = ["nt"], c = false, alpha = false, bias = false, batch = 1 }\n'
        '[families.own]\nkernel = "own"\nvariants = { tg64 = { threads = 64 } }\n'
    )
    status = cli.main(["check", "own.toml", "--spec", "m=1 n=67 k=20 nt", "--json", "own.json"])
    data = json.loads(Path("own.json").read_text())
    assert status == 1 and {"race", "result"} <= {f["kind"] for f in data["findings"]}, data


SHARED = np.zeros(16, np.float32)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"runs": True}, metalmm.ArgumentError, "runs is True"),
        ({"grid": None}, metalmm.ArgumentError, "takes grid= and threadgroup="),
        ({"outputs": [0.5]}, metalmm.ArgumentError, r"output 0.5 is no buffer"),
        ({"name": "nobody"}, metalmm.CompileError, "nobody"),
        (
            {"buffers": {0: np.zeros(8, np.uint8)}, "outputs": 0},
            metalmm.ArgumentError,
            "output 0 is of uint8; writes are counted by two bytes",
        ),
        ({"buffers": {0: np.zeros(())}}, metalmm.ArgumentError, "buffer 0 is no C-contiguous array"),
        ({"buffers": {0: SHARED[:8], 1: SHARED[4:]}}, metalmm.ArgumentError, "buffers 0 and 1 share memory"),
    ],
)
def test_bad_arguments(change: dict[str, Any], error: type[Exception], message: str) -> None:
    given: dict[str, Any] = {"grid": 1, "threadgroup": 1, **change}
    with pytest.raises(error, match=message):
        metalmm.check(HEAD + "kernel void k(device float* y [[buffer(0)]], device float* z [[buffer(1)]]) { y[0] = 1; }", **given)


def test_a_variant_of_which_there_are_shapes_of_its_own() -> None:
    v = metalmm.variants(family="gemv_nt")[0]
    specs = checking.specs_of(v)
    assert {s.b_storage for s in specs} == {kind.storage for kind in v.kinds()} and all(not v.lacks(s) for s in specs)


def test_the_fixture(metalmm_check: Any) -> None:  # noqa: F811
    run = {"grid": 2, "threadgroup": 128, "buffers": {0: x(), 1: np.zeros(1024, np.float32)}}
    metalmm_check(HEAD + f"kernel void k({ARGUMENTS}) {{ y[g * 128 + t] = x[t]; }}", **run)
    with pytest.raises(AssertionError, match="nothing orders threadgroups"):
        metalmm_check(HEAD + f"kernel void k({ARGUMENTS}) {{ y[t] = x[g * 128 + t]; }}", **run)


COUNTED = """#include <metal_stdlib>
using namespace metal;
kernel void k(const device float* x, device float* y, constant uint& n, uint t [[thread_position_in_threadgroup]],
              uint i [[thread_position_in_grid]]) {
  threadgroup float s[64 * 33];
  if (i < n) s[t * STEP] = x[2 * i];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  y[i] = s[(t ^ 1) * STEP] * 3.0f + simd_sum(1.0f);
  atomic_fetch_add_explicit((device atomic_int*)(y + 128), 1, memory_order_relaxed);
}
"""


@pytest.mark.rest(but=1)
@pytest.mark.parametrize(("step", "turns"), [(32, 32), (33, 1), (2, 2)])
def test_what_a_dispatch_asks_of_memory_is_counted(step: int, turns: int, each_compiler: str) -> None:
    counts = metalmm.count(
        COUNTED.replace("STEP", str(step)), grid=2, threadgroup=64, buffers={0: np.zeros(256, np.float32), 1: np.zeros(129, np.float32), 2: 128}
    )  # fmt: skip
    accesses, of_atomics = 2 * 2, 2 * 2  # simdgroups of both threadgroups
    assert counts.pop("multiplications", 128) == 128 and counts.pop("registers", 9) > 8  # where clang is, and where NVRTC is
    assert counts == {
        "device_bytes_read": 2 * 512, "device_bytes_written": 2 * 512, "device_accesses": 2 * accesses + of_atomics,
        "device_lines": 2 * accesses + accesses + of_atomics, "constant_bytes_read": 512, "constant_bytes_written": 0,
        "constant_accesses": accesses, "constant_lines": accesses, "threadgroup_bytes_read": 512, "threadgroup_bytes_written": 512,
        "threadgroup_accesses": 2 * accesses, "threadgroup_turns": 2 * accesses * turns, "atomics": 128, "barriers": 2,
        "simdgroup_operations": accesses, "threadgroups": 2,
    }  # fmt: skip


MULTIPLIED = {  # what a kernel of 64 threads computes, and how many multiplications that is
    "y[i] = x[i] * x[i + 1] + x[i + 2];": 64,
    "for (uint j = 0; j < i; j++) y[i] += x[j] * x[i];": sum(range(64)),
    "y[i] = fma(x[i], 2.0f, 1.0f) + dot(float4(x[i]), float4(x[0], x[1], x[2], x[3])) + float(half(x[i]) * half(x[i + 1]));": 64 * 6,
    "float3 v(x[i], x[i + 1], x[i + 2]); float3 w = v * v; y[i] = float3(half3(w) * half3(v)).x + w.z;": 64 * 6,
    "bfloat2 v = bfloat2(x[i], x[i + 1]); y[i] = float((v * v).y);": 64 * 2,
    "if (i < 5) y[i] = x[i] * x[i + 1]; else y[i] = x[i] / x[i + 1] + x[2];": 5,
    "simdgroup_float8x8 a, b, c(0); simdgroup_load(a, x, 8); simdgroup_load(b, x, 8); simdgroup_multiply(c, a, b); simdgroup_store(c, y, 8);": 2
    * 512,
}


@pytest.mark.rest(but=2)
@pytest.mark.parametrize("body", MULTIPLIED)
@pytest.mark.usefixtures("each_compiler")
def test_multiplications_are_counted_as_they_happen(body: str) -> None:
    source = f"#include <metal_stdlib>\n#include <metal_simdgroup_matrix>\nusing namespace metal;\nkernel void k(const device float* x, device float* y, uint i [[thread_position_in_grid]]) {{ {body} }}"
    for _ in range(2):
        counts = metalmm.count(source, grid=1, threadgroup=64, buffers={0: np.ones(80, np.float32), 1: np.zeros(64, np.float32)})
        assert counts.get("multiplications", MULTIPLIED[body]) == MULTIPLIED[body]
    assert ("multiplications" in counts) == (compiler.find_compiler().kind == "clang")


def test_the_command_tells_counts(capsys: pytest.CaptureFixture[str]) -> None:
    Path("k.metal").write_text(COUNTED.replace("STEP", "32").replace("  atomic", "  if (n == 0) atomic"))
    run = [
        "check",
        "k.metal",
        "--grid",
        "2",
        "--threadgroup",
        "64",
        "--buffer",
        "0=float32[256]",
        "--buffer",
        "1=float32[129]",
        "--buffer",
        "2=128",
    ]
    assert cli.main([*run, "--counts", "--json", "check.json"]) == 0
    out = capsys.readouterr().out
    assert "threadgroup: 512 bytes read, 512 written; 8 accesses of a simdgroup, 32.00 turns of a bank each" in out
    assert "2 barriers; 4 simdgroup operations; 0 atomics" in out
    assert ("; 128 multiplications" in out) == (compiler.find_compiler().kind == "clang")
    assert json.loads(Path("check.json").read_text())["counts"]["device_lines"] == 12
    with pytest.raises(metalmm.DeviceError, match="debug=True"):
        metalmm.Device("cpu")._count_accesses()
