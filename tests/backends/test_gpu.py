"""Tests for machines with a GPU: ``python -m pytest tests/backends/test_gpu.py``, from a checkout, with CuPy, pytest and hypothesis.

Without a GPU, the tests marked `gpu` are skipped, and most of them run with small arrays on the simulated CuPy, so that
they work the first time on a machine with a GPU.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import os
import re
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as some

import shardtensor as st
from shardtensor import cli
from shardtensor.backend.registry import load
from shardtensor.core import OPS
from shardtensor.interpreters.jit.cuda import graphs
from shardtensor.testing import BackendTests
from tests import kernels
from tests.cases import CASES, check, wanted
from tests.conftest import NO_GPU, NO_TORCH
from tests.interpreters.jit.random_programs import run_seeds
from tests.layouts import all_specs, assert_same, mesh_of, placed
from tests.scripts import new_process, output_of

ROOT = Path(__file__).parents[2]
MESHES = {1: [(1,)], 2: [(2,), (1, 2)], 8: [(8,), (2, 4), (4, 2), (2, 2, 2)]}
TORCH_CUDA = not (NO_GPU or NO_TORCH) and st.devices("torch")[0].kind != "cpu"

# Warnings of other libraries that have not been seen yet are not failures.
gpu = [pytest.mark.gpu, pytest.mark.values, pytest.mark.filterwarnings("default")]
REHEARSED: list[tuple[str, Callable[[], None]]] = []


def on_gpu(test: Callable[..., None]) -> Callable[..., None]:
    """Marks a test that needs a GPU, and files it for the rehearsal."""
    REHEARSED.append((test.__name__, test))
    return marked(test)


def marked(test: Any) -> Any:
    """Marks what needs a GPU."""
    return functools.reduce(lambda made, mark: mark(made), gpu, test)


def small(full: Any, rehearsed: Any) -> Any:
    """Returns a size, a number of steps or an option: ``full`` on a GPU, ``rehearsed`` on the simulated CuPy."""
    return rehearsed if NO_GPU else full


def cupy_module() -> Any:
    return importlib.import_module("cupy")


def devices() -> list[st.Device]:
    return st.devices("cupy")


def gpu_of(device: st.Device) -> int:
    return int(load("cupy").dlpack_device(device)[1])


def one_on_each_gpu() -> list[st.Device]:
    found = {gpu_of(d): d for d in reversed(devices())}
    if len(found) < 2:
        pytest.skip("there is one GPU, and this needs two")
    return [found[n] for n in sorted(found)]


def pooled() -> tuple[int, int]:
    """Returns the bytes of CuPy's pool, those in use and all, after all queued work has run."""
    cupy, used, total = cupy_module(), 0, 0
    for number in range(cupy.cuda.runtime.getDeviceCount()):
        with cupy.cuda.Device(number) as device:
            device.synchronize()
            used += cupy.get_default_memory_pool().used_bytes()
            total += cupy.get_default_memory_pool().total_bytes()
    return used, total


# -- the kit, and every operator -------------------------------------------------------------------


@marked
class TestOnTheGPU(BackendTests):
    backend = "cupy"
    examples = 10
    chain = 50
    size = 1 << 18


@marked
@pytest.mark.skipif(not TORCH_CUDA, reason="PyTorch sees no GPU")
class TestTorchOnTheGPU(BackendTests):
    backend = "torch"
    examples = 5
    chain = 50
    size = 1 << 18


def operate(name: str, count: int, examples: int) -> None:
    """An operator on drawn operands, under drawn shardings over so many logical devices."""

    @hypothesis.settings(max_examples=examples)
    @hypothesis.given(data=some.data())
    def run(data: Any) -> None:
        made = CASES[name](data)
        mesh = mesh_of(data.draw(some.sampled_from(MESHES[count])), "cupy", 0 if count == 8 else 8 - count)
        operands = [placed(data, x, "cupy", mesh) for x in made.operands]
        if not any(isinstance(x, st.ShardedTensor) for x in operands):
            operands[0] = st.device_put(made.operands[0], st.NamedSharding(mesh, st.P()))
        check(name, made, operands)

    run()


