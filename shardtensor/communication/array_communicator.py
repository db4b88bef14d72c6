"""The collectives of a group of devices, executed on one array for each device.

Where devices share a memory, one result serves all devices that receive the same elements; elsewhere each array is sent
to the devices that need it. Reductions combine the arrays along the same tree in both cases, so that the bits
are the same.
"""

from __future__ import annotations

import functools
import itertools
import math
import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import numpy as np

from shardtensor.backend.device import Device
from shardtensor.backend.functions import function_of
from shardtensor.backend.protocol import Backend
from shardtensor.backend.registry import backend_of, backends_of, shared_memory
from shardtensor.communication import between_memories
from shardtensor.communication.all_reduce import Group, ReduceOps, Tree, all_reduce, binomial_tree, combine, tree_of
from shardtensor.communication.communicator import Communicator, Rows
from shardtensor.communication.merging import merged
from shardtensor.communication.messages import Message, copied, exchange, send
from shardtensor.communication.offload import offloaded
from shardtensor.host import blockwise, memory_pool
from shardtensor.host.threads import each
from shardtensor.sharding.layout import Ints, Shape, offsets
from shardtensor.tensor.ownership import hold_memory
from shardtensor.tensor.tensor import ShardedTensor, shard_arrays, tensor
from shardtensor.tensor.value import Aval, in_place

_BLOCK = 1 << 19
"""Bytes of a result that are reduced at a time in shared memory, so that they stay in the cache meanwhile."""

_BLOCKS = 4
"""The number of blocks that a thread reduces one after the other, in the same memory for partial results."""

_DIVIDED_FROM = 1 << 23
"""Bytes of all operands from which a reduction is divided over threads: half a millisecond of work."""

_LINE = 64
"""Bytes of a cache line; the results in a shared buffer are aligned to its multiples."""


