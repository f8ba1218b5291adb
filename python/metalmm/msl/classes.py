"""Edits of what NVRTC has not of classes, as half, bfloat and vectors are to it."""

from __future__ import annotations

from .tokens import Source

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
