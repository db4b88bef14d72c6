"""Ranges, convolutions and interpolation by kernels of the CuPy backend, on the simulated CuPy."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from shardtensor_cupy import elementwise, namespace, searches, sequences

import shardtensor as st
from tests.backends.test_cupy import launched, machine
from tests.conftest import NO_GPU

pytestmark = pytest.mark.skipif(not NO_GPU, reason="the double takes the place of CuPy")


@pytest.fixture(autouse=True)
def every_array_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(namespace, "LARGE", 1)
    for module in (elementwise, searches, sequences):
        monkeypatch.setattr(module, "_THREADS", 8)
    monkeypatch.setattr(searches, "_SAMPLES", 8)


@pytest.mark.parametrize("count", [1, 4])
def test_ranges(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with machine(count, devices=1) as m:
        where = st.NamedSharding(m.mesh(), st.P("d"))
        names = launched(monkeypatch)
        for dtype in ("f8", "f4", "i4", "i8"):
            for given in ((0, 64, 1), (5, 90, 3), (0.5, 40, 0.7)):
                if dtype[0] == "f" or type(given[0]) is int:
                    found = np.asarray(st.arange(*given, dtype=dtype, device=where))
                    np.testing.assert_array_equal(found, np.arange(*given, dtype=dtype), strict=True)
            for endpoint in (True, False):
                made = st.linspace(0.3, 7, 65, dtype=dtype, endpoint=endpoint, device=where)
                np.testing.assert_array_equal(np.asarray(made), np.linspace(0.3, 7, 65, endpoint=endpoint, dtype=dtype))
        assert {"shardtensor_ramp_float64_float64", "shardtensor_ramp_float64_float32"} <= set(names)
        assert {"shardtensor_ramp_int64_int32", "shardtensor_ramp_float32_float32"} <= set(names)


@pytest.mark.parametrize("count", [1, 4])
def test_convolutions(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    with machine(count, devices=1) as m:
        where = st.NamedSharding(m.mesh(), st.P("d"))
        for (n, taps), dtype, mode in itertools.product(
            ((300, 9), (64, 1), (40, 33), (7, 20)), ("f4", "f8", "i4", "i1"), ("full", "same", "valid")
        ):
            a, v = [rng.integers(-9, 9, size).astype(dtype) for size in (n, taps)]
            for name in ("convolve", "correlate"):
                names = launched(monkeypatch)
                found = getattr(st, name)(st.device_put(a, where), v, mode)
                np.testing.assert_array_equal(np.asarray(found), getattr(np, name)(a, v, mode), strict=True)
                assert "shardtensor_convolve" in names
        a = np.r_[rng.normal(size=100)]
        v = np.array([1, np.inf, 2.0, np.nan, 1])
        found = np.asarray(st.convolve(st.device_put(a, where), v))
        np.testing.assert_array_equal(np.isnan(found), np.isnan(np.convolve(a, v)))


def test_interpolation(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    with machine(1, devices=1) as m:
        names = launched(monkeypatch)
        for size, dtype, kind in itertools.product((2, 3, 9, 40), ("f4", "f8", "i4"), ("f8", "f4")):
            points = np.sort(rng.choice(100, size, replace=False)).astype(kind)
            values, x = rng.normal(size=size).astype(kind), (rng.random(200) * 110 - 5).astype(dtype)
            x[:size] = points
            if dtype[0] == "f":
                x[-3:] = np.nan, np.inf, -np.inf
            for ends in ({}, {"left": -7.0, "right": 9.0}):
                given: list[Any] = [st.device_put(a, m.devices[0]) for a in (x, points, values)]
                found = np.asarray(st.interp(*given, **ends))
                np.testing.assert_allclose(found, np.interp(x, points, values, **ends), rtol=1e-12, atol=1e-13)
                assert "shardtensor_interpolate" in names
