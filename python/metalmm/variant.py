"""A variant: a named way to compute a product, the kernels that it is made of, and the text of their instances."""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from . import _core, kernel_source
from .device import Device
from .expressions import evaluate

TRANSPOSES = ("ta", "tb")  # template arguments that say the layout
LAYOUTS: tuple[str, ...] = _core._LAYOUTS  # the index is transpose_a + 2 * transpose_b
OPERAND_TYPES: tuple[str, ...] = _core._OPERAND_TYPES
STORAGES: tuple[str, ...] = _core._STORAGES  # of B, whatever the group
ENDS: tuple[str, ...] = _core._ENDS  # how many matrices B share A, or "swiglu", which two do
TYPE = "type"  # the template argument that says the operands' type
MSL_TYPES = {"float16": "half", "bfloat16": "bfloat", "float32": "float"}
STORED = ("format", "canonical", "swiglu")  # template arguments that B's storage and end say


_BITS = {
    "q8_0": 8,
    "q4_0": 4,
    "affine8": 8,
    "affine4": 4,
    "q5_k": 6,  # with its scales: of these formats they are about a 16th, or more
    "q4_k": 5,
    "q8_k": 9,
    "q6_k": 7,
    "q2_k": 5,
    "nvfp4": 5,
    "fp4": 4,
    "fp8": 8,
}


def kind_of(storage: str) -> str:
    """One of STORAGES: what QuantizedArray.storage says, without the group."""
    return ":".join(word for word in storage.split(":") if not word.isdecimal())


# A word of a template's arguments that has a value: no type of the kernel's own, as Lanes is in "Lanes<lanes, columns>".
_ARGUMENT = re.compile(r"\b[A-Za-z_]\w*\b(?!\s*<)", re.ASCII)
_TYPE = re.compile(r"([A-Za-z_]\w*)<\w+(?:, ?\w+)*>", re.ASCII)


def is_argument(word: str) -> bool:
    """Whether a template's argument can be that: a name, or a type of names, numbers and such types: "Lanes<lanes, 8>"."""
    while (shorter := _TYPE.sub(r"\1", word)) != word:
        word = shorter
    return bool(re.fullmatch(r"[A-Za-z_]\w*", word, re.ASCII))


@functools.cache
def names_of(spelling: str) -> tuple[str, ...]:
    """Of a template's arguments, each once."""
    return tuple(dict.fromkeys(_ARGUMENT.findall(spelling)))


@dataclass(frozen=True)
class Form:
    """One kernel of a variant.

    Attributes:
        source, kernel: The .metal file, and the template in it; of a library's matmul the kernel is empty.
        spelling: The template's arguments as its instances have them, such as ``type, Lanes<lanes, columns>``.
        storages, ends: The B that it takes, some of STORAGES and of ENDS.
        supports: Sizes, layouts and epilogue.
        without: Why it does not take operands of a type.
        flight: Elements of B that a thread loads before it uses the first, as a rule of the parameters; empty where nobody said.
        busy: How many threads of a threadgroup load, likewise; empty or 0: all.
    """

    source: Path
    kernel: str
    spelling: str
    storages: tuple[str, ...]
    ends: tuple[str, ...]
    supports: Mapping[str, Any]
    without: Mapping[str, str]
    flight: str
    busy: str

    @property
    def template(self) -> tuple[str, ...]:
        """Names of the template's arguments."""
        return names_of(self.spelling)

    @property
    def types(self) -> tuple[str, ...]:
        """Of operands that it takes: some of float16, bfloat16, float32."""
        return tuple(t for t in OPERAND_TYPES if t not in self.without)

    def takes(self, storage: str, end: str) -> bool:
        """Whether it takes that B, of STORAGES and ENDS."""
        return storage in self.storages and end in self.ends


RowBits = tuple[str, ...]  # an id, or a family and some of its parameters with their values


