"""Unreduced tensors and ``out_sharding=``, on every backend: values, layouts, collectives and bytes."""

from __future__ import annotations

import copy
import math
import operator
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as some

import shardtensor as st
from shardtensor import P
from shardtensor.core import OPS
from shardtensor.interpreters.execution.strategies import Strategies
from tests.draws import drawn
from tests.layouts import array, assert_same, everywhere, mesh_of

AXES = ("x", "y")
SHAPES = [(2, 2), (2, 4), (3, 1)]


def mesh(backend: str, shape: tuple[int, ...] = (2, 4)) -> st.Mesh:
    return mesh_of(shape, backend)


def factors(backend: str, n: int = 7, k: int = 5, m: int = 6, shape: tuple[int, ...] = (2, 4)) -> tuple[Any, Any]:
    """Two matrices whose inner dimension mesh axis x splits."""
    on = mesh(backend, shape)
    x = st.device_put(array((n, k), "float32", 0), st.NamedSharding(on, P(None, "x")))
    return x, st.device_put(array((k, m), "float32", 1), st.NamedSharding(on, P("x")))


def unreduced(backend: str, shape: tuple[int, ...] = (2, 4)) -> tuple[st.ShardedTensor, Any]:
    x, y = factors(backend, shape=shape)
    sums = st.matmul(x, y, out_sharding=st.NamedSharding(x.sharding.mesh, P(unreduced={"x"})))
    return sums, np.asarray(x) @ np.asarray(y)


@everywhere
@pytest.mark.parametrize(
    ("spec", "nbytes"),
    [
        (P(), 7 * 6 * 4 * 2 * 4),  # an all-reduce of two devices: to the first one and back, in each of four groups
        (P("x"), 7 * 6 * 4 * 4),  # a reduce-scatter: each device sends the part of the other one
        (P(None, "x"), 7 * 6 * 4 * 4),
        (P("x", "y"), 7 * 6 * 4 * 4),
        (P(None, ("x", "y")), 7 * 6 * 4 * 4),
        (P(unreduced={"x"}), 0),
    ],
    ids=str,
)
def test_the_layout_chooses_the_collective(spec: P, nbytes: int, backend: str) -> None:
    x, y = factors(backend)
    with st.transfers() as log:
        z = st.matmul(x, y, out_sharding=st.NamedSharding(x.sharding.mesh, spec))
    assert (z.sharding.spec, z.committed, log.bytes) == (spec, True, nbytes)
    assert z.sharding == st.eval_shape(lambda: st.matmul(x, y, out_sharding=z.sharding)).sharding
    np.testing.assert_array_equal(np.asarray(z), np.asarray(x @ y))  # The tree is that of the all-reduce.


@everywhere
def test_an_unreduced_tensor_that_is_resharded_has_the_bits_of_an_all_reduce(backend: str) -> None:
    x, y = factors(backend)
    for spec, nbytes in [(P(), 1344), (P("x"), 672), (P("y"), 1344), (P("x", "y"), 672), (P("y", "x"), 672)]:
        sums, _ = unreduced(backend)
        with st.transfers() as log:
            z = sums.reshard(st.NamedSharding(sums.sharding.mesh, spec))
        assert (z.sharding.spec, log.bytes) == (spec, nbytes)
        assert all(t.explicit for t in log)
        np.testing.assert_array_equal(np.asarray(z), np.asarray(x @ y))


