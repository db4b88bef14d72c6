"""The memory of gradients: what is saved, when it is freed, and what is never copied."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import shardtensor as st
from shardtensor.backend.device import HOST
from tests.layouts import assert_close, everywhere, mesh_of, put

N, ROWS = 4, 1 << 12
ARRAY = ROWS * 8
"""The bytes of the argument, and of each value of the chain."""


@pytest.fixture(autouse=True)
def measured() -> Iterator[None]:
    yield
    st.reset_peak_memory(measure=False)


def used(backend: str) -> tuple[int, int]:
    """Returns the bytes in use on the devices of a backend, and the sum of their peaks."""
    found = [st.memory_info(d) for d in mesh_of((N,), backend).flat]
    return sum(m.bytes_in_use for m in found), sum(m.peak_bytes_in_use or 0 for m in found)


def peak(fn: Callable[..., Any], *args: Any, backend: str = "numpy") -> float:
    """Returns the largest number of arrays that exist at the same time in a call besides those before it."""
    st.reset_peak_memory()
    before = used(backend)[0]
    result = fn(*args)
    found = (used(backend)[1] - before) / ARRAY
    del result
    assert used(backend)[0] == before  # All of it has been freed.
    return found


def chain(x: Any, count: int) -> Any:
    for _ in range(count):
        x = st.tanh(x) * 0.9
    return x


@everywhere
def test_the_peak_is_what_is_saved_and_two_arrays(backend: str) -> None:
    x = put(np.linspace(0, 1, ROWS), backend)
    assert peak(st.grad(lambda x: chain(x, 30).sum()), x, backend=backend) == pytest.approx(30 + 2, abs=0.1)


def recomputed(x: Any, **options: Any) -> Any:
    for _ in range(5):
        x = st.remat(lambda x: chain(x, 6), **options)(x)
    return x.sum()


@everywhere
def test_the_peak_of_recomputed_functions(backend: str) -> None:
    x = put(np.linspace(0, 1, ROWS), backend)
    # The arguments of the last four, the results within one of them, and two arrays.
    assert peak(st.grad(recomputed), x, backend=backend) == pytest.approx(4 + 6 + 2, abs=0.1)


def test_functions_of_vjp_hold_what_is_saved_until_they_end() -> None:
    x = put(np.linspace(0, 1, ROWS), "numpy")
    st.reset_peak_memory()
    before = used("numpy")[0]
    _, pull = st.vjp(lambda x: chain(x, 10).sum(), x)
    assert (used("numpy")[0] - before) / ARRAY == pytest.approx(10, abs=0.1)
    pull(1.0)
    assert (used("numpy")[0] - before) / ARRAY == pytest.approx(10, abs=0.1)
    del pull, _
    assert used("numpy")[0] == before
    value, pull, aux = st.vjp(lambda x: (x * 2, x + 1), x * 1, has_aux=True)
    del value, aux
    assert used("numpy")[0] == before  # Neither the argument nor the results.
    del pull
    _, pull = st.vjp(recomputed, x)
    assert (used("numpy")[0] - before) / ARRAY == pytest.approx(4, abs=0.1)
    del pull, _
    assert used("numpy")[0] == before


@everywhere
def test_updates_in_place_copy_the_argument_once(backend: str) -> None:
    def decayed(x: Any) -> Any:
        y = x.copy()
        for _ in range(20):
            y *= 0.9
        return y.sum()

    x = put(np.linspace(0, 1, ROWS), backend)
    assert peak(st.grad(decayed), x, backend=backend) <= 2 + 0.1


@pytest.mark.parametrize("argument", ["tensor", "pytree", "second"])
def test_an_argument_is_not_copied(argument: str) -> None:
    x = put(np.linspace(0, 1, ROWS), "numpy")
    fn: Any
    if argument == "tensor":
        fn = lambda: st.grad(lambda x: (x[:8] * x[:8]).sum())(x)  # noqa: E731
    elif argument == "pytree":
        fn = lambda: st.grad(lambda t: (t["x"][:8] * 2).sum())({"x": x})  # noqa: E731
    else:
        fn = lambda: st.grad(lambda a, x: (a * x[:8]).sum())(x[:8], x)  # noqa: E731
    assert peak(fn) <= (1.1 if argument != "second" else 0.1)  # The gradient itself.


def test_an_argument_that_is_written_is_copied_once() -> None:
    x = put(np.linspace(0, 1, ROWS), "numpy")

    def written(x: Any) -> Any:
        x[0] = 0
        x *= 2
        return x.sum()

    assert peak(st.grad(written), x) <= 2.1


@pytest.mark.parametrize("executor", ["numpy", "c"])
@pytest.mark.parametrize("is_recomputed", [False, True], ids=["saved", "recomputed"])
def test_programs_need_the_memory_that_their_cost_says(executor: str, is_recomputed: bool) -> None:
    rng = np.random.default_rng(0)
    x = put(rng.standard_normal((256, 64)), "numpy")
    ws = [put(rng.standard_normal((64, 64)), "numpy", spec=st.P()) for _ in range(4)]

    def layer(w: Any, x: Any) -> Any:
        y = st.tanh(x @ w) * 0.9
        return y / (1 + (y * y).mean(axis=1, keepdims=True))

    def loss(ws: Any, x: Any) -> Any:
        for w in ws:
            x = (st.remat(layer) if is_recomputed else layer)(w, x)
        return (x * x).mean()

    fn = st.jit(st.grad(loss), executor=executor)
    fn(ws, x)
    arguments = x.nbytes + sum(w.nbytes for w in ws)
    said = (fn.lower(ws, x).cost().peak - arguments) / ARRAY
    found = peak(fn, ws, x)
    assert found == pytest.approx(said, rel=0.1)
    if is_recomputed:
        assert found < 0.8 * peak(st.jit(st.grad(lambda ws, x: loss_of(layer, ws, x)), executor=executor), ws, x)


def loss_of(layer: Any, ws: Any, x: Any) -> Any:
    for w in ws:
        x = layer(w, x)
    return (x * x).mean()


def test_values_that_a_gather_has_made_are_freed() -> None:
    mesh = mesh_of((N,), "checked")
    x = st.device_put(np.ones((N, 64)), st.NamedSharding(mesh, st.P("x")))
    ws = [st.device_put(np.eye(64), st.NamedSharding(mesh, st.P("x"))) for _ in range(6)]

    def loss(ws: Any, *, keeps: bool) -> Any:
        y = x
        for w in ws:
            gathered = st.reshard(w, st.NamedSharding(mesh, st.P()))
            y = st.tanh(y @ (gathered.copy() if keeps else gathered))
        return y.sum()

    found, kept = [
        peak(lambda k=k: st.grad(lambda ws: loss(ws, keeps=k))(ws), backend="checked") * ARRAY / (64 * 64 * 8)
        for k in (False, True)
    ]
    # Of the gathered parameters, and of their gradients before they are split, one exists at a time on four devices.
    assert found < 6 + 4
    assert kept > 5 * 4


@pytest.mark.parametrize("wrap", [lambda f: f, st.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("backend", ["checked", "cupy"], indirect=True)
def test_offloaded_values_are_in_the_memory_of_the_host(wrap: Any, backend: str) -> None:
    x = put(np.linspace(0, 1, ROWS), backend)
    options = {"offload_src": "device", "offload_dst": "pinned_host"}

    def loss(x: Any, saved: list[str], offloaded: list[str]) -> Any:
        policy = st.checkpoint_policies.save_and_offload_only_these_names(
            names_which_can_be_saved=saved, names_which_can_be_offloaded=offloaded, **options
        )

        @functools.partial(st.remat, policy=policy)
        def f(x: Any) -> Any:
            for _ in range(8):
                x = st.checkpoint_name(st.sin(x * 1.1), "x")
            return x

        return f(x).sum()

    found = []
    for names in ((["x"], []), ([], ["x"])):
        fn = wrap(st.grad(lambda x, names=names: loss(x, *names)))
        g = fn(x)
        st.reset_peak_memory()
        host = st.memory_info(HOST).bytes_in_use
        before = used(backend)[0]
        assert_close(fn(x), g, False)
        peaks = used(backend)[1], st.memory_info(HOST).peak_bytes_in_use or 0
        found.append([(peaks[0] - before) / ARRAY, (peaks[1] - host) / ARRAY])
    (saved, _), (offloaded, on_host) = found
    assert on_host == pytest.approx(8, abs=0.1)
    assert saved >= offloaded or wrap is st.jit  # One kernel computes the chain and its gradient, and saves nothing.


def test_remat_lowers_the_memory_of_a_step_as_cost_says() -> None:
    mesh = st.make_mesh((8,), ("data",), devices=st.devices("checked")[:8])
    params = st.device_put({"up": np.ones((32, 128)), "down": np.ones((128, 32))}, st.NamedSharding(mesh, st.P()))
    x = st.device_put(np.ones((2048, 32)), st.NamedSharding(mesh, st.P("data")))

    def block(params: Any, x: Any) -> Any:
        y = x - x.mean(axis=-1, keepdims=True)
        y = y / st.sqrt((y * y).mean(axis=-1, keepdims=True) + 1e-5)
        h = y @ params["up"]
        return x + (0.5 * h * (1 + st.tanh(0.8 * (h + 0.04 * h * h * h)))) @ params["down"]

    measured, computed = [], []
    for one in (block, st.remat(block)):

        def loss(params: Any, x: Any, one: Any = one) -> Any:
            for _ in range(6):
                x = one(params, x)
            return (x * x).mean()

        step = st.jit(st.value_and_grad(loss), executor="numpy")
        step(params, x)
        st.reset_peak_memory()
        before = sum(st.memory_info(d).bytes_in_use for d in mesh.devices.flat)
        step(params, x)
        measured.append(sum(st.memory_info(d).peak_bytes_in_use or 0 for d in mesh.devices.flat) - before)
        computed.append(step.lower(params, x).cost().peak)
    assert measured[1] < 0.4 * measured[0]
    assert measured[0] - measured[1] == pytest.approx(computed[0] - computed[1], rel=0.1)
