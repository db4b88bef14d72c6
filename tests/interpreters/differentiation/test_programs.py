"""Gradients of programs: in eager mode, under jit, of recomputed functions, in several layouts, of second order."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import shardtensor as st
from tests.interpreters.differentiation.numeric import check_gradients, slope
from tests.interpreters.differentiation.programs import ON_VALUES, PROGRAMS
from tests.layouts import everywhere, put

SPECS = {"rows": st.P("x"), "columns": st.P(None, "x"), "replicated": st.P()}
TRACED = sorted(set(PROGRAMS) - ON_VALUES)


def matrix(backend: str, spec: st.P = SPECS["rows"]) -> st.ShardedTensor:
    rng = np.random.default_rng(1)
    return put(1 + 0.4 * rng.random((9, 5)), backend, spec=spec)


def gradient(fn: Any, x: Any) -> np.ndarray:
    return np.asarray(st.grad(fn)(x.copy()))


@everywhere
@pytest.mark.parametrize("name", list(PROGRAMS))
def test_programs_agree_with_differences(name: str, backend: str) -> None:
    fn = PROGRAMS[name]
    check_gradients(lambda x: fn(x), [matrix(backend)], [0])


@pytest.mark.parametrize("name", list(PROGRAMS))
def test_the_layout_does_not_change_gradients(name: str) -> None:
    found = [gradient(PROGRAMS[name], matrix("numpy", spec)) for spec in SPECS.values()]
    for g in found[1:]:
        np.testing.assert_allclose(g, found[0], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", TRACED)
def test_programs_under_jit(name: str) -> None:
    fn, x = PROGRAMS[name], matrix("numpy")
    traced = st.jit(st.grad(fn))
    wanted = gradient(fn, x)
    for _ in range(2):
        found = traced(x.copy())
        assert (found.sharding, found.dtype) == (x.sharding, x.dtype)
        np.testing.assert_allclose(np.asarray(found), wanted, rtol=1e-12, atol=1e-12)
    inferred = st.eval_shape(st.grad(fn), x.copy())
    assert (inferred.shape, inferred.sharding) == (x.shape, x.sharding)


@pytest.mark.parametrize("name", sorted(set(PROGRAMS) - {"an_argument_that_is_written"}))
def test_recomputed_programs(name: str) -> None:
    fn, x = PROGRAMS[name], matrix("numpy")
    wanted = gradient(fn, x)
    for policy in (None, st.checkpoint_policies.everything_saveable, lambda op, *_, **__: len(op.name) % 2 == 0):
        np.testing.assert_allclose(gradient(st.remat(fn, policy=policy), x), wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", list(PROGRAMS))
def test_second_derivatives(name: str) -> None:
    fn, x = PROGRAMS[name], matrix("numpy")
    d = np.random.default_rng(2).standard_normal(x.shape)

    def along(x: Any) -> Any:
        return (st.grad(fn)(x) * d).sum()

    second = np.asarray(st.grad(along)(x.copy()))
    wanted = slope(lambda x: along(x), [x], [d], 1e-5)
    assert abs(float((second * d).sum()) - wanted) <= 1e-5 * (1 + abs(wanted) + np.abs(second).sum())
