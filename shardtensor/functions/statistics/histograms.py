"""Counts of values: NumPy's histograms, and `digitize`.

Where x is sharded, each device counts the elements of its shard, and the counts are added along a fixed tree. Up to
64 KiB, the first device counts all of them. The result is replicated.
"""

from __future__ import annotations

import builtins
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from shardtensor.backend.registry import array_backend
from shardtensor.core import call, composition, implements, innermost, operator
from shardtensor.errors import ArgumentError, ArgumentTypeError, ShapeError
from shardtensor.functions.building.own_kernels import own_kernel
from shardtensor.functions.numpy.comparisons import array_like, iscomplexobj
from shardtensor.functions.standard.elementwise import add, divide, multiply, subtract
from shardtensor.functions.standard.manipulation import flip, reshape
from shardtensor.functions.standard.repetition import on_host
from shardtensor.functions.standard.searching import searchsorted
from shardtensor.functions.statistics.counts import counts_of_integers
from shardtensor.host.threads import each
from shardtensor.host.uniform_bins import counts_in_bins
from shardtensor.host.units import counted
from shardtensor.sharding.layout import Shape
from shardtensor.sharding.shard_context import ShardContext
from shardtensor.tensor.nested_lists import from_lists
from shardtensor.tensor.operands import dtype_of, integer_from, shape_of, truth_of
from shardtensor.tensor.tensor import ArrayLike, ShardedTensor, lacks_elements

_DERIVATIVES = "of_mathematical"


class Histogram(NamedTuple):
    """The result of `histogram`.

    Attributes:
        hist: the number of elements in each bin, the sum of their weights, or the density.
        bin_edges: the edges of the bins, one more than there are bins.
    """

    hist: Any
    bin_edges: Any


# -- histograms ------------------------------------------------------------------------------------


def _edges_rule(shapes: Sequence[Shape], **params: Any) -> tuple[str, Shape]:
    names = " ".join([f"k{d}" for d in range(len(shapes[0]))])
    return f"{names}, edges!, {names if shapes[2] else ''} -> bins", (shapes[1][0] - 1,)


def _histogram_dtype(x: Any, edges: Any, weights: Any, **params: Any) -> Any:
    return np.histogram(np.ones(1), 1, weights=None if weights is None else np.ones(1, weights.dtype))[0]


@operator(
    _edges_rule,
    operands=("x", "edges", "weights"),
    combine="sum",
    dtype=_histogram_dtype,
    error_name="histogram",
    tags=("internal", "many kernels", "unblocked"),
)
def counts_between(
    x: ArrayLike, edges: ArrayLike, weights: ArrayLike | None = None, /, *, first: Any = None, last: Any = None
) -> ShardedTensor:
    """Counts the elements of x between the edges of bins, which are in ascending order; the last bin includes both.

    Args:
        x: a tensor or a host array.
        edges: the edges, of one dimension.
        weights: numbers of x's shape that are added instead of counting, or None.
        first, last: the numbers between which NumPy makes these edges, if the bins have the same width. Their types
            decide how NumPy counts.

    >>> from shardtensor.functions.statistics.histograms import counts_between
    >>> counts_between(st.asarray([1, 2, 4]), st.asarray([0, 2, 4])).tolist()
    [1, 2]
    """


_PART = 1 << 18
"""Elements of a part of a host array that one thread counts."""

PIECE = 1 << 22
"""Elements of a device other than the host that are counted at a time."""


