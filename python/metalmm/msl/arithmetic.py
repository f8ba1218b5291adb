"""What constant expressions of C++ give."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable
from typing import Any


def number(text: str) -> str:
    """A number of C++ as Python reads it: 01, 0x1u, 1'000."""
    digits = re.sub(r"[uUlL]+$", "", text.replace("'", ""))
    return f"0o{digits[1:]}" if re.fullmatch(r"0[0-7]+", digits) else digits


_LEVELS = (("or",), ("and",), ("|",), ("^",), ("&",), ("==", "!="), ("<", "<=", ">", ">="), ("<<", ">>"), ("+", "-"), ("*", "/", "%"))
_OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "or": lambda x, y: bool(x or y),
    "and": lambda x, y: bool(x and y),
    "|": operator.or_,
    "^": operator.xor,
    "&": operator.and_,
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "<<": operator.lshift,
    ">>": operator.rshift,
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": lambda x, y: x / y if isinstance(x, float) or isinstance(y, float) else abs(x) // abs(y) * (1 if x * y >= 0 else -1),
    "%": lambda x, y: x - y * (abs(x) // abs(y) * (1 if x * y >= 0 else -1)),
}
_UNARY: dict[str, Callable[[Any], Any]] = {"-": operator.neg, "+": operator.pos, "~": operator.invert, "!": operator.not_}


def evaluated(text: str) -> Any:
    """What an expression of C++ with literals, arithmetic and comparisons gives (and, or for && and ||); None for anything else."""
    words = re.findall(
        r"and|or|[A-Za-z_]\w*|\.?\d(?:[eE][+-]|[\w.])*|<<|>>|[<>=!]=|\S",
        text.replace("< <", "<<").replace("> >", ">>").replace("! =", "!="),
    )
    place = 0

    def take() -> str:
        nonlocal place
        place += 1
        return words[place - 1] if place <= len(words) else ""

    def level(at: int) -> Any:
        nonlocal place
        if at == len(_LEVELS):
            return unary()
        left = level(at + 1)
        while place < len(words) and words[place] in _LEVELS[at]:
            operation = take()
            right = level(at + 1)
            if abs(left) >= 2**64 or abs(right) >= 2**64 or (operation in ("<<", ">>") and not 0 <= right < 64):
                raise ValueError
            left = _OPERATORS[operation](left, right)
        return left

    def unary() -> Any:
        word = take()
        if word in _UNARY:
            return _UNARY[word](unary())
        if word == "(":
            value = level(0)
            if take() != ")":
                raise ValueError
            return value
        value = ast.literal_eval(word.rstrip("fF") if "." in word else word)
        if not isinstance(value, (int, float)):
            raise ValueError
        return value

    try:
        value = level(0)
        return value if place == len(words) else None
    except (SyntaxError, ValueError, TypeError, ArithmeticError, RecursionError, MemoryError):
        return None
