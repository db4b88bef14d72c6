"""Advanced indexing, by arrays of integers and by masks.

Unless one GPU has all of them, index arrays are copied to the host, where the transfers are planned. The selected
elements are sent directly from the devices that hold them to the devices whose shards of the result contain them, and
only where they are missing. Up to 64 KiB, the first device selects those of a split dimension, for which it receives
the tensor, and sends the others their parts: that takes fewer messages.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from shardtensor.communication.between_processes.processes import described, is_common, note
from shardtensor.communication.gather_scatter import GatherPlan, GatherRequest
from shardtensor.communication.offload import offloaded
from shardtensor.communication.transfer import gather as gather_to_host
from shardtensor.communication.transfer import whole_array
from shardtensor.communication.transfer_log import is_recording
from shardtensor.core import call, implements
from shardtensor.errors import IndexingError
from shardtensor.functions.algorithms.first_device import FirstDevice, alone, is_few, shares_memory
from shardtensor.functions.standard.indexing import gather
from shardtensor.host import blockwise
from shardtensor.interpreters.views.device_indices import indices_on_device, shape_of_index
from shardtensor.interpreters.views.index_entries import AdvancedIndex
from shardtensor.interpreters.views.scalar_elements import ScalarElement
from shardtensor.interpreters.views.views import View, local_views, locate, operand_shards
from shardtensor.sharding.index import Index
from shardtensor.sharding.layout import Grid, Shape
from shardtensor.sharding.spec import Chain, P
from shardtensor.sharding.view_spec import ShardedBox, box_of, whole_view_spec
from shardtensor.tensor.tensor import ShardedTensor, lacks_elements, tensor, tensor_of
from shardtensor.tensor.value import Aval, aval

# -- reading ---------------------------------------------------------------------------------------


@implements(gather, "infer")
def _infer_gather(x: Any, index: Any) -> Aval:
    x = x if isinstance(x, ShardedTensor) else call("asarray", x)
    chosen = AdvancedIndex(inferred_index(index), x.shape)
    chosen.check()
    value = _layout(x._aval, chosen, index)
    if is_recording() and _is_few(x, chosen, value):
        _on_first(x._aval, chosen, value).infer((x,))
    elif is_recording():
        copied = not (value.backend.on_host or value.backend.simulated)
        _source(x, chosen, value.grid, True)[0].announce(x.dtype.itemsize, copied, "getitem")
    return value


def inferred_index(index: Any) -> Any:
    """Returns an index as an inference takes it: with zeros for the elements of integer tensors that have none.

    Raises:
        ConcretizationError: transfers are recorded, which depend on these elements.
    """
    if isinstance(index, tuple):
        return tuple(map(inferred_index, index))
    if not lacks_elements(index) or index.dtype.kind not in "iu":
        return index
    if is_recording() and index.size:
        np.asarray(index)
    return np.broadcast_to(0, index.shape)


@implements(gather, "algorithm")
def _gather(x: Any, index: Any) -> ShardedTensor:
    if not isinstance(x, ShardedTensor):
        x = call("asarray", x)
    value = x._aval
    if value.backend.on_host:
        chosen = AdvancedIndex(index, value.shape)
        try:
            array = blockwise.select(gather_now(x, "getitem"), chosen.numpy)
        except IndexError as error:
            raise indexing_error(error) from None
        return tensor_of(_layout(value, chosen, index), (array,))
    if (indices := indices_on_device(value, value.shape, index)) is not None:
        return _selected_on_device(x, indices, index)
    chosen = AdvancedIndex(index, value.shape)
    return _selected(x, chosen, _layout(value, chosen, index))


def gather_now(x: Any, caller: str) -> Any:
    """Returns the whole of an operand as a host array, which is not recorded. Where memory is shared, it is read where
    it is: views and scalar elements do not count as read, so that a later read records its transfers.
    """
    if isinstance(x, ShardedTensor) and x._aval.backend.on_host:
        if type(x._storage) is View:
            return x._storage.now()
        if type(x._storage) is ScalarElement:
            return x._storage.parts[0]
        return whole_array(x, caller)
    return gather_to_host(x, caller)


def _selected_on_device(x: ShardedTensor, indices: tuple[Any, ...], index: Any) -> ShardedTensor:
    """Returns the elements of a tensor in one memory that an index with arrays of that memory selects."""
    backend = x._aval.backend
    value = _layout(x._aval, shape_of_index(backend, indices, x.shape), index)
    with backend.on(x.sharding.mesh.flat[0]):
        return tensor_of(value, (backend.contiguous(whole_array(x, "getitem")[indices]),))


def _selected(x: ShardedTensor, chosen: AdvancedIndex, value: Aval) -> ShardedTensor:
    """Returns the elements of a tensor on other devices than the host that an index on the host selects."""
    if shares_memory(x) or _is_few(x, chosen, value):
        return _on_first(x._aval, chosen, value).run((x,))  # type: ignore[no-any-return]
    if value.spans and is_common(x):
        note(f"getitem({described(x)}, {described(chosen.numpy)})")
    plan, here, arrays = _source(x, chosen, value.grid, False)
    rows = plan.run(local_views(here, arrays()), x.dtype)
    return tensor(value, offloaded(value, [_placed(r, value, chosen, k) for k, r in enumerate(rows)]))


def _is_few(x: ShardedTensor, chosen: AdvancedIndex, value: Aval) -> bool:
    """Whether the first device selects elements for the others: they would exchange them, and there are few bytes.

    Those of a view are selected where its base has them.
    """
    if type(x._storage) in (View, ScalarElement) or not _exchanges_few(x._aval, chosen.basic, chosen.dims, value):
        return False
    return not _stay(x._aval, chosen, value)


def _stay(x: Aval, chosen: AdvancedIndex, value: Aval) -> bool:
    """Whether each device has all elements that it selects, so that nothing would be sent: known of the usual case, in
    which one dimension is split, and the first one of the block as it is.
    """
    if not value.nbytes:
        chosen.check()
        return True
    chains, parts = [one.sharding.spec.chains_of(one.ndim) for one in (x, value)]
    split, split_there = [[d for d, chain in enumerate(some) if chain] for some in (chains, parts)]
    if len(split) > 1 or split_there != [chosen.at] or parts[chosen.at] != chains[split[0]]:
        return False
    viewed = whole_view_spec(x.shape, chains).at(chosen.basic).chains
    (number,) = [k for k, d in enumerate(chosen.dims) if viewed[d]]
    ends, rows = x.grid.offsets[split[0]], value.grid.offsets[chosen.at]
    devices = np.repeat(np.arange(len(rows) - 1), np.diff(rows) * (chosen.rows // chosen.block[0]))
    return bool(np.array_equal(np.searchsorted(ends[1:], chosen.arrays[number], side="right"), devices))


@functools.lru_cache(1024)
def _exchanges_few(x: Aval, basic: Index, dims: tuple[int, ...], value: Aval) -> bool:
    """Returns `_is_few` of a tensor that is no view, whose dimensions ``dims`` of a basic index's are indexed."""
    chains = whole_view_spec(x.shape, x.sharding.spec.chains_of(x.ndim)).at(basic).chains
    return is_few(x, value) and any(chains[d] for d in dims)


