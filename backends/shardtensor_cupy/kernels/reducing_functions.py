"""Reductions, by the kernels of `Reductions` where CuPy's leave most of a GPU idle."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from shardtensor_cupy.kernels.array_functions import ArrayFunctions
from shardtensor_cupy.kernels.large_reductions import LEAST, Reductions, axes_of

__all__ = ["ReducingFunctions"]

_TOTALS = {(x, result): np.dtype(total) for x, result, total in ("eef", "eff", "edd", "fff", "fdd", "ddd")}
"""The dtypes in which floats of a dtype are added, for results of a dtype, where these kernels add them."""


class ReducingFunctions(ArrayFunctions):
    """The part of the namespace that reduces arrays."""

    def __init__(self, cupy: Any) -> None:
        super().__init__(cupy)
        self._reductions = Reductions(cupy)

    def sum(self, x: Any, /, *, axis: Any = None, dtype: Any = None, keepdims: bool = False) -> Any:
        """See NumPy."""
        if x.size >= LEAST:
            result = x.dtype if dtype is None else np.dtype(dtype)
            total = _TOTALS.get((x.dtype.char, result.char))
            reduction = None if total is None else self._reductions("sum", x, axis, keepdims, total, result)
            if reduction is not None:
                return reduction
        return self._cupy.sum(x, axis=axis, dtype=dtype, keepdims=keepdims)

    def mean(self, x: Any, /, *, axis: Any = None, dtype: Any = None, keepdims: bool = False) -> Any:
        """See NumPy."""
        reduction = self._mean(x, axis, keepdims, _result(x)) if dtype is None or x.dtype == dtype else None
        return self._compat.mean(x, axis=axis, dtype=dtype, keepdims=keepdims) if reduction is None else reduction

    def _mean(self, x: Any, axis: Any, keepdims: bool, result: Any) -> Any:
        total = _TOTALS.get((_result(x).char, result.char))
        if total is None:
            return None
        return self._reductions("sum", x, axis, keepdims, total, result, divisor=_count(x, axis))

    def squared_deviations(self, x: Any, means: Any, /, *, axis: Any, keepdims: bool) -> Any:
        """Returns the sums of the squared deviations from means of the dtype in which they are computed, by kernels
        that read x once; None where there are no such kernels.
        """
        total = _TOTALS.get((_result(x).char, means.dtype.char))
        if total is None or total != means.dtype or not means.flags.c_contiguous:
            return None
        return self._reductions("squares", x, axis, keepdims, total, total, means=means)

    def var(self, x: Any, /, *, axis: Any = None, correction: float = 0.0, keepdims: bool = False) -> Any:
        """See NumPy."""
        result = _result(x)
        total = _TOTALS.get((result.char, result.char))
        means = None if total is None else self._mean(x, axis, True, total)
        if total is None or means is None:
            return self._compat.var(x, axis=axis, correction=correction, keepdims=keepdims)
        freedom = max(_count(x, axis) - correction, 0.0)
        if means.flags.c_contiguous:
            reduction = self._reductions("squares", x, axis, keepdims, total, result, divisor=freedom, means=means)
            if reduction is not None:
                return reduction
        deviations = self.subtract(x, means)
        return self._compat.astype(
            self.divide(self.sum(self.multiply(deviations, deviations), axis=axis, keepdims=keepdims), freedom),
            result,
            copy=False,
        )

    def std(self, x: Any, /, *, axis: Any = None, correction: float = 0.0, keepdims: bool = False) -> Any:
        """See NumPy."""
        return self.sqrt(self.var(x, axis=axis, correction=correction, keepdims=keepdims))

    def max(self, x: Any, /, *, axis: Any = None, keepdims: bool = False) -> Any:
        """See NumPy."""
        return self._extremum("max", x, axis, keepdims)

    def min(self, x: Any, /, *, axis: Any = None, keepdims: bool = False) -> Any:
        """See NumPy."""
        return self._extremum("min", x, axis, keepdims)

    def _extremum(self, name: str, x: Any, axis: Any, keepdims: bool) -> Any:
        if x.size >= LEAST and x.dtype.char in "fd":
            reduction = self._reductions(name, x, axis, keepdims, x.dtype, x.dtype)
            if reduction is not None:
                return reduction
        return getattr(self._cupy, name)(x, axis=axis, keepdims=keepdims)

    def adds_everywhere(self, shape: Sequence[int], axes: Sequence[int], dtype: Any) -> bool:
        """Whether floats of a dtype are added by these kernels in arrays of a shape, along some dimensions."""
        return dtype.char in "efd" and self._reductions.takes(shape, axes)


def _result(x: Any) -> np.dtype[Any]:
    """Returns the dtype of the mean of an array."""
    return np.dtype(np.float64) if x.dtype.kind in "biu" else x.dtype


def _count(x: Any, axis: Any) -> int:
    """Returns the number of elements of which each element of a reduction is made."""
    return math.prod([x.shape[d] for d in axes_of(axis, x.ndim)])
