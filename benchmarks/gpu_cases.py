"""The cases of `gpu.py`: operators on a GPU, with shardtensor, bare CuPy, PyTorch and JAX.

A case times itself: it queues its call several times, waits for the GPU once, and returns the seconds per call. A case
that fails returns the traceback as text.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness import Case

MIB = 1 << 20
ONCE = ("used", "total")

SPIN = r"""
extern "C" __global__ void spin(unsigned long long nanoseconds) {
    unsigned long long begin, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(begin));
    do { asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)); } while (now - begin < nanoseconds);
}
"""


@dataclass(frozen=True)
class Sizes:
    """The sizes of all operands; the tests use smaller ones.

    Attributes:
        arrays: the bytes of an operand of operators that are limited by memory bandwidth, one row for each size.
        moved: the bytes of an array that is transferred.
        side: the side of square matrices.
        queued: how often a tiny call is queued before the program waits; large calls are queued a hundredth as often.
        spin: the nanoseconds that a kernel runs without doing any work.
        steps: the steps of the program whose growth of memory is measured, after a tenth as many without measurement.
    """

    arrays: tuple[int, ...] = (256 * MIB, 1024 * MIB)
    moved: int = 256 * MIB
    side: int = 8192
    queued: int = 500
    spin: int = 5_000_000
    steps: int = 10_000

    @property
    def large_calls(self) -> int:
        """How often a large call is queued before the program waits."""
        return max(self.queued // 100, 1)


FULL = Sizes()

SIZES, PLATFORM = "BENCHMARK_SIZES", "BENCHMARK_PLATFORM"
"""The environment variables with which a test has PyTorch and JAX compute on other sizes, and on the CPU."""


def rehearsed(sizes: Sizes) -> dict[str, str]:
    """Returns the environment variables for a rehearsal of PyTorch and JAX on the CPU."""
    return {SIZES: json.dumps(dataclasses.asdict(sizes)), PLATFORM: "cpu"}


def given_sizes() -> Sizes:
    """Returns the sizes that the parent process passed in the environment."""
    sizes = json.loads(os.environ.get(SIZES, "{}"))
    return Sizes(**{name: tuple(size) if isinstance(size, list) else size for name, size in sizes.items()})


ENOUGH, MOST = 10e-3, 50
"""The seconds of queued work beside which the first launch and the wait take little time, and the most calls."""


def timed(call: Case, calls: int, wait: Callable[[], None]) -> float:
    """Returns the seconds per call, for ``calls`` queued calls or more, and one wait."""
    call()  # the first call compiles and fills the memory pools
    wait()
    begin = time.perf_counter()
    call()
    wait()
    calls = max(calls, min(int(ENOUGH / (time.perf_counter() - begin)), MOST))
    begin = time.perf_counter()
    for _ in range(calls):
        last = call()
    wait()
    seconds = (time.perf_counter() - begin) / calls
    del last
    return seconds


def guarded(cases: Mapping[str, Case]) -> dict[str, Case]:
    """Returns the cases such that one that fails returns its traceback: the others can still be measured."""

    def guard(case: Case) -> Case:
        def run() -> Any:
            try:
                return case()
            except Exception:
                return traceback.format_exc()

        return run

    return {name: guard(case) for name, case in cases.items()}


# -- what every library computes -------------------------------------------------------------------


def ten_functions(xp: Any, x: Any, y: Any) -> Any:
    """Returns a chain of ten elementwise functions of arrays."""
    z = xp.sin(x) * y + xp.exp(x - y)
    return xp.sqrt(z * z + x * x) - y * xp.tanh(x)


def training_data(side: int) -> tuple[Any, Any, list[Any]]:
    """Returns the inputs, the targets and the two weights of `training_step`, as host arrays."""
    import numpy as np

    rng, hidden = np.random.default_rng(0), max(side // 8, 1)
    shapes = ((side, hidden), (side, 1), (hidden, hidden), (hidden, 1))
    x, target, *weights = [rng.normal(size=shape).astype("float32") / hidden**0.5 for shape in shapes]
    return x, target, weights


def training_step(xp: Any, x: Any, target: Any, first: Any, second: Any) -> tuple[Any, Any]:
    """Returns the weights of a network of two layers after a step of gradient descent on the squared error."""
    hidden = xp.tanh(x @ first)
    error = (hidden @ second - target) * (2 / target.shape[0])
    back = (error @ second.T) * (1 - hidden * hidden)
    return first - 0.1 * (x.T @ back), second - 0.1 * (hidden.T @ error)


def six_kernels(x: Any) -> Any:
    """Returns the result of six kernels: a view ends each."""
    for k in range(6):
        x = x[::-1] * 0.5 + k
    return x


# -- the cases, each function in a process of its own ----------------------------------------------


def logical_counts() -> list[int]:
    """Returns the numbers of logical devices that the parent process passed in the environment."""
    return [int(n) for n in os.environ.get("BENCHMARK_LOGICAL", "1,2,8").split(",")]


def synchronize_all(cupy: Any) -> None:
    """Waits for every stream of every GPU."""
    for gpu in range(cupy.cuda.runtime.getDeviceCount()):
        cupy.cuda.Device(gpu).synchronize()


def fitting(cupy: Any, sizes: Sizes) -> list[int]:
    """Returns the sizes of arrays for which the GPU has enough memory, with those of the other workers."""
    total = cupy.cuda.Device(0).mem_info[1]
    return [nbytes for nbytes in sizes.arrays if 32 * nbytes <= total]


def shardtensor_cases(sizes: Sizes = FULL) -> dict[str, Case]:
    """Returns the cases of shardtensor, eager, on the cupy backend."""
    import cupy
    import numpy as np

    import shardtensor as st
    from shardtensor.backend.registry import load

    devices = st.devices("cupy")
    wait = functools.partial(synchronize_all, cupy)
    spin = cupy.RawKernel(SPIN, "spin")
    most = max(logical_counts())

    def split(n: int, *axes: str | None) -> st.NamedSharding:
        return st.NamedSharding(st.make_mesh((n,), ("d",), devices=devices[:n]), st.P(*axes))

    @functools.lru_cache(1)  # the operands of one case only, because they are large
    def pair(nbytes: int, n: int) -> tuple[Any, Any]:
        return st.ones((nbytes // 4,), dtype="float32", device=split(n, "d")), st.ones(
            (nbytes // 4,), dtype="float32", device=split(n, "d")
        )

    @functools.lru_cache(1)
    def matrices(dtype: Any, n: int) -> tuple[Any, Any]:
        shape = (sizes.side, sizes.side)
        return st.ones(shape, dtype=dtype, device=split(n, "d")), st.ones(shape, dtype=dtype, device=split(n))

    @functools.lru_cache(1)
    def moved(device: Any) -> Any:
        return st.ones((sizes.moved // 4 // 1024, 1024), dtype="float32", device=device)

    def time_large(call: Case) -> float:
        return timed(call, sizes.large_calls, wait)

    def dispatch(n: int) -> float:
        x, y = [st.ones((32,), dtype="float32", device=split(n, "d")) for _ in range(2)]
        return timed(lambda: x + y, sizes.queued, wait)

    def kernels(n: int) -> float:
        parts = st.shard(np.zeros(n), devices=devices[:n])
        return time_large(lambda: st.pmap(lambda a: spin((1,), (1,), (np.uint64(sizes.spin),)), parts))

    def add(nbytes: int, n: int) -> float:
        x, y = pair(nbytes, n)
        return time_large(lambda: x + y)

    def total(nbytes: int, n: int) -> float:
        x, _ = pair(nbytes, n)
        return time_large(x.sum)

    def matmul(dtype: Any, n: int) -> float:
        a, b = matrices(dtype, n)
        return time_large(lambda: a @ b)

    def move(source: st.Device, destination: st.Device) -> float:
        x = moved(source)
        return time_large(lambda: st.device_put(x, destination))

    def offload() -> float:
        x = moved(split(1))
        return time_large(lambda: st.device_put(x, x.sharding.with_memory_kind("pinned_host")))

    def onload() -> float:
        offloaded = st.device_put(moved(split(1)), split(1).with_memory_kind("pinned_host"))
        return time_large(lambda: st.device_put(offloaded, split(1)))

    def beside() -> float:
        x, (a, b) = moved(split(1)), matrices("float32", 1)

        def both() -> tuple[Any, Any]:
            offloaded = st.device_put(x, x.sharding.with_memory_kind("pinned_host"))
            return offloaded, a @ b

        return time_large(both)

    def reshard(n: int) -> float:
        x, columns = moved(split(n, "d")), split(n, None, "d")
        return time_large(lambda: st.reshard(x, columns))

    def chain(n: int) -> float:
        parts = st.shard(np.zeros(32 * n, "float32"), devices=devices[:n])

        def three() -> Any:
            made = parts
            for _ in range(3):
                made = st.pmap(lambda a: a + 1, made)
            return made

        return timed(three, sizes.queued, wait)

    def psum(n: int) -> float:
        parts = st.shard(np.zeros(32 * n, "float32"), devices=devices[:n])
        return timed(lambda: st.pmap(lambda a: st.psum(a, "i"), parts, axis_name="i"), max(sizes.queued // 10, 1), wait)

    def sort(nbytes: int, n: int) -> float:
        x = st.random.uniform(st.random.key(0), (nbytes // 4,), dtype="float32", device=split(n, "d"))
        return time_large(lambda: st.sort(x))

    def random(nbytes: int, n: int) -> float:
        key, where = st.random.key(0), split(n, "d")
        return time_large(lambda: st.random.uniform(key, (nbytes // 4,), dtype="float32", device=where))

    def fft(nbytes: int, n: int) -> float:
        x = st.ones((max(nbytes // 8 // 1024, 1), 1024), dtype="complex64", device=split(n, "d"))
        return time_large(lambda: st.fft.fft(x))

    def fused(nbytes: int, n: int) -> float:
        x, y = pair(nbytes, n)
        function = st.jit(functools.partial(ten_functions, st))
        return time_large(lambda: function(x, y))

    def train(n: int) -> float:
        x, target, weights = training_data(sizes.side)
        x, target = [st.device_put(a, split(n, "d")) for a in (x, target)]
        weights = [st.device_put(w, split(n)) for w in weights]
        step = st.jit(functools.partial(training_step, st))
        return time_large(lambda: step(x, target, *weights))

    def views(n: int) -> float:
        x, step = st.ones((32 * n, 2), dtype="float32", device=split(n, "d")), st.jit(six_kernels)
        return timed(lambda: step(x), sizes.queued, wait)

    def singly(case: Callable[[int], float], n: int) -> float:
        """Measures a case without CUDA graphs."""
        backend = load("cupy")
        captures, backend.captures = backend.captures, False
        try:
            return case(n)
        finally:
            backend.captures = captures

    def upload() -> float:
        host, where = np.ones((sizes.moved // 4 // 1024, 1024), "float32"), split(1)
        return time_large(lambda: st.device_put(host, where))

    def download() -> float:
        x = moved(split(1))
        return time_large(lambda: np.asarray(x + 0))

    cases: dict[str, Case] = {"machine": lambda: describe_gpus(cupy)}
    for n in logical_counts():
        cases |= {f"dispatch@{n}": functools.partial(dispatch, n), f"spin@{n}": functools.partial(kernels, n)}
        cases |= {f"add{b}@{n}": functools.partial(add, b, n) for b in fitting(cupy, sizes)}
        cases |= {f"sum{b}@{n}": functools.partial(total, b, n) for b in fitting(cupy, sizes)}
        cases |= {f"matmul{d}@{n}": functools.partial(matmul, d, n) for d in ("float32", "float16")}
        for name, case in (("sort", sort), ("random", random), ("fft", fft), ("fused", fused)):
            cases |= {f"{name}{b}@{n}": functools.partial(case, b, n) for b in fitting(cupy, sizes)[:1]}
        for name, short in (("chain", chain), ("psum", psum), ("train", train), ("views", views)):
            cases[f"{name}@{n}"] = functools.partial(short, n)
        for name, short in (("train", train), ("views", views)):
            cases[f"{name}singly@{n}"] = functools.partial(singly, short, n)
    cases["matmulbfloat16@1"] = functools.partial(matmul, st.bfloat16, 1)
    gpu = functools.partial(_gpu_of, st)
    if most > 1 and gpu(devices[0]) == gpu(devices[1]):
        cases["copy"] = functools.partial(move, devices[0], devices[1])
    if gpu(devices[0]) != gpu(devices[-1]):
        cases["peer"] = functools.partial(move, devices[0], devices[-1])
    if most > 1:
        cases[f"reshard@{most}"] = functools.partial(reshard, most)
    cases |= {"offload": offload, "onload": onload, "beside": beside, "upload": upload, "download": download}
    cases["growth"] = lambda: growth(cupy, st, split(most, "d"), sizes.steps)
    return guarded(cases)


def _gpu_of(st: Any, device: Any) -> int:
    """Returns the number of a logical device's GPU."""
    return int(st.zeros((1,), device=device).__dlpack_device__()[1])


