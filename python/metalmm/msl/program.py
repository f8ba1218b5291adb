"""A preprocessed MSL file as declarations: which are kernels, what instantiates them."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ..errors import CompileError, LoweringError
from .arithmetic import evaluated, number
from .tokens import OPEN, Source

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


@dataclass
class Parameter:
    """A kernel's parameter: its attributes, and what kind of memory it is."""

    attributes: dict[str, tuple[int, int]]
    is_memory: bool  # a pointer or reference
    is_threadgroup: bool
    is_const: bool
    type: tuple[str, ...]  # words of what it points to, without qualifiers


@dataclass(frozen=True)
class Argument:
    """A buffer or a piece of threadgroup memory that a kernel takes, as its declaration says it."""

    is_buffer: bool
    index: int
    is_const: bool
    bytes: int  # the least size of what is bound; 1 where the text alone does not say
    type: str  # of what it points to, such as "uint"; of a template's parameter the argument


# Types that a template argument can be known by.
_TYPE = re.compile(
    r"(?:packed_)?(?:u?(?:char|short|int|long)|bool|b?half|float|bfloat)(?:[234](?:x[234])?)?|void|u?int(?:8|16|32|64)_t|size_t|"
    r"signed|unsigned|const|device|constant|thread|threadgroup"
)


_SCALARS = {
    name: size
    for size, names in (
        (1, "bool char uchar int8_t uint8_t"),
        (2, "short ushort half bfloat int16_t uint16_t"),
        (4, "int uint float int32_t uint32_t"),
        (8, "long ulong int64_t uint64_t size_t ptrdiff_t"),
    )
    for name in names.split()
}  # bytes
_WORDS = {
    "unsigned": "uint",
    "unsigned int": "uint",
    "unsigned short": "ushort",
    "unsigned char": "uchar",
    "unsigned long": "ulong",
    "signed char": "char",
}


