"""Collectives of tensors without elements: the avals of their results."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from shardtensor.backend.device import Device
from shardtensor.backend.registry import backend_of, shared_memory
from shardtensor.communication.all_reduce import Group
from shardtensor.communication.communicator import Communicator, Rows
from shardtensor.communication.transfer import announce_reading, operand_transfer
from shardtensor.sharding.layout import Ints, Shape, as_sharding, offsets
from shardtensor.tensor.operands import HostAval, host_aval
from shardtensor.tensor.tensor import ShardedTensor, without_elements
from shardtensor.tensor.value import Aval, aval

Array = ShardedTensor | HostAval
"""The shape and dtype of an array on one device."""


class AbstractCommunicator(Communicator):
    """One collective of tensors without elements: it returns the shapes and dtypes of the results."""

    def __init__(self, caller: str, axis: str, devices: Sequence[Device], sizes: Sequence[int] = ()) -> None:
        super().__init__(caller, axis, devices, sizes)
        if not any(backend_of(device).simulated for device in devices):
            self.copies = shared_memory(tuple(devices)) is None

    def shards(self, x: ShardedTensor) -> Sequence[Array]:
        """See `Communicator`."""
        grid = x._aval.grid
        return [host_aval(grid.shape(k), x.dtype) for k in range(len(grid.devices))]

    def assembled(self, value: Aval, arrays: Sequence[Array]) -> ShardedTensor:
        """See `Communicator`."""
        return without_elements(value)

    def result(self, array: Any, device: Device) -> Any:
        """See `Communicator`."""
        return on_device(array, device)

    def dtype_of(self, array: Array) -> np.dtype[Any]:
        """See `Communicator`."""
        return array.dtype

    def cast(self, arrays: Sequence[Array], kinds: str, dtype: str) -> Sequence[Array]:
        """See `Communicator`."""
        if arrays[0].dtype.kind not in kinds:
            return arrays
        return [host_aval(a.shape, np.dtype(dtype)) for a in arrays]

    def _all_reduce(self, arrays: Sequence[Array], ufunc: str, mean: bool, group: Group) -> list[Any]:
        n, first = len(arrays), arrays[0]
        dtype = np.true_divide(np.ones(1, first.dtype), n).dtype if mean else first.dtype
        return [host_aval(first.shape, dtype)] * n

    def _all_gather(self, arrays: Sequence[Array], axis: int, tiled: bool) -> list[Any]:
        return [self._joined(arrays, axis, tiled)] * len(arrays)

    def _reduce_scatter(self, arrays: Sequence[Array], ufunc: str, dimension: int, tiled: bool) -> list[Any]:
        return self._split(arrays[0], len(arrays), dimension, tiled)

    def _all_to_all(self, arrays: Sequence[Array], split_axis: int, concat_axis: int, tiled: bool) -> list[Any]:
        columns = zip(*[self._split(a, len(arrays), split_axis, tiled) for a in arrays], strict=True)
        return [self._joined(column, concat_axis, tiled) for column in columns]

    def _ragged_all_to_all(
        self, arrays: Sequence[Array], bounds: Sequence[Ints], split_axis: int, concat_axis: int
    ) -> list[Any]:
        d = split_axis
        parts = [
            [host_aval((*a.shape[:d], n, *a.shape[d + 1 :]), a.dtype) for n in np.diff(ends).tolist()]
            for a, ends in zip(arrays, bounds, strict=True)
        ]
        return [self._joined(column, concat_axis, True) for column in zip(*parts, strict=True)]

    def _send_rows(self, arrays: Sequence[Array], into: Sequence[Array], rows: Sequence[Rows], adds: bool) -> list[Any]:
        return list(into)

    def _permute(self, arrays: Sequence[Array], sources: Sequence[int | None], zeros: bool) -> list[Any]:
        return [arrays[k if i is None else i] for k, i in enumerate(sources)]

    def _broadcast(self, arrays: Sequence[Array], source: int) -> list[Any]:
        return [arrays[source]] * len(arrays)

    @staticmethod
    def _joined(arrays: Sequence[Array], axis: int, tiled: bool) -> HostAval:
        """Returns the aval of arrays that are concatenated along an axis, or stacked along a new one."""
        shape = arrays[0].shape
        size = sum(a.shape[axis] for a in arrays) if tiled else len(arrays)
        return host_aval((*shape[:axis], size, *shape[axis + tiled :]), arrays[0].dtype)

    @staticmethod
    @functools.lru_cache(64)
    def _parts(shape: Shape, dtype: np.dtype[Any], count: int, axis: int, tiled: bool) -> list[HostAval]:
        sizes = np.diff(offsets(shape[axis], (count,))).tolist() if tiled else [1] * count
        return [host_aval((*shape[:axis], *[n] * tiled, *shape[axis + 1 :]), dtype) for n in sizes]

    def _split(self, array: Array, count: int, axis: int, tiled: bool) -> list[HostAval]:
        """Returns the avals of the parts of an array along an axis, which is removed where not tiled."""
        return self._parts(array.shape, array.dtype, count, axis, tiled)


def on_device(array: Any, device: Device) -> Any:
    """Returns the tensor without elements on one device that has the shape and dtype of an array; a scalar itself."""
    return without_elements(_value(array.shape, array.dtype, device)) if hasattr(array, "shape") else array


def array_without_elements(x: Any, device: Device, caller: str) -> ShardedTensor:
    """Returns a tensor or a host array on one device, without elements; the transfer is recorded if a log is active.

    It is the counterpart of `shardtensor.communication.transfer.array_on`.
    """
    tensor = without_elements(_value(x.shape, x.dtype, device))
    is_tensor = isinstance(x, ShardedTensor)
    if not (is_tensor and x.sharding.mesh.flat == (device,)):
        transfer = operand_transfer(x._aval if is_tensor else host_aval(x.shape, x.dtype), tensor.sharding)
        announce_reading(x)
        transfer.infer(caller)
    return tensor


@functools.lru_cache(16384)
def _value(shape: Shape, dtype: np.dtype[Any], device: Device) -> Any:
    return aval(shape, dtype, as_sharding(device, len(shape), "collective"), True)
