"""Write ops, which describe a write: its operands and how the elements of a view are computed from them.

A write op writes into a view of one buffer on the host. Elsewhere, it first transfers to each memory the operands that
are needed to write the cell of the tensor that is there.
"""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from shardtensor.backend.device import HostArray
from shardtensor.backend.functions import function_of
from shardtensor.backend.registry import backend_of
from shardtensor.backend.small_floats import is_small_float
from shardtensor.communication.between_processes.processes import described
from shardtensor.communication.gather_scatter import GatherPlan, GatherRequest, last_of_each, on_device
from shardtensor.communication.messages import as_dtype, copied
from shardtensor.communication.transfer_plan import TransferPlan
from shardtensor.host import blockwise
from shardtensor.interpreters.views.advanced_indexing import gather_now, indexing_error
from shardtensor.interpreters.views.index_entries import AdvancedIndex, unraveled
from shardtensor.interpreters.views.views import (
    local_views,
    operand_shards,
    snapshot,
)
from shardtensor.sharding.index import Index
from shardtensor.sharding.layout import Grid, Shape
from shardtensor.sharding.view_spec import ShardedBox, ViewSpec, aligned, box_of, broadcast_region, whole_box
from shardtensor.tensor.tensor import ShardedTensor


class _Itself:
    """The type of `ITSELF`."""


ITSELF = _Itself()
"""A placeholder for an operand that is the written view itself: it is read as it was before the write."""

Commit = Callable[[int, Any, Any, Any], None]
"""``commit(n, xp, out, old)`` writes on the n-th device of a grid into ``out``; ``old`` holds the previous elements."""


class WriteOp(abc.ABC):
    """A write to the elements of a view.

    Attributes:
        name: the name of the operator.
        operands: the operands that are read.
        overwrites: whether every element of the view is written.
        reverses: whether it indexes a dimension of the view with a negative step.
        computes: whether it is a ufunc, which raises floating-point errors after all elements are written.
        inside: for each operand whether it aliases the base that is written; empty if no operand is a tensor.
        value: the value of the base during the write; None before `enter`.
    """

    overwrites = True
    computes = False
    reverses = False

    def __init__(self, name: str, operands: Sequence[Any]) -> None:
        self.name = name
        self.operands = operands
        self.inside: Sequence[bool] = ()
        self.value: ShardedTensor | None = None

    def described(self) -> str:
        """Returns a text of the operands, which is the same in all processes; see `processes.described`."""
        return ", ".join(map(described, self.operands))

    def is_written(self, error: BaseException) -> bool:
        """Whether the elements were written although this error was raised.

        A ufunc raises warnings, floating-point errors and errors of the user's handler after it has written. The
        operands that it would reject were checked before.
        """
        return self.computes and not isinstance(error, MemoryError)

    def settle(self, base: ShardedTensor) -> None:
        """Replaces the operands that do not alias ``base`` by snapshots, before the lock of ``base`` is acquired."""
        tensors = [isinstance(x, ShardedTensor) for x in self.operands]
        if any(tensors):
            self.inside = [
                here and x._base_and_view()[0] is base for x, here in zip(self.operands, tensors, strict=True)
            ]
            self.operands = [
                snapshot(x) if here and not mine else x
                for x, here, mine in zip(self.operands, tensors, self.inside, strict=True)
            ]

    def enter(self, base: ShardedTensor, view_spec: ViewSpec, value: ShardedTensor) -> None:
        """Replaces the operands that alias ``base`` by snapshots on ``value``, the value taken out of ``base``."""
        self.value = value
        pairs = zip(self.operands, self.inside, strict=True)
        self.operands = [snapshot(x, base, value) if mine else x for x, mine in pairs]

    def read(self, x: Any) -> Any:
        """Returns an operand as a host array, or the scalar that it is; an operand that aliases the base is copied."""
        if not is_operand_array(x):
            return x
        array = gather_now(x, self.name)
        return blockwise.copied(array) if isinstance(x, ShardedTensor) and owner_of(x) is self.value else array

    @abc.abstractmethod
    def picked(self, positions: HostArray, shape: Shape) -> WriteOp:
        """Returns the equivalent write to a whole base by flat positions.

        Args:
            positions: for each element of the view its position in the flattened base.
            shape: the shape of the base.
        """

    @abc.abstractmethod
    def shared(self, out: Any, old: Any) -> None:
        """Writes where memory is shared.

        Args:
            out: the view of the new buffer.
            old: the view of the old buffer, which may be the same.
        """

    @abc.abstractmethod
    def announce(self, grid: Grid, copied: bool) -> None:
        """Records the transfers that separate memories need.

        Args:
            grid: the grid that divides the view over the devices.
            copied: whether the elements are copied here.
        """

    @abc.abstractmethod
    def stage(self, grid: Grid, value: ShardedTensor) -> Commit:
        """Transfers the operands to the devices and returns the function that writes on one device.

        Args:
            grid: the grid that divides the view over the devices.
            value: the value of the base.
        """


