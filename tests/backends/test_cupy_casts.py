"""Copies of large arrays by kernels of the CuPy backend, on the simulated CuPy."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from shardtensor_cupy.kernels import elementwise_kernel, large_ufuncs

import shardtensor as st
from tests.backends.test_cupy import launched, machine
from tests.backends.test_cupy_elementwise import LAYOUTS, laid_out, numbers
from tests.conftest import NO_GPU
from tests.pairs import spread

pytestmark = pytest.mark.skipif(not NO_GPU, reason="the double takes the place of CuPy")

SHAPES = ((300,), (4, 8), (3, 5), (2, 3, 8), (40, 70), (3, 33, 9), (0, 3))
DTYPES = (("f4", "f4"), ("f4", "f8"), ("i4", "?"), ("f2", "f2"), ("?", "i8"), ("c8", "c8"), ("c16", "c16"))


@pytest.fixture(autouse=True)
def every_array_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large_ufuncs, "LARGE", 1)
    monkeypatch.setattr(elementwise_kernel, "_THREADS", 32)


@pytest.mark.parametrize("shape", SHAPES)
def test_copies_and_casts(shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    with machine(1, devices=1) as m, m.backend.on(m.devices[0]):
        xp = m.backend.xp
        for (given, made), layout in spread(itertools.product(DTYPES, LAYOUTS), 5, SHAPES.index(shape)):
            x, host = laid_out(m.cupy, numbers(rng, shape, given), layout)
            for other in LAYOUTS[:6]:
                out, _ = laid_out(m.cupy, np.zeros(host.shape, made), other)
                m.backend.store(out, ..., x)
                np.testing.assert_array_equal(m.backend.to_host(out, m.devices[0]), host.astype(made))
            for found in (xp.asarray(x, dtype=np.dtype(made), copy=True), xp.astype(x, np.dtype(made))):
                assert found is not x
                np.testing.assert_array_equal(m.backend.to_host(found, m.devices[0]), host.astype(made), strict=True)
            rows = m.backend.contiguous(x)
            assert rows.flags.c_contiguous
            np.testing.assert_array_equal(m.backend.to_host(rows, m.devices[0]), host)


def test_the_condition_of_where_is_also_a_choice() -> None:
    """The same array: its bools were read as elements of the other choice."""
    mask, other = np.arange(12).reshape(3, 4) % 3 == 0, np.full((3, 4), 2, "c8")
    with machine(1, devices=1) as m, m.backend.on(m.devices[0]):
        c, y = m.cupy.asarray(mask), m.cupy.asarray(other)
        for choices, hosts in (((c, y), (mask, other)), ((y, c), (other, mask)), ((c, c), (mask, mask))):
            result = m.backend.to_host(m.backend.xp.where(c, *choices), m.devices[0])
            np.testing.assert_array_equal(result, np.where(mask, *hosts), strict=True)


@pytest.mark.parametrize("shape", SHAPES)
def test_where(shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(1)
    with machine(1, devices=1) as m, m.backend.on(m.devices[0]):
        kinds = (
            ("f4", "f4"), ("i4", "f8"), ("f2", "f2"), ("i8", 3), (2.5, "f4"), (1, 0), ("c8", "c8"), ("c8", 1j), ("?", 2)
        )  # fmt: skip
        cases = itertools.product(kinds, LAYOUTS[:6], LAYOUTS[:5])
        for (one, two), layout, other in spread(cases, 7, SHAPES.index(shape)):
            c, mask = laid_out(m.cupy, numbers(rng, shape, "?"), other)
            pairs = [
                laid_out(m.cupy, numbers(rng, shape, kind), layout) if isinstance(kind, str) else (kind, kind)
                for kind in (one, two)
            ]
            found = m.backend.xp.where(c, *[x for x, _ in pairs])
            wanted = np.where(mask, *[host for _, host in pairs])
            np.testing.assert_array_equal(m.backend.to_host(found, m.devices[0]), wanted, strict=True)


def test_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    with machine(1, devices=1) as m, m.backend.on(m.devices[0]):
        cupy, names = m.cupy, launched(monkeypatch)
        x = cupy.ones((40, 40), "f4")

        def launches(function: Any, *args: Any, **kwargs: Any) -> list[str]:
            names.clear()
            function(*args, **kwargs)
            return list(names)

        xp, out = m.backend.xp, cupy.empty((40, 40), "f4")
        assert launches(xp.asarray, x, copy=True) == ["copy between devices"]
        assert launches(xp.asarray, x.T, copy=True) == ["copy between devices"]
        assert xp.asarray(x.T, copy=True).flags.f_contiguous, "as CuPy's copies"
        assert launches(m.backend.contiguous, x.T) == ["shardtensor_transpose"]
        assert launches(m.backend.store, out, ..., x.T) == ["shardtensor_transpose"]
        assert launches(m.backend.store, out, slice(1, None), x[1:, :1]) == ["shardtensor_copy_uint32_uint32"]
        assert launches(xp.astype, x.T, np.dtype("f8")) == ["shardtensor_copy_float32_float64"]
        assert launches(m.backend.store, out, slice(1, None), out[:-1]) == ["setitem"], "they overlap"
        assert launches(xp.where, x.astype("?"), x, 0) == ["shardtensor_where_uint32_uint32_uint32"]


def test_tensors_use_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large_ufuncs, "LARGE", 1 << 10)
    host = np.arange(40.0 * 40).reshape(40, 40)
    with machine(1, devices=1) as m:
        x = st.device_put(host, m.devices[0])
        names = launched(monkeypatch)
        y = st.zeros((40, 40), device=m.devices[0])
        y[...] = x.T
        assert "shardtensor_transpose" in names
        np.testing.assert_array_equal(np.asarray(y), host.T)
        names.clear()
        found = st.roll(x, 3, axis=1)
        assert "shardtensor_copy_uint64_uint64" in names
        np.testing.assert_array_equal(np.asarray(found), np.roll(host, 3, 1))
