"""Devices, and the protocol and registry of the plugins that drive them; the abstract backend without elements.

The main nouns are `Device`, `Backend` (the protocol that a plugin implements) and `HostArray`. This package re-exports
the names that plugin authors use. Tensors and shardings must not be imported here.
"""

from shardtensor.backend.device import HOST, HOST_MEMORY, MEMORY_KINDS, Device, HostArray
from shardtensor.backend.exclusive_memory import is_exclusive, lend, memory_of, read_only, references
from shardtensor.backend.functions import function_of
from shardtensor.backend.protocol import Backend, beside_program, logical_device_count, own_hardware
from shardtensor.backend.registry import current_device_of_plugin as current_device
from shardtensor.backend.registry import is_remote, load
from shardtensor.backend.small_floats import SMALL_FLOATS, is_small_float, small_float
from shardtensor.backend.strides import loop_strides, merged
from shardtensor.host.blockwise import copied
from shardtensor.host.fork import cached_property, lock
from shardtensor.host.limits import memory as host_memory
from shardtensor.host.memory_pool import owner_of

__all__ = [
    "HOST",
    "HOST_MEMORY",
    "MEMORY_KINDS",
    "SMALL_FLOATS",
    "Backend",
    "Device",
    "HostArray",
    "beside_program",
    "cached_property",
    "copied",
    "current_device",
    "function_of",
    "host_memory",
    "is_exclusive",
    "is_remote",
    "is_small_float",
    "lend",
    "load",
    "lock",
    "logical_device_count",
    "loop_strides",
    "memory_of",
    "merged",
    "own_hardware",
    "owner_of",
    "read_only",
    "references",
    "small_float",
]
