"""Ids say how, never what: names of points, which kernel takes which B, and what ids of before are called now."""

from __future__ import annotations

import random
from pathlib import Path

import metalmm
import numpy as np
import pytest
from metalmm import _core, manifest, old_ids
from metalmm.errors import ManifestError
from metalmm.strategy import Strategy
from metalmm.variant import ENDS, LAYOUTS, OPERAND_TYPES, STORAGES, specialization_of, type_of
from support.surroundings import refused

STRATEGIES = manifest.strategies(manifest.BUILTIN)


def drawn(strategy: Strategy, count: int) -> list[dict[str, int]]:
    """Points of its space, whatever the shape."""
    rng, found = random.Random(strategy.family), list[dict[str, int]]()
    for _ in range(200 * count):
        values = {key: rng.choice([*choices, 1]) for key, choices in strategy.search.items()}
        if len(found) < count and not strategy._broken(strategy.where, values):
            found.append(values)
    return found


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda s: s.family)
def test_a_point_has_one_spelling(strategy: Strategy) -> None:
    """Its name says its parameters, and no other name does."""
    names = dict[str, dict[str, int]]()
    for values in drawn(strategy, 60):
        name = strategy.name(values)
        assert {key: int(x) for key, x in strategy.values(name).items()}.items() <= {k: int(x) for k, x in values.items()}.items()
        assert names.setdefault(name, values) == values
        v = manifest.get(f"{strategy.family}/{name}")
        assert {key: v.numbers()[key] for key in values} == {key: int(x) for key, x in values.items()}
        words = name.split("_")
        for other in ("_".join(reversed(words)), name + "_" + words[0], name.replace("tg", "tg0"), name.upper(), name + "_"):
            if other != name:
                with pytest.raises(metalmm.UnknownVariantError):
                    manifest.get(f"{strategy.family}/{other}")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gemv_nt/l4_c1_d7_tg64", "it is spelled 'l4_d7_tg64'"),
        ("gemv_nt/tg64_l4", "it is spelled 'l4_tg64'"),
        ("gemv_nt/l3_tg64", "32 % lanes == 0 does not hold"),
        ("gemv_nt/r2_l4_x_tg64", "rows == 1 or staged == 0 does not hold"),
        ("gemv_nt/l0_tg64", "lanes is 0; it takes 1 or more"),
        ("gemv_columns/bn64_bk64_u0_tg64", "unroll is 0; it takes 1 or more"),
        ("gemv_nn_octet/o3_tg72", "threads % 32 == 0 does not hold"),
        ("gemv_nn_octet/o3_tg96", "32 % octets == 0 does not hold"),
        ("gemv_split_k/bn37_tg64", "bn % 4 == 0 does not hold"),
        ("gemv_split_k/bn64_tg32", "bn <= 32 does not hold"),
        ("gemv_nt/tg64", r"lN \(lanes\) is missing"),
        ("gemv_nt/l4_y_tg64", "it does not know 'y'"),
        ("gemv_nt/l4_tg12345678901", "it does not know"),
        ("gemv_nt/l4_tg2048", "threads is 2048; Metal allows 1 to 1024"),
        ("gemv_nt/", "names of gemv_nt are rN_lN_cN_sN_dN_x_tgN"),
        ("gemv_nt/l4_tg64\0", r"no variant 'gemv_nt/l4_tg64\\x00'; did you mean"),
        ("gemv_nt", "it is a family; its members are gemv_nt/l4_d7_tg64"),
        ("q8/nk_l4_c1_s1_d7_tg64", "it is called gemv_nt/l4_d7_tg64 now"),
    ],
)
def test_names_that_are_none(name: str, message: str) -> None:
    known = metalmm.variants()
    for call in (manifest.get, lambda n: metalmm.matmul(n, np.ones((1, 8), np.float16), np.ones((8, 8), np.float16))):
        with pytest.raises(metalmm.UnknownVariantError, match=message):
            call(name)
    assert metalmm.variants() == known


