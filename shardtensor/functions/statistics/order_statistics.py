"""Medians, percentiles and quantiles, also of the elements that are not NaN.

Where a reduced dimension is split, the split moves to another dimension that is not reduced. If there is none, the
elements are selected by few messages (`shardtensor.functions.algorithms.ranks`); for arrays of quantiles on
devices, they are gathered. Up to 64 KiB, the first device computes the result, and sends it to the others. The other
dimensions keep their sharding. Common to all functions:

- ``axis`` is None (all dimensions), an integer or a tuple of integers; negative ones count from the end.
- With ``keepdims``, the reduced dimensions remain, with size 1.
- The dtype is NumPy's: float64 for integers, otherwise x's dtype, or that of an array of quantiles if it is wider.

Raises:
    AxisError: x has no such axis, or an axis occurs twice.
    ArgumentError: a quantile is out of range, or a method is unknown.
    ArgumentTypeError: the function is not defined for x's dtype.
    IndexingError: quantiles and percentiles of no elements; medians, and those of elements that are not NaN, are NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from shardtensor.backend.registry import array_backend
from shardtensor.core import implements, operator
from shardtensor.errors import ArgumentError, IndexingError, ShapeError
from shardtensor.functions.algorithms.distributed import Whole, distributed
from shardtensor.functions.algorithms.first_device import GATHERED
from shardtensor.functions.algorithms.ranks import elements_of_ranks as select
from shardtensor.functions.algorithms.ranks import picked
from shardtensor.functions.algorithms.shards import Shards
from shardtensor.functions.standard.data_types import astype
from shardtensor.functions.standard.elementwise import divide
from shardtensor.functions.standard.manipulation import reshape
from shardtensor.functions.statistics.nan_quantiles import nan_quantiles
from shardtensor.functions.statistics.quantile_methods import (
    MEDIAN,
    METHODS,
    between_places,
    places,
    quantile_dtype,
    quantiles_of_lines,
    width_of,
)
from shardtensor.sharding.layout import Shape
from shardtensor.sharding.rules import reduced_axes, reduction
from shardtensor.sharding.shard_context import ShardContext
from shardtensor.sharding.spec import P
from shardtensor.tensor.operands import dtype_of, shape_of
from shardtensor.tensor.tensor import ArrayLike, ShardedTensor
from shardtensor.tensor.value import Aval, aval

_DERIVATIVES = "of_order_statistics"


def _quantile_rule(shapes: Sequence[Shape], *, axis: Any = None, keepdims: bool = False, **params: Any) -> str:
    left, _, right = reduction(shapes[:1], axis=axis, keepdims=keepdims).partition(" -> ")
    quantiles = " ".join([f"q{d}!" for d in range(len(shapes[1]))])
    return f"{left}, {quantiles} -> {quantiles} {right}"


def _defined_quantile_rule(shapes: Sequence[Shape], *, axis: Any = None, **params: Any) -> str:
    shape = shapes[0]
    if any(shape[a] == 0 for a in reduced_axes(axis, len(shape))):
        along = "" if axis is None else f" along axis {axis}"
        raise IndexingError(f"x has shape {shape}, with no elements{along}, where quantiles are undefined")
    return _quantile_rule(shapes, axis=axis, **params)


def _dtype_of(name: str) -> Callable[..., Any]:
    """Returns the function that computes a result of NumPy's function of one element."""
    return lambda *operands, **params: getattr(np, name)(*operands, **params)


@operator(reduction, dtype=_dtype_of("median"))
def median(x: ArrayLike, /, *, axis: int | Iterable[int] | None = None, keepdims: bool = False) -> ShardedTensor:
    """Returns the median along ``axis``: the mean of the two middle elements, or NaN if any element is NaN.

    For arguments, sharding and errors see `shardtensor.functions.statistics.order_statistics`.

    >>> st.median(st.asarray([[1, 7, 3], [5, 2, 9]]), axis=0).tolist()
    [3.0, 4.5, 6.0]
    """


@operator(reduction, dtype=_dtype_of("median"))
def nanmedian(x: ArrayLike, /, *, axis: int | Iterable[int] | None = None, keepdims: bool = False) -> ShardedTensor:
    """Returns the `median` of the elements that are not NaN; NaN where there are none.

    >>> st.nanmedian(st.asarray([1.0, float("nan"), 5.0])).item()
    3.0
    """


