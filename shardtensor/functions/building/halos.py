"""Halos: the elements of neighbouring shards that a stencil reads around each shard."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from shardtensor.communication.schedules import Move
from shardtensor.communication.transfer import announce_reading, pieces_of
from shardtensor.communication.transfer_log import is_recording
from shardtensor.communication.transfer_plan import TransferPlan
from shardtensor.core import implements, operator
from shardtensor.functions.building.data_movement import DataMovement
from shardtensor.functions.standard.manipulation import Operand, layout_of
from shardtensor.host import memory_pool
from shardtensor.sharding.copy_plan import Line, Region
from shardtensor.sharding.layout import Grid, as_sharding
from shardtensor.sharding.mesh import Mesh
from shardtensor.tensor.tensor import ArrayLike, ShardedTensor, tensor_of
from shardtensor.tensor.value import Aval, aval

_DERIVATIVES = "of_halos"

BOUNDARIES = ("periodic", "reflect", "nearest")
"""The boundaries that repeat elements; a number is the value of all elements outside of the array."""


@operator(tags=("any dtype", "internal"))
def with_halos(x: ArrayLike, /, depth: tuple[int, ...], boundary: str | complex) -> list[ShardedTensor]:
    """Returns the shard of each device together with ``depth`` elements before and behind it in each dimension.

    Item k is a tensor on the k-th device of x's mesh. Only elements that the device does not hold are transferred.

    Args:
        x: a tensor.
        depth: for each dimension a number of elements, at most the size of the dimension.
        boundary: see `shardtensor.spmd.maps.stencils.map_overlap`.

    >>> from shardtensor.functions.building.halos import with_halos
    >>> [part.tolist() for part in with_halos(st.arange(4, device=st.make_mesh((2,), ("x",))), (1,), "periodic")]
    [[3, 0, 1, 2], [1, 2, 3, 0]]
    """


@implements(with_halos, "algorithm")
def _with_halos(x: ShardedTensor, depth: tuple[int, ...], boundary: str | complex) -> list[ShardedTensor]:
    value, fill = x._aval, None if isinstance(boundary, str) else boundary
    plan = _plan(value, depth, boundary if fill is None else None)
    arrays = plan.run((pieces_of(x),), value.dtype, fill=fill)
    return [tensor_of(part, (array,)) for part, array in zip(_parts(value, depth), arrays, strict=True)]


@implements(with_halos, "infer")
def _infer_with_halos(x: ShardedTensor, depth: tuple[int, ...], boundary: str | complex) -> list[Aval]:
    announce_reading(x)
    _schedule(x._aval, depth, boundary if isinstance(boundary, str) else None).announce(_copied(x._aval))
    return _parts(x._aval, depth)


def _copied(value: Aval) -> bool:
    """Whether elements that change devices are copied here."""
    return value.memory is None and not value.backend.simulated


@functools.lru_cache(1024)
def _parts(x: Aval, depth: tuple[int, ...]) -> list[Aval]:
    return _avals(_grid(x, depth), x)


def _avals(grid: Grid, x: Aval) -> list[Aval]:
    """Returns the value of each shard of a grid, as a tensor of x's dtype on the device that holds it."""
    layouts = [as_sharding(device, x.ndim, "with_halos") for device in grid.devices]
    return [aval(grid.shape(k), x.dtype, layout, True) for k, layout in enumerate(layouts)]


@functools.lru_cache(256)
def _plan(x: Aval, depth: tuple[int, ...], boundary: str | None) -> TransferPlan:
    return TransferPlan(list(_regions(x, depth, boundary)), (x.grid,), _grid(x, depth))


@functools.lru_cache(256)
def _schedule(x: Aval, depth: tuple[int, ...], boundary: str | None) -> Move:
    regions = list(_regions(x, depth, boundary))
    return Move(regions, (x.grid,), _grid(x, depth), (x.dtype.itemsize,), "map_overlap", False)


