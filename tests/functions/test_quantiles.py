"""Medians and quantiles against NumPy on both sides of the sizes from which elements are selected or gathered.

Elements are infinite, NaN or the greatest of their dtype, and ranks exceed the range of float16.
"""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import numpy as np
import pytest

import shardtensor as st
from shardtensor import P
from shardtensor.host import host_selection
from tests.functions.test_order import METHODS
from tests.layouts import everywhere, put, strided
from tests.pairs import spread

SMALL, LARGE = (97,), (66_000,)
SHAPES = [(SMALL, None), (LARGE, None), ((3, 23_000), 1), ((3, 23_000), None)]
DTYPES = ["float16", "float32", "float64", "int8", "int64", "uint8"]
QUANTILES: list[Any] = [
    0, 1, 0.3, 0.5, 1.0, True, np.float64(0.3), np.float32(0.7), [0, 1], [0.25, 1], np.array([0.1, 0.7], "float32"),
]  # fmt: skip


def elements(dtype: str, shape: tuple[int, ...], kind: str) -> np.ndarray:
    """Returns numbers, of which most are infinite, some are NaN, or all are among the greatest of their dtype."""
    rng = np.random.default_rng(len(kind) + shape[-1])
    if np.dtype(dtype).kind != "f":
        limits = np.iinfo(dtype)
        return rng.integers(limits.min, limits.max, shape, dtype, endpoint=True)
    x = (100 * rng.normal(size=shape)).astype(dtype)
    if kind == "greatest":
        return np.where(x > 0, np.finfo(dtype).max, np.finfo(dtype).max / 2).astype(dtype)
    special = {"infinite": np.inf, "-infinite": -np.inf, "nan": np.nan}
    return x if kind == "numbers" else np.where(rng.random(shape) < 0.6, special[kind], x).astype(dtype)


def assert_as_numpy(function: Any, x: np.ndarray, y: Any) -> None:
    """Asserts that a function of NumPy gives the same elements and dtype of a tensor as of an array.

    NumPy's dtype depends on elements if a scalar is NaN.
    """
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        wanted, found = np.asarray(function(x)), np.asarray(function(y))
    assert found.dtype == wanted.dtype or (wanted.ndim == 0 and np.isnan(wanted))
    np.testing.assert_array_equal(found, wanted)


def kinds_of(dtype: str) -> list[str]:
    return ["numbers", "infinite", "-infinite", "nan", "greatest"] if dtype[0] == "f" else ["numbers"]


CASES = [(d, shape, kind) for d in DTYPES for shape in SHAPES for kind in kinds_of(d)]


@everywhere
@pytest.mark.parametrize("step", range(8))
def test_quantiles_are_numpys(backend: str, step: int) -> None:
    pairs = list(itertools.product(QUANTILES, METHODS))
    for number, (dtype, (shape, axis), kind) in enumerate(spread(CASES[step::8], 2, step)):
        x = elements(dtype, shape, kind)
        specs = [P("x")] if len(shape) == 1 else [P("x"), P(None, "x")]
        for y in [put(x, backend, spec=spec) for spec in strided(specs, 2, number)]:
            assert_as_numpy(lambda a, axis=axis: np.median(a, axis=axis), x, y)
            assert_as_numpy(lambda a, axis=axis: np.nanmedian(a, axis=axis, keepdims=True), x, y)
            for k, (q, method) in enumerate(pairs[(number + step) % 29 :: 29]):
                name = "nanquantile" if k % 2 else "quantile"
                assert_as_numpy(
                    lambda a, n=name, q=q, m=method, axis=axis: getattr(np, n)(a, q, axis=axis, method=m), x, y
                )
            assert_as_numpy(lambda a, axis=axis: np.percentile(a, 30, axis=axis), x, y)
            assert_as_numpy(lambda a, axis=axis: np.nanpercentile(a, [0, 100], axis=axis), x, y)


@everywhere
@pytest.mark.parametrize("dtype", DTYPES)
def test_quantiles_of_long_lines_are_selected_by_samples(
    backend: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_selection, "_SELECTED_FROM", 10_000)
    monkeypatch.setattr(host_selection, "_INTEGERS_FROM", 10_000)
    monkeypatch.setattr(host_selection, "_BLOCK", 1 << 14)
    for kind in kinds_of(dtype):
        for shape, axis in ((LARGE, None), ((3, 23_000), 1)):
            x = elements(dtype, shape, kind)
            y = put(x, backend)
            assert_as_numpy(lambda a, axis=axis: np.median(a, axis=axis), x, y)
            assert_as_numpy(lambda a, axis=axis: np.percentile(a, [0, 5, 50, 95, 100], axis=axis), x, y)


