"""Maps in functions that `st.vmap` calls, and `st.vmap` in the functions of maps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import shardtensor as st
from tests.layouts import everywhere, mesh_of

P = st.P


def body(w: Any, x: Any) -> Any:
    return st.psum((st.tanh(x @ w) ** 2).sum(axis=0), "x"), x * 2


def mapped(mesh: st.Mesh, fn: Any, in_specs: Any, out_specs: Any) -> Any:
    return st.shard_map(fn, mesh=mesh, in_specs=in_specs, out_specs=out_specs)


CASES: dict[str, Callable[[st.Mesh, Any, Any], Any]] = {
    "shard_map": lambda mesh, w, a: mapped(mesh, body, (P(), P("x")), (P(), P("x")))(w, a),
    "pmap": lambda mesh, w, a: st.pmap(lambda r: (r * r).sum(), a[:2], devices=mesh.flat),
    "lists": lambda mesh, w, a: st.unshard(st.pmap(lambda r: r * 2, st.shard(a, devices=mesh.flat))),
    "smap": lambda mesh, w, a: st.smap(lambda r: r * 2, a, devices=mesh),
    "halos": lambda mesh, w, a: st.map_overlap(lambda b: b[:-2] + b[2:], a, depth=(1, 0), boundary="periodic"),
    "gradient": lambda mesh, w, a: st.grad(lambda w: mapped(mesh, body, (P(), P("x")), (P(), P("x")))(w, a)[0].sum())(
        w
    ),
}


def arguments(backend: str, spec: st.P) -> tuple[st.Mesh, Any, Any]:
    mesh, rng = mesh_of((2,), backend), np.random.default_rng(0)
    x = st.device_put(rng.standard_normal((5, 4, 3)), st.NamedSharding(mesh, spec))
    return mesh, st.device_put(rng.standard_normal((3, 2)), st.NamedSharding(mesh, P())), x


@everywhere
@pytest.mark.parametrize("spec", [P(None, "x"), P("x")], ids=["split inside", "split examples"])
@pytest.mark.parametrize("name", CASES)
def test_maps_of_each_example(name: str, spec: st.P, backend: str) -> None:
    mesh, w, x = arguments(backend, spec)
    fn = CASES[name]
    each = [st.tree.leaves(fn(mesh, w, st.device_put(np.asarray(a), st.NamedSharding(mesh, P("x"))))) for a in x]
    found = st.tree.leaves(st.vmap(lambda a: fn(mesh, w, a))(x))
    for got, column in zip(found, zip(*each, strict=True), strict=True):
        np.testing.assert_allclose(np.asarray(got), np.stack([np.asarray(y) for y in column]), rtol=1e-12)


BODIES: dict[str, tuple[Callable[[Any], Any], Callable[[np.ndarray], np.ndarray]]] = {
    "elementwise": (lambda e: st.tanh(e) * 2, lambda x: np.tanh(x) * 2),
    "a collective": (lambda e: st.psum(e, "x") * e, lambda x: np.tile(x[:, :2] + x[:, 2:], (1, 2, 1)) * x),
    "a gradient": (st.grad(lambda e: (st.sin(e) ** 2).sum()), lambda x: np.sin(2 * x)),
    "two axes": (
        lambda e: e - st.psum(st.psum(e, "b"), "x"),
        lambda x: x - np.tile((x[:, :2] + x[:, 2:]).sum(0), (2, 1)),
    ),
}


@everywhere
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", BODIES)
def test_examples_in_the_programs_of_a_map(name: str, compiled: bool, backend: str) -> None:
    mesh, _, x = arguments(backend, P(None, "x"))
    fn, plain = BODIES[name]
    call = mapped(mesh, st.vmap(fn, axis_name="b"), P(None, "x"), P(None, "x"))
    found = (st.jit(call) if compiled else call)(x)
    assert found.sharding == x.sharding
    np.testing.assert_allclose(np.asarray(found), plain(np.asarray(x)), rtol=1e-12)


def test_programs_get_and_return_the_arrays_of_the_backend() -> None:
    rows = st.shard(np.arange(8.0).reshape(4, 2), devices=mesh_of((2,), "numpy").flat)

    def each(block: Any) -> Any:
        made = st.vmap(lambda row: row.sum())(block)
        assert type(made) is np.ndarray
        return made

    assert [part.tolist() for part in st.pmap(each, rows)] == [[1.0, 5.0], [9.0, 13.0]]


def test_transformations_of_maps_and_batches() -> None:
    mesh, w, x = arguments("numpy", P(None, "x"))
    f = mapped(mesh, body, (P(), P("x")), (P(), P("x")))
    wanted = sum([np.asarray(st.grad(lambda w, a=a: f(w, a)[0].sum())(w)) for a in x])
    total = lambda w: st.vmap(f, in_axes=(None, 0))(w, x)[0].sum()  # noqa: E731
    np.testing.assert_allclose(np.asarray(st.grad(total)(w)), wanted, rtol=1e-11)
    np.testing.assert_allclose(np.asarray(st.jit(st.grad(total))(w)), wanted, rtol=1e-11)
    compiled = st.jit(st.vmap(f, in_axes=(None, 0)))(w, x)
    np.testing.assert_allclose(np.asarray(compiled[0]), np.asarray(st.vmap(f, in_axes=(None, 0))(w, x)[0]), rtol=1e-12)
