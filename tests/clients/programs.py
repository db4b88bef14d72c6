"""Runs programs on NumPy's arrays and on tensors, and compares the results."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

import shardtensor as st

COUNTS = (3, 8)
"""The numbers of devices on which programs run. No length in these tests is a multiple of either."""

on_meshes = pytest.mark.parametrize("count", COUNTS)

Program = Callable[..., Any]


class Lazy:
    """A module that is imported when a name of it is used: only in the worker of pytest-xdist that runs its tests."""

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # pytest asks every name of a module of tests whether it is a fixture.
            raise AttributeError(name)
        return getattr(importlib.import_module(self.__name__), name)


def lazily(library: str, *names: str, title: str = "", extra: str = "clients") -> Any:
    """Returns a library, or modules of it, that are imported on use. Skips the module that asks where it is not installed."""
    if find_spec(library) is None:
        pytest.skip(f"{title or library} is not installed: see the extra `{extra}`", allow_module_level=True)
    return [Lazy(f"{library}.{name}") for name in names] if names else Lazy(library)


@contextlib.contextmanager
def devices(count: int) -> Iterator[st.Mesh]:
    """Makes a mesh of ``count`` devices the default, so that arrays that a library creates are split over them, too.

    A context manager, whose value is the mesh.
    """
    mesh = st.Mesh(np.array(st.devices()[:count]), ("d",))
    with st.use_mesh(mesh):
        yield mesh


def numbers(*shape: int, dtype: str = "float64", seed: int = 0) -> np.ndarray:
    """Returns normally distributed numbers; for integers, their magnitudes times ten, rounded."""
    drawn = np.random.default_rng(seed).normal(size=shape)
    if np.dtype(dtype).kind in "iu":
        drawn = np.round(10 * np.abs(drawn))
    if np.dtype(dtype).kind == "c":
        drawn = drawn + 1j * np.random.default_rng(seed + 1).normal(size=shape)
    return drawn.astype(dtype)


def compared(program: Program, *arrays: np.ndarray, count: int, rtol: float = 1e-9, atol: float = 1e-11) -> None:
    """Asserts that a program has equal results for tensors and for NumPy's arrays, with tensors in place of arrays.

    The first argument of a program is the namespace, the others are the arrays.
    """
    wanted = program(np, *[a.copy() for a in arrays])
    with devices(count):
        found = program(st, *[st.asarray(a) for a in arrays])
    assert_equal(found, wanted, rtol, atol)


def assert_equal(found: Any, wanted: Any, rtol: float, atol: float, at: str = "result") -> None:
    """Asserts that nested results are equal: containers item by item, and arrays by their dtype and elements."""
    if isinstance(wanted, dict):
        assert found.keys() == wanted.keys(), at
        for key in wanted:
            assert_equal(found[key], wanted[key], rtol, atol, f"{at}[{key!r}]")
    elif isinstance(wanted, (list, tuple)):
        assert len(found) == len(wanted), at
        for number, pair in enumerate(zip(found, wanted, strict=True)):
            assert_equal(*pair, rtol, atol, f"{at}[{number}]")
    elif isinstance(wanted, np.ndarray):
        assert isinstance(found, st.ShardedTensor), f"{at} is a {type(found)}"
        assert found.dtype == wanted.dtype, at
        close(found, wanted, rtol, atol, at)
    elif isinstance(wanted, (float, complex, np.generic)):
        close(found, wanted, rtol, atol, at)
    else:
        assert found == wanted, at


def close(found: Any, wanted: Any, rtol: float, atol: float, at: str) -> None:
    assert np.shape(found) == np.shape(wanted), at
    host = np.asarray(found)
    if host.dtype.kind in "fc":
        np.testing.assert_allclose(host, wanted, rtol=rtol, atol=atol, err_msg=at)
    else:
        np.testing.assert_array_equal(host, wanted, err_msg=at)
