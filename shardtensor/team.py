"""Threads that work beside the caller: asked only when work has shown that it is long."""

from __future__ import annotations

import contextvars
import functools
import os
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from concurrent.futures import Future, ThreadPoolExecutor

    from threadpoolctl import ThreadpoolController

_pool: ThreadPoolExecutor | None = None
_lock = threading.Lock()


def _threads() -> ThreadPoolExecutor:
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
    global _pool, _lock, _prompts, _shares
    _pool, _lock, _prompts, _shares = None, threading.Lock(), Prompts(), _Shares()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


class Helpers:
    """Helper threads for one piece of work."""

    def __init__(self) -> None:
        self._futures: list[Future[None]] = []

    def call(self, work: Callable[[], None], most: int, context: contextvars.Context) -> None:
        """Has at most that many threads do ``work``, each in a copy of the context; none where there is one core."""
        count = min(usable_cores() - 1, most)
        if count < 1:
            return
        _shares.enter(count + 1)
        self._futures = [_threads().submit(context.copy().run, work) for _ in range(count)]

    def dismiss(self) -> None:
        """Waits until they are done.

        Raises:
            BaseException: what ``work`` raised.
        """
        if not self._futures:
            return
        try:
            for future in self._futures:
                if not future.cancel():  # it had not begun: others were served first
                    future.result()
        finally:
            _shares.leave()


def divide(work: Callable[[int], None], count: int) -> None:
    """Does ``work(k)`` for every k below ``count``: the caller the first, helper threads the others as far as they are
    free, and the caller what they have not begun. Nobody waits for a thread that waits.
    """
    context = contextvars.copy_context()
    futures = [_threads().submit(context.copy().run, work, k) for k in range(1, count)]
    try:
        work(0)
        for k, future in enumerate(futures, 1):
            if future.cancel():
                work(k)
            else:
                future.result()
    finally:
        for future in futures:
            if not future.cancel():
                future.exception()  # waits: after an error, too, nothing goes on behind its back


class _Shares:
    """BLAS has its share of the cores in each of several threads: else every call would start as many threads as there
    are cores. The number of BLAS threads belongs to the process; it is put back when the last piece of work is done.
    """

    def __init__(self) -> None:
        self._users = 0
        self._blas: ThreadpoolController | None = None
        self._limit: Any = None

    def enter(self, threads: int) -> None:
        """One more piece of work is done by so many threads."""
        with _lock:
            self._users += 1
            if self._users == 1:
                if self._blas is None:
                    from threadpoolctl import ThreadpoolController  # looks at all loaded libraries: milliseconds, once

                    self._blas = ThreadpoolController()
                self._limit = self._blas.limit(limits=max(usable_cores() // threads, 1), user_api="blas")

    def leave(self) -> None:
        """It is done."""
        with _lock:
            self._users -= 1
            if not self._users:
                self._limit.restore_original_limits()


class Prompts:
    """Counts calls of ``breakpoint()`` while pieces of work go on: while somebody looks at one program in a debugger,
    no others shall start beside it.

    The hook is wrapped by a cache that keeps nothing, since that is a counter without a frame of its own: debuggers
    stop in the frame that called the hook.
    """

    def __init__(self) -> None:
        self._users = 0
        self._hook: Any = None
        self._counter: Any = None

    def __enter__(self) -> int:
        with _lock:
            self._users += 1
            if self._users == 1:
                hook = sys.breakpointhook
                if hook is not self._hook:
                    self._hook, self._counter = hook, functools.lru_cache(maxsize=0)(hook)
                sys.breakpointhook = self._counter
            return self.count

    def __exit__(self, *error: object) -> None:
        with _lock:
            self._users -= 1
            if not self._users and sys.breakpointhook is self._counter:  # else the program has set another one
                sys.breakpointhook = self._hook

    @property
    def count(self) -> int:
        """How many there were."""
        misses: int = self._counter.cache_info().misses
        return misses


_shares = _Shares()
_prompts = Prompts()


def prompts() -> Prompts:
    """The process's counter of debugger prompts."""
    return _prompts
