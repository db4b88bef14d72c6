"""View specs: NumPy's view semantics as arithmetic on indices, without arrays.

A view spec is a chain of box indices over an array in row-major order. A box index selects one index or a range with a
step along each dimension and permutes the remaining dimensions; between two box indices, the elements are reshaped.
Indexing, transposition, flip, squeeze and similar operations compose into one box index. A view spec also has the
strides (in elements) that the view would have in NumPy, because they decide whether a reshape is a view or a copy.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from shardtensor.backend.protocol import Backend
from shardtensor.backend.registry import array_backend
from shardtensor.sharding.copy_plan import Line, Region, with_new_dimensions
from shardtensor.sharding.index import Index, Span, to_numpy
from shardtensor.sharding.layout import Grid, Ints, Shape
from shardtensor.sharding.spec import Chain

# -- box indices -----------------------------------------------------------------------------------


@dataclass(slots=True, unsafe_hash=True)  # Frozen instances would take longer to create on each access to a tensor.
class BoxIndex:
    """An integer index or a slice of each dimension of an array; the sliced dimensions form the result, in any order.

    Attributes:
        over: the shape of the array.
        entries: an integer index or a `Span` for each dimension of the array.
        order: for each dimension of the result its dimension in the array; None for a new dimension of size 1.
        shape: the shape of the result.
    """

    over: Shape
    entries: tuple[int | Span, ...]
    order: tuple[int | None, ...]
    shape: Shape
    _steps: tuple[Any, ...] | None = field(default=None, init=False, repr=False, compare=False)

    @property
    def is_whole(self) -> bool:
        """Whether it selects the whole array with its dimensions in order."""
        return (
            self.shape == self.over
            and self.order == tuple(range(len(self.over)))
            and all(e == (0, n, 1) for e, n in zip(self.entries, self.over, strict=True))
        )

    def at(self, index: Index) -> BoxIndex:
        """Returns the box index that applies ``index`` to the result of this one."""
        entries, shape = list(self.entries), []
        order: list[int | None] = []
        dimensions = iter(self.order)
        for entry in index:
            d = None if entry is None else next(dimensions)
            start, _, step = (0, 1, 1) if d is None else entries[d]  # type: ignore[misc]
            if type(entry) is int:
                if d is not None:
                    entries[d] = start + entry * step
                continue
            first, count, by = entry or (0, 1, 1)  # type: ignore[misc]
            if d is not None:
                entries[d] = (start + first * step, count, step * by if count > 1 else 1)
            order.append(d)
            shape.append(count)
        return BoxIndex(self.over, tuple(entries), tuple(order), tuple(shape))

    def permuted(self, axes: tuple[int, ...]) -> BoxIndex:
        """Returns the box index with the dimensions of the result permuted to the order ``axes``."""
        order, shape = tuple([self.order[a] for a in axes]), tuple([self.shape[a] for a in axes])
        return BoxIndex(self.over, self.entries, order, shape)

    @property
    def in_order(self) -> bool:
        """Whether the dimensions of the result are in the order of the array's dimensions."""
        dimensions = [d for d in self.order if d is not None]
        return dimensions == sorted(dimensions)

    @property
    def axes(self) -> tuple[int, ...]:
        """The permutation of the sliced dimensions, as an argument of ``permute_dims``."""
        dimensions = [d for d in self.order if d is not None]
        return tuple([sorted(dimensions).index(d) for d in dimensions])

    @property
    def new(self) -> Index:
        """The index that inserts the new dimensions after the permutation."""
        sizes = zip(self.order, self.shape, strict=True)
        return Index([None if d is None else (0, n, 1) for d, n in sizes])

    @property
    def index(self) -> Index:
        """The entries and the new dimensions as one index; valid only if `in_order` is true."""
        return Index(with_new_dimensions(self.entries, self.order))

    def of(self, backend: Backend, array: Any) -> Any:
        """Applies the box index to an array of a backend; the result is a view, 0-d if all entries are integers."""
        index, is_arranged = (self._steps or self._prepared())[:2]
        if index is not None:
            array = backend.view(array, index)
        return array if is_arranged else self.arranged(backend.xp, array)

    def arranged(self, xp: Any, array: Any) -> Any:
        """Permutes ``array``, the elements at `entries`, to the order of the result and inserts the new dimensions."""
        *_, axes, new = self._steps or self._prepared()
        array = xp.permute_dims(array, axes)
        return array if new is None else array[new]

    def _prepared(self) -> tuple[Any, ...]:
        """Returns the index of NumPy's form that selects the elements, None for all of them, whether it also arranges
        them, and else the permutation and the index of the new dimensions. They are kept: views are read repeatedly.
        """
        is_all = all(e == (0, n, 1) for e, n in zip(self.entries, self.over, strict=True))
        entries = self.index if self.in_order else self.entries
        index = None if is_all and None not in entries else (*to_numpy(entries), Ellipsis)
        self._steps = index, self.in_order, self.axes, to_numpy(self.new) if None in self.order else None
        return self._steps


