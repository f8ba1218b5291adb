"""row_invariant: a row of the result has the same bits for every m from 1 to 16, in every batch and place."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import metalmm
import ml_dtypes
import numpy as np
import pytest
from metalmm import manifest, tuning
from metalmm.backends import cuda
from metalmm.backends.protocol import Tiles
from support.counting import count_case
from support.here import ALL_OF_IT, BY_TURNS, DEVICE, FAKE_CUDA, ON_A_FAKE, REAL_GPU

DTYPES: dict[str, Any] = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32}
LAYOUTS, FORMS, HALVES = ("nt", "nn", "tn"), ("q8_0", "q4_0", "affine4", "q6_k", "fp8", "q4_0:canonical"), ("float16", "bfloat16")
KINDS = [*itertools.product(["dense"], DTYPES, LAYOUTS), *itertools.product(FORMS, HALVES, ["nt"])]
if not (ALL_OF_IT or REAL_GPU):  # types and layouts take turns
    KINDS = [*(("dense", *of) for of in zip(DTYPES, LAYOUTS, strict=True)), *((form, HALVES[i % 2], "nt") for i, form in enumerate(FORMS))]


def operands(rng: np.random.Generator, n: int, k: int, storage: str, dtype: str, layout: str) -> tuple[Any, dict[str, bool]]:
    w = rng.standard_normal((n, k)).astype(DTYPES[dtype])
    form, _, order = storage.partition(":")
    if form != "dense":
        return metalmm.quantize(w, form, layout=order or "nk"), {}
    return np.ascontiguousarray(w if layout[1] == "t" else w.T), {"transpose_a": layout[0] == "t", "transpose_b": layout[1] == "t"}


def bits(x: Any) -> np.ndarray:
    x = np.asarray(x)
    return x.view({2: np.uint16, 4: np.uint32}[x.itemsize])


class Rows:
    """Sixteen rows, each with the bits that it has alone, and calls that have some of them."""

    def __init__(self, device: metalmm.Device, v: Any, b: Any, k: int, dtype: str, seed: int, **options: Any) -> None:
        self.device, self.v, self.b, self.options = device, v, b, {**options, "row_invariant": True}
        self.rng = np.random.default_rng(seed)
        self.rows = self.rng.standard_normal((16, k)).astype(DTYPES[dtype])
        self.rows[3, k // 2] = np.inf  # what the others have nothing of
        self.alone = [self.of(self.rows[i : i + 1])[0] for i in range(16)]

    def of(self, a: np.ndarray) -> np.ndarray:
        if self.options.get("transpose_a"):
            a = np.ascontiguousarray(a.swapaxes(-1, -2))
        return bits(metalmm.matmul(self.v, a, self.b, device=self.device, **self.options))

    def check(self, which: np.ndarray) -> None:
        """which: of a call's rows, of any shape of matrices."""
        found = self.of(self.rows[which])
        for at in np.ndindex(which.shape):
            np.testing.assert_array_equal(found[at], self.alone[which[at]], f"{self.v} {which.shape}: row {which[at]} at {at}")
        count_case()

    def check_some(self, batches: bool = True) -> None:
        for m in (2, 7, 16):
            self.check(self.rng.integers(0, 16, m))
        if batches:
            self.check(self.rng.integers(0, 16, (3, 5)))


@pytest.mark.rest(but=2)
@pytest.mark.parametrize(("storage", "dtype", "layout"), KINDS)
def test_auto(device: metalmm.Device, storage: str, dtype: str, layout: str) -> None:
    for seed, (n, k) in enumerate(((40, 512), (33, 96), (129, 100), (7, 33))):
        b, options = operands(np.random.default_rng(seed), n, k, storage, dtype, layout)
        Rows(device, "auto", b, k, dtype, seed, **options).check_some()


def alike() -> list[str]:
    """The ids of our own strategies whose rows are alike."""
    specs = [metalmm.MatmulSpec(1, 64, 256, transpose_b=turned, row_invariant=True) for turned in (False, True)]

    def is_left_out(v: metalmm.Variant) -> bool:
        """gemm has code of its own for tensor cores."""
        return v.family in ("mlx", "mps", "blas") or (ON_A_FAKE and v.runs_on("cpu") and not (FAKE_CUDA and v.family == "gemm"))

    return list(dict.fromkeys(str(v) for spec in specs for v in metalmm.variants(spec) if not is_left_out(v)))


