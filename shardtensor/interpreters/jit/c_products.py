"""Small matrix products in C, for loops whose trips C runs: a call of BLAS from Python takes longer than they do.

An element is the sum of its products in order where the columns of the second operand lie next to each other in memory,
and otherwise that of a few partial sums. Its bits depend on the strides of the operands, and on nothing else.
"""

from __future__ import annotations

import ctypes

from shardtensor.backend.strides import loop_strides
from shardtensor.interpreters.jit.c_driver import HEAD
from shardtensor.interpreters.jit.kernel import HostArray

_TYPES = {"f4": "float", "f8": "double"}
"""The types of the elements, by the names of their dtypes."""

FUNCTIONS = {dtype: f"product_{dtype}" for dtype in _TYPES}
"""The functions of the library, by the dtype of the elements."""

_SECONDS = 5e-11
"""The seconds that one product of two numbers takes, about."""

_HEAD = """
#ifdef __AVX512F__
enum { ST_WIDE = 64 };
#else
enum { ST_WIDE = 32 };
#endif
#ifdef __clang__
#define ST_PRODUCT static ST_APART
#pragma clang fp contract(fast)
#else
#define ST_PRODUCT static ST_APART __attribute__((optimize("fp-contract=fast")))
#endif
"""

_SOURCE = """
typedef TYPE V_NAME __attribute__((vector_size(ST_WIDE), aligned(sizeof(TYPE)), may_alias));
typedef TYPE L_NAME __attribute__((vector_size(32), aligned(sizeof(TYPE)), may_alias));
enum { N_NAME = ST_WIDE / sizeof(TYPE), M_NAME = 32 / sizeof(TYPE) };

/* Computes a few vectors of elements of a few rows: sums of products in order. */
#define ST_TILE_NAME(ROWS, COUNT) \\
ST_PRODUCT void st_tile_NAME_##ROWS##_##COUNT(const char *a, long long ar, long long ak, const char *b, long long bk, \\
                                              long long depth, char *y, long long yr) { \\
    V_NAME s[ROWS][COUNT]; \\
    _Pragma("GCC unroll 8") \\
    for (int i = 0; i < ROWS; i++) \\
        _Pragma("GCC unroll 8") \\
        for (int j = 0; j < COUNT; j++) s[i][j] = (V_NAME){0}; \\
    for (long long k = 0; k < depth; k++, a += ak, b += bk) \\
        _Pragma("GCC unroll 8") \\
        for (int i = 0; i < ROWS; i++) { \\
            const TYPE v = *(const TYPE *)(a + i * ar); \\
            _Pragma("GCC unroll 8") \\
            for (int j = 0; j < COUNT; j++) s[i][j] += v * ((const V_NAME *)b)[j]; \\
        } \\
    _Pragma("GCC unroll 8") \\
    for (int i = 0; i < ROWS; i++) \\
        _Pragma("GCC unroll 8") \\
        for (int j = 0; j < COUNT; j++) ((V_NAME *)(y + i * yr))[j] = s[i][j]; \\
}
ST_TILE_NAME(4, 2)
ST_TILE_NAME(4, 1)
ST_TILE_NAME(1, 8)
ST_TILE_NAME(1, 4)
ST_TILE_NAME(1, 1)

/* Returns a sum of products of contiguous numbers, or of others. */
ST_PRODUCT TYPE st_dot_NAME(const char *a, long long ak, const char *b, long long bk, long long n) {
    L_NAME s0 = {0}, s1 = {0}, s2 = {0}, s3 = {0};
    long long k = 0;
    TYPE sum = 0;
    if (ak == sizeof(TYPE) && bk == sizeof(TYPE)) {
        for (; k + 4 * M_NAME <= n; k += 4 * M_NAME) {
            const L_NAME *x = (const L_NAME *)((const TYPE *)a + k), *y = (const L_NAME *)((const TYPE *)b + k);
            s0 += x[0] * y[0];
            s1 += x[1] * y[1];
            s2 += x[2] * y[2];
            s3 += x[3] * y[3];
        }
        s0 = (s0 + s1) + (s2 + s3);
        for (int j = 0; j < M_NAME; j++) sum += s0[j];
    }
    for (; k < n; k++) sum += *(const TYPE *)(a + k * ak) * *(const TYPE *)(b + k * bk);
    return sum;
}

/* Computes rows of a product. The geometry has the number of products of an element, that of columns, and the strides
   of the operands and of the result in bytes. */
int product_NAME(const long long *g, char *const *p, long long begin, long long end) {
    const long long depth = g[0], columns = g[1], ar = g[2], ak = g[3], bk = g[4], bc = g[5], yr = g[6], yc = g[7];
    const long long size = sizeof(TYPE);
    while (begin < end) {
        const char *a = p[0] + begin * ar, *b = p[1];
        char *y = p[2] + begin * yr;
        const int rows = end - begin < 4 ? 1 : 4;
        long long j = 0;
#define ST_TILES(ROWS, COUNT) \\
        for (; j + COUNT * N_NAME <= columns; j += COUNT * N_NAME) \\
            st_tile_NAME_##ROWS##_##COUNT(a, ar, ak, b + j * size, bk, depth, y + j * size, yr)
        if (bc == size && yc == size) {
            if (rows == 4) {
                ST_TILES(4, 2);
                ST_TILES(4, 1);
            } else {
                ST_TILES(1, 8);
                ST_TILES(1, 4);
                ST_TILES(1, 1);
            }
        }
#undef ST_TILES
        for (; j < columns; j++)
            for (int i = 0; i < rows; i++)
                *(TYPE *)(y + i * yr + j * yc) = st_dot_NAME(a + i * ar, ak, b + j * bc, bk, depth);
        begin += rows;
    }
    return 0;
}
"""


def product_source() -> str:
    """Returns the text of the library."""
    return "\n".join(
        [HEAD, _HEAD, *[_SOURCE.replace("TYPE", kind).replace("NAME", name) for name, kind in _TYPES.items()]]
    )


class Products:
    """Stands for the kernels of all products, which are one library."""

    def __str__(self) -> str:
        return "products of matrices"


PRODUCTS = Products()


class ProductGeometry:
    """The shape and strides of a product.

    Attributes:
        array: what the compiled function reads.
        rows: the number of rows of the result.
        seconds: the estimated time.
    """

    def __init__(self, x: HostArray, y: HostArray, out: HostArray) -> None:
        rows, depth = (1, *x.shape)[-2:]
        columns = y.shape[1] if y.ndim == 2 else 1
        (xr, xk), (yk, yc) = (0, *loop_strides(x, x.shape))[-2:], (*loop_strides(y, y.shape), 0)[:2]
        strides = list(loop_strides(out, out.shape))
        outr = strides.pop(0) if x.ndim == 2 else 0
        outc = strides.pop(0) if y.ndim == 2 else 0
        numbers = [depth, columns, xr, xk, yk, yc, outr, outc]
        self.array = (ctypes.c_longlong * len(numbers))(*numbers)
        self.rows = rows
        self.seconds = rows * depth * columns * _SECONDS