def owner_of(x: Any) -> ShardedTensor | None:
    """Returns the base of an operand, or None if the operand is not a tensor."""
    return x._base_and_view()[0] if isinstance(x, ShardedTensor) else None


def is_view(x: Any, base: ShardedTensor, view_spec: ViewSpec) -> bool:
    """Whether an operand consists of exactly the elements that are written, in the same order."""
    if not isinstance(x, ShardedTensor):
        return False
    owner, mine = x._base_and_view()
    return owner is base and mine.same(view_spec)


class Delivery:
    """The transfer of an operand, broadcast to the shape of a grid, to the devices of the grid.

    Each device receives the elements of its part that it does not hold yet.
    """

    def __init__(self, x: Any, grid: Grid, inferred: bool = False) -> None:
        source, self.arrays = operand_shards(x, inferred)
        self.itemsize = x.dtype.itemsize
        self.movement = _delivery_plan(tuple(x.shape), source, grid)

    def announce(self, caller: str, copied: bool) -> None:
        """Records the transfer, subject to the transfer guard."""
        self.movement.announce(self.itemsize, copied, caller)

    def run(self, dtype: Any) -> tuple[Any, ...]:
        """Runs the transfer and returns one array per device."""
        return self.movement.run((self.arrays(),), dtype, as_they_lie=True)


@functools.lru_cache(1024)
def _delivery_plan(shape: Shape, source: Grid, grid: Grid) -> TransferPlan:
    """Returns the plan of a `Delivery` of an operand of a shape, which is divided as ``source``."""
    region = broadcast_region(shape, tuple([int(ends[-1]) for ends in grid.offsets]))
    return TransferPlan((region,), (source,), grid)


class Elementwise(WriteOp):
    """A write of a ufunc of operands that broadcast to the view, or, if ``ufunc`` is None, of the only operand."""

    def __init__(self, name: str, ufunc: str | None, operands: Sequence[Any], dtype: Any) -> None:
        super().__init__(name, operands)
        self.ufunc = ufunc
        self.dtype = dtype
        self.computes = ufunc is not None

    def enter(self, base: ShardedTensor, view_spec: ViewSpec, value: ShardedTensor) -> None:
        """See `WriteOp`. An operand of a ufunc that is the written view is replaced by `ITSELF`."""
        if self.ufunc is not None:
            self.operands = [ITSELF if is_view(x, base, view_spec) else x for x in self.operands]
            self.inside = [mine and x is not ITSELF for x, mine in zip(self.operands, self.inside, strict=True)]
        super().enter(base, view_spec, value)

    def picked(self, positions: HostArray, shape: Shape) -> WriteOp:
        """See `WriteOp`."""
        chosen = AdvancedIndex(unraveled(positions, shape), shape)
        return Scattered(self.name, self.ufunc, chosen, self.operands, self.dtype)

    def shared(self, out: Any, old: Any) -> None:
        """See `WriteOp`."""
        if self.ufunc is None:
            blockwise.copy_into(out, self.read(self.operands[0]))
            return
        arrays = [old if x is ITSELF else gather_now(x, self.name) if is_operand_array(x) else x for x in self.operands]
        if any(isinstance(a, np.ndarray) and _overlaps(a, out) for a in arrays):
            getattr(np, self.ufunc)(*arrays, out=out)  # NumPy copies operands that overlap with `out`.
        else:
            blockwise.into(out, getattr(np, self.ufunc), arrays, breaks=False)

    def announce(self, grid: Grid, copied: bool) -> None:
        """See `WriteOp`."""
        for x in self.operands:
            if is_operand_array(x):
                Delivery(x, grid, inferred=True).announce(self.name, copied)

    def stage(self, grid: Grid, value: ShardedTensor) -> Commit:
        """See `WriteOp`."""
        columns = []
        for x in self.operands:
            if not is_operand_array(x):
                columns.append([_plain(x)] * len(grid.devices))
                continue
            parts = Delivery(x, grid).run(self.dtype if self.ufunc is None else x.dtype)
            if owner_of(x) is value:  # An operand that aliases the base must not change while it is read.
                parts = tuple([copied(p, d) for p, d in zip(parts, grid.devices, strict=True)])
            columns.append(list(parts))

        backend = value._aval.backend
        function = function_of(backend, self.ufunc) if self.ufunc else None

        def commit(n: int, xp: Any, out: Any, old: Any) -> None:
            arrays = [old if c[n] is ITSELF else c[n] for c in columns]
            if function is None:
                backend.store(out, ..., arrays[0])
            else:
                function(*_reaching(xp, arrays, tuple(out.shape)), out=out)

        return commit


