"""The planner of moves: which piece of which source shard goes where in which destination shard. The planner is pure,
and its bytes are the
minimum: a device is sent exactly the elements that it must hold and does not hold yet, each once.

A movement is a set of *regions*. A region is a box of the result whose elements come from one operand, along each
dimension with a start and a step. Along one dimension, cutting the region at the boundaries of the source's and of
the result's parts gives its intervals; pieces are the products of the intervals of all dimensions. Everything is
computed by whole arrays, so that planning the million pieces of a reshard between 1024 devices takes a fraction of a
second.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from shardtensor.backend.device import HOST, Device
from shardtensor.sharding.layout import Grid, Ints, NamedSharding, Shape

Index = tuple[slice, ...]


@dataclass(frozen=True, slots=True)
class Line:
    """Where the elements of a region come from along one dimension of the result.

    Attributes:
        begin, end: the region in the result's indices.
        source: the dimension of the operand that is walked, or None (a new dimension, along which it is repeated).
        start, step: result index ``begin + i`` is operand index ``start + i * step``.
    """

    begin: int
    end: int
    source: int | None
    start: int = 0
    step: int = 1


@dataclass(frozen=True, slots=True)
class Region:
    """A box of the result that comes from one operand.

    Attributes:
        operand: its number.
        lines: one for each dimension of the result.
        fixed: the index in each operand dimension that no line walks: (dimension, index) pairs.
    """

    operand: int
    lines: tuple[Line, ...]
    fixed: tuple[tuple[int, int], ...] = ()


def identity(shape: Shape, operand: int = 0, at: Sequence[int] | None = None) -> Region:
    """The region that copies an operand of that shape to position ``at`` (the origin) of the result."""
    at = at or (0,) * len(shape)
    return Region(operand, tuple(Line(a, a + n, d) for d, (a, n) in enumerate(zip(at, shape, strict=True))))


@dataclass(frozen=True, slots=True)
class Piece:
    """A copy: ``destination[k][to] = source[j][index]``, in indices of the two shards.

    Attributes:
        region: the number of the region that it belongs to.
        j, k: the position of the source device in the operand's mesh, and of the destination device in the result's.
        index, to: of the source shard (an integer drops that dimension, None adds one) and of the destination shard.
        local: whether it stays on its device.
    """

    region: int
    j: int
    k: int
    index: tuple[slice | int | None, ...]
    to: Index
    local: bool


class RegionCopies:
    """The plan of one region: the table of its pieces.

    Attributes:
        source, destination: position of each piece's source and destination device.
        sizes: elements of each piece.
        local: whether the piece stays on its device.

    Args:
        region: the region.
        number: its number.
        source, result: how the operand and the result are cut.
        part: from which product of intervals to which; all of them without it (see `pieces_in`).
    """

    __slots__ = ("_fixed", "_lines", "_rows", "_tables", "destination", "local", "region", "size", "sizes", "source")

    def __init__(
        self, region: Region, number: int, source: Grid, result: Grid, part: tuple[int, int] | None = None
    ) -> None:
        self.region = number
        self._lines = region.lines
        self._tables = [_intervals(line, source, result.offsets[d]) for d, line in enumerate(region.lines)]
        parts = {d: int(np.searchsorted(source.offsets[d], i, "right")) - 1 for d, i in region.fixed}
        self._fixed = {d: i - int(source.offsets[d][parts[d]]) for d, i in region.fixed}
        counts = [len(t.begin) for t in self._tables]
        first, last = part or (0, int(np.prod(counts, dtype=np.int64)))
        pieces = last - first
        rows = np.unravel_index(np.arange(first, last), counts) if counts else ()
        to, fro = np.zeros(pieces, np.int64), np.zeros(pieces, np.int64)
        sizes = np.ones(pieces, np.int64)
        numbers: dict[int, Any] = dict(parts)
        for d, (line, table) in enumerate(zip(region.lines, self._tables, strict=True)):
            to = to * (len(result.offsets[d]) - 1) + table.to_part[rows[d]]
            if line.source is not None:  # along a new dimension the same elements are repeated where they arrive
                sizes *= (table.end - table.begin)[rows[d]]
                numbers[line.source] = table.from_part[rows[d]]
        for d, count in enumerate(source.counts):
            fro = fro * count + numbers[d]
        receivers = _holders(result)[to]  # pieces × replicas: every holder of the part wants the piece
        givers = _holders(source)[fro]
        home = _positions(source.devices, result.devices)[
            receivers
        ]  # the receiver's own position in the source's mesh, or -1
        mine = np.where(home >= 0, source.linear_parts()[home], -1) == fro[:, None]
        # Replicas share the work of sending: the r-th receiver is served by the r-th giver, in turn.
        turn = givers[:, np.arange(receivers.shape[1]) % givers.shape[1]]
        self.local = mine.ravel()
        self.source = np.where(mine, home, turn).ravel()
        self.destination = receivers.ravel()
        self._rows = [np.repeat(r, receivers.shape[1]) for r in rows]
        self.sizes = np.repeat(sizes, receivers.shape[1])
        self.size = int(self.sizes[~self.local].sum())

    def __len__(self) -> int:
        return len(self.source)

    def __iter__(self) -> Iterator[Piece]:
        ndim = len(self._fixed) + sum(line.source is not None for line in self._lines)
        lines, tables, fixed = self._lines, self._tables, self._fixed
        for i, (j, k, local) in enumerate(
            zip(self.source.tolist(), self.destination.tolist(), self.local.tolist(), strict=True)
        ):
            index: list[slice | int | None] = [slice(None)] * ndim
            for d, at in fixed.items():
                index[d] = at
            to = []
            for line, table, row in zip(lines, tables, self._rows, strict=True):
                n = row[i]
                to.append(slice(int(table.begin[n]), int(table.end[n])))
                if line.source is not None:
                    index[line.source] = table.slices[n]
            yield Piece(self.region, j, k, _with_new(index, lines), tuple(to), local)

    def messages(self) -> tuple[Ints, Ints, Ints]:
        """What leaves its device, one message for each pair of devices: the positions of sources and of destinations,
        and the elements.
        """
        away = ~self.local & (self.sizes > 0)
        receivers = int(self.destination.max(initial=0)) + 1
        pairs, inverse = np.unique(self.source[away] * receivers + self.destination[away], return_inverse=True)
        totals = np.zeros(len(pairs), np.int64)
        np.add.at(totals, inverse, self.sizes[away])
        return pairs // receivers, pairs % receivers, totals


def _with_new(index: list[slice | int | None], lines: Sequence[Line]) -> tuple[slice | int | None, ...]:
    """The operand's index with None where the result has a new dimension. Lines walk the operand in its own order."""
    out: list[slice | int | None] = []
    next_dimension = 0
    for line in lines:
        if line.source is None:
            out.append(None)
            continue
        out.extend(index[next_dimension : line.source + 1])
        next_dimension = line.source + 1
    return (*out, *index[next_dimension:])


