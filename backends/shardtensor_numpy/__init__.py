"""The ``numpy`` backend: N logical devices on the host that share its memory. Shards are views of one NumPy buffer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from shardtensor.backend import (
    Backend,
    Device,
    HostArray,
    copied,
    host_memory,
    is_exclusive,
    lend,
    logical_device_count,
    memory_of,
    owner_of,
    read_only,
)

__all__ = ["NumPyBackend"]


class NumPyBackend(Backend):
    """Logical devices on the host, as many as `st.set_num_devices` sets (default: one for each core of this process).

    >>> st.devices("numpy")[0].kind
    'cpu'
    """

    name = "numpy"
    on_host = True

    def __init__(self) -> None:
        self._devices = tuple(Device(self.name, i) for i in range(logical_device_count()))

    def devices(self) -> Sequence[Device]:
        """All logical devices, in order of their ids."""
        return self._devices

    @property
    def xp(self) -> Any:
        """The module numpy."""
        return np

    def is_array(self, x: object) -> bool:
        """Whether ``x`` is a NumPy array or scalar."""
        return isinstance(x, (np.ndarray, np.generic))

    def asarray(self, x: Any) -> Any:
        """Returns ``x`` as an array; array scalars become 0-d arrays."""
        return np.asarray(x)

    memory_of = staticmethod(memory_of)

    def contiguous(self, array: Any) -> Any:
        """Returns the array if it is in row-major order, else a copy that is."""
        return np.asarray(array, order="C")

    def to_device(self, array: Any, source: Device, destination: Device) -> Any:
        """Returns a copy: the devices share one memory, but the result of an explicit transfer must be independent."""
        return copied(array)

    def memory_info(self, device: Device) -> tuple[int, int] | None:
        """Returns the bytes (free, total) of host memory available to this process, or None if unknown."""
        return host_memory()

    def from_host(self, array: HostArray, device: Device) -> Any:
        """Returns a copy of a host array."""
        return copied(array)

    def to_host(self, array: Any, device: Device) -> HostArray:
        """Returns a read-only view of the array."""
        return read_only(array)

    export = staticmethod(read_only)
    lend = staticmethod(lend)

    def adopt(self, held: list[Any], shards: Sequence[Any]) -> tuple[Any, bool]:
        """Returns the array itself if it is exclusive or a read-only view of a shard, else a copy; and which it is."""
        if is_exclusive(held):
            return held[0], False
        result = held[0]
        if not result.flags.writeable:
            owner = owner_of(result)
            if any(owner is owner_of(shard) for shard in shards):
                return result, False
        return np.array(result, order="K", subok=False), True

    is_exclusive = staticmethod(is_exclusive)
