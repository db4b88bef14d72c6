"""Advanced indexing where one memory of a GPU has the tensor and the index arrays: these are not read on the host.

The host waits only for the bounds of indices, as errors are raised at once, and for the number of elements of masks.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from shardtensor.backend.device import Device
from shardtensor.backend.protocol import Backend
from shardtensor.communication.transfer import whole_array
from shardtensor.communication.transfer_log import is_recording
from shardtensor.sharding.layout import Shape
from shardtensor.tensor.tensor import ShardedTensor, lacks_elements


def indices_on_device(x: ShardedTensor, index: Any) -> tuple[Any, ...] | None:
    """Returns an index with arrays of the memory of a tensor in place of the tensors in it; None where the index has to
    be read on the host.

    That is the case unless all its arrays are tensors of at least one dimension in that memory, no mask follows
    another entry, and all indices are within their bounds. Masks are replaced by the indices of their true elements.
    """
    entries = index if isinstance(index, tuple) else (index,)
    value = x._aval
    if value.backend.kernel_language != "cuda" or value.memory is None or value.offloaded or lacks_elements(x):
        return None
    if is_recording() or not all(_is_basic(e) or _is_beside(e, x) for e in entries):
        return None
    masks = [k for k, e in enumerate(entries) if isinstance(e, ShardedTensor) and e.dtype.kind == "b"]
    if masks not in ([], [0]):
        return None
    backend, device = value.backend, value.sharding.mesh.flat[0]
    with backend.on(device):
        found = [whole_array(e) if isinstance(e, ShardedTensor) else e for e in entries]
        if masks:
            if found[0].shape != x.shape[: found[0].ndim]:
                return None
            found[:1] = backend.xp.nonzero(found[0])
            checked = len(found) - len(entries) + 1
        else:
            checked = 0
        sizes = _indexed_sizes(found, x.shape)
        if sizes is None:
            return None
        for entry, size in list(zip(found, sizes, strict=True))[checked:]:
            if backend.is_array(entry) and not _is_within(backend, device, entry, size):
                return None
    return tuple(found)


def _is_basic(entry: Any) -> bool:
    is_integer = isinstance(entry, (int, np.integer)) and not isinstance(entry, bool)
    return entry is None or entry is Ellipsis or isinstance(entry, slice) or is_integer


def _is_beside(entry: Any, x: ShardedTensor) -> bool:
    """Whether an entry of an index is a tensor of indices or a mask in the memory of x."""
    if not isinstance(entry, ShardedTensor) or not entry.ndim or entry.dtype.kind not in "biu":
        return False
    value = entry._aval
    return (
        value.memory is not None
        and value.memory == x._aval.memory
        and not value.offloaded
        and not lacks_elements(entry)
    )


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
