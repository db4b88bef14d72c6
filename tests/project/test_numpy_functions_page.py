"""The page of NumPy's functions is up to date, and the calls by which it is measured return NumPy's results."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import numpy as np
import pytest

import shardtensor as st
from shardtensor.functions.algorithms import first_device
from shardtensor.functions.linalg import panels
from tests.numpy_calls import METHODS, MODULES, NO_ARRAYS, functions_of
from tests.numpy_table import ARRAYS, PAGE, SIZES, TITLES, leaves, measured, operands_of, page, section

CALLS = {title: calls for title, (_, calls) in MODULES.items()} | {ARRAYS: METHODS}

measured = functools.cache(measured)

TITLES_BY_TIER = [pytest.param(title, marks=pytest.mark.full if title == "numpy.linalg" else ()) for title in TITLES]
"""The functions of `numpy.linalg` take as long as all others, on matrices that are large enough to be divided."""

OTHERWISE = {
    "eig": "eigenvalues that are real are complex here, as in the standard", "eigvals": "likewise",
    "empty_like": "no values", "unique_values": "the order", "nested_iters": "iterators",
    "argpartition": "the order of the parts", "partition": "likewise", "lstsq": "the rank is an int", "qr": "signs", "svd": "signs", "eigh": "signs",
}  # fmt: skip
"""Functions whose results differ from NumPy's in this."""


def test_every_function_has_a_call() -> None:
    for title, (module, calls) in MODULES.items():
        assert set(functions_of(module)) - NO_ARRAYS == set(calls) - NO_ARRAYS, title
    assert set(METHODS) >= {name for name in dir(np.ndarray) if not name.startswith("_")}


def test_the_introduction_is_up_to_date() -> None:
    """The sections are those of the page, each of which another test compares."""
    text = PAGE.read_text()
    found = [f"\n## {part}".removesuffix("\n") for part in text.split("\n## ")[1:]]
    if _version_of(text):
        assert text == page(found), "run python -m tests.numpy_table"
        assert [part.split()[1] for part in found] == list(TITLES)


def _version_of(text: str) -> bool:
    """Whether the page describes this version of NumPy."""
    return f"NumPy {'.'.join(np.__version__.split('.')[:2])} " in text


def test_the_operands_are_large_enough_to_be_divided() -> None:
    assert 8 * SIZES["rows"] > first_device.GATHERED == 64 << 10  # the introduction names both sizes
    assert SIZES["side"] > panels.GATHERED == 1024


@pytest.mark.parametrize("title", TITLES_BY_TIER)
def test_the_section_is_up_to_date(title: str) -> None:
    text = PAGE.read_text()
    if not _version_of(text):
        pytest.skip("the page describes another version of NumPy")
    assert f"{section(title, measured(title))}\n" in text, "run python -m tests.numpy_table"


def test_at_most_five_percent_of_numpys_functions_are_refused() -> None:
    rows = measured("numpy")
    assert sum(row.kind == "refused" for row in rows.values()) <= 0.05 * len(rows)


@pytest.mark.parametrize("title", TITLES_BY_TIER)
def test_the_measured_results_are_numpys(title: str) -> None:
    for name, row in measured(title).items():
        if row.kind == "refused" and title != ARRAYS:
            assert "np.asarray(" in row.error, name
        if row.kind == "refused" or name in {*OTHERWISE, *NO_ARRAYS}:
            continue
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            wanted = leaves(CALLS[title][name](operands_of(name)))
        found = leaves(row.result)
        assert len(found) == len(wanted), name
        for mine, numpys in zip(found, wanted, strict=True):
            assert_numpys_result(name, row.kind, mine, numpys)


def assert_numpys_result(name: str, kind: str, found: Any, wanted: Any) -> None:
    if isinstance(wanted, (np.ndarray, np.generic)):
        assert isinstance(found, st.ShardedTensor) or kind in ("on the host", "metadata"), name
        assert (np.shape(found), np.asarray(found).dtype) == (wanted.shape, wanted.dtype), name
        np.testing.assert_allclose(np.asarray(found), wanted, rtol=1e-7, atol=1e-9, err_msg=name)
    elif isinstance(wanted, (bool, int, float, np.dtype, tuple)):
        assert found == wanted, name
