"""The local arrays of a tensor, and the communicator of its mesh: what a distributed algorithm works on."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from shardtensor.backend.device import Device
from shardtensor.backend.registry import backend_of, is_remote, processes_of
from shardtensor.backend.remote import RemoteArray
from shardtensor.communication.abstract_communicator import AbstractCommunicator
from shardtensor.communication.communicators import communicator
from shardtensor.communication.offload import offloaded
from shardtensor.communication.processes import completed, described, everywhere, note
from shardtensor.communication.schedules import HostCopies
from shardtensor.communication.transfer import announce_reading, operand_transfer, whole_array
from shardtensor.communication.transfer_log import is_recording
from shardtensor.core import OPS, implements
from shardtensor.errors import NotAddressableError
from shardtensor.functions.algorithms.one_memory import may_run_on_first
from shardtensor.functions.placement import infer_transfer, reshard_to
from shardtensor.host.blockwise import BYTE, LONG
from shardtensor.host.fp_errors import FloatingPointErrors
from shardtensor.host.threads import each
from shardtensor.sharding.layout import Ints, NamedSharding, Shape, as_sharding
from shardtensor.sharding.mesh import default_mesh, groups_along
from shardtensor.tensor.operands import HostAval, host_aval
from shardtensor.tensor.storage import Storage
from shardtensor.tensor.tensor import ShardedTensor, lacks_elements, tensor, without_elements
from shardtensor.tensor.value import Aval, aval, memories_of, new_buffers, whole_of

Kernel = Callable[..., Any]
"""``kernel(xp, *arrays)`` computes an array on one device; ``kernel(xp, out, *arrays)`` writes into ``out``."""


_FEW_BYTES = 1 << 14
"""The size of operands up to which the calls for single shards take longer than the elements."""

_FEW_ON_DEVICES = 1 << 20
"""The same for devices other than the host, where each call is a launch."""


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
    ) -> Shards:
        """Returns the arrays that ``kernel(xp, array, *items)`` computes on each device.

        Args:
            kernel: the function.
            *columns: further arguments, with an item for each device.
            shape: returns the shape of the result, given that of the local array.
            dtype: the dtype of the result.
            tuples: whether it computes a tuple of arrays, of which shape and dtype are those of one. They can be given
                to other kernels only.
        """
        return self.of(self._each(kernel, (self.arrays, *columns)))

    def of(self, arrays: Sequence[Any]) -> Shards:
        """Returns other arrays on the same devices: those that a collective returned."""
        return type(self)(self.value, arrays)

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
        made = self.empty(value)
        made._each(kernel, (made.arrays, *columns))
        return made

    def copied(self, dtype: np.dtype[Any]) -> Shards:
        """Returns copies of the arrays, which the algorithm may write to, and drops the arrays, so that those that were
        transferred for this call are free.
        """
        made = self.map(functools.partial(_copied, dtype), shape=lambda shape: shape, dtype=dtype)
        self.arrays = ()
        return made

    def divided(self, value: Aval, caller: str) -> Shards:
        """Returns the shards of a tensor on one device, sent to the devices of the given aval."""
        move = operand_transfer(self.value, value.sharding)
        return Shards(value, (), move.buffers(self.tensor(), caller))

    def tensor(self) -> ShardedTensor:
        """Returns the tensor that the arrays make up."""
        return tensor(self.value, offloaded(self.value, self.buffers or self.arrays))

    def _each(self, kernel: Kernel, columns: Sequence[Sequence[Any]]) -> list[Any]:
        """Returns what the kernel computes on each device: of replicas in one memory once, on the host in threads."""
        backend, devices, rows = self.value.backend, self.devices, list(zip(*columns, strict=True))
        owners, numbers = _owners(self.value)
        results: list[Any] = [None] * len(owners)

        def work(n: int) -> None:
            with backend.on(devices[owners[n]]):
                results[n] = kernel(backend.xp, *rows[owners[n]])

        if backend.on_host and BYTE * self.value.nbytes > LONG:
            each(work, len(owners))
        else:
            for n in range(len(owners)):
                work(n)
        return [results[n] for n in numbers]


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
    """

    def map(
        self,
        kernel: Kernel,
        *columns: Sequence[Any],
        shape: Callable[[Shape], Shape],
        dtype: Any,
        tuples: bool = False,
    ) -> Shards:
        """See `Shards`."""
        made = self._each(kernel, (self.arrays, *columns))
        if tuples or any(isinstance(one, tuple) for one in self.arrays):  # The shapes of their arrays are not declared.
            return self.of(completed(made, self.devices, "map"))
        for k, device in enumerate(self.devices):
            if is_remote(device):
                made[k] = RemoteArray(shape(self.arrays[k].shape), np.dtype(dtype))
        return self.of(made)

    def assembled(self, value: Aval) -> Shards:
        """See `Shards`."""
        arrays = list(self.arrays)
        for k, device in enumerate(self.devices):
            if is_remote(device):
                arrays[k] = RemoteArray(value.grid.shape(k), value.dtype)
        return SpanningShards(value, arrays) if value.cells.apart else self.make(value, _write, arrays)

    def to_host(self, expected: Sequence[Any]) -> list[Any]:
        """See `Shards`: the arrays of all processes."""
        if len(processes_of(tuple(self.devices))) == 1:
            raise NotAddressableError(f"a tensor of {self.devices[0]}, which is in another process, is read")
        return everywhere(self.arrays, self.devices, "to_host")

    def _each(self, kernel: Kernel, columns: Sequence[Sequence[Any]]) -> list[Any]:
        owners, numbers = _owners(self.value)
        mine = [[column[k] for k in owners] for column in columns]
        results = each_here(kernel, [self.devices[k] for k in owners], mine)
        return [results[n] for n in numbers]


