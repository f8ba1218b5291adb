"""The rows of `metalmm doctor`: what the device takes for the shapes that matter, and the file that says so to others."""

from __future__ import annotations

import functools
import json
import os
import re
import socket
import statistics
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from . import __version__, manifest, tuning
from .bench import runner, sizes
from .bench.sizes import Shape
from .device import Device

_ROUNDS = 15
_SECONDS = 1.0  # of a variant's turn, if its calls are so slow
_MOST = 8  # variants that are compared in a row
_SHARED_BYTES = 1_000_000
SHARED = "metalmm doctor --share"


@dataclass(frozen=True)
class Row:
    """A shape, and the medians of those that were right on it: seconds of a call with its weights in the caches, and without."""

    shape: Shape
    hot: dict[str, float]
    cold: dict[str, float]

    @property
    def winner(self) -> str:
        return min(self.cold, key=lambda name: self.cold[name])

    def text(self) -> str:
        def entry(name: str) -> str:
            cold, hot = self.cold[name], self.hot[name]
            return f"{name} {cold * 1e3:.3f} ms cold, {self.shape.bytes / cold / 1e9:.0f} GB/s, {hot * 1e3:.3f} hot"

        auto = next(iter(self.cold))
        return entry(auto) + ("" if self.winner == auto else f"; faster: {entry(self.winner)}")

    def choice(self, when: str) -> tuning.Choice:
        """For "auto"."""
        return tuning.Choice.of(self.shape.spec, self.winner, self.cold[self.winner] * 1e3, when)


def shapes() -> list[Shape]:
    """The five hot shapes of the embedded decode step; the hottest again with quantized weights, and with more rows of A."""
    found = [s for s in sizes.load().shapes if s.m == 1 and s.batch == 1 and s.dtype == "float16"]
    distinct = list({(s.n, s.also_n, s.k, s.layout, s.storage): s for s in found}.values())
    hot = sorted(distinct, key=lambda s: -(s.total_ms or 0.0))[:5]
    first = next((s for s in hot if s.transpose_b and s.k % 64 == 0), None)
    if first is None:
        return hot
    return [*hot, *(replace(first, storage=form) for form in ("q8_0", "q4_0", "affine4")), *(replace(first, m=m) for m in (4, 512))]


def measure(device: Device, shape: Shape) -> Row:
    """What "auto" takes comes first, then the libraries and the device's preferred variants, each looked at before it is timed. Raises
    ValueError where one is wrong."""
    chosen, _ = tuning.choose(device, shape.spec)
    libraries = [str(v) for v in manifest.variants(shape.spec, device=device) if v.library]
    offered = [name for *_, name in device.backend.winners] + [str(p[2]) for p in device.backend.preferred if isinstance(p[2], str)]
    names = list(dict.fromkeys([chosen, *libraries, *(n for n in offered if tuning.usable(n, device, shape.spec))]))[:_MOST]
    inputs = runner.Inputs(device, shape, 3, runner.cold_copies(shape, device))
    hot, cold = dict[str, float](), dict[str, float]()
    for v in map(manifest.get, names):
        if wrong := inputs.judge(device, v):
            raise ValueError(f"{v}: {wrong}")
        calls = [inputs.prepare(device, v, w) for w in inputs.weights]
        cold[str(v)], hot[str(v)] = _median(calls), _median(calls[:1])
    return Row(shape, hot, cold)


def _median(calls: list[Any]) -> float:
    """Seconds of one, each the next of them: as the device says them, else until it has returned."""
    seconds, begin = list[float](), time.perf_counter()
    calls[0]()
    while len(seconds) < _ROUNDS and (len(seconds) < 3 or time.perf_counter() - begin < _SECONDS):
        call = calls[(len(seconds) + 1) % len(calls)]
        start = time.perf_counter()
        call()
        whole = time.perf_counter() - start
        own = call.device_seconds
        seconds.append(own if own is not None else whole)
    return statistics.median(seconds)


# -- for others -------------------------------------------------------------------------------------------------------


def shared(device: Device, data: dict[str, Any], choices: list[tuning.Choice]) -> dict[str, Any]:
    """A tuning file of the rows' winners, with what doctor found; nothing of whose machine it is. Under a megabyte."""
    info = {k: v for k, v in data["info"].items() if k != "registry_id"}
    checks = [{**c, "what": _plain(c["what"]), "data": _plain(c["data"])} for c in data["checks"]]
    found = {
        "schema": tuning.SCHEMA,
        "version": tuning.VERSION,
        "from": SHARED,
        "devices": {tuning.device_key(device): [c.as_json() for c in choices]},
        "doctor": {"metalmm": __version__, "info": info, "lacking": data["lacking"], "finished": data["finished"], "checks": checks},
    }
    for check in sorted(checks, key=lambda c: -len(json.dumps(c["data"]))):
        if len(json.dumps(found)) <= _SHARED_BYTES:
            break
        check["data"] = {"left out": "the file would be over a megabyte"}
    return found


@functools.cache
def _names() -> list[str]:
    found = [str(Path.home()), Path.home().name, socket.gethostname(), socket.gethostname().partition(".")[0], os.environ.get("USER", "")]
    return sorted({name for name in found if len(name) > 2}, key=len, reverse=True)


def _plain(value: Any) -> Any:
    """Without folders of paths, and without the names of the user and the machine."""
    if isinstance(value, str):
        for name in _names():
            value = value.replace(name, "…")
        value = re.sub(r"/(?:Users|home)/[^/:\n]*", "…", value)
        return re.sub(r"(?:~\w*)?/(?:[^\s/:\"]+/)+", "…/", value)
    if isinstance(value, dict):
        return {_plain(k): _plain(v) for k, v in value.items()}
    return [_plain(v) for v in value] if isinstance(value, list) else value
