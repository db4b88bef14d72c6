"""Copies between GPUs and to and from host memory, and the references that keep their memory alive in flight."""

from __future__ import annotations

import importlib
import logging
import os
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardtensor.backend import HostArray, lock, references
from shardtensor.errors import BackendError
from shardtensor_cupy.logical_device import LogicalDevice

_log = logging.getLogger("shardtensor")


@dataclass(slots=True, eq=False)
class _Flight:
    """A copy in flight: its event, the device array and its memory, the stream that owns it, and the host memory.

    The event is added to ``spare``, if there is one, when nothing waits for it any more. ``stream`` is the stream on
    which the host memory is read or written, if it is only one.
    """

    event: Any
    array: Any
    memory: Any
    owner: Any
    host: Any
    spare: list[Any] | None
    stream: Any


class InFlight:
    """The copies in flight.

    CuPy's memory pool reuses a block as soon as no Python object refers to it, even if other streams still read it.
    Therefore a reference is kept here until the event of each copy has completed. Before the owner of the memory
    writes to it, `settle` makes its stream wait for the readers.
    """

    def __init__(self) -> None:
        self._queue: deque[_Flight] = deque()
        self._by_memory: dict[int, list[_Flight]] = {}
        self._lock = lock()  # Deallocating an array may run finalizers that call these methods.

    def add(
        self,
        event: Any,
        array: Any,
        owner: Any,
        host: Any = None,
        spare: list[Any] | None = None,
        stream: Any = None,
    ) -> None:
        """Keeps a device array, owned by the stream ``owner``, and a host array alive until the event is complete.

        The event is then added to ``spare``. ``stream`` is that of the copy, if `take` may give the host memory to
        later copies on it.
        """
        flight = _Flight(event, array, array.data.mem, owner, host, spare, stream)
        with self._lock:
            self._queue.append(flight)
            self._by_memory.setdefault(id(flight.memory), []).append(flight)

    def take(self, stream: Any, nbytes: int) -> Any:
        """Returns page-locked memory of a size to which nothing but copies in flight on a stream refers, or None.

        The caller writes to it by a copy on the same stream, which is ordered after them.
        """
        with self._lock:
            groups: dict[int, list[_Flight]] = {}
            for flight in self._queue:
                if flight.host is not None:
                    groups.setdefault(id(flight.host), []).append(flight)
            for flights in groups.values():
                # safeguard: memory is reused on the stream of its copies only
                if flights[0].host.nbytes != nbytes or any(flight.stream is not stream for flight in flights):
                    continue
                # One reference is that of each list here, and one that of the array to its memory.
                # safeguard: only memory that nothing else holds is reused
                if references([flights[0].host]) <= len(flights) + 1 and references([flights[0].host.base]) <= 2:
                    memory = flights[0].host.base
                    for flight in flights:
                        flight.host = None
                    return memory
        return None

    def prune(self) -> None:
        """Releases completed copies, in the order in which they were added, up to the first incomplete one."""
        if not self._queue:  # This check comes first, because every operator calls `prune`.
            return
        with self._lock:
            # safeguard: sources are kept until the copy has arrived
            while self._queue and (_is_empty(self._queue[0]) or self._queue[0].event.done):
                flight = self._queue.popleft()
                self._forget(flight)
                if flight.spare is not None:
                    flight.spare.append(flight.event)

    def wait(self) -> None:
        """Blocks until all copies are complete, and releases them."""
        with self._lock:
            for flight in tuple(self._queue):
                flight.event.synchronize()
        self.prune()

    def settle(self, memory: Any) -> None:
        """Makes the owner's stream of a block of device memory wait for all copies that use it, and releases the block.

        Host memory is kept until the copies are complete, because its next user is not ordered after any stream.
        """
        if id(memory) not in self._by_memory:
            return
        with self._lock:
            for flight in self._by_memory.pop(id(memory), ()):
                flight.owner.wait_event(flight.event)  # safeguard: a writer waits for readers
                flight.array = flight.memory = None  # safeguard: host buffers are kept when the array is exclusive

    def _forget(self, flight: _Flight) -> None:
        if flight.memory is not None:
            others = self._by_memory[id(flight.memory)]
            others.remove(flight)
            if not others:
                del self._by_memory[id(flight.memory)]

    def __len__(self) -> int:
        return sum(not _is_empty(flight) for flight in tuple(self._queue))  # Other threads may add copies meanwhile.


def _is_empty(flight: _Flight) -> bool:
    return flight.array is None and flight.host is None


