"""Threads that work beside the caller: asked only for work that is long enough to pay for waking them."""

from __future__ import annotations

import atexit
import contextlib
import contextvars
import functools
import itertools
import os
import queue
import sys
import threading
import time
from collections.abc import Callable

from shardtensor.errors import ArgumentError
from shardtensor.host.fork import in_children
from shardtensor.host.limits import count_from_environment, usable_cores
from shardtensor.host.signals import Interrupts

# -- how many --------------------------------------------------------------------------------------

_threads_here: contextvars.ContextVar[int | None] = contextvars.ContextVar("shardtensor_threads", default=None)
_said: list[set_num_threads] = []  # for the whole process; the last one counts
_KEPT = 64


def num_threads() -> int:
    """How many threads work on the operators of the numpy backend, the caller's included: what `set_num_threads` said,
    else ``SHARDTENSOR_NUM_THREADS``, else the cores that this process may use (its affinity mask and control groups
    count).

    >>> with st.set_num_threads(1):
    ...     st.num_threads()
    1
    """
    return _threads_here.get() or (_said[-1].number if _said else None) or _default_threads()


MOST_THREADS = 1 << 12
"""As many threads may be asked for."""


@functools.cache
def _threads_said() -> int | None:
    return count_from_environment("SHARDTENSOR_NUM_THREADS", MOST_THREADS)


def _default_threads() -> int:
    return _threads_said() or usable_cores()


class set_num_threads:  # noqa: N801 - used like a function
    """Sets how many threads work on the operators of the numpy backend; BLAS gets no more either while it works for
    them. Results do not depend on it, not in a bit.

    For the whole process; or as a context manager for what is called inside of the ``with``, in this thread and in the
    maps that it starts. More than there are cores are slower.

    Args:
        number: from 1 to 4,096; None for the default (see `num_threads`).

    Raises:
        ArgumentError: number is no whole number from 1 to 4,096.

    >>> with st.set_num_threads(2):
    ...     st.sum(st.ones(10)).item()
    10.0
    """

    def __init__(self, number: int | None) -> None:
        if number is not None and (type(number) is not int or not 1 <= number <= MOST_THREADS):
            raise ArgumentError(
                f"set_num_threads: number is {number!r:.60}; wanted a whole number from 1 to {MOST_THREADS:,}, or None"
            )
        self.number = number
        _said.append(self)
        del _said[:-_KEPT]

    def __enter__(self) -> None:
        with contextlib.suppress(ValueError):  # what a `with` follows was not meant for the process
            _said.remove(self)
        self._token = _threads_here.set(self.number or _default_threads())

    def __exit__(self, *error: object) -> None:
        _threads_here.reset(self._token)


# -- threads ---------------------------------------------------------------------------------------


_FAREWELL = 1.0
"""Seconds that the end of the interpreter waits for threads: they may be busy with what nobody waits for any more."""


