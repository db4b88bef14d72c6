"""NumPy's functions that make index arrays, and that convert between indices of several dimensions and of one.

Index arrays are tensors of int64. Those of matrices are made on the host, where they are needed to index, and split
along their one dimension over the devices of ``device``, the default mesh by default.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from shardtensor.core import call, composition, named
from shardtensor.errors import ArgumentError, ArgumentTypeError, ShapeError
from shardtensor.functions.numpy.comparisons import array_like
from shardtensor.functions.placement.conversion import asarray
from shardtensor.functions.standard.data_types import astype, result_type
from shardtensor.functions.standard.elementwise import (
    add,
    clip,
    floor_divide,
    greater_equal,
    less,
    logical_or,
    multiply,
    remainder,
)
from shardtensor.functions.standard.manipulation import reshape
from shardtensor.functions.standard.searching import flatnonzero
from shardtensor.functions.standard.statistical import any as _any
from shardtensor.host.units import counted
from shardtensor.sequences import as_list
from shardtensor.sharding.layout import Shape, Where, checked_shape
from shardtensor.tensor.operands import shape_of
from shardtensor.tensor.tensor import ArrayLike, ShardedTensor, lacks_elements

Indices = tuple[ShardedTensor, ...]


def _placed(indices: Sequence[Any], device: Where | None) -> Indices:
    return tuple([asarray(index, device=device) for index in indices])


# -- of matrices -----------------------------------------------------------------------------------


def diag_indices(n: int, ndim: int = 2, *, device: Where | None = None) -> Indices:
    """Returns the indices of the main diagonal of an array of ``ndim`` dimensions of size n.

    They are one tensor, ``ndim`` times, as in NumPy, so that a write to one of them is a write to all.

    >>> [i.tolist() for i in st.diag_indices(3)]
    [[0, 1, 2], [0, 1, 2]]
    """
    return _placed(np.diag_indices(n, 1), device) * ndim


@named
def diag_indices_from(arr: ArrayLike) -> Indices:
    """Returns the indices of the main diagonal of an array, on its devices: see `diag_indices`.

    Raises:
        ShapeError: it has fewer than two dimensions, or they differ in size.

    >>> [i.tolist() for i in st.diag_indices_from(st.zeros((2, 2)))]
    [[0, 1], [0, 1]]
    """
    shape = shape_of(arr)
    if len(shape) < 2 or len(set(shape)) > 1:
        raise ShapeError(f"diag_indices_from: arr has shape {shape}; wanted at least two dimensions of one size")
    return diag_indices(shape[0], len(shape), device=_devices_of(arr))


def _devices_of(x: Any) -> Any:
    return x.sharding.mesh if isinstance(x, ShardedTensor) else None


def tril_indices(n: int, k: int = 0, m: int | None = None, *, device: Where | None = None) -> Indices:
    """Returns the indices of the lower triangle of a matrix of n rows and m columns (n by default): see `tril`.

    >>> [i.tolist() for i in st.tril_indices(2)]
    [[0, 1, 1], [0, 0, 1]]
    """
    return _placed(np.tril_indices(n, k, m), device)


def triu_indices(n: int, k: int = 0, m: int | None = None, *, device: Where | None = None) -> Indices:
    """Returns the indices of the upper triangle of a matrix of n rows and m columns (n by default): see `triu`.

    >>> [i.tolist() for i in st.triu_indices(2)]
    [[0, 0, 1], [0, 1, 1]]
    """
    return _placed(np.triu_indices(n, k, m), device)


@composition()
def tril_indices_from(arr: ArrayLike, k: int = 0) -> Indices:
    """Returns the indices of the lower triangle of a matrix, on its devices: see `tril_indices`.

    >>> [i.tolist() for i in st.tril_indices_from(st.zeros((2, 2)))]
    [[0, 1, 1], [0, 0, 1]]
    """
    rows, columns = _matrix_shape("tril_indices_from", arr)
    return tril_indices(rows, k, columns, device=_devices_of(arr))


@composition()
def triu_indices_from(arr: ArrayLike, k: int = 0) -> Indices:
    """Returns the indices of the upper triangle of a matrix, on its devices: see `triu_indices`.

    >>> [i.tolist() for i in st.triu_indices_from(st.zeros((2, 2)))]
    [[0, 0, 1], [0, 1, 1]]
    """
    rows, columns = _matrix_shape("triu_indices_from", arr)
    return triu_indices(rows, k, columns, device=_devices_of(arr))


def _matrix_shape(caller: str, arr: Any) -> Shape:
    shape = shape_of(arr)
    if len(shape) != 2:
        raise ShapeError(f"{caller}: arr has {counted(len(shape), 'dimension')}; wanted a matrix")
    return shape


def mask_indices(n: int, mask_func: Callable[..., Any], k: Any = 0, *, device: Where | None = None) -> Indices:
    """Returns the indices of a square matrix of n rows that a function, such as `st.triu`, keeps.

    Args:
        n: the number of rows.
        mask_func: ``mask_func(matrix, k)`` returns the matrix with zeros elsewhere.
        k: passed to ``mask_func``.
        device: the devices of the indices.

    >>> [i.tolist() for i in st.mask_indices(2, np.triu)]
    [[0, 0, 1], [0, 1, 1]]
    """
    return _placed(np.nonzero(np.asarray(mask_func(np.ones((n, n), int), k))), device)


@composition()
def ix_(*args: ArrayLike) -> Indices:
    """Returns index arrays of the cross product of positions: the k-th has all sizes 1 except along dimension k.

    Args:
        *args: for each dimension the positions, in one dimension: integers, or bools of the dimension's size.

    Raises:
        ShapeError: an argument does not have one dimension.

    >>> x = st.arange(12).reshape(3, 4)
    >>> x[st.ix_([0, 2], [1, 3])].tolist()
    [[1, 3], [9, 11]]
    """
    indices = []
    for k, arg in enumerate(args):
        positions: Any = array_like(arg, "ix_")
        if len(shape_of(positions)) != 1:
            raise ShapeError(f"ix_: argument {k} has {counted(len(shape_of(positions)), 'dimension')}; wanted one")
        if not shape_of(positions)[0] and not hasattr(arg, "dtype"):
            positions = positions.astype(np.intp)  # An empty list has no dtype.
        if result_type(positions).kind == "b":
            positions = flatnonzero(positions)
        indices.append(reshape(positions, tuple([-1 if d == k else 1 for d in range(len(args))])))
    return tuple(indices)


# -- flat indices ----------------------------------------------------------------------------------


@composition()
def unravel_index(indices: ArrayLike, shape: int | Shape, order: str = "C") -> Indices:
    """Converts indices into a flattened array to one index for each of its dimensions.

    The results are sharded like ``indices``. No data moves.

    Args:
        indices: integers: a tensor, an array, a list or a scalar.
        shape: the shape of the array.
        order: "C" for row-major order, "F" for column-major order.

    Raises:
        ArgumentError: an index is out of bounds, where that is known, or there is no such order.
        ArgumentTypeError: ``indices`` are not integers.

    >>> [i.tolist() for i in st.unravel_index(st.asarray([22, 41, 37]), (7, 6))]
    [[3, 6, 6], [4, 5, 1]]
    """
    sizes = checked_shape(shape, "unravel_index: shape")
    rest: Any = _integers("unravel_index: indices", array_like(indices, "unravel_index"))
    _check_bounds("unravel_index: indices", rest, math.prod(sizes))
    result = []
    for size in _by_stride(sizes, order):
        result.append(remainder(rest, size))
        rest = floor_divide(rest, size)
    return tuple(result if order == "F" else result[::-1])


@composition()
def ravel_multi_index(
    multi_index: Sequence[ArrayLike], dims: int | Shape, mode: str | Sequence[str] = "raise", order: str = "C"
) -> ShardedTensor:
    """Converts one index for each dimension of an array to indices into the flattened array.

    Args:
        multi_index: for each dimension an array of integers, a list or a scalar; they broadcast.
        dims: the shape of the array.
        mode: for indices out of bounds, of all dimensions or of each one: "raise" raises an error, "wrap" takes them
            modulo the size, and "clip" replaces them by the first or the last one.
        order: "C" for row-major order, "F" for column-major order.

    Raises:
        ArgumentError: an index is out of bounds, where that is known, or there is no such mode or order, or there is
            not one array for each dimension.
        ArgumentTypeError: they are not integers.

    >>> st.ravel_multi_index(st.asarray([[3, 6, 6], [4, 5, 1]]), (7, 6)).tolist()
    [22, 41, 37]
    """
    sizes = checked_shape(dims, "ravel_multi_index: dims")
    listed = as_list(multi_index, "ravel_multi_index: multi_index")
    indices = [array_like(index, "ravel_multi_index") for index in listed]
    modes = [mode] * len(sizes) if isinstance(mode, str) else as_list(mode, "ravel_multi_index: mode")
    if len(indices) != len(sizes) or len(modes) != len(sizes):
        raise ArgumentError(
            f"ravel_multi_index: {counted(len(indices), 'index array')} and {counted(len(modes), 'mode')} for "
            f"{counted(len(sizes), 'dimension')}"
        )
    if 0 in sizes and math.prod(np.broadcast_shapes(*map(shape_of, indices))):
        raise ArgumentError(f"ravel_multi_index: dims are {sizes}, an array without elements, which has no indices")
    steps = dict(zip(_order_of(len(sizes), order), np.cumprod([1, *_by_stride(sizes, order)]).tolist(), strict=False))
    total: Any = 0
    for d, (index, size) in enumerate(zip(indices, sizes, strict=True)):
        name = f"ravel_multi_index: multi_index[{d}]"
        total = add(total, multiply(_within(name, _integers(name, index), size, modes[d]), steps[d]))
    return call("asarray", total)  # type: ignore[no-any-return]


def _order_of(ndim: int, order: str) -> range:
    """Returns the dimensions, that of the least stride first."""
    if order not in ("C", "F"):
        raise ArgumentError(f"order is {order!r}; wanted 'C' or 'F'")
    return range(ndim) if order == "F" else range(ndim - 1, -1, -1)


def _by_stride(sizes: Shape, order: str) -> list[int]:
    return [sizes[d] for d in _order_of(len(sizes), order)]


def _integers(name: str, x: Any) -> Any:
    if result_type(x).kind not in "iu":
        raise ArgumentTypeError(f"{name} has dtype {result_type(x)}; wanted integers")
    return astype(x, np.int64, copy=False)


def _within(name: str, index: Any, size: int, mode: str) -> Any:
    if mode == "wrap":
        return remainder(index, size)
    if mode == "clip":
        return clip(index, 0, size - 1)
    if mode != "raise":
        raise ArgumentError(f"ravel_multi_index: mode is {mode!r}; wanted 'raise', 'wrap' or 'clip'")
    _check_bounds(name, index, size)
    return index


def _check_bounds(name: str, index: Any, size: int) -> None:
    """Raises ArgumentError if an index is out of bounds, unless the elements are not known."""
    outside = _any(logical_or(less(index, 0), greater_equal(index, size)))
    if not lacks_elements(outside) and bool(outside):
        raise ArgumentError(f"{name} has an index out of bounds; wanted integers from 0 to {size - 1}")
