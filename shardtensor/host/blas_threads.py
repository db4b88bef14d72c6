"""How many threads BLAS may use. The number belongs to the process, so that all who want to change it do so here."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable

from shardtensor.host.fork import in_children


class _Shares:
    """BLAS has its share of the cores in each of several threads: else every call would start as many threads as there
    are cores. The number of BLAS threads belongs to the process: it is the least that any piece of work going on
    wants, and what it was before when the last one is done.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._wanted: list[int] = []
        self._libraries: list[tuple[Callable[[], int], Callable[[int], None]]] | None = None
        self._before: list[int] = []

    def enter(self, threads: int) -> None:
        """One more piece of work, that wants BLAS to use no more than so many threads."""
        with self._lock:
            if self._libraries is None:
                self._libraries = _libraries()
            if not self._wanted:
                self._before = [ask() for ask, _ in self._libraries]
            if not self._wanted or threads < min(self._wanted):
                self._set(threads)
            self._wanted.append(threads)

    def leave(self, threads: int) -> None:
        """It is done."""
        with self._lock:
            self._wanted.remove(threads)
            if not self._wanted:
                self._set(None)
            elif threads < (least := min(self._wanted)):
                self._set(least)

    def abandon(self) -> None:
        """Puts the numbers back in the child of a fork, where the lock may be held by a thread that is not there."""
        self._lock = threading.Lock()
        if self._wanted:
            self._set(None)

    def _set(self, threads: int | None) -> None:
        for (_, change), before in zip(self._libraries or (), self._before, strict=True):
            change(before if threads is None else min(threads, before))


def _libraries() -> list[tuple[Callable[[], int], Callable[[int], None]]]:
    """What asks for and what sets the number of threads of each BLAS that is loaded: found once, in milliseconds. At
    the interpreter's end, when nothing can be imported any more, and no thread is beside this one, none.
    """
    if sys.is_finalizing():
        return []
    from threadpoolctl import ThreadpoolController

    found = ThreadpoolController().select(user_api="blas").lib_controllers
    # For OpenBLAS threadpoolctl obeys only the first thread that ever asked; here one asks after the other.
    return [
        (library.get_num_threads, getattr(library, "_real_set_num_threads", library.set_num_threads))
        for library in found
    ]


_shares = _Shares()


class Limit:
    """In the ``with``, BLAS uses no more than so many threads, nor than others allow it that overlap."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __enter__(self) -> None:
        self._shares = _shares  # a child that is forked meanwhile has others
        self._shares.enter(self._number)

    def __exit__(self, *error: object) -> None:
        self._shares.leave(self._number)


@in_children
def _forget() -> None:
    """In the child of a fork: the parent's pieces of work are not here, and nobody would put back what they changed."""
    global _shares
    shares, _shares = _shares, _Shares()
    shares.abandon()
