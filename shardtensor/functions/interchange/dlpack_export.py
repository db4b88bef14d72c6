"""The export of a tensor's memory to other libraries, which may write to it.

A consumer of DLPack may write to the memory that it receives: versions before 1.0 have no flag for read-only memory,
and PyTorch requests 1.0 and ignores the flag. Therefore memory is exported only if it is exclusive to one tensor. The
tensor's storage is then replaced by a `shardtensor.communication.exported_storage.Exported`: every later read copies
for as long as a consumer holds the memory. Memory is exclusive under the same conditions as for writes in place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shardtensor.communication.exported_storage import Exported
from shardtensor.communication.transfer import whole_array
from shardtensor.sharding.view_spec import ViewSpec
from shardtensor.tensor.ownership import exclusive_arrays
from shardtensor.tensor.storage import DeferredStorage, Lease, PendingWrite, Storage
from shardtensor.tensor.tensor import ShardedTensor, current_storage, shard_arrays, write_state_of


def export(x: ShardedTensor, make: Callable[[Any], tuple[Any, Lease] | None]) -> Any:
    """Exports the memory of a tensor, on one device or on several that share it, to a consumer that may write to it.

    ``make`` exports an array: it returns the export and its lease, or None. It is called with the tensor's array, or,
    if x is a view, with the part of its base's array that x views. Returns the export; or None if the memory is not
    exclusive, the part is not a view of that array, or ``make`` returns None: the caller must copy then.
    """
    base, view_spec = _base_of(x)
    if x._is_scalar or base._aval.offloaded:  # A scalar is immutable, and other tensors may share an offloaded storage.
        return None

    if base._aval.memory is not None and type(base._storage) is Storage:
        whole_array(base, "to_dlpack")  # A storage of several arrays becomes one of a single buffer.

    def of_view(array: Any) -> tuple[Any, Lease] | None:
        part = _part_of(array, base, view_spec)
        return None if part is None else make(part)

    write_state = write_state_of(base)
    with write_state.lock:  # Other threads can neither read nor write the tensor meanwhile.
        storage = current_storage(base)
        if type(storage) is Exported:
            held, result = storage.export(of_view)
            if held:
                return result
        if isinstance(storage, DeferredStorage):
            storage = storage.stored()
        writing = PendingWrite(write_state)
        try:
            base._storage = writing
            write_state.forget()
            # The operator that exports the memory is one that reads the tensor.
            if all(exclusive_arrays(base, storage, readers=1) or (False,)) and _can_be_written(storage, base):
                result = of_view(storage.buffers[0])
                if result is not None:
                    storage = Exported(base._aval, storage, [result[1]])
                    return result[0]
        finally:
            writing.storage = base._storage = storage
    return None


def _can_be_written(storage: Storage, x: ShardedTensor) -> bool:
    backend = x._aval.backend
    with backend.on(x._aval.sharding.mesh.flat[0]):
        return backend.begin_write(storage.buffers[0])


def array_of(x: ShardedTensor) -> Any:
    """Returns the array of a tensor on one device, or on several that share one memory; for a view, the part of its
    base's array if that needs no copy.
    """
    base, view_spec = _base_of(x)
    part = _part_of(_array(base), base, view_spec)
    return _array(x) if part is None else part


def _array(x: ShardedTensor) -> Any:
    return shard_arrays(x)[0] if x.sharding.mesh.size == 1 else whole_array(x, "to_dlpack")


def _base_of(x: ShardedTensor) -> tuple[ShardedTensor, ViewSpec | None]:
    """Returns the tensor that owns x's memory, and the view spec of x if x is a view of it, otherwise None."""
    storage = x._storage
    return getattr(storage, "base", x), getattr(storage, "view_spec", None)


def _part_of(array: Any, base: ShardedTensor, view_spec: ViewSpec | None) -> Any:
    """Returns the part of the base's array that a view spec selects; None if it cannot be a view of that array."""
    if view_spec is None:
        return array
    backend = base._aval.backend
    with backend.on(base._aval.sharding.mesh.flat[0]):
        if len(view_spec.boxes) > 1 and not backend.is_contiguous(array):
            return None
        return view_spec.of(backend, array)
