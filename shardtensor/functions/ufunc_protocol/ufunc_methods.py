"""The methods of NumPy's ufuncs, for ufuncs whose reductions and cumulative functions are not operators.

`fold` reduces by an associative ufunc and `running` is its scan. `accumulated` and `segments` combine elements along a
dimension that is whole on each device, and `updated` writes to elements that may occur several times. Public functions
are those of the ufuncs: see `shardtensor.functions.ufunc_protocol.ufunc_calls`.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from shardtensor.backend.device import HOST
from shardtensor.backend.functions import function_of
from shardtensor.backend.registry import array_backend, backend_of
from shardtensor.core import OPS, bind_into, call, implements, operator
from shardtensor.errors import ArgumentTypeError, IndexingError, ShapeError
from shardtensor.functions.algorithms.distributed import Whole, distributed
from shardtensor.functions.algorithms.scan import scan, scan_of_whole
from shardtensor.functions.algorithms.shards import MeshCommunicator, Shards
from shardtensor.functions.building.monoids import FOLDS, folded, reduced_by
from shardtensor.host.units import counted
from shardtensor.sharding.layout import Shape
from shardtensor.sharding.rules import normalize_axis, reduction
from shardtensor.sharding.shard_context import ShardContext
from shardtensor.tensor.operands import shape_of
from shardtensor.tensor.tensor import ArrayLike, ShardedTensor, lacks_elements
from shardtensor.tensor.value import Aval

_DERIVATIVES = "of_ufunc_methods"


def neutral_of(name: str, dtype: np.dtype[Any]) -> Any:
    """Returns the element that changes nothing, of a ufunc in `FOLDS`: for unsigned integers, all bits are the greatest
    one.
    """
    if name == "bitwise_and":
        return True if dtype.kind == "b" else int(np.invert(np.zeros((), dtype)))
    return getattr(np, name).identity


# -- reductions ------------------------------------------------------------------------------------


def _fold_dtype(x: Any, *, ufunc: str, **params: Any) -> Any:
    return getattr(np, ufunc).reduce(np.ravel(x), keepdims=True)


@operator(reduction, combine="fold", dtype=_fold_dtype, error_name="reduce", tags=("internal", "unblocked"))
def fold(
    x: ArrayLike, /, *, ufunc: str, axis: int | tuple[int, ...] | None = None, keepdims: bool = False
) -> ShardedTensor:
    """Reduces along ``axis`` by one of the ufuncs in `FOLDS`; sharding and errors are those of `sum`.

    >>> from shardtensor.functions.ufunc_protocol.ufunc_methods import fold
    >>> fold(st.asarray([6, 3, 1]), ufunc="bitwise_xor").item()
    4
    """


implements(fold, "kernel")(reduced_by)


# -- scans -----------------------------------------------------------------------------------------


@operator(ufunc="accumulate", error_name="accumulate", tags=("internal",))
def running(x: ArrayLike, /, *, ufunc: str, axis: int) -> ShardedTensor:
    """Applies an associative ufunc to each element and the result before it: `numpy.ufunc.accumulate`.

    Shape, sharding and messages are those of `cumulative_sum`.

    >>> from shardtensor.functions.ufunc_protocol.ufunc_methods import running
    >>> running(st.asarray([2, 5, 3]), ufunc="maximum", axis=0).tolist()
    [2, 5, 5]
    """


ASSOCIATIVE = frozenset((*FOLDS, "add", "fmax", "fmin", "logical_and", "logical_or", "maximum", "minimum", "multiply"))
"""The ufuncs that give the same result however elements are grouped, but for rounding."""


class _Running(NamedTuple):
    """The functions of a scan by an associative ufunc; see `shardtensor.functions.algorithms.scan.Functions`."""

    ufunc: str

    def of(self, xp: Any) -> tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]:
        """The reduction, the cumulative function and the function of two arrays."""
        if xp is np:
            ufunc = getattr(np, self.ufunc)
            return self._reduce, ufunc.accumulate, ufunc
        return functools.partial(self._folded, xp), functools.partial(self._accumulated, xp), self._combine

    def _reduce(self, x: Any, *, axis: int, dtype: None, keepdims: bool = False) -> Any:
        if x.shape[axis]:
            return getattr(np, self.ufunc).reduce(x, axis=axis, keepdims=keepdims)
        return self._nothing(np, x, axis)

    def _folded(self, xp: Any, x: Any, *, axis: int, dtype: None, keepdims: bool = False) -> Any:
        if not x.shape[axis]:
            return self._nothing(xp, x, axis)
        result = folded(xp, _function(self.ufunc, x), self._operand(xp, x), axis)
        return result if keepdims else result[(*(slice(None),) * axis, 0)]

    def _accumulated(self, xp: Any, x: Any, *, axis: int, dtype: None) -> Any:
        apply, at = _function(self.ufunc, x), (slice(None),) * axis
        x, step = self._operand(xp, x), 1
        while step < x.shape[axis]:  # Each pass doubles the number of elements that each element combines.
            sums = apply(x[(*at, slice(None, -step))], x[(*at, slice(step, None))])
            x, step = xp.concat([x[(*at, slice(step))], sums], axis=axis), 2 * step
        return xp.asarray(x, copy=True) if step == 1 else x

    def _combine(self, x: Any, y: Any, out: Any) -> None:
        out[...] = _function(self.ufunc, x)(x, y)

    def _operand(self, xp: Any, x: Any) -> Any:
        """Returns an array in the dtype of the result, in which elements are combined."""
        if self.ufunc.startswith("logical"):
            return x != 0
        backend = array_backend(x) or backend_of(HOST)
        return xp.asarray(x, dtype=_running_dtype(self.ufunc, backend.dtype_of(x)))

    def _nothing(self, xp: Any, x: Any, axis: int) -> Any:
        """Returns the total of a part without elements, after which there are only parts without elements."""
        return xp.zeros((*x.shape[:axis], 1, *x.shape[axis + 1 :]), dtype=x.dtype)


@implements(running, "kernel")
def _running_kernel(xp: Any, context: ShardContext | None, x: Any, *, ufunc: str, axis: int) -> Any:
    return _Running(ufunc).of(xp)[1](x, axis=axis, dtype=None)


def _running_of_whole(value: Aval, *, ufunc: str, axis: int) -> Whole | None:
    dtype, functions = _running_dtype(ufunc, value.dtype), _Running(ufunc).of
    return scan_of_whole(value, normalize_axis(axis, value.ndim), functions, dtype=dtype, exact="biumM")


@distributed(running, whole=_running_of_whole)
def _running(x: Shards, along: Callable[[int], MeshCommunicator], *, ufunc: str, axis: int) -> Shards:
    axis, dtype = normalize_axis(axis, x.value.ndim), _running_dtype(ufunc, x.value.dtype)
    return scan(x, along(axis), axis, _Running(ufunc).of, dtype=dtype, loop=None)


def _running_dtype(ufunc: str, dtype: np.dtype[Any]) -> np.dtype[Any]:
    return getattr(np, ufunc).accumulate(np.ones(1, dtype)).dtype  # type: ignore[no-any-return]


# -- along a dimension that is whole ---------------------------------------------------------------


def _along(ndim: int, axis: int, name: str) -> str:
    names = [f"d{d}" for d in range(ndim)]
    left, right = [" ".join([*names[:axis], n, *names[axis + 1 :]]) for n in ("k!", name)]
    return f"{left} -> {right}"


def _accumulated_rule(shapes: Sequence[Shape], *, ufunc: str, axis: int) -> str:
    return _along(len(shapes[0]), axis, "k")


def _accumulated_dtype(x: Any, *, ufunc: str, axis: int) -> Any:
    return getattr(np, ufunc).accumulate(np.ravel(x))


@operator(_accumulated_rule, dtype=_accumulated_dtype, error_name="accumulate", tags=("internal",))
def accumulated(x: ArrayLike, /, *, ufunc: str, axis: int) -> ShardedTensor:
    """Applies a ufunc that is not associative to each element and the result before it: `numpy.ufunc.accumulate`.

    The result has x's shape. A split of ``axis`` moves to another dimension.

    >>> from shardtensor.functions.ufunc_protocol.ufunc_methods import accumulated
    >>> accumulated(st.asarray([2, 5, 3]), ufunc="subtract", axis=0).tolist()
    [2, -3, -6]
    """


@implements(accumulated, "kernel")
def _accumulated(xp: Any, context: ShardContext | None, x: Any, *, ufunc: str, axis: int) -> Any:
    if xp is np:
        return getattr(np, ufunc).accumulate(x, axis=axis)
    apply, at = _function(ufunc, x), (slice(None),) * axis
    lines = [x[(*at, slice(1))]] if x.shape[axis] else [x]
    for i in range(1, x.shape[axis]):
        lines.append(apply(lines[-1], x[(*at, slice(i, i + 1))]))
    return xp.concat(lines, axis=axis)


def _function(name: str, x: Any) -> Any:
    """Returns the elementwise function of an operator on the arrays of x's backend."""
    return function_of(array_backend(x) or backend_of(HOST), name)


