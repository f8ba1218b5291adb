"""Which variant for which shape: what `metalmm tune` measured, kept by device, and what "auto" makes of it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import itertools
import math
import os
import stat
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from . import _core, backends, files, manifest, manifest_file
from .backends.protocol import Splits, Tiles
from .device import Device, cpu_name
from .errors import Error, UnsupportedError
from .fork import Lock
from .kernel_source import resource
from .variant import LAYOUTS, RowBits, Variant, end_of, kind_of

SCHEMA, VERSION = "metalmm-tuning", 1
_FEW_ALIKE = 8  # with row_invariant, for up to so many rows there is one choice
_NEAR = 2.0  # n, k and batch of a shape that a choice may be taken from: within this factor
_NEAR_A_WINNER = 1.1  # n and k of a row of `winners`, likewise: farther off, what shares K best is faster (docs/lab/cuda.md)


_Takes = Callable[[str], bool]  # whether the variant of that id takes the operation


class TuningError(Error, ValueError):
    """A tuning file that cannot be used."""


@dataclass(frozen=True)
class Key:
    """What a choice goes by: sizes, layout, epilogue and type. alpha: other than 1; beta: other than 0."""

    m: int
    n: int
    k: int
    batch: int
    layout: str
    bias: bool
    alpha: bool
    beta: bool
    dtype: str
    storage: str = "dense"
    also_n: tuple[int, ...] = ()
    swiglu: bool = False
    row_invariant: bool = False

    @staticmethod
    def of(spec: _core.MatmulSpec) -> Key:
        """With row_invariant for all m, batches and epilogues one."""
        if spec.row_invariant:
            of_b = (spec.dtype, spec.b_storage, spec.also_n, spec.swiglu, True)
            return Key(_FEW_ALIKE, spec.n, spec.k, 1, spec.layout, False, False, False, *of_b)
        epilogue = (spec.bias, spec.alpha != 1.0, spec.beta != 0.0)
        return Key(spec.m, spec.n, spec.k, spec.batch, spec.layout, *epilogue, spec.dtype, spec.b_storage, spec.also_n, spec.swiglu)

    def distance(self, other: Key) -> float:
        """How far apart in n, k and batch at most, as powers of two; infinite for what is another kind of operation."""

        def kind(key: Key) -> tuple[Any, ...]:
            return key.m, key.layout, key.dtype, key.batch > 1, key.storage, key.also_n, key.swiglu, key.row_invariant

        same = kind(self) == kind(other)
        sizes = ((self.n, other.n), (self.k, other.k), (self.batch, other.batch))
        return max(abs(math.log2(a / b)) for a, b in sizes) if same else math.inf

    def epilogues_apart(self, other: Key) -> int:
        return sum(getattr(self, name) != getattr(other, name) for name in ("bias", "alpha", "beta"))


@dataclass(frozen=True)
class Choice:
    """A variant for a shape.

    Attributes:
        median_ms: What it took.
        kernel_sha256: Of the MSL that was measured.
        time: When.
    """

    key: Key
    variant: str
    kernel_sha256: str | None
    median_ms: float
    time: str = ""

    @staticmethod
    def of(spec: _core.MatmulSpec, variant: str, median_ms: float, time: str) -> Choice:
        key = Key.of(spec)
        return Choice(key, variant, manifest.kernel_sha256(variant, spec_of(key)), median_ms, time)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(data: dict[str, Any]) -> Choice:
        key = Key(**{**data["key"], "also_n": tuple(data["key"].get("also_n", ()))})
        spec_of(key)  # raises for sizes that are none
        if key.layout not in LAYOUTS:
            raise ValueError(f"layout is {key.layout!r}")
        if not math.isfinite(float(data["median_ms"])):
            raise ValueError(f"median_ms is {data['median_ms']!r}")
        return Choice(
            key,
            manifest.read_id(str(data["variant"]), "the tuning file is of an earlier metalmm, tune again"),
            data["kernel_sha256"],
            float(data["median_ms"]),
            str(data["time"]),
        )


def device_key(device: Device) -> str:
    """What choices are kept under: the kind of device and the hardware."""
    name = device.info.get("name") or cpu_name()
    return f"{device.name}: {name}" + (f", {device.threads} threads" if device.threads else "")


def default_path() -> Path:
    """$METALMM_TUNING, else tuning.json in the user's own data folder for metalmm."""
    if chosen := os.environ.get("METALMM_TUNING"):
        return Path(chosen)
    try:
        if sys.platform == "darwin":
            return Path.home() / "Library" / "Application Support" / "metalmm" / "tuning.json"
        return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "metalmm" / "tuning.json"
    except RuntimeError:
        raise TuningError("there is no home folder to keep a tuning in; set METALMM_TUNING to a file") from None