class Peers:
    """The pairs of GPUs that can copy directly: CUDA reports peer access, and a test copy has arrived intact.

    The test is needed because some machines (with an IOMMU, or GPUs without NVLink) report peer access but corrupt the
    data.
    """

    def __init__(self, cupy: Any) -> None:
        self._cupy = cupy
        self._known: dict[tuple[int, int], bool] = {}
        self._lock = lock()  # Reentrant, since finalizers may copy arrays.
        self._mode = os.environ.get("SHARDTENSOR_CUPY_P2P", "auto")
        if self._mode not in ("auto", "off"):
            raise BackendError(f"SHARDTENSOR_CUPY_P2P is {self._mode!r}; it must be auto or off")

    def near(self, a: int, b: int) -> bool:
        """Whether the GPUs are the same or CUDA reports peer access in both directions."""
        can = self._cupy.cuda.runtime.deviceCanAccessPeer
        return a == b or bool(can(a, b) and can(b, a))

    def reach(self, source: int, destination: int) -> bool:
        """Whether arrays can be copied directly from one GPU to the other."""
        if source == destination:
            return True
        if self._mode == "off":
            return False
        pair = source, destination
        with self._lock:
            if pair not in self._known:
                try:
                    # safeguard: peers are tested
                    self._known[pair] = self.near(source, destination) and self._arrives(source, destination)
                except self._cupy.cuda.memory.OutOfMemoryError:
                    return False  # The result is not stored, so that the test is repeated when there is memory.
            return self._known[pair]

    def _arrives(self, source: int, destination: int) -> bool:
        """Whether a test copy arrives intact: 4 MiB of distinct 32-bit values."""
        cupy = self._cupy
        sent = np.arange(2**20, dtype=np.uint32) * np.uint32(2654435761)
        # The streams are waited for, since CUDA refuses to wait for a GPU while another thread captures a graph on it.
        with cupy.cuda.Device(source):
            array = cupy.asarray(sent)
            cupy.cuda.get_current_stream().synchronize()
        with cupy.cuda.Device(destination):
            copy = cupy.zeros(sent.shape, sent.dtype)
            copy.data.copy_from_device_async(array.data, sent.nbytes, cupy.cuda.get_current_stream())
            cupy.cuda.get_current_stream().synchronize()
            right = np.array_equal(cupy.asnumpy(copy), sent)
        if not right:
            _log.warning(
                "GPU %d has peer access to GPU %d, but a test copy arrived damaged; copies go through host memory",
                destination, source,
            )  # fmt: skip
        return right


_REUSED_FROM = 1 << 20
"""Bytes of an offloaded array from which on it may get the memory of one whose copy is not complete: page-locking new
memory takes several times as long as the copy.
"""


