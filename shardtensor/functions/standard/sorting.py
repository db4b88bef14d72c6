"""Sorting functions: a chapter of the array API standard, and NumPy's partitions and sorts by several keys.

NaN is greater than all numbers, and complex numbers are ordered by their real parts, then by their imaginary parts, as
in NumPy. Along a split dimension, the devices sort their parts and exchange pieces, or whole lines where there are many
(see `shardtensor.functions.algorithms.sample_sort`). Up to 64 KiB, the first device sorts all elements and sends the
others their parts. Results have x's sharding.

Raises:
    AxisError: x has no such axis.
    ArgumentTypeError: an axis is not an integer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from shardtensor.core import call, implements, operator
from shardtensor.errors import ArgumentError, ArgumentTypeError, ShapeError
from shardtensor.functions.algorithms.distributed import Whole, distributed
from shardtensor.functions.algorithms.first_device import GATHERED
from shardtensor.functions.algorithms.sample_sort import Order, sample_sort
from shardtensor.functions.algorithms.shards import MeshCommunicator, Shards
from shardtensor.functions.algorithms.top_k import greatest, top_k
from shardtensor.functions.standard.manipulation import reshape
from shardtensor.functions.standard.take_along import take_along_axis
from shardtensor.host.units import counted
from shardtensor.sharding.layout import Shape
from shardtensor.sharding.rules import normalize_axis
from shardtensor.sharding.shard_context import ShardContext
from shardtensor.tensor.operands import integer_from, shape_of
from shardtensor.tensor.tensor import ArrayLike, ShardedTensor
from shardtensor.tensor.value import Aval, aval

_DERIVATIVES = "of_ordering"


@operator()
def sort(x: ArrayLike, /, *, axis: int | None = -1, descending: bool = False, stable: bool = True) -> ShardedTensor:
    """Returns the elements of x in ascending order along ``axis``.

    The result has x's shape, dtype and sharding; see `shardtensor.functions.standard.sorting` where ``axis`` is split.

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


@operator()
def argsort(x: ArrayLike, /, *, axis: int | None = -1, descending: bool = False, stable: bool = True) -> ShardedTensor:
    """Returns the indices that sort x along ``axis``, so that ``take_along_axis(x, indices, axis=axis)`` is sorted.

    The result has x's shape and dtype int64. Arguments, sharding and errors are those of `sort`; the order of equal
    elements is only unspecified where ``stable`` is false.

    >>> st.argsort(st.asarray([3, 1, 2, 1])).tolist(), st.argsort(st.asarray([3, 1, 2, 1]), descending=True).tolist()
    ([1, 3, 2, 0], [0, 2, 1, 3])
    """


