"""What a tensor is a handle on: what is known of a value (`Aval`), and where its elements are kept (`Storage`)."""

from __future__ import annotations

import abc
import functools
import math
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

import numpy as np

from shardtensor import pool
from shardtensor.backend import Backend, HostArray, references
from shardtensor.errors import ArgumentTypeError, DonatedError, ShardTensorError
from shardtensor.log import note_copy
from shardtensor.passes import copied, copy_into
from shardtensor.phantom import Ghost
from shardtensor.plugins import backend_of_group
from shardtensor.sharding import Grid, NamedSharding, Shape


class Aval:
    """What is known of a tensor without its elements: shape, dtype, sharding, and whether somebody chose the sharding.

    Made by `aval`, which gives the same object for the same value, so that avals are compared and hashed by identity:
    that is what keeps a look-up in the plan cache under a microsecond.
    """

    __slots__ = ("backend", "committed", "dtype", "nbytes", "ndim", "parked", "shape", "sharding", "size")

    def __init__(self, shape: Shape, dtype: np.dtype[Any], sharding: NamedSharding, committed: bool) -> None:
        sharding.check_rank(len(shape), "sharding")
        self.shape = shape
        self.dtype = dtype
        self.sharding = sharding
        self.committed = committed
        self.ndim = len(shape)
        self.size = math.prod(shape)
        self.nbytes = self.size * dtype.itemsize
        self.backend: Backend = backend_of_group(sharding.mesh.flat)
        self.parked = self.backend.pinned_host and sharding.memory_kind == "pinned_host"  # see shardtensor.parking
        if not self.backend.has_dtype(dtype):
            raise ArgumentTypeError(
                f"backend {self.backend.name!r} has no arrays of {dtype}; convert with astype, or use another backend"
            )

    @property
    def grid(self) -> Grid:
        """Its shards."""
        return self.sharding.grid(self.shape)


@functools.lru_cache(8192)
def aval(shape: Shape, dtype: np.dtype[Any], sharding: NamedSharding, committed: bool) -> Aval:
    """The `Aval` of that value."""
    return Aval(shape, dtype, sharding, committed)


def memory_kind(values: Iterable[Aval]) -> str | None:
    """Where the result of an operator lies: in host memory only if all that it reads does."""
    kinds = {value.sharding.memory_kind for value in values}
    return kinds.pop() if len(kinds) == 1 else None


def on_devices(value: Aval) -> Aval:
    """The same in device memory."""
    if not value.parked:
        return value
    return aval(value.shape, value.dtype, value.sharding.with_memory_kind("device"), value.committed)


class Storage:
    """The elements of one tensor in this process.

    Attributes:
        arrays: one array of the backend per device, in mesh order; None where there is one buffer.
        array: where devices share one memory, the one buffer; None until the pieces are joined.
    """

    __slots__ = ("array", "arrays")

    def __init__(self, array: Any = None, arrays: tuple[Any, ...] | None = None) -> None:
        self.array = array
        self.arrays = arrays


class StandIn(abc.ABC):
    """What a handle holds in place of a storage that has to be waited for, brought or refused first."""

    __slots__ = ()

    @abc.abstractmethod
    def stored(self) -> Any:
        """The storage."""

    @property
    def array(self) -> Any:
        """See `Storage`."""
        return self.stored().array

    @property
    def arrays(self) -> Any:
        """See `Storage`."""
        return self.stored().arrays


class Ledger:
    """What a tensor that is written to, or looked at by views, keeps beside its value.

    Attributes:
        lock: held from reading the old value to binding the new one.
        version: how often it was written.
        caches: what forgets what it has read of the value; by identity, so that views can die.
    """

    __slots__ = ("caches", "lock", "version")

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.version = 0
        self.caches: dict[int, Any] = {}

    def forget(self) -> None:
        """Empties the caches: what they held of the value must not count as held."""
        caches, self.caches = self.caches, {}
        for reference in caches.values():
            view = reference()
            if view is not None:
                view.forget()


class Writing(StandIn):
    """In place of the storage of a tensor that is being written: readers wait until it has its new value."""

    __slots__ = ("ledger", "storage")

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.storage: Any = None

    def stored(self) -> Any:
        """The new value's storage, once it is there."""
        with self.ledger.lock:
            if self.storage is None:
                raise ShardTensorError("a tensor is read by what is writing to it; read it before")
            return self.storage


class Donated(StandIn):
    """In place of the storage of a tensor that was given away: every use says so."""

    def __init__(self, by: str) -> None:
        self.by = by

    def stored(self) -> NoReturn:
        """Raises DonatedError."""
        raise DonatedError(
            f"this tensor was given away by {self.by}(..., donate=True); use what that returned, or do not donate"
        )


