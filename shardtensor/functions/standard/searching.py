"""Declarations of the searching functions (a chapter of the array API standard), and of NumPy's forms of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, overload

import numpy as np

from shardtensor.core import call, implements, operator
from shardtensor.errors import ArgumentError, ArgumentTypeError, ShapeError
from shardtensor.functions.algorithms.first_device import on_first, shares_memory
from shardtensor.functions.algorithms.ragged import Rows as _Rows
from shardtensor.functions.standard.indexing import take as _take
from shardtensor.functions.standard.joining import stack as _stack
from shardtensor.functions.standard.manipulation import reshape as _reshape
from shardtensor.host import blockwise, host_searching
from shardtensor.host.units import counted
from shardtensor.sharding.layout import Shape, Where
from shardtensor.sharding.rules import arg_extremum, reduction
from shardtensor.sharding.shard_context import ShardContext
from shardtensor.tensor.operands import shape_of
from shardtensor.tensor.tensor import ArrayLike, ShardedTensor

_DERIVATIVES = "of_elementwise"


@operator(arg_extremum, combine="argmax")
def argmax(
    x: ArrayLike, /, axis: int | None = None, *, keepdims: bool = False, out_sharding: Where | None = None
) -> ShardedTensor:
    """Returns the index of the greatest element along ``axis``: of the first one on a tie, or of the first NaN.

    The result has x's shape without ``axis`` and NumPy's index dtype, int64. The remaining dimensions keep their
    sharding. Where ``axis`` is sharded, each device finds its own maximum, the (value, index) pairs are combined in
    mesh order, and the result is replicated along the mesh axes that shard ``axis``.

    Args:
        x: a tensor or a host array.
        axis: the dimension to search; None searches all elements and returns the index into the flattened array.
        keepdims: whether the searched dimensions remain, with size 1.
        out_sharding: the sharding of the result: see `shardtensor.functions.standard.statistical`.

    Raises:
        AxisError: x has no such axis.
        ShapeError: there are no elements to search along ``axis``.

    >>> st.argmax(st.asarray([[1, 9], [7, 9]]), axis=1).tolist(), st.argmax(st.asarray([[1, 9], [7, 9]])).item()
    ([1, 1], 1)
    """


@operator(arg_extremum, combine="argmin")
def argmin(
    x: ArrayLike, /, axis: int | None = None, *, keepdims: bool = False, out_sharding: Where | None = None
) -> ShardedTensor:
    """Returns the index of the least element along ``axis``: of the first one on a tie, or of the first NaN.

    Arguments, dtype, sharding and errors are those of `argmax`.

    >>> st.argmin(st.asarray([3, 1, 2, 1])).item()
    1
    """


@overload
def where(condition: ArrayLike, /) -> tuple[ShardedTensor, ...]: ...


@overload
def where(condition: ArrayLike, x1: ArrayLike, x2: ArrayLike, /) -> ShardedTensor: ...


@operator("..., ..., ... -> ...", tags=("in kernels", "keeps arrays", "linear in the others"))
def where(condition: ArrayLike, x1: ArrayLike | None = None, x2: ArrayLike | None = None, /) -> Any:
    """Selects elements of x1 where ``condition`` is true and elements of x2 elsewhere.

    The operands broadcast against one another, and the result has the dtype to which x1 and x2 are promoted. It has the
    sharding of the operands. If their shardings differ, the operands that are cheapest to move are transferred.
    Without x1 and x2, the result is that of `shardtensor.nonzero`, as in NumPy.

    Args:
        condition: an array of bools, or of any dtype whose elements are true unless they are zero.
        x1: a tensor, an array or a scalar.
        x2: likewise.

    Raises:
        ShapeError: the shapes do not broadcast.
        ArgumentTypeError: only one of x1 and x2 is given.

    >>> st.where(st.asarray([True, False]), st.asarray([1.0, 2.0]), 0).tolist()
    [1.0, 0.0]
    >>> st.where(st.asarray([True, False, True]))[0].tolist()
    [0, 2]
    """


implements(where, "blockwise")(blockwise.where)


@implements(where, "composite")
def _check_choices(condition: Any, x1: Any, x2: Any) -> Any:
    """Returns the indices of a condition without choices, and raises OverflowError where this version of NumPy does:
    other libraries wrap integers that do not fit around.
    """
    if x1 is None and x2 is None:
        return nonzero(condition)
    if x1 is None or x2 is None:
        name = "x1" if x1 is None else "x2"
        raise ArgumentTypeError(f"{name} is None; wanted a tensor, an array or a scalar, or neither x1 nor x2")
    for number, other in ((x1, x2), (x2, x1)):
        if type(number) is int and not 0 <= number < 128 and isinstance(other, ShardedTensor):
            np.where(np.empty(0, bool), np.empty(0, other.dtype), number)
    return NotImplemented


# -- counts and positions --------------------------------------------------------------------------


@operator(reduction, combine="sum", dtype="int64")
def count_nonzero(
    x: ArrayLike,
    /,
    *,
    axis: int | tuple[int, ...] | None = None,
    keepdims: bool = False,
    out_sharding: Where | None = None,
) -> ShardedTensor:
    """Counts the elements along ``axis`` that are not zero; NaN is not.

    The result has dtype int64. It is sharded as a sum, and each device counts the elements of its shard.

    Args:
        x: a tensor or a host array.
        axis: None (all dimensions), an integer or a tuple of integers.
        keepdims: whether the counted dimensions remain, with size 1.
        out_sharding: the sharding of the result: see `shardtensor.functions.standard.statistical`.

    Raises:
        AxisError: x has no such axis, or an axis occurs twice.

    >>> st.count_nonzero(st.asarray([[0, 7], [2, 3]]), axis=0).tolist()
    [1, 2]
    """


@implements(count_nonzero, "kernel")
def _count_nonzero(xp: Any, context: ShardContext, x: Any, *, axis: Any, keepdims: bool) -> Any:
    if xp is np:
        return np.asarray(np.count_nonzero(x, axis=axis, keepdims=bool(keepdims)))
    return xp.sum(xp.asarray(x, dtype=np.dtype("bool")), axis=axis, dtype=np.dtype("int64"), keepdims=keepdims)


def _search_rule(shapes: Sequence[Shape], **params: Any) -> str:
    if len(shapes[0]) != 1:
        raise ShapeError(f"x1 has {counted(len(shapes[0]), 'dimension')}; wanted one, in ascending order")
    return "k, ... -> ..."


@operator(_search_rule, operands=("x1", "x2"), combine="sum", dtype="int64", tags=("unblocked",))
def searchsorted(
    x1: ArrayLike, x2: ArrayLike, /, *, side: str = "left", sorter: ArrayLike | None = None
) -> ShardedTensor:
    """Returns for each element of x2 the index in x1, which is sorted, before which it is inserted to keep the order.

    The result has x2's shape and dtype int64. x2 keeps its sharding. Where x1 is sharded, each device searches its
    shard, and the numbers of elements that precede are added. If the same mesh axis splits both, the elements of x2
    are sent to the devices that hold the parts of x1 in which they are found (up to 64 KiB, the smaller one is
    gathered).

    Args:
        x1: a tensor or an array of one dimension, in ascending order (see `sort` for NaN and complex numbers).
        x2: a tensor, an array or a scalar.
        side: "left" inserts before elements that are equal, "right" behind them.
        sorter: the indices that sort x1, if it is not in order: ``argsort(x1)``.

    Raises:
        ShapeError: x1 does not have one dimension.
        ArgumentError: ``side`` is neither "left" nor "right".

    >>> x = st.asarray([1, 3, 3, 5])
    >>> st.searchsorted(x, st.asarray([0, 3, 9])).tolist(), st.searchsorted(x, 3, side="right").item()
    ([0, 1, 4], 3)
    """


@implements(searchsorted, "composite")
def _searchsorted_by(x1: Any, x2: Any, side: str, sorter: Any) -> Any:
    if not isinstance(side, str) or side not in ("left", "right"):
        raise ArgumentError(f"side is {side!r}; wanted 'left' or 'right'")
    if sorter is not None:
        return searchsorted(_take(x1, sorter), x2, side=side)
    if not (isinstance(x1, ShardedTensor) and isinstance(x2, ShardedTensor)):
        return NotImplemented
    from shardtensor.functions.building.split_search import are_split_alike, searchsorted_split  # Few programs need it.

    return searchsorted_split(x2, x1, side=side) if are_split_alike(x1, x2) else NotImplemented


@implements(searchsorted, "kernel")
def _searchsorted(xp: Any, context: ShardContext, x1: Any, x2: Any, *, side: str, sorter: None) -> Any:
    if xp is np:
        return host_searching.searchsorted(x1, np.asarray(x2), side)
    return xp.searchsorted(x1, xp.asarray(x2), side=side)


@operator(tags=("escapes",))
def nonzero(x: ArrayLike, /) -> tuple[ShardedTensor, ...]:
    """Returns the indices of the elements that are not zero, in row-major order: a tuple of an array of one dimension
    for each dimension of x, of dtype int64. NaN is not zero.

    The results are split by the mesh axes that split x, as ``x[x != 0]`` is. Each device searches its shard. Where
    other dimensions than the first are split, the split first moves to that one. The indices that the devices find are
    rebalanced by the split rule. Their number depends on the elements, so that `eval_shape` cannot infer the results.

    Raises:
        ShapeError: x is 0-d.
        ConcretizationError: the elements of x are not known.

    >>> [i.tolist() for i in st.nonzero(st.asarray([[0, 7], [2, 0]]))]
    [[0, 1], [1, 0]]
    """


@implements(nonzero, "kernel")
def _nonzero_on_device(xp: Any, context: None, x: Any) -> Any:
    if not x.ndim:
        raise ShapeError("x is 0-d; wanted at least one dimension")
    return tuple(xp.nonzero(x))


@implements(nonzero, "algorithm")
def _nonzero(x: Any) -> tuple[ShardedTensor, ...]:
    rows = _rows_of(x)
    if rows.backend.on_host:
        return tuple(map(rows.tensor, np.nonzero(rows.whole())))
    if shares_memory(x):
        return tuple(on_first(x, lambda xp, array: _positions(xp, array, 0), rows.sharding, "nonzero"))
    return _found_on_devices(rows)


@implements(nonzero, "announcing")
def _announcing_nonzero(x: Any) -> tuple[ShardedTensor, ...]:
    rows = _rows_of(x)
    if not rows.backend.on_host:
        return _found_on_devices(rows)
    indices = np.nonzero(rows.whole())
    sizes = np.diff(np.searchsorted(indices[0], rows.grid.offsets[0]))[rows.grid.parts[:, 0]].tolist()
    for _ in indices:
        rows.redistribute(sizes, rows.sharding, _INDEX)
    return tuple(map(rows.tensor, indices))


_INDEX = np.dtype("int64")


def _rows_of(x: Any) -> _Rows:
    if not shape_of(x):
        raise ShapeError("x is 0-d; wanted at least one dimension (st.reshape(x, (1,)) has one)")
    return _Rows(x, "nonzero")


def _found_on_devices(rows: _Rows) -> tuple[ShardedTensor, ...]:
    begins = [rows.grid.box(k)[0][0] for k in range(len(rows.grid.devices))]
    found_here = rows.map(_positions, rows.shards(), begins)
    sizes = [int(indices[0].shape[0]) for indices in found_here]
    return tuple([rows.tensor_of_parts(sizes, column, _INDEX) for column in zip(*found_here, strict=True)])


def _positions(xp: Any, array: Any, begin: int) -> tuple[Any, ...]:
    """Returns the indices of the elements that are not zero, on one device whose rows begin there."""
    first, *others = [xp.asarray(indices, dtype=_INDEX) for indices in xp.nonzero(array)]
    return xp.add(first, begin) if begin else first, *others


@operator()
def flatnonzero(x: ArrayLike, /) -> ShardedTensor:
    """Returns the indices of the elements of the flattened x that are not zero: see `nonzero`.

    >>> st.flatnonzero(st.asarray([[0, 7], [2, 0]])).tolist()
    [1, 2]
    """


@implements(flatnonzero, "composite")
def _flatnonzero(x: Any) -> Any:
    return nonzero(_reshape(x, (-1,)))[0]


@operator()
def argwhere(x: ArrayLike, /) -> ShardedTensor:
    """Returns the indices of the elements that are not zero, in row-major order, as the rows of a matrix.

    The dtype is int64. The rows are sharded as the arrays of `nonzero`, and errors are those of `nonzero`.

    >>> st.argwhere(st.asarray([[0, 7], [2, 0]])).tolist()
    [[0, 1], [1, 0]]
    """


@implements(argwhere, "composite")
def _argwhere(x: Any) -> Any:
    if shape_of(x):
        return _stack(nonzero(x), axis=1)
    positions = nonzero(_reshape(x, (1,)))[0]  # As in NumPy, of an array without dimensions: one row without columns.
    return call("getitem", _reshape(positions, (-1, 1)), (slice(None), slice(0)))
