"""Copies of host arrays to the devices of one backend with memories of its own, and back, along routes that are known.

What follows from the layouts is computed once for each plan: which part each device receives, and where it is. Only the
copies themselves remain, so that operands of few elements do not wait for the interpreter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from shardtensor.backend.device import Device
from shardtensor.backend.protocol import Backend
from shardtensor.communication.messages import as_dtype


class Arrival(NamedTuple):
    """A part of a host array that is the whole array of a device.

    Attributes:
        device: the device.
        operand: the number of the host array.
        index: the index of the part; None for the whole.
    """

    device: Device
    operand: int
    index: Any


class Departure(NamedTuple):
    """A part of an array of a device that is copied to the host.

    Attributes:
        device: the device.
        operand, j: the number of the operand, and the position of the device in it.
        index: the index of the part; None for the whole.
        to: the index of its place in the host array.
    """

    device: Device
    operand: int
    j: int
    index: Any
    to: Any


def from_host(
    backend: Backend,
    arrivals: Iterable[Arrival],
    operands: Sequence[Sequence[Any]],
    dtype: Any,
    as_they_lie: bool,
) -> tuple[Any, ...]:
    """Returns the arrays of devices, each of which is copied from the host; see `TransferPlan.run`."""
    results = []
    for device, operand, index in arrivals:
        (host,) = operands[operand]
        with backend.on(device):
            array = backend.from_host(host if index is None else host[index], device)
            # Replicas must be reduced in the same order on every device.
            results.append(as_dtype(backend, array if as_they_lie else backend.contiguous(array), dtype))
    return tuple(results)


def to_host(
    backend: Backend, departures: Iterable[Departure], operands: Sequence[Sequence[Any]], new: Callable[[], Any]
) -> Any:
    """Returns a host array, into which parts of the arrays of devices are copied; ``new`` makes it."""
    out = new()
    for device, operand, j, index, to in departures:
        array = operands[operand][j]
        with backend.on(device):
            out[to] = backend.to_host(array if index is None else backend.view(array, index), device)
    return out
