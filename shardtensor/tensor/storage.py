"""The storage of a tensor's elements: arrays, deferred storages, and the state of writes."""

from __future__ import annotations

import abc
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeAlias

from shardtensor.errors import ConcretizationError, DonatedError, ForkError, ShardTensorError
from shardtensor.host import fork

Lease: TypeAlias = Callable[[], object]
"""A function that returns None when what it stands for no longer holds the memory."""

Leases: TypeAlias = list[Lease]


@dataclass(slots=True, eq=False, weakref_slot=True)
class Storage:
    """The arrays that hold the elements of one tensor in this process.

    Attributes:
        buffers: one array of the backend for each cell of the tensor (see `shardtensor.sharding.cells`); or one for
            each device, in mesh order, until they are joined (see `shardtensor.communication.transfer.buffers_of`).
        leases: the leases of each buffer (see `shardtensor.tensor.ownership`); None in place of those of a buffer, or
            nothing, where it is unknown what holds the memory.
    """

    buffers: tuple[Any, ...] = ()
    leases: tuple[Leases | None, ...] = ()


class DeferredStorage(abc.ABC):
    """A storage that is not available yet: it is being written, transferred, or refused with an error."""

    __slots__ = ()

    memory: Storage | None = None
    """The storage whose memory readers may share; None if readers get their own memory."""

    @abc.abstractmethod
    def stored(self) -> Any:
        """Returns the storage, once it is available."""

    def shared(self) -> Any:
        """The storage that another handle can share, or None if the value has to be copied."""
        return None

    @property
    def buffers(self) -> Any:
        """See `Storage`."""
        return self.stored().buffers


@dataclass(slots=True, eq=False)
class WriteState:
    """The lock, the version and the caches of a tensor that is written to or has views.

    Attributes:
        lock: held from reading the old value to binding the new one.
        version: the number of writes so far.
        caches: weak references to the views that cache elements of the value, by identity.
        generation: that of the process to which the lock belongs (see `shardtensor.host.fork`).
    """

    generation: int
    lock: Any = field(default_factory=threading.RLock)  # fork: `adopt` replaces it; registering takes too long.
    version: int = 0
    caches: dict[int, Any] = field(default_factory=dict)

    def adopt(self) -> bool:
        """In the child of a fork: replaces the lock, unless the forking thread holds it. Returns whether it was
        replaced.
        """
        with _adopting:
            is_new = self.generation != fork.generation and not fork.is_mine(self.lock)
            if is_new:
                self.lock = threading.RLock()  # fork: this is the child.
            self.generation = fork.generation
            return is_new

    def forget(self) -> None:
        """Empties the caches, so that the elements they hold do not count as references to the value."""
        caches, self.caches = self.caches, {}
        for reference in list(caches.values()):  # A view that ends meanwhile removes its reference.
            if (view := reference()) is not None:
                view.forget()


_adopting = fork.lock()
"""Held while the lock of a write state is replaced in the child of a fork."""


class PendingWrite(DeferredStorage):
    """The storage of a tensor that is being written: readers in other threads wait for the new value."""

    __slots__ = ("storage", "write_state")

    def __init__(self, write_state: WriteState) -> None:
        self.write_state = write_state
        self.storage: Any = None

    def stored(self) -> Any:
        """Returns the storage of the new value, after the write has ended.

        Raises:
            ShardTensorError: the thread that writes the tensor also reads it.
            ForkError: the process was forked while another thread wrote the tensor.
        """
        state = self.write_state
        if state.generation != fork.generation:
            state.adopt()
        is_writer = fork.is_mine(state.lock)
        with state.lock:
            if self.storage is None and not is_writer:
                self.storage = LostWrite()
            if type(self.storage) is LostWrite:
                self.storage.stored()  # This raises ForkError.
            if self.storage is None:
                raise ShardTensorError("a write to a tensor reads the same tensor; read it before the write")
            return self.storage

    def bind(self, x: Any, storage: Any) -> None:
        """Ends the write: binds the tensor to the storage of its value."""
        self.storage = storage
        self.write_state.version += 1
        x._storage = storage


class LostWrite(DeferredStorage):
    """The storage, in the child of a fork, of a tensor that another thread of the parent was writing: it may be half
    written, and nothing will complete it.
    """

    __slots__ = ()

    def stored(self) -> NoReturn:
        """Raises ForkError."""
        raise ForkError(_LOST)


_LOST = (
    "another thread was writing this tensor when the process was forked, so that its elements are lost in the child; "
    "fork while no thread writes tensors that the child uses, or make a new tensor in the child"
)


class NoElements(DeferredStorage):
    """The storage of a value of which only the aval is known. Every value has a storage of its own.

    Attributes:
        reason: the end of the message of the error that reading elements raises.
    """

    __slots__ = ("reason",)

    def __init__(self, reason: str) -> None:
        self.reason = reason

    def stored(self) -> NoReturn:
        """Raises ConcretizationError."""
        raise ConcretizationError(f"needs the elements of a tensor, and {self.reason}")

    def is_lacking(self) -> bool:
        """Returns True: the elements are not known."""
        return True

    def share(self) -> None:
        """Makes the storage one that several handles may have: a write to one of them binds it to another storage."""

    def settle(self) -> None:
        """Returns at once: there is nothing to wait for."""


class Donated(DeferredStorage):
    """The storage of a tensor whose memory was donated: every use raises DonatedError.

    Attributes:
        by: the function that donated it.
        exclusive: whether no other tensor shared the memory.
    """

    def __init__(self, by: str, exclusive: bool) -> None:
        self.by = by
        self.exclusive = exclusive

    def stored(self) -> NoReturn:
        """Raises DonatedError."""
        raise DonatedError(
            f"the memory of this tensor was donated by {self.by}(...); use the result of that call, or do not donate"
        )