def _on_first(x: Aval, chosen: AdvancedIndex, value: Aval) -> FirstDevice:
    """Returns the call by which the first device selects the elements."""
    backend, device = x.backend, x.sharding.mesh.flat[0]

    def select(xp: Any, array: Any) -> Any:
        array = box_of(chosen.basic, x.shape).of(backend, array)
        array = xp.permute_dims(array, (*chosen.dims, *[d for d in range(array.ndim) if d not in chosen.dims]))
        rows = array[tuple([backend.from_host(i, device) for i in chosen.arrays])]
        return _placed(rows, alone(value, "getitem"), chosen, 0)

    return FirstDevice("getitem", (x,), value, select)


def _source(
    x: ShardedTensor, chosen: AdvancedIndex, result: Grid, inferred: bool
) -> tuple[GatherPlan, ShardedBox, Callable[[], Sequence[Any]]]:
    """Returns the plan that sends the selected elements to the devices of the result, the boxes of the source arrays
    from which they are sent, and a function that returns these arrays.
    """
    grid, arrays = operand_shards(x, inferred)
    here = locate(grid, (box_of(chosen.basic, x.shape),))
    assert here is not None  # A chain of one box has parts in all shards.
    wants = [_want(result, k, chosen) for k in range(len(result.devices))]
    return GatherPlan(here.grid, chosen.dims, wants), here, arrays


