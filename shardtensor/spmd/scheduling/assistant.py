"""Threads that call a function for a program, which waits for it and makes its collective calls.

A program is suspended by a switch to another greenlet of its thread. That is not possible inside of a function of
another library that keeps state of the thread in C++, as PyTorch's backward pass does: the backward passes of two
programs in one thread would take the work of each other. Such a function runs in a thread of its own instead.
"""

from __future__ import annotations

import contextvars
import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, NamedTuple

from shardtensor.errors import CollectiveError
from shardtensor.host.fork import in_children
from shardtensor.spmd.scheduling.mapped_program import Program, around


class _Outcome(NamedTuple):
    """The result of a function, or its error."""

    result: Any
    error: BaseException | None = None

    def get(self) -> Any:
        """Returns the result, or raises the error."""
        error = self.error
        if error is None:
            return self.result
        try:
            raise error
        finally:
            del error  # A cycle of the error and this frame would keep both alive.


def _outcome_of(function: Callable[[], Any]) -> _Outcome:
    try:
        return _Outcome(function())
    except BaseException as error:  # It is raised where the outcome is read.
        return _Outcome(None, error)


_KEPT = 64
"""The maximum number of idle threads."""


class _Thread:
    """A thread that calls one function after the other, until it gets None."""

    def __init__(self) -> None:
        self.jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()  # fork: a child has no such threads.
        self._thread = threading.Thread(target=self._work, name="shardtensor: assistant", daemon=True)
        self._thread.start()

    def is_here(self) -> bool:
        """Whether the calling thread is this one."""
        return threading.current_thread() is self._thread

    def _work(self) -> None:
        while (job := self.jobs.get()) is not None:
            job()
            del job  # It refers to the program.


_idle: deque[_Thread] = deque()  # Other threads may take one at any time, by one call.
in_children(_idle.clear)


class _Call:
    """One call of a function for a program; see `shardtensor.spmd.scheduling.mapped_program.Assistant`."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._requests: SimpleQueue[Callable[[], Any] | _Outcome] = SimpleQueue()  # fork: only this call has it.
        self._answers: SimpleQueue[_Outcome] = SimpleQueue()  # fork: only this call has it.
        self._left = False
        try:
            self._thread = _idle.pop()
        except IndexError:
            self._thread = _Thread()

    def is_here(self) -> bool:
        """See `Assistant`."""
        return self._thread.is_here()

    def ask(self, request: Callable[[], Any]) -> Any:
        """See `Assistant`."""
        if self._left:
            raise CollectiveError(f"a collective of {self._program}, which does not wait for it any more")
        self._requests.put(request)
        return self._answers.get().get()

    def run(self, function: Callable[[], Any]) -> Any:
        """Calls the function in the thread, and meanwhile what that asks for in the program."""
        context = contextvars.copy_context()
        self._thread.jobs.put(lambda: self._requests.put(_outcome_of(lambda: context.run(function))))
        try:
            while not isinstance(request := self._requests.get(), _Outcome):
                self._answers.put(_outcome_of(request))
        except BaseException as error:  # That of a signal handler. The call ends at its next request.
            self._left = True
            self._answers.put(_Outcome(None, CollectiveError(f"the program was interrupted: {error!r}")))
            self._thread.jobs.put(None)
            raise
        if len(_idle) < _KEPT:
            _idle.append(self._thread)
        else:
            self._thread.jobs.put(None)
        return request.get()


def call_beside(function: Callable[[], Any]) -> Any:
    """See `shardtensor.backend.protocol.beside_program`."""
    program = around()
    if program is None:
        return function()
    call = _Call(program)
    program.assistant = call
    try:
        return call.run(function)
    finally:
        program.assistant = None
