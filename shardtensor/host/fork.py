"""Locks and other state of a module in the child process after a fork.

Only the thread that called fork exists in the child: locks that other threads of the parent held are never released
there. So every lock of the library is made by `lock`, or a comment that begins with ``# fork:`` at its creation says
why it is not (`tests/host/test_fork.py` checks this). Locks are not acquired before the fork instead: a thread that
holds one may wait for the forking thread, and user code runs under some of them.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")

_locks: weakref.WeakSet[Any] = weakref.WeakSet()
"""The locks that are reset in children."""

generation = 0
"""The number of forks between the first process and this one. Objects that are too many to be registered each have the
number of the process that made them (see `shardtensor.tensor.storage.WriteState`).
"""


def lock() -> Any:
    """Returns a new reentrant lock that is free in the child of a fork, unless the forking thread holds it.

    All locks are reentrant, since finalizers that the garbage collector calls may call the library while one is held.
    Registering a lock takes about a microsecond.
    """
    new_lock = threading.RLock()
    _locks.add(new_lock)
    return new_lock


def is_mine(held: Any) -> bool:
    """Whether the calling thread holds a reentrant lock. The thread that forks is the same in the child."""
    return bool(held._is_owned())


def in_children(function: Callable[[], None]) -> Callable[[], None]:
    """Registers a function to be called in the child process after every fork, and returns the function. All locks are
    reset before.
    """
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=function)
    return function


@in_children
def _reset() -> None:
    global generation
    generation += 1
    for held in list(_locks):
        if not is_mine(held):
            held._at_fork_reinit()  # The standard library resets its own locks by this method, too.


if sys.version_info >= (3, 12):
    cached_property = functools.cached_property
else:

    class cached_property(functools.cached_property[T]):  # noqa: N801 - as in functools
        """`functools.cached_property`, which has a lock for all instances before Python 3.12."""

        def __init__(self, func: Callable[[Any], T]) -> None:
            super().__init__(func)
            self.lock = lock()
