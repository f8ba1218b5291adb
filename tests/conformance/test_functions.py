"""Every function of <metal_math>, <metal_common>, <metal_integer> and <metal_relational>: of each type and width its result's type and its
value. Values are NumPy's in float64, or Python's whole numbers; how far off one may be the specification says (8.1, in ulps)."""

from __future__ import annotations

import metalmm
import numpy as np
import pytest
from support.four_threads import by_nvrtc
from support.functions import Function, mistakes, sample, source
from support.here import ALL_OF_IT, DEVICE
from support.library import OF_FLOATS, OF_INTEGERS, PACKED
from support.msl import FLOATS, INTEGERS


@pytest.mark.rest(but=4)
@pytest.mark.parametrize("compiler, kind, functions", [*sample(OF_FLOATS, list(FLOATS)), *sample(OF_INTEGERS, list(INTEGERS))])
def test_of_a_type(compiler: str, kind: str, functions: list[Function], device: metalmm.Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("METALMM_CXX", compiler)
    if kind == "bfloat" and DEVICE == "metal":
        pytest.skip("Apple's compiler has none of these")
    if kind == "bfloat":  # Apple's compiler has none of these, and a library's own are by way of float
        monkeypatch.setenv("METALMM_LINT", "0")
    assert mistakes(functions, kind, device) == []


def unpacked(word: int, bits: tuple[int, ...], form: str) -> list[float]:
    found, first = list[float](), 0
    for i, n in enumerate(bits):
        part, most = word >> first & (1 << n) - 1, (1 << n) - 1
        x = max((part - (part >> n - 1 << n)) / (most // 2), -1.0) if form == "signed" else part / most
        found.append((x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4) if form == "srgb" and i < 3 else x)
        first += n
    return found


@pytest.mark.usefixtures("each_compiler")
@pytest.mark.parametrize("kind", ["float", "half"])
def test_numbers_in_parts_of_a_word(kind: str, device: metalmm.Device) -> None:
    words = np.random.default_rng(1).integers(0, 1 << 32, 64, np.uint32)
    words[:6] = 0, 0xFFFFFFFF, 0x80808080, 0x7F7F7F7F, 0x80008000, 0x7FFF8001
    wild = np.array([-2, -1, -0.0, 0, 0.5, 1, 1.5, np.nan], FLOATS[kind])
    body, source = "", "#include <metal_stdlib>\nusing namespace metal;\n"
    for i, (name, (parts, form)) in enumerate(PACKED.items()):
        n, to = len(parts), "srgb_unorm4x8" if form == "srgb" else name
        body += f"{kind}{n} v{i} = unpack_{name}_to_{kind}(x[t]); for (uint j = 0; j < {n}; j++) y[({i} * 64 + t) * 4 + j] = v{i}[j];\n"
        body += f"z[{i} * 64 + t] = pack_{kind}_to_{to}(v{i}); if (t < 8) w[{i} * 8 + t] = pack_{kind}_to_{to}({kind}{n}(a[t]));\n"
    arguments = f"device const uint* x, device const {kind}* a, device {kind}* y, device uint* z, device uint* w"
    source += f"kernel void k({arguments}, uint t [[thread_position_in_grid]]) {{\n{body}}}\n"
    y, z, w = np.zeros((len(PACKED), 64, 4), FLOATS[kind]), np.zeros((len(PACKED), 64), np.uint32), np.zeros((len(PACKED), 8), np.uint32)
    device.compile(source).kernel("k")(words, wild, y, z, w, threads=64, threadgroup=64)
    for i, (name, (parts, form)) in enumerate(PACKED.items()):
        want = np.array([unpacked(int(word), parts, form) for word in words])
        np.testing.assert_allclose(
            y[i, :, : len(parts)].astype(np.float64), want, rtol=1e-3 if kind == "half" else 2e-6, atol=2e-7, err_msg=name
        )
        if kind == "float" or max(parts) < 10:  # and back; of two that mean -1 the greater comes
            again = np.array([unpacked(int(word), parts, form) for word in z[i]])
            np.testing.assert_allclose(again, want, rtol=1e-6, atol=1e-7, err_msg=name)
        ends = np.array([unpacked(int(word), parts, form) for word in w[i]])
        low = -1.0 if form == "signed" else 0.0
        for j, x in ((0, low), (1, low), (2, 0), (3, 0), (5, 1), (6, 1), (7, 0)):
            assert (ends[j] == x).all(), (name, wild[j], ends[j])
        assert np.abs(ends[4] - 0.5).max() <= (0.17 if 2 in parts else 0.01), (name, ends[4])


@pytest.mark.skipif(not ALL_OF_IT or DEVICE != "cpu", reason="takes a minute")
@pytest.mark.parametrize("kind", [*FLOATS, *INTEGERS])
def test_nvrtc_takes_them(kind: str) -> None:
    """Without a GPU; NVRTC has no function of its own for some."""
    functions = OF_FLOATS if kind in FLOATS else [f for f in OF_INTEGERS if f.has(kind)]
    assert by_nvrtc(source(functions, kind)).startswith(b"\x7fELF")
