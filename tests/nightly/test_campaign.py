"""Calls drawn at random: any variant or point of a strategy, type, format, layout, size, stride, epilogue. METALMM_CAMPAIGN: seconds, by default 60 for each compiler.

METALMM_CAMPAIGN=1200 python -m pytest -n 2 tests/nightly/test_campaign.py -s
"""

from __future__ import annotations

import contextlib
import functools
import random
import time
from collections import defaultdict
from typing import Any

import metalmm
import numpy as np
import pytest
from metalmm import manifest
from support import counting
from support.here import CAMPAIGN_SECONDS, CAMPAIGN_SEED, COMPILERS, DEVICE
from support.operands import DTYPES, draw, size_limits
from support.rows import Row, known


@functools.cache
def by_kernel() -> dict[tuple[str, str], list[metalmm.Variant]]:
    found = defaultdict[tuple[str, str], list[metalmm.Variant]](list)
    for v in known():
        found[v.kernel, v.storage].append(v)
    return found


def drawn_point(rng: random.Random, v: metalmm.Variant) -> metalmm.Variant:
    """Another point of its strategy, most of which do not ship; some values are none that a search would try."""
    strategy = next((s for s in manifest.strategies() if s.family == v.family and s.search), None)
    while strategy and rng.random() < 0.9:
        values = {
            key: rng.randint(1, max(choices)) if rng.random() < 0.2 and type(choices[0]) is int else rng.choice(choices)
            for key, choices in strategy.search.items()
        }
        with contextlib.suppress(metalmm.UnknownVariantError):
            return manifest.get(f"{v.family}/{strategy.name(values)}").of(v.storage, v.end) or v
    return v


def drawn_call(rng: random.Random, compiler: str) -> Any:
    v = rng.choice(rng.choice(list(by_kernel().values())))
    v = drawn_point(rng, v) if rng.random() < 0.5 else v
    row = Row(v, rng.choice(v.types), rng.choice(v.supports["layouts"]), compiler)
    least, most = size_limits(v, "m")
    size = lambda: rng.choice((rng.randint(1, 40), rng.randint(41, 700), rng.randint(1, 9) * 32))  # noqa: E731
    call = draw(
        row, rng.randint(least, min(most, 70)), size(), rng.choice((size(), rng.randint(700, 5000))), batch=rng.choice((1, 1, 2, 3)),
        bias=rng.random() < 0.5, c=True, alpha=rng.choice((1.0, 0.125, -2.7)), beta=rng.choice((0.0, 1.0, 0.3)), pad=rng.randint(0, 5),
        seed=rng.randint(0, 1 << 20), group=rng.choice((32, 64, 128)) if "affine" in v.storage else None,
    )  # fmt: skip
    if rng.random() < 0.2:
        call.a.flat[rng.randrange(call.a.size)] = np.asarray(rng.choice((np.nan, np.inf, 0.0, 60000.0)), DTYPES[row.dtype])
    return call


@pytest.mark.parametrize("compiler", COMPILERS if DEVICE == "cpu" else ["-"])
def test_random_calls(compiler: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE == "cpu":
        monkeypatch.setenv("METALMM_CXX", compiler)
    rng, until, checked, wrong = random.Random(CAMPAIGN_SEED), time.monotonic() + CAMPAIGN_SECONDS, counting.cases, list[str]()
    with metalmm.Device(DEVICE) as device:
        while time.monotonic() < until:
            call = drawn_call(rng, compiler)
            try:
                call.check(device)
            except AssertionError as error:
                wrong.append(str(error))
            except (metalmm.KernelError, metalmm.CompileError) as error:  # a point too large for the device, with operands of that type
                if "bytes of threadgroup memory; the limit is" not in str(error):
                    wrong.append(str(error))
    print(f"seed {CAMPAIGN_SEED}, {compiler} on device {DEVICE}: {counting.cases - checked + len(wrong)} checked, {len(wrong)} wrong")
    assert not wrong, f"seed {CAMPAIGN_SEED}: {wrong[:5]}"