def _grid(x: Aval, depth: tuple[int, ...]) -> Grid:
    """Returns the grid of an array in which the parts of x with their halos follow one another in each dimension."""
    grid = x.grid
    bounds = [o + 2 * n * np.arange(len(o)) for o, n in zip(grid.offsets, depth, strict=True)]
    return Grid(grid.devices, tuple(bounds), grid.parts)


def _regions(x: Aval, depth: tuple[int, ...], boundary: str | None) -> Iterator[Region]:
    """Yields the regions of the array that `_grid` describes. Without a boundary, those outside of x are absent."""
    lines = [
        [line for p in range(len(o) - 1) for line in _lines(d, o, p, n, boundary)]
        for d, (o, n) in enumerate(zip(x.grid.offsets, depth, strict=True))
    ]
    for row in itertools.product(*lines):
        fixed = tuple([(d, line.start) for d, line in enumerate(row) if line.source is None])
        yield Region(0, row, fixed)


def _lines(d: int, bounds: Any, part: int, depth: int, boundary: str | None) -> Iterator[Line]:
    """Yields the sources, along dimension ``d``, of a part with its halos: those before, inside and behind the array.

    ``start`` of a line that repeats one element is the index of that element.
    """
    size, begin, end = int(bounds[-1]), int(bounds[part]) - depth, int(bounds[part + 1]) + depth
    shift = (2 * part + 1) * depth  # from indices of x to those of the result
    before, behind = max(-begin, 0), max(end - size, 0)
    if end - behind > begin + before:
        yield Line(begin + before + shift, end - behind + shift, d, begin + before)
    sources = {
        "periodic": ((size - before, 1), (0, 1)),
        "reflect": ((before - 1, -1), (size - 1, -1)),
        "nearest": ((0, 0), (size - 1, 0)),
    }
    if boundary is not None:
        at = (begin + shift, end - behind + shift)
        for first, count, (start, step) in zip(at, (before, behind), sources[boundary], strict=True):
            if count:
                yield Line(first, first + count, d if step else None, start, step or 1)


# -- windows ---------------------------------------------------------------------------------------


class Windows(NamedTuple):
    """The windows of an array of one dimension that begin at each of ``number`` following positions.

    Attributes:
        number: the number of windows.
        width: the number of elements of each.
        before: the number of elements that are absent before the array in the first window.
    """

    number: int
    width: int
    before: int


@operator(error_name="convolve", tags=("internal",))
def with_windows(x: ArrayLike, /, windows: Windows) -> list[ShardedTensor]:
    """Returns for each device the elements of an array of one dimension that are in its part of the windows, which are
    split like the array.

    Item k is a tensor on the k-th device of x's mesh. Only elements that the device does not hold are transferred.

    >>> from shardtensor.functions.building.halos import Windows, with_windows
    >>> x = st.arange(4, device=st.make_mesh((2,), ("x",)))
    >>> [part.tolist() for part in with_windows(x, Windows(number=5, width=2, before=1))]
    [[0, 1, 2], [2, 3]]
    """


@implements(with_windows, "algorithm")
def _with_windows(x: ShardedTensor, windows: Windows) -> list[ShardedTensor]:
    value, plan = x._aval, _windows_plan(x._aval, windows)
    arrays = plan.run((pieces_of(x),), value.dtype)
    parts = _avals(_windows_grid(value, windows), value)
    return [tensor_of(part, (array,)) for part, array in zip(parts, arrays, strict=True)]


@implements(with_windows, "infer")
def _infer_with_windows(x: ShardedTensor, windows: Windows) -> list[Aval]:
    value = x._aval
    grid = _windows_grid(value, windows)
    announce_reading(x)
    if is_recording():
        regions = _windows_regions(value, windows)
        Move(regions, (value.grid,), grid, (value.dtype.itemsize,), "convolve", False).announce(_copied(value))
    return _avals(grid, value)


class Part(NamedTuple):
    """The elements of one part of windows.

    Attributes:
        begin, end: those of the array.
        before, behind: how many are absent before and behind them.
    """

    begin: int
    end: int
    before: int
    behind: int


