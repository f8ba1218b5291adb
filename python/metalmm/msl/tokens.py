"""The tokens of a preprocessed MSL file: where each came from, which bracket closes which."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable
from dataclasses import dataclass

from ..errors import LoweringError

_TOKEN = re.compile(
    r"""
      (?P<space>(?:\s|//[^\n]*|/\*[\s\S]*?\*/|^[ \t]*\#[^\n]*)+)
    | (?P<string>(?:u8|[uUL])?"(?:\\.|[^"\\\n])*")
    | (?P<char>(?:u8|[uUL])?'(?:\\.|[^'\\\n])*')
    | (?P<number>\.?\d(?:[eEpP][+-]|[\w.]|'\w)*)
    | (?P<name>[A-Za-z_]\w*)
    | (?P<punct>::|->|<=|>=|==|!=|&&|\|\||[-+*/%^&|]=|\.\.\.|.)
    """,
    re.VERBOSE | re.MULTILINE | re.DOTALL,
)
_LINE_MARKER = re.compile(r'^#\s*(?:line\s+)?(\d+)(?:\s+"((?:\\.|[^"\\])*)")?')
_COMMENT = re.compile(r"//[^\n]*|/\*[\s\S]*?\*/")
PRAGMA = re.compile(r"^[ \t]*#[ \t]*pragma([^\n]*)", re.MULTILINE)
NUMBERS = ["bool", "char", "uchar", "short", "ushort", "int", "uint", "long", "ulong", "half", "float", "bfloat"]  # MSL's types of them
BEFORE_EXPRESSIONS = {"return", "else", "do", "case", "and", "or", "not", "throw"}  # names behind which one begins
_NAMES_TYPE = {"struct", "class", "union", "enum", "typename", "using"}
VECTORS = {f"{kind}{n}" for kind in NUMBERS for n in (2, 3, 4)}
OPEN = {"(": ")", "[": "]", "{": "}"}


@dataclass(slots=True)
class Token:
    """A token and the white space, line markers and pragmas before it; what a pass puts around it, which no other takes for a bracket."""

    space: str
    kind: str
    text: str
    before: str = ""
    behind: str = ""


class Source:
    """The tokens of a preprocessed file and where each came from."""

    def __init__(self, text: str, name: str = "<source>") -> None:
        self.tokens: list[Token] = []
        self._starts: list[int] = []
        self._places: list[tuple[str, int]] = []
        file, line, space = name, 1, ""
        for match in _TOKEN.finditer(text):
            kind, piece = str(match.lastgroup), match[0]
            if kind == "space":
                space += piece
                if "\n" not in piece:
                    continue
                if "/" in piece:
                    piece = _COMMENT.sub(lambda m: "\n" * m[0].count("\n"), piece)
                for row in piece.split("\n")[:-1]:
                    if "#" in row and (marker := _LINE_MARKER.match(row.strip())):
                        file, line = (re.sub(r"\\(.)", r"\1", marker[2]) if marker[2] else file), int(marker[1])
                    else:
                        line += 1
                continue
            self._starts.append(len(self.tokens))
            self._places.append((file, line))
            self.tokens.append(Token(space, kind, piece))
            space = ""
        self.tail = space

    def place(self, index: int) -> str:
        file, line = self._places[min(index, len(self._places) - 1)]
        return f"{file}:{line}"

    def text(self) -> str:
        return "".join(t.space + t.before + t.text + t.behind for t in self.tokens) + self.tail

    def fail(self, index: int, what: str) -> LoweringError:
        return LoweringError(f"{self.place(index)}: {what}")

    def matching(self, index: int) -> int:
        """The index of the bracket that closes the one at `index`."""
        stack: list[str] = []
        for i in range(index, len(self.tokens)):
            text = self.tokens[i].text
            if text in OPEN:
                stack.append(OPEN[text])
            elif stack and text == stack[-1]:
                stack.pop()
                if not stack:
                    return i
        raise self.fail(index, f"'{self.tokens[index].text}' is never closed")

    def opening(self, index: int) -> int:
        """The index of the bracket that the one at `index` closes."""
        closing = self.tokens[index].text
        opener, depth, i = {")": "(", "]": "[", "}": "{", ">": "<"}.get(closing), 0, index
        if opener is None:
            raise self.fail(index, f"a bracket should stand where '{closing}' does")
        while i >= 0:
            text = self.tokens[i].text
            if closing == ">" and i < index and text in ")]":
                i = self.opening(i)
            elif closing == ">" and text == "<":
                if self.tokens[i - 1].text == "<" and not self.tokens[i].space:
                    i -= 1  # a shift
                elif self._closes_at(i, index):
                    return i
            elif closing == ">" and text in ("{", "}", ";"):
                break
            elif text == closing:
                depth += 1
            elif text == opener:
                depth -= 1
                if depth == 0:
                    return i
            i -= 1
        raise self.fail(index, f"'{closing}' was never opened")

    def _closes_at(self, opener: int, index: int) -> bool:
        try:
            return self.angle_end(opener) == index
        except LoweringError:
            return False

    def angle_end(self, index: int) -> int:
        """The index of the '>' that closes the '<' at `index`. A '<' inside that nothing closes is a comparison."""
        end = self.angle_from(index + 1)
        if end is None:
            raise self.fail(index, "'<' is never closed")
        return end

    def angle_from(self, i: int) -> int | None:
        while i < len(self.tokens):
            text = self.tokens[i].text
            if text in OPEN:
                i = self.matching(i)
            elif text in (")", "]", "}", ";"):
                return None
            elif text == "<" and self.tokens[i + 1].text == "<" and not self.tokens[i + 1].space:
                i += 1  # a shift
            elif text == "<" and self.tokens[i - 1].kind == "name":
                inner = self.angle_from(i + 1)
                outer = None if inner is None else self.angle_from(inner + 1)
                if outer is not None:
                    return outer
            elif text == ">":
                return i
            i += 1
        return None

    def starts_declaration(self, i: int) -> bool:
        """Whether a declaration begins with the specifier at `i` and those before it."""
        before = self.before_specifiers(i)
        return before is None or self.tokens[before].text[-1] in ";{}"  # of one lowered just before, too

    def before_specifiers(self, i: int) -> int | None:
        """What stands before `const alignas(16) threadgroup`, its specifiers left out; but `f() const threadgroup {` is no declaration."""
        tokens, at = self.tokens, self.previous(i)
        while at is not None:
            if tokens[at].text in ("const", "static", "volatile"):
                at = self.previous(at)
            elif tokens[at].text == ")" and (word := self.previous(self.opening(at))) is not None:
                if tokens[word].text not in ("alignas", "__attribute__"):
                    break
                at = self.previous(word)
            else:
                break
        return at

    def behind_templates(self, i: int) -> int:
        """What follows `template <…>` at `i`, or `i` itself."""
        while self.tokens[i].text == "template":
            i = self.angle_end(i + 1) + 1
        return i

    def gives_value(self, opening: int) -> bool:
        """Whether the parentheses behind a name are a variable's first value, and no function's parameters: those are two words, or a type."""
        words, close = self.tokens, self.matching(opening)
        if words[close + 1].text not in (";", ",") or close == opening + 1:
            return False
        inside = words[opening + 1 : close + 1]
        if len(inside) == 2 and any(a.text in _NAMES_TYPE and b.text == inside[0].text for a, b in itertools.pairwise(words)):
            return False
        return not any(
            x.kind == "name" and (y.kind == "name" or (x.text in (*NUMBERS, *VECTORS) and y.text in (",", ")")))
            for x, y in itertools.pairwise(inside)
        )

    def top_level(self, i: int, end: int, text: str) -> list[int]:
        """Where `text` stands in tokens i to end, outside of brackets."""
        found, tokens = list[int](), self.tokens
        while i < end:
            if tokens[i].text == text:
                found.append(i)
            i = self.matching(i) + 1 if tokens[i].text in OPEN else i + 1
        return found

    def previous(self, i: int) -> int | None:
        i -= 1
        while i >= 0 and self.tokens[i].text == "":
            i -= 1
        return i if i >= 0 else None

    def join(self, words: Iterable[tuple[Token, str]]) -> str:
        """Words of tokens in one line; what was written together, such as `<<`, stays together."""
        text = ""
        for token, word in words:
            word = token.before + word + token.behind
            if word:
                text += (" " if token.space or (text[-1:].isidentifier() and word[0].isidentifier()) or text[-1:].isdigit() else "") + word
        return text.strip()

    def blank(self, start: int, end: int) -> None:
        for token in self.tokens[start:end]:
            token.text = token.before = token.behind = ""
            if "#pragma" in token.space:
                token.space = PRAGMA.sub("", token.space)

    def split(self, start: int, end: int) -> list[tuple[int, int]]:
        """The pieces between top-level commas."""
        pieces, first, i = [], start, start
        while i < end:
            text = self.tokens[i].text
            if text in OPEN:
                i = self.matching(i)
            elif text == "<" and i > start and self.tokens[i - 1].kind == "name":
                close = self.angle_from(i + 1)
                i = close if close is not None and close < end else i
            elif text == ",":
                pieces.append((first, i))
                first = i + 1
            i += 1
        if first < end:
            pieces.append((first, end))
        return pieces