LINEAR: dict[str, Callable[[Any], Any]] = {
    "negative": operator.neg,
    "add": lambda u: u + u,
    "subtract": lambda u: u * 3 - u,
    "times a scalar": lambda u: 2 * u,
    "times an array": lambda u: u * np.arange(6, dtype="float32"),
    "of another shape": lambda u: u * np.ones((2, 1, 6), "float32"),
    "divide": lambda u: u / 4,
    "astype": lambda u: u.astype("float64"),
    "astype, complex": lambda u: u.astype("complex64"),
    "broadcast_to": lambda u: st.broadcast_to(u, (2, 1, 7, 6)),
    "where": lambda u: st.where(np.arange(6) > 2, u, 2 * u),
    "concat": lambda u: st.concat([u, 2 * u], axis=-1),
    "concat, flat": lambda u: st.concat([u, 2 * u], axis=None),
    "stack": lambda u: st.stack([u, -u], axis=-1),
    "vecdot": lambda u: st.vecdot(u, np.arange(6, dtype="float32")),
    "vecdot of stacks": lambda u: st.vecdot(np.ones((2, 7, 6), "float32"), u, axis=-2),
    "vecdot along the first dimension": lambda u: st.vecdot(u, np.ones((7, 6), "float32"), axis=0),
    "transpose": lambda u: u.T,
    "reshape": lambda u: u.reshape(3, 14),
    "view": lambda u: u[1:, ::2].T,
    "view of a view": lambda u: u.T.reshape(-1)[3:9],
    "new dimension": lambda u: u[None, 2],
    "sum": lambda u: u.sum(axis=0),
    "sum of all": lambda u: u.sum(),
    "sum with keepdims": lambda u: u.sum(axis=1, keepdims=True),
    "mean": lambda u: u.mean(axis=-1),
    "matmul": lambda u: u @ np.ones((6, 3), "float32"),
    "matmul of a view": lambda u: u.T @ np.ones((7, 3), "float32"),
    "from the left": lambda u: np.ones((3, 7), "float32") @ u,
    "times a vector": lambda u: u @ np.ones(6, "float32"),
    "a vector": lambda u: np.ones((3, 7), "float32") @ u[:, 0],
    "flip": lambda u: np.flip(u, axis=0),
    "stacks": lambda u: np.ones((2, 3, 7), "float32") @ u,
}
"""Linear functions of a (7, 6) array."""


@everywhere
@pytest.mark.parametrize("name", LINEAR)
def test_linear_operators_keep_partial_sums(name: str, backend: str) -> None:
    sums, whole = unreduced(backend)
    with st.transfers() as log:
        found = LINEAR[name](sums)
    assert found.sharding.spec.unreduced == {"x"}
    assert not any(t.operator == "add_partials" for t in log)
    with st.transfer_guard("allow"):
        np.testing.assert_allclose(np.asarray(found), LINEAR[name](whole), rtol=1e-5, atol=1e-5)
    mine = st.eval_shape(LINEAR[name], sums)
    assert (mine.shape, mine.sharding) == (found.shape, found.sharding)


@everywhere
@pytest.mark.parametrize(
    "function",
    [
        st.exp, lambda u: u * u, lambda u: u + 1, lambda u: 1 / u, lambda u: u > 0, lambda u: st.max(u, axis=0), lambda u: u @ u.T,
        lambda u: st.cumulative_sum(u, axis=0), lambda u: st.concat([u, u[:1] + 1]),
        lambda u: u.astype("int64"), lambda u: u.astype("float16"), lambda u: st.where(True, u, 0),
        lambda u: st.vecdot(u, u),
        lambda u: st.sort(u, axis=1), lambda u: u[np.array([2, 0])], lambda u: u[1, 2] + 0,
    ],
)  # fmt: skip
def test_other_operators_add_the_partial_sums_first(function: Callable[[Any], Any], backend: str) -> None:
    sums, _ = unreduced(backend)
    x, y = factors(backend)
    with st.transfers() as log:
        found = function(sums)
    paid = [t for t in log if t.operator == "add_partials"]
    assert sum(t.bytes for t in paid) == 1344
    assert not any(t.explicit for t in paid)
    assert not found.sharding.spec.unreduced
    np.testing.assert_array_equal(np.asarray(found), np.asarray(function(x @ y)))
    with st.transfers() as log:
        function(sums)
    assert not any(t.operator == "add_partials" for t in log)  # They are added once.
    with st.transfer_guard("disallow"), pytest.raises(st.TransferError, match="moves 1344 bytes implicitly"):
        function(unreduced(backend)[0])
    assert st.eval_shape(function, sums).sharding == found.sharding


