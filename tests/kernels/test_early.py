"""Kernels that read weights before they wait for the dispatch before: nothing else is read before the wait."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterator
from typing import Any

import metalmm
import numpy as np
import pytest
from metalmm import kernel_source
from support.changed import changed_kernels
from support.here import ALL_OF_IT, DEVICE, LINUX
from support.pages import Pages

pytestmark = pytest.mark.skipif(DEVICE != "cpu" or not LINUX, reason="a GPU has a copy of the memory")


def early() -> Iterator[metalmm.Variant]:
    """Of each strategy, each kind of format (with METALMM_TEST_ALL scaled ones, too), each end and each way through its kernel."""
    have = set[tuple[Any, ...]]()
    for v in (kind for known in metalmm.variants() for kind in known.kinds()):
        if not v.source or v.storage not in ("dense", "affine4", *(["q8_0"] if ALL_OF_IT else [])):
            continue
        ways = {
            (v.kernel, v.storage),
            (v.kernel, v.matrix_count, v.swiglu),
            *((v.kernel, x, v.params.get(x)) for x in ("staged", "wide", "mma")),
        }
        if ways - have and kernel_source.KernelText(kernel_source.inline_includes(v.source), str(v.source)).is_early:
            have |= ways
            yield v


SIZES = ((67, 133), (40, 896))  # in no whole vectors, and in whole ones; variants by turns
WAIT = "{ metal::simdgroup_barrier(metal::mem_flags::mem_none); }"
STOP = "{ do metal::threadgroup_barrier(metal::mem_flags::mem_none); while (metal::simd_sum(1.0f) > 0.0f); }"


def rows_of(v: metalmm.Variant) -> int:
    return 1 if v.supports.get("m") == 1 else 3


@pytest.fixture(scope="module")
def stopping() -> dict[str, metalmm.Variant]:
    """The variants, with all lanes of a threadgroup stopping for good where kernels/include/wait.h lets them wait; their compiler cannot know
    that it is for good, and leave out what is read beforehand."""
    return changed_kernels("stopping_", ("include/wait.h", WAIT, STOP))


@pytest.mark.rest(but=3)
@pytest.mark.parametrize(("v", "size"), list(zip(early(), itertools.cycle(SIZES), strict=False)), ids=str)
def test_weights_and_bias_alone_are_read_before_the_wait(
    v: metalmm.Variant, size: tuple[int, int], stopping: dict[str, metalmm.Variant], pages: list[Pages]
) -> None:
    """Whoever comes to A, C or D before the wait finds no memory there, which is another error."""
    device, rng, m = metalmm.Device("cpu", timeout=0.05), np.random.default_rng(14), rows_of(v)
    form, _, layout = v.storage.partition(":")
    for n, k in SIZES if ALL_OF_IT else [size]:
        is_nt = v.supports["layouts"][0] == "nt"
        w = rng.standard_normal((n, k) if is_nt else (k, n)).astype(np.float16)
        b: Any = w if form == "dense" else metalmm.quantize(w, form, layout=layout or "nk")
        a, *rest = (p.put(np.zeros(size, np.float16), True) for p, size in zip(pages, ((m, k), *[(m, n)] * 3), strict=False))
        bias, stops = rng.standard_normal(n).astype(np.float16), stopping[v]
        if v.swiglu:
            call = device.prepare_fused(stops, a, [b, b], bias=[bias, bias], activation="swiglu", out=rest[0])
        elif v.matrix_count > 1:
            call = device.prepare_fused(stops, a, [b] * v.matrix_count, bias=[bias] * v.matrix_count, out=rest[: v.matrix_count])
        else:
            call = device.prepare(stops, a, b, c=rest[0], beta=1.0, bias=bias, transpose_b=is_nt, out=rest[1])
        for p in pages[:4]:
            p.lock(True)
        try:
            with pytest.raises(metalmm.KernelError, match="timeout"):
                call()
        finally:
            for p in pages[:4]:
                p.lock(False)


def test_every_kernel_that_waits_is_looked_at() -> None:
    inlined = functools.cache(kernel_source.inline_includes)
    kinds = (v for known in metalmm.variants() for v in known.kinds() if v.source)
    waiting = {v.kernel for v in kinds if "wait_for_operands();" in inlined(v.source)}
    assert waiting == {v.kernel for v in early()} and len(waiting) >= 7, waiting


def test_who_may_let_the_next_one_begin_does_and_nobody_else() -> None:
    """Of a kernel with that header the device leaves it to the kernel: one that forgot would never let the next one begin early."""
    for source in {v.source for v in metalmm.variants() if v.source.is_relative_to(kernel_source.KERNELS)}:
        text = kernel_source.inline_includes(source)
        calls = len(re.findall(r"\blet_next_begin\((?!bool)", text))
        assert kernel_source.KernelText(text, str(source)).lets_next == (calls > 0), source
        assert calls == 0 or "  let_next_begin();" in text, f"{source}: not on the path of large sizes"
