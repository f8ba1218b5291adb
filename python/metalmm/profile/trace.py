"""metalmm's own dispatches as the events of a profile log, so that `metalmm profile analyze` reads our runs, and as a trace for Perfetto."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

from .. import _core
from ..errors import ArgumentError


class _Tracer:
    """Writes what the extension tells it. Under a lock of its own: threads dispatch at once."""

    def __init__(self, log: IO[bytes], chrome: list[dict[str, Any]] | None) -> None:
        self._log, self._chrome, self._lock, self._start = log, chrome, threading.Lock(), time.perf_counter()
        self._owner, self._is_open = os.getpid(), True
        self.failure: OSError | None = None  # of a write: the matmul that is traced is not to blame

    def close(self) -> None:
        """A thread may be on its way in: what it brings comes too late."""
        with self._lock:
            self._is_open = False

    def __call__(
        self,
        what: str,
        dispatches: list[tuple[str, tuple[int, int, int], _core.MatmulSpec | None]],
        times: list[float | None],
        encode: float,
        commit: float,
        wait: float,
        device: float | None,
    ) -> None:
        if os.getpid() != self._owner:  # a child of fork(), whose events are not this trace's
            return
        now = time.perf_counter() - self._start
        events: list[tuple[str, dict[str, Any]]] = []
        known = [*times, *[None] * (len(dispatches) - len(times))]
        if what == "call" and known[0] is None:
            known = [device]
        at = now - (device if device is not None else wait)
        for (name, grid, spec), seconds in zip(dispatches, known, strict=False):
            op_name = f"metalmm/{'kernel' if spec is None else 'matmul'}/{name}"
            events.append(("GpuKernelDispatched", {"kernel_name": name, "op_name": op_name, "thread_groups": list(grid)}))
            if seconds is None:
                continue
            data: dict[str, Any] = {"op_name": op_name, "backend": name, "duration_us": _us(seconds)}
            if spec is not None:
                data["data"] = {"backend": name, **pairs_of(spec)}
            events.append(("GpuOpCompleted", data))
            self._span(name, at, seconds, "device", data.get("data"))
            at += seconds
        scope = f"metalmm/{what}"
        events.append(("GpuOpCompleted", {"op_name": f"{scope}/cb_wait", "backend": "metalmm", "duration_us": _us(wait)}))
        if device is not None:
            events.append(("GpuOpCompleted", {"op_name": f"{scope}/cb_gpu", "backend": "metalmm", "duration_us": _us(device)}))
        if what != "call":
            host = {"parent_op_name": scope, "internal_kernel_name": "encode", "duration_us": _us(encode)}
            events.append(("InternalKernelCompleted", host))
            events.append(("InternalKernelCompleted", {**host, "internal_kernel_name": "commit", "duration_us": _us(commit)}))
        self._span(f"{what} of {len(dispatches)}: wait", now - wait, wait, "host", None)
        stamp = datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
        rest = {"timestamp": stamp, "span_id": None, "parent_span_id": None, "span_name": None}
        lines = "".join(json.dumps({**rest, "event": {"type": kind, "data": data}}) + "\n" for kind, data in events)
        with self._lock:
            try:
                if self._is_open and self.failure is None:
                    rest_of_it = memoryview(lines.encode())
                    while rest_of_it:  # a full disk takes a part first
                        rest_of_it = rest_of_it[self._log.write(rest_of_it) :]
            except OSError as error:
                self.failure = error

    def _span(self, name: str, at: float, seconds: float, track: str, arguments: dict[str, Any] | None) -> None:
        thread = threading.get_ident() % 1_000_000 if track == "host" else 0
        if self._chrome is None:
            return
        span = {"name": name, "cat": track, "ph": "X", "ts": at * 1e6, "dur": seconds * 1e6, "pid": self._owner, "tid": thread}
        with self._lock:
            self._chrome.append({**span, **({"args": arguments} if arguments else {})})


def _us(seconds: float) -> int:
    return max(0, round(seconds * 1e6))


def op_of(spec: _core.MatmulSpec) -> str:
    """What a profile calls such a matmul."""
    return "matmul_bias_add" if spec.bias else "matmul_alpha_beta" if spec.alpha != 1 or spec.beta else "matmul"


def pairs_of(spec: _core.MatmulSpec) -> dict[str, str]:
    """What a log says of it."""
    op = op_of(spec)
    pairs = {"op": op, "batch": spec.batch, "m": spec.m, "n": spec.n, "k": spec.k}
    more: dict[str, object] = {"tA": int(spec.transpose_a), "tB": int(spec.transpose_b)}
    if spec.also_n:
        names = ("n0", "n1") if len(spec.also_n) == 1 else ("nq", "nk", "nv")
        del pairs["n"]
        more.update(zip(names, (spec.n, *spec.also_n), strict=True))
    if spec.also_n or spec.b_storage != "dense":
        more["loader"] = spec.b_storage
    if spec.swiglu:
        more["activation"] = "swiglu"
    if spec.bias:
        more["bias"] = 1
    if op == "matmul_alpha_beta" or spec.alpha != 1 or spec.beta:
        more.update(alpha=f"{spec.alpha:.9g}", beta=f"{spec.beta:.9g}")  # which tell float32 numbers apart
    if spec.dtype != "float16":
        more["dtype"] = spec.dtype
    return {key: str(value) for key, value in {**pairs, **more}.items()}


_active = threading.Lock()


@contextlib.contextmanager
def trace(path: str | os.PathLike[str], chrome: str | os.PathLike[str] | None = None) -> Iterator[None]:
    """Writes what metalmm dispatches inside the with block to `path`, in the format that `metalmm profile analyze` reads.

    It writes each dispatch with its matmul's sizes and time. Of each call, batch and replay it writes what the host waited (cb_wait) and
    the device worked (cb_gpu). Nobody times the dispatches of a replay. They are in it without their times, and `profile sizes` does not
    count them.

    Batches opened inside are timed dispatch by dispatch, where the device can, which keeps them from overlapping. Durations are whole
    microseconds, as the format has them. What is still under way at the end of the block is not in it. Off, it costs nothing that can be
    measured.

    Args:
        path: The file of the trace.
        chrome: A file for ui.perfetto.dev or chrome://tracing as well. In it the dispatches of a batch stand one after another before
            the batch's end.

    Raises ArgumentError where a trace is under way already. Raises OSError for a path that cannot be written, at the end also for a disk
    that became full.
    """
    for value in (path, chrome or path):
        if not isinstance(value, (str, os.PathLike)):
            raise ArgumentError(f"trace: {value!r} is no path")
    if not _active.acquire(blocking=False):
        raise ArgumentError("trace: one is under way already; end it first")
    try:
        spans: list[dict[str, Any]] | None = None
        if chrome is not None and os.path.realpath(chrome) == os.path.realpath(path):
            raise ArgumentError("trace: chrome is the same file as path")
        if chrome is not None:
            spans = []
            Path(chrome).touch()
        with open(
            os.fspath(path), "wb", buffering=0
        ) as log:  # nothing stays behind: not for a child of fork(), nor for a close() that fails
            tracer = _Tracer(log, spans)
            _core._set_trace(tracer)
            try:
                yield
            finally:
                _core._set_trace(None)
                tracer.close()
        if tracer.failure:
            raise tracer.failure
        if chrome is not None and spans is not None:
            names = [{"name": "thread_name", "ph": "M", "pid": os.getpid(), "tid": 0, "args": {"name": "device"}}]
            Path(chrome).write_text(json.dumps({"traceEvents": [*names, *spans]}))
    finally:
        _active.release()
