"""NumPy's reductions and cumulative functions that skip NaN.

Arguments, dtypes, sharding and errors are those of the functions of the same name without "nan", of which most are
composed. In an array of integers or bools, no element is NaN.
"""

from __future__ import annotations

import math as _math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from shardtensor.core import call, composition, implements, operator, recorded
from shardtensor.errors import ArgumentError
from shardtensor.functions.building.monoids import may_be_nan
from shardtensor.functions.statistics import masked_reductions as _options
from shardtensor.sharding.rules import extremum
from shardtensor.sharding.shard_context import ShardContext
from shardtensor.tensor.operands import dtype_of, shape_of
from shardtensor.tensor.tensor import ArrayLike, ShardedTensor, lacks_elements

_DERIVATIVES = "of_reductions"

_Axis = int | tuple[int, ...] | None

_WHERE = ("where",)
_BOTH = ("initial", "where")


def _dtype_by(name: str) -> Callable[..., Any]:
    """Returns NumPy's function, of which the result has the dtype of the operator's."""
    return lambda x, **params: getattr(np, name)(x, **params)


@operator(options=_BOTH)
def nansum(
    x: ArrayLike,
    /,
    *,
    axis: _Axis = None,
    dtype: npt.DTypeLike | None = None,
    keepdims: bool = False,
    initial: ArrayLike | None = None,
    where: ArrayLike = True,
) -> ShardedTensor:
    """Returns the `sum` of the elements along ``axis`` that are not NaN.

    >>> st.nansum(st.asarray([1.0, float("nan"), 2.0])).item()
    3.0
    """


@operator(options=_BOTH)
def nanprod(
    x: ArrayLike,
    /,
    *,
    axis: _Axis = None,
    dtype: npt.DTypeLike | None = None,
    keepdims: bool = False,
    initial: ArrayLike | None = None,
    where: ArrayLike = True,
) -> ShardedTensor:
    """Returns the product (`prod`) of the elements along ``axis`` that are not NaN.

    >>> st.nanprod(st.asarray([3.0, float("nan"), 2.0])).item()
    6.0
    """


@operator(extremum, combine="nanmax", dtype=_dtype_by("max"), options=_BOTH)
def nanmax(
    x: ArrayLike,
    /,
    *,
    axis: _Axis = None,
    keepdims: bool = False,
    initial: ArrayLike | None = None,
    where: ArrayLike = True,
) -> ShardedTensor:
    """Returns the greatest element along ``axis`` that is not NaN (`max`); NaN where all are.

    >>> st.nanmax(st.asarray([1.0, float("nan"), 2.0])).item()
    2.0
    """


@operator(extremum, combine="nanmin", dtype=_dtype_by("min"), options=_BOTH)
def nanmin(
    x: ArrayLike,
    /,
    *,
    axis: _Axis = None,
    keepdims: bool = False,
    initial: ArrayLike | None = None,
    where: ArrayLike = True,
) -> ShardedTensor:
    """Returns the least element along ``axis`` that is not NaN (`min`); NaN where all are.

    >>> st.nanmin(st.asarray([1.0, float("nan"), 2.0])).item()
    1.0
    """


@operator(options=_WHERE)
def nanmean(
    x: ArrayLike,
    /,
    *,
    axis: _Axis = None,
    dtype: npt.DTypeLike | None = None,
    keepdims: bool = False,
    where: ArrayLike = True,
) -> ShardedTensor:
    """Returns the `mean` of the elements along ``axis`` that are not NaN; NaN where there are none.

    ``dtype`` is the dtype in which the mean is computed, as that of the result; for integers the default is float64.

    >>> st.nanmean(st.asarray([1.0, float("nan"), 2.0])).item()
    1.5
    """


@operator(options=_WHERE)
def nanvar(
    x: ArrayLike,
    /,
    *,
    axis: _Axis = None,
    dtype: npt.DTypeLike | None = None,
    ddof: float = 0,
    keepdims: bool = False,
    correction: float | None = None,
    where: ArrayLike = True,
) -> ShardedTensor:
    """Returns the variance (`var`) of the elements along ``axis`` that are not NaN; NaN where there are too few.

    ``ddof`` and ``correction`` are two names of the number that is subtracted from the number of elements, as in NumPy.

    Raises:
        ArgumentError: both ``ddof`` and ``correction`` are given.

    >>> st.nanvar(st.asarray([1.0, float("nan"), 2.0])).item()
    0.25
    """


