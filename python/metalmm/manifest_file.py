"""Manifests, read: each entry becomes a :class:`Variant`, or an error that names file and entry. docs/add_a_variant.md has the format."""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from . import backends
from .errors import ManifestError
from .expressions import evaluate, holds
from .files import harmless, text_of
from .strategy import Strategy
from .variant import ENDS, LAYOUTS, OPERAND_TYPES, STORAGES, STORED, TRANSPOSES, TYPE, Form, Variant, is_argument, names_of

_SIZES = ("m", "n", "k", "batch")
_OF_FORMS = ("source", "kernel", "template", "tile", "supports", "without", "flight", "busy", "storage", "matrices", "needs")
_FIELDS = {*_OF_FORMS, "threads", "off", "baseline", "library", "devices", "alike_by"}
_OF_STRATEGIES = ("name", "where", "search", "points")
# What a GPU may lack: Apple's simdgroup_matrix before Apple7, simd_sum and its like before Apple7 and Mac2, mps in virtual machines,
# tensor_ops before M5 and macOS 26.2; NVIDIA's wgmma but of compute capability 9.0.
FEATURES = ("simdgroup_matrix", "simd_sum", "mps", "mps_ndarray", "blas", "wgmma", "tensor_ops")
RARE = frozenset({"wgmma", "tensor_ops"})  # of those the ones that most GPUs lack
_UNLIMITED = 2**32 - 1
_NAME = re.compile(r"[\w.+-]+")
_KINDS = {str: "a string", int: "a whole number", list: "a list", dict: "a table", bool: "true or false"}


def read(path: Path) -> tuple[dict[str, Variant], dict[str, Strategy]]:
    """Its variants by id and its strategies by name. Raises ManifestError."""
    try:
        data = tomllib.loads(text_of(path))
    except (OSError, ValueError, RuntimeError) as error:  # tomllib's and Unicode's are ValueErrors; RuntimeError: a loop of links
        if isinstance(error, RecursionError):
            raise ManifestError(f"{path}: tables or arrays nested too deeply") from None
        raise ManifestError(f"{path}: {error}") from error
    if type(data.get("format")) is not int or data["format"] != 2:
        raise ManifestError(f"{path}: format is {data.get('format')!r}; this metalmm reads format = 2")
    strategies = dict[str, Strategy]()
    loaded = {str(v): v for v in (entry.variant() for entry in list(_entries(path, data, strategies)))}
    if not loaded and not strategies:
        raise ManifestError(f"{path}: there are no variants in it")
    return loaded, strategies


def point(strategy: Strategy, name: str) -> Variant:
    """The variant of a strategy's point. Raises ManifestError for a name that is none, with the right spelling where there is one."""
    row = strategy.values(name)
    return _Entry(strategy.path, strategy.family, name, [{**table, **row} for table in strategy.tables], strategy.reasons).variant()


