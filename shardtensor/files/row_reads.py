"""Reads of rows and their checksum by C, in one call without the lock of the interpreter.

Each part of a file goes into a cache, is summed there, and is written past the caches to where its rows belong: an
ordinary copy would read the memory that it overwrites first, which takes as long as writing it.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from shardtensor.errors import BackendError
from shardtensor.files.checksums import CRC_SOURCE, c_tables
from shardtensor.files.chunk_grids import Box
from shardtensor.host.summation_order import HostArray
from shardtensor.interpreters.jit.c.compiler import find_compiler, load

LOG = logging.getLogger("shardtensor.files")

_CACHED = 1 << 18
"""The bytes that are read at once, which fit into a cache of a core."""

_SOURCE = (
    CRC_SOURCE
    + r"""
#include <unistd.h>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

static void copy(char *to, const char *from, long long n) {
    long long k = 0;
#ifdef __SSE2__
    /* Stores past the caches need aligned addresses, and are fast where whole lines follow each other. */
    k = -(uintptr_t)to & 63;
    if (k > n) k = n;
    memcpy(to, from, k);
    for (; k + 64 <= n; k += 64) {
        __m128i a = _mm_loadu_si128((const __m128i *)(from + k));
        __m128i b = _mm_loadu_si128((const __m128i *)(from + k + 16));
        __m128i c = _mm_loadu_si128((const __m128i *)(from + k + 32));
        __m128i d = _mm_loadu_si128((const __m128i *)(from + k + 48));
        _mm_stream_si128((__m128i *)(to + k), a);
        _mm_stream_si128((__m128i *)(to + k + 16), b);
        _mm_stream_si128((__m128i *)(to + k + 32), c);
        _mm_stream_si128((__m128i *)(to + k + 48), d);
    }
#endif
    memcpy(to + k, from + k, n - k);
}

/* Reads bytes of a file, which are rows of `width` bytes, and continues a state over them. Of each row from `first` to
   `last`, the `n` bytes from `skip` on are copied. Returns the number of bytes that could be read. */
long long read_rows(int file, long long offset, long long nbytes, char *cached, long long most, uint32_t *state,
                    const uint32_t (*byte)[256], const uint32_t (*lane)[256], char *to, long long step,
                    long long width, long long first, long long last, long long skip, long long n) {
    long long at = 0;
    while (at < nbytes) {
        long long got = pread(file, cached, nbytes - at < most ? nbytes - at : most, offset + at);
        if (got <= 0) break;
        *state = crc32c_state(*state, (const unsigned char *)cached, got, byte, lane);
        for (long long row = at / width > first ? at / width : first; row < last; row++) {
            long long begin = row * width + skip, end = begin + n;
            if (begin >= at + got) break;
            long long from = begin > at ? begin : at, until = end < at + got ? end : at + got;
            if (from < until) copy(to + (row - first) * step + (from - begin), cached + (from - at), until - from);
        }
        at += got;
    }
#ifdef __SSE2__
    _mm_sfence();  /* Other threads see these stores only after it. */
#endif
    return at;
}
"""
)


class Rows(NamedTuple):
    """Where the bytes of a contiguous box go.

    Attributes:
        to: the address of the first byte that is copied.
        step: the bytes between rows there.
        width: the bytes of a row of the box.
        first: the first row of which bytes are copied.
        last: the row after the last one.
        skip: the bytes of a row before those that are copied.
        n: the bytes of a row that are copied.
    """

    to: int
    step: int
    width: int
    first: int
    last: int
    skip: int
    n: int


def rows_of(target: HostArray | None, part: Box | None, box: Box) -> Rows | None:
    """Returns how elements of a contiguous box become those of an array, if they are rows at equal distances.

    Args:
        target: the array; None if no element is copied.
        part: the elements that it has, which are in the box.
        box: the box.
    """
    if target is None or part is None:
        return Rows(0, 0, 1, 0, 0, 0, 0)
    d, width, skip, n = target.ndim, target.itemsize, 0, target.itemsize
    # Dimensions that are contiguous in both are one, the first of them even if the array has only a part of it.
    while d and n == width and target.strides[d - 1] == n:
        d -= 1
        (begin, end), (o, e) = part[d], box[d]
        width, skip, n = width * (e - o), width * (begin - o), width * (end - begin)
    outer = [k for k in range(d) if box[k][1] - box[k][0] > 1]
    if len(outer) > 1:
        return None
    first, last, step = 0, 1, 0
    for k in outer:
        first, last, step = part[k][0] - box[k][0], part[k][1] - box[k][0], target.strides[k]
    return Rows(target.ctypes.data, step, width, first, last, skip, n)


def is_available() -> bool:
    """Whether C can read, for which the first call compiles it."""
    return _compiled() is not None


def read_rows(descriptor: int, offset: int, nbytes: int, value: int, rows: Rows) -> int | None:
    """Reads a contiguous box of a file.

    Args:
        descriptor: the file.
        offset: where the box begins.
        nbytes: its bytes.
        value: the checksum of the bytes before them.
        rows: where they go.

    Returns:
        The checksum; None if not all could be read, because of an error or a signal.
    """
    function = _compiled()
    assert function is not None
    cached = np.empty(min(nbytes, _CACHED), np.uint8)
    state = ctypes.c_uint32(value ^ 0xFFFFFFFF)
    byte, lane = c_tables()
    done = function(
        descriptor, offset, nbytes, cached.ctypes.data, cached.size, ctypes.byref(state), byte.ctypes.data,
        lane.ctypes.data, *rows,
    )  # fmt: skip
    return state.value ^ 0xFFFFFFFF if done == nbytes else None


@functools.cache
def _compiled() -> Callable[..., int] | None:
    """Returns the function of the C text; None without a compiler, of which the log has the reason."""
    compiler = find_compiler()
    if compiler is None:
        return None
    try:
        function = load(compiler, _SOURCE, ["read_rows"]).read_rows
    except BackendError as error:
        LOG.warning("files are not read by C, and reads are slower: %s", error)
        return None
    number, pointer = ctypes.c_longlong, ctypes.c_void_p
    function.argtypes = [ctypes.c_int, number, number, pointer, number, *[pointer] * 4, *[number] * 6]
    function.restype = number
    return function
