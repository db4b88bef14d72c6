"""Loops and branches under `st.vmap`, compared with a loop over the examples and under jit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import shardtensor as st
from tests.layouts import everywhere, mesh_of

CASES: dict[str, Callable[[Any, Any], Any]] = {}


def case(fn: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    CASES[fn.__name__] = fn
    return fn


@case
def a_scan(x: Any, w: Any) -> Any:
    def trip(carry: Any, row: Any) -> Any:
        state, number = carry
        state = st.tanh(state @ w + row)
        return (state, number + 1), state.sum()

    (state, number), sums = st.scan(trip, (st.zeros(3), 0), x)
    return state * number + sums.sum()


@case
def a_scan_of_shared_slices(x: Any, w: Any) -> Any:
    return st.scan(lambda total, row: (total + row * x[0], total * 2), st.zeros(3), w, reverse=True)


@case
def a_carry_that_differs_later(x: Any, w: Any) -> Any:
    carry = st.scan(lambda c, _: ((c[1], c[2], c[2] + x[0]), None), (w[0] * 0, w[0] * 0, w[0] * 0), None, 4)[0]
    return carry[0] + carry[1] * 2 + carry[2] * 3


@case
def a_counted_loop(x: Any, w: Any) -> Any:
    return st.fori_loop(1, 4, lambda i, c: c * 0.5 + x[1] * i, x[0])


@case
def a_loop_that_nothing_enters(x: Any, w: Any) -> Any:
    return st.scan(lambda c, _: (c * 2, c), 1.0, None, 3)[1] + x[0]


@case
def a_map(x: Any, w: Any) -> Any:
    return st.map(lambda row: row * row.sum(), x) @ w


@case
def a_while_loop_that_all_examples_leave_together(x: Any, w: Any) -> Any:
    return st.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] * 0.5 + x[0]), (0, x[1]))[1]


@case
def a_while_loop_of_each_example(x: Any, w: Any) -> Any:
    count, y = st.while_loop(lambda c: (c[1] * c[1]).sum() < 40, lambda c: (c[0] + 1, c[1] * 1.5), (0, x[0]))
    return y * count


@case
def a_condition_of_each_example(x: Any, w: Any) -> Any:
    return st.cond(x.sum() > 0, lambda a: a * 2, lambda a: a - w[0], x[0])


@case
def a_condition_of_all(x: Any, w: Any) -> Any:
    return st.cond(w.sum() > 0, lambda a: (a * 2, 1.0), lambda a: (w[0] + 0, 2.0), x[0])


@case
def a_switch(x: Any, w: Any) -> Any:
    at = st.argmax(x[0])
    return st.switch(at, [lambda a: a + 1, lambda a: a * 3, lambda a: w[0] * 1], x[1])


@case
def running_products(x: Any, w: Any) -> Any:
    return st.associative_scan(lambda a, b: a * b, x)


def arguments(backend: str, spec: st.P) -> tuple[Any, Any]:
    rng, mesh = np.random.default_rng(0), mesh_of((2,), backend)
    x = st.device_put(rng.standard_normal((6, 4, 3)), st.NamedSharding(mesh, spec))
    return x, st.device_put(rng.standard_normal((3, 3)), st.NamedSharding(mesh, st.P()))


def check(found: Any, wanted: Any) -> None:
    for got, answer in zip(st.tree.leaves(found), st.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(np.asarray(got), np.asarray(answer), rtol=1e-12)


@everywhere
@pytest.mark.parametrize("spec", [st.P("x"), st.P()], ids=["split", "replicated"])
@pytest.mark.parametrize("name", CASES)
def test_loops(name: str, spec: st.P, backend: str) -> None:
    fn, (x, w) = CASES[name], arguments(backend, spec)
    each = [st.tree.leaves(fn(row.copy(), w)) for row in x]
    wanted = [np.stack([np.asarray(y) for y in column]) for column in zip(*each, strict=True)]
    for call in (st.vmap(fn, in_axes=(0, None)), st.jit(st.vmap(fn, in_axes=(0, None)))):
        found = call(x, w)
        check(found, wanted)
        for y in st.tree.leaves(found):
            assert y.sharding.spec == spec or y.sharding.mesh != x.sharding.mesh
    st.eval_shape(st.vmap(fn, in_axes=(0, None)), x, w)


DIFFERENTIABLE = [name for name in CASES if "while" not in name]


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_gradients_of_loops(name: str) -> None:
    fn, (x, w) = CASES[name], arguments("numpy", st.P("x"))

    def loss(a: Any, w: Any) -> Any:
        return sum([(st.sin(y) * (k + 1)).sum() for k, y in enumerate(st.tree.leaves(fn(a, w)))])

    wanted = np.stack([np.asarray(st.grad(loss)(row.copy(), w)) for row in x])
    each = st.vmap(st.grad(loss), in_axes=(0, None))
    total = st.grad(lambda x, w: st.vmap(loss, in_axes=(0, None))(x, w).sum())
    for call in (each, st.jit(each), total, st.jit(total)):
        found = call(x, w)
        assert found.sharding == x.sharding
        np.testing.assert_allclose(np.asarray(found), wanted, rtol=1e-10, atol=1e-12)


def test_branches_that_differ_are_an_error() -> None:
    x, _ = arguments("numpy", st.P())
    with pytest.raises(
        st.ArgumentError, match=r"cond: false_fun returns .*, and true_fun .*since the condition differs"
    ):
        st.vmap(lambda a: st.cond(a.sum() > 0, lambda: a, lambda: a[0]))(x)


def test_the_number_of_trips_is_that_of_all_examples() -> None:
    with pytest.raises(st.ArgumentError, match="fori_loop: the number of trips differs from one example to another"):
        st.vmap(lambda n: st.fori_loop(0, n, lambda i, c: c + i, 0))(np.arange(3))


def test_a_first_carry_without_a_layout_follows_what_the_function_closes_over() -> None:
    x = st.device_put(np.array([4.0, 1.0]), st.NamedSharding(st.make_mesh((4,), ("x",)), st.P("x")))

    def loop(x: Any) -> Any:
        return st.fori_loop(0, 2, lambda i, s: s * x, st.ones(2)).sum()

    def branch(x: Any) -> Any:
        return st.cond(st.asarray(1.0) > 0, lambda s: s * x * x, lambda s: s, st.ones(2)).sum()

    for fn in (loop, branch):
        each = st.vmap(fn)(st.stack([x, 2 * x]))
        assert each.tolist() == [float(fn(x)), float(fn(2 * x))]
        for way in (st.jacfwd(fn), st.hessian(fn)):
            assert np.allclose(np.asarray(st.jit(way)(x)), np.asarray(way(np.asarray(x))))
        assert np.allclose(np.asarray(st.jacfwd(fn)(x)), 2 * np.asarray(x))


def test_gradients_of_branches_whose_condition_differs_in_a_program() -> None:
    rows = np.array([[4.0, 1.0], [-3.0, 1.0]])

    def fn(x: Any) -> Any:
        return st.cond(x.sum() > 0, lambda s: st.sin(s * x) * x, lambda s: s * s * x, 2 * x[:1]).sum()

    wanted = [st.grad(fn)(row) for row in rows]
    for way in (st.vmap(st.grad(fn)), st.vmap(st.remat(st.grad(fn)))):
        assert np.allclose(np.asarray(way(rows)), np.stack([np.asarray(g) for g in wanted]))
        assert np.allclose(np.asarray(st.jit(way)(rows)), np.asarray(way(rows)))
    assert st.eval_shape(st.vmap(st.grad(fn)), rows).shape == (2, 2)
    total = st.jit(st.grad(lambda rows: st.vmap(fn)(rows).sum()))
    assert np.allclose(np.asarray(total(rows)), np.stack([np.asarray(g) for g in wanted]))
    assert np.allclose(np.asarray(st.jit(st.vmap(st.hessian(fn)))(rows)), np.asarray(st.vmap(st.hessian(fn))(rows)))
