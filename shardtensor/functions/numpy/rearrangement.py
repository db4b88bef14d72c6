"""Declarations of NumPy's functions that rearrange dimensions, and that join and split arrays: compositions.

They have the semantics of NumPy's functions of these names, and return views where NumPy does.

Raises:
    AxisError: an array has no such axis.
    ShapeError: shapes do not fit, or arrays have too few dimensions.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from shardtensor.core import implements, operator
from shardtensor.errors import ArgumentError, ArgumentTypeError, AxisError, IndexingError, ShapeError
from shardtensor.functions.standard.data_types import astype, result_type
from shardtensor.functions.standard.joining import concat, is_on_host, reshape_operand
from shardtensor.functions.standard.manipulation import broadcast_to, flip, moveaxis, permute_dims, reshape
from shardtensor.functions.standard.repetition import on_host, taken
from shardtensor.host.units import counted
from shardtensor.sharding.rules import normalize_axes, normalize_axis
from shardtensor.tensor.conversions import is_column_major
from shardtensor.tensor.nested_lists import converted
from shardtensor.tensor.operands import integer_of, shape_of
from shardtensor.tensor.tensor import ArrayLike, ShardedTensor

# -- order and number of dimensions ----------------------------------------------------------------


@operator(tags=("any dtype",))
def swapaxes(x: ArrayLike, axis1: int, axis2: int) -> ShardedTensor:
    """Exchanges two dimensions of x. A view. No data moves.

    >>> st.swapaxes(st.zeros((2, 3, 4)), 0, 2).shape
    (4, 3, 2)
    """


@implements(swapaxes, "composite")
def _swapaxes(x: Any, axis1: int, axis2: int) -> Any:
    order = list(range(len(shape_of(x))))
    a, b = [normalize_axis(axis, len(order)) for axis in (axis1, axis2)]
    order[a], order[b] = b, a
    return permute_dims(x, tuple(order))


@operator(tags=("any dtype",))
def rollaxis(x: ArrayLike, axis: int, start: int = 0) -> ShardedTensor:
    """Moves dimension ``axis`` of x before dimension ``start``. A view. `moveaxis` is easier to read.

    >>> st.rollaxis(st.zeros((2, 3, 4)), 2).shape
    (4, 2, 3)
    """


@implements(rollaxis, "composite")
def _rollaxis(x: Any, axis: int, start: int) -> Any:
    ndim = len(shape_of(x))
    a = normalize_axis(axis, ndim)
    before = start + ndim if start < 0 else start
    if not 0 <= before <= ndim:
        raise AxisError(f"start {start} is out of range for {counted(ndim, 'dimension')}; wanted {-ndim} to {ndim}")
    return moveaxis(x, a, before - (a < before))


@operator(tags=("any dtype", "view if contiguous"))
def ravel(x: ArrayLike, order: str = "C") -> ShardedTensor:
    """Returns x's elements in one dimension: a view if they are contiguous in that order, otherwise a copy.

    Args:
        x: a tensor or a host array.
        order: ``"C"`` for row-major order, ``"F"`` for column-major order; ``"A"`` and ``"K"`` are row-major, as in
            NumPy for arrays in row-major order.

    Raises:
        ArgumentError: there is no such order.

    >>> st.ravel(st.asarray([[1, 2], [3, 4]])).tolist(), st.ravel(st.asarray([[1, 2], [3, 4]]), "F").tolist()
    ([1, 2, 3, 4], [1, 3, 2, 4])
    """


@implements(ravel, "composite")
def _ravel(x: Any, order: str) -> Any:
    turned = permute_dims(x, tuple(range(len(shape_of(x))))[::-1]) if is_column_major(order, "ravel") else x
    flat = reshape(turned, (-1,))
    view_spec = getattr(getattr(flat, "_storage", None), "view_spec", None)
    return flat if view_spec is None or view_spec.is_contiguous else reshape(turned, (-1,), copy=True)


@operator(variadic=True, tags=("any dtype",))
def atleast_1d(*arrays: ArrayLike) -> Any:
    """Returns each array with at least one dimension: a view of a 0-d one, otherwise the array itself.

    Args:
        *arrays: tensors or host arrays.

    Returns:
        One array, or a tuple of them if there are several.

    >>> st.atleast_1d(st.asarray(2)).shape
    (1,)
    """


@operator(variadic=True, tags=("any dtype",))
def atleast_2d(*arrays: ArrayLike) -> Any:
    """Returns each array with at least two dimensions, as `atleast_1d` does; a 1-d array becomes a row.

    >>> st.atleast_2d(st.arange(3)).shape
    (1, 3)
    """


@operator(variadic=True, tags=("any dtype",))
def atleast_3d(*arrays: ArrayLike) -> Any:
    """Returns each array with at least three dimensions, as `atleast_1d` does.

    The dimension of a 1-d array becomes the second one, and a matrix gets a third one.

    >>> st.atleast_3d(st.arange(3)).shape
    (1, 3, 1)
    """


def _at_least(ndim: int) -> Callable[[Sequence[Any]], Any]:
    def composed(arrays: Sequence[Any]) -> Any:
        items = [_with_dimensions(x, ndim) for x in arrays]
        # `reshape` converts host arrays, and raises an error for an object that is not an array.
        results = tuple([x if hasattr(x, "ndim") and not is_on_host(x) else reshape(x, shape_of(x)) for x in items])
        return results[0] if len(results) == 1 else results

    return composed


implements(atleast_1d, "composite")(_at_least(1))
implements(atleast_2d, "composite")(_at_least(2))
implements(atleast_3d, "composite")(_at_least(3))


def _with_dimensions(x: Any, ndim: int) -> Any:
    shape = shape_of(x)
    if len(shape) >= ndim:
        return x
    new = {0: (1,) * ndim, 1: ((1, *shape, 1) if ndim == 3 else (1, *shape)), 2: (*shape, 1)}[len(shape)]
    return reshape_operand(x, new)


@operator(tags=("any dtype",))
def fliplr(x: ArrayLike) -> ShardedTensor:
    """Reverses the columns of x: `flip` along dimension 1. A view.

    >>> st.fliplr(st.asarray([[1, 2], [3, 4]])).tolist()
    [[2, 1], [4, 3]]
    """


@operator(tags=("any dtype",))
def flipud(x: ArrayLike) -> ShardedTensor:
    """Reverses the rows of x: `flip` along dimension 0. A view.

    >>> st.flipud(st.asarray([[1, 2], [3, 4]])).tolist()
    [[3, 4], [1, 2]]
    """


implements(fliplr, "composite")(lambda x: flip(x, axis=1))
implements(flipud, "composite")(lambda x: flip(x, axis=0))


@operator(tags=("any dtype",))
def rot90(x: ArrayLike, k: int = 1, axes: Iterable[int] = (0, 1)) -> ShardedTensor:
    """Rotates x by ``k`` right angles in the plane of two dimensions, from the first towards the second. A view.

    Raises:
        ArgumentError: ``axes`` does not name two different dimensions.

    >>> st.rot90(st.asarray([[1, 2], [3, 4]])).tolist()
    [[2, 4], [1, 3]]
    """


@implements(rot90, "composite")
def _rot90(x: Any, k: int, axes: Any) -> Any:
    plane = tuple(axes) if np.iterable(axes) else (axes,)
    if len(plane) != 2:
        raise ArgumentError(f"axes is {axes!r}; wanted two dimensions")
    a, b = normalize_axes(plane, len(shape_of(x)))
    turns = integer_of(k, "k") % 4
    if turns == 2:
        return flip(x, axis=(a, b))
    if turns == 1:
        return _swapaxes(flip(x, axis=b), a, b)
    return flip(_swapaxes(x, a, b), axis=b) if turns else reshape(x, shape_of(x))


# -- join ------------------------------------------------------------------------------------------


@operator(variadic=True)
def hstack(tup: Sequence[ArrayLike]) -> ShardedTensor:
    """Joins arrays along their second dimension, 1-d arrays along the first: see `concat`.

    >>> st.hstack([st.asarray([1, 2]), st.asarray([3])]).tolist()
    [1, 2, 3]
    """


@operator(variadic=True)
def vstack(tup: Sequence[ArrayLike]) -> ShardedTensor:
    """Joins arrays as rows, along their first dimension; 1-d arrays are rows: see `concat`.

    >>> st.vstack([st.asarray([1, 2]), st.asarray([3, 4])]).tolist()
    [[1, 2], [3, 4]]
    """


@operator(variadic=True)
def dstack(tup: Sequence[ArrayLike]) -> ShardedTensor:
    """Joins arrays along their third dimension, which arrays with fewer dimensions get first: see `concat`.

    >>> st.dstack([st.asarray([1, 2]), st.asarray([3, 4])]).tolist()
    [[[1, 3], [2, 4]]]
    """


@operator(variadic=True)
def column_stack(tup: Sequence[ArrayLike]) -> ShardedTensor:
    """Joins arrays along their second dimension; 1-d arrays are columns: see `concat`.

    >>> st.column_stack([st.asarray([1, 2]), st.asarray([3, 4])]).tolist()
    [[1, 3], [2, 4]]
    """


def _columns(x: Any) -> Any:
    return reshape_operand(x, (-1, 1)) if len(shape_of(x)) < 2 else x


def _joined(ndim: int, axis: int, prepared: Callable[[Any], Any] | None = None) -> Callable[[Sequence[Any]], Any]:
    def composed(arrays: Sequence[Any]) -> Any:
        items = [prepared(x) if prepared else _with_dimensions(x, ndim) for x in arrays]
        if not items:
            raise ShapeError("there is nothing to join; give at least one array")
        return concat(items, axis=0 if ndim == 1 and len(shape_of(items[0])) == 1 else axis)

    return composed


implements(hstack, "composite")(_joined(1, 1))
implements(hstack, "small")(np.hstack)
implements(vstack, "composite")(_joined(2, 0))
implements(vstack, "small")(np.vstack)
implements(dstack, "composite")(_joined(3, 2))
implements(dstack, "small")(np.dstack)
implements(column_stack, "composite")(_joined(2, 1, _columns))
implements(column_stack, "small")(np.column_stack)


# -- split -----------------------------------------------------------------------------------------


@operator(tags=("any dtype",))
def array_split(x: ArrayLike, indices_or_sections: int | Sequence[int], axis: int = 0) -> list[ShardedTensor]:
    """Splits x along an axis into a list of views, each sharded as a slice of x (`st.shard` gives one per device).

    Args:
        x: a tensor or a host array.
        indices_or_sections: the number of parts, the first of which are longer by 1 if they cannot be equal; or the
            positions at which x is split.
        axis: the dimension.

    Raises:
        ShapeError: the number of parts is not positive.

    >>> [part.tolist() for part in st.array_split(st.arange(5), 2)]
    [[0, 1, 2], [3, 4]]
    """


@operator(tags=("any dtype",))
def split(x: ArrayLike, indices_or_sections: int | Sequence[int], axis: int = 0) -> list[ShardedTensor]:
    """Splits x along an axis as `array_split` does, into parts of equal size if their number is given.

    Raises:
        ShapeError: they cannot be equal.

    >>> [part.tolist() for part in st.split(st.arange(4), 2)]
    [[0, 1], [2, 3]]
    """


@operator(tags=("any dtype",))
def hsplit(x: ArrayLike, indices_or_sections: int | Sequence[int]) -> list[ShardedTensor]:
    """Splits x along its second dimension, or along its only one: see `split`.

    >>> [part.tolist() for part in st.hsplit(st.asarray([[1, 2], [3, 4]]), 2)]
    [[[1], [3]], [[2], [4]]]
    """


@operator(tags=("any dtype",))
def vsplit(x: ArrayLike, indices_or_sections: int | Sequence[int]) -> list[ShardedTensor]:
    """Splits x, which has at least two dimensions, along its first one: see `split`.

    >>> [part.tolist() for part in st.vsplit(st.asarray([[1, 2], [3, 4]]), 2)]
    [[[1, 2]], [[3, 4]]]
    """


@operator(tags=("any dtype",))
def dsplit(x: ArrayLike, indices_or_sections: int | Sequence[int]) -> list[ShardedTensor]:
    """Splits x along its third dimension: see `split`.

    >>> [part.shape for part in st.dsplit(st.zeros((2, 1, 4)), 2)]
    [(2, 1, 2), (2, 1, 2)]
    """


@implements(array_split, "composite")
def _array_split(x: Any, indices_or_sections: Any, axis: int, equal: bool = False) -> list[Any]:
    if not shape_of(x):
        raise ShapeError("x has no dimensions to split; wanted at least one")
    d = normalize_axis(axis, len(shape_of(x)))
    size = shape_of(x)[d]
    sections = on_host(indices_or_sections)
    if sections.ndim:
        ends = [None, *[int(n) for n in sections], None]
    else:
        count = _number(sections, "indices_or_sections")
        if count < 1:
            raise ShapeError(f"{counted(count, 'part')}; wanted at least one")
        if equal and size % count:
            raise ShapeError(f"dimension {d} has size {size}, which does not divide into {count} equal parts")
        length, longer = divmod(size, count)
        ends = [k * length + min(k, longer) for k in range(count + 1)]
    return [taken(x, slice(begin, end), d) for begin, end in itertools.pairwise(ends)]


@implements(split, "composite")
def _split(x: Any, indices_or_sections: Any, axis: int) -> list[Any]:
    return _array_split(x, indices_or_sections, axis, equal=True)


def _split_along(axis: int, least: int) -> Callable[..., list[Any]]:
    def composed(x: Any, indices_or_sections: Any) -> list[Any]:
        if len(shape_of(x)) < least:
            raise ShapeError(f"x has {counted(len(shape_of(x)), 'dimension')}; wanted at least {least}")
        return _split(x, indices_or_sections, axis if len(shape_of(x)) > 1 else 0)

    return composed


implements(hsplit, "composite")(_split_along(1, 1))
implements(vsplit, "composite")(_split_along(0, 2))
implements(dsplit, "composite")(_split_along(2, 3))


def _number(array: Any, name: str) -> int:
    """Returns a 0-d host array as an integer."""
    if array.dtype.kind not in "iu":
        raise ArgumentTypeError(f"{name} is {array[()]!r:.60}; wanted an integer or a sequence of integers")
    return int(array)


# -- append, delete and insert ---------------------------------------------------------------------


@operator(operands=("arr", "values"))
def append(arr: ArrayLike, values: ArrayLike, axis: int | None = None) -> ShardedTensor:
    """Joins ``values`` to the end of ``arr`` along an axis; None flattens both first. See `concat`.

    >>> st.append(st.asarray([1, 2]), st.asarray([3])).tolist()
    [1, 2, 3]
    """


implements(append, "small")(np.append)


@implements(append, "composite")
def _append(arr: Any, values: Any, axis: int | None) -> Any:
    return concat([arr, values], axis=axis)


@operator(operands=("arr",))
def delete(arr: ArrayLike, obj: Any, axis: int | None = None) -> ShardedTensor:
    """Returns ``arr`` without some positions along an axis. An independent tensor.

    Args:
        arr: a tensor or a host array.
        obj: the positions: an integer, a slice, a list or an array of integers, or a mask; read on the host.
        axis: the dimension; None flattens ``arr`` first.

    Raises:
        IndexingError: a position is out of bounds.

    >>> st.delete(st.arange(5), [1, 3]).tolist()
    [0, 2, 4]
    """


@implements(delete, "composite")
def _delete(arr: Any, obj: Any, axis: int | None) -> Any:
    if axis is None:
        arr, axis = reshape(arr, (-1,)), 0
    d = normalize_axis(axis, len(shape_of(arr)))
    size = shape_of(arr)[d]
    gone = _adjacent(obj, size, d)
    if gone is None:
        return taken(arr, _edited(np.delete, np.arange(size), obj), d)
    # The two parts are moved as they are, without an index for each position.
    return concat([taken(arr, slice(0, gone.start), d), taken(arr, slice(gone.stop, size), d)], axis=d)


def _adjacent(obj: Any, size: int, axis: int) -> range | None:
    """Returns the positions that `delete` removes, if they are one or a slice of adjacent ones.

    Raises:
        IndexingError: the position is out of bounds.
    """
    if isinstance(obj, slice):
        positions = range(*obj.indices(size))
        positions = positions[::-1] if positions.step < 0 else positions
        return range(positions.start, max(positions.start, positions.stop)) if positions.step == 1 else None
    position = on_host(obj)
    if position.ndim or position.dtype.kind not in "iu":
        return None
    first = _checked_position(int(position), size, size - 1, axis)
    return range(first, first + 1)


def _checked_position(position: int, size: int, last: int, axis: int) -> int:
    if not -size <= position <= last:
        raise IndexingError(f"index {position} is out of bounds for axis {axis} with size {size}")
    return position + size if position < 0 else position


implements(delete, "small")(np.delete)


@operator(operands=("arr", "values"), trees=("values",))
def insert(arr: ArrayLike, obj: Any, values: ArrayLike, axis: int | None = None) -> ShardedTensor:
    """Returns ``arr`` with ``values`` inserted before some positions along an axis. An independent tensor.

    Args:
        arr: a tensor or a host array.
        obj: the positions: an integer, a slice, or a list or an array of integers or a mask; read on the host.
        values: the elements, also in lists, which are cast to ``arr``'s dtype and broadcast to the shape that NumPy
            expects.
        axis: the dimension; None flattens ``arr`` first.

    Raises:
        IndexingError: a position is out of bounds.
        RangeError: an integer in a list does not fit the dtype.
        ShapeError: ``values`` does not broadcast.

    >>> st.insert(st.asarray([1, 2, 3]), 1, 9).tolist()
    [1, 9, 2, 3]
    """


@implements(insert, "composite")
def _insert(arr: Any, values: Any, obj: Any, axis: int | None) -> Any:
    if axis is None:
        arr, axis = reshape(arr, (-1,)), 0
    shape = shape_of(arr)
    d = normalize_axis(axis, len(shape))
    if type(values) in (int, list, tuple):
        values = converted(values, result_type(arr), "values")
    host = is_on_host(values)  # A host array remains one: see `reshape_operand`.
    value_shape = shape_of(values)
    while len(value_shape) > len(shape) and value_shape[0] == 1:  # As in assignments.
        value_shape = value_shape[1:]
    if value_shape != shape_of(values) or len(value_shape) < len(shape):
        values = reshape_operand(values, (1,) * (len(shape) - len(value_shape)) + value_shape)
    where = np.arange(*obj.indices(shape[d])) if isinstance(obj, slice) else on_host(obj)
    where = np.flatnonzero(where) if where.dtype.kind == "b" and where.ndim == 1 else where
    if where.size == 1 and where.dtype.kind in "iu":
        # NumPy's rule: for a single position, any number of values is inserted; if it is not in a list, the first
        # dimension of the values is that along the axis.
        if not where.ndim:
            values = np.moveaxis(values, 0, d) if host else moveaxis(values, 0, d)
        first = _checked_position(where.item(), shape[d], shape[d], d)
        order, count = None, shape_of(values)[d]
    else:
        count = where.size
        order = _edited(np.insert, np.arange(shape[d]), where, np.arange(shape[d], shape[d] + count))
    size, dtype = (*shape[:d], count, *shape[d + 1 :]), result_type(arr)
    try:
        wide = np.broadcast_to(values, size) if host else broadcast_to(values, size)
    except ValueError:
        raise ShapeError(f"values has shape {shape_of(values)}, which does not broadcast to {size}") from None
    cast = np.asarray(wide, dtype) if host else astype(wide, dtype, copy=False)
    if order is None:
        return concat([taken(arr, slice(0, first), d), cast, taken(arr, slice(first, shape[d]), d)], axis=d)
    return taken(concat([arr, cast], axis=d), order, d)


implements(insert, "small")(lambda arr, values, obj, axis: np.insert(arr, obj, values, axis))


def _edited(function: Callable[..., Any], positions: Any, obj: Any, *values: Any) -> Any:
    """Returns positions that NumPy's ``delete`` or ``insert`` has edited.

    Raises:
        IndexingError, ArgumentError: NumPy raises an IndexError or a ValueError.
    """
    try:
        at = obj if isinstance(obj, slice) else on_host(obj)
        if not isinstance(at, slice) and not at.size:
            at = at.astype(np.int64)  # An empty list has no dtype of its own.
        return function(positions, at, *values)
    except IndexError as error:
        raise IndexingError(str(error)) from None
    except ValueError as error:
        raise ArgumentError(str(error)) from None
