"""Collectives of tensors without elements: the avals of their results, and the schedules of their messages.

`shardtensor.communication.communicator` executes the same collectives on arrays.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from shardtensor.backend.device import Device
from shardtensor.communication.all_reduce import CHUNKED_FROM
from shardtensor.communication.schedules import (
    AllReduce,
    AllToAll,
    Broadcast,
    Collective,
    Permute,
    ids_of,
)
from shardtensor.communication.transfer import announce_reading, operand_transfer
from shardtensor.communication.transfer_log import is_recording
from shardtensor.sharding.layout import Ints, Shape, as_sharding, offsets
from shardtensor.tensor.operands import HostAval, host_aval
from shardtensor.tensor.tensor import ShardedTensor, without_elements
from shardtensor.tensor.value import Aval, aval

Array = ShardedTensor | HostAval
"""The shape and dtype of an array on one device."""


class AbstractCommunicator:
    """One collective of tensors without elements, one on each device: the methods of `Communicator` on their avals.

    Each method returns the shapes and dtypes of the results, and records its schedule.
    """

    def __init__(self, caller: str, axis: str, devices: Sequence[Device]) -> None:
        self.caller = caller
        self.axis = axis
        self.devices = devices
        self.given: Sequence[Any] = ()

    def settle(self) -> None:
        """Returns at once: no transfer is in progress."""

    @staticmethod
    def shards(x: ShardedTensor) -> Sequence[Array]:
        """See `Communicator`."""
        grid = x._aval.grid
        return [host_aval(grid.shape(k), x.dtype) for k in range(len(grid.devices))]

    @staticmethod
    def assembled(value: Aval, arrays: Sequence[Array]) -> ShardedTensor:
        """See `Communicator`."""
        return without_elements(value)

    @staticmethod
    def result(array: Any, device: Device) -> Any:
        """See `Communicator`."""
        return without_elements(_value(array.shape, array.dtype, device)) if hasattr(array, "shape") else array

    def dtype_of(self, array: Array) -> np.dtype[Any]:
        """See `Communicator`."""
        return array.dtype

    def cast(self, arrays: Sequence[Array], kinds: str, dtype: str) -> Sequence[Array]:
        """See `Communicator`."""
        if arrays[0].dtype.kind not in kinds:
            return arrays
        return [host_aval(a.shape, np.dtype(dtype)) for a in arrays]

    def reduce(self, arrays: Sequence[Array], ufunc: str, *, mean: bool = False) -> list[Any]:
        """See `Communicator`."""
        n, nbytes, first = len(arrays), arrays[0].nbytes, arrays[0]
        chunked = nbytes >= CHUNKED_FROM and n > 2
        self._note(lambda ids: AllReduce(ids, np.arange(n), nbytes, nbytes, chunked, self.caller, self.axis))
        dtype = np.true_divide(np.ones(1, first.dtype), n).dtype if mean else first.dtype
        return [host_aval(first.shape, dtype)] * n

    def gather(self, arrays: Sequence[Array], axis: int, tiled: bool) -> list[Any]:
        """See `Communicator`."""
        n = len(arrays)
        self._exchange([a.nbytes for a in arrays], [np.ones(n, np.int64)], [0] * n)
        shape, size = arrays[0].shape, sum(a.shape[axis] for a in arrays) if tiled else n
        return [host_aval((*shape[:axis], size, *shape[axis + tiled :]), arrays[0].dtype)] * n

    def reduce_scatter(self, arrays: Sequence[Array], ufunc: str, dimension: int, tiled: bool) -> list[Any]:
        """See `Communicator`."""
        n, first = len(arrays), arrays[0]
        shares = _shares(first.shape[dimension], n, tiled)
        self._exchange([_row(first, dimension)] * n, [shares], [0] * n)
        before, after = first.shape[:dimension], first.shape[dimension + 1 :]
        return [host_aval((*before, *[share] * tiled, *after), first.dtype) for share in shares.tolist()]

    def all_to_all(self, arrays: Sequence[Array], split_axis: int, concat_axis: int, tiled: bool) -> list[Any]:
        """See `Communicator`."""
        n, first = len(arrays), arrays[0]
        lengths = [a.shape[split_axis] for a in arrays]
        shares = {length: _shares(length, n, tiled) for length in set(lengths)}
        which = {length: k for k, length in enumerate(shares)}
        self._exchange([_row(a, split_axis) for a in arrays], list(shares.values()), [which[k] for k in lengths])
        if not tiled:
            shape = [m for d, m in enumerate(first.shape) if d != split_axis]
            shape.insert(concat_axis, n)
            return [host_aval(tuple(shape), first.dtype)] * n
        if split_axis == concat_axis:
            along = sum(lengths.count(length) * share for length, share in shares.items())
        else:
            along = shares[lengths[0]]
        joined = sum(a.shape[concat_axis] for a in arrays)
        results = []
        for share in along.tolist():  # type: ignore[union-attr]
            shape = list(first.shape)
            shape[concat_axis], shape[split_axis] = joined, share
            results.append(host_aval(tuple(shape), first.dtype))
        return results

    def permute(self, arrays: Sequence[Array], sources: Sequence[int | None]) -> list[Any]:
        """See `Communicator`."""
        pairs = [(i, k) for k, i in enumerate(sources) if i is not None]
        there, here = np.array([i for i, _ in pairs], np.int64), np.array([k for _, k in pairs], np.int64)
        sizes = np.array([arrays[i].nbytes for i, _ in pairs], np.int64)
        self._note(lambda ids: Permute(ids, there, here, sizes, self.caller, self.axis))
        return [arrays[k if i is None else i] for k, i in enumerate(sources)]

    def broadcast(self, arrays: Sequence[Array], source: int) -> list[Any]:
        """See `Communicator`."""
        self._note(lambda ids: Broadcast(ids, source, arrays[source].nbytes, self.caller, self.axis))
        return [arrays[source]] * len(arrays)

    def _exchange(self, rows: list[int], shares: list[Ints], which: list[int]) -> None:
        """Records messages from each device to each other device; see `AllToAll`."""
        arrays = np.array(rows, np.int64), np.array(shares), np.array(which)
        self._note(lambda ids: AllToAll(ids, *arrays, self.caller, self.axis))

    def _note(self, schedule: Any) -> None:
        if is_recording():
            found: Collective = schedule(ids_of(self.devices))
            found.announce()


def _shares(size: int, count: int, tiled: bool) -> Ints:
    """Returns how many indices of a dimension each device receives."""
    return np.diff(offsets(size, (count,))) if tiled else np.ones(count, np.int64)


def _row(array: Array, dimension: int) -> int:
    """Returns the bytes at one index of a dimension."""
    return math.prod([n for d, n in enumerate(array.shape) if d != dimension]) * array.dtype.itemsize


def array_without_elements(x: Any, device: Device, caller: str) -> ShardedTensor:
    """Returns a tensor or a host array on one device, without elements; the transfer is recorded if a log is active.

    It is the counterpart of `shardtensor.communication.transfer.array_on`.
    """
    made = without_elements(_value(x.shape, x.dtype, device))
    is_tensor = isinstance(x, ShardedTensor)
    if not (is_tensor and x.sharding.mesh.flat == (device,)):
        transfer = operand_transfer(x._aval if is_tensor else host_aval(x.shape, x.dtype), made.sharding)
        if is_recording():
            announce_reading(x)
            transfer.schedule(caller).announce()
    return made


@functools.lru_cache(16384)
def _value(shape: Shape, dtype: np.dtype[Any], device: Device) -> Any:
    return aval(shape, dtype, as_sharding(device, len(shape), "collective"), True)
