"""Segments of a program: launches of consecutive kernels, which are one launch of a graph where they recur.

A segment is a run of steps that launch kernels and nothing else; views and numbers between them are no launches.
Everything else ends it: a product, which is a library's, cannot be captured in a graph. The launches of a segment wait
for its end. If the same launches come again, they are captured (`Backend.capture`), and are one launch from then on.

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
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from shardtensor.backend.device import Device
from shardtensor.backend.protocol import Backend
from shardtensor.communication.transfer_log import is_recording
from shardtensor.interpreters.jit.program import Equation, Var
from shardtensor.sharding.layout import Shape

GRAPHS = 16
"""The maximum number of graphs of a segment: a loop has one for each set of addresses among which it alternates."""

SEEN = 64
"""The number of launches of a segment that are remembered, to find that they come again."""

COST = 8
"""The number of calls with launches that have come before, for each of which one capture is made: where addresses recur
so rarely that graphs are dropped before they are used, capturing takes a small part of the time.
"""

MOST_BYTES = 1 << 26
"""The size of the results of the kernels of a segment. The kernels of large results take longer than their launches."""


class Graphs:
    """The graphs of a segment, and the launches that came lately.

    There is no lock: each step is one operation of a dict. Two threads never have the same launches at the same time,
    because their results have different addresses.
    """

    def __init__(self) -> None:
        self._graphs: dict[Hashable, Callable[[], None]] = {}
        self._seen: dict[Hashable, None] = {}
        self._credit = COST * GRAPHS

    def find(self, key: Hashable, capture: Callable[[], Callable[[], None] | None]) -> Callable[[], None] | None:
        """Returns the graph of launches; None if they come for the first time, or there is none.

        Args:
            key: all that a graph of the launches has.
            capture: captures it.
        """
        graph = self._graphs.pop(key, None)
        if graph is None:
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

    Attributes:
        count: the number of launches that wait.
        failed: the last equation of the kernel whose launch has failed.
    """

    __slots__ = ("_backend", "_graphs", "_keys", "_launches", "_space", "count", "device", "failed")

    def __init__(self, graphs: Graphs, backend: Backend, device: Device, space: Hashable) -> None:
        self._graphs, self._backend, self._space = graphs, backend, space
        self._keys: list[Hashable] = []
        self._launches: list[tuple[Equation, Callable[[], None]]] = []
        self.count = 0
        self.device = device
        self.failed: Equation | None = None

    def add(self, equation: Equation, key: Hashable, launch: Callable[[], None], count: int) -> None:
        """Adds what a kernel launches.

        Args:
            equation: the last one that the kernel computes.
            key: what the launches depend on: the kernel, the shape of its loop, and its arguments (see `key_of`).
            launch: launches.
            count: the number of launches.
        """
        self._keys.append(key)
        self._launches.append((equation, launch))
        self.count += count

    def run(self) -> None:
        """Launches all, on the current device; nothing waits then."""
        graph = None
        if self.count > 1:
            key = self._space, *self._keys
            graph = self._graphs.find(key, lambda: self._backend.capture(self._launch))
        (self._launch if graph is None else graph)()
        self._keys, self._launches, self.count = [], [], 0

    def _launch(self) -> None:
        for equation, launch in self._launches:
            self.failed = equation
            launch()
        self.failed = None


class Waiting:
    """The launches of one call of a segment that wait for its end.

    Args:
        segment: the segment.
        graphs: its graphs.
        backend: the backend of its arrays.

    Attributes:
        failed: the last equation of the kernel whose launch has failed.
    """

    __slots__ = ("_backend", "_blocks", "_graphs", "_queues", "_segment", "failed")

    def __init__(self, segment: Segment, graphs: Graphs, backend: Backend) -> None:
        self._segment, self._graphs, self._backend = segment, graphs, backend
        self._queues: dict[Hashable, Queue] = {}
        self._blocks: dict[Hashable, list[Any]] = {}
        self.failed: Equation | None = None

    def queue(self, device: Device, space: Hashable) -> Queue:
        """Returns the launches on the memory of a device."""
        found = self._queues.get(space)
        if found is None:
            found = self._queues[space] = Queue(self._graphs, self._backend, device, space)
        return found

    def temporary(self, v: Var, k: int) -> Any:
        """Returns the array for the k-th buffer of a value, whose device is current; None if the value is read outside
        of the segment.
        """
        place = self._segment.places.get((v.number, k))
        if place is None:
            return None
        space, position = place
        block = self._blocks.get(space)
        if block is None:
            block = self._blocks[space] = self._backend.empty_arrays(self._segment.blocks[space])
        return block[position]

    def flush(self) -> None:
        """Launches all. It is called before anything else is queued that may depend on them."""
        queues = [q for q in self._queues.values() if q.count]
        if not queues:
            return
        try:
            self._backend.launcher([q.device for q in queues])([q.run for q in queues], [()] * len(queues))
        except BaseException:  # Raised again; the caller names the kernel.
            self.failed = next((q.failed for q in queues if q.failed is not None), None)
            raise


Step = Callable[[Any], None]
"""A step of a program: it takes the values by number."""

_FLOAT = struct.Struct("d").pack


def key_of(x: Any, backend: Backend) -> Hashable:
    """Returns what a graph has of an argument: of an array its place, of a number its type and its bits."""
    if type(x) is float:
        return float, _FLOAT(x)
    if isinstance(x, np.generic):
        return x.dtype.str, x.tobytes()
    return backend.address_of(x) if backend.is_array(x) else (type(x), x)


