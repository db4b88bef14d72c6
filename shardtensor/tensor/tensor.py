"""`ShardedTensor`: a handle on an immutable value whose shards are on many devices.

No algorithm is defined here: the methods of a tensor call operators by name, through `call`.
"""

from __future__ import annotations

import functools
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from shardtensor.backend.device import Device, HostArray
from shardtensor.backend.protocol import Backend
from shardtensor.backend.registry import is_remote
from shardtensor.core import ABOVE, call
from shardtensor.errors import (
    ArgumentError,
    ArgumentTypeError,
    ConcretizationError,
    ShardTensorError,
)
from shardtensor.hints import explains_attributes
from shardtensor.host import fork
from shardtensor.sharding.layout import NamedSharding, Shape, Where, on_existing_devices
from shardtensor.sharding.view_spec import ViewSpec, whole_view_spec
from shardtensor.tensor.conversions import Conversions, is_column_major
from shardtensor.tensor.methods import Methods
from shardtensor.tensor.ownership import READS, export, hold, is_shared, keep_while_read, reading, storage_of
from shardtensor.tensor.partial_sum_storage import PartialSums
from shardtensor.tensor.pytree import LEAF_TYPES
from shardtensor.tensor.storage import Donated, Leases, LostWrite, NoElements, PendingWrite, Storage, WriteState
from shardtensor.tensor.value import Aval, aval, stacked, views


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of a tensor on one device.

    Attributes:
        device: the device that holds the part.
        index: the index of the part in the tensor: ``x[index]``.
        replica_id: 0 for the first device in mesh order that holds this part, 1 for the next, ...
        data: the elements, an array of the backend; it must not be written to.
    """

    device: Device
    index: tuple[slice, ...]
    replica_id: int
    data: Any


@explains_attributes
class ShardedTensor(Methods, Conversions):
    """A NumPy-like array sharded over many devices.

    Tensors are created by `st.asarray`, `st.zeros`, `st.device_put` and similar functions, and by every operator.
    Calling the class raises an error. Operators return new tensors. The sharding of a result follows from the shardings
    of the operands, by the operator's rule. Indexing, ``T``, ``reshape`` and other operations that return a view in
    NumPy return a view here, too: writing to a view writes to its base, and reading it returns the base's current
    elements. Writes (``x[i] = v``, ``x += y``, ``out=x``) keep sharding and dtype, and are visible only through the
    tensor and its views.

    Tensors, meshes, shardings and devices can be pickled. A tensor is loaded onto the devices that it had, which are
    identified by backend and number. If one of them does not exist in the loading process, the tensor is loaded onto
    the default mesh (see `st.use_mesh`) instead, and a warning is logged: with its spec if the mesh has the axes that
    the spec names, otherwise split along its first dimension. A tensor of one device is loaded onto one device.

    >>> x = st.arange(6, device=st.make_mesh((3,), ("x",)))
    >>> x + 1
    ShardedTensor(shape=(6,), dtype=int64, sharding=P('x') on Mesh(x=3; numpy:0..2))
    [1 2 3 4 5 6]
    """

    __slots__ = ()

    def __init__(self) -> None:
        raise ArgumentTypeError("ShardedTensor: not made by calling the class; use st.asarray or st.device_put")

    @property
    def addressable_shards(self) -> list[Shard]:
        """The shards that this process holds, in mesh order: a list of `Shard`. Those of an unreduced tensor are
        partial sums.

        >>> [s.data.tolist() for s in st.arange(5, device=st.make_mesh((2,), ("x",))).addressable_shards]
        [[0, 1, 2], [3, 4]]
        """
        backend, grid = self._aval.backend, self._aval.grid
        if self._aval.unreduced:
            partials = call("partial_sums", self).addressable_shards
            return [Shard(s.device, s.index[1:], s.replica_id, _row(backend, s)) for s in partials]
        counts: dict[int, Iterator[int]] = defaultdict(itertools.count)
        replicas = [next(counts[number]) for number in grid.linear_parts().tolist()]
        offloaded = getattr(self._storage, "shards", None)
        with reading((self,)):
            arrays = (
                [export(self, a, k) for k, a in enumerate(shard_arrays(self))] if offloaded is None else offloaded()
            )
        for device in grid.devices:
            backend.make_caller_wait(device)
        shards = list(map(Shard, grid.devices, grid.indices, replicas, arrays))
        return [s for s in shards if not is_remote(s.device)] if self._aval.spans else shards

    @property
    def is_fully_addressable(self) -> bool:
        """Whether this process owns all devices of the tensor."""
        return not self._aval.spans

    @property
    def is_fully_replicated(self) -> bool:
        """Whether every device holds the whole tensor."""
        return self._aval.sharding.is_fully_replicated

    def block_until_ready(self) -> ShardedTensor:
        """Waits until the elements are computed, and returns the tensor."""
        storage = self._storage
        if hasattr(storage, "settle"):
            storage.settle()
        else:
            shard_arrays(self)  # The arrays of a view are computed when they are read.
        for device in self._aval.sharding.mesh.flat:
            self._aval.backend.synchronize(device)
        return self

    # -- transfers and conversions -----------------------------------------------------------------

    def to_device(self, device: Where, /, *, stream: None = None) -> ShardedTensor:
        """Returns the same elements on a device, on a mesh or in a sharding: see `st.device_put`."""
        if stream is not None:
            raise ArgumentError("to_device: stream must be None; each device has its own")
        return call("reshard", self, sharding=device)  # type: ignore[no-any-return]

    def reshard(self, sharding: Where) -> ShardedTensor:
        """Returns the same elements in another sharding: see `st.reshard`."""
        return call("reshard", self, sharding=sharding)  # type: ignore[no-any-return]

    def shard(self, axis: int = 0, *, devices: Sequence[Device] | None = None) -> list[ShardedTensor]:
        """Splits the tensor into a list of single-device tensors: see `st.shard`."""
        return call("shard", self, axis=axis, devices=devices)  # type: ignore[no-any-return]

    def to_batched_list(self, batch_size: int, *, leftover: str = "keep") -> list[ShardedTensor]:
        """Splits the tensor into a list of batches of rows: see `st.to_batched_list`."""
        return call("to_batched_list", self, batch_size=batch_size, leftover=leftover)  # type: ignore[no-any-return]

    def __array_namespace__(self, /, *, api_version: str | None = None) -> Any:
        """Returns the module `shardtensor`, the namespace of the array API standard.

        Raises:
            ArgumentError: the standard has no such version, or this package does not implement it.
        """
        if api_version not in (None, *API_VERSIONS):
            raise ArgumentError(f"__array_namespace__: api_version={api_version!r}; wanted {', '.join(API_VERSIONS)}")
        return ABOVE["array_namespace"]()

    # -- copies ------------------------------------------------------------------------------------

    def copy(self, order: str = "C") -> ShardedTensor:
        """Returns an independent tensor with the same value; memory is copied only when one of the two is written.

        ``order``, the layout in memory, has no effect.

        The copy of a value that NumPy would return as a scalar, such as the sum of all elements, cannot be written
        either.
        """
        is_column_major(order, "copy")
        return call("copy", self)  # type: ignore[no-any-return]

    def __copy__(self) -> ShardedTensor:
        return self.copy()

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedTensor:
        return self.copy()

    def __reduce__(self) -> tuple[Any, ...]:
        scalar = self._is_scalar
        return _unpickle, (np.ascontiguousarray(self), self.shape, self.sharding, self.committed, scalar)

    # -- writes ------------------------------------------------------------------------------------

    def _base_and_view(self) -> tuple[ShardedTensor, ViewSpec]:
        """Returns the base, which is the tensor itself if it is not a view, and the view spec of the tensor on it."""
        storage = self._storage
        if type(storage) is not Storage:
            if hasattr(storage, "view_spec"):
                return storage.base, storage.view_spec
            if type(storage) is Donated:
                storage.stored()
        return self, _view_spec_of(self._aval)

    def _bind(
        self,
        compute: Callable[[], Any],
        put: Callable[[tuple[Any, Any], tuple[ViewSpec]], ShardedTensor],
    ) -> None:
        """Binds the base to the tensor ``put((base, compute()), (view_spec,))``, which has the base's aval. If another
        thread has written the base in the meantime, both are called again: no lock is held while they run.

        Raises:
            ArgumentTypeError: the tensor is one element of another one.
            ConcretizationError: only the new value has no elements.
        """
        self._make_writable()
        base, view_spec = self._base_and_view()
        write_state = write_state_of(base)
        while True:
            with write_state.lock:
                version = write_state.version
            new = put((base, compute()), (view_spec,))
            if lacks_elements(new) and not lacks_elements(base):
                raise ConcretizationError(
                    "a tensor that the function closes over is written, and its new elements are not known; give it as "
                    "an argument"
                )
            with write_state.lock:
                if write_state.version == version:
                    write_state.forget()
                    write_state.version += 1
                    if READS and (storage := storage_of(base)):
                        keep_while_read(base, storage)
                    base._storage = new._storage
                    return

    def _make_writable(self) -> None:
        """Makes a scalar that an operator computed an array before it is written, as the array API standard has it.

        Its storage may be shared with copies of the scalar, which no write is recorded for, so it gets its own.

        Raises:
            ArgumentTypeError: the tensor is an element of another one, which the write would not reach.
        """
        if not self._is_scalar:
            return
        if hasattr(self._storage, "origin"):
            raise ArgumentTypeError(
                "one element of a tensor is a scalar, which cannot be written; x[index] = value writes the element, "
                "x[index, ...] is a view of it, and st.asarray(x[index], copy=True) is an array"
            )
        self._storage = call("asarray", self, copy=True)._storage
        mark_array(self)


def _row(backend: Backend, shard: Shard) -> Any:
    """Returns the partial sums on one device, without the dimension that numbers them."""
    with backend.on(shard.device):
        return backend.view(shard.data, (0,))


LEAF_TYPES.add(ShardedTensor)

ArrayLike: TypeAlias = ShardedTensor | HostArray | np.generic | bool | int | float | complex
"""The operands that operators accept.