def positions_of(indices: Any, what: str, size: int) -> tuple[int, ...]:
    """Returns the argument ``indices`` of `numpy.ufunc.reduceat`, which is read on the host.

    Raises:
        ArgumentTypeError: they are not integers.
        ShapeError: they do not have one dimension.
        IndexingError: an index is out of bounds.
    """
    starts = np.asarray(indices)
    if starts.ndim != 1:
        raise ShapeError(f"numpy.{what}: indices has {counted(starts.ndim, 'dimension')}; wanted one")
    if starts.size and starts.dtype.kind not in "iu":
        raise ArgumentTypeError(f"numpy.{what}: indices has dtype {starts.dtype}; wanted integers")
    for i in starts.tolist():
        if not 0 <= i < size:
            raise IndexingError(f"numpy.{what}: index {i} is out of bounds for a dimension of size {size}")
    return tuple(map(int, starts.tolist()))


def _segments_rule(shapes: Sequence[Shape], *, starts: tuple[int, ...], axis: int, **params: Any) -> tuple[str, Shape]:
    shape = shapes[0]
    return _along(len(shape), axis, "segments"), (*shape[:axis], len(starts), *shape[axis + 1 :])


def _segments_dtype(x: Any, *, ufunc: str, dtype: Any = None, **params: Any) -> Any:
    return getattr(np, ufunc).reduceat(np.ravel(x), [0], dtype=dtype)


