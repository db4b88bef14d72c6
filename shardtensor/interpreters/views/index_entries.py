"""Indices with arrays of integers and masks, in canonical form."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeGuard

import numpy as np

from shardtensor.backend.device import HostArray
from shardtensor.communication import transfer
from shardtensor.errors import IndexingError, ShapeError
from shardtensor.host.fork import cached_property
from shardtensor.host.units import counted
from shardtensor.sharding.index import Entry, Index, canonical, is_array, several_ellipses, span_of
from shardtensor.sharding.layout import Shape
from shardtensor.tensor.operands import as_operand
from shardtensor.tensor.ownership import lent, reading
from shardtensor.tensor.tensor import ShardedTensor


def unraveled(positions: HostArray, shape: Shape) -> tuple[HostArray, ...]:
    """Returns positions in a flattened array as one index array for each dimension.

    NumPy 2.4 gives wrong ones for more than 8192 positions in several dimensions of which the last has size 1.
    """
    coordinates = np.unravel_index(positions.reshape(-1), shape)
    return tuple([at.reshape(positions.shape) for at in coordinates])


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
        entries = list(map(_entry, index if isinstance(index, tuple) else (index,)))
        widths = list(map(_width, entries))
        taken = sum(widths)
        if taken > len(shape):
            raise IndexingError(
                f"{counted(taken, 'index', 'indices')} for a tensor of {counted(len(shape), 'dimension')}, shape "
                f"{shape}"
            )
        basic: list[Entry] = []
        whole: list[Entry] = [(0, n, 1) for n in shape]
        dims: list[int] = []
        self._walkers: list[_IndexArray] = []
        numbers, shapes = [], []
        skipped: int | None = None  # the number of dimensions that an ellipsis stands for
        d, at = 0, 0  # the dimensions of the tensor, and of the basic index's result, that come next
        for number, (entry, width) in enumerate(zip(entries, widths, strict=True)):
            if entry is Ellipsis:
                if skipped is not None:
                    raise several_ellipses()
                skipped = len(shape) - taken
                basic += whole[d : d + skipped]
                d += skipped
                at += skipped
            elif isinstance(entry, (int, np.ndarray)):
                if _is_mask(entry) and entry.shape != (sizes := shape[d : d + width]):
                    if any(n not in (0, size) for n, size in zip(entry.shape, sizes, strict=True)):
                        raise IndexingError(
                            f"a mask of shape {entry.shape} at dimension {d} of a tensor of shape {shape}; wanted "
                            f"{sizes}"
                        )
                    # The array API and NumPy accept an empty mask for dimensions of any size.
                    entries[number] = entry = np.broadcast_to(np.False_, sizes)
                walker = _IndexArray(entry, d, shape)
                self._walkers.append(walker)
                numbers.append(number)
                shapes.append(walker.shape)
                dims += range(at, at + walker.count)
                # A 0-d mask adds a dimension of size 1 and indexes it.
                basic += whole[d : d + width] if width else [None]
                d += width
                at += walker.count
            else:
                basic.append(None if entry is None else span_of(entry, shape[d], d))
                d += width
                at += 1
        self.is_mask = len(entries) == 1 and self._walkers[0].is_mask
        self.numpy = tuple(entries)
        self.basic = Index((*basic, *whole[d:]))
        self.dims = tuple(dims)
        try:
            self.block: Shape = shapes[0] if len(shapes) == 1 else np.broadcast_shapes(*shapes)
        except ValueError:
            raise IndexingError(
                f"index arrays of shapes {', '.join(map(str, shapes))} do not broadcast together"
            ) from None
        are_adjacent = numbers[-1] - numbers[0] < len(numbers)
        self.at = dims[0] if are_adjacent else 0
        self.rest = tuple([1 if e is None else e[1] for n, e in enumerate(self.basic) if n not in dims])  # type: ignore[index]
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

    @cached_property
    def arrays(self) -> list[HostArray]:
        """For each dimension in ``dims`` a flat array of non-negative indices, one for each selected position."""
        if not self.rows:
            self.check()
            return [np.zeros(0, np.intp) for _ in self.dims]
        walks = [array for w in self._walkers for array in w.indices()]
        return [np.ravel(w if w.shape == self.block else np.broadcast_to(w, self.block)) for w in walks]


class _IndexArray:
    """One index array, mask or integer of an advanced index.

    Attributes:
        array: the host array.
        is_mask: whether it is a mask.
        d: the first dimension of the tensor that it indexes.
        count: the number of dimensions that it indexes.
        shape: the shape of the equivalent integer arrays.
        size: the size of the dimension that it indexes; 1 for masks, where it is not used.
    """

    def __init__(self, entry: Any, d: int, shape: Shape) -> None:
        self.array = array = np.asarray(entry)
        self.d = d
        self.is_mask = array.dtype.kind == "b"
        self.count = max(array.ndim, 1) if self.is_mask else 1
        self.shape: Shape = (int(np.count_nonzero(array)),) if self.is_mask else array.shape
        self.size = 1 if self.is_mask else shape[d]

    def indices(self) -> Sequence[HostArray]:
        """Returns one array of non-negative indices for each dimension that it indexes.

        Raises:
            IndexingError: an index is out of bounds.
        """
        array = self.array
        if self.is_mask:
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
    array: Any
    if type(entry) is np.ndarray:
        array = entry
    elif not is_array(entry):
        if entry is None or entry is Ellipsis or isinstance(entry, slice):
            return entry
        if isinstance(entry, (int, np.integer)):
            return int(entry)
        return int(entry.__index__()) if hasattr(entry, "__index__") else canonical(entry, (1,))
    elif isinstance(entry, (list, tuple, range)):
        try:
            array = np.asarray(entry)
        except ValueError as error:
            raise ShapeError(f"nested lists of different lengths as an index ({error})") from None
        array = array.astype(np.intp) if array.size == 0 else array
    else:
        x = as_operand(entry if not isinstance(entry, bool) else np.bool_(entry), "getitem")
        if isinstance(x, ShardedTensor):
            transfer.announce_gather(x, "getitem")
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
