"""Point-to-point transfers: plans of copies are executed on the backends, and recorded in the log.

A `TransferPlan` is executed by copies within and between devices; an `OperandTransfer` moves one operand into the
sharding that a plan requires.
"""

from __future__ import annotations

import abc
import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from shardtensor.backend.device import HOST, HOST_MEMORY, Device, HostArray
from shardtensor.backend.protocol import Backend
from shardtensor.backend.registry import (
    backend_of,
    backend_of_group,
    is_remote,
    is_spanning,
    process_index,
    shared_memory,
)
from shardtensor.backend.remote import RemoteArray
from shardtensor.communication.processes import cross, everywhere, process_of
from shardtensor.communication.schedules import Block, Move, flat, one_for_each_pair
from shardtensor.communication.transfer_log import Transfer, TransferBatch, is_recording, record_copy, record_transfer
from shardtensor.errors import ArgumentTypeError, NotAddressableError
from shardtensor.host import blockwise, memory_pool
from shardtensor.host.blockwise import BYTE, LONG
from shardtensor.host.threads import each
from shardtensor.sharding.cells import Cells
from shardtensor.sharding.copy_plan import Piece, Region, RegionCopies, host_grid, identity, plan_reshard
from shardtensor.sharding.index import Index, region_of
from shardtensor.sharding.layout import Grid, NamedSharding, as_sharding
from shardtensor.tensor.operands import HostAval, host_aval
from shardtensor.tensor.ownership import set_joined
from shardtensor.tensor.storage import Storage
from shardtensor.tensor.tensor import ShardedTensor, current_storage, shard_arrays
from shardtensor.tensor.value import Aval, cells_of, join, memory_of_all, views


class RecordedPlan(abc.ABC):
    """A plan whose transfers are recorded in the log.

    Attributes:
        size: the number of elements that change devices.
    """

    size: int

    @abc.abstractmethod
    def records(self, itemsize: int, copied: bool, operator: str, explicit: bool) -> Iterable[Transfer]:
        """Returns the transfers for the log."""

    def announce(self, itemsize: int, copied: bool, operator: str, explicit: bool = False) -> None:
        """Checks the transfers against the guard and records them; see `record_transfer`."""
        made = functools.partial(self.records, itemsize, copied, operator, explicit)
        record_transfer(operator, self.size * itemsize, explicit, made)


