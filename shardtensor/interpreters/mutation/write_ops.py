"""What a write puts in the place of a window's elements: an edit. It knows its operands, how it is written into a view
of one buffer, and, where memories are separate, what each device needs beside it before it can write its own part.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from shardtensor.backend.device import HostArray
from shardtensor.backend.registry import backend_of
from shardtensor.communication.gather_scatter import GatherPlan, GatherRequest, last_of_each, on_device
from shardtensor.communication.transfer import TransferPlan, as_dtype, copied
from shardtensor.communication.transfer_log import is_recording, record_transfer
from shardtensor.host import blockwise as passes
from shardtensor.interpreters.mutation.advanced_indexing import AdvancedIndex, indexing_errors
from shardtensor.interpreters.mutation.views import (
    base_and_view,
    gather_unrecorded,
    local_views,
    operand_shards,
    snapshot,
)
from shardtensor.sharding.index import Index
from shardtensor.sharding.layout import Grid, Shape
from shardtensor.sharding.view_spec import ShardedBox, ViewSpec, aligned, box_of, broadcast_region, whole_box
from shardtensor.tensor.tensor import ShardedTensor


class _Itself:
    """In place of an operand: what is written, as it was before."""


ITSELF = _Itself()

Commit = Callable[[int, Any, Any, Any], None]
"""``commit(n, xp, out, old)``: writes on the n-th device of a grid into ``out``; ``old`` is what was there before."""


class WriteOp(abc.ABC):
    """What a write puts in the place of a window's elements.

    Attributes:
        name: the operator's.
        operands: what it reads.
        overwrites: whether every element of the window is written.
        turns: whether it walks a dimension of the window backwards.
        computes: whether it is a ufunc, which raises floating-point errors when everything is written.
    """

    overwrites = True
    computes = False
    turns = False

    def __init__(self, name: str, operands: Sequence[Any]) -> None:
        self.name = name
        self.operands = operands
        self.inside: Sequence[bool] = ()  # which of them see what is written
        self.value: ShardedTensor | None = None

    def is_written(self, error: BaseException) -> bool:
        """Whether what raised this error has written all the same: ufuncs raise (warnings, floating-point errors, what
        the user's own handler raises) when they are done. What they refuse was asked before.
        """
        return self.computes and not isinstance(error, MemoryError)

    def settle(self, base: ShardedTensor) -> None:
        """Takes the operands as they are now, all but those that see ``base``: before its lock is taken."""
        tensors = [isinstance(x, ShardedTensor) for x in self.operands]
        if any(tensors):
            self.inside = [here and base_and_view(x)[0] is base for x, here in zip(self.operands, tensors, strict=True)]
            self.operands = [
                snapshot(x) if here and not mine else x
                for x, here, mine in zip(self.operands, tensors, self.inside, strict=True)
            ]

    def enter(self, base: ShardedTensor, window: ViewSpec, value: ShardedTensor) -> None:
        """Takes those that see ``base`` from its ``value``, which is taken out of it."""
        self.value = value
        pairs = zip(self.operands, self.inside, strict=True)
        self.operands = [snapshot(x, base, value) if mine else x for x, mine in pairs]

    def read(self, x: Any) -> Any:
        """An operand in host memory; what may be written while it is read is copied."""
        if not _is_array(x):
            return x
        array = gather_unrecorded(x, self.name)
        return passes.copied(array) if isinstance(x, ShardedTensor) and _owner(x) is self.value else array

    @abc.abstractmethod
    def picked(self, positions: HostArray, shape: Shape) -> WriteOp:
        """The same for a base of that shape, where the window's elements are at these flat positions in it."""

    @abc.abstractmethod
    def shared(self, out: Any, old: Any) -> None:
        """Writes into a view of the one buffer."""

    @abc.abstractmethod
    def announce(self, grid: Grid) -> None:
        """Counts what separate memories would send for it, where one is shared."""

    @abc.abstractmethod
    def stage(self, grid: Grid, value: ShardedTensor) -> Commit:
        """Brings everything to the devices of a grid that cuts the window; what then writes it."""


def _owner(x: Any) -> ShardedTensor | None:
    """The tensor whose value an operand sees."""
    return base_and_view(x)[0] if isinstance(x, ShardedTensor) else None


def is_window(x: Any, base: ShardedTensor, window: ViewSpec) -> bool:
    """Whether an operand is just the elements that are written."""
    if not isinstance(x, ShardedTensor):
        return False
    owner, mine = base_and_view(x)
    return owner is base and mine.same(window)


class _Delivery:
    """How an operand gets to the devices of a grid: each gets its part, broadcast, if it has not got it."""

    def __init__(self, x: Any, grid: Grid) -> None:
        source, self.arrays = operand_shards(x)
        self.itemsize = x.dtype.itemsize
        region = broadcast_region(x.shape, tuple([int(o[-1]) for o in grid.offsets]))
        self.movement = TransferPlan((region,), (source,), grid)

    def announce(self, caller: str, copied: bool) -> None:
        """Judges and counts the move."""
        movement, n = self.movement, self.itemsize
        record_transfer(caller, movement.size * n, False, lambda: movement.records(n, copied, caller, False))

    def run(self, dtype: Any) -> tuple[Any, ...]:
        """The parts."""
        return self.movement.run((self.arrays,), dtype, as_they_lie=True)


class Elementwise(WriteOp):
    """A ufunc of operands that broadcast to the window, or (``ufunc`` None) the only operand itself."""

    def __init__(self, name: str, ufunc: str | None, operands: Sequence[Any], dtype: Any) -> None:
        super().__init__(name, operands)
        self.ufunc = ufunc
        self.dtype = dtype
        self.computes = ufunc is not None

    def enter(self, base: ShardedTensor, window: ViewSpec, value: ShardedTensor) -> None:
        """See `WriteOp`; for a ufunc the window stands for itself."""
        if self.ufunc is not None:
            self.operands = [ITSELF if is_window(x, base, window) else x for x in self.operands]
            self.inside = [mine and x is not ITSELF for x, mine in zip(self.operands, self.inside, strict=True)]
        super().enter(base, window, value)

    def picked(self, positions: HostArray, shape: Shape) -> WriteOp:
        """See `WriteOp`."""
        chosen = AdvancedIndex(np.unravel_index(positions, shape), shape)
        return Scattered(self.name, self.ufunc, chosen, self.operands, self.dtype)

    def shared(self, out: Any, old: Any) -> None:
        """See `WriteOp`."""
        if self.ufunc is None:
            passes.copy_into(out, self.read(self.operands[0]))
            return
        arrays = [old if x is ITSELF else gather_unrecorded(x, self.name) if _is_array(x) else x for x in self.operands]
        if any(isinstance(a, np.ndarray) and _overlaps(a, out) for a in arrays):
            getattr(np, self.ufunc)(*arrays, out=out)  # which sees to it
        else:
            passes.into(out, getattr(np, self.ufunc), arrays, breaks=False)

    def announce(self, grid: Grid) -> None:
        """See `WriteOp`."""
        for x in self.operands:
            if _is_array(x):
                _Delivery(x, grid).announce(self.name, copied=False)

    def stage(self, grid: Grid, value: ShardedTensor) -> Commit:
        """See `WriteOp`."""
        columns = []
        for x in self.operands:
            if not _is_array(x):
                columns.append([_plain(x)] * len(grid.devices))
                continue
            delivery = _Delivery(x, grid)
            if is_recording():
                delivery.announce(self.name, copied=True)
            parts = delivery.run(self.dtype if self.ufunc is None else x.dtype)
            if _owner(x) is value:  # what is read must not change while it is read
                parts = tuple([copied(p, d) for p, d in zip(parts, grid.devices, strict=True)])
            columns.append(list(parts))

        def commit(n: int, xp: Any, out: Any, old: Any) -> None:
            arrays = [old if c[n] is ITSELF else c[n] for c in columns]
            self._run(xp, out, arrays if self.ufunc is None else _reaching(xp, arrays, tuple(out.shape)))

        return commit

    def _run(self, xp: Any, out: Any, arrays: Sequence[Any]) -> None:
        if self.ufunc is None:
            out[...] = arrays[0]
        else:
            getattr(xp, self.ufunc)(*arrays, out=out)


def _overlaps(array: Any, out: Any) -> bool:
    """Whether an array shares memory with ``out``, but not element with element."""
    mine, its = array.__array_interface__["data"], out.__array_interface__["data"]
    same = mine == its and array.shape == out.shape and array.strides == out.strides
    return not same and np.may_share_memory(array, out)


def _is_array(x: Any) -> bool:
    return isinstance(x, (ShardedTensor, np.ndarray))


def _reaching(xp: Any, arrays: list[Any], shape: Shape) -> list[Any]:
    """Operands of a ufunc that give a result of that shape: not every library broadcasts to ``out=``."""
    shapes = [getattr(a, "shape", None) for a in arrays]
    if shape in shapes:
        return arrays
    k = next((k for k, s in enumerate(shapes) if s is not None), 0)
    return [*arrays[:k], xp.broadcast_to(xp.asarray(arrays[k]), shape), *arrays[k + 1 :]]


def _plain(x: Any) -> Any:
    """A NumPy scalar as Python's, which every library takes. Of times there is none."""
    return x.item() if isinstance(x, np.generic) and x.dtype.kind in "biufc" else x


class Masked(WriteOp):
    """One scalar for every element where a mask of the window's first dimensions is true."""

    overwrites = False

    def __init__(self, mask: Any, ndim: int, scalar: Any) -> None:
        self.given = mask.shape
        self.scalar = scalar
        super().__init__(
            "setitem", [mask if mask.ndim == ndim else mask.reshape(mask.shape + (1,) * (ndim - mask.ndim))]
        )

    def picked(self, positions: HostArray, shape: Shape) -> WriteOp:
        """See `WriteOp`."""
        (mask,) = self.operands
        true = np.broadcast_to(AdvancedIndex(mask, mask.shape).numpy[0], positions.shape)
        chosen = AdvancedIndex(np.unravel_index(positions[true], shape), shape)
        return Scattered(self.name, None, chosen, [self.scalar], self.scalar.dtype)

    def shared(self, out: Any, old: Any) -> None:
        """See `WriteOp`."""
        (mask,) = self.operands
        out[self.read(mask).reshape(self.given)] = self.scalar

    def announce(self, grid: Grid) -> None:
        """See `WriteOp`."""
        _Delivery(self.operands[0], grid).announce(self.name, copied=False)

    def stage(self, grid: Grid, value: ShardedTensor) -> Commit:
        """See `WriteOp`."""
        (mask,) = self.operands
        delivery = _Delivery(mask, grid)
        if is_recording():
            delivery.announce(self.name, copied=True)
        parts = [copied(p, d) for p, d in zip(delivery.run(mask.dtype), grid.devices, strict=True)]
        scalar = _plain(self.scalar)

        def commit(n: int, xp: Any, out: Any, old: Any) -> None:
            out[xp.broadcast_to(parts[n], out.shape)] = scalar

        return commit


class Scattered(WriteOp):
    """Elements that index arrays select: what a ufunc gives of operands that broadcast to them, or (``ufunc`` None) the
    only operand. Of an element that is selected several times, the last value counts.
    """

    overwrites = False

    def __init__(
        self, name: str, ufunc: str | None, chosen: AdvancedIndex, operands: Sequence[Any], dtype: Any
    ) -> None:
        super().__init__(name, operands)
        self.ufunc = ufunc
        self.chosen = chosen
        self.dtype = dtype
        self.computes = ufunc is not None
        self.turns = any(type(entry) is tuple and entry[2] < 0 for entry in chosen.basic)

    def picked(self, positions: HostArray, shape: Shape) -> WriteOp:
        """See `WriteOp`."""
        chosen = AdvancedIndex(np.unravel_index(positions[self.chosen.numpy], shape), shape)
        return Scattered(self.name, self.ufunc, chosen, self.operands, self.dtype)

    def shared(self, out: Any, old: Any) -> None:
        """See `WriteOp`."""
        (x,) = self.operands
        # NumPy walks index arrays and values as they lie in memory: in row-major order, so that the last one counts.
        with indexing_errors():
            x = self.read(x)
            out[self.chosen.in_order] = np.asarray(x, order="C") if isinstance(x, np.ndarray) else x

    def announce(self, grid: Grid) -> None:
        """See `WriteOp`."""
        here = self._taken_of(grid).grid
        for x in self.operands:
            if _is_array(x):
                self._plan(x, here, self._places(here))[0].announce(x.dtype.itemsize, False, self.name)

    def stage(self, grid: Grid, value: ShardedTensor) -> Commit:
        """See `WriteOp`."""
        chosen, here = self.chosen, self._taken_of(grid)
        places = self._places(here.grid)
        columns: list[Any] = []
        for x in self.operands:
            if not _is_array(x):
                columns.append([_plain(x)] * len(places))
                continue
            plan, arrays = self._plan(x, here.grid, places)
            if is_recording():
                plan.announce(x.dtype.itemsize, True, self.name)
            columns.append(plan.run(arrays, x.dtype if self.ufunc else self.dtype))
        axes = (*chosen.dims, *[d for d in range(len(chosen.basic)) if d not in chosen.dims])
        indices = []
        for (_, coordinates), device in zip(places, grid.devices, strict=True):
            with backend_of(device).on(device):
                indices.append(tuple([on_device(c, device) for c in coordinates]))

        def commit(n: int, xp: Any, out: Any, old: Any) -> None:
            backend = backend_of(grid.devices[n])
            target, index = xp.permute_dims(here.boxes[n].of(backend, out), axes), indices[n]
            if self.ufunc is None:
                target[index] = columns[0][n]
            else:
                made = getattr(xp, self.ufunc)(*[target[index] if c[n] is ITSELF else c[n] for c in columns])
                target[index] = as_dtype(backend, made, self.dtype)

        return commit

    def _taken_of(self, grid: Grid) -> ShardedBox:
        """What the basic part of the index takes of each device's part of the window: something of every one."""
        shape = tuple([int(o[-1]) for o in grid.offsets])
        return aligned(grid, box_of(self.chosen.basic, shape))

    def _places(self, grid: Grid) -> list[tuple[Any, list[Any]]]:
        """For each device, which of the selected elements it holds, and where."""
        return [self._place(grid, n) for n in range(len(grid.devices))]

    def _place(self, grid: Grid, n: int) -> tuple[Any, list[Any]]:
        chosen, box = self.chosen, grid.box(n)
        ends = [box[d] for d in chosen.dims]
        here = np.ones(chosen.rows, bool)
        for array, (begin, end) in zip(chosen.arrays, ends, strict=True):
            here &= (array >= begin) & (array < end)
        rows = np.flatnonzero(here)
        coordinates = [a[rows] - begin for a, (begin, _) in zip(chosen.arrays, ends, strict=True)]
        last = last_of_each(coordinates, [end - begin for begin, end in ends])
        return (rows, coordinates) if last is None else (rows[last], [c[last] for c in coordinates])

    def _plan(self, x: Any, grid: Grid, places: Sequence[tuple[Any, list[Any]]]) -> tuple[GatherPlan, Sequence[Any]]:
        """How an operand's elements get to the devices that write with them, and the arrays that they are in."""
        chosen = self.chosen
        source, arrays = operand_shards(x)
        block = chosen.block or (1,)
        ndim = len(chosen.rest) + len(block)
        sizes = (*chosen.rest[: chosen.at], *block, *chosen.rest[chosen.at :])
        index: list[Any] = [(0, n, 1) for n in x.shape]
        if not chosen.block and len(index) >= len(chosen.rest) - chosen.at:
            index.insert(len(index) - (len(chosen.rest) - chosen.at), None)
        extra = len(index) - ndim
        box = whole_box(x.shape).at(Index([0] * extra + index[extra:] if extra > 0 else [None] * -extra + index))
        here = aligned(source, box)
        blocks = range(chosen.at, chosen.at + len(block))
        wants = []
        for n, (device, (rows, _)) in enumerate(zip(grid.devices, places, strict=True)):
            if all(box.shape[d] == 1 for d in blocks):  # one row for all
                rows = rows[:1]
            at = np.unravel_index(rows, block)
            picked = [i if box.shape[d] > 1 else np.zeros_like(i) for d, i in zip(blocks, at, strict=True)]
            mine = [ends for d, ends in enumerate(grid.box(n)) if d not in chosen.dims]
            others = [d for d in range(ndim) if d not in blocks]
            rest = [ends if box.shape[d] == sizes[d] else (0, 1) for d, ends in zip(others, mine, strict=True)]
            wants.append(GatherRequest(device, len(rows), picked, rest))
        return GatherPlan(here.grid, blocks, wants), local_views(here, arrays)
