"""The operators that draw random numbers, and the distributions as functions of random words.

The functions of `shardtensor.functions.random.samplers`, which users call, check arguments and call these operators.
``key`` is a key of `shardtensor.host.philox`: an operand, so that plans do not depend on it. Numbers are computed in
float64, except that uniform, normal and exponential numbers of float32 and float16 are made of 32 bits each, in
float32.
"""

from __future__ import annotations

import functools
import math
import sys
from typing import Any

import numpy as np

from shardtensor.core import call, implements, operator
from shardtensor.functions.algorithms.first_device import GATHERED
from shardtensor.functions.algorithms.sample_sort import Order
from shardtensor.functions.random.random_elements import Elements, fill
from shardtensor.host import normals
from shardtensor.host.philox import mulhilo, signed
from shardtensor.sharding.layout import Shape
from shardtensor.sharding.shard_context import ShardContext
from shardtensor.tensor.operands import sharded_dtype
from shardtensor.tensor.tensor import ArrayLike, ShardedTensor

_DERIVATIVES = "of_mathematical"

_LOW = 0xFFFFFFFF
_TURN = 2 * math.pi


def _created(kinds: Any, *, shape: Any, dtype: Any, n: int = 0) -> tuple[Shape, Any]:
    return shape, sharded_dtype(dtype)


# -- numbers from words ----------------------------------------------------------------------------


def _float(xp: Any, x: Any, dtype: Any = np.float64) -> Any:
    return x.astype(dtype) if xp is np else xp.asarray(x, dtype=dtype)


def _fraction(xp: Any, words: Any) -> Any:
    """Returns float64 in [0, 1), made of the highest 53 bits of each word."""
    return _float(xp, (words >> 11) & (2**53 - 1)) * 2.0**-53


def _inside(xp: Any, words: Any) -> Any:
    """Returns float64 in (0, 1), made of the highest 52 bits of each word."""
    return (_float(xp, (words >> 12) & (2**52 - 1)) + 0.5) * 2.0**-52


def _positive(xp: Any, words: Any) -> Any:
    """Returns float64 in (0, 1], made of all 64 bits of each word: small numbers have a full significand."""
    if xp is np:
        return normals.positive(words)
    # Both products are exact, so that the sum is rounded once, as NumPy's conversion of uint64 is.
    unsigned = _float(xp, (words >> 32) & _LOW) * 2.0**32 + _float(xp, words & _LOW)
    return unsigned * 2.0**-64 + 2.0**-65


def _halves(xp: Any, words: Any) -> Any:
    """Returns the low half, then the high half of each word, as integers from 0 to 2**32 - 1."""
    if xp is np and sys.byteorder == "little":
        return words.view(np.uint32)
    return _interleaved(xp, words & _LOW, (words >> 32) & _LOW)


def _positive32(xp: Any, halves: Any) -> Any:
    """Returns float32 in (0, 1], made of 32 bits: small numbers have a full significand."""
    return _float(xp, halves, np.float32) * 2.0**-32 + 2.0**-33


def _interleaved(xp: Any, first: Any, second: Any) -> Any:
    if xp is np:  # np.stack takes longer than all else for short arrays.
        both = np.empty(2 * len(first), first.dtype)
        both[0::2], both[1::2] = first, second
        return both
    return xp.reshape(xp.stack([first, second], axis=-1), (-1,))


def _packed(elements: Elements, *, draws: Any, dtype: np.dtype[Any]) -> Any:
    """Draws numbers of 64 bits for float64, and of 32 bits for smaller dtypes.

    Args:
        elements: the elements.
        draws: the transformation of words for either width (see `Elements.packed`).
        dtype: the dtype of the result.
    """
    wide, narrow = draws
    if dtype.itemsize == 8:
        return elements.packed(4, wide)
    return elements.packed(8, lambda xp, words: narrow(xp, _halves(xp, words), dtype))


# -- uniform, normal and exponential numbers, and integers -----------------------------------------


@operator(_created, operands=("key",))
def uniform(key: int, *, shape: Shape, dtype: Any, device: Any) -> ShardedTensor:
    """Draws numbers that are uniformly distributed in [0, 1)."""


def _uniform32(xp: Any, halves: Any, dtype: np.dtype[Any]) -> Any:
    bits = np.finfo(dtype).nmant + 1  # As many as the dtype has: rounding to it would give 1.
    return _float(xp, halves >> (32 - bits), np.float32) * 2.0**-bits


@operator(_created, operands=("key",))
def normal(key: int, *, shape: Shape, dtype: Any, device: Any) -> ShardedTensor:
    """Draws numbers of the standard normal distribution by the method of Box and Muller."""