class TransferPlan(RecordedPlan):
    """A result, and the regions of the operands from which its elements are copied.

    Attributes:
        regions: the regions, which do not overlap and together cover the result.
        sources: the grid of each operand, in the shapes to which the regions refer.
        result: the grid of the result, likewise.
        copies: the copies of each region; computed if not given.
    """

    def __init__(
        self,
        regions: Sequence[Region],
        sources: Sequence[Grid],
        result: Grid,
        copies: tuple[RegionCopies, ...] | None = None,
    ) -> None:
        self.regions = tuple(regions)
        self.sources = tuple(sources)
        self.result = result
        self.copies = copies or tuple(RegionCopies(r, i, sources[r.operand], result) for i, r in enumerate(regions))
        self.size = sum(c.size for c in self.copies)

    def records(self, itemsize: int, copied: bool, operator: str, explicit: bool) -> TransferBatch:
        """See `RecordedPlan`."""
        grids = (self.result, *self.sources)
        devices = [device for grid in grids for device in grid.devices]
        first = np.cumsum([len(grid.devices) for grid in grids])
        blocks = []
        for region, copies in zip(self.regions, self.copies, strict=True):
            sources, destinations, sizes = copies.messages()
            blocks.append(Block(sources + first[region.operand], destinations, sizes * itemsize))
        messages = blocks[0] if len(blocks) == 1 else one_for_each_pair(flat(blocks))
        return TransferBatch(*messages, devices.__getitem__, operator=operator, explicit=explicit, copied=copied)

    def run(
        self, operands: Sequence[Sequence[Any]], dtype: Any, as_they_lie: bool = False, fill: Any = None
    ) -> tuple[Any, ...]:
        """Executes the plan: returns the result's arrays, one per device in mesh order, from the operands' arrays.

        The operands have the shapes to which the regions refer. The result is in row-major order, unless
        ``as_they_lie`` is true: then an array that stays on its device keeps its memory order, and need not be copied.
        ``fill`` is the value of the elements that no region covers, if there are any.
        """

        positions = range(len(self.result.devices))
        if self._spans:
            from shardtensor.communication.transfer_across import run_across  # Programs of one process do not need it.

            return run_across(self, operands, dtype, as_they_lie, fill)

        def receive(k: int) -> Any:
            messages = [self.message(piece, operands, self.result.devices[k]) for piece in self.incoming[k]]
            return self.receive(k, self.incoming[k], messages, dtype, as_they_lie, fill)

        if BYTE * self._elements_on_host * np.dtype(dtype).itemsize <= LONG:
            return tuple([receive(k) for k in positions])
        results: dict[int, Any] = {}
        each(lambda k: results.update({k: receive(k)}), len(positions))
        return tuple([results[k] for k in positions])

    @functools.cached_property
    def _spans(self) -> bool:
        """Whether some of the devices belong to other processes."""
        return any(is_spanning(grid.devices) for grid in (self.result, *self.sources))

    @functools.cached_property
    def _elements_on_host(self) -> int:
        """The number of elements that are copied, if that happens within one memory of the host, whose threads can
        share the work; otherwise 0.
        """
        grids = (self.result, *self.sources)
        on_host = all(backend_of(device).on_host for grid in grids for device in grid.devices)
        return sum(int(c.sizes.sum()) for c in self.copies) if on_host else 0

    @functools.cached_property
    def incoming(self) -> list[list[Piece]]:
        """The pieces that each device of the result receives."""
        incoming: list[list[Piece]] = [[] for _ in self.result.devices]
        for copies in self.copies:
            for piece in copies:
                incoming[piece.k].append(piece)
        return incoming

    def receive(
        self,
        k: int,
        pieces: Sequence[Piece],
        messages: Sequence[Message],
        dtype: Any,
        as_they_lie: bool,
        fill: Any,
        out: Any = None,
    ) -> Any:
        """Returns the array of the k-th device of the result.

        Args:
            k: the position of the device.
            pieces: the pieces that it receives; of those that are in ``out`` already, none.
            messages: the messages with their elements.
            dtype, as_they_lie, fill: see `run`.
            out: the array, if it was created by `new`.
        """
        device = self.result.devices[k]
        backend = backend_of(device)
        if out is None and self.is_one_piece(k):
            (part,) = exchange(messages)
            with backend.on(device):
                # Arrays that are sent are contiguous, and replicas must be reduced in the same order on every device.
                part = part if as_they_lie else backend.contiguous(part)
                return as_dtype(backend, part, dtype)
        if out is None:
            out = self.new(k, dtype, fill)
        parts = exchange(messages)
        for piece, part in zip(pieces, parts, strict=True):
            with backend.on(device):
                out[piece.to] = part
        return out

    def is_one_piece(self, k: int) -> bool:
        """Whether the array of the k-th device of the result is one piece."""
        pieces, shape = self.incoming[k], self.result.shape(k)
        return len(pieces) == 1 and all(s.stop - s.start == n for s, n in zip(pieces[0].to, shape, strict=True))

    def new(self, k: int, dtype: Any, fill: Any) -> Any:
        """Returns new memory for the array of the k-th device of the result."""
        device, shape = self.result.devices[k], self.result.shape(k)
        backend = backend_of(device)
        with backend.on(device):
            empty = memory_pool.empty if backend.on_host else backend.xp.empty
            out = empty(shape, dtype=dtype)
            if fill is not None:
                out[...] = fill
        return out

    def message(self, piece: Piece, operands: Sequence[Sequence[Any]], destination: Device) -> Message:
        """Returns the message with the elements of one piece, a view of the operand's array."""
        region = self.regions[piece.region]
        source = self.sources[region.operand].devices[piece.j]
        array = operands[region.operand][piece.j]
        with backend_of(source).on(source):
            part = backend_of(source).view(array, piece.index) if piece.index else array
        if source == HOST and is_remote(destination):
            part = RemoteArray(part.shape, part.dtype)
        return Message(part, source, destination)


