"""Runs variants on shapes: the same inputs, warm-up and iterations for each, interleaved."""

from __future__ import annotations

import hashlib
import math
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from .. import Device, KernelError, Variant, __version__, _core, backends, numerics, variants
from .report import Result
from .sizes import Shape

Progress = Callable[[str], None]
COLD_LIMIT_BYTES = 4 << 30


class Inputs:
    """Fresh normal draws for one shape, the float64 reference and its bound. Weights in `copies` device arrays."""

    def __init__(self, device: Device, shape: Shape, seed: int, copies: int) -> None:
        rng = np.random.default_rng(seed)

        def draw(*size: int) -> np.ndarray[Any, Any]:
            return rng.standard_normal(size, dtype=np.float32).astype(np.float16)

        lead = (shape.batch,) if shape.batch > 1 else ()
        a = draw(*lead, *((shape.k, shape.m) if shape.transpose_a else (shape.m, shape.k)))
        b = draw(*lead, *((shape.n, shape.k) if shape.transpose_b else (shape.k, shape.n)))
        bias = draw(shape.n) if shape.bias else None
        c = draw(*lead, shape.m, shape.n) if shape.beta else None
        self.options: dict[str, Any] = {
            "alpha": shape.alpha,
            "beta": shape.beta,
            "transpose_a": shape.transpose_a,
            "transpose_b": shape.transpose_b,
        }
        self.reference, self.bound, self.likely = _reference(a, b, bias, c, self.options)
        self.a, self.weights = device.array(a), [device.array(b) for _ in range(copies)]
        self.bias = None if bias is None else device.array(bias)
        self.c = None if c is None else device.array(c)
        self.out = device.empty((*lead, shape.m, shape.n))


def _reference(a: Any, b: Any, bias: Any, c: Any, options: dict[str, Any]) -> tuple[Any, ...]:
    """In slices of n, so that a large B is never held in float64 as a whole."""
    n_axis = -2 if options["transpose_b"] else -1
    n = b.shape[n_axis]
    parts = []
    for start in range(0, n, 8192):
        piece = slice(start, min(start + 8192, n))
        kw = {"bias": None if bias is None else bias[piece], "c": None if c is None else c[..., piece], **options}
        columns = b[..., piece, :] if options["transpose_b"] else b[..., piece]
        parts.append(numerics.judged(a, columns, **kw))
    return tuple(np.concatenate(pieces, axis=-1) for pieces in zip(*parts, strict=True))


def last_level_cache() -> int:
    """Bytes of the largest cache that this machine reports; 32 MB if it does not."""
    sizes = []
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text().strip()
        sizes.append(int(text[:-1]) * {"K": 1 << 10, "M": 1 << 20}.get(text[-1], 1))
    return max(sizes, default=32 << 20)