def _normal64(xp: Any, words: Any) -> Any:
    if xp is np:
        both = np.empty(len(words))
        normals.box_muller(words[0::2], words[1::2], both[0::2], both[1::2])
        return both
    return _interleaved(xp, *_box_muller(xp, words[0::2], words[1::2]))


def _normal_of(xp: Any, radii: Any, angles: Any) -> Any:
    """Returns one normal number for each pair of words."""
    if xp is np:
        cosines = np.empty(len(radii))
        normals.box_muller(radii, angles, cosines)
        return cosines
    return _box_muller(xp, radii, angles)[0]


def _box_muller(xp: Any, radii: Any, angles: Any) -> tuple[Any, Any]:
    """Returns two independent normal numbers for each pair of words: see `shardtensor.host.normals.box_muller`.

    Both series are computed together, since each call of a function is a kernel on devices.
    """
    radius = xp.sqrt(0.0 - xp.log(_positive(xp, radii)))  # The cosine and the sine below are those times sqrt(2).
    t = _float(xp, (angles << 2) >> 12)
    t += 0.5
    t *= 2.0**-51
    series = _polynomials(t * t, xp.asarray(_SERIES))
    even, odd = series[0], series[1] * t
    cosine, sine = (even - odd) * radius, (even + odd) * radius
    return xp.copysign(cosine, _float(xp, angles)), xp.copysign(sine, _float(xp, angles << 1))


_SERIES = normals.SERIES[:, :, None]


def _polynomials(x: Any, coefficients: Any) -> Any:
    """Returns polynomials of an array, stacked, given the coefficients of all of them from the constant ones on."""
    total = coefficients[-1] * x
    for k in range(coefficients.shape[0] - 2, 0, -1):
        total += coefficients[k]
        total *= x
    total += coefficients[0]
    return total


def _normal32(xp: Any, halves: Any, dtype: np.dtype[Any]) -> Any:
    radius = xp.sqrt(xp.log(_positive32(xp, halves[0::2])) * -2.0)
    angle = _uniform32(xp, halves[1::2], np.dtype(np.float32)) * _TURN
    return _interleaved(xp, radius * xp.cos(angle), radius * xp.sin(angle))


@operator(_created, operands=("key",))
def exponential(key: int, *, shape: Shape, dtype: Any, device: Any) -> ShardedTensor:
    """Draws numbers of the exponential distribution of mean 1 by inversion."""


def _exponential64(xp: Any, words: Any) -> Any:
    return 0.0 - xp.log(_positive(xp, words))


def _exponential32(xp: Any, halves: Any, dtype: np.dtype[Any]) -> Any:
    return 0.0 - xp.log(_positive32(xp, halves))


for _function, *_draws in (
    (uniform, _fraction, _uniform32),
    (normal, _normal64, _normal32),
    (exponential, _exponential64, _exponential32),
):

    @implements(_function, "kernel")
    def _draw(
        xp: Any, context: ShardContext, key: int, *, shape: Shape, dtype: Any, draws: Any = _draws,
        name: str = _function.__name__,
    ) -> Any:  # fmt: skip
        sample = functools.partial(_packed, draws=draws, dtype=context.dtype)
        return fill(xp, context, key, sample, kernel=(name, ()))


@operator(_created, operands=("key", "low", "high"))
def integers(key: int, low: int, high: int, *, shape: Shape, dtype: Any, device: Any) -> ShardedTensor:
    """Draws integers that are uniformly distributed from ``low`` to ``high - 1``."""


@implements(integers, "kernel")
def _integers(xp: Any, context: ShardContext, key: int, low: int, high: int, *, shape: Shape, dtype: Any) -> Any:
    count = high - low
    numbers = [np.uint64(n) for n in (count % 2**64, 2**64 % count, low % 2**64)]
    return fill(xp, context, key, functools.partial(_below, low=low, count=count), kernel=("integers", numbers))


def _below(elements: Elements, *, low: int, count: int) -> Any:
    """Draws ``low`` plus integers below ``count`` by multiplication: the high word of a random word times ``count``.

    Of the products, 2**64 modulo ``count`` are rejected (those with the smallest low words), so that all integers are
    equally likely (Lemire, 2019). They are redrawn from the words of the elements' own blocks.
    """
    words = elements.packed(4, lambda xp, words: words)
    if count == 2**64:
        return words + signed(low % 2**64)
    values, accepted = _scaled(words, count)
    if 2**64 % count:
        values = elements.accepted(lambda xp, words: _scaled(words[0], count), proposed=(values, accepted))
    return values + signed(low % 2**64)


