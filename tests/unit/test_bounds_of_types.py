"""What specs, bounds and manifests say of operand types."""

from __future__ import annotations

import contextlib
import itertools
from pathlib import Path

import metalmm
import ml_dtypes
import numpy as np
import pytest
from metalmm import manifest, numerics
from support.operands import DTYPES


def test_every_family_takes_every_type_but_what_a_library_lacks() -> None:
    known = [kind for v in metalmm.variants(device=metalmm.default_device()) for kind in v.kinds()]
    without = [v for v in known if v.without and not v.kernel.endswith("weight_tiles") and not v.params.get("mma")]
    assert {v.family for v in without} <= {"mps", "blas", "mlx", "m1_optimized_v2", "gemm", "gemm_tensor"}
    assert all(set(v.without) == ({"bfloat16"} if v.library else {"float32"}) for v in without)
    assert sum(v.family in ("mlx", "m1_optimized_v2") for v in without) == 5, (
        "four tiles of mlx and one of v2 need more than 32 KB in float32"
    )
    edges = ((16, 32), (80, 32), (96, 32), (16, 96), (32, 96), (48, 64))
    more = [kind for bm, bn in edges for kind in manifest.get(f"gemm/bm{bm}_bn{bn}_bk64").kinds()]
    for v in [*known, *more]:  # each tile's lines, and eight more to a line
        if v.family == "gemm":
            bm, bn, bk = (v.params[key] for key in ("bm", "bn", "bk"))
            assert (tiles_of(bm, bn, bk, 4) <= 32768) == ("float32" not in v.without), v
    tiles = [v for v in known if v.kernel == "weight_tiles"]
    assert {v.types for v in tiles} == {("float16", "bfloat16")}, "8 bits of an integer and a sign are exact in both"
    one_row = [kind for v in metalmm.variants() if v.family == "gemv_nt_mma" for kind in v.kinds()]
    assert {v.types for v in one_row} == {("float16",)}


