"""Edits of branches and loops, for a device whose lanes part there, or that ends a kernel there."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Collection, Iterator

from ..errors import LoweringError
from .program import Declaration, Program
from .tokens import BEFORE_EXPRESSIONS, NUMBERS, OPEN

# Of a simdgroup's lanes. Not every name that begins so: kernels call a lane's number simd_lane.
_AMONG_LANES = re.compile(
    r"(simd|quad)_(sum|product|max|min|and|or|xor|all|any|ballot|is_first|active_threads_mask|broadcast\w*|shuffle\w*|prefix\w*)$"
    r"|simdgroup_(barrier|multiply\w*|load|store)$"
)
_SEVERAL_WAYS = {"&&", "||", "?", "and", "or"}
_LEAVES = {"break", "continue", "return"}
_NUMBERS = {"int", "uint", "short", "ushort", "size_t"}
_ARITHMETIC = {*"+-*/%<>|^", "<=", ">=", "==", "!=", "<<", ">>"}
_ASSIGNS = {"=", "++", "--", *(f"{op}=" for op in ("+", "-", "*", "/", "%", "&", "|", "^", "<<", ">>"))}


class ControlFlow:
    """Of one program, whose tokens are edited in place."""

    def __init__(self, program: Program, constant: Collection[int] = ()) -> None:
        """constant: where an `if` is that its text alone decides, at which no lanes part."""
        self._constant = set(constant)
        self.program = program
        self.source = program.source
        self._handled = set[int]()  # loops that ask already whether they shall end
        self._before, self._behind = dict[int, str](), dict[int, str]()  # texts of `masks`, by token

    def may_skip(self, reachable: Collection[Declaration]) -> bool:
        """Whether lanes may skip a threadgroup's barrier, because it stands in a branch. Then barriers count simdgroups
        (METALMM_SKIPPED_BARRIERS)."""
        barrier, tokens = self._that_call(re.compile("threadgroup_barrier")), self.source.tokens
        return any(
            tokens[i].text in ("if", "switch") and not barrier.isdisjoint(self._called(i, end)) for i, end in self._statements(reachable)
        )

    def _called(self, i: int, end: int) -> set[str]:
        tokens = self.source.tokens
        return {
            t.text for t, behind in zip(tokens[i:end], tokens[i + 1 : end], strict=False) if t.kind == "name" and behind.text in ("(", "<")
        }

    def joins(self, reachable: Collection[Declaration], may_skip: bool) -> None:
        """Lanes that part at an atomic operation are together again behind the branch or loop that it stands in, as on Apple's GPUs. Not
        where a barrier stands in it, too: who waits there might wait for those who wait behind it. Where lanes may skip a barrier, they
        are together again behind each statement with one, too."""
        atomic, barrier = (self._that_call(re.compile(wanted)) for wanted in ("atomic_", "(threadgroup|simdgroup)_barrier"))
        for i, end in self._statements(reachable):
            names, token = self._called(i, end), self.source.tokens[i]
            if names & (atomic | barrier) if may_skip else names & atomic and not names & barrier:
                token.space = f" if (::metalmm::fiber::Join metalmm_join; false) {{}} else{token.space or ' '}"

    def masks(self, reachable: Collection[Declaration], may_skip: bool, stops: bool) -> bool:
        """Each lane keeps which others are with it, whatever the processor brings together (csrc/msl/runtime/cuda/lanes.h). A branch, a loop
        and a function that have an operation among lanes are told to. Barriers that lanes may skip are such operations, too.

        Returns whether that is done (METALMM_MASKS). False where nothing needs it. False, too, where it cannot be seen who comes to an
        operation: within an expression, beside a condition that declares something, in a class or a lambda.
        """
        tokens, among = self.source.tokens, self._that_call(_AMONG_LANES)
        if not among:
            return False
        if may_skip:
            among |= self._that_call(re.compile("threadgroup_barrier"))
        called = [j for j, t in enumerate(tokens) if t.kind == "name" and t.text in among and tokens[j + 1].text in ("(", "<")]
        bodies = [d for d in reachable if d.body >= 0 and any(d.body < j < d.end for j in called)]
        called = [j for j in called if any(d.body < j < d.end for d in bodies)]  # no function's own name
        if any(not d.is_function or self._has_lambda(d.body, d.end) for d in bodies) or self._has_hidden_calls(among):
            return False
        if any(not _SEVERAL_WAYS.isdisjoint(self._words_before(j)) for j in called):
            return False
        statements = [*self._statements(bodies)]
        loops, of_break = dict[tuple[int, int], bool](), dict[tuple[int, int], bool]()  # of each, of a switch, whether it is told to
        switches, told = [x for x in statements if tokens[x[0]].text == "switch"], dict[int, tuple[int, int, int, int]]()
        for i, end in statements:
            word, words = tokens[i].text, {t.text for t in tokens[i:end]}
            leaves = word in ("if", "switch") and "continue" in words and self._innermost(loops, i)
            leaves |= word == "if" and "break" in words and self._innermost(loops | of_break, i)
            needed = "return" in words or leaves or any(i < j < end for j in called)
            if word == "for" and not stops and words.isdisjoint(_LEAVES) and tokens[self._alike_until(i)].text == ";":
                needed = False
            if word in ("for", "while", "do"):
                loops[i, end] = needed
            elif word == "switch":
                of_break[i, end] = needed
            if needed:
                body = i + 1 if word == "do" else self.source.matching(i + 1) + 1
                condition = self._condition(i, body)
                if condition is None or self._is_entered(i, end, switches):
                    return False
                told[i] = end, body, *condition
        if not told:
            return False
        for i, (end, body, first, last) in told.items():
            self._tell(i, end, body, first, last, called, stops)
        for d in bodies:
            if not any("METALMM_KERNEL" in t.text for t in tokens[d.start : d.body]):
                self._behind[d.body] = " ::metalmm::fiber::Scope<false> metalmm_function;" + self._behind.get(d.body, "")
        for i, t in enumerate(tokens):
            if t.text == "continue" and self._innermost(loops, i):
                self._around(i, i + 2, " { metalmm_turn.stays = true; ", " }")
        self._handled = set(told)
        return True

    def _condition(self, i: int, body: int) -> tuple[int, int] | None:
        """What stands before and behind that of the statement at i. None where it declares something, or there is none, of a range."""
        tokens, opening = self.source.tokens, i + 1
        if tokens[i].text == "do":
            opening = next(j for j in range(self._statement_end(body), len(tokens)) if tokens[j].text == "(")
        first, last = opening, self.source.matching(opening)
        if tokens[i].text == "for":
            places = [*self.source.top_level(opening + 1, last, ";")]
            if len(places) != 2:
                return None
            first, last = places
        declares = self._declares(first + 1, last) or tokens[first + 1].kind == tokens[first + 2].kind == "name"
        return None if declares or ";" in (t.text for t in tokens[first + 1 : last]) else (first, last)

    @staticmethod
    def _innermost(loops: dict[tuple[int, int], bool], i: int) -> bool:
        """Whether the loop that token i is of is told to."""
        around = [(first, is_told) for (first, end), is_told in loops.items() if first < i < end]
        return max(around)[1] if around else False

    def _tell(self, i: int, end: int, body: int, first: int, last: int, called: list[int], stops: bool) -> None:
        tokens, word, around = self.source.tokens, self.source.tokens[i].text, self._around
        words, inner = {t.text for t in tokens[i:end]}, body + (tokens[body].text == "{")
        parts = str(not words.isdisjoint(_LEAVES)).lower()  # whether lanes may leave it for elsewhere
        if word == "if":
            at_once = tokens[inner].text in _LEAVES and not any(body < j < end for j in called)
            if at_once and end == self._statement_end(inner) + inner - body:
                return around(first + 1, last, "::metalmm::fiber::leaves(static_cast<bool>(", "))")
            around(first + 1, last, f"::metalmm::fiber::Branch<{parts}> metalmm_branch{{static_cast<bool>(", ")}; metalmm_branch.is")
            ends, stays = self._statement_end(body), "{ metalmm_branch.stays = true; }"
            around(body, ends, " { ", stays[1:] + f" else {stays}" * (ends == end))
            return around(ends + 1, end, " { ", stays[1:]) if ends < end else None
        returns = str("return" in words or (word == "switch" and "continue" in words)).lower()
        around(i, end, f" {{ ::metalmm::fiber::Scope<{returns}> metalmm_all; ", " metalmm_all.stays = true; }")
        if word == "switch":
            return around(
                first + 1, last, "::metalmm::fiber::chosen((", f"), [&](auto metalmm_x) {{ return {self._place_of_case(i, end)}; }})"
            )
        goes, begins = "::metalmm::msl::goes_on() && (" if stops else "(", ""
        if word == "for" and tokens[until := self._alike_until(i)].text == "&&":  # in the head is what a compiler unrolls by
            begins = f"if (!::metalmm::fiber::goes({goes}{self.program.join((until + 1, last))}))) break; "
            self.source.blank(until, last)
        elif last > first + 1:
            around(first + 1, last, f"::metalmm::fiber::goes({goes}", "))")
        elif stops:
            self._before[last] = self._before.get(last, "") + "::metalmm::fiber::goes(::metalmm::msl::goes_on())"
        return around(
            body,
            self._statement_end(body),
            f" {{ {begins}::metalmm::fiber::Scope<{parts}> metalmm_turn; ",
            " metalmm_turn.stays = true; }",
        )

    def _place_of_case(self, i: int, end: int) -> str:
        """Of a switch: where metalmm_x leads, as a number. Labels at one place are one; what no label says is at the default's, or behind."""
        tokens, places, j = self.source.tokens, list[list[str]](), self.source.matching(i + 1) + 2
        while j < end - 1:
            if tokens[j].text == "switch":  # has labels of its own
                j = self._statement_end(j)
                continue
            if tokens[j].text in ("case", "default"):
                colon = next(iter(self.source.top_level(j, end, ":")))
                if not places or tokens[j - 1].text != ":":
                    places.append([])
                places[-1].append(self.program.join((j + 1, colon)) if tokens[j].text == "case" else "")
                j = colon
            j += 1
        numbered = [(n, label) for n, labels in enumerate(places) if "" not in labels for label in labels]
        return "".join(f"metalmm_x == ({label}) ? {n} : " for n, label in numbered) + "-1"

    def _has_hidden_calls(self, among: set[str]) -> bool:
        """Whether something with an operation is called without its name, as an operator, or by another, given to a template."""
        tokens = self.source.tokens
        return "operator" in among or any(
            t.kind == "name" and t.text in among and tokens[j + 1].text not in ("(", "<") and tokens[j - 1].text not in (".", "->")
            for j, t in enumerate(tokens[:-1])
        )

    def _around(self, first: int, end: int, head: str, tail: str) -> None:
        """Of tokens first to end. What is around others comes first."""
        self._before[first] = self._before.get(first, "") + head
        self._behind[end - 1] = tail + self._behind.get(end - 1, "")

    def place_masks(self) -> None:
        """Once nobody reads the tokens any more."""
        for i, text in self._before.items():
            before, pragma, behind = (self.source.tokens[i].space or " ").partition("#pragma")  # which stands right before its loop
            self.source.tokens[i].space = f"{before}{text}\n{pragma}{behind}" if pragma else before + text
        for i, text in self._behind.items():
            self.source.tokens[i].text += text

    def _alike_until(self, i: int) -> int:
        """Lanes go round the `for` at i as often, as its head shows: from a constant to a constant, by one. Returns the `;` behind that, or
        an `&&` with what else they ask. i where it shows no such thing."""
        tokens, close = self.source.tokens, self.source.matching(i + 1)
        places = [j for j in range(i + 2, close) if tokens[j].text]
        head = re.fullmatch(
            r"(\w+) (\w+) = (\w+) ; \2 < (\w+) (?:&& (?:(?!or )[^;|?,=])+)?; (?:\+ ?\+ \2|\2 \+ ?\+)",
            " ".join(tokens[j].text for j in places),
        )
        if not head or head[1] not in _NUMBERS:
            return i
        second = max(j for j in places if tokens[j].text == ";")
        is_set = any(
            tokens[j].text == head[2] and not self._is_read(j)
            for j in (*range(places[8], second), *range(close, self._statement_end(close + 1)))
        )
        is_alike = not is_set and all(x[0].isdigit() or self._constants.get(x, False) for x in (head[3], head[4]))
        return places[8] if is_alike else i

    @functools.cached_property
    def _constants(self) -> dict[str, bool]:
        """Of each name that is given something whether that is always a constant."""
        tokens, found = self.source.tokens, dict[str, bool]()
        headers = [(j, self.source.angle_end(j + 1)) for j, t in enumerate(tokens) if t.text == "template" and tokens[j + 1].text == "<"]
        for j, t in enumerate(tokens[:-1]):
            is_new = tokens[j - 1].kind == "name" and tokens[j - 1].text not in ("return", "case", "else")
            is_new |= (tokens[j - 1].text, tokens[j + 1].text) == (",", "{")
            if t.kind == "name" and (is_new or tokens[j + 1].text in _ASSIGNS):
                known = "constexpr" in (x.text for x in tokens[max(j - 5, 0) : j]) or any(first < j < last for first, last in headers)
                found[t.text] = found.get(t.text, True) and known
        return found

    @functools.cached_property
    def _own(self) -> set[str]:
        return {d.name for d in self.program.declarations}

    def _is_read(self, j: int) -> bool:
        """Whether the number at token j is only read, for sure: an operand of arithmetic, an index, or what is converted."""
        tokens = self.source.tokens
        before, after = tokens[j - 1].text, tokens[j + 1].text
        steps = any(tokens[x].text == tokens[x + 1].text in ("+", "-") for x in (j - 2, j + 1))  # + +
        if steps or after in _ASSIGNS or before in ("&", "++", "--"):
            return False
        is_converted = (
            before == "(" and after == ")" and tokens[j - 2].text in _NUMBERS | {*NUMBERS} and tokens[j - 3].text not in ("&", "*")
        )
        callee = self._callee(j) if before in ("(", ",") and after in (",", ")") else ""
        is_given = callee not in self._own and (callee in ("min", "max") or bool(_AMONG_LANES.match(callee)))
        return before in _ARITHMETIC or after in _ARITHMETIC or (before == "[" and after == "]") or is_converted or is_given

    def _callee(self, j: int) -> str:
        """Of the call that token j is an argument of, itself."""
        i = next((i for i in range(j, 0, -1) if self.source.tokens[i].text == "(" and self.source.matching(i) > j), 0)
        return self.source.tokens[i - 1].text

    def _is_entered(self, i: int, end: int, switches: list[tuple[int, int]]) -> bool:
        """Whether a label in the statement is of a switch around it."""
        labels = [j for j in range(i, end) if self.source.tokens[j].text in ("case", "default")]
        return any(not any(i <= first < j < after for first, after in switches) for j in labels)

    def _has_lambda(self, i: int, end: int) -> bool:
        t = self.source.tokens
        starts = (j for j in range(i, end) if t[j].text == "[" and t[j - 1].text not in (")", "]", "[", ">"))
        return any(
            t[self.source.matching(j) + 1].text in ("(", "{") for j in starts if t[j - 1].kind != "name" or t[j - 1].text == "return"
        )

    def _words_before(self, j: int) -> set[str]:
        """In the same expression, in which braces may stand."""
        tokens, words = self.source.tokens, set[str]()
        while tokens[j].text != ";":
            opening = self.source.opening(j) if tokens[j].text == "}" else j
            if tokens[opening].text == "{" and (tokens[opening - 1].kind != "name" or tokens[opening - 1].text in ("else", "do")):
                break  # of a statement
            words.update(t.text for t in tokens[opening : j + 1])
            j = opening - 1
        return words

    def turns(self, reachable: Collection[Declaration]) -> None:
        """Loops in which a lane may pass by an operation of its simdgroup count their turns, so that those of one turn alone meet at it. A
        function that calls one may pass by it, too. Where one stands in a class or a lambda, whose calls have no name, all loops count."""
        operation = re.compile("simd_|quad_|simdgroup_")
        tokens, wanted = self.source.tokens, self._that_call(operation)
        if not wanted:
            return
        classes = [d for d in self.program.declarations if d.body >= 0 and not d.is_function]
        hidden = any(
            t.text in wanted and tokens[j + 1].text in ("(", "<") for d in classes for j, t in enumerate(tokens[d.body : d.end], d.body)
        )
        hidden |= self._has_lambda(0, len(tokens))
        statements = [*self._statements(reachable)]
        switches = [x for x in statements if tokens[x[0]].text == "switch"]
        for i, last in statements:
            if tokens[i].text in ("if", "switch"):
                continue
            body = i + 1 if tokens[i].text == "do" else self.source.matching(i + 1) + 1
            end = self._statement_end(body)
            called = [j for j in range(i, last) if tokens[j].text in wanted and tokens[j + 1].text in ("(", "<")]
            inner = [(first, after) for first, after in statements if body <= first < end]
            may_pass = any(first < j < after for j in called for first, after in inner)
            may_pass |= any(not operation.match(tokens[j].text) for j in called)
            may_pass |= any(t.text in ("continue", *_SEVERAL_WAYS) for t in tokens[i:last])
            if (hidden or (called and may_pass)) and not self._is_entered(i, end, switches) and self._count_turns(i, end):
                tokens[i].space = f" if (::metalmm::fiber::Turns metalmm_turns; false) {{}} else{tokens[i].space or ' '}"
        self._number_calls(reachable, wanted)

    def _number_calls(self, reachable: Collection[Declaration], among: set[str]) -> None:
        """Lanes in two calls of one function do not meet at its operations. And of two operations that lanes wait at, one of them in a
        function, the place of its call says which comes first."""
        tokens, calls = self.source.tokens, dict[str, list[tuple[int, int]]]()
        own = {d.name for d in self.program.declarations if d.is_function and d.body >= 0} & among
        for d in reachable:
            for j in range(d.body + 1, d.end if d.is_function and d.body >= 0 else 0):
                first = j
                while tokens[first - 1].text == "::":
                    first -= 2 if tokens[first - 2].kind == "name" and tokens[first - 2].text not in BEFORE_EXPRESSIONS else 1
                if (
                    tokens[j].text in own
                    and tokens[first - 1].text not in (".", "->", ">")
                    and (tokens[first - 1].kind != "name" or tokens[first - 1].text in BEFORE_EXPRESSIONS)
                ):
                    after = j + 1
                    if tokens[after].text == "<":
                        with contextlib.suppress(LoweringError):  # a variable of that name, which is less than something
                            after = self.source.angle_end(after) + 1
                    if tokens[after].text == "(":
                        calls.setdefault(tokens[j].text, []).append((first, self.source.matching(after)))
        for places in calls.values():
            for number, (first, last) in enumerate(places, 1):
                # Not before a comma: g++ may put both of two operands' numbers before their calls.
                head = f"[&]() -> decltype(auto) {{ ::metalmm::fiber::Turns metalmm_number({number}); return "
                tokens[first].text, tokens[last].text = head + tokens[first].text, tokens[last].text + "; }()"

    def _count_turns(self, i: int, end: int) -> bool:
        """Of the loop at `i`. False where nothing can be added: its condition declares something, or it goes over a range."""
        tokens = self.source.tokens
        opening = i + 1 if tokens[i].text != "do" else next(j for j in range(end, len(tokens)) if tokens[j].text == "(")
        close = self.source.matching(opening)
        if tokens[i].text == "for":
            places = [*self.source.top_level(opening + 1, close, ";")]
            if len(places) != 2:
                return False
            tokens[places[1]].text += " metalmm_turns.next()" + (", " if any(t.text for t in tokens[places[1] + 1 : close]) else "")
            return True
        if self._declares(opening + 1, close) or tokens[opening + 1].kind == tokens[opening + 2].kind == "name":
            return False
        tokens[opening].text = "(metalmm_turns.next() && " + tokens[opening].text
        tokens[close].text += ")"
        return True

    def _statements(self, reachable: Collection[Declaration]) -> Iterator[tuple[int, int]]:
        """Branches and loops at which lanes may part: where one begins, and ends."""
        tokens = self.source.tokens
        ends = {self._statement_end(i + 1) for i, token in enumerate(tokens) if token.kind == "name" and token.text == "do"}
        ends = {next(j for j in range(i, len(tokens)) if tokens[j].text) for i in ends}  # of a do: its while
        for i, token in enumerate(tokens):
            if token.kind != "name" or token.text not in ("if", "for", "while", "do", "switch") or i in ends or i in self._constant:
                continue
            function = next((d for d in reachable if d.start <= i < d.end), None)
            if function and "constexpr" not in (tokens[i + 1].text, *(t.text for t in tokens[function.start : function.body])):
                yield i, self._statement_end(i)

    def _that_call(self, wanted: re.Pattern[str]) -> set[str]:
        """Names in the text that begin so, and those of functions that use one of them."""
        found = {t.text for t in self.source.tokens if t.kind == "name" and wanted.match(t.text)}
        count = -1
        while count < len(found):
            count = len(found)
            for d in self.program.declarations:
                if d.is_function and d.body >= 0 and not found.isdisjoint(t.text for t in self.source.tokens[d.body : d.end]):
                    found.add(d.name)
        return found

    def _statement_end(self, i: int) -> int:
        """Past the statement that begins at i."""
        tokens = self.source.tokens
        while tokens[i].text == "":
            i += 1
        word = tokens[i].text
        if word in ("if", "for", "while", "switch"):
            opening = next(j for j in range(i + 1, len(tokens)) if tokens[j].text == "(")
            end = self._statement_end(self.source.matching(opening) + 1)
            return self._statement_end(end + 1) if word == "if" and tokens[end].text == "else" else end
        if word == "do":
            i = self._statement_end(i + 1)
        elif word == "{":
            return self.source.matching(i) + 1
        while tokens[i].text != ";":
            i = self.source.matching(i) + 1 if tokens[i].text in OPEN else i + 1
        return i + 1

    def stops(self) -> None:
        """Every loop asks at each turn whether it shall end."""
        tokens = self.source.tokens
        for i, token in enumerate(tokens):
            if token.kind != "name" or token.text not in ("for", "while") or tokens[i + 1].text != "(" or i in self._handled:
                continue
            close = self.source.matching(i + 1)
            ends = [i + 1, *self.source.top_level(i + 2, close, ";"), close]
            if token.text == "while":
                if self._declares(i + 2, close):
                    self._stop_declared(i + 1, close, "for (; ::metalmm::msl::goes_on();")
                    continue
                tokens[i + 1].text = "(::metalmm::msl::goes_on() && ("
                tokens[close].text = "))"
                continue
            if len(ends) == 4:  # the condition may be empty, or a declaration is none: not of a range
                first, second = ends[1:3]
                if self._declares(first + 1, second):
                    self._stop_declared(first, second, "")
                    continue
                condition = second > first + 1
                tokens[first].text = "; ::metalmm::msl::goes_on()" + (" && (" if condition else "")
                tokens[second].text = (")" if condition else "") + ";"

    def _declares(self, i: int, end: int) -> bool:
        """Whether a condition declares what it asks: `T x = f()`."""
        tokens = self.source.tokens
        equals = next(iter(self.source.top_level(i, end, "=")), None)
        return (
            equals is not None
            and equals - i >= 2
            and tokens[i].kind == tokens[equals - 1].kind == "name"
            and (tokens[equals - 2].kind == "name" or tokens[equals - 2].text in ("*", "&", ">"))
            and tokens[equals + 1].text != "="
        )

    def _stop_declared(self, first: int, last: int, head: str) -> None:
        """`while (T x = f()) {…}` and `for (…; T x = f(); …) {…}`, whose condition takes no `&&`: the declaration moves into an `if`."""
        tokens = self.source.tokens
        close = last if head else next(j for j in range(last, len(tokens)) if tokens[j].text == ")" and self.source.opening(j) < first)
        if tokens[close + 1].text != "{":
            raise self.source.fail(first, "a loop over a declaration whose body has no braces, under a timeout")
        declaration = self.program.join((first + 1, last))
        self.source.blank(first + 1, last)
        if head:
            tokens[first - 1].text, tokens[first].text = "", head
        else:
            tokens[first].text = "; ::metalmm::msl::goes_on()"
        tokens[close].text += f" if ({declaration})"
        tokens[self.source.matching(close + 1)].text += " else break;"
