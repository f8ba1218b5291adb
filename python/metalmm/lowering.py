"""Turns one kernel of a preprocessed MSL file into C++ for the CPU device.

MSL is C++ with address spaces, attributes and threadgroup variables; everything else is supplied by csrc/msl/runtime.
This module edits tokens, keeps every line where it was (so that a compiler's message points into the .metal file) and
refuses what it does not understand: a missed ``threadgroup`` would silently become a variable of each thread.
"""

from __future__ import annotations

import ast
import functools
import itertools
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from .errors import CompileError, LoweringError
from .metal_rules import MetalRules
from .msl_program import SPECIFIERS, Declaration, Program
from .msl_source import OPEN, PRAGMA, Token

_POSITIONS = {
    "thread_position_in_grid",
    "thread_position_in_threadgroup",
    "threadgroup_position_in_grid",
    "threads_per_threadgroup",
    "threads_per_grid",
    "threadgroups_per_grid",
    "thread_index_in_threadgroup",
    "thread_index_in_simdgroup",
    "simdgroup_index_in_threadgroup",
    "threads_per_simdgroup",
    "simdgroups_per_threadgroup",
    "thread_index_in_quadgroup",
    "quadgroup_index_in_threadgroup",
    "quadgroups_per_threadgroup",
    "grid_origin",
}
_ALIASES = {
    "thread_execution_width": "threads_per_simdgroup",
    "grid_size": "threads_per_grid",
    "dispatch_threads_per_threadgroup": "threads_per_threadgroup",
    "dispatch_simdgroups_per_threadgroup": "simdgroups_per_threadgroup",
    "dispatch_quadgroups_per_threadgroup": "quadgroups_per_threadgroup",
}
_UNSUPPORTED = re.compile(
    r"(?:texture(?:1d|2d|3d|cube|_buffer)\w*|depth(?:2d|cube)\w*|sampler|imageblock\w*|visible_function_table|"
    r"intersection_function_table|intersector|acceleration_structure|instance_acceleration_structure|command_buffer|"
    r"render_command|compute_command|tensor_handle|cooperative_tensor|simdgroup_event|simdgroup_async_copy|"
    r"threadgroup_imageblock|ray_data|object_data|double)"
)
_UNSIGNED = {"ushort", "uint", "unsigned", "unsigned int", "unsigned short", "uint16_t", "uint32_t"}
_POSITION_TYPES = _UNSIGNED | {"ushort2", "ushort3", "uint2", "uint3"}
_NUMBER_TYPES = _POSITION_TYPES | {
    f"{kind}{n}" for kind in ("bool", "char", "uchar", "short", "ushort", "int", "uint", "long", "ulong", "half", "float", "bfloat") for n in ("", 2, 3, 4)
} | {"unsigned", "signed", "size_t", "int32_t", "int64_t", "uint64_t"}  # fmt: skip
_SWIZZLE = re.compile(r"[xyzw]{2,4}|[rgba]{2,4}")
_MEMBERS = re.compile(r"[xyzw]{1,4}|[rgba]{1,4}")


