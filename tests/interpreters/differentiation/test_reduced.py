"""Layouts of gradients: reduced arrays have unreduced ones, and unreduced arrays reduced ones; specs of `shard_map`."""

from __future__ import annotations

import pickle
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as some

import shardtensor as st
from tests import peers
from tests.layouts import mesh_of

P = st.P


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def on(mesh: st.Mesh, spec: Any, x: Any) -> st.ShardedTensor:
    return st.device_put(x, st.NamedSharding(mesh, spec))


def close(found: Any, wanted: Any) -> None:
    np.testing.assert_allclose(np.asarray(found), wanted, rtol=1e-10, atol=1e-10)


# -- specs -----------------------------------------------------------------------------------------


def test_specs_are_values() -> None:
    spec = P("x", reduced={"y"})
    assert spec == P("x", reduced=["y"]) == pickle.loads(pickle.dumps(spec)) != P("x")
    assert spec != P("x", unreduced={"y"})
    assert hash(spec) == hash(P("x", reduced=("y",)))
    assert repr(P(None, unreduced={"z"}, reduced={"y", "x"})) == "P(unreduced={'z'}, reduced={'x', 'y'})"
    for wrong, match in (
        (lambda: P("x", reduced={"x"}), "axis 'x' splits a dimension in .* and is among reduced="),
        (lambda: P(unreduced={"x"}, reduced={"x"}), "axis 'x' is among unreduced={'x'} and reduced={'x'}"),
        (lambda: P(reduced="x"), "reduced is 'x'; wanted a set of axis names"),
    ):
        with pytest.raises((st.ShardingError, st.ArgumentTypeError), match=match):
            wrong()


def test_a_reduced_array_is_a_replicated_one(backend: str) -> None:
    mesh = mesh_of((2, 2), backend)
    x = on(mesh, P(None, "y"), np.arange(12.0).reshape(3, 4))
    with st.transfers() as log:
        r = st.reshard(x, st.NamedSharding(mesh, P(None, "y", reduced={"x"})))
        back = st.reshard(r, x.sharding)
    assert log.bytes == 0
    assert (str(st.typeof(r)), str(st.typeof(back))) == ("float64[3,4@y]{R:x}", "float64[3,4@y]")
    assert r.sharding.is_equivalent_to(x.sharding, 2)
    assert st.NamedSharding(mesh, P(reduced={"x", "y"})).is_fully_replicated
    close(r + 1, np.asarray(x) + 1)
    back[0] = 7  # It is a tensor of its own.
    assert r[0].tolist() == [0, 1, 2, 3]
    r[1, :2] = 5
    assert (str(st.typeof(r)), r[1].tolist()) == ("float64[3,4@y]{R:x}", [5, 5, 6, 7])


def test_results_are_reduced_where_all_operands_are(backend: str) -> None:
    mesh = mesh_of((2, 2), backend)
    r, w = on(mesh, P(reduced={"x", "y"}), np.ones((4, 4))), on(mesh, P(), np.ones((4, 4)))
    one = on(mesh, P(reduced={"x"}), np.ones((4, 4)))
    for f in (
        lambda: 2 * r,
        lambda: r.T,
        lambda: r[1:],
        lambda: st.sin(r),
        lambda: r @ r,
        lambda: r.astype("float32"),
        lambda: st.stack([r, r]),
        lambda: st.reshape(r.T, (2, 8)),
        lambda: st.vmap(lambda r: st.reshard(r, st.NamedSharding(mesh, P(reduced={"x", "y"}))))(w),
    ):
        assert f().sharding.spec.reduced == {"x", "y"}
    assert (r * one).sharding.spec.reduced == {"x"}
    assert (r * w).sharding.spec.reduced == frozenset()
    split = on(mesh, P("x"), np.ones((4, 4)))
    assert (r + split).sharding.spec == P("x")
    assert st.eval_shape(lambda r: r.reshape(-1) * 2, r).sharding.spec == P(reduced={"x", "y"})


# -- gradients -------------------------------------------------------------------------------------