class Message(NamedTuple):
    """An array on the device ``source`` that the device ``destination`` needs."""

    array: Any
    source: Device
    destination: Device

    @property
    def is_local(self) -> bool:
        """Whether the destination can read the array where it is."""
        if is_remote(self.destination):
            return process_of(self.source) == process_of(self.destination)
        return self.source == self.destination or shared_memory((self.source, self.destination)) is not None

    def packs_with(self) -> Any:
        """A key that is equal for messages that may be sent as one; None for long arrays, which are sent alone."""
        backend = backend_of(self.source)
        short = math.prod(self.array.shape) * backend.dtype_of(self.array).itemsize <= _PACKED_UP_TO
        return (self.source, self.destination, backend.dtype_of(self.array)) if short else None


_PACKED_UP_TO = 1 << 16
"""Bytes of an array up to which copying it costs less than another message."""


def exchange(messages: Sequence[Message]) -> Iterator[Any]:
    """Yields the arrays of messages on their destinations, in order; local ones as they are.

    Short arrays that go from one device to the same other one are packed into one message. The others are sent one
    after the other, when they are asked for.
    """
    away = [number for number, message in enumerate(messages) if not message.is_local]
    groups: dict[Any, list[int]] = {}
    for number in away if len(away) > 1 else ():
        if (key := messages[number].packs_with()) is not None:
            groups.setdefault(key, []).append(number)
    group_of = {number: group for group in groups.values() if len(group) > 1 for number in group}
    sent, arrived = set(away), dict[int, Any]()
    for number, message in enumerate(messages):
        if number not in sent:
            yield message.array
        elif number not in group_of:
            yield send(*message)
        else:
            if number not in arrived:
                group = group_of[number]
                arrived.update(zip(group, _sent_as_one([messages[n] for n in group]), strict=True))
            yield arrived.pop(number)


def _sent_as_one(messages: Sequence[Message]) -> list[Any]:
    """Packs arrays of one dtype on one device, sends them to another device, and unpacks them there."""
    _, source, destination = messages[0]
    giver, taker = backend_of(source), backend_of(destination)
    shapes = [tuple(m.array.shape) for m in messages]
    with giver.on(source):
        packed = giver.xp.concat([giver.xp.reshape(giver.contiguous(m.array), (-1,)) for m in messages])
    buffer = send(packed, source, destination)
    ends = list(itertools.accumulate(map(math.prod, shapes), initial=0))
    with taker.on(destination):
        parts = [taker.view(buffer, slice(*pair)) for pair in itertools.pairwise(ends)]
        return [taker.xp.reshape(part, shape) for part, shape in zip(parts, shapes, strict=True)]


def as_dtype(backend: Backend, array: Any, dtype: Any) -> Any:
    """Converts an array to a dtype; its device is current. Not every library converts on assignment as NumPy does."""
    return array if backend.dtype_of(array) == dtype else backend.xp.asarray(array, dtype=dtype)


def copied(array: Any, device: Device) -> Any:
    """Returns a copy of an array on its device."""
    backend = backend_of(device)
    if backend.on_host:
        return blockwise.copied(array)
    with backend.on(device):
        return backend.xp.asarray(array, copy=True)


def array_on(x: Any, device: Device, caller: str = "") -> Any:
    """Returns all elements of a tensor or host array as one array on one device. The transfer is recorded for
    ``caller``, if one is given.
    """
    if type(x) is ShardedTensor and x._aval.sharding.mesh.flat == (device,):
        return x._storage.buffers[0]
    source = x._aval if type(x) is ShardedTensor else host_aval(x.shape, x.dtype)
    transfer = operand_transfer(source, as_sharding(device, x.ndim, caller))
    return transfer.whole(x, caller) if caller else transfer.unrecorded(x, "join")[0]


