"""Deferral of signal handlers that are Python functions, while operators and maps run."""

from __future__ import annotations

import _thread
import functools
import importlib
import itertools
import signal
import sys
import threading
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any, cast

from shardtensor.host.fork import in_children
from shardtensor.host.limits import in_main_thread

# The wrappers in the `signal` module convert every number to an enum, which is a fifth of the cost of a small map.
_c = importlib.import_module("_signal")
_set_handler: Callable[[int, Any], Any] = _c.signal
_handler: Callable[[int], Any] = _c.getsignal

_FATAL = {"SIGSEGV", "SIGBUS", "SIGFPE", "SIGILL", "SIGABRT", "SIGKILL", "SIGSTOP"}
"""The signals whose handlers are never replaced: Python handlers are useless for them, and setting one would replace
that of `faulthandler`.
"""

_NUMBERS = tuple(sorted(int(s) for s in signal.valid_signals() if getattr(s, "name", "") not in _FATAL))


class Interrupts:
    """A context manager that defers the handlers of all signals until `deliver` is called or the context ends.

    A handler runs between any two instructions of the main thread, and may raise there: `KeyboardInterrupt`, or the
    timeout of an alarm. It would leave state that takes several instructions to change half changed, and an in-place
    write half written. Inside the context, a signal is only recorded. In threads other than the main thread, which run
    no handlers, the class does nothing.
    """

    __slots__ = ("_is_entered",)

    def __enter__(self) -> Any:
        self._is_entered = in_main_thread()
        if self._is_entered:
            try:
                _active.append(self)
                if len(_active) == 1:
                    _hold()
            except BaseException:  # A handler that is not replaced yet may raise here, after others were deferred.
                self.__exit__()
                raise
        return self

    def __exit__(self, *error: object) -> None:
        if self._is_entered:
            try:
                self._leave()
            finally:
                if missed and _may_run():
                    self.deliver()

    def _leave(self) -> None:
        """Undoes `__enter__`, even if a handler that has just been restored raises meanwhile."""
        try:
            if _active == [self]:
                _put_back()
            if self in _active:
                _active.remove(self)
        except BaseException:  # A restored handler raised: the rest is undone before its error goes on.
            self._leave()
            raise

    def passes(self) -> bool:
        """Returns whether this context allows handlers to run immediately, between any two instructions."""
        return False

    def permits(self) -> bool:
        """Returns whether this context allows `deliver` of a nested context to run handlers."""
        return True

    def are_missed(self) -> bool:
        """Returns whether handlers are deferred that `deliver` of this context can run."""
        return bool(missed) and self._is_entered

    def deliver(self) -> None:
        """Runs the deferred handlers, in the order in which their signals first arrived.

        Raises:
            BaseException: a handler raised it; the handlers after it stay deferred.
        """
        while self.are_missed() and all(i.permits() for i in _active):
            _run_first(sys._getframe(1))


def hear() -> None:
    """Runs the deferred handlers in the main thread, if all contexts allow handlers to run immediately."""
    while missed and in_main_thread() and _may_run():
        _run_first(sys._getframe(1))


def _run_first(frame: FrameType) -> None:
    number = next(iter(missed))
    handler = missed[number]
    del missed[number]
    handler.run(number, frame)


class _Held:
    """The handler that replaces one of the user's while `Interrupts` contexts are active.

    It may be installed after the contexts have ended, if the user's code has saved and restored it; it then calls the
    user's handler immediately.
    """

    __slots__ = ("_user_handler",)

    def __init__(self, handler: Callable[[int, FrameType | None], Any]) -> None:
        self._user_handler = handler

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if _may_run():
            self.run(number, frame)
        else:
            missed.setdefault(number, self)

    def run(self, number: int, frame: FrameType | None) -> None:
        """Calls the user's handler. Handlers that it installs are replaced, too."""
        try:
            self._user_handler(number, frame)
        finally:
            if _active:
                _hold()

    def put_back(self, number: int) -> None:
        """Restores the user's handler, unless another one has been installed meanwhile."""
        if _handler(number) is self:
            _set_handler(number, self._user_handler)


_active: list[Interrupts] = []
"""The active contexts of the main thread. Greenlets may leave them in a different order than they entered them."""

_held: dict[int, _Held] = {}
"""The handlers that are installed in place of the user's, by signal number."""

missed: dict[int, _Held] = {}
"""The deferred handlers by signal number, in the order in which the signals first arrived."""

_owner = 0
"""The `threading.get_ident` of the thread to which `_active` belongs; it does not change in the child of a fork."""


def _may_run() -> bool:
    """Returns whether all active contexts allow handlers to run immediately."""
    return all(i.passes() for i in _active)


def _hold() -> None:
    """Replaces all handlers that are Python functions by `_Held` handlers."""
    global _owner
    _owner = threading.get_ident()
    for number in itertools.compress(_NUMBERS, map(callable, map(_handler, _NUMBERS))):
        handler = _handler(number)
        if callable(handler) and type(handler) is not _Held:
            _held[number] = _Held(handler)
            _set_handler(number, _held[number])


def _put_back() -> None:
    """Undoes `_hold`. If a handler that has just been restored raises, it can be called again to continue."""
    while _held:
        number = next(iter(_held))
        _held[number].put_back(number)
        _held.pop(number, None)


class Later:
    """An object at whose deallocation the main thread is interrupted by an exception; see `raise_later`."""

    __slots__ = ("__weakref__",)


class _Interruption(weakref.ref[Later]):
    """A reference that calls `_thread.interrupt_main` when its object is deallocated; it converts to the number of the
    signal that this function receives. No Python code runs then, so that no signal handler does.
    """

    __slots__ = ()

    __index__ = staticmethod(functools.partial(int, signal.SIGINT))


class _Raised:
    """The handler that raises an exception once, in place of the handler of SIGINT, and restores that one."""

    def __init__(self, error: BaseException, later: Later) -> None:
        self._error: BaseException | None = error
        self._before = _handler(signal.SIGINT)
        self._interruption = _Interruption(later, cast(Any, _thread.interrupt_main))

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if _handler(signal.SIGINT) is self:
            _set_handler(signal.SIGINT, self._before)
        error, self._error = self._error, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # The reference cycle of the error and this frame would keep its objects alive.


def raise_later(error: BaseException) -> Later:
    """Raises an exception that a signal handler raised in a finalizer, where Python would only print it, in the main
    thread when the result is deallocated. The finalizer returns it: Python deallocates the result of a finalizer after
    its last instruction, whereas a local variable would live as long as the traceback.

    Raises:
        BaseException: ``error``, if this is not the main thread, where no handler can have raised it.
    """
    if not in_main_thread():
        raise error
    later = Later()
    _set_handler(signal.SIGINT, _Raised(error, later))
    return later


@in_children
def _drop_signals() -> None:
    """Drops the deferred handlers in the child of a fork, since the signals were sent to the parent. If another thread
    than the main thread forked, the active contexts do not exist in the child, and the handlers are restored.
    """
    missed.clear()
    if _active and threading.get_ident() != _owner:
        _active.clear()
        _put_back()
