"""Ranges of numbers, and convolutions with few elements, each by one pass over the elements."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from shardtensor_cupy.kernels.casts import OF_SIZE
from shardtensor_cupy.kernels.elementwise_kernel import TYPES, ElementwiseKernel

__all__ = ["Sequences"]

_THREADS = 256
"""The number of threads of a block."""

_EACH = 8
"""The number of results of a thread of a convolution."""

_TAPS = 256
"""The number of elements up to which the shorter array is in shared memory."""

_OPTIONS = ("--fmad=false",)
"""A product and a sum are rounded one after the other, as by separate kernels."""

_NUMBERS = ("int32", "int64", "uint32", "uint64", "float32", "float64")
"""The dtypes that C does not promote in products."""

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
    def _ramp(self, computed: str, dtype: str) -> ElementwiseKernel:
        operation = f"y = ({TYPES[dtype]})(({TYPES[computed]})(begin + (long long)i) * step + first)"
        inputs = f"int64 begin, {computed} step, {computed} first"
        name = f"shardtensor_ramp_{computed}_{dtype}"
        return ElementwiseKernel(self._cupy, inputs, f"{dtype} y", operation, name, "", _OPTIONS)

    def difference_quotient(self, x1: Any, x2: Any, distance: float, out: Any) -> bool:
        """Writes the differences of floats, divided by a number; returns False for other dtypes than those of C."""
        if not out.dtype == x1.dtype == x2.dtype or out.dtype.name not in ("float32", "float64"):
            return False
        self._quotient(out.dtype.name)(x1, x2, distance, out)
        return True

    @functools.cache  # noqa: B019 - there is one for each process
    def _quotient(self, dtype: str) -> ElementwiseKernel:
        inputs, name = f"{dtype} x1, {dtype} x2, {dtype} h", f"shardtensor_difference_quotient_{dtype}"
        return ElementwiseKernel(self._cupy, inputs, f"{dtype} y", "y = (x1 - x2) / h", name, "", _OPTIONS)

    def triangle(self, x: Any, below: int, lower: bool) -> Any:
        """Returns matrices in row-major order with zeros above a diagonal (``lower``) or below it; None if there are
        more elements than indices of 32 bits, or elements of other sizes than those of integers.
        """
        name = OF_SIZE.get(x.dtype.itemsize)
        if name is None or x.size >= 1 << 30:
            return None
        out = self._cupy.empty(x.shape, x.dtype)
        rows, columns = map(np.uint32, x.shape[-2:])
        self._cutting(name, "<=" if lower else ">=")(x, rows, columns, np.int64(below), out)
        return out

    @functools.cache  # noqa: B019 - there is one for each process
    def _cutting(self, dtype: str, keeps: str) -> ElementwiseKernel:
        operation = f"y = (long long)(i % columns) {keeps} (long long)(i / columns % rows) + below ? x : 0"
        inputs = f"{dtype} x, uint32 rows, uint32 columns, int64 below"
        return ElementwiseKernel(self._cupy, inputs, f"{dtype} y", operation, f"shardtensor_triangle_{dtype}", "", ())

    def cross_products(self, a: Sequence[Any], b: Sequence[Any], axis: int, dtype: np.dtype[Any]) -> Any:
        """Returns the cross products of vectors, given their parts; None for other dtypes than those of C."""
        parts = [*a, *b]
        if any(x.dtype != dtype for x in parts) or dtype.name not in _NUMBERS:
            return None
        shape = np.broadcast_shapes(a[0].shape, b[0].shape)
        axis %= len(shape) + 1
        out = self._cupy.empty((*shape[:axis], 3, *shape[axis:]), dtype)
        self._crossing(dtype.name)(*parts, *[out[(slice(None),) * axis + (k,)] for k in range(3)])
        return out

    @functools.cache  # noqa: B019 - there is one for each process
    def _crossing(self, dtype: str) -> ElementwiseKernel:
        inputs = ", ".join([f"{dtype} {name}{k}" for name in "ab" for k in (1, 2, 3)])
        outputs = ", ".join([f"{dtype} y{k}" for k in (1, 2, 3)])
        pairs = ((1, 2, 3), (2, 3, 1), (3, 1, 2))
        operation = "\n".join([f"y{k} = a{i} * b{j} - a{j} * b{i};" for k, i, j in pairs])
        return ElementwiseKernel(self._cupy, inputs, outputs, operation, f"shardtensor_cross_{dtype}", "", _OPTIONS)

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
