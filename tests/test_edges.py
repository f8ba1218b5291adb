"""Where kernels go wrong unnoticed: the last elements of a long sum, the memory just past an operand, rows further apart than they are
long. Integers that float32 and float16 hold exactly, so that every result must be equal, in any order of sums."""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Iterator
from typing import Any

import metalmm
import numpy as np
import pytest
from conftest import DEVICE, FAKE, changed_kernels, count_case
from metalmm import kernel_source, manifest
from metalmm.bench import search, sizes
from test_matmul import ALL, shapes_of

MSL = [v for v in ALL if not v.library]


def rows_of(v: metalmm.Variant) -> int:
    return 1 if v.supports.get("m") == 1 else 3 if v.family == "small_m" else 37


def columns_of(v: metalmm.Variant, n: int) -> int:
    return n if v != "gemv/smalln" else min((1, 2, 4, 8, 16), key=lambda x: abs(x - n))


def integers(rng: np.random.Generator, *size: int, most: int = 1) -> Any:
    return rng.integers(-most, most + 1, size).astype(np.float16)


def product(a: Any, b: Any, ta: bool, tb: bool) -> Any:
    wide = (a.swapaxes(-1, -2) if ta else a).astype(np.float64) @ (b.swapaxes(-1, -2) if tb else b).astype(np.float64)
    assert np.abs(wide).max() <= 2048, "float16 holds it"
    return wide


def placed(x: Any, pad: int = 0, offset: int = 0) -> Any:
    """The same numbers in rows `pad` further apart, `offset` elements into their memory; NaN between them."""
    need = int(np.prod(x.shape[:-1])) * (x.shape[-1] + pad)
    store = np.full(need + offset + 8, np.nan, np.float16)
    start = -(store.ctypes.data // 2) % 8 + offset  # from an address of 16 bytes on
    view = store[start : start + need].reshape(*x.shape[:-1], x.shape[-1] + pad)[..., : x.shape[-1]]
    view[...] = x
    return view


def equal(v: str, a: Any, b: Any, device: metalmm.Device, layout: str, **options: Any) -> None:
    ta, tb = layout[0] == "t", layout[1] == "t"
    want = product(a, b, ta, tb)
    for key in ("c", "bias"):
        want = want + (options[key].astype(np.float64) if key in options else 0)
    out = metalmm.matmul(v, a, b, transpose_a=ta, transpose_b=tb, device=device, **options)
    np.testing.assert_array_equal(np.asarray(out), want.astype(np.float16))
    count_case()


@pytest.mark.skipif(bool(FAKE), reason="the fake runs the CPU device's kernels, which have been asked")
@pytest.mark.parametrize("v", ALL)
def test_long_sums_are_exact(v: metalmm.Variant, device: metalmm.Device) -> None:
    """The float64 bound at k = 4096 and more lets a whole term pass; here none may be missing, nor taken twice."""
    rng, m = np.random.default_rng(11), min(rows_of(v), 5)
    for layout in v.supports["layouts"]:
        for k, n, offset in [(4097, 37, 0), (4099, 64, 1), (9731, 5, 3), (4096, 33, 2), (5000, 16, 0)]:
            n = columns_of(v, n)
            a = integers(rng, *((k, m) if layout[0] == "t" else (m, k)))
            b = integers(rng, *((n, k) if layout[1] == "t" else (k, n)))
            along_a, along_b = (0 if layout[0] == "t" else 1), (1 if layout[1] == "t" else 0)
            np.swapaxes(a, 0, along_a)[-1], np.swapaxes(b, 0, along_b)[-1] = 1, 1  # the last term is there
            equal(v, placed(a, offset=offset), placed(b, offset=offset), device, layout)


@pytest.mark.parametrize("depth, split", [(1, 1), (3, 1), (4, 1), (4, 2), (7, 4)])
def test_tiles_of_depths_that_no_id_has(depth: int, split: int, device: metalmm.Device) -> None:
    """`tune --search` tries them; of an even one a lane's loads are neighbours."""
    space = search.Space([kernel_source.KERNELS / "variants.toml"], sizes.from_specs(["m=8 n=130 k=896 nt"]).shapes[0])
    asked = search.Candidate("simd_tiles", (("tiles", 2), ("split", split), ("depth", depth), ("threads", 128)))
    assert asked in space.candidates["simd_tiles"]
    with space.registered([asked]) as known:
        (v,), rng = map(manifest.get, known), np.random.default_rng(depth)
        for m, n, k in ((3, 67, 1040), (8, 130, 896), (2, 64, 33 * depth)):
            for offset in (0, 1):
                equal(v, placed(integers(rng, m, k), offset=offset), placed(integers(rng, n, k), offset=offset), device, "nt")


@pytest.mark.parametrize("v", ALL)
def test_rows_further_apart_than_they_are_long(v: metalmm.Variant, device: metalmm.Device) -> None:
    """Padded operands, aligned and not; c among them, whose rows are at a distance of their own."""
    rng, m = np.random.default_rng(12), rows_of(v)
    for layout in v.supports["layouts"]:
        for n, k, pad_a, pad_b, pad_c, offset in [
            (67, 130, 2, 2, 5, 0),
            (64, 133, 3, 3, 1, 0),
            (65, 126, 2, 6, 4, 4),
            (33, 1027, 5, 5, 2, 0),
            (130, 70, 1, 2, 3, 1),
        ]:
            n, lead = columns_of(v, n), (2,)
            # A row of the stored matrix is k long, or m or n: pads that make its distance a multiple of 4 are among them.
            a = placed(integers(rng, *lead, *((k, m) if layout[0] == "t" else (m, k))), pad_a, offset)
            b = placed(integers(rng, *lead, *((n, k) if layout[1] == "t" else (k, n))), pad_b, offset)
            c, bias = placed(integers(rng, *lead, m, n, most=9), pad_c), integers(rng, n, most=9)
            equal(v, a, b, device, layout, c=c, beta=1.0, bias=bias)


class Pages:
    """Memory between two pages that are not there."""

    def __init__(self, size: int = 2 << 20) -> None:
        libc, page = ctypes.CDLL(None, use_errno=True), mmap.PAGESIZE
        libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        self._map = mmap.mmap(-1, size + 2 * page)
        base = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        assert libc.mprotect(base, page, 0) == 0
        assert libc.mprotect(base + page + size, page, 0) == 0
        self._bytes = np.frombuffer(self._map, np.uint8)[page : page + size]
        self._protect = lambda how: libc.mprotect(base + page, size, how)

    def lock(self, locked: bool) -> None:
        assert self._protect(0 if locked else mmap.PROT_READ | mmap.PROT_WRITE) == 0

    def put(self, x: Any, end: bool) -> Any:
        """x with its last element before the page behind, or its first one after the page before."""
        view = (self._bytes[-x.nbytes :] if end else self._bytes[: x.nbytes]).view(x.dtype).reshape(x.shape)
        view[...] = x
        return view


@pytest.mark.skipif(DEVICE != "cpu" or not sys.platform.startswith("linux"), reason="a GPU has a copy of the memory")
@pytest.mark.parametrize("v", MSL)
def test_nothing_is_read_or_written_outside_an_operand(v: metalmm.Variant, pages: list[Pages]) -> None:
    device, rng, m = metalmm.default_device(), np.random.default_rng(13), rows_of(v)
    for layout in v.supports["layouts"]:
        for n, k, batch in ((1, 1, 1), (67, 133, 1), (130, 61, 2), (64, 128, 1), (33, 260, 3), (66, 71, 1)):
            n, lead = columns_of(v, n), (batch,) if batch > 1 else ()
            a = integers(rng, *lead, *((k, m) if layout[0] == "t" else (m, k)))
            b = integers(rng, *lead, *((n, k) if layout[1] == "t" else (k, n)))
            c, bias = integers(rng, *lead, m, n, most=9), integers(rng, n, most=9)
            for end in (True, False):
                put = [p.put(x, end) for p, x in zip(pages, (a, b, c, bias, np.zeros_like(c)), strict=True)]
                equal(v, put[0], put[1], device, layout, c=put[2], beta=1.0, bias=put[3], out=put[4])


EARLY = {
    (v.kernel, v.storage, *map(v.params.get, ("staged", "wide", "mma")), v.weights, v.swiglu): v
    for v in metalmm.variants()
    if v.source and kernel_source.KernelText(v.source.read_text(), str(v.source)).is_early and v.storage in ("dense", "q8_0", "affine4")
}


@pytest.fixture(scope="module")
def stopping(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, metalmm.Variant]]:
    """The variants, with all lanes of a threadgroup stopping for good where kernels/include/wait.h lets them wait; their compiler cannot know
    that it is for good, and leave out what is read beforehand."""
    wait = "{ metal::simdgroup_barrier(metal::mem_flags::mem_none); }"
    stop = "{ do metal::threadgroup_barrier(metal::mem_flags::mem_none); while (metal::simd_sum(1.0f) > 0.0f); }"
    yield from changed_kernels(tmp_path_factory.mktemp("early") / "kernels", "stopping_", ("include/wait.h", wait, stop))


