"""The order of rows: a keyed bijection of the numbers below n, each value of which is computed without the others.

It is a Feistel network, whose rounds are invertible whatever their functions are (Luby and Rackoff, "How to construct
pseudorandom permutations from pseudorandom functions", 1988), on the smallest power of two that is not below n. Values
of n and above pass it again until they are below, which is called cycle walking; both constructions are those of Black
and Rogaway, "Ciphers with arbitrary finite domains" (2002). The halves of words of an odd number of bits differ by one
bit, and rounds change them alternately. The function of a round is the upper half of a product and a sum of 64 bits,
with two words drawn from the key (Dietzfelbinger, "Universal hashing and k-wise independent random variables via integer
arithmetic without primes", 1996).
"""

from __future__ import annotations

import functools

import numpy as np
import numpy.typing as npt

from shardtensor.host import philox

_ROUNDS = 24
"""The rounds of the network. Of few rows, fewer rounds would draw some of the orders more often than others."""

_EPOCHS = 3 << 192
"""The last word of the counters from which the words of epochs are drawn: those of other uses of a key differ."""

_ONE, _HALF = np.uint64(1), np.uint64(32)

Words = npt.NDArray[np.uint64]


@functools.lru_cache(8)
def round_words(key: int, epoch: int) -> tuple[np.uint64, ...]:
    """Returns the words of an epoch, two for each round.

    Args:
        key: the bits of the key.
        epoch: the number of the epoch, which has an order of its own.
    """
    blocks = 2 * _ROUNDS // philox.WORDS
    return tuple(philox.words(key, _EPOCHS + epoch * blocks, blocks))


def shuffled(places: npt.NDArray[np.int64], rows: int, key: int, epoch: int) -> npt.NDArray[np.int64]:
    """Returns the rows at some places of the order of an epoch.

    Args:
        places: the places, int64 of one dimension, from 0 to ``rows`` - 1.
        rows: the number of rows, at least 1.
        key: the bits of the key.
        epoch: the number of the epoch.

    Returns:
        The rows, int64. Of all places they are a permutation of all rows.
    """
    words, bits = round_words(key, epoch), (rows - 1).bit_length()
    values = _network(places.astype(np.uint64), bits, words)
    outside = np.flatnonzero(values >= rows)
    while outside.size:
        values[outside] = again = _network(values[outside], bits, words)
        outside = outside[again >= rows]
    return values.astype(np.int64)


def _network(values: Words, bits: int, words: tuple[np.uint64, ...]) -> Words:
    """Returns the images of words of so many bits, of which there are at most 64."""
    low = np.uint64(bits // 2)
    masks = (_ONE << low) - _ONE, (_ONE << np.uint64(bits) - low) - _ONE
    halves = [values & masks[0], values >> low]
    for n in range(_ROUNDS):
        changed = (n + 1) % 2
        hashed = halves[1 - changed] * words[2 * n]
        hashed += words[2 * n + 1]
        hashed >>= _HALF
        hashed &= masks[changed]
        halves[changed] ^= hashed
    return halves[0] | halves[1] << low
