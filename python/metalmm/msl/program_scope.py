"""Positions at program scope, `uint3 at [[thread_position_in_grid]];`, become first parameters of the functions that name them."""

from __future__ import annotations

from collections.abc import Collection

from .program import Declaration, Program
from .rules import LANES, POSITIONS
from .tokens import BEFORE_EXPRESSIONS

_PREFIX = "metalmm_"  # what a function calls so itself is not hidden


def parsed(text: str, name: str = "<source>") -> Program:
    """A preprocessed MSL file, in which kernels and functions alone have positions. Where a class names one, rules.py refuses it."""
    program = Program(text, name)
    positions = {d.name: d for d in program.declarations if _is_position(d)}
    if not positions:
        return program
    functions = [d for d in program.declarations if d.is_function]
    needs, called = _needs(program, functions, positions)
    others = [d for d in program.declarations if not d.is_function and d.body >= 0]
    if any(_named(program, d, {*positions, *called}) for d in others):
        return program
    _give(program, positions, needs, called)
    return Program(program.source.text(), name)


def _is_position(d: Declaration) -> bool:
    return not d.is_function and d.body < 0 and len(d.attributes) == 1 and any(name in POSITIONS | LANES for name in d.attributes[0].names)


def _named(program: Program, d: Declaration, names: Collection[str]) -> set[str]:
    """Those of `names` that a declaration uses, and does not declare for itself."""
    tokens, used, own = program.source.tokens, set[str](), set[str]()
    for i in range(d.start, d.end):
        if tokens[i].kind == "name" and tokens[i].text in names and not _is_member(program, i):
            (own if _is_declared(program, i) else used).add(tokens[i].text)
    return used - own


def _is_member(program: Program, i: int) -> bool:
    return program.source.tokens[i - 1].text in (".", "->")


def _is_declared(program: Program, i: int) -> bool:
    """A type stands before it."""
    before = program.source.tokens[i - 1]
    return i > 0 and before.kind == "name" and before.text not in BEFORE_EXPRESSIONS


def _needs(program: Program, functions: list[Declaration], positions: Collection[str]) -> tuple[dict[int, set[str]], dict[str, set[str]]]:
    """Positions that functions need, by where they begin, for themselves or for what they call; and by name those of functions that are called."""
    kernels = {d.start for overloads in program.definitions.values() for d in overloads}
    needs, called = {d.start: _named(program, d, positions) for d in functions}, dict[str, set[str]]()
    while True:
        for d in functions:
            if d.start not in kernels and needs[d.start]:
                called.setdefault(d.name, set()).update(needs[d.start])
        grown = dict[int, set[str]]()
        for d in functions:
            names = _named(program, d, called) | ({d.name} & set(called))
            grown[d.start] = needs[d.start].union(*(called[name] for name in names))
        if grown == needs:
            return needs, called
        needs = grown


def _give(program: Program, positions: dict[str, Declaration], needs: dict[int, set[str]], called: dict[str, set[str]]) -> None:
    source, tokens = program.source, program.source.tokens
    kernels = {d.start for overloads in program.definitions.values() for d in overloads}

    def typed(name: str) -> str:
        d = positions[name]
        last = next(i for i in range(d.start, d.end) if tokens[i].text == name)
        return " ".join(t.text for t in tokens[d.start : last] if t.text not in ("static", "const", "constant"))

    edits, renamed = dict[int, list[str]](), list[int]()  # what comes first, by the opening bracket; where positions are named
    own = {d.start: _named(program, d, positions) for d in program.declarations if d.is_function}
    for d in program.declarations:
        wanted = sorted(needs.get(d.start, ()) if d.is_function else called.get(d.name, ()))
        if wanted:
            of_kernel = [f" [[{next(iter(positions[p].attributes[0].names))}]]" if d.start in kernels else "" for p in wanted]
            edits[program.opening_of_parameters(d)] = [f"{typed(p)} {_PREFIX}{p}{a}" for p, a in zip(wanted, of_kernel, strict=True)]
        for i in range(d.body, d.end) if d.is_function else ():
            if tokens[i].kind != "name" or _is_member(program, i) or _is_declared(program, i):
                continue
            if tokens[i].text in own[d.start]:
                renamed.append(i)
            elif tokens[i].text in called:
                at = source.angle_end(i + 1) + 1 if tokens[i + 1].text == "<" else i + 1
                if tokens[at].text == "(":
                    edits[at] = [_PREFIX + p for p in sorted(called[tokens[i].text])]
    for instance in (each for several in program.instances.values() for each in several):
        if instance.signature is not None and instance.declaration.start not in kernels:
            definition = program.definition_of(instance)
            edits[instance.signature[0] - 1] = [typed(p) for p in sorted(needs[definition.start])]
    for i in renamed:
        tokens[i].text = _PREFIX + tokens[i].text
    for opening, what in edits.items():
        close = source.matching(opening)
        if what and close == opening + 2 and tokens[opening + 1].text == "void":
            source.blank(opening + 1, close)
        rest = any(t.text for t in tokens[opening + 1 : close])
        tokens[opening].behind += ", ".join(what) + (", " if what and rest else "")
    for d in positions.values():
        source.blank(d.start, d.end)
