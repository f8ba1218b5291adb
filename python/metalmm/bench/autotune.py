"""Device(autotune=True): what "auto" may take is measured when a shape is first used."""

from __future__ import annotations

import threading
import warnings
from datetime import UTC, datetime

from .. import MatmulSpec, manifest, tuning
from ..device import Device
from ..errors import Error
from ..terminal import Progress
from . import runner
from .results import decide
from .sizes import of_spec

_RULE = runner.Rule(least=0.01, most=0.05, spread=0.05)
_under_way = threading.local()  # what is measured asks for variants, too


def measure_first(device: Device, spec: MatmulSpec) -> None:
    """Measures the rule's best few for a shape that is not tuned, on cold weights, and keeps the fastest in the tuning file. A warning says why
    that was not possible, or why it is not kept."""
    if getattr(_under_way, "is_so", False) or tuning.is_tuned(device, spec):
        return
    _under_way.is_so = True
    try:
        few = [manifest.get(v) for v in tuning.best_few(device, spec)]
        shape = of_spec(spec)
        with Progress(quiet=True) as progress:
            failures = runner.compile_all(device, [(shape, few)], progress)
            failed = {v: why for (v, _), why in failures.items()}
            copies = runner.cold_copies(shape, device)
            run = runner.run_shape(device, shape, few, rule=_RULE, copies=copies, seed=0, progress=progress, failures=failed)
        if not (found := decide(run)):
            return
        key = tuning.Key.of(spec)
        digest = manifest.kernel_sha256(found.winner.variant, tuning.spec_of(key))
        when = datetime.now(UTC).isoformat(timespec="seconds")
        tuning.keep(device, tuning.Choice(key, found.winner.variant, digest, found.median.value, when))
    except (Error, OSError, MemoryError) as error:
        warnings.warn(f"autotune: {spec!r} is not tuned: {error}", stacklevel=2)
    finally:
        _under_way.is_so = False
