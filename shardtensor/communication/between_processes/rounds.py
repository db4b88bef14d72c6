"""Rounds: the arrays that processes send to each other, cut into packets of limited size.

In each round, every process sends at most one packet to every other one. All processes know the shapes and dtypes of
all arrays, and therefore compute the same rounds.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from shardtensor.host.units import counted
from shardtensor.sharding.layout import Shape

MOST = 1 << 26
"""The most bytes of packets that a process has at a time, those that it sends and those that it receives."""


Pair = tuple[int, int]
"""The process that sends, and the one that receives."""


class Parcel(NamedTuple):
    """An array that one process sends to another one.

    Attributes:
        sender, receiver: the numbers of the processes.
        shape, dtype: those of the array.
    """

    sender: int
    receiver: int
    shape: Shape
    dtype: np.dtype[Any]

    @property
    def nbytes(self) -> int:
        """The bytes of its elements."""
        return math.prod(self.shape) * self.dtype.itemsize


class Part(NamedTuple):
    """A part of an array in a packet.

    Attributes:
        number: the number of the array.
        box: the index of the part in the array; None for the whole array.
        begin, end: its bytes in the packet.
        shape: its shape.
    """

    number: int
    box: tuple[slice, ...] | None
    begin: int
    end: int
    shape: Shape


class Packet(NamedTuple):
    """The parts of arrays that one process sends to another one in one round.

    Attributes:
        sender, receiver: the numbers of the processes.
        nbytes: the length of the packet.
        parts: the parts, in order of their bytes.
    """

    sender: int
    receiver: int
    nbytes: int
    parts: Sequence[Part]


class Rounds(NamedTuple):
    """The packets of one exchange.

    Attributes:
        text: which process sends how many bytes to which, as the processes compare it, and as users read it.
        packets: the packets of each round.
        cut: the numbers of the arrays that several packets have parts of.
        longest: the most bytes that a process sends.
    """

    text: str
    packets: Sequence[Sequence[Packet]]
    cut: frozenset[int]
    longest: int


@functools.lru_cache(1024)
def rounds(parcels: tuple[Parcel, ...], most: int) -> Rounds:
    """Returns the rounds in which arrays are sent.

    Args:
        parcels: the arrays.
        most: the most bytes that a process has in packets at a time.
    """
    pairs: dict[Pair, list[int]] = {}
    for number, parcel in enumerate(parcels):
        pairs.setdefault(parcel[:2], []).append(number)
    busiest = max(sum(k in pair for pair in pairs) for k in set(itertools.chain.from_iterable(pairs)))
    limit = most // busiest
    columns = []
    for (sender, receiver), numbers in pairs.items():
        # Longer items first: then all of them are aligned without gaps.
        numbers.sort(key=lambda n: -parcels[n].dtype.itemsize)
        parts = itertools.chain.from_iterable(_parts(n, parcels[n], limit) for n in numbers)
        columns.append([Packet(sender, receiver, *load) for load in _loads(parts, parcels, limit)])
    packets = [[m for m in row if m] for row in itertools.zip_longest(*columns)]
    cut = frozenset(p.number for row in packets for m in row for p in m.parts if p.box is not None)
    sizes = {pair: sum(m.nbytes for m in c) for pair, c in zip(pairs, columns, strict=True)}
    totals: dict[int, int] = {}
    for (sender, _), size in sizes.items():
        totals[sender] = totals.get(sender, 0) + size
    shapes = {pair: [(*parcels[n].shape, parcels[n].dtype.itemsize) for n in sorted(pairs[pair])] for pair in pairs}
    return Rounds(_text(sizes, shapes), packets, cut, max(totals.values()))


def _parts(number: int, parcel: Parcel, limit: int) -> Iterator[tuple[int, tuple[slice, ...] | None, Shape]]:
    """Yields the parts of an array: their shapes, and their boxes if there are several."""
    for box, shape in boxes(parcel.shape, max(limit // max(parcel.dtype.itemsize, 1), 1)):
        yield number, box or None, shape


def boxes(shape: Shape, most: int) -> Iterator[tuple[tuple[slice, ...], Shape]]:
    """Yields boxes of at most that many elements, which make up an array, in row-major order."""
    if math.prod(shape) <= most:
        yield (), shape
        return
    size, rest = shape[0], shape[1:]
    step = max(most // max(math.prod(rest), 1), 1)
    for begin in range(0, size, step):
        rows = slice(begin, min(begin + step, size))
        for box, inner in boxes(rest, most // (rows.stop - begin)):
            yield (rows, *box), (rows.stop - begin, *inner)


def _loads(parts: Any, parcels: Sequence[Parcel], limit: int) -> Iterator[tuple[int, Sequence[Part]]]:
    """Yields the lengths of packets and the parts in them."""
    load, end = list[Part](), 0
    for number, box, shape in parts:
        itemsize = parcels[number].dtype.itemsize
        begin = -(-end // itemsize) * itemsize if itemsize else end
        nbytes = math.prod(shape) * itemsize
        if load and begin + nbytes > limit:
            yield end, load
            load, begin = [], 0
        end = begin + nbytes
        load.append(Part(number, box, begin, end, shape))
    yield end, load


_LISTED = 2
"""The number of messages up to which the text of an exchange lists them."""


def _text(sizes: Mapping[Pair, int], shapes: Mapping[Pair, Sequence[Shape]]) -> str:
    """Returns the text of an exchange. Processes that cut the same bytes into other arrays have other texts."""
    if len(sizes) <= _LISTED:
        return ", ".join(
            [f"{_quantity(n, shapes[i, k])} from process {i} to process {k}" for (i, k), n in sizes.items()]
        )
    return (
        f"{counted(sum(sizes.values()), 'byte')} between {counted(len(sizes), 'pair')} of processes "
        f"({_digest(tuple(sizes), [s for pair in sizes for s in shapes[pair]])})"
    )


def _quantity(nbytes: int, shapes: Sequence[Shape]) -> str:
    several = f" in {counted(len(shapes), 'array')} ({_digest((), shapes)})" if len(shapes) > 1 else ""
    return f"{counted(nbytes, 'byte')}{several}"


def _digest(pairs: tuple[Pair, ...], shapes: Sequence[Shape]) -> str:
    return f"{hash((pairs, tuple(shapes))) % 2**32:x}"


def as_bytes(array: Any) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Returns the memory of a contiguous array, without a copy."""
    result: np.ndarray[Any, np.dtype[np.uint8]] = array.reshape(-1).view(np.uint8)
    return result
