"""Declarations of the functions that create ranges and grids of coordinates, and triangles of matrices."""

from __future__ import annotations

import operator as python
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from shardtensor.core import call, implements, operator
from shardtensor.errors import ArgumentError, ArgumentTypeError, ShapeError
from shardtensor.functions.creation import arange, zeros
from shardtensor.functions.data_types import astype, result_type
from shardtensor.functions.elementwise import multiply, pow
from shardtensor.functions.joining import stack
from shardtensor.functions.manipulation import broadcast_to, reshape
from shardtensor.functions.placement import Where
from shardtensor.functions.repetition import devices_of, index_of
from shardtensor.sharding.layout import Shape, checked_shape
from shardtensor.sharding.shard_context import ShardContext
from shardtensor.tensor.operands import sharded_dtype
from shardtensor.tensor.tensor import ArrayLike, ShardedTensor

# -- ranges ----------------------------------------------------------------------------------------


def _linspace_rule(
    kinds: Any, *, start: Any, stop: Any, num: Any = 50, dtype: Any = None, endpoint: bool = True
) -> tuple[Shape, Any]:
    computed = _computed(start, stop)
    made = computed if dtype is None else sharded_dtype(dtype)
    if computed.kind == "c" and made.kind in "iu":
        raise ArgumentTypeError(f"dtype is {made}, and start={start} and stop={stop} are complex, which has no floor")
    return (_count(num),), made


def _computed(start: Any, stop: Any) -> np.dtype[Any]:
    """Returns the dtype in which `linspace` computes."""
    for name, value in (("start", start), ("stop", stop)):
        if not isinstance(value, (int, float, complex, np.number)):
            raise ArgumentTypeError(f"{name} is a {type(value).__name__}; wanted a number")
    return np.result_type(start, stop, 1.0)


def _count(num: Any) -> int:
    try:
        count = python.index(num)
    except TypeError:
        raise ArgumentTypeError(f"num is {num!r}; wanted an integer, the number of elements") from None
    if count < 0:
        raise ShapeError(f"num is {count}; wanted 0 or more elements")
    return count


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
        device: a Device, Mesh or NamedSharding (see `shardtensor.functions.creation`); the default mesh by default.

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
    computed, count = _computed(start, stop), _count(num)
    ((begin, end),) = context.box
    first, last = computed.type(start), computed.type(stop)
    parts = count - 1 if endpoint else count
    with np.errstate(all="ignore"):
        span = last - first
        step = span / parts if parts > 0 else span
    out = xp.asarray(xp.arange(begin, end), dtype=computed)
    if parts > 0 and step == 0:  # The step of denormal numbers rounds to 0.
        out, step = xp.divide(out, parts), span
    out = xp.add(xp.multiply(out, step.item()), first.item())
    if endpoint and count > 1 and begin < end == count:
        out[-1:] = last.item()
    if context.dtype.kind in "iu":
        out = xp.floor(out)
    return xp.asarray(out, dtype=context.dtype)


def logspace(
    start: complex,
    stop: complex,
    num: int = 50,
    endpoint: bool = True,
    base: float = 10.0,
    dtype: npt.DTypeLike | None = None,
    *,
    device: Where | None = None,
) -> ShardedTensor:
    """Creates a 1-d array of the powers ``base ** y`` for ``num`` evenly spaced y: see `linspace`.

    Args:
        start, stop: the first and the last exponent.
        num, endpoint, device: see `linspace`.
        base: the base of the powers.
        dtype: the dtype of the result; by default that of the powers.

    >>> st.logspace(0, 3, 4).tolist()
    [1.0, 10.0, 100.0, 1000.0]
    """
    powers: ShardedTensor = pow(base, linspace(start, stop, num, endpoint=endpoint, device=device))
    return powers if dtype is None else astype(powers, dtype)


def geomspace(
    start: complex,
    stop: complex,
    num: int = 50,
    endpoint: bool = True,
    dtype: npt.DTypeLike | None = None,
    *,
    device: Where | None = None,
) -> ShardedTensor:
    """Creates a 1-d array of ``num`` numbers from ``start`` to ``stop``, each a constant multiple of the one before.

    Args:
        start, stop: the first and the last number, neither of them 0; real or complex.
        num, endpoint, device: see `linspace`.
        dtype: the dtype of the result; by default the floating-point dtype to which ``start`` and ``stop`` promote.

    Raises:
        ArgumentError: ``start`` or ``stop`` is 0.

    >>> st.geomspace(1, 1000, 4).tolist()
    [1.0, 10.0, 100.0, 1000.0]
    """
    computed = _computed(start, stop)
    if start == 0 or stop == 0:
        raise ArgumentError(f"geomspace: start={start} and stop={stop}; a geometric sequence does not contain 0")
    first, last = computed.type(start), computed.type(stop)
    turn = np.sign(first)  # The sequence is computed from the positive real axis, and then turned.
    low, high = np.log10(first / turn), np.log10(last / turn)
    made = logspace(low, high, num, endpoint, dtype=computed, device=device)
    made = multiply(made, turn.item())
    if num > 0:
        made[0] = first.item()
    if num > 1 and endpoint:
        made[-1] = last.item()
    return made if dtype is None else astype(made, dtype)