class Lowering(Program):
    """A program on its way to C++. Its tokens are edited in place, so it serves for one kernel."""

    def lower(self, kernel: str, constants: Mapping[int | str, bool | int | float] | None = None, compiler: str = "gcc") -> str:
        """C++ for one kernel."""
        instance = self.instance(kernel)
        definition = self.definition_of(instance)
        name = definition.name
        reachable = self._reachable(definition, instance.declaration)
        self._refuse_unsupported(reachable)
        MetalRules(self).check(reachable)
        specs = self._argument_specs(definition)
        limit = self._thread_limit(definition, instance.declaration)
        self._function_constants(constants or {}, reachable)
        template = self._template_header(definition)
        arguments = self._erased_text(instance.arguments)
        signature = self._erased_text(instance.signature)
        is_cast = (
            instance.declaration is not definition and (instance.arguments is None or len(self.definitions[name]) > 1) and bool(signature)
        )
        parameters = ", ".join(self._erased_text(span) for span in self.parameters(definition)) if is_cast else ""
        self._drop_other_kernels(definition)
        self._attributes()
        if compiler == "gcc":
            self._member_specializations()
        self._members_and_duplicates()
        self._threadgroup_variables()
        self._address_spaces()
        self._range_designators()
        self._swizzles()
        self._literals()
        self._pragmas(compiler)
        # From the global namespace: a kernel may have the name of something in metal.
        scope = "::".join(("", *definition.namespace))
        function = f"{scope}::{name}" + (f"<{arguments}>" if instance.arguments else "")
        holder = ""
        threads = f"static_cast<::metalmm::abi::u32>({limit})"
        if is_cast:  # which overload, or which arguments, its parameters say; in the scope where they were written
            inner = "::".join(instance.declaration.namespace)
            holder = f"namespace {inner} {{ " if inner else ""
            holder += f"static constexpr auto metalmm_function = static_cast<void (*)({signature})>(&{function});"
            function, holder = f"::{inner}::metalmm_function" if inner else "::metalmm_function", holder + (" }\n" if inner else "\n")
            if limit != "0":
                holder += f"{template} constexpr ::metalmm::abi::u32 metalmm_thread_limit(void (*)({parameters})) {{ return ({limit}); }}\n"
                threads = f"metalmm_thread_limit{f'<{arguments}>' if instance.arguments else ''}({function})"
        else:
            function = f"&{function}"
            if instance.arguments and limit != "0":
                holder = f"{template} struct metalmm_thread_limit {{ static constexpr ::metalmm::abi::u32 value = ({limit}); }};\n"
                threads = f"metalmm_thread_limit<{arguments}>::value"
        return self._entry(function, specs, threads, holder)

    def _erased_text(self, span: tuple[int, int] | None) -> str:
        """Tokens as they will stand in C++: without attributes and address spaces."""
        words, i = list[tuple[Token, str]](), span[0] if span else 0
        while span and i < span[1]:
            if self.source.tokens[i].text == "[" and self.source.tokens[i + 1].text == "[":
                i = self.source.matching(i) + 1
                continue
            words.append((self.source.tokens[i], self._erased(i)))
            i += 1
        return self.source.join(words)

    def _reachable(self, *roots: Declaration) -> list[Declaration]:
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

    def _refuse_unsupported(self, declarations: list[Declaration]) -> None:
        for d in declarations:
            for i in range(d.start, d.end):
                token = self.source.tokens[i]
                if token.kind == "name" and _UNSUPPORTED.fullmatch(token.text) and self.source.tokens[i - 1].text not in (".", "->"):
                    raise self.source.fail(i, f"'{token.text}' is not supported on the CPU device")

    def _argument_specs(self, kernel: Declaration) -> list[str]:
        """An abi::ArgSpec for every parameter, in C++."""
        found = [self._parameter(kernel, first, last) for first, last in self.parameters(kernel)]
        taken: dict[tuple[str, int], str] = {}
        for kind, index, enabled in found:
            if index is None or kind not in ("buffer", "threadgroup"):
                continue
            # Two that function constants switch can take turns.
            if (kind, index) in taken and "true" in (enabled, taken[kind, index]):
                raise self.source.fail(kernel.start, f"two arguments of kernel '{kernel.name}' at {kind} index {index}")
            taken[kind, index] = enabled
        used = {kind: {index for k, index, _ in found if k == kind and index is not None} for kind in ("buffer", "threadgroup")}
        specs = []
        for kind, index, enabled in found:
            if kind in used and index is None:
                index = next(i for i in range(32) if i not in used[kind])
                used[kind].add(index)
            if kind in used and not 0 <= int(index or 0) < 31:
                raise self.source.fail(kernel.start, f"{kind} index {index} is not in 0 to 30")
            specs.append(f"{{::metalmm::abi::ArgKind::{kind}, {index or 0}, {enabled}}}")
        return specs

    def _parameter(self, kernel: Declaration, first: int, last: int) -> tuple[str, int | None, str]:
        tokens = self.source.tokens
        attributes: dict[str, tuple[int, int]] = {}
        i, is_pointer, is_threadgroup = first, False, False
        while i < last:
            text = tokens[i].text
            if text == "[" and tokens[i + 1].text == "[":
                attribute = self._attribute(i)
                attributes.update(attribute.names)
                i = attribute.end
                continue
            is_pointer |= text in "*&" or text == "["
            is_threadgroup |= text == "threadgroup"
            i += 1
        enabled = "true"
        if "function_constant" in attributes:
            enabled = "static_cast<bool>(" + self._join(attributes.pop("function_constant")) + ")"
        for name, argument in attributes.items():
            if name in ("buffer", "threadgroup"):
                return name, self._integer(argument, kernel.namespace), enabled
            if (position := _ALIASES.get(name, name)) in _POSITIONS:
                self._check_position(position, first, last)
                return position, None, enabled
            if name not in ("maybe_unused", "unused"):
                raise self.source.fail(first, f"the attribute [[{name}]] of a kernel argument is not supported on the CPU device")
        if not is_pointer:
            words = " ".join(t.text for t in tokens[first:last])
            raise self.source.fail(first, f"the kernel argument '{words}' has no attribute and is neither pointer nor reference")
        return ("threadgroup" if is_threadgroup else "buffer"), None, enabled

    def _join(self, span: tuple[int, int]) -> str:
        return self.source.join((t, t.text) for t in self.source.tokens[slice(*span)])

    def _check_position(self, position: str, first: int, last: int) -> None:
        """Positions are ushort or uint, of one to three dimensions; indices of one."""
        tokens = self.source.tokens[first:last]
        head = next((j for j in range(len(tokens) - 1) if tokens[j].text == "[" and tokens[j + 1].text == "["), len(tokens))
        if any(t.text in ("*", "&") for t in tokens[:head]):
            raise self.source.fail(first, f"[[{position}]] is a value; it takes no pointer or reference")
        words = [t.text for t in tokens[:head] if t.text in _NUMBER_TYPES]
        kind = " ".join(words)
        if "unsigned" in words and set(words) <= {"unsigned", "int", "short"}:
            kind = "uint"
        if not kind:
            return  # by another name, which a type checker would have to look up
        allowed = (
            _UNSIGNED if position.startswith("thread_index") or "simdgroup" in position or "quadgroup" in position else _POSITION_TYPES
        )
        if kind not in allowed:
            takes = "ushort or uint" if allowed is _UNSIGNED else "ushort or uint, or a vector of two or three of them"
            raise self.source.fail(first, f"[[{position}]] is of type {kind}; it takes {takes}")

    def _integer(self, span: tuple[int, int], namespace: tuple[str, ...] = ()) -> int:
        words, i = [], span[0]
        while i < span[1]:
            path = [self.source.tokens[i].text]
            while i + 2 < span[1] and self.source.tokens[i + 1].text == "::":
                i += 2
                path.append(self.source.tokens[i].text)
            is_name = self.source.tokens[i].kind == "name"
            words.append(str(self._value_of(tuple(path), namespace, span[0])) if is_name else _number(path[0]))
            i += 1
        text = " ".join(words).replace("< <", "<<").replace("> >", ">>")
        try:
            tree = ast.parse(text, mode="eval")
            allowed = (ast.Expression, ast.BinOp, ast.UnaryOp, ast.Constant, ast.operator, ast.unaryop)
            if all(isinstance(node, allowed) for node in ast.walk(tree)):
                return int(eval(compile(tree, "<attribute>", "eval"), {"__builtins__": {}}))  # arithmetic on literals only
        except (SyntaxError, ValueError, TypeError, ZeroDivisionError):
            pass
        raise self.source.fail(span[0], f"'{text}' is not an integer constant expression")

    def _value_of(self, path: tuple[str, ...], namespace: tuple[str, ...], at: int) -> int:
        """The value of a constant or enumerator of the file, from the innermost scope that has one."""
        for depth in range(len(namespace), -1, -1):
            if span := self.constants.get((*namespace[:depth], *path)):
                previous, offset, span_tokens = span
                base = self._integer(span_tokens, namespace) if span_tokens else (self._value_of(previous, (), at) if previous else 0)
                return base + offset
        raise self.source.fail(at, f"'{'::'.join(path)}' is not an integer constant expression")

    @functools.cached_property
    def constants(self) -> dict[tuple[str, ...], tuple[tuple[str, ...] | None, int, tuple[int, int] | None]]:
        """Names at namespace scope that stand for integers: (the name that it counts on from, by how much, its own tokens)."""
        tokens, known = self.source.tokens, dict[tuple[str, ...], Any]()
        for d in self.declarations:
            words = [t.text for t in tokens[d.start : d.body if d.body >= 0 else d.end]]
            if "enum" in words and d.body >= 0:
                scope = (*d.namespace, d.name) if {"class", "struct"} & set(words) else d.namespace
                before: tuple[str, ...] | None = None
                for first, last in self.source.split(d.body + 1, self.source.matching(d.body)):
                    name = (*scope, tokens[first].text)
                    given = last - first > 2 and tokens[first + 1].text == "="
                    entry = (None, 0, (first + 2, last)) if given else (before, 1 if before else 0, None)
                    known[name] = known[*d.namespace, d.name, tokens[first].text] = entry
                    before = name
            elif not d.is_function and d.name and "=" in words and {"const", "constant", "constexpr"} & set(words):
                known[*d.namespace, d.name] = (None, 0, (d.start + words.index("=") + 1, d.end - 1))
        return known

    def _thread_limit(self, *declarations: Declaration) -> str:
        for d in reversed(declarations):
            for a in d.attributes:
                if span := a.names.get("max_total_threads_per_threadgroup"):
                    return self._join(span)
        return "0"

    def _template_header(self, d: Declaration) -> str:
        if self.source.tokens[d.start].text != "template":
            return ""
        end = self.source.angle_end(d.start + 1)
        return " ".join(t.text for t in self.source.tokens[d.start : end + 1])

    def _function_constants(self, values: Mapping[int | str, bool | int | float], reachable: list[Declaration]) -> None:
        tokens, known = self.source.tokens, set()
        asked = {
            tokens[i + 2].text
            for i in range(len(tokens) - 2)
            if tokens[i].text == "is_function_constant_defined" and tokens[i + 1].text == "("
        }
        reached = {d.start for d in reachable}
        missing: list[tuple[int, str, int]] = []
        defined: dict[str, bool] = {}
        for d in self.declarations:
            span = next((a.names["function_constant"] for a in d.attributes if "function_constant" in a.names), None)
            if span is None or d.is_function:
                continue
            index = self._integer(span, d.namespace)
            known |= {index, d.name}
            if index in values and d.name in values:
                raise CompileError(f"constants: {index} and {d.name!r} are one function constant; give it once")
            value = values.get(index, values.get(d.name))
            defined[d.name] = value is not None
            if value is None and d.start in reached and d.name not in asked:
                missing.append((d.start, d.name, index))
            where = next(i for i in range(d.start, d.end) if tokens[i].text == d.name)
            kind = " ".join(t.text for t in tokens[d.start : where] if t.text not in ("constant", "const", "constexpr", "static"))
            text = "{}" if value is None else f"= static_cast<{kind}>({_literal(value, kind, d.name)})"
            self.source.blank(d.start, d.end)
            tokens[d.start].text = f"static constexpr {kind} {d.name} {text};"
        if missing:
            names = ", ".join(f"'{name}' (index {index})" for _, name, index in missing)
            example = ", ".join(f"{index}: …" for _, _, index in missing)
            what = f"function constant {names} is" if len(missing) == 1 else f"function constants {names} are"
            raise self.source.fail(missing[0][0], f"{what} used and not given; pass constants={{{example}}}")
        # As in Metal, values may come for indices that this file does not have; a name that it does not have is a mistake.
        if unknown := [k for k in values if isinstance(k, str) and k not in known]:
            raise CompileError(f"no function constant {unknown[0]!r}; there are: {', '.join(map(str, sorted(known, key=str))) or 'none'}")
        for i in range(len(tokens) - 3):
            if tokens[i].text == "is_function_constant_defined" and tokens[i + 2].text in defined:
                value_text = "true" if defined[tokens[i + 2].text] else "false"
                self.source.blank(i, i + 4)
                tokens[i].text = value_text

    def _drop_other_kernels(self, chosen: Declaration) -> None:
        tokens = self.source.tokens
        definitions = {d.start for overloads in self.definitions.values() for d in overloads}
        for d in self.declarations:
            if d.body < 0 and tokens[d.start].text == "kernel":  # a forward declaration
                self.source.blank(d.start, d.end)
        for instance in (i for instances in self.instances.values() for i in instances):
            if not instance.declaration.is_function:
                self.source.blank(instance.declaration.start, instance.declaration.end)
        for d in self.declarations:
            if d.start in definitions or d.start == chosen.start:
                head = d.body
                for i in range(d.start, head):
                    if tokens[i].text == "kernel" and tokens[i].kind == "name":
                        tokens[i].text = ""
                if d.start == chosen.start:
                    self._make_static(d)
                    continue
                is_unsupported = any(_UNSUPPORTED.fullmatch(t.text) for t in tokens[d.start : head] if t.kind == "name")
                if is_unsupported or (d.name == chosen.name and d.namespace == chosen.namespace):
                    self.source.blank(d.start, d.end)
                else:  # its type may be asked for: decltype(kernel<…>)
                    self.source.blank(d.body, d.end)
                    tokens[d.body].text = ";"

    def _make_static(self, d: Declaration) -> None:
        """Called from one place alone, the kernel is then inlined there: half of a short kernel's time is its call."""
        tokens, i = self.source.tokens, d.start
        if tokens[i].text == "template":
            i = self.source.angle_end(i + 1) + 1
        while any(a.start <= i < a.end for a in d.attributes) or tokens[i].text == "":
            i += 1
        if tokens[i].text not in ("static", "inline"):
            tokens[i].text = "static " + tokens[i].text

    def _attributes(self) -> None:
        tokens, i = self.source.tokens, 0
        while i + 1 < len(tokens):
            if tokens[i].text == "[" and tokens[i + 1].text == "[":
                end = self.source.matching(i) + 1
                self.source.blank(i, end)
                i = end
            else:
                i += 1

    def _member_specializations(self) -> None:
        """`template <> float f(float x)` inside a class, which g++ refuses: as an overload it is chosen for the same arguments. With
        template arguments of its own, or where some call gives them, it would not be, and stays."""
        tokens = self.source.tokens
        for d in self.declarations:
            if d.is_function or d.body < 0 or tokens[d.body].text != "{":
                continue
            for i in range(d.body, self.source.matching(d.body) - 3):
                if [t.text for t in tokens[i : i + 3]] != ["template", "<", ">"] or tokens[i - 1].text not in ("{", "}", ";", ":"):
                    continue
                member = self._declaration(i, d.end, ())
                called = any(t.text == member.name and n.text == "<" for t, n in itertools.pairwise(tokens))
                if member.is_function and not called:
                    self.source.blank(i, i + 3)

    # Overloads that differ in nothing but the address space become one function.

    def _members_and_duplicates(self) -> None:
        seen: dict[tuple[str, ...], tuple[int, str]] = {}
        for d in self.declarations:
            if d.body < 0 or self.source.tokens[d.body].text != "{":
                continue
            if d.is_function:
                self._drop_if_seen(seen, d, (*d.namespace, "::"))
            else:
                self._class_body(d)
                if self.source.tokens[d.start].text == "template":
                    self._drop_if_seen(seen, d, (*d.namespace, "::"))

    def _class_body(self, owner: Declaration) -> None:
        tokens, end = self.source.tokens, self.source.matching(owner.body)
        i, seen = owner.body + 1, dict[tuple[str, ...], tuple[int, str]]()
        while i < end:
            if tokens[i].text in ("public", "private", "protected") and tokens[i + 1].text == ":":
                i += 2
                continue
            if tokens[i].text in (";", ""):
                i += 1
                continue
            member = self._declaration(i, end, ())
            if member.is_function:
                self._trailing_qualifier(member, owner.name)
                self._drop_if_seen(seen, member, ())
            elif member.body >= 0 and member.name:
                self._class_body(member)
            elif [t.text for t in tokens[member.end - 3 : member.end]] == ["=", "default", ";"]:
                self._defaulted(seen, member)
            i = member.end

    def _defaulted(self, seen: dict[tuple[str, ...], tuple[int, str]], member: Declaration) -> None:
        """`S() thread = default;` once for each address space is one declaration."""
        tokens, close = self.source.tokens, member.end - 4
        while close > member.start and tokens[close].text != ")":
            if tokens[close].text in ("thread", "device", "threadgroup", "constant"):
                tokens[close].text = ""
            close -= 1
        key = ("= default", *(self._erased(i) for i in range(member.start, member.end) if self._erased(i)))
        if key in seen:
            self.source.blank(member.start, member.end)
        seen[key] = (member.start, "")

    def _trailing_qualifier(self, member: Declaration, owner: str) -> None:
        """`) constant {` is const of a member function, and nothing on a constructor."""
        tokens = self.source.tokens
        for i in range(member.start + 1, member.body):
            if tokens[i].text == "constant" and tokens[i - 1].text in (")", "const", "noexcept"):
                is_const = tokens[i - 1].text == "const" or tokens[i + 1].text == "const" or member.name == owner
                tokens[i].text = "" if is_const else "const"

    def _drop_if_seen(self, seen: dict[tuple[str, ...], tuple[int, str]], d: Declaration, scope: tuple[str, ...]) -> None:
        tokens = self.source.tokens
        words = [self._erased(i) for i in range(d.start, d.end)]
        header = d.body - d.start
        if d.is_function:  # a constructor's initializers are part of its body
            depth = 0
            for i, word in enumerate(words[:header]):
                depth += (word in "([") - (word in ")]") if word else 0
                if word == ":" and depth == 0 and i > 0:
                    header = i
                    break
        names = self._parameter_names(d, words[:header]) if d.is_function else {}
        words = [names.get(w, w) for w in words]
        key = scope + _const_first([w for w in words[:header] if w and w not in ("inline", "static")])
        body = " ".join(w for w in words[header:] if w)
        if key not in seen:
            seen[key] = (d.start, body)
            return
        first, other = seen[key]
        if other != body:
            if not d.is_function and d.name + "<" not in "".join(words[:header]):
                return
            raise self.source.fail(
                d.start,
                f"'{d.name}' differs from its overload at {self.source.place(first)} in the address space alone, and their bodies differ",
            )
        self.source.blank(d.start, d.end)
        if tokens[d.end - 1].text == "":
            tokens[d.end - 1].text = ";" if d.is_function or scope else ""

    def _parameter_names(self, d: Declaration, words: list[str]) -> dict[str, str]:
        """Parameter name -> its number, for functions that differ in these names too."""
        opening = next((i for i, w in enumerate(words) if w == "(" and i and words[i - 1] == d.name), None)
        if opening is None:
            return {}
        first, names = d.start + opening + 1, dict[str, str]()
        for number, (start, end) in enumerate(self.source.split(first, self.source.matching(first - 1))):
            named = [i for i in range(start, end) if self.source.tokens[i].kind == "name"]
            if len(named) > 1 and self.source.tokens[named[-1] - 1].text != "::":
                names[self.source.tokens[named[-1]].text] = f"${number}"
        return names

    def _erased(self, i: int) -> str:
        text = self.source.tokens[i].text
        if text == "constant":
            return self._constant_text(i)
        return "" if text in ("device", "thread", "threadgroup") else text

    # Address spaces.

    def _threadgroup_variables(self) -> None:
        tokens, count = self.source.tokens, 0
        for i, token in enumerate(tokens):
            if token.text != "threadgroup" or token.kind != "name":
                continue
            before = self._before_specifiers(i)
            # A declaration lowered just before ends in ';' too.
            at_start = before is None or tokens[before].text[-1] in ";{}"
            if not at_start:
                self._check_threadgroup_use(i)
                continue
            if self._declare_threadgroup(i, count):
                count += 1

    def _before_specifiers(self, i: int) -> int | None:
        """What stands before `const alignas(16) threadgroup`, its specifiers left out; but `f() const threadgroup {` is no declaration."""
        tokens, at = self.source.tokens, self._previous(i)
        while at is not None:
            if tokens[at].text in ("const", "static", "volatile"):
                at = self._previous(at)
            elif tokens[at].text == ")" and (word := self._previous(self.source.opening(at))) is not None:
                if tokens[word].text not in ("alignas", "__attribute__"):
                    break
                at = self._previous(word)
            else:
                break
        return at

    def _text_before(self, i: int, steps: int) -> str:
        at: int | None = i
        for _ in range(steps):
            at = self._previous(at) if at is not None else None
        return self.source.tokens[at].text if at is not None else ""

    def _previous(self, i: int) -> int | None:
        i -= 1
        while i >= 0 and self.source.tokens[i].text == "":
            i -= 1
        return i if i >= 0 else None

    def _check_threadgroup_use(self, i: int) -> None:
        """Elsewhere `threadgroup` qualifies what a pointer or reference points to, or a member function."""
        tokens, j = self.source.tokens, i + 1
        before, last = tokens[self._previous(i) or 0], tokens[i]
        if before.text in (")", "*", "&") or tokens[j].text in ("*", "&", "&&"):
            return
        if before.text == "const" and self._text_before(i, 2) == ")":
            return  # f() const threadgroup
        while tokens[j].kind == "name" or tokens[j].text in ("::", ""):
            last, j = tokens[j], j + 1
            if tokens[j].text == "<":
                j = self.source.angle_end(j) + 1
        is_parameter = (before.text in ("(", ",") and tokens[j].text in ("[", "(")) or (before.text == "<" and tokens[j].text == "(")
        if tokens[j].text in ("*", "&", "&&") or is_parameter or (before.text == "const" and last.text == "const"):
            return
        raise self.source.fail(i, "'threadgroup' in a position that the CPU device does not understand")

    def _declare_threadgroup(self, i: int, count: int) -> bool:
        """Lowers `threadgroup T a[n], b;` at index i; False where it declares a pointer or reference to such memory."""
        tokens = self.source.tokens
        end = i
        while tokens[end].text != ";":
            if tokens[end].text == "{" and self._opens_function(i, end):
                return False  # what a function returns
            end = self.source.matching(end) + 1 if tokens[end].text in OPEN else end + 1
        j = i + 1
        while tokens[j].text in ("const", "volatile", "") or tokens[j].text in ("__attribute__", "alignas"):
            j = self.source.matching(j + 1) + 1 if tokens[j].text in ("__attribute__", "alignas") else j + 1
        type_start = j
        while True:  # ns::name<…>::name, or several words such as `unsigned int`
            if tokens[j].text == "<":
                j = self.source.angle_end(j) + 1
            elif tokens[j].text in ("::", "typename") or (tokens[j].kind == "name" and tokens[j + 1].text not in ("[", ";", ",", "=", "{")):
                j += 1
            else:
                break
        if tokens[j].text in ("*", "&", "&&", "(", ">"):
            return False
        if tokens[j].kind != "name" or j == type_start:
            raise self.source.fail(i, "'threadgroup' in a declaration that the CPU device does not understand")
        kind = self._join((type_start, j))
        lines = []
        for first, last in self.source.split(j, end):
            name = tokens[first].text
            equals = next((j for j in range(first, last) if tokens[j].text in ("=", "{")), last)
            dimensions = self._join((first + 1, equals))
            alias = f"metalmm_tg_{i}_{first}"
            lines.append(
                f"typedef {kind} {alias} {dimensions}; {alias}& {name} = ::metalmm::msl::threadgroup_variable<{first}, {alias}>();"
            )
            if equals < last:  # every thread writes it where it comes by
                value = self._erased_text((equals, last))
                lines.append(f"{{ {alias} metalmm_value {value}; __builtin_memcpy(&{name}, &metalmm_value, sizeof({name})); }}")
        before = self._before_specifiers(i)
        self.source.blank(0 if before is None else before + 1, i)  # every place has 16 bytes' alignment
        self.source.blank(i, end + 1)
        tokens[i].text = " ".join(lines)
        return True

    def _address_spaces(self) -> None:
        for i in range(len(self.source.tokens)):
            self._erase_space(i)

    def _erase_space(self, i: int) -> None:
        token = self.source.tokens[i]
        if token.kind != "name":
            return
        if token.text in ("device", "thread", "threadgroup"):
            token.text = ""
        elif token.text == "coherent" and self.source.tokens[i + 1].text == "(":
            self.source.blank(i, self.source.matching(i + 1) + 1)
        elif token.text == "coherent" and self.source.tokens[i + 1].text in ("device", "volatile", "const"):
            token.text = ""
        elif token.text == "constant":
            token.text = self._constant_text(i)

    def _constant_text(self, i: int) -> str:
        """`const`, or nothing where the declaration says const or constexpr already."""
        tokens, j = self.source.tokens, i - 1
        while j >= 0 and (tokens[j].text in SPECIFIERS or tokens[j].text == ""):
            if tokens[j].text in ("const", "constexpr"):
                return ""
            j -= 1
        if j >= 1 and tokens[j].text == ">":
            try:
                j = self.source.opening(j) - 1
            except LoweringError:
                return "const"
        while j >= 2 and tokens[j - 1].text == "::":
            j -= 2
        if j >= 1 and tokens[j].kind == "name" and tokens[j].text not in ("return", "typename", "using", "typedef", "else"):
            # const T constant&: the qualifier may stand before the type
            j -= 1
            while j >= 0 and tokens[j].text == "":
                j -= 1
            if j >= 0 and tokens[j].text == "const":
                return ""
        j = i + 1
        while j < len(tokens) and (tokens[j].text in SPECIFIERS or tokens[j].text == ""):
            if tokens[j].text in ("const", "constexpr"):
                return ""
            j += 1
        while j + 1 < len(tokens) and tokens[j].kind == "name" and tokens[j + 1].text == "::":
            j += 2
        if j + 1 < len(tokens) and tokens[j].kind == "name":
            j += 1
            if tokens[j].text == "<":
                try:
                    j = self.source.angle_end(j) + 1
                except LoweringError:
                    return "const"
            if j < len(tokens) and tokens[j].text == "const":
                return ""
        return "const"

    # The rest.

    def _range_designators(self) -> None:
        """`T a[n] = {[0 ... n - 1] = x};`, which g++ does not know, becomes a loop after the declaration."""
        tokens = self.source.tokens
        for i in range(len(tokens) - 4):
            if not (tokens[i].text == "=" and tokens[i + 1].text == "{" and tokens[i + 2].text == "["):
                continue
            end, close = self.source.matching(i + 1), self.source.matching(i + 2)
            if not any(t.text == "..." for t in tokens[i + 3 : close]):
                continue
            array = i - 1
            while array > 0 and tokens[array].text in ("]", ""):
                array = (self.source.opening(array) if tokens[array].text else array) - 1
            whole = tokens[close + 1].text == "=" and tokens[i + 3].text == "0" and tokens[i + 4].text == "..."
            if (
                not whole
                or tokens[array].kind != "name"
                or any(t.text == "," for t in tokens[close + 2 : end])
                or tokens[end + 1].text != ";"
            ):
                raise self.source.fail(i, "an initializer with designators other than one range over a whole array")
            value = self._join((close + 2, end))
            self.source.blank(i, end + 1)
            tokens[end + 1].text = f"; for (auto& metalmm_element : {tokens[array].text}) metalmm_element = {value};"

    def _swizzles(self) -> None:
        """v.xy that is read becomes its vector at once (`->*metalmm_read`), so that `auto`, ?: and templates see a vector."""
        tokens = self.source.tokens
        for i in range(1, len(tokens) - 2):
            if tokens[i - 1].text not in (".", "->") or not _SWIZZLE.fullmatch(tokens[i].text):
                continue
            after, beyond = tokens[i + 1].text, tokens[i + 2].text
            if after == "." and _MEMBERS.fullmatch(beyond):
                tokens[i].text += ".metalmm_value()"  # v.rgba.xy
            elif (
                self._is_postfix(i + 1)
                or after in ("(", "[", ".", "->", "::")
                or after in ("=", "+=", "-=", "*=", "/=", "%=", "&=", "|=", "^=")
                or (after in ("<", ">") and beyond == after + "=" and not tokens[i + 2].space)
            ):
                continue
            else:
                tokens[i].text += "->*metalmm_read"

    def _is_postfix(self, i: int) -> bool:
        """Whether v.xy++ or v.xy-- stands here, and not v.xy + +x."""
        first, second, beyond = self.source.tokens[i : i + 3] if i + 2 < len(self.source.tokens) else [None] * 3
        return bool(first and second and beyond and first.text in "+-" and second.text == first.text and not second.space
                    and beyond.kind == "punct" and beyond.text not in "(+-~!*&")  # fmt: skip

    def _literals(self) -> None:
        """MSL has half literals and no double: 1.0h, and 0.1 is a float."""
        for token in self.source.tokens:
            if token.kind != "number":
                continue
            text = token.text.lower()
            is_hex, is_half = text.startswith("0x"), text.endswith("h") and (not text.startswith("0x") or "p" in text)
            is_float = "." in text or ("p" in text if is_hex else "e" in text)
            if text.endswith("bf") and not is_hex:
                token.text = f"bfloat({text[:-2]})"
            elif is_half:
                token.text = f"half({text[:-1]})"
            elif is_float and text[-1] not in "fl":
                token.text += "f"

    def _pragmas(self, compiler: str) -> None:
        full = "#pragma GCC unroll 32" if compiler == "gcc" else "#pragma clang loop unroll(full)"

        def replace(match: re.Match[str]) -> str:
            body = match[1].strip()
            if re.fullmatch(r"(?:clang\s+loop\s+unroll\s*\(\s*(?:full|enable)\s*\)|unroll)", body):
                return full
            if count := re.fullmatch(r"unroll\s*\(?\s*(\d+)\s*\)?|clang\s+loop\s+unroll_count\s*\(\s*(\d+)\s*\)", body):
                return f"#pragma {'GCC unroll' if compiler == 'gcc' else 'unroll'} {count[1] or count[2]}"
            return ""

        for token in self.source.tokens:
            if "#pragma" in token.space:
                token.space = PRAGMA.sub(replace, token.space)

    def _wanted_utilities(self) -> str:
        """C++'s own helpers, which stand in metal:: only for a program that asks for them there: another may have a global `move`."""
        tokens = self.source.tokens
        asked = any(
            a.text == "metal" and b.text == "::" and c.text in ("declval", "move", "forward", "swap", "decay")
            for a, b, c in zip(tokens, tokens[1:], tokens[2:], strict=False)
        )
        return "#define METALMM_UTILITIES 1\n" if asked else ""

    def _entry(self, function: str, specs: list[str], threads: str, holder: str) -> str:
        table = ", ".join(specs) or "{}"
        return (
            self._wanted_utilities()
            + '#include "msl.h"\n'
            + self.source.text()
            + '\n# 1 "<metalmm entry>"\n'
            + holder
            + f"static constexpr ::metalmm::abi::ArgSpec metalmm_args[] = {{{table}}};\n"
            'extern "C" __attribute__((visibility("default"))) const ::metalmm::abi::KernelInfo metalmm_kernel;\n'
            f"const ::metalmm::abi::KernelInfo metalmm_kernel = ::metalmm::msl::describe<{function}, metalmm_args>({threads});\n"
        )


