"""A variant: what a kernel is made of, what it supports, and the text of its instances."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from . import _core, kernel_source
from .device import Device
from .expressions import evaluate

# What a kernel can be compiled for, beside its parameters: template arguments whose values come from the call. ta, tb: transposes;
# align_*: a whole number of tiles (bm, bn, and the parameter bk); vec: A and B can be read as vectors of 4 wherever a row begins.
SPECIALIZATIONS: tuple[str, ...] = _core._SPECIALIZATIONS
LAYOUTS: tuple[str, ...] = _core._LAYOUTS  # the index is transpose_a + 2 * transpose_b
OPERAND_TYPES: tuple[str, ...] = _core._OPERAND_TYPES
STORAGES = ("dense", *(f"{form}{layout}" for form in _core._FORMATS[1:] for layout in ("", ":canonical")))  # of B
TYPE = "type"  # the template argument that says the operands' type
_MSL_TYPES = {"float16": "half", "bfloat16": "bfloat", "float32": "float"}
STORED = ("format", "canonical", "weights", "swiglu")  # template arguments that a variant's storage, weights and swiglu say


_BITS = {"q8_0": 8, "q4_0": 4, "affine8": 8, "affine4": 4}


def kind_of(storage: str) -> str:
    """One of STORAGES: what QuantizedArray.storage says, without the group."""
    return ":".join(word for word in storage.split(":") if not word.isdecimal())


class Variant(str):
    """A variant's id, ``family/name``, that knows its manifest entry.

    Attributes:
        family, name: The two parts of the id.
        enabled: Whether it is on; if not, `reason` says why.
        source, kernel: The .metal file, and the template in it.
        template, params: Names of the template's arguments, and their values.
        tile: (bm, bn), outputs of a threadgroup; bn of 0 stands for all columns.
        threads: Of a threadgroup.
        supports: Sizes, layouts and epilogue.
        types: Of operands that it takes; `without` says why it does not take the others.
        flight: Elements of B that a thread loads before it uses the first, as a rule of the parameters; empty where nobody said.
        busy: How many threads of a threadgroup load, likewise; empty or 0: all.
        storage: How B lies that it takes, "dense" or a format of quantized weights, whatever their group.
        weights: How many matrices B it takes, more than one in a fused call.
        swiglu: Whether that is its end.
        baseline: Layouts whose shapes are compared with it.
        devices: Those that it is restricted to; empty for any.
        needs: Features that a device must have beside, some of FEATURES.
        library: The library whose matmul it is; empty for a kernel of ours.
        manifest: The file that it is from.
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
    library: str
    devices: tuple[str, ...]
    needs: tuple[str, ...]
    without: dict[str, str]
    flight: str
    busy: str
    storage: str
    weights: int
    swiglu: bool
    manifest: Path

    @property
    def types(self) -> tuple[str, ...]:
        """Of operands that it takes: some of float16, bfloat16, float32."""
        return tuple(t for t in OPERAND_TYPES if t not in self.without)

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
        """The kernel's template-id, such as ``columns<half, 64, 128, 128, true, 8>``; specialization: what the extension says of a call,
        bits of SPECIALIZATIONS and the operands' type above them."""
        chosen = {name: cpp(bool(specialization >> i & 1)) for i, name in enumerate(SPECIALIZATIONS)}
        chosen[TYPE] = _MSL_TYPES[OPERAND_TYPES[specialization >> _core._TYPE_SHIFT]]
        form, _, layout = self.storage.partition(":")
        chosen.update(format=form.upper(), canonical=cpp(layout == "canonical"), weights=str(self.weights), swiglu=cpp(self.swiglu))
        values = {**chosen, "threads": cpp(self.threads), **{key: cpp(value) for key, value in self.params.items()}}
        return f"{self.kernel}<{', '.join(values[name] for name in self.template)}>"

    def instances(self) -> Iterator[str]:
        """Every template-id that a call can ask for, some more than once; none of a library's."""
        free = [
            i for i, name in enumerate(SPECIALIZATIONS) if name in self.template and name not in self.params and name not in ("ta", "tb")
        ]
        for operand_type in self.types:
            for layout in self.supports["layouts"]:
                base = OPERAND_TYPES.index(operand_type) << _core._TYPE_SHIFT | LAYOUTS.index(layout)
                for chosen in itertools.product((0, 1), repeat=len(free)):
                    yield self.instance(base | sum(bit << i for bit, i in zip(chosen, free, strict=True)))

    def loads(self, spec: _core.MatmulSpec) -> tuple[int, int, int] | None:
        """What the loads of B come to: waits, bytes of a thread, and bytes of all threads together. None where the manifest does not say.

        The waits are how often a thread waits for loads that none before it hides, one round after another. The bytes of a thread are
        those of B that it has in flight meanwhile.
        """
        if not self.flight:
            return None
        each = min(max(1, evaluate(self.flight, self.numbers())), spec.k * spec.n)
        columns = min(self.tile[1] or spec.n, spec.n)
        widths = [spec.n] if spec.swiglu else [spec.n, *spec.also_n]
        groups = sum(-(-n // columns) for n in widths) * -(-spec.m // self.tile[0]) * spec.batch
        threads = min(self.threads, max(evaluate(self.busy, self.numbers()) if self.busy else 0, 0) or self.threads)
        rounds = -(-spec.k * columns * (1 + spec.swiglu) // (threads * each))
        return max(1, rounds), each * self._bits(spec) // 8, min(each * threads * groups * self._bits(spec) // 8, self.loaded(spec))

    def loaded(self, spec: _core.MatmulSpec) -> int:
        """Bytes of B, or of its integers where it is quantized, that all matrices of a batch load."""
        return spec.k * (spec.n + sum(spec.also_n)) * spec.batch * self._bits(spec) // 8

    def _bits(self, spec: _core.MatmulSpec) -> int:
        """Of a weight."""
        form = self.storage.partition(":")[0]
        return (32 if spec.dtype == "float32" else 16) if form == "dense" else _BITS[form]

    def numbers(self) -> dict[str, int]:
        """Its parameters, for expressions."""
        return {"threads": self.threads, "swiglu": int(self.swiglu), **{key: int(value) for key, value in self.params.items()}}

    def assemble(self, specialization: int) -> str:
        """The MSL source of that instance; nothing for what a library computes alone."""
        return kernel_source.assemble(self.source, self.instance(specialization), self) if self.kernel else ""


def cpp(value: int | bool) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
