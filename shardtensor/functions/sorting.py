"""Sorting functions: a chapter of the array API standard, and NumPy's partitions and sorts by several keys.

NaN is greater than all numbers, and complex numbers are ordered by their real parts, then by their imaginary parts, as
in NumPy. The sorted dimension must not be split. Where it is, the split moves to the largest other dimension that is
not split (an all-to-all). If there is none, each device gathers the elements along the mesh axes that split it, and
keeps its part of the result, which then has x's sharding.

Raises:
    AxisError: x has no such axis.
    ArgumentTypeError: an axis is not an integer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from shardtensor.core import implements, operator
from shardtensor.errors import ArgumentError, ShapeError
from shardtensor.functions.indexing import take_along_axis
from shardtensor.functions.manipulation import reshape
from shardtensor.sharding.layout import Shape
from shardtensor.sharding.rules import normalize_axis
from shardtensor.sharding.shard_context import ShardContext
from shardtensor.tensor.tensor import ArrayLike, ShardedTensor


def _along_rule(shapes: Sequence[Shape], *, axis: int = -1, **params: Any) -> str:
    ndim = len(shapes[0])
    along = normalize_axis(axis, ndim)
    names = [f"d{i}" for i in range(ndim)]
    return f"{' '.join([f'{n}!' if d == along else n for d, n in enumerate(names)])} -> {' '.join(names)}"


_SORTED = "a line that no other dimension can split is sorted whole"


@operator(_along_rule, gathers=_SORTED)
def sort(x: ArrayLike, /, *, axis: int | None = -1, descending: bool = False, stable: bool = True) -> ShardedTensor:
    """Returns the elements of x in ascending order along ``axis``.

    The result has x's shape and dtype. The other dimensions keep their sharding; see `shardtensor.functions.sorting`
    where ``axis`` is split.

    Args:
        x: a tensor or a host array.
        axis: the dimension to sort; None sorts the flattened array, as in NumPy.
        descending: whether the order is descending, so that NaN comes first.
        stable: whether elements that are equal, such as 0.0 and -0.0, keep their order.

    Raises:
        AxisError: x has no such axis.

    >>> st.sort(st.asarray([3.0, float("nan"), 1.0])).tolist()
    [1.0, 3.0, nan]
    """


@operator(_along_rule, dtype="int64", gathers=_SORTED)
def argsort(x: ArrayLike, /, *, axis: int | None = -1, descending: bool = False, stable: bool = True) -> ShardedTensor:
    """Returns the indices that sort x along ``axis``, so that ``take_along_axis(x, indices, axis=axis)`` is sorted.

    The result has x's shape and dtype int64. Arguments, sharding and errors are those of `sort`; the order of equal
    elements is only unspecified where ``stable`` is false.

    >>> st.argsort(st.asarray([3, 1, 2, 1])).tolist(), st.argsort(st.asarray([3, 1, 2, 1]), descending=True).tolist()
    ([1, 3, 2, 0], [0, 2, 1, 3])
    """


@operator(_along_rule, gathers=_SORTED)
def partition(x: ArrayLike, /, kth: int | tuple[int, ...], *, axis: int | None = -1) -> ShardedTensor:
    """Returns the elements of x, rearranged along ``axis`` so that element ``kth`` is the one that a sorted array has
    there, with no greater one before it and no smaller one behind it.

    Arguments, sharding and errors are those of `sort`. The order of the other elements is unspecified.

    Args:
        x: a tensor or a host array.
        kth: an index along ``axis``, or several.
        axis: the dimension; None partitions the flattened array.

    Raises:
        ArgumentError: ``kth`` is out of bounds.

    >>> st.partition(st.asarray([5, 1, 4, 2, 3]), 2)[2].item()
    3
    """


@operator(_along_rule, dtype="int64", gathers=_SORTED)
def argpartition(x: ArrayLike, /, kth: int | tuple[int, ...], *, axis: int | None = -1) -> ShardedTensor:
    """Returns the indices that `partition` x along ``axis``, of dtype int64.

    >>> x = st.asarray([5, 1, 4, 2, 3])
    >>> x[st.argpartition(x, 2)[2]].item()
    3
    """


@implements(sort, "composite")
def _sort_flat(x: Any, axis: int | None, descending: bool, stable: bool) -> Any:
    if axis is not None:
        return NotImplemented
    return sort(reshape(x, (-1,)), axis=0, descending=descending, stable=stable)


@implements(argsort, "composite")
def _argsort_flat(x: Any, axis: int | None, descending: bool, stable: bool) -> Any:
    if axis is not None:
        return NotImplemented
    return argsort(reshape(x, (-1,)), axis=0, descending=descending, stable=stable)


@implements(partition, "composite")
def _partition_flat(x: Any, kth: Any, axis: int | None) -> Any:
    return NotImplemented if axis is not None else partition(reshape(x, (-1,)), kth, axis=0)


@implements(argpartition, "composite")
def _argpartition_flat(x: Any, kth: Any, axis: int | None) -> Any:
    return NotImplemented if axis is not None else argpartition(reshape(x, (-1,)), kth, axis=0)


# -- on one device ---------------------------------------------------------------------------------


@implements(sort, "kernel")
def _sort(xp: Any, context: ShardContext, x: Any, *, axis: int, descending: bool, stable: bool) -> Any:
    if descending:  # Equal elements, which are reversed twice, keep their order.
        return xp.flip(_sorted(xp, xp.flip(x, axis=axis), axis, stable), axis=axis)
    return _sorted(xp, x, axis, stable)


def _sorted(xp: Any, x: Any, axis: int, stable: bool) -> Any:
    if xp is not np or x.dtype.kind == "c":
        return xp.sort(x, axis=axis, stable=stable)
    if x.dtype == np.float16:  # NumPy's other algorithm leaves long arrays unsorted on some processors (2.4.6).
        return np.sort(x, axis=axis, stable=True)
    # NumPy's other algorithms are up to ten times as fast. The only real numbers that are equal and differ are zeros.
    result = np.sort(x, axis=axis)
    if stable and x.dtype.kind == "f" and _has_zeros(result):
        lines, ordered = np.moveaxis(x, axis, -1), np.moveaxis(result, axis, -1)
        ordered[ordered == 0] = lines[lines == 0]
    return result


def _has_zeros(x: Any) -> bool:
    """Whether an array, which is sorted if it has one dimension, has several zeros."""
    if x.ndim > 1:
        return bool(np.count_nonzero(x) < x.size - 1)
    return bool(np.searchsorted(x, 0, side="right") - np.searchsorted(x, 0) > 1)


@implements(argsort, "kernel")
def _argsort(xp: Any, context: ShardContext, x: Any, *, axis: int, descending: bool, stable: bool) -> Any:
    if not descending:
        return xp.argsort(x, axis=axis, stable=stable)
    last = x.shape[axis] - 1
    return last - xp.flip(xp.argsort(xp.flip(x, axis=axis), axis=axis, stable=stable), axis=axis)


@implements(partition, "kernel")
def _partition(xp: Any, context: ShardContext, x: Any, *, kth: Any, axis: int) -> Any:
    _check_kth(kth, x.shape[axis])
    return np.partition(x, kth, axis=axis) if xp is np else xp.sort(x, axis=axis, stable=False)


@implements(argpartition, "kernel")
def _argpartition(xp: Any, context: ShardContext, x: Any, *, kth: Any, axis: int) -> Any:
    _check_kth(kth, x.shape[axis])
    return np.argpartition(x, kth, axis=axis) if xp is np else xp.argsort(x, axis=axis, stable=False)


def _check_kth(kth: Any, size: int) -> None:
    """Raises ArgumentError if an index is out of bounds, as NumPy's ValueError."""
    for k in kth if isinstance(kth, tuple) else (kth,):
        if not -size <= k < size:
            raise ArgumentError(f"kth {k} is out of bounds for {size} elements")


