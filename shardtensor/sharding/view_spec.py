"""Windows: what NumPy's views see of an array, as arithmetic on indices. No arrays are touched here.

A window is a chain of boxes over an array in row-major order. A box takes along each dimension one index, or a run of
them with a step, and gives the dimensions that are left in any order; between two boxes the elements are given another
shape. Indexing, transposition, flip, squeeze and their like compose into one box. The strides that the window would
have in NumPy (in elements) are kept along, because they decide whether a reshape is a view or a copy.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from shardtensor.backend.protocol import Backend
from shardtensor.sharding.copy_plan import Line, Region
from shardtensor.sharding.index import Entry, Index, Span, to_numpy
from shardtensor.sharding.layout import Grid, Shape
from shardtensor.sharding.spec import Chain

# -- boxes -----------------------------------------------------------------------------------------


class BoxIndex:
    """One index or run of each dimension of an array; the runs, in some order, are the dimensions of the result.

    Attributes:
        over: the shape of the array.
        entries: one for each of its dimensions: an index, or a run.
        order: for each dimension of the result the dimension that it walks; None for a new one, of size 1.
        shape: of the result.
    """

    __slots__ = ("entries", "order", "over", "shape")

    def __init__(
        self, over: Shape, entries: tuple[int | Span, ...], order: tuple[int | None, ...], shape: Shape
    ) -> None:
        self.over = over
        self.entries = entries
        self.order = order
        self.shape = shape

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BoxIndex) and (self.over, self.entries, self.order) == (
            other.over, other.entries, other.order
        )  # fmt: skip

    def __hash__(self) -> int:
        return hash((self.over, self.entries, self.order))

    @property
    def is_whole(self) -> bool:
        """Whether it is the array as it stands."""
        return self.shape == self.over and self.order == tuple(range(len(self.over))) and self._unmoved

    @property
    def _unmoved(self) -> bool:
        return all(e == (0, n, 1) for e, n in zip(self.entries, self.over, strict=True))

    def at(self, index: Index) -> BoxIndex:
        """What an index takes of this box."""
        entries, shape = list(self.entries), []
        order: list[int | None] = []
        walked = iter(self.order)
        for entry in index:
            if entry is None:
                order.append(None)
                shape.append(1)
                continue
            d = next(walked)
            if type(entry) is int:
                if d is not None:
                    start, _, step = entries[d]  # type: ignore[misc]
                    entries[d] = start + entry * step
                continue
            first, count, by = entry  # type: ignore[misc]
            if d is not None:
                start, _, step = entries[d]  # type: ignore[misc]
                entries[d] = (start + first * step, count, step * by if count > 1 else 1)
            order.append(d)
            shape.append(count)
        return BoxIndex(self.over, tuple(entries), tuple(order), tuple(shape))

    def permuted(self, axes: tuple[int, ...]) -> BoxIndex:
        """With its dimensions in the order ``axes``."""
        return BoxIndex(
            self.over, self.entries, tuple([self.order[a] for a in axes]), tuple([self.shape[a] for a in axes])
        )

    @property
    def in_order(self) -> bool:
        """Whether the result's dimensions walk the array's in their own order."""
        walked = [d for d in self.order if d is not None]
        return walked == sorted(walked)

    @property
    def axes(self) -> tuple[int, ...]:
        """How the dimensions that the entries leave must be permuted."""
        walked = [d for d in self.order if d is not None]
        left = sorted(walked)
        return tuple([left.index(d) for d in walked])

    @property
    def new(self) -> Index:
        """The index that then adds the new dimensions."""
        sizes = zip(self.order, self.shape, strict=True)
        return Index([None if d is None else (0, n, 1) for d, n in sizes])

    @property
    def index(self) -> Index:
        """Entries and new dimensions as one index, if they are in order."""
        out: list[Entry] = []
        at = 0
        for d in self.order:
            if d is None:
                out.append(None)
                continue
            out.extend(self.entries[at : d + 1])
            at = d + 1
        return Index((*out, *self.entries[at:]))

    def of(self, backend: Backend, array: Any) -> Any:
        """The box of an array of a backend: a view, of no dimensions where only one element is left."""
        if len(self.order) == len(self.over) and self.order == tuple(range(len(self.over))):  # runs alone, in order
            return array if self._unmoved and self.shape == self.over else backend.view(array, to_numpy(self.entries))
        if self.in_order:
            return backend.view(array, (*to_numpy(self.index), Ellipsis))
        return self.arranged(backend.xp, backend.view(array, (*to_numpy(self.entries), Ellipsis)))

    def arranged(self, xp: Any, taken: Any) -> Any:
        """What the entries took of an array, with its dimensions in the box's order."""
        taken = xp.permute_dims(taken, self.axes)
        return taken[to_numpy(self.new)] if None in self.order else taken


