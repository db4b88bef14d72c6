"""Interchange with other array libraries through DLPack, in both directions, without a copy where possible.

Tensors never write to memory that another library holds: a write to such a tensor allocates new memory first. Writes of
another library are visible only in the tensor that was exported to it (see `shardtensor.functions.dlpack_export`).
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

from shardtensor.backend.device import HOST_MEMORY, Device, HostArray
from shardtensor.backend.ownership import read_only
from shardtensor.backend.protocol import Backend, current_device
from shardtensor.backend.registry import backend_of
from shardtensor.backend.small_floats import is_small_float
from shardtensor.communication.messages import copied
from shardtensor.communication.offload import OffloadedStorage
from shardtensor.communication.transfer_log import record_copy
from shardtensor.core import implements, operator
from shardtensor.errors import (
    ArgumentError,
    ArgumentTypeError,
    InterchangeError,
    ShapeError,
    ShardingError,
    ShardTensorError,
    message_of,
)
from shardtensor.functions.dlpack_export import array_of, export
from shardtensor.functions.dlpack_memory import Memory, as_memory, described, devices_for, memory_of, row_for
from shardtensor.functions.placement import reshard_to
from shardtensor.sharding.layout import NamedSharding, Shape, Where, as_sharding, with_mesh
from shardtensor.sharding.mesh import Mesh, default_mesh, mesh_of
from shardtensor.tensor.operands import on_one_device
from shardtensor.tensor.ownership import lease, never_ends, storage_of
from shardtensor.tensor.storage import Lease, Storage
from shardtensor.tensor.tensor import ArrayLike, ShardedTensor, mark_array, shard_arrays, tensor
from shardtensor.tensor.value import Aval, aval, on_devices

# -- import ----------------------------------------------------------------------------------------


@operator(operands=("x",), trees=("x",))
def from_dlpack(x: Any, /, *, device: Where | None = None, copy: bool | None = None) -> ShardedTensor:
    """Converts an array of another library, or a list of them, to a tensor that shares their memory where possible.

    Do not write to the array afterwards: such writes may be visible in the tensor. Writes to the tensor are never
    visible in the array, and neither are those of libraries to which the tensor is exported: they receive a copy.

    A single array becomes a tensor on one device: the first device of the default mesh that uses the array's memory,
    otherwise one of another backend (NumPy's first). With ``device=``, it is transferred as by `device_put`; elements
    that lie in the memory of their device already stay there.

    The arrays of a list are the shards of one tensor. Without ``device=``, they are concatenated along the first
    dimension, each on the next device that uses its memory. With a mesh or a sharding, array k is the shard on device
    k of the mesh; arrays that are the same shard must be equal.

    Args:
        x: an object with ``__dlpack__`` and ``__dlpack_device__`` (an array of NumPy, CuPy, PyTorch, JAX, ...) of any
            shape and strides, or a list or tuple of them. The dtype is a bool, integer, floating-point or complex
            dtype of NumPy, and the tensor has the same.
        device: a Device, Mesh, NamedSharding or P (see `shardtensor.functions.creation`); by default as described
            above.
        copy: True always copies, False never, None only if the memory cannot be shared.

    Raises:
        ArgumentTypeError: x has no such methods, the arrays of a list have different dtypes, or the backend does not
            support the dtype.
        InterchangeError: ``copy=False`` and a copy is required, x's library refuses the export, or no usable backend
            drives x's device (a BufferError).
        ShapeError: a list is empty, or the shapes of its arrays are not those of the shards.
        ShardingError: the number of arrays in a list is not the number of devices.

    >>> a = np.arange(3)
    >>> x = st.from_dlpack(a)
    >>> a[0] = 9
    >>> x.tolist()
    [9, 1, 2]
    >>> st.from_dlpack([np.ones((2, 3)), np.zeros((1, 3))]).sharding
    NamedSharding(Mesh(d=2; numpy:0, numpy:1), P('d'))
    """


@implements(from_dlpack, "algorithm")
def _from_dlpack(x: Any, device: Where | None, copy: bool | None) -> ShardedTensor:
    device = with_mesh(device, "from_dlpack")
    if isinstance(x, (list, tuple)):
        return _from_pieces(x, device, copy)
    if isinstance(x, ShardedTensor) and x.sharding.mesh.size > 1:
        committed = device is not None or x.committed
    else:
        committed = device is not None or memory_of(x, "x") != HOST_MEMORY
    return _from_one(x, "x", device, copy, committed)


@implements(from_dlpack, "infer")
def _infer_from_dlpack(x: Any, device: Where | None, copy: bool | None) -> Aval:
    # Only the other library knows the shape and dtype, and tells them with the memory.
    return _from_dlpack(x, device, copy)._aval


@implements(from_dlpack, "kernel")
def _from_dlpack_on_device(xp: Any, context: None, x: Any, *, copy: bool | None) -> Any:
    device = current_device()
    assert device is not None
    (array,) = shard_arrays(_from_dlpack(x, device, copy))
    return array if copy else backend_of(device).export(array)


def _from_one(x: Any, what: str, where: Where | None, copy: bool | None, committed: bool = True) -> ShardedTensor:
    if isinstance(x, ShardedTensor) and x.dtype.kind not in "mM":
        # Tensors share memory without DLPack. Through DLPack, the writes of other consumers would be visible here.
        target = as_sharding(where or x.sharding, x.ndim, "from_dlpack")
        if copy is not False or (target == x.sharding and target.mesh.size > 1):
            return reshard_to(x.copy(), target, "from_dlpack", committed=committed)
    memory = memory_of(x, what)
    mesh = None if where is None else _mesh_of(where)
    devices = devices_for([memory], mesh)
    if mesh and not devices:  # No device of the mesh uses x's memory, so that x must be transferred.
        if copy is False:
            raise _needs_copy(f"{what} lies in {described(memory)}, which is not that of {mesh!r}")
        devices = None if memory == HOST_MEMORY else devices_for([memory])
    source = x if devices and memory != HOST_MEMORY else _host_array(x, what, memory, copy)
    if devices:
        source = _shared(source, what, devices[0], copy)
    target = as_sharding(where or (devices[0] if devices else default_mesh().flat[0]), source.ndim, "from_dlpack")
    if copy is False and target.mesh.size > 1 and not backend_of(target.mesh.flat[0]).on_host:
        given = f"{what} is one array for {target.mesh!r}, whose devices have separate memories"
        raise _needs_copy(f"{given}; give a list with an array for each")
    _check_kind(what, target, copy)
    shared = isinstance(source, ShardedTensor) or not copy
    return reshard_to(source, target, "from_dlpack", committed=committed, may_alias=shared)


def _check_kind(what: str, target: NamedSharding, copy: bool | None) -> None:
    """Raises an error if ``copy=False`` and the target's memory kind requires a copy.

    Raises:
        InterchangeError: the array would be copied to pinned host memory.
    """
    if copy is False and target.memory_kind != "device" and backend_of(target.mesh.flat[0]).pinned_host:
        raise _needs_copy(f"{what} must be copied to {target.memory_kind} memory")


def _needs_copy(reason: str) -> InterchangeError:
    return InterchangeError(f"from_dlpack: copy=False, and {reason}")


def _host_array(x: Any, what: str, memory: Memory, copy: bool | None) -> HostArray:
    """Returns an array in host memory as a NumPy array that shares it, and any other one as a copy made by its own
    library.

    Raises:
        InterchangeError: x's library refuses, or ``copy=False`` and x does not lie in host memory.
    """
    elsewhere = memory != HOST_MEMORY
    if elsewhere and copy is False:
        lies = f"{what} lies in {described(memory)}, which no usable backend drives"
        raise _needs_copy(f"{lies}; `shardtensor info` shows why")
    try:
        return np.from_dlpack(x, device="cpu") if elsewhere else np.from_dlpack(_Exported(x, copy))
    except Exception as error:  # Other libraries raise exceptions of any class.
        where = f" in {described(memory)}, which no usable backend drives (`shardtensor info` shows why),"
        raise _refused(what, x, error, where if elsewhere else "") from error


def _shared(x: Any, what: str, device: Device, copy: bool | None) -> Any:
    """Returns a tensor on ``device`` that shares x's memory; x itself if it is a host array that the device's library
    refuses and that may be copied.

    Raises:
        InterchangeError: the device's library refuses x, and x is not a host array or ``copy=False``.
    """
    backend = backend_of(device)
    try:
        if not backend.on_host and _is_reversed(x):  # PyTorch aborts the process for negative strides.
            raise BufferError("strides are negative")
        with backend.on(device):
            array = backend.export(backend.from_dlpack(_Exported(x, copy), device))
        dtype = x.dtype if isinstance(x, np.ndarray) else backend.dtype_of(array)
    except ShardTensorError:
        raise
    except Exception as error:  # Libraries raise exceptions of any class.
        if copy is not False and isinstance(x, np.ndarray):
            return x
        raise _refused(what, x, error, f" on {device}") from error
    array = _noted_copy(array, device, "from_dlpack") if copy else array
    return mark_array(on_one_device(array, dtype, device))


class _Exported:
    """A wrapper with only the DLPack methods of an array, which adds ``copy=False`` to requests if a copy is forbidden.

    Libraries that implement older versions of DLPack do not accept that argument; they never copy.
    """

    def __init__(self, x: Any, copy: bool | None) -> None:
        self._x = x
        self._copy = copy

    def __dlpack_device__(self) -> Any:
        return self._x.__dlpack_device__()

    def __dlpack__(self, **options: Any) -> Any:
        if self._copy is False:
            with contextlib.suppress(TypeError):
                return self._x.__dlpack__(**options | {"copy": False})
        return self._x.__dlpack__(**options)


def _refused(what: str, x: Any, error: Exception, where: str = "") -> InterchangeError:
    return InterchangeError(
        f"from_dlpack: {what}, a {type(x).__name__}{where}, cannot be imported: {message_of(error)}; wanted an array "
        "of bools, native integers, floats or complex numbers that NumPy has; convert it in its own library first"
    )


def _mesh_of(where: Where) -> Mesh:
    """Returns the mesh of a ``device=`` argument."""
    return where.mesh if isinstance(where, NamedSharding) else as_sharding(where, 1, "from_dlpack").mesh


# -- import of a list ------------------------------------------------------------------------------


def _from_pieces(pieces: Sequence[Any], where: Where | None, copy: bool | None) -> ShardedTensor:
    """Implements `from_dlpack` for a list: returns the tensor whose shard k is ``pieces[k]``."""
    if not pieces:
        raise ShapeError("from_dlpack: x is an empty list; wanted at least one array")
    names = [f"x[{k}]" for k in range(len(pieces))]
    memories = [memory_of(x, name) for x, name in zip(pieces, names, strict=True)]
    mesh = mesh_of(row_for(memories)) if where is None else _mesh_of(where)
    if mesh.size != len(pieces):
        given = f"a list of {len(pieces)} arrays for the {mesh.size} devices of {mesh!r}"
        raise ShardingError(f"from_dlpack: x is {given}; wanted one for each")
    parts = [_from_one(x, name, d, copy) for x, name, d in zip(pieces, names, mesh.flat, strict=True)]
    first = parts[0]
    for part, name in zip(parts, names, strict=True):
        if part.dtype != first.dtype:
            raise ArgumentTypeError(f"from_dlpack: {name} is of {part.dtype} and x[0] of {first.dtype}; convert one")
        if part.ndim != first.ndim or (not part.ndim and len(parts) > 1 and not isinstance(where, NamedSharding)):
            raise ShapeError(
                f"from_dlpack: {name} has shape {part.shape} and x[0] {first.shape}; wanted as many dimensions, and "
                "at least one along which they are concatenated (st.stack joins scalars)"
            )
    sharding = as_sharding(mesh if where is None else where, first.ndim, "from_dlpack")
    shape = _whole_shape(parts, sharding)
    arrays = tuple([shard_arrays(part)[0] for part in parts])
    value = aval(shape, first.dtype, sharding, True)
    if not value.offloaded:
        return mark_array(tensor(value, Storage(arrays)))
    _check_kind("x", sharding, copy)
    return reshard_to(tensor(on_devices(value), Storage(arrays)), sharding, "from_dlpack")


def _whole_shape(parts: Sequence[ShardedTensor], sharding: NamedSharding) -> Shape:
    """Returns the shape of the tensor that has these shards, in mesh order, under ``sharding``.

    Raises:
        ShapeError: no tensor has them.
    """
    sizes: list[dict[int, int]] = [{} for _ in parts[0].shape]
    for part, numbers in zip(parts, sharding.grid((0,) * parts[0].ndim).parts.tolist(), strict=True):
        for known, number, n in zip(sizes, numbers, part.shape, strict=True):
            known.setdefault(number, n)
    shape = tuple([sum(known.values()) for known in sizes])
    grid = sharding.grid(shape)
    for k, (part, device) in enumerate(zip(parts, grid.devices, strict=True)):
        if part.shape != grid.shape(k):
            raise ShapeError(
                f"from_dlpack: x[{k}] has shape {part.shape}, and of the whole {shape} {sharding.spec} gives {device} "
                f"{grid.shape(k)}; sizes must follow the split rule (10 over 4 is 3, 3, 2, 2). "
                "st.unshard([st.from_dlpack(a) for a in x]) accepts any sizes along one axis, and rebalances them"
            )
    return shape


# -- export ----------------------------------------------------------------------------------------


@operator(escapes=True)
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
            f"{caller}: the tensor is on {len(devices)} devices, {x.sharding.mesh!r}, and other libraries accept "
            "arrays on one; np.from_dlpack(x, device='cpu') and np.asarray(x) copy it to the host, "
            "st.device_put(x, device) to one device, and x.addressable_shards[k].data is the array of the k-th"
        )
    return memories.pop()


@operator(escapes=True)
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

    made = None if copy else export(x, lambda array: None if _is_reversed(array) else capsule(array))
    if made is not None:
        return made
    array = x._storage.shards()[0] if isinstance(x._storage, OffloadedStorage) else array_of(x)
    if copy is False:
        _check_marked(array, host, max_version)
        made, its_lease = capsule(array, marked=True)
        lease(storage_of(x), its_lease)
        return made
    return capsule(_noted_copy(array, device, "to_dlpack"))[0]


def _is_reversed(array: Any) -> bool:
    """Returns whether an array is in host memory and has a negative stride, which some libraries do not accept."""
    return isinstance(array, np.ndarray) and any(n < 0 for n in array.strides)


def _check_marked(array: Any, host: bool, max_version: Any) -> None:
    """Raises an error unless an array can be exported as read-only without a copy.

    Raises:
        InterchangeError: the array has negative strides, is not in host memory, or the consumer's version of DLPack has
            no flag for read-only memory.
    """
    if _is_reversed(array):
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
        raise ArgumentTypeError(f"{caller}: x is a {type(x).__name__}; wanted a tensor")
    if x.is_donated:
        shard_arrays(x)  # This raises the DonatedError.
    return x.sharding.mesh.flat


def _noted_copy(array: Any, device: Device, caller: str) -> Any:
    array = np.array(array) if type(array) is np.ndarray else copied(array, device)
    record_copy(caller, int(array.nbytes), device)
    return array
