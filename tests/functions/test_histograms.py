"""Histograms and `digitize` against NumPy, to the last element: the counts are those between the edges returned."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

import shardtensor as st
from shardtensor.interpreters.execution import plan_cache, strategies
from tests.draws import drawn
from tests.layouts import assert_equal, everywhere, mesh_of, put

DTYPES = ["bool", "int8", "uint8", "int64", "float16", "float32", "float64"]
SIZES = [50, 40_000, 600_000]


def numbers(dtype: str, size: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return rng.random(size) < 0.5 if dtype == "bool" else (20 * rng.normal(size=size)).astype(dtype)


def assert_all_equal(function: Callable[[Any], Sequence[Any]], x: np.ndarray, y: Any) -> None:
    """Asserts that a function gives the same arrays of a tensor as of an array."""
    for found, wanted in zip(function(y), function(x), strict=True):
        if isinstance(wanted, (list, tuple)):
            for one, other in zip(found, wanted, strict=True):
                assert_equal(one, other)
        elif wanted.dtype.kind == "f":
            assert found.dtype == wanted.dtype
            np.testing.assert_allclose(found, wanted, rtol=1e-12)
        else:
            assert_equal(found, wanted)


@everywhere
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.filterwarnings("ignore:Converting input from bool")
@np.errstate(all="ignore")
def test_counts_are_those_between_the_edges(dtype: str, backend: str) -> None:
    for seed, size in enumerate(SIZES):
        rng, x = np.random.default_rng(seed), numbers(dtype, size, seed)
        y = put(x, backend)
        for _ in range(drawn(3, fast=1)):
            first, last = sorted(15 * rng.normal(size=2))
            count = int(rng.integers(1, 60))
            for ends in (
                (first, last), (float(first), float(last)), (np.float32(first), np.float32(last)), (-3, 8), None,
                (3, 3), np.array([1, 7]), [np.array(1.5), 7],
            ):  # fmt: skip
                assert_all_equal(lambda a, n=count, r=ends: np.histogram(a, bins=n, range=r), x, y)
            params = {"bins": count, "range": (first, last)}
            assert_all_equal(lambda a, p=params: np.histogram(a, **p, density=True), x, y)
            assert_all_equal(lambda a, p=params: np.histogram(a, **p, weights=np.ones(a.shape, "int32")), x, y)
        program = st.jit(lambda a, p=params: np.histogram(a, **p))
        assert_all_equal(lambda a, p=program: p(a) if a is y else np.histogram(a, **params), x, y)  # noqa: B023
        with st.transfers():
            assert_all_equal(lambda a, p=params: np.histogram(a, **p), x, y)


@everywhere
@pytest.mark.parametrize("dtype", DTYPES)
@np.errstate(all="ignore")
def test_edges_along_several_axes_have_numpys_dtype(dtype: str, backend: str) -> None:
    for size in SIZES[:2]:
        x = numbers(dtype, size)
        y = put(x, backend)
        for function in (
            lambda a: np.histogram2d(a, a[::-1], bins=5),
            lambda a: np.histogram2d(a, a[::-1], bins=(5, 7), range=[(-3, 4.4), (0, 9)]),
            lambda a: np.histogramdd([a, a[::-1]], bins=(5, 7), range=[None, (0, 9)]),
            lambda a: np.histogramdd(a.reshape(-1, 2), bins=4, density=True),
            lambda a: np.histogram2d(a, a, bins=4, weights=np.ones(a.shape)),
            lambda a: np.histogramdd(a.reshape(-1, 2), bins=[np.array([0, 1, 9.0]), 3]),
            lambda a: np.histogramdd((a * 0).reshape(-1, 2), bins=4),
        ):
            assert_all_equal(function, x, y)


@everywhere
def test_parts_of_complex_weights_are_added_one_by_one(backend: str) -> None:
    x, weights = np.array([0.1, 0.2, 0.9]), np.array([1, complex(1, np.inf), 2])
    for dtype in ("complex64", "complex128"):
        given = weights.astype(dtype)
        found = np.histogram(put(x, backend), 2, (0, 1), weights=put(given, backend))[0]
        assert_equal(found, np.histogram(x, 2, (0, 1), weights=given)[0])


EDGES: list[Any] = [[0, 1, np.nan], [np.nan], [], [1, 1, 2], [2, 2, 1], [1, 1], [-1, 0, 3]]


@everywhere
@pytest.mark.parametrize("size", [50, 70_000])
def test_digitize_takes_nan_as_the_last_edge(size: int, backend: str) -> None:
    for dtype in DTYPES:
        x = numbers(dtype, size)
        if x.dtype.kind == "f":
            x[::7] = np.nan
        y = put(x, backend)
        for edges in EDGES:
            for right in (False, True):
                given = np.array(edges, float)
                assert_equal(np.digitize(y, given, right=right), np.digitize(x, given, right=right))


@pytest.mark.parametrize("edges", [[np.nan, 1, 2], [3, 1, 2], [0, 2, np.nan, 1, 3, 2]])
def test_digitize_refuses_edges_without_an_order(edges: list[float]) -> None:
    for take in (np.asarray, lambda x: put(x, "numpy")):
        with pytest.raises(ValueError, match="bins"):
            np.digitize(take(np.arange(9.0)), edges)


@everywhere
def test_a_range_of_equal_numbers_of_another_type_is_counted_as_if_it_were_the_first(backend: str) -> None:
    """Plans are kept for parameters, and their types decide how NumPy counts."""
    x = np.random.default_rng(0).random(5000).astype(np.float16)
    tensor = put(x, backend)
    ranges = [(0, 1), (0.0, 1.0), (np.float16(0), np.float16(1))]
    for ends in (*ranges, *ranges[::-1]):
        assert_all_equal(lambda a, ends=ends: np.histogram(a, 37, range=ends), x, tensor)


def test_shards_are_counted_in_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sums of weights are those of one thread to the bit, and the errors of all threads are raised."""
    monkeypatch.setattr(strategies, "LONG", 0.0)
    rng = np.random.default_rng(0)
    host = rng.integers(0, 9, 101)
    x, w, y = [st.device_put(z, mesh_of((4,), "numpy")) for z in (host, rng.normal(size=101), rng.normal(size=101))]
    calls = [
        lambda: np.bincount(x, weights=w),
        lambda: np.histogram(y, 7, (-1, 1), weights=w)[0],
        lambda: np.isin(st.arange(12), x),
    ]
    for call in calls:
        found = []
        for threads in (1, 3):
            plan_cache._cached_plan.cache_clear()
            with st.set_num_threads(threads):
                found.append(np.asarray(call()))
        np.testing.assert_array_equal(*found, strict=True)
    np.testing.assert_allclose(np.asarray(calls[0]()), np.bincount(host, weights=np.asarray(w)))
    with st.set_num_threads(3), pytest.raises(st.ArgumentError, match="negative"):
        np.bincount(x - 5, weights=w)
    plan_cache._cached_plan.cache_clear()
