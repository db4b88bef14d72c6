"""NumPy's operations on sets, which are arrays of distinct values in ascending order.

They are composed of `unique` and `isin`: each device finds the distinct values of its part, and only these are
gathered. The number of values depends on the elements, so that `eval_shape` cannot infer the results.
"""

from __future__ import annotations

from typing import Any

from shardtensor.core import call, composition
from shardtensor.functions.numpy.comparisons import array_like
from shardtensor.functions.standard.data_types import astype, result_type
from shardtensor.functions.standard.joining import concat
from shardtensor.functions.standard.sets import isin, unique
from shardtensor.functions.standard.sorting import sort
from shardtensor.tensor.tensor import ArrayLike, ShardedTensor


def _flat(x: Any, caller: str) -> Any:
    return call("reshape", call("asarray", array_like(x, caller)), (-1,))


@composition()
def intersect1d(ar1: ArrayLike, ar2: ArrayLike, assume_unique: bool = False, return_indices: bool = False) -> Any:
    """Returns the distinct values that two arrays have in common.

    Args:
        ar1, ar2: tensors, arrays or lists, which are flattened.
        assume_unique: whether the values of each array are known to be distinct.
        return_indices: whether the indices of the first of these values in both arrays follow in the result, which is
            then a tuple.

    >>> st.intersect1d(st.asarray([1, 3, 4, 3]), [3, 1, 2]).tolist()
    [1, 3]
    """
    x, y = _flat(ar1, "intersect1d"), _flat(ar2, "intersect1d")
    dtype = result_type(x, y)
    if not return_indices:
        values = sort(x) if assume_unique else unique(x)
        return astype(values[isin(values, y)], dtype, copy=False)
    values, first = unique(x, return_index=True)
    others, second = unique(y, return_index=True)
    common, theirs = isin(values, others), isin(others, values)
    return astype(values[common], dtype, copy=False), first[common], second[theirs]


@composition()
def union1d(ar1: ArrayLike, ar2: ArrayLike) -> ShardedTensor:
    """Returns the distinct values of two arrays.

    >>> st.union1d(st.asarray([3, 1]), [2, 1]).tolist()
    [1, 2, 3]
    """
    return unique(concat([_flat(x, "union1d") for x in (ar1, ar2)]))  # type: ignore[no-any-return]


@composition()
def setdiff1d(ar1: ArrayLike, ar2: ArrayLike, assume_unique: bool = False) -> ShardedTensor:
    """Returns the distinct values of ``ar1`` that are not in ``ar2``; if they are known to be distinct, in their order.

    >>> st.setdiff1d(st.asarray([3, 2, 1, 3]), [2]).tolist()
    [1, 3]
    """
    x, y = _flat(ar1, "setdiff1d"), _flat(ar2, "setdiff1d")
    values: Any = x if assume_unique else unique(x)
    return values[isin(values, y, invert=True)]  # type: ignore[no-any-return]


@composition()
def setxor1d(ar1: ArrayLike, ar2: ArrayLike, assume_unique: bool = False) -> ShardedTensor:
    """Returns the distinct values that are in exactly one of two arrays.

    >>> st.setxor1d(st.asarray([1, 2, 3]), [3, 4]).tolist()
    [1, 2, 4]
    """
    x, y = [_flat(x, "setxor1d") if assume_unique else unique(_flat(x, "setxor1d")) for x in (ar1, ar2)]
    return sort(concat([x[isin(x, y, invert=True)], y[isin(y, x, invert=True)]]))
