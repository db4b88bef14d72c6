"""Numbers made of random words: fractions, normal and exponential numbers, and integers.

The functions take the namespace of a backend and flat arrays, words as int64, and return the same bits in all libraries
up to the rounding of their logarithms and other functions. Those for float32 and float16 take halves of words.
"""

from __future__ import annotations

import math
import sys
from typing import Any

import numpy as np

from shardtensor.functions.random.random_elements import places, redrawn
from shardtensor.host.normals import END, ENDS, HEIGHTS, LAYERS
from shardtensor.host.philox import SECOND, mulhilo, scrambled, scrambled_second, signed

_LOW = 0xFFFFFFFF
TURN = 2 * math.pi

# NumPy's conversion of a number takes as long as the rest of a function of a short array.
_SHIFTS = {shift: np.array(shift, np.uint64) for shift in (11, 32)}
_PLACES = np.array(LAYERS - 1), np.array(11), np.array(0.5)
_STEP = np.array(2.0**-53)


def as_float(xp: Any, x: Any, dtype: Any = np.float64) -> Any:
    """Returns an array of another dtype."""
    return x.astype(dtype) if xp is np else xp.asarray(x, dtype=dtype)


def upper_bits(xp: Any, words: Any, shift: int = 32) -> Any:
    """Returns the highest bits of each word as integers of int64, without the lowest ``shift`` bits."""
    if xp is np:  # Shifts of unsigned words need no mask.
        return (words.view(np.uint64) >> _SHIFTS[shift]).view(np.int64)
    return (words >> shift) & (2 ** (64 - shift) - 1)


def fraction(xp: Any, words: Any) -> Any:
    """Returns float64 in [0, 1), made of the highest 53 bits of each word."""
    numbers = as_float(xp, upper_bits(xp, words, 11))
    numbers *= _STEP if xp is np else 2.0**-53
    return numbers


def inside_unit(xp: Any, words: Any) -> Any:
    """Returns float64 in (0, 1), made of the highest 52 bits of each word."""
    return (as_float(xp, (words >> 12) & (2**52 - 1)) + 0.5) * 2.0**-52


def positive(xp: Any, words: Any) -> Any:
    """Returns float64 in (0, 1], made of all 64 bits of each word: small numbers have a full significand."""
    # Both products are exact, so that the sum is rounded once. NumPy's conversion of uint64 branches at the sign.
    numbers = as_float(xp, upper_bits(xp, words)) * 2.0**32
    numbers += as_float(xp, words & _LOW)
    numbers *= 2.0**-64
    numbers += 2.0**-65
    return numbers


def halves_of(xp: Any, words: Any) -> Any:
    """Returns the low half, then the high half of each word, as integers from 0 to 2**32 - 1."""
    if xp is np and sys.byteorder == "little":
        return words.view(np.uint32)
    return _interleaved(xp, words & _LOW, (words >> 32) & _LOW)


def _positive32(xp: Any, halves: Any) -> Any:
    """Returns float32 in (0, 1], made of 32 bits: small numbers have a full significand."""
    return as_float(xp, halves, np.float32) * 2.0**-32 + 2.0**-33


def _interleaved(xp: Any, first: Any, second: Any) -> Any:
    if xp is np:  # np.stack takes longer than all else for short arrays.
        both = np.empty(2 * len(first), first.dtype)
        both[0::2], both[1::2] = first, second
        return both
    return xp.reshape(xp.stack([first, second], axis=-1), (-1,))


# -- distributions ---------------------------------------------------------------------------------


def uniform32(xp: Any, halves: Any, dtype: np.dtype[Any]) -> Any:
    """Returns numbers in [0, 1) of halves of words, as exact as a dtype of at most four bytes is."""
    bits = np.finfo(dtype).nmant + 1  # As many as the dtype has: rounding to it would give 1.
    return as_float(xp, halves >> (32 - bits), np.float32) * 2.0**-bits


def normal64(xp: Any, words: Any) -> Any:
    """Returns a normal number of each word by the ziggurat of `shardtensor.host.normals`. One word of 80 is outside of
    the next layer, and gets another one from its neighbour.
    """
    layer, x = _placed(xp, words)
    left = places(xp, xp.abs(x) >= _taken(xp, _RIGHT, layer))
    if not left.shape[0]:
        return x
    own = words[left]
    other = scrambled_second(xp, own, words[left ^ 1], SECOND)
    return redrawn(xp, x, left, own, other, lambda a, b, left: propose_normal(xp, a, b))


