"""The derivatives of medians and quantiles: a quantile is interpolated between two elements of a sorted line."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np

from shardtensor.core import call
from shardtensor.functions.derivatives.cotangents import Call, whole
from shardtensor.functions.derivatives.forms import rows, vjp
from shardtensor.functions.derivatives.of_indexing import of_elements_along
from shardtensor.functions.statistics.quantile_methods import MEDIAN, METHODS, places, width_of
from shardtensor.sharding.rules import reduced_axes
from shardtensor.tensor.operands import shape_of
from shardtensor.tensor.tensor import ShardedTensor


class _Operators:
    """The operators as a namespace of arrays, in which the ranks of quantiles are computed."""

    def __getattr__(self, name: str) -> Any:
        return functools.partial(call, name)


_LINEAR = ("linear", "interpolated_inverted_cdf", "hazen", "weibull", "median_unbiased", "normal_unbiased")
"""The methods of which the position of a quantile is a linear function of it; those of others are constant almost
everywhere.
"""


def _of_quantiles(g: Any, recorded: Call, *, skip_nan: bool) -> list[Any]:
    """Returns the cotangents of the array and of the quantiles. Lines that have NaN get none, as their results."""
    x, q, kind = recorded.saved["x"], recorded.saved.get("q", 0.5), recorded.kinds[0]
    method = recorded.params.get("method", MEDIAN)
    g = whole(g, recorded.results[0])
    axes = reduced_axes(recorded.params["axis"], x.ndim)
    kept = [d for d in range(x.ndim) if d not in axes]
    sizes = [x.shape[d] for d in kept]
    order = (*kept, *axes)
    lines = call("reshape", call("permute_dims", x, order), (*sizes, math.prod([x.shape[d] for d in axes])))
    if 0 in lines.shape:
        return [None] * len(recorded.active)
    g = call("moveaxis", call("reshape", g, (math.prod(shape_of(q)), *sizes)), 0, -1)
    xp: Any = np
    at, nan = call("argsort", lines, axis=-1), call("isnan", lines)
    if skip_nan:
        count = call("sum", call("logical_not", nan), axis=-1, keepdims=True, dtype="int64")
        is_nan, xp = count == 0, _Operators()
    else:
        count, is_nan = np.full((1,) * lines.ndim, lines.shape[-1]), call("any", nan, axis=-1, keepdims=True)
    if isinstance(q, ShardedTensor):
        flat, width, xp = call("reshape", q, (-1,)), str(q.dtype), _Operators()
    else:
        flat, width = np.reshape(np.asarray(q), -1), width_of(q)
    g = call("where", is_nan, 0, g)
    lower, upper, weight = places(xp, count, flat, width, method)
    first, last = [call("take_along_axis", at, _indices(rank, at), axis=-1) for rank in (lower, upper)]
    of_lines = None
    for part, place in ((_share(g, weight, True), first), (_share(g, weight, False), last)):
        if part is not None:
            of_part = of_elements_along(part, place, -1, lines.shape)
            of_lines = of_part if of_lines is None else of_lines + of_part
    back = call("permute_dims", call("reshape", of_lines, [x.shape[d] for d in order]), np.argsort(order).tolist())
    of_q = None
    if len(recorded.active) > 1 and recorded.active[1] and method in _LINEAR:
        a, b = [call("take_along_axis", lines, place, axis=-1) for place in (first, last)]
        last_rank = count - 1
        slope = METHODS[method](np, count, last_rank, 1.0) - METHODS[method](np, count, last_rank, 0.0)
        of_q = call("sum", g * (b - a) * slope, axis=tuple(range(len(sizes))))
        of_q = call("reshape", of_q, shape_of(recorded.kinds[1]))
    return [call("astype", back, kind.dtype, copy=False), of_q][: len(recorded.active)]


def _indices(rank: Any, like: Any) -> Any:
    """Returns ranks, in the last dimension, for each line."""
    shape = (*like.shape[:-1], rank.shape[-1])
    return call("broadcast_to", call("asarray", rank, dtype="int64"), shape)


def _share(g: Any, weight: Any, of_lower: bool) -> Any:
    """Returns the cotangents of the elements before quantiles, or of those behind them."""
    if weight is None:
        return g if of_lower else None
    return g * call("astype", call("asarray", 1 - weight if of_lower else weight), g.dtype)


_OF_ALL, _OF_NUMBERS = [functools.partial(_of_quantiles, skip_nan=skip_nan) for skip_nan in (False, True)]

rows(
    median=vjp(_OF_ALL, "x"),
    nanmedian=vjp(_OF_NUMBERS, "x"),
    quantile=vjp(_OF_ALL, "x", "q"),
    nanquantile=vjp(_OF_NUMBERS, "x", "q"),
)
