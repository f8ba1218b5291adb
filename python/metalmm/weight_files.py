"""The weights of a whole model as they lie in its file: each is taken apart when somebody asks for it, and not before."""

from __future__ import annotations

import json
import math
import os
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from . import gguf_file
from .errors import ArgumentError, UnsupportedError
from .files import harmless
from .gguf_blocks import GGUF
from .quantized import FORMATS, QuantizedArray, _check_group, _check_layout, _types, from_gguf, from_mlx

_DENSE = {
    "F64": "<f8",
    "F32": "<f4",
    "F16": "<f2",
    "I64": "<i8",
    "I32": "<i4",
    "I16": "<i2",
    "I8": "i1",
    "U8": "u1",
    "U32": "<u4",
    "BOOL": "?",
}
_MOST_HEADER = 100 << 20  # bytes: what the format itself allows


class WeightFile(Mapping[str, Any]):
    """Names with arrays: dense ones of NumPy, views of the file, and :class:`QuantizedArray`.

    Attributes:
        path: Of the file.
        refused: Tensors that are not taken: name, format, and share of the file's bytes of weights. Asking for one raises UnsupportedError.
    """

    def __init__(self, path: Path, makers: Mapping[str, Callable[[], Any]], refused: Mapping[str, tuple[str, float]]) -> None:
        self.path, self.refused = path, dict(refused)
        self._makers = dict(makers)

    def __getitem__(self, name: str) -> Any:
        if name in self._makers:
            return self._makers[name]()
        if name in self.refused:
            form, share = self.refused[name]
            raise UnsupportedError(
                f"{self.path}: tensor '{harmless(name)}' is {harmless(form)}, which is not taken ({share:.1%} of the file); {_TAKEN}"
            )
        some = ", ".join(map(harmless, sorted(self._makers)[:8])) + (" …" if len(self) > 8 else "")
        raise ArgumentError(f"{self.path} has no tensor '{harmless(str(name))}'; it has {some}")

    def get(self, name: str, default: Any = None) -> Any:
        """The tensor, or `default` where the file has none of that name that is taken."""
        return self[name] if name in self._makers else default

    def __contains__(self, name: object) -> bool:
        return name in self._makers

    def __iter__(self) -> Iterator[str]:
        return iter(self._makers)

    def __len__(self) -> int:
        return len(self._makers)

    __eq__ = object.__eq__  # a Mapping's would take each tensor apart
    __hash__ = object.__hash__

    def __repr__(self) -> str:
        shares = defaultdict[str, float](float)
        for form, share in self.refused.values():
            shares[form] += share
        left = "".join(f"; not taken: {harmless(form)}, {share:.1%} of the file" for form, share in shares.items())
        return f"metalmm.WeightFile({str(self.path)!r}, {len(self)} tensors{left})"


_TAKEN = f"there are {', '.join(GGUF)} of two or three dimensions, and f32, f16 and bf16"


def load_gguf(path: str | Path, name: str | None = None, *, layout: str = "nk", dtype: Any = np.float16) -> Any:
    """A .gguf file as a mapping of names to arrays, or one tensor of it. Nothing is copied before it is asked for. Needs the package gguf.

    A weight is what llama.cpp makes of it, bit for bit in float32. One of three dimensions has experts: see `matmul_gathered`.

    dtype: of the scales and biases of q4_1 and q5_1, which is the type of the operands that they go with. Raises ArgumentError for a name that
    the file does not have, and for a file that is none, is cut short or claims more than it holds. Raises UnsupportedError for a tensor of
    another format.
    """
    if not isinstance(path, (str, Path)) or not (name is None or isinstance(name, str)):
        raise ArgumentError(f"load_gguf: it takes a path and a tensor's name, not {path!r} and {name!r}")
    _check_layout(layout)
    tensors = gguf_file.read(Path(path), "load_gguf").tensors
    whole = sum(int(t.n_bytes) for t in tensors) or 1
    makers, refused = dict[str, Callable[[], Any]](), dict[str, tuple[str, float]]()
    for t in tensors:
        kind, shape = t.tensor_type.name.lower(), tuple(int(x) for x in reversed(t.shape))  # GGUF has the fastest first
        if kind in GGUF and len(shape) in (2, 3):
            makers[t.name] = partial(_of_blocks, t.data, kind, shape, layout=layout, dtype=dtype)
        elif kind in ("f32", "f16", "f64", "i8", "i16", "i32", "i64"):
            makers[t.name] = partial(_dense, t.data, None, shape)
        elif kind == "bf16" and (bfloat := _types("bfloat16")):
            makers[t.name] = partial(_dense, t.data, bfloat[0], shape)
        else:
            refused[t.name] = (kind if len(shape) in (2, 3) else f"{kind} with {len(shape)} dimensions", int(t.n_bytes) / whole)
    found = WeightFile(Path(path), makers, refused)
    return found if name is None else found[name]


