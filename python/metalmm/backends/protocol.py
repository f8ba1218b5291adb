"""What a backend is, and what it may ask of the device that it works for."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from ..kernel_source import Code, Constants, KernelText, LibraryText

if TYPE_CHECKING:
    from .. import _core
    from ..variant import Variant

Winner = tuple[str, str, int, int, str]  # B's storage in its default group, layout, n, k, variant


class Splits(NamedTuple):
    """Variants that share K in different ways, and the bytes of B that hide the memory's latency: what a core must have in flight."""

    in_flight: float
    variants: Sequence[str]

    @staticmethod
    def of(in_flight: float, strategy: str, *points: str) -> Splits:
        return Splits(in_flight, [f"{strategy}/{point}" for point in points])


TileTimes = tuple[float, float, float, int]


class Tiles(NamedTuple):
    """Variants of different tiles of D, for several rows of A.

    ns: Of a tile, three times and a number. Two times are for 32 of k: of a wave, whose loads, products and barriers wait for each other; and of
        each tile's share of what a core does at most. The third is what a wave takes once, to begin and to end. The number is how many tiles
        a core has at once, a wave: by registers and threadgroup memory, or as fits best (docs/lab/cuda.md).
    """

    ns: Mapping[str, TileTimes]

    @staticmethod
    def work(variant: Variant, spec: _core.MatmulSpec, cores: int) -> tuple[float, float]:
        """How many tiles a core has, in the mean, and how often 32 of k, with what is loaded past the end; of swiglu those of both matrices."""
        tile, widths = variant.tile, [spec.n] if spec.swiglu else [spec.n, *spec.also_n]
        across = sum(math.ceil(n / tile[1]) for n in widths)
        return math.ceil(spec.m / tile[0]) * across * spec.batch / cores, math.ceil(variant.of_k(spec) / 32) * (1 + spec.swiglu)

    @staticmethod
    def took(ns: Any, of_core: Any, steps: Any) -> Any:
        """What so many take, in ns, `steps` times 32 of k each; arrays do. Waves and work overlap in part: hence the rounded maximum."""
        waves = np.ceil(np.ceil(of_core) / ns[3])
        return np.hypot(waves * (ns[0] * steps + ns[2]), of_core * ns[1] * steps)


# B's storage and how many matrices or swiglu, "" for any; a variant, or Splits or Tiles for one of theirs; up to which m, or any.
Preferred = tuple[str, str, str | Splits | Tiles] | tuple[str, str, str | Splits | Tiles, int]


def names_of(offered: str | Splits | Tiles) -> Sequence[str]:
    """The variants of which one is taken."""
    return [offered] if isinstance(offered, str) else offered.variants if isinstance(offered, Splits) else list(offered.ns)


class Device(Protocol):
    """A :class:`metalmm.Device`."""

    options: dict[str, bool | int | float]

    @property
    def info(self) -> Mapping[str, Any]: ...

    @property
    def threads(self) -> int | None: ...

    def _kernel_names(self, text: str) -> list[str]: ...


class Backend(Protocol):
    """One kind of device.

    Attributes:
        name: Its own and that of its C++.
        options: What Device() may give it.
        libraries: Matmuls that it has beside kernels.
        counts_barriers: Whether Device.counters says how often threadgroups met.
        emulated: What variants may need and this device computes step by step.
        replays: How many calls are recorded at least for a sample, where a launch costs more than a kernel. The sample is a replay's time
            by their number. With 0 it is a call by itself.
        ends_processes: Whether a kernel that goes astray may end its process, or all work of it.
        together: How many kernels code_together takes at most.
        note: What a reader of its times must know.
        cache_bytes: Of the largest cache before its memory, of any GPU of its kind, where the device itself does not say. With 0 the
            machine is asked.
        winners: What was measured best on such a device, of one matrix in float16: with m of 1; of a variant that takes none, with m of 2 and 8.
        preferred: What "auto" takes of what is not known, the first that takes the operation.
        usual_cores: Of a device that is not here, or does not say how many it has.
    """

    name: str
    options: Sequence[str]
    libraries: Sequence[str]
    counts_barriers: bool
    emulated: Sequence[str]
    replays: int
    ends_processes: bool
    together: int
    note: str
    cache_bytes: int
    winners: Sequence[Winner]
    preferred: Sequence[Preferred]
    usual_cores: int

    def checked(self, given: Mapping[str, Any]) -> dict[str, bool | int | float]:
        """All options for the C++, those of the user checked. Raises DeviceError naming the option, its value and the limit."""
        ...

    def library_text(self, device: Device, text: str, name: str, folders: Sequence[Path], defines: Mapping[str, Any]) -> LibraryText:
        """A user's MSL, preprocessed as far as the device's compiler wants it. Raises CompileError, LoweringError."""
        ...

    def code(self, device: Device, source: KernelText, kernel: str, constants: Constants) -> Code:
        """One kernel for the device. Raises CompileError, LoweringError."""
        ...

    def code_together(self, device: Device, sources: Sequence[tuple[KernelText, str]]) -> None:
        """Makes the code of up to `together` kernels at once where that is cheaper; `code` then finds it, or says what is wrong."""
        ...

    def registers(self, source: KernelText, kernel: str, constants: Constants) -> int:
        """Of a thread, as its compiler gives them out; 0 where it is not here, does not take the kernel, or does not say."""
        ...

    def library_file(self, library: str) -> str:
        """Where one of `libraries` lies, for one that is loaded when it is first asked for; empty for what the extension has."""
        ...

    def watching(self, timeout: float) -> dict[str, Any]:
        """Options of a device that tells of kernels which write elsewhere or take longer than `timeout` seconds, where it can."""
        ...

    def memory_gbps(self, device: Device) -> float | None:
        """What its memory moves, where somebody measured it on a GPU of that name."""
        ...

    def cores(self, device: Device) -> int | None:
        """How many of them run threadgroups, where the device says."""
        ...

    def facts(self, device: Device) -> dict[str, str | None]:
        """What a report says of it beside Device.info: compiler, and summary, a line for its head."""
        ...
