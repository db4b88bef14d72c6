"""Cumulative sums and products of long lines: CuPy's kernels for them are a tenth as fast as the memory, and those of
CUB, which it has for whole arrays, round differently in each run.

A line is divided into parts. The total of each part is computed, then that of all parts before it, and then the
elements of the result: the line is read twice and written once (G. E. Blelloch, Prefix Sums and Their Applications,
1990, section 1.2). The parts depend on the length of a line only, and hence the bits of the result.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np

from shardtensor_cupy.kernels.elementwise_kernel import TYPES

__all__ = ["LONG", "Scans"]

LONG = 1 << 11
"""The length of a line from which on it is accumulated by these kernels."""

_THREADS = 256
"""The number of threads of a block."""

_EACH = 16
"""The number of elements that a thread accumulates in a row."""

_ROWS = 64
"""The number of rows of which a thread accumulates a column."""

_OPTIONS = ("--fmad=false",)


class Scans:
    """Accumulates arrays.

    Args:
        cupy: the module.
    """

    def __init__(self, cupy: Any) -> None:
        self._cupy = cupy

    def __call__(self, x: Any, axis: int, operator: str, dtype: np.dtype[Any]) -> Any:
        """Returns the cumulative sums (operator ``+``) or products (``*``) along an axis.

        Args:
            x: an array in row-major order, of a dtype for which `takes` is true.
            axis: the dimension, of `LONG` elements or more.
            operator: the operator.
            dtype: the dtype of the result, in which it is computed.
        """
        out = self._cupy.empty(x.shape, dtype)
        if not x.size:
            return out
        length, inner = x.shape[axis], math.prod(x.shape[axis + 1 :])
        count = x.size // (length * inner)
        totals, before, scan, size = self._kernels(x.dtype.name, dtype.name, operator, inner > 1)
        parts = -(-length // size)
        sizes = [np.int64(n) for n in (count, length, inner, parts)]
        blocks = -(-count * parts * inner // _THREADS) if inner > 1 else count * parts
        sums = self._cupy.empty((count * parts * inner,), dtype)
        if parts > 1:
            totals((blocks,), (_THREADS,), (x, sums, *sizes))
            lines = -(-count * inner // _THREADS) if inner > 1 else count
            before((lines,), (_THREADS,), (sums, sums, sums, *sizes))
        scan((blocks,), (_THREADS,), (x, sums, out, *sizes))
        return out

    @staticmethod
    def takes(operand: np.dtype[Any], result: np.dtype[Any]) -> bool:
        """Whether the kernels take arrays of a dtype, and compute in another one."""
        known = all(d.kind in "biuf" and d.name in TYPES and d != np.float16 for d in (operand, result))
        return known and result.kind in "iuf"

    @functools.cache  # noqa: B019 - there is one for each process
    def _kernels(self, operand: str, result: str, operator: str, columns: bool) -> tuple[Any, Any, Any, int]:
        """Returns the kernels for the totals of parts, for those before each part and for the result, and the number of
        elements of a part.
        """
        text = (_COLUMNS if columns else _LINES).replace("{op}", operator)
        for name, value in (("THREADS", _THREADS), ("EACH", _EACH), ("ROWS", _ROWS)):
            text = text.replace(name, str(value))

        def kernel(name: str, source: str) -> Any:
            head = f"typedef {TYPES[source]} given;\ntypedef {TYPES[result]} made;\n"
            return self._cupy.RawKernel(head + text, name, options=_OPTIONS)

        names = ("shardtensor_totals", "shardtensor_before", "shardtensor_scan")
        kernels = [kernel(name, result if name.endswith("before") else operand) for name in names]
        return kernels[0], kernels[1], kernels[2], _ROWS if columns else _THREADS * _EACH


_LINES = """
/* Returns the elements of a tile, which are in shared memory, accumulated; the first `count` of them exist. Each thread
   has some of them in a row, and finds the total of those before. */
#define AT(i) ((i) + (i) / EACH)
#define SCAN_TILE \\
    for (int k = 1; k < EACH; k++) tile[AT(own + k)] = tile[AT(own + k - 1)] {op} tile[AT(own + k)]; \\
    sums[0][threadIdx.x] = tile[AT(own + EACH - 1)]; \\
    __syncthreads(); \\
    from = 0; \\
    for (int d = 1; d < THREADS; d *= 2) { \\
        const made mine = sums[from][threadIdx.x]; \\
        sums[1 - from][threadIdx.x] = threadIdx.x < d ? mine : sums[from][threadIdx.x - d] {op} mine; \\
        from = 1 - from; \\
        __syncthreads(); \\
    } \\
    if (threadIdx.x) \\
        for (int k = 0; k < EACH; k++) \\
            tile[AT(own + k)] = sums[from][threadIdx.x - 1] {op} tile[AT(own + k)]; \\
    __syncthreads();

