"""Loops whose trips C runs: their bits are those of the trips that Python runs with the same kernels."""

from __future__ import annotations

import gc
import os
import signal
import threading
import tracemalloc
import weakref
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as some

import shardtensor as st
from shardtensor.interpreters.jit.c import c_loops, c_trips
from shardtensor.interpreters.jit.c.c_executor import compile_kernels
from shardtensor.interpreters.jit.c.c_loop_library import LOOPS
from shardtensor.interpreters.jit.c.compiler import find_compiler
from shardtensor.tensor.pytree import leaves
from tests.draws import drawn

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="no C compiler")

Body = Callable[..., Any]

N = 7
"""The number of trips."""


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The numbers of trips of the loops that C has run."""
    trips: list[int] = []
    plain = c_trips.Run.run

    def counting(self: c_trips.Run) -> None:
        plain(self)
        trips.append(self.done)

    monkeypatch.setattr(c_trips.Run, "run", counting)
    return trips


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of three trips, of which Python stores as many numbers."""
    monkeypatch.setattr(c_trips, "_FIRST", 3)
    monkeypatch.setattr(c_trips, "CHUNK", 0.0)
    monkeypatch.setattr(c_trips, "_NUMBERS", 3)


def by_python(f: Body, *args: Any) -> Any:
    """Calls a function in which Python runs the trips of all loops."""
    with mock.patch.object(c_loops.CLoop, "_results", return_value=None):
        return f(*args)


def check(f: Body, *args: Any, rtol: float = 1e-11) -> None:
    """Checks that a program has the bits of Python's loop, and about the results of eager mode."""
    traced = st.jit(f, executor="c")
    before = [np.array(x) for x in args]
    found, again, wanted = leaves(traced(*args)), leaves(by_python(traced, *args)), leaves(f(*args))
    for x, y, z in zip(found, again, wanted, strict=True):
        if x is None:
            assert y is z is None
            continue
        assert (x.sharding, x._is_scalar, x.dtype, x.shape) == (z.sharding, z._is_scalar, z.dtype, z.shape)
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()
        np.testing.assert_allclose(np.asarray(x), np.asarray(z), rtol=rtol)
    for x, old in zip(args, before, strict=True):
        np.testing.assert_array_equal(np.asarray(x), old)


def numbers(*shape: int, dtype: str = "f8") -> st.ShardedTensor:
    return st.asarray(np.random.default_rng(len(shape)).normal(size=shape).astype(dtype))


# -- what C runs -----------------------------------------------------------------------------------


def halves(c: Any, x: Any) -> Any:
    c = c * 0.5 + x
    return c, st.tanh(c)


def jacobi(_: int, c: Any) -> Any:
    c[1:-1] = 0.5 * (c[:-2] + c[2:])
    return c


def boundaries(_: int, c: Any) -> Any:
    c[0] = 1.0
    c[1:-1] = 0.5 * (c[:-2] + c[2:])
    c[-1] = c[-2]
    return c


def softmax(c: Any, x: Any) -> Any:
    e = st.exp(c - c.max(axis=1, keepdims=True))
    return e / e.sum(axis=1, keepdims=True) + x, c.sum(axis=1)


def several(c: Any, x: Any) -> Any:
    return {"a": c["b"] + x["p"], "b": c["a"] * x["q"], "w": c["w"]}, (c["a"], x["p"] * c["w"], None, c["w"])


