"""Advanced indexing, by arrays of integers and by masks.

Unless one GPU has all of them, index arrays are copied to the host, where the transfers are planned. The selected
elements are sent directly from the devices that hold them to the devices whose shards of the result contain them, and
only where they are missing.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeGuard

import numpy as np

from shardtensor.backend.device import HostArray
from shardtensor.communication import transfer
from shardtensor.communication.gather_scatter import GatherPlan, GatherRequest
from shardtensor.communication.offload import offloaded
from shardtensor.communication.processes import described, note
from shardtensor.communication.transfer import to_host_movement, whole_array
from shardtensor.communication.transfer_log import is_recording
from shardtensor.core import call, implements
from shardtensor.errors import IndexingError, ShapeError
from shardtensor.functions.algorithms.one_memory import on_all_devices, on_one_device
from shardtensor.functions.indexing import gather
from shardtensor.host import blockwise
from shardtensor.interpreters.mutation.gather_on_device import indices_on_device
from shardtensor.interpreters.mutation.views import gather_unrecorded, local_views, operand_shards
from shardtensor.sharding.index import Index, canonical, is_array
from shardtensor.sharding.layout import Grid, NamedSharding, Shape
from shardtensor.sharding.spec import Chain, P
from shardtensor.sharding.view_spec import ShardedBox, aligned, box_of, whole_view_spec
from shardtensor.tensor.operands import as_operand
from shardtensor.tensor.ownership import lent, reading
from shardtensor.tensor.storage import Storage
from shardtensor.tensor.tensor import ShardedTensor, lacks_elements, tensor
from shardtensor.tensor.value import Aval, aval


class AdvancedIndex:
    """An index with arrays in canonical form: a basic index, then index arrays for some dimensions of its result.

    Args:
        index: the index as users write it: integers, slices, None, Ellipsis, sequences, masks and integer arrays.
        shape: the shape of the indexed tensor.

    Attributes:
        numpy: the equivalent index for NumPy, with host arrays.
        basic: the basic index; it keeps the dimensions that are indexed by arrays whole.
        dims: the dimensions of the basic index's result that are indexed by arrays.
        block: the shape of the broadcast index arrays.
        at: the position of the block's dimensions among those of the result.
        rest: the sizes of the result's other dimensions.
        shape: the shape of the result.
        is_mask: whether the index is a single mask.

    Raises:
        IndexingError: the index has too many entries, a mask does not have the shape of its dimensions, an index array
            is of another dtype than integers or bools, or the index arrays do not broadcast.
        ShapeError: a nested list is ragged.
    """

    def __init__(self, index: Any, shape: Shape) -> None:
        entries = [_entry(e) for e in (index if isinstance(index, tuple) else (index,))]
        self.is_mask = len(entries) == 1 and _is_mask(entries[0])
        taken = sum(_width(e) for e in entries)
        if taken > len(shape):
            raise IndexingError(f"{taken} indices for a tensor of {len(shape)} dimensions, shape {shape}")
        basic: list[Any] = []
        self._walkers: list[_IndexArray] = []
        d = 0
        for number, entry in enumerate(entries):
            if entry is Ellipsis:
                basic.append(entry)
                d += len(shape) - taken
            elif isinstance(entry, (int, np.ndarray)):
                width = _width(entry)
                if _is_mask(entry) and entry.shape != (wanted := shape[d : d + width]):
                    if any(n not in (0, size) for n, size in zip(entry.shape, wanted, strict=True)):
                        raise IndexingError(
                            f"a mask of shape {entry.shape} at dimension {d} of a tensor of shape {shape}; wanted "
                            f"{wanted}"
                        )
                    # The array API and NumPy accept an empty mask for dimensions of any size.
                    entries[number] = entry = np.broadcast_to(np.False_, wanted)
                self._walkers.append(_IndexArray(len(basic), np.asarray(entry), d, shape))
                # A 0-d mask adds a dimension of size 1 and indexes it.
                basic += [slice(None)] * width if width else [None]
                d += width
            else:
                basic.append(entry)
                d += entry is not None
        self.numpy = tuple(entries)
        found = canonical(tuple(basic), shape)
        assert found is not None
        self.basic: Index = found
        positions = _positions(basic, len(shape))
        self.dims = tuple([positions[w.number] + i for w in self._walkers for i in range(w.count)])
        shapes = [w.shape for w in self._walkers]
        try:
            self.block: Shape = np.broadcast_shapes(*shapes)
        except ValueError:
            raise IndexingError(
                f"index arrays of shapes {', '.join(map(str, shapes))} do not broadcast together"
            ) from None
        advanced = [isinstance(e, (int, np.ndarray)) for e in entries]
        self.at = min(self.dims) if _adjacent(advanced) else 0
        sizes = [1 if e is None else e[1] for e in found]  # type: ignore[index]
        self.rest = tuple([n for w, n in enumerate(sizes) if w not in self.dims])
        self.shape: Shape = (*self.rest[: self.at], *self.block, *self.rest[self.at :])

    @property
    def rows(self) -> int:
        """The number of positions that the broadcast index arrays select."""
        return math.prod(self.block)

    @property
    def in_order(self) -> tuple[Any, ...]:
        """The index ``numpy`` with its arrays in row-major order."""
        return tuple([np.asarray(e, order="C") if isinstance(e, np.ndarray) else e for e in self.numpy])

    def check(self) -> None:
        """Checks the bounds of the integers, and of the index arrays unless they select nothing, as NumPy does.

        Raises:
            IndexingError: an index is out of bounds.
        """
        for walker in self._walkers:
            if self.rows or not walker.shape:
                walker.indices()

    @functools.cached_property
    def arrays(self) -> list[HostArray]:
        """For each dimension in ``dims`` a flat array of non-negative indices, one for each selected position."""
        if not self.rows:
            self.check()
            return [np.zeros(0, np.intp) for _ in self.dims]
        walks = [array for w in self._walkers for array in w.indices()]
        return [np.ascontiguousarray(np.broadcast_to(w, self.block)).ravel() for w in walks]


class _IndexArray:
    """One index array, mask or integer of an advanced index.

    Attributes:
        number: the position in the basic index of the first entry that it indexes.
        array: the host array.
        d: the first dimension of the tensor that it indexes.
        count: the number of dimensions that it indexes.
        shape: the shape of the equivalent integer arrays.
        size: the size of the dimension that it indexes; 1 for masks, where it is not used.
    """

    def __init__(self, number: int, array: HostArray, d: int, shape: Shape) -> None:
        self.number = number
        self.array = array
        self.d = d
        mask = _is_mask(array)
        self.count = max(array.ndim, 1) if mask else 1
        self.shape: Shape = (int(np.count_nonzero(array)),) if mask else array.shape
        self.size = 1 if mask else shape[d]

    def indices(self) -> Sequence[HostArray]:
        """Returns one array of non-negative indices for each dimension that it indexes.

        Raises:
            IndexingError: an index is out of bounds.
        """
        array = self.array
        if _is_mask(array):
            return array.nonzero() if array.ndim else (np.zeros(int(array), np.intp),)
        wrong = (array < -self.size) | (array >= self.size)
        if wrong.any():
            raise IndexingError(
                f"index {int(array[wrong].flat[0])} is out of bounds for axis {self.d} with size {self.size}"
            )
        array = array.astype(np.intp)  # Small dtypes do not hold the size of a large dimension.
        return (np.where(array < 0, array + self.size, array),)


def _is_mask(entry: Any) -> TypeGuard[HostArray]:
    return isinstance(entry, np.ndarray) and entry.dtype.kind == "b"


def _entry(entry: Any) -> Any:
    """Converts one entry of an index: arrays become host arrays, integers Python ints; other entries are kept."""
    if not is_array(entry):
        if entry is None or entry is Ellipsis or isinstance(entry, slice):
            return entry
        if isinstance(entry, (int, np.integer)):
            return int(entry)
        return int(entry.__index__()) if hasattr(entry, "__index__") else canonical(entry, (1,))
    if isinstance(entry, (list, tuple, range)):
        try:
            array = np.asarray(entry)
        except ValueError as error:
            raise ShapeError(f"nested lists of different lengths as an index ({error})") from None
        array = array.astype(np.intp) if array.size == 0 else array
    else:
        x = as_operand(entry if not isinstance(entry, bool) else np.bool_(entry), "getitem")
        if isinstance(x, ShardedTensor) and is_recording():
            copied = not x._aval.backend.on_host
            to_host_movement(x._aval).announce(x.dtype.itemsize, copied, "getitem")
        with reading((x,)):  # The index may alias the tensor that it selects elements of, which may be written.
            array = transfer.gather(x, "getitem")
            array = lent(x, array) if isinstance(x, ShardedTensor) else array
    if array.dtype.kind not in "biu":
        raise IndexingError(f"an index array of dtype {array.dtype}; wanted integers or bools")
    return array


def _width(entry: Any) -> int:
    """Returns the number of dimensions that an entry of an index consumes."""
    if entry is None or entry is Ellipsis:
        return 0
    return entry.ndim if _is_mask(entry) else 1


def _positions(basic: Sequence[Any], ndim: int) -> list[int]:
    """Returns for each entry of a basic index of slices and None the first dimension of the result that it gives."""
    rest = ndim - sum(1 for e in basic if e is not None and e is not Ellipsis)
    widths = [rest if e is Ellipsis else 1 for e in basic]
    return [sum(widths[:i]) for i in range(len(basic))]


def _adjacent(advanced: Sequence[bool]) -> bool:
    """Whether arrays and integers are adjacent entries of the index."""
    first = advanced.index(True)
    last = len(advanced) - 1 - advanced[::-1].index(True)
    return all(advanced[first : last + 1])


# -- reading ---------------------------------------------------------------------------------------


@implements(gather, "infer")
def _infer_gather(x: Any, index: Any) -> Aval:
    x = x if isinstance(x, ShardedTensor) else call("asarray", x)
    chosen = AdvancedIndex(known_index(index), x.shape)
    chosen.check()
    value = _layout(x._aval, chosen)
    if is_recording():
        _source(x, chosen, value.grid)[0].announce(x.dtype.itemsize, False, "getitem")
    return value


def known_index(index: Any) -> Any:
    """Returns an index with zeros in place of the elements of integer tensors of which only the aval is known.

    Raises:
        ConcretizationError: transfers are recorded, which depend on these elements.
    """
    if isinstance(index, tuple):
        return tuple(map(known_index, index))
    if not lacks_elements(index) or index.dtype.kind not in "iu":
        return index
    if is_recording() and index.size:
        np.asarray(index)
    return np.broadcast_to(0, index.shape)


@implements(gather, "algorithm")
def _gather(x: Any, index: Any) -> ShardedTensor:
    if not isinstance(x, ShardedTensor):
        x = call("asarray", x)
    if (indices := indices_on_device(x, index)) is not None:
        return _selected_on_device(x, indices)
    return _selected(x, AdvancedIndex(index, x.shape))


def _selected_on_device(x: ShardedTensor, indices: tuple[Any, ...]) -> ShardedTensor:
    """Returns the elements of a tensor in one memory that an index with arrays of that memory selects."""
    backend, device = x._aval.backend, x.sharding.mesh.flat[0]
    # The layout depends on the shapes of the index arrays only; those have no elements to be read.
    shapes = [np.broadcast_to(np.intp(0), e.shape) if backend.is_array(e) else e for e in indices]
    AdvancedIndex(
        tuple([e[tuple([slice(1)] * e.ndim)] if isinstance(e, np.ndarray) else e for e in shapes]), x.shape
    ).check()
    value = _layout(x._aval, AdvancedIndex(tuple(shapes), x.shape))
    with backend.on(device), indexing_errors():
        selected = whole_array(x, "getitem")[indices]
        return tensor(value, Storage((backend.contiguous(selected),)))


def _selected(x: ShardedTensor, chosen: AdvancedIndex) -> ShardedTensor:
    value = _layout(x._aval, chosen)
    shared = value.backend.on_host
    if (alone := on_one_device(x, "getitem")) is not None:
        return on_all_devices(_selected(alone, chosen), value.sharding, value.committed)
    if is_recording() or not shared:
        plan, here, arrays = _source(x, chosen, value.grid)
        if is_recording():
            plan.announce(x.dtype.itemsize, not shared, "getitem")
    if shared:
        with indexing_errors():
            return tensor(value, Storage((blockwise.select(gather_unrecorded(x, "getitem"), chosen.numpy),)))
    if value.spans:
        note(f"getitem({described(x)}, {described(chosen.numpy)})")
    rows = plan.run(local_views(here, arrays()), x.dtype)
    return tensor(value, offloaded(value, [_placed(r, value, chosen, k) for k, r in enumerate(rows)]))


def _source(
    x: ShardedTensor, chosen: AdvancedIndex, result: Grid
) -> tuple[GatherPlan, ShardedBox, Callable[[], Sequence[Any]]]:
    """Returns the plan that sends the selected elements to the devices of the result, the boxes of the source arrays
    from which they are sent, and a function that returns these arrays.
    """
    grid, arrays = operand_shards(x)
    here = aligned(grid, box_of(chosen.basic, x.shape))
    wants = [_want(result, k, chosen) for k in range(len(result.devices))]
    return GatherPlan(here.grid, chosen.dims, wants), here, arrays


@contextlib.contextmanager
def indexing_errors() -> Iterator[None]:
    """Converts NumPy's IndexError to `IndexingError` in the ``with`` block."""
    try:
        yield
    except IndexError as error:
        raise error if isinstance(error, IndexingError) else IndexingError(str(error)) from None


