"""ZeRO: layouts, bytes of a step, memory of the devices, and the same parameters as without it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import shardtensor as st
from shardtensor import P
from shardtensor.errors import ArgumentError, ArgumentTypeError, ShardingError

N = 8
WIDTH = 16


@pytest.fixture(autouse=True)
def measured() -> Iterator[None]:
    yield
    st.reset_peak_memory(measure=False)


def mesh_of(backend: str = "checked", **axes: int) -> st.Mesh:
    axes = axes or {"data": N}
    return st.make_mesh(tuple(axes.values()), tuple(axes), devices=st.devices(backend)[: np.prod([*axes.values()])])


def params_on(mesh: st.Mesh, width: int = WIDTH, depth: int = 3) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    whole = st.NamedSharding(mesh, P())
    layers = [rng.standard_normal((width, width)).astype("float32") / 4 for _ in range(depth)]
    return {"layers": [st.device_put(w, whole) for w in layers], "b": st.device_put(np.zeros(width, "float32"), whole)}


def loss(params: Any, x: Any) -> Any:
    h = x
    for w in params["layers"]:
        h = st.tanh(h @ st.reshard(w, st.NamedSharding(w.sharding.mesh, P())))
    return ((h + st.reshard(params["b"], st.NamedSharding(h.sharding.mesh, P())) - x) ** 2).mean()


def training(params: Any, level: int, optimizer: Any, **options: Any) -> tuple[Any, Any, Any]:
    """The parameters and the state in the layouts of a level, and the step as a program."""
    layouts = st.optim.zero(params, level=level) if level else None
    state = optimizer.init(params if layouts is None else st.reshard(params, layouts.state))
    if layouts is not None:
        params = st.reshard(params, layouts.params)

    def step(params: Any, state: Any, x: Any) -> Any:
        value, grads = st.value_and_grad(loss)(params, x)
        if layouts is not None:
            grads = st.reshard(grads, layouts.grads)
        updates, state = optimizer.update(grads, state, params)
        return st.optim.apply_updates(params, updates), state, value

    return params, state, st.jit(step, **{"executor": "numpy"} | options)


def batch_on(mesh: st.Mesh, rows: int = 512, width: int = WIDTH) -> Any:
    x = np.random.default_rng(1).standard_normal((rows, width)).astype("float32")
    return st.device_put(x, st.NamedSharding(mesh, P("data")))


OPTIMIZERS = {
    "adamw": lambda: st.optim.adamw(1e-2),
    "clipped": lambda: st.optim.chain(st.optim.clip_by_global_norm(1.0), st.optim.sgd(0.1, momentum=0.9)),
    "adafactor": lambda: st.optim.adafactor(1e-2, min_dim_size_to_factor=4),
    "muon": lambda: st.optim.muon(1e-2),
    "scaled": lambda: st.optim.dynamic_loss_scaling(st.optim.lion(1e-3), initial_scale=1.0),
}


@pytest.mark.parametrize(
    ("optimizer", "rows"),
    [
        ("adamw", 61),
        ("scaled", 64),
        *[pytest.param(o, n, marks=pytest.mark.full) for o in OPTIMIZERS for n in (64, 61)],
    ],
)
def test_parameters_are_those_without_zero(optimizer: str, rows: int) -> None:
    mesh = mesh_of()
    x = batch_on(mesh, rows)
    results = []
    for level in range(4):
        params, state, step = training(params_on(mesh), level, OPTIMIZERS[optimizer](), donate_argnums=(0, 1))
        for _ in range(3):
            params, state, value = step(params, state, x)
        results.append((params, value))
        expected = P("data") if level == 3 else P()
        assert all(p.sharding.spec == expected for p in st.tree.leaves(params))
    for got in results[1:]:
        for a, b in zip(st.tree.leaves(got), st.tree.leaves(results[0]), strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5)


def test_bytes_of_a_step_follow_the_formulas() -> None:
    mesh = mesh_of()
    x = batch_on(mesh)
    size = sum(p.nbytes for p in st.tree.leaves(params_on(mesh)))
    last = WIDTH * 4  # The last parameter that is gathered is used by the backward pass at once.
    last_weight = WIDTH * WIDTH * 4
    of_loss = 2 * (N - 1) * 4
    expected = {
        ("adamw", 0): 2 * size,
        ("adamw", 1): 2 * size,
        ("adamw", 2): 2 * size,
        ("adamw", 3): 3 * size - last - last_weight,
        ("clipped", 0): 2 * size,
        ("clipped", 1): 3 * size,
        ("clipped", 2): 2 * size,
        ("clipped", 3): 3 * size - last - last_weight,
    }
    for (name, level), times in expected.items():
        params, state, step = training(params_on(mesh), level, OPTIMIZERS[name]())
        step(params, state, x)
        with st.transfers() as log:
            step(params, state, x)
        # The squares of a split gradient are added up on the devices first: one number for each leaf, or for all.
        norms = log.bytes - (N - 1) * times - of_loss
        leaves = len(st.tree.leaves(params))
        assert norms in (
            [0] if name == "adamw" or level < 2 else [2 * (N - 1) * 4 * k for k in range(1, leaves + 1)]
        ), (
            name,
            level,
            log.bytes / (N - 1) / size,
            norms,
        )


def test_simulation_agrees_with_the_log() -> None:
    mesh, abstract = mesh_of("numpy"), st.AbstractMesh((N,), ("data",))

    def simulated(x: Any) -> Any:
        return st.empty_like(x, device=st.NamedSharding(abstract, x.sharding.spec))

    x = batch_on(mesh)
    for level in range(4):
        params, state, step = training(params_on(mesh), level, st.optim.adamw(1e-2))
        step(params, state, x)
        with st.transfers() as log:
            step(params, state, x)
        layout = st.tree.map(simulated, params_on(mesh))
        params, state, step = training(layout, level, st.optim.adamw(1e-2))
        assert st.simulate(step, params, state, simulated(x)).bytes == log.bytes


def test_memory_of_each_level() -> None:
    width, depth, rows = 128, 6, 256
    mesh = mesh_of()
    device = mesh.devices.flat[5]
    optimizer = st.optim.adamw(1e-3)
    size = 4 * (depth * width * width + width)
    batch = activation = rows * width * 4 // N
    peaks = {}
    for level in range(4):
        known = st.memory_info()
        others = known[device].bytes_in_use if device in known else 0
        x = batch_on(mesh, rows, width)
        params, state, step = training(params_on(mesh, width, depth), level, optimizer, donate_argnums=(0, 1))
        params, state, _ = step(params, state, x)
        st.reset_peak_memory()
        held = st.memory_info()[device].bytes_in_use - batch - others
        parts = {0: 3.0, 1: 1 + 2 / N, 2: 1 + 2 / N, 3: 3 / N}[level]
        assert parts * size <= held <= parts * size + 64
        params, state, _ = step(params, state, x)
        peaks[level] = st.memory_info()[device].peak_bytes_in_use - batch - others
        del params, state, step, x, _
    assert peaks[3] <= 1.15 * (16 / 4 * size / N) + (depth + 2) * activation
    assert peaks[3] < peaks[2] < peaks[0]


def test_layouts_on_a_mesh_with_tensor_parallelism() -> None:
    mesh = mesh_of("numpy", data=2, model=4)

    def put(shape: tuple[int, ...], *parts: Any) -> Any:
        return st.device_put(np.ones(shape, "float32"), st.NamedSharding(mesh, P(*parts)))

    params = {
        "columns": put((6, 64), None, "model"),  # a device has 6 by 16
        "rows": put((12, 4), "model"),  # a device has 3 by 4
        "whole": put((3, 5)),
        "number": put(()),
        "split": put((7, 2), "data"),
    }
    layouts = st.optim.zero(params, level=3)
    specs = {name: sharding.spec for name, sharding in layouts.params.items()}
    assert specs == {
        "columns": P(None, ("model", "data")),
        "rows": P("model", "data"),
        "whole": P(None, "data"),
        "number": P(),
        "split": P("data"),
    }
    assert st.optim.zero(params, axis=("data", "model"), level=2).grads["whole"].spec == P(None, ("data", "model"))
    state = st.optim.multi_transform(
        {"a": st.optim.adam(1e-3), "f": st.optim.adafactor(min_dim_size_to_factor=2)},
        {"columns": "f", "rows": "a", "whole": "a", "number": "a", "split": "a"},
    ).init(st.reshard(params, layouts.state))
    assert state.inner_states["a"].inner_state[0].mu["rows"].sharding.spec == P("model", "data")
    assert state.inner_states["a"].inner_state[0].count.sharding.spec == P()
    # A vector of a factored state has the layout of its parameter without the other dimension.
    factored = state.inner_states["f"].inner_state[0]
    assert {factored.v_row["columns"].shape, factored.v_col["columns"].shape} == {(6,), (64,)}
    for vector in (factored.v_row["columns"], factored.v_col["columns"]):
        assert vector.sharding.spec == (P(("model", "data")) if vector.shape == (64,) else P())


def test_one_parameter_and_none() -> None:
    mesh = mesh_of("numpy")
    w = st.ones((16, 3), device=st.NamedSharding(mesh, P()))
    layouts = st.optim.zero(w, level=2)
    assert layouts.grads.spec == P("data")
    assert layouts.state == layouts.grads
    assert st.optim.zero({"w": w, "frozen": None}, level=3).params["frozen"] is None


def test_errors_name_the_parameter() -> None:
    mesh = mesh_of("numpy")
    params = {"w": [st.ones(8, device=st.NamedSharding(mesh, P()))]}
    with pytest.raises(
        ShardingError, match=r"zero: axis is 'dta', and the mesh of params\['w'\]\[0\] has the axes 'data'"
    ):
        st.optim.zero(params, axis="dta")
    for level in (0, 4, True, "1"):
        with pytest.raises(ArgumentError, match=r"zero: level is .*; wanted 1 \(state\), 2"):
            st.optim.zero(params, level=level)  # type: ignore[arg-type]
    with pytest.raises(ArgumentTypeError, match=r"zero: params\['w'\] is float64\[3\].*; wanted a tensor"):
        st.optim.zero({"w": np.ones(3)})


def test_parameters_with_unreduced_gradients() -> None:
    """Axes along which a parameter is reduced count as those along which it is replicated."""
    mesh = st.make_mesh((2, 2), ("x", "y"))
    w = st.device_put(np.ones((4, 4)), st.NamedSharding(mesh, st.P(reduced={"x", "y"})))
    layouts = st.optim.zero({"w": w}, axis="x", level=3)
    assert layouts.state["w"].spec == layouts.params["w"].spec == st.P("x", reduced={"y"})