def quick_normal(xp: Any, words: Any) -> tuple[Any, Any]:
    """Returns the place of each word in its layer, and whether it is inside of the next layer."""
    layer, x = _placed(xp, words)
    return x, xp.abs(x) < _taken(xp, _RIGHT, layer)


def _placed(xp: Any, words: Any) -> tuple[Any, Any]:
    """Returns the layer of each word, which is its lowest 8 bits, and its place in it, which is its highest 53 bits."""
    least, shift, half = _PLACES if xp is np else (LAYERS - 1, 11, 0.5)
    layer = words & least
    x = as_float(xp, words >> shift)
    x += half
    x *= _taken(xp, _SCALES, layer)
    return layer, x


def propose_normal(xp: Any, a: Any, b: Any) -> tuple[Any, Any]:
    """Places the first words in their layers. In the rectangles of layers, numbers within the next layer are below the
    distribution, and others where the second word places them. Beyond the first rectangle, the second word is the
    distance from it, and the numbers are accepted according to their probability.
    """
    layer, x = _placed(xp, a)
    size, lowest, even = xp.abs(x), layer == 0, positive(xp, b)
    inside = size < _taken(xp, _RIGHT, layer)
    beyond = END - xp.log(even) / END
    level = xp.where(lowest, (size - END) * END, _height(xp, layer, even))
    distance = xp.where(lowest, beyond - END, size)
    accepted = inside | (level < xp.exp(distance * distance * -0.5))
    return xp.where(lowest & ~inside, xp.copysign(beyond, x), x), accepted


def _height(xp: Any, layer: Any, even: Any) -> Any:
    return _taken(xp, HEIGHTS, layer) + even * _taken(xp, _RISES, layer)


def _taken(xp: Any, table: Any, layer: Any) -> Any:
    return table.take(layer) if xp is np else xp.take(xp.asarray(table), layer)


_RIGHT, _SCALES, _RISES = ENDS[1:], ENDS[:-1] * 2.0**-52, HEIGHTS[1:] - HEIGHTS[:-1]


def normal32(xp: Any, halves: Any, dtype: np.dtype[Any]) -> Any:
    """Returns normal numbers in float32, two for two halves of words, by Box and Muller's method."""
    radius = xp.sqrt(xp.log(_positive32(xp, halves[0::2])) * -2.0)
    angle = uniform32(xp, halves[1::2], np.dtype(np.float32)) * TURN
    return _interleaved(xp, radius * xp.cos(angle), radius * xp.sin(angle))


def exponential64(xp: Any, words: Any) -> Any:
    """Returns an exponential number of each word by inversion."""
    return 0.0 - xp.log(positive(xp, words))


def exponential32(xp: Any, halves: Any, dtype: np.dtype[Any]) -> Any:
    """Returns an exponential number in float32 of each half of a word."""
    return 0.0 - xp.log(_positive32(xp, halves))


def below64(xp: Any, words: Any, count: int) -> Any:
    """Returns integers below ``count``, one of each word, all equally likely."""
    values, accepted = _scaled(words, count)
    if not 2**64 % count:
        return values
    left = places(xp, ~accepted)
    a, b = scrambled(xp, words[left], words[left ^ 1], 1)
    return redrawn(xp, values, left, a, b, lambda a, b, left: _scaled(a, count))


def below32(xp: Any, words: Any, count: int) -> Any:
    """Returns integers below ``count``, at most 2**32, one of each half of a word."""
    values, products = _scaled32(xp, as_float(xp, halves_of(xp, words), np.int64), count)
    least = 2**32 % count
    if not least:
        return values
    left = places(xp, (products & _LOW) < least)
    if not left.shape[0]:
        return values
    own, other = words[left >> 1], words[(left >> 1) ^ 1]
    # The lower half of the first word is the element's own, so that both halves of a word go on with other bits.
    own = xp.where((left & 1) == 1, (own << 32) | ((own >> 32) & _LOW), own)

    def again(a: Any, b: Any, left: Any) -> tuple[Any, Any]:
        values, products = _scaled32(xp, a & _LOW, count)
        return values, (products & _LOW) >= least

    return redrawn(xp, values, left, *scrambled(xp, own, other, 1), again)


def _scaled32(xp: Any, halves: Any, count: int) -> tuple[Any, Any]:
    """Returns the upper halves of the products of 32 bits and ``count``, and the products."""
    products = halves * count
    return upper_bits(xp, products), products


def _scaled(words: Any, count: int) -> tuple[Any, Any]:
    high, low = mulhilo(words, count)
    return high, (low ^ signed(1 << 63)) >= signed(2**64 % count ^ 1 << 63)  # a comparison of unsigned integers
