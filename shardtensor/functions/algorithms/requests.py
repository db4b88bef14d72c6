"""Elements that devices request of one another, along a dimension that is split: request and reply.

Each device sorts its requests by the devices that hold the elements, and sends them. Those reply with the elements, in
the same order. A request of `take_along` is an index of eight bytes, so that all devices together send

    bytes = (8 + itemsize) (the number of elements that are requested of another device)

They are sent in rounds of `ROUND` requests, so that a device holds no more of them at a time, even if all elements are
requested of one device.
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

ROUND = 1 << 20
"""The requests that all devices together send in one round."""


def take_along(x: Shards, indices: Shards, along: Callable[[int], MeshCommunicator], axis: int) -> Shards:
    """Returns the elements of each line of x along ``axis`` at the indices in the same line of ``indices``.

    Both have the same shape but along ``axis``, and the same sharding, which is that of the result.

    Raises:
        IndexingError: an index is out of bounds.
    """
    comm, value = along(axis), indices.value
    bounds = x.value.grid.offsets[axis].tolist()
    result = aval(value.shape, x.value.dtype, value.sharding, x.value.committed)
    lines, index_lines = lines_of(x, axis), lines_of(indices, axis)
    everywhere, axes = [bounds] * len(comm.index), [axis] * len(comm.index)

    def found_of(some: slice) -> Shards:
        def of_piece(shape: Shape) -> Shape:
            return piece_of(shape, some)

        pieces = [some] * len(everywhere)
        checked = index_lines.map(_checked, pieces, everywhere, axes, shape=of_piece, dtype=_INT)
        owned = checked.map(_owners, everywhere, shape=_same, dtype=_INT)
        lengths = [a.shape[1] for a in index_lines.arrays]
        sent = checked.map(_positions, owned.arrays, pieces, lengths, everywhere, shape=_same, dtype=_INT)
        return replies_to(sent, owned, comm, _replies, [lines.arrays], (_INT, result.dtype))

    elements = in_rounds(index_lines, comm.size, found_of, result.dtype)
    shapes = [value.grid.shape(k) for k in range(len(comm.index))]
    return elements.map(_in_shape, shapes, axes, shape=_same, dtype=result.dtype).assembled(result)


def in_rounds(x: Shards, size: int, found_of: Callable[[slice], Shards], dtype: Any) -> Shards:
    """Returns for each element of flattened arrays the result of its request, for some of them at a time.

    Args:
        x: the arrays, one for each device.
        size: the number of devices that exchange requests.
        found_of: returns the results of the elements in a slice of the flattened arrays.
        dtype: its dtype.
    """

    def empty(xp: Any, array: Any) -> Any:
        return xp.empty((math.prod(array.shape),), dtype=dtype)

    result = x.map(empty, shape=lambda shape: (math.prod(shape),), dtype=dtype)
    step = max(ROUND // size, 1)
    for begin in range(0, max([math.prod(a.shape) for a in x.arrays]), step):
        some = slice(begin, begin + step)
        result = result.map(_written, [some] * len(x.arrays), found_of(some).arrays, shape=_same, dtype=dtype)
    return result


def replies_to(
    requests: Shards,
    owned: Shards,
    comm: MeshCommunicator,
    reply: Callable[..., Any],
    columns: Sequence[Sequence[Any]],
    dtypes: tuple[Any, Any],
) -> Shards:
    """Returns what ``reply(xp, requests, *items)`` returns of each request, in the order of the requests.

    Args:
        requests: the requests of each device, in one dimension.
        owned: the positions of the devices that reply to them.
        comm: the communicator.
        reply: the function, which runs on the device that receives the requests.
        columns: its further arguments, with an item for each device.
        dtypes: the dtypes of the requests and of the replies.
    """
    size, (kind, dtype) = comm.size, dtypes
    order = owned.map(_owners_in_order, shape=_same, dtype=_INT)
    sent = requests.map(lambda xp, a, at: a[at], order.arrays, shape=_same, dtype=kind)
    ends = owned.map(_ends, order.arrays, [size] * len(comm.index), shape=lambda _: (size + 1,), dtype=_INT)
    cuts = ends.to_host([offsets(math.prod(a.shape), (size,)) for a in requests.arrays])
    received = comm.ragged_all_to_all(sent, cuts, 0, 0)
    replies = received.map(reply, *columns, shape=_same, dtype=dtype)
    arrived = comm.ragged_all_to_all(replies, comm.transposed(cuts), 0, 0)
    return arrived.map(_in_order_of, order.arrays, shape=_same, dtype=dtype)


def piece_of(shape: Shape, some: slice) -> Shape:
    """Returns the shape of a slice of a flattened array."""
    return (len(range(math.prod(shape))[some]),)


def _same(shape: Shape) -> Shape:
    return shape


def _written(xp: Any, out: Any, some: slice, values: Any) -> Any:
    out[some] = values
    return out


def _replies(xp: Any, positions: Any, lines: Any) -> Any:
    """Returns the elements at positions in flattened lines."""
    return xp.reshape(lines, (-1,))[positions] if positions.shape[0] else xp.zeros((0,), dtype=lines.dtype)


def check_bounds(xp: Any, indices: Any, axis: int, size: int) -> None:
    """Raises IndexingError, with NumPy's message, if an index is out of bounds."""
    outside = xp.logical_or(xp.less(indices, -size), xp.greater_equal(indices, size))
    if bool(xp.any(outside)):
        raise IndexingError(f"index {int(indices[outside][0])} is out of bounds for axis {axis} with size {size}")


