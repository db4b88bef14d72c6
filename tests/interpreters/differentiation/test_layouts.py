"""The bytes that gradients transfer, against formulas."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import shardtensor as st
from tests.layouts import everywhere, mesh_of

N, BATCH, WIDTH = 4, 16, 8


def layers(spec: st.P, mesh: st.Mesh) -> list[Any]:
    rng = np.random.default_rng(0)
    return [st.device_put(rng.standard_normal((WIDTH, WIDTH)), st.NamedSharding(mesh, spec)) for _ in range(3)]


def batch(mesh: st.Mesh) -> Any:
    x = np.random.default_rng(1).standard_normal((BATCH, WIDTH))
    return st.device_put(x, st.NamedSharding(mesh, st.P("x")))


def loss(params: Any, x: Any) -> Any:
    for w in params:
        x = st.tanh(x @ w)
    return (x * x).sum()


def moved(fn: Any, *args: Any) -> int:
    with st.transfers() as log:
        fn(*args)
    return log.bytes


BYTES = 3 * WIDTH * WIDTH * 8
"""The bytes of all parameters, and of their gradients."""

SCALAR = 2 * (N - 1) * 8
"""The bytes of the all-reduce of the loss."""


@pytest.mark.parametrize("wrap", [lambda f: f, st.jit], ids=["eager", "jit"])
def test_data_parallel_gradients_are_one_all_reduce(wrap: Any) -> None:
    mesh = mesh_of((N,), "numpy")
    fn = wrap(st.grad(loss))
    params, x = layers(st.P(), mesh), batch(mesh)
    fn(params, x)
    assert moved(fn, params, x) in (2 * (N - 1) * BYTES, 2 * (N - 1) * BYTES + SCALAR)


def test_a_program_sends_the_gradients_of_one_dtype_in_one_message() -> None:
    """All are added at the end, since none depends on another one."""
    mesh = mesh_of((N,), "numpy")
    fn = st.jit(st.grad(loss))
    params, x = layers(st.P(), mesh), batch(mesh)
    fn(params, x)
    with st.transfers() as log:
        fn(params, x)
    sizes = [t.bytes for t in log if t.bytes > 8]
    assert sizes == [BYTES] * (2 * (N - 1))
    both = [*params[:2], *[st.astype(w, "float32") for w in params[2:]]]
    fn = st.jit(st.grad(lambda params, x: loss(params[:2], x) + loss(params[2:], x.astype("float32"))))
    fn(both, x)
    with st.transfers() as log:
        fn(both, x)
    sizes = sorted([t.bytes for t in log if t.bytes > 8])
    assert sizes == [BYTES // 6] * (2 * (N - 1)) + [2 * BYTES // 3] * (2 * (N - 1))


@pytest.mark.parametrize("wrap", [lambda f: f, st.jit], ids=["eager", "jit"])
def test_gathered_parameters_get_a_reduce_scatter(wrap: Any) -> None:
    mesh = mesh_of((N,), "numpy")

    def gathered(params: Any, x: Any) -> Any:
        return loss([st.reshard(w, st.NamedSharding(mesh, st.P())) for w in params], x)

    fn = wrap(st.grad(gathered))
    params, x = layers(st.P("x"), mesh), batch(mesh)
    fn(params, x)
    assert moved(fn, params, x) in (2 * (N - 1) * BYTES, 2 * (N - 1) * BYTES + SCALAR)


@pytest.mark.parametrize("wrap", [lambda f: f, st.jit], ids=["eager", "jit"])
def test_the_gradients_of_microbatches_are_added_before_they_are_reduced(wrap: Any) -> None:
    mesh = mesh_of((N,), "numpy")
    (w, *_), x = layers(st.P(), mesh), batch(mesh)
    batches = [st.device_put(np.asarray(x), x.sharding) for _ in range(4)]

    def total(w: Any) -> Any:
        return sum([(st.tanh(b @ w) ** 2).sum() for b in batches])

    one = 2 * (N - 1) * WIDTH * WIDTH * 8
    fn = wrap(st.grad(total))
    fn(w)
    assert moved(fn, w) in (one, one + SCALAR, one + 4 * SCALAR)


def test_the_log_is_that_of_a_simulation() -> None:
    mesh = mesh_of((N,), "numpy")
    params, x = layers(st.P(), mesh), batch(mesh)
    abstract = st.AbstractMesh((N,), ("x",))
    given = [st.empty_like(a, device=st.NamedSharding(abstract, a.sharding.spec)) for a in (*params, x)]
    assert st.simulate(st.grad(loss), given[:-1], given[-1]).bytes == moved(st.grad(loss), params, x)


@everywhere
@pytest.mark.parametrize("wrap", [lambda f: f, st.jit], ids=["eager", "jit"])
def test_the_gradient_of_an_embedding_is_one_all_reduce(wrap: Any, backend: str) -> None:
    mesh = mesh_of((N,), backend)
    rng = np.random.default_rng(2)
    numbers, at = rng.standard_normal((10, WIDTH)), rng.integers(-10, 10, (BATCH, 3)).astype("int8")
    table = st.device_put(numbers, st.NamedSharding(mesh, st.P()))
    ids = st.device_put(at, st.NamedSharding(mesh, st.P("x")))
    fn = wrap(st.grad(lambda table, ids: (table[ids] ** 3).sum()))
    fn(table, ids)
    with st.transfers() as log:
        g = fn(table, ids)
    assert g.sharding == table.sharding
    assert log.bytes in (2 * (N - 1) * numbers.nbytes, 2 * (N - 1) * numbers.nbytes + SCALAR)
    wanted = np.zeros_like(numbers)
    np.add.at(wanted, at, 3 * numbers[at] ** 2)
    np.testing.assert_allclose(np.asarray(g), wanted, rtol=1e-12)


def test_the_gradients_of_tables_have_their_layout() -> None:
    mesh = mesh_of((2, 2), "numpy")
    rng = np.random.default_rng(3)
    numbers, at = rng.standard_normal((8, 8)), rng.integers(-8, 8, (6, 2))
    for spec in (st.P("x"), st.P("y"), st.P(None, "y"), st.P("x", "y")):
        for axis in (0, 1):
            table = st.device_put(numbers, st.NamedSharding(mesh, spec))
            ids = st.device_put(at, st.NamedSharding(mesh, st.P("x")))
            g = st.grad(lambda t, ids=ids, axis=axis: (st.take(t, ids, axis=axis) ** 2).sum())(table)
            wanted = np.zeros_like(numbers)
            np.add.at(wanted, (slice(None),) * axis + (at,), 2 * np.take(numbers, at, axis=axis))
            assert g.sharding == table.sharding
            np.testing.assert_allclose(np.asarray(g), wanted, rtol=1e-12)
