"""metalmm export: another engine needs its two files and nothing else of this package."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import metalmm
import numpy as np
import pytest
from metalmm import cli, export, kernel_source, manifest
from metalmm.bench.sizes import parse_spec
from support.here import DEVICE, ROOT
from support.numbers import half

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="the same text on each device")
TYPES = {"half": np.float16, "float": np.float32, "char": np.int8, "uchar": np.uint8, "ushort": np.uint16}

CASES = [
    ("gemv_nt/l16_d7_x_tg128", "m=1 n=67 k=200 nt"),
    ("gemv_nt/l4_d7_tg64", "m=1 n=67 k=160 nt q8_0 bias"),
    ("gemv_nt/l2_d7_x_tg128", "m=1 n=67 k=200 nt q4_0:canonical"),
    ("gemv_nt/l4_d7_tg64", "m=1 n=64 k=200 nt affine4:32"),
    ("gemv_nt/l8_d7_tg256", "m=1 n=67+20 k=96 nt"),
    ("gemv_nt/l8_d7_tg256", "m=1 n=67+20+35 k=96 nt bias"),
    ("gemv_nt/l4_d7_tg64", "m=1 n=40+40 k=96 nt q8_0 swiglu bias"),
    ("gemv_nt/l8_d14_x_tg128", "m=1 n=40+40 k=96 nt swiglu"),
    ("gemm/bm32_bn32_bk32", "m=35 n=67 k=96 nt q5_k"),
    ("gemv_nt/l4_d7_tg64", "m=1 n=67 k=320 nt q6_k:canonical"),
    ("gemm/bm32_bn32_bk32", "m=35 n=67 k=96 nt fp4"),
    ("gemv_nt_octet/c4_tg128", "m=1 n=67 k=203 nt"),
    ("gemv_nt_vec4/c4_tg128", "m=1 n=67 k=203 nt alpha=0.5 beta=2"),
    ("gemv_nt_vec4/r8_c4_tg128", "m=5 n=67 k=203 nt batch=3"),
    ("gemv_nn/w4_s8_tg256", "m=1 n=67 k=203 nn bias"),
    ("gemv_nn_thread/q2_s8_tg32", "m=1 n=67 k=203 nn"),
    ("gemv_nn_octet/o2_d4_tg512", "m=1 n=67 k=203 nn"),
    ("small_m/t2_s8_d2_tg256", "m=9 n=67 k=203 nt"),
    ("small_m/t2_s8_d2_tg256", "m=9 n=67 k=96 nt q4_0"),
    ("gemm_tensor/bm32_bn64_tg128", "m=35 n=67 k=71 tn bias batch=2"),
    ("gemv_columns/bn64_bk64_vec4_tg128", "m=1 n=67 k=203 nt"),
    ("gemv_split_k/bn4_tg256", "m=1 n=67 k=203 nt"),
    ("gemv/baseline", "m=1 n=67 k=71 nn"),
    ("gemm_tiled/baseline", "m=35 n=67 k=71 tt float32 bias batch=2"),
    ("m1_optimized/simd_basic", "m=1 n=67 k=71 nn"),
    ("mlx/baseline", "m=3 n=67 k=71 nt"),
]


def of(formula: str, sizes: dict[str, int]) -> int:
    assert re.fullmatch(r"[\w\s+*/()-]+", formula)
    return int(eval(formula.replace("/", "//"), {}, dict(sizes)))


def launch(folder: Path, name: str, sizes: dict[str, int], operands: dict[str, Any]) -> Any:
    """What another engine would write: it reads these two files."""
    told = json.loads((folder / f"{name}.json").read_text())
    params = b"".join(
        np.float32(f["value"]).tobytes() if f["type"] == "float" else np.uint32(of(f["value"], sizes)).tobytes()
        for f in told["params"]["fields"]
    )
    assert len(params) == told["params"]["bytes"]
    at = {told["params"]["index"]: np.frombuffer(params, np.uint8)}
    for b in told["buffers"]:
        if "name" in b:
            assert operands[b["name"]].size == of(b["elements"], sizes) and operands[b["name"]].dtype == TYPES[b["type"]], b
        at[b["index"]] = operands[b.get("name") or b["bind"]]
    with metalmm.Device("cpu", guards=True) as device:
        kernel = device.compile((folder / told["source"]).read_text()).kernel(told["function"])
        kernel(at, grid=tuple(of(g, sizes) for g in told["grid"]), threadgroup=tuple(told["threads"]))
    return {b["name"]: operands[b["name"]] for b in told["buffers"] if b.get("written")}


@pytest.mark.rest(but=1)
@pytest.mark.parametrize(("variant", "words"), CASES, ids=[f"{v} {w}" for v, w in CASES])
def test_two_files_give_the_bits_of_the_package(variant: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["export", variant, "--spec", words, "-o", str(tmp_path)]) == 0
    (metal, *_) = [Path(line) for line in capsys.readouterr().out.splitlines()]
    text, spec = metal.read_text(), parse_spec(words.split())
    assert '#include "' not in text and "#line" not in text and str(Path.home()) + "/" not in text
    widths, dtype = [spec.n, *spec.also_n], np.dtype(spec.dtype)
    lead = (spec.batch,) if spec.batch > 1 else ()
    operands: dict[str, Any] = {"a": half(*lead, *((spec.k, spec.m) if spec.transpose_a else (spec.m, spec.k))).astype(dtype)}
    weights, biases = list[Any](), list[Any]()
    for i, n in enumerate(widths):
        mark = str(i + 1) if i else ""
        if spec.b_storage == "dense":
            weights.append(half(*lead, *((n, spec.k) if spec.transpose_b else (spec.k, n)), seed=i + 1).astype(dtype))
            operands[f"b{mark}"] = weights[i]
        else:
            form, *more = spec.b_storage.split(":")
            group = {"group": int(more[0])} if more and more[0].isdecimal() else {}
            q = metalmm.quantize(half(n, spec.k, seed=i + 1), form, layout="canonical" if "canonical" in more else "nk", **group)
            weights.append(q)
            operands.update(
                {f"b{mark}": q.values, f"scales{mark}": q.scales, **({f"biases{mark}": q.biases} if q.biases is not None else {})}
            )
        biases.append(half(n, seed=i + 7).astype(dtype) if spec.bias else None)
        operands.update({f"bias{mark}": biases[i]} if spec.bias else {})
        if i == 0 or not spec.swiglu:
            operands[f"out{mark}"] = np.full((*lead, spec.m, n), np.nan, dtype)
    if spec.beta:
        operands["c"] = half(spec.m, spec.n, seed=9)
    sizes = {
        "m": spec.m,
        "k": spec.k,
        **({"batch": spec.batch} if spec.batch > 1 else {}),
        **{f"n{i + 1}" if i else "n": n for i, n in enumerate(widths)},
    }
    found = launch(tmp_path, metal.stem, sizes, operands)
    a, expected = operands["a"], dict[str, Any]()
    with metalmm.Device("cpu") as device:
        if spec.also_n:
            given = {"bias": biases} if spec.bias else {}
            outs = metalmm.matmul_fused(variant, a, weights, activation="swiglu" if spec.swiglu else None, device=device, **given)
            for i, out in enumerate([outs] if spec.swiglu else outs):
                expected[f"out{i + 1}" if i else "out"] = out
        else:
            options: dict[str, Any] = {
                "transpose_a": spec.transpose_a,
                "alpha": spec.alpha,
                "beta": spec.beta,
                "bias": biases[0],
                "c": operands.get("c"),
            }
            options |= {"transpose_b": spec.transpose_b} if spec.b_storage == "dense" else {}
            expected["out"] = metalmm.matmul(variant, a, weights[0], device=device, **options)
    assert found.keys() == expected.keys()
    for name, out in expected.items():
        np.testing.assert_array_equal(found[name], out)


def test_every_strategy_of_ours_is_among_them() -> None:
    tried = {manifest.get(v).family for v, _ in CASES}
    ours = {v.family for v in metalmm.variants() if v.kernel and not v.library and (not v.devices or "metal" in v.devices)}
    assert {f for f in ours - tried if not f.startswith("m1_optimized_v")} == set()  # gemv_columns and gemv_split_k are their kernels


@pytest.mark.parametrize("case", [CASES[0], next(c for c in CASES if "swiglu" in c[1])], ids=["one matrix", "swiglu"])
def test_the_code_that_launches_it_is_of_its_language(case: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    variant, words = case
    cli.main(["export", variant, "--spec", words, "-o", str(tmp_path)])
    paths = {"".join(p.suffixes[-1:]): p for p in map(Path, capsys.readouterr().out.split("\n")[:-1])}
    compile(paths[".py"].read_text(), "torch.py", "exec")
    told = json.loads(paths[".json"].read_text())
    (guard,) = re.findall(r"#ifndef (\w+)_H", paths[".h"].read_text())
    source = tmp_path / "use.c"
    prefix = re.search(r"#define (\w+)_SOURCE", paths[".h"].read_text())
    assert prefix and prefix[1].upper() == guard
    sizes = {"m": 1, "n": 67, "n2": 67, "k": 96}
    values = ", ".join(str(sizes[s]) for s in told["sizes"])
    source.write_text(
        f'#include "{paths[".h"]}"\n#include <stdio.h>\nint main(void) {{ uint32_t g[3]; {prefix[1]}_grid({values}, g);\n'
        f'  {prefix[1]}_Params p = {prefix[1]}_params({values}); printf("%u %u %u %zu %u\\n", g[0], g[1], g[2], sizeof p, p.f1_n); }}\n'
    )
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    assert compiler
    subprocess.run([compiler, "-std=c99", "-Wall", "-Wextra", "-Werror", "-o", str(tmp_path / "use"), str(source)], check=True)
    said = subprocess.run([str(tmp_path / "use")], capture_output=True, text=True, check=True).stdout.split()
    assert [int(x) for x in said] == [*(of(g, sizes) for g in told["grid"]), told["params"]["bytes"], 67]
    for end in (".swift", ".rs"):
        text = paths[end].read_text()
        assert text.count("{") == text.count("}") and text.count("(") == text.count(")")
        assert all(re.search(rf"\b{b['name']}\b", text) for b in told["buffers"] if "name" in b) and told["function"] in text


def test_what_is_fixed_is_in_the_name_and_auto_is_a_macs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["", "bias", "batch=2", "batch=2 bias", "alpha=-1.5", "alpha=0.5", "beta=1e-05", "bfloat16"]
    for more in words:
        assert cli.main(["export", "gemm/bm32_bn32_bk32", "--spec", f"m=35 n=67 k=71 nn {more}", "-o", str(tmp_path)]) == 0
    names = {p.stem for p in tmp_path.glob("*.json")}
    assert len(names) == len(words) and all(re.fullmatch(r"[a-z]\w*", name) for name in names)
    assert "(-1.5f32).to_bits()" in next(p for p in tmp_path.glob("*alpham1p5.rs")).read_text()
    told = json.loads(next(p for p in tmp_path.glob("*float16_batch.json")).read_text())
    assert "batch" in told["sizes"] and told["grid"][2] == "batch" and told["buffers"][0]["shape"] == "(batch, m, k)"
    told = json.loads((tmp_path / "gemm_bm32_bn32_bk32_nn_float16.json").read_text())
    assert "batch" not in told["sizes"] and told["limits"]["batch"] == "1: for more export with batch=2" and "no fast math" in told["math"]
    assert told["source_sha256"] == hashlib.sha256((tmp_path / told["source"]).read_bytes()).hexdigest()
    capsys.readouterr()
    for spec, v in (("m=1 n=9728 k=896 nt", "gemv_nt_vec4"), ("m=1 n=9728 k=896 nt q8_0", "gemv_nt"), ("m=512 n=896 k=896 nt", "gemm")):
        assert cli.main(["export", "auto", "--spec", spec, "-o", str(tmp_path), "--json", str(tmp_path / "told")]) == 0
        assert manifest.get(json.loads((tmp_path / "told").read_text())["variant"]).family == v
        (tmp_path / "told").unlink()


def test_where_upper_bits_lie_is_told() -> None:
    for form, bits, words in (
        ("q5_k", 1, "4 bytes, which has the 1 upper bit of"),
        ("q6_k", 2, "4 bytes for each half, which has the 2 upper bits of"),
    ):
        text = export._weights_text(parse_spec(["n=67", "k=320", "nt", form]))
        assert f"a little-endian word of {words} its value i" in text and f"from bit 4 * (i % 8) + {bits} * (i / 8) on" in text


def test_the_example_that_reads_ggmls_blocks_is_right() -> None:
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "export.md").read_text(), re.DOTALL)
    exec(example, {})


def test_all_that_a_mac_can_ask_for_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = export.every_instance()
    shipped = [v for v in metalmm.variants() if v.kernel and (not v.devices or "metal" in v.devices)]
    asked = {kernel_source.host_name(v.instance(s)) for v in shipped for s in v.specializations()}
    assert asked <= found.keys() and len(asked) > 2000
    offered = {v for name in found.keys() - asked for v in found[name][2]}
    assert offered and not offered & set(map(str, shipped)), "auto's points that do not ship"
    some = dict(list(found.items())[:: len(found) // 20])
    monkeypatch.setattr(export, "every_instance", lambda: some)
    assert cli.main(["export", "--all", "-o", str(tmp_path)]) == 0
    index = json.loads((tmp_path / "index.json").read_text())["kernels"]
    assert {p.name for p in tmp_path.glob("*.metal")} == {f"{name}.metal" for name in some} == {k["file"] for k in index}
    for kernel in index:
        text = (tmp_path / kernel["file"]).read_text()
        assert '#include "' not in text and f'[[host_name("{kernel["function"]}")]]' in text and kernel["variants"]


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["mps/baseline", "--spec", "m=1 n=8 k=8 nt"], "no kernel that Apple's GPUs run"),
        (["gemv_nt_thread/c4_tg32", "--spec", "m=1 n=8 k=8 nt"], "no kernel that Apple's GPUs run"),
        (["gemv_nt/l4_d7_tg64", "--spec", "m=2 n=8 k=8 nt"], "does not take MatmulSpec"),
        ([], "name a variant"),
        (["--all", "gemv_nt/l4_d7_tg64"], "name a variant"),
    ],
)
def test_what_cannot_be_exported_is_told(arguments: list[str], why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["export", *arguments, "-o", str(tmp_path / "new")]) == 2
    assert why in capsys.readouterr().err and not (tmp_path / "new").exists()
