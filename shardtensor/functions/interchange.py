"""Interchange: memory shared with other array libraries by DLPack, both ways, without a copy where that can be.

Tensors do not write to memory that another library holds: a tensor that is written takes memory of its own first. What
other libraries write shows in the one tensor that was exported to them only (see
`shardtensor.functions.dlpack_export`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from shardtensor.backend.device import HOST_MEMORY, Device, HostArray
from shardtensor.backend.ownership import read_only
from shardtensor.backend.protocol import Backend, current_device
from shardtensor.backend.registry import backend_of
from shardtensor.communication.offload import OffloadedStorage
from shardtensor.communication.transfer import copied
from shardtensor.communication.transfer_log import record_copy
from shardtensor.core import implements, operator
from shardtensor.errors import (
    ArgumentError,
    ArgumentTypeError,
    InterchangeError,
    ShapeError,
    ShardingError,
    ShardTensorError,
)
from shardtensor.functions.dlpack_export import array_of, export
from shardtensor.functions.dlpack_memory import (
    Memory,
    as_memory,
    assign_devices,
    described,
    devices_for,
    memory_of,
    row_for,
)
from shardtensor.functions.placement import Where, reshard_to
from shardtensor.sharding.layout import NamedSharding, Shape, as_sharding
from shardtensor.sharding.mesh import Mesh, default_mesh, mesh_of
from shardtensor.tensor.storage import Storage
from shardtensor.tensor.tensor import ArrayLike, ShardedTensor, mark_array, shard_arrays, tensor
from shardtensor.tensor.value import aval

# -- in --------------------------------------------------------------------------------------------


@operator()
def from_dlpack(x: Any, /, *, device: Where | None = None, copy: bool | None = None) -> ShardedTensor:
    """A tensor of another library's array, in the same memory where a device can use that; of a list of them, one
    tensor over as many devices.

    The owner's later writes may show in the tensor, so make none. Writing to the tensor never shows in the owner's
    array, nor do the writes of libraries to which the tensor is exported: they get a copy of the memory.

    One array becomes a tensor on one device: the first of the default mesh that uses its memory, else of another
    backend's (NumPy's first). With ``device=`` it goes there as with `device_put`: what lies in the right memory stays.

    The arrays of a list are the shards, and stay where they are. Without ``device=`` they follow one another along the
    first dimension, each on the next device that uses its memory. With a mesh or a sharding, array k is what device k
    of the mesh holds; those that hold the same part are taken to be equal.

    Args:
        x: an object with ``__dlpack__`` and ``__dlpack_device__`` (arrays of NumPy, CuPy, PyTorch, JAX, ...), or a list
            of them, of any shape and strides; of bools, integers, floats or complex numbers that NumPy has.
        device: see above.
        copy: True copies always, False never, None where it must.

    Raises:
        ArgumentTypeError: x has no such methods, or its dtype is none that the backend has.
        InterchangeError: the memory cannot be shared: ``copy=False`` and it takes a copy, x's library refuses, or no
            usable backend drives its device. It is a BufferError.
        ShapeError: the shapes of a list are not those that the sharding gives the devices.
        ShardingError: a list of more, or fewer, arrays than there are devices.

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
    if isinstance(x, (list, tuple)):
        return _from_pieces(x, device, copy)
    committed = device is not None or memory_of(x, "x") != HOST_MEMORY
    return _from_one(x, "x", device, copy, committed)


@implements(from_dlpack, "kernel")
def _from_dlpack_on_device(xp: Any, place: None, *, x: Any, copy: bool | None) -> Any:
    device = current_device()
    assert device is not None
    (array,) = shard_arrays(_from_dlpack(x, device, copy))
    return array if copy else backend_of(device).export(array)


