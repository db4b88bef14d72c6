"""Ranges of numbers, and convolutions with few elements, each by one pass over the elements."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from shardtensor_cupy.elementwise import TYPES, ElementwiseKernel

__all__ = ["Sequences"]

_THREADS = 256
"""The number of threads of a block."""

_EACH = 8
"""The number of results of a thread of a convolution."""

_TAPS = 256
"""The number of elements up to which the shorter array is in shared memory."""

_OPTIONS = ("--fmad=false",)
"""A product and a sum are rounded one after the other, as by separate kernels."""

_TEXT = """
extern "C" __global__ void shardtensor_convolve(
    const number *a, const number *v, number *y, long long n, int m, long long before, long long count
) {
    __shared__ number taps[TAPS];
    __shared__ number some[THREADS * EACH + TAPS];
    const long long first = (long long)blockIdx.x * (THREADS * EACH), from = first - before;
    for (int k = threadIdx.x; k < m; k += THREADS) taps[k] = v[k];
    for (int k = threadIdx.x; k < THREADS * EACH + m - 1; k += THREADS)
        some[k] = from + k >= 0 && from + k < n ? a[from + k] : (number)0;
    __syncthreads();
    number total[EACH];
    for (int j = 0; j < EACH; j++) total[j] = 0;
    if (from >= 0 && from + THREADS * EACH + m - 1 <= n) {
        for (int k = 0; k < m; k++) {
            const number tap = taps[k];
#pragma unroll
            for (int j = 0; j < EACH; j++) total[j] += (number)(some[j * THREADS + threadIdx.x + m - 1 - k] * tap);
        }
    } else {
        /* Nothing is multiplied by the zeros beyond the ends, where products with infinities would be NaN. */
        for (int k = 0; k < m; k++)
            for (int j = 0; j < EACH; j++) {
                const int at = j * THREADS + threadIdx.x + m - 1 - k;
                if (from + at >= 0 && from + at < n) total[j] += (number)(some[at] * taps[k]);
            }
    }
    for (int j = 0; j < EACH; j++)
        if (first + j * THREADS + threadIdx.x < count) y[first + j * THREADS + threadIdx.x] = total[j];
}
"""


class Sequences:
    """Computes sequences.

    Args:
        cupy: the module.
    """

    def __init__(self, cupy: Any) -> None:
        self._cupy = cupy

    def ramp(self, begin: int, end: int, step: Any, first: Any, dtype: np.dtype[Any], computed: np.dtype[Any]) -> Any:
        """Returns the numbers ``i * step + first`` for the integers from ``begin`` to ``end``, computed in one dtype
        and converted to another one; None for other dtypes than those that C converts.
        """
        known = all(d.kind in "iuf" and d.name in TYPES and d != np.float16 for d in (dtype, computed))
        if not known:
            return None
        out = self._cupy.empty((end - begin,), dtype)
        self._ramp(computed.name, dtype.name)(np.int64(begin), step, first, out)
        return out

    @functools.cache  # noqa: B019 - there is one for each process
    def _ramp(self, computed: str, made: str) -> ElementwiseKernel:
        operation = f"y = ({TYPES[made]})(({TYPES[computed]})(begin + (long long)i) * step + first)"
        inputs = f"int64 begin, {computed} step, {computed} first"
        name = f"shardtensor_ramp_{computed}_{made}"
        return ElementwiseKernel(self._cupy, inputs, f"{made} y", operation, name, "", _OPTIONS)

    def convolve(self, a: Any, v: Any, before: int, count: int) -> Any:
        """Returns ``count`` elements of a convolution of arrays of one dtype, from the one that begins ``before``
        elements before ``a``; None for long ``v`` and other dtypes than those of numbers in C.
        """
        m, dtype = v.size, a.dtype
        if not 0 < m <= _TAPS or dtype.kind not in "iuf" or dtype == np.float16 or dtype.name not in TYPES:
            return None
        out = self._cupy.empty((count,), dtype)
        sizes = (np.int64(a.size), np.int32(m), np.int64(before), np.int64(count))
        self._convolving(dtype.name)((-(-count // (_THREADS * _EACH)),), (_THREADS,), (a, v, out, *sizes))
        return out

    @functools.cache  # noqa: B019 - there is one for each process
    def _convolving(self, dtype: str) -> Any:
        text = f"typedef {TYPES[dtype]} number;\n" + _TEXT
        for macro, value in (("THREADS", _THREADS), ("EACH", _EACH), ("TAPS", _TAPS)):
            text = text.replace(macro, str(value))
        return self._cupy.RawKernel(text, "shardtensor_convolve", options=_OPTIONS)
