"""Gradients of maps, and within their programs, compared with central differences, with JAX, and without a map."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import numpy as np
import pytest

import shardtensor as st
from shardtensor.core import OPS, implements, innermost
from shardtensor.interpreters.differentiation.tape import Tape
from shardtensor.spmd.collectives import collective
from tests import peers
from tests.communication.test_distributed import FULL, launch
from tests.communication.test_engines import NO_MPI
from tests.interpreters.differentiation.numeric import check_gradients, direction
from tests.layouts import mesh_of

N = 4
P = st.P


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def put(x: Any, backend: str, *spec: Any, shape: tuple[int, ...] = (N,)) -> st.ShardedTensor:
    return st.device_put(x, st.NamedSharding(mesh_of(shape, backend), P(*spec)))


def arguments(backend: str = "numpy") -> tuple[Any, Any]:
    return put(rng(1).standard_normal((3, 3)), backend), put(rng(2).standard_normal((8, 3)), backend, "x")


def mapped(body: Any, in_specs: Any, out_specs: Any, backend: str = "numpy", **given: Any) -> Any:
    shape = given.pop("shape", (N,))
    return st.shard_map(body, mesh=mesh_of(shape, backend), in_specs=in_specs, out_specs=out_specs, **given)


def check(fn: Callable[..., Any], *args: Any, jit: bool = True, twice: bool = False) -> list[Any]:
    """Compares gradients with central differences, with those under jit and by inference, and second derivatives."""
    numbers = tuple(range(len(args)))
    found = check_gradients(fn, args, numbers)
    if jit:
        for g, compiled in zip(found, st.jit(st.grad(fn, numbers))(*args), strict=True):
            np.testing.assert_allclose(np.asarray(compiled), np.asarray(g), rtol=1e-12, atol=1e-12)
        for g, kind in zip(found, st.eval_shape(st.grad(fn, numbers), *args), strict=True):
            assert (kind.shape, kind.dtype, kind.sharding) == (g.shape, g.dtype, g.sharding)
    if twice:
        check_gradients(lambda *xs: sum([(g * g).sum() for g in st.grad(fn, numbers)(*xs)]), args, numbers, limit=1e-5)
    return found


# -- collectives -----------------------------------------------------------------------------------

GROUPS = [[0, 2], [1, 3]]


def ragged(x: Any, groups: Any = None) -> Any:
    """Sends slices of x, some of which overlap, and some of which are empty, into another array that depends on x."""
    sizes = np.array([[(i + 2 * k) % 3 for k in range(N)] for i in range(N)])
    places = np.cumsum(sizes, axis=0) - sizes + 1
    if groups is not None:  # Each program has numbers for its group only.
        sizes, places = np.ones((N, 2), int), np.array([[1 + i // 2] * 2 for i in range(N)])
    i = st.axis_index("i")
    expected = sizes[:, i] if groups is None else sizes[i]
    begins = np.arange(sizes.shape[1]) % 2 + i % 2
    output = st.concat([st.cos(x), x[:4]])
    return st.ragged_all_to_all(
        x, output, begins, sizes[i], places[i], expected, axis_name="i", axis_index_groups=groups
    )


COLLECTIVES: dict[str, Callable[[Any], Any]] = {
    "ragged_all_to_all": ragged,
    "ragged_all_to_all in groups": lambda x: ragged(x, GROUPS),
    "psum": lambda x: st.psum(x, "i"),
    "psum in groups": lambda x: st.psum(x, "i", axis_index_groups=GROUPS),
    "psum of trees": lambda x: st.psum({"a": x, "b": (x[0], 2)}, "i")["b"][0],
    "pmean": lambda x: st.pmean(x, "i"),
    "pmax": lambda x: st.pmax(x, "i"),
    "pmax in groups": lambda x: st.pmax(x, "i", axis_index_groups=GROUPS),
    "pmin": lambda x: st.pmin(x, "i"),
    "pprod": lambda x: st.pprod(x, "i"),
    "all_gather": lambda x: st.all_gather(x, "i", axis=1),
    "all_gather tiled": lambda x: st.all_gather(x, "i", axis=-1, tiled=True),
    "all_to_all": lambda x: st.all_to_all(x, "i", 1, 0),
    "all_to_all tiled": lambda x: st.all_to_all(x, "i", 0, 1, tiled=True),
    "ppermute": lambda x: st.ppermute(x, "i", [(0, 1), (1, 2), (3, 0)]),
    "pshuffle": lambda x: st.pshuffle(x, "i", [1, 2, 3, 0]),
    "pbroadcast": lambda x: st.pbroadcast(x, "i", 2),
    "psum_scatter": lambda x: st.psum_scatter(x, "i", scatter_dimension=-1),
    "psum_scatter tiled": lambda x: st.psum_scatter(x, "i", tiled=True),
    "pswapaxes": lambda x: st.pswapaxes(x, "i", 1),
}


def loss(name: str, x: Any) -> Any:
    """A number that depends on the results of a collective, and on the program."""
    y = COLLECTIVES[name](st.sin(x))
    return (y * y * (1 + st.axis_index("i"))).sum() + y.sum() ** 2


@pytest.mark.parametrize("name", COLLECTIVES)
def test_collectives(name: str) -> None:
    x = rng().standard_normal((N, 8, N))

    def replicated(x: Any) -> Any:
        mesh = st.Mesh(np.array(st.devices()[:N], object), ("i",))
        return st.shard_map(lambda x: st.psum(loss(name, x[0]), "i"), mesh=mesh, in_specs=P("i"), out_specs=P())(x)

    def listed(x: Any) -> Any:
        """Of a list of results, some are used."""
        made = st.pmap(lambda x: loss(name, x[0]), st.shard(x, devices=st.devices()[:N]), axis_name="i")
        return made[1] + 2 * made[3]

    def different(x: Any) -> Any:
        """Of programs that differ, one does not depend on the argument."""

        def body(x: Any) -> Any:
            at = st.axis_index("i")
            return loss(name, x * 2 if at == 1 else np.full((8, N), 0.5) if at == 2 else st.cos(x) * x)

        return st.pmap(body, x, axis_name="i").sum()

    check(replicated, x)
    check(listed, x, jit=False)
    check(different, x)


@pytest.mark.full
@pytest.mark.parametrize("name", COLLECTIVES)
def test_second_derivatives_of_collectives(name: str) -> None:
    x = rng().standard_normal((N, 4, N)) / 2
    check(lambda x: st.pmap(lambda x: loss(name, x), x, axis_name="i").sum(), x, twice=True)


def test_the_product_of_zeros() -> None:
    for zeros in ([0], [0, 2]):
        x = np.arange(1.0, N + 1)
        x[zeros] = 0
        g = st.grad(lambda x: st.pmap(lambda x: st.pprod(x, "i"), x, axis_name="i").sum())(x)
        wanted = [N * np.prod(np.delete(x, k)) for k in range(N)]
        assert np.asarray(g).tolist() == wanted


def test_equal_extremes_share_the_cotangent() -> None:
    g = st.grad(lambda x: st.pmap(lambda x: st.pmax(x, "i"), x, axis_name="i")[0])(np.array([1.0, 3, 3, 2]))
    assert np.asarray(g).tolist() == [0, 0.5, 0.5, 0]


# -- programs of every kind --------------------------------------------------------------------------


def data_parallel(w: Any, x: Any) -> Any:
    return st.pmean((st.tanh(x @ w) ** 2).mean(), "x")


def by_index(w: Any, x: Any) -> Any:
    """Of two kinds of programs one does not use what the other one does."""
    y = st.psum(x @ w, "x")
    return st.psum((y * y if st.axis_index("x") == 0 else y).sum(), "x")


def without_a_gradient(w: Any, x: Any) -> Any:
    y = x @ w if st.axis_index("x") else np.ones((2, 3))
    return st.psum((st.all_gather(y, "x") ** 2).sum(), "x")


def writes(w: Any, x: Any) -> Any:
    y = x.copy()
    y[0] = w[0]
    y += x * w[1]
    y[1:, 0] *= 2
    return st.psum((y * y).sum(), "x")


def again(w: Any, x: Any) -> Any:
    f = st.remat(lambda w, x: st.psum(st.tanh(st.tanh(x @ w) @ w), "x"))
    return st.psum((f(w, x) ** 2).sum(), "x")


@pytest.mark.parametrize("policy", [None, st.checkpoint_policies.everything_saveable], ids=["none", "everything"])
def test_policies_in_programs(policy: Any) -> None:
    def body(x: Any) -> Any:
        return (st.sin(x) * st.cos(st.psum(x, "i") + np.arange(3)) + st.zeros(3)).sum()

    x, f = rng().standard_normal((N, 3)), st.remat(body, policy=policy)
    wanted = st.pmap(st.grad(body), axis_name="i")(x)
    np.testing.assert_allclose(st.pmap(st.grad(f), axis_name="i")(x), wanted)
    np.testing.assert_allclose(st.grad(lambda x: st.pmap(f, axis_name="i")(x).sum())(x), wanted)


REPLICATED: dict[str, Callable[[Any, Any], Any]] = {
    "data parallel": data_parallel,
    "numbers that differ": lambda w, x: st.psum((st.sin(w) * (st.axis_index("x") + 1)).sum() + x.sum(), "x"),
    "one value": lambda w, x: (st.sin(w) * w).sum() + st.psum(x.sum(), "x") * 0.5,
    "computed of a sum": lambda w, x: ((st.psum(x.sum(axis=0), "x") @ w) ** 2).sum() * 0.5,
    "by index": by_index,
    "by the kind of index": lambda w, x: st.psum((x @ w if st.axis_index("x") % 2 else st.sin(x @ w)).sum(), "x"),
    "without a gradient": without_a_gradient,
    "gathered": lambda w, x: st.psum((st.all_gather(x @ w, "x", tiled=True) ** 2).sum(), "x"),
    "writes": writes,
    "again": again,
    "reversed": lambda w, x: st.pmean((st.psum(x, "x")[::-1] @ w).sum(), "x") * st.pmean(x[::-1], "x").sum(),
    "index array": lambda w, x: st.psum((w[np.array([0, 2, 0])] * x[:1]).sum(), "x"),
    "jit inside": lambda w, x: st.psum(st.jit(lambda w, x: (st.tanh(x @ w) ** 2).sum())(w, x), "x"),
    "random": lambda w, x: st.psum(
        (x @ w * st.random.uniform(st.random.fold_in(st.random.key(0), st.axis_index("x")), (2, 3))).sum() ** 2, "x"
    ),
}


@pytest.mark.parametrize("name", REPLICATED)
def test_programs_with_one_result(name: str, request: pytest.FixtureRequest) -> None:
    is_full = request.config.getoption("--full")
    check(mapped(REPLICATED[name], (P(), P("x")), P()), *arguments(), twice=is_full)


@pytest.mark.parametrize("rows", [7, 2])
def test_uneven_blocks(rows: int) -> None:
    w, x = arguments()[0], put(rng().standard_normal((rows, 3)), "numpy", "x")
    check(mapped(lambda w, x: st.psum((st.tanh(x @ w) ** 2).sum(), "x"), (P(), P("x")), P()), w, x)
    check(mapped(REPLICATED["gathered"], (P(), P("x")), P()), w, x)
    each = mapped(lambda w, x: st.tanh(x @ w), (P(), P("x")), P("x"))
    check(lambda w, x: (each(w, x) ** 2).sum(), w, x)


def test_results_of_other_sizes_than_those_of_the_split_rule() -> None:
    _, x = arguments()
    some = mapped(lambda x: x[: 1 + st.axis_index("x") % 2] * 2, P("x"), P("x"))
    check(lambda x: (some(x) ** 3).sum(), x)
    unsplit = st.pmap(lambda x: x[: 1 + st.axis_index("i") % 2] ** 2, axis_name="i")
    check(lambda x: (st.unshard(unsplit(st.shard(x, devices=st.devices()[:N]))) ** 2).sum(), x, jit=False)


def test_several_results() -> None:
    w, x = arguments()
    body = lambda w, x: (st.sin(w), x @ w, st.psum(x @ w, "x") * w[0], w, x[:1], w[0])  # noqa: E731
    fn = mapped(body, (P(), P("x")), (P(), P("x"), P(), P(), P("x"), P("x")))
    check(lambda w, x: sum([(y * y * (k + 1)).sum() for k, y in enumerate(fn(w, x))]), w, x, twice=True)
    (value, aux), _ = st.value_and_grad(
        mapped(lambda x: (st.psum(x.sum(), "x"), x), P("x"), (P(), P("x"))), has_aux=True
    )(x)
    assert float(value) == pytest.approx(float(x.sum()))
    np.testing.assert_array_equal(np.asarray(aux), np.asarray(x))


def test_maps_in_a_chain() -> None:
    w, x = arguments()
    f = mapped(lambda w: st.psum(st.sin(w) * (1 + st.axis_index("x")), "x"), P(), P())
    check(lambda w: f(f(w)).sum(), w, twice=True)
    check(lambda w, x: st.remat(mapped(data_parallel, (P(), P("x")), P()))(w, x) * 2, w, x, twice=True)
    check(st.jit(mapped(data_parallel, (P(), P("x")), P())), w, x)


def test_control_flow_on_values() -> None:
    def body(w: Any, x: Any) -> Any:
        y = x @ w
        while float((y * y).sum()) > 1:
            y = y * (0.5 if float(y.sum()) > 0 else 0.7)
        return st.psum((y + x[np.asarray(st.stop_gradient(x))[:, 0] > 0].sum()).sum(), "x")

    check(mapped(body, (P(), P("x")), P()), *arguments(), jit=False, twice=True)


def test_values_that_a_function_closes_over() -> None:
    w, x = arguments()
    sum_of = lambda x, w: st.psum((st.tanh(x @ w) ** 2).sum(), "x")  # noqa: E731
    check(lambda w, x: mapped(lambda x: sum_of(x, w), P("x"), P())(x), w, x, twice=True)
    check(lambda w: mapped(lambda x: sum_of(x, w), P("x"), P())(x), w)
    again = lambda x, w: st.psum(st.remat(lambda x: st.tanh(x @ w) @ w)(x).sum(), "x")  # noqa: E731
    check(lambda w: mapped(lambda x: again(x, w), P("x"), P())(x), w)
    check(lambda w: (mapped(lambda x: w, P("x"), P())(x) ** 2).sum(), w)
    check(lambda w: (mapped(lambda x: st.psum(x @ w[:2].T, "x"), P("x"), P())(x) ** 2).sum(), w)
    by_one = lambda x, w: st.psum(x @ w if st.axis_index("x") == 2 else x, "x").sum()  # noqa: E731
    check(lambda w, x: mapped(lambda x: by_one(x, w), P("x"), P())(x), w, x)
    ids = put(np.arange(8) % 3, "numpy", "x")
    check(lambda w: mapped(lambda i: st.psum((w[i] * i[:, None]).sum() ** 2, "x"), P("x"), P())(ids), w)

    def nested(w: Any, x: Any) -> Any:
        inner = lambda x: st.pmap(lambda r: (st.sin(r) @ w).sum() ** 2, x)  # noqa: E731
        return st.pmap(lambda x: inner(x).sum(), x.reshape(2, 2, 2, 3)).sum()

    check(nested, w, x)


GRID = (2, 2)


def grid_arguments() -> list[Any]:
    shapes = {(4, 8): (None, "y"), (8, 4): ("y",), (4,): (), (6, 4): ("x",)}
    return [put(rng(k).standard_normal(s), "numpy", *p, shape=GRID) for k, (s, p) in enumerate(shapes.items())]


def tensor_parallel(first: Any, second: Any, bias: Any, x: Any) -> Any:
    for _ in range(2):
        x = x + st.psum(st.tanh(x @ first) @ second, "y") + bias
    return st.pmean((x * x).mean(), "x")


def test_two_axes() -> None:
    first, second, bias, x = grid_arguments()
    specs = P(None, "y"), P("y"), P(), P("x")
    check(mapped(tensor_parallel, specs, P(), shape=GRID), first, second, bias, x, twice=True)

    def both(w: Any, x: Any) -> Any:
        y = st.sin(x @ w)
        return st.pmax(y, ("x", "y")).sum() + st.psum(st.all_gather(y, ("y", "x")).sum() ** 2, ("x", "y"))

    w = put(np.asarray(first), "numpy", shape=GRID)
    check(mapped(both, (P(), P("x")), P(), shape=GRID), w, x)


def test_some_of_the_axes_and_maps_in_maps() -> None:
    first, _, _, x = grid_arguments()
    mesh = mesh_of(GRID, "numpy")
    outer: Any = {"shape": GRID, "axis_names": {"x"}}
    rows = mapped(lambda w, x: st.tanh(x @ w), (P(), P("x")), P("x"), **outer)
    check(lambda w, x: (rows(w, x) ** 2).sum(), first, x, twice=True)
    check(mapped(lambda w, x: st.pmean(st.sin(x @ w).sum(), "x"), (P(), P("x")), P(), **outer), first, x)

    def body(w: Any, x: Any) -> Any:
        inner = lambda w, x: st.psum((st.tanh(x @ w) ** 2).sum() * st.psum(x.sum(), "x"), "y")  # noqa: E731
        return st.psum(st.shard_map(inner, mesh=mesh, in_specs=(P(None, "y"), P()), out_specs=P())(w, x), "x")

    check(mapped(body, (P(), P("x")), P(), **outer), first, x, twice=True)
    within = lambda x: (st.sin(x) ** 2).sum() + st.psum(x.sum(), "b") ** 2 + st.psum(x.prod(), "a")  # noqa: E731
    twice = st.pmap(st.pmap(within, axis_name="b"), axis_name="a")
    check(lambda x: twice(x).sum(), rng().standard_normal((2, 3, 4)))


def test_pmap_of_arrays() -> None:
    w, x = rng(1).standard_normal((3, 3)), rng(2).standard_normal((N, 2, 3))
    check(lambda w, x: st.pmap(lambda w, x: st.tanh(x @ w).sum(), w, x, in_axes=(None, 0)).sum(), w, x)
    check(lambda w, x: st.pmap(lambda w, x: st.tanh(x @ w).sum(), w, x, in_axes=(None, 0)).sum(), put(w, "numpy"), x)
    one = st.pmap(lambda x: st.psum(x.sum(axis=0), "i"), in_axes=2, out_axes=None, axis_name="i")
    check(lambda x: (one(x) ** 2).sum(), rng().standard_normal((2, 3, N)), twice=True)
    check(lambda x: st.pmap(lambda x, k: x**k, x, 3, static_argnums=1).sum(), x)
    check(lambda x, y: (st.pmap(lambda x, *, y: (x * y, y), out_axes=(1, 0))(x, y=y)[0] ** 2).sum(), x, x + 1)


def test_lists() -> None:
    x = rng().standard_normal((9, 2))

    def chain(x: Any) -> Any:
        one, other = st.pmap(st.sin, st.shard(x)), st.pmap(lambda a: a + 1, st.shard(x))
        return (st.unshard(st.pmap(lambda a, b: a * b, one, other)) ** 2).sum()

    check(chain, x, twice=True)
    check(lambda x: sum([y.sum() for y in st.pmap(lambda a, b: st.sin(a) * b, [x[k] for k in range(9)], x[0])]), x)
    check(lambda x: (st.unshard(st.shard(x * 2, axis=1, devices=st.devices()[:2]), axis=1) ** 3).sum(), x)
    check(lambda x: (st.stack(st.pmap(lambda x: x.sum(axis=0) ** 2, st.shard(x))) ** 2).sum(), x)
    check(lambda x: sum([(b**2).sum() * (k + 1) for k, b in enumerate(st.to_batched_list(x, 4))]), x)

    check(
        lambda x: sum([(p[0] ** 2).sum() for p in st.pmap(lambda a: a[:2], st.shard(x, devices=st.devices()[:4]))]), x
    )

    def of_trees(x: Any) -> Any:
        items = [{"x": part, "k": k} for k, part in enumerate(st.shard(x, devices=st.devices()[:3]))]
        made = st.pmap(lambda d: {"y": d["x"] ** d["k"], "times": 2.0, "n": None}, items)
        return sum([d["y"].sum() * d["times"] for d in made])

    check(of_trees, x, jit=False)

    def of_other_trees(x: Any) -> Any:
        made = st.pmap(lambda a, n: [a * a] * n, st.shard(x, devices=st.devices()[:3]), [1, 2, 3])
        return sum([y.sum() for row in made for y in row])

    check(of_other_trees, x, jit=False)


def test_smap() -> None:
    x, y = rng(1).standard_normal((9, 2)), rng(2).standard_normal((9, 2))
    check(lambda x, y: (st.smap(lambda a, b: np.sin(a) * b, x, y) ** 2).sum(), x, y, twice=True)
    cells = lambda a: (np.sin(a) ** 2).sum() + a[0, 0]  # noqa: E731
    check(lambda x: (st.smap(cells, x, axes=[(0, 1)], axis_name=("a", "b")) ** 2).sum(), x)


def test_the_current_device() -> None:
    w, x = arguments()
    found = set()

    def body(w: Any, x: Any) -> Any:
        def inner(w: Any) -> Any:
            found.add(st.current_device())
            return w.sum()

        inner(w)
        return st.psum((x @ w + st.zeros(3)).sum() + st.grad(inner)(w).sum(), "x")

    st.grad(lambda w: mapped(body, (P(), P("x")), P())(w, x))(w)
    assert found == {*w.sharding.mesh.flat}


def test_scalars_and_dtypes() -> None:
    w, x = arguments()
    check(mapped(lambda w, x: st.psum((x * w).sum(), "x"), (P(), P("x")), P()), np.float64(2.0), x)
    assert float(st.jit(st.grad(mapped(lambda w, x: st.psum((x * w).sum(), "x"), (P(), P("x")), P())))(2.0, x)) == (
        pytest.approx(float(x.sum()))
    )
    wanted = st.grad(mapped(data_parallel, (P(), P("x")), P()))(w, x)
    for dtype in (st.float32, st.bfloat16):
        g = st.grad(mapped(data_parallel, (P(), P("x")), P()))(w.astype(dtype), x.astype(dtype))
        assert g.dtype == dtype
        np.testing.assert_allclose(np.asarray(g).astype(float), np.asarray(wanted), atol=0.01)
    z = put(rng(1).standard_normal((8, 3)) + 1j * rng(2).standard_normal((8, 3)), "numpy", "x")
    body = lambda z: st.psum(st.abs(st.psum(z * z, "x") * z + st.pprod(z, "x")).sum(), "x")  # noqa: E731
    g = st.grad(mapped(body, P("x"), P()))(z)
    blocks = lambda z: [z[2 * k : 2 * k + 2] for k in range(N)]  # noqa: E731
    plain = lambda z: sum([  # noqa: E731
        st.abs(sum([b * b for b in blocks(z)]) * b + z[:2] * z[2:4] * z[4:6] * z[6:]).sum() for b in blocks(z)
    ])  # fmt: skip
    np.testing.assert_allclose(np.asarray(g), np.asarray(st.grad(plain)(z)), rtol=1e-12)


def test_pulls_and_tangents() -> None:
    w, x = arguments()
    fn = mapped(lambda w, x: (x @ w, st.psum(x @ w, "x")), (P(), P("x")), (P("x"), P()))
    value, pull = st.vjp(fn, w, x)
    cotangents = tuple([st.device_put(direction(y, rng()), y.sharding) for y in value])
    once, again = pull(cotangents), pull(cotangents)
    for a, b in zip(once, again, strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    tangents = w * 2 + 1, x - 1
    _, pushed = st.jvp(fn, (w, x), tangents)
    forwards = sum([float((c * t).sum()) for c, t in zip(cotangents, pushed, strict=True)])
    backwards = sum([float((g * t).sum()) for g, t in zip(once, tangents, strict=True)])
    assert forwards == pytest.approx(backwards, rel=1e-12)


def test_backends(backend: str) -> None:
    w, x = arguments(backend)

    def body(w: Any, x: Any) -> Any:
        y = x @ w if float(x.sum()) > 0 else st.sin(x @ w)
        y[0] = y[0] * w[0]
        z = st.all_gather(y, "x", tiled=True)
        return st.psum((z[:2] * y).sum(), "x") + st.pmax(y, "x").sum() + st.pprod(y, "x").sum()

    check(mapped(body, (P(), P("x")), P(), backend), w, x, jit=False)
    # An argument that is not differentiated is an array of the backend.
    check(
        lambda w: mapped(lambda w, x: st.psum((st.tanh(x @ w) + x * w[0]).sum(), "x"), (P(), P("x")), P(), backend)(
            w, x
        ),
        w,
    )
    step = mapped(lambda w, x: st.pmean(st.grad(local)(w, x), "x"), (P(), P("x")), P(), backend)
    np.testing.assert_allclose(np.asarray(step(w, x)), np.asarray(st.grad(local)(w, x)), rtol=1e-12)


# -- gradients within programs -----------------------------------------------------------------------


def local(w: Any, x: Any) -> Any:
    return (st.tanh(x @ w) ** 2).mean()


WRAPPERS: Sequence[Any] = [pytest.param(lambda f: f, id="eager"), pytest.param(st.jit, id="jit")]


@pytest.mark.parametrize("wrap", WRAPPERS)
def test_the_mean_of_local_gradients(wrap: Any) -> None:
    w, x = arguments()
    wanted, kinds = np.asarray(st.grad(local)(w, x)), list[Any]()

    def step(w: Any, x: Any) -> Any:
        value, g = st.value_and_grad(lambda w: local(w, x))(w)
        kinds.append((type(value), type(g)))
        return st.pmean(value, "x"), st.pmean(g, "x")

    value, g = wrap(mapped(step, (P(), P("x")), P()))(w, x)
    np.testing.assert_allclose(np.asarray(g), wanted, rtol=1e-12)
    assert float(value) == pytest.approx(float(local(w, x)))
    if wrap is not st.jit:
        assert set(kinds) == {(np.ndarray, np.ndarray)}  # What a program computes with.
    of_arrays = st.pmap(lambda w, x: st.pmean(st.grad(local)(w, x), "i"), in_axes=(None, 0), axis_name="i")
    made = wrap(of_arrays)(np.asarray(w), np.asarray(x).reshape(N, 2, 3))
    np.testing.assert_allclose(np.asarray(made), np.stack([wanted] * N), rtol=1e-12)


@pytest.mark.parametrize("wrap", WRAPPERS)
def test_a_gradient_in_a_program_is_that_of_the_sum_of_all_results(wrap: Any) -> None:
    w, x = arguments()

    def body(w: Any, x: Any) -> Any:
        return st.grad(lambda w: st.pmean(local(w, x), "x") * (1 + st.axis_index("x")))(w)

    found = np.asarray(wrap(mapped(body, (P(), P("x")), P("x")))(w, x)).reshape(N, 3, 3)
    blocks = [np.asarray(x)[2 * k : 2 * k + 2] for k in range(N)]
    wanted = np.stack([np.asarray(st.grad(local)(np.asarray(w), b)) for b in blocks]) * (1 + 2 + 3 + 4) / N
    np.testing.assert_allclose(found, wanted, rtol=1e-12)


def test_gradients_of_gradients_in_programs() -> None:
    def body(w: Any, x: Any) -> Any:
        return st.pmean((st.grad(local)(w, x) ** 2).sum(), "x")

    check(mapped(body, (P(), P("x")), P()), *arguments())


def test_pulls_and_tangents_in_programs() -> None:
    def body(w: Any, x: Any) -> Any:
        y, pull = st.vjp(lambda w: x @ w, w)
        _, tangent = st.jvp(lambda x: st.sin(x) * x, (x,), (x * 0 + 1,))
        return st.psum(pull(y)[0], "x"), tangent

    w, x = arguments()
    g, tangent = mapped(body, (P(), P("x")), (P(), P("x")))(w, x)
    x_ = np.asarray(x)
    np.testing.assert_allclose(np.asarray(g), x_.T @ (x_ @ np.asarray(w)), rtol=1e-12)
    np.testing.assert_allclose(np.asarray(tangent), np.cos(x_) * x_ + np.sin(x_), rtol=1e-12)


# -- bytes --------------------------------------------------------------------------------------------


def moved(fn: Any, *args: Any) -> int:
    with st.transfers() as log:
        fn(*args)
    return log.bytes


@pytest.mark.parametrize("wrap", WRAPPERS)
def test_the_gradient_of_a_replicated_argument_is_one_all_reduce(wrap: Any) -> None:
    (w, x), fn = arguments(), mapped(data_parallel, (P(), P("x")), P())
    gradients = wrap(st.grad(fn))
    gradients(w, x)
    assert moved(gradients, w, x) - moved(fn, w, x) == 2 * (N - 1) * w.nbytes
    assert moved(wrap(st.grad(fn, argnums=1)), w, x) == moved(fn, w, x)


def test_a_gathered_argument_gets_a_reduce_scatter() -> None:
    def body(w: Any, x: Any) -> Any:
        return data_parallel(st.all_gather(w, "x", tiled=True), x)

    _, x = arguments()
    w = put(rng().standard_normal((3, 3)), "numpy", "x")
    fn = mapped(body, (P("x"), P("x")), P())
    assert moved(st.grad(fn), w, x) - moved(fn, w, x) == (N - 1) * w.nbytes
    outside = lambda w, x: mapped(data_parallel, (P(), P("x")), P())(st.reshard(w, x.sharding.with_spec(P())), x)  # noqa: E731
    w = put(rng().standard_normal((3, 3)), "numpy", None, "x")
    assert moved(st.grad(outside), w, x) - moved(outside, w, x) == (N - 1) * w.nbytes


def test_gradients_of_lists_stay_on_their_devices() -> None:
    (w, x), devices = arguments(), mesh_of((N,), "numpy").flat

    def joined(x: Any) -> Any:
        return (st.unshard(st.pmap(st.sin, st.shard(x, devices=devices))) ** 2).sum()

    def stacked(x: Any) -> Any:
        return (st.stack(st.pmap(lambda a: a.sum(axis=0), st.shard(x, devices=devices))) ** 2).sum()

    def shared(w: Any, x: Any) -> Any:
        return (st.unshard(st.pmap(lambda a, w: a @ w, st.shard(x, devices=devices), w)) ** 2).sum()

    for fn in (joined, stacked):
        assert moved(st.grad(fn), x) == moved(fn, x)
    assert moved(st.grad(shared), w, x) == moved(shared, w, x) + 2 * (N - 1) * w.nbytes


def test_arrays_of_a_program_are_operands_where_they_are(backend: str) -> None:
    """Also as the left operand, whose method is called first."""
    devices = mesh_of((2,), backend)
    rows = st.shard(np.ones((6, 3)), devices=devices)
    factors = [st.device_put(np.ones((3, 2)), d) for d in devices.flat]

    def body(block: Any, w: Any) -> Any:
        return st.grad(lambda w: (block @ w).sum() + (st.sum(block, axis=0)[:, None] * w).sum())(w)

    with st.transfers() as log:
        st.pmap(body, rows, factors)
    assert log.bytes == 0


def test_what_is_computed_of_sums_is_not_added_again() -> None:
    def body(w: Any, x: Any) -> Any:
        y = st.psum(x.sum(axis=0), "x")
        return ((y @ w) ** 2).sum() * 0.5

    (w, x), fn = arguments(), mapped(lambda w, x: body(w, x), (P(), P("x")), P())
    assert moved(st.grad(fn, argnums=1), w, x) == moved(fn, w, x)
    first, second, bias, x = grid_arguments()
    fn = mapped(tensor_parallel, (P(None, "y"), P("y"), P(), P("x")), P(), shape=GRID)
    activations = 2 * x.nbytes  # An all-reduce over two devices, in each of two rows of them.
    parameters = 2 * (first.nbytes + second.nbytes)  # Each half is added along x.
    extra = moved(st.grad(fn, argnums=(0, 1)), first, second, bias, x) - moved(fn, first, second, bias, x)
    assert extra == activations + parameters  # Of the two layers, the second one's gradient is needed only.


def test_the_log_is_that_of_a_simulation() -> None:
    w, x = arguments()
    abstract = st.AbstractMesh((N,), ("x",))
    fn = st.shard_map(data_parallel, mesh=abstract, in_specs=(P(), P("x")), out_specs=P())
    given = [st.empty_like(a, device=st.NamedSharding(abstract, a.sharding.spec)) for a in (w, x)]
    real = mapped(data_parallel, (P(), P("x")), P())
    assert st.simulate(st.grad(fn, argnums=(0, 1)), *given).bytes == moved(st.grad(real, argnums=(0, 1)), w, x)
    assert "tanh" in str(st.explain(st.grad(real), w, x))


# -- errors -------------------------------------------------------------------------------------------


def test_errors() -> None:
    w, x = arguments()

    def raises(kind: type[Exception], text: str, fn: Any, *args: Any) -> None:
        with pytest.raises(kind, match=text):
            st.grad(fn)(*args)

    opaque = mapped(lambda x: st.psum(np.asarray(x).sum(), "x"), P("x"), P())
    raises(st.ConcretizationError, r"elements of a tensor are taken out.*st\.custom_vjp", opaque, x)
    donated = lambda x: sum([y.sum() for y in st.pmap(lambda x: x * 2, st.shard(x), donate=True)])  # noqa: E731
    raises(
        st.ArgumentError, "pmap: donate=True gives away the memory of an argument that is differentiated", donated, x
    )
    raises(
        st.ArgumentTypeError,
        "apply_along_axis: it has no derivative",
        mapped(lambda w: st.apply_along_axis(np.flip, 0, w).sum(), P(), P()),
        w,
    )

    def one_more(x: Any) -> Any:
        y = st.psum(x, "x") if st.axis_index("x") else x
        return st.psum(y.sum(), "x")

    raises(st.CollectiveError, r"psum over 'x': numpy:\d called psum", mapped(one_more, P("x"), P()), x)
    raises(ZeroDivisionError, "division", mapped(lambda x: 1 / 0, P("x"), P()), x)

    def written(w: Any) -> Any:
        def body(x: Any) -> Any:
            w[0] = 1.0
            return st.psum(x.sum(), "x")

        return mapped(body, P("x"), P())(x)

    raises(st.ArgumentError, "map: the function writes a differentiated tensor that it closes over", written, w)
    uneven = lambda x: st.all_gather(x[: 1 + st.axis_index("x") % 2], "x", tiled=True).sum()  # noqa: E731
    raises(
        st.ArgumentError, "all_gather: it has no derivative for parts of other sizes", mapped(uneven, P("x"), P()), x
    )
    with pytest.raises(st.ArgumentTypeError, match="grad: the function returns an array"):
        mapped(lambda x: st.grad(lambda x: x)(x), P("x"), P("x"))(x)
    left = list[Any]()
    st.grad(mapped(lambda x: (left.append(x), st.psum(x.sum(), "x"))[1], P("x"), P()))(x)
    with pytest.raises(st.ConcretizationError, match="a tensor left a differentiated function"):
        left[0] + 1
    np.testing.assert_array_equal(np.asarray(st.grad(mapped(lambda x: st.psum(x.sum(), "x"), P("x"), P()))(x)), 1.0)


def test_kernels_with_a_derivative(backend: str) -> None:
    """A function of the user gets the arrays of the device, as in a map without a gradient."""
    kinds = list[Any]()

    def kernel(x: Any) -> Any:
        kinds.append(type(x))
        return x * x * x

    def cube(x: Any) -> Any:
        tape = innermost()
        assert isinstance(tape, Tape)
        state = tape.active(x)
        made = kernel(tape.given(tape.constant(x)))
        slope = lambda g, recorded: [3 * recorded.saved["x"] ** 2 * g]  # noqa: E731
        return tape.add_function(slope, [state], [made], {"x": tape.constant(x)})[0]

    _, x = arguments(backend)
    g = st.grad(mapped(lambda x: st.psum(cube(x * 2).sum(), "x"), P("x"), P(), backend))(x)
    np.testing.assert_allclose(np.asarray(g), 24 * np.asarray(x) ** 2, rtol=1e-12)
    found = list[Any]()
    mapped(lambda x: found.append(type(x)), P("x"), None, backend)(x)
    assert {*kinds} == {*found}


def test_programs_that_do_not_all_take_a_gradient() -> None:
    def body(x: Any) -> Any:
        total = lambda x: st.psum(x.sum(), "x")  # noqa: E731
        return total(x) if st.axis_index("x") else st.grad(total)(x).sum()

    with pytest.raises(st.CollectiveError, match="called psum of a gradient over 'x'"):
        mapped(body, P("x"), P("x"))(arguments()[1])


def test_a_collective_without_a_derivative() -> None:
    with mock.patch.dict(OPS):

        @collective
        def ptwice(x: Any, axis_name: Any) -> Any:
            """Returns twice the array."""

        implements(ptwice, "algorithm", "infer")(lambda x, axis_name: 2 * x)
        fn = mapped(lambda x: st.psum(ptwice(x, "x").sum(), "x"), P("x"), P())
        with pytest.raises(st.ArgumentTypeError, match="ptwice: it has no derivative: none is defined yet"):
            st.grad(fn)(arguments()[1])


def test_what_was_saved_does_not_change_with_an_argument() -> None:
    w, x = arguments()
    before = np.asarray(x).copy()

    def fn(w: Any) -> Any:
        y = mapped(lambda w, x: st.psum((x @ w).sum(), "x"), (P(), P("x")), P())(w, x)
        x[...] = 0
        return y

    np.testing.assert_allclose(
        np.asarray(st.grad(fn)(w)), np.repeat(before.sum(axis=0)[:, None], 3, axis=1), rtol=1e-12
    )


# -- other processes, and JAX -------------------------------------------------------------------------

PROGRAM = str(peers.ROOT / "tests" / "communication" / "spanning_map_gradients.py")


@pytest.mark.skipif(bool(NO_MPI), reason=NO_MPI)
@pytest.mark.parametrize(
    ("engine", "processes"), [("mpi", 2), pytest.param("gloo", 2, marks=FULL), pytest.param("mpi", 4, marks=FULL)]
)
def test_gradients_have_the_bits_of_one_process(engine: str, processes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for count in (processes, 1):
        monkeypatch.setenv("SHARDTENSOR_NUM_DEVICES", str(N // count))
        status, text = launch(engine, count, PROGRAM, limit=60)
        assert status == 0, text
        found.append({re.sub(r"^\[\d+\] ", "", line) for line in text.splitlines()})
    assert len(found[1]) >= 14
    assert found[0] == found[1]


BODIES = {
    "data parallel": "pmean((np.tanh(x @ w) ** 2).mean(), 'x')",
    "computed of a sum": "((psum(x.sum(axis=0), 'x') @ w) ** 2).sum()",
    "index": "psum((np.sin(w) * (axis_index('x') + 1)).sum(), 'x') + psum(x.sum(), 'x')",
    "all_gather": "psum((all_gather(x @ w, 'x', tiled=True)[:2] * x).sum(), 'x')",
    "psum_scatter": "psum((psum_scatter(all_gather(x @ w, 'x', tiled=True), 'x', tiled=True) ** 2).sum(), 'x')",
    "all_to_all": "psum((all_to_all(np.sin(all_gather(x @ w, 'x')), 'x', 0, 1, tiled=True) ** 3).sum(), 'x')",
    "ppermute": "psum((ppermute(x @ w, 'x', [(0, 1), (1, 2), (3, 0)]) * x).sum(), 'x')",
    "pswapaxes": "psum((pswapaxes(all_gather(x @ w, 'x'), 'x', 0) ** 2 * (1 + axis_index('x'))).sum(), 'x')",
    "sum of sums": "psum((psum(x, 'x') * x @ w).sum() * pmean(w * x.sum(), 'x').sum(), 'x')",
}

_OF_JAX = """
import jax
import jax.numpy as np
from jax.lax import all_gather, all_to_all, axis_index, pmean, ppermute, psum, psum_scatter, pswapaxes
from jax.sharding import PartitionSpec as P
jax.config.update("jax_enable_x64", True)
bodies, w, x = given
mesh = jax.sharding.Mesh(jax.devices(), ("x",))
found = {}
for name, text in bodies.items():
    fn = eval("lambda w, x: " + text)
    mapped = jax.shard_map(fn, mesh=mesh, in_specs=(P(), P("x")), out_specs=P())
    found[name] = [__import__("numpy").asarray(g) for g in jax.jit(jax.grad(mapped, argnums=(0, 1)))(w, x)]
"""


@pytest.mark.full
def test_gradients_are_those_of_jax() -> None:
    peers.require_jax("0.10", "0.12")
    w, x = arguments()
    wanted = peers.run(_OF_JAX, (BODIES, np.asarray(w), np.asarray(x)), devices=N)
    space = {name: getattr(st, name) for name in st.__all__} | {"np": np}
    for name, text in BODIES.items():
        found = check(mapped(eval(f"lambda w, x: {text}", dict(space)), (P(), P("x")), P()), w, x)
        for g, answer in zip(found, wanted[name], strict=True):
            np.testing.assert_allclose(np.asarray(g), answer, rtol=1e-12, atol=1e-13, err_msg=name)