def each_here(kernel: Kernel, devices: Sequence[Device], columns: Sequence[Sequence[Any]]) -> list[Any]:
    """Returns what ``kernel(xp, *items)`` computes on each device of this process, and None for the others."""
    results: list[Any] = []
    for device, items in zip(devices, zip(*columns, strict=True), strict=True):
        if is_remote(device):
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
    ) -> Shards:
        """See `Shards`."""
        made = {one: host_aval(shape(one), np.dtype(dtype)) for one in {a.shape for a in self.arrays}}
        return AbstractShards(self.value, [made[a.shape] for a in self.arrays])

    def assembled(self, value: Aval) -> Shards:
        """See `Shards`."""
        return AbstractShards(value, ())

    @classmethod
    def empty(cls, value: Aval) -> Shards:
        """See `Shards`."""
        return cls(value, ())

    def divided(self, value: Aval, caller: str) -> Shards:
        """See `Shards`."""
        operand_transfer(self.value, value.sharding).schedule(caller).announce()
        return AbstractShards(value, ())

    def to_host(self, expected: Sequence[Any]) -> list[Any]:
        """See `Shards`."""
        if is_recording() and len(expected) == len(self.devices):
            HostCopies(self.devices, [np.asarray(array).nbytes for array in expected]).announce()
        return list(expected)

    def _each(self, kernel: Kernel, columns: Sequence[Sequence[Any]]) -> list[Any]:
        return []


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
        some = [dimensions] if isinstance(dimensions, int) else list(dimensions)
        mesh, chains, grid = value.sharding.mesh, value.sharding.spec.chains_of(value.ndim), value.grid
        axes = tuple([axis for d in some for axis in chains[d]])
        numbers = np.zeros(len(grid.devices), np.int64)
        for d in some:
            numbers = numbers * grid.counts[d] + grid.parts[:, d]
        self.index: list[int] = numbers.tolist()
        self._groups = [sorted(group, key=self.index.__getitem__) for group in groups_along(mesh, axes)]
        self._communicator = functools.partial(kind, caller, ", ".join(axes))
        self._explicit = explicit
        self._devices = mesh.flat
        self.size = len(self._groups[0])

    def reversed(self) -> MeshCommunicator:
        """Returns the communicator of the same groups in the reverse order."""
        other = copy.copy(self)
        other.index = [self.size - 1 - k for k in self.index]
        other._groups = [group[::-1] for group in self._groups]
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

    def permute(self, x: Shards, sources: Sequence[int | None]) -> list[Any]:
        """Sends device k of each group the array of device ``sources[k]``; where that is None, it receives zeros."""
        return self._each("permute", x.arrays, sources)

    def broadcast(self, arrays: Sequence[Any], root: int) -> Sequence[Any]:
        """Sends the array of the device at position ``root`` of each group to every device of the group."""
        return arrays if self.size == 1 else self._each("broadcast", arrays, root)

    def _each(self, name: str, arrays: Sequence[Any], *args: Any, columns: Sequence[Sequence[Any]] = ()) -> list[Any]:
        results: list[Any] = [None] * len(arrays)
        for group in self._groups:
            communicator = self._communicator([self._devices[k] for k in group])
            communicator.explicit = self._explicit
            given = [[column[k] for k in group] for column in (arrays, *columns)]
            for k, made in zip(group, getattr(communicator, name)(*given, *args), strict=True):
                results[k] = made
            communicator.settle()
        return results


