"""The library of loops: what runs the trips of all loops, and what they do besides kernels: copies, and small matrix
products, for which a call of BLAS from Python takes longer than they do.

An element of a product is the sum of its products in order where the columns of the second operand lie next to each
other in memory, and otherwise that of a few partial sums. Its bits depend on the strides of the operands and, as those
of BLAS, on the CPU, and on nothing else.
"""

from __future__ import annotations

import ctypes

from shardtensor.backend.strides import loop_strides
from shardtensor.interpreters.jit.c.c_driver import HEAD
from shardtensor.interpreters.jit.kernels.kernel import HostArray

_TYPES = {"f4": "float", "f8": "double"}
"""The types of the elements, by the names of their dtypes."""

PRODUCTS = {dtype: f"product_{dtype}" for dtype in _TYPES}
"""The functions of products, by the dtype of the elements."""

FUNCTIONS = ("run_trips", "copy_elements", *PRODUCTS.values())
"""The functions of the library."""

_SECONDS = 5e-11
"""The seconds that one product of two numbers takes, about."""

_TRIPS = """
/* Calls kernels: each task has the addresses of a function, a geometry and pointers, and a range; or 0 in place of the
   geometry, and the function is one that computes a line. Returns whether memory for intermediate results lacked. */
static ST_APART int st_tasks(long long count, const long long *task) {
    for (; count > 0; count--, task += 5)
        if (!task[1]) ((void (*)(long long, char *const *))task[0])(task[4], (char *const *)task[2]);
        else if (((int (*)(const long long *, char *const *, long long, long long))task[0])(
                (const long long *)task[1], (char *const *)task[2], task[3], task[4]))
            return 1;
    return 0;
}

/* Runs the trips of a loop from number ``at`` on. Even and odd trips have a table each: the number and the address of
   the tasks of the condition, the address of its bool, or 0; the number and the address of the tasks of the trip; and
   those of its moves, pairs of the address of a pointer and the bytes by which it moves on after the trip.
   Returns the number of the trip before which it has stopped, or -1 where memory was missing. */
long long run_trips(long long at, long long end, const long long *even, const long long *odd) {
    for (; at < end; at++) {
        const long long *table = at % 2 ? odd : even, *move = (const long long *)table[6];
        if (table[2]) {
            if (st_tasks(table[0], (const long long *)table[1])) return -1;
            if (!*(const char *)table[2]) return at;
        }
        if (st_tasks(table[3], (const long long *)table[4])) return -1;
        for (long long k = 0; k < table[5]; k++, move += 2) *(char **)move[0] += move[1];
    }
    return at;
}

/* Copies an array as a task. The geometry has the number of dimensions, the size of an element, the shape, and the
   strides of both arrays in bytes. */
int copy_elements(const long long *g, char *const *p, long long begin, long long end) {
    const long long nd = g[0], size = g[1], *shape = g + 2, *from = shape + nd, *to = from + nd, n = shape[nd - 1];
    const long long f = from[nd - 1], t = to[nd - 1];
    long long index[nd];
    const char *a = p[0];
    char *b = p[1];
    for (long long d = 0; d < nd; d++) index[d] = 0;
    for (; begin < end; begin += n) {
        if (f == size && t == size) memcpy(b, a, (size_t)(n * size));
        else if (size == 8)
            for (long long i = 0; i < n; i++) *(long long *)(b + i * t) = *(const long long *)(a + i * f);
        else if (size == 4) for (long long i = 0; i < n; i++) *(int *)(b + i * t) = *(const int *)(a + i * f);
        else for (long long i = 0; i < n; i++) memcpy(b + i * t, a + i * f, (size_t)size);
        for (long long d = nd - 2; d >= 0; d--) {
            a += from[d];
            b += to[d];
            if (++index[d] < shape[d]) break;
            a -= shape[d] * from[d];
            b -= shape[d] * to[d];
            index[d] = 0;
        }
    }
    return 0;
}
"""

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


def loop_source() -> str:
    """Returns the text of the library."""
    products = [_SOURCE.replace("TYPE", kind).replace("NAME", name) for name, kind in _TYPES.items()]
    return "\n".join([HEAD, _TRIPS, _HEAD, *products])


class LoopFunctions:
    """Stands for the functions of the library among kernels that are compiled."""

    def __str__(self) -> str:
        return "the functions of loops"


LOOPS = LoopFunctions()


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