def read(path: Path) -> dict[str, list[Choice]]:
    """Choices by device. Raises TuningError."""
    try:
        data = files.read_json(path, SCHEMA, VERSION)
        return {key: [Choice.from_json(c) for c in choices] for key, choices in data["devices"].items()}
    except files.FileError as error:
        raise TuningError(str(error)) from None
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError, Error) as error:
        raise TuningError(f"{path}: a part of it is missing or of another kind: {error!r}") from error


def write(path: Path, device: str, choices: Iterable[Choice]) -> None:
    """Adds to the file what was chosen on that device; what it says of other shapes and devices stays. Raises TuningError, OSError."""
    path = Path(os.path.realpath(path))  # by whichever name: one file has one lock
    path.parent.mkdir(parents=True, exist_ok=True)
    with _alone(path):
        kept = read(path) if path.exists() else {}
        merged = {c.key: c for c in [*kept.get(device, []), *choices]}
        kept[device] = list(merged.values())
        devices = {key: [c.as_json() for c in all_of_it] for key, all_of_it in kept.items()}
        files.write_json(path, {"schema": SCHEMA, "version": VERSION, "devices": devices})


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Other processes that write there wait; the lock is on a file beside it, for the file itself is replaced."""
    place = path.with_name(f".{path.name}.lock")
    try:  # neither through a link, which would be another's file, nor waiting for whoever reads a FIFO
        lock = os.open(place, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.EISDIR):
            raise
        raise TuningError(f"{place}: {error.strerror}; it is the lock of {path.name} and takes a plain file: remove it") from error
    try:
        if not stat.S_ISREG(os.fstat(lock).st_mode):
            raise TuningError(f"{place} is no plain file; it is the lock of {path.name}: remove it")
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


_lock = Lock()
_loaded: dict[str, list[Choice]] | None = None  # None: nothing was looked for yet
_path: Path | None = None


def load_tuning(path: str | os.PathLike[str] | None = None) -> int:
    """Makes `"auto"` go by that file, which `metalmm tune` wrote; by default $METALMM_TUNING, else the one in the user's data folder.

    Returns how many choices it holds. Without a call, the default file is read when "auto" is first asked. Raises TuningError for one that
    is not there or cannot be read.
    """
    global _loaded, _path
    if path is not None and not isinstance(path, (str, os.PathLike)):
        raise TuningError(f"load_tuning: path is {path!r}; it takes a path")
    chosen = Path(path) if path is not None else default_path()
    found = read(chosen)
    with _lock():
        _loaded, _path = found, chosen
    _core._forget_choices()
    return sum(len(choices) for choices in found.values())


def _choices(device: Device) -> list[Choice]:
    global _loaded, _path
    with _lock():
        if _loaded is None:
            _path = default_path()
            if os.environ.get("METALMM_TUNING") and not _path.exists():
                raise TuningError(f"METALMM_TUNING is {_path}, and there is no such file; `metalmm tune` writes one, or unset it")
            _loaded = read(_path) if _path.exists() else {}
        return _loaded.get(device_key(device), [])


@functools.cache
def _collected() -> dict[str, list[Choice]]:
    """What `metalmm doctor --share` wrote on the machines of others, by device."""
    found = dict[str, list[Choice]]()
    for path in sorted(resource("docs/lab/gpus").glob("*.json")):
        try:
            for key, choices in read(path).items():
                found.setdefault(key, []).extend(choices)
        except TuningError as error:  # of another version, say: others' files stop nobody
            warnings.warn(f"metalmm: {error}; the file is left out", stacklevel=2)
    return found


def usable(name: str, device: Device | str, spec: _core.MatmulSpec, libraries: bool = True) -> bool:
    """Whether there is such a variant, and it takes the operation on that device (of a name, on some of its kind)."""
    try:
        v = manifest.get(name)
    except Error:
        return False
    return v.runs_on(device) and not v.lacks(spec) and (libraries or not v.library)


def choose(device: Device, spec: _core.MatmulSpec, libraries: bool = True) -> tuple[str, str]:
    """The variant that "auto" stands for, and why. It is the first that there is of these:

    - What was tuned for this very shape on this device.
    - What was tuned for the nearest one of its kind, n, k and batch within a factor of two.
    - The same of what others measured on a GPU of this name (docs/lab/gpus).
    - What was measured best on such a device at n and k within a tenth of its own; not with row_invariant.
    - The first of the device's preferred variants that takes it. Of many rows of A that may be the tile with which the cores are done first,
      of few rows what shares K best.
    - Any that is on.
    - Any.

    With row_invariant it is one of those whose rows are alike, for m of 8 and of 16 together, and the same for all batches and epilogues. From m
    of 9 on it may be another point whose rows have the same bits (Variant.row_bits), where the first takes eight rows at a time. What was tuned
    for a near shape is not taken then.

    libraries: whether it may be a library's matmul. One that does not take the operation is never chosen. Raises UnsupportedError where none takes it, TuningError for a file that is broken.
    """
    stand_in, takes = _stands_for(spec, device, libraries)
    return _for_more_rows(device, spec, *_choose(device, stand_in, takes), takes)


def _for_more_rows(device: Device, spec: _core.MatmulSpec, name: str, why: str, takes: _Takes) -> tuple[str, str]:
    """With row_invariant and more rows than a variant takes at a time: the fastest point whose rows have the same bits."""
    if spec.row_invariant and spec.m > _FEW_ALIKE and (v := manifest.get(name)).tile[0] <= _FEW_ALIKE:
        _, other = _best_of_most_rows(device, spec, takes).get(v.row_bits, (0.0, name))
        if other != name:
            return other, f"for more than {_FEW_ALIKE} rows; a row has the bits of {name}, the choice for fewer: {why}"
    return name, why


def _choose(device: Device, spec: _core.MatmulSpec, takes: _Takes) -> tuple[str, str]:
    """The first of what `choose` lists, and why."""
    key = Key.of(spec)

    def nearest(choices: Iterable[Choice]) -> list[Choice]:
        near = (c for c in choices if (c.key == key if key.row_invariant else key.distance(c.key) <= math.log2(_NEAR)))
        return sorted(near, key=lambda c: (c.key != key, key.distance(c.key), key.epilogues_apart(c.key)))

    tuned = [(c, f"in {_path}") for c in nearest(_choices(device))]
    tuned += [(c, "by others, in docs/lab/gpus") for c in nearest(_collected().get(device_key(device), []))]
    stale = []
    for c, where in tuned:
        if not takes(c.variant):
            continue
        if c.kernel_sha256 != manifest.kernel_sha256(c.variant, spec_of(c.key)):
            stale.append(c.variant)
            continue
        what = "this shape" if c.key == key else f"the near shape {spec_of(c.key)!r}"
        return c.variant, f"tuned on {what}: {c.median_ms:.3g} ms, {c.time}, {where}" + _stale_text(stale)

    def measured_at(storage: str, layout: str, n: int, k: int, v: Variant) -> Key:
        limits = v.supports.get("m")  # what takes no m of 1 was measured at m of 2 and 8, and is as good between
        m = key.m if isinstance(limits, Mapping) and limits.get("min", 1) > 1 and key.m <= 8 else 1
        return Key(m, n, k, 1, layout, False, False, False, "float16", storage)

    measured = [
        (measured_at(stored, layout, n, k, manifest.get(name)), name)
        for stored, layout, n, k, name in (() if spec.row_invariant else device.backend.winners)
        if takes(name)
    ]
    for distance, name, n, k in sorted((key.distance(at), name, at.n, at.k) for at, name in measured):
        if distance <= math.log2(_NEAR_A_WINNER):
            return name, f"measured best on n={n} k={k} on such a device; not tuned on this one" + _stale_text(stale)
    name, why = _preferred(device, spec, takes)
    if name:
        return name, f"nothing is tuned near it on {device_key(device)}; {why}" + _stale_text(stale)
    if name := _first(spec, takes, device):
        return name, f"nothing is tuned near it, {_FIRST}"
    raise UnsupportedError(f"auto: no variant on device {device.name} takes {spec!r}{_way_out(spec)}")


def _way_out(spec: _core.MatmulSpec) -> str:
    if not spec.also_n:
        return ""
    if spec.row_invariant and spec.dtype == "float32":
        return "; with row_invariant and float32 device cpu alone has fused variants: multiply by each matrix apart"
    return "; fused variants take m up to 8, some on device cuda up to 16: multiply by each matrix apart" if spec.m > 8 else ""


_FIRST = "none of the preferred takes it; the first in the manifest that does"


def _first(spec: _core.MatmulSpec, takes: _Takes, device: Device | None = None) -> str:
    """One that is on, else any."""
    ordered = [*manifest.variants(spec, device=device, enabled=True), *manifest.variants(spec, device=device)]
    return next((str(v) for v in ordered if takes(str(v))), "")


def _preferred(device: Device, spec: _core.MatmulSpec, takes: _Takes) -> tuple[str, str]:
    """What the device's rule takes, and why; empty where nothing of it does."""
    return next(_ranked(device, spec, takes), ("", ""))