def test_gradients_have_the_layouts_of_jaxs_table(backend: str) -> None:
    mesh = mesh_of((2, 2), backend)
    w, x = rng(1).standard_normal((3, 2)), rng(2).standard_normal((7, 3))
    split = on(mesh, P("x"), x)
    wanted = 2 * x.T @ (x @ w)

    def loss(w: Any) -> Any:
        return ((split @ w) ** 2).sum()

    for spec, of_gradient in (
        (P(), P()),
        (P(None, "y"), P(None, "y")),
        (P(reduced={"x"}), P(unreduced={"x"})),
        (P(None, "y", reduced={"x"}), P(None, "y", unreduced={"x"})),
        (P(reduced={"x", "y"}), P(unreduced={"x", "y"})),
        (P(unreduced={"y"}), P(reduced={"y"})),
        (P(unreduced={"y"}, reduced={"x"}), P(unreduced={"x"}, reduced={"y"})),
    ):
        here = on(mesh, spec, w)
        for gradient in (st.grad(loss), st.jit(st.grad(loss)), st.grad(st.jit(loss))):
            found = gradient(here)
            assert found.sharding.spec == of_gradient
            close(found, wanted)
        assert st.eval_shape(st.grad(loss), here).sharding.spec == of_gradient
        value, pull = st.vjp(loss, here)
        assert pull(st.ones_like(value))[0].sharding.spec == of_gradient
        close(st.jvp(loss, (here,), (here,))[1], (wanted * w).sum())
        unused = st.grad(lambda w, x: x.sum())(here, split)
        assert unused.sharding.spec == of_gradient
        assert not np.asarray(unused).any()


def test_tangents_of_views_of_unreduced_arrays(backend: str) -> None:
    mesh = mesh_of((2, 3), backend)
    x, y = rng(1).standard_normal((3, 5)), rng(2).standard_normal((5, 3))
    replicated = on(mesh, P(), x), on(mesh, P(), y)
    for f in (
        lambda x, y: x.T.sum(),
        lambda x, y: (2 * x)[1:].sum(axis=0),
        lambda x, y: x[None] * 3,
        lambda x, y: x.T.reshape(-1),
        lambda x, y: x @ x.T @ y.T,
        lambda x, y: x + y.T,
    ):
        wanted = st.jvp(f, replicated, replicated)
        for spec in (P(unreduced={"y"}), P("x", unreduced={"y"}), P(unreduced={"x"}, reduced={"y"})):
            here = on(mesh, spec, x), on(mesh, spec, y)
            for found in (st.jvp(f, here, here), st.jit(lambda *here, f=f: st.jvp(f, here, here))(*here)):
                close(found[0], wanted[0])
                close(found[1], wanted[1])


def test_tangents_that_are_zero_have_the_layout_of_others(backend: str) -> None:
    mesh = mesh_of((2, 2), backend)
    for spec in (P(reduced={"x"}), P("y", unreduced={"x"}), P("x", "y")):
        x = on(mesh, spec, np.ones((4, 4)))
        zeros, others = [st.jvp(f, (x,), (x,))[1] for f in (lambda x: st.stop_gradient(x) * 2, lambda x: x * 2)]
        assert zeros.sharding == others.sharding
        assert not np.asarray(zeros).any()


def test_loops_and_branches_that_close_over_a_reduced_array(backend: str) -> None:
    mesh = mesh_of((4,), backend)
    w, x = rng(1).standard_normal((3, 2)), rng(2).standard_normal((5, 8, 3))
    batches, begin = on(mesh, P(None, "x"), x), on(mesh, P(), rng(3).standard_normal((3, 2)))

    def scanned(w: Any) -> Any:
        return st.scan(lambda total, x: (total + ((x @ w) ** 2).sum(), None), 0.0, batches)[0]

    def repeated(w: Any) -> Any:
        return (st.fori_loop(0, 3, lambda i, total: total + 0.5 * w, begin) ** 2).sum()

    def carried(w: Any) -> Any:
        return st.fori_loop(0, 3, lambda i, carry: (carry[0] * 2, (carry[1] + carry[0]) * 1.0), (w, w))[1].sum()

    def chosen(w: Any) -> Any:
        return st.cond(begin.sum() > 100, lambda: (begin * (w * w)).sum(), lambda: begin.sum())

    for f in (scanned, repeated, carried, chosen):
        wanted = np.asarray(st.grad(f)(on(mesh, P(), w)))
        for spec in (P(reduced={"x"}), P(unreduced={"x"})):
            here = on(mesh, spec, w)
            for gradient in (st.grad(f), st.jit(st.grad(f)), st.grad(st.jit(f))):
                found = gradient(here)
                assert found.sharding.spec == spec.of_cotangent
                close(found, wanted)
    reduced, gradient = on(mesh, P(reduced={"x"}), w), st.jit(st.grad(scanned))
    gradient(reduced)
    with st.transfers() as log:
        st.jit(scanned)(reduced)
    value = log.bytes
    with st.transfers() as log:
        gradient(reduced)
    assert log.bytes <= value  # No partial sums of the gradient are added, in no trip.


