"""How quantiles lie between elements: NumPy's methods, and quantiles of lines for libraries that lack them."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from shardtensor.backend.registry import array_backend
from shardtensor.errors import IndexingError
from shardtensor.functions.building.monoids import may_be_nan
from shardtensor.functions.building.own_kernels import own_kernel
from shardtensor.sharding.layout import Shape
from shardtensor.sharding.rules import reduced_axes
from shardtensor.sharding.shard_context import ShardContext


class Result(NamedTuple):
    """The shape and the dtype of a local result; a `ShardContext` has them, too."""

    local_shape: Shape
    dtype: np.dtype[Any]


# -- methods: Hyndman & Fan, "Sample quantiles in statistical packages" (1996), and NumPy's -----------


def _between(alpha: float, beta: float) -> Callable[..., Any]:
    """Returns the position of a quantile q among n elements, which is interpolated, for two of Hyndman & Fan's
    constants.
    """

    def position(xp: Any, n: Any, last: Any, q: Any) -> Any:
        return n * q + (alpha + q * (1 - alpha - beta)) - 1

    return position


def _rounded(name: str) -> Callable[..., Any]:
    return lambda xp, n, last, q: getattr(xp, name)(last * q)


def _midpoint(xp: Any, n: Any, last: Any, q: Any) -> Any:
    position = last * q
    return 0.5 * (xp.floor(position) + xp.ceil(position))


def _inverted_cdf(xp: Any, n: Any, last: Any, q: Any) -> Any:
    return xp.ceil(n * q - 1)


def _closest_observation(xp: Any, n: Any, last: Any, q: Any) -> Any:
    position = n * q - 1 - 0.5
    before = xp.floor(position)
    stays = xp.logical_and(xp.equal(position, before), xp.equal(xp.remainder(before, 2), 1))
    return xp.where(stays, before, before + 1)


METHODS: dict[str, Callable[..., Any]] = {
    "linear": lambda xp, n, last, q: last * q,
    "lower": _rounded("floor"),
    "higher": _rounded("ceil"),
    "midpoint": _midpoint,
    "nearest": _rounded("round"),
    "inverted_cdf": _inverted_cdf,
    "averaged_inverted_cdf": lambda xp, n, last, q: n * q - 1,
    "closest_observation": _closest_observation,
    "interpolated_inverted_cdf": _between(0, 1),
    "hazen": _between(0.5, 0.5),
    "weibull": _between(0, 0),
    "median_unbiased": _between(1 / 3, 1 / 3),
    "normal_unbiased": _between(3 / 8, 3 / 8),
}
"""For each method the function ``position(xp, n, n - 1, q)`` of the number of elements and of the quantiles."""

_DISCRETE = ("lower", "higher", "nearest", "inverted_cdf", "closest_observation")

MEDIAN = "median"
"""The method of medians, which no caller gives: the mean of the middle elements."""

_INT, _DOUBLE = np.dtype("int64"), np.dtype("float64")


def width_of(q: Any) -> str:
    """Returns the dtype of quantiles; "int" or "float" for a Python number, which does not widen the dtype of the
    elements.
    """
    if type(q) in (int, float):
        return type(q).__name__
    backend = array_backend(q)
    return str(backend.dtype_of(q) if backend else np.asarray(q).dtype)


def is_weak(width: str) -> bool:
    """Whether quantiles are those of a Python number: see `width_of`."""
    return width in ("int", "float")


@functools.cache
def quantile_dtype(dtype: np.dtype[Any], width: str, method: str) -> np.dtype[Any]:
    """Returns the dtype of NumPy's quantiles of elements of a dtype; for ``width`` see `width_of`."""
    if method == MEDIAN:
        return np.asarray(np.median(np.ones(1, dtype))).dtype
    q: Any = {"int": 0, "float": 0.0}[width] if is_weak(width) else np.zeros(1, width)
    return np.asarray(np.quantile(np.ones(1, dtype), q, method=method)).dtype  # type: ignore[call-overload]


