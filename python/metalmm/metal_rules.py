"""Rules of MSL that need no type checker: what Metal refuses and a C++ compiler takes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .msl_source import OPEN

if TYPE_CHECKING:
    from .msl_program import Declaration, Program

_KEYWORDS = {"virtual", "new", "dynamic_cast", "typeid", "goto", "throw", "try", "catch", "thread_local", "asm", "__asm__", "co_await"}
_KEYWORDS |= {"co_return", "co_yield"}
_CONSTANT = {"constant", "extern"}
_NO_VARIABLE = {
    "using",
    "typedef",
    "static_assert",
    "template",
    "friend",
    "namespace",
    "struct",
    "class",
    "union",
    "enum",
    "kernel",
    "extern",
}
_NO_VARIABLE |= {"vertex", "fragment", "operator", "_Pragma", "_Static_assert"}


class MetalRules:
    """Checks declarations of a program, before lowering changes them; raises LoweringError with file and line."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.source = program.source

    def check(self, declarations: list[Declaration]) -> None:
        kernels = {d.start for overloads in self.program.definitions.values() for d in overloads}
        for d in declarations:
            self._keywords(d)
            if d.is_function:
                self._body(d.body, self.source.matching(d.body), d.start in kernels)
            else:
                self._variable(d)

    def _keywords(self, d: Declaration) -> None:
        tokens = self.source.tokens
        for i in range(d.start, d.end):
            token, before = tokens[i], tokens[i - 1].text if i else ""
            if token.kind != "name" or before in (".", "->", "::"):
                continue
            if token.text in _KEYWORDS or (token.text == "delete" and before not in ("=", "operator")):
                raise self.source.fail(i, f"'{token.text}' is not part of MSL")

    def _variable(self, d: Declaration) -> None:
        """At namespace scope a variable lies in the constant address space, or nowhere."""
        tokens, i, words = self.source.tokens, d.start, list[str]()
        if tokens[i].text == "template" and tokens[i + 1].text == "<":
            i = self.source.angle_end(i + 1) + 1
        depth_end = d.end
        while i < depth_end and tokens[i].text not in ("=", ";", "{"):
            if tokens[i].text == "[":
                i = self.source.matching(i)
            elif tokens[i].text == "(":
                return  # a function's declaration
            elif tokens[i].text == "<" and tokens[i - 1].kind == "name":
                i = self.source.angle_end(i)
            else:
                words.append(tokens[i].text)
            i += 1
        names = [w for w in words if w.isidentifier()]
        if len(names) < 2 or set(names) & _NO_VARIABLE:
            return
        if "threadgroup" in names and "*" not in words and "&" not in words:
            raise self.source.fail(d.start, f"the threadgroup variable '{d.name}' stands outside a kernel; Metal has them in kernels alone")
        if not _CONSTANT & set(names):
            raise self.source.fail(
                d.start, f"the variable '{d.name}' at program scope is not in the constant address space; write constant"
            )

    def _body(self, opening: int, end: int, is_kernel: bool) -> None:
        """Statics and threadgroup variables inside a function; a class in it has members, not locals."""
        tokens, i = self.source.tokens, opening + 1
        while i < end:
            text = tokens[i].text
            if text in ("struct", "class", "union") and (brace := self._class_brace(i, end)):
                i = self.source.matching(brace)
            elif text == "static" and tokens[i].kind == "name":
                words = self._statement(i, end)
                if "constant" not in words:
                    raise self.source.fail(i, "a static variable inside a function; Metal has them in the constant address space alone")
            elif text == "threadgroup" and not is_kernel and tokens[i - 1].text in (";", "{", "}"):
                words = self._statement(i, end)
                if not {"*", "&", "("} & set(words):
                    raise self.source.fail(
                        i, f"the threadgroup variable '{words[-1]}' stands outside a kernel; Metal has them in kernels alone"
                    )
            i += 1

    def _class_brace(self, i: int, end: int) -> int:
        while i < end and self.source.tokens[i].text not in ("{", ";", "(", "=", ")"):
            i += 1
        return i if i < end and self.source.tokens[i].text == "{" else 0

    def _statement(self, i: int, end: int) -> list[str]:
        """The words of a declaration up to its value or its end; what is in brackets left out."""
        words = []
        while i < end and self.source.tokens[i].text not in (";", "=", "{"):
            if self.source.tokens[i].text in OPEN:
                if self.source.tokens[i].text == "(":
                    words.append("(")
                i = self.source.matching(i)
            else:
                words.append(self.source.tokens[i].text)
            i += 1
        return words