def _ranked(device: Device, spec: _core.MatmulSpec, takes: _Takes) -> Iterator[tuple[str, str]]:
    """What the device's rule takes, why, and what it would take without that, and so on."""
    for offered in _offered(device, spec):
        if isinstance(offered, Splits):
            yield from _splits(device, spec, offered.in_flight, [manifest.get(v) for v in offered.variants if takes(v)])
        elif isinstance(offered, Tiles):
            yield from _tiles(device, spec, offered, takes)
        elif takes(offered):
            yield offered, f"the first of device {device.name}'s preferred that takes it"


def _offered(device: Device, spec: _core.MatmulSpec) -> Iterator[str | Splits | Tiles]:
    """What the device prefers for such an operation."""
    storage, end = kind_of(spec.b_storage), end_of(spec.also_n, spec.swiglu)
    for of_storage, of_end, offered, *most in device.backend.preferred:
        if of_storage in ("", storage) and of_end in ("", end) and spec.m <= min(most, default=spec.m):
            yield offered


def choose_unseen(backend: str, spec: _core.MatmulSpec) -> tuple[str, str]:
    """What the rule takes on a device of that kind, of which nobody here knows more than that; no library's matmul. Raises UnsupportedError."""
    device: Any = SimpleNamespace(name=backend, backend=backends.get(backend), info={})
    stand_in, usable_there = _stands_for(spec, backend, libraries=False)

    def takes(name: str) -> bool:
        return usable_there(name) and manifest_file.RARE.isdisjoint(manifest.get(name).needs)

    name, why = _preferred(device, stand_in, takes)
    if not name:
        name, why = _first(stand_in, takes), _FIRST
    if not name:
        raise UnsupportedError(f"auto: nothing that device {backend} has takes {stand_in!r}{_way_out(spec)}")
    return _for_more_rows(device, spec, name, why, takes)