@everywhere
def test_the_host_reads_the_sum(backend: str) -> None:
    sums, whole = unreduced(backend)
    with st.transfer_guard("disallow"), st.transfers() as log:
        np.testing.assert_allclose(np.asarray(sums), whole, rtol=1e-5)
    assert {t.explicit for t in log} == {True}
    assert float(sums.sum()) == pytest.approx(whole.sum(), rel=1e-4)
    assert "unreduced={'x'}" in repr(sums)
    assert repr(sums).endswith(str(np.asarray(sums)))
    assert str(st.typeof(sums)) == "float32[7,6]{U:x}"
    assert str(st.typeof(st.eval_shape(lambda u: -u, sums))) == "float32[7,6]{U:x}"
    assert "unreduced={&#x27;x&#x27;}" in sums._repr_html_()
    text = str(st.explain(lambda u: st.exp(u), unreduced(backend)[0]))
    assert "add_partials: 1344 bytes" in text


@everywhere
def test_shards_are_partial_sums(backend: str) -> None:
    sums, whole = unreduced(backend)
    shards = sums.addressable_shards
    assert [s.data.shape for s in shards] == [(7, 6)] * 8
    held = [np.array(st.device_put(st.asarray(s.data)) if backend != "numpy" else s.data) for s in shards[::4]]
    np.testing.assert_allclose(held[0] + held[1], whole, rtol=1e-5)
    assert np.abs(held[0] - whole).max() > 0.1


@everywhere
def test_a_tensor_becomes_unreduced_on_the_first_devices(backend: str) -> None:
    on = mesh(backend)
    value = array((5, 3), "float32", 3)
    for source in (value, st.device_put(value, st.NamedSharding(on, P("y")))):
        made = st.device_put(source, st.NamedSharding(on, P("y", unreduced={"x"})))
        assert str(st.typeof(made)) == "float32[5@y,3]{U:x}"
        np.testing.assert_array_equal(np.asarray(made), value)
        rows = [np.asarray(st.asarray(s.data)) if backend != "numpy" else s.data for s in made.addressable_shards]
        assert not any(r.any() for r in rows[4:])
    np.testing.assert_array_equal(np.asarray(pickle.loads(pickle.dumps(made))), value)
    assert pickle.loads(pickle.dumps(made)).sharding == made.sharding


@everywhere
def test_writes_replace_the_sum_and_are_seen_by_views_only(backend: str) -> None:
    sums, whole = unreduced(backend)
    column, other, twice = sums[:, 1], copy.copy(sums), sums * 2
    sums[2] = 5
    sums += 1
    whole = np.asarray(twice) / 2
    wanted = whole.copy()
    wanted[2] = 5
    wanted += 1
    np.testing.assert_allclose(np.asarray(sums), wanted, rtol=1e-6)
    np.testing.assert_allclose(np.asarray(column), wanted[:, 1], rtol=1e-6)
    np.testing.assert_allclose(np.asarray(other), whole, rtol=1e-6)
    assert sums.sharding.spec == P(unreduced={"x"})
    np.testing.assert_allclose(np.asarray(sums * 2), wanted * 2, rtol=1e-6)
    np.testing.assert_allclose(np.asarray(sums.reshard(st.NamedSharding(mesh(backend), P("x")))), wanted, rtol=1e-6)


