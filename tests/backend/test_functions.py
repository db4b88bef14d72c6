"""Operators that a backend's library lacks: their compositions, compared with NumPy's functions."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from shardtensor.backend import function_of
from shardtensor.backend.registry import load
from shardtensor.core import OPS
from tests.layouts import DTYPES
from tests.operands import BINARY, UNARY, defined_operands, values

COMPOSED = [name for name in (*UNARY, *BINARY) if OPS[name].parts.composed]


@pytest.fixture
def lacking(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Returns the composition of an operator on NumPy's arrays, as of a library that lacks its function."""

    class Library:
        lacks: str

        def __getattr__(self, name: str) -> Any:
            if name == self.lacks:
                raise AttributeError(name)
            return getattr(np, name)

    backend, library = load("numpy"), Library()
    monkeypatch.setattr(type(backend), "xp", library)

    def composition(name: str) -> Any:
        library.lacks = name
        return function_of(backend, name)

    return composition


def compare(found: Any, wanted: Any, ulps: float) -> None:
    assert isinstance(found, np.ndarray | np.generic)
    assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
    tolerance = ulps * float(np.finfo(wanted.dtype).eps) if wanted.dtype.kind in "fc" else 0
    np.testing.assert_allclose(found, wanted, rtol=tolerance, atol=0)


@pytest.mark.parametrize("name", COMPOSED)
def test_compositions_have_numpys_results(name: str, lacking: Any) -> None:
    composition = lacking(name)
    for dtypes in itertools.product(DTYPES, repeat=len(OPS[name].operands)):
        operands = [values(dtype, 60, seed) for seed, dtype in enumerate(dtypes)]
        if len(operands) == 2:
            operands = [*defined_operands(name, *operands)]
        if name == "exp2" and dtypes[0].startswith("complex"):  # C leaves the complex powers of infinities open.
            operands = [x[np.isfinite(x)] for x in operands]
        with np.errstate(all="ignore"):
            try:
                wanted = getattr(np, name)(*operands)
            except TypeError:
                with pytest.raises(TypeError):
                    composition(*operands)
                continue
            compare(composition(*operands), wanted, 80 if name == "float_power" else 8)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_ldexp_is_exact_over_all_exponents(dtype: str, lacking: Any) -> None:
    """Also where the power of two overflows, or where the result is subnormal, which is rounded once."""
    info, rng = np.finfo(dtype), np.random.default_rng(0)
    x = np.concatenate([rng.uniform(1, 2, 40), [0.0, -0.0, np.inf, -np.inf, np.nan]]).astype(dtype)
    x = np.concatenate([x, x * info.tiny, x * info.smallest_subnormal, x * (info.max / 2), [-1.5 * info.tiny]])
    n = np.concatenate([np.arange(-2200, 2200, 7), np.arange(-60, 60), [-(2**40), 2**40, -(2**31), 2**31 - 1]])
    with np.errstate(all="ignore"):
        found, wanted = lacking("ldexp")(x.astype(dtype)[:, None], n), np.ldexp(x.astype(dtype)[:, None], n)
    assert found.dtype == wanted.dtype
    np.testing.assert_array_equal(found, wanted)
    np.testing.assert_array_equal(np.signbit(found[wanted == 0]), np.signbit(wanted[wanted == 0]))


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_spacing_is_exact_at_every_magnitude(dtype: str, lacking: Any) -> None:
    info, rng = np.finfo(dtype), np.random.default_rng(0)
    bits = rng.integers(0, 256, (1 << 16) * np.dtype(dtype).itemsize, np.uint8).view(dtype)
    x = np.concatenate([bits, np.array([0.0, -0.0, np.inf, -np.inf, info.max, -info.max], dtype)])
    with np.errstate(all="ignore"):
        found, wanted = lacking("spacing")(x), np.spacing(x)
    assert found.dtype == wanted.dtype
    np.testing.assert_array_equal(found, wanted)


def test_remainders_of_zeros_have_the_sign_of_the_dividend(lacking: Any) -> None:
    x, y = np.array([0.0, -0.0, 6.0, -6.0])[:, None], np.array([3.0, -3.0, np.inf, -np.inf])
    found = lacking("fmod")(x, y)
    np.testing.assert_array_equal(found, np.fmod(x, y))
    np.testing.assert_array_equal(np.signbit(found), np.signbit(np.fmod(x, y)))