@functools.lru_cache(4096)
def whole_box(shape: Shape) -> BoxIndex:
    """Returns the box index that selects all of an array of that shape."""
    return BoxIndex(shape, tuple([(0, n, 1) for n in shape]), tuple(range(len(shape))), shape)


def box_of(index: Index, shape: Shape) -> BoxIndex:
    """Returns the box index of an index into an array of that shape."""
    return whole_box(shape).at(index)


# -- view specs ------------------------------------------------------------------------------------


Part = str | np.dtype[Any] | tuple[str | np.dtype[Any], ...] | None


def part_steps(part: Part) -> tuple[str | np.dtype[Any], ...]:
    """Returns the views that a part consists of, each of the elements of the one before."""
    return () if part is None else part if isinstance(part, tuple) else (part,)


def part_of(array: Any, part: Part) -> Any:
    """Returns a part of the elements of an array of any library, as a view: see `ViewSpec`."""
    if part is None:
        return array
    for step in part_steps(part):
        if isinstance(step, str):
            array = getattr(array, step)
        else:
            backend = array_backend(array)
            array = array.view(step if backend is None else backend.xp.empty((0,), dtype=step).dtype)
    return array


def part_dtype(dtype: np.dtype[Any], part: Part) -> np.dtype[Any]:
    """Returns the dtype of a part of elements of ``dtype``."""
    for step in part_steps(part):
        dtype = np.empty(0, dtype).real.dtype if isinstance(step, str) else step
    return dtype