def load_safetensors(path: str | Path, *, group: int | None = None, layout: str = "nk") -> WeightFile:
    """A .safetensors file, or a folder of them, as a mapping of names to arrays. Nothing is copied before it is asked for.

    MLX's quantized weights (`NAME.weight` of uint32 with `NAME.scales` and `NAME.biases`) become one :class:`QuantizedArray` by the name
    of `NAME.weight`. They have 2 to 8 bits, or a mode that config.json beside the file says: mxfp4, mxfp8 and nvfp4 have no biases. How many neighbours share a scale is in config.json beside the file, for each layer or for all; group:
    where it is not. Raises ArgumentError for a file that is none, is cut short or claims more than it holds, and for a folder without all that
    its index names.
    """
    if not isinstance(path, (str, Path)):
        raise ArgumentError(f"load_safetensors: it takes a path, not {path!r}")
    _check_layout(layout)
    if group is not None:
        _check_group(FORMATS["affine4"], group)
    path = Path(os.path.abspath(path))
    try:
        is_folder = path.is_dir()
        files = sorted(path.glob("*.safetensors")) if is_folder else [path]
    except OSError as error:
        raise ArgumentError(f"{harmless(str(path))[:200]}: {error.strerror}") from error
    if not files:
        raise ArgumentError(f"{harmless(str(path))} has no .safetensors file")
    said = _config((path if is_folder else path.parent) / "config.json")
    views, refused, kinds, sizes = dict[str, Callable[[], Any]](), dict[str, tuple[str, int]](), dict[str, str](), 0
    for file in files:
        header, written = _header(file), file.stat().st_mtime_ns
        for name, (kind, shape, start, end) in header.items():
            if name in views or name in refused:
                raise ArgumentError(f"{harmless(str(path))}: tensor {harmless(name)!r} is in two of its files")
            sizes += end - start
            if kind in _DENSE or (kind == "BF16" and _types("bfloat16")):
                views[name] = partial(_view, file, written, start, end - start, kind, shape)
            else:
                refused[name] = (kind.lower(), end - start)
            kinds[name] = kind
    if is_folder:
        _check_index(path / "model.safetensors.index.json", kinds)
    makers = dict(views)
    for name in views:
        stem = name.removesuffix(".weight")
        if stem != name and kinds[name] == "U32" and f"{stem}.scales" in views:
            if f"{stem}.biases" in views:
                parts = [views[name], makers.pop(f"{stem}.scales"), makers.pop(f"{stem}.biases")]
                makers[name] = partial(_of_mlx, parts, group, said, layout, stem)
            elif kinds[f"{stem}.scales"] == "U8":
                makers[name] = partial(_of_mx, views[name], makers.pop(f"{stem}.scales"), said, layout, stem)
    return WeightFile(path, makers, {name: (kind, size / max(sizes, 1)) for name, (kind, size) in refused.items()})


def _of_blocks(data: Any, kind: str, shape: tuple[int, ...], **options: Any) -> QuantizedArray:
    return from_gguf(np.asarray(data).reshape(-1), kind, shape, **options)


def _dense(data: Any, kind: Any, shape: tuple[int, ...]) -> Any:
    found = np.asarray(data)
    return (found if kind is None else found.view(kind)).reshape(shape)


def _of_mx(packed: Callable[[], Any], scales: Callable[[], Any], said: Mapping[str, Any], layout: str, stem: str) -> QuantizedArray:
    """MLX's modes without biases, of which the shapes do not tell which it is: mxfp4 in 32 has those of mxfp8 in 16."""
    mode = (own if isinstance(own := said.get(stem), dict) else said).get("mode")
    if mode not in ("mxfp4", "mxfp8", "nvfp4"):
        raise UnsupportedError(
            f"'{harmless(stem)}.weight' has scales of uint8 and no biases: config.json says mode {mode!r}, for mxfp4, mxfp8 or nvfp4"
        )
    return from_mlx(packed(), scales(), mode=mode, layout=layout)


def _of_mlx(parts: list[Callable[[], Any]], group: int | None, said: Mapping[str, Any], layout: str, stem: str) -> QuantizedArray:
    """The shapes alone do not say the group: k = 256 in groups of 32 by 8 bits has those of k = 512 in groups of 64 by 4."""
    packed, scales, biases = (part() for part in parts)
    of_layer = own if isinstance(own := said.get(stem), dict) else said
    size, bits, mode = of_layer.get("group_size", group), of_layer.get("bits"), of_layer.get("mode", "affine")
    name = harmless(stem) + ".weight"
    if mode != "affine":
        raise UnsupportedError(f"'{name}' has biases, and config.json says mode {mode!r}; those of mode affine have them")
    if group not in (None, size):
        raise UnsupportedError(f"config.json says a group of {size!r} for '{name}', and group is {group}; leave group out")
    if type(size) is not int or size not in FORMATS["affine4"].groups:
        what = "config.json does not say the group of" if size is None else f"config.json says a group of {size!r} for"
        raise UnsupportedError(f"{what} '{name}', which MLX quantized; pass group=, one of 32, 64 and 128")
    if packed.ndim not in (2, 3) or scales.ndim != packed.ndim or not scales.size or packed.shape[-1] * 32 % (scales.shape[-1] * size):
        raise UnsupportedError(
            f"'{name}' is {packed.dtype} {packed.shape} with scales {scales.shape}: no weights that MLX quantized by {size}"
        )
    found = packed.shape[-1] * 32 // (scales.shape[-1] * size)
    if bits not in (None, found):
        raise UnsupportedError(f"'{name}' has {found} bits in groups of {size}, and config.json says {bits!r}")
    return from_mlx(packed, scales, biases, bits=found, group=size, layout=layout)


