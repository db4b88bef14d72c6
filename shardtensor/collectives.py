"""What devices do together along mesh axes. Reductions combine in mesh order, not in order of arrival: the same mesh
gives the same bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from shardtensor.mesh import Mesh
from shardtensor.sharding import Chain


def groups_along(mesh: Mesh, axes: Chain) -> list[list[int]]:
    """The positions of the devices that differ in those mesh axes alone, each group in mesh order.

    >>> from shardtensor.collectives import groups_along
    >>> groups_along(st.make_mesh((2, 2), ("x", "y")), ("x",))
    [[0, 2], [1, 3]]
    """
    positions = np.arange(mesh.size).reshape(mesh.axis_sizes)
    inner = [mesh.axis_names.index(axis) for axis in mesh.axis_names if axis in axes]
    outer = [d for d in range(positions.ndim) if d not in inner]
    count = int(np.prod([mesh.axis_sizes[d] for d in inner], dtype=np.int64))
    return positions.transpose(outer + inner).reshape(-1, count).tolist()


Send = Callable[[Any, int, int], Any]
"""``send(state, source position, destination position)``: the state on another device."""


def reduce_groups(
    groups: Sequence[Sequence[int]],
    states: Sequence[Any],
    merge: Callable[[int, Any, Any], Any],
    send: Send,
) -> list[Any]:
    """The combined state of each group, on its first device.

    Args:
        groups: positions, in mesh order.
        states: each position's own state.
        merge: ``merge(position, earlier, later)`` on the device at that position.
        send: see `Send`.
    """
    combined = []
    for leader, *others in groups:
        state = states[leader]
        for position in others:
            state = merge(leader, state, send(states[position], position, leader))
        combined.append(state)
    return combined
