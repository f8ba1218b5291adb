"""A strategy: a way to compute a product, and the names of all points of its parameters' space."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import ManifestError
from .expressions import holds
from .files import harmless

_MOST = 1_000_000  # points of a search
_SIZES = ("m", "n", "k", "batch")


@dataclass(frozen=True)
class Strategy:
    """A family of a manifest whose variants are named by rule.

    Attributes:
        path, family: The manifest, and its family there.
        prefixes: Of each parameter, in the order of a name: its number's prefix, or the word of one that is true.
        tables: For each kernel its table and the family's.
        fixed: Their whole numbers and flags: the parameters' defaults, and what no name says.
        where: Conditions between parameters that every point keeps.
        search, search_where: What `metalmm tune --search` tries: values of each parameter, and conditions between them and the sizes.
        points: Names of those that ship.
        reasons: Texts by name.
    """

    path: Path
    family: str
    prefixes: Mapping[str, str]
    tables: Sequence[dict[str, Any]]
    fixed: Mapping[str, int | bool]
    where: Sequence[str]
    search: Mapping[str, Sequence[int]]
    search_where: Sequence[str]
    points: Sequence[str]
    reasons: Mapping[str, Any]

    @staticmethod
    def read(path: Path, family: str, own: Mapping[str, Any], tables: Sequence[dict[str, Any]], reasons: Mapping[str, Any]) -> Strategy:
        """Raises ManifestError."""

        def fail(what: str) -> ManifestError:
            return ManifestError(f"{path}: family {family}: {what}")

        name, where, search, points = own["name"], own["where"] or [], own["search"] or {}, own["points"] or []
        if not isinstance(name, dict) or not name or not all(isinstance(x, str) and x.isidentifier() for x in name.values()):
            raise fail(f"name is {name!r}; it takes a table of parameters with the prefix of each")
        if len(set(name.values())) < len(name):
            raise fail(f"name is {name!r}; two parameters have one prefix")
        fixed = {key: x for table in reversed(tables) for key, x in table.items() if isinstance(x, int)}
        flags = {key for key in name if isinstance(fixed.get(key), bool)}
        numbers = {prefix for key, prefix in name.items() if key not in flags}
        for key, prefix in name.items():
            if not re.fullmatch("[A-Za-z]+[0-9]*" if key in flags else "[A-Za-z]+", prefix):
                raise fail(f"name.{key} is {prefix!r}; it takes letters, of a flag with digits behind them")
            if key in flags and (fixed[key] or prefix.rstrip("0123456789") in numbers):
                raise fail(f"name.{key}: a flag is false by default, and its word is no other's prefix with a number")
        if fixed.keys() >= name.keys():
            raise fail(f"name is {name!r}; all of them have defaults; take one away, as the point of all defaults has no name")
        if not isinstance(points, list) or not all(isinstance(x, str) for x in points):
            raise fail(f"points is {points!r}; it takes a list of names")
        if twice := next((x for x in points if points.count(x) > 1), None):
            raise fail(f"points has {twice!r} twice")
        if not isinstance(search, dict):
            raise fail(f"search is {search!r}; it takes a table of parameters with lists of values")
        conditions = [("where", where), ("search.where", search.get("where", []))]
        given = [*name, *fixed]
        for key, found in conditions:
            if not isinstance(found, list) or not all(isinstance(x, str) for x in found):
                raise fail(f"{key} is {found!r}; it takes a list of conditions")
            for condition in found:
                names = [*given, *_SIZES] if key != "where" else given
                if not any(_can_be_asked(condition, dict.fromkeys(names, value)) for value in (1, 2, 3, 5)):
                    known = ", ".join(dict.fromkeys(names))
                    raise fail(f"{key} has {condition!r}; it takes comparisons of + - * // % of numbers and {known}")
        values = {key: x for key, x in search.items() if key != "where"}
        for key, choices in values.items():
            if key not in name:
                raise fail(f"search has '{key}', which is no parameter in a name; there are {', '.join(name)}")
            if (
                not isinstance(choices, list)
                or not choices
                or not all(isinstance(x, bool) or (isinstance(x, int) and x > 0) for x in choices)
            ):
                raise fail(f"search.{key} is {choices!r}; it takes a list of whole numbers of at least 1")
        if (count := math.prod(map(len, values.values()))) > _MOST:
            raise fail(f"search has {count} combinations; the limit is {_MOST}")
        return Strategy(path, family, name, tables, fixed, where, values, search.get("where", []), points, reasons)

    @property
    def form(self) -> str:
        """Of its names: N stands for a number."""
        return "_".join(prefix if self._is_flag(key) else f"{prefix}N" for key, prefix in self.prefixes.items())

    def name(self, values: Mapping[str, int]) -> str:
        """Of a point. Parameters at their default are left out."""
        words = []
        for key, prefix in self.prefixes.items():
            if (value := values.get(key)) is not None and value != self.fixed.get(key):
                words.append(prefix if self._is_flag(key) else f"{prefix}{int(value)}")
        return "_".join(words)

    def values(self, name: str) -> dict[str, int | bool]:
        """The parameters that a name says. Raises ManifestError for a name that is none, or is not spelled as `name` spells it."""
        found, left = dict[str, int | bool](), dict(self.prefixes)
        for word in name.split("_"):
            key = next((key for key, prefix in left.items() if self._reads(key, prefix, word)), None)
            if key is None:
                raise self._fail(name, f"it does not know '{word}'")
            del left[key]
            found[key] = True if self._is_flag(key) else int(word[len(self.prefixes[key]) :])
        if missing := [f"{prefix}N ({key})" for key, prefix in left.items() if key not in self.fixed]:
            raise self._fail(name, f"{missing[0]} is missing")
        if zero := next((key for key, value in found.items() if value == 0), None):
            raise self._fail(name, f"{zero} is 0; it takes 1 or more")
        if (right := self.name(found)) != name:
            raise self._fail(name, f"it is spelled '{right}'")
        if broken := self._broken(self.where, found):
            raise self._fail(name, f"{broken} does not hold")
        return found

    def searched(self, sizes: Mapping[str, int]) -> Iterator[dict[str, int]]:
        """The points that a search may try for a shape of those sizes."""
        for chosen in itertools.product(*self.search.values()):
            values = dict(zip(self.search, chosen, strict=True))
            if not self._broken([*self.where, *self.search_where], {**sizes, **values}):
                yield values

    def _broken(self, conditions: Sequence[str], values: Mapping[str, int]) -> str:
        numbers = {key: int(value) for key, value in {**self.fixed, **values}.items()}
        for condition in conditions:
            try:
                if holds(condition, numbers):
                    continue
            except ValueError:  # it divides by zero
                pass
            return condition
        return ""

    def _is_flag(self, key: str) -> bool:
        return isinstance(self.fixed.get(key), bool)

    def _reads(self, key: str, prefix: str, word: str) -> bool:
        if self._is_flag(key):
            return word == prefix
        digits = word[len(prefix) :]
        return word.startswith(prefix) and digits.isascii() and digits.isdecimal() and len(digits) < 10 and str(int(digits)) == digits

    def _fail(self, name: str, what: str) -> ManifestError:
        text = f"'{self.family}/{name}': {what}; its names are {self.form}, what is at its default left out"
        return ManifestError(f"{self.path}: {harmless(text)}")


def _can_be_asked(condition: str, values: Mapping[str, int]) -> bool:
    try:
        holds(condition, values)
    except ValueError:
        return False
    return True