These are tensors; host arrays and NumPy scalars, which are put into the layout that the operator's rule requires;
Python scalars, which stay scalars and do not promote a dtype; and arrays of a backend.
"""

API_VERSIONS = ("2021.12", "2022.12", "2023.12", "2024.12", "2025.12")
"""The versions of the array API standard that the package implements; the last one contains the others."""

SCALARS = frozenset((bool, int, float, complex))


def tensor(value: Aval, storage: Any) -> ShardedTensor:
    """Creates a handle on a value, from its aval and its storage."""
    x = _new(ShardedTensor)
    x._aval = value
    x._storage = storage
    x._write_state = None
    return x


def tensor_of(value: Aval, buffers: tuple[Any, ...], leases: tuple[Leases | None, ...] = ()) -> ShardedTensor:
    """Creates a tensor from its aval and the arguments of its `Storage`, in one call."""
    x, storage = _new(ShardedTensor), _new_storage(Storage)
    storage.buffers = buffers
    storage.leases = leases
    x._aval = value
    x._storage = storage  # Last: `memory.reset_peak_memory` notes the buffers then.
    x._write_state = None
    return x


def without_elements(value: Aval) -> ShardedTensor:
    """Returns a tensor of which only the aval is known."""
    if value.unreduced:
        return tensor(value, PartialSums(without_elements(stacked(value))))
    return tensor(value, NoElements(_SIMULATED if value.backend.simulated else INFERRED))


_SIMULATED = "simulated tensors have no elements; pass such values as Python scalars or host arrays"
INFERRED = "eval_shape knows only its shape, dtype and sharding; compute it outside of the function"


def are_tensors(items: Sequence[Any]) -> bool:
    """Whether all items, of which there is at least one, are tensors, and none is a pytree that would be traversed."""
    return set(map(type, items)) == {ShardedTensor}


def lacks_elements(x: Any) -> bool:
    """Whether an operand is a tensor of which only the aval is known, or a view of one."""
    if type(x) is not ShardedTensor or type(x._storage) is Storage:
        return False
    storage = getattr(x._storage, "base", x)._storage
    if type(storage) is Storage:  # The next test calls a function in Python: the class has an abstract method.
        return False
    if isinstance(storage, NoElements):
        return storage.is_lacking()
    return getattr(storage, "parts", None) == ()


def write_state_of(x: ShardedTensor) -> WriteState:
    """Returns the `WriteState` of a tensor, which is created on first use."""
    write_state = x._write_state
    if write_state is None:
        with _making_write_states:
            write_state = x._write_state = x._write_state or WriteState(fork.generation)
    elif write_state.generation != fork.generation and write_state.adopt():
        writing = x._storage
        if type(writing) is PendingWrite and writing.storage is None:
            x._storage = LostWrite()
    return write_state


_making_write_states = fork.lock()
"""It is reentrant, since finalizers may call the library."""


def mark_array(x: ShardedTensor) -> ShardedTensor:
    """Marks a 0-d tensor as an array, not one of NumPy's scalars, and returns it; other tensors are unchanged."""
    if not x._aval.ndim:
        write_state_of(x)
    return x


