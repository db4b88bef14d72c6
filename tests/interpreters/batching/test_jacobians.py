"""`st.jacrev`, `st.jacfwd` and `st.hessian`, compared with JAX's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import shardtensor as st
from tests.layouts import mesh_of

jax = pytest.importorskip("jax")
RNG = np.random.default_rng(0)
X, W = RNG.standard_normal((3, 2)), RNG.standard_normal((2, 2))


def outputs(ns: Any, x: Any, w: Any) -> Any:
    return {"a": ns.tanh(x @ w), "b": (x**2).sum() * w[0, 1]}


def check(found: Any, wanted: Any) -> None:
    for got, answer in zip(st.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert tuple(got.shape) == answer.shape
        np.testing.assert_allclose(np.asarray(got), np.asarray(answer), rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("argnums", [(0, 1), *[pytest.param(n, marks=pytest.mark.full) for n in (0, 1)]])
@pytest.mark.parametrize("name", ["jacrev", "jacfwd"])
def test_jacobians(name: str, argnums: Any) -> None:
    x = st.device_put(X, st.NamedSharding(mesh_of((2,), "numpy"), st.P("x")))
    with jax.enable_x64(True):
        wanted = jax.jit(getattr(jax, name)(lambda x, w: outputs(jax.numpy, x, w), argnums=argnums))(X, W)
    fn = getattr(st, name)(lambda x, w: outputs(st, x, w), argnums=argnums)
    check(fn(x, W), wanted)
    check(st.jit(fn)(x, W), wanted)


def test_hessians() -> None:
    with jax.enable_x64(True):
        wanted = jax.jit(jax.hessian(lambda p: (jax.numpy.tanh(p["x"] @ p["w"]) ** 2).sum()))({"x": X, "w": W})
        mixed = jax.jit(jax.hessian(lambda x, w: ((x @ w) ** 3).sum(), argnums=(0, 1)))(X, W)
    check(st.hessian(lambda p: (st.tanh(p["x"] @ p["w"]) ** 2).sum())({"x": st.asarray(X), "w": W}), wanted)
    check(st.hessian(lambda x, w: ((x @ w) ** 3).sum(), argnums=(0, 1))(X, W), mixed)
    assert float(st.hessian(lambda x: x**3)(2.0)) == 12.0


@pytest.mark.parametrize("name", ["jacrev", "jacfwd"])
def test_options(name: str) -> None:
    transform = getattr(st, name)
    jacobian, aux = transform(lambda x: (x * x, "kept"), has_aux=True)(st.asarray([1.0, 2.0]))
    assert (jacobian.tolist(), aux) == ([[2.0, 0.0], [0.0, 4.0]], "kept")
    made = transform(lambda z: z * z, holomorphic=True)(st.asarray([1 + 1j]))
    assert made.tolist() == [[2 + 2j]]
    assert transform(lambda x, scale: x * scale)(st.ones(2), scale=3.0).tolist() == [[3.0, 0.0], [0.0, 3.0]]
    with pytest.raises(st.ArgumentTypeError, match=f"{name}: fun is an int"):
        transform(3)
    with pytest.raises(st.ArgumentTypeError, match=rf"{name}: argument\[0\] has dtype int64"):
        transform(lambda x: x)(st.arange(3))
    with pytest.raises(st.ArgumentTypeError, match=f"{name}: argument.* has dtype complex128; wanted real numbers"):
        transform(lambda x: x)(st.asarray([1j]))


def test_gradients_of_each_example() -> None:
    x = st.device_put(RNG.standard_normal((6, 3)), st.NamedSharding(mesh_of((2,), "numpy"), st.P("x")))
    w = st.device_put(RNG.standard_normal((3, 2)), x.sharding.with_spec(st.P()))
    each = st.vmap(st.grad(lambda w, row: (st.tanh(row @ w) ** 2).sum()), in_axes=(None, 0))
    with jax.enable_x64(True):
        theirs = jax.vmap(jax.grad(lambda w, r: (jax.numpy.tanh(r @ w) ** 2).sum()), in_axes=(None, 0))
        wanted = jax.jit(theirs)(np.asarray(w), np.asarray(x))
    for fn in (each, st.jit(each)):
        found = fn(w, x)
        assert found.sharding.spec == st.P("x")
        np.testing.assert_allclose(np.asarray(found), np.asarray(wanted), rtol=1e-11)
    with st.transfers() as log:
        each(w, x)
    assert log.bytes == 0
