"""What debug mode finds in a kernel, over several runs in different orders: for ``metalmm check``, for tests, and for whoever has a kernel."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from . import _core, backends, compiler, manifest, modules, multiplications, pipelines
from .device import Device
from .errors import ArgumentError, KernelError
from .kernel_source import Code, Constants, KernelText, known_arguments, pack_number
from .variant import Variant

Sizes = int | Sequence[int]
_SIZE = 1 << 20  # bytes of a buffer that nobody described
_RUNS = 4
# What a finding is, by how its text goes on behind the kernel and the threadgroup.
_WHERE = r"(?:kernel '[^']*': )?(?:threadgroup \(\d+, \d+, \d+\)(?:: )?)?"
_KINDS = {
    kind: re.compile(f"{_WHERE}(?:{begins})")
    for kind, begins in {
        "race": "a race: ",
        "unset": r"thread \d+ .*, which no thread wrote$",
        "bounds": r"(?:a load|a store|an atomic operation) of \d+ bytes outside|index -?\d+ is outside|(?:threadgroup memory|buffer \d+) was written",
        "alignment": "a load or store .*that is not aligned",
        "barrier": "barrier divergence: ",
        "timeout": ".*it took longer than the device's timeout",
    }.items()
}
NUMPY_OF = {
    "char": np.int8, "uchar": np.uint8, "bool": np.uint8, "short": np.int16, "ushort": np.uint16, "int": np.int32, "uint": np.uint32,
    "long": np.int64, "ulong": np.uint64, "half": np.float16, "float": np.float32,
}  # fmt: skip


@dataclass(frozen=True)
class Finding:
    """Something wrong in a kernel.

    Attributes:
        kind: race, unset, bounds, alignment, barrier, timeout, fault, order, coverage or result.
        text: In words.
        places: "file:line", of a race both.
        what: The kernel, or the variant and its shape.
    """

    kind: str
    text: str
    places: tuple[str, ...]
    what: str

    def __str__(self) -> str:
        return f"{self.what}: {self.text}"


def _finding(text: str, places: Iterable[str], what: str) -> Finding:
    kind = next((kind for kind, begins in _KINDS.items() if begins.match(text)), "fault")
    return Finding(kind, text, tuple(dict.fromkeys(places)), what)


def check(
    kernel: str | Path | Variant,
    name: str | None = None,
    *,
    grid: Sizes | None = None,
    threadgroup: Sizes | None = None,
    buffers: Mapping[int, Any] | None = None,
    threadgroup_memory: Mapping[int, int] | None = None,
    constants: Constants | None = None,
    include_dirs: Sequence[str | Path] = (),
    specs: Iterable[_core.MatmulSpec] = (),
    outputs: int | Iterable[int] = (),
    runs: int = _RUNS,
    timeout: float = 60.0,
) -> list[Finding]:
    """Runs a kernel in debug mode on device cpu, in a different order of threads each time; all that is wrong, each once.

    Args:
        kernel: MSL, the path of a .metal file, or a variant's id.
        name: Of the kernel in the MSL; may be left out where there is one.
        grid, threadgroup: Threadgroups, and threads of each.
        buffers: By index: NumPy arrays, bytes for constants, or numbers where the parameter is a reference to one. Arrays are copied. The
            others are 1 MiB of random numbers each.
        threadgroup_memory: Bytes of threadgroup arguments, by index.
        constants: Function constants, by name or index.
        specs: Of a variant, the shapes; a few of its own otherwise.
        outputs: Buffers of which each element, of 2 bytes or more, must be written once.
        runs: How many, at least 2.
        timeout: Seconds of a run.

    Raises what compiling the kernel raises, and ArgumentError.
    """
    if type(runs) is not int or runs < 2:
        raise ArgumentError(f"check: runs is {runs!r}; it takes a whole number of at least 2")
    with Device("cpu", debug=True, timeout=timeout) as device:
        if isinstance(kernel, Variant) or (
            isinstance(kernel, str) and name is None and not re.search(r"[\n{]", kernel) and not kernel.endswith(".metal")
        ):
            return _of_variant(device, manifest.get(str(kernel)), list(specs), runs)
        case = _prepared(device, kernel, name, grid, threadgroup, threadgroup_memory, buffers, constants, include_dirs)
        name, arguments, given = case.name, case.arguments, case.given
        outputs = [outputs] if isinstance(outputs, int) else list(outputs)
        written = {a.index for a in arguments if a.is_buffer and not a.is_const}
        if wrong := [i for i in outputs if i not in written or not isinstance(given.get(i), np.ndarray)]:
            raise ArgumentError(f"check: output {wrong[0]} is no buffer that the kernel may write; they are {sorted(written)}")
        if narrow := [i for i in outputs if given[i].itemsize < 2]:
            raise ArgumentError(
                f"check: output {narrow[0]} is of {given[narrow[0]].dtype}; writes are counted by two bytes: of elements of 2 and more"
            )

        def run(kernel: _core.Kernel = case.kernel) -> dict[int, Any]:
            counts = {}
            for i in [*outputs] or [-1]:  # a device watches one array
                own = _copies(given)
                if i >= 0:
                    counts[i] = device.count_writes(own[i])
                kernel(own, **case.sizes)
            for i, count in counts.items():
                _covered(count, own[i].itemsize, f"buffer {i}", name, found)
            return {a.index: own[a.index] for a in arguments if a.is_buffer and not a.is_const and isinstance(own.get(a.index), np.ndarray)}

        def run_zeros() -> dict[int, Any]:
            """Variables that the kernel does not set begin with zeros."""
            file = modules.build(modules.Job(case.text, name, dict(constants or {}), debug=True, zeros=True))
            return run(_core.Kernel(device, Code(name, file=str(file), arguments=arguments).as_tuple(), name, {}))

        found = dict[Any, Finding]()
        _several(device, run, name, runs, found, given, run_zeros)
    return list(found.values())


def count(
    kernel: str | Path,
    name: str | None = None,
    *,
    grid: Sizes | None = None,
    threadgroup: Sizes | None = None,
    buffers: Mapping[int, Any] | None = None,
    threadgroup_memory: Mapping[int, int] | None = None,
    constants: Constants | None = None,
    include_dirs: Sequence[str | Path] = (),
    timeout: float = 60.0,
) -> dict[str, int]:
    """What one dispatch of a kernel asks of memory, counted on device cpu as a GPU would see it. Arguments and errors are those of check().

    Of device memory, of constants given as bytes, and of threadgroup memory: ``…_bytes_read``, ``…_bytes_written`` and ``…_accesses``, the
    loads and stores of a simdgroup. ``device_lines`` and ``constant_lines`` are the different lines of 128 bytes of each access, added up;
    ``threadgroup_turns`` the words that the busiest of 32 banks gives. ``barriers`` are those of a threadgroup, ``simdgroup_operations`` those of
    simdgroups, their barriers too. A compiler for the CPU has made the accesses: it may have put some together, or left some out.
    ``multiplications``, of clang alone, are those of floating-point numbers, with an addition or without. ``registers`` are a thread's as
    NVIDIA's compiler gives them out for compute capability 9.0, an estimate for other GPUs, where NVRTC is installed.
    """
    with Device("cpu", debug=True, timeout=timeout) as device:
        case = _prepared(device, kernel, name, grid, threadgroup, threadgroup_memory, buffers, constants, include_dirs)
        device._count_accesses()
        before = device.counters
        case.kernel(_copies(case.given), **case.sizes)
        counts = {what: number - before[what] for what, number in device.counters.items()}
    chosen = dict(constants or {})
    if compiler.find_compiler().kind == "clang":
        counts["multiplications"] = _multiplications(case, chosen)
    if registers := backends.registers(case.text, case.name, chosen):
        counts["registers"] = registers
    return counts


def _multiplications(case: _Case, constants: Constants) -> int:
    file = modules.build(modules.Job(case.text, case.name, constants, counts=True))
    number = ctypes.c_uint64.in_dll(ctypes.CDLL(str(file)), multiplications.NUMBER)
    before = number.value
    with Device("cpu") as plain:  # without a debug device's looks
        _core.Kernel(plain, Code(case.name, file=str(file), arguments=case.arguments).as_tuple(), case.name, {})(
            _copies(case.given), **case.sizes
        )
    return number.value - before


@dataclass(frozen=True)
class _Case:
    """A kernel with what each of its runs takes: buffers, to be copied, and sizes by name."""

    kernel: _core.Kernel
    text: KernelText
    name: str
    arguments: Sequence[Any]
    given: dict[int, Any]
    sizes: dict[str, Any]


def _prepared(
    device: Device,
    kernel: str | Path,
    name: str | None,
    grid: Sizes | None,
    threadgroup: Sizes | None,
    threadgroup_memory: Mapping[int, int] | None,
    buffers: Mapping[int, Any] | None,
    constants: Constants | None,
    include_dirs: Sequence[str | Path],
) -> _Case:
    if grid is None or threadgroup is None:
        raise ArgumentError("check: a kernel takes grid= and threadgroup=: how many threadgroups, and threads of each")
    library = device.compile(kernel, include_dirs)
    if name is None and len(library.kernel_names) != 1:
        raise ArgumentError(
            f"check: name one of {', '.join(library.kernel_names)}" if library.kernel_names else "check: there is no kernel"
        )
    name = name or library.kernel_names[0]
    made = library.kernel(name, constants)
    arguments = known_arguments(library._text, name, dict(constants or {}))
    sizes = {"grid": grid, "threadgroup": threadgroup, "threadgroup_memory": threadgroup_memory}
    return _Case(made, library._text, name, arguments, _operands(made, arguments, buffers or {}), sizes)


def _copies(given: Mapping[int, Any]) -> dict[int, Any]:
    """What is bound twice is one array again; arrays that share a part of their memory are refused before."""
    arrays = {id(x): x.copy() for x in given.values() if isinstance(x, np.ndarray)}
    return {i: arrays.get(id(x), x) for i, x in given.items()}


def _keep(found: dict[Any, Finding], one: Finding) -> None:
    found.setdefault((one.kind, frozenset(one.places) or one.text), one)


def _several(
    device: Device, run: Any, what: str, runs: int, found: dict[Any, Finding], given: Mapping[int, Any], zeros: Any = None
) -> None:
    """Until one ends with an error, or bits differ. given: what results were before. zeros: runs it with variables that begin with zeros."""
    first, doubts = None, dict[Any, Finding]()
    for _ in range(runs):
        device._take_findings(True)
        ended, before = None, device.counters["threadgroups"]
        try:
            results = run()
        except KernelError as error:
            if device.counters["threadgroups"] == before:  # the launch itself was refused
                raise ArgumentError(f"check: {error}") from None
            ended = str(error)
        told = device._take_findings(False)
        for text, places, is_sure in told:
            _keep(found if is_sure else doubts, _finding(text, places, what))
        if ended is not None:
            if not any(text in ended for text, *_ in told):
                _keep(found, _finding(ended, (), what))
            return
        if first is None:
            first = results
        if any(f.what == what and f.kind in ("race", "unset") for f in found.values()):
            continue  # why bits may differ is known
        for i, x in results.items():
            if zeros and (fill := _fill_in(given.get(i), x)).any():
                fill &= (_bytes_of(x) != _bytes_of(zeros()[i])).any(axis=1)
                if fill.any():
                    few = f"{int(fill.sum())} of {len(fill)} elements are a variable that was never set"
                    for one in doubts.values() or [Finding("unset", f"buffer {i}: {few}, the first is {int(np.argmax(fill))}", (), what)]:
                        _keep(found, one)
                    return
                zeros = None  # they are numbers that look like it
            if (differs := np.flatnonzero(first[i].view(np.uint8).reshape(-1) != x.view(np.uint8).reshape(-1))).size:
                if doubts:
                    found.update(doubts)
                    return
                where = f"buffer {i}" if i >= 0 else "the result"
                text = f"{where} depends on the order of threads, or on what was never set: byte {differs[0]} and {differs.size - 1} more differ"
                _keep(found, Finding("order", text, (), what))
                return


def _covered(counts: Any, itemsize: int, where: str, what: str, found: dict[Any, Finding]) -> None:
    parts = counts.reshape(-1, itemsize // 2)
    for wrong, text in (((parts == 0).any(axis=1), "not written"), ((parts > 1).any(axis=1), "written more than once")):
        if wrong.any():
            text = f"{where}: {int(wrong.sum())} of {len(parts)} elements are {text}, the first is {int(np.argmax(wrong))}"
            _keep(found, Finding("coverage", text, (), what))


def _bytes_of(x: Any) -> Any:
    """Of each element."""
    return np.ascontiguousarray(x).view(np.uint8).reshape(-1, x.itemsize)


def _fill_in(given: Any, result: Any) -> Any:
    """Which elements became what a compiler puts into variables that a kernel does not set: bytes of 0xfe (g++) or 0xaa (clang), floats of
    0xff. They may be numbers, too."""
    new = _bytes_of(result)
    found = np.zeros(len(new), bool)
    if result.itemsize >= 2:
        for fill in (0xFE, 0xAA, 0xFF):
            found |= (new == fill).all(axis=1) & (_bytes_of(given) != fill).any(axis=1)
    return found


def _operands(kernel: _core.Kernel, arguments: Sequence[Any], buffers: Mapping[int, Any]) -> dict[int, Any]:
    rng, found = np.random.default_rng(0), dict[int, Any]()
    types = {a.index: a.type for a in arguments if a.is_buffer}
    if unknown := sorted(set(buffers) - set(kernel.buffer_indices)):
        raise ArgumentError(f"check: the kernel has no buffer {unknown[0]}; it has {kernel.buffer_indices}")
    for i in kernel.buffer_indices:
        kind = types.get(i, "")
        if i not in buffers:
            found[i] = random_of(rng, NUMPY_OF.get(re.sub(r"(packed_)|[234](x[234])?$", "", kind), np.uint8), _SIZE)
        elif isinstance(buffers[i], (int, float)) and kind in NUMPY_OF:
            found[i] = pack_number(buffers[i], kind, f"check: buffer {i}")
        else:
            found[i] = buffers[i]
    arrays = {id(x): (i, x) for i, x in found.items() if isinstance(x, np.ndarray)}
    for i, x in arrays.values():
        if not x.flags.c_contiguous or not x.ndim:
            raise ArgumentError(f"check: buffer {i} is no C-contiguous array; pass numpy.ascontiguousarray of it")
        for j, y in arrays.values():
            if i < j and np.may_share_memory(x, y):
                raise ArgumentError(f"check: buffers {i} and {j} share memory; pass one array for both, or copies")
    return found


def random_of(rng: np.random.Generator, kind: Any, size: int, shape: Sequence[int] | None = None) -> Any:
    """Of a normal distribution, or whole numbers of 0 to 15."""
    shape = shape or (size // np.dtype(kind).itemsize,)
    if np.dtype(kind).kind == "f":
        return rng.standard_normal(shape).astype(kind)
    return rng.integers(0, 16, shape).astype(kind)


# -- variants -----------------------------------------------------------------------------------------------------------

_SHAPES = ((1, 300, 1060), (1, 67, 200), (3, 130, 1100), (9, 70, 300), (70, 70, 300), (16, 72, 64))  # several tiles along k, and edges


def specs_of(v: Variant, most: int = 2) -> list[_core.MatmulSpec]:
    """For each B that it takes, and one type by turns, some shapes with edges."""
    found = []
    for turn, kind in enumerate(v.kinds()):
        layouts, count = kind.supports["layouts"], 0
        for m, n, k in _SHAPES:
            layout = layouts[(turn + count) % len(layouts)]
            also = {"2": [n + 3], "3": [n + 3, 5], "swiglu": [n]}.get(kind.end, [])
            spec = _core.MatmulSpec(
                m, n, k, transpose_a=layout[0] == "t", transpose_b=layout[1] == "t", dtype=v.types[turn % len(v.types)],
                b_storage=kind.storage, also_n=also, swiglu=kind.end == "swiglu",
            )  # fmt: skip
            if count < most and not v.lacks(spec):
                found.append(spec)
                count += 1
    return found


def _of_variant(device: Device, v: Variant, specs: list[_core.MatmulSpec], runs: int) -> list[Finding]:
    from .bench.runner import Inputs
    from .bench.sizes import of_spec

    found = dict[Any, Finding]()
    if why := v.unavailable(device):
        raise ArgumentError(f"check: {v}: {why}")
    specs = specs or specs_of(v)
    for spec in specs:
        if why := v.lacks(spec):
            raise ArgumentError(f"check: {v}: {why}")
    pipelines.compile_all(device, [(v, spec) for spec in specs], lambda count: None, lambda: None)
    for spec in specs:
        shape = of_spec(spec, 1)
        inputs, what = Inputs(device, shape, 0, 1), f"{v} {shape.short}"

        def run(inputs: Any = inputs, what: str = what) -> dict[int, Any]:
            wrong = inputs.judge(device, v)
            if wrong:
                _keep(found, Finding("result", wrong, (), what))
            return {-1: np.asarray(inputs.out).copy()}

        _several(device, run, what, runs, found, {})
    return list(found.values())
