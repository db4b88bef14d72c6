"""Index arrays in the memory of the GPU that has the tensor which they index: the host does not read them.

The host waits only for the bounds of indices, as errors are raised at once, and for the number of elements of masks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from shardtensor.backend.device import Device
from shardtensor.backend.protocol import Backend
from shardtensor.communication.transfer import whole_array
from shardtensor.interpreters.views.index_entries import AdvancedIndex
from shardtensor.sharding.layout import Shape
from shardtensor.tensor.tensor import ShardedTensor, lacks_elements
from shardtensor.tensor.value import Aval


def indices_on_device(value: Aval, shape: Shape, index: Any) -> tuple[Any, ...] | None:
    """Returns an index with arrays of a memory in place of the tensors in it; None where the host has to read it.

    That is the case unless all its arrays are tensors of at least one dimension in that memory, no mask follows
    another entry, and all indices are within their bounds. Masks are replaced by the indices of their true elements.

    Args:
        value: the aval of a tensor in the memory.
        shape: the shape of what is indexed.
        index: the index as users write it.
    """
    entries = index if isinstance(index, tuple) else (index,)
    if value.backend.kernel_language != "cuda" or value.memory is None:
        return None
    if not all(_is_basic(e) or _is_beside(e, value) for e in entries):
        return None
    masks = [k for k, e in enumerate(entries) if isinstance(e, ShardedTensor) and e.dtype.kind == "b"]
    if masks not in ([], [0]) or (masks and entries[0].shape != shape[: entries[0].ndim]):
        return None
    backend, device = value.backend, value.sharding.mesh.flat[0]
    with backend.on(device):
        arrays = [whole_array(e) if isinstance(e, ShardedTensor) else e for e in entries]
        from_mask = entries[0].ndim if masks else 0
        if masks:
            arrays[:1] = backend.xp.nonzero(arrays[0])
        sizes = _indexed_sizes(arrays, shape)
        if sizes is None:
            return None
        pairs = list(zip(arrays, sizes, strict=True))[from_mask:]
        if not all(_is_within(backend, device, x, size) for x, size in pairs if backend.is_array(x)):
            return None
    return tuple(arrays)


def shape_of_index(backend: Backend, indices: Sequence[Any], shape: Shape) -> AdvancedIndex:
    """Returns an index with arrays of a device in canonical form, for its shapes and dimensions: without elements.

    Raises:
        IndexingError: an integer in it is out of bounds, or the arrays do not broadcast.
    """
    blank = [np.broadcast_to(np.intp(0), x.shape) if backend.is_array(x) else x for x in indices]
    first = [x[tuple([slice(1)] * x.ndim)] if isinstance(x, np.ndarray) else x for x in blank]
    AdvancedIndex(tuple(first), shape).check()  # As for the whole arrays, and faster.
    return AdvancedIndex(tuple(blank), shape)


def _is_basic(entry: Any) -> bool:
    is_integer = isinstance(entry, (int, np.integer)) and not isinstance(entry, bool)
    return entry is None or entry is Ellipsis or isinstance(entry, slice) or is_integer


def _is_beside(entry: Any, value: Aval) -> bool:
    """Whether an entry of an index is a tensor of indices or a mask in the memory of a value."""
    if not isinstance(entry, ShardedTensor) or not entry.ndim or entry.dtype.kind not in "biu":
        return False
    own = entry._aval
    return own.memory is not None and own.memory == value.memory and not lacks_elements(entry)


def _indexed_sizes(entries: list[Any], shape: Shape) -> list[int] | None:
    """Returns for each entry of an index the size of the dimension that it indexes, 0 for those that index none; None
    if there are more entries than dimensions.
    """
    taken = sum([entry is not None and entry is not Ellipsis for entry in entries])
    if taken > len(shape):
        return None
    sizes, d = [], 0
    for entry in entries:
        if entry is Ellipsis:
            d += len(shape) - taken
        sizes.append(0 if entry is None or entry is Ellipsis else shape[d])
        d += entry is not None and entry is not Ellipsis
    return sizes


def _is_within(backend: Backend, device: Device, indices: Any, size: int) -> bool:
    """Whether indices are those of elements of a dimension. The host waits for the least and the greatest of them."""
    if 0 in indices.shape:
        return True
    xp = backend.xp
    least, greatest = backend.to_host(xp.stack([xp.min(indices), xp.max(indices)]), device).tolist()
    return bool(-size <= least and greatest < size)
