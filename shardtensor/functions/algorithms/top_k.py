"""The greatest elements along a dimension: each device finds those of its part, and all devices merge them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from shardtensor.functions.algorithms.sample_sort import Order, lines_into, lines_of
from shardtensor.functions.algorithms.shards import MeshCommunicator, Shards
from shardtensor.sharding.layout import Shape
from shardtensor.tensor.value import Aval

_INT = np.dtype("int64")
_DESCENDING = Order(descending=True, indices=True)

_SELECTED_FROM = 1 << 12
"""Elements of a line from which its greatest ones are selected before they are sorted."""


def greatest(xp: Any, x: Any, k: int, axis: int) -> Any:
    """Returns the indices of the ``k`` greatest elements along an axis of an array on one device, in descending order;
    of equal elements, those of the first ones. If there are less than ``k``, it returns those of all.
    """
    if xp is np and x.shape[axis] >= max(_SELECTED_FROM, 8 * k) and k:
        return np.apply_along_axis(_selected, axis, x, k)
    first = (slice(None),) * (axis % x.ndim) + (slice(k),)
    order = _DESCENDING.apply(xp, x, axis)
    return order if k >= x.shape[axis] else xp.asarray(order[first], copy=True)


def _selected(x: Any, k: int) -> Any:
    """Returns the indices of the greatest elements of one line."""
    least = np.partition(x, len(x) - k)[len(x) - k]
    nan = least.dtype.kind in "fc" and np.isnan(least)
    with np.errstate(invalid="ignore"):  # NaN is not less than any number.
        above = np.zeros(0, np.int64) if nan else np.flatnonzero(~(x <= least))
    equal = np.flatnonzero(np.isnan(x) if nan else x == least)[: k - len(above)]
    chosen = np.sort(np.concatenate([above, equal]))
    return chosen[_DESCENDING.apply(np, x[chosen])]


def top_k(
    x: Shards, along: Callable[[int], MeshCommunicator], axis: int, k: int, values: Aval, indices: Aval
) -> tuple[Shards, Shards]:
    """Returns the ``k`` greatest elements along ``axis``, and their indices.

    Where P devices split the dimension, each sends its ``min(k, n)`` greatest elements of n in each of L lines, with
    their indices, to the others: ``(P - 1) * P * min(k, n) * L * (itemsize + 8)`` bytes, if P divides the dimension.
    Every device merges them and keeps its part of the results.

    Args:
        x: the shards.
        along: returns the communicator along a dimension.
        axis: the dimension.
        k: the number of elements.
        values, indices: the avals of the results.
    """
    comm, dtype = along(axis), x.value.dtype
    lines = lines_of(x, axis)

    def cut(shape: Shape) -> Shape:
        return shape[0], min(k, shape[1])

    def same(shape: Shape) -> Shape:
        return shape

    chosen = lines.map(lambda xp, a: greatest(xp, a, k, 1), shape=cut, dtype=_INT)
    elements = lines.map(_taken, chosen.arrays, shape=cut, dtype=dtype)
    if comm.size > 1:
        begins = [x.value.grid.offsets[axis][n] for n in comm.index]
        chosen = chosen.map(lambda xp, a, begin: xp.add(a, int(begin)), begins, shape=same, dtype=_INT)
        everything, indices_of_all = elements.of(comm.all_gather(elements, 1)), comm.all_gather(chosen, 1)
        ends = values.grid.offsets[axis]
        parts = [slice(int(ends[n]), int(ends[n + 1])) for n in comm.index]
        order = everything.map(lambda xp, a, part: greatest(xp, a, k, 1)[:, part], parts, shape=same, dtype=_INT)
        elements = everything.map(_taken, order.arrays, shape=same, dtype=dtype)
        chosen = everything.of(indices_of_all).map(_taken, order.arrays, shape=same, dtype=_INT)
    shapes = [values.grid.shape(n) for n in range(len(comm.index))]
    axes = [axis] * len(shapes)
    results = [a.map(lines_into, shapes, axes, shape=same, dtype=dtype) for a in (elements, chosen)]
    return results[0].assembled(values), results[1].assembled(indices)


def _taken(xp: Any, lines: Any, indices: Any) -> Any:
    return xp.take_along_axis(lines, indices, axis=1)
