"""Warnings of functions that NumPy gives, too: at the line of the program, and only where NumPy gives them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import shardtensor as st
from tests.layouts import everywhere, put

A = np.arange(12.0).reshape(4, 3)

FREEDOM, RANK = "Degrees of freedom <= 0 for slice", "Polyfit may be poorly conditioned"

CALLS: dict[str, tuple[Callable[[Any], Any], str | None]] = {
    "var of a row": (lambda x: x[:1].var(axis=0, ddof=1), FREEDOM),
    "std of all": (lambda x: np.std(x, ddof=12), FREEDOM),
    "std of fewer than ddof": (lambda x: np.std(x, ddof=20), FREEDOM),
    "var of columns": (lambda x: np.var(x, axis=0, ddof=4), FREEDOM),
    "enough elements": (lambda x: np.var(x, axis=0, ddof=3), None),
    "cov of one observation": (lambda x: np.cov(x[:1], rowvar=False), FREEDOM),
    "polyfit": (lambda x: np.polyfit(x[:, 0], x[:, 1], 8), RANK),
    "polyfit of equal points": (lambda x: np.polyfit(x[:, 0] * 0 + 1, x[:, 1], 1), RANK),
    "polyfit of enough points": (lambda x: np.polyfit(x[:, 0], x[:, 1], 1), None),
    "polyfit with the rank": (lambda x: np.polyfit(x[:, 0], x[:, 1], 8, full=True), None),
}


def given_by(call: Callable[[Any], Any], x: Any) -> tuple[set[tuple[type[Warning], str]], set[str]]:
    """Returns the classes and messages of the warnings of a call that are none of floating-point errors, and the files
    that they name.
    """
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        call(x)
    found = [w for w in seen if "encountered" not in str(w.message)]
    return {(w.category, str(w.message)) for w in found}, {w.filename for w in found}


@everywhere
@pytest.mark.parametrize("name", CALLS)
def test_functions_warn_as_numpys(name: str, backend: str) -> None:
    call, message = CALLS[name]
    wanted, _ = given_by(call, A)
    assert {text for _, text in wanted} == ({message} if message else set())
    found, files = given_by(call, put(A, backend, (4,)))
    assert found == wanted
    assert files <= {__file__}


def test_a_warning_may_be_an_error() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", np.exceptions.RankWarning)
        with pytest.raises(np.exceptions.RankWarning):
            st.polyfit(st.arange(5.0), st.arange(5.0), 8)
