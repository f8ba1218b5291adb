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
from .variant import LAYOUTS, OPERAND_TYPES, SPECIALIZATIONS, STORAGES, STORED, TYPE, Variant

_SIZES = ("m", "n", "k", "batch")
_FIELDS = {
    "source",
    "kernel",
    "template",
    "tile",
    "threads",
    "supports",
    "without",
    "off",
    "baseline",
    "library",
    "devices",
    "needs",
    "search",
    "flight",
    "busy",
    "storage",
    "weights",
    "swiglu",
}
# What a GPU of Apple may lack: simdgroup_matrix before Apple7; simd_sum and its like before Apple7 and Mac2; mps in virtual machines.
FEATURES = ("simdgroup_matrix", "simd_sum", "mps", "blas")
_UNLIMITED = 2**32 - 1
_NAME = re.compile(r"[\w.+-]+")
_KINDS = {str: "a string", int: "a whole number", list: "a list", dict: "a table", bool: "true or false"}


def read(path: Path) -> dict[str, Variant]:
    """Its variants by id. Raises ManifestError."""
    try:
        data = tomllib.loads(text_of(path))
    except (OSError, ValueError, RuntimeError) as error:  # tomllib's and Unicode's are ValueErrors; RuntimeError: a loop of links
        if isinstance(error, RecursionError):
            raise ManifestError(f"{path}: tables or arrays nested too deeply") from None
        raise ManifestError(f"{path}: {error}") from error
    if type(data.get("format")) is not int or data["format"] != 2:
        raise ManifestError(f"{path}: format is {data.get('format')!r}; this metalmm reads format = 2")
    loaded = {str(v): v for v in (entry.variant() for entry in list(_entries(path, data)))}
    if not loaded:
        raise ManifestError(f"{path}: there are no variants in it")
    return loaded


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
    lists = [table.get("template") for table in tables]
    return {name for names in lists if isinstance(names, list) for name in names if isinstance(name, str)} | {"bk"}


def _check_keys(where: str, table: Mapping[str, Any], arguments: set[str]) -> None:
    """Every key is a field or an argument of a template."""
    for key in table:
        if key not in _FIELDS and key not in arguments:
            hint = _hint(key, sorted(_FIELDS), sorted(arguments), otherwise="it is neither a field nor among the template's arguments")
            if key == "variant":
                hint = "the rows of a family are in [families.NAME.variants]"
            raise ManifestError(f"{where}: unknown key '{harmless(key)}'; {hint}")


def _entries(path: Path, data: Mapping[str, Any]) -> Iterator[_Entry]:
    """Of [kernels.NAME], [families.NAME] and the rows of [families.NAME.variants]."""
    _check_known(path, data, ("format", "reasons", "kernels", "families"))
    reasons = _table(path, "reasons", data.get("reasons", {}))
    kernels = {name: _table(path, f"kernels.{name}", k) for name, k in _table(path, "kernels", data.get("kernels", {})).items()}
    for name, template in kernels.items():
        _check_keys(f"{path}: kernels.{name}", template, _arguments(template))
        if "search" in template:
            _check_search(f"{path}: kernels.{name}", template)
        template.setdefault("kernel", name)
        template.setdefault("source", f"{name}.metal")
    for name, family in _table(path, "families", data.get("families", {})).items():
        defaults = dict(_table(path, f"families.{name}", family))
        rows = _table(path, f"families.{name}.variants", defaults.pop("variants", {}))
        if not rows:
            raise ManifestError(f"{path}: family {name} has no variants; they are the rows of [families.{name}.variants]")
        used = list[Mapping[str, Any]]()
        for row_name, row in rows.items():
            table = {**defaults, **_table(path, f"{name}/{row_name}", row)}
            base = _kernel_of(f"{path}: {name}/{row_name}", table, kernels)
            _check_keys(f"{path}: {name}/{row_name}", row, _arguments(base, defaults, row))
            used.append(base)
            for key in ("supports", "without"):
                parts = [part[key] for part in (base, defaults, row) if key in part]
                if parts and all(isinstance(part, dict) for part in parts):
                    table[key] = {k: v for part in parts for k, v in part.items()}
            yield _Entry(path, name, row_name, {**base, **table}, reasons)
        _check_keys(f"{path}: family {name}", defaults, _arguments(defaults, *used, *rows.values()))