@pytest.mark.parametrize("backend", ["numpy", "checked"])
def test_contractions_and_reductions_get_any_layout(backend: str) -> None:
    calls: dict[str, Callable[..., Any]] = {
        "matmul": st.matmul,
        "tensordot": lambda x, y, **to: st.tensordot(x, y, axes=1, **to),
        "dot": st.dot,
        "einsum": lambda x, y, **to: st.einsum("ik,kj->ij", x, y, **to),
        "einsum, transposed": lambda x, y, **to: st.einsum("ik,kj->ji", x, y, **to),
    }
    reductions = [st.sum, st.prod, st.mean, st.max, st.min, st.var, st.any, st.all]
    reductions += [st.argmax, st.argmin, st.count_nonzero]

    @hypothesis.settings(max_examples=drawn(30))
    @hypothesis.given(data=some.data())
    def run(data: Any) -> None:
        on = mesh(backend, data.draw(some.sampled_from(SHAPES)))
        parts = [None, "x", "y", ("x", "y"), ("y", "x")]

        def drawn() -> st.NamedSharding:
            first, second = data.draw(some.sampled_from(parts)), data.draw(some.sampled_from(parts))
            if set(first or ()) & set(second or ()):
                second = None
            return st.NamedSharding(on, P(first, second))

        n, k, m = [data.draw(some.sampled_from([0, 1, 3, 5, 8])) for _ in range(3)]
        dtype = data.draw(some.sampled_from(["float32", "int32", "complex64", "bool"]))
        a, b = array((n, k), dtype, 0), array((k, m), dtype, 1)
        x, y, target = st.device_put(a, drawn()), st.device_put(b, drawn()), drawn()
        name = data.draw(some.sampled_from(sorted(calls)))
        hypothesis.assume(dtype != "bool" or name in ("matmul", "einsum"))
        found = calls[name](x, y, out_sharding=target)
        assert found.sharding == target
        np.testing.assert_allclose(np.asarray(found), np.asarray(calls[name](a, b)), rtol=1e-4, atol=1e-4)
        reduce = data.draw(some.sampled_from(reductions))
        hypothesis.assume(k or reduce not in (st.max, st.min, st.argmax, st.argmin))
        to = st.NamedSharding(on, P(data.draw(some.sampled_from(parts))))
        with np.errstate(all="ignore"), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # As NumPy, of means of nothing.
            placed, plain = reduce(x, axis=1, out_sharding=to), reduce(x, axis=1)
        assert placed.sharding == to
        np.testing.assert_array_equal(np.asarray(placed), np.asarray(plain))

    run()


@everywhere
@pytest.mark.parametrize("dtype", ["float32", "int16", "bool", "complex64"])
def test_unreduced_along_two_axes(dtype: str, backend: str) -> None:
    on = mesh(backend, (2, 2))
    value = array((5, 9), dtype, 4)
    x = st.device_put(value, st.NamedSharding(on, P(None, ("x", "y"))))
    wanted = np.asarray(x.sum(axis=1))
    both = st.sum(x, axis=1, out_sharding=st.NamedSharding(on, P(unreduced={"y", "x"})))
    one = st.sum(x, axis=1, out_sharding=st.NamedSharding(on, P(unreduced={"y"})))
    assert (str(st.typeof(both)), str(st.typeof(one))) == (f"{wanted.dtype}[5]{{U:(x,y)}}", f"{wanted.dtype}[5]{{U:y}}")
    for sums in (both, one, both + both - both):
        np.testing.assert_allclose(np.asarray(sums.reshard(st.NamedSharding(on, P(("x", "y"))))), wanted, rtol=1e-6)
        np.testing.assert_allclose(np.asarray(sums), wanted, rtol=1e-6)


@everywhere
def test_products_of_nothing_and_axes_of_one_device_are_unreduced_as_well(backend: str) -> None:
    for shape, k in [((2, 4), 0), ((1, 4), 5), ((2, 4), 1)]:
        x, y = factors(backend, k=k, shape=shape)
        sums = st.matmul(x, y, out_sharding=st.NamedSharding(x.sharding.mesh, P("y", unreduced={"x"})))
        assert str(st.typeof(sums)) == "float32[7@y,6]{U:x}"
        np.testing.assert_array_equal(np.asarray(sums * 2), np.asarray(x @ y) * 2)


@everywhere
@pytest.mark.parametrize("shape", [(0, 7), (7, 0), (3, 0, 5)])
def test_sums_of_nothing_have_the_layout_of_other_sums(shape: tuple[int, ...], backend: str) -> None:
    on = mesh(backend, (2,))
    x = st.device_put(np.zeros(shape), st.NamedSharding(on, P(unreduced={"x"})))
    assert_same(x + np.ones(shape), np.ones(shape))
    y = st.device_put(np.zeros(shape), st.NamedSharding(on, P("x")))
    total = st.sum(y, axis=0)
    assert total.sharding.spec == P()
    assert_same(total, np.zeros(shape[1:]))


