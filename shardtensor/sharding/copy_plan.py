"""Copy plans: which piece of which source shard is copied to which position of which destination shard.

Planning is pure arithmetic, and the bytes sent are minimal: a device receives exactly the elements that it must hold
and does not hold yet, each of them once.

A transfer consists of *regions*. A region is a box of the result whose elements come from one operand, with a start and
a step along each dimension. Along one dimension, the boundaries of the source's and the result's parts cut the region
into intervals; pieces are the products of the intervals of all dimensions. The computation is vectorized with NumPy, so
that planning the million pieces of a reshard between 1024 devices takes a fraction of a second.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from shardtensor.backend.device import HOST, Device
from shardtensor.sharding.layout import Grid, Ints, NamedSharding, Shape

Index = tuple[slice, ...]


class Line(NamedTuple):
    """The source of a region's elements along one dimension of the result.

    Attributes:
        begin, end: the region in the result's indices.
        source: the corresponding dimension of the operand, or None (a new dimension, along which elements repeat).
        start, step: result index ``begin + i`` is operand index ``start + i * step``.
    """

    begin: int
    end: int
    source: int | None
    start: int = 0
    step: int = 1


class Region(NamedTuple):
    """A box of the result whose elements come from one operand.

    Attributes:
        operand: the number of the operand.
        lines: one for each dimension of the result.
        fixed: (dimension, index) pairs: the index in each operand dimension that no line refers to.
    """

    operand: int
    lines: tuple[Line, ...]
    fixed: tuple[tuple[int, int], ...] = ()


def identity(shape: Shape, operand: int = 0, at: Sequence[int] | None = None) -> Region:
    """Returns the region that copies an operand of that shape to position ``at`` of the result (default: origin)."""
    at = at or (0,) * len(shape)
    return Region(operand, tuple(Line(a, a + n, d) for d, (a, n) in enumerate(zip(at, shape, strict=True))))


@dataclass(frozen=True, slots=True)
class Piece:
    """One copy between two shards: ``destination[k][to] = source[j][index]``, with indices local to the shards.

    Attributes:
        region: the number of the region that the piece belongs to.
        j, k: positions of the source device in the operand's mesh and of the destination device in the result's mesh.
        index, to: the index into the source shard (an integer drops a dimension, None adds one) and the index into the
            destination shard.
        local: whether source and destination are the same device.
    """

    region: int
    j: int
    k: int
    index: tuple[slice | int | None, ...]
    to: Index
    local: bool


class RegionCopies:
    """The copy plan of one region: the table of its pieces. Iterating over it yields each `Piece`.

    Attributes:
        region: the number of the region.
        source, destination: the positions of each piece's source and destination device.
        sizes: the number of elements of each piece.
        size: the number of elements that are sent between devices.
        local: whether source and destination of each piece are the same device.

    Args:
        region: the region.
        number: its number.
        source, result: the shards of the operand and of the result.
        part: (first, last) numbers of a range of products of intervals; without it, all of them (see `pieces_in`).
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
        first, last = part or (0, math.prod(counts))
        pieces = last - first
        rows = np.unravel_index(np.arange(first, last), counts) if counts else ()
        (receiver_part, sender_part), sizes = np.zeros((2, pieces), np.int64), np.ones(pieces, np.int64)
        numbers: dict[int, Any] = dict(parts)
        for d, (line, table) in enumerate(zip(region.lines, self._tables, strict=True)):
            receiver_part = receiver_part * result.counts[d] + table.to_part[rows[d]]
            if line.source is not None:  # Elements are sent once; a new dimension repeats them at the destination.
                sizes *= (table.end - table.begin)[rows[d]]
                numbers[line.source] = table.from_part[rows[d]]
        for d, count in enumerate(source.counts):
            sender_part = sender_part * count + numbers[d]
        # Every holder of the part receives the piece: shape (pieces, replicas).
        receivers, (senders, replicas) = _holders(result)[0][receiver_part], _holders(source)
        # The receivers' positions in the source's mesh, or -1.
        own = _positions(source.devices, result.devices)[receivers]
        mine = np.where(own >= 0, source.linear_parts()[own], -1) == sender_part[:, None]
        # The r-th receiver receives from the r-th source replica, cyclically, so that replicas share the sending.
        turns = np.arange(receivers.shape[1]) % replicas[sender_part][:, None]
        turn = np.take_along_axis(senders[sender_part], turns, axis=1)
        if len(_processes(source.devices) | _processes(result.devices)) > 1:
            turn = _turns_of_processes(senders, sender_part, receivers, source, result)
        held = (receivers >= 0).ravel()
        self.local = mine.ravel()[held]
        self.source = np.where(mine, own, turn).ravel()[held]
        self.destination = receivers.ravel()[held]
        self._rows = [np.repeat(r, receivers.shape[1])[held] for r in rows]
        self.sizes = np.repeat(sizes, receivers.shape[1])[held]
        self.size = int(self.sizes[~self.local].sum())

    def __len__(self) -> int:
        return len(self.source)

    def __iter__(self) -> Iterator[Piece]:
        ndim = len(self._fixed) + sum(line.source is not None for line in self._lines)
        lines, tables, fixed = self._lines, self._tables, self._fixed
        ends = zip(self.source.tolist(), self.destination.tolist(), self.local.tolist(), strict=True)
        for i, (j, k, local) in enumerate(ends):
            index: list[slice | int | None] = [slice(None)] * ndim
            for d, at in fixed.items():
                index[d] = at
            to = []
            for line, table, row in zip(lines, tables, self._rows, strict=True):
                n = row[i]
                to.append(slice(int(table.begin[n]), int(table.end[n])))
                if line.source is not None:
                    index[line.source] = table.slices[n]
            new = with_new_dimensions(index, [line.source for line in lines])
            yield Piece(self.region, j, k, new, tuple(to), local)

    def messages(self) -> tuple[Ints, Ints, Ints]:
        """Returns the transfers between devices, one message for each pair of devices.

        Returns:
            The positions of the sources, the positions of the destinations, and the number of elements of each message.
        """
        away = ~self.local & (self.sizes > 0)
        receivers = int(self.destination.max(initial=0)) + 1
        pairs, inverse = np.unique(self.source[away] * receivers + self.destination[away], return_inverse=True)
        totals = np.zeros(len(pairs), np.int64)
        np.add.at(totals, inverse, self.sizes[away])
        return pairs // receivers, pairs % receivers, totals


