"""The operators behind ``__dlpack__`` and ``__dlpack_device__``, by which other libraries import tensors.

A write to a tensor whose memory another library holds allocates new memory first. Writes of another library are visible
only in the tensor that was exported to it (see `shardtensor.functions.interchange.dlpack_export`).
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

from shardtensor.backend.device import HOST_MEMORY, Device, HostArray
from shardtensor.backend.exclusive_memory import read_only
from shardtensor.backend.protocol import Backend
from shardtensor.backend.registry import backend_of
from shardtensor.backend.small_floats import is_small_float
from shardtensor.communication.offload import OffloadedStorage
from shardtensor.core import implements, operator
from shardtensor.errors import (
    ArgumentError,
    ArgumentTypeError,
    InterchangeError,
    type_text,
)
from shardtensor.functions.interchange.dlpack_export import array_of, export
from shardtensor.functions.interchange.dlpack_memory import Memory, as_memory, described, is_reversed, recorded_copy
from shardtensor.host.units import counted
from shardtensor.tensor.ownership import lease_of, never_ends
from shardtensor.tensor.storage import Lease
from shardtensor.tensor.tensor import ArrayLike, ShardedTensor, shard_arrays

_DERIVATIVES = "of_movement"


@operator(tags=("any dtype", "escapes", "internal"))
def dlpack_device(x: ArrayLike, /) -> tuple[int, int]:
    """Returns the DLPack device type and device number of x's memory; it implements ``x.__dlpack_device__()``.

    Args:
        x: a tensor on one device, or on several devices that all use host memory. A tensor in pinned host memory is
            reported as being in host memory.

    Raises:
        ArgumentTypeError: x is not a tensor.
        InterchangeError: x is on several devices with other memories.
        DonatedError: x was donated.

    >>> st.zeros(3, device=st.devices()[0]).__dlpack_device__()
    (1, 0)
    """


@implements(dlpack_device, "algorithm")
def _dlpack_device(x: Any) -> Memory:
    return _memory_of(x, _devices_of(x, "__dlpack_device__"), "__dlpack_device__")


def _memory_of(x: ShardedTensor, devices: Sequence[Device], caller: str) -> Memory:
    """Returns the memory of a tensor.

    Raises:
        InterchangeError: it is on several devices that do not all use host memory.
    """
    if x._aval.spans:
        raise InterchangeError(
            f"{caller}: the tensor spans processes, {x.sharding.mesh!r}, and other libraries accept arrays of one; "
            "x.addressable_shards[k].data is the array of the k-th device of this process, and "
            "st.distributed.process_allgather(x) returns all elements"
        )
    memories = {
        HOST_MEMORY if isinstance(x._storage, OffloadedStorage) else backend_of(d).dlpack_device(d) for d in devices
    }
    if len(devices) > 1 and memories != {HOST_MEMORY}:
        raise InterchangeError(
            f"{caller}: the tensor is on {counted(len(devices), 'device')}, {x.sharding.mesh!r}, and other libraries "
            "accept arrays on one; np.from_dlpack(x, device='cpu') and np.asarray(x) copy it to the host, "
            "st.device_put(x, device) to one device, and x.addressable_shards[k].data is the array of the k-th"
        )
    return memories.pop()


@operator(tags=("any dtype", "escapes", "internal"))
def to_dlpack(
    x: ArrayLike,
    /,
    *,
    stream: Any = None,
    max_version: tuple[int, int] | None = None,
    dl_device: tuple[int, int] | None = None,
    copy: bool | None = None,
) -> Any:
    """Exports x to another library as a DLPack capsule; it implements ``x.__dlpack__()``, which `numpy.from_dlpack`,
    `torch.from_dlpack` and others call.

    The consumer may write to the memory that it receives. If x's memory is exclusive to x, the consumer shares it, and
    its writes are visible in x and in views of x only: every read of x copies for as long as the consumer holds the
    memory. If something else holds the memory (``x.copy()``, x in another sharding, ``np.asarray(x)``, the array from
    which x was created without a copy), the consumer receives a copy: versions of DLPack before 1.0 have no flag for
    read-only memory, and PyTorch ignores the flag. Writes to x never change the exported memory: they allocate new
    memory first.

    Args:
        x: a tensor of any dtype but datetime64 and timedelta64. One on several devices is exported to host memory only,
            as a whole: as a copy, unless the devices share that memory.
        stream: the stream on which the consumer uses the memory, in the form that the backend's library accepts; None
            or -1 for host memory.
        max_version: the newest version of DLPack that the consumer supports, (major, minor).
        dl_device: the DLPack device type and number of the result: those of x, or host memory, to which x is copied by
            a counted transfer.
        copy: True copies. None copies if the memory is not exclusive, for another device, for scalars, and for views
            with negative strides in host memory (``x[::-1]``), which some libraries do not accept. False never copies:
            host memory that is not exclusive is then exported as read-only if ``max_version`` is at least 1.0, and the
            consumer must not write to it.

    Raises:
        InterchangeError: x is on several devices that do not use host memory and ``dl_device`` is not the host, DLPack
            does not support x's dtype, ``copy=False`` and a copy is required, or ``dl_device`` is neither x's device
            nor the host (a BufferError).
        ArgumentError: a ``stream`` is given for host memory.
        ArgumentTypeError: x is not a tensor, or ``dl_device`` is not a pair of numbers.
        DonatedError: x was donated.

    >>> x = st.arange(3, device=st.devices()[0])
    >>> a = np.from_dlpack(x)
    >>> x[0] = 9
    >>> a
    array([0, 1, 2])
    """


@implements(to_dlpack, "algorithm")
def _to_dlpack(x: Any, stream: Any, max_version: Any, dl_device: Any, copy: bool | None) -> Any:
    devices = _devices_of(x, "__dlpack__")
    device = devices[0]
    backend = backend_of(device)
    there = None if dl_device is None else as_memory(dl_device, "__dlpack__", "dl_device")
    several = len(devices) > 1
    here = HOST_MEMORY if several and there == HOST_MEMORY else _memory_of(x, devices, "__dlpack__")
    there = here if there is None else there
    if there not in (here, HOST_MEMORY):
        raise InterchangeError(
            f"__dlpack__: dl_device is {described(there)}, and the tensor lies in {described(here)}; "
            "transfer it first, with st.device_put(x, device)"
        )
    if x.dtype.kind in "mM":
        raise InterchangeError(f"__dlpack__: DLPack has no {x.dtype}; give x.astype('int64')")
    if there != here or (several and not backend.on_host):
        if copy is False:
            raise InterchangeError(f"__dlpack__: copy=False, and x must be copied to the host from {_place(x, here)}")
        # The consumer may write to this memory, and the result of ``np.asarray`` is read-only.
        return _host_capsule(np.array(x), max_version, marked=False)[0]
    host = here == HOST_MEMORY
    if host and is_small_float(x.dtype):
        bits = f"int{8 * x.itemsize}"
        raise InterchangeError(
            f"__dlpack__: NumPy, whose capsules are used on the host, has no {x.dtype}; export x.view({bits!r}), and "
            "view it as that dtype in the other library"
        )
    if host and stream not in (None, -1):
        raise ArgumentError(f"__dlpack__: stream is {stream!r:.60}, and {device} is in host memory; wanted None")

    def capsule(array: Any, marked: bool = False) -> tuple[Any, Lease]:
        if host:
            return _host_capsule(_on_host(array, backend, device), max_version, marked)
        return _device_capsule(array, backend, device, stream, max_version)

    result = None if copy else export(x, lambda array: None if is_reversed(array) else capsule(array))
    if result is not None:
        return result
    array = x._storage.shards()[0] if isinstance(x._storage, OffloadedStorage) else array_of(x)
    if copy is False:
        _check_marked(array, host, max_version)
        result, its_lease = capsule(array, marked=True)
        lease_of(x, its_lease)
        return result
    return capsule(recorded_copy(array, device, "to_dlpack"))[0]


def _check_marked(array: Any, host: bool, max_version: Any) -> None:
    """Raises an error unless an array can be exported as read-only without a copy.

    Raises:
        InterchangeError: the array has negative strides, is not in host memory, or the consumer's version of DLPack has
            no flag for read-only memory.
    """
    if is_reversed(array):
        raise InterchangeError(
            "__dlpack__: copy=False, and the tensor is a view with negative strides, which not every library accepts"
        )
    if not host or max_version is None or max_version[0] < 1:
        raise InterchangeError(
            "__dlpack__: copy=False, and the tensor's memory is shared (with copies, host arrays, or the array from "
            "which it was created) and must not be written to; DLPack marks memory as read-only only on the host, for "
            "consumers that request max_version 1.0 or above. Use copy=None or copy=True"
        )


def _on_host(array: Any, backend: Backend, device: Device) -> HostArray:
    """Returns an array of any library in host memory as a NumPy array that shares the memory."""
    if type(array) is np.ndarray:
        return array
    backend.synchronize(device)
    with backend.on(device):
        host = np.from_dlpack(backend.to_dlpack(array))
    return np.asarray(_Writable(host))  # NumPy marks arrays as read-only that libraries export by DLPack before 1.0.


class _Writable:
    """A writable array interface to the memory of a host array, which it keeps alive."""

    def __init__(self, array: HostArray) -> None:
        self._array = array
        interface = array.__array_interface__
        self.__array_interface__ = {**interface, "data": (interface["data"][0], False)}


def _host_capsule(array: HostArray, max_version: Any, marked: bool) -> tuple[Any, Lease]:
    """Returns the capsule that NumPy creates for a host array, with the read-only flag if ``marked``; and its lease.

    Raises:
        InterchangeError: DLPack does not support the dtype.
    """
    options = {} if max_version is None else {"max_version": max_version}  # NumPy before 2.1 lacks the argument.
    exported = read_only(array) if marked else array.view()  # An object of its own, to which only the capsule refers.
    try:
        return exported.__dlpack__(**options), weakref.ref(exported)
    except BufferError as error:
        raise InterchangeError(f"__dlpack__: {error} Convert the tensor, of {array.dtype}, with astype") from None


def _device_capsule(array: Any, backend: Backend, device: Device, stream: Any, max_version: Any) -> tuple[Any, Lease]:
    """Returns the capsule that the backend's own library creates, which orders ``stream`` after the device's work; and
    its lease.
    """
    options = {} if stream is None else {"stream": stream}
    backend.make_caller_wait(device)
    with backend.on(device):
        lent, its_lease = backend.lend(array)
        exported = backend.to_dlpack(lent)
        try:
            capsule = exported.__dlpack__(**options, max_version=max_version)
        except TypeError:  # Libraries that implement only one version of DLPack do not accept ``max_version``.
            capsule = exported.__dlpack__(**options)
    return capsule, its_lease or never_ends


def _place(x: ShardedTensor, memory: Memory) -> str:
    """Returns a description of where a tensor is, for errors."""
    return described(memory) if x.sharding.mesh.size == 1 else f"the memories of {x.sharding.mesh!r}"


def _devices_of(x: Any, caller: str) -> Sequence[Device]:
    """Returns the devices of a tensor.

    Raises:
        ArgumentTypeError: x is not a tensor.
        DonatedError: x was donated.
    """
    if not isinstance(x, ShardedTensor):
        raise ArgumentTypeError(f"{caller}: x is {type_text(x)}; wanted a tensor")
    if x.is_donated:
        shard_arrays(x)  # This raises the DonatedError.
    return x.sharding.mesh.flat
