"""The elements of given ranks among all elements of each line, where lines are split over devices.

Few elements travel: each device sorts its part of a line, and the ranks are selected of the sorted parts (see
`shardtensor.functions.algorithms.run_selection.cuts` for the bytes). The element of a rank is then the least of those
that follow the cuts, of which each of P devices sends one for each rank to each other one, with a flag of 8 bytes. Up
to `GATHERED` bytes are gathered. If there are as many lines as devices or more, each device receives its share of whole
lines (an all-to-all), and the elements that were selected are gathered.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from shardtensor.functions.algorithms.first_device import GATHERED
from shardtensor.functions.algorithms.run_selection import cuts
from shardtensor.functions.algorithms.sample_sort import Order
from shardtensor.functions.algorithms.shards import MeshCommunicator, Shards
from shardtensor.host import host_selection
from shardtensor.sharding.layout import Shape, offsets
from shardtensor.tensor.value import Aval

_INT = np.dtype("int64")


def elements_of_ranks(
    x: Shards,
    along: Callable[[Sequence[int]], MeshCommunicator],
    axes: Sequence[int],
    ranks: Sequence[int],
    value: Aval,
) -> Shards:
    """Returns the elements of these ranks along ``axes``. The first dimension of the result, whose aval is ``value``,
    has an item for each rank, and the others are x's other dimensions.
    """
    comm = along(axes)
    lines, sizes = lines_along(x, comm, axes)
    elements = _selected(comm, lines, sizes, list(ranks))
    shapes = [value.grid.shape(k) for k in range(len(comm.index))]

    def back(xp: Any, picks: Any, shape: Shape) -> Any:
        return xp.reshape(xp.moveaxis(picks, -1, 0), shape)

    return elements.map(back, shapes, shape=lambda shape: shape, dtype=x.value.dtype).assembled(value)


def lines_along(x: Shards, comm: MeshCommunicator, axes: Sequence[int]) -> tuple[Shards, list[int]]:
    """Returns the lines of each shard along several axes as the rows of a matrix, and the sizes of the parts of a line
    in the order of the devices of a group.
    """
    rest, sizes = [d for d in range(x.value.ndim) if d not in axes], [0] * comm.size
    for k, at in enumerate(comm.index):
        shape = x.value.grid.shape(k)
        sizes[at] = math.prod(shape[d] for d in axes)

    def lines_shape(shape: Shape) -> Shape:
        return math.prod(shape[d] for d in rest), math.prod(shape[d] for d in axes)

    def to_lines(xp: Any, array: Any) -> Any:
        return xp.reshape(xp.permute_dims(array, (*rest, *axes)), lines_shape(tuple(array.shape)))

    return x.map(to_lines, shape=lines_shape, dtype=x.value.dtype), sizes


def picked(xp: Any, lines: Any, ranks: Sequence[int]) -> Any:
    """Returns the elements of these ranks, which are in ascending order, of each row of a matrix on one device."""
    if xp is np:
        return host_selection.elements_of_ranks(lines, list(ranks))
    return Order(stable=False).apply(xp, lines)[:, xp.asarray(list(ranks), dtype=_INT)]


def _selected(comm: MeshCommunicator, lines: Shards, sizes: Sequence[int], ranks: list[int]) -> Shards:
    """Returns the elements of the ranks of each line, of which each device has a part: a row for each line."""
    count, total, dtype = len(ranks), sum(sizes), lines.value.dtype

    def pick(xp: Any, array: Any) -> Any:
        return picked(xp, array, ranks)

    def picks(shape: Shape) -> Shape:
        return shape[0], count

    if comm.size == 1:
        return lines.map(pick, shape=picks, dtype=dtype)
    numbers = [a.shape[0] for a in lines.arrays]
    if max(numbers) * total * dtype.itemsize <= GATHERED:
        return lines.of(comm.all_gather(lines, 1)).map(pick, shape=picks, dtype=dtype)
    if max(numbers) >= comm.size:
        whole = comm.ragged_all_to_all(lines, [offsets(n, (comm.size,)) for n in numbers], 0, 1)
        part = whole.map(pick, shape=picks, dtype=dtype)
        return part.of(comm.all_gather(part, 0))
    ordered = lines.map(Order(stable=False).apply, shape=lambda shape: shape, dtype=dtype)
    elements = []
    for number in range(max(numbers)):
        run = ordered.map(row_of, [number] * len(numbers), shape=lambda shape: shape[1:], dtype=dtype)
        elements.append(of_one_line(comm, run, sizes, [ranks] * len(numbers)).arrays)
    return lines.map(lambda xp, a, *rows: xp.stack(rows)[: a.shape[0]], *elements, shape=picks, dtype=dtype)


def row_of(xp: Any, lines: Any, number: int) -> Any:
    """Returns one line; zeros where there are fewer lines."""
    return lines[number] if number < lines.shape[0] else xp.zeros((lines.shape[1],), dtype=lines.dtype)


def of_one_line(comm: MeshCommunicator, run: Shards, sizes: Sequence[int], ranks: Sequence[Sequence[int]]) -> Shards:
    """Returns the elements of the ranks of one line, whose parts are in ascending order; for ``ranks`` see `cuts`."""
    count, dtype = len(ranks[0]), run.value.dtype
    at = cuts(comm, run, sizes, ranks)

    def next_ones(xp: Any, a: Any, at: Any) -> Any:
        if not a.shape[0]:
            return xp.zeros((count, 1), dtype=a.dtype)
        return a[xp.clip(at, 0, a.shape[0] - 1)][:, None]

    def exist(xp: Any, at: Any, a: Any) -> Any:
        return xp.astype(xp.less(at, a.shape[0]), _INT)[:, None]

    def column(shape: Shape) -> Shape:
        return count, 1

    candidates = run.map(next_ones, at.arrays, shape=column, dtype=dtype)
    flags = at.map(exist, run.arrays, shape=column, dtype=_INT)
    everything = candidates.of(comm.all_gather(candidates, 1))

    def least(xp: Any, a: Any, flags: Any) -> Any:
        order = Order(indices=True).apply(xp, a)
        first = xp.argmax(xp.take_along_axis(flags, order, axis=1), axis=1)[:, None]
        return xp.take_along_axis(a, xp.take_along_axis(order, first, axis=1), axis=1)[:, 0]

    return everything.map(least, comm.all_gather(flags, 1), shape=lambda _: (count,), dtype=dtype)
