"""Basic indices (integers, slices, ``...``, None) in canonical form: one entry per dimension, all of them in range."""

from __future__ import annotations

import itertools
import operator as python
from collections.abc import Sequence
from typing import Any

import numpy as np

from shardtensor.errors import ArgumentError, ArgumentTypeError, ConcretizationError, IndexingError, type_text
from shardtensor.host.units import counted
from shardtensor.sharding.copy_plan import Line, Region
from shardtensor.sharding.layout import Shape

Span = tuple[int, int, int]
"""A slice as start, count and step."""

Entry = int | Span | None
"""An integer index, a slice as `Span`, or None (a new dimension)."""


class Index(tuple[Entry, ...]):
    """A basic index in canonical form: an entry for each dimension of the array and for each new dimension."""

    __slots__ = ()


def canonical(index: Any, shape: Shape) -> Index | None:
    """Converts a basic index for an array of that shape to canonical form; returns None if it contains arrays.

    Raises:
        IndexingError: there are too many indices or ellipses, an index is out of bounds, or an entry is not an index.
        ArgumentError, ArgumentTypeError: a slice has step 0, or bounds that are not integers.
    """
    entries = index if isinstance(index, tuple) else (index,)
    out: list[Entry] = []
    d, ellipses = 0, 0
    for entry in entries:
        if entry is None:
            out.append(None)
        elif type(entry) is slice:
            if d < len(shape):
                out.append(span_of(entry, shape[d], d))
            d += 1
        elif entry is Ellipsis:
            ellipses += 1
            rest = len(shape) - sum(1 for e in entries if e is not None and e is not Ellipsis)
            skipped = shape[d : d + max(rest, 0)]
            out += [(0, n, 1) for n in skipped]
            d += len(skipped)
        elif type(entry) is np.ndarray or (type(entry) is not int and is_array(entry)):
            return None
        else:
            if d < len(shape):
                i, size = entry if type(entry) is int else _integer(entry, d), shape[d]
                if not -size <= i < size:
                    if any(map(is_array, entries)):
                        return None  # Next to index arrays, an integer is an index array of one element.
                    raise IndexingError(f"index {i} is out of bounds for axis {d} with size {size}")
                out.append(i % size)
            d += 1
    if d > len(shape):
        raise IndexingError(
            f"{counted(d, 'index', 'indices')} for a tensor of {counted(len(shape), 'dimension')}, shape {shape}"
        )
    if ellipses > 1:
        raise several_ellipses()
    for n in shape[d:]:
        out.append((0, n, 1))
    return Index(out)


def several_ellipses() -> IndexingError:
    """Returns the error for an index with more than one ellipsis."""
    return IndexingError("an index can have one ellipsis ('...') only")


def has_ellipsis(index: Any) -> bool:
    """Whether an index contains an ellipsis; NumPy then never returns a scalar."""
    return any(e is Ellipsis for e in index) if isinstance(index, tuple) else index is Ellipsis


def is_array(entry: Any) -> bool:
    """Whether an index entry is an index array or a mask.

    NumPy's integer scalars, and 0-d tensors that represent scalars, are not; bools, 0-d arrays, and scalars that differ
    between the examples of `vmap` are.
    """
    if isinstance(entry, (list, tuple, range, bool, np.bool_, np.ndarray)):
        return True
    if not hasattr(entry, "ndim") or isinstance(entry, np.generic):
        return False
    if entry.ndim > 0 or entry.dtype.kind == "b" or not getattr(entry, "_is_scalar", False):
        return True
    return getattr(getattr(entry, "_storage", None), "differs", False)


def span_of(entry: slice, size: int, dimension: int) -> Span:
    """Converts a slice of a dimension of that size to canonical form; see `canonical`."""
    try:
        start, stop, step = entry.indices(size)
    except ConcretizationError:
        raise  # It is a TypeError, too, and says what to do.
    except (TypeError, ValueError) as error:
        kind = ArgumentTypeError if isinstance(error, TypeError) else ArgumentError
        raise kind(f"{entry} in dimension {dimension}: {error}") from None
    count = len(range(start, stop, step))
    return (start if count else 0, count, step if count > 1 else 1)


def _integer(entry: Any, dimension: int) -> int:
    try:
        return python.index(entry)
    except ConcretizationError:
        raise
    except TypeError:
        raise IndexingError(
            f"index {entry!r:.60} in dimension {dimension} is {type_text(entry)}; wanted integers, "
            "slices, '...', None, and arrays of integers or bools"
        ) from None


def to_numpy(index: Sequence[Entry]) -> tuple[int | slice | None, ...]:
    """Converts entries in canonical form to an index for NumPy arrays."""
    return tuple([_slice(*entry) if type(entry) is tuple else entry for entry in index])  # type: ignore[misc]


def _slice(start: int, count: int, step: int) -> slice:
    stop = start + count * step
    return slice(start, stop if stop >= 0 else None, step)


def region_of(index: Index) -> Region:
    """Returns the region of the elements that an index selects."""
    numbers = itertools.count()
    entries = [(e, None if e is None else next(numbers)) for e in index]
    spans = [(e or (0, 1, 1), d) for e, d in entries if not isinstance(e, int)]
    lines = tuple([Line(0, count, d, start, step) for (start, count, step), d in spans])
    return Region(0, lines, tuple([(d, e) for e, d in entries if isinstance(e, int) and d is not None]))