def _from_one(x: Any, what: str, where: Where | None, copy: bool | None, committed: bool = True) -> ShardedTensor:
    memory = memory_of(x, what)
    if isinstance(x, ShardedTensor) and copy is not False and x.dtype.kind not in "mM":
        # Tensors share memory without DLPack. As a consumer the library would see what other consumers write.
        return reshard_to(
            x.copy(), as_sharding(where or x.sharding, x.ndim, "from_dlpack"), "from_dlpack", committed=committed
        )
    mesh = None if where is None else _mesh_of(where)
    home = assign_devices([memory], mesh.flat) if mesh else devices_for([memory])
    if mesh and not home:  # it comes from elsewhere
        if copy is False:
            raise InterchangeError(
                f"from_dlpack: copy=False, and {what} lies in {described(memory)}, which is not that of {mesh!r}"
            )
        home = None if memory == HOST_MEMORY else devices_for([memory])
    source = x if home and memory != HOST_MEMORY else _host_array(x, what, memory, copy)
    if home:
        source = _shared(source, what, home[0], copy)
    target = as_sharding(where or (home[0] if home else default_mesh().flat[0]), source.ndim, "from_dlpack")
    if copy is False and target.mesh.size > 1 and not backend_of(target.mesh.flat[0]).shared_memory:
        raise InterchangeError(
            f"from_dlpack: copy=False, and {what} is one array for {target.mesh!r}, whose devices have memories of "
            "their own; give a list with an array for each"
        )
    _check_kind(what, target, copy)
    shared = isinstance(source, ShardedTensor) or not copy
    return reshard_to(source, target, "from_dlpack", committed=committed, may_alias=shared)


def _check_kind(what: str, target: NamedSharding, copy: bool | None) -> None:
    """That it need not go to another kind of memory, if it must not be copied."""
    if copy is False and target.memory_kind != "device" and backend_of(target.mesh.flat[0]).pinned_host:
        raise InterchangeError(f"from_dlpack: copy=False, and to {target.memory_kind} memory {what} takes a copy")


def _host_array(x: Any, what: str, memory: Memory, copy: bool | None) -> HostArray:
    """What lies in host memory, as an array of NumPy's that shares it; a copy of what no backend can use."""
    elsewhere = memory != HOST_MEMORY
    if elsewhere and copy is False:
        raise InterchangeError(
            f"from_dlpack: copy=False, and {what} lies in {described(memory)}, which no usable backend drives; "
            "`shardtensor info` says why"
        )
    try:
        return np.from_dlpack(x, device="cpu") if elsewhere else np.from_dlpack(_Lent(x, copy))
    except Exception as error:  # the other library's, whatever it raises
        where = f" in {described(memory)}, which no usable backend drives (`shardtensor info` says why),"
        raise _refused(what, x, error, where if elsewhere else "") from error


def _shared(x: Any, what: str, device: Device, copy: bool | None) -> Any:
    """A tensor on a device in whose memory x lies; x itself, a host array, if the device's library refuses it."""
    backend = backend_of(device)
    backwards = isinstance(x, np.ndarray) and not backend.shared_memory and any(n < 0 for n in x.strides)
    try:
        if backwards:  # PyTorch does not say no, it ends the process
            raise BufferError("strides are negative")
        with backend.on(device):
            array = backend.export(backend.from_dlpack(_Lent(x, copy), device))
        dtype = x.dtype if isinstance(x, np.ndarray) else backend.dtype_of(array)
    except ShardTensorError:
        raise
    except Exception as error:  # likewise
        if copy is not False and isinstance(x, np.ndarray):
            return x
        raise _refused(what, x, error, f" on {device}") from error
    value = aval(tuple(array.shape), dtype, as_sharding(device, array.ndim, "from_dlpack"), True)
    if copy:
        array = _noted_copy(array, device, "from_dlpack")
    return mark_array(tensor(value, Storage(array) if backend.shared_memory else Storage(arrays=(array,))))


class _Lent:
    """An array with nothing but the methods of DLPack. They get ``copy=False`` where a copy is not wanted. Libraries of
    older versions do not know that argument; they never copy.
    """

    def __init__(self, x: Any, copy: bool | None) -> None:
        self._x = x
        self._wishes = {"copy": False} if copy is False else {}

    def __dlpack__(self, **wishes: Any) -> Any:
        try:
            return self._x.__dlpack__(**wishes | self._wishes)
        except TypeError:
            if not self._wishes:
                raise
            return self._x.__dlpack__(**wishes)

    def __dlpack_device__(self) -> Any:
        return self._x.__dlpack_device__()


