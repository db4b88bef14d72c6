"""Results whose size depends on elements: each device computes its part, and the parts are distributed anew.

The parts of devices differ in size. Since the rows of the operand are in order over the devices, so are the parts of a
result that follows the order of the elements.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from shardtensor.backend.protocol import Backend
from shardtensor.backend.registry import is_spanning
from shardtensor.communication.between_processes.processes import completed
from shardtensor.communication.offload import offloaded
from shardtensor.communication.transfer import OperandTransfer, operand_transfer
from shardtensor.communication.transfer_plan import TransferPlan
from shardtensor.functions.algorithms.shards import each_here
from shardtensor.sharding.copy_plan import identity
from shardtensor.sharding.layout import Grid, NamedSharding, as_sharding
from shardtensor.sharding.mesh import default_mesh
from shardtensor.sharding.spec import P
from shardtensor.tensor.operands import host_aval
from shardtensor.tensor.tensor import ShardedTensor, tensor, tensor_of
from shardtensor.tensor.value import aval


class Rows:
    """The rows of an operand of at least one dimension, in order over the devices: the first dimension is split by all
    mesh axes that split the operand.

    Args:
        x: a tensor or a host array.
        caller: the name of the operator, for the log.

    Attributes:
        sharding: the sharding, which is also that of results of one dimension.
        grid: the grid of the rows.
        backend: the backend of the devices.
    """

    def __init__(self, x: Any, caller: str) -> None:
        is_tensor = isinstance(x, ShardedTensor)
        kind: Any = x._aval if is_tensor else host_aval(x.shape, x.dtype)
        ndim = len(kind.shape)
        sharding = kind.sharding if is_tensor else as_sharding(default_mesh(), ndim, caller)
        self.sharding = _sharding_of_rows(sharding, ndim)
        self.grid = self.sharding.grid(kind.shape)
        self.caller = caller
        self._x = x
        self._committed = is_tensor and kind.committed
        self._move: OperandTransfer = operand_transfer(kind, self.sharding)
        self.backend: Backend = aval(kind.shape, kind.dtype, self.sharding, self._committed).backend

    def whole(self) -> Any:
        """Returns all rows as one host array, where the devices share a memory."""
        return self._move.whole(self._x, self.caller)

    def shards(self) -> Sequence[Any]:
        """Returns the rows of each device."""
        return self._move.shards(self._x, self.caller)

    def map(self, kernel: Callable[..., Any], *columns: Sequence[Any]) -> list[Any]:
        """Returns ``kernel(xp, *items)`` for the items of each device."""
        results = each_here(kernel, self.grid.devices, columns)
        return completed(results, self.grid.devices, self.caller) if is_spanning(self.grid.devices) else results

    def tensor(self, whole: Any) -> ShardedTensor:
        """Returns the tensor of a whole host array, in the sharding of the rows."""
        value = aval(whole.shape, whole.dtype, self.sharding, self._committed)
        return tensor_of(value, (whole,))

    def tensor_of_shards(self, shape: tuple[int, ...], arrays: Sequence[Any], dtype: Any) -> ShardedTensor:
        """Returns the tensor of that shape whose shards are the arrays."""
        value = aval(shape, np.dtype(dtype), self.sharding, self._committed)
        return tensor(value, offloaded(value, arrays))

    def tensor_of_parts(self, sizes: Sequence[int], arrays: Sequence[Any], dtype: Any) -> ShardedTensor:
        """Returns the tensor of one dimension that the parts of the devices make up, rebalanced by the split rule."""
        shards = self.redistribute(sizes, self.sharding, dtype, arrays)
        return self.tensor_of_shards((self.total(sizes),), shards, dtype)

    def redistribute(
        self, sizes: Sequence[int], target: NamedSharding, dtype: Any, arrays: Sequence[Any] | None = None
    ) -> Sequence[Any]:
        """Transfers the parts of the devices into a sharding of the array that they make up.

        Args:
            sizes: the size of each device's part, in mesh order; replicas have the same part.
            target: the sharding.
            dtype: the dtype of the arrays.
            arrays: the parts; None where devices share a memory: the transfer is then only recorded.
        """
        source, known = self.parts(sizes), np.dtype(dtype)
        shape = (self.total(sizes),)
        result = target.grid(shape)
        if source.same(result):
            return arrays or ()
        plan = TransferPlan((identity(shape),), (source,), result)
        plan.announce(known.itemsize, arrays is not None, self.caller)
        return () if arrays is None else plan.run((arrays,), known)

    def total(self, sizes: Sequence[int]) -> int:
        """Returns the size of the array of which each device has a part of the given size."""
        return int(self.parts(sizes).offsets[0][-1])

    def parts(self, sizes: Sequence[int]) -> Grid:
        """Returns the grid of an array of one dimension of which each device has a part of the given size."""
        parts = self.sharding.grid((0,)).parts
        by_part = dict(zip(parts[:, 0].tolist(), sizes, strict=True))
        bounds = np.cumsum([0, *[by_part[part] for part in sorted(by_part)]])
        return Grid(self.grid.devices, (bounds,), parts)


@functools.lru_cache(1024)
def _sharding_of_rows(sharding: NamedSharding, ndim: int) -> NamedSharding:
    """Returns the sharding of which all mesh axes that split an array of ``ndim`` dimensions split the first one."""
    chain = [name for axes in sharding.spec.chains_of(ndim) for name in axes]
    return NamedSharding(sharding.mesh, P(tuple(chain)))
