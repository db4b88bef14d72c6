"""The cells of a sharded array: the boxes of it that lie in one memory as one buffer, of which its shards are views."""

from __future__ import annotations

import functools
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from shardtensor.sharding.layout import Grid, Ints

Part: TypeAlias = tuple[int, tuple[slice, ...] | None]
"""The number of a cell, and the index of a box within it; None for the whole cell."""


@dataclass(eq=False)
class Cells:
    """The cells of a sharded array.

    Attributes:
        grid: the grid of the cells: each has one holder, the first of the devices that have their shards in it.
        positions: for each cell the positions of these devices in the mesh.
        shards: the cell of each device of the mesh, and the index of its shard within the cell.
    """

    grid: Grid
    positions: Sequence[Sequence[int]]
    shards: Sequence[Part]

    @property
    def apart(self) -> bool:
        """Whether every device has a cell of its own."""
        return len(self.positions) == len(self.shards)

    def parts(self, groups: Sequence[Sequence[int]]) -> list[Part] | None:
        """Returns, for each group of devices, the cell that their shards are in, and the index of the box in it that
        they tile; None if the shards of a group are in several cells, or do not tile a box.

        Args:
            groups: the positions of the devices of each group.
        """
        parts = [self._part(group) for group in groups]
        return None if None in parts else parts  # type: ignore[return-value]

    def _part(self, group: Sequence[int]) -> Part | None:
        numbers = {self.shards[k][0] for k in group}
        if len(numbers) > 1:
            return None
        (number,) = numbers
        if len(group) == len(self.positions[number]):
            return number, None
        boxes = {tuple([(s.start, s.stop) for s in index]) for k in group if (index := self.shards[k][1]) is not None}
        if not boxes:
            return number, None
        outer = [(min(b[d][0] for b in boxes), max(b[d][1] for b in boxes)) for d in range(len(self.grid.offsets))]
        tiled = sum(map(_size, boxes)) == _size(outer)
        return (number, tuple([slice(*ends) for ends in outer])) if tiled else None


def _size(box: Sequence[tuple[int, int]]) -> int:
    return math.prod([end - begin for begin, end in box])


@functools.lru_cache(1024)
def cells(grid: Grid, memories: tuple[Hashable, ...]) -> Cells:
    """Returns the cells of an array.

    Where the shards in each memory tile a box of the array, and these boxes form a grid, each of them is a cell.
    Otherwise each distinct shard in a memory is a cell. Replicas in one memory are therefore in one cell.

    Args:
        grid: the grid of the array.
        memories: what identifies the memory of each device, in mesh order.
    """
    numbers = {memory: n for n, memory in enumerate(dict.fromkeys(memories))}
    if len(numbers) == len(memories):
        return Cells(grid, [[k] for k in range(len(memories))], [(k, None) for k in range(len(memories))])
    groups: list[list[int]] = [[] for _ in numbers]
    for k, memory in enumerate(memories):
        groups[numbers[memory]].append(k)
    layout = _boxes(grid, groups)
    if layout is None:
        parts, split = grid.linear_parts().tolist(), dict[tuple[Hashable, int], list[int]]()
        for k, pair in enumerate(zip(memories, parts, strict=True)):
            split.setdefault(pair, []).append(k)
        groups = list(split.values())
        layout = grid.offsets, grid.parts[[group[0] for group in groups]]
    cell_grid = Grid(tuple([grid.devices[group[0]] for group in groups]), *layout)
    shards: list[Part] = [(0, None)] * len(memories)
    for number, group in enumerate(groups):
        outer = cell_grid.box(number)
        for k in group:
            inner = grid.box(k)
            within = tuple([slice(a - at, b - at) for (a, b), (at, _) in zip(inner, outer, strict=True)])
            shards[k] = number, None if inner == outer else within
    return Cells(cell_grid, groups, shards)


def _boxes(grid: Grid, groups: Sequence[Sequence[int]]) -> tuple[tuple[Ints, ...], Ints] | None:
    """Returns the offsets and the parts of the grid of the boxes that the shards of each group tile; None if there is
    no such grid.
    """
    rows = [grid.parts[group] for group in groups]
    low, high = np.stack([r.min(axis=0) for r in rows]), np.stack([r.max(axis=0) + 1 for r in rows])
    counts = [len(set(map(tuple, r.tolist()))) for r in rows]
    if counts != (high - low).prod(axis=1).tolist():
        return None
    offsets, parts = [], np.zeros_like(low)
    for d, bounds in enumerate(grid.offsets):
        begins, ends = np.unique(low[:, d]), np.unique(high[:, d])
        parts[:, d] = np.searchsorted(begins, low[:, d])
        if not np.array_equal(begins[1:], ends[:-1]) or not np.array_equal(ends[parts[:, d]], high[:, d]):
            return None
        offsets.append(bounds[[*begins, ends[-1]]])
    return tuple(offsets), parts
