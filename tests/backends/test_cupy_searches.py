"""Positions and counts of elements by kernels of the CuPy backend, on the simulated CuPy."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from shardtensor_cupy.kernels import large_ufuncs, searches

import shardtensor as st
from tests.backends.test_cupy import launched, machine
from tests.conftest import NO_GPU
from tests.pairs import spread

pytestmark = pytest.mark.skipif(not NO_GPU, reason="the double takes the place of CuPy")


@pytest.fixture(autouse=True)
def every_array_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large_ufuncs, "LARGE", 1)
    for name, value in (("_THREADS", 8), ("_SAMPLES", 8), ("_COUNTS", 16), ("_EDGES", 16), ("_BLOCKS", 8)):
        monkeypatch.setattr(searches, name, value)


SHAPES = [(1,), (16,), (300,), (1, 700), (20, 30), (3, 5, 11), (0, 4)]


@pytest.mark.parametrize("shape", SHAPES)
def test_nonzero(shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    with machine(1, devices=1) as m, m.backend.on(m.devices[0]):
        calls = itertools.product((0, 0.1, 0.5, 1), ("?", "f4", "i8"), (1, -1))
        for part, dtype, step in spread(calls, 5, SHAPES.index(shape)):
            host = (rng.random(shape) < part).astype(dtype)
            found = m.backend.xp.nonzero(m.cupy.asarray(host)[::step])
            for indices, wanted in zip(found, np.nonzero(host[::step]), strict=True):
                np.testing.assert_array_equal(m.backend.to_host(indices, m.devices[0]), wanted, strict=True)
        mask = m.cupy.asarray(rng.random(200) < 0.5)[3:]
        wanted = np.nonzero(m.backend.to_host(mask, m.devices[0]))[0]
        np.testing.assert_array_equal(m.backend.to_host(m.backend.xp.nonzero(mask)[0], m.devices[0]), wanted)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("size", [1, 2, 7, 8, 9, 15, 16, 17, 100])
def test_searchsorted(size: int, side: str) -> None:
    rng = np.random.default_rng(0)
    with machine(1, devices=1) as m, m.backend.on(m.devices[0]):
        for kinds in (("f4", "f4"), ("i4", "i8"), ("f8", "f4"), ("u1", "i2"), ("u8", "i8"), ("i8", "f4")):
            table, x = [rng.integers(0, 40, n).astype(kind) for n, kind in zip((size, 90), kinds, strict=True)]
            if kinds == ("f4", "f4"):
                table[size // 2 :] += 20
                table[size - size // 4 :], x[::7] = np.nan, np.nan
            table.sort()
            found = m.backend.xp.searchsorted(m.cupy.asarray(table), m.cupy.asarray(x.reshape(9, 10)), side=side)
            wanted = np.searchsorted(table, x.reshape(9, 10), side)
            np.testing.assert_array_equal(m.backend.to_host(found, m.devices[0]), wanted, strict=True)


def test_counts() -> None:
    rng = np.random.default_rng(0)
    with machine(1, devices=1) as m:
        for length, dtype in itertools.product((3, 16, 17, 50), ("i4", "u1", "i8")):
            host = rng.integers(0, length, 700).astype(dtype)
            x = st.device_put(host, m.devices[0])
            np.testing.assert_array_equal(np.asarray(st.bincount(x)), np.bincount(host))
        options: list[dict[str, Any]] = [{}, {"range": (10, 50)}, {"density": True}]
        for bins, dtype, given in spread(itertools.product((1, 5, 14, 40), ("f4", "f8", "i4", "u1", "?"), options), 7):
            host = rng.integers(0, 2 if dtype == "?" else 90, 700).astype(dtype)
            counts, edges = st.histogram(st.device_put(host, m.devices[0]), bins, **given)
            wanted, bounds = np.histogram(host.astype("u1") if dtype == "?" else host, bins, **given)
            np.testing.assert_array_equal(np.asarray(counts), wanted, strict=True)
            np.testing.assert_array_equal(np.asarray(edges), bounds)
        host = np.r_[rng.normal(size=300), np.nan, np.inf, -np.inf].astype("f4")
        x = st.device_put(host, m.devices[0])
        edges = np.array([-1, 0, 0, 0.5, 2], "f4")
        np.testing.assert_array_equal(np.asarray(st.histogram(x, edges)[0]), np.histogram(host, edges)[0])


def test_which_are_own_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    host = np.arange(64.0, dtype="f4").reshape(8, 8) % 7
    with machine(1, devices=1) as m:
        x, k = st.device_put(host, m.devices[0]), st.device_put(np.arange(64) % 5, m.devices[0])
        names = launched(monkeypatch)

        def launches(function: Any, *args: Any, **kwargs: Any) -> list[str]:
            names.clear()
            function(*args, **kwargs)
            return [name for name in names if name.startswith("shardtensor") and "equal" not in name]

        found = ["shardtensor_count_true", "shardtensor_scan", "shardtensor_nonzero"]
        assert launches(st.nonzero, x) == found
        assert launches(st.flatnonzero, x) == found
        assert launches(st.bincount, k) == ["shardtensor_bincount"]
        assert launches(st.histogram, x, 4) == ["shardtensor_histogram"]
        assert launches(st.digitize, x, np.array([1, 3, 5], "f4")) == ["shardtensor_searchsorted"]


@pytest.mark.parametrize("equal_nan", [True, False])
def test_unique_of_one_device(equal_nan: bool) -> None:
    host = np.r_[np.random.default_rng(0).integers(0, 9, 60).astype("f4"), np.nan, np.nan].reshape(2, 31)
    with machine(1, devices=1) as m:
        x = st.device_put(host, m.devices[0])
        for flags in itertools.product((False, True), repeat=3):
            found = st.unique(x, *flags, equal_nan=equal_nan)
            wanted = np.unique(host, *flags, equal_nan=equal_nan)
            pairs = zip(found, wanted, strict=True) if any(flags) else [(found, wanted)]
            for a, b in pairs:
                np.testing.assert_array_equal(np.asarray(a), b)