def tiles_of(bm: int, bn: int, bk: int, size: int) -> int:
    """Bytes: each tile's lines and eight more to a line, by rows or columns; of weights, by rows, two numbers for each 16 of k as well."""
    of_a = max(bm * (bk + 8), bk * (bm + 8))
    return max(size * (of_a + max(bn * (bk + 8), bk * (bn + 8))), size * (of_a + bn * (bk + 8)) + bk // 16 * bn * 8)


def test_no_tile_of_16_bits_is_larger_than_threadgroup_memory() -> None:
    """Whatever has a name: tiles of each layout and format, and the results of all simdgroups."""
    named = 0
    for bm, bn, bk in itertools.product((8, 16, 64, 128, 256), (8, 32, 40, 88, 128, 256), (32, 64, 128, 256, 384, 512, 768)):
        for wm, wn, wk in ((1, 1, 1), (1, 1, 4), (1, 1, 8), (8, 1, 1), (32, 1, 1), (8, 4, 1), (2, 4, 2), (4, 1, 4)):
            parts = "".join(f"_{key}{n}" for key, n in (("wm", wm), ("wn", wn), ("wk", wk)) if n != (1 if key == "wk" else 2))
            with contextlib.suppress(metalmm.UnknownVariantError):
                manifest.get(f"gemm/bm{bm}_bn{bn}_bk{bk}{parts}")
                named += 1
                assert tiles_of(bm, bn, bk, 2) <= 32768 and wm * wn * wk * 8 * (bn // wn + 4) * 4 <= 32768, (bm, bn, bk, parts)
    assert named > 100


def test_the_bound_is_that_of_the_type() -> None:
    """Half an ulp at 1 is 2^-11, 2^-8, 2^-24; a result one ulp further is a mistake, in each."""
    for dtype, half_ulp in (("float16", 2.0**-11), ("bfloat16", 2.0**-8), ("float32", 2.0**-24)):
        one = np.ones((1, 1), DTYPES[dtype])
        reference, bound, _ = numerics.judged(one, one)
        assert bound[0, 0] == half_ulp + 2.0**-24
        assert not numerics.mismatch(one, reference, bound)
        assert numerics.mismatch((one.astype(np.float64) * (1 + 4 * half_ulp)).astype(DTYPES[dtype]), reference, bound)
        largest = float(ml_dtypes.finfo(DTYPES[dtype]).max)
        with np.errstate(all="ignore"):
            infinite = np.full((1, 1), np.inf).astype(DTYPES[dtype])
        assert not numerics.mismatch(infinite, np.full((1, 1), largest * 1.01), np.full((1, 1), largest * 1e-9))
        assert numerics.mismatch(infinite, np.full((1, 1), largest * 0.9), np.full((1, 1), largest * 1e-9))


def test_the_spec_says_type_and_bytes() -> None:
    for dtype, size in (("float16", 2), ("bfloat16", 2), ("float32", 4)):
        spec = metalmm.MatmulSpec(3, 5, 7, 2, bias=True, beta=1.0, dtype=dtype)
        assert spec.dtype == dtype
        assert spec.least_bytes == size * (2 * (3 * 7 + 7 * 5 + 2 * 3 * 5) + 5)
        assert dtype == "float16" or dtype in repr(spec)
        assert spec != metalmm.MatmulSpec(3, 5, 7, 2, bias=True, beta=1.0, dtype="float32" if size == 2 else "float16")
    with pytest.raises(metalmm.DTypeError, match="operands of int8; they are float16, bfloat16 or float32"):
        metalmm.MatmulSpec(1, 1, 1, dtype="int8")


def test_a_manifest_says_which_types_a_variant_lacks_and_why(tmp_path: Path) -> None:
    (tmp_path / "mine.metal").write_text("")
    base = """format = 2
[reasons]
slow = "nobody wants it"
[kernels.mine]
template = ["type", "threads"]
tile = [1, "threads * 2"]
supports = { layouts = ["nn"] }
[families.my]
kernel = "mine"
[families.my.variants]
one = { threads = 32, without = { bfloat16 = "slow", float32 = "in words" } }
"""
    (tmp_path / "my.toml").write_text(base)
    (one,) = metalmm.load_variants(tmp_path / "my.toml")
    assert (one.types, one.tile, one.without) == (("float16",), (1, 64), {"bfloat16": "nobody wants it", "float32": "in words"})
    for condition, types in (("threads < 64", ("float16",)), ("threads * 2 == 32", ("float16", "float32"))):
        (tmp_path / "my.toml").write_text(base.replace('"in words"', f'["slow", "{condition}"]'))
        assert metalmm.load_variants(tmp_path / "my.toml")[0].types == types
    for old, new, message in [
        ('without = { bfloat16 = "slow"', 'without = { int8 = "slow"', "without knows nothing of 'int8'"),
        ('float32 = "in words"', 'float32 = "x", float16 = "y"', "without names all types"),
        ('float32 = "in words"', 'float32 = ["slow", "threads >"]', "without.float32 has 'threads >'; of a list the second is a condition"),
        ('float32 = "in words"', 'float32 = ["slow", 3]', "without.float32 has 3; of a list the second is a condition"),
        ('"threads * 2"', '"threads ** 2"', r"tile has 'threads \*\* 2'; it takes a number, a parameter"),
        ('"threads * 2"', '"thread"', "tile has 'thread'"),
        ('tile = [1, "threads * 2"]', 'tiles = [1, "threads * 2"]', r"kernels.mine: unknown key 'tiles'; did you mean 'tile'\?"),
        ("threads = 32", "thread = 32", r"my/one: unknown key 'thread'; did you mean 'threads'\?"),
        ('kernel = "mine"', 'kernel = "mind"', r"my/one: there is no table \[kernels.mind\]; did you mean 'mine'\?"),
        ('kernel = "mine"', 'kernel = "mine"\nwidth = 3', "family my: unknown key 'width'"),
        ("[families.my]", "[familie.my]", r"'familie' is no part of a manifest; did you mean 'families'\?"),
        ("[families.my]", "[[family]]\n[families.my]", r"'family' is no part of a manifest; did you mean 'families'\?"),
        ('slow = "nobody wants it"', "slow = 3", "'without.bfloat16' is 'slow', of the wrong type"),
    ]:
        (tmp_path / "my.toml").write_text(base.replace(old, new))
        with pytest.raises(metalmm.ManifestError, match=message):
            metalmm.load_variants(tmp_path / "my.toml")
