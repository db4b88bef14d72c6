"""The graphs of a segment, by the launches that they repeat, and the memory of what only the segment reads.

See `shardtensor.interpreters.jit.segments`.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import numpy as np

from shardtensor.backend.protocol import Backend
from shardtensor.interpreters.jit.program import Var
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
    """The k-th buffer of a value, in a memory."""

    value: Var
    k: int
    space: Hashable
    shape: Shape
    dtype: np.dtype[Any]

    @property
    def name(self) -> Hashable:
        """What it is found by."""
        return self.value.number, self.k

    @property
    def nbytes(self) -> int:
        """The number of bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


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

    def add(self, name: Hashable, shape: Shape, dtype: np.dtype[Any]) -> None:
        """Adds a buffer."""
        self._names.append(name)
        self.parts.append((self.size, shape, dtype))
        self.size += -(-math.prod(shape) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT

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
