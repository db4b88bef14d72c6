"""Declarations of the searching functions (a chapter of the array API standard)."""

from __future__ import annotations

from shardtensor.core import implements, operator
from shardtensor.host import blockwise
from shardtensor.sharding.rules import arg_extremum
from shardtensor.tensor.tensor import ArrayLike, ShardedTensor


@operator(arg_extremum, combine="argmax")
def argmax(x: ArrayLike, /, axis: int | None = None, *, keepdims: bool = False) -> ShardedTensor:
    """Returns the index of the greatest element along ``axis``: of the first one on a tie, or of the first NaN.

    The result has x's shape without ``axis`` and NumPy's index dtype, int64. The remaining dimensions keep their
    sharding. Where ``axis`` is sharded, each device finds its own maximum, the (value, index) pairs are combined in
    mesh order, and the result is replicated along the mesh axes that shard ``axis``.

    Args:
        x: a tensor or a host array.
        axis: the dimension to search; None searches all elements and returns the index into the flattened array.
        keepdims: whether the searched dimensions remain, with size 1.

    Raises:
        AxisError: x has no such axis.
        ShapeError: there are no elements to search along ``axis``.

    >>> st.argmax(st.asarray([[1, 9], [7, 9]]), axis=1).tolist(), st.argmax(st.asarray([[1, 9], [7, 9]])).item()
    ([1, 1], 1)
    """


@operator(arg_extremum, combine="argmin")
def argmin(x: ArrayLike, /, axis: int | None = None, *, keepdims: bool = False) -> ShardedTensor:
    """Returns the index of the least element along ``axis``: of the first one on a tie, or of the first NaN.

    Arguments, dtype, sharding and errors are those of `argmax`.

    >>> st.argmin(st.asarray([3, 1, 2, 1])).item()
    1
    """


@operator("..., ..., ... -> ...", keeps_arrays=True)
def where(condition: ArrayLike, x1: ArrayLike, x2: ArrayLike, /) -> ShardedTensor:
    """Selects elements of x1 where ``condition`` is true and elements of x2 elsewhere.

    The operands broadcast against one another, and the result has the dtype to which x1 and x2 are promoted. Its
    sharding is that of the operands; where they differ, the operands that are cheapest to move are transferred.

    Args:
        condition: an array of bools, or of any dtype whose elements are true unless they are zero.
        x1: a tensor, an array or a scalar.
        x2: likewise.

    Raises:
        ShapeError: the shapes do not broadcast.

    >>> st.where(st.asarray([True, False]), st.asarray([1.0, 2.0]), 0).tolist()
    [1.0, 0.0]
    """


implements(where, "blockwise")(blockwise.where)
