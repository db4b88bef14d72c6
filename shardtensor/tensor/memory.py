"""The memory of tensors: how many bytes each device holds, and how many it has held at the same time.

The bytes in use are found when they are asked for, from the tensors that exist. The peak needs each tensor when it is
made: while it is measured, the attribute in which tensors keep their storage is a property that notes what is bound to
it. Otherwise nothing is noted, and nothing takes longer.
"""

from __future__ import annotations

import functools
import gc
import itertools
import math
import weakref
from collections import Counter, deque
from collections.abc import Hashable, Iterable, Sequence
from typing import Any, NamedTuple, overload

from shardtensor.backend.device import HOST, Device
from shardtensor.backend.registry import is_remote, local_devices
from shardtensor.backend.remote import RemoteArray
from shardtensor.errors import ArgumentTypeError, type_text
from shardtensor.host import fork
from shardtensor.tensor.handle import Handle
from shardtensor.tensor.storage import Storage
from shardtensor.tensor.tensor import ShardedTensor
from shardtensor.tensor.value import Aval


class MemoryInfo(NamedTuple):
    """The memory of tensors on one device, as `memory_info` returns it.

    >>> st.memory_info(st.devices()[0])._fields
    ('bytes_in_use', 'peak_bytes_in_use')

    Attributes:
        bytes_in_use: the bytes that tensors hold.
        peak_bytes_in_use: their maximum since `reset_peak_memory`; None if it has not been called.
    """

    bytes_in_use: int
    peak_bytes_in_use: int | None


Shares = dict[Device, int]
"""The bytes of one memory that belong to each device."""


class _Tensors:
    """The storages of tensors that exist.

    Storages end at any point, in any thread: a weak reference that has ended is only put into a queue then, which the
    next call empties.
    """

    def __init__(self) -> None:
        self._in_use: Shares = {}
        self._peak: Shares = {}
        self._lock = fork.lock()
        self._ended: deque[weakref.ref[Any]] = deque()
        self._known: dict[int, weakref.ref[Any]] = {}  # by the id() of the storage
        # The id() and the memories of a storage, by the id() of its weak reference.
        self._held: dict[int, tuple[int, list[Hashable]]] = {}
        self._memories: dict[Hashable, dict[int, Shares]] = {}  # the shares of the storages that have a memory

    def note_all(self) -> None:
        """Notes the tensors that exist."""
        for x in gc.get_objects():
            if type(x) is ShardedTensor and hasattr(x, "_storage"):  # Another thread may be making it.
                self.note(x._aval, x._storage)

    def note(self, value: Aval, storage: Any) -> None:
        """Notes the storage of a tensor."""
        known = self._known.get(id(storage))
        if known is not None and known() is storage:
            return
        memories = _memories_of(value, storage)
        if not memories:
            return
        with self._lock:
            self._forget_ended()
            reference = weakref.ref(storage, self._ended.append)
            self._known[id(storage)] = reference
            self._held[id(reference)] = id(storage), list(memories)
            for memory, shares in memories.items():
                self._change(memory, id(reference), shares)
            for device, n in self._in_use.items():
                self._peak[device] = max(n, self._peak.get(device, 0))

    def _forget_ended(self) -> None:
        """Removes the storages that have ended."""
        while self._ended:
            reference = self._ended.popleft()
            number, memories = self._held.pop(id(reference))
            if self._known.get(number) is reference:  # Otherwise another storage has that number now.
                del self._known[number]
            for memory in memories:
                self._change(memory, id(reference), None)

    def reset(self) -> None:
        """Sets the peak to the bytes in use."""
        with self._lock:
            self._forget_ended()
            self._peak = dict(self._in_use)

    def info(self, *, with_peak: bool) -> dict[Device, MemoryInfo]:
        """Returns the memory of each device."""
        with self._lock:
            self._forget_ended()
            return {d: MemoryInfo(n, self._peak[d] if with_peak else None) for d, n in self._in_use.items()}

    def _change(self, memory: Hashable, number: int, shares: Shares | None) -> None:
        """Sets the shares that a storage has of a memory. Several storages of a memory count once."""
        holders = self._memories.setdefault(memory, {})
        before = _union(holders.values())
        if shares is None:
            del holders[number]
        else:
            holders[number] = shares
        after = _union(holders.values())
        if not holders:
            del self._memories[memory]
        for device in before.keys() | after.keys():
            self._in_use[device] = self._in_use.get(device, 0) + after.get(device, 0) - before.get(device, 0)


def _union(holders: Iterable[Shares]) -> Shares:
    """Returns the bytes of a memory that each device has, given the shares of the storages that have it."""
    union: Shares = {}
    for shares in holders:
        for device, n in shares.items():
            union[device] = max(n, union.get(device, 0))
    return union


