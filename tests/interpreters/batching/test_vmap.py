"""`st.vmap`: axes, trees, layouts, writes and errors."""

from __future__ import annotations

import functools
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
        (lambda x: st.vmap(lambda: 0, axis_size="3")(), st.ArgumentTypeError, "vmap: axis_size is a str"),
        (lambda x: st.vmap(lambda: 0, axis_size=-3)(), st.ArgumentError, "vmap: axis_size is -3"),
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


def test_arguments_of_operators_are_no_tensors_that_the_function_has_made() -> None:
    """`asarray` and `astype` return their operand where nothing changes."""
    for same in (st.asarray, lambda x: st.astype(x, x.dtype, copy=False), lambda x: x[:]):
        shared = st.zeros(4)

        def write(row: Any, same: Any = same, shared: Any = shared) -> Any:
            y = same(shared)
            y[...] = row
            return y

        with pytest.raises(st.ArgumentError, match="a tensor that is the same for all examples is written"):
            st.vmap(write)(array(5, 4))
        assert not np.asarray(shared).any()


@everywhere
def test_lists_of_values(backend: str) -> None:
    x = array(2, 3)
    for fn in (
        lambda ns, v: ns.asarray([v[0], v[1]]),
        lambda ns, v: ns.asarray([[v[0], 1.0], [v[2], v[1]]]),
        lambda ns, v: ns.asarray([v, v * 2, np.ones(3)], dtype="float32"),
    ):
        found = st.vmap(lambda v, fn=fn: fn(st, v))(put(x, backend))
        wanted = np.stack([fn(np, row) for row in x])
        assert found.dtype == wanted.dtype
        np.testing.assert_array_equal(np.asarray(found), wanted)


def test_none_is_no_argument() -> None:
    x = array(5, 3)
    assert st.vmap(lambda a, mask, b=None: a * 2)(x, None, b=None).shape == (5, 3)
    assert st.vmap(lambda d: d["a"])({"a": x, "b": None}).shape == (5, 3)


def test_results_are_independent_tensors() -> None:
    x = st.asarray(array(5, 4))
    for fn in (lambda a: a, lambda a: a[1:], lambda a: st.asarray(a), lambda a: (a + 1, a)[1]):
        st.vmap(fn)(x)[...] = 0
    np.testing.assert_array_equal(np.asarray(x), array(5, 4))
    one, other = st.vmap(lambda a: [a * 2] * 2)(x)
    one[...] = 0
    np.testing.assert_array_equal(np.asarray(other), array(5, 4) * 2)


@everywhere
@pytest.mark.parametrize(
    "fn",
    [
        lambda v, i, k, w: v[i],
        lambda v, i, k, w: w[i],
        lambda v, i, k, w: w[:, k],
        lambda v, i, k, w: w[i[0], k] * v[k],
        lambda v, i, k, w: st.grad(lambda v: (v[i] ** 2).sum() + v[k])(v),
        lambda v, i, k, w: st.grad(lambda w: (w[i] ** 2).sum())(w),
        lambda v, i, k, w: st.histogram(v, [-1, 0, 0.5, 1], weights=v)[0],
        lambda v, i, k, w: st.isin(i, i[:1] + 1),
        lambda v, i, k, w: st.diag(v),
        lambda v, i, k, w: st.diag(st.diag(v, 1) + 1, -1),
        lambda v, i, k, w: st.convolve(v, w[0]),
        lambda v, i, k, w: st.correlate(v[:2], v, "same"),
        lambda v, i, k, w: st.jacrev(lambda v: v * v)(v),
    ],
)
def test_the_split_of_a_batch_stays(fn: Any, backend: str) -> None:
    rng = np.random.default_rng(0)
    host = [rng.uniform(-1, 1, (7, 4)), rng.integers(0, 4, (7, 2)), rng.integers(-4, 4, (7,))]
    xs, w = [put(x, backend, spec=st.P("x")) for x in host], put(rng.standard_normal((4, 4)), backend, spec=st.P())
    wanted = np.stack([np.asarray(fn(*[x[n] for x in xs], w)) for n in range(7)])
    with st.transfers() as log:
        found = st.vmap(fn, in_axes=(0, 0, 0, None))(*xs, w)
    assert found.sharding.spec == st.P("x")
    assert log.bytes < 400  # Constants of the host, and index arrays, but no batch.
    np.testing.assert_allclose(np.asarray(found), wanted, rtol=1e-12)


def test_an_index_of_a_batch_around_other_interpreters() -> None:
    x, k = array(5, 4), np.arange(5) % 4
    found = st.vmap(st.grad(lambda v, k: v[k] ** 2))(x, k)
    np.testing.assert_allclose(np.asarray(found), np.eye(4)[k] * 2 * x)
    found = st.vmap(lambda k: st.vmap(lambda v: v[k])(x))(k)
    np.testing.assert_allclose(np.asarray(found), x[:, k].T)

    def written(v: Any, k: Any) -> Any:
        y = v * 1.0
        y[k] = 0
        return (y**2).sum()

    found = st.vmap(st.grad(written))(x, k)
    np.testing.assert_allclose(np.asarray(found), 2 * x * (1 - np.eye(4)[k]))