def _scaled(words: Any, count: int) -> tuple[Any, Any]:
    high, low = mulhilo(words, count)
    return high, (low ^ signed(1 << 63)) >= signed(2**64 % count ^ 1 << 63)  # a comparison of unsigned integers


@operator(_created, operands=("key",))
def permutation(key: int, *, n: int, shape: Shape, dtype: Any, device: Any) -> ShardedTensor:
    """Draws the first elements of a permutation of the integers below ``n``: the order of as many random words."""


@operator(_created, operands=("key",), error_name="permutation", tags=("internal",))
def words(key: int, *, shape: Shape, dtype: Any, device: Any) -> ShardedTensor:
    """Draws random words, which are signed integers."""


@implements(words, "kernel")
def _words(xp: Any, context: ShardContext, key: int, *, shape: Shape, dtype: Any) -> Any:
    return fill(xp, context, key, lambda elements: elements.packed(4, lambda xp, words: words), kernel=("words", ()))


@implements(permutation, "composite")
def _permutation_of_many(key: int, n: int, shape: Shape, dtype: Any, device: Any) -> Any:
    if shape != (n,) or n * dtype.itemsize <= GATHERED:
        return NotImplemented
    return call("argsort", words(key, shape=shape, dtype=dtype, device=device))


@implements(permutation, "kernel")
def _permutation(xp: Any, context: ShardContext, key: int, *, n: int, shape: Shape, dtype: Any) -> Any:
    everything = ShardContext.everywhere((n,), (), np.dtype(np.int64))
    words = _words(xp, everything, key, shape=(n,), dtype=everything.dtype)
    order = Order(indices=True).apply(xp, words)
    drawn = xp.reshape(order[: math.prod(shape)], shape)
    if drawn.shape == order.shape == context.local_shape:
        return drawn
    # A copy does not keep the memory of the whole permutation alive.
    return xp.asarray(drawn[tuple([slice(*ends) for ends in context.box])], copy=True)


# -- distributions with parameters -----------------------------------------------------------------


@operator("..., ->...")
def bernoulli(p: ArrayLike, key: int, *, dtype: Any) -> ShardedTensor:
    """Draws bools that are true with probability ``p``."""


@implements(bernoulli, "kernel")
def _bernoulli(xp: Any, context: ShardContext, p: Any, key: int, *, dtype: Any) -> Any:
    def sample(elements: Elements, p: Any) -> Any:
        return elements.packed(4, _fraction) < p

    return fill(xp, context, key, sample, p, kernel=("bernoulli", ()))


@operator("..., ->...")
def categorical(logits: ArrayLike, key: int, *, dtype: Any) -> ShardedTensor:
    """Adds a number of the standard Gumbel distribution to each logit: the index of the greatest is categorical."""


@implements(categorical, "kernel")
def _categorical(xp: Any, context: ShardContext, logits: Any, key: int, *, dtype: Any) -> Any:
    def sample(elements: Elements, logits: Any) -> Any:
        return logits - xp.log(0.0 - xp.log(elements.packed(4, _inside)))

    return fill(xp, context, key, sample, logits)


@operator("..., ->...")
def gamma(a: ArrayLike, key: int, *, dtype: Any) -> ShardedTensor:
    """Draws numbers of the gamma distribution of shape ``a`` and scale 1."""


@implements(gamma, "kernel")
def _gamma(xp: Any, context: ShardContext, a: Any, key: int, *, dtype: Any) -> Any:
    return fill(xp, context, key, lambda elements, a: elements.accepted(_propose_gamma, a), a)


def _propose_gamma(xp: Any, words: Any, a: Any) -> tuple[Any, Any]:
    """The method of Marsaglia and Tsang (2000), with their transformation for shapes below 1."""
    usual = (a > 0) & xp.isfinite(a)
    small = a < 1
    d = xp.where(usual, xp.where(small, a + 1.0, a), 1.0) - 1 / 3
    x = _normal_of(xp, words[0], words[1])
    root = x / xp.sqrt(d * 9.0) + 1.0
    v = xp.where(root > 0, root, 1.0) ** 3
    accepted = (root > 0) & (xp.log(_positive(xp, words[2])) < x * x * 0.5 + d * (1.0 - v + xp.log(v)))
    boost = xp.where(usual & small, _positive(xp, words[3]) ** (1.0 / xp.where(usual & small, a, 1.0)), 1.0)
    # The distribution of shape 0 or infinity is the limit; negative shapes have none.
    return xp.where(usual, d * v * boost, xp.where(a >= 0, a, math.nan)), accepted | ~usual


