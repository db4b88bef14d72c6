"""Set functions (a chapter of the array API standard), and NumPy's form of them, `unique`.

Distinct values are in ascending order. In the functions of the standard, every NaN is distinct from every other.

Each device finds the distinct values of its rows. These are divided over the devices by their values, with the counts
and indices that are needed, and merged (see `shardtensor.functions.algorithms.distinct`). The first dimension of each
result is split by the mesh axes that split x. If other dimensions of x than the first are split, the split first moves
to that one. Up to 64 KiB, the first device finds the distinct values of all, and sends the others their parts. The
number of values depends on the elements, so that `eval_shape` cannot infer the results.

Raises:
    ConcretizationError: the elements of x are not known.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from shardtensor.core import call, implements, operator
from shardtensor.functions.algorithms.distinct import Extras, distinct, distinct_of_rows
from shardtensor.functions.algorithms.first_device import is_few, on_first, runs_whole, shares_memory
from shardtensor.functions.algorithms.ragged import Rows
from shardtensor.functions.building.split_search import are_split_alike, isin_sorted
from shardtensor.functions.standard.elementwise import logical_not
from shardtensor.sharding.layout import Shape
from shardtensor.sharding.rules import normalize_axis
from shardtensor.sharding.shard_context import ShardContext
from shardtensor.tensor.operands import shape_of
from shardtensor.tensor.tensor import ArrayLike, ShardedTensor

_DERIVATIVES = "of_ordering"


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


@operator(tags=("escapes",))
def unique_all(x: ArrayLike, /) -> UniqueAll:
    """Returns the distinct values of x in ascending order, with their first indices, their counts, and for each element
    the index of its value.

    The values have x's dtype, and the others dtype int64. ``inverse_indices`` has x's shape; see
    `shardtensor.functions.standard.sets` for the sharding.

    Raises:
        ConcretizationError: the elements of x are not known.

    >>> values, indices, inverse, counts = st.unique_all(st.asarray([7, 2, 7]))
    >>> values.tolist(), indices.tolist(), inverse.tolist(), counts.tolist()
    ([2, 7], [1, 0], [1, 0, 1], [1, 2])
    """


@operator(tags=("escapes",))
def unique_counts(x: ArrayLike, /) -> UniqueCounts:
    """Returns the distinct values of x in ascending order, and the number of elements of each: see `unique_all`.

    >>> values, counts = st.unique_counts(st.asarray([7, 2, 7]))
    >>> values.tolist(), counts.tolist()
    ([2, 7], [1, 2])
    """


@operator(tags=("escapes",))
def unique_inverse(x: ArrayLike, /) -> UniqueInverse:
    """Returns the distinct values of x in ascending order, and for each element the index of its value: see
    `unique_all`.

    >>> values, inverse = st.unique_inverse(st.asarray([7, 2, 7]))
    >>> values[inverse].tolist()
    [7, 2, 7]
    """


@operator(tags=("escapes",))
def unique_values(x: ArrayLike, /) -> ShardedTensor:
    """Returns the distinct values of x in ascending order: see `unique_all`.

    >>> st.unique_values(st.asarray([7, 2, 7])).tolist()
    [2, 7]
    """


@operator(tags=("escapes",))
def unique(
    x: ArrayLike,
    /,
    return_index: bool = False,
    return_inverse: bool = False,
    return_counts: bool = False,
    axis: int | None = None,
    *,
    equal_nan: bool = True,
) -> Any:
    """Returns the distinct values of x in ascending order, as `numpy.unique`, or the distinct slices along an axis.

    Args:
        x: a tensor or a host array.
        return_index: whether the indices of the first elements follow in the result, which is then a tuple.
        return_inverse: whether the index of the value of each element follows, of x's shape.
        return_counts: whether the counts follow.
        axis: the dimension of the slices, which are in lexicographic order (see `lexsort`); None flattens x.
        equal_nan: whether all NaN (or NaT) are one value; slices of several dimensions with NaN are distinct.

    Raises:
        ConcretizationError: the elements of x are not known.

    >>> st.unique(st.asarray([7.0, float("nan"), 7.0, float("nan")])).tolist()
    [7.0, nan]
    >>> st.unique(st.asarray([[1, 0], [0, 5], [1, 0]]), axis=0).tolist()
    [[0, 5], [1, 0]]
    """


@implements(unique, "composite")
def _unique_slices(x: Any, index: bool, inverse: bool, counts: bool, axis: int | None, equal_nan: bool) -> Any:
    if axis is None:
        return NotImplemented
    x = call("asarray", x)
    along = normalize_axis(axis, len(shape_of(x)))
    if len(shape_of(x)) == 1:  # Its slices are elements, of which all NaN can be one value.
        return call("unique", x, index, inverse, counts, equal_nan=equal_nan)
    slices = call("moveaxis", x, along, 0)
    count, *shape = shape_of(slices)
    rows = call("reshape", slices, (count, math.prod(shape)))
    keys = [rows[:, k] for k in range(math.prod(shape) - 1, -1, -1)]
    order = call("lexsort", keys) if keys and count else call("arange", count)
    ordered = rows[order]
    differs = call("any", call("not_equal", ordered[1:], ordered[:-1]), axis=1)
    new = call("concat", [np.ones(min(count, 1), bool), differs])
    starts = call("flatnonzero", new)
    unique_slices = ordered[starts]
    results = [call("moveaxis", call("reshape", unique_slices, (unique_slices.shape[0], *shape)), 0, along)]
    if index:
        results.append(order[starts])
    if inverse:
        ranks = call("subtract", call("cumulative_sum", call("astype", new, np.int64)), 1)
        results.append(call("take", ranks, call("argsort", order)))
    if counts:
        results.append(call("diff", starts, append=np.full(min(count, 1), count)))
    return tuple(results) if len(results) > 1 else results[0]


def _declare(
    function: Callable[..., Any], select: Callable[..., tuple[Extras, bool]], make: Callable[..., Any]
) -> None:
    """Implements one of these functions.

    Args:
        function: the function.
        select: returns the extras, and whether NaN are equal, given the parameters.
        make: makes the result of the list of arrays.
    """

    @implements(function, "algorithm")
    def algorithm(x: Any, *params: Any) -> Any:
        return make(*_unique(x, function.__name__, *select(*params)))

    @implements(function, "announcing")
    def announcing(x: Any, *params: Any) -> Any:
        return make(*_unique(x, function.__name__, *select(*params), announcing=True))

    @implements(function, "kernel")
    def on_device(xp: Any, context: None, x: Any, **params: Any) -> Any:
        return make(*_on_device(xp, x, *select(*params.values())))


_declare(unique_all, lambda: ((True, True, True), False), UniqueAll)
_declare(unique_counts, lambda: ((False, False, True), False), UniqueCounts)
_declare(unique_inverse, lambda: ((False, True, False), False), UniqueInverse)
_declare(unique_values, lambda: ((False, False, False), False), lambda values: values)
_declare(
    unique,
    lambda index, inverse, counts, axis, equal_nan: ((bool(index), bool(inverse), bool(counts)), bool(equal_nan)),
    lambda values, *others: (values, *others) if others else values,
)


def _unique(x: Any, name: str, extras: Extras, equal_nan: bool, announcing: bool = False) -> list[ShardedTensor]:
    """Returns the distinct values and the selected ones of the indices, the inverse and the counts, in this order.

    Where devices share a memory, they find them together, unless the messages of each are needed (``announcing``).
    """
    shape: Shape = shape_of(x)
    if not shape:
        one = x[None] if isinstance(x, ShardedTensor) else np.reshape(x, (1,))
        results = _unique(one, name, extras, equal_nan, announcing)
        if extras[1]:
            results[1 + extras[0]] = results[1 + extras[0]][0]
        return results
    rows = Rows(x, name)
    if rows.backend.on_host and not announcing:
        return list(map(rows.tensor, _on_device(np, rows.whole(), extras, equal_nan)))
    if (shares_memory(x) and not announcing) or (isinstance(x, ShardedTensor) and is_few(x._aval)):
        return on_first(x, lambda xp, array: _on_device(xp, array, extras, equal_nan), rows.sharding, name)
    return distinct_of_rows(rows, shape, x.dtype, extras, equal_nan)


def _on_device(xp: Any, x: Any, extras: Extras, equal_nan: bool) -> Sequence[Any]:
    results = distinct(xp, xp.reshape(x, (-1,)), extras, equal_nan)
    if extras[1]:
        results[1 + extras[0]] = xp.reshape(results[1 + extras[0]], x.shape)
    return results


# -- membership ------------------------------------------------------------------------------------


def _isin_rule(shapes: Sequence[Shape], **params: Any) -> str:
    return f"..., {' '.join(f'k{d}' for d in range(len(shapes[1])))} -> ..."


@operator(_isin_rule, operands=("x1", "x2"), combine="any", dtype="bool", tags=("many kernels", "unblocked"))
def isin(x1: ArrayLike, x2: ArrayLike, /, *, invert: bool = False) -> ShardedTensor:
    """Tests for each element of x1 whether it is equal to any element of x2. NaN is not.

    The result has x1's shape and dtype bool. x1 keeps its sharding. Where x2 is sharded, each device searches its
    shard, and the results are combined (up to 64 KiB, the first device searches all of it). If the same mesh axis
    splits both, x2 is sorted, and the elements of x1 are sent to the devices that hold the parts of x2 in which they
    may be (up to 64 KiB, the smaller one is gathered).

    Args:
        x1: a tensor, an array or a scalar.
        x2: likewise, of any shape.
        invert: whether to test that no element is equal.

    >>> st.isin(st.asarray([1, 2, 3]), st.asarray([[3, 1]])).tolist()
    [True, False, True]
    """


@implements(isin, "composite")
def _isin_composed(x1: Any, x2: Any, invert: bool) -> Any:
    if invert:
        return logical_not(isin(x1, x2))
    if not are_split_alike(x2, x1):
        return NotImplemented
    ordered = call("reshape", x2, (-1,))
    # NumPy's function, which takes elements in any order, finds them in one memory.
    return isin_sorted(x1, ordered if runs_whole(x1) else call("sort", ordered, stable=False))


implements(isin, "small")(lambda x1, x2, invert: np.isin(x1, x2, invert=invert))


@implements(isin, "kernel")
def _isin(xp: Any, context: ShardContext, x1: Any, x2: Any, *, invert: bool) -> Any:
    return xp.isin(xp.asarray(x1), xp.asarray(x2))
