"""Positions and counts of the elements of large arrays, each by one pass over the elements.

Elements are counted in shared memory, where the counts have room, and tables are searched there, from every few of
their elements on.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from shardtensor_cupy.kernels.elementwise_kernel import TYPES
from shardtensor_cupy.kernels.line_scans import Scans

__all__ = ["Searches"]

_THREADS = 256
"""The number of threads of a block."""

_EACH = 16
"""The number of bytes of a mask that a thread reads."""

_SAMPLES = 1 << 11
"""The number of elements of a table that are searched in shared memory."""

_COUNTS = 1 << 13
"""The number of counts in shared memory, of 4 bytes each."""

_EDGES = 1 << 11
"""The number of edges of bins in shared memory, of up to 8 bytes each."""

_BLOCKS = 1 << 10
"""The number of blocks that fill a GPU."""

_TOGETHER = 4
"""The number of elements that a thread reads before it uses them."""

_DIMENSIONS = 8
"""The number of dimensions up to which positions are taken apart."""


class Searches:
    """Searches arrays.

    Args:
        cupy: the module.
    """

    def __init__(self, cupy: Any) -> None:
        self._cupy = cupy
        self._scans = Scans(cupy)

    def nonzero(self, mask: Any) -> tuple[Any, ...] | None:
        """Returns the indices of the true elements of an array of bools in row-major order, for which the host waits
        for their number; None if CuPy has to find them.
        """
        if not 0 < mask.ndim <= _DIMENSIONS or not mask.size:
            return None
        mask = mask if mask.data.ptr % _EACH == 0 else mask.copy()
        size, blocks = np.int64(mask.size), -(-mask.size // (_THREADS * _EACH))
        count, write = self._nonzero_kernels(mask.ndim)
        counts = self._cupy.empty((blocks,), np.int64)
        count((blocks,), (_THREADS,), (mask, counts, size))
        ends = self._scans(counts, 0, "+", np.dtype(np.int64))
        total = int(ends[-1])
        indices = tuple([self._cupy.empty((total,), np.int64) for _ in range(mask.ndim)])
        if total:
            write((blocks,), (_THREADS,), (mask, ends, *indices, size, *map(np.int64, mask.shape[1:])))
        return indices

    @functools.cache  # noqa: B019 - there is one for each process
    def _nonzero_kernels(self, ndim: int) -> tuple[Any, Any]:
        results = "".join([f"long long *y{d}, " for d in range(ndim)])
        sizes = "".join([f", long long n{d}" for d in range(1, ndim)])
        stores = []
        for d in reversed(range(1, ndim)):
            stores += [f"y{d}[begin + i] = at % n{d};", f"at /= n{d};"]
        stores.append("y0[begin + i] = at;")
        text = _NONZERO.replace("{results}", results).replace("{sizes}", sizes).replace("{stores}", " ".join(stores))
        return self._kernel(text, "shardtensor_count_true"), self._kernel(text, "shardtensor_nonzero")

    def searchsorted(self, table: Any, x: Any, side: str) -> Any:
        """Returns `searchsorted` of arrays in row-major order; None if CuPy has to compute it."""
        types = _common(table.dtype, x.dtype)
        if types is None or not table.size or not x.size:
            return None
        out = self._cupy.empty(x.shape, np.int64)
        step = -(-table.size // _SAMPLES)
        sizes = [np.int64(n) for n in (table.size, x.size, step, -(-table.size // step))]
        self._search_kernel(*types, side)(_grid(x.size, 1), (_THREADS,), (table, x, out, *sizes))
        return out

    @functools.cache  # noqa: B019 - there is one for each process
    def _search_kernel(self, table: str, element: str, common: str, side: str) -> Any:
        precedes = "LESS(e, v)" if side == "left" else "!LESS(v, e)"
        head = f"typedef {table} edge;\ntypedef {element} element;\ntypedef {common} common;\n"
        text = _SEARCH.replace("{precedes}", precedes)
        for name, value in (
            ("name", "searchsorted"),
            ("result", "long long"),
            ("more", ""),
            ("store", "y[i] = begin;"),
        ):
            text = text.replace(f"{{{name}}}", value)
        return self._kernel(head + text, "shardtensor_searchsorted")

    def interpolated(self, x: Any, points: Any, values: Any, left: Any, right: Any) -> Any:
        """Returns `interp` of arrays in row-major order, the numbers ``left`` and ``right`` before and behind all
        points, or the first and the last value where they are None; None for other dtypes than real numbers in C.
        """
        double = np.dtype(np.float64)
        if _common(x.dtype, double) is None or any(_common(a.dtype, double) is None for a in (points, values)):
            return None
        ends = [np.float64(np.nan if end is None else end) for end in (left, right)]
        flags = [np.int32(end is not None) for end in (left, right)]
        xp, fp = [a.astype(double) for a in (points, values)]
        slopes, out = (fp[1:] - fp[:-1]) / (xp[1:] - xp[:-1]), self._cupy.empty(x.shape, double)
        step = -(-xp.size // _SAMPLES)
        sizes = [np.int64(n) for n in (xp.size, x.size, step, -(-xp.size // step))]
        kernel = self._interpolating(TYPES[x.dtype.name])
        kernel(_grid(x.size, 1), (_THREADS,), (xp, x, out, *sizes, fp, slopes, *ends, *flags))
        return out

    @functools.cache  # noqa: B019 - there is one for each process
    def _interpolating(self, element: str) -> Any:
        head = f"typedef double edge;\ntypedef {element} element;\ntypedef double common;\n"
        return self._kernel(head + _INTERPOLATE, "shardtensor_interpolate", ("--fmad=false",))

    def bincount(self, x: Any, length: int) -> Any:
        """Returns the number of elements that are each of the integers below ``length``, which all are; None if CuPy
        has to count them.
        """
        if x.dtype.kind not in "iu" or not length or not x.size:
            return None
        out = self._cupy.zeros((length,), np.int64)
        kernel = self._count_kernel(TYPES[x.dtype.name], length <= _COUNTS)
        kernel(_grid(x.size, length), (_THREADS,), (x, out, np.int64(x.size), np.int64(length)))
        return out

    @functools.cache  # noqa: B019 - there is one for each process
    def _count_kernel(self, element: str, shared: bool) -> Any:
        return self._kernel(
            f"typedef {element} element;\n" + (_BINCOUNT if shared else _BINCOUNT_APART), "shardtensor_bincount"
        )

    def histogram(self, x: Any, edges: Any) -> Any:
        """Returns the number of elements between edges, which are in ascending order; the last bin includes both. None
        if CuPy has to count them.
        """
        types, length = _common(edges.dtype, x.dtype), edges.size - 1
        if types is None or not 0 < length < _EDGES or not x.size:
            return None
        out = self._cupy.zeros((length,), np.int64)
        kernel = self._histogram_kernel(*types)
        kernel(_grid(x.size, length), (_THREADS,), (x, edges, out, np.int64(x.size), np.int64(length)))
        return out

    @functools.cache  # noqa: B019 - there is one for each process
    def _histogram_kernel(self, edge: str, element: str, common: str) -> Any:
        head = f"typedef {edge} edge;\ntypedef {element} element;\ntypedef {common} common;\n"
        return self._kernel(head + _HISTOGRAM, "shardtensor_histogram")

    def _kernel(self, text: str, name: str, options: tuple[str, ...] = ()) -> Any:
        for macro, value in (
            ("THREADS", _THREADS), ("EACH", _EACH), ("SAMPLES", _SAMPLES), ("COUNTS", _COUNTS), ("EDGES", _EDGES),
            ("TOGETHER", _TOGETHER),
        ):  # fmt: skip
            text = text.replace(macro, str(value))
        return self._cupy.RawKernel(text, name, options=options)


def _common(*dtypes: np.dtype[Any]) -> tuple[str, ...] | None:
    """Returns the types of numbers in C, and that in which they are compared; None for other dtypes."""
    if any(d.kind not in "iuf" or d == np.float16 or d.name not in TYPES for d in dtypes):
        return None
    return tuple([TYPES[d.name] for d in (*dtypes, np.result_type(*dtypes))])


def _grid(size: int, counts: int) -> tuple[int]:
    """Returns the number of blocks for elements that are counted: fewer for more counts, which each block adds up."""
    blocks = min(_BLOCKS, max(size // (16 * counts), _BLOCKS // 8))
    return (max(min(blocks, -(-size // _THREADS)), 1),)


_NONZERO = """
typedef struct __attribute__((aligned(EACH))) { unsigned char v[EACH]; } pack;