@operator()
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
        ArgumentTypeError: ``kth`` has other elements than integers.

    >>> st.partition(st.asarray([5, 1, 4, 2, 3]), 2)[2].item()
    3
    """


@operator()
def argpartition(x: ArrayLike, /, kth: int | tuple[int, ...], *, axis: int | None = -1) -> ShardedTensor:
    """Returns the indices that `partition` x along ``axis``, of dtype int64.

    >>> x = st.asarray([5, 1, 4, 2, 3])
    >>> x[st.argpartition(x, 2)[2]].item()
    3
    """


def _declare(function: Callable[..., Any], indices: bool) -> None:
    """Implements `sort` or `argsort`."""

    @implements(function, "composite")
    def flat(x: Any, axis: int | None, descending: bool, stable: bool) -> Any:
        if axis is not None:
            return NotImplemented
        return function(reshape(x, (-1,)), axis=0, descending=descending, stable=stable)

    @implements(function, "kernel")
    def on_device(xp: Any, context: None, x: Any, *, axis: int, descending: bool, stable: bool) -> Any:
        return Order(descending, stable, indices).apply(xp, x, normalize_axis(axis, x.ndim))

    def whole(value: Aval, *, axis: int, descending: bool, stable: bool) -> Whole:
        along, order = normalize_axis(axis, value.ndim), Order(descending, stable, indices)
        result = aval(value.shape, _INT if indices else value.dtype, value.sharding, value.committed)
        return Whole(result, lambda xp, x: order.apply(xp, x, along), (along,))

    @distributed(function, whole=whole, messages="by elements")
    def ordered(
        x: Shards, along: Callable[[int], MeshCommunicator], *, axis: int, descending: bool, stable: bool
    ) -> Shards:
        return sample_sort(x, along, normalize_axis(axis, x.value.ndim), Order(descending, stable, indices))


_INT = np.dtype("int64")

_declare(sort, indices=False)
_declare(argsort, indices=True)


def _declare_partition(function: Callable[..., Any], indices: bool) -> None:
    """Implements `partition` or `argpartition`. Along a split dimension the algorithm is that of `sort`, since all
    elements that change devices travel in both cases.
    """
    order = Order(stable=False, indices=indices)

    @implements(function, "composite")
    def of_integers(x: Any, kth: Any, axis: int | None) -> Any:
        if axis is None:
            return function(reshape(x, (-1,)), kth, axis=0)
        if isinstance(kth, np.ndarray) and kth.ndim:
            ranks = _check_kth(kth, shape_of(x), normalize_axis(axis, len(shape_of(x)))).ravel().tolist()
            return function(x, tuple(ranks or [0]), axis=axis)  # Without indices, any order is correct.
        return NotImplemented

    @implements(function, "kernel")
    def on_device(xp: Any, context: ShardContext | None, x: Any, *, kth: Any, axis: int) -> Any:
        ranks, along = _check_kth(kth, x.shape, axis), normalize_axis(axis, x.ndim)
        if xp is np:
            return (np.argpartition if indices else np.partition)(x, ranks, axis=along)
        return order.apply(xp, x, along)

    def whole(value: Aval, *, kth: Any, axis: int) -> Whole:
        along = normalize_axis(axis, value.ndim)
        _check_kth(kth, value.shape, along)
        result = aval(value.shape, _INT if indices else value.dtype, value.sharding, value.committed)
        return Whole(result, lambda xp, x: on_device(xp, None, x, kth=kth, axis=along), (along,))

    @distributed(function, whole=whole, messages="by elements")
    def parted(x: Shards, along: Callable[[int], MeshCommunicator], *, kth: Any, axis: int) -> Shards:
        result, compute, (dimension,) = whole(x.value, kth=kth, axis=axis)
        if x.value.grid.counts[dimension] > 1:
            return sample_sort(x, along, dimension, order)
        return x.map(compute, shape=lambda shape: shape, dtype=result.dtype).assembled(result)


_declare_partition(partition, indices=False)
_declare_partition(argpartition, indices=True)


# -- on one device ---------------------------------------------------------------------------------


def _check_kth(kth: Any, shape: Shape, axis: int) -> Any:
    """Returns the indices of a partition as a host array.

    Raises:
        ArgumentTypeError: they are not integers.
        ArgumentError: an index is out of bounds, and there are elements.
    """
    ranks, size = np.asarray(kth), shape[axis]
    if ranks.dtype.kind not in "iu":
        raise ArgumentTypeError(f"kth is {kth!r:.60}; wanted integers")
    for k in ranks.ravel().tolist():
        if not -size <= k < size and 0 not in shape:
            raise ArgumentError(f"kth {k} is out of bounds for {counted(size, 'element')}")
    return ranks


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
    with size ``k`` along ``axis``, and x's sharding; their dtypes are that of x and int64. Where ``axis`` is split, the
    devices exchange only the greatest elements of their parts (`shardtensor.functions.algorithms.top_k`), unless ``k``
    is so large that x is sorted; up to 64 KiB, the first device selects them from all elements.

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
def _topk_of_most(x: Any, k: int, axis: int) -> Any:
    """Sorts x, where gathering the greatest elements of all devices would gather more than a share of x."""
    if not isinstance(x, ShardedTensor) or x._aval.nbytes <= GATHERED:
        return NotImplemented
    along, k = normalize_axis(axis, x.ndim), integer_from(0, k, "k")
    parts = x._aval.grid.counts[along]
    if parts == 1 or not x.shape[along] < k * parts <= x.shape[along] * parts:
        return NotImplemented
    first = (slice(None),) * along + (slice(k),)
    indices = call("getitem", argsort(x, axis=along, descending=True), first)
    return TopK(take_along_axis(x, indices, axis=along), call("copy", indices))


def _count(k: Any, size: int, along: int) -> int:
    """Returns ``k`` as an integer.

    Raises:
        ArgumentTypeError, ArgumentError: it is none, or out of range.
    """
    count = integer_from(0, k, "k")
    if count > size:
        raise ArgumentError(f"k is {count}; wanted 0 to {size}, the size of dimension {along}")
    return count


def _top_avals(value: Aval, *, k: int, axis: int) -> TopK:
    along = normalize_axis(axis, value.ndim)
    k = _count(k, value.shape[along], along)
    shape = (*value.shape[:along], k, *value.shape[along + 1 :])
    return TopK(*[aval(shape, dtype, value.sharding, value.committed) for dtype in (value.dtype, _INT)])


@implements(topk, "kernel")
def _topk_on_device(xp: Any, context: None, x: Any, *, k: int, axis: int) -> TopK:
    along = normalize_axis(axis, x.ndim)
    k = _count(k, x.shape[along], along)
    indices = greatest(xp, x, k, along)
    return TopK(xp.take_along_axis(x, indices, axis=along), indices)


def _top_of_whole(value: Aval, *, k: int, axis: int) -> Whole:
    along = normalize_axis(axis, value.ndim)
    return Whole(
        _top_avals(value, k=k, axis=axis), lambda xp, x: _topk_on_device(xp, None, x, k=k, axis=along), (along,)
    )


@distributed(topk, whole=_top_of_whole, messages="move")
def _topk(x: Shards, along: Callable[[int], MeshCommunicator], *, k: int, axis: int) -> TopK:
    avals = _top_avals(x.value, k=k, axis=axis)
    return TopK(*top_k(x, along, normalize_axis(axis, x.value.ndim), k, *avals))


@operator(variadic=True)
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


implements(lexsort, "small")(np.lexsort)


@implements(lexsort, "composite")
def _lexsort(keys: Sequence[Any], axis: int) -> Any:
    shapes = [shape_of(key) for key in keys]
    if not shapes or set(shapes) != {shapes[0]}:
        raise ShapeError(f"keys have shapes {shapes}; wanted one or more of the same shape")
    along = normalize_axis(axis, len(shapes[0]))
    order = argsort(keys[0], axis=along)
    for key in keys[1:]:
        step = argsort(take_along_axis(key, order, axis=along), axis=along)
        order = take_along_axis(order, step, axis=along)
    return order
