"""Freight: the arrays that processes send to each other in one exchange.

Where the engine sends arrays between devices (see `DeviceEngine`), each array is one message. Otherwise those
of each pair of processes are packed into packets in host memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from shardtensor.backend.device import Device, HostArray
from shardtensor.backend.registry import array_backend, backend_of, process_index
from shardtensor.backend.remote import RemoteArray
from shardtensor.communication.between_processes.rounds import MOST, Packet, Parcel, as_bytes, rounds
from shardtensor.host import memory_pool

if TYPE_CHECKING:  # Programs of one process do not need it.
    from shardtensor.communication.between_processes.agreement import Agreement


class Freight:
    """Arrays that processes send to each other, in one exchange.

    Args:
        parcels: the arrays.
        messages: for each the array itself, if this process sends it, its device, and that which receives it.
        into: for each the array that receives the elements, or None.
    """

    def __init__(
        self, parcels: Sequence[Parcel], messages: Sequence[tuple[Any, Device, Device]], into: Sequence[Any]
    ) -> None:
        self._parcels = parcels
        self._messages = messages
        self._into = list(into)
        self._here = process_index()

    def carried(self, job: Agreement, caller: str) -> list[Any]:
        """Returns the arrays that this process receives, and the shapes and dtypes of the others."""
        # Programs of one process do not need it.
        from shardtensor.communication.between_processes.agreement import SHORT

        plan = rounds(tuple(self._parcels), MOST)
        call = f"{caller}: {plan.text}"
        if job.device_engine and self._is_between(job.device_engine.device_backend):
            self._send_arrays(job, call)
        else:
            for number in plan.cut:
                if self._into[number] is None and self._parcels[number].receiver == self._here:
                    self._into[number] = self._empty(number)
            if plan.longest <= SHORT and len(plan.packets) == 1 and job.sends_short:
                self._send_short(job, call, plan.packets[0], SHORT)
            else:
                job.stream(call, map(self._round, plan.packets))
        return [
            array if parcel.receiver == self._here else RemoteArray(parcel.shape, parcel.dtype)
            for parcel, array in zip(self._parcels, self._into, strict=True)
        ]

    def _is_between(self, backend: str) -> bool:
        """Whether all arrays are sent from devices of a backend to devices of it, which all processes know alike."""
        return all(a.backend == b.backend == backend for _, a, b in self._messages)

    def _send_arrays(self, job: Agreement, call: str) -> None:
        """Sends each array by the engine, from the memory of its device to that of the other one."""
        outgoing: dict[int, list[Any]] = {}
        incoming: dict[int, list[Any]] = {}
        packed: dict[int, Any] = {}  # Arrays that go to several processes are copied once.
        apart: list[tuple[Any, Device, Any]] = []  # Arrays that are copied to where they belong once they are here.
        for number, (parcel, (array, source, destination)) in enumerate(
            zip(self._parcels, self._messages, strict=True)
        ):
            if parcel.sender == self._here and parcel.nbytes:
                if id(array) not in packed:
                    packed[id(array)] = _in_rows(array, source)
                outgoing.setdefault(parcel.receiver, []).append(packed[id(array)])
            elif parcel.receiver == self._here:
                target = self._into[number]
                if target is None:
                    received = self._into[number] = self._empty(number)
                elif _lies_as_sent(target, parcel, destination):
                    received = target
                else:
                    received = self._empty(number)
                    apart.append((target, destination, received))
                if parcel.nbytes:
                    incoming.setdefault(parcel.sender, []).append(received)
        job.exchange_arrays(call, outgoing, incoming)
        for target, destination, received in apart:
            _assign(target, ..., received, destination)

    def _send_short(self, job: Agreement, call: str, packets: Sequence[Packet], size: int) -> None:
        """Sends packets of few bytes together with the header, to all processes."""
        own = [packet for packet in packets if packet.sender == self._here]
        for packet in own:
            job.sent[packet.receiver] += packet.nbytes
        records = job.gather(call, b"".join([self._packed(packet).tobytes() for packet in own]).ljust(size, b"\0"))
        begins: dict[int, int] = {}
        for packet in packets:
            begin = begins.get(packet.sender, 0)
            begins[packet.sender] = begin + packet.nbytes
            if packet.receiver == self._here:
                # A copy, since bytes cannot be written to, and may not be aligned.
                arrived = np.frombuffer(records[packet.sender], np.uint8, packet.nbytes, begin).copy()
                target = self._target(packet)
                if target is not None:
                    target[...] = arrived
                self._store(packet, arrived)

    def _round(self, packets: Sequence[Packet]) -> Iterator[tuple[dict[int, Any], dict[int, Any]]]:
        """Yields what is sent to and received from each process, and then stores what was received."""
        outgoing: dict[int, Any] = {}
        incoming: dict[int, Any] = {}
        packed: dict[Any, Any] = {}  # Arrays that go to several processes are packed once.
        for packet in packets:
            if packet.sender == self._here:
                # Receivers may get different parts of one array in the same round.
                key = tuple([(id(self._messages[p.number][0]), p.begin, str(p.box)) for p in packet.parts])
                if key not in packed:
                    packed[key] = self._packed(packet)
                outgoing[packet.receiver] = packed[key]
            elif packet.receiver == self._here:
                target = self._target(packet)
                incoming[packet.sender] = _new(packet.nbytes) if target is None else target
        yield outgoing, incoming
        outgoing.clear()  # The caller still refers to both, while the next round is packed.
        for packet in packets:
            if packet.receiver == self._here:
                self._store(packet, incoming.pop(packet.sender))

    def _packed(self, packet: Packet) -> Any:
        """Returns the bytes of a packet: those of the array itself, if it is the only one and lies as it is sent."""
        hosts = host_copies([(*self._messages[part.number][:2], part.box) for part in packet.parts])
        if len(hosts) == 1 and hosts[0].flags.c_contiguous:
            return as_bytes(hosts[0])
        packed = _new(packet.nbytes)
        for part, host in zip(packet.parts, hosts, strict=True):
            packed[part.begin : part.end].view(host.dtype).reshape(part.shape)[...] = host
        return packed

    def _target(self, packet: Packet) -> Any:
        """Returns the bytes of the array that receives the elements, if it is the only one and can receive them as they
        are; otherwise None.
        """
        part = packet.parts[0]
        target = self._into[part.number]
        if len(packet.parts) > 1 or type(target) is not np.ndarray or target.dtype != self._parcels[part.number].dtype:
            return None
        elements = target[part.box] if part.box is not None else target
        return as_bytes(elements) if elements.flags.c_contiguous else None

    def _store(self, packet: Packet, arrived: Any) -> None:
        """Copies the arrays of a packet that was received to where they belong."""
        if self._target(packet) is not None:
            return
        for part in packet.parts:
            host = arrived[part.begin : part.end].view(self._parcels[part.number].dtype).reshape(part.shape)
            device, target = self._messages[part.number][2], self._into[part.number]
            array = host if backend_of(device).on_host else _sent_from_host(host, device)
            if target is None:
                self._into[part.number] = array
            else:
                _assign(target, ... if part.box is None else part.box, array, device)

    def _empty(self, number: int) -> Any:
        """Returns new memory for an array on its destination."""
        device, parcel = self._messages[number][2], self._parcels[number]
        backend = backend_of(device)
        if backend.on_host:
            return memory_pool.empty(parcel.shape, parcel.dtype)
        with backend.on(device):
            return backend.xp.empty(parcel.shape, dtype=parcel.dtype)


def _new(nbytes: int) -> Any:
    return memory_pool.empty((nbytes,), np.dtype(np.uint8))


def _sent_from_host(host: HostArray, device: Device) -> Any:
    backend = backend_of(device)
    with backend.on(device):
        return backend.from_host(host, device)


def _in_rows(array: Any, device: Device) -> Any:
    """Returns an array on its device in row-major order; one in host memory, such as a number, is copied there."""
    if type(array) is np.ndarray:
        return _sent_from_host(array, device)
    backend = backend_of(device)
    with backend.on(device):
        return backend.contiguous(array)


def _lies_as_sent(target: Any, parcel: Parcel, device: Device) -> bool:
    """Whether the array that receives the elements has them in the order and the dtype in which they are sent."""
    backend = backend_of(device)
    return backend.is_contiguous(target) and backend.dtype_of(target) == parcel.dtype


def _assign(target: Any, index: Any, array: Any, device: Device) -> None:
    """Writes an array to elements of another one on its device."""
    backend = backend_of(device)
    with backend.on(device):
        target[index] = array if backend.on_host else backend.xp.asarray(array, dtype=backend.dtype_of(target))


def numpy_dtype(array: Any) -> np.dtype[Any]:
    """Returns the NumPy dtype of an array of any backend, or of another process."""
    if type(array) is RemoteArray or isinstance(array, (np.ndarray, np.generic)):
        return array.dtype
    backend = array_backend(array)
    assert backend is not None
    return backend.dtype_of(array)


def host_copies(parts: Sequence[tuple[Any, Device, tuple[slice, ...] | None]]) -> list[HostArray]:
    """Returns the elements of arrays on devices, or those in a box of each, as host arrays.

    Where a backend has page-locked memory, all of them are copied to it at the same time.
    """
    hosts, tokens = [], []
    for array, device, box in parts:
        if type(array) is np.ndarray:
            hosts.append(array[box] if box else array)
            continue
        backend = backend_of(device)
        with backend.on(device):
            part = backend.view(array, box) if box else array
            if backend.pinned_host:
                host, token = backend.offload(backend.contiguous(part), device)
                tokens.append((backend, token))
            else:
                host = np.asarray(backend.to_host(part, device))
            hosts.append(host)
    for backend, token in tokens:
        if token is not None:
            backend.settle(token)
    return hosts
