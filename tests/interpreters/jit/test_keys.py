"""Keys of random numbers are traced: another key needs no other program, and draws the numbers of eager mode."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest

import shardtensor as st
from tests.layouts import everywhere, mesh_of


def step(key: Any, x: Any) -> Any:
    key, a, b = st.random.split(key, 3)
    return key, x + st.random.normal(a, x.shape) * st.random.bernoulli(b, 0.5, x.shape)


@everywhere
def test_a_new_key_needs_no_new_program(backend: str) -> None:
    traces = []

    def counted(key: Any, x: Any) -> Any:
        traces.append(1)
        return step(key, x)

    traced = st.jit(counted)
    x = st.zeros((10, 6), device=mesh_of((4,), backend))
    mine = its = st.random.key(3)
    for _ in range(3):
        (mine, found), (its, wanted) = traced(mine, x), step(its, x)
        assert type(mine) is st.random.Key
        assert mine == its
        np.testing.assert_array_equal(np.asarray(found), np.asarray(wanted))
    assert len(traces) == 1


def test_keys_in_containers_are_returned_unchanged() -> None:
    keys = {"a": st.random.key(1), "b": st.random.key(2)}
    found = st.jit(lambda keys: [keys["b"], keys, st.random.permutation(keys["a"], 5)])(keys)
    assert found[:2] == [keys["b"], keys]
    np.testing.assert_array_equal(found[2], st.random.permutation(keys["a"], 5))


@everywhere
def test_numbers_are_folded_into_keys(backend: str) -> None:
    key = st.random.key(5)
    mesh = mesh_of((4,), backend)
    both = st.jit(lambda key, n: st.random.uniform(st.random.fold_in(key, n), (7,), device=mesh))
    closed = st.jit(lambda n: st.random.uniform(st.random.fold_in(key, n + 1), (7,), device=mesh))
    for n in (0, 1, 9):
        np.testing.assert_array_equal(both(key, n), st.random.uniform(st.random.fold_in(key, n), (7,), device=mesh))
        np.testing.assert_array_equal(closed(n), st.random.uniform(st.random.fold_in(key, n + 1), (7,), device=mesh))
    with pytest.raises(st.ArgumentError, match="data is -1"):
        both(key, -1)


@everywhere
def test_keys_in_maps(backend: str) -> None:
    mesh = mesh_of((4,), backend)
    x = st.zeros((4, 3), device=st.NamedSharding(mesh, st.P("x")))

    def of_calls(key: Any, x: Any) -> Any:
        draw = lambda x: x + st.random.uniform(st.random.fold_in(key, st.axis_index("i")), x.shape)  # noqa: E731
        return st.pmap(draw, x, axis_name="i")

    def of_shards(key: Any, x: Any) -> Any:
        draw = lambda x: x + st.random.uniform(key, x.shape)  # noqa: E731
        return st.shard_map(draw, mesh=mesh, in_specs=(st.P("x"),), out_specs=st.P("x"))(x)

    for function in (of_calls, of_shards):
        traced = st.jit(function)
        for seed in (1, 2):
            key = st.random.key(seed)
            np.testing.assert_array_equal(np.asarray(traced(key, x)), np.asarray(function(key, x)))


def test_a_key_whose_bits_are_needed_escapes() -> None:
    functions: dict[str, Any] = {
        "Key.__eq__": lambda key: key == st.random.key(0),
        "Key.seed": lambda key: key.seed + 1,
        "Key.stream": lambda key: key.stream,
        "Key.__hash__": lambda key: {key: 1},
    }
    for name, function in functions.items():
        with pytest.raises(st.ConcretizationError, match=f"^{name}: needs .* depend on key"):
            st.jit(function)(st.random.key(1))
    static = st.jit(lambda key: st.zeros(2) + (key.seed % 7), static_argnums=0)
    assert static(st.random.key(9)).tolist() == [2, 2]


@pytest.mark.parametrize("calls", [pytest.param(300), pytest.param(10**5, marks=pytest.mark.full)])
def test_many_calls_do_not_grow(calls: int) -> None:
    w = st.zeros(8, device=mesh_of((4,), "numpy"))

    @st.jit
    def train(key: Any, x: Any, rate: float) -> Any:
        key, noise = st.random.split(key)
        w[1:-1] = w[1:-1] - rate * (x[2:] + st.random.uniform(noise, (6,)))
        return key, w.sum()

    def run(key: Any, count: int) -> Any:
        for n in range(count):
            key, _ = train(key, st.arange(8) + n, 1e-3 * n)
        return key

    key = run(st.random.key(0), 100)
    gc.collect()
    before, objects = len(train._cache.programs), len(gc.get_objects())
    run(key, calls)
    gc.collect()
    assert len(train._cache.programs) == before == 1
    assert len(gc.get_objects()) < objects + 100
