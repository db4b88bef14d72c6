"""A backend whose devices have separate memories on the host, which are not checked: what a call costs in Python.

A plugin for GPUs pays the same in the interpreter: each device is made current, transfers are ordered by events, and
copied by the one call that crosses memories. The arrays are NumPy's own, so that nothing is added to their functions.
It is no plugin: `install` registers it, and ``SHARDTENSOR_BACKEND=separate`` makes it the default.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from shardtensor.backend import Backend, Device, HostArray, current_device, logical_device_count, registry

NAME = "separate"


class _Namespace:
    """NumPy's functions. It is not the module: the library calls the module's functions for arrays of the host."""

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(np, name)
        setattr(self, name, attribute)
        return attribute


class SeparateBackend(Backend):
    """Devices of which each has arrays of its own, as many as `st.set_num_devices` sets. Calls are synchronous."""

    name = NAME
    priority = -10
    xp = _Namespace()

    def __init__(self) -> None:
        self._devices = tuple(Device(self.name, i) for i in range(logical_device_count()))
        self._events = itertools.count()
        self._now: Device | None = None

    def devices(self) -> Sequence[Device]:
        """All devices, in order of their ids."""
        return self._devices

    def is_array(self, x: object) -> bool:
        """Whether ``x`` is an array of these devices: outside of functions mapped over them, arrays are the host's."""
        here = current_device()
        return here is not None and here.backend == self.name and isinstance(x, np.ndarray)

    def on(self, device: Device) -> AbstractContextManager[None]:
        """Returns a context manager in which the device is current, as for GPUs."""
        return _On(self, device)

    def record(self, device: Device) -> Any:
        """Returns the number of an event."""
        return next(self._events)

    def wait(self, device: Device, token: Any) -> None:
        """Does nothing: the work of the event is done."""

    def to_device(self, array: Any, source: Device, destination: Device) -> Any:
        """Copies an array."""
        return np.array(array)

    def from_host(self, array: HostArray, device: Device) -> Any:
        """Copies a host array."""
        return np.array(array, order="C")

    def to_host(self, array: Any, device: Device) -> HostArray:
        """Copies an array."""
        return np.array(array)

    def contiguous(self, array: Any) -> Any:
        """Returns the array if it is in row-major order, else a copy that is."""
        return np.asarray(array, order="C")


class _On:
    """A context manager in which a device is current."""

    __slots__ = ("_backend", "_before", "_device")

    def __init__(self, backend: SeparateBackend, device: Device) -> None:
        self._backend, self._device = backend, device

    def __enter__(self) -> None:
        self._before, self._backend._now = self._backend._now, self._device

    def __exit__(self, *error: object) -> None:
        self._backend._now = self._before


def install() -> None:
    """Registers the backend in this process."""
    registry.install(SeparateBackend())