def growth(cupy: Any, st: Any, rows: Any, steps: int) -> dict[str, float]:
    """Returns the growth in MiB of the memory in use and of the memory pool while a program repeats ``steps`` steps."""
    x, y = st.ones((4096, 16), dtype="float32", device=rows), st.ones((4096, 16), dtype="float32", device=rows)

    def step() -> None:
        nonlocal x
        x += y
        x[1:] = 0.5 * (x[1:] + x[:-1])
        x = st.tanh(x - st.mean(x))

    def held() -> tuple[int, int]:
        synchronize_all(cupy)
        step()  # an operator releases memory whose work is done, so one more step releases that of the steps before
        synchronize_all(cupy)
        pool, used, total = cupy.get_default_memory_pool(), 0, 0
        for gpu in range(cupy.cuda.runtime.getDeviceCount()):
            with cupy.cuda.Device(gpu):
                used, total = used + pool.used_bytes(), total + pool.total_bytes()
        return used, total

    for _ in range(max(steps // 10, 1)):
        step()
    before = held()
    for _ in range(steps):
        step()
    return dict(zip(ONCE, [(b - a) / MIB for a, b in zip(before, held(), strict=True)], strict=True))


def describe_gpus(cupy: Any) -> dict[str, str]:
    """Returns the names and memories of the GPUs, and the versions of the driver, CUDA and CuPy."""
    runtime = cupy.cuda.runtime
    gpus = []
    for gpu in range(runtime.getDeviceCount()):
        properties = runtime.getDeviceProperties(gpu)
        name = properties["name"].decode() if isinstance(properties["name"], bytes) else properties["name"]
        gpus.append(f"{name}, {properties['totalGlobalMem'] / 2**30:.0f} GiB")
    driver, cuda = [f"{v // 1000}.{v % 1000 // 10}" for v in (runtime.driverGetVersion(), runtime.runtimeGetVersion())]
    return {"GPU": "; ".join(gpus), "driver": f"for CUDA up to {driver}", "CUDA": cuda, "CuPy": cupy.__version__}


def cupy_cases(sizes: Sizes = FULL) -> dict[str, Case]:
    """Returns the cases of CuPy on the first GPU: one array and one stream, or one stream per logical device."""
    import cupy
    import cupyx
    import numpy as np

    wait = functools.partial(synchronize_all, cupy)
    spin = cupy.RawKernel(SPIN, "spin")
    streams = [cupy.cuda.Stream() for _ in range(max(logical_counts()))]

    @functools.lru_cache(1)
    def pair(nbytes: int) -> tuple[Any, Any]:
        return cupy.ones(nbytes // 4, "float32"), cupy.ones(nbytes // 4, "float32")

    @functools.lru_cache(1)
    def matrices(dtype: str) -> tuple[Any, Any]:
        return cupy.ones((sizes.side, sizes.side), dtype), cupy.ones((sizes.side, sizes.side), dtype)

    @functools.lru_cache(1)
    def moved() -> Any:
        return cupy.ones((sizes.moved // 4 // 1024, 1024), "float32")

    @functools.lru_cache(1)
    def pinned() -> Any:
        return cupyx.empty_pinned((sizes.moved // 4 // 1024, 1024), "float32")

    def time_large(call: Case) -> float:
        return timed(call, sizes.large_calls, wait)

    def dispatch(n: int) -> float:
        pairs = []
        for stream in streams[:n]:
            with stream:
                pairs.append((stream, cupy.ones(32 // n or 1, "float32"), cupy.ones(32 // n or 1, "float32")))
        _, x, y = pairs[0]

        def loop() -> list[Any]:
            results = []
            for stream, x, y in pairs:
                with stream:
                    results.append(x + y)
            return results

        return timed(loop if n > 1 else lambda: x + y, sizes.queued, wait)

    def kernels(n: int) -> float:
        def loop() -> None:
            for _ in range(n):  # The logical devices of a GPU share a stream.
                spin((1,), (1,), (np.uint64(sizes.spin),))

        with streams[0]:
            return time_large(loop)

    def add(nbytes: int) -> float:
        x, y = pair(nbytes)
        return time_large(lambda: x + y)

    def total(nbytes: int) -> float:
        x, _ = pair(nbytes)
        return time_large(x.sum)

    def matmul(dtype: str) -> float:
        a, b = matrices(dtype)
        return time_large(lambda: a @ b)

    def chain(n: int) -> float:
        parts = [cupy.zeros(32, "float32") for _ in range(n)]

        def three() -> Any:
            made = parts
            for _ in range(3):
                made = [a + 1 for a in made]
            return made

        return timed(three, sizes.queued, wait)

    def psum(n: int) -> float:
        parts = cupy.zeros((n, 32), "float32")
        return timed(lambda: parts.sum(axis=0), max(sizes.queued // 10, 1), wait)

    def sort(nbytes: int) -> float:
        x = cupy.random.random(nbytes // 4, dtype="float32")
        return time_large(lambda: cupy.sort(x))

    def random(nbytes: int) -> float:
        return time_large(lambda: cupy.random.random(nbytes // 4, dtype="float32"))

    def fft(nbytes: int) -> float:
        x = cupy.ones((max(nbytes // 8 // 1024, 1), 1024), "complex64")
        return time_large(lambda: cupy.fft.fft(x))

    def fused(nbytes: int) -> float:
        x, y = pair(nbytes)

        @cupy.fuse
        def function(x: Any, y: Any) -> Any:
            return ten_functions(cupy, x, y)

        return time_large(lambda: function(x, y))

    def train() -> float:
        x, target, weights = training_data(sizes.side)
        arrays = list(map(cupy.asarray, (x, target, *weights)))
        return time_large(lambda: training_step(cupy, *arrays))

    def views(n: int) -> float:
        x = cupy.ones((32 * n, 2), "float32")
        return timed(lambda: six_kernels(x), sizes.queued, wait)

    def upload() -> float:
        host = np.ones((sizes.moved // 4 // 1024, 1024), "float32")
        return time_large(lambda: cupy.asarray(host))

    def download() -> float:
        x = moved()
        return time_large(lambda: (x + 0).get())

    def copy(gpu: int) -> float:
        x = moved()
        wait()

        def one() -> Any:
            with cupy.cuda.Device(gpu):
                out = cupy.empty(x.shape, x.dtype)
                out.data.copy_from_device_async(x.data, x.nbytes)
            return out

        return time_large(one)

    def off(stream: Any) -> None:
        x = moved()
        x.data.copy_to_host_async(pinned().ctypes.data, x.nbytes, stream)

    def on(stream: Any) -> Any:
        with stream:
            out = cupy.empty(moved().shape, "float32")
            out.data.copy_from_host_async(pinned().ctypes.data, out.nbytes, stream)
        return out

    def beside() -> float:
        a, b = matrices("float32")
        moved(), pinned(), wait()

        def both() -> Any:
            off(streams[-1])
            with streams[0]:
                return a @ b

        return time_large(both)

    cases: dict[str, Case] = {}
    for n in logical_counts():
        cases |= {f"dispatch@{n}": functools.partial(dispatch, n), f"spin@{n}": functools.partial(kernels, n)}
        cases |= {f"add{b}@{n}": functools.partial(add, b) for b in fitting(cupy, sizes)}
        cases |= {f"sum{b}@{n}": functools.partial(total, b) for b in fitting(cupy, sizes)}
        cases |= {f"matmul{d}@{n}": functools.partial(matmul, d) for d in ("float32", "float16")}
        cases |= {f"reshard@{n}": functools.partial(copy, 0), f"train@{n}": train, f"trainsingly@{n}": train}
        cases |= {f"{name}@{n}": functools.partial(views, n) for name in ("views", "viewssingly")}
        cases |= {f"chain@{n}": functools.partial(chain, n), f"psum@{n}": functools.partial(psum, n)}
        for name, case in (("sort", sort), ("random", random), ("fft", fft), ("fused", fused)):
            cases |= {f"{name}{b}@{n}": functools.partial(case, b) for b in fitting(cupy, sizes)[:1]}
    cases |= {"copy": functools.partial(copy, 0), "beside": beside, "upload": upload, "download": download}
    if (last := cupy.cuda.runtime.getDeviceCount() - 1) > 0:
        cases["peer"] = functools.partial(copy, last)
    cases |= {
        "offload": lambda: time_large(lambda: off(streams[0])),
        "onload": lambda: time_large(lambda: on(streams[0])),
    }
    return guarded(cases)


def copy_cases(sizes: Sizes = FULL) -> dict[str, Case]:
    """Returns the cases of the first GPU's own copy, which moves as many bytes as the operators of the rows."""
    import cupy

    wait = functools.partial(synchronize_all, cupy)

    def moved(nbytes: int) -> float:
        """Times a copy that reads half of so many bytes, and writes the other half."""
        source, out = [cupy.ones(nbytes // 2, "uint8") for _ in range(2)]
        stream = cupy.cuda.get_current_stream()
        return timed(lambda: out.data.copy_from_device_async(source.data, out.nbytes, stream), sizes.large_calls, wait)

    cases: dict[str, Case] = {}
    for n in logical_counts():
        for k, b in enumerate(fitting(cupy, sizes)):
            arrays = {"add": 3, "sum": 1} | ({} if k else {"fused": 3, "random": 1, "fft": 2})
            cases |= {f"{name}{b}@{n}": functools.partial(moved, count * b) for name, count in arrays.items()}
    return guarded(cases)


def torch_cases() -> dict[str, Case]:
    """Returns the cases of PyTorch, eager, on one array, or with one stream per logical device."""
    import torch

    sizes, device = given_sizes(), os.environ.get(PLATFORM, "cuda")
    if device == "cuda" and not torch.cuda.is_available():
        return {}
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    ones = functools.partial(torch.ones, device=device)
    streams = [torch.cuda.Stream() if device == "cuda" else None for _ in range(max(logical_counts()))]

    def time_large(call: Case) -> float:
        return timed(call, sizes.large_calls, wait)

    def dispatch(n: int) -> float:
        pairs = [(stream, ones(32 // n or 1), ones(32 // n or 1)) for stream in streams[:n]]

        def loop() -> list[Any]:
            results = []
            for stream, x, y in pairs:
                with torch.cuda.stream(stream) if stream is not None else contextlib.nullcontext():
                    results.append(x + y)
            return results

        _, x, y = pairs[0]
        return timed(loop if n > 1 else lambda: x + y, sizes.queued, wait)

    def add(nbytes: int) -> float:
        x, y = ones(nbytes // 4), ones(nbytes // 4)
        return time_large(lambda: x + y)

    def total(nbytes: int) -> float:
        return time_large(ones(nbytes // 4).sum)

    def matmul(dtype: str) -> float:
        a = ones((sizes.side, sizes.side), dtype=getattr(torch, dtype))
        return time_large(lambda: a @ a)

    def tf32() -> float:
        a, before = ones((sizes.side, sizes.side)), torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("high")
        try:
            return time_large(lambda: a @ a)
        finally:
            torch.set_float32_matmul_precision(before)

    def sort(nbytes: int) -> float:
        x = torch.rand(nbytes // 4, device=device)
        return time_large(lambda: torch.sort(x).values)

    def random(nbytes: int) -> float:
        return time_large(lambda: torch.rand(nbytes // 4, device=device))

    def fft(nbytes: int) -> float:
        x = torch.ones((max(nbytes // 8 // 1024, 1), 1024), dtype=torch.complex64, device=device)
        return time_large(lambda: torch.fft.fft(x))

    def fused(nbytes: int) -> float:
        x, y = ones(nbytes // 4), ones(nbytes // 4)
        return time_large(lambda: ten_functions(torch, x, y))

    def train() -> float:
        x, target, weights = training_data(sizes.side)
        arrays = [torch.from_numpy(a).to(device) for a in (x, target, *weights)]
        return time_large(lambda: training_step(torch, *arrays))

    cases = _common_cases(sizes, dispatch, add, total, matmul) | {"matmultf32@1": tf32, "train@1": train}
    cases["matmulbfloat16@1"] = functools.partial(matmul, "bfloat16")
    for name, case in (("sort", sort), ("random", random), ("fft", fft), ("fused", fused)):
        cases |= {f"{name}{b}@1": functools.partial(case, b) for b in sizes.arrays[:1]}
    return guarded(cases)


def jax_cases() -> dict[str, Case]:
    """Returns the cases of JAX on one GPU, compiled, except for the tiny sums.

    Products of float32 matrices are computed in float32; JAX's default on GPUs is TF32.
    """
    import jax

    sizes = given_sizes()
    if jax.default_backend() != os.environ.get(PLATFORM, "gpu"):
        return {}
    jax.config.update("jax_default_matmul_precision", "highest")
    ones = jax.numpy.ones
    last: list[Any] = []

    def time_calls(function: Any, operands: Sequence[Any], calls: int = sizes.large_calls) -> float:
        def call() -> None:
            last[:] = [function(*operands)]

        return timed(call, calls, lambda: jax.block_until_ready(last))

    def dispatch(n: int) -> float:
        return time_calls(lambda x, y: x + y, (ones(32), ones(32)), sizes.queued)

    def jitted() -> float:
        return time_calls(jax.jit(lambda x, y: x + y), (ones(32), ones(32)), sizes.queued)

    def add(nbytes: int) -> float:
        return time_calls(jax.jit(lambda x, y: x + y), (ones(nbytes // 4), ones(nbytes // 4)))

    def total(nbytes: int) -> float:
        return time_calls(jax.jit(lambda x: x.sum()), (ones(nbytes // 4),))

    def matmul(dtype: str) -> float:
        a = ones((sizes.side, sizes.side), dtype)
        return time_calls(jax.jit(lambda a, b: a @ b), (a, a))

    def tf32() -> float:
        a = ones((sizes.side, sizes.side))
        return time_calls(jax.jit(lambda a, b: jax.numpy.matmul(a, b, precision="tensorfloat32")), (a, a))

    def sort(nbytes: int) -> float:
        return time_calls(jax.jit(jax.numpy.sort), (jax.random.uniform(jax.random.key(0), (nbytes // 4,)),))

    def random(nbytes: int) -> float:
        return time_calls(jax.jit(lambda key: jax.random.uniform(key, (nbytes // 4,))), (jax.random.key(0),))

    def fft(nbytes: int) -> float:
        return time_calls(jax.jit(jax.numpy.fft.fft), (ones((max(nbytes // 8 // 1024, 1), 1024), "complex64"),))

    def fused(nbytes: int) -> float:
        operands = (ones(nbytes // 4), ones(nbytes // 4))
        return time_calls(jax.jit(functools.partial(ten_functions, jax.numpy)), operands)

    def train() -> float:
        x, target, weights = training_data(sizes.side)
        operands = list(map(jax.numpy.asarray, (x, target, *weights)))
        return time_calls(jax.jit(functools.partial(training_step, jax.numpy)), operands)

    common = _common_cases(sizes, dispatch, add, total, matmul)
    cases = {name: case for name, case in common.items() if name.endswith("@1")}
    cases |= {"jitted@1": jitted, "matmultf32@1": tf32, "train@1": train}
    cases["matmulbfloat16@1"] = functools.partial(matmul, "bfloat16")
    for name, case in (("sort", sort), ("random", random), ("fft", fft), ("fused", fused)):
        cases |= {f"{name}{b}@1": functools.partial(case, b) for b in sizes.arrays[:1]}
    return guarded(cases)


def _common_cases(sizes: Sizes, dispatch: Any, add: Any, total: Any, matmul: Any) -> dict[str, Case]:
    """Returns the cases that every library has; those on one array belong to the rows of one logical device."""
    cases: dict[str, Case] = {f"dispatch@{n}": functools.partial(dispatch, n) for n in logical_counts()}
    for nbytes in sizes.arrays:
        cases |= {f"add{nbytes}@1": functools.partial(add, nbytes), f"sum{nbytes}@1": functools.partial(total, nbytes)}
    return cases | {f"matmul{d}@1": functools.partial(matmul, d) for d in ("float32", "float16")}
