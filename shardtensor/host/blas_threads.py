"""The limit on the number of BLAS threads. The number is global to the process, so every change goes through this
module.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

from shardtensor.host import fork

_UNLIMITED = sys.maxsize
"""The limit that restores the original numbers of threads."""


class _Shares:
    """The limits on BLAS threads that are in effect.

    Several threads that call BLAS at once each get a share of the cores; without a limit, every call would start as
    many threads as there are cores. The number of BLAS threads is global to the process: it is the minimum of the
    limits in effect, and the original number is restored when the last limit ends.
    """

    def __init__(self) -> None:
        self._lock = fork.lock()  # A finalizer that the garbage collector calls may multiply matrices, too.
        self._wanted: list[int] = []
        self._libraries: list[tuple[Callable[[], int], Callable[[int], None]]] | None = None
        self._before: list[int] = []

    def enter(self, threads: int) -> None:
        """Adds a limit of ``threads`` BLAS threads."""
        with self._lock:
            if self._libraries is None:
                self._libraries = _libraries()
            if not self._wanted:
                self._before = [ask() for ask, _ in self._libraries]
            if threads < min(self._wanted, default=_UNLIMITED):
                self._set(threads)
            self._wanted.append(threads)

    def leave(self, threads: int) -> None:
        """Removes a limit that `enter` added."""
        with self._lock:
            self._wanted.remove(threads)
            if threads < (least := min(self._wanted, default=_UNLIMITED)):
                self._set(least)

    def abandon(self) -> None:
        """Restores the numbers in the child of a fork, where the lock may be held by a thread that does not exist."""
        if self._wanted:
            self._set(_UNLIMITED)

    def _set(self, threads: int) -> None:
        for (_, change), before in zip(self._libraries or (), self._before, strict=True):
            change(min(threads, before))


def _libraries() -> list[tuple[Callable[[], int], Callable[[int], None]]]:
    """Returns, for each loaded BLAS library, the functions that get and set its number of threads.

    The search takes milliseconds, so it is done once. While the interpreter shuts down, the list is empty: nothing can
    be imported any more, and no other thread is running.
    """
    if sys.is_finalizing():
        return []
    from threadpoolctl import ThreadpoolController  # It takes a millisecond, and few programs need it.

    libraries = ThreadpoolController().select(user_api="blas").lib_controllers
    # For OpenBLAS, threadpoolctl's public setter has no effect in other threads while the first thread that called it
    # is alive. The lock of `_Shares` serializes the calls, so the underlying setter is called instead.
    return [
        (library.get_num_threads, getattr(library, "_real_set_num_threads", library.set_num_threads))
        for library in libraries
    ]


_shares = _Shares()


class Limit:
    """A context manager that limits BLAS to ``number`` threads. Where limits overlap, the lowest one applies."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __enter__(self) -> None:
        self._shares = _shares  # A child that is forked inside of the `with` replaces the global object.
        self._shares.enter(self._number)

    def __exit__(self, *error: object) -> None:
        self._shares.leave(self._number)


@fork.in_children
def _forget() -> None:
    """Restores the numbers of BLAS threads in the child of a fork: the parent's limits never end there."""
    global _shares
    shares, _shares = _shares, _Shares()
    shares.abandon()
