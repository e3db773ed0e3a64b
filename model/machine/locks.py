"""Locks in processes that fork: the child has only the thread that forked, and what others held stays held."""

from __future__ import annotations

import os
import weakref
from threading import RLock
from typing import Any

from .hardware import give_back_threads

FORKED = (
    "decoder: its process was forked while another thread of the parent decoded; allowed: fork while no text is "
    "decoded, or load the model in each process"
)
# What is set right in the child of a fork, by its `after_fork`.
SHARED: weakref.WeakSet[Any] = weakref.WeakSet()


class SharedLock:
    """A reentrant lock; taking it raises RuntimeError, if another thread held it at a fork."""

    def __init__(self) -> None:
        self._lock: Any = RLock()
        self._is_lost = False
        SHARED.add(self)

    @property
    def is_mine(self) -> bool:
        """Whether this thread holds it."""
        return bool(self._lock._is_owned())  # as `threading.Condition` asks

    def __enter__(self) -> None:
        if self._is_lost:
            raise RuntimeError(FORKED)
        self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()

    def after_fork(self) -> None:
        """Find out whether it is held by a thread that is not there."""
        self._is_lost = not self._lock.acquire(blocking=False)
        if not self._is_lost:
            self._lock.release()


def _after_fork() -> None:
    for shared in list(SHARED):
        shared.after_fork()


if hasattr(os, "register_at_fork"):  # not on Windows
    # GNU's OpenMP would wait in the child for the threads of this one's pool, which are not there.
    os.register_at_fork(before=give_back_threads, after_in_child=_after_fork)