@operator(_segments_rule, dtype=_segments_dtype, error_name="reduceat", tags=("internal",))
def segments(
    x: ArrayLike, /, *, ufunc: str, starts: tuple[int, ...], axis: int, dtype: npt.DTypeLike | None = None
) -> ShardedTensor:
    """Reduces the segments of x along ``axis`` that begin at ``starts``: `numpy.ufunc.reduceat`.

    A split of ``axis`` moves to another dimension.

    >>> from shardtensor.functions.ufunc_protocol.ufunc_methods import segments
    >>> segments(st.arange(6), ufunc="add", starts=(0, 2, 5), axis=0).tolist()
    [1, 9, 5]
    """


@implements(segments, "kernel")
def _segments(
    xp: Any,
    context: ShardContext | None,
    x: Any,
    *,
    ufunc: str,
    starts: tuple[int, ...],
    axis: int,
    dtype: Any,
) -> Any:
    if xp is np:
        return getattr(np, ufunc).reduceat(x, np.asarray(starts, np.intp), axis=axis, dtype=dtype)
    if context is not None:
        x = xp.asarray(x, dtype=context.dtype)
    apply, at, parts = _function(ufunc, x), (slice(None),) * axis, []
    for start, end in itertools.pairwise((*starts, x.shape[axis])):
        part = x[(*at, slice(start, max(end, start + 1)))]
        parts.append(folded(xp, apply, part, axis) if ufunc in ASSOCIATIVE else _in_order(apply, part, at))
    return xp.concat(parts, axis=axis) if parts else x[(*at, slice(0))]