@operator(options=_WHERE)
def nanstd(
    x: ArrayLike,
    /,
    *,
    axis: _Axis = None,
    dtype: npt.DTypeLike | None = None,
    ddof: float = 0,
    keepdims: bool = False,
    correction: float | None = None,
    where: ArrayLike = True,
) -> ShardedTensor:
    """Returns the standard deviation (`std`) of the elements along ``axis`` that are not NaN: the root of `nanvar`.

    >>> st.nanstd(st.asarray([1.0, float("nan"), 2.0])).item()
    0.5
    """


@operator()
def nanargmax(x: ArrayLike, /, *, axis: int | None = None, keepdims: bool = False) -> ShardedTensor:
    """Returns the index of the greatest element along ``axis`` that is not NaN: see `argmax`.

    Raises:
        ArgumentError: all elements along ``axis`` are NaN, where that is known.

    >>> st.nanargmax(st.asarray([1.0, float("nan"), 2.0])).item()
    2
    """


@operator()
def nanargmin(x: ArrayLike, /, *, axis: int | None = None, keepdims: bool = False) -> ShardedTensor:
    """Returns the index of the least element along ``axis`` that is not NaN: see `nanargmax`.

    >>> st.nanargmin(st.asarray([1.0, float("nan"), 2.0])).item()
    0
    """


@operator()
def nancumsum(x: ArrayLike, /, *, axis: int | None = None, dtype: npt.DTypeLike | None = None) -> ShardedTensor:
    """Computes the cumulative sum (`cumulative_sum`) along ``axis``, with zeros in place of NaN; None flattens x.

    >>> st.nancumsum(st.asarray([1.0, float("nan"), 2.0])).tolist()
    [1.0, 1.0, 3.0]
    """


@operator()
def nancumprod(x: ArrayLike, /, *, axis: int | None = None, dtype: npt.DTypeLike | None = None) -> ShardedTensor:
    """Computes the cumulative product (`cumulative_prod`) along ``axis``, with ones in place of NaN; None flattens x.

    >>> st.nancumprod(st.asarray([3.0, float("nan"), 2.0])).tolist()
    [3.0, 3.0, 6.0]
    """


def _filled(x: Any, value: float) -> Any:
    """Returns x with ``value`` in place of NaN."""
    return _replaced(x, value) if dtype_of(x).kind in "fc" else x


@composition(recorded, fused=True)
def _replaced(x: Any, value: float) -> Any:
    return call("where", call("isnan", x), value, x)


def _declare_sum(function: Callable[..., Any], name: str, value: float) -> None:
    @implements(function, "composite")
    def composite(x: Any, axis: Any, dtype: Any, keepdims: bool) -> Any:
        return call(name, _filled(x, value), axis=axis, dtype=dtype, keepdims=keepdims)


def _declare_extremum(function: Callable[..., Any], name: str, value: float) -> None:
    @implements(function, "kernel")
    def kernel(xp: Any, context: ShardContext, x: Any, *, axis: Any, keepdims: bool) -> Any:
        if xp is np:
            return np.asarray(getattr(np, f"f{name}").reduce(x, axis=axis, keepdims=keepdims))
        if not may_be_nan(xp, x):
            return getattr(xp, name)(x, axis=axis, keepdims=keepdims)
        nan = xp.isnan(x)
        least: Any = value
        missing: Any = _math.nan
        if context.dtype.kind in "mM":
            limit = np.iinfo("int64").max if value > 0 else -np.iinfo("int64").max
            least, missing = [np.array(a, context.dtype)[()] for a in (limit, "NaT")]
        extremum = getattr(xp, name)(xp.where(nan, least, x), axis=axis, keepdims=keepdims)
        return xp.where(xp.all(nan, axis=axis, keepdims=keepdims), missing, extremum)


def _declare_index(function: Callable[..., Any], name: str, value: float) -> None:
    numpys = getattr(np, f"nan{name}")
    implements(function, "small")(lambda x, axis, keepdims: numpys(x, axis=axis, keepdims=keepdims))

    @implements(function, "composite")
    def composite(x: Any, axis: Any, keepdims: bool) -> Any:
        index = call(name, _filled(x, value), axis=axis, keepdims=keepdims)
        if dtype_of(x).kind in "fc":
            empty = call("any", call("all", call("isnan", x), axis=axis))
            if not lacks_elements(empty) and bool(empty):
                raise ArgumentError(f"all elements along axis {axis} are NaN, where the result is undefined")
        return index


