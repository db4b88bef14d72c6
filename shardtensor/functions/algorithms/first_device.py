"""The first device computes for the others: where all of them share a memory, and where the operands have few bytes.

In one memory, it takes the whole buffers as they are: nothing is exchanged, and as many kernels are launched as for a
tensor that is not split. Operands of few bytes are sent to it, and the parts of the results to the other devices,
because the messages of an algorithm would take longer. The bits of the result are the same.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from shardtensor.backend.registry import backend_of, is_remote
from shardtensor.backend.remote import RemoteArray
from shardtensor.communication.between_processes.processes import elsewhere
from shardtensor.communication.transfer import OperandTransfer, announce_reading, operand_transfer
from shardtensor.core import is_executing
from shardtensor.sharding.layout import NamedSharding, as_sharding
from shardtensor.tensor.operands import HostAval
from shardtensor.tensor.tensor import ShardedTensor, lacks_elements, tensor_of
from shardtensor.tensor.value import Aval, aval, whole_of

GATHERED = 1 << 16
"""Bytes of all operands up to which the messages of an algorithm take longer than those of all elements."""


def is_few(value: Aval, *others: Aval | HostAval) -> bool:
    """Whether the first of a tensor's devices computes for the others because the operands have few bytes: there are
    several devices, all in one process.
    """
    devices = value.sharding.mesh.flat
    if len(devices) == 1 or value.offloaded or value.nbytes + sum([v.nbytes for v in others]) > GATHERED:
        return False
    return len({device.process_index for device in devices}) == 1


def shares_memory(x: object) -> bool:
    """Whether the first of a tensor's devices computes for the others because they share a memory other than the
    host's, whose functions take whole buffers.
    """
    value = x._aval if isinstance(x, ShardedTensor) else None
    return value is not None and value.memory is not None and not value.backend.on_host and value.sharding.mesh.size > 1


def runs_whole(x: object) -> bool:
    """Whether a function of whole host arrays may compute the result of x: a tensor whose devices share the memory of
    the host, while no interpreter records the call or its messages.
    """
    value = x._aval if isinstance(x, ShardedTensor) else None
    if value is None or value.memory is None or not value.backend.on_host:
        return False
    return not lacks_elements(x) and is_executing()


@functools.lru_cache(1024)
def alone(value: Aval, caller: str) -> Aval:
    """Returns the aval of a result on the first device, which computes it."""
    return aval(value.shape, value.dtype, _first_of(value.sharding, value.ndim, caller), value.committed)


def to_first(kind: Aval | HostAval, sharding: NamedSharding, caller: str) -> OperandTransfer:
    """Returns the transfer of an operand to the first device of a sharding."""
    return operand_transfer(kind, _first_of(sharding, len(kind.shape), caller))


def _first_of(sharding: NamedSharding, ndim: int, caller: str) -> NamedSharding:
    return as_sharding(sharding.mesh.flat[0], ndim, caller)


def on_first(
    x: ShardedTensor, compute: Callable[..., Sequence[Any]], sharding: NamedSharding, caller: str
) -> list[ShardedTensor]:
    """Returns the tensors of the arrays, of any size, that ``compute(xp, array)`` makes of a tensor on its first
    device, in a sharding of all devices.

    Raises:
        NotAddressableError: the devices are those of another process.
    """
    value, device = x._aval, x.sharding.mesh.flat[0]
    if is_remote(device):
        raise elsewhere(x.sharding.mesh.flat)
    backend, array = backend_of(device), to_first(value, x.sharding, caller).whole(x, caller)
    with backend.on(device):
        arrays = compute(backend.xp, array)
        dtypes = list(map(backend.dtype_of, arrays))
    results = []
    for y, dtype in zip(arrays, dtypes, strict=True):
        result = aval(tuple(y.shape), dtype, sharding, value.committed)
        results.append(sent(result, y, _back(result, caller), caller))
    return results


def _back(value: Aval, caller: str) -> OperandTransfer:
    """Returns the transfer of a result from the first device to all of them."""
    return operand_transfer(alone(value, caller), value.sharding)


def sent(value: Aval, array: Any, back: OperandTransfer, caller: str) -> ShardedTensor:
    """Returns the tensor of that aval of which the first device has the elements, by the transfer of its array to the
    others.
    """
    source = tensor_of(alone(value, caller), (array,))
    return tensor_of(value, tuple(back.buffers(source, caller)))


class FirstDevice:
    """The call of an operator that the first device computes for the others.

    Args:
        caller: the name of the operator.
        kinds: the avals of the operands.
        results: the aval of the result on all devices, or a tuple of those of several results.
        compute: ``compute(xp, *arrays)`` returns the array of the result, or those of several results.
        targets: the shardings to which the operands are transferred, where the devices share a memory. If it is None,
            the operands are sent to the first device, and the parts of the results to the others.
    """

    def __init__(
        self,
        caller: str,
        kinds: Sequence[Aval | HostAval],
        results: Any,
        compute: Callable[..., Any],
        targets: Sequence[NamedSharding] | None = None,
    ) -> None:
        first: Aval = results[0] if isinstance(results, tuple) else results
        self._caller, self._results, self._sends = caller, results, targets is None
        self._backend, self._device = first.backend, first.sharding.mesh.flat[0]
        self._compute = self._on_remote if is_remote(self._device) else compute
        if targets is None:
            self._gathers = [to_first(kind, first.sharding, caller) for kind in kinds]
            self._backs = each_of(lambda value: _back(value, caller), results)
        else:
            self._gathers = list(map(operand_transfer, kinds, targets))

    def run(self, operands: Sequence[Any]) -> Any:
        """Returns the result, or a tuple of several results."""
        arrays = []
        for gather, x in zip(self._gathers, operands, strict=True):
            arrays.append(gather.buffers(x, self._caller)[0])
        with self._backend.on(self._device):
            results = self._compute(self._backend.xp, *arrays)
            if self._sends:
                return each_of(self._sent, self._results, results, self._backs)
            return each_of(
                lambda value, array: tensor_of(value, (whole_of(array, value),), ([],)), self._results, results
            )

    def _sent(self, value: Aval, array: Any, back: OperandTransfer) -> ShardedTensor:
        return sent(value, whole_of(array, value), back, self._caller)

    def _on_remote(self, xp: Any, *arrays: Any) -> Any:
        return each_of(lambda value: RemoteArray(value.shape, value.dtype), self._results)

    def infer(self, operands: Sequence[Any]) -> Any:
        """Returns the avals of the results, and records the messages, if a log or a guard is active."""
        for gather, x in zip(self._gathers, operands, strict=True):
            announce_reading(x)
            gather.infer(self._caller)
        each_of(lambda back: back.infer(self._caller), self._backs)
        return self._results


def each_of(function: Callable[..., Any], first: Any, *others: Any) -> Any:
    """Applies a function to the items of tuples, and returns one of the first's type; else, to the arguments."""
    if not isinstance(first, tuple):
        return function(first, *others)
    results = [function(*items) for items in zip(first, *others, strict=True)]
    return type(first)(*results) if hasattr(first, "_fields") else tuple(results)
