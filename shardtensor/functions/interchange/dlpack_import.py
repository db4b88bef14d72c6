"""The import of arrays of other libraries through DLPack, without a copy where possible.

Tensors never write to memory that another library holds: a write to such a tensor allocates new memory first. See
`shardtensor.functions.interchange.dlpack_methods` for the other direction.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import numpy as np

import shardtensor.functions.interchange.dlpack_methods  # noqa: F401 - the table of operators has both directions
from shardtensor.backend.device import HOST_MEMORY, Device, HostArray
from shardtensor.backend.protocol import current_device
from shardtensor.backend.registry import backend_of
from shardtensor.core import implements, operator
from shardtensor.errors import (
    ArgumentTypeError,
    InterchangeError,
    ShapeError,
    ShardingError,
    ShardTensorError,
    message_of,
    type_text,
)
from shardtensor.functions.interchange.dlpack_memory import (
    Memory,
    described,
    devices_for,
    is_reversed,
    memory_of,
    recorded_copy,
    row_for,
)
from shardtensor.functions.placement.transfers import transfer_to
from shardtensor.host.units import counted
from shardtensor.sharding.layout import NamedSharding, Shape, Where, as_sharding, with_mesh
from shardtensor.sharding.mesh import Mesh, default_mesh, mesh_of
from shardtensor.tensor.operands import on_one_device
from shardtensor.tensor.tensor import ShardedTensor, mark_array, shard_arrays, tensor_of
from shardtensor.tensor.value import Aval, aval, on_devices

# -- import ----------------------------------------------------------------------------------------


@operator(operands=("x",), trees=("x",), tags=("any dtype",))
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
        device: a Device, Mesh, NamedSharding or P (see `shardtensor.functions.standard.creation`); by default as
            described above.
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


@implements(from_dlpack, "algorithm", "announcing")  # A capsule can be read only once.
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
    # The shape and dtype are known only to the other library, which passes them with the memory.
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
            return transfer_to(x.copy(), target, "from_dlpack", committed=committed)
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
        description = f"{what} is one array for {target.mesh!r}, whose devices have separate memories"
        raise _needs_copy(f"{description}; give a list with an array for each")
    _check_kind(what, target, copy)
    shared = isinstance(source, ShardedTensor) or not copy
    return transfer_to(source, target, "from_dlpack", committed=committed, may_alias=shared)


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
        if not backend.on_host and is_reversed(x):  # PyTorch aborts the process for negative strides.
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
    array = recorded_copy(array, device, "from_dlpack") if copy else array
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
        f"from_dlpack: {what}, {type_text(x)}{where}, cannot be imported: {message_of(error)}; wanted an array "
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
        description = f"a list of {counted(len(pieces), 'array')} for the {counted(mesh.size, 'device')} of {mesh!r}"
        raise ShardingError(f"from_dlpack: x is {description}; wanted one for each")
    parts = [_from_one(x, name, d, copy) for x, name, d in zip(pieces, names, mesh.flat, strict=True)]
    first = parts[0]
    for part, name in zip(parts, names, strict=True):
        if part.dtype != first.dtype:
            raise ArgumentTypeError(
                f"from_dlpack: {name} has dtype {part.dtype}, and x[0] has {first.dtype}; convert one"
            )
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
        return mark_array(tensor_of(value, arrays))
    _check_kind("x", sharding, copy)
    return transfer_to(tensor_of(on_devices(value), arrays), sharding, "from_dlpack")


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