def test_reductions_of_1024_simulated_devices_send_as_many_bytes_as_the_formulas() -> None:
    on = st.AbstractMesh((32, 32), ("x", "y"))
    n = 1 << 14
    x = st.zeros((n, n), dtype="float32", device=st.NamedSharding(on, P("y", "x")))
    y = st.zeros((n, n), dtype="float32", device=st.NamedSharding(on, P("x")))

    def sent(spec: P) -> int:
        return st.simulate(lambda x, y: st.matmul(x, y, out_sharding=st.NamedSharding(on, spec)), x, y).bytes

    size = n * n * 4
    assert sent(P("y")) == 2 * 31 * size  # a reduce-scatter and an all-gather in each of 32 groups of 32
    assert sent(P(("y", "x"))) == sent(P("y", "x")) == 31 * size
    assert sent(P("y", unreduced={"x"})) == 0


def test_creation_random_and_reshape_take_the_layout() -> None:
    on = st.make_mesh((2, 4), ("x", "y"))
    with st.set_mesh(on):
        key = st.random.key(0)
        for made, same in [
            (st.zeros((8, 3), out_sharding=P("y")), st.zeros((8, 3))),
            (st.arange(9, out_sharding=P("x")), st.arange(9)),
            (st.full((3, 2), 7, out_sharding=P(None, "x")), st.full((3, 2), 7)),
            (st.ones_like(st.zeros((4, 3)), out_sharding=P("x")), st.ones((4, 3))),
            (st.random.normal(key, (5, 3), out_sharding=P("y")), st.random.normal(key, (5, 3))),
            (st.random.integers(key, 0, 9, (5,), out_sharding=P("x")), st.random.integers(key, 0, 9, (5,))),
            (st.random.choice(key, 9, (5,), out_sharding=P("x")), st.random.choice(key, 9, (5,))),
            (st.reshape(st.arange(24), (6, 4), out_sharding=P("x", "y")), st.arange(24).reshape(6, 4)),
            (st.eye(4, out_sharding=st.NamedSharding(on, P("x"))), st.eye(4)),
            (st.identity(4, out_sharding=P("y")), st.eye(4)),
            (st.linspace(0, 1, 9, out_sharding=P("y")), st.linspace(0, 1, 9)),
            (st.logspace(0, 1, 9, out_sharding=P("y")), st.logspace(0, 1, 9)),
            (st.geomspace(1, 8, 9, out_sharding=P("y")), st.geomspace(1, 8, 9)),
            (st.asarray([1, 2, 3], out_sharding=P("x")), st.asarray([1, 2, 3])),
        ]:
            np.testing.assert_array_equal(np.asarray(made), np.asarray(same))
            assert made.committed
            assert made.sharding.spec.chains
        one = st.ones(3, out_sharding=P(unreduced={"x"}))
        np.testing.assert_array_equal(np.asarray(one * 2), [2, 2, 2])
        with pytest.raises(st.ArgumentError, match="zeros: both device and out_sharding"):
            st.zeros(3, device=on, out_sharding=P("x"))
        with pytest.raises(st.ArgumentError, match="uniform: both device and out_sharding"):
            st.random.uniform(key, (3,), device=on, out_sharding=P("x"))
        with pytest.raises(st.ArgumentError, match="geomspace: both device and out_sharding"):
            st.geomspace(1, 8, 9, device=on, out_sharding=P("x"))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (lambda: P("z"), "names axis 'z'"),
        (lambda: P(unreduced={"z"}), "names axis 'z'"),
        (lambda: P("x", None, "y"), "matmul: .* has 3 dimensions and the array has 2"),
        (lambda: P("x", unreduced={"x"}), "P: axis 'x' splits a dimension"),
        (lambda: P(unreduced={"y"}), "matmul: out_sharding is .*unreduced"),
        (lambda: st.NamedSharding(st.get_mesh(), P(unreduced={"x"}), memory_kind="pinned_host"), "stay on devices"),
    ],
)
def test_layouts_that_are_impossible(spec: Callable[[], Any], message: str) -> None:
    x, y = factors("numpy")
    with st.use_mesh(x.sharding.mesh), pytest.raises(st.ShardingError, match=message):
        st.matmul(x, y, out_sharding=spec())


