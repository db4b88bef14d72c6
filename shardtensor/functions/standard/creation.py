"""Declarations of the creation functions (a chapter of the array API standard).

``device`` determines the sharding of the result: a Device holds the whole array, a Mesh shards the first dimension over
all mesh axes (major first; a 0-d array is replicated), a NamedSharding is used as it is, and a bare P stands for the
NamedSharding of that spec on the mesh in use (see `st.set_mesh`). ``out_sharding`` is JAX's name of the same argument.
Without either, an array is sharded over the default mesh and uncommitted: operators transfer it to the devices of
operands that were placed explicitly. The functions named ``*_like`` take both the sharding and this property from a
prototype that is a tensor. Each device computes its own shard; no data moves.

Raises:
    ShapeError: a size is negative.
    ArgumentTypeError: ``shape`` is neither an integer nor a sequence of integers, or ``dtype`` is not a dtype that
        tensors can have.
    ShardingError: the spec of ``device`` has more dimensions than the array.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from shardtensor.core import implements, operator
from shardtensor.errors import ArgumentError, ArgumentTypeError, ShapeError, type_text
from shardtensor.functions.building.own_kernels import own_kernel
from shardtensor.host import memory_pool
from shardtensor.host.blockwise import copy_into
from shardtensor.host.units import counted
from shardtensor.sharding.layout import Shape, Where, checked_shape
from shardtensor.sharding.shard_context import ShardContext
from shardtensor.tensor.nested_lists import converted
from shardtensor.tensor.operands import fill_value, sharded_dtype
from shardtensor.tensor.tensor import SCALARS, ArrayLike, ShardedTensor

_DERIVATIVES = "of_movement"

_Where = Where | None
_ShapeAndDtype = tuple[Shape, Any]


def _shaped(kinds: Any, *, shape: Any, dtype: Any = None) -> _ShapeAndDtype:
    return checked_shape(shape), sharded_dtype(np.float64 if dtype is None else dtype)


def _like(kinds: Any, *, dtype: Any = None) -> _ShapeAndDtype:
    is_number = isinstance(kinds[0], type)  # NumPy takes Python's numbers as arrays without dimensions, too.
    shape, own = ((), _kind_dtype(kinds[0])) if is_number else (kinds[0].shape, kinds[0].dtype)
    return shape, sharded_dtype(own if dtype is None else dtype)


@operator(_shaped, operands=())
def empty(
    shape: int | Shape, dtype: npt.DTypeLike | None = None, *, device: _Where = None, out_sharding: _Where = None
) -> ShardedTensor:
    """Creates an array without initializing its elements, whose values are arbitrary.

    Args:
        shape: the size of each dimension; an integer for one dimension.
        dtype: the dtype of the result; float64 by default.
        device: a Device, Mesh, NamedSharding or P (see `shardtensor.functions.standard.creation`); the default mesh by
            default.

    >>> st.empty((2, 3), dtype="int8").shape
    (2, 3)
    """


@operator(_like, tags=("prototype",))
def empty_like(
    x: ArrayLike, /, dtype: npt.DTypeLike | None = None, *, device: _Where = None, out_sharding: _Where = None
) -> ShardedTensor:
    """Creates an array like x without initializing its elements, whose values are arbitrary.

    Args:
        x: a tensor or a host array, the prototype of the shape, the dtype and the sharding; its elements are not read.
        dtype: the dtype of the result; x's by default.
        device: a Device, Mesh, NamedSharding or P (see `shardtensor.functions.standard.creation`); x's sharding by
            default.

    >>> st.empty_like(st.zeros((2, 3))).shape
    (2, 3)
    """


@operator(_shaped, operands=())
def zeros(
    shape: int | Shape, dtype: npt.DTypeLike | None = None, *, device: _Where = None, out_sharding: _Where = None
) -> ShardedTensor:
    """Creates an array of zeros.

    Arguments are those of `empty`: ``dtype`` is float64 by default, ``device`` the default mesh.

    >>> st.zeros((4, 2), device=st.make_mesh((2,), ("x",))).sharding.spec
    P('x')
    """


@operator(_like, tags=("prototype",))
def zeros_like(
    x: ArrayLike, /, dtype: npt.DTypeLike | None = None, *, device: _Where = None, out_sharding: _Where = None
) -> ShardedTensor:
    """Creates an array of zeros with the shape, dtype and sharding of x, unless ``dtype`` or ``device`` is given.

    Arguments are those of `empty_like`.

    >>> st.zeros_like(st.asarray([1, 2])).tolist()
    [0, 0]
    """


@operator(_shaped, operands=())
def ones(
    shape: int | Shape, dtype: npt.DTypeLike | None = None, *, device: _Where = None, out_sharding: _Where = None
) -> ShardedTensor:
    """Creates an array of ones.

    Arguments are those of `empty`: ``dtype`` is float64 by default, ``device`` the default mesh.

    >>> st.ones(3, dtype=int).tolist()
    [1, 1, 1]
    """


@operator(_like, tags=("prototype",))
def ones_like(
    x: ArrayLike, /, dtype: npt.DTypeLike | None = None, *, device: _Where = None, out_sharding: _Where = None
) -> ShardedTensor:
    """Creates an array of ones with the shape, dtype and sharding of x, unless ``dtype`` or ``device`` is given.

    Arguments are those of `empty_like`.

    >>> st.ones_like(st.asarray([7.5, 2.0])).tolist()
    [1.0, 1.0]
    """


def _kind_dtype(kind: Any) -> Any:
    """Returns the dtype of a fill value, given its Python type or its aval.

    Raises:
        ShapeError: the fill value is not 0-d.
    """
    if isinstance(kind, type):
        return np.asarray(kind(1)).dtype
    if kind.ndim:
        raise ShapeError(f"fill_value has shape {kind.shape}; wanted a scalar")
    return kind.dtype


def _filled(kinds: Any, *, shape: Any, dtype: Any = None) -> _ShapeAndDtype:
    return _shaped(kinds, shape=shape, dtype=_kind_dtype(kinds[0]) if dtype is None else dtype)


@operator(_filled, operands=("fill_value",))
def full(
    shape: int | Shape,
    fill_value: ArrayLike,
    dtype: npt.DTypeLike | None = None,
    *,
    device: _Where = None,
    out_sharding: _Where = None,
) -> ShardedTensor:
    """Creates an array whose elements all equal ``fill_value``.

    Args:
        shape: the size of each dimension; an integer for one dimension.
        fill_value: a scalar, or a 0-d tensor or array.
        dtype: the dtype of the result; that of ``fill_value`` by default.
        device: a Device, Mesh, NamedSharding or P (see `shardtensor.functions.standard.creation`); the default mesh by
            default.

    Raises:
        RangeError: ``fill_value`` is a Python integer that ``dtype`` cannot represent (an OverflowError).
        ShapeError: ``fill_value`` is not 0-d, or a size is negative.

    >>> st.full((2,), 7).tolist()
    [7, 7]
    """


def _filled_like(kinds: Any, *, dtype: Any = None) -> _ShapeAndDtype:
    _kind_dtype(kinds[1])
    return _like(kinds, dtype=dtype)


@operator(_filled_like, operands=("x", "fill_value"), tags=("prototype",))
def full_like(
    x: ArrayLike,
    /,
    fill_value: ArrayLike,
    dtype: npt.DTypeLike | None = None,
    *,
    device: _Where = None,
    out_sharding: _Where = None,
) -> ShardedTensor:
    """Creates an array like x whose elements all equal ``fill_value``.

    Args:
        x: a tensor or a host array, the prototype of the shape, the dtype and the sharding; its elements are not read.
        fill_value: a scalar, or a 0-d tensor or array.
        dtype: the dtype of the result; x's by default.
        device: a Device, Mesh, NamedSharding or P (see `shardtensor.functions.standard.creation`); x's sharding by
            default.

    Raises:
        RangeError: ``fill_value`` is a Python integer that the dtype cannot represent (an OverflowError).
        ShapeError: ``fill_value`` is not 0-d.

    >>> st.full_like(st.asarray([1.0, 2.0]), 3).tolist()
    [3.0, 3.0]
    """


def _maker(name: str) -> Callable[..., Any]:
    """Returns the kernel of a function that fills its shard with one value. The kernel ignores a prototype operand."""

    def kernel(xp: Any, context: ShardContext, *operands: Any, **params: Any) -> Any:
        fill = operands[-1:] if name == "full" else ()
        if fill and (type(fill[0]) in SCALARS or isinstance(fill[0], (np.generic, np.ndarray))):
            # NumPy converts the value, because libraries treat values that do not fit differently.
            fill = (fill_value(fill[0], context.dtype),)
        if xp is not np or name == "zeros":  # The operating system allocates pages of zeros only when they are touched.
            return getattr(xp, name)(context.local_shape, *fill, dtype=context.dtype)
        out = memory_pool.empty(context.local_shape, context.dtype)
        if name != "empty":
            copy_into(out, *fill or (1,), breaks=True)
        return out

    return kernel


for _function in (empty, empty_like, zeros, zeros_like, ones, ones_like, full, full_like):
    implements(_function, "kernel")(_maker(_function.__name__.removesuffix("_like")))


def _steps(start: Any, stop: Any, step: Any) -> tuple[Any, Any, Any]:
    for name, value in (("start", start), ("stop", stop), ("step", step)):
        if (value is not None or name != "stop") and not isinstance(value, (int, float, np.number)):
            raise ArgumentTypeError(f"{name} is {type_text(value)}; wanted a real number")
    if step == 0:
        raise ArgumentError("step is 0; wanted a number that leads from start to stop")
    return (0, start, step) if stop is None else (start, stop, step)


def _arange_rule(kinds: Any, *, start: Any, stop: Any = None, step: Any = 1, dtype: Any = None) -> _ShapeAndDtype:
    first, last, by = _steps(start, stop, step)
    if not all(isinstance(n, int) or math.isfinite(n) for n in (first, last, by)):
        raise ArgumentError(f"start={first}, stop={last}, step={by} must be finite")
    count = max(math.ceil((last - first) / by), 0)
    result_dtype = sharded_dtype(np.result_type(*map(np.asarray, (first, last, by))) if dtype is None else dtype)
    if result_dtype.kind == "b" and count > 2:
        raise ArgumentTypeError(f"dtype is bool, and there are {counted(count, 'element')}; wanted at most 2 of them")
    for value in (first, first + by)[:count]:  # NumPy converts only these two and extrapolates their difference.
        converted(value, result_dtype, "element")
    return checked_shape((count,)), result_dtype


@operator(_arange_rule, operands=())
def arange(
    start: float,
    /,
    stop: float | None = None,
    step: float = 1,
    dtype: npt.DTypeLike | None = None,
    *,
    device: _Where = None,
    out_sharding: _Where = None,
) -> ShardedTensor:
    """Creates a 1-d array of the numbers start, start + step, … below stop (above it for a negative step).

    With one argument, ``arange(stop)``, the numbers start at 0. There are ``ceil((stop - start) / step)`` of them, and
    every element has the bits that NumPy computes.

    Args:
        start: the first number, or ``stop`` if it is the only positional argument.
        stop: the end, which is excluded.
        step: the difference of successive elements; negative or positive.
        dtype: the dtype of the result; by default NumPy's default integer for integers, float64 for floats.
        device: a Device, Mesh, NamedSharding or P (see `shardtensor.functions.standard.creation`); the default mesh by
            default.

    Raises:
        ArgumentTypeError: an argument is not a real number, or ``dtype`` is bool for more than two elements.
        ArgumentError: ``step`` is 0, or an argument is infinite or NaN.
        RangeError: the first or the second element is an integer that ``dtype`` cannot represent (an OverflowError).

    >>> st.arange(2, 11, 3).tolist()
    [2, 5, 8]
    """


@implements(arange, "kernel")
def _arange(xp: Any, context: ShardContext, *, start: Any, stop: Any, step: Any, dtype: Any) -> Any:
    first, _, by = _steps(start, stop, step)
    ((begin, end),) = context.box
    if context.dtype.kind == "b":  # There are at most two elements, and NumPy cannot subtract bools.
        return xp.asarray([bool(value) for value in (first, first + by)[begin:end]], dtype=context.dtype)
    low, high = sorted((first + begin * by, first + end * by))
    exact = context.dtype.kind in "iu" and isinstance(first, int) and isinstance(by, int)
    if exact and low >= -(2**63) and high < 2**63:  # The libraries' own ``arange`` computes in int64.
        if (result := own_kernel(xp, "ramp", begin, end, by, first, context.dtype, np.dtype("int64"))) is not None:
            return result
        return xp.asarray(xp.arange(first + begin * by, first + end * by, by), dtype=context.dtype)
    # NumPy's formula, start + i * (second - first), gives every element NumPy's bits: float16 is computed in float32.
    computed = np.dtype("f4") if context.dtype == "f2" else context.dtype
    with np.errstate(all="ignore"):
        first_two = [np.asarray(value, context.dtype) for value in (first, first + by)]
        origin, second = [value.astype(computed) for value in first_two]
        delta = second - origin
        formula = [(origin + k * delta).astype(context.dtype) for k in (0, 1)]
    result = own_kernel(xp, "ramp", begin, end, delta, origin, context.dtype, computed)
    if result is None:
        steps = xp.asarray(xp.arange(begin, end), dtype=computed)
        result = xp.asarray(xp.add(xp.multiply(steps, delta.item()), origin.item()), dtype=context.dtype)
    for place, value in enumerate(first_two):  # NumPy does not compute the first two elements.
        if begin <= place < end and value.tobytes() != formula[place].tobytes():
            result[place - begin : place - begin + 1] = value.item()
    return result


def _eye_rule(kinds: Any, *, n_rows: int, n_cols: int | None = None, k: int = 0, dtype: Any = None) -> _ShapeAndDtype:
    if not isinstance(k, (int, np.integer)):
        raise ArgumentTypeError(f"k is {k!r}; wanted an integer, the number of a diagonal")
    for name, count in (("n_rows", n_rows), ("n_cols", n_cols)):
        if count is not None and not hasattr(count, "__index__"):
            raise ArgumentTypeError(f"{name} is {count!r:.60}; wanted an integer")
    return _shaped(kinds, shape=(n_rows, n_rows if n_cols is None else n_cols), dtype=dtype)


@operator(_eye_rule, operands=())
def eye(
    n_rows: int,
    n_cols: int | None = None,
    /,
    k: int = 0,
    dtype: npt.DTypeLike | None = None,
    *,
    device: _Where = None,
    out_sharding: _Where = None,
) -> ShardedTensor:
    """Creates a matrix with ones on the k-th diagonal and zeros elsewhere.

    Args:
        n_rows: the number of rows.
        n_cols: the number of columns; ``n_rows`` by default.
        k: the number of the diagonal: 0 is the main one, positive ones are above it, negative ones below it.
        dtype: the dtype of the result; float64 by default.
        device: a Device, Mesh, NamedSharding or P (see `shardtensor.functions.standard.creation`); the default mesh by
            default.

    Raises:
        ArgumentTypeError: ``k`` is not an integer.
        ShapeError: ``n_rows`` or ``n_cols`` is negative.

    >>> st.eye(2, 3, k=1).tolist()
    [[0.0, 1.0, 0.0], [0.0, 0.0, 1.0]]
    """


@implements(eye, "kernel")
def _eye(xp: Any, context: ShardContext, *, n_rows: int, n_cols: int | None, k: int, dtype: Any) -> Any:
    (top, _), (left, _) = context.box
    rows, columns = context.local_shape
    diagonal = k + top - left
    if not -rows < diagonal < columns:  # The diagonal does not cross this shard.
        return xp.zeros((rows, columns), dtype=context.dtype)
    return xp.eye(rows, columns, k=diagonal, dtype=context.dtype)