@pytest.mark.rest(but=3)
@pytest.mark.parametrize(("turn", "v"), [pytest.param(turn, v, id=v) for turn, v in enumerate(alike())])
def test_each_point_that_says_so(device: metalmm.Device, turn: int, v: str) -> None:
    """By turns with dense weights of a layout, and with quantized ones."""
    cases = [("dense", "nt"), ("dense", "nn"), ("affine4", "nt")]
    specs = [metalmm.MatmulSpec(1, 72, 384, transpose_b=x == "nt", b_storage=storage, row_invariant=True) for storage, x in cases]
    taken = [case for case, spec in zip(cases, specs, strict=True) if manifest.get(v).runs_on(device) and not manifest.get(v).lacks(spec)]
    if not taken:
        pytest.skip(f"{v} does not run on device {device.name}")
    for storage, layout in taken if ALL_OF_IT or REAL_GPU else [taken[turn % len(taken)]]:
        b, options = operands(np.random.default_rng(turn), 72, 384, storage, "float16", layout)
        Rows(device, v, b, 384, "float16", turn, **options).check_some(batches=False)


def points_of_the_same_bits() -> list[list[str]]:
    found: dict[Any, list[str]] = {}
    for v in metalmm.variants():
        if v.alike_by is not None:
            found.setdefault(v.row_bits, []).append(str(v))
    return [points for points in found.values() if len(points) > 1]


@pytest.mark.parametrize("points", points_of_the_same_bits(), ids=lambda points: points[0])
def test_points_that_differ_in_what_no_bit_goes_by(device: metalmm.Device, points: list[str]) -> None:
    """`alike_by`: with K that their shares and turns divide, and that they do not. Results of bfloat16 would hide in what order sums were added."""
    if not (here := [v for v in points if manifest.get(v).runs_on(device)]):
        pytest.skip(f"{points[0]} does not run on device {device.name}")
    cases = itertools.product(("q8_0", "q4_0:canonical", "affine4", "q6_k", "fp8"), ((40, 2048), (33, 1376)))
    for seed, (storage, (n, k)) in enumerate(cases):
        if (k % 256 and storage == "q6_k") or (BY_TURNS and (k, storage) not in ((2048, "q6_k"), (1376, "affine4"))):
            continue
        b, options = operands(np.random.default_rng(seed), n, k, storage, "float16", "nt")
        rows = Rows(device, here[0], b, k, "float16", seed, **options)
        wide = np.zeros((16, k + 1), np.float16)  # rows that do not begin on vectors
        wide[:, :k] = rows.rows
        lefts = [rows.rows, device.array(wide)[:, :k]]
        if BY_TURNS:
            lefts = [lefts[storage == "affine4"]]
        for m, left in itertools.product((1, 3, 16), lefts):
            first, *others = (bits(metalmm.matmul(v, left[:m], b, device=device, **rows.options)) for v in here)
            for v, found in zip(here[1:], others, strict=True):
                np.testing.assert_array_equal(found, first, f"{v} and {here[0]}, {m} x {n} x {k} {storage}")


def test_the_point_for_more_rows_has_the_same_bits() -> None:
    """By the rule, for devices of that kind: eight rows and sixteen have each what is fast, and one row's bits."""
    for storage, (n, k) in itertools.product(("q8_0", "q4_0", "affine4"), ((4096, 4096), (9728, 896))):
        few, many = (
            manifest.get(
                tuning.choose_unseen("cuda", metalmm.MatmulSpec(m, n, k, transpose_b=True, b_storage=storage, row_invariant=True))[0]
            )
            for m in (8, 16)
        )
        assert few.row_bits == many.row_bits and (few.tile[0], many.tile[0]) == (8, 16), (few, many)


def test_of_more_rows_the_fastest_point_of_the_same_bits_is_taken() -> None:
    """Of those that take sixteen at once, by the numbers for many rows, not those for few."""
    for storage, (n, k) in itertools.product(("q8_0", "q4_0", "affine4"), ((4096, 4096), (9728, 896), (896, 4864), (2048, 8192))):
        spec = metalmm.MatmulSpec(16, n, k, transpose_b=True, b_storage=storage, row_invariant=True)
        chosen = manifest.get(tuning.choose_unseen("cuda", spec)[0])
        took = {}
        for name, of_weights in cuda._TILES.items():
            v = manifest.get(name)
            if (ns := of_weights[cuda.weights_of(storage)]) and v.row_bits == chosen.row_bits and v.tile[0] >= 16:
                took[name] = float(Tiles.took(ns, *Tiles.work(v, spec, cuda.BACKEND.usual_cores)))
        assert len(took) > 1 or chosen.params["split"] > 4, (storage, n, k, took)
        assert str(chosen) == min(took, key=took.__getitem__), (storage, n, k, took)


