"""How quantiles lie between elements: NumPy's methods, and quantiles of lines for libraries that lack them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from shardtensor.errors import IndexingError
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

    def position(xp: Any, n: Any, q: Any) -> Any:
        return n * q + (alpha + q * (1 - alpha - beta)) - 1

    return position


def _rounded(name: str) -> Callable[..., Any]:
    return lambda xp, n, q: getattr(xp, name)((n - 1) * q)


def _midpoint(xp: Any, n: Any, q: Any) -> Any:
    position = (n - 1) * q
    return 0.5 * (xp.floor(position) + xp.ceil(position))


def _inverted_cdf(xp: Any, n: Any, q: Any) -> Any:
    return xp.ceil(n * q - 1)


def _closest_observation(xp: Any, n: Any, q: Any) -> Any:
    position = n * q - 1 - 0.5
    before = xp.floor(position)
    stays = xp.logical_and(xp.equal(position, before), xp.equal(xp.remainder(before, 2), 1))
    return xp.where(stays, before, before + 1)


METHODS: dict[str, Callable[..., Any]] = {
    "linear": lambda xp, n, q: (n - 1) * q,
    "lower": _rounded("floor"),
    "higher": _rounded("ceil"),
    "midpoint": _midpoint,
    "nearest": _rounded("round"),
    "inverted_cdf": _inverted_cdf,
    "averaged_inverted_cdf": lambda xp, n, q: n * q - 1,
    "closest_observation": _closest_observation,
    "interpolated_inverted_cdf": _between(0, 1),
    "hazen": _between(0.5, 0.5),
    "weibull": _between(0, 0),
    "median_unbiased": _between(1 / 3, 1 / 3),
    "normal_unbiased": _between(3 / 8, 3 / 8),
}
"""For each method the function ``position(xp, n, q)`` of the number of elements and of the quantiles."""

_DISCRETE = ("lower", "higher", "nearest", "inverted_cdf", "closest_observation")


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
    NaN: NaN are at the end of a line.
    """
    shape = (*lines.shape[:-1], 1)
    if not xp.isdtype(lines.dtype, ("real floating", "complex floating")):
        return xp.full(shape, lines.shape[-1], dtype=np.dtype("int64")), None
    nan = xp.isnan(lines)
    if not skip_nan:
        return xp.full(shape, lines.shape[-1], dtype=np.dtype("int64")), nan[..., -1:]
    count = xp.sum(xp.logical_not(nan), axis=-1, dtype=np.dtype("int64"), keepdims=True)
    return count, xp.equal(count, 0)


def _at(xp: Any, lines: Any, index: Any) -> Any:
    return xp.take_along_axis(lines, xp.asarray(index, dtype=np.dtype("int64")), axis=-1)


def _finished(xp: Any, context: ShardContext | Result, values: Any, nan: Any) -> Any:
    """Returns the result of which the quantiles are in the last dimension: they become the first ones."""
    values = xp.asarray(values, dtype=context.dtype)
    if nan is not None and context.dtype.kind in "fc":
        values = xp.where(nan, xp.asarray(math.nan, dtype=context.dtype), values)
    return xp.reshape(xp.moveaxis(values, -1, 0), context.local_shape)


def middle(xp: Any, context: ShardContext | Result, x: Any, axis: Any, keepdims: bool, skip_nan: bool) -> Any:
    """Returns the medians of an array on one device along an axis."""
    lines = _lines(xp, x, axis)
    if 0 in lines.shape:
        return xp.full(context.local_shape, math.nan, dtype=context.dtype)
    count, nan = _counts(xp, lines, skip_nan)
    wide = xp.asarray(lines, dtype=np.result_type(context.dtype, np.float32))
    lower = _at(xp, wide, xp.floor_divide(xp.maximum(xp.subtract(count, 1), 0), 2))
    upper = _at(xp, wide, xp.minimum(xp.floor_divide(count, 2), lines.shape[-1] - 1))
    middle = xp.where(xp.equal(lower, upper), lower, xp.divide(xp.add(lower, upper), 2))
    return _finished(xp, context, middle, nan)


def quantiles_of_lines(
    xp: Any, context: ShardContext | Result, x: Any, q: Any, axis: Any, keepdims: bool, method: str, skip_nan: bool
) -> Any:
    """Returns the quantiles of an array on one device along an axis."""
    lines = _lines(xp, x, axis)
    if not lines.shape[-1] and 0 not in context.local_shape and not skip_nan:
        raise IndexingError(f"x has no elements along axis {axis}, of which a quantile could be taken")
    if 0 in lines.shape or 0 in context.local_shape:
        return xp.full(context.local_shape, math.nan, dtype=context.dtype)
    count, nan = _counts(xp, lines, skip_nan)
    weak = not hasattr(q, "dtype") and xp.isdtype(x.dtype, "real floating")
    if not hasattr(q, "dtype") or not xp.isdtype(q.dtype, "real floating"):
        q = xp.asarray(q, dtype=np.dtype("float64"))
    position = METHODS[method](xp, xp.asarray(count, dtype=q.dtype), xp.reshape(q, (-1,)))
    last = xp.maximum(xp.subtract(count, 1), 0)
    before = xp.floor(position)
    lower = xp.asarray(xp.clip(before, 0, None), dtype=np.dtype("int64"))
    upper = xp.asarray(xp.clip(xp.add(before, 1), 0, None), dtype=np.dtype("int64"))
    a, b = [_at(xp, lines, xp.minimum(index, last)) for index in (lower, upper)]
    return interpolated(xp, context, a, b, xp.subtract(position, before), method, nan, x.dtype if weak else None)


def interpolated(
    xp: Any,
    context: ShardContext | Result,
    a: Any,
    b: Any,
    weight: Any,
    method: str,
    nan: Any,
    dtype: Any = None,
) -> Any:
    """Returns the numbers between a and b at the distances ``weight`` from a, which are converted to ``dtype`` if that
    is given; NaN where ``nan`` is true.
    """
    if method in _DISCRETE:  # The positions are integers.
        return _finished(xp, context, a, nan)
    if method == "midpoint":
        weight = xp.where(xp.equal(weight, 0), weight, 0.5)
    elif method == "averaged_inverted_cdf":
        weight = xp.where(xp.equal(weight, 0), 0.5, xp.ones_like(weight))
    nearer, rest = xp.greater_equal(weight, 0.5), xp.subtract(1, weight)
    if dtype is not None:
        weight, rest = xp.asarray(weight, dtype=dtype), xp.asarray(rest, dtype=dtype)
    step = xp.subtract(b, a)
    found = xp.where(nearer, xp.subtract(b, xp.multiply(step, rest)), xp.add(a, xp.multiply(step, weight)))
    return _finished(xp, context, found, nan)
