"""Layouts, dtypes and kernels of steps: states are where their parameters are, and jit computes what eager mode does."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import shardtensor as st
from tests.optim.steps import layouts, placed, start, step_of, trained

o = st.optim

OPTIMIZERS = {
    "sgd": o.sgd(0.1, momentum=0.9, nesterov=True),
    "adam": o.adam(o.cosine_decay_schedule(0.1, 50), nesterov=True),
    "adamw": o.chain(o.clip_by_global_norm(1.0), o.adamw(0.1, weight_decay=0.1)),
    "lion": o.lion(0.01),
    "adafactor": o.adafactor(0.05, min_dim_size_to_factor=2, momentum=0.9, dtype_momentum="float64"),
    "muon": o.muon(0.02, weight_decay=0.1),
}


def assert_close(trees: Any, others: Any, limit: float) -> None:
    for x, y in zip(st.tree.leaves(trees), st.tree.leaves(others), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=0, atol=limit)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_layouts_do_not_change_results(name: str) -> None:
    optimizer, limit = OPTIMIZERS[name], 1e-9 if name == "muon" else 1e-12
    wanted = trained(optimizer, layouts()[0], steps=10, jit=False)
    for sharding in layouts()[1:]:
        eager = trained(optimizer, sharding, steps=10, jit=False)
        assert_close(eager, wanted, limit)
        assert_close(trained(optimizer, sharding, steps=10), eager, limit)


@pytest.mark.parametrize(
    "backend", ["checked", *[pytest.param(name, marks=pytest.mark.full) for name in ("torch", "cupy")]]
)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_other_backends(name: str, backend: str) -> None:
    """Memories are separate, and nothing is read that a device does not have."""
    wanted = trained(OPTIMIZERS[name], layouts()[2], steps=3)
    assert_close(trained(OPTIMIZERS[name], layouts(backend)[2], steps=3), wanted, 1e-9)


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_gradients_that_are_all_zero(name: str, jit: bool) -> None:
    """No operator warns of a division by zero."""
    params = {"w": st.zeros((4, 3)), "m": st.zeros((3, 3))}
    update = OPTIMIZERS[name].update
    updates, _ = (st.jit(update) if jit else update)(params, OPTIMIZERS[name].init(params), params)
    assert all(np.array_equal(u, np.zeros(u.shape)) for u in st.tree.leaves(updates))


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_parameters_without_elements(name: str, jit: bool) -> None:
    sharding = layouts()[2]
    step = step_of(OPTIMIZERS[name])
    results = []
    for empty in ({}, {"none": st.zeros((0, 4), device=sharding), "no column": st.zeros((4, 0), device=sharding)}):
        params = {**placed(start(), sharding), **empty}
        results.append((st.jit(step) if jit else step)(params, OPTIMIZERS[name].init(params), params)[0])
    without, whole = results
    assert_close({key: whole[key] for key in without}, without, 1e-12)
    assert [whole[key].shape for key in ("none", "no column")] == [(0, 4), (4, 0)]


@pytest.mark.parametrize("sharding", layouts(), ids=lambda sharding: f"{len(sharding.mesh.devices.flat)} devices")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_states_are_where_their_parameters_are(name: str, sharding: Any) -> None:
    params, before = placed(start("float32"), sharding), OPTIMIZERS[name].init(placed(start("float32"), sharding))
    after, state = step_of(OPTIMIZERS[name])(params, before, params)
    for x in st.tree.leaves(state):
        if x.shape == ():
            assert x.sharding == st.NamedSharding(sharding.mesh, st.P())
    for x, y in zip(st.tree.leaves((params, before)), st.tree.leaves((after, state)), strict=True):
        assert (x.shape, x.sharding) == (y.shape, y.sharding)
        assert x.dtype == y.dtype
    shapes = {p.shape: p.sharding for p in params.values()}
    for x in st.tree.leaves(state):
        if x.ndim == 2:
            assert x.sharding == shapes[x.shape]


def test_vectors_of_factored_moments_are_split_as_their_dimension() -> None:
    _, _, sharding = layouts()
    state = o.scale_by_factored_rms(min_dim_size_to_factor=2).init(placed(start(), sharding))
    assert (state.v_row["w"].shape, state.v_row["w"].sharding.spec) == ((5,), st.P("y"))
    assert (state.v_col["w"].shape, state.v_col["w"].sharding.spec) == ((7,), st.P("x"))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_dtypes_stay(dtype: str) -> None:
    params = placed({name: x.astype(st.finfo(dtype).dtype) for name, x in start().items()}, layouts()[2])
    rate = o.linear_schedule(0.1, 0.0, 9)
    for optimizer in (o.adamw(rate, mu_dtype="float32", eps=1e-4), o.sgd(rate, 0.9), o.lion(st.asarray(0.1))):
        state = optimizer.init(params)
        new, after = step_of(optimizer)(params, state, params)
        assert {str(x.dtype) for x in st.tree.leaves(new)} == {dtype}
        assert [x.dtype for x in st.tree.leaves(state)] == [x.dtype for x in st.tree.leaves(after)]


def test_the_norm_of_small_floats_does_not_overflow() -> None:
    big = st.full((100,), 1000.0, dtype="float16")
    assert float(o.global_norm([big])) == 10000.0
    assert o.global_norm([big]).dtype == np.float32
    limit = o.clip_by_global_norm(1.0)
    np.testing.assert_allclose(np.asarray(limit.update([big], limit.init([big]))[0][0]), 0.1, rtol=1e-3)
    assert float(o.global_norm([])) == 0.0
    assert limit.update([st.zeros(2)], limit.init([big]))[0][0].tolist() == [0.0, 0.0]  # without a warning
    assert o.clip_by_global_norm(np.inf).update([st.ones(2)], limit.init([big]))[0][0].tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    "text", ["o.adamw(1e-3)", "o.adamw(o.linear_schedule(0.1, 0.0, 9))", "o.sgd(0.1, 0.9)", "o.lion(0.1)"]
)
def test_a_leaf_is_one_kernel(text: str) -> None:
    optimizer, sharding = eval(text), layouts()[1]
    params = {
        name: st.device_put(np.ones(100_003, np.float32), st.NamedSharding(sharding.mesh, st.P("x"))) for name in "abc"
    }
    lowered = st.jit(step_of(optimizer), donate_argnums=(0, 1)).lower(
        params, optimizer.init(params), st.tree.map(lambda x: x.copy(), params)
    )
    groups = lowered.as_text("groups")
    assert groups.count("one kernel:") == 3
    large = [line for line in groups.split("\n") if "[100003]" in line and not line.startswith(" ")]
    assert large == []  # all of them are in kernels


def test_nothing_is_read_on_the_host_and_nothing_is_sent() -> None:
    optimizer, params = o.adamw(o.cosine_decay_schedule(0.1, 50)), placed(start(), layouts("checked")[2])
    state = optimizer.init(params)
    with st.transfer_guard("disallow"):
        step_of(optimizer)(params, state, params)


def test_parameters_on_several_meshes() -> None:
    """The count is on the mesh of the first; scalars are sent to each mesh once."""
    few = [st.make_mesh((4,), ("x",), devices=st.devices()[k : k + 4]) for k in (0, 4)]
    params = [st.device_put(np.ones(10), st.NamedSharding(mesh, st.P("x"))) for mesh in few]
    optimizer = o.chain(o.clip_by_global_norm(1.0), o.adamw(o.linear_schedule(0.1, 0.0, 9)))
    new, state = step_of(optimizer)(params, optimizer.init(params), params)
    assert [x.sharding for x in new] == [x.sharding for x in params]
    assert [x.sharding for x in state[1][0].mu] == [x.sharding for x in params]
    np.testing.assert_array_equal(np.asarray(new[0]), np.asarray(new[1]))


def test_gradients_in_another_layout() -> None:
    sharding = layouts()[1]
    params = {"w": st.device_put(np.ones((9, 4)), sharding)}
    grads = {"w": st.device_put(np.ones((9, 4)), st.NamedSharding(sharding.mesh, st.P(None, "x")))}
    optimizer = o.adam(0.1)
    updates, state = optimizer.update(grads, optimizer.init(params), params)
    assert state[0].mu["w"].sharding == sharding
    assert o.apply_updates(params, updates)["w"].sharding == sharding


def test_in_a_map() -> None:
    """The arrays of one device are leaves, too."""
    optimizer, mesh = o.adamw(o.linear_schedule(0.1, 0.0, 9)), layouts()[1].mesh
    params = {"w": st.ones((16, 2)), "b": st.ones(16)}
    states = optimizer.init(params)

    @st.shard_map(mesh=mesh, in_specs=st.P("x"), out_specs=st.P("x"))
    def step(params: Any) -> Any:
        updates, _ = optimizer.update(params, optimizer.init(params), params)
        return o.apply_updates(params, updates)

    updates, _ = optimizer.update(params, states, params)
    np.testing.assert_allclose(np.asarray(step(params)["w"]), np.asarray(o.apply_updates(params, updates)["w"]))


def test_vmap_trains_several_models() -> None:
    optimizer = o.adam(0.1)
    many = st.asarray(np.random.default_rng(0).standard_normal((3, 4)))

    def once(p: Any) -> Any:
        updates, _ = optimizer.update({"w": 2 * p}, optimizer.init({"w": p}), {"w": p})
        return o.apply_updates({"w": p}, updates)["w"]

    np.testing.assert_allclose(np.asarray(st.vmap(once)(many)), np.stack([np.asarray(once(p)) for p in many]))


def test_leaves_of_other_kinds() -> None:
    """Numbers and host arrays become tensors, and None is no leaf, as in optax."""
    optimizer, params = o.adamw(0.1), {"a": 1.0, "n": None, "x": np.ones(3)}
    state = optimizer.init(params)
    assert state[0].mu["n"] is None
    assert state[0].mu["a"].shape == ()
    updates, _ = optimizer.update({"a": 2.0, "n": None, "x": np.ones(3)}, state, params)
    new = o.apply_updates(params, updates)
    assert new["n"] is None
    assert new["x"].tolist() == pytest.approx([0.9 - 1e-5] * 3)
    assert float(new["a"]) == pytest.approx(0.9 - 1e-5)


def test_init_and_whole_trainings_are_programs() -> None:
    optimizer, x = o.chain(o.clip_by_global_norm(1.0), o.adamw(o.linear_schedule(0.1, 0.0, 9))), st.ones(3)
    numbers = {"a": 1.0, "b": np.ones(3)}
    assert float(st.jit(optimizer.init)(numbers)[1][0].mu["a"]) == 0.0
    assert st.eval_shape(optimizer.init, numbers)[1][0].nu["b"].shape == (3,)

    def step(_: Any, carry: Any) -> Any:
        params, state = carry
        grads = st.grad(lambda p: ((x * p["a"] + p["b"]) ** 2).sum())(params)
        updates, state = optimizer.update(grads, state, params)
        return o.apply_updates(params, updates), state

    params = st.tree.map(st.asarray, numbers)
    eager = st.fori_loop(0, 10, step, (params, optimizer.init(params)))
    assert_close(st.jit(lambda p: st.fori_loop(0, 10, step, (p, optimizer.init(p))))(params), eager, 1e-14)


def test_steps_are_differentiated() -> None:
    def after(rate: Any) -> Any:
        optimizer, params = o.sgd(rate), [st.ones(3)]
        return o.apply_updates(params, optimizer.update(params, optimizer.init(params))[0])[0].sum()

    assert float(st.grad(after)(0.1)) == -3.0


def test_the_learning_rate_may_be_traced() -> None:
    @st.jit
    def step(params: Any, rate: Any) -> Any:
        optimizer = o.sgd(rate)
        return o.apply_updates(params, optimizer.update(params, optimizer.init(params))[0])

    assert step([st.ones(2)], 0.5)[0].tolist() == [0.5, 0.5]
    assert step([st.ones(2, dtype="float32")], st.asarray(0.25))[0].tolist() == [0.75, 0.75]


def test_the_count_stays_at_its_limit() -> None:
    rate = o.scale_by_schedule(lambda count: 1.0)
    state = o.ScaleByScheduleState(st.asarray(2**31 - 1, dtype="int32"))
    assert int(rate.update([st.ones(2)], state)[1].count) == 2**31 - 1


def test_split_states_send_a_reduce_scatter_and_an_all_gather() -> None:
    """Gradients of replicated parameters go to the layout of the moments before they are squared."""
    split = layouts()[1]
    whole = st.NamedSharding(split.mesh, st.P())
    w, x = st.device_put(np.ones((100, 30)), whole), st.device_put(np.ones((64, 100)) / 100, split)

    for optimizer in (o.adamw(0.1), o.sgd(0.1, 0.9), o.lion(0.1)):

        def step(w: Any, state: Any, x: Any, optimizer: Any = optimizer) -> Any:
            updates, state = optimizer.update(st.grad(lambda w: (st.tanh(x @ w) ** 2).sum())(w), state, w)
            return o.apply_updates(w, updates), state

        for sharding in (whole, split):
            state = optimizer.init(st.device_put(w, sharding))
            with st.transfers() as log:
                new, _ = st.jit(step)(w, state, x)
            assert new.sharding == whole
            assert log.bytes == 2 * 7 * w.nbytes  # as many as those of the all-reduce, where the state is replicated
