"""Devices, and the kinds of memory that they have."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy.typing as npt

from shardtensor.host.memory_pool import owner_of as owner_of

MEMORY_KINDS = ("device", "pinned_host")
HOST_MEMORY = (1, 0)
"""The host's memory as DLPack names it: kDLCPU, and its number."""

HostArray: TypeAlias = npt.NDArray[Any]


@dataclass(frozen=True, slots=True, order=True)
class Device:
    """One place that holds arrays and computes: a GPU, or a logical share of the host.

    A value, not a handle: it can be hashed, compared, pickled and sent to another process. Devices are equal if
    ``backend``, ``id`` and ``process_index`` are; one pickled on a machine with other GPUs equals the one of that
    number here.

    Attributes:
        backend: name of the backend that drives it.
        id: number among that backend's devices, over all processes.
        process_index: the process that owns it.
        kind: a description of it ("cpu", a GPU's model, ...), which is not compared.

    >>> st.devices("numpy")[0]
    Device('numpy:0')
    """

    backend: str
    id: int
    process_index: int = 0
    kind: str = field(default="cpu", compare=False)

    def __str__(self) -> str:
        return "host" if self == HOST else f"{self.backend}:{self.id}"

    def __repr__(self) -> str:
        return f"Device('{self}')"


HOST = Device("host", 0, 0, "host memory")
"""Where host arrays live: the other end of a move from or to one. No tensor lives there."""
