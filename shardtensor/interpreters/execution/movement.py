"""The execution of operators that only move elements: on the whole buffer of the host, elsewhere from cell to cell."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from shardtensor.backend.device import Device
from shardtensor.backend.registry import backend_of, is_spanning, memory_space
from shardtensor.communication.offload import offloaded
from shardtensor.communication.schedules import Move
from shardtensor.communication.transfer import OperandTransfer, buffers_of, gather, pieces_of
from shardtensor.communication.transfer_log import logger
from shardtensor.communication.transfer_plan import TransferPlan
from shardtensor.core import Op, Operands
from shardtensor.functions.building.data_movement import DataMovement
from shardtensor.interpreters.execution.strategies import Run
from shardtensor.sharding.cells import Cells, cells
from shardtensor.sharding.layout import Shape
from shardtensor.tensor.tensor import ShardedTensor, tensor, tensor_of
from shardtensor.tensor.value import Aval, whole_of


def execute_movement(
    op: Op,
    moved: DataMovement,
    value: Aval,
    first: OperandTransfer | None,
    schedule: Move,
    held: Sequence[Cells],
) -> Run:
    """Returns the function of the plan of a `DataMovement`.

    Args:
        op: the operator.
        moved: the movement.
        value: the aval of the result.
        first: the transfer of the operand that precedes the movement.
        schedule: the messages, and the grids to which the regions of the movement refer.
        held: the cells of the operands.
    """
    movement = functools.cache(lambda: TransferPlan(moved.regions, schedule.sources, schedule.result))
    between_cells = functools.cache(lambda: _between_cells(moved, held, value.cells) or movement())

    def note() -> None:
        if moved.note and movement().size:
            logger().info(moved.note)

    def on_host(operands: Operands) -> ShardedTensor:
        wholes = [first.whole(operands[0], op.name)] if first else [gather(x, op.name) for x in operands]
        if moved.as_pieces:  # No data moves; the shards are joined when the whole buffer is first needed.
            return tensor_of(value, tuple([moved.as_pieces(whole) for whole in wholes]))
        note()
        return tensor_of(value, (whole_of(moved.whole(*wholes), value),))

    def per_cell(operands: Operands) -> ShardedTensor:
        if moved.as_pieces:
            columns = [first.shards(operands[0], op.name)] if first else [pieces_of(x) for x in operands]
            pieces = [_as_piece(moved, c[0], d) for c, d in zip(columns, value.grid.devices, strict=True)]
            return tensor(value, offloaded(value, pieces))
        plan = between_cells()
        if plan is movement():
            columns = [first.shards(operands[0], op.name)] if first else [pieces_of(x) for x in operands]
        else:
            columns = [first.buffers(operands[0], op.name)] if first else [buffers_of(x, op.name) for x in operands]
        note()
        if moved.flat:
            columns = [_reshaped(columns[0], plan.sources[0].devices, plan.sources[0].shape)]
        results = plan.run(columns, value.dtype)
        if moved.flat:
            grid = value.grid if plan is movement() else value.cells.grid
            results = _reshaped(results, grid.devices, grid.shape)
        return tensor(value, offloaded(value, results))

    return on_host if _is_on_host(value, schedule) else per_cell


def _is_on_host(value: Aval, schedule: Move) -> bool:
    """Whether a movement is executed on whole buffers; operands of other processes send only what is needed."""
    return value.backend.on_host and not any(is_spanning(grid.devices) for grid in schedule.sources)


def copies(moved: DataMovement, value: Aval, schedule: Move, held: Sequence[Cells]) -> bool:
    """Whether the result of a movement is in other memory than its operands; see `execute_movement`."""
    if value.memory is None:
        return True
    if _is_on_host(value, schedule):
        return moved.copies
    movement = TransferPlan(moved.regions, schedule.sources, schedule.result)
    return (_between_cells(moved, held, value.cells) or movement).makes_new()


def _between_cells(moved: DataMovement, sources: Sequence[Cells], result: Cells) -> TransferPlan | None:
    """Returns the plan of a movement from the cells of the operands to those of the result; None if all of them are
    shards, or merged dimensions of cells are not those of their shards.
    """
    if result.apart and all(held.apart for held in sources):
        return None
    if not moved.flat:
        return TransferPlan(moved.regions, [held.grid for held in sources], result.grid)
    merged = [cells(grid, tuple(map(memory_space, grid.devices))) for grid in moved.flat]
    if [held.positions for held in merged] != [sources[0].positions, result.positions]:
        return None
    return TransferPlan(moved.regions, [merged[0].grid], merged[1].grid)


def _as_piece(moved: DataMovement, array: Any, device: Device) -> Any:
    assert moved.as_pieces is not None
    with backend_of(device).on(device):
        return moved.as_pieces(array)


def _reshaped(arrays: Sequence[Any], devices: Sequence[Device], shape: Callable[[int], Shape]) -> tuple[Any, ...]:
    out = []
    for k, (array, device) in enumerate(zip(arrays, devices, strict=True)):
        backend = backend_of(device)
        with backend.on(device):
            out.append(backend.xp.reshape(array, shape(k)))
    return tuple(out)
