"""Indexing: reading by integers, slices (any step), ellipsis and newaxis, which move elements and never compute."""

from __future__ import annotations

import operator as python
from collections.abc import Sequence
from typing import Any

import numpy as np

from shardtensor.core import implements, operator
from shardtensor.errors import IndexingError
from shardtensor.functions.manipulation import layout_of
from shardtensor.mesh import Mesh
from shardtensor.monoids import Place
from shardtensor.operands import HostAval
from shardtensor.planner import Line, Region
from shardtensor.sharding import P, Shape
from shardtensor.tensor import ArrayLike, ShardedTensor
from shardtensor.transfer import Moved
from shardtensor.value import Aval

Entry = int | tuple[int, int, int] | None
"""An index, start and count and step of a slice, or None (a new dimension)."""


class Index(tuple[Entry, ...]):
    """An index in canonical form, which can be hashed: an entry for each dimension that is taken or made."""

    __slots__ = ()


def canonical(index: Any, shape: Shape) -> Index:
    """An index as the planner wants it: with nothing left out, and everything in range.

    Raises:
        IndexingError: too many indices, one out of bounds, or one that is no integer, slice, ellipsis or None.
    """
    entries = index if type(index) is tuple else (index,)
    taken = sum(1 for e in entries if e is not None and e is not Ellipsis)
    if taken > len(shape):
        raise IndexingError(f"getitem: {taken} indices for a tensor of {len(shape)} dimensions, shape {shape}")
    if sum(1 for e in entries if e is Ellipsis) > 1:
        raise IndexingError("getitem: an index can have one ellipsis ('...') only")
    out: list[int | tuple[int, int, int] | None] = []
    d = 0
    for entry in entries:
        if entry is None:
            out.append(None)
        elif entry is Ellipsis:
            for _ in range(len(shape) - taken):
                out.append((0, shape[d], 1))
                d += 1
        else:
            out.append(_entry(entry, shape[d], d))
            d += 1
    out.extend((0, n, 1) for n in shape[d:])
    return Index(out)


def _entry(entry: Any, size: int, dimension: int) -> int | tuple[int, int, int]:
    if isinstance(entry, slice):
        try:
            run = range(*entry.indices(size))
        except (TypeError, ValueError) as error:
            raise IndexingError(f"getitem: {entry} in dimension {dimension}: {error}") from None
        return (run.start if len(run) else 0, len(run), run.step)
    if isinstance(entry, (bool, np.bool_)) or not hasattr(entry, "__index__") or np.ndim(entry):
        raise IndexingError(
            f"getitem: index {entry!r:.60} in dimension {dimension} is a {type(entry).__name__}; "
            "wanted integers, slices, '...' and None"
        )
    i = python.index(entry)
    if not -size <= i < size:
        raise IndexingError(f"getitem: index {i} is out of bounds for dimension {dimension} of size {size}")
    return i % size


def region_of(index: Index) -> Region:
    """Where the elements that an index selects come from."""
    lines, fixed, d = [], [], 0
    for entry in index:
        if entry is None:
            lines.append(Line(0, 1, None))
            continue
        if isinstance(entry, int):
            fixed.append((d, entry))
        else:
            start, count, step = entry
            lines.append(Line(0, count, d, start, step))
        d += 1
    return Region(0, tuple(lines), tuple(fixed))


def to_numpy(index: Index) -> tuple[int | slice | None, ...]:
    """The index in NumPy's own form."""
    out: list[int | slice | None] = []
    for entry in index:
        if isinstance(entry, tuple):
            start, count, step = entry
            stop = start + count * step
            out.append(slice(start, stop if stop >= 0 else None, step))
        else:
            out.append(entry)
    return tuple(out)


@operator()
def getitem(x: ArrayLike, index: Any, /) -> ShardedTensor:
    """``x[index]``: integers, slices of any step, ``...`` and None.

    A dimension that is sliced keeps its split, by the split rule for its new size, so that only elements at the
    boundaries move; one that is indexed by an integer is gone, and the result is replicated along the mesh axes that
    split it.

    Raises:
        IndexingError: an index is out of bounds, or of another kind.

    >>> x = st.arange(8, device=st.make_mesh((4,), ("x",)))
    >>> x[::-2].tolist(), x[3].item(), x[None, 2:].shape
    ([7, 5, 3, 1], 3, (1, 6))
    """


@implements(getitem, "composite")
def _canonical_getitem(x: Any, index: Any) -> Any:
    return NotImplemented if type(index) is Index else getitem(x, canonical(index, np.shape(x)))


@implements(getitem, "kernel")
def _getitem_on_device(xp: Any, place: Place, x: Any, *, index: Index) -> Any:
    return x[to_numpy(index)]


@implements(getitem, "mover")
def _getitem(operands: Sequence[Aval | HostAval], mesh: Mesh, *, index: Index) -> Moved:
    (x,) = operands
    sharding = layout_of(x, mesh)
    region = region_of(index)
    chains = sharding.spec.chains_of(x.ndim)
    spec = P(*[None if line.source is None else chains[line.source] for line in region.lines])
    shape = tuple(line.end for line in region.lines)
    return Moved(shape, sharding.with_spec(spec), (region,), python.itemgetter(to_numpy(index)))
