"""What interrupts a piece of work: signals whose handlers are Python functions, and prompts of a debugger."""

from __future__ import annotations

import importlib
import itertools
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from shardtensor.host.fork import in_children
from shardtensor.host.limits import in_main_thread

# -- signals ---------------------------------------------------------------------------------------

# Python's own wrappers of these make enums of all numbers: a fifth of the cost of a small map.
_c = importlib.import_module("_signal")
_set_handler: Callable[[int, Any], Any] = _c.signal
_handler: Callable[[int], Any] = _c.getsignal

_FATAL = {"SIGSEGV", "SIGBUS", "SIGFPE", "SIGILL", "SIGABRT", "SIGKILL", "SIGSTOP"}
"""Signals that are left as they are: Python handlers are of no use for them, and `faulthandler` would be replaced."""

_NUMBERS = tuple(sorted(int(s) for s in signal.valid_signals() if getattr(s, "name", "") not in _FATAL))


class Interrupts:
    """Holds back the handlers of all signals in the ``with``, until `deliver` or the end.

    A handler runs between any two instructions of the main thread, and may raise there: `KeyboardInterrupt`, or the
    timeout of an alarm. State that takes several instructions to change would be left half changed, and an in-place
    write half written. In the ``with``, a signal is only noted. In other threads, which run no handlers, this class
    does nothing.
    """

    __slots__ = ("_is_entered",)

    def __enter__(self) -> Any:
        self._is_entered = in_main_thread()
        if self._is_entered:
            try:
                _active.append(self)
                if len(_active) == 1:
                    _hold()
            except BaseException:  # raised by a handler that was not replaced yet
                self._leave()
                raise
        return self

    def __exit__(self, *error: object) -> None:
        if self._is_entered:
            try:
                self._leave()
            finally:
                if _may_run():
                    self.deliver()

    def _leave(self) -> None:
        """Undoes `__enter__`, also where a handler raises that has just been put back."""
        try:
            if _active == [self]:
                _put_back()
            if self in _active:
                _active.remove(self)
        except BaseException:
            self._leave()
            raise

    def passes(self) -> bool:
        """Whether a handler may run now, between any two instructions."""
        return False

    def permits(self) -> bool:
        """Whether an inner piece of work may call `deliver` now."""
        return True

    def are_missed(self) -> bool:
        """Whether `deliver` has anything to do."""
        return bool(_missed) and self._is_entered

    def deliver(self) -> None:
        """Runs the handlers of the signals that were held back, in the order in which they first came.

        Raises:
            BaseException: what a handler raises; the other signals stay noted.
        """
        while self.are_missed() and all(i.permits() for i in _active):
            _run_first(sys._getframe(1))


def hear() -> None:
    """Runs the handlers that were held back, if they may run between any two instructions from here on."""
    while _missed and in_main_thread() and _may_run():
        _run_first(sys._getframe(1))


def _run_first(frame: FrameType) -> None:
    number = next(iter(_missed))
    handler = _missed[number]
    del _missed[number]
    handler.run(number, frame)


class _Held:
    """A handler in place of a program's own. It outlives the pieces of work if the program saves and restores it, and
    calls the program's own handler then.
    """

    __slots__ = ("_own",)

    def __init__(self, own: Callable[[int, FrameType | None], Any]) -> None:
        self._own = own

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if _may_run():
            self.run(number, frame)
        else:
            _missed.setdefault(number, self)

    def run(self, number: int, frame: FrameType | None) -> None:
        """Calls the program's own handler, which may set others: they are held, too."""
        try:
            self._own(number, frame)
        finally:
            if _active:
                _hold()

    def put_back(self, number: int) -> None:
        """Sets the program's own handler, unless the program has set another one."""
        if _handler(number) is self:
            _set_handler(number, self._own)


_active: list[Interrupts] = []
"""Those of the main thread. Greenlets may leave them in another order than they entered them."""

_held: dict[int, _Held] = {}
_missed: dict[int, _Held] = {}
_owner = 0
"""The thread of `_active`, which keeps this number in the child of a fork."""


def _may_run() -> bool:
    """Whether a handler may run between any two instructions."""
    return all(i.passes() for i in _active)


def _hold() -> None:
    """Replaces the handlers that are Python functions."""
    global _owner
    _owner = threading.get_ident()
    for number in itertools.compress(_NUMBERS, map(callable, map(_handler, _NUMBERS))):
        own = _handler(number)
        if callable(own) and type(own) is not _Held:
            _held[number] = _Held(own)
            _set_handler(number, _held[number])


def _put_back() -> None:
    """Undoes `_hold`. It can be called again where a handler has raised that was just put back."""
    while _held:
        number = next(iter(_held))
        _held[number].put_back(number)
        _held.pop(number, None)


@in_children
def _drop_signals() -> None:
    """In the child of a fork: signals were the parent's, and if another thread forked, so was the work that holds
    them.
    """
    _missed.clear()
    if _active and threading.get_ident() != _owner:
        _active.clear()
        _put_back()


# -- debuggers -------------------------------------------------------------------------------------
