"""Memory kinds: tensors whose shards are offloaded to page-locked host memory, and copied to devices when read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from shardtensor.backend.device import HOST, Device, HostArray
from shardtensor.backend.exclusive_memory import read_only
from shardtensor.communication.transfer import to_host_movement
from shardtensor.communication.transfer_log import Transfer, announce, record_transfer
from shardtensor.host import fork
from shardtensor.sharding.index import Index
from shardtensor.tensor.storage import DeferredStorage, NoElements, Storage
from shardtensor.tensor.tensor import INFERRED
from shardtensor.tensor.value import Aval


class OffloadedStorage(DeferredStorage):
    """The storage of a tensor of memory kind ``pinned_host``, where that is separate from device memory.

    The devices keep no copy: every read copies the shards back to them.

    Attributes:
        hosts: one host array for each part; devices that hold the same part share it.
    """

    __slots__ = ("__weakref__", "_tokens", "_value", "hosts")

    def __init__(self, value: Aval, hosts: dict[int, Any], tokens: dict[int, Any]) -> None:
        self._value = value
        self.hosts = hosts
        self._tokens = tokens

    def stored(self) -> Storage:
        """Copies the shards to their devices, and returns their storage."""
        announce(self)
        return self.coming().stored()

    def announce(self) -> None:
        """Records that the shards are copied to their devices."""
        _announce(self._value)

    def without_parts(self) -> OffloadedElements:
        """Returns the storage of a tensor without elements that stands for the tensor."""
        return OffloadedElements(self._value)

    def coming(self) -> PrefetchedStorage:
        """Starts the copies of the shards to their devices; a device waits for its copy when the storage is read."""
        value = self._value
        backend, arrays, tokens = value.backend, [], []
        for part, device in zip(value.grid.linear_parts().tolist(), value.grid.devices, strict=True):
            with backend.on(device):
                array, token = backend.onload(self.hosts[part], device, self._tokens[part])
            arrays.append(array)
            tokens.append(token)
        return PrefetchedStorage(value, tuple(arrays), tokens)

    def settle(self) -> None:
        """Waits until all shards are in host memory."""
        for token in self._tokens.values():
            if token is not None:
                self._value.backend.settle(token)

    def shards(self) -> list[HostArray]:
        """Returns one read-only host array for each device, in mesh order."""
        self.settle()
        return [read_only(self.hosts[part]) for part in self._value.grid.linear_parts().tolist()]

    def to_host(self, index: Index | None) -> HostArray:
        """Returns the tensor, or the elements that a basic index selects, from host memory, without any device."""
        self.settle()
        movement, parts = to_host_movement(self._value, index), self._value.grid.linear_parts().tolist()
        out = np.empty(movement.result.shape(0), self._value.dtype)
        for piece in movement.incoming[0]:
            out[piece.to] = self.hosts[parts[piece.j]][piece.index or ...]
        return read_only(out)


class OffloadedElements(NoElements):
    """The storage of a tensor without elements that stands for an offloaded one with elements."""

    __slots__ = ("_value",)

    def __init__(self, value: Aval) -> None:
        super().__init__(INFERRED)
        self._value = value

    def announce(self) -> None:
        """Records that the shards are copied to their devices, as every read does."""
        _announce(self._value)

    def announce_element(self, devices: Sequence[Device]) -> None:
        """Records that one element is copied to devices."""
        announce_element(self._value.dtype.itemsize, devices)


def _announce(value: Aval) -> None:
    records = memory_kind_transfers(value, on=True, explicit=False, caller="pinned_host")
    record_transfer("pinned_host", sum(record.bytes for record in records), False, lambda: records)


def announce_element(nbytes: int, devices: Sequence[Device]) -> None:
    """Records that one element of an offloaded tensor is copied to devices."""
    record_transfer("getitem", 0, True, lambda: [Transfer(nbytes, nbytes, HOST, d, "getitem", True) for d in devices])


_PREFETCHED = fork.lock()
"""Held while a prefetched storage becomes a plain one: several threads may read one tensor, and so may a finalizer that
the garbage collector calls meanwhile.
"""


class PrefetchedStorage(DeferredStorage):
    """A storage whose shards are being copied to their devices; each device waits for its copy on the first read."""

    __slots__ = ("__weakref__", "_arrays", "_storage", "_tokens", "_value")

    def __init__(self, value: Aval, arrays: tuple[Any, ...], tokens: Sequence[Any]) -> None:
        self._value = value
        self._arrays: tuple[Any, ...] | None = arrays
        self._tokens = tokens
        self._storage: Storage | None = None

    @property
    def memory(self) -> Storage | None:  # type: ignore[override]
        """See `DeferredStorage`."""
        return self._storage

    @property
    def arrays(self) -> tuple[Any, ...]:
        """The arrays of the devices, which may still be written by the copies."""
        storage = self._storage
        return (self._arrays or ()) if storage is None else storage.buffers

    def stored(self) -> Storage:
        """Returns the storage, ordered after the copies."""
        with _PREFETCHED:
            if self._storage is None:
                for device, token in zip(self._value.grid.devices, self._tokens, strict=True):
                    if token is not None:
                        self._value.backend.wait(device, token)
            if self._storage is None:  # A finalizer may have read the tensor meanwhile.
                self._storage = Storage(self._arrays or (), tuple([[] for _ in self._tokens]))
                self._arrays = None
            return self._storage


def offloaded(value: Aval, arrays: Sequence[Any]) -> Storage | OffloadedStorage:
    """Returns the storage of a value on separate memories, in the memory of its kind.

    ``arrays`` has one array for each device. Those of memory kind ``pinned_host`` are offloaded, each part once.
    """
    if not value.offloaded:
        return Storage(tuple(arrays))
    backend, grid = value.backend, value.grid
    parts, hosts, tokens = grid.linear_parts().tolist(), {}, {}
    for k in grid.owners():
        with backend.on(grid.devices[k]):
            hosts[parts[k]], tokens[parts[k]] = backend.offload(backend.contiguous(arrays[k]), grid.devices[k])
    return OffloadedStorage(value, hosts, tokens)


def pinned(value: Aval, whole: HostArray) -> OffloadedStorage:
    """Returns a host array as the storage of an offloaded tensor, which need not fit on the devices."""
    grid = value.grid
    parts = grid.linear_parts().tolist()
    hosts = {parts[k]: value.backend.pin(whole[grid.index(k)]) for k in grid.owners()}
    return OffloadedStorage(value, hosts, dict.fromkeys(hosts))


def memory_kind_transfers(value: Aval, *, on: bool, explicit: bool, caller: str) -> list[Transfer]:
    """Returns the log's records of copying a whole value to its devices (``on``), or from them to the host."""
    records, grid, itemsize = [], value.grid, value.dtype.itemsize
    for k in range(len(grid.devices)) if on else grid.owners():
        n = int(np.prod(grid.shape(k), dtype=np.int64)) * itemsize
        source, destination = (HOST, grid.devices[k]) if on else (grid.devices[k], HOST)
        records.append(Transfer(n, n if value.backend.pinned_host else 0, source, destination, caller, explicit))
    return records
