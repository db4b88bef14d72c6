"""`st.vmap`: axes, trees, layouts, writes and errors."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import shardtensor as st
from tests.layouts import everywhere, mesh_of, put


def array(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape)


@everywhere
def test_axes_of_arguments_and_results(backend: str) -> None:
    x, y = put(array(5, 4, 3), backend), array(3, 4)
    found = st.vmap(lambda a, b: a @ b, in_axes=(-1, 0), out_axes=1)(x, y)
    np.testing.assert_allclose(np.asarray(found), np.einsum("ijk,kj->ik", np.asarray(x), y), rtol=1e-12)
    assert st.vmap(lambda a, b: a * b, in_axes=(2, None))(x, 2.0).shape == (3, 5, 4)
    assert st.vmap(lambda a, b: a * b)(x, b=x).shape == x.shape
    assert st.vmap(lambda a: a)(put(array(4, 3), backend)).shape == (4, 3)


def test_trees() -> None:
    x = array(5, 3)
    found = st.vmap(lambda d, e: {"sum": d["a"] + d["b"], "same": d["b"]}, in_axes=({"a": 0, "b": None}, 0))(
        {"a": x, "b": np.ones(3)}, x
    )
    assert {name: y.shape for name, y in found.items()} == {"sum": (5, 3), "same": (5, 3)}
    assert [y.shape for y in st.vmap(lambda xs: (xs[0], xs[1].sum()), out_axes=(1, 0))([x, x])] == [(3, 5), (5,)]
    assert st.vmap(lambda a: 3.0, out_axes=None)(x) == 3.0
    assert st.vmap(lambda a: (a, None))(x)[1] is None
    assert st.vmap(lambda: st.ones(2), axis_size=3)().shape == (3, 2)


def test_the_number_of_examples_may_be_zero_or_one() -> None:
    for n in (0, 1, 7):
        found = st.vmap(lambda a: (a.reshape(-1) * 2).sum() + a.T[0, 0])(array(n, 2, 3))
        np.testing.assert_allclose(np.asarray(found), array(n, 2, 3).sum(axis=(1, 2)) * 2 + array(n, 2, 3)[:, 0, 0])


@everywhere
def test_a_batch_that_is_split_stays_where_it_is(backend: str) -> None:
    mesh = mesh_of((2, 2), backend)
    x = st.device_put(array(6, 4, 3), st.NamedSharding(mesh, st.P("x")))
    w = st.device_put(array(3, 4), st.NamedSharding(mesh, st.P(None, "y")))

    def layer(row: Any) -> Any:
        y = st.tanh(row @ w)
        y[1:] *= y[0]
        return (st.sort(y, axis=0) / y.sum(axis=0)) @ np.eye(4) + st.linalg.inv(row.T @ row + np.eye(3))[0, 0]

    for fn in (st.vmap(layer), st.jit(st.vmap(layer))):
        assert fn(x).sharding.spec[0] == "x"
    with st.transfers() as log:
        made = st.vmap(lambda row: st.linalg.norm(st.exp(row) @ row.T))(x)
    assert made.sharding.spec == st.P("x")
    assert log.bytes == 0


def test_a_layout_that_the_function_names_is_that_of_one_example() -> None:
    mesh = mesh_of((2, 2), "numpy")
    x = st.device_put(array(6, 4, 4), st.NamedSharding(mesh, st.P("x")))
    found = st.vmap(lambda a: st.with_sharding_constraint(a * 2, st.NamedSharding(mesh, st.P("y"))))(x)
    assert found.sharding.spec == st.P("x", "y")
    found = st.vmap(lambda a: st.reshard(a, st.NamedSharding(mesh, st.P("x"))))(x)
    assert found.sharding.spec == st.P(None, "x")
    assert st.vmap(lambda a: a + st.zeros((4, 4), device=st.NamedSharding(mesh, st.P("y"))))(x).sharding.spec[0] == "x"


def test_writes() -> None:
    x = st.asarray(array(5, 4))

    def total(row: Any) -> Any:
        row[0] = 0.0
        return row.sum()

    found = st.vmap(total)(x)
    np.testing.assert_allclose(np.asarray(found), array(5, 4)[:, 1:].sum(axis=1))
    assert not np.asarray(x)[:, 0].any()  # As a loop over the rows would do.

    def made(row: Any) -> Any:
        y = st.zeros(6)
        y[:4] = row
        y[4] = row[1] * 2
        y[[5, 0]] = row[:2]
        y[row.argmax()] = 9.0
        return y

    wanted = np.stack([np.asarray(made(st.asarray(row))) for row in np.asarray(x)])
    np.testing.assert_allclose(np.asarray(st.vmap(made)(x)), wanted)


def test_a_tensor_that_all_examples_share_is_not_written() -> None:
    shared = st.zeros(4)

    def write(row: Any) -> Any:
        shared[...] = row
        return row

    with pytest.raises(st.ArgumentError, match="setitem: a tensor that is the same for all examples is written"):
        st.vmap(write)(array(5, 4))
    assert not np.asarray(shared).any()


@pytest.mark.parametrize(
    "fn",
    [
        lambda a: a if a.sum() > 0 else -a,
        lambda a: float(a.sum()),
        lambda a: np.asarray(a),
        lambda a: math.sin(a[0]),
        lambda a: st.nonzero(a),
        lambda a: st.unique(a),
        lambda a: a.tolist(),
        lambda a: a.item(0) if hasattr(a, "item") else a,
    ],
)
def test_elements_of_one_example_are_not_read(fn: Any) -> None:
    with pytest.raises(st.ConcretizationError, match=r"st\.where or st\.cond for conditions"):
        st.vmap(fn)(array(5, 4))


LEFT: list[Any] = []


def test_a_tensor_that_has_left_the_function_is_an_error() -> None:
    LEFT.clear()
    st.vmap(lambda a: (LEFT.append(a * 2), a)[1])(array(5, 4))
    for use in (lambda x: x + 1, lambda x: np.asarray(x), lambda x: x[0]):
        with pytest.raises(st.ConcretizationError, match="a tensor left a function that vmap has called"):
            use(LEFT[0])


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (
            lambda x: st.vmap(lambda a, b: a)(x, np.ones(3)),
            st.ShapeError,
            r"arguments\[1\] has 3 examples along axis 0",
        ),
        (lambda x: st.vmap(lambda a: a, in_axes=None)(x), st.ArgumentError, "no argument is mapped"),
        (lambda x: st.vmap(lambda a: a, in_axes=5)(x), st.AxisError, r"vmap: arguments\[0\]: axis 5 is out of range"),
        (lambda x: st.vmap(lambda a: a, in_axes="x")(x), st.ArgumentTypeError, "in_axes has a str"),
        (lambda x: st.vmap(lambda a: a, in_axes=(0, 0))(x), st.ArgumentError, "in_axes has 2 entries"),
        (lambda x: st.vmap(lambda a: a)(3.0), st.ShapeError, r"arguments\[0\] has no dimension to map"),
        (lambda x: st.vmap(lambda a: a, out_axes=None)(x), st.ArgumentError, "out_axes is None for it"),
        (lambda x: st.vmap(lambda a: a, out_axes=3)(x), st.AxisError, "vmap: the result: axis 3"),
        (lambda x: st.vmap(lambda a: a[a > 0])(x), st.ArgumentError, r"st\.where\(mask, x, 0\) keeps the shape"),
        (lambda x: st.vmap(3)(x), st.ArgumentTypeError, "fun is an int"),
        (lambda x: st.vmap(lambda a: a)(object()), st.ArgumentTypeError, r"arguments\[0\] is an? "),
    ],
)
def test_errors(call: Any, error: Any, text: str) -> None:
    with pytest.raises(error, match=text):
        call(array(5, 4))


def test_nested() -> None:
    x, y = array(3, 4), array(5, 4)
    found = st.vmap(lambda a: st.vmap(lambda b: a @ b)(y))(x)
    np.testing.assert_allclose(np.asarray(found), x @ y.T, rtol=1e-12)
    found = st.vmap(st.vmap(lambda a, b: a * b, in_axes=(None, 0)), in_axes=(0, None))(x[0], y[0])
    np.testing.assert_allclose(np.asarray(found), np.outer(x[0], y[0]))
    inner = st.vmap(lambda a: st.jit(lambda b: st.vmap(st.exp)(b).sum())(a))
    np.testing.assert_allclose(np.asarray(inner(x)), np.exp(x).sum(axis=1))


def test_analysis() -> None:
    x = st.device_put(array(4, 3), st.NamedSharding(mesh_of((2,), "numpy"), st.P("x")))
    fn = st.vmap(lambda a: st.tanh(a).sum() * a)
    inferred = st.eval_shape(fn, x)
    assert (inferred.shape, inferred.sharding.spec) == ((4, 3), st.P("x"))
    assert "tanh(float64[4, 3] P('x'))" in str(st.explain(fn, x))
    mesh = st.AbstractMesh((512,), ("x",))
    large = st.empty((2**20, 64), device=st.NamedSharding(mesh, st.P("x")))
    assert st.simulate(fn, large).bytes == 0
