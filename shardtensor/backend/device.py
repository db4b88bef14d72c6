"""`Device`, and the kinds of memory that devices have."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy.typing as npt

from shardtensor.hints import explains_attributes

MEMORY_KINDS = ("device", "pinned_host")
HOST_MEMORY = (1, 0)
"""The DLPack device of host memory: the device type kDLCPU and the device id 0."""

HostArray: TypeAlias = npt.NDArray[Any]


@explains_attributes
@dataclass(frozen=True, slots=True, order=True)
class Device:
    """A device that holds arrays and computes: a GPU, a logical share of a GPU, or a logical share of the host.

    A device is an immutable value, not a handle: it can be hashed, compared, pickled and sent to another process.
    Devices are equal if their ``backend``, ``id`` and ``process_index`` are; a device that was pickled on a machine
    with other GPUs equals the device of the same id on this machine.

    Attributes:
        backend: name of the backend that drives it.
        id: number among that backend's devices, over all processes.
        process_index: index of the process that owns the device.
        kind: a description ("cpu", a GPU's model, ...), ignored in comparisons.

    >>> st.devices("numpy")[0]
    Device('numpy:0')
    """

    backend: str
    id: int
    process_index: int = 0
    kind: str = field(default="cpu", compare=False)

    def __hash__(self) -> int:
        return self.id  # Every operator hashes devices; those of equal ids are rarely in one table.

    def __str__(self) -> str:
        return "host" if self == HOST else f"{self.backend}:{self.id}"

    def __repr__(self) -> str:
        return f"Device('{self}')"


HOST = Device("host", 0, 0, "host memory")
"""The device of host arrays: the source or destination of transfers between host and devices. It holds no tensors."""
