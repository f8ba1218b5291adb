"""``metalmm frameworks``: operations of MLX and PyTorch side by side, for what is installed, with metalmm's own MatMul and Linear.

Each operation is timed alone, synchronised after each call: the median of the calls that fit into --time seconds, at least three, after
one that does not count. All operands are float32, drawn from a normal distribution, and placed beforehand. metalmm writes into one result
again and again; the others make theirs at each call.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .. import Device, Error, QuantizedArray, files, terminal
from . import command, runner
from .step import free_memory

Call = Callable[[], Any]
Products = tuple[Callable[[], None], Callable[[], Any]]  # a turn over copies of the weights; its last result as float32
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Row:
    """One line: an operation, the shapes of what it takes, an axis where it has one."""

    operation: str
    shapes: tuple[Shape, ...]
    axis: int | None = None

    @property
    def text(self) -> str:
        words = ["dim=" + "x".join(map(str, shape)) for shape in self.shapes]
        return f"{self.operation} / {' '.join(words)}" + ("" if self.axis is None else f" axi={self.axis}")

    @property
    def bytes(self) -> int:
        """Of operands and result, at least."""
        sizes = [math.prod(s) for s in self.shapes]
        if self.operation in ("MatMul", "Linear"):
            sizes.append(math.prod(self.shapes[0][:-1]) * self.shapes[1][-1])
        elif self.operation == "Gather" or self.operation.startswith("Scatter"):
            sizes.append(self.shapes[1][0] * self.shapes[0][1])
        elif self.operation not in ("Argmax", "BCE", "Sum", "SumAll"):  # whose results are small
            sizes.append(sum(sizes))
        return 4 * sum(sizes)


def _rows() -> Iterator[Row]:
    """The operations and shapes of the table that users know."""

    def many(operation: str, *shapes: str, axes: Sequence[int | None] = (None,)) -> Iterator[Row]:
        for text in shapes:
            parts = tuple(tuple(int(n) for n in part.split("x")) for part in text.split())
            for axis in axes:
                yield Row(operation, parts, axis)

    yield from many("Argmax", "64x1024x128", axes=(0, 1, 2))
    yield from many("Argmax", "64x128x1024", axes=(2,))
    yield from many("BCE", *(f"{s} {s}" for s in ("1000000", "100000x32", "100000x64x2", "128x100000")))
    yield from many("Concat", "1000000x64 1000000x32", "1000000x64 1000000x128", axes=(1,))
    yield from many("Concat", "1000000x64 1000000x64", "64x1000000 64x1000000", axes=(0,))
    yield from many("Conv1d", "100x256x3 8x3x3", "100x256x256 8x3x256", "16x1000x80 128x11x80", "16x1000x3 128x11x3")
    yield from many(
        "Conv2d",
        "100x256x256x3 8x3x3x3",
        "10x256x256x12 8x3x3x12",
        "1x256x256x128 8x3x3x128",
        "100x28x28x3 8x3x3x3",
        "1000x28x28x3 8x3x3x3",
    )
    yield from many("Gather", *(f"{s} {n}" for s in ("64x256", "1024x32") for n in (10, 1000, 1000000)))
    yield from many("LeakyReLU", "128x16x1024", "64x128x1024")
    yield from many("Linear", *(f"100x1024x{k} {k}x1024 1024" for k in (32, 64, 256, 512)), "100x1x51200 51200x1 1")
    yield from many(
        "MatMul",
        "32x1x1000 32x1000x128",
        "1000x64x256 256x32",
        "1000x64x1024 1000x1024x32",
        "1000x1024x64 1000x64x256",
        "64x1000000 1000000x32",
        "1000000x64 64x1024",
    )
    yield from many("PReLU", "128x16x1024 1", "64x128x1024 1")
    yield from many("ReLU", "128x16x1024", "64x128x1024")
    for operation in ("Scatter", "ScatterSum", "ScatterMax"):
        yield from many(operation, *(f"{s} {n}" for s in ("64x16", "1024x32") for n in (10, 1000, 1000000)))
    yield from many("SeLU", "128x16x1024", "64x128x1024")
    yield from many("Sigmoid", "128x16x1024", "64x128x1024")
    yield from many("Softmax", "64x1000000", "1000000x64", "64x16x32x1024", "128x16x32x1024", "1024x16x32x128", "1024x64x32x8", axes=(-1,))
    yield from many("Softplus", "128x16x1024", "64x128x1024")
    yield from many("Sort", "64x128x1024", axes=(0, 1, 2))
    yield from many("Sum", "64x128x128x128", axes=(0, 1, 2, 3))
    yield from many("SumAll", "64x128x128x128", "1000000", "1000000x128", "128x1000000")


ROWS: tuple[Row, ...] = tuple(_rows())


def draw(row: Row, seed: int) -> list[Any]:
    """Operands in NumPy. Of Gather and the scatters the second is indices of rows; a scatter's third is what it writes."""
    rng = np.random.default_rng(seed)
    if row.operation == "Gather" or row.operation.startswith("Scatter"):
        (rows, width), (count,) = row.shapes
        table = rng.standard_normal((rows, width), dtype=np.float32)
        found = [table, rng.integers(0, rows, count)]
        return found if row.operation == "Gather" else [*found, rng.standard_normal((count, width), dtype=np.float32)]
    drawn = [rng.standard_normal(shape, dtype=np.float32) for shape in row.shapes]
    if row.operation == "BCE":  # probabilities and targets
        return [(1 / (1 + np.exp(-drawn[0]))).astype(np.float32), (drawn[1] > 0).astype(np.float32)]
    return drawn


