"""The host as N logical devices. All share one memory: a tensor is one NumPy buffer, and its shards are views."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from shardtensor.backend import (
    FRAME,
    Backend,
    Device,
    HostArray,
    copied,
    host_memory,
    is_alone,
    logical_device_count,
    owner_of,
    read_only,
)

__all__ = ["NumPyBackend"]


class NumPyBackend(Backend):
    """Logical devices on the host, ``SHARDTENSOR_NUM_DEVICES`` of them (default: one for each core this process may
    use).

    >>> st.devices("numpy")[0].kind
    'cpu'
    """

    name = "numpy"
    shared_memory = True

    def __init__(self) -> None:
        self._devices = tuple(Device(self.name, i) for i in range(logical_device_count()))

    def devices(self) -> Sequence[Device]:
        """All logical devices."""
        return self._devices

    @property
    def xp(self) -> Any:
        """NumPy itself."""
        return np

    def is_array(self, x: object) -> bool:
        """Whether ``x`` is a NumPy array or scalar."""
        return isinstance(x, (np.ndarray, np.generic))

    def asarray(self, x: Any) -> Any:
        """``x`` as an array."""
        return np.asarray(x)

    def to_device(self, array: Any, source: Device, destination: Device) -> Any:
        """A copy: logical devices keep nothing from each other, but what is asked to move is not shared."""
        return copied(array)

    def memory_info(self, device: Device) -> tuple[int, int] | None:
        """Of the host, as far as this process can get it; None where nobody says."""
        return host_memory()

    def from_host(self, array: HostArray, device: Device) -> Any:
        """A copy of a host array."""
        return copied(array)

    def to_host(self, array: Any, device: Device) -> HostArray:
        """The array itself, read-only."""
        return self.export(array)  # type: ignore[no-any-return]

    def export(self, array: Any) -> Any:
        """A read-only view."""
        return read_only(array)

    def adopt(self, result: Any, shards: Sequence[Any]) -> tuple[Any, bool]:
        """``result`` itself where nobody else holds its memory or where it is a view of a shard, else a copy."""
        if not result.flags.writeable and any(owner_of(result) is owner_of(s) for s in shards):
            return result, False
        if is_alone(result, 1 + FRAME):
            return result, False
        return np.array(result, order="K", subok=False), True

    def is_exclusive(self, array: Any, holders: int) -> bool:
        """Whether nobody else holds its memory, and its elements fill it without gaps, so that no two share a place."""
        if not array.flags.forc or not is_alone(array, holders + FRAME):
            return False
        if array.base is not None:
            array.base.flags.writeable = True
        array.flags.writeable = True
        return True

    def release(self, array: Any, holders: int = 1) -> tuple[Any, bool]:
        """``array`` itself, writable, where it is alone in its memory, else a copy in row-major order."""
        return (array, False) if self.is_exclusive(array, holders + FRAME) else (copied(array), True)