def _memories_of(value: Aval, storage: Any) -> dict[Hashable, Shares]:
    """Returns the bytes that each device has of the memories of a storage; nothing for one that has none of its own."""
    if (offloaded := getattr(storage, "hosts", None)) is not None:
        return {("host", id(a)): {HOST: int(a.nbytes)} for a in offloaded.values()}
    storage = getattr(storage, "exported", storage)
    arrays = storage.buffers if type(storage) is Storage else getattr(storage, "arrays", ())
    memories: dict[Hashable, Shares] = {}
    times = Counter(map(id, arrays))
    for array, shares in zip(arrays, _shares(value, len(arrays)), strict=True):
        memory = None if type(array) is RemoteArray else value.backend.memory_of(array)
        mine = memories.setdefault(("array", id(array)) if memory is None else memory, {})
        for device, n in shares.items():
            mine[device] = mine.get(device, 0) + n // times[id(array)]
    return memories


@functools.lru_cache(1024)
def _shares(value: Aval, count: int) -> list[Shares]:
    """Returns the bytes that the devices of this process have of each of ``count`` buffers: a device's share of a
    buffer that several have is proportional to the size of its shard.
    """
    if not count:
        return []
    grid, cells, shares = value.grid, value.cells, []
    groups: Sequence[Sequence[int]]
    if count == len(grid.devices):
        groups, sizes = [[k] for k in range(count)], [math.prod(grid.shape(k)) for k in range(count)]
    else:
        groups, sizes = cells.positions, [math.prod(cells.grid.shape(n)) for n in range(count)]
    for positions, size in zip(groups, sizes, strict=True):
        ends = [0, *itertools.accumulate([math.prod(grid.shape(k)) for k in positions])]
        bounds = [size * value.dtype.itemsize * end // max(ends[-1], 1) for end in ends]
        devices = [grid.devices[k] for k in positions]
        shares.append({d: b - a for d, a, b in zip(devices, bounds, bounds[1:], strict=False) if not is_remote(d)})
    return shares


class _Noting:
    """The attribute ``_storage`` of tensors while the peak is measured."""

    def __init__(self, slot: Any) -> None:
        self._get, self._set = slot.__get__, slot.__set__

    def __get__(self, x: Any, cls: Any = None) -> Any:
        return self._get(x, cls)

    def __set__(self, x: Any, storage: Any) -> None:
        self._set(x, storage)
        if (tensors := _measured) is not None:
            tensors.note(x._aval, storage)


_measured: _Tensors | None = None
"""The tensors that exist, while the peak is measured."""


@overload
def memory_info(device: None = None) -> dict[Device, MemoryInfo]: ...


@overload
def memory_info(device: Device) -> MemoryInfo: ...


def memory_info(device: Device | None = None) -> MemoryInfo | dict[Device, MemoryInfo]:
    """Returns how many bytes of memory tensors use on each device, and their peak.

    A buffer that several devices share counts on each of them by the size of its shard: a replicated tensor in memory
    that eight devices share counts one eighth on each, and one in separate memories as a whole on each. Views and
    copies that share memory with a tensor do not count again. Elements offloaded to ``pinned_host`` memory count for
    the host, where that is a separate memory. Neither the memory that is kept for reuse (`cache_info`) nor what an
    operator needs while it runs is counted. In a job of several processes, each one counts its own devices.

    Args:
        device: a device of this process; by default all of them, and ``host`` if there are offloaded tensors.

    Returns:
        The `MemoryInfo` of the device, or a dictionary of devices and their `MemoryInfo`.

    >>> x = st.zeros(1000, device=st.make_mesh((4,), ("x",)))
    >>> st.reset_peak_memory()
    >>> before = st.memory_info(st.devices()[0])
    >>> y = (x + 1) * 2  # Two results exist at the same time, each of 2000 bytes on a device.
    >>> info = st.memory_info(st.devices()[0])
    >>> info.bytes_in_use - before.bytes_in_use, info.peak_bytes_in_use - before.bytes_in_use
    (2000, 4000)
    >>> st.reset_peak_memory(measure=False)
    """
    if device is not None and type(device) is not Device:
        raise ArgumentTypeError(f"memory_info: device is {type_text(device)}; wanted a device, such as st.devices()[0]")
    tensors, measured = _measured, _measured is not None
    if tensors is None:
        tensors = _Tensors()
        tensors.note_all()
    info = tensors.info(with_peak=measured)
    if device is not None:
        return info.get(device, MemoryInfo(0, 0 if measured else None))
    for d in local_devices():
        info.setdefault(d, MemoryInfo(0, 0 if measured else None))
    return dict(sorted(info.items()))


def reset_peak_memory(*, measure: bool = True) -> None:
    """Sets the peak of the memory of each device, which `memory_info` returns, to the bytes that are in use now.

    From then on the tensors that a program makes are counted, which takes some microseconds for each.

    Args:
        measure: False ends the measurement; then no peak is known, and nothing takes longer.

    >>> st.reset_peak_memory()
    >>> info = st.memory_info(st.devices()[0])
    >>> info.peak_bytes_in_use == info.bytes_in_use
    True
    >>> st.reset_peak_memory(measure=False)
    """
    global _measured
    if measure and _measured is None:
        _measured = _Tensors()
        type.__setattr__(ShardedTensor, "_storage", _Noting(Handle.__dict__["_storage"]))
        _measured.note_all()
    elif not measure and _measured is not None:
        type.__delattr__(ShardedTensor, "_storage")
        _measured = None
    if _measured is not None:
        _measured.reset()
