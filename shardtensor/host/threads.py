"""The thread pool: helper threads that run work together with the calling thread. Callers use them only for work that
takes long enough to pay for waking them.
"""

from __future__ import annotations

import atexit
import contextlib
import contextvars
import functools
import os
import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Callable

from shardtensor.errors import ArgumentError, ForkError
from shardtensor.host.fork import in_children
from shardtensor.host.limits import count_from_environment, usable_cores
from shardtensor.host.signals import Interrupts

# -- the number of threads ----------------------------------------------------------------------

_threads_here: contextvars.ContextVar[int | None] = contextvars.ContextVar("shardtensor_threads", default=None)
_settings: list[set_num_threads] = []  # The last of these settings applies to the whole process.
_KEPT = 64
"""The maximum length of `_settings`, which would otherwise grow with every call."""


def num_threads() -> int:
    """Returns the number of threads that run operators of the numpy backend, including the calling thread.

    It is the number set by `set_num_threads`, else the environment variable ``SHARDTENSOR_NUM_THREADS``, else the
    number of cores that this process may use, as limited by its affinity mask and control groups.

    Raises:
        BackendError: the value of ``SHARDTENSOR_NUM_THREADS`` is used and is not an integer from 1 to 4,096.

    >>> with st.set_num_threads(1):
    ...     st.num_threads()
    1
    """
    last = _settings[-1:]  # in one step: another thread may remove it
    return _threads_here.get() or (last[0].number if last else None) or _default_threads()


MOST_THREADS = 1 << 12
"""The maximum number of threads."""


@functools.cache
def _requested_threads() -> int | None:
    return count_from_environment("SHARDTENSOR_NUM_THREADS", MOST_THREADS)


def _default_threads() -> int:
    return _requested_threads() or usable_cores()


class set_num_threads:  # noqa: N801 - used like a function
    """Sets the number of threads that run operators of the numpy backend. BLAS uses no more threads while it runs for
    these operators. Results are bitwise independent of the number of threads.

    A call sets the number for the whole process. As a context manager, it sets the number for the calls inside the
    ``with``, in this thread and in the maps that it starts. More threads than cores are slower.

    Args:
        number: an integer from 1 to 4,096; None for the default (see `num_threads`).

    Raises:
        ArgumentError: number is not an integer from 1 to 4,096.

    >>> with st.set_num_threads(2):
    ...     st.sum(st.ones(10)).item()
    10.0
    """

    def __init__(self, number: int | None) -> None:
        if number is not None and (type(number) is not int or not 1 <= number <= MOST_THREADS):
            raise ArgumentError(
                f"set_num_threads: number is {number!r:.60}; wanted an integer from 1 to {MOST_THREADS:,}, or None"
            )
        self.number = number
        _settings.append(self)
        del _settings[:-_KEPT]

    def __enter__(self) -> None:
        with contextlib.suppress(ValueError):  # A context manager does not set the number for the process.
            _settings.remove(self)
        self._token = _threads_here.set(self.number or _default_threads())

    def __exit__(self, *error: object) -> None:
        _threads_here.reset(self._token)


# -- threads ---------------------------------------------------------------------------------------


_SHUTDOWN_WAIT = 1.0
"""The seconds that the shutdown of the interpreter waits for threads, which may run work whose result is not needed any
more.
"""


class _ThreadPool:
    """The helper threads of the process, as many as were ever requested at once. They end with the interpreter.

    Attributes:
        is_closed: whether the pool accepts no more work, because the interpreter shuts down.
        is_inherited: whether this process is the child of a fork, and the pool is the parent's.
        in_maps: how many threads were ever requested at once for work in which they may wait. Other work has as many
            threads beside these, which use no core while they wait.
    """

    def __init__(self) -> None:
        self._inbox: queue.SimpleQueue[Helpers | None] = queue.SimpleQueue()  # fork: the pool is replaced.
        self._threads: list[threading.Thread] = []
        # A finalizer that the garbage collector calls may start threads, too.
        self._lock = threading.RLock()  # fork: the pool is replaced.
        self.is_closed = self.is_inherited = False
        self.in_maps = 0

    def submit(self, work: Helpers, count: int) -> None:
        """Queues the work for ``count`` threads, which are started if necessary.

        While the interpreter shuts down, nothing is queued: a new thread would never run, and its start would never
        return.
        """
        if self.is_closed or sys.is_finalizing():
            return
        if work.waits:
            self.in_maps = wanted = max(count, self.in_maps)
        else:
            wanted = count + self.in_maps
        if len(self._threads) < wanted:
            with self._lock:
                while not self.is_closed and (number := len(self._threads)) < wanted:
                    thread = threading.Thread(target=_serve, args=(self,), name=f"shardtensor_{number}", daemon=True)
                    try:
                        # Where threads inherit the context of their starter, it would keep a map's arguments alive.
                        contextvars.Context().run(thread.start)
                    except RuntimeError:  # The system's limit is reached: the work runs in fewer threads.
                        break
                    self._threads.append(thread)
        for _ in range(min(count, len(self._threads))):
            self._inbox.put(work)

    def dissolve(self) -> None:
        """Ends the threads. It has to run before the interpreter shuts down, which they need for their current work."""
        with self._lock:
            for _ in self._threads:
                self._inbox.put(None)
            end = time.monotonic() + _SHUTDOWN_WAIT
            for thread in self._threads:
                thread.join(max(end - time.monotonic(), 0.0))
            self._threads.clear()

    def close(self) -> None:
        """Ends the threads permanently. Work that starts later, for example in a ``__del__`` during shutdown, runs
        without helper threads.
        """
        self.is_closed = True
        self.dissolve()

    def next_work(self) -> Helpers | None:
        """Waits for and returns the next work of the calling helper thread; None if the thread has to end."""
        return None if self.is_closed or self.is_inherited else self._inbox.get()