def test_partial_sums_of_gradients_are_not_added(backend: str) -> None:
    mesh = mesh_of((4,), backend)
    w, x = rng(1).standard_normal((3, 2)), [rng(k).standard_normal((7, 3)) for k in (2, 3)]
    first, second = [on(mesh, P("x"), one) for one in x]

    def loss(w: Any) -> Any:
        return (first @ w).sum() + (second @ w).sum()

    def cast(w: Any) -> Any:
        return loss(st.reshard(w, st.NamedSharding(mesh, P(reduced={"x"}))))

    wanted = np.repeat((x[0] + x[1]).sum(axis=0)[:, None], 2, axis=1)
    reduced, replicated = on(mesh, P(reduced={"x"}), w), on(mesh, P(), w)
    for wrap in (lambda f: f, st.jit):
        with st.transfers() as left:
            g = wrap(st.grad(loss))(reduced)
        with st.transfers() as added:
            total = st.reshard(g, replicated.sharding)
        with st.transfers() as log:
            h = wrap(st.grad(cast))(replicated)
        close(total, wanted)
        close(h, wanted)
        assert added.bytes == 2 * 3 * w.nbytes  # one all-reduce
        assert log.bytes == left.bytes + added.bytes
        assert left.bytes <= 2 * 2 * 3 * 8  # at most two scalars


def test_gradients_are_added_up_unreduced(backend: str) -> None:
    """A loop over parts of a batch, of which the gradients are added up before they are reduced."""
    mesh = mesh_of((2,), backend)
    w, xs = rng(1).standard_normal((3, 2)), rng(2).standard_normal((5, 4, 3))
    here, parts = on(mesh, P(reduced={"x"}), w), on(mesh, P(None, "x"), xs)

    def step(w: Any, xs: Any) -> Any:
        def part(total: Any, x: Any) -> Any:
            g = st.grad(lambda w: ((x @ w) ** 2).sum())(w)
            assert st.typeof(g).sharding.spec.unreduced == {"x"}
            return total + g, None

        start = st.reshard(st.zeros_like(w), st.NamedSharding(mesh, P(unreduced={"x"})))
        total, _ = st.scan(part, start, xs)
        return st.reshard(total, st.NamedSharding(mesh, P()))

    for run in (step, st.jit(step)):
        with st.transfers() as log:
            total = run(here, parts)
        close(total, 2 * np.einsum("kbi,kbj->ij", xs, xs) @ w)
        assert log.bytes <= 2 * w.nbytes + 5 * 2 * 8  # one all-reduce, and the sums of the losses


def test_gradients_of_layers_in_a_loop_are_reduced_once(backend: str) -> None:
    """A loop over layers in a loop over parts of a batch: one all-reduce, as in JAX's page on gradients and layouts."""
    mesh = mesh_of((2,), backend)
    ws, xs = rng(1).standard_normal((3, 4, 4)) / 2, rng(2).standard_normal((5, 2, 4))

    def loss(ws: Any, x: Any) -> Any:
        y, _ = st.scan(lambda x, w: (st.tanh(x @ w), None), x, ws)
        return (y**2).sum()

    def step(ws: Any, xs: Any, spec: P) -> Any:
        start = st.reshard(st.zeros_like(ws), st.NamedSharding(mesh, spec))
        total, _ = st.scan(lambda total, x: (total + st.grad(loss)(ws, x), None), start, xs)
        return st.reshard(total, st.NamedSharding(mesh, P()))

    parts, reduced, replicated = on(mesh, P(None, "x"), xs), on(mesh, P(reduced={"x"}), ws), on(mesh, P(), ws)
    with st.transfers() as log:
        total = st.jit(step, static_argnums=2)(reduced, parts, P(unreduced={"x"}))
    assert log.bytes == 2 * ws.nbytes
    with st.transfers() as log:
        wanted = st.jit(step, static_argnums=2)(replicated, parts, P())
    assert log.bytes == 2 * ws.nbytes * len(xs)
    close(total, np.asarray(wanted))
    close(step(reduced, parts, P(unreduced={"x"})), np.asarray(wanted))


