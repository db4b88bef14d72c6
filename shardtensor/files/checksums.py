"""CRC-32C, the checksum of Castagnoli's polynomial (RFC 3720, appendix B.4), which zarr's codec ``crc32c`` stores.

`crc32c` is computed by the library google_crc32c if its compiled part is installed, else by C that is compiled as the
kernels of jit are, else by NumPy; `implementations` has all that this machine has. They give the same numbers.

The state of a checksum is a polynomial over GF(2) of degree at most 31, whose highest coefficient is bit 0. Zero bytes
that follow multiply it by a power of x, so that the states of parts of a text can be put together.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from shardtensor.errors import BackendError
from shardtensor.host.summation_order import HostArray
from shardtensor.interpreters.jit.c.compiler import find_compiler, load

LOG = logging.getLogger("shardtensor.files")

Checksum = Callable[[HostArray, int], int]
"""A function of bytes and of the checksum of what precedes them, which is 0 of nothing."""

_POLYNOMIAL = 0x82F63B78
_ONES = 0xFFFFFFFF
_ONE = 1 << 31
"""The polynomial 1."""


def crc32c(data: Any, value: int = 0) -> int:
    """Returns the checksum of bytes that follow others.

    Args:
        data: a C-contiguous array, or an object with contiguous bytes.
        value: the checksum of the bytes before them.

    >>> from shardtensor.files.checksums import crc32c
    >>> hex(crc32c(b"123456789")), crc32c(b"6789", crc32c(b"12345")) == crc32c(b"123456789")
    ('0xe3069283', True)
    """
    return _fastest()(bytes_of(data), value)


def bytes_of(data: Any) -> HostArray:
    """Returns the bytes of a C-contiguous array, or of an object with a buffer, as an array that shares its memory."""
    if isinstance(data, np.ndarray):
        return data.reshape(-1).view(np.uint8)
    return np.frombuffer(data, np.uint8)


@functools.cache
def _fastest() -> Checksum:
    """Returns the first of the implementations, of which the others are not prepared."""
    for name, prepare in _PREPARED.items():
        if (function := prepare()) is not None:
            LOG.info("checksums are computed by %s", name)
            return function
    raise AssertionError("NumPy computes them everywhere")


def implementations() -> dict[str, Checksum]:
    """Returns the implementations that this machine has, by name, the first one being that of `crc32c`."""
    prepared = {name: prepare() for name, prepare in _PREPARED.items()}
    return {name: function for name, function in prepared.items() if function is not None}


# -- google_crc32c ---------------------------------------------------------------------------------


def _by_google() -> Checksum | None:
    try:
        library = importlib.import_module("google_crc32c")
    except ImportError:
        return None
    if library.implementation != "c":  # Its Python is far slower than NumPy.
        return None
    extend: Callable[[int, HostArray], int] = library.extend
    return lambda data, value: extend(value, data)


# -- C ---------------------------------------------------------------------------------------------

CRC_SOURCE = """
#include <stdint.h>
#include <string.h>
#if defined(__SSE4_2__) && defined(__x86_64__)
#define STEP(crc, word) ((uint32_t)__builtin_ia32_crc32di((crc), (word)))
#elif defined(__ARM_FEATURE_CRC32) && defined(__aarch64__)
#include <arm_acle.h>
#define STEP(crc, word) __crc32cd((crc), (word))
#endif

/* Continues a state over bytes. The caller gives the tables: of the CRC of a byte that 0 to 7 zero bytes follow, and of
   the four bytes of a state that LANE zero bytes follow. An instruction takes three cycles until its result is there,
   and one can start in each, so that three lanes are computed at once. */
#define LANE 4096

