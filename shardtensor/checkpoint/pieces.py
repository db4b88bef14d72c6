"""The elements of tensors that this process holds, as boxes; and tensors whose elements are read box by box."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardtensor.backend.device import HOST, Device, HostArray
from shardtensor.backend.registry import backend_of, is_remote
from shardtensor.backend.remote import RemoteArray
from shardtensor.communication.messages import send
from shardtensor.communication.transfer import are_joined
from shardtensor.core import call
from shardtensor.files.chunk_grids import Box
from shardtensor.tensor.tensor import ShardedTensor, current_storage, mark_array, tensor_of
from shardtensor.tensor.value import Aval, new_buffers, on_devices

BLOCK = 1 << 26
"""The bytes of host memory to which the elements of a device are copied at a time, where no other number is given."""


@dataclass
class DevicePiece:
    """A box of a tensor in the memory of a device, of which the host reads a part when it is indexed.

    Attributes:
        array: the array of the backend.
        device: its device.
        dtype: the dtype of its elements.
        most: the bytes that are copied to the host at once, if it is asked for less of the same rows.
    """

    array: Any
    device: Device
    dtype: np.dtype[Any]
    most: int = BLOCK
    _rows: tuple[int, int] = (0, 0)
    _block: HostArray | None = None

    def __getitem__(self, index: tuple[Any, ...]) -> HostArray:
        """Returns the elements that slices select, and an ellipsis at their end, as a host array."""
        shape = self.array.shape
        if not shape or 0 in shape:
            return self._read(())
        rows, rest = index[0], index[1:]
        begin, end = self._rows
        if self._block is None or not begin <= rows.start <= rows.stop <= end:
            row = int(np.prod(shape[1:])) * self.dtype.itemsize
            begin, end = rows.start, min(max(rows.stop, rows.start + self.most // row), shape[0])
            self._block = None  # Before the next one is allocated.
            self._block, self._rows = self._read((slice(begin, end),)), (begin, end)
        part: HostArray = self._block[(slice(rows.start - begin, rows.stop - begin), *rest)]
        return part

    def _read(self, index: tuple[slice, ...]) -> HostArray:
        backend = backend_of(self.device)
        with backend.on(self.device):
            array = backend.view(self.array, index) if index else self.array
            return np.asarray(backend.to_host(backend.contiguous(array), self.device))


Source = HostArray | DevicePiece
"""What has the elements of a box."""


def local_pieces(x: ShardedTensor, most: int) -> list[tuple[Box, Source]]:
    """Returns disjoint boxes of a tensor, and what has their elements: together all that this process holds.

    Args:
        x: the tensor.
        most: see `DevicePiece`.

    Raises:
        ConcretizationError: the elements of the tensor are not known.
    """
    value, storage = x._aval, current_storage(x)
    if value.offloaded and hasattr(storage, "hosts"):  # Its elements are on the host, one array for each part.
        storage.settle()
        parts = value.grid.linear_parts().tolist()
        owners = {part: k for k, part in reversed([*enumerate(parts)]) if not is_remote(value.grid.devices[k])}
        return [(value.grid.box(k), storage.hosts[part]) for part, k in owners.items()]
    buffers = storage.buffers
    grid = value.cells.grid if are_joined(buffers, value) else value.grid
    pieces: dict[Box, Source] = {}
    for number, (device, array) in enumerate(zip(grid.devices, buffers, strict=True)):
        if not is_remote(device) and (box := grid.box(number)) not in pieces:
            on_host = type(array) is np.ndarray
            pieces[box] = array if on_host else DevicePiece(array, device, value.dtype, most)
    return list(pieces.items())


Reader = Callable[[Box, HostArray | None], HostArray]
"""Reads a box, into an array if there is one, which has its shape."""


def tensor_from(value: Aval, read: Reader, check: Callable[[Box], None], is_scalar: bool = False) -> ShardedTensor:
    """Returns a tensor, of which this process reads the elements that its devices hold, each once for each memory.

    Args:
        value: its aval.
        read: reads a box.
        check: raises an error if a box cannot be read, before there is memory for it.
        is_scalar: whether it cannot be written.
    """
    there = on_devices(value)
    grid = there.cells.grid
    for box in {grid.box(k): None for k, device in enumerate(grid.devices) if not is_remote(device)}:
        check(box)
    x = (_on_host if there.backend.on_host else _on_devices)(there, read)
    if there is not value:
        x = call("reshard", x, sharding=value.sharding)
    return x if is_scalar else mark_array(x)


def _on_host(value: Aval, read: Reader) -> ShardedTensor:
    buffers, _ = new_buffers(value)
    grid = value.cells.grid
    for number, device in enumerate(grid.devices):
        if not is_remote(device):
            read(grid.box(number), buffers[number])
    return tensor_of(value, buffers, tuple([[] for _ in buffers]))


def _on_devices(value: Aval, read: Reader) -> ShardedTensor:
    grid = value.cells.grid
    arrays: list[Any] = [RemoteArray(grid.shape(k), value.dtype) for k in range(len(grid.devices))]
    same: dict[Box, list[int]] = {}
    for k, device in enumerate(grid.devices):
        if not is_remote(device):
            same.setdefault(grid.box(k), []).append(k)
    for box, holders in same.items():
        elements = read(box, None)
        for k in holders:
            arrays[k] = send(elements, HOST, grid.devices[k])
    return tensor_of(value, tuple(arrays))
