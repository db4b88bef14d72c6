"""The cases of `jit.py`: the same computations with every library, each library in a process of its own.

The environment variable ``JIT_GROUP`` names the group of rows for which a process makes operands and cases. Results are
dropped before the next call, so that each library can use their memory again.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from typing import Any

from harness import Case

GROUPS = {
    "sine": ("sin4", "sin8"),
    "black": ("black4", "black8"),
    "rows": ("softmax", "norm"),
    "chain": ("chain",),
    "reductions": ("sum", "mean", "max", "var"),
    "grid": ("jacobi",),
    "products": ("layer", "step", "maps"),
    "tiny": ("tiny",),
}
"""The names of the rows that are measured together, by group."""

STEPS = 50
"""The number of steps of Jacobi's method."""

KEPT = 1 << 30
"""The bytes of results that `kept_cases` keeps at most."""

Arrays = list[Any]


# -- the computations, by a library's functions ----------------------------------------------------


def black_scholes(np: Any, price: Any, strike: Any, time: Any) -> tuple[Any, Any]:
    """Returns the prices of call and put options, with the tanh approximation of the normal distribution function."""
    rate, volatility = 0.02, 0.3

    def normal_cdf(d: Any) -> Any:
        return 0.5 * (1.0 + np.tanh(0.7978845608 * (d + 0.044715 * d * d * d)))

    spread = volatility * np.sqrt(time)
    d1 = (np.log(price / strike) + (rate + volatility * volatility * 0.5) * time) / spread
    discounted = strike * np.exp(-rate * time)
    call = price * normal_cdf(d1) - discounted * normal_cdf(d1 - spread)
    return call, call - price + discounted


def chain(np: Any, x: Any) -> Any:
    """Applies ten operators, each of which is limited by memory bandwidth."""
    for k in range(5):
        x = np.maximum(x * 1.5, 0.25) if k % 2 else (x + 0.5) * 0.75
    return x


def softmax(np: Any, x: Any) -> Any:
    e = np.exp(x - np.max(x, axis=1, keepdims=True))
    return e / np.sum(e, axis=1, keepdims=True)


def norm(np: Any, x: Any) -> Any:
    d = x - np.mean(x, axis=1, keepdims=True)
    return d / np.sqrt(np.mean(d * d, axis=1, keepdims=True) + 1e-5)


def jacobi(u: Any) -> Any:
    for _ in range(STEPS):
        u[1:-1, 1:-1] = 0.25 * (u[:-2, 1:-1] + u[2:, 1:-1] + u[1:-1, :-2] + u[1:-1, 2:])
    return u


def layer(np: Any, x: Any, w: Any, b: Any) -> Any:
    return 1.0 / (1.0 + np.exp(-(x @ w + b)))


def step(np: Any, x: Any, labels: Any, w1: Any, b1: Any, w2: Any, b2: Any) -> tuple[Any, ...]:
    """Returns the parameters after a step of gradient descent, for two layers with softmax and cross-entropy."""
    rate = 0.1 / x.shape[0]
    hidden = np.maximum(x @ w1 + b1, 0.0)
    scores = hidden @ w2 + b2
    e = np.exp(scores - np.max(scores, axis=1, keepdims=True))
    error = e / np.sum(e, axis=1, keepdims=True) - labels
    back = np.where(hidden > 0.0, error @ w2.T, 0.0)
    changes = x.T @ back, np.sum(back, axis=0), hidden.T @ error, np.sum(error, axis=0)
    return tuple(p - rate * change for p, change in zip((w1, b1, w2, b2), changes, strict=True))


def functions(np: Any) -> dict[str, Callable[..., Any]]:
    """Returns the computation of each row; maps are written as batched operators."""
    black = functools.partial(black_scholes, np)
    sine = lambda x: 2.0 * np.sin(x) + 1.0  # noqa: E731
    squared = lambda a: np.tanh(a @ a)  # noqa: E731
    by = {name: functools.partial(f, np) for name, f in
          {"softmax": softmax, "norm": norm, "chain": chain, "layer": layer, "step": step}.items()}  # fmt: skip
    return by | {
        "sin4": sine, "sin8": sine, "black4": black, "black8": black, "jacobi": jacobi,
        "maps": lambda a: squared(squared(a)), "tiny": lambda x: 2.0 * x + 1.0,
        "sum": np.sum, "mean": np.mean, "max": np.max, "var": np.var,
    }  # fmt: skip