def test_what_is_fast_for_eight_rows_alone_is_not_taken() -> None:
    """`small_m` takes eight rows at a time: of sixteen each weight is loaded twice."""
    few, alike = (
        tuning.choose_unseen("cuda", metalmm.MatmulSpec(8, 4096, 4096, transpose_b=True, row_invariant=alike))[0] for alike in (False, True)
    )
    assert few.startswith("small_m/") and manifest.get(alike).tile[0] == 16, (few, alike)


@pytest.mark.rest
@pytest.mark.skipif(DEVICE != "cpu", reason="device cpu's suite runs it")
def test_any_order_of_threads() -> None:
    """Device cpu's debug mode lets threads and threadgroups take turns in another order each time."""
    with metalmm.Device("cpu", debug=True) as other:
        for seed, (storage, v) in enumerate(itertools.product(("dense", "q4_0"), ("auto", "small_m/t2_s8_d2_tg256"))):
            b, options = operands(np.random.default_rng(seed), 40, 256, storage, "float16", "nt")
            Rows(other, v, b, 256, "float16", seed, **options).check_some()


@pytest.mark.rest
def test_prepared_batched_and_fused(device: metalmm.Device) -> None:
    b, options = operands(np.random.default_rng(0), 40, 256, "q8_0", "float16", "nt")
    rows = Rows(device, "auto", b, 256, "float16", 0, **options)
    a = rows.rows[[5, 9, 1]]
    prepared = device.prepare("auto", a, b, row_invariant=True)
    assert prepared.spec.row_invariant and "row_invariant" in repr(prepared.spec)
    with device.batch() as batch:
        later = batch.matmul("auto", device.array(a), b, row_invariant=True)
    for found in (prepared(), later):
        np.testing.assert_array_equal(bits(found), [rows.alone[i] for i in (5, 9, 1)])
    for dtype, k in (("float16", 256), *([("float32", 1000)] if device.name == "cpu" else [])):  # on a GPU in 16 bits alone
        rng = np.random.default_rng(1)
        a, weights = rng.standard_normal((9, k)).astype(dtype), [rng.standard_normal((40, k)).astype(dtype) for _ in range(2)]
        for activation in (None, "swiglu"):
            whole, alone = (
                metalmm.matmul_fused("auto", rows, weights, activation=activation, row_invariant=True, device=device)
                for rows in (a, a[1:2])
            )
            for x, y in [(whole, alone)] if activation else zip(whole, alone, strict=True):
                np.testing.assert_array_equal(bits(x)[1:2], bits(y))
    if device.name != "cpu":
        x = np.ones((1, 64), np.float32)
        with pytest.raises(metalmm.UnsupportedError, match="device cpu alone has fused variants: multiply by each matrix apart"):
            metalmm.matmul_fused("auto", x, [x, x], row_invariant=True, device=device)


def test_rows_that_do_not_begin_on_vectors(device: metalmm.Device) -> None:
    """They have the same bits, or are refused: where B is taken by vectors and the kernel adds up in another order without."""
    b, options = operands(np.random.default_rng(0), 40, 256, "dense", "float16", "nt")
    wide = np.zeros((5, 257), np.float16)
    rows = Rows(device, "gemm/bm32_bn32_bk32", b, 256, "float16", 0, **options)
    wide[:, :256] = rows.rows[:5]
    a = device.array(wide)[:, :256]
    found = metalmm.matmul("gemm/bm32_bn32_bk32", a, b, device=device, **rows.options)
    np.testing.assert_array_equal(bits(found), rows.alone[:5])
    with pytest.raises(
        metalmm.LayoutError,
        match=r"row_invariant: rows of a begin 257 elements apart.*multiples of eight where k is one, else not: pass a copy",
    ):
        metalmm.matmul("small_m/t2_s8_d2_tg256", a, b, device=device, **rows.options)
    b, options = operands(np.random.default_rng(1), 33, 1372, "dense", "float16", "nt")
    a = device.array(np.zeros((5, 1373), np.float16))[:, :1372]
    with pytest.raises(metalmm.LayoutError, match=r"rows of a begin 1373 elements apart.*multiples of four where k is one"):
        metalmm.matmul("gemv_nt_vec4/c4_tg128", a, b, device=device, **{**rows.options, **options})


