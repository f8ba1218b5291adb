"""The registry of variants: those of this package and those of users' manifests."""

from __future__ import annotations

import difflib
import hashlib
import os
import warnings
from collections.abc import Sequence
from pathlib import Path

from . import _core, kernel_source, manifest_file, old_ids
from .device import Device, open_devices
from .errors import ArgumentError, DeviceError, Error, ManifestError, UnknownVariantError
from .files import harmless
from .fork import Lock
from .strategy import Strategy
from .variant import Variant

BUILTIN = kernel_source.KERNELS / "variants.toml"

_registry: dict[str, Variant] = {}
_strategies: dict[str, Strategy] = {}  # by family
_lock = Lock()


def variants(
    spec: _core.MatmulSpec | None = None, family: str | None = None, device: Device | None = None, *, enabled: bool | None = None
) -> list[Variant]:
    """The variants of the manifests, in their order; those that support `spec`, belong to `family`, are on (`enabled`).

    `device`: those that run on it; without one, on any. Every other point of a strategy can be called by its name, too. Raises
    UnknownVariantError for a family that does not exist.
    """
    if device is not None and not isinstance(device, Device):
        raise DeviceError("device is not a metalmm.Device")
    if spec is not None and not isinstance(spec, _core.MatmulSpec):
        raise ArgumentError(f"variants: spec is {spec!r}; it takes a MatmulSpec")
    if family is not None and not (isinstance(family, str) and family in families()):
        raise UnknownVariantError(f"no family {family!r}; there are: {', '.join(sorted(families()))}")
    found = [v for v in list(_registry.values()) if v.is_listed and family in (None, v.family) and enabled in (None, v.enabled)]
    return [v for v in found if (device is None or v.runs_on(device)) and (spec is None or not v.lacks(spec))]


def families() -> set[str]:
    """Their names, of strategies without a point that ships, too."""
    return {v.family for v in list(_registry.values())} | set(_strategies)


def get(variant: str) -> Variant:
    """The variant of that id. Raises UnknownVariantError with near names."""
    if isinstance(variant, str) and variant not in _registry and (why := add_point(variant)):
        raise UnknownVariantError(why)
    try:
        return _registry[variant]
    except (KeyError, TypeError):
        raise UnknownVariantError(_unknown(variant)) from None


def read_id(name: str, where: str) -> str:
    """An id of a file, as it is called today; with a warning where that is another."""
    if name not in _registry and (new := old_ids.new_id(name)):
        warnings.warn(f"{where}: {name} is called {new} now", UserWarning, stacklevel=3)
        return new
    return name


def strategies(path: Path | None = None) -> list[Strategy]:
    """Of all manifests, or of one."""
    return [s for s in list(_strategies.values()) if path in (None, s.path)]


def add_point(variant: str) -> str:
    """Makes a point of a strategy known by its name, which no manifest lists. Empty, or why there is none; the extension asks."""
    family, _, name = variant.partition("/") if isinstance(variant, str) else ("", "", "")
    with _lock():  # also while it is read: another thread may load its manifest anew
        strategy = _strategies.get(family)
        if strategy is None or not name:
            return _unknown(variant)
        try:
            v = manifest_file.point(strategy, name)
        except ManifestError as error:
            return _unknown(variant) if name not in str(error) else f"no variant {str(error).removeprefix(f'{strategy.path}: ')}"
        v.is_listed = False
        if v not in _registry:
            _registry[str(v)] = v
            _core._register_variant(**manifest_file.registration(v))
    return ""


def kernel_sha256(variant: str, spec: _core.MatmulSpec) -> str | None:
    """Of the MSL that runs; of nothing for a library's matmul. None for a variant that there is not."""
    try:
        text = get(variant).assemble(_core._specialization(spec))
    except Error:
        return None
    return hashlib.sha256(text.encode()).hexdigest()


