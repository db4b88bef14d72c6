"""The batching rules of indices that contain arrays.

NumPy puts the dimensions of index arrays where the arrays are, or in front if slices separate these. The examples are
one more dimension, in front: a slice where the index is the same for all examples, else one more index array.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from shardtensor.core import call
from shardtensor.errors import ArgumentError
from shardtensor.functions.batching.batching_forms import Call, rows
from shardtensor.tensor.operands import dtype_of, shape_of
from shardtensor.tensor.pytree import leaves
from shardtensor.tensor.tensor import mark_array


class _Place:
    """Where the dimensions of the index arrays of one example are.

    Attributes:
        entries: the entries of the index.
        first: the number of dimensions of the result in front of those of the arrays.
        is_apart: whether slices separate the arrays.
        ndim: the number of dimensions of the arrays, broadcast.
        result_ndim: that of the selected elements of one example.
        is_batched: whether an array differs from one example to another.
        has_batched_mask: whether a mask does.
        is_one_mask: whether the index is one mask.
        mask_at: the dimension of the first element of a mask, the only array beside whole slices; else None.
        one_array: the number of the only array, if it differs and others are slices; else None.
    """

    def __init__(self, recorded: Call) -> None:
        index, batched = recorded.operands[-1], iter(recorded.batched[len(recorded.batched) - _count(recorded) :])
        entries = list(index) if isinstance(index, tuple) else [index]
        is_batched = [sum([next(batched) for _ in leaves(entry)]) > 0 for entry in entries]
        kinds = [_kind(entry) for entry in entries]
        self.has_batched_mask = any(b and k == "mask" for b, k in zip(is_batched, kinds, strict=True))
        self.is_one_mask = kinds == ["mask"]
        self.is_batched = any(is_batched)
        self.entries, self._is_batched = entries, is_batched
        every = list(zip(entries, kinds, is_batched, strict=True))
        taken = [_dimensions(e, k, b) for e, k, b in every]
        rest = recorded.ndim(0) - sum(taken)  # The dimensions of an ellipsis, or behind all entries.
        ndims = [_advanced(e, k, b) for e, k, b in every]
        self.ndim = max([n for n in ndims if n is not None], default=0)
        arrays = [k for k, n in enumerate(ndims) if n is not None]
        self.is_apart = bool(arrays) and arrays != list(
            range(arrays[0], arrays[-1] + 1)
        )  # Also by an ellipsis without dimensions.
        self.first = 0
        if arrays and not self.is_apart:
            self.first = sum([rest if e is Ellipsis else 1 for e in entries[: arrays[0]]])
        slices = sum([n is None and e is not Ellipsis for e, n in zip(entries, ndims, strict=True)])
        is_one = self.is_batched and len(arrays) == 1 and "new" not in kinds and not self.has_batched_mask
        self.one_array = arrays[0] if is_one else None
        whole = [e is Ellipsis or (isinstance(e, slice) and e == slice(None)) for e in entries]
        is_one_mask = kinds.count("mask") == 1 and sum(whole) == len(entries) - 1
        before = entries[: kinds.index("mask")] if is_one_mask else []
        self.mask_at = sum([rest if e is Ellipsis else 1 for e in before]) if is_one_mask else None
        self.result_ndim = slices + rest + self.ndim

    def aligned(self) -> list[Any]:
        """Returns the entries, of which the arrays that differ between examples have their dimensions aligned."""
        entries = []
        for entry, is_batched in zip(self.entries, self._is_batched, strict=True):
            if is_batched:
                shape = shape_of(entry)
                entry = call("reshape", entry, (shape[0], *[1] * (self.ndim + 1 - len(shape)), *shape[1:]))
            entries.append(entry)
        return entries


def _count(recorded: Call) -> int:
    return len(leaves(recorded.operands[-1]))


def _kind(entry: Any) -> str:
    if entry is None:
        return "new"
    if isinstance(entry, slice) or entry is Ellipsis:
        return "slice"
    dtype = dtype_of(entry) if hasattr(entry, "dtype") else np.asarray(entry).dtype
    return "mask" if dtype.kind == "b" else "integers"


def _dimensions(entry: Any, kind: str, is_batched: bool) -> int:
    """Returns how many dimensions of the operand an entry indexes."""
    if kind == "mask":
        return len(shape_of(entry)) - is_batched
    return 0 if kind == "new" or entry is Ellipsis else 1


def _advanced(entry: Any, kind: str, is_batched: bool) -> int | None:
    """Returns the number of dimensions of an index array; None for an entry that is none."""
    if kind == "mask":
        return 1
    return len(np.shape(entry)) - is_batched if kind == "integers" else None


def _gathered(recorded: Call) -> Any:
    """The rule of ``x[index]``: the examples stay where they are, unless the index differs from one to another."""
    place, x = _Place(recorded), recorded.operands[0]
    if place.has_batched_mask:
        raise ArgumentError(
            "getitem: the mask differs from one example to another, and so does the number of selected elements; "
            "st.where(mask, x, 0) keeps the shape"
        )
    if not place.is_batched:
        result = x[(slice(None), *place.entries)]
        return call("moveaxis", result, place.ndim, 0) if place.is_apart else result
    if place.one_array is not None:
        return _along_one(recorded, place)
    if not recorded.batched[0]:
        result = x[tuple(place.aligned())]
        return recorded.kept(call("moveaxis", result, place.first, 0) if place.first else result)
    result = x[(_examples(recorded, place), *place.aligned())]
    return _moved(result, 1, 1 + place.first, place.ndim) if place.first else result


def _along_one(recorded: Call, place: _Place) -> Any:
    """Selects along one dimension: the examples need not be numbered."""
    is_batched, k = recorded.batched[0], place.one_array
    assert k is not None
    slices = [slice(None) if n == k else entry for n, entry in enumerate(place.entries)]
    x = recorded.operands[0][(*[slice(None)] * is_batched, *slices)]
    if place.first:
        x = call("moveaxis", x, place.first + is_batched, int(is_batched))
    result = call("rows_at", x, place.entries[k], lines=int(is_batched))
    return _moved(result, 1 + place.ndim, 1, place.first)


def _examples(recorded: Call, place: _Place) -> Any:
    return call("reshape", recorded.numbers(), (recorded.size, *[1] * place.ndim))


def _moved(x: Any, first: int, to: int, count: int) -> Any:
    """Returns x with ``count`` dimensions moved, from ``first`` on, to ``to`` on."""
    if not count:
        return x
    return call("moveaxis", x, tuple(range(first, first + count)), tuple(range(to, to + count)))


def _assigned(recorded: Call) -> Any:
    """The rule of the functional form of ``x[index] = value``."""
    place = _Place(recorded)
    x, value = recorded.whole(0), recorded.leaves[1]
    if place.has_batched_mask or (place.is_one_mask and math.prod(recorded.shape(1)) == 1):
        return _masked(recorded, place)
    result = mark_array(call("copy", x))
    moved = value
    if recorded.batched[1]:
        moved = recorded.wide(1, place.result_ndim)
    if place.is_batched:
        index: tuple[Any, ...] = (_examples(recorded, place), *place.aligned())
        if recorded.batched[1] and place.first:
            moved = _moved(moved, 1 + place.first, 1, place.ndim)
        elif place.first:
            moved = _moved(_wide(moved, place), place.first, 0, place.ndim)
    else:
        index = (slice(None), *place.entries)
        if recorded.batched[1] and place.is_apart:
            moved = call("moveaxis", moved, 0, place.ndim)
        elif place.is_apart and len(shape_of(moved)) >= place.ndim:
            moved = call("expand_dims", _wide(moved, place), axis=place.ndim)
    result[index] = moved
    return result


def _wide(value: Any, place: _Place) -> Any:
    """Returns a value that is the same for all examples with as many dimensions as the elements that it replaces."""
    shape = shape_of(value)
    return call("reshape", value, (*[1] * (place.result_ndim - len(shape)), *shape))


def _masked(recorded: Call, place: _Place) -> Any:
    """Writes one number where masks are true that differ from one example to another."""
    at = place.mask_at
    if at is None:
        raise ArgumentError("setitem: a mask that differs from one example to another, and other entries; use st.where")
    if recorded.ndim(1) and recorded.shape(1) != (1,):
        raise ArgumentError(
            "setitem: the mask differs from one example to another, and so does the number of selected elements; "
            "wanted one number, or st.where(mask, value, x)"
        )
    mask, x, value = next(e for e in place.entries if _kind(e) == "mask"), recorded.whole(0), recorded.leaves[1]
    shape = shape_of(mask)[1:] if place.has_batched_mask else shape_of(mask)
    behind = recorded.ndim(0) - at - len(shape)
    examples = (recorded.size,) if place.has_batched_mask else ()
    mask = call("reshape", mask, (*examples, *[1] * at, *shape, *[1] * behind))
    if recorded.batched[1]:
        value = call("reshape", value, (recorded.size, *[1] * recorded.ndim(0)))
    return call("where", mask, call("astype", call("asarray", value), x.dtype), x)


def _rows(recorded: Call) -> Any:
    """The rule of elements along one dimension, of which the other operand has the numbers."""
    axis, (x, indices) = recorded.params["axis"], recorded.operands
    if not recorded.batched[1]:
        return recorded.again(x, indices, axis=axis + 1)
    if not recorded.batched[0]:
        result = recorded.again(x, indices)
        return call("moveaxis", result, axis, 0) if axis else result
    result = call("rows_at", call("moveaxis", x, axis + 1, 1) if axis else x, indices, lines=1)
    return _moved(result, 1, 1 + axis, recorded.ndim(1)) if axis else result


rows(gather=_gathered, setitem=_assigned, take_rows=_rows)
