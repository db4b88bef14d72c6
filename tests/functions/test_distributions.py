"""The distributions of random numbers: chi-square and Kolmogorov-Smirnov tests, and moments.

The keys are fixed, so that the tests do not fail by chance. Their limits are exceeded with a probability of about 1e-4.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import shardtensor as st

COUNT = 100_000
KEYS = st.random.split(st.random.key(20261122), 100)


def drawn(number: int, draw: Callable[..., Any], *args: Any, **kwargs: Any) -> np.ndarray:
    return np.asarray(draw(KEYS[number], *args, **kwargs))


def follows(x: np.ndarray, cumulative: Callable[[np.ndarray], Any]) -> None:
    """The test of Kolmogorov and Smirnov, of a continuous distribution."""
    n, x = x.size, np.sort(x.ravel().astype(float))
    expected, steps = np.asarray(cumulative(x)), np.arange(n + 1) / n
    distance = max((steps[1:] - expected).max(), (expected - steps[:-1]).max())
    assert (math.sqrt(n) + 0.12 + 0.11 / math.sqrt(n)) * distance < 2.23


def has_frequencies(counts: np.ndarray, probabilities: np.ndarray) -> None:
    """The chi-square test, where rare values are counted together."""
    counts, expected = np.ravel(counts).astype(float), np.ravel(probabilities) * np.sum(counts)
    assert not counts[expected == 0].any()
    rare = expected < 10
    if rare.any():
        counts, expected = [np.append(a[~rare], a[rare].sum()) for a in (counts, expected)]
    if expected[-1] < 10:  # All rare values together are still rare: the most frequent one takes them.
        k = expected[:-1].argmax()
        counts[k], expected[k] = counts[k] + counts[-1], expected[k] + expected[-1]
        counts, expected = counts[:-1], expected[:-1]
    freedom = len(counts) - 1
    statistic = ((counts - expected) ** 2 / expected).sum()
    spread = 2 / (9 * freedom)  # Wilson and Hilferty: the cube root is nearly normal.
    assert abs((statistic / freedom) ** (1 / 3) - (1 - spread)) < 4 * math.sqrt(spread)


def has_moments(x: np.ndarray, mean: float, variance: float, kurtosis: float = 3.0) -> None:
    """The mean and the variance, within four standard deviations of their estimates."""
    n = x.size
    assert abs(x.mean() - mean) < 4 * math.sqrt(variance / n)
    assert abs(((x - mean) ** 2).mean() - variance) < 4 * variance * math.sqrt((kurtosis - 1) / n)


def normal_between(low: np.ndarray | float, high: np.ndarray | float) -> np.ndarray:
    """The probability of an interval, without cancellation on either side of 0."""
    tail = np.vectorize(lambda x: math.erfc(x / math.sqrt(2)) / 2)
    low, high = np.broadcast_arrays(low, high)
    upper = low > 0
    return tail(np.where(upper, low, -high)) - tail(np.where(upper, high, -low))


# -- bits ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "bits"), [("float64", 53), ("float32", 24), ("float16", 11)])
def test_uniform(dtype: str, bits: int) -> None:
    x = drawn(0, st.random.uniform, COUNT, dtype=dtype)
    assert x.min() >= 0
    assert x.max() < 1
    whole = (x.astype(float) * 2**bits).astype(np.int64)
    np.testing.assert_array_equal(whole / 2**bits, x)
    for shift in {0, bits // 2, bits - 8} - {bits // 2 if bits == 11 else -1}:
        has_frequencies(np.bincount(whole >> shift & 255, minlength=256), np.full(256, 1 / 256))
    has_moments(x.astype(float) + 2.0 ** -(bits + 1), 1 / 2, 1 / 12, 9 / 5)
    if bits > 11:
        follows(x, lambda x: x)


@pytest.mark.parametrize("step", [1, 2, 3, 4, 8, 1000])
def test_neighbours_are_independent(step: int) -> None:
    for dtype in ("float64", "float32"):
        x = (drawn(1, st.random.uniform, COUNT, dtype=dtype) * 16).astype(int)
        has_frequencies(np.bincount(x[:-step] * 16 + x[step:], minlength=256), np.full(256, 1 / 256))
        normal = drawn(1, st.random.normal, COUNT, dtype=dtype).astype(float)
        for power in (1, 2):  # The two numbers of a pair have the same radius: squares would be correlated.
            left, right = normal[:-step] ** power, normal[step:] ** power
            assert abs(np.corrcoef(left, right)[0, 1]) < 4 / math.sqrt(COUNT)


def test_keys_are_independent() -> None:
    key = st.random.key(1)
    others = [*st.random.split(key, 3), *(st.random.fold_in(key, i) for i in range(3)), st.random.key(2)]
    x = [(np.asarray(st.random.uniform(k, COUNT)) * 16).astype(int) for k in (key, *others)]
    for a, b in itertools.combinations(x, 2):
        has_frequencies(np.bincount(a * 16 + b, minlength=256), np.full(256, 1 / 256))
    firsts = np.array([k.seed >> 56 for k in st.random.split(key, COUNT)])
    has_frequencies(np.bincount(firsts, minlength=256), np.full(256, 1 / 256))


@pytest.mark.parametrize(
    ("low", "high"),
    [
        (-3, 4),
        (0, 256),
        (0, 3 << 30),
        (5, 5 + 2**32),
        (0, 2**32 + 1),
        (0, 3 << 61),
        (-(2**63), 2**63),
        (-(2**62) - 1, 2**62),
    ],
)
def test_integers(low: int, high: int) -> None:
    x = drawn(2, st.random.integers, low, high, COUNT)
    assert low <= x.min()
    assert x.max() < high
    parts = high - low if high - low <= 256 else 96
    found = [(int(n) - low) * parts // (high - low) for n in x[: COUNT // 4]]
    has_frequencies(np.bincount(found, minlength=parts), np.full(parts, 1 / parts))
    if high - low > 256:
        has_frequencies(np.bincount(x & 63, minlength=64), np.full(64, 1 / 64))


def test_permutations_are_equally_likely() -> None:
    numbers = {p: i for i, p in enumerate(itertools.permutations(range(4)))}
    found = [numbers[tuple(st.random.permutation(key, 4).tolist())] for key in st.random.split(KEYS[3], 2400)]
    has_frequencies(np.bincount(found, minlength=24), np.full(24, 1 / 24))
    x = drawn(3, st.random.permutation, COUNT)
    np.testing.assert_array_equal(np.sort(x), np.arange(COUNT))
    assert abs(np.corrcoef(x, np.arange(COUNT))[0, 1]) < 4 / math.sqrt(COUNT)


def test_choices_are_equally_likely() -> None:
    has_frequencies(np.bincount(drawn(4, st.random.choice, 13, COUNT), minlength=13), np.full(13, 1 / 13))
    pairs = [st.random.choice(key, 5, (2,), False).tolist() for key in st.random.split(KEYS[4], 2000)]
    counts = np.zeros((5, 5))
    np.add.at(counts, tuple(np.transpose(pairs)), 1)
    has_frequencies(counts, (1 - np.eye(5)) / 20)


# -- continuous distributions ----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16"])
def test_normal(dtype: str) -> None:
    x = drawn(5, st.random.normal, COUNT, dtype=dtype).astype(float)
    has_moments(x, 0, 1)
    assert abs((x**3).mean()) < 4 * math.sqrt(15 / COUNT)
    assert abs((x**4).mean() - 3) < 4 * math.sqrt(96 / COUNT)
    if dtype != "float16":
        follows(x, lambda x: normal_between(-np.inf, x))


def test_tails_of_normal_numbers() -> None:
    """Of four million numbers, as many lie beyond each limit as should."""
    for dtype in ("float64", "float32"):
        x = np.abs(drawn(6, st.random.normal, 1 << 22, dtype=dtype))
        for limit in (3, 4, 4.5, 5):
            expected = 2 * float(normal_between(limit, np.inf)) * x.size
            assert abs(np.count_nonzero(x > limit) - expected) < 4 * math.sqrt(expected) + 1


def test_the_greatest_normal_and_exponential_numbers() -> None:
    from shardtensor.functions.random.numbers_of_words import (
        exponential32,
        exponential64,
        normal32,
        propose_normal,
    )
    from shardtensor.host.normals import END

    # Words of layer 0 next to the end of its rectangle and at its own end, and the least and the greatest second word.
    edge = int(END / (END + 1 / END) * 2**52)
    places = np.array([edge + 2, -edge - 2, edge + 2, 2**52 - 1]).astype(np.int64) << 11
    x, accepted = propose_normal(np, places, np.array([0, 0, -1, -1], np.int64))
    farthest = END + 65 * math.log(2) / END
    np.testing.assert_allclose(x, [farthest, -farthest, END, END], rtol=1e-15)
    assert accepted.tolist() == [False, False, True, True]
    ends = np.zeros(1, np.int64)
    np.testing.assert_allclose(exponential64(np, ends[:1]), 65 * math.log(2), rtol=1e-15)
    halves = np.zeros(2, np.uint32)
    normals = normal32(np, halves, np.dtype("float32"))
    np.testing.assert_allclose(np.hypot(normals[0], normals[1]), math.sqrt(2 * 33 * math.log(2)), rtol=1e-6)
    np.testing.assert_allclose(exponential32(np, halves, np.dtype("float32")), 33 * math.log(2), rtol=1e-6)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_exponential(dtype: str) -> None:
    x = drawn(7, st.random.exponential, COUNT, dtype=dtype).astype(float)
    follows(x, lambda x: -np.expm1(-x))
    has_moments(x, 1, 1, 9)


@pytest.mark.parametrize("a", [0.05, 0.5, 1.0, 3.0, 100.0, 1e10])
def test_gamma(a: float) -> None:
    x = drawn(8, st.random.gamma, a, COUNT)
    has_moments(x, a, a, 3 + 6 / a)
    cumulative: dict[float, Callable[[np.ndarray], Any]] = {
        0.5: lambda x: 1 - 2 * normal_between(np.sqrt(2 * x), np.inf),
        1.0: lambda x: -np.expm1(-x),
        3.0: lambda x: 1 - np.exp(-x) * (1 + x + x * x / 2),
        1e10: lambda x: normal_between(-np.inf, (x - a) / math.sqrt(a)),
    }
    if a in cumulative:
        follows(x, cumulative[a])


INTERVALS = [
    (-math.inf, math.inf), (-1.0, 1.0), (-0.1, 3.0), (-3.0, 0.1), (-4.0, 9.0), (0.0, 1.0), (0.0, math.inf), (2.0, 2.1),
    (8.0, math.inf), (-20.0, -19.0), (30.0, 40.0), (-math.inf, -6.0), (-2.4, 0.0),
]  # fmt: skip


@pytest.mark.parametrize(("lower", "upper"), INTERVALS)
def test_truncated_normal(lower: float, upper: float) -> None:
    x = drawn(9, st.random.truncated_normal, lower, upper, COUNT // 4)
    assert lower <= x.min()
    assert x.max() <= upper
    follows(x, lambda x: normal_between(lower, x) / normal_between(lower, upper))


def test_truncated_normal_far_out() -> None:
    """Where all probabilities underflow, the numbers beyond a follow the exponential distribution of rate a."""
    for a in (1e3, 1e6):
        x = drawn(10, st.random.truncated_normal, a, math.inf, COUNT // 4)
        follows((x - a) * a, lambda x: -np.expm1(-x))


# -- discrete distributions ------------------------------------------------------------------------


def test_bernoulli() -> None:
    for k, p in enumerate((0.001, 0.3, 0.5, 0.9)):
        x = drawn(11 + k, st.random.bernoulli, p, COUNT)
        assert x.dtype == bool
        has_frequencies(np.bincount(x, minlength=2), np.array([1 - p, p]))


def test_categorical() -> None:
    p = np.array([[0.1, 0.2, 0.7, 0.0], [0.25, 0.25, 0.25, 0.25]])
    with np.errstate(divide="ignore"):
        logits = np.log(p) + 5
    for axis, given in ((1, logits), (0, logits.T)):
        x = drawn(15, st.random.categorical, given, axis, (COUNT, 2))
        for k in range(2):
            has_frequencies(np.bincount(x[:, k], minlength=4), p[k])
        has_frequencies(np.bincount(x[:, 0] * 4 + x[:, 1], minlength=16), np.outer(*p))


@pytest.mark.parametrize("lam", [0.0, 0.01, 3.0, 9.99, 10.0, 40.0, 1000.0])
def test_poisson(lam: float) -> None:
    x = drawn(16, st.random.poisson, lam, COUNT)
    if lam == 0:
        assert not x.any()
        return
    k = np.arange(x.max() + 50)
    log = np.array([i * math.log(lam) - lam - math.lgamma(i + 1) for i in k])
    has_frequencies(np.bincount(x, minlength=len(k)), np.exp(log))


@pytest.mark.parametrize(
    ("n", "p"), [(1, 0.3), (10, 0.3), (40, 0.02), (25, 0.5), (1000, 0.3), (1000, 0.97), (10**6, 1e-4)]
)
def test_binomial(n: int, p: float) -> None:
    x = drawn(17, st.random.binomial, n, p, COUNT)
    assert x.max() <= n
    k = np.arange(min(n, x.max() + 50) + 1)
    whole = math.lgamma(n + 1)
    log = [whole - math.lgamma(i + 1) - math.lgamma(n - i + 1) + i * math.log(p) + (n - i) * math.log1p(-p) for i in k]
    has_frequencies(np.bincount(x, minlength=len(k)), np.exp(log))


def test_great_means() -> None:
    """Where the distributions are normal but for the rounding to integers."""
    for mean in (1e6, 1e12, 2.0**50):
        x = drawn(18, st.random.poisson, mean, COUNT)
        follows(
            x + drawn(19, st.random.uniform, COUNT) - 0.5,
            lambda x, m=mean: normal_between(-np.inf, (x - m) / math.sqrt(m)),
        )
        n, deviation = int(mean * 4), math.sqrt(mean * 0.75)
        x = drawn(20, st.random.binomial, n, 0.25, COUNT)
        follows(
            x + drawn(21, st.random.uniform, COUNT) - 0.5,
            lambda x, m=mean, d=deviation: normal_between(-np.inf, (x - m) / d),
        )


def test_parameters_of_each_element() -> None:
    """Both methods of a distribution in one array."""
    means = np.tile([0.5, 9.0, 11.0, 500.0], (COUNT // 4, 1))
    x = drawn(22, st.random.poisson, means)
    for k, mean in enumerate(means[0]):
        has_moments(x[:, k], mean, mean, 3 + 1 / mean)
    trials, p = np.array([3, 30, 400]), np.array([[0.1], [0.5], [0.9]])
    x = drawn(23, st.random.binomial, trials, p, (COUNT // 4, 3, 3))
    for i, k in np.ndindex(3, 3):
        variance = trials[k] * p[i, 0] * (1 - p[i, 0])
        has_moments(x[:, i, k], trials[k] * p[i, 0], variance, 3 + 1 / variance)
    low = np.array([-np.inf, 0.0, 5.0])
    x = drawn(24, st.random.truncated_normal, low, low + 1, (COUNT // 4, 3))
    assert np.isnan(x[:, 0]).all()
    for k in (1, 2):
        follows(x[:, k], lambda x, k=k: normal_between(low[k], x) / normal_between(low[k], low[k] + 1))


@pytest.mark.parametrize("name", ["poisson", "binomial"])
def test_both_methods_of_a_distribution_draw_from_bits_of_their_own(name: str) -> None:
    """Element i of a great mean has a block of its own, and elements 4 i to 4 i + 3 of a small mean share one."""
    n = COUNT // 2
    if name == "poisson":
        x = drawn(25, st.random.poisson, np.where(np.arange(4 * n) < n, 100.0, 3.0))
    else:
        x = drawn(25, st.random.binomial, np.where(np.arange(4 * n) < n, 200, 6), 0.5)
    great = np.arange(n // 4, n)
    for lane in range(4):
        correlation = np.corrcoef(x[great], x[4 * great + lane])[0, 1]
        assert abs(correlation) < 4 / math.sqrt(great.size)
