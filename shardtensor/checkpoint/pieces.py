"""The elements of tensors that this process holds, as boxes, and how processes divide what they read."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardtensor.backend.device import Device, HostArray
from shardtensor.backend.registry import is_remote
from shardtensor.communication.between_processes.freight import host_copies
from shardtensor.communication.transfer import are_joined
from shardtensor.files.chunk_grids import Box
from shardtensor.sharding.layout import NamedSharding
from shardtensor.sharding.spec import P
from shardtensor.tensor.tensor import ShardedTensor, current_storage
from shardtensor.tensor.value import Aval, aval

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
        (elements,) = host_copies([(self.array, self.device, index or None)])
        return elements


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


_SENT_FROM = 1 << 20
"""The bytes of a tensor from which on elements that several processes need are read once, and sent."""


def divided(value: Aval) -> Aval:
    """Returns the aval in which a tensor is read, of which no two processes have the same elements: that of the tensor,
    split also along the mesh axes along which processes have replicas.
    """
    mesh, spec = value.sharding.mesh, value.sharding.spec
    if not value.spans or value.nbytes < _SENT_FROM:
        return value
    processes = np.array([device.process_index for device in mesh.flat]).reshape(mesh.axis_sizes)
    crossing = [
        axis
        for k, axis in enumerate(mesh.axis_names)
        if (axis in spec.reduced or axis not in spec.axes) and np.any(processes != np.take(processes, [0], k))
    ]
    if not crossing:
        return value
    chains = [*spec.chains_of(value.ndim)]
    longest = max(range(value.ndim), key=lambda d: value.shape[d] // math.prod([mesh.shape[a] for a in chains[d]]))
    chains[longest] += tuple(crossing)
    return aval(value.shape, value.dtype, NamedSharding(mesh, P(*chains)), value.committed)
