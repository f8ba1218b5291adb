"""Edits of what NVRTC has not of classes, as half, bfloat and vectors are to it."""

from __future__ import annotations

from .tokens import Source


def compound_literals(source: Source) -> None:
    """`(float4) {a, b, c, d}` becomes `float4 {a, b, c, d}`: NVRTC has no such thing of classes."""
    tokens = source.tokens
    for i in range(1, len(tokens) - 3):
        opened, kind, closed, brace = tokens[i : i + 4]
        if (opened.text, closed.text, brace.text) != ("(", ")", "{") or kind.kind != "name":
            continue
        before, more = tokens[source.previous(i) or 0], tokens[max(i - 3, 0) : i]
        is_operand = before.text == "return" or (before.kind == "punct" and before.text not in (")", "]", ">"))
        if is_operand and "operator" not in (t.text for t in more):  # not a function, a branch or a lambda
            opened.text = closed.text = ""


def words_of_members(source: Source) -> None:
    """`*(device const uint*)x->bytes` and `((device const uint*)x->bytes)[i]`, where x's class is aligned to less than a uint is:
    csrc/msl/runtime/cuda/builtins.h."""
    tokens = source.tokens
    for i, token in enumerate(tokens):
        close = source.matching(i) if token.text == "(" else i
        *words, kind, star = [t.text for t in tokens[i + 1 : close]] if 4 <= close - i <= 6 else ["", ""]
        spaces = {"device", "constant", "threadgroup", "thread", "const"}
        if star != "*" or not {"const", "constant"} & {*words} or not {*words} <= spaces or close + 5 >= len(tokens):
            continue
        x, arrow, member, *after = tokens[close + 1 : close + 6]
        first, before = i, [tokens[j].text for j in (i - 3, i - 2, i - 1)]
        if before[2] == "(" and after[0].text == ")":  # parentheses around it
            first, after, before = i - 1, after[1:], ["", *before[:2]]
        is_read = after[0].text == "[" if first < i and before[2] != "*" else before[2] == "*"
        is_read = is_read and before[1 if before[2] == "*" else 2] != "&" and after[0].text not in ("(", "->", ".", "::")
        if x.kind == member.kind == "name" and arrow.text in ("->", ".") and is_read:
            source.blank(i, close + 1)
            token.text = f"::metalmm::cuda::words_of<{kind}, alignof(decltype({'*' * (arrow.text == '->')}{x.text}))>("
            member.text += ")"
