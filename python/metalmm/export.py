"""metalmm export: a kernel for somebody else's engine, as one .metal file and one JSON file that says all of its dispatch.

Formulas are of unsigned whole numbers m, n, k and batch, with + - * and /, and read the same in C, Swift and Rust.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from . import __version__, _core, backends, export_code, files, kernel_source, manifest, tuning
from .backends.protocol import names_of
from .bench.sizes import parse_spec
from .device import default_device
from .errors import UnsupportedError
from .gguf_blocks import SUPER
from .manifest import variants
from .quantized import FORMATS, parts_of_storage
from .variant import MSL_TYPES, Variant

SCHEMA, VERSION = "metalmm-export", 1
_TYPES = {**MSL_TYPES, "int8": "char", "uint8": "uchar", "uint16": "ushort"}


def metal_text(v: Variant, specialization: int) -> str:
    """One instance, which needs no other file and names none."""
    text = re.sub(r"(?m)^#line .*\n", "", v.assemble(specialization))
    return re.sub(r"\n{3,}", "\n\n", text)


def _groups(of: str) -> str:
    """Of k, in the shape of an array."""
    return "k" if of == "1" else f"ceil(k / {of})"


def _tiles(size: str, tile: int) -> str:
    return size if tile == 1 else f"({size} + {tile - 1}) / {tile}" if tile else "1"


def _product(*factors: str) -> str:
    return " * ".join(f"({factor})" if " " in factor else factor for factor in factors)


def _params(spec: _core.MatmulSpec, n: str) -> list[tuple[str, str, str]]:
    """The fields of MatmulParams (kernels/include/params.h), in its order, for operands that lie without gaps from a multiple of 16 bytes on."""
    batched = spec.batch > 1
    quantized = spec.b_storage != "dense"
    form, group, layout = parts_of_storage(spec.b_storage) if quantized else ("", 1, "nk")
    lda, ldb = ("m" if spec.transpose_a else "k"), ("k" if spec.transpose_b else n)
    if quantized:  # bytes
        ldb = "16" if layout == "canonical" else _tiles("k", 8 // FORMATS[form].bits)

    def stride(elements: str) -> str:
        return elements if batched else "0"

    values = {
        "m": "m", "n": n, "k": "k", "batch": "batch" if batched else "1", "lda": lda, "ldb": ldb, "ldc": n, "ldd": n,
        "stride_a": stride("m * k"), "stride_b": "0" if quantized else stride(f"{n} * k"), "stride_c": stride(f"m * {n}"), "stride_d": stride(f"m * {n}"),
        "alpha": repr(float(spec.alpha)), "beta": repr(float(spec.beta)),
        "has_bias": str(int(spec.bias)), "has_c": str(int(spec.beta != 0.0)),
        "vec_offset_a": "0", "vec_offset_b": "0", "group_shift": str(group.bit_length() - 1) if quantized else "0", "low_byte": "255",
    }  # fmt: skip
    return [(name, "float" if name in ("alpha", "beta") else "uint", value) for name, value in values.items()]


def _buffers(spec: _core.MatmulSpec) -> Iterator[dict[str, Any]]:
    """In the order of their indices. bind: an operand that stands in where the kernel wants a buffer and reads none."""
    kind, batch, lead = MSL_TYPES[spec.dtype], "batch * " if spec.batch > 1 else "", "batch, " if spec.batch > 1 else ""
    quantized = spec.b_storage != "dense"
    fused = bool(spec.also_n)
    parts = 1 + len(spec.also_n)
    yield {
        "index": 0,
        "name": "a",
        "type": kind,
        "elements": f"{batch}m * k",
        "shape": f"({lead}k, m)" if spec.transpose_a else f"({lead}m, k)",
    }
    for i in range(3 if fused else 1):
        of = min(i, parts - 1)  # the last stands in for what the kernel will not touch
        n, mark = ("n" if of == 0 else f"n{of + 1}"), "" if of == 0 else str(of + 1)
        indices = (1, 2, 4, 6, 7) if i == 0 else tuple(range(3 + 5 * i, 8 + 5 * i))
        b, out, bias, scales, biases = indices
        weights: dict[str, Any] = {
            "name": f"b{mark}",
            "type": kind,
            "elements": f"{batch}{n} * k",
            "shape": f"({lead}{n}, k)" if spec.transpose_b else f"({lead}k, {n})",
        }
        if quantized:
            form, group, layout = parts_of_storage(spec.b_storage)
            per_byte = 8 // FORMATS[form].bits
            weights["type"] = _TYPES[np.dtype(FORMATS[form].value_type).name]
            if layout == "canonical":
                weights["elements"] = _product(_tiles("k", 32), n, str(32 // per_byte))
                weights["shape"] = f"(ceil(k / 32), {n}, {32 // per_byte})"
            else:
                weights["elements"] = _product(n, _tiles("k", per_byte))
                weights["shape"] = f"({n}, {_groups(str(per_byte))})"
            parts_of_b = _scales(form, group, layout, n, spec.dtype)
        same = of != i
        yield {"index": b, **({"bind": weights["name"]} if same else weights)}
        result = {"name": f"out{mark}", "type": kind, "elements": f"{batch}m * {n}", "shape": f"({lead}m, {n})", "written": True}
        stands_in = same or (spec.swiglu and i > 0)
        yield {"index": out, **({"bind": "out" if spec.swiglu else result["name"]} if stands_in else result)}
        if not fused:
            c = {"name": "c", "type": kind, "elements": f"{batch}m * n", "shape": f"({lead}m, n)"}
            yield {"index": 3, **(c if spec.beta else {"bind": "a"})}
        has_bias = spec.bias and not same
        yield {
            "index": bias,
            **(
                {"name": f"bias{mark}", "type": kind, "elements": n, "shape": f"({n},)"}
                if has_bias
                else {"bind": "a" if not spec.bias else f"bias{mark}"}
            ),
        }
        if quantized or fused:
            for index, name in ((scales, "scales"), (biases, "biases")):
                there = quantized and name in parts_of_b
                whole = {"name": f"{name}{mark}", **parts_of_b[name]} if there else {}
                yield {
                    "index": index,
                    **(
                        whole
                        if there and not same
                        else {"bind": f"{name}{mark}" if there else (f"scales{mark}" if quantized else weights["name"])}
                    ),
                }


def _scales(form: str, group: int, layout: str, n: str, dtype: str) -> dict[str, dict[str, str]]:
    """The buffers beside the values: their types, elements and shapes."""
    f, found = FORMATS[form], dict[str, dict[str, str]]()
    kinds = {"scales": (f.scale_type(dtype), group, f.each[0]), "biases": (f.bias_type(dtype), SUPER if f.is_k else group, f.each[1])}
    for name, (kind, of, more) in kinds.items():
        axes = [f"ceil(k / {of})", n] if layout == "canonical" else [n, f"ceil(k / {of})"]
        elements = _product(n, _tiles("k", of), *map(str, more))
        if kind is not None:
            found[name] = {"type": _TYPES[kind], "elements": elements, "shape": f"({', '.join([*axes, *map(str, more)])})"}
    return found


def _weights_text(spec: _core.MatmulSpec) -> str:
    if spec.b_storage == "dense":
        return "as they are"
    form, group, layout = parts_of_storage(spec.b_storage)
    f = FORMATS[form]
    values = np.dtype(f.value_type).name + " with two values each, the even one of k in the low half" * (f.bits == 4)
    bytes_of = 32 * f.bits // 8
    where = (
        f"blocks of 32 along k, [ceil(k / 32)][n][{bytes_of} bytes], zeros behind the last of k" if layout == "canonical" else "n rows of k"
    )
    scale = (
        "scale * value - minimum"
        if f.is_k and f.has_bias
        else "scale * value + bias"
        if f.has_bias
        else f"scale * (value - {f.offset})"
        if f.offset
        else "scale * value"
    )
    order = f"[ceil(k / {group})][n]" if layout == "canonical" else f"[n][ceil(k / {group})]"
    of_scales = f"a scale{' and a bias' * f.has_bias} for each {group} along k, {order}"
    if f.is_k:
        both, where_by = ("a scale and a minimum", "each their own factor") if f.has_bias else ("a scale", "a factor")
        for_each = f"for each 16 along k, two of {order}" if f.halves else f"for each {group} along k, {order}"
        words = f"a little-endian word of 4 bytes{' for each half' * (f.upper > 1)}"
        bits = f"{f.upper} upper bit{'s' * (f.upper > 1)} of its value i, worth 16 and up, from bit 4 * (i % 8) + {f.upper} * (i / 8) on"
        upper = f"; behind them two zeros and {words}, which has the {bits}" if f.upper else ""
        of_scales = f"{both} of int8 {for_each}{upper}; {where_by} of half for each 256 in biases"
    if f.is_float:
        scale = f"scale * value, a value of {'e2m1, times 2' if f.bits == 4 else 'e4m3'}"
        of_scales = (
            f"a scale for each {f'16 along k, two of {order}' if f.halves else f'{group} along k, {order}'}, the upper 16 bits of a float"
        )
    ggml = (
        " A block of ggml's file is a half scale, then its 32 values: take them apart."
        + " A byte of ggml's holds values i and i + 16; here it holds 2 * i and 2 * i + 1." * (form == "q4_0")
        + " metalmm.from_gguf does it."
        if form in ("q8_0", "q4_0")
        else ""
    )
    return f"{form}: values of {values}, {where}; {of_scales}; a weight is {scale}.{ggml}"


def exported(v: Variant, spec: _core.MatmulSpec) -> tuple[str, dict[str, Any]]:
    """The kernel's text, and what the JSON file says. Raises UnsupportedError for what is no kernel of ours, or does not run on Apple's GPUs."""
    if not v.kernel or v.library or (v.devices and "metal" not in v.devices):
        raise UnsupportedError(f"{v} is no kernel that Apple's GPUs run; `metalmm variants` lists those that they do")
    if lack := v.lacks(spec):
        raise UnsupportedError(f"{v} does not take {spec!r}: {lack}")
    specialization = _core._specialization(spec)
    names = ["n", *(f"n{i + 2}" for i in range(len(spec.also_n)))]
    bm, bn = v.tile
    across = " + ".join(_tiles(n, bn) for n in (names[:1] if spec.swiglu else names))
    buffers = sorted(_buffers(spec), key=lambda b: int(b["index"]))
    fields = _params(spec, "n")
    if spec.also_n:
        fields = [field for i in range(3) for field in _params(spec, names[min(i, len(names) - 1)])]
    form, text = v.form(specialization), metal_text(v, specialization)
    return text, {
        "schema": SCHEMA,
        "version": VERSION,
        "metalmm": __version__,
        "variant": str(v),
        "operation": repr(spec),
        "kernel_sha256": manifest.kernel_sha256(str(v), spec),
        "source_sha256": hashlib.sha256(text.encode()).hexdigest(),
        "source": f"{file_name(v, spec)}.metal",
        "function": kernel_source.host_name(v.instance(specialization)),
        "function_constants": [],
        "language": "Metal 4.0" if "tensor_ops" in v.needs else "Metal 3.1",
        "math": "safe: no fast math (MTLMathModeSafe with precise functions, before macOS 15 fastMathEnabled = NO; -fno-fast-math)",
        "needs": list(v.needs),
        "sizes": ["m", *names, "k", *(["batch"] if spec.batch > 1 else [])],
        "grid": [across, _tiles("m", bm), "batch" if spec.batch > 1 else "1"],
        "threads": [v.threads, 1, 1],
        "threadgroup_memory": "none is passed: the kernel declares its own",
        "buffers": buffers,
        "params": {"index": 5, "bytes": 4 * len(fields), "fields": [{"name": n, "type": t, "value": x} for n, t, x in fields]},
        "limits": {
            "alignment": "each operand begins at a multiple of 16 bytes of its buffer, and has no gaps",
            "sizes": "each is 1 to 65535; macOS 26.2 and an M5"
            if "tensor_ops" in v.needs
            else "each is at least 1; each operand has fewer than 2^32 elements; k is at most 2^32 - 4097",
            "batch": "any, of 2 or more" if spec.batch > 1 else "1: for more export with batch=2",
            "takes": {key: x for key, x in form.supports.items() if key in ("m", "n", "k")},
            "swiglu": "n2 is n" if spec.swiglu else None,
        },
        "weights": _weights_text(spec),
        "result": "sums in float32; alpha * (a b) + beta * c + bias, rounded once"
        if not spec.swiglu
        else "silu(a b + bias) * (a b2 + bias2), rounded once",
    }


def file_name(v: Variant, spec: _core.MatmulSpec) -> str:
    words = [str(v).replace("/", "_"), spec.layout, spec.dtype, *([spec.b_storage.replace(":", "_")] if spec.b_storage != "dense" else [])]
    words += ["swiglu"] if spec.swiglu else [f"{1 + len(spec.also_n)}b"] if spec.also_n else []
    words += ["bias"] * spec.bias + ["batch"] * (spec.batch > 1)
    words += [f"{key}{x:g}" for key, x, usual in (("alpha", spec.alpha, 1.0), ("beta", spec.beta, 0.0)) if x != usual]
    return re.sub(r"\W", lambda c: {"-": "m", "+": ""}.get(c[0], "p"), "_".join(words))


def write(text: str, told: dict[str, Any], folder: Path) -> list[Path]:
    """The kernel, its description, and code that launches it."""
    name = told["source"].removesuffix(".metal")
    texts = {told["source"]: text, f"{name}.json": json.dumps(told, indent=1) + "\n"}
    texts.update({f"{name}{end}": text for end, text in export_code.texts(told, name).items()})
    folder.mkdir(parents=True, exist_ok=True)
    for file, text in texts.items():
        files.write_text(folder / file, text)
    return [folder / file for file in texts]


def every_instance() -> dict[str, tuple[Variant, int, list[str]]]:
    """By function name: all that ids of ours and what "auto" offers can ask a Mac for, and whose they are."""
    backend, ids = backends.get("metal"), list(variants())
    for _, _, offered, *_ in backend.preferred:
        ids += map(manifest.get, names_of(offered))
    found = dict[str, tuple[Variant, int, list[str]]]()
    for v in dict.fromkeys(ids):
        for specialization in v.specializations() if v.kernel and (not v.devices or "metal" in v.devices) else ():
            name = kernel_source.host_name(v.instance(specialization))
            found.setdefault(name, (v, specialization, []))[2].append(str(v))
    return found


def write_all(folder: Path) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    index = list[dict[str, Any]]()
    for name, (v, specialization, ids) in every_instance().items():
        (folder / f"{name}.metal").write_text(metal_text(v, specialization))
        index.append(
            {
                "function": name,
                "file": f"{name}.metal",
                "source": v.form(specialization).source.name,
                "variants": ids,
                "needs": list(v.needs),
            }
        )
    files.write_json(folder / "index.json", {"schema": "metalmm-export-all", "version": 1, "metalmm": __version__, "kernels": index})
    return len(index)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("id", nargs="?", help="of a variant, or auto: what a Mac would take")
    parser.add_argument("words", nargs="*", metavar="spec", help="m=1 n=9728 k=896 nt …, as `metalmm explain` takes it")
    parser.add_argument("--spec", help="the same in one argument")
    parser.add_argument("--all", action="store_true", help="every instance that a Mac can ask for, as a .metal file, with an index.json")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FOLDER")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if args.all == bool(args.id or args.spec):
        print("metalmm export: name a variant and its operation, or --all", file=sys.stderr)
        return 2
    if args.all:
        print(f"{write_all(args.output)} kernels in {args.output}")
        return 0
    spec = parse_spec(" ".join([*args.words, args.spec or ""]).split())
    name = args.id
    if name == "auto":
        device = default_device()
        name = (tuning.choose(device, spec, libraries=False) if device.name == "metal" else tuning.choose_unseen("metal", spec))[0]
    text, told = exported(manifest.get(name), spec)
    written = write(text, told, args.output)
    if args.json != "-":
        print("\n".join(map(str, written)))
    files.give_json(args.json, told)
    return 0
