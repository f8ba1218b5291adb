"""Positions at program scope, `uint3 at [[thread_position_in_grid]];`, become parameters of the kernels that name them.

A kernel's parameter hides what a declaration at program scope does, and is hidden by the same, so that a kernel means what it did. Functions are
left alone: which of a name is called is for a compiler to say.
"""

from __future__ import annotations

from typing import TypeVar

from .program import Declaration, Program
from .rules import position_of
from .tokens import BEFORE_EXPRESSIONS

_P = TypeVar("_P", bound=Program)


def parsed(kind: type[_P], text: str, name: str) -> _P:
    """A preprocessed MSL file, in which kernels alone have positions. Where something else names one, rules.py refuses it."""
    program = kind(text, name)
    positions = [d for d in program.declarations if _is_position(d)]
    if not positions or any(_is_named_elsewhere(program, d) for d in positions):
        return program
    for position in positions:
        _give(program, position)
    return kind(program.source.text(), name)


def _is_position(d: Declaration) -> bool:
    return not d.is_function and d.body < 0 and len(d.attributes) == 1 and bool(position_of(d))


def _kernels(program: Program) -> list[Declaration]:
    return [d for overloads in program.definitions.values() for d in overloads]


def _is_named_elsewhere(program: Program, position: Declaration) -> bool:
    """By another declaration as its own name, or by what is no kernel and does not declare such a name for itself."""
    tokens, kernels = program.source.tokens, {d.start for d in _kernels(program)}
    for d in program.declarations:
        if d is position or d.start in kernels:
            continue
        found = [i for i in range(d.start, d.end) if tokens[i].text == position.name and tokens[i - 1].text not in (".", "->")]
        declares = any(tokens[i - 1].kind == "name" and tokens[i - 1].text not in BEFORE_EXPRESSIONS for i in found)
        if d.name == position.name or (found and not (d.is_function and declares)):
            return True
    return False


def _give(program: Program, position: Declaration) -> None:
    source, tokens = program.source, program.source.tokens
    last = next(i for i in range(position.start, position.end) if tokens[i].text == position.name)
    kind = " ".join(t.text for t in tokens[position.start : last] if t.text not in ("static", "const", "constant"))
    edits = dict[int, str]()  # what comes first, by the opening bracket
    for d in _kernels(program):
        if all(t.text != position.name for t in tokens[d.start : d.body]) and any(t.text == position.name for t in tokens[d.body : d.end]):
            edits[program.opening_of_parameters(d)] = f"{kind} {position.name} [[{position_of(position)}]]"
    for instance in (each for several in program.instances.values() for each in several):
        definition = program.definition_of(instance)
        if instance.signature is not None and instance.declaration is not definition and program.opening_of_parameters(definition) in edits:
            edits[instance.signature[0] - 1] = kind
    for opening, what in edits.items():
        close = source.matching(opening)
        if close == opening + 2 and tokens[opening + 1].text == "void":
            source.blank(opening + 1, close)
        rest = tokens[opening].behind or any(t.text for t in tokens[opening + 1 : close])
        tokens[opening].behind = what + (", " if rest else "") + tokens[opening].behind
    source.blank(position.start, position.end)