class Variant(str):
    """A variant's id, ``family/name``, that knows its manifest entry.

    Attributes:
        family, name: The two parts of the id.
        enabled: Whether it is on; if not, `reason` says why.
        is_listed: Whether a manifest has it; a point of a strategy that was called by its name is not.
        params: Values of the template's arguments.
        tile: (bm, bn), outputs of a threadgroup; bn of 0 stands for all columns.
        threads: Of a threadgroup.
        forms: Its kernels, each for another B.
        baseline: Layouts whose shapes are compared with it.
        alike_by: The only parameters of its strategy that change a row's bits; None: any may.
        devices: Those that it is restricted to; empty for any.
        needs: Features that a device must have beside, some of FEATURES.
        library: The library whose matmul it is; empty for a kernel of ours.
        manifest: The file that it is from.
    """

    family: str
    name: str
    enabled: bool
    reason: str
    is_listed: bool
    params: dict[str, int | bool]
    tile: tuple[int, int]
    threads: int
    forms: tuple[Form, ...]
    baseline: tuple[str, ...]
    alike_by: tuple[str, ...] | None
    library: str
    devices: tuple[str, ...]
    needs: tuple[str, ...]
    manifest: Path

    # Of the first kernel, for the first B that it takes: all that there is of one that kinds() or of() gave.
    source = property(lambda self: self.forms[0].source, doc="The first form's.")
    kernel = property(lambda self: self.forms[0].kernel, doc="The first form's.")
    template = property(lambda self: self.forms[0].template, doc="The first form's.")
    supports = property(lambda self: self.forms[0].supports, doc="The first form's.")
    without = property(lambda self: self.forms[0].without, doc="The first form's.")
    types = property(lambda self: self.forms[0].types, doc="The first form's.")
    storage = property(lambda self: self.forms[0].storages[0], doc="The first that the first form takes.")
    end = property(lambda self: self.forms[0].ends[0], doc="The first that the first form takes.")
    swiglu = property(lambda self: self.end == "swiglu", doc="Whether `end` is swiglu.")
    matrix_count = property(lambda self: 2 if self.swiglu else int(self.end), doc="How many matrices B `end` takes.")

    @property
    def row_bits(self) -> RowBits:
        """Alike for those whose rows have the same bits with row_invariant."""
        return (self,) if self.alike_by is None else (self.family, *(f"{key}={self.numbers()[key]}" for key in self.alike_by))

    def kinds(self) -> list[Variant]:
        """Itself for each B that it takes: for one storage and one number of matrices each."""
        return [self._for(f, storage, end) for f in self.forms for storage in f.storages for end in f.ends]

    def of(self, storage: str, end: str) -> Variant | None:
        """Itself for that B, of STORAGES and ENDS; None where it does not take it."""
        return next((self._for(f, storage, end) for f in self.forms if f.takes(storage, end)), None)

    def _for(self, form: Form, storage: str, end: str) -> Variant:
        narrow = Variant(self)
        narrow.__dict__.update(self.__dict__, forms=(replace(form, storages=(storage,), ends=(end,)),))
        return narrow

    def runs_on(self, device: str | Device) -> bool:
        """Whether it runs on that device; of a name, on some of its kind."""
        return not self.unavailable(device)

    def unavailable(self, device: str | Device) -> str:
        """Empty, or why it does not run on that device, whatever the operation."""
        name = device if isinstance(device, str) else device.name
        if self.devices and name not in self.devices:
            return f"unavailable on device {name}"
        if isinstance(device, Device) and (missing := [n for n in self.needs if n in device.lacking]):
            return f"it needs {missing[0]}, which this device lacks"
        return ""

    def lacks(self, spec: _core.MatmulSpec) -> str:
        """Empty, or why this variant does not support the operation."""
        return _core._lacks(self, spec)

    def instance(self, specialization: int) -> str:
        """The kernel's template-id, such as ``columns<half, 64, 128, 128, true, 8>``; specialization: of a call, by the extension."""
        chosen = {name: cpp(bool(specialization >> i & 1)) for i, name in enumerate(TRANSPOSES)}
        chosen[TYPE] = MSL_TYPES[OPERAND_TYPES[type_of(specialization)]]
        form, (storage, end) = self.form(specialization), _b_of(specialization)
        form_of_b, _, layout = storage.partition(":")
        chosen.update(format=form_of_b.upper(), canonical=cpp(bool(layout)), swiglu=cpp(end == "swiglu"))
        values = {**chosen, "threads": cpp(self.threads), **{key: cpp(value) for key, value in self.params.items()}}
        return f"{form.kernel}<{_ARGUMENT.sub(lambda name: values[name[0]], form.spelling)}>"

    def form(self, specialization: int) -> Form:
        """The kernel of such a call."""
        return next(f for f in self.forms if f.takes(*_b_of(specialization)))

    def specializations(self) -> Iterator[int]:
        """Every one that a call can ask for."""
        for form in self.forms:
            for of_b in itertools.product(form.storages, form.ends):
                for dtype, layout in itertools.product(form.types, form.supports["layouts"]):
                    yield specialization_of(dtype, layout, *of_b)

    def instances(self) -> Iterator[str]:
        """The template-id of each of them; none of a library's."""
        return map(self.instance, self.specializations())

    def loads(self, spec: _core.MatmulSpec) -> tuple[int, int, int] | None:
        """What the loads of B come to: waits, bytes of a thread, and bytes of all threads together. None where the manifest does not say.

        The waits are how often a thread waits for loads that none before it hides, one round after another. The bytes of a thread are
        those of B that it has in flight meanwhile. Those of all threads may be more than B has: some loads are past its end.
        """
        if not (loaders := self._loaders(spec)):
            return None
        threads, each = loaders
        columns = min(self.tile[1] or spec.n, spec.n)
        widths = [spec.n] if spec.swiglu else [spec.n, *spec.also_n]
        groups = sum(-(-n // columns) for n in widths) * -(-spec.m // self.tile[0]) * spec.batch
        rounds = -(-spec.k * columns * (1 + spec.swiglu) // (threads * each))
        return max(1, rounds), each * _bits(spec) // 8, each * threads * groups * _bits(spec) // 8

    def of_k(self, spec: _core.MatmulSpec) -> float:
        """K with what the last of `loads` has past its end."""
        if not (loaders := self._loaders(spec)):
            return spec.k
        threads, each = loaders
        once = threads * each / (self.tile[1] or spec.n) / (1 + spec.swiglu)
        return math.ceil(spec.k / once) * once

    def _loaders(self, spec: _core.MatmulSpec) -> tuple[int, int] | None:
        """Threads that load B, and elements that each has in flight. None where the manifest does not say."""
        form = self.form(_core._specialization(spec))
        if not form.flight:
            return None
        numbers = {**self.numbers(), "dense": int(spec.b_storage == "dense"), "swiglu": int(spec.swiglu)}
        each = min(max(1, evaluate(form.flight, numbers)), spec.k * spec.n)
        threads = min(self.threads, max(evaluate(form.busy, numbers) if form.busy else 0, 0) or self.threads)
        return threads, each

    def loaded(self, spec: _core.MatmulSpec) -> int:
        """Bytes of B, or of its integers where it is quantized, that all matrices of a batch load."""
        return spec.k * (spec.n + sum(spec.also_n)) * spec.batch * _bits(spec) // 8

    def numbers(self) -> dict[str, int]:
        """Its parameters, for expressions."""
        return {"threads": self.threads, **{key: int(value) for key, value in self.params.items()}}

    def assemble(self, specialization: int) -> str:
        """The MSL source of that instance; nothing for what a library computes alone."""
        return kernel_source.assemble(self.form(specialization).source, self.instance(specialization)) if self.kernel else ""


def _bits(spec: _core.MatmulSpec) -> int:
    """Of a weight."""
    form = spec.b_storage.partition(":")[0]
    return (32 if spec.dtype == "float32" else 16) if form == "dense" else _BITS[form]


def end_of(also_n: tuple[int, ...], swiglu: bool) -> str:
    """One of ENDS."""
    return "swiglu" if swiglu else str(1 + len(also_n))


def _b_of(specialization: int) -> tuple[str, str]:
    """Its storage and end."""
    storage, end = divmod(specialization >> _core._KIND_SHIFT, len(ENDS))
    return STORAGES[storage], ENDS[end]


def type_of(specialization: int) -> int:
    """The place of the operands' type among OPERAND_TYPES."""
    return (specialization & ((1 << _core._KIND_SHIFT) - 1)) >> _core._TYPE_SHIFT


def specialization_of(dtype: str, layout: str, storage: str = "dense", end: str = "1") -> int:
    """Of a call with those operands."""
    kind = STORAGES.index(storage) * len(ENDS) + ENDS.index(end)
    return kind << _core._KIND_SHIFT | OPERAND_TYPES.index(dtype) << _core._TYPE_SHIFT | LAYOUTS.index(layout)


def cpp(value: int | bool) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
