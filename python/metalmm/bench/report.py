"""The report: one line a variant under each shape, in the format of the client's earlier harness, with its tags."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field

from .sizes import Shape
from .statistics import Median, median_of

HOST_GAP_GPU_MS = 0.010
HOST_GAP_CPU_MS = 0.10


@dataclass
class Result:
    """What one variant did on one shape. Samples in milliseconds; gpu is None where the device gave no time."""

    variant: str
    gpu: list[float | None] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    max_abs: float = 0.0
    max_rel: float = 0.0
    wrong: str = ""  # how it misses the float64 bound
    failed: str = ""  # what ended it: it did not compile, broke a rule, took too long
    unlikely: str = ""  # how it misses the statistical bound, which is no proof of a mistake
    stopped: str = ""  # why it has fewer samples than the rule asks for
    checked: str = ""  # what --check ran, or why it could not
    kernel_sha256: str | None = None  # of the MSL that ran; of nothing for a library's matmul

    @property
    def is_right(self) -> bool:
        return not self.wrong and not self.failed and bool(self.cpu)

    @property
    def times(self) -> list[float]:
        """What it is ranked by: the device's times, the host's where the device gave none."""
        known = [g for g in self.gpu if g is not None]
        return known if known and len(known) == len(self.gpu) else self.cpu

    def median(self, noise: float = 0.0) -> Median | None:
        return median_of(self.times, noise) if self.times else None

    @property
    def family(self) -> str:
        return self.variant.split("/")[0]

    @property
    def avg_gpu(self) -> float | None:
        known = [g for g in self.gpu if g is not None]
        return statistics.fmean(known) if known and len(known) == len(self.gpu) else None

    @property
    def avg_cpu(self) -> float:
        """NaN without a sample."""
        return statistics.fmean(self.cpu) if self.cpu else float("nan")


def tags(results: list[Result], baseline: str | None, bad_rel: float) -> dict[str, list[str]]:
    """The tags of each variant, by id, in the order in which they are printed."""
    found: dict[str, list[str]] = {r.variant: [] for r in results}
    good = [r for r in results if r.max_rel <= bad_rel and r.is_right]
    by_gpu = sorted((r for r in good if r.avg_gpu is not None), key=lambda r: r.avg_gpu or 0.0)
    by_cpu = sorted(good, key=lambda r: r.avg_cpu)
    for r in results:
        if r.variant == baseline:
            found[r.variant].append("baseline")
    for name, order in (("gpu", by_gpu), ("cpu", by_cpu)):
        if not order:
            continue
        found[order[0].variant].append(f"best-{name}")
        closest = next((r for r in order if r.family != "mps"), None)
        if order[0].family == "mps" and closest:
            found[closest.variant].append(f"closest-{name}")
    if by_gpu:
        best = by_gpu[0]
        for r in by_gpu:
            slower, cheaper = (r.avg_gpu or 0.0) - (best.avg_gpu or 0.0), best.avg_cpu - r.avg_cpu
            if r is not best and slower <= HOST_GAP_GPU_MS + 1e-9 and cheaper >= HOST_GAP_CPU_MS - 1e-9:
                found[r.variant].append("host-gap")
    for r in results:
        if r not in good:
            found[r.variant].append("bad-rel")
    return found


def ms(value: float | None) -> str:
    """0.72ms, not 0.720ms; n/a where there is no time."""
    return "n/a" if value is None or value != value else f"{round(value, 3):g}ms"


def line(shape: Shape, r: Result, tag_list: Iterable[str]) -> str:
    tag_text = "".join(f" [{t}]" for t in tag_list)
    versus = ""
    if shape.orig_ms and r.cpu:
        versus = f" [vs orig {shape.orig_ms:g}ms] ({(r.avg_cpu / shape.orig_ms - 1) * 100:+.2f}%)"
    known = [g for g in r.gpu if g is not None]
    median = statistics.median(known) if known else None
    spread = max(known) - min(known) if known else None
    bandwidth = f"{shape.bytes / r.avg_gpu / 1e6:.2f}GB/s" if r.avg_gpu else "n/a"
    text = (
        f"   - {r.variant}{tag_text}: avg_gpu={ms(r.avg_gpu)} | avg_cpu={ms(r.avg_cpu)}{versus} maxAbs={r.max_abs:.4e} maxRel={r.max_rel:.4e}"
        f" | med_gpu={ms(median)} range={ms(spread)} eff_bw={bandwidth}"
    )
    if r.wrong or r.failed:
        return f"{text} WRONG: {r.wrong or r.failed}"
    return f"{text} UNLIKELY: {r.unlikely}" if r.unlikely else text


def section(
    shape: Shape, results: list[Result], baseline: str | None, *, bad_rel: float, sort: str | None = None, best_only: bool = False
) -> str:
    """The lines of one shape. sort: gpu, cpu or None for manifest order; best_only: only lines with a tag."""
    marked = tags(results, baseline, shape.rel_limit(bad_rel))
    if sort == "gpu":
        results = sorted(results, key=lambda r: (r.avg_gpu is None, r.avg_gpu or 0.0))
    elif sort == "cpu":
        results = sorted(results, key=lambda r: r.avg_cpu)
    lines = [f"Spec {shape}:"]
    lines += [line(shape, r, marked[r.variant]) for r in results if marked[r.variant] or not best_only]
    return "\n".join(lines)


def winners(sections: list[tuple[Shape, list[Result]]], bad_rel: float) -> str:
    """A table of the best variant for each shape."""
    rows = []
    for shape, results in sections:
        right = [r for r in results if r.max_rel <= shape.rel_limit(bad_rel) and r.is_right]
        good = [r for r in right if r.avg_gpu is not None]
        size = f"{shape.batch}x{shape.m}x{shape.n_text}x{shape.k} {shape.layout}{' bias' if shape.bias else ''}"
        size += f" {shape.storage}" * (shape.storage != "dense") + " swiglu" * shape.swiglu
        if not good:
            why = f"{len(right)} right, none with a device time" if right else "none right"
            rows.append((size, why, "", ""))
            continue
        best = min(good, key=lambda r: r.avg_gpu or 0.0)
        rows.append((size, best.variant, ms(best.avg_gpu), f"{shape.bytes / (best.avg_gpu or 1) / 1e6:.2f}"))
    header = ("batch x m x n x k", "best-gpu", "avg_gpu", "GB/s")
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(4)]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in [header, *rows])