@dataclass(slots=True, eq=False)
class ViewSpec:
    """The mapping from the elements of a view to those of its base array, which is in row-major order.

    Attributes:
        boxes: the chain of box indices from the base array to the view.
        shape: the shape of the view.
        strides, offset: NumPy's strides of the view and its offset in the base array, in elements.
        chains: the mesh axes that split each dimension of the view.
        part: ``"real"`` or ``"imag"`` for a view of one part of complex numbers, a dtype for a view of the same bits as
            elements of that dtype, a tuple of these for a view of such a view, else None.
        scalar: whether it is one element that NumPy would return as a scalar, which is a copy.
    """

    boxes: tuple[BoxIndex, ...]
    strides: tuple[int, ...]
    offset: int
    chains: tuple[Chain, ...]
    part: Part = None
    scalar: bool = False
    shape: Shape = field(init=False)

    def __post_init__(self) -> None:
        self.shape = self.boxes[-1].shape

    @property
    def size(self) -> int:
        """The number of elements of the view."""
        return math.prod(self.shape)

    @property
    def extent(self) -> tuple[int, int]:
        """Begin and end of the extent of the view in the flattened base array."""
        ends = [s * (n - 1) for s, n in zip(self.strides, self.shape, strict=True)]
        return self.offset + sum(min(e, 0) for e in ends), self.offset + sum(max(e, 0) for e in ends) + 1

    @property
    def positions(self) -> npt.NDArray[np.int64]:
        """The index of each element of the view in the flattened base array, in the shape of the view."""
        flat = np.full(self.shape, self.offset, np.int64)
        for d, (n, stride) in enumerate(zip(self.shape, self.strides, strict=True)):
            flat += (np.arange(n) * stride).reshape((n,) + (1,) * (len(self.shape) - d - 1))
        return flat

    def at(self, index: Index, scalar: bool = False) -> ViewSpec:
        """Returns the view spec of an index into this view."""
        chains: list[Chain] = []
        strides, offset, d = [], self.offset, 0
        for entry in index:
            if type(entry) is int:
                offset += entry * self.strides[d]
            elif entry is None:
                strides.append(0)
                chains.append(())
                continue
            else:
                start, _, step = entry  # type: ignore[misc]
                offset += start * self.strides[d]
                strides.append(step * self.strides[d])
                chains.append(self.chains[d])
            d += 1
        boxes = (*self.boxes[:-1], self.boxes[-1].at(index))
        return ViewSpec(boxes, tuple(strides), offset, tuple(chains), self.part, scalar)

    def permuted(self, axes: tuple[int, ...]) -> ViewSpec:
        """Returns the view spec with the dimensions of the view permuted to the order ``axes``."""
        boxes = (*self.boxes[:-1], self.boxes[-1].permuted(axes))
        strides, chains = tuple([self.strides[a] for a in axes]), tuple([self.chains[a] for a in axes])
        return ViewSpec(boxes, strides, self.offset, chains, self.part)

    def reshaped(self, shape: Shape) -> ViewSpec | None:
        """Returns the view spec of this view in another shape; None if NumPy's reshape would copy."""
        if self.size == 1:
            box = BoxIndex(self.boxes[0].over, self.origin, (None,) * len(shape), shape)  # type: ignore[arg-type]
            return ViewSpec((box,), (0,) * len(shape), self.offset, ((),) * len(shape), self.part)
        strides = reshaped_strides(self.shape, self.strides, shape)
        if strides is None:
            return None
        boxes, chains = (*self.boxes, whole_box(shape)), reshaped_chains(self.shape, shape, self.chains)[1]
        return ViewSpec(boxes, strides, self.offset, chains, self.part)

    def then(self, inner: ViewSpec) -> ViewSpec | None:
        """Returns the view spec of a view of this view, which ``inner`` describes as one of an array; None if ``inner``
        reshapes what NumPy would copy.
        """
        spec = self
        for k, box in enumerate(inner.boxes):
            if k:  # It is one of the elements in another shape, or in the same one with another layout.
                reshaped = spec.reshaped(box.over)
                if reshaped is None:
                    return None
                spec = reshaped
            spec = spec.at(Index(box.entries)).permuted(box.axes).at(box.new)
        for step in part_steps(inner.part):
            spec = (spec.real_or_imag(step) or spec) if isinstance(step, str) else spec.bits(step)
        return spec

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements follow one another in memory, so that NumPy's ravel gives a view."""
        size = self.size
        if size == 1:
            return True
        whole = self.part is None or isinstance(self.part, np.dtype)
        return whole and reshaped_strides(self.shape, self.strides, (size,)) == (1,)

    @property
    def is_straight(self) -> bool:
        """Whether the elements have one stride, so that NumPy's reshape gives a view in any shape."""
        return self.size == 1 or reshaped_strides(self.shape, self.strides, (self.size,)) is not None

    @property
    def reverses(self) -> bool:
        """Whether a slice of the view has a negative step."""
        entries = [e for box in self.boxes for e in box.entries]
        return any(type(e) is tuple and e[2] < 0 for e in entries)

    @property
    def origin(self) -> Index:
        """The index of the view's first element in the base array."""
        where, rest = [], self.offset
        for n in reversed(self.boxes[0].over):
            rest, i = divmod(rest, n)
            where.append(i)
        return Index(reversed(where))

    def only(self, part: Part) -> ViewSpec:
        """Returns this view spec with another part of the elements; None gives whole elements."""
        return ViewSpec(self.boxes, self.strides, self.offset, self.chains, part)

    def real_or_imag(self, name: str) -> ViewSpec | None:
        """Returns the view spec of the part ``name`` of each element.

        Of elements that are known to be real, ``real`` is the view spec itself, and ``imag``, which is 0, is not a
        view.
        """
        steps = part_steps(self.part)
        if steps and (isinstance(steps[-1], str) or steps[-1].kind != "c"):
            return self if name == "real" else None
        return self.only((*steps, name) if steps else name)

    def bits(self, dtype: np.dtype[Any]) -> ViewSpec:
        """Returns the view spec of the bits of each element as an element of ``dtype``."""
        steps = part_steps(self.part)
        if steps and not isinstance(steps[-1], str):
            steps = steps[:-1]
        return self.only((*steps, dtype) if steps else dtype)

    def of(self, backend: Backend, array: Any) -> Any:
        """Applies the view spec to an array of a backend.

        The result is a view if the array is in row-major order or the chain has only one box index.
        """
        array = self.boxes[0].of(backend, array)
        for box in self.boxes[1:]:
            array = box.of(backend, backend.xp.reshape(array, box.over))
        return part_of(array, self.part)

    def same(self, other: ViewSpec) -> bool:
        """Whether both view specs have the same shape and map to the same elements in the same order."""
        return self._elements == other._elements

    @property
    def _elements(self) -> tuple[Any, ...]:
        strides = [s for s, n in zip(self.strides, self.shape, strict=True) if n > 1]
        return self.shape, self.offset, self.part, strides


