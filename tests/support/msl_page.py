#!/usr/bin/env python3
"""The part of docs/msl.md that is made of the tests' tables. `python tests/support/msl_page.py` writes it; tests/docs compares."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "msl.md"
MOST = 20  # names of a line
BEGIN, END = "<!-- made by tests/support/msl_page.py -->\n", "<!-- until here -->\n"


def made() -> str:
    from .library import OF_FLOATS, OF_INTEGERS, PACKED
    from .msl import FLOATS, INTEGERS

    floats, both = ", ".join(FLOATS), {f.name for f in OF_FLOATS} & {f.name for f in OF_INTEGERS}
    rows = [
        ("float, within the ulps of the specification", floats, [f for f in OF_FLOATS if f.result == "T" and f.name not in both]),
        ("float, to a bool or an int", floats, [f for f in OF_FLOATS if f.result != "T"]),
        ("whole number", ", ".join(INTEGERS), [f for f in OF_INTEGERS if f.name not in both and not f.kinds]),
        ("whole number", "int, uint", [f for f in OF_INTEGERS if f.kinds]),
        ("number", "all of these", [f for f in OF_FLOATS if f.name in both]),
    ]
    text = "| of a | types, each as a scalar and as a vector of 2, 3 and 4 | functions |\n|---|---|---|\n"
    for what, types, functions in rows:
        names = list(dict.fromkeys(f.name.split("'")[0] for f in functions))
        for i in range(0, len(names), MOST):
            text += f"| {what} | {types} | {', '.join(f'`{name}`' for name in names[i : i + MOST])} |\n"
    packs = [f"{name}_to_float" for name in PACKED]
    return f"{text}| word, one | uint, to and from float and half | {', '.join(f'`unpack_{name}`' for name in packs)}, and `pack_…` of each form |\n"


def page() -> str:
    """The whole page as it should be."""
    before, rest = PAGE.read_text().split(BEGIN)
    return before + BEGIN + made() + END + rest.split(END)[1]


if __name__ == "__main__":
    sys.path[0] = str(ROOT / "tests")  # in place of this folder, whose numbers.py is not Python's
    from support import msl_page

    PAGE.write_text(msl_page.page())
