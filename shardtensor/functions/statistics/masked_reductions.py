"""Reductions with NumPy's options: ``where``, which selects elements, and ``initial``, with which they are combined.

They are composed of the reductions without options: elements that ``where`` does not select are replaced by the neutral
element, and ``initial`` is combined with the result. The operator's own fast paths stay as they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from shardtensor.core import call
from shardtensor.errors import ArgumentError, ArgumentTypeError, ShapeError
from shardtensor.sharding.rules import reduced_axes
from shardtensor.tensor.nested_lists import converted
from shardtensor.tensor.operands import dtype_of, shape_of, sharded_dtype


def mask_of(where: Any, shape: tuple[int, ...]) -> Any:
    """Returns the argument ``where`` of a function as an array of bools.

    Raises:
        ArgumentTypeError: it is not an array of bools.
        ShapeError: it does not broadcast to ``shape``.
    """
    mask = np.asarray(where, bool) if isinstance(where, (list, tuple, bool)) else where
    if dtype_of(mask) != np.bool:
        raise ArgumentTypeError(f"where has dtype {dtype_of(mask)}; wanted bools, such as where != 0")
    try:
        fits = np.broadcast_shapes(shape_of(mask), shape) == shape
    except ValueError:
        fits = False
    if not fits:
        raise ShapeError(f"where has shape {shape_of(mask)}; wanted one that broadcasts to {shape}")
    return mask


def selected(x: Any, where: Any, value: Any) -> Any:
    """Returns x with ``value`` in place of the elements that ``where`` does not select."""
    return x if where is True else call("where", mask_of(where, shape_of(x)), x, scalar_of(value, dtype_of(x)))


def scalar_of(value: Any, dtype: np.dtype[Any]) -> Any:
    """Returns a scalar converted to a dtype: a Python scalar, which does not promote arrays of that dtype; a time, and
    an array or tensor without dimensions, in the dtype.

    Raises:
        ArgumentError: it is an array with dimensions.
    """
    if hasattr(value, "shape") and not isinstance(value, (np.ndarray, np.generic)):
        if shape_of(value):
            raise ArgumentError(f"initial has shape {shape_of(value)}; wanted a scalar")
        return call("astype", value, dtype, copy=False)
    element = converted(value, dtype, "initial")
    return element if dtype.kind in "mM" else element.item()


def with_initial(name: str, result: Any, initial: Any) -> Any:
    """Combines the result of a reduction with ``initial`` by the elementwise operator of that name."""
    return result if initial is None else call(name, result, scalar_of(initial, dtype_of(result)))


def sum_of(name: str, combine: str, neutral: int) -> Callable[..., Any]:
    """Returns the options of a sum or product."""

    def extended(x: Any, axis: Any, dtype: Any, keepdims: bool, *, initial: Any, where: Any) -> Any:
        result = call(name, selected(x, where, neutral), axis=axis, dtype=dtype, keepdims=keepdims)
        return with_initial(combine, result, initial)

    return extended


def logical(name: str, neutral: bool) -> Callable[..., Any]:
    """Returns the option of `all` or `any`."""

    def extended(x: Any, axis: Any, keepdims: bool, *, where: Any) -> Any:
        return call(name, selected(x, where, neutral), axis=axis, keepdims=keepdims)

    return extended


def extremum_of(name: str, combine: str, *, skips_nan: bool = False) -> Callable[..., Any]:
    """Returns the options of an extremum.

    Raises:
        ArgumentError: ``where`` is given without ``initial``, and an extremum of no elements is undefined.
    """

    def extended(x: Any, axis: Any, keepdims: bool, *, initial: Any, where: Any) -> Any:
        if initial is None:
            raise ArgumentError("where needs initial, because the result of no elements is undefined")
        if is_empty(x, axis):
            return of_nothing(x, axis, keepdims, initial)
        result = call(name, selected(x, where, initial), axis=axis, keepdims=keepdims)
        if skips_nan and dtype_of(x).kind in "fcmM":
            result = call("where", call("isnan", result), scalar_of(initial, dtype_of(x)), result)
        return with_initial(combine, result, initial)

    return extended


def is_empty(x: Any, axis: Any) -> bool:
    """Whether each result of a reduction is that of no elements."""
    shape = shape_of(x)
    return not math.prod([shape[a] for a in reduced_axes(axis, len(shape))])


def of_nothing(x: Any, axis: Any, keepdims: bool, value: Any) -> Any:
    """Returns the result of a reduction of no elements, which has x's dtype, in the layout of other reductions."""
    dtype = dtype_of(x)
    return call("full_like", call("any", x, axis=axis, keepdims=keepdims), scalar_of(value, dtype), dtype=dtype)


def of_selection(name: str, x: Any, where: Any, axis: Any, keepdims: bool) -> Any:
    """Reduces the mask of x's elements by an operator: "any" tells where elements are selected, "sum" how many."""
    shape = shape_of(x)
    mask = mask_of(where, shape)
    mask = mask if shape_of(mask) == shape else call("broadcast_to", mask, shape)
    return call(name, mask, axis=axis, keepdims=keepdims)


