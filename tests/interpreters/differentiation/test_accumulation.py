"""`accumulate`: the results of the whole batch, one reduction for all parts, and the memory of one part."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as some

import shardtensor as st
from shardtensor import P
from shardtensor.errors import ArgumentError, ArgumentTypeError
from shardtensor.interpreters.differentiation.left_sums import left_sums
from tests.draws import drawn

N = 8
WIDTH = 6


@pytest.fixture(autouse=True)
def measured() -> Iterator[None]:
    yield
    st.reset_peak_memory(measure=False)


def arrays(backend: str, rows: int = 64, spec: Any = None) -> tuple[Any, Any, Any]:
    """Parameters, a batch, and the bytes of the parameters."""
    mesh = st.make_mesh((N,), ("data",), devices=st.devices(backend)[:N])
    rng = np.random.default_rng(0)

    def put(x: Any, spec: Any) -> Any:
        return st.device_put(x, st.NamedSharding(mesh, spec))

    params = {"w": put(rng.standard_normal((WIDTH, WIDTH)), spec or P()), "b": put(rng.standard_normal(WIDTH), P())}
    batch = {"x": put(rng.standard_normal((rows, WIDTH)), P("data")), "y": put(rng.standard_normal(rows), P("data"))}
    return params, batch, sum(p.nbytes for p in params.values())


def loss(params: Any, batch: Any) -> Any:
    w = st.reshard(params["w"], st.NamedSharding(params["w"].sharding.mesh, P()))
    h = st.tanh(batch["x"] @ w + params["b"])
    return (((h @ w + params["b"]).sum(axis=1) - batch["y"]) ** 2).mean()


def agree(got: Any, expected: Any) -> None:
    for a, b in zip(st.tree.leaves(got), st.tree.leaves(expected), strict=True):
        assert (a.shape, a.dtype, a.sharding) == (b.shape, b.dtype, b.sharding)
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-14)


def mean_of_parts(function: Any, n: int, params: Any, batch: Any) -> Any:
    parts = [{name: x[k::n] for name, x in batch.items()} for k in range(n)]
    return st.tree.map(lambda *results: sum(results) / n, *[function(params, part) for part in parts])


@pytest.mark.parametrize("backend", ["numpy", "checked"])
@pytest.mark.parametrize("jit", [False, True])
@hypothesis.settings(max_examples=drawn(100, fast=6))
@hypothesis.given(data=some.data())
def test_results_are_those_of_the_whole_batch(backend: str, jit: bool, data: Any) -> None:
    rows = data.draw(some.integers(1, 40))
    n = data.draw(some.integers(1, min(rows, 7)))
    spec = data.draw(some.sampled_from([P(), P("data"), P(None, "data")]))
    params, batch, _ = arrays(backend, rows, spec)
    run = st.accumulate(st.value_and_grad(loss), n)
    agree((st.jit(run) if jit else run)(params, batch), st.value_and_grad(loss)(params, batch))


@pytest.mark.parametrize("backend", ["numpy", "checked"])
@pytest.mark.parametrize("executor", [None, "numpy", "c"])
@pytest.mark.parametrize("n", [1, 4])
def test_one_reduction_for_all_parts(backend: str, executor: str | None, n: int) -> None:
    params, batch, size = arrays(backend, 64 * n)
    run = st.accumulate(st.value_and_grad(loss), n)
    run = st.jit(run, executor=executor) if executor else run
    run(params, batch)
    with st.transfers() as log:
        run(params, batch)
    of_values = 2 * (N - 1) * 8
    assert log.bytes == 2 * (N - 1) * size + of_values * n


@pytest.mark.parametrize("backend", ["numpy", "checked"])
@pytest.mark.parametrize("n", [3, 4])
def test_a_program_of_the_numpy_executor_has_the_bits_of_eager_mode(backend: str, n: int) -> None:
    params, batch, _ = arrays(backend, 64)
    run = st.accumulate(st.value_and_grad(loss), n)
    for a, b in zip(st.tree.leaves(st.jit(run, executor="numpy")(params, batch)), st.tree.leaves(run(params, batch)), strict=True):  # fmt: skip
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("backend", ["numpy", "checked"])
def test_a_program_adds_gradients_in_the_order_of_eager_mode(backend: str) -> None:
    params, batch, _ = arrays(backend, 64)
    w, x = params["w"], batch["x"]
    for other in (lambda w: w, lambda w: w.T, lambda w: -w):

        def twice(w: Any, other: Any = other) -> Any:
            return ((x @ w) ** 2).mean() + st.tanh(x @ other(w)).mean()

        np.testing.assert_array_equal(st.jit(st.grad(twice), executor="numpy")(w), st.grad(twice)(w))


@pytest.mark.parametrize("executor", ["numpy", "c", None])
@pytest.mark.parametrize("rows", [256, 255])
def test_a_split_gradient_is_reduce_scattered_once(executor: str | None, rows: int) -> None:
    params, batch, size = arrays("checked", rows)
    layout = st.NamedSharding(params["w"].sharding.mesh, P("data"))
    run = st.jit(lambda p, b: st.reshard(st.accumulate(st.grad(loss), 4)(p, b), layout), executor=executor)
    grads = run(params, batch)
    with st.transfers() as log:
        run(params, batch)
    assert all(g.sharding == layout for g in grads.values())
    assert log.bytes == (N - 1) * size + 4 * 2 * (N - 1) * 8  # and the loss of each part


@pytest.mark.parametrize("executor", ["numpy", "c"])
@pytest.mark.parametrize("clipped", [False, True])
def test_one_reduction_for_an_optimizer_that_takes_a_gradient_several_times(executor: str, clipped: bool) -> None:
    params, batch, size = arrays("checked", 256)
    optimizer = st.optim.lion(1e-2)
    if clipped:
        optimizer = st.optim.chain(st.optim.clip_by_global_norm(1.0), st.optim.adamw(1e-2))

    def step(params: Any, state: Any, batch: Any) -> Any:
        grads = st.accumulate(st.grad(loss), 4)(params, batch)
        updates, state = optimizer.update(grads, state, params)
        return st.optim.apply_updates(params, updates), state

    run, state = st.jit(step, executor=executor), optimizer.init(params)
    run(params, state, batch)
    with st.transfers() as log:
        run(params, state, batch)
    assert log.bytes == 2 * (N - 1) * size + 4 * 2 * (N - 1) * 8  # and the loss of each part


@pytest.mark.parametrize("jit", [False, True])
def test_one_reduction_of_a_loss_in_float16(jit: bool) -> None:
    params, batch, size = arrays("checked", 64)
    params, batch = st.tree.map(lambda x: x.astype("float32"), (params, batch))
    run = st.accumulate(st.grad(st.mixed_precision("float16")(loss)), 4)
    run = st.jit(run) if jit else run
    grads = run(params, batch)
    with st.transfers() as log:
        run(params, batch)
    assert grads["w"].dtype == np.float32
    assert size / 2 <= log.bytes / (2 * (N - 1)) <= size / 2 + 4 * 4  # size is that of float64; and the losses


def test_many_reductions_of_one_program_are_deferred() -> None:
    params, batch, size = arrays("checked", 64)
    many = [params] * 9

    def deep(many: Any, batch: Any) -> Any:
        total = 0
        for p in many:
            total = total + loss(p, batch)
        return total

    run = st.jit(st.accumulate(st.grad(deep), 4))
    run(many, batch)
    with st.transfers() as log:
        run(many, batch)
    assert log.bytes == 9 * 2 * (N - 1) * (size + 4 * 8)  # and the losses of each part


def test_parts_of_different_sizes_are_reduced_once() -> None:
    params, batch, size = arrays("checked", 64 * 3 + 1)
    expected = st.grad(loss)(params, batch)
    with st.transfers() as log:
        got = st.accumulate(st.grad(loss), 3)(params, batch)
    agree(got, expected)
    assert log.bytes == 2 * (N - 1) * size + 3 * 2 * (N - 1) * 8


def test_activations_are_those_of_one_part() -> None:
    def deep(w: Any, x: Any) -> Any:
        for _ in range(10):
            x = st.tanh(x @ w)
        return x.mean()

    mesh = st.make_mesh((N,), ("data",), devices=st.devices("checked")[:N])
    w = st.device_put(np.eye(16), st.NamedSharding(mesh, P()))
    x = st.device_put(np.ones((8 * 1024, 16)), st.NamedSharding(mesh, P("data")))
    device = mesh.devices.flat[3]
    peaks = []
    for n in (1, 8):
        run = st.accumulate(st.grad(deep), n)
        run(w, x)
        st.reset_peak_memory()
        before = st.memory_info()[device].bytes_in_use
        run(w, x)
        peaks.append(st.memory_info()[device].peak_bytes_in_use - before)
    assert peaks[1] < peaks[0] / 5


def test_functions_of_gradients_see_their_sums() -> None:
    """A function that does more with a gradient than `grad` gets the elements of the whole gradient of its part."""
    params, batch, _ = arrays("checked", 64)

    def squared(p: Any, b: Any) -> Any:
        return st.tree.map(lambda g: g * g, st.grad(loss)(p, b))

    expected = mean_of_parts(squared, 4, params, batch)
    agree(st.accumulate(squared, 4)(params, batch), expected)


@pytest.mark.parametrize("backend", ["numpy", "checked"])
def test_what_a_function_makes_of_gradients_is_reduced(backend: str) -> None:
    """Operators that leave partial sums as they are, and a gradient that is two results."""
    params, batch, _ = arrays(backend, 64)

    def several(p: Any, b: Any) -> Any:
        grads = st.grad(loss)(p, b)
        return grads, st.tree.map(lambda g: 2 * g, grads), grads

    agree(st.accumulate(several, 4)(params, batch), mean_of_parts(several, 4, params, batch))
    agree(st.accumulate(several, 3)(params, batch), several(params, batch))


def test_gradients_of_a_part_are_freed_before_the_next_one() -> None:
    mesh = st.make_mesh((N,), ("data",), devices=st.devices("checked")[:N])
    w = st.device_put(np.ones((100, 100)), st.NamedSharding(mesh, P()))
    x = st.device_put(np.ones((64, 100)), st.NamedSharding(mesh, P("data")))
    held = []

    def noted(w: Any, x: Any) -> Any:
        held.append(st.memory_info(mesh.devices[0]).bytes_in_use)
        return st.grad(lambda w: ((x @ w) ** 2).mean())(w)

    st.accumulate(noted, 4)(w, x)
    assert held[-1] - held[0] < 1.5 * w.nbytes  # the sum only


@pytest.mark.parametrize("jit", [False, True])
def test_gradients_that_occur_twice_and_linear_functions_of_them_are_reduced(jit: bool) -> None:
    params, batch, _ = arrays("checked", 64)

    def several(p: Any, b: Any) -> Any:
        g = st.grad(loss)(p, b)["w"]
        return g, g, -g, g[1:], {"stacked": st.stack([g, g])}

    expected = mean_of_parts(several, 4, params, batch)
    run = st.accumulate(several, 4)
    agree((st.jit(run) if jit else run)(params, batch), expected)


def test_other_results() -> None:
    params, batch, _ = arrays("numpy", 10)

    def counted(p: Any, b: Any) -> Any:
        return loss(p, b), {"rows": b["x"].shape[0], "positive": (b["y"] > 0).sum(), "none": None, "mean": 2.5}

    (_, aux), _ = st.accumulate(st.value_and_grad(counted, has_aux=True), 4)(params, batch)
    assert aux["rows"] == 10
    assert int(aux["positive"]) == int((batch["y"] > 0).sum())
    assert aux["none"] is None
    assert aux["mean"] == pytest.approx(2.5)


def test_batch_argnums_and_other_arguments() -> None:
    params, batch, _ = arrays("numpy", 12)

    def scaled(b: Any, p: Any, table: Any, *, factor: Any) -> Any:
        assert table.shape == (WIDTH,)
        assert factor.shape == (3,)
        return loss(p, b) * (table * 0).sum() + loss(p, b) * factor.sum()

    gradient = st.grad(scaled, argnums=1)
    table, factor = np.ones(WIDTH), np.ones(3)
    got = st.accumulate(gradient, 4, batch_argnums=0)(batch, params, table, factor=factor)
    agree(got, gradient(batch, params, table, factor=factor))


def test_second_derivatives_in_the_function() -> None:
    params, batch, _ = arrays("checked", 32)

    def curved(p: Any, b: Any) -> Any:
        return sum((g * g).sum() for g in st.grad(loss)(p, b).values())

    expected = mean_of_parts(st.grad(curved), 2, params, batch)
    agree(st.accumulate(st.grad(curved), 2)(params, batch), expected)


def test_an_error_in_the_function_leaves_no_state() -> None:
    params, batch, _ = arrays("checked")

    def broken(p: Any, b: Any) -> Any:
        raise KeyError("broken")

    with pytest.raises(KeyError, match="broken"):
        st.accumulate(broken, 2)(params, batch)
    assert left_sums() is None
    assert not st.grad(loss)(params, batch)["w"].sharding.spec.unreduced


def test_errors() -> None:
    params, batch, _ = arrays("numpy", 6)
    gradient = st.grad(loss)
    for n in (0, -1, 2.0, True, "2"):
        with pytest.raises(ArgumentTypeError, match=r"accumulate: n is .*; wanted the number of parts"):
            st.accumulate(gradient, n)  # type: ignore[arg-type]
    with pytest.raises(
        ArgumentError, match=r"accumulate: argument 1\['x'\] has 6 rows; wanted at least one for each of 7 parts"
    ):
        st.accumulate(gradient, 7)(params, batch)
    with pytest.raises(ArgumentError, match=r"argument 1\['y'\] has 5 rows, and argument 1\['x'\] has 6"):
        st.accumulate(gradient, 2)(params, {"x": batch["x"], "y": batch["y"][:5]})
    with pytest.raises(ArgumentError, match=r"no argument among \[\] is an array with dimensions"):
        st.accumulate(gradient, 2)(params)
    with pytest.raises(ArgumentTypeError, match=r"accumulate: the result\[0\] of the function is a str"):
        st.accumulate(lambda p, b: ["text"], 2)(params, batch)
    with pytest.raises(ArgumentTypeError, match="accumulate: fun is an int"):
        st.accumulate(3, 2)  # type: ignore[arg-type]