@marked
@pytest.mark.parametrize("count", MESHES)
@pytest.mark.parametrize("name", sorted(CASES))
def test_every_operator(name: str, count: int) -> None:
    operate(name, count, 15)


@marked
@pytest.mark.parametrize("name", sorted(CASES))
def test_every_operator_by_own_kernels(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardtensor_cupy.ufuncs.LARGE", 1)  # Those of large arrays.
    operate(name, 8, 10)


def accepts(name: str, examples: int) -> None:
    """CuPy accepts the calls of an operator on eight devices, and the result has its dtype and number of dimensions."""

    @hypothesis.settings(max_examples=examples)
    @hypothesis.given(data=some.data())
    def run(data: Any) -> None:
        made = CASES[name](data)
        rows = st.NamedSharding(mesh_of((8,), "cupy"), st.P())
        operands = [st.device_put(x, rows) for x in made.operands]
        answer = np.asarray(wanted(name, made))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # What has not been computed may be NaN.
            result = made.run(OPS[name].dispatch, operands)
        assert isinstance(result, st.ShardedTensor)
        assert (result.dtype, result.ndim) == (answer.dtype, answer.ndim)

    run()


BY_VALUES = (
    "cholesky cond counts_between counts_of_integers eigvalsh fft hfft ifft ihfft inv irfft isin_sorted matrix_rank pinv "
    "rfft searchsorted_split solve svdvals take take_along_axis take_along_split truncated_normal updated"
)
"""The operators that raise errors for some values of their operands, or need libraries that check them."""


@pytest.mark.gpu
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.values if name in BY_VALUES.split() else ()) for name in sorted(CASES)],
)
def test_every_operator_is_accepted(name: str) -> None:
    accepts(name, 4)


REHEARSED += [(f"accepts {name}", functools.partial(accepts, name, 2)) for name in ("matmul", "argmax", "take")]
REHEARSED += [(f"{name}-{n}", functools.partial(operate, name, n, 2)) for name in ("matmul", "concat") for n in MESHES]


@on_gpu
def test_products_of_bfloat16() -> None:
    """Large ones are computed by cuBLAS in bfloat16: the sums are exact in float32, and are rounded once."""
    n = small(2048, 560)
    numbers = np.random.default_rng(0)
    for shapes in (((n, n), (n, n)), ((3, n, n), (n, n)), ((3, n, n), (3, n, n)), ((n + 1, n + 3), (n + 3, n - 5))):
        a, b = [numbers.integers(-9, 9, shape).astype("f4") for shape in shapes]
        wanted = (a @ b).astype(st.bfloat16).astype("f4")
        for left, right in (("x", None), (None, "x"), (None, None)):
            mesh = mesh_of((8,), "cupy")
            specs = st.P(*[None] * (a.ndim - 2), left, right), st.P(*[None] * (b.ndim - 2), right, left)
            x, y = [
                st.device_put(value.astype(st.bfloat16), st.NamedSharding(mesh, spec))
                for value, spec in zip((a, b), specs, strict=True)
            ]
            for found in (x @ y, x @ y.mT.copy().mT):
                assert found.dtype == st.bfloat16
                np.testing.assert_array_equal(np.asarray(found).astype("f4"), wanted)


