"""The folder of compiled kernels: content-addressed entries, written atomically, verified when read, the oldest removed."""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import os
import shutil
import stat
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path

from .errors import DeviceError
from .fork import Lock

LIMIT_BYTES = 2 << 30  # what the folder may hold; a third goes when there is more
_DAY = 86400.0

_lock = Lock()
_locks: dict[Path, Lock] = {}
_named: dict[str, Path] = {}  # by what METALMM_CACHE said: a relative folder stays where it was first meant
_folder: Path | None = None
_wanted: Path | None = None
_temporary: Path | None = None


def _default_folder() -> Path | None:
    """None: there is no home to have it in."""
    if chosen := os.environ.get("METALMM_CACHE"):
        return _named.setdefault(chosen, Path(chosen).absolute())
    try:
        if sys.platform == "darwin":
            return Path.home() / "Library" / "Caches" / "metalmm"
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").absolute() / "metalmm"
    except RuntimeError:
        return None


def folder() -> Path:
    """The cache folder: $METALMM_CACHE, else the user's cache folder. A temporary one, with a warning, if that cannot be written, or if
    others can: whoever writes there has code run by this process."""
    global _folder, _wanted
    with _lock():
        wanted = _default_folder()
        if _folder is None or wanted != _wanted or not _folder.is_dir():
            why = _useless(wanted)
            _folder = _temporary_folder(f"the kernel cache {wanted} {why}") if why else wanted
            _wanted = wanted
        assert _folder
        return _folder


def _useless(path: Path | None) -> str:
    """Empty, or why the folder cannot serve; makes it."""
    if path is None:
        return "has no place: there is no home folder"
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = path.stat()
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        return f"cannot be written ({error.strerror})"
    if status.st_uid != os.geteuid():
        return f"belongs to user {status.st_uid}, who could put code there"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"can be written by others (mode {stat.S_IMODE(status.st_mode):o}; chmod go-w mends that)"
    return ""


def _temporary_folder(why: str) -> Path:
    """One for the life of this process."""
    global _temporary
    if _temporary is None or not _temporary.is_dir():
        try:
            _temporary = Path(tempfile.mkdtemp(prefix="metalmm-"))
        except OSError as error:
            raise DeviceError(f"{why}, and there is no temporary folder: {error}; set METALMM_CACHE to a folder with room") from error
        atexit.register(_remove, _temporary, os.getpid())
        warnings.warn(f"{why}; using {_temporary}. Set METALMM_CACHE to a writable folder of your own.", stacklevel=4)
    return _temporary


def _remove(path: Path, owner: int) -> None:
    if os.getpid() == owner:  # not a child of fork()
        shutil.rmtree(path, ignore_errors=True)


def fetch(name: str, build: Callable[[Path], None]) -> Path:
    """The entry `name`, made by ``build(path)`` if it is absent or damaged. Safe between threads and processes.

    Raises what `build` raises, and DeviceError where no folder takes it.
    """
    global _folder
    for last in (False, False, True):
        path = folder() / name
        with _lock():
            lock = _locks.setdefault(path, Lock())
        try:
            with lock():
                if _intact(path):
                    _touch(path)
                else:
                    _write(path, build)
                return path
        except OSError as error:
            if last:
                raise DeviceError(f"cannot keep {path}: {error}; set METALMM_CACHE to a folder with room") from error
            with _lock():
                if not path.parent.is_dir():
                    _folder = None  # somebody removed it: it is made again
                elif path.parent != _temporary:
                    _folder = _temporary_folder(f"the kernel cache {path.parent} takes no more ({error.strerror})")
    raise AssertionError


def digest_of(paths: Iterable[Path]) -> str:
    """Of files, for the name of an entry that is made of them."""
    digest = hashlib.sha256()
    for path in paths:
        if path.is_file():
            digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


def key_of(*texts: str) -> str:
    """The name of an entry that is made of these texts."""
    return hashlib.sha256("\0".join(texts).encode(errors="surrogatepass")).hexdigest()[:40]  # bytes of a file that are no UTF-8, too


def has(name: str) -> bool:
    """Whether `fetch` would find it."""
    return _intact(folder() / name)


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _sum_of(path: Path) -> Path:
    return path.with_name(path.name + ".sha256")


def _intact(path: Path) -> bool:
    try:
        return _sum_of(path).read_text() == _digest(path)
    except (OSError, UnicodeDecodeError):
        return False


def _touch(path: Path) -> None:
    """Its time says when it was last of use, to the day."""
    with contextlib.suppress(OSError):
        if time.time() - path.stat().st_mtime > _DAY:
            os.utime(path)


def _write(path: Path, build: Callable[[Path], None]) -> None:
    _prune(path.parent)
    temporary = Path(tempfile.mkdtemp(dir=path.parent, prefix=".new-"))  # no TemporaryDirectory: a child of fork() would remove it
    try:
        fresh = temporary / path.name
        build(fresh)
        checksum = _sum_of(fresh)
        checksum.write_text(_digest(fresh))
        os.replace(fresh, path)
        os.replace(checksum, _sum_of(path))
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _prune(place: Path) -> None:
    """Once a day: what a killed process left half made, and the entries longest not used where there are more than LIMIT_BYTES."""
    marker, now = place / ".pruned", time.time()
    with contextlib.suppress(OSError):
        if marker.exists() and now - marker.stat().st_mtime < _DAY:
            return
        marker.touch()
        for left in place.glob(".new-*"):
            if now - left.stat().st_mtime > _DAY:
                shutil.rmtree(left, ignore_errors=True)
        entries = [(p.stat(), p) for p in place.iterdir() if p.is_file() and not p.name.endswith(".sha256") and p != marker]
        total = sum(s.st_size // s.st_nlink for s, _ in entries)  # one file may have several names
        if total <= LIMIT_BYTES:
            return
        for status, entry in sorted(entries, key=lambda pair: pair[0].st_mtime):
            if total <= LIMIT_BYTES * 2 // 3:
                break
            entry.unlink(missing_ok=True)
            _sum_of(entry).unlink(missing_ok=True)
            total -= status.st_size // status.st_nlink
