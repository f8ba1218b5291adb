"""Profile logs: every section against an implementation that is written the long way, and what a log may hold that it should not."""

from __future__ import annotations

import gzip
import io
import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import metalmm
import numpy as np
import pytest
from metalmm import cli
from metalmm.bench import sizes
from metalmm.profile import analysis, log
from support.here import DEVICE, LINUX
from support.logs import drawn_events, event, written


def line(name: str, samples: list[int]) -> str:
    ms = np.array(samples, np.float64) / 1000
    p95, p99 = np.quantile(ms, [0.95, 0.99])
    return (
        f"{name}: count={len(ms)} | total={sum(samples) / 1000:.2f}ms | avg={sum(samples) / 1000 / len(ms):.3f}ms | min={ms.min():.3f}ms | "
        f"max={ms.max():.3f}ms | p95_ms={p95:.3f}ms, p99_ms={p99:.3f}ms"
    )


def matmul_of(data: dict[str, Any]) -> dict[str, str] | None:
    if data.get("data", {}).get("op"):
        return dict(data["data"]) if data["data"]["op"].startswith("matmul") else None
    parts = data["op_name"].split("/")
    pairs = {}
    for start in (i + 1 for i, part in enumerate(parts) if part in ("matmul", "matmul_cache")):
        for part in parts[start:]:
            if "::" in part:
                break
            if "=" in part.split("#")[0]:
                pairs.update([part.split("#")[0].split("=", 1)])
    return pairs or None


def expected(name: str, events: list[dict[str, Any]], top: int = 20, kernel_top: int = 50, totals: bool = False) -> str:
    out = [f"=== Analyzing {name} ===\nTotal events: {len(events)}"]

    def section(title: str, groups: dict[str, list[int]], limit: int) -> None:
        rows = sorted(((n, s) for n, s in groups.items() if s), key=lambda row: -sum(row[1]))[:limit]
        if rows:
            out.append(f"{title}:\n" + "\n".join("  " + line(n, s) for n, s in rows))

    def group(pairs: list[tuple[str, dict[str, Any]]]) -> dict[str, list[int]]:
        groups: dict[str, list[int]] = {}
        for key, data in pairs:
            groups.setdefault(key, []).extend([data["duration_us"]] if "duration_us" in data else [])
        return groups

    all_of_it = [(e["event"]["type"], e["event"]["data"]) for e in events]
    types = group(all_of_it)
    counts = {t: sum(1 for kind, _ in all_of_it if kind == t) for t in types}
    rows = sorted(types.items(), key=lambda row: (-sum(row[1]), -counts[row[0]]))
    out.append(
        "Event type summary:\n"
        + "\n".join("  " + (line(f"{t} (count={counts[t]})", s) if s else f"{t} (count={counts[t]}): no samples") for t, s in rows)
    )
    selected = [d for kind, d in all_of_it if kind == "KernelBackendSelected"]
    for title, key in (
        ("summary", "backend={backend}"),
        ("reasons", "reason={reason}"),
        ("by op/backend", "op={op_name} backend={backend}"),
    ):
        names = [key.format(**d) for d in selected]
        ranked = sorted(dict.fromkeys(names), key=lambda n: -names.count(n))[:top]
        if ranked:
            out.append(f"Backend selection {title}:\n" + "\n".join(f"  {n}: count={names.count(n)}" for n in ranked))
    internal = [d for kind, d in all_of_it if kind == "InternalKernelCompleted"]
    section("Internal kernel by parent", group([(d["parent_op_name"], d) for d in internal]), top)
    section("Internal kernel by parent/op", group([(f"{d['parent_op_name']} :: {d['internal_kernel_name']}", d) for d in internal]), top)
    kept = [
        d for d in internal if totals or not (d["internal_kernel_name"].endswith("_total") or d["internal_kernel_name"].endswith("cb_wait"))
    ]
    section("Kernel aggregate (all parents)", group([(d["internal_kernel_name"], d) for d in kept]), kernel_top)
    gpu = [d for kind, d in all_of_it if kind == "GpuOpCompleted"]
    buffers = [d for d in gpu if "/cb_gpu" in d["op_name"]]
    waits = [d for d in gpu if d not in buffers and ("cb_wait" in d["op_name"] or d["op_name"].endswith("wait"))]
    kernels = [d for d in gpu if d not in buffers and d not in waits]

    def kind_of(op_name: str) -> str:
        last = op_name.split("/")[-1]
        words = last.split("_")
        for begin, end in (("sdpa_block_", "_op"), ("mlp_swiglu_block_", "_op"), ("forward_cpu_block_", "")):
            if last.startswith(begin) and last.endswith(end) and last[len(begin) : len(last) - len(end)].isdigit():
                return begin.removesuffix("_block_")
        return "_".join(words[:-1]) if last.endswith("_op") else last

    section("GPU kernel durations (excluding waits)", group([(d["op_name"], d) for d in kernels]), top)
    section("GPU kernel aggregate (by kernel type)", group([(kind_of(d["op_name"]), d) for d in kernels]), top)
    matmuls = [(m, d) for d in kernels if (m := matmul_of(d)) and "duration_us" in d]
    section("Matmul backend summary", group([(f"backend={m.get('backend', '?')}", d) for m, d in matmuls]), top)
    section("Matmul op/backend summary", group([(f"{m.get('op', '?')} @ {m.get('backend', '?')}", d) for m, d in matmuls]), top)
    shapes: dict[str, list[tuple[str, dict[str, Any]]]] = {}
    first = ["op", "batch", "m", "n", "k", "tA", "tB"]
    for m, d in matmuls:
        rest = sorted(key for key in m if key not in first and key != "backend")
        shapes.setdefault(" | ".join(f"{key}={m.get(key, '?')}" for key in [*first, *rest]), []).append(
            (f"backend={m.get('backend', '?')}", d)
        )
    text = []
    for key, pairs in sorted(shapes.items(), key=lambda row: -sum(d["duration_us"] for _, d in row[1]))[:top]:
        text.append(f"  {key}:")
        text += ["    " + line(b, s) for b, s in sorted(group(pairs).items(), key=lambda row: -sum(row[1]))]
    if text:
        out.append("Matmul shape backend summary:\n" + "\n".join(text))
    section("GPU wait breakdown", group([(d["op_name"], d) for d in waits]), top)
    section("Command buffer GPU timing", group([(d["op_name"], d) for d in buffers]), top)
    sync = [
        d["duration_us"] for d in [*gpu, *internal] if "sync" in d.get("op_name", d.get("internal_kernel_name", "")) and "duration_us" in d
    ]
    out.append("Sync operations:\n  " + (line("sync kernels", sync) if sync else "sync kernels: no samples"))
    return "\n\n".join(out)