@operator(_defined_quantile_rule, operands=("x", "q"), dtype=_dtype_of("quantile"))
def quantile(
    x: ArrayLike,
    /,
    q: ArrayLike,
    *,
    axis: int | Iterable[int] | None = None,
    method: str = "linear",
    keepdims: bool = False,
) -> ShardedTensor:
    """Returns the quantiles ``q`` along ``axis``, or NaN if any element is NaN.

    The dimensions of ``q`` come first in the result. For the other arguments, sharding and errors see
    `shardtensor.functions.statistics.order_statistics`.

    Args:
        x: a tensor or a host array of real numbers.
        q: numbers from 0 to 1: a scalar, an array or a list.
        axis: the dimensions to reduce.
        method: how to interpolate between elements, as for `numpy.quantile`.
        keepdims: whether the reduced dimensions remain, with size 1.

    >>> st.quantile(st.asarray([1.0, 2.0, 4.0]), [0.5, 0.75]).tolist()
    [2.0, 3.0]
    """


@operator(_quantile_rule, operands=("x", "q"), dtype=_dtype_of("quantile"))
def nanquantile(
    x: ArrayLike,
    /,
    q: ArrayLike,
    *,
    axis: int | Iterable[int] | None = None,
    method: str = "linear",
    keepdims: bool = False,
) -> ShardedTensor:
    """Returns the quantiles of the elements that are not NaN: see `quantile`.

    >>> st.nanquantile(st.asarray([1.0, float("nan"), 2.0]), 0.5).item()
    1.5
    """


@operator(operands=("x", "q"))
def percentile(
    x: ArrayLike,
    /,
    q: ArrayLike,
    *,
    axis: int | Iterable[int] | None = None,
    method: str = "linear",
    keepdims: bool = False,
) -> ShardedTensor:
    """Returns the percentiles ``q``, from 0 to 100, along ``axis``: see `quantile`.

    >>> st.percentile(st.asarray([1.0, 2.0, 4.0]), 75).item()
    3.0
    """


@operator(operands=("x", "q"))
def nanpercentile(
    x: ArrayLike,
    /,
    q: ArrayLike,
    *,
    axis: int | Iterable[int] | None = None,
    method: str = "linear",
    keepdims: bool = False,
) -> ShardedTensor:
    """Returns the percentiles of the elements that are not NaN: see `percentile`.

    >>> st.nanpercentile(st.asarray([1.0, float("nan"), 2.0]), 50).item()
    1.5
    """


# -- on one device ---------------------------------------------------------------------------------


def _declare(name: str, function: Callable[..., Any], percents: Callable[..., Any]) -> None:
    """Implements a quantile function, and the percentile function that is composed of it."""

    @implements(function, "composite")
    def check(x: Any, q: Any, axis: Any, method: str, keepdims: bool) -> Any:
        if method not in METHODS:
            raise ArgumentError(f"method is {method!r}; wanted one of {', '.join(map(repr, METHODS))}")
        if name == "nanquantile" and 0 in shape_of(x) and dtype_of(x).kind in "biu":
            # A method that selects elements has the dtype of integers, which have no NaN.
            return function(astype(x, np.float64), q, axis=axis, method=method, keepdims=keepdims)
        if isinstance(q, ShardedTensor) or array_backend(q):
            return NotImplemented
        array, width = _in_range(q, 1), width_of(q)
        if (axes := _selectable(x, axis)) is not None:
            if name == "quantile" or x.dtype.kind != "f":
                return _by_selection(x, array, width, axes, method, keepdims)
            if _is_split(x, axes):
                return _without_nan(x, array, width, axes, method, keepdims)
        listed = not isinstance(q, (np.ndarray, np.generic, int, float))
        return function(x, array, axis=axis, method=method, keepdims=keepdims) if listed else NotImplemented

    @implements(function, "small")
    def on_host(x: Any, q: Any, axis: Any, method: str, keepdims: bool) -> Any:
        if np.ndim(q) > 1:  # NumPy's `nanquantile` permutes the dimensions of such quantiles.
            return NotImplemented
        return getattr(np, name)(x, q, axis=axis, method=method, keepdims=keepdims)

    implements(percents, "small")(lambda x, q, *rest: on_host(x, _fractions(q), *rest))

    @implements(function, "kernel")
    def on_device(xp: Any, context: ShardContext, x: Any, q: Any, *, axis: Any, method: str, keepdims: bool) -> Any:
        if 0 in context.local_shape:  # See `_median`.
            return xp.empty(context.local_shape, dtype=context.dtype)
        if xp is np:
            if np.ndim(q) > 1:  # NumPy's `nanquantile` permutes the dimensions of such quantiles.
                q = q.reshape(-1)
            if not x.size and name == "nanquantile":  # NumPy's results lack the dimensions of the quantiles.
                return np.full(context.local_shape, np.nan, context.dtype)
            result = getattr(np, name)(x, q, axis=axis, method=method, keepdims=keepdims)
            return np.reshape(result, context.local_shape)
        return quantiles_of_lines(xp, context, x, q, width_of(q), axis, method, name == "nanquantile")

    @implements(percents, "composite")
    def in_percent(x: Any, q: Any, axis: Any, method: str, keepdims: bool) -> Any:
        if isinstance(q, ShardedTensor) or array_backend(q):
            fractions: Any = divide(q, 100)
        else:
            fractions = _fractions(q)
        return function(x, fractions, axis=axis, method=method, keepdims=keepdims)