@functools.lru_cache(4096)
def whole_box(shape: Shape) -> BoxIndex:
    """The box that takes all."""
    return BoxIndex(shape, tuple([(0, n, 1) for n in shape]), tuple(range(len(shape))), shape)


def box_of(index: Index, shape: Shape) -> BoxIndex:
    """What an index takes of an array of that shape."""
    return whole_box(shape).at(index)


# -- windows ---------------------------------------------------------------------------------------


class ViewSpec:
    """What a view sees of an array in row-major order.

    Attributes:
        boxes: the chain, from the array to the view.
        shape: of the view.
        strides, offset: the view's place in the array, in elements, as NumPy counts them.
        chains: the mesh axes that split each dimension.
        part: ``"real"`` or ``"imag"`` where it sees a part of complex numbers.
        scalar: whether it is one element that NumPy would give as a scalar: a copy.
    """

    __slots__ = ("boxes", "chains", "offset", "part", "scalar", "shape", "strides")

    def __init__(
        self, boxes: tuple[BoxIndex, ...], strides: tuple[int, ...], offset: int, chains: tuple[Chain, ...],
        part: str | None = None, scalar: bool = False,
    ) -> None:  # fmt: skip
        self.boxes = boxes
        self.shape = boxes[-1].shape
        self.strides = strides
        self.offset = offset
        self.chains = chains
        self.part = part
        self.scalar = scalar

    @property
    def size(self) -> int:
        """How many elements it sees."""
        return math.prod(self.shape)

    @property
    def stretch(self) -> tuple[int, int]:
        """From where to where in the array its elements are."""
        ends = [s * (n - 1) for s, n in zip(self.strides, self.shape, strict=True)]
        return self.offset + sum(min(e, 0) for e in ends), self.offset + sum(max(e, 0) for e in ends) + 1

    @property
    def positions(self) -> npt.NDArray[np.int64]:
        """Where in the flattened array each of its elements is."""
        flat = np.full(self.shape, self.offset, np.int64)
        for d, (n, stride) in enumerate(zip(self.shape, self.strides, strict=True)):
            flat += (np.arange(n) * stride).reshape((n,) + (1,) * (len(self.shape) - d - 1))
        return flat

    def at(self, index: Index, scalar: bool = False) -> ViewSpec:
        """What an index takes of it."""
        strides, offset, w = [], self.offset, 0
        chains: list[Chain] = []
        for entry in index:
            if entry is None:
                strides.append(0)
                chains.append(())
                continue
            stride = self.strides[w]
            if type(entry) is int:
                offset += entry * stride
            else:
                start, _, step = entry  # type: ignore[misc]
                offset += start * stride
                strides.append(stride * step)
                chains.append(self.chains[w])
            w += 1
        boxes = (*self.boxes[:-1], self.boxes[-1].at(index))
        return ViewSpec(boxes, tuple(strides), offset, tuple(chains), self.part, scalar)

    def permuted(self, axes: tuple[int, ...]) -> ViewSpec:
        """With its dimensions in the order ``axes``."""
        boxes = (*self.boxes[:-1], self.boxes[-1].permuted(axes))
        strides, chains = tuple([self.strides[a] for a in axes]), tuple([self.chains[a] for a in axes])
        return ViewSpec(boxes, strides, self.offset, chains, self.part)

    def reshaped(self, shape: Shape) -> ViewSpec | None:
        """In another shape; None where NumPy would have to copy."""
        if self.size == 1:
            return self._one(shape)
        strides = reshaped_strides(self.shape, self.strides, shape)
        if strides is None:
            return None
        boxes, chains = (*self.boxes, whole_box(shape)), reshaped_chains(self.shape, shape, self.chains)[1]
        return ViewSpec(boxes, strides, self.offset, chains, self.part)

    @property
    def turns(self) -> bool:
        """Whether it walks a dimension backwards."""
        entries = [e for box in self.boxes for e in box.entries]
        return any(type(e) is tuple and e[2] < 0 for e in entries)

    @property
    def place(self) -> Index:
        """Where in the array its first element is."""
        where, rest = [], self.offset
        for n in reversed(self.boxes[0].over):
            rest, i = divmod(rest, n)
            where.append(i)
        return Index(reversed(where))

    def _one(self, shape: Shape) -> ViewSpec:
        """The one element that it sees, in a shape of ones."""
        box = BoxIndex(self.boxes[0].over, tuple(self.place), (None,) * len(shape), shape)  # type: ignore[arg-type]
        return ViewSpec((box,), (0,) * len(shape), self.offset, ((),) * len(shape), self.part)

    def only(self, part: str | None) -> ViewSpec:
        """The real or imaginary part of what it would see."""
        return ViewSpec(self.boxes, self.strides, self.offset, self.chains, part)

    def of(self, backend: Backend, array: Any) -> Any:
        """The window on an array: a view of it, if the array is in row-major order or the chain has one box."""
        array = self.boxes[0].of(backend, array)
        for box in self.boxes[1:]:
            array = box.of(backend, backend.xp.reshape(array, box.over))
        return getattr(array, self.part) if self.part else array

    def same(self, other: ViewSpec) -> bool:
        """Whether both see the same elements in the same order."""
        mine = (self.shape, self.offset, self.part, _walked(self))
        return mine == (other.shape, other.offset, other.part, _walked(other))


