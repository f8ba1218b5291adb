"""The manifest: which variants there are, what they are made of and what they support."""

from __future__ import annotations

import difflib
import os
import re
import threading
import tomllib
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import _core, compiler
from .errors import DeviceError, ManifestError

if TYPE_CHECKING:
    from .device import Device

# What a kernel can be compiled for, beside its parameters: template arguments whose values come from the call. The bits of
# Specialization in csrc/core/matmul.h. ta, tb: transposes; align_*: a whole number of tiles (bm, bn, and the parameter bk);
# vec: A and B can be read as half4 wherever a row begins.
SPECIALIZATIONS = ("ta", "tb", "align_m", "align_n", "align_k", "vec")
LAYOUTS = ("nn", "tn", "nt", "tt")  # the index is transpose_a + 2 * transpose_b
_SIZES = ("m", "n", "k", "batch")
_FIELDS = {
    "name",
    "source",
    "kernel",
    "template",
    "tile",
    "threads",
    "supports",
    "off",
    "baseline",
    "variant",
    "builtin",
    "devices",
}
_BUILTINS = {"mps_matmul": ("metal",), "mps_matvec": ("metal",), "blas": ("cpu",)}  # and the devices that have them
DEVICES = ("cpu", "metal")  # the bits of DeviceKind in csrc/core/device.h
_UNLIMITED = 2**32 - 1
_NAME = re.compile(r"[\w.+-]+")

_registry: dict[str, Variant] = {}
_lock = threading.RLock()
_devices: weakref.WeakSet[Device] = weakref.WeakSet()


def _after_fork() -> None:
    global _lock
    _lock = threading.RLock()  # a thread that is not here may hold it


os.register_at_fork(after_in_child=_after_fork)


class Variant(str):
    """A variant's id, ``family/name``, that knows its manifest entry.

    Attributes: family, name; enabled and, if not, reason; source (path of the .metal file), kernel (template in it),
    template (names of its arguments) and params (their values); tile (bm, bn), threads; supports; baseline (layouts
    whose shapes are compared with it); devices it runs on; builtin, if it is a library's matmul and no kernel of ours.
    """

    family: str
    name: str
    enabled: bool
    reason: str
    source: Path
    kernel: str
    template: tuple[str, ...]
    params: dict[str, int | bool]
    tile: tuple[int, int]
    threads: int
    supports: dict[str, Any]
    baseline: tuple[str, ...]
    builtin: str
    devices: tuple[str, ...]

    def lacks(self, spec: _core.MatmulSpec) -> str:
        """Empty, or why this variant does not support the operation."""
        return _core._lacks(self, spec)

    def instance(self, specialization: int) -> str:
        """The kernel's template-id, such as ``columns<64, 128, 128, true, 8>``; specialization: bits of SPECIALIZATIONS."""
        chosen = {name: bool(specialization >> i & 1) for i, name in enumerate(SPECIALIZATIONS)}
        values = {**chosen, "threads": self.threads, **self.params}
        return f"{self.kernel}<{', '.join(_cpp(values[name]) for name in self.template)}>"


def _cpp(value: int | bool) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def variants(
    spec: _core.MatmulSpec | None = None, family: str | None = None, device: Device | None = None, *, enabled: bool | None = None
) -> list[Variant]:
    """The known variants, in manifest order; those that support `spec`, belong to `family`, are on (`enabled`).

    `device`: those that run on it; without one, on any. Raises UnknownVariantError for a family that does not exist.
    """
    if device is not None and not isinstance(device, _core.Device):
        raise DeviceError("device is not a metalmm.Device")
    families = {v.family for v in _registry.values()}
    if family is not None and family not in families:
        from .errors import UnknownVariantError

        raise UnknownVariantError(f"no family '{family}'; there are: {', '.join(sorted(families))}")
    found = [v for v in _registry.values() if family in (None, v.family) and enabled in (None, v.enabled)]
    return [v for v in found if (device is None or device.name in v.devices) and (spec is None or not v.lacks(spec))]


def get(variant: str) -> Variant:
    """The variant of that id. Raises UnknownVariantError with near names."""
    from .errors import UnknownVariantError

    try:
        return _registry[variant]
    except KeyError:
        raise UnknownVariantError(unknown_message(variant)) from None


def unknown_message(variant: str) -> str:
    if members := [v for v in _registry if v.startswith(f"{variant}/")]:
        hint = f"it is a family; its members are {', '.join(members[:12])}{' and more' if len(members) > 12 else ''}"
        return f"no variant '{variant}'; {hint}"
    near = difflib.get_close_matches(variant, _registry, n=4, cutoff=0.5)
    hint = f"did you mean {', '.join(near)}?" if near else "metalmm.variants() lists all"
    return f"no variant '{variant}'; {hint}"


