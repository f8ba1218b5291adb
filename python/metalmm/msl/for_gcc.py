"""Edits of what g++ takes otherwise than clang does, and Apple's compiler."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping

from ..errors import LoweringError
from .program import Program
from .tokens import BEFORE_EXPRESSIONS, NUMBERS, OPEN, VECTORS

# Names after which an expression begins, and those whose parentheses are a statement's.
_BEFORE_OPERANDS = {"(", ",", "=", "return", "?", *"+-/%<>|^!~", "<=", ">=", "==", "!=", "||"}
_HEADS = {"if", "for", "while", "switch", "constexpr"}
_NUMBER = re.compile(r"(bool|char|uchar|short|ushort|int|uint|long|ulong|half|float|bfloat|unsigned|signed|size_t|u?int\d+_t)[234]?")


def plain_functions(program: Program, places: set[str]) -> None:
    """g++ takes no constexpr function that calls one which is none; clang and NVRTC do. places: lines in such functions."""
    tokens = program.source.tokens
    for i, token in enumerate(tokens):
        if token.text != "constexpr" or tokens[i - 1].text == "if":
            continue
        end = i
        while tokens[end].text not in ("{", ";"):
            end = program.source.matching(end) + 1 if tokens[end].text == "(" else end + 1
        if tokens[end].text == "{" and not places.isdisjoint(program.source.place(j) for j in range(i, program.source.matching(end) + 1)):
            token.text = ""


def member_specializations(program: Program) -> None:
    """`template <> float f(float x)` inside a class, which g++ refuses: as an overload it is chosen for the same arguments. With
    template arguments of its own, or where some call gives them, it would not be, and stays."""
    tokens = program.source.tokens

    def reads(i: int, words: list[str]) -> bool:
        return [t.text for t in tokens[i : i + len(words)]] == words

    for d in program.declarations:
        if d.is_function or d.body < 0 or tokens[d.body].text != "{":
            continue
        for i in range(d.body, program.source.matching(d.body) - 3):
            if not reads(i, ["template", "<", ">"]) or tokens[i - 1].text not in ("{", "}", ";", ":"):
                continue
            member = program.declaration(i, d.end, ())
            name = ["operator", "(", ")"] if member.name == "operator" else [member.name]  # `operator<` is no call
            called = any(t.text == name[0] and reads(j, [*name, "<"]) for j, t in enumerate(tokens))
            if member.is_function and not called:
                program.source.blank(i, i + 3)


def conversions(program: Program) -> None:
    """f(half(x), half(x)) becomes f((half)(x), (half)(x)): behind two parentheses g++ takes the first for parameters of one name."""
    tokens = program.source.tokens
    for i in range(len(tokens) - 1):
        if tokens[i].kind != "name" or tokens[i + 1].text != "(":
            continue
        if tokens[i].text not in VECTORS and (tokens[i].text in NUMBERS or tokens[i - 1].text not in _BEFORE_OPERANDS):
            continue  # a declaration
        found = [tokens[first:last] for first, last in program.source.split(i + 2, program.source.matching(i + 1)) if last - first == 4]
        found = [x for x in found if x[0].text in NUMBERS and x[1].text == "(" and x[2].kind == "name" and x[3].text == ")"]
        if len(found) > 1:
            for kind, *_ in found:
                kind.text = f"({kind.text})"


def indexed_conditionals(program: Program) -> None:
    """Edits `(c ? p : q)[f(x)]`, which g++ takes for `c ? p[f(x)] : q[f(x)]`. One arm alone then computes the argument of f. A call
    around the conditional keeps the index out of it."""
    tokens, opened = program.source.tokens, list[tuple[int, bool]]()  # brackets, and whether a conditional stands in them
    openings = dict[int, int]()
    for i, token in enumerate(tokens):
        if token.text in OPEN:
            opened.append((i, False))
        elif token.text == "?" and opened:
            opened[-1] = (opened[-1][0], True)
        elif token.text in OPEN.values() and opened:
            start, is_conditional = opened.pop()
            openings[i] = start
            if not is_conditional or token.text != ")" or _is_called(program, program.source.previous(start), openings):
                continue
            if opened:  # parentheses in parentheses
                opened[-1] = (opened[-1][0], True)
            following = [t.text for t in tokens[i + 1 : i + 4] if t.text]
            if following[:1] == ["["] and following[1:2] != ["["]:
                tokens[start].text, tokens[i].text = "::metalmm::msl::same((", "))"  # a comma in it is no second argument


def _is_called(program: Program, i: int | None, openings: Mapping[int, int]) -> bool:
    """Whether parentheses behind the token at i are a call's; openings: of closed brackets."""
    if i is None:
        return False
    token, start = program.source.tokens[i], openings.get(i)
    before = program.source.previous(start) if start is not None else None
    head = program.source.tokens[before].text if before is not None else ""
    if token.kind == "name":
        return token.text not in BEFORE_EXPRESSIONS
    if token.text == ")":
        return head not in _HEADS and not _is_cast(program, start or 0, i)
    if token.text == "}":  # of a block, of a lambda or of what is made in braces
        return (head == ")" and before is not None and _is_called(program, before, openings)) or (
            head.isidentifier() and head not in BEFORE_EXPRESSIONS
        )
    if token.text == ">":
        return any(_closes_angle(program, j, i) for j in range(i - 1, max(i - 40, 0), -1) if program.source.tokens[j].text == "<")
    return token.text == "]"


def _closes_angle(program: Program, first: int, last: int) -> bool:
    with contextlib.suppress(LoweringError, IndexError):
        return program.source.angle_end(first) == last
    return False


def _is_cast(program: Program, first: int, last: int) -> bool:
    """(int), (device float*): a type alone."""
    words = [t for t in program.source.tokens[first + 1 : last] if t.text]
    return bool(words) and all(t.kind == "name" or t.text in ("*", "&", "::") for t in words) and (
        words[-1].text in ("*", "&") or bool(_NUMBER.fullmatch(words[-1].text))
    )  # fmt: skip