def _in_order(apply: Any, x: Any, at: tuple[slice, ...]) -> Any:
    result = x[(*at, slice(1))]
    for i in range(1, x.shape[len(at)]):
        result = apply(result, x[(*at, slice(i, i + 1))])
    return result


# -- writes to elements that may occur several times -----------------------------------------------


def update(x: ShardedTensor, index: Any, name: str, values: Sequence[Any], what: str) -> None:
    """Writes the results of an operator to the elements ``x[index]``, once for each time that an element is indexed.

    Index arrays are read on the host, as by ``x[index]``, unless a function is traced. An index of few elements costs
    time and memory in proportion to them: where none of them occurs twice, the call is ``x[index] = op(x[index],
    value)``; otherwise they are updated in a tensor of their own. On separate memories, reading elements of a view by
    index arrays copies the view.

    Raises:
        IndexingError: the index is out of bounds.
        ShapeError: the values do not broadcast to the shape of the elements.
    """
    entries = index if isinstance(index, tuple) else (index,)
    if any(isinstance(e, ShardedTensor) and lacks_elements(e) for e in entries):
        _update_unknown(x, index, name, values, what)
        return
    places = _coordinates(x.shape, index, what)
    if values and not _fits(shape_of(values[0]), places.shape[1:]):
        raise ShapeError(f"numpy.{what}: values of shape {shape_of(values[0])} for elements of {places.shape[1:]}")
    if x.ndim and math.prod(places.shape[1:]) * _SORTED_ELEMENT > x.size:
        listed = [_spread(v, places.shape[1:], x.dtype) for v in values] or [None]
        bind_into(x, OPS["updated"], (x, np.ascontiguousarray(places.reshape(x.ndim, -1)), *listed), (name,))
        return
    flat = np.ravel_multi_index(tuple(places.reshape(len(places), -1)), x.shape) if x.size and x.ndim else places[:1]
    ordered = np.sort(flat, axis=None)  # np.unique takes 50 times as long where most numbers differ.
    if not (ordered[1:] == ordered[:-1]).any():
        x[index] = call(name, x[index], *values)
        return
    listed = [_spread(v, places.shape[1:], x.dtype) for v in values] or [None]
    distinct, which = np.unique(flat, return_inverse=True)
    at = np.unravel_index(distinct, x.shape)
    x[at] = call("updated", x[at], np.ascontiguousarray(which.reshape(1, -1)), *listed, ufunc=name)


def _update_unknown(x: ShardedTensor, index: Any, name: str, values: Sequence[Any], what: str) -> None:
    """Does the same where the index is traced: the coordinates are those of the numbers that it selects."""
    numbers = call("reshape", call("arange", x.size), x.shape)[index]
    if values and not _fits(shape_of(values[0]), numbers.shape):
        raise ShapeError(f"numpy.{what}: values of shape {shape_of(values[0])} for elements of {numbers.shape}")
    listed = [_spread(v, numbers.shape, x.dtype) for v in values] or [None]
    places: list[Any] = []
    for n in x.shape[::-1]:
        numbers, place = call("floor_divide", numbers, n), call("remainder", numbers, n)
        places.insert(0, call("reshape", place, (-1,)))
    bind_into(x, OPS["updated"], (x, call("stack", places), *listed), (name,))


_SORTED_ELEMENT = 8
"""The number of elements of x that are copied in the time in which one element of an index is sorted."""


