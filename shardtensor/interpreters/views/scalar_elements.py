"""Single elements of tensors, as scalar tensors that are sent to other devices when they are read there."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from shardtensor.backend.device import HOST, HostArray
from shardtensor.backend.exclusive_memory import read_only
from shardtensor.backend.functions import function_of
from shardtensor.backend.registry import backend_of, in_job, is_remote
from shardtensor.communication.exported_storage import Exported
from shardtensor.communication.messages import send
from shardtensor.communication.offload import announce_element
from shardtensor.communication.transfer import announce_reading, not_addressable, whole_array
from shardtensor.communication.transfer_log import Transfer, announce, record_transfer
from shardtensor.communication.transfer_plan import TransferPlan
from shardtensor.core import Op, call, is_executing
from shardtensor.interpreters.execution.plan import result_dtype
from shardtensor.sharding.copy_plan import identity
from shardtensor.sharding.index import Index
from shardtensor.sharding.layout import Grid
from shardtensor.sharding.spec import P
from shardtensor.sharding.view_spec import ShardedBox, ViewSpec, aligned, box_of, part_of
from shardtensor.tensor.identity import derived_identity
from shardtensor.tensor.storage import DeferredStorage, Storage
from shardtensor.tensor.tensor import (
    SCALARS,
    ShardedTensor,
    current_storage,
    lacks_elements,
    shard_arrays,
    tensor,
    without_elements,
)
from shardtensor.tensor.value import Aval, aval


class ScalarElement(DeferredStorage):
    """The storage of a scalar that is one element of another tensor, copied on the devices that own the element.

    It is sent to the other devices when it is first read there.

    Attributes:
        value: the aval of the scalar.
        origin: the aval of the other tensor, and the index of the element in it.
        parts: the copies, one for each owning device, or one where memory is shared; none of a tensor without elements.
    """

    __slots__ = ("_storage", "origin", "parts", "value")

    def __init__(self, value: Aval, base: Aval, index: Index, parts: tuple[Any, ...]) -> None:
        self.value = value
        self.origin = (base, index)
        self.parts = parts
        self._storage: Storage | None = None

    @property
    def memory(self) -> Storage | None:  # type: ignore[override]
        """See `DeferredStorage`."""
        return self._storage

    def grid(self) -> Grid:
        """Returns the grid of the devices that own the element."""
        base, index = self.origin
        return owners_of(base, index).grid

    def stored(self) -> Storage:
        """Returns the storage with the element on every device of the base, to which it is sent at the first call."""
        if not self.parts:
            without_elements(self.value)._storage.stored()
        if self._storage is None:
            announce(self)
            if self.value.memory is not None:
                self._storage = Storage(self.parts)
            else:
                movement = TransferPlan((identity(()),), (self.grid(),), self.value.cells.grid)
                self._storage = Storage(movement.run((self.parts,), self.value.dtype))
        return self._storage

    def without_parts(self) -> ScalarElement:
        """Returns the storage of a tensor without elements that stands for the scalar."""
        element = ScalarElement(self.value, *self.origin, ())
        element._storage = None if self._storage is None else Storage()
        return element

    def announce(self) -> None:
        """Records that the element is sent to the other devices, unless it has been."""
        if self._storage is not None:
            return
        if not self.parts:
            self._storage = Storage()
        copied = self.value.memory is None and not self.value.backend.simulated
        movement = TransferPlan((identity(()),), (self.grid(),), self.value.grid)
        movement.announce(self.value.dtype.itemsize, copied, "getitem")

    def to_host(self, index: Any) -> HostArray:
        """Copies the element to host memory from the first device that owns it.

        Args:
            index: a basic index of the scalar, whose length is the number of dimensions of the result; None for 0-d.
        """
        if not self.parts:
            self.stored()
        n, shared = self.value.dtype.itemsize, self.value.backend.on_host
        device = self.value.sharding.mesh.flat[0] if shared else self.grid().devices[0]
        held = 0
        if self.value.spans:
            devices = self.grid().devices
            here = [k for k, d in enumerate(devices) if not is_remote(d)]
            if not here:
                raise not_addressable("to_host", f"the element {self.origin[1]} of a tensor")
            held, device = here[0], devices[here[0]]

        def records() -> list[Transfer]:
            return [Transfer(n, 0 if shared else n, self.grid().devices[held], HOST, "to_host", True)]

        record_transfer("to_host", n, True, records)
        array = self.parts[held]
        if type(array) is not np.ndarray:
            backend = backend_of(device)
            with backend.on(device):
                array = backend.to_host(array, device)
        return read_only(array if index is None else array.reshape((1,) * len(index)))


_TOGETHER = 64
"""The number of elements that `elements_of` copies together, which one of them keeps in memory."""


def elements_of(x: ShardedTensor) -> Iterator[ShardedTensor]:
    """Yields the elements of a tensor of one dimension, as ``x[i]`` returns them: each as it is when it is reached.

    In the memory of the host, several are copied at once; after a write, the rest are read one by one.
    """
    version, storage, count = _version_of(x), x._storage, x.shape[0]
    for begin in range(0, count, _TOGETHER):
        is_current = x._storage is storage and _version_of(x) == version
        copies = _copied_together(x, begin) if is_current else ()
        if not copies:
            for i in range(begin, min(begin + _TOGETHER, count)):
                yield call("getitem", x, i)
            continue
        for i, copy in enumerate(copies, begin):
            is_current = x._storage is storage and _version_of(x) == version
            yield copy if is_current else call("getitem", x, i)


def _version_of(x: ShardedTensor) -> int:
    state = x._write_state
    return state.version if state else 0


def _copied_together(x: ShardedTensor, begin: int) -> Sequence[ShardedTensor]:
    """Returns elements of a tensor from one on; nothing for views, elsewhere than in the memory of the host, or where
    the reading of each element has to be seen.
    """
    source = x._aval
    if type(x._storage) is not Storage or not is_executing():
        return ()
    if source.memory is None or source.unreduced or not source.backend.on_host:
        return ()
    value = _value_of_element(source)
    copies = whole_array(x, "getitem")[begin : begin + _TOGETHER].copy()
    return [
        tensor(value, ScalarElement(value, source, Index((begin + k,)), (copies[k, ...],))) for k in range(len(copies))
    ]


@functools.lru_cache(1024)
def _value_of_element(source: Aval) -> Aval:
    """Returns the aval of an element of a tensor."""
    return aval((), source.dtype, source.sharding.with_spec(P()), source.committed)


def compute_on_owners(op: Op, operands: Sequence[Any]) -> ShardedTensor | None:
    """Computes an elementwise operator of numbers and of scalar elements on the devices that own the elements.

    ``x[i] += 1`` therefore transfers nothing. None if the elements are on different devices or an operand is neither an
    element nor a number.
    """
    elements = [x._storage for x in operands if type(x) is ShardedTensor]
    if not all(type(e) is ScalarElement for e in elements) or not all(
        type(x) in (*SCALARS, ShardedTensor) for x in operands
    ):
        return None
    first: Any = elements[0]
    grid, backend = first.grid(), first.value.backend
    if any(e.value.sharding != first.value.sharding or not e.grid().same(grid) for e in elements):
        return None
    kinds = tuple([x._aval if type(x) is ShardedTensor else type(x) for x in operands])
    value = aval((), _element_dtype(op, kinds), first.value.sharding, any(e.value.committed for e in elements))
    parts = []
    for k, _ in enumerate(first.parts):
        with backend.on(grid.devices[k]):
            arrays = [x._storage.parts[k] if type(x) is ShardedTensor else x for x in operands]
            parts.append(backend.xp.asarray(function_of(backend, op.name)(*arrays), dtype=value.dtype))
    base, index = first.origin
    result = tensor(value, ScalarElement(value, base, index, tuple(parts)))
    if in_job() and (identity := derived_identity(op.name, operands)):
        result._identity = identity
    return result


@functools.lru_cache(1024)
def _element_dtype(op: Op, kinds: tuple[Any, ...]) -> Any:
    return result_dtype(op, kinds, {})


@functools.lru_cache(4096)
def owners_of(base: Aval, index: Index) -> ShardedBox:
    """Returns the box of one element in the shards of the devices that own it."""
    return aligned(base.grid, box_of(index, base.shape))


def copied_element(base: ShardedTensor, view_spec: ViewSpec, value: Aval) -> ShardedTensor:
    """Returns one element as a scalar tensor, copied on the devices that own it."""
    source, backend, index = base._aval, base._aval.backend, view_spec.origin
    storage = base._storage
    if type(storage) is not Storage:
        storage = current_storage(base)
        if lacks_elements(base):
            announce_reading(base)
            return tensor(value, ScalarElement(value, source, index, ()))
        if type(storage) is Exported:  # The element is copied, so the exported memory itself can be read.
            source.backend.wait_for_caller(source.sharding.mesh.flat[0])
            storage = storage.exported
            base = tensor(source, storage)
    if source.memory is not None:
        whole = whole_array(base, "getitem")
        if type(whole) is np.ndarray:
            array = np.array(part_of(whole[(*index, ...)], view_spec.part))
        else:
            with backend.on(source.sharding.mesh.flat[0]):
                array = backend.xp.asarray(part_of(backend.view(whole, index), view_spec.part), copy=True)
        return tensor(value, ScalarElement(value, source, index, (array,)))
    holders = owners_of(source, index)
    if source.offloaded and hasattr(storage, "to_host"):
        # The tensor is offloaded to host memory: only this element is copied to the devices.
        host, devices = part_of(storage.to_host(index), view_spec.part), holders.grid.devices
        announce_element(host.nbytes, devices)
        return tensor(value, ScalarElement(value, source, index, tuple([send(host, HOST, d) for d in devices])))
    arrays, parts = shard_arrays(base), []
    for k, box, device in zip(holders.positions, holders.boxes, holders.grid.devices, strict=True):
        with backend.on(device):
            parts.append(backend.xp.asarray(part_of(box.of(backend, arrays[k]), view_spec.part), copy=True))
    return tensor(value, ScalarElement(value, source, index, tuple(parts)))
