"""Functions of lines of an array along one dimension: any Python function (`apply_along_axis`), and bits in bytes.

The dimension must be whole: where it is split, the split moves to another dimension, or the array is gathered. The
other dimensions keep their sharding, and each device computes its own lines.

Raises:
    AxisError: the array has no such axis.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from shardtensor.backend.protocol import current_device
from shardtensor.core import call, composition, hinted, implements, operator
from shardtensor.errors import ArgumentError, ArgumentTypeError, AxisError, ShapeError
from shardtensor.functions.numpy.comparisons import array_like
from shardtensor.functions.standard.data_types import result_type
from shardtensor.functions.standard.manipulation import moveaxis, reshape
from shardtensor.functions.standard.repetition import on_host
from shardtensor.sharding.layout import Shape
from shardtensor.sharding.rules import normalize_axis
from shardtensor.sharding.shard_context import ShardContext
from shardtensor.tensor.operands import shape_of
from shardtensor.tensor.tensor import ArrayLike, ShardedTensor

_DERIVATIVES = "of_mathematical"

_WHOLE_LINES = "a line that no other dimension can split is given to the function whole"

# -- any function ----------------------------------------------------------------------------------


def _lines_rule(shapes: Sequence[Shape], *, tail: Shape, **params: Any) -> tuple[str, Shape]:
    (shape,) = shapes
    kept = [f"d{d}" for d in range(len(shape) - 1)]
    names = [f"r{d}" for d in range(len(tail))]
    return f"{' '.join([*kept, 'k!'])} -> {' '.join([*kept, *names])}", (*shape[:-1], *tail)


@operator(
    _lines_rule,
    dtype=lambda x, function, tail, dtype: np.empty(1, dtype),
    error_name="apply_along_axis",
    gathers=_WHOLE_LINES,
    tags=("internal", "keeps arrays"),
)
def mapped_lines(x: ArrayLike, /, function: Callable[[Any], Any], tail: Shape, dtype: Any) -> ShardedTensor:
    """Returns the results of a function of each line along the last dimension, which have shape ``tail``.

    >>> from shardtensor.functions.numpy.lines import mapped_lines
    >>> mapped_lines(st.asarray([[1, 2], [3, 4]]), np.flip, (2,), int).tolist()
    [[2, 1], [4, 3]]
    """


@implements(mapped_lines, "kernel")
def _mapped_lines(xp: Any, context: ShardContext | None, x: Any, *, function: Any, tail: Shape, dtype: Any) -> Any:
    shape = tuple(x.shape[:-1])
    results = [xp.asarray(function(x[at]), dtype=np.dtype(dtype)) for at in np.ndindex(*shape)]
    for line in results:
        if tuple(line.shape) != tail:
            raise ShapeError(f"func1d returned shape {tuple(line.shape)} for one line and {tail} for another")
    return (
        xp.reshape(xp.stack(results), (*shape, *tail)) if results else xp.empty((*shape, *tail), dtype=np.dtype(dtype))
    )


@hinted
def apply_along_axis(func1d: Callable[..., Any], axis: int, arr: ArrayLike, *args: Any, **kwargs: Any) -> ShardedTensor:
    """Calls a function for each line of an array along an axis, and puts its results in the place of the lines.

    The function is called with the backend's own arrays of one dimension, on the device that holds the line, and once
    more with the first line on the host or inside a map, to learn the shape and dtype of the results.

    Args:
        func1d: ``func1d(line, *args, **kwargs)`` returns an array or a scalar.
        axis: the dimension of the lines.
        arr: a tensor, an array or a list.
        args, kwargs: further arguments of ``func1d``.

    Raises:
        ShapeError: the array has no lines, or results differ in shape.
        ConcretizationError: the elements are not known.

    >>> st.apply_along_axis(lambda line: line[::-1] - line.min(), 1, st.asarray([[1, 2], [5, 3]])).tolist()
    [[1, 0], [0, 2]]
    """
    array: Any = call("asarray", array_like(arr, "apply_along_axis"))
    try:
        along = normalize_axis(axis, len(shape_of(array)))
    except AxisError as error:
        raise AxisError(f"apply_along_axis: {error}") from None
    shape = shape_of(array)
    if 0 in (*shape[:along], *shape[along + 1 :]):
        raise ShapeError(f"apply_along_axis: arr has shape {shape}, and no lines along axis {axis}")

    return lines_applied(array, _Function(lambda line: func1d(line, *args, **kwargs)), along)


@operator(error_name="apply_along_axis", tags=("internal",))
def lines_applied(x: ArrayLike, /, function: _Function, along: int) -> ShardedTensor:
    """Returns `apply_along_axis` of a function along a dimension, after all checks.

    >>> from shardtensor.functions.numpy.lines import _Function, lines_applied
    >>> lines_applied(st.asarray([[1, 2], [3, 4]]), _Function(np.flip), 1).tolist()
    [[2, 1], [4, 3]]
    """


@implements(lines_applied, "composite")
def _lines_applied(x: Any, function: _Function, along: int) -> Any:
    first = call("getitem", x, (0,) * along + (slice(None),) + (0,) * (len(shape_of(x)) - along - 1))
    sample = function.call(first if current_device() is not None else on_host(first))
    dtype = result_type(sample) if hasattr(sample, "dtype") else np.asarray(sample).dtype
    return _applied(x, along, function, shape_of(sample), dtype)


class _Function:
    """A function of lines. All of them are equal, so that the layout of the results, which depends on their shapes and
    dtypes only, is inferred once for all functions. Operators get the function itself: their plans keep it.
    """

    __slots__ = ("call",)

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self.call = function

    def __eq__(self, other: object) -> bool:
        return type(other) is _Function

    def __hash__(self) -> int:
        return hash(_Function)


def _order(ndim: int, along: int, tail: Shape) -> tuple[int, ...]:
    """Returns the order in which the dimensions of the results take the place of that of the lines."""
    order = list(range(ndim - 1))
    order[along:along] = range(ndim - 1, ndim - 1 + len(tail))
    return tuple(order)


def _applied_on_host(x: Any, along: int, function: _Function, tail: Shape, dtype: Any) -> Any:
    results = _mapped_lines(np, None, np.moveaxis(x, along, -1), function=function.call, tail=tail, dtype=dtype)
    return results.transpose(_order(x.ndim, along, tail))


@composition(_applied_on_host)
def _applied(x: Any, along: int, function: _Function, tail: Shape, dtype: Any) -> Any:
    """Returns the results of a function of lines along a dimension, which have the shape ``tail``."""
    results: Any = mapped_lines(moveaxis(x, along, -1), function.call, tail, dtype)
    return call("permute_dims", results, _order(len(shape_of(x)), along, tail))


# -- bits ------------------------------------------------------------------------------------------


def _bits_rule(size: Callable[[int], int]) -> Callable[..., tuple[str, Shape]]:
    def rule(shapes: Sequence[Shape], **params: Any) -> tuple[str, Shape]:
        (shape,) = shapes
        kept = " ".join([f"d{d}" for d in range(len(shape) - 1)])
        return f"{kept} k! -> {kept} m", (*shape[:-1], size(shape[-1]))

    return rule


@operator(
    _bits_rule(lambda n: -(-n // 8)), dtype="uint8", error_name="packbits", gathers=_WHOLE_LINES, tags=("internal",)
)
def packed(x: ArrayLike, /, little: bool) -> ShardedTensor:
    """Returns `packbits` along the last dimension.

    >>> from shardtensor.functions.numpy.lines import packed
    >>> packed(st.asarray([True, False, True]), False).tolist()
    [160]
    """


@operator(_bits_rule(lambda n: 8 * n), dtype="uint8", error_name="unpackbits", gathers=_WHOLE_LINES, tags=("internal",))
def unpacked(x: ArrayLike, /, little: bool) -> ShardedTensor:
    """Returns `unpackbits` along the last dimension.

    >>> from shardtensor.functions.numpy.lines import unpacked
    >>> unpacked(st.asarray([160], dtype="uint8"), False).tolist()
    [1, 0, 1, 0, 0, 0, 0, 0]
    """


def _places(xp: Any, little: bool) -> Any:
    return xp.asarray(np.arange(8, dtype=np.uint8) if little else np.arange(7, -1, -1, dtype=np.uint8))


@implements(packed, "kernel")
def _packed(xp: Any, context: ShardContext, x: Any, *, little: bool) -> Any:
    if xp is np:
        return np.packbits(x, axis=-1, bitorder="little" if little else "big")
    bits = xp.asarray(xp.not_equal(x, 0), dtype=np.dtype("uint8"))
    lacking = -bits.shape[-1] % 8
    bits = xp.concat([bits, xp.zeros((*bits.shape[:-1], lacking), dtype=np.dtype("uint8"))], axis=-1)
    bits = xp.reshape(bits, (*bits.shape[:-1], bits.shape[-1] // 8, 8))
    return xp.sum(xp.bitwise_left_shift(bits, _places(xp, little)), axis=-1, dtype=np.dtype("uint8"))


@implements(unpacked, "kernel")
def _unpacked(xp: Any, context: ShardContext, x: Any, *, little: bool) -> Any:
    if xp is np:
        return np.unpackbits(x, axis=-1, bitorder="little" if little else "big")
    bits = xp.bitwise_and(xp.bitwise_right_shift(x[..., None], _places(xp, little)), 1)
    return xp.reshape(bits, (*x.shape[:-1], 8 * x.shape[-1]))


def _last(caller: str, a: Any, axis: int | None, bitorder: str, kinds: str) -> tuple[Any, int]:
    """Returns an array with the axis in the last place, and the number of that axis.

    Raises:
        ArgumentTypeError: its dtype is not one of these kinds.
        ArgumentError: there is no such order.
    """
    array = array_like(a, caller)
    if result_type(array).kind not in kinds or ("b" not in kinds and result_type(array) != np.uint8):
        raise ArgumentTypeError(
            f"{caller}: a has dtype {result_type(array)}; wanted {'bools or integers' if 'b' in kinds else 'uint8'}"
        )
    if bitorder not in ("big", "little"):
        raise ArgumentError(f"{caller}: bitorder is {bitorder!r}; wanted 'big' or 'little'")
    if axis is None:
        return reshape(array, (-1,)), 0
    along = normalize_axis(axis, len(shape_of(array)))
    return moveaxis(array, along, -1), along


@composition()
def packbits(a: ArrayLike, /, axis: int | None = None, bitorder: str = "big") -> ShardedTensor:
    """Packs truth values into the bits of bytes, along an axis; zeros fill the last byte.

    Args:
        a: a tensor, an array or a list of bools or integers.
        axis: the dimension; None flattens a first.
        bitorder: whether the first value is the highest bit ("big") or the lowest ("little").

    >>> st.packbits(st.asarray([1, 0, 1])).tolist()
    [160]
    """
    array, along = _last("packbits", a, axis, bitorder, "biu")
    return moveaxis(packed(array, bitorder == "little"), -1, along)


@composition()
def unpackbits(
    a: ArrayLike, /, axis: int | None = None, count: int | None = None, bitorder: str = "big"
) -> ShardedTensor:
    """Returns the bits of bytes, along an axis, as zeros and ones of dtype uint8.

    Args:
        a: a tensor or an array of dtype uint8.
        axis: the dimension; None flattens a first.
        count: the number of bits; zeros are appended if there are fewer. A negative number leaves out as many.
        bitorder: whether the highest bit comes first ("big") or the lowest ("little").

    >>> st.unpackbits(st.asarray([160], dtype="uint8"), count=3).tolist()
    [1, 0, 1]
    """
    array, along = _last("unpackbits", a, axis, bitorder, "u")
    bits: Any = unpacked(array, bitorder == "little")
    size = shape_of(bits)[-1]
    if count is not None and count <= size:
        bits = call("getitem", bits, (..., slice(None, count)))
    elif count is not None:
        bits = call("pad", bits, ((0, 0),) * (len(shape_of(bits)) - 1) + ((0, count - size),))
    return moveaxis(bits, -1, along)
