"""Files that others wrote, or broke: each field of each format in turn is something else. A command reads it, or says in one line what is wrong."""

from __future__ import annotations

import copy
import gzip
import json
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import metalmm
import numpy as np
import pytest
from metalmm import cli, files, numerics, tuning
from metalmm.bench import results, sizes
from metalmm.profile import log
from support.decide import FEW, QUICK
from support.here import ALL_OF_IT

OTHERS = (None, [], "x", {}, -1, 1e400, [None], True, 10**40, 10**400, "\x1b[31mred")


def paths(x: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Of everything within, without the later ones of a list."""
    if at:
        yield at
    for key, value in x.items() if isinstance(x, dict) else enumerate(x[:2]) if isinstance(x, list) else ():
        yield from paths(value, (*at, key))


def replaced(x: Any, at: tuple[Any, ...], value: Any) -> Any:
    x = copy.deepcopy(x)
    inner = x
    for key in at[:-1]:
        inner = inner[key]
    inner[at[-1]] = value
    return x


@pytest.mark.rest
def test_a_result_file_with_any_part_replaced(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["bench", "--spec", "m=1 n=64 k=64 calls=3", "--iters", "2", "--backends", "gemv", "--json", "good.json"]
    assert cli.main(given) == 0
    good = json.loads(Path("good.json").read_text())
    everything = list(paths(good))
    for i, at in enumerate(everything):
        count = len(OTHERS) if ALL_OF_IT else 3 if len(at) < 3 else 1
        for j in range(count):
            value = OTHERS[(i + 3 * j) % len(OTHERS)]
            Path("x.json").write_text(json.dumps(replaced(good, at, value)))
            for command in (["report", "x.json", "-o", "x.html"], ["compare", "good.json", "x.json"]):
                assert cli.main(command) in (0, 1, 2), (at, value)
    shown = capsys.readouterr()
    assert len(everything) > 60 and "\x1b[31m" not in shown.out + shown.err


@pytest.mark.rest
def test_a_step_with_any_part_replaced(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["step", "--spec", "n=64 k=64 nt calls=2", "--iters", "3", *FEW, *QUICK, "--json", "good.json"]) == 0
    good = json.loads(Path("good.json").read_text())
    for i, at in enumerate(paths(good)):
        for value in (OTHERS[i % len(OTHERS)], []):
            Path("x.json").write_text(json.dumps(replaced(good, at, value)))
            for command in (["report", "x.json", "-o", "x.html"], ["compare", "good.json", "x.json"]):
                assert cli.main(command) in (0, 1, 2), (at, value)
    assert "x.json: a part of a result is missing" in capsys.readouterr().err


def test_a_result_of_a_variant_that_is_not_here() -> None:
    """Its baseline and its device may be of another process."""
    assert cli.main(["bench", "--spec", "m=1 n=64 k=64 calls=3", "--iters", "2", "--backends", "gemv", "--json", "good.json"]) == 0
    text = Path("good.json").read_text().replace("gemv/baseline", "mine/own").replace('"device": "cpu"', '"device": "toy"')
    Path("x.json").write_text(
        json.dumps({**json.loads(text), "shapes": [{**s, "baseline": "mine/own"} for s in json.loads(text)["shapes"]]})
    )
    assert cli.main(["report", "x.json", "-o", "x.html"]) == 0
    assert "mine/own" in Path("x.html").read_text().replace("<wbr>", "")


def test_a_file_keeps_its_mode_and_its_spaces(tmp_path: Path) -> None:
    path, data = tmp_path / "t.json", {"schema": "x", "version": 1, "cpu: AMD\u00a0EPYC\u3000": "a"}
    path.touch(0o600)
    path.chmod(0o600)
    files.write_json(path, data)
    assert path.stat().st_mode & 0o777 == 0o600
    assert files.read_json(path, "x", 1) == data


def test_a_tuning_file_with_any_part_replaced(tmp_path: Path) -> None:
    key = tuning.Key(1, 64, 64, 1, "nt", False, False, False, "float16")
    tuning.write(tmp_path / "t.json", "cpu: x", [tuning.Choice(key, "gemv/baseline", None, 0.1, "now")])
    good = json.loads((tmp_path / "t.json").read_text())
    for at in paths(good):
        for value in OTHERS:
            (tmp_path / "x.json").write_text(json.dumps(replaced(good, at, value)))
            try:
                tuning.read(tmp_path / "x.json")
            except tuning.TuningError as error:
                assert "x.json" in str(error)


def test_a_log_with_any_part_replaced(tmp_path: Path) -> None:
    pairs = {
        "op": "matmul",
        "backend": "b",
        "batch": "1",
        "m": "1",
        "n": "64",
        "k": "64",
        "tA": "0",
        "tB": "1",
        "alpha": "0.5",
        "dtype": "float32",
    }
    data = {"op_name": "matmul/x", "backend": "b", "duration_us": 5, "data": pairs}
    good = {"timestamp": "now", "event": {"type": "GpuOpCompleted", "data": data}}
    for at in paths(good):
        for value in (*OTHERS, "a\nop=matmul | batch=1 | m=7 | n=7 | k=7 | tA=0 | tB=0:\nb"):
            (tmp_path / "x.jsonl").write_text(json.dumps(replaced(good, at, value)) + "\n")
            text = sizes.text_of_log(log.read(tmp_path / "x.jsonl"))
            assert "\x1b" not in text and all(s.m != 7 for s in sizes.parse(text, of_log=True).shapes), "a newline makes no shape"
            assert cli.main(["profile", "analyze", str(tmp_path / "x.jsonl")]) in (0, 2)


def test_what_a_sizes_file_says_reaches_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    Path("s.md").write_text("op=\x1b[31mred | batch=1 | m=1 | n=? | k=64 | tA=0 | tB=1:\n  backend=\x1b[1mx: count=3 | total=1ms\n")
    cli.main(["bench", "--sizes", "s.md", "--backends", "gemv", "--iters", "2"])
    shown = capsys.readouterr()
    assert "\x1b[31m" not in shown.out + shown.err and "red" in shown.out + shown.err


def test_a_line_of_gigabytes_is_not_taken_whole(tmp_path: Path) -> None:
    """In a process that may have half of what the line would take."""
    with gzip.open(tmp_path / "x.jsonl.gz", "wb", compresslevel=1) as file:
        for _ in range(32):
            file.write(b" " * (8 << 20))
        file.write(b'\n{"event": {"type": "HostMemory", "data": {}}}\n')
    code = "import resource, sys\nfrom metalmm.profile import log\n"
    code += "resource.setrlimit(resource.RLIMIT_DATA, (300 << 20, 300 << 20))\nfound = log.read(sys.argv[1])\nprint(found.events, found.problems())"
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "x.jsonl.gz")], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith("1 ") and "longer than 16 MB" in done.stdout, done.stderr[-500:]


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_a_traced_call_is_read_back_exactly(dtype: type, device: metalmm.Device) -> None:
    a, b = np.ones((2, 32), dtype), np.ones((32, 32), dtype)
    with metalmm.trace("log.jsonl"):
        metalmm.matmul("auto", a, b, c=np.ones((2, 32), dtype), alpha=0.123456789, beta=-1e-7, device=device)
    (shape,) = sizes.load("log.jsonl").shapes
    assert (shape.dtype, np.float32(shape.alpha), np.float32(shape.beta)) == (
        np.dtype(dtype).name,
        np.float32(0.123456789),
        np.float32(-1e-7),
    )
    (again,) = sizes.from_specs([shape.short]).shapes
    assert again.spec == shape.spec


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_full_disk_does_not_hide_what_went_wrong(device: metalmm.Device) -> None:
    x = np.ones((1, 64), np.float16)
    with pytest.raises(ZeroDivisionError), metalmm.trace("/dev/full"):
        metalmm.matmul("auto", x, np.ones((64, 64), np.float16), device=device)
        raise ZeroDivisionError


def test_a_tuning_file_that_is_named_and_not_there(monkeypatch: pytest.MonkeyPatch, device: metalmm.Device) -> None:
    monkeypatch.setenv("METALMM_TUNING", "/nowhere/t.json")
    with pytest.raises(tuning.TuningError, match=r"METALMM_TUNING is /nowhere/t\.json, and there is no such file"):
        metalmm.matmul("auto", np.ones((1, 40), np.float16), np.ones((40, 8), np.float16), device=device)


def test_an_include_that_is_no_file_does_not_wait(tmp_path: Path, device: metalmm.Device) -> None:
    os.mkfifo(tmp_path / "inc.h")
    (tmp_path / "k.metal").write_text('#include "inc.h"\nkernel void f(device float* a) { a[0] = 1; }\n')
    with pytest.raises(metalmm.CompileError, match=r"inc\.h, which is no plain file"):
        device.compile(tmp_path / "k.metal").kernel("f")
    assert cli.main(["lint", str(tmp_path / "k.metal")]) == 2
    (tmp_path / "sub").mkdir()
    os.mkfifo(tmp_path / "sub" / "p.h")
    (tmp_path / "sub" / "a.h").write_text('#include "p.h"\n')  # beside the file that includes it
    for line in (
        '#include "sub/a.h"', f'#include "{tmp_path}/inc.h"', '#import "inc.h"', '#define X "inc.h"\n#include X', '%:include "inc.h"',
        '#  include /* x */ "inc.h"', '#inc\\\nlude "inc.h"', '#if __has_include("inc.h")\n#endif',
    ):  # fmt: skip
        (tmp_path / "k.metal").write_text(f"{line}\nkernel void f(device float* a) {{ a[0] = 1; }}\n")
        with pytest.raises(metalmm.CompileError, match=r"\.h, which is no plain file"):
            device.compile(tmp_path / "k.metal").kernel("f")
        assert cli.main(["lint", str(tmp_path / "k.metal")]) == 2
    with pytest.raises(metalmm.CompileError, match=r"inc\.h, which is no plain file"):
        device.compile(f'#include "{tmp_path}/inc.h"\nkernel void f(device float* a) {{ a[0] = 1; }}').kernel("f")
    with pytest.raises(metalmm.ManifestError, match="it is no file"):
        metalmm.load_variants(tmp_path / "inc.h")


def test_swiglu_where_float32_has_nothing_left(device: metalmm.Device) -> None:
    """silu(-200) is -0, and -0 times infinity is NaN: in the reference as in each kernel."""
    a = np.ones((1, 32), np.float16)
    gates = np.repeat(np.array([-200, -90, -88, -20, 3], np.float16) / 32, 8).reshape(40, 1).repeat(32, axis=1).astype(np.float16)
    ups = np.full((40, 32), 60000, np.float16)
    with np.errstate(all="ignore"):
        reference, bound = numerics.judged_swiglu(a, [gates, ups])
        assert np.isnan(numerics.judged_swiglu(a, [gates, np.full_like(ups, np.inf)])[0][0, :8]).all()
        for w in (ups, np.full_like(ups, np.inf)):
            reference, bound = numerics.judged_swiglu(a, [gates, w])
            out = metalmm.matmul_fused("auto", a, [gates, w], activation="swiglu", device=device)
            assert not numerics.mismatch(out, reference, bound)


def gguf(values: bytes = b"", tensors: bytes = b"", counts: tuple[int, int] = (0, 0), version: int = 3, order: str = "<") -> bytes:
    return b"GGUF" + struct.pack(f"{order}IQQ", version, *counts) + values + tensors


TENSOR = struct.pack("<Q1sI2QIQ", 1, b"x", 2, 32, 4, 8, 0)
BAD_GGUF = {
    "an array of 2^40 numbers": (gguf(struct.pack("<Q1sIIQ", 1, b"a", 9, 0, 1 << 40), counts=(0, 1)), "an array of 1099511627776 elements"),
    "an array of 2^40 texts": (gguf(struct.pack("<Q1sIIQ", 1, b"a", 9, 8, 1 << 40), counts=(0, 1)), "an array of 1099511627776 elements"),
    "a text of 2^60 bytes": (gguf(struct.pack("<Q", 1 << 60), counts=(0, 1)), "a text of 1152921504606846976"),
    "2^60 values": (gguf(counts=(0, 1 << 60)), "the file ends here"),
    "2^60 tensors": (gguf(counts=(1 << 60, 0)), "the file ends here"),
    "a value of no type": (gguf(struct.pack("<Q1sI", 1, b"a", 99), counts=(0, 1)), "type 99"),
    "arrays in arrays": (
        gguf(struct.pack("<Q1s", 1, b"a") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 50, counts=(0, 1)),
        "type 9",
    ),
    "an offset near 2^64": (
        gguf(tensors=TENSOR[:-8] + struct.pack("<Q", 2**64 - 64) + bytes(200), counts=(1, 0)),
        "at offset 18446744073709551552",
    ),
    "more elements than bytes": (
        gguf(tensors=TENSOR.replace(struct.pack("<Q", 32), struct.pack("<Q", 1 << 50)), counts=(1, 0)),
        "elements",
    ),
    "a tensor of 2^31 dimensions": (gguf(tensors=struct.pack("<Q1sI", 1, b"x", 1 << 31), counts=(1, 0)), "2147483648 dimensions"),
    "another machine's": (gguf(order=">"), "big-endian"),
    "version 9": (gguf(version=9), "version 9"),
    "nothing": (b"", "no GGUF file"),
    "a text file": (b"op=matmul\n", "no GGUF file"),
}


@pytest.mark.parametrize(("data", "message"), BAD_GGUF.values(), ids=BAD_GGUF)
def test_a_gguf_file_that_claims_what_it_has_not(data: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(data)
    with pytest.raises((metalmm.ArgumentError, metalmm.UnsupportedError), match=message):
        metalmm.load_gguf(tmp_path / "x.gguf", "x")


def test_a_gguf_file_with_any_byte_replaced(tmp_path: Path) -> None:
    package = pytest.importorskip("gguf")
    writer = package.GGUFWriter(tmp_path / "good.gguf", "llama")
    blocks = package.quants.quantize(np.ones((4, 32), np.float32), package.GGMLQuantizationType.Q8_0)
    writer.add_array("numbers", [1, 2, 3])
    writer.add_tensor("x", blocks, raw_dtype=package.GGMLQuantizationType.Q8_0)
    for part in ("write_header_to_file", "write_kv_data_to_file", "write_tensors_to_file", "close"):
        getattr(writer, part)()
    good = (tmp_path / "good.gguf").read_bytes()
    assert metalmm.load_gguf(tmp_path / "good.gguf", "x").shape == (4, 32)
    for i in range(len(good) - 4 * 34):
        for value in (0, 1, 0x7F, 0xFF):
            (tmp_path / "x.gguf").write_bytes(good[:i] + bytes([value]) + good[i + 1 :])
            try:
                metalmm.load_gguf(tmp_path / "x.gguf", "x")
            except metalmm.Error as error:
                assert len(str(error)) < 1000


def test_what_is_no_result_is_refused_by_its_name(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path / "fifo", tmp_path, Path("/dev/zero"), tmp_path / "none"):
        with pytest.raises(files.FileError, match=str(path)):
            results.load(path)


def test_what_is_no_path_and_no_name(tmp_path: Path) -> None:
    q = metalmm.quantize(np.ones((64, 64), np.float16), "q8_0")
    for wrong in ((lambda: metalmm.load_gguf(None, "x")), (lambda: metalmm.load_gguf("x", [])), (lambda: metalmm.load_tuning([])),  # type: ignore[arg-type]
                  (lambda: metalmm.trace(None).__enter__()), (lambda: q["x":]), (lambda: q[:: np.ones((4, 64))])):  # type: ignore[arg-type,misc]  # fmt: skip
        with pytest.raises(metalmm.Error):
            wrong()
    (tmp_path / "big.gguf").write_bytes(gguf(order=">"))
    with pytest.raises(metalmm.UnsupportedError, match="big-endian"):
        metalmm.load_gguf(tmp_path / "big.gguf", "x")


@pytest.mark.parametrize("word", ["n=" + "9" * 5000, "alpha=" + "9" * 5000 + "x", "n=8 calls=" + "9" * 5000])
def test_long_numbers_are_not_printed_whole(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "--spec", f"m=1 k=8 {word}"]) == 2
    assert len(capsys.readouterr().err) < 400
