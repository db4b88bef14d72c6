"""Plans of operators on abstract arrays, which have no elements."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from shardtensor.backend.abstract import AbstractArray
from shardtensor.communication.all_reduce import CHUNKED_FROM
from shardtensor.communication.schedules import (
    Schedule,
    combination,
)
from shardtensor.communication.transfer import OperandTransfer
from shardtensor.communication.transfer_log import is_recording
from shardtensor.core import Op, Operands
from shardtensor.functions.monoids import element_bytes
from shardtensor.sharding.mesh import groups_along
from shardtensor.sharding.spec import Chain
from shardtensor.tensor.storage import Storage
from shardtensor.tensor.tensor import ShardedTensor, tensor
from shardtensor.tensor.value import Aval


def abstract_plan(
    op: Op, value: Aval, params: dict[str, Any], moves: Sequence[OperandTransfer | None], partial_axes: Chain
) -> Callable[[Operands], ShardedTensor]:
    """Returns the plan of an operator on abstract operands: it records the transfers and returns an abstract result.

    Args:
        op: the operator.
        value: the aval of the result.
        params: the operator's parameters by name.
        moves: the transfer of each operand into the layout that the rule requires; None for a scalar.
        partial_axes: the mesh axes along which partial results are combined.
    """
    schedule = functools.cache(lambda: _combination(op, value, params, moves, partial_axes))

    def plan(operands: Operands) -> ShardedTensor:
        for x, move in zip(operands, moves, strict=True):
            if move is not None:
                move.whole(x, op.name)
        if partial_axes and op.combine and is_recording():
            schedule().announce()
        return tensor(value, Storage(AbstractArray(value.shape, value.dtype)))

    return plan


def _combination(
    op: Op, value: Aval, params: dict[str, Any], moves: Sequence[OperandTransfer | None], partial_axes: Chain
) -> Schedule:
    """Returns the schedule of messages that combine the partial results along the mesh axes ``partial_axes``.

    It is the schedule of `shardtensor.interpreters.execution.strategies.Strategies.reduce` on real devices.
    """
    assert op.combine is not None
    mesh = value.sharding.mesh
    contributes = np.ones(mesh.size, bool)
    for move in moves:
        if move is not None:
            grid = move.target.grid(move.source.shape)
            for bounds, parts in zip(grid.offsets, grid.parts.T, strict=True):
                contributes &= np.diff(bounds)[parts] > 0
    groups, grid = np.array(groups_along(mesh, partial_axes)), value.grid
    sizes = np.ones(len(groups), np.int64)
    for bounds, parts in zip(grid.offsets, grid.parts[groups[:, 0]].T, strict=True):
        sizes *= np.diff(bounds)[parts]
    source = next(move.source for move in moves if move is not None)
    state = element_bytes(op.combine, value, source, params)
    return combination(op.name, mesh.flat, groups, contributes, sizes, state, value.dtype.itemsize, CHUNKED_FROM)
