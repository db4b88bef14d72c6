"""NumPy's functions that select elements by conditions and indices, or write to those that are selected.

Results are sharded like the arrays that they are selected from. Functions that write take a tensor, and write into it
as ``x[index] = value`` does: in place, with its layout unchanged.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from shardtensor.core import call, composition, hinted, named
from shardtensor.errors import ArgumentError, ArgumentTypeError, IndexingError, RangeError, ShapeError, type_text
from shardtensor.functions.numpy.comparisons import array_like
from shardtensor.functions.standard.creation import full, zeros_like
from shardtensor.functions.standard.data_types import astype, result_type
from shardtensor.functions.standard.elementwise import clip, equal, greater_equal, less, logical_or, remainder
from shardtensor.functions.standard.indexing import take
from shardtensor.functions.standard.manipulation import broadcast_to, reshape
from shardtensor.functions.standard.repetition import broadcast_shapes, devices_of, on_host, resize, small_on_host
from shardtensor.functions.standard.searching import argmax, where
from shardtensor.functions.standard.statistical import any as _any
from shardtensor.host.blockwise import repeated
from shardtensor.host.units import counted
from shardtensor.sequences import as_list, as_tuple
from shardtensor.sharding.layout import Shape
from shardtensor.sharding.rules import normalize_axes, normalize_axis
from shardtensor.tensor.nested_lists import check_indices_fit, converted
from shardtensor.tensor.operands import shape_of
from shardtensor.tensor.tensor import SCALARS, ArrayLike, ShardedTensor, lacks_elements


def _values_for(dtype: np.dtype[Any], values: Any, caller: str) -> Any:
    """Returns Python integers, and nested lists of them, in the dtype of the elements to which they are written; other
    lists as host arrays, and anything else unchanged.

    Raises:
        RangeError: an integer does not fit the dtype.
    """
    array = array_like(values, caller)
    if type(values) not in (list, tuple, int) or np.asarray(array).dtype.kind not in "iu":
        return array
    try:
        return np.asarray(converted(values, dtype))
    except RangeError as error:
        raise RangeError(f"{caller}: {error}") from None


# -- selection by conditions -----------------------------------------------------------------------


@composition()
def select(condlist: Sequence[ArrayLike], choicelist: Sequence[ArrayLike], default: ArrayLike = 0) -> ShardedTensor:
    """Returns elements of the first choice whose condition is true, and of ``default`` where none is.

    All arrays broadcast; the dtype is that to which the choices and ``default`` promote.

    Args:
        condlist: arrays of bools.
        choicelist: as many arrays, in the same order.
        default: an array or a scalar.

    Raises:
        ArgumentError: there are no conditions, or not as many choices.
        ArgumentTypeError: a condition has another dtype than bool.

    >>> x = st.arange(5)
    >>> st.select([x < 2, x > 3], [x, x**2], -1).tolist()
    [0, 1, -1, -1, 16]
    """
    condlist, choicelist = as_list(condlist, "select: condlist"), as_list(choicelist, "select: choicelist")
    if len(condlist) != len(choicelist) or not len(condlist):
        raise ArgumentError(
            f"select: {counted(len(condlist), 'condition')} and {counted(len(choicelist), 'choice')}; wanted as many "
            "of each, at least one"
        )
    conditions = [array_like(c, "select") for c in condlist]
    for k, condition in enumerate(conditions):
        if result_type(condition).kind != "b":
            raise ArgumentTypeError(f"select: condlist[{k}] has dtype {result_type(condition)}; wanted bools")
    choices = [array_like(c, "select") for c in choicelist]
    result = array_like(default, "select")
    dtype = np.result_type(*[x if type(x) in SCALARS else result_type(x) for x in (*choices, result)])
    for condition, choice in zip(conditions[::-1], choices[::-1], strict=True):
        result = where(condition, choice, result)
    return astype(result, dtype, copy=False)


def piecewise(x: ArrayLike, condlist: Any, funclist: Sequence[Any], *args: Any, **kw: Any) -> ShardedTensor:
    """Computes a function that is defined piece by piece: each function gets the elements where its condition is true.

    The result has x's shape, dtype and sharding. The number of elements of a piece depends on the conditions, so that
    `eval_shape` cannot infer the result of functions; of numbers it can.

    Args:
        x: a tensor, an array or a list.
        condlist: arrays of bools of x's shape, or one of them.
        funclist: for each condition a function of an array of one dimension, or a number; and, if there is one more,
            that for all other elements, which is 0 by default.
        args, kw: further arguments of the functions.

    Raises:
        ArgumentError: there are not as many functions as conditions, nor one more.

    >>> x = st.asarray([-2.0, -1.0, 3.0])
    >>> st.piecewise(x, [x < 0, x >= 0], [lambda v: -v, 10]).tolist()
    [2.0, 1.0, 10.0]
    """
    array: Any = call("asarray", array_like(x, "piecewise"))
    listed = isinstance(condlist, (list, tuple)) and (not condlist or np.ndim(condlist[0]) or not array.ndim)
    conditions = [
        astype(call("asarray", array_like(c, "piecewise")), bool) for c in (condlist if listed else [condlist])
    ]
    funclist = as_list(funclist, "piecewise: funclist")
    if len(funclist) == len(conditions) + 1:
        covered = conditions[0]
        for condition in conditions[1:]:
            covered = logical_or(covered, condition)
        conditions.append(call("logical_not", covered))
    elif len(funclist) != len(conditions):
        raise ArgumentError(
            f"piecewise: {counted(len(funclist), 'function')} for {counted(len(conditions), 'condition')}; wanted as "
            "many, or one more"
        )
    result: Any = zeros_like(array)
    for condition, function in zip(conditions, funclist, strict=True):
        if not callable(function):
            if isinstance(function, ShardedTensor) and not function.ndim:  # It may be known only when traced code runs.
                result = where(condition, astype(function, result.dtype), result)
            else:
                result[condition] = _values_for(result.dtype, function, "piecewise")
        elif array.ndim:
            chosen = array[condition]
            if 0 not in shape_of(chosen):
                result[condition] = function(chosen, *args, **kw)
        elif bool(condition):
            result = call("asarray", function(array, *args, **kw), dtype=result.dtype)
    return result  # type: ignore[no-any-return]


@composition()
def choose(a: ArrayLike, choices: Any, out: ShardedTensor | None = None, mode: str = "raise") -> ShardedTensor:
    """Returns for each element of a, an index, the element of that choice at the same position.

    Args:
        a: integers: a tensor, an array or a list.
        choices: a list of arrays that broadcast, or one array, whose rows are the choices.
        out: a tensor into which the result is written, or None.
        mode: for indices out of bounds: "raise" raises an error, "wrap" takes them modulo the number of choices, and
            "clip" replaces them by the first or the last one.

    Raises:
        ArgumentError: an index is out of bounds, where that is known, or ``mode`` is unknown.
        ArgumentTypeError: a has another dtype than integers.

    >>> st.choose(st.asarray([1, 0, 1]), [[1, 2, 3], [10, 20, 30]]).tolist()
    [10, 2, 30]
    """
    index: Any = array_like(a, "choose")
    if result_type(index).kind not in "biu":
        raise ArgumentTypeError(f"choose: a has dtype {result_type(index)}; wanted integers")
    if type(index) is np.ndarray:
        check_indices_fit(index, "choose")
    arrays = [array_like(choice, "choose") for choice in as_list(choices, "choose: choices")]
    count = len(arrays)
    if not count:
        raise ArgumentError("choose: there are no choices; wanted at least one")
    if mode == "wrap":
        index = remainder(astype(index, np.int64), count)
    elif mode == "clip":
        index = clip(astype(index, np.int64), 0, count - 1)
    elif mode != "raise":
        raise ArgumentError(f"choose: mode is {mode!r}; wanted 'raise', 'wrap' or 'clip'")
    else:
        _check_bounds(index, 0, count, "choose: a")
    dtype = result_type(*arrays)
    shape = broadcast_shapes(shape_of(index), *map(shape_of, arrays))
    result = (
        broadcast_to(astype(arrays[0], dtype), shape)
        if type(arrays[0]) not in SCALARS
        else full(shape, arrays[0], dtype=dtype, device=devices_of(index))
    )
    for k in range(1, count):
        result = where(equal(index, k), arrays[k], result)
    result = astype(result, dtype, copy=False)
    if out is None:
        return result
    out[...] = result
    return out


def _check_bounds(index: Any, first: int, end: int, name: str) -> None:
    """Raises ArgumentError if an index is out of bounds, unless the elements are not known."""
    outside = _any(logical_or(less(index, first), greater_equal(index, end)))
    if not lacks_elements(outside) and bool(outside):
        raise ArgumentError(f"{name} has an index out of bounds; wanted integers from {first} to {end - 1}")


@composition()
def compress(
    condition: ArrayLike, a: ArrayLike, axis: int | None = None, out: ShardedTensor | None = None
) -> ShardedTensor:
    """Returns the slices of a along an axis at which a condition is true.

    Args:
        condition: bools, in one dimension, which are read on the host; those that are missing are false.
        a: a tensor, an array or a list.
        axis: the dimension; None flattens a first.
        out: a tensor into which the result is written, or None.

    Raises:
        ShapeError: ``condition`` does not have one dimension.
        IndexingError: it is true beyond the end of the axis.

    >>> st.compress([False, True], st.asarray([[1, 2], [3, 4], [5, 6]]), axis=0).tolist()
    [[3, 4]]
    """
    chosen = on_host(array_like(condition, "compress"))
    if chosen.ndim != 1:
        raise ShapeError(f"compress: condition has {counted(chosen.ndim, 'dimension')}; wanted one")
    result = take(array_like(a, "compress"), np.flatnonzero(chosen), axis=axis)
    if out is None:
        return result
    out[...] = result
    return out


@composition()
def extract(condition: ArrayLike, arr: ArrayLike) -> ShardedTensor:
    """Returns the elements of the flattened ``arr`` at which a condition is true: ``arr[condition]``.

    >>> st.extract([[True, False], [False, True]], st.asarray([[1, 2], [3, 4]])).tolist()
    [1, 4]
    """
    chosen = reshape(array_like(condition, "extract"), (-1,))
    return take(array_like(arr, "extract"), call("nonzero", chosen)[0])


@composition()
def trim_zeros(filt: ArrayLike, trim: str = "fb", axis: int | Sequence[int] | None = None) -> ShardedTensor:
    """Returns an array without the zeros at its beginning and its end, along each of the axes.

    Args:
        filt: a tensor, an array or a list.
        trim: where to trim: at the front ("f"), at the back ("b"), or both.
        axis: the dimensions; None means all.

    Raises:
        ArgumentError: ``trim`` has other letters.

    >>> st.trim_zeros(st.asarray([0, 1, 0, 2, 0])).tolist()
    [1, 0, 2]
    """
    where_to = trim.lower()
    if where_to not in ("f", "b", "fb", "bf"):
        raise ArgumentError(f"trim_zeros: trim is {trim!r}; wanted 'f', 'b' or 'fb'")
    array: Any = array_like(filt, "trim_zeros")
    ndim = len(shape_of(array))
    axes = tuple(range(ndim)) if axis is None else normalize_axes(tuple(np.atleast_1d(as_tuple(axis)).tolist()), ndim)
    small = small_on_host(array, array)
    used = small[0] != 0 if small else call("not_equal", array, 0)
    parts = [slice(None)] * ndim
    for d in axes:
        size, others = shape_of(array)[d], tuple([k for k in range(ndim) if k != d])
        first, last = _ends(used, others) if size else (size, 0)
        parts[d] = slice(first if "f" in where_to else 0, last if "b" in where_to else size)
    return call("getitem", array, tuple(parts))  # type: ignore[no-any-return]


def _ends(used: Any, axes: tuple[int, ...]) -> tuple[int, int]:
    """Returns the first index of the remaining dimension at which any element of a mask is true, and the last one plus
    1; the size and 0 if there is none.
    """
    if type(used) is np.ndarray:
        positions = np.flatnonzero(some := used.any(axis=axes))
        return (int(positions[0]), int(positions[-1]) + 1) if positions.size else (some.size, 0)
    line = _any(used, axis=axes)
    size = shape_of(line)[0]
    if not bool(_any(line)):
        return size, 0
    return int(argmax(line)), size - int(argmax(call("flip", line)))


# -- writes ----------------------------------------------------------------------------------------


def _check_target(x: Any, name: str) -> None:
    """Raises ArgumentTypeError if the argument that is written is not an array."""
    if not hasattr(x, "dtype"):
        raise ArgumentTypeError(f"{name} is {type_text(x)}; wanted a tensor, which is written")


@named
def place(arr: ShardedTensor, mask: ArrayLike, vals: ArrayLike) -> None:
    """Writes values to the elements of a tensor at which a mask is true, one after the other, and again from the first.

    Args:
        arr: the tensor.
        mask: bools, as many as ``arr`` has elements.
        vals: the values.

    Raises:
        ArgumentError: there are no values.
        ShapeError: ``mask`` has another number of elements than ``arr``.

    >>> x = st.arange(5)
    >>> st.place(x, x > 1, [7, 8])
    >>> x.tolist()
    [0, 1, 7, 8, 7]
    """
    _check_target(arr, "place: arr")
    vals = _values_for(arr.dtype, vals, "place")
    if small := small_on_host(arr, array_like(mask, "place"), vals):
        host_mask, numbers = small
        if numbers.size and host_mask.size == arr.size:
            selected = host_mask.reshape(arr.shape).astype(bool, copy=False)
            positions = np.arange(np.count_nonzero(selected)) % numbers.size
            arr[selected] = numbers.ravel()[positions].astype(arr.dtype, copy=False)
            return
    values, mask_array = reshape(vals, (-1,)), array_like(mask, "place")
    if math.prod(shape_of(mask_array)) != arr.size:
        raise ShapeError(
            f"place: mask has shape {shape_of(mask_array)}; wanted {counted(arr.size, 'element')}, as arr has"
        )
    chosen = astype(reshape(mask_array, shape_of(arr)), bool, copy=False)
    count = int(call("count_nonzero", chosen))
    if not count:
        return
    if not shape_of(values)[0]:
        raise ArgumentError("place: vals has no elements; wanted at least one")
    # Repeated on the host, the values are one array to send.
    listed = repeated(vals, count) if type(vals) is np.ndarray else resize(values, count)
    arr[chosen] = astype(listed, arr.dtype, copy=False)


@named
def putmask(a: ShardedTensor, mask: ArrayLike, values: ArrayLike) -> None:
    """Writes values to the elements of a tensor at which a mask is true: to element n of the flattened tensor value n,
    counted again from the first one.

    Args:
        a: the tensor.
        mask: as many bools as ``a`` has elements, in the same order.
        values: the values.

    Raises:
        ShapeError: ``mask`` has another number of elements.

    >>> x = st.arange(5)
    >>> st.putmask(x, x > 1, [-1, -2])
    >>> x.tolist()
    [0, 1, -1, -2, -1]
    """
    _check_target(a, "putmask: a")
    source, chosen = _values_for(a.dtype, values, "putmask"), array_like(mask, "putmask")
    if shape_of(chosen) != a.shape:
        if math.prod(shape_of(chosen)) != a.size:
            raise ShapeError(f"putmask: mask has shape {shape_of(chosen)}; wanted as many elements as in a, {a.shape}")
        chosen = reshape(chosen, a.shape)
    if 0 in shape_of(source):
        return
    if small := small_on_host(a, chosen, source):
        selected, numbers = small[0].astype(bool, copy=False), small[1].ravel()
        a[selected] = numbers[np.flatnonzero(selected) % numbers.size].astype(a.dtype, copy=False)
        return
    if shape_of(source) and shape_of(source) != a.shape:
        # Repeated on the host, the values are one array to send; repeating them on devices copies each repetition.
        is_host_array = type(source) is np.ndarray
        source = repeated(source, a.size).reshape(a.shape) if is_host_array else resize(source, a.shape)
    a[...] = where(chosen, astype(source, a.dtype, copy=False), a)


@named
def put_along_axis(arr: ShardedTensor, indices: ArrayLike, values: ArrayLike, axis: int | None) -> None:
    """Writes values to a tensor: in each line along an axis, to the elements at the indices of the same line.

    The indices are read on the host, unless a function is traced.

    Args:
        arr: the tensor.
        indices: integers, in as many dimensions as ``arr`` has.
        values: the values, which broadcast to the shape of ``indices``.
        axis: the dimension; None means that of the flattened tensor.

    Raises:
        ArgumentTypeError: ``indices`` are not integers.
        ShapeError: the numbers of dimensions differ.

    >>> x = st.zeros((2, 3), dtype=int)
    >>> st.put_along_axis(x, [[2], [0]], 5, axis=1)
    >>> x.tolist()
    [[0, 0, 5], [5, 0, 0]]
    """
    _check_target(arr, "put_along_axis: arr")
    index: Any = array_like(indices, "put_along_axis")
    if axis is None or not isinstance(index, ShardedTensor) or not lacks_elements(index):
        index = on_host(index)
    if index.dtype.kind not in "iu":
        raise ArgumentTypeError(f"put_along_axis: indices have dtype {index.dtype}; wanted integers")
    ndim = 1 if axis is None else arr.ndim
    if index.ndim != ndim:
        raise ShapeError(
            f"put_along_axis: indices have {counted(index.ndim, 'dimension')} and arr {ndim}; wanted as many"
        )
    if axis is None:
        arr[_places(arr.shape, index)] = values
        return
    along = normalize_axis(axis, ndim)
    grid = [np.arange(n).reshape(-1, *[1] * (ndim - 1 - d)) for d, n in enumerate(arr.shape)]
    grid[along] = index
    arr[tuple(grid)] = values


def _places(shape: Shape, index: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], ...]:
    """Returns indices into a flattened tensor as one index array for each dimension. A write to
    ``x.reshape(-1)`` would be lost where the reshape copies.

    Raises:
        IndexingError: an index is out of bounds.
    """
    size = math.prod(shape)
    outside = (index < -size) | (index >= size)
    if outside.any():
        raise IndexingError(
            f"put_along_axis: index {index[outside][0]} is out of bounds for {counted(size, 'element')}"
        )
    return np.unravel_index(np.where(index < 0, index + size, index), shape)


@named
def fill_diagonal(a: ShardedTensor, val: ArrayLike, wrap: bool = False) -> None:
    """Writes to the main diagonal of a tensor of at least two dimensions, of equal sizes if there are more than two.

    Args:
        a: the tensor.
        val: a number, or numbers that are written one after the other, and again from the first.
        wrap: whether the diagonal of a tall matrix begins again after its end.

    Raises:
        ShapeError: a has fewer than two dimensions, or more than two of different sizes.

    >>> x = st.zeros((2, 2), dtype=int)
    >>> st.fill_diagonal(x, 7)
    >>> x.tolist()
    [[7, 0], [0, 7]]
    """
    _check_target(a, "fill_diagonal: a")
    if a.ndim < 2:
        raise ShapeError(f"fill_diagonal: a has {counted(a.ndim, 'dimension')}; wanted at least two")
    if a.ndim > 2 and len(set(a.shape)) > 1:
        raise ShapeError(f"fill_diagonal: a has shape {a.shape}; wanted dimensions of equal sizes")
    step = a.shape[1] + 1 if a.ndim == 2 else 1 + int(np.cumprod(a.shape[:-1]).sum())
    end = a.shape[1] ** 2 if a.ndim == 2 and not wrap else a.size
    values = _values_for(a.dtype, val, "fill_diagonal")
    if 0 in shape_of(values):
        return
    positions = np.arange(0, min(end, a.size), step)
    if (small := small_on_host(a, values)) and small[0].size:
        a[np.unravel_index(positions, a.shape)] = np.resize(small[0], positions.shape).astype(a.dtype, copy=False)
        return
    diagonal = resize(values, positions.shape) if shape_of(values) else values
    if isinstance(a, ShardedTensor) and a._base_and_view()[1].is_straight:
        a.reshape(-1)[:end:step] = diagonal  # a slice takes fewer kernels than index arrays
    else:  # The flattened array is a copy.
        a[np.unravel_index(positions, a.shape)] = diagonal


# -- functions along axes --------------------------------------------------------------------------


@hinted
def apply_over_axes(func: Callable[[Any, int], Any], a: ArrayLike, axes: int | Sequence[int]) -> ShardedTensor:
    """Calls a function of an array and an axis for one axis after the other.

    Args:
        func: the function; its result has as many dimensions as its argument, or one less.
        a: a tensor, an array or a list.
        axes: the axes.

    Raises:
        ShapeError: a result has another number of dimensions.

    >>> st.apply_over_axes(st.sum, st.ones((2, 3, 4)), [0, 2]).tolist()
    [[[8.0], [8.0], [8.0]]]
    """
    array: Any = call("asarray", array_like(a, "apply_over_axes"))
    listed: Any = as_list(axes, "apply_over_axes: axes") if np.iterable(axes) else [axes]
    for axis in listed:
        d = axis + array.ndim if axis < 0 else axis
        result = func(array, d)
        if result.ndim == array.ndim - 1:
            result = call("expand_dims", result, axis=d)
        if result.ndim != array.ndim:
            raise ShapeError("apply_over_axes: func returned an array of another number of dimensions")
        array = result
    return array  # type: ignore[no-any-return]
