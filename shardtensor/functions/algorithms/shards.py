"""The local arrays of a tensor, and the communicator of its mesh: what a distributed algorithm works on."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from shardtensor.backend.device import Device
from shardtensor.communication.abstract_communicator import AbstractCommunicator
from shardtensor.communication.array_communicator import ArrayCommunicator
from shardtensor.communication.offload import offloaded
from shardtensor.communication.transfer import announce_reading
from shardtensor.core import OPS, implements
from shardtensor.functions.placement import infer_transfer, reshard_to
from shardtensor.host import memory_pool
from shardtensor.host.blockwise import BYTE, LONG
from shardtensor.host.fp_errors import FloatingPointErrors
from shardtensor.host.threads import each
from shardtensor.sharding.layout import Shape, as_sharding
from shardtensor.sharding.mesh import default_mesh, groups_along
from shardtensor.tensor.operands import host_aval
from shardtensor.tensor.storage import Storage
from shardtensor.tensor.tensor import ShardedTensor, lacks_elements, shard_arrays, tensor, without_elements
from shardtensor.tensor.value import Aval, aval

Kernel = Callable[..., Any]
"""``kernel(xp, *arrays)`` computes an array on one device; ``kernel(xp, out, *arrays)`` writes into ``out``."""


class Shards:
    """One local array for each device of a mesh, in mesh order.

    Attributes:
        value: the aval of the tensor that the arrays make up; of arrays that are not the shards of a tensor, the aval
            of the tensor from which they were computed.
        arrays: the arrays; of tensors without elements, their shapes and dtypes.
    """

    def __init__(self, value: Aval, arrays: Sequence[Any]) -> None:
        self.value = value
        self.arrays = arrays

    @property
    def devices(self) -> Sequence[Device]:
        """The device of each array."""
        return self.value.sharding.mesh.flat

    def map(self, kernel: Kernel, *columns: Sequence[Any], shape: Callable[[Shape], Shape], dtype: Any) -> Shards:
        """Returns the arrays that ``kernel(xp, array, *items)`` computes on each device.

        Args:
            kernel: the function.
            *columns: further arguments, with an item for each device.
            shape: returns the shape of the result, given that of the local array.
            dtype: the dtype of the result.
        """
        return Shards(self.value, self._each(kernel, (self.arrays, *columns)))

    def fill(self, kernel: Kernel, *columns: Sequence[Any], dtype: Any) -> Shards:
        """Returns the shards of a new tensor in the layout of this one, into which ``kernel(xp, out, array, *items)``
        writes on each device. The kernel writes every element of ``out``.
        """
        value = aval(self.value.shape, np.dtype(dtype), self.value.sharding, self.value.committed)
        made = self._new(value)
        self._each(kernel, (made.arrays, self.arrays, *columns))
        return made

    def tensor(self) -> ShardedTensor:
        """Returns the tensor that the arrays make up."""
        return tensor(self.value, offloaded(self.value, self.arrays))

    def _new(self, value: Aval) -> Shards:
        arrays = []
        for k, device in enumerate(self.devices):
            with value.backend.on(device):
                arrays.append(value.backend.xp.empty(value.grid.shape(k), dtype=value.dtype))
        return Shards(value, arrays)

    def _each(self, kernel: Kernel, columns: Sequence[Sequence[Any]]) -> list[Any]:
        backend, results = self.value.backend, []
        for device, items in zip(self.devices, zip(*columns, strict=True), strict=True):
            with backend.on(device):
                results.append(kernel(backend.xp, *items))
        return results


class SharedShards(Shards):
    """The shards of a tensor whose devices share a memory: new ones are parts of one buffer, replicas are computed
    once, and the devices compute in threads.
    """

    def __init__(self, value: Aval, arrays: Sequence[Any], whole: Any = None) -> None:
        super().__init__(value, arrays)
        self._whole = whole

    def map(self, kernel: Kernel, *columns: Sequence[Any], shape: Callable[[Shape], Shape], dtype: Any) -> Shards:
        """See `Shards`."""
        return SharedShards(self.value, self._each(kernel, (self.arrays, *columns)))

    def tensor(self) -> ShardedTensor:
        """See `Shards`."""
        return tensor(self.value, Storage(self._whole))

    def _new(self, value: Aval) -> Shards:
        whole = memory_pool.empty(value.shape, value.dtype)
        return SharedShards(value, [whole[index] for index in value.grid.indices], whole)

    def _each(self, kernel: Kernel, columns: Sequence[Sequence[Any]]) -> list[Any]:
        grid, rows = self.value.grid, list(zip(*columns, strict=True))
        owners, parts = grid.owners(), grid.linear_parts().tolist()
        results: dict[int, Any] = {}

        def work(n: int) -> None:
            k = owners[n]
            results[parts[k]] = kernel(self.value.backend.xp, *rows[k])

        each(work, len(owners), threads=None if BYTE * self.value.nbytes > LONG else 1)
        return [results[part] for part in parts]


class AbstractShards(Shards):
    """The shards of a tensor without elements: the shapes and dtypes of the arrays."""

    def map(self, kernel: Kernel, *columns: Sequence[Any], shape: Callable[[Shape], Shape], dtype: Any) -> Shards:
        """See `Shards`."""
        return AbstractShards(self.value, [host_aval(shape(a.shape), np.dtype(dtype)) for a in self.arrays])

    def _new(self, value: Aval) -> Shards:
        return AbstractShards(value, ())

    def _each(self, kernel: Kernel, columns: Sequence[Sequence[Any]]) -> list[Any]:
        return []


class MeshCommunicator:
    """The collectives of a `Communicator` along the mesh axes that split one dimension of a tensor, on one local array
    for each device of the mesh. The devices of a group are in the order of their parts of the dimension.

    Args:
        caller: the name of the operator, for the log.
        value: the aval of the tensor.
        dimension: the dimension.
        kind: the class of the communicators of the groups of devices.

    Attributes:
        size: the number of devices in each group.
        index: for each device of the mesh its position in its group.
    """

    def __init__(self, caller: str, value: Aval, dimension: int, kind: Callable[..., Any]) -> None:
        mesh, axes = value.sharding.mesh, value.sharding.spec.chains_of(value.ndim)[dimension]
        self.index: list[int] = value.grid.parts[:, dimension].tolist()
        self._groups = [sorted(group, key=self.index.__getitem__) for group in groups_along(mesh, axes)]
        self._communicator = functools.partial(kind, caller, ", ".join(axes))
        self._devices = mesh.flat
        self.size = len(self._groups[0])

    @classmethod
    def of_arrays(cls, caller: str, value: Aval, dimension: int) -> MeshCommunicator:
        """Returns the communicator of arrays on separate memories; see the class."""
        return cls(caller, value, dimension, ArrayCommunicator)

    def all_gather(self, x: Shards, axis: int) -> list[Any]:
        """Concatenates the arrays of each group along a dimension, on every device of the group."""
        return self._each("all_gather", x.arrays, axis, True)

    def broadcast(self, arrays: Sequence[Any], root: int) -> Sequence[Any]:
        """Sends the array of the device at position ``root`` of each group to every device of the group."""
        return arrays if self.size == 1 else self._each("broadcast", arrays, root)

    def _each(self, name: str, arrays: Sequence[Any], *args: Any) -> list[Any]:
        results: list[Any] = [None] * len(arrays)
        for group in self._groups:
            communicator = self._communicator([self._devices[k] for k in group])
            for k, made in zip(group, getattr(communicator, name)([arrays[k] for k in group], *args), strict=True):
                results[k] = made
            communicator.settle()
        return results


def distributed(function: Callable[..., Any]) -> Callable[[Callable[..., Shards]], Callable[..., Shards]]:
    """Attaches the decorated function to a declared operator as its algorithm and its inference; see the package."""
    op = OPS[function.__name__]

    def attach(body: Callable[..., Shards]) -> Callable[..., Shards]:
        def run(x: ShardedTensor, params: tuple[Any, ...]) -> Shards:
            value, backend = x._aval, x._aval.backend
            if lacks_elements(x):
                announce_reading(x)
                kind: Callable[..., Any] = AbstractCommunicator
                shards: Shards = AbstractShards(value, AbstractCommunicator(op.name, "", ()).shards(x))
            else:
                kind = ArrayCommunicator
                shards = (SharedShards if backend.shared_memory else Shards)(value, shard_arrays(x))
            along = functools.partial(MeshCommunicator, op.name, value, kind=kind)
            return body(shards, along, **dict(zip(op.params, params, strict=True)))

        def algorithm(x: Any, *params: Any) -> ShardedTensor:
            if not isinstance(x, ShardedTensor):
                x = reshard_to(x, as_sharding(default_mesh(), np.ndim(x), op.name), op.name, committed=False)
            with FloatingPointErrors(op.ufunc):  # Devices and blocks report together, as one call of NumPy does.
                return run(x, params).tensor()

        def infer(x: Any, *params: Any) -> Aval:
            if not isinstance(x, ShardedTensor):
                target = as_sharding(default_mesh(), np.ndim(x), op.name)
                x = without_elements(infer_transfer(x, target, op.name, committed=False))
            return run(x, params).value

        implements(function, "algorithm")(algorithm)
        implements(function, "infer")(infer)
        return body

    return attach