class Torch:
    """PyTorch on one of its devices."""

    def __init__(self, name: str, device: str) -> None:
        self.name, self.device = name, device
        self.torch = importlib.import_module("torch")

    @property
    def version(self) -> str:
        return f"torch {self.torch.__version__}"

    def synchronize(self, result: Any) -> None:
        if self.device != "cpu":
            getattr(self.torch, self.device).synchronize()

    def call(self, row: Row, operands: list[Any]) -> Call | None:
        t, f, axis = self.torch, self.torch.nn.functional, row.axis
        x = [t.from_numpy(o).to(self.device) for o in operands]
        if row.operation in ("Conv1d", "Conv2d"):  # it takes channels first
            x = [o.movedim(-1, 1).contiguous() for o in x]
        expanded = x[1].unsqueeze(1).expand_as(x[2]).contiguous() if row.operation.startswith("Scatter") else None
        calls: dict[str, Call] = {
            "Argmax": lambda: t.argmax(x[0], dim=axis),
            "BCE": lambda: f.binary_cross_entropy(x[0], x[1]),
            "Concat": lambda: t.cat(x, dim=axis),
            "Conv1d": lambda: f.conv1d(x[0], x[1]),
            "Conv2d": lambda: f.conv2d(x[0], x[1]),
            "Gather": lambda: x[0].index_select(0, x[1]),
            "LeakyReLU": lambda: f.leaky_relu(x[0]),
            "Linear": lambda: f.linear(x[0], x[1].T, x[2]),
            "MatMul": lambda: t.matmul(x[0], x[1]),
            "PReLU": lambda: f.prelu(x[0], x[1]),
            "ReLU": lambda: f.relu(x[0]),
            "Scatter": lambda: x[0].scatter(0, expanded, x[2]),
            "ScatterSum": lambda: x[0].scatter_add(0, expanded, x[2]),
            "ScatterMax": lambda: x[0].scatter_reduce(0, expanded, x[2], "amax"),
            "SeLU": lambda: f.selu(x[0]),
            "Sigmoid": lambda: t.sigmoid(x[0]),
            "Softmax": lambda: t.softmax(x[0], dim=axis),
            "Softplus": lambda: f.softplus(x[0]),
            "Sort": lambda: t.sort(x[0], dim=axis).values,
            "Sum": lambda: t.sum(x[0], dim=axis),
            "SumAll": lambda: t.sum(x[0]),
        }
        return calls[row.operation]

    def products(self, a: Any, b: Any, copies: int, times: int) -> Products | None:
        """Of dense weights. Results go to one place by turns with the copies."""
        if isinstance(b, QuantizedArray):
            return None
        t = self.torch

        def placed(x: Any) -> Any:
            return t.from_numpy(x.view(np.int16)).view(getattr(t, str(x.dtype))).to(self.device)

        x, many = placed(a), [placed(b).clone() for _ in range(copies)]
        y = t.empty((a.shape[0], b.shape[0]), dtype=x.dtype, device=self.device)

        def turn() -> None:
            for w in many * times:
                t.matmul(x, w.T, out=y)
            self.synchronize(y)

        return turn, lambda: y.float().cpu().numpy()