def bring(array: Any, source: Device, destination: Device) -> Any:
    """Returns an array for reading on another device: as it is, if the device can read it there, otherwise a copy."""
    return array if shared_memory((source, destination)) is not None else send(array, source, destination)


def send(array: Any, source: Device, destination: Device) -> Any:
    """Copies ``array`` from device ``source`` to another device.

    The destination is of the same backend, or of another backend that can address the same memory; otherwise the
    elements are copied through the host.
    """
    if is_remote(source) or is_remote(destination):
        (array,) = cross([(array, source, destination)], "transfer")
        return array
    giver, taker = backend_of(source), backend_of(destination)
    if giver is taker:
        with giver.on(source):
            array = giver.contiguous(array)
        giver.wait(destination, giver.record(source))
        with giver.on(destination):
            return giver.to_device(array, source, destination)
    if giver.dlpack_device(source) == taker.dlpack_device(destination) != HOST_MEMORY:
        return _share(array, source, destination)
    with giver.on(source):
        host = giver.to_host(array, source)
    if destination == HOST:
        return host
    with taker.on(destination):
        return taker.from_host(host, destination)


def _share(array: Any, source: Device, destination: Device) -> Any:
    """Copies an array to a device of another backend that can address the memory of the array."""
    giver, taker = backend_of(source), backend_of(destination)
    with giver.on(source):
        capsule = giver.to_dlpack(array)
    giver.synchronize(source)  # the backends do not share an order of execution
    with taker.on(destination):
        copy = taker.xp.asarray(taker.from_dlpack(capsule, destination), copy=True)
    taker.synchronize(destination)  # the source may be overwritten or freed after this call
    return copy


