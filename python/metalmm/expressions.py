"""Expressions of whole numbers and names, as manifests have them: `threads // 32 * columns`, `m <= 8`."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from functools import lru_cache

_OPERATORS: dict[type, Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
}
_CONDITIONS: dict[type, Callable[[int, int], int]] = {
    **_OPERATORS,
    ast.Mod: operator.mod,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}


@lru_cache(1000)
def _parsed(rule: str) -> ast.AST:
    return ast.parse(rule, mode="eval").body


def evaluate(rule: str, values: Mapping[str, int], operators: Mapping[type, Callable[[int, int], int]] = _OPERATORS) -> int:
    """What an expression of whole numbers and names gives. Raises ValueError for any other."""

    def value(node: ast.AST) -> int:
        if isinstance(node, ast.Constant) and type(node.value) is int:
            return node.value
        if isinstance(node, ast.Name) and type(values.get(node.id)) is int:
            return values[node.id]
        if isinstance(node, ast.BinOp) and type(node.op) in operators:
            return int(operators[type(node.op)](value(node.left), value(node.right)))
        if operators is _CONDITIONS and isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in operators:
            return int(operators[type(node.ops[0])](value(node.left), value(node.comparators[0])))
        if operators is _CONDITIONS and isinstance(node, ast.BoolOp):
            parts = [bool(value(part)) for part in node.values]
            return int(all(parts) if isinstance(node.op, ast.And) else any(parts))
        raise ValueError

    if len(rule) > 200:
        raise ValueError("an expression of more than 200 characters")
    try:
        return value(_parsed(rule))
    except (SyntaxError, ZeroDivisionError, RecursionError, MemoryError, OverflowError) as error:
        raise ValueError(str(error)) from None


def holds(condition: str, values: Mapping[str, int]) -> bool:
    """Whether a condition does: comparisons of expressions, with and, or. Raises ValueError for what is none."""
    return bool(evaluate(condition, values, _CONDITIONS))
