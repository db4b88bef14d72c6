"""Cumulative sums and products of long lines by kernels of the CuPy backend, on the simulated CuPy."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from shardtensor_cupy.kernels import large_ufuncs, line_scans, ordering_functions

import shardtensor as st
from tests.backends.test_cupy import launched, machine
from tests.conftest import NO_GPU
from tests.pairs import spread

pytestmark = pytest.mark.skipif(not NO_GPU, reason="the double takes the place of CuPy")

SHAPES = (((9,), 0), ((64,), 0), ((65,), 0), ((300,), 0), ((3, 200), 1), ((200, 3), 0), ((2, 70, 5), 1), ((40, 1), 0))
DTYPES = (("f4", "f4"), ("f8", "f8"), ("i4", "i8"), ("?", "i8"), ("u1", "u8"), ("f4", "f8"), ("i8", "i8"))


@pytest.fixture(autouse=True)
def short_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ordering_functions, "LONG", 8)
    for name, value in (("_THREADS", 8), ("_EACH", 4), ("_ROWS", 8)):
        monkeypatch.setattr(line_scans, name, value)


@pytest.mark.parametrize(("shape", "axis"), SHAPES)
def test_cumulative_functions(shape: tuple[int, ...], axis: int) -> None:
    rng = np.random.default_rng(0)
    with machine(1, devices=1) as m, m.backend.on(m.devices[0]):
        kernels = spread(itertools.product(("cumsum", "cumprod"), DTYPES), 2)
        calls = itertools.product(kernels, (1, -1))
        for (name, (given, made)), step in spread(calls, 3, SHAPES.index((shape, axis))):
            numbers = {
                "cumsum": rng.integers(0, 2 if given == "?" else 9, shape),
                "cumprod": rng.choice([1, 1, 1, 2], shape),
            }
            host = numbers[name].astype(given)
            x = m.cupy.asarray(host)
            found = getattr(m.backend.xp, name)(x[::step], axis=axis, dtype=np.dtype(made))
            wanted = getattr(np, name)(host[::step], axis=axis, dtype=np.dtype(made))
            np.testing.assert_array_equal(m.backend.to_host(found, m.devices[0]), wanted, strict=True)
            found = getattr(m.backend.xp, name)(x, axis=axis)
            assert found.dtype == getattr(np, name)(host, axis=axis).dtype


def test_which_are_accumulated_so(monkeypatch: pytest.MonkeyPatch) -> None:
    with machine(1, devices=1) as m, m.backend.on(m.devices[0]):
        xp, x, names = m.backend.xp, m.cupy.ones((100, 20), "f4"), launched(monkeypatch)

        def launches(function: Any, *args: Any, **kwargs: Any) -> list[str]:
            names.clear()
            function(*args, **kwargs)
            return list(names)

        kernels = [f"shardtensor_{name}" for name in ("totals", "before", "scan")]
        assert launches(xp.cumsum, x, axis=0) == kernels
        assert launches(xp.cumsum, x[0], axis=0) == ["shardtensor_scan"], "one part"
        assert launches(xp.cumprod, x.reshape(-1)) == kernels
        assert "shardtensor_scan" not in launches(xp.cumsum, x[:7], axis=0), "short lines"
        assert "shardtensor_scan" not in launches(xp.cumsum, x.astype("f2"), axis=0)
        assert "shardtensor_scan" not in launches(xp.cumsum, x.astype("c8"), axis=0)


@pytest.mark.parametrize("count", [1, 4])
def test_tensors(count: int) -> None:
    host = np.arange(800.0)
    with machine(count, devices=1) as m:
        x = st.device_put(host, st.NamedSharding(m.mesh(), st.P("d")))
        np.testing.assert_array_equal(np.asarray(st.cumsum(x)), np.cumsum(host))
        square = st.device_put(host.reshape(40, 20), st.NamedSharding(m.mesh(), st.P("d")))
        np.testing.assert_array_equal(np.asarray(st.cumsum(square, 0)), np.cumsum(host.reshape(40, 20), 0))
        np.testing.assert_array_equal(np.asarray(st.cumsum(square, 1)), np.cumsum(host.reshape(40, 20), 1))


def test_one_line_is_sorted_as_one_dimension(monkeypatch: pytest.MonkeyPatch) -> None:
    with machine(1, devices=1) as m, m.backend.on(m.devices[0]):
        host = np.random.default_rng(0).permutation(30)
        for axis, shape in ((1, (1, 30)), (-1, (1, 30)), (0, (30, 1)), (1, (1, 30, 1))):
            x = m.cupy.asarray(host.reshape(shape))
            for name in ("sort", "argsort"):
                given: list[int] = []
                own = getattr(m.backend.xp._compat, name)
                with monkeypatch.context() as patch:
                    patch.setattr(
                        m.backend.xp._compat,
                        name,
                        lambda x, own=own, given=given, **kw: given.append(x.ndim) or own(x, **kw),
                    )
                    found = getattr(m.backend.xp, name)(x, axis=axis)
                assert given == [1]
                wanted = getattr(np, name)(host.reshape(shape), axis=axis)
                np.testing.assert_array_equal(m.backend.to_host(found, m.devices[0]), wanted)


def test_lines_are_sorted_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large_ufuncs, "LARGE", 1)
    rng = np.random.default_rng(0)
    with machine(1, devices=1) as m, m.backend.on(m.devices[0]):
        names = launched(monkeypatch)
        for dtype, axis, stable in itertools.product(("f4", "i4", "u4", "f8"), (0, 1, -1), (False, True)):
            host = rng.integers(-90, 90, (7, 11, 5)).astype(dtype)
            if dtype == "f4":
                host = host / 7
                host[0, 0, 0], host[1, 3], host[2, ::2], host[3, 1:4], host[4, 2] = np.nan, -np.inf, np.inf, -np.nan, 0
            x, wanted = m.cupy.asarray(host), np.sort(host, axis)
            for array in (x, m.cupy.asarray(np.ascontiguousarray(host.T)).T):
                names.clear()
                found = m.backend.xp.sort(array, axis=axis, stable=stable)
                own = "shardtensor_sort_keys_" + host.dtype.name in names
                assert own == (dtype in ("i4", "u4") or (dtype == "f4" and not stable))
                np.testing.assert_array_equal(m.backend.to_host(found, m.devices[0]), wanted, strict=True)
                assert found.flags.c_contiguous or not own
