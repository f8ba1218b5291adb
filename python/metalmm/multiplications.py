"""Counts a kernel's multiplications as it runs: clang's intermediate code adds to a number at the head of each block that has some."""

from __future__ import annotations

import functools
import re
from pathlib import Path

from . import cache

NUMBER = "metalmm_multiplications"  # of the module, 64 bits

_LABEL = re.compile(r'[-\w$."]+:')
_ONE = re.compile(r"= (?:[a-z]+ )*?(?:fmul|call)(?: [a-z]+)*? (?:<(\d+) x )?(?:half|bfloat|float|double)\b>?(.*)")
_FUSED = re.compile(r" @(?:llvm\.(?:fma|fmuladd)\.|fmaf?\()")


@functools.cache
def flags() -> list[str]:
    """As a debug device's. Vectors of three have no fourth component; the last says which counting this is."""
    return [
        "-O1",
        "-fno-vectorize",
        "-fno-slp-vectorize",
        "-DMETALMM_COUNTS",
        f"-DMETALMM_COUNTED_{cache.digest_of([Path(__file__)])[:16]}",
    ]


def _of(line: str) -> int:
    """How many multiplications of floating-point numbers, with an addition or without, an instruction is."""
    match = _ONE.search(line)
    if not match or (" fmul " not in line and not _FUSED.search(match[2])):
        return 0
    return int(match[1] or 1)


def instrumented(text: str, has_typed_pointers: bool) -> str:
    """The code of a module, counting."""
    pointer = "i64*" if has_typed_pointers else "ptr"
    lines, at, count, inside = list[str](), -1, 0, False

    def end_block() -> None:
        if count:
            lines.insert(at, f"  %{NUMBER}.{at} = atomicrmw add {pointer} @{NUMBER}, i64 {count} monotonic")

    for line in text.splitlines():
        if line.startswith("define "):
            inside, at, count = True, len(lines) + 1, 0
        elif inside and (line == "}" or _LABEL.match(line)):
            end_block()
            inside, at, count = line != "}", len(lines) + 1, 0
        elif inside and " = phi " in line:
            at = len(lines) + 1
        elif inside:
            count += _of(line)
        lines.append(line)
    return "\n".join([*lines, f"@{NUMBER} = global i64 0", ""])
