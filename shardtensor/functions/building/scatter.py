"""The operators that add rows at given places, and their transpose, which selects rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from shardtensor.communication.all_reduce import Rounds
from shardtensor.core import implements, operator
from shardtensor.functions.algorithms.requests import check_bounds
from shardtensor.functions.building.own_kernels import own_kernel
from shardtensor.host import blockwise
from shardtensor.sharding.layout import Shape, Where
from shardtensor.sharding.shard_context import ShardContext
from shardtensor.tensor.tensor import ArrayLike, ShardedTensor

_DERIVATIVES = "of_indexing"

_INT = np.dtype("int64")


def _scatter_rule(shapes: Sequence[Shape], *, size: int) -> tuple[str, Shape]:
    at, values = shapes
    lead = [f"n{d}" for d in range(len(at))]
    rest = [f"d{d}" for d in range(len(values) - len(at))]
    return f"{' '.join(lead)}, {' '.join(lead + rest)} -> {' '.join(['rows', *rest])}", (size, *values[len(at) :])


@operator(
    _scatter_rule,
    operands=("at", "values"),
    combine="sum",
    dtype=lambda at, values, **params: values,
    tags=("internal", "unblocked"),
)
def scatter_add(at: ArrayLike, values: ArrayLike, /, *, size: int, out_sharding: Where | None = None) -> ShardedTensor:
    """Adds rows at given places of an array of zeros, which has ``size`` rows.

    The order of the additions depends on the mesh only.

    Args:
        at: the places, which are not negative.
        values: the rows: an array that has the dimensions of ``at`` before its own.
        size: the number of rows of the result.

    >>> from shardtensor.functions.building.scatter import scatter_add
    >>> scatter_add(st.asarray([2, 0, 2]), st.asarray([1.0, 2.0, 4.0]), size=3).tolist()
    [2.0, 0.0, 5.0]
    """


def _each_rule(shapes: Sequence[Shape], *, size: int) -> tuple[str, Shape]:
    at, values = shapes
    rule, shape = _scatter_rule((at[1:], values[1:]), size=size)
    terms, result = rule.split("->")
    both = ", ".join([f"example {term.strip()}" for term in terms.split(",")])
    return f"{both} -> example {result.strip()}", (at[0], *shape)


@operator(
    _each_rule,
    operands=("at", "values"),
    combine="sum",
    dtype=lambda at, values, **params: values,
    error_name="scatter_add",
    tags=("internal", "unblocked"),
)
def scatter_add_each(at: ArrayLike, values: ArrayLike, /, *, size: int) -> ShardedTensor:
    """Returns the result of `scatter_add` for each index of the first dimension of both arrays.

    >>> from shardtensor.functions.building.scatter import scatter_add_each
    >>> scatter_add_each(st.asarray([[1, 1], [0, 1]]), st.asarray([[1.0, 2.0], [3.0, 4.0]]), size=2).tolist()
    [[0.0, 3.0], [3.0, 4.0]]
    """


@implements(scatter_add_each, "kernel")
def _scatter_add_each(xp: Any, context: ShardContext | None, at: Any, values: Any, *, size: int) -> Any:
    n, ndim = at.shape[0], len(at.shape)
    shift = xp.reshape(xp.arange(n, dtype=_INT) * size, (n, *[1] * (ndim - 1)))
    result = _scatter_add(xp, None, xp.asarray(at, dtype=_INT) + shift, values, size=n * size)
    return xp.reshape(result, (n, size, *values.shape[ndim:]))


@implements(scatter_add, "kernel")
def _scatter_add(xp: Any, context: ShardContext | None, at: Any, values: Any, *, size: int) -> Any:
    rest = tuple(values.shape[len(at.shape) :])
    count = math.prod(at.shape)
    at, values = xp.reshape(xp.asarray(at, dtype=_INT), (count,)), xp.reshape(values, (count, *rest))
    if xp is np:
        return added_on_host(at, values, size)
    result = own_kernel(xp, "added_rows", at, values, size)
    return _added(xp, at, values, size) if result is None else result


def _added(xp: Any, at: Any, values: Any, size: int) -> Any:
    """Adds rows in an order that the places determine: they are sorted, and each row gets the sum of those before it
    of the same place, in as many passes as the number of rows of one place has bits. Differences of running sums over
    all rows would lose bits.
    """
    result = xp.zeros((size + 1, *values.shape[1:]), dtype=values.dtype)
    count = at.shape[0]
    if not count:
        return result[:size]
    order = xp.argsort(at, stable=True)
    places, total = at[order], values[order]
    numbers = xp.arange(count)
    earlier = numbers - xp.searchsorted(places, places)  # rows of the same place
    for step in [1 << n for n in range(int(xp.max(earlier)).bit_length())]:
        adds = xp.reshape(earlier[step:] >= step, (count - step, *[1] * (values.ndim - 1)))
        later = total[step:]
        total = xp.concat([total[:step], xp.where(adds, later + total[:-step], later)])
    # The last row of each place is its sum; the others are written to one more row.
    last = xp.concat([places[1:] != places[:-1], xp.ones(1, dtype=xp.bool)])
    result[xp.where(last, places, size)] = total
    return result[:size]


# -- on the host -----------------------------------------------------------------------------------


def added_on_host(at: Any, values: Any, size: int) -> Any:
    """Adds rows on the host, in the order in which they are given."""
    result = np.zeros((size, *values.shape[1:]), values.dtype)
    if values.ndim == 1:  # NumPy adds elements in place in less time than it sorts them.
        np.add.at(result, at, values)
    elif values.size:
        order = np.argsort(at, kind="stable")
        places, sums = _sums_of_equal(at[order], values, order)
        result[places] = sums
    return result


def added_by_parts(at: Any, values: Any, part: Any, merges: Rounds, size: int) -> Any:
    """Adds rows that belong to parts: those of each part, and then the sums of parts, pair by pair. The result has the
    bits of sums of arrays of ``size`` rows, one for each part; time and memory are in proportion to the given rows.

    Args:
        at: the places, in one dimension.
        values: the rows.
        part: the number of the part of each row.
        merges: in each round pairs of numbers of parts, of which the first one gets the sum. Parts in between have been
            merged before.
        size: the number of rows of the result.
    """
    result = np.zeros((size, *values.shape[1:]), values.dtype)
    if not values.size:
        return result
    count = int(part.max()) + 1
    keys = at.astype(_INT) * count + part
    order = np.argsort(keys, kind="stable")
    keys, sums = _sums_of_equal(keys[order], values, order)
    places, part = np.divmod(keys, count)
    rows = np.arange(len(keys))
    for pairs in merges:
        into = np.arange(count)
        for left, right in pairs:
            if right < count:
                into[right] = left
        part = into[part]
        earlier = np.flatnonzero((places[1:] == places[:-1]) & (part[1:] == part[:-1]))
        sums[rows[earlier]] += sums[rows[earlier + 1]]
        kept = np.ones(len(rows), np.bool_)
        kept[earlier + 1] = False
        rows, places, part = rows[kept], places[kept], part[kept]
    result[places] = sums[rows]
    return result


def _sums_of_equal(keys: Any, values: Any, order: Any) -> tuple[Any, Any]:
    """Returns the distinct ones of sorted keys, and for each of them the sum of its rows.

    Args:
        keys: the keys in order.
        values: the rows, not in order.
        order: the numbers of the rows in the order of the keys.
    """
    is_first = np.concatenate([[True], keys[1:] != keys[:-1]])
    begins = np.flatnonzero(is_first)
    ordered = blockwise.select(values, (order,))
    if values.ndim == 1:
        sums = np.zeros(len(begins), values.dtype)
        np.add.at(sums, np.cumsum(is_first) - 1, ordered)
        return keys[begins], sums
    sums = np.add.reduceat(ordered, begins, axis=0)
    if sums.dtype.kind in "fc":
        sums += 0  # As if it had been added to zeros, which a negative zero is not.
    return keys[begins], sums


def _rows_rule(shapes: Sequence[Shape], *, lines: int = 0) -> str:
    x, at = shapes
    lead = [f"n{d}" for d in range(len(at))]
    rest = [f"d{d}" for d in range(len(x) - lines - 1)]
    return f"{' '.join([*lead[:lines], 'k!', *rest])}, {' '.join(lead)} -> {' '.join(lead + rest)}"


@operator(
    _rows_rule,
    operands=("x", "at"),
    dtype=lambda x, at, **params: x,
    error_name="getitem",
    tags=("internal",),
)
def rows_at(x: ArrayLike, at: ArrayLike, /, *, lines: int = 0) -> ShardedTensor:
    """Selects rows of x, in the layout of ``at``. No device needs the places of another one.

    Args:
        x: the rows.
        at: their numbers, of which negative ones count from the end.
        lines: how many of the first dimensions x and ``at`` share: each of their elements has rows of its own.

    Raises:
        IndexingError: there is no such row.

    >>> from shardtensor.functions.building.scatter import rows_at
    >>> rows_at(st.asarray([[1, 2], [3, 4]]), st.asarray([1, 0, -1])).tolist()
    [[3, 4], [1, 2], [3, 4]]
    """


@implements(rows_at, "kernel")
def _rows_at(xp: Any, context: ShardContext | None, x: Any, at: Any, *, lines: int = 0) -> Any:
    k, rest = x.shape[lines], tuple(x.shape[lines + 1 :])
    check_bounds(xp, at, 0, k)
    shape, n = tuple(at.shape), math.prod(at.shape[:lines])
    at = xp.where(at < 0, at + k, at)
    if lines:
        at = xp.reshape(at, (n, math.prod(shape[lines:]))) + k * xp.expand_dims(xp.arange(n), axis=1)
    flat = xp.reshape(x, (n * k, *rest))
    return xp.reshape(xp.take(flat, xp.reshape(at, (-1,)), axis=0), (*shape, *rest))