@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_medians_and_quantiles_are_those_of_programs_and_logs(dtype: str) -> None:
    x = elements(dtype, LARGE, "infinite")
    y = put(x, "numpy")
    for function in (np.median, np.nanmedian, lambda a: np.quantile(a, 1), lambda a: np.nanquantile(a, 0.2)):
        program = st.jit(function)
        assert_as_numpy(lambda a, f=function, p=program: f(a) if a is x else p(a), x, y)
        with st.transfers():
            assert_as_numpy(function, x, y)


@everywhere
def test_medians_of_values_that_overflow_when_added(backend: str) -> None:
    for size in (4, 40_000):
        x = np.full(size, 60_000, "float16")
        assert_as_numpy(np.median, x, put(x, backend))
        assert_as_numpy(np.nanmedian, x, put(x, backend))


DURABLE = ["numpy", "checked"]
"""The backends that have arrays of durations."""


@pytest.mark.parametrize("backend", DURABLE)
@pytest.mark.parametrize("shape", [(6,), (3, 5), (100, 90)])
def test_quantiles_of_durations_treat_nat_as_nan(backend: str, shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(3)
    for part in (0, 0.2, 1):
        x = rng.integers(-9, 20, shape).astype("m8[s]")
        x[rng.random(shape) < part] = "NaT"
        y = put(x, backend)
        for axis in (None, -1):
            for name in ("median", "nanmedian"):
                assert_as_numpy(lambda a, n=name, axis=axis: getattr(np, n)(a, axis=axis), x, y)
            for k, method in enumerate(METHODS):
                name = ("quantile", "nanquantile")[(k + len(shape)) % 2]
                for q in (0.3, [0.0, 1.0]):
                    assert_as_numpy(
                        lambda a, n=name, q=q, m=method, axis=axis: getattr(np, n)(a, q, axis=axis, method=m), x, y
                    )
        assert_as_numpy(lambda a: np.nanpercentile(a, 30.5, method="weibull"), x, y)
        for name in ("nanmax", "nanmin"):
            for dtype in ("m8[s]", "M8[s]"):
                assert_as_numpy(lambda a, n=name, d=dtype: getattr(np, n)(a.astype(d), axis=-1), x, y)
    assert_as_numpy(lambda a: st.jit(np.median)(a) if a is y else np.median(a), x, y)


@everywhere
@pytest.mark.parametrize("method", ["nearest", "higher", "lower", "inverted_cdf", "linear"])
def test_nanquantiles_of_no_integers_are_nan(backend: str, method: str) -> None:
    for dtype in ("int32", "uint8", "bool"):
        x = np.zeros((0, 3), dtype)
        y = put(x, backend, spec=P())
        for axis in (None, 0, 1):
            assert_as_numpy(lambda a, axis=axis: np.nanquantile(a, 0.5, axis=axis, method=method), x, y)
        assert_as_numpy(lambda a: np.nanpercentile(a, 30, method=method), x, y)
        for q, shape in ((0.5, (3,)), ([0.5, 1], (2, 3))):  # NumPy's result lacks the dimension of the quantiles.
            function = st.jit(lambda a, q=q: np.nanquantile(a, q, axis=0, method=method))
            assert_as_numpy(lambda a, f=function, n=shape, x=x: np.full(n, np.nan) if a is x else f(a), x, y)


@pytest.mark.parametrize("axis", [None, 0, (0, 1), -1])
@pytest.mark.parametrize("name", ["quantile", "percentile"])
def test_no_elements_have_no_quantiles(name: str, axis: Any) -> None:
    """Also where the tensor is small, compiled, or has no elements here: the shape determines it."""
    large = (0, 100_000, 0) if axis == -1 else (0, 100_000)
    for function in (getattr(st, name), getattr(np, name)):
        for x in (st.zeros((0, 0)), st.zeros(large)):
            for call in (function, st.jit(function, static_argnames=("axis",))):
                with pytest.raises(st.IndexingError, match=rf"{name}: x has shape .*, with no elements"):
                    call(x, 0.5, axis=axis)


def test_other_quantiles_of_no_elements() -> None:
    x = st.zeros((0, 3))
    assert st.quantile(x, [0.5, 1], axis=1).shape == (2, 0)
    assert np.isnan(st.nanquantile(x, 0.5).item())