def distributed(
    function: Callable[..., Any],
    *,
    moves: bool = False,
    whole: Callable[..., Any] | None = None,
    result: Callable[..., Any] | None = None,
    layout: Callable[..., Sequence[NamedSharding]] | None = None,
    known_messages: bool = False,
    small: Callable[..., tuple[Aval, Callable[[Any, Any], Any]] | None] | None = None,
    few: Callable[..., bool] = lambda *avals, **params: False,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Attaches the decorated function to a declared operator as its algorithm and its inference; see the package.

    Operators may have further operands: the function receives the `Shards` of all of them. The operands are transferred
    to the sharding of the first one, or to the layout that the algorithm needs.

    Args:
        function: the function that the declaration returned.
        moves: whether the algorithm moves elements of the operand, so that the transfer guard applies to its messages,
            and not only combines partial results.
        whole: ``whole(*arrays, **params)`` computes the result from all elements, as a new host array. It runs instead
            of the algorithm where devices share a memory, unless transfers are recorded: then the algorithm runs,
            because its messages depend on the elements.
        result: ``result(*avals, **params)`` returns the aval of the result, if ``whole`` is given. Operators with
            several results have a tuple of avals, and of arrays or `Shards`.
        layout: ``layout(*avals, **params)`` returns the sharding that the algorithm needs of each operand.
        small: ``small(aval, **params)`` returns the aval of the result and the function of a namespace and an array
            that computes it, with the algorithm's bits, from the whole buffer of a small operand on devices that share
            a memory, as a new array; or None. The messages of the algorithm follow from the shapes.
        few: ``few(*avals, **params)`` returns whether the operands are so few bytes that the messages of the algorithm
            take longer than the elements: then they are sent to the first device, which runs the algorithm and sends
            the parts of the result to the others, if all are in one process. ``result`` is given.
        known_messages: whether the messages follow from the shapes. Then ``whole`` runs where transfers are recorded,
            too, so that a log does not change the result.
    """
    op = OPS[function.__name__]
    further = len(op.operands) - 1

    @functools.lru_cache(1024, typed=True)
    def targets(*avals_and_params: Any) -> Sequence[NamedSharding]:
        if layout is None:
            return [avals_and_params[0].sharding] * (1 + further)
        params = zip(op.params, avals_and_params[1 + further :], strict=True)
        return layout(*avals_and_params[: 1 + further], **dict(params))

    @functools.lru_cache(1024, typed=True)  # Parameters that are equal, such as 1 and True, may differ in type.
    def known(*avals_and_params: Any) -> Any:
        assert result is not None
        params = zip(op.params, avals_and_params[1 + further :], strict=True)
        return result(*avals_and_params[: 1 + further], **dict(params))

    @functools.lru_cache(1024, typed=True)
    def runs_on_one(*avals_and_params: Any) -> bool:
        avals, params = avals_and_params[: 1 + further], avals_and_params[1 + further :]
        return may_run_on_first(avals[0]) and few(*avals, **dict(zip(op.params, params, strict=True)))

    @functools.lru_cache(1024, typed=True)
    def prepared(value: Aval, *params: Any) -> tuple[Aval, Callable[[Any, Any], Any]] | None:
        most = _FEW_BYTES if value.backend.on_host else _FEW_ON_DEVICES
        if small is None or value.memory is None or value.offloaded or value.nbytes > most:
            return None
        return small(value, **dict(zip(op.params, params, strict=True)))

    def at_once(operands: Sequence[Any], params: tuple[Any, ...]) -> Any:
        assert whole is not None
        shardings = targets(*map(_kind_of, operands), *params)
        moves = [operand_transfer(_kind_of(y), target) for y, target in zip(operands, shardings, strict=True)]
        avals = known(*map(_laid_out, operands, shardings), *params)
        arrays = [move.unrecorded(y, op.name)[0] for move, y in zip(moves, operands, strict=True)]
        made = whole(*arrays, **dict(zip(op.params, params, strict=True)))
        return _each_of(lambda v, a: tensor(v, Storage((whole_of(a, v),))), avals, made)

    def on_first(body: Callable[..., Any], operands: Sequence[Any], params: tuple[Any, ...]) -> Any:
        """Returns the result of the algorithm on the first of devices that share a memory."""
        shardings = targets(*map(_kind_of, operands), *params)
        avals = known(*map(_laid_out, operands, shardings), *params)
        shards = []
        for y, target in zip(operands, shardings, strict=True):
            move = operand_transfer(_kind_of(y), target)
            value = _laid_out(y, as_sharding(target.mesh.flat[0], y.ndim, op.name))
            shards.append(shards_of(value, move.unrecorded(y, op.name)))
        along = functools.partial(MeshCommunicator, op.name, shards[0].value, kind=communicator, explicit=not moves)
        made = body(*shards, along, **dict(zip(op.params, params, strict=True)))
        return _each_of(lambda v, s: tensor(v, Storage(s.tensor()._storage.buffers)), avals, made)

    def attach(body: Callable[..., Any]) -> Callable[..., Any]:
        def run(x: ShardedTensor, others: Sequence[Any], params: tuple[Any, ...]) -> Any:
            operands = (x, *others)
            shardings = targets(*map(_kind_of, operands), *params)
            value = _laid_out(x, shardings[0])
            on_one = runs_on_one(*map(_kind_of, operands), *params)
            if on_one:
                needed, device = shardings, value.sharding.mesh.flat[0]
                shardings = [as_sharding(device, y.ndim, op.name) for y in operands]
            if any(map(lacks_elements, operands)):
                kind: Callable[..., Any] = AbstractCommunicator
                shards = [_abstract_operand(y, target, op.name) for y, target in zip(operands, shardings, strict=True)]
            else:
                kind = communicator
                if len(processes_of(value.sharding.mesh.flat)) > 1:
                    note(f"{op.name}({', '.join(map(described, (*operands, *params)))})")
                shards = [_operand(y, target, op.name) for y, target in zip(operands, shardings, strict=True)]
            along = functools.partial(MeshCommunicator, op.name, shards[0].value, kind=kind, explicit=not moves)
            made = body(*shards, along, **dict(zip(op.params, params, strict=True)))
            if not on_one:
                return made
            avals = known(*map(_laid_out, operands, needed), *params)
            return _each_of(lambda value, part: part.divided(value, op.name), avals, made)

        def algorithm(x: Any, *others_and_params: Any) -> Any:
            others, params = others_and_params[:further], others_and_params[further:]
            if not isinstance(x, ShardedTensor):
                x = reshard_to(x, as_sharding(default_mesh(), np.ndim(x), op.name), op.name, committed=False)
            value = x._aval
            if ready := prepared(value, *params):
                if is_recording():
                    run(without_elements(value), others, params)
                backend, made = value.backend, ready[0]
                with FloatingPointErrors(op.ufunc), backend.on(value.sharding.mesh.flat[0]):
                    array = whole_of(ready[1](backend.xp, whole_array(x, op.name)), made)
                return tensor(made, Storage((array,), ([],)))
            if whole is not None and value.memory is not None and (known_messages or not is_recording()):
                if is_recording():
                    run(without_elements(value), others, params)
                if value.backend.on_host:
                    return at_once((x, *others), params)
                if value.sharding.mesh.size > 1 and not value.offloaded:
                    return on_first(body, (x, *others), params)
            with FloatingPointErrors(op.ufunc):  # Devices and blocks report together, as one call of NumPy does.
                return _each_of(lambda made: made.tensor(), run(x, others, params))

        def infer(x: Any, *others_and_params: Any) -> Any:
            if not isinstance(x, ShardedTensor):
                target = as_sharding(default_mesh(), np.ndim(x), op.name)
                x = without_elements(infer_transfer(x, target, op.name, committed=False))
            found = run(x, others_and_params[:further], others_and_params[further:])
            return _each_of(lambda made: made.value, found)

        implements(function, "algorithm")(algorithm)
        implements(function, "infer")(infer)
        return body

    return attach


def _kind_of(y: Any) -> Aval | HostAval:
    return y._aval if isinstance(y, ShardedTensor) else host_aval(y.shape, y.dtype)


def _laid_out(y: Any, sharding: NamedSharding) -> Aval:
    """Returns the aval of an operand in the sharding that the algorithm needs."""
    return aval(y.shape, y.dtype, sharding, isinstance(y, ShardedTensor) and y._aval.committed)


def _operand(y: Any, sharding: NamedSharding, caller: str) -> Shards:
    """Returns the shards of an operand in the sharding that the algorithm needs."""
    move, value = operand_transfer(_kind_of(y), sharding), _laid_out(y, sharding)
    return shards_of(value, move.shards(y, caller))


def _abstract_operand(y: Any, sharding: NamedSharding, caller: str) -> Shards:
    """Returns those of an operand without elements, and records the transfer if a log is active."""
    move, value = operand_transfer(_kind_of(y), sharding), _laid_out(y, sharding)
    if is_recording():
        announce_reading(y)
        if not move.stays:
            move.schedule(caller).announce()
    grid = value.grid
    return AbstractShards(value, [host_aval(grid.shape(k), value.dtype) for k in range(len(grid.devices))])


def _copied(dtype: np.dtype[Any], xp: Any, array: Any) -> Any:
    return xp.asarray(array, dtype=dtype, copy=True)


def _each_of(function: Callable[..., Any], first: Any, *others: Any) -> Any:
    """Applies a function to the items of tuples, and returns one of the first's type; else, to the arguments."""
    if not isinstance(first, tuple):
        return function(first, *others)
    made = [function(*items) for items in zip(first, *others, strict=True)]
    return type(first)(*made) if hasattr(first, "_fields") else tuple(made)
