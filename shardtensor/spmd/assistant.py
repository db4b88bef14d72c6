"""Threads that call a function for a program, which waits for it and makes its collective calls.

A program is suspended by a switch to another greenlet of its thread. That is not possible inside of a function of
another library that keeps state of the thread in C++, as PyTorch's backward pass does: the backward passes of two
programs in one thread would take the work of each other. Such a function runs in a thread of its own instead.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, NamedTuple

from shardtensor.errors import CollectiveError
from shardtensor.spmd.program import Assistant, Program, around


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


class _Thread:
    """The thread of one call; see the module. It ends with the call."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._requests: SimpleQueue[Callable[[], Any] | _Outcome] = SimpleQueue()
        self._answers: SimpleQueue[_Outcome] = SimpleQueue()
        self._left = False

    def is_here(self) -> bool:
        """See `Assistant`."""
        return threading.current_thread() is self._thread

    def ask(self, request: Callable[[], Any]) -> Any:
        """See `Assistant`."""
        if self._left:
            raise CollectiveError(f"a collective of {self._program}, which does not wait for it any more")
        self._requests.put(request)
        return self._answers.get().get()

    def call(self, function: Callable[[], Any]) -> Any:
        """Calls the function in the thread, and meanwhile what that asks for in the program."""
        context = contextvars.copy_context()
        self._thread = threading.Thread(
            target=lambda: self._requests.put(_outcome_of(lambda: context.run(function))),
            name=f"shardtensor: {self._program}",
            daemon=True,
        )
        self._thread.start()
        try:
            while not isinstance(request := self._requests.get(), _Outcome):
                self._answers.put(_outcome_of(request))
        except BaseException as error:  # That of a signal handler. The thread ends at its next request.
            self._left = True
            self._answers.put(_Outcome(None, CollectiveError(f"the program was interrupted: {error!r}")))
            raise
        return request.get()


def call_beside(function: Callable[[], Any]) -> Any:
    """See `shardtensor.backend.protocol.beside_program`."""
    program = around()
    if program is None:
        return function()
    thread: Assistant = (made := _Thread(program))
    program.assistant = thread
    try:
        return made.call(function)
    finally:
        program.assistant = None