def _fits(shape: Shape, elements: Shape) -> bool:
    """Whether values of a shape broadcast to elements of another."""
    sizes = zip(reversed(shape), reversed(elements), strict=False)
    return len(shape) <= len(elements) and all(n in (1, m) for n, m in sizes)


def _coordinates(shape: Shape, index: Any, what: str) -> np.ndarray[Any, Any]:
    """Returns the coordinates of the elements that an index selects, in one more leading dimension."""
    try:
        entries = index if isinstance(index, tuple) else (index,)
        if len(entries) == len(shape) and all(map(_is_listed, entries)) and len({e.shape for e in entries}) == 1:
            # Most long indices have this form, which selects one element for each position.
            lines = [_listed(np.asarray(e), shape, d)[0] for d, e in enumerate(entries)]
            return lines[0][None] if len(lines) == 1 else np.stack(lines)
        items, known = _in_items(shape, entries)
        sizes = tuple(map(len, items))
        lines = [line.reshape((-1,) + (1,) * (len(items) - d - 1)) for d, line in enumerate(items)]
        return np.array([np.broadcast_to(line, sizes)[known] for line in lines], np.int64).reshape(
            (len(shape), *np.broadcast_to(0, sizes)[known].shape)
        )
    except IndexError as error:
        raise IndexingError(f"numpy.{what}: {error}") from None


def _in_items(shape: Shape, index: tuple[Any, ...]) -> tuple[list[Any], tuple[Any, ...]]:
    """Returns the positions along each dimension that an index selects, and the index with positions in these lists in
    place of its own, so that memory is in proportion to the index and not to the shape.
    """
    entries = [np.asarray(e) if isinstance(e, (ShardedTensor, list, tuple, range)) else e for e in index]
    rest = len(shape) - sum(_dimensions_of(e) for e in entries)
    if rest < 0:
        raise IndexError(f"too many indices: {len(shape) - rest} for {counted(len(shape), 'dimension')}")
    items: list[Any] = []
    known: list[Any] = []
    for e in entries:
        d = len(items)
        if e is Ellipsis:
            items += map(np.arange, shape[d : d + rest])
        elif isinstance(e, slice):
            items.append(np.arange(*e.indices(shape[d])))
            e = slice(None)
        elif _dimensions_of(e):
            listed = _listed(np.asarray(e), shape, d)
            items += [x.reshape(-1) for x in listed]
            known += [np.arange(x.size).reshape(x.shape) for x in listed[:-1]]
            e = np.arange(listed[-1].size).reshape(listed[-1].shape) if isinstance(e, np.ndarray) else 0
        known.append(e)  # None, and a bool without dimensions, select all elements or nothing.
    return [*items, *map(np.arange, shape[len(items) :])], tuple(known)


def _is_listed(entry: Any) -> bool:
    """Whether an entry of an index is an array of integers."""
    return isinstance(entry, (ShardedTensor, np.ndarray)) and entry.dtype.kind in "iu" and entry.ndim > 0


def _dimensions_of(entry: Any) -> int:
    """Returns the number of dimensions of an array that an entry of an index takes."""
    if entry is None or entry is Ellipsis:
        return 0
    is_mask = isinstance(entry, (bool, np.bool_)) or (isinstance(entry, np.ndarray) and entry.dtype == bool)
    return np.ndim(entry) if is_mask else 1


def _listed(array: np.ndarray[Any, Any], shape: Shape, d: int) -> Sequence[np.ndarray[Any, Any]]:
    """Returns the positions that an index array or a mask selects along the dimensions from d on."""
    if array.dtype == bool:
        if array.shape != shape[d : d + array.ndim]:
            raise IndexError(f"a mask of shape {array.shape} for dimensions of sizes {shape[d : d + array.ndim]}")
        return array.nonzero()
    if array.dtype.kind not in "iu" and array.size:
        raise IndexError("wanted integers, slices, '...', None, and arrays of integers or bools")
    if not array.size:
        return (array.astype(np.int64),)
    # As bits, negative numbers are the greatest ones, so that one pass is enough for both bounds.
    if int(array.view(array.dtype.str.replace("i", "u")).max()) < shape[d] <= 1 << (8 * array.itemsize - 1):
        return (array.astype(np.int64, copy=False),)
    ends = int(array.min()), int(array.max())
    for end in ends:
        if not -shape[d] <= end < shape[d]:
            raise IndexError(f"index {end} is out of bounds for axis {d} with size {shape[d]}")
    numbers = array.astype(np.int64, copy=False)
    return (numbers if ends[0] >= 0 else np.where(numbers < 0, numbers + shape[d], numbers),)


