"""Kernels inside of maps: the arrays of one device, with the bits of eager mode on NumPy and of C in C."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import shardtensor as st
from shardtensor.interpreters.jit.c import c_executor
from shardtensor.interpreters.jit.c.compiler import find_compiler
from shardtensor.interpreters.jit.grouping import groups
from shardtensor.interpreters.jit.grouping.fused_in_maps import FusedInMap
from tests.interpreters.jit.eager import check_under_jit
from tests.layouts import array

EXECUTORS = ["numpy", pytest.param("c", marks=pytest.mark.skipif(not find_compiler(), reason="no compiler"))]


@pytest.fixture(autouse=True)
def short_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "LEAST", 1)


@pytest.fixture
def x() -> st.ShardedTensor:
    return st.asarray(array((6, 5, 7), "float64", 1), device=st.NamedSharding(st.make_mesh((3,), ("d",)), st.P("d")))


def kernels(f: Any, *args: Any, executor: str = "numpy") -> list[Any]:
    """Returns the kernels of a function, all of which are in maps."""
    made = st.jit(f, executor=executor).lower(*args)._executable.kernels
    assert all(isinstance(kernel, FusedInMap) for kernel in made)
    return made


def check_maps(f: Any, *args: Any, executor: str) -> None:
    """Checks that a program has kernels, all of them in maps, and what eager mode does."""
    assert kernels(f, *args, executor=executor)
    check_under_jit(f, *args, executor=executor)


@pytest.mark.parametrize("executor", EXECUTORS)
def test_elementwise_functions_around_a_collective(executor: str, x: st.ShardedTensor) -> None:
    def f(x: Any) -> Any:
        def one(a: Any) -> Any:
            y = st.tanh(a * 2.0) - a
            total = st.psum(y, "d")
            return st.exp(-total) * y + 1

        return st.shard_map(one, mesh=x.sharding.mesh, in_specs=st.P("d"), out_specs=st.P("d"))(x)

    check_maps(f, x, executor=executor)
    assert len(kernels(f, x)) == 6  # Two for each of three devices.
    assert st.jit(f).lower(x).as_text("c").count("int kernel_") == 2


@pytest.mark.parametrize("executor", EXECUTORS)
def test_sums_in_maps(executor: str, x: st.ShardedTensor) -> None:
    def one(a: Any) -> Any:
        e = st.exp(a - st.max(a, axis=-1, keepdims=True))
        return e / st.sum(e, axis=-1, keepdims=True) + st.std(a)

    check_maps(lambda x: st.pmap(one)(x), x[:3], executor=executor)


@pytest.mark.parametrize("executor", EXECUTORS)
def test_a_sum_of_all_elements_is_a_scalar(executor: str, x: st.ShardedTensor) -> None:
    def one(a: Any) -> Any:
        total = st.sum(st.tanh(a) * 0.5)
        return total + 1

    check_maps(lambda x: st.pmap(one)(x), x[:3], executor=executor)


@pytest.mark.parametrize("executor", EXECUTORS)
def test_a_tensor_that_the_function_closes_over(executor: str, x: st.ShardedTensor) -> None:
    w = st.asarray(array((5, 7), "float64", 2), device=st.devices()[1])

    def f(x: Any, w: Any) -> Any:
        return st.pmap(lambda a: st.tanh(st.exp(a * 0.5) - 1) @ st.exp(w * 0.5 + 1).T)(x)

    check_maps(f, x[:3], w, executor=executor)


@pytest.mark.parametrize("executor", EXECUTORS)
def test_maps_in_maps(executor: str) -> None:
    rows = st.devices()[:2]

    def inner(v: Any) -> Any:
        return st.tanh(v * 2) + st.pmax(v, ("outer", "inner"))

    def outer(a: Any) -> Any:
        return st.smap(inner, a * 0.5 - 1, axes=1, devices=rows, axis_name="inner")

    def f(x: Any) -> Any:
        return st.smap(outer, x, devices=rows, axis_name="outer")

    check_maps(f, st.asarray(array((4, 6), "float64", 1)), executor=executor)


def test_the_memory_of_large_products_is_reused() -> None:
    x = st.asarray(array((2, 300, 300), "float64", 1), device=st.NamedSharding(st.make_mesh((2,), ("d",)), st.P("d")))
    f = st.jit(lambda x: st.pmap(lambda a: st.tanh(a @ a))(x), executor="numpy")
    with st.set_num_threads(1):
        np.testing.assert_array_equal(np.asarray(f(x)), np.tanh(np.matmul(np.asarray(x), np.asarray(x))))
        before = st.cache_info()
        f(x)
    assert st.cache_info().misses == before.misses
    assert st.cache_info().hits >= before.hits + 2


@pytest.mark.skipif(not find_compiler(), reason="no compiler")
def test_all_calls_of_a_map_run_the_same_code(monkeypatch: pytest.MonkeyPatch, x: st.ShardedTensor) -> None:
    """Kernels that the compiler ends while a map runs are used from the next map on."""
    runs: list[bool] = []
    plain = FusedInMap._compiled_for

    def one(a: Any) -> Any:
        return st.tanh(st.psum(a, "d") * 0.7)

    f = st.jit(lambda x: st.shard_map(one, mesh=x.sharding.mesh, in_specs=st.P("d"), out_specs=st.P("d"))(x))
    lowered = f.lower(x)
    compiled = lowered.compile()
    executable = lowered._executable
    found = c_executor.compile_kernels([kernel.kernel for kernel in executable.kernels])
    executable._use({})

    def chosen(self: Any, values: Any) -> Any:
        made = plain(self, values)
        runs.append(made is not None)
        executable._use(found)
        return made

    monkeypatch.setattr(FusedInMap, "_compiled_for", chosen)
    compiled(x)
    assert runs == [False] * 3
    compiled(x)
    assert runs == [False] * 3 + [True] * 3
