"""Scans, orders, searches and counts, by kernels for large arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from shardtensor_cupy.kernels import large_ufuncs
from shardtensor_cupy.kernels.array_functions import ArrayFunctions
from shardtensor_cupy.kernels.line_scans import LONG, Scans
from shardtensor_cupy.kernels.line_sort import LineSort
from shardtensor_cupy.kernels.quantile_kernels import Quantiles
from shardtensor_cupy.kernels.searches import Searches

__all__ = ["OrderingFunctions"]

_SUMS = {"b": np.dtype(np.int64), "i": np.dtype(np.int64), "u": np.dtype(np.uint64)}
"""The dtype of sums of the kinds of dtypes whose sums are wider."""


class OrderingFunctions(ArrayFunctions):
    """The part of the namespace that depends on the order of elements."""

    def __init__(self, cupy: Any) -> None:
        super().__init__(cupy)
        self._scans = Scans(cupy)
        self._searches = Searches(cupy)
        self._line_sort = LineSort(cupy)
        self._quantiles = Quantiles(cupy)

    # -- scans and orders --------------------------------------------------------------------------

    def cumsum(self, x: Any, /, axis: int | None = None, dtype: Any = None, out: Any = None) -> Any:
        """See NumPy."""
        return self._accumulated("cumsum", "+", x, axis, dtype, out)

    def cumprod(self, x: Any, /, axis: int | None = None, dtype: Any = None, out: Any = None) -> Any:
        """See NumPy."""
        return self._accumulated("cumprod", "*", x, axis, dtype, out)

    def _accumulated(self, name: str, operator: str, x: Any, axis: int | None, dtype: Any, out: Any) -> Any:
        along = 0 if axis is None else axis
        fits = x.ndim and -x.ndim <= along < x.ndim and (axis is not None or x.ndim == 1)
        if out is None and fits and x.shape[along] >= LONG:
            sums = _SUMS.get(x.dtype.kind, x.dtype) if dtype is None else np.dtype(dtype)
            if self._scans.takes(x.dtype, sums):
                return self._scans(self._in_rows(x), along % x.ndim, operator, sums)
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
        if name == "sort" and x.ndim == 1 and x.size >= large_ufuncs.LARGE and kwargs.keys() <= {"stable"}:
            result = self.in_rows(x)  # CuPy's copy takes more time than this one.
            result.sort(kind="stable" if kwargs.get("stable", True) else None)
            return result
        if not -x.ndim <= axis < x.ndim:
            return function(x, axis=axis, **kwargs)  # which raises the error
        if x.ndim > 1 and x.size and x.shape[axis] == x.size:
            return self._ordered(name, x.reshape(-1), 0, kwargs).reshape(x.shape)
        wide = name == "sort" and x.ndim > 1 and x.size >= large_ufuncs.LARGE and kwargs.keys() <= {"stable"}
        if wide and self._line_sort.takes(x.dtype, kwargs.get("stable", True)) and x.size // x.shape[axis] < 1 << 32:
            lines = self._line_sort(self._in_rows(self._cupy.moveaxis(x, axis, -1)))
            return self._in_rows(self._cupy.moveaxis(lines, -1, axis))
        return function(x, axis=axis, **kwargs)

    # -- searches and counts -----------------------------------------------------------------------

    def searchsorted(self, x1: Any, x2: Any, /, *, side: str = "left", sorter: Any = None) -> Any:
        """See NumPy."""
        x1, x2 = self._comparable(x1, x2)
        if sorter is None and x2.size >= large_ufuncs.LARGE:
            positions = self._searches.searchsorted(self._in_rows(x1), self._in_rows(x2), side)
            if positions is not None:
                return positions
        return self._compat.searchsorted(x1, x2, side=side, sorter=sorter)

    def isin(self, x1: Any, x2: Any, /, *, invert: bool = False) -> Any:
        """See NumPy."""
        x2, x1 = self._comparable(x2, x1)
        return self._compat.isin(x1, x2, invert=invert)

    def _comparable(self, ordered: Any, x: Any) -> tuple[Any, Any]:
        """Returns operands of CuPy's binary search: the array that is searched, and the elements to be found.

        They have NumPy's common dtype. CuPy's kernel compares operands of two dtypes as C does, which takes -1 for a
        large unsigned integer and rounds integers to float32, and is not compiled for complex operands of two dtypes.
        Complex numbers with a part that is NaN are NaN in both: by their real parts only, CuPy's kernel would search
        in the wrong half.
        """
        dtype = np.result_type(*[getattr(a, "dtype", a) for a in (ordered, x)])
        ordered, x = [self._cupy.asarray(a, dtype=dtype) for a in (ordered, x)]
        if dtype.kind == "c":
            ordered = self._cupy.where(self._cupy.isnan(ordered), dtype.type(complex(np.nan, np.nan)), ordered)
        return ordered, x

    def nonzero(self, x: Any, /) -> tuple[Any, ...]:
        """See NumPy."""
        if x.size >= large_ufuncs.LARGE:
            mask = x if x.dtype == np.bool_ else self.not_equal(x, 0)
            places = self._searches.nonzero(self._in_rows(mask))
            if places is not None:
                return places
        indices: tuple[Any, ...] = self._compat.nonzero(x)
        return indices

    def counts_below(self, x: Any, length: int) -> Any:
        """Returns the counts of integers that are all from 0 to below ``length``; None for short arrays."""
        return self._searches.bincount(self._in_rows(x), length) if x.size >= large_ufuncs.LARGE else None

    def histogram_counts(self, x: Any, edges: Any) -> Any:
        """Returns the counts of `histogram` for edges in ascending order; None for short arrays and some dtypes."""
        if x.size < large_ufuncs.LARGE:
            return None
        return self._searches.histogram(self._in_rows(x), self._in_rows(edges))

    def interpolated(self, x: Any, points: Any, values: Any, left: float | None, right: float | None) -> Any:
        """Returns `interp` of points in ascending order; None for short arrays, one point, and some dtypes."""
        if x.size < large_ufuncs.LARGE or points.size < 2:
            return None
        return self._searches.interpolated(self._in_rows(x), self._in_rows(points), self._in_rows(values), left, right)

    def quantiles_between(
        self, lines: Any, lower: Sequence[int], upper: Sequence[int], weights: Any, dtype: np.dtype[Any], mean: bool
    ) -> Any:
        """Returns the quantiles between elements of sorted lines, in the first dimension; None for many, and for some
        dtypes.
        """
        return self._quantiles.between(lines, lower, upper, weights, dtype, mean)

    def quantiles_of_numbers(self, lines: Any, q: Any, width: str, dtype: np.dtype[Any], method: str) -> Any:
        """Returns the quantiles of the elements of sorted lines that are not NaN, in the first dimension; None for long
        lists, for some methods and for some dtypes.
        """
        numbers = q if isinstance(q, list) else self._in_rows(q)
        return self._quantiles.of_numbers(self._in_rows(lines), numbers, width, dtype, method)
