"""The folder of compiled kernels: content-addressed entries, written atomically, verified when read."""

from __future__ import annotations

import hashlib
import os
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable
from pathlib import Path

_lock = threading.Lock()
_locks: dict[Path, threading.Lock] = {}
_folder: Path | None = None


def _default_folder() -> Path:
    if chosen := os.environ.get("METALMM_CACHE"):
        return Path(chosen)
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "metalmm"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "metalmm"


def folder() -> Path:
    """The cache folder: $METALMM_CACHE, else the user's cache folder; a temporary one, with a warning, if that cannot be written."""
    global _folder
    with _lock:
        wanted = _default_folder()
        if _folder is not None and (_folder == wanted or not _writable(wanted)):
            return _folder
        _folder = wanted
        if not _writable(wanted):
            _folder = Path(tempfile.mkdtemp(prefix="metalmm-"))
            warnings.warn(
                f"the kernel cache {wanted} cannot be written; using {_folder}. Set METALMM_CACHE to a writable folder.", stacklevel=2
            )
        return _folder


def _writable(path: Path) -> bool:
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            return True
    except OSError:
        return False


def fetch(name: str, build: Callable[[Path], None]) -> Path:
    """The entry `name`, made by ``build(path)`` if it is absent or damaged. Safe between threads and processes."""
    path = folder() / name
    with _lock:
        lock = _locks.setdefault(path, threading.Lock())
    with lock:
        if not _intact(path):
            _write(path, build)
    return path


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _sum_of(path: Path) -> Path:
    return path.with_name(path.name + ".sha256")


def _intact(path: Path) -> bool:
    try:
        return _sum_of(path).read_text() == _digest(path)
    except (OSError, UnicodeDecodeError):
        return False


def _write(path: Path, build: Callable[[Path], None]) -> None:
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".new-") as temporary:
        fresh = Path(temporary) / path.name
        build(fresh)
        checksum = _sum_of(fresh)
        checksum.write_text(_digest(fresh))
        os.replace(fresh, path)
        os.replace(checksum, _sum_of(path))
