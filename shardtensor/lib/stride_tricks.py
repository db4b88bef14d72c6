"""Sliding windows, as in `numpy.lib.stride_tricks`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shardtensor.errors import ArgumentError, ArgumentTypeError, ShapeError
from shardtensor.functions.placement.conversion import asarray
from shardtensor.functions.standard.creation import empty
from shardtensor.functions.standard.joining import stack
from shardtensor.host.units import counted
from shardtensor.sequences import as_tuple
from shardtensor.sharding.layout import checked_shape
from shardtensor.sharding.rules import normalize_axis
from shardtensor.tensor.operands import host_array
from shardtensor.tensor.tensor import ArrayLike, ShardedTensor

__all__ = ["sliding_window_view"]


def sliding_window_view(
    x: ArrayLike,
    window_shape: int | Sequence[int],
    axis: int | Sequence[int] | None = None,
    *,
    subok: bool = False,
    writeable: bool = False,
) -> ShardedTensor:
    """Returns the windows of a shape at all positions of ``x``, along new dimensions at the end.

    Element ``[i, j]`` of the windows of a vector is ``x[i + j]``. In contrast to NumPy, the result is a copy, since the
    windows at the boundary of a shard contain elements of the next one: the result is sharded as the slices of ``x``,
    and each device receives the elements by which its windows exceed its shard.

    Args:
        x: a tensor or an array.
        window_shape: the size of the window along each of the axes.
        axis: the dimensions along which the window slides, any of them more than once; by default all, in order.
        subok: must be False; there are no subclasses.
        writeable: must be False, since writes to the result would not be visible in ``x``.

    Returns:
        A tensor with the dimensions of ``x``, each smaller by the size of the window less one, and those of the window.

    Raises:
        ArgumentTypeError: ``subok`` or ``writeable`` is set, or a size is no integer.
        ArgumentError: the numbers of sizes and axes differ.
        AxisError: ``x`` has no such axis.
        ShapeError: a size is negative, or larger than the dimension.

    >>> st.lib.stride_tricks.sliding_window_view(st.arange(5), 3).tolist()
    [[0, 1, 2], [1, 2, 3], [2, 3, 4]]
    """
    if subok or writeable:
        raise ArgumentTypeError("sliding_window_view: the windows are a copy; leave out subok and writeable")
    array: Any = host_array(x, "sliding_window_view")
    sizes, ndim = checked_shape(as_tuple(window_shape), "sliding_window_view"), array.ndim
    axes = range(ndim) if axis is None else (axis,) if isinstance(axis, int) else tuple(axis)
    if len(sizes) != len(axes):
        raise ArgumentError(
            f"sliding_window_view: {counted(len(sizes), 'window size')} for {counted(len(axes), 'axis', 'axes')}; "
            "wanted one for each"
        )
    for a, size in zip(axes, sizes, strict=True):
        array = _windows(array, normalize_axis(a, ndim), size)
    return array if isinstance(array, ShardedTensor) else asarray(array)


def _windows(x: Any, axis: int, size: int) -> ShardedTensor:
    """Returns the windows along one axis, as the last dimension."""
    count = x.shape[axis] - size + 1
    if count < 1:
        raise ShapeError(f"sliding_window_view: dimension {axis} has size {x.shape[axis]}; the window has {size}")
    if not size:
        shape = (*x.shape[:axis], count, *x.shape[axis + 1 :], 0)
        return empty(shape, dtype=x.dtype, device=x.device if isinstance(x, ShardedTensor) else None)
    before = (slice(None),) * axis
    return stack([x[(*before, slice(k, k + count))] for k in range(size)], axis=-1)
