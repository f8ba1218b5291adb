"""Turns one kernel of a preprocessed MSL file into C++ for the CPU device.

MSL is C++ with address spaces, attributes and threadgroup variables; everything else is supplied by csrc/msl/runtime.
This module edits tokens, keeps every line where it was (so that a compiler's message points into the .metal file) and
refuses what it does not understand: a missed ``threadgroup`` would silently become a variable of each thread.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping

from .errors import CompileError, LoweringError
from .msl_program import SPECIFIERS, Declaration, Program
from .msl_source import OPEN, PRAGMA

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
_SWIZZLE = re.compile(r"[xyzw]{2,4}|[rgba]{2,4}")
_MEMBERS = re.compile(r"[xyzw]{1,4}|[rgba]{1,4}")


class Lowering(Program):
    """A program on its way to C++. Its tokens are edited in place, so it serves for one kernel."""

    def lower(self, kernel: str, constants: Mapping[int | str, bool | int | float] | None = None, compiler: str = "gcc") -> str:
        """C++ for one kernel."""
        if kernel not in self.instantiations:
            raise CompileError(f"no kernel '{kernel}'; there are: {', '.join(self.kernel_names()[:20]) or 'none'}")
        instance, name, arguments = self.instantiations[kernel]
        definition = self.definitions.get(name)
        if definition is None:
            raise self.source.fail(instance.start, f"kernel template '{name}' is not defined in this file")
        reachable = self._reachable(definition, instance)
        self._refuse_unsupported(reachable)
        specs = self._argument_specs(definition)
        limit = self._thread_limit(definition, instance)
        self._function_constants(constants or {}, reachable)
        template = self._template_header(definition)
        for i in range(*arguments):
            self._erase_space(i)
        argument_text = " ".join(self._join(arguments).split())
        self._drop_other_kernels(definition)
        self._attributes()
        self._members_and_duplicates()
        self._threadgroup_variables()
        self._address_spaces()
        self._range_designators()
        self._swizzles()
        self._literals()
        self._pragmas(compiler)
        # From the global namespace: a kernel may have the name of something in metal.
        qualified = "::" + "::".join((*definition.namespace, name)) + (f"<{argument_text}>" if instance is not definition else "")
        return self._entry(qualified, specs, limit, template, argument_text, instance is not definition)

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
        tokens = self.source.tokens
        brace = kernel.body
        close = brace - 1
        while tokens[close].text != ")" or any(a.start <= close < a.end for a in kernel.attributes):
            close -= 1
        opening = self.source.opening(close)
        parameters = self.source.split(opening + 1, close)
        found = [self._parameter(first, last) for first, last in parameters if not (last - first == 1 and tokens[first].text == "void")]
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

    def _parameter(self, first: int, last: int) -> tuple[str, int | None, str]:
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
                return name, self._integer(argument), enabled
            if (position := _ALIASES.get(name, name)) in _POSITIONS:
                return position, None, enabled
            if name not in ("maybe_unused", "unused"):
                raise self.source.fail(first, f"the attribute [[{name}]] of a kernel argument is not supported on the CPU device")
        if not is_pointer:
            words = " ".join(t.text for t in tokens[first:last])
            raise self.source.fail(first, f"the kernel argument '{words}' has no attribute and is neither pointer nor reference")
        return ("threadgroup" if is_threadgroup else "buffer"), None, enabled

    def _join(self, span: tuple[int, int]) -> str:
        return " ".join(t.text for t in self.source.tokens[slice(*span)])

    def _integer(self, span: tuple[int, int]) -> int:
        text = re.sub(r"(?<=\d)[uUlL]+\b", "", " ".join(self._constant(i) for i in range(*span)))
        try:
            tree = ast.parse(text, mode="eval")
            allowed = (ast.Expression, ast.BinOp, ast.UnaryOp, ast.Constant, ast.operator, ast.unaryop)
            if all(isinstance(node, allowed) for node in ast.walk(tree)):
                return int(eval(compile(tree, "<attribute>", "eval"), {"__builtins__": {}}))  # arithmetic on literals only
        except (SyntaxError, ValueError, TypeError):
            pass
        raise self.source.fail(span[0], f"'{text}' is not an integer constant expression")

    def _constant(self, i: int) -> str:
        """The token at i, or the value of the constant or enumerator of that name, if the file gives it as a number."""
        tokens = self.source.tokens
        if tokens[i].kind != "name":
            return tokens[i].text
        for j in range(len(tokens) - 3):
            if (
                tokens[j].text == tokens[i].text
                and tokens[j + 1].text == "="
                and tokens[j + 2].kind == "number"
                and tokens[j + 3].text in ",;}"
            ):
                return tokens[j + 2].text
        return tokens[i].text

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
        defined: dict[str, bool] = {}
        for d in self.declarations:
            span = next((a.names["function_constant"] for a in d.attributes if "function_constant" in a.names), None)
            if span is None or d.is_function:
                continue
            index = self._integer(span)
            known |= {index, d.name}
            value = values.get(index, values.get(d.name))
            defined[d.name] = value is not None
            if value is None and d.start in reached and d.name not in asked:
                raise self.source.fail(
                    d.start, f"function constant '{d.name}' (index {index}) is used and not given; pass constants={{{index}: …}}"
                )
            where = next(i for i in range(d.start, d.end) if tokens[i].text == d.name)
            kind = " ".join(t.text for t in tokens[d.start : where] if t.text not in ("constant", "const", "constexpr", "static"))
            text = "{}" if value is None else f"= static_cast<{kind}>({_literal(value)})"
            self.source.blank(d.start, d.end)
            tokens[d.start].text = f"static constexpr {kind} {d.name} {text};"
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
        definitions = {d.start for d in self.definitions.values()}
        for d in self.declarations:
            if d.body < 0 and tokens[d.start].text == "kernel":  # a forward declaration
                self.source.blank(d.start, d.end)
        for d, _, _ in self.instantiations.values():
            if not d.is_function:
                self.source.blank(d.start, d.end)
        for d in self.declarations:
            if d.start in definitions or d.start == chosen.start:
                head = d.body
                for i in range(d.start, head):
                    if tokens[i].text == "kernel" and tokens[i].kind == "name":
                        tokens[i].text = ""
                if d.start == chosen.start:
                    self._make_static(d)
                    continue
                if any(_UNSUPPORTED.fullmatch(t.text) for t in tokens[d.start : head] if t.kind == "name"):
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
            i = member.end

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
            before = self._previous(i)
            # A declaration lowered just before ends in ';' too.
            at_start = before is None or tokens[before].text[-1] in ";{}" or self._opens_declaration(before)
            if not at_start:
                self._check_threadgroup_use(i)
                continue
            if self._declare_threadgroup(i, count):
                count += 1

    def _opens_declaration(self, i: int) -> bool:
        """Whether the specifier at i begins a declaration: `const threadgroup T x`, but not `f() const threadgroup {`."""
        tokens = self.source.tokens
        if tokens[i].text not in ("const", "static", "volatile"):
            return False
        before = self._previous(i)
        return before is None or tokens[before].text[-1] in ";{}" or self._opens_declaration(before)

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
            if tokens[end].text == "{":
                if self._opens_function(i, end):
                    return False  # what a function returns
                raise self.source.fail(i, "a threadgroup variable takes no initializer")
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
        kind = " ".join(t.text for t in tokens[type_start:j] if t.text)
        lines = []
        for first, last in self.source.split(j, end):
            if any(t.text == "=" for t in tokens[first:last]):
                raise self.source.fail(i, f"the threadgroup variable '{tokens[first].text}' takes no initializer")
            name = tokens[first].text
            dimensions = " ".join(t.text for t in tokens[first + 1 : last] if t.text)
            alias = f"metalmm_tg_{i}_{first}"
            lines.append(
                f"typedef {kind} {alias} {dimensions}; {alias}& {name} = ::metalmm::msl::threadgroup_variable<{first}, {alias}>();"
            )
        before = self._previous(i)
        if before is not None and tokens[before].text in ("const", "static", "volatile"):
            tokens[before].text = ""
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
        elif token.text == "constant":
            token.text = self._constant_text(i)

    def _constant_text(self, i: int) -> str:
        """`const`, or nothing where the declaration says const or constexpr already."""
        tokens, j = self.source.tokens, i - 1
        while j >= 0 and (tokens[j].text in SPECIFIERS or tokens[j].text == ""):
            if tokens[j].text in ("const", "constexpr"):
                return ""
            j -= 1
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
                after in ("(", "[", ".", "->", "::")
                or after in ("=", "+=", "-=", "*=", "/=", "%=", "&=", "|=", "^=")
                or (after in ("<", ">") and beyond == after + "=" and not tokens[i + 2].space)
            ):
                continue
            else:
                tokens[i].text += "->*metalmm_read"

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

    def _entry(self, function: str, specs: list[str], limit: str, template: str, arguments: str, is_template: bool) -> str:
        table = ", ".join(specs) or "{}"
        threads = f"static_cast<::metalmm::abi::u32>({limit})"
        holder = ""
        if is_template and limit != "0":
            holder = f"{template} struct metalmm_thread_limit {{ static constexpr ::metalmm::abi::u32 value = ({limit}); }};\n"
            threads = f"metalmm_thread_limit<{arguments}>::value"
        text = self.source.text()
        return (
            '#include "msl.h"\n'
            + text
            + '\n# 1 "<metalmm entry>"\n'
            + holder
            + f"static constexpr ::metalmm::abi::ArgSpec metalmm_args[] = {{{table}}};\n"
            'extern "C" __attribute__((visibility("default"))) const ::metalmm::abi::KernelInfo metalmm_kernel;\n'
            f"const ::metalmm::abi::KernelInfo metalmm_kernel = ::metalmm::msl::describe<&{function}, metalmm_args>({threads});\n"
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


def _literal(value: bool | int | float) -> str:
    if not isinstance(value, (bool, int, float)) and not hasattr(value, "__index__") and not hasattr(value, "__float__"):
        raise CompileError(f"a function constant is {value!r}; it takes a bool, an int or a float")
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if value != value:
        return '__builtin_nanf("")'
    if value in (float("inf"), float("-inf")):
        return ("-" if value < 0 else "") + "__builtin_inff()"
    return repr(float(value))


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
