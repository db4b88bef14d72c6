"""The derivatives of special functions, interpolation, histograms, and random numbers by their parameters."""

from __future__ import annotations

from typing import Any

import numpy as np

import shardtensor.functions.building.special  # noqa: F401 - it declares what the derivatives call
from shardtensor.core import call
from shardtensor.functions.building.scatter import scatter_add
from shardtensor.functions.derivatives.cotangents import Call, cast_to, unbroadcast, whole
from shardtensor.functions.derivatives.forms import Refused, elementwise, rows, vjp, zero
from shardtensor.tensor.operands import shape_of


def _of_i1(g: Any, x: Any, y: Any) -> Any:
    is_zero = x == 0
    return g * call("where", is_zero, 0.5, call("i0", x) - y / call("where", is_zero, 1.0, x))


rows(
    i0=elementwise(lambda g, x: g * call("bessel_i1", x)),
    bessel_i1=elementwise(_of_i1),
    mills_ratio=elementwise(lambda g, x, y: g * (x * y - 1)),
)

# -- random numbers: the derivative of a number at the same probability, as in JAX ------------------


def _of_gamma(g: Any, recorded: Call) -> list[Any]:
    a, y = recorded.saved["a"], recorded.saved["y"]
    return [whole(g, recorded.results[0]) * call("gamma_slope", a, y), None]


def _of_truncated_normal(g: Any, recorded: Call) -> list[Any]:
    """Returns the cotangents of the ends of the interval.

    The derivative by one end is the probability of the part between the number and the other end, divided by that of
    the interval, times the density at the end and divided by that at the number. All probabilities are multiplied by
    ``exp(nearest ** 2 / 2)``, of the end that is next to zero if the interval is on one side of it.
    """
    lower, upper, x = [recorded.saved[name] for name in ("lower", "upper", "y")]
    g = whole(g, recorded.results[0])
    lower, upper = lower + 0 * x, upper + 0 * x
    is_beside = call("logical_or", lower > 0, upper < 0)
    nearest = call("where", is_beside, call("minimum", call("abs", lower), call("abs", upper)), 0.0)
    places = lower, x, upper
    tails = [_tail(at, nearest) for at in places]

    def between(i: int, j: int) -> Any:
        around = call("logical_and", places[i] < 0, places[j] >= 0)
        return call("where", around, _ROOT - tails[i] - tails[j], call("abs", tails[i] - tails[j]))

    interval = between(0, 2)
    cotangents: list[Any] = []
    for end, part in ((lower, between(1, 2)), (upper, between(0, 1))):
        is_finite = call("isfinite", end)
        finite = call("where", is_finite, end, 0.0)
        slope = call("exp", (x - finite) * (x + finite) / 2) * (part / interval)
        cotangents.append(call("where", is_finite, g * slope, 0.0))
    return [unbroadcast(cotangents[k], recorded, k) if recorded.active[k] else None for k in range(2)] + [None]


_ROOT = float(np.sqrt(2 * np.pi))
"""The sum of all probabilities, in units of the density at zero."""


def _tail(x: Any, nearest: Any) -> Any:
    """Returns the probability of the numbers beyond x, times ``exp(nearest ** 2 / 2)``."""
    size = call("abs", x)
    is_finite = call("isfinite", size)
    size = call("where", is_finite, size, 0.0)
    scaled = call("exp", (nearest - size) * (nearest + size) / 2) * call("mills_ratio", size)
    return call("where", is_finite, scaled, 0.0)


rows(
    gamma=vjp(_of_gamma, "a", "y"),
    gamma_slope=Refused("the derivative of random numbers of the gamma distribution is not differentiated again"),
    truncated_normal=vjp(_of_truncated_normal, "lower", "upper", "y"),
)
zero("bernoulli binomial categorical poisson")

# -- interpolation and histograms ------------------------------------------------------------------


def _of_interpolation(g: Any, recorded: Call) -> list[Any]:
    x, points, values = [_as_tensor(recorded.saved[name]) for name in ("x", "xp", "fp")]
    g = whole(g, recorded.results[0])
    n = shape_of(points)[0]
    before, after = x < points[0], x > points[-1]
    is_inside = call("logical_not", call("logical_or", before, after))
    at = call("clip", call("searchsorted", points, x, side="right") - 1, 0, max(n - 2, 0))
    behind = call("minimum", at + 1, n - 1)
    left, right = [call("take", points, k) for k in (at, behind)]
    width = right - left
    is_flat = width == 0
    width = call("where", is_flat, 1.0, width)
    share = call("where", is_flat, 0.0, (call("clip", x, points[0], points[-1]) - left) / width)
    slope = call("where", is_flat, 0.0, (call("take", values, behind) - call("take", values, at)) / width)
    of_x = call("where", is_inside, g * slope, 0.0)
    of_values = g
    for is_outside, end in ((before, "left"), (after, "right")):
        if recorded.params[end] is not None:
            of_values = call("where", is_outside, 0.0, of_values)

    def added(to: Any, kind: Any) -> Any:
        parts = to * (1 - share), to * share
        sums = [
            scatter_add(_flat(k), _flat(cast_to(part, kind)), size=n)
            for k, part in zip((at, behind), parts, strict=True)
        ]
        return sums[0] + sums[1]

    kinds = recorded.kinds
    return [
        cast_to(of_x, kinds[0]) if recorded.active[0] else None,
        added(-of_x, kinds[1]) if recorded.active[1] else None,
        added(of_values, kinds[2]) if recorded.active[2] else None,
    ]


def _as_tensor(x: Any) -> Any:
    return call("asarray", x)


def _flat(x: Any) -> Any:
    return call("reshape", x, (-1,))


def _of_histogram(g: Any, recorded: Call) -> list[Any]:
    """Each weight is added to the sum of one bin, or to none."""
    if not recorded.active[2] or not shape_of(recorded.results[0])[0]:
        return [None] * len(recorded.active)
    x, edges = [_as_tensor(recorded.saved[name]) for name in ("x", "edges")]
    count = shape_of(edges)[0] - 1
    at = call("searchsorted", edges, x, side="right") - 1
    at = call("where", x == edges[-1], count - 1, at)
    is_counted = call("logical_and", at >= 0, at < count)
    of_bins = call("take", whole(g, recorded.results[0]), call("clip", at, 0, count - 1))
    return [None, None, call("where", is_counted, of_bins, 0)]


rows(
    interpolated=vjp(_of_interpolation, "x", "xp", "fp"),
    counts_between=vjp(_of_histogram, "x", "edges"),
    lines_applied=Refused("its function computes with arrays, not with tensors; give it one by st.custom_vjp"),
)
zero("packed unpacked")