def _overlaps(array: Any, out: Any) -> bool:
    """Whether an array may share memory with ``out`` without being the same view of it."""
    if array is out or (array.base is None and out.base is None):  # Both have memory of their own.
        return False
    mine, its = array.__array_interface__["data"], out.__array_interface__["data"]
    same = mine == its and array.shape == out.shape and array.strides == out.strides
    return not same and np.may_share_memory(array, out)


def is_operand_array(x: Any) -> bool:
    """Whether an operand is a tensor or a host array."""
    return isinstance(x, (ShardedTensor, np.ndarray))


def _reaching(xp: Any, arrays: list[Any], shape: Shape) -> list[Any]:
    """Broadcasts an operand of a ufunc if none has the result's shape: not every library broadcasts to ``out=``."""
    shapes = [getattr(a, "shape", None) for a in arrays]
    if shape in shapes:
        return arrays
    k = next((k for k, s in enumerate(shapes) if s is not None), 0)
    return [*arrays[:k], xp.broadcast_to(xp.asarray(arrays[k]), shape), *arrays[k + 1 :]]


def _plain(x: Any) -> Any:
    """Converts a NumPy scalar to a Python scalar, which every library accepts; datetimes and timedeltas are kept."""
    return x.item() if isinstance(x, np.generic) and (x.dtype.kind in "biufc" or is_small_float(x.dtype)) else x


class Masked(WriteOp):
    """A write of one value, a scalar or a tensor without dimensions, to every element of a view where a mask of its
    first dimensions is true.
    """

    overwrites = False

    def __init__(self, mask: Any, ndim: int, value: Any, dtype: Any) -> None:
        self.mask_shape = mask.shape
        self.dtype = dtype
        aligned = mask if mask.ndim == ndim else mask.reshape(mask.shape + (1,) * (ndim - mask.ndim))
        super().__init__("setitem", [aligned, value])

    def picked(self, positions: HostArray, shape: Shape) -> WriteOp:
        """See `WriteOp`."""
        mask, value = self.operands
        true = np.broadcast_to(AdvancedIndex(mask, mask.shape).numpy[0], positions.shape)
        chosen = AdvancedIndex(unraveled(positions[true], shape), shape)
        return Scattered(self.name, None, chosen, [value], self.dtype)

    def shared(self, out: Any, old: Any) -> None:
        """See `WriteOp`."""
        mask, value = map(self.read, self.operands)
        out[mask.reshape(self.mask_shape)] = value

    def announce(self, grid: Grid, copied: bool) -> None:
        """See `WriteOp`."""
        for x in self.operands:
            if is_operand_array(x):
                Delivery(x, grid, inferred=True).announce(self.name, copied)

    def stage(self, grid: Grid, value: ShardedTensor) -> Commit:
        """See `WriteOp`."""
        mask, source = self.operands
        parts: Sequence[Any] = Delivery(mask, grid).run(mask.dtype)
        if any(self.inside):  # Otherwise the mask is a snapshot, whose memory is not that of the tensor.
            parts = [copied(p, d) for p, d in zip(parts, grid.devices, strict=True)]
        is_tensor = is_operand_array(source)
        values = Delivery(source, grid).run(self.dtype) if is_tensor else [_plain(source)] * len(grid.devices)

        def commit(n: int, xp: Any, out: Any, old: Any) -> None:
            backend, here = backend_of(grid.devices[n]), xp.broadcast_to(parts[n], out.shape)
            if is_tensor:
                backend.store(out, ..., xp.where(here, values[n], out))
            else:
                backend.fill_where(out, here, values[n])

        return commit