# -- compositions ----------------------------------------------------------------------------------


class TopK(NamedTuple):
    """The result of `topk`.

    Attributes:
        values: the greatest elements, in descending order.
        indices: their indices along the axis.
    """

    values: Any
    indices: Any


@operator()
def topk(x: ArrayLike, /, k: int, *, axis: int = -1) -> TopK:
    """Returns the ``k`` greatest elements of x along ``axis``, in descending order, and their indices.

    Of equal elements, those with the smallest indices are taken; NaN is the greatest value. Both results have x's shape
    with size ``k`` along ``axis``; their dtypes are that of x and int64, and their sharding is that of `sort`, except
    that the indices are replicated if x has to be gathered.

    Args:
        x: a tensor or a host array.
        k: the number of elements.
        axis: the dimension.

    Raises:
        AxisError: x has no such axis.
        ArgumentError: ``k`` is negative or greater than the size of the dimension.

    >>> values, indices = st.topk(st.asarray([3, 9, 7, 9]), 3)
    >>> values.tolist(), indices.tolist()
    ([9, 9, 7], [1, 3, 2])
    """


@implements(topk, "composite")
def _topk(x: Any, k: int, axis: int) -> TopK:
    indices = topk_indices(x, k, axis=axis)
    return TopK(take_along_axis(x, indices, axis=axis), indices)


