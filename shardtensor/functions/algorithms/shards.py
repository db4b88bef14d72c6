"""The local arrays of a tensor, and the communicator of its mesh: what a distributed algorithm works on."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, Self

import numpy as np

from shardtensor.backend.device import Device
from shardtensor.backend.registry import backend_of, in_other_process, is_remote
from shardtensor.backend.remote import RemoteArray
from shardtensor.communication.between_processes.processes import completed, elsewhere, everywhere
from shardtensor.communication.communicators import communicator
from shardtensor.communication.offload import offloaded
from shardtensor.communication.schedules import HostCopies
from shardtensor.host.blas_threads import Limit
from shardtensor.host.blockwise import BYTE, LONG
from shardtensor.host.threads import each, num_threads
from shardtensor.sharding.layout import Ints, Shape
from shardtensor.sharding.mesh import groups_along
from shardtensor.tensor.operands import host_aval
from shardtensor.tensor.tensor import ShardedTensor, tensor, tensor_of
from shardtensor.tensor.value import Aval, aval, memories_of, new_buffers

Kernel = Callable[..., Any]
"""``kernel(xp, *arrays)`` computes an array on one device; ``kernel(xp, out, *arrays)`` writes into ``out``."""


class Shards:
    """One local array for each device of a mesh, in mesh order.

    Attributes:
        value: the aval of the tensor that the arrays make up; of arrays that are not the shards of a tensor, the aval
            of the tensor from which they were computed.
        arrays: the arrays; of tensors without elements, their shapes and dtypes.
        buffers: the buffers of the cells, if the arrays are views of them; otherwise None.
    """

    def __init__(self, value: Aval, arrays: Sequence[Any], buffers: Sequence[Any] | None = None) -> None:
        self.value = value
        self.arrays = arrays
        self.buffers = buffers

    @classmethod
    def empty(cls, value: Aval) -> Shards:
        """Returns the shards of a new tensor, whose elements are to be written."""
        buffers, arrays = new_buffers(value)
        return cls(value, arrays, buffers)

    @property
    def devices(self) -> Sequence[Device]:
        """The device of each array."""
        return self.value.sharding.mesh.flat

    def map(
        self,
        kernel: Kernel,
        *columns: Sequence[Any],
        shape: Callable[[Shape], Shape],
        dtype: Any,
        tuples: bool = False,
        only: Sequence[bool] | None = None,
    ) -> Shards:
        """Returns the arrays that ``kernel(xp, array, *items)`` computes on each device.

        Args:
            kernel: the function.
            *columns: further arguments, with an item for each device.
            shape: returns the shape of the result, given that of the local array.
            dtype: the dtype of the result.
            tuples: whether it computes a tuple of arrays, of which shape and dtype are those of one. They can be given
                to other kernels only, or one of them can be taken (`item`).
            only: on which devices the kernel runs, alike for all that hold the same part; by default on all of them.
                The items of the others must not be used.
        """
        return self.of(self._each(kernel, (self.arrays, *columns), only))

    def of(self, arrays: Sequence[Any]) -> Self:
        """Returns other arrays on the same devices: those that a collective returned."""
        return type(self)(self.value, arrays)

    def item(self, number: int) -> Self:
        """Returns one of the arrays of each device, of the tuples that a kernel has computed; None where it has not."""
        return self.of([arrays and arrays[number] for arrays in self.arrays])

    def where(self, chosen: Sequence[bool], others: Sequence[Any]) -> Self:
        """Returns on each device its array of ``others``, of the same shape, if it is chosen, and else its own."""
        pairs = zip(chosen, others, self.arrays, strict=True)
        return self.of([other if is_chosen else array for is_chosen, other, array in pairs])

    def assembled(self, value: Aval) -> Shards:
        """Returns the shards of a new tensor, whose aval is ``value``: these arrays, which it may keep; copied to the
        buffers of the cells where devices share them.
        """
        if value.cells.apart:
            return Shards(value, self.arrays)
        return self.make(value, _write, self.arrays)

    def to_host(self, expected: Sequence[Any]) -> list[Any]:
        """Returns the arrays in host memory; of tensors without elements, what is expected.

        It is meant for a few integers, such as the bounds of parts, by which the host cuts arrays.
        """
        return self._each(
            lambda xp, array, device: self.value.backend.to_host(array, device), (self.arrays, self.devices)
        )

    def fill(self, kernel: Kernel, *columns: Sequence[Any], dtype: Any) -> Shards:
        """Returns the shards of a new tensor in the layout of this one, into which ``kernel(xp, out, array, *items)``
        writes on each device. The kernel writes every element of ``out``.
        """
        value = aval(self.value.shape, np.dtype(dtype), self.value.sharding, self.value.committed)
        return self.make(value, kernel, self.arrays, *columns)

    def make(self, value: Aval, kernel: Kernel, *columns: Sequence[Any]) -> Shards:
        """Returns the shards of a new tensor with the given aval, on the same devices, into which ``kernel(xp, out,
        *items)`` writes on each device; of replicas on devices that share a memory, on one of them.
        """
        shards = self.empty(value)
        shards._each(kernel, (shards.arrays, *columns))
        return shards

    def copied(self, dtype: np.dtype[Any]) -> Shards:
        """Returns copies of the arrays, which the algorithm may write to, and drops the arrays, so that those that were
        transferred for this call are free.
        """
        shards = self.map(functools.partial(_copied, dtype), shape=lambda shape: shape, dtype=dtype)
        self.arrays = ()
        return shards

    def tensor(self) -> ShardedTensor:
        """Returns the tensor that the arrays make up."""
        return tensor(self.value, offloaded(self.value, self.buffers or self.arrays))

    def _each(self, kernel: Kernel, columns: Sequence[Sequence[Any]], only: Sequence[bool] | None = None) -> list[Any]:
        """Returns what the kernel computes on each device: of replicas in one memory once, on the host in threads; None
        for the devices on which it does not run.
        """
        backend, devices, rows = self.value.backend, self.devices, list(zip(*columns, strict=True))
        owners, numbers = _owners(self.value)
        results: list[Any] = [None] * len(owners)

        def work(n: int) -> None:
            k = owners[n]
            if only is None or only[k]:
                with backend.on(devices[k]):
                    results[n] = kernel(backend.xp, *rows[k])

        if backend.on_host and BYTE * self.value.nbytes > LONG:
            # Kernels that call BLAS in several threads, each with threads of its own, would wait for one another.
            with Limit(max(num_threads() // len(owners), 1)):
                each(work, len(owners))
        else:
            for n in range(len(owners)):
                work(n)
        return [results[n] for n in numbers]


def _copied(dtype: np.dtype[Any], xp: Any, array: Any) -> Any:
    return xp.asarray(array, dtype=dtype, copy=True)


@functools.lru_cache(1024)
def _owners(value: Aval) -> tuple[list[int], list[int]]:
    """Returns the first device that holds each part in each memory, and for each device the number of that one."""
    parts = list(zip(memories_of(value.sharding), value.grid.linear_parts().tolist(), strict=True))
    owners = dict[Any, int]()
    for k, part in enumerate(parts):
        owners.setdefault(part, k)
    numbers = {part: n for n, part in enumerate(owners)}
    return list(owners.values()), [numbers[part] for part in parts]


def _write(xp: Any, out: Any, array: Any) -> None:
    out[...] = array


class SpanningShards(Shards):
    """The shards of a tensor that spans processes: kernels run on the devices of this process, and the arrays of other
    devices are known by their shapes and dtypes.

    Attributes:
        are_tuples: whether the arrays are tuples, the shapes of which are not declared.
    """

    are_tuples = False

    def map(
        self,
        kernel: Kernel,
        *columns: Sequence[Any],
        shape: Callable[[Shape], Shape],
        dtype: Any,
        tuples: bool = False,
        only: Sequence[bool] | None = None,
    ) -> Shards:
        """See `Shards`."""
        arrays = self._each(kernel, (self.arrays, *columns), only)
        if tuples or self.are_tuples:  # All processes have to decide alike, also those in which a kernel returns None.
            result = self.of(completed(arrays, self.devices, "map"))
            result.are_tuples = tuples
            return result
        for k, device in enumerate(self.devices):
            if is_remote(device):
                arrays[k] = RemoteArray(shape(self.arrays[k].shape), np.dtype(dtype))
        return self.of(arrays)

    def assembled(self, value: Aval) -> Shards:
        """See `Shards`."""
        arrays = list(self.arrays)
        for k, device in enumerate(self.devices):
            if is_remote(device):
                arrays[k] = RemoteArray(value.grid.shape(k), value.dtype)
        return SpanningShards(value, arrays) if value.cells.apart else self.make(value, _write, arrays)

    def to_host(self, expected: Sequence[Any]) -> list[Any]:
        """See `Shards`: the arrays of all processes."""
        if in_other_process(tuple(self.devices)):
            raise elsewhere(self.devices)
        return everywhere(self.arrays, self.devices, "to_host")

    def _each(self, kernel: Kernel, columns: Sequence[Sequence[Any]], only: Sequence[bool] | None = None) -> list[Any]:
        owners, numbers = _owners(self.value)
        mine = [[column[k] for k in owners] for column in columns]
        results = each_here(kernel, [self.devices[k] for k in owners], mine, only and [only[k] for k in owners])
        return [results[n] for n in numbers]


def each_here(
    kernel: Kernel,
    devices: Sequence[Device],
    columns: Sequence[Sequence[Any]],
    only: Sequence[bool] | None = None,
) -> list[Any]:
    """Returns what ``kernel(xp, *items)`` computes on each device of this process, or on ``only`` some of them, and
    None for the others.
    """
    results: list[Any] = []
    chosen = itertools.repeat(True, len(devices)) if only is None else only
    for device, is_chosen, items in zip(devices, chosen, zip(*columns, strict=True), strict=True):
        if is_remote(device) or not is_chosen:
            results.append(None)
            continue
        backend = backend_of(device)
        with backend.on(device):
            results.append(kernel(backend.xp, *items))
    return results


def shards_of(value: Aval, arrays: Sequence[Any]) -> Shards:
    """Returns the shards of a tensor with the given aval."""
    return SpanningShards(value, arrays) if value.spans else Shards(value, arrays)


class AbstractShards(Shards):
    """The shards of a tensor without elements: the shapes and dtypes of the arrays."""

    def map(
        self,
        kernel: Kernel,
        *columns: Sequence[Any],
        shape: Callable[[Shape], Shape],
        dtype: Any,
        tuples: bool = False,
        only: Sequence[bool] | None = None,
    ) -> Shards:
        """See `Shards`."""
        by_shape = {one: host_aval(shape(one), np.dtype(dtype)) for one in {a.shape for a in self.arrays}}
        return AbstractShards(self.value, [by_shape[a.shape] for a in self.arrays])

    def item(self, number: int) -> Self:
        """See `Shards`: shape and dtype are those of one array already."""
        return self

    def assembled(self, value: Aval) -> Shards:
        """See `Shards`."""
        return AbstractShards(value, ())

    @classmethod
    def empty(cls, value: Aval) -> Shards:
        """See `Shards`."""
        return cls(value, ())

    def tensor(self) -> ShardedTensor:
        """See `Shards`: the tensor, whose devices are all in another process."""
        return tensor_of(self.value, new_buffers(self.value)[0])

    def to_host(self, expected: Sequence[Any]) -> list[Any]:
        """See `Shards`."""
        if len(expected) == len(self.devices):
            HostCopies(self.devices, [np.asarray(array).nbytes for array in expected]).announce()
        return list(expected)

    def _each(self, kernel: Kernel, columns: Sequence[Sequence[Any]], only: Sequence[bool] | None = None) -> list[Any]:
        return []


@functools.lru_cache(1024)
def _groups(value: Aval, dimensions: tuple[int, ...]) -> tuple[str, Sequence[int], Sequence[Sequence[int]]]:
    """Returns the mesh axes that split some dimensions of a tensor; for each device of the mesh its position in its
    group; and the devices of each group, by their positions in the mesh. See `MeshCommunicator`.
    """
    mesh, chains, grid = value.sharding.mesh, value.sharding.spec.chains_of(value.ndim), value.grid
    axes = tuple([axis for d in dimensions for axis in chains[d]])
    numbers = np.zeros(len(grid.devices), np.int64)
    for d in dimensions:
        numbers = numbers * grid.counts[d] + grid.parts[:, d]
    index: Sequence[int] = numbers.tolist()
    return ", ".join(axes), index, [sorted(group, key=index.__getitem__) for group in groups_along(mesh, axes)]


class MeshCommunicator:
    """The collectives of a `Communicator` along the mesh axes that split dimensions of a tensor, on one local array for
    each device of the mesh. The devices of a group are in the row-major order of their parts of these dimensions.

    Args:
        caller: the name of the operator, for the log.
        value: the aval of the tensor.
        dimensions: the dimension, or several.
        kind: the class of the communicators of the groups of devices.
        explicit: whether the transfers count as requested by the call.

    Attributes:
        size: the number of devices in each group.
        index: for each device of the mesh its position in its group.
    """

    def __init__(
        self,
        caller: str,
        value: Aval,
        dimensions: int | Sequence[int],
        kind: Callable[..., Any],
        explicit: bool = True,
    ) -> None:
        some = (dimensions,) if isinstance(dimensions, int) else tuple(dimensions)
        axes, self.index, self._groups = _groups(value, some)
        self._communicator = functools.partial(kind, caller, axes)
        self._explicit = explicit
        self._devices = value.sharding.mesh.flat
        self.size = len(self._groups[0])
        self._made: list[Any] | None = None

    def reversed(self) -> MeshCommunicator:
        """Returns the communicator of the same groups in the reverse order."""
        other = copy.copy(self)
        other.index = [self.size - 1 - k for k in self.index]
        other._groups = [group[::-1] for group in self._groups]
        other._made = None
        return other

    @classmethod
    def of_arrays(cls, caller: str, value: Aval, dimension: int) -> MeshCommunicator:
        """Returns the communicator of arrays on separate memories; see the class."""
        return cls(caller, value, dimension, communicator)

    def all_gather(self, x: Shards, axis: int) -> list[Any]:
        """Concatenates the arrays of each group along a dimension, on every device of the group."""
        return self._each("all_gather", x.arrays, axis, True)

    def all_to_all(self, x: Shards, split_axis: int, concat_axis: int) -> Shards:
        """Sends device k of each group the k-th part of every array by the split rule, joined along
        ``concat_axis``.
        """
        return x.of(self._each("all_to_all", x.arrays, split_axis, concat_axis, True))

    def ragged_all_to_all(self, x: Shards, bounds: Sequence[Ints], split_axis: int, concat_axis: int) -> Shards:
        """Sends device k of each group the indices from ``bounds[i][k]`` to ``bounds[i][k + 1]`` of the array of each
        device i of the mesh, joined along ``concat_axis``.
        """
        return x.of(self._each("ragged_all_to_all", x.arrays, split_axis, concat_axis, columns=(bounds,)))

    def transposed(self, bounds: Sequence[Ints]) -> list[Ints]:
        """Returns the bounds of the replies to a `ragged_all_to_all` with these bounds: as many elements each."""
        replies: list[Any] = [None] * len(bounds)
        for group in self._groups:
            counts = np.diff(np.stack([bounds[k] for k in group]), axis=1)
            for k, column in zip(group, counts.T, strict=True):
                replies[k] = np.append(0, np.cumsum(column))
        return replies

    def permute(self, x: Shards, sources: Sequence[int | None], zeros: bool = True) -> list[Any]:
        """Sends device k of each group the array of device ``sources[k]``; where that is None, it receives zeros, or
        without ``zeros`` nothing, and its item must not be used.
        """
        return self._each("permute", x.arrays, sources, zeros)

    def broadcast(self, arrays: Sequence[Any], root: int) -> Sequence[Any]:
        """Sends the array of the device at position ``root`` of each group to every device of the group."""
        return arrays if self.size == 1 else self._each("broadcast", arrays, root)

    def _each(self, name: str, arrays: Sequence[Any], *args: Any, columns: Sequence[Sequence[Any]] = ()) -> list[Any]:
        results: list[Any] = [None] * len(arrays)
        if self._made is None:
            self._made = [self._communicator([self._devices[k] for k in group]) for group in self._groups]
        for group, collectives in zip(self._groups, self._made, strict=True):
            collectives.explicit = self._explicit
            of_group = [[column[k] for k in group] for column in (arrays, *columns)]
            for k, array in zip(group, getattr(collectives, name)(*of_group, *args), strict=True):
                results[k] = array
            collectives.settle()  # The next collective of these devices is another one.
        return results
