"""A model's matmuls: of the list, of a config.json and of a .gguf file."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import metalmm
import numpy as np
import pytest
from metalmm import cli
from metalmm.bench import models, sizes, step
from support.decide import QUICK
from support.here import DEVICE, FAKE
from support.weights import blocks_of

SMALL = {
    "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 96, "vocab_size": 160, "hidden_act": "silu",
}  # fmt: skip
# What their makers say they have, in millions, without the embeddings where those are not the projection to the vocabulary, too.
PARAMETERS = {
    "Qwen2.5-0.5B": 494.0, "Qwen2.5-7B": 7615.6 - 545.0, "Qwen3-4B": 4022.5, "Llama-3.2-1B": 1235.8, "Llama-3.2-3B": 3212.7,
    "Llama-3.1-8B": 8030.3 - 525.3, "Mistral-7B-v0.3": 7248.0 - 134.2, "gemma-2-2b": 2614.3, "Phi-3-mini": 3821.1 - 98.5,
}  # fmt: skip


def weights(found: sizes.Sizes) -> int:
    return sum((s.n + sum(s.also_n)) * s.k * (s.calls or 0) for s in found.shapes if s.batch == 1)


@pytest.mark.parametrize("name", json.loads(models.LIST.read_text()))
def test_a_model_of_the_list_has_its_parameters(name: str) -> None:
    """Norms and biases are fewer than one in five hundred of them. With more rows of A the same weights are in more calls."""
    model = models.load(name.upper())
    for m in (1, 8, 9, 16):
        assert weights(model.sizes([m])) / 1e6 == pytest.approx(PARAMETERS[name], rel=2e-3)
    heads = [s for s in model.sizes([17]).shapes if s.n == max(x.n for x in model.sizes([17]).shapes)]
    assert [s.m for s in heads] == [1], "of a prompt the last row alone meets the vocabulary"


@pytest.mark.parametrize("name", ["Qwen2.5-0.5B", "gemma-2-2b", "Phi-3-mini"])
@pytest.mark.parametrize("storage", ["dense", "q4_0", "affine8"])
def test_a_sizes_file_of_a_model_says_the_same(name: str, storage: str) -> None:
    for dtype in ("float16", "bfloat16"):
        found = models.load(name).sizes([1, 4, 512], 1000, storage, dtype)
        read = sizes.parse(sizes.text_of(found.shapes))
        assert [(s.op, s.spec, s.calls) for s in read.shapes] == [(s.op, s.spec, s.calls) for s in found.shapes]
        assert read.steps == 1 and not read.left_out
        assert {s.dtype for s in found.shapes} == {dtype} and {s.storage for s in found.shapes if s.batch == 1} == {storage}


def short(found: sizes.Sizes) -> list[str]:
    return [f"{s.short} x{s.calls}" for s in found.shapes]


def of(**changes: Any) -> models.Model:
    return models.of_config({**SMALL, **changes}, "config.json")


def test_the_calls_of_a_layer() -> None:
    attention = ["m=1 n=1024 k=16 nt batch=4 alpha=0.25 x2", "m=1 n=16 k=1024 nn batch=4 x2"]
    assert short(of().sizes()) == [
        "m=1 n=64+32+32 k=64 nt x2", "m=1 n=64 k=64 nt x2", "m=1 n=96+96 k=64 nt swiglu x2", "m=1 n=64 k=96 nt x2", "m=1 n=160 k=64 nt x1",
        *attention,
    ]  # fmt: skip
    assert short(of().sizes([9], 7, "q8_0", "bfloat16")) == [
        "m=9 n=64 k=64 nt bfloat16 q8_0 x4", "m=9 n=32 k=64 nt bfloat16 q8_0 x4", "m=9 n=96 k=64 nt bfloat16 q8_0 x4",
        "m=9 n=64 k=96 nt bfloat16 q8_0 x2", "m=9 n=160 k=64 nt bfloat16 q8_0 x1", "m=9 n=7 k=16 nt batch=4 alpha=0.25 bfloat16 x2",
        "m=9 n=16 k=7 nn batch=4 bfloat16 x2",
    ]  # fmt: skip
    assert short(of(model_type="gemma2", hidden_act="gelu", head_dim=16).sizes())[2] == "m=1 n=96+96 k=64 nt x2"
    assert short(of(model_type="phi3").sizes())[:3] == ["m=1 n=128 k=64 nt x2", "m=1 n=64 k=64 nt x2", "m=1 n=192 k=64 nt x2"]
    assert short(of(model_type="phi").sizes())[2:4] == ["m=1 n=96 k=64 nt bias x2", "m=1 n=64 k=96 nt bias x2"]
    assert short(of(model_type="qwen2").sizes())[:2] == ["m=1 n=64+32+32 k=64 nt bias x2", "m=1 n=64 k=64 nt x2"]
    assert short(of(attention_bias=True).sizes())[1] == "m=1 n=64 k=64 nt bias x2"
    for changes in (
        {"attention_bias": "no"},
        {"model_type": "mistral", "attention_bias": True},
        {"hidden_act": None},
        {"hidden_act": "swish"},
    ):
        assert short(of(**changes).sizes()) == short(of().sizes())
    assert of(query_pre_attn_scalar=100).alpha == 0.1 and of().sizes([1, 1]) == of().sizes()
    assert short(of(head_dim=8, num_key_value_heads=None).sizes())[0] == "m=1 n=32+32+32 k=64 nt x2"
    assert short(models.of_config({"text_config": SMALL}, "c").sizes()) == short(of().sizes())
    experts = of(model_type="mixtral", num_local_experts=8).sizes()
    assert len(experts.shapes) == 5 and experts.left_out_lines() == [
        "not run: the feed-forward part of each layer (2 calls): experts are not run"
    ]


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({**SMALL, "model_type": "gpt2"}, "model_type is 'gpt2'; known are llama, "),
        ({"model_type": "gpt2", "n_embd": 8}, "model_type is 'gpt2', and it has no hidden_size, num_hidden_layers, .*; known are"),
        ({k: v for k, v in SMALL.items() if k != "vocab_size"}, "it has no vocab_size"),
        ({**SMALL, "model_type": "qwen3"}, "it has no head_dim"),
        ({**SMALL, "hidden_size": "64"}, "hidden_size is '64'; it takes a whole number"),
        ({**SMALL, "num_hidden_layers": 0}, "num_hidden_layers is '0'"),
        ({**SMALL, "head_dim": True}, "head_dim is 'True'"),
        ({**SMALL, "num_key_value_heads": 3}, "num_attention_heads is 4; it must be a multiple of num_key_value_heads, 3"),
        ({**SMALL, "hidden_size": 66}, "num_attention_heads is 4; .* and without head_dim divide hidden_size, 66"),
        ([1], "a config.json is an object"),
    ],
)
def test_a_config_that_is_none(config: Any, why: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    with pytest.raises(models.ModelError, match=f"config.json: {why}"):
        models.load(str(path))


def test_a_path_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("{")
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    (tmp_path / "deep.json").write_text("[" * 100_000)
    os.mkfifo(tmp_path / "fifo.json")
    for name, why in (
        ("a.json", "a.json: Expecting"),
        ("deep.json", "recursion"),
        ("fifo.json", "is no plain file"),
        ("b.json", "No such file"),
        ("a.gguf", "no GGUF file"),
        ("b.gguf", "No such file"),
    ):
        with pytest.raises(metalmm.Error, match=why):
            models.load(str(tmp_path / name))
    with pytest.raises(models.ModelError, match=r"'qwen' is no model; it takes a \.gguf file, a config\.json or one of Qwen2\.5-0\.5B, "):
        models.load("qwen")


@pytest.mark.parametrize("calls", ["0", "-1", "1_0", "1e9", "abc", "", "99999999999"])
def test_calls_that_are_no_count(calls: str) -> None:
    with pytest.raises(sizes.SizesError, match=f"line 1: .*calls is '{calls}'; it takes a whole number from 1 on"):
        sizes.parse(f"op=matmul | batch=1 | m=1 | n=8 | k=8 | tA=0 | tB=1 | calls={calls}:")


def test_what_is_left_out_stands_in_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    Path("moe.json").write_text(json.dumps({**SMALL, "model_type": "mixtral", "num_local_experts": 8}))
    assert cli.main(["sizes", "moe.json", "-o", "moe.md"]) == 0
    assert "# not run: the feed-forward part of each layer (2 calls): experts are not run" in Path("moe.md").read_text()
    assert len(sizes.load("moe.md").shapes) == 5
    assert "not run: the feed-forward part" in capsys.readouterr().err


@pytest.fixture
def file(tmp_path: Path) -> Callable[..., Path]:
    gguf = pytest.importorskip("gguf", reason="gguf is not installed: .gguf files are NOT tested")

    def write(arch: str = "llama", tied: bool = False, blocks: int = 2, extra: str = "rope.weight") -> Path:
        path = tmp_path / "model.gguf"
        writer = gguf.GGUFWriter(path, arch)
        writer.add_block_count(blocks)
        writer.add_uint32(f"{arch}.attention.value_length", 8)
        writer.add_embedding_length(64)
        writer.add_head_count(4)

        def add(name: str, n: int, k: int, form: str) -> None:
            w, kind = np.ones((n, k), np.float32), gguf.GGMLQuantizationType[form]
            writer.add_tensor(name, w if form == "F32" else gguf.quants.quantize(w, kind), raw_dtype=kind)

        add("token_embd.weight", 160, 64, "Q8_0")
        add(extra, 8, 64, "F32")
        if not tied:
            add("output.weight", 160, 64, "F16")
        for i, form in enumerate(("Q4_0", "Q5_0")):
            for name, n, k, kind in (
                ("attn_q", 64, 64, "Q4_0"), ("attn_k", 32, 64, "Q4_0"), ("attn_v", 32, 64, "Q8_0"), ("attn_output", 64, 64, "BF16"),
                ("ffn_gate", 96, 64, "Q4_0"), ("ffn_up", 96, 64, "Q4_0"), ("ffn_down", 64, 96, form), ("ffn_gate_inp", 8, 64, "F32"),
            ):  # fmt: skip
                add(f"blk.{i}.{name}.weight", n, k, kind)
            writer.add_tensor(f"blk.{i}.attn_q.bias", np.ones(64, np.float32))
            writer.add_tensor(f"blk.{i}.attn_norm.weight", np.ones(64, np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return write


def test_a_gguf_file(file: Callable[..., Path]) -> None:
    """Formats as they stand there, whatever is asked for; what has another format or bias is a call by itself."""
    found = models.load(str(file())).sizes([1], 5, "affine4", "float16")
    assert short(found) == [
        "m=1 n=64 k=64 nt bias q4_0 x2", "m=1 n=32 k=64 nt q4_0 x2", "m=1 n=32 k=64 nt q8_0 x2", "m=1 n=64 k=64 nt bfloat16 x2",
        "m=1 n=96+96 k=64 nt q4_0 swiglu x2", "m=1 n=64 k=96 nt q4_0 x1", "m=1 n=64 k=96 nt q8_0 x1", "m=1 n=160 k=64 nt x1", "m=1 n=5 k=16 nt batch=4 alpha=0.25 x2",
        "m=1 n=8 k=5 nn batch=4 x2",
    ]  # fmt: skip
    assert found.left_out_lines() == [
        "not run: rope.weight (1 calls): what it is for is not known",
        "not run: ffn_gate_inp.weight (2 calls): what it is for is not known",
    ]
    for blocks in (1, 3, 2**31 - 1):
        with pytest.raises(
            models.ModelError, match=f"block_count is {blocks}, and it has tensors of 2 layers; of a file in parts, join them"
        ):
            models.load(str(file(blocks=blocks)))
    other = short(models.load(str(file("gemma2", tied=True))).sizes())
    assert "m=1 n=96+96 k=64 nt q4_0 x2" in other and "m=1 n=160 k=64 nt q8_0 x1" in other


@pytest.mark.rest
@pytest.mark.skipif(bool(FAKE), reason="compiles for seconds what device cpu has shown")
def test_a_file_of_k_quants_runs_whole_with_its_own_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a Q4_K_M file has them: q6_K beside q4_K, q5_0 where k is no multiple of 256. Each call has the tensor of its own layer."""
    gguf = pytest.importorskip("gguf", reason="gguf is not installed: .gguf files are NOT tested")
    monkeypatch.chdir(tmp_path)
    writer = gguf.GGUFWriter(tmp_path / "small.gguf", "llama")
    writer.add_block_count(2)
    writer.add_embedding_length(256)
    writer.add_head_count(4)

    def add(name: str, n: int, k: int, form: str, seed: int) -> None:
        writer.add_tensor(name, np.roll(blocks_of(form, n, k), seed, axis=0), raw_dtype=gguf.GGMLQuantizationType[form.upper()])

    add("token_embd.weight", 320, 256, "q6_k", 0)
    for i in range(2):
        for j, (name, n, k, form) in enumerate((
            ("attn_q", 256, 256, "q4_k"), ("attn_k", 64, 256, "q4_k"), ("attn_v", 64, 256, "q6_k"), ("attn_output", 256, 256, "q4_k"),
            ("ffn_gate", 96, 256, "q4_k"), ("ffn_up", 96, 256, "q4_k"), ("ffn_down", 256, 96, "q5_0"),
        )):  # fmt: skip
            add(f"blk.{i}.{name}.weight", n, k, form, 10 * i + j)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = models.load(str(tmp_path / "small.gguf")).sizes([1], 8)
    assert not found.left_out and sum(len(names) * len(names[0]) for names in found.tensors.values()) == 2 * 7 + 1
    plan, read = step.plan_of(found, None), metalmm.load_gguf(tmp_path / "small.gguf")
    with metalmm.Device(DEVICE) as device:
        weights = step._Weights(device, plan, 0, read, found.tensors)
        for (shape, count), calls in zip(plan.calls, weights.calls, strict=True):
            for names, held in zip(found.tensors.get(shape.spec, []), calls, strict=shape.spec in found.tensors):
                assert len(calls) == count
                for name, q in zip(names, held if isinstance(held, tuple) else (held,), strict=True):
                    np.testing.assert_array_equal(q.dequantize(), read[name].dequantize())
    assert cli.main(["sizes", "small.gguf", "--context", "8", "-o", "small.md"]) == 0
    few = ["--shapes", "q6_k", "--backends", "gemv_nt_thread" if DEVICE == "cpu" else "gemm", "--json", "run.json"]
    assert cli.main(["tune", "small.md", *QUICK, *few, "-o", "tuned.json"]) == 0
    run = ["step", "--model", "small.gguf", "--context", "8", "--iters", "2", "--choice", "tuned", "--json", "step.json"]
    assert cli.main([*run, "--weights"]) == 0 and "each call with weights of small.gguf" in capsys.readouterr().out
    data = json.loads(Path("step.json").read_text())
    assert data["policies"][0]["calls"] == 2 * 7 + 1 and not data["policies"][0]["wrong"] and not data["left_out"]
    assert cli.main(["report", "step.json", "-o", "step.html"]) == 0
    Path("config.json").write_text(json.dumps(SMALL))
    capsys.readouterr()
    assert cli.main(["step", "--model", "config.json", "--weights"]) == 2 and "--weights takes --model FILE.gguf" in capsys.readouterr().err