class OperandTransfer:
    """The transfer of one operand into the sharding that a plan requires.

    Raises:
        ArgumentTypeError: of operand and sharding, only one is on simulated devices.
    """

    __slots__ = ("_between_cells", "_keeps_cells", "_movement", "memory", "source", "stays", "target")

    def __init__(self, source: Aval | HostAval, target: NamedSharding) -> None:
        simulated = backend_of(target.mesh.flat[0]).simulated
        if isinstance(source, Aval) and source.backend.simulated != simulated:
            raise ArgumentTypeError(
                "a tensor with elements cannot go to simulated devices; give st.empty_like(x, device=...) on them"
                if simulated
                else "simulated tensors have no elements that could be transferred to devices that exist"
            )
        self.source = source
        self.target = target
        self._movement: TransferPlan | None = None
        self._between_cells: TransferPlan | None = None
        self._keeps_cells: bool | None = None
        self.stays = isinstance(source, Aval) and source.grid.same(target.grid(source.shape))
        self.memory = memory_of_all(target)

    @property
    def movement(self) -> TransferPlan:
        """The transfer plan, computed on first use: never, where devices share a memory and nothing is recorded."""
        if self._movement is None:
            source, shape = self.source, self.source.shape
            plan = (plan_reshard(source.sharding, self.target, shape),) if isinstance(source, Aval) else None
            self._movement = TransferPlan((identity(shape),), (source.grid,), self.target.grid(shape), plan)
        return self._movement

    @property
    def cells(self) -> Cells:
        """The cells of the operand in the target."""
        return cells_of(self.target, self.source.shape)

    @property
    def between_cells(self) -> TransferPlan:
        """The transfer plan that is executed, from the cells of the operand to those of the target."""
        if self._between_cells is None:
            source, result = self.source.cells, self.cells
            known = source.grid is self.source.grid and result.apart
            regions = (identity(self.source.shape),)
            self._between_cells = self.movement if known else TransferPlan(regions, (source.grid,), result.grid)
        return self._between_cells

    def keeps(self, number: int) -> bool:
        """Whether a cell of the target may share memory with the operand."""
        if self._cells_stay:
            return True
        sources, here = self.between_cells.sources[0].devices, self.cells.grid.devices[number]
        return any(shared_memory((sources[p.j], here)) is not None for p in self.between_cells.incoming[number])

    @property
    def _cells_stay(self) -> bool:
        """Whether the buffers of the operand are those of the target."""
        if self._keeps_cells is None:
            shared = self.source.memory is not None and self.source.memory == self.memory
            self._keeps_cells = shared or self.source.cells.grid.same(self.cells.grid)
        return self._keeps_cells

    def announce(self, operator: str, explicit: bool) -> None:
        """Checks the transfer against the guard and records it; see `record_transfer`."""
        itemsize, movement = self.source.dtype.itemsize, self.movement
        copied = 0 if self._cells_stay else self.between_cells.size * itemsize

        def records() -> TransferBatch:
            return movement.records(itemsize, False, operator, explicit).copying(copied)

        record_transfer(operator, movement.size * itemsize, explicit, records)

    def schedule(self, operator: str, explicit: bool = False) -> Move:
        """Returns the messages of the transfer, computed for any number of devices only when they are listed."""
        return _schedule(self, operator, explicit)

    def buffers(self, x: Any, operator: str, explicit: bool = False) -> Sequence[Any]:
        """Returns the operand as one array for each cell of the target."""
        if not self.stays and is_recording():
            self.announce(operator, explicit)
        return self.unrecorded(x, operator)

    def unrecorded(self, x: Any, operator: str) -> Sequence[Any]:
        """Returns what `buffers` does, for callers that record the transfer themselves."""
        arrays = buffers_of(x, operator)
        return arrays if self._cells_stay else self.between_cells.run((arrays,), self.source.dtype)

    def whole(self, x: Any, operator: str, explicit: bool = False) -> Any:
        """Returns the operand as one buffer, in the memory that all devices of the target share."""
        return self.buffers(x, operator, explicit)[0]

    def shards(self, x: Any, operator: str, explicit: bool = False) -> Sequence[Any]:
        """Returns the operand as one array for each device of the target."""
        if self.stays:
            return shard_arrays(x)
        devices = self.target.mesh.flat
        return views(backend_of_group(devices), devices, self.buffers(x, operator, explicit), self.cells.shards)


operand_transfer = functools.lru_cache(1024)(OperandTransfer)


@functools.lru_cache(1024)
def _schedule(transfer: OperandTransfer, operator: str, explicit: bool) -> Move:
    source, result = transfer.source, transfer.target.grid(transfer.source.shape)
    return Move((identity(source.shape),), (source.grid,), result, source.dtype.itemsize, operator, explicit)


def announce_reading(x: Any) -> None:
    """Records the transfers that reading an operand needs, where it is a view or an element of another tensor."""
    if isinstance(x, ShardedTensor) and (announce := getattr(x._storage, "announce", None)):
        announce()


def gather(x: Any, caller: str = "gather") -> HostArray:
    """Returns all elements of an operand in host memory, read-only by convention; the transfer is not recorded."""
    if not isinstance(x, ShardedTensor):
        return np.asarray(x)
    if x._aval.backend.on_host:
        array: HostArray = whole_array(x, caller)
    elif x._aval.spans:
        array = gather_across(x, caller)
    else:
        array = to_host_movement(x._aval).run((shard_arrays(x),), x.dtype)[0]
    return array


def gather_across(x: ShardedTensor, caller: str, root: int | None = None) -> HostArray:
    """Returns all elements of a tensor that spans processes as a host array in all processes, or in one; the others
    get an array without elements. All processes have to call this.
    """
    arrays, grid = shard_arrays(x), x._aval.grid
    owners, receives = grid.owners(), root in (None, process_index())
    out = memory_pool.empty(x.shape, x.dtype) if receives else np.empty(0, x.dtype)
    indices: list[Any] = [(*grid.index(k), ...) for k in owners]
    into = [out[index] for index in indices] if receives else None
    everywhere([arrays[k] for k in owners], [grid.devices[k] for k in owners], caller, root, into)
    return out