def _table(path: Path, where: str, value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ManifestError(f"{path}: {where} is {value!r}; it takes a table")
    return value


def _hint(word: str, *known: Sequence[str], otherwise: str = "") -> str:
    """A near word of the first group that has one."""
    for group in known:
        if near := difflib.get_close_matches(word, group, n=1):
            return f"did you mean '{near[0]}'?"
    return otherwise


def _check_known(path: Path, table: Mapping[str, Any], known: Sequence[str]) -> None:
    for key in table:
        if key not in known:
            hint = _hint(key, known, otherwise=f"it has {', '.join(known)}")
            raise ManifestError(f"{path}: '{harmless(key)}' is no part of a manifest; {hint}")


def _arguments(*tables: Mapping[str, Any]) -> set[str]:
    """Names that the templates of some tables have."""
    lists = [words for table in tables if isinstance(words := table.get("template"), list)]
    return set(names_of(", ".join(word for words in lists for word in words if isinstance(word, str))))


def _check_keys(where: str, table: Mapping[str, Any], arguments: set[str]) -> None:
    """Every key is a field or an argument of a template."""
    for key in table:
        if key in _OF_STRATEGIES and key not in arguments:
            raise ManifestError(f"{where}: '{key}' is of a strategy, a family whose table has 'name'; docs/add_a_variant.md has an example")
        if key not in _FIELDS and key not in arguments:
            hint = _hint(key, sorted(_FIELDS), sorted(arguments), otherwise="it is neither a field nor among the template's arguments")
            if key == "variant":
                hint = "the rows of a family are in [families.NAME.variants]"
            raise ManifestError(f"{where}: unknown key '{harmless(key)}'; {hint}")


def _entries(path: Path, data: Mapping[str, Any], strategies: dict[str, Strategy]) -> Iterator[_Entry]:
    """Of [kernels.NAME], [families.NAME] and the rows of [families.NAME.variants], or the points of a strategy."""
    _check_known(path, data, ("format", "reasons", "kernels", "families"))
    reasons = _table(path, "reasons", data.get("reasons", {}))
    kernels = {name: _table(path, f"kernels.{name}", k) for name, k in _table(path, "kernels", data.get("kernels", {})).items()}
    for name, template in kernels.items():
        _check_keys(f"{path}: kernels.{name}", template, _arguments(template))
        template.setdefault("kernel", name)
        template.setdefault("source", f"{name}.metal")
    for name, family in _table(path, "families", data.get("families", {})).items():
        defaults = dict(_table(path, f"families.{name}", family))
        rows = _table(path, f"families.{name}.variants", defaults.pop("variants", {}))
        where = f"{path}: family {name}"
        if "name" in defaults:
            if rows:
                raise ManifestError(f"{where} has 'name', and rows, too; its variants are the names in 'points'")
            bases = _kernels_of(where, defaults, kernels)
            own = {key: defaults.pop(key, None) for key in _OF_STRATEGIES}
            arguments = _arguments(defaults, *bases)
            _check_keys(where, defaults, arguments)
            for key in own["name"] if isinstance(own["name"], dict) else ():
                if key not in arguments and key != "threads":
                    hint = _hint(key, sorted(arguments), otherwise=f"there are {', '.join(sorted(arguments))}")
                    raise ManifestError(f"{where}: name has '{harmless(key)}', which no template of its kernels has; {hint}")
            strategies[name] = strategy = Strategy.read(path, name, own, [_merged(base, defaults) for base in bases], reasons)
            yield from (_Entry(path, name, p, [{**t, **strategy.values(p)} for t in strategy.tables], reasons) for p in strategy.points)
            continue
        if not rows:
            raise ManifestError(f"{where} has no variants; they are the rows of [families.{name}.variants]")
        used = list[Mapping[str, Any]]()
        for row_name, row in rows.items():
            table = {**defaults, **_table(path, f"{name}/{row_name}", row)}
            bases = _kernels_of(f"{path}: {name}/{row_name}", table, kernels)
            _check_keys(f"{path}: {name}/{row_name}", row, _arguments(*bases, defaults, row))
            used += bases
            yield _Entry(path, name, row_name, [{**_merged(base, defaults, row), "kernel": base.get("kernel")} for base in bases], reasons)
        _check_keys(where, defaults, _arguments(defaults, *used, *rows.values()))


def _merged(*parts: Mapping[str, Any]) -> dict[str, Any]:
    """One table over the other; `supports` and `without` key by key."""
    merged = {key: value for part in parts for key, value in part.items()}
    for key in ("supports", "without"):
        found = [part[key] for part in parts if key in part]
        if found and all(isinstance(part, dict) for part in found):
            merged[key] = {k: v for part in found for k, v in part.items()}
    return merged


def _kernels_of(where: str, table: dict[str, Any], kernels: Mapping[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """The tables that `kernel` names, taken out of `table`: their own `kernel` is the template's name. An empty one for what a library
    does."""
    kernel = table.pop("kernel", None)
    if kernel is None and "library" in table:
        return [{}]
    if kernel is None:
        raise ManifestError(f"{where}: 'kernel' is missing; it names a table [kernels.NAME]")
    names = kernel if isinstance(kernel, list) and kernel else [kernel]
    if not all(isinstance(name, str) for name in names):
        raise ManifestError(f"{where}: 'kernel' is {kernel!r}; it takes the name of a table [kernels.NAME], or a list of them")
    for name in names:
        if name not in kernels:
            hint = _hint(name, list(kernels), otherwise=f"there are: {', '.join(kernels) or 'none'}")
            raise ManifestError(f"{where}: there is no table [kernels.{name}]; {hint}")
    return [kernels[name] for name in names]


class _Entry:
    """One variant's fields, read one by one. tables: for each of its kernels, of which the first has what is common to all. reasons: texts
    by name."""

    def __init__(self, path: Path, family: object, name: object, tables: list[dict[str, Any]], reasons: Mapping[str, Any]) -> None:
        self.path, self.tables, self.table, self.reasons = path, tables, tables[0], reasons
        for word in (family, name):
            if not isinstance(word, str) or not _NAME.fullmatch(word):
                raise ManifestError(f"{path}: a family or variant has the name {word!r}; it takes letters, digits, and _ . + -")
        self.v = Variant(f"{family}/{name}")
        self.v.family, self.v.name, self.v.manifest = str(family), str(name), path

    def fail(self, what: str) -> ManifestError:
        return ManifestError(f"{self.path}: {self.v}: {what}")

    def take(self, key: str, kind: type, default: Any = None) -> Any:
        """The field, of that type; without a default it must be there."""
        value = self.table.get(key, default)
        if value is None:
            raise self.fail(f"'{key}' is missing")
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise self.fail(f"'{key}' is {value!r}, of the wrong type; it takes {_KINDS[kind]}")
        return value

    def words(self, key: str, default: Sequence[str] | None = None, table: Mapping[str, Any] | None = None) -> tuple[str, ...]:
        """A list of strings."""
        value = (self.table if table is None else table).get(key, default)
        if value is None:
            raise self.fail(f"'{key}' is missing")
        if not isinstance(value, (list, tuple)) or not all(isinstance(x, str) for x in value):
            raise self.fail(f"'{key}' is {value!r}; it takes a list of strings")
        return tuple(value)

    def some_of(self, key: str, known: Sequence[str], default: Sequence[str] | None = None, table: Mapping[str, Any] | None = None) -> Any:
        value, name = self.words(key, default, table), key if table is None else f"supports.{key}"
        if any(x not in known for x in value):
            raise self.fail(f"{name} is {list(value)}; it lists some of {', '.join(known)}")
        if len(set(value)) < len(value):
            raise self.fail(f"{name} is {list(value)}; it names one of them twice")
        return value

    def reason(self, text: object, key: str) -> str:
        """A reason in words, or by its name among the manifest's."""
        if not isinstance(text, str) or not isinstance(self.reasons.get(text, ""), str):
            raise self.fail(f"'{key}' is {text!r}, of the wrong type; it takes a string")
        return str(self.reasons.get(text, text))

    def variant(self) -> Variant:
        v = self.v
        v.reason = self.reason(self.table.get("off", ""), "off")
        v.enabled, v.is_listed = not v.reason, True
        v.library = self.take("library", str, "")
        having = backends.with_library(v.library)
        if v.library and not having:
            raise self.fail(f"library is {v.library!r}; it takes one of {', '.join(backends.libraries())}")
        v.devices = self.some_of("devices", backends.names(), having if v.library else ())
        if "devices" in self.table and not v.devices:
            raise self.fail(f"devices is []; it lists some of {', '.join(backends.names())}")
        v.needs = self._needs((v.library.partition("_")[0],) if v.library else ())
        if v.library and not set(v.devices) <= set(having):
            raise self.fail(f"devices is {list(v.devices)}; {v.library} is there on {', '.join(having)} alone")
        if v.library and "source" not in self.table:  # nothing of it is MSL
            self.tables = [{**table, "source": self.path.name, "kernel": "", "template": []} for table in self.tables]
            self.table = self.tables[0]
        v.params = {}
        self._check_common()
        self._threads()
        v.forms = tuple(self._form(table) for table in self.tables)
        self.table = self.tables[0]
        kinds = [(storage, end) for f in v.forms for storage in f.storages for end in f.ends]
        if twice := next((kind for kind in kinds if kinds.count(kind) > 1), None):
            raise self.fail(f"two of its kernels take {twice[1]} of {twice[0]}")
        if v.library and kinds != [("dense", "1")]:
            raise self.fail("a library multiplies one dense B")
        v.alike_by = self.some_of("alike_by", list(v.numbers())) if "alike_by" in self.table else None
        v.baseline = tuple(v.supports["layouts"]) if self.table.get("baseline") is True else self.some_of("baseline", LAYOUTS, [])
        return v

    def _needs(self, otherwise: Sequence[str]) -> tuple[str, ...]:
        """Of any of its kernels."""
        found = dict[str, None]()
        for table in self.tables:
            self.table = table
            found.update(dict.fromkeys(self.some_of("needs", FEATURES, otherwise)))
        self.table = self.tables[0]
        return tuple(found)

    def _check_common(self) -> None:
        """What all of its kernels have in common does not differ."""
        for key in dict.fromkeys(key for table in self.tables for key in table if key not in _OF_FORMS):
            having = [table[key] for table in self.tables if key in table]
            everywhere = len(having) == len(self.tables) or (key not in _FIELDS and key not in TRANSPOSES)
            if not everywhere or any(x != having[0] or type(x) is not type(having[0]) for x in having):
                raise self.fail(f"'{key}' is not the same in the tables of all its kernels; give it in the family")

    def _threads(self) -> None:
        rule = self.table.get("threads")
        threads = self._size(rule, "threads", self.table) if isinstance(rule, str) else self.take("threads", int)
        if not threads or not 1 <= threads <= 1024:
            raise self.fail(f"threads is {threads}; Metal allows 1 to 1024")
        self.v.threads = threads

    def _form(self, table: dict[str, Any]) -> Form:
        self.table = table
        template = self.words("template")
        if (odd := next((word for word in template if not is_argument(word)), None)) is not None:
            raise self.fail(
                f"template has '{harmless(odd)}'; it lists names of parameters, or a type of the kernel's with some: Pair<rows, columns>"
            )
        spelling = ", ".join(template)
        self._parameters(names_of(spelling))
        supports, without = self._supports(), self._types(names_of(spelling))
        rules = {key: str(self.take(key, str, "")) for key in ("flight", "busy")}
        for key, rule in rules.items():
            try:
                if rule:
                    evaluate(rule, {**self.v.numbers(), "dense": 1, "swiglu": 0})
            except ValueError:
                raise self.fail(f"{key} is {rule!r}; it takes + - * // of parameters and whole numbers") from None
        source, kernel = self._source(), self.take("kernel", str)
        storages = dict.fromkeys(x for word in self._listed("storage", "dense") for x in (STORAGES[1:] if word == "quantized" else [word]))
        if (unknown := next((x for x in storages if x not in STORAGES), None)) is not None:
            raise self.fail(f"storage has {unknown!r}; it lists some of {', '.join(STORAGES)}, or quantized")
        ends = tuple(dict.fromkeys(self._ends()))
        for key, found in (("storage", storages), ("matrices", ends)):
            if not found and self.table.get(key):
                raise self.fail(f"{key} is {self.table[key]!r}, and no condition of it holds")
            if not found:
                raise self.fail(f"{key} is []; it lists some of {', '.join(STORAGES if key == 'storage' else ENDS)}")
        if (unknown := next((x for x in ends if x not in ENDS), None)) is not None:
            raise self.fail(f"matrices has {unknown!r}; it lists some of {', '.join(ENDS)}")
        return Form(source, kernel, spelling, tuple(storages), ends, supports, without, rules["flight"], rules["busy"])

    def _listed(self, key: str, otherwise: str) -> tuple[str, ...]:
        """A word, or a list of some."""
        value = self.table.get(key, otherwise)
        if not isinstance(value, (str, list)):
            raise self.fail(f"'{key}' is {value!r}, of the wrong type; it takes a string such as {otherwise!r}, or a list of strings")
        return (value,) if isinstance(value, str) else self.words(key)

    def _ends(self) -> Iterator[str]:
        """What `matrices` lists: an end, or [end, condition] for one that is there where the condition holds."""
        given = self.table.get("matrices", "1")
        if not isinstance(given, list):
            given = self._listed("matrices", "1")
        for end in given:
            word, when = end if isinstance(end, list) and len(end) == 2 else (end, "")
            if not isinstance(word, str):
                raise self.fail(f"'matrices' is {given!r}; it takes a list of strings, or, where a condition holds, of [string, condition]")
            try:
                if not when or holds(when, self.v.numbers()):
                    yield word
            except (TypeError, ValueError):
                raise self.fail(
                    f"matrices has {when!r}; of a list the second is a condition between parameters: + - * // % and comparisons"
                ) from None

    def _source(self) -> Path:
        source = self.path.parent / str(self.take("source", str))
        try:
            found = source.is_file()
        except (OSError, ValueError) as error:
            raise self.fail(f"source {source}: {error}") from error
        if not found:
            raise self.fail(f"there is no file {source}")
        return source

    def _parameters(self, template: Sequence[str]) -> None:
        v = self.v
        params = {key: self.table[key] for key in template if key in self.table and key not in _FIELDS}
        v.params.update(params)
        if decided := next((key for key in (TYPE, *STORED) if key in v.params), None):
            raise self.fail(f"'{decided}' is what the call decides; no parameter has that name")
        if "weights" in v.params and "matrices" not in self.table:
            raise self.fail(
                "'weights' is a parameter; a kernel of several matrices B says of how many by 'matrices', such as [\"2\", \"3\"]"
            )
        if missing := [t for t in template if t not in (*v.params, "threads", TYPE, *STORED, *TRANSPOSES)]:
            raise self.fail(f"template argument '{missing[0]}' has no value")
        for key, value in v.params.items():
            if not isinstance(value, int):
                raise self.fail(f"parameter '{key}' is {value!r}; parameters are integers or booleans")
            if not -(2**31) <= value <= _UNLIMITED:
                raise self.fail(f"parameter '{key}' is {value!r}; it takes -2^31 to 2^32 - 1")
        given = self.take("tile", list)
        values = {"threads": v.threads, **{k: x for k, x in self.table.items() if isinstance(x, int)}}
        tile = [t if type(t) is int else self._size(t, "tile", values) for t in given]
        if len(tile) != 2 or not all(t is not None and least <= t <= _UNLIMITED for t, least in zip(tile, (1, 0), strict=True)):
            raise self.fail(f"tile is {given}; it takes [bm, bn] with bm at least 1, and at most 2^32 - 1")
        found = (int(tile[0] or 0), int(tile[1] or 0))
        if getattr(v, "tile", found) != found:
            raise self.fail(f"its kernels have tiles of {v.tile} and {found}; they take one")
        v.tile = found

    def _size(self, rule: object, key: str, values: Mapping[str, Any]) -> int | None:
        """What an expression of parameters and whole numbers gives; None for what is no text."""
        if not isinstance(rule, str) or len(rule) > 200:
            return None
        known = {name: x for name, x in values.items() if isinstance(x, int)}
        try:
            return evaluate(rule, known)
        except ValueError:
            raise self.fail(
                f"{key} has {rule!r}; it takes a number, a parameter, or + - * // of them; there are: {', '.join(known)}"
            ) from None

    def _supports(self) -> dict[str, Any]:
        supports = dict(self.take("supports", dict))
        known = [*_SIZES, "layouts", "bias", "c", "alpha", "row_invariant"]
        if unknown := sorted(set(supports) - set(known)):
            hint = _hint(unknown[0], known)
            raise self.fail(f"supports knows nothing of '{unknown[0]}'" + (f"; {hint}" if hint else ""))
        if not self.some_of("layouts", LAYOUTS, [], supports):
            raise self.fail(f"supports.layouts is []; it lists some of {', '.join(LAYOUTS)}")
        for size in _SIZES:
            if isinstance(rules := supports.get(size), dict):
                numbers = self.v.numbers()
                supports[size] = {k: self._size(x, f"supports.{size}", numbers) if isinstance(x, str) else x for k, x in rules.items()}
            least, most = _range(f"{self.path}: {self.v}", supports, size)
            if not 1 <= least <= most <= _UNLIMITED:
                raise self.fail(f"supports.{size} goes from {least} to {most}; sizes are 1 to 2^32 - 1, the least first")
            if isinstance(supports.get(size), dict) and least == most:
                supports[size] = least
        for flag in ("bias", "c", "alpha"):
            if not isinstance(supports.get(flag, True), bool):
                raise self.fail(f"supports.{flag} is {supports[flag]!r}; it takes true or false")
        rows = supports.get("row_invariant", False)
        if not isinstance(rows, bool) and rows != "on vectors":
            raise self.fail(f"supports.row_invariant is {supports['row_invariant']!r}; it takes true, false or 'on vectors'")
        return supports

    def _types(self, template: Sequence[str]) -> dict[str, str]:
        given = self.take("without", dict, {})
        if unknown := sorted(set(given) - set(OPERAND_TYPES)):
            raise self.fail(f"without knows nothing of '{unknown[0]}'; types of operands are {', '.join(OPERAND_TYPES)}")
        without = {}
        for key, value in given.items():
            text, when = value if isinstance(value, list) and len(value) == 2 else (value, "")
            try:
                missing = not when or holds(when, self.v.numbers())
            except (TypeError, ValueError):
                raise self.fail(
                    f"without.{key} has {when!r}; of a list the second is a condition between parameters: + - * // % and comparisons"
                ) from None
            if missing:
                without[key] = self.reason(text, f"without.{key}")
        if silent := [key for key, text in without.items() if not text]:
            raise self.fail(f"'without.{silent[0]}' is empty; it says why")
        if self.table.get("kernel") and TYPE not in template:
            for other in OPERAND_TYPES[1:]:
                without.setdefault(other, f"its template has no argument '{TYPE}', so that it is compiled for {OPERAND_TYPES[0]}")
        if set(without) == set(OPERAND_TYPES):
            raise self.fail("without names all types of operands")
        return without


def _range(where: str, supports: Mapping[str, Any], size: str) -> tuple[int, int]:
    """``m = 1``, ``m = {min = 2, max = 8}``, or, for n, a list of values."""
    value = supports.get(size, {})
    if type(value) is int:
        return value, value
    if isinstance(value, dict) and set(value) <= {"min", "max"} and all(type(x) is int for x in value.values()):
        return value.get("min", 1), value.get("max", _UNLIMITED)
    if size == "n" and isinstance(value, list) and value and all(type(x) is int and 0 < x <= _UNLIMITED for x in value):
        return 1, _UNLIMITED
    raise ManifestError(f"{where}: supports.{size} is {value!r}; it takes a number or {{min, max}}{', or a list' if size == 'n' else ''}")


def registration(v: Variant) -> dict[str, Any]:
    """What the extension keeps of a variant."""
    return {
        "id": str(v),
        "enabled": v.enabled and v.is_listed,
        "bm": v.tile[0],
        "bn": v.tile[1],
        "threads": v.threads,
        "devices": list(v.devices),
        "needs": list(v.needs),
        "library": v.library,
        "forms": [_registration_of(f, v) for f in v.forms],
    }


def _registration_of(f: Form, v: Variant) -> dict[str, Any]:
    values = f.supports.get("n", [])
    return {
        "storages": f.storages,
        "matrices": f.ends,
        "n_values": values if isinstance(values, list) else [],
        "layouts": f.supports["layouts"],
        "bias": f.supports.get("bias", True),
        "c": f.supports.get("c", True),
        "alpha": f.supports.get("alpha", True),
        "row_invariant": f.supports.get("row_invariant", False),
        "without": dict(f.without),
        **{size: _range(str(v), f.supports, size) for size in _SIZES},
    }
