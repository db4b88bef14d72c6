"""The order in which NumPy adds the elements of a part of an array.

NumPy's loops join dimensions whose elements are consecutive in memory, and add the elements of the innermost dimension
in pairs, but those of the others one after the other. The same elements therefore have sums with other last bits in an
array of their own than in the array that they are a part of. Here a part is laid out as it would be in one dense array.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from shardtensor.host import memory_pool

Box = Sequence[tuple[int, int]]
HostArray = np.ndarray[Any, Any]


def memory_order(x: HostArray) -> list[int]:
    """Returns the dimensions of an array in their order in memory, the outermost first."""
    # Where a dimension of one element has the stride of another one, it is inside that one.
    return sorted(range(x.ndim), key=lambda d: (-abs(x.strides[d]), x.shape[d] == 1))


def empty_like(x: HostArray) -> HostArray:
    """Returns an uninitialized array without gaps whose dimensions have the order in memory of those of ``x``."""
    order = memory_order(x)
    dense = memory_pool.empty(tuple([x.shape[d] for d in order]), x.dtype)
    return dense.transpose([order.index(d) for d in range(x.ndim)])


def may_differ(box: Box, shape: Sequence[int], axes: Sequence[int]) -> bool:
    """Whether the order in which a part is added can depend on whether it is in an array of its own.

    Args:
        box: begin and end of the part in each dimension of the whole array.
        shape: the shape of the whole array.
        axes: the dimensions along which elements are added.
    """
    long = [d for d in axes if box[d][1] - box[d][0] > 1]
    for d, (begin, end) in enumerate(box):
        if end - begin < shape[d] and (len(long) > 1 if d in axes else end - begin == 1 and bool(long)):
            return True
    return False


def as_part(x: HostArray, box: Box, shape: Sequence[int], axes: Sequence[int]) -> tuple[HostArray, tuple[int, ...]]:
    """Returns a part of an array in the memory layout that it has within one dense array.

    Args:
        x: the part, in an array of its own or a larger one, whose dimensions have the same order in memory.
        box, shape, axes: see `may_differ`.

    Returns:
        ``x``, or a copy in which NumPy joins only the dimensions that it joins in the whole array; and the dimensions
        that have two equal elements in the copy, in place of one. There NumPy's innermost loop is along a dimension
        that is kept, of which the part has one element.
    """
    order = memory_order(x)
    gaps: list[int] = []
    twice: list[int] = []
    outer, apart = -1, -1  # The last long dimension if elements are added along it; a split one of one element since.
    added = False
    for d in order:
        size = x.shape[d]
        split = size < shape[d]
        if size == 1:
            if split and d not in axes and added:
                twice.append(d)
            if split:
                apart = d
            continue
        if d in axes:
            consecutive = outer >= 0 and x.strides[d] and x.strides[outer] == size * x.strides[d]
            if consecutive and (split or apart >= 0):
                gaps.append(d if split else apart)
            added = True
        outer, apart = d if d in axes else -1, -1
    gaps = [d for d in gaps if d not in twice]  # Two elements are a gap, too.
    if not (gaps or twice) or not x.size:
        return x, ()
    sizes = [2 if d in twice else x.shape[d] for d in order]
    dense = memory_pool.empty(tuple([n + (d in gaps) for d, n in zip(order, sizes, strict=True)]), x.dtype)
    part = dense[tuple([slice(n) for n in sizes])].transpose([order.index(d) for d in range(x.ndim)])
    part[...] = x
    return part, tuple(twice)
