"""Elements of the lines of an array, at indices that differ from line to line: NumPy's `take_along_axis`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from shardtensor.core import call, implements, operator
from shardtensor.errors import IndexingError, ShapeError
from shardtensor.functions.algorithms.distributed import Whole, distributed
from shardtensor.functions.algorithms.requests import check_bounds, take_along
from shardtensor.functions.algorithms.shards import MeshCommunicator, Shards
from shardtensor.functions.standard.indexing import check_integers
from shardtensor.functions.standard.manipulation import reshape
from shardtensor.host.units import counted
from shardtensor.sharding.layout import Shape
from shardtensor.sharding.rules import normalize_axis
from shardtensor.sharding.shard_context import ShardContext
from shardtensor.tensor.operands import shape_of
from shardtensor.tensor.tensor import ArrayLike, ShardedTensor
from shardtensor.tensor.value import Aval, aval

_DERIVATIVES = "of_indexing"


def _take_along_rule(shapes: Sequence[Shape], *, axis: int = -1) -> str:
    ndim = len(shapes[0])
    if len(shapes[1]) != ndim:
        raise ShapeError(f"x has {counted(ndim, 'dimension')} and indices have {len(shapes[1])}; wanted as many")
    along = normalize_axis(axis, ndim)
    # The names that begin with dots broadcast.
    names = [f"...{ndim - d}" for d in range(ndim)]
    x, indices = [[own if d == along else name for d, name in enumerate(names)] for own in ("k!", "i")]
    return f"{' '.join(x)}, {' '.join(indices)} -> {' '.join(indices)}"


@operator(_take_along_rule, operands=("x", "indices"))
def take_along_axis(x: ArrayLike, indices: ArrayLike, /, *, axis: int | None = -1) -> ShardedTensor:
    """Returns for each line of x along ``axis`` the elements at the indices in the same line of ``indices``.

    x and ``indices`` have the same number of dimensions, and broadcast except along ``axis``. The result has the shape
    of ``indices``, broadcast, and x's dtype. Its sharding is that of the operands. Where ``axis`` of x is split, it is
    x's: each device requests the elements that it lacks of the devices that hold them (see
    `shardtensor.functions.algorithms.requests`); up to 64 KiB of both, the first device takes all of them.

    Args:
        x: a tensor or a host array.
        indices: integers; negative ones count from the end.
        axis: the dimension; None takes elements of the flattened x, as in NumPy, with ``indices`` of one dimension.

    Raises:
        AxisError: x has no such axis.
        IndexingError: an index is out of bounds.
        ArgumentTypeError: ``indices`` are not integers.
        ShapeError: the numbers of dimensions differ, or other dimensions than ``axis`` do not broadcast.

    >>> x = st.asarray([[3, 1, 2], [6, 5, 4]])
    >>> st.take_along_axis(x, st.argsort(x, axis=1), axis=1).tolist()
    [[1, 2, 3], [4, 5, 6]]
    """


implements(take_along_axis, "small")(np.take_along_axis)


@implements(take_along_axis, "composite")
def _take_along_flat(x: Any, indices: Any, axis: int | None) -> Any:
    check_integers(indices)
    if axis is None:
        return take_along_axis(reshape(x, (-1,)), indices, axis=0)
    shape, index_shape = shape_of(x), shape_of(indices)
    if not isinstance(x, ShardedTensor) or len(index_shape) != len(shape):
        return NotImplemented
    along = normalize_axis(axis, x.ndim)
    if x._aval.grid.counts[along] == 1:
        return NotImplemented
    lines = [(*sizes[:along], 1, *sizes[along + 1 :]) for sizes in (shape, index_shape)]
    try:
        rest = np.broadcast_shapes(*lines)
    except ValueError:
        return NotImplemented  # Its rule raises the error.
    sizes = [(*rest[:along], n, *rest[along + 1 :]) for n in (shape[along], index_shape[along])]
    operands = [
        a if shape_of(a) == size else call("broadcast_to", a, size) for a, size in zip((x, indices), sizes, strict=True)
    ]
    return take_along_split(*operands, axis=along)


@operator(operands=("x", "indices"), error_name="take_along_axis", tags=("internal",))
def take_along_split(x: ArrayLike, indices: ArrayLike, /, *, axis: int) -> ShardedTensor:
    """Returns `take_along_axis` of arrays of the same shape in other dimensions, in x's sharding.

    >>> from shardtensor.functions.standard.take_along import take_along_split
    >>> take_along_split(st.asarray([3, 1, 2]), st.asarray([2, 0]), axis=0).tolist()
    [2, 3]
    """


def _taken_of_whole(value: Aval, indices: Aval, *, axis: int) -> Whole:
    result = aval(indices.shape, value.dtype, value.sharding, value.committed)
    return Whole(result, lambda xp, x, indices: _take_along(xp, None, x, indices, axis=axis), (axis,))


@distributed(take_along_split, whole=_taken_of_whole, messages="by elements")
def _take_along_split(x: Shards, indices: Shards, along: Callable[[int], MeshCommunicator], *, axis: int) -> Shards:
    return take_along(x, indices, along, axis)


@implements(take_along_axis, "kernel")
def _take_along(xp: Any, context: ShardContext | None, x: Any, indices: Any, *, axis: int) -> Any:
    size = x.shape[axis]
    if xp is np:
        try:
            return np.take_along_axis(x, indices, axis=axis)
        except IndexError as error:
            raise IndexingError(str(error)) from None
    check_bounds(xp, indices, axis, size)
    return xp.take_along_axis(x, indices, axis=axis)