def _tiles(device: Device, spec: _core.MatmulSpec, tiles: Tiles, takes: _Takes) -> Iterator[tuple[str, str]]:
    """Those with which the cores are done first, and why. With row_invariant in the order of that time, which is for eight rows, by the best time
    for sixteen among those of the same bits."""
    times = _times(device, spec, tiles, takes)
    most = _best_of_most_rows(device, spec, takes) if spec.row_invariant else {}

    def cost(name: str) -> tuple[float, str]:
        return times[name][0] * (most[manifest.get(name).row_bits][0] if most else 1.0), name

    for name in sorted(times, key=cost):
        ns, of_core = times[name]
        bm, bn = manifest.get(name).tile
        what = f"{math.ceil(of_core)} of {bm} x {bn} results, {tiles.ns[name][3]} at once"
        yield name, f"the busiest of {_cores(device)} cores has {what}, whose products take it about {ns / 1000:.3g} µs"


def _cores(device: Device) -> int:
    return device.backend.cores(device) or device.backend.usual_cores


def _times(device: Device, spec: _core.MatmulSpec, tiles: Tiles, takes: _Takes) -> dict[str, tuple[float, float]]:
    """By variant what the busiest core takes, in ns, and how many tiles it has; none in float32, of which tensor cores have no products."""
    cores, found = _cores(device), {}
    for name, of_tile in tiles.ns.items() if spec.dtype != "float32" else ():
        if takes(name):
            of_core, steps = Tiles.work(manifest.get(name), spec, cores)
            found[name] = (float(Tiles.took(of_tile, of_core, steps)), of_core)
    return found


def _best_of_most_rows(device: Device, spec: _core.MatmulSpec, takes: _Takes) -> dict[RowBits, tuple[float, str]]:
    """By a row's bits the variant that takes the least time for the most rows of row_invariant, and that time in ns. One that takes them all at
    once comes first: the others' numbers are of few rows."""
    key = Key.of(spec)
    tables = [offered.ns for offered in _offered(device, spec_of(key)) if isinstance(offered, Tiles)]  # those for few rows first
    all_of_them = Tiles({name: ns for table in tables for name, ns in table.items()})
    times = _times(device, spec_of(replace(key, m=_core._ROWS_ALIKE)), all_of_them, takes)
    found = dict[RowBits, tuple[float, str]]()
    for name in sorted(times, key=lambda name: (manifest.get(name).tile[0] <= _FEW_ALIKE, times[name][0])):
        found.setdefault(manifest.get(name).row_bits, (times[name][0], name))
    return found