SPLIT = {"layer": 1, "step": 2}
"""The number of operands of a row that are split by rows, from the first on (default: all); others are replicated."""


def operands() -> dict[str, Arrays]:
    """Returns the operands of the rows of the group, equal for all libraries."""
    import numpy as np

    random = np.random.default_rng(0)

    def some(*shape: int, dtype: Any = np.float32) -> Any:
        return random.random(shape, dtype) + dtype(0.5)

    def normal(*shape: int) -> Any:
        return random.standard_normal(shape, np.float32) / np.float32(np.sqrt(shape[0]))

    def training() -> Arrays:
        labels = np.eye(10, dtype=np.float32)[random.integers(0, 10, 4096)]
        return [some(4096, 784), labels, normal(784, 512), normal(512), normal(512, 10), normal(10)]

    grid = functools.cache(lambda: some(8192, 8192))
    rows = functools.cache(lambda: some(8192, 4096))
    makers: dict[str, Callable[[], Arrays]] = {
        "sin4": lambda: [some(1 << 26)], "sin8": lambda: [some(1 << 23, dtype=np.float64)],
        "black4": lambda: [some(1 << 24) for _ in range(3)],
        "black8": lambda: [some(1 << 24, dtype=np.float64) for _ in range(3)],
        "softmax": lambda: [rows()], "norm": lambda: [rows()], "chain": lambda: [some(1 << 24)],
        **dict.fromkeys(("sum", "mean", "max", "var"), lambda: [grid()]),
        "jacobi": lambda: [some(4096, 4096, dtype=np.float64)],
        "layer": lambda: [normal(65536, 512), normal(512, 512), normal(512)],
        "step": training, "maps": lambda: [normal(8, 1024, 1024) * np.float32(0.1)], "tiny": lambda: [some(32)],
    }  # fmt: skip
    return {name: makers[name]() for name in GROUPS[os.environ["JIT_GROUP"]]}


# -- the cases of each library ---------------------------------------------------------------------


def _cases(
    run: Mapping[str, Callable[..., Any]],
    place: Callable[[str, Arrays], Arrays],
    export: Callable[[Any], Any] = lambda result: result,
) -> dict[str, Case]:
    """Returns a case for each row, and a case ``mean NAME`` for the mean of its result, to compare the libraries.

    Args:
        run: the compiled computation of each row.
        place: converts NumPy arrays into the library's operands, from the name of the row and the arrays.
        export: converts an array of the library into one that NumPy reads.
    """

    def case(name: str, xs: Arrays) -> tuple[Case, Case]:
        def call() -> None:
            run[name](*xs)

        def mean() -> float:
            import numpy as np

            result = run[name](*xs)
            first = result[0] if isinstance(result, tuple) else result
            return float(np.asarray(export(first), np.float64).mean())

        return call, mean

    cases = {name: case(name, place(name, arrays)) for name, arrays in operands().items() if name in run}
    means = {f"mean {name}": mean for name, (_, mean) in cases.items()}
    return {name: call for name, (call, _) in cases.items()} | means