def _topk_rule(shapes: Sequence[Shape], *, k: int, axis: int) -> tuple[str, Shape]:
    (shape,) = shapes
    along = normalize_axis(axis, len(shape))
    if not 0 <= k <= shape[along]:
        raise ArgumentError(f"k is {k}; wanted 0 to {shape[along]}, the size of dimension {along}")
    operand = _along_rule(shapes, axis=axis).partition(" -> ")[0]
    result = ["top" if d == along else f"d{d}" for d in range(len(shape))]
    return f"{operand} -> {' '.join(result)}", (*shape[:along], k, *shape[along + 1 :])


@operator(_topk_rule, dtype="int64", error_name="topk", gathers=_SORTED)
def topk_indices(x: ArrayLike, /, k: int, *, axis: int = -1) -> ShardedTensor:
    """Returns the indices of the ``k`` greatest elements of x along ``axis``: see `topk`.

    >>> from shardtensor.functions.sorting import topk_indices
    >>> topk_indices(st.asarray([3, 9, 7, 9]), 3).tolist()
    [1, 3, 2]
    """


_SELECTED_FROM = 1 << 12
"""Elements of a line from which its greatest ones are selected before they are sorted."""


@implements(topk_indices, "kernel")
def _topk_indices(xp: Any, context: ShardContext, x: Any, *, k: int, axis: int) -> Any:
    if xp is np and x.shape[axis] >= max(_SELECTED_FROM, 8 * k) and k:
        return np.apply_along_axis(_greatest, axis, x, k)
    first = (slice(None),) * (axis % x.ndim) + (slice(k),)
    return xp.asarray(_argsort(xp, context, x, axis=axis, descending=True, stable=True)[first], copy=True)


def _greatest(x: Any, k: int) -> Any:
    """Returns the indices of the greatest elements of one line."""
    least = np.partition(x, len(x) - k)[len(x) - k]
    nan = least.dtype.kind in "fc" and np.isnan(least)
    with np.errstate(invalid="ignore"):  # NaN is not less than any number.
        greater = np.zeros(0, np.int64) if nan else np.flatnonzero(~(x <= least))
    equal = np.flatnonzero(np.isnan(x) if nan else x == least)[: k - len(greater)]
    chosen = np.sort(np.concatenate([greater, equal]))
    order = len(chosen) - 1 - np.argsort(x[chosen][::-1], stable=True)[::-1]
    return chosen[order]


@operator(variadic=True, gathers=_SORTED)
def lexsort(keys: Sequence[ArrayLike], /, *, axis: int = -1) -> ShardedTensor:
    """Returns the indices, of dtype int64, that sort by several keys along ``axis``: by the last one, then by the one
    before it, and so on.

    The sort is stable; the sharding is that of `argsort` of each key.

    Args:
        keys: a sequence of tensors or host arrays of the same shape; an array is the sequence of its rows.
        axis: the dimension to sort.

    Raises:
        AxisError: the keys have no such axis.
        ShapeError: there are no keys, or their shapes differ.

    >>> st.lexsort([st.asarray([9, 4, 0, 4]), st.asarray([1, 5, 1, 5])]).tolist()
    [2, 0, 1, 3]
    """


@implements(lexsort, "composite")
def _lexsort(keys: Sequence[Any], axis: int) -> Any:
    shapes = [tuple(np.shape(key)) for key in keys]
    if not shapes or set(shapes) != {shapes[0]}:
        raise ShapeError(f"keys have shapes {shapes}; wanted one or more of the same shape")
    along = normalize_axis(axis, len(shapes[0]))
    order = argsort(keys[0], axis=along)
    for key in keys[1:]:
        step = argsort(take_along_axis(key, order, axis=along), axis=along)
        order = take_along_axis(order, step, axis=along)
    return order
