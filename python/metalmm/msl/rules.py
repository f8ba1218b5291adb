"""Rules of MSL that need no type checker: what Metal refuses and a C++ compiler takes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .tokens import OPEN

if TYPE_CHECKING:
    from .program import Declaration, Program

_KEYWORDS = {
    "virtual",
    "new",
    "dynamic_cast",
    "typeid",
    "goto",
    "throw",
    "try",
    "catch",
    "thread_local",
    "asm",
    "__asm__",
    "__asm",
    "register",
    "co_await",
}
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


# The scalar types that Metal takes for thread position attributes.
UNSIGNED = {"ushort", "uint", "unsigned", "unsigned int", "unsigned short", "uint16_t", "uint32_t"}

# Attributes of a kernel's arguments: of one, two or three numbers; and of one.
POSITIONS = {
    "thread_position_in_grid",
    "thread_position_in_threadgroup",
    "threadgroup_position_in_grid",
    "threads_per_threadgroup",
    "threads_per_grid",
    "threadgroups_per_grid",
    "dispatch_threads_per_threadgroup",
    "grid_origin",
    "grid_size",
}
LANES = {
    "thread_index_in_threadgroup",
    "thread_index_in_simdgroup",
    "simdgroup_index_in_threadgroup",
    "threads_per_simdgroup",
    "simdgroups_per_threadgroup",
    "thread_index_in_quadgroup",
    "quadgroup_index_in_threadgroup",
    "quadgroups_per_threadgroup",
    "thread_execution_width",
    "dispatch_simdgroups_per_threadgroup",
    "dispatch_quadgroups_per_threadgroup",
}


def position_of(d: Declaration) -> str:
    """Which position a declaration's attributes name, if any."""
    return next((name for a in d.attributes for name in a.names if name in POSITIONS | LANES), "")


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
                if d.body >= 0 and self.source.tokens[d.body].text == "{" and self._is_class(d):
                    self._members(d.body)

    def _is_class(self, d: Declaration) -> bool:
        return any(t.text in ("struct", "class", "union") for t in self.source.tokens[d.start : d.body])

    def _members(self, opening: int) -> None:
        tokens, end, i = self.source.tokens, self.source.matching(opening), opening + 1
        while i < end:
            if tokens[i].text in ("public", "private", "protected") and tokens[i + 1].text == ":":
                i += 2
                continue
            member = self.program.declaration(i, end, ())
            if member.is_function:
                self._body(member.body, self.source.matching(member.body), False)
            elif member.body >= 0 and self._is_class(member):
                self._members(member.body)
            i = max(member.end, i + 1)

    def _keywords(self, d: Declaration) -> None:
        tokens = self.source.tokens
        for i in range(d.start, d.end):
            token, before = tokens[i], tokens[i - 1].text if i else ""
            if token.kind != "name":
                continue
            if token.text in _KEYWORDS or (token.text == "delete" and before not in ("=", "operator")):
                raise self.source.fail(i, f"'{token.text}' is not part of MSL")

    def _variable(self, d: Declaration) -> None:
        """At namespace scope a variable lies in the constant address space, or nowhere."""
        words = self._head(d)
        names = [w for w in words if w.isidentifier()]
        if len(names) < 2 or set(names) & _NO_VARIABLE:
            return
        if "threadgroup" in names and "*" not in words and "&" not in words:
            raise self.source.fail(d.start, f"the threadgroup variable '{d.name}' stands outside a kernel; Metal has them in kernels alone")
        if "*" in words:  # the pointer itself, not what it points to
            words = words[len(words) - words[::-1].index("*") :]
        if position := position_of(d):
            raise self.source.fail(
                d.start,
                f"'{d.name}' [[{position}]] at program scope is taken where kernels alone name it; give it to functions",
            )
        if not _CONSTANT & set(words):
            raise self.source.fail(
                d.start, f"the variable '{names[-1]}' at program scope is not in the constant address space; write constant"
            )

    def _head(self, d: Declaration) -> list[str]:
        """The words of a variable's declaration up to its value; nothing for what declares none."""
        tokens, i, words = self.source.tokens, d.start, list[str]()
        if tokens[i].text == "template" and tokens[i + 1].text == "<":
            i = self.source.angle_end(i + 1) + 1
        while i < d.end and tokens[i].text not in ("=", ";"):
            text = tokens[i].text
            if text in ("alignas", "__attribute__", "decltype") and tokens[i + 1].text == "(":
                words += ["auto"] if text == "decltype" else []
                i = self.source.matching(i + 1)
            elif text == "[":
                i = self.source.matching(i)
            elif text == "{":  # a class or enumeration, and perhaps a variable after it
                if not set(words) & {"struct", "class", "union", "enum"}:
                    break
                words, i = [*(w for w in words if w in ("constant", "threadgroup", "extern", "typedef")), "auto"], self.source.matching(i)
            elif text == "(" and tokens[i + 1].text == "*":  # a pointer to a function
                words += ["*", *(t.text for t in tokens[i + 2 : self.source.matching(i)])]
                break
            elif text == "(" and tokens[i + 1].kind in ("number", "string", "char"):
                break  # its value
            elif text == "(":
                return []  # a function
            elif text == "<" and tokens[i - 1].kind == "name":
                i = self.source.angle_end(i)
            else:
                words.append(text)
            i += 1
        if words[-1:] == ["auto"]:
            return []  # no more than a type
        elaborated = [w for w in words if w.isidentifier()]
        if elaborated[:1] and elaborated[0] in ("struct", "class", "union", "enum") and len(elaborated) == 3:
            return ["auto", *words[2:]]  # struct S g;
        return words

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
            elif text == "threadgroup" and not is_kernel and self.source.starts_declaration(i):
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