class Copier:
    """Copies arrays between logical devices, and between a logical device and page-locked host memory."""

    def __init__(self, cupy: Any) -> None:
        self._cupy = cupy
        self._pinned: Any = importlib.import_module("cupyx").empty_pinned
        self.flights = InFlight()
        self.peers = Peers(cupy)

    def d2d(self, array: Any, source: LogicalDevice, destination: LogicalDevice) -> Any:
        """Copies a row-major array to another logical device, which is current and ordered after the source.

        The copy runs directly between GPUs that are peers, otherwise through page-locked host memory.
        """
        out = self._cupy.empty(array.shape, array.dtype)
        if not array.nbytes:
            return out
        if self.peers.reach(source.gpu.id, destination.gpu.id):
            out.data.copy_from_device_async(array.data, array.nbytes, destination.stream)
            # safeguard: sources are kept
            self.flights.add(destination.landing(), array, source.stream, spare=destination.spare)
        else:
            host = self._pinned(array.shape, array.dtype)
            with source.gpu:
                array.get(stream=source.stream, out=host, blocking=False)
            destination.stream.wait_event(source.record())  # safeguard: staging: the second half waits
            out.set(host, stream=destination.stream)
            # safeguard: staging: the buffer is kept
            self.flights.add(destination.landing(), out, destination.stream, host, destination.spare)
        return out

    def collect(self, arrays: Sequence[Any], sources: Sequence[LogicalDevice], destination: LogicalDevice) -> Any:
        """Concatenates row-major arrays of several logical devices along their first dimension on another one, which is
        current, each by one copy.
        """
        first, gpu = arrays[0], destination.gpu.id
        if not all(self.peers.reach(source.gpu.id, gpu) for source in sources):
            pairs = zip(arrays, sources, strict=True)
            return self._cupy.concatenate([a if s.gpu.id == gpu else self.d2d(a, s, destination) for a, s in pairs])
        out = self._cupy.empty((sum([len(array) for array in arrays]), *first.shape[1:]), first.dtype)
        at, away = out.data, []
        for array, source in zip(arrays, sources, strict=True):
            if source.stream is not destination.stream:
                destination.stream.wait_event(source.record())  # safeguard: collected arrays are awaited
                away.append((array, source.stream))  # safeguard: collected arrays are kept
            at.copy_from_device_async(array.data, array.nbytes, destination.stream)
            at += array.nbytes
        self._land(away, destination)
        return out

    def place(
        self, arrays: Sequence[Any], sources: Sequence[LogicalDevice], outs: Sequence[Any], destination: LogicalDevice
    ) -> None:
        """Copies row-major arrays of other GPUs into arrays of a logical device, which is current and ordered after the
        sources: each by one copy, where peers can write to it, it is in row-major order, and none is broadcast.
        """
        away = []
        for array, source, out in zip(arrays, sources, outs, strict=True):
            direct = out.flags.c_contiguous and (out.shape, out.dtype) == (array.shape, array.dtype)
            if not direct or not self.peers.reach(source.gpu.id, destination.gpu.id):
                out[...] = self.d2d(array, source, destination)
            elif array.nbytes:
                out.data.copy_from_device_async(array.data, array.nbytes, destination.stream)
                away.append((array, source.stream))  # safeguard: temporaries are kept
        self._land(away, destination)

    def _land(self, away: Sequence[tuple[Any, Any]], destination: LogicalDevice) -> None:
        """Keeps arrays, each with the stream that owns it, alive until the copies queued on a device are complete."""
        if away:
            event = destination.landing()
            for n, (array, owner) in enumerate(away, 1):  # The event is spare when the last of them is released.
                # safeguard: exchanged arrays are kept
                self.flights.add(event, array, owner, spare=destination.spare if n == len(away) else None)

    def from_stream(self, array: Any, stream: Any, logical: LogicalDevice) -> Any:
        """Copies, on the logical device's stream, an array that another stream of the same GPU has computed."""
        logical.stream.wait_event(logical.record(stream))
        with logical.stream:
            copy = array.copy()
        self.flights.add(logical.record(), array, stream)
        return copy

    def d2h(self, array: Any, logical: LogicalDevice) -> tuple[HostArray, Any]:
        """Copies a row-major array to page-locked host memory; returns it and a token for `CuPyBackend.settle`."""
        if not array.nbytes:
            return np.empty(array.shape, array.dtype), None
        memory = self.flights.take(logical.copies, array.nbytes) if array.nbytes >= _REUSED_FROM else None
        host: HostArray = (
            self._pinned(array.shape, array.dtype) if memory is None else np.ndarray(array.shape, array.dtype, memory)
        )
        logical.copies.wait_event(logical.record())  # safeguard: offload waits for what is computed
        array.get(stream=logical.copies, out=host, blocking=False)
        event = logical.record(logical.copies)
        # safeguard: offload keeps the array
        self.flights.add(event, array, logical.stream, host, stream=logical.copies)
        return host, (event, logical)

    def pinned(self, host: HostArray) -> HostArray:
        """Returns a page-locked copy of a host array."""
        copy: HostArray = self._pinned(host.shape, host.dtype) if host.nbytes else np.empty(host.shape, host.dtype)
        copy[...] = host
        return copy

    def h2d(self, host: HostArray, logical: LogicalDevice, after: Any) -> tuple[Any, Any]:
        """Copies page-locked host memory to a logical device, which is current.

        Args:
            host: the page-locked array.
            logical: the destination.
            after: the token that `d2h` returned for ``host``, or None.

        Returns:
            The device array, and the event after which it is complete (None if it has no elements).
        """
        out = self._cupy.empty(host.shape, host.dtype)
        if not host.nbytes:
            return out, None
        # safeguard: onload waits for earlier uses of the memory
        logical.copies.wait_event(logical.record())  # After the last use of this memory.
        if after is not None:
            logical.copies.wait_event(after[0])  # safeguard: onload waits for the offload
        out.set(host, stream=logical.copies)
        event = logical.record(logical.copies)
        self.flights.add(event, out, logical.stream, host, stream=logical.copies)  # safeguard: onload keeps the buffer
        return out, event