def mark_donated(x: ShardedTensor, caller: str) -> None:
    """Replaces the storage of a tensor by `Donated`, for ``donate=True`` of the function ``caller``."""
    write_state = write_state_of(x)
    with write_state.lock:
        write_state.forget()
        write_state.version += 1
        storage = storage_of(x)
        shared = storage is None or storage is not x._storage or is_shared(storage)  # A view leaves its base as it is.
        x._storage = Donated(caller, not shared)
        if shared:  # Operators in other threads may still read the memory.
            hold(storage)


def check_not_donated(*operands: Any) -> None:
    """Raises DonatedError if the memory of a tensor among the operands was donated."""
    for x in operands:
        if type(x) is ShardedTensor and x.is_donated:
            shard_arrays(x)  # This raises the DonatedError.


@functools.lru_cache(8192)
def _view_spec_of(value: Aval) -> ViewSpec:
    return whole_view_spec(value.shape, value.sharding.spec.chains_of(value.ndim))


_new: Callable[[type[ShardedTensor]], ShardedTensor] = object.__new__
_new_storage: Callable[[type[Storage]], Storage] = object.__new__


def shard_arrays(x: ShardedTensor) -> tuple[Any, ...]:
    """Returns the backend's array of each device, in mesh order."""
    value, buffers = x._aval, x._storage.buffers
    grid = value.grid
    if len(buffers) == len(grid.devices):
        return buffers  # type: ignore[no-any-return]
    if value.backend.on_host and value.ndim:
        (whole,) = buffers
        return tuple([whole[index] for index in grid.indices])
    return tuple(views(value.backend, grid.devices, buffers, value.cells.shards))


def current_storage(x: ShardedTensor) -> Any:
    """Returns the storage of a tensor, after writes in progress have ended.

    Raises:
        DonatedError: the tensor was donated.
    """
    storage = x._storage
    return storage.stored() if type(storage) in (PendingWrite, Donated, LostWrite) else storage


def _unpickle(
    data: HostArray, shape: Shape, sharding: NamedSharding, committed: bool, scalar: bool = False
) -> ShardedTensor:
    """Creates a tensor from what `__reduce__` returns; pickles of earlier versions lack ``scalar``.

    The tensor is not committed if it is loaded onto other devices than it had, because no caller chose those.
    """
    target = on_existing_devices(sharding, len(shape))
    try:
        x = call("reshard", data.reshape(shape), sharding=target)
    except ShardTensorError as error:
        raise type(error)(
            f"unpickle: a tensor that was pickled on {sharding.mesh!r} does not load on {target.mesh!r}: {error}. "
            "Load it within `with st.use_mesh(mesh):`, with a mesh of another backend"
        ) from None
    result = tensor(aval(x.shape, x.dtype, target, committed and target == sharding), x._storage)
    return result if scalar else mark_array(result)
