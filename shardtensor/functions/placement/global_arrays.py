"""Tensors of several processes from what each process has, and back: the functions of `st.distributed` on tensors."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from shardtensor.backend.device import HOST, Device, HostArray
from shardtensor.backend.registry import in_other_process, is_remote, is_spanning, process_index, processes_of
from shardtensor.backend.remote import RemoteArray
from shardtensor.communication.between_processes.processes import connected, described, note, notes_errors
from shardtensor.communication.messages import send
from shardtensor.communication.transfer import gather_across, is_one_in_all
from shardtensor.core import call, hinted
from shardtensor.errors import ArgumentError, ArgumentTypeError, ShapeError
from shardtensor.host.units import counted
from shardtensor.sequences import as_list
from shardtensor.sharding.layout import Grid, NamedSharding, Shape, Where, as_sharding, checked_shape
from shardtensor.sharding.mesh import Mesh
from shardtensor.sharding.spec import PartitionSpec
from shardtensor.tensor.operands import sharded_dtype
from shardtensor.tensor.pytree import children_of, flattened, leaves, map_with_prefix, replaced, spread
from shardtensor.tensor.tensor import ShardedTensor, mark_array, shard_arrays, tensor_of
from shardtensor.tensor.value import aval

DataCallback = Callable[[tuple[slice, ...]], npt.ArrayLike]


@hinted
@notes_errors
def make_array_from_callback(
    shape: Sequence[int], sharding: Where, data_callback: DataCallback, dtype: npt.DTypeLike | None = None
) -> ShardedTensor:
    """Returns a tensor whose shards on the devices of this process a function computes.

    Args:
        shape: the shape of the tensor.
        sharding: its sharding, of a mesh that may span processes; a bare `P` is on the mesh in use.
        data_callback: returns ``array[index]`` of the whole array, as a host array. It is called once for each
            different index of this process's shards.
        dtype: the dtype; by default that of what the function returns, which needs a device of this process.

    Raises:
        ShapeError: the function returns an array of another shape than the index has.
        ArgumentError: no dtype is given, and the sharding has no device of this process.

    >>> mesh = st.make_mesh((4,), ("x",))
    >>> rows = np.arange(10)
    >>> int(st.distributed.make_array_from_callback((10,), st.NamedSharding(mesh, st.P("x")), rows.__getitem__).sum())
    45
    """
    name, sizes = "make_array_from_callback", checked_shape(shape, "make_array_from_callback")
    sharding = as_sharding(sharding, len(sizes), name)
    grid, parts = sharding.grid(sizes), dict[Any, HostArray]()
    for index in _here(grid).values():
        key = tuple([(s.start, s.stop) for s in index])
        if key not in parts:
            parts[key] = np.asarray(data_callback(index), dtype=dtype)
    shards = {k: parts[tuple([(s.start, s.stop) for s in index])] for k, index in _here(grid).items()}
    return _assembled(name, sizes, sharding, shards, None if dtype is None else np.dtype(dtype))


@overload
def make_array_from_process_local_data(
    sharding: Where, local_data: HostArray, global_shape: Sequence[int] | None = None
) -> ShardedTensor: ...


@overload
def make_array_from_process_local_data(sharding: Any, local_data: Any, global_shape: Any = None) -> Any: ...


@hinted
@notes_errors
def make_array_from_process_local_data(sharding: Any, local_data: Any, global_shape: Any = None) -> Any:
    """Returns a tensor of which each process has a part as a host array: the box of the shards of its devices.

    Args:
        sharding: the sharding of the tensor, of a mesh that may span processes; a bare `P` is on the mesh in use.
        local_data: the part of this process, or a pytree of parts, of each of which the result has a tensor; lists of
            numbers are arrays. A dimension may also have its whole size, of which the devices take their parts.
            Processes that hold the same elements have to give the same: they are not compared. Of a process without a
            device of the sharding, only the dtype and the number of dimensions are used.
        global_shape: the shape of the tensor; by default, it follows from the sizes of all parts, which the processes
            exchange. Of a pytree, one for all parts or a prefix tree of shapes, as ``sharding`` may be of shardings.

    Raises:
        ArgumentError: all devices are in another process, and ``global_shape`` is not given.
        ShapeError: the shape of the part is not that of the box, or the parts do not make up a tensor by the split
            rule.

    >>> mesh = st.make_mesh((2,), ("x",))
    >>> sharding = st.NamedSharding(mesh, st.P("x"))
    >>> st.distributed.make_array_from_process_local_data(sharding, np.arange(3)).tolist()
    [0, 1, 2]
    """
    name = "make_array_from_process_local_data"
    if not _is_tree(local_data):
        return _from_part(name, sharding, local_data, global_shape)
    shapes = iter(spread(_with_shapes_as_leaves(global_shape), local_data, f"{name}: global_shape", "local_data"))

    def one(part: Any, where: Any) -> ShardedTensor:
        return _from_part(name, where, part, next(shapes))

    return replaced(local_data, map_with_prefix(one, local_data, sharding, name, "sharding", "local_data"))


def _is_tree(x: Any) -> bool:
    """Whether a part is a pytree of parts; a list of numbers is an array."""
    numbers = isinstance(x, (list, tuple)) and not any(getattr(leaf, "ndim", 0) for leaf in leaves(x))
    return not numbers and children_of(x) is not None


def _with_shapes_as_leaves(tree: Any) -> Any:
    """Returns a pytree of shapes, in which tuples and lists of sizes are arrays, and therefore leaves."""

    def is_shape(x: Any) -> bool:
        return isinstance(x, (list, tuple)) and all(isinstance(n, (int, np.integer)) for n in x)

    found, structure = flattened(tree, is_shape, none_is_leaf=True)
    return structure.unflatten([np.array(shape, np.int64) if is_shape(shape) else shape for shape in found])


def _from_part(name: str, where: Any, part: Any, global_shape: Any) -> ShardedTensor:
    """Returns the tensor of which each process has a part; see `make_array_from_process_local_data`."""
    data = np.asarray(part)
    sharding = as_sharding(where, data.ndim, name)
    sizes = _whole_shape(name, sharding, data.shape) if global_shape is None else checked_shape(global_shape, name)
    if len(sizes) != data.ndim:
        raise ShapeError(f"{name}: local_data has {counted(data.ndim, 'dimension')}, and global_shape {len(sizes)}")
    grid, begins = sharding.grid(sizes), []
    box = _box(name, grid) if _here(grid) else [(0, n) for n in data.shape]
    for d, (n, whole, (begin, end)) in enumerate(zip(data.shape, sizes, box, strict=True)):
        if n not in (whole, end - begin):
            raise ShapeError(
                f"{name}: local_data has {counted(n, 'element')} along dimension {d}; this process holds those from "
                f"{begin} to {end} of {whole}"
            )
        begins.append(0 if n == whole else begin)
    shards = {
        k: data[tuple([slice(s.start - begin, s.stop - begin) for s, begin in zip(index, begins, strict=True)])]
        for k, index in _here(grid).items()
    }
    return _assembled(name, sizes, sharding, shards, data.dtype)


@hinted
@notes_errors
def make_array_from_single_device_arrays(
    shape: Sequence[int],
    sharding: Where,
    arrays: Sequence[ShardedTensor],
    *,
    dtype: npt.DTypeLike | None = None,
) -> ShardedTensor:
    """Returns a tensor from its shards on the devices of this process.

    Args:
        shape: the shape of the tensor.
        sharding: its sharding, of a mesh that may span processes; a bare `P` is on the mesh in use.
        arrays: a tensor on each device of the sharding that this process owns, in any order.
        dtype: the dtype that they have; a process without devices of the sharding has to give it.

    Raises:
        ArgumentError: a device has no array, or several, or is not one of the sharding.
        ShapeError: an array does not have the shape of its shard, or the dtype.

    >>> mesh = st.make_mesh((2,), ("x",))
    >>> rows = st.shard(np.arange(4), devices=mesh.local_devices)
    >>> st.distributed.make_array_from_single_device_arrays((4,), st.NamedSharding(mesh, st.P("x")), rows).tolist()
    [0, 1, 2, 3]
    """
    name, sizes = "make_array_from_single_device_arrays", checked_shape(shape, "make_array_from_single_device_arrays")
    arrays = as_list(arrays, f"{name}: arrays")
    sharding = as_sharding(sharding, len(sizes), name)
    grid, by_device = sharding.grid(sizes), dict[Device, ShardedTensor]()
    for array in arrays:
        if not isinstance(array, ShardedTensor) or array.sharding.mesh.size != 1:
            raise ArgumentTypeError(f"{name}: {array!r:.80} is not a tensor on a single device")
        if array.sharding.mesh.flat[0] in by_device:
            raise ArgumentError(f"{name}: there are two arrays on {array.device}; wanted one on each device")
        by_device[array.sharding.mesh.flat[0]] = array
    devices = [grid.devices[k] for k in _here(grid)]
    if set(by_device) != set(devices):
        raise ArgumentError(
            f"{name}: the arrays are on {[str(d) for d in by_device]}, and the sharding has these devices of this "
            f"process: {[str(d) for d in devices]}"
        )
    shards = {k: by_device[grid.devices[k]] for k in _here(grid)}
    return _assembled(name, sizes, sharding, shards, None if dtype is None else np.dtype(dtype))


@notes_errors
def host_local_array_to_global_array(local_inputs: Any, global_mesh: Mesh, pspecs: Any) -> Any:
    """Returns tensors of which each process has a part as a host array; see `make_array_from_process_local_data`.

    Args:
        local_inputs: a pytree of host arrays, in which tensors that span processes stay as they are.
        global_mesh: the mesh, which may span processes.
        pspecs: one spec for all arrays, or a prefix pytree of specs.
    """

    def one(array: Any, spec: PartitionSpec) -> ShardedTensor:
        if isinstance(array, ShardedTensor) and not array.is_fully_addressable:
            return array
        return _from_part("host_local_array_to_global_array", NamedSharding(global_mesh, spec), array, None)

    tensors = map_with_prefix(one, local_inputs, pspecs, "host_local_array_to_global_array", "pspecs", "local_inputs")
    return replaced(local_inputs, tensors)


def global_array_to_host_local_array(global_inputs: Any, global_mesh: Mesh, pspecs: Any) -> Any:
    """Returns the part of each tensor that this process holds in a sharding, as a host array: the box of the shards of
    its devices. A tensor in another sharding is transferred first, which all processes have to call.

    Args:
        global_inputs: a pytree of tensors.
        global_mesh: the mesh of the sharding.
        pspecs: one spec for all tensors, or a prefix pytree of specs.

    >>> mesh = st.make_mesh((2,), ("x",))
    >>> st.distributed.global_array_to_host_local_array(st.arange(3, device=mesh), mesh, st.P("x"))
    array([0, 1, 2])
    """
    name = "global_array_to_host_local_array"

    def one(x: Any, spec: PartitionSpec) -> HostArray:
        x = call("reshard", x, sharding=NamedSharding(global_mesh, spec))
        box = _box(name, x._aval.grid)
        return np.array(call("to_host", x, index=tuple([slice(*ends) for ends in box])))

    return replaced(global_inputs, map_with_prefix(one, global_inputs, pspecs, name, "pspecs", "global_inputs"))


def gather_to(x: ShardedTensor, root: int = 0) -> HostArray | None:
    """Returns a tensor as a host array in one process, and None in the others. All processes have to call this. Where
    each gives a tensor on devices of its own, the result is that of the one process.

    Args:
        x: the tensor.
        root: the number of the process.

    Raises:
        ArgumentError: there is no process of that number.

    >>> st.distributed.initialize(engine="local")
    >>> st.distributed.gather_to(st.arange(3), 0)
    array([0, 1, 2])
    >>> st.distributed.shutdown()
    """
    count = connected("gather_to").engine.process_count
    if not 0 <= root < count:
        raise ArgumentError(f"gather_to: root is {root}; the processes are numbered from 0 to {count - 1}")
    if not is_one_in_all(x, "gather_to"):
        note(f"gather_to({described(x)}, {root})")
        return np.array(x) if root == process_index() else None
    array = gather_across(x, "gather_to", root)
    return array if root == process_index() else None


# -- how it is done --------------------------------------------------------------------------------


def _here(grid: Grid) -> dict[int, tuple[slice, ...]]:
    """Returns the index of each shard of this process, by its position."""
    return {k: grid.index(k) for k, device in enumerate(grid.devices) if not is_remote(device)}


def _box(caller: str, grid: Grid) -> list[tuple[int, int]]:
    """Returns the box of the shards of this process."""
    return [(int(grid.offsets[d][first]), int(grid.offsets[d][last + 1])) for d, (first, last) in _ends(caller, grid)]


def _ends(caller: str, grid: Grid) -> list[tuple[int, tuple[int, int]]]:
    """Returns each dimension with the first and the last part of it that this process holds.

    Raises:
        ArgumentError: there are other parts between them.
    """
    positions = list(_here(grid))
    if not positions:
        raise ArgumentError(f"{caller}: no device of the sharding is in this process")
    ends = []
    for d in range(len(grid.offsets)):
        held = sorted(set(grid.parts[positions, d].tolist()))
        if held != list(range(held[0], held[-1] + 1)):
            raise ArgumentError(
                f"{caller}: the parts {held} of dimension {d} that this process holds are not adjacent; use "
                "make_array_from_callback"
            )
        ends.append((d, (held[0], held[-1])))
    return ends


def _whole_shape(caller: str, sharding: NamedSharding, shape: Shape) -> Shape:
    """Returns the shape of the tensor of which the processes have parts, this one a part of the given shape."""
    devices, unsized = sharding.mesh.flat, sharding.grid(tuple([0] * len(shape)))
    if in_other_process(devices):
        raise ArgumentError(f"{caller}: all devices of the sharding are in another process; give global_shape")
    is_here = bool(_here(unsized))
    ends = [last for _, last in _ends(caller, unsized)] if is_here else [(-1, -1)] * len(shape)
    if not is_spanning(devices):
        return shape
    record = np.array([*itertools.chain.from_iterable(ends), *shape], np.int64).tobytes()
    call_text = f"{caller}({counted(len(shape), 'dimension')}, {sharding.spec})"
    rows = [np.frombuffer(row, np.int64).tolist() for row in connected(caller).gather(call_text, record)]
    sizes = []
    for d in range(len(shape)):
        parts = {(row[2 * d], row[2 * d + 1]): row[2 * len(shape) + d] for row in rows if row[2 * d] >= 0}
        sizes.append(sum(parts.values()))
    whole = tuple(sizes)
    offsets = sharding.grid(whole).offsets
    for d, ((first, last), n) in enumerate(zip(ends, shape, strict=True) if is_here else ()):
        size = int(offsets[d][last + 1] - offsets[d][first])
        if n != size:
            raise ShapeError(
                f"{caller}: the parts of all processes make up {counted(sizes[d], 'element')} along dimension {d}, of "
                f"which this process should have {size}, and local_data has {n}; give global_shape, or other parts"
            )
    return whole


def _assembled(
    caller: str, shape: Shape, sharding: NamedSharding, shards: dict[int, Any], dtype: np.dtype[Any] | None
) -> ShardedTensor:
    """Returns the tensor with these shards of this process, each a host array or a tensor on its device."""
    if dtype is None:
        if not shards:
            raise ArgumentError(f"{caller}: no device of the sharding is in this process; give dtype")
        dtype = next(iter(shards.values())).dtype
    value = aval(shape, sharded_dtype(dtype), sharding, True)
    is_compared = len(processes_of(value.sharding.mesh.flat)) > 1
    number = note(f"{caller}({value.dtype}{list(shape)} {sharding.spec})") if is_compared else 0
    grid, arrays = value.grid, []
    for k, device in enumerate(grid.devices):
        if k not in shards:
            arrays.append(RemoteArray(grid.shape(k), value.dtype))
            continue
        part = shards[k]
        if tuple(part.shape) != grid.shape(k) or part.dtype != value.dtype:
            raise ShapeError(
                f"{caller}: the array for {device} has shape {tuple(part.shape)} and dtype {part.dtype}; wanted "
                f"{grid.shape(k)} and {value.dtype}"
            )
        is_tensor = isinstance(part, ShardedTensor)
        arrays.append(shard_arrays(part.copy())[0] if is_tensor else send(np.asarray(part), HOST, device))
    result = mark_array(tensor_of(value, tuple(arrays)))
    if is_compared:
        result._identity = number
    return result
