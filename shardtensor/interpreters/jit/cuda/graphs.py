"""The parts of a segment, its graphs by the launches that they repeat, and the memory of what only it reads.

See `shardtensor.interpreters.jit.cuda.segments`.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from shardtensor.backend.device import Device
from shardtensor.backend.protocol import Backend
from shardtensor.interpreters.jit.grouping.window_writes import WindowWrite
from shardtensor.interpreters.programs.program import Equation, Var
from shardtensor.sharding.layout import Shape
from shardtensor.tensor.storage import Storage

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

Arrays: TypeAlias = Mapping[Hashable, Any]
"""What a call has allocated, by name."""

Targets: TypeAlias = Mapping[Var, Sequence[Storage]]
"""The storages of the results of writes, and what else is needed for them: see `Part`."""


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


class Buffer(NamedTuple):
    """An array that a call of a segment allocates.

    Attributes:
        name: what it is found by: for a buffer of a value, the numbers of both.
        value: the value; None for what only one kernel needs.
        space: the memory.
        shape, dtype: of the array.
    """

    name: Hashable
    value: Var | None
    space: Hashable
    shape: Shape
    dtype: np.dtype[Any]


class Part(NamedTuple):
    """A part of a segment: a kernel, or the kernels of several steps of a loop.

    Attributes:
        equation: the equation that errors name.
        backend: the backend of its arrays.
        memories: a device and the memory of each buffer of this process, by the number of the buffer.
        launches: the number of launches on each of them.
        reads: the values that it reads.
        buffers: what a call allocates.
        writes: the writes into windows, by their results: of tensors in one memory.
        targets: takes the result of a write, the tensor that is written, and the arrays from before the segment that
            are read. Returns the storage of the result, and of what else a call needs for it: that of the tensor where
            it may be written, or of copies. Their device is current.
        prepare: takes the values of the program by number, the buffers by name, and what ``targets`` has returned for
            each write. Adds the results to the values, and returns what launches the part, and the memory on whose
            device.
        spans: whether the tensors are those of several processes, which compare the calls of the operators.
    """

    equation: Equation
    backend: Backend
    memories: Mapping[int, tuple[Device, Hashable]]
    launches: Mapping[int, int]
    reads: Sequence[Var]
    buffers: Sequence[Buffer]
    writes: Mapping[Var, WindowWrite]
    targets: Callable[[Var, Any, Sequence[Any]], Sequence[Storage]]
    prepare: Callable[[Any, Arrays, Targets], Sequence[tuple[Hashable, Callable[[], None]]]]
    spans: bool = False


class Block:
    """The buffers in one memory that only a segment reads: parts of one array.

    They are freed and allocated as a whole: pools return single arrays in an order that changes from call to call, so
    that the same addresses would come again late.

    Attributes:
        parts: the first byte, the shape and the dtype of each buffer.
        size: the number of bytes.
    """

    def __init__(self) -> None:
        self.parts: list[tuple[int, Shape, np.dtype[Any]]] = []
        self.size = 0
        self._names: list[Hashable] = []

    def add(self, buffer: Buffer) -> None:
        """Adds a buffer."""
        self._names.append(buffer.name)
        self.parts.append((self.size, buffer.shape, buffer.dtype))
        self.size += -(-math.prod(buffer.shape) * buffer.dtype.itemsize // _ALIGNMENT) * _ALIGNMENT

    def allocate(self, backend: Backend) -> Any:
        """Returns new memory on the current device: an array of bytes."""
        return backend.xp.empty((self.size,), dtype=_BYTE)

    def arrays(self, backend: Backend, memory: Any) -> dict[Hashable, Any]:
        """Returns the buffers in an array that `allocate` has returned, by name."""
        return dict(zip(self._names, backend.arrays_in(memory, self.parts), strict=True)) if self._names else {}


_FLOAT = struct.Struct("d").pack


def key_of(x: Any) -> Hashable:
    """Returns what a graph has of a number: its type and its bits."""
    if type(x) is float:
        return float, _FLOAT(x)
    return (x.dtype.str, x.tobytes()) if isinstance(x, np.generic) else (type(x), x)
