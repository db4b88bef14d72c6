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

_SECONDS = 2e-10
"""The seconds that one product of two numbers takes, about."""

_SOURCE = """
typedef TYPE V_NAME __attribute__((vector_size(32), aligned(sizeof(TYPE)), may_alias));
enum { L_NAME = 32 / sizeof(TYPE) };

/* Computes up to 8 vectors of elements of a row. */
#define BLOCK_NAME(COUNT) \\
static ST_APART void st_block_NAME_##COUNT(const char *a, long long ak, const char *b, long long bk, long long depth, \\
                                           TYPE *y) { \\
    V_NAME s[COUNT]; \\
    _Pragma("GCC unroll 8") \\
    for (int j = 0; j < COUNT; j++) s[j] = (V_NAME){0}; \\
    for (long long k = 0; k < depth; k++, a += ak, b += bk) { \\
        const TYPE v = *(const TYPE *)a; \\
        _Pragma("GCC unroll 8") \\
        for (int j = 0; j < COUNT; j++) s[j] += v * ((const V_NAME *)b)[j]; \\
    } \\
    _Pragma("GCC unroll 8") \\
    for (int j = 0; j < COUNT; j++) ((V_NAME *)y)[j] = s[j]; \\
}
BLOCK_NAME(8)
BLOCK_NAME(4)
BLOCK_NAME(1)

/* Returns the sum of products of contiguous numbers. */
static ST_APART TYPE st_dot_NAME(const TYPE *a, const TYPE *b, long long n) {
    V_NAME s0 = {0}, s1 = {0}, s2 = {0}, s3 = {0};
    long long k = 0;
    TYPE sum = 0;
    for (; k + 4 * L_NAME <= n; k += 4 * L_NAME) {
        const V_NAME *x = (const V_NAME *)(a + k), *y = (const V_NAME *)(b + k);
        s0 += x[0] * y[0];
        s1 += x[1] * y[1];
        s2 += x[2] * y[2];
        s3 += x[3] * y[3];
    }
    s0 = (s0 + s1) + (s2 + s3);
    for (int j = 0; j < L_NAME; j++) sum += s0[j];
    for (; k < n; k++) sum += a[k] * b[k];
    return sum;
}

/* Computes rows of a product. The geometry has the number of products of an element, that of columns, and the strides
   of the operands and of the result in bytes. */
int product_NAME(const long long *g, char *const *p, long long begin, long long end) {
    const long long depth = g[0], columns = g[1], ar = g[2], ak = g[3], bk = g[4], bc = g[5], yr = g[6], yc = g[7];
    const long long size = sizeof(TYPE);
    for (; begin < end; begin++) {
        const char *a = p[0] + begin * ar, *b = p[1];
        char *y = p[2] + begin * yr;
        long long j = 0;
        if (bc == size && yc == size) {
            for (; j + 8 * L_NAME <= columns; j += 8 * L_NAME)
                st_block_NAME_8(a, ak, b + j * size, bk, depth, (TYPE *)y + j);
            for (; j + 4 * L_NAME <= columns; j += 4 * L_NAME)
                st_block_NAME_4(a, ak, b + j * size, bk, depth, (TYPE *)y + j);
            for (; j + L_NAME <= columns; j += L_NAME)
                st_block_NAME_1(a, ak, b + j * size, bk, depth, (TYPE *)y + j);
        }
        for (; j < columns; j++) {
            const char *column = b + j * bc;
            TYPE sum = 0;
            if (ak == size && bk == size) sum = st_dot_NAME((const TYPE *)a, (const TYPE *)column, depth);
            else for (long long k = 0; k < depth; k++)
                sum += *(const TYPE *)(a + k * ak) * *(const TYPE *)(column + k * bk);
            *(TYPE *)(y + j * yc) = sum;
        }
    }
    return 0;
}
"""


def product_source() -> str:
    """Returns the text of the library."""
    return "\n".join([HEAD, *[_SOURCE.replace("TYPE", kind).replace("NAME", name) for name, kind in _TYPES.items()]])


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
