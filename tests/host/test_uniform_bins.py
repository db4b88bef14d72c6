"""Counts of elements in bins of the same width against NumPy's histogram."""

from __future__ import annotations

import itertools
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as some

import shardtensor as st
from shardtensor.host import uniform_bins
from tests.draws import drawn

DTYPES = ["int8", "uint8", "int16", "uint16", "int32", "int64", "uint64", "float16", "float32", "float64", "longdouble"]


def low(monkeypatch: pytest.MonkeyPatch, **others: Any) -> None:
    for name, value in ({"_COUNTED_FROM": 1, "_BLOCK": 64, "_PART": 200} | others).items():
        monkeypatch.setattr(uniform_bins, name, value)


def assert_counted(x: Any, count: int, first: Any, last: Any) -> bool:
    """Asserts that the counts are NumPy's, and returns whether there are any."""
    with np.errstate(all="ignore"):
        found = uniform_bins.counts_in_bins(x, count, first, last)
        if found is not None:
            np.testing.assert_array_equal(found, np.histogram(x, count, (first, last))[0], strict=True)
    return found is not None


def around(edges: Any, dtype: str) -> Any:
    """Returns the edges, and the elements of a dtype next to them, all of them several times."""
    if np.dtype(dtype).kind != "f":
        limits = np.iinfo(dtype)
        wide = np.clip(np.rint(edges.astype(np.float64)), float(limits.min) / 2, float(limits.max) / 2).astype(dtype)
        return np.concatenate([wide, wide + np.ones_like(wide), wide - np.ones_like(wide)])
    x = edges.astype(dtype)
    steps = [x]
    for end in (-np.inf, np.inf):
        step = x
        for _ in range(3):
            step = np.nextafter(step, np.asarray(end, dtype))
            steps.append(step)
    return np.concatenate(steps)


RANGES = [(0, 1), (0.0, 1.0), (-5.0, 5.0), (0.1, 0.7), (-3, 100), (1e-3, 1e3), (np.float32(0.1), np.float32(0.9)),
          (np.float64(0.1), np.float64(0.9)), (np.int8(-100), np.int8(100)), (1e6, 1e6 + 50), (-1e30, 1e30)]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
def test_elements_around_edges_are_counted_as_by_numpy(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone, so that all are compared with edges, and among others, so that few are; in order, and with steps."""
    low(monkeypatch)
    generator, counted = np.random.default_rng(0), 0
    for (first, last), count in itertools.product(RANGES, (1, 3, 10, 100, 256, 4096)):
        edges = np.linspace(float(first), float(last), count + 1)
        with np.errstate(all="ignore"):
            near = around(edges, dtype)
            others = (generator.random(20 * near.size % 30_000) * (float(last) - float(first)) * 1.1 + first).astype(
                dtype
            )
        mixed = generator.permutation(np.concatenate([near, others]))
        try:
            with np.errstate(all="ignore"):
                np.histogram(near[:0], count, (first, last))
        except ValueError:  # The bins are too narrow.
            continue
        for x in (near, mixed, np.repeat(mixed, 2)[::-2]):
            counted += assert_counted(x, count, first, last)
    assert counted > (0 if dtype == "float16" else 90)


def test_nan_and_elements_out_of_range_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    low(monkeypatch)
    generator = np.random.default_rng(1)
    x = 2 * generator.standard_normal(5000)
    x[::7], x[1::11], x[2::13] = np.nan, np.inf, -np.inf
    for dtype, threads in itertools.product(("float16", "float32", "float64"), (1, 3)):
        with st.set_num_threads(threads):
            assert assert_counted(x.astype(dtype), 20, -1.0, 1.0)
            assert assert_counted(np.full(300, np.nan, dtype), 20, -1.0, 1.0)
            assert assert_counted(x.astype(dtype)[:3], 20, 900.0, 1000.0)


@pytest.mark.parametrize("dtype", ["int8", "int32", "uint64", "float32", "float64"])
def test_ranges_of_the_elements_themselves(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    low(monkeypatch)
    generator = np.random.default_rng(2)
    for scale in (3, 100, 1e6):
        x = np.clip(generator.standard_normal(3000) * scale, *((0, 1e9) if dtype[0] == "u" else (-127, 127))).astype(
            dtype
        )
        for count in (1, 7, 128, 1000):
            assert assert_counted(x, count, x.min(), x.max())


def test_inexact_positions_are_left_to_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    low(monkeypatch)
    x = np.linspace(0, 1, 1000)
    assert uniform_bins.counts_in_bins(x, 1 << 14, 0, 1) is None  # more bins than positions can tell apart
    assert uniform_bins.counts_in_bins(x + 1e15, 5, 1e15, 1e15 + 1) is None  # Edges are rounded to a third of a bin.
    assert uniform_bins.counts_in_bins(x, 8, 1.0, 1.0) is None
    assert uniform_bins.counts_in_bins(np.arange(9) + 2**60, 8, 2**60, 2**60 + 1) is None  # The range is 0 as a float.
    assert uniform_bins.counts_in_bins(x.astype("complex64"), 8, 0, 1) is None
    assert uniform_bins.counts_in_bins(x, 8, -1.7e308, 1.7e308) is None  # The range overflows.


@hypothesis.settings(max_examples=drawn(400, fast=80))
@hypothesis.given(
    ends=some.tuples(some.floats(-1e9, 1e9), some.floats(1e-6, 1e9)),
    count=some.integers(1, 500),
    dtype=some.sampled_from(["int32", "uint8", "float32", "float64"]),
    kind=some.sampled_from([float, np.float32, np.float64, round]),
    places=some.lists(some.floats(-0.1, 1.1), min_size=1, max_size=30),
)
def test_any_ranges(ends: tuple[float, float], count: int, dtype: str, kind: Any, places: list[float]) -> None:
    first, last = kind(ends[0]), kind(ends[0] + ends[1])
    with pytest.MonkeyPatch.context() as monkeypatch, np.errstate(all="ignore"):
        low(monkeypatch)
        try:
            edges = np.histogram_bin_edges(np.empty(0, dtype), count, (first, last))
        except ValueError:
            return
        numbers = np.array(places) * (float(last) - float(first)) + float(first)
        if np.dtype(dtype).kind != "f":
            numbers = np.clip(numbers, 0, np.iinfo(dtype).max - 128)
        x = np.concatenate([numbers.astype(dtype), around(edges, dtype)])
        assert_counted(np.tile(x, 3), count, first, last)