def test_the_kernel_follows_from_b() -> None:
    v = manifest.get("gemv_nt/l4_d7_tg64")
    taken = {(kind.storage, kind.end): kind for kind in v.kinds()}
    assert set(taken) == {(storage, end) for storage in STORAGES for end in ENDS}
    for (storage, end), kind in taken.items():
        also_n = () if end == "1" else (8,) * (int(end.replace("swiglu", "2")) - 1)
        spec = metalmm.MatmulSpec(1, 8, 64, b_storage=storage, also_n=also_n, swiglu=end == "swiglu", transpose_b=True)
        assert not v.lacks(spec)
        bits = _core._specialization(spec)
        assert v.instance(bits) == kind.instance(bits), "of one kind as of all"
        is_fused, form = end != "1", storage.partition(":")[0]
        assert kind.kernel == ("fused_columns" if is_fused else "dense_columns" if form == "dense" else "weight_columns")
        asked = specialization_of("float16", "nt", storage, end)
        assert bits == asked and OPERAND_TYPES[type_of(bits)] == "float16" and LAYOUTS[bits & 3] == "nt"
        if form != "dense" or is_fused:
            layout = "true" if storage.endswith(":canonical") else "false"
            assert f"half, Weights<half, {form.upper()}, {layout}>, " in v.instance(bits)
    assert manifest.get("gemv_nt_vec4/c4_tg128").of("q8_0", "1") is None


def test_two_names_of_one_kernel_share_its_code() -> None:
    spec = metalmm.MatmulSpec(1, 64, 64, transpose_b=True)
    assert manifest.kernel_sha256("m1_optimized_v4/nt_bn8_largek_smalln_tg256", spec) == manifest.kernel_sha256(
        "gemv_split_k/bn8_tg256", spec
    )
    two, three = (metalmm.MatmulSpec(1, 64, 64, also_n=n) for n in ((64,), (64, 64)))
    assert manifest.kernel_sha256("gemv_nt/l4_d7_tg64", two) == manifest.kernel_sha256("gemv_nt/l4_d7_tg64", three)


OLD = {
    "m1_optimized_v6/nt_simd_c4_s1_tg128": "gemv_nt_vec4/c4_tg128",
    "m1_optimized_v6/nt_bn64_col_bk1024_tg64": "gemv_columns/bn64_bk1024_vec4_tg64",
    "m1_optimized_v6/nt_wide_c7_tg32": "gemv_nt_thread/c7_tg32",
    "m1_optimized_v6/nn_wide_w32_s8_tg32": "gemv_nn_thread/q2_s8_tg32",
    "m1_optimized_v6/nn_w4_s8_tg256": "gemv_nn/w4_s8_tg256",
    "m1_optimized_v7/nt_octet_c2_s4_d1_tg128": "gemv_nt_octet/c2_s4_tg128",
    "m1_optimized_v7/nt_l8_c1_s7_d2_tg448": "gemv_nt/l8_s7_d2_tg448",
    "m1_optimized_v7/nn_octet_o4_d1_tg512": "gemv_nn_octet/o4_tg512",
    "small_m/nt_c4_s1_tg128": "gemv_nt_vec4/r8_c4_tg128",
    "small_m/nn_w8_s4_tg64": "gemv_nn/r8_w8_s4_tg64",
    "small_m/nt_octet_r2_c4_s1_d1_tg128": "gemv_nt_octet/r2_c4_tg128",
    "small_m/nt_r2_l16_c1_s1_d7_tg64": "gemv_nt/r2_l16_d7_tg64",
    "small_m/nt_tiles_t3_s1_d2_tg64": "small_m/t3_d2_tg64",
    "q8/nk_fused2_mma_l4_c1_s1_d7_x_tg128": "gemv_nt_mma/d7_tg128",
    "q8/canonical_r8_l4_c1_s1_d2_tg64": "gemv_nt/r8_l4_d2_tg64",
    "q4/nk_swiglu_wide_c4_tg32": "gemv_nt_thread/c4_tg32",
    "affine/a4_canonical_tiles_mma_t2_s16_d2_tg512": "small_m_mma/t2_s16_d2_tg512",
    "affine/a8_nk_tiles_t4_s1_d2_tg64": "small_m/t4_d2_tg64",
    "affine/a4_nk_gemm_bm32_bn32_bk32": "gemm/bm32_bn32_bk32",
    "fused/nt_fused3_l8_c1_s7_d2_tg224": "gemv_nt/l8_s7_d2_tg224",
    "m1_optimized_v6/nt_bn64_col_pipelined_bk1024_tg64": "",
    "q4/nk_turns_l4_c1_d7_t6_tg384": "",
    "m1_optimized_v2/nt_bn64_col": "",
    "m1_optimized_v6/of_the_user": "",
    "m1_optimized_v7/nt_foo": "",
    "fused/my_l2_cache": "",
}


@pytest.mark.parametrize(("old", "new"), OLD.items())
def test_ids_of_before(old: str, new: str) -> None:
    assert old_ids.new_id(old) == new
    assert not new or manifest.get(new) == new


def test_today_s_ids_are_nobody_s_old_ones() -> None:
    assert {old_ids.new_id(v) for v in metalmm.variants()} == {""}


