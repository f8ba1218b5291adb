"""Edits of places that a C++ compiler did not decide, where half or bfloat is a class. The compiler has said which."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Collection

from ..errors import LoweringError
from .program import Program
from .tokens import BEFORE_EXPRESSIONS, OPEN, Source


def conditionals(program: Program, places: Collection[str]) -> None:
    """Edits `c ? a : b` of a bfloat, or a half, and a float, which C++ cannot decide where one is a class. Both arms become what they have in
    common. In `places` is the file:line of those that a compiler did not decide. Others may have arms that this would break."""
    source = program.source
    tokens, types = source.tokens, dict[int, str]()  # types of edited conditionals, by their "?"

    def type_of(first: int, last: int) -> str:
        """An arm's. That of a conditional is named, not written again: a chain would double with each link."""
        text = program.join((first, last))
        while tokens[first].text == "(" and source.matching(first) == last - 1:
            first, last = first + 1, last - 1
        question = next((q for q in source.top_level(first, last, "?") if q in types), None)
        return types[question] if question is not None else f"decltype(({text}))"

    for i in range(len(tokens) - 1, -1, -1):  # inner ones first
        if tokens[i].text != "?":
            continue
        colon = _arm_end(source, i + 1, ":")
        if not {source.place(i), source.place(colon)}.intersection(places):  # NVRTC names the second arm's line
            continue
        end = _arm_end(source, colon + 1, "")
        first, second = type_of(i + 1, colon), type_of(colon + 1, end)
        types[i] = f"::metalmm::msl::either<{first}, {second}>"
        for start, stop, other in ((i + 1, colon, second), (colon + 1, end, first)):
            tokens[start].before = f" ::metalmm::msl::arm<{other}>((" + tokens[start].before
            tokens[stop - 1].behind += "))"


def undecided_calls(program: Program, places: Collection[str], compiler: str) -> None:
    """Edits calls that a compiler did not decide; in `places` is their "file:line name". Metal's functions are no templates: they come
    before a template of that name if all arguments are of one type, and behind it else. And to MSL the half of `f(h)` becomes a float
    before anything else. To NVRTC it is a class that becomes a float or a bfloat."""
    source = program.source
    templates = [d for d in program.declarations if d.is_function and source.tokens[d.start].text == "template"]
    own = {d.name: d for d in templates}

    def is_word(i: int | None) -> bool:
        """Of a type or a scope: none behind which an expression begins."""
        return i is not None and source.tokens[i].kind == "name" and source.tokens[i].text not in BEFORE_EXPRESSIONS

    for i, token in enumerate(source.tokens):
        name = token.text.removeprefix("metalmm_")
        if token.kind != "name" or f"{source.place(i)} {name}" not in places or source.tokens[i + 1].text != "(":
            continue
        before = source.previous(i)  # a walk over all that was blanked: for these alone
        if is_word(before):
            continue  # a declaration: a type stands before the name
        if name in own:
            if before is not None and source.tokens[before].text == "::":  # of `::f` the scope; `a::f` is decided
                meant = {d.namespace for d in templates if d.name == name}
                if is_word(source.previous(before)) or len(meant) > 1 or () in meant:
                    continue  # where another template may be meant a compiler says that nothing is decided
                source.tokens[before].text = ""
            x, path = "static_cast<decltype(metalmm_x)>(metalmm_x)...", "::".join(("METALMM_SCOPE", *own[name].namespace, token.text))
            token.text = (
                "[&](auto&&... metalmm_x) -> decltype(auto) { if constexpr (::metalmm::msl::are_alike<decltype(metalmm_x)...>) "
                f"return ::metal::{token.text}({x}); else return {path}({x}); }}"
            )
            continue
        if compiler != "nvrtc":
            continue
        close = source.matching(i + 1)
        ends = [i + 1, *source.top_level(i + 2, close, ","), close]
        for first, last in itertools.pairwise(ends):
            if last > first + 1:
                source.tokens[first].text += "::metalmm::msl::promoted("
                source.tokens[last].text = ")" + source.tokens[last].text


def _arm_end(source: Source, i: int, ends: str) -> int:
    """Past an arm of a conditional that begins at i: at its ':', or where the whole expression ends."""
    tokens, inner = source.tokens, 0
    while True:
        text = tokens[i].text
        if text in OPEN:
            i = source.matching(i)
        elif text == "?":
            inner += 1
        elif text == ":" and inner:
            inner -= 1
        elif text in ((ends,) if ends else (":", ",", ";", ")", "]", "}")):
            return i
        elif text == "<" and tokens[i - 1].kind == "name":
            with contextlib.suppress(LoweringError):  # of a template, or a comparison
                i = source.angle_end(i)
        i += 1
