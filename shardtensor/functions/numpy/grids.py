"""Declarations of the functions that create ranges and grids of coordinates."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from shardtensor.core import call, composition, hinted, implements, operator
from shardtensor.errors import ArgumentError, ArgumentTypeError, IndexingError, type_text
from shardtensor.functions.building.own_kernels import own_kernel
from shardtensor.functions.numpy.comparisons import array_like
from shardtensor.functions.standard.creation import arange
from shardtensor.functions.standard.data_types import astype, result_type
from shardtensor.functions.standard.elementwise import add, divide, equal, multiply, pow, subtract
from shardtensor.functions.standard.joining import reshape_operand, stack
from shardtensor.functions.standard.manipulation import reshape
from shardtensor.sequences import as_tuple
from shardtensor.sharding.layout import Shape, Where, checked_shape, chosen
from shardtensor.sharding.shard_context import ShardContext
from shardtensor.tensor.operands import integer_from, shape_of, sharded_dtype
from shardtensor.tensor.tensor import ArrayLike, ShardedTensor, lacks_elements

_DERIVATIVES = "of_movement"

# -- ranges ----------------------------------------------------------------------------------------


def _linspace_rule(
    kinds: Any, *, start: Any, stop: Any, num: Any = 50, dtype: Any = None, endpoint: bool = True
) -> tuple[Shape, Any]:
    computed = _computed(start, stop)
    result_dtype = computed if dtype is None else sharded_dtype(dtype)
    if computed.kind == "c" and result_dtype.kind in "iu":
        raise ArgumentTypeError(
            f"dtype is {result_dtype}, and start={start} and stop={stop} are complex, which has no floor"
        )
    return (integer_from(0, num, "num"),), result_dtype


def _computed(start: Any, stop: Any) -> np.dtype[Any]:
    """Returns the dtype in which `linspace` computes."""
    for name, value in (("start", start), ("stop", stop)):
        if not isinstance(value, (int, float, complex, np.number)):
            raise ArgumentTypeError(f"{name} is {type_text(value)}; wanted a number")
    return np.result_type(start, stop, 1.0)


@operator(_linspace_rule, operands=())
def linspace(
    start: complex,
    stop: complex,
    /,
    num: int = 50,
    *,
    dtype: npt.DTypeLike | None = None,
    endpoint: bool = True,
    device: Where | None = None,
    out_sharding: Where | None = None,
) -> ShardedTensor:
    """Creates a 1-d array of ``num`` evenly spaced numbers from ``start`` to ``stop``.

    Each device computes its own shard, and every element has the bits that NumPy computes.

    Args:
        start: the first number, real or complex.
        stop: the end, which is the last number if ``endpoint``, otherwise excluded.
        num: the number of elements.
        dtype: the dtype of the result; by default the floating-point dtype to which ``start`` and ``stop`` promote.
            For integers the numbers are rounded down.
        endpoint: whether ``stop`` is included.
        device, out_sharding: a Device, Mesh, NamedSharding or P (see `shardtensor.functions.standard.creation`); the
            default mesh by default.

    Raises:
        ArgumentTypeError: ``start`` or ``stop`` is not a number, ``num`` is not an integer, or they are complex and
            ``dtype`` is an integer dtype.
        ShapeError: ``num`` is negative.

    >>> st.linspace(0, 1, 5).tolist(), st.linspace(0, 1, 5, endpoint=False).tolist()
    ([0.0, 0.25, 0.5, 0.75, 1.0], [0.0, 0.2, 0.4, 0.6000000000000001, 0.8])
    """


@implements(linspace, "kernel")
def _linspace(xp: Any, context: ShardContext, *, start: Any, stop: Any, num: int, dtype: Any, endpoint: bool) -> Any:
    """Computes NumPy's formula, so that every element has NumPy's bits."""
    computed, count = _computed(start, stop), integer_from(0, num, "num")
    ((begin, end),) = context.box
    first, last = computed.type(start), computed.type(stop)
    parts = count - 1 if endpoint else count
    with np.errstate(all="ignore"):
        span = last - first
        step = span / parts if parts > 0 else span
    out = None
    if context.dtype.kind == "f" and not (parts > 0 and step == 0):
        out = own_kernel(xp, "ramp", begin, end, step, first, context.dtype, computed)
    if out is not None:
        if endpoint and count > 1 and begin < end == count:
            out[-1:] = last.item()
        return out
    if computed == np.float64:
        out = xp.arange(begin, end, dtype=computed)
    else:  # A range of other floats is inexact, and not every library has one of complex numbers.
        out = xp.asarray(xp.arange(begin, end), dtype=computed)
    if parts > 0 and step == 0:  # The step of denormal numbers rounds to 0.
        out /= parts
        step = span
    out *= step.item()
    out += first.item()
    if endpoint and count > 1 and begin < end == count:
        out[-1:] = last.item()
    if context.dtype.kind in "iu":
        out = xp.floor(out)
    return xp.asarray(out, dtype=context.dtype)


@hinted
def logspace(
    start: complex,
    stop: complex,
    num: int = 50,
    endpoint: bool = True,
    base: float = 10.0,
    dtype: npt.DTypeLike | None = None,
    *,
    device: Where | None = None,
    out_sharding: Where | None = None,
) -> ShardedTensor:
    """Creates a 1-d array of the powers ``base ** y`` for ``num`` evenly spaced y: see `linspace`.

    Args:
        start, stop: the first and the last exponent.
        num, endpoint, device, out_sharding: see `linspace`.
        base: the base of the powers.
        dtype: the dtype of the result; by default that of the powers.

    >>> st.logspace(0, 3, 4).tolist()
    [1.0, 10.0, 100.0, 1000.0]
    """
    device = chosen(device, out_sharding, "logspace")
    powers: ShardedTensor = pow(base, linspace(start, stop, num, endpoint=endpoint, device=device))
    return powers if dtype is None else astype(powers, dtype)


@hinted
def geomspace(
    start: complex,
    stop: complex,
    num: int = 50,
    endpoint: bool = True,
    dtype: npt.DTypeLike | None = None,
    *,
    device: Where | None = None,
    out_sharding: Where | None = None,
) -> ShardedTensor:
    """Creates a 1-d array of ``num`` numbers from ``start`` to ``stop``, each a constant multiple of the one before.

    Args:
        start, stop: the first and the last number, neither of them 0; real or complex.
        num, endpoint, device, out_sharding: see `linspace`.
        dtype: the dtype of the result; by default the floating-point dtype to which ``start`` and ``stop`` promote.

    Raises:
        ArgumentError: ``start`` or ``stop`` is 0.

    >>> st.geomspace(1, 1000, 4).tolist()
    [1.0, 10.0, 100.0, 1000.0]
    """
    device, computed = chosen(device, out_sharding, "geomspace"), _computed(start, stop)
    if start == 0 or stop == 0:
        raise ArgumentError(f"geomspace: start={start} and stop={stop}; a geometric sequence does not contain 0")
    first, last = computed.type(start), computed.type(stop)
    turn = np.sign(first)  # The sequence is computed from the positive real axis, and then turned.
    low, high = np.log10(first / turn), np.log10(last / turn)
    numbers = logspace(low, high, num, endpoint, dtype=computed, device=device)
    numbers = multiply(numbers, turn.item())
    if num > 0:
        numbers[0] = first.item()
    if num > 1 and endpoint:
        numbers[-1] = last.item()
    return numbers if dtype is None else astype(numbers, dtype)


# -- ranges between the elements of arrays ---------------------------------------------------------


@composition(np.linspace, error_name="linspace")
def linspace_between(
    start: ArrayLike,
    stop: ArrayLike,
    num: int = 50,
    endpoint: bool = True,
    retstep: bool = False,
    dtype: npt.DTypeLike | None = None,
    axis: int = 0,
) -> Any:
    """Creates evenly spaced numbers from each element of ``start`` to that of ``stop``, as `numpy.linspace` of arrays.

    The result has a new dimension, which is not sharded; the others keep the sharding of the arrays. No data moves if
    they are sharded alike.

    Args:
        start, stop: tensors, arrays or numbers that broadcast.
        num, endpoint, dtype: see `linspace`.
        retstep: whether the distances follow in the result, which is then a tuple.
        axis: the position of the new dimension.

    >>> from shardtensor.functions.numpy.grids import linspace_between
    >>> linspace_between(st.asarray([0.0, 10.0]), 20, 3).tolist()
    [[0.0, 10.0], [10.0, 15.0], [20.0, 20.0]]
    """
    count = integer_from(0, num, "num")
    first, last = [array_like(x, "linspace") for x in (start, stop)]
    computed = result_type(first, last, float(count))
    span = call("astype", subtract(multiply(last, 1.0), first), computed, copy=False)
    parts = count - 1 if endpoint else count
    step = divide(span, parts) if parts > 0 else multiply(span, math.nan)
    places = np.arange(count, dtype=computed).reshape(-1, *[1] * len(shape_of(span)))
    # The step of denormal numbers rounds to 0.
    moved = multiply(places, step)
    if parts > 0:
        moved = call("where", equal(step, 0), multiply(places / parts, span), moved)
        numbers = add(moved, first)
    else:
        numbers = add(multiply(places, span), first)
    if endpoint and count > 1:
        numbers = call("where", places == count - 1, last, numbers)
    if dtype is not None and sharded_dtype(dtype).kind in "iu":
        numbers = call("floor", numbers)
    numbers = call("moveaxis", astype(numbers, computed if dtype is None else dtype, copy=False), 0, axis)
    return (numbers, step) if retstep else numbers


@composition(np.logspace, error_name="logspace")
def logspace_between(
    start: ArrayLike,
    stop: ArrayLike,
    num: int = 50,
    endpoint: bool = True,
    base: ArrayLike = 10.0,
    dtype: npt.DTypeLike | None = None,
    axis: int = 0,
) -> ShardedTensor:
    """Creates the powers of ``base`` for the exponents of `linspace_between`.

    >>> from shardtensor.functions.numpy.grids import logspace_between
    >>> logspace_between(st.asarray([0.0, 1.0]), 2, 3).tolist()[2]
    [100.0, 100.0]
    """
    powers: ShardedTensor = pow(array_like(base, "logspace"), linspace_between(start, stop, num, endpoint, axis=axis))
    return powers if dtype is None else astype(powers, dtype)


@composition(np.geomspace, error_name="geomspace")
def geomspace_between(
    start: ArrayLike,
    stop: ArrayLike,
    num: int = 50,
    endpoint: bool = True,
    dtype: npt.DTypeLike | None = None,
    axis: int = 0,
) -> ShardedTensor:
    """Creates geometric sequences from each element of ``start`` to that of ``stop``: see `linspace_between`.

    Raises:
        ArgumentError: an element is 0, where that is known.

    >>> from shardtensor.functions.numpy.grids import geomspace_between
    >>> geomspace_between(st.asarray([1.0, 4.0]), 100, 3).round(6).tolist()
    [[1.0, 4.0], [10.0, 20.0], [100.0, 100.0]]
    """
    ends = [array_like(x, "geomspace") for x in (start, stop)]
    computed = np.result_type(*map(result_type, ends), np.float64)
    first, last = [astype(x, computed, copy=False) for x in ends]
    zero = call("logical_or", call("any", equal(first, 0)), call("any", equal(last, 0)))
    if not lacks_elements(zero) and bool(zero):
        raise ArgumentError("geomspace: start or stop has a 0; a geometric sequence does not contain 0")
    turn = call("sign", first)  # The sequence is computed from the positive real axis, and then turned.
    low, high = divide(first, turn), divide(last, turn)
    numbers = logspace_between(call("log10", low), call("log10", high), num, endpoint)
    places = np.arange(integer_from(0, num, "num")).reshape(-1, *[1] * (len(shape_of(numbers)) - 1))
    numbers = call("where", places == 0, low, numbers)
    if num > 1 and endpoint:
        numbers = call("where", places == num - 1, high, numbers)
    numbers = call("moveaxis", multiply(numbers, turn), 0, axis)
    return numbers if dtype is None else astype(numbers, dtype)


# -- grids of coordinates --------------------------------------------------------------------------


def _coordinate_rule(kinds: Any, *, shape: Any, axis: int, dtype: Any = None) -> tuple[Shape, Any]:
    return checked_shape(shape), sharded_dtype(np.int64 if dtype is None else dtype)


@operator(_coordinate_rule, operands=(), error_name="indices", tags=("internal",))
def coordinate(
    shape: Shape, axis: int, *, dtype: npt.DTypeLike | None = None, device: Where | None = None
) -> ShardedTensor:
    """Creates an array of that shape in which each element is its own index along ``axis``.

    >>> from shardtensor.functions.numpy.grids import coordinate
    >>> coordinate((2, 3), 1).tolist()
    [[0, 1, 2], [0, 1, 2]]
    """


@implements(coordinate, "kernel")
def _coordinate(xp: Any, context: ShardContext, *, shape: Shape, axis: int, dtype: Any) -> Any:
    line = xp.asarray(xp.arange(*context.box[axis]), dtype=context.dtype)
    sizes = [1] * len(context.box)
    sizes[axis] = -1
    return xp.broadcast_to(xp.reshape(line, tuple(sizes)), context.local_shape)


@hinted
def indices(
    dimensions: Sequence[int], dtype: npt.DTypeLike = int, sparse: bool = False, *, device: Where | None = None
) -> Any:
    """Creates the indices of a grid: element ``[k, i, j, ...]`` is the k-th of the indices i, j, ...

    Args:
        dimensions: the shape of the grid.
        dtype: the dtype of the result.
        sparse: whether the result is a tuple of arrays instead, the k-th of which varies along dimension k and has size
            1 along the others.
        device: the sharding of ``result[k]``, in the form that creation functions take; by default the first dimension
            of the grid is split over the default mesh.

    >>> st.indices((2, 3)).tolist()
    [[[0, 0, 0], [1, 1, 1]], [[0, 1, 2], [0, 1, 2]]]
    """
    shape = checked_shape(as_tuple(dimensions), "indices")
    if sparse:
        return tuple(
            [
                coordinate((1,) * k + (n,) + (1,) * (len(shape) - k - 1), k, dtype=dtype, device=device)
                for k, n in enumerate(shape)
            ]
        )
    if not shape:
        return arange(0, dtype=dtype, device=device)
    return stack([coordinate(shape, k, dtype=dtype, device=device) for k in range(len(shape))])


def fromfunction(
    function: Callable[..., Any],
    shape: Sequence[int],
    *,
    dtype: npt.DTypeLike = float,
    device: Where | None = None,
    **kwargs: Any,
) -> Any:
    """Calls ``function`` with the coordinates of a grid, one array of that shape for each dimension; see `indices`.

    Args:
        function: a function of arrays, which is called once.
        shape: the shape of the grid.
        dtype: the dtype of the coordinates.
        device: the sharding of the coordinates, in the form that creation functions take.
        **kwargs: further arguments of ``function``.

    >>> st.fromfunction(lambda i, j: 10 * i + j, (2, 3), dtype=int).tolist()
    [[0, 1, 2], [10, 11, 12]]
    """
    sizes = checked_shape(as_tuple(shape), "fromfunction")
    return function(*[coordinate(sizes, k, dtype=dtype, device=device) for k in range(len(sizes))], **kwargs)


class Grid:
    """The coordinates of a grid, made by indexing with slices, as `numpy.mgrid` (dense) and `numpy.ogrid` (sparse).

    A slice ``start:stop:step`` gives the numbers of `st.arange`, and with an imaginary step, such as ``5j``, those of
    `st.linspace` with that many elements. One slice gives an array of one dimension. Several give the coordinates of
    the grid that they span: of ``mgrid`` one array, whose first dimension counts the slices, and of ``ogrid`` a tuple
    of arrays, each of which has size 1 along the others' dimensions.

    >>> st.mgrid[0:2, 0:3].tolist()
    [[[0, 0, 0], [1, 1, 1]], [[0, 1, 2], [0, 1, 2]]]
    >>> st.mgrid[0:1:3j].tolist(), [x.shape for x in st.ogrid[0:2, 0:3]]
    ([0.0, 0.5, 1.0], [(2, 1), (1, 3)])
    """

    def __init__(self, *, sparse: bool) -> None:
        self._sparse = sparse

    def __getitem__(self, key: Any) -> Any:
        if not isinstance(key, tuple):
            return self._line(key)
        lines = [self._line(part) for part in key]
        dtype = np.result_type(*[line.dtype for line in lines])
        coordinates = meshgrid(*[astype(line, dtype, copy=False) for line in lines], indexing="ij", sparse=self._sparse)
        return coordinates if self._sparse else stack(coordinates)

    def _line(self, part: Any) -> ShardedTensor:
        if not isinstance(part, slice) or part.stop is None:
            name = "ogrid" if self._sparse else "mgrid"
            raise IndexingError(
                f"{name}: {part!r:.60} is not a coordinate; wanted slices with an end, such as 0:5 or 0:1:9j"
            )
        start, step = part.start or 0, 1 if part.step is None else part.step
        if isinstance(step, complex):
            return linspace(start, part.stop, int(abs(step)))
        return arange(start, part.stop, step)


mgrid = Grid(sparse=False)
"""Coordinates of a grid, as one tensor: ``st.mgrid[0:3, 0:2]`` has shape (2, 3, 2). See `numpy.mgrid`."""

ogrid = Grid(sparse=True)
"""Coordinates of a grid, as a tuple of tensors that broadcast against one another. See `numpy.ogrid`."""


@operator(variadic=True)
def meshgrid(
    *arrays: ArrayLike, indexing: str = "xy", sparse: bool = False, copy: bool = True
) -> tuple[ShardedTensor, ...]:
    """Returns the coordinates of the grid that 1-d arrays span: the k-th result repeats array k along the others.

    All results have the shape of the grid and one layout: the dimension of the array that would be most expensive to
    move keeps its sharding, and so do those that are sharded along other mesh axes.

    Args:
        *arrays: 1-d arrays of any dtypes; others are flattened.
        indexing: ``"ij"``: dimension k of the grid belongs to array k; ``"xy"``: the first two are exchanged.
        sparse: whether result k has size 1 along the dimensions that belong to other arrays; it then keeps the sharding
            of array k.
        copy: accepted for NumPy's sake: the results are independent tensors in any case, except if ``sparse``.

    Raises:
        ArgumentError: ``indexing`` is another text.

    >>> x, y = st.meshgrid(st.arange(3), st.asarray([10, 20]))
    >>> (x + y).tolist()
    [[10, 11, 12], [20, 21, 22]]
    """


@implements(meshgrid, "composite")
def _meshgrid(arrays: Sequence[Any], indexing: str, sparse: bool, copy: bool) -> tuple[Any, ...]:
    if indexing not in ("xy", "ij"):
        raise ArgumentError(f"indexing is {indexing!r}; wanted 'xy' or 'ij'")
    lines = [x if getattr(x, "ndim", 0) == 1 else reshape_operand(x, (-1,)) for x in arrays]
    axes = list(range(len(lines)))
    if indexing == "xy":
        axes[:2] = axes[:2][::-1]
    if sparse or len(lines) < 2:
        return tuple(
            [
                reshape(x, tuple([-1 if d == axis else 1 for d in range(len(lines))]), copy=copy or None)
                for x, axis in zip(lines, axes, strict=True)
            ]
        )
    return tuple([spanned(lines, k, tuple(axes), dtype=result_type(x)) for k, x in enumerate(lines)])


@implements(meshgrid, "small")
def _meshgrid_on_host(arrays: Sequence[Any], indexing: Any, sparse: bool, copy: bool) -> Any:
    return np.meshgrid(*arrays, indexing=indexing, sparse=sparse, copy=copy)


def _spanned_rule(shapes: Sequence[Shape], *, which: int, axes: tuple[int, ...], dtype: Any) -> tuple[str, Shape]:
    order = sorted(range(len(axes)), key=axes.__getitem__)
    grid = " ".join([f"d{d}" for d in range(len(axes))])
    return f"{', '.join([f'd{axis}' for axis in axes])} -> {grid}", tuple([shapes[k][0] for k in order])


@operator(_spanned_rule, variadic=True, error_name="meshgrid", tags=("internal",))
def spanned(arrays: Sequence[ArrayLike], /, which: int, axes: tuple[int, ...], *, dtype: Any) -> ShardedTensor:
    """Returns array ``which`` of several 1-d arrays, repeated over the grid that they span.

    Dimension ``axes[k]`` of the grid belongs to array k.

    >>> from shardtensor.functions.numpy.grids import spanned
    >>> spanned([st.arange(2), st.arange(3)], 1, (0, 1), dtype=int).tolist()
    [[0, 1, 2], [0, 1, 2]]
    """


@implements(spanned, "kernel")
def _spanned(xp: Any, context: ShardContext, *arrays: Any, which: int, axes: tuple[int, ...], dtype: Any) -> Any:
    sizes = tuple([-1 if d == axes[which] else 1 for d in range(len(axes))])
    return xp.broadcast_to(xp.reshape(arrays[which], sizes), context.local_shape)