def load_variants(path: str | Path) -> list[Variant]:
    """Adds the variants of a manifest of your own; source files are relative to it. docs/add_a_variant.md walks through one.

    Loading a manifest again replaces its variants. Raises ManifestError, naming the entry, for one that does not follow
    the format or would replace a variant from elsewhere.
    """
    path = Path(path).resolve()
    try:
        data = tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, ValueError) as error:
        raise ManifestError(f"{path}: {error}") from error
    except RecursionError:
        raise ManifestError(f"{path}: tables or arrays nested too deeply") from None
    if data.get("format") != 1:
        raise ManifestError(f"{path}: format is {data.get('format')!r}; this metalmm reads format = 1")
    families = data.get("family", [])
    tables = isinstance(families, list) and all(isinstance(f, dict) and isinstance(f.get("variant", []), list) for f in families)
    if not tables or not all(isinstance(entry, dict) for f in families for entry in f.get("variant", [])):
        raise ManifestError(f"{path}: families are [[family]] tables, each with [[family.variant]] tables")
    if unknown := set(data) - {"format", "family"}:
        raise ManifestError(f"{path}: '{sorted(unknown)[0]}' is no part of a manifest; it has format and [[family]] tables")
    loaded: dict[str, Variant] = {}
    for family in families:
        entries = [_Entry(path, family, entry) for entry in family.get("variant", [])]
        _check_keys(path, family)
        for entry in entries:
            v = entry.variant()
            if v in loaded:
                raise ManifestError(f"{path}: {v}: there are two variants of this id in the file")
            loaded[v] = v
    rows = [_registration(v) for v in loaded.values()]  # before anything is registered
    with _lock:
        for v in loaded.values():
            if v in _registry and _registry[v].source.parent != v.source.parent:
                raise ManifestError(
                    f"{path}: {v}: there is a variant of this id in {_registry[v].source.parent}; choose another family name"
                )
        for v, row in zip(loaded.values(), rows, strict=True):
            _core._register_variant(**row)
            for device in list(_devices):
                _core._forget_pipelines(device, str(v))
            _registry[str(v)] = v
    return list(loaded.values())


def _check_keys(path: Path, family: Mapping[str, Any]) -> None:
    """Every key is a field, or a template argument of some variant of the family."""
    entries = family.get("variant", [])
    lists = [table.get("template") for table in (family, *entries)]
    arguments = {name for names in lists if isinstance(names, list) for name in names if isinstance(name, str)} | {"bk"}
    for table in (family, *entries):
        for key in table:
            if key in _FIELDS or key in arguments:
                continue
            near = difflib.get_close_matches(key, [*_FIELDS, *arguments], n=1)
            hint = f"did you mean '{near[0]}'?" if near else "it is neither a field nor among the template's arguments"
            where = f"{family['name']}/{table['name']}" if table is not family else f"family {family['name']}"
            raise ManifestError(f"{path}: {where}: unknown key '{key}'; {hint}")


class _Entry:
    """One variant's tables, read field by field."""

    def __init__(self, path: Path, family: Mapping[str, Any], entry: Mapping[str, Any]) -> None:
        self.path = path
        for table in (family, entry):
            name = table.get("name")
            if not isinstance(name, str) or not _NAME.fullmatch(name):
                raise ManifestError(f"{path}: a family or variant has the name {name!r}; it takes letters, digits, and _ . + -")
        self.table = {**family, **entry}
        self.v = Variant(f"{family['name']}/{entry['name']}")
        self.v.family, self.v.name = family["name"], entry["name"]

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

    def variant(self) -> Variant:
        v = self.v
        v.reason = self.take("off", str, "")
        v.enabled = not v.reason
        v.builtin = self.take("builtin", str, "")
        if v.builtin and v.builtin not in _BUILTINS:
            raise self.fail(f"builtin is {v.builtin!r}; it takes one of {', '.join(_BUILTINS)}")
        v.devices = self.some_of("devices", DEVICES, _BUILTINS.get(v.builtin, DEVICES))
        if not v.devices:
            raise self.fail(f"devices is []; it lists some of {', '.join(DEVICES)}")
        if v.builtin and not set(v.devices) <= set(_BUILTINS[v.builtin]):
            raise self.fail(f"devices is {list(v.devices)}; {v.builtin} is there on {', '.join(_BUILTINS[v.builtin])} alone")
        if v.builtin == "blas":  # nothing of it is MSL
            self.table = {"source": self.path.name, "kernel": "", "template": [], **self.table}
        self._source()
        self._parameters()
        self._supports()
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
        v.params = {key: value for key, value in self.table.items() if key not in _FIELDS}
        v.threads = self.take("threads", int)
        if not 1 <= v.threads <= 1024:
            raise self.fail(f"threads is {v.threads}; Metal allows 1 to 1024")
        if missing := [t for t in v.template if t not in (*v.params, "threads", *SPECIALIZATIONS)]:
            raise self.fail(f"template argument '{missing[0]}' has no value")
        for key, value in v.params.items():
            if not isinstance(value, int):
                raise self.fail(f"parameter '{key}' is {value!r}; parameters are integers or booleans")
            least = 1 if key == "bk" else -(2**31)
            if not isinstance(value, bool) and not least <= value <= _UNLIMITED:
                raise self.fail(f"parameter '{key}' is {value!r}; it takes {least} to 2^32 - 1")
        tile = self.take("tile", list)
        if len(tile) != 2 or not all(type(t) is int and least <= t <= _UNLIMITED for t, least in zip(tile, (1, 0), strict=True)):
            raise self.fail(f"tile is {tile}; it takes [bm, bn] with bm at least 1, and at most 2^32 - 1")
        v.tile = (tile[0], tile[1])

    def _supports(self) -> None:
        v = self.v
        v.supports = dict(self.take("supports", dict))
        if not self.some_of("layouts", LAYOUTS, [], v.supports):
            raise self.fail(f"supports.layouts is []; it lists some of {', '.join(LAYOUTS)}")
        v.baseline = self.some_of("baseline", LAYOUTS, [])
        if unknown := sorted(set(v.supports) - {*_SIZES, "layouts", "bias", "c", "alpha"}):
            raise self.fail(f"supports knows nothing of '{unknown[0]}'")
        for size in _SIZES:
            least, most = _range(self.path, v, size)
            if not 1 <= least <= most <= _UNLIMITED:
                raise self.fail(f"supports.{size} goes from {least} to {most}; sizes are 1 to 2^32 - 1, the least first")
        for flag in ("bias", "c", "alpha"):
            if not isinstance(v.supports.get(flag, True), bool):
                raise self.fail(f"supports.{flag} is {v.supports[flag]!r}; it takes true or false")