def with_new_dimensions(index: Sequence[Any], dimensions: Sequence[int | None]) -> tuple[Any, ...]:
    """Returns an operand's index with None at the new dimensions of the result.

    ``dimensions`` has, for each dimension of the result, the operand's dimension, in increasing order, or None.
    """
    if None not in dimensions:
        return tuple(index)
    out: list[Any] = []
    used = 0
    for d in dimensions:
        end = used if d is None else d + 1
        out += [None] if d is None else index[used:end]
        used = end
    return (*out, *index[used:])


def pieces_in(region: Region, source: Grid, result: Grid) -> tuple[int, int]:
    """Returns the number of products of intervals of a region, and the number of devices that receive each of them."""
    counts = [len(_intervals(line, source, result.offsets[d]).begin) for d, line in enumerate(region.lines)]
    return math.prod(counts), len(result.devices) // math.prod(result.counts)


class _Intervals(NamedTuple):
    """The intervals of one line.

    Attributes:
        to_part, from_part: the part of the result and the part of the operand of each interval.
        begin, end: the interval within the part of the result.
        slices: the slice within the part of the operand; empty for a new dimension.
    """

    to_part: Ints
    from_part: Ints
    begin: Ints
    end: Ints
    slices: list[slice]


def _intervals(line: Line, source: Grid, bounds: Ints) -> _Intervals:
    count = line.end - line.begin
    cuts = [np.clip(bounds - line.begin, 0, count)]
    if line.source is not None:
        offsets = source.offsets[line.source]
        # The number of steps before the line enters (positive step) or leaves (negative step) each part.
        ahead = line.start - offsets
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
    from_part = np.searchsorted(offsets, head, "right") - 1
    at = head - offsets[from_part] if len(first) else head
    slices = [
        slice(a, stop if (stop := a + line.step * n) >= 0 else None, line.step)
        for a, n in zip(at.tolist(), (last - first).tolist(), strict=True)
    ]
    return _Intervals(to_part, from_part, begin, end, slices)


