"""The page of NumPy's functions is up to date, and the calls by which it is measured return NumPy's results."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import numpy as np
import pytest

import shardtensor as st
from tests.numpy_calls import METHODS, MODULES, NO_ARRAYS, Operands, functions_of
from tests.numpy_table import PAGE, Measured, leaves, measure_all, page

CALLS = {title: calls for title, (_, calls) in MODULES.items()} | {"numpy.ndarray": METHODS}

OTHERWISE = {
    "eig": "eigenvalues that are real are complex here, as in the standard", "eigvals": "likewise",
    "empty_like": "no values", "unique_values": "the order", "nested_iters": "iterators",
    "argpartition": "the order of the parts", "partition": "likewise", "lstsq": "the rank is an int", "qr": "signs", "svd": "signs", "eigh": "signs",
}  # fmt: skip
"""Functions whose results differ from NumPy's in this."""


@functools.cache
def measured() -> dict[str, dict[str, Measured]]:
    return measure_all()


def test_every_function_has_a_call() -> None:
    for title, (module, calls) in MODULES.items():
        assert set(functions_of(module)) - NO_ARRAYS == set(calls) - NO_ARRAYS, title
    assert set(METHODS) >= {name for name in dir(np.ndarray) if not name.startswith("_")}


def test_the_page_is_up_to_date() -> None:
    text = PAGE.read_text()
    if f"NumPy {'.'.join(np.__version__.split('.')[:2])} " not in text:
        pytest.skip("the page describes another version of NumPy")
    assert text == page(measured()), "run python -m tests.numpy_table"


def test_at_most_five_percent_of_numpys_functions_are_refused() -> None:
    rows = measured()["numpy"]
    refused = {name: row.error for name, row in rows.items() if row.kind == "refused"}
    assert len(refused) <= 0.05 * len(rows)
    for title in MODULES:
        for name, row in measured()[title].items():
            assert row.kind != "refused" or "np.asarray(" in row.error, name


@pytest.mark.parametrize("title", CALLS)
def test_the_measured_results_are_numpys(title: str) -> None:
    for name, row in measured()[title].items():
        if row.kind == "refused" or name in {*OTHERWISE, *NO_ARRAYS}:
            continue
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            wanted = leaves(CALLS[title][name](Operands()))
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
