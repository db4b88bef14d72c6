"""NumPy's tests of elements, arrays and dtypes: `isclose`, `array_equal`, `isreal` and similar functions.

Tests of elements have the shape and the sharding of their operands and dtype bool, and no data moves if the operands
are sharded alike. Tests of whole arrays return a bool: each device tests its elements, and the results are combined.
"""

from __future__ import annotations

import builtins as _builtins
from typing import Any

import numpy as np
import numpy.typing as npt

from shardtensor.core import composition, implements, operator
from shardtensor.errors import ArgumentTypeError
from shardtensor.functions.standard.creation import ones_like, zeros_like
from shardtensor.functions.standard.data_types import astype, result_type
from shardtensor.functions.standard.elementwise import (
    abs,
    add,
    equal,
    imag,
    isfinite,
    isinf,
    isnan,
    less_equal,
    logical_and,
    logical_not,
    logical_or,
    multiply,
    not_equal,
    signbit,
    subtract,
)
from shardtensor.functions.standard.repetition import broadcast_shapes, on_host
from shardtensor.functions.standard.statistical import all as _all
from shardtensor.tensor.nested_lists import from_lists
from shardtensor.tensor.operands import shape_of
from shardtensor.tensor.tensor import SCALARS, ArrayLike, ShardedTensor

_DERIVATIVES = "of_elementwise"


def array_like(x: Any, caller: str) -> Any:
    """Returns nested lists of numbers as a host array, and anything else unchanged."""
    return from_lists(x, caller) if isinstance(x, (list, tuple)) else x


# -- tests of elements -----------------------------------------------------------------------------


@composition(fused=True)
def isclose(
    a: ArrayLike, b: ArrayLike, rtol: ArrayLike = 1e-05, atol: ArrayLike = 1e-08, equal_nan: bool = False
) -> ShardedTensor:
    """Tests for each pair of elements whether ``|a - b| <= atol + rtol |b|``, or both are equal.

    Args:
        a, b: tensors, arrays, lists or scalars that broadcast.
        rtol, atol: the relative and the absolute tolerance: numbers, or arrays that broadcast.
        equal_nan: whether two NaN are close.

    >>> st.isclose(st.asarray([1.0, np.nan]), st.asarray([1.0 + 1e-9, np.nan])).tolist()
    [True, False]
    """
    x, y, relative, absolute = [array_like(value, "isclose") for value in (a, b, rtol, atol)]
    if isinstance(y, int):
        y = float(y)
    elif type(y) not in SCALARS and result_type(y).kind in "biu":  # The least integer has no absolute value.
        y = astype(y, np.float64)
    with np.errstate(invalid="ignore"):
        # A Python number remains one, so that it does not widen the dtype in which the distance is compared.
        size = _builtins.abs(y) if type(y) in SCALARS else abs(y)
        limit = _sum_of_numbers(absolute, relative, size)
        near = logical_and(less_equal(abs(subtract(x, y)), limit), isfinite(y))
        close: ShardedTensor = logical_or(near, equal(x, y))
        return logical_or(close, logical_and(isnan(x), isnan(y))) if equal_nan else close


def _sum_of_numbers(absolute: Any, relative: Any, size: Any) -> Any:
    if all(type(x) in SCALARS for x in (absolute, relative, size)):
        return absolute + relative * size
    return add(multiply(size, relative), absolute)


@composition(fused=True)
def isneginf(x: ArrayLike, /) -> ShardedTensor:
    """Tests for each real element whether it is negative infinity.

    Raises:
        ArgumentTypeError: x is complex or of times.

    >>> st.isneginf(st.asarray([-np.inf, np.inf, 0.0])).tolist()
    [True, False, False]
    """
    array = _real("isneginf", x)
    return logical_and(isinf(array), signbit(array))


@composition(fused=True)
def isposinf(x: ArrayLike, /) -> ShardedTensor:
    """Tests for each real element whether it is positive infinity.

    Raises:
        ArgumentTypeError: x is complex or of times.

    >>> st.isposinf(st.asarray([-np.inf, np.inf, 0.0])).tolist()
    [False, True, False]
    """
    array = _real("isposinf", x)
    return logical_and(isinf(array), logical_not(signbit(array)))


def _real(caller: str, x: Any) -> Any:
    array = array_like(x, caller)
    if result_type(array).kind not in "biuf":
        raise ArgumentTypeError(f"{caller}: x has dtype {result_type(array)}; wanted real numbers, which have a sign")
    return array if result_type(array).kind == "f" else astype(array, np.float64)


@operator()
def isnat(x: ArrayLike, /) -> ShardedTensor:
    """Tests for each element, a date or a duration, whether it is NaT (not a time).

    Raises:
        ArgumentTypeError: x has another dtype than datetime64 or timedelta64.

    >>> st.isnat(st.asarray(np.array(["2026-01-31", "NaT"], "datetime64[D]"))).tolist()
    [False, True]
    """


@implements(isnat, "composite")
def _isnat(x: Any) -> Any:
    if result_type(x).kind not in "mM":
        raise ArgumentTypeError(f"x has dtype {result_type(x)}; wanted datetime64 or timedelta64")
    return not_equal(x, x)