def _refused(what: str, x: Any, error: Exception, where: str = "") -> InterchangeError:
    return InterchangeError(
        f"from_dlpack: {what}, a {type(x).__name__}{where}, cannot be taken: {error}. Wanted an array of bools, native "
        "integers, floats or complex numbers that NumPy has; convert it in its own library first"
    )


def _mesh_of(where: Where) -> Mesh:
    """The devices that ``device=`` names."""
    return where.mesh if isinstance(where, NamedSharding) else as_sharding(where, 1, "from_dlpack").mesh


# -- a list ----------------------------------------------------------------------------------------


def _from_pieces(pieces: Sequence[Any], where: Where | None, copy: bool | None) -> ShardedTensor:
    """One tensor, of which each piece is a shard."""
    if not pieces:
        raise ShapeError("from_dlpack: x is an empty list; wanted at least one array")
    names = [f"x[{k}]" for k in range(len(pieces))]
    memories = [memory_of(x, name) for x, name in zip(pieces, names, strict=True)]
    mesh = mesh_of(row_for(memories)) if where is None else _mesh_of(where)
    if mesh.size != len(pieces):
        said = f"a list of {len(pieces)} arrays for the {mesh.size} devices of {mesh!r}"
        raise ShardingError(f"from_dlpack: x is {said}; wanted one for each")
    parts = [_from_one(x, name, d, copy) for x, name, d in zip(pieces, names, mesh.flat, strict=True)]
    first = parts[0]
    for part, name in zip(parts, names, strict=True):
        if part.dtype != first.dtype:
            raise ArgumentTypeError(f"from_dlpack: {name} is of {part.dtype} and x[0] of {first.dtype}; convert one")
        if part.ndim != first.ndim or (not part.ndim and len(parts) > 1 and not isinstance(where, NamedSharding)):
            raise ShapeError(
                f"from_dlpack: {name} has shape {part.shape} and x[0] {first.shape}; wanted as many dimensions, and "
                "at least one to follow one another along (st.stack joins scalars)"
            )
    sharding = as_sharding(mesh if where is None else where, first.ndim, "from_dlpack")
    shape = _whole_shape(parts, sharding)
    arrays = tuple([shard_arrays(part)[0] for part in parts])
    value = aval(shape, first.dtype, sharding, True)
    if not value.parked:
        return mark_array(tensor(value, Storage(arrays=arrays)))
    _check_kind("x", sharding, copy)
    there = aval(shape, first.dtype, sharding.with_memory_kind("device"), True)
    return reshard_to(tensor(there, Storage(arrays=arrays)), sharding, "from_dlpack")


def _whole_shape(parts: Sequence[ShardedTensor], sharding: NamedSharding) -> Shape:
    """The shape of a tensor that has these shards.

    Raises:
        ShapeError: none has.
    """
    places = sharding.grid((0,) * parts[0].ndim).parts.tolist()
    sizes: list[dict[int, int]] = [{} for _ in parts[0].shape]
    for part, place in zip(parts, places, strict=True):
        for known, p, n in zip(sizes, place, part.shape, strict=True):
            known.setdefault(p, n)
    shape = tuple([sum(known.values()) for known in sizes])
    grid = sharding.grid(shape)
    for k, (part, device) in enumerate(zip(parts, grid.devices, strict=True)):
        if part.shape != grid.shape(k):
            raise ShapeError(
                f"from_dlpack: x[{k}] has shape {part.shape}, and of the whole {shape} {sharding.spec} gives {device} "
                f"{grid.shape(k)}; sizes must follow the split rule (10 over 4 is 3, 3, 2, 2). "
                "st.unshard([st.from_dlpack(a) for a in x]) takes any along one axis, and rebalances them"
            )
    return shape


# -- out -------------------------------------------------------------------------------------------


