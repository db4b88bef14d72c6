"""The distinct elements of an array whose rows are split: each device finds those of its rows, then those of a range.

Splitters are chosen of regular samples of the distinct elements of each device (Shi & Schaeffer, "Parallel sorting by
regular sampling", 1992). The elements between two of them, with the counts and indices that are needed, go to one
device, which merges them. Hence each distinct element of a device is sent at most once, and no device receives more
than about twice its share of them; the results are rebalanced by the split rule. For the inverse, the merged elements'
numbers return along the same way, 8 bytes for each distinct element of a device.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from shardtensor.communication.communicators import communicator
from shardtensor.functions.algorithms.ragged import Rows
from shardtensor.functions.algorithms.sample_sort import Order
from shardtensor.functions.algorithms.shards import MeshCommunicator, Shards, shards_of
from shardtensor.sharding.layout import Shape
from shardtensor.tensor.tensor import ShardedTensor
from shardtensor.tensor.value import aval

SAMPLES = 8
"""The number of samples for each splitter and device, if all devices have as many distinct elements."""

Wanted = tuple[bool, bool, bool]
"""Whether the indices, the inverse and the counts are wanted."""

_INT = np.dtype("int64")
_BY_VALUE = Order(indices=True)


def distinct_of_rows(rows: Rows, shape: Shape, dtype: Any, wanted: Wanted, equal_nan: bool) -> list[ShardedTensor]:
    """Returns the distinct elements in ascending order, and what is wanted of the indices of the first ones, the
    inverse and the counts, in this order.

    Args:
        rows: the rows of the operand.
        shape, dtype: its shape and dtype.
        wanted: what is wanted.
        equal_nan: whether all NaN are one value.
    """
    value = aval(shape, np.dtype(dtype), rows.sharding, False)
    comm = MeshCommunicator(rows.caller, value, 0, communicator, explicit=False)
    inner, count = math.prod(shape[1:]), len(rows.grid.devices)
    begins = [rows.grid.box(k)[0][0] * inner for k in range(count)]
    arrays = rows.shards()

    def local(xp: Any, array: Any, begin: int) -> tuple[Any, ...]:
        values, index, inverse, counts = distinct(xp, xp.reshape(array, (-1,)), (True,) * 3, equal_nan)
        return values, xp.add(index, begin), inverse, counts

    values, index, inverse, counts = zip(*rows.map(local, arrays, begins), strict=True)
    ends = _ends_of_ranges(rows, comm, shards_of(value, values))

    def sent(column: Sequence[Any]) -> Sequence[Any]:
        return comm.ragged_all_to_all(shards_of(value, column), ends, 0, 0).arrays

    none = [None] * count
    columns = [sent(values), sent(index) if wanted[0] else none, sent(counts) if wanted[2] else none]
    merged = rows.map(functools.partial(_merged, equal_nan), *columns)
    firsts, indices, ranks, totals = zip(*merged, strict=True)
    sizes = [int(v.shape[0]) for v in firsts]
    results = [rows.tensor_of_parts(sizes, firsts, dtype)]
    if wanted[0]:
        results.append(rows.tensor_of_parts(sizes, indices, _INT))
    if wanted[1]:
        before = [rows.parts(sizes).box(k)[0][0] for k in range(count)]
        numbers = rows.map(lambda xp, rank, begin: xp.add(rank, begin), ranks, before)
        back = comm.ragged_all_to_all(shards_of(value, numbers), comm.transposed(ends), 0, 0).arrays
        shards = rows.map(
            lambda xp, number, at, array: xp.reshape(number[at], tuple(array.shape)), back, inverse, arrays
        )
        results.append(rows.tensor_of_shards(shape, shards, _INT))
    if wanted[2]:
        results.append(rows.tensor_of_parts(sizes, totals, _INT))
    return results


def _ends_of_ranges(rows: Rows, comm: MeshCommunicator, runs: Shards) -> list[Any]:
    """Returns for each device where its distinct elements are cut into the ranges of the devices, with both ends."""
    size = comm.size
    sizes = [int(a.shape[0]) for a in runs.arrays]
    total = sum(sizes) // (len(sizes) // size)  # Replicas have the same rows.
    step = max(total // (SAMPLES * size * size), 1)
    spaced = rows.map(lambda xp, a: xp.asarray(a[step - 1 :: step], copy=True), runs.arrays)
    samples = comm.all_gather(runs.of(spaced), 0)

    def cut(xp: Any, run: Any, sample: Any) -> Any:
        ordered = Order().apply(xp, sample)
        count = int(ordered.shape[0])
        splitters = ordered[xp.asarray([count * k // size for k in range(1, size)], dtype=_INT)] if count else ordered
        # Equal elements are behind the splitters, so that they are in the same range on every device.
        order = _BY_VALUE.apply(xp, xp.concat([splitters, run]))
        places = xp.argsort(order, stable=True)[: splitters.shape[0]]
        return xp.subtract(places, xp.arange(splitters.shape[0], dtype=_INT))

    found = runs.of(rows.map(cut, runs.arrays, samples)).to_host(())
    ends = zip(found, sizes, strict=True)
    return [np.concatenate([[0], at, [n] * (size - len(at))]).astype(np.int64) for at, n in ends]


def _merged(equal_nan: bool, xp: Any, values: Any, index: Any, counts: Any) -> tuple[Any, ...]:
    """Returns the distinct values of those of all devices, with the first index and the number of elements of each, and
    the number of the distinct value that each value is; None for the index and the number if they are not given.
    """
    order, starts = _groups(xp, values, equal_nan)
    first = order[starts]
    totals = None
    if counts is not None:
        before = xp.concat([xp.zeros((1,), dtype=_INT), xp.cumsum(counts[order], axis=0)])
        totals = xp.subtract(before[_ends(xp, starts, order)], before[starts])
    return values[first], None if index is None else index[first], _ranks(xp, order, starts), totals


# -- on one device ---------------------------------------------------------------------------------


def distinct(xp: Any, x: Any, wanted: Wanted, equal_nan: bool) -> list[Any]:
    """Returns the distinct values of an array of one dimension on one device, and what is wanted of the indices, the
    inverse and the counts.
    """
    if not (wanted[0] or wanted[1]):
        ordered = Order().apply(xp, x)
        order, starts = ordered, _starts(xp, ordered, equal_nan)
        results = [ordered[starts]]
    else:
        order, starts = _groups(xp, x, equal_nan)
        results = [x[order[starts]]]
    if wanted[0]:
        results.append(order[starts])
    if wanted[1]:
        results.append(_ranks(xp, order, starts))
    if wanted[2]:
        results.append(xp.subtract(_ends(xp, starts, order), starts))
    return results


def _groups(xp: Any, x: Any, equal_nan: bool) -> tuple[Any, Any]:
    """Returns the order that sorts an array of one dimension, and the positions in it at which another value begins."""
    order = _BY_VALUE.apply(xp, x)
    return order, _starts(xp, x[order], equal_nan)


def _starts(xp: Any, ordered: Any, equal_nan: bool) -> Any:
    """Returns the positions in an array in ascending order at which another value begins."""
    new = xp.not_equal(ordered[1:], ordered[:-1])
    if equal_nan and xp.isdtype(ordered.dtype, ("real floating", "complex floating")):
        new = xp.logical_and(new, xp.logical_not(xp.logical_and(xp.isnan(ordered[1:]), xp.isnan(ordered[:-1]))))
    first = xp.ones((min(ordered.shape[0], 1),), dtype=np.dtype("bool"))
    return xp.nonzero(xp.concat([first, new]))[0]


def _ranks(xp: Any, order: Any, starts: Any) -> Any:
    """Returns for each element the number of its value, given the result of `_groups`."""
    steps = xp.zeros(order.shape, dtype=_INT)
    steps[starts] = 1
    ranks = xp.empty(order.shape, dtype=_INT)
    ranks[order] = xp.subtract(xp.cumsum(steps, axis=0), 1)
    return ranks


def _ends(xp: Any, starts: Any, order: Any) -> Any:
    end = xp.full((min(starts.shape[0], 1),), order.shape[0], dtype=_INT)
    return xp.concat([starts[1:], end])
