"""The derivatives of sorts and scans, and those of operators of which the results are discrete."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shardtensor.core import call
from shardtensor.functions.derivatives.cotangents import Call, whole
from shardtensor.functions.derivatives.forms import Refused, linear, rows, vjp, zero
from shardtensor.functions.derivatives.of_indexing import scattered
from shardtensor.sharding.rules import normalize_axis
from shardtensor.tensor.operands import shape_of


def _of_sort(g: Any, recorded: Call) -> Any:
    axis, descending = recorded.params["axis"], recorded.params["descending"]
    order = call("argsort", recorded.saved["x"], axis=axis, descending=descending, stable=True)
    back = call("argsort", order, axis=axis)
    return call("take_along_axis", whole(g, recorded.results[0]), back, axis=axis)


def _order_of(name: str, recorded: Call) -> Any:
    return call("argsort", recorded.saved[name], axis=recorded.params["axis"])


def _sorted(tangents: Sequence[Any], recorded: Call) -> Any:
    axis, descending = recorded.params["axis"], recorded.params["descending"]
    order = call("argsort", recorded.saved["x"], axis=axis, descending=descending, stable=True)
    return call("take_along_axis", tangents[0], order, axis=axis)


def _of_partition(g: Any, recorded: Call) -> Any:
    """Elements of the same rank are the same ones."""
    return _by_rank(whole(g, recorded.results[0]), recorded, "y", "x")


def _by_rank(values: Any, recorded: Call, of: str, to: str) -> Any:
    """Moves values that belong to elements of one array to the elements of the same rank of another one."""
    axis = recorded.params["axis"]
    back = call("argsort", _order_of(to, recorded), axis=axis)
    by_rank = call("take_along_axis", values, _order_of(of, recorded), axis=axis)
    return call("take_along_axis", by_rank, back, axis=axis)


def _of_topk(g: list[Any], recorded: Call) -> Any:
    indices, axis = recorded.saved["y"][1], recorded.params["axis"]
    return scattered(g[0], recorded, lambda places: call("take_along_axis", places, indices, axis=axis))


def _greatest(tangents: Sequence[Any], recorded: Call) -> list[Any]:
    return [call("take_along_axis", tangents[0], recorded.saved["y"][1], axis=recorded.params["axis"]), None]


def _axis(recorded: Call) -> int:
    return normalize_axis(recorded.params["axis"] or 0, len(shape_of(recorded.kinds[0])))


def _without_initial(y: Any, recorded: Call) -> Any:
    """Returns the running results, or their cotangents, without the one before the first element."""
    if not recorded.params["include_initial"]:
        return y
    return y[(slice(None),) * _axis(recorded) + (slice(1, None),)]


def _from_end(g: Any, axis: int) -> Any:
    return call("flip", call("cumulative_sum", call("flip", g, axis=axis), axis=axis), axis=axis)


def _of_running_sum(g: Any, recorded: Call) -> Any:
    return _from_end(_without_initial(whole(g, recorded.results[0]), recorded), _axis(recorded))


def _of_running_product(g: Any, recorded: Call) -> Any:
    """Elements behind the first zero of a line change no result; with it replaced by 1, results behind it are those
    that are multiplied by it.
    """
    x, axis = recorded.saved["x"], _axis(recorded)
    g = _without_initial(whole(g, recorded.results[0]), recorded)
    y = _without_initial(recorded.saved["y"], recorded)
    is_zero = x == 0
    zeros = call("cumulative_sum", call("astype", is_zero, "int64"), axis=axis)
    is_first = call("logical_and", is_zero, zeros == 1)
    others = call("cumulative_prod", call("where", is_first, 1, x), axis=axis)
    before = _from_end(g * y, axis) / call("where", is_zero, 1, x)
    return call("where", zeros == 0, before, call("where", is_first, _from_end(g * others, axis), 0))


rows(
    sort=vjp(_of_sort, "x", pushed=_sorted, after_composition=True),
    partition=vjp(
        _of_partition,
        "x",
        "y",
        pushed=lambda tangents, recorded: _by_rank(tangents[0], recorded, "x", "y"),
        after_composition=True,
    ),
    topk=vjp(_of_topk, "y", pushed=_greatest),
    cumulative_prod=vjp(_of_running_product, "x", "y", after_composition=True),
    cumulative_sum=linear(_of_running_sum, after_composition=True),
    **dict.fromkeys(
        ("unique", "unique_all", "unique_counts", "unique_inverse", "unique_values"),
        Refused("which elements are equal changes from one point to the next"),
    ),
)
zero("argsort argpartition isin isin_sorted searchsorted_split")
