"""The operators that draw random numbers, but those of `discrete_distributions`.

The functions of `shardtensor.functions.random.samplers`, which users call, check arguments and call these operators.
``key`` is a key of `shardtensor.host.philox`: an operand, so that plans do not depend on it. Numbers are computed in
float64, except that uniform, normal and exponential numbers of float32 and float16 are made of 32 bits each, in
float32.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np

from shardtensor.backend.registry import shared_memory
from shardtensor.core import OPS, call, implements, operator
from shardtensor.functions.algorithms.first_device import GATHERED
from shardtensor.functions.algorithms.sample_sort import Order
from shardtensor.functions.random.numbers_of_words import (
    as_float,
    below32,
    below64,
    exponential32,
    exponential64,
    fraction,
    halves_of,
    inside_unit,
    normal32,
    normal64,
    positive,
    propose_normal,
    quick_normal,
    uniform32,
    upper_bits,
)
from shardtensor.functions.random.random_elements import Elements, fill
from shardtensor.host.host_sorting import random_order
from shardtensor.host.philox import SECOND, THIRD, scrambled_second, signed
from shardtensor.sharding.layout import Shape, as_sharding
from shardtensor.sharding.mesh import default_mesh
from shardtensor.sharding.shard_context import ShardContext
from shardtensor.tensor.operands import sharded_dtype
from shardtensor.tensor.tensor import ArrayLike, ShardedTensor

_DERIVATIVES = "of_mathematical"


def _created(kinds: Any, *, shape: Any, dtype: Any, n: int = 0, distribution: str = "") -> tuple[Shape, Any]:
    return shape, sharded_dtype(dtype)


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
    return elements.packed(8, lambda xp, words: narrow(xp, halves_of(xp, words), dtype))


# -- uniform, normal and exponential numbers, and integers -----------------------------------------


@operator(_created, operands=("key",))
def uniform(key: int, *, shape: Shape, dtype: Any, device: Any) -> ShardedTensor:
    """Draws numbers that are uniformly distributed in [0, 1)."""


@operator(_created, operands=("key",))
def normal(key: int, *, shape: Shape, dtype: Any, device: Any) -> ShardedTensor:
    """Draws numbers of the standard normal distribution: by the ziggurat, or by Box and Muller's method of 32 bits."""


@operator(_created, operands=("key",))
def exponential(key: int, *, shape: Shape, dtype: Any, device: Any) -> ShardedTensor:
    """Draws numbers of the exponential distribution of mean 1 by inversion."""