class Mlx:
    """MLX on one of its devices, compiled or not."""

    def __init__(self, name: str, device: str, is_compiled: bool) -> None:
        self.name, self.is_compiled = name, is_compiled
        self.mx, self.nn = importlib.import_module("mlx.core"), importlib.import_module("mlx.nn")
        self.device = getattr(self.mx, device)

    @property
    def version(self) -> str:
        return f"mlx {importlib.import_module('importlib.metadata').version('mlx')}"

    def synchronize(self, result: Any) -> None:
        self.mx.eval(result)

    def call(self, row: Row, operands: list[Any]) -> Call | None:
        mx, nn, axis = self.mx, self.nn, row.axis
        self.mx.set_default_device(self.device)
        x = [mx.array(o) for o in operands]
        mx.eval(x)
        functions: dict[str, Callable[..., Any]] = {
            "Argmax": lambda a: mx.argmax(a, axis=axis),
            "BCE": lambda a, b: nn.losses.binary_cross_entropy(a, b, with_logits=False),
            "Concat": lambda a, b: mx.concatenate([a, b], axis=axis),
            "Conv1d": mx.conv1d,
            "Conv2d": mx.conv2d,
            "Gather": lambda a, i: mx.take(a, i, axis=0),
            "LeakyReLU": nn.leaky_relu,
            "Linear": lambda a, b, c: mx.addmm(c, a, b),
            "MatMul": lambda a, b: a @ b,
            "PReLU": nn.prelu,
            "ReLU": nn.relu,
            "Scatter": _mlx_scatter,
            "ScatterSum": lambda a, i, u: a.at[i].add(u),
            "ScatterMax": lambda a, i, u: a.at[i].maximum(u),
            "SeLU": nn.selu,
            "Sigmoid": mx.sigmoid,
            "Softmax": lambda a: mx.softmax(a, axis=axis),
            "Softplus": nn.softplus,
            "Sort": lambda a: mx.sort(a, axis=axis),
            "Sum": lambda a: mx.sum(a, axis=axis),
            "SumAll": mx.sum,
        }
        run = mx.compile(functions[row.operation]) if self.is_compiled else functions[row.operation]
        return lambda: run(*x)

    def products(self, a: Any, b: Any, copies: int, times: int) -> Products | None:
        """Of a turn all results are asked for at once."""
        mx = self.mx
        mx.set_default_device(self.device)
        if self.is_compiled:
            return None  # one operation is the same

        def placed(x: Any) -> Any:
            if x.dtype.itemsize != 2:
                return mx.array(x)
            return mx.array(x.view(np.uint16)).view(getattr(mx, str(x.dtype)))

        x, last = placed(a), list[Any]()
        if isinstance(b, QuantizedArray):
            packed, scales, biases = b.to_mlx()
            bits = 32 * packed.shape[1] // b.shape[1]
            sets = [[placed(part) + 0 for part in (packed, scales, biases)] for _ in range(copies)]
            options = {"transpose": True, "group_size": b.group, "bits": bits}
            mx.eval(x, *sets)
            calls: list[Call] = [functools.partial(mx.quantized_matmul, x, *w, **options) for w in sets]
        else:
            many = [placed(b) + 0 for _ in range(copies)]
            mx.eval(x, many)
            calls = [functools.partial(mx.matmul, x, w.T) for w in many]

        def turn() -> None:
            last[:] = [call() for call in calls * times]
            mx.eval(last)

        return turn, lambda: np.array(last[-1].astype(mx.float32))


def _mlx_scatter(table: Any, indices: Any, values: Any) -> Any:
    result = table + 0  # of its own: an assignment changes what it is made to
    result[indices] = values
    return result


class Metalmm:
    """Our own matmuls, by "auto"."""

    def __init__(self, name: str, device: str | None) -> None:
        self.device = Device(device)
        self.name = name

    @property
    def version(self) -> str:
        return f"metalmm on device {self.device.name}"

    def synchronize(self, result: Any) -> None:
        pass  # a call ends when its result is there

    def call(self, row: Row, operands: list[Any]) -> Call | None:
        """By a prepared call."""
        if row.operation not in ("MatMul", "Linear"):
            return None
        a, b, bias = operands[0], operands[1], operands[2] if len(operands) > 2 else None
        if b.ndim == 2:  # one B for all: the rows of the batch are rows of one matrix
            a = a.reshape(-1, a.shape[-1])
        da, db, dbias = self.device.array(a), self.device.array(b), None if bias is None else self.device.array(bias)
        out = self.device.empty((*a.shape[:-1], b.shape[-1]), "float32")
        return self.device.prepare("auto", da, db, bias=dbias, out=out)

    def products(self, a: Any, b: Any, copies: int, times: int) -> Products | None:
        """In a recording, each result in a place of its own."""
        is_quantized = isinstance(b, QuantizedArray)
        x, many = self.device.array(a), [b.to(self.device) if is_quantized else self.device.array(b) for _ in range(copies)]
        outs = [self.device.empty((a.shape[0], b.shape[0]), a.dtype) for _ in range(copies)]
        batch = self.device.batch()
        for w, out in list(zip(many, outs, strict=True)) * times:
            batch.add(self.device.prepare("auto", x, w, out=out, transpose_b=True))
        recording = batch.record()

        def turn() -> None:
            recording.replay()
            recording.wait()

        return turn, lambda: np.asarray(outs[-1]).astype(np.float32)