@operator()
def dlpack_device(x: ArrayLike, /) -> tuple[int, int]:
    """The DLPack device type and number of the memory where x lies: ``x.__dlpack_device__()``.

    Args:
        x: a tensor on one device.

    Raises:
        InterchangeError: it lives on several devices.
        DonatedError: its memory was given away.

    >>> st.zeros(3, device=st.devices()[0]).__dlpack_device__()
    (1, 0)
    """


@implements(dlpack_device, "algorithm")
def _dlpack_device(x: Any) -> Memory:
    return _memory_of(x, _only_device(x, "__dlpack_device__"))


def _memory_of(x: ShardedTensor, device: Device) -> Memory:
    return HOST_MEMORY if isinstance(x._storage, OffloadedStorage) else backend_of(device).dlpack_device(device)


@operator()
def to_dlpack(
    x: ArrayLike,
    /,
    *,
    stream: Any = None,
    max_version: tuple[int, int] | None = None,
    dl_device: tuple[int, int] | None = None,
    copy: bool | None = None,
) -> Any:
    """x for another library, in a capsule: ``x.__dlpack__()``, which ``torch.from_dlpack(x)`` and its like call.

    The consumer may write to what it gets. If nothing but x holds x's memory, it gets that memory, and its writes show
    in x and in views of x, and nowhere else: as long as it holds the memory, everything that reads x gets a copy. If
    something else holds the memory (``x.copy()``, another sharding of it, ``np.asarray(x)``, the array that x was made
    of without a copy), it gets a copy: versions of DLPack before 1.0 have no flag for read-only memory, and PyTorch
    ignores the flag. Writing to x never changes what was exported: x takes memory of its own first.

    Args:
        x: a tensor on one device, of a dtype other than times.
        stream: where the consumer's work is queued, as the backend's library takes it; None in host memory.
        max_version: the newest version of DLPack that the consumer knows.
        dl_device: where it is to be: where it is, or host memory, to which it is copied (and counted).
        copy: True copies, None does where it must: if something else holds the memory, for another device, for
            scalars, and for what runs backwards in host memory (``x[::-1]``), which not every library takes. False
            never copies: host memory that something else holds is then marked as read-only if ``max_version`` is 1.0 or
            above, and is not to be written.

    Raises:
        InterchangeError: x lives on several devices, DLPack has no such dtype, ``copy=False`` and it takes a copy, or
            a device that is none of these. It is a BufferError.
        ArgumentError: a stream for host memory.
        DonatedError: its memory was given away.

    >>> x = st.arange(3, device=st.devices()[0])
    >>> a = np.from_dlpack(x)
    >>> x[0] = 9
    >>> a
    array([0, 1, 2])
    """


@implements(to_dlpack, "algorithm")
def _to_dlpack(x: Any, stream: Any, max_version: Any, dl_device: Any, copy: bool | None) -> Any:
    device = _only_device(x, "__dlpack__")
    backend = backend_of(device)
    here = _memory_of(x, device)
    there = here if dl_device is None else as_memory(dl_device, "__dlpack__", "dl_device")
    if there not in (here, HOST_MEMORY):
        raise InterchangeError(
            f"__dlpack__: dl_device is {described(there)}, and the tensor lies in {described(here)}; "
            "bring it there first, with st.device_put(x, device)"
        )
    if x.dtype.kind in "mM":
        raise InterchangeError(f"__dlpack__: DLPack has no {x.dtype}; give x.astype('int64')")
    if there != here:
        if copy is False:
            raise InterchangeError(f"__dlpack__: copy=False, and to host memory from {described(here)} it takes a copy")
        # The memory is the consumer's, who may write: what `np.asarray` gives is read-only.
        return _host_capsule(np.array(x), max_version, marked=False)
    host = here == HOST_MEMORY
    if host and stream not in (None, -1):
        raise ArgumentError(f"__dlpack__: stream is {stream!r:.60}, and {device} is in host memory; wanted None")

    def capsule(array: Any, read_only: bool = False) -> Any:
        if host:
            return _host_capsule(_on_host(array, backend, device), max_version, read_only)
        return _device_capsule(array, backend, device, stream, max_version)

    def shared(array: Any) -> Any:
        return None if host and _is_reversed(array) else capsule(array)

    made = None if copy else export(x, shared)
    if made is not None:
        return made
    array = x._storage.shards()[0] if isinstance(x._storage, OffloadedStorage) else array_of(x)
    if copy is False:
        _check_marked(array, host, max_version)
        return capsule(array, read_only=True)
    return capsule(_noted_copy(array, device, "to_dlpack"))