@on_gpu
def test_random_numbers_are_those_of_the_host() -> None:
    """Uniform numbers and integers have the same bits; the logarithms of others differ in the last ones."""
    key, n = st.random.key(2026), small(1 << 20, 300)
    draws: list[tuple[Callable[..., Any], float]] = [
        (functools.partial(getattr(st.random, name), dtype=dtype), 0.0 if name == "uniform" else error)
        for name in ("uniform", "normal", "exponential")
        for dtype, error in (("float64", 1e-14), ("float32", 2e-6), ("float16", 2e-3))
    ]
    for low, high in ((0, 10), (-(2**63), 2**63), (-(2**63), 2**63 - 2**62), (-5, 2**40)):
        draws.append((functools.partial(_integers, low, high), 0.0))
    draws.append((_bools, 0.0))
    for draw, error in draws:
        for shape, spec in (
            ((8 * n + 3,), ("x",)),
            ((5, n // 4 + 1), (None, "x")),
            ((n // 8, 3, 11), ("x", None, None)),
        ):
            wanted = np.asarray(draw(key, shape, device=st.devices("numpy")[0]))
            for mesh in (mesh_of((8,), "cupy"), mesh_of((1,), "cupy")):
                found = np.asarray(draw(key, shape, device=st.NamedSharding(mesh, st.P(*spec))))
                assert found.dtype == wanted.dtype
                if error:
                    np.testing.assert_allclose(found, wanted, rtol=error, atol=error)
                else:
                    np.testing.assert_array_equal(found, wanted)


def _integers(low: int, high: int, key: Any, shape: Any, device: Any) -> Any:
    return st.random.integers(key, low, high, shape, device=device)


def _bools(key: Any, shape: Any, device: Any) -> Any:
    return st.random.bernoulli(key, 0.3, shape, device=device)


# -- order -----------------------------------------------------------------------------------------


SPIN = r"""
extern "C" __global__ void spin(unsigned long long nanoseconds) {
    unsigned long long begin, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(begin));
    do { asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)); } while (now - begin < nanoseconds);
}
"""


@functools.cache
def _spin() -> Any:
    return cupy_module().RawKernel(SPIN, "spin")


def hold_up(microseconds: int, device: st.Device | None = None) -> None:
    """Keeps a device, or the current stream, busy: work that is queued behind it without an event runs first."""
    with contextlib.nullcontext() if device is None else load("cupy").on(device):
        _spin()((1,), (1,), (np.uint64(1000 * microseconds),))


@pytest.fixture
def stubs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    kernels.install(monkeypatch, cupy_module())
    _spin.cache_clear()
    yield
    _spin.cache_clear()


def poison() -> Any:
    """A context in which memory is overwritten as soon as it is freed, on the stream that may use it next (the
    simulated CuPy always does so). A read after the memory was freed gives NaN and -1.
    """
    cupy = cupy_module()
    streams: dict[tuple[int, int], int] = {}

    class Poison(cupy.cuda.MemoryHook):
        name = "poison"

        def malloc_postprocess(self, *, device_id: int, mem_ptr: int, pmem_id: int, **_: Any) -> None:
            streams[mem_ptr, pmem_id] = cupy.cuda.get_current_stream(device_id).ptr

        def free_preprocess(self, *, device_id: int, mem_size: int, mem_ptr: int, pmem_id: int) -> None:
            stream = streams.pop((mem_ptr, pmem_id), None)
            if stream is not None:  # Otherwise another thread has allocated it, for an unknown stream.
                with cupy.cuda.Device(device_id):
                    cupy.cuda.runtime.memsetAsync(mem_ptr, 0xFF, mem_size, stream)

    return Poison()


class Chains:
    """Tensors on all devices, each with its expected NumPy array, and random steps that are applied to both."""

    def __init__(self, seed: int, rows: int) -> None:
        self.random = np.random.default_rng(seed)
        self.rows = rows
        self.held: list[tuple[Any, np.ndarray]] = []
        self.stream = cupy_module().cuda.Stream(non_blocking=True)

    def run(self, steps: int) -> None:
        actions = [self.make, self.combine, self.combine, self.move, self.move, self.write, self.write, self.view]
        actions += [self.map, self.park, self.lend, self.drop, self.drop]
        for step in range(steps):
            if self.random.random() < 0.3:
                hold_up(int(self.random.integers(20, 300)), devices()[self.random.integers(8)])
            (self.make if len(self.held) < 2 else actions[self.random.integers(len(actions))])()
            if len(self.held) > 12:
                self.drop()
            if step % 20 == 19:
                self.look(*self.pick())
        for one in self.held:
            self.look(*one)

    def look(self, x: Any, right: np.ndarray) -> None:
        np.testing.assert_array_equal(np.asarray(x), right)

    def pick(self) -> tuple[Any, np.ndarray]:
        return self.held[self.random.integers(len(self.held))]

    def somewhere(self) -> st.NamedSharding:
        shape = [(1,), (2,), (3,), (8,), (2, 3), (4, 2)][self.random.integers(6)]
        mesh = mesh_of(shape, "cupy", int(self.random.integers(8 - int(np.prod(shape)) + 1)))
        specs = all_specs(mesh, 2)
        return st.NamedSharding(mesh, specs[self.random.integers(len(specs))])

    def make(self) -> None:
        right = self.random.integers(-99, 99, (self.rows, 7))
        self.held.append((st.device_put(right, self.somewhere()), right))

    def combine(self) -> None:
        (x, a), (y, b) = self.pick(), self.pick()
        self.held.append((x - 3 * y, a - 3 * b))

    def move(self) -> None:
        x, right = self.pick()
        self.held.append((st.reshard(x, self.somewhere()), right))

    def write(self) -> None:
        """Writes to a tensor; the others must not change, whatever memory they share."""
        at = self.random.integers(len(self.held))
        x, right = self.held[at]
        begin = int(self.random.integers(self.rows))
        made, right = x.copy() if self.random.random() < 0.5 else x + 0, right.copy()
        made[begin:, ::2] = 5
        made += 1
        right[begin:, ::2] = 5
        right += 1
        self.held[at] = made, right

    def view(self) -> None:
        x, right = self.pick()
        made, right = x + 1, right + 1
        made[::-1].T[:3] -= 2
        right[::-1].T[:3] -= 2
        self.held.append((made, right))

    def map(self) -> None:
        x, right = self.pick()

        def work(a: Any) -> Any:
            if self.random.random() < 0.3:
                hold_up(100)
            b = a * 2
            b += 1
            return b

        self.held.append((st.unshard(st.pmap(work, st.shard(x, devices=devices()))), 2 * right + 1))

    def park(self) -> None:
        x, right = self.pick()
        self.held.append((st.device_put(x, self.somewhere().with_memory_kind("pinned_host")), right))

    def lend(self) -> None:
        """Passes an array to code on the null stream or on a stream of the caller's, and back."""
        x, right = self.pick()
        x = st.device_put(x, devices()[self.random.integers(8)])
        own = self.random.random() < 0.5 and gpu_of(x.device) == self.stream.device_id
        with cupy_module().cuda.Device(gpu_of(x.device)), self.stream if own else contextlib.nullcontext():
            hold_up(int(self.random.integers(10, 200)))
            made = x.addressable_shards[0].data * 4
            self.held.append((st.asarray(made, copy=True), 4 * right))
            if own:  # what is dropped while a stream of his own reads it is the caller's to order
                self.stream.synchronize()

    def drop(self) -> None:
        self.held.pop(self.random.integers(len(self.held)))


def stress(seed: int) -> None:
    with poison():
        Chains(seed, small(20_000, 9)).run(small(300, 60))


@marked
@pytest.mark.parametrize("seed", range(20))
def test_random_chains_on_eight_devices(seed: int) -> None:
    stress(seed)


REHEARSED += [(f"chains-{seed}", functools.partial(stress, seed)) for seed in range(3)]


@on_gpu
def test_random_chains_in_threads() -> None:
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(stress, range(100, 103)))  # what a thread raised is raised here


@marked
def test_freed_memory_is_overwritten() -> None:
    """The stress test depends on this."""
    cupy, n = cupy_module(), 1 << 20
    with poison():
        x = cupy.zeros(n, "uint8")
        same = cupy.cuda.MemoryPointer(cupy.cuda.UnownedMemory(x.data.ptr, n, None), 0)
        y = cupy.ndarray((n,), "uint8", same)
        del x
        assert (y.get() == 0xFF).all()


@pytest.mark.skipif(not NO_GPU, reason="there is a GPU: CuPy calls the hook")
def test_the_hook_that_overwrites(monkeypatch: pytest.MonkeyPatch, stubs: None) -> None:
    done: list[Any] = []
    monkeypatch.setattr(cupy_module().cuda.runtime, "memsetAsync", lambda *args: done.append(args), raising=False)
    with poison() as hook:
        hook.malloc_postprocess(device_id=1, size=5, mem_size=512, mem_ptr=4096, pmem_id=1)
        for number in (2, 1, 1):
            hook.free_preprocess(device_id=1, mem_size=512, mem_ptr=4096, pmem_id=number)
    assert done == [(4096, 0xFF, 512, 0)]


@on_gpu
def test_streams_of_the_caller() -> None:
    cupy, n = cupy_module(), small(1 << 22, 64)
    for device in (devices()[0], devices()[-1]):
        with cupy.cuda.Device(gpu_of(device)):
            for stream in (cupy.cuda.Stream(non_blocking=True), cupy.cuda.Stream(), cupy.cuda.Stream.null):
                with stream:
                    hold_up(2000)
                    raw = cupy.arange(n) * 3
                    x = st.device_put(st.asarray(raw), device) + 1  # it enters: after what the caller has queued
                    hold_up(2000, device)
                    back = x.addressable_shards[0].data * 2  # and leaves: what he queues comes after the device's work
                    assert cupy.cuda.get_current_stream().ptr == stream.ptr
                    stream.synchronize()
                    np.testing.assert_array_equal(back.get(), 2 * (3 * np.arange(n) + 1))
                np.testing.assert_array_equal(np.asarray(x), 3 * np.arange(n) + 1)


@on_gpu
def test_mapped_functions_that_use_another_stream() -> None:
    cupy, n = cupy_module(), small(1 << 20, 64)

    def work(a: Any) -> Any:
        stream = cupy.cuda.Stream()
        stream.use()  # and never back
        stream.wait_event(load("cupy").record(st.current_device()))
        hold_up(1000)
        return a + 1

    before = cupy.cuda.Device().id, cupy.cuda.get_current_stream().ptr
    parts = st.pmap(work, st.shard(np.arange(n), devices=devices()))
    np.testing.assert_array_equal(np.asarray(st.unshard(parts) * 2), 2 * (np.arange(n) + 1))
    assert (cupy.cuda.Device().id, cupy.cuda.get_current_stream().ptr) == before


# -- mapped functions ------------------------------------------------------------------------------


@on_gpu
def test_raw_kernels_are_mapped() -> None:
    cupy, n = cupy_module(), small(1 << 20, 64)
    twice = cupy.RawKernel(kernels.TWICE, "twice")
    host = np.arange(n + 3, dtype="float64")

    def work(a: Any) -> Any:
        hold_up(200)
        out = cupy.empty_like(a)
        twice((a.size // 256 + 1,), (256,), (a, out, np.int64(a.size)))
        return out

    parts = st.shard(host, devices=devices())
    for _ in range(3):
        parts = st.pmap(work, parts)
    assert_same(st.unshard(parts), 8 * host, exact=True)


@on_gpu
def test_elementwise_kernels_are_mapped() -> None:
    cupy = cupy_module()
    kernel = cupy.ElementwiseKernel("float64 x, float64 y", "float64 z", "z = x * x + y", "square_and_add")
    x, y = np.arange(1000.0), np.linspace(0, 1, 1000)
    made = st.pmap(kernel, st.shard(x, devices=devices()), st.shard(y, devices=devices()))
    assert_same(st.unshard(made), x * x + y)


@on_gpu
def test_matrix_products_are_mapped() -> None:
    """They are computed by cuBLAS on the stream of each device; all devices of one GPU share its handle."""
    n = small(500, 12)
    random = np.random.default_rng(0)
    a, b = random.integers(-9, 9, (8 * n, n)).astype("float64"), random.integers(-9, 9, (n, n)).astype("float64")
    for _ in range(small(20, 1)):
        parts = st.pmap(lambda x, w: (x @ w) @ w.T, st.shard(a, devices=devices()), b)
        assert_same(st.unshard(parts), a @ b @ b.T, exact=True)


# -- memory ----------------------------------------------------------------------------------------


@on_gpu
def test_out_of_memory_leaves_tensors_usable() -> None:
    cupy, home = cupy_module(), devices()[0]
    x = st.device_put(np.arange(1000.0), home)
    with cupy.cuda.Device(gpu_of(home)) as device:
        pool = cupy.get_default_memory_pool()
        gc.collect()
        device.synchronize()
        pool.free_all_blocks()
        pool.set_limit(size=pool.total_bytes() + (4 << 20))
    try:
        with pytest.raises(st.DeviceMemoryError, match=str(home)) as caught:
            st.ones((64 << 20,), dtype="uint8", device=home)
        assert isinstance(caught.value, MemoryError)
        assert_same(x + 1, np.arange(1000.0) + 1)
        x[:10] = 7
        assert float(x[9]) == 7
    finally:
        with cupy.cuda.Device(gpu_of(home)):
            pool.set_limit(size=0)
    assert st.ones((64 << 20,), dtype="uint8", device=home)[-1].item() == 1


@on_gpu
def test_the_pool_does_not_grow() -> None:
    """Queued work holds memory, so each step waits for the work of the step before."""
    rows = st.NamedSharding(mesh_of((8,), "cupy"), st.P("x"))
    x, y = [st.ones((512, 16), device=rows) for _ in range(2)]
    sizes = []
    for step in range(11 * small(1000, 10)):
        x += y
        x[1:] = 0.5 * (x[1:] + x[:-1])
        x = st.tanh(x - st.mean(x))
        if step % small(1000, 10) >= small(1000, 10) - 2:
            x.block_until_ready()
            sizes.append(pooled())
    used, total = zip(*sizes[1::2], strict=True)
    assert max(used) <= used[0] + 16 * x.nbytes, used
    assert max(total) <= 1.5 * total[0] + (32 << 20), total


@on_gpu
def test_pinned_host_and_back() -> None:
    mesh = mesh_of((8,), "cupy")
    for shape in ((small(1 << 20, 40), 7), (3, 0), (1, 5), (5, 9)):
        right = np.arange(np.prod(shape)).reshape(shape)
        for spec in all_specs(mesh, 2):
            there = st.NamedSharding(mesh, spec, memory_kind="pinned_host")
            x = st.device_put(right, there.with_memory_kind("device"))
            for turn in range(3):
                hold_up(300, devices()[turn])
                away = st.device_put(x * 2, there)
                x = st.device_put(away, there.with_memory_kind("device")) - turn
                np.testing.assert_array_equal(np.asarray(away), 2 * right)
                right = 2 * right - turn
            x[...] = 0
            assert away.sharding.memory_kind == "pinned_host"
            np.testing.assert_array_equal(np.asarray(away + 1), right + 3)
            right = np.arange(np.prod(shape)).reshape(shape)


# -- several GPUs ----------------------------------------------------------------------------------


@on_gpu
def test_copies_between_gpus() -> None:
    right = np.arange(small(1 << 22, 100))
    row = one_on_each_gpu()
    peers = load("cupy")._copier.peers
    for source in row:
        for destination in row:
            for straight in (True, False):
                a, b = gpu_of(source), gpu_of(destination)
                known = peers.reach(a, b)
                peers._known[a, b] = known and straight
                x = st.device_put(right, source)
                hold_up(500, source)
                assert_same(st.device_put(x * 2, destination) + 1, 2 * right + 1)
                peers._known[a, b] = known


@on_gpu
def test_integers_are_summed_by_nccl() -> None:
    row = one_on_each_gpu()
    if not getattr(importlib.import_module("cupy.cuda.nccl"), "available", True):
        pytest.skip("NCCL is not installed")
    backend, arrays = load("cupy"), []
    for k, device in enumerate(row):
        hold_up(300, device)
        with backend.on(device):
            arrays.append(backend.from_host(np.arange(1000) + k, device))
    made = backend.all_reduce(arrays, row, "add")
    assert made is not None
    right = sum(np.arange(1000) + k for k in range(len(row)))
    for array, device in zip(made, row, strict=True):
        with backend.on(device):
            np.testing.assert_array_equal(backend.to_host(array, device), right)
    x = st.device_put(np.arange(10_000).reshape(-1, 100), st.NamedSharding(st.Mesh(row, ("x",)), st.P("x")))
    assert_same(st.sum(x, axis=0), np.arange(10_000).reshape(-1, 100).sum(axis=0))


# -- other libraries -------------------------------------------------------------------------------


def shared_with(theirs: Any, address: Callable[[Any], int], back: Callable[[Any], Any], right: np.ndarray) -> None:
    """Asserts that an imported array is in the same memory, and is copied before it is exported again; that a tensor
    which nothing else holds is exported in the same memory; and that writes are not visible across the border.
    """
    x = st.from_dlpack(theirs)
    assert x.device.backend == "cupy"
    assert x.addressable_shards[0].data.data.ptr == address(theirs)
    assert address(back(x)) != address(theirs)
    y = x + 1
    here = y.addressable_shards[0].data.data.ptr
    out = back(y)
    assert address(out) == here
    copy = y.copy()
    y[:5] = 0
    np.testing.assert_array_equal(np.asarray(copy), right + 1)
    np.testing.assert_array_equal(np.asarray(st.from_dlpack(out)), right + 1)
    np.testing.assert_array_equal(np.asarray(x + 1), right + 1)
    x[:5] = 0
    np.testing.assert_array_equal(np.asarray(st.from_dlpack(theirs)), right)


@on_gpu
def test_cupys_own_arrays_are_shared() -> None:
    cupy = cupy_module()
    theirs = cupy.arange(small(1 << 20, 64)) * 3
    shared_with(theirs, lambda a: a.data.ptr, cupy.from_dlpack, 3 * np.arange(theirs.size))


@marked
def test_torch_shares_memory() -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("PyTorch sees no GPU")
    for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
        with torch.cuda.stream(stream):
            theirs = torch.arange(1 << 20, device="cuda") * 3
            shared_with(theirs, lambda t: t.data_ptr(), torch.from_dlpack, 3 * np.arange(1 << 20))
            y = torch.from_dlpack(st.device_put(np.arange(1 << 20), devices()[0]) * 5)
            assert torch.equal((y + 1).cpu(), 5 * torch.arange(1 << 20) + 1)


@marked
def test_jax_shares_memory() -> None:
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    jax = pytest.importorskip("jax")
    if jax.default_backend() != "gpu":
        pytest.skip("JAX sees no GPU")
    theirs = jax.numpy.arange(1 << 20, dtype="int32") * 3
    shared_with(
        theirs, lambda j: j.unsafe_buffer_pointer(), jax.dlpack.from_dlpack, 3 * np.arange(1 << 20, dtype="int32")
    )


# -- programs --------------------------------------------------------------------------------------


@on_gpu
def test_programs_of_jit_run_as_graphs() -> None:
    """Kernels divided by views and a product: graphs are found, and all results are those of single launches."""
    backend = load("cupy")
    found: list[bool] = []

    def step(x: Any, w: Any, a: Any) -> Any:
        for k in range(5):
            x = (x[:, ::-1] * a + k) * 0.5
        x = x @ w
        for _ in range(4):
            x[1:-1] = 0.5 * (x[:-2] + x[2:])
        return x - x.mean(axis=1, keepdims=True)

    def calls() -> list[np.ndarray]:
        traced, kept = st.jit(lambda x, w, a: step(x, w, a)), []
        x = st.device_put(np.random.default_rng(0).normal(size=(64, 16)).astype("f4"), mesh_rows(devices()))
        w = st.device_put(np.eye(16, dtype="f4"), st.NamedSharding(x.sharding.mesh, st.P()))
        for k in range(small(200, 12)):
            y = traced(x, w, [1.5, 0.5][k % 2])
            if k % 5 == 0:
                kept.append(y)
            x = st.tanh(y) if k % 7 == 0 else x
        return [np.asarray(y) for y in kept]

    find = graphs.Graphs.find
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            graphs.Graphs,
            "find",
            lambda self, *args: (found.append((made := find(self, *args)) is not None), made)[1],
        )
        patch.setattr(backend, "captures", True)
        with_graphs = calls()
        assert any(found), "no launches were captured, or no addresses came again"
        patch.setattr(backend, "captures", False)
        for a, b in zip(with_graphs, calls(), strict=True):
            np.testing.assert_array_equal(a, b)


@marked
@pytest.mark.parametrize("chunk", range(16))
def test_random_programs_of_jit(chunk: int) -> None:
    run_seeds("c", 5000 + 1000 * chunk, 10, "cupy")


REHEARSED.append(("random programs", lambda: run_seeds("c", 5000, 2, "cupy")))


def mesh_rows(devices: list[st.Device]) -> st.NamedSharding:
    """The layout of rows over devices."""
    return st.NamedSharding(st.Mesh(devices, "d"), st.P("d"))


@on_gpu
def test_the_demo_passes() -> None:
    assert cli.main(["demo", "--backend", "cupy", *small([], ["--steps", "2"])]) == 0
    assert cli.main(["info"]) == 0


@marked
def test_the_gpu_is_the_default() -> None:
    code = "import shardtensor as st; print(st.ones(3).sum().item(), st.devices()[0])"
    assert output_of(new_process("-c", code)).split() == ["3.0", "cupy:0"]


@pytest.mark.parametrize("name", ["README.md", "docs/from_cupy.md", "docs/gpus.md"])
def test_the_page_runs(name: str) -> None:
    """The blocks of a page for GPUs, from top to bottom, in a process whose default backend is cupy."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / name).read_text(), re.DOTALL)
    code = "\n".join([block for block in blocks if "import cupy" in block] if name == "README.md" else blocks)
    printed = [f"{line}\n" for line in re.findall(r"# -> (.*)", code)]
    double = "import pytest\nfrom tests import fakecupy, kernels\n"
    double += "kernels.install(pytest.MonkeyPatch(), fakecupy.install(devices=1))\n"
    variables = {"SHARDTENSOR_BACKEND": "cupy"}
    after = "\nassert not fakecupy.races, list(fakecupy.races)\n"
    code = f"{double}{code}{after}" if NO_GPU else code
    assert output_of(new_process("-c", code, **variables)) == "".join(printed)


# -- where there is no GPU -------------------------------------------------------------------------


@pytest.mark.skipif(not NO_GPU, reason="there is a GPU: the tests themselves run")
@pytest.mark.parametrize("test", [test for _, test in REHEARSED], ids=[name for name, _ in REHEARSED])
def test_rehearsal(test: Callable[[], None], stubs: None) -> None:
    test()
