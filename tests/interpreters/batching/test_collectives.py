"""Collectives over the axis of `st.vmap`, compared with JAX's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import shardtensor as st
from tests.layouts import everywhere, put

jax = pytest.importorskip("jax")

CASES: dict[str, Callable[[Any, Any, Any], Any]] = {
    "psum": lambda ns, x, one: ns.psum(x, "b") * x,
    "psum of a constant": lambda ns, x, one: ns.psum(1, "b") * x + ns.psum(one, "b"),
    "pmean": lambda ns, x, one: x - ns.pmean(x, "b"),
    "pmax": lambda ns, x, one: ns.pmax(x, "b"),
    "pmin of a tree": lambda ns, x, one: ns.pmin({"a": x, "b": x[0]}, "b")["b"] + x,
    "all_gather": lambda ns, x, one: ns.all_gather(x, "b"),
    "all_gather axis 1": lambda ns, x, one: ns.all_gather(x, "b", axis=1),
    "all_gather tiled": lambda ns, x, one: ns.all_gather(x, "b", axis=1, tiled=True),
    "psum_scatter": lambda ns, x, one: ns.psum_scatter(x, "b", scatter_dimension=0),
    "psum_scatter tiled": lambda ns, x, one: ns.psum_scatter(x, "b", scatter_dimension=1, tiled=True),
    "all_to_all": lambda ns, x, one: ns.all_to_all(x, "b", 0, 1),
    "all_to_all tiled": lambda ns, x, one: ns.all_to_all(x, "b", 1, 0, tiled=True),
    "ppermute": lambda ns, x, one: ns.ppermute(x, "b", perm=[(0, 1), (1, 2), (3, 0), (2, 3)]),
    "axis_index": lambda ns, x, one: x * ns.axis_index("b") + ns.axis_size("b"),
    "pswapaxes": lambda ns, x, one: ns.pswapaxes(x, "b", 0),
}


@everywhere
@pytest.mark.parametrize("name", CASES)
def test_collectives(name: str, backend: str) -> None:
    values, fn = np.random.default_rng(0).standard_normal((4, 4, 8)), CASES[name]
    if name == "axis_index" and not hasattr(jax.lax, "axis_size"):
        pytest.skip("this JAX has no axis_size")
    with jax.enable_x64(True):
        wanted = jax.jit(jax.vmap(lambda x: fn(jax.lax, x, np.float64(2)), axis_name="b"))(values)
    for spec in (st.P("x"), st.P(None, "x")):
        x = put(values, backend, spec=spec)
        for call in (lambda f: f, st.jit):
            found = call(st.vmap(lambda x: fn(st, x, np.float64(2)), axis_name="b"))(x)
            np.testing.assert_allclose(np.asarray(found), np.asarray(wanted), rtol=1e-12)


def test_examples_to_which_nothing_is_sent_get_zeros() -> None:
    found = st.vmap(lambda x: st.ppermute(x, "b", [(0, 2), (2, 1)]), axis_name="b")(np.arange(1.0, 5.0))
    assert found.tolist() == [0.0, 3.0, 1.0, 0.0]
    assert st.vmap(lambda x: st.pshuffle(x, "b", [2, 0, 1]), axis_name="b")(np.arange(3)).tolist() == [2, 0, 1]
    assert st.vmap(lambda x: st.pbroadcast(x, "b", 2), axis_name="b")(np.arange(3)).tolist() == [2, 2, 2]


def test_names_of_two_axes() -> None:
    x = np.random.default_rng(0).standard_normal((3, 4, 5))

    def fn(a: Any) -> Any:
        return a - st.pmean(a, ("i", "j")) + st.psum(a, "i") * st.axis_index("j")

    found = st.vmap(st.vmap(fn, axis_name="j"), axis_name="i")(x)
    wanted = x - x.mean(axis=(0, 1)) + x.sum(axis=0) * np.arange(4)[:, None]
    np.testing.assert_allclose(np.asarray(found), wanted, rtol=1e-12)


def test_gradients_of_collectives() -> None:
    x = st.asarray(np.random.default_rng(0).standard_normal((4, 3)))
    normed = st.vmap(lambda a: a / st.psum(a * a, "b"), axis_name="b")
    found = st.grad(lambda x: (normed(x) ** 2).sum())(x)
    plain = st.grad(lambda x: ((x / (x * x).sum(axis=0)) ** 2).sum())(x)
    np.testing.assert_allclose(np.asarray(found), np.asarray(plain), rtol=1e-10)


LOSSES: dict[str, Callable[[Any, Any], Any]] = {
    "psum": lambda ns, a: (ns.psum(a, "b") * a).sum(),
    "pmean": lambda ns, a: (ns.pmean(a * a, "b") * a).sum(),
    "all_gather": lambda ns, a: (ns.all_gather(a, "b")[1] * a).sum(),
    "ppermute": lambda ns, a: (ns.ppermute(a, "b", [(0, 1), (1, 2), (2, 3), (3, 0)]) * a).sum(),
    "constant": lambda ns, a: (a * ns.psum(1.0, "b")).sum(),
}


@pytest.mark.parametrize("name", LOSSES)
def test_gradients_of_each_example(name: str) -> None:
    """They are those of the sum of all examples' results, as in JAX."""
    x, loss = np.random.default_rng(0).standard_normal((4, 3)), LOSSES[name]
    with jax.enable_x64(True):
        wanted = jax.jit(jax.vmap(jax.grad(lambda a: loss(jax.lax, a)), axis_name="b"))(x)
    each = st.vmap(st.grad(lambda a: loss(st, a)), axis_name="b")
    for call in (each, st.jit(each)):
        np.testing.assert_allclose(np.asarray(call(x)), np.asarray(wanted), rtol=1e-12)


@pytest.mark.parametrize(
    ("fn", "error", "text"),
    [
        (lambda a: st.psum(a, "other"), st.ShardingError, "psum: "),
        (lambda a: st.psum(a, "b", axis_index_groups=[[0, 1], [2, 3]]), st.ArgumentError, "axis_index_groups of 'b'"),
        (lambda a: st.all_gather(a, ("b", "c")), st.ArgumentError, "names an axis of vmap and others"),
        (lambda a: st.psum_scatter(a, "b"), st.ShapeError, "psum_scatter: x has size 3 along scatter_dimension 0"),
        (lambda a: st.ppermute(a, "b", [(0, 1), (2, 1)]), st.ArgumentError, "every index may occur once"),
        (lambda a: st.ppermute(a, "b", [(0, 9)]), st.ArgumentError, "wanted indices from 0 to 3"),
    ],
)
def test_errors(fn: Any, error: Any, text: str) -> None:
    with pytest.raises(error, match=text):
        st.vmap(fn, axis_name="b")(np.ones((4, 3)))
