"""What comes in between: Ctrl-C, and prompts of a debugger."""

from __future__ import annotations

import functools
import importlib
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

from shardtensor.host import in_children

# Python's own wrappers of these make enums of all numbers: a fifth of the cost of a small map.
_c = importlib.import_module("_signal")
_set_handler: Callable[[int, Any], Any] = _c.signal
_handler: Callable[[int], Any] = _c.getsignal
_SIGINT = int(signal.SIGINT)


class Interrupts:
    """Holds Ctrl-C back while machinery is running that could not be left in the middle: until `deliver`, or until the
    end of the ``with``.
    """

    __slots__ = ("_around", "_before", "_missed")

    def __init__(self) -> None:
        self._missed = False
        self._before: Any = None
        self._around: Interrupts | None = None

    def __enter__(self) -> Any:
        if threading.get_ident() == threading.main_thread().ident:  # no other one gets signals
            before = _handler(_SIGINT)
            around = getattr(before, "__self__", None)
            if type(around) is Interrupts:  # which sees to it; where this one delivers, it may, too
                self._around = around
            elif callable(before):
                self._before = before
                _set_handler(_SIGINT, self._handle)
        return self

    def __exit__(self, *error: object) -> None:
        if self._before is not None and _handler(_SIGINT) == self._handle:  # the program has set no other
            _set_handler(_SIGINT, self._before)
        if not self._around:
            self.deliver()

    def passes(self) -> bool:
        """Whether one that comes now may go through at once."""
        return False

    def _handle(self, number: int, frame: Any) -> None:
        if self.passes():
            self._before(number, frame)
        else:
            self._missed = True

    def deliver(self) -> None:
        """Does what a signal does that came in between."""
        if self._around:
            self._around.deliver()
        elif self._missed:
            self._missed = False
            self._before(_SIGINT, None)


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

    def __enter__(self) -> int:
        with self._lock:
            self._users += 1
            if self._users == 1:
                hook = sys.breakpointhook
                if hook is not self._hook:
                    self._hook, self._counter = hook, functools.lru_cache(maxsize=0)(hook)
                sys.breakpointhook = self._counter
            return self.count

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._users -= 1
            if not self._users and sys.breakpointhook is self._counter:  # else the program has set another one
                sys.breakpointhook = self._hook

    @property
    def count(self) -> int:
        """How many there were."""
        misses: int = self._counter.cache_info().misses
        return misses


_prompts = Prompts()


def prompts() -> Prompts:
    """The process's counter of debugger prompts."""
    return _prompts


@in_children
def _forget() -> None:
    """In the child of a fork: nobody looks at anything yet."""
    global _prompts
    _prompts = Prompts()
