"""Tensors in one buffer that several devices share, as tensors of the first of these devices.

There an algorithm runs on the whole buffer as on one device: it exchanges nothing, and launches as many kernels as for
a tensor that is not split. On the host, algorithms have functions of NumPy for that.
"""

from __future__ import annotations

from shardtensor.communication.transfer import operand_transfer, whole_array
from shardtensor.core import is_executing
from shardtensor.sharding.layout import NamedSharding, as_sharding
from shardtensor.tensor.storage import Storage
from shardtensor.tensor.tensor import ShardedTensor, lacks_elements, tensor
from shardtensor.tensor.value import Aval, aval


def on_one_device(x: object, caller: str) -> ShardedTensor | None:
    """Returns a tensor as one on the first of its devices, which shares its buffer.

    None if it is not a tensor in one buffer of several devices other than the host.
    """
    if not isinstance(x, ShardedTensor) or lacks_elements(x):
        return None
    value = x._aval
    if value.memory is None or value.backend.on_host or value.offloaded or value.sharding.mesh.size == 1:
        return None
    alone = as_sharding(value.sharding.mesh.flat[0], x.ndim, caller)
    return tensor(aval(x.shape, x.dtype, alone, x.committed), Storage((whole_array(x, caller),)))


def runs_whole(x: ShardedTensor) -> bool:
    """Returns whether a distributed algorithm with a function of whole host arrays calls it for a tensor: the devices
    share the memory of the host, and no interpreter records the call or its messages.
    """
    value = x._aval
    if value.memory is None or not value.backend.on_host or value.offloaded or lacks_elements(x):
        return False
    return is_executing()


def may_run_on_first(value: Aval) -> bool:
    """Whether the first of a tensor's devices can compute for the others: there are several, all in one process."""
    devices = value.sharding.mesh.flat
    return len(devices) > 1 and not value.offloaded and len({device.process_index for device in devices}) == 1


def sent_to(x: ShardedTensor, sharding: NamedSharding, caller: str) -> ShardedTensor:
    """Returns a tensor in another sharding, for reading; the transfer is recorded as an implicit one."""
    buffers = operand_transfer(x._aval, sharding).buffers(x, caller)
    return tensor(aval(x.shape, x.dtype, sharding, x.committed), Storage(tuple(buffers)))


def on_all_devices(x: ShardedTensor, sharding: NamedSharding, committed: bool) -> ShardedTensor:
    """Returns a result on one device as a tensor on devices that share its memory."""
    return tensor(aval(x.shape, x.dtype, sharding, committed), Storage((whole_array(x),)))
