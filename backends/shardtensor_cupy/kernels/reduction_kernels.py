"""The texts of the kernels of `large_reductions`, in what CUDA and C have in common."""

from __future__ import annotations

from string import Template
from typing import NamedTuple

import numpy as np

from shardtensor_cupy.kernels.elementwise_kernel import TYPES

__all__ = ["MOST", "PACK", "THREADS", "Variant"]

THREADS = 256
"""The number of threads of a block."""

PACK = 16
"""The maximum number of bytes that one instruction reads."""

MOST = 8
"""The maximum number of elements of a pack."""

_RADIX = 8
"""The number of results of threads that one thread merges between two barriers."""

_AT_LAST = 64
"""The maximum number of bytes of the results of chunks that a thread reads before it merges them: more would take
registers from the threads that read elements.
"""

_INFINITY = "__int_as_float(0x7f800000)"


class _Operation(NamedTuple):
    """The value of an element ``x``, how two values ``a`` and ``b`` merge, and the value of no element."""

    value: str
    merge: str = "a + b"
    first: str = "0"


_OPERATIONS = {
    "sum": _Operation("x"),
    "squares": _Operation("(x - mean) * (x - mean)"),
    "max": _Operation("x", "b > a || b != b ? b : a", f"-{_INFINITY}"),
    "min": _Operation("x", "b < a || b != b ? b : a", _INFINITY),
}
"""The operations. An extremum is NaN if there is one."""


