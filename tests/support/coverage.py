"""What README says is proved, from the arrays."""

from __future__ import annotations

import metalmm

from .here import COMPILERS, ROOT
from .rows import What, array, debug_array, first_of, kinds, known, on_tensor_cores

README = ROOT / "README.md"


def tensor_cores() -> list[metalmm.Variant]:
    """What device cuda alone runs; the CPU suite compiles it with a stand-in for tensor cores."""
    return kinds([v for v in metalmm.variants() if on_tensor_cores(v)])


def sentence() -> str:
    """The line of README with the suite's figures."""
    variants = [*known(), *tensor_cores()]
    rows, debug = [*array(), *array(tensor_cores())], debug_array(variants)
    kinds, there = {What.of(v) for v in variants}, {What.of(row.variant) for row in rows}
    by = " and ".join(f"{sum(row.compiler == c for row in rows)} by {c}" for c in COMPILERS)
    return (
        f"The suite compiles {len(rows)} kernels, {by}. They have {len(there)} of {len(kinds)} combinations of kernel, weight format, end and tensor cores,"
        f' and each of {len({*variants})} ids and points that "auto" prefers. It checks {len(debug)} more in debug mode. `make test`'
        f" takes {len(first_of(rows))} and {len(first_of(debug))} of them, `make test-rest` the others, `make test-all` every instance."
    )