KERNELS = """format = 2
[kernels.one]
source = "k.metal"
template = ["type", "threads"]
tile = [1, "threads"]
supports = { layouts = ["nt"] }
[kernels.other]
source = "k.metal"
template = ["type", "format", "threads"]
tile = [1, "threads"]
storage = "q8_0"
supports = { layouts = ["nt"], m = { max = "threads // 32" } }
[families.f]
kernel = ["one", "other"]
[families.f.variants]
v = { threads = 64 }
"""


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('storage = "q8_0"', 'storage = ["dense", "q8_0"]', "two of its kernels take 1 of dense"),
        ('storage = "q8_0"', 'storage = "q9_0"', "storage has 'q9_0'; it lists some of dense, q8_0, q8_0:canonical"),
        ('storage = "q8_0"', 'storage = "q8_0"\nmatrices = ["4"]', "matrices has '4'; it lists some of 1, 2, 3, swiglu"),
        (
            'storage = "q8_0"\nsupports',
            'storage = "q8_0"\nmatrices = 2\nsupports',
            "'matrices' is 2, of the wrong type; it takes a string such as '1', or a list of strings",
        ),
        ('kernel = ["one", "other"]', 'kernel = ["one", "another"]', r"no table \[kernels.another\]; did you mean 'other'"),
        ('kernel = ["one", "other"]', 'kernel = ["one", 3]', "it takes the name of a table .* or a list of them"),
        ('tile = [1, "threads"]\nstorage', 'tile = [2, "threads"]\nstorage', r"its kernels have tiles of \(1, 64\) and \(2, 64\)"),
        ('"threads // 32"', '"threads / 32"', "supports.m has 'threads / 32'; it takes a number, a parameter"),
        ('"threads // 32"', '"threads - 64"', "supports.m goes from 1 to 0"),
        ('storage = "q8_0"', 'storage = ""', "storage has ''; it lists some of dense"),
        ('storage = "q8_0"', "storage = []", r"storage is \[\]; it lists some of dense"),
        (
            'storage = "q8_0"',
            'storage = "q8_0"\nmatrices = [["2", "cores > 1"]]',
            "matrices has 'cores > 1'; of a list the second is a condition",
        ),
        (
            'storage = "q8_0"',
            'storage = "q8_0"\nmatrices = [["2", "3", "4"]]',
            r"it takes a list of strings, or, where a condition holds, of \[string,",
        ),
        (
            'storage = "q8_0"',
            'storage = "q8_0"\nmatrices = [["2", "1 > 2"]]',
            r"matrices is \[\['2', '1 > 2'\]\], and no condition of it holds",
        ),
        ('storage = "q8_0"', 'storage = "q8_0"\nmatrices = []', r"matrices is \[\]; it lists some of 1, 2"),
        ('storage = "q8_0"', 'storage = "q8_0"\nbaseline = ["nt"]', "'baseline' is not the same in the tables of all its kernels"),
        ('storage = "q8_0"', 'storage = "q8_0"\ndevices = ["cuda"]', "'devices' is not the same in the tables"),
        ('"format", "threads"]', '"format", "threads", "ta"]\nta = false', "'ta' is not the same in the tables"),
        ('"format", "threads"]', '"format", "threads", "weights"]\nweights = 2', "says of how many by 'matrices'"),
        ('"format", "threads"]', '"format", "threads", "swiglu"]\nswiglu = true', "'swiglu' is what the call decides"),
        ('storage = "q8_0"', 'storage = "q8_0"\nsearch = {}', "'search' is of a strategy, a family whose table has 'name'"),
        ("[families.f.variants]", "points = []\n[families.f.variants]", "'points' is of a strategy"),
        ("[families.f.variants]", 'name = { threads = "tg" }\n[families.f.variants]', "has 'name', and rows, too"),
    ],
)
def test_manifests_of_several_kernels(old: str, new: str, message: str, tmp_path: Path) -> None:
    refused(tmp_path, KERNELS.replace(old, new, 1), message)


def test_a_kernel_s_own_limits(tmp_path: Path) -> None:
    (tmp_path / "k.metal").write_text("")
    (tmp_path / "m.toml").write_text(KERNELS)
    try:
        (v,) = metalmm.load_variants(tmp_path / "m.toml")
        spec = {"m": 3, "n": 8, "k": 32, "transpose_b": True}
        assert not v.lacks(metalmm.MatmulSpec(**spec)) and v.supports["layouts"] == ["nt"]
        assert v.lacks(metalmm.MatmulSpec(**spec, b_storage="q8_0")) == "m=3 is not in 1 to 2"
        assert v.lacks(metalmm.MatmulSpec(**spec, b_storage="q4_0")) == "b is q4_0; it takes dense, q8_0"
    finally:
        manifest.unload(tmp_path / "m.toml")