class Variant(NamedTuple):
    """What distinguishes one text from another.

    Attributes:
        operation: the name of the operation.
        source, total, result: the names of the dtypes of elements, of merged values, and of what is written.
        pack: the number of elements that a thread reads at once.
        aligned: whether it reads them by one instruction.
        lanes: the number of threads of a block along columns, a power of two; 0 for rows.
        broken: whether rows consist of pieces of one length at equal distances.
        chunked: whether several blocks reduce the same elements, of which the last one merges what all of them have.
    """

    operation: str
    source: str
    total: str
    result: str
    pack: int
    aligned: bool
    lanes: int
    broken: bool = False
    chunked: bool = False

    @property
    def name(self) -> str:
        """The name of the kernel."""
        return f"shardtensor_{self.operation}_{'columns' if self.lanes else 'rows'}"

    def text(self) -> str:
        """Returns the text of the kernel.

        Its arguments are the array, for ``"squares"`` the means, the result, for chunks their results and the numbers
        of blocks that have written these, which are zero before and after; the number of rows of the second of the two
        groups before the reduced one, the steps of both in bytes; the size of the reduced one, that of its chunks
        and their number; the number of columns, or of elements of the pieces of a row; the step in bytes from one row
        of columns, or piece, to the next; the number of blocks beside each other; and a divisor of the results.
        """
        operation, itemsize = _OPERATIONS[self.operation], np.dtype(self.source).itemsize
        squares, in_packs = self.operation == "squares", self.aligned and self.pack > 1
        mean = "st_row * st_inner + st_column + j" if self.lanes else "st_row"
        pieces = {
            "headers": _HEADERS if "float16" in (self.source, self.result) else "",
            "source": TYPES[self.source],
            "total": TYPES[self.total],
            "result": TYPES[self.result],
            "number": TYPES[self.total],
            "value": operation.value,
            "merge": operation.merge,
            "first": operation.first,
            "name": self.name,
            "pack": self.pack,
            "alignment": self.pack * itemsize if in_packs else itemsize,
            "load": _AT_ONCE if in_packs else _ONE_BY_ONE.format(self.pack),
            "at": (_BROKEN if self.broken else _STRAIGHT).replace("$source", TYPES[self.source]),
            "at_once": 4 if self.pack * itemsize >= PACK else 8,
            "at_last": min(max(_AT_LAST // (self.pack * np.dtype(self.total).itemsize), 1), 8),
            "threads": THREADS,
            "lanes": self.lanes or THREADS,
            "beside": THREADS // (self.lanes or THREADS),
            "each": self.pack if self.lanes else 1,
            "radix": _RADIX,
            "means": "const char *st_means, " if squares else "",
            "chunked": "char *st_partial, unsigned int *st_done, " if self.chunked else "",
            "mean": f"((const {TYPES[self.total]} *)st_means)[{mean}]" if squares else "0",
        }
        head, alone, last = (_COLUMNS, _COLUMN, _LAST_COLUMN) if self.lanes else (_ROWS, _ROW, _LAST_ROW)
        return Template(_COMMON + head + (last if self.chunked else alone) + "}\n").substitute(pieces)


_HEADERS = "".join([f"#include <cupy/{name}>\n" for name in ("carray.cuh", "float16.cuh")])

_AT_ONCE = "made = *(const st_pack *)st_at(from, k, inner, step);"

_ONE_BY_ONE = "for (int j = 0; j < {}; j++) made.v[j] = *st_at(from, k + j, inner, step);"

_STRAIGHT = "return (const $source *)from + k;"

_BROKEN = """const unsigned int piece = (unsigned int)k / (unsigned int)inner;
    return (const $source *)(from + piece * step) + ((unsigned int)k - piece * (unsigned int)inner);"""

_COMMON = """$headers
typedef struct __attribute__((aligned($alignment))) { $source v[$pack]; } st_pack;

/* Returns the address of an element of a row. */
static __device__ const $source *st_at(const char *from, long long k, long long inner, long long step) {
    $at
}

static __device__ st_pack st_load(const char *from, long long k, long long inner, long long step) {
    st_pack made;
    $load
    return made;
}

static __device__ $total st_merge($total a, $total b) { return $merge; }

static __device__ $total st_value($source element, $total mean) {
    const $number x = ($number)element;
    return $value;
}

/* Merges the values of all lanes to those of the first, for the columns of one thread. */
static __device__ void st_merge_lanes($total *shared, int lane, int beside) {
    for (int lanes = $lanes; lanes > 1;) {
        const int left = lanes > $radix ? lanes / $radix : 1;
        __syncthreads();
        if (lane < left) {
            for (int j = 0; j < $each; j++) {
                $total total = shared[(lane * $each + j) * $beside + beside];
                for (int l = lane + left; l < lanes; l += left)
                    total = st_merge(total, shared[(l * $each + j) * $beside + beside]);
                shared[(lane * $each + j) * $beside + beside] = total;
            }
        }
        lanes = left;
    }
}
"""

_ROWS = """
extern "C" __global__ void $name(
    const char *st_source, ${means}char *st_result, ${chunked}long long st_second, long long st_step0,
    long long st_step1, long long st_count, long long st_chunk, long long st_chunks, long long st_inner,
    long long st_step, long long st_tiles, $total st_divisor
) {
    __shared__ $total st_shared[$threads];
    const unsigned int st_row = blockIdx.x / (unsigned int)st_chunks;
    const long long st_begin = blockIdx.x % (unsigned int)st_chunks * st_chunk;
    const int st_size = (int)(st_begin + st_chunk < st_count ? st_chunk : st_count - st_begin);
    const char *const st_x = st_source + st_row / (unsigned int)st_second * st_step0
        + st_row % (unsigned int)st_second * st_step1;
    const $total st_mean = $mean;
    const int st_packs = st_size / $pack;
    int st_k = threadIdx.x;
    $total st_totals[$pack];
    #pragma unroll
    for (int j = 0; j < $pack; j++) st_totals[j] = $first;
    for (; st_k + ($at_once - 1) * $threads < st_packs; st_k += $at_once * $threads) {
        st_pack st_read[$at_once];
        #pragma unroll
        for (int u = 0; u < $at_once; u++)
            st_read[u] = st_load(st_x, st_begin + (st_k + u * $threads) * $pack, st_inner, st_step);
        #pragma unroll
        for (int u = 0; u < $at_once; u++) {
            #pragma unroll
            for (int j = 0; j < $pack; j++)
                st_totals[j] = st_merge(st_totals[j], st_value(st_read[u].v[j], st_mean));
        }
    }
    for (; st_k < st_packs; st_k += $threads) {
        const st_pack st_read = st_load(st_x, st_begin + st_k * $pack, st_inner, st_step);
        #pragma unroll
        for (int j = 0; j < $pack; j++) st_totals[j] = st_merge(st_totals[j], st_value(st_read.v[j], st_mean));
    }
    if ((int)threadIdx.x < st_size % $pack) {
        const $source st_last = *st_at(st_x, st_begin + st_packs * $pack + threadIdx.x, st_inner, st_step);
        st_totals[0] = st_merge(st_totals[0], st_value(st_last, st_mean));
    }
    #pragma unroll
    for (int half = $pack / 2; half; half /= 2) {
        #pragma unroll
        for (int j = 0; j < half; j++) st_totals[j] = st_merge(st_totals[j], st_totals[j + half]);
    }
    st_shared[threadIdx.x] = st_totals[0];
    st_merge_lanes(st_shared, threadIdx.x, 0);
"""

_ROW = """
    if (!threadIdx.x) (($result *)st_result)[blockIdx.x] = ($result)(st_shared[0] / st_divisor);
"""

_LAST_ROW = """
    __shared__ int st_last;
    if (!threadIdx.x) {
        (($total *)st_partial)[blockIdx.x] = st_shared[0];
        __threadfence();
        st_last = atomicInc(st_done + st_row, (unsigned int)st_chunks - 1) == (unsigned int)st_chunks - 1;
    }
    __syncthreads();
    if (st_last) {
        const $total *const st_parts = (const $total *)st_partial + st_row * st_chunks;
        $total st_sum = $first;
        for (int k = threadIdx.x; k < st_chunks; k += 8 * $threads) {
            $total st_read[8];
            #pragma unroll
            for (int u = 0; u < 8; u++)
                st_read[u] = k + u * $threads < st_chunks ? __ldcg(st_parts + k + u * $threads) : $first;
            #pragma unroll
            for (int u = 0; u < 8; u++) st_sum = st_merge(st_sum, st_read[u]);
        }
        st_shared[threadIdx.x] = st_sum;
        st_merge_lanes(st_shared, threadIdx.x, 0);
        if (!threadIdx.x) (($result *)st_result)[st_row] = ($result)(st_shared[0] / st_divisor);
    }
"""

_COLUMNS = """
extern "C" __global__ void $name(
    const char *st_source, ${means}char *st_result, ${chunked}long long st_second, long long st_step0,
    long long st_step1, long long st_count, long long st_chunk, long long st_chunks, long long st_inner,
    long long st_step, long long st_tiles, $total st_divisor
) {
    __shared__ $total st_shared[$threads * $pack];
    const unsigned int st_above = blockIdx.x / (unsigned int)st_tiles;
    const unsigned int st_row = st_above / (unsigned int)st_chunks;
    const int st_beside = threadIdx.x % $beside, st_lane = threadIdx.x / $beside;
    const long long st_column = ((long long)(blockIdx.x % (unsigned int)st_tiles) * $beside + st_beside) * $pack;
    const long long st_begin = st_above % (unsigned int)st_chunks * st_chunk;
    const long long st_end = st_begin + st_chunk < st_count ? st_begin + st_chunk : st_count;
    $total st_totals[$pack], st_mean[$pack];
    #pragma unroll
    for (int j = 0; j < $pack; j++) st_totals[j] = $first;
    if (st_column < st_inner) {
        long long st_k = st_begin + st_lane;
        const char *st_x = st_source + st_row / (unsigned int)st_second * st_step0
            + st_row % (unsigned int)st_second * st_step1 + st_k * st_step + st_column * (long long)sizeof($source);
        #pragma unroll
        for (int j = 0; j < $pack; j++) st_mean[j] = $mean;
        for (; st_k + ($at_once - 1) * $lanes < st_end; st_k += $at_once * $lanes) {
            st_pack st_read[$at_once];
            #pragma unroll
            for (int u = 0; u < $at_once; u++) st_read[u] = st_load(st_x + u * $lanes * st_step, 0, 0, 0);
            #pragma unroll
            for (int u = 0; u < $at_once; u++) {
                #pragma unroll
                for (int j = 0; j < $pack; j++)
                    st_totals[j] = st_merge(st_totals[j], st_value(st_read[u].v[j], st_mean[j]));
            }
            st_x += $at_once * $lanes * st_step;
        }
        for (; st_k < st_end; st_k += $lanes) {
            const st_pack st_read = st_load(st_x, 0, 0, 0);
            #pragma unroll
            for (int j = 0; j < $pack; j++)
                st_totals[j] = st_merge(st_totals[j], st_value(st_read.v[j], st_mean[j]));
            st_x += $lanes * st_step;
        }
    }
    #pragma unroll
    for (int j = 0; j < $pack; j++) st_shared[(st_lane * $pack + j) * $beside + st_beside] = st_totals[j];
    st_merge_lanes(st_shared, st_lane, st_beside);
"""

_COLUMN = """
    if (!st_lane && st_column < st_inner) {
        for (int j = 0; j < $pack; j++)
            (($result *)st_result)[(long long)st_above * st_inner + st_column + j] =
                ($result)(st_shared[j * $beside + st_beside] / st_divisor);
    }
"""

_LAST_COLUMN = """
    __shared__ int st_last;
    if (!st_lane && st_column < st_inner) {
        for (int j = 0; j < $pack; j++)
            (($total *)st_partial)[(long long)st_above * st_inner + st_column + j] = st_shared[j * $beside + st_beside];
        __threadfence();
    }
    __syncthreads();
    if (!threadIdx.x) {
        unsigned int *const st_mine = st_done + (long long)st_row * st_tiles + blockIdx.x % (unsigned int)st_tiles;
        st_last = atomicInc(st_mine, (unsigned int)st_chunks - 1) == (unsigned int)st_chunks - 1;
    }
    __syncthreads();
    if (st_last) {
        #pragma unroll
        for (int j = 0; j < $pack; j++) st_totals[j] = $first;
        if (st_column < st_inner) {
            const $total *const st_parts = (const $total *)st_partial + st_row * st_chunks * st_inner + st_column;
            for (int k = st_lane; k < st_chunks; k += $at_last * $lanes) {
                $total st_parts_read[$at_last][$pack];
                #pragma unroll
                for (int u = 0; u < $at_last; u++) {
                    #pragma unroll
                    for (int j = 0; j < $pack; j++)
                        st_parts_read[u][j] = k + u * $lanes < st_chunks
                            ? __ldcg(st_parts + (k + u * $lanes) * st_inner + j) : $first;
                }
                #pragma unroll
                for (int u = 0; u < $at_last; u++) {
                    #pragma unroll
                    for (int j = 0; j < $pack; j++) st_totals[j] = st_merge(st_totals[j], st_parts_read[u][j]);
                }
            }
        }
        #pragma unroll
        for (int j = 0; j < $pack; j++) st_shared[(st_lane * $pack + j) * $beside + st_beside] = st_totals[j];
        st_merge_lanes(st_shared, st_lane, st_beside);
        if (!st_lane && st_column < st_inner) {
            for (int j = 0; j < $pack; j++)
                (($result *)st_result)[(long long)st_row * st_inner + st_column + j] =
                    ($result)(st_shared[j * $beside + st_beside] / st_divisor);
        }
    }
"""
