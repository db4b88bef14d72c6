"""Calls of segments that find their graph before any step, on CuPy's double."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import shardtensor as st
from shardtensor.interpreters.jit import cuda_executor
from shardtensor.interpreters.jit.cuda_executor import CudaKernel
from shardtensor.interpreters.jit.one_launch import OneLaunch
from shardtensor.tensor.pytree import leaves
from tests.backends.test_cupy import Machine
from tests.fakecupy import world
from tests.interpreters.jit.random_programs import Case
from tests.interpreters.jit.test_devices import near
from tests.interpreters.jit.test_graphs import (
    answers,
    any_gpus,
    chain,
    fails,
    gpu,
    launched,
    pytestmark,
    rows,
    same,
    warm,
)
from tests.interpreters.jit.test_groups import softmax

__all__ = ["any_gpus", "gpu", "pytestmark"]


@contextlib.contextmanager
def prepared() -> Iterator[list[CudaKernel]]:
    """The kernels whose launches are prepared, each time."""
    found: list[CudaKernel] = []
    run = CudaKernel.run

    def spy(self: CudaKernel, *args: Any, **options: Any) -> None:
        found.append(self)
        run(self, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CudaKernel, "run", spy)
        yield found


def is_one_launch(traced: Callable[..., Any], *args: Any) -> bool:
    """Whether calls whose addresses have come before prepare no launch, and return what they should. Results are
    dropped, so that addresses come again.
    """
    wanted = [np.asarray(y) for y in leaves(traced(*args))]
    warm(traced, *args, calls=8)
    with prepared() as kernels:
        for _ in range(3):
            for found, y in zip(leaves(traced(*args)), wanted, strict=True):
                same(found, y)
            del found
    return not kernels


# -- what is read and made -------------------------------------------------------------------------


def outputs(x: Any, a: Any) -> Any:
    """Results of the first, a middle and the last kernel, and views of results and of the argument."""
    first = x * a + 1
    middle = first[:, ::-1] * a - 1
    last = middle[:, ::-1] * a + x[:, ::-1]
    return first, middle[:, 1:], last, last.T, x[1:], first[::2]


def test_results_and_views_of_any_kernel(any_gpus: Machine) -> None:
    x = rows(any_gpus)
    assert is_one_launch(st.jit(outputs), x, 0.5)
    traced = st.jit(outputs)
    kept = []
    for k in range(24):
        a = [0.5, 0.25][k % 2]
        kept.append((a, traced(x, a)))
        kept = kept[-(k % 5 + 1) :]
        for b, found in kept:
            near(found, outputs(x, b))


def test_values_between_a_product_and_a_sum(gpu: Machine) -> None:
    def f(x: Any, w: Any) -> Any:
        h = chain(x @ w)
        y = chain(h[::-1]) @ w
        return (chain(y) - h).sum(axis=1), y

    x = rows(gpu)
    w = st.device_put(np.eye(6, dtype="f4"), st.NamedSharding(x.sharding.mesh, st.P()))
    traced = st.jit(f)
    assert is_one_launch(traced, x, w)
    near(traced(x, w), f(x, w))


def test_arguments_that_are_views(gpu: Machine) -> None:
    traced, x = st.jit(chain), rows(gpu)
    assert is_one_launch(traced, x[2:])
    assert is_one_launch(traced, x.T)
    assert is_one_launch(st.jit(lambda x: chain(x[::2])), x[1:])
    for view in (x[2:], x.T, x[:, ::2]):
        same(traced(view), chain(view))


def test_a_view_that_copies_is_read_first(gpu: Machine) -> None:
    def f(x: Any) -> Any:
        return chain(chain(x).T.reshape(-1)[::-1].reshape(6, 16))

    traced, x = st.jit(f), rows(gpu)
    for k in range(8):
        x = rows(gpu, seed=k // 4)
        same(traced(x), f(x))


def test_operands_of_devices_are_joined_first(gpu: Machine) -> None:
    """The arrays that a map returns are those of devices, and one array from the first kernel on."""
    traced, x = st.jit(chain), rows(gpu)
    warm(traced, x)
    for _ in range(6):
        y = st.stack(st.pmap(lambda a: a * 2, st.shard(x))).reshape(16, 6)
        z = st.shard_map(lambda a: a * 2, mesh=x.sharding.mesh, in_specs=st.P("x"), out_specs=st.P("x"))(x)
        for given in (y, z):
            for _ in range(4):
                same(traced(given), chain(given))


def test_parts_of_long_rows_are_in_the_block(gpu: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_executor, "SEGMENT", 16)
    monkeypatch.setattr(cuda_executor, "_BLOCK", 32)
    x = rows(gpu, (2, 100))
    f = lambda x: softmax(chain(softmax(x)))  # noqa: E731
    traced = st.jit(f)
    assert is_one_launch(traced, x)
    near(traced(x), f(x))
    pool = gpu.cupy.get_default_memory_pool()
    before, kept = pool.used_bytes(), [traced(x) for _ in range(6)]
    assert pool.used_bytes() - before <= 1024 * len(kept)


def test_empty_parts(gpu: Machine) -> None:
    x = rows(gpu, (0, 6))
    same(st.jit(chain)(x), chain(x))


def test_more_gpus_than_rows(any_gpus: Machine) -> None:
    x, traced = rows(any_gpus, (1, 6)), st.jit(chain)
    for _ in range(6):
        same(traced(x), chain(x))
    assert is_one_launch(traced, x)


# -- numbers ---------------------------------------------------------------------------------------


def with_numbers(x: Any, a: Any) -> Any:
    y = chain(x, a)
    b = a * 3 + 1
    y = y[:, ::-1] * b - 1
    c = 12 // b
    return y[:, ::-1] * c + a, y


def test_numbers_that_are_computed(gpu: Machine) -> None:
    x, traced = rows(gpu), st.jit(with_numbers)
    assert is_one_launch(traced, x, 2)
    for k in range(30):
        a = [2, 3.0, 1][k % 3]
        near(traced(x, a), with_numbers(x, a))


def test_an_error_of_a_number_names_the_line(gpu: Machine) -> None:
    def f(x: Any, a: Any) -> Any:
        y = chain(x)
        b = 1 // a  # This one fails.
        return y[:, ::-1] * b + 1

    x, traced = rows(gpu), st.jit(f)
    warm(traced, x, 1)
    with pytest.raises(ZeroDivisionError) as caught:
        traced(x, 0)
    line = f.__code__.co_firstlineno + 2
    assert any(f"test_one_launch.py:{line}" in note for note in caught.value.__notes__)
    same(traced(x, 1), f(x, 1))


# -- errors and other calls ------------------------------------------------------------------------


def test_an_error_of_a_graph_is_one_of_the_program(gpu: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    x, traced = rows(gpu), st.jit(chain)
    warm(traced, x)
    with monkeypatch.context() as patch:
        patch.setattr(world.World, "launch", fails)
        with pytest.raises(st.BackendError, match="cupy") as caught:
            traced(x)
    assert any("jit: in chain, at" in note for note in caught.value.__notes__)
    same(traced(x), chain(x))


def test_calls_whose_transfers_are_recorded(any_gpus: Machine) -> None:
    x, traced = rows(any_gpus), st.jit(chain)
    warm(traced, x)
    with st.transfers(), prepared() as kernels:
        same(traced(x), chain(x))
    assert len(kernels) == 4 * any_gpus.cupy.cuda.runtime.getDeviceCount()
    assert is_one_launch(traced, x)


def test_writes_into_windows_are_prepared(gpu: Machine) -> None:
    def f(x: Any) -> Any:
        y = chain(x)
        y[1:-1] = y[:-2] * 2 + 1
        return chain(y)

    traced, x = st.jit(f), rows(gpu)
    assert not is_one_launch(traced, x)
    same(traced(x), f(x))


def test_one_gpu_has_the_graph_and_the_other_one_not(any_gpus: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    x, traced = rows(any_gpus), st.jit(chain)
    warm(traced, x)
    start = OneLaunch._start

    def without(self: OneLaunch, k: int, call: Any) -> Any:
        if k == 0:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(type(self._graphs), "find", lambda self, key, capture=None: None)
                return start(self, k, call)
        return start(self, k, call)

    monkeypatch.setattr(OneLaunch, "_start", without)
    gpus = any_gpus.cupy.cuda.runtime.getDeviceCount()
    assert launched(traced, x) == ["a graph of 4"] * gpus
    same(traced(x), chain(x))


# -- random programs -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "count"), [(0, 12), *[pytest.param(k, 100, marks=pytest.mark.full) for k in range(1000, 2000, 100)]]
)
def test_random_programs_without_writes(first: int, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[bool] = []
    launch = OneLaunch.launch

    def spy(self: OneLaunch, *args: Any) -> Any:
        waiting = launch(self, *args)
        found.append(waiting is None)
        return waiting

    monkeypatch.setattr(OneLaunch, "launch", spy)
    for seed in range(first, first + count):
        draw = random.Random(seed)
        case = Case(draw, "cupy")
        case.is_narrow, case.dtypes = False, ["float64", "float32"]
        case.steps = [(draw.choice(KERNELS), *[draw.randrange(30) for _ in range(3)]) for _ in range(12)]
        function = lambda a, b, case=case: case.run(st, a, b)  # noqa: E731
        eager, _ = answers(case, function)
        jitted, _ = answers(case, st.jit(function, executor="c"))
        for a, b in zip(eager, jitted, strict=True):
            scale = np.abs(a[np.isfinite(a)]).max(initial=0)
            np.testing.assert_allclose(b, a, rtol=1e-5, atol=1e-5 * (0.1 + scale), err_msg=f"seed {seed}")
    assert found.count(True) > count


KERNELS = ("add", "scale", "slice", "rows", "transpose", "reverse", "sum", "where", "var", "extrema", "copy")
"""The steps of random programs that are kernels without writes, or views between them."""
