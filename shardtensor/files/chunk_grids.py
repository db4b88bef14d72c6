"""How an array is cut into files: a regular grid of outer chunks, each with one owner, and inner chunks in them.

Other programs read regular grids only, but shards may be uneven. The outer chunks are as large as a shard, so that each
lies in one shard but for elements at the borders; its owner, who holds most of it, gets these from the others. A box is
a pair of begin and end for each dimension.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardtensor.errors import ShardingError

Shape = tuple[int, ...]
Box = tuple[tuple[int, int], ...]

_LEAST, _MOST = 4 << 20, 16 << 20
"""The bytes of an inner chunk: smaller ones make readers slow, larger ones read what is not needed."""

_ROW = 1 << 10
"""The bytes of the last dimension below which an inner chunk is not cut along it: short runs are slow to copy."""


@dataclass(frozen=True)
class Piece:
    """What an owner gets from another one, or has itself, for a chunk.

    Attributes:
        owner: the owner that holds it.
        box: the elements.
    """

    owner: int
    box: Box


@dataclass(frozen=True)
class Grid:
    """The cut of an array.

    Attributes:
        shape: the shape of the array.
        chunk: the shape of the outer chunks; those at the end of a dimension reach beyond it.
        inner: the shape of the inner chunks, which divides that of the outer ones.
        pieces: for the index of each outer chunk, the pieces that make up its elements, each of which is in one. The
            first one's owner writes the file, and holds more of it than any other.
    """

    shape: Shape
    chunk: Shape
    inner: Shape
    pieces: dict[Shape, tuple[Piece, ...]]

    def owner(self, index: Shape) -> int:
        """Returns the owner that writes an outer chunk."""
        return self.pieces[index][0].owner

    def written_by(self, owner: int) -> list[Shape]:
        """Returns the indices of the outer chunks that an owner writes."""
        return [index for index, pieces in self.pieces.items() if pieces[0].owner == owner]


# -- boxes -----------------------------------------------------------------------------------------


def size_of(box: Box) -> int:
    """Returns the number of elements in a box."""
    return math.prod(end - begin for begin, end in box)


def intersection(a: Box, b: Box) -> Box | None:
    """Returns the box of the elements that are in both; None if there are none."""
    both = tuple((max(p, r), min(q, s)) for (p, q), (r, s) in zip(a, b, strict=True))
    return both if all(begin < end for begin, end in both) else None


def difference(box: Box, without: Box) -> Iterator[Box]:
    """Yields boxes of the elements of the first box that are not in the second, each element in one."""
    both = intersection(box, without)
    if both is None:
        yield box
        return
    rest = list(box)
    for d, (begin, end) in enumerate(both):
        first, last = rest[d]
        if first < begin:
            yield (*rest[:d], (first, begin), *rest[d + 1 :])
        if end < last:
            yield (*rest[:d], (end, last), *rest[d + 1 :])
        rest[d] = begin, end


def chunk_box(index: Shape, chunk: Shape, shape: Shape) -> Box:
    """Returns the elements of an array that are in a chunk, whose part beyond the array has none."""
    return tuple((i * c, min((i + 1) * c, n)) for i, c, n in zip(index, chunk, shape, strict=True))


def slices(box: Box, within: Box) -> tuple[Any, ...]:
    """Returns the index of a box in an array that has another one; with no dimension, the index of a view."""
    return (*(slice(b - o, e - o) for (b, e), (o, _) in zip(box, within, strict=True)), ...)


def chunks_of(box: Box, chunk: Shape, numbers: range | None = None) -> Iterator[Shape]:
    """Yields the indices of the chunks that have elements of a box, in C order; or those with these numbers only."""
    counts = _counts(box, chunk)
    for number in range(math.prod(counts)) if numbers is None else numbers:
        index = []
        for (begin, _), c, count in zip(reversed(box), reversed(chunk), reversed(counts), strict=True):
            number, k = divmod(number, count)
            index.append(begin // c + k)
        yield tuple(reversed(index))


def count_of_chunks(box: Box, chunk: Shape) -> int:
    """Returns the number of chunks that have elements of a box."""
    return math.prod(_counts(box, chunk))


def _counts(box: Box, chunk: Shape) -> list[int]:
    return [-(-e // c) - b // c if b < e else 0 for (b, e), c in zip(box, chunk, strict=True)]


def slabs(box: Box, itemsize: int, most: int) -> Iterator[Box]:
    """Yields the parts of a box of at most ``most`` bytes, in the order in which C-contiguous memory has them."""
    d, run = len(box), 1
    while d and run * (box[d - 1][1] - box[d - 1][0]) * itemsize <= most:
        d -= 1
        run *= box[d][1] - box[d][0]
    if not d:
        yield box
        return
    (begin, end), rows = box[d - 1], max(most // (run * itemsize), 1)
    for outer in np.ndindex(*(e - b for b, e in box[: d - 1])):
        start = tuple((b + k, b + k + 1) for (b, _), k in zip(box, outer, strict=False))
        for row in range(begin, end, rows):
            yield (*start, (row, min(row + rows, end)), *box[d:])


# -- owners ----------------------------------------------------------------------------------------


def cut_over_replicas(boxes: Sequence[Box], itemsize: int, turn: int = 0) -> dict[int, Box]:
    """Cuts each box that several owners hold over them, so that all of them write.

    A box of few bytes goes to one of them as a whole.

    Args:
        boxes: the box of each owner.
        itemsize: the bytes of an element.
        turn: a number that differs between the arrays of a checkpoint, so that small ones have different owners.

    Returns:
        The part of each owner that has one.
    """
    holders: dict[Box, list[int]] = {}
    for owner, box in enumerate(boxes):
        if size_of(box):
            holders.setdefault(box, []).append(owner)
    nd = len(next(iter(holders), ()))
    # All boxes are cut along one dimension: cuts along several would make a grid of far more chunks than parts.
    d = max(range(nd), key=lambda d: max(box[d][1] - box[d][0] for box in holders), default=0)
    parts = {}
    for box, owners in holders.items():
        begin, end = box[d] if box else (0, 1)
        count = max(1, min(len(owners), size_of(box) * itemsize // _LEAST, end - begin))
        for k in range(count):
            cut = (begin + (end - begin) * k // count, begin + (end - begin) * (k + 1) // count)
            parts[owners[(turn + k) % len(owners)]] = (*box[:d], cut, *box[d + 1 :]) if box else box
    return parts


def plan_grid(shape: Shape, itemsize: int, held: Sequence[Box], turn: int = 0) -> Grid:
    """Chooses the grid of an array, and who writes which of its chunks from which pieces.

    Every process computes the same from the same arguments. An array without elements has no chunks.

    Args:
        shape: the shape of the array.
        itemsize: the bytes of an element.
        held: the box of each owner, a process or a device (see `tiled`). Boxes may be empty, equal, or overlap.
        turn: a number that differs between the arrays of a checkpoint (see `cut_over_replicas`).

    Raises:
        ShardingError: an element is in no box.
    """
    if 0 in shape:
        unit = tuple(max(n, 1) for n in shape)
        return Grid(shape, unit, unit, {})
    boxes = tuple(held)
    # Models have many arrays of few shapes.
    return _planned(shape, itemsize, boxes, turn % len(boxes) if len({*boxes}) < len(boxes) else 0)


@functools.lru_cache(256)
def _planned(shape: Shape, itemsize: int, held: tuple[Box, ...], turn: int) -> Grid:
    parts = cut_over_replicas(held, itemsize, turn)
    outer = [_outer(n, sorted({b for box in parts.values() for b in box[d]})) for d, n in enumerate(shape)]
    chunk, inner = _inner(shape, outer, itemsize)
    writers, everything = _Owners(parts, len(shape)), _Owners(dict(enumerate(held)), len(shape))
    whole = tuple((0, n) for n in shape)
    pieces = {i: _pieces(chunk_box(i, chunk, shape), writers, everything) for i in chunks_of(whole, chunk)}
    return Grid(shape, chunk, inner, pieces)


class _Owners:
    """The boxes of owners, as arrays, of which `overlapping` compares all with another box at once."""

    def __init__(self, boxes: dict[int, Box], nd: int) -> None:
        self.boxes = {owner: box for owner, box in boxes.items() if size_of(box)}
        self._owners = list(self.boxes)
        self._bounds = np.array(list(self.boxes.values()), np.int64).reshape(len(self.boxes), nd, 2)

    def overlapping(self, box: Box) -> list[int]:
        """Returns the owners that have elements of a box, the one that has most of them first."""
        begin, end = np.array(box, np.int64).reshape(-1, 2).T
        sizes = np.minimum(self._bounds[:, :, 1], end) - np.maximum(self._bounds[:, :, 0], begin)
        counts = np.prod(np.maximum(sizes, 0), axis=1, dtype=np.float64)
        order = np.argsort(-counts, kind="stable")
        return [self._owners[k] for k in order[: np.count_nonzero(counts)]]


def _pieces(box: Box, writers: _Owners, everything: _Owners) -> tuple[Piece, ...]:
    """Returns the pieces of a chunk. The owner whose part has most of it writes it, and uses all that it holds."""
    pieces, missing = [], [box]
    first = writers.overlapping(box)[:1]
    for owner in itertools.chain(first, _others(box, first, everything)):
        mine = everything.boxes[owner]
        rest: list[Box] = []
        for wanting in missing:
            both = intersection(wanting, mine)
            if both is not None:
                pieces.append(Piece(owner, both))
            rest.extend(difference(wanting, mine))
        missing = rest
        if not missing:
            return tuple(pieces)
    raise ShardingError(f"the elements {missing[0]} of the array are held by no owner")


def _others(box: Box, first: Sequence[int], everything: _Owners) -> Iterator[int]:
    """Yields the other owners that hold elements of a box, which are looked for only if the first one lacks some."""
    yield from (owner for owner in everything.overlapping(box) if owner not in first)


# -- sizes -----------------------------------------------------------------------------------------


def _outer(n: int, bounds: Sequence[int]) -> int:
    """Returns the size of the outer chunks of a dimension: with which the fewest rows lie in a chunk of another owner.

    There is at most one more chunk than parts.
    """
    parts = max(len(bounds) - 1, 1)
    edges = np.array(bounds, np.int64)

    def cost(c: int) -> tuple[int, int]:
        begins = np.arange(0, n, c)
        ends = np.minimum(begins + c, n)
        most = np.minimum(edges[None, 1:], ends[:, None]) - np.maximum(edges[None, :-1], begins[:, None])
        return int(np.sum(ends - begins - most.max(1, initial=0))), len(begins)

    sizes = {-(-n // parts), max(n // parts, 1)}
    return min((c for c in sizes if -(-n // c) <= parts + 1), key=cost)


def _inner(shape: Shape, outer: Sequence[int], itemsize: int) -> tuple[Shape, Shape]:
    """Returns the shapes of outer and inner chunks, of which each of the first has a whole number of the second.

    The longest dimension is cut again and again, so that any part of an array that other layouts need is in few inner
    chunks. Where a cut is not even, the outer chunk grows; the border of the last one moves by at most one inner chunk.
    """
    inner = list(outer)
    cuts = [1] * len(outer)
    while True:
        nbytes = math.prod(inner) * itemsize
        if nbytes < 2 * _LEAST:
            break
        for d in sorted(range(len(inner)), key=lambda d: (-inner[d], d)):
            count = _cut(shape[d], outer[d], cuts[d], nbytes)
            last = d == len(inner) - 1
            if count and (not last or -(-outer[d] // count) * itemsize >= _ROW):
                cuts[d], inner[d] = count, -(-outer[d] // count)
                break
        else:
            break
    return tuple(i * k for i, k in zip(inner, cuts, strict=True)), tuple(inner)


def _cut(n: int, size: int, count: int, nbytes: int) -> int | None:
    """Returns into how many parts a dimension of a chunk can be cut next; None if it cannot."""
    chunks = -(-n // size)
    for more in range(2 * count, 4 * count + 1):
        part = -(-size // more)
        if more > size or nbytes * count < more * _LEAST:
            return None
        if chunks == 1 or (part * more - size) * (chunks - 1) <= part:
            return more
    return None
