"""The derivatives of sorts and scans."""

from __future__ import annotations

from typing import Any

from shardtensor.core import call
from shardtensor.functions.derivatives.cotangents import Call, whole
from shardtensor.functions.derivatives.forms import Refused, linear, rows, vjp, zero
from shardtensor.functions.derivatives.indexing import scattered
from shardtensor.sharding.rules import normalize_axis
from shardtensor.tensor.operands import shape_of


def _of_sort(g: Any, recorded: Call) -> Any:
    axis, descending = recorded.params["axis"], recorded.params["descending"]
    order = call("argsort", recorded.saved["x"], axis=axis, descending=descending, stable=True)
    back = call("argsort", order, axis=axis)
    return call("take_along_axis", whole(g, recorded.results[0]), back, axis=axis)


def _of_topk(g: list[Any], recorded: Call) -> Any:
    indices, axis = recorded.saved["y"][1], recorded.params["axis"]
    return scattered(g[0], recorded, lambda places: call("take_along_axis", places, indices, axis=axis))


def _of_running_sum(g: Any, recorded: Call) -> Any:
    axis = normalize_axis(recorded.params["axis"] or 0, len(shape_of(recorded.kinds[0])))
    g = whole(g, recorded.results[0])
    if recorded.params["include_initial"]:
        g = g[(slice(None),) * axis + (slice(1, None),)]
    return call("flip", call("cumulative_sum", call("flip", g, axis=axis), axis=axis), axis=axis)


rows(
    sort=vjp(_of_sort, "x", after_composition=True),
    topk=vjp(_of_topk, "y"),
    cumulative_sum=linear(_of_running_sum, after_composition=True),
    **dict.fromkeys(
        ("unique", "unique_all", "unique_counts", "unique_inverse", "unique_values"),
        Refused("which elements are equal changes from one point to the next"),
    ),
)
zero("argsort argpartition isin isin_sorted searchsorted_split packed unpacked")
