"""Edits of what NVRTC has not: of classes, as half, bfloat and vectors are to it, and of constants and expressions."""

from __future__ import annotations

from .program import Program
from .tokens import OPEN, Source

_JUMPS = {"return", "break", "continue"}  # a lambda would keep them
_OF_A_NAME = {"::", "<", ">", ","}
_QUALIFIERS = {"device", "constant", "threadgroup", "thread", "const"}


def compound_literals(source: Source) -> None:
    """`(metal::float4) {a, b, c, d}` becomes `metal::float4 {a, b, c, d}`: NVRTC has no such thing of classes."""
    tokens = source.tokens
    for i in range(1, len(tokens) - 3):
        if tokens[i].text != "(" or tokens[i + 1].kind != "name":
            continue
        behind = (j for j in range(i + 1, len(tokens) - 1) if tokens[j].kind != "name" and tokens[j].text not in _OF_A_NAME)
        close = next(behind, i)
        if (tokens[close].text, tokens[close + 1].text) != (")", "{"):
            continue
        before = tokens[source.previous(i) or 0]
        is_operand = before.text == "return" or (before.kind == "punct" and before.text not in (")", "]", ">"))
        if is_operand and "operator" not in (t.text for t in tokens[max(i - 3, 0) : i]):  # not a function, a branch or a lambda
            tokens[i].text = tokens[close].text = ""


def words_of_members(source: Source) -> None:
    """`*(device const uint*)x->bytes` and `((device const uint*)x->bytes)[i]`, where x's class is aligned to less than a uint is:
    csrc/msl/runtime/cuda/builtins.h."""
    tokens = source.tokens
    for i in range(2, len(tokens) - 8):
        if tokens[i].text != "(" or tokens[i + 1].text not in _QUALIFIERS:
            continue
        close = source.matching(i)
        *words, kind, star = [t.text for t in tokens[i + 1 : close]] if 2 < close - i <= 6 else ["", ""]
        if star != "*" or not _QUALIFIERS.issuperset(words) or {"const", "constant"}.isdisjoint(words):
            continue
        x, arrow, member = tokens[close + 1 : close + 4]
        first, last = i, close + 3
        if tokens[i - 1].text == "(" and tokens[last + 1].text == ")":  # parentheses around it
            first, last = i - 1, last + 1
        before, after = tokens[first - 1].text, tokens[last + 1].text
        is_read = before == "*" or (after == "[" and first < i)
        at = first - 1 - (before == "*")
        left = tokens[at - 1]
        is_operator = left.text != "return" and (left.kind in ("name", "number") or left.text in (")", "]"))  # as in `mask & *…`
        is_address = (tokens[at].text == "&" and not is_operator) or after in ("(", "->", ".", "::")
        if x.kind == member.kind == "name" and arrow.text in ("->", ".") and is_read and not is_address:
            source.blank(i, close + 1)
            tokens[i].text = f"::metalmm::cuda::words_of<{kind}, alignof(decltype({'*' * (arrow.text == '->')}{x.text}))>("
            member.text += ")"


def constant_constants(program: Program) -> None:
    """NVRTC sets no variable from another one before a kernel runs, but for what is constexpr."""
    for d in program.declarations:
        tokens = program.source.tokens[d.start : d.end]
        words = [t.text for t in tokens]
        if (
            not d.is_function
            and d.name
            and words[0] in ("constant", "static", "const")
            and "constant" in words
            and "*" not in words
            and not {"constexpr", "typedef", "struct"} & set(words)
        ):
            tokens[words.index("constant")].text = "constexpr"


def statement_expressions(program: Program) -> None:
    """`({ … });` alone is a block, and one with a value a lambda: NVRTC takes no statement in what has a value."""
    tokens = program.source.tokens
    for i in range(1, len(tokens) - 1):
        if tokens[i].text != "(" or tokens[i + 1].text != "{":
            continue
        close, before = program.source.matching(i), tokens[program.source.previous(i) or 0].text
        if before in (";", "{", "}", ")", "else", "do") and tokens[close + 1].text == ";":
            tokens[i].text = tokens[close].text = tokens[close + 1].text = ""
        elif tokens[close - 2].text == ";" and _JUMPS.isdisjoint(t.text for t in tokens[i:close]):
            last = j = i + 1  # what ends the last statement but one
            while (j := program.source.matching(j) + 1 if tokens[j].text in OPEN and j > i + 1 else j + 1) < close - 2:
                last = j if tokens[j].text == ";" else program.source.matching(j) if tokens[j].text == "{" else last
            tokens[i].text, tokens[last].behind, tokens[close].text = "[&]", " return ", "()"


def library_specializations(program: Program) -> None:
    """NVRTC takes one of a template of metal's under its whole name alone, where `using namespace metal` gives the short one."""
    for d in (d for d in program.declarations if not d.is_function and d.body >= 0 and not d.namespace):
        for i in range(d.start, d.body):
            words = [t.text for t in program.source.tokens[i : i + 3]]
            if words[0] == "struct" and words[1] in ("numeric_limits", "_numeric_limits_impl") and words[2] == "<":
                program.source.tokens[i + 1].text = f"metal::{words[1]}"