for _function, *_draws in (
    (uniform, fraction, uniform32),
    (normal, normal64, normal32),
    (exponential, exponential64, exponential32),
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
    name, bits = ("integers", 64) if count > 1 << 32 else ("integers of 32 bits", 32)
    numbers = [np.uint64(n) for n in (count % 2**64, 2**bits % count, low % 2**64)]
    return fill(xp, context, key, functools.partial(_below, low=low, count=count), kernel=(name, numbers))


def _below(elements: Elements, *, low: int, count: int) -> Any:
    """Draws ``low`` plus integers below ``count`` by multiplication: the upper half of a random word times ``count``,
    or of 32 random bits where these are enough.

    Of the products, 2**64 or 2**32 modulo ``count`` are rejected (those with the smallest lower halves), so that all
    integers are equally likely (Lemire, 2019).
    """
    if count == 2**64:
        values = elements.packed(4, lambda xp, words: words)
    elif count > 1 << 32:
        values = elements.packed(4, lambda xp, words: below64(xp, words, count))
    else:
        values = elements.packed(8, lambda xp, words: below32(xp, words, count))
    return values + signed(low % 2**64) if low else values


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
    devices = as_sharding(default_mesh() if device is None else device, 1, "permutation").mesh.flat
    if shared_memory(tuple(devices)) is not None:  # They sort the words together, which takes linear time on hosts.
        return NotImplemented
    return call("argsort", words(key, shape=shape, dtype=dtype, device=device))


@implements(permutation, "kernel")
def _permutation(xp: Any, context: ShardContext, key: int, *, n: int, shape: Shape, dtype: Any) -> Any:
    everything = ShardContext.everywhere((n,), (), np.dtype(np.int64))
    words = _words(xp, everything, key, shape=(n,), dtype=everything.dtype)
    count = math.prod(shape)
    order = random_order(words, count) if xp is np else Order(indices=True).apply(xp, words)
    drawn = xp.reshape(order[:count], shape)
    if drawn.shape == order.shape == context.local_shape:
        return drawn
    # A copy does not keep the memory of the whole permutation alive.
    return xp.asarray(drawn[tuple([slice(*ends) for ends in context.box])], copy=True)


# -- distributions with parameters -----------------------------------------------------------------


@operator(_created, operands=("key", "first", "second"), error_name="random", tags=("internal",))
def drawn(
    key: int, first: float, second: float, *, distribution: str, shape: Shape, dtype: Any, device: Any
) -> ShardedTensor:
    """Draws numbers by another operator of this module, whose parameters are numbers and not arrays.

    >>> from shardtensor.functions.random.distributions import drawn
    >>> drawn(7, 0.0, 0.0, distribution="poisson", shape=(2,), dtype=np.int64, device=None).tolist()
    [0, 0]
    """


@implements(drawn, "kernel")
def _drawn(
    xp: Any, context: ShardContext, key: int, first: float, second: float, *, distribution: str, shape: Shape,
    dtype: Any,
) -> Any:  # fmt: skip
    op = OPS[distribution]
    kernel: Any = op.parts.kernel
    return kernel(xp, context, *(first, second)[: op.operands.index("key")], key, dtype=dtype)


@operator("..., ->...")
def bernoulli(p: ArrayLike, key: int, *, dtype: Any) -> ShardedTensor:
    """Draws bools that are true with probability ``p``."""


@implements(bernoulli, "kernel")
def _bernoulli(xp: Any, context: ShardContext, p: Any, key: int, *, dtype: Any) -> Any:
    def sample(elements: Elements, p: Any) -> Any:
        bits, limit = elements.packed(4, lambda xp, words: upper_bits(xp, words, 11)), p * 2.0**53
        if p.shape[0] > 1:
            return as_float(xp, bits) < limit
        # Bits are not converted where there is one probability.
        return bits < as_float(xp, xp.ceil(xp.minimum(limit, xp.full_like(limit, 2.0**53))), np.int64)

    return fill(xp, context, key, sample, p, kernel=("bernoulli", ()))


@operator("..., ->...")
def categorical(logits: ArrayLike, key: int, *, dtype: Any) -> ShardedTensor:
    """Adds a number of the standard Gumbel distribution to each logit: the index of the greatest is categorical."""


@implements(categorical, "kernel")
def _categorical(xp: Any, context: ShardContext, logits: Any, key: int, *, dtype: Any) -> Any:
    def sample(elements: Elements, logits: Any) -> Any:
        return logits - xp.log(0.0 - xp.log(elements.packed(4, inside_unit)))

    return fill(xp, context, key, sample, logits)


@operator("..., ->...")
def gamma(a: ArrayLike, key: int, *, dtype: Any) -> ShardedTensor:
    """Draws numbers of the gamma distribution of shape ``a`` and scale 1."""


@implements(gamma, "kernel")
def _gamma(xp: Any, context: ShardContext, a: Any, key: int, *, dtype: Any) -> Any:
    return fill(xp, context, key, lambda elements, a: elements.accepted(_propose_gamma, a, quickly=_quick_gamma), a)


def _quick_gamma(xp: Any, a: Any, b: Any, shape: Any) -> tuple[Any, Any]:
    x, inside = quick_normal(xp, a)
    values, _, root, usual = _transformed(xp, a, b, shape, x)
    square = x * x
    square *= square
    accepted = inside & (root > 0) & (fraction(xp, b) < 1.0 - square * 0.0331)
    return values, accepted | ~usual


def _propose_gamma(xp: Any, a: Any, b: Any, shape: Any) -> tuple[Any, Any]:
    x, accepted = propose_normal(xp, a, scrambled_second(xp, a, b, SECOND))
    values, d, root, usual = _transformed(xp, a, b, shape, x)
    v = xp.where(root > 0, root, 1.0) ** 3
    accepted &= (root > 0) & (xp.log(positive(xp, b)) < x * x * 0.5 + d * (1.0 - v + xp.log(v)))
    return values, accepted | ~usual


def _transformed(xp: Any, a: Any, b: Any, shape: Any, x: Any) -> tuple[Any, Any, Any, Any]:
    """Returns the proposals of Marsaglia and Tsang (2000) that are made of normal numbers, with their transformation
    for shapes below 1.

    Returns:
        The proposals, two numbers of their method, and whether the distribution is a usual one.
    """
    usual = (shape > 0) & xp.isfinite(shape)
    small = usual & (shape < 1)
    d = xp.where(usual, xp.where(small, shape + 1.0, shape), 1.0) - 1 / 3
    root = x * (1.0 / xp.sqrt(d * 9.0))
    root += 1.0
    values = root * root
    values *= root
    values *= d
    if xp.any(small):
        even = positive(xp, scrambled_second(xp, a, b, THIRD))
        values *= xp.where(small, even ** (1.0 / xp.where(small, shape, 1.0)), 1.0)
    if not xp.all(usual):  # The distribution of shape 0 or infinity is the limit; negative shapes have none.
        values = xp.where(usual, values, xp.where(shape >= 0, shape, math.nan))
    return values, d, root, usual


@operator("..., ..., ->...")
def truncated_normal(lower: ArrayLike, upper: ArrayLike, key: int, *, dtype: Any) -> ShardedTensor:
    """Draws numbers of the standard normal distribution, given that they are from ``lower`` to ``upper``."""


@implements(truncated_normal, "kernel")
def _truncated_normal(xp: Any, context: ShardContext, lower: Any, upper: Any, key: int, *, dtype: Any) -> Any:
    return fill(xp, context, key, lambda elements, *ends: elements.accepted(_propose_truncated, *ends), lower, upper)


def _propose_truncated(xp: Any, first: Any, second: Any, lower: Any, upper: Any) -> tuple[Any, Any]:
    """Robert's methods (1995), which are accurate at any distance from 0. At least every third proposal is accepted.

    An interval on one side of 0 gets uniform proposals if it is short, and exponential ones otherwise; any other gets
    uniform proposals if it is short, and normal ones otherwise.
    """
    valid, mirrored = lower < upper, upper <= 0
    a = xp.where(valid, xp.where(mirrored, 0.0 - upper, lower), 0.0)
    b = xp.where(valid, xp.where(mirrored, 0.0 - lower, upper), 1.0)
    beside, rate = a >= 0, (a + xp.hypot(a, xp.full_like(a, 2.0))) * 0.5
    short = xp.where(beside, (b - a) * rate < 1.5, b - a < 2.5)
    share = fraction(xp, first)
    even = a + xp.where(short, b - a, 1.0) * share
    falling = a - xp.log1p(share * xp.expm1((a - b) * rate)) / rate
    normal, proper = propose_normal(xp, first, scrambled_second(xp, first, second, SECOND))
    x = xp.where(short, even, xp.where(beside, falling, normal))
    low = xp.where(beside, a, 0.0)
    level = xp.where(short, (low - x) * (low + x), xp.where(beside, 0.0 - (x - rate) ** 2, 0.0)) * 0.5
    accepted = (xp.log(positive(xp, second)) <= level) & (short | beside | (proper & (x >= a) & (x <= b)))
    x = xp.minimum(xp.maximum(x, a), b)  # The proposals are rounded.
    return xp.where(valid, xp.where(mirrored, 0.0 - x, x), math.nan), accepted | ~valid
