"""Declarations of the functions that repeat elements or pad with them: broadcasting, `tile`, `repeat`, `resize`, `pad`.

The results are independent tensors of x's dtype. Dimensions that are not repeated keep their sharding. Dimensions whose
size changes remain sharded, by the split rule for the new size.

Raises:
    ArgumentTypeError: a number of repetitions or a width is not an integer.
    ShapeError: it is negative, or there are too many of them.
    AxisError: x has no such axis.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from shardtensor.backend.protocol import current_device
from shardtensor.backend.registry import array_backend
from shardtensor.backend.small_floats import is_element
from shardtensor.communication import transfer
from shardtensor.core import call, implements, is_executing, operator
from shardtensor.errors import ArgumentError, ArgumentTypeError, ShapeError, type_text
from shardtensor.functions.algorithms.first_device import runs_whole
from shardtensor.functions.building.unsplit_lines import are_whole, padded
from shardtensor.functions.standard.creation import arange, full, zeros
from shardtensor.functions.standard.data_types import astype, result_type
from shardtensor.functions.standard.elementwise import add, divide, floor, multiply, subtract
from shardtensor.functions.standard.joining import concat
from shardtensor.functions.standard.manipulation import broadcast_to, reshape
from shardtensor.functions.standard.statistical import max as _max
from shardtensor.functions.standard.statistical import mean as _mean
from shardtensor.functions.standard.statistical import min as _min
from shardtensor.host.memory_pool import check_addressable
from shardtensor.host.units import counted
from shardtensor.sharding.layout import NamedSharding, Shape, checked_shape
from shardtensor.sharding.mesh import integers
from shardtensor.sharding.rules import normalize_axis
from shardtensor.tensor.operands import fill_value, shape_of
from shardtensor.tensor.ownership import reading
from shardtensor.tensor.tensor import SCALARS, ArrayLike, ShardedTensor

_DERIVATIVES = "of_movement"

# -- broadcasting ----------------------------------------------------------------------------------


def broadcast_shapes(*shapes: int | Shape) -> Shape:
    """Returns the shape to which arrays of these shapes broadcast.

    Raises:
        ShapeError: they do not broadcast.
        ArgumentTypeError: a shape is neither an integer nor a sequence of integers.

    >>> st.broadcast_shapes((3, 1), (4,), ())
    (3, 4)
    """
    sizes = [checked_shape(shape, "broadcast_shapes") for shape in shapes]
    try:
        return np.broadcast_shapes(*sizes)
    except ValueError:
        raise ShapeError(f"broadcast_shapes: {', '.join(map(str, sizes))} do not broadcast together") from None


@operator(variadic=True, tags=("any dtype",))
def broadcast_arrays(*arrays: ArrayLike) -> tuple[ShardedTensor, ...]:
    """Broadcasts arrays against one another: each to the shape that all of them have in common.

    The results are independent tensors, sharded as by `broadcast_to`: each keeps the sharding of the dimensions that
    are not repeated.

    Raises:
        ShapeError: the shapes do not broadcast.

    >>> [x.tolist() for x in st.broadcast_arrays(st.asarray([1, 2]), st.asarray([[3], [4]]))]
    [[[1, 2], [1, 2]], [[3, 3], [4, 4]]]
    """


@implements(broadcast_arrays, "composite")
def _broadcast_arrays(arrays: Sequence[Any]) -> tuple[Any, ...]:
    shape = broadcast_shapes(*map(shape_of, arrays))
    return tuple([broadcast_to(x, shape) for x in arrays])


implements(broadcast_arrays, "small")(lambda arrays: np.broadcast_arrays(*arrays))


# -- tile and repeat -------------------------------------------------------------------------------


@operator()
def tile(x: ArrayLike, repetitions: int | Iterable[int], /) -> ShardedTensor:
    """Repeats x as a whole along each dimension: in two dimensions, as tiles of a floor.

    Args:
        x: a tensor or a host array.
        repetitions: the number of repetitions along each dimension. If they are fewer than x's dimensions, the first
            ones are not repeated; if they are more, x gets leading dimensions.

    Raises:
        ShapeError: a number is negative.

    >>> st.tile(st.asarray([[1, 2]]), (2, 2)).tolist()
    [[1, 2, 1, 2], [1, 2, 1, 2]]
    """


@implements(tile, "composite")
def _tile(x: Any, repetitions: Any) -> Any:
    counts = tuple(integers(repetitions, "repetitions"))
    if any(n < 0 for n in counts):
        raise ShapeError(f"repetitions {counts} has a negative number")
    ndim = max(len(shape_of(x)), len(counts))
    counts = (1,) * (ndim - len(counts)) + counts
    sizes = zip((1,) * (ndim - len(shape_of(x))) + shape_of(x), counts, strict=True)
    check_addressable(tuple([n * count for n, count in sizes]), result_type(x))
    if ndim > len(shape_of(x)):
        x = reshape(x, (1,) * (ndim - len(shape_of(x))) + shape_of(x))
    # Along a split dimension the repetitions are joined, so that each device receives only its part of the result.
    chains = x.sharding.spec.chains_of(ndim) if isinstance(x, ShardedTensor) else ((),) * ndim
    for d, count in enumerate(counts):
        if chains[d] and count > 1:
            x = _joined(x, count, d)
    rest = [1 if chain and count else count for chain, count in zip(chains, counts, strict=True)]
    narrow: list[int] = []
    wide: list[int] = []
    for count, n in zip(rest, shape_of(x), strict=True):
        narrow += [n] if count == 1 else [1, n]
        wide += [n] if count == 1 else [count, n]
    repeated = broadcast_to(reshape(x, tuple(narrow)), tuple(wide)) if narrow != wide else x
    return reshape(repeated, tuple([count * n for count, n in zip(rest, shape_of(x), strict=True)]), copy=True)


implements(tile, "small")(np.tile)

_JOINED = 16
"""The number of arrays that are joined at a time."""


def _joined(x: Any, count: int, axis: int) -> Any:
    """Returns as many repetitions along an axis. What is repeated often is joined in groups, whose number is a
    logarithm, so that no join has many operands.
    """
    if count <= _JOINED:
        return concat([x] * count, axis=axis)
    groups, rest = divmod(count, _JOINED)
    whole = _joined(concat([x] * _JOINED, axis=axis), groups, axis)
    return concat([whole, *[x] * rest], axis=axis) if rest else whole


@operator()
def repeat(x: ArrayLike, repeats: int | ArrayLike, /, *, axis: int | None = None) -> ShardedTensor:
    """Repeats each element of x along an axis.

    A sharded ``axis`` remains sharded: only elements at the boundaries between devices are transferred.

    Args:
        x: a tensor or a host array.
        repeats: the number of repetitions of each element: an integer, or a 1-d array or list with one for each
            position along ``axis``, which is read on the host.
        axis: the dimension; None flattens x first.

    Raises:
        ShapeError: a number is negative, or there is not one for each position.
        ConcretizationError: ``repeats`` is a tensor whose elements are not known, which determine the result's shape.

    >>> st.repeat(st.asarray([1, 2]), 2).tolist(), st.repeat(st.asarray([1, 2]), [0, 3]).tolist()
    ([1, 1, 2, 2], [2, 2, 2])
    """


@implements(repeat, "composite")
def _repeat(x: Any, repeats: Any, axis: int | None) -> Any:
    if axis is None or not shape_of(x):
        flat = reshape(x, (-1,))
        return _repeat(flat, repeats, normalize_axis(0 if axis is None else axis, 1))
    d, shape = normalize_axis(axis, len(shape_of(x))), shape_of(x)
    counts = _counts(repeats)
    # The sum of large integers would wrap; that of floats is close enough to compare it with the address space.
    total = int(counts.ravel()[0]) * shape[d] if counts.size == 1 else int(counts.sum(dtype=np.float64))
    if total > _NEVER_WRAPS:
        check_addressable((*shape[:d], total, *shape[d + 1 :]), result_type(x))
    if counts.size == 1:
        n = int(counts.ravel()[0])
        wide = broadcast_to(reshape(x, (*shape[: d + 1], 1, *shape[d + 1 :])), (*shape[: d + 1], n, *shape[d + 1 :]))
        return reshape(wide, (*shape[:d], shape[d] * n, *shape[d + 1 :]), copy=True)
    if counts.shape != (shape[d],):
        raise ShapeError(
            f"repeats has shape {counts.shape}, and dimension {d} of x has size {shape[d]}; wanted one each"
        )
    return taken(x, np.repeat(np.arange(shape[d]), counts.astype(np.int64, copy=False)), d)


_NEVER_WRAPS = 2**40
"""Lengths up to this one are those of arrays that some machine may have."""


@implements(repeat, "small")
def _repeat_small(x: Any, repeats: int, axis: int | None) -> Any:
    return np.repeat(x, repeats, axis=axis)


def _counts(repeats: Any) -> np.ndarray[Any, Any]:
    """Returns ``repeats`` as a host array of integers."""
    try:
        counts = on_host(repeats)
    except ValueError as error:
        raise ShapeError(f"repeats has nested lists of different lengths ({error})") from None
    if counts.dtype.kind not in "biu" and counts.size:
        raise ArgumentTypeError(f"repeats has dtype {counts.dtype}; wanted integers")
    if counts.ndim > 1:
        raise ShapeError(f"repeats has shape {counts.shape}; wanted an integer or one dimension")
    if (counts < 0).any():
        raise ShapeError(f"repeats has a negative number, {counts.min()}")
    return counts if counts.dtype == np.uint64 else counts.astype(np.int64)


def on_host(x: Any) -> np.ndarray[Any, Any]:
    """Returns an argument that determines shapes, such as an index, as a host array."""
    if isinstance(x, ShardedTensor) and not x.is_fully_addressable:
        return transfer.gather(x, "gather")
    backend = array_backend(x)
    if backend is None or isinstance(x, (np.ndarray, np.generic)):
        host = np.asarray(x)
        if host is not x and host.dtype == object and not host.ndim and np.iterable(x):
            raise ArgumentTypeError(f"{x!r:.60} is {type_text(x)}; wanted a number, a list or an array")
        return host
    device = current_device() or backend.device_of(x)
    backend.wait_for_caller(device)
    with backend.on(device):
        return np.asarray(backend.to_host(x, device))


def taken(x: Any, index: Any, axis: int) -> Any:
    """Returns ``x[index]`` along an axis, for a slice or an index array."""
    return call("getitem", x, (*(slice(None),) * axis, index_of(x, index)))


def index_of(x: Any, index: Any) -> Any:
    """Returns a host index array as the indexing of x takes it: in a mapped function, as an array of the device."""
    mapped = current_device() is not None and not isinstance(x, ShardedTensor)
    return call("asarray", index) if mapped and isinstance(index, np.ndarray) else index


@operator()
def resize(x: ArrayLike, /, new_shape: int | tuple[int, ...]) -> ShardedTensor:
    """Returns x's elements, in row-major order, in another shape; they are repeated, or the last ones are left out, if
    the number of elements differs.

    If x has no elements, the result consists of zeros.

    Args:
        x: a tensor or a host array.
        new_shape: the shape of the result.

    >>> st.resize(st.asarray([1, 2, 3]), (2, 2)).tolist()
    [[1, 2], [3, 1]]
    """


@implements(resize, "composite")
def _resize(x: Any, new_shape: Any) -> Any:
    shape, old = checked_shape(new_shape, "resize: new_shape"), math.prod(shape_of(x))
    new = math.prod(shape)
    if not old or not new:
        return zeros(shape, dtype=result_type(x), device=devices_of(x))
    flat = reshape(x, (-1,))
    if new > old:
        check_addressable(shape, result_type(flat))
        flat = tile(flat, -(-new // old))
    return reshape(flat[:new], shape, copy=True)


implements(resize, "small")(np.resize)


def devices_of(x: Any) -> Any:
    """Returns the ``device=`` argument for a new array beside x: x's mesh if x was placed explicitly."""
    return x.sharding.mesh if isinstance(x, ShardedTensor) and x.committed else None