@operator("..., ->...")
def poisson(lam: ArrayLike, key: int, *, dtype: Any) -> ShardedTensor:
    """Draws integers of the Poisson distribution of mean ``lam``."""


@implements(poisson, "kernel")
def _poisson(xp: Any, context: ShardContext, lam: Any, key: int, *, dtype: Any) -> Any:
    def sample(elements: Elements, lam: Any) -> Any:
        valid = (lam >= 0) & (lam <= _MOST)
        few, many = valid & (lam < _FEW), valid & (lam >= _FEW)
        values = xp.where(valid, 0.0, -1.0)
        if xp.any(few):
            mean = xp.where(few, lam, 0.0)
            counts = _counted(elements, xp.exp(0.0 - mean), lambda k: mean / k)
            values = xp.where(few, counts, values)
        if xp.any(many):
            values = xp.where(many, elements.accepted(_propose_poisson, xp.where(many, lam, _FEW)), values)
        return values

    return fill(xp, context, key, sample, lam)


_FEW = 10.0
"""The mean of integers from which on they are drawn by rejection, whose methods need it."""

_LEAST_LIKELY = 128
"""An integer that a distribution of a mean below `_FEW` has with a probability of less than 2**-64."""

_MOST = 2.0**53
"""The greatest mean and the greatest number of trials: float64 has all integers up to it."""


def _counted(elements: Elements, first: Any, ratio: Any) -> Any:
    """Draws integers by inversion of the cumulative distribution: by searching from 0.

    Args:
        elements: the elements.
        first: the probability of 0.
        ratio: a function of k that returns the probability of k divided by that of k - 1.
    """
    xp, at = elements.xp, elements.packed(4, _fraction)
    total = probability = first
    counts = xp.zeros_like(at)
    for k in range(1, _LEAST_LIKELY):
        probability = probability * ratio(k)
        # The sum of all probabilities is rounded, so that it may stay below the greatest fractions.
        goes_on = (at >= total) & (probability > 2.0**-64)
        if not xp.any(goes_on):
            break
        counts, total = xp.where(goes_on, float(k), counts), total + probability
    return counts


def _proposed(xp: Any, words: Any, a: Any, b: Any, center: Any, limit: Any, scale: Any) -> tuple[Any, Any, Any]:
    """Returns the proposals of Hörmann's transformed rejection (1993), the logarithm of the number that is compared
    with the probability of each, and whether it is accepted without that comparison.
    """
    u, v = _inside(xp, words[0]) - 0.5, _inside(xp, words[1])
    edge = 0.5 - xp.abs(u)
    k = xp.floor((a * 2.0 / edge + b) * u + center)
    return k, xp.log(v * scale / (a / (edge * edge) + b)), (edge >= 0.07) & (v <= limit)


def _propose_poisson(xp: Any, words: Any, lam: Any) -> tuple[Any, Any]:
    """Hörmann's PTRS, with a logarithm of the probability that has no cancellation for great means."""
    b = xp.sqrt(lam) * 2.53 + 0.931
    a = b * 0.02483 - 0.059
    k, level, accepted = _proposed(
        xp, words, a, b, lam + 0.43, 0.9277 - 3.6224 / (b - 2.0), 1.1239 + 1.1328 / (b - 3.4)
    )
    inside = k >= 0
    n = xp.where(inside, k, 0.0)
    above = n + 1.0 - lam
    probability = above - n * xp.log1p(above / lam) - xp.log((n + 1.0) * _TURN) * 0.5 - _stirling(xp, n)
    return n, inside & (accepted | (level <= probability))


def _stirling(xp: Any, k: Any) -> Any:
    """Returns log(k!) - (k + 1/2) log(k + 1) + (k + 1) - log(2 pi) / 2 for integers in float64."""
    inverse = 1.0 / (k + 1.0)
    square = inverse * inverse
    series = (1 / 12 - (1 / 360 - (1 / 1260 - square / 1680) * square) * square) * inverse
    small = k < len(_STIRLING)
    index = _float(xp, xp.where(small, k, 0.0), np.int64)
    return xp.where(small, xp.asarray(_STIRLING, dtype=np.float64)[index], series)


_STIRLING = [
    math.lgamma(k + 1) - (k + 0.5) * math.log(k + 1) + (k + 1) - math.log(_TURN) / 2 for k in range(16)
]  # fmt: skip
"""The results of `_stirling` for small integers, where its series is not accurate."""


@operator("..., ..., ->...")
def binomial(n: ArrayLike, p: ArrayLike, key: int, *, dtype: Any) -> ShardedTensor:
    """Draws the number of successes of ``n`` trials that succeed with probability ``p``."""


