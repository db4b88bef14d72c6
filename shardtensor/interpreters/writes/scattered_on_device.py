"""The write op of ``x[index] = value`` where the memory of the GPU that has x has the index arrays, too."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from shardtensor.backend.device import HostArray
from shardtensor.backend.registry import backend_of
from shardtensor.communication.messages import copied
from shardtensor.interpreters.views.index_entries import AdvancedIndex
from shardtensor.interpreters.writes.write_ops import Commit, Delivery, Scattered, WriteOp, is_operand_array, owner_of
from shardtensor.sharding.layout import Grid, Shape, as_sharding
from shardtensor.tensor.tensor import ShardedTensor
from shardtensor.tensor.value import Aval

_DENSE = 16
"""The number of elements for each written value up to which a table of all elements finds the last values."""


class ScatteredOnDevice(WriteOp):
    """A write of an operand to the elements that index arrays of a device select.

    Args:
        base: the aval of the tensor that is written.
        indices: the index, with arrays of the device whose elements are within their bounds.
        chosen: the index in canonical form, without elements.
        value: the operand, which broadcasts to the selected elements, or a scalar.
        dtype: the dtype of the elements that are written.
    """

    overwrites = False

    def __init__(self, base: Aval, indices: tuple[Any, ...], chosen: AdvancedIndex, value: Any, dtype: Any) -> None:
        super().__init__("setitem", [value])
        self._base = base
        self._indices, self._chosen, self._dtype = indices, chosen, dtype
        self.reverses = any(isinstance(e, slice) and (e.step or 1) < 0 for e in indices)

    def picked(self, positions: HostArray, shape: Shape) -> WriteOp:
        """See `WriteOp`. The host reads the index."""
        backend, device = self._base.backend, self._base.sharding.mesh.flat[0]
        index = tuple([backend.to_host(e, device) if backend.is_array(e) else e for e in self._indices])
        chosen = AdvancedIndex(index, positions.shape)
        return Scattered(self.name, None, chosen, self.operands, self._dtype).picked(positions, shape)

    def shared(self, out: Any, old: Any) -> None:
        """See `WriteOp`: there are no such indices on the host."""
        raise AssertionError("an index on a GPU for a tensor on the host")

    def announce(self, grid: Grid, copied: bool) -> None:
        """See `WriteOp`: the inference takes the index that the host reads."""
        raise AssertionError("an index on a GPU for a tensor without elements")

    def stage(self, grid: Grid, value: ShardedTensor) -> Commit:
        """See `WriteOp`; there is one device."""
        (device,) = grid.devices
        (x,) = self.operands
        if is_operand_array(x):
            chosen = self._chosen
            (part,) = Delivery(x, as_sharding(device, len(chosen.shape), self.name).grid(chosen.shape)).run(self._dtype)
            if owner_of(x) is value:  # Its memory must not change while it is read.
                part = copied(part, device)
            block = part.shape[chosen.at : chosen.at + len(chosen.block)]
            if max(block, default=1) > 1:
                with backend_of(device).on(device):
                    part = self._last(backend_of(device).xp, part)
        else:
            part = x

        def commit(n: int, xp: Any, out: Any, old: Any) -> None:
            out[self._indices] = part

        return commit

    def _last(self, xp: Any, part: Any) -> Any:
        """Returns the values with that which is written last to an element in place of all that are: the threads of a
        GPU write in any order.
        """
        chosen, place = self._chosen, 0
        entries = [e for e in self._indices if e is not None and e is not Ellipsis and not isinstance(e, slice)]
        sizes = [entry[1] for d in chosen.dims if isinstance(entry := chosen.basic[d], tuple)]
        for entry, size in zip(entries, sizes, strict=True):
            own = entry if isinstance(entry, (int, np.integer)) else xp.astype(entry, xp.int64)
            place = place * size + own % size
        place = xp.reshape(xp.broadcast_to(place, chosen.block), (-1,))
        numbers, count = xp.arange(chosen.rows, dtype=xp.int64), math.prod(sizes)
        if count <= _DENSE * chosen.rows:
            last = xp.zeros((count,), dtype=xp.int64)
            xp.maximum_at(last, place, numbers)
            last = last[place]
        else:  # A table of all elements would be much larger than the values.
            order = xp.argsort(place, stable=True)
            places = place[order]
            begins = xp.concat([xp.ones((1,), dtype=xp.bool), xp.not_equal(places[1:], places[:-1])])
            group = xp.subtract(xp.cumulative_sum(xp.astype(begins, xp.int64)), 1)
            last = xp.zeros((chosen.rows,), dtype=xp.int64)
            xp.maximum_at(last, group, order)
            by_row = xp.empty_like(order)
            by_row[order] = last[group]
            last = by_row
        before, after = part.shape[: chosen.at], part.shape[chosen.at + len(chosen.block) :]
        shape = (*before, *chosen.block, *after)
        rows = xp.reshape(xp.broadcast_to(part, shape), (math.prod(before), chosen.rows, math.prod(after)))
        return xp.reshape(rows[:, last], shape)
