"""Normal numbers of random words on the host, in few passes over arrays that stay in a core's cache.

`shardtensor.functions.random.distributions` has the same method for all array libraries, with the same bits.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

SERIES = np.array([[(-1) ** k * (math.pi / 4) ** n / math.factorial(n) for n in (2 * k, 2 * k + 1)] for k in range(9)])
"""The coefficients of the Taylor series of the cosine and the sine of t pi / 4, divided by 1 and t, in the square of t.
The errors are below 1e-16.
"""

# Constants are arrays, since NumPy's conversion of a number takes as long as the rest of a function of a short array.
_COSINE, _SINE = [[np.array(c) for c in column] for column in SERIES.T.tolist()]
_ZERO, _HALF, _STEP = np.array(0.0), np.array(0.5), np.array(2.0**-51)
_UNIT, _MIDDLE = np.array(2.0**-64), np.array(2.0**-65)
_SIGN, _SIGNS, _DROPPED, _NEXT = [np.array(n) for n in (-(2**63), 2, 12, 1)]

Words = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


def positive(words: Words) -> Floats:
    """Returns float64 in (0, 1], made of all 64 bits of each word: small numbers have a full significand."""
    numbers = words.view(np.uint64).astype(np.float64)
    numbers *= _UNIT
    numbers += _MIDDLE
    return numbers


def box_muller(radii: Words, angles: Words, cosines: Floats, sines: Floats | None = None) -> None:
    """Writes a normal number to ``cosines``, and an independent one to ``sines`` if it is given, of each pair of words.

    The highest two bits of an angle's word are the signs of its cosine and sine, the next 52 its distance t from the
    middle of the first quadrant, in (-1, 1): it is (1 + t) pi / 4. Polynomials are several times as fast as NumPy's
    functions, and have the same bits in all libraries.
    """
    radius = positive(radii)
    np.log(radius, out=radius)
    np.subtract(_ZERO, radius, out=radius)
    np.sqrt(radius, out=radius)  # The cosine and the sine below are those times sqrt(2).
    distance = angles << _SIGNS
    distance >>= _DROPPED
    t = distance.astype(np.float64)
    t += _HALF
    t *= _STEP
    square = t * t
    even, odd = _polynomial(square, _COSINE), _polynomial(square, _SINE)
    odd *= t
    cosine = np.subtract(even, odd, out=square)
    cosine *= radius
    _write(cosines, cosine, angles)
    if sines is not None:
        even += odd
        even *= radius
        _write(sines, even, angles << _NEXT)


def _polynomial(x: Floats, coefficients: list[Any]) -> Floats:
    """Returns a polynomial of an array, given its coefficients from the constant one on."""
    total: Floats = coefficients[-1] * x
    for coefficient in coefficients[-2:0:-1]:
        total += coefficient
        total *= x
    total += coefficients[0]
    return total


def _write(out: Floats, magnitudes: Floats, words: Words) -> None:
    """Writes positive numbers with the highest bit of each word as their sign.

    `numpy.copysign` would need the words as floats, whose conversion takes several times as long.
    """
    signs: Any = words & _SIGN
    np.bitwise_or(signs, magnitudes.view(np.int64), out=out.view(np.int64))