STRATEGY = """format = 2
[kernels.one]
source = "k.metal"
template = ["type", "a", "b", "flag", "threads"]
tile = [1, "threads"]
needs = ["simd_sum"]
supports = { layouts = ["nt"] }
[kernels.other]
source = "k.metal"
template = ["type", "format", "a", "threads"]
tile = [1, "threads"]
storage = "q8_0"
needs = ["simdgroup_matrix"]
supports = { layouts = ["nt"] }
[families.own]
kernel = ["one", "other"]
name = { a = "a", b = "b", flag = "x", threads = "tg" }
b = 1
flag = false
where = ["8 % (a - 1) == 0"]
points = ["a2_tg64"]
"""


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('b = "b"', 'b = "a"', "two parameters have one prefix"),
        ('b = "b"', 'b = "a2"', "name.b is 'a2'; it takes letters"),
        ('b = "b"', 'b = "a_b"', "name.b is 'a_b'; it takes letters"),
        ('flag = "x"', 'flag = "a4"', "a flag is false by default, and its word is no other's prefix"),
        ("flag = false", "flag = true", "a flag is false by default"),
        ("flag = false", "flag = false\na = 2\nthreads = 64", "all of them have defaults"),
        ('["a2_tg64"]', '["a2_tg64", "a2_tg64"]', "points has 'a2_tg64' twice"),
        ('["a2_tg64"]', '["zz"]', r"m.toml: 'own/zz': it does not know 'zz'"),
        ('"8 % (a - 1) == 0"', '"m == 1"', "where has 'm == 1'; it takes comparisons"),
        ('"8 % (a - 1) == 0"', '"8 % (a - 2) == 0"', r"8 % \(a - 2\) == 0 does not hold"),
        ("[families.own]", "[families.gemv_nt]", "family gemv_nt: .*variants.toml has one of this name; choose another"),
        ("[families.own]", "[families.mlx]", "family mlx: .*variants.toml has one of this name"),
        ('b = "b"', 'bb = "b"', "name has 'bb', which no template of its kernels has; did you mean 'b'"),
        ('points = ["a2_tg64"]', "points = 9", "points is 9; it takes a list of names"),
        ("b = 1", "b = 1\nsearch = { a = [0, 1] }", r"search.a is \[0, 1\]; it takes a list of whole numbers of at least 1"),
    ],
)
def test_strategies_that_are_none(old: str, new: str, message: str, tmp_path: Path) -> None:
    refused(tmp_path, STRATEGY.replace(old, new, 1), message)
    assert manifest.get("gemv_nt/l4_d3_tg96")


def test_a_strategy_of_a_user_s(tmp_path: Path) -> None:
    (tmp_path / "k.metal").write_text("")
    (tmp_path / "m.toml").write_text(STRATEGY.replace('points = ["a2_tg64"]\n', ""))
    try:
        assert metalmm.load_variants(tmp_path / "m.toml") == [] == metalmm.variants(family="own")
        v = manifest.get("own/a3_b2_x_tg96")
        assert v.params == {"a": 3, "b": 2, "flag": True} and not v.is_listed
        assert v.needs == ("simd_sum", "simdgroup_matrix"), "of both kernels"
        (tmp_path / "n.toml").write_text(KERNELS.replace("[families.f", "[families.own"))
        with pytest.raises(ManifestError, match=r"family own: .*m.toml has one of this name"):
            metalmm.load_variants(tmp_path / "n.toml")
    finally:
        manifest.unload(tmp_path / "m.toml")
    with pytest.raises(metalmm.UnknownVariantError):
        manifest.get("own/a3_b2_x_tg96")


def test_an_old_id_that_is_a_user_s_now_stays(tmp_path: Path) -> None:
    (tmp_path / "k.metal").write_text("")
    (tmp_path / "m.toml").write_text(KERNELS.replace("families.f", "families.q8").replace("v =", "mine_l4_tg64 ="))
    with pytest.warns(UserWarning, match="the file: q8/mine_l4_tg64 is called gemv_nt/l4_tg64 now"):
        assert manifest.read_id("q8/mine_l4_tg64", "the file") == "gemv_nt/l4_tg64"
    try:
        (v,) = metalmm.load_variants(tmp_path / "m.toml")
        assert manifest.read_id(v, "the file") == v
    finally:
        manifest.unload(tmp_path / "m.toml")
