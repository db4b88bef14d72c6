"""The abstract backend: devices that do not exist, for planning without execution.

A tensor on abstract devices has a shape, a dtype and a sharding, but no elements. Operators on it are planned like any
others: the transfers that they would need are counted, and none is made.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, NoReturn

from shardtensor.backend.device import Device, HostArray
from shardtensor.backend.protocol import Backend
from shardtensor.errors import ConcretizationError

NAME = "simulated"
"""The name of the abstract backend."""


def abstract_device(number: int, process: int = 0) -> Device:
    """Returns the abstract device with this id, of a process that does not exist either."""
    return Device(NAME, number, process, NAME)


class AbstractBackend(Backend):
    """The backend of devices that do not exist: they have no arrays, and every access to one raises an error."""

    name = NAME
    simulated = True
    on_host = True  # Nothing is copied on this machine.
    xp = SimpleNamespace()

    def devices(self) -> Sequence[Device]:
        """The first device; any id is valid, see `abstract_device`."""
        return (abstract_device(0),)

    def is_array(self, x: object) -> bool:
        """Returns False: there are no arrays."""
        return False

    def to_device(self, array: Any, source: Device, destination: Device) -> NoReturn:
        """Raises ConcretizationError."""
        raise ConcretizationError("simulated devices have no arrays")

    def from_host(self, array: HostArray, device: Device) -> NoReturn:
        """Raises ConcretizationError."""
        raise ConcretizationError("simulated devices have no arrays")

    def to_host(self, array: Any, device: Device | None = None) -> NoReturn:
        """Raises ConcretizationError."""
        raise ConcretizationError("simulated devices have no arrays")

    to_dlpack = export = to_host


_backend = AbstractBackend()
