"""The distinct elements of an array whose rows are split: each device finds those of its rows, then those of a range.

Splitters are chosen of regular samples of the distinct elements of each device (Shi & Schaeffer, "Parallel sorting by
regular sampling", 1992). The elements between two of them, with the counts and indices that are needed, go to one
device, which merges them. Hence each distinct element of a device is sent at most once, and no device receives more
than about twice its share of them; the results are rebalanced by the split rule. For the inverse, the merged elements'
numbers return along the same way. Of S samples, P devices send

    bytes = (P - 1) S itemsize + (sent + moved) (itemsize + 8 for indices + 8 for counts) + 8 sent for the inverse

where ``sent`` is the number of the devices' distinct elements that are not in the range of their device, and ``moved``
that of the distinct elements that change devices when the results are rebalanced.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from shardtensor.communication.communicators import communicator
from shardtensor.functions.algorithms.ragged import Rows
from shardtensor.functions.algorithms.sample_sort import Order
from shardtensor.functions.algorithms.shards import MeshCommunicator, Shards, shards_of
from shardtensor.host.host_sorting import distances, least_of_short_range
from shardtensor.sharding.layout import Shape
from shardtensor.tensor.tensor import ShardedTensor
from shardtensor.tensor.value import aval

SAMPLES = 8
"""The number of samples for each splitter and device, if all devices have as many distinct elements."""

PIECE = 1 << 18
"""Elements in order that are compared with the next ones at a time on the host."""

PIECE_ON_DEVICE = 1 << 26
"""The same on other devices."""

Extras = tuple[bool, bool, bool]
"""Whether the indices, the inverse and the counts are returned, too."""

_INT = np.dtype("int64")
_BY_VALUE = Order(indices=True)


def distinct_of_rows(rows: Rows, shape: Shape, dtype: Any, extras: Extras, equal_nan: bool) -> list[ShardedTensor]:
    """Returns the distinct elements in ascending order, and the selected extras, in this order: the indices of the
    first ones, the inverse and the counts.

    Args:
        rows: the rows of the operand.
        shape, dtype: its shape and dtype.
        extras: see `Extras`.
        equal_nan: whether all NaN are one value.
    """
    value = aval(shape, np.dtype(dtype), rows.sharding, False)
    comm = MeshCommunicator(rows.caller, value, 0, communicator, explicit=False)
    inner, count = math.prod(shape[1:]), len(rows.grid.devices)
    begins = [rows.grid.box(k)[0][0] * inner for k in range(count)]
    arrays = rows.shards()

    def local(xp: Any, array: Any, begin: int) -> tuple[Any, ...]:
        values, *others = distinct(xp, xp.reshape(array, (-1,)), extras, equal_nan)
        if extras[0]:
            others[0] = xp.add(others[0], begin)
        return values, *others

    columns = _columns(rows.map(local, arrays, begins))
    if count == 1:
        sizes = [int(columns[0][0].shape[0])]
        return _results(
            rows, columns, sizes, shape, dtype, extras, functools.partial(rows.map, lambda xp, x: xp.reshape(x, shape))
        )
    inverse = columns.pop(1 + extras[0]) if extras[1] else ()
    ends = _ends_of_ranges(rows, comm, shards_of(value, columns[0]))
    for i in range(len(columns)):  # Each column takes the place of the one that is sent, whose memory is then free.
        columns[i] = comm.ragged_all_to_all(shards_of(value, columns[i]), ends, 0, 0).arrays
    columns = _columns(rows.map(functools.partial(_merged, extras, equal_nan), *columns))
    sizes = [int(v.shape[0]) for v in columns[0]]

    def inverse_of(ranks: Sequence[Any]) -> Sequence[Any]:
        before = [rows.parts(sizes).box(k)[0][0] for k in range(count)]
        numbers = rows.map(lambda xp, rank, begin: xp.add(rank, begin), ranks, before)
        back = comm.ragged_all_to_all(shards_of(value, numbers), comm.transposed(ends), 0, 0).arrays
        return rows.map(lambda xp, number, at, array: xp.reshape(number[at], tuple(array.shape)), back, inverse, arrays)

    return _results(rows, columns, sizes, shape, dtype, extras, inverse_of)


def _results(
    rows: Rows,
    columns: list[Sequence[Any]],
    sizes: Sequence[int],
    shape: Shape,
    dtype: Any,
    extras: Extras,
    inverse_of: Callable[[Sequence[Any]], Sequence[Any]],
) -> list[ShardedTensor]:
    """Returns the results of `distinct_of_rows`, of which each device has a part in each column.

    Args:
        rows: the rows.
        columns: the parts of the values on the devices, and those of the extras. It is empty afterwards.
        sizes: the number of values on each device.
        shape, dtype: of the operand.
        extras: see `distinct_of_rows`.
        inverse_of: returns the shards of the inverse, given the ranks of the values on each device.
    """
    results = [rows.tensor_of_parts(sizes, columns.pop(0), dtype)]
    if extras[0]:
        results.append(rows.tensor_of_parts(sizes, columns.pop(0), _INT))
    if extras[1]:
        results.append(rows.tensor_of_shards(shape, inverse_of(columns.pop(0)), _INT))
    if extras[2]:
        results.append(rows.tensor_of_parts(sizes, columns.pop(0), _INT))
    return results


def _columns(tuples: Sequence[Sequence[Any]]) -> list[Sequence[Any]]:
    """Returns the lists of the first items, of the second ones, and so on, of the tuples of all devices."""
    return list(zip(*tuples, strict=True))


def _ends_of_ranges(rows: Rows, comm: MeshCommunicator, runs: Shards) -> list[Any]:
    """Returns for each device where its distinct elements are cut into the ranges of the devices, with both ends."""
    size = comm.size
    sizes = [int(a.shape[0]) for a in runs.arrays]
    total = sum(sizes) // (len(sizes) // size)  # Replicas have the same rows.
    step = max(total // (SAMPLES * size * size), 1)
    spaced = rows.map(lambda xp, a: xp.asarray(a[step - 1 :: step], copy=True), runs.arrays)
    samples = comm.all_gather(runs.of(spaced), 0)
    is_complex = runs.value.dtype.kind == "c"

    def cut(xp: Any, run: Any, sample: Any) -> Any:
        if is_complex:  # All NaN are in one range, whatever their other parts are.
            run, sample = [xp.where(xp.isnan(a), math.nan, a) for a in (run, sample)]
        ordered = Order().apply(xp, sample)
        count = int(ordered.shape[0])
        splitters = ordered[xp.asarray([count * k // size for k in range(1, size)], dtype=_INT)] if count else ordered
        # Equal elements are behind the splitters, so that they are in the same range on every device.
        order = _BY_VALUE.apply(xp, xp.concat([splitters, run]))
        places = xp.argsort(order, stable=True)[: splitters.shape[0]]
        return xp.subtract(places, xp.arange(splitters.shape[0], dtype=_INT))

    cuts = runs.of(rows.map(cut, runs.arrays, samples)).to_host(())
    ends = zip(cuts, sizes, strict=True)
    return [np.concatenate([[0], at, [n] * (size - len(at))]).astype(np.int64) for at, n in ends]


def _merged(extras: Extras, equal_nan: bool, xp: Any, values: Any, *others: Any) -> tuple[Any, ...]:
    """Returns the distinct values of those of all devices, and the selected extras: the first index of each, the number
    of the distinct value that each value is, and the number of elements of each, given the values and the selected
    ones of their indices and counts.
    """
    if not any(extras):
        return tuple(distinct(xp, values, extras, equal_nan))
    order, starts = _groups(xp, values, equal_nan)
    # No array is kept longer than needed, so that a device holds at most three times its share.
    ranks = [_ranks(xp, order, starts)] if extras[1] else []
    sums = [xp.cumsum(others[-1][order], axis=0)] if extras[2] else []
    first = order[starts]
    del order
    results = [values[first], *([others[0][first]] if extras[0] else []), *ranks]
    del first
    if extras[2]:
        before = xp.subtract(starts[1:], 1)
        del starts
        before = sums[0][before]
        totals = xp.concat([before, sums.pop()[-1:]])
        totals[1:] -= before
        results.append(totals)
    return tuple(results)


# -- on one device ---------------------------------------------------------------------------------


def distinct(xp: Any, x: Any, extras: Extras, equal_nan: bool) -> list[Any]:
    """Returns the distinct values of an array of one dimension on one device, and the selected extras."""
    if xp is np and (least := least_of_short_range(x, x.size)) is not None:
        return _counted(x, least, extras)
    if not (extras[0] or extras[1]):
        order = Order().apply(xp, x)
        starts = _starts(xp, order.shape[0], lambda some: order[some], equal_nan)
        results = [order[starts]]
    else:
        order, starts = _groups(xp, x, equal_nan)
        results = [x[order[starts]]]
    if extras[0]:
        results.append(order[starts])
    if extras[1]:
        results.append(_ranks(xp, order, starts))
    if extras[2]:
        results.append(xp.subtract(_ends(xp, starts, order), starts))
    return results


def _counted(x: np.ndarray[Any, Any], least: int, extras: Extras) -> list[Any]:
    """Returns the results of `distinct` for integers of a range that is not longer than the array: no elements are
    sorted.
    """
    numbers = distances(x, least)
    counts = np.bincount(numbers)
    found = np.flatnonzero(counts)
    results: list[Any] = [found.astype(x.dtype) + x.dtype.type(least)]  # Sums that wrap, wrap back.
    table = np.empty(counts.shape, _INT)
    if extras[0]:
        table[numbers[::-1]] = np.arange(x.size - 1, -1, -1)  # Of equal numbers, the last one is written last.
        results.append(table[found])
    if extras[1]:
        table[found] = np.arange(found.size)
        results.append(table[numbers])
    if extras[2]:
        results.append(counts[found])
    return results


def _groups(xp: Any, x: Any, equal_nan: bool) -> tuple[Any, Any]:
    """Returns the order that sorts an array of one dimension, and the positions in it at which another value begins."""
    order = _BY_VALUE.apply(xp, x)
    return order, _starts(xp, order.shape[0], lambda some: x[order[some]], equal_nan)


def _starts(xp: Any, count: int, ordered: Callable[[slice], Any], equal_nan: bool) -> Any:
    """Returns the positions in elements in ascending order at which another value begins.

    Args:
        xp: the namespace of the backend.
        count: the number of elements.
        ordered: returns the elements in a slice, which is short, so that they and the masks are small.
        equal_nan: whether all NaN are one value.
    """
    starts = [xp.zeros((min(count, 1),), dtype=_INT)]
    step = PIECE if xp is np else PIECE_ON_DEVICE
    for begin in range(1, count, step):
        part = ordered(slice(begin - 1, min(begin + step, count)))
        new = xp.not_equal(part[1:], part[:-1])
        if equal_nan and not xp.isdtype(part.dtype, ("bool", "integral")):
            numbers = xp.equal(part, part)  # Only NaN and NaT are not equal to themselves.
            new = xp.logical_and(new, xp.logical_or(numbers[1:], numbers[:-1]))
        starts.append(xp.add(xp.nonzero(new)[0], begin))
    return xp.concat(starts)


def _ranks(xp: Any, order: Any, starts: Any) -> Any:
    """Returns for each element the number of its value, given the result of `_groups`."""
    steps = xp.zeros(order.shape, dtype=_INT)
    steps[starts[1:]] = 1
    ordered = xp.cumsum(steps, axis=0)
    del steps
    ranks = xp.empty(order.shape, dtype=_INT)
    ranks[order] = ordered
    return ranks


def _ends(xp: Any, starts: Any, order: Any) -> Any:
    end = xp.full((min(starts.shape[0], 1),), order.shape[0], dtype=_INT)
    return xp.concat([starts[1:], end])
