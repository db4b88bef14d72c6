"""Calls of segments: what they read and write, and that kernels are prepared only if there is no graph; on CuPy's double."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import shardtensor as st
from shardtensor.interpreters.jit.cuda import cuda_executor
from shardtensor.interpreters.jit.cuda.cuda_executor import CudaKernel
from shardtensor.interpreters.jit.cuda.graphs import Graphs
from shardtensor.interpreters.jit.cuda.segments import Memory
from shardtensor.interpreters.jit.grouping import fused_devices
from shardtensor.tensor.pytree import leaves
from tests.backends.test_cupy import Machine
from tests.draws import all_of_them
from tests.fakecupy import world
from tests.interpreters.jit.test_devices import near
from tests.interpreters.jit.test_graphs import (
    any_gpus,
    chain,
    fails,
    gpu,
    launched,
    pytestmark,
    rows,
    warm,
)
from tests.interpreters.jit.test_groups import softmax
from tests.layouts import assert_equal

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
        warm(traced, *args)
    for found, y in zip(leaves(traced(*args)), wanted, strict=True):
        assert_equal(found, y)
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
        assert_equal(traced(view), chain(view))


def test_views_of_host_arrays(gpu: Machine) -> None:
    def f(x: Any, a: Any) -> Any:
        y = chain(x)
        b = a[::-1]
        y = chain(y)
        return y + b, b

    x, traced, a = rows(gpu), st.jit(f), np.arange(6, dtype="f4")
    for _ in range(6):
        for found, wanted in zip(traced(x, a), (chain(chain(x)) + a[::-1], a[::-1]), strict=True):
            assert_equal(found, wanted)


def test_a_view_that_copies_is_read_first(gpu: Machine) -> None:
    def f(x: Any) -> Any:
        return chain(chain(x).T.reshape(-1)[::-1].reshape(6, 16))

    traced, x = st.jit(f), rows(gpu)
    for k in range(8):
        x = rows(gpu, seed=k // 4)
        assert_equal(traced(x), f(x))


def test_views_whose_elements_move(any_gpus: Machine) -> None:
    """With two GPUs, each has other rows of the view than of the base."""

    def f(x: Any) -> Any:
        y = chain(x)
        z = chain(x[2:]) + y[2:]  # What is read from before the kernels, and what they have computed.
        return chain(z)[1:], z[::2], y

    x = rows(any_gpus)
    for given in (lambda: x, lambda: x[2:]):
        traced, wanted = st.jit(lambda x: f(x)), [np.asarray(y) for y in f(given())]
        for _ in range(16):
            names = launched(traced, given())
        assert any(name.startswith("a graph of") for name in names)
        for _ in range(4):
            for found, y in zip(traced(given()), wanted, strict=True):
                assert_equal(found, y)


def test_kernels_of_different_memories(any_gpus: Machine) -> None:
    """A graph has the kernels of one GPU; one kernel is none."""

    def f(x: Any, y: Any) -> Any:
        for k in range(3):
            x = x[:, ::-1] * 2 + k
            y = y * 0.5 + 1 if k == 1 else y
        return x, y

    first, last = any_gpus.devices[0], any_gpus.devices[-1]
    x, y = st.device_put(rows(any_gpus), first), st.device_put(rows(any_gpus, seed=1), last)
    traced, gpus = st.jit(f), any_gpus.cupy.cuda.runtime.getDeviceCount()
    warm(traced, x, y, calls=8)
    names = launched(traced, x, y)
    assert sorted(names) == (["a graph of 4"] if gpus == 1 else ["a graph of 3", "shardtensor_kernel"])
    near(traced(x, y), f(x, y))


def test_results_that_are_alike_have_one_graph(gpu: Machine) -> None:
    """The memory of results that are dropped in another order is that of the same results."""
    traced, x = st.jit(lambda x: (chain(x), chain(x, 3), chain(x, 4))), rows(gpu)
    for k in range(12):
        found = list(traced(x))
        for _ in range(3):
            found.pop(k % len(found))
    (segment,) = traced.lower(x)._executable.segments
    assert len(segment.graphs._graphs) == 1


def test_memories_with_equal_addresses(any_gpus: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Addresses that only the memory distinguishes, as those of backends may be."""
    seen: dict[Any, list[int]] = {}

    def address_of(array: Any) -> Any:
        found = seen.setdefault(array.device.id, [])
        if array.data.ptr not in found:
            found.append(array.data.ptr)
        return found.index(array.data.ptr), array.strides

    monkeypatch.setattr(any_gpus.backend, "address_of", address_of, raising=False)
    traced, x = st.jit(chain), rows(any_gpus)
    assert is_one_launch(traced, x)