class _Team:
    """Threads that wait for work, as many as were ever wanted at once. They end with the interpreter.

    Attributes:
        is_closed: whether no thread takes work any more, since the interpreter ends.
        is_parents: whether this is the child of a fork, and the threads are the parent's.
    """

    def __init__(self) -> None:
        self._inbox: queue.SimpleQueue[Helpers | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self.is_closed = self.is_parents = False

    def hand(self, work: Helpers, count: int) -> None:
        """Has that many threads look at the work, as soon as they have nothing else to do; none at the interpreter's
        end, where a thread that is started never runs, and its start never returns.
        """
        if self.is_closed or sys.is_finalizing():
            return
        if len(self._threads) < count:
            with self._lock:
                for number in range(len(self._threads), 0 if self.is_closed else count):
                    thread = threading.Thread(target=_serve, args=(self,), name=f"shardtensor_{number}", daemon=True)
                    try:
                        thread.start()
                    except RuntimeError:  # the system has no more: the caller works with fewer, or alone
                        break
                    self._threads.append(thread)
        for _ in range(min(count, len(self._threads))):
            self._inbox.put(work)

    def dissolve(self) -> None:
        """Ends the threads: while the interpreter is still there, which they need for what they are doing."""
        with self._lock:
            for _ in self._threads:
                self._inbox.put(None)
            end = time.monotonic() + _FAREWELL
            for thread in self._threads:
                thread.join(max(end - time.monotonic(), 0.0))
            self._threads.clear()

    def close(self) -> None:
        """Ends the threads for good. What runs later, such as a ``__del__`` at the interpreter's end, runs without."""
        self.is_closed = True
        self.dissolve()

    def next_work(self) -> Helpers | None:
        """What one of the threads shall do next; None: it shall end."""
        return None if self.is_closed or self.is_parents else self._inbox.get()


def _serve(team: _Team) -> None:
    while (work := team.next_work()) is not None:
        work.take_part()
        del work  # it holds arrays, and the next one may be long in coming
    if team.is_parents:  # this thread has forked: in the child it is the main thread, and has nowhere to return to
        os._exit(1)


class Helpers:
    """Helper threads for one piece of work."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._gone = threading.Lock()
        self._active = 0
        self._dismissed = False
        self._error: BaseException | None = None
        self._work: Callable[[], None] | None = None
        self._context: contextvars.Context

    def call(self, work: Callable[[], None], most: int, context: contextvars.Context) -> None:
        """Has at most that many threads do ``work``, each in a copy of the context; none where there is one thread."""
        count = min(num_threads() - 1, most)
        if count < 1:
            return
        self._work, self._context = work, context
        _team.hand(self, count)

    def take_part(self) -> None:
        """What a helper thread does."""
        with self._lock:
            if self._dismissed:
                return
            self._active += 1
            if self._active == 1:
                self._gone.acquire()
            work, context = self._work, self._context.copy()
        assert work is not None
        error: BaseException | None = None
        try:
            context.run(work)
        except BaseException as raised:  # carried to the caller, who raises it
            error = raised
        is_abandoned = self._work is not work
        del work, context
        if is_abandoned:
            return
        with self._lock:
            if self._error is None:
                self._error = error
            self._active -= 1
            if not self._active:
                self._gone.release()
            del error

    def dismiss(self) -> None:
        """Waits until they are done; those that have not begun are not needed any more.

        Raises:
            BaseException: what ``work`` raised.
        """
        if self._work is None:
            return
        with self._lock:
            self._dismissed = True
        with self._gone:
            pass
        error, self._error, self._work = self._error, None, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # else it and this frame would keep each other, and the arrays, alive

    def abandon(self) -> None:
        """Forgets the threads in the child of a fork, where threads that do not exist there may hold the locks."""
        self._lock, self._gone = threading.Lock(), threading.Lock()
        self._work = None


_team = _Team()
atexit.register(lambda: _team.close())


def each(work: Callable[[int], None], count: int, *, threads: int | None = None, breaks: bool = True) -> None:
    """Does ``work(k)`` for every k below ``count``, in the caller and in helper threads that have nothing else to do.
    Nobody waits for a thread that waits.

    Args:
        work: must not care in which order and beside what it runs.
        count: how many there are.
        threads: at most how many work; by default as many as `num_threads` says.
        breaks: whether Ctrl-C may leave some undone; else it waits for the end.

    Raises:
        BaseException: what ``work`` raised first; what had not begun by then is left undone.
    """
    numbers = itertools.count()  # whose `next` is one step of the interpreter's: no lock is needed
    errors: list[BaseException] = []

    def some() -> None:
        try:
            while not errors and (k := next(numbers)) < count:
                work(k)
        except BaseException as error:  # carried to the caller, who raises the first one
            errors.append(error)

    with Interrupts() as interrupts:
        helpers = Helpers()
        most = min(threads or num_threads(), count) - 1
        if most > 0:
            helpers.call(some, most, contextvars.copy_context())
        try:
            while not errors and (k := next(numbers)) < count:
                work(k)
                if breaks:
                    interrupts.deliver()
        except BaseException as error:
            errors.append(error)
        helpers.dismiss()
        if errors:
            try:
                raise errors[0]
            finally:
                errors.clear()  # else they and these frames would keep each other, and the arrays, alive


@in_children
def _forget() -> None:
    """In the child of a fork: the parent's threads are not here."""
    global _team
    _team.is_parents = True
    _team = _Team()