def test_gradients_of_batches_and_second_derivatives(backend: str) -> None:
    mesh = mesh_of((2,), backend)
    w, x = rng(1).standard_normal(3), rng(2).standard_normal((5, 3))
    here, split = on(mesh, P(reduced={"x"}), w), on(mesh, P("x"), x)

    def loss(w: Any) -> Any:
        return (st.sin(split @ w) ** 2).sum()

    plain = st.hessian(lambda w: (st.sin(x @ w) ** 2).sum())(w)
    close(st.hessian(loss)(here), np.asarray(plain))
    again = st.grad(lambda w: (st.grad(loss)(w) ** 2).sum())(here)
    close(again, np.asarray(st.grad(lambda w: (st.grad(lambda w: (st.sin(x @ w) ** 2).sum())(w) ** 2).sum())(w)))
    batched = st.vmap(st.grad(loss))(np.stack([w, 2 * w]))
    close(batched[0], np.asarray(st.reshard(st.grad(loss)(here), st.NamedSharding(mesh, P()))))


# -- specs of shard_map ----------------------------------------------------------------------------


def test_an_unreduced_result(backend: str) -> None:
    mesh = mesh_of((2, 2), backend)
    a, b = rng(1).standard_normal((5, 6)), rng(2).standard_normal((6, 3))
    x, y = on(mesh, P(None, "x"), a), on(mesh, P("x"), b)

    @st.shard_map(mesh=mesh, in_specs=(P(None, "x"), P("x")), out_specs=P(unreduced={"x"}), check_vma=False)
    def product(a: Any, b: Any) -> Any:
        return a @ b

    @st.shard_map(mesh=mesh, in_specs=P(unreduced={"x"}), out_specs=P())
    def total(c: Any) -> Any:
        return st.psum(c, "x")

    @st.shard_map(mesh=mesh, out_specs=P("x"))
    def scattered(c: Any) -> Any:
        return st.psum_scatter(c, "x", tiled=True)

    for call in (product, st.jit(product)):
        with st.transfers() as log:
            c = call(x, y)
        assert log.bytes == 0
        assert str(st.typeof(c)) == "float64[5,3]{U:x}"
        close(c, a @ b)
        for shard in c.addressable_shards:
            assert shard.data.shape == (5, 3)
    for sum_up in (total, scattered, st.jit(total), st.jit(scattered)):
        close(sum_up(product(x, y)), a @ b)
    wanted = 2 * (a @ b) @ b.T, 2 * a.T @ (a @ b)
    for f in (
        lambda x, y: (st.reshard(product(x, y), st.NamedSharding(mesh, P())) ** 2).sum(),
        lambda x, y: (total(product(x, y)) ** 2).sum(),
        lambda x, y: (scattered(product(x, y)) ** 2).sum(),
    ):
        for gradient in (st.grad(f, (0, 1)), st.jit(st.grad(f, (0, 1)))):
            for g, want, like in zip(gradient(x, y), wanted, (x, y), strict=True):
                close(g, want)
                assert g.sharding == like.sharding
        close(st.jvp(f, (x, y), (x, y))[1], 4 * ((a @ b) ** 2).sum())
    batch = np.stack([a, 2 * a])
    close(st.vmap(lambda a: total(product(a, y)))(batch), batch @ b)
    grads = st.vmap(st.grad(lambda a: (total(product(a, y)) ** 2).sum()))(batch)
    close(grads, 2 * (batch @ b) @ b.T)


def test_no_communication_in_the_backward_pass_of_an_unreduced_result(backend: str) -> None:
    """As in JAX: the only transfers are those of the reshard, and its transpose has none."""
    mesh = mesh_of((2,), backend)
    x, y = on(mesh, P(None, "x"), np.ones((4, 6))), on(mesh, P("x"), np.ones((6, 3)))
    product = st.shard_map(lambda a, b: a @ b, mesh=mesh, out_specs=P(unreduced={"x"}))
    whole = st.NamedSharding(mesh, P())
    with st.transfers() as forward:
        st.reshard(product(x, y), whole)
    with st.transfers() as both:
        st.grad(lambda x, y: st.reshard(product(x, y), whole).sum(), (0, 1))(x, y)
    assert forward.bytes == both.bytes == 2 * 4 * 3 * 8


