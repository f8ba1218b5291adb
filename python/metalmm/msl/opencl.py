"""MSL as C++ for OpenCL, so that upstream clang type-checks it: an edit of tokens for whatever the two spell differently.

That language has MSL's address spaces: device = __global, threadgroup = __local, constant = __constant, thread = __private. It has
vector types with swizzles, and half. It has no exceptions, new or virtual functions. MSL's library in it is
csrc/msl/lint/declarations.h.
"""

from __future__ import annotations

import re

from .program import Declaration, Program
from .tokens import PRAGMA, VECTORS, Token

SPACES = {
    "device": "__global",
    "threadgroup": "__local",
    "constant": "__constant",
    "thread": "__private",
    "threadgroup_imageblock": "__local",
    "object_data": "__local",
    "ray_data": "__private",
}
_VECTORS = {kind for kind in VECTORS if not kind.startswith("bool")}  # whose class is another
# Keywords of OpenCL that are plain names in MSL.
_FOREIGN = {
    "global",
    "local",
    "private",
    "generic",
    "read_only",
    "write_only",
    "read_write",
    "pipe",
    "event_t",
    "queue_t",
    "sampler_t",
    "image2d_t",
    "__global",
    "__local",
    "addrspace_cast",
}
_ATOMIC = re.compile(r"atomic_(?:u?int|float|u?long|bool)")  # types of OpenCL's own, too
_DOUBLE = re.compile(r"(?:\d+\.\d*|\.\d+|\d+(?=e))(?:e[+-]?\d+)?")
_CLASSES = ("struct", "class", "union")


