"""`round` against NumPy, below and above the size from which threads compute blocks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import shardtensor as st
from tests.layouts import assert_equal, everywhere, put

DTYPES = ["bool", "int8", "uint8", "int16", "int32", "int64", "float16", "float32", "float64", "complex64"]
UNSIGNED = ["uint16", "uint32", "uint64"]


def numbers(dtype: str, size: int) -> np.ndarray:
    x = np.random.default_rng(size).integers(0 if dtype[0] == "u" else -1000, 1000, size).astype(dtype)
    return x / np.dtype(dtype).type(7) if x.dtype.kind in "fc" else x


@everywhere
@pytest.mark.parametrize("size", [10, 600_000])
@pytest.mark.parametrize("decimals", [-20, -2, -1, 0, 1, True, np.int64(-1)])
@np.errstate(all="ignore")
def test_every_number_of_decimals(backend: str, size: int, decimals: Any) -> None:
    for dtype in [*DTYPES, *(() if backend == "torch" else UNSIGNED)]:
        x = numbers(dtype, size)
        if dtype == "bool" and decimals:
            continue  # NumPy raises an error.
        y = put(x, backend)
        assert_equal(np.round(y, decimals), np.round(x, decimals))
        assert_equal(y.round(decimals), x.round(decimals))
        if backend == "numpy":
            assert_equal(st.jit(lambda a: np.around(a, decimals))(y), np.around(x, decimals))
            with st.transfers():
                assert_equal(st.round(y, decimals), x.round(decimals))


def test_results_are_written_into_integers() -> None:
    x = numbers("int32", 600_000)
    out = st.zeros_like(put(x, "numpy"))
    np.round(put(x, "numpy"), -1, out=out)
    assert_equal(out, np.round(x, -1))
