"""The text that the libraries of all kernels have: the walk over the lines or rows of strided arrays."""

HEAD = """\
#include <math.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#define ST_FUNCTION static inline
#define ST_APART __attribute__((noinline))
"""
"""The first lines of a library."""

DRIVER = """
enum { ST_CHUNK = 256, ST_DIMS = 64 };
#define ST_ROOM(n) (((n) * 8 + 127) / 64 * 64)
#define ST_ROW long long n, char *const *p, char *scratch, long long room, long long *totals, long long *parts, \\
    long long begin, long long end
#define ST_ROW_ARGUMENTS n, p, scratch, room, totals, parts, begin, end

/* Asks for n elements of memory that a loop reads later. A core that only adds waits for memory otherwise: its own
   prefetchers have fewer requests under way than the memory answers at once. It goes to the second cache: where a core
   prefetches well itself (Zen 4), requests for the first one make the loop slower. */
#define ST_PREFETCH(address, n) \\
    _Pragma("GCC unroll 16") \\
    for (int at = 0; at < (int)(sizeof *(address)) * (n); at += 64) \\
        __builtin_prefetch((const char *)(address) + 4096 + at, 0, 2)

/* Copies n elements between strided arrays. */
static void st_copy(char *to, long long to_stride, const char *from, long long from_stride, int size, long long n) {
#define ST_COPY(T) for (long long i = 0; i < n; i++) *(T *)(to + i * to_stride) = *(const T *)(from + i * from_stride)
    if (size == 1) ST_COPY(char);
    else if (size == 2) ST_COPY(short);
    else if (size == 4) ST_COPY(int);
    else ST_COPY(long long);
}

/* Sets the position of a walk over the first nd dimensions, and the addresses of the arrays there. */
static void st_seek(long long at, int ops, long long nd, long long dims, const long long *shape,
                    const long long *strides, char *const *p, long long *index, char **line) {
    for (int op = 0; op < ops; op++) line[op] = p[op];
    for (long long d = nd - 1; d >= 0; d--) {
        index[d] = at % shape[d];
        at /= shape[d];
        for (int op = 0; op < ops; op++) line[op] += index[d] * strides[op * dims + d];
    }
}

/* Moves on by one position. */
static void st_advance(int ops, long long nd, long long dims, const long long *shape, const long long *strides,
                       long long *index, char **line) {
    for (long long d = nd - 1; d >= 0; d--) {
        for (int op = 0; op < ops; op++) line[op] += strides[op * dims + d];
        if (++index[d] < shape[d]) return;
        for (int op = 0; op < ops; op++) line[op] -= shape[d] * strides[op * dims + d];
        index[d] = 0;
    }
}

/* Computes elements of a kernel without reductions. */
static void st_lines(void (*body)(long long, char *const *), int ops, int inputs, const unsigned char *sizes,
                     const unsigned char *moves, const long long *g, char *const *p, long long begin, long long end) {
    const long long nd = g[0], *shape = g + 2, *strides = shape + nd, inner = shape[nd - 1];
    long long index[ST_DIMS], column = begin % inner, most = 1LL << 62;
    char *line[ops], *q[ops];
    bool packed[ops];
    long long buffers[ops][ST_CHUNK];
    for (int op = 0; op < ops; op++) {
        const long long stride = strides[op * nd + nd - 1];
        packed[op] = moves[op] && stride != sizes[op];
        if (packed[op] && most > ST_CHUNK) most = ST_CHUNK;
        if (!moves[op] && stride != 0) most = 1;
    }
    st_seek(begin / inner, ops, nd - 1, nd, shape, strides, p, index, line);
    while (begin < end) {
        const long long stop = inner - column < end - begin ? inner : column + end - begin;
        begin += stop - column;
        while (column < stop) {
            const long long n = stop - column < most ? stop - column : most;
            for (int op = 0; op < ops; op++) {
                const long long stride = strides[op * nd + nd - 1];
                q[op] = packed[op] ? (char *)buffers[op] : line[op] + column * stride;
                if (packed[op] && op < inputs)
                    st_copy(q[op], sizes[op], line[op] + column * stride, stride, sizes[op], n);
            }
            body(n, q);
            for (int op = inputs; op < ops; op++) {
                const long long stride = strides[op * nd + nd - 1];
                if (packed[op]) st_copy(line[op] + column * stride, stride, q[op], sizes[op], sizes[op], n);
            }
            column += n;
        }
        column = 0;
        st_advance(ops, nd - 1, nd, shape, strides, index, line);
    }
}

/* Calls kernels without reductions: each task has the addresses of a function, a geometry and pointers, and a range. */
void run_tasks(long long count, const long long *task) {
    for (; count > 0; count--, task += 5)
        ((int (*)(const long long *, char *const *, long long, long long))task[0])(
            (const long long *)task[1], (char *const *)task[2], task[3], task[4]);
}

/* Copies a row between an array and contiguous memory. */
static void st_copy_row(char *array, char *memory, int size, bool out, long long nd, const long long *shape,
                        const long long *strides, long long n) {
    long long index[ST_DIMS] = {0};
    const long long inner = shape[nd - 1], stride = strides[nd - 1];
    for (; n > 0; n -= inner, memory += inner * size) {
        if (out) st_copy(array, stride, memory, size, size, inner);
        else st_copy(memory, size, array, stride, size, inner);
        st_advance(1, nd - 1, nd, shape, strides, index, &array);
    }
}

/* Computes rows of a kernel with reductions, in steps for the whole row. */
static int st_rows(void (*body)(int, ST_ROW), int steps, int ops, int inputs, const unsigned char *sizes,
                   const unsigned char *moves, int stored, int reductions, const long long *g, char *const *p,
                   long long begin, long long end) {
    const long long nd = g[0], row_nd = g[1], outer = nd - row_nd, *shape = g + 2, *strides = shape + nd;
    long long index[ST_DIMS], n = 1, room, segments, *totals;
    char *line[ops], *q[ops], *scratch;
    bool packed[ops];
    int buffers = stored;
    for (long long d = outer; d < nd; d++) n *= shape[d];
    for (int op = 0; op < ops; op++) {
        long long wanted = sizes[op];
        packed[op] = false;
        for (long long d = nd - 1; moves[op] && d >= outer; d--) {
            if (shape[d] != 1 && strides[op * nd + d] != wanted) packed[op] = true;
            wanted *= shape[d];
        }
        buffers += packed[op];
    }
    room = ST_ROOM(n);
    segments = (n + ST_SEGMENT - 1) / ST_SEGMENT;
    scratch = malloc((size_t)(buffers * room + reductions * (segments + 1) * 8 + 64));
    if (!scratch) return 1;
    totals = (long long *)(scratch + buffers * room);
    st_seek(begin, ops, outer, nd, shape, strides, p, index, line);
    for (; begin < end; begin++) {
        char *buffer = scratch + stored * room;
        for (int op = 0; op < ops; op++) {
            q[op] = line[op];
            if (!packed[op]) continue;
            q[op] = buffer;
            buffer += room;
            if (op < inputs)
                st_copy_row(line[op], q[op], sizes[op], false, row_nd, shape + outer, strides + op * nd + outer, n);
        }
        for (int step = 0; step <= steps; step++)
            body(step, n, q, scratch, room, totals, totals + reductions, 0, step == steps ? n : segments);
        for (int op = inputs; op < ops; op++)
            if (packed[op])
                st_copy_row(line[op], q[op], sizes[op], true, row_nd, shape + outer, strides + op * nd + outer, n);
        st_advance(ops, outer, nd, shape, strides, index, line);
    }
    free(scratch);
    return 0;
}

/* Returns the number of lanes for n elements: the least power of two that is not smaller, and at most ``most``. */
static inline int st_width(long long n, int most) {
    int width = 1;
    while (width < most && width < n) width *= 2;
    return width;
}

/* Functions that combine partial results: those of the lanes of a segment, by a tree, and those of segments, along a
   binary counter. They are apart, since compiling them takes long. */
#define ST_COMBINING(NAME, T, STEP) \\
static ST_APART T st_tree_##NAME(T *lanes, int width) { \\
    for (int half = width / 2; half > 0; half /= 2) { \\
        _Pragma("GCC unroll 1") \\
        for (int j = 0; j < half; j++) { const T a = lanes[j], b = lanes[j + half]; lanes[j] = STEP; } \\
    } \\
    return lanes[0]; \\
} \\
static ST_APART T st_join_##NAME(const long long *results, long long count) { \\
    if (count == 1) return *(const T *)results; \\
    T parts[64]; \\
    int depth = 0; \\
    for (long long k = 0; k < count; k++) { \\
        T b = *(const T *)(results + k); \\
        for (long long c = k; c & 1; c >>= 1) { const T a = parts[--depth]; b = STEP; } \\
        parts[depth++] = b; \\
    } \\
    T b = parts[--depth]; \\
    while (depth > 0) { const T a = parts[--depth]; b = STEP; } \\
    return b; \\
}

"""
"""The functions that call the body of a kernel for each line or row."""
