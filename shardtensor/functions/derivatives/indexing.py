"""The derivatives of views and of index arrays."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from shardtensor.core import call
from shardtensor.functions.derivatives.cotangents import Call, Into, unbroadcast, whole, zeros_of
from shardtensor.functions.derivatives.forms import linear, rows, vjp
from shardtensor.functions.scatter import scatter_add
from shardtensor.sharding.index import Index
from shardtensor.sharding.rules import normalize_axis
from shardtensor.sharding.view_spec import ViewSpec, whole_view_spec
from shardtensor.tensor.operands import dtype_of, shape_of
from shardtensor.tensor.tensor import ShardedTensor
from shardtensor.tensor.value import Aval

# -- views -----------------------------------------------------------------------------------------


def _of_view(g: Any, recorded: Call) -> Any:
    """Returns the cotangent of the base of a view: the elements in another order and shape, or those of a part."""
    kind, spec = recorded.kinds[0], recorded.params["view_spec"]
    part_after_reshape = any(not _has_all(box) for box in spec.boxes[1:])
    if spec.part is not None or part_after_reshape:
        return Into(whole(g, recorded.results[0]), spec)
    if len(spec.boxes) > 1 or not _has_all(spec.boxes[0]):
        g = whole(g, recorded.results[0])
    for number in range(len(spec.boxes) - 1, -1, -1):
        box = spec.boxes[number]
        new = tuple([d for d, n in enumerate(box.order) if n is None])
        g = call("squeeze", g, axis=new) if new else g
        order = [n for n in box.order if n is not None]
        if order != sorted(order):
            g = call("permute_dims", g, tuple(np.argsort(order).tolist()))
        if number and g.shape != spec.boxes[number - 1].shape:
            g = call("reshape", g, spec.boxes[number - 1].shape)
    return g if _has_all(spec.boxes[0]) else Into(g, _part_of(kind, spec.boxes[0].entries))


def _has_all(box: Any) -> bool:
    return all(entry == (0, n, 1) for entry, n in zip(box.entries, box.over, strict=True))


def _part_of(kind: Aval, entries: Any) -> ViewSpec:
    return whole_view_spec(kind.shape, kind.sharding.spec.chains_of(kind.ndim)).at(Index(entries))


def _of_nothing(g: Any, recorded: Call) -> Any:
    """Operators of which all results with elements are views copy only what has none."""
    return zeros_of(recorded.kinds[0])


rows(
    view=linear(_of_view, partial_sums=True),
    getitem=linear(_of_nothing, after_composition=True),
)

# -- index arrays ----------------------------------------------------------------------------------


def places_of(kind: Any) -> Any:
    """Returns the numbers of the elements of a value, in its shape and layout."""
    numbers = call("arange", math.prod(shape_of(kind)))
    if not isinstance(kind, Aval):
        return call("reshape", numbers, shape_of(kind))
    return call("reshard", call("reshape", numbers, kind.shape), kind.sharding)


def scattered(g: Any, recorded: Call, select: Callable[[Any], Any]) -> Any:
    """Returns the cotangent of the first operand of an operator that selects elements: the sum over the selections of
    each element.

    Args:
        g: the cotangent of the result.
        recorded: the call.
        select: the operator as a function of the first operand, which is called with the numbers of its elements.
    """
    kind = recorded.kinds[0]
    places = select(places_of(kind))
    g = g if g.shape == places.shape else call("broadcast_to", g, places.shape)
    flat = scatter_add(call("reshape", places, (-1,)), call("reshape", g, (-1,)), size=math.prod(shape_of(kind)))
    return call("reshape", flat, shape_of(kind))


def _entries(index: Any) -> tuple[Any, ...]:
    return index if isinstance(index, tuple) else (index,)


def _is_integers(entry: Any) -> bool:
    """Whether an entry of an index is an array of integers, which may select an element several times."""
    if isinstance(entry, (list, tuple)):
        entry = np.asarray(entry)
    return hasattr(entry, "dtype") and dtype_of(entry).kind in "iu"


def _is_mask(index: Any) -> bool:
    return hasattr(index, "dtype") and dtype_of(index).kind == "b"


def _of_gather(g: Any, recorded: Call) -> list[Any]:
    index = recorded.saved["index"]
    rest = [None] * (len(recorded.active) - 1)
    entries = _entries(index)
    if len(entries) == 1 and _is_integers(entries[0]):  # Rows of a table: no number of an element is needed.
        at, kind = entries[0], recorded.kinds[0]
        at = at if isinstance(at, ShardedTensor) else call("asarray", np.asarray(at))
        g, n = whole(g, recorded.results[0]), shape_of(kind)[0]
        at = call("where", at < 0, at + n, at)
        return [recorded.add_up(0, "scatter_add", at, g, size=n), *rest]
    return [scattered(g, recorded, lambda places: places[index]), *rest]


def _of_setitem(g: Any, recorded: Call) -> list[Any]:
    index = recorded.saved["index"]
    g = whole(g, recorded.results[0])
    made: list[Any] = [None] * len(recorded.active)
    if recorded.active[0]:
        made[0] = call("setitem", g, 0, index)
    if recorded.active[1] and _is_mask(index) and math.prod(shape_of(recorded.kinds[1])) == 1:
        mask = call("reshape", index, (*shape_of(index), *[1] * (g.ndim - len(shape_of(index)))))
        made[1] = call("reshape", call("sum", call("where", mask, g, 0)), shape_of(recorded.kinds[1]))
    elif recorded.active[1]:
        selected = g[index]
        if any(map(_is_integers, _entries(index))):  # Of values for the same element, the last one was written.
            numbers = call("reshape", call("arange", selected.size), selected.shape)
            places = call("setitem", call("zeros", g.shape, dtype="int64", device=g.sharding), numbers, index)
            selected = call("where", places[index] == numbers, selected, 0)
        made[1] = unbroadcast(selected, recorded, 1, selected.shape)
    return made


def _of_take_along(g: Any, recorded: Call) -> list[Any]:
    indices, axis, kind = recorded.saved["indices"], recorded.params["axis"], recorded.kinds[0]
    if axis is not None and shape_of(indices)[axis] == 1 and len(shape_of(indices)) == len(shape_of(kind)):
        # One element of each line, as in a cross entropy.
        along = normalize_axis(axis, len(shape_of(kind)))
        n = shape_of(kind)[along]
        indices = call("where", indices < 0, indices + n, indices)
        lines = call("reshape", call("arange", n), tuple([n if d == along else 1 for d in range(g.ndim)]))
        over = tuple([n if d == along else size for d, size in enumerate(shape_of(recorded.results[0]))])
        return [unbroadcast(call("where", lines == indices, g, 0), recorded, 0, over), None]
    return [scattered(g, recorded, lambda places: call("take_along_axis", places, indices, axis=axis)), None]


def _of_scatter(g: Any, recorded: Call) -> list[Any]:
    return [None, call("take", whole(g, recorded.results[0]), recorded.saved["at"], axis=0)]


def _of_counts(g: Any, recorded: Call) -> list[Any]:
    """Each weight is added to the count of one integer."""
    weights = whole(g, recorded.results[0])[recorded.saved["x"]]
    return [None, unbroadcast(weights, recorded, 1, shape_of(recorded.kinds[0]))]


rows(
    counts_of_integers=vjp(_of_counts, "x"),
    scatter_add=vjp(_of_scatter, "at"),
    gather=vjp(_of_gather, "index"),
    setitem=vjp(_of_setitem, "index", after_composition=True),
    take_along_axis=vjp(_of_take_along, "indices"),
)
