"""The operators that draw integers of the Poisson and the binomial distribution.

Integers of a mean below 10 are found by inversion of the cumulative distribution, others by transformed rejection.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from shardtensor.core import implements, operator
from shardtensor.functions.random.numbers_of_words import TURN, as_float, fraction, inside_unit
from shardtensor.functions.random.random_elements import Elements, fill
from shardtensor.sharding.shard_context import ShardContext
from shardtensor.tensor.tensor import ArrayLike, ShardedTensor

_DERIVATIVES = "of_mathematical"


@operator("..., ->...")
def poisson(lam: ArrayLike, key: int, *, dtype: Any) -> ShardedTensor:
    """Draws integers of the Poisson distribution of mean ``lam``."""


@implements(poisson, "kernel")
def _poisson(xp: Any, context: ShardContext, lam: Any, key: int, *, dtype: Any) -> Any:
    totals = None if hasattr(lam, "shape") or lam >= _FEW else _poisson_totals(lam)

    def sample(elements: Elements, lam: Any) -> Any:
        if totals is not None:
            return _found(elements, totals)
        valid = (lam >= 0) & (lam <= _MOST)
        many = valid & (lam >= _FEW)

        def counted() -> Any:
            return _counted(elements, *_poisson_terms(xp, xp.where(valid & ~many, lam, 0.0)))

        def proposed() -> Any:
            return elements.accepted(
                functools.partial(_transformed_rejection, _ptrs),
                xp.where(many, lam, _FEW),
                quickly=functools.partial(_transformed_quickly, _ptrs),
            )

        return xp.where(valid, _by_either(xp, many, counted, proposed), -1.0)

    return fill(xp, context, key, sample, lam)


def _poisson_terms(xp: Any, mean: Any) -> _Terms:
    return _Terms(xp.exp(0.0 - mean), lambda k: mean / k)


@functools.lru_cache(256)
def _poisson_totals(lam: float) -> Any:
    return _totals(_poisson_terms(np, np.array([lam])))


def _by_either(xp: Any, many: Any, counted: Callable[[], Any], proposed: Callable[[], Any]) -> Any:
    """Returns the integers that one of two methods draws: the second one where ``many`` is true."""
    if not xp.any(many):
        return counted()
    return proposed() if xp.all(many) else xp.where(many, proposed(), counted())


_FEW = 10.0
"""The mean of integers from which on they are drawn by rejection, whose methods need it."""

_LEAST_LIKELY = 128
"""An integer that a distribution of a mean below `_FEW` has with a probability of less than 2**-64."""

_MOST = 2.0**53
"""The greatest mean and the greatest number of trials: float64 has all integers up to it."""


class _Terms(NamedTuple):
    """The probabilities of integers from 0 on.

    Attributes:
        first: the probability of 0.
        ratio: a function of k that returns the probability of k divided by that of k - 1.
    """

    first: Any
    ratio: Callable[[int], Any]


def _counted(elements: Elements, first: Any, ratio: Callable[[int], Any]) -> Any:
    """Draws integers by inversion of the cumulative distribution: by searching from 0."""
    xp, fractions = elements.xp, elements.packed(4, fraction)
    total = probability = first
    counts = xp.zeros_like(fractions)
    for k in range(1, _LEAST_LIKELY):
        probability = probability * ratio(k)
        # The sum of all probabilities is rounded, so that it may stay below the greatest fractions.
        goes_on = (fractions >= total) & (probability > 2.0**-64)
        if not xp.any(goes_on):
            break
        counts, total = xp.where(goes_on, float(k), counts), total + probability
    return counts


def _totals(terms: _Terms) -> Any:
    """Returns for each integer but the greatest the probability that an integer is at most as great, for `_found`."""
    total = probability = terms.first
    totals = []
    for k in range(1, _LEAST_LIKELY):
        probability = probability * terms.ratio(k)
        if probability[0] <= 2.0**-64:
            break
        totals.append(total)
        total = total + probability
    return np.concatenate([np.empty(0), *totals])


def _found(elements: Elements, totals: Any) -> Any:
    """Draws the integers of `_counted` for one distribution, whose probabilities are added once."""
    xp, fractions = elements.xp, elements.packed(4, fraction)
    return xp.searchsorted(totals if xp is np else xp.asarray(totals), fractions, side="right")


class _Hat(NamedTuple):
    """The numbers of Hörmann's transformed rejection (1993), and a function.

    Attributes:
        a, b, center: the numbers of the transformation.
        limit: up to which numbers proposals in the middle are accepted at once.
        scale: the number by which the others are scaled.
        chance: ``chance(k)`` returns the logarithms of the probabilities of integers; -inf for impossible ones.
    """

    a: Any
    b: Any
    center: Any
    limit: Any
    scale: Any
    chance: Callable[[Any], Any]


def _transformed_quickly(
    hat_of: Callable[..., _Hat], xp: Any, first: Any, second: Any, *parameters: Any
) -> tuple[Any, Any]:
    hat = hat_of(xp, *parameters)
    k, edge = _under(xp, first, hat)
    return k, (edge >= 0.07) & (inside_unit(xp, second) <= hat.limit)


def _transformed_rejection(
    hat_of: Callable[..., _Hat], xp: Any, first: Any, second: Any, *parameters: Any
) -> tuple[Any, Any]:
    hat = hat_of(xp, *parameters)
    k, edge = _under(xp, first, hat)
    even = inside_unit(xp, second)
    level = xp.log(even * hat.scale / (hat.a / (edge * edge) + hat.b))
    return k, ((edge >= 0.07) & (even <= hat.limit)) | (level <= hat.chance(k))


def _under(xp: Any, words: Any, hat: _Hat) -> tuple[Any, Any]:
    """Returns proposals, and the distance of each from the ends of the transformation."""
    u = inside_unit(xp, words)
    u -= 0.5
    edge = 0.5 - xp.abs(u)
    k = hat.a * 2.0 / edge
    k += hat.b
    k *= u
    k += hat.center
    return xp.floor(k), edge


def _ptrs(xp: Any, lam: Any) -> _Hat:
    """Hörmann's PTRS for the Poisson distribution, with a logarithm of the probability that has no cancellation for
    great means.
    """
    b = xp.sqrt(lam) * 2.53 + 0.931
    a = b * 0.02483 - 0.059

    def chance(k: Any) -> Any:
        inside = k >= 0
        n = xp.where(inside, k, 0.0)
        above = n + 1.0 - lam
        logarithm = above - n * xp.log1p(above / lam) - xp.log((n + 1.0) * TURN) * 0.5 - _stirling(xp, n)
        return xp.where(inside, logarithm, -math.inf)

    return _Hat(a, b, lam + 0.43, 0.9277 - 3.6224 / (b - 2.0), 1.1239 + 1.1328 / (b - 3.4), chance)


def _stirling(xp: Any, k: Any) -> Any:
    """Returns log(k!) - (k + 1/2) log(k + 1) + (k + 1) - log(2 pi) / 2 for integers in float64."""
    inverse = 1.0 / (k + 1.0)
    square = inverse * inverse
    series = (1 / 12 - (1 / 360 - (1 / 1260 - square / 1680) * square) * square) * inverse
    small = k < len(_STIRLING)
    index = as_float(xp, xp.where(small, k, 0.0), np.int64)
    return xp.where(small, xp.asarray(_STIRLING, dtype=np.float64)[index], series)


_STIRLING = [
    math.lgamma(k + 1) - (k + 0.5) * math.log(k + 1) + (k + 1) - math.log(TURN) / 2 for k in range(16)
]  # fmt: skip
"""The results of `_stirling` for small integers, where its series is not accurate."""


@operator("..., ..., ->...")
def binomial(n: ArrayLike, p: ArrayLike, key: int, *, dtype: Any) -> ShardedTensor:
    """Draws the number of successes of ``n`` trials that succeed with probability ``p``."""


@implements(binomial, "kernel")
def _binomial(xp: Any, context: ShardContext, n: Any, p: Any, key: int, *, dtype: Any) -> Any:
    totals = None
    if not hasattr(n, "shape") and not hasattr(p, "shape") and n * min(p, 1.0 - p) < _FEW:
        totals = _binomial_totals(n, min(p, 1.0 - p))

    def sample(elements: Elements, n: Any, p: Any) -> Any:
        valid = (n >= 0) & (n <= _MOST) & (p >= 0) & (p <= 1)
        trials, likely = xp.where(valid, n, 0.0), valid & (p > 0.5)
        rare = xp.where(valid, xp.where(likely, 1.0 - p, p), 0.0)
        many = trials * rare >= _FEW

        def counted() -> Any:
            return _counted(elements, *_binomial_terms(xp, xp.where(many, 0.0, trials), rare))

        def proposed() -> Any:
            return elements.accepted(
                functools.partial(_transformed_rejection, _btrs),
                xp.where(many, trials, 4 * _FEW),
                xp.where(many, rare, 0.5),
                quickly=functools.partial(_transformed_quickly, _btrs),
            )

        values = _by_either(xp, many, counted, proposed) if totals is None else _found(elements, totals)
        return xp.where(valid, xp.where(likely, trials - values, values), -1.0)

    return fill(xp, context, key, sample, n, p)


def _binomial_terms(xp: Any, trials: Any, rare: Any) -> _Terms:
    odds = rare / (1.0 - rare)
    return _Terms(xp.exp(trials * xp.log1p(0.0 - rare)), lambda k: (trials - (k - 1)) / k * odds)


@functools.lru_cache(256)
def _binomial_totals(n: float, rare: float) -> Any:
    return _totals(_binomial_terms(np, np.array([n]), np.array([rare])))


def _btrs(xp: Any, n: Any, p: Any) -> _Hat:
    """Hörmann's BTRS for the binomial distribution, with a logarithm of the probability that has no cancellation for
    great means.
    """
    deviation = xp.sqrt(n * p * (1.0 - p))
    b = deviation * 2.53 + 1.15
    a = b * 0.0248 - 0.0873 + p * 0.01
    mode = xp.floor((n + 1.0) * p)

    def chance(k: Any) -> Any:
        inside = (k >= 0) & (k <= n)
        k = xp.where(inside, k, mode)

        def odds(j: Any) -> Any:
            return (j + 0.5) * xp.log1p((p * (n + 2.0) - (j + 1.0)) / ((1.0 - p) * (j + 1.0)))

        def rest(j: Any) -> Any:
            return _stirling(xp, j) + _stirling(xp, n - j)

        between = (n + 1.0) * xp.log1p((k - mode) / (n - k + 1.0))
        return xp.where(inside, between + odds(k) - odds(mode) + rest(mode) - rest(k), -math.inf)

    return _Hat(a, b, n * p + 0.5, 0.92 - 4.2 / b, (5.1 / b + 2.83) * deviation, chance)
