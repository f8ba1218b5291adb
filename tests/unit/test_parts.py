"""Each test is in one part of the suite, and in one alone."""

from __future__ import annotations

import pytest
from support.parts import spaced, takes

PARTS = ["first", "1/3", "2/3", "3/3"]


@pytest.mark.parametrize("is_first", [False, True])
def test_each_test_is_in_one_part(is_first: bool) -> None:
    names = [f"tests/kernels/test_results.py::test_{i}" for i in range(300)]
    taken = {part: [name for name in names if takes(is_first, name, part)] for part in PARTS}
    assert sorted(name for those in taken.values() for name in those) == sorted(names)
    assert taken["first"] == (names if is_first else [])
    assert is_first or all(len(taken[part]) > 60 for part in PARTS[1:])
    assert all(takes(is_first, name, "") for name in names)


@pytest.mark.parametrize("part", ["last", "0/3", "4/3", "1/0", "1", "-1/3", "1/3/5"])
def test_a_part_that_is_none_is_refused(part: str) -> None:
    with pytest.raises(ValueError, match=f"METALMM_TEST_PART is '{part}'"):
        takes(True, "x", part)


def test_spaced() -> None:
    assert spaced(range(10), 3) == [0, 3, 6] and spaced(range(2), 3) == [0, 1] and spaced(range(5), 0) == []
