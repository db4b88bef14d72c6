"""Blocked reductions and products of host arrays, whose blocks are distributed over threads.

A shard is cut into blocks as an array is cut into shards. Each block gives a state (see
`shardtensor.functions.building.monoids`), and the states are merged in a fixed order: those of one shard pairwise, as
NumPy sums, so that rounding errors stay small; those of the shards along their tree. The cuts depend only on shapes,
dtypes and memory layouts, and BLAS, whose results depend on its number of threads, uses one thread in each of ours. The
number of threads therefore never changes a bit of the result.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from shardtensor.communication.all_reduce import Tree, combine
from shardtensor.communication.array_communicator import each_array
from shardtensor.core import implements
from shardtensor.functions.building.monoids import MONOIDS
from shardtensor.functions.standard import linear_algebra
from shardtensor.host import memory_pool
from shardtensor.host.blas_threads import Limit
from shardtensor.host.blockwise import LONG, as_dtype, seconds_of
from shardtensor.host.fp_errors import FloatingPointErrors
from shardtensor.host.signals import Interrupts
from shardtensor.host.summation_order import as_part, may_differ, memory_order
from shardtensor.host.threads import each
from shardtensor.sharding.rules import Rule, reduced_axes
from shardtensor.sharding.shard_context import Box, ShardContext

Ranges = Mapping[str, tuple[int, int]]
"""Begin and end along each named dimension."""

Share = tuple[Sequence[ShardContext], Tree]
"""The shards that contribute to a part of the result, and the tree along which their states are combined."""

Part = tuple[Ranges, Sequence[Ranges], Tree]
"""A part of the result (ranges of the names that are kept), and the shards that contribute to it (ranges of the names
that are reduced) with their tree.
"""

_BLOCK = 1 << 20
"""The fewest elements of a block that is read once: at this size the overhead of a NumPy call is negligible."""

_BLOCKS = 1 << 5
"""The number of blocks above which blocks become longer, so that threads start and stop less often."""

_LARGE = 1 << 22
"""The most elements of such a longer block."""

_CACHED = 1 << 19
"""The elements of a block that is read several times and should stay in the cache of a core."""

_WIDTH = 1 << 13
"""The most columns of a block whose rows are added: the sums stay in the innermost cache."""

_FACTORS = (1 << 9, 1 << 12, 1 << 26)
"""The most rows, columns and multiplications of a block of a product.

