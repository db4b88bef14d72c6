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

from shardtensor.backend.registry import array_backend
from shardtensor.core import call, implements, operator
from shardtensor.errors import ArgumentError, ArgumentTypeError
from shardtensor.sharding.rules import extremum
from shardtensor.sharding.shard_context import ShardContext
from shardtensor.tensor.operands import sharded_dtype
from shardtensor.tensor.tensor import ArrayLike, ShardedTensor, lacks_elements

_Axis = int | tuple[int, ...] | None


def _dtype_by(name: str) -> Callable[..., Any]:
    """Returns NumPy's function, of which the result has the dtype of the operator's."""
    return lambda x, **params: getattr(np, name)(x, **params)


@operator()
def nansum(
    x: ArrayLike, /, *, axis: _Axis = None, dtype: npt.DTypeLike | None = None, keepdims: bool = False
) -> ShardedTensor:
    """Returns the `sum` of the elements along ``axis`` that are not NaN.

    >>> st.nansum(st.asarray([1.0, float("nan"), 2.0])).item()
    3.0
    """


@operator()
def nanprod(
    x: ArrayLike, /, *, axis: _Axis = None, dtype: npt.DTypeLike | None = None, keepdims: bool = False
) -> ShardedTensor:
    """Returns the product (`prod`) of the elements along ``axis`` that are not NaN.

    >>> st.nanprod(st.asarray([3.0, float("nan"), 2.0])).item()
    6.0
    """


@operator(extremum, combine="nanmax", dtype=_dtype_by("max"))
def nanmax(x: ArrayLike, /, *, axis: _Axis = None, keepdims: bool = False) -> ShardedTensor:
    """Returns the greatest element along ``axis`` that is not NaN (`max`); NaN where all are.

    >>> st.nanmax(st.asarray([1.0, float("nan"), 2.0])).item()
    2.0
    """


@operator(extremum, combine="nanmin", dtype=_dtype_by("min"))
def nanmin(x: ArrayLike, /, *, axis: _Axis = None, keepdims: bool = False) -> ShardedTensor:
    """Returns the least element along ``axis`` that is not NaN (`min`); NaN where all are.

    >>> st.nanmin(st.asarray([1.0, float("nan"), 2.0])).item()
    1.0
    """


@operator()
def nanmean(
    x: ArrayLike, /, *, axis: _Axis = None, dtype: npt.DTypeLike | None = None, keepdims: bool = False
) -> ShardedTensor:
    """Returns the `mean` of the elements along ``axis`` that are not NaN; NaN where there are none.

    ``dtype`` is the dtype in which the mean is computed, as that of the result; for integers the default is float64.

    >>> st.nanmean(st.asarray([1.0, float("nan"), 2.0])).item()
    1.5
    """


@operator()
def nanvar(
    x: ArrayLike,
    /,
    *,
    axis: _Axis = None,
    dtype: npt.DTypeLike | None = None,
    ddof: float = 0,
    keepdims: bool = False,
    correction: float | None = None,
) -> ShardedTensor:
    """Returns the variance (`var`) of the elements along ``axis`` that are not NaN; NaN where there are too few.

    ``ddof`` and ``correction`` are two names of the number that is subtracted from the number of elements, as in NumPy.

    Raises:
        ArgumentError: both ``ddof`` and ``correction`` are given.

    >>> st.nanvar(st.asarray([1.0, float("nan"), 2.0])).item()
    0.25
    """