#define READ \\
    const long long first = ((long long)blockIdx.x * THREADS + threadIdx.x) * EACH; \\
    pack some; \\
    int count = 0; \\
    if (first + EACH <= size) some = *(const pack *)(mask + first); \\
    else for (int k = 0; k < EACH; k++) some.v[k] = first + k < size ? mask[first + k] : 0; \\
    for (int k = 0; k < EACH; k++) count += some.v[k];

extern "C" __global__ void shardtensor_count_true(const unsigned char *mask, long long *counts, long long size) {
    __shared__ int sums[THREADS];
    READ
    sums[threadIdx.x] = count;
    __syncthreads();
    for (int d = THREADS / 2; d; d /= 2) {
        if (threadIdx.x < d) sums[threadIdx.x] += sums[threadIdx.x + d];
        __syncthreads();
    }
    if (!threadIdx.x) counts[blockIdx.x] = sums[0];
}

extern "C" __global__ void shardtensor_nonzero(
    const unsigned char *mask, const long long *ends, {results}long long size{sizes}
) {
    __shared__ int sums[2][THREADS];
    __shared__ unsigned short kept[THREADS * EACH];
    int from = 0;
    READ
    sums[0][threadIdx.x] = count;
    __syncthreads();
    for (int d = 1; d < THREADS; d *= 2) {
        sums[1 - from][threadIdx.x] = sums[from][threadIdx.x] + (threadIdx.x < d ? 0 : sums[from][threadIdx.x - d]);
        from = 1 - from;
        __syncthreads();
    }
    int to = sums[from][threadIdx.x] - count;
    for (int k = 0; k < EACH; k++)
        if (some.v[k]) kept[to++] = threadIdx.x * EACH + k;
    __syncthreads();
    const int total = sums[from][THREADS - 1];
    const long long begin = ends[blockIdx.x] - total;
    for (int i = threadIdx.x; i < total; i += THREADS) {
        long long at = (long long)blockIdx.x * (THREADS * EACH) + kept[i];
        {stores}
    }
}
"""

_SEARCH = """
#define LESS(a, b) ((a) < (b) || ((b) != (b) && (a) == (a)))