class Rewriter(Program):
    """A preprocessed file and, by `rewritten`, the same as C++ for OpenCL. The tokens are changed in place."""

    def rewritten(self) -> str:
        tokens = self.source.tokens
        for d in self.declarations:
            if d.body >= 0 and not d.is_function and not any(t.text == "enum" for t in tokens[d.start : d.body]):
                self._methods(d)
            if d.is_function and not any("kernel" in a.names for a in d.attributes):
                self._arrays(d)
        self._function_constants()
        for kernels in self.definitions.values():
            for d in kernels:
                self._threadgroup_variables(d)
        for i, t in enumerate(tokens):
            if t.text == "template" and tokens[i + 1].text == "<":
                self._functions_as_arguments(i + 2, self.source.angle_end(i + 1))
            elif t.text in ("using", "typedef"):
                self._functions_as_arguments(i, i + 12)
        types = self._type_names()
        for t in tokens:
            if t.kind == "number":
                t.text = _number(t.text)
        self._drop_attributes()
        for i, t in enumerate(tokens):
            if t.kind == "name" and t.text:
                self._constructor(i, types)
        for i, t in enumerate(tokens):
            if t.kind == "name":
                self._keyword(i, t)
        return PRAGMA.sub(lambda m: m[0] if "clang loop" in m[0] else "", self.source.text())

    def _drop_attributes(self) -> None:
        tokens, i = self.source.tokens, 0
        while i + 1 < len(tokens):
            if tokens[i].text == "[" and tokens[i + 1].text == "[" and not tokens[i + 1].space:
                end = self.source.matching(i) + 1
                for t in tokens[i:end]:
                    t.text = ""
                i = end
            else:
                i += 1

    def _keyword(self, i: int, t: Token) -> None:
        tokens = self.source.tokens
        before = tokens[i - 1].text if i else ""
        if (
            before in (".", "->", "::")
            and t.text != "as_type"
            and t.text not in _FOREIGN
            and not (before == "::" and _ATOMIC.fullmatch(t.text))
        ):
            return
        if t.text == "constant" and before not in (")", "const", "noexcept"):
            t.text = "__constant const"  # what lies there is const
        elif t.text in SPACES:
            t.text = SPACES[t.text]
        elif t.text == "kernel" or (t.text in ("vertex", "fragment") and before in ("", ";", "}", ">") and tokens[i + 1].kind == "name"):
            t.text = ""
        elif t.text == "coherent" and (before in SPACES.values() or tokens[i + 1].text in ("(", *SPACES, *SPACES.values())):
            end = self.source.matching(i + 1) + 1 if tokens[i + 1].text == "(" else i + 1
            for token in tokens[i:end]:
                token.text = ""
        elif t.text == "as_type":
            if before == "::":
                tokens[i - 1].text = tokens[i - 2].text = ""
            t.text = "metalmm_as_type"
        elif _ATOMIC.fullmatch(t.text) or (t.text in _FOREIGN and not (t.text == "private" and tokens[i + 1].text == ":")):
            t.text = "metalmm_" + t.text

    def _methods(self, owner: Declaration) -> None:
        """A member function without an address space is for objects in thread; upstream's would be for __generic ones."""
        tokens, i, end = self.source.tokens, owner.body + 1, self.source.matching(owner.body)
        while i < end:
            if tokens[i].text in ("public", "private", "protected") and tokens[i + 1].text == ":":
                i += 2
                continue
            if tokens[i].text == ";":
                i += 1
                continue
            m = self.declaration(i, end, ())
            head = [t.text for t in tokens[m.start : m.body if m.body >= 0 else m.end]]
            is_class = m.body >= 0 and not m.is_function and tokens[m.body - 1].text != "="
            if is_class and any(word in _CLASSES for word in head):
                self._methods(m)
            if m.is_function and "static" not in head and "friend" not in head:
                self._method(m, is_constructor=m.name == owner.name)
            i = m.end

    def _method(self, m: Declaration, is_constructor: bool) -> None:
        tokens, after = self.source.tokens, self.source.matching(self._parameter_list(m)) + 1
        while tokens[after].text in ("const", "volatile"):
            after += 1
        word = tokens[after].text
        if not is_constructor:
            if word not in SPACES:
                tokens[after - 1].text += " __private"
        elif word == "thread":  # upstream finds no constructor with an address space for a member
            tokens[after].text = ""
        elif word in SPACES:
            for t in tokens[m.start : m.end]:
                t.text = ""

    def _parameter_list(self, m: Declaration) -> int:
        """The bracket that opens a function's parameters."""
        tokens, i = self.source.tokens, m.start
        while True:
            word = tokens[i].text
            if word == "(" and tokens[i - 1].text not in ("__attribute__", "alignas", "decltype", "sizeof", "alignof", "(", "operator"):
                return i
            if word == "template":
                i = self.source.angle_end(i + 1)
            elif word in ("[", "("):
                i = self.source.matching(i)
            i += 1

    def _function_constants(self) -> None:
        """Their values come when a pipeline is made: upstream must not take them for constants of the compiler."""
        tokens = self.source.tokens
        for d in self.declarations:
            if d.is_function or not any("function_constant" in a.names for a in d.attributes):
                continue
            words = [t.text for t in tokens[d.start : d.end]]
            if "=" in words:
                continue
            for t in tokens[d.start : d.end]:
                t.text = "" if t.text == "constexpr" else t.text
            kind = " ".join(w for w in words[: words.index(d.name)] if w not in ("constant", "const", "static", "constexpr"))
            tokens[d.end - 1].text = f" = metalmm_function_constant<{kind}>();"

    def _threadgroup_variables(self, kernel: Declaration) -> None:
        """`threadgroup T a[n], b;` becomes references to some memory: upstream has such variables in a __kernel alone, and none of those
        is a template."""
        tokens, i = self.source.tokens, kernel.body
        while i < kernel.end:
            t = tokens[i]
            i += 1
            if t.kind != "name" or t.text != "threadgroup" or not self.source.starts_declaration(i - 1):
                continue
            end = i - 1
            while tokens[end].text != ";":
                end = self.source.matching(end) + 1 if tokens[end].text in ("(", "[", "{") else end + 1
            first = self._declared_name(i)
            if tokens[first].kind != "name" or tokens[first + 1].text == "(":
                continue  # a pointer to such memory
            for start, last in self.source.split(first, end):
                for k in range(start, last):
                    if tokens[k].text in ("=", "{"):  # an initializer, which Apple's compiler takes (MLX's layer_norm has one)
                        for token in tokens[k:last]:
                            token.text = ""
                        break
                name = tokens[start].text
                tokens[start].text = f"(&{'metalmm_' * (name in _FOREIGN)}{name})"
                tokens[last - 1].text += " = metalmm_tg"
            i = end

    def _declared_name(self, i: int) -> int:
        """Where the type that begins at `i` ends and a variable's name, or a pointer's star, stands."""
        tokens = self.source.tokens
        while True:
            following = tokens[i + 1].text
            if tokens[i].text == "<":
                i = self.source.angle_end(i) + 1
            elif tokens[i].text == "alignas":
                i = self.source.matching(i + 1) + 1
            elif tokens[i].text in ("::", "const", "volatile", "typename") or (
                tokens[i].kind == "name" and following not in ("[", ";", ",", "=", "{", "(")
            ):
                i += 1
            else:
                return i

    def _functions_as_arguments(self, start: int, end: int) -> None:
        """`void (*f)(…)` as a template's parameter, or as a type for one: upstream takes no pointer to a function there, and a reference
        it does."""
        tokens = self.source.tokens
        for i in range(start, min(end, len(tokens) - 4)):
            if tokens[i].text == ";":
                return
            words = [t.text for t in tokens[i : i + 5]]
            if words[:2] == ["(", "*"] and (words[2:4] == [")", "("] or words[3:] == [")", "("]):
                tokens[i + 1].text = "&"

    def _arrays(self, function: Declaration) -> None:
        """A parameter such as `float x[4]` lies in thread where nothing else is said; upstream has it in the generic space."""
        tokens, opening = self.source.tokens, self._parameter_list(function)
        for first, last in self.source.split(opening + 1, self.source.matching(opening)):
            while tokens[first].text == "[" and tokens[first + 1].text == "[":  # an attribute
                first = self.source.matching(first) + 1
            words = [t.text for t in tokens[first:last]]
            if "[" in words and not set(words) & {"*", "&", "=", *SPACES}:
                tokens[first].text = "__private " + tokens[first].text

    def _type_names(self) -> set[str]:
        """Names that stand for types which may be vectors: parameters of templates, aliases."""
        tokens, found, classes = self.source.tokens, set[str](), set[str]()
        for i, t in enumerate(tokens[:-2]):
            before = tokens[i - 1].text if i else ""
            name = tokens[i + 1]
            if t.text in ("typename", "class") and before in ("<", ",") and name.kind == "name":
                found.add(name.text)
            elif t.text in _CLASSES and name.kind == "name":
                classes.add(name.text)
            elif t.text == "using" and tokens[i + 2].text == "=":
                found.add(name.text)
            elif t.text == "typedef":
                j = i
                while tokens[j].text != ";":
                    j = self.source.matching(j) + 1 if tokens[j].text in ("(", "[", "{") else j + 1
                if tokens[j - 1].kind == "name":
                    found.add(tokens[j - 1].text)
        return (found | _VECTORS) - classes

    def _constructor(self, i: int, types: set[str]) -> None:
        """T(x, …), (T)x and static_cast<T>(x), where T may be a vector: upstream has no constructors for those."""
        tokens, first, last = self.source.tokens, i, i
        if tokens[i].text == "vec" and tokens[i + 1].text == "<":
            last = self.source.angle_end(i + 1)
        elif tokens[i].text not in types:
            return
        if last + 2 >= len(tokens):
            return
        while tokens[first - 1].text == "::" and tokens[first - 2].kind == "name":
            first -= 2
        before, following = tokens[first - 1], tokens[last + 1].text
        declares = set(SPACES) | set(_CLASSES) | {"const", "constexpr", "static", "volatile", "inline", "operator", "using"}
        if (
            tokens[i].text in (*_VECTORS, "vec")
            and tokens[last + 1].kind == "name"
            and tokens[last + 2].text == "("
            and self.source.gives_value(last + 2)
        ):
            whole = " ".join(t.text for t in tokens[first : last + 1])
            tokens[last + 1].text += f" = ::strict::make<{whole}>::of"
            return
        if (first != i and tokens[first].text != "metal") or before.text in declares or "::strict" in tokens[first].text:
            return
        name = " ".join(t.text for t in tokens[first : last + 1])
        if following == "(" and (before.kind != "name" or before.text in ("return", "else", "case")):
            if not self._is_declarator(first, last):
                self._replace(first, last + 1, f"::strict::make<{name}>::of")
        elif following == ")" and before.text == "(" and self._is_cast(first, last):
            self._replace(first - 1, last + 2, f"::strict::cast<{name}>()->*")
        elif following == ">" and before.text == "<" and tokens[first - 2].text == "static_cast" and tokens[last + 2].text == "(":
            self._replace(first - 2, last + 2, f"::strict::make<{name}>::of")

    def _is_declarator(self, first: int, last: int) -> bool:
        """Whether T( begins a declarator, such as T(&x)[4], or a function's type, as an argument of a template is."""
        tokens, close = self.source.tokens, self.source.matching(last + 1)
        before, inner, after = tokens[first - 1].text, tokens[last + 2].text, tokens[close + 1].text
        if inner in ("&", "*") and after in ("[", "("):
            return True
        if before == ">":  # of template <…>, and no comparison
            begin = next((j for j in range(first - 2, 0, -1) if tokens[j].text == "<" and tokens[j - 1].text == "template"), 0)
            return begin > 0 and self.source.angle_end(begin) == first - 1
        return before == "::" or (before in ("<", ",") and after == ">" and (close == last + 2 or inner in SPACES))

    def _is_cast(self, first: int, last: int) -> bool:
        """Whether (T) stands before what it casts."""
        tokens = self.source.tokens
        before, after = tokens[first - 2], tokens[last + 2]
        if before.text in ("sizeof", "alignof", "decltype", ">", ")", "]"):
            return False
        if before.kind == "name" and before.text not in ("return", "else", "case"):
            return False
        if after.text in ("-", "*", "&"):  # of two operands, unless an expression begins here
            return before.text in ("=", "(", ",", "+", "-", "*", "/", "return", "{")
        return after.text in ("(", "!", "~") or (after.kind in ("name", "number") and after.text not in ("const", "noexcept", *SPACES))

    def _replace(self, start: int, end: int, text: str) -> None:
        for t in self.source.tokens[start:end]:
            t.text = ""
        self.source.tokens[start].text = text


def _number(text: str) -> str:
    """A literal; MSL has no double, so that one without a suffix is a float."""
    low = text.lower()
    if low.startswith("0x"):
        return text
    if low.endswith("bf"):
        return f"bfloat({text[:-2]}f)"
    return text + "f" if _DOUBLE.fullmatch(low) else text