def places(xp: Any, n: Any, q: Any, width: str, method: str) -> tuple[Any, Any, Any]:
    """Returns the ranks of the elements before and behind quantiles, and the distances of the quantiles from the
    former, all as NumPy computes them; the distances are None where the quantiles are elements.

    Args:
        xp: the namespace.
        n: the numbers of elements, an array of int64.
        q: the quantiles.
        width: their dtype, in which ranks are computed, integers in float64: see `width_of`.
        method: how to interpolate.
    """
    last = xp.subtract(n, 1)
    if method == MEDIAN:
        lower, upper = xp.floor_divide(xp.maximum(last, 0), 2), xp.minimum(xp.floor_divide(n, 2), xp.maximum(last, 0))
        return lower, upper, xp.where(xp.equal(lower, upper), xp.asarray(1.0, dtype=_DOUBLE), 0.5)
    whole = np.dtype(width).kind != "f"
    q = xp.asarray(q, dtype=_DOUBLE if whole else np.dtype(width))
    # NumPy's n and n - 1 are Python numbers: each is rounded to the dtype of the quantiles.
    count, most = [xp.asarray(a, dtype=q.dtype) for a in (n, last)]
    position = METHODS[method](xp, count, most, q)
    above, below = xp.greater_equal(position, most), xp.less(position, 0)
    last = xp.maximum(last, 0)
    if method in _DISCRETE or (method == "linear" and whole):
        rank = xp.asarray(xp.where(xp.logical_or(above, below), 0, position), dtype=_INT)
        rank = xp.where(above, last, rank)
        return rank, rank, None
    before = xp.floor(position)
    # Ranks that a narrow dtype does not have are rounded.
    lower, upper = [xp.asarray(xp.where(xp.logical_or(above, below), 0, at), dtype=_INT) for at in (before, before + 1)]
    lower, upper = [xp.where(above, last, at) for at in (lower, upper)]
    # The distance is that from -1 where NumPy takes the last element.
    weight = xp.subtract(position, xp.where(below, 0, xp.where(above, -1, before)))
    if method == "midpoint":
        weight = xp.where(xp.equal(xp.remainder(position, 1), 0), xp.zeros_like(weight), 0.5)
    elif method == "averaged_inverted_cdf":
        weight = xp.where(xp.equal(weight, 0), 0.5, xp.ones_like(weight))
    return lower, upper, weight


# -- for libraries that lack these functions, or some of their methods -----------------------------


def _lines(xp: Any, x: Any, axis: Any) -> Any:
    """Returns x with the reduced dimensions merged into the last one, along which the elements are in order."""
    axes = reduced_axes(axis, x.ndim)
    kept = [d for d in range(x.ndim) if d not in axes]
    sizes = [x.shape[d] for d in kept]
    lines = xp.reshape(xp.permute_dims(x, (*kept, *axes)), (*sizes, math.prod(x.shape[d] for d in axes)))
    return xp.sort(lines, axis=-1, stable=False)


def _counts(xp: Any, lines: Any, skip_nan: bool) -> tuple[Any, Any]:
    """Returns the number of elements of each line that count, with a last dimension of size 1, and where the result is
    NaN: NaN are at the end of a line, as NaT are.
    """
    shape = (*lines.shape[:-1], 1)
    if not skip_nan or not may_be_nan(xp, lines):
        return xp.full(shape, lines.shape[-1], dtype=np.dtype("int64")), _missing(xp, lines)
    count = xp.sum(xp.logical_not(xp.isnan(lines)), axis=-1, dtype=np.dtype("int64"), keepdims=True)
    return count, xp.equal(count, 0)


def _missing(xp: Any, lines: Any) -> Any:
    """Returns in which lines an element is NaN, which is then the last one; None if none can be."""
    return xp.isnan(lines[..., -1:]) if may_be_nan(xp, lines) else None


def _at(xp: Any, lines: Any, index: Any) -> Any:
    return xp.take_along_axis(lines, xp.asarray(index, dtype=np.dtype("int64")), axis=-1)


def _finished(xp: Any, context: ShardContext | Result, values: Any, nan: Any) -> Any:
    """Returns the result of which the quantiles are in the last dimension: they become the first ones."""
    values = xp.asarray(values, dtype=context.dtype)
    if nan is not None and context.dtype.kind in "fcm":
        missing = np.array("NaT", context.dtype)[()] if context.dtype.kind == "m" else math.nan
        values = xp.where(nan, xp.asarray(missing, dtype=context.dtype), values)
    return xp.reshape(xp.moveaxis(values, -1, 0), context.local_shape)


def _beside(xp: Any, context: ShardContext | Result, a: Any, b: Any) -> tuple[Any, Any]:
    """Returns b and the mean of a and b: of float16 in float32; durations have no wider dtype."""
    wide = context.dtype if context.dtype.kind == "m" else np.result_type(context.dtype, np.float32)
    low, high = [xp.asarray(x, dtype=wide) for x in (a, b)]
    return high, xp.divide(xp.add(low, high), 2)