class ArrayCommunicator(Communicator):
    """One collective among devices, executed on arrays; see `Communicator`."""

    def __init__(self, caller: str, axis: str, devices: Sequence[Device], sizes: Sequence[int] = ()) -> None:
        super().__init__(caller, axis, devices, sizes)
        self.backends: Sequence[Backend]
        self.backends, self.on_host, self.share_memory = backends_of(tuple(devices))
        self.copies = not self.share_memory
        self._sent: set[tuple[int, int]] = set()

    def settle(self) -> None:
        """See `Communicator`."""
        tokens: dict[Device, Any] = {}
        sent, self._sent = self._sent, set()
        for source, destination in sorted(sent):
            giver, taker = self.backends[source], self.backends[destination]
            if giver is taker and type(giver).record is not Backend.record:
                there = self.devices[destination]
                if there not in tokens:
                    tokens[there] = taker.record(there)
                # safeguard: shared arrays are read before they are written
                giver.wait(self.devices[source], tokens[there])

    # -- operands and results ----------------------------------------------------------------------

    def shards(self, x: ShardedTensor) -> Sequence[Any]:
        """See `Communicator`."""
        return shard_arrays(x)

    def assembled(self, value: Aval, arrays: Sequence[Any]) -> ShardedTensor:
        """See `Communicator`."""
        return tensor(value, offloaded(value, arrays))

    def result(self, array: Any, device: Device) -> Any:
        """See `Communicator`. Programs that share an array get objects of their own, whose shapes they can set."""
        return array.view() if type(array) is np.ndarray else array

    def dtype_of(self, array: Any) -> np.dtype[Any]:
        """See `Communicator`."""
        return self.backends[0].dtype_of(array)

    def cast(self, arrays: Sequence[Any], kinds: str, dtype: str) -> Sequence[Any]:
        """See `Communicator`."""
        if self.dtype_of(arrays[0]).kind not in kinds:
            return arrays
        converted = []
        for array, backend, device in zip(arrays, self.backends, self.devices, strict=True):
            with backend.on(device):
                converted.append(backend.xp.asarray(array, dtype=np.dtype(dtype)))
        return converted

    # -- collectives -------------------------------------------------------------------------------

    def _all_reduce(self, arrays: Sequence[Any], ufunc: str, mean: bool, group: Group) -> list[Any]:
        if self.on_host:
            total = _reduced(getattr(np, ufunc), arrays, group.tree)
            return [self._deliver(0, total / len(arrays) if mean else total)] * len(arrays)
        if len(arrays) == 1 and not mean:
            return [self._deliver(0, copied(arrays[0], self.devices[0]))]
        together = None if mean else self._by_library(arrays, ufunc)
        if together is not None:
            return [self._deliver(k, array) for k, array in enumerate(together)]
        if self.share_memory:
            return self._delivered([self._total(arrays, ufunc, mean, group.tree)] * len(arrays))
        if self._backend and not group.chunked and len(arrays) * arrays[0].nbytes <= between_memories.COLLECTED:
            self._note_sent([0])
            count = len(arrays) if mean else 1
            totals = between_memories.combined(self._backend, self.devices, arrays, ufunc, group.tree, count)
            return self._delivered(totals)
        results = all_reduce(group, arrays, self._reduce_ops(arrays, ufunc, mean))
        return self._delivered([results[k] for k in group.members])

    def _total(self, arrays: Sequence[Any], ufunc: str, mean: bool, tree: Tree) -> Any:
        """Returns the all-reduce of arrays in one memory, which all devices get."""
        backend = self.backends[0]
        with backend.on(self.devices[0]):
            total = merged(backend, ufunc, tree, arrays)
            return backend.contiguous(backend.xp.divide(total, len(arrays)) if mean else total)

    def _all_gather(self, arrays: Sequence[Any], axis: int, tiled: bool) -> list[Any]:
        if self.share_memory:
            whole = self._adjacent(arrays, axis) if tiled else None
            if whole is not None:
                return [whole] * len(arrays)
            return self._delivered([self._joined(0, arrays, axis, tiled)] * len(arrays))
        if self._backend:
            self._note_sent(range(len(arrays)))
            columns = [arrays] * len(arrays)
            return self._delivered(between_memories.joined(self._backend, self.devices, columns, axis, tiled))
        return [self._deliver(k, self._joined(k, arrays, axis, tiled)) for k in range(len(arrays))]

    def _reduce_scatter(self, arrays: Sequence[Any], ufunc: str, dimension: int, tiled: bool) -> list[Any]:
        parts = parts_along(arrays[0].ndim, dimension, arrays[0].shape[dimension], len(arrays), tiled)
        tree = tree_of((True,) * len(arrays), self.sizes)
        if self.on_host:
            whole = _reduced(getattr(np, ufunc), arrays, tree)
            return [self._deliver(k, whole[part]) for k, part in enumerate(parts)]
        pieces = self._pieces(arrays, [parts] * len(arrays))
        return [self._deliver(k, self._merged(k, column, ufunc, tree)) for k, column in enumerate(pieces)]

    def _merged(self, k: int, column: Sequence[Any], ufunc: str, tree: Tree) -> Any:
        """Combines an array of each device on the k-th one, in memory that no mapped function has a reference to."""
        backend, device = self.backends[k], self.devices[k]
        if len(column) == 1:
            return self._owned(self._bring(column[0], 0, k), 0, k)
        pieces = [self._bring(array, i, k) for i, array in enumerate(column)]
        with backend.on(device):
            return merged(backend, ufunc, tree, pieces)

    def _all_to_all(self, arrays: Sequence[Any], split_axis: int, concat_axis: int, tiled: bool) -> list[Any]:
        cuts = [parts_along(a.ndim, split_axis, a.shape[split_axis], len(arrays), tiled) for a in arrays]
        whole = self._adjacent(arrays, concat_axis) if tiled and split_axis != concat_axis else None
        if whole is not None:
            return [whole[part] for part in cuts[0]]
        return self._exchanged(arrays, cuts, concat_axis, tiled)

    def _ragged_all_to_all(
        self, arrays: Sequence[Any], bounds: Sequence[Ints], split_axis: int, concat_axis: int
    ) -> list[Any]:
        before = (slice(None),) * split_axis
        cuts = [[(*before, slice(*pair)) for pair in itertools.pairwise(np.asarray(ends).tolist())] for ends in bounds]
        return self._exchanged(arrays, cuts, concat_axis, True)

    def _send_rows(self, arrays: Sequence[Any], into: Sequence[Any], rows: Sequence[Rows], adds: bool) -> list[Any]:
        results = [copied(array, device) for array, device in zip(into, self.devices, strict=True)]
        messages = [
            Message(self._part(arrays, row), self.devices[row.source], self.devices[row.destination]) for row in rows
        ]
        self._sent |= {(r.source, r.destination) for r in rows if not self._together(r.source, r.destination)}
        self._place(results, rows, exchange(messages), adds)
        return [self._deliver(k, array) for k, array in enumerate(results)]

    def _part(self, arrays: Sequence[Any], row: Rows) -> Any:
        """Returns the rows that a device sends, as a view."""
        return self._view(arrays, row.source, slice(row.begin, row.begin + row.size))

    def _place(self, results: Sequence[Any], rows: Sequence[Rows], pieces: Iterable[Any], adds: bool) -> None:
        """Writes rows into arrays on their destinations, or adds them."""
        for row, piece in zip(rows, pieces, strict=True):
            backend, out = self.backends[row.destination], results[row.destination]
            part = slice(row.at, row.at + row.size)
            with backend.on(self.devices[row.destination]):
                if adds:
                    out[part] = out[part] + piece
                elif backend.on_host:
                    blockwise.copy_into(out[part], piece, breaks=True)
                else:
                    out[part] = piece

    def _permute(self, arrays: Sequence[Any], sources: Sequence[int | None], zeros: bool) -> list[Any]:
        results: list[Any] = []
        for k, i in enumerate(sources):
            if i is None and not zeros:
                results.append(None)
            elif i is None:
                with self.backends[k].on(self.devices[k]):
                    results.append(self._deliver(k, self.backends[k].xp.zeros_like(arrays[k])))
            else:
                results.append(self._deliver(k, self._owned(self._bring(arrays[i], i, k), i, k)))
        return results

    def _broadcast(self, arrays: Sequence[Any], source: int) -> list[Any]:
        if self.share_memory:
            return self._delivered([copied(arrays[source], self.devices[source])] * len(arrays))
        held: dict[int, Any] = {source: copied(arrays[source], self.devices[source])}
        for i, k in binomial_tree(source, range(len(arrays))):
            held[k] = self._bring(held[i], i, k)
        return self._delivered([held[k] for k in range(len(arrays))])

    # -- helpers -----------------------------------------------------------------------------------

    def _adjacent(self, arrays: Sequence[Any], axis: int) -> Any:
        """Returns the arrays concatenated without a copy, if they are adjacent in one buffer; otherwise None.

        They must be read-only, and their memory must be that of arrays that were lent to their programs, or of results
        of collectives: no program can write to it.
        """
        if not self.on_host or not self.lent or any(a.flags.writeable for a in arrays):
            return None
        known = [{id(memory_pool.owner_of(one.array)) for one in lent} for lent in self.lent]
        owners = [id(memory_pool.owner_of(a)) for a in arrays]
        if not all(owner in _shared or owner in own for owner, own in zip(owners, known, strict=True)):
            return None
        ends = list(itertools.accumulate([a.shape[axis] for a in arrays], initial=0))
        shape = list(arrays[0].shape)
        shape[axis] = ends.pop()
        begins = [[end if d == axis else 0 for d in range(len(shape))] for end in ends]
        pieces = [(array, begin) for array, begin in zip(arrays, begins, strict=True) if array.size]
        whole = in_place([p for p, _ in pieces], [b for _, b in pieces], tuple(shape))
        if whole is None:
            return None
        hold_memory(self.backends[0], whole)  # The result refers to the buffer, not to the leases of its parts.
        return _exported(whole, self.backends[0].export(whole))

    def _together(self, source: int, destination: int) -> bool:
        """Whether two devices share a memory."""
        return self.share_memory or shared_memory((self.devices[source], self.devices[destination])) is not None

    def _bring(self, array: Any, source: int, destination: int) -> Any:
        """Returns the array that `bring` returns, and notes what is sent."""
        if self._together(source, destination):
            return array
        self._sent.add((source, destination))
        return send(array, self.devices[source], self.devices[destination])

    @property
    def _backend(self) -> Backend | None:
        """The backend of all devices, if there is only one, and it has other memories than the host's."""
        backend = self.backends[0]
        return None if self.on_host or any(b is not backend for b in self.backends) else backend

    def _note_sent(self, destinations: Iterable[int]) -> None:
        """Notes that every device sends to each of these, except to those that share its memory."""
        for k in destinations:
            self._sent |= {(i, k) for i in range(len(self.devices)) if not self._together(i, k)}

    def _owned(self, array: Any, source: int, destination: int) -> Any:
        """Returns the result of `_bring` as memory that no mapped function has a reference to."""
        if self._together(source, destination):
            return copied(array, self.devices[destination])
        return array

    def _pieces(self, arrays: Sequence[Any], cuts: Sequence[Sequence[Any]]) -> list[tuple[Any, ...]]:
        """Returns for each device k the k-th part of every array, as a view."""

        return list(
            zip(*[[self._view(arrays, i, part) for part in parts] for i, parts in enumerate(cuts)], strict=True)
        )

    def _view(self, arrays: Sequence[Any], i: int, part: Any) -> Any:
        """Returns a part of the array of the i-th device."""
        with self.backends[i].on(self.devices[i]):
            return self.backends[i].view(arrays[i], part)

    def _exchanged(self, arrays: Sequence[Any], cuts: Sequence[Sequence[Any]], axis: int, tiled: bool) -> list[Any]:
        """Returns for each device k the k-th part of every array, concatenated or stacked."""
        pieces = self._pieces(arrays, cuts)
        if self.on_host:
            return [self._deliver(k, out) for k, out in enumerate(_joined(pieces, axis, tiled))]
        if self._backend and not self.share_memory:
            self._note_sent(range(len(arrays)))
            return self._delivered(between_memories.joined(self._backend, self.devices, pieces, axis, tiled))
        return [self._deliver(k, self._joined(k, column, axis, tiled)) for k, column in enumerate(pieces)]

    def _joined(self, k: int, arrays: Sequence[Any], axis: int, tiled: bool) -> Any:
        """Returns the arrays of all devices, concatenated or stacked, on the k-th device."""
        with self.backends[k].on(self.devices[k]):
            here = [self._bring(array, i, k) for i, array in enumerate(arrays)]
            join = self.backends[k].xp.concat if tiled else self.backends[k].xp.stack
            return join(here, axis=axis)

    def _by_library(self, arrays: Sequence[Any], ufunc: str) -> list[Any] | None:
        """Returns the all-reduce of the backend's library, if it supports the arrays; otherwise None.

        Libraries may add in any order, so they are used for integers only.
        """
        backend, devices = self.backends[0], set(self.devices)
        if len(devices) < len(arrays) or len(arrays) == 1 or len({id(b) for b in self.backends}) > 1:
            return None
        return backend.all_reduce(arrays, self.devices, ufunc) if backend.dtype_of(arrays[0]).kind in "iu" else None

    def _reduce_ops(self, arrays: Sequence[Any], ufunc: str, mean: bool) -> ReduceOps:
        """Returns the operations of `all_reduce` on contributions."""
        backends, shape = self.backends, tuple(arrays[0].shape)

        def merge(k: int, earlier: Any, later: Any) -> Any:
            return function_of(backends[k], ufunc)(earlier, later)

        def finish(k: int, state: Any) -> Any:
            return backends[k].contiguous(backends[k].xp.divide(state, len(arrays)) if mean else state)

        return reduce_ops(self.devices, self._bring, merge, finish, lambda k: shape)

    def _deliver(self, k: int, array: Any) -> Any:
        """Returns a result as mapped functions receive it: read-only where the library can enforce it."""
        backend = self.backends[k]
        exported = backend.export(array)
        if not backend.on_host:
            return exported
        _remember(np.asarray(array))
        return _exported(array, exported)

    def _delivered(self, arrays: Sequence[Any]) -> list[Any]:
        """Returns the results of all devices as mapped functions receive them; one array may be that of several devices
        that share a memory, each of which can return it without a copy.
        """
        numbers: dict[int, list[int]] = {}
        for k, array in enumerate(arrays):
            numbers.setdefault(id(array), []).append(k)
        results = list(arrays)
        for first, *others in numbers.values():
            backend = self.backends[first]
            if others and not backend.on_host:
                exported = _remembered(backend, arrays[first])
            else:
                exported = self._deliver(first, arrays[first])
            for k in (first, *others):
                results[k] = exported
        return results


