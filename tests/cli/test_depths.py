"""`tune --search` tries tiles of depths that no id has."""

from __future__ import annotations

import metalmm
import pytest
from metalmm import kernel_source, manifest
from metalmm.bench import search, sizes
from support.operands import draw
from support.rows import Row


@pytest.mark.rest(but=2)
@pytest.mark.parametrize("depth, split", [(1, 1), (3, 1), (4, 1), (4, 2), (7, 4)])
def test_tiles_of_depths_that_no_id_has(depth: int, split: int, device: metalmm.Device) -> None:
    """Of an even one a lane's loads are neighbours."""
    space = search.Space([kernel_source.KERNELS / "variants.toml"], sizes.from_specs(["m=8 n=130 k=896 nt"]).shapes[0], {"small_m"})
    asked = next(c for c in space.candidates["small_m"] if c.values == (2, split, depth, 128))
    v = manifest.get(asked.id).of("dense", "1")
    assert v
    for seed in (0, 9):  # rows on whole vectors, and off them
        for m, n, k in ((3, 67, 1040), (8, 130, 896), (2, 64, 33 * depth)):
            draw(Row(v, "float16", "nt", "-"), m, n, k, exact=True, seed=seed).check_equal(device)
