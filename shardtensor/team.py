"""Threads that work beside the caller. Small work never meets them: they are asked only when a task has shown that it
is long.
"""

from __future__ import annotations

import contextvars
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from concurrent.futures import Future, ThreadPoolExecutor

_pool: ThreadPoolExecutor | None = None
_lock = threading.Lock()


def _helpers() -> ThreadPoolExecutor:
    from concurrent.futures import ThreadPoolExecutor  # loaded when the first long work comes

    global _pool
    with _lock:
        if _pool is None:
            _pool = ThreadPoolExecutor(max(usable_cores() - 1, 1), "shardtensor")
        return _pool


def usable_cores() -> int:
    """How many cores this process may run on."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on this operating system
        return os.cpu_count() or 1


def _forget() -> None:
    """In the child of a fork: the parent's threads are not here."""
    global _pool, _lock
    _pool, _lock = None, threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


class Failed(Exception):
    """The number of the task that failed, and how."""

    def __init__(self, number: int, error: BaseException) -> None:
        super().__init__(number, error)
        self.number = number
        self.error = error


def run_all(tasks: Sequence[Callable[[], Any]], *, patience: float) -> list[Any]:
    """The results of all tasks, in order.

    The caller works through them; once that has taken more than ``patience`` (seconds; a helper costs about 50 µs to
    wake), helper threads take tasks, too, each in a copy of the caller's context. When a task fails, those not yet
    started are not run.

    Raises:
        Failed: a task failed; of several, the first in order.
    """
    results: list[Any] = [None] * len(tasks)
    errors: list[tuple[int, BaseException]] = []
    queue = iter(range(len(tasks)))
    lock = threading.Lock()

    def work() -> None:
        while True:
            with lock:
                number = None if errors else next(queue, None)
            if number is None:
                return
            attempt(number)

    def attempt(number: int) -> None:
        try:
            results[number] = tasks[number]()
        except BaseException as error:  # carried to the caller, who raises it
            with lock:
                errors.append((number, error))

    started = time.perf_counter()
    futures: list[Future[None]] = []
    for number in queue:
        attempt(number)
        if errors:
            break
        if time.perf_counter() - started > patience and usable_cores() > 1:
            left = len(tasks) - number - 1
            try:
                for _ in range(min(usable_cores() - 1, left - 1)):
                    futures.append(_helpers().submit(contextvars.copy_context().run, work))
                work()
            finally:
                for future in futures:
                    future.exception()  # waits; what went wrong is in `errors`
            break
    if errors:
        first = min(errors, key=lambda e: e[0])
        errors.clear()  # the error's traceback ends here: the two would keep each other, and all arguments, alive
        raise Failed(*first)
    return results
