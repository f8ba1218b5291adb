"""A variant's trial before it is timed: once on a device that shuffles threads and watches memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from .. import Device, Error, Variant, backends, manifest
from ..terminal import Progress
from .runner import Inputs, first_lines
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