def kinds(c: Any, xs: Any, h: Any) -> Any:
    """Loops of all kinds that C runs."""
    w, u, m = numbers(16, 16) * 0.2, numbers(16, 12), numbers(6, 9)
    host = np.linspace(-0.3, 0.3, 256).reshape(16, 16)

    def rnn(h: Any, x: Any) -> Any:
        h = st.tanh(x[:16] @ w + h @ w.T + host @ h)
        return h, (h @ u, h @ h)

    tree = {"a": c, "b": c + 1, "w": c * 0.1}
    return [
        st.scan(halves, c, xs),
        st.scan(halves, c[::2], xs[:, ::2], reverse=True),
        st.scan(halves, c.astype("float32"), xs.astype("float32")),
        st.scan(halves, c, xs[:1]),
        st.scan(several, tree, {"p": xs, "q": xs * 0.1}),
        st.scan(softmax, m, xs[:, :54].reshape(N, 6, 9)),
        st.scan(rnn, h, xs),
        st.scan(lambda c, x: (c + x[::-1], (c, x, u[0], 3.0)), c, xs),
        st.scan(lambda c, x: (st.clip(c + x, -1, 1), st.where(c > 0, c, x).astype("float32")), c, xs),
        st.scan(lambda c, x: (c * 2 + x + m.sum(axis=0)[0] + st.zeros(64), st.zeros_like(c)), c, xs),
        st.scan(lambda c, _: (c * st.broadcast_to(c[:1], (64,)), c.reshape(8, 8).T), c, None, length=N),
        st.map(lambda x: st.sin(x) * 2, xs),
        st.scan(lambda c, x: (st.roll(c, 3) * 0.5 + st.roll(x, -1), st.stack([c, x], axis=1)), c, xs),
        st.scan(lambda h, x: (st.concat([h[1:], x[:1]]) * 0.5, st.concat([x[:3], h, u[0]])), h, xs),
        st.scan(
            lambda c, x: (c - c.mean(axis=0) + x, (c.sum(axis=0, keepdims=True), c.std(axis=0))),
            m,
            xs[:, 10:].reshape(N, 6, 9),
        ),
        st.fori_loop(0, N, jacobi, c),
        st.fori_loop(0, N, boundaries, c),
        st.fori_loop(-3, N, lambda i, c: c * i + i / 7 + i**2, c),
        st.fori_loop(0, N, lambda i, v: (v[1], v[0], v[2] + i, v[3]), (c, c + 1, c, h))[2:],
        st.fori_loop(0, N, lambda i, v: (v[1], v[0] + v[1]), (st.asarray(0), st.asarray(1))),
        st.while_loop(lambda v: (v[1] * v[1]).sum() < 1e5, lambda v: (v[0] + 1, v[1] * 1.5 + v[0]), (h[0], c)),
        st.while_loop(lambda v: v[1], lambda v: (v[0] * 1.1, v[0].sum() < 100), (abs(c), st.asarray(True))),
        st.while_loop(lambda c: c.sum() > 1e9, lambda c: c * 2, c),
    ]


def test_c_runs_the_trips_of_all_kinds_of_bodies(ran: list[int]) -> None:
    args = numbers(64), numbers(N, 64), numbers(16)
    check(kinds, *args, rtol=1e-5)
    assert len(ran) == 23
    assert 0 in ran


def test_results_are_independent(ran: list[int]) -> None:
    f = st.jit(lambda c, x: st.scan(lambda v, x: ((v[0] + x, v[1]), (v[0] + x, v[1])), (c, c), x), executor="c")
    c, x = numbers(5), numbers(N, 5)
    before = np.array(c)
    made = leaves(f(c, x))
    values = [np.array(y) for y in made]
    for k, y in enumerate(made):
        y[...] = -1.0
        for other, value in zip(made[k + 1 :], values[k + 1 :], strict=True):
            np.testing.assert_array_equal(np.asarray(other), value)
    np.testing.assert_array_equal(np.asarray(c), before)
    np.testing.assert_array_equal(np.asarray(leaves(f(c, x))[0]), values[0])
    assert ran == [N, N]


def test_swapped_leaves_are_arrays_or_scalars_as_in_eager_mode() -> None:
    for trips in (1, 2, 3):
        check(
            lambda a, b, trips=trips: st.fori_loop(0, trips, lambda _, v: (v[1], v[2] + v[1], v[0]), (a, b, a)),
            st.asarray(1.0),
            numbers(3).sum(),
        )


# -- what Python runs ------------------------------------------------------------------------------


