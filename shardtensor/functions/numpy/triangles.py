"""Declarations of the functions of triangles and diagonals of matrices."""

from __future__ import annotations

import operator as python
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from shardtensor.core import call, hinted, implements, operator
from shardtensor.errors import ArgumentTypeError, ShapeError
from shardtensor.functions.building.own_kernels import own_kernel
from shardtensor.functions.standard.creation import eye, ones, zeros
from shardtensor.functions.standard.data_types import result_type
from shardtensor.functions.standard.manipulation import broadcast_to, reshape
from shardtensor.functions.standard.repetition import devices_of, index_of
from shardtensor.sharding.layout import Where, chosen
from shardtensor.sharding.shard_context import ShardContext
from shardtensor.tensor.operands import shape_of
from shardtensor.tensor.tensor import ArrayLike, ShardedTensor

_DERIVATIVES = "of_movement"

# -- triangles ----------------------------------------------------------------------------------------


@operator("... i j -> ... i j")
def tril(x: ArrayLike, /, *, k: int = 0) -> ShardedTensor:
    """Returns the lower triangles of the matrices in the last two dimensions of x, with zeros above.

    The result has x's shape, dtype and sharding. No data moves.

    Args:
        x: a tensor or a host array; a 1-d one is repeated as the rows of a square matrix, as in NumPy.
        k: the highest diagonal that is kept: 0 is the main one, positive ones are above it, negative ones below it.

    Raises:
        ShapeError: x has no dimensions.
        ArgumentTypeError: ``k`` is not an integer.

    >>> st.tril(st.ones((3, 3), dtype=int), k=-1).tolist()
    [[0, 0, 0], [1, 0, 0], [1, 1, 0]]
    """


@operator("... i j -> ... i j")
def triu(x: ArrayLike, /, *, k: int = 0) -> ShardedTensor:
    """Returns the upper triangles of the matrices in the last two dimensions of x, with zeros below.

    Arguments, sharding and errors are those of `tril`; ``k`` is the lowest diagonal that is kept.

    >>> st.triu(st.ones((3, 3), dtype=int), k=1).tolist()
    [[0, 1, 1], [0, 0, 1], [0, 0, 0]]
    """


def _triangle(function: Callable[..., Any], lower: bool) -> None:
    """Implements `tril` or `triu`."""

    @implements(function, "composite")
    def of_line(x: Any, k: int) -> Any:
        return function(broadcast_to(x, shape_of(x) * 2), k=k) if len(shape_of(x)) == 1 else NotImplemented

    @implements(function, "kernel")
    def kernel(xp: Any, context: ShardContext, x: Any, *, k: int) -> Any:
        (top, bottom), (left, right) = context.boxes[0][-2:]
        below = _diagonal(k) + top - left  # of the shard
        if (result := own_kernel(xp, "triangle", x, below, lower)) is not None:
            return result
        rows = xp.reshape(xp.arange(bottom - top), (-1, 1))
        columns = xp.reshape(xp.arange(right - left), (1, -1))
        kept = xp.less_equal(columns, rows + below) if lower else xp.greater_equal(columns, rows + below)
        return xp.where(kept, x, xp.zeros((), dtype=x.dtype))


def _diagonal(k: Any) -> int:
    try:
        return python.index(k)
    except TypeError:
        raise ArgumentTypeError(f"k is {k!r}; wanted an integer, the number of a diagonal") from None


_triangle(tril, lower=True)
_triangle(triu, lower=False)


@hinted
def tri(
    n_rows: int,
    n_cols: int | None = None,
    k: int = 0,
    dtype: npt.DTypeLike = float,
    *,
    device: Where | None = None,
) -> ShardedTensor:
    """Creates a matrix with ones on and below its k-th diagonal and zeros above: see `tril`.

    Args:
        n_rows, n_cols: the numbers of rows and columns, which are equal by default.
        k: the number of the diagonal.
        dtype: the dtype of the result.
        device: a Device, Mesh or NamedSharding (see `shardtensor.functions.standard.creation`); the default mesh by
            default.

    >>> st.tri(2, 3, dtype=int).tolist()
    [[1, 0, 0], [1, 1, 0]]
    """
    return tril(ones((n_rows, n_rows if n_cols is None else n_cols), dtype=dtype, device=device), k=k)


@hinted
def identity(
    n: int, dtype: npt.DTypeLike | None = None, *, device: Where | None = None, out_sharding: Where | None = None
) -> ShardedTensor:
    """Creates the identity matrix of n rows: see `st.eye`.

    >>> st.identity(2, int).tolist()
    [[1, 0], [0, 1]]
    """
    return eye(n, dtype=dtype, device=chosen(device, out_sharding, "identity"))


# -- diagonals -------------------------------------------------------------------------------------


@operator()
def diag(v: ArrayLike, k: int = 0) -> ShardedTensor:
    """Returns the k-th diagonal of a matrix, or the matrix with v as its k-th diagonal and zeros elsewhere.

    The matrix is sharded along its rows, over v's devices; only the elements of v are transferred. The diagonal is an
    independent tensor, sharded like the rows.

    Args:
        v: a matrix or a 1-d array.
        k: the number of the diagonal: 0 is the main one, positive ones are above it, negative ones below it.

    Raises:
        ShapeError: v has neither one nor two dimensions.
        ArgumentTypeError: ``k`` is not an integer.

    >>> st.diag(st.asarray([1, 2]), 1).tolist(), st.diag(st.asarray([[1, 2], [3, 4]])).tolist()
    ([[0, 1, 0], [0, 0, 2], [0, 0, 0]], [1, 4])
    """


@implements(diag, "composite")
def _diag(v: Any, k: int) -> Any:
    shape, above = shape_of(v), _diagonal(k)
    if len(shape) not in (1, 2):
        raise ShapeError(f"v has shape {shape}; wanted one or two dimensions")
    top, left = max(-above, 0), max(above, 0)
    count = shape[0] if len(shape) == 1 else max(min(shape[0] - top, shape[1] - left), 0)
    at = tuple([index_of(v, np.arange(first, first + count)) for first in (top, left)])
    if len(shape) == 2:
        return call("getitem", v, at)
    matrix = zeros((count + abs(above),) * 2, dtype=result_type(v), device=devices_of(v))
    matrix[at] = v
    return matrix


implements(diag, "small")(lambda v, k: np.array(np.diag(v, k)))


@operator()
def diagflat(v: ArrayLike, k: int = 0) -> ShardedTensor:
    """Returns the matrix with the flattened v as its k-th diagonal and zeros elsewhere: see `diag`.

    >>> st.diagflat(st.asarray([[1], [2]])).tolist()
    [[1, 0], [0, 2]]
    """


implements(diagflat, "composite")(lambda v, k: diag(reshape(v, (-1,)), k))
implements(diagflat, "small")(np.diagflat)
