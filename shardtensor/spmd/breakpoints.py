"""Counts debugger prompts while maps run."""

from __future__ import annotations

import functools
import sys
import threading
from typing import Any

from shardtensor.host.fork import in_children


class Prompts:
    """Counts calls of ``breakpoint()`` while pieces of work go on: while somebody looks at one program in a debugger,
    no others shall start beside it.

    The hook is wrapped by a cache that keeps nothing, since that is a counter without a frame of its own: debuggers
    stop in the frame that called the hook.
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
        if sys.breakpointhook is self._counter:  # else the program has set another one
            sys.breakpointhook = self._hook

    @property
    def count(self) -> int:
        """How many there were since the hook is wrapped."""
        misses: int = self._counter.cache_info().misses
        return misses

    def abandon(self) -> None:
        """Puts the hook back in the child of a fork, where the lock may be held by a thread that is not there. Pieces
        of work that go on in the child may still ask for the count, and leave.
        """
        self._lock = threading.Lock()
        if self._users:
            self._put_back()


_prompts = Prompts()


def prompts() -> Prompts:
    """The process's counter of debugger prompts."""
    return _prompts


@in_children
def _forget() -> None:
    """In the child of a fork: the parent's pieces of work are not here."""
    global _prompts
    abandoned, _prompts = _prompts, Prompts()
    abandoned.abandon()
