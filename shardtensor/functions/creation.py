"""Creation functions (a chapter of the standard), declared.

``device`` says where: a Device holds the array whole, a Mesh splits its first dimension over all the mesh's axes (the
first one major), a NamedSharding is followed. Without it, the array lies on the default mesh, and yields to operands
that were placed. Each device makes its own part. Errors: ShapeError for a negative size, ShardingError for a spec
longer than the rank, TypeError for a dtype that is none.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from shardtensor.backend.device import Device
from shardtensor.core import implements, operator
from shardtensor.errors import ArgumentError, ArgumentTypeError, ShapeError
from shardtensor.functions.manipulation import checked_shape
from shardtensor.host import memory_pool as pool
from shardtensor.host.blockwise import copy_into
from shardtensor.sharding.layout import NamedSharding, Shape
from shardtensor.sharding.mesh import Mesh
from shardtensor.sharding.shard_context import Place
from shardtensor.tensor.operands import converted, fill_value, sharded_dtype
from shardtensor.tensor.tensor import SCALARS, ArrayLike, ShardedTensor

Where = Device | Mesh | NamedSharding | None
Said = tuple[Shape, Any]


def _shaped(kinds: Any, *, shape: Any, dtype: Any = None) -> Said:
    return checked_shape(shape), sharded_dtype(np.float64 if dtype is None else dtype)


def _like(kinds: Any, *, dtype: Any = None) -> Said:
    return kinds[0].shape, sharded_dtype(kinds[0].dtype if dtype is None else dtype)


@operator(_shaped)
def empty(shape: int | Shape, *, dtype: npt.DTypeLike | None = None, device: Where = None) -> ShardedTensor:
    """Elements of any value whatever; float64 unless ``dtype`` says otherwise.

    >>> st.empty((2, 3), dtype="int8").shape
    (2, 3)
    """


@operator(_like)
def empty_like(x: ArrayLike, /, *, dtype: npt.DTypeLike | None = None, device: Where = None) -> ShardedTensor:
    """Elements of any value whatever, with x's shape, dtype and layout.

    >>> st.empty_like(st.zeros((2, 3))).shape
    (2, 3)
    """


@operator(_shaped)
def zeros(shape: int | Shape, *, dtype: npt.DTypeLike | None = None, device: Where = None) -> ShardedTensor:
    """Zeros; float64 unless ``dtype`` says otherwise.

    >>> st.zeros((4, 2), device=st.make_mesh((2,), ("x",))).sharding.spec
    P('x')
    """


@operator(_like)
def zeros_like(x: ArrayLike, /, *, dtype: npt.DTypeLike | None = None, device: Where = None) -> ShardedTensor:
    """Zeros with x's shape, dtype and layout.

    >>> st.zeros_like(st.asarray([1, 2])).tolist()
    [0, 0]
    """


@operator(_shaped)
def ones(shape: int | Shape, *, dtype: npt.DTypeLike | None = None, device: Where = None) -> ShardedTensor:
    """Ones; float64 unless ``dtype`` says otherwise.

    >>> st.ones(3, dtype=int).tolist()
    [1, 1, 1]
    """


@operator(_like)
def ones_like(x: ArrayLike, /, *, dtype: npt.DTypeLike | None = None, device: Where = None) -> ShardedTensor:
    """Ones with x's shape, dtype and layout.

    >>> st.ones_like(st.asarray([7.5, 2.0])).tolist()
    [1.0, 1.0]
    """


def _kind_dtype(kind: Any) -> Any:
    """The dtype of a fill value from what is known of it; it must have no dimensions."""
    if isinstance(kind, type):
        return np.asarray(kind(1)).dtype
    if kind.ndim:
        raise ShapeError(f"fill_value has shape {kind.shape}; wanted a scalar")
    return kind.dtype


def _filled(kinds: Any, *, shape: Any, dtype: Any = None) -> Said:
    return checked_shape(shape), sharded_dtype(_kind_dtype(kinds[0]) if dtype is None else dtype)


@operator(_filled)
def full(
    shape: int | Shape, fill_value: ArrayLike, *, dtype: npt.DTypeLike | None = None, device: Where = None
) -> ShardedTensor:
    """``fill_value`` (a scalar or an array of no dimensions) everywhere; of its dtype unless ``dtype`` says otherwise.

    Raises:
        RangeError: a Python integer does not fit into ``dtype``. It is an OverflowError.

    >>> st.full((2,), 7).tolist()
    [7, 7]
    """


def _filled_like(kinds: Any, *, dtype: Any = None) -> Said:
    _kind_dtype(kinds[1])
    return _like(kinds, dtype=dtype)


@operator(_filled_like)
def full_like(
    x: ArrayLike, /, fill_value: ArrayLike, *, dtype: npt.DTypeLike | None = None, device: Where = None
) -> ShardedTensor:
    """``fill_value`` everywhere, with x's shape, dtype and layout.

    Raises:
        RangeError: a Python integer does not fit into the dtype. It is an OverflowError.

    >>> st.full_like(st.asarray([1.0, 2.0]), 3).tolist()
    [3.0, 3.0]
    """


def _maker(name: str) -> Callable[..., Any]:
    """The kernel of a function that fills its part with one value. What it is to be like is not looked at again."""

    def kernel(xp: Any, place: Place, *operands: Any, **params: Any) -> Any:
        fill = operands[-1:] if name == "full" else ()
        if fill and (type(fill[0]) in SCALARS or isinstance(fill[0], (np.generic, np.ndarray))):
            fill = (fill_value(fill[0], place.dtype),)  # by NumPy: libraries differ in what does not fit
        if xp is not np or name == "zeros":  # of which nobody pays for what is never touched
            return getattr(xp, name)(place.local_shape, *fill, dtype=place.dtype)
        out = pool.empty(place.local_shape, place.dtype)
        if name != "empty":
            copy_into(out, *fill or (1,), breaks=True)
        return out

    return kernel


for _function, _name in (
    (empty, "empty"), (empty_like, "empty"), (zeros, "zeros"), (zeros_like, "zeros"),
    (ones, "ones"), (ones_like, "ones"), (full, "full"), (full_like, "full"),
):  # fmt: skip
    implements(_function, "kernel")(_maker(_name))


def _steps(start: Any, stop: Any, step: Any) -> tuple[Any, Any, Any]:
    for name, value in (("start", start), ("stop", stop), ("step", step)):
        if value is not None and not isinstance(value, (int, float, np.number)):
            raise ArgumentTypeError(f"{name} is a {type(value).__name__}; wanted a real number")
    if step == 0:
        raise ArgumentError("step is 0; wanted a number that leads from start to stop")
    return (0, start, step) if stop is None else (start, stop, step)


def _arange_rule(kinds: Any, *, start: Any, stop: Any = None, step: Any = 1, dtype: Any = None) -> Said:
    first, last, by = _steps(start, stop, step)
    if not all(map(math.isfinite, (first, last, by))):
        raise ArgumentError(f"start={first}, stop={last}, step={by} must be finite")
    count = max(math.ceil((last - first) / by), 0)
    given = np.result_type(*[np.asarray(v).dtype for v in (first, last, by)]) if dtype is None else dtype
    made = sharded_dtype(given)
    if made.kind == "b" and count > 2:
        raise ArgumentTypeError(f"dtype is bool, and there are {count} elements; wanted at most 2 of them")
    for value in (first, first + by)[:count]:  # NumPy converts these two, and continues as they differ
        converted(value, made, "element")
    return (count,), made


@operator(_arange_rule)
def arange(
    start: float,
    /,
    stop: float | None = None,
    step: float = 1,
    *,
    dtype: npt.DTypeLike | None = None,
    device: Where = None,
) -> ShardedTensor:
    """The numbers start, start + step, … before stop (0, 1, … before ``start`` where it is the only one).

    Integers give NumPy's default integer, floats float64, unless ``dtype`` says otherwise.

    Raises:
        RangeError: the first or the second of them, an integer, does not fit into ``dtype``. It is an OverflowError.
        ArgumentTypeError: more than two bools.

    >>> st.arange(2, 11, 3).tolist()
    [2, 5, 8]
    """


@implements(arange, "kernel")
def _arange(xp: Any, place: Place, *, start: Any, stop: Any, step: Any, dtype: Any) -> Any:
    first, _, by = _steps(start, stop, step)
    ((begin, end),) = place.box
    if place.dtype.kind == "b":  # at most two, and bools have no difference
        return xp.asarray([bool(value) for value in (first, first + by)[begin:end]], dtype=place.dtype)
    low, high = sorted((first + begin * by, first + end * by))
    exact = place.dtype.kind in "iu" and isinstance(first, int) and isinstance(by, int)
    if exact and low >= -(2**63) and high < 2**63:  # libraries count in int64
        return xp.asarray(xp.arange(first + begin * by, first + end * by, by), dtype=place.dtype)
    # NumPy's own way, so that every element has NumPy's bits: start + i * (second - first), in the result's dtype.
    origin = np.asarray(first, place.dtype)
    delta = np.asarray(first + by, place.dtype) - origin
    steps = xp.asarray(xp.arange(begin, end), dtype=place.dtype)
    return xp.add(xp.multiply(steps, delta.item()), origin.item())


def _eye_rule(kinds: Any, *, n_rows: int, n_cols: int | None = None, k: int = 0, dtype: Any = None) -> Said:
    if not isinstance(k, (int, np.integer)):
        raise ArgumentTypeError(f"k is {k!r}; wanted an integer, the number of a diagonal")
    return checked_shape((n_rows, n_rows if n_cols is None else n_cols)), sharded_dtype(
        np.float64 if dtype is None else dtype
    )


@operator(_eye_rule)
def eye(
    n_rows: int, n_cols: int | None = None, /, *, k: int = 0, dtype: npt.DTypeLike | None = None, device: Where = None
) -> ShardedTensor:
    """Ones on the k-th diagonal (above the main one for k > 0), zeros elsewhere.

    >>> st.eye(2, 3, k=1).tolist()
    [[0.0, 1.0, 0.0], [0.0, 0.0, 1.0]]
    """


@implements(eye, "kernel")
def _eye(xp: Any, place: Place, *, n_rows: int, n_cols: int | None, k: int, dtype: Any) -> Any:
    (top, _), (left, _) = place.box
    rows, columns = place.local_shape
    diagonal = k + top - left
    if not -rows < diagonal < columns:  # it passes this part by
        return xp.zeros((rows, columns), dtype=place.dtype)
    return xp.eye(rows, columns, k=diagonal, dtype=place.dtype)
