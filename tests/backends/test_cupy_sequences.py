"""Ranges, convolutions and interpolation by kernels of the CuPy backend, on the simulated CuPy."""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import numpy as np
import pytest
from shardtensor_cupy.kernels import elementwise_kernel, large_ufuncs, number_sequences, searches

import shardtensor as st
from shardtensor.functions.algorithms import first_device
from shardtensor.functions.building import unsplit_lines
from tests.backends.test_cupy import launched, machine
from tests.conftest import NO_GPU
from tests.pairs import spread

pytestmark = pytest.mark.skipif(not NO_GPU, reason="the double takes the place of CuPy")


@pytest.fixture(autouse=True)
def every_array_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large_ufuncs, "LARGE", 1)
    for module in (elementwise_kernel, searches, number_sequences):
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
        sizes, modes = ((300, 9), (64, 1), (40, 33), (7, 20)), ("full", "same", "valid")
        calls = itertools.product(sizes, ("f4", "f8", "i4", "i1"), modes, ("convolve", "correlate"))
        for (n, taps), dtype, mode, name in spread(calls, 5, count):
            a, v = [rng.integers(-9, 9, size).astype(dtype) for size in (n, taps)]
            names = launched(monkeypatch)
            found = getattr(st, name)(st.device_put(a, where), v, mode)
            np.testing.assert_array_equal(np.asarray(found), getattr(np, name)(a, v, mode), strict=True)
            assert "shardtensor_convolve" in names
        a = np.r_[rng.normal(size=100)]
        v = np.array([1, np.inf, 2.0, np.nan, 1])
        found = np.asarray(st.convolve(st.device_put(a, where), v))
        np.testing.assert_array_equal(np.isnan(found), np.isnan(np.convolve(a, v)))


