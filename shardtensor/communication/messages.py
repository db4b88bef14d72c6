"""Messages: arrays that are sent from one device to another, short ones packed together."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from shardtensor.backend.device import HOST, HOST_MEMORY, Device
from shardtensor.backend.protocol import Backend
from shardtensor.backend.registry import backend_of, is_remote, shared_memory
from shardtensor.communication.between_processes.processes import cross, process_of
from shardtensor.host import blockwise


class Message(NamedTuple):
    """An array on the device ``source`` that the device ``destination`` needs."""

    array: Any
    source: Device
    destination: Device

    @property
    def is_local(self) -> bool:
        """Whether the destination can read the array where it is."""
        if is_remote(self.destination):
            return process_of(self.source) == process_of(self.destination)
        return self.source == self.destination or shared_memory((self.source, self.destination)) is not None

    def packs_with(self) -> Any:
        """A key that is equal for messages that may be sent as one; None for long arrays, each of which is one."""
        backend = backend_of(self.source)
        short = math.prod(self.array.shape) * backend.dtype_of(self.array).itemsize <= _PACKED_UP_TO
        return (self.source, self.destination, backend.dtype_of(self.array)) if short else None


_PACKED_UP_TO = 1 << 16
"""Bytes of an array up to which copying it costs less than another message."""


def exchange(messages: Sequence[Message]) -> Iterator[Any]:
    """Yields the arrays of messages on their destinations, in order; local ones as they are.

    Short arrays that go from one device to the same other one are packed into one message. The others are sent one
    after the other, when they are asked for.
    """
    away = [number for number, message in enumerate(messages) if not message.is_local]
    groups: dict[Any, list[int]] = {}
    for number in away if len(away) > 1 else ():
        if (key := messages[number].packs_with()) is not None:
            groups.setdefault(key, []).append(number)
    group_of = {number: group for group in groups.values() if len(group) > 1 for number in group}
    sent, arrived = set(away), dict[int, Any]()
    for number, message in enumerate(messages):
        if number not in sent:
            yield message.array
        elif number not in group_of:
            yield send(*message)
        else:
            if number not in arrived:
                group = group_of[number]
                arrived.update(zip(group, _sent_as_one([messages[n] for n in group]), strict=True))
            yield arrived.pop(number)


def _sent_as_one(messages: Sequence[Message]) -> list[Any]:
    """Packs arrays of one dtype on one device, sends them to another device, and unpacks them there."""
    _, source, destination = messages[0]
    giver, taker = backend_of(source), backend_of(destination)
    shapes = [tuple(m.array.shape) for m in messages]
    with giver.on(source):
        packed = giver.xp.concat([giver.xp.reshape(giver.contiguous(m.array), (-1,)) for m in messages])
    buffer = send(packed, source, destination)
    ends = list(itertools.accumulate(map(math.prod, shapes), initial=0))
    with taker.on(destination):
        parts = [taker.view(buffer, slice(*pair)) for pair in itertools.pairwise(ends)]
        return [taker.xp.reshape(part, shape) for part, shape in zip(parts, shapes, strict=True)]


def bring(array: Any, source: Device, destination: Device) -> Any:
    """Returns an array for reading on another device: as it is, if the device can read it there, otherwise a copy."""
    return array if shared_memory((source, destination)) is not None else send(array, source, destination)


def send(array: Any, source: Device, destination: Device) -> Any:
    """Copies ``array`` from device ``source`` to another device.

    The destination is of the same backend, or of another backend that can address the same memory; otherwise the
    elements are copied through the host.
    """
    if is_remote(source) or is_remote(destination):
        (array,) = cross([(array, source, destination)], "transfer")
        return array
    giver, taker = backend_of(source), backend_of(destination)
    if giver is taker:
        with giver.on(source):
            array = giver.contiguous(array)
        giver.wait(destination, giver.record(source))
        with giver.on(destination):
            return giver.to_device(array, source, destination)
    if giver.dlpack_device(source) == taker.dlpack_device(destination) != HOST_MEMORY:
        return _share(array, source, destination)
    with giver.on(source):
        host = giver.to_host(array, source)
    if destination == HOST:
        return host
    with taker.on(destination):
        return taker.from_host(host, destination)


def _share(array: Any, source: Device, destination: Device) -> Any:
    """Copies an array to a device of another backend that can address the memory of the array."""
    giver, taker = backend_of(source), backend_of(destination)
    with giver.on(source):
        capsule = giver.to_dlpack(array)
    giver.synchronize(source)  # the backends do not share an order of execution
    with taker.on(destination):
        copy = taker.xp.asarray(taker.from_dlpack(capsule, destination), copy=True)
    taker.synchronize(destination)  # the source may be overwritten or freed after this call
    return copy


def as_dtype(backend: Backend, array: Any, dtype: Any) -> Any:
    """Converts an array to a dtype; its device is current. Not every library converts on assignment as NumPy does."""
    return array if backend.dtype_of(array) == dtype else backend.xp.asarray(array, dtype=dtype)


def copied(array: Any, device: Device) -> Any:
    """Returns a copy of an array on its device."""
    backend = backend_of(device)
    if backend.on_host:
        return blockwise.copied(array)
    with backend.on(device):
        return backend.xp.asarray(array, copy=True)