class Launching(Protocol):
    """A kernel that may be a part of a segment."""

    slot: int | None
    """The number of the value of the program in which a call has the launches that wait (`Waiting`); None: there are
    none.
    """

    @property
    def launches(self) -> int:
        """The number of launches of a call on one buffer, at most 2; 0 if they cannot wait."""

    @property
    def backend(self) -> Backend:
        """The backend of its arrays."""

    def allocated(self) -> Sequence[Buffer]:
        """Returns the buffers that a call allocates."""


class Buffer(NamedTuple):
    """The k-th buffer of a value, in a memory."""

    value: Var
    k: int
    space: Hashable
    shape: Shape
    dtype: np.dtype[Any]

    @property
    def nbytes(self) -> int:
        """The number of bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


class Segment:
    """Consecutive nodes of a program whose launches are those of kernels.

    Attributes:
        first, last: the numbers of its first and its last node, which are kernels.
        kernels: the kernels.
        blocks: for each memory, the shapes and dtypes of the buffers that only the segment reads.
        places: by the number of the value and of the buffer, where these are: the memory, and the position.
    """

    def __init__(self, first: int) -> None:
        self.first = self.last = first
        self.kernels: list[Launching] = []
        self.blocks: dict[Hashable, list[tuple[Shape, np.dtype[Any]]]] = {}
        self.places: dict[tuple[int, int], tuple[Hashable, int]] = {}
        self._bytes: dict[Hashable, int] = {}
        self._graphs = Graphs()

    def takes(self, kernel: Launching) -> bool:
        """Whether a kernel can be its next one."""
        if not self.kernels:
            return True
        sizes = dict(self._bytes)
        for buffer in kernel.allocated():
            sizes[buffer.space] = sizes.get(buffer.space, 0) + buffer.nbytes
        return kernel.backend is self.kernels[0].backend and max(sizes.values(), default=0) <= MOST_BYTES

    def add(self, k: int, kernel: Launching) -> None:
        """Adds the kernel that is the k-th node."""
        self.last = k
        self.kernels.append(kernel)
        for buffer in kernel.allocated():
            self._bytes[buffer.space] = self._bytes.get(buffer.space, 0) + buffer.nbytes

    def plan(self, last: Mapping[Var, int], bases: Collection[Var]) -> None:
        """Determines which values only the segment reads.

        Args:
            last: for each value, the number of the node that reads it last.
            bases: the values that are written, whose memory has to be known as theirs.
        """
        for value, k, space, shape, dtype in [buffer for kernel in self.kernels for buffer in kernel.allocated()]:
            if last[value] <= self.last and value not in bases:
                block = self.blocks.setdefault(space, [])
                self.places[value.number, k] = space, len(block)
                block.append((shape, dtype))

    def steps(self, steps: Sequence[Step], slot: int) -> list[Step]:
        """Returns the steps of its nodes, the first and the last one of which begin and end it.

        Args:
            steps: the steps.
            slot: the number of the value that has the launches that wait.
        """
        for kernel in self.kernels:
            kernel.slot = slot
        made = list(steps)
        made[0] = self._begin(made[0], slot)
        made[-1] = _end(made[-1], slot)
        return made

    def _begin(self, first: Step, slot: int) -> Step:
        backend, graphs = self.kernels[0].backend, self._graphs

        def step(values: Any) -> None:
            if backend.captures and not is_recording():
                values[slot] = Waiting(self, graphs, backend)
            first(values)

        return step


def _end(last: Step, slot: int) -> Step:
    def step(values: Any) -> None:
        last(values)
        waiting = values[slot]
        if waiting is not None:
            waiting.flush()
            values[slot] = None

    return step


def segments_of(
    nodes: Sequence[Sequence[Equation]], kernels: Mapping[int, Launching], last: Mapping[Var, int]
) -> list[Segment]:
    """Returns the segments of a program that have several launches.

    Args:
        nodes: what the program computes, in order.
        kernels: the kernels by the number of their node.
        last: for each value, the number of the node that reads it last.
    """
    bases = {v for node in nodes for e in node if e.writes for v in (e.operands[0], e.results)}
    made = list(_segments(nodes, kernels))
    for segment in made:
        segment.plan(last, bases)
    return made


def _segments(nodes: Sequence[Sequence[Equation]], kernels: Mapping[int, Launching]) -> Iterator[Segment]:
    made: Segment | None = None
    for k, node in enumerate(nodes):
        kernel = kernels.get(k)
        if kernel is not None and kernel.launches:
            if made is not None and not made.takes(kernel):
                yield from _worthwhile(made)
                made = None
            made = made or Segment(k)
            made.add(k, kernel)
        elif made is not None and not _launches_nothing(node):
            yield from _worthwhile(made)
            made = None
    yield from _worthwhile(made)


def _worthwhile(segment: Segment | None) -> Iterator[Segment]:
    if segment is not None and sum(kernel.launches for kernel in segment.kernels) > 1:
        yield segment


def _launches_nothing(node: Sequence[Equation]) -> bool:
    """Whether a node is a view, or computes a Python number of others."""
    (equation, *others) = node
    if others or equation.programs or equation.writes:
        return False
    return equation.op.name == "view" or isinstance(getattr(equation.results, "kind", None), type)
