"""The host as N logical devices. All share one memory: a tensor is one NumPy buffer, and its shards are views."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from shardtensor.backend import Backend, Device, HostArray, logical_device_count, read_only

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
        if type(result) is np.ndarray and _alone(result):
            return result, False
        return np.array(result, order="K", subok=False), True

    def release(self, array: Any) -> tuple[Any, bool]:
        """``array`` itself, writable, where it is alone in its memory, else a copy."""
        if type(array) is np.ndarray and array.flags.forc and _alone(array):  # else elements may share memory
            if array.base is not None:
                array.base.flags.writeable = True
            array.flags.writeable = True
            return array, False
        return np.array(array), True


def _owner(array: HostArray) -> object:
    """What holds the memory of an array."""
    return array if array.base is None else array.base


def _references(array: HostArray) -> tuple[int, int]:
    """How often an array is referred to, and, if it is a view of an array that owns its memory, how often that one is.

    A view of anything else (a mapped file, a foreign buffer) is never alone: it counts as held without end.
    """
    if array.base is None:
        return sys.getrefcount(array), 0
    if type(array.base) is not np.ndarray or array.base.base is not None:
        return sys.maxsize, 0
    return sys.getrefcount(array), sys.getrefcount(array.base)


def _alone(array: HostArray) -> bool:
    """Whether the caller of the method that asks is the only one who can reach an array's memory."""
    references, owner_references = _references(array)
    alone, owner_alone = _ALONE[array.base is not None]
    return references <= alone and owner_references <= owner_alone


def _calibrate() -> dict[bool, tuple[int, int]]:
    """What `_references` says, by whether it is a view, of an array that only the caller of `adopt` or `release` holds.

    Measured rather than assumed: it differs between versions of Python. Where counts mean nothing (no reference
    counting, no GIL), nothing is ever alone, and everything is copied.
    """
    if not hasattr(sys, "getrefcount") or not getattr(sys, "_is_gil_enabled", lambda: True)():
        return {False: (0, 0), True: (0, 0)}

    class Probe:
        def adopt(self, result: HostArray) -> tuple[int, int]:
            return self.alone(result)

        def alone(self, array: HostArray) -> tuple[int, int]:
            return _references(array)

    found = {}
    for is_view in (False, True):
        arrays = [np.empty(2)[:1] if is_view else np.empty(2)]
        array = arrays.pop()
        found[is_view] = Probe().adopt(array)
    return found


_ALONE = _calibrate()
