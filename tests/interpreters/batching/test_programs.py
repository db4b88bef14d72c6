"""Programs called by `vmap`, compared with a loop over the examples: also under jit, differentiated and nested."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import shardtensor as st
from tests.interpreters.differentiation.programs import ON_VALUES, PROGRAMS
from tests.layouts import everywhere, put

COUNT = 3
BATCHED = sorted(set(PROGRAMS) - ON_VALUES)
LAYOUTS = {"examples": st.P("x"), "rows": st.P(None, "x"), "replicated": st.P()}


def batch(backend: str = "numpy", spec: st.P = LAYOUTS["examples"]) -> st.ShardedTensor:
    rng = np.random.default_rng(1)
    return put(1 + 0.4 * rng.random((COUNT, 9, 5)), backend, spec=spec)


def looped(fn: Any, x: Any) -> np.ndarray:
    return np.stack([np.asarray(fn(row.copy())) for row in x])


@everywhere
@pytest.mark.parametrize("name", BATCHED)
def test_programs(name: str, backend: str) -> None:
    x, fn = batch(backend), PROGRAMS[name]
    found = st.vmap(fn)(x.copy())
    assert found.sharding.spec == st.P("x")
    np.testing.assert_allclose(np.asarray(found), looped(fn, x), rtol=1e-12)


@pytest.mark.parametrize("spec", LAYOUTS)
@pytest.mark.parametrize("name", BATCHED)
def test_gradients_of_examples(name: str, spec: str) -> None:
    x, fn = batch("numpy", LAYOUTS[spec]), st.grad(PROGRAMS[name])
    found = st.vmap(fn)(x.copy())
    assert found.sharding == x.sharding
    np.testing.assert_allclose(np.asarray(found), looped(fn, x), rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("name", BATCHED)
def test_programs_under_jit_and_differentiated(name: str) -> None:
    x, fn = batch(), PROGRAMS[name]
    wanted = np.asarray(st.vmap(fn)(x.copy()))
    np.testing.assert_allclose(np.asarray(st.jit(st.vmap(fn))(x.copy())), wanted, rtol=1e-12)
    total = st.grad(lambda x: st.vmap(fn)(x).sum())(x.copy())
    np.testing.assert_allclose(np.asarray(total), looped(st.grad(fn), x), rtol=1e-11, atol=1e-12)
    inferred = st.eval_shape(st.vmap(fn), x.copy())
    assert (inferred.shape, inferred.sharding.spec) == ((COUNT,), st.P("x"))
