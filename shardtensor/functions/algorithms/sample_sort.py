"""Sorting along a split dimension by regular sampling, where the sizes of the parts stay those of the split rule.

The method is that of Shi & Schaeffer, "Parallel sorting by regular sampling" (1992): each device sorts its part, the
parts are cut where the result is, each device receives its pieces and merges them. The cuts are exact
(`shardtensor.functions.algorithms.run_selection`), so that parts of the result have the sizes of x's, whatever the
elements are. Equal elements keep their order: pieces are merged in the order of the devices.

The bytes that the P devices along the dimension send, for n elements of ``itemsize`` bytes in each of L lines:

- up to `GATHERED` bytes: the first device sorts them all, for which it receives what the others have, and sends them
  their parts, ``(L * n - its elements) * (itemsize + item of the result)``; among devices of several processes, where
  one exchange is less than two, every device gathers the lines and keeps its part, ``(P - 1) * L * n * itemsize``;
- from P lines on: each device receives its share of the whole lines, sorts them, and returns the parts (two
  all-to-alls): ``(n - n / P) * L * itemsize`` and then as many items of the result, if P divides n and L;
- otherwise, for each line: P ranks are selected (see `run_selection.cuts`), and each element is sent at most once, with
  its index if indices are wanted. Of elements in random order, one of P stays on its device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from shardtensor.functions.algorithms.first_device import GATHERED
from shardtensor.functions.algorithms.run_selection import cuts
from shardtensor.functions.algorithms.shards import MeshCommunicator, Shards
from shardtensor.host import host_sorting
from shardtensor.sharding.layout import Shape, offsets
from shardtensor.tensor.value import aval

_INT = np.dtype("int64")


class Order(NamedTuple):
    """An order, and whether the elements in that order are returned, or their indices.

    Attributes:
        descending: whether the order is descending, so that NaN comes first.
        stable: whether elements that are equal keep their order.
        indices: whether the indices of the elements are returned, and not the elements.
    """

    descending: bool = False
    stable: bool = True
    indices: bool = False

    def apply(self, xp: Any, x: Any, axis: int = -1) -> Any:
        """Returns the elements, or their indices, of an array on one device in this order along an axis."""
        along = axis % x.ndim
        if xp is np:
            function = host_sorting.argsort if self.indices else host_sorting.sort
            return function(x, along, descending=self.descending, stable=self.stable)
        if not self.descending:
            return self._ascending(xp, x, along)
        result = xp.flip(self._ascending(xp, xp.flip(x, axis=along), along), axis=along)
        return xp.subtract(x.shape[along] - 1, result) if self.indices else result

    def _ascending(self, xp: Any, x: Any, axis: int) -> Any:
        if not self.indices:
            return xp.sort(x, axis=axis, stable=self.stable)
        return xp.asarray(xp.argsort(x, axis=axis, stable=self.stable), dtype=_INT)


def sample_sort(x: Shards, along: Callable[[int], MeshCommunicator], axis: int, order: Order) -> Shards:
    """Returns the elements of x, or their indices, in order along ``axis``: the shards of a tensor of x's sharding."""
    comm, value = along(axis), x.value
    dtype = _INT if order.indices else value.dtype
    result = aval(value.shape, dtype, value.sharding, value.committed)
    if comm.size == 1:
        return x.map(lambda xp, a: order.apply(xp, a, axis), shape=lambda shape: shape, dtype=dtype).assembled(result)
    shapes = [value.grid.shape(k) for k in range(len(comm.index))]
    parts = _sorted_lines(comm, lines_of(x, axis), value.grid.offsets[axis].tolist(), order, dtype)
    back = parts.map(lines_into, shapes, [axis] * len(shapes), shape=lambda shape: shape, dtype=dtype)
    return back.assembled(result)


def lines_of(x: Shards, axis: int) -> Shards:
    """Returns the lines of each shard along ``axis`` as the rows of a matrix."""

    def shape_of(shape: Shape) -> Shape:
        return math.prod(shape[:axis] + shape[axis + 1 :]), shape[axis]

    def lines(xp: Any, array: Any) -> Any:
        return xp.reshape(xp.moveaxis(array, axis, -1), shape_of(tuple(array.shape)))

    return x.map(lines, shape=shape_of, dtype=x.value.dtype)


def lines_into(xp: Any, lines: Any, shape: Shape, axis: int) -> Any:
    """Returns the array of which a matrix has the lines along ``axis``; it has that ``shape`` in other dimensions."""
    rest = (*shape[:axis], *shape[axis + 1 :])
    return xp.moveaxis(xp.reshape(lines, (*rest, lines.shape[1])), -1, axis)