@hypothesis.given(some.data())
def test_unreduced_arguments_and_results(backend: str, data: Any) -> None:
    """Blocks are the partial sums; linear functions of them are those of the result."""
    mesh = mesh_of((2, 3), backend)
    shape = data.draw(some.tuples(some.integers(0, 5), some.integers(0, 5)))
    axes = data.draw(some.sampled_from([("x",), ("y",), ("x", "y")]))
    rest = [axis for axis in ("x", "y") if axis not in axes]
    chain = data.draw(some.sampled_from([(), *[(axis,) for axis in rest]]))
    place = data.draw(some.integers(0, 1))
    names = data.draw(some.sampled_from([None, {*axes, *chain}]))
    reduced = {*rest} - {*chain} if names is None else set()
    spec = P(*[chain if d == place else () for d in range(2)], unreduced=set(axes), reduced=reduced)
    dtype = data.draw(some.sampled_from(["float32", "int64", "complex128"]))
    x = rng(len(shape)).integers(-9, 9, shape).astype(dtype)
    own = data.draw(some.booleans())
    given = {} if own else {"in_specs": spec}
    double = st.shard_map(lambda b: b * 2, mesh=mesh, out_specs=spec, axis_names=names, **given)
    tensor = on(mesh, spec, x)
    result = double(tensor)
    assert result.sharding.spec.unreduced == {*axes}
    np.testing.assert_array_equal(np.asarray(result), 2 * x)
    total = st.shard_map(lambda b: st.psum(b, axes), mesh=mesh, out_specs=P(*spec.chains), axis_names=names, **given)
    np.testing.assert_array_equal(np.asarray(total(tensor)), x)


@pytest.mark.parametrize("shape", [(2, 2), (4,)])
def test_reduced_weights_of_a_map(shape: tuple[int, ...], backend: str) -> None:
    mesh = mesh_of(shape, backend)
    axes = mesh.axis_names
    w, x = rng(1).standard_normal((6, 3)), rng(2).standard_normal((9, 6))

    def body(x: Any, w: Any) -> Any:
        return st.tanh(x @ w)

    specs = P(axes), P(reduced=set(axes))
    layer = st.shard_map(body, mesh=mesh, in_specs=specs, out_specs=P(axes))
    split = on(mesh, P(axes), x)
    y = np.tanh(x @ w)
    wanted = x.T @ (2 * y * (1 - y**2))

    def loss(w: Any) -> Any:
        return (layer(split, w) ** 2).sum()

    for spec, left in ((P(reduced=set(axes)), set(axes)), (P(), set())):
        here = on(mesh, spec, w)
        for gradient in (st.grad(loss), st.jit(st.grad(loss))):
            with st.transfers() as log:
                g = gradient(here)
            close(g, wanted)
            assert g.sharding.spec == P(unreduced=left)
            scalars = 2 * (mesh.size - 1) * 8
            assert log.bytes <= scalars + (0 if left else 2 * (mesh.size - 1) * w.nbytes)


def test_gradients_of_examples_whose_map_returns_partial_sums(backend: str) -> None:
    mesh = mesh_of((2, 2), backend)
    x, y, scales = rng(1).standard_normal((5, 3)), rng(2).standard_normal((5, 2)), np.array([1.0, -2.0, 3.0])
    products = st.shard_map(lambda x, y: x.T @ y, mesh=mesh, in_specs=(P("x"), P("x")), out_specs=P(unreduced={"x"}))

    def gradient(scale: Any, of: Any) -> Any:
        return st.grad(lambda x: (of(scale * x, y) ** 2).sum())(x)

    found = st.vmap(lambda scale: gradient(scale, products))(scales)
    close(found, np.stack([np.asarray(gradient(scale, lambda x, y: x.T @ y)) for scale in scales]))


def test_gradients_of_functions_that_are_not_of_the_sum_are_errors(backend: str) -> None:
    mesh = mesh_of((2,), backend)
    sums = st.shard_map(lambda x: x, mesh=mesh, in_specs=P("x"), out_specs=P(unreduced={"x"}))(np.arange(4.0))
    f = st.shard_map(lambda c: c**2, mesh=mesh, in_specs=P(unreduced={"x"}), out_specs=P("x"))
    with pytest.raises(st.ShapeError, match="the cotangent of the partial sums of an array is that of their sum"):
        st.grad(lambda c: f(c).sum())(sums)


