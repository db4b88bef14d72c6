"""The derivatives of reductions."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from shardtensor.core import call
from shardtensor.functions.derivatives.cotangents import Call
from shardtensor.functions.derivatives.forms import Derivative, linear, rows, vjp, zero
from shardtensor.sharding.rules import reduced_axes
from shardtensor.tensor.operands import shape_of


def _axes(recorded: Call) -> tuple[int, ...]:
    return reduced_axes(recorded.params["axis"], len(shape_of(recorded.kinds[0])))


def _kept(x: Any, recorded: Call) -> Any:
    """Returns the result of a reduction, or its cotangent, with dimensions of size 1 for those that are gone."""
    if recorded.params["keepdims"] or not _axes(recorded):
        return x
    return call("expand_dims", x, axis=_axes(recorded))


def _count(recorded: Call) -> int:
    shape = shape_of(recorded.kinds[0])
    return math.prod([shape[a] for a in _axes(recorded)])


def _weighted(fn: Callable[[Any, Call], Any], *saved: str) -> Derivative:
    """Returns the derivative of a reduction that is the sum of the changes of the elements, each with its own weight.

    Args:
        fn: a function of the cotangent, with the dimensions of the operand, and of the call: it returns the product of
            the cotangent and of the weights.
        saved: the names of the values that it needs.
    """

    def pushed(tangents: Sequence[Any], recorded: Call) -> Any:
        weights = fn(1.0, recorded)
        if weights is None:
            return None
        return call("sum", tangents[0] * weights, axis=_axes(recorded), keepdims=recorded.params["keepdims"])

    return vjp(lambda g, recorded: fn(_kept(g, recorded), recorded), *saved, pushed=pushed)


def _of_extremum(g: Any, recorded: Call) -> Any:
    """Equal extremes share the cotangent."""
    x, y = recorded.saved["x"], _kept(recorded.saved["y"], recorded)
    chosen = call("astype", x == y, x.dtype)
    return g / call("sum", chosen, axis=_axes(recorded), keepdims=True) * chosen


def _centered(recorded: Call) -> Any:
    x = recorded.saved["x"]
    centered = x - call("mean", x, axis=_axes(recorded), keepdims=True)
    return call("conj", centered) if centered.dtype.kind == "c" else centered


def _of_variance(g: Any, recorded: Call) -> Any:
    factor = 2 / (_count(recorded) - recorded.params["correction"])
    return g * factor * _centered(recorded)


def _of_deviation(g: Any, recorded: Call) -> Any:
    y = _kept(recorded.saved["y"], recorded)
    scale = y * (_count(recorded) - recorded.params["correction"])
    # Elements that are all equal have a deviation with a kink, of which 0 is a slope.
    return g / call("where", y == 0, 1, scale) * _centered(recorded)


def of_product(g: Any, x: Any, y: Any, total: Callable[[str, Any], Any]) -> Any:
    """Returns the cotangents of factors: those of the products times the other factors, which are not quotients where
    elements are zero.

    Args:
        g, y: the cotangents of the products, and the products.
        x: the factors.
        total: returns the sums or the products of elements: ``total("add", a)``.
    """
    is_zero = x == 0
    zeros = total("add", call("astype", is_zero, "int64"))
    ones = call("where", is_zero, 1, x)
    quotient = call("where", zeros == 0, y, total("multiply", ones)) / ones
    is_counted = call("logical_or", zeros == 0, call("logical_and", zeros == 1, is_zero))
    return g * call("where", is_counted, quotient, 0)


def _of_product(g: Any, recorded: Call) -> Any:
    def total(ufunc: str, a: Any) -> Any:
        return call("sum" if ufunc == "add" else "prod", a, axis=_axes(recorded), keepdims=True)

    return of_product(g, recorded.saved["x"], _kept(recorded.saved["y"], recorded), total)


def _of_norm(g: Any, recorded: Call) -> Any:
    """Where the norm is zero, it has a kink, of which 0 is a slope."""
    x, ord = recorded.saved["x"], recorded.params["ord"]
    y = _kept(recorded.saved["y"], recorded)
    if ord == 0 or not x.size:
        return None
    if ord == 2:
        return g / call("where", y == 0, 1, y) * (call("conj", x) if x.dtype.kind == "c" else x)
    sign = call("sign", x)
    sign = call("conj", sign) if x.dtype.kind == "c" else sign
    if ord == 1:
        return g * sign
    size = call("abs", x)
    if math.isinf(ord):
        chosen = call("astype", size == y, y.dtype)
        return g / call("sum", chosen, axis=_axes(recorded), keepdims=True) * chosen * sign
    share = call("where", size == 0, 0, call("where", size == 0, 1, size) / call("where", y == 0, 1, y))
    return g * sign * share ** (ord - 1)


rows(
    vector_norm=_weighted(_of_norm, "x", "y"),
    sum=linear(_kept),
    mean=linear(lambda g, recorded: _kept(g, recorded) * (1 / max(_count(recorded), 1))),
    max=_weighted(_of_extremum, "x", "y"),
    min=_weighted(_of_extremum, "x", "y"),
    nanmax=_weighted(_of_extremum, "x", "y"),
    nanmin=_weighted(_of_extremum, "x", "y"),
    var=_weighted(_of_variance, "x"),
    std=_weighted(_of_deviation, "x", "y"),
    prod=_weighted(_of_product, "x", "y"),
)
zero("all any matrix_rank")
