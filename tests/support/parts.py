"""Which part of the suite a run takes: "first" is what each change needs, "2/3" the second third of the rest, "" all of it."""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence
from typing import TypeVar

from .here import PART

_T = TypeVar("_T")


def takes(is_first: bool, name: str, part: str = PART) -> bool:
    """Whether it takes what has this name. Raises ValueError where there is no such part."""
    if part in ("", "first"):
        return is_first or not part
    named = re.fullmatch(r"(\d+)/(\d+)", part)
    number, count = map(int, named.groups()) if named else (0, 0)
    if not 1 <= number <= count:
        raise ValueError(f'METALMM_TEST_PART is {part!r}, and takes "first", or a number and how many there are, from 1/1 on, such as 2/3')
    return not is_first and zlib.crc32(name.encode()) % count == number - 1


def spaced(of: Sequence[_T], count: int) -> list[_T]:
    """So many of them at most, as far apart as they can be."""
    return [of[i * len(of) // count] for i in range(count)] if count < len(of) else [*of]