def test_results_that_are_the_same_for_all_examples_are_where_the_batch_is() -> None:
    x = put(array(7, 3), "numpy", spec=st.P("x"))
    for fn in (lambda a: 3.0, lambda a: st.ones(3), lambda a: np.ones(3), st.grad(lambda a: (a * 2).sum())):
        found = st.vmap(fn)(x)
        assert found.sharding.mesh == x.sharding.mesh
        assert found.sharding.spec == st.P("x")
    outer = st.vmap(lambda v: st.grad(lambda w: (st.einsum("i,j->ij", v, w) * np.arange(9.0).reshape(3, 3)).sum())(v))
    np.testing.assert_allclose(np.asarray(outer(x)), array(7, 3) @ np.arange(9.0).reshape(3, 3))


@everywhere
def test_masks_of_examples_behind_whole_slices(backend: str) -> None:
    x, s = array(7, 4, 3), array(7)

    def chosen(a: Any, m: Any, s: Any) -> Any:
        y = a * 1
        y[:, m] = s
        y[..., 1:][:, m[1:]] = 2.0
        return y

    m = x[:, 0] > 0
    found = st.vmap(chosen)(put(x, backend), put(m, backend), put(s, backend))
    np.testing.assert_array_equal(np.asarray(found), np.stack([chosen(*row) for row in zip(x, m, s, strict=True)]))


def test_parameters_that_differ() -> None:
    x, at = array(7, 4), np.random.default_rng(0).integers(0, 4, (7, 2))

    def along(row: Any, at: Any) -> Any:
        y = row * 1
        np.put_along_axis(y, at, np.asarray([5.0, 6.0]), axis=0)
        return y

    wanted = np.stack([along(*row) for row in zip(x, at, strict=True)])
    for fn in (st.vmap(along), st.jit(st.vmap(along))):
        np.testing.assert_array_equal(np.asarray(fn(x, at)), wanted)
    found = st.vmap(lambda row: st.searchsorted(row, np.asarray([-1.0, 0.5]), sorter=st.argsort(row)))(x)
    np.testing.assert_array_equal(np.asarray(found), [np.searchsorted(np.sort(row), [-1.0, 0.5]) for row in x])
    found = st.vmap(lambda row: np.tensordot(row, row, axes=[[0], [0]]))(x)
    np.testing.assert_allclose(np.asarray(found), (x * x).sum(axis=1))
    assert st.vmap(lambda row: st.roll(row, 1))(array(0, 4)).shape == (0, 4)


@everywhere
def test_additions_at_indices_of_each_example(backend: str) -> None:
    x, at = array(7, 4, 3), np.random.default_rng(0).integers(-4, 4, (7, 5))

    def summed(ns: Any, a: Any, i: Any) -> Any:
        y, z = ns.zeros(4), a * 1
        np.add.at(y, i, 1.0)
        np.maximum.at(z, i[:4], a[::-1])
        np.multiply.at(z, (i, 1), 2.0)
        np.negative.at(z, (0, i % 3))
        return z * y[:, None]

    wanted = np.stack([summed(np, *row) for row in zip(x, at, strict=True)])
    given = put(x, backend), put(at, backend)
    for fn in (st.vmap(lambda a, i: summed(st, a, i)), st.jit(st.vmap(lambda a, i: summed(st, a, i)))):
        found = fn(*given)
        assert found.sharding.spec == st.P("x")
        np.testing.assert_allclose(np.asarray(found), wanted, rtol=1e-12)
    with pytest.raises(st.IndexingError, match=r"index [0-9]+ is out of bounds for axis 0 with size 4"):
        st.vmap(lambda a, i: np.add.at(a, i, 1.0))(put(x, backend), put(at % 4 + 9, backend))


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("method", ["linear", "nearest", "averaged_inverted_cdf", "weibull"])
@pytest.mark.parametrize("dtype", ["float64", "float32", "int64"])
def test_quantiles_of_probabilities_that_differ(dtype: str, method: str) -> None:
    x, q = (array(7, 4, 3) * 9).astype(dtype), np.random.default_rng(1).uniform(0, 1, (7, 2))
    q[0], q[1] = [0, 1], [1 / 3, 0.5]
    if dtype != "int64":
        x[2, 1, 1], x[3, 2], x[1] = np.nan, np.inf, np.inf
    for axis, keepdims in ((None, False), (0, True), (-1, False)):
        fn = functools.partial(np.quantile, axis=axis, keepdims=keepdims, method=method)
        found = st.vmap(fn)(put(x, "numpy", spec=st.P("x")), put(q, "numpy", spec=st.P("x")))
        wanted = np.stack([np.asarray(fn(st.asarray(a), st.asarray(b))) for a, b in zip(x, q, strict=True)])
        assert (found.dtype, found.sharding.spec) == (wanted.dtype, st.P("x"))
        np.testing.assert_allclose(np.asarray(found), wanted, rtol=1e-6 if dtype == "float32" else 1e-12)
