"""How tensors are printed: ``str`` gives the elements as NumPy prints them, ``repr`` the layout as well.

The argument ``x`` of each function is a tensor.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from shardtensor.backend.device import HostArray
from shardtensor.core import call
from shardtensor.errors import ConcretizationError, NotAddressableError
from shardtensor.tensor.storage import Storage


def described(x: Any) -> str:
    """Returns the ``repr`` of a tensor.

    That of a tensor on one device, or without dimensions, has no line of its own for the layout, so that the lists that
    `st.shard` and `st.pmap` return are legible, and so are results in containers:
    ``ShardedTensor([1, 2], device=numpy:0)``.
    """
    x = _known(x)
    try:
        return _layout(x) if x.is_donated else _in_short(x) if is_short(x) else _on_several(x)
    except ConcretizationError:
        return _layout(x)
    except NotAddressableError:
        return "\n".join([_layout(x), *_parts_here(x)])


def _known(x: Any) -> Any:
    """Returns the tensor that is printed in place of one that an interpreter has in another form."""
    storage = getattr(x._storage, "base", x)._storage
    return storage.shown(x) if hasattr(storage, "shown") else x


def is_short(x: Any) -> bool:
    """Whether a few words describe the layout of a tensor: it is on one device, or it is one element on all of them."""
    return x.sharding.mesh.size == 1 or (not x.ndim and not x._aval.unreduced)


def printed(x: Any) -> str:
    """Returns the ``str`` of a tensor: its elements, or its layout if there are none to read."""
    x = _known(x)
    try:
        return _layout(x) if x.is_donated else values(x)
    except ConcretizationError:
        return _layout(x)
    except NotAddressableError:
        return described(x)


def few_values(x: Any) -> str:
    """Returns a few elements as NumPy prints them; an empty string if there are none to read."""
    try:
        with np.printoptions(linewidth=60):
            return "" if x.is_donated else values(x, edge=2 if x.ndim < 3 else 1, threshold=24)
    except (ConcretizationError, NotAddressableError):
        return ""


def values(x: Any, *, edge: int = 3, threshold: int | None = None) -> str:
    """Returns the elements as NumPy prints them. Only the corners of a large tensor are read.

    Args:
        edge: the number of elements at both ends of each dimension that are printed of a large tensor.
        threshold: the number of elements up to which all are printed; by default the print option of NumPy.

    Raises:
        ConcretizationError: only the shape, dtype and sharding of the tensor are known.
        DonatedError: the tensor was donated.
    """
    array, few = _read(x, edge, threshold)
    with np.printoptions(threshold=few, edgeitems=edge):
        return str(array)


def _on_several(x: Any) -> str:
    return f"{_layout(x)}\n{values(x)}"


def _parts_here(x: Any) -> list[str]:
    """Returns the shards of a tensor that this process holds, of which other processes hold the rest.

    A view and an element are not read: their elements may have to come from other processes, which print nothing.
    """
    if type(x._storage) is not Storage:
        return []
    lines = []
    for shard in x.addressable_shards:
        index = ", ".join(f"{s.start}:{s.stop}" for s in shard.index)
        backend = x._aval.backend
        with backend.on(shard.device):
            elements = str(np.asarray(backend.to_host(shard.data, shard.device)))
        lines.append(f"[{index}] on {shard.device}: {elements}")
    return lines


def _in_short(x: Any) -> str:
    array, few = _read(x, 3, None)
    before = "ShardedTensor("
    with np.printoptions(threshold=few, edgeitems=3):
        elements = np.array2string(array, separator=", ", prefix=before)
    # As in NumPy, shape and dtype are left out where the elements show them.
    shape = f"shape={x.shape}, " if x.size > few or not x.size else ""
    dtype = "" if x.size and x.dtype in _SHOWN_BY_ELEMENTS else f"dtype={x.dtype}, "
    return f"{before}{elements}, {shape}{dtype}device={x.device}{_memory(x)})"


_SHOWN_BY_ELEMENTS = tuple(map(np.dtype, ("bool", "int64", "float64", "complex128")))
"""The dtypes that Python's scalars have."""


def _layout(x: Any) -> str:
    layout = f"{x.sharding.spec!r} on {x.sharding.mesh!r}{_memory(x)}"
    donated = " <donated>" if x.is_donated else ""
    return f"ShardedTensor(shape={x.shape}, dtype={x.dtype}, sharding={layout}){donated}"


def _memory(x: Any) -> str:
    return "" if x.sharding.memory_kind == "device" else f", {x.sharding.memory_kind}"


def _read(x: Any, edge: int, threshold: int | None) -> tuple[HostArray, int]:
    """Returns the elements that are printed, and the threshold with which NumPy prints exactly these."""
    least = int(np.get_printoptions()["threshold"]) if threshold is None else threshold
    return (np.asarray(x), least) if x.size <= least else (_corners(x, edge, ()), 0)


def _corners(x: Any, edge: int, index: tuple[slice, ...]) -> HostArray:
    """Returns ``x[index]`` with only ``edge`` elements at both ends of each further dimension, and one between them."""
    d = len(index)
    if d == x.ndim:
        return call("to_host", x, index=index)  # type: ignore[no-any-return]
    n = x.shape[d]
    ends = [slice(None)] if n <= 2 * edge + 1 else [slice(0, edge + 1), slice(n - edge, n)]
    return np.concatenate([_corners(x, edge, (*index, part)) for part in ends], axis=d)
