"""Declarations of the functions of the list API that split a tensor into a list: one item for each device or batch.

`shardtensor.functions.standard.joining` declares their inverses.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from shardtensor.backend.device import Device
from shardtensor.backend.registry import memory_space, own_devices
from shardtensor.communication.between_processes.processes import is_common
from shardtensor.communication.transfer import announce_reading
from shardtensor.core import implements, operator
from shardtensor.errors import ArgumentError, ArgumentTypeError, ShapeError, ShardingError, type_text
from shardtensor.functions.placement.transfers import transfer_to
from shardtensor.functions.standard.joining import concat
from shardtensor.sharding.layout import NamedSharding, as_sharding
from shardtensor.sharding.mesh import Mesh, default_mesh, mesh_of, submeshes_along
from shardtensor.sharding.rules import normalize_axis
from shardtensor.sharding.spec import Chain, P
from shardtensor.tensor.identity import identity_of
from shardtensor.tensor.operands import as_operand, host_array
from shardtensor.tensor.ownership import link_parts, reading
from shardtensor.tensor.storage import Storage
from shardtensor.tensor.tensor import ArrayLike, ShardedTensor, shard_arrays, tensor_of
from shardtensor.tensor.value import Aval, aval

_DERIVATIVES = "of_lists"


@operator(tags=("any dtype",))
def shard(x: ArrayLike, axis: int = 0, *, devices: Sequence[Device] | Mesh | None = None) -> list[ShardedTensor]:
    """Splits x along ``axis`` into a list of tensors, one for each device.

    Item k is a tensor on device k only, with x's dtype. Sizes follow the split rule: 10 rows over 4 devices are split
    as 3, 3, 2, 2. If the dimension is smaller than the number of devices, the last items are empty. The parts are
    transferred as by `reshard`.

    Args:
        x: a tensor or a host array of at least one dimension.
        axis: the dimension that is split; negative ones count from the end.
        devices: a sequence of devices, in the order of the items, or a mesh; by default the devices of the default
            mesh, regardless of x's sharding (in a mapped function: the devices that the call owns, see `pmap`).

    Raises:
        AxisError: x has no such axis.
        ShapeError: x is 0-d.
        ShardingError: ``devices`` is empty, or a device occurs twice.
        ArgumentTypeError: ``devices`` is neither a mesh nor a sequence of devices.
        ArgumentError: x spans processes, and no devices are given.

    >>> parts = st.shard(np.arange(10), devices=st.devices()[:4])
    >>> [p.tolist() for p in parts], parts[1].device
    ([[0, 1, 2], [3, 4, 5], [6, 7], [8, 9]], Device('numpy:1'))
    """


@implements(shard, "composite")
def _shard(x: Any, axis: int, devices: Any) -> list[ShardedTensor]:
    x = as_operand(x, "shard")
    if not getattr(x, "ndim", 0):
        raise ShapeError("shard: x has no dimensions to split; wanted at least one")
    if devices is None and isinstance(x, ShardedTensor) and x._aval.spans:
        raise ArgumentError(
            "shard: x spans processes, and by default a list is on the devices of this process, others in each; "
            "give devices, the same in all processes, or use x.addressable_shards"
        )
    if isinstance(axis, Mesh) or (isinstance(axis, (list, tuple)) and axis and isinstance(axis[0], Device)):
        raise ArgumentTypeError(f"shard: axis is {type_text(axis)}; the devices are given by name: devices=")
    along = normalize_axis(axis, x.ndim)
    sharding = NamedSharding(device_row(devices, "shard"), P(*[None] * along, "d"))
    return split_over(transfer_to(x, sharding, "shard"), ("d",))


@operator(tags=("any dtype", "internal"))
def split_over(x: ArrayLike, /, axes: Chain, *, drop: int | None = None) -> list[ShardedTensor]:
    """Splits a tensor along some of its mesh axes.

    Returns, in mesh order, one tensor for each position along ``axes``: on the devices at that position, and sharded
    over the remaining mesh axes as before. In each dimension, ``axes`` must precede the remaining mesh axes.

    Args:
        x: a tensor.
        axes: the names of mesh axes.
        drop: a dimension in which every shard has size 1, which is removed.

    >>> from shardtensor.functions.placement.shard_lists import split_over
    >>> [part.tolist() for part in split_over(st.arange(4, device=st.make_mesh((2,), ("x",))), ("x",))]
    [[0, 1], [2, 3]]
    """


@implements(split_over, "algorithm")
def _split_over(x: ShardedTensor, axes: Chain, drop: int | None) -> list[ShardedTensor]:
    storage, parts = x._storage, _parts_over(x._aval, axes, drop)
    arrays = shard_arrays(x) if drop is None else _views(x, (slice(None),) * drop + (0,))
    if len(parts) == len(arrays):
        tensors = [tensor_of(value, (arrays[k],)) for (k,), value in parts]
        if x._storage is storage:  # Another thread may have written x meanwhile.
            link_parts(storage, tensors)
    else:
        tensors = [tensor_of(value, tuple([arrays[k] for k in group])) for group, value in parts]
    if is_common(x) and (identity := identity_of(x)):  # Maps take the parts together, which the whole identifies.
        for part in tensors:
            part._identity = identity
    return tensors


@implements(split_over, "infer")
def _infer_split_over(x: ShardedTensor, axes: Chain, drop: int | None) -> list[Aval]:
    announce_reading(x)
    return [value for _, value in _parts_over(x._aval, axes, drop)]


@functools.lru_cache(1024)
def _parts_over(x: Aval, axes: Chain, drop: int | None) -> list[tuple[Sequence[int], Aval]]:
    """Returns, for each position along ``axes``, the positions of the devices there, and the aval of their part."""
    mesh, grid, kept = x.sharding.mesh, x.grid, [d for d in range(x.ndim) if d != drop]
    chains = x.sharding.spec.chains_of(x.ndim)
    spec = P(*[[a for a in chains[d] if a not in axes] for d in kept])
    parts: list[tuple[Sequence[int], Aval]] = []
    for group, part in submeshes_along(mesh, tuple([name for name in mesh.axis_names if name not in axes])):
        boxes = [grid.box(k) for k in group]
        shape = tuple([max(b[d][1] for b in boxes) - min(b[d][0] for b in boxes) for d in kept])
        one = as_sharding(part.flat[0], len(kept), "split_over") if part.size == 1 else NamedSharding(part, spec)
        parts.append((group, aval(shape, x.dtype, one, True)))
    return parts


@operator(error_name="expand_dims", tags=("any dtype", "internal"))
def unsqueeze(x: ArrayLike, /, axis: int) -> ShardedTensor:
    """Returns a tensor with a new dimension of size 1, as `expand_dims` does, but not a view.

    >>> from shardtensor.functions.placement.shard_lists import unsqueeze
    >>> unsqueeze(st.arange(3), 0).shape
    (1, 3)
    """


@implements(unsqueeze, "infer")
def _infer_unsqueeze(x: ShardedTensor, axis: int) -> Aval:
    announce_reading(x)
    return _unsqueezed(x._aval, axis)


@implements(unsqueeze, "algorithm")
def _unsqueeze(x: ShardedTensor, axis: int) -> ShardedTensor:
    value, arrays = _unsqueezed(x._aval, axis), _views(x, (slice(None),) * axis + (None,))
    return tensor_of(value, arrays)


def unsqueeze_each(tensors: Sequence[ShardedTensor], axis: int) -> list[ShardedTensor]:
    """Returns what `unsqueeze` returns of each tensor. Tensors of one array, such as the results of a map, are not
    operands of a call each, which takes many times as long as the view.
    """
    index = (slice(None),) * axis + (None,)
    results: list[ShardedTensor] = []
    with reading(tensors):
        for memory, group in itertools.groupby(tensors, lambda x: x._aval.memory):
            some = list(group)
            storages, value = [x._storage for x in some], some[0]._aval
            if memory is None or not all(type(s) is Storage and len(s.buffers) == 1 for s in storages):
                results += [unsqueeze(x, axis) for x in some]
                continue
            with value.backend.on(value.sharding.mesh.flat[0]):
                views = [value.backend.view(storage.buffers[0], index) for storage in storages]
            for x, storage, view in zip(some, storages, views, strict=True):
                result = tensor_of(_unsqueezed(x._aval, axis), (view,))
                link_parts(storage, (result,))
                results.append(result)
    return results


@functools.lru_cache(1024)
def _unsqueezed(x: Aval, axis: int) -> Aval:
    chains = list(x.sharding.spec.chains_of(x.ndim))
    chains.insert(axis, ())
    sharding = x.sharding.with_spec(P(*chains)) if x.sharding.spec.chains else x.sharding
    return aval((*x.shape[:axis], 1, *x.shape[axis:]), x.dtype, sharding, True)


def _views(x: ShardedTensor, index: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns the view of every shard that an index selects, in mesh order."""
    value, arrays = x._aval, iter(shard_arrays(x))
    backend, views = value.backend, []
    for _, group in itertools.groupby(value.sharding.mesh.flat, memory_space):
        devices = list(group)
        with backend.on(devices[0]):
            views += [backend.view(next(arrays), index) for _ in devices]
    return tuple(views)


