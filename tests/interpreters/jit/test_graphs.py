"""Launches of jit in CUDA graphs, on the double of CuPy: which launches a graph has, and that no value is another one."""

from __future__ import annotations

import contextlib
import gc
import logging
import math
import os
import random
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from shardtensor_cupy.graphs import Graphs as Captures

import shardtensor as st
from shardtensor.interpreters.jit.c.compiler import find_compiler
from shardtensor.interpreters.jit.cuda import cuda_executor, segments
from shardtensor.interpreters.jit.cuda.graphs import _ALIGNMENT, COST, GRAPHS, SEEN, Block, Buffer, Graphs, key_of
from tests import fakecupy
from tests.backends.test_cupy import Machine, machine
from tests.conftest import NO_GPU, Logged
from tests.draws import drawn
from tests.fakecupy import kernels, world
from tests.interpreters.jit.random_programs import Case
from tests.interpreters.jit.test_devices import near, smoothed
from tests.interpreters.jit.test_groups import softmax
from tests.layouts import assert_equal

pytestmark = [
    pytest.mark.skipif(not NO_GPU, reason="looks into the double"),
    pytest.mark.skipif(find_compiler() is None, reason="no C compiler, which stands for NVRTC"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]

MACHINES = {
    "one device": {"count": 1, "devices": 1},
    "8 on a GPU": {"count": 8, "devices": 1, "scheduler": "lazy"},
    "8 on two GPUs": {"count": 8, "devices": 2},
}


@pytest.fixture
def gpu() -> Iterator[Machine]:
    """Four logical devices of one GPU."""
    with machine(4, devices=1) as made:
        yield made


@pytest.fixture(params=MACHINES.values(), ids=MACHINES.keys())
def any_gpus(request: pytest.FixtureRequest) -> Iterator[Machine]:
    with machine(**request.param) as made:
        yield made


def rows(m: Machine, shape: tuple[int, ...] = (16, 6), seed: int = 0) -> st.ShardedTensor:
    """A tensor whose rows are split over all devices."""
    mesh = st.make_mesh((len(m.devices),), ("x",), devices=m.devices)
    x = np.random.default_rng(seed).normal(size=shape).astype("f4")
    return st.device_put(x, st.NamedSharding(mesh, st.P("x")))


def chain(x: Any, a: Any = 2) -> Any:
    """Four kernels, since a view ends one. The numbers are those of eager mode to the bit."""
    for k in range(4):
        x = (x[:, ::-1] * a + k) * 0.5
    return x


@contextlib.contextmanager
def counted() -> Iterator[list[str]]:
    """The names of what is launched; what is captured is not."""
    names: list[str] = []
    launch = world.World.launch

    def count(self: Any, name: str, run: Any, reads: Any, writes: Any, stream: Any = None) -> Any:
        if (self.stream() if stream is None else stream).capture is None:
            names.append(name)
        return launch(self, name, run, reads, writes, stream)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(world.World, "launch", count)
        yield names


def launched(fn: Callable[..., Any], *args: Any) -> list[str]:
    """What a call launches; its result is dropped."""
    with counted() as names:
        fn(*args)
    return names


def warm(fn: Callable[..., Any], *args: Any, calls: int = 4) -> None:
    """Calls a function until its addresses have come again, and the self-test has run."""
    for _ in range(calls):
        fn(*args)


# -- what is one launch ----------------------------------------------------------------------------


def test_a_chain_is_one_launch_from_the_second_time_on(any_gpus: Machine) -> None:
    x, traced = rows(any_gpus), st.jit(chain)
    gpus = any_gpus.cupy.cuda.runtime.getDeviceCount()
    first = launched(traced, x)
    assert len(first) == 4 * gpus
    assert all(name == "shardtensor_kernel" for name in first)
    warm(traced, x)
    assert launched(traced, x) == ["a graph of 4"] * gpus
    assert_equal(traced(x), chain(x))


def test_a_product_divides_a_program(any_gpus: Machine) -> None:
    def f(x: Any, w: Any) -> Any:
        h = chain(x) @ w
        return chain(h).sum(axis=1)

    x = rows(any_gpus)
    w = st.device_put(np.eye(6, dtype="f4"), st.NamedSharding(x.sharding.mesh, st.P()))
    traced, gpus = st.jit(f), any_gpus.cupy.cuda.runtime.getDeviceCount()
    warm(traced, x, w)
    names = [name for name in launched(traced, x, w) if name.startswith(("a graph", "matmul"))]
    assert names == ["a graph of 4"] * gpus + ["matmul"] * gpus + ["a graph of 4"] * gpus
    near(traced(x, w), f(x, w))


def test_the_parts_of_a_long_row_are_one_launch(gpu: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_executor, "SEGMENT", 16)
    monkeypatch.setattr(cuda_executor, "_BLOCK", 32)
    x, traced = rows(gpu, (2, 100)), st.jit(softmax)
    assert len(launched(traced, x)) == 5
    warm(traced, x)
    assert launched(traced, x) == ["a graph of 5"]
    near(traced(x), softmax(x))


def test_steps_of_a_loop_are_one_launch(gpu: Machine) -> None:
    u, traced = rows(gpu), st.jit(smoothed)
    assert len(launched(traced, u)) == 2 + 6
    warm(traced, u)
    assert launched(traced, u) == ["astype", "astype", "a graph of 6"]
    near(traced(u), smoothed(u))


def test_steps_of_a_loop_follow_the_kernels_before(gpu: Machine) -> None:
    def f(x: Any) -> Any:
        u = chain(x)
        for _ in range(4):
            u[1:-1] = 0.5 * (u[:-2] + u[2:])
        return u

    u, traced = rows(gpu), st.jit(f)
    for _ in range(4):
        assert_equal(traced(u), f(u))


def test_one_kernel_is_no_graph(gpu: Machine) -> None:
    x, traced = rows(gpu), st.jit(softmax)
    lowered = traced.lower(x)
    assert not lowered._executable.segments
    warm(traced, x)
    assert launched(traced, x) == ["rows"]
    assert "CUDA graph" not in lowered.as_text("groups")
    assert lowered.cost().launches == lowered.cost().kernels == 1


def test_texts_and_costs(gpu: Machine) -> None:
    lowered = st.jit(chain).lower(rows(gpu))
    assert lowered.as_text("groups").count("one CUDA graph, from here on, of 4 kernels") == 1
    assert (lowered.cost().kernels, lowered.cost().launches) == (4, 1)
    assert "1 launch, with CUDA graphs" in str(lowered.cost())
    gpu.backend.captures = False
    assert lowered.cost().launches == 4
    assert "CUDA graph" not in lowered.as_text("groups")


def test_large_results_end_a_segment(gpu: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    x = rows(gpu)
    monkeypatch.setattr(segments, "MOST_BYTES", 2 * x.nbytes)
    traced = st.jit(chain)
    warm(traced, x, calls=8)
    assert launched(traced, x) == ["a graph of 2"] * 2
    assert_equal(traced(x), chain(x))


# -- addresses and numbers that change -------------------------------------------------------------


def test_results_that_are_kept_are_never_written_again(any_gpus: Machine) -> None:
    traced = st.jit(lambda x, a: (chain(x, a), x + a))
    x, kept = rows(any_gpus), []
    draw = random.Random(0)
    for k in range(60):
        a = [0.5, 0.25][k % 2]
        made = traced(x, a)
        if draw.random() < 0.4:
            kept.append((a, made))
        if draw.random() < 0.5 and len(kept) > 4:
            kept.pop(draw.randrange(len(kept)))
    for a, made in kept:
        near(made, (chain(x, a), x + a))


def test_a_loop_that_feeds_its_result_back(any_gpus: Machine) -> None:
    traced, x = st.jit(chain), rows(any_gpus)
    wanted = x
    for _ in range(12):
        x, wanted = traced(x), chain(wanted)
        assert_equal(x, wanted)
    for _ in range(4):
        x = traced(x)
    with counted() as names:
        x = traced(x)
    assert names == ["a graph of 4"] * any_gpus.cupy.cuda.runtime.getDeviceCount()


def test_operands_at_new_addresses(gpu: Machine) -> None:
    traced = st.jit(chain)
    every = [rows(gpu, seed=k) for k in range(40)]
    for _ in range(4):
        for x in every:
            assert_equal(traced(x), chain(x))
    assert fakecupy.live_graphs <= 1 + GRAPHS


def test_layouts_in_memory_are_no_others(gpu: Machine) -> None:
    """An array in column-major order at the address at which one in row-major order was."""
    cupy, device = gpu.cupy, gpu.devices[0]
    traced = st.jit(chain)
    for k in range(12):
        x = np.random.default_rng(k).normal(size=(6, 6)).astype("f4")
        with gpu.backend.on(device):
            array = cupy.asarray(x) if k % 2 else cupy.asarray(x.T.copy()).T
        t = st.asarray(array, device=device)
        del array
        near(traced(t), chain(t))
        del t


def numbers() -> list[Any]:
    return [1, 1.0, True, 0.0, -0.0, float("nan"), -float("nan"), 2**40, -1, np.float32(1), np.float64(1), np.int8(1)]


def test_numbers_that_change(gpu: Machine) -> None:
    def f(x: Any, a: Any) -> Any:
        return chain(st.copysign(chain(x, 0.5), a), a) + st.where(x[:, ::-1] > a, a, x)

    traced, x = st.jit(f), rows(gpu)
    for _ in range(5):
        for a in numbers():
            assert_equal(traced(x, a), f(x, a))


def test_keys_of_numbers_are_exact() -> None:
    keys = [key_of(a) for a in numbers()]
    assert len(set(keys)) == len(keys)
    assert keys == [key_of(a) for a in numbers()]
    assert all(hash(key) is not None for key in keys)


def test_addresses_of_arrays_have_their_strides(gpu: Machine) -> None:
    with gpu.backend.on(gpu.devices[0]):
        a = gpu.cupy.zeros((4, 4))
        assert gpu.backend.address_of(a) == gpu.backend.address_of(a[:])
        assert len({gpu.backend.address_of(x) for x in (a, a.T, a[1:], a[:, ::2])}) == 4


# -- who holds memory ------------------------------------------------------------------------------


def test_results_that_are_exported(gpu: Machine) -> None:
    traced, x = st.jit(chain), rows(gpu)
    warm(traced, x)
    wanted = np.asarray(chain(x))
    shards = [traced(x).addressable_shards[1].data for _ in range(4)]
    alone = st.device_put(x, gpu.devices[0])
    arrays = [gpu.cupy.from_dlpack(traced(alone)) for _ in range(6)]
    warm(traced, rows(gpu, seed=1), calls=6)
    assert all(np.array_equal(gpu.cupy.asnumpy(a), wanted[4:8]) for a in shards)
    assert all(np.array_equal(gpu.cupy.asnumpy(a), wanted) for a in arrays)


def test_donated_arguments(gpu: Machine) -> None:
    traced, x = st.jit(chain, donate_argnums=0), rows(gpu)
    wanted = np.asarray(x)
    for _ in range(8):
        old, wanted = x, np.asarray(chain(st.device_put(wanted, x.sharding)))
        x = traced(x)
        assert_equal(x, wanted)
        with pytest.raises(st.DonatedError):
            old + 1


def test_writes_into_windows(any_gpus: Machine) -> None:
    def relax(u: Any, v: Any) -> Any:
        new = u * 2
        new[1:-1] = st.exp(v[1:-1] * -1) + 1
        new[:, ::2] *= 0.5
        for _ in range(3):
            u[1:-1] = 0.5 * (u[:-2] + u[2:])
        v += new
        return new

    traced = st.jit(relax)
    mine, its = [[rows(any_gpus, seed=k) for k in range(2)] for _ in range(2)]
    kept = []
    for k in range(8):
        found, wanted = traced(*mine), relax(*its)
        near((found, *mine), (wanted, *its))
        if k % 3 == 0:
            kept.append((found, np.asarray(wanted), mine[0].copy(), np.asarray(its[0])))
    for found, wanted, u, after in kept:
        near((found, u), (found, u))
        np.testing.assert_allclose(np.asarray(found), wanted, rtol=1e-5)
        np.testing.assert_allclose(np.asarray(u), after, rtol=1e-5)


def test_two_threads_call_one_program(any_gpus: Machine) -> None:
    traced = st.jit(lambda x, a: (chain(x, a), x.sum(axis=1) * a))
    given = [rows(any_gpus, seed=k) for k in range(2)]
    wanted = [[np.asarray(y) for y in (chain(x, 0.5), x.sum(axis=1) * 0.5)] for x in given]
    wrong: list[Any] = []
    barrier = threading.Barrier(2)

    def run(k: int) -> None:
        barrier.wait()
        for _ in range(25):
            for found, y in zip(traced(given[k], 0.5), wanted[k], strict=True):
                if not np.allclose(np.asarray(found), y, rtol=1e-5):
                    wrong.append((k, found))

    threads = [threading.Thread(target=run, args=(k,)) for k in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_graphs_end_with_the_program(gpu: Machine) -> None:
    traced, x = st.jit(lambda x: chain(x)), rows(gpu)  # A function has its programs as long as it exists.
    warm(traced, x)
    ended = weakref.ref(traced.lower(x)._executable)
    assert fakecupy.live_graphs > 0
    del traced
    gc.collect()
    assert ended() is None
    assert fakecupy.live_graphs == 0


@pytest.mark.parametrize("calls", [200, pytest.param(10_000, marks=pytest.mark.full)])
def test_memory_and_graphs_do_not_grow(calls: int, gpu: Machine) -> None:
    traced, x, draw = st.jit(chain), rows(gpu), random.Random(0)
    pool = gpu.cupy.get_default_memory_pool()
    kept: list[Any] = []
    used = 0
    for k in range(calls):
        kept.append(traced(x, [0.5, k * 0.25][k % 2]))
        while len(kept) > 5 or (kept and draw.random() < 0.5):
            kept.pop(draw.randrange(len(kept)))
        if k == calls // 4:
            used = pool.total_bytes()
    assert fakecupy.live_graphs <= GRAPHS
    assert pool.total_bytes() <= used + 4096
    (segment,) = traced.lower(x, 0.5)._executable.segments
    assert len(segment.graphs._graphs) <= GRAPHS
    assert len(segment.graphs._seen) <= SEEN


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_child_process_runs_the_program(gpu: Machine) -> None:
    traced, x = st.jit(chain), rows(gpu)
    warm(traced, x)
    wanted = np.asarray(chain(x))
    child = os.fork()
    if not child:
        code = 1
        with contextlib.suppress(BaseException):
            code = 0 if all(np.array_equal(np.asarray(traced(x)), wanted) for _ in range(4)) else 1
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


# -- when captures are made ------------------------------------------------------------------------


def finds(graphs: Graphs, keys: Iterator[int] | range, captured: list[int]) -> int:
    """The number of launches of graphs, if the launches have these keys."""
    found = 0
    for key in keys:
        graph = graphs.find(key, lambda key=key: (captured.append(key), lambda: None)[1])  # type: ignore[misc]
        found += graph is not None
    return found


def test_launches_that_never_come_again_are_not_captured() -> None:
    captured: list[int] = []
    assert finds(Graphs(), range(1000), captured) == 0
    assert not captured


def test_a_loop_over_some_addresses_has_a_graph_for_each() -> None:
    captured: list[int] = []
    graphs = Graphs()
    assert finds(graphs, (k % GRAPHS for k in range(100 * GRAPHS)), captured) == 99 * GRAPHS
    assert len(captured) == GRAPHS


def test_captures_that_are_of_no_use_are_few() -> None:
    captured: list[int] = []
    period = (GRAPHS + SEEN) // 2
    finds(Graphs(), (k % period for k in range(10_000)), captured)
    assert len(captured) <= GRAPHS + 10_000 / COST
    graphs, captured = Graphs(), []
    finds(graphs, (k % period for k in range(1000)), captured)
    before = len(captured)
    assert finds(graphs, (-1 for _ in range(100)), captured) > 80  # What is of use is captured soon.
    assert len(captured) == before + 1


# -- the memory of what only a segment reads -------------------------------------------------------


@pytest.mark.parametrize("shapes", [[(1,), (3, 5), (0,), (7,)], [(128,), (129,), (2, 64)], [(512,), (1,), (511,)]])
@pytest.mark.parametrize("dtype", ["i1", "f4", "c16"])
def test_buffers_are_aligned_and_do_not_overlap(shapes: list[tuple[int, ...]], dtype: str, gpu: Machine) -> None:
    block, end = Block(), 0
    for name, shape in enumerate(shapes):
        block.add(Buffer(name, None, "memory", shape, np.dtype(dtype)))
    for (begin, found, of), shape in zip(block.parts, shapes, strict=True):
        assert (found, of) == (shape, np.dtype(dtype))
        assert begin % _ALIGNMENT == 0
        assert end <= begin < end + _ALIGNMENT
        end = begin + math.prod(shape) * of.itemsize
    assert end <= block.size < end + _ALIGNMENT
    assert block.size % _ALIGNMENT == 0
    with gpu.backend.on(gpu.devices[0]):
        memory = block.allocate(gpu.backend)
        arrays = block.arrays(gpu.backend, memory)
    assert memory.nbytes == block.size
    assert [(name, x.shape, x.dtype) for name, x in arrays.items()] == [
        (name, shape, np.dtype(dtype)) for name, shape in enumerate(shapes)
    ]


# -- captures that fail ----------------------------------------------------------------------------


def test_graphs_can_be_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDTENSOR_CUPY_GRAPHS", "off")
    with machine(4, devices=1) as m:
        x, traced = rows(m), st.jit(chain)
        warm(traced, x)
        assert launched(traced, x) == ["shardtensor_kernel"] * 4
        assert "CUDA graph" not in traced.lower(x).as_text("groups")
    monkeypatch.setenv("SHARDTENSOR_CUPY_GRAPHS", "on")
    with pytest.raises(st.BackendError, match="SHARDTENSOR_CUPY_GRAPHS is 'on'; it must be auto or off"), machine(1):
        pass


@pytest.mark.parametrize("fault", ["runs", "forgets", "refuses"])
def test_a_gpu_whose_graphs_are_wrong(
    fault: str, gpu: Machine, monkeypatch: pytest.MonkeyPatch, logged: Logged
) -> None:
    if fault == "runs":  # What is captured runs at once, too.
        add = fakecupy.graphs.Capture.add
        monkeypatch.setattr(
            fakecupy.graphs.Capture,
            "add",
            lambda self, name, run, reads, writes: (run(), add(self, name, run, reads, writes)),
        )
    elif fault == "forgets":
        monkeypatch.setattr(fakecupy.graphs.Graph, "launch", lambda self, stream=None: None)
    else:
        monkeypatch.setattr(fakecupy.graphs, "begin", fails)
    x, traced = rows(gpu), st.jit(chain)
    with logged.at_level(logging.WARNING, "shardtensor"):
        warm(traced, x, calls=6)
    assert logged.messages == ["GPU 0: a test of CUDA graphs has failed; kernels are launched one by one"]
    assert launched(traced, x) == ["shardtensor_kernel"] * 4
    assert_equal(traced(x), chain(x))


def fails(*args: Any) -> Any:
    raise fakecupy.CUDARuntimeError(900)


@pytest.mark.parametrize("where", ["begin", "add", "end", "late"])
def test_a_capture_that_fails_leaves_nothing_behind(
    where: str, gpu: Machine, monkeypatch: pytest.MonkeyPatch, logged: Logged
) -> None:
    """The self-test has passed; later CUDA refuses."""
    x, traced, other = rows(gpu), st.jit(chain), st.jit(lambda x: chain(x) + 1)
    warm(other, x)
    with monkeypatch.context() as patch, logged.at_level(logging.INFO, "shardtensor"):
        if where == "begin":
            patch.setattr(fakecupy.graphs, "begin", fails)
        elif where == "add":
            patch.setattr(fakecupy.graphs.Capture, "add", fails)
        elif where == "late":  # Another thread waits for the device.
            add = fakecupy.graphs.Capture.add

            def waits(self: Any, *args: Any) -> None:
                add(self, *args)
                with contextlib.suppress(RuntimeError):
                    world.world.synchronize_device(0)

            patch.setattr(fakecupy.graphs.Capture, "add", waits)
        else:
            end = fakecupy.graphs.end
            patch.setattr(fakecupy.graphs, "end", lambda stream: (end(stream), fails())[0])
        for _ in range(4):
            assert_equal(traced(x), chain(x))
        assert launched(traced, x) == ["shardtensor_kernel"] * 4
    assert not world.world.captures
    assert any("were not captured" in message for message in logged.messages)
    warm(traced, x)
    assert launched(traced, x) == ["a graph of 4"]
    assert_equal(traced(x), chain(x))


def test_interrupts_end_the_capture(gpu: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    x, traced, other = rows(gpu), st.jit(chain), st.jit(lambda x: chain(x) + 1)
    warm(other, x)
    traced(x)

    def interrupted(*args: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(fakecupy.graphs.Capture, "add", interrupted)
        with pytest.raises(KeyboardInterrupt):
            warm(traced, x)
    assert not world.world.captures
    assert_equal(traced(x), chain(x))


def test_a_finalizer_that_uses_the_library_during_a_capture(gpu: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    x, traced, other = rows(gpu), st.jit(chain), st.jit(lambda x: chain(x) + 1)
    wanted, plus = np.asarray(chain(x)), np.asarray(chain(x) + 1)
    warm(other, x)
    inside: list[Any] = []
    launch = kernels.RawKernel.__call__

    def finalized(self: Any, *args: Any) -> None:
        launch(self, *args)
        if world.world.captures and not inside:
            inside.append(None)
            inside[:] = [traced(x), other(x), x.sum(), gpu.cupy.get_default_memory_pool().free_all_blocks()]

    with monkeypatch.context() as patch:
        patch.setattr(kernels.RawKernel, "__call__", finalized)
        for _ in range(4):
            assert_equal(traced(x), wanted)
    assert len(inside) == 4
    assert_equal(inside[0], wanted)
    assert_equal(inside[1], plus)


def test_an_error_of_a_launch_names_the_line(gpu: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    def f(x: Any) -> Any:
        a = x[:, ::-1] * 2 + 1
        b = a[:, ::-1] * 2 + 1  # This one fails.
        return b[:, ::-1] * 2 + 1

    traced, x = st.jit(f), rows(gpu)
    assert_equal(traced(x), f(x))
    program = traced.lower(x)._executable
    _, wrong, _ = [fused.compiled for fused in program.kernels]
    monkeypatch.setattr(type(wrong), "_elementwise", property(lambda self: fails if self is wrong else _done))
    with pytest.raises(st.BackendError, match="cupy") as caught:
        program([x])
    line = f.__code__.co_firstlineno + 2
    assert any(f"test_graphs.py:{line}" in note for note in caught.value.__notes__)


def _done(*args: Any) -> None:
    """A kernel that does nothing."""


def test_captures_of_two_threads_take_turns(gpu: Machine) -> None:
    captures = Captures(gpu.cupy)
    device = gpu.devices[0]
    made: list[Any] = []

    def run() -> None:
        with gpu.backend.on(device):
            x = gpu.cupy.zeros(8)
            for _ in range(10):
                made.append((captures.capture(lambda: gpu.cupy.add(x, 1, out=x)), x))

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 20
    with gpu.backend.on(device):
        for graph, _ in made:
            graph()
        for x in (made[0][1], made[-1][1]):
            assert gpu.cupy.asnumpy(x).tolist() in ([10.0] * 8, [20.0] * 8)


# -- random programs -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "count"),
    [(0, drawn(12, fast=4)), *[pytest.param(k, 100, marks=pytest.mark.full) for k in range(1000, 2000, 100)]],
)
def test_random_programs_are_eager_modes(first: int, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[bool] = []
    find = Graphs.find

    def spy(self: Graphs, *args: Any) -> Any:
        graph = find(self, *args)
        used.append(graph is not None)
        return graph

    monkeypatch.setattr(Graphs, "find", spy)
    for seed in range(first, first + count):
        draw = random.Random(seed)
        case = Case(draw, "cupy")
        case.is_narrow, case.dtypes = False, ["float64", "float32"]
        case.steps = [(draw.choice(KERNELS), *[draw.randrange(30) for _ in range(3)]) for _ in range(12)]
        function = lambda a, b, case=case: case.run(st, a, b)  # noqa: E731
        eager, mine = answers(case, function)
        jitted, its = answers(case, st.jit(function, executor="c"))
        for a, b in zip([*eager, *mine], [*jitted, *its], strict=True):
            scale = np.abs(a[np.isfinite(a)]).max(initial=0)
            np.testing.assert_allclose(b, a, rtol=1e-5, atol=1e-5 * (0.1 + scale), err_msg=f"seed {seed}")
    assert used.count(True) > count / 2


def answers(case: Case, function: Callable[..., Any]) -> tuple[list[Any], list[Any]]:
    """The results of some calls with the same arguments, which the program may write, and the arguments after them;
    nothing if it raises an error. Nothing else is allocated between, so that addresses come again.
    """
    args, *bases = case.arguments(st)
    found = []
    with np.errstate(all="ignore"):
        for _ in range(8):
            try:
                found += [np.asarray(y) for y in function(*args)]
            except (ValueError, IndexError, TypeError):
                return [], []
    return found, [np.asarray(x) for x in bases]


KERNELS = (
    *("add", "scale", "slice", "rows", "transpose", "reverse", "sum", "where", "write", "write row", "in place", "var"),
    *(
        "in place rows",
        "out",
        "stencil",
        "stencil of a copy",
        "write a chain",
        "extrema",
        "time steps",
        "copy",
        "scale",
    ),
)
"""The steps of random programs that are kernels, or views between them."""
