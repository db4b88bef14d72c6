"""Calls of a segment that are one launch: the graph is found before any of the steps is prepared.

The kernels of a segment determine what they read from before it, and what exists after it. If none of them writes into
a window, all addresses of a call follow from those of these operands and results, and of the block of everything
between: they are the key of the launches. A call takes the operands, allocates the rest, and looks for the graph. The
steps run only if there is none, and use what has been allocated.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from shardtensor.backend.device import Device
from shardtensor.backend.protocol import Backend
from shardtensor.interpreters.jit.launches import Blocks, Graphs, Queue, Waiting, key_of
from shardtensor.interpreters.mutation.views import View, reads_buffers
from shardtensor.interpreters.programs.program import Equation, Var
from shardtensor.sharding.layout import Shape
from shardtensor.tensor.storage import Storage
from shardtensor.tensor.tensor import tensor
from shardtensor.tensor.value import Aval


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

    @property
    def memories(self) -> Mapping[int, tuple[Device, Hashable]]:
        """A device and the memory of each buffer of this process, by the number of the buffer."""

    @property
    def only_launches(self) -> bool:
        """Whether a call launches and does nothing else, into arrays that it allocates."""

    def is_idle(self, k: int) -> bool:
        """Whether a call launches nothing on the k-th buffer."""

    def reads(self) -> list[Var]:
        """Returns the values that it reads."""

    def allocated(self) -> Sequence[Buffer]:
        """Returns the buffers that a call allocates for values."""

    def scratch(self) -> Sequence[tuple[Hashable, Hashable, Shape, np.dtype[Any]]]:
        """Returns the name, the memory, the shape and the dtype of what a call allocates besides."""


class Call(NamedTuple):
    """What a call of a segment reads.

    Attributes:
        columns: the buffers of each tensor.
        numbers: what a graph has of the numbers.
    """

    columns: Sequence[Sequence[Any]]
    numbers: Hashable


class Started(NamedTuple):
    """What a call has in one memory.

    Attributes:
        key: the key of its launches.
        block: the memory of what only the segment reads; None if that is nothing.
        results: the other buffers.
        is_launched: whether nothing is left to be launched.
    """

    key: Hashable
    block: Any
    results: list[Any]
    is_launched: bool


class OneLaunch:
    """How a segment is called as one launch on each memory.

    Args:
        kernels: the kernels.
        between: the other equations.
        tensors: the values of other steps whose buffers, or views of them, the kernels read.
        span, last, blocks, graphs: see `one_launch_of`.

    Attributes:
        computed: the equations that compute numbers, which a call needs first.
        views: the equations of the views that are read after the segment.
    """

    def __init__(
        self,
        kernels: Sequence[Launching],
        between: Sequence[Equation],
        tensors: Sequence[Var],
        span: range,
        last: Mapping[Var, int],
        blocks: Blocks,
        graphs: Graphs,
    ) -> None:
        self._backend, self._blocks, self._graphs = kernels[0].backend, blocks, graphs
        self._memories = list(kernels[0].memories.values())
        self._idle = [all(kernel.is_idle(k) for kernel in kernels) for k in range(len(self._memories))]
        self._launch = self._backend.launcher([device for device, _ in self._memories])
        self._tensors = [v.number for v in tensors]
        read = dict.fromkeys([v for kernel in kernels for v in kernel.reads()])
        self._numbers = [v.number for v in read if isinstance(v.kind, type)]
        self.computed = [e for e in between if e.op.name != "view"]
        self.views = [e for e in between if e.op.name == "view" and last[e.results] > span[-1]]
        others = [b for kernel in kernels for b in kernel.allocated() if b.name not in blocks.places]
        self._results = [[b for b in others if b.k == k] for k in range(len(self._memories))]
        self._alike = [_alike(buffers) for buffers in self._results]
        self._bound = [(n, b.value) for n, b in enumerate(self._results[0]) if last[b.value] > span[-1]]
        inside = {b.value for kernel in kernels for b in kernel.allocated()}
        inside.update([e.results for e in between if e.op.name == "view"])
        self._dropped = [v.number for v, use in last.items() if use in span and v not in inside]

    def prepare(self, values: Any) -> Call | None:
        """Returns what a call reads; None where the buffers of an operand have to be made first. The numbers that the
        segment computes are among the values.
        """
        columns, count = [], len(self._memories)
        for number in self._tensors:
            buffers = _buffers_of(values[number])
            if len(buffers) != count:
                return None
            columns.append(buffers)
        backend = self._backend
        return Call(columns, tuple([key_of(values[number], backend) for number in self._numbers]))

    def launch(self, values: Any, call: Call) -> Waiting | None:
        """Allocates what a call makes, and launches the graph. Returns None if that was all, and the results are among
        the values; otherwise what the steps need.
        """
        started = self._launch([self._start] * len(self._memories), [(k, call) for k in range(len(self._memories))])
        if all(s.is_launched for s in started):
            self._bind(values, started)
            return None
        queues: dict[Hashable, Queue] = {}
        allocated: dict[Hashable, Any] = {}
        results: dict[Hashable, Any] = {}
        for (device, space), buffers, own in zip(self._memories, self._results, started, strict=True):
            queues[space] = Queue(self._graphs, self._backend, device, space, own.key, own.is_launched)
            allocated[space] = own.block
            results.update([(b.name, array) for b, array in zip(buffers, own.results, strict=True)])
        one = len(self._memories) == 1
        return Waiting(self._graphs, self._backend, self._blocks, queues, allocated, results, is_current=one)

    def _start(self, k: int, call: Call) -> Started:
        """Allocates what a call makes in a memory, whose device is current, and launches the graph if there is one."""
        backend, (_, space) = self._backend, self._memories[k]
        empty, address_of = backend.xp.empty, backend.address_of
        block = self._blocks.allocate(backend, space) if space in self._blocks.sizes else None
        results = [empty(b.shape, dtype=b.dtype) for b in self._results[k]]
        for positions in self._alike[k]:
            ordered = sorted([results[n] for n in positions], key=address_of)
            for n, array in zip(positions, ordered, strict=True):
                results[n] = array
        arrays = [*[column[k] for column in call.columns], *results]
        if block is not None:
            arrays.append(block)
        key = space, call.numbers, *map(address_of, arrays)
        graph = self._graphs.find(key)
        if graph is not None:
            graph()
        return Started(key, block, results, graph is not None or self._idle[k])

    def _bind(self, values: Any, started: Sequence[Started]) -> None:
        """Adds the results to the values, and drops those that nothing reads any more."""
        for n, v in self._bound:
            arrays = tuple([own.results[n] for own in started])
            values[v.number] = tensor(v.kind, Storage(arrays, tuple([[] for _ in arrays])))  # type: ignore[arg-type]
        for number in self._dropped:
            values[number] = None


def one_launch_of(
    kernels: Sequence[Launching],
    nodes: Sequence[Sequence[Equation]],
    span: range,
    last: Mapping[Var, int],
    blocks: Blocks,
    graphs: Graphs,
) -> OneLaunch | None:
    """Returns how a segment is called as one launch; None if its launches have to be prepared first.

    Args:
        kernels: its kernels.
        nodes: what the program computes.
        span: the numbers of its nodes.
        last: for each value, the number of the node that reads it last.
        blocks: the buffers that only the segment reads.
        graphs: its graphs.
    """
    memories = kernels[0].memories
    if any(not kernel.only_launches or kernel.memories != memories for kernel in kernels):
        return None
    spaces = [space for _, space in memories.values()]
    if list(memories) != list(range(len(spaces))) or len(set(spaces)) < len(spaces):
        return None
    views = {node[0].results: node[0] for node in nodes[: span.stop] if node[0].op.name == "view"}
    inside = {b.value for kernel in kernels for b in kernel.allocated()}
    tensors: dict[Var, None] = {}
    for v in [v for kernel in kernels for v in kernel.reads() if isinstance(v.kind, Aval)]:
        source = _source(v, views)
        if source is None:
            return None
        if source not in inside:
            tensors[source] = None
    between = [node[0] for node in nodes[span.start : span.stop] if launches_nothing(node)]
    return OneLaunch(kernels, between, list(tensors), span, last, blocks, graphs)


def _alike(buffers: Sequence[Buffer]) -> list[list[int]]:
    """Returns the positions of buffers that are alike. Pools return their memory in an order that changes from call to
    call; in the order of addresses, the same addresses are the same key.
    """
    found: dict[Hashable, list[int]] = {}
    for n, buffer in enumerate(buffers):
        found.setdefault((buffer.shape, buffer.dtype), []).append(n)
    return [positions for positions in found.values() if len(positions) > 1]


def _buffers_of(x: Any) -> Sequence[Any]:
    """Returns the buffers of a tensor, if reading it gives them, or a view of the one buffer of its base; otherwise
    nothing, or the arrays of devices, which have to be joined.
    """
    storage = x._storage
    if type(storage) is Storage:
        return storage.buffers
    if type(storage) is not View or not storage.is_direct or len(storage.view_spec.boxes) > 1:
        return ()
    return storage.buffers if type(storage.base._storage) is Storage else ()


def _source(v: Var, views: Mapping[Var, Equation]) -> Var | None:
    """Returns the value whose buffers are read with a value: the base of a view. None if elements may be copied."""
    view = views.get(v)
    if view is None:
        return v
    (base,) = view.operands
    assert view.into is not None
    is_plain = base not in views and isinstance(base.kind, Aval) and reads_buffers(base.kind, view.into)
    return base if is_plain else None


def launches_nothing(node: Sequence[Equation]) -> bool:
    """Whether a node is a view, or computes a Python number of others."""
    (equation, *others) = node
    if others or equation.programs or equation.writes:
        return False
    return equation.op.name == "view" or isinstance(getattr(equation.results, "kind", None), type)
