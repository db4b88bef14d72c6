"""The array-API namespace of CuPy's arrays: CuPy's ufuncs, corrected where their semantics differ from NumPy's.

Functions that are neither ufuncs nor defined here come from `array_api_compat.cupy`.
"""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from shardtensor.errors import ArgumentError
from shardtensor_cupy.casts import Casts
from shardtensor_cupy.line_sort import LineSort
from shardtensor_cupy.scans import LONG, Scans
from shardtensor_cupy.searches import Searches
from shardtensor_cupy.sequences import Sequences
from shardtensor_cupy.ufuncs import LARGE, LargeUfuncs

__all__ = ["Namespace"]

_SUMS = {"b": np.dtype(np.int64), "i": np.dtype(np.int64), "u": np.dtype(np.uint64)}
"""The dtype of sums of the kinds of dtypes whose sums are wider."""

_COMPARISONS = ("equal", "not_equal", "less", "less_equal", "greater", "greater_equal")


class Namespace:
    """The array-API namespace; its functions run on the current GPU.

    Ufuncs are CuPy's own, because some of array-api-compat's wrappers take no ``out=`` or cast differently.
    """

    def __init__(self, cupy: Any) -> None:
        self._cupy = cupy
        self._compat: Any = importlib.import_module("array_api_compat.cupy")
        self._large = LargeUfuncs(cupy)
        self._casts = Casts(cupy)
        self._scans = Scans(cupy)
        self._searches = Searches(cupy)
        self._sequences = Sequences(cupy)
        self._line_sort = LineSort(cupy)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._cupy, name, None)
        if isinstance(found, self._cupy.ufunc):
            found = functools.partial(_call, found, name in _COMPARISONS, self._large)
        else:
            found = getattr(self._compat, name)
        setattr(self, name, found)
        return found

    def fuse(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a function that calls ufuncs only as one kernel, which CuPy composes of their code.

        It is compiled for each number of dimensions and dtype at first use, under the name of the function.
        """
        fused: Callable[..., Any] = self._cupy.fuse(function)
        return fused

    # -- truth -------------------------------------------------------------------------------------

    def _truth(self, x: Any) -> Any:
        """Returns the truth value of each element: a bool array for an array, a bool for a number."""
        if not isinstance(x, self._cupy.ndarray):
            return bool(x)
        return x if x.dtype == np.bool_ else self._cupy.not_equal(x, 0)

    def _logical(self, name: str, x1: Any, x2: Any, out: Any) -> Any:
        """Applies a logical function to two operands.

        Only operands of one real dtype are passed unchanged: CuPy's logical functions take no complex numbers, and its
        `logical_and` of a signed and an unsigned integer treats negative numbers as false.
        """
        alike = isinstance(x1, self._cupy.ndarray) and isinstance(x2, self._cupy.ndarray) and x1.dtype == x2.dtype
        if not alike or x1.dtype.kind == "c":
            x1, x2 = self._truth(x1), self._truth(x2)
        return getattr(self._cupy, name)(x1, x2, out=out)

    def logical_and(self, x1: Any, x2: Any, /, *, out: Any = None) -> Any:
        """See NumPy."""
        return self._logical("logical_and", x1, x2, out)

    def logical_or(self, x1: Any, x2: Any, /, *, out: Any = None) -> Any:
        """See NumPy."""
        return self._logical("logical_or", x1, x2, out)

    def logical_xor(self, x1: Any, x2: Any, /, *, out: Any = None) -> Any:
        """See NumPy."""
        return self._logical("logical_xor", x1, x2, out)

    def logical_not(self, x: Any, /, *, out: Any = None) -> Any:
        """See NumPy."""
        if x.dtype.kind == "c":  # CuPy has no logical_not of complex numbers.
            return self._cupy.equal(x, 0, out=out)
        return self._cupy.logical_not(x, out=out)

    # -- copies ------------------------------------------------------------------------------------

    def asarray(self, x: Any, /, *, dtype: Any = None, copy: bool | None = None, **kwargs: Any) -> Any:
        """See NumPy."""
        if isinstance(x, self._cupy.ndarray) and x.size >= LARGE and not kwargs:
            made = self._copied(x, x.dtype if dtype is None else np.dtype(dtype), bool(copy))
            if made is not None:
                return made
        return self._compat.asarray(x, dtype=dtype, copy=copy, **kwargs)

    def astype(self, x: Any, dtype: Any, /, *, copy: bool = True, device: Any = None) -> Any:
        """See NumPy."""
        if x.size >= LARGE and device is None:
            made = self._copied(x, np.dtype(dtype), copy)
            if made is not None:
                return made
        return self._compat.astype(x, dtype, copy=copy, device=device)

    def reshape(self, x: Any, /, shape: Any, *, copy: bool | None = None, **kwargs: Any) -> Any:
        """See NumPy."""
        if x.size >= LARGE and not x.flags.c_contiguous and not kwargs and copy is not False:
            view = None if copy else _viewed(x, shape)
            return self.in_rows(x).reshape(shape) if view is None else view
        return self._compat.reshape(x, shape, copy=copy, **kwargs)

    def in_rows(self, x: Any) -> Any:
        """Returns a copy in row-major order."""
        made = self._copied(x, x.dtype, True, "C") if x.size >= LARGE else None
        return x.copy(order="C") if made is None else made

    def _copied(self, x: Any, dtype: Any, copy: bool, order: str = "K") -> Any:
        """Returns a large array in a dtype; a copy if ``copy``, or the dtype differs. None if CuPy has to cast it."""
        if not copy and x.dtype == dtype:
            return x
        if x.data.device_id != self._cupy.cuda.runtime.getDevice():
            return None
        return self._casts.copy(x, dtype, order)

    def store(self, out: Any, index: Any, x: Any) -> None:
        """Writes an array to the elements of another one that a basic index selects."""
        if out.size < LARGE:
            out[index] = x
        else:
            part = out[index]
            if part.size < LARGE or not self._casts.into(part, x):
                part[...] = x

    # -- scans and orders --------------------------------------------------------------------------

    def cumsum(self, x: Any, /, axis: int | None = None, dtype: Any = None, out: Any = None) -> Any:
        """See NumPy."""
        return self._accumulated("cumsum", "+", x, axis, dtype, out)

    def cumprod(self, x: Any, /, axis: int | None = None, dtype: Any = None, out: Any = None) -> Any:
        """See NumPy."""
        return self._accumulated("cumprod", "*", x, axis, dtype, out)

    def _accumulated(self, name: str, operator: str, x: Any, axis: int | None, dtype: Any, out: Any) -> Any:
        along = 0 if axis is None else axis % max(x.ndim, 1)
        if out is None and x.ndim and (axis is not None or x.ndim == 1) and x.shape[along] >= LONG:
            sums = _SUMS.get(x.dtype.kind, x.dtype) if dtype is None else np.dtype(dtype)
            if self._scans.takes(x.dtype, sums):
                return self._scans(self._in_rows(x), along, operator, sums)
        return getattr(self._cupy, name)(x, axis=axis, dtype=dtype, out=out)

    def sort(self, x: Any, /, *, axis: int = -1, **kwargs: Any) -> Any:
        """See NumPy."""
        return self._ordered("sort", x, axis, kwargs)

    def argsort(self, x: Any, /, *, axis: int = -1, **kwargs: Any) -> Any:
        """See NumPy."""
        return self._ordered("argsort", x, axis, kwargs)

    def _ordered(self, name: str, x: Any, axis: int, kwargs: Any) -> Any:
        """Sorts an array; one line of an array of several dimensions as one of one dimension, because CuPy sorts that
        in a tenth of the time.
        """
        function = getattr(self._compat, name)
        if name == "sort" and x.ndim == 1 and x.size >= LARGE and kwargs.keys() <= {"stable"}:
            made = self.in_rows(x)  # CuPy's copy takes more time than this one.
            made.sort(kind="stable" if kwargs.get("stable", True) else None)
            return made
        if x.ndim > 1 and x.size and x.shape[axis] == x.size:
            return self._ordered(name, x.reshape(-1), 0, kwargs).reshape(x.shape)
        wide = name == "sort" and x.ndim > 1 and x.size >= LARGE and kwargs.keys() <= {"stable"}
        if wide and self._line_sort.takes(x.dtype, kwargs.get("stable", True)) and x.size // x.shape[axis] < 1 << 32:
            lines = self._line_sort(self._in_rows(self._cupy.moveaxis(x, axis, -1)))
            return self._in_rows(self._cupy.moveaxis(lines, -1, axis))
        return function(x, axis=axis, **kwargs)

    # -- positions and counts ----------------------------------------------------------------------

    def nonzero(self, x: Any, /) -> tuple[Any, ...]:
        """See NumPy."""
        if x.size >= LARGE:
            mask = x if x.dtype == np.bool_ else self.not_equal(x, 0)
            found = self._searches.nonzero(self._in_rows(mask))
            if found is not None:
                return found
        indices: tuple[Any, ...] = self._compat.nonzero(x)
        return indices

    def searchsorted(self, x1: Any, x2: Any, /, *, side: str = "left", sorter: Any = None) -> Any:
        """See NumPy."""
        if sorter is None and getattr(x2, "size", 0) >= LARGE:
            found = self._searches.searchsorted(self._in_rows(x1), self._in_rows(x2), side)
            if found is not None:
                return found
        return self._compat.searchsorted(x1, x2, side=side, sorter=sorter)

    def counts_below(self, x: Any, length: int) -> Any:
        """Returns the counts of integers that are all from 0 to below ``length``; None for short arrays."""
        return self._searches.bincount(self._in_rows(x), length) if x.size >= LARGE else None

    def histogram_counts(self, x: Any, edges: Any) -> Any:
        """Returns the counts of `histogram` for edges in ascending order; None for short arrays and some dtypes."""
        if x.size < LARGE:
            return None
        return self._searches.histogram(self._in_rows(x), self._in_rows(edges))

    def interpolated(self, x: Any, points: Any, values: Any, left: float | None, right: float | None) -> Any:
        """Returns `interp` of points in ascending order; None for short arrays, one point, and some dtypes."""
        if x.size < LARGE or points.size < 2:
            return None
        return self._searches.interpolated(self._in_rows(x), self._in_rows(points), self._in_rows(values), left, right)

    def ramp(self, begin: int, end: int, step: Any, first: Any, dtype: Any, computed: Any) -> Any:
        """Returns ``i * step + first`` for a range of integers; see `Sequences.ramp`. None for short ranges."""
        if end - begin < LARGE:
            return None
        return self._sequences.ramp(begin, end, step, first, dtype, computed)

    def convolved(self, a: Any, v: Any, before: int, count: int) -> Any:
        """Returns a part of a convolution; see `Sequences.convolve`."""
        return self._sequences.convolve(self._in_rows(a), self._in_rows(v), before, count)

    def difference_quotient(self, x1: Any, x2: Any, distance: float, out: Any) -> None:
        """Writes the differences of floats, divided by a number; by one kernel for numbers in C."""
        if not self._sequences.difference_quotient(x1, x2, distance, out):
            self._cupy.subtract(x1, x2, out=out)
            self._cupy.true_divide(out, distance, out=out)

    def triangle(self, x: Any, below: int, lower: bool) -> Any:
        """Returns matrices with zeros beyond a diagonal; None for small ones, and for some sizes and dtypes."""
        return self._sequences.triangle(self._in_rows(x), below, lower) if x.size >= LARGE else None

    def cross_products(self, a: Sequence[Any], b: Sequence[Any], axis: int, dtype: Any) -> Any:
        """Returns the cross products of vectors, given their parts; None for some dtypes."""
        return self._sequences.cross_products(a, b, axis, dtype)

    def _in_rows(self, x: Any) -> Any:
        return x if x.flags.c_contiguous else self.in_rows(x)

    # -- other functions ---------------------------------------------------------------------------

    def where(self, condition: Any, x1: Any, x2: Any, /) -> Any:
        """See NumPy. The condition may be a number; integers out of range wrap around."""
        if not isinstance(condition, self._cupy.ndarray):
            condition = self._cupy.asarray(bool(condition))
        dtype = np.result_type(*[getattr(x, "dtype", x) for x in (x1, x2)])
        # NumPy converts Python integers, because CuPy raises OverflowError for those out of range.
        x1, x2 = [np.asarray(x).astype(dtype)[()] if type(x) is int else x for x in (x1, x2)]
        if any(getattr(x, "size", 0) >= LARGE for x in (condition, x1, x2)):
            made = self._casts.where(condition, x1, x2, dtype)
            if made is not None:
                return made
        return self._cupy.where(condition, x1, x2)

    def clip(self, x: Any, /, min: Any = None, max: Any = None, *, out: Any = None) -> Any:
        """See NumPy. The bounds take part in type promotion, and a NaN bound gives NaN."""
        if x.dtype.kind in "iu":  # An integer beyond the dtype's range has no effect, and cannot be converted.
            known = np.iinfo(x.dtype)
            min = None if type(min) is int and min <= known.min else min
            max = None if type(max) is int and max >= known.max else max
        given = [x, *[bound for bound in (min, max) if bound is not None]]
        dtype = np.result_type(*[getattr(a, "dtype", a) for a in given])
        x, min, max = [a.astype(dtype, copy=False) if hasattr(a, "dtype") else a for a in (x, min, max)]
        if min is not None and max is not None:
            if out is None and x.dtype == dtype:
                return self._between(x, *[_element(bound, dtype) for bound in (min, max)])
            return self.minimum(self.maximum(x, min), max, out=out)
        if min is not None:
            return self.maximum(x, min, out=out)
        if max is not None:
            return self.minimum(x, max, out=out)
        if out is None:
            return x.copy()
        out[...] = x
        return out

    @functools.cached_property
    def _between(self) -> Any:
        """`clip` of operands of one dtype as one kernel."""
        minimum, maximum = self._cupy.minimum, self._cupy.maximum

        @self.fuse
        def clip(x: Any, low: Any, high: Any) -> Any:
            return minimum(maximum(x, low), high)

        return clip

    def vecdot(self, x1: Any, x2: Any, /, *, axis: int = -1) -> Any:
        """See NumPy. For bools the result is whether any pair of elements is true in both operands."""
        if x1.dtype == x2.dtype == np.bool_:  # array-api-compat sums them as int8, in which 256 true pairs are 0.
            if x1.shape[axis] != x2.shape[axis]:
                raise ArgumentError(
                    f"vecdot: x1 has {x1.shape[axis]} elements along axis {axis}, and x2 has {x2.shape[axis]}"
                )
            pairs = [self._cupy.moveaxis(x, axis, -1) for x in (x1, x2)]
            return self._cupy.logical_and(*pairs).any(axis=-1)
        return self._compat.vecdot(x1, x2, axis=axis)


def _call(ufunc: Any, compares: bool, large: LargeUfuncs, /, *args: Any, **kwargs: Any) -> Any:
    """Calls a ufunc with operands that may include Python integers of any size.

    CuPy raises OverflowError for integers that do not fit into 64 bits or into the dtype of the selected loop. NumPy
    compares them with any operand, and converts them to floats if the loop computes in floats. Beside bools, NumPy
    takes them for int64, where CuPy lets them wrap around.
    """
    for x in args:
        if type(x) is int and not -(2**63) <= x < 2**63:
            if (compares or "ll->l" in ufunc.types) and all(type(y) is int or _is_bool(y) for y in args):
                raise OverflowError(f"Python integer {x} out of bounds for int64")
            break
    try:
        if _is_large(args) and (not kwargs or tuple(kwargs) == ("out",)):
            result = large(ufunc, args, kwargs.get("out"))
            if result is not NotImplemented:
                return result
        return ufunc(*args, **kwargs)
    except OverflowError:
        inexact = any(getattr(x, "dtype", np.dtype(bool)).kind in "fc" for x in args)
        if not (compares or inexact or "ll->l" not in ufunc.types):
            raise
        infinite = compares and not inexact
        return ufunc(*[_as_float(x, infinite) if type(x) is int else x for x in args], **kwargs)


def _viewed(x: Any, shape: Any) -> Any:
    """Returns a view of an array in another shape, or None if it would have to be copied."""
    view = x.view()
    try:
        view.shape = shape
    except (AttributeError, ValueError):  # of CuPy and of NumPy
        return None
    return view


def _is_large(args: Any) -> bool:
    """Whether an operand of a ufunc is large, or its result."""
    if any(getattr(x, "size", 0) >= LARGE for x in args):
        return True
    if len(args) != 2 or not all(getattr(x, "ndim", 0) for x in args):
        return False
    x, y = args
    return x.size * y.size >= LARGE and x.shape != y.shape and _broadcast_size(x.shape, y.shape) >= LARGE


def _broadcast_size(*shapes: tuple[int, ...]) -> int:
    """Returns the number of elements of a result; 0 for shapes that do not broadcast."""
    try:
        return math.prod(np.broadcast_shapes(*shapes))
    except ValueError:
        return 0


def _is_bool(x: Any) -> bool:
    return type(x) is bool or getattr(x, "dtype", None) == np.bool_


def _element(bound: Any, dtype: Any) -> Any:
    """Returns an array or a Python number as an operand of a fused kernel, in which Python numbers have dtypes of their
    own.

    Raises:
        OverflowError: the number is an integer out of the range of the dtype.
    """
    if hasattr(bound, "dtype"):
        return bound
    return np.asarray(bound if dtype.kind in "iu" or type(bound) is not int else float(bound), dtype)[()]


def _as_float(x: int, infinite: bool) -> float:
    """Returns a Python integer as a float, or as an infinity of its sign if ``infinite``.

    An infinity compares with 64-bit integers as an integer of more than 64 bits does.
    """
    return math.copysign(math.inf, x) if infinite else float(x)
