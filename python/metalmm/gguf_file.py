"""What a .gguf file says of itself, looked at before anybody takes memory for it: counts, lengths and offsets that the file has room for."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any, BinaryIO

from .errors import ArgumentError, UnsupportedError

_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # bytes of a value by its type
_STRING, _ARRAY, _MOST_DIMENSIONS = 8, 9, 8


class _Header:
    """Reads a header to its end. Raises ArgumentError for what lies outside of the file."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self._path, self._file = path, file
        self._size = path.stat().st_size

    def fail(self, what: str) -> ArgumentError:
        return ArgumentError(f"{self._path} is no GGUF file, or is cut short: at byte {self._file.tell()} of {self._size}: {what}")

    def number(self, form: str) -> int:
        size = struct.calcsize(form)
        data = self._file.read(size)
        if len(data) < size:
            raise self.fail("the file ends here")
        return int(struct.unpack(f"<{form}", data)[0])

    def skip(self, count: int, size: int, what: str) -> None:
        if count * size > self._size - self._file.tell():
            raise self.fail(f"{what} of {count} elements, which the file has no room for")
        self._file.seek(count * size, 1)

    def value(self, kind: int, depth: int = 0) -> None:
        if kind == _STRING:
            self.skip(self.number("Q"), 1, "a text")
        elif kind == _ARRAY and depth < 4:
            kind, count = self.number("I"), self.number("Q")
            if kind in _SIZES:
                return self.skip(count, _SIZES[kind], "an array")
            if count * 8 > self._size - self._file.tell():  # each takes its length at least
                raise self.fail(f"an array of {count} elements, which the file has no room for")
            for _ in range(count):
                self.value(kind, depth + 1)
        elif kind in _SIZES:
            self.skip(1, _SIZES[kind], "a value")
        else:
            raise self.fail(f"a value of type {kind}, which is none")

    def tensor(self) -> None:
        if not (length := self.number("Q")):
            raise self.fail("a tensor without a name; the header has fewer tensors than it says")
        self.skip(length, 1, "a name")
        dimensions, elements = self.number("I"), 1
        if dimensions > _MOST_DIMENSIONS:
            raise self.fail(f"a tensor of {dimensions} dimensions")
        for _ in range(dimensions):
            elements *= self.number("Q")
        self.number("I")
        if (offset := self.number("Q")) > self._size or elements > 8 * self._size:  # no format has less than a bit for one
            raise self.fail(f"a tensor of {elements} elements at offset {offset}, which the file has no room for")


def check(path: Path) -> None:
    """Raises ArgumentError for a file that is none, is cut short or claims more than it holds, UnsupportedError for one of a big-endian
    machine."""
    try:
        if path.exists() and not path.is_file():  # a FIFO would wait for whoever writes to it
            raise ArgumentError(f"{path} is no plain file")
        with open(path, "rb") as file:
            header = _Header(path, file)
            if file.read(4) != b"GGUF":
                raise ArgumentError(f"{path} is no GGUF file, or is cut short")
            version = header.number("I")
            if version & 0xFFFF == 0 and version:
                raise UnsupportedError(f"{path}: a GGUF file of a big-endian machine; convert it with gguf's gguf_convert_endian")
            if version not in (2, 3):
                raise UnsupportedError(f"{path}: GGUF version {version}; it takes 2 and 3")
            tensors, values = header.number("Q"), header.number("Q")
            for _ in range(values):
                header.value(_STRING)
                header.value(header.number("I"))
            for _ in range(tensors):
                header.tensor()
    except (ArgumentError, UnsupportedError):  # which are ValueErrors
        raise
    except (OSError, ValueError) as error:
        raise ArgumentError(f"{str(path)!r}: {getattr(error, 'strerror', None) or error}") from error


def read(path: Path, who: str) -> Any:
    """gguf's GGUFReader of a checked file; who: needs the package. Raises UnsupportedError without it, else as check() does."""
    try:
        import gguf
    except ImportError:
        raise UnsupportedError(f"{who} needs the package gguf: pip install gguf") from None
    check(path)
    try:
        found = gguf.GGUFReader(path)
    except OSError as error:
        raise ArgumentError(f"{path}: {error.strerror or error}") from error
    except Exception as error:  # it reads what lies there: of a damaged file, anything
        raise ArgumentError(f"{path} is no GGUF file, or is cut short: {error}") from error
    past = 0
    for start, size, name in sorted((int(t.data_offset), int(t.n_bytes), t.name) for t in found.tensors):
        if start < past or (start - found.data_offset) % found.alignment:
            raise ArgumentError(
                f"{path}: tensor {name!r} begins at byte {start}; it takes a multiple of {found.alignment} behind byte {past}"
            )
        past = start + size
    return found
