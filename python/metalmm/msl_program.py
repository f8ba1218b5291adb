"""A preprocessed MSL file as declarations: which are kernels, what instantiates them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from .errors import CompileError
from .msl_source import OPEN, Source

SPECIFIERS = {"const", "constexpr", "static", "inline", "volatile", "device", "thread", "threadgroup", "constant"}


@dataclass
class Attribute:
    start: int
    end: int  # past the last ']'
    names: dict[str, tuple[int, int]]  # name -> range of the argument's tokens; empty for none


@dataclass
class Declaration:
    """One declaration at namespace scope, tokens start to end."""

    start: int
    end: int
    namespace: tuple[str, ...]
    body: int = -1  # of a function or class: its '{'
    is_function: bool = False
    name: str = ""
    attributes: list[Attribute] = field(default_factory=list)


@dataclass
class Instance:
    """A kernel that can be asked for: a function, or an explicit instantiation of a template, in any of its spellings."""

    declaration: Declaration
    path: tuple[str, ...]  # its name as written there, with namespaces
    arguments: tuple[int, int] | None = None  # tokens of its template arguments; None: a plain function, or all are deduced
    signature: tuple[int, int] | None = None  # tokens of its parameter list; None: written as decltype(f<…>) f<…>


# Types that a template argument can be known by.
_TYPE = re.compile(
    r"(?:packed_)?(?:u?(?:char|short|int|long)|bool|b?half|float|bfloat)(?:[234](?:x[234])?)?|void|u?int(?:8|16|32|64)_t|size_t|"
    r"signed|unsigned|const|device|constant|thread|threadgroup"
)


class Program:
    """A preprocessed MSL file, parsed as far as lowering needs."""

    def __init__(self, text: str, name: str = "<source>") -> None:
        self.source = Source(text, name)
        try:
            self.declarations = list(self._scope(0, len(self.source.tokens), ()))
        except IndexError:
            raise self.source.fail(len(self.source.tokens) - 1, "the file ends in the middle of a declaration") from None
        self.instances: dict[str, list[Instance]] = {}  # by host name; more than one is a mistake
        self.definitions: dict[str, list[Declaration]] = {}  # kernels, by their bare name
        self._find_kernels()

    def _scope(self, start: int, end: int, namespace: tuple[str, ...]) -> Iterator[Declaration]:
        tokens, i = self.source.tokens, start
        while i < end:
            text = tokens[i].text
            if text == ";":
                i += 1
            elif text == "namespace" or (text == "inline" and tokens[i + 1].text == "namespace"):
                brace = i
                while tokens[brace].text not in "{;=":
                    brace += 1
                if tokens[brace].text != "{":  # an alias
                    while tokens[brace].text != ";":
                        brace += 1
                    i = brace + 1
                    continue
                close = self.source.matching(brace)
                names = tuple(t.text for t in tokens[i:brace] if t.kind == "name" and t.text not in ("namespace", "inline"))
                yield from self._scope(brace + 1, close, namespace + names)
                i = close + 1
            elif text == "extern" and tokens[i + 1].kind == "string" and tokens[i + 2].text == "{":
                close = self.source.matching(i + 2)
                yield from self._scope(i + 3, close, namespace)
                i = close + 1
            else:
                declaration = self._declaration(i, end, namespace)
                yield declaration
                i = declaration.end

    def _declaration(self, start: int, end: int, namespace: tuple[str, ...]) -> Declaration:
        tokens, d, i = self.source.tokens, Declaration(start, end, namespace), start
        assigned, parens = False, -1
        while i < end:
            text = tokens[i].text
            if text == "[" and i + 1 < end and tokens[i + 1].text == "[":
                d.attributes.append(self._attribute(i))
                i = d.attributes[-1].end
                continue
            if text == "template" and tokens[i + 1].text == "<":
                i = self.source.angle_end(i + 1)
            elif text == "=":
                assigned = True
            elif text == "(" and not assigned:
                before = tokens[i - 1]
                if (
                    parens < 0
                    and (before.kind == "name" or before.text == ">")
                    and before.text not in ("__attribute__", "alignas", "decltype")
                ):
                    parens = i
                i = self.source.matching(i)
            elif text in "([":
                i = self.source.matching(i)
            elif text == "{":
                close = self.source.matching(i)
                if not assigned and d.body < 0:
                    d.body = i
                    d.is_function = self._opens_function(start, i)
                    if d.is_function:
                        d.end = close + 1
                        break
                i = close
            elif text == ";":
                d.end = i + 1
                break
            i += 1
        d.name = self._name(d, parens)
        return d

    def _opens_function(self, start: int, brace: int) -> bool:
        tokens, i = self.source.tokens, brace - 1
        while i > start and tokens[i].text in SPECIFIERS | {"noexcept", "override", "final"}:
            i -= 1
        if tokens[i].text == "]" and tokens[i - 1].text == "]":
            return True
        if tokens[i].text == ")":
            return True
        # A constructor's initializers may end in a brace or a name; classes have a keyword at their head.
        heads = {"struct", "class", "union", "enum"}
        j = start
        while tokens[j].text == "template":
            j = self.source.angle_end(j + 1) + 1
        return not any(t.text in heads for t in tokens[j:brace]) and any(t.text == "(" for t in tokens[j:brace])

    def _name(self, d: Declaration, parens: int) -> str:
        tokens = self.source.tokens
        words = [t.text for t in tokens[d.start : min(d.end, d.start + 400)]]
        for head in ("struct", "class", "union", "enum"):
            if head in words and not d.is_function and (d.body >= 0 or words[-1] == ";"):
                i = d.start + words.index(head) + 1
                while i < d.end and (tokens[i].kind != "name" or tokens[i].text in ("class", "alignas", "__attribute__")):
                    i = self.source.matching(i) + 1 if tokens[i].text in OPEN else i + 1
                if d.body >= 0:
                    return tokens[i].text if i < d.end else ""
        if words and words[0] == "using" and len(words) > 1:
            return words[1]
        if d.is_function or parens >= 0:
            i = parens - 1
            # f<int>(…), but not operator>(…) or operator>>(…)
            if i >= 0 and tokens[i].text == ">" and "operator" not in (tokens[i - 1].text, tokens[i - 2].text):
                i = self.source.opening(i) - 1
            return tokens[i].text if i >= 0 and tokens[i].kind == "name" else ""
        i = d.start
        name = ""
        while i < d.end and tokens[i].text not in "={;":
            if tokens[i].text in OPEN:
                i = self.source.matching(i)
            elif tokens[i].text == "<":
                i = self.source.angle_end(i)
            elif tokens[i].kind == "name":
                name = tokens[i].text
            i += 1
        return name

    def _attribute(self, start: int) -> Attribute:
        tokens = self.source.tokens
        end = self.source.matching(start) + 1
        names: dict[str, tuple[int, int]] = {}
        for first, last in self.source.split(start + 2, end - 2):
            i = first
            while i + 1 < last and tokens[i + 1].text == "::":
                i += 2
            has_argument = i + 1 < last and tokens[i + 1].text == "("
            names[tokens[i].text] = (i + 2, self.source.matching(i + 1)) if has_argument else (0, 0)
        return Attribute(start, end, names)

    def _find_kernels(self) -> None:
        tokens = self.source.tokens
        for d in self.declarations:
            head = d.body if d.body >= 0 else d.end
            marked = any("kernel" in a.names for a in d.attributes)
            marked = marked or any(t.text == "kernel" and t.kind == "name" for t in tokens[d.start : min(head, d.start + 200)])
            if not marked:
                continue
            host_name = ""
            for a in d.attributes:
                if "host_name" in a.names:
                    host_name = "".join(str(ast.literal_eval(t.text)) for t in tokens[slice(*a.names["host_name"])] if t.kind == "string")
            if d.is_function:
                self.definitions.setdefault(d.name, []).append(d)
                if tokens[d.start].text == "template":
                    continue
                instance = Instance(d, (d.name,))
            elif tokens[d.start].text == "template":
                instance = self._instance(d)
            else:
                continue
            name = host_name or "::".join((*d.namespace, *instance.path))  # as Metal names what lies in a namespace
            self.instances.setdefault(name, []).append(instance)

    def _instance(self, d: Declaration) -> Instance:
        tokens, last = self.source.tokens, d.end - 2
        while tokens[last].text == "]":  # a trailing attribute
            last = next(a.start for a in d.attributes if a.end == last + 1) - 1
        signature = arguments = None
        if tokens[last].text == ")":
            opening = self.source.opening(last)
            signature, last = (opening + 1, last), opening - 1
        if tokens[last].text == ">":
            opening = self.source.opening(last)
            arguments, last = (opening + 1, last), opening - 1
        if tokens[last].kind != "name" or (arguments is None and signature is None):
            raise self.source.fail(d.start, "an explicit instantiation of a kernel names its template arguments, or its parameters")
        path = [tokens[last].text]
        while tokens[last - 1].text == "::" and tokens[last - 2].kind == "name":
            last -= 2
            path.insert(0, tokens[last].text)
        return Instance(d, tuple(path), arguments, signature)

    def instance(self, host_name: str) -> Instance:
        """Raises CompileError for a name that no kernel or more than one has."""
        found = self.instances.get(host_name, [])
        if len(found) > 1:
            places = ", ".join(self.source.place(i.declaration.start) for i in found)
            raise CompileError(f"{len(found)} kernels have the host name '{host_name}': {places}")
        if not found:
            raise CompileError(f"no kernel '{host_name}'; there are: {', '.join(self.kernel_names()[:20]) or 'none'}")
        return found[0]

    def definition_of(self, instance: Instance) -> Declaration:
        """The function or template that an instance is one of, by namespaces, template arguments and parameters."""
        d = instance.declaration
        if d.is_function:
            return d
        everywhere = self.definitions.get(instance.path[-1], [])
        found: list[Declaration] = []
        for depth in range(len(d.namespace), -1, -1):
            path = (*d.namespace[:depth], *instance.path)
            found = found or [c for c in everywhere if (*c.namespace, c.name) == path]
        found = found or everywhere  # by way of a using-directive
        viable = [c for c in found if self._fits(c, instance)] if len(found) > 1 else found
        if not found:
            raise self.source.fail(d.start, f"kernel template '{'::'.join(instance.path)}' is not defined in this file")
        if len(viable) != 1:
            places = ", ".join(self.source.place(c.start) for c in found)
            raise self.source.fail(d.start, f"which '{'::'.join(instance.path)}' this is cannot be told; it is defined at {places}")
        return viable[0]

    def _fits(self, template: Declaration, instance: Instance) -> bool:
        tokens = self.source.tokens
        if tokens[template.start].text != "template":
            return False
        if instance.signature and len(self.source.split(*instance.signature)) != len(self.parameters(template)):
            return False
        header = self.source.split(template.start + 2, self.source.angle_end(template.start + 1))
        arguments = self.source.split(*instance.arguments) if instance.arguments else []
        words = [[t.text for t in tokens[slice(*span)]] for span in header]
        is_pack = bool(words) and "..." in words[-1]
        if len(arguments) > len(header) and not is_pack:
            return False
        if not instance.signature and any("=" not in w and "..." not in w for w in words[len(arguments) :]):
            return False
        for word, argument in zip(words, arguments, strict=False):
            is_type = self._is_type(argument)
            if is_type is not None and is_type != (word[0] in ("typename", "class", "template")):
                return False
        return True

    def _is_type(self, span: tuple[int, int]) -> bool | None:
        """Whether a template argument is a type; None where the text alone does not say."""
        tokens = self.source.tokens[slice(*span)]
        if any(t.kind == "number" or t.text in ("true", "false", "+", "-", "/", "!") for t in tokens[:2]):
            return False
        if any(_TYPE.fullmatch(t.text) for t in tokens):
            return True
        if len(tokens) == 1:
            for d in self.declarations:
                if d.name == tokens[0].text:
                    words = {t.text for t in self.source.tokens[d.start : d.start + 12]}
                    return bool(words & {"struct", "class", "union", "enum", "using", "typedef"})
        return None

    def parameters(self, kernel: Declaration) -> list[tuple[int, int]]:
        """The tokens of each parameter of a function."""
        tokens, close = self.source.tokens, kernel.body - 1
        while tokens[close].text != ")" or any(a.start <= close < a.end for a in kernel.attributes):
            close -= 1
        pieces = self.source.split(self.source.opening(close) + 1, close)
        return [(first, last) for first, last in pieces if not (last - first == 1 and tokens[first].text == "void")]

    def kernel_names(self) -> list[str]:
        return sorted(self.instances)
