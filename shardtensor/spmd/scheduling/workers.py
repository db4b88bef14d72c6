"""Workers: the greenlets in which the programs of maps run, and which stay for the next maps of their thread.

A new greenlet maps memory for its Python frames and unmaps it at its end, which takes longer than all else in a small
map.
"""

from __future__ import annotations

import functools
import importlib
import sys
import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import FrameType

    from greenlet import greenlet

_KEPT = 64
"""The maximum number of idle workers of a thread: each holds 16 KiB for its Python frames."""


@functools.cache
def greenlets() -> Any:
    """Returns the greenlet library, which the first map imports."""
    return importlib.import_module("greenlet")


class _Idle(threading.local):
    """The idle workers of a thread, as long as the same greenlet calls the maps."""

    def __init__(self) -> None:
        self._main: greenlet | None = None
        self._workers: list[greenlet] = []

    def of(self, main: greenlet) -> list[greenlet]:
        """Returns the list of the idle workers to which ``main`` has switched."""
        if self._main is not main:
            self._main, self._workers = main, []
        return self._workers


idle = _Idle()


def worker(main: greenlet, idle: list[greenlet], job: Callable[[], None]) -> greenlet:
    """Returns a greenlet, if possible one of the ``idle`` ones, that calls ``job`` in an empty context when ``main``,
    the calling greenlet, switches to it.

    If it is a worker of an earlier map, it may end instead without having called the job.
    """
    result: greenlet = idle.pop() if idle else greenlets().greenlet(_work)
    result.job = main, idle, job
    return result


def _work() -> None:
    """The function of a worker: runs one job after the other.

    The first frame of a worker returns to a frame of the main greenlet that has switched to it first. A stack trace
    taken by C code (torch takes one for each error; profilers and debuggers do) follows this return address, and reads
    invalid addresses unless the main greenlet is suspended in a call at the same place of the C stack. A worker that is
    resumed from another place ends.
    """
    # A greenlet keeps the recursion depth at which it began: in a later map, this one would have few frames left.
    is_deep = depth_of(greenlets().getcurrent().job[0].gr_frame) > sys.getrecursionlimit() // 4
    while True:
        worker = greenlets().getcurrent()
        main, idle, job = worker.job
        del worker.job
        job()
        worker.gr_context = None  # The context refers to the program, and so to the worker and all results.
        if is_deep or len(idle) >= _KEPT or _is_traced():
            return
        idle.append(worker)
        del job, idle, worker  # A worker that refers to itself would outlive its thread.
        main.switch()
        if main._stack_saved != _saved_at_first() or _is_traced():
            return


def depth_of(frame: FrameType | None) -> int:
    """Returns the number of frames from this one to the outermost one of its stack."""
    count = 0
    while frame is not None:
        frame = frame.f_back
        count += 1
    return count


def _is_traced() -> bool:
    """Whether a debugger or profiler is active, which a greenlet inherits only at its start."""
    return sys.gettrace() is not None or sys.getprofile() is not None


@functools.cache
def _saved_at_first() -> int:
    """Returns how many bytes of its stack the main greenlet saves where it resumes a worker from the place from which
    it has switched to it first. From a deeper place it saves more, since a greenlet saves what lies in the way of the
    other one's stack; from any other place less.
    """
    main = greenlets().getcurrent()
    saved: list[int] = []

    def probe() -> None:
        main.switch()
        saved.append(main._stack_saved)

    deque(map(greenlets().greenlet.switch, [greenlets().greenlet(probe)] * 2), maxlen=0)
    return saved[0]
