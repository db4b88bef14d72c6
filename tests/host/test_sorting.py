"""Sorting of one long line in threads."""

from __future__ import annotations

import itertools
import tracemalloc
from collections.abc import Callable
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as some

import shardtensor as st
from shardtensor.functions.algorithms.distinct import distinct
from shardtensor.host import host_searching, host_sorting
from tests.draws import drawn

RANDOM = np.random.default_rng(0)

LINES: dict[str, Callable[[int, int], Any]] = {
    "random": lambda n, threads: RANDOM.random(n, dtype=np.float32),
    "words": lambda n, threads: RANDOM.integers(0, 1 << 60, n).astype(np.uint64),
    "reverse": lambda n, threads: np.arange(n)[::-1],
    "two values": lambda n, threads: np.arange(n) % 2,
    "runs": lambda n, threads: np.repeat(np.arange(n // 1000 + 1), 1000)[:n],
    "nan": lambda n, threads: np.where(RANDOM.random(n) < 0.4, np.nan, RANDOM.random(n)),
    "half zeros": lambda n, threads: np.maximum(RANDOM.standard_normal(n), 0),
    "only nan": lambda n, threads: np.full(n, np.nan),
    # The elements of each thread are in another range, so that all parts overlap.
    "ranges": lambda n, threads: np.arange(n) % threads * 1000 + RANDOM.integers(0, 900, n),
    "nan in one thread": lambda n, threads: np.where(np.arange(n) % threads == 0, np.nan, 1.0),
}


@pytest.mark.parametrize("threads", [2, 3, 5])
@pytest.mark.parametrize("name", LINES)
def test_any_number_of_threads_sorts(name: str, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_sorting, "num_threads", lambda: threads)
    for n in (1 << 16, 65_537, 100_003):
        line = LINES[name](n, threads)
        np.testing.assert_array_equal(host_sorting.sort(line, 0), np.sort(line))
        keys = line.astype("float32")
        np.testing.assert_array_equal(host_sorting.argsort(keys, 0), np.argsort(keys, stable=True))


@pytest.mark.parametrize("name", [*LINES, "integers", "unsigned", "bytes", "both zeros"])
def test_indices_of_long_lines_are_those_of_the_stable_sort(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranges that are empty, that have one value, and all of the elements; integers of short ranges, which are counted."""
    monkeypatch.setattr(host_sorting, "_BLOCK", 256)
    others = {
        "integers": lambda n, _: RANDOM.integers(-(1 << 62), 1 << 62, n),
        "unsigned": lambda n, _: RANDOM.integers(0, 300, n).astype(np.uint64) + np.uint64((1 << 64) - 1000),
        "bytes": lambda n, _: RANDOM.integers(-128, 128, n).astype(np.int8),
        "both zeros": lambda n, _: np.where(RANDOM.random(n) < 0.5, 0.0, -0.0),
    }
    for n in (4097, 5000):
        line = (LINES | others)[name](n, 3)
        line = line.astype("float64") if line.dtype.kind == "f" else line
        for x in (line, line[::-1], np.stack([line, line[::-1]])):
            wanted = np.argsort(x, axis=-1, stable=True)
            np.testing.assert_array_equal(host_sorting.argsort(x, x.ndim - 1), wanted, strict=True)
            backwards = n - 1 - np.argsort(x[..., ::-1], axis=-1, stable=True)[..., ::-1]
            np.testing.assert_array_equal(host_sorting.argsort(x, x.ndim - 1, descending=True), backwards)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int64", "uint64"])
@pytest.mark.parametrize("extras", list(itertools.product([False, True], repeat=3)), ids=str)
def test_distinct_integers_of_short_ranges_are_counted(dtype: str, extras: tuple[bool, bool, bool]) -> None:
    limits = np.iinfo(dtype)
    for least, count in ((limits.min, 1), (limits.max - 20, 20), (limits.max // 2, 90)):
        x = RANDOM.integers(0, 20, count).astype(dtype) + np.asarray(least).astype(dtype)
        assert host_sorting.least_of_short_range(x, 1) == (None if x.min() < x.max() else x[0])
        wanted = np.unique(x, *extras)
        found = distinct(np, x, extras, True)
        for mine, numpys in zip(found, wanted if any(extras) else (wanted,), strict=True):
            np.testing.assert_array_equal(mine, numpys, strict=True)


def test_zeros_are_found_without_a_copy_of_the_line() -> None:
    """NumPy converts a whole array of float32 to float64 to find an int in it."""
    x = np.linspace(-1.0, 1.0, 1 << 18, dtype=np.float32)
    tracemalloc.start()
    try:
        assert not host_sorting._has_negative_zeros(x)
        assert tracemalloc.get_traced_memory()[1] < 4096
    finally:
        tracemalloc.stop()


NUMBERS = ["bool", "int8", "uint32", "int64", "uint64", "float16", "float32", "float64", "complex64"]


@pytest.mark.parametrize("dtype", ["float32", "float64", "longdouble"])
@pytest.mark.parametrize(
    ("line", "found"),
    [
        ([0.0, 0.0, 0.0], False),
        ([-0.0, 0.0, 1.0], True),
        ([-np.inf, -0.0, 0.0], True),
        ([-0.0, -0.0, np.nan], True),
        ([-np.inf, -1.0, -0.0], False),  # one zero
        ([-1.0, 1.0, -np.nan], False),
        ([], False),
    ],
)
def test_zeros_of_both_signs_are_found(line: list[float], found: bool, dtype: str) -> None:
    x = np.array(line, dtype)
    assert host_sorting._has_negative_zeros(x) == found
    lines = np.stack([np.ones_like(x), x], axis=1)
    for several in lines, lines.T, lines[:, ::-1]:
        assert host_sorting._has_negative_zeros(several) == (found or (dtype == "longdouble" and sum(x == 0) > 1))


@pytest.mark.parametrize("dtype", NUMBERS)
@pytest.mark.parametrize("side", ["left", "right"])
def test_large_arrays_are_searched_as_by_numpy(monkeypatch: pytest.MonkeyPatch, dtype: str, side: str) -> None:
    """Elements in any order, in order, equal, and with NaN and zeros of both signs, in tables of fewer and of more."""
    lows = {"_SEARCHED_IN_ORDER": 8, "_DIVIDED_FROM": 16, "_BLOCK": 32, "_SEARCHED": 16, "_BUCKETS": 16}
    for name, low in lows.items():
        monkeypatch.setattr(host_searching, name, low)
    generator = np.random.default_rng(0)
    wanted = generator.integers(-12, 12, 150).astype(dtype)
    wanted[32:64].sort()
    wanted[64:96] = wanted[64]
    if wanted.dtype.kind in "fc":
        wanted[::7], wanted[1::9] = np.nan, -0.0
    for count in 0, 1, 20, 150, 200:
        table = np.sort(generator.integers(-9, 9, count).astype(dtype))
        if wanted.dtype.kind in "fc":
            table[-1:] = np.nan
        for x2 in wanted, wanted.reshape(10, 15), wanted.astype("f8") if wanted.dtype.kind != "c" else wanted[:0]:
            found = host_searching.searchsorted(table, x2, side)
            np.testing.assert_array_equal(found, np.searchsorted(table, x2, side=side), strict=True)


BITS = some.one_of(some.integers(0, (1 << 64) - 1), some.sampled_from([0, 1, 1 << 63, (1 << 64) - 1, 0x7FF0 << 48]))


@hypothesis.settings(max_examples=drawn(100, fast=20))
@hypothesis.given(
    table=some.lists(BITS, min_size=1, max_size=40),
    others=some.lists(BITS, max_size=60),
    dtype=some.sampled_from(["u8", "i8", "f8", "u4", "i4", "f4", "f2"]),
    side=some.sampled_from(["left", "right"]),
)
def test_tables_of_any_bits_are_searched(table: list[int], others: list[int], dtype: str, side: str) -> None:
    """All distributions, among them infinities, NaN of any bits, subnormal numbers, and elements of the table itself."""
    in_order = np.sort(np.array(table, np.uint64).view(dtype))
    wanted = np.concatenate([np.array(others, np.uint64).view(dtype), in_order])
    found = np.empty(wanted.shape, np.int64)
    with np.errstate(invalid="ignore"):
        host_searching._Table(in_order, side).find(wanted, found)
    np.testing.assert_array_equal(found, np.searchsorted(in_order, wanted, side=side), strict=True)


def test_elements_in_no_order_are_searched_without_an_error() -> None:
    wanted = np.arange(1 << 16)
    found = host_searching.searchsorted(np.array([5, -(1 << 62), 1 << 62, 0]), wanted, "left")
    assert 0 <= found.min() <= found.max() <= 4


@pytest.mark.parametrize("threads", [1, 3])
def test_random_words_are_sorted_by_their_bits(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Below and above each threshold; all of them and the first ones; words that are equal, or nearly so."""
    monkeypatch.setattr(host_sorting, "_SHORT", 200)
    monkeypatch.setattr(host_sorting, "_PART", 64)
    monkeypatch.setattr(host_sorting, "_PIECES", 5)
    generator = np.random.default_rng(1)
    with st.set_num_threads(threads):
        for n in (0, 1, 200, 201, 63 * 64, 10_000):
            words = generator.integers(-(2**63), 2**63, n)
            words[n // 2 :: 3] = words[: len(words[n // 2 :: 3])]
            words[n // 3 :: 7] ^= 1
            for kind in (words, words >> 61, words & 3):
                wanted = np.argsort(kind, stable=True)
                for count in {n, n // 3, 0}:
                    found = host_sorting.random_order(kind, count)
                    assert found.dtype == np.int64
                    np.testing.assert_array_equal(found, wanted[:count])
