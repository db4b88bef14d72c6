"""Reductions and products of host arrays, in passes over their blocks, which threads divide.

A block is to a shard what a shard is to the whole: each gives a state (see `shardtensor.functions.monoids`), and the
states become one in a fixed order; those of one shard by pairs, as NumPy adds, so that errors of rounding stay small;
those of the shards in mesh order. Arrays are cut as their shapes say, and BLAS, whose results depend on how many
threads it has, works with one in each of ours: so the number of threads cannot change a bit.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from shardtensor.functions.monoids import MONOIDS
from shardtensor.host import memory_pool as pool
from shardtensor.host.blas_threads import Limit
from shardtensor.host.blockwise import BYTE, LONG, as_dtype
from shardtensor.host.fp_errors import Complaints
from shardtensor.host.signals import Interrupts
from shardtensor.host.threads import each
from shardtensor.sharding.rules import Rule
from shardtensor.sharding.shard_context import Place

Ranges = Mapping[str, tuple[int, int]]
"""Begin and end along the dimensions of those names."""

Part = tuple[Ranges, Sequence[Ranges]]
"""A part of the result along the names that stay; and along those that vanish the shards from which it comes, in mesh
order.
"""

_BLOCK = 1 << 20
"""Elements of a block that are read once: enough for calls of NumPy not to show."""

_BLOCKS = 1 << 5
"""Of arrays that have more blocks than that, they are longer: threads stop and start less often."""

_LARGE = 1 << 22
"""The most elements of those."""

_CACHED = 1 << 19
"""The same where they are gone through several times, and shall stay in the cache of a core."""

_WIDTH = 1 << 13
"""The most columns of a block whose rows are added up: sums that stay in the nearest cache."""

_FACTORS = (1 << 9, 1 << 12, 1 << 26)
"""Of a block of a product at most so many rows and columns, as many as BLAS needs to make good for what it copies
first; and multiplications, about a millisecond, as far as the depth is no less than `_DEPTH`.
"""

_ROWS = 1 << 7
"""Rows of which BLAS makes good use."""

_SQUARE = (1 << 9, 1 << 9, 1 << 26)
"""The same where a matrix is multiplied with its own transpose: half of the blocks are mirrors of the others."""

_PLAIN = (1 << 8, 1 << 8, 1 << 23)
"""The same of integers, which BLAS does not know: NumPy multiplies them one by one."""

_DEPTH = (1 << 12, 1 << 19)
"""The fewest and the most elements of a sum of products in one block; of integers there may be fewer."""

_BLAS_ALONE = 1 << 18
"""Multiplications up to which BLAS works with one thread by itself."""

_BLAS_ALONE_THIN = 10_000
"""The same of vectors, and of matrices by vectors."""

_MULTIPLICATION = 10e-12
"""Seconds that one takes, within a long product."""


class BlockedReduction:
    """One reduction or product of host arrays.

    Args:
        name: what NumPy calls it in floating-point errors.
        combine: the monoid by which states become one.
        rule: names the dimensions of the operands and of the result.
        sizes: the size of every name.
        value: shape and dtype of the result.
        place: that of the first device, whose shards are the largest.
        kernel: ``kernel(xp, place, *arrays, **params)``, the operator itself.
        params: the operator's.
        shares: for each part of the result the places of the devices that have a share in it, in mesh order; None where
            the whole may be cut anywhere.
    """

    def __init__(
        self, name: str, combine: str, rule: Rule, sizes: Mapping[str, int], value: Any, place: Place,
        kernel: Callable[..., Any], params: Mapping[str, Any], shares: Sequence[Sequence[Place]] | None,
    ) -> None:  # fmt: skip
        self._name = name
        self.value = value
        self.monoid = MONOIDS[combine]
        self.partial = self.monoid.partial or kernel
        self.params = params
        self._kernel = kernel
        self._sizes = sizes
        self._local = {name: end - begin for name, (begin, end) in _ranges(rule, place).items()}
        self._vanishing = {name: size for name, size in self._local.items() if name not in rule.result}
        self._parts = _whole(rule, sizes) if shares is None else [_part(rule, places) for places in shares]
        self._turns = (False,) * len(rule.operands)
        if kernel is not matmul and (matrices := _as_matrices(rule, combine)):
            (rule, self._turns), self._kernel, self.partial, self.params = matrices, matmul, matmul, {}
        self._rule = rule
        shapes = [s[::-1] if turn else s for s, turn in zip(place.shapes, self._turns, strict=True)]
        self._shapes = tuple(shapes)
        self._block = _block(combine, math.prod(sizes.values()))
        self._product = len(shapes) > 1
        self._cuts: dict[tuple[str, ...], _Tiling] = {}

    def cut_for(self, arrays: Sequence[Any]) -> _Tiling:
        """How it is cut, given how the operands lie: a reduction along the memory, a product with itself in squares."""
        names = self._rule.operands[0]
        if self._product:
            order: tuple[str, ...] = ("square",) if self._is_square(*arrays) else ()
        else:
            strides = arrays[0].strides
            order = tuple([names[d] for d in sorted(range(len(names)), key=lambda d: -abs(strides[d]))])
        if order not in self._cuts:
            if self._product:
                most = _SQUARE if order else _FACTORS if self.value.dtype.kind in "fc" else _PLAIN
                sides = _product_sides(self._rule, {**self._sizes, **self._vanishing}, most)
                if order:
                    sides |= dict.fromkeys(self._rule.result, min(sides[name] for name in self._rule.result))
            else:
                sides = _sides(order, self._vanishing, self._local, self._sizes, self._block)
            tiles = [tile for part in self._parts for tile in self._tiles(part, sides)]
            self._cuts[order] = _Tiling(tiles, self._product and bool(order))
        return self._cuts[order]

    def _is_square(self, x1: Any, x2: Any) -> bool:
        """Whether it is the product of a matrix with its own transpose."""
        mine, its = x1.__array_interface__, x2.__array_interface__
        return bool(
            self._kernel is matmul
            and len(self._parts) == 1
            and x1.ndim == 2
            and x1.T.shape == x2.shape
            and x1.T.strides == x2.strides
            and mine["data"] == its["data"]
            and mine["typestr"] == its["typestr"]
        )

    def _tiles(self, part: Part, sides: Mapping[str, int]) -> list[list[list[Place]]]:
        """The tiles of a part of the result: for each shard, the places of the blocks that a tile needs of it."""
        kept, shards = part
        return [
            [
                [self._place({**tile, **block}) for block in _boxes(vanishing, sides)] for vanishing in shards
            ]
            for tile in _boxes(kept, sides)
        ]  # fmt: skip

    def _place(self, ranges: Ranges) -> Place:
        boxes = [
            tuple([ranges[name] if n == self._sizes[name] else (0, 1) for name, n in zip(names, shape, strict=True)])
            for names, shape in zip(self._rule.operands, self._shapes, strict=True)
        ]
        box = tuple([ranges.get(name, (0, 1)) for name in self._rule.result])
        return Place(box, tuple(boxes), self.value.shape, self._shapes, self.value.dtype)

    def __call__(self, *arrays: Any) -> Any:
        """The result.

        Raises:
            DeviceMemoryError: there is no memory for it.
        """
        arrays = tuple([array.T if turn else array for array, turn in zip(arrays, self._turns, strict=True)])
        if self._kernel is matmul:  # once, and not for each block
            arrays = tuple([as_dtype(array, self.value.dtype) for array in arrays])
        cut = self.cut_for(arrays)
        job = _Run(self, cut, arrays)
        if self._product:
            seconds = _MULTIPLICATION * math.prod(self._sizes.values())
        else:
            seconds = BYTE * arrays[0].nbytes * (3 if self.monoid.several else 1)
        threads = None if seconds > LONG else 1
        with Interrupts(), Complaints(self._name), Limit(1) if self._product else _nothing:
            if self._kernel is matmul and cut.shallow:
                each(job.sum_in_place, len(cut.tiles), threads=threads)
            elif len(cut.tiles) * 4 > len(cut.blocks):
                each(job.do, len(cut.tiles), threads=threads)
            else:
                each(job.compute, len(cut.blocks), threads=threads)
                each(job.finish, len(cut.tiles), threads=threads)
        return job.out


class _Tiling:
    """The tiles of a result.

    Attributes:
        tiles: for each one, and for each shard, the places of the blocks that it needs.
        blocks: all these places, in that order.
        first: for each tile, and for their end, where its own begin.
        square: whether tiles are squares, and those below the diagonal mirrors of those above.
        shallow: whether each tile needs one block of each shard, so that it can be summed up where it is to be.
    """

    def __init__(self, tiles: list[list[list[Place]]], square: bool) -> None:
        self.tiles = tiles
        self.blocks = [place for tile in tiles for shard in tile for place in shard]
        self.first = list(itertools.accumulate([sum(map(len, tile)) for tile in tiles], initial=0))
        self.square = square
        self.shallow = all(len(shard) == 1 for tile in tiles for shard in tile)


_nothing = contextlib.nullcontext()


class _Run:
    """One run of a fold."""

    def __init__(self, fold: BlockedReduction, cut: _Tiling, arrays: Sequence[Any]) -> None:
        self._fold = fold
        self._cut = cut
        self._arrays = arrays
        self._states: list[Any] = [None] * len(cut.blocks)
        self.out = pool.empty(fold.value.shape, fold.value.dtype)

    def _parts(self, place: Place) -> list[Any]:
        pairs = zip(self._arrays, place.boxes, strict=True)
        return [array[tuple([slice(*ends) for ends in box])] for array, box in pairs]

    def compute(self, k: int) -> None:
        """The state of a block."""
        place = self._cut.blocks[k]
        self._states[k] = self._fold.partial(np, place, *self._parts(place), **self._fold.params)

    def finish(self, n: int) -> None:
        """A tile of the result, from the states of its blocks."""
        if self._fold.monoid.several:  # what has overflowed was reported where it did
            with np.errstate(invalid="ignore"):
                self._merge(n)
        else:
            self._merge(n)

    def _merge(self, n: int) -> None:
        tile, k = self._cut.tiles[n], self._cut.first[n]
        monoid, total = self._fold.monoid, None
        for number, shard in enumerate(tile):
            states = self._states[k : k + len(shard)]
            self._states[k : k + len(shard)] = [None] * len(shard)
            k += len(shard)
            mine = self._by_pairs(states)
            total = monoid.merge(np, total, mine) if number else mine
        place = tile[0][0]
        self.out[_index(place)] = monoid.finish(np, place, total, **self._fold.params)

    def do(self, n: int) -> None:
        """A tile of the result, and its blocks before."""
        for k in range(self._cut.first[n], self._cut.first[n + 1]):
            self.compute(k)
        self.finish(n)

    def sum_in_place(self, n: int) -> None:
        """A tile of a matrix product, to which the shares of one shard after the other are added."""
        tile, summand = self._cut.tiles[n], None
        index = _index(tile[0][0])
        if self._cut.square and index[0].start > index[1].start:
            return
        out = self.out[(*index, ...)]  # an array, also of no dimensions
        for number, (place,) in enumerate(tile):
            x1, x2 = self._parts(place)
            if not number:
                np.matmul(x1, x2, out=out)
                continue
            if summand is None:
                summand = pool.empty(out.shape, out.dtype)
            np.matmul(x1, x2, out=summand)
            np.add(out, summand, out=out)
        if self._cut.square and index[0].start < index[1].start:
            self.out[index[::-1]] = out.T

    def _by_pairs(self, states: list[Any]) -> Any:
        merge = self._fold.monoid.merge
        while len(states) > 1:
            odd = states[len(states) & ~1 :]
            states = [merge(np, a, b) for a, b in zip(states[::2], states[1::2], strict=False)] + odd
        return states[0]


def matmul(xp: Any, place: Place, x1: Any, x2: Any) -> Any:
    """The kernel of a matrix product."""
    return xp.matmul(x1, x2)


def is_long(combine: str, rule: Rule, sizes: Mapping[str, int]) -> bool:
    """Whether a reduction or product over names of those sizes is worth blocks; or such that BLAS would use its own
    threads.
    """
    size = math.prod(sizes.values())
    if len(rule.operands) == 1:
        return size > _block(combine, size)
    x1, x2 = [set(names) & set(rule.result) for names in rule.operands]
    thin = 1 in [math.prod(sizes[name] for name in own) for own in (x1 - x2, x2 - x1)]
    return size > (_BLAS_ALONE_THIN if thin else _BLAS_ALONE)


# -- what they are made of -------------------------------------------------------------------------


def _whole(rule: Rule, sizes: Mapping[str, int]) -> list[Part]:
    stays = {name: (0, size) for name, size in sizes.items() if name in rule.result}
    return [(stays, [{name: (0, size) for name, size in sizes.items() if name not in stays}])]


def _part(rule: Rule, places: Sequence[Place]) -> Part:
    ranges = [_ranges(rule, place) for place in places]
    stays = {name: ends for name, ends in ranges[0].items() if name in rule.result}
    return stays, [{name: ends for name, ends in mine.items() if name not in stays} for mine in ranges]


def _ranges(rule: Rule, place: Place) -> dict[str, tuple[int, int]]:
    """What a device has along each name."""
    ranges: dict[str, tuple[int, int]] = {}
    for names, box in zip(rule.operands, place.boxes, strict=True):
        for name, ends in zip(names, box, strict=True):
            if name not in ranges or ranges[name] == (0, 1):  # a size of 1 broadcasts
                ranges[name] = ends
    return ranges


def _as_matrices(rule: Rule, combine: str) -> tuple[Rule, tuple[bool, ...]] | None:
    """The rule of a matrix product that a sum of products of two matrices is, and which of them to transpose for it."""
    if combine != "sum" or list(map(len, rule.operands)) != [2, 2]:
        return None
    x1, x2 = rule.operands
    gone = [name for name in x1 if name not in rule.result]
    if len(gone) != 1 or len(rule.result) != 2:
        return None
    turns = x1[1] not in gone, x2[0] not in gone
    turned = [names[::-1] if turn else names for names, turn in zip((x1, x2), turns, strict=True)]
    return dataclasses.replace(rule, operands=tuple(turned)), turns


# -- how they are cut ------------------------------------------------------------------------------


def _block(combine: str, size: int) -> int:
    """Elements of a reduction's blocks, of an array that has so many."""
    return _CACHED if MONOIDS[combine].several else max(min(size // _BLOCKS, _LARGE), _BLOCK)


def _sides(
    names: Sequence[str], gone: Mapping[str, int], local: Mapping[str, int], sizes: Mapping[str, int], size: int
) -> dict[str, int]:
    """The sides of a reduction's blocks of about that size.

    Args:
        names: in the order in which the dimensions lie in memory.
        gone: those that vanish, with the sizes that a shard has. Their sides depend on shards alone.
        local: the sizes of a shard.
        sizes: of the whole: what is kept may be cut anywhere.
        size: of a block.
    """
    behind = names[max([names.index(name) for name in gone], default=len(names)) + 1 :]
    width = min(math.prod(local[name] for name in behind), _WIDTH)
    sides = _filled([n for n in names if n in gone], gone, size // max(width, 1))
    sides |= _filled([n for n in names if n not in gone], sizes, size // math.prod(sides.values()))
    return sides


def _product_sides(rule: Rule, sizes: Mapping[str, int], most: tuple[int, int, int]) -> dict[str, int]:
    """The sides of a product's blocks, at ``most`` so many rows, columns and multiplications."""
    ours, theirs = [[n for n in names if n in rule.result] for names in rule.operands]
    mine = [n for n in ours if n not in theirs]
    rows = max(math.prod(sizes[n] for n in mine) // 4, _ROWS)  # of small ones, too, several threads shall have some
    sides = _filled(mine, sizes, min(rows, most[0]))
    sides |= _filled([n for n in theirs if n not in ours], sizes, most[1])
    least = _DEPTH[0] if most is not _PLAIN else 1
    depth = min(max(most[2] // math.prod(sides.values()), least), _DEPTH[1])
    sides |= _filled([n for n in rule.operands[0] if n not in rule.result], sizes, depth)
    both = [n for n in ours if n in theirs]
    return sides | _filled(both, sizes, most[2] // math.prod(sides.values()))


def _filled(names: Sequence[str], sizes: Mapping[str, int], size: int) -> dict[str, int]:
    """Sides with a product of at most that size: whole, as far as it goes, from the last name on."""
    sides = {}
    for name in reversed(names):
        sides[name] = max(min(sizes[name], size), 1)
        size //= sides[name]
    return sides


def _boxes(ranges: Ranges, sides: Mapping[str, int]) -> list[dict[str, tuple[int, int]]]:
    """What ranges are cut into, in row-major order."""
    runs = [
        [(at, min(at + sides[name], end)) for at in range(begin, end, sides[name])]
        for name, (begin, end) in ranges.items()
    ]
    return [dict(zip(ranges, box, strict=True)) for box in itertools.product(*runs)]


def _index(place: Place) -> tuple[Any, ...]:
    return tuple([slice(*ends) for ends in place.box])