def _declare_cumulative(function: Callable[..., Any], name: str, value: float) -> None:
    @implements(function, "composite")
    def composite(x: Any, axis: Any, dtype: Any) -> Any:
        x = _filled(x if axis is not None else call("reshape", x, (-1,)), value)
        return call(name, x, axis=0 if axis is None else axis, dtype=dtype)


_declare_sum(nansum, "sum", 0)
_declare_sum(nanprod, "prod", 1)
_declare_extremum(nanmax, "max", -_math.inf)
_declare_extremum(nanmin, "min", _math.inf)
_declare_index(nanargmax, "argmax", -_math.inf)
_declare_index(nanargmin, "argmin", _math.inf)
_declare_cumulative(nancumsum, "cumulative_sum", 0)
_declare_cumulative(nancumprod, "cumulative_prod", 1)


# -- means and variances, and the options ----------------------------------------------------------


def _chosen(x: Any, where: Any) -> Any:
    """Returns the mask of the elements that are not NaN and that ``where`` selects."""
    numbers = call("equal", x, x) if dtype_of(x).kind in "fc" else np.True_  # Only NaN is not equal to itself.
    return numbers if where is True else call("logical_and", numbers, _options.mask_of(where, shape_of(x)))


@implements(nanmean, "composite", "extended")
def _nanmean(x: Any, axis: Any, dtype: Any, keepdims: bool, *, where: Any = True) -> Any:
    chosen = _chosen(x, where)
    if dtype is not None and dtype_of(x).kind == "c" and np.dtype(dtype).kind == "f":  # As in the other sums.
        x = call("real", x)
    x = _options.computed_in(x, dtype)
    if where is True and dtype_of(x).kind not in "fc":
        return call("mean", x, axis=axis, keepdims=keepdims)
    return _options.masked_mean(x, axis, None, keepdims, where=chosen)


def _declare_spread(function: Callable[..., Any], name: str, masked: Callable[..., Any]) -> None:
    @implements(function, "composite", "extended")
    def spread(
        x: Any, axis: Any, dtype: Any, ddof: float, keepdims: bool, correction: float | None, *, where: Any = True
    ) -> Any:
        if correction is not None and ddof:
            raise ArgumentError(f"ddof={ddof} and correction={correction} are the same argument; give one of them")
        has_nan = dtype_of(x).kind in "fc"  # In NumPy, too, the dtype of x determines what too few elements give.
        fewer = ddof if correction is None else correction
        if dtype is not None and dtype_of(x).kind == "c" and np.dtype(dtype).kind == "f":
            chosen = _chosen(x, where)
            return _options.spread_in_reals(name, x, axis, fewer, keepdims, where=chosen, dtype=dtype, few=_math.nan)
        x = _options.computed_in(x, dtype)
        if where is True and not has_nan:
            result = call(name, x, axis=axis, correction=fewer, keepdims=keepdims)
            return result if dtype is None else call("astype", result, dtype_of(x), copy=False)
        result = masked(x, axis, fewer, keepdims, where=_chosen(x, where), few=_math.nan)  # Too few have no variance.
        return result if dtype is None else call("astype", result, dtype_of(x), copy=False)


for _function in (nanmean, nanvar, nanstd, nansum, nanprod, nancumsum, nancumprod):
    implements(_function, "small")(recorded)
_declare_spread(nanvar, "var", _options.masked_var)
_declare_spread(nanstd, "std", _options.masked_std)


@implements(nansum, "extended")
def _masked_nansum(x: Any, axis: Any, dtype: Any, keepdims: bool, **options: Any) -> Any:
    return call("sum", _filled(x, 0), axis=axis, dtype=dtype, keepdims=keepdims, **options)


@implements(nanprod, "extended")
def _masked_nanprod(x: Any, axis: Any, dtype: Any, keepdims: bool, **options: Any) -> Any:
    return call("prod", _filled(x, 1), axis=axis, dtype=dtype, keepdims=keepdims, **options)


implements(nanmax, "extended")(_options.extremum_of("nanmax", "maximum", skips_nan=True))
implements(nanmin, "extended")(_options.extremum_of("nanmin", "minimum", skips_nan=True))
