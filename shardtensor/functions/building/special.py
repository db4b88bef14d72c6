"""Elementwise functions that only derivatives call: those of `i0` and of random numbers by their parameters."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from shardtensor.core import implements, operator
from shardtensor.sharding.shard_context import ShardContext
from shardtensor.tensor.tensor import ArrayLike, ShardedTensor

_DERIVATIVES = "of_mathematical"

_DOUBLE = np.dtype("float64")


def _sum_of(coefficients: Sequence[float], t: Any) -> Any:
    """Returns a sum of Chebyshev polynomials at numbers from -1 to 1, by Clenshaw's recurrence."""
    after = now = t * 0.0
    for c in reversed(coefficients[1:]):
        after, now = now, t * 2.0 * now - after + c
    return t * now - after + coefficients[0]


def _in_double(name: str, compute: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the kernel that computes in float64."""

    def kernel(xp: Any, context: ShardContext | None, x: Any, *more: Any) -> Any:
        result = compute(xp, *[xp.asarray(a, dtype=_DOUBLE) for a in (x, *more)])
        return xp.asarray(result, dtype=x.dtype if context is None else context.dtype)

    return kernel


# -- the Bessel function ---------------------------------------------------------------------------

_FAR = (
    0.38928811750914005, -0.009761097491361469, -0.00011058893876262371, -3.882564808877691e-06,
    -2.512236237870209e-07, -2.6314688468895196e-08, -3.835380385964237e-09, -5.589743462196584e-10,
    -1.8974958123505413e-11, 3.2526035830154884e-11, 1.4125807436613782e-11, 2.0356285441470896e-12,
    -7.198551776245908e-13, -4.0835511110921974e-13, -2.1015418427726643e-14, 4.272440016711951e-14,
    1.0420276984128802e-14, -3.8144030724370075e-15, -1.8803547755107825e-15, 3.3082023109209285e-16,
    2.96262899764595e-16, -3.209525921993424e-17, -4.6503053684893586e-17,
)  # fmt: skip
"""The coefficients of ``sqrt(x) exp(-x) I1(x)`` from 8 on, as a function of ``16 / x - 1``."""


@operator("... -> ...", dtype=lambda x: x, error_name="i0", tags=("internal",))
def bessel_i1(x: ArrayLike, /) -> ShardedTensor:
    """Modified Bessel function of the first kind and order 1, the derivative of `i0`.

    >>> from shardtensor.functions.building.special import bessel_i1
    >>> round(bessel_i1(st.asarray([1.0]))[0].item(), 12)
    0.565159103992
    """


def _i1(xp: Any, x: Any) -> Any:
    size = xp.abs(x)
    near, far = xp.where(size < 8, x, 0.0), xp.where(size < 8, 8.0, size)
    square, total = near * near * 0.25, 0.0
    for k in range(30, 0, -1):  # The terms are positive, so that none cancel.
        total = (total + 1.0) * square / (k * (k + 1.0))
    far_value = xp.exp(far) / xp.sqrt(far) * _sum_of(_FAR, 16.0 / far - 1.0)
    return xp.where(size < 8, near * 0.5 * (total + 1.0), xp.where(x < 0, 0.0 - far_value, far_value))


implements(bessel_i1, "kernel")(_in_double("bessel_i1", _i1))

# -- the normal distribution -----------------------------------------------------------------------

_TAIL = (
    1.1670525350882472, -0.1610195767134654, -0.028002821825452974, 0.03167452189239266, -0.012103231162345369,
    0.0027056129762167095, -0.00029931636202703166, -1.716686526879361e-05, 1.0178489264109868e-05,
    -4.894829570004192e-07, -2.844006500151048e-07, 3.0766283713811506e-08, 9.180378674469537e-09,
    -1.2756102213808737e-09, -3.660279376104134e-10, 4.5926359348595205e-11, 1.7189314687646526e-11,
    -1.2726833698700693e-12, -8.668081913316188e-13, 1.1061557204136741e-15, 4.2750210770103334e-14,
    3.790937692263904e-15, -1.8474103010592332e-15, -4.0419094130708177e-16, 5.340854385017358e-17,
    2.941479937590055e-17, 9.076691823620142e-19,
)  # fmt: skip
"""The coefficients of Mills' ratio times ``x + 1``, as a function of ``(x - 4) / (x + 4)``."""


@operator("... -> ...", dtype=lambda x: x, error_name="truncated_normal", tags=("internal",))
def mills_ratio(x: ArrayLike, /) -> ShardedTensor:
    """The probability that a standard normal number is greater than x, divided by the density at x, which is not
    negative.

    >>> from shardtensor.functions.building.special import mills_ratio
    >>> round(mills_ratio(st.asarray([0.0]))[0].item(), 12)
    1.253314137316
    """


def _mills(xp: Any, x: Any) -> Any:
    finite = xp.where(xp.isinf(x), 0.0, x)
    return xp.where(xp.isinf(x), 0.0, _sum_of(_TAIL, (finite - 4.0) / (finite + 4.0)) / (finite + 1.0))


implements(mills_ratio, "kernel")(_in_double("mills_ratio", _mills))

# -- the gamma distribution ------------------------------------------------------------------------


@operator("..., ... -> ...", dtype=lambda a, x: x, error_name="gamma", tags=("internal",))
def gamma_slope(a: ArrayLike, x: ArrayLike, /) -> ShardedTensor:
    """The derivative of a number x of the gamma distribution by its shape parameter a, at the same probability.

    It is ``-(dP / da) / (dP / dx)`` of the distribution function P, of which the derivatives are those of its series
    and of its continued fraction (Moore, 1982), and for great a those of its normal approximation.

    >>> from shardtensor.functions.building.special import gamma_slope
    >>> round(gamma_slope(st.asarray([1.0]), st.asarray([2.0]))[0].item(), 12)
    1.63169146235
    """


_GREAT = 1e4
"""The shape parameter from which on the approximation has an error below 1e-9."""

_LAST_TERM = 2000
"""More terms than a series or a fraction needs for shape parameters below `_GREAT`."""


def _slope(xp: Any, a: Any, x: Any) -> Any:
    usual = (a > 0) & (a < _GREAT) & (x > 0)
    in_series = (x <= 1) | (x <= a)
    slope = xp.where(xp.isnan(a), math.nan, 0.0 * a)
    for chosen, method in ((usual & in_series, _of_series), (usual & ~in_series, _of_fraction)):
        if xp.any(chosen):
            arguments = [xp.where(chosen, v, 1.0) for v in (a, x)]
            slope = xp.where(chosen, method(xp, *arguments), slope)
    great = (a >= _GREAT) & xp.isfinite(a)
    return xp.where(great, _of_great(xp, xp.where(great, a, _GREAT), x), slope)


def _of_series(xp: Any, a: Any, x: Any) -> Any:
    """Of ``P = x**a exp(-x) / gamma(a + 1) * sum(x**n / ((a + 1) ... (a + n)))``."""
    term, total = xp.ones_like(a), xp.ones_like(a)
    d_term = d_total = xp.zeros_like(a)
    for n in range(1, _LAST_TERM):
        factor = x / (a + n)
        d_term = (d_term - term / (a + n)) * factor
        term = term * factor
        total, d_total = total + term, d_total + d_term
        if not n % 8 and not xp.any(xp.abs(d_term) > 1e-17 * xp.abs(d_total)):
            break
    return 0.0 - (d_total + total * (xp.log(x) - _digamma_after(xp, a))) * x / a


def _of_fraction(xp: Any, a: Any, x: Any) -> Any:
    """Of ``1 - P = x**a exp(-x) / gamma(a) * (p / q)``, by the convergents of Legendre's continued fraction."""
    zero = xp.zeros_like(a)
    y, z = 1.0 - a, x - a + 2.0
    p, q, dp, dq = [(xp.ones_like(a), x + 1.0), (x, z * x), (zero, zero), (zero, 0.0 - x)]
    ratio = p[1] / q[1]
    d_ratio = (dp[1] - ratio * dq[1]) / q[1]
    for n in range(1, _LAST_TERM):
        y, z = y + 1.0, z + 2.0
        yn = y * n
        dp = dp[1], dp[1] * z - p[1] - dp[0] * yn + p[0] * n
        dq = dq[1], dq[1] * z - q[1] - dq[0] * yn + q[0] * n
        p, q = (p[1], p[1] * z - p[0] * yn), (q[1], q[1] * z - q[0] * yn)
        scale = 1.0 / xp.maximum(xp.abs(q[1]), xp.ones_like(a))
        p, q, dp, dq = [(first * scale, second * scale) for first, second in (p, q, dp, dq)]
        before, ratio = d_ratio, p[1] / q[1]
        d_ratio = (dp[1] - ratio * dq[1]) / q[1]
        if not n % 8 and not xp.any(xp.abs(d_ratio - before) > 1e-16 * xp.abs(d_ratio)):
            break
    return (d_ratio + ratio * (xp.log(x) - _digamma_after(xp, a) + 1.0 / a)) * x


def _of_great(xp: Any, a: Any, x: Any) -> Any:
    """Of the expansion by Cornish and Fisher in a normal number, which x determines."""
    root = xp.sqrt(a)
    d = (x - a) / root
    return 1.0 + d / (2.0 * root) - (d * d - 1.0) / (6.0 * a) + (d * d + 1.0) * d / (12.0 * a * root)


def _digamma_after(xp: Any, a: Any) -> Any:
    """Returns the derivative of the logarithm of the gamma function at ``a + 1``."""
    below = 0.0
    for k in range(1, 9):
        below = below + 1.0 / (a + k)
    x = a + 9.0
    square = 1.0 / (x * x)
    series = (
        1 / 12
        - (1 / 120 - (1 / 252 - (1 / 240 - (1 / 132 - square * (691 / 32760)) * square) * square) * square) * square
    ) * square
    return xp.log(x) - 0.5 / x - series - below


implements(gamma_slope, "kernel")(_in_double("gamma_slope", _slope))