extern "C" __global__ void shardtensor_totals(
    const given *x, made *totals, long long count, long long length, long long inner, long long parts
) {
    __shared__ made sums[THREADS];
    const long long part = blockIdx.x % parts, line = blockIdx.x / parts, begin = part * (THREADS * EACH);
    const int here = length - begin < THREADS * EACH ? (int)(length - begin) : THREADS * EACH;
    x += line * length + begin;
    made total = 0;
    if (threadIdx.x < here) {
        given values[EACH];
#pragma unroll
        for (int k = 0; k < EACH; k++) {
            const int i = k * THREADS + threadIdx.x;
            values[k] = x[i < here ? i : threadIdx.x];
        }
        total = (made)values[0];
#pragma unroll
        for (int k = 1; k < EACH; k++)
            if (k * THREADS + threadIdx.x < here) total = total {op} (made)values[k];
    }
    sums[threadIdx.x] = total;
    __syncthreads();
    for (int d = THREADS / 2; d; d /= 2) {
        if (threadIdx.x < d && threadIdx.x + d < here) sums[threadIdx.x] = sums[threadIdx.x] {op} sums[threadIdx.x + d];
        __syncthreads();
    }
    if (!threadIdx.x) totals[blockIdx.x] = sums[0];
}

extern "C" __global__ void shardtensor_before(
    const made *x, const made *unused, made *y, long long count, long long length, long long inner, long long parts
) {
    __shared__ made tile[THREADS * EACH + THREADS];
    __shared__ made sums[2][THREADS];
    const int own = threadIdx.x * EACH;
    int from;
    made before = 0;
    x += blockIdx.x * parts;
    y += blockIdx.x * parts;
    for (long long begin = 0; begin < parts; begin += THREADS * EACH) {
        for (int i = threadIdx.x; i < THREADS * EACH; i += THREADS) tile[AT(i)] = begin + i < parts ? x[begin + i] : 0;
        __syncthreads();
        SCAN_TILE
        for (int i = threadIdx.x; i < THREADS * EACH && begin + i < parts; i += THREADS)
            y[begin + i] = begin ? before {op} tile[AT(i)] : tile[AT(i)];
        const made last = tile[AT(THREADS * EACH - 1)];
        before = begin ? before {op} last : last;
        __syncthreads();
    }
}

extern "C" __global__ void shardtensor_scan(
    const given *x, const made *totals, made *y, long long count, long long length, long long inner, long long parts
) {
    __shared__ made tile[THREADS * EACH + THREADS];
    __shared__ made sums[2][THREADS];
    const int own = threadIdx.x * EACH;
    int from;
    const long long part = blockIdx.x % parts, line = blockIdx.x / parts, begin = part * (THREADS * EACH);
    const int here = length - begin < THREADS * EACH ? (int)(length - begin) : THREADS * EACH;
    x += line * length + begin;
    y += line * length + begin;
#pragma unroll
    for (int k = 0; k < EACH; k++) {
        const int i = k * THREADS + threadIdx.x;
        tile[AT(i)] = (made)(i < here ? x[i] : (given)0);
    }
    __syncthreads();
    SCAN_TILE
    const made before = part ? totals[blockIdx.x - 1] : (made)0;
#pragma unroll
    for (int k = 0; k < EACH; k++) {
        const int i = k * THREADS + threadIdx.x;
        if (i < here) y[i] = part ? before {op} tile[AT(i)] : tile[AT(i)];
    }
}
"""
"""Lines whose elements follow each other: a block of threads for each part."""

_COLUMNS = """
#define PLACE \\
    const long long thread = (long long)blockIdx.x * THREADS + threadIdx.x, column = thread % inner, \\
        part = thread / inner % parts, line = thread / inner / parts; \\
    if (line >= count) return; \\
    const int rows = length - part * ROWS < ROWS ? (int)(length - part * ROWS) : ROWS; \\
    x += (line * length + part * ROWS) * inner + column;

extern "C" __global__ void shardtensor_totals(
    const given *x, made *totals, long long count, long long length, long long inner, long long parts
) {
    PLACE
    made total = (made)x[0];
#pragma unroll 16
    for (int k = 1; k < rows; k++) total = total {op} (made)x[k * inner];
    totals[thread] = total;
}

extern "C" __global__ void shardtensor_before(
    const made *x, const made *unused, made *y, long long count, long long length, long long inner, long long parts
) {
    const long long thread = (long long)blockIdx.x * THREADS + threadIdx.x, line = thread / inner;
    if (line >= count) return;
    x += line * parts * inner + thread % inner;
    y += line * parts * inner + thread % inner;
    made total = x[0];
    for (long long k = 1; k < parts; k += 16) {
        made values[16];
#pragma unroll
        for (int j = 0; j < 16; j++) values[j] = x[(k + j < parts ? k + j : 0) * inner];
#pragma unroll
        for (int j = 0; j < 16; j++) {
            total = total {op} values[j];
            if (k + j < parts) y[(k + j) * inner] = total;
        }
    }
}

extern "C" __global__ void shardtensor_scan(
    const given *x, const made *totals, made *y, long long count, long long length, long long inner, long long parts
) {
    PLACE
    y += (line * length + part * ROWS) * inner + column;
    made total = (made)x[0];
    if (part) total = totals[thread - inner] {op} total;
    y[0] = total;
    for (int k = 1; k < rows; k += 16) {
        /* The compiler does not know that no element is written before it is read. */
        given values[16];
#pragma unroll
        for (int j = 0; j < 16; j++) values[j] = x[(k + j < rows ? k + j : 0) * inner];
#pragma unroll
        for (int j = 0; j < 16; j++) {
            total = total {op} (made)values[j];
            if (k + j < rows) y[(k + j) * inner] = total;
        }
    }
}
"""
"""Lines whose elements are apart: a thread for each part of each line."""
