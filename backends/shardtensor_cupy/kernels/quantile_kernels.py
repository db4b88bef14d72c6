"""Quantiles between elements of sorted lines, each by one kernel in place of a dozen."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from shardtensor_cupy.kernels.elementwise_kernel import TYPES, ElementwiseKernel

__all__ = ["Quantiles"]

_OPTIONS = ("--fmad=false",)
"""A product and a sum are rounded one after the other, as by separate kernels."""

_MOST = 8
"""The number of quantiles up to which each takes a kernel: these are fewer than the functions for all take."""

_FLOATS = ("float32", "float64")

_ELEMENT = "const result between = a;"
_MEAN = "const result between = weight == 1 ? (result)b : ((result)a + (result)b) / 2;"
_LINEAR = """\
const result step = (result)(DIFFERENCE);
const result between = nearer ? (result)b - step * rest : (result)a + step * weight;"""


class Quantiles:
    """Computes quantiles.

    Args:
        cupy: the module.
    """

    def __init__(self, cupy: Any) -> None:
        self._cupy = cupy

    def between(
        self, lines: Any, lower: Sequence[int], upper: Sequence[int], weights: Any, dtype: np.dtype[Any], mean: bool
    ) -> Any:
        """Returns the quantiles between elements of the last dimension, in the first one; None for many of them, and
        for other dtypes than those of numbers in C.

        Args:
            lines: the elements, of which the last one of each line is NaN if any is.
            lower, upper: the places of the elements before and behind each quantile.
            weights: the distances from the former, a host array; None if the quantiles are elements.
            dtype: that of the result.
            mean: whether a quantile is the mean of both elements, but for a distance of 1.
        """
        computed = dtype.name in _FLOATS if weights is not None else dtype == lines.dtype
        if len(lower) > _MOST or not computed or lines.dtype.kind not in "iuf" or lines.dtype == np.float16:
            return None
        out = self._cupy.empty((len(lower), *lines.shape[:-1]), dtype)
        kernel = self._kernel(lines.dtype.name, dtype.name, "element" if weights is None else "mean" if mean else "")
        distances = np.zeros(len(lower)) if weights is None else weights
        # As the functions for all compute them: the rest in the dtype of the distances.
        numbers = zip(distances.astype(dtype), np.subtract(1, distances).astype(dtype), distances >= 0.5, strict=True)
        for k, (at, behind, (weight, rest, nearer)) in enumerate(zip(lower, upper, numbers, strict=True)):
            kernel(lines[..., at], lines[..., behind], lines[..., -1], weight, rest, np.int32(nearer), out[k])
        return out

    @functools.cache  # noqa: B019 - there is one for each process
    def _kernel(self, element: str, result: str, rule: str) -> ElementwiseKernel:
        real = element in _FLOATS
        # Differences of integers wrap around, as NumPy's do.
        wrapped = f"({TYPES[element]})((unsigned long long)b - (unsigned long long)a)"
        operation = {"element": _ELEMENT, "mean": _MEAN, "": _LINEAR}[rule].replace(
            "DIFFERENCE", "b - a" if real else wrapped
        )
        operation += "\ny = last != last ? (result)last : between;" if real else "\ny = between;"
        inputs = f"{element} a, {element} b, {element} last, {result} weight, {result} rest, int32 nearer"
        name = f"shardtensor_quantile_{rule}_{element}_{result}"
        preamble = f"typedef {TYPES[result]} result;"
        return ElementwiseKernel(self._cupy, inputs, f"{result} y", operation, name, preamble, _OPTIONS)