Framework = Torch | Mlx | Metalmm
FAILURES = (Error, RuntimeError, ValueError, TypeError, AttributeError, NotImplementedError, MemoryError)  # of one row, not of the others


def installed(device: str | None) -> tuple[list[Framework], list[str]]:
    """What can be measured here, and why the rest is not."""
    found: list[Framework] = []
    missing = []
    try:
        mx: Any = importlib.import_module("mlx.core")
        if mx.metal.is_available():
            found += [Mlx("mlx_gpu", "gpu", False), Mlx("mlx_gpu_compile", "gpu", True)]
        else:
            missing.append("mlx_gpu: this mlx has no GPU here")
        found.append(Mlx("mlx_cpu", "cpu", False))
    except ImportError:
        missing.append("mlx: not installed (pip install mlx)")
    try:
        torch: Any = importlib.import_module("torch")
        for name, has in (("mps", torch.backends.mps.is_available()), ("cuda", torch.cuda.is_available()), ("cpu", True)):
            if has:
                found.append(Torch(name, name))
            else:
                missing.append(f"{name}: torch has no such device here")
    except ImportError:
        missing.append("torch: not installed (pip install torch)")
    found.append(Metalmm("metalmm", device))
    return found, missing


def wanted(only: str | None, found: list[Framework], missing: Sequence[str]) -> list[Framework]:
    """Those of --only. Raises UsageError."""
    if not only:
        return found
    names, there = [name.strip() for name in only.split(",")], {f.name: f for f in found}
    if unknown := [name for name in names if name not in there]:
        raise command.UsageError(f"--only {unknown[0]}: it is not here; there are {', '.join(there)}. {'; '.join(missing)}")
    return [there[name] for name in names]


def median(call: Callable[[], Any], seconds: float, enough: float = math.inf) -> float:
    """Seconds, of three calls at least, and after `enough` seconds of one, behind one that does not count."""
    call()
    times: list[float] = []
    begin = time.perf_counter()
    while (
        not times
        or (len(times) < 3 and time.perf_counter() - begin < enough)
        or (time.perf_counter() - begin < seconds and len(times) < 10_000)
    ):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--operations", help="comma-separated, such as MatMul,Linear; default: all")
    parser.add_argument(
        "--only", help="frameworks, comma-separated: mlx_gpu, mlx_gpu_compile, mlx_cpu, mps, cuda, cpu, metalmm; default: what there is"
    )
    parser.add_argument("--time", type=float, default=0.2, help="seconds of a measurement (at least three calls)")
    parser.add_argument("--memory", type=command.positive, help="GB that a row may take; default: half of what is free")
    parser.add_argument("--seed", type=command.seed, default=0)
    parser.set_defaults(run=main)


def main(args: argparse.Namespace) -> int:
    """0; 1 where an operation failed; 130 if it was interrupted, with what was finished printed."""
    rows = _chosen(args.operations)
    found, missing = installed(args.device)
    found = wanted(args.only, found, missing)
    limit = args.memory * 1e9 if args.memory is not None else free_memory() / 2
    times: dict[str, dict[str, float | None]] = {}
    skipped: dict[str, str] = {}
    interrupted = False
    with terminal.Progress() as progress, contextlib.redirect_stdout(sys.stderr if args.json == "-" else sys.stdout):
        progress.begin("measuring", len(rows) * len(found))
        try:
            for row in rows:
                need = row.bytes * 3  # ours, the framework's, and one more that it may make on its way
                if need > limit:
                    skipped[row.text] = too_large(need, limit)
                    progress.step(len(found))
                    continue
                operands = draw(row, args.seed)
                times[row.text] = {}
                for framework in found:
                    progress.note(f"{row.text} on {framework.name}")
                    times[row.text][framework.name] = _measured(framework, row, operands, args.time, skipped)
                    progress.step()
        except KeyboardInterrupt:
            interrupted = True
    data = {
        "schema": "metalmm-frameworks",
        "version": 1,
        "environment": runner.environment(next((f.device for f in found if isinstance(f, Metalmm)), None) or Device(args.device)),
        "frameworks": {f.name: f.version for f in found},
        "missing": missing,
        "rows": times,
        "skipped": skipped,
    }
    if args.json != "-":
        _show(found, missing, rows, times, skipped)
    files.give_json(args.json, data)
    if interrupted:
        return 130
    return 1 if any("failed" in why for why in skipped.values()) else 0