def _beside(path: Path) -> Any:
    """A JSON file beside the weights; None where there is none. Raises ArgumentError."""
    try:
        return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
    except (OSError, ValueError, RecursionError) as error:
        raise ArgumentError(f"{harmless(str(path))} beside the weights is no JSON: {error}") from None


def _check_index(path: Path, there: Collection[str]) -> None:
    """Raises ArgumentError where a folder lacks a tensor that its index names: a file of it was not copied."""
    if (said := _beside(path)) is None:
        return
    files = said.get("weight_map") if isinstance(said, dict) else None
    if not isinstance(files, dict) or not all(isinstance(file, str) for file in files.values()):
        raise ArgumentError(f"{harmless(str(path))} has no weight_map of tensors and their files: mend it, or take it away")
    if lacking := [name for name in files if name not in there]:
        raise ArgumentError(
            f"{harmless(str(path.parent))} lacks {len(lacking)} of the {len(files)} tensors of its index: the first,"
            f" {harmless(lacking[0])!r}, is in {harmless(files[lacking[0]])!r}, which must lie beside the others"
        )


def _config(path: Path) -> Mapping[str, Any]:
    """What MLX notes of a model that it quantized: bits and group_size of all, or of a layer by its name. Empty where there is no note."""
    said = _beside(path)
    found = said.get("quantization", said.get("quantization_config")) if isinstance(said, dict) else None
    return found if isinstance(found, dict) else {}


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Of a JSON object, whose keys must differ."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name stands there twice")
    return found


def _header(path: Path) -> dict[str, tuple[str, tuple[int, ...], int, int]]:
    """Type, shape, and where in the file, of each tensor. Raises ArgumentError."""

    def fail(what: str) -> ArgumentError:
        return ArgumentError(f"{harmless(str(path))} is no .safetensors file, or is cut short: {harmless(what)}")

    try:
        if not path.is_file():
            raise ArgumentError(f"{harmless(str(path))[:200]}: there is no such file")
        size = path.stat().st_size
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, _MOST_HEADER):
                raise fail(f"a header of {length} bytes in {size}")
            said = json.loads(file.read(length).decode(), object_pairs_hook=_once)
    except (OSError, ValueError, RecursionError) as error:
        raise error if isinstance(error, ArgumentError) else fail(str(error)) from None
    found, begin = dict[str, tuple[str, tuple[int, ...], int, int]](), 8 + length
    if not isinstance(said, dict):
        raise fail("its header is no object")
    for name, of in said.items():
        if name == "__metadata__":
            continue
        try:
            kind, shape, (start, end) = of["dtype"], tuple(of["shape"]), of["data_offsets"]
            if not isinstance(kind, str) or not all(type(x) is int and 0 <= x <= size for x in (*shape, start, end)) or len(shape) > 8:
                raise TypeError
        except (TypeError, KeyError, ValueError):
            raise fail(f"tensor {harmless(str(name))!r} has no type, shape and offsets") from None
        width = np.dtype(_DENSE[kind]).itemsize if kind in _DENSE else 2 if kind == "BF16" else None
        if not start <= end <= size - begin or (width is not None and math.prod(shape) * width != end - start):
            raise fail(f"tensor {harmless(str(name))!r} is {kind} {shape} at bytes {start} to {end} of {size - begin}")
        found[name] = kind, shape, begin + start, begin + end
    past = begin
    for start, end, name in sorted((start, end, name) for name, (_, _, start, end) in found.items()):
        if start != past:
            raise fail(f"tensor {name!r} begins at byte {start - begin}, and what lies before it ends at {past - begin}")
        past = end
    if past != size:
        raise fail(f"{size - past} bytes behind its tensors")
    return found


def _view(path: Path, written: int, start: int, size: int, kind: str, shape: tuple[int, ...]) -> Any:
    try:
        if path.stat().st_mtime_ns != written:
            raise ValueError("it was written to")
        data: Any = np.memmap(path, np.uint8, "r", start, (size,)) if size else np.empty(0, np.uint8)
    except (OSError, ValueError) as error:
        raise ArgumentError(f"{harmless(str(path))} has changed since it was opened: {error}") from error
    wanted = _types("bfloat16")[0] if kind == "BF16" else np.dtype(_DENSE[kind])
    if start % wanted.itemsize:
        data = np.array(data)
    return np.asarray(data).view(wanted).reshape(shape)