class Program:
    """A preprocessed MSL file, parsed as far as lowering needs."""

    def __init__(self, text: str, name: str = "<source>") -> None:
        self.source = Source(text, name)
        try:
            self.declarations = list(self._scope(0, len(self.source.tokens), ()))
        except IndexError:
            raise self.source.fail(len(self.source.tokens) - 1, "the file ends in the middle of a declaration") from None
        self._evaluating: set[tuple[int, int]] = set()  # constants whose values are being found
        self._layouts: dict[str, tuple[int, int]] = {}
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
                first = self.source.matching(i + 1) + 1 if tokens[i + 1].text == "[" else i  # an attribute
                names = tuple(t.text for t in tokens[first:brace] if t.kind == "name" and t.text not in ("namespace", "inline"))
                yield from self._scope(brace + 1, close, namespace + names)
                i = close + 1
            elif text == "extern" and tokens[i + 1].kind == "string" and tokens[i + 2].text == "{":
                close = self.source.matching(i + 2)
                yield from self._scope(i + 3, close, namespace)
                i = close + 1
            else:
                declaration = self.declaration(i, end, namespace)
                if declaration.end == end == len(tokens) and tokens[-1].text not in ("}", ";"):
                    raise self.source.fail(i, "the file ends in the middle of a declaration")
                yield declaration
                i = declaration.end

    def declaration(self, start: int, end: int, namespace: tuple[str, ...]) -> Declaration:
        tokens, d, i = self.source.tokens, Declaration(start, end, namespace), start
        assigned, parens = False, -1
        while i < end:
            text = tokens[i].text
            if text == "[" and i + 1 < end and tokens[i + 1].text == "[":
                d.attributes.append(self.attribute(i))
                i = d.attributes[-1].end
                continue
            if text == "template" and tokens[i + 1].text == "<":
                i = self.source.angle_end(i + 1)
            elif text == "=":
                assigned = assigned or tokens[i - 1].text != "operator"
            elif text == "(" and not assigned:
                before = tokens[i - 1]
                if (
                    parens < 0
                    and (before.kind == "name" or before.text == ">")
                    and before.text not in ("__attribute__", "alignas", "decltype")
                ):
                    parens = i
                i = self.source.matching(i)
            elif text in ("(", "["):
                i = self.source.matching(i)
            elif text == "<" and parens < 0 and tokens[i - 1].kind == "name" and tokens[i - 1].text != "operator":
                i = self.source.angle_from(i + 1) or i  # typename enable_if<f<T>()>::type g(…)
            elif text == "{":
                close = self.source.matching(i)
                gives = parens >= 0 and close + 1 < end and tokens[close + 1].text in (",", "{")  # a constructor, a member
                if not gives and not assigned and d.body < 0:
                    d.body = i
                    d.is_function = self.opens_function(start, i)
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

    def opens_function(self, start: int, brace: int) -> bool:
        tokens, i = self.source.tokens, brace - 1
        while i > start and tokens[i].text in SPECIFIERS | {"noexcept", "override", "final", ""}:  # "": an attribute
            i -= 1
        if tokens[i].text == "]" and tokens[i - 1].text == "]":
            return True
        if tokens[i].text == ")":
            return True
        # A constructor's initializers may end in a brace or a name; classes have a keyword at their head.
        heads = {"struct", "class", "union", "enum"}
        j = self.source.behind_templates(start)
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
        while i < d.end and tokens[i].text not in ("=", "{", ";"):
            if tokens[i].text in OPEN:
                i = self.source.matching(i)
            elif tokens[i].text == "<" and "operator" not in (tokens[i - 1].text, tokens[i - 2].text):
                i = self.source.angle_end(i)
            elif tokens[i].kind == "name":
                name = tokens[i].text
            i += 1
        return name

    def attribute(self, start: int) -> Attribute:
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
                    host_name = "".join(self._string(i) for i in range(*a.names["host_name"]) if tokens[i].kind == "string")
            if d.is_function:
                self.definitions.setdefault(d.name, []).append(d)
                if tokens[d.start].text == "template":
                    continue
                instance = Instance(d, (d.name,))
            elif tokens[d.start].text == "template" and tokens[d.start + 1].text != "<":  # that one is declared beforehand
                instance = self._instance(d)
            else:
                continue
            name = host_name or "::".join((*d.namespace, *instance.path))  # as Metal names what lies in a namespace
            self.instances.setdefault(name, []).append(instance)

    def _string(self, index: int) -> str:
        try:
            return str(ast.literal_eval(self.source.tokens[index].text))
        except (SyntaxError, ValueError):
            raise self.source.fail(index, f"{self.source.tokens[index].text} is no string that a host name can be") from None

    def _instance(self, d: Declaration) -> Instance:
        tokens, last = self.source.tokens, d.end - 2
        trailing = {a.end - 1: a.start - 1 for a in d.attributes}
        while last in trailing:
            last = trailing[last]
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
        for c in found:
            words = self._specialized(c)
            if words and instance.arguments and words == [t.text for t in self.source.tokens[slice(*instance.arguments)]]:
                raise self.source.fail(
                    c.start, f"kernel '{c.name}' is specialized for what is instantiated; whose host_name it has is not known"
                )
        viable = [c for c in found if self._fits(c, instance)] if len(found) > 1 else found
        if not found:
            raise self.source.fail(d.start, f"kernel template '{'::'.join(instance.path)}' is not defined in this file")
        if len(viable) != 1:
            places = ", ".join(self.source.place(c.start) for c in found)
            raise self.source.fail(d.start, f"which '{'::'.join(instance.path)}' this is cannot be told; it is defined at {places}")
        return viable[0]

    def _specialized(self, d: Declaration) -> list[str]:
        """The words of the arguments of a `template <>`; of another nothing."""
        tokens = self.source.tokens
        if [t.text for t in tokens[d.start : d.start + 3]] != ["template", "<", ">"]:
            return []
        opening = next((i + 1 for i in range(d.start, d.body) if tokens[i].text == d.name), d.body)
        return [t.text for t in tokens[opening + 1 : self.source.angle_end(opening)]] if tokens[opening].text == "<" else []

    def shares_name(self, kernel: Declaration) -> bool:
        """Whether a function beside it has its name."""
        return any(
            d is not kernel and d.is_function and (d.name, d.namespace) == (kernel.name, kernel.namespace) for d in self.declarations
        )

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

    def opening_of_parameters(self, kernel: Declaration) -> int:
        close = kernel.body - 1
        while self.source.tokens[close].text != ")" or any(a.start <= close < a.end for a in kernel.attributes):
            close -= 1
        return self.source.opening(close)

    def parameters(self, kernel: Declaration) -> list[tuple[int, int]]:
        """The tokens of each parameter of a function."""
        tokens, opening = self.source.tokens, self.opening_of_parameters(kernel)
        pieces = self.source.split(opening + 1, self.source.matching(opening))
        return [(first, last) for first, last in pieces if not (last - first == 1 and tokens[first].text == "void")]

    def parameter(self, first: int, last: int, given: Mapping[str, str] | None = None) -> Parameter:
        """The parameter of those tokens; given: what a template's names stand for."""
        tokens, i = self.source.tokens, first
        attributes, words = dict[str, tuple[int, int]](), list[str]()
        while i < last:
            if tokens[i].text == "[" and tokens[i + 1].text == "[":
                attribute = self.attribute(i)
                attributes.update(attribute.names)
                i = attribute.end
                continue
            words.append(tokens[i].text)
            i += 1
        words = self._without_aliases(words, given)
        memory = next((j for j, word in enumerate(words) if word in ("*", "&", "[")), None)
        pointee = words[:memory]
        if memory is not None and words[memory] == "[":
            pointee = pointee[:-1]  # the name
        kind = tuple(w for w in pointee if w not in SPECIFIERS | {"struct", "coherent", "metal", "::"})
        is_const = bool({"const", "constant"} & set(pointee))
        return Parameter(attributes, memory is not None, "threadgroup" in words, is_const, kind)

    def _without_aliases(self, words: list[str], given: Mapping[str, str] | None = None, depth: int = 0) -> list[str]:
        """Words with what a template's argument, or a using or typedef at namespace scope, makes of them in place."""
        found = []
        for word in words:
            meant = (given[word].split() if given and word in given else self._aliases.get(word)) if depth < 8 else None
            found += [word] if meant is None else self._without_aliases(meant, None, depth + 1)
        return found

    @functools.cached_property
    def _aliases(self) -> dict[str, list[str]]:
        known = dict[str, list[str]]()
        for d in self.declarations:
            words = [t.text for t in self.source.tokens[d.start : d.end]]
            if words[0] == "using" and words[2:3] == ["="]:
                known[words[1]] = words[3:-1]
            elif words[0] == "typedef" and not {"{", "(", "[", ","} & set(words) and words[-2] not in words[1:-2]:
                known[words[-2]] = words[1:-2]
        return known

    def arguments(self, host_name: str, constants: Mapping[int | str, Any] | None = None) -> list[Argument]:
        """The memory that a kernel takes, by index; without what the function constants switch off."""
        instance = self.instance(host_name)
        definition = self.definition_of(instance)
        given = self._template_arguments(definition, instance)
        found, used = list[tuple[Parameter, int | None]](), {True: set[int](), False: set[int]()}
        for first, last in self.parameters(definition):
            p = self.parameter(first, last, given)
            if not p.is_memory or not self._is_enabled(p, constants or {}):
                continue
            span = p.attributes.get("threadgroup" if p.is_threadgroup else "buffer")
            index = self.integer(span, definition.namespace) if span else None
            found.append((p, index))
            if index is not None:
                used[p.is_threadgroup].add(index)
        result = []
        for p, index in found:
            if index is None:
                index = next(i for i in range(32) if i not in used[p.is_threadgroup])
                used[p.is_threadgroup].add(index)
            kind = " ".join(p.type)
            kind = _WORDS.get(kind, kind)
            result.append(Argument(not p.is_threadgroup, index, p.is_const, self.size_of(kind) or 1, kind))
        types = {(a.index, a.is_buffer): {o.type for o in result if (o.index, o.is_buffer) == (a.index, a.is_buffer)} for a in result}
        result = [a if len(types[a.index, a.is_buffer]) == 1 else replace(a, type="") for a in result]  # which is there, nobody says
        return sorted(result, key=lambda a: (a.index, not a.is_buffer))

    def _template_arguments(self, definition: Declaration, instance: Instance) -> dict[str, str]:
        """The names of a template's parameters with what an instance gives them."""
        tokens = self.source.tokens
        if instance.arguments is None or tokens[definition.start].text != "template":
            return {}
        header = self.source.split(definition.start + 2, self.source.angle_end(definition.start + 1))
        ends = [next((i for i in range(first, last) if tokens[i].text == "="), last) for first, last in header]
        names = [tokens[end - 1].text for end in ends]
        defaults = {name: self.join((end + 1, last)) for name, end, (_, last) in zip(names, ends, header, strict=True) if end < last}
        return defaults | dict(zip(names, map(self.join, self.source.split(*instance.arguments)), strict=False))

    def _is_enabled(self, p: Parameter, constants: Mapping[int | str, Any]) -> bool:
        """Whether the function constants leave it there; yes, where the text alone does not say."""
        span = p.attributes.get("function_constant")
        if span is None:
            return True
        value = self._condition(span, constants, 0)
        return True if value is None else bool(value)

    def _condition(self, span: tuple[int, int], constants: Mapping[int | str, Any], depth: int) -> Any:
        """The value of an expression of literals and constants of this file; None where the text alone does not say."""
        words = list[str]()
        for token in self.source.tokens[slice(*span)]:
            word = {"&&": " and ", "||": " or ", "true": "True", "false": "False"}.get(token.text, token.text)
            if token.kind == "name" and word not in ("True", "False"):
                value = self._constant_value(token.text, constants, depth)
                if value is None:
                    return None
                word = repr(value)
            words.append(number(word) if token.kind == "number" else word)
        return evaluated(" ".join(words))

    def _constant_value(self, name: str, constants: Mapping[int | str, Any], depth: int) -> Any:
        """Of a function constant what is given, of another constant what its own expression gives; None for anything else."""
        for d in self.declarations:
            if d.name != name or d.is_function:
                continue
            index = next((a.names["function_constant"] for a in d.attributes if "function_constant" in a.names), None)
            if index is not None:
                return constants.get(self.integer(index, d.namespace), constants.get(name))
            words = [t.text for t in self.source.tokens[d.start : d.end]]
            if "=" in words and depth < 16:
                return self._condition((d.start + words.index("=") + 1, d.end - 1), constants, depth + 1)
        return None

    def size_of(self, kind: str) -> int:
        """Bytes of a type; 0 where the text alone does not say."""
        return self._layout(kind, 0)[0]

    def _layout(self, kind: str, depth: int) -> tuple[int, int]:
        """Size and alignment, (0, 1) where the text alone does not say."""
        if match := re.fullmatch(r"vec ?< ?(\w+) ?, ?([234]) ?>", kind):
            kind = match[1] + match[2]
        match = re.fullmatch(r"(packed_|atomic_)?([a-z]+(?:(?<=int)(?:8|16|32|64)_t)?)(?:([234])(?:x([234]))?)?", kind)
        if match and (size := _SCALARS.get(match[2])):
            rows = int(match[4] or match[3] or 1)
            columns = int(match[3]) if match[4] else 1
            slots = rows if match[1] == "packed_" or rows != 3 else 4
            return size * slots * columns, size if match[1] == "packed_" else size * slots
        for d in self.declarations:
            words = [t.text for t in self.source.tokens[d.start : d.body]] if d.body >= 0 else []
            if d.name == kind and not d.is_function and "struct" in words and "template" not in words and ":" not in words and depth < 64:
                if kind not in self._layouts:
                    try:
                        self._layouts[kind] = self._struct_layout(d, depth)
                    except LoweringError:  # a bound of an array that only a compiler knows
                        self._layouts[kind] = 0, 1
                return self._layouts[kind]
        return 0, 1

    def _struct_layout(self, d: Declaration, depth: int) -> tuple[int, int]:
        tokens, end, i = self.source.tokens, self.source.matching(d.body), d.body + 1
        size, alignment = 0, 1
        while i < end:
            member = self.declaration(i, end, ())
            first, i = i, max(member.end, i + 1)
            if tokens[first].text == ";":
                continue
            names = self.source.split(first, member.end - 1)
            head = [t.text for t in tokens[slice(*names[0])] if t.text not in SPECIFIERS]
            if member.is_function or len(head) < 2 or {"*", "&", "=", ":", "(", "static", "using", "typedef"} & set(head):
                return 0, 1
            where = head.index("[") if "[" in head else len(head)
            named = " ".join(self._without_aliases(head[: where - 1]))
            one, aligned = self._layout(_WORDS.get(named, named), depth + 1)
            if not one:
                return 0, 1
            for start, stop in names:
                count, at = 1, start
                while at < stop:
                    if tokens[at].text == "[":
                        close = self.source.matching(at)
                        count *= self.integer((at + 1, close), d.namespace)
                        at = close
                    at += 1
                size = (size + aligned - 1) // aligned * aligned + one * count
            alignment = max(alignment, aligned)
        return (size + alignment - 1) // alignment * alignment, alignment

    def kernel_names(self) -> list[str]:
        return sorted(self.instances)

    def reachable(self, *roots: Declaration) -> list[Declaration]:
        """Declarations whose names the roots mention, directly or through others."""
        by_name: dict[str, list[Declaration]] = {}
        for d in self.declarations:
            by_name.setdefault(d.name, []).append(d)
        seen: dict[int, Declaration] = {}
        queue = list(roots)
        while queue:
            d = queue.pop()
            if d.start in seen:
                continue
            seen[d.start] = d
            for word in {t.text for t in self.source.tokens[d.start : d.end] if t.kind == "name"}:
                queue += by_name.get(word, [])
        return sorted(seen.values(), key=lambda d: d.start)

    def integer(self, span: tuple[int, int], namespace: tuple[str, ...] = ()) -> int:
        words, i = [], span[0]
        while i < span[1]:
            path = [self.source.tokens[i].text]
            while i + 2 < span[1] and self.source.tokens[i + 1].text == "::":
                i += 2
                path.append(self.source.tokens[i].text)
            is_name = self.source.tokens[i].kind == "name"
            words.append(str(self._value_of(tuple(path), namespace, span[0])) if is_name else number(path[0]))
            i += 1
        text = " ".join(words).replace("< <", "<<").replace("> >", ">>")
        value = evaluated(text)
        if type(value) is not int:
            raise self.source.fail(span[0], f"'{text}' is not an integer constant expression")
        return value

    def _value_of(self, path: tuple[str, ...], namespace: tuple[str, ...], at: int) -> int:
        """The value of a constant or enumerator of the file, from the innermost scope that has one."""
        offset, start = 0, path
        for _ in range(1 << 16):  # enumerators count on from one another
            found = [self.constants[p] for d in range(len(namespace), -1, -1) if (p := (*namespace[:d], *path)) in self.constants]
            if not found:
                break
            previous, step, span, home = found[0]
            offset += step
            if span is None and previous is None:
                return offset
            if span is not None:
                if span in self._evaluating:
                    raise self.source.fail(at, f"the value of '{'::'.join(start)}' is made of itself")
                self._evaluating.add(span)
                try:
                    return self.integer(span, home) + offset
                finally:
                    self._evaluating.discard(span)
            path, namespace = previous or path, ()
        raise self.source.fail(at, f"'{'::'.join(start)}' is not an integer constant expression")

    @functools.cached_property
    def constants(self) -> dict[tuple[str, ...], tuple[tuple[str, ...] | None, int, tuple[int, int] | None, tuple[str, ...]]]:
        """Names at namespace scope that stand for integers: (the name that it counts on from, by how much, its own tokens, where they stand)."""
        tokens, known = self.source.tokens, dict[tuple[str, ...], Any]()
        for d in self.declarations:
            words = [t.text for t in tokens[d.start : d.body if d.body >= 0 else d.end]]
            if "enum" in words and d.body >= 0:
                scope = (*d.namespace, d.name) if {"class", "struct"} & set(words) else d.namespace
                before: tuple[str, ...] | None = None
                for first, last in self.source.split(d.body + 1, self.source.matching(d.body)):
                    name = (*scope, tokens[first].text)
                    given = last - first > 2 and tokens[first + 1].text == "="
                    entry = (None, 0, (first + 2, last), d.namespace) if given else (before, 1 if before else 0, None, d.namespace)
                    known[name] = known[*d.namespace, d.name, tokens[first].text] = entry
                    before = name
            elif not d.is_function and d.name and "=" in words and {"const", "constant", "constexpr"} & set(words):
                known[*d.namespace, d.name] = (None, 0, (d.start + words.index("=") + 1, d.end - 1), d.namespace)
        return known

    def join(self, span: tuple[int, int]) -> str:
        """Its tokens in one line."""
        return self.source.join((t, t.text) for t in self.source.tokens[slice(*span)])
