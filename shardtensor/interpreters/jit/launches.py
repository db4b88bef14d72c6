"""Launches of a segment of a program, which wait for its end and are one launch of a graph where they recur.

A segment is a run of steps that launch kernels and nothing else (see `shardtensor.interpreters.jit.segments`). If the
same launches come again, they are captured (`Backend.capture`), and are one launch from then on.

A graph has the addresses of arrays and the values of numbers. All of them are in the key by which it is found, and each
call allocates its results and holds its operands as if there were no graphs: a call that finds a graph has arrays at
the addresses that the graph accesses, and the graph does what the launches would do. So a graph holds no memory, and
who holds the results of earlier calls is of no importance. In loops, memory pools return the same addresses after one
call, or after a few.

Memory that is freed between two launches of a segment may be given to another thread, whose launches would come
first. Therefore all arrays exist until the segment ends, and what the kernels of a segment compute is limited in size.
Values that only the segment reads are parts of one block of memory, which is freed and allocated as a whole: pools
return single arrays in an order that changes from call to call, so that the same addresses would come again late.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from shardtensor.backend.device import Device
from shardtensor.backend.protocol import Backend, Launch
from shardtensor.interpreters.programs.program import Equation
from shardtensor.sharding.layout import Shape

GRAPHS = 16
"""The maximum number of graphs of a segment: a loop has one for each set of addresses among which it alternates."""

SEEN = 64
"""The number of launches of a segment that are remembered, to find that they come again."""

COST = 8
"""The number of calls with launches that have come before, for each of which one capture is made: where addresses recur
so rarely that graphs are dropped before they are used, capturing takes a small part of the time.
"""

_ALIGNMENT = 512
"""The arrays of a block begin at multiples of this number of bytes, as those that CuPy's pool returns."""

_BYTE = np.dtype(np.uint8)

AddLaunches: TypeAlias = Callable[[Hashable, Sequence[Any], Callable[[], None], int], None]
"""Takes what launches depend on besides their operands, these, a function that launches, and the number of launches."""


class Graphs:
    """The graphs of a segment, and the launches that came lately.

    There is no lock: each step is one operation of a dict. Two threads never have the same launches at the same time,
    because their results have different addresses.
    """

    def __init__(self) -> None:
        self._graphs: dict[Hashable, Callable[[], None]] = {}
        self._seen: dict[Hashable, None] = {}
        self._credit = COST * GRAPHS

    def find(
        self, key: Hashable, capture: Callable[[], Callable[[], None] | None] | None = None
    ) -> Callable[[], None] | None:
        """Returns the graph of launches; None if they come for the first time, or there is none.

        Args:
            key: all that a graph of the launches has.
            capture: captures it. None: the caller has not prepared the launches yet, and asks again when it has.
        """
        graph = self._graphs.pop(key, None)
        if graph is None:
            if capture is None:
                return None
            if key not in self._seen:
                _add(self._seen, key, None, SEEN)
                return None
            if self._credit < COST or (graph := capture()) is None:
                self._credit += 1
                return None
            self._credit -= COST
            self._seen.pop(key, None)
        self._credit = min(self._credit + 1, COST * GRAPHS)
        _add(self._graphs, key, graph, GRAPHS)
        return graph


def _add(items: dict[Hashable, Any], key: Hashable, value: Any, most: int) -> None:
    """Adds an item, as the latest, and removes the oldest ones but for ``most``."""
    items[key] = value
    if len(items) > most:
        for old in list(items)[:-most]:
            items.pop(old, None)


class Queue:
    """Launches on one memory that wait.

    Args:
        graphs: the graphs of the segment.
        backend: the backend.
        device: a device of the memory.
        space: the memory.
        key: the key of all launches of the segment, where it is known before them; None: they have keys of their own.
        is_launched: whether a graph has launched them.

    Attributes:
        count: the number of launches that wait.
        failed: the last equation of the kernel whose launch has failed.
    """

    __slots__ = (
        "_backend",
        "_graphs",
        "_is_launched",
        "_key",
        "_keys",
        "_launches",
        "_space",
        "count",
        "device",
        "failed",
    )

    def __init__(
        self,
        graphs: Graphs,
        backend: Backend,
        device: Device,
        space: Hashable,
        key: Hashable | None = None,
        is_launched: bool = False,
    ) -> None:
        self._graphs, self._backend, self._space = graphs, backend, space
        self._key, self._is_launched = key, is_launched
        self._keys: list[Hashable] = []
        self._launches: list[tuple[Equation, Callable[[], None]]] = []
        self.count = 0
        self.device = device
        self.failed: Equation | None = None

    def add(
        self, equation: Equation, what: Hashable, operands: Sequence[Any], launch: Callable[[], None], count: int
    ) -> None:
        """Adds what a kernel launches.

        Args:
            equation: the last one that the kernel computes.
            what: what the launches depend on besides their operands: the kernel, and the shape of its loop.
            operands: their arrays and numbers.
            launch: launches.
            count: the number of launches.
        """
        if self._is_launched:
            return
        if self._key is None:
            self._keys.append((what, *[key_of(x, self._backend) for x in operands]))
        self._launches.append((equation, launch))
        self.count += count

    def run(self, ends: bool) -> None:
        """Launches all, on the current device; nothing waits then.

        Args:
            ends: whether the segment ends: otherwise its key is not that of what waits.
        """
        key, graph = self._key, None
        if key is None and self.count > 1:
            key = self._space, *self._keys
        elif not ends:
            key = None
        if key is not None:
            graph = self._graphs.find(key, lambda: self._backend.capture(self._launch))
        (self._launch if graph is None else graph)()
        self._key, self._keys, self._launches, self.count = None, [], [], 0

    def _launch(self) -> None:
        for equation, launch in self._launches:
            self.failed = equation
            launch()
        self.failed = None


