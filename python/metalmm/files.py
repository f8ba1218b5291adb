"""The files of JSON that metalmm writes and reads: one way in, one way out."""

from __future__ import annotations

import contextlib
import json
import os
import stat
import tempfile
import unicodedata
from pathlib import Path
from typing import Any

from .errors import Error


class FileError(Error, ValueError):
    """A file that holds something else than was asked for, or that would be overwritten by something else."""


def harmless(text: str, keep: str = "") -> str:
    """Text from outside with what nobody sees spelled out, but those of `keep`: a terminal may take it for a command, or turn a line round.
    Spaces of any kind stay."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep or unicodedata.category(c) == "Zs" else f"\\x{ord(c):02x}" for c in text)


def write_text(path: str | Path, text: str) -> None:
    """Whole or not at all: beside the file first, then in its place; a link's target, not the link. What is no file (a pipe, /dev/null) is
    written to as it is. Raises OSError."""
    path = Path(os.path.realpath(path))
    if path.exists() and not path.is_file():
        with open(path, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
        return
    handle, fresh = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        mask = os.umask(0)
        os.umask(mask)
        mode = stat.S_IMODE(os.stat(path).st_mode) if path.exists() else 0o666 & ~mask  # as it is, or as open() would have made it
        os.chmod(fresh, mode)
        os.replace(fresh, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):  # it is in its place
            os.unlink(fresh)
        raise


def write_json(path: str | Path, data: Any) -> None:
    """On one line: json's fast encoder has no indentation, and a bench writes after each shape."""
    write_text(path, json.dumps(data) + "\n")


def give_json(where: str | None, data: Any) -> None:
    """What --json asks for: nothing, a file (which check_output() has seen before the work), or standard output. Raises OSError."""
    if where == "-":
        print(json.dumps(data, indent=1))
    elif where is not None:
        write_json(where, data)


def check_output(path: Path, mark: str, what: str) -> None:
    """Checks before the work, not after it, that the path can be written. A file that is there and would be replaced must be of the same
    kind: it has `mark` near its beginning. Raises FileError, OSError."""
    if path.is_dir():
        raise FileError(f"{path}: it is a folder")
    if path.exists() and not path.is_file():
        return
    if path.exists():
        with open(path, "rb") as file:
            start = file.read(400)
        if start.strip() and mark.encode() not in start:
            raise FileError(f"{path}: there is a file that is no {what} of ours; it would be overwritten")
    target = Path(os.path.realpath(path))
    if not target.parent.is_dir():
        raise FileError(f"{path}: there is no folder {target.parent}")
    handle, probe = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    os.close(handle)
    os.unlink(probe)


def check_json(where: str | None, schema: str) -> None:
    """check_output() of a --json option."""
    if where not in (None, "-"):
        check_output(Path(str(where)), f'"schema": "{schema}"', f"{schema} JSON")


def text_of(path: str | Path) -> str:
    """Raises OSError for what is no file: a FIFO would wait for whoever writes to it."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise OSError("it is no file")
    return Path(path).read_text(encoding="utf-8")


def _harmless(data: Any) -> Any:
    """The same with its texts' control characters spelled out, but ends of lines and tabs."""
    if isinstance(data, str):
        return harmless(data, "\n\t")
    if isinstance(data, dict):
        return {_harmless(key): _harmless(value) for key, value in data.items()}
    return [_harmless(value) for value in data] if isinstance(data, list) else data


def _json_of(path: str | Path) -> tuple[object, Any]:
    """What a file says that it is, and what it holds."""
    try:
        data = _harmless(json.loads(text_of(path)))
    except OSError as error:
        raise FileError(f"{path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise FileError(f"{path}: no JSON, such as bench, tune and step write: {error}") from error
    return data.get("schema") if isinstance(data, dict) else type(data).__name__, data


def schema_of(path: str | Path) -> object:
    """What a file says that it is. Raises FileError."""
    return _json_of(path)[0]


def read_json(path: str | Path, schema: str, version: int) -> dict[str, Any]:
    """What such a file holds. Raises FileError naming what is there instead."""
    found, data = _json_of(path)
    if not isinstance(data, dict) or found != schema:
        raise FileError(f"{path}: it holds {found!r}, not {schema!r}")
    if data.get("version") != version:
        raise FileError(f"{path}: version {data.get('version')!r} of {schema}; this metalmm reads version {version}")
    return data