extern "C" __global__ void shardtensor_{name}(
    const edge *table, const element *x, {result} *y, long long count, long long size, long long step,
    long long samples{more}
) {
    __shared__ common top[SAMPLES];
    for (int i = threadIdx.x; i < samples; i += THREADS) top[i] = (common)table[i * step];
    __syncthreads();
    for (long long i = (long long)blockIdx.x * THREADS + threadIdx.x; i < size; i += (long long)gridDim.x * THREADS) {
        const common v = (common)x[i];
        int low = 0, high = (int)samples;
        while (low < high) {
            const int middle = (low + high) / 2;
            const common e = top[middle];
            if ({precedes}) low = middle + 1;
            else high = middle;
        }
        long long begin = low ? (low - 1) * step + 1 : 0, end = low < samples ? low * step : count;
        while (begin < end) {
            const long long middle = (begin + end) / 2;
            const common e = (common)table[middle];
            if ({precedes}) begin = middle + 1;
            else end = middle;
        }
        {store}
    }
}
"""

_INTERPOLATE = _SEARCH
for _name, _value in (
    ("precedes", "!LESS(v, e)"),
    ("name", "interpolate"),
    ("result", "double"),
    ("more", ", const double *fp, const double *slopes, double left, double right, int has_left, int has_right"),
    (
        "store",
        """double found;
        if (v != v) found = v;
        else if (v < table[0]) found = has_left ? left : fp[0];
        else if (v < table[count - 1]) {
            long long at = begin - 1;
            at = at < 0 ? 0 : at > count - 2 ? count - 2 : at;
            /* As NumPy does: at a point, and beside points that are not finite. */
            found = v == table[at] ? fp[at] : slopes[at] * (v - table[at]) + fp[at];
            if (found != found) found = slopes[at] * (v - table[at + 1]) + fp[at + 1];
            if (found != found && fp[at] == fp[at + 1]) found = fp[at];
        } else found = v > table[count - 1] && has_right ? right : fp[count - 1];
        y[i] = found;""",
    ),
):
    _INTERPOLATE = _INTERPOLATE.replace(f"{{{_name}}}", _value)

_COUNTING = """
    for (int k = threadIdx.x; k < length; k += THREADS) counts[k] = 0;
    __syncthreads();
    const long long stride = (long long)gridDim.x * THREADS;
    for (long long i = (long long)blockIdx.x * THREADS + threadIdx.x; i < size; i += TOGETHER * stride) {
        element values[TOGETHER];
#pragma unroll
        for (int k = 0; k < TOGETHER; k++) values[k] = x[i + k * stride < size ? i + k * stride : i];
#pragma unroll
        for (int k = 0; k < TOGETHER; k++) {
            if (i + k * stride >= size) break;
            {count}
        }
    }
    __syncthreads();
    for (int k = threadIdx.x; k < length; k += THREADS)
        if (counts[k]) atomicAdd((unsigned long long *)y + k, (unsigned long long)counts[k]);
"""
"""Counts the elements in the shared memory of a block, of which each has less than 4 Gi."""

_BINCOUNT = (
    """
extern "C" __global__ void shardtensor_bincount(const element *x, long long *y, long long size, long long length) {
    __shared__ unsigned int counts[COUNTS];
"""
    + _COUNTING.replace("{count}", "atomicAdd(counts + values[k], 1u);")
    + "}\n"
)

_BINCOUNT_APART = """
extern "C" __global__ void shardtensor_bincount(const element *x, long long *y, long long size, long long length) {
    const long long stride = (long long)gridDim.x * THREADS;
    for (long long i = (long long)blockIdx.x * THREADS + threadIdx.x; i < size; i += stride)
        atomicAdd((unsigned long long *)y + x[i], 1ull);
}
"""

_HISTOGRAM = (
    """
extern "C" __global__ void shardtensor_histogram(
    const element *x, const edge *edges, long long *y, long long size, long long length
) {
    __shared__ unsigned int counts[EDGES];
    __shared__ common bounds[EDGES];
    for (int k = threadIdx.x; k <= length; k += THREADS) bounds[k] = (common)edges[k];
"""
    + _COUNTING.replace(
        "{count}",
        """const common v = (common)values[k];
            if (!(v >= bounds[0] && v <= bounds[length])) continue;
            int low = 0, high = (int)length;
            while (high - low > 1) {
                const int middle = (low + high) / 2;
                if (bounds[middle] <= v) low = middle;
                else high = middle;
            }
            atomicAdd(counts + low, 1u);""",
    )
    + "}\n"
)
