"""Counts of the elements of host arrays in bins of the same width: those of `numpy.histogram`.

NumPy computes a number for each element, its position in the range, and compares the element with both edges of the bin
that this number names, because the number is rounded. Here the position is an integer, whose upper bits are the bin. It
never decreases where elements increase. So an element is in the bin that its position names if the position is farther
from those of both edges than the positions of edges are from where they should be. Few elements are nearer to an edge,
and only these are compared with it.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from shardtensor.host.threads import each

_COUNTED_FROM = 1 << 17
"""Elements from which counting by positions saves time."""

_BLOCK = 1 << 16
"""Elements of a block, whose positions stay in the cache until they are counted."""

_PART = 1 << 18
"""Elements of a part that one thread counts."""

_BINS = 1 << 13
"""The most bins, which are counted in less time than the elements of a block."""

_BITS = 16
"""Bits of a position that say where in its bin it is."""

_SPARSE = 16
"""The quotient of the elements of a block and those near an edge from which only the latter are compared."""

_NEAR = 16
"""The least quotient of the positions in a bin and those that are near an edge."""


def counts_in_bins(x: Any, count: int, first: Any, last: Any) -> Any:
    """Returns the counts of the elements of an array of one dimension in bins of the same width, as NumPy does for the
    range from ``first`` to ``last``; None where NumPy takes no longer, or where positions are too inexact.
    """
    if x.size < _COUNTED_FROM or count > _BINS or x.dtype.kind not in "iuf":
        return None
    bins = _bins(x, count, first, last)
    if bins is None:
        return None
    counts: dict[int, Any] = {}

    def work(k: int) -> None:
        counts[k] = bins.counts(x[k * _PART : (k + 1) * _PART])

    each(work, -(-x.size // _PART))
    return np.sum(list(counts.values()), axis=0)


class _Bins(NamedTuple):
    """The bins of a range.

    Attributes:
        ends: the least and the greatest element that is counted.
        edges: the edges.
        origin: the number that has position 0.
        scale: the positions of a unit.
        margin: the distance from an edge below which positions are near. It is the position of the first edge.
    """

    ends: tuple[Any, Any]
    edges: Any
    origin: Any
    scale: Any
    margin: int

    def counts(self, x: Any) -> Any:
        """Returns the counts of a part, block by block."""
        count, most = len(self.edges) - 1, min(_BLOCK, x.size)
        numbers, positions = np.empty(most, self.origin.dtype), np.empty(most, np.int32)
        near, bins = np.empty(most, np.bool_), np.empty(most, np.intp)
        counts, compared = np.zeros(count + 1, np.intp), []  # Of the last edge alone, too.
        for begin in range(0, x.size, most):
            some = self._inside(x[begin : begin + most])
            n = some.size
            np.subtract(some, self.origin, out=numbers[:n], casting="unsafe", dtype=numbers.dtype)
            np.multiply(numbers[:n], self.scale, out=numbers[:n])
            np.copyto(positions[:n], numbers[:n], casting="unsafe")
            np.right_shift(positions[:n], _BITS, out=bins[:n])
            np.bitwise_and(positions[:n], (1 << _BITS) - 1, out=positions[:n])
            np.less(positions[:n], 2 * self.margin, out=near[:n])
            number = np.count_nonzero(near[:n])
            if number * _SPARSE > n:
                bins[:n] -= self._is_below(some, bins[:n])
            elif number:
                at = np.flatnonzero(near[:n])
                compared.append((some.take(at), bins.take(at)))
            counts += np.bincount(bins[:n], minlength=count + 1)
        if compared:
            some, edge = [np.concatenate(arrays) for arrays in zip(*compared, strict=True)]
            below = edge[self._is_below(some, edge)]
            counts -= np.bincount(below, minlength=count + 1)
            counts += np.bincount(below - 1, minlength=count + 1)
        counts[-2] += counts[-1]
        return counts[:-1]

    def _is_below(self, x: Any, edge: Any) -> Any:
        """Returns which elements are less than the edges next to them."""
        return x.astype(self.edges.dtype, copy=False) < self.edges.take(edge)

    def _inside(self, x: Any) -> Any:
        """Returns the elements of a block that are in the range, as NumPy compares them: NaN is not."""
        first, last = self.ends
        if np.greater_equal(x.min(), first) and np.less_equal(x.max(), last):
            return x
        inside = x >= first
        inside &= x <= last
        return x.take(np.flatnonzero(inside))  # in half the time of a mask of about as many elements


def _bins(x: Any, count: int, first: Any, last: Any) -> _Bins | None:
    """Returns the bins; None if the positions of the edges, or NumPy's numbers of them, are too inexact."""
    span = float(last) - float(first)
    if not 0 < span < math.inf:
        return None
    is_exact = x.dtype.itemsize <= (2 if x.dtype.kind in "iu" else 4)
    wide, steps = np.dtype(np.float32 if is_exact else np.float64), np.arange(count + 1)
    with np.errstate(all="ignore"):
        edges = np.histogram_bin_edges(x[:0], count, (first, last))
        # Where NumPy's number is off by half a bin or less, it finds the bin by comparing.
        if not np.abs(_numpys_numbers(edges, first, last) - steps).max() <= 0.5:
            return None
        scale = wide.type(count * float(1 << _BITS) / span)

        def bins(margin: int) -> tuple[_Bins, Any]:
            origin = wide.type(float(first) - margin * span / (count << _BITS))
            positions = (edges.astype(wide) - origin) * scale
            farthest = np.abs(positions.astype(np.float64) - margin - (steps << _BITS)).max()
            return _Bins((first, last), edges, origin, scale, margin), farthest

        _, farthest = bins(0)
        if not farthest * 4 * _NEAR < 1 << _BITS:
            return None
        margin = int(2 * farthest + 2 * np.spacing(wide.type(count << _BITS))) + 2
        result, farthest = bins(margin)
        return result if farthest < margin else None


def _numpys_numbers(edges: Any, first: Any, last: Any) -> Any:
    """Returns the numbers of edges, the first one's 0 and the last one's the number of bins, as NumPy rounds them."""
    kind = np.result_type(first, last)
    ends = [np.asarray(end, kind) for end in (last, first)]
    width = np.subtract(*ends, casting="unsafe", dtype=np.dtype(f"u{kind.itemsize}") if kind.kind == "i" else kind)
    return np.subtract(edges, first, dtype=np.result_type(edges, first)) / width * (len(edges) - 1)