class Scattered(WriteOp):
    """A write to elements selected by index arrays.

    A ufunc of the operands is written, or, if ``ufunc`` is None, the only operand. The operands broadcast to the
    selected elements. An element that is selected several times gets the last value.
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
        self.reverses = any(type(entry) is tuple and entry[2] < 0 for entry in chosen.basic)

    def described(self) -> str:
        """See `WriteOp`."""
        return f"{super().described()}, {described(self.chosen.numpy)}"

    def picked(self, positions: HostArray, shape: Shape) -> WriteOp:
        """See `WriteOp`."""
        chosen = AdvancedIndex(unraveled(positions[self.chosen.numpy], shape), shape)
        return Scattered(self.name, self.ufunc, chosen, self.operands, self.dtype)

    def shared(self, out: Any, old: Any) -> None:
        """See `WriteOp`."""
        (x,) = self.operands
        # NumPy iterates over index arrays and values in memory order, so both must be in row-major order for the last
        # value to be written last.
        x = self.read(x)
        try:
            out[self.chosen.in_order] = np.asarray(x, order="C") if isinstance(x, np.ndarray) else x
        except IndexError as error:
            raise indexing_error(error) from None

    def announce(self, grid: Grid, copied: bool) -> None:
        """See `WriteOp`."""
        here = self._taken_of(grid).grid
        for x in self.operands:
            if is_operand_array(x):
                self._plan(x, here, self._held(here), inferred=True)[0].announce(x.dtype.itemsize, copied, self.name)

    def stage(self, grid: Grid, value: ShardedTensor) -> Commit:
        """See `WriteOp`."""
        chosen, here = self.chosen, self._taken_of(grid)
        held = self._held(here.grid)
        columns: list[Any] = []
        for x in self.operands:
            if not is_operand_array(x):
                columns.append([_plain(x)] * len(held))
                continue
            plan, box, arrays = self._plan(x, here.grid, held)
            columns.append(plan.run(local_views(box, arrays()), x.dtype if self.ufunc else self.dtype))
        axes = (*chosen.dims, *[d for d in range(len(chosen.basic)) if d not in chosen.dims])
        indices = []
        for (_, coordinates), device in zip(held, grid.devices, strict=True):
            with backend_of(device).on(device):
                indices.append(tuple([on_device(c, device) for c in coordinates]))

        def commit(n: int, xp: Any, out: Any, old: Any) -> None:
            backend = backend_of(grid.devices[n])
            target, index = xp.permute_dims(here.boxes[n].of(backend, out), axes), indices[n]
            if self.ufunc is None:
                target[index] = columns[0][n]
            else:
                result = function_of(backend, self.ufunc)(*[target[index] if c[n] is ITSELF else c[n] for c in columns])
                target[index] = as_dtype(backend, result, self.dtype)

        return commit

    def _taken_of(self, grid: Grid) -> ShardedBox:
        """Returns the boxes that the basic part of the index selects in each device's part of the view.

        There is one for every device, though it may be empty, since the basic part contains no integers.
        """
        shape = tuple([int(o[-1]) for o in grid.offsets])
        return aligned(grid, box_of(self.chosen.basic, shape))

    def _held(self, grid: Grid) -> list[tuple[Any, list[Any]]]:
        """Returns for each device the numbers of the selected elements that it holds and their local coordinates."""
        return [self._held_by(grid, n) for n in range(len(grid.devices))]

    def _held_by(self, grid: Grid, n: int) -> tuple[Any, list[Any]]:
        chosen, box = self.chosen, grid.box(n)
        ends = [box[d] for d in chosen.dims]
        here = np.ones(chosen.rows, bool)
        for array, (begin, end) in zip(chosen.arrays, ends, strict=True):
            here &= (array >= begin) & (array < end)
        rows = np.flatnonzero(here)
        coordinates = [a[rows] - begin for a, (begin, _) in zip(chosen.arrays, ends, strict=True)]
        last = last_of_each(coordinates, [end - begin for begin, end in ends])
        return (rows, coordinates) if last is None else (rows[last], [c[last] for c in coordinates])

    def _plan(
        self, x: Any, grid: Grid, held: Sequence[tuple[Any, list[Any]]], inferred: bool = False
    ) -> tuple[GatherPlan, ShardedBox, Callable[[], Sequence[Any]]]:
        """Returns the plan that sends an operand's elements to the devices that write them, the boxes of the source
        arrays from which they are sent, and a function that returns these arrays.
        """
        chosen = self.chosen
        source, arrays = operand_shards(x, inferred)
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
        for n, (device, (rows, _)) in enumerate(zip(grid.devices, held, strict=True)):
            if all(box.shape[d] == 1 for d in blocks):  # One row is broadcast to all selected rows.
                rows = rows[:1]
            at = np.unravel_index(rows, block)
            picked = [i if box.shape[d] > 1 else np.zeros_like(i) for d, i in zip(blocks, at, strict=True)]
            mine = [ends for d, ends in enumerate(grid.box(n)) if d not in chosen.dims]
            others = [d for d in range(ndim) if d not in blocks]
            rest = [ends if box.shape[d] == sizes[d] else (0, 1) for d, ends in zip(others, mine, strict=True)]
            wants.append(GatherRequest(device, len(rows), picked, rest))
        return GatherPlan(here.grid, blocks, wants), here, arrays
