"""Common sums: partial sums that do not depend on one another are added in one message."""

from __future__ import annotations

from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as some

import shardtensor as st
from shardtensor import P
from shardtensor.interpreters.jit.rewrites import common_sums
from tests.interpreters.jit.eager import check_under_jit
from tests.layouts import MESHES, array, everywhere, mesh_of

ROUND = 2 * 3
"""The messages of an all-reduce of four devices: the partial sums to one of them, and the sum back."""


def given(backend: str, rows: int = 10, dtype: str = "float32") -> Any:
    mesh = mesh_of((4,), backend)
    split, whole = st.NamedSharding(mesh, P("x")), st.NamedSharding(mesh, P())
    shapes = ((rows, 6), (rows, 3), (6, 5), (5,), (5, 3), (3,))
    return [st.device_put(array(s, dtype, k), whole if k > 1 else split) for k, s in enumerate(shapes)]


def step(x: Any, y: Any, w1: Any, b1: Any, w2: Any, b2: Any) -> Any:
    """A step of training by gradient descent, data parallel."""
    hidden = st.tanh(x @ w1 + b1)
    error = hidden @ w2 + b2 - y
    loss = st.mean(error * error)
    new = b2 - 0.1 * error.sum(axis=0), w2 - 0.1 * (hidden.T @ error)
    back = (error @ w2.T) * (1 - hidden * hidden)
    return loss, w1 - 0.1 * (x.T @ back), b1 - 0.1 * st.mean(back, axis=0), *new


def messages(log: st.TransferLog) -> int:
    return sum(record.source != record.destination for record in log)


def check_messages(f: Any, *args: Any, executor: str | None = "numpy") -> tuple[int, int]:
    """Checks the results and the bytes of a function under jit; returns its messages, and those of eager mode."""
    sent, eager = check_under_jit(f, *args, executor=executor, rtol=1e-4, atol=1e-5)
    return messages(sent), messages(eager)


@everywhere
@pytest.mark.parametrize("executor", ["numpy", None])
def test_the_gradients_of_a_step_are_added_in_one_message(executor: str | None, backend: str) -> None:
    assert check_messages(step, *given(backend), executor=executor) == (ROUND, 5 * ROUND)


@everywhere
def test_each_dtype_has_a_message(backend: str) -> None:
    x, y, *_ = given(backend)
    counts = (x * 3).astype("int32")
    f = lambda x, y, n: (x.sum(axis=0), n.sum(axis=0), y.sum(), n.T @ n, (x > 1).any(axis=0))  # noqa: E731
    # The sums of int32 have the dtype int64, and logical reductions are no sums.
    assert check_messages(f, x, y, counts)[0] == 4 * ROUND


def test_sums_that_depend_on_others_come_later() -> None:
    def f(x: Any, y: Any) -> Any:
        first, second = st.tanh(x.sum(axis=0)), y.sum(axis=0)
        return second, ((x - first) ** 2).sum(axis=0), (x * first).sum(), first

    assert check_messages(f, *given("numpy")[:2]) == (2 * ROUND, 4 * ROUND)


def test_one_sum_stays_where_it_is() -> None:
    x, *_ = given("numpy")
    lowered = st.jit(lambda x: st.exp(x.sum(axis=0))).lower(x)
    assert str(lowered._executable.laid_out) == str(lowered.program)


@everywhere
def test_devices_with_empty_shards_have_no_part_in_sums(backend: str) -> None:
    found, eager = check_messages(step, *given(backend, rows=3))
    assert found <= eager


def test_messages_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    args = given("numpy")
    monkeypatch.setattr(common_sums, "_LARGE_BYTES", 30 * 4)  # The product of 6 × 5 elements has its own message.
    assert check_messages(lambda *args: step(*args), *args) == (2 * ROUND, 5 * ROUND)
    monkeypatch.setattr(common_sums, "_LARGE_BYTES", 1 << 20)
    monkeypatch.setattr(common_sums, "_MOST_BYTES", 31 * 4)
    assert check_messages(lambda *args: step(*args), *args)[0] == 3 * ROUND