def _count(x: Any, where: Any, axis: Any, keepdims: bool) -> Any:
    return of_selection("sum", x, where, axis, keepdims)


def masked_mean(x: Any, axis: Any, dtype: Any, keepdims: bool, *, where: Any) -> Any:
    """Returns the mean of the selected elements; NaN where there are none."""
    result_dtype = np.mean(np.ones(1, dtype_of(x)), dtype=dtype).dtype
    wide = np.result_type(result_dtype, np.float32) if dtype is None and result_dtype.kind in "fc" else result_dtype
    total = call("sum", selected(x, where, 0), axis=axis, dtype=wide, keepdims=keepdims)
    with np.errstate(invalid="ignore"):
        return call("astype", call("divide", total, _count(x, where, axis, keepdims)), result_dtype, copy=False)


def masked_var(x: Any, axis: Any, correction: float, keepdims: bool, *, where: Any, few: float = 0.0) -> Any:
    """Returns the variance of the selected elements. Where there are at most ``correction`` of them, it is divided by
    ``few``.
    """
    result_dtype = np.var(np.ones(1, dtype_of(x))).dtype
    wide = call("astype", x, np.result_type(np.mean(np.ones(1, dtype_of(x))), np.float32), copy=False)
    center = masked_mean(wide, axis, None, True, where=where)
    distance = selected(call("subtract", wide, center), where, 0)
    distance = call("abs", distance) if dtype_of(distance).kind == "c" else distance
    spread = call("sum", call("square", distance), axis=axis, keepdims=keepdims)
    freedom = call("subtract", _count(x, where, axis, keepdims), correction)
    freedom = call("where", call("greater", freedom, 0), freedom, few)
    with np.errstate(invalid="ignore", divide="ignore"):
        return call("astype", call("divide", spread, freedom), result_dtype, copy=False)


def computed_in(x: Any, dtype: Any) -> Any:
    """Returns x in the dtype that a call requests.

    Raises:
        ArgumentTypeError: the dtype is neither real nor complex floating-point, or real for complex x.
    """
    if dtype is None:
        return x
    target = sharded_dtype(dtype)
    if target.kind not in "fc" or (target.kind == "f" and dtype_of(x).kind == "c"):
        raise ArgumentTypeError(f"dtype is {target} for elements of {dtype_of(x)}; wanted a floating-point dtype")
    return call("astype", x, target, copy=False)


def one_of(ddof: Any, correction: Any) -> Any:
    """Returns the number by which the divisor of a variance is less than the number of elements, by either name.

    Raises:
        ArgumentError: both are given.
    """
    if ddof and correction:
        raise ArgumentError(f"ddof={ddof} and correction={correction} are the same argument; give one of them")
    return ddof or correction


def masked_std(x: Any, axis: Any, correction: float, keepdims: bool, *, where: Any, few: float = 0.0) -> Any:
    """Returns the standard deviation of the selected elements: the root of `masked_var`."""
    return call("sqrt", masked_var(x, axis, correction, keepdims, where=where, few=few))


def spread_in_reals(
    name: str, x: Any, axis: Any, correction: float, keepdims: bool, *, where: Any, dtype: Any, few: float = 0.0
) -> Any:
    """Returns the variance or the standard deviation of complex elements in a real dtype.

    As in NumPy, the distances are those from the mean of the real parts. Where there are at most ``correction``
    elements, the sum of their squares is divided by ``few``.
    """
    wide = np.result_type(sharded_dtype(dtype), np.float32)
    real, imag = [call("astype", call(part, x), wide, copy=False) for part in ("real", "imag")]
    if where is True:
        where = np.ones((), bool)
    variance = masked_var(real, axis, correction, keepdims, where=where, few=few)
    heights = call("sum", selected(call("square", imag), where, 0), axis=axis, keepdims=keepdims)
    freedom = call("subtract", _count(x, where, axis, keepdims), correction)
    freedom = call("where", call("greater", freedom, 0), freedom, few)
    with np.errstate(invalid="ignore", divide="ignore"):
        variance = call("add", variance, call("divide", heights, freedom))
    return call("astype", call("sqrt", variance) if name == "std" else variance, dtype, copy=False)


def spread_of(name: str, masked: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a variance or standard deviation with the options ``where`` and ``dtype``, and ``ddof``, NumPy's name of
    ``correction``.
    """

    def extended(x: Any, axis: Any, correction: float, keepdims: bool, *, where: Any, dtype: Any, ddof: Any) -> Any:
        correction = one_of(ddof, correction)
        if dtype is not None and dtype_of(x).kind == "c" and sharded_dtype(dtype).kind == "f":
            return spread_in_reals(name, x, axis, correction, keepdims, where=where, dtype=dtype)
        x = computed_in(x, dtype)
        if where is True:
            result = call(name, x, axis=axis, correction=correction, keepdims=keepdims)
        else:
            result = masked(x, axis, correction, keepdims, where=where)
        is_complex = dtype is not None and np.dtype(dtype).kind == "c"
        return call("astype", result, dtype) if is_complex else result

    return extended
