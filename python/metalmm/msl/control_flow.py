"""Edits of branches and loops, for a device whose lanes part there, or that ends a kernel there."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator

from .program import Declaration, Program
from .tokens import OPEN


class ControlFlow:
    """Of one program, whose tokens are edited in place."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.source = program.source

    def joins(self, reachable: Collection[Declaration]) -> bool:
        """Lanes that part at an atomic operation are together again behind the branch or loop that it stands in, as on Apple's GPUs. Not
        where a barrier stands in it, too: who waits there might wait for those who wait behind it.

        Returns whether lanes of what is reachable may skip a threadgroup's barrier, because it stands in a branch. Then barriers count
        simdgroups (METALMM_SKIPPED_BARRIERS), and lanes are together again behind each statement with a barrier, too.
        """
        tokens, atomic = self.source.tokens, self._that_call(re.compile("atomic_"))
        barrier, of_threadgroup = (self._that_call(re.compile(f"{name}_barrier")) for name in ("(threadgroup|simdgroup)", "threadgroup"))
        places, may_skip = list[tuple[int, set[str]]](), False
        for i, end in self._statements(reachable):
            called = zip(tokens[i:end], tokens[i + 1 : end], strict=False)
            places.append((i, names := {t.text for t, behind in called if t.kind == "name" and behind.text in ("(", "<")}))
            may_skip |= tokens[i].text in ("if", "switch") and not names.isdisjoint(of_threadgroup)
        for i, names in places:
            if names & (atomic | barrier) if may_skip else names & atomic and not names & barrier:
                tokens[i].space = f" if (::metalmm::fiber::Join metalmm_join; false) {{}} else{tokens[i].space or ' '}"
        return may_skip

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
        hidden |= any(t.text == "]" and tokens[j + 1].text == "(" and tokens[j - 1].text in ("&", "=", "[") for j, t in enumerate(tokens))
        statements = [*self._statements(reachable)]
        for i, last in statements:
            if tokens[i].text in ("if", "switch"):
                continue
            body = i + 1 if tokens[i].text == "do" else self.source.matching(i + 1) + 1
            end = self._statement_end(body)
            called = [j for j in range(i, last) if tokens[j].text in wanted and tokens[j + 1].text in ("(", "<")]
            inner = [(first, after) for first, after in statements if body <= first < end]
            may_pass = any(first < j < after for j in called for first, after in inner)
            may_pass |= any(not operation.match(tokens[j].text) for j in called)
            may_pass |= any(t.text in ("continue", "?", "&&", "||") for t in tokens[i:last])
            labels = (j for j in range(body, end) if tokens[j].text in ("case", "default"))
            is_entered = any(not any(first < j < after and tokens[first].text == "switch" for first, after in inner) for j in labels)
            if (hidden or (called and may_pass)) and not is_entered and self._count_turns(i, end):
                tokens[i].space = f" if (::metalmm::fiber::Turns metalmm_turns; false) {{}} else{tokens[i].space or ' '}"

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
            if token.kind != "name" or token.text not in ("if", "for", "while", "do", "switch") or i in ends:
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
            if token.kind != "name" or token.text not in ("for", "while") or tokens[i + 1].text != "(":
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