def _counts_of_parts(x: Any, options: Any) -> Any:
    """Returns NumPy's histogram of a long array, whose parts are counted in threads: sums of integers are exact.

    Sorting parts and searching the edges in them takes as long as NumPy's arithmetic where its sorting algorithms use
    vectors, and ten times as long on other processors.
    """
    counts: dict[int, Any] = {}

    def work(k: int) -> None:
        counts[k] = np.histogram(x[k * _PART : (k + 1) * _PART], **options)[0]

    each(work, -(-x.size // _PART))
    return np.sum(list(counts.values()), axis=0)


@implements(counts_between, "kernel")
def _counts_between(xp: Any, context: ShardContext, x: Any, edges: Any, weights: Any, *, first: Any, last: Any) -> Any:
    x = xp.reshape(x, (-1,))
    weights = None if weights is None else xp.reshape(weights, (-1,))
    if xp is np:
        if weights is None and first is not None:
            counts = counts_in_bins(x, len(edges) - 1, first, last)
            if counts is not None:
                return counts
        # The outer edges, which are rounded to their dtype, would not give the same edges again.
        options: Any = {"bins": edges} if first is None else {"bins": len(edges) - 1, "range": (first, last)}
        if weights is None and x.size >= 2 * _PART:
            return _counts_of_parts(x, options)
        return np.histogram(x, **options, weights=weights)[0]
    count = edges.shape[0] - 1
    if not count:
        return xp.zeros((0,), dtype=context.dtype)
    if weights is None and (counts := own_kernel(xp, "histogram_counts", x, edges)) is not None:
        return counts
    total, step = None, max(PIECE, count)
    for begin in range(0, max(x.shape[0], 1), step):
        some = slice(begin, begin + step)
        piece = _counts_of_piece(xp, context, x[some], edges, None if weights is None else weights[some])
        total = piece if total is None else xp.add(total, piece)
    return total


def _counts_of_piece(xp: Any, context: ShardContext, x: Any, edges: Any, weights: Any) -> Any:
    """Returns the histogram of a few elements, for which the numbers of their bins are in memory."""
    count = edges.shape[0] - 1
    at = xp.subtract(xp.searchsorted(edges, x, side="right"), 1)
    at = xp.where(xp.equal(x, edges[-1]), count - 1, at)
    inside = xp.logical_and(xp.greater_equal(at, 0), xp.less(at, count))
    at = xp.where(inside, at, count)  # All others are counted in one more bin.
    if weights is None:
        return xp.bincount(at, None, count + 1)[:count]
    if context.dtype.kind == "c":
        sums = xp.zeros((count,), dtype=context.dtype)
        for part in (xp.real, xp.imag):  # A product with 1j would be NaN for infinities.
            part(sums)[...] = xp.bincount(at, part(weights), count + 1)[:count]
        return sums
    return xp.bincount(at, xp.asarray(weights, dtype=np.dtype("float64")), count + 1)[:count]


@operator(operands=("x", "bins", "weights"))
def histogram(
    x: ArrayLike,
    /,
    bins: Any = 10,
    range: Iterable[float] | None = None,
    density: bool | None = None,
    weights: ArrayLike | None = None,
) -> Histogram:
    """Counts the elements of x in bins.

    Args:
        x: a tensor or a host array of any shape.
        bins: the number of bins of the same width, or the edges of the bins in ascending order. A bin includes its
            first edge, and the last bin both.
        range: the first and the last edge of bins of the same width; by default the least and the greatest element.
        density: whether the counts are divided by their sum and by the widths of the bins.
        weights: numbers of x's shape that are added instead of counting.

    Returns:
        The counts, which are replicated, and the edges, which are placed as by `st.asarray`. Counts have dtype int64,
        or the dtype of the weights; densities have dtype float64.

    Raises:
        ArgumentError: the edges are not in ascending order, or ``bins`` or ``range`` is not valid.
        ShapeError: ``weights`` has another shape than x, or the edges do not have one dimension.
        ConcretizationError: the range depends on elements that are not known, and the counts are computed later, as in
            `jit`.

    >>> counts, edges = st.histogram(st.asarray([1.0, 2.0, 2.5, 4.0]), bins=3)
    >>> counts.tolist(), edges.tolist()
    ([1, 2, 1], [1.0, 2.0, 3.0, 4.0])
    """


@implements(histogram, "small")
def _histogram_on_host(x: Any, bins: Any, weights: Any, range: Any, density: Any) -> Any:
    return NotImplemented if weights is not None else np.histogram(x, bins, range, density)


@implements(histogram, "composite")
def _histogram(x: Any, bins: Any, weights: Any, range: Any, density: Any) -> Histogram:
    if isinstance(bins, str):
        raise ArgumentError(_ESTIMATED.format(f"bins={bins!r}", repr(bins)))
    if weights is not None and shape_of(weights) != shape_of(x):
        raise ShapeError(f"weights has shape {shape_of(weights)}; wanted x's shape, {shape_of(x)}")
    if dtype_of(x).kind == "b":
        x = call("astype", x, np.uint8)
    x = x if shape_of(x) else reshape(x, (1,))
    weights = weights if weights is None or len(shape_of(weights)) else reshape(weights, (1,))
    bins = from_lists(bins, "histogram") if isinstance(bins, (list, tuple)) else bins
    ends, edges = (None, bins) if np.ndim(bins) else _uniform_edges(x, bins, range)
    if ends is None:
        known = np.asarray(edges)
        if known.ndim != 1:
            raise ShapeError(f"bins has {counted(known.ndim, 'dimension')}; wanted a number, or edges in one dimension")
        if np.any(known[:-1] > known[1:]):
            raise ArgumentError("bins are edges that do not increase; wanted them in ascending order")
        edges = known if not isinstance(edges, ShardedTensor) and not array_backend(edges) else edges
    first, last = ends or (None, None)
    counts = counts_between(x, edges, weights, first=first, last=last)
    if truth_of(density, "density"):
        widths = np.diff(edges) if isinstance(edges, np.ndarray) else call("diff", edges)
        widths = call("astype", widths, np.float64)
        counts = divide(divide(counts, widths), call("sum", counts))
    return Histogram(counts, call("asarray", edges) if isinstance(edges, np.ndarray) else edges)


_ESTIMATED = "{} is estimated from the whole array on the host: give np.histogram_bin_edges(np.asarray(x), {})"


def _uniform_edges(x: Any, bins: Any, range: Any) -> tuple[tuple[Any, Any], Any]:
    """Returns the ends of bins of the same width, and their edges as a host array.

    Raises:
        ArgumentError, ArgumentTypeError: as `histogram`.
    """
    count, ends = _count_and_ends(x, bins, range)
    try:
        return ends, np.histogram_bin_edges(np.empty(0, dtype_of(x)), count, ends)
    except ValueError as error:  # The bins are narrower than numbers of that size can be.
        raise ArgumentError(str(error)) from None


def _count_and_ends(x: Any, bins: Any, range: Any) -> tuple[int, tuple[Any, Any]]:
    """Returns the number of bins of the same width, and the ends of their range.

    Raises:
        ArgumentError, ArgumentTypeError: as `histogram`.
    """
    count = integer_from(1, bins, "bins", wanted="an integer, or edges")
    if count >= _MOST_BINS:
        raise ArgumentError(f"bins is {count}; wanted fewer than {_MOST_BINS}")
    first, last = _range_of(x, dtype_of(x)) if range is None else _two_numbers(range)
    if not np.isfinite(first) or not np.isfinite(last):
        raise ArgumentError(f"the range ({first}, {last}) is not finite")
    if first > last:
        raise ArgumentError(f"range is ({first}, {last}); wanted the lesser number first")
    return count, (first, last)


_MOST_BINS = 2**59
"""More edges than NumPy can make arrays of, which have eight bytes each."""


def _two_numbers(range: Any) -> tuple[Any, ...]:
    """Returns the ends of a range.

    Raises:
        ArgumentTypeError: it is not two real numbers.
    """
    try:
        first, last = range
        float(first), float(last)
    except (TypeError, ValueError):
        raise ArgumentTypeError(f"range is {range!r:.60}; wanted two numbers, the first and the last edge") from None
    return tuple([end if isinstance(end, (int, float, np.generic)) else np.asarray(end)[()] for end in (first, last)])


def _range_of(x: Any, dtype: np.dtype[Any]) -> Sequence[Any]:
    """Returns the least and the greatest element; other numbers where nothing but shapes is inferred."""
    if 0 in shape_of(x):
        return 0, 1
    ends, interpreter = [call(name, x) for name in ("min", "max")], innermost()
    if interpreter is not None and interpreter.only_infers and lacks_elements(ends[0]):
        return dtype.type(0), dtype.type(1)
    return [dtype.type(element.item()) for element in ends]


@composition()
def histogram_bin_edges(
    a: ArrayLike, bins: Any = 10, range: Iterable[float] | None = None, weights: ArrayLike | None = None
) -> ShardedTensor:
    """Returns the edges of the bins of `histogram`, for the same arguments; ``weights`` are not used.

    >>> st.histogram_bin_edges(st.asarray([1.0, 4.0]), 3).tolist()
    [1.0, 2.0, 3.0, 4.0]
    """
    array = array_like(a, "histogram_bin_edges")
    if isinstance(bins, str):
        raise ArgumentError(_ESTIMATED.format(f"histogram_bin_edges: bins={bins!r}", repr(bins)))
    edges = array_like(bins, "histogram_bin_edges") if np.ndim(bins) else _uniform_edges(array, bins, range)[1]
    return call("asarray", edges)  # type: ignore[no-any-return]


def _counted_plane(x: Any, y: Any, bins: Any = 10, range: Any = None, density: Any = None, weights: Any = None) -> Any:
    """Returns NumPy's result; NotImplemented with weights, whose sums are those of shards."""
    return np.histogram2d(x, y, bins, range, density) if weights is None else NotImplemented


def _counted_space(sample: Any, bins: Any = 10, range: Any = None, density: Any = None, weights: Any = None) -> Any:
    """Returns NumPy's result; NotImplemented with weights, whose sums are those of shards."""
    return np.histogramdd(sample, bins, range, density) if weights is None else NotImplemented


@composition(_counted_plane)
def histogram2d(
    x: ArrayLike,
    y: ArrayLike,
    bins: Any = 10,
    range: Any = None,
    density: bool | None = None,
    weights: ArrayLike | None = None,
) -> tuple[ShardedTensor, ShardedTensor, ShardedTensor]:
    """Counts points of a plane in bins: see `histogramdd`.

    Args:
        x, y: the coordinates of the points, of one dimension.
        bins: the number of bins along both axes, or the edges; or a pair of one of these for each axis.
        range: a pair of the first and the last edge for each axis, or None.
        density, weights: see `histogramdd`.

    Returns:
        The counts, whose first dimension belongs to x, and the edges along each axis.

    >>> counts, _, _ = st.histogram2d(st.asarray([0.0, 1.0, 1.0]), st.asarray([0.0, 0.0, 1.0]), 2)
    >>> counts.tolist()
    [[1.0, 0.0], [1.0, 1.0]]
    """
    columns = [array_like(a, "histogram2d") for a in (x, y)]
    if shape_of(columns[0]) != shape_of(columns[1]):
        raise ShapeError(f"histogram2d: x has shape {shape_of(columns[0])} and y {shape_of(columns[1])}")
    if _is_listed(bins) and len(bins) not in (1, 2):  # NumPy, too, takes two numbers for those along the axes.
        bins = [bins, bins]
    counts, edges = histogramdd(columns, bins, range, density, weights)
    return counts, edges[0], edges[1]


@composition(_counted_space)
def histogramdd(
    sample: Any, bins: Any = 10, range: Any = None, density: bool | None = None, weights: ArrayLike | None = None
) -> tuple[ShardedTensor, tuple[ShardedTensor, ...]]:
    """Counts points of a space in bins.

    Each device counts its points, and the counts are added along a fixed tree. The result is replicated.

    Args:
        sample: the points: an array with a row for each, or a list with the array of coordinates along each axis.
        bins: the number of bins along each axis, or the edges; or a list with one of these for each axis.
        range: for each axis the pair of the first and the last edge, or None; None for all by default.
        density: whether the sums are divided by their sum and by the volumes of the bins.
        weights: numbers for the points, which are added instead of counting.

    Returns:
        The counts, of dtype float64 and with a dimension for each axis, and a tuple with the edges along each.

    Raises:
        ArgumentError: ``bins`` or ``range`` is not valid, or there is not one for each axis.
        ShapeError: ``weights`` has another shape than one number for each point.
        ConcretizationError: see `histogram`.

    >>> counts, edges = st.histogramdd(st.asarray([[0.0, 0.0], [1.0, 1.0]]), 2)
    >>> counts.tolist(), edges[0].tolist()
    ([[1.0, 0.0], [0.0, 1.0]], [0.0, 0.5, 1.0])
    """
    columns = _columns(sample)
    if not columns:
        raise ShapeError("histogramdd: the sample has no columns; wanted one for each axis")
    each = list(bins) if _is_listed(bins) else [bins] * len(columns)
    ranges = [None] * len(columns) if range is None else list(range)
    if len(each) != len(columns) or len(ranges) != len(columns):
        raise ArgumentError(
            f"histogramdd: {counted(len(each), 'bin')} and {counted(len(ranges), 'range')} for "
            f"{counted(len(columns), 'axis', 'axes')}; wanted one for each"
        )
    if weights is not None and shape_of(weights) != shape_of(columns[0]):
        raise ShapeError(f"weights has shape {shape_of(weights)}; wanted {shape_of(columns[0])}, one for each point")
    edges = [_edges_along(*arguments) for arguments in zip(columns, each, ranges, strict=True)]
    total = _bin_of(columns[0], edges[0])
    for column, line in zip(columns[1:], edges[1:], strict=True):
        total = multiply(total, len(line) + 1)
        total = add(total, _bin_of(column, line))
    sizes = [len(line) + 1 for line in edges]
    sums = counts_of_integers(total, weights, length=math.prod(sizes))
    inner = call("getitem", reshape(sums, tuple(sizes)), (slice(1, -1),) * len(sizes))
    counts = call("astype", inner, np.float64)
    if density:
        whole = call("sum", counts)
        for d, line in enumerate(edges):
            widths = np.diff(line).astype(np.float64)
            counts = divide(counts, widths.reshape([-1 if k == d else 1 for k in builtins.range(len(edges))]))
        counts = divide(counts, whole)
    return counts, tuple([call("asarray", line) for line in edges])


def _is_listed(bins: Any) -> bool:
    """Whether bins are those of each axis, or edges; a number may be an array without dimensions."""
    return hasattr(bins, "__len__") and getattr(bins, "ndim", 1) > 0


def _columns(sample: Any) -> list[Any]:
    """Returns the coordinates of points along each axis."""
    if isinstance(sample, (list, tuple)) and sample:
        columns = [call("asarray", array_like(column, "histogramdd")) for column in sample]
        dtype = np.result_type(*map(dtype_of, columns))  # They are the columns of one array.
        return [call("astype", column, dtype, copy=False) for column in columns]
    points = call("asarray", sample)
    if points.ndim != 2:
        points = call("matrix_transpose", call("atleast_2d", points))
    return [points[:, k] for k in builtins.range(points.shape[1])]


def _edges_along(column: Any, bins: Any, range: Any) -> Any:
    """Returns the edges along one axis, as a host array."""
    if not np.ndim(bins):  # As in NumPy, the ends determine the dtype, not the coordinates, unlike in `histogram`.
        count, (first, last) = _count_and_ends(column, bins, range)
        first, last = (first - 0.5, last + 0.5) if first == last else (first, last)
        return np.linspace(first, last, count + 1)
    edges = on_host(bins)
    if edges.ndim != 1 or np.any(edges[:-1] > edges[1:]):
        raise ArgumentError(f"bins has edges of shape {edges.shape}; wanted one dimension, in ascending order")
    return edges


def _bin_of(column: Any, edges: Any) -> Any:
    """Returns the bin of each coordinate, counted from 1; 0 before the first bin and one more after the last."""
    at = searchsorted(edges, column, side="right")
    return subtract(at, call("equal", column, edges[-1]))


# -- bins of elements ------------------------------------------------------------------------------


@operator(operands=("x", "bins"))
def digitize(x: ArrayLike, bins: ArrayLike, /, right: bool = False) -> ShardedTensor:
    """Returns for each element of x the number of the bin that it is in: the number of edges that precede it.

    The result has x's shape and sharding, and dtype int64. The edges are checked on the host.

    Args:
        x: a tensor, an array or a scalar of real numbers.
        bins: the edges of the bins, of one dimension, in ascending or descending order.
        right: whether a bin includes its greater edge, and not its lesser one.

    Raises:
        ArgumentError: the edges are neither in ascending nor in descending order.
        ShapeError: the edges do not have one dimension.

    >>> st.digitize(st.asarray([0.2, 6.4, 3.0]), np.array([0.0, 1.0, 2.5, 4.0])).tolist()
    [1, 4, 3]
    """


@implements(digitize, "composite")
def _digitize(x: Any, bins: Any, right: bool) -> Any:
    if iscomplexobj(x):
        raise ArgumentTypeError("x is complex; wanted real numbers, which have an order")
    known = np.asarray(bins)
    if known.ndim != 1:
        raise ShapeError(f"bins has {counted(known.ndim, 'dimension')}; wanted one")
    edges = bins if hasattr(bins, "shape") else known
    side, order = "left" if right else "right", _order_of(known)
    if order > 0:
        return searchsorted(edges, x, side=side)
    if not order:
        raise ArgumentError("bins neither increase nor decrease; wanted edges in order")
    return subtract(len(known), searchsorted(flip(edges), x, side=side))


def _order_of(edges: Any) -> int:
    """Returns 1 for edges in ascending order, -1 in descending order and 0 in none. As in NumPy, edges that differ are
    compared as floating-point numbers, and comparisons with NaN do not matter but for the first.
    """
    numbers = edges.astype(np.float64) if edges.dtype.kind in "biuf" else edges
    if not (differ := np.flatnonzero(numbers[1:] != numbers[:1])).size:
        return 1
    rest = numbers[1 + differ[0] :]
    if numbers[0] < rest[0]:
        return 0 if np.any(rest[:-1] > rest[1:]) else 1
    return 0 if np.any(rest[:-1] < rest[1:]) else -1


implements(digitize, "small")(np.digitize)
