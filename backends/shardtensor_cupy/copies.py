"""Copies between GPUs and from and to host memory, and what must stay alive while they are under way."""

from __future__ import annotations

import importlib
import logging
import os
import threading
from collections import deque
from typing import Any

import numpy as np

from shardtensor.backend import HostArray
from shardtensor.errors import BackendError
from shardtensor_cupy.logical_device import LogicalDevice

_log = logging.getLogger("shardtensor")


class _Flight:
    """An array that a stream reads (or fills) which is not the one that owns it, and host memory that it needs."""

    __slots__ = ("array", "event", "host", "memory", "owner")

    def __init__(self, event: Any, array: Any, host: Any, owner: Any) -> None:
        self.event = event
        self.array = array
        self.host = host
        self.memory = array.data.mem
        self.owner = owner


class InFlight:
    """What is under way. CuPy gives a block of memory to the next one who asks as soon as nobody refers to it, however
    many streams still read it: so a reference stays here until they have. Before its owner writes to it, the owner's
    stream is told to wait for them.
    """

    def __init__(self) -> None:
        self._queue: deque[_Flight] = deque()
        self._by_memory: dict[int, list[_Flight]] = {}
        self._lock = threading.RLock()  # letting go of an array may run anything, another call of ours included

    def add(self, event: Any, array: Any, owner: Any, host: Any = None) -> None:
        """Keeps a device array (and a host array) until the event; ``owner`` is the stream that it belongs to."""
        flight = _Flight(event, array, host, owner)
        with self._lock:
            self._queue.append(flight)
            self._by_memory.setdefault(id(flight.memory), []).append(flight)

    def prune(self) -> None:
        """Lets go of what has arrived."""
        if not self._queue:  # asked at every call
            return
        with self._lock:
            while self._queue and (_is_empty(self._queue[0]) or self._queue[0].event.done):
                self._forget(self._queue.popleft())

    def wait(self) -> None:
        """Waits until all has arrived, and lets go of it."""
        with self._lock:
            for flight in tuple(self._queue):
                flight.event.synchronize()
        self.prune()

    def settle(self, memory: Any) -> None:
        """Makes the owner of a block of memory wait for all who use it, and lets go of it; not of host memory, whose
        next user waits for nobody.
        """
        if id(memory) not in self._by_memory:
            return
        with self._lock:
            for flight in self._by_memory.pop(id(memory), ()):
                flight.owner.wait_event(flight.event)
                flight.array = flight.memory = None

    def _forget(self, flight: _Flight) -> None:
        if flight.memory is not None:
            others = self._by_memory[id(flight.memory)]
            others.remove(flight)
            if not others:
                del self._by_memory[id(flight.memory)]

    def __len__(self) -> int:
        return sum(not _is_empty(flight) for flight in tuple(self._queue))  # other threads add some meanwhile


def _is_empty(flight: _Flight) -> bool:
    return flight.array is None and flight.host is None