def _is_reversed(array: Any) -> bool:
    """Whether an array in host memory runs backwards, which not every library takes."""
    return isinstance(array, np.ndarray) and any(n < 0 for n in array.strides)


def _check_marked(array: Any, host: bool, max_version: Any) -> None:
    """That an array can be exported as read-only, without a copy.

    Raises:
        InterchangeError: it cannot.
    """
    if _is_reversed(array):
        raise InterchangeError(
            "__dlpack__: copy=False, and the tensor is a view that runs backwards, which not every library takes"
        )
    if not host or max_version is None or max_version[0] < 1:
        raise InterchangeError(
            "__dlpack__: copy=False, and others hold the tensor's memory (copies of it, host arrays, the array that it "
            "was made of), so that it must not be written; DLPack can mark memory as read-only only on the host, for "
            "consumers that ask for max_version 1.0 or above. Use copy=None or copy=True"
        )


def _on_host(array: Any, backend: Backend, device: Device) -> HostArray:
    """An array of any library in host memory as NumPy's, in the same memory."""
    if type(array) is np.ndarray:
        return array
    backend.synchronize(device)
    with backend.on(device):
        host = np.from_dlpack(backend.to_dlpack(array))
    return np.asarray(_Writable(host))  # NumPy takes what libraries before DLPack 1.0 give for read-only


class _Writable:
    """The memory of a host array, which it keeps."""

    def __init__(self, array: HostArray) -> None:
        self._array = array
        interface = array.__array_interface__
        self.__array_interface__ = {**interface, "data": (interface["data"][0], False)}


def _host_capsule(array: HostArray, max_version: Any, marked: bool) -> Any:
    """A capsule by NumPy, ``marked`` as read-only."""
    wishes = {} if max_version is None else {"max_version": max_version}  # NumPy before 2.1 knows of none
    try:
        return (read_only(array) if marked else array).__dlpack__(**wishes)
    except BufferError as error:
        raise InterchangeError(f"__dlpack__: {error} Convert the tensor, of {array.dtype}, with astype") from None


def _device_capsule(array: Any, backend: Backend, device: Device, stream: Any, max_version: Any) -> Any:
    """A capsule by the backend's own library, which orders ``stream`` after the device."""
    wishes = {} if stream is None else {"stream": stream}
    backend.make_caller_wait(device)
    with backend.on(device):
        lent = backend.to_dlpack(array)
        try:
            return lent.__dlpack__(**wishes, max_version=max_version)
        except TypeError:  # a library that knows one version alone
            return lent.__dlpack__(**wishes)


def _only_device(x: Any, caller: str) -> Device:
    """The device where a tensor lives.

    Raises:
        InterchangeError: there are several.
    """
    if not isinstance(x, ShardedTensor):
        raise ArgumentTypeError(f"{caller}: x is a {type(x).__name__}; wanted a tensor")
    if x.is_donated:
        shard_arrays(x)  # says so
    mesh = x.sharding.mesh
    if mesh.size > 1:
        raise InterchangeError(
            f"{caller}: the tensor lives on {mesh.size} devices, {mesh!r}, and other libraries take it from one; "
            "st.device_put(x, device) brings it there, st.shard(x) gives a tensor for each device, "
            "x.addressable_shards[k].data is the array of the k-th, and np.asarray(x) a host array"
        )
    return mesh.flat[0]


def _noted_copy(array: Any, device: Device, caller: str) -> Any:
    array = np.array(array) if type(array) is np.ndarray else copied(array, device)
    record_copy(caller, int(array.nbytes), device)
    return array