@implements(binomial, "kernel")
def _binomial(xp: Any, context: ShardContext, n: Any, p: Any, key: int, *, dtype: Any) -> Any:
    def sample(elements: Elements, n: Any, p: Any) -> Any:
        valid = (n >= 0) & (n <= _MOST) & (p >= 0) & (p <= 1)
        trials, likely = xp.where(valid, n, 0.0), valid & (p > 0.5)
        rare = xp.where(valid, xp.where(likely, 1.0 - p, p), 0.0)
        many = trials * rare >= _FEW
        values = xp.zeros_like(trials)
        if not xp.all(many):
            some, odds = xp.where(many, 0.0, trials), rare / (1.0 - rare)
            values = _counted(elements, xp.exp(some * xp.log1p(0.0 - rare)), lambda k: (some - (k - 1)) / k * odds)
        if xp.any(many):
            arguments = xp.where(many, trials, 4 * _FEW), xp.where(many, rare, 0.5)
            values = xp.where(many, elements.accepted(_propose_binomial, *arguments), values)
        return xp.where(valid, xp.where(likely, trials - values, values), -1.0)

    return fill(xp, context, key, sample, n, p)


def _propose_binomial(xp: Any, words: Any, n: Any, p: Any) -> tuple[Any, Any]:
    """Hörmann's BTRS, with a logarithm of the probability that has no cancellation for great means."""
    deviation = xp.sqrt(n * p * (1.0 - p))
    b = deviation * 2.53 + 1.15
    a = b * 0.0248 - 0.0873 + p * 0.01
    scale = (5.1 / b + 2.83) * deviation
    k, level, accepted = _proposed(xp, words, a, b, n * p + 0.5, 0.92 - 4.2 / b, scale)
    inside = (k >= 0) & (k <= n)
    mode = xp.floor((n + 1.0) * p)
    k = xp.where(inside, k, mode)

    def odds(j: Any) -> Any:
        return (j + 0.5) * xp.log1p((p * (n + 2.0) - (j + 1.0)) / ((1.0 - p) * (j + 1.0)))

    def rest(j: Any) -> Any:
        return _stirling(xp, j) + _stirling(xp, n - j)

    probability = (n + 1.0) * xp.log1p((k - mode) / (n - k + 1.0)) + odds(k) - odds(mode) + rest(mode) - rest(k)
    return k, inside & (accepted | (level <= probability))


@operator("..., ..., ->...")
def truncated_normal(lower: ArrayLike, upper: ArrayLike, key: int, *, dtype: Any) -> ShardedTensor:
    """Draws numbers of the standard normal distribution, given that they are from ``lower`` to ``upper``."""


@implements(truncated_normal, "kernel")
def _truncated_normal(xp: Any, context: ShardContext, lower: Any, upper: Any, key: int, *, dtype: Any) -> Any:
    return fill(xp, context, key, lambda elements, *ends: elements.accepted(_propose_truncated, *ends), lower, upper)


def _propose_truncated(xp: Any, words: Any, lower: Any, upper: Any) -> tuple[Any, Any]:
    """Robert's methods (1995), which are accurate at any distance from 0. At least every third proposal is accepted.

    An interval on one side of 0 gets uniform proposals if it is short, and exponential ones otherwise; any other gets
    uniform proposals if it is short, and normal ones otherwise.
    """
    valid, mirrored = lower < upper, upper <= 0
    a = xp.where(valid, xp.where(mirrored, 0.0 - upper, lower), 0.0)
    b = xp.where(valid, xp.where(mirrored, 0.0 - lower, upper), 1.0)
    beside, rate = a >= 0, (a + xp.hypot(a, xp.full_like(a, 2.0))) * 0.5
    short = xp.where(beside, (b - a) * rate < 1.5, b - a < 2.5)
    fraction = _fraction(xp, words[3])
    even = a + xp.where(short, b - a, 1.0) * fraction
    falling = a - xp.log1p(fraction * xp.expm1((a - b) * rate)) / rate
    normal = _normal_of(xp, words[0], words[1])
    x = xp.where(short, even, xp.where(beside, falling, normal))
    low = xp.where(beside, a, 0.0)
    level = xp.where(short, (low - x) * (low + x), xp.where(beside, 0.0 - (x - rate) ** 2, 0.0)) * 0.5
    accepted = (xp.log(_positive(xp, words[2])) <= level) & (short | beside | ((x >= a) & (x <= b)))
    x = xp.minimum(xp.maximum(x, a), b)  # The proposals are rounded.
    return xp.where(valid, xp.where(mirrored, 0.0 - x, x), math.nan), accepted | ~valid