# -- pad -------------------------------------------------------------------------------------------

_INDEXED = ("edge", "reflect", "symmetric", "wrap")
"""The modes in which each new element is a copy of an element in the same line."""

_STATISTICS: dict[str, Callable[..., Any]] = {
    "maximum": _max, "mean": _mean, "median": functools.partial(call, "median"), "minimum": _min,
}  # fmt: skip

_MODES = ("constant", "empty", "linear_ramp", *_INDEXED, *_STATISTICS)


@operator()
def pad(
    x: ArrayLike,
    pad_width: Any,
    mode: str = "constant",
    *,
    constant_values: Any = 0,
    end_values: Any = 0,
    stat_length: Any = None,
) -> ShardedTensor:
    """Pads x with further elements at the ends of its dimensions.

    Args:
        x: a tensor or a host array.
        pad_width: the number of elements: an integer for both ends of every dimension; ``(before, after)`` for every
            dimension; ``((before, after), ...)`` with a pair for each; or a dict of axes to one of the former.
        mode: the new elements: ``"constant"``; ``"empty"`` for arbitrary values; ``"edge"`` for the element at the end;
            ``"reflect"`` and ``"symmetric"`` for the reflection at the last element or behind it; ``"wrap"`` for the
            elements from the other end; ``"maximum"``, ``"minimum"``, ``"mean"`` and ``"median"`` for those
            of each line; ``"linear_ramp"`` for a ramp from the element at the end to ``end_values``.
        constant_values, end_values: the elements of the modes ``"constant"`` and ``"linear_ramp"``, in the forms of
            ``pad_width``.
        stat_length: the number of elements at each end of a line of which the statistic is computed, in the forms of
            ``pad_width``; all of them by default.

    Raises:
        ShapeError: a width is negative, there are not as many as dimensions, or a mode other than ``"constant"`` and
            ``"empty"`` has no elements to pad with.
        ArgumentError: there is no such mode, or ``stat_length`` is not positive.

    >>> st.pad(st.asarray([1, 2, 3]), (2, 1)).tolist(), st.pad(st.asarray([1, 2, 3]), 2, "reflect").tolist()
    ([0, 0, 1, 2, 3, 0], [3, 2, 1, 2, 3, 2, 1])
    """


