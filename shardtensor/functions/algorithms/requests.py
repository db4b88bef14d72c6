"""Elements that devices request of one another, along a dimension that is split: request and reply.

Each device sorts its requests by the devices that hold the elements, and sends them. Those reply with the elements, in
the same order. A request is an index of eight bytes, so that a device sends and receives ``8 + itemsize`` bytes for
each element that it requests of another device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from shardtensor.errors import IndexingError
from shardtensor.functions.algorithms.sample_sort import lines_into, lines_of
from shardtensor.functions.algorithms.shards import MeshCommunicator, Shards
from shardtensor.sharding.layout import Shape, offsets
from shardtensor.tensor.value import aval

_INT = np.dtype("int64")


def take_along(x: Shards, indices: Shards, along: Callable[[int], MeshCommunicator], axis: int) -> Shards:
    """Returns the elements of each line of x along ``axis`` at the indices in the same line of ``indices``.

    Both have the same shape but along ``axis``, and the same sharding, which is that of the result.

    Raises:
        IndexingError: an index is out of bounds.
    """
    comm, value = along(axis), indices.value
    bounds = x.value.grid.offsets[axis].tolist()
    result = aval(value.shape, x.value.dtype, value.sharding, x.value.committed)
    lines, wanted = lines_of(x, axis), lines_of(indices, axis)
    checked = wanted.map(_checked, [bounds[-1]] * len(comm.index), shape=lambda shape: shape, dtype=_INT)
    everywhere = [bounds] * len(comm.index)
    size = comm.size
    owners = checked.map(_owners, everywhere, shape=lambda shape: (math.prod(shape),), dtype=_INT)
    order = owners.map(owners_in_order, shape=lambda shape: shape, dtype=_INT)
    sent = checked.map(_requests, owners.arrays, order.arrays, everywhere, shape=_flat, dtype=_INT)
    ends = owners.map(ends_of_requests, order.arrays, [size] * len(comm.index), shape=lambda _: (size + 1,), dtype=_INT)
    found = ends.to_host([offsets(math.prod(a.shape), (size,)) for a in checked.arrays])
    received = comm.ragged_all_to_all(sent, found, 0, 0)
    replies = received.map(_replies, lines.arrays, shape=lambda shape: shape, dtype=result.dtype)
    arrived = comm.ragged_all_to_all(replies, comm.transposed(found), 0, 0)
    shapes = [value.grid.shape(k) for k in range(len(comm.index))]
    made = arrived.map(
        _in_place, order.arrays, shapes, [axis] * len(shapes), shape=lambda shape: shape, dtype=result.dtype
    )
    return made.assembled(result)


def _replies(xp: Any, positions: Any, lines: Any) -> Any:
    """Returns the elements at positions in flattened lines."""
    return xp.reshape(lines, (-1,))[positions] if positions.shape[0] else xp.zeros((0,), dtype=lines.dtype)


def _flat(shape: Shape) -> Shape:
    return (math.prod(shape),)


def _checked(xp: Any, indices: Any, size: int) -> Any:
    """Returns indices from 0 on."""
    if bool(xp.any(xp.logical_or(xp.less(indices, -size), xp.greater_equal(indices, size)))):
        raise IndexingError(f"an index is out of bounds for a dimension of size {size}")
    indices = xp.asarray(indices, dtype=_INT)
    return xp.where(xp.less(indices, 0), xp.add(indices, size), indices)


def _owners(xp: Any, indices: Any, bounds: Sequence[int]) -> Any:
    """Returns the part that each index is in."""
    starts = xp.asarray(bounds[1:-1], dtype=_INT)
    return xp.searchsorted(starts, xp.reshape(indices, (-1,)), side="right")


def owners_in_order(xp: Any, owners: Any) -> Any:
    """Returns the order of requests by the devices that hold what is requested."""
    return xp.asarray(xp.argsort(owners, stable=True), dtype=_INT)


def _requests(xp: Any, indices: Any, owners: Any, order: Any, bounds: Sequence[int]) -> Any:
    """Returns the positions of the elements in the flattened lines of the devices that hold them, in order of these."""
    sizes, starts = np.diff(bounds), bounds[:-1]
    width, start = [xp.asarray(values, dtype=_INT)[owners] for values in (sizes.tolist(), starts)]
    line = xp.floor_divide(xp.arange(owners.shape[0], dtype=_INT), max(indices.shape[1], 1))
    within = xp.subtract(xp.reshape(indices, (-1,)), start)
    return xp.add(xp.multiply(line, width), within)[order]


def ends_of_requests(xp: Any, owners: Any, order: Any, count: int) -> Any:
    """Returns where the requests to each device begin, with the end of the last ones."""
    return xp.searchsorted(owners[order], xp.arange(count + 1, dtype=_INT), side="left")


def _in_place(xp: Any, elements: Any, order: Any, shape: Shape, axis: int) -> Any:
    """Returns the elements in the order of the requests, as an array."""
    lines = math.prod(shape[:axis] + shape[axis + 1 :])
    return lines_into(xp, xp.reshape(in_order_of(xp, elements, order), (lines, shape[axis])), shape, axis)


def in_order_of(xp: Any, elements: Any, order: Any) -> Any:
    """Returns the replies, which are in order of the devices that made them, in the order of the requests."""
    flat = xp.empty(elements.shape, dtype=elements.dtype)
    flat[order] = elements
    return flat
