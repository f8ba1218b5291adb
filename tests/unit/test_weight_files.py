"""Files of a whole model's weights: .gguf and .safetensors as mappings, and what is wrong with damaged ones."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

import metalmm
import ml_dtypes
import numpy as np
import pytest
from metalmm.quantized import LAYOUTS
from support.weights import weights

gguf = pytest.importorskip("gguf", reason="gguf is not installed: quantized formats are NOT tested")

# -- files --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "test")
    w = weights(40, 64, np.float32, tiny=False)
    for name in ("q8_0", "q4_0"):
        kind = gguf.GGMLQuantizationType[name.upper()]
        writer.add_tensor(name, gguf.quants.quantize(w, kind), raw_dtype=kind)
    writer.add_tensor("half", w.astype(np.float16))
    writer.add_tensor("brain", w.astype(ml_dtypes.bfloat16).view(np.uint8), raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.add_tensor("iq2_xs", np.zeros((1, 148), np.uint8), raw_dtype=gguf.GGMLQuantizationType.IQ2_XS)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_tensors_of_a_file(model: Path) -> None:
    w, file = weights(40, 64, np.float32, tiny=False), metalmm.load_gguf(model)
    assert set(file) == {"q8_0", "q4_0", "half", "brain"} and len(file) == 4 and "q6_K" not in file
    for name in ("q8_0", "q4_0"):
        for layout in LAYOUTS:
            q = metalmm.load_gguf(model, name, layout=layout)
            assert (q.format, q.shape, q.layout) == (name, (40, 64), layout)
            np.testing.assert_array_equal(q.values, metalmm.quantize(w, name, layout=layout).values)
        np.testing.assert_array_equal(file[name].dequantize(), q.dequantize())
    np.testing.assert_array_equal(file["half"], w.astype(np.float16))
    np.testing.assert_array_equal(file["brain"], w.astype(ml_dtypes.bfloat16))
    assert file["brain"].dtype == ml_dtypes.bfloat16 and not file["half"].flags.owndata
    with pytest.raises(metalmm.ArgumentError, match=r"has no tensor 'q5'; it has brain, half, q4_0, q8_0"):
        metalmm.load_gguf(model, "q5")
    with pytest.raises(metalmm.ArgumentError, match="No such file"):
        metalmm.load_gguf(model.with_name("none.gguf"), "q8_0")


def test_what_is_not_taken_is_listed_with_its_share(model: Path) -> None:
    file, size = metalmm.load_gguf(model), 74 * 2
    whole = size + 40 * 64 // 32 * (34 + 18) + 2 * 40 * 64 * 2
    assert file.refused == {"iq2_xs": ("iq2_xs", size / whole)}
    assert f"not taken: iq2_xs, {size / whole:.1%} of the file" in repr(file)
    with pytest.raises(metalmm.UnsupportedError, match=r"tensor 'iq2_xs' is iq2_xs, which is not taken"):
        file["iq2_xs"]


def test_a_damaged_file_is_an_error(model: Path) -> None:
    whole = model.read_bytes()
    for size in (0, 3, 24, 100, len(whole) // 2, len(whole) - 8192):
        model.write_bytes(whole[:size])
        with pytest.raises(metalmm.ArgumentError, match=r"is no GGUF file, or is cut short"):
            metalmm.load_gguf(model, "half")
    place = whole.index(b"q4_0") + 4 + 24  # behind its name, two sizes and type
    for offset in (32, 2721):
        model.write_bytes(whole[:place] + struct.pack("<Q", offset) + whole[place + 8 :])
        with pytest.raises(metalmm.ArgumentError, match=r"tensor 'q4_0' begins at byte \d+; it takes a multiple of 32 behind byte \d+"):
            metalmm.load_gguf(model)
    model.write_bytes(b"PK" + whole[2:])
    with pytest.raises(metalmm.ArgumentError, match=r"is no GGUF file"):
        metalmm.load_gguf(model, "q8_0")
    one = struct.pack("<Q1sIQQIQ", 1, b"a", 2, 32, 2, 8, 0)  # of two that the header claims, and zeros
    model.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 2, 0) + one + bytes(128))
    with pytest.raises(metalmm.ArgumentError, match="a tensor without a name; the header has fewer tensors than it says"):
        metalmm.load_gguf(model)


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "gguf", None)
    with pytest.raises(metalmm.UnsupportedError, match=r"pip install gguf"):
        metalmm.load_gguf("model.gguf", "x")


# -- safetensors ----------------------------------------------------------------------------------------------------------


def written(path: Path, tensors: dict[str, Any], **header: Any) -> Path:
    """As the format says it: the length of a header of JSON, the header, the data."""
    kinds = {"float16": "F16", "float32": "F32", "bfloat16": "BF16", "uint32": "U32", "int8": "I8", "uint8": "U8"}
    said, data = dict[str, Any](), b""
    for name, x in tensors.items():
        said[name] = {"dtype": kinds[x.dtype.name], "shape": list(x.shape), "data_offsets": [len(data), len(data) + x.nbytes]}
        data += x.tobytes()
    text = json.dumps({**said, **header}).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def layer(bits: int, group: int = 64) -> dict[str, Any]:
    rng = np.random.default_rng(bits)
    scales, biases = (rng.standard_normal((8, 256 // group)).astype(np.float16) for _ in range(2))
    return {"weight": rng.integers(0, 2**32, (8, 256 * bits // 32), np.uint32), "scales": scales, "biases": biases}


def test_a_folder_of_mlx(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"quantization": {"group_size": 32, "bits": 4, "down": {"group_size": 32, "bits": 6}}}')
    one, two = layer(4, 32), layer(6, 32)
    norm, odd = np.ones(7, ml_dtypes.bfloat16), np.arange(3, dtype=np.float32)
    written(
        tmp_path / "a.safetensors",
        {"byte": np.ones(1, np.int8), **{f"up.{k}": x for k, x in one.items()}, "norm": norm},
        __metadata__={"format": "mlx"},
    )
    written(tmp_path / "b.safetensors", {**{f"down.{k}": x for k, x in two.items()}, "odd": odd})
    file = metalmm.load_safetensors(tmp_path)
    assert set(file) == {"byte", "up.weight", "norm", "down.weight", "odd"} and not file.refused
    for name, bits, parts in (("up.weight", 4, one), ("down.weight", 6, two)):
        expected = metalmm.from_mlx(parts["weight"], parts["scales"], parts["biases"], bits=bits, group=32)
        np.testing.assert_array_equal(file[name].dequantize(), expected.dequantize())
        assert file[name].storage == expected.storage
    np.testing.assert_array_equal(file["odd"], odd)  # at no multiple of its size in the file
    np.testing.assert_array_equal(file["norm"], norm)
    assert metalmm.load_safetensors(tmp_path / "b.safetensors")["down.weight"].group == 32
    with pytest.raises(
        metalmm.UnsupportedError, match=r"config\.json says a group of 32 for 'up.weight', and group is 128; leave group out"
    ):
        metalmm.load_safetensors(tmp_path, group=128)["up.weight"]
    (tmp_path / "config.json").unlink()
    with pytest.raises(metalmm.UnsupportedError, match="bits is 1; there are 2"):
        metalmm.load_safetensors(tmp_path, group=128)["up.weight"]


@pytest.mark.parametrize(
    ("index", "why"),
    [
        ('{"weight_map": {"a": "m-1.safetensors"}}', ""),
        (
            '{"weight_map": {"a": "m-1.safetensors", "b": "m-2.safetensors"}}',
            "lacks 1 of the 2 tensors .* 'b', is in 'm-2.safetensors', which must lie",
        ),
        ('{"weight_map": {"a": 3}}', "index.json has no weight_map"),
        ('{"weight_map": 3}', "index.json has no weight_map"),
        ("[]", "index.json has no weight_map"),
        ("", "index.json beside the weights is no JSON"),
    ],
)
def test_a_folder_has_all_that_its_index_names(index: str, why: str, tmp_path: Path) -> None:
    written(tmp_path / "m-1.safetensors", {"a": np.ones(3, np.float32)})
    (tmp_path / "model.safetensors.index.json").write_text(index)
    if not why:
        assert list(metalmm.load_safetensors(tmp_path)) == ["a"]
        return
    with pytest.raises(metalmm.ArgumentError, match=why):
        metalmm.load_safetensors(tmp_path)
    assert list(metalmm.load_safetensors(tmp_path / "m-1.safetensors")) == ["a"], "one file by itself"


@pytest.mark.parametrize(
    ("config", "given", "why"),
    [
        ("", {}, r"config.json does not say the group of 'l.weight', which MLX quantized; pass group="),
        ('{"quantization": {"group_size": 64, "bits": 4}}', {}, None),
        ('{"quantization": {"group_size": 32, "bits": 4}}', {}, "'l.weight' has 8 bits in groups of 32, and config.json says 4"),
        ('{"quantization": {"group_size": 128, "bits": 8, "l": {"group_size": 64, "bits": 4}}}', {}, None),
        ('{"quantization": {"group_size": 16, "bits": 4}}', {}, "config.json says a group of 16 for 'l.weight'"),
        ("", {"group": 64}, None),
        ('{"quantization": {"bits": 8}}', {"group": 64}, "'l.weight' has 4 bits in groups of 64, and config.json says 8"),
        (
            '{"quantization": {"group_size": 64, "bits": 4}}',
            {"group": 32},
            "a group of 64 for 'l.weight', and group is 32; leave group out",
        ),
        (
            '{"quantization": {"group_size": 64, "bits": 4, "mode": "mxfp4"}}',
            {},
            "'l.weight' has biases, and config.json says mode 'mxfp4'",
        ),
    ],
)
def test_how_many_share_a_scale_is_never_guessed(config: str, given: dict[str, Any], why: str | None, tmp_path: Path) -> None:
    written(tmp_path / "m.safetensors", {f"l.{k}": x for k, x in layer(4).items()})
    if config:
        (tmp_path / "config.json").write_text(config)
    file = metalmm.load_safetensors(tmp_path / "m.safetensors", **given)
    if why is None:
        assert (file["l.weight"].format, file["l.weight"].shape, file["l.weight"].group) == ("affine4", (8, 256), 64)
    else:
        with pytest.raises(metalmm.UnsupportedError, match=why):
            file["l.weight"]


def test_a_name_in_two_files_and_no_json(tmp_path: Path) -> None:
    for name in ("a", "b"):
        written(tmp_path / f"{name}.safetensors", {"w": np.ones(3, np.int8)})
    with pytest.raises(metalmm.ArgumentError, match="tensor 'w' is in two of its files"):
        metalmm.load_safetensors(tmp_path)
    (tmp_path / "config.json").write_text("[" * 100000)
    with pytest.raises(metalmm.ArgumentError, match=r"config.json beside the weights is no JSON"):
        metalmm.load_safetensors(tmp_path / "a.safetensors")


def test_a_file_that_mlx_wrote(tmp_path: Path) -> None:
    mx = pytest.importorskip("mlx.core", reason="mlx is not installed: that its files are read is NOT tested", exc_type=ImportError)
    mx.set_default_device(mx.cpu)
    w = mx.array(weights(16, 256, np.float32))
    parts = mx.quantize(w, group_size=64, bits=4)
    mx.save_safetensors(
        str(tmp_path / "m.safetensors"), dict(zip(("l.weight", "l.scales", "l.biases"), parts, strict=True)) | {"w": w.astype(mx.bfloat16)}
    )
    file = metalmm.load_safetensors(tmp_path / "m.safetensors", group=64)
    np.testing.assert_array_equal(file["l.weight"].to_mlx()[0], np.array(parts[0]))
    np.testing.assert_array_equal(file["w"].astype(np.float32), np.array(w.astype(mx.bfloat16).astype(mx.float32)))


def test_modes_without_biases_are_told_by_the_config(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    packed, scales = rng.integers(0, 2**32, (8, 32), np.uint32), rng.integers(1, 200, (8, 8), np.uint8)
    written(tmp_path / "m.safetensors", {"l.weight": packed, "l.scales": scales})
    config = tmp_path / "config.json"
    for said, why in (
        ('{"quantization": {"group_size": 32, "bits": 4, "mode": "mxfp4"}}', None),
        ('{"quantization": {"mode": "affine", "l": {"mode": "mxfp4"}}}', None),
        ('{"quantization": {"group_size": 32, "bits": 4}}', "'l.weight' has scales of uint8 and no biases: config.json says mode None"),
    ):
        config.write_text(said)
        file = metalmm.load_safetensors(tmp_path)
        assert list(file) == ["l.weight"]
        if why is None:
            assert (file["l.weight"].format, file["l.weight"].shape) == ("fp4", (8, 256))
            np.testing.assert_array_equal(file["l.weight"].dequantize(), metalmm.from_mlx(packed, scales, mode="mxfp4").dequantize())
        else:
            with pytest.raises(metalmm.UnsupportedError, match=why):
                file["l.weight"]


def test_a_file_that_was_written_anew_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path / "x.safetensors", {"a": np.ones(4, np.int8), "b": np.full(4, 2, np.int8)})
    monkeypatch.chdir(tmp_path)
    file = metalmm.load_safetensors("x.safetensors")
    monkeypatch.chdir("/")
    assert file["a"].tolist() == [1] * 4 and file == file and file.get("none", 5) == 5 and len({file}) == 1
    written(path, {"b": np.full(4, 2, np.int8), "a": np.ones(4, np.int8)})
    os.utime(path, ns=(1, 1))
    with pytest.raises(metalmm.ArgumentError, match="has changed since it was opened: it was written to"):
        file["a"]


def test_a_type_that_is_not_taken_is_listed(tmp_path: Path) -> None:
    path = written(tmp_path / "x.safetensors", {"w": np.ones(3, np.int8)}, f8={"dtype": "F8_E4M3", "shape": [1], "data_offsets": [3, 4]})
    path.write_bytes(path.read_bytes() + b"1")
    file = metalmm.load_safetensors(path)
    assert file.refused == {"f8": ("f8_e4m3", 0.25)} and set(file) == {"w"}
    with pytest.raises(metalmm.UnsupportedError, match="tensor 'f8' is f8_e4m3, which is not taken"):
        file["f8"]


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d[:5],
        lambda d: struct.pack("<Q", 2**63) + d[8:],
        lambda d: struct.pack("<Q", 4 << 30) + d[8:],
        lambda d: d[:-1],
        lambda d: d + b"\0",
        lambda d: d.replace(b"[0, 12]", b"[0, 99]"),
        lambda d: d.replace(b"[0, 12]", b"[9, 2] "),
        lambda d: d.replace(b"[0, 12]", b"[-3, 9]"),
        lambda d: d.replace(b'"shape": [3]', b'"shape": [9]'),
        lambda d: d.replace(b'"shape": [3]', b'"shape": 1e9'),
        lambda d: d.replace(b'"dtype"', b'"dtypo"'),
        lambda d: d.replace(b'{"w": {', b'{"v": {"dtype": "F32", "shape": [1], "data_offsets": [8, 12]}, "w": {').replace(
            d[:8], struct.pack("<Q", d[0] + 62)
        ),
        lambda d: d.replace(b'"dtype": "F32"', b'"dtype": "F32", "dtype": "F32"').replace(d[:8], struct.pack("<Q", d[0] + 16)),
        lambda d: d.replace(b'{"w"', b'["w"'),
        lambda d: struct.pack("<Q", 2) + b"[]",
        lambda d: struct.pack("<Q", 20000) + b"[" * 20000,
        lambda d: b"",
    ],
)
def test_a_damaged_safetensors_file_is_an_error(change: Any, tmp_path: Path) -> None:
    path = written(tmp_path / "x.safetensors", {"w": np.ones(3, np.float32)})
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(metalmm.ArgumentError, match=r"is no .safetensors file, or is cut short"):
        metalmm.load_safetensors(path)


def test_no_file_and_no_path(tmp_path: Path) -> None:
    with pytest.raises(metalmm.ArgumentError, match="there is no such file"):
        metalmm.load_safetensors(tmp_path / "none.safetensors")
    with pytest.raises(metalmm.ArgumentError, match=r"has no .safetensors file"):
        metalmm.load_safetensors(tmp_path)
    with pytest.raises(metalmm.ArgumentError, match="it takes a path, not 3"):
        metalmm.load_safetensors(3)  # type: ignore[arg-type]