@pytest.mark.parametrize("seed", range(12))
def test_every_line_as_the_long_way_gives_it(seed: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    events = drawn_events(seed, count=random.Random(seed).choice([1, 3, 40, 800, 3000]))
    path = written(tmp_path / "x.jsonl", events)
    assert cli.main(["profile", "analyze", str(path)]) == 0
    assert capsys.readouterr().out == expected("x.jsonl", events) + "\n"
    assert cli.main(["profile", "analyze", str(path), "--top", "3", "--kernel-top", "2", "--include-kernel-totals"]) == 0
    assert capsys.readouterr().out == expected("x.jsonl", events, 3, 2, True) + "\n"


def test_the_seeds_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The layout of a row and the rules that the description names, by hand."""
    events = [event("GpuOpCompleted", op_name="Unscoped/cb_wait", backend="x", duration_us=us) for us in (0, 772, 35553)]
    events += [event("GpuOpCompleted", op_name="x/attn_rearrange_block_6_op", backend="x", duration_us=1000)]
    assert cli.main(["profile", "analyze", str(written(tmp_path / "a", events))]) == 0
    text = capsys.readouterr().out
    assert (
        "\nGPU wait breakdown:\n  Unscoped/cb_wait: count=3 | total=36.33ms | avg=12.108ms | min=0.000ms | max=35.553ms | p95_ms=32.075ms, p99_ms=34.857ms\n"
        in text
    )
    assert "\nGPU kernel aggregate (by kernel type):\n  attn_rearrange_block_6: count=1" in text
    assert text.endswith("\nSync operations:\n  sync kernels: no samples\n")
    assert "Matmul" not in text and "Internal kernel" not in text


def test_filter_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path / "x.jsonl", drawn_events(1))
    assert cli.main(["profile", "analyze", str(path), "--kernel-filter", "SDPA"]) == 0
    text = capsys.readouterr().out
    assert "sdpa: count=" in text and "rope" not in text
    assert cli.main(["profile", "analyze", str(path), "--kernel-filter", "nobody"]) == 0
    assert "no row's name contains 'nobody'" in capsys.readouterr().err
    assert cli.main(["profile", "analyze", str(path), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["schema"], data["events"], data["broken"]["count"], data["unknown"].keys()) == ("metalmm-profile", 800, 0, {"NewThing"})
    assert {s["title"] for s in data["sections"]} > {"Matmul shape backend summary", "GPU wait breakdown"}


BAD = ['{"timestamp": "2025', "[1, 2]", '{"event": 3}', '{"event": {"data": {}}}', '{"event": {"type": 7}}', "null", '"x"', "\\xff", '{"event": {"type": "GpuOpCompleted", "data": 3}}',
       '{"event": {"type": "GpuOpCompleted", "data": {"op_name": "a", "duration_us": "12"}}}', '{"event": {"type": "GpuOpCompleted", "data": {"op_name": "a", "duration_us": NaN}}}',
       '{"event": {"type": "GpuOpCompleted", "data": {"op_name": ["a"], "duration_us": 12}}}',
       '{"event": {"type": "GpuOpCompleted", "data": {"op_name": "a", "data": {"op": ["matmul"]}, "duration_us": 12}}}', "[" * 100_000]  # fmt: skip


@pytest.mark.parametrize("bad", BAD)
def test_a_broken_line_is_counted_with_its_number(bad: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = json.dumps(event("GpuOpCompleted", op_name="k", backend="b", duration_us=5))
    path = tmp_path / "x.jsonl"
    path.write_bytes(f"{good}\n\n{bad}\n{good}\n".encode().replace(b"\\xff", b"\xff"))
    assert cli.main(["profile", "analyze", str(path)]) == 0
    out = capsys.readouterr()
    counted = bad.startswith('{"event": {"type": "GpuOp')  # an event all the same
    assert f"Total events: {2 + counted}" in out.out and "k: count=2" in out.out
    assert "1 of 4 lines could not be read, or not all of their data: 3 (" in out.err


def test_cut_off_and_unknown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = "".join(
        json.dumps(e) + "\n" for e in [event("Odd", duration_us=7), event("GpuOpCompleted", op_name="k", backend="b", duration_us=5)]
    )
    (tmp_path / "x").write_text(text[:-30])
    assert cli.main(["profile", "analyze", str(tmp_path / "x")]) == 0
    out = capsys.readouterr()
    assert "2 (cut off)" in out.err and "unknown event types, counted: Odd (1)" in out.err
    assert "Odd (count=1): count=1 | total=0.01ms" in out.out


def test_gzip_and_standard_input(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    events = drawn_events(3)
    plain = written(tmp_path / "x.jsonl", events).read_bytes()
    assert cli.main(["profile", "analyze", str(tmp_path / "x.jsonl")]) == 0
    wanted = capsys.readouterr().out.split("\n", 1)[1]
    for raw in (plain, gzip.compress(plain), gzip.compress(plain[:5000]) + gzip.compress(plain[5000:])):
        (tmp_path / "odd-name").write_bytes(raw)
        assert cli.main(["profile", "analyze", str(tmp_path / "odd-name")]) == 0
        assert capsys.readouterr().out.split("\n", 1)[1] == wanted
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(raw)))
        assert cli.main(["profile", "analyze", "-"]) == 0
        assert capsys.readouterr().out.split("\n", 1)[1] == wanted
    (tmp_path / "cut").write_bytes(gzip.compress(plain)[:-400])
    assert cli.main(["profile", "analyze", str(tmp_path / "cut")]) == 0
    assert "the gzip data ends or breaks here" in capsys.readouterr().err


def test_what_cannot_be_opened(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in (tmp_path / "none", tmp_path):
        assert cli.main(["profile", "analyze", str(path)]) == 2
        assert f"metalmm: {path}: " in capsys.readouterr().err
    (tmp_path / "empty").write_text("")
    assert cli.main(["profile", "analyze", str(tmp_path / "empty")]) == 0
    assert (
        capsys.readouterr().out
        == "=== Analyzing empty ===\nTotal events: 0\n\nEvent type summary:\n\nSync operations:\n  sync kernels: no samples\n"
    )


def test_sizes_are_what_bench_takes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    events = drawn_events(5, 3000)
    path = written(tmp_path / "x.jsonl", events)
    assert cli.main(["profile", "sizes", str(path), "-o", str(tmp_path / "sizes.md")]) == 0
    err = capsys.readouterr().err
    assert "a format that no variant takes" not in err
    from_file, from_log = sizes.load(tmp_path / "sizes.md"), sizes.load(path)
    assert from_file == from_log
    stored = {(s.n, *s.also_n): (s.storage, s.transpose_b) for s in from_file.shapes if s.storage != "dense"}
    assert stored == {(4864, 4864): ("q8_0", True), (151936,): ("q8_0", True)}
    by_shape = {(s.n, s.k): s for s in from_file.shapes if s.storage == "dense"}
    for n, k, op, backend in ((896, 4864, "matmul", "gemv"), (9728, 896, "matmul", "mps"), (1152, 896, "matmul_bias_add", "mlx")):
        shape = by_shape[n, k]
        us = [
            e["event"]["data"]["duration_us"]
            for e in events
            if "op_name" in e["event"]["data"] and (matmul_of(e["event"]["data"]) or {}).get("n") == str(n)
        ]
        assert (shape.op, shape.orig_backend, shape.calls, shape.bias) == (op, backend, len(us), n == 1152)
        assert shape.total_ms == pytest.approx(sum(us) / 1000, abs=0.006) and shape.orig_ms == pytest.approx(
            sum(us) / 1000 / len(us), abs=0.0006
        )
    assert len(from_file.left_out) == 1 and all(gone.calls and gone.total_ms for gone in from_file.left_out)


def test_the_seeds_sizes_have_counts() -> None:
    found = sizes.load()
    assert [(s.calls, s.total_ms) for s in found.shapes[:2]] == [(2280, 738.37), (2280, 547.86)]
    assert found.steps == 95 and [g.text for g in found.left_out] == ["matmul_alpha_beta_cache @ mlx"]


def test_memory_does_not_grow_with_the_log(tmp_path: Path) -> None:
    """The same names and durations ten times over: what is kept is the same."""
    small = log.read(written(tmp_path / "a", drawn_events(2, 500)))
    large = log.read(written(tmp_path / "b", drawn_events(2, 500) * 10))
    assert large.events == 10 * small.events
    assert {key: set(s.seen) for key, s in large.gpu.items()} == {key: set(s.seen) for key, s in small.gpu.items()}


# -- our own runs as a log ---------------------------------------------------------------------------------------------


def test_trace_is_a_log_of_our_own_runs(tmp_path: Path, device: metalmm.Device) -> None:
    x, w = np.ones((1, 64), np.float16), np.ones((32, 64), np.float16)
    dx, dw, variant = device.array(x), device.array(w), "gemv_nt_vec4/c4_tg128"
    call = device.prepare(variant, dx, dw, transpose_b=True)
    with metalmm.trace(tmp_path / "own.jsonl", tmp_path / "own.json"):
        metalmm.matmul(variant, x, w, transpose_b=True, bias=np.ones(32, np.float16), device=device)
        call()
        with device.batch() as batch:
            batch.add(call)
            batch.matmul(variant, dx, dw, transpose_b=True, alpha=0.5)
        recorded = device.batch()
        recorded.add(call)
        recording = recorded.record()
        recording.replay()
        recording.replay()
        recording.wait()
        with pytest.raises(metalmm.ArgumentError, match="one is under way"), metalmm.trace(tmp_path / "other"):
            pass
    call()  # not in it
    found = log.read(tmp_path / "own.jsonl")
    assert found.problems() == [] and found.types["GpuKernelDispatched"] == 6
    waits = {key[0]: s.count for key, s in found.gpu.items() if analysis.place(key[0]) == "wait"}
    assert waits == {"metalmm/call/cb_wait": 2, "metalmm/batch/cb_wait": 1, "metalmm/replay/cb_wait": 2}
    assert {key[0] for key in found.gpu if analysis.place(key[0]) == "command_buffer"} <= {
        f"metalmm/{what}/cb_gpu" for what in ("call", "batch", "replay")
    }
    shapes = sizes.load(tmp_path / "own.jsonl").shapes
    assert {(s.op, s.n, s.k, s.layout, s.bias, s.alpha) for s in shapes} <= {
        ("matmul", 32, 64, "nt", False, 1.0), ("matmul_bias_add", 32, 64, "nt", True, 1.0), ("matmul_alpha_beta", 32, 64, "nt", False, 0.5)
    }  # fmt: skip
    assert DEVICE != "cpu" or sum(s.calls or 0 for s in shapes) == 4  # of a replay's dispatches nobody knows the times
    spans = json.loads((tmp_path / "own.json").read_text())["traceEvents"]
    assert {s["ph"] for s in spans} == {"X", "M"} and all(s["dur"] >= 0 and s["ts"] >= -1e6 for s in spans if s["ph"] == "X")


def test_trace_of_a_users_kernel_and_of_threads(tmp_path: Path, device: metalmm.Device) -> None:
    import threading

    source = "#include <metal_stdlib>\nkernel void twice(device float* y [[buffer(0)]], uint i [[thread_position_in_grid]]) { y[i] *= 2; }"
    kernel, y = device.compile(source).kernel("twice"), device.empty(64, np.float32)
    with metalmm.trace(tmp_path / "t.jsonl"):
        threads = [threading.Thread(target=lambda: [kernel(y, threads=64, threadgroup=32) for _ in range(20)]) for _ in range(4)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        with device.batch() as batch:
            kernel(y, threads=64, threadgroup=32, batch=batch)
    found = log.read(tmp_path / "t.jsonl")
    assert found.problems() == [] and found.types["GpuKernelDispatched"] == 81
    assert sum(s.count for key, s in found.gpu.items() if key[0] == "metalmm/call/cb_wait") == 80


def test_a_trace_that_cannot_be_written_leaves_none_under_way(tmp_path: Path) -> None:
    with pytest.raises(OSError), metalmm.trace(tmp_path / "none" / "x"):
        pass
    with metalmm.trace(tmp_path / "x"):
        pass


def test_a_log_from_a_pipe() -> None:
    text = json.dumps(event("GpuOpCompleted", op_name="k", backend="b", duration_us=5)) + "\n"
    done = subprocess.run(
        [sys.executable, "-m", "metalmm", "profile", "analyze", "-", "--top", "1"], input=text * 3, capture_output=True, text=True
    )
    assert done.returncode == 0 and "k: count=3" in done.stdout


def test_a_trace_that_ends_while_threads_dispatch(tmp_path: Path, device: metalmm.Device) -> None:
    import threading

    x, w = np.ones((1, 64), np.float16), np.ones((32, 64), np.float16)
    call, over, problems = device.prepare("auto", x, w, transpose_b=True), threading.Event(), []

    def work() -> None:
        try:
            while not over.is_set():
                call()
        except Exception as error:
            problems.append(error)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for t in threads:
        t.start()
    for _ in range(30):
        with metalmm.trace(tmp_path / "t.jsonl"):
            pass
    over.set()
    for t in threads:
        t.join()
    assert problems == []


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_full_disk_ends_the_trace_and_not_the_matmul(device: metalmm.Device) -> None:
    x, w = np.ones((1, 64), np.float16), np.ones((32, 64), np.float16)
    with pytest.raises(OSError, match="No space left"), metalmm.trace("/dev/full"):
        for _ in range(100):
            assert metalmm.matmul("auto", x, w, transpose_b=True, device=device)[0, 0] == 64


@pytest.mark.skipif(DEVICE != "cpu" or not LINUX, reason="another process, without the fake")
def test_a_disk_that_fills_up_within_a_line_is_told(tmp_path: Path) -> None:
    script = (
        "import metalmm, numpy as np, resource, signal\nsignal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "a, w = np.ones((1, 8), 'f2'), np.ones((8, 8), 'f2')\nmetalmm.matmul('gemv/baseline', a, w)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (300, resource.RLIM_INFINITY))\n"
        "try:\n  with metalmm.trace('x.jsonl'): metalmm.matmul('gemv/baseline', a, w)\nexcept OSError as error: print('told', error.errno)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert done.stdout.startswith("told "), done


def test_a_batch_that_was_open_before_the_trace(tmp_path: Path, device: metalmm.Device) -> None:
    """Its dispatches stand at other places in the batch than in the trace."""
    x, w, big_x, big_w = (
        np.ones((1, 64), np.float16),
        np.ones((32, 64), np.float16),
        np.ones((1, 2048), np.float16),
        np.ones((2048, 2048), np.float16),
    )
    batch = device.batch(per_dispatch=True)
    batch.matmul("gemv/baseline", device.array(big_x), device.array(big_w))
    with metalmm.trace(tmp_path / "t.jsonl"):
        batch.matmul("gemv_nt_vec4/c4_tg128", x, w, transpose_b=True)
        batch.submit()
        batch.wait()
    if DEVICE == "cpu":
        small = next(
            e for line in (tmp_path / "t.jsonl").read_text().splitlines() if "duration_us" in (e := json.loads(line)["event"]["data"])
        )
        assert small["duration_us"] == round(1e6 * (batch.timing.dispatches[1] or 0)) != round(1e6 * (batch.timing.dispatches[0] or 0))
    with pytest.raises(metalmm.ArgumentError, match="the same file"), metalmm.trace(tmp_path / "a", tmp_path / "a"):
        pass


def test_what_comes_after_a_trace_is_not_written() -> None:
    from metalmm.profile.trace import _Tracer

    written_to = io.BytesIO()
    tracer = _Tracer(written_to, None)
    tracer("call", [("k", (1, 1, 1), None)], [1e-6], 0.0, 0.0, 1e-6, 1e-6)
    before = written_to.getvalue()
    tracer.close()
    tracer("call", [("k", (1, 1, 1), None)], [1e-6], 0.0, 0.0, 1e-6, 1e-6)
    assert before.count(b"\n") == 4 and written_to.getvalue() == before