def cold_copies(shape: Shape) -> int:
    """Copies of B that together are twice the last-level cache, within COLD_LIMIT_BYTES."""
    weight = 2 * shape.batch * shape.k * shape.n
    return max(1, min(math.ceil(2 * last_level_cache() / weight), COLD_LIMIT_BYTES // weight))


TIMEOUT_SECONDS = 60.0  # of a dispatch on the CPU device; its slowest GEMM tiles take four


def measuring_device() -> Device:
    """The kind of the default device, with guards round all memory and an end to what never ends, where it has those."""
    name = os.environ.get("METALMM_DEVICE") or backends.first_available()
    return Device(name, **backends.get(name).watching(TIMEOUT_SECONDS))


def compile_all(device: Device, work: list[tuple[Shape, list[Variant]]], progress: Progress) -> None:
    """Every pipeline that the runs will need, on all cores."""
    needed = {(str(v), _core._specialization(v, s.spec)): (v, s) for s, vs in work for v in vs}
    done = 0
    with ThreadPoolExecutor(max_workers=device.threads) as pool:
        for _ in pool.map(lambda pair: _core._prepare_pipeline(device, pair[0], pair[1].spec), needed.values()):
            done += 1
            progress(f"compiling {done}/{len(needed)}")


def run_shape(
    device: Device, shape: Shape, chosen: list[Variant], *, iters: int, warmup: int, copies: int, seed: int, progress: Progress
) -> list[Result]:
    """Results of the variants on one shape, in their order."""
    inputs = Inputs(device, shape, seed, copies)
    calls = {
        v: [device.prepare(v, inputs.a, w, bias=inputs.bias, c=inputs.c, out=inputs.out, **inputs.options) for w in inputs.weights]
        for v in chosen
    }
    results = {v: Result(str(v)) for v in chosen}
    out = np.asarray(inputs.out)
    for step in range(warmup + iters):
        for index, v in enumerate(chosen):
            progress(f"{shape}  pass {step + 1}/{warmup + iters}  {index + 1}/{len(chosen)} {v}")
            if results[v].wrong:
                continue
            out.view(np.uint16)[...] = 0xFFFF  # NaN
            batch = device.batch()
            batch.add(calls[v][(step * len(chosen) + index) % copies])  # --cold: never the copy that the variant before used
            start = time.perf_counter()
            try:
                batch.submit()
                batch.wait()
            except KernelError as error:
                results[v].wrong = str(error)
                continue
            cpu = time.perf_counter() - start
            if step >= warmup:
                device_seconds = batch.timing.device
                results[v].gpu.append(None if device_seconds is None else device_seconds * 1e3)
                results[v].cpu.append(cpu * 1e3)
            _check(results[v], out, inputs)
    return [results[v] for v in chosen]


def _check(result: Result, out: Any, inputs: Inputs) -> None:
    max_abs, max_rel = numerics.max_abs_rel(out, inputs.reference)
    result.max_abs, result.max_rel = max(result.max_abs, max_abs), max(result.max_rel, max_rel)
    result.wrong = result.wrong or numerics.mismatch(out, inputs.reference, inputs.bound)
    result.unlikely = result.unlikely or numerics.mismatch(out, inputs.reference, inputs.likely)


def baseline_of(shape: Shape, device: Device) -> str | None:
    """The id that the shape ran on in production; NumPy's BLAS stands in for one that the device does not have."""
    if not shape.orig_backend:
        return None
    for family in (shape.orig_backend, "blas"):
        found = [v for v in variants(device=device) if v.family == family and shape.layout in v.baseline]
        if found:
            return str(found[0])
    return None


def describe(device: Device, info: dict[str, Any]) -> str:
    """A line of a report's head: what it ran on."""
    return f"device={device.name} " + str(device.backend.facts(device)["summary"]).format(cpu=info["cpu"], os=info["os"])


def environment(device: Device) -> dict[str, Any]:
    """What a result file must carry to be compared with another."""
    commit = None
    here = Path(__file__).resolve().parent
    try:
        # Of our own history, not of whatever repository an installed package happens to lie in.
        subprocess.run(["git", "-C", str(here), "ls-files", "--error-unmatch", Path(__file__).name], capture_output=True, check=True)
        git = subprocess.run(["git", "-C", str(here), "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
        commit = git.stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        pass
    return {
        "device": device.name,
        "threads": device.threads,
        "cpu": _cpu_name(),
        "os": platform.platform(),
        "python": sys.version.split()[0],
        "numpy": np.__version__,
        "metalmm": __version__,
        "compiler": device.backend.facts(device)["compiler"],
        "gpu": device.info.get("name"),
        "commit": commit,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "environment": {k: v for k, v in os.environ.items() if k.startswith(("MATMUL_", "METALMM_"))},
    }


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(row.split(":", 1)[1].strip() for row in lines if row.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def as_json(shape: Shape, results: list[Result], baseline: str | None, tags: dict[str, list[str]], copies: int) -> dict[str, Any]:
    by_id = {str(v): v for v in variants()}
    rows = []
    for r in results:
        text = by_id[r.variant].assemble(_core._specialization(r.variant, shape.spec))
        rows.append(
            {
                "variant": r.variant,
                "kernel_sha256": hashlib.sha256(text.encode()).hexdigest(),
                "gpu_ms": r.gpu,
                "cpu_ms": r.cpu,
                "avg_gpu_ms": r.avg_gpu,
                "avg_cpu_ms": r.avg_cpu if r.cpu else None,
                "max_abs": r.max_abs if math.isfinite(r.max_abs) else None,
                "max_rel": r.max_rel if math.isfinite(r.max_rel) else None,
                "wrong": r.wrong,
                "unlikely": r.unlikely,
                "tags": tags[r.variant],
            }
        )
    return {"shape": asdict(shape), "bytes": shape.bytes, "weight_copies": copies, "baseline": baseline, "results": rows}
