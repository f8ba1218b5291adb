"""Every version of a compiler that this machine has gives right results: a row of each strategy and format."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import metalmm
import numpy as np
import pytest
from metalmm import kernel_source, modules, pipelines
from support.here import ALL_COMPILERS, DEVICE
from support.operands import draw
from support.rows import What, array, known

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="of the CPU device's compilers")
ROWS = list({What.of(row.variant): row for row in array(known(), ["-"])}.values())


@pytest.fixture(scope="module", params=ALL_COMPILERS)
def compiled(request: pytest.FixtureRequest) -> Iterator[metalmm.Device]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("METALMM_CXX", request.param)
        with metalmm.Device("cpu") as device:
            for group in pipelines.in_groups(device, [(str(row.variant), row.specialization) for row in ROWS]):
                pipelines.compile_together(device, group)
            yield device


def test_results(compiled: metalmm.Device) -> None:
    for row in ROWS:
        for i, (m, n, k) in enumerate(((3, 67, 133), (5, 64, 96), (2, 9, 1031))):
            draw(replace(row), m, n, k, batch=2, bias=True, c=True, beta=0.5, seed=i).check(compiled)


def test_the_epilogue_of_mps(compiled: metalmm.Device) -> None:
    v = next(v for v in metalmm.variants() if v.source.name == "mps_epilogue.metal")
    kernel = compiled.compile(v.assemble(0)).kernel(kernel_source.host_name(v.instance(0)))
    rng, n = np.random.default_rng(7), 133
    ab, bias, out = rng.standard_normal(n).astype(np.float32), rng.standard_normal(n).astype(np.float16), np.zeros(n, np.float16)
    params = np.array([1, n, 4, 1, 4, n, 0, n, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0xFF], np.uint32)
    params[12:14] = np.array([0.5, 0.0], np.float32).view(np.uint32)
    kernel({0: ab, 2: out, 3: bias, 4: bias, 5: params}, grid=(-(-n // v.threads), 1, 1), threadgroup=v.threads)
    np.testing.assert_array_equal(out, (np.float32(0.5) * ab + bias.astype(np.float32)).astype(np.float16))


def test_a_group_and_kernels_by_themselves_give_the_same_bits(compiled: metalmm.Device, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Which kernels stand beside it changes nothing about one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("METALMM_CACHE", str(tmp_path_factory.mktemp("single")))
        with metalmm.Device("cpu") as alone:
            for row in ROWS:
                call = draw(row, 3, 67, 133, batch=2, bias=True, c=True, beta=0.5)
                for one, other in zip(call.run(alone), call.run(compiled), strict=True):
                    np.testing.assert_array_equal(np.asarray(one).view(np.uint8), np.asarray(other).view(np.uint8), err_msg=str(row))
    assert modules.MOST_TOGETHER > 1
