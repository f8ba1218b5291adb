"""Mutants drawn at random, by a seed: one token of one line of code is another."""

from __future__ import annotations

import io
import random
import re
import subprocess
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# Where from, and how many of a hundred.
AREAS = {
    "kernels": (30, ("kernels/*.metal", "kernels/*.h")),
    "core": (20, ("csrc/core/*.cpp", "csrc/core/*.h")),
    "devices": (20, ("csrc/cpu/*.cpp", ":(glob)csrc/msl/runtime/*.h")),
    "lowering": (
        15,
        (*(f"python/metalmm/msl/{x}.py" for x in ("arithmetic", "control_flow", "passes", "program")), "python/metalmm/msl/targets/cpu.py"),
    ),
    "python": (15, ("python/metalmm/*.py", "python/metalmm/bench/s*.py", "python/metalmm/bench/runner.py", "python/metalmm/profile/*.py")),
}
_SWAPS = {
    "<": ("<=", ">"), "<=": ("<", ">="), ">": (">=", "<"), ">=": (">", "<="), "==": ("!=",), "!=": ("==",), "+": ("-",), "-": ("+",),
    "*": ("+",), "/": ("*",), "%": ("*",), "&&": ("||",), "||": ("&&",), "and": ("or",), "or": ("and",), "+=": ("-=",), "-=": ("+=",),
    "min": ("max",), "max": ("min",), "true": ("false",), "false": ("true",), "True": ("False",), "False": ("True",),
    "break": ("continue",), "continue": ("break",),
}  # fmt: skip
_CPP = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\])*"|^[ \t]*#[^\n]*|\w+|[<>=!&|+\-*/%]+|\S', re.S | re.M)


@dataclass(frozen=True)
class Mutant:
    """One change: `old` at that place of the file becomes `new`."""

    file: str
    what: str
    offset: int
    old: str
    new: str
    area: str = ""
    survives: str = ""
    tests: str = ""


def _tokens(path: Path, text: str) -> Iterator[tuple[int, str]]:
    """Tokens of code with their offsets: none of comments, texts, types and signatures."""
    if path.suffix == ".py":
        starts = [0]
        for line in text.splitlines(keepends=True):
            starts.append(starts[-1] + len(line))
        for t in tokenize.generate_tokens(io.StringIO(text).readline):
            if t.type in (tokenize.OP, tokenize.NAME, tokenize.NUMBER) and not t.line.lstrip().startswith(
                ("def ", "class ", "from ", "import ", "@")
            ):
                yield starts[t.start[0] - 1] + t.start[1], t.string
        return
    for match in _CPP.finditer(text):
        line = text[text.rfind("\n", 0, match.start()) + 1 : text.find("\n", match.end())]
        if match[0].startswith(("//", "/*", '"', "#")) or line.lstrip().startswith(("template", "#", "static_assert")):
            continue
        yield match.start(), match[0]


def _changes(token: str, before: str, after: str) -> tuple[str, ...]:
    if token in ("<", ">", "*", "-", "+") and (before != " " or after != " "):
        return ()  # of a template, a pointer or a sign
    if token.isdigit() and len(token) < 4 and before not in "_.":
        return (str(int(token) + 1), *((str(int(token) - 1),) if token != "0" else ()))
    return _SWAPS.get(token, ())


def places(root: Path, area: str) -> list[Mutant]:
    """Every mutant of an area."""
    found = []
    for pattern in AREAS[area][1]:
        names = subprocess.run(["git", "ls-files", pattern], cwd=root, capture_output=True, text=True, check=True).stdout.split()
        for name in names:
            text = (root / name).read_text()
            for offset, token in _tokens(root / name, text):
                for new in _changes(token, text[offset - 1 : offset], text[offset + len(token) : offset + len(token) + 1]):
                    line = text.count("\n", 0, offset) + 1
                    row = text[text.rfind("\n", 0, offset) + 1 : text.find("\n", offset)].strip()
                    found.append(Mutant(name, f"line {line}: {new} for {token}: {row[:80]}", offset, token, new, area))
    return found


def draw(root: Path, count: int, seed: int) -> list[Mutant]:
    """So many mutants, divided among the areas."""
    rng, chosen = random.Random(seed), list[Mutant]()
    for area, (share, _) in AREAS.items():
        chosen += rng.sample(places(root, area), count * share // 100)
    return chosen