def _layout(x: Aval, chosen: AdvancedIndex) -> Aval:
    """Returns the aval of the result.

    The first dimension of the block is split by the mesh axes that split the indexed dimensions; the other dimensions
    keep their mesh axes.
    """
    sharding = _sharding(x, chosen.basic, chosen.dims, len(chosen.block), chosen.at)
    return aval(chosen.shape, x.dtype, sharding, x.committed)


@functools.lru_cache(1024)
def _sharding(x: Aval, basic: Index, dims: tuple[int, ...], count: int, at: int) -> NamedSharding:
    """Returns the sharding of the result: see `_layout` and `AdvancedIndex`; the block has ``count`` dimensions."""
    chains = whole_view_spec(x.shape, x.sharding.spec.chains_of(x.ndim)).at(basic).chains
    block: list[Chain] = [()] * count
    if block:
        block[0] = tuple(itertools.chain.from_iterable(chains[d] for d in dims))
    rest = [c for d, c in enumerate(chains) if d not in dims]
    return x.sharding.with_spec(P(*rest[:at], *block, *rest[at:]))


def _want(grid: Grid, k: int, chosen: AdvancedIndex) -> GatherRequest:
    """Returns the request of the k-th device: its rows of the block and its ranges of the other dimensions."""
    box, n = grid.box(k), len(chosen.block)
    inner = math.prod(chosen.block[1:])
    begin, end = (e * inner for e in box[chosen.at]) if n else (0, 1)
    rest = (*box[: chosen.at], *box[chosen.at + n :])
    return GatherRequest(grid.devices[k], end - begin, [a[begin:end] for a in chosen.arrays], rest)


def _placed(rows: Any, value: Aval, chosen: AdvancedIndex, k: int) -> Any:
    """Reshapes and transposes the gathered elements of the k-th device, rows first, to its shard of the result."""
    backend, device = value.backend, value.grid.devices[k]
    shape, n = value.grid.shape(k), len(chosen.block)
    block, rest = shape[chosen.at : chosen.at + n], (*shape[: chosen.at], *shape[chosen.at + n :])
    axes = [*range(n, n + chosen.at), *range(n), *range(n + chosen.at, n + len(rest))]
    with backend.on(device):
        array = backend.xp.reshape(rows, (*block, *rest))
        return array if not chosen.at else backend.contiguous(backend.xp.permute_dims(array, tuple(axes)))
