"""Edits of a program's tokens on its way to C++: what MSL writes otherwise than C++, whatever the target."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from ..errors import CompileError, LoweringError
from .program import SPECIFIERS, Declaration, Program
from .tokens import BEFORE_EXPRESSIONS, NUMBERS, PRAGMA, VECTORS, Token

_SWIZZLE = re.compile(r"[xyzw]{2,4}|[rgba]{2,4}")
_MEMBERS = re.compile(r"[xyzw]{1,4}|[rgba]{1,4}")

_INTEGERS = {*NUMBERS[:9], "unsigned", "size_t", *(f"{u}int{bits}_t" for u in ("", "u") for bits in (8, 16, 32, 64))}
_CONDITION = re.compile(r"(?!.*(?:<<|>>))(?:&&|\|\||[=!<>]=|[!<>()])*")  # between names and numbers: what it makes is true or false
_PICTURES = {"vertex", "fragment", "object", "mesh"}


class Passes:
    """The edits of one program. Tokens are edited in place, so a program serves for one kernel."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.source = program.source
        # Names that stand where they are declared and nowhere else; before anything is blanked.
        written, declared = Counter(t.text for t in self.source.tokens), Counter(d.name for d in program.declarations if d.name)
        self._uncalled = {name for name, count in declared.items() if written[name] == count}

    def erased_text(self, span: tuple[int, int] | None) -> str:
        """Tokens as they will stand in C++: without attributes and address spaces."""
        words, i = list[tuple[Token, str]](), span[0] if span else 0
        while span and i < span[1]:
            if self.source.tokens[i].text == "[" and self.source.tokens[i + 1].text == "[":
                i = self.source.matching(i) + 1
                continue
            words.append((self.source.tokens[i], self._erased(i)))
            i += 1
        return self.source.join(words)

    def function_constants(self, values: Mapping[int | str, bool | int | float], reachable: list[Declaration]) -> None:
        tokens, known = self.source.tokens, set()
        asked = {
            tokens[i + 2].text
            for i in range(len(tokens) - 2)
            if tokens[i].text == "is_function_constant_defined" and tokens[i + 1].text == "("
        }
        reached = {d.start for d in reachable}
        missing: list[tuple[int, str, int]] = []
        defined: dict[str, bool] = {}
        for d in self.program.declarations:
            span = next((a.names["function_constant"] for a in d.attributes if "function_constant" in a.names), None)
            if span is None or d.is_function:
                continue
            index = self.program.integer(span, d.namespace)
            known |= {index, d.name}
            if index in values and d.name in values:
                raise CompileError(f"constants: {index} and {d.name!r} are one function constant; give it once")
            value = values.get(index, values.get(d.name))
            defined[d.name] = value is not None
            if value is None and d.start in reached and d.name not in asked:
                missing.append((d.start, d.name, index))
            where = next((i for i in range(d.start, d.end) if tokens[i].text == d.name), -1)
            if where < 0:
                raise self.source.fail(d.start, "a function constant has no name")
            kind = " ".join(t.text for t in tokens[d.start : where] if t.text not in ("constant", "const", "constexpr", "static"))
            text = "{}" if value is None else f"= static_cast<{kind}>({_literal(value, kind, d.name)})"
            self.source.blank(d.start, d.end)
            tokens[d.start].text = f"static constexpr {kind} {d.name} {text};"
        # As in Metal, values may come for indices that this file does not have; a name that it does not have is a mistake.
        if unknown := [k for k in values if isinstance(k, str) and k not in known]:
            raise CompileError(f"no function constant {unknown[0]!r}; there are: {', '.join(map(str, sorted(known, key=str))) or 'none'}")
        if missing:
            names = ", ".join(f"'{name}' (index {index})" for _, name, index in missing)
            example = ", ".join(f"{index}: …" for _, _, index in missing)
            what = f"function constant {names} is" if len(missing) == 1 else f"function constants {names} are"
            raise self.source.fail(missing[0][0], f"{what} used and not given; pass constants={{{example}}}")
        for i in range(len(tokens) - 3):
            if tokens[i].text == "is_function_constant_defined" and tokens[i + 2].text in defined:
                value_text = "true" if defined[tokens[i + 2].text] else "false"
                self.source.blank(i, i + 4)
                tokens[i].text = value_text

    def drop_unsupported(self, reachable: Collection[Declaration], unsupported: re.Pattern[str]) -> None:
        """Of what the kernel does not use all that names something unsupported, or something that was dropped so."""
        used, count = {d.start for d in reachable}, 0
        for d in self.program.declarations:
            if d.is_function and d.start not in used and self._is_of_a_picture(d):
                self.source.blank(d.start, d.end)
        dropped = {name for name in {t.text for t in self.source.tokens if t.kind == "name"} if unsupported.fullmatch(name)}
        while count < len(dropped):
            count = len(dropped)
            for d in self.program.declarations:
                if d.start not in used and not dropped.isdisjoint(t.text for t in self.source.tokens[d.start : d.end] if t.kind == "name"):
                    self.source.blank(d.start, d.end)
                    dropped |= {d.name} - {""}

    def _is_of_a_picture(self, d: Declaration) -> bool:
        """Whether it is a vertex or a fragment function."""
        tokens, first = self.source.tokens, self.source.behind_templates(d.start)
        is_one = tokens[first].text in ("vertex", "fragment") and tokens[first + 1].kind == "name" and tokens[first + 1].text != "operator"
        return is_one or any(not _PICTURES.isdisjoint(a.names) for a in d.attributes)

    def drop_other_kernels(self, chosen: Declaration) -> None:
        tokens = self.source.tokens
        definitions = {d.start for overloads in self.program.definitions.values() for d in overloads}
        for d in self.program.declarations:
            if d.body < 0 and "kernel" in (t.text for t in tokens[d.start : d.end] if t.kind == "name"):  # a forward declaration
                self.source.blank(d.start, d.end)
        for instance in (i for instances in self.program.instances.values() for i in instances):
            if not instance.declaration.is_function:
                self.source.blank(instance.declaration.start, instance.declaration.end)
        for d in self.program.declarations:
            if d.start in definitions or d.start == chosen.start:
                for i in range(d.start, d.body):
                    if tokens[i].text == "kernel" and tokens[i].kind == "name":
                        tokens[i].text = ""
                if d.start == chosen.start:
                    self._make_static(d)
                    continue
                if d.name == chosen.name and d.namespace == chosen.namespace:
                    self.source.blank(d.start, d.end)
                else:  # its type may be asked for: decltype(kernel<…>)
                    self.source.blank(d.body, d.end)
                    tokens[d.body].text = ";"

    def _make_static(self, d: Declaration) -> None:
        """Called from one place alone, the kernel is then inlined there: half of a short kernel's time is its call. NVRTC does so only
        where it is told to, and without that does not know which memory a pointer is to."""
        tokens, i = self.source.tokens, d.start
        if tokens[i].text == "template":
            i = self.source.angle_end(i + 1) + 1
        while any(a.start <= i < a.end for a in d.attributes) or tokens[i].text == "":
            i += 1
        if tokens[i].text in ("static", "inline"):
            tokens[i].text = ""
        tokens[i].text = f"static METALMM_KERNEL_INLINE {tokens[i].text}"

    def attributes(self) -> None:
        """And __extension__, which NVRTC does not take before an anonymous union."""
        tokens, i = self.source.tokens, 0
        while i + 1 < len(tokens):
            if tokens[i].text == "[" and tokens[i + 1].text == "[":
                end = self.source.matching(i) + 1
                self.source.blank(i, end)
                i = end
            else:
                if tokens[i].text == "__extension__":
                    self.source.blank(i, i + 1)
                i += 1

    def constant_vectors(self, compiler: str) -> None:
        """`constexpr` vectors are `const` for a C++ compiler, to which they are unions; NVRTC has them in a class. Functions that return one are
        not constexpr to g++."""
        tokens = self.source.tokens
        for i, token in enumerate(tokens):
            if token.text != "constexpr":
                continue
            first, j = i, i + 1
            while tokens[first - 1].text in SPECIFIERS:
                first -= 1
            while tokens[j].text in (*SPECIFIERS, ""):
                j += 1
            # `auto` says its type behind the name: `auto name = float4(`
            kind = j + 3 if tokens[j].text == "auto" and tokens[j + 2].text == "=" else j
            name = (self.source.angle_end(kind + 1) if tokens[kind].text == "vec" and tokens[kind + 1].text == "<" else kind) + 1
            if tokens[kind].text not in (*VECTORS, "vec") or (tokens[name].kind != "name" and kind == j):
                continue
            name = name if kind == j else j + 1
            while tokens[name + 1].text == "::" and tokens[name + 2].kind == "name":
                name += 2
            specialized = tokens[name + 1].text == "<" and tokens[name].text != "operator"
            after = self.source.angle_end(name + 1) + 1 if specialized else name + 1
            if tokens[after].text != "(" or self.source.gives_value(after):
                words = {t.text for t in tokens[first:j]}
                if "static" not in words or not self._is_member(i):
                    token.text = "const"
                elif compiler != "nvrtc":
                    token.text = "" if "inline" in words else "inline"  # its `constant` becomes const
            elif compiler == "gcc" and tokens[self.source.matching(after) + 1].text in ("{", "const", ";"):
                token.text = ""

    def vector_widths(self) -> None:
        """`template <uint N> f(vec<T, N>)` gets `template <int M, uint N = M> f(vec<T, M>)`: for C++ only an int is found in a vector's type."""
        tokens, promised = self.source.tokens, set[tuple[str, ...]]()  # which were declared without a body, and have their defaults
        for i in range(len(tokens) - 1):
            if tokens[i].text != "template" or tokens[i + 1].text != "<":
                continue
            close, counts = self.source.angle_end(i + 1), dict[str, tuple[int, int]]()
            header = tuple(t.text for t in tokens[i:close])
            for first, last in self.source.split(i + 2, close):
                # What another parameter is made of has to stand before it.
                if last > first + 1 and tokens[last - 2].text in _INTEGERS - {"int"} and header.count(tokens[last - 1].text) == 1:
                    counts[tokens[last - 1].text] = first, last
            opening = close
            while counts and opening + 1 < len(tokens) and tokens[opening].text not in ("(", "{", ";"):
                opening += 1
            if not counts or tokens[opening].text != "(":
                continue
            key, behind = (tokens[opening - 1].text, *header), self.source.matching(opening)
            is_again = key in promised or tokens[opening - 2].text == "::"
            in_parameters = range(opening, behind)
            while behind + 1 < len(tokens) and tokens[behind].text not in ("{", ";"):
                behind += 1
            if tokens[behind].text == ";":
                promised.add(key)
            for j in in_parameters:
                if tokens[j].text != "vec" or tokens[j + 1].text != "<":
                    continue
                at = self.source.angle_end(j + 1) - 1
                name = tokens[at].text
                if name not in counts or tokens[at - 1].text != ",":
                    continue
                first, last = counts[name]
                tokens[at].text = f"metalmm_{name}"
                if tokens[first].text:  # the first vector of this width
                    given = "" if is_again else f" = metalmm_{name}"
                    tokens[close].before = f", {self.source.join((t, t.text) for t in tokens[first:last])}{given}" + tokens[close].before
                    self.source.blank(first, last)
                    tokens[last].before = f"int metalmm_{name}" + tokens[last].before

    def _is_member(self, i: int) -> bool:
        """Whether the token at i stands in a class, and in no function of it."""
        tokens, depth = self.source.tokens, 0
        while i > 0 and depth <= 0:
            i -= 1
            depth += (tokens[i].text == "{") - (tokens[i].text == "}")
        head = i
        while head > 0 and tokens[head - 1].text not in (";", "{", "}"):
            head -= 1
        is_class = not {"struct", "class", "union"}.isdisjoint(t.text for t in tokens[head:i])
        return depth > 0 and is_class and not self.program.opens_function(head, i)

    def members_and_duplicates(self) -> None:
        seen: dict[tuple[str, ...], tuple[int, str]] = {}
        for d in self.program.declarations:
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
            member = self.program.declaration(i, end, ())
            if member.is_function:
                self._trailing_qualifier(member, owner.name)
                self._drop_if_seen(seen, member, (), owner.name)
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

    def _drop_if_seen(self, seen: dict[tuple[str, ...], tuple[int, str]], d: Declaration, scope: tuple[str, ...], owner: str = "") -> None:
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
        if other != body and other == (of_a_copy := self._of_a_copy(words[:header], len(names), owner)):
            seen[key], d = (d.start, body), self.program.declaration(first, d.start, ())
        elif other != body and body != of_a_copy:
            if not d.is_function and d.name + "<" not in "".join(words[:header]):
                return
            if d.name not in self._uncalled:
                raise self.source.fail(
                    d.start,
                    f"'{d.name}' differs from its overload at {self.source.place(first)} in the address space alone, and their bodies differ",
                )
        self.source.blank(d.start, d.end)
        if tokens[d.end - 1].text == "":
            tokens[d.end - 1].text = ";" if d.is_function or scope else ""

    def _of_a_copy(self, header: list[str], parameters: int, owner: str) -> str:
        """The body of a member that asks the same of a copy of itself, which lies in no address space of theirs."""
        words, copy = [w for w in header if w], f"{owner} ( * this )"
        opening = words.index("(") if "(" in words else 0
        if "operator" in words and words.index("operator") < opening:
            sign = " ".join(words[words.index("operator") + 1 : opening])
            operand = words[words.index(")", opening) - 1]  # its name, or the bracket itself
            return f"{{ return {sign} {copy} ; }}" if operand == "(" else f"{{ return {copy} {sign} {operand} ; }}"
        return f"{{ return {copy} . {words[opening - 1]} ( {' , '.join(f'${i}' for i in range(parameters))} ) ; }}".replace("(  )", "( )")

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

    def address_spaces(self) -> None:
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
        """`const`, or nothing where the declaration says it already. A constexpr pointer says nothing of what it points to."""
        tokens, j = self.source.tokens, i - 1
        while j >= 0 and (tokens[j].text in SPECIFIERS or tokens[j].text == ""):
            if tokens[j].text == "const":
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
            if tokens[j].text == "const":
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

    def range_designators(self) -> None:
        """`T a[n] = {[0 ... n - 1] = x};`, which g++ does not know, becomes a loop after the declaration. Of tokens that are otherwise ready:
        x becomes a text."""
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
            pieces = self.source.split(close + 2, end)
            if not whole or tokens[array].kind != "name" or len(pieces) != 1 or tokens[end + 1].text != ";":
                raise self.source.fail(i, "an initializer with designators other than one range over a whole array")
            value, name = self.program.join(pieces[0]), tokens[array].text
            self.source.blank(i, end + 1)
            tokens[end + 1].text = (
                f"; {{ ::metal::decay_t<decltype({name}[0])> metalmm_once = {value}; "
                f"for (auto& metalmm_element : {name}) metalmm_element = metalmm_once; }}"
            )

    def constant_conditions(self) -> list[int]:
        """Where an `if` is that template arguments alone decide. Metal's compiler drops the other branch with its threadgroup memory. Whoever
        reads no tokens any more writes `if constexpr` there: a branch that is dropped is then compiled for no argument."""
        tokens, found = self.source.tokens, list[int]()
        for d in self.program.declarations:
            if tokens[d.start].text != "template":
                continue
            end = self.source.angle_end(d.start + 1)
            kinds = dict[str, str]()
            for first, last in self.source.split(d.start + 2, end):
                words = [t.text for t in tokens[first:last] if t.text]
                words = words[: words.index("=")] if "=" in words else words
                if len(words) > 1 and words[-2] in _INTEGERS:
                    kinds[words[-1]] = words[-2]
            if d.is_function and "auto" in (t.text for t in tokens[end : d.body]):
                continue  # what it returns would change
            for i in range(end, d.end - 1 if kinds else end):
                if tokens[i].text == "if" and tokens[i].kind == "name" and tokens[i + 1].text == "(":
                    words = [t.text for t in tokens[i + 2 : self.source.matching(i + 1)] if t.text]
                    names = [w for w in words if w[0].isalpha() or w[0] == "_"]
                    rest = "".join(w for w in words if w not in names and not w[0].isdigit())
                    is_bool = len(words) - len(names) > rest.count("(") + rest.count(")") or all(kinds.get(w) == "bool" for w in names)
                    called = any(w == "(" and before in names for before, w in itertools.pairwise(words))
                    known = all(w in kinds or w in ("true", "false") for w in names) and not called
                    if names and is_bool and known and _CONDITION.fullmatch(rest) and not self._is_entered_by_case(i):
                        found.append(i)
        return found

    def _is_entered_by_case(self, i: int) -> bool:
        """Whether a label of a switch around the statement at i may stand in it."""
        j = i
        while self.source.tokens[j].text not in (";", "{", "}"):
            j = self.source.matching(j) + 1 if self.source.tokens[j].text == "(" else j + 1
        end = self.source.matching(j) if self.source.tokens[j].text == "{" else j
        words = {t.text for t in self.source.tokens[i:end]}
        return not words.isdisjoint(("case", "default")) and "switch" not in words

    def swizzles(self) -> None:
        """v.xy that is read becomes its vector at once (`->*metalmm_read`), so that `auto`, ?: and templates see a vector."""
        tokens = self.source.tokens
        classes = {b.text for a, b in itertools.pairwise(tokens) if a.text in ("struct", "class", "union") and b.kind == "name"}
        declared, members = set[str](), set[str]()  # names; those that may be of a class, which has components of its own
        for a, b, c in zip(tokens, tokens[1:], tokens[2:], strict=False):
            if (
                _SWIZZLE.fullmatch(b.text)
                and c.text in (";", ",", "[", "=", ")", "(", "{")
                and (a.kind == "name" or a.text in (">", "&", "*", ","))
            ):
                declared.add(b.text)
                if a.text in classes:
                    members.add(b.text)
        for i in range(1, len(tokens) - 2):
            if tokens[i - 1].text not in (".", "->") or not _SWIZZLE.fullmatch(tokens[i].text):
                continue
            after, beyond = tokens[i + 1].text, tokens[i + 2].text
            if after == "." and _MEMBERS.fullmatch(beyond):
                places = ["xyzw".find(c) if c in "xyzw" else "rgba".find(c) for c in beyond]
                if tokens[i].text not in declared and max(places) < len(tokens[i].text) and self._is_written(i + 2):  # v.rgba.xy = …
                    tokens[i].text = "".join(tokens[i].text[place] for place in places)
                    self.source.blank(i + 1, i + 3)
                elif tokens[i].text not in members:
                    tokens[i].text += ".metalmm_value()"  # v.rgba.xy
            elif after not in ("(", "[", ".", "->", "::") and not self._is_written(i):
                tokens[i].text += "->*metalmm_read"

    def _is_written(self, i: int) -> bool:
        """Whether something is assigned to the member at `i`, or counted up or down: `v.xy = …`, `++v.xy`, `((v.xy)) += …`."""
        tokens, first = self.source.tokens, i - 2  # of what it is a member of
        while True:
            if tokens[first].text in (")", "]"):
                first = self.source.opening(first)
                if tokens[first].text == "(" and tokens[first - 1].kind != "name" and tokens[first - 1].text not in (")", "]", ">"):
                    break
                first -= 1
            elif tokens[first - 1].text in (".", "->", "::"):
                first -= 2
            else:
                break
        while i + 3 < len(tokens) and tokens[i + 1].text == ")" and self.source.opening(i + 1) == first - 1:
            if tokens[first - 2].kind == "name" and tokens[first - 2].text not in BEFORE_EXPRESSIONS:
                break  # a call's
            first, i = first - 1, i + 1
        if i + 2 >= len(tokens):
            return False
        after, beyond = tokens[i + 1], tokens[i + 2]
        sign, second = tokens[first - 2].text, tokens[first - 1]
        return (
            self._is_postfix(i + 1)
            or after.text in ("=", "+=", "-=", "*=", "/=", "%=", "&=", "|=", "^=")
            or (after.text in ("<", ">") and beyond.text == after.text + "=" and not beyond.space)
            or (sign in ("+", "-") and second.text == sign and not second.space)
        )

    def _is_postfix(self, i: int) -> bool:
        """Whether v.xy++ or v.xy-- stands here, and not v.xy + +x."""
        first, second, beyond = self.source.tokens[i : i + 3] if i + 2 < len(self.source.tokens) else [None] * 3
        return bool(first and second and beyond and first.text in "+-" and second.text == first.text and not second.space
                    and beyond.kind == "punct" and beyond.text not in "(+-~!*&")  # fmt: skip

    def literals(self) -> None:
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

    def pragmas(self, compiler: str) -> None:
        """In the compiler's words what a kernel says of unrolling. A CPU's compiler decides itself whether to unroll a loop: kernels take
        half as long to compile. They run as fast, but those of m = 8 with quantized weights, which take up to 1.25 of the time."""
        full = "#pragma unroll" if compiler == "nvrtc" else ""

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