def test_arguments_of_another_kind() -> None:
    x, y = factors("numpy")
    with pytest.raises(st.ArgumentTypeError, match="wanted a set of axis names"):
        P(unreduced="x")
    with pytest.raises(st.ArgumentTypeError, match="matmul"):
        st.matmul(x, y, out_sharding="x")  # type: ignore[arg-type]
    with pytest.raises(st.ShardingError, match="no mesh is in use"):
        st.matmul(x, y, out_sharding=P())
    with pytest.raises(st.ShardingError, match="max: out_sharding"):
        st.max(x, axis=1, out_sharding=st.NamedSharding(x.sharding.mesh, P(unreduced={"x"})))
    with pytest.raises(st.ArgumentTypeError, match="cannot be unreduced"):
        st.device_put(np.zeros(3, "M8[s]"), st.NamedSharding(x.sharding.mesh, P(unreduced={"x"})))
    with pytest.raises(st.ShardingError, match="inside of a map"):
        st.pmap(lambda a: st.sum(a, axis=0, out_sharding=x.sharding), st.shard(x))


def test_maps_of_lists_read_the_sum() -> None:
    sums, whole = unreduced("numpy")
    np.testing.assert_allclose(np.concatenate(st.pmap(np.asarray, st.shard(sums))), whole, rtol=1e-5)


def test_specs_are_values() -> None:
    spec = P("x", unreduced={"y"})
    assert spec == P("x", unreduced=["y"]) == pickle.loads(pickle.dumps(spec)) != P("x")
    assert hash(spec) == hash(P("x", unreduced=("y",)))
    assert repr(P(unreduced={"y", "x"})) == "P(unreduced={'x', 'y'})"
    on = mesh("numpy")
    sharding = st.NamedSharding(on, spec)
    assert not sharding.is_equivalent_to(st.NamedSharding(on, P("x")), 1)
    assert not sharding.is_fully_replicated
    assert sharding.shard_shape((8,)) == (4,)
    assert math.prod(on.axis_sizes) == len(sharding.devices_indices_map((8,)))


@pytest.mark.parametrize("name", ["sum", "matmul", "contract"])
def test_partial_sums_on_shared_memory_are_computed_at_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They cost as much as the sum itself, and have its bits; the loop over the devices takes ten times as long."""
    on = mesh("numpy", (8,))
    x, y = [st.device_put(array((18, 4), "float32", k), st.NamedSharding(on, P("x"))) for k in (0, 1)]
    more: dict[str, Any] = {"sum": {"axis": 0}, "contract": {"rule": "k i, k j -> i j"}}.get(name, {})
    given = {"sum": (x,), "matmul": (x.T, y), "contract": (x, y)}[name]
    apply = OPS[name].dispatch
    with monkeypatch.context() as patch:
        patch.setattr(Strategies, "run", None)
        sums = apply(*given, **more, out_sharding=st.NamedSharding(on, P(unreduced={"x"})))
    assert sums._storage.partials.shape[0] == 8
    assert np.asarray(sums).tobytes() == np.asarray(apply(*given, **more)).tobytes()


@pytest.mark.parametrize("axes", [("x",), ("x", "y")])
def test_long_products_have_the_bits_of_an_all_reduce(axes: tuple[str, ...]) -> None:
    on = mesh("numpy", (2, 2))
    x, y = [st.device_put(array((1024, 96), "float32", k), st.NamedSharding(on, P(axes))) for k in (0, 1)]
    sums = st.matmul(x.T, y, out_sharding=st.NamedSharding(on, P(unreduced=set(axes))))
    assert np.asarray(sums).tobytes() == np.asarray(x.T @ y).tobytes()
