"""Locks that a child of fork() finds free: a thread that is not there may have held them."""

from __future__ import annotations

import os
import threading
import weakref
from contextlib import AbstractContextManager


class Lock:
    """``with lock():`` holds it. Its thread may take it again: a signal's handler may come here while its thread is here."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        _all.add(self)

    def __call__(self) -> AbstractContextManager[bool]:
        return self._lock  # the with block lets go of what it took, also where a handler forked in it


_all: weakref.WeakSet[Lock] = weakref.WeakSet()


def _after_fork() -> None:
    for lock in list(_all):
        lock._lock = threading.RLock()


os.register_at_fork(after_in_child=_after_fork)