def _const_first(words: list[str]) -> tuple[str, ...]:
    """`T const*` as `const T*`, for comparing signatures."""
    result: list[str] = []
    for word in words:
        if word == "const" and result and result[-1].isidentifier():
            result.insert(len(result) - 1, word)
        else:
            result.append(word)
    return tuple(result)


_INT_RANGES = {
    name: (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if signed else (0, 2**bits - 1)
    for names, bits, signed in (
        ("char int8_t", 8, True), ("uchar uint8_t", 8, False), ("short int16_t", 16, True), ("ushort uint16_t", 16, False),
        ("int int32_t", 32, True), ("uint uint32_t unsigned", 32, False), ("long int64_t", 64, True), ("ulong uint64_t size_t", 64, False),
    )
    for name in names.split()
}  # fmt: skip


def _literal(value: Any, kind: str, name: str) -> str:
    """The value of a function constant in C++; nothing of it may be lost in its type."""
    if isinstance(value, np.generic):
        value = value.item()
    if not isinstance(value, (bool, int, float)):
        raise CompileError(f"function constant '{name}' is {value!r}; it takes a bool, an int or a float")
    least, most = _INT_RANGES.get(kind, (0, 1))
    if kind == "bool" or kind in _INT_RANGES:
        if value != value or value in (float("inf"), float("-inf")) or value != int(value) or not least <= value <= most:
            raise CompileError(f"function constant '{name}' is {value!r}; its type {kind} holds whole numbers of {least} to {most}")
        value = bool(value) if kind == "bool" else int(value)
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return f"{value}{'u' if value >= 2**63 else ''}" if value > -(2**63) else f"({value + 1} - 1)"
    if value != value:
        return '__builtin_nanf("")'
    if value in (float("inf"), float("-inf")):
        return ("-" if value < 0 else "") + "__builtin_inff()"
    if abs(value) > {"half": 65504.0, "float": 3.4028235677973366e38}.get(kind, float("inf")):
        raise CompileError(f"function constant '{name}' is {value!r}; its type {kind} does not reach that far")
    return repr(float(value))


def _number(text: str) -> str:
    """A number of C++ as Python reads it: 01, 0x1u, 1'000."""
    digits = re.sub(r"[uUlL]+$", "", text.replace("'", ""))
    return f"0o{digits[1:]}" if re.fullmatch(r"0[0-7]+", digits) else digits


def lower(
    text: str,
    kernel: str,
    constants: Mapping[int | str, bool | int | float] | None = None,
    *,
    name: str = "<source>",
    compiler: str = "gcc",
) -> str:
    """C++ for the kernel `kernel` of the preprocessed MSL `text`.

    Raises LoweringError (with file, line and construct) where the text holds what the CPU device cannot take, and
    CompileError for an unknown kernel or function constant.
    """
    return Lowering(text, name).lower(kernel, constants, compiler)