def quantiles_of_lines(
    xp: Any, context: ShardContext | Result, x: Any, q: Any, width: str, axis: Any, method: str, skip_nan: bool
) -> Any:
    """Returns the quantiles of an array on one device along an axis; for ``width`` see `width_of`."""
    lines = _lines(xp, x, axis)
    if not lines.shape[-1] and 0 not in context.local_shape and not skip_nan and method != MEDIAN:
        raise IndexingError(f"x has no elements along axis {axis}, of which a quantile could be taken")
    if 0 in lines.shape or 0 in context.local_shape:
        return xp.full(context.local_shape, math.nan, dtype=context.dtype)
    if not skip_nan and method == MEDIAN:  # In all lines, the same two elements are in the middle, or the same one.
        half, is_odd = divmod(lines.shape[-1], 2)
        distance = np.asarray([1.0 if is_odd else 0.5])
        return between_places(xp, context, lines, [half - 1 + is_odd], [half], distance, width, method)
    if isinstance(q, (int, float, np.ndarray, np.generic)) and not (skip_nan and may_be_nan(xp, lines)):
        numbers = np.reshape(q, (-1,))
        lower, upper, weight = places(np, np.full(numbers.size, lines.shape[-1]), numbers, width, method)
        return between_places(xp, context, lines, lower.tolist(), upper.tolist(), weight, width, method)
    if skip_nan and np.dtype(width).kind == "f":
        is_here = isinstance(q, (int, float, list, np.ndarray, np.generic))
        numbers = np.reshape(q, (-1,)).tolist() if is_here else xp.reshape(q, (-1,))
        own = own_kernel(xp, "quantiles_of_numbers", lines, numbers, width, context.dtype, method)
        if own is not None:
            return xp.reshape(own, context.local_shape)
    count, nan = _counts(xp, lines, skip_nan)
    q = xp.reshape(xp.asarray(q), (-1,))
    lower, upper, weight = places(xp, count, q, width, method)
    a, b = [_at(xp, lines, at) for at in (lower, upper)]
    return interpolated(xp, context, a, b, weight, width, method, nan)


def between_places(
    xp: Any,
    context: ShardContext | Result,
    lines: Any,
    lower: Sequence[int],
    upper: Sequence[int],
    weights: Any,
    width: str,
    method: str,
) -> Any:
    """Returns the quantiles between elements of sorted lines, whose places and distances are known on the host."""
    own = own_kernel(xp, "quantiles_between", lines, lower, upper, weights, context.dtype, method == MEDIAN)
    if own is not None:
        return xp.reshape(own, context.local_shape)
    nan = _missing(xp, lines)
    if len(lower) == 1:  # Slices take no kernel, but are no results: they would keep all lines alive.
        a, b = [lines[..., at : at + 1] for (at,) in (lower, upper)]
        if weights is None or method == MEDIAN:
            is_element = weights is None or weights[0] == 1
            values = xp.asarray(b, copy=True) if is_element else _beside(xp, context, a, b)[1]
            return _finished(xp, context, values, nan)
    else:
        a, b = [lines[..., xp.asarray(list(at), dtype=_INT)] for at in (lower, upper)]
    distances = None if weights is None else xp.asarray(weights)
    return interpolated(xp, context, a, b, distances, width, method, nan)


def interpolated(
    xp: Any, context: ShardContext | Result, a: Any, b: Any, weight: Any, width: str, method: str, nan: Any
) -> Any:
    """Returns the quantiles between elements a and b, given what `places` returns, as NumPy computes them; NaN where
    ``nan`` is true.
    """
    if weight is None:
        return _finished(xp, context, a, nan)
    if method == MEDIAN:
        return _finished(xp, context, xp.where(xp.equal(weight, 1), *_beside(xp, context, a, b)), nan)
    step = xp.asarray(xp.subtract(b, a), dtype=context.dtype)  # As in NumPy, differences of integers may overflow.
    a, b = [xp.asarray(x, dtype=context.dtype) for x in (a, b)]
    nearer, rest = xp.greater_equal(weight, 0.5), xp.subtract(1, weight)
    if context.dtype.kind != "m":  # Durations are multiplied by numbers.
        weight, rest = [xp.asarray(w, dtype=context.dtype) for w in (weight, rest)]
    result = xp.where(nearer, xp.subtract(b, xp.multiply(step, rest)), xp.add(a, xp.multiply(step, weight)))
    return _finished(xp, context, result, nan)
