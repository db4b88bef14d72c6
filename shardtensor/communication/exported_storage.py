"""The storage of a tensor whose memory was exported to another library, which may write to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shardtensor.communication.messages import copied
from shardtensor.communication.transfer_log import record_copy
from shardtensor.host import fork
from shardtensor.tensor.storage import DeferredStorage, Lease, Leases, Storage
from shardtensor.tensor.value import Aval


class Exported(DeferredStorage):
    """The storage of a tensor on one device whose memory was exported to another library through DLPack.

    As the consumer may write to that memory, every read returns a copy, so that the consumer's writes are visible in
    this tensor only (see `shardtensor.functions.interchange.dlpack_export`). The original storage is used again when
    the last consumer has released the memory.

    Attributes:
        exported: the original storage, for writes, which copy it while a consumer holds its memory.
        leases: the leases of the consumers; none is added after all have ended.
    """

    __slots__ = ("__weakref__", "_lock", "_value", "exported", "leases")

    def __init__(self, value: Aval, storage: Storage, leases: Leases) -> None:
        self._value = value
        self.exported = storage
        self.leases = leases
        self._lock = fork.lock()  # A finalizer that the garbage collector calls may read the tensor, too.

    def stored(self) -> Storage:
        """Returns the original storage if no consumer holds its memory, otherwise a storage with a copy."""
        if self.is_released():
            return self.exported
        array = self.read(lambda array: array)
        return Storage((array,))

    def shared(self) -> Storage:
        """The same: a copy does not belong to a consumer, and other handles may share it."""
        return self.stored()

    def read(self, take: Callable[[Any], Any]) -> Any:
        """Returns the view that ``take`` makes of the array, or a copy of it while a consumer holds the memory."""
        backend, device = self._value.backend, self._value.sharding.mesh.flat[0]
        (array,) = self.exported.buffers
        released = self.is_released()
        with backend.on(device):
            if released:
                return take(array)
            # The consumer may have queued writes to the memory.
            backend.wait_for_caller(device)
            part = take(array)
            part = copied(part, device)
        record_copy("to_dlpack", int(part.nbytes), device)
        return part

    def settle(self) -> None:
        """Returns at once: no transfer is in progress."""

    def export(self, make: Callable[[Any], tuple[Any, Lease] | None]) -> tuple[bool, Any]:
        """Returns whether a consumer still holds the memory, and if so the result of ``make`` for one more consumer.

        ``make`` returns the result and its lease, or None if there is nothing to export.
        """
        with self._lock:
            if self._is_released():
                return False, None
            export = make(self.exported.buffers[0])
            if export is None:
                return True, None
            self.leases.append(export[1])
            return True, export[0]

    def is_released(self) -> bool:
        """Whether the last consumer has released the memory. This is final: from then on readers share the memory."""
        with self._lock:
            return self._is_released()

    def _is_released(self) -> bool:
        if self.leases and all(lease() is None for lease in self.leases):
            # The consumers may have queued writes to the memory.
            self._value.backend.wait_for_caller(self._value.sharding.mesh.flat[0])
            self.leases.clear()
        return not self.leases

    @property
    def memory(self) -> Storage:  # type: ignore[override]
        """See `DeferredStorage`."""
        return self.exported
