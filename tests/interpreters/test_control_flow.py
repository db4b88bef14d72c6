"""Loops and branches: eager, under jit, in maps, and as those of JAX."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

import shardtensor as st
from tests.draws import drawn
from tests.interpreters.loops import Jaxs, Ours, draw_program
from tests.layouts import everywhere, mesh_of


def arrays(tree: Any) -> list[np.ndarray[Any, Any]]:
    return [np.asarray(x) for x in st.tree.leaves(tree)]


def ours(backend: str, seed: int) -> Ours:
    return Ours(mesh_of((2, 2), backend), [st.P("x"), st.P(), st.P(("x", "y"))][seed % 3])


def placed(ns: Any, given: tuple[Any, Any]) -> tuple[Any, Any]:
    return ns.put(given[0]), ns.put(given[1], rows=True)


# -- programs that are drawn -----------------------------------------------------------------------


@everywhere
@settings(max_examples=drawn(100, fast=8))
@given(seed=some.integers(0, 10**6))
def test_programs_have_the_results_of_eager_mode_under_jit(backend: str, seed: int) -> None:
    program, given = draw_program(seed)
    ns = ours(backend, seed)
    c, xs = placed(ns, given)
    wanted = program(ns, c, xs)
    traced = st.jit(functools.partial(program, ns), executor="numpy")
    for _ in range(2):
        found = traced(c, xs)
        for a, b in zip(st.tree.leaves(found), st.tree.leaves(wanted), strict=True):
            assert (a.shape, a.dtype, a.sharding) == (b.shape, b.dtype, b.sharding)
            np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=3e-5 if a.dtype == "f4" else 1e-11, atol=1e-6)
    np.testing.assert_array_equal(np.asarray(c), given[0])
    np.testing.assert_array_equal(np.asarray(xs), given[1])


@settings(max_examples=drawn(300, fast=12), deadline=None)
@given(seed=some.integers(0, 10**6))
def test_programs_have_the_results_of_jax(seed: int) -> None:
    pytest.importorskip("jax")
    program, given = draw_program(seed)
    ns, jaxs = ours("numpy", seed), Jaxs()
    found, wanted = program(ns, *placed(ns, given)), program(jaxs, *placed(jaxs, given))
    for a, b in zip(arrays(found), arrays(wanted), strict=True):
        assert a.shape == b.shape
        np.testing.assert_allclose(a, b, rtol=1e-4 if given[0].dtype == "f4" else 1e-11, atol=1e-5)


# -- what is written and what is returned ----------------------------------------------------------


def write(c: Any, x: Any) -> Any:
    c[1:] += x[:-1]
    x *= 2
    return c, x.sum()


@everywhere
@pytest.mark.parametrize("how", ["eager", "numpy", "c"])
def test_functions_write_to_their_arguments_only(backend: str, how: str) -> None:
    if how == "c" and backend == "cupy":
        pytest.skip("kernels of GPUs are compiled")
    mesh = mesh_of((2,), backend)
    c, xs = st.device_put(np.zeros(4), mesh), st.device_put(np.arange(12.0).reshape(3, 4), mesh)
    f = functools.partial(st.scan, write)
    for _ in range(2):
        last, ys = (f if how == "eager" else st.jit(f, executor=how))(c, xs)
        assert (last.tolist(), ys.tolist()) == ([0, 12, 15, 18], [12, 44, 76])
        assert c.tolist() == [0, 0, 0, 0]
        assert xs.tolist() == np.arange(12.0).reshape(3, 4).tolist()


@pytest.mark.parametrize("how", ["eager", "jit"])
def test_results_are_independent_of_arguments(how: str) -> None:
    c = st.zeros(4)
    f = lambda c: st.scan(lambda c, x: (c, c), c, length=3)  # noqa: E731
    last, ys = (f if how == "eager" else st.jit(f))(c)
    last += 1
    ys += 2
    assert c.tolist() == [0] * 4
    assert (last.tolist(), ys.tolist()) == ([1] * 4, [[2] * 4] * 3)


def added(x: Any) -> Any:
    x += 1
    return x


def swapped(i: Any, carry: Any) -> Any:
    a, b = carry
    a += 1
    return b, b


def below(x: Any) -> Any:
    x += 1
    return x.sum() < 30


def closed_over(x: Any) -> Any:
    k = st.ones_like(x)
    return st.fori_loop(0, 3, lambda i, c: (added(c), k)[1], x), k


def result_written(x: Any) -> Any:
    k = st.ones_like(x)
    results = st.fori_loop(0, 1, lambda i, c: (c[0], c[0], k, k[1:]), (x, x, x, x[1:]))
    branch = st.cond(x.sum() > 0, lambda x: (x, k), lambda x: (x, k), x)
    for y in (results[0], *results[2:], *branch):
        y += 1
    return results, branch, k


def summed_in_place(a: Any, b: Any) -> Any:
    a += b
    return a


ALIASES = {
    "branches write": (lambda x: (st.cond(True, added, added, x), st.switch(1, [added] * 3, x[1:3])), ([1] * 4, [1] * 2)),
    "a carry is returned twice": (lambda x: st.fori_loop(0, 3, swapped, (x, x)), ([0] * 4, [0] * 4)),
    "conditions write": (lambda x: st.while_loop(below, added, x), [7] * 4),
    "captured tensors are returned": (closed_over, ([1] * 4, [1] * 4)),
    "results are written": (result_written, (([1] * 4, [0] * 4, [2] * 4, [2] * 3), ([1] * 4, [2] * 4), [1] * 4)),
    "associative functions write": (lambda x: st.associative_scan(summed_in_place, x + 1), [1, 2, 3, 4]),
    "no associative calls": (lambda x: added(st.associative_scan(st.add, x[:1])), [1]),
}  # fmt: skip


@everywhere
@pytest.mark.parametrize("name", list(ALIASES))
def test_functions_own_their_arguments_and_results_are_independent(backend: str, name: str) -> None:
    f, wanted = ALIASES[name]
    for run in (f, st.jit(f, executor="numpy")):
        x = st.device_put(np.zeros(4), mesh_of((2,), backend))
        assert st.tree.map(lambda y: y.tolist(), run(x)) == wanted
        assert x.tolist() == [0] * 4


def test_writes_to_other_tensors_are_an_error_in_programs() -> None:
    total = st.zeros(3)

    def body(i: Any, x: Any) -> Any:
        total[...] = total + x
        return x

    with pytest.raises(st.ArgumentError, match=r"writes into a tensor outside of the function of a loop.*test_control"):
        st.jit(lambda x: st.fori_loop(0, 2, body, x))(st.ones(3))
    st.fori_loop(0, 2, body, st.ones(3))
    assert total.tolist() == [2, 2, 2]


def test_programs_do_not_grow_with_trips() -> None:
    texts = []
    for n in (70, 70000):
        f = st.jit(lambda x, n=n: st.fori_loop(0, n, lambda i, x: x * 0.5 + i, x))
        texts.append(f.lower(st.ones(3)).as_text().replace(f"(0, {n})", "(0, n)"))
    assert texts[0] == texts[1]


@everywhere
def test_bounds_conditions_and_indices_may_be_traced(backend: str) -> None:
    mesh = mesh_of((2,), backend)
    x = st.device_put(np.ones(4), mesh)

    @st.jit
    def f(x: Any, n: Any, k: Any) -> Any:
        a = st.fori_loop(0, n, lambda i, x: x + i, x)
        b = st.while_loop(lambda x: x.sum() < n * 10, lambda x: x * 2, x)
        return a, b, st.switch(k, [st.sum, st.max, st.min], x), st.cond(k > 1, lambda x: x, lambda x: -x, x)

    for n, k in ((4, 0), (7, 5), (0, -3)):
        for bounds in ((n, k), (st.asarray(n), st.asarray(k))):
            a, b, c, d = [np.asarray(v).tolist() for v in f(x, *bounds)]
            assert a == [1 + sum(range(n))] * 4
            assert b[0] * 4 >= n * 10
            assert c == (4 if k <= 0 else 1)
            assert d == [1 if k > 1 else -1] * 4


@pytest.mark.parametrize("how", ["eager", "jit"])
def test_numbers_take_the_dtype_and_arrays_the_layout_of_results(how: str) -> None:
    mesh = mesh_of((4,), "numpy")
    x = st.device_put(np.ones((3, 4), "f4"), st.NamedSharding(mesh, st.P(None, "x")))

    def f(x: Any) -> Any:
        total, _ = st.scan(lambda c, row: (c + row.sum(), None), 0, x)
        rows, _ = st.scan(lambda c, row: (c + row, None), st.zeros(4, dtype="f4"), x)
        return total, rows

    total, rows = (f if how == "eager" else st.jit(f))(x)
    assert (total.dtype, float(total)) == (np.float32, 12)
    assert rows.sharding.spec == st.P("x")


@pytest.mark.parametrize("how", ["eager", "jit"])
def test_no_trips(how: str) -> None:
    def f(x: Any, xs: Any) -> Any:
        return (
            st.scan(lambda c, x: (c + x, x[:1]), x, xs),
            st.fori_loop(3, 1, lambda i, x: x + i, x),
            st.fori_loop(0, 0, lambda i, x: x + 0.5, 1),
            st.while_loop(lambda x: x.sum() < 0, lambda x: x + 1, x),
            st.while_loop(lambda x: x < 0, lambda x: x + 0.5, 1),
        )

    x, xs = st.ones(3), st.zeros((0, 3))
    (last, ys), a, b, c, d = (f if how == "eager" else st.jit(f))(x, xs)
    assert (last.tolist(), ys.shape, ys.dtype) == ([1] * 3, (0, 1), np.float64)
    assert (a.tolist(), float(b), b.dtype, c.tolist()) == ([1] * 3, 1.0, np.float64, [1] * 3)
    assert (float(d), d.dtype) == (1, np.float64)
    last += 1
    assert x.tolist() == [1] * 3


# -- the leaves of a carry -------------------------------------------------------------------------


@dataclasses.dataclass
class State:
    w: Any
    step: Any


st.register_pytree_node(State, lambda s: ((s.w, s.step), None), lambda _, children: State(*children))


@everywhere
def test_initial_carries_are_placed_as_the_function_returns_them(backend: str) -> None:
    """A program runs each trip in the layout of the later ones, for which its function was traced."""
    mesh = mesh_of((4,), backend)
    x = st.device_put(np.arange(24.0, dtype="f4").reshape(3, 8), st.NamedSharding(mesh, st.P(None, "x")))
    whole = st.device_put(np.arange(8.0, dtype="f4"), st.NamedSharding(mesh, st.P()))

    def f(x: Any, whole: Any, zeros: Any) -> Any:
        return (
            st.scan(lambda c, row: (c + row, c @ whole), zeros, x),
            st.scan(lambda c, row: (c + row.sum() * 0.3, {"c": c, "zeros": zeros + c}), 0, x),
            st.scan(lambda c, row: (c + row, c), st.zeros(8, dtype="f4"), x, reverse=True),
            st.fori_loop(0, 3, lambda i, c: c * 0.5 + whole, np.ones(8, "f4")),
            st.while_loop(lambda c: c.sum() < 50, lambda c: c + x[1], np.zeros(8, "f4")),
            st.scan(lambda c, row: (c + row, None), st.device_put(np.ones(8, "f4"), x.sharding.mesh), x)[0],
        )

    zeros = np.zeros(8, "f4")
    wanted = st.tree.leaves(f(x, whole, zeros))
    for run in (st.jit(f, executor="numpy"), st.jit(f)):
        for a, b in zip(st.tree.leaves(run(x, whole, zeros)), wanted, strict=True):
            if b is not None:
                assert (a.shape, a.dtype, a.sharding) == (b.shape, b.dtype, b.sharding)
                np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-6)
    placed = st.scan
    with st.transfers() as eager:
        placed(lambda c, row: (c + row, None), zeros, x)
    with st.transfers() as traced:
        st.jit(lambda zeros, x: placed(lambda c, row: (c + row, None), zeros, x))(zeros, x)
    assert traced.bytes <= eager.bytes


@pytest.mark.parametrize("how", ["eager", "jit"])
def test_keys_none_and_objects_are_leaves(how: str) -> None:
    mesh = mesh_of((2,), "checked")
    x = st.device_put(np.ones(4), mesh)

    def f(key: Any, x: Any) -> Any:
        def step(carry: Any, _: Any) -> Any:
            key, state = st.random.split(carry["key"])[0], carry["state"]
            state = State(state.w + st.random.normal(key, (4,)), state.step + 1)
            return {"key": key, "state": state, "none": None, "empty": ()}, (None, state)

        last, (none, states) = st.scan(step, {"key": key, "state": State(x, 0), "none": None, "empty": ()}, length=3)
        assert (none, last["none"], last["empty"]) == (None, None, ())
        found = st.while_loop(lambda s: s[1] < 2, lambda s: (st.random.fold_in(s[0], 5), s[1] + 1), (last["key"], 0))
        chosen = st.cond(x.sum() > 0, lambda: (st.random.key(1), None), lambda: (st.random.key(2), None))[0]
        same = st.fori_loop(0, 0, lambda i, k: st.random.key(3), key)
        return last["state"], states, [st.random.uniform(k, (4,)) for k in (found[0], chosen, same)], last["key"]

    state, states, draws, key = (f if how == "eager" else st.jit(f))(st.random.key(7), x)
    k, w = st.random.key(7), np.ones(4)
    for _ in range(3):
        k = st.random.split(k)[0]
        w = w + np.asarray(st.random.normal(k, (4,)))
    np.testing.assert_allclose(np.asarray(state.w), w, rtol=1e-14)
    assert (int(state.step), states.w.shape, states.step.tolist(), key) == (3, (3, 4), [1, 2, 3], k)
    keys = st.random.fold_in(st.random.fold_in(k, 5), 5), st.random.key(1), st.random.key(7)
    for draw, drawn_from in zip(draws, keys, strict=True):
        assert draw.tolist() == st.random.uniform(drawn_from, (4,)).tolist()


@pytest.mark.parametrize("how", [st.eval_shape, lambda f, *args: st.explain(f, *args)])
def test_inference_writes_to_no_host_array(how: Any) -> None:
    def body(i: Any, x: Any) -> Any:
        x[0] = 7
        return x + st.device_put(np.ones(4), mesh_of((2,), "checked"))

    x = np.zeros(4)
    how(lambda x: (st.fori_loop(0, 2, body, x), st.cond(True, body, body, 0, x)), x)
    assert x.tolist() == [0] * 4


@pytest.mark.parametrize("how", ["eager", "jit"])
def test_carries_may_be_indices(how: str) -> None:
    x = st.device_put(np.arange(12.0).reshape(4, 3) % 5, mesh_of((2,), "checked"))

    def f(x: Any) -> Any:
        def step(i: Any, c: Any) -> Any:
            c = st.take(x, c, axis=0).argmax(1)
            c[st.reshape(i, 1)] = 2
            c[st.reshape(c[2], 1)] += 1
            return c + st.take(x, i, axis=0).astype(int)[0] * st.take(x[:, 0] * 0, c[1]).astype(int)

        return st.fori_loop(0, 3, step, st.asarray([0, 1, 3]))

    wanted, rows = np.asarray([0, 1, 3]), np.asarray(x)
    for i in range(3):
        wanted = rows[wanted].argmax(1)
        wanted[i] = 2
        wanted[wanted[2]] += 1
    assert (f if how == "eager" else st.jit(f))(x).tolist() == wanted.tolist()


# -- maps ------------------------------------------------------------------------------------------


@everywhere
@pytest.mark.parametrize("how", ["eager", "jit"])
def test_loops_in_maps(backend: str, how: str) -> None:
    mesh = mesh_of((2,), backend)
    x = st.device_put(np.arange(8.0).reshape(2, 4), st.NamedSharding(mesh, st.P("x")))

    def body(block: Any) -> Any:
        last, ys = st.scan(lambda c, row: (c + st.psum(row.sum(), "x"), row * 2), 0.0, block)
        last = st.fori_loop(0, 2, lambda i, c: c + i, last)
        last = st.while_loop(lambda c: c < 100, lambda c: c * 2, last)
        return ys + st.cond(last > 0, lambda c: c, lambda c: -c, last)

    f = st.shard_map(body, mesh=mesh, in_specs=st.P("x"), out_specs=st.P("x"))
    found = (f if how == "eager" else st.jit(f))(x)
    assert np.asarray(found).tolist() == (np.arange(8.0).reshape(2, 4) * 2 + 116).tolist()


def test_maps_in_loops() -> None:
    mesh = mesh_of((4,), "checked")
    x = st.device_put(np.arange(8.0), st.NamedSharding(mesh, st.P("x")))
    total = st.shard_map(lambda b: b / st.psum(b.sum(), "x"), mesh=mesh, in_specs=st.P("x"), out_specs=st.P("x"))
    f = lambda x: st.fori_loop(0, 3, lambda i, x: total(x) + i, x)  # noqa: E731
    np.testing.assert_allclose(np.asarray(st.jit(f)(x)), np.asarray(f(x)), rtol=1e-14)


# -- transfers -------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["eager", "jit"])
def test_transfers_are_counted_for_each_trip(how: str) -> None:
    mesh = mesh_of((4,), "checked")
    x = st.device_put(np.ones(8), st.NamedSharding(mesh, st.P("x")))

    def once(x: Any) -> Any:
        return x / x.sum()

    with st.transfers() as one:
        once(x)
    for f in (
        lambda x: st.fori_loop(0, 5, lambda i, x: once(x), x),
        lambda x: st.scan(lambda x, _: (once(x), None), x, length=5)[0],
        lambda x: st.while_loop(lambda s: s[0] < 5, lambda s: (s[0] + 1, once(s[1])), (0, x))[1],
        lambda x: st.while_loop(lambda s: s[0] < 5, lambda s: (s[0] + 1, st.cond(True, once, st.sin, s[1])), (0, x))[1],
    ):
        run = f if how == "eager" else st.jit(f)
        for _ in range(2):
            with st.transfers() as log:
                run(x)
            sums = [r for r in log if r.operator == "sum"]
            assert (len(sums), sum(r.bytes for r in sums)) == (5 * len(list(one)), 5 * one.bytes)
    f = st.jit(lambda x: st.fori_loop(0, 5, lambda i, x: once(x), x))
    assert f.lower(x).cost().bytes == 5 * one.bytes
    simulated = st.empty_like(x, device=st.NamedSharding(st.AbstractMesh((4,), ("x",)), st.P("x")))
    assert st.simulate(f, simulated).bytes == 5 * one.bytes
    loops = lambda x: st.while_loop(lambda x: x.sum() < 9, once, st.fori_loop(0, 3, lambda i, x: once(x), x))  # noqa: E731
    for run in (loops, st.jit(loops)):
        report = st.simulate(run, simulated, latency=1.0, bandwidth=1e9)
        more = st.simulate(run, simulated, trips=7, latency=1.0, bandwidth=1e9)
        assert (report.bytes, more.bytes) == (5 * one.bytes, 17 * one.bytes)  # The condition has a sum, too.
        assert more.seconds > 3 * report.seconds
    with pytest.raises(st.ArgumentError, match="simulate: trips is -1"):
        st.simulate(loops, simulated, trips=-1)


@pytest.mark.parametrize("backend", ["numpy", "checked"])
def test_transfers_of_slices_are_those_of_eager_mode(backend: str) -> None:
    mesh = mesh_of((4,), backend)
    rows = st.device_put(np.arange(20.0).reshape(5, 4), st.NamedSharding(mesh, st.P("x")))
    line = st.device_put(np.arange(5.0), st.NamedSharding(mesh, st.P("x")))

    def f(rows: Any, line: Any) -> Any:
        return st.map(lambda x: x * 2, rows), st.scan(lambda c, x: (c + x, None), 0.0, line, reverse=True)[0]

    with st.transfers() as eager:
        f(rows, line)
    traced = st.jit(f)
    for _ in range(2):
        with st.transfers() as log:
            traced(rows, line)
        assert log.bytes == eager.bytes > 0
    assert st.explain(f, rows, line).bytes == traced.lower(rows, line).cost().bytes == eager.bytes
    with st.transfer_guard("disallow"), pytest.raises(st.TransferError, match="getitem: moves"):
        traced(rows, line)


@pytest.mark.parametrize("backend", ["numpy", "checked"])
def test_transfers_of_indices_are_those_of_eager_mode(backend: str) -> None:
    """They follow from elements, so that a program records them as it runs, also inside of loops."""
    mesh = mesh_of((4,), backend)
    rows = st.device_put(np.arange(12.0).reshape(4, 3) % 5, st.NamedSharding(mesh, st.P("x")))
    at = st.device_put(np.array([1, 2, 3, 0]), st.NamedSharding(mesh, st.P("x")))

    whole = st.device_put(np.arange(3), st.NamedSharding(mesh, st.P()))

    def put(i: Any, rows: Any) -> Any:
        rows[st.reshape(i, 1)] = st.take(rows, i + 1, axis=0)
        return rows

    def step(at: Any) -> Any:
        return rows[at].argmax(1) + 1

    for f in (
        lambda rows, at: rows[at + 0],
        lambda rows, at: put(at[1] * 1, rows + 0),
        lambda rows, at: st.scan(lambda rows, i: (put(i, rows), None), rows, whole)[0],
        lambda rows, at: st.fori_loop(0, 3, lambda i, at: st.cond(at[0] > 1, lambda at: at, step, at), at),
        lambda rows, at: st.fori_loop(0, 3, lambda i, at: st.while_loop(lambda at: at[0] < i, step, at), at),
    ):
        with st.transfers() as eager:
            wanted = f(rows, at)
        traced = st.jit(f, executor="numpy")
        for _ in range(2):
            with st.transfers() as log:
                found = traced(rows, at)
            assert found.tolist() == wanted.tolist()
            assert log.bytes == eager.bytes


def test_explain_lists_the_functions_of_loops_and_branches() -> None:
    x = st.device_put(np.ones(8), mesh_of((4,), "checked"))
    share = lambda x: x / x.sum()  # noqa: E731
    found = st.explain(lambda x: st.fori_loop(0, 3, lambda i, c: st.cond(True, share, st.sin, c), x), x)
    (loop,) = found.calls
    (branch,) = loop.inside
    assert (loop.operator, branch.operator) == ("fori_loop", "cond")
    assert [call.operator for call in branch.inside] == ["sin", "sum", "divide"]
    assert found.bytes == 3 * st.explain(share, x).bytes


def test_the_branch_that_transfers_most_is_priced() -> None:
    mesh = mesh_of((4,), "checked")
    x = st.device_put(np.ones(8), st.NamedSharding(mesh, st.P("x")))
    once = lambda x: x / x.sum()  # noqa: E731
    twice = lambda x: once(once(x))  # noqa: E731
    with st.transfers() as most:
        twice(x)
    for branches in ([once, twice, st.sin], [twice, st.sin, once]):
        f = st.jit(lambda k, x, branches=branches: st.switch(k, branches, x))
        assert f.lower(0, x).cost().bytes == st.explain(st.switch, 0, branches, x).bytes == most.bytes > 0
        for k, branch in enumerate(branches):
            with st.transfers() as log:
                f(k, x)
            assert log.bytes == {once: most.bytes // 2, twice: most.bytes, st.sin: 0}[branch]


# -- errors ----------------------------------------------------------------------------------------


@dataclasses.dataclass
class Pair:
    a: Any
    b: Any


WRONG = {
    "shape": (lambda x: st.scan(lambda c, _: (c[1:], None), x, length=2), st.ArgumentError, r"carry changes: it is float64\[4\].*float64\[3\]"),
    "dtype": (lambda x: st.scan(lambda c, _: ({"w": c["w"] > 0}, None), {"w": x}, length=2), st.ArgumentError, r"scan: carry\['w'\] changes: it is float64\[4\] .* and bool\[4\]"),
    "structure": (lambda x: st.while_loop(lambda c: c.sum() < 9, lambda c: (c, c), x), st.ArgumentError, "while_loop: the carry changes its structure"),
    "sharding": (lambda x: st.fori_loop(0, 2, lambda i, c: st.reshard(c, st.NamedSharding(c.sharding.mesh, st.P())), x), st.ArgumentError, r"fori_loop: carry changes: .* P\('x'\) before"),
    "no pair": (lambda x: st.scan(lambda c, _: c, x, length=2), st.ArgumentTypeError, "scan: f returned a ShardedTensor; wanted a pair"),
    "condition": (lambda x: st.while_loop(lambda c: c.sum(), lambda c: c, x), st.ArgumentTypeError, r"while_loop: cond_fun returned float64\[\].*; wanted a scalar of bool"),
    "conditions": (lambda x: st.while_loop(lambda c: c > 0, lambda c: c, x), st.ArgumentTypeError, r"while_loop: cond_fun returned bool\[4\]"),
    "predicate": (lambda x: st.cond(x > 0, st.sin, st.cos, x), st.ArgumentTypeError, r"cond: pred is bool\[4\].*; wanted a scalar"),
    "lengths": (lambda x: st.scan(lambda c, x: (c, x), 0, (x, x[1:])), st.ArgumentError, r"scan: the lengths differ: xs\[0\] is 4, xs\[1\] is 3"),
    "length": (lambda x: st.scan(lambda c, x: (c, x), 0, x, length=3), st.ArgumentError, "scan: the lengths differ: xs is 4, length is 3"),
    "no length": (lambda x: st.scan(lambda c, x: (c, x), x), st.ArgumentError, "scan: there is no array and no length"),
    "no function": (lambda x: st.scan(x, x, x), st.ArgumentTypeError, "scan: f is a ShardedTensor; wanted a function"),
    "no branch": (lambda x: st.switch(0, [], x), st.ArgumentError, "switch: branches is empty"),
    "bound": (lambda x: st.fori_loop(0, 2.5, lambda i, x: x, x), st.ArgumentTypeError, "fori_loop: upper is a float; wanted an integer"),
    "scalar xs": (lambda x: st.map(st.sin, 3.0), st.ArgumentTypeError, "map: xs is a float"),
    "key as xs": (lambda x: st.map(st.random.normal, [st.random.key(0)]), st.ArgumentTypeError, r"map: xs\[0\] is a key; make the keys in the function"),
    "key as a result": (lambda x: st.scan(lambda k, _: (k, k), st.random.key(0), length=2), st.ArgumentTypeError, "scan: the function returned a key, which cannot be stacked"),
    "no class": (lambda x: st.fori_loop(0, 2, lambda i, c: c, Pair(x, x)), st.ArgumentTypeError, "fori_loop: carry is a Pair; .* see st.register_pytree_node"),
    "a number to None": (lambda x: st.fori_loop(0, 2, lambda i, c: (c[0], None), (x, 1)), st.ArgumentError, r"carry\[1\] changes: it is an int before a trip, and a NoneType after"),
    "negative length": (lambda x: st.scan(lambda c, _: (c, c), x, length=-3), st.ArgumentError, "scan: length is -3; wanted 0 or more"),
    "no length of text": (lambda x: st.scan(lambda c, _: (c, c), x, length="3"), st.ArgumentTypeError, "scan: length is a str; wanted an integer"),
    "bound of an array": (lambda x: st.fori_loop(0, x, lambda i, c: c, x), st.ArgumentTypeError, r"fori_loop: upper is float64\[4\].*; wanted an integer"),
    "index of a float": (lambda x: st.switch(1.0, [st.sin, st.cos], x), st.ArgumentTypeError, "switch: index is a float; wanted an integer"),
    "predicate of text": (lambda x: st.cond("a", st.sin, st.cos, x), st.ArgumentTypeError, "cond: pred is a str; wanted a scalar"),
    "condition of an int": (lambda x: st.while_loop(lambda c: 1, lambda c: c, x), st.ArgumentTypeError, "while_loop: cond_fun returned an int"),
    "axis": (lambda x: st.associative_scan(st.add, x, axis=1), st.AxisError, "associative_scan: axis 1 is out of range"),
    "shape of fn": (lambda x: st.associative_scan(lambda a, b: a[:1], x), st.ShapeError, r"associative_scan: fn returned float64\[1\].* for elems, which is float64\[2\]"),
    "structure of fn": (lambda x: st.associative_scan(lambda a, b: (a, b), x), st.ArgumentError, r"associative_scan: fn returned elems\[0\], elems\[1\]; wanted elems"),
    "an operator": (lambda x: st.scan(lambda c, _: (c @ st.ones(7), None), x, length=2), st.ShapeError, "^matmul: "),
}  # fmt: skip


@pytest.mark.parametrize("name", list(WRONG))
@pytest.mark.parametrize("how", ["eager", "jit", "eval_shape"])
def test_errors_name_the_function_and_the_leaf(name: str, how: str) -> None:
    f, error, message = WRONG[name]
    x = st.device_put(np.ones(4), st.NamedSharding(mesh_of((2,), "numpy"), st.P("x")))
    run: Any = {"eager": f, "jit": st.jit(f), "eval_shape": functools.partial(st.eval_shape, f)}[how]
    with pytest.raises(error, match=message):
        run(x)


@everywhere
def test_results_of_branches_that_are_not_placed_take_the_layout_of_the_others(backend: str) -> None:
    x = st.device_put(np.arange(8.0), mesh_of((4,), backend))

    def f(x: Any, k: Any) -> Any:
        total = st.switch(k, [lambda x: (0.0, st.zeros(8)), lambda x: (x.sum(), x), lambda x: (1.0, np.ones(8))], x)
        return total, total[0] * x + total[1]

    run = st.jit(f, executor="numpy")
    for k in range(3):
        with st.transfers() as log:
            (total, array), result = run(x, k)
        wanted = f(x, k)
        assert (float(total), array.tolist(), result.tolist()) == (
            float(wanted[0][0]), wanted[0][1].tolist(), wanted[1].tolist()
        )  # fmt: skip
        assert total.sharding.mesh == array.sharding.mesh == x.sharding.mesh
    assert st.eval_shape(f, x, 0)[0][1].sharding == x.sharding


def test_branches_agree_in_programs() -> None:
    f = lambda x: st.cond(x.sum() > 0, lambda x: x, lambda x: x[1:], x)  # noqa: E731
    assert f(st.ones(3)).shape == (3,)
    with pytest.raises(
        st.ArgumentError, match=r"cond: result is float64\[2\].* of false_fun, and float64\[3\].*true_fun"
    ):
        st.jit(f)(st.ones(3))
