"""Reductions of more float16 numbers than float16 can count: counts, means and deviations do not overflow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.layouts import everywhere, put

SIZE = 70_002

LIKE_NUMPY: dict[str, Callable[[Any], Any]] = {
    "mean": lambda x: np.mean(x),
    "mean in float16": lambda x: np.mean(x, dtype="float16"),
    "mean of bools in float16": lambda x: np.mean(x > 1, dtype="float16"),
    "average": lambda x: np.average(x),
    "count": lambda x: np.count_nonzero(x),
    "trapezoid": lambda x: np.trapezoid(x, dx=1e-4),
    "median": lambda x: np.median(x),
    "nanmedian": lambda x: np.nanmedian(x),
    "nanquantile": lambda x: np.nanquantile(x, 0.3),
    "percentile": lambda x: np.percentile(x, [10, 90]),
    "covariance": lambda x: np.cov(x.reshape(2, -1)),
    "digits": lambda x: np.digitize(x, np.array([0.0, 1.0, 2.0])),
}

WIDER: dict[str, Callable[[Any], Any]] = {
    "variance": lambda x: np.var(x),
    "standard deviation": lambda x: np.std(x, ddof=1),
    "mean of selected": lambda x: np.mean(x, where=x > 0),
    "variance of selected": lambda x: np.var(x, where=x > 0),
    "nanmean": lambda x: np.nanmean(x),
    "nanvar": lambda x: np.nanvar(x),
    "nanstd": lambda x: np.nanstd(x),
}
"""Functions that NumPy computes in float16, where its results are infinite."""


def elements() -> np.ndarray:
    return np.abs(3 * np.random.default_rng(0).normal(size=SIZE)).astype("float16")


@everywhere
@np.errstate(all="ignore")
def test_results_are_numpys(backend: str) -> None:
    x = elements()
    for name, function in LIKE_NUMPY.items():
        wanted, found = np.asarray(function(x)), np.asarray(function(put(x, backend)))
        assert found.dtype == wanted.dtype, name
        np.testing.assert_allclose(found.astype(float), wanted.astype(float), 2e-3, err_msg=name)


@everywhere
@pytest.mark.filterwarnings("ignore")
def test_deviations_are_computed_in_float32(backend: str) -> None:
    x = elements()
    for name, function in WIDER.items():
        found = np.asarray(function(put(x, backend)))
        assert found.dtype == np.float16, name
        np.testing.assert_allclose(found.astype(float), function(x.astype(float)), 2e-3, err_msg=name)