class Peers:
    """Which GPUs may read which: CUDA says so, and a copy has arrived as it was sent. Some machines (an IOMMU, cards
    without NVLink) say yes and deliver something else.
    """

    def __init__(self, cupy: Any) -> None:
        self._cupy = cupy
        self._known: dict[tuple[int, int], bool] = {}
        self._lock = threading.Lock()
        self._mode = os.environ.get("SHARDTENSOR_CUPY_P2P", "auto")
        if self._mode not in ("auto", "off"):
            raise BackendError(f"SHARDTENSOR_CUPY_P2P is {self._mode!r}; it must be auto or off")

    def near(self, a: int, b: int) -> bool:
        """Whether they are said to be peers."""
        can = self._cupy.cuda.runtime.deviceCanAccessPeer
        return a == b or bool(can(a, b) and can(b, a))

    def reach(self, source: int, destination: int) -> bool:
        """Whether copies from one GPU to the other may go straight."""
        if source == destination:
            return True
        if self._mode == "off":
            return False
        known = self._known.get((source, destination))
        if known is None:
            with self._lock:
                known = self._known.get((source, destination))
                if known is None:
                    try:
                        known = self.near(source, destination) and self._arrives(source, destination)
                    except self._cupy.cuda.memory.OutOfMemoryError:
                        return False  # as long as there is no room to find out
                    self._known[source, destination] = known
        return known

    def _arrives(self, source: int, destination: int) -> bool:
        """Copies 4 MiB that are different everywhere, and compares."""
        cupy = self._cupy
        sent = np.arange(2**20, dtype=np.uint32) * np.uint32(2654435761)
        with cupy.cuda.Device(source) as device:
            array = cupy.asarray(sent)
            device.synchronize()
        with cupy.cuda.Device(destination) as device:
            copy = cupy.zeros(sent.shape, sent.dtype)
            copy.data.copy_from_device_async(array.data, sent.nbytes, cupy.cuda.get_current_stream())
            device.synchronize()
            right = np.array_equal(cupy.asnumpy(copy), sent)
        if not right:
            _log.warning(
                "GPU %d says that it reads GPU %d, and copies arrive damaged: they go through host memory instead",
                destination, source,
            )  # fmt: skip
        return right


class Copier:
    """Copies arrays between lanes, and between a lane and page-locked host memory."""

    def __init__(self, cupy: Any) -> None:
        self._cupy = cupy
        self._pinned: Any = importlib.import_module("cupyx").empty_pinned
        self.flights = InFlight()
        self.peers = Peers(cupy)

    def across(self, array: Any, source: LogicalDevice, destination: LogicalDevice) -> Any:
        """A copy of an array in row-major order on another lane, which is current and ordered after the source."""
        out = self._cupy.empty(array.shape, array.dtype)
        if not array.nbytes:
            return out
        if self.peers.reach(source.gpu.id, destination.gpu.id):
            out.data.copy_from_device_async(array.data, array.nbytes, destination.stream)
            self.flights.add(destination.record(), array, source.stream)
        else:
            host = self._pinned(array.shape, array.dtype)
            with source.gpu:
                array.get(stream=source.stream, out=host, blocking=False)
            destination.stream.wait_event(source.record())
            out.set(host, stream=destination.stream)
            self.flights.add(destination.record(), out, destination.stream, host)
        return out

    def over(self, array: Any, stream: Any, logical: LogicalDevice) -> Any:
        """A copy, made on the lane's stream, of an array that another stream of its GPU has made."""
        logical.stream.wait_event(logical.record(stream))
        with logical.stream:
            copy = array.copy()
        self.flights.add(logical.record(), array, stream)
        return copy

    def off(self, array: Any, logical: LogicalDevice) -> tuple[HostArray, Any]:
        """A page-locked copy of an array in row-major order, and its lane's event after which it is complete."""
        if not array.nbytes:
            return np.empty(array.shape, array.dtype), None
        host: HostArray = self._pinned(array.shape, array.dtype)
        logical.copies.wait_event(logical.record())
        array.get(stream=logical.copies, out=host, blocking=False)
        event = logical.record(logical.copies)
        self.flights.add(event, array, logical.stream, host)
        return host, (event, logical)

    def pinned(self, host: HostArray) -> HostArray:
        """A page-locked copy of a host array."""
        copy: HostArray = self._pinned(host.shape, host.dtype) if host.nbytes else np.empty(host.shape, host.dtype)
        copy[...] = host
        return copy

    def on(self, host: HostArray, logical: LogicalDevice, after: Any) -> tuple[Any, Any]:
        """The way back, after what `off` gave: an array of the lane, which is current, and the event when it is."""
        out = self._cupy.empty(host.shape, host.dtype)
        if not host.nbytes:
            return out, None
        logical.copies.wait_event(logical.record())  # whoever had this memory before
        if after is not None:
            logical.copies.wait_event(after[0])
        out.set(host, stream=logical.copies)
        event = logical.record(logical.copies)
        self.flights.add(event, out, logical.stream, host)
        return out, event