With so many rows and columns, BLAS's initial copies of the operands are negligible. The multiplications take about a
millisecond; a block has more of them where the minimum of ``_DEPTH`` requires it.
"""

_ROWS = 1 << 7
"""The number of rows from which BLAS is efficient; blocks are not made smaller only to occupy more threads."""

_SQUARE = (1 << 9, 1 << 9, 1 << 26)
"""The limits of ``_FACTORS`` for a matrix times its own transpose: half of the blocks are transposes of others."""

_PLAIN = (1 << 8, 1 << 8, 1 << 23)
"""The limits of ``_FACTORS`` for integers and bools, which BLAS does not support: NumPy multiplies them one by one."""

_DEPTH = (1 << 12, 1 << 19)
"""The fewest and the most terms of a sum of products in one block; integer products may have fewer."""

_BLAS_ALONE = 1 << 18
"""The number of multiplications up to which BLAS itself uses only one thread."""

_BLAS_ALONE_THIN = 10_000
"""The same number for products of two vectors and of a matrix and a vector."""

_MULTIPLICATION = 10e-12
"""The seconds that one multiplication of a long product takes."""


class BlockedReduction:
    """One reduction or product of host arrays. A call with the operands runs it and returns the result.

    Of an array that several processes share, a process computes its own part, in the blocks and with the bits that the
    part has in an array of one process.

    Args:
        name: the name of the operation in NumPy's floating-point errors.
        combine: the name of the monoid that merges states.
        rule: names the dimensions of the operands and of the result.
        sizes: the size of every name.
        value: shape and dtype of the result.
        context: the position of the shards of the first device, which are the largest.
        kernel: ``kernel(xp, context, *arrays, **params)``, the operator itself.
        params: the operator's parameters by name.
        shares: for each part of the result the shards that contribute to it; None where the boundaries of shards do not
            affect the result, so that the whole array is one part.
        held: the position of the arrays that are given, if they are parts of the operands; then there are no shares.
    """

    def __init__(
        self, name: str, combine: str, rule: Rule, sizes: Mapping[str, int], value: Any, context: ShardContext,
        kernel: Callable[..., Any], params: Mapping[str, Any], shares: Sequence[Share] | None,
        held: ShardContext | None = None,
    ) -> None:  # fmt: skip
        self._name = name
        self.value = value
        self.monoid = MONOIDS[combine]
        self._is_exact = value.dtype.kind in self.monoid.exact
        self.partial = self.monoid.partial or kernel
        self.params = params
        self._kernel = kernel
        self._sizes = sizes
        self._local = {name: end - begin for name, (begin, end) in _ranges(rule, context).items()}
        self._vanishing = {name: size for name, size in self._local.items() if name not in rule.result}
        held = held or ShardContext.everywhere(value.shape, context.shapes, value.dtype)
        self._parts = [_part(rule, *share) for share in ([([held], ((),))] if shares is None else shares)]
        self._transposed = (False,) * len(rule.operands)
        if kernel is not matmul and (matrices := _as_matrices(rule, combine)):
            (rule, self._transposed), self._kernel, self.partial, self.params = matrices, matmul, matmul, {}
        self._rule = rule
        shapes = [s[::-1] if transposed else s for s, transposed in zip(context.shapes, self._transposed, strict=True)]
        self._shapes = tuple(shapes)
        boxes = [b[::-1] if transposed else b for b, transposed in zip(held.boxes, self._transposed, strict=True)]
        self.shape = held.local_shape
        self.origin = [begin for begin, _ in held.box]
        self.origins = [[begin for begin, _ in box] for box in boxes]
        self._block = _block(combine, math.prod(sizes.values()))
        self._product = len(shapes) > 1
        self._cuts: dict[tuple[str, ...], _Tiling] = {}

    def tiling_for(self, arrays: Sequence[Any]) -> _Tiling:
        """Returns the tiling for operands with these strides.

        The blocks of a reduction follow the order of its dimensions in memory. The product of a matrix with its own
        transpose is cut into square tiles.
        """
        names = self._rule.operands[0]
        if self._product:
            order: tuple[str, ...] = ("square",) if self._is_square(*arrays) else ()
        else:
            order = tuple([names[d] for d in memory_order(arrays[0])])
        if order not in self._cuts:
            if self._product:
                most = _SQUARE if order else _FACTORS if self.value.dtype.kind in "fc" else _PLAIN
                sides = _product_sides(self._rule, {**self._sizes, **self._vanishing}, most)
                if order:
                    sides |= dict.fromkeys(self._rule.result, min(sides[name] for name in self._rule.result))
            else:
                sides = _sides(order, self._vanishing, self._local, self._sizes, self._block)
            tiles = [(tile, part[2]) for part in self._parts for tile in self._tiles(part, sides)]
            self._cuts[order] = _Tiling(tiles, self._product and bool(order))
        return self._cuts[order]

    def _is_square(self, x1: Any, x2: Any) -> bool:
        """Whether this is the product of a matrix with its own transpose."""
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

    def _tiles(self, part: Part, sides: Mapping[str, int]) -> list[list[list[ShardContext]]]:
        """Returns the tiles of a part of the result, each a list of the blocks that it needs from each shard."""
        kept, shards, _ = part
        return [
            [
                [self._context({**tile, **block}) for block in _boxes(vanishing, sides)] for vanishing in shards
            ]
            for tile in _boxes(kept, sides)
        ]  # fmt: skip

    def _context(self, ranges: Ranges) -> ShardContext:
        boxes = [
            tuple([ranges[name] if n == self._sizes[name] else (0, 1) for name, n in zip(names, shape, strict=True)])
            for names, shape in zip(self._rule.operands, self._shapes, strict=True)
        ]
        box = tuple([ranges.get(name, (0, 1)) for name in self._rule.result])
        return ShardContext(box, tuple(boxes), self.value.shape, self._shapes, self.value.dtype)

    def __call__(self, *arrays: Any) -> Any:
        """Returns the result, a new array of the dtype of ``value`` and its shape, or that of the part that is held.

        Args:
            arrays: the operands, host arrays.

        Raises:
            DeviceMemoryError: the memory for the result or for intermediate states cannot be allocated.
        """
        return self._run(arrays).out

    def state(self, *arrays: Any) -> Any:
        """Returns the state of the monoid for the part of the operands that is held; see `__call__`."""
        if not self.monoid.partial:  # The state is the result.
            return self(*arrays)
        return self._run(arrays, finishes=False).state()

    def state_of_block(self, context: ShardContext, arrays: Sequence[Any]) -> Any:
        """Returns the state of one block of the operands."""
        if self._is_exact:
            return self.partial(np, context, *arrays, **self.params)
        return in_one_array(self.partial, context, arrays, self.params)

    def _run(self, arrays: Sequence[Any], finishes: bool = True) -> _Run:
        arrays = tuple(
            [array.T if transposed else array for array, transposed in zip(arrays, self._transposed, strict=True)]
        )
        if self._kernel is matmul:  # The whole operands are converted once, instead of every block when it is read.
            arrays = tuple([as_dtype(array, self.value.dtype) for array in arrays])
        tiling = self.tiling_for(arrays)
        job = _Run(self, tiling, arrays, finishes)
        if self._product:
            seconds = _MULTIPLICATION * math.prod(self._sizes.values())
        else:
            seconds = seconds_of(arrays[0].nbytes) * (3 if self.monoid.several else 1)
        threads = None if seconds > LONG else 1
        with Interrupts(), FloatingPointErrors(self._name), Limit(1) if self._product else _nothing:
            if self._kernel is matmul and tiling.shallow:
                each(job.sum_in_place, len(tiling.tiles), threads=threads)
            elif len(tiling.tiles) * 4 > len(tiling.blocks):
                each(job.do, len(tiling.tiles), threads=threads)
            else:
                each(job.compute, len(tiling.blocks), threads=threads)
                each(job.finish, len(tiling.tiles), threads=threads)
        return job


class _Tiling:
    """The tiles of a result and the blocks of the operands from which they are computed.

    Attributes:
        tiles: for each tile and each shard, the positions of the blocks that the tile needs.
        trees: for each tile the tree along which the states of the shards are combined.
        blocks: all these blocks in one list, in the same order.
        first: for each tile the index in ``blocks`` of its first block; one more entry is the number of blocks.
        square: whether tiles are square, and those below the diagonal are the transposes of those above.
        shallow: whether each tile needs only one block of each shard, so that it can be summed in place.
    """

    def __init__(self, tiles: list[tuple[list[list[ShardContext]], Tree]], square: bool) -> None:
        self.tiles = [tile for tile, _ in tiles]
        self.trees = [tree for _, tree in tiles]
        self.blocks = [context for tile in self.tiles for shard in tile for context in shard]
        self.first = list(itertools.accumulate([sum(map(len, tile)) for tile in self.tiles], initial=0))
        self.square = square
        self.shallow = all(len(shard) == 1 for tile in self.tiles for shard in tile)


_nothing = contextlib.nullcontext()


class _Run:
    """One execution of a `BlockedReduction`. Threads call its methods for different blocks or tiles.

    Attributes:
        out: the result; None if only states are computed.
    """

    def __init__(self, reduction: BlockedReduction, tiling: _Tiling, arrays: Sequence[Any], finishes: bool) -> None:
        self._reduction = reduction
        self._tiling = tiling
        self._arrays = arrays
        self._states: list[Any] = [None] * len(tiling.blocks)
        self._totals: list[Any] = [None] * len(tiling.tiles)
        self.out = memory_pool.empty(reduction.shape, reduction.value.dtype) if finishes else None

    def _parts(self, context: ShardContext) -> list[Any]:
        rows = zip(self._arrays, context.boxes, self._reduction.origins, strict=True)
        return [array[_within(box, origin)] for array, box, origin in rows]

    def compute(self, k: int) -> None:
        """Computes the state of the k-th block."""
        context = self._tiling.blocks[k]
        self._states[k] = self._reduction.state_of_block(context, self._parts(context))

    def finish(self, n: int) -> None:
        """Merges the states of the blocks of the n-th tile and writes the tile to the result."""
        if self._reduction.monoid.several:  # An overflow was already reported when the state was computed.
            with np.errstate(invalid="ignore"):
                self._merge(n)
        else:
            self._merge(n)

    def _merge(self, n: int) -> None:
        tile, begin = self._tiling.tiles[n], self._tiling.first[n]
        monoid = self._reduction.monoid
        ends = list(itertools.accumulate(map(len, tile), initial=begin))

        def state(shard: int) -> Any:
            own = slice(ends[shard], ends[shard + 1])
            states, self._states[own] = self._states[own], [None] * len(tile[shard])
            return self._by_pairs(states)

        total = combine(self._tiling.trees[n], state, functools.partial(monoid.merge, np))
        context = tile[0][0]
        if self.out is None:
            self._totals[n] = total
        else:
            result = monoid.finish(np, context, total, **self._reduction.params)
            self.out[_within(context.box, self._reduction.origin)] = result

    def state(self) -> Any:
        """Returns the states of all tiles as one state."""
        if len(self._totals) == 1:
            return self._totals[0]
        places = [_within(tile[0][0].box, self._reduction.origin) for tile in self._tiling.tiles]

        def joined(parts: Sequence[Any]) -> Any:
            if type(parts[0]) in (int, float):  # It is the same number for each tile.
                return parts[0]
            whole = memory_pool.empty(self._reduction.shape, parts[0].dtype)
            for place, part in zip(places, parts, strict=True):
                whole[place] = part
            return whole

        return tuple(map(joined, zip(*self._totals, strict=True)))

    def do(self, n: int) -> None:
        """Computes the states of the blocks of the n-th tile and then the tile."""
        for k in range(self._tiling.first[n], self._tiling.first[n + 1]):
            self.compute(k)
        self.finish(n)

    def sum_in_place(self, n: int) -> None:
        """Computes the n-th tile of a matrix product in place, adding the products of the shards along their tree."""
        tile = self._tiling.tiles[n]
        spare: list[Any] = []
        index = _within(tile[0][0].box, self._reduction.origin)
        assert self.out is not None  # The state of a product is the result.
        if self._tiling.square and index[0].start > index[1].start:
            return
        out = self.out[(*index, ...)]  # The ellipsis makes a 0-d tile an array, which `out=` requires.

        def product(shard: int) -> Any:
            into = out if not shard else spare.pop() if spare else memory_pool.empty(out.shape, out.dtype)
            x1, x2 = self._parts(tile[shard][0])
            return np.matmul(x1, x2, out=into)

        def add(earlier: Any, later: Any) -> Any:
            spare.append(later)
            return np.add(earlier, later, out=earlier)

        combine(self._tiling.trees[n], product, add)
        if self._tiling.square and index[0].start < index[1].start:
            self.out[index[::-1]] = out.T

    def _by_pairs(self, states: list[Any]) -> Any:
        merge = self._reduction.monoid.merge
        while len(states) > 1:
            odd = states[len(states) & ~1 :]
            states = [merge(np, a, b) for a, b in zip(states[::2], states[1::2], strict=False)] + odd
        return states[0]


@implements(linear_algebra.matmul, "blockwise")
def matmul(xp: Any, context: ShardContext, x1: Any, x2: Any) -> Any:
    """The kernel of a matrix product: ``xp.matmul(x1, x2)``."""
    return xp.matmul(x1, x2)


def in_one_array(
    kernel: Callable[..., Any], context: ShardContext, arrays: Sequence[Any], params: Mapping[str, Any]
) -> Any:
    """Runs the kernel of a reduction on parts of the operands, host arrays, and returns its result or state.

    The bits are those that the parts give in one array, in whatever memory they are. (Products are BLAS's.)
    """
    box, shape, axes = context.boxes[0], context.shapes[0], reduced_axes(params.get("axis"), len(context.boxes[0]))
    if len(arrays) > 1 or "axis" not in params or not may_differ(box, shape, axes):
        return kernel(np, context, *arrays, **params)
    x, twice = as_part(arrays[0], box, shape, axes)
    result = kernel(np, context, x, **params)
    if not twice:
        return result
    kept = [d for d in range(x.ndim) if params.get("keepdims") or d not in axes]
    once = tuple([slice(0, 1) if d in twice else slice(None) for d in kept])
    return each_array(lambda array: array[once], result)


def is_long(combine: str, rule: Rule, sizes: Mapping[str, int]) -> bool:
    """Whether a reduction has more than one block, or a product is so large that BLAS would use its own threads.

    Args:
        combine: the name of the monoid that merges states.
        rule: names the dimensions of the operands and of the result.
        sizes: the size of every name.
    """
    size = math.prod(sizes.values())
    if len(rule.operands) == 1:
        return size > _block(combine, size)
    x1, x2 = [set(names) & set(rule.result) for names in rule.operands]
    thin = 1 in [math.prod(sizes[name] for name in own) for own in (x1 - x2, x2 - x1)]
    return size > (_BLAS_ALONE_THIN if thin else _BLAS_ALONE)


# -- parts of the result and their shards ----------------------------------------------------------


def _part(rule: Rule, contexts: Sequence[ShardContext], tree: Tree) -> Part:
    ranges = [_ranges(rule, context) for context in contexts]
    stays = {name: ends for name, ends in ranges[0].items() if name in rule.result}
    return stays, [{name: ends for name, ends in mine.items() if name not in stays} for mine in ranges], tree


def _ranges(rule: Rule, context: ShardContext) -> dict[str, tuple[int, int]]:
    """Returns the range of each name within the shards of one device."""
    ranges: dict[str, tuple[int, int]] = {}
    for names, box in zip(rule.operands, context.boxes, strict=True):
        for name, ends in zip(names, box, strict=True):
            if name not in ranges or ranges[name] == (0, 1):  # A size of 1 broadcasts to the range of another operand.
                ranges[name] = ends
    return ranges


def _as_matrices(rule: Rule, combine: str) -> tuple[Rule, tuple[bool, ...]] | None:
    """Returns the rule of the equivalent matrix product, and for each operand whether it is transposed for it.

    None if ``rule`` is not a sum of products of two matrices over one shared dimension with a 2-d result.
    """
    if combine != "sum" or list(map(len, rule.operands)) != [2, 2]:
        return None
    x1, x2 = rule.operands
    gone = [name for name in x1 if name not in rule.result]
    if len(gone) != 1 or len(rule.result) != 2:
        return None
    transposed = x1[1] not in gone, x2[0] not in gone
    operands = tuple([names[::-1] if turned else names for names, turned in zip((x1, x2), transposed, strict=True)])
    return rule._replace(operands=operands), transposed


# -- blocks ----------------------------------------------------------------------------------------


def _block(combine: str, size: int) -> int:
    """Returns the number of elements of a block of a reduction of ``size`` elements."""
    return _CACHED if MONOIDS[combine].several else max(min(size // _BLOCKS, _LARGE), _BLOCK)


def _sides(
    names: Sequence[str], gone: Mapping[str, int], local: Mapping[str, int], sizes: Mapping[str, int], size: int
) -> dict[str, int]:
    """Returns the side of a block of a reduction along each name, for blocks of about ``size`` elements.

    Args:
        names: the names of the operand's dimensions, in their order in memory.
        gone: the names that are reduced, with their sizes in a shard. Their sides depend only on shards.
        local: the size of every name in a shard.
        sizes: the size of every name in the array. Dimensions that are kept may be cut anywhere.
        size: the number of elements of a block.
    """
    behind = names[max([names.index(name) for name in gone], default=len(names)) + 1 :]
    width = min(math.prod(local[name] for name in behind), _WIDTH)
    sides = _filled([n for n in names if n in gone], gone, size // max(width, 1))
    sides |= _filled([n for n in names if n not in gone], sizes, size // math.prod(sides.values()))
    return sides


def _product_sides(rule: Rule, sizes: Mapping[str, int], most: tuple[int, int, int]) -> dict[str, int]:
    """Returns the side of a block of a product along each name; ``most`` limits rows, columns and multiplications."""
    ours, theirs = [[n for n in names if n in rule.result] for names in rule.operands]
    mine = [n for n in ours if n not in theirs]
    # Small products are cut, too, so that several threads take part.
    rows = max(math.prod(sizes[n] for n in mine) // 4, _ROWS)
    sides = _filled(mine, sizes, min(rows, most[0]))
    sides |= _filled([n for n in theirs if n not in ours], sizes, most[1])
    least = _DEPTH[0] if most is not _PLAIN else 1
    depth = min(max(most[2] // math.prod(sides.values()), least), _DEPTH[1])
    sides |= _filled([n for n in rule.operands[0] if n not in rule.result], sizes, depth)
    both = [n for n in ours if n in theirs]
    return sides | _filled(both, sizes, most[2] // math.prod(sides.values()))


def _filled(names: Sequence[str], sizes: Mapping[str, int], size: int) -> dict[str, int]:
    """Returns sides with a product of at most ``size``: from the last name on, each is as long as the rest allows."""
    sides = {}
    for name in reversed(names):
        sides[name] = max(min(sizes[name], size), 1)
        size //= sides[name]
    return sides


def _boxes(ranges: Ranges, sides: Mapping[str, int]) -> list[dict[str, tuple[int, int]]]:
    """Cuts ranges into boxes with the given sides and returns the boxes in row-major order."""
    runs = [
        [(at, min(at + sides[name], end)) for at in range(begin, end, sides[name])]
        for name, (begin, end) in ranges.items()
    ]
    return [dict(zip(ranges, box, strict=True)) for box in itertools.product(*runs)]


def _within(box: Box, origin: Sequence[int]) -> tuple[Any, ...]:
    """Returns the index of a box in an array that begins at ``origin``."""
    return tuple([slice(begin - at, end - at) for (begin, end), at in zip(box, origin, strict=True)])