def device_row(devices: Any, caller: str) -> Mesh:
    """Returns a 1-d mesh of the devices in a ``devices=`` argument; for None, of those of the default mesh.

    Raises:
        ShardingError: there are no devices, or one occurs twice.
        ArgumentTypeError: ``devices`` is neither a mesh nor a list, tuple or array of devices.
    """
    if devices is None or isinstance(devices, Mesh):
        return mesh_of(devices.flat if devices else own_devices(default_mesh().flat))
    if not isinstance(devices, (list, tuple, np.ndarray)):
        raise ArgumentTypeError(
            f"{caller}: devices is {type_text(devices)}; wanted a list of devices, such as st.devices()[:4]"
        )
    row = tuple(np.asarray(devices, dtype=object).flat)
    if not row:
        raise ShardingError(f"{caller}: devices is empty; give at least one")
    for device in row:
        if not isinstance(device, Device):
            raise ArgumentTypeError(
                f"{caller}: {device!r:.60} is {type_text(device)}, not a Device; take them from st.devices()"
            )
    return mesh_of(row)


@operator(tags=("any dtype",))
def to_batched_list(x: ArrayLike, batch_size: int, *, leftover: str = "keep") -> list[ShardedTensor]:
    """Splits the rows of x into a list of batches along the first dimension.

    Each batch is an independent tensor with x's dtype, on x's mesh and sharded like x. A host array is first sharded
    over the default mesh.

    Args:
        x: a tensor or a host array of at least one dimension.
        batch_size: the number of rows of a batch.
        leftover: the treatment of the last rows if they do not fill a batch: ``"keep"`` returns a shorter batch,
            ``"repeat"`` completes it with the first rows of x (the default of Nx), ``"discard"`` omits them.

    Raises:
        ArgumentTypeError: ``batch_size`` is not an integer.
        ArgumentError: ``batch_size`` is less than 1, or ``leftover`` is another value.
        ShapeError: x is 0-d.

    >>> [b.tolist() for b in st.to_batched_list(st.arange(5), 2)]
    [[0, 1], [2, 3], [4]]
    >>> [b.tolist() for b in st.to_batched_list(st.arange(5), 2, leftover="repeat")]
    [[0, 1], [2, 3], [4, 0]]
    """