@pytest.mark.parametrize("rows", [12, 3000])  # Small arrays are sorted; of others, elements are selected.
def test_quantiles(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    many = np.linspace(0, 1, 9)
    with machine(1, devices=1) as m:
        calls = itertools.product(
            ("f4", "f8", "f2", "i4", "i1", "u1"), (0.3, [0.1, 0.5, 0.9], many, many[:8]),
            ("linear", "hazen", "midpoint", "nearest", "inverted_cdf"), (None, 0, 1), (False, True),
        )  # fmt: skip
        for dtype, q, method, axis, has_nan in spread(calls, 9):
            host = (rng.integers(-99, 99, (rows, 7)) / (1 if dtype[0] in "iu" else 8)).astype(dtype)
            if has_nan and dtype[0] == "f":
                host[1, 2] = np.nan
            x, names = st.device_put(host, m.devices[0]), launched(monkeypatch)
            found = np.asarray(st.quantile(x, q, axis=axis, method=method))
            np.testing.assert_array_equal(found, np.quantile(host, q, axis=axis, method=method), strict=True)
            np.testing.assert_array_equal(np.asarray(st.median(x, axis=axis)), np.median(host, axis=axis), strict=True)
            own = {name for name in names if name.startswith("shardtensor_quantile")}
            assert any("quantile_mean" in name for name in own) == (dtype != "f2")
            on_host = np.ndim(q) == 0 or host.nbytes > first_device.GATHERED  # Quantiles of few bytes are sent, too.
            is_own = dtype != "f2" and np.size(q) <= 8 and on_host
            assert any("quantile_mean" not in name for name in own) == is_own


@pytest.mark.parametrize(
    "rows", [pytest.param(1, marks=pytest.mark.full), 12, pytest.param(3000, marks=pytest.mark.full)]
)
def test_quantiles_of_numbers(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Quantiles of the elements that are not NaN, in lines with any number of them."""
    rng = np.random.default_rng(rows)
    with machine(1, devices=1) as m:
        calls = itertools.product(
            ("f4", "f8", "f2"), (0.3, 1, np.float32(0.7), [0.0, 0.5, 1.0], np.linspace(0, 1, 9)),
            ("linear", "hazen"), (None, 0, 1), (0, 0.4, 1),
        )  # fmt: skip
        for dtype, q, method, axis, share in spread(calls, 7):
            host = (rng.integers(-99, 99, (rows, 7)) / 8).astype(dtype)
            host[rng.random(host.shape) < share] = np.nan
            host[:, 3] = np.nan
            x, names = st.device_put(host, m.devices[0]), launched(monkeypatch)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # NumPy warns of lines without numbers.
                wanted = np.nanquantile(host, q, axis=axis, method=method), np.nanmedian(host, axis=axis)
                found = st.nanquantile(x, q, axis=axis, method=method), st.nanmedian(x, axis=axis)
            for mine, right in zip(found, wanted, strict=True):
                np.testing.assert_array_equal(np.asarray(mine), right)
            own = [name for name in names if "of_numbers" in name]
            is_own = dtype != "f2" and method == "linear" and type(q) is not int
            assert [any(method in name for name in own) for method in ("median", "linear")] == [dtype != "f2", is_own]


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


@pytest.mark.parametrize("large", [1, 1 << 30])
def test_padding(large: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unsplit_lines, "_LARGE", large)
    host = np.arange(60.0, dtype="f4").reshape(10, 6)
    with machine(2, devices=1) as m:
        for spec, widths in (
            (st.P(), 1), (st.P("d"), ((0, 0), (2, 1))), (st.P("d"), 1), (st.P(), ((3, 0), (0, 0))), (st.P(), 0)
        ):  # fmt: skip
            x = st.device_put(host, st.NamedSharding(m.mesh(), spec))
            for value in (0, -0.0, 7, np.nan):
                found, wanted = (
                    np.asarray(st.pad(x, widths, constant_values=value)),
                    np.pad(host, widths, constant_values=value),
                )
                np.testing.assert_array_equal(found, wanted, strict=True)
                np.testing.assert_array_equal(np.signbit(found), np.signbit(wanted))
        with pytest.raises(OverflowError):
            st.pad(st.device_put(host.astype("u1"), m.devices[0]), 1, constant_values=300)


def test_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    host = np.random.default_rng(0).normal(size=(12, 9))
    with machine(2, devices=1) as m:
        calls = itertools.product(("f4", "f8", "f2"), (st.P(), st.P("d")), (0, 1), (1, 0.3, 2.0))
        for dtype, spec, axis, spacing in spread(calls, 5):
            given = host.astype(dtype)
            x = st.device_put(given, st.NamedSharding(m.mesh(), spec))
            names = launched(monkeypatch)
            found = st.gradient(x, spacing, axis=axis)
            np.testing.assert_array_equal(np.asarray(found), np.gradient(given, spacing, axis=axis), strict=True)
            own = f"shardtensor_difference_quotient_{given.dtype.name}"
            assert (own in names) == (dtype != "f2" and (axis == 1 or spec == st.P()))


def test_cross_products(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    with machine(2, devices=1) as m:
        where = st.NamedSharding(m.mesh(), st.P("d"))
        for dtype in ("f4", "f8", "i8", "i1"):
            a, b = [rng.integers(-9, 9, shape).astype(dtype) for shape in ((14, 4), (14, 3))]
            names = launched(monkeypatch)
            found = st.cross(st.device_put(a, where)[:, 1:], st.device_put(b, where))
            np.testing.assert_array_equal(np.asarray(found), np.cross(a[:, 1:], b), strict=True)
            assert any(name.startswith("shardtensor_cross") for name in names) == (dtype != "i1")
            found = st.cross(
                st.device_put(b.T.copy(), m.devices[0]), st.device_put(a[0, 1:], m.devices[0]), axisa=0, axisc=0
            )
            np.testing.assert_array_equal(np.asarray(found), np.cross(b.T, a[0, 1:], axisa=0, axisc=0))


def test_outer_products_and_copies_of_views(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large_ufuncs, "LARGE", 1 << 10)
    with machine(1, devices=1) as m:
        host = np.arange(64.0)
        x = st.device_put(host, m.devices[0])
        names = launched(monkeypatch)
        found = st.outer(x, x)
        assert names == ["shardtensor_multiply"], "the result is large"
        np.testing.assert_array_equal(np.asarray(found), np.outer(host, host))
        names.clear()
        made = st.repeat(found, 2)
        assert "shardtensor_copy_uint64_uint64" in names
        np.testing.assert_array_equal(np.asarray(made), np.repeat(np.outer(host, host), 2))
        names.clear()
        flat = st.reshape(found.T, (-1,))
        assert "shardtensor_transpose" in names
        np.testing.assert_array_equal(np.asarray(flat), np.outer(host, host).T.reshape(-1))
        with m.backend.on(m.devices[0]), pytest.raises(ValueError, match="reshape"):
            m.backend.xp.reshape(found.addressable_shards[0].data.T, (3, 5))


def test_triangles(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    with machine(2, devices=1) as m:
        where = st.NamedSharding(m.mesh(), st.P(None, "d"))
        dtypes, shapes = ("f4", "f2", "i8", "?", "c16"), ((6, 8), (3, 5, 4), (9, 2))
        calls = itertools.product(dtypes, shapes, ("tril", "triu"), (-20, -2, 0, 1, 20))
        for dtype, shape, name, k in spread(calls, 7):
            host = rng.integers(0, 2 if dtype == "?" else 90, shape).astype(dtype)
            names = launched(monkeypatch)
            found = getattr(st, name)(st.device_put(host, where), k=k)
            np.testing.assert_array_equal(np.asarray(found), getattr(np, name)(host, k), strict=True)
            assert any("triangle" in name for name in names) == (dtype != "c16")


@pytest.mark.parametrize("least", [1, 1 << 60], ids=["own kernel", "CuPy's functions"])
@pytest.mark.parametrize("backend", ["cupy", "checked"])
def test_interpolation_beside_points_that_are_not_finite(
    backend: str, least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(large_ufuncs, "LARGE", least)
    x = np.array([0, 0.5, 1, 1.5, 2, -1, 3, np.nan, -np.inf, np.inf])
    points: list[tuple[list[float], list[float]]] = [
        ([0.0, 1, 2], [1.0, np.inf, 3]),
        ([0.0, 1, 1.5, 3], [0.0, 1e308, -1e308, 5]),
        ([-np.inf, 0, 1, np.inf], [0.0, 1, 2, 3]),
        ([0.0, 1, 2], [np.inf, np.inf, 0]),
        ([0.0, 1], [np.nan, 1]),
    ]
    with machine(1, devices=1) as m, np.errstate(all="ignore"):
        device = m.devices[0] if backend == "cupy" else st.devices(backend)[0]
        for xp, fp in points:
            found = np.asarray(st.interp(st.device_put(x, device), np.array(xp), np.array(fp)))
            np.testing.assert_array_equal(found, np.interp(x, xp, fp))
