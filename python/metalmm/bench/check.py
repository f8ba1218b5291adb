"""A variant's trials before it is timed: once on a device that shuffles threads and watches memory, once in a process of its own."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path

from .. import Device, Error, Variant, backends, manifest
from ..errors import DeviceError
from ..terminal import Progress
from .runner import Inputs, first_lines, measuring_device
from .sizes import Shape

_MOST = 1 << 24  # multiplications


def is_own(v: Variant) -> bool:
    """Whether it is from a manifest of the user's."""
    return v.manifest != manifest.BUILTIN


def reduced(v: Variant, shape: Shape) -> Shape:
    """The shape with fewer columns, matrices and tiles of rows, which sees the same edges and alignment and the whole of k."""
    bm, bn = v.tile
    while shape.m * shape.n * shape.k * shape.batch > _MOST:
        smaller = shape
        if shape.batch > 2:
            smaller = replace(shape, batch=2)
        elif bn and shape.n > (least := 2 * bn + shape.n % bn):
            smaller = replace(shape, n=least, also_n=tuple(min(n, 2 * bn + n % bn) for n in shape.also_n))
        elif bm and shape.m > (least := 2 * bm + shape.m % bm):
            smaller = replace(shape, m=least)
        if smaller == shape:
            break
        shape = smaller
    return shape


@dataclass(frozen=True)
class Checked:
    """What came of a check.

    Attributes:
        wrong: How its result missed the bound.
        failed: What ended it.
        ran: What was run, or why nothing was.
    """

    wrong: str = ""
    failed: str = ""
    ran: str = ""


def check(device: Device, v: Variant, shape: Shape, seed: int) -> Checked:
    if why := v.unavailable(device):
        return Checked(ran=f"not checked: {why}, which has the debug mode")
    small = reduced(v, shape)
    if v.lacks(small.spec):
        small = shape
    ran = f"debug mode: {small.short}"
    try:
        wrong = Inputs(device, small, seed, 1).judge(device, v)
        return Checked(wrong and f"in debug mode, {small.short}: {wrong}", "", ran)
    except Error as error:
        return Checked("", f"in debug mode, {small.short}: {first_lines(str(error))}", ran)


def check_all(
    work: Sequence[tuple[Shape, Sequence[Variant]]], seed: int, timeout: float, progress: Progress
) -> dict[tuple[str, Shape], Checked]:
    """By variant and shape: what check() says."""
    pairs = [(v, shape) for shape, vs in work for v in vs]
    found: dict[tuple[str, Shape], Checked] = {}
    if not pairs:
        return found
    name = backends.debugging()
    progress.begin("checking", len(pairs))
    with Device(name, debug=True, timeout=timeout) as device:
        for v, shape in pairs:
            progress.note(f"{shape.short}: {v}")
            found[str(v), shape] = check(device, v, shape, seed)
            progress.step()
    return found


def try_all(
    device: Device, work: Sequence[tuple[Shape, Sequence[Variant]]], seed: int, timeout: float, progress: Progress
) -> dict[tuple[str, Shape], Checked]:
    """By variant and shape: how it failed in a process of its variant's own, on the kind of device that will measure it.

    A kernel may write anywhere where no debug mode looks, and on device cuda an access off its alignment ends all work of its process. So
    nothing else is in that one. Those that did not fail are left out.
    """
    by_variant: dict[str, list[Shape]] = {}
    for shape, vs in work:
        for v in vs:
            by_variant.setdefault(str(v), []).append(shape)
    found: dict[tuple[str, Shape], Checked] = {}
    if by_variant:
        progress.begin("trying", len(by_variant))
    for name, shapes in by_variant.items():
        progress.note(name)
        for shape, failed in zip(shapes, _failures(device.name, manifest.get(name), shapes, seed, timeout), strict=True):
            if failed:
                found[name, shape] = Checked(failed=f"in a process of its own: {failed}")
        progress.step()
    return found


def _failures(device: str, v: Variant, shapes: Sequence[Shape], seed: int, timeout: float) -> list[str]:
    """Of each shape: empty, or how it failed."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, device, v.manifest, str(v), shapes, seed, timeout), daemon=True)
    process.start()
    theirs.close()
    answers = list[str]()
    try:
        for _ in ("begun", *shapes):
            answers.append(str(ours.recv()))
    except (EOFError, OSError):
        pass  # it has ended
    process.join()
    code = process.exitcode or 0
    ended = f"it ended the process ({signal.Signals(-code).name if code < 0 else f'exit status {code}'})" if code else ""
    if not answers:
        raise DeviceError(f"no process could be started to try {v} in: {ended}; what it said stands above")
    if ended:  # perhaps long after the kernel that brought it about
        answers[1:] = ["; ".join(filter(None, (answer, ended))) for answer in answers[1:]]
    return [*answers[1:], *[ended] * (1 + len(shapes) - len(answers))]


def _serve(pipe: Connection, name: str, path: Path, variant: str, shapes: Sequence[Shape], seed: int, timeout: float) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal, which the other process was asked by, too
    manifest.load_variants(path)
    v = manifest.get(variant)
    with measuring_device(name, timeout) as device:
        pipe.send("begun")
        for shape in shapes:
            small = reduced(v, shape)
            small = shape if v.lacks(small.spec) else small
            try:
                Inputs(device, small, seed, 1).judge(device, v)
                pipe.send("")
            except Error as error:
                pipe.send(f"{small.short}: {first_lines(str(error))}")
