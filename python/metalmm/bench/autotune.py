"""Device(autotune=True): what "auto" may take is measured when a shape is first used."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Sequence
from datetime import UTC, datetime

from .. import MatmulSpec, manifest, tuning
from ..device import Device
from ..errors import Error, UnsupportedError
from ..fork import Lock
from ..terminal import Progress
from .results import decide
from .runner import cold_copies
from .search import QUICK, compiled_run
from .sizes import of_spec

_here = threading.local()  # what is measured asks for variants, too
_lock = Lock()  # one thread measures, others wait for what it finds
_tried = set[tuple[str, tuning.Key]]()


def measure_first(device: Device, spec: MatmulSpec) -> None:
    """Measures the rule's best few for a shape that is not tuned, on cold weights, and keeps the fastest in the tuning file. A warning says why
    that was not possible, or why it is not kept. Nothing is measured on a device that looks at accesses, nor twice in a process."""
    if getattr(_here, "measures", False) or device.options.get("debug") or device.options.get("guards"):
        return
    key = tuning.Key.of(spec)
    one = tuning.device_key(device), key
    with _lock():
        _here.measures = True
        try:
            tuning.make_file()
            if tuning.is_tuned(device, key) or one in _tried:
                return
            _tried.add(one)
            stand_in = tuning.spec_of(key)
            tuning.keep(device, _measured(device, stand_in, tuning.best_few(device, stand_in)))
        except (Error, OSError, MemoryError) as error:
            warnings.warn(f"autotune: {spec!r} is not tuned, or not kept: {error}; METALMM_TUNING names another file", stacklevel=2)
        finally:
            _here.measures = False


def _measured(device: Device, spec: MatmulSpec, names: Sequence[str]) -> tuning.Choice:
    few, shape = [manifest.get(name) for name in names], of_spec(spec)
    run = compiled_run(device, shape, few, QUICK, cold_copies(shape, device), 0, Progress(quiet=True))
    if not (found := decide(run)):
        raise UnsupportedError("; ".join(f"{r.variant}: {r.failed or r.wrong}" for r in run.results))
    return tuning.Choice.of(spec, found.winner.variant, found.median.value, datetime.now(UTC).isoformat(timespec="seconds"))
