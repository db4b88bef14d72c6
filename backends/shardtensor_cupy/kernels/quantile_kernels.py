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

_THREADS = 128
"""The number of threads of a block."""

_ELEMENT = "const result between = a;"
_MEAN = "const result between = weight == 1 ? (result)b : ((result)a + (result)b) / 2;"
_LINEAR = """\
const result step = (result)(DIFFERENCE);
const result between = nearer ? (result)b - step * rest : (result)a + step * weight;"""


_OF_NUMBERS = """
extern "C" __global__ void shardtensor_{name}(
    const element *lines, result *y, long long total, long long count, long long size, {quantiles}
) {
    const long long i = (long long)blockIdx.x * {threads} + threadIdx.x;
    if (i >= total) return;
    const element *x = lines + i % count * size;
    const place q = {quantile};
    long long n = 0, end = size;  /* NaN are behind all numbers. */
    while (n < end) {
        const long long middle = (n + end) / 2;
        if (x[middle] == x[middle]) n = middle + 1;
        else end = middle;
    }
    if (!n) {
        y[i] = x[0];
        return;
    }
    const long long last = n - 1;
    long long lower, upper;
    place weight;
    {places}
    const result a = (result)x[lower], b = (result)x[upper], step = (result)(x[upper] - x[lower]);
    y[i] = {between};
}
"""

_MEDIAN_PLACES = """
    lower = last / 2;
    upper = n / 2 < last ? n / 2 : last;
    weight = lower == upper ? 1 : 0.5;"""

_LINEAR_PLACES = """
    const place most = (place)last, position = most * q, before = floor(position);
    const int is_last = position >= most;
    lower = is_last ? last : (long long)before;
    upper = is_last ? last : (long long)(before + 1);
    weight = position - (is_last ? -1 : before);"""

_BETWEEN = {
    "median": "weight == 1 ? b : (a + b) / 2",
    "linear": "weight >= (place)0.5 ? b - step * (result)(1 - weight) : a + step * (result)weight",
}


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

    def of_numbers(self, lines: Any, q: Any, width: str, dtype: np.dtype[Any], method: str) -> Any:
        """Returns the quantiles of the elements that are not NaN, in the first dimension; None for long lists of them,
        other methods, and other dtypes than those of floating-point numbers in C.

        Args:
            lines: sorted lines, along the last dimension and in row-major order, which NaN end.
            q: the quantiles: a list, or an array on the device of dtype ``width``.
            width: the dtype in which places are computed.
            dtype: that of the result.
            method: ``"median"`` or ``"linear"``.
        """
        place = np.dtype(width)
        names = lines.dtype.name, dtype.name, place.name
        is_list = isinstance(q, list)
        if method not in _BETWEEN or not set(names) <= set(_FLOATS) or not lines.size or (is_list and len(q) > _MOST):
            return None
        count, size = lines.size // lines.shape[-1], lines.shape[-1]
        out = self._cupy.empty((len(q), *lines.shape[:-1]), dtype)
        kernel = self._kernel_of_numbers(*names, method, is_list)
        for part, numbers in [(out[k], place.type(number)) for k, number in enumerate(q)] if is_list else [(out, q)]:
            sizes = np.int64(part.size), np.int64(count), np.int64(size)
            kernel((-(-part.size // _THREADS),), (_THREADS,), (lines, part, *sizes, numbers))
        return out

    @functools.cache  # noqa: B019 - there is one for each process
    def _kernel_of_numbers(self, element: str, result: str, place: str, method: str, is_one: bool) -> Any:
        name = f"quantile{'' if is_one else 's'}_of_numbers_{method}_{element}_{result}_{place}"
        text = "".join(
            [f"typedef {TYPES[t]} {n};\n" for n, t in (("element", element), ("result", result), ("place", place))]
        )
        parts = {
            "name": name,
            "threads": str(_THREADS),
            "quantiles": "place number" if is_one else "const place *numbers",
            "quantile": "number" if is_one else "numbers[i / count]",
            "places": _MEDIAN_PLACES if method == "median" else _LINEAR_PLACES,
            "between": _BETWEEN[method],
        }
        text += _OF_NUMBERS
        for part, value in parts.items():
            text = text.replace(f"{{{part}}}", value)
        return self._cupy.RawKernel(text, f"shardtensor_{name}", options=_OPTIONS)

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
