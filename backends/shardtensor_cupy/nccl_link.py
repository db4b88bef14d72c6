"""The connections of a GPU to those of other processes by NCCL: what is on its way, and what happens if it is late."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from queue import SimpleQueue
from typing import Any

from shardtensor.backend import Backend, Device
from shardtensor.engine import ArrivalError
from shardtensor.errors import BackendError

_log = logging.getLogger("shardtensor")

_POLL = 0.05
"""Seconds between two looks at errors of NCCL and the time limit, while something is on its way."""

_PATIENCE = 1.0
"""Seconds that this process waits for NCCL to abort, and for another thread to leave NCCL before that."""

_ARRIVING = 0.2
"""Seconds in which what the GPU has come to may still arrive, after an error of the job."""

LATE = "arrays that other processes have sent have not arrived"


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
        self.is_over = threading.Event()  # fork: no job in children


class Link:
    """The connections of this process's GPU to those of the others.

    Arrays are sent and received on the stream of all computations. Memory that was allocated on that stream may
    therefore be released at once: what reuses it comes later on the stream.

    NCCL waits for the other processes on the GPU, without a time limit. One thread follows what is on its way by
    waiting for events, a call of CUDA in which other threads run. Another one watches the time and the errors of NCCL,
    and makes no call of CUDA, since these wait for each other in the driver. A third one aborts the communicator, which
    may hang, so that the GPU goes on.

    Args:
        cuda, nccl: the modules cupy.cuda and cupy.cuda.nccl.
        communicator: NCCL's communicator of all processes.
        backend, device: the backend, and a device of the GPU.
        gpu: the number of the GPU.

    Attributes:
        failure: why nothing can be sent any more; empty as long as there was no error.
        is_incomplete: whether the communicator was aborted while arrays were on their way: they have no defined
            elements.
    """

    def __init__(self, cuda: Any, nccl: Any, communicator: Any, backend: Backend, device: Device, gpu: int) -> None:
        self._cuda, self._nccl = cuda, nccl
        self._communicator = communicator
        # Never deallocated: CuPy would disconnect it once more, also where an abort hangs.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(communicator))
        self._backend, self._device, self._gpu = backend, device, gpu
        self.failure = ""
        self.is_incomplete = False
        self._is_aborted = False
        self._flights: deque[_Flight] = deque()
        self._lock = threading.Lock()  # fork: no job in children
        self._followed: SimpleQueue[_Flight | None] = SimpleQueue()  # fork: no job in children
        self._watched: SimpleQueue[_Flight | None] = SimpleQueue()  # fork: no job in children
        self._ends: SimpleQueue[tuple[Callable[[], Any], threading.Event]] = SimpleQueue()  # fork: no job in children
        # All of them start now: Python starts no thread any more when the process ends.
        for work in (self._follow, self._watch, self._end):
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
                if self.failure:
                    raise ArrivalError(self.failure)
                flight = _Flight(seconds, self._cuda)  # Its events belong to the GPU.
                self._flights.append(flight)  # Before anything is queued, so that an abort knows of it.
                self._queue(flight, outgoing, incoming)
                self._followed.put(flight)
                self._watched.put(flight)
        except ArrivalError:
            raise
        except (self._nccl.NcclError, KeyError, BackendError, self._cuda.runtime.CUDARuntimeError) as error:
            self._fail(f"NCCL has failed: {named(error)}")
            raise ArrivalError(self.failure) from error
        except BaseException:  # Raised again: after a signal handler's error, the group has a part of its messages.
            self._fail("an exchange between GPUs was interrupted")
            raise

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

    def wait(self, seconds: float) -> bool:
        """Waits until what is on its way has arrived, or never will; returns whether this is so after some seconds."""
        deadline = time.monotonic() + seconds
        for flight in self._flights.copy():
            while not (self.is_incomplete or flight.is_over.wait(_POLL)):
                if time.monotonic() > deadline:
                    return False
        return True

    def give_up(self, reason: str) -> None:
        """Refuses further exchanges, after an error of the job. What is on its way may still arrive, soon after the GPU
        has come to it.
        """
        self.failure = self.failure or reason

    def disconnect(self, deadline: float) -> None:
        """Ends the communicator, when everything has arrived in all processes. NCCL may wait for them meanwhile."""
        self._followed.put(None)
        self._watched.put(None)
        if not self._apart(self._communicator.destroy, max(deadline - time.monotonic(), 0)):
            _log.warning("NCCL has not disconnected the GPU in time; the process goes on without waiting for it")

    def _fail(self, reason: str) -> None:
        """Aborts the communicator; the first reason is kept."""
        held = self._lock.acquire(timeout=_PATIENCE)  # Another thread that uses the communicator now may hang there.
        try:
            if self._is_aborted:
                return
            self._is_aborted = True
            self.is_incomplete = bool(self._flights)
            self.failure = self.failure or reason
        finally:
            if held:
                self._lock.release()
        self._apart(self._communicator.abort, _PATIENCE)

    def _apart(self, call: Callable[[], Any], seconds: float) -> bool:
        """Makes a call of NCCL that may hang, in a thread; returns whether it has returned after some seconds."""
        returned = threading.Event()  # fork: no job in children
        self._ends.put((call, returned))
        return returned.wait(seconds)

    def _end(self) -> None:
        """Aborts the communicator, or disconnects it: one of both, once."""
        self._cuda.Device(self._gpu).use()  # NCCL would use memory of GPU 0.
        call, returned = self._ends.get()
        try:
            call()
        except Exception as error:
            _log.warning("NCCL has not ended its connections: %s", error)
        returned.set()

    def _follow(self) -> None:
        """Finds out when the GPU comes to the messages, and when they have arrived."""
        self._cuda.Device(self._gpu).use()
        while (flight := self._followed.get()) is not None:
            try:
                flight.begun.synchronize()
                flight.since = time.monotonic()
                flight.ended.synchronize()
            except Exception as error:  # Of CUDA.
                self._fail(f"{LATE}: the GPU has failed: {error}")
            finally:
                self._flights.remove(flight)
                flight.is_over.set()

    def _watch(self) -> None:
        """Aborts the communicator if arrays are late, or NCCL reports an error."""
        while (flight := self._watched.get()) is not None:
            while not (self.is_incomplete or flight.is_over.wait(_POLL)):
                if reason := self._reason(flight):
                    self._fail(reason)

    def _reason(self, flight: _Flight) -> str:
        """Returns why arrays that are on their way are given up, if they are."""
        seconds = min(_ARRIVING, flight.seconds) if self.failure else flight.seconds
        is_late = flight.since is not None and time.monotonic() > flight.since + seconds
        if is_late and not flight.is_over.is_set():
            return self.failure or f"{LATE} within {flight.seconds:.3g} s"
        if self._lock.acquire(timeout=_POLL):  # Another thread may hang in NCCL.
            try:
                if not self._is_aborted:
                    self._communicator.check_async_error()
            except (self._nccl.NcclError, KeyError) as error:
                return f"{LATE}: NCCL: {named(error)}"
            finally:
                self._lock.release()
        return ""


@contextlib.contextmanager
def group(nccl: Any) -> Iterator[None]:
    """A context whose messages NCCL queues together."""
    nccl.groupStart()
    try:
        yield
    except BaseException:  # Raised again: a group that is left open would take the messages of later calls.
        with contextlib.suppress(nccl.NcclError, KeyError):
            nccl.groupEnd()
        raise
    nccl.groupEnd()


def named(error: Exception) -> str:
    """Returns the message of an error of NCCL. CuPy raises a KeyError for numbers that it does not know."""
    return f"error {error}" if isinstance(error, KeyError) else str(error)
