"""The derivatives of the methods of ufuncs: reductions, running results and repeated updates by any ufunc."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from shardtensor.core import OPS, call
from shardtensor.errors import ArgumentTypeError
from shardtensor.functions.derivatives import derivative_of
from shardtensor.functions.derivatives.cotangents import Call, whole
from shardtensor.functions.derivatives.forms import ZERO, Elementwise, rows, vjp
from shardtensor.functions.derivatives.of_indexing import of_elements_along
from shardtensor.functions.derivatives.of_reductions import of_product
from shardtensor.sharding.rules import normalize_axis, reduced_axes


def _of_ufunc(recorded: Call, g: Any, **values: Any) -> Sequence[Any]:
    """Returns the cotangents of the operands of one elementwise call of the ufunc."""
    name = recorded.params["ufunc"]
    derivative = derivative_of(OPS[name])
    if derivative is ZERO:
        return [None, None]
    if not isinstance(derivative, Elementwise):
        raise ArgumentTypeError(f"{recorded.op.error_name}: {name} has no derivative; write a loop of other operators")
    cotangents = [
        f and f(g, *[values[n] for n in names]) for f, names in zip(derivative.factors, derivative.names, strict=True)
    ]
    return [m if m is None or m.shape == g.shape else call("broadcast_to", m, g.shape) for m in cotangents]


def _part(x: Any, axis: int, begin: int | None, end: int | None) -> Any:
    return x[(slice(None),) * axis + (slice(begin, end),)]


# -- reductions ------------------------------------------------------------------------------------


def _of_reduction(g: Any, x: Any, y: Any, ufunc: str, total: Callable[[str, Any], Any]) -> Any:
    """Returns the cotangent of elements that are reduced by an associative ufunc.

    Args:
        g, y: for each element the cotangent of the result to which it belongs, and the result.
        x: the elements.
        ufunc: the name.
        total: returns for each element the sum or the product of elements that belong to the same result.
    """
    if ufunc in ("maximum", "minimum", "fmax", "fmin"):
        chosen = call("astype", x == y, g.dtype)  # Equal extremes share the cotangent.
        return g / call("maximum", total("add", chosen), 1) * chosen
    if ufunc == "multiply":
        return of_product(g, x, y, total)
    factors: dict[str, Callable[[], Any]] = {
        "add": lambda: g,
        "hypot": lambda: g * (x / call("where", y == 0, 1, y)),
        "logaddexp": lambda: g * call("exp", x - y),
        "logaddexp2": lambda: g * call("exp2", x - y),
    }
    return factors[ufunc]() if ufunc in factors else None


def _of_fold(g: Any, recorded: Call) -> Any:
    x, y, axes = (
        recorded.saved["x"],
        recorded.saved["y"],
        reduced_axes(recorded.params["axis"], recorded.saved["x"].ndim),
    )
    if axes and not recorded.params["keepdims"]:
        g, y = [call("expand_dims", a, axis=axes) for a in (g, y)]
    return _of_reduction(g, x, y, recorded.params["ufunc"], lambda name, a: a)


def _of_segments(g: Any, recorded: Call) -> Any:
    x, ufunc, starts = recorded.saved["x"], recorded.params["ufunc"], recorded.params["starts"]
    axis = normalize_axis(recorded.params["axis"], x.ndim)
    g, y, size = whole(g, recorded.results[0]), recorded.saved["y"], x.shape[axis]
    ends = [max(end, start + 1) for start, end in itertools.pairwise((*starts, size))]
    if ufunc in _IN_ORDER:
        parts = [
            _of_one_segment(recorded, g, x, axis, k, *ends_of)
            for k, ends_of in enumerate(zip(starts, ends, strict=True))
        ]
        return _sum(parts)
    if ufunc not in _BY_SEGMENTS and derivative_of(OPS[ufunc]) is not ZERO:
        raise ArgumentTypeError(
            f"reduceat: it has no derivative for {ufunc}, of which NumPy does not define the order of operations; call "
            "the operator for slices"
        )
    return _sum([_of_layer(g, x, y, ufunc, axis, layer) for layer in _layers(starts, ends)])


_BY_SEGMENTS = ("add", "multiply", "maximum", "minimum", "fmax", "fmin", "hypot", "logaddexp", "logaddexp2")
"""The ufuncs whose reductions of all segments have derivatives without a loop."""

_IN_ORDER = ("subtract", "divide")
"""Those that NumPy applies to one element of a segment after another."""


def _sum(parts: Sequence[Any]) -> Any:
    present = [p for p in parts if p is not None]
    total = present[0] if present else None
    for part in present[1:]:
        total = total + part
    return total


def _layers(starts: Sequence[int], ends: Sequence[int]) -> list[list[tuple[int, int, int]]]:
    """Returns the segments, with their numbers, in groups of which none overlap. A segment ends before the start of the
    next one, unless that precedes it.
    """
    layers: list[list[tuple[int, int, int]]] = []
    for number, (start, end) in enumerate(zip(starts, ends, strict=True)):
        if not layers or start < layers[-1][-1][1]:
            layers.append([])
        layers[-1].append((start, end, number))
    return layers


def _of_layer(g: Any, x: Any, y: Any, ufunc: str, axis: int, layer: Sequence[tuple[int, int, int]]) -> Any:
    """Returns the cotangent of x by segments that do not overlap."""
    first, end = layer[0][0], layer[-1][1]
    which = np.concatenate([np.full(e - s, number) for s, e, number in layer])
    inside = _part(x, axis, first, end)

    def spread(a: Any) -> Any:
        return call("take", a, which, axis=axis)

    def total(name: str, a: Any) -> Any:
        starts = tuple([s - first for s, _, _ in layer])
        reduced = call("segments", a, ufunc=name, starts=starts, axis=axis)
        return call(
            "take", reduced, np.searchsorted([s for s, _, _ in layer], np.arange(first, end), "right") - 1, axis=axis
        )

    cotangent = _of_reduction(spread(g), inside, spread(y), ufunc, total)
    widths = [(first, x.shape[axis] - end) if d == axis else (0, 0) for d in range(x.ndim)]
    return call("pad", cotangent, widths) if cotangent is not None and cotangent.shape != x.shape else cotangent


def _of_one_segment(recorded: Call, g: Any, x: Any, axis: int, number: int, start: int, end: int) -> Any:
    part = _part(x, axis, start, end)
    running = call("accumulated", part, ufunc=recorded.params["ufunc"], axis=axis)
    of_last = _part(g, axis, number, number + 1)
    zeros = call("zeros_like", _part(part, axis, 1, None))
    cotangent = _through_steps(recorded, call("concat", [zeros, of_last], axis=axis), part, running, axis)
    widths = [(start, x.shape[axis] - end) if d == axis else (0, 0) for d in range(x.ndim)]
    return call("pad", cotangent, widths)


# -- running results -------------------------------------------------------------------------------


def _through_steps(recorded: Call, g: Any, x: Any, y: Any, axis: int) -> Any:
    """Returns the cotangent of elements of which each is combined with the result before it, one after another."""
    lines = [_part(g, axis, k, k + 1) for k in range(x.shape[axis])]
    cotangents: list[Any] = []
    while len(lines) > 1:
        k, last = len(lines) - 1, lines.pop()
        before, here, result = _part(y, axis, k - 1, k), _part(x, axis, k, k + 1), _part(y, axis, k, k + 1)
        of_before, of_here = _of_ufunc(recorded, last, x1=before, x2=here, y=result)
        cotangents.append(call("zeros_like", here) if of_here is None else of_here)
        lines[-1] = lines[-1] if of_before is None else lines[-1] + of_before
    return call("concat", [*lines, *cotangents[::-1]], axis=axis) if x.shape[axis] else g


def _of_accumulated(g: Any, recorded: Call) -> Any:
    axis = normalize_axis(recorded.params["axis"], recorded.saved["x"].ndim)
    return _through_steps(recorded, whole(g, recorded.results[0]), recorded.saved["x"], recorded.saved["y"], axis)


def _of_running(g: Any, recorded: Call) -> Any:
    x, y, ufunc = recorded.saved["x"], recorded.saved["y"], recorded.params["ufunc"]
    axis, g = normalize_axis(recorded.params["axis"], x.ndim), whole(g, recorded.results[0])
    if ufunc in ("maximum", "minimum", "fmax", "fmin"):  # Each result is the last element that is equal to it.
        places = call("reshape", call("arange", x.shape[axis]), [-1 if d == axis else 1 for d in range(x.ndim)])
        at = call("running", call("where", x == y, places, 0), ufunc="maximum", axis=axis)
        return of_elements_along(g, at, axis, x.shape)
    if ufunc not in ("hypot", "logaddexp", "logaddexp2"):
        return None
    if ufunc == "hypot":
        safe = call("where", y == 0, 1, y)
        return x * call("flip", call("cumulative_sum", call("flip", g / safe, axis=axis), axis=axis), axis=axis)
    exp = "exp" if ufunc == "logaddexp" else "exp2"
    # The sum of the later cotangents, each times the exponential of a difference that is not positive.
    sums, factors, step = g, call(exp, _part(y, axis, None, -1) - _part(y, axis, 1, None)), 1
    while step < x.shape[axis]:
        later = factors * _part(sums, axis, step, None)
        sums = call("concat", [_part(sums, axis, None, -step) + later, _part(sums, axis, -step, None)], axis=axis)
        factors = _part(factors, axis, None, -step) * _part(factors, axis, step, None)
        step *= 2
    return sums * call(exp, x - y)


# -- updates ---------------------------------------------------------------------------------------


def _of_updates(g: Any, recorded: Call) -> list[Any]:
    """Goes back through rounds, in each of which every element is updated at most once."""
    ufunc, places = recorded.params["ufunc"], np.asarray(recorded.saved["places"])
    x, values = recorded.saved["x"], recorded.saved["values"]
    g = whole(g, recorded.results[0])
    if ufunc in ("add", "subtract"):  # No old element is needed.
        of_values = g[tuple(places)] if recorded.active[2] else None
        return [g, None, -of_values if of_values is not None and ufunc == "subtract" else of_values]
    rounds = []
    for chosen in _rounds(np.ravel_multi_index(tuple(places), x.shape)):
        at = tuple(places[:, chosen])
        old, operands = x[at], () if values is None else (values[chosen],)
        new = call(ufunc, old, *operands)
        rounds.append((at, chosen, old, operands, new))
        x = call("setitem", x, new, at)
    of_values = None
    for at, chosen, old, operands, new in reversed(rounds):
        named = {"x": old, "y": new} if not operands else {"x1": old, "x2": operands[0], "y": new}
        of_old, *of_given = _of_ufunc(recorded, g[at], **named)
        g = call("setitem", g, 0 if of_old is None else of_old, at)
        if operands and of_given[0] is not None and recorded.active[2]:
            start = call("zeros_like", values) if of_values is None else of_values
            of_values = call("setitem", start, of_given[0], chosen)
    return [g, None, of_values]


def _rounds(flat: Any) -> list[Any]:
    """Returns the numbers of the updates in groups: the n-th group has the n-th update of each element."""
    order = np.argsort(flat, kind="stable")
    ranks = np.empty_like(order)
    ranks[order] = np.arange(len(flat)) - np.searchsorted(flat[order], flat[order])
    return [np.flatnonzero(ranks == k) for k in range(int(ranks.max(initial=-1)) + 1)]


rows(
    fold=vjp(_of_fold, "x", "y"),
    running=vjp(_of_running, "x", "y"),
    accumulated=vjp(_of_accumulated, "x", "y"),
    segments=vjp(_of_segments, "x", "y"),
    updated=vjp(_of_updates, "x", "places", "values"),
)