def read_here(x: ShardedTensor, caller: str, index: Index | None = None) -> HostArray:
    """Returns a tensor that spans processes, or the elements that a basic index selects, from this process's devices.

    Raises:
        NotAddressableError: some of the elements are in other processes only.
    """
    value = x._aval
    if hasattr(x._storage, "to_host"):
        return x._storage.to_host(index)  # type: ignore[no-any-return]
    grid, movement = value.grid, to_host_movement(value, index)
    parts = grid.linear_parts().tolist()
    here = {parts[k]: k for k in reversed(range(len(parts))) if not is_remote(grid.devices[k])}
    if any(parts[piece.j] not in here for piece in movement.incoming[0]):
        raise not_addressable(caller, f"all elements of a tensor of shape {value.shape}")
    arrays, out = shard_arrays(x), np.empty(movement.result.shape(0), value.dtype)
    for piece in movement.incoming[0]:
        k = here[parts[piece.j]]
        backend = backend_of(grid.devices[k])
        with backend.on(grid.devices[k]):
            part = backend.view(arrays[k], piece.index) if piece.index else arrays[k]
            out[piece.to] = backend.to_host(part, grid.devices[k])
    return out


def not_addressable(caller: str, what: str) -> NotAddressableError:
    """Returns the error of reading elements that this process does not hold."""
    return NotAddressableError(
        f"{caller}: this process does not hold {what}; st.distributed.process_allgather(x) returns the "
        "elements of x in all processes, st.distributed.gather_to(x, 0) in one, and x.addressable_shards has those here"
    )


@functools.lru_cache(1024)
def to_host_movement(value: Aval, index: Index | None = None) -> TransferPlan:
    """Returns the plan that copies a tensor, or the elements that a basic index selects, to the host."""
    region = identity(value.shape) if index is None else region_of(index)
    return TransferPlan((region,), (value.grid,), host_grid(tuple([line.end for line in region.lines])))


def pieces_of(x: Any) -> Sequence[Any]:
    """Returns the arrays of an operand: one for each device of a tensor, otherwise the host array itself."""
    return shard_arrays(x) if isinstance(x, ShardedTensor) else (np.asarray(x),)


def whole_array(x: ShardedTensor, caller: str = "join") -> Any:
    """Returns the one buffer of a tensor whose devices share a memory."""
    buffers = x._storage.buffers
    return buffers[0] if len(buffers) == 1 else buffers_of(x, caller)[0]


def buffers_of(x: Any, caller: str = "join") -> tuple[Any, ...]:
    """Returns the buffers of an operand: one for each cell of a tensor, otherwise the host array itself. Arrays of
    devices that share a cell are joined, once.
    """
    if not isinstance(x, ShardedTensor):
        return (np.asarray(x),)
    pieces: tuple[Any, ...] = x._storage.buffers
    if are_joined(pieces, x._aval):
        return pieces
    buffers, copied = joined(pieces, x._aval, caller)
    storage = current_storage(x)
    if type(storage) is Storage and storage.buffers is pieces:
        set_joined(x, storage, buffers, copied)
    return buffers


def are_joined(pieces: tuple[Any, ...], value: Aval) -> bool:
    """Whether the arrays of a value are those of its cells."""
    return len(pieces) == 1 or len(pieces) == len(value.cells.positions)


def joined(pieces: tuple[Any, ...], value: Aval, caller: str) -> tuple[tuple[Any, ...], Sequence[int]]:
    """Joins the arrays that the devices have of a value. Returns the buffers of its cells, and the number of bytes that
    were copied for each, which are recorded for ``caller``.
    """
    made = [join(pieces, value, number) for number in range(len(value.cells.positions))]
    for device, (_, nbytes) in zip(value.cells.grid.devices, made, strict=True):
        record_copy(caller, nbytes, device)
    return tuple([array for array, _ in made]), [nbytes for _, nbytes in made]
