"""Set functions (a chapter of the array API standard), and NumPy's form of them, `unique`.

Distinct values are in ascending order. In the functions of the standard, every NaN is distinct from every other.

Each device finds the distinct values of its rows. Only these are gathered, with the counts and indices that are needed,
and every device finds the distinct values among them. The first dimension of each result is split by the mesh axes that
split x. If other dimensions of x than the first are split, the split first moves to that one. The number of values
depends on the elements, so that `eval_shape` cannot infer the results.

Raises:
    ConcretizationError: the elements of x are not known.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from shardtensor.communication.transfer_log import is_recording
from shardtensor.core import implements, operator
from shardtensor.functions.algorithms.ragged import Rows
from shardtensor.functions.elementwise import logical_not
from shardtensor.sharding.layout import Shape
from shardtensor.sharding.shard_context import ShardContext
from shardtensor.sharding.spec import P
from shardtensor.tensor.tensor import ArrayLike, ShardedTensor


class UniqueAll(NamedTuple):
    """The result of `unique_all`.

    Attributes:
        values: the distinct values.
        indices: the index of the first element of each value in the flattened array.
        inverse_indices: for each element the index of its value.
        counts: the number of elements of each value.
    """

    values: Any
    indices: Any
    inverse_indices: Any
    counts: Any


class UniqueCounts(NamedTuple):
    """The result of `unique_counts`; see `UniqueAll`."""

    values: Any
    counts: Any


class UniqueInverse(NamedTuple):
    """The result of `unique_inverse`; see `UniqueAll`."""

    values: Any
    inverse_indices: Any


_DISTINCT = "the distinct elements of each device are gathered"
_TABLE = "the elements to be found are sorted whole"


@operator(escapes=True, gathers=_DISTINCT)
def unique_all(x: ArrayLike, /) -> UniqueAll:
    """Returns the distinct values of x in ascending order, with their first indices, their counts, and for each element
    the index of its value.

    The values have x's dtype, and the others dtype int64. ``inverse_indices`` has x's shape; see
    `shardtensor.functions.sets` for the sharding.

    Raises:
        ConcretizationError: the elements of x are not known.

    >>> values, indices, inverse, counts = st.unique_all(st.asarray([7, 2, 7]))
    >>> values.tolist(), indices.tolist(), inverse.tolist(), counts.tolist()
    ([2, 7], [1, 0], [1, 0, 1], [1, 2])
    """


@operator(escapes=True, gathers=_DISTINCT)
def unique_counts(x: ArrayLike, /) -> UniqueCounts:
    """Returns the distinct values of x in ascending order, and the number of elements of each: see `unique_all`.

    >>> values, counts = st.unique_counts(st.asarray([7, 2, 7]))
    >>> values.tolist(), counts.tolist()
    ([2, 7], [1, 2])
    """


@operator(escapes=True, gathers=_DISTINCT)
def unique_inverse(x: ArrayLike, /) -> UniqueInverse:
    """Returns the distinct values of x in ascending order, and for each element the index of its value: see
    `unique_all`.

    >>> values, inverse = st.unique_inverse(st.asarray([7, 2, 7]))
    >>> values[inverse].tolist()
    [7, 2, 7]
    """


@operator(escapes=True, gathers=_DISTINCT)
def unique_values(x: ArrayLike, /) -> ShardedTensor:
    """Returns the distinct values of x in ascending order: see `unique_all`.

    >>> st.unique_values(st.asarray([7, 2, 7])).tolist()
    [2, 7]
    """


@operator(escapes=True, gathers=_DISTINCT)
def unique(
    x: ArrayLike,
    /,
    return_index: bool = False,
    return_inverse: bool = False,
    return_counts: bool = False,
    *,
    equal_nan: bool = True,
) -> Any:
    """Returns the distinct values of x in ascending order, as `numpy.unique` of the flattened array.

    Args:
        x: a tensor or a host array.
        return_index: whether the indices of the first elements follow in the result, which is then a tuple.
        return_inverse: whether the index of the value of each element follows, of x's shape.
        return_counts: whether the counts follow.
        equal_nan: whether all NaN are one value.

    Raises:
        ConcretizationError: the elements of x are not known.

    >>> st.unique(st.asarray([7.0, float("nan"), 7.0, float("nan")])).tolist()
    [7.0, nan]
    """


Wanted = tuple[bool, bool, bool]
"""Whether the indices, the inverse and the counts are wanted."""


def _declare(
    function: Callable[..., Any], select: Callable[..., tuple[Wanted, bool]], make: Callable[..., Any]
) -> None:
    """Implements one of these functions.

    Args:
        function: the function.
        select: returns what is wanted, and whether NaN are equal, given the parameters.
        make: makes the result of the list of arrays.
    """

    @implements(function, "algorithm")
    def algorithm(x: Any, *params: Any) -> Any:
        return make(*_unique(x, function.__name__, *select(*params)))

    @implements(function, "kernel")
    def on_device(xp: Any, context: None, x: Any, **params: Any) -> Any:
        wanted, equal_nan = select(*params.values())
        flat = xp.reshape(x, (-1,))
        values, *others = _on_host(flat, wanted, equal_nan) if xp is np else _distinct(xp, flat, wanted, equal_nan)
        if wanted[1]:
            others[wanted[0]] = xp.reshape(others[wanted[0]], x.shape)
        return make(values, *others)


_declare(unique_all, lambda: ((True, True, True), False), UniqueAll)
_declare(unique_counts, lambda: ((False, False, True), False), UniqueCounts)
_declare(unique_inverse, lambda: ((False, True, False), False), UniqueInverse)
_declare(unique_values, lambda: ((False, False, False), False), lambda values: values)
_declare(
    unique,
    lambda index, inverse, counts, equal_nan: ((bool(index), bool(inverse), bool(counts)), bool(equal_nan)),
    lambda values, *others: (values, *others) if others else values,
)


def _unique(x: Any, name: str, wanted: Wanted, equal_nan: bool) -> list[ShardedTensor]:
    """Returns the distinct values and what is wanted of the indices, the inverse and the counts, in this order."""
    shape: Shape = np.shape(x)
    if not shape:
        one = x[None] if isinstance(x, ShardedTensor) else np.reshape(x, (1,))
        made = _unique(one, name, wanted, equal_nan)
        if wanted[1]:
            made[1 + wanted[0]] = made[1 + wanted[0]][0]
        return made
    rows = Rows(x, name)
    if not rows.backend.shared_memory:
        return _of_shards(rows, shape, x.dtype, wanted, equal_nan)
    whole = rows.whole()
    made = list(_on_host(whole, wanted, equal_nan))
    if is_recording():
        parts = [whole[rows.grid.index(k)] for k in range(len(rows.grid.devices))]
        sizes = [_on_host(part, (False,) * 3, equal_nan)[0].size for part in parts]
        for dtype in (whole.dtype, *["int64"] * (wanted[0] + wanted[2])):
            rows.redistribute(sizes, rows.sharding.with_spec(P()), dtype)
    return list(map(rows.tensor, made))


def _on_host(x: Any, wanted: Wanted, equal_nan: bool) -> Sequence[Any]:
    if x.dtype == np.float16:  # NumPy 2.4.6 does not sort long arrays of them correctly.
        made = _distinct(np, x.reshape(-1), wanted, equal_nan)
        if wanted[1]:
            made[1 + wanted[0]] = made[1 + wanted[0]].reshape(x.shape)
        return made
    flags: Any = dict(zip(("return_index", "return_inverse", "return_counts"), wanted, strict=True))
    found = np.unique(x, **flags, equal_nan=equal_nan)
    return found if isinstance(found, tuple) else (found,)


def _of_shards(rows: Rows, shape: Shape, dtype: Any, wanted: Wanted, equal_nan: bool) -> list[ShardedTensor]:
    """Computes the result on separate memories."""
    inner, count = math.prod(shape[1:]), len(rows.grid.devices)
    begins = [rows.grid.box(k)[0][0] * inner for k in range(count)]
    arrays = rows.shards()

    def local(xp: Any, array: Any, begin: int) -> tuple[Any, ...]:
        values, index, inverse, counts = _distinct(xp, xp.reshape(array, (-1,)), (True,) * 3, equal_nan)
        return values, xp.add(index, begin), inverse, counts

    values, index, inverse, counts = zip(*rows.map(local, arrays, begins), strict=True)
    sizes = [int(v.shape[0]) for v in values]
    everywhere = rows.sharding.with_spec(P())
    columns = [rows.redistribute(sizes, everywhere, dtype, values)]
    columns += [
        rows.redistribute(sizes, everywhere, "int64", column) if use else [None] * count
        for use, column in ((wanted[0], index), (wanted[2], counts))
    ]
    ends = rows.parts(sizes)
    first = [ends.box(k)[0][0] for k in range(count)]
    merge = _Merge(wanted, equal_nan)
    merged = rows.map(merge, *columns, inverse, first, [tuple(a.shape) for a in arrays])
    total = int(merged[0][0].shape[0])
    target = rows.sharding.grid((total,))
    results = []
    for n, column in enumerate(zip(*merged, strict=True)):
        if wanted[1] and n == 1 + wanted[0]:
            results.append(rows.tensor_of_shards(shape, column, "int64"))
            continue
        parts = rows.map(
            lambda xp, array, at: xp.asarray(array[at], copy=True), column, [target.index(k) for k in range(count)]
        )
        results.append(rows.tensor_of_shards((total,), parts, "int64" if n else dtype))
    return results


class _Merge:
    """Finds the distinct values among those of all devices, on each device.

    Args:
        wanted: see `_unique`.
        equal_nan: likewise.
    """

    def __init__(self, wanted: Wanted, equal_nan: bool) -> None:
        self.wanted = wanted
        self.equal_nan = equal_nan

    def __call__(
        self, xp: Any, values: Any, index: Any, counts: Any, inverse: Any, begin: int, shape: Shape
    ) -> list[Any]:
        """Returns the values, and what is wanted of the indices, the inverse of the device's elements, and the counts.

        Args:
            xp: the namespace.
            values: the values of all devices, which are distinct for each device.
            index: the index of the first element of each in the flattened array.
            counts: the number of elements of each on its device.
            inverse: for each element of the device the index of its value among those of the device.
            begin: the index of the first value of the device.
            shape: the shape of the device's shard.
        """
        order, starts = _groups(xp, values, self.equal_nan)
        results = [values[order[starts]]]
        if self.wanted[0]:
            results.append(index[order[starts]])
        if self.wanted[1]:
            ranks = _ranks(xp, order, starts)
            results.append(xp.reshape(ranks[xp.add(inverse, begin)], shape))
        if self.wanted[2]:
            before = xp.concat([xp.zeros((1,), dtype=np.dtype("int64")), xp.cumsum(counts[order], axis=0)])
            results.append(xp.subtract(before[_ends(xp, starts, order)], before[starts]))
        return results


def _distinct(xp: Any, x: Any, wanted: Wanted, equal_nan: bool) -> list[Any]:
    """Returns the distinct values of an array of one dimension on one device, and what is wanted of the indices, the
    inverse and the counts.
    """
    order, starts = _groups(xp, x, equal_nan)
    first = order[starts]
    results = [x[first]]
    if wanted[0]:
        results.append(first)
    if wanted[1]:
        results.append(_ranks(xp, order, starts))
    if wanted[2]:
        results.append(xp.subtract(_ends(xp, starts, order), starts))
    return results


def _groups(xp: Any, x: Any, equal_nan: bool) -> tuple[Any, Any]:
    """Returns the order that sorts an array of one dimension, and the positions in it at which another value begins."""
    order = xp.asarray(xp.argsort(x, stable=True), dtype=np.dtype("int64"))
    ordered = x[order]
    new = xp.not_equal(ordered[1:], ordered[:-1])
    if equal_nan and xp.isdtype(x.dtype, ("real floating", "complex floating")):
        new = xp.logical_and(new, xp.logical_not(xp.logical_and(xp.isnan(ordered[1:]), xp.isnan(ordered[:-1]))))
    first = xp.ones((min(x.shape[0], 1),), dtype=np.dtype("bool"))
    return order, xp.nonzero(xp.concat([first, new]))[0]


def _ranks(xp: Any, order: Any, starts: Any) -> Any:
    """Returns for each element the number of its value, given the result of `_groups`."""
    steps = xp.zeros(order.shape, dtype=np.dtype("int64"))
    steps[starts] = 1
    ranks = xp.empty(order.shape, dtype=np.dtype("int64"))
    ranks[order] = xp.subtract(xp.cumsum(steps, axis=0), 1)
    return ranks


def _ends(xp: Any, starts: Any, order: Any) -> Any:
    end = xp.full((min(starts.shape[0], 1),), order.shape[0], dtype=np.dtype("int64"))
    return xp.concat([starts[1:], end])


# -- membership ------------------------------------------------------------------------------------


def _isin_rule(shapes: Sequence[Shape], **params: Any) -> str:
    return f"..., {' '.join(f'k{d}' for d in range(len(shapes[1])))} -> ..."


@operator(_isin_rule, operands=("x1", "x2"), combine="any", dtype="bool", blocks=False, gathers=_TABLE)
def isin(x1: ArrayLike, x2: ArrayLike, /, *, invert: bool = False) -> ShardedTensor:
    """Tests for each element of x1 whether it is equal to any element of x2. NaN is not.

    The result has x1's shape and dtype bool. x1 keeps its sharding. Where x2 is sharded, each device searches its
    shard, and the results are combined. If the same mesh axis splits both, the smaller one is gathered along it.

    Args:
        x1: a tensor, an array or a scalar.
        x2: likewise, of any shape.
        invert: whether to test that no element is equal.

    >>> st.isin(st.asarray([1, 2, 3]), st.asarray([[3, 1]])).tolist()
    [True, False, True]
    """


@implements(isin, "composite")
def _isin_inverted(x1: Any, x2: Any, invert: bool) -> Any:
    return logical_not(isin(x1, x2)) if invert else NotImplemented


@implements(isin, "kernel")
def _isin(xp: Any, context: ShardContext, x1: Any, x2: Any, *, invert: bool) -> Any:
    return xp.isin(xp.asarray(x1), xp.asarray(x2))