def _walked(window: ViewSpec) -> list[int]:
    return [s for s, n in zip(window.strides, window.shape, strict=True) if n > 1]


@functools.lru_cache(4096)
def whole_window(shape: Shape, chains: tuple[Chain, ...]) -> ViewSpec:
    """The window that sees all of an array of that shape, split along those mesh axes."""
    strides = tuple([math.prod(shape[d + 1 :]) for d in range(len(shape))])
    return ViewSpec((whole_box(shape),), strides, 0, chains)


def reshape_groups(old: Shape, new: Shape) -> list[tuple[list[int], list[int]]]:
    """Which dimensions become which: runs of old and new dimensions with equal products, as short as can be.
    Dimensions of size 1 belong to none. Where there is no element, all become all.
    """
    if 0 in old:
        return [([*range(len(old))], [*range(len(new))])]
    olds, news = ([d for d, n in enumerate(s) if n != 1] for s in (old, new))
    groups = []
    while olds or news:
        left, right = [olds.pop(0)], [news.pop(0)]
        a, b = old[left[0]], new[right[0]]
        while a != b:
            if a < b:
                left.append(olds.pop(0))
                a *= old[left[-1]]
            else:
                right.append(news.pop(0))
                b *= new[right[-1]]
        groups.append((left, right))
    return groups


@functools.lru_cache(4096)
def reshaped_strides(old: Shape, strides: tuple[int, ...], new: Shape) -> tuple[int, ...] | None:
    """The strides of an array in another shape; None where its elements do not lie so that there are any."""
    out = [0] * len(new)
    for left, right in reshape_groups(old, new):
        for a, b in itertools.pairwise(left):
            if strides[a] != old[b] * strides[b]:
                return None
        stride = strides[left[-1]] if left else 0
        for d in reversed(right):
            out[d] = stride
            stride *= new[d]
    return tuple(out)


@functools.lru_cache(4096)
def reshaped_chains(old: Shape, new: Shape, chains: tuple[Chain, ...]) -> tuple[tuple[Chain, ...], tuple[Chain, ...]]:
    """What splits the dimensions before and after a reshape: those that merge or part have their split at the first."""
    before: list[Chain] = [()] * len(old)
    after: list[Chain] = [()] * len(new)
    for left, right in reshape_groups(old, new):
        chain = tuple(itertools.chain.from_iterable(chains[d] for d in left))
        if left:
            before[left[0]] = chain
        if right:
            after[right[0]] = chain
    return tuple(before), tuple(after)


# -- windows on shards -----------------------------------------------------------------------------


class ShardedBox:
    """What a window sees of a sharded array, each device with the part of it that it has already.

    Attributes:
        grid: the window's shape, cut where the array is, on those devices that have a part of it (or an empty one).
        positions: where these devices stand in the array's own grid.
        boxes: for each of them, the box within its shard, in the last shape of the window's chain.
    """

    __slots__ = ("boxes", "grid", "positions")

    def __init__(self, grid: Grid, positions: list[int], boxes: list[BoxIndex]) -> None:
        self.grid = grid
        self.positions = positions
        self.boxes = boxes


