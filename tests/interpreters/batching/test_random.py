"""Random numbers under `st.vmap`: each example draws what it would draw alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import shardtensor as st
from tests.layouts import everywhere, mesh_of

random = st.random

DRAWS: dict[str, Callable[[Any, Any], Any]] = {
    "normal": lambda key, p: random.normal(key, (3, 2)) * p.sum(),
    "uniform": lambda key, p: random.uniform(key, (5,), dtype="float32") + p[0],
    "exponential": lambda key, p: random.exponential(key, ()) * p[0],
    "integers": lambda key, p: random.integers(key, 3, 17, (4,)) + p[0],
    "permutation": lambda key, p: random.permutation(key, 6) + p[0],
    "choice": lambda key, p: random.choice(key, 9, (3,)) + p[1],
    "bernoulli": lambda key, p: random.bernoulli(key, p / 3),
    "categorical": lambda key, p: random.categorical(key, p),
    "gamma": lambda key, p: random.gamma(key, p),
    "poisson": lambda key, p: random.poisson(key, p * 4),
    "binomial": lambda key, p: random.binomial(key, 9, p / 3),
    "truncated_normal": lambda key, p: random.truncated_normal(key, 0.0, p),
    "derived": lambda key, p: (
        random.normal(random.split(key, 3)[1], (2,)) + random.normal(random.fold_in(key, 5), (2,))
    ),
}


@everywhere
@pytest.mark.parametrize("name", DRAWS)
def test_draws(name: str, backend: str) -> None:
    fn, keys = DRAWS[name], random.split(random.key(3), 6)
    mesh = mesh_of((2,), backend)
    p = st.device_put(1 + np.random.default_rng(0).random((6, 4)), st.NamedSharding(mesh, st.P("x")))
    with st.use_mesh(mesh) if hasattr(st, "use_mesh") else st.set_mesh(mesh):
        for given, axes in ((keys, 0), (keys[0], (None, 0))):
            found = st.vmap(fn, in_axes=axes)(given, p)
            alone = [given[k] if isinstance(given, list) else given for k in range(6)]
            wanted = np.stack([np.asarray(fn(one, row)) for one, row in zip(alone, p, strict=True)])
            np.testing.assert_array_equal(np.asarray(found), wanted)
            if name in ("bernoulli", "gamma", "poisson"):
                assert found.sharding.spec == st.P("x")


def test_keys_in_trees_and_nested() -> None:
    key = random.key(0)
    pairs = [random.split(k, 2) for k in random.split(key, 3)]
    found = st.vmap(st.vmap(lambda k: random.normal(k, (2,))))(pairs)
    wanted = [[np.asarray(random.normal(k, (2,))) for k in row] for row in pairs]
    np.testing.assert_array_equal(np.asarray(found), np.array(wanted))
    keys = random.split(key, 3)
    scales = np.arange(12.0).reshape(3, 2, 2) + 1
    found = st.vmap(st.vmap(lambda k, a: random.gamma(k, a)), in_axes=(None, 0))(keys := random.split(key, 2), scales)
    each = [[np.asarray(random.gamma(k, a)) for k, a in zip(keys, row, strict=True)] for row in scales]
    np.testing.assert_array_equal(np.asarray(found), np.array(each))
    found = st.vmap(
        lambda d, k: random.normal(d["key"], ()) + random.normal(k, ()), in_axes=({"key": 0, "x": None}, None)
    )({"key": random.split(key, 3), "x": 1}, key)
    np.testing.assert_allclose(
        np.asarray(found), [float(random.normal(k, ())) + float(random.normal(key, ())) for k in random.split(key, 3)]
    )
    keys = random.split(key, 3)
    assert st.vmap(lambda k: random.split(k, 2)[1])(keys) == [random.split(k, 2)[1] for k in keys]
    with pytest.raises(st.ArgumentTypeError, match=r"arguments\[0\] is a Key; wanted a list with one for each example"):
        st.vmap(lambda k: random.normal(k))(key)


def test_keys_under_jit() -> None:
    def noisy(key: Any, x: Any) -> Any:
        return st.vmap(lambda k, row: row + random.normal(k, row.shape))(random.split(key, 4), x)

    x = st.ones((4, 3))
    np.testing.assert_array_equal(np.asarray(st.jit(noisy)(random.key(7), x)), np.asarray(noisy(random.key(7), x)))