def _sorted_lines(comm: MeshCommunicator, lines: Shards, bounds: Sequence[int], order: Order, dtype: Any) -> Shards:
    """Returns the parts of the sorted lines, of which each device has a part as the rows of a matrix."""
    counts = [a.shape[0] for a in lines.arrays]
    total = max(counts) * bounds[-1]
    if total * lines.value.dtype.itemsize <= GATHERED:
        ends = [bounds[k : k + 2] for k in comm.index]
        everything = lines.of(comm.all_gather(lines, 1))
        return everything.map(
            lambda xp, a, ends: order.apply(xp, a)[:, slice(*ends)],
            ends, shape=lambda shape: (shape[0], bounds[-1] // comm.size), dtype=dtype,
        )  # fmt: skip
    if max(counts) >= comm.size:
        shares = [offsets(count, (comm.size,)) for count in counts]
        whole = comm.ragged_all_to_all(lines, shares, 0, 1)
        whole = whole.map(order.apply, shape=lambda shape: shape, dtype=dtype)
        return comm.ragged_all_to_all(whole, [np.asarray(bounds)] * len(counts), 1, 0)
    sorted_lines = [_sorted_line(comm, _line(lines, number), bounds, order, dtype) for number in range(max(counts))]
    return lines.map(
        lambda xp, a, *parts: xp.stack(parts)[: a.shape[0]], *[part.arrays for part in sorted_lines],
        shape=lambda shape: shape, dtype=dtype,
    )  # fmt: skip


def _line(lines: Shards, number: int) -> Shards:
    """Returns one line of each device; zeros where there are fewer lines."""

    def line(xp: Any, a: Any) -> Any:
        return a[number] if number < a.shape[0] else xp.zeros((a.shape[1],), dtype=a.dtype)

    return lines.map(line, shape=lambda shape: shape[1:], dtype=lines.value.dtype)


def _sorted_line(comm: MeshCommunicator, line: Shards, bounds: Sequence[int], order: Order, dtype: Any) -> Shards:
    """Returns the parts of one sorted line. The order is descending if all is reversed before and afterwards."""
    begins = [bounds[k] for k in comm.index]
    known = line.value.dtype
    if order.descending:
        comm, bounds = comm.reversed(), [bounds[-1] - b for b in bounds[::-1]]
        line = line.map(_flipped, shape=lambda shape: shape, dtype=known)
    ascending = Order(stable=order.stable)
    positions = None
    if order.indices:
        positions = line.map(ascending._replace(indices=True).apply, shape=lambda shape: shape, dtype=_INT)
        runs = line.map(lambda xp, a, at: a[at], positions.arrays, shape=lambda shape: shape, dtype=known)
        positions = positions.map(_global, begins, [order.descending] * len(begins), shape=lambda s: s, dtype=_INT)
    else:
        runs = line.map(ascending.apply, shape=lambda shape: shape, dtype=known)
    sizes = np.diff(bounds).tolist()
    ends = ends_of(cuts(comm, runs, sizes, [bounds[:-1]] * len(comm.index)), comm, sizes)
    # Arrays that are not needed any more are dropped, so that a device holds at most three times its share.
    runs = comm.ragged_all_to_all(runs, ends, 0, 0)
    if positions is None:
        merged = runs.map(ascending.apply, shape=lambda shape: shape, dtype=dtype)
    else:
        places = runs.map(ascending._replace(indices=True).apply, shape=lambda shape: shape, dtype=_INT)
        del runs
        merged = comm.ragged_all_to_all(positions, ends, 0, 0)
        del positions
        merged = merged.map(lambda xp, a, at: a[at], places.arrays, shape=lambda shape: shape, dtype=dtype)
    return merged.map(_flipped, shape=lambda shape: shape, dtype=dtype) if order.descending else merged


def ends_of(cuts: Shards, comm: MeshCommunicator, sizes: Sequence[int]) -> list[Any]:
    """Returns for each device where its run is cut, with both ends, given the result of `cuts` without the last one."""
    expected = [offsets(sizes[k], (comm.size,))[:-1] for k in comm.index]
    return [np.append(at, sizes[k]) for at, k in zip(cuts.to_host(expected), comm.index, strict=True)]


def _flipped(xp: Any, a: Any) -> Any:
    return xp.flip(a, axis=0)


def _global(xp: Any, positions: Any, begin: int, reverse: bool) -> Any:
    """Returns the indices along the whole dimension of positions in a part, which was reversed if so stated."""
    if reverse:
        positions = xp.subtract(positions.shape[0] - 1, positions)
    return xp.add(positions, begin)
