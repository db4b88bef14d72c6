"""Random bits: Philox4x64-10 of a key and a counter (Salmon et al., 2011), on the host and on any device.

The generator is a function without state. It maps a counter of 256 bits, under a key of 128 bits, to a block of four
words of 64 bits. Keys and counters are Python integers here, whose lowest 64 bits are the first word.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import numpy.typing as npt

WORDS = 4
"""The number of words of a block."""

_COUNTERS = 1 << 256
MULTIPLIERS = (0xD2E7470EE14C6C93, 0xCA5A826395121157)
WEYL = (0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B)
ROUNDS = 10
_LOW = 0xFFFFFFFF
WORD = 0xFFFFFFFFFFFFFFFF


def words(key: int, counter: int, blocks: int) -> npt.NDArray[np.uint64]:
    """Returns the words of as many blocks with consecutive counters, the first of which is ``counter``.

    NumPy's `numpy.random.Philox` computes them. Its stream is fixed, and other threads run meanwhile.
    """
    # It is taken out, since a signal handler or a finalizer may call this function meanwhile, in the same thread.
    generator: _Generator = _local.__dict__.pop("generator", None) or _Generator()
    result = generator.words(key, counter, blocks)
    _local.generator = generator
    return result


class _Generator:
    """NumPy's generator of one thread, of which each call sets the whole state."""

    def __init__(self) -> None:
        self._philox = np.random.Philox(key=0)
        self._words: dict[str, tuple[int, ...]] = {}
        self._state: Any = {
            "bit_generator": "Philox",
            "state": self._words,
            "buffer": (0,) * WORDS,
            "buffer_pos": WORDS,  # The buffer is used up, so that the next block is computed.
            "has_uint32": 0,
            "uinteger": 0,
        }

    def words(self, key: int, counter: int, blocks: int) -> npt.NDArray[np.uint64]:
        before = (counter - 1) % _COUNTERS  # NumPy increments the counter first.
        # NumPy reads the words one by one, which takes less time of a tuple than of an array.
        self._words["counter"] = before & WORD, before >> 64 & WORD, before >> 128 & WORD, before >> 192
        self._words["key"] = (key & WORD, key >> 64)
        self._philox.state = self._state
        return self._philox.random_raw(blocks * WORDS)


_local = threading.local()


def block(xp: Any, key: int, index: Any, draw: int) -> tuple[Any, Any, Any, Any]:
    """Returns the four words of the block of each counter ``index + (draw << 64)``.

    It is composed of functions that every array library has for signed integers, which wrap around on overflow. Both
    halves of a round are computed together, since the number of calls takes most of the time of short arrays.

    Args:
        xp: the namespace of the array.
        key: the key.
        index: an array of int64 of one dimension.
        draw: the second word of the counters; the third and the fourth are 0.

    Returns:
        Four arrays of int64, whose elements have the bits of the words.
    """
    keys = [[signed((key >> 64 * k) + n * WEYL[k] & WORD) for k in (1, 0)] for n in range(ROUNDS)]
    table = xp.asarray([*zip(*map(_parts, MULTIPLIERS), strict=True), *keys], dtype=np.int64)[:, :, None]
    zero = index ^ index
    even, odd = xp.stack([index, zero]), xp.stack([zero, zero + signed(draw)])  # words 0 and 2, words 3 and 1
    for n in range(ROUNDS):
        high, low = _product(even, table[0], table[1], table[2])
        even, odd = xp.flip(high ^ odd ^ table[n + 3], axis=0), low
    return even[0], odd[1], even[1], odd[0]


SECOND, THIRD = -1, -2
"""The numbers of `scrambled` for words that are used together with a pair. Pairs for other
proposals have the numbers from 1 on.
"""


def scrambled(xp: Any, a: Any, b: Any, number: int) -> tuple[Any, Any]:
    """Returns other words for pairs of random words, in arrays of int64, where more are needed than a block has.

    Two rounds of a Feistel network map all pairs one to one, so that the new words are uniformly distributed, too.

    Args:
        xp: the namespace of the arrays.
        a, b: the words.
        number: which of several functions makes them. They must be different for words that are used together, since
            the same function applied to words that it made gives one of those from which it made them.
    """
    b = scrambled_second(xp, a, b, number)
    return scrambled_second(xp, b, a, number), b


def scrambled_second(xp: Any, a: Any, b: Any, number: int) -> Any:
    """Returns the second word of each pair of `scrambled`, in half the time."""
    return b ^ _mixed(a, signed(number * MIXING[0] & WORD), *(_MIXING if xp is np else MIXING)[1:])


def _mixed(x: Any, start: Any, first: Any, second: Any, last: Any, half: Any) -> Any:
    """Returns words all of whose bits depend on all bits of the given ones."""
    x = x + start
    x *= first
    x ^= x >> half  # The copies of the sign bit do no harm, since no step has to be inverted.
    x *= second
    x ^= x >> half
    x *= last
    return x


def mulhilo(x: Any, factor: int) -> tuple[Any, Any]:
    """Returns the high and the low word of the products of unsigned words, in an array of int64, and of one factor."""
    low, high, signed_factor = _parts(factor)
    if high:
        return _product(x, low, high, signed_factor)
    return (_upper(x & _LOW, (x >> 32) & _LOW, low) >> 32) & _LOW, x * signed_factor


def _parts(factor: int) -> tuple[int, int, int]:
    """Returns the low and the high half of a word, and the word itself as a signed integer."""
    return factor & _LOW, factor >> 32, signed(factor)


def _product(x: Any, low: Any, high: Any, factor: Any) -> tuple[Any, Any]:
    """Returns the words of products, of which libraries compute the low one only; the high one is composed of the
    products of halves.
    """
    x0, x1 = x & _LOW, (x >> 32) & _LOW  # The mask removes the copies of the sign bit.
    upper = _upper(x0, x1, low)
    lower = x0 * high + (upper & _LOW)
    return x1 * high + ((upper >> 32) & _LOW) + ((lower >> 32) & _LOW), x * factor


def _upper(x0: Any, x1: Any, low: Any) -> Any:
    """Returns the highest 64 of the 96 bits of the products of words, given by their halves, and of half a word."""
    return x1 * low + ((x0 * low >> 32) & _LOW)


def signed(word: int) -> int:
    """Returns the integer of int64 with the bits of a word."""
    return word - (1 << 64) if word >> 63 else word


MIXING = (*map(signed, (0xDB4F0B9175AE2165, 0x9E3779B97F4A7C15, 0xD1B54A32D192ED03, 0xAEF17502108EF2D9)), 32)
"""A number of which `_mixed` adds a multiple, odd ones by which it multiplies, and the distance of its shifts."""

# NumPy's conversion of a number takes as long as the rest of a function of a short array.
_MIXING = tuple([np.array(n) for n in MIXING])