def _kernel_of(where: str, table: dict[str, Any], kernels: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """The table that `kernel` names, taken out of `table`: its own `kernel` is the template's name. Nothing for what a library does."""
    kernel = table.pop("kernel", None)
    if kernel is None and "library" in table:
        return {}
    if kernel is None:
        raise ManifestError(f"{where}: 'kernel' is missing; it names a table [kernels.NAME]")
    if not isinstance(kernel, str):
        raise ManifestError(f"{where}: 'kernel' is {kernel!r}; it takes the name of a table [kernels.NAME]")
    if kernel not in kernels:
        hint = _hint(kernel, list(kernels), otherwise=f"there are: {', '.join(kernels) or 'none'}")
        raise ManifestError(f"{where}: there is no table [kernels.{kernel}]; {hint}")
    return kernels[kernel]


class _Entry:
    """One variant's fields, read one by one. reasons: texts by name."""

    def __init__(self, path: Path, family: object, name: object, table: dict[str, Any], reasons: Mapping[str, Any]) -> None:
        self.path, self.table, self.reasons = path, table, reasons
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
        v.enabled = not v.reason
        v.library = self.take("library", str, "")
        having = backends.with_library(v.library)
        if v.library and not having:
            raise self.fail(f"library is {v.library!r}; it takes one of {', '.join(backends.libraries())}")
        v.devices = self.some_of("devices", backends.names(), having if v.library else ())
        if "devices" in self.table and not v.devices:
            raise self.fail(f"devices is []; it lists some of {', '.join(backends.names())}")
        v.needs = self.some_of("needs", FEATURES, (v.library.partition("_")[0],) if v.library else ())
        if v.library and not set(v.devices) <= set(having):
            raise self.fail(f"devices is {list(v.devices)}; {v.library} is there on {', '.join(having)} alone")
        if v.library and "source" not in self.table:  # nothing of it is MSL
            self.table = {**self.table, "source": self.path.name, "kernel": "", "template": []}
        self._source()
        self._parameters()
        v.storage = self.take("storage", str, "dense")
        if v.storage not in STORAGES:
            raise self.fail(f"storage is {v.storage!r}; it takes one of {', '.join(STORAGES)}")
        v.weights, v.swiglu = self.take("weights", int, 1), self.take("swiglu", bool, False)
        if not 1 <= v.weights <= 3 or (v.swiglu and v.weights != 2):
            raise self.fail(f"weights is {v.weights}, swiglu {v.swiglu}; there are one to three matrices B, and two in swiglu")
        if v.library and (v.storage != "dense" or v.weights != 1):
            raise self.fail(f"storage is {v.storage}, weights {v.weights}; a library multiplies one dense B")
        v.flight, v.busy = str(self.take("flight", str, "")), str(self.take("busy", str, ""))
        for key, rule in (("flight", v.flight), ("busy", v.busy)):
            try:
                if rule:
                    evaluate(rule, v.numbers())
            except ValueError:
                raise self.fail(f"{key} is {rule!r}; it takes + - * // of parameters and whole numbers") from None
        self._supports()
        self._types()
        return v

    def _source(self) -> None:
        v = self.v
        v.source = self.path.parent / self.take("source", str)
        try:
            found = v.source.is_file()
        except (OSError, ValueError) as error:
            raise self.fail(f"source {v.source}: {error}") from error
        if not found:
            raise self.fail(f"there is no file {v.source}")
        v.kernel = self.take("kernel", str)

    def _parameters(self) -> None:
        v = self.v
        v.template = self.words("template")
        v.params = {key: self.table[key] for key in (*dict.fromkeys(v.template), "bk") if key in self.table and key not in _FIELDS}
        if TYPE in v.params:
            raise self.fail(f"'{TYPE}' is what the call decides; no parameter has that name")
        v.threads = self.take("threads", int)
        if not 1 <= v.threads <= 1024:
            raise self.fail(f"threads is {v.threads}; Metal allows 1 to 1024")
        if missing := [t for t in v.template if t not in (*v.params, "threads", TYPE, *STORED, *SPECIALIZATIONS)]:
            raise self.fail(f"template argument '{missing[0]}' has no value")
        for key, value in v.params.items():
            if not isinstance(value, int):
                raise self.fail(f"parameter '{key}' is {value!r}; parameters are integers or booleans")
            least = 1 if key == "bk" else -(2**31)
            if isinstance(value, bool) and key == "bk":
                raise self.fail(f"parameter 'bk' is {value!r}; it takes a number")
            if not isinstance(value, bool) and not least <= value <= _UNLIMITED:
                raise self.fail(f"parameter '{key}' is {value!r}; it takes {least} to 2^32 - 1")
        given = self.take("tile", list)
        tile = [self._size(t) for t in given]
        if len(tile) != 2 or not all(t is not None and least <= t <= _UNLIMITED for t, least in zip(tile, (1, 0), strict=True)):
            raise self.fail(f"tile is {given}; it takes [bm, bn] with bm at least 1, and at most 2^32 - 1")
        v.tile = (int(tile[0] or 0), int(tile[1] or 0))

    def _size(self, rule: object) -> int | None:
        """A whole number, or what an expression of parameters and whole numbers gives; None for anything else."""
        if type(rule) is int:
            return rule
        if not isinstance(rule, str) or len(rule) > 200:
            return None
        values = {"threads": self.v.threads, **self.v.params}
        try:
            return evaluate(rule, values)
        except ValueError:
            raise self.fail(
                f"tile has {rule!r}; it takes a number, a parameter, or + - * // of them; there are: {', '.join(values)}"
            ) from None

    def _supports(self) -> None:
        v = self.v
        v.supports = dict(self.take("supports", dict))
        known = [*_SIZES, "layouts", "bias", "c", "alpha"]
        if unknown := sorted(set(v.supports) - set(known)):
            hint = _hint(unknown[0], known)
            raise self.fail(f"supports knows nothing of '{unknown[0]}'" + (f"; {hint}" if hint else ""))
        if not self.some_of("layouts", LAYOUTS, [], v.supports):
            raise self.fail(f"supports.layouts is []; it lists some of {', '.join(LAYOUTS)}")
        v.baseline = tuple(v.supports["layouts"]) if self.table.get("baseline") is True else self.some_of("baseline", LAYOUTS, [])
        for size in _SIZES:
            least, most = _range(self.path, v, size)
            if not 1 <= least <= most <= _UNLIMITED:
                raise self.fail(f"supports.{size} goes from {least} to {most}; sizes are 1 to 2^32 - 1, the least first")
        for flag in ("bias", "c", "alpha"):
            if not isinstance(v.supports.get(flag, True), bool):
                raise self.fail(f"supports.{flag} is {v.supports[flag]!r}; it takes true or false")

    def _types(self) -> None:
        v, given = self.v, self.take("without", dict, {})
        if unknown := sorted(set(given) - set(OPERAND_TYPES)):
            raise self.fail(f"without knows nothing of '{unknown[0]}'; types of operands are {', '.join(OPERAND_TYPES)}")
        v.without = {key: self.reason(text, f"without.{key}") for key, text in given.items()}
        if silent := [key for key, text in v.without.items() if not text]:
            raise self.fail(f"'without.{silent[0]}' is empty; it says why")
        if v.kernel and TYPE not in v.template:
            for other in OPERAND_TYPES[1:]:
                v.without.setdefault(other, f"its template has no argument '{TYPE}', so that it is compiled for {OPERAND_TYPES[0]}")
        if not v.types:
            raise self.fail("without names all types of operands")


def search_space(path: Path) -> dict[str, dict[str, Any]]:
    """The kernels of a manifest that say what `metalmm tune --search` may try: their tables by name, `search` as
    {argument: values} and "where": conditions. Raises ManifestError."""
    found = {}
    data = tomllib.loads(text_of(path))
    for name, table in data.get("kernels", {}).items():
        if "search" in table:
            found[name] = {"kernel": name, "source": f"{name}.metal", **table}
            _check_search(f"{path}: kernels.{name}", found[name])
    return found


def _check_search(where: str, table: Mapping[str, Any]) -> None:
    search = table["search"]
    if not isinstance(search, dict):
        raise ManifestError(f"{where}: search is {search!r}; it takes a table of template arguments with lists of values")
    arguments = _arguments(table) | {"threads"}
    sample = {name: 1 for name in (*arguments, *_SIZES)}
    for key, values in search.items():
        if key != "where" and key not in arguments:
            raise ManifestError(f"{where}: search has '{key}', which is no argument of the template; {_hint(key, sorted(arguments))}")
        kind = str if key == "where" else int
        if not isinstance(values, list) or not values or not all(isinstance(x, kind) for x in values):
            raise ManifestError(
                f"{where}: search.{key} is {values!r}; it takes a list of {'conditions' if kind is str else 'whole numbers'}"
            )
        for condition in values if key == "where" else ():
            try:
                holds(condition, sample)
            except ValueError:
                raise ManifestError(
                    f"{where}: search.where has {condition!r}; it takes comparisons of + - * // % of arguments and m, n, k, batch"
                ) from None


def _range(path: Path, v: Variant, size: str) -> tuple[int, int]:
    """``m = 1``, ``m = {min = 2, max = 8}``, or, for n, a list of values."""
    value = v.supports.get(size, {})
    if type(value) is int:
        return value, value
    if isinstance(value, dict) and set(value) <= {"min", "max"} and all(type(x) is int for x in value.values()):
        return value.get("min", 1), value.get("max", _UNLIMITED)
    if size == "n" and isinstance(value, list) and value and all(type(x) is int and 0 < x <= _UNLIMITED for x in value):
        return 1, _UNLIMITED
    raise ManifestError(
        f"{path}: {v}: supports.{size} is {value!r}; it takes a number or {{min, max}}{', or a list' if size == 'n' else ''}"
    )


def registration(v: Variant) -> dict[str, Any]:
    """What the extension keeps of a variant."""
    values = v.supports.get("n", [])
    return {
        "id": str(v),
        "enabled": v.enabled,
        "bm": v.tile[0],
        "bn": v.tile[1],
        "threads": v.threads,
        "n_values": values if isinstance(values, list) else [],
        "layouts": list(v.supports["layouts"]),
        "bias": v.supports.get("bias", True),
        "c": v.supports.get("c", True),
        "alpha": v.supports.get("alpha", True),
        "devices": list(v.devices),
        "needs": list(v.needs),
        "library": v.library,
        "without": v.without,
        "bk": v.params.get("bk", 1),
        "format": v.storage.partition(":")[0],
        "canonical": v.storage.endswith(":canonical"),
        "parts": v.weights,
        "swiglu": v.swiglu,
        "specializes": [name for name in SPECIALIZATIONS if name in v.template and name not in v.params],
        **{size: _range(v.source, v, size) for size in _SIZES},
    }