def located(grid: Grid, boxes: Sequence[BoxIndex]) -> ShardedBox | None:
    """The part of a window that lies in each shard; None where that is no box of the window's last shape."""
    for earlier, later in itertools.pairwise(boxes):
        if not earlier.is_whole:
            return None
        same = reshape_grid(grid, earlier.shape, later.over)
        if same is None:
            return None
        grid = same
    return aligned(grid, boxes[-1])


def aligned(grid: Grid, box: BoxIndex) -> ShardedBox:
    """The part of a box that lies in each shard."""
    here = np.ones(len(grid.devices), bool)
    for d, entry in enumerate(box.entries):
        if isinstance(entry, int):
            here &= grid.parts[:, d] == np.searchsorted(grid.offsets[d], entry, "right") - 1
    positions = np.flatnonzero(here).tolist()
    bounds, columns = [], []
    for walked in box.order:
        if walked is None:
            bounds.append(np.array([0, 1], np.int64))
            columns.append(np.zeros(len(positions), np.int64))
            continue
        start, count, step = box.entries[walked]  # type: ignore[misc]
        offsets, parts = grid.offsets[walked], grid.parts[positions, walked]
        if step > 0:
            cuts = -((start - offsets) // step)
        else:  # the walk goes down: it meets the parts in reverse order
            cuts = ((start - offsets) // -step + 1)[::-1]
            parts = len(offsets) - 2 - parts
        cuts = np.clip(cuts, 0, count)
        bounds.append(cuts)
        columns.append(parts)
    parts = np.stack(columns, axis=1) if columns else np.zeros((len(positions), 0), np.int64)
    devices = tuple([grid.devices[k] for k in positions])
    mine = Grid(devices, tuple(bounds), parts)
    return ShardedBox(mine, positions, [_local(grid, box, mine, n, k) for n, k in enumerate(positions)])


def _local(grid: Grid, box: BoxIndex, mine: Grid, n: int, k: int) -> BoxIndex:
    """The box within the shard of the device at position ``k``, which is the aligned grid's holder ``n``."""
    entries: list[int | Span] = []
    ends = dict(zip(box.order, mine.box(n), strict=True))
    for d, (entry, (begin, _)) in enumerate(zip(box.entries, grid.box(k), strict=True)):
        if isinstance(entry, int):
            entries.append(entry - begin)
        else:
            (start, _, step), (low, high) = entry, ends[d]
            entries.append((start + low * step - begin if high > low else 0, high - low, step))
    return BoxIndex(grid.shape(k), tuple(entries), box.order, mine.shape(n))


def reshape_grid(grid: Grid, old: Shape, new: Shape) -> Grid | None:
    """The same shards of the same elements in another shape; None where a shard is no box of that shape."""
    bounds: list[Any] = [np.array([0, n], np.int64) for n in new]
    parts = np.zeros((len(grid.devices), len(new)), np.int64)
    for left, right in reshape_groups(old, new):
        if any(len(grid.offsets[d]) > 2 for d in left[1:]):
            return None
        if not left or len(grid.offsets[left[0]]) == 2:
            continue
        rest = math.prod(new[d] for d in right[1:])
        flat = grid.offsets[left[0]] * math.prod(old[d] for d in left[1:])
        if not right or (flat % rest if rest else flat).any():
            return None
        bounds[right[0]] = flat // rest if rest else flat
        parts[:, right[0]] = grid.parts[:, left[0]]
    split = {d for left, _ in reshape_groups(old, new) for d in left}
    if any(len(grid.offsets[d]) > 2 for d in range(len(old)) if d not in split):
        return None  # a dimension of size 1 whose parts are empty but one
    return Grid(grid.devices, tuple(bounds), parts)


def broadcast_region(shape: Shape, onto: Shape) -> Region:
    """The region that repeats an array to a shape that it broadcasts to; it may have ones too many in front."""
    lead = len(onto) - len(shape)
    lines = [Line(0, n, None) for n in onto]
    fixed = []
    for d, n in enumerate(shape):
        if lead + d >= 0 and n == onto[lead + d]:
            lines[lead + d] = Line(0, n, d)
        else:
            fixed.append((d, 0))
    return Region(0, tuple(lines), tuple(fixed))
