"""The messages of an operator that follow from its plan: they can be listed without executing it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from shardtensor.communication.all_reduce import CHUNKED_FROM
from shardtensor.communication.schedules import Schedule, combination
from shardtensor.communication.transfer import OperandTransfer
from shardtensor.core import Op
from shardtensor.functions.monoids import element_bytes
from shardtensor.sharding.mesh import groups_along
from shardtensor.sharding.spec import Chain
from shardtensor.tensor.value import Aval


def combination_of(
    op: Op, value: Aval, params: dict[str, Any], moves: Sequence[OperandTransfer | None], partial_axes: Chain
) -> Schedule:
    """Returns the schedule of messages that combine the partial results of an operator.

    It is the schedule of `shardtensor.interpreters.execution.strategies.Strategies.reduce`.

    Args:
        op: the operator.
        value: the aval of the result.
        params: the operator's parameters by name.
        moves: the transfer of each operand into the layout that the rule requires; None for a scalar.
        partial_axes: the mesh axes along which partial results are combined.
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
