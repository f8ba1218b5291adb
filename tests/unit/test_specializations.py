"""What an instance is compiled for follows from sizes and layouts: said here once more, in Python."""

from __future__ import annotations

import itertools

import metalmm
import pytest
from metalmm import _core
from metalmm.variant import LAYOUTS, OPERAND_TYPES, SPECIALIZATIONS, STORAGES, type_of

SIZES = [(1, 8, 8), (3, 5, 7), (16, 48, 32), (24, 40, 48), (32, 64, 96), (128, 130, 64), (2, 128, 1040), (6, 12, 20)]


def in_bytes(storage: str, k: int) -> int:
    """Of a row of integers; of the canonical order 16, whatever k is."""
    form, _, layout = storage.partition(":")
    return 16 if layout else -(-k // 2) if "4" in form else k


def expected(v: metalmm.Variant, spec: metalmm.MatmulSpec) -> set[str]:
    m, n, k, bk = spec.m, spec.n, spec.k, int(v.params.get("bk", 1))
    starts, of_b = {k if not spec.transpose_a else m}, set[int]()
    if v.storage == "dense":
        starts |= {k if spec.transpose_b else n}
    else:
        of_b = {in_bytes(v.storage, k)}
    if spec.batch > 1:
        starts |= {m * k, *([k * n] if v.storage == "dense" else [])}
    is_whole = all(x % 16 == 0 for x in of_b)
    found = {
        "align_m": m % v.tile[0] == 0,
        "align_n": v.tile[1] > 0 and n % v.tile[1] == 0,
        "align_k": k % bk == 0,
        "vec": is_whole and all(x % 4 == 0 for x in starts),
        "vec8": is_whole and all(x % 8 == 0 for x in starts),
    }
    return {name for name, holds in found.items() if holds and name in v.template and name not in v.params}


@pytest.mark.parametrize("storage", STORAGES)
def test_an_instance_is_for_what_sizes_and_layouts_say(storage: str) -> None:
    for v in filter(None, (v.of(storage, "1") for v in metalmm.variants() if v.kernel)):
        for (m, n, k), layout, batch in itertools.product(SIZES, v.supports["layouts"], (1, 3)):
            turned = {"transpose_a": layout[0] == "t", "transpose_b": layout[1] == "t"}
            stored = {} if storage == "dense" else {"b_storage": storage}
            spec = metalmm.MatmulSpec(m=m, n=n, k=k, batch=batch, **turned, **stored)
            bits = _core._specialization(v, spec)
            names = {name for i, name in enumerate(SPECIALIZATIONS) if bits >> i & 1}
            assert names - {"ta", "tb"} == expected(v, spec), (v, spec)
            assert bits & 3 == LAYOUTS.index(layout)
            assert OPERAND_TYPES[type_of(bits)] == "float16"