def _chosen(operations: str | None) -> list[Row]:
    wanted = [name.strip().lower() for name in operations.split(",")] if operations else []
    known = {row.operation.lower(): row.operation for row in ROWS}
    if unknown := [name for name in wanted if name not in known]:
        raise command.UsageError(f"--operations {unknown[0]}: there are {', '.join(dict.fromkeys(known.values()))}")
    return [row for row in ROWS if not wanted or row.operation.lower() in wanted]


def _measured(framework: Framework, row: Row, operands: list[Any], seconds: float, skipped: dict[str, str]) -> float | None:
    try:
        call = framework.call(row, operands)
        return None if call is None else median(lambda: framework.synchronize(call()), seconds) * 1e3
    except FAILURES as error:
        skipped[f"{row.text} on {framework.name}"] = failed(error)
        return None


def failed(error: BaseException) -> str:
    return f"failed: {runner.first_lines(str(error) or repr(error))}"


def too_large(need: float, limit: float) -> str:
    return f"it takes {need / 1e9:.1f} GB of {limit / 1e9:.1f} GB that are allowed (--memory)"


def show_rest(skipped: Mapping[str, str], missing: Sequence[str]) -> None:
    for what, why in skipped.items():
        terminal.say(f"skipped: {what}: {why}")
    for why in missing:
        terminal.say(f"not here: {why}")


_SPEEDUPS = (
    ("mlx_gpu_compile", "mlx_gpu"),
    ("mlx_gpu", "mps"),
    ("mlx_gpu", "mlx_cpu"),
    ("metalmm", "mlx_gpu"),
    ("metalmm", "mps"),
    ("metalmm", "cpu"),
)


def _cells(values: dict[str, float | None], names: Sequence[str], pairs: Sequence[tuple[str, str]]) -> list[str]:
    cells = ["nan" if (value := values.get(name)) is None else f"{value:.2f}" for name in names]
    for ours, theirs in pairs:
        a, b = values.get(ours), values.get(theirs)
        cells.append(f"{(b / a - 1) * 100:+.0f}%" if a and b else "nan%")
    return cells


def averages(rows: Sequence[Row], times: dict[str, dict[str, float | None]]) -> dict[str, dict[str, float | None]]:
    """Of each operation, over the rows that every framework which has any of it measured, so that all means are of the same rows."""
    found: dict[str, dict[str, float | None]] = {}
    for operation in dict.fromkeys(row.operation for row in rows):
        measured = [times[row.text] for row in rows if row.operation == operation and row.text in times]
        having = [name for name in (measured[0] if measured else {}) if any(m[name] is not None for m in measured)]
        common = [m for m in measured if all(m[name] is not None for name in having)]
        if common and having:
            found[operation] = {name: statistics.fmean(float(m[name] or 0.0) for m in common) for name in having}
    return found


def _show(
    found: Sequence[Framework],
    missing: Sequence[str],
    rows: Sequence[Row],
    times: dict[str, dict[str, float | None]],
    skipped: dict[str, str],
) -> None:
    names = [f.name for f in found]
    pairs = [pair for pair in _SPEEDUPS if set(pair) <= set(names)]
    head = ("Operation", *names, *(f"{a}/{b} speedup" for a, b in pairs))
    numbers = range(1, len(head))
    terminal.say("; ".join(f"{f.name}: {f.version}" for f in found) + "; float32, ms, medians of synchronised calls")
    terminal.say("metalmm writes into one result again and again by a prepared call; the others make a result at each call")
    terminal.say("Detailed benchmark:", "bold")
    terminal.table(head, [[text, *_cells(values, names, pairs)] for text, values in times.items()], numbers=numbers)
    terminal.say("Average benchmark:", "bold")
    terminal.table(head, [[name, *_cells(values, names, pairs)] for name, values in averages(rows, times).items()], numbers=numbers)
    terminal.say("averages are of the rows that every framework with such an operation measured")
    show_rest(skipped, missing)