_KINDS = {str: "a string", int: "a whole number", list: "a list", dict: "a table"}


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


def _registration(v: Variant) -> dict[str, Any]:
    """What the extension keeps of a variant."""
    values = v.supports.get("n", [])
    return {
        "id": str(v),
        "enabled": v.enabled,
        "bm": v.tile[0],
        "bn": v.tile[1],
        "threads": v.threads,
        "n_values": values if isinstance(values, list) else [],
        "layouts": sum(1 << LAYOUTS.index(layout) for layout in v.supports["layouts"]),
        "bias": v.supports.get("bias", True),
        "c": v.supports.get("c", True),
        "alpha": v.supports.get("alpha", True),
        "devices": sum(1 << DEVICES.index(d) for d in v.devices),
        "builtin": v.builtin,
        "bk": v.params.get("bk", 1),
        "specializes": sum(1 << i for i, name in enumerate(SPECIALIZATIONS) if name in v.template and name not in v.params),
        **{size: _range(v.source, v, size) for size in _SIZES},
    }


_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"]+)"[^\n]*$', re.MULTILINE)


def inline_includes(path: Path) -> str:
    """A source file with its quoted includes in place, each once, so that one text is all a compiler needs."""
    return inline_text(path.read_text(), str(path), [path.parent], {path})


def inline_text(text: str, name: str, folders: Sequence[Path], seen: set[Path]) -> str:
    """The same for text; includes are looked for beside the file that has them, in `folders`, then among our own headers."""

    def replace(match: re.Match[str]) -> str:
        candidates = [folder / match[1] for folder in (*folders, compiler.KERNELS / "include")]
        target = next((c.resolve() for c in candidates if c.is_file()), None)
        if target is None:
            return match[0]
        if target in seen:
            return ""
        seen.add(target)
        line = text[: match.start()].count("\n") + 2
        inner = inline_text(target.read_text(), str(target), [target.parent, *folders], seen)
        return f"{inner}\n{compiler.line_marker(line, name)}"

    return f"{compiler.line_marker(1, name)}\n" + _INCLUDE.sub(replace, text.replace("#pragma once", ""))


def assemble(v: Variant, specialization: int) -> str:
    """The MSL source of one pipeline: shared headers inlined and the one instantiation added, named after the variant's id."""
    if not v.kernel:
        return ""
    instance = v.instance(specialization)
    return f'{inline_includes(v.source)}\ntemplate [[host_name("{_host_name(v)}")]] [[kernel]] decltype({instance}) {instance};\n'


def _host_name(v: Variant) -> str:
    return re.sub(r"\W", "_", v)  # nobody says that Metal takes a '/'


def build_pipeline(device: Device, variant: str, specialization: int) -> tuple[str, str, str]:
    """Code of a variant as the device takes it, the file for its machine code and the kernel's name in it; the extension asks
    for it on the first use."""
    v = get(variant)
    code, archive = device._code(assemble(v, specialization), _host_name(v), str(v.source))
    return code, archive, _host_name(v)
