"""The derivatives of views and of index arrays."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from shardtensor.core import OPS, bind_into, call
from shardtensor.functions.building.scatter import scatter_add
from shardtensor.functions.derivatives.cotangents import Call, Into, unbroadcast, whole, zeros_of
from shardtensor.functions.derivatives.forms import linear, rows
from shardtensor.sharding.index import Index
from shardtensor.sharding.layout import Shape
from shardtensor.sharding.rules import normalize_axis
from shardtensor.sharding.view_spec import ViewSpec, whole_view_spec
from shardtensor.tensor.operands import dtype_of, shape_of
from shardtensor.tensor.tensor import ShardedTensor, mark_array
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
    entries = _entries(index)
    which = [d for d, entry in enumerate(entries) if not (type(entry) is slice and entry == slice(None))]
    if len(which) == 1 and _is_integers(entries[which[0]]):  # Rows of a table: no number of an element is needed.
        cotangent = _of_rows(whole(g, recorded.results[0]), recorded, entries[which[0]], which[0])
    else:
        cotangent = scattered(g, recorded, lambda places: places[index])
    return [cotangent, *[None] * (len(recorded.active) - 1)]


def _of_rows(g: Any, recorded: Call, at: Any, axis: int) -> Any:
    """Returns the cotangent of the operand of which an array of integers selects elements along one dimension."""
    n = shape_of(recorded.kinds[0])[axis]
    at = call("astype", at if isinstance(at, ShardedTensor) else call("asarray", np.asarray(at)), "int64", copy=False)
    at = call("where", at < 0, at + n, at)
    if not axis:
        return recorded.add_up(0, "scatter_add", at, g, size=n)
    rows = tuple(range(axis, axis + at.ndim))
    g = call("permute_dims", g, (*rows, *[d for d in range(g.ndim) if d not in rows]))
    return call("moveaxis", recorded.add_up(-1, "scatter_add", at, g, size=n), 0, axis)


def _of_setitem(g: Any, recorded: Call) -> list[Any]:
    """Returns the cotangents of x and of the value of ``x[index] = value``. That of x is the one of the result, into
    which zeros are written: in place if nothing else holds it.
    """
    index = recorded.saved["index"]
    cotangents: list[Any] = [None] * len(recorded.active)
    g = whole(g, recorded.results[0])
    if recorded.active[1]:
        cotangents[1] = _of_assigned(g, recorded, index)
    if recorded.active[0]:
        g = mark_array(call("copy", g))
        bind_into(g, OPS["setitem"], (g, 0, index), ())
        cotangents[0] = g
    return cotangents


def _of_assigned(g: Any, recorded: Call, index: Any) -> Any:
    """Returns the cotangent of the value that was written."""
    if _is_mask(index) and math.prod(shape_of(recorded.kinds[1])) == 1:
        mask = call("reshape", index, (*shape_of(index), *[1] * (g.ndim - len(shape_of(index)))))
        return call("reshape", call("sum", call("where", mask, g, 0)), shape_of(recorded.kinds[1]))
    selected = g[index]
    if any(map(_is_integers, _entries(index))):
        selected = call("where", _is_last(g, selected, index), selected, 0)
    return unbroadcast(selected, recorded, 1, selected.shape)


def _is_last(g: Any, selected: Any, index: Any) -> Any:
    """Returns for the selected elements whether they are the last ones of their places, whose values were written."""
    entries = _entries(index)
    axis = next(d for d, entry in enumerate(entries) if _is_integers(entry))
    if all(type(entry) is slice for d, entry in enumerate(entries) if d != axis):  # Only their rows are compared.
        at, n = entries[axis], g.shape[axis]
        last = (
            _is_last_of(at, n) if isinstance(at, ShardedTensor) else _is_last_on_host(np.asarray(at).astype("int64"), n)
        )
        return call("reshape", last, (*shape_of(at), *[1] * (g.ndim - axis - 1)))
    numbers = call("reshape", call("arange", selected.size), selected.shape)
    return call("setitem", call("zeros", g.shape, dtype="int64", device=g.sharding), numbers, index)[index] == numbers


def _is_last_of(at: Any, n: int) -> Any:
    numbers = call("reshape", call("arange", at.size), at.shape)
    return call("setitem", call("zeros", n, dtype="int64"), numbers, at)[at] == numbers


def _is_last_on_host(at: Any, n: int) -> Any:
    """Returns which of some indices are the last ones of their number, in time that does not depend on n."""
    mask = np.zeros(at.size, np.bool_)
    mask[at.size - 1 - np.unique(at.reshape(-1)[::-1] % n, return_index=True)[1]] = True
    return mask.reshape(at.shape)


def of_elements_along(g: Any, indices: Any, axis: int, shape: Shape) -> Any:
    """Returns the cotangent of an array of the given shape, of which the elements at ``indices`` along an axis were
    taken, which have the other dimensions of the array and the cotangent ``g``.
    """
    axis, n = axis % len(shape), shape[axis]
    indices = call("where", indices < 0, indices + n, indices)
    if indices.shape[axis] == 1:  # One element of each line, as in a cross entropy.
        lines = call("reshape", call("arange", n), tuple([n if d == axis else 1 for d in range(len(shape))]))
        return call("where", lines == indices, g, 0)
    # Lines of which the results are the rows of one array, in which each line has a part of its own.
    to = call("moveaxis", indices, axis, -1)
    first = n * call("reshape", call("arange", math.prod(to.shape[:-1])), (*to.shape[:-1], 1))
    rows_of = call("reshape", call("moveaxis", g, axis, -1), (-1,))
    flat = scatter_add(call("reshape", to + first, (-1,)), rows_of, size=math.prod(shape))
    others = [size for d, size in enumerate(shape) if d != axis]
    return call("moveaxis", call("reshape", flat, (*others, n)), -1, axis)


def _of_take_along(g: Any, recorded: Call) -> list[Any]:
    indices, axis, kind = recorded.saved["indices"], recorded.params["axis"], recorded.kinds[0]
    shape = shape_of(kind)
    if axis is not None and shape_of(indices)[axis] == 1 and len(shape_of(indices)) == len(shape):
        along = normalize_axis(axis, len(shape))
        over = tuple([shape[d] if d == along else n for d, n in enumerate(shape_of(recorded.results[0]))])
        return [unbroadcast(of_elements_along(g, indices, along, over), recorded, 0, over), None]
    return [scattered(g, recorded, lambda places: call("take_along_axis", places, indices, axis=axis)), None]


def _of_taken_rows(g: Any, recorded: Call) -> list[Any]:
    g = whole(g, recorded.results[0])
    return [_of_rows(g, recorded, recorded.saved["indices"], recorded.params["axis"]), None]


def _of_scatter(g: Any, recorded: Call) -> list[Any]:
    return [None, call("rows_at", whole(g, recorded.results[0]), recorded.saved["at"])]


def _of_scatter_each(g: Any, recorded: Call) -> list[Any]:
    return [None, call("rows_at", whole(g, recorded.results[0]), recorded.saved["at"], lines=1)]


def _of_rows_at(g: Any, recorded: Call) -> list[Any]:
    at, lines, shape = recorded.saved["at"], recorded.params["lines"], shape_of(recorded.kinds[0])
    n, g = shape[lines], whole(g, recorded.results[0])
    at = call("where", at < 0, at + n, at)
    if not lines:
        return [recorded.add_up(0, "scatter_add", at, g, size=n), None]
    at, g = [call("reshape", x, (math.prod(shape[:lines]), *x.shape[lines:])) for x in (at, g)]
    return [call("reshape", call("scatter_add_each", at, g, size=n), shape), None]


def _of_counts(g: Any, recorded: Call) -> list[Any]:
    """Each weight is added to the count of one integer."""
    weights = whole(g, recorded.results[0])[recorded.saved["x"]]
    return [None, unbroadcast(weights, recorded, 1, shape_of(recorded.kinds[0]))]


rows(
    counts_of_integers=linear(_of_counts, "x"),
    scatter_add=linear(_of_scatter, "at"),
    scatter_add_each=linear(_of_scatter_each, "at"),
    gather=linear(_of_gather, "index"),
    setitem=linear(_of_setitem, "index", after_composition=True),
    take_along_axis=linear(_of_take_along, "indices"),
    take_rows=linear(_of_taken_rows, "indices"),
    rows_at=linear(_of_rows_at, "at"),
)