def _serve(pool: _ThreadPool) -> None:
    while (work := pool.next_work()) is not None:
        work.take_part()
        del work  # It refers to arrays, which must not stay alive while the thread waits for the next work.
    if pool.is_inherited:  # This thread has forked: in the child it is the main thread, and has no caller to return to.
        os._exit(1)


class Helpers:
    """The helper threads of one call.

    Attributes:
        waits: whether the threads may wait in the work, for one that divides other work.
    """

    waits = False

    def __init__(self) -> None:
        self._lock = threading.Lock()  # fork: `dismiss` does not wait for threads of the parent.
        self._gone = threading.Lock()  # fork: likewise.
        self._active = 0
        self._dismissed = False
        self._error: BaseException | None = None
        self._work: Callable[[], None] | None = None
        self._context: contextvars.Context
        self._pool: _ThreadPool

    def call(self, work: Callable[[], None], most: int, context: contextvars.Context) -> None:
        """Queues ``work`` for at most ``most`` helper threads, each of which runs it in a copy of the context. If
        `num_threads` is 1, no helper thread is used.
        """
        count = min(num_threads() - 1, most)
        if count < 1:
            return
        self._work, self._context, self._pool = work, context, _pool
        self._pool.submit(self, count)

    def take_part(self) -> None:
        """Runs the work in the calling helper thread, unless the helpers are dismissed."""
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
        except BaseException as raised:  # `dismiss` raises it in the calling thread.
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
        """Waits until the helper threads that have begun the work are done. Threads that have not begun skip it.

        Raises:
            BaseException: ``work`` raised it in a helper thread; of several exceptions, the first.
            ForkError: this is the child of a fork that happened meanwhile, where the helper threads do not exist.
        """
        if self._work is None:
            return
        if self._pool.is_inherited:
            self.abandon()
            raise ForkError(
                "the process was forked while several threads computed this, and the others are not in the child; fork "
                "outside of the call, or end the child with os._exit"
            )
        with self._lock:
            self._dismissed = True
        with self._gone:
            pass
        error, self._error, self._work = self._error, None, None
        del self._context  # It refers to arrays, and threads that have not begun still refer to these helpers.
        if error is not None:
            try:
                raise error
            finally:
                del error  # The reference cycle of the error and this frame would keep the arrays alive.

    def abandon(self) -> None:
        """Resets the state in the child of a fork, where threads that do not exist may hold the locks."""
        self._lock, self._gone = threading.Lock(), threading.Lock()  # fork: this is the child.
        self._work = None


_pool = _ThreadPool()
atexit.register(lambda: _pool.close())


def each(work: Callable[[int], None], count: int, *, threads: int | None = None, breaks: bool = True) -> None:
    """Calls ``work(k)`` for every k in ``range(count)``, in the calling thread and in idle helper threads.

    The calling thread takes part and waits only for calls that have begun, so that a nested call cannot deadlock.

    Args:
        work: the function; its calls run in any order, and concurrently.
        count: the number of calls.
        threads: the maximum number of threads, including the calling thread; by default `num_threads`.
        breaks: whether an exception of a signal handler, such as KeyboardInterrupt, may leave calls undone; otherwise
            the handlers run after the last call.

    Raises:
        BaseException: the first exception that ``work`` raised; calls that had not begun by then are skipped.
    """
    numbers = deque(range(count))  # Each of its methods is atomic, also without a GIL, so that no lock is needed.
    errors: list[BaseException] = []

    def run(deliver: Callable[[], None] | None = None) -> None:
        try:
            while numbers and not errors:
                try:
                    k = numbers.popleft()
                except IndexError:  # Another thread has taken the last number.
                    return
                work(k)
                if deliver is not None:
                    deliver()
        except BaseException as error:  # The calling thread raises the first one.
            errors.append(error)

    with Interrupts() as interrupts:
        helpers = Helpers()
        helpers.call(run, min(threads or count, count) - 1, contextvars.copy_context())
        run(interrupts.deliver if breaks else None)
        helpers.dismiss()
        if errors:
            try:
                raise errors[0]
            finally:
                errors.clear()  # The reference cycle of the errors and these frames would keep the arrays alive.


@in_children
def _forget() -> None:
    """Replaces the pool in the child of a fork, where the parent's threads do not exist."""
    global _pool
    _pool.is_inherited = True
    _pool = _ThreadPool()