def parts_of_windows(x: Aval, windows: Windows) -> list[Part]:
    """Returns for each device of x's mesh the elements of its windows."""
    parts = _parts_of_windows(x, windows)
    return [parts[p] for p in x.grid.parts[:, 0].tolist()]


@functools.lru_cache(1024)
def _parts_of_windows(x: Aval, windows: Windows) -> list[Part]:
    (size,), parts = x.shape, []
    bounds = x.sharding.grid((windows.number,)).offsets[0].tolist()
    for first, last in itertools.pairwise(bounds):
        begin = first - windows.before
        end = last - windows.before + windows.width - 1 if first < last else begin
        inside = min(max(begin, 0), size), max(min(end, size), 0)
        parts.append(Part(*inside, max(-begin, 0), max(end - size, 0)) if first < last else Part(0, 0, 0, 0))
    return parts


@functools.lru_cache(1024)
def _windows_grid(x: Aval, windows: Windows) -> Grid:
    bounds = np.cumsum([0, *[part.end - part.begin for part in _parts_of_windows(x, windows)]])
    return Grid(x.grid.devices, (bounds,), x.grid.parts)


def _windows_regions(x: Aval, windows: Windows) -> list[Region]:
    (bounds,) = _windows_grid(x, windows).offsets
    parts = zip(itertools.pairwise(bounds.tolist()), _parts_of_windows(x, windows), strict=True)
    return [Region(0, (Line(first, last, 0, part.begin),)) for (first, last), part in parts if first < last]


@functools.lru_cache(256)
def _windows_plan(x: Aval, windows: Windows) -> TransferPlan:
    return TransferPlan(_windows_regions(x, windows), (x.grid,), _windows_grid(x, windows))


# -- halos added back ------------------------------------------------------------------------------


@operator(variadic=True, error_name="with_halos", tags=("internal",))
def lines_copied(arrays: Sequence[ArrayLike], /, axis: int, lines: tuple[Line, ...]) -> ShardedTensor:
    """Returns the second of two arrays, with the lines of the first one in place of its own elements along an axis.

    It is what the derivative of `with_halos` consists of. The result is sharded as the second array.

    >>> from shardtensor.functions.building.halos import lines_copied
    >>> from shardtensor.sharding.copy_plan import Line
    >>> lines_copied((st.arange(4), st.zeros(3, dtype=int)), 0, (Line(1, 3, 0, 3, -1),)).tolist()
    [0, 3, 2]
    """


@implements(lines_copied, "movement")
def _lines_copied(operands: Sequence[Operand], mesh: Mesh, *, axis: int, lines: tuple[Line, ...]) -> DataMovement:
    shape = operands[1].shape
    kept, end = [], 0
    for line in sorted(lines):
        kept += [Line(end, line.begin, axis, end)] if end < line.begin else []
        end = line.end
    kept += [Line(end, shape[axis], axis, end)] if end < shape[axis] else []
    others = [Line(0, n, d) for d, n in enumerate(shape)]
    regions = [
        Region(operand, (*others[:axis], line, *others[axis + 1 :]))
        for operand, own in enumerate((lines, kept))
        for line in own
    ]

    def whole(*arrays: Any) -> Any:
        result, at = memory_pool.empty(shape, arrays[1].dtype), (slice(None),) * axis
        for array, own in zip(arrays, (lines, kept), strict=True):
            for line in own:
                end = line.start + (line.end - line.begin) * line.step
                source = slice(line.start, None if end < 0 else end, line.step)
                result[(*at, slice(line.begin, line.end))] = array[(*at, source)]
        return result

    return DataMovement(shape, layout_of(operands[1], mesh), regions, whole, copies=True)


def lines_of_halos(x: Aval, depth: int, boundary: str | complex, axis: int) -> list[Line]:
    """Returns the lines of the parts of x with their halos along an axis, one behind another: see `Line`."""
    bounds = x.grid.offsets[axis]
    kept = boundary if isinstance(boundary, str) else None
    return [line for part in range(len(bounds) - 1) for line in _lines(axis, bounds, part, depth, kept)]