# -- grids of coordinates --------------------------------------------------------------------------


def _coordinate_rule(kinds: Any, *, shape: Any, axis: int, dtype: Any = None) -> tuple[Shape, Any]:
    return checked_shape(shape), sharded_dtype(np.int64 if dtype is None else dtype)


@operator(_coordinate_rule, operands=(), error_name="indices")
def coordinate(
    shape: Shape, axis: int, *, dtype: npt.DTypeLike | None = None, device: Where | None = None
) -> ShardedTensor:
    """Creates an array of that shape in which each element is its own index along ``axis``.

    >>> from shardtensor.functions.grids import coordinate
    >>> coordinate((2, 3), 1).tolist()
    [[0, 1, 2], [0, 1, 2]]
    """


@implements(coordinate, "kernel")
def _coordinate(xp: Any, context: ShardContext, *, shape: Shape, axis: int, dtype: Any) -> Any:
    line = xp.asarray(xp.arange(*context.box[axis]), dtype=context.dtype)
    sizes = [1] * len(context.box)
    sizes[axis] = -1
    return xp.broadcast_to(xp.reshape(line, tuple(sizes)), context.local_shape)


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
    shape = checked_shape(dimensions, "indices")
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
    sizes = checked_shape(shape, "fromfunction")
    return function(*[coordinate(sizes, k, dtype=dtype, device=device) for k in range(len(sizes))], **kwargs)


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
    lines = [x if np.ndim(x) == 1 else reshape(x, (-1,)) for x in arrays]
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


def _spanned_rule(shapes: Sequence[Shape], *, which: int, axes: tuple[int, ...], dtype: Any) -> tuple[str, Shape]:
    order = sorted(range(len(axes)), key=axes.__getitem__)
    grid = " ".join([f"d{d}" for d in range(len(axes))])
    return f"{', '.join([f'd{axis}' for axis in axes])} -> {grid}", tuple([shapes[k][0] for k in order])


@operator(_spanned_rule, variadic=True, error_name="meshgrid")
def spanned(arrays: Sequence[ArrayLike], /, which: int, axes: tuple[int, ...], *, dtype: Any) -> ShardedTensor:
    """Returns array ``which`` of several 1-d arrays, repeated over the grid that they span.

    Dimension ``axes[k]`` of the grid belongs to array k.

    >>> from shardtensor.functions.grids import spanned
    >>> spanned([st.arange(2), st.arange(3)], 1, (0, 1), dtype=int).tolist()
    [[0, 1, 2], [0, 1, 2]]
    """


@implements(spanned, "kernel")
def _spanned(xp: Any, context: ShardContext, *arrays: Any, which: int, axes: tuple[int, ...], dtype: Any) -> Any:
    sizes = tuple([-1 if d == axes[which] else 1 for d in range(len(axes))])
    return xp.broadcast_to(xp.reshape(arrays[which], sizes), context.local_shape)


# -- triangles -------------------------------------------------------------------------------------


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
        return function(broadcast_to(x, np.shape(x) * 2), k=k) if np.ndim(x) == 1 else NotImplemented

    @implements(function, "kernel")
    def kernel(xp: Any, context: ShardContext, x: Any, *, k: int) -> Any:
        (top, bottom), (left, right) = context.boxes[0][-2:]
        below = _diagonal(k) + top - left  # of the shard
        rows = xp.reshape(xp.arange(bottom - top), (-1, 1))
        columns = xp.reshape(xp.arange(right - left), (1, -1))
        kept = xp.less_equal(columns - rows, below) if lower else xp.greater_equal(columns - rows, below)
        return xp.where(kept, x, xp.zeros((), dtype=x.dtype))


def _diagonal(k: Any) -> int:
    try:
        return python.index(k)
    except TypeError:
        raise ArgumentTypeError(f"k is {k!r}; wanted an integer, the number of a diagonal") from None


_triangle(tril, lower=True)
_triangle(triu, lower=False)


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
    shape, above = np.shape(v), _diagonal(k)
    if len(shape) not in (1, 2):
        raise ShapeError(f"v has shape {shape}; wanted one or two dimensions")
    top, left = max(-above, 0), max(above, 0)
    count = shape[0] if len(shape) == 1 else max(min(shape[0] - top, shape[1] - left), 0)
    at = tuple([index_of(v, np.arange(first, first + count)) for first in (top, left)])
    if len(shape) == 2:
        return call("getitem", v, at)
    made = zeros((count + abs(above),) * 2, dtype=result_type(v), device=devices_of(v))
    made[at] = v
    return made


implements(diag, "small")(lambda v, k: np.array(np.diag(v, k)))


@operator()
def diagflat(v: ArrayLike, k: int = 0) -> ShardedTensor:
    """Returns the matrix with the flattened v as its k-th diagonal and zeros elsewhere: see `diag`.

    >>> st.diagflat(st.asarray([[1], [2]])).tolist()
    [[1, 0], [0, 2]]
    """


implements(diagflat, "composite")(lambda v, k: diag(reshape(v, (-1,)), k))
implements(diagflat, "small")(np.diagflat)