@functools.lru_cache(4096)
def whole_view_spec(shape: Shape, chains: tuple[Chain, ...]) -> ViewSpec:
    """Returns the view spec of all elements of an array of that shape, split along the given mesh axes."""
    strides = tuple([math.prod(shape[d + 1 :]) for d in range(len(shape))])
    return ViewSpec((whole_box(shape),), strides, 0, chains)


def reshape_groups(old: Shape, new: Shape) -> list[tuple[list[int], list[int]]]:
    """Returns the groups of dimensions that a reshape merges or splits.

    A group is a run of old and a run of new dimensions with equal products, both as short as possible and not empty.
    Dimensions of size 1 belong to no group. If the array has no elements, all dimensions form one group.
    """
    if 0 in old:
        return [([*range(len(old))], [*range(len(new))])]
    common = {*itertools.accumulate(old, operator.mul)} & {*itertools.accumulate(new, operator.mul)}

    def runs(shape: Shape) -> Iterator[list[int]]:
        """Yields the runs of dimensions at whose ends the products of the sizes so far are those of both shapes."""
        run, product = [], 1
        for d, n in enumerate(shape):
            product *= n
            if n != 1:
                run.append(d)
                if product in common:
                    yield run
                    run = []

    return list(zip(runs(old), runs(new), strict=True))


@functools.lru_cache(4096)
def reshaped_strides(old: Shape, strides: tuple[int, ...], new: Shape) -> tuple[int, ...] | None:
    """Returns the strides of an array after a reshape; None if no strides describe it and NumPy would copy."""
    out = [0] * len(new)
    for left, right in reshape_groups(old, new):
        for a, b in itertools.pairwise(left):
            if strides[a] != old[b] * strides[b]:
                return None
        stride = strides[left[-1]]
        for d in reversed(right):
            out[d] = stride
            stride *= new[d]
    return tuple(out)


@functools.lru_cache(4096)
def reshaped_chains(old: Shape, new: Shape, chains: tuple[Chain, ...]) -> tuple[tuple[Chain, ...], tuple[Chain, ...]]:
    """Returns the mesh axes that split each dimension before and after a reshape without transfers.

    In each group of merged or split dimensions (see `reshape_groups`), all mesh axes of the group split the first
    dimension.
    """
    before: list[Chain] = [()] * len(old)
    after: list[Chain] = [()] * len(new)
    for left, right in reshape_groups(old, new):
        before[left[0]] = after[right[0]] = tuple([axis for d in left for axis in chains[d]])
    return tuple(before), tuple(after)