@implements(to_batched_list, "composite")
def _to_batched_list(x: Any, batch_size: int, leftover: str) -> list[ShardedTensor]:
    if leftover not in ("keep", "repeat", "discard"):
        raise ArgumentError(f'to_batched_list: leftover is {leftover!r}; wanted "keep", "repeat" or "discard"')
    if isinstance(batch_size, bool) or not hasattr(batch_size, "__index__"):
        raise ArgumentTypeError(f"to_batched_list: batch_size is {type_text(batch_size)}; wanted an integer")
    if batch_size < 1:
        raise ArgumentError(f"to_batched_list: batch_size is {batch_size}; wanted at least 1")
    x = host_array(x, "to_batched_list")
    if not x.ndim:
        raise ShapeError("to_batched_list: x has no dimensions to cut; wanted at least one")
    if not isinstance(x, ShardedTensor):
        x = transfer_to(x, as_sharding(default_mesh(), x.ndim, "to_batched_list"), "to_batched_list")
    rows = x.shape[0]
    full = rows // batch_size * batch_size
    batches = [_rows(x, i, i + batch_size) for i in range(0, full, batch_size)]
    rest = rows - full
    if not rest or leftover == "discard":
        return batches
    if leftover == "keep":
        return [*batches, _rows(x, full, rows)]
    missing = batch_size - rest
    again = [x] * (missing // rows) + [x[: missing % rows]] * (missing % rows > 0)
    return [*batches, concat([x[full:], *again])]


def _rows(x: ShardedTensor, begin: int, end: int) -> ShardedTensor:
    """Returns rows ``begin`` to ``end`` as an independent tensor."""
    rows = x[begin:end]
    return transfer_to(rows, rows.sharding, "to_batched_list", committed=rows.committed)
