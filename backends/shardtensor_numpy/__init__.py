"""The host as N logical devices. All share one memory: a tensor is one NumPy buffer, and its shards are views."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from shardtensor.backend import FRAME, Backend, Device, HostArray, logical_device_count, read_only, references

__all__ = ["NumPyBackend"]


class NumPyBackend(Backend):
    """Logical devices on the host, ``SHARDTENSOR_NUM_DEVICES`` of them (default: one for each core this process may
    use).

    >>> st.devices("numpy")[0].kind
    'cpu'
    """

    name = "numpy"
    one_memory = True

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
        return np.array(array, order="C")

    def from_host(self, array: HostArray, device: Device) -> Any:
        """A copy of a host array."""
        return np.array(array, order="C")

    def to_host(self, array: Any, device: Device) -> HostArray:
        """The array itself, read-only."""
        return self.export(array)  # type: ignore[no-any-return]

    def export(self, array: Any) -> Any:
        """A read-only view."""
        return read_only(array)

    def adopt(self, result: Any, shards: Sequence[Any]) -> tuple[Any, bool]:
        """``result`` itself where nobody else holds its memory or where it is a view of a shard, else a copy."""
        if any(_owner(result) is _owner(s) for s in shards) and not result.flags.writeable:
            return result, False
        if _alone(result, 1 + FRAME):
            return result, False
        return np.array(result, order="K", subok=False), True

    def sole(self, array: Any, holders: int) -> bool:
        """Whether nobody else holds its memory, and its elements fill it without gaps, so that no two share a place."""
        if not array.flags.forc or not _alone(array, holders + FRAME):
            return False
        if array.base is not None:
            array.base.flags.writeable = True
        array.flags.writeable = True
        return True

    def release(self, array: Any, holders: int = 1) -> tuple[Any, bool]:
        """``array`` itself, writable, where it is alone in its memory, else a copy in row-major order."""
        return (array, False) if self.sole(array, holders + FRAME) else (np.array(array, order="C"), True)


def _owner(array: HostArray) -> object:
    """What holds the memory of an array."""
    return array if array.base is None else array.base


def _alone(array: HostArray, holders: int) -> bool:
    """Whether references to an array are the ``holders`` and no more, and none but its own to the array whose memory
    it is a view of. What is not NumPy's own memory (a mapped file, a foreign buffer) is never alone.
    """
    owner = array.base
    if type(array) is not np.ndarray or references(array) > holders + FRAME:
        return False
    return owner is None or (type(owner) is np.ndarray and owner.base is None and references(owner) <= 2)