def _fractions(q: Any) -> Any:
    """Returns percentiles as quantiles: a Python number as one, which does not widen the dtype of the elements."""
    checked = _in_range(q, 100)
    return q / 100 if type(q) in (int, float) else np.true_divide(checked, 100)


def _in_range(q: Any, most: int) -> Any:
    """Returns quantiles as a host array.

    Raises:
        ArgumentError: they are not numbers from 0 to ``most``.
    """
    try:
        array = np.asarray(q)
    except ValueError as error:
        raise ShapeError(f"q has nested lists of different lengths ({error})") from None
    if array.dtype.kind not in "biuf" or not np.all((array >= 0) & (array <= most)):
        raise ArgumentError(f"q is {q!r:.60}; wanted numbers from 0 to {most}")
    return array


# -- by selection ----------------------------------------------------------------------------------


@operator(error_name="quantile", tags=("any dtype", "internal"))
def elements_of_ranks(x: ArrayLike, /, *, ranks: tuple[int, ...], axes: tuple[int, ...]) -> ShardedTensor:
    """Returns the elements that are at the given places of the sorted lines along ``axes``.

    The first dimension of the result has an item for each rank. It is replicated along the mesh axes that split
    ``axes``; the other dimensions keep their sharding.

    >>> from shardtensor.functions.statistics.order_statistics import elements_of_ranks
    >>> elements_of_ranks(st.asarray([3, 1, 2]), ranks=(0, 2), axes=(0,)).tolist()
    [1, 3]
    """


def _ranks_aval(value: Aval, *, ranks: tuple[int, ...], axes: tuple[int, ...]) -> Aval:
    chains = value.sharding.spec.chains_of(value.ndim)
    rest = [d for d in range(value.ndim) if d not in axes]
    sharding = value.sharding.with_spec(P(None, *[chains[d] for d in rest]))
    return aval((len(ranks), *[value.shape[d] for d in rest]), value.dtype, sharding, value.committed)


def _ranks_of_whole(value: Aval, *, ranks: tuple[int, ...], axes: tuple[int, ...]) -> Whole:
    result, rest = _ranks_aval(value, ranks=ranks, axes=axes), [d for d in range(value.ndim) if d not in axes]
    lines = math.prod(result.shape[1:]), math.prod([value.shape[d] for d in axes])

    def compute(xp: Any, x: Any) -> Any:
        elements = picked(xp, xp.reshape(xp.permute_dims(x, (*rest, *axes)), lines), ranks)
        return xp.reshape(xp.moveaxis(elements, -1, 0), result.shape)

    return Whole(result, compute)


@distributed(elements_of_ranks, whole=_ranks_of_whole, messages="move")
def _elements_of_ranks(
    x: Shards, along: Callable[..., Any], *, ranks: tuple[int, ...], axes: tuple[int, ...]
) -> Shards:
    return select(x, along, axes, ranks, _ranks_aval(x.value, ranks=ranks, axes=axes))


def _selectable(x: Any, axis: Any) -> tuple[int, ...] | None:
    """Returns the axes along which quantiles are selected; None where the plan of the operator is used: for short or
    empty arrays, other dtypes, and where a split can move to another dimension.
    """
    if not isinstance(x, ShardedTensor) or x._aval.nbytes <= GATHERED or x.dtype.kind not in "iuf":
        return None
    axes, counts = reduced_axes(axis, x.ndim), x._aval.grid.counts
    is_split = any(counts[d] > 1 for d in axes)
    moves = any(counts[d] == 1 < n for d, n in enumerate(x.shape) if d not in axes)
    return None if is_split and moves else axes


def _is_split(x: Any, axes: tuple[int, ...]) -> bool:
    counts = x._aval.grid.counts
    return any(counts[d] > 1 for d in axes)


def _without_nan(x: Any, q: Any, width: str, axes: tuple[int, ...], method: str, keepdims: bool) -> Any:
    """Returns the quantiles of the elements that are not NaN, for which the elements beside them are selected."""
    result = nan_quantiles(x, q=tuple(q.reshape(-1).tolist()), width=width, axes=axes, method=method)
    rest = [1 if d in axes else n for d, n in enumerate(x.shape) if keepdims or d not in axes]
    return reshape(result, (*q.shape, *rest))