def test_operands_of_devices_are_joined_first(gpu: Machine) -> None:
    """The arrays that a map returns are those of devices, and one array from the first kernel on."""
    traced, x = st.jit(chain), rows(gpu)
    warm(traced, x)
    for _ in range(6):
        y = st.stack(st.pmap(lambda a: a * 2, st.shard(x))).reshape(16, 6)
        z = st.shard_map(lambda a: a * 2, mesh=x.sharding.mesh, in_specs=st.P("x"), out_specs=st.P("x"))(x)
        for given in (y, z):
            for _ in range(4):
                assert_equal(traced(given), chain(given))


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
    assert_equal(st.jit(chain)(x), chain(x))


def test_more_gpus_than_rows(any_gpus: Machine) -> None:
    x, traced = rows(any_gpus, (1, 6)), st.jit(chain)
    for _ in range(6):
        assert_equal(traced(x), chain(x))
    assert is_one_launch(traced, x)


# -- writes into windows ---------------------------------------------------------------------------


def writes_a_result(x: Any) -> Any:
    y = chain(x)
    y[1:-1] = x[:-2] * 2 + 1
    y[:, 1:3] = x[:, :2] - 1
    return chain(y), y


def writes_what_it_reads(x: Any) -> Any:
    y = chain(x)
    y[1:-1] = y[:-2] * 2 + 1
    return chain(y)


def writes_what_is_read_later(x: Any) -> Any:
    y = chain(x)
    z = y.copy()
    z[1:-1] = x[:-2] * 2 + 1
    return chain(z) + y


def writes_a_product(x: Any) -> Any:
    y = x @ x[:6]
    y[1:-1] = x[:-2] * 2 + 1
    y[:, ::2] = st.exp(x[:, 1::2]) * 0.5
    return chain(y)


def writes_a_product_that_it_reads(x: Any) -> Any:
    y = x @ x[:6]
    y[1:-1] = y[:-2] * 2 + 1
    return chain(y), y


def writes_a_copy(x: Any) -> Any:
    y = x.copy()
    y[1:-1] = x[:-2] * 2 + 1
    return chain(y), x[:, ::-1] * 2 + 1


def relaxes(x: Any) -> Any:
    y, w = x.copy(), x[1:-1] * 0.25 + 1
    for _ in range(5):
        y[1:-1] = 0.5 * (y[:-2] + y[2:]) + w[:, ::-1]
    return chain(y)


def relaxes_a_result(x: Any) -> Any:
    y = chain(x)
    for _ in range(4):
        y[1:-1] = 0.5 * (y[:-2] + y[2:])
    return y[::-1], y[::2] * 2 + 1


WRITES = {  # The launches of a call whose addresses have come before: copies, products, graphs, single kernels.
    writes_a_result: ["a graph of 10"],
    writes_what_it_reads: ["a graph of 4", "astype", "a graph of 5"],
    writes_what_is_read_later: ["a graph of 4", "astype", "a graph of 5"],
    writes_a_product: ["matmul", "a graph of 6"],
    writes_a_product_that_it_reads: ["matmul", "astype", "a graph of 5"],
    writes_a_copy: ["astype", "a graph of 6"],
    relaxes: ["astype", "astype", "a graph of 10"],
    relaxes_a_result: ["a graph of 4", "astype", "astype", "a graph of 5"],
}


