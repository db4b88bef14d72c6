"""Transfers of operands: into the sharding that a plan requires, to the host, and into the buffers of their cells."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from shardtensor.backend.device import Device, HostArray
from shardtensor.backend.registry import (
    backend_of,
    backend_of_group,
    in_other_process,
    is_remote,
    process_index,
    processes_of,
    shared_memory,
)
from shardtensor.communication.between_processes.processes import connected, described, elsewhere, everywhere, note
from shardtensor.communication.schedules import Move
from shardtensor.communication.transfer_log import TransferBatch, announced, is_recording, record_copy, record_transfer
from shardtensor.communication.transfer_plan import TransferPlan
from shardtensor.errors import ArgumentTypeError, NotAddressableError
from shardtensor.host import memory_pool
from shardtensor.sharding.cells import Cells
from shardtensor.sharding.copy_plan import host_grid, identity, plan_reshard
from shardtensor.sharding.index import Index, region_of
from shardtensor.sharding.layout import NamedSharding, as_sharding
from shardtensor.tensor.operands import HostAval, host_aval
from shardtensor.tensor.ownership import set_joined
from shardtensor.tensor.storage import Storage
from shardtensor.tensor.tensor import ShardedTensor, current_storage, shard_arrays
from shardtensor.tensor.value import Aval, cells_of, join, memory_of_all, views


class OperandTransfer:
    """The transfer of one operand into the sharding that a plan requires.

    Raises:
        ArgumentTypeError: of operand and sharding, only one is on simulated devices.
    """

    __slots__ = ("_between_cells", "_keeps_cells", "_movement", "_simulated", "memory", "source", "stays", "target")

    def __init__(self, source: Aval | HostAval, target: NamedSharding) -> None:
        self._simulated = simulated = backend_of(target.mesh.flat[0]).simulated
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
    def keeps_buffers(self) -> bool:
        """Whether the target has the buffers of the operand, a tensor, as where all devices share a memory."""
        return isinstance(self.source, Aval) and self._cells_stay

    @property
    def _cells_stay(self) -> bool:
        """Whether the buffers of the operand are those of the target."""
        if self._keeps_cells is None:
            shared = self.source.memory is not None and self.source.memory == self.memory
            self._keeps_cells = shared or self.source.cells.grid.same(self.cells.grid)
        return self._keeps_cells

    @property
    def copied(self) -> int:
        """The number of bytes that are copied here."""
        return 0 if self._cells_stay else self.between_cells.size * self.source.dtype.itemsize

    def announce(self, operator: str, explicit: bool) -> None:
        """Checks the transfer against the guard and records it; see `record_transfer`."""
        itemsize, movement, copied = self.source.dtype.itemsize, self.movement, self.copied

        def records() -> TransferBatch:
            return movement.records(itemsize, False, operator, explicit).copying(copied)

        record_transfer(operator, movement.size * itemsize, explicit, records)

    def infer(self, operator: str, explicit: bool = False) -> None:
        """Checks and records the transfer, if a log or a guard is active, for an operand without elements."""
        if self.stays or not is_recording():
            return
        if self._simulated:
            self.schedule(operator, explicit).announce()
        else:
            self.announce(operator, explicit)

    def schedule(self, operator: str, explicit: bool = False) -> Move:
        """Returns the messages of the transfer, computed for any number of devices only when they are listed."""
        return _schedule(self, operator, explicit)

    def buffers(self, x: Any, operator: str, explicit: bool = False) -> Sequence[Any]:
        """Returns the operand as one array for each cell of the target."""
        if not self.stays and is_recording():
            self.announce(operator, explicit)
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
    return Move((identity(source.shape),), (source.grid,), result, (source.dtype.itemsize,), operator, explicit)


def array_on(x: Any, device: Device, caller: str) -> Any:
    """Returns all elements of a tensor or host array as one array on one device. The transfer is recorded for
    ``caller``.
    """
    if type(x) is ShardedTensor and x._aval.sharding.mesh.flat == (device,):
        return x._storage.buffers[0]
    source = x._aval if type(x) is ShardedTensor else host_aval(x.shape, x.dtype)
    return operand_transfer(source, as_sharding(device, x.ndim, caller)).whole(x, caller)


def recorded_reading(storage: Any) -> contextlib.AbstractContextManager[None]:
    """Records the transfers that reading a deferred storage needs, if a log or a guard is active, and returns the
    context in which it is read.
    """
    if not is_recording():
        return _NOTHING
    storage.announce()
    return announced()


_NOTHING = contextlib.nullcontext()


def announce_gather(x: ShardedTensor, caller: str) -> None:
    """Records that all elements of a tensor are copied to the host implicitly, if a log or a guard is active."""
    if is_recording():
        to_host_movement(x._aval).announce(x.dtype.itemsize, not x._aval.backend.on_host, caller)


def announce_reading(x: Any) -> None:
    """Records the transfers that reading an operand without elements needs, where it is a view or an element of another
    tensor, if a log or a guard is active.
    """
    if is_recording() and isinstance(x, ShardedTensor) and (announce := getattr(x._storage, "announce", None)):
        announce()


def gather(x: Any, caller: str = "gather") -> HostArray:
    """Returns all elements of an operand in host memory, read-only by convention; the transfer is not recorded.

    Raises:
        NotAddressableError: it is on devices of one other process.
    """
    if not isinstance(x, ShardedTensor):
        return np.asarray(x)
    if x._aval.backend.on_host:
        buffers = x._storage.buffers
        array: HostArray = buffers[0] if len(buffers) == 1 else buffers_of(x, caller)[0]
    elif x._aval.spans:
        if in_other_process(devices := x._aval.sharding.mesh.flat):
            raise elsewhere(devices)
        array = gather_across(x, caller)
    else:
        array = to_host_movement(x._aval, cells=True).run((buffers_of(x, caller),), x.dtype)[0]
    return array


def gather_across(x: ShardedTensor, caller: str, root: int | None = None) -> HostArray:
    """Returns all elements of a tensor that spans processes as a host array in all processes, or in one; the others
    get an array without elements. All processes have to call this.
    """
    note(f"{caller}({described(x)}{'' if root is None else f', {root}'})")
    arrays, grid = shard_arrays(x), x._aval.grid
    owners, receives = grid.owners(), root in (None, process_index())
    out = memory_pool.empty(x.shape, x.dtype) if receives else np.empty(0, x.dtype)
    indices: list[Any] = [(*grid.index(k), ...) for k in owners]
    into = [out[index] for index in indices] if receives else None
    everywhere([arrays[k] for k in owners], [grid.devices[k] for k in owners], caller, root, into)
    return out


def is_one_in_all(x: ShardedTensor, caller: str) -> bool:
    """Whether all processes of a job have given one tensor, of which others than those of its devices have no elements;
    otherwise each has given one on its own devices. All processes have to call this.
    """
    processes = processes_of(x._aval.sharding.mesh.flat)
    if len(processes) > 1:
        return True
    # The process of the devices does not know what the others have.
    call = f"{caller}: the process of {x.dtype}{list(x.shape)}"
    return len(set(connected(caller).gather(call, min(processes).to_bytes(8, "little")))) == 1


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
def to_host_movement(value: Aval, index: Index | None = None, cells: bool = False) -> TransferPlan:
    """Returns the plan that copies a tensor, or the elements that a basic index selects, to the host: from the arrays
    of all devices, or from those of its ``cells``.
    """
    region, grid = (
        identity(value.shape) if index is None else region_of(index),
        value.cells.grid if cells else value.grid,
    )
    return TransferPlan((region,), (grid,), host_grid(tuple([line.end for line in region.lines])))


def read(x: ShardedTensor, index: Index | None = None) -> HostArray:
    """Returns a tensor in other memory than the host's, or the elements that a basic index selects, as a host array, by
    one copy for each of its arrays. The transfer is not recorded.
    """
    value, pieces = x._aval, x._storage.buffers
    cells = are_joined(pieces, value)
    arrays = pieces if cells else shard_arrays(x)
    return to_host_movement(value, index, cells).run((arrays,), value.dtype)[0]  # type: ignore[no-any-return]


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
    if len(pieces) == 1 or are_joined(pieces, x._aval):
        return pieces
    buffers, copied = joined(pieces, x._aval, caller)
    storage = current_storage(x)
    if type(storage) is Storage:
        set_joined(x, storage, pieces, buffers, copied)
    return buffers


def are_joined(pieces: tuple[Any, ...], value: Aval) -> bool:
    """Whether the arrays of a value are those of its cells."""
    return len(pieces) == 1 or len(pieces) == len(value.cells.positions)


def joined(pieces: tuple[Any, ...], value: Aval, caller: str) -> tuple[tuple[Any, ...], Sequence[int]]:
    """Joins the arrays that the devices have of a value. Returns the buffers of its cells, and the number of bytes that
    were copied for each, which are recorded for ``caller``.
    """
    pairs = [join(pieces, value, number) for number in range(len(value.cells.positions))]
    for device, (_, nbytes) in zip(value.cells.grid.devices, pairs, strict=True):
        record_copy(caller, nbytes, device)
    return tuple([array for array, _ in pairs]), [nbytes for _, nbytes in pairs]
