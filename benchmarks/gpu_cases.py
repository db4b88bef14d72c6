"""The cases of `gpu.py`: what is measured on a GPU, with this library, with bare CuPy, with PyTorch and with JAX.

A case measures itself: it queues its call some times, waits for the GPU once, and gives the seconds per call; where it
fails, it gives the traceback.
"""

from __future__ import annotations

import contextlib
import functools
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
    """How large everything is. Tests take less.

    Attributes:
        arrays: bytes of the operands of what is bound by bandwidth.
        moved: bytes of what is moved.
        side: of the square matrices.
        queued: how often a tiny call is queued before it is waited for; large ones are queued a hundredth as often.
        spin: nanoseconds that a kernel runs which only waits.
        steps: of the program whose memory is watched; a tenth of them go before.
    """

    arrays: tuple[int, ...] = (256 * MIB, 1024 * MIB)
    moved: int = 256 * MIB
    side: int = 8192
    queued: int = 500
    spin: int = 5_000_000
    steps: int = 10_000

    @property
    def few(self) -> int:
        """How often a large call is queued."""
        return max(self.queued // 100, 1)


FULL = Sizes()


def timed(call: Case, calls: int, wait: Callable[[], None]) -> float:
    """Seconds per call, queued so many times and waited for once."""
    call()  # the first one compiles, and fills the pools
    wait()
    started = time.perf_counter()
    for _ in range(calls):
        last = call()
    wait()
    seconds = (time.perf_counter() - started) / calls
    del last
    return seconds


def guarded(cases: Mapping[str, Case]) -> dict[str, Case]:
    """The same, which give the traceback as text where they fail: the others can still be measured."""

    def guard(case: Case) -> Case:
        def run() -> Any:
            try:
                return case()
            except Exception:
                return traceback.format_exc()

        return run

    return {name: guard(case) for name, case in cases.items()}


# -- the cases, each function in a process of its own ----------------------------------------------


def counts() -> list[int]:
    """The numbers of logical devices, as the parent has said."""
    return [int(n) for n in os.environ.get("BENCHMARK_LOGICAL", "1,2,8").split(",")]


def all_gpus_done(cupy: Any) -> None:
    """Waits for every stream of every GPU."""
    for gpu in range(cupy.cuda.runtime.getDeviceCount()):
        cupy.cuda.Device(gpu).synchronize()


def fitting(cupy: Any, sizes: Sizes) -> list[int]:
    """Of the sizes of arrays those for which the GPU has room, others who measure included."""
    total = cupy.cuda.Device(0).mem_info[1]
    return [nbytes for nbytes in sizes.arrays if 32 * nbytes <= total]


def shardtensor_cases(sizes: Sizes = FULL) -> dict[str, Case]:
    """The library itself, eager, on the cupy backend."""
    import cupy
    import numpy as np

    import shardtensor as st

    devices = st.devices("cupy")
    wait = functools.partial(all_gpus_done, cupy)
    spin = cupy.RawKernel(SPIN, "spin")
    most = max(counts())

    def split(n: int, *axes: str | None) -> st.NamedSharding:
        return st.NamedSharding(st.make_mesh((n,), ("d",), devices=devices[:n]), st.P(*axes))

    @functools.lru_cache(1)  # large ones are not kept
    def pair(nbytes: int, n: int) -> tuple[Any, Any]:
        return st.ones((nbytes // 4,), dtype="float32", device=split(n, "d")), st.ones(
            (nbytes // 4,), dtype="float32", device=split(n, "d")
        )

    @functools.lru_cache(1)
    def matrices(dtype: str, n: int) -> tuple[Any, Any]:
        shape = (sizes.side, sizes.side)
        return st.ones(shape, dtype=dtype, device=split(n, "d")), st.ones(shape, dtype=dtype, device=split(n))

    @functools.lru_cache(1)
    def moved(place: Any) -> Any:
        return st.ones((sizes.moved // 4 // 1024, 1024), dtype="float32", device=place)

    def few(call: Case) -> float:
        return timed(call, sizes.few, wait)

    def dispatch(n: int) -> float:
        x, y = [st.ones((32,), dtype="float32", device=split(n, "d")) for _ in range(2)]
        return timed(lambda: x + y, sizes.queued, wait)

    def kernels(n: int) -> float:
        parts = st.shard(np.zeros(n), devices=devices[:n])
        return few(lambda: st.pmap(lambda a: spin((1,), (1,), (np.uint64(sizes.spin),)), parts))

    def add(nbytes: int, n: int) -> float:
        x, y = pair(nbytes, n)
        return few(lambda: x + y)

    def total(nbytes: int, n: int) -> float:
        x, _ = pair(nbytes, n)
        return few(x.sum)

    def matmul(dtype: str, n: int) -> float:
        a, b = matrices(dtype, n)
        return few(lambda: a @ b)

    def move(source: st.Device, destination: st.Device) -> float:
        x = moved(source)
        return few(lambda: st.device_put(x, destination))

    def offload() -> float:
        x = moved(split(1))
        return few(lambda: st.device_put(x, x.sharding.with_memory_kind("pinned_host")))

    def onload() -> float:
        away = st.device_put(moved(split(1)), split(1).with_memory_kind("pinned_host"))
        return few(lambda: st.device_put(away, split(1)))

    def beside() -> float:
        x, (a, b) = moved(split(1)), matrices("float32", 1)

        def both() -> tuple[Any, Any]:
            away = st.device_put(x, x.sharding.with_memory_kind("pinned_host"))
            return away, a @ b

        return few(both)

    def reshard(n: int) -> float:
        x, columns = moved(split(n, "d")), split(n, None, "d")
        return few(lambda: st.reshard(x, columns))

    cases: dict[str, Case] = {"machine": lambda: machine(cupy)}
    for n in counts():
        cases |= {f"dispatch@{n}": functools.partial(dispatch, n), f"spin@{n}": functools.partial(kernels, n)}
        cases |= {f"add{b}@{n}": functools.partial(add, b, n) for b in fitting(cupy, sizes)}
        cases |= {f"sum{b}@{n}": functools.partial(total, b, n) for b in fitting(cupy, sizes)}
        cases |= {f"matmul{d}@{n}": functools.partial(matmul, d, n) for d in ("float32", "float16")}
    gpu = functools.partial(_gpu_of, st)
    if most > 1 and gpu(devices[0]) == gpu(devices[1]):
        cases["copy"] = functools.partial(move, devices[0], devices[1])
    if gpu(devices[0]) != gpu(devices[-1]):
        cases["peer"] = functools.partial(move, devices[0], devices[-1])
    if most > 1:
        cases[f"reshard@{most}"] = functools.partial(reshard, most)
    cases |= {"offload": offload, "onload": onload, "beside": beside}
    cases["growth"] = lambda: growth(cupy, st, split(most, "d"), sizes.steps)
    return guarded(cases)


def _gpu_of(st: Any, device: Any) -> int:
    """The number of the GPU that a logical device is on."""
    return int(st.zeros((1,), device=device).__dlpack_device__()[1])


def growth(cupy: Any, st: Any, rows: Any, steps: int) -> dict[str, float]:
    """By how many MiB the memory in use and the pool grow while a program repeats itself."""
    x, y = st.ones((4096, 16), dtype="float32", device=rows), st.ones((4096, 16), dtype="float32", device=rows)

    def step() -> None:
        nonlocal x
        x += y
        x[1:] = 0.5 * (x[1:] + x[:-1])
        x = st.tanh(x - st.mean(x))

    def held() -> tuple[int, int]:
        all_gpus_done(cupy)
        step()  # what has been waited for is let go of by the next ones
        all_gpus_done(cupy)
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


def machine(cupy: Any) -> dict[str, str]:
    """The GPUs, and what drives them."""
    runtime = cupy.cuda.runtime
    gpus = []
    for gpu in range(runtime.getDeviceCount()):
        about = runtime.getDeviceProperties(gpu)
        name = about["name"].decode() if isinstance(about["name"], bytes) else about["name"]
        gpus.append(f"{name}, {about['totalGlobalMem'] / 2**30:.0f} GiB")
    driver, cuda = [f"{v // 1000}.{v % 1000 // 10}" for v in (runtime.driverGetVersion(), runtime.runtimeGetVersion())]
    return {"GPU": "; ".join(gpus), "driver": f"for CUDA up to {driver}", "CUDA": cuda, "CuPy": cupy.__version__}


def cupy_cases(sizes: Sizes = FULL) -> dict[str, Case]:
    """CuPy alone: one array, one stream, or as many as there are logical devices on the first GPU."""
    import cupy
    import cupyx
    import numpy as np

    wait = functools.partial(all_gpus_done, cupy)
    spin = cupy.RawKernel(SPIN, "spin")
    streams = [cupy.cuda.Stream() for _ in range(max(counts()))]

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

    def few(call: Case) -> float:
        return timed(call, sizes.few, wait)

    def dispatch(n: int) -> float:
        pairs = []
        for stream in streams[:n]:
            with stream:
                pairs.append((stream, cupy.ones(32 // n or 1, "float32"), cupy.ones(32 // n or 1, "float32")))
        _, x, y = pairs[0]

        def loop() -> list[Any]:
            made = []
            for stream, x, y in pairs:
                with stream:
                    made.append(x + y)
            return made

        return timed(loop if n > 1 else lambda: x + y, sizes.queued, wait)

    def kernel() -> float:
        with streams[0]:
            return few(lambda: spin((1,), (1,), (np.uint64(sizes.spin),)))

    def add(nbytes: int) -> float:
        x, y = pair(nbytes)
        return few(lambda: x + y)

    def total(nbytes: int) -> float:
        x, _ = pair(nbytes)
        return few(x.sum)

    def matmul(dtype: str) -> float:
        a, b = matrices(dtype)
        return few(lambda: a @ b)

    def copy(gpu: int) -> float:
        x = moved()
        wait()

        def one() -> Any:
            with cupy.cuda.Device(gpu):
                out = cupy.empty(x.shape, x.dtype)
                out.data.copy_from_device_async(x.data, x.nbytes)
            return out

        return few(one)

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

        return few(both)

    cases: dict[str, Case] = {}
    for n in counts():
        cases |= {f"dispatch@{n}": functools.partial(dispatch, n), f"spin@{n}": kernel}
        cases |= {f"add{b}@{n}": functools.partial(add, b) for b in fitting(cupy, sizes)}
        cases |= {f"sum{b}@{n}": functools.partial(total, b) for b in fitting(cupy, sizes)}
        cases |= {f"matmul{d}@{n}": functools.partial(matmul, d) for d in ("float32", "float16")}
        cases[f"reshard@{n}"] = functools.partial(copy, 0)
    cases |= {"copy": functools.partial(copy, 0), "beside": beside}
    if (last := cupy.cuda.runtime.getDeviceCount() - 1) > 0:
        cases["peer"] = functools.partial(copy, last)
    cases |= {"offload": lambda: few(lambda: off(streams[0])), "onload": lambda: few(lambda: on(streams[0]))}
    return guarded(cases)


def torch_cases(sizes: Sizes = FULL, device: str = "cuda") -> dict[str, Case]:
    """PyTorch, eager, on one array; of the logical devices one stream each."""
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        return {}
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    ones = functools.partial(torch.ones, device=device)
    streams = [torch.cuda.Stream() if device == "cuda" else None for _ in range(max(counts()))]

    def few(call: Case) -> float:
        return timed(call, sizes.few, wait)

    def dispatch(n: int) -> float:
        pairs = [(stream, ones(32 // n or 1), ones(32 // n or 1)) for stream in streams[:n]]

        def loop() -> list[Any]:
            made = []
            for stream, x, y in pairs:
                with torch.cuda.stream(stream) if stream is not None else contextlib.nullcontext():
                    made.append(x + y)
            return made

        _, x, y = pairs[0]
        return timed(loop if n > 1 else lambda: x + y, sizes.queued, wait)

    def add(nbytes: int) -> float:
        x, y = ones(nbytes // 4), ones(nbytes // 4)
        return few(lambda: x + y)

    def total(nbytes: int) -> float:
        return few(ones(nbytes // 4).sum)

    def matmul(dtype: str) -> float:
        a = ones((sizes.side, sizes.side), dtype=getattr(torch, dtype))
        return few(lambda: a @ a)

    return guarded(_plain(sizes, dispatch, add, total, matmul))


def jax_cases(sizes: Sizes = FULL, platform: str = "gpu") -> dict[str, Case]:
    """JAX on one GPU, compiled, but for the tiny sums; float32 products are of float32 (its default there is TF32)."""
    import jax

    if jax.default_backend() != platform:
        return {}
    jax.config.update("jax_default_matmul_precision", "highest")
    ones = jax.numpy.ones
    made: list[Any] = []

    def few(function: Any, operands: Sequence[Any], calls: int = sizes.few) -> float:
        def call() -> None:
            made[:] = [function(*operands)]

        return timed(call, calls, lambda: jax.block_until_ready(made))

    def dispatch(n: int) -> float:
        return few(lambda x, y: x + y, (ones(32), ones(32)), sizes.queued)

    def jitted() -> float:
        return few(jax.jit(lambda x, y: x + y), (ones(32), ones(32)), sizes.queued)

    def add(nbytes: int) -> float:
        return few(jax.jit(lambda x, y: x + y), (ones(nbytes // 4), ones(nbytes // 4)))

    def total(nbytes: int) -> float:
        return few(jax.jit(lambda x: x.sum()), (ones(nbytes // 4),))

    def matmul(dtype: str) -> float:
        a = ones((sizes.side, sizes.side), dtype)
        return few(jax.jit(lambda a, b: a @ b), (a, a))

    plain = _plain(sizes, dispatch, add, total, matmul)
    return guarded({name: case for name, case in plain.items() if name.endswith("@1")} | {"jitted@1": jitted})


def _plain(sizes: Sizes, dispatch: Any, add: Any, total: Any, matmul: Any) -> dict[str, Case]:
    """The cases that every library has. What has one array has it for one logical device, whatever is asked for."""
    cases: dict[str, Case] = {f"dispatch@{n}": functools.partial(dispatch, n) for n in counts()}
    for nbytes in sizes.arrays:
        cases |= {f"add{nbytes}@1": functools.partial(add, nbytes), f"sum{nbytes}@1": functools.partial(total, nbytes)}
    return cases | {f"matmul{d}@1": functools.partial(matmul, d) for d in ("float32", "float16")}