def test_python_runs_the_trips_where_c_cannot(ran: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    f = st.jit(lambda c, x: st.scan(halves, c, x), executor="c")
    c, x = numbers(8), numbers(N, 8)
    wanted = np.asarray(f(c, x)[1])
    assert ran == [N]
    with np.errstate(over="raise"):  # NumPy's functions run.
        np.testing.assert_allclose(np.asarray(f(c, x)[1]), wanted)
    assert f(c, x[:0])[1].shape == (0, 8)
    with mock.patch.object(c_loops, "in_job", return_value=True):
        assert np.asarray(f(c, x)[1]).tobytes() == wanted.tobytes()
    monkeypatch.setattr(c_trips, "LONG", 0.0)
    assert np.asarray(f(c, x)[1]).tobytes() == wanted.tobytes()
    assert ran == [N]


@pytest.mark.parametrize(
    "body",
    [
        lambda c, x: (c + x, st.sort(c)),
        lambda c, x: (st.fori_loop(0, 2, lambda i, c: c + i, c) + x, c),
        lambda c, x: (c * 1j.imag + x, c * 1j),
        lambda c, x: ((c + x).astype("float16").astype("float64"), None),
    ],
)
def test_python_runs_bodies_that_are_no_kernels(body: Body, ran: list[int]) -> None:
    check(lambda c, x: st.scan(body, c, x), numbers(4, 4), numbers(N, 4, 4))
    assert N not in ran


def test_trips_of_a_condition_are_recorded(ran: list[int]) -> None:
    f = st.jit(lambda c: st.while_loop(lambda c: c.sum() < 1e3, lambda c: c * 2, c), executor="c")
    mesh = st.make_mesh((4,), ("d",))
    c = st.device_put(np.ones(8), st.NamedSharding(mesh, st.P("d")))
    wanted = np.asarray(f(c))
    assert ran == [7]
    with st.transfers() as log:
        assert np.asarray(f(c)).tobytes() == wanted.tobytes()
    assert ran == [7]
    assert len([record for record in log if record.operator == "sum"]) >= 8


def test_the_default_executor_counts_the_trips() -> None:
    def waits(trips: int) -> bool:
        f = st.jit(lambda c: st.fori_loop(0, trips, lambda i, c: c * 0.5 + i, c))
        return f.lower(numbers(8))._executable._waits

    assert waits(10_000)
    assert not waits(10)
    assert (
        st.jit(lambda c: st.while_loop(lambda c: c.sum() < 9, lambda c: c * 2, c)).lower(numbers(8))._executable._waits
    )


@pytest.mark.parametrize("executor", ["numpy", "c"])
def test_values_outside_of_a_loop_are_not_written(executor: str) -> None:
    def f(w: Any, c: Any) -> Any:
        outside = w * 2

        def body(_: int, c: Any) -> Any:
            d = outside.copy()
            d[1:3] = c[1:3] * 2
            return c + d

        return st.fori_loop(0, N, body, c), outside

    wanted = f(numbers(6), numbers(6))
    for _ in range(2):
        for x, y in zip(by_python(st.jit(f, executor=executor), numbers(6), numbers(6)), wanted, strict=True):
            np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


def test_leaves_of_the_carry_are_independent() -> None:
    outside = numbers(4)
    before = np.array(outside)

    def body(_: int, carry: Any) -> Any:
        a, b, c = carry
        a[0] = 9.0
        c[1] = 8.0
        return b, b[::-1], outside

    def f(a: Any, b: Any) -> Any:
        return st.fori_loop(0, 3, body, (a, b, a))

    check(f, numbers(4), numbers(4) + 1)
    np.testing.assert_array_equal(np.asarray(outside), before)


@pytest.mark.parametrize("executor", ["numpy", "c"])
def test_loops_without_trips_have_the_types_of_an_inference(executor: str) -> None:
    f = st.jit(lambda c, x: st.scan(lambda c, x: (c * 0.5 + x, (st.tanh(c), 3)), c, x), executor=executor)
    carry, (y, z) = f(numbers(8), numbers(N, 8)[:0])
    np.testing.assert_array_equal(np.asarray(carry), np.asarray(numbers(8)))
    assert (y.shape, z.shape, z.dtype) == ((0, 8), (0,), np.int64)


# -- long loops ------------------------------------------------------------------------------------


def test_an_interrupt_ends_a_long_loop_and_leaves_the_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # Long chunks.

    def f(c: Any) -> Any:
        def body(c: Any) -> Any:
            c[0] = c[1]
            return c * 0.5

        return st.while_loop(lambda c: c.sum() < 1e9, body, c)

    traced, c = st.jit(f, executor="c"), numbers(8)
    before = np.array(c)
    traced.lower(c).compile()
    timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        traced(c)
    np.testing.assert_array_equal(np.asarray(c), before)


def test_memory_does_not_grow_with_the_trips(ran: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(c_trips, "_NUMBERS", 1 << 10)
    monkeypatch.setattr(c_trips, "CHUNK", 5e-3)
    f = st.jit(lambda c, n: st.fori_loop(0, n, lambda i, c: c * 0.5 + i, c), executor="c")
    c = numbers(8)
    f(c, 10)
    tracemalloc.start()
    try:
        f(c, 100_000)
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()
    assert ran == [10, 100_000]


def test_the_memory_of_a_loop_is_free_after_it() -> None:
    f = st.jit(lambda c: st.fori_loop(0, N, lambda i, c: c * 0.5 + i, c), executor="c")
    c = numbers(8)
    made = f(c)
    buffer = weakref.ref(made._storage.buffers[0])
    run = None

    def keep(self: c_trips.Run, init: Any, plain: Any = c_trips.Run.results) -> Any:
        nonlocal run
        run = weakref.ref(self)
        return plain(self, init)

    gc.disable()
    try:
        with mock.patch.object(c_trips.Run, "results", keep):
            f(c)
        assert run is not None
        assert run() is None
        del made
        assert buffer() is None
    finally:
        gc.enable()


# -- products --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_products_of_all_shapes_and_strides(dtype: str) -> None:
    loops = compile_kernels([LOOPS])[LOOPS]
    rng = np.random.default_rng(0)
    for m, k, n in [(1, 1, 1), (3, 5, 2), (2, 64, 64), (5, 33, 71), (4, 0, 3), (0, 2, 3), (3, 17, 0)]:
        x, y = rng.normal(size=(m, 2 * k)).astype(dtype), rng.normal(size=(k, 2 * n)).astype(dtype)
        lefts = [x[:, :k], x[:, ::2], np.asfortranarray(x[:, :k]), x[:, k - 1 :: -1][:, :k] if k else x[:, :k]]
        rights = [y[:, :n], y[:, ::2], np.asfortranarray(y[:, :n]), y[::-1, :n]]
        for a in [*lefts, *[left[0] for left in lefts if m]]:
            for b in [*rights, *[right[:, 0] for right in rights if n]]:
                wanted = np.asarray(a @ b)
                out = np.full(wanted.shape, np.nan, dtype)
                loops.product(a, b, out)()
                np.testing.assert_allclose(out, wanted, rtol=1e-4 if dtype == "f4" else 1e-12, atol=1e-5)


# -- drawn bodies ----------------------------------------------------------------------------------

OPERATORS: list[Callable[..., Any]] = [
    lambda a, b, i: a + b,
    lambda a, b, i: a * 0.5 - b,
    lambda a, b, i: st.tanh(a) + i,
    lambda a, b, i: a[::-1],
    lambda a, b, i: a - b.mean(),
    lambda a, b, i: st.maximum(a, b) * i,
    lambda a, b, i: st.where(a > b, a, 0.25),
    lambda a, b, i: (a.reshape(2, 3) - b.reshape(2, 3).max(axis=1, keepdims=True)).reshape(6),
    lambda a, b, i: b.copy(),
    lambda a, b, i: st.concat([a, b])[2:8],
    lambda a, b, i: st.roll(a, 2),
    lambda a, b, i: st.stack([a, b])[1],
    lambda a, b, i: st.cond((a > b).any(), lambda a, b: a * 2, lambda a, b: b.copy(), a, b),
    lambda a, b, i: st.fori_loop(0, 3, lambda k, a: a * 0.5 + k + b, a),
    lambda a, b, i: st.sort(a),
    lambda a, b, i: a - b.reshape(3, 2).max(axis=0)[0] + a.reshape(2, 3).sum(axis=0, keepdims=True)[0, 1],
    lambda a, b, i: a.reshape(2, 3).T.reshape(6) @ np.eye(6),
]


@pytest.mark.full
@hypothesis.settings(max_examples=drawn(60))
@hypothesis.given(data=some.data())
def test_drawn_bodies(data: some.DataObject) -> None:
    count = data.draw(some.integers(1, 3))
    steps = data.draw(some.lists(some.tuples(*[some.integers(0, 500)] * 3), min_size=1, max_size=6))
    writes = data.draw(some.booleans())
    outs = data.draw(some.lists(some.integers(0, 50), min_size=count + 1, max_size=count + 1))
    trips, reverse = data.draw(some.integers(1, 6)), data.draw(some.booleans())

    def body(carry: Any, x: Any) -> Any:
        values = [*carry["c"], x]
        if writes:
            carry["c"][0][1:3] = carry["c"][-1][:2] * 0.5 + x[2:4]
        for op, a, b in steps:
            values.append(OPERATORS[op % len(OPERATORS)](values[a % len(values)], values[b % len(values)], carry["i"]))
        *after, y = [values[k % len(values)] for k in outs]
        return {"c": after, "i": carry["i"] + 1}, y

    everywhere = st.NamedSharding(st.make_mesh((2,), ("d",)), st.P())
    init = {"c": [st.device_put(numbers(6) + k, everywhere) for k in range(count)], "i": st.asarray(0.0)}

    def f(xs: Any) -> Any:
        carry = {"c": [c + 0 for c in init["c"]], "i": init["i"]}
        return st.scan(body, carry, xs, reverse=reverse)

    check(f, st.device_put(numbers(trips, 6), everywhere), rtol=1e-9)
