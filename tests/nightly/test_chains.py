"""Recordings of several calls of "auto", each of which reads the result of the one before: sizes of models, any type, format, layout, epilogue.

A GPU may let a call begin before the one before it ends. It may read the call's weights early, and share out cores between both. Results must
have the bits that each call alone gives. Three rows of each are within the bound. METALMM_CAMPAIGN: seconds, by default 60. On a GPU:

METALMM_TEST_ALL=1 METALMM_DEVICE=cuda METALMM_CAMPAIGN=300 METALMM_TEST_SEED=7 python -m pytest tests/nightly/test_chains.py -s
"""

from __future__ import annotations

import itertools
import random
import time
from dataclasses import dataclass, replace
from typing import Any

import metalmm
import numpy as np
from metalmm import numerics
from metalmm.quantized import FORMATS
from support.counting import count_case
from support.here import CAMPAIGN_SECONDS, CAMPAIGN_SEED, DEVICE, REAL_GPU
from support.operands import DTYPES

MOST_M, MOST_N = (2100, 12288) if REAL_GPU else (300, 300)
DRAWN_ROWS = 509  # of B: a wider one repeats them in any order, so that drawing and judging stay cheap


@dataclass
class Layer:
    """A call: B and its epilogue as they are drawn, and which of the drawn rows each column has."""

    b: Any
    pick: np.ndarray
    bias: Any
    c: Any
    options: dict[str, Any]

    def wide(self) -> Any:
        if isinstance(self.b, np.ndarray):
            return self.b[self.pick]
        axis = 1 if self.b.layout == "canonical" else 0
        parts = {name: getattr(self.b, name) for name in ("values", "scales", "biases")}
        parts = {name: None if x is None else np.ascontiguousarray(np.take(x, self.pick, axis)) for name, x in parts.items()}
        return replace(self.b, shape=(len(self.pick), self.b.shape[1]), **parts)

    def on(self, device: metalmm.Device) -> tuple[Any, dict[str, Any]]:
        wide, more = self.wide(), dict(self.options)
        if self.bias is not None:
            more["bias"] = device.array(self.bias[self.pick])
        if self.c is not None:
            more["c"] = device.array(np.ascontiguousarray(self.c[..., self.pick]))
        if not isinstance(wide, np.ndarray):
            return wide.to(device), more
        return device.array(wide if self.options["transpose_b"] else np.ascontiguousarray(wide.T)), more

    def wrong(self, a: np.ndarray, rows: list[int], found: np.ndarray) -> str:
        """What `numerics.mismatch` says of these rows."""
        options = {name: self.options[name] for name in ("alpha", "beta")}
        c = None if self.c is None else self.c[..., rows, :]
        ref, bound, _ = numerics.judged(a[..., rows, :], self.b, bias=self.bias, c=c, transpose_b=isinstance(self.b, np.ndarray), **options)
        return numerics.mismatch(found[..., rows, :], ref[..., self.pick], bound[..., self.pick])


def drawn_layer(rng: random.Random, numbers: np.random.Generator, lead: tuple[int, ...], m: int, n: int, k: int, dtype: str) -> Layer:
    count = min(n, DRAWN_ROWS)
    draw = lambda *shape: numbers.standard_normal(shape, np.float32).astype(DTYPES[dtype])  # noqa: E731
    b: Any = draw(count, k) / np.asarray(np.sqrt(k), DTYPES[dtype])
    if (form := rng.choice(("dense", "dense", *FORMATS))) != "dense":
        groups = FORMATS[form].groups
        b = metalmm.quantize(b, form, layout=rng.choice(("nk", "nk", "canonical")), group=rng.choice(groups) if len(groups) > 1 else None)
    bias, c = draw(count) if rng.random() < 0.4 else None, draw(*lead, m, count) if rng.random() < 0.25 else None
    options = {
        "alpha": rng.choice((1.0, 0.5)),
        "beta": 0.0 if c is None else rng.choice((1.0, -0.5)),
        "row_invariant": m <= 16 and rng.random() < 0.25,
        "transpose_b": form != "dense" or rng.random() < 0.85,
    }
    return Layer(b, numbers.integers(count, size=n), bias, c, options)


def drawn_sizes(rng: random.Random) -> tuple[int, list[int]]:
    """Rows of A, and the sizes from each call to the next."""
    m = rng.choice((1, rng.randint(2, 16), rng.randint(17, 70), rng.randint(71, 300), rng.choice((128, 256)), rng.randint(1, MOST_M)))
    most = [rng.choice((MOST_N, MOST_N // 6, MOST_N // 20)) for _ in range(rng.randint(3, 6))]
    dims = [max(1, rng.randint(1, x) // (unit := rng.choice((1, 1, 32, 64, 128))) * unit) for x in most]
    while max(a * b for a, b in itertools.pairwise(dims)) > 24e6 or m * max(dims) > 12e6:
        dims = [max(1, x // 2) for x in dims]
    return m, dims


def check_chain(rng: random.Random, device: metalmm.Device, alone: metalmm.Device) -> None:
    numbers, (m, dims) = np.random.default_rng(rng.randrange(1 << 30)), drawn_sizes(rng)
    dtype, lead = rng.choice(("float16", "float16", "bfloat16", "float32")), (rng.randint(2, 4),) if rng.random() < 0.1 and m <= 300 else ()
    layers = [drawn_layer(rng, numbers, lead, m, n, k, dtype) for k, n in itertools.pairwise(dims)]
    a = numbers.standard_normal((*lead, m, dims[0]), np.float32).astype(DTYPES[dtype])
    what = [
        f"m={m} sizes {dims} {dtype} batch {lead}",
        *((getattr(x.b, "storage", "dense"), x.bias is not None, x.options) for x in layers),
    ]
    given, outs, batch = device.array(a), list[Any](), device.batch()
    for layer, n in zip(layers, dims[1:], strict=True):
        b, options = layer.on(device)
        outs.append(device.array(np.full((*lead, m, n), np.nan, DTYPES[dtype])))
        batch.add(device.prepare("auto", outs[-2] if len(outs) > 1 else given, b, out=outs[-1], **options))
    recording, by_itself = batch.record(), [layer.on(alone) for layer in layers]
    for turn in range(3):  # with other numbers: what was there before would be right too
        if turn:
            a = numbers.standard_normal(a.shape, np.float32).astype(a.dtype)
            given.write(a)
        recording.replay()
        recording.wait()
        left = a
        for i, (layer, out, (b, options)) in enumerate(zip(layers, map(np.array, outs), by_itself, strict=True)):
            expected = np.asarray(metalmm.matmul("auto", alone.array(left), b, device=alone, **options))
            np.testing.assert_array_equal(out.view(np.uint8), expected.view(np.uint8), f"call {i} alone has other bits: {what}")
            assert not (wrong := layer.wrong(left, sorted({0, m - 1, rng.randrange(m)}), out)), f"call {i}: {wrong}: {what}"
            left = out
            count_case()


def test_random_chains() -> None:
    rng, until, count = random.Random(CAMPAIGN_SEED), time.monotonic() + CAMPAIGN_SECONDS, 0
    options = {"overlap": False} if DEVICE == "cuda" else {}
    with metalmm.Device(DEVICE) as device, metalmm.Device(DEVICE, **options) as alone:
        print(f"seed {CAMPAIGN_SEED}")
        while time.monotonic() < until:
            check_chain(rng, device, alone)
            count += 1
    print(f"{count} chains on device {DEVICE}")
    assert count > 0