def _shardtensor_cases(wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> dict[str, Case]:
    """Returns the cases of shardtensor; ``wrap`` compiles a function, or returns it unchanged."""
    import shardtensor as st

    by_name = functions(st)
    squared = lambda a: st.tanh(a @ a)  # noqa: E731
    by_name["maps"] = lambda a: st.pmap(squared)(st.pmap(squared)(a))
    mesh = st.make_mesh((8,), ("d",))
    split, whole = st.NamedSharding(mesh, st.P("d")), st.NamedSharding(mesh, st.P())

    def place(name: str, arrays: Arrays) -> Arrays:
        return [st.device_put(a, split if k < SPLIT.get(name, 9) else whole) for k, a in enumerate(arrays)]

    return _cases({name: wrap(f) for name, f in by_name.items()}, place)


def c_cases() -> dict[str, Case]:
    """Returns the cases of st.jit with kernels in C."""
    import shardtensor as st

    return _shardtensor_cases(lambda f: st.jit(f, executor="c"))


def kept_cases() -> dict[str, Case]:
    """Returns the cases of st.jit with kernels in C whose results are kept, so that each call uses new memory."""
    import shardtensor as st
    from shardtensor.host import memory_pool

    def wrap(f: Callable[..., Any]) -> Callable[..., Any]:
        traced, kept = st.jit(f, executor="c"), []

        def call(*xs: Any) -> Any:
            result = traced(*xs)
            kept.append(result)
            leaves = result if isinstance(result, tuple) else (result,)
            if len(kept) * sum(leaf.nbytes for leaf in leaves) > KEPT:
                kept.clear()
                memory_pool.free_cache()
            return result

        return call

    cases = _shardtensor_cases(wrap)
    return {name: case for name, case in cases.items() if name not in ("sum", "mean", "max", "var", "tiny", "jacobi")}


def blocked_cases() -> dict[str, Case]:
    """Returns the cases of st.jit with kernels on NumPy, which it uses if there is no compiler."""
    import shardtensor as st

    return _shardtensor_cases(lambda f: st.jit(f, executor="numpy"))


def eager_cases() -> dict[str, Case]:
    """Returns the cases of shardtensor without jit."""
    return _shardtensor_cases(lambda f: f)


def numpy_cases() -> dict[str, Case]:
    """Returns the cases of NumPy."""
    import numpy as np

    return _cases(functions(np), lambda name, arrays: arrays)


def torch_cases() -> dict[str, Case]:
    """Returns the cases of torch.compile. The steps of Jacobi's method call one compiled step."""
    import torch

    compiled = {name: torch.compile(f) for name, f in functions(_Torch(torch)).items()}
    compiled["var"] = torch.compile(lambda x: torch.var(x, correction=0))

    @torch.compile
    def once(u: Any) -> Any:
        new = u.clone()
        new[1:-1, 1:-1] = 0.25 * (u[:-2, 1:-1] + u[2:, 1:-1] + u[1:-1, :-2] + u[1:-1, 2:])
        return new

    def steps(u: Any) -> Any:
        for _ in range(STEPS):
            u = once(u)
        return u

    return _cases(compiled | {"jacobi": steps}, lambda name, arrays: [torch.from_numpy(a) for a in arrays])


class _Torch:
    """A namespace with PyTorch's functions under NumPy's names."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch

    def __getattr__(self, name: str) -> Any:
        torch = self._torch
        renamed = {
            "max": lambda x, axis=None, keepdims=False: torch.max(x) if axis is None else torch.amax(x, axis, keepdims),
            "maximum": lambda x, low: torch.clamp(x, min=low),
        }
        return renamed.get(name) or getattr(torch, name)


def jax_cases() -> dict[str, Case]:
    """Returns the cases of jax.jit; every call waits for its result."""
    import jax
    import numpy as np
    from cpu_cases import jacobi_block
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    jax.config.update("jax_enable_x64", True)
    devices = jax.device_count()
    mesh = Mesh(np.array(jax.devices()), ("d",))
    split, whole = NamedSharding(mesh, PartitionSpec("d")), NamedSharding(mesh, PartitionSpec())
    by_name = functions(jax.numpy)
    squared = jax.vmap(lambda a: jax.numpy.tanh(a @ a))
    by_name["maps"] = lambda a: squared(squared(a))
    block = lambda u: jax.lax.fori_loop(0, STEPS, lambda _, u: jacobi_block(jax, u, devices), u)  # noqa: E731
    by_name["jacobi"] = jax.shard_map(block, mesh=mesh, in_specs=PartitionSpec("d"), out_specs=PartitionSpec("d"))

    def place(name: str, arrays: Arrays) -> Arrays:
        return [jax.device_put(a, split if k < SPLIT.get(name, 9) else whole) for k, a in enumerate(arrays)]

    def blocking(f: Callable[..., Any]) -> Callable[..., Any]:
        compiled = jax.jit(f)
        return lambda *xs: jax.block_until_ready(compiled(*xs))

    return _cases({name: blocking(f) for name, f in by_name.items()}, place)


def mlx_cases() -> dict[str, Case]:
    """Returns the cases of mx.compile on MLX's CPU backend; every call waits for its result."""
    import mlx.core as mx

    mx.set_default_device(mx.cpu)
    by_name = functions(mx)

    def once(u: Any) -> Any:
        new = mx.array(u)
        new[1:-1, 1:-1] = 0.25 * (u[:-2, 1:-1] + u[2:, 1:-1] + u[1:-1, :-2] + u[1:-1, 2:])
        return new

    def blocking(f: Callable[..., Any], times: int = 1) -> Callable[..., Any]:
        compiled = mx.compile(f)

        def call(*xs: Any) -> Any:
            for _ in range(times):
                result = compiled(*xs)
                mx.eval(result)
                if times > 1:
                    xs = (result,)
            return result

        return call

    compiled = {name: blocking(f) for name, f in by_name.items()} | {"jacobi": blocking(once, STEPS)}
    return _cases(compiled, lambda name, arrays: [mx.array(a) for a in arrays])


def tinygrad_cases() -> dict[str, Case]:
    """Returns the cases of tinygrad's TinyJit on its CPU backend; every call waits for its result."""
    from tinygrad import Device, Tensor, TinyJit

    by_name = functions(_Tinygrad())
    by_name["var"] = lambda x: x.var(correction=0)
    del by_name["jacobi"]  # tinygrad has no writes to parts of an array under its jit

    def blocking(f: Callable[..., Any]) -> Callable[..., Any]:
        def realized(*xs: Any) -> Any:
            result = f(*xs)
            Tensor.realize(*(result if isinstance(result, tuple) else (result,)))
            return result

        compiled = TinyJit(realized)

        def call(*xs: Any) -> Any:
            result = compiled(*xs)
            Device[Device.DEFAULT].synchronize()
            return result

        return call

    def place(name: str, arrays: Arrays) -> Arrays:
        return [Tensor(a).realize() for a in arrays]

    return _cases({name: blocking(f) for name, f in by_name.items()}, place, lambda result: result.numpy())


class _Tinygrad:
    """A namespace with the methods of tinygrad's tensors under the names of NumPy's functions."""

    def __getattr__(self, name: str) -> Any:
        def call(x: Any, *arguments: Any, axis: int | None = None, keepdims: bool = False) -> Any:
            method = getattr(x, name)
            return method(*arguments) if axis is None else method(axis, keepdim=keepdims)

        return call


def numba_cases() -> dict[str, Case]:
    """Returns the cases of Numba: loops that it compiles and divides among threads."""
    import numba
    import numpy as np

    parallel = numba.njit(parallel=True)

    @parallel
    def sine(x: Any) -> Any:
        one, two = x.dtype.type(1), x.dtype.type(2)
        result = np.empty_like(x)
        for i in numba.prange(x.size):
            result[i] = two * np.sin(x[i]) + one
        return result

    @parallel
    def once(u: Any, new: Any) -> None:
        for i in numba.prange(1, u.shape[0] - 1):
            for j in range(1, u.shape[1] - 1):
                new[i, j] = 0.25 * (u[i - 1, j] + u[i + 1, j] + u[i, j - 1] + u[i, j + 1])

    def steps(u: Any) -> Any:
        new = u.copy()
        for k in range(STEPS):
            once(*((new, u) if k % 2 else (u, new)))
        return u if STEPS % 2 == 0 else new

    return _cases({"sin4": sine, "sin8": sine, "jacobi": steps}, lambda name, arrays: arrays)


# -- programs that are measured once in a process --------------------------------------------------

FIRST = """
import sys, time
import shardtensor as st
x = st.ones((64, 512))

def f(x):
    results = []
    for k in range(8):
        y = x + 1.0
        for _ in range(k + 1):
            y = st.tanh(y * 0.5) - st.where(y > 1.0, y, 0.25)
        results.append(y / y.sum(axis=1, keepdims=True) if k % 2 else y)
        x = st.sort(y, axis=1)
    return results

st.jit(f, executor="numpy")(x)
lowered = st.jit(f).lower(x)
begin = time.perf_counter()
lowered.compile()
print(time.perf_counter() - begin, len(lowered._executable.kernels))
"""
"""A program that prints the seconds in which the eight kernels of a traced function are compiled or read from disk."""

TRACE = """
import time
import shardtensor as st
x = st.ones((64, 64))

def f(x):
    for k in range(250):
        x = st.tanh(x * 0.5) + st.sqrt(x * x)
    return x

st.jit(lambda x: x + 1, executor="numpy").lower(x)
begin = time.perf_counter()
program = st.jit(f, executor="numpy").lower(x).program
print((time.perf_counter() - begin) / len(program.equations), 0)
"""
"""A program that prints the seconds per equation in which a function is traced and prepared."""
