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
from . import runner
from .results import decide
from .sizes import of_spec

_RULE = runner.Rule(least=0.01, most=0.05, spread=0.05)
_here = threading.local()  # what is measured asks for variants, too
_lock = Lock()  # one thread measures, others wait for what it finds
_tried = set[tuple[str, tuning.Key]]()


def measure_first(device: Device, spec: MatmulSpec) -> None:
    """Measures the rule's best few for a shape that is not tuned, on cold weights, and keeps the fastest in the tuning file. A warning says why
    that was not possible, or why it is not kept. Nothing is measured on a device that looks at accesses, nor twice in a process."""
    if getattr(_here, "measures", False) or device.options.get("debug") or device.options.get("guards"):
        return
    key = tuning.Key.of(spec)
    with _lock():
        _here.measures = True
        try:
            tuning.make_file()
            if tuning.is_tuned(device, spec) or (tuning.device_key(device), key) in _tried:
                return
            _tried.add((tuning.device_key(device), key))
            tuning.keep(device, _measured(device, key, tuning.best_few(device, spec)))
        except (Error, OSError, MemoryError) as error:
            warnings.warn(f"autotune: {spec!r} is not tuned, or not kept: {error}; METALMM_TUNING names another file", stacklevel=2)
        finally:
            _here.measures = False


def _measured(device: Device, key: tuning.Key, names: Sequence[str]) -> tuning.Choice:
    few, shape = [manifest.get(name) for name in names], of_spec(tuning.spec_of(key))
    with Progress(quiet=True) as progress:
        failures = runner.compile_all(device, [(shape, few)], progress)
        failed, copies = {v: why for (v, _), why in failures.items()}, runner.cold_copies(shape, device)
        run = runner.run_shape(device, shape, few, rule=_RULE, copies=copies, seed=0, progress=progress, failures=failed)
    if not (found := decide(run)):
        raise UnsupportedError("; ".join(f"{r.variant}: {r.failed or r.wrong}" for r in run.results))
    digest = manifest.kernel_sha256(found.winner.variant, shape.spec)
    return tuning.Choice(key, found.winner.variant, digest, found.median.value, datetime.now(UTC).isoformat(timespec="seconds"))
