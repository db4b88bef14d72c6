"""Where the elements of a tensor are: arrays, deferred storages, and the state of writes."""

from __future__ import annotations

import abc
import threading
from typing import Any, NoReturn

from shardtensor.errors import DonatedError, ShardTensorError


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


class DeferredStorage(abc.ABC):
    """What a handle holds in place of a storage that has to be waited for, brought or refused first."""

    __slots__ = ()

    @abc.abstractmethod
    def stored(self) -> Any:
        """The storage."""

    def shared(self) -> Any:
        """The storage that another handle can share, or None if the value has to be copied."""
        return None

    @property
    def array(self) -> Any:
        """See `Storage`."""
        return self.stored().array

    @property
    def arrays(self) -> Any:
        """See `Storage`."""
        return self.stored().arrays


class WriteState:
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


class PendingWrite(DeferredStorage):
    """In place of the storage of a tensor that is being written: readers wait until it has its new value."""

    __slots__ = ("ledger", "storage")

    def __init__(self, ledger: WriteState) -> None:
        self.ledger = ledger
        self.storage: Any = None

    def stored(self) -> Any:
        """The new value's storage, once it is there."""
        with self.ledger.lock:
            if self.storage is None:
                raise ShardTensorError("a tensor is read by what is writing to it; read it before")
            return self.storage


class Donated(DeferredStorage):
    """In place of the storage of a tensor that was given away: every use says so."""

    def __init__(self, by: str) -> None:
        self.by = by

    def stored(self) -> NoReturn:
        """Raises DonatedError."""
        raise DonatedError(
            f"this tensor was given away by {self.by}(..., donate=True); use what that returned, or do not donate"
        )
