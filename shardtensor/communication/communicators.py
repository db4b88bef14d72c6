"""Selects the communicator of a group of devices."""

from __future__ import annotations

from collections.abc import Sequence

from shardtensor.backend.device import Device
from shardtensor.backend.registry import is_spanning
from shardtensor.communication.array_communicator import ArrayCommunicator


def communicator(caller: str, axis: str, devices: Sequence[Device], sizes: Sequence[int] = ()) -> ArrayCommunicator:
    """Returns the communicator of devices, some of which may belong to other processes."""
    if is_spanning(tuple(devices)):
        from shardtensor.communication.between_processes.spanning_communicator import (
            SpanningCommunicator,  # Few programs need it.
        )

        return SpanningCommunicator(caller, axis, devices, sizes)
    return ArrayCommunicator(caller, axis, devices, sizes)
