"""Programs read values in place of copies of them, and their results are tensors of their own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import shardtensor as st
from tests.interpreters.jit.eager import check_under_jit
from tests.layouts import everywhere, put

X = np.arange(12.0).reshape(6, 2)


def written_after(x: Any) -> Any:
    y = x * 2
    z = y.copy()
    y[0] = 5
    return y, z


def copies_of_one(x: Any) -> Any:
    y = x * 2
    return y.copy(), y.copy(), y


def copied_twice(x: Any) -> Any:
    return (x * 2).copy().copy(), x.copy()


def a_written_copy(x: Any) -> Any:
    y = x.copy()
    y[1:] = x[:-1]
    z = st.reshard(y, y.sharding)
    z *= 2
    return y, z, x


def a_copied_view(x: Any) -> Any:
    y = x + 1
    z = y[1:].copy()
    y[2] = 0
    return y, z


def in_a_loop(x: Any) -> Any:
    y = x.copy()
    return st.fori_loop(0, 3, lambda i, z: z + y, x), (x * 3).copy()


PROGRAMS = [written_after, copies_of_one, copied_twice, a_written_copy, a_copied_view, in_a_loop]


@everywhere
@pytest.mark.parametrize("fn", PROGRAMS)
def test_results_are_tensors_of_their_own(fn: Any, backend: str) -> None:
    x = put(X, backend)
    check_under_jit(fn, x, executor="numpy")
    traced = st.jit(fn)
    wanted = [np.array(y) for y in fn(x)]
    for k in range(len(wanted)):
        found = traced(x)
        found[k][...] = -1
        np.testing.assert_array_equal(x, X if found[k] is not x else np.full_like(X, -1))
        for n, y in enumerate(found):
            if n != k and found[k] is not y:
                np.testing.assert_array_equal(y, wanted[n])
        x = put(X, backend)


def test_the_program_of_a_gradient_has_no_copies() -> None:
    x, w = put(X, "numpy"), st.device_put(np.ones((2, 2)), put(X, "numpy").sharding.with_spec(st.P()))
    fn = st.jit(st.grad(lambda w, x: (st.tanh(x @ w) ** 2).sum()))
    text = fn.lower(w, x).as_text()
    assert "copy" not in text.replace("copy=", "")
    assert "transfer_to" not in text