@operator()
def nanstd(
    x: ArrayLike,
    /,
    *,
    axis: _Axis = None,
    dtype: npt.DTypeLike | None = None,
    ddof: float = 0,
    keepdims: bool = False,
    correction: float | None = None,
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


def _dtype_of(x: Any) -> np.dtype[Any]:
    backend = array_backend(x)
    dtype: np.dtype[Any] = backend.dtype_of(x) if backend else np.asarray(x).dtype if np.isscalar(x) else x.dtype
    return dtype


def _filled(x: Any, value: float) -> Any:
    """Returns x with ``value`` in place of NaN."""
    return call("where", call("isnan", x), value, x) if _dtype_of(x).kind in "fc" else x


def _declare_sum(function: Callable[..., Any], name: str, value: float) -> None:
    @implements(function, "composite")
    def composite(x: Any, axis: Any, dtype: Any, keepdims: bool) -> Any:
        return call(name, _filled(x, value), axis=axis, dtype=dtype, keepdims=keepdims)


def _declare_extremum(function: Callable[..., Any], name: str, value: float) -> None:
    @implements(function, "kernel")
    def kernel(xp: Any, context: ShardContext, x: Any, *, axis: Any, keepdims: bool) -> Any:
        if xp is np:
            return np.asarray(getattr(np, f"f{name}").reduce(x, axis=axis, keepdims=keepdims))
        if not _may_be_nan(xp, x):
            return getattr(xp, name)(x, axis=axis, keepdims=keepdims)
        nan = xp.isnan(x)
        found = getattr(xp, name)(xp.where(nan, value, x), axis=axis, keepdims=keepdims)
        return xp.where(xp.all(nan, axis=axis, keepdims=keepdims), _math.nan, found)


def _may_be_nan(xp: Any, x: Any) -> bool:
    return bool(xp.isdtype(x.dtype, ("real floating", "complex floating")))


def _declare_index(function: Callable[..., Any], name: str, value: float) -> None:
    @implements(function, "composite")
    def composite(x: Any, axis: Any, keepdims: bool) -> Any:
        found = call(name, _filled(x, value), axis=axis, keepdims=keepdims)
        if _dtype_of(x).kind in "fc":
            empty = call("any", call("all", call("isnan", x), axis=axis))
            if not lacks_elements(empty) and bool(empty):
                raise ArgumentError(f"all elements along axis {axis} are NaN, where the result is undefined")
        return found


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


def _wide(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Returns the dtype in which sums are accumulated: float32 for float16."""
    return np.result_type(dtype, np.float32)


def _count(x: Any, axis: Any, keepdims: bool) -> Any:
    return call("sum", call("logical_not", call("isnan", x)), axis=axis, keepdims=keepdims)


def _computed_in(x: Any, dtype: Any) -> Any:
    """Returns x in the dtype that a call asks for.

    Raises:
        ArgumentTypeError: the dtype is neither real nor complex floating-point, where x has NaN, or real for complex x.
    """
    if dtype is None:
        return x
    wanted = sharded_dtype(dtype)
    if wanted.kind not in "fc" or (wanted.kind == "f" and _dtype_of(x).kind == "c"):
        raise ArgumentTypeError(f"dtype is {wanted} for elements of {_dtype_of(x)}; wanted a floating-point dtype")
    return call("astype", x, wanted, copy=False)


@implements(nanmean, "composite")
def _nanmean(x: Any, axis: Any, dtype: Any, keepdims: bool) -> Any:
    x = _computed_in(x, dtype)
    found = _dtype_of(x)
    if found.kind not in "fc":
        return call("mean", x, axis=axis, keepdims=keepdims)
    total = call("sum", _filled(x, 0), axis=axis, dtype=_wide(found), keepdims=keepdims)
    with np.errstate(invalid="ignore"):
        return call("astype", call("divide", total, _count(x, axis, keepdims)), found, copy=False)


def _correction(ddof: float, correction: float | None) -> float:
    if correction is not None and ddof:
        raise ArgumentError(f"ddof={ddof} and correction={correction} are the same argument; give one of them")
    return ddof if correction is None else correction


@implements(nanvar, "composite")
def _nanvar(x: Any, axis: Any, dtype: Any, ddof: float, keepdims: bool, correction: float | None) -> Any:
    x, fewer = _computed_in(x, dtype), _correction(ddof, correction)
    found = _dtype_of(x)
    if found.kind not in "fc":
        return call("var", x, axis=axis, correction=fewer, keepdims=keepdims)
    wide = call("astype", x, _wide(found), copy=False)
    distance = call("abs", _filled(call("subtract", wide, nanmean(wide, axis=axis, keepdims=True)), 0))
    spread = call("sum", call("square", distance), axis=axis, keepdims=keepdims)
    freedom = call("subtract", _count(x, axis, keepdims), fewer)
    freedom = call("where", call("greater", freedom, 0), freedom, _math.nan)  # Fewer elements have no variance.
    variance = np.empty(0, found).real.dtype if dtype is None else found
    return call("astype", call("divide", spread, freedom), variance, copy=False)


@implements(nanstd, "composite")
def _nanstd(x: Any, axis: Any, dtype: Any, ddof: float, keepdims: bool, correction: float | None) -> Any:
    fewer = _correction(ddof, correction)
    return call("sqrt", nanvar(x, axis=axis, dtype=dtype, correction=fewer, keepdims=keepdims))