@implements(pad, "composite")
def _pad(x: Any, pad_width: Any, mode: str, constant_values: Any, end_values: Any, stat_length: Any) -> Any:
    shape = shape_of(x)
    if not isinstance(mode, str) or mode not in _MODES:
        raise ArgumentError(f"mode is {mode!r}; wanted one of {', '.join(map(repr, _MODES))}")
    widths = _pairs(pad_width, len(shape), "pad_width")
    if any(not isinstance(n, (int, np.integer)) for pair in widths for n in pair):
        raise ArgumentTypeError(f"pad_width is {pad_width!r:.60}; wanted integers")
    if any(n < 0 for pair in widths for n in pair):
        raise ShapeError(f"pad_width is {pad_width!r:.60}, with a negative width")
    new = [n + sum(pair) for n, pair in zip(shape, widths, strict=True)]
    check_addressable(checked_shape(new), result_type(x))
    if mode in ("constant", "empty"):
        values = _pairs(constant_values if mode == "constant" else 0, len(shape), "constant_values")
        return _pad_constant(x, widths, values)
    result, ramps = reshape(x, shape, copy=True), _pairs(end_values, len(shape), "end_values")
    lengths = [(None, None)] * len(shape) if stat_length is None else _pairs(stat_length, len(shape), "stat_length")
    for d, (n, (before, after)) in enumerate(zip(shape, widths, strict=True)):
        if not before + after:
            continue
        if not n:
            raise ShapeError(f"dimension {d} of x has size 0 and no elements to pad with in mode {mode!r}")
        if mode in _INDEXED:
            index = np.pad(np.arange(n), (before, after), mode)  # type: ignore[call-overload]
            result = concat([taken(result, index[:before], d), result, taken(result, index[before + n :], d)], axis=d)
        elif mode == "linear_ramp":
            result = _pad_ramp(result, d, (before, after), ramps[d])
        else:
            result = _pad_statistic(result, d, (before, after), mode, lengths[d])
    return result


