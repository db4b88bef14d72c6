"""The storage of a tensor whose memory was exported to another library, which may write to it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from shardtensor.communication.messages import copied
from shardtensor.communication.transfer_log import record_copy
from shardtensor.tensor.storage import DeferredStorage, Storage
from shardtensor.tensor.value import Aval


class Exported(DeferredStorage):
    """The storage of a tensor on one device whose memory was exported to another library through DLPack.

    As the consumer may write to that memory, every read returns a copy, so that the consumer's writes are visible in
    this tensor only (see `shardtensor.functions.dlpack_export`). The original storage is used again when the last
    consumer has released the memory.

    Attributes:
        exported: the original storage, for writes, which copy it while a consumer holds its memory.
    """

    __slots__ = ("_lock", "_released", "_value", "exported")

    def __init__(self, value: Aval, storage: Storage) -> None:
        self._value = value
        self.exported = storage
        self._released = False
        self._lock = threading.Lock()

    def stored(self) -> Storage:
        """Returns the original storage if no consumer holds its memory, otherwise a storage with a copy."""
        with self._lock:
            if self._is_released():
                return self.exported
        array = self.read(lambda array: array)
        return Storage((array,))

    def shared(self) -> Storage:
        """The same: a copy is no consumer's, and other handles may share it."""
        return self.stored()

    def read(self, take: Callable[[Any], Any]) -> Any:
        """Returns the view that ``take`` makes of the array, or a copy of it while a consumer holds the memory."""
        backend, device = self._value.backend, self._value.sharding.mesh.flat[0]
        with self._lock:
            held = not self._is_released()
            (array,) = self.exported.buffers
        with backend.on(device):
            if not held:
                return take(array)
            # The consumer may have queued writes to the memory.
            backend.wait_for_caller(device)
            part = take(array)
            part = copied(part, device)
        record_copy("to_dlpack", int(part.nbytes), device)
        return part

    def settle(self) -> None:
        """Returns at once: no transfer is in progress."""

    def export(self, make: Callable[[Any], Any]) -> tuple[bool, Any]:
        """Returns whether a consumer still holds the memory, and if so the result of ``make`` for one more consumer."""
        with self._lock:
            return (False, None) if self._is_released() else (True, make(self.exported.buffers[0]))

    def is_released(self) -> bool:
        """Whether the last consumer has released the memory. This is final: from then on readers share the memory."""
        with self._lock:
            return self._is_released()

    def _is_released(self) -> bool:
        value, storage = self._value, self.exported
        if not self._released:
            device = value.sharding.mesh.flat[0]
            with value.backend.on(device):
                held = list(storage.buffers)
                self._released = value.backend.is_exclusive(held, 1)
            if self._released:
                value.backend.wait_for_caller(device)  # The consumer may have queued writes to the memory.
        return self._released

    @property
    def memory(self) -> Storage:  # type: ignore[override]
        """See `DeferredStorage`."""
        return self.exported