@pytest.mark.parametrize("f", WRITES, ids=lambda f: f.__name__)
def test_writes_into_windows(f: Callable[..., Any], gpu: Machine) -> None:
    traced, x = st.jit(f), rows(gpu)
    assert is_one_launch(traced, x)
    warm(traced, x, calls=8)
    assert launched(traced, x) == WRITES[f]
    kept = []
    for k in range(12):
        x = rows(gpu, seed=k // 3)
        before = np.asarray(x)
        kept = [*kept[-(k % 4) :], (traced(x), f(x))]
        assert_equal(x, before)
        for found, wanted in kept:
            near(found, wanted)


def test_addresses_of_a_loop_between_kernels_come_again_soon(gpu: Machine) -> None:
    """Memory is freed in such an order that calls alternate between two sets of addresses."""

    def f(x: Any) -> Any:
        y = chain(x)
        for _ in range(4):
            y[1:-1] = 0.5 * (y[:-2] + y[2:])
        return chain(y)

    traced, x = st.jit(f), rows(gpu)
    warm(traced, x)
    assert launched(traced, x) == ["a graph of 4", "astype", "astype", "a graph of 8"]


def test_memory_that_others_hold_is_copied_before_it_is_written(gpu: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    x, traced = rows(gpu), st.jit(writes_a_product)
    warm(traced, x)
    with monkeypatch.context() as patch:
        patch.setattr(fused_devices, "is_writable", lambda base, array: False)
        warm(traced, x, calls=8)
        assert launched(traced, x) == ["matmul", "astype", "a graph of 6"]
        near(traced(x), writes_a_product(x))
    warm(traced, x, calls=8)
    assert launched(traced, x) == ["matmul", "a graph of 6"]


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
    assert any(f"test_segments.py:{line}" in note for note in caught.value.__notes__)
    assert_equal(traced(x, 1), f(x, 1))


# -- errors and other calls ------------------------------------------------------------------------


def test_an_error_of_a_graph_is_one_of_the_program(gpu: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    x, traced = rows(gpu), st.jit(chain)
    warm(traced, x)
    with monkeypatch.context() as patch:
        patch.setattr(world.World, "launch", fails)
        with pytest.raises(st.BackendError, match="cupy") as caught:
            traced(x)
    assert any("jit: in chain, at" in note for note in caught.value.__notes__)
    assert_equal(traced(x), chain(x))


@pytest.mark.parametrize("calls", [1, 8])
def test_an_error_after_a_segment_names_its_line(calls: int, gpu: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    def f(x: Any) -> Any:
        y = writes_a_product(x)
        return y @ y.T  # This one fails.

    x, traced = rows(gpu), st.jit(f)
    warm(traced, x, calls=calls)
    launch, products = world.World.launch, []

    def fails_late(self: Any, name: str, *args: Any) -> Any:
        products.extend([name] * (name == "matmul"))
        return launch(self, name, *args) if len(products) < 2 else fails()

    monkeypatch.setattr(world.World, "launch", fails_late)
    with prepared() as kernels, pytest.raises(st.BackendError, match="cupy") as caught:
        traced(x)
    assert bool(kernels) == (calls == 1)
    line = f.__code__.co_firstlineno + 2
    assert any(f"test_segments.py:{line}" in note for note in caught.value.__notes__)


def test_calls_whose_transfers_are_recorded_are_one_launch(any_gpus: Machine) -> None:
    x, traced = rows(any_gpus), st.jit(chain)
    warm(traced, x)
    with st.transfers():
        assert is_one_launch(traced, x)
        assert_equal(traced(x), chain(x))


def test_one_gpu_has_the_graph_and_the_other_one_not(any_gpus: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    x, traced = rows(any_gpus), st.jit(chain)
    warm(traced, x)
    find, first = Graphs.find, any_gpus.backend.memory_space(any_gpus.devices[0])

    def without(self: Graphs, key: Any, capture: Any = None) -> Any:
        return None if capture is None and key[0] == first else find(self, key, capture)

    monkeypatch.setattr(Graphs, "find", without)
    gpus = any_gpus.cupy.cuda.runtime.getDeviceCount()
    with prepared() as kernels:
        assert launched(traced, x) == ["a graph of 4"] * gpus
    assert not kernels, "the graph was found when the kernels had been prepared, not captured again"
    assert_equal(traced(x), chain(x))


# -- random programs -------------------------------------------------------------------------------


def random_program(draw: random.Random) -> Callable[[Any, Any, Any], list[Any]]:
    """A function of two tensors of 6 columns and of a number: kernels, views between them, reductions, a product."""
    kinds = draw.choices(("scale", "add", "reverse", "rows", "where", "number", "product"), (6, 4, 4, 2, 2, 2, 1), k=14)
    steps = [(kind, draw.random(), draw.random()) for kind in kinds]
    chosen = [draw.random() for _ in range(draw.randint(1, 5))]

    def program(x: Any, w: Any, a: Any) -> list[Any]:
        values, number = [x], a
        for kind, p, q in steps:
            u, v = (values[int(len(values) * (1 - r * r))] if r else values[-1] for r in (p, q))
            if kind == "scale":
                values.append((u * number + 1) * 0.5)
            elif kind == "add":
                values.append((u - v) * 0.5 + 0.25)
            elif kind == "reverse":
                values.append(u[:, ::-1])
            elif kind == "rows":
                values.append(u - u.sum(axis=1, keepdims=True) * 0.125)
            elif kind == "where":
                values.append(st.where(u > v, u * 0.5, number) + v)
            elif kind == "number":
                number = number * 0.5 + 0.25
            else:
                values.append(u @ w)
        made = values[1:]
        found = [made[int(len(made) * r)] for r in chosen]
        return [y[:, 1:] if 0.5 < r < 0.7 else y.T if 0.4 < r <= 0.5 else y for r, y in zip(chosen, found, strict=True)]

    return program


@pytest.mark.parametrize(
    ("first", "count"),
    [
        (0, 4) if all_of_them else (3, 1),
        *[pytest.param(k, 100, marks=pytest.mark.full) for k in range(1000, 1500, 100)],
    ],
)
def test_random_programs(first: int, count: int, any_gpus: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results are kept and dropped at random, operands and numbers change, and all that is kept stays what it was."""
    used: list[bool] = []
    start = Memory.start

    def spy(self: Memory, *args: Any) -> Any:
        started = start(self, *args)
        used.append(started.is_launched)
        return started

    monkeypatch.setattr(Memory, "start", spy)
    xs = [rows(any_gpus, seed=k) for k in range(2)]
    w = st.device_put(np.eye(6, k=1, dtype="f4"), st.NamedSharding(xs[0].sharding.mesh, st.P()))
    for seed in range(first, first + count):
        draw = random.Random(seed)
        program = random_program(draw)
        wanted = {(k, a): [np.asarray(y) for y in program(xs[k], w, a)] for k in range(2) for a in (0.5, 2)}
        traced, kept = st.jit(program), []
        for _ in range(30):
            key = (int(draw.random() < 0.1), 2 if draw.random() < 0.1 else 0.5)
            kept.append((key, traced(xs[key[0]], w, key[1])))
            while len(kept) > 2 or (kept and draw.random() < 0.8):
                known, found = kept.pop(draw.randrange(len(kept)))
                for y, z in zip(found, wanted[known], strict=True):
                    np.testing.assert_allclose(np.asarray(y), z, rtol=1e-5, atol=1e-5, err_msg=f"seed {seed}")
                del found, y
    assert used.count(True) > 2 * count
