"""The connections of a GPU to those of other processes by NCCL: what is on its way, and what happens if it is late."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from queue import SimpleQueue
from typing import Any

from shardtensor.backend import Backend, Device
from shardtensor.engine import ArrivalError, LateError
from shardtensor.errors import BackendError

_POLL = 0.05
"""Seconds between two looks at errors of NCCL and the time limit, while something is on its way."""

_PATIENCE = 1.0
"""Seconds that this process waits for NCCL to abort, and for another thread to leave NCCL before that."""

_ARRIVING = 0.2
"""Seconds in which what is on its way may still arrive, when it is given up because another process is lost."""

_LATE = "arrays that other processes have sent have not arrived"


class _Flight:
    """Arrays that are on their way.

    Attributes:
        seconds: how long they may take, once the GPU has come to them.
        begun, ended: the events before and after them on the stream.
        since: the time at which the GPU has come to them; None before.
        is_over: is set when they have arrived, or never will.
    """

    def __init__(self, seconds: float, cuda: Any) -> None:
        self.seconds = seconds
        # Threads that wait for a blocking event use no processor.
        self.begun, self.ended = (cuda.Event(block=True, disable_timing=True) for _ in range(2))
        self.since: float | None = None
        self.is_over = threading.Event()


class Link:
    """The connections of this process's GPU to those of the others.

    Arrays are sent and received on the stream of all computations. Memory that was allocated on that stream may
    therefore be released at once: what reuses it comes later on the stream.

    NCCL waits for the other processes on the GPU, without a time limit. One thread follows what is on its way by
    waiting for events, a call of CUDA in which other threads run. Another one watches the time and the errors of NCCL,
    and makes no call of CUDA, since these wait for each other in the driver; it aborts the communicator, so that the
    GPU goes on.

    Args:
        cuda, nccl: the modules cupy.cuda and cupy.cuda.nccl.
        communicator: NCCL's communicator of all processes.
        backend, device: the backend, and a device of the GPU.
        gpu: the number of the GPU.

    Attributes:
        failure: why nothing can be sent any more; empty as long as there was no error.
        is_incomplete: whether arrays were on their way then, which have no defined elements.
    """

    def __init__(self, cuda: Any, nccl: Any, communicator: Any, backend: Backend, device: Device, gpu: int) -> None:
        self._cuda, self._nccl = cuda, nccl
        self._communicator = communicator
        self._backend, self._device, self._gpu = backend, device, gpu
        self.failure = ""
        self.is_incomplete = False
        self._flights: deque[_Flight] = deque()
        self._lock = threading.Lock()  # fork: no job in children
        self._followed: SimpleQueue[_Flight | None] = SimpleQueue()  # fork: no job in children
        self._watched: SimpleQueue[_Flight | None] = SimpleQueue()  # fork: no job in children
        for work in (self._follow, self._watch):
            threading.Thread(target=work, name="shardtensor-nccl", daemon=True).start()

    def exchange(
        self, outgoing: Mapping[int, Sequence[Any]], incoming: Mapping[int, Sequence[Any]], seconds: float
    ) -> None:
        """Queues the messages as one group, in which NCCL sends and receives at the same time.

        Raises:
            ArrivalError: NCCL, or CUDA, has failed in this process.
        """
        try:
            with self._lock, self._backend.on(self._device):
                flight = _Flight(seconds, self._cuda)  # Its events belong to the GPU.
                self._queue(flight, outgoing, incoming)
                self._flights.append(flight)
        except (self._nccl.NcclError, KeyError, BackendError) as error:
            self._fail(f"NCCL has failed: {named(error)}", True)
            raise ArrivalError(self.failure) from error
        except BaseException:  # Raised again: after a signal handler's error, the group has a part of its messages.
            self._fail("an exchange between GPUs was interrupted", True)
            raise
        self._followed.put(flight)
        self._watched.put(flight)

    def _queue(
        self, flight: _Flight, outgoing: Mapping[int, Sequence[Any]], incoming: Mapping[int, Sequence[Any]]
    ) -> None:
        stream = self._cuda.get_current_stream()
        flight.begun.record(stream)
        with group(self._nccl):
            for send, messages in ((self._communicator.send, outgoing), (self._communicator.recv, incoming)):
                for process, arrays in messages.items():
                    for array in arrays:
                        send(array.data.ptr, array.nbytes, self._nccl.NCCL_UINT8, process, stream.ptr)
        flight.ended.record(stream)

    def wait(self) -> None:
        """Waits until what is on its way has arrived, or never will."""
        for flight in tuple(self._flights):
            while not (self.is_incomplete or flight.is_over.wait(_POLL)):
                pass

    def give_up(self) -> None:
        """Aborts what is on its way, after another process is lost."""
        for flight in tuple(self._flights):
            flight.is_over.wait(_ARRIVING)
        self._fail(f"{_LATE}: another process is lost", False)

    def finish(self, deadline: float) -> None:
        """Waits until everything has arrived, and ends the threads.

        Raises:
            ArrivalError, LateError: something has not arrived.
        """
        for flight in tuple(self._flights):
            if not flight.is_over.wait(max(deadline - time.monotonic(), 0)):
                raise LateError(_LATE)
        self._followed.put(None)
        self._watched.put(None)
        if self.failure:
            raise ArrivalError(self.failure)

    def disconnect(self, deadline: float) -> None:
        """Ends the communicator, when everything has arrived in all processes. NCCL may wait for them meanwhile."""
        self._apart(self._communicator.destroy, max(deadline - time.monotonic(), 0))

    def _fail(self, reason: str, is_incomplete: bool) -> None:
        """Aborts the communicator; the first reason is kept."""
        held = self._lock.acquire(timeout=_PATIENCE)  # Another thread that uses the communicator now may hang there.
        try:
            if self.failure:
                return
            self.is_incomplete = is_incomplete or bool(self._flights)
            self.failure = reason
        finally:
            if held:
                self._lock.release()
        self._apart(self._communicator.abort, _PATIENCE)

    def _apart(self, call: Any, seconds: float) -> None:
        """Makes a call of NCCL that may hang."""
        thread = threading.Thread(target=call, name="shardtensor-nccl-end", daemon=True)
        thread.start()
        thread.join(seconds)

    def _follow(self) -> None:
        """Finds out when the GPU comes to the messages, and when they have arrived."""
        self._cuda.Device(self._gpu).use()
        while (flight := self._followed.get()) is not None:
            try:
                flight.begun.synchronize()
                flight.since = time.monotonic()
                flight.ended.synchronize()
            except self._cuda.runtime.CUDARuntimeError as error:
                self._fail(f"{_LATE}: the GPU has failed: {error}", True)
            self._flights.remove(flight)
            flight.is_over.set()

    def _watch(self) -> None:
        """Aborts the communicator if arrays are late, or NCCL reports an error."""
        while (flight := self._watched.get()) is not None:
            while not flight.is_over.wait(_POLL):
                if reason := self._reason(flight):
                    self._fail(reason, False)
                if self.failure:
                    return

    def _reason(self, flight: _Flight) -> str:
        """Returns why arrays that are on their way are given up, if they are."""
        try:
            with self._lock:
                if not self.failure:
                    self._communicator.check_async_error()
        except (self._nccl.NcclError, KeyError) as error:
            return f"{_LATE}: NCCL: {named(error)}"
        is_late = flight.since is not None and time.monotonic() > flight.since + flight.seconds
        return f"{_LATE} within {flight.seconds:.3g} s" if is_late and not flight.is_over.is_set() else ""


@contextlib.contextmanager
def group(nccl: Any) -> Iterator[None]:
    """A context whose messages NCCL queues together."""
    nccl.groupStart()
    try:
        yield
    finally:
        nccl.groupEnd()


def named(error: Exception) -> str:
    """Returns the message of an error of NCCL. CuPy raises a KeyError for numbers that it does not know."""
    return f"error {error}" if isinstance(error, KeyError) else str(error)
