"""`interp` of real and complex values against NumPy, with points and values that are not finite."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import shardtensor as st
from tests.layouts import everywhere, put, strided


def values_at(rng: np.random.Generator, dtype: str, count: int, special: bool) -> np.ndarray:
    made = 5 * rng.normal(size=count)
    made = made + 1j * rng.normal(size=count) if dtype[0] == "c" else made
    made = made.astype(dtype)
    if special and dtype[0] in "fc":
        made[[2, 4]] = np.inf, np.nan
        if dtype[0] == "c":
            made[[5, 0]] = complex(1, np.inf), complex(np.nan, 2)
    return made


@everywhere
@pytest.mark.parametrize("size", [30, 10_000])
@np.errstate(all="ignore")
def test_values_are_numpys(size: int, backend: str) -> None:
    rng = np.random.default_rng(size)
    for number, dtype in enumerate(["float16", "float64", "int64"]):
        x = (3 * rng.normal(size=size)).astype(dtype)
        if dtype[0] == "f":
            x[::11], x[1::11], x[2::11] = np.nan, np.inf, -np.inf
        for count in (1, 2, 7):
            points = np.sort(3 * rng.normal(size=count))
            for kind in strided(("complex128", "complex64", "float64", "int32"), 2, number + count):
                y = values_at(rng, kind, count, count == 7 and number < 2)
                ends: list[dict[str, Any]] = [{}, {"left": -1, "right": np.float32(2.5)}, {"period": 2.5}]
                for kwargs in (*ends, *([{"left": 1j, "right": 1 + 2j}] if kind[0] == "c" else [])):
                    wanted = np.interp(x, points, y, **kwargs)
                    a, b, c = [put(part, backend) for part in (x, points, y)]
                    for found in (np.interp(a, b, c, **kwargs), st.interp(a, points, y, **kwargs)):
                        assert found.dtype == wanted.dtype
                        np.testing.assert_allclose(found, wanted, 1e-12, 1e-12)
            program = st.jit(lambda a, p=points, y=y: st.interp(a, p, y))
            np.testing.assert_allclose(program(a), np.interp(x, points, y), 1e-12, 1e-12)


@pytest.mark.parametrize("name", ["left", "right"])
def test_complex_ends_of_real_values_are_refused(name: str) -> None:
    with pytest.raises(st.ArgumentTypeError, match=name):
        st.interp(st.arange(3.0), [0.0, 1.0], [1.0, 2.0], **{name: 1j})


@everywhere
def test_zeros_of_both_signs_at_the_ends_are_told_apart(backend: str) -> None:
    x = put(np.array([-1.0, 0.5, 9.0]), backend)
    for zero in (-0.0, 0.0, -0.0):
        found = np.asarray(np.interp(x, [0.0, 1.0], [1.0, 2.0], left=zero, right=zero))
        assert np.signbit(found).tolist() == [np.signbit(zero), False, np.signbit(zero)]