def _pad_ramp(x: Any, d: int, widths: tuple[int, int], values: tuple[Any, Any]) -> Any:
    """Pads a dimension with ramps from the elements at its ends to other values."""
    ndim, dtype = len(shape_of(x)), np.dtype(result_type(x))
    computed = result_type(dtype, 1.0)
    ends = []
    for position, count, value in zip((0, -1), widths, values, strict=True):
        edge = astype(taken(x, slice(position, position + 1 or None), d), computed, copy=False)
        numbers = arange(count) if position == 0 else arange(count - 1, -1, -1)
        steps = reshape(astype(numbers, computed), (-1,) + (1,) * (ndim - d - 1))
        ramp = add(multiply(divide(subtract(edge, value), max(count, 1)), steps), value)
        ends.append(astype(floor(ramp) if dtype.kind in "iu" else ramp, dtype, copy=False))
    return concat([ends[0], x, ends[1]], axis=d)


@implements(pad, "small")
def _pad_small(x: Any, pad_width: Any, mode: str, constant_values: Any, end_values: Any, stat_length: Any) -> Any:
    values = {"constant": {"constant_values": constant_values}, "linear_ramp": {"end_values": end_values}}
    values |= {name: {"stat_length": stat_length} for name in _STATISTICS}
    return np.pad(x, pad_width, mode, **values.get(mode, {}))  # type: ignore[call-overload]