class Blocks:
    """The buffers that only a segment reads: those in one memory are parts of one block.

    Attributes:
        places: by the name of a buffer, its memory and its position there.
        parts: for each memory, the first byte, the shape and the dtype of each buffer.
        sizes: for each memory, the number of bytes.
    """

    def __init__(self) -> None:
        self.places: dict[Hashable, tuple[Hashable, int]] = {}
        self.parts: dict[Hashable, list[tuple[int, Shape, np.dtype[Any]]]] = {}
        self.sizes: dict[Hashable, int] = {}

    def add(self, name: Hashable, space: Hashable, shape: Shape, dtype: np.dtype[Any]) -> None:
        """Adds a buffer in a memory."""
        parts, begin = self.parts.setdefault(space, []), self.sizes.get(space, 0)
        self.places[name] = space, len(parts)
        parts.append((begin, shape, dtype))
        self.sizes[space] = begin + -(-math.prod(shape) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT

    def allocate(self, backend: Backend, space: Hashable) -> Any:
        """Returns a new block for a memory, whose device is current: an array of bytes."""
        return backend.xp.empty((self.sizes[space],), dtype=_BYTE)


def call_all(functions: Iterable[Callable[..., Any]], rows: Iterable[Sequence[Any]]) -> list[Any]:
    """Calls functions on the device that is current, in place of `Backend.launcher`."""
    return [function(*row) for function, row in zip(functions, rows, strict=True)]


class Waiting:
    """The launches of one call of a segment that wait for its end.

    Args:
        graphs: the graphs of the segment.
        backend: the backend of its arrays.
        blocks: the buffers that only the segment reads.
        queues: the launches on each memory; without those of a memory, they are made when it is used.
        allocated: the blocks that have been allocated, by their memory.
        results: the other buffers that have been allocated, by their name.
        is_current: whether the device of the segment, which has only one, is current until the segment ends.

    Attributes:
        failed: the last equation of the kernel whose launch has failed.
    """

    __slots__ = (
        "_allocated",
        "_backend",
        "_blocks",
        "_graphs",
        "_parts",
        "_queues",
        "_results",
        "failed",
        "is_current",
    )

    def __init__(
        self,
        graphs: Graphs,
        backend: Backend,
        blocks: Blocks,
        queues: dict[Hashable, Queue],
        allocated: Mapping[Hashable, Any],
        results: Mapping[Hashable, Any],
        is_current: bool,
    ) -> None:
        self._graphs, self._backend, self._blocks = graphs, backend, blocks
        self._queues, self._allocated, self._results = queues, allocated, results
        self._parts: dict[Hashable, list[Any]] = {}
        self.failed: Equation | None = None
        self.is_current = is_current

    def launcher(self, devices: Sequence[Device]) -> Launch:
        """Returns what calls functions on devices; see `Backend.launcher`."""
        return call_all if self.is_current else self._backend.launcher(devices)

    def queue(self, device: Device, space: Hashable) -> Queue:
        """Returns the launches on the memory of a device."""
        found = self._queues.get(space)
        if found is None:
            found = self._queues[space] = Queue(self._graphs, self._backend, device, space)
        return found

    def array(self, name: Hashable) -> Any:
        """Returns the array for a buffer, whose device is current; None if it is not allocated yet, and is read outside
        of the segment.
        """
        place = self._blocks.places.get(name)
        if place is None:
            return self._results.get(name)
        space, position = place
        parts = self._parts.get(space)
        if parts is None:
            block = self._allocated.get(space)
            if block is None:
                block = self._blocks.allocate(self._backend, space)
            parts = self._parts[space] = self._backend.arrays_in(block, self._blocks.parts[space])
        return parts[position]

    def flush(self, ends: bool = False) -> None:
        """Launches all. It is called before anything else is queued that may depend on them.

        Args:
            ends: whether the segment ends.
        """
        queues = [q for q in self._queues.values() if q.count]
        if not queues:
            return
        try:
            self.launcher([q.device for q in queues])([q.run for q in queues], [(ends,)] * len(queues))
        except BaseException:  # Raised again; the caller names the kernel.
            self.failed = next((q.failed for q in queues if q.failed is not None), None)
            raise


_FLOAT = struct.Struct("d").pack


def key_of(x: Any, backend: Backend) -> Hashable:
    """Returns what a graph has of an argument: of an array its place, of a number its type and its bits."""
    if type(x) is float:
        return float, _FLOAT(x)
    if isinstance(x, np.generic):
        return x.dtype.str, x.tobytes()
    return backend.address_of(x) if backend.is_array(x) else (type(x), x)
