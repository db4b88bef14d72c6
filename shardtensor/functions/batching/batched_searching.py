"""The batching rules of operators that search and count: the places of values among others, and how many there are."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from shardtensor.core import call
from shardtensor.functions.batching.batching_forms import Call, rows
from shardtensor.functions.building.scatter import scatter_add_each
from shardtensor.tensor.operands import dtype_of, shape_of


def _lines(recorded: Call, number: int) -> Any:
    """Returns an operand as one line of elements for each example."""
    return call("reshape", recorded.whole(number), (recorded.size, math.prod(recorded.shape(number))))


def _ranks(recorded: Call) -> Any:
    """The places at which values fit in sorted vectors."""
    if not recorded.batched[0]:
        return recorded.again(*recorded.operands)
    ordered, sorter = recorded.operands[0], recorded.params["sorter"]
    ordered = ordered if sorter is None else ordered[:, sorter]
    places = _places(ordered, _lines(recorded, 1), recorded.params["side"])
    return call("reshape", places, (recorded.size, *recorded.shape(1)))


def _places(ordered: Any, values: Any, side: str) -> Any:
    """Returns the places at which the values of each line fit in a sorted one: their ranks among both, less those among
    themselves. Of equal elements, those of the side come first.
    """
    dtype = np.result_type(ordered.dtype, values.dtype)
    ordered, values = call("astype", ordered, dtype), call("astype", values, dtype)
    every = [values, ordered] if side == "left" else [ordered, values]
    first = 0 if side == "left" else ordered.shape[1]
    return _ranked(call("concat", every, axis=1))[:, first : first + values.shape[1]] - _ranked(values)


def _ranked(x: Any) -> Any:
    """Returns the rank of each element in its line."""
    return call("argsort", call("argsort", x, axis=1, stable=True), axis=1)


def _members(recorded: Call) -> Any:
    """Whether elements are among those of a set, which all examples may share."""
    if not recorded.batched[1]:
        return recorded.again(*recorded.operands)
    dtype = np.result_type(dtype_of(recorded.leaves[0]), dtype_of(recorded.leaves[1]))
    x, elements = [call("astype", _lines(recorded, k), dtype) for k in range(2)]
    n = elements.shape[1]
    if not n:
        is_member = call("zeros_like", x, dtype=bool)
    else:
        ordered = call("sort", elements, axis=1)
        at = call("clip", _places(ordered, x, "left"), 0, n - 1)
        is_member = call("take_along_axis", ordered, at, axis=1) == x
    is_member = call("logical_not", is_member) if recorded.params["invert"] else is_member
    return call("reshape", is_member, (recorded.size, *recorded.shape(0)))


def _counted(recorded: Call) -> Any:
    weights = None if recorded.leaves[1] is None else _lines(recorded, 1)
    return _counts(_lines(recorded, 0), weights, recorded.params["length"])


def _counts(x: Any, weights: Any, length: int) -> Any:
    """Returns how often each integer is in a line, or the sums of weights."""
    if weights is None:
        return call("astype", scatter_add_each(x, call("ones_like", x, dtype="float64"), size=length), "int64")
    return scatter_add_each(x, call("astype", weights, "float64"), size=length)


def _scattered(recorded: Call) -> Any:
    """The rows of each example are added to its own array."""
    size, ndim = recorded.params["size"], recorded.ndim(0)
    if recorded.batched[0]:
        return scatter_add_each(recorded.whole(0), recorded.whole(1), size=size)
    rows = call("moveaxis", recorded.operands[1], 0, ndim)
    return call("moveaxis", recorded.again(recorded.operands[0], rows), 1, 0)


def _scattered_each(recorded: Call) -> Any:
    """The examples of a batch of batches are those of one."""
    both = [recorded.whole(k) for k in range(2)]
    n = both[0].shape[1]
    result = recorded.again(*[call("reshape", x, (recorded.size * n, *x.shape[2:])) for x in both])
    return call("reshape", result, (recorded.size, n, *result.shape[1:]))


def _rows(recorded: Call) -> Any:
    lines = recorded.params["lines"]
    if not (recorded.batched[0] or lines):
        return recorded.again(*recorded.operands)  # All examples select rows of the same array.
    return recorded.again(recorded.whole(0), recorded.whole(1), lines=lines + 1)


def _histogram(recorded: Call) -> Any:
    """The number of the bin of each element is counted; the last bin includes both edges."""
    x, edges = _lines(recorded, 0), recorded.whole(1)
    if recorded.batched[1]:
        at = _places(edges, x, "right")
    else:
        at = call("searchsorted", recorded.operands[1], x, side="right")
    n = edges.shape[1] - 1
    at = call("where", x == edges[:, -1:], n, at) - 1
    at = call("where", call("logical_or", at < 0, at >= n), n, at)
    weights = None if recorded.leaves[2] is None else _lines(recorded, 2)
    return _counts(at, weights, n + 1)[:, :n]


def _interpolated(recorded: Call) -> Any:
    """Straight lines between the points of each example."""
    if not (recorded.batched[1] or recorded.batched[2]):
        return recorded.again(*recorded.operands)
    shape = (recorded.size, *recorded.shape(0))
    dtype = np.result_type(np.float64, dtype_of(recorded.leaves[2]))
    x, xp = [call("astype", _lines(recorded, k), np.float64) for k in range(2)]
    fp = call("astype", _lines(recorded, 2), dtype)
    left, right = [recorded.params[end] and recorded.params[end][0] for end in ("left", "right")]
    n = xp.shape[1]
    at = _places(xp, x, "right") - 1
    here = call("clip", at, 0, max(n - 2, 0))
    behind = call("clip", here + 1, 0, n - 1)
    x0, x1 = [call("take_along_axis", xp, k, axis=1) for k in (here, behind)]
    y0, y1 = [call("take_along_axis", fp, k, axis=1) for k in (here, behind)]
    width = call("where", x1 == x0, 1, x1 - x0)
    result = call("where", x == x1, y1, call("where", x == x0, y0, (y1 - y0) / width * (x - x0) + y0))
    result = call("where", x < xp[:, :1], fp[:, :1] if left is None else left, result)
    result = call("where", x > xp[:, -1:], fp[:, -1:] if right is None else right, result)
    result = call("where", call("isnan", x), np.nan, result)
    return call("reshape", result, shape)


def _updated(recorded: Call) -> Any:
    """Each example is one more coordinate of the places."""
    n = shape_of(recorded.leaves[1])[-1]
    examples = call("broadcast_to", call("reshape", recorded.numbers(), (1, recorded.size, 1)), (1, recorded.size, n))
    places = call("moveaxis", recorded.whole(1), 0, 1)
    every = call("concat", [call("astype", examples, places.dtype), places], axis=0)
    values = recorded.leaves[2]
    operands = [recorded.whole(0), call("reshape", every, (every.shape[0], recorded.size * n))]
    return recorded.again(
        *operands, values if values is None else call("reshape", recorded.whole(2), (recorded.size * n,))
    )


rows(
    scatter_add=_scattered,
    scatter_add_each=_scattered_each,
    rows_at=_rows,
    searchsorted=_ranks,
    isin=_members,
    counts_of_integers=_counted,
    counts_between=_histogram,
    interpolated=_interpolated,
    updated=_updated,
)