@pytest.mark.skipif(DEVICE != "cpu" or not sys.platform.startswith("linux"), reason="a GPU has a copy of the memory")
@pytest.mark.parametrize("v", EARLY.values())
def test_weights_and_bias_alone_are_read_before_the_wait(
    v: metalmm.Variant, stopping: dict[str, metalmm.Variant], pages: list[Pages]
) -> None:
    """Whoever comes to A, C or D before the wait finds no memory there, which is another error."""
    device, rng, m = metalmm.Device("cpu", timeout=0.05), np.random.default_rng(14), 1 if v.supports.get("m") == 1 else 3
    form, _, layout = v.storage.partition(":")
    for n, k in ((1, 1), (67, 133), (40, 896), (33, 2048)):
        is_nt = v.supports["layouts"][0] == "nt"
        w = integers(rng, *((n, k) if is_nt else (k, n)))
        b: Any = w if form == "dense" else metalmm.quantize(w, form, layout=layout or "nk")
        a, *rest = (p.put(np.zeros(size, np.float16), True) for p, size in zip(pages, ((m, k), *[(m, n)] * 3), strict=False))
        bias, stops = integers(rng, n), stopping[v]
        if v.swiglu:
            call = device.prepare_fused(stops, a, [b, b], bias=[bias, bias], activation="swiglu", out=rest[0])
        elif v.weights > 1:
            call = device.prepare_fused(stops, a, [b] * v.weights, bias=[bias] * v.weights, out=rest[: v.weights])
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


@pytest.fixture(scope="module")
def pages() -> list[Pages]:
    return [Pages() for _ in range(5)]


def test_the_shapes_of_every_variant_have_both_sides_of_its_tile() -> None:
    """What the suite asks of kernels follows their tiles: below, at and above bn and bk."""
    for v in MSL:
        columns = {n for _, n, _ in shapes_of(v, "plain")}
        assert v.tile[1] <= 1 or (any(n % v.tile[1] == 0 for n in columns) and any(n % v.tile[1] for n in columns))