def _by_selection(x: Any, q: Any, width: str, axes: tuple[int, ...], method: str, keepdims: bool) -> Any:
    """Returns the quantiles, for which the elements beside them are selected; for ``width`` see
    `shardtensor.functions.statistics.quantile_methods.width_of`.
    """
    size = math.prod(x.shape[d] for d in axes)
    lower, upper, weights = places(np, np.full(q.size, size), q.reshape(-1), width, method)
    last = [size - 1] if x.dtype.kind == "f" else []  # It is NaN if any element is.
    ranks = np.unique([*lower, *upper, *last])
    picks = elements_of_ranks(x, ranks=tuple(ranks.tolist()), axes=axes)
    below, above = [tuple(np.searchsorted(ranks, at).tolist()) for at in (lower, upper)]
    distances = None if weights is None else tuple(weights.tolist())  # Those of narrow dtypes are exact, too.
    result = between(picks, weights=distances, width=width, lower=below, upper=above, method=method)
    rest = [1 if d in axes else n for d, n in enumerate(x.shape) if keepdims or d not in axes]
    return reshape(result, (*q.shape, *rest))


def _between_rule(shapes: Sequence[Shape], *, lower: tuple[int, ...], **params: Any) -> tuple[str, Shape]:
    (shape,) = shapes
    rest = " ".join([f"d{d}" for d in range(1, len(shape))])
    return f"r! {rest} -> q {rest}", (len(lower), *shape[1:])


def _between_dtype(picks: Any, *, width: str, method: str, **params: Any) -> Any:
    return np.empty(0, quantile_dtype(picks.dtype, width, method))


@operator(_between_rule, dtype=_between_dtype, error_name="quantile", tags=("internal",))
def between(
    picks: ArrayLike,
    /,
    *,
    weights: tuple[float, ...] | None,
    width: str,
    lower: tuple[int, ...],
    upper: tuple[int, ...],
    method: str,
) -> ShardedTensor:
    """Returns the quantiles between elements of sorted lines, which are in the first dimension of ``picks``. Of floats,
    the last one is the greatest of its line; the quantiles are NaN if that is NaN.

    Args:
        picks: the elements.
        weights: the distance of each quantile from the element before it; None if the quantiles are elements.
        width: the dtype of the quantiles, or "int" or "float" if they do not widen that of the elements.
        lower, upper: the places of the elements before and behind each quantile.
        method: how to interpolate.

    >>> from shardtensor.functions.statistics.order_statistics import between
    >>> weights = {"weights": (0.25,), "width": "float64", "lower": (0,), "upper": (1,)}
    >>> between(st.asarray([1.0, 2.0]), **weights, method="linear").tolist()
    [1.25]
    """


@implements(between, "kernel")
def _between_picks(
    xp: Any,
    context: ShardContext,
    picks: Any,
    *,
    weights: Any,
    width: str,
    lower: Any,
    upper: Any,
    method: str,
) -> Any:
    wide = np.dtype(width if np.dtype(width).kind == "f" else "float64")
    distances = None if weights is None else np.asarray(weights, wide)
    return between_places(xp, context, xp.moveaxis(picks, 0, -1), lower, upper, distances, width, method)


@implements(median, "composite")
def _median_by_selection(x: Any, axis: Any, keepdims: bool) -> Any:
    axes = _selectable(x, axis)
    if axes is None:
        return NotImplemented
    return _by_selection(x, np.asarray(0.5), "float", axes, MEDIAN, keepdims)


@implements(nanmedian, "composite")
def _nanmedian_by_selection(x: Any, axis: Any, keepdims: bool) -> Any:
    axes = _selectable(x, axis)
    if axes is None or not _is_split(x, axes):
        return NotImplemented
    if x.dtype.kind != "f":
        return median(x, axis=axes, keepdims=keepdims)
    return _without_nan(x, np.asarray(0.5), "float", axes, MEDIAN, keepdims)


implements(median, "small")(lambda x, axis, keepdims: np.median(x, axis=axis, keepdims=keepdims))


@implements(median, "kernel")
def _median(xp: Any, context: ShardContext, x: Any, *, axis: Any, keepdims: bool) -> Any:
    if 0 in context.local_shape:  # NumPy raises ValueError for several axes.
        return xp.empty(context.local_shape, dtype=context.dtype)
    if xp is np:
        return np.median(x, axis=axis, keepdims=keepdims)
    return quantiles_of_lines(xp, context, x, 0.5, "float", axis, MEDIAN, False)


@implements(nanmedian, "kernel")
def _nanmedian(xp: Any, context: ShardContext, x: Any, *, axis: Any, keepdims: bool) -> Any:
    if 0 in context.local_shape:  # See `_median`.
        return xp.empty(context.local_shape, dtype=context.dtype)
    if xp is np:
        return np.nanmedian(x, axis=axis, keepdims=keepdims)
    return quantiles_of_lines(xp, context, x, 0.5, "float", axis, MEDIAN, True)


_declare("quantile", quantile, percentile)
_declare("nanquantile", nanquantile, nanpercentile)