def test_errors_of_specs(backend: str) -> None:
    mesh = mesh_of((2, 2), backend)
    x = on(mesh, P("x"), np.ones((4, 4)))
    for options, match in (
        ({"in_specs": P(unreduced={"z"})}, r"in_specs has P\(unreduced={'z'}\), which names axis 'z'; the mesh has"),
        ({"in_specs": P(unreduced={"y"}), "axis_names": {"x"}}, r"names axis 'y'; the map is over \('x',\)"),
    ):
        with pytest.raises(st.ShardingError, match=match):
            st.shard_map(lambda b: b, mesh=mesh, out_specs=P("x"), **options)(x)
    if backend in ("numpy", "checked"):  # Other libraries have no dates.
        with pytest.raises(st.ArgumentTypeError, match="cannot be unreduced; wanted numbers"):
            st.shard_map(lambda b: b, mesh=mesh, in_specs=P(unreduced={"x"}), out_specs=P("x"))(
                np.zeros(4, "datetime64[s]")
            )
    differs = st.shard_map(lambda b: b + st.axis_index("y"), mesh=mesh, in_specs=P("x"), out_specs=P(unreduced={"x"}))
    with pytest.raises(st.ShapeError, match=r"declared to be equal along 'y'"):
        differs(x)


def test_strict_specs(backend: str) -> None:
    mesh = mesh_of((2, 2), backend)
    x, w = on(mesh, P("x", "y"), np.ones((4, 4))), on(mesh, P(), np.ones(4))
    options: dict[str, Any] = {"mesh": mesh, "out_specs": P("x", "y"), "strict_specs": True}

    def strict(*in_specs: Any) -> Any:
        return st.shard_map(lambda x, w: x + w[: x.shape[1]], in_specs=in_specs, **options)

    same = strict(P("x", "y"), P())
    assert same(x, w).tolist() == same(x, np.ones(4)).tolist() == (np.ones((4, 4)) * 2).tolist()
    match = (
        r"argument 0 is in the layout float64\[4@x,4@y\], and in_specs has P\('x'\), with strict_specs=True; st.resh"
    )
    with pytest.raises(st.ShardingError, match=match):
        strict(P("x"), P())(x, w)
    with pytest.raises(st.ShardingError, match=r"argument 1 is in the layout float64\[4\], and in_specs has P\('y'\)"):
        strict(P("x", "y"), P("y"))(x, w)
    over_x = st.shard_map(lambda x: x, in_specs=P("x"), axis_names={"x"}, **(options | {"out_specs": P("x")}))
    assert over_x(x).sharding.spec == P("x", "y")  # The split along the other axes is kept.


# -- JAX -------------------------------------------------------------------------------------------


def test_the_gradients_are_jaxs() -> None:
    peers.require_jax()
    w, x = rng(1).standard_normal((6, 3)).astype("float32"), rng(2).standard_normal((8, 6)).astype("float32")
    found = peers.run(_JAX, (w, x), devices=2)
    if found is None:
        pytest.skip("JAX 0.10 lacks these layouts")
    mesh = st.make_mesh((2,), ("x",))
    with st.set_mesh(mesh):
        layer = st.shard_map(lambda x, w: st.tanh(x @ w), in_specs=(P("x"), P(reduced={"x"})), out_specs=P("x"))
        split = st.device_put(x, P("x"))
        for spec, (text, wanted) in zip((P(reduced={"x"}), P()), found, strict=True):
            g = st.grad(lambda w: (layer(split, st.reshard(w, P(reduced={"x"}))) ** 2).sum())(st.device_put(w, spec))
            assert str(st.typeof(g)) == text
            np.testing.assert_allclose(np.asarray(g), wanted, rtol=2e-5, atol=1e-5)


_JAX = """
import jax, jax.numpy as jnp, numpy as np
w, x = given
P = jax.P
found = None
if not jax.__version__.startswith("0.10."):
    jax.set_mesh(jax.make_mesh((2,), ("x",)))
    layer = jax.shard_map(lambda x, w: jnp.tanh(x @ w), in_specs=(P("x", None), P(None, None, reduced={"x"})),
                          out_specs=P("x", None))
    split, found = jax.device_put(x, P("x", None)), []
    for spec in (P(None, None, reduced={"x"}), P(None, None)):
        here = jax.reshard(jnp.asarray(w), spec)
        loss = lambda w: jnp.sum(layer(split, jax.reshard(w, P(None, None, reduced={"x"}))) ** 2)
        g = jax.grad(loss)(here)
        found.append((str(jax.typeof(g)), np.asarray(jax.reshard(g, P(None, None)))))
"""