class Exported(StandIn):
    """In place of the storage of a tensor on one device whose memory another library holds and may write (see
    `shardtensor.exports`): every read gets a copy, so that the consumer's writes show in this tensor only. The storage
    itself returns when the last consumer has released the memory.

    Attributes:
        lent: the storage itself, for writes, which copy it while a consumer holds its memory.
    """

    __slots__ = ("_lock", "_released", "_value", "lent")

    def __init__(self, value: Aval, storage: Storage) -> None:
        self._value = value
        self.lent = storage
        self._released = False
        self._lock = threading.Lock()

    def stored(self) -> Storage:
        """The storage once no consumer holds its memory; until then a copy."""
        with self._lock:
            if self._is_released():
                return self.lent
        array = self.read(lambda array: array)
        return Storage(array) if self._value.backend.one_memory else Storage(arrays=(array,))

    def read(self, take: Callable[[Any], Any]) -> Any:
        """The view that ``take`` gives of the array, or a copy of that view while a consumer holds the memory."""
        backend, device = self._value.backend, self._value.sharding.mesh.flat[0]
        with self._lock:
            held = not self._is_released()
            array = only_array(self.lent)
        with backend.on(device):
            if not held:
                return take(array)
            backend.enter(device)  # after what the consumer has queued
            part = take(array)
            part = copied(part) if backend.one_memory else backend.xp.asarray(part, copy=True)
        note_copy("to_dlpack", int(part.nbytes), device)
        return part

    @property
    def array(self) -> Any:
        """See `Storage`."""
        return self.stored().array if self._value.backend.one_memory else None

    @property
    def arrays(self) -> Any:
        """See `Storage`."""
        return None if self._value.backend.one_memory else self.stored().arrays

    def settle(self) -> None:
        """Nothing is to be waited for."""

    def export(self, make: Callable[[Any], Any]) -> tuple[bool, Any]:
        """Whether a consumer still holds the memory, and if so what ``make`` gives of it for one more."""
        with self._lock:
            return (False, None) if self._is_released() else (True, make(only_array(self.lent)))

    def _is_released(self) -> bool:
        """Whether the last consumer has released the memory. Readers share it from then on, so it is final."""
        if not self._released and is_exclusive(self.lent, self._value):
            self._released = True
            self._value.backend.enter(self._value.sharding.mesh.flat[0])  # after what the consumer has queued
        return self._released


def is_exclusive(storage: Storage, value: Aval) -> bool:
    """Whether nothing else reaches the memory of a value on one device than its storage, which only the caller holds.
    False is always right.
    """
    arrays = storage.arrays
    if arrays is not None and references(arrays) > 2:
        return False
    array = storage.array if arrays is None else arrays[0]
    with value.backend.on(value.sharding.mesh.flat[0]):
        return value.backend.sole(array, 2)


def only_array(storage: Storage) -> Any:
    """The array of a storage on one device."""
    return storage.array if storage.arrays is None else storage.arrays[0]


def whole_of(array: Any, value: Aval) -> HostArray:
    """What a kernel gave, as the buffer of a tensor: an array, of the dtype that was promised.

    It stays writable, though nothing writes to it: NumPy copies read-only arrays before some reductions (argmax). What
    leaves the library is a read-only view.
    """
    if type(array) is not np.ndarray or array.dtype != value.dtype:
        array = Ghost(value.shape, value.dtype) if type(array) is Ghost else np.asarray(array, dtype=value.dtype)
    return array  # type: ignore[no-any-return]


def join(pieces: Sequence[HostArray], value: Aval) -> tuple[HostArray, int]:
    """One array from the pieces, and how many bytes were copied: none where they lie in one buffer as they should."""
    if value.backend.simulated:
        return Ghost(value.shape, value.dtype), 0  # type: ignore[return-value]
    grid = value.grid
    owners = [k for k in grid.owners() if pieces[k].size]
    if len(owners) == 1 and pieces[owners[0]].shape == value.shape:
        return pieces[owners[0]], 0
    whole = in_place([pieces[k] for k in owners], [[b for b, _ in grid.box(k)] for k in owners], value.shape)
    if whole is not None:
        return whole, 0
    array = pool.empty(value.shape, value.dtype)
    for k in owners:
        copy_into(array[grid.index(k)], pieces[k], breaks=True)
    return array, array.nbytes


def in_place(pieces: Sequence[HostArray], begins: Sequence[Sequence[int]], shape: Shape) -> HostArray | None:
    """The array of that shape whose parts the pieces are, the first one at its origin, where they lie in one buffer as
    its parts do; else None.
    """
    first = pieces[0] if pieces else None
    if first is None or first.base is None or any(begins[0]):
        return None
    base, start = pool.owner_of(first), _address(first)
    aligned = all(
        pool.owner_of(piece) is base
        and piece.strides == first.strides
        and _address(piece) - start == sum(b * stride for b, stride in zip(begin, first.strides, strict=True))
        for piece, begin in zip(pieces, begins, strict=True)
    )
    if not aligned or not isinstance(base, np.ndarray) or not base.flags.c_contiguous:
        return None
    return np.ndarray(shape, first.dtype, base, start - _address(base), first.strides)


def _address(array: HostArray) -> int:
    return int(array.__array_interface__["data"][0])