def _pairs(argument: Any, ndim: int, name: str) -> list[tuple[Any, Any]]:
    """Returns an argument of `pad` as a pair for each dimension."""
    if isinstance(argument, dict):
        pairs: list[tuple[Any, Any]] = [(0, 0)] * ndim
        for axis, value in argument.items():
            pairs[normalize_axis(axis, ndim)] = _pairs(value, 1, name)[0]
        return pairs
    try:
        wide = np.broadcast_to(on_host(argument), (ndim, 2))
    except ValueError:
        raise ShapeError(
            f"{name} is {argument!r:.60}; wanted a pair for each of {counted(ndim, 'dimension')}"
        ) from None
    return [tuple(pair) for pair in wide.tolist()]


def _pad_constant(x: Any, widths: list[tuple[int, int]], values: list[tuple[Any, Any]]) -> Any:
    shape = shape_of(x)
    new = tuple([before + n + after for n, (before, after) in zip(shape, widths, strict=True)])
    dtype, where = result_type(x), devices_of(x)
    numbers = {value for pair in values for value in pair}
    if len(numbers) < 2 and are_whole(x, [d for d, pair in enumerate(widths) if any(pair)]):
        value = fill_value(numbers.pop() if numbers else 0, dtype)
        return padded(x, widths=tuple(widths), value=value.tobytes())
    if len(numbers) < 2:
        where = where and NamedSharding(where, x.sharding.spec, memory_kind=x.sharding.memory_kind)
        result = full(new, numbers.pop() if numbers else 0, dtype=dtype, device=where)
        result[tuple([slice(before, before + n) for n, (before, _) in zip(shape, widths, strict=True)])] = x
        return result
    result = x
    for d, (counts, fills) in enumerate(zip(widths, values, strict=True)):
        rest = shape_of(result)
        ends = [
            full((*rest[:d], n, *rest[d + 1 :]), value, dtype=dtype, device=where)
            for n, value in zip(counts, fills, strict=True)
        ]
        result = concat([ends[0], result, ends[1]], axis=d)
    return result


def _pad_statistic(x: Any, d: int, widths: tuple[int, int], mode: str, lengths: tuple[Any, Any]) -> Any:
    """Pads a dimension with the statistic of each line, or of its ends; means and medians of integers are rounded."""
    rest, dtype = shape_of(x), result_type(x)
    if any(n is not None and n < 1 for n in lengths):
        raise ArgumentError(f"stat_length is {lengths} for dimension {d}; wanted positive numbers")
    size = rest[d]
    counts = [size if n is None else min(n, size) for n in lengths]
    ends: list[Any] = []
    for k, part in enumerate((slice(0, counts[0]), slice(size - counts[1], size))):
        if k and counts == [size, size]:
            statistic = ends[0]
        else:
            statistic = _STATISTICS[mode](x if counts[k] == size else taken(x, part, d), axis=d, keepdims=True)
            statistic = astype(
                call("round", statistic) if np.dtype(dtype).kind in "iu" else statistic, dtype, copy=False
            )
        ends.append(statistic)
    before, after = [broadcast_to(end, (*rest[:d], n, *rest[d + 1 :])) for end, n in zip(ends, widths, strict=True)]
    return concat([before, x, after], axis=d)


# -- small arrays ----------------------------------------------------------------------------------


def small_on_host(x: ShardedTensor, *operands: Any) -> list[np.ndarray[Any, Any]] | None:
    """Returns operands beside a small tensor as host arrays, in which NumPy finds elements faster than several
    operators; None if that would transfer them, or if transfers are recorded. None also for operands of which tensors
    cannot be made, so that the operators raise the error.
    """
    if not is_executing() or not isinstance(x, ShardedTensor) or x.size > _SMALL:
        return None
    arrays = []
    with reading(operands):
        for operand in operands:
            if isinstance(operand, ShardedTensor):
                if operand.size > _SMALL or not runs_whole(operand):
                    return None
                arrays.append(np.array(transfer.whole_array(operand)))
            elif type(operand) is np.ndarray or type(operand) in SCALARS:
                arrays.append(np.asarray(operand))
            else:
                return None
    return arrays if all(is_element(array.dtype) for array in arrays) else None


_SMALL = 1 << 10
"""The number of elements up to which the calls of several operators take longer than NumPy's loops."""
