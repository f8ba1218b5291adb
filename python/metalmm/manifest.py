"""The manifest: which variants there are, what they are made of and what they support."""

from __future__ import annotations

import difflib
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
_BUILTINS = ("mps_matmul", "mps_matvec", "blas")
DEVICES = ("cpu", "metal")  # the bits of DeviceKind in csrc/core/device.h
_UNLIMITED = 2**32 - 1

_registry: dict[str, Variant] = {}
_lock = threading.Lock()
_devices: weakref.WeakSet[Device] = weakref.WeakSet()


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
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ManifestError(f"{path}: {error}") from error
    if data.get("format") != 1:
        raise ManifestError(f"{path}: format is {data.get('format')!r}; this metalmm reads format = 1")
    families = data.get("family", [])
    if not isinstance(families, list) or not all(isinstance(f, dict) and isinstance(f.get("variant", []), list) for f in families):
        raise ManifestError(f"{path}: families are [[family]] tables, each with [[family.variant]] tables")
    loaded = [_variant(path, family, entry) for family in families for entry in family.get("variant", [])]
    with _lock:
        for v in loaded:
            if v in _registry and _registry[v].source.parent != v.source.parent:
                raise ManifestError(
                    f"{path}: {v}: there is a variant of this id in {_registry[v].source.parent}; choose another family name"
                )
        for v in loaded:
            _register(v)
    return loaded


def _variant(path: Path, family: Mapping[str, Any], entry: Mapping[str, Any]) -> Variant:
    if "name" not in family or "name" not in entry:
        raise ManifestError(f"{path}: a family or variant has no name")
    merged = {**family, **entry}
    v = Variant(f"{family['name']}/{entry['name']}")

    def need(key: str, kind: type | tuple[type, ...]) -> Any:
        if key not in merged:
            raise ManifestError(f"{path}: {v}: '{key}' is missing")
        if not isinstance(merged[key], kind):
            raise ManifestError(f"{path}: {v}: '{key}' is {merged[key]!r}, of the wrong type")
        return merged[key]

    v.family, v.name = family["name"], entry["name"]
    v.reason = str(merged.get("off", ""))
    v.enabled = not v.reason
    v.builtin = str(merged.get("builtin", ""))
    if v.builtin and v.builtin not in _BUILTINS:
        raise ManifestError(f"{path}: {v}: builtin is {v.builtin!r}; it takes one of {', '.join(_BUILTINS)}")
    v.devices = tuple(merged.get("devices", DEVICES))
    if not v.devices or any(d not in DEVICES for d in v.devices):
        raise ManifestError(f"{path}: {v}: devices is {list(v.devices)}; it lists some of {', '.join(DEVICES)}")
    if v.builtin == "blas":  # nothing of it is MSL
        merged = {"source": path.name, "kernel": "", "template": [], **merged}
    v.source = path.parent / need("source", str)
    if not v.source.is_file():
        raise ManifestError(f"{path}: {v}: there is no file {v.source}")
    v.kernel = need("kernel", str)
    v.template = tuple(need("template", list))
    v.params = {key: value for key, value in merged.items() if key not in _FIELDS}
    v.threads = need("threads", int)
    if missing := [t for t in v.template if t not in (*v.params, "threads", *SPECIALIZATIONS)]:
        raise ManifestError(f"{path}: {v}: template argument '{missing[0]}' has no value")
    if bad := [key for key, value in v.params.items() if not isinstance(value, int)]:
        raise ManifestError(f"{path}: {v}: parameter '{bad[0]}' is {v.params[bad[0]]!r}; parameters are integers or booleans")
    tile = need("tile", list)
    if len(tile) != 2 or not all(isinstance(t, int) and t >= 0 for t in tile) or tile[0] == 0:
        raise ManifestError(f"{path}: {v}: tile is {tile}; it takes [bm, bn] with bm at least 1")
    v.tile = (tile[0], tile[1])
    if not 1 <= v.threads <= 1024:
        raise ManifestError(f"{path}: {v}: threads is {v.threads}; Metal allows 1 to 1024")
    v.supports = dict(need("supports", dict))
    v.baseline = tuple(merged.get("baseline", ()))
    layouts = v.supports.get("layouts", [])
    if not layouts or any(layout not in LAYOUTS for layout in [*layouts, *v.baseline]):
        raise ManifestError(f"{path}: {v}: supports.layouts is {layouts}; it lists some of {', '.join(LAYOUTS)}")
    if unknown := set(v.supports) - {*_SIZES, "layouts", "bias", "c", "alpha"}:
        raise ManifestError(f"{path}: {v}: supports knows nothing of '{sorted(unknown)[0]}'")
    for size in _SIZES:
        least, most = _range(path, v, size)
        if not 1 <= least <= most <= _UNLIMITED:
            raise ManifestError(f"{path}: {v}: supports.{size} goes from {least} to {most}; sizes are 1 to 2^32 - 1, the least first")
    for flag in ("bias", "c", "alpha"):
        if not isinstance(v.supports.get(flag, True), bool):
            raise ManifestError(f"{path}: {v}: supports.{flag} is {v.supports[flag]!r}; it takes true or false")
    return v


def _range(path: Path, v: Variant, size: str) -> tuple[int, int]:
    """``m = 1``, ``m = {min = 2, max = 8}``, or, for n, a list of values."""
    value = v.supports.get(size, {})
    if isinstance(value, int):
        return value, value
    if isinstance(value, dict) and set(value) <= {"min", "max"} and all(isinstance(x, int) for x in value.values()):
        return value.get("min", 1), value.get("max", _UNLIMITED)
    if size == "n" and isinstance(value, list) and all(isinstance(x, int) and x > 0 for x in value):
        return 1, _UNLIMITED
    raise ManifestError(
        f"{path}: {v}: supports.{size} is {value!r}; it takes a number or {{min, max}}{', or a list' if size == 'n' else ''}"
    )


def _register(v: Variant) -> None:
    ranges = {size: _range(v.source, v, size) for size in _SIZES}
    values = v.supports.get("n", [])
    _core._register_variant(
        id=str(v),
        enabled=v.enabled,
        bm=v.tile[0],
        bn=v.tile[1],
        threads=v.threads,
        n_values=values if isinstance(values, list) else [],
        layouts=sum(1 << LAYOUTS.index(layout) for layout in v.supports["layouts"]),
        bias=v.supports.get("bias", True),
        c=v.supports.get("c", True),
        alpha=v.supports.get("alpha", True),
        devices=sum(1 << DEVICES.index(d) for d in v.devices),
        builtin=v.builtin,
        bk=max(v.params.get("bk", 1), 1),
        specializes=sum(1 << i for i, name in enumerate(SPECIALIZATIONS) if name in v.template and name not in v.params),
        **ranges,
    )
    for device in list(_devices):
        _core._forget_pipelines(device, str(v))
    _registry[str(v)] = v


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
        return f'{inner}\n#line {line} "{name}"'

    return f'#line 1 "{name}"\n' + _INCLUDE.sub(replace, text.replace("#pragma once", ""))


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