def pieces_in(region: Region, source: Grid, result: Grid) -> tuple[int, int]:
    """How many products of intervals a region has, and how many devices want each."""
    counts = [len(_intervals(line, source, result.offsets[d]).begin) for d, line in enumerate(region.lines)]
    parts = int(np.prod(result.counts, dtype=np.int64))
    return int(np.prod(counts, dtype=np.int64)), len(result.devices) // parts


@dataclass(frozen=True, slots=True)
class _Intervals:
    """The intervals of one line: the parts at both ends, and the indices within them."""

    to_part: Ints
    from_part: Ints
    begin: Ints
    end: Ints
    slices: list[slice]


def _intervals(line: Line, source: Grid, bounds: Ints) -> _Intervals:
    count = line.end - line.begin
    cuts = [np.clip(bounds - line.begin, 0, count)]
    if line.source is not None:
        fro = source.offsets[line.source]
        # How many steps are made before the walk enters (upwards) or leaves (downwards) each part.
        ahead = line.start - fro
        crossing = -(ahead // line.step) if line.step > 0 else ahead // -line.step + 1
        cuts.append(np.clip(crossing, 0, count))
    edges = np.unique(np.concatenate([*cuts, [0, count]]))
    first, last = edges[:-1], edges[1:]
    to_part = np.searchsorted(bounds, first + line.begin, "right") - 1
    origin = bounds[to_part] if len(first) else first
    begin, end = first + line.begin - origin, last + line.begin - origin
    if line.source is None:
        return _Intervals(to_part, np.zeros_like(to_part), begin, end, [])
    head = line.start + line.step * first
    from_part = np.searchsorted(fro, head, "right") - 1
    at = head - fro[from_part] if len(first) else head
    slices = [
        slice(a, stop if (stop := a + line.step * n) >= 0 else None, line.step)
        for a, n in zip(at.tolist(), (last - first).tolist(), strict=True)
    ]
    return _Intervals(to_part, from_part, begin, end, slices)


def _holders(grid: Grid) -> Ints:
    """The positions of the holders of each part: shape (parts, replicas)."""
    numbers = grid.linear_parts()
    parts = int(np.prod(grid.counts, dtype=np.int64))
    return np.argsort(numbers, kind="stable").reshape(parts, -1)


@lru_cache(256)
def _positions(source: tuple[Device, ...], result: tuple[Device, ...]) -> Ints:
    """For each device of the result its position among the source's, or -1."""
    if source == result:
        return np.arange(len(source))
    where = {device: j for j, device in enumerate(source)}
    return np.array([where.get(device, -1) for device in result], np.int64)


@lru_cache(1024)
def plan_reshard(source: NamedSharding, destination: NamedSharding, shape: Shape) -> RegionCopies:
    """The copies that bring an array of that shape from one sharding to another.

    >>> mesh = st.make_mesh((4,), ("x",))
    >>> rows, columns = st.NamedSharding(mesh, st.P("x")), st.NamedSharding(mesh, st.P(None, "x"))
    >>> from shardtensor.sharding.copy_plan import plan_reshard
    >>> plan_reshard(rows, columns, (8, 8)).size  # each device keeps a quarter of its quarter
    48
    """
    return RegionCopies(identity(shape), 0, source.grid(shape), destination.grid(shape))


@lru_cache(1024)
def host_grid(shape: Shape) -> Grid:
    """An array of that shape, whole, in host memory."""
    bounds = tuple(np.array([0, n], np.int64) for n in shape)
    return Grid((HOST,), bounds, np.zeros((1, len(shape)), np.int64))