def _checked(xp: Any, indices: Any, some: slice, bounds: Sequence[int], axis: int) -> Any:
    """Returns a slice of flattened indices, counted from 0 on."""
    indices, size = xp.reshape(indices, (-1,))[some], bounds[-1]
    check_bounds(xp, indices, axis, size)
    indices = xp.asarray(indices, dtype=_INT)
    return xp.where(xp.less(indices, 0), xp.add(indices, size), indices)


def _owners(xp: Any, indices: Any, bounds: Sequence[int]) -> Any:
    """Returns the part that each index is in."""
    return xp.searchsorted(xp.asarray(bounds[1:-1], dtype=_INT), indices, side="right")


def _positions(xp: Any, indices: Any, owners: Any, some: slice, length: int, bounds: Sequence[int]) -> Any:
    """Returns the positions of elements in the flattened lines of the devices that hold them.

    Args:
        xp: the namespace of the backend.
        indices: a slice of the flattened indices.
        owners: the parts that they are in.
        some: the slice.
        length: the number of indices in each line.
        bounds: the bounds of the parts.
    """
    sizes, starts = np.diff(bounds), bounds[:-1]
    width, start = [xp.asarray(values, dtype=_INT)[owners] for values in (sizes.tolist(), starts)]
    numbers = xp.arange(some.start, some.start + owners.shape[0], dtype=_INT)
    line = xp.floor_divide(numbers, max(length, 1))
    return xp.add(xp.multiply(line, width), xp.subtract(indices, start))


def _owners_in_order(xp: Any, owners: Any) -> Any:
    """Returns the order of requests by the devices that hold what is requested."""
    return xp.asarray(xp.argsort(owners, stable=True), dtype=_INT)


def _ends(xp: Any, owners: Any, order: Any, count: int) -> Any:
    """Returns where the requests to each device begin, with the end of the last ones."""
    return xp.searchsorted(owners[order], xp.arange(count + 1, dtype=_INT), side="left")


def _in_shape(xp: Any, elements: Any, shape: Shape, axis: int) -> Any:
    """Returns the elements of lines as an array of that shape."""
    lines = math.prod(shape[:axis] + shape[axis + 1 :])
    return lines_into(xp, xp.reshape(elements, (lines, shape[axis])), shape, axis)


def _in_order_of(xp: Any, elements: Any, order: Any) -> Any:
    """Returns the replies, which are in order of the devices that made them, in the order of the requests."""
    flat = xp.empty(elements.shape, dtype=elements.dtype)
    flat[order] = elements
    return flat
