"""The groups of devices that combine partial results, and the messages by which they do so."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from shardtensor.communication.all_reduce import CHUNKED_FROM, Group
from shardtensor.communication.schedules import Schedule, combination, scattered_combination
from shardtensor.communication.transfer import OperandTransfer
from shardtensor.core import Op
from shardtensor.functions.building.monoids import element_bytes, numbers_in_state
from shardtensor.sharding.mesh import groups_along
from shardtensor.sharding.spec import Chain
from shardtensor.tensor.value import Aval

Moves = Sequence[OperandTransfer | None]


def reduction_groups(value: Aval, moves: Moves, partial_axes: Chain) -> list[Group]:
    """Returns the groups of devices that combine their partial results.

    A device with an empty shard contributes nothing. If all shards are empty, the first device contributes the
    operator's result for an empty array.

    Args:
        value: the aval of the result.
        moves: the transfer of each operand into the layout that the rule requires; None for a scalar.
        partial_axes: the mesh axes along which partial results are combined.
    """
    mesh = value.sharding.mesh
    contributes = np.ones(mesh.size, bool)
    for move in moves:
        if move is not None:
            grid = move.target.grid(move.source.shape)
            for bounds, parts in zip(grid.offsets, grid.parts.T, strict=True):
                contributes &= np.diff(bounds)[parts] > 0
    positions, grid = np.array(groups_along(mesh, partial_axes)), value.grid
    sizes = np.ones(len(positions), np.int64)
    for bounds, parts in zip(grid.offsets, grid.parts[positions[:, 0]].T, strict=True):
        sizes *= np.diff(bounds)[parts]
    contributes[positions[~contributes[positions].any(axis=1), 0]] = True
    axes = tuple([mesh.shape[name] for name in mesh.axis_names if name in partial_axes])
    groups = []
    for members, size in zip(positions, sizes.tolist(), strict=True):
        mine = contributes[members]
        chunked = size * value.dtype.itemsize >= CHUNKED_FROM and int(mine.sum()) > 2
        groups.append(Group(members.tolist(), tuple(mine.tolist()), axes, size, chunked))
    return groups


def combination_of(
    op: Op, value: Aval, target: Aval, params: dict[str, Any], moves: Moves, partial_axes: Chain
) -> Schedule:
    """Returns the schedule of messages that combine the partial results of an operator; see `reduction_groups`.

    Args:
        op, params: the operator and its parameters.
        value, moves, partial_axes: see `reduction_groups`.
        target: the aval of the result, which the axes may split.
    """
    assert op.combine is not None
    groups = reduction_groups(value, moves, partial_axes)
    source = next(move.source for move in moves if move is not None)
    state = element_bytes(op.combine, value, source, params)
    devices = value.sharding.mesh.flat
    numbers = numbers_in_state(op.combine, value, source, params)
    if target.unreduced or target.grid.same(value.grid):
        parts = [move.target.grid(move.source.shape).linear_parts() for move in moves if move is not None]
        contents = [np.stack(parts)[:, group.members].tobytes() for group in groups]
        schedule = combination(op.name, devices, groups, contents, state, value.dtype.itemsize, numbers)
    else:
        sizes = [math.prod(target.grid.shape(k)) for k in range(len(devices))]
        schedule = scattered_combination(op.name, devices, groups, state, sizes, numbers)
    schedule.explicit = params.get("explicit", True)
    return schedule