def test_what_it_does_not_take(device: metalmm.Device) -> None:
    a, b = np.zeros((17, 64), np.float16), np.zeros((8, 64), np.float16)
    with pytest.raises(metalmm.UnsupportedError, match="auto: m is 17; with row_invariant it is 1 to 16: multiply so many rows at a time"):
        metalmm.matmul("auto", a, b, transpose_b=True, row_invariant=True, device=device)
    with pytest.raises(metalmm.UnsupportedError, match="auto: m is 17"):
        tuning.choose_unseen(device.name, metalmm.MatmulSpec(17, 8, 64, transpose_b=True, row_invariant=True))
    with pytest.raises(metalmm.UnsupportedError, match="a row's bits may depend on m or on its place"):
        metalmm.matmul("m1_optimized/simd_basic", a[:1], b, transpose_b=True, row_invariant=True, device=device)
    with pytest.raises(metalmm.ArgumentError, match="row_invariant"):
        metalmm.matmul("auto", a[:1], b, transpose_b=True, row_invariant=1, device=device)


@contextlib.contextmanager
def tuned(device: metalmm.Device, path: Path, spec: metalmm.MatmulSpec, v: str) -> Iterator[None]:
    """With a tuning file that has this choice alone."""
    key = tuning.Key.of(spec)
    tuning.write(path, tuning.device_key(device), [tuning.Choice(key, v, manifest.kernel_sha256(v, tuning.spec_of(key)), 0.5, "today")])
    try:
        metalmm.load_tuning(path)
        yield
    finally:
        path.write_text('{"schema": "metalmm-tuning", "version": 1, "devices": {}}')
        metalmm.load_tuning(path)
        os.remove(path)


def test_the_choice_goes_by_n_k_type_storage_and_layout_alone(device: metalmm.Device, tmp_path: Path) -> None:
    """Tuning file included: what was measured for one m is taken for each, and not for calls without row_invariant."""

    def specs(**other: Any) -> list[metalmm.MatmulSpec]:
        sizes = itertools.product((1, 2, 5, 8, 9, 16), (1, 3), (False, True), (1.0, 0.5))
        return [
            metalmm.MatmulSpec(m, 96, 512, batch, transpose_b=True, bias=bias, alpha=factor, beta=1 - factor, **other)
            for m, batch, bias, factor in sizes
        ]

    for storage in ("dense", "q4_0"):
        chosen = {spec: manifest.get(tuning.choose(device, spec)[0]) for spec in specs(b_storage=storage, row_invariant=True)}
        assert len({v.row_bits for v in chosen.values()}) == 1, chosen
        assert len({v for spec, v in chosen.items() if spec.m <= 8}) == 1, chosen
    before = {spec: tuning.choose(device, spec)[0] for spec in specs()}
    usual = tuning.choose(device, metalmm.MatmulSpec(1, 96, 512, transpose_b=True, row_invariant=True))[0]
    other = "gemm/bm32_bn32_bk32" if usual != "gemm/bm32_bn32_bk32" else "small_m/t2_s8_d2_tg256"
    with tuned(device, tmp_path / "tuning.json", metalmm.MatmulSpec(3, 96, 512, transpose_b=True, row_invariant=True), other):
        assert {tuning.choose(device, spec)[0] for spec in specs(row_invariant=True)} == {other}
        assert {spec: tuning.choose(device, spec)[0] for spec in specs()} == before


def test_more_rows_than_what_was_tuned_takes_at_a_time(device: metalmm.Device, tmp_path: Path) -> None:
    """It stays where it takes them; else it is a point of the same bits."""
    if device.name != "cuda":
        pytest.skip("points of the same bits are for device cuda")
    spec = metalmm.MatmulSpec(16, 4096, 4096, transpose_b=True, b_storage="q4_0", row_invariant=True)
    for v, other in (("r2_t2_s4_d2_tg128", "r2_t2_s4_d2_tg128"), ("t4_s4_d4_tg128", None)):
        with tuned(device, tmp_path / "tuning.json", spec, f"small_m_mma/{v}"):
            chosen = tuning.choose(device, spec)[0]
        assert (
            chosen == f"small_m_mma/{other}" if other else (manifest.get(chosen).params["split"], manifest.get(chosen).tile[0]) == (4, 16)
        )