@composition()
def iscomplex(x: ArrayLike) -> ShardedTensor:
    """Tests for each element whether its imaginary part is not zero.

    >>> st.iscomplex(st.asarray([1 + 1j, 2 + 0j])).tolist()
    [True, False]
    """
    array = array_like(x, "iscomplex")
    if not iscomplexobj(array):
        return zeros_like(array, dtype=bool)
    return not_equal(imag(array), 0)


@composition()
def isreal(x: ArrayLike) -> ShardedTensor:
    """Tests for each element whether its imaginary part is zero.

    >>> st.isreal(st.asarray([1 + 1j, 2 + 0j])).tolist()
    [False, True]
    """
    array = array_like(x, "isreal")
    return equal(imag(array), 0) if iscomplexobj(array) else ones_like(array, dtype=bool)


# -- tests of whole arrays -------------------------------------------------------------------------


def allclose(
    a: ArrayLike, b: ArrayLike, rtol: ArrayLike = 1e-05, atol: ArrayLike = 1e-08, equal_nan: bool = False
) -> bool:
    """Tests whether all pairs of elements are close: see `isclose`.

    >>> st.allclose(st.asarray([1.0, 2.0]), [1.0, 2.0 + 1e-9])
    True
    """
    return bool(_all(isclose(a, b, rtol, atol, equal_nan)))


def array_equal(a1: ArrayLike, a2: ArrayLike, equal_nan: bool = False) -> bool:
    """Tests whether two arrays have the same shape and the same elements.

    Args:
        a1, a2: tensors, arrays, lists or scalars.
        equal_nan: whether two NaN are the same.

    >>> st.array_equal(st.asarray([1, 2]), [1, 2]), st.array_equal(st.asarray([1, 2]), [[1, 2]])
    (True, False)
    """
    x, y = [array_like(value, "array_equal") for value in (a1, a2)]
    if shape_of(x) != shape_of(y) or not _are_comparable(x, y):
        return False
    same = equal(x, y)
    return bool(_all(logical_or(same, logical_and(isnan(x), isnan(y))) if equal_nan else same))


def array_equiv(a1: ArrayLike, a2: ArrayLike) -> bool:
    """Tests whether two arrays broadcast, and have the same elements when they are broadcast.

    >>> st.array_equiv(st.asarray([1, 2]), [[1, 2], [1, 2]])
    True
    """
    x, y = [array_like(value, "array_equiv") for value in (a1, a2)]
    shape, other = shape_of(x), shape_of(y)
    if shape != other:
        try:
            shape = broadcast_shapes(shape, other)
        except ValueError:
            return False
    return bool(_all(equal(x, y))) if _are_comparable(x, y) else 0 in shape


def _are_comparable(x: Any, y: Any) -> bool:
    """Whether NumPy compares the elements of two arrays: dates with dates, durations with durations and integers."""
    dtypes = [result_type(a) for a in (x, y)]
    if {dtype.kind for dtype in dtypes}.isdisjoint("mM"):
        return True
    try:
        np.equal.resolve_dtypes((*dtypes, None))
    except TypeError:
        return False
    return True


# -- tests of dtypes -------------------------------------------------------------------------------


def iscomplexobj(x: ArrayLike) -> bool:
    """Tests whether an array has a complex dtype. No elements are read.

    >>> st.iscomplexobj(st.zeros(2)), st.iscomplexobj(1j)
    (False, True)
    """
    array = array_like(x, "iscomplexobj")
    return isinstance(array, complex) or (type(array) not in SCALARS and result_type(array).kind == "c")


def isrealobj(x: ArrayLike) -> bool:
    """Tests whether an array has another dtype than a complex one. No elements are read.

    >>> st.isrealobj(st.zeros(2)), st.isrealobj(1j)
    (True, False)
    """
    return not iscomplexobj(x)


def common_type(*arrays: ArrayLike) -> type[np.generic]:
    """Returns the floating-point type that all arrays can be converted to, at least float64 if one has integers.

    Raises:
        ArgumentTypeError: an array has bools.

    >>> st.common_type(st.zeros(2, dtype="float32"), st.zeros(2, dtype="int8"))
    <class 'numpy.float64'>
    """
    dtypes = [result_type(array_like(x, "common_type")) for x in arrays]
    try:
        return np.common_type(*[np.empty(0, dtype) for dtype in dtypes])
    except TypeError as error:
        raise ArgumentTypeError(f"common_type: {error}") from None


def min_scalar_type(a: ArrayLike, /) -> np.dtype[Any]:
    """Returns the least dtype that can hold a number; of an array with dimensions its dtype.

    >>> st.min_scalar_type(10), st.min_scalar_type(st.zeros(3))
    (dtype('uint8'), dtype('float64'))
    """
    array = array_like(a, "min_scalar_type")
    return np.min_scalar_type(np.empty(1, array.dtype) if shape_of(array) else on_host(array)[()])


def promote_types(type1: npt.DTypeLike, type2: npt.DTypeLike) -> np.dtype[Any]:
    """Returns the dtype to which two dtypes promote: see `result_type`.

    >>> st.promote_types("int32", "float32")
    dtype('float64')
    """
    try:
        return np.promote_types(type1, type2)
    except TypeError as error:
        raise ArgumentTypeError(f"promote_types: {error}") from None
