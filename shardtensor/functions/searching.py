"""Searching functions (a chapter of the standard), declared."""

from __future__ import annotations

from shardtensor.core import operator
from shardtensor.sharding.rules import arg_extremum
from shardtensor.tensor.tensor import ArrayLike, ShardedTensor


@operator(arg_extremum, combine="argmax")
def argmax(x: ArrayLike, /, *, axis: int | None = None, keepdims: bool = False) -> ShardedTensor:
    """The index of the greatest element along ``axis``; of the first one, if several are; of the first NaN, if there
    is one.

    Without an axis, the index in the flattened array. The layout of the dimensions that stay is kept.

    Raises:
        AxisError: x has no such axis.
        ShapeError: there are no elements to choose from.

    >>> st.argmax(st.asarray([[1, 9], [7, 9]]), axis=1).tolist(), st.argmax(st.asarray([[1, 9], [7, 9]])).item()
    ([1, 1], 1)
    """


@operator(arg_extremum, combine="argmin")
def argmin(x: ArrayLike, /, *, axis: int | None = None, keepdims: bool = False) -> ShardedTensor:
    """The index of the least element along ``axis``: as `argmax`, of the least.

    >>> st.argmin(st.asarray([3, 1, 2, 1])).item()
    1
    """


@operator("..., ..., ... -> ...")
def where(condition: ArrayLike, x1: ArrayLike, x2: ArrayLike, /) -> ShardedTensor:
    """Elements of x1 where the condition holds, of x2 where it does not. All three broadcast; the layout follows them.

    Raises:
        ShapeError: the shapes do not broadcast.

    >>> st.where(st.asarray([True, False]), st.asarray([1.0, 2.0]), 0).tolist()
    [1.0, 0.0]
    """