def _splits(device: Device, spec: _core.MatmulSpec, in_flight: float, variants: Sequence[Variant]) -> Iterator[tuple[str, str]]:
    """Those that share K best, and why. A round is what all threads load of B before they use the first of it.

    The best has the largest product of these (fitted on an H200 and an H100, docs/lab/cuda.md):
    - What a core has of B in flight, up to `in_flight`.
    - The part of the loads that is in B, to the power of 1 / 4: a load that is skipped costs little.
    - 0.97 for each time that K is halved, 0.995 for each round.
    """
    cores, found = _cores(device), []
    for v in variants:
        if loads := v.loads(spec):
            rounds, _, together = loads
            each = v.loaded(spec) / rounds / cores
            used = v.loaded(spec) / (rounds * together) * -(-spec.m // v.tile[0])  # each group of rows loads B
            score = min(1.0, each / in_flight) * used**0.25 * 0.97 ** math.log2(v.params["split"]) * 0.995**rounds
            found.append(
                (
                    score,
                    str(v),
                    f"{each / 1000:.3g} KB of B in flight a core, {rounds} round{'s' if rounds > 1 else ''} of loads; {in_flight / 1000:g} KB are wanted",
                )
            )
    for _, name, why in sorted(found, key=lambda choice: -choice[0]):
        yield name, why


def _stale_text(stale: list[str]) -> str:
    return f" (a choice of {stale[0]} is not used: its kernel has changed since; tune again)" if stale else ""


def spec_of(key: Key) -> _core.MatmulSpec:
    """An operation of that key; the factors stand for any."""
    return _core.MatmulSpec(
        key.m,
        key.n,
        key.k,
        key.batch,
        transpose_a=key.layout[0] == "t",
        transpose_b=key.layout[1] == "t",
        bias=key.bias,
        alpha=0.5 if key.alpha else 1.0,
        beta=0.5 if key.beta else 0.0,
        dtype=key.dtype,
        b_storage=key.storage,
        also_n=key.also_n,
        swiglu=key.swiglu,
        row_invariant=key.row_invariant,
    )


def _stands_for(spec: _core.MatmulSpec, device: Device | str, libraries: bool) -> tuple[_core.MatmulSpec, _Takes]:
    """The operation for which a variant is chosen, and which variants it may be. With row_invariant it is the same for every m and batch, has
    all of an epilogue, and variants must take it as a usual one, too. Raises UnsupportedError for more rows than that."""
    must_take = [spec]
    if spec.row_invariant:
        if spec.m > (most := _core._ROWS_ALIKE):
            raise UnsupportedError(f"auto: m is {spec.m}; with row_invariant it is 1 to {most}: multiply so many rows at a time")
        key = Key.of(spec)
        whole = key if key.also_n else replace(key, bias=True, alpha=True, beta=True)
        spec = spec_of(whole)
        must_take = [spec_of(replace(whole, row_invariant=False)), spec]
    libraries = libraries and isinstance(device, Device) and _core._library_takes(device, spec)
    return spec, lambda name: all(usable(name, device, one, libraries) for one in must_take)


def best_few(device: Device, spec: _core.MatmulSpec) -> list[str]:
    """What "auto" would take, and what the rule would take without it, without that, and so on: four in all at most."""
    first = choose(device, spec)[0]
    others = (name for name, _ in _ranked(device, *_stands_for(spec, device, libraries=False)) if name != first)
    return [first, *itertools.islice(dict.fromkeys(others), 3)]


def make_file() -> None:
    """Of no choices, where $METALMM_TUNING names one that is not there. Raises OSError, TuningError."""
    if _loaded is None and os.environ.get("METALMM_TUNING") and not default_path().exists():
        write(default_path(), "", [])


def is_tuned(device: Device, key: Key) -> bool:
    """Of kernels as they are."""
    return any(c.key == key and c.kernel_sha256 == manifest.kernel_sha256(c.variant, spec_of(key)) for c in _choices(device))


def keep(device: Device, choice: Choice) -> None:
    """Adds it to the tuning file that "auto" goes by."""
    _choices(device)
    assert _path
    write(_path, device_key(device), [choice])
    load_tuning(_path)


def choose_variant(device: _core.Device, spec: _core.MatmulSpec, libraries: bool) -> str:
    """For the extension, which asks once for a shape and device."""
    assert isinstance(device, Device)
    if device.autotune:
        from .bench.autotune import measure_first  # which needs all of the package

        measure_first(device, spec)
    return choose(device, spec, libraries)[0]