def _spread(value: Any, shape: Shape, dtype: np.dtype[Any]) -> Any:
    """Returns the values of `update` in one dimension; a Python scalar takes the dtype of the elements if it can."""
    if type(value) in (bool, int, float, complex):
        value = np.asarray(value) if dtype.kind in "mM" else np.asarray(value, np.result_type(dtype, value))
    if isinstance(value, np.ndarray):
        return np.ascontiguousarray(np.broadcast_to(value, shape)).reshape(-1)
    return call("reshape", call("broadcast_to", value, shape), (-1,))


def _updated_rule(shapes: Sequence[Shape], *, ufunc: str) -> str:
    names = " ".join([f"d{d}" for d in range(len(shapes[0]))])
    return f"{names}, c! k!, {'k!' if shapes[2] else ''} -> {names}"


def _updated_dtype(x: Any, places: Any, values: Any = None, *, ufunc: str) -> Any:
    return x


@operator(
    _updated_rule,
    operands=("x", "places", "values"),
    dtype=_updated_dtype,
    error_name="at",
    tags=("internal",),
)
def updated(x: ArrayLike, places: ArrayLike, /, values: ArrayLike | None = None, *, ufunc: str) -> ShardedTensor:
    """Returns x after `numpy.ufunc.at`: the ufunc is applied once for each column of ``places``, the coordinates.

    x keeps its sharding. Each device applies the ufunc to the elements of its shard.

    >>> from shardtensor.functions.ufunc_protocol.ufunc_methods import updated
    >>> updated(st.zeros(3), np.array([[0, 2, 0]]), np.ones(3), ufunc="add").tolist()
    [2.0, 0.0, 1.0]
    """


@implements(updated, "kernel")
def _updated(xp: Any, context: ShardContext | None, x: Any, places: Any, values: Any, *, ufunc: str) -> Any:
    result = xp.asarray(x, copy=True)
    if context is not None and x.shape != context.shapes[0]:
        box = context.boxes[0]
        inside = None
        for d, (begin, end) in enumerate(box):
            here = (places[d] >= begin) & (places[d] < end)
            inside = here if inside is None else inside & here
        begins = xp.asarray([begin for begin, _ in box], dtype=places.dtype)
        positions = xp.nonzero(inside)[0]  # A mask as an index would not wait for the elements that decide the shape.
        places = places[:, positions] - begins[:, None]
        values = None if values is None else values[positions]
    operands = () if values is None else (values,)
    if xp is np:
        getattr(np, ufunc).at(result, tuple(places), *operands)
        return result
    # Libraries differ in what they do with repeated indices, so each round writes every element at most once.
    apply = _function(ufunc, x)
    flat = xp.zeros_like(places[0])
    for d, n in enumerate(result.shape):
        flat = flat * n + places[d]
    order = xp.argsort(flat, stable=True)
    ordered = flat[order]
    rank = xp.arange(flat.shape[0], dtype=places.dtype) - xp.searchsorted(ordered, ordered)
    for k in itertools.count():
        chosen = order[xp.nonzero(rank == k)[0]]
        if not chosen.shape[0]:
            break
        at = tuple([places[d][chosen] for d in range(len(result.shape))])
        result[at] = xp.asarray(apply(result[at], *[v[chosen] for v in operands]), dtype=result.dtype)
    return result
