"""Memory of tensors that other libraries hold, and may write.

A consumer of DLPack may write to what it gets: versions before 1.0 have no flag against it, and PyTorch asks for 1.0
and ignores the flag. Therefore memory is exported only if nothing but the one tensor holds it. The tensor is then
marked (`shardtensor.communication.exported_storage.Exported`): every later read of it gets a copy for as long as a
consumer holds the memory. Whether something else holds memory is decided as for writes in place, by
`Backend.is_exclusive`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shardtensor.backend.ownership import references
from shardtensor.communication.exported_storage import Exported, is_exclusive, only_array
from shardtensor.communication.transfer import whole_array
from shardtensor.sharding.view_spec import ViewSpec
from shardtensor.tensor.storage import DeferredStorage, PendingWrite, Storage
from shardtensor.tensor.tensor import ShardedTensor, current_storage, ledger_of, shard_arrays


def export(x: ShardedTensor, make: Callable[[Any], Any]) -> Any:
    """What ``make`` gives of the array of a tensor on one device, for a consumer that may write to it: of the part of
    its base's array that x sees, if x is a view. None if something else holds the memory, which is then to be copied.
    """
    base, window = _base_of(x)
    if x._is_scalar or base._aval.parked:  # neither is ever written: a scalar does not change, other tensors share this
        return None

    def of_window(array: Any) -> Any:
        part = _part_of(array, base, window)
        return None if part is None else make(part)

    return _export(base, of_window)


def array_of(x: ShardedTensor) -> Any:
    """The array of a tensor on one device; of a view, the part of its base's array if that takes no copy."""
    base, window = _base_of(x)
    part = _part_of(shard_arrays(base)[0], base, window)
    return shard_arrays(x)[0] if part is None else part


def _base_of(x: ShardedTensor) -> tuple[ShardedTensor, ViewSpec | None]:
    """The tensor whose memory x has, and what x sees of it if x is a view."""
    storage = x._storage
    return getattr(storage, "base", x), getattr(storage, "window", None)


def _part_of(array: Any, base: ShardedTensor, window: ViewSpec | None) -> Any:
    """What a window sees of the base's array; None if it cannot be a view of it."""
    if window is None:
        return array
    backend = base._aval.backend
    with backend.on(base._aval.sharding.mesh.flat[0]):
        if len(window.boxes) > 1 and not backend.is_contiguous(array):
            return None
        return window.of(backend, array)


def _export(base: ShardedTensor, make: Callable[[Any], Any]) -> Any:
    """What ``make`` gives of the tensor's array, while no other thread can read the tensor or write to it."""
    if base._aval.backend.shared_memory and type(base._storage) is Storage:
        whole_array(base, "to_dlpack")  # one buffer, if it was made of pieces
    ledger = ledger_of(base)
    with ledger.lock:
        storage = current_storage(base)
        if type(storage) is Exported:
            held, made = storage.export(make)
            if held:
                return made
        if isinstance(storage, DeferredStorage):
            storage = storage.stored()
        writing = PendingWrite(ledger)
        try:
            base._storage = writing
            ledger.forget()
            if references(storage) == 1 and is_exclusive(storage, base._aval):
                made = make(only_array(storage))
                if made is not None:
                    storage = Exported(base._aval, storage)
                return made
        finally:
            writing.storage = base._storage = storage
    return None