def test_writes_wait_for_sums() -> None:
    def f(x: Any, y: Any, w1: Any, b1: Any, w2: Any, b2: Any) -> Any:
        b2 -= y.sum(axis=0)
        w1[1:] *= x.sum(axis=0)[1:, None]
        b1[:3] = b2
        return (x.sum(),)

    mine, its = given("numpy"), given("numpy")
    with st.transfers() as log:
        (found,) = st.jit(f, executor="numpy")(*mine)
    assert messages(log) == ROUND
    assert float(found) == float(f(*its)[0])
    for a, b in zip(mine, its, strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_messages_are_priced_on_devices_that_do_not_exist() -> None:
    mesh = st.AbstractMesh((4,), ("x",))
    split, whole = st.NamedSharding(mesh, P("x")), st.NamedSharding(mesh, P())
    shapes = ((10, 6), (10, 3), (6, 5), (5,), (5, 3), (3,))
    args = [st.zeros(s, dtype="float32", device=whole if k > 1 else split) for k, s in enumerate(shapes)]
    once, several = (st.simulate(g, *args, latency=1e-5, bandwidth=1e10).seconds for g in (st.jit(step), step))
    assert 0 < once < several


FUNCTIONS = {
    "sum": lambda x, y: x.sum(axis=0),
    "all": lambda x, y: x.sum(),
    "product": lambda x, y: x.T @ y,
    "rows": lambda x, y: (x * 2).sum(axis=1),
    "mean": lambda x, y: st.mean(y, axis=0),
    "of a sum": lambda x, y: (x - st.exp(x).sum(axis=0)).sum(axis=0),
    "integers": lambda x, y: (x > 0).sum(axis=0),
    "scaled": lambda x, y: x.sum(axis=0) * 2 - x.T.sum(axis=1),
    "largest": lambda x, y: x.max(axis=0),
}


@everywhere
@pytest.mark.parametrize("examples", [6, pytest.param(1000, marks=pytest.mark.full)])
def test_any_sums(examples: int, backend: str) -> None:
    @hypothesis.settings(max_examples=examples)
    @hypothesis.given(
        names=some.lists(some.sampled_from(sorted(FUNCTIONS)), min_size=2, max_size=5),
        mesh=some.sampled_from(MESHES),
        rows=some.integers(1, 9),
        dtype=some.sampled_from(["float32", "float64", "complex64", "int32", "float16"]),
    )
    def run(names: list[str], mesh: Any, rows: int, dtype: str) -> None:
        placed = st.NamedSharding(made := mesh_of(mesh, backend), P(made.axis_names))
        x, y = (st.device_put(array((rows, n), dtype, n), placed) for n in (4, 2))
        if dtype == "complex64":
            names = [n for n in names if n not in ("integers", "largest")]
        check_messages(lambda x, y: [FUNCTIONS[name](x, y) for name in names], x, y)

    run()


def test_axes_of_one_device_do_not_keep_sums_apart() -> None:
    mesh = st.make_mesh((4, 1), ("data", "model"), devices=st.devices("checked")[:4])

    def put(shape: tuple[int, ...], *parts: Any) -> Any:
        return st.device_put(np.arange(float(np.prod(shape))).reshape(shape), st.NamedSharding(mesh, P(*parts)))

    params = {"columns": put((3, 5), None, "model"), "rows": put((5, 3), "model"), "shift": put((3,))}
    x = put((8, 3), "data")
    gradient = st.grad(lambda p, x: ((x @ p["columns"]) @ p["rows"] + p["shift"]).sum())
    run = st.jit(gradient)
    run(params, x)
    with st.transfers() as log:
        grads = run(params, x)
    assert messages(log) == ROUND
    for name, g in gradient(params, x).items():
        assert grads[name].sharding == g.sharding == params[name].sharding
        np.testing.assert_array_equal(grads[name], g)