def test_the_commands_take_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("config.json").write_text(json.dumps(SMALL))
    assert (
        cli.main(["sizes", "config.json", "--m", "1,3", "--storage", "q8_0", "--context", "32", "-o", "sizes.md", "--json", "sizes.json"])
        == 0
    )
    read = sizes.load("sizes.md")
    assert [s.as_json() for s in read.shapes] == json.loads(Path("sizes.json").read_text())["shapes"] and len(read.shapes) == 14
    assert cli.main(["sizes", "config.json"]) == 0 and sizes.parse(capsys.readouterr().out).shapes == of().sizes().shapes
    run = ["--model", "config.json", "--context", "32", "--iters", "2", "--json", "step.json"]
    assert cli.main(["step", *run, "--choice", "tuned"]) == 0
    data = json.loads(Path("step.json").read_text())
    assert data["policies"][0]["calls"] == 2 * 6 + 1 and not data["policies"][0]["wrong"] and data["steps"] == 1
    assert "steps/s" in capsys.readouterr().out
    for words, why in (
        (["step", *run, "--m", "1,2"], "--m 1,2: a step has one number of rows"),
        (["bench", "sizes.md", "--model", "config.json"], "a sizes file, --spec and --model"),
        (["bench", "--storage", "q8_0"], "--storage is of a model; name one with --model"),
        (["sizes", "config.json", "--m", "0"], "--m '0': it takes whole numbers from 1 on"),
        (["sizes", "config.json", "--context", "0"], "--context 0: it takes 1 to"),
        (["sizes", "config.json", "--storage", "q9"], "--storage 'q9': it takes one of dense, q8_0"),
        (["sizes", "config.json", "--storage", "q8_0:64"], "--storage 'q8_0:64': it takes one of dense, q8_0"),
        (["sizes", "config.json", "-o", "config.json"], "config.json"),
        (["step", "--model", ""], "'' is no model"),
    ):
        assert cli.main(words) == 2 and why in capsys.readouterr().err, words
