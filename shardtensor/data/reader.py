"""Results that a thread computes ahead of their use, until it is told to end."""

from __future__ import annotations

import atexit
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from shardtensor.errors import ArgumentError
from shardtensor.host import fork


class Reader:
    """A thread that calls a function with successive numbers, some calls ahead of those whose results are taken.

    It ends after the last number, after an error, and when `close` is called: also by the interpreter at its end. In
    the child of a fork, which has no such thread, nothing may be taken.

    Attributes:
        next: the number whose result is taken next.
        generation: the number of forks before the thread was made.
    """

    def __init__(self, compute: Callable[[int], Any], first: int, end: int | None, ahead: int) -> None:
        self.next, self.generation = first, fork.generation
        self._compute, self._first, self._end, self._ahead = compute, first, end, ahead
        self._ready: deque[tuple[Any, BaseException | None]] = deque()
        self._is_closed = False
        self._changed = threading.Condition()  # fork: the child does not use it.
        self._thread = threading.Thread(target=self._run, name="shardtensor-batches", daemon=True)
        atexit.register(self.close)
        self._thread.start()

    def take(self) -> Any:
        """Returns the next result, or raises the error of its computation.

        Raises:
            ArgumentError: the reader is closed, also in another thread while this one waits.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._ready or self._is_closed)
            if self._is_closed:
                raise ArgumentError(
                    "data.Batches: another thread has called close() while this one was waiting for a batch; wait for "
                    "the call of next() first"
                )
            result, error = self._ready.popleft()
            self.next += 1
            self._changed.notify_all()
        if error is not None:
            raise error
        return result

    def close(self, *, wait: bool = True) -> None:
        """Ends the thread after the call that it is in.

        Args:
            wait: whether to wait until it has ended. The garbage collector, which may run while a lock is held that the
                call needs, must not.
        """
        if self.generation != fork.generation:
            return
        with self._changed:
            self._is_closed = True
            self._ready.clear()
            self._changed.notify_all()
        if wait and threading.current_thread() is not self._thread:
            self._thread.join()
        atexit.unregister(self.close)

    def _run(self) -> None:
        number, error = self._first, None
        while number != self._end and error is None:
            with self._changed:
                self._changed.wait_for(lambda: self._is_closed or len(self._ready) < self._ahead)
                if self._is_closed:
                    return
            result = None
            try:
                result = self._compute(number)
            except BaseException as raised:  # It is raised in the thread that takes the result.
                error = raised
            with self._changed:
                if not self._is_closed:
                    self._ready.append((result, error))
                self._changed.notify_all()
            number += 1