def _unknown(variant: str) -> str:
    if variant == "auto":
        return "'auto' is no variant: it stands for the one that metalmm chooses for a shape; 'metalmm explain auto SPEC' says which"
    if not isinstance(variant, str):
        return f"a variant is named by a string, 'family/name', not by {variant!r}"
    shown = harmless(variant)
    known = list(_registry)  # another thread may load a manifest meanwhile
    if members := [v for v in known if v.startswith(f"{variant}/")]:
        hint = f"it is a family; its members are {', '.join(members[:12])}{' and more' if len(members) > 12 else ''}"
        return f"no variant '{shown}'; {hint}"
    if new := old_ids.new_id(variant):
        return f"no variant '{shown}'; it is called {new} now"
    if (strategy := _strategies.get(variant.removesuffix("/"))) is not None:
        return f"no variant '{shown}'; names of {strategy.family} are {strategy.form}, what is at its default left out"
    near = difflib.get_close_matches(variant, known, n=4, cutoff=0.5)
    hint = f"did you mean {', '.join(near)}?" if near else "metalmm.variants() lists all"
    return f"no variant '{shown}'; {hint}"


def load_variants(path: str | os.PathLike[str]) -> list[Variant]:
    """Adds the variants of a manifest of your own; source files are relative to it. docs/add_a_variant.md walks through one.

    Loading a manifest again replaces its variants; those that it no longer has are gone. Raises ManifestError, naming the entry, for one
    that does not follow the format or would replace a variant from elsewhere.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise ArgumentError(f"load_variants: path is {path!r}; it takes a path")
    try:
        path = Path(path).resolve()
    except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: a loop of links
        raise ManifestError(f"{path}: {error}") from error
    loaded, strategies = manifest_file.read(path)
    rows = [manifest_file.registration(v) for v in loaded.values()]  # before anything is registered
    with _lock():
        for v in loaded.values():
            if v in _registry and _registry[v].manifest != path:
                raise ManifestError(f"{path}: {v}: there is a variant of this id in {_registry[v].manifest}; choose another family name")
        for family in {*strategies, *(v.family for v in loaded.values())}:
            owners = [_strategies[family].path] if family in _strategies else []
            if family in strategies:
                owners += [v.manifest for v in _registry.values() if v.family == family]
            if other := next((owner for owner in owners if owner != path), None):
                raise ManifestError(f"{path}: family {family}: {other} has one of this name; choose another")
        for v, row in zip(loaded.values(), rows, strict=True):
            _registry[str(v)] = v  # first: who builds a pipeline from now on builds the new one, and what was built before is forgotten
            _core._register_variant(**row)
            _forget_pipelines(v)
        _replace_strategies(path, strategies)
        _remove([v for v in _registry.values() if v.manifest == path and v not in loaded])
    return list(loaded.values())


def _replace_strategies(path: Path, strategies: dict[str, Strategy]) -> None:
    for name in [name for name, s in _strategies.items() if s.path == path]:
        del _strategies[name]
    _strategies.update(strategies)


def unload(path: Path) -> None:
    """Takes the variants of a manifest out again."""
    with _lock():
        _replace_strategies(path.resolve(), {})
        _remove([v for v in _registry.values() if v.manifest == path.resolve()])


def _remove(gone: Sequence[Variant]) -> None:
    for v in gone:
        del _registry[str(v)]
        _forget_pipelines(v)
        _core._unregister_variant(str(v))


def _forget_pipelines(v: Variant) -> None:
    for device in list(open_devices):
        _core._forget_pipelines(device, str(v))


def kernel_text(variant: str, specialization: int) -> tuple[Variant, kernel_source.KernelText | None, str]:
    """A variant with the MSL of that instance and the kernel's name in it; no MSL of a library's."""
    with _lock():  # the whole of one manifest, or of the one after it
        v = get(variant)
        if not v.kernel:
            return v, None, ""
        text = kernel_source.KernelText(v.assemble(specialization), str(v.form(specialization).source))
        return v, text, kernel_source.host_name(v.instance(specialization))
