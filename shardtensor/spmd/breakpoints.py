"""Counts debugger prompts while maps run."""

from __future__ import annotations

import functools
import sys
import threading
from typing import Any

from shardtensor.host.fork import in_children


class Prompts:
    """Counts calls of ``breakpoint()`` while maps run: once a program has stopped in a debugger, the scheduler starts
    no helper threads, so that no other programs run beside it.

    `sys.breakpointhook` is wrapped by `functools.lru_cache` with ``maxsize=0``. That is a counter without a Python
    frame of its own, which matters because debuggers stop in the frame that called the hook.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._hook: Any = None
        self._counter: Any = None

    def __enter__(self) -> Prompts:
        with self._lock:
            if not self._users:
                hook = sys.breakpointhook
                if hook is not self._hook:
                    self._hook, self._counter = hook, functools.lru_cache(maxsize=0)(hook)
                sys.breakpointhook = self._counter
            self._users += 1
            return self

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._users -= 1
            if not self._users:
                self._put_back()

    def _put_back(self) -> None:
        if sys.breakpointhook is self._counter:  # A hook that user code has set meanwhile must stay.
            sys.breakpointhook = self._hook

    @property
    def count(self) -> int:
        """The number of prompts since the current hook was first wrapped."""
        misses: int = self._counter.cache_info().misses
        return misses

    def abandon(self) -> None:
        """Restores the hook in the child of a fork, where a thread that no longer exists may hold the lock. Maps that
        continue in the child may still read the count and leave the ``with`` block.
        """
        self._lock = threading.Lock()
        if self._users:
            self._put_back()


_prompts = Prompts()


def prompts() -> Prompts:
    """Returns the process-wide counter of debugger prompts."""
    return _prompts


@in_children
def _forget() -> None:
    """Replaces the counter in the child of a fork, which must not count for the parent's maps."""
    global _prompts
    abandoned, _prompts = _prompts, Prompts()
    abandoned.abandon()