def _holders(grid: Grid) -> tuple[Ints, Ints]:
    """Returns the positions of the devices that hold each part, of shape (parts, most replicas) and filled up with -1,
    and the number of replicas of each part.
    """
    parts, count = grid.linear_parts(), math.prod(grid.counts)
    replicas = np.bincount(parts, minlength=count)
    most = int(replicas.max())
    holders = np.full((count, most), -1)
    holders[np.arange(most) < replicas[:, None]] = np.argsort(parts, kind="stable")
    return holders, replicas


@lru_cache(256)
def _processes(devices: tuple[Device, ...]) -> frozenset[int]:
    """Returns the processes of devices."""
    return frozenset([device.process_index for device in devices])


def _turns_of_processes(senders: Ints, parts: Ints, receivers: Ints, source: Grid, result: Grid) -> Ints:
    """Returns the position of the source device of each piece for each of its receivers, of shape (pieces, replicas).

    Receivers whose own process has the part receive it there. The others of one process receive it from one device, so
    that it is sent to each process once; the processes that have it share the sending.

    Args:
        senders: the positions of the devices that hold each part of the source.
        parts: the part of the source in which each piece is.
        receivers: the positions of the devices that receive each piece.
        source, result: the shards of the operand and of the result.
    """
    giving = [device.process_index for device in source.devices]
    taking = np.array([device.process_index for device in result.devices], np.int64)
    turn = np.zeros_like(receivers)
    process = np.where(receivers >= 0, taking[receivers], -1)
    rank = np.broadcast_to(np.arange(receivers.shape[1]), receivers.shape)
    part = np.broadcast_to(parts[:, None], receivers.shape)
    width = int(process.max(initial=0)) + 2
    pairs, inverse = np.unique((part * width + process + 1).ravel(), return_inverse=True)
    order, ends = np.argsort(inverse, kind="stable"), np.cumsum(np.bincount(inverse))
    for pair, pieces in zip(pairs.tolist(), np.split(order, ends)[:-1], strict=True):
        at, taker = pair // width, pair % width - 1
        have: dict[int, list[int]] = {}
        for k in senders[at][senders[at] >= 0].tolist():
            have.setdefault(giving[k], []).append(k)
        several = sorted(have)
        some = np.array(have.get(taker) or have[several[taker % len(several)]][:1], np.int64)
        turn.ravel()[pieces] = some[rank.ravel()[pieces] % len(some)]
    return turn


@lru_cache(256)
def _positions(source: tuple[Device, ...], result: tuple[Device, ...]) -> Ints:
    """Returns for each device of the result its position among the source's devices, or -1."""
    if source == result:
        return np.arange(len(source))
    where = {device: j for j, device in enumerate(source)}
    return np.array([where.get(device, -1) for device in result], np.int64)


@lru_cache(1024)
def plan_reshard(source: NamedSharding, destination: NamedSharding, shape: Shape) -> RegionCopies:
    """Returns the copy plan that reshards an array of that shape from one sharding to another.

    >>> mesh = st.make_mesh((4,), ("x",))
    >>> rows, columns = st.NamedSharding(mesh, st.P("x")), st.NamedSharding(mesh, st.P(None, "x"))
    >>> from shardtensor.sharding.copy_plan import plan_reshard
    >>> plan_reshard(rows, columns, (8, 8)).size  # each device keeps a quarter of its quarter
    48
    """
    return RegionCopies(identity(shape), 0, source.grid(shape), destination.grid(shape))


@lru_cache(1024)
def host_grid(shape: Shape) -> Grid:
    """Returns the grid of an unsplit array of that shape in host memory."""
    bounds = tuple(np.array([0, n], np.int64) for n in shape)
    return Grid((HOST,), bounds, np.zeros((1, len(shape)), np.int64))
