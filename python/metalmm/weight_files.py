"""The weights of a whole model as they lie in its file: each is taken apart when somebody asks for it, and not before."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from . import gguf_file
from .errors import ArgumentError, UnsupportedError
from .files import harmless
from .gguf_blocks import GGUF
from .quantized import FORMATS, QuantizedArray, _types, from_gguf, from_mlx

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
            raise UnsupportedError(f"{self.path}: tensor '{name}' is {form}, which is not taken ({share:.1%} of the file); {_TAKEN}")
        some = ", ".join(map(harmless, sorted(self._makers)[:8])) + (" …" if len(self) > 8 else "")
        raise ArgumentError(f"{self.path} has no tensor '{name}'; it has {some}")

    def __contains__(self, name: object) -> bool:
        return name in self._makers

    def __iter__(self) -> Iterator[str]:
        return iter(self._makers)

    def __len__(self) -> int:
        return len(self._makers)

    def __repr__(self) -> str:
        shares = defaultdict[str, float](float)
        for form, share in self.refused.values():
            shares[form] += share
        left = "".join(f"; not taken: {form}, {share:.1%} of the file" for form, share in shares.items())
        return f"metalmm.WeightFile({str(self.path)!r}, {len(self)} tensors{left})"


_TAKEN = f"there are {', '.join(GGUF)} of two dimensions, and f32, f16 and bf16"


def load_gguf(path: str | Path, name: str | None = None, *, layout: str = "nk", dtype: Any = np.float16) -> Any:
    """A .gguf file as a mapping of names to arrays, or one tensor of it. Nothing is copied before it is asked for. Needs the package gguf.

    A weight is what llama.cpp makes of it, bit for bit in float32. dtype: of scales and biases where a format has both (q4_1, q5_1), which
    is the type of the operands that they go with. Raises ArgumentError for a name that the file does not have and for a file that is none,
    is cut short or claims more than it holds; UnsupportedError for a tensor of another format.
    """
    if not isinstance(path, (str, Path)) or not (name is None or isinstance(name, str)):
        raise ArgumentError(f"load_gguf: it takes a path and a tensor's name, not {path!r} and {name!r}")
    tensors = gguf_file.read(Path(path), "load_gguf").tensors
    whole = sum(int(t.n_bytes) for t in tensors) or 1
    makers, refused = dict[str, Callable[[], Any]](), dict[str, tuple[str, float]]()
    for t in tensors:
        kind, shape = t.tensor_type.name.lower(), tuple(int(x) for x in reversed(t.shape))  # GGUF has the fastest first
        if kind in GGUF and len(shape) == 2:
            makers[t.name] = partial(_of_blocks, t.data, kind, shape, layout=layout, dtype=dtype)
        elif kind in ("f32", "f16", "f64", "i8", "i16", "i32", "i64"):
            makers[t.name] = partial(_dense, t.data, None, shape)
        elif kind == "bf16" and (bfloat := _types("bfloat16")):
            makers[t.name] = partial(_dense, t.data, bfloat[0], shape)
        else:
            refused[t.name] = (kind if len(shape) == 2 else f"{kind} with {len(shape)} dimensions", int(t.n_bytes) / whole)
    found = WeightFile(Path(path), makers, refused)
    return found if name is None else found[name]


def load_safetensors(path: str | Path, *, group: int | None = None, layout: str = "nk") -> WeightFile:
    """A .safetensors file, or a folder of them, as a mapping of names to arrays. Nothing is copied before it is asked for.

    MLX's quantized weights (`NAME.weight` of uint32 with `NAME.scales` and `NAME.biases`) become one :class:`QuantizedArray` by the name
    of `NAME.weight`; of 2 to 8 bits. group: what config.json beside it says, or 64. Raises ArgumentError for a file that is none, is cut
    short or claims more than it holds.
    """
    if not isinstance(path, (str, Path)):
        raise ArgumentError(f"load_safetensors: it takes a path, not {path!r}")
    path = Path(path)
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if not files:
        raise ArgumentError(f"{path} has no .safetensors file")
    folder = path if path.is_dir() else path.parent
    if group is None:
        group = _group_of(folder / "config.json")
    views, refused, sizes = dict[str, Callable[[], Any]](), dict[str, tuple[str, int]](), 0
    for file in files:
        for name, (kind, shape, start, end) in _header(file).items():
            sizes += end - start
            if kind in _DENSE or (kind == "BF16" and _types("bfloat16")):
                views[name] = partial(_view, file, start, end - start, kind, shape)
            else:
                refused[name] = (kind.lower(), end - start)
    makers = dict(views)
    for name in views:
        stem = name.removesuffix(".weight")
        if stem != name and f"{stem}.scales" in views and f"{stem}.biases" in views:
            parts = [views[name], makers.pop(f"{stem}.scales"), makers.pop(f"{stem}.biases")]
            makers[name] = partial(_of_mlx, parts, group, layout, name)
    return WeightFile(path, makers, {name: (kind, size / max(sizes, 1)) for name, (kind, size) in refused.items()})


def _of_blocks(data: Any, kind: str, shape: tuple[int, int], **options: Any) -> QuantizedArray:
    return from_gguf(np.asarray(data).reshape(-1), kind, shape, **options)


def _dense(data: Any, kind: Any, shape: tuple[int, ...]) -> Any:
    found = np.asarray(data)
    return (found if kind is None else found.view(kind)).reshape(shape)


def _of_mlx(parts: list[Callable[[], Any]], group: int, layout: str, name: str) -> QuantizedArray:
    packed, scales, biases = (part() for part in parts)
    if (
        packed.dtype != np.uint32
        or packed.ndim != 2
        or scales.ndim != 2
        or not scales.size
        or packed.shape[1] * 32 % (scales.shape[1] * group)
    ):
        raise UnsupportedError(
            f"'{name}' is {packed.dtype} {packed.shape} with scales {scales.shape}: no weights that MLX quantized by {group}"
        )
    return from_mlx(packed, scales, biases, bits=packed.shape[1] * 32 // (scales.shape[1] * group), group=group, layout=layout)


def _group_of(config: Path) -> int:
    """What MLX notes of a model that it quantized; its default where there is no note."""
    try:
        said = json.loads(config.read_text(encoding="utf-8"))["quantization"]["group_size"] if config.is_file() else 64
    except (OSError, ValueError, KeyError, TypeError):
        return 64
    return said if isinstance(said, int) and said in FORMATS["affine4"].groups else 64


def _header(path: Path) -> dict[str, tuple[str, tuple[int, ...], int, int]]:
    """Type, shape, and where in the file, of each tensor. Raises ArgumentError."""

    def fail(what: str) -> ArgumentError:
        return ArgumentError(f"{path} is no .safetensors file, or is cut short: {what}")

    try:
        if not path.is_file():
            raise ArgumentError(f"{path}: there is no such file")
        size = path.stat().st_size
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, _MOST_HEADER):
                raise fail(f"a header of {length} bytes in {size}")
            said = json.loads(file.read(length))
    except (OSError, ValueError, RecursionError) as error:
        raise error if isinstance(error, ArgumentError) else fail(str(error)) from None
    found, begin = dict[str, tuple[str, tuple[int, ...], int, int]](), 8 + length
    for name, of in said.items() if isinstance(said, dict) else ():
        if name == "__metadata__":
            continue
        try:
            kind, shape, (start, end) = of["dtype"], tuple(of["shape"]), of["data_offsets"]
            if not isinstance(kind, str) or not all(isinstance(x, int) and x >= 0 for x in (*shape, start, end)):
                raise TypeError
        except (TypeError, KeyError, ValueError):
            raise fail(f"tensor {harmless(str(name))!r} has no type, shape and offsets") from None
        width = np.dtype(_DENSE[kind]).itemsize if kind in _DENSE else 2 if kind == "BF16" else None
        if not start <= end <= size - begin or (width is not None and math.prod(shape) * width != end - start):
            raise fail(f"tensor {harmless(str(name))!r} is {kind} {shape} at bytes {start} to {end} of {size - begin}")
        found[name] = kind, shape, begin + start, begin + end
    if not isinstance(said, dict):
        raise fail("its header is no object")
    return found


def _view(path: Path, start: int, size: int, kind: str, shape: tuple[int, ...]) -> Any:
    data = np.memmap(path, np.uint8, "r", start, (size,)) if size else np.empty(0, np.uint8)
    wanted = _types("bfloat16")[0] if kind == "BF16" else np.dtype(_DENSE[kind])
    if start % wanted.itemsize:
        data = np.array(data)
    return np.asarray(data).view(wanted).reshape(shape)