uint32_t crc32c_state(uint32_t crc, const unsigned char *p, long long n, const uint32_t (*byte)[256],
                      const uint32_t (*lane)[256]) {
    uint64_t a, b, c;
#ifdef STEP
    for (; n >= 3 * LANE; n -= 3 * LANE, p += 3 * LANE) {
        uint32_t second = 0, third = 0;
        for (long long i = 0; i < LANE; i += 8) {
            memcpy(&a, p + i, 8);
            memcpy(&b, p + i + LANE, 8);
            memcpy(&c, p + i + 2 * LANE, 8);
            crc = STEP(crc, a);
            second = STEP(second, b);
            third = STEP(third, c);
        }
        crc = lane[0][crc & 255] ^ lane[1][crc >> 8 & 255] ^ lane[2][crc >> 16 & 255] ^ lane[3][crc >> 24] ^ second;
        crc = lane[0][crc & 255] ^ lane[1][crc >> 8 & 255] ^ lane[2][crc >> 16 & 255] ^ lane[3][crc >> 24] ^ third;
    }
    for (; n >= 8; n -= 8, p += 8) {
        memcpy(&a, p, 8);
        crc = STEP(crc, a);
    }
#elif __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
    for (; n >= 8; n -= 8, p += 8) {
        memcpy(&a, p, 8);
        a ^= crc;
        crc = byte[7][a & 255] ^ byte[6][a >> 8 & 255] ^ byte[5][a >> 16 & 255] ^ byte[4][a >> 24 & 255]
            ^ byte[3][a >> 32 & 255] ^ byte[2][a >> 40 & 255] ^ byte[1][a >> 48 & 255] ^ byte[0][a >> 56];
    }
#endif
    for (; n > 0; n--, p++) crc = byte[0][(crc ^ *p) & 255] ^ crc >> 8;
    return crc;
}
"""

_LANE = 4096
"""``LANE`` of the C text."""


def _by_c() -> Checksum | None:
    compiler = find_compiler()
    if compiler is None:  # The log has the reason.
        return None
    try:
        library = load(compiler, CRC_SOURCE, ["crc32c_state"])
    except BackendError as error:
        LOG.warning("checksums are not computed by C, and are slower: %s", error)
        return None
    function = library.crc32c_state
    pointer = ctypes.c_void_p
    function.argtypes = [ctypes.c_uint32, pointer, ctypes.c_longlong, pointer, pointer]
    function.restype = ctypes.c_uint32
    byte, lane = c_tables()
    tables = byte.ctypes.data, lane.ctypes.data

    def computed(data: HostArray, value: int) -> int:
        # ctypes releases the lock of the interpreter, so that other threads write meanwhile.
        return int(function(value ^ _ONES, data.ctypes.data, data.size, *tables)) ^ _ONES

    return computed


@functools.cache
def c_tables() -> tuple[_Words, _Words]:
    """Returns the tables that the C text needs, which stay in memory."""
    return np.stack([_byte_table()] + [_followed(_byte_table(), n) for n in range(1, 8)]), _shift_tables(_LANE).copy()


# -- NumPy -----------------------------------------------------------------------------------------

_LANES = 1 << 13
"""The parts of a text whose states NumPy computes at once."""

_STEPS = 32
"""The words of each lane that are copied next to those of the other lanes at once: all of them fit into a cache."""

_Words = npt.NDArray[np.uint32]

_BIT = np.uint32(1)


def _by_numpy() -> Checksum:
    return _numpy_checksum


def _numpy_checksum(data: HostArray, value: int) -> int:
    """Computes the states of lanes of equal length at once, and puts neighbors together until one is left."""
    n = data.size
    lanes = min(_LANES, 1 << max(n // 64, 1).bit_length() - 1)
    length = -(-n // (8 * lanes))  # in words of 8 bytes
    # Zero bytes in front of a text leave the state 0 as it is.
    missing = 8 * lanes * length - n
    if missing:
        data = np.concatenate([np.zeros(missing, np.uint8), data])
    elif data.ctypes.data % 8:
        data = data.copy()
    states = np.zeros(lanes, np.uint32)
    words = data.view("<u8").reshape(lanes, length)
    word = _word_tables()
    for begin in range(0, length, _STEPS):
        halves = np.ascontiguousarray(words[:, begin : begin + _STEPS].T).view("<u2").reshape(-1, lanes, 4)
        for step in halves:
            low, high = step[:, 0] ^ states.astype(np.uint16), step[:, 1] ^ (states >> 16).astype(np.uint16)
            states = word[0].take(low)
            states ^= word[1].take(high)
            states ^= word[2].take(step[:, 2])
            states ^= word[3].take(step[:, 3])
    nbytes = 8 * length
    while states.size > 1:
        tables, first = _shift_tables(nbytes), states[::2]
        states = states[1::2].copy()
        for k in range(4):
            states ^= tables[k].take(first >> np.uint32(8 * k) & np.uint32(255))
        nbytes *= 2
    return _product(_power(n), value ^ _ONES) ^ int(states[0]) ^ _ONES


@functools.cache
def _word_tables() -> list[_Words]:
    """Returns the states that the four parts of 16 bits of a word give."""
    last = _next(_next(np.arange(1 << 16, dtype=np.uint32)))
    return [*(_followed(last, n) for n in (6, 4, 2)), last]


# -- polynomials -----------------------------------------------------------------------------------


def _next(states: _Words) -> _Words:
    """Returns the states that a zero byte follows."""
    for _ in range(8):
        states = (states >> _BIT) ^ (states & _BIT) * np.uint32(_POLYNOMIAL)
    return states


@functools.cache
def _byte_table() -> _Words:
    """Returns the state that each byte gives after the state 0."""
    return _next(np.arange(256, dtype=np.uint32))


def _followed(states: _Words, count: int) -> _Words:
    """Returns the states that ``count`` zero bytes follow."""
    return _products(_power(count), states)


@functools.lru_cache(256)
def _shift_tables(count: int) -> _Words:
    """Returns, for each of the four bytes of a state, the states that its values give when zero bytes follow."""
    values = np.arange(256, dtype=np.uint32)
    return np.stack([_followed(values << np.uint32(8 * k), count) for k in range(4)])


def _products(a: int, b: _Words) -> _Words:
    """Returns the products of a polynomial and many, modulo Castagnoli's."""
    product = np.zeros_like(b)
    for bit in range(31, -1, -1):
        if a >> bit & 1:
            product ^= b
        b = (b >> _BIT) ^ (b & _BIT) * np.uint32(_POLYNOMIAL)
    return product


def _product(a: int, b: int) -> int:
    """Returns the product of two polynomials, modulo Castagnoli's."""
    product = 0
    for bit in range(31, -1, -1):
        if a >> bit & 1:
            product ^= b
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)
    return product


@functools.lru_cache(1024)
def _power(nbytes: int) -> int:
    """Returns the polynomial by which zero bytes multiply a state: x to the power of their number of bits."""
    square, power = 1 << 23, _ONE  # x ** 8
    while nbytes:
        if nbytes & 1:
            power = _product(square, power)
        square = _product(square, square)
        nbytes >>= 1
    return power


_PREPARED: dict[str, Callable[[], Checksum | None]] = {
    "google_crc32c": _by_google, "C": _by_c, "NumPy": _by_numpy,
}  # fmt: skip
"""What prepares each implementation, the fastest first; None where the machine does not have it."""
