"""A variant's trials before it is timed: once on a device that shuffles threads and watches memory, once in a process of its own."""

from __future__ import annotations

import pickle
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

from .. import Device, Error, Variant, backends, manifest
from ..terminal import Progress
from .runner import Inputs, first_lines, measuring_device
from .sizes import Shape

_MOST = 1 << 24  # multiplications
_START = 300.0  # seconds that a process may take to start and to compile
_RUN = 20.0  # and then to run, beside four times its kernel's timeout


def is_own(v: Variant) -> bool:
    """Whether it is from a manifest of the user's."""
    return v.manifest != manifest.BUILTIN


def reduced(v: Variant, shape: Shape) -> Shape:
    """The shape with fewer columns, matrices and tiles of rows. It sees the same edges and alignment, and the whole of k.

    Where the variant does not take that one, the shape itself.
    """
    whole, (bm, bn) = shape, v.tile
    bn *= int(v.params.get("split", 1)) if "wgmma" in v.needs else 1  # threadgroups that share a tile have a part of its columns each
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
    return whole if v.lacks(shape.spec) else shape


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
) -> dict[tuple[str, Shape], str]:
    """By variant and shape: how it failed in a process of its own, on the kind of device that will measure it.

    A kernel may write anywhere where no debug mode looks, and on device cuda an access off its alignment ends all work of its process. So
    nothing else is in that one. Those that did not fail are left out.
    """
    pairs = [(v, shape) for shape, vs in work for v in vs]
    found: dict[tuple[str, Shape], str] = {}
    if pairs:
        progress.begin("trying", len(pairs))
    for v, shape in pairs:
        progress.note(f"{shape.short}: {v}")
        if failed := _failure(device.name, v, reduced(v, shape), seed, timeout):
            found[str(v), shape] = f"in a process of its own, {failed}"
        progress.step()
    return found


def _failure(device: str, v: Variant, shape: Shape, seed: int, timeout: float) -> str:
    """Empty, or how it failed: an error's text, or what became of the process."""
    told = pickle.dumps((device, str(v.manifest), str(v), shape, seed, timeout))
    command = [sys.executable, "-c", "from metalmm.bench import check; check._try()"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
    limit = _START + _RUN + 4 * timeout
    try:
        said, _ = process.communicate(told, timeout=limit)
    except subprocess.TimeoutExpired:
        return f"{shape.short}: it did not end within {limit:g} seconds"
    finally:  # Ctrl-C, too
        process.kill()
        process.wait()
    answer = said.decode().partition("tried: ")[2]
    code = process.returncode
    if code == -signal.SIGALRM:
        return f"{shape.short}: it did not end within {_RUN + 4 * timeout:g} seconds"
    ended = f"it ended the process ({signal.Signals(-code).name if code < 0 else f'exit status {code}'})" if code else ""
    why = "; ".join(filter(None, (answer.strip(), ended)))
    return why and f"{shape.short}: {why}"


def _try() -> None:
    """In that process."""
    device, path, variant, shape, seed, timeout = pickle.loads(sys.stdin.buffer.read())
    manifest.load_variants(path)
    with measuring_device(device, timeout) as own:
        try:
            inputs, v = Inputs(own, shape, seed, 1), manifest.get(variant)
            inputs.prepare(own, v, inputs.weights[0])
            signal.setitimer(signal.ITIMER_REAL, _RUN + 4 * timeout)  # ends it where it broke the memory that would end it
            inputs.judge(own, v)
            failed = ""
        except Error as error:
            failed = first_lines(str(error))
    print(f"tried: {failed}", flush=True)