def indexing_error(error: IndexError) -> IndexingError:
    """Returns an error of NumPy as an `IndexingError`."""
    return error if isinstance(error, IndexingError) else IndexingError(str(error))


def _layout(x: Aval, chosen: AdvancedIndex, index: Any) -> Aval:
    """Returns the aval of the result.

    The block is split as the tensors of integers in the index are, or else its first dimension by the mesh axes that
    split the indexed dimensions. The other dimensions keep their mesh axes.
    """
    index_tensors: tuple[Aval, ...] = ()
    if type(index) is not np.ndarray:
        for e in index if type(index) is tuple else (index,):
            if type(e) is ShardedTensor and e._aval.dtype.kind in "iu" and e._aval.sharding.mesh == x.sharding.mesh:
                index_tensors += (e._aval,)
    return _layout_of(x, chosen.basic, chosen.dims, chosen.block, chosen.at, chosen.shape, index_tensors)


@functools.lru_cache(1024)
def _layout_of(
    x: Aval, basic: Index, dims: tuple[int, ...], block: Shape, at: int, shape: Shape, index_tensors: tuple[Aval, ...]
) -> Aval:
    """Returns the aval of the result: see `_layout` and `AdvancedIndex`; ``index_tensors`` are tensors of integers."""
    chains = whole_view_spec(x.shape, x.sharding.spec.chains_of(x.ndim)).at(basic).chains
    rest = [c for d, c in enumerate(chains) if d not in dims]
    split = _split_of_block(block, index_tensors, set(itertools.chain.from_iterable(rest)))
    if block and not any(split):
        split[0] = tuple(itertools.chain.from_iterable(chains[d] for d in dims))
    return aval(shape, x.dtype, x.sharding.with_spec(P(*rest[:at], *split, *rest[at:])), x.committed)


def _split_of_block(block: Shape, index_tensors: Sequence[Aval], used: set[str]) -> list[Chain]:
    """Returns the mesh axes that split the dimensions of the index arrays, of those that are not used yet."""
    split: list[Chain] = [()] * len(block)
    for value in index_tensors:
        for d, chain in enumerate(value.sharding.spec.chains_of(value.ndim), len(block) - value.ndim):
            if not split[d] and value.shape[d - len(block)] == block[d] and used.isdisjoint(chain):
                split[d] = chain
                used.update(chain)
    return split


def _want(grid: Grid, k: int, chosen: AdvancedIndex) -> GatherRequest:
    """Returns the request of the k-th device: its rows of the block and its ranges of the other dimensions."""
    box, n = grid.box(k), len(chosen.block)
    mine, rest = box[chosen.at : chosen.at + n], (*box[: chosen.at], *box[chosen.at + n :])
    part = tuple([slice(*ends) for ends in mine])
    rows = math.prod([end - begin for begin, end in mine])
    return GatherRequest(
        grid.devices[k], rows, [a.reshape(chosen.block)[part].reshape(-1) for a in chosen.arrays], rest
    )


def _placed(rows: Any, value: Aval, chosen: AdvancedIndex, k: int) -> Any:
    """Reshapes and transposes the gathered elements of the k-th device, rows first, to its shard of the result."""
    backend, device = value.backend, value.grid.devices[k]
    shape, n = value.grid.shape(k), len(chosen.block)
    block, rest = shape[chosen.at : chosen.at + n], (*shape[: chosen.at], *shape[chosen.at + n :])
    axes = [*range(n, n + chosen.at), *range(n), *range(n + chosen.at, n + len(rest))]
    with backend.on(device):
        array = backend.xp.reshape(rows, (*block, *rest))
        return array if not chosen.at else backend.contiguous(backend.xp.permute_dims(array, tuple(axes)))
