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


AGAIN = (N - 1) * 2 * WIDTH * WIDTH * 8
"""The bytes of gathering again those parameters that the backward pass needs: all but those of the first layer."""


def whole(w: Any) -> Any:
    return st.reshard(w, st.NamedSharding(w.sharding.mesh, st.P()))


@st.remat
def recomputed(w: Any, x: Any) -> Any:
    return st.tanh(x @ whole(w))


def with_remat(params: Any, x: Any) -> Any:
    for w in params:
        x = recomputed(w, x)
    return (x * x).sum()


GATHERED: dict[str, tuple[Any, int]] = {
    "saved as their sources": (lambda params, x: loss([whole(w) for w in params], x), AGAIN),
    "used transposed": (lambda params, x: loss([whole(w).T for w in params], x), AGAIN),
    "views": (lambda params, x: loss([whole(w[0]) for w in [p[None] for p in params]], x), AGAIN),
    "saved themselves": (lambda params, x: loss([whole(w).copy() for w in params], x), 0),
    "recomputed": (with_remat, (N - 1) * BYTES),
}


@pytest.mark.parametrize("name", list(GATHERED))
@pytest.mark.parametrize("wrap", [lambda f: f, st.jit], ids=["eager", "jit"])
def test_gathered_parameters_get_a_reduce_scatter(wrap: Any, name: str) -> None:
    mesh = mesh_of((N,), "numpy")
    gathered, more = GATHERED[name]
    fn = wrap(st.grad(gathered))
    params, x = layers(st.P("x"), mesh), batch(mesh)
    found = fn(params, x)
    total = 2 * (N - 1) * BYTES + more
    assert moved(fn, params, x) in (total, total + SCALAR)
    wanted = st.grad(gathered)([whole(w) for w in params], x)
    for g, w, h in zip(found, params, wanted, strict=True):
        assert g.sharding == w.sharding
        np.testing.assert_allclose(np.asarray(g), np.asarray(h), rtol=1e-12)


@pytest.mark.parametrize("name", list(GATHERED))
def test_gathered_parameters_in_simulations_and_of_second_order(name: str) -> None:
    mesh, abstract = mesh_of((N,), "numpy"), st.AbstractMesh((N,), ("x",))
    params, x, fn = layers(st.P("x"), mesh), batch(mesh), GATHERED[name][0]
    given = [st.empty_like(a, device=st.NamedSharding(abstract, a.sharding.spec)) for a in (*params, x)]
    assert st.simulate(st.grad(fn), given[:-1], given[-1]).bytes == moved(st.grad(fn), params, x)

    def along(fn: Any) -> Any:
        return lambda params, x: sum([(g * g).sum() for g in st.grad(fn)(params, x)])

    found = st.grad(along(fn))(params, x)
    wanted = st.grad(along(loss if "transposed" not in name else GATHERED[name][0]))([whole(w) for w in params], x)
    for g, w, h in zip(found, params, wanted, strict=True):
        assert g.sharding == w.sharding
        np.testing.assert_allclose(np.asarray(g), np.asarray(h), rtol=1e-10)


@pytest.mark.parametrize("when", ["before it is saved", "after it is saved"])
@pytest.mark.parametrize("part", [..., slice(0, WIDTH)], ids=["whole", "view"])
def test_a_gathered_parameter_whose_source_is_written(when: str, part: Any) -> None:
    mesh = mesh_of((N,), "numpy")
    (w, *_), x = layers(st.P("x"), mesh), batch(mesh)

    def f(w: Any, at: str) -> Any:
        w = w * 1
        gathered = whole(w[part])
        if at == "before it is saved":
            w *= 0
        z = (st.tanh(x @ gathered) @ gathered).sum()
        if at == "after it is saved":
            w *= 0
        return z + (w * 0).sum()

    wanted = st.grad(lambda w: f(w, "never"))(w)
    _, pull = st.vjp(lambda w: f(w, when), w)
    for _ in range(2):
        np.testing.assert_allclose(np.asarray(pull(1.0)[0]), np.asarray(wanted), rtol=1e-13)


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