def reduce_ops(
    devices: Sequence[Device],
    send: Callable[[Any, int, int], Any],
    merge: Callable[[int, Any, Any], Any],
    finish: Callable[[int, Any], Any],
    shape: Callable[[int], Shape],
) -> ReduceOps:
    """Returns the operations of an all-reduce on states: arrays, counts, and tuples of them.

    Args:
        devices: the device at each position.
        send: ``send(array, source, destination)``: an array on the device at another position.
        merge, finish: see `ReduceOps`; the device is current when they are called.
        shape: the shape of the result at a position.
    """
    backends = [backend_of(device) for device in devices]

    def here(function: Callable[..., Any]) -> Callable[..., Any]:
        def on_device(k: int, *args: Any) -> Any:
            if backends[k].on_host:  # NumPy has no current device.
                return function(k, *args)
            with backends[k].on(devices[k]):
                return function(k, *args)

        return on_device

    def cut(k: int, state: Any, begin: int, end: int) -> Any:
        xp, view = backends[k].xp, backends[k].view
        return each_array(lambda array: view(xp.reshape(array, (-1,)), slice(begin, end)), state)

    def join(k: int, parts: list[Any]) -> Any:
        return backends[k].xp.reshape(parts[0] if len(parts) == 1 else backends[k].xp.concat(parts), shape(k))

    def carry(state: Any, source: int, destination: int) -> Any:
        return each_array(lambda array: send(array, source, destination), state)

    return ReduceOps(carry, here(merge), here(finish), here(cut), here(join))