# -- views of shards -------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class ShardedBox:
    """The parts of a view of a sharded array that the devices hold already.

    Attributes:
        grid: the grid of the view's shape, split where the array is, on the devices that hold a part (possibly empty).
        positions: the positions of these devices in the array's own grid.
        boxes: for each of these devices, the box index within its shard, in the last shape of the view spec's chain.
    """

    grid: Grid
    positions: list[int]
    boxes: list[BoxIndex]


def located(grid: Grid, boxes: Sequence[BoxIndex]) -> ShardedBox | None:
    """Returns the part of a view in each shard; None if a part is not a box of the view spec's last shape.

    ``grid`` has the shards of the array, and ``boxes`` is the chain of the view spec.
    """
    for earlier, later in itertools.pairwise(boxes):
        if not earlier.is_whole:
            return None
        same = reshape_grid(grid, earlier.shape, later.over)
        if same is None:
            return None
        grid = same
    return aligned(grid, boxes[-1])


def aligned(grid: Grid, box: BoxIndex) -> ShardedBox:
    """Returns the part of a box index in each shard."""
    here = np.ones(len(grid.devices), bool)
    for d, entry in enumerate(box.entries):
        if isinstance(entry, int):
            here &= grid.parts[:, d] == np.searchsorted(grid.offsets[d], entry, "right") - 1
    positions = np.flatnonzero(here).tolist()
    bounds: list[Ints] = []
    parts = np.zeros((len(positions), len(box.order)), np.int64)
    for number, dimension in enumerate(box.order):
        if dimension is None:
            bounds.append(np.array([0, 1], np.int64))
            continue
        start, count, step = box.entries[dimension]  # type: ignore[misc]
        offsets, parts[:, number] = grid.offsets[dimension], grid.parts[positions, dimension]
        if step > 0:
            cuts = -((start - offsets) // step)
        else:  # A negative step traverses the parts in reverse order.
            cuts = ((start - offsets) // -step + 1)[::-1]
            parts[:, number] = len(offsets) - 2 - parts[:, number]
        bounds.append(np.clip(cuts, 0, count))
    mine = Grid(tuple([grid.devices[k] for k in positions]), tuple(bounds), parts)
    return ShardedBox(mine, positions, [_local(grid, box, mine, n, k) for n, k in enumerate(positions)])


def _local(grid: Grid, box: BoxIndex, mine: Grid, n: int, k: int) -> BoxIndex:
    """Returns the box index within the shard at position ``k``, whose device is holder ``n`` of the grid ``mine``."""
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
    """Returns the grid of the same shards after a reshape; None if a shard is not a box of the new shape."""
    groups = reshape_groups(old, new)
    leading = {left[0] for left, _ in groups}
    if any(count > 1 for d, count in enumerate(grid.counts) if d not in leading):
        return None  # A split dimension of size 1 has one part with elements and empty ones.
    bounds: list[Any] = [np.array([0, n], np.int64) for n in new]
    parts = np.zeros((len(grid.devices), len(new)), np.int64)
    for left, right in groups:
        if grid.counts[left[0]] == 1:
            continue
        rest = math.prod(new[d] for d in right[1:])
        flat = grid.offsets[left[0]] * math.prod(old[d] for d in left[1:])
        if (flat % rest if rest else flat).any():
            return None
        bounds[right[0]] = flat // rest if rest else flat
        parts[:, right[0]] = grid.parts[:, left[0]]
    return Grid(grid.devices, tuple(bounds), parts)


def broadcast_region(shape: Shape, onto: Shape) -> Region:
    """Returns the region that broadcasts an array to the shape ``onto``; it may have extra leading ones."""
    lead = len(onto) - len(shape)
    lines = [Line(0, n, None) for n in onto]
    fixed = []
    for d, n in enumerate(shape):
        if lead + d >= 0 and n == onto[lead + d]:
            lines[lead + d] = Line(0, n, d)
        else:
            fixed.append((d, 0))
    return Region(0, tuple(lines), tuple(fixed))
