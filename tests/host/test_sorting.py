"""Sorting of one long line in threads."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import shardtensor as st
from shardtensor.host import host_sorting

RANDOM = np.random.default_rng(0)

LINES: dict[str, Callable[[int, int], Any]] = {
    "random": lambda n, threads: RANDOM.random(n, dtype=np.float32),
    "words": lambda n, threads: RANDOM.integers(0, 1 << 60, n).astype(np.uint64),
    "reverse": lambda n, threads: np.arange(n)[::-1],
    "two values": lambda n, threads: np.arange(n) % 2,
    "runs": lambda n, threads: np.repeat(np.arange(n // 1000 + 1), 1000)[:n],
    "nan": lambda n, threads: np.where(RANDOM.random(n) < 0.4, np.nan, RANDOM.random(n)),
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


def test_zeros_are_found_without_a_copy_of_the_line() -> None:
    """NumPy converts a whole array of float32 to float64 to find an int in it."""
    x = np.linspace(-1.0, 1.0, 1 << 18, dtype=np.float32)
    tracemalloc.start()
    try:
        assert not host_sorting._has_zeros(x)
        assert tracemalloc.get_traced_memory()[1] < 4096
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint32", "int64", "float16", "float32", "float64", "complex64"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_large_arrays_are_searched_for_elements_in_order(
    monkeypatch: pytest.MonkeyPatch, dtype: str, side: str
) -> None:
    """Blocks of elements in any order, in order, equal, and with NaN and zeros of both signs, are found as by NumPy."""
    for name, least in ("_SEARCHED_IN_ORDER", 8), ("_DIVIDED_FROM", 16), ("_BLOCK", 32):
        monkeypatch.setattr(host_sorting, name, least)
    generator = np.random.default_rng(0)
    table = np.sort(generator.integers(-9, 9, 20).astype(dtype))
    wanted = generator.integers(-12, 12, 150).astype(dtype)
    wanted[32:64].sort()
    wanted[64:96] = wanted[64]
    if wanted.dtype.kind in "fc":
        wanted[::7], wanted[1::9], table[-1] = np.nan, -0.0, np.nan
    for x2 in wanted, wanted.reshape(10, 15), wanted.astype("f8") if wanted.dtype.kind != "c" else wanted[:0]:
        found = host_sorting.searchsorted(table, x2, side)
        np.testing.assert_array_equal(found, np.searchsorted(table, x2, side=side), strict=True)


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