def each_array(function: Callable[[Any], Any], state: Any) -> Any:
    """Applies ``function`` to every array of a state and returns the new state; counts are kept."""
    if isinstance(state, tuple):
        return tuple([each_array(function, part) for part in state])
    # An exact type test, because np.float64 is a subclass of float but counts as an array here.
    return state if type(state) in (int, float) else function(state)


def _reduced(ufunc: Callable[..., Any], arrays: Sequence[Any], tree: Tree) -> Any:
    """Combines host arrays of one shape and dtype along a tree, in memory that nothing else refers to."""
    if len(arrays) == 1:
        return blockwise.copied(arrays[0])
    first = arrays[0]
    if first.nbytes <= _BLOCK or not all(a.flags.c_contiguous for a in arrays):
        return np.asarray(combine(tree, arrays.__getitem__, ufunc))
    out = memory_pool.empty(first.shape, first.dtype)
    flat, into = [a.reshape(-1) for a in arrays], out.reshape(-1)
    merges, partial = _merges(tree)
    step = _BLOCK // first.itemsize
    length = _BLOCKS * step

    def work(k: int) -> None:
        memory = [memory_pool.empty((step,), first.dtype) for _ in range(partial)]
        end = min((k + 1) * length, first.size)
        for begin in range(k * length, end, step):
            part = slice(begin, min(begin + step, end))
            places = [*[a[part] for a in flat], into[part], *[m[: part.stop - begin] for m in memory]]
            for earlier, later, target in merges:
                ufunc(places[earlier], places[later], out=places[target])

    each(work, -(-first.size // length), threads=None if first.nbytes * len(arrays) >= _DIVIDED_FROM else 1)
    return out


@functools.lru_cache(256)
def _merges(tree: Tree) -> tuple[list[tuple[int, int, int]], int]:
    """Returns the merges of a tree one after the other: the numbers of two operands, and of where their total is
    written. The contributions have the first numbers, followed by the result and by the partial results; and how many
    partial results there are.
    """
    merges: list[tuple[int, int, int]] = []
    count, held, most = len(tree), 0, 0  # totals that are held at a time, and the most of them

    def merge(earlier: int, later: int) -> int:
        nonlocal held, most
        totals = [number for number in (earlier, later) if number >= count]
        target = totals[0] if totals else count + held
        held += 1 - len(totals)
        most = max(most, held)
        merges.append((earlier, later, target))
        return target

    combine(tree, lambda k: k, merge)
    return merges, most - 1


def _joined(joins: Sequence[Sequence[Any]], axis: int, tiled: bool) -> list[Any]:
    """Concatenates or stacks the host arrays of each list.

    The results are views of one new buffer, which takes the operating system far less time than one buffer per result.
    """
    shapes, begins, end = [], [], 0
    dtype = joins[0][0].dtype
    for parts in joins:
        row = list(parts[0].shape)
        if tiled:
            row[axis] = sum(part.shape[axis] for part in parts)
        else:
            row.insert(axis, len(parts))
        shape = tuple(row)
        shapes.append(shape)
        begins.append(end)
        end += -(-math.prod(shape) * dtype.itemsize // _LINE) * _LINE
    buffer = memory_pool.empty((end,), np.uint8)
    results = []
    for parts, shape, begin in zip(joins, shapes, begins, strict=True):
        nbytes = math.prod(shape) * dtype.itemsize
        out = buffer[begin : begin + nbytes].view(dtype).reshape(shape)
        results.append(np.concatenate(parts, axis=axis, out=out) if tiled else np.stack(parts, axis=axis, out=out))
    return results


def parts_along(ndim: int, dimension: int, size: int, count: int, tiled: bool) -> list[Any]:
    """Returns the index of each device's part along a dimension."""
    before = (slice(None),) * dimension
    if not tiled:
        return [(*before, k) for k in range(count)]
    bounds = offsets(size, (count,)).tolist()
    return [(*before, slice(a, b)) for a, b in itertools.pairwise(bounds)]


# -- shared results --------------------------------------------------------------------------------

_shared: dict[int, Any] = {}  # by identity, because arrays are not hashable

# The functions that are called when an array is deallocated are C functions: a signal handler, which may raise, runs
# between the instructions of Python functions, and Python would only print the exception. They receive the reference,
# which `dict.pop` takes as the default.

_own: dict[int, tuple[weakref.ref[Any], Any]] = {}
"""The library's array of each result that several programs hold, by the identity of the array that they received."""

_NEITHER = (None, None)

_lent: dict[Hashable, Callable[[], object]] = {}
"""The leases of results that several programs hold, by backend and memory."""


def _remember(array: Any) -> None:
    """Registers that the memory of a host array cannot be written to by user code, for as long as the memory exists."""
    owner = memory_pool.owner_of(array)
    key = id(owner)
    if key not in _shared:
        _shared[key] = weakref.ref(owner, functools.partial(_shared.pop, key))


def _exported(array: Any, exported: Any) -> Any:
    """Registers that ``exported``, which is returned, is what programs received as the result ``array``."""
    if exported is not array:  # A backend may export no views. The entry would then keep its key in memory.
        key = id(exported)
        _own[key] = weakref.ref(exported, functools.partial(_own.pop, key)), array
    return exported


def _remembered(backend: Backend, array: Any) -> Any:
    """Returns a new array of a device as users receive it, and registers that user code must not write to its memory,
    for as long as any of them refers to it.
    """
    exported, lease = backend.lend(array)
    memory = backend.memory_of(array)
    if lease is not None and memory is not None:
        _lent[backend.name, memory] = lease
        if (n := len(_lent)) >= 8 and not n & (n - 1):
            for key in [key for key, known in list(_lent.items()) if known() is None]:
                _lent.pop(key, None)
    return _exported(array, exported)


def received(backend: Backend, array: Any) -> Any:
    """Returns the array to store for one that views the memory of the result of a collective, without a copy; None for
    other arrays. Several programs may hold the given array, and set its shape.
    """
    # Programs received views of one array, where it is NumPy's (see `ArrayCommunicator.result`).
    given = array.base if type(array) is np.ndarray and type(array.base) is np.ndarray else array
    _, own = _own.get(id(given), _NEITHER)
    if own is not None and backend.is_whole(array, own):
        return own
    if not backend.on_host:
        lease = _lent.get((backend.name, backend.memory_of(array))) if _lent else None
        known = lease is not None and lease() is not None
    else:
        owner = memory_pool.owner_of(array) if _shared and isinstance(array, np.ndarray) else array
        known = owner is not array and id(owner) in _shared
    return backend.view(array, ...) if known else None
