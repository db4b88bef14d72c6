"""What fused kernels cost on the arrays of one host: compiled C and blocked NumPy beside other libraries' compilers.

``python benchmarks/kernels.py [--quick] [--out DIR] [--label LABEL]``; README.md says how to read the table.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import harness
from harness import JAX_2, JAX_8, NUMPY, Best, Case, Row, Table, Target, Worker

TITLE = "Fused kernels: compiled C and blocked NumPy; JAX (n): jit on n virtual CPU devices; results are dropped"
C, BLOCKS, TORCH, JAX_1 = "C", "blocks", "torch.compile", "JAX (1)"
PEERS = Best("best peer", (NUMPY, TORCH, JAX_8, JAX_2, JAX_1))
GRID = 4096
MANY = GRID * GRID

ROWS = (
    Row("sin4", "2 sin x + 1, 16M f32", (Target(0.4, PEERS),)),
    Row("sin8", "2 sin x + 1, 8M f64", (Target(0.4, PEERS),)),
    Row("black4", "Black-Scholes, 4M f32", (Target(1.0, PEERS),)),
    Row("black8", "Black-Scholes, 4M f64", (Target(0.85, PEERS),)),
    Row("black4_long", "Black-Scholes, 16M f32", (Target(1.0, PEERS),)),
    Row("black8_long", "Black-Scholes, 16M f64", (Target(0.85, PEERS),)),
    Row("softmax", "softmax, 8192 × 4096 f32", (Target(0.9, PEERS),)),
    Row("norm", "layer norm, 8192 × 4096 f32", (Target(0.65, PEERS),)),
    Row("chain", "ten cheap operators, 16M f32", (Target(1.0, PEERS),)),
    Row("jacobi", "Jacobi step, 4096² f64"),
    Row("sum", "sum, 8192² f32", (Target(1.05, PEERS),)),
    Row("max", "max, 8192² f32", (Target(1.05, PEERS),)),
    Row("var", "var, 8192² f32", (Target(1.05, PEERS),)),
)


# -- the computations, by a library's functions ----------------------------------------------------


def black_scholes(np: Any, price: Any, strike: Any, time: Any) -> tuple[Any, Any]:
    """The prices of call and put options; the normal distribution by the usual approximation with tanh."""
    rate, volatility = 0.02, 0.3

    def below(d: Any) -> Any:
        return 0.5 * (1.0 + np.tanh(0.7978845608 * (d + 0.044715 * d * d * d)))

    spread = volatility * np.sqrt(time)
    d1 = (np.log(price / strike) + (rate + volatility * volatility * 0.5) * time) / spread
    discounted = strike * np.exp(-rate * time)
    call = price * below(d1) - discounted * below(d1 - spread)
    return call, call - price + discounted


def chain(np: Any, x: Any) -> Any:
    """Ten operators, each of which takes no longer than reading its operand."""
    for k in range(5):
        x = np.maximum(x * 1.5, 0.25) if k % 2 else (x + 0.5) * 0.75
    return x


def softmax(np: Any, x: Any) -> Any:
    e = np.exp(x - np.max(x, axis=1, keepdims=True))
    return e / np.sum(e, axis=1, keepdims=True)


def norm(np: Any, x: Any) -> Any:
    d = x - np.mean(x, axis=1, keepdims=True)
    return d / np.sqrt(np.mean(d * d, axis=1, keepdims=True) + 1e-5)


def jacobi(np: Any, u: Any) -> Any:
    return 0.25 * (u[:-2, 1:-1] + u[2:, 1:-1] + u[1:-1, :-2] + u[1:-1, 2:])


def functions(np: Any) -> dict[str, Callable[..., Any]]:
    """The computation of each row."""
    black = functools.partial(black_scholes, np)
    sine = lambda x: 2.0 * np.sin(x) + 1.0  # noqa: E731
    return {
        "sin4": sine, "sin8": sine, "black4": black, "black8": black, "black4_long": black, "black8_long": black,
        "softmax": functools.partial(softmax, np), "norm": functools.partial(norm, np),
        "chain": functools.partial(chain, np), "jacobi": functools.partial(jacobi, np),
        "sum": np.sum, "max": np.max, "var": np.var,
    }  # fmt: skip


def operands() -> dict[str, list[Any]]:
    """The same arrays for all, by row."""
    import numpy as np

    random = np.random.default_rng(0)
    a, b, c = [random.random(MANY) + 0.5 for _ in range(3)]
    x, y, z = [array.astype("f4") for array in (a, b, c)]
    wide = np.concatenate([x, y, z, x]).reshape(8192, 8192)
    rows = wide.reshape(-1, 4096)[:8192]
    short = MANY // 4
    return {
        "sin4": [x], "sin8": [a[: MANY // 2]], "black4": [x[:short], y[:short], z[:short]],
        "black8": [a[:short], b[:short], c[:short]], "black4_long": [x, y, z], "black8_long": [a, b, c],
        "softmax": [rows], "norm": [rows], "chain": [x], "jacobi": [a.reshape(GRID, GRID)],
        "sum": [wide], "max": [wide], "var": [wide],
    }  # fmt: skip


# -- the cases, each function in a process of its own ----------------------------------------------


class _Traced:
    """A value of a kernel that is being built, with the operators of NumPy's arrays."""

    def __init__(self, builder: Any, value: int) -> None:
        self.builder, self.value = builder, value

    def apply(self, name: str, *operands: Any) -> _Traced:
        values = [x.value if isinstance(x, _Traced) else self.builder.constant(x) for x in operands]
        return _Traced(self.builder, self.builder.call(name, *values))

    def __add__(self, x: Any) -> _Traced:
        return self.apply("add", self, x)

    def __radd__(self, x: Any) -> _Traced:
        return self.apply("add", x, self)

    def __sub__(self, x: Any) -> _Traced:
        return self.apply("subtract", self, x)

    def __mul__(self, x: Any) -> _Traced:
        return self.apply("multiply", self, x)

    def __rmul__(self, x: Any) -> _Traced:
        return self.apply("multiply", x, self)

    def __truediv__(self, x: Any) -> _Traced:
        return self.apply("divide", self, x)


class _Functions:
    """NumPy's functions on values of kernels."""

    def __getattr__(self, name: str) -> Callable[..., _Traced]:
        def function(x: _Traced, *others: Any, axis: Any = None, keepdims: bool = True) -> _Traced:
            if name in ("sum", "max", "mean"):
                return _Traced(x.builder, x.builder.reduce(name, x.value))
            return x.apply(name, x, *others)

        return function


def _kernel(name: str, arrays: Sequence[Any]) -> tuple[Any, tuple[int, ...], list[Any]]:
    """The kernel of a row, the shape of its loop, and its inputs."""
    from shardtensor.interpreters.jit.kernel import KernelBuilder

    numbers = [0.5, 1.0, 1.5, 2.0, 0.02, 0.3, 0.25, 0.75, 0.7978845608, 0.044715, 1e-5, 0.02 + 0.045, -0.02]
    whole = name in ("sum", "max", "var")
    if name == "jacobi":
        u = arrays[0]
        arrays = [u[:-2, 1:-1], u[2:, 1:-1], u[1:-1, :-2], u[1:-1, 2:]]
    shape = arrays[0].shape

    class Builder(KernelBuilder):
        def constant(self, number: float) -> int:
            return len(arrays) + min(range(len(numbers)), key=lambda k: abs(numbers[k] - number))

    builder = Builder(len(shape), len(shape) if whole else int(name in ("softmax", "norm")))
    traced = [_Traced(builder, builder.input(a.dtype, (True,) * a.ndim)) for a in arrays]
    for _ in numbers:
        builder.input(float)
    np = _Functions()
    if name == "jacobi":
        a, b, c, d = traced
        results: Any = 0.25 * (a + b + c + d)
    elif name == "var":
        deviation = traced[0] - np.mean(traced[0])
        results = _Traced(builder, builder.reduce("mean", (deviation * deviation).value))
    else:
        results = functions(np)[name](*traced)
    for result in results if isinstance(results, tuple) else (results,):
        builder.output(result.value, per_row=whole)
    return builder.build(), shape, [*arrays, *numbers]


def c_cases() -> dict[str, Case]:
    """Kernels as compiled C."""
    from shardtensor.interpreters.jit.c_executor import compile_kernels

    return _cases(lambda kernel: compile_kernels([kernel])[kernel].run)


def blocked_cases() -> dict[str, Case]:
    """Kernels on blocked NumPy; whole reductions are not blocked."""
    from shardtensor.interpreters.jit import blocked

    made = _cases(lambda kernel: functools.partial(blocked.run, kernel))
    return {name: case for name, case in made.items() if name not in ("sum", "max", "var")}


def _cases(executor: Callable[[Any], Callable[..., None]]) -> dict[str, Case]:
    from shardtensor.host import memory_pool

    def case(name: str, arrays: Sequence[Any]) -> Case:
        kernel, shape, inputs = _kernel(name, arrays)
        run = executor(kernel)
        shapes = [shape[: len(shape) - kernel.row_ndim] if per_row else shape for _, per_row in kernel.results]

        def call() -> None:
            outs = [memory_pool.empty(s, dtype) for s, (dtype, _) in zip(shapes, kernel.results, strict=True)]
            run(shape, inputs, outs)

        return call

    return {name: case(name, arrays) for name, arrays in operands().items()}


def numpy_cases() -> dict[str, Case]:
    """Plain NumPy."""
    import numpy as np

    given = operands()
    return {name: functools.partial(function, *given[name]) for name, function in functions(np).items()}


def torch_cases() -> dict[str, Case]:
    """PyTorch's compiler."""
    import torch

    given = {name: [torch.from_numpy(a) for a in arrays] for name, arrays in operands().items()}
    made = dict(functions(_Torch(torch)))
    made["var"] = lambda x: torch.var(x, correction=0)
    return {name: functools.partial(torch.compile(function), *given[name]) for name, function in made.items()}


class _Torch:
    """PyTorch's functions under NumPy's names, where they differ."""

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
    """JAX's compiler; the first dimension of every operand is split over the devices."""
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    jax.config.update("jax_enable_x64", True)
    split = NamedSharding(Mesh(np.array(jax.devices()), ("d",)), PartitionSpec("d"))
    given = {name: [jax.device_put(a, split) for a in arrays] for name, arrays in operands().items()}

    def case(name: str, function: Callable[..., Any]) -> Case:
        compiled = jax.jit(function)
        return lambda: jax.block_until_ready(compiled(*given[name]))

    return {name: case(name, function) for name, function in functions(jax.numpy).items()}


# -- the run ---------------------------------------------------------------------------------------


@contextlib.contextmanager
def workers() -> Iterator[Mapping[str, Worker]]:
    """By column, a worker for the cases of each executor or library."""
    with contextlib.ExitStack() as stack:
        made = {
            C: Worker("shardtensor", "kernels:c_cases"),
            BLOCKS: Worker("shardtensor", "kernels:blocked_cases"),
            NUMPY: Worker("numpy", "kernels:numpy_cases"),
            TORCH: Worker("torch", "kernels:torch_cases", warm_up=1.0),
            JAX_8: Worker("jax", "kernels:jax_cases", harness.virtual_devices(8), 1.0),
            JAX_2: Worker("jax", "kernels:jax_cases", harness.virtual_devices(2), 1.0),
            JAX_1: Worker("jax", "kernels:jax_cases", harness.virtual_devices(1), 1.0),
        }
        yield {column: stack.enter_context(worker) for column, worker in made.items()}


def measure(rounds: int) -> Table:
    """Measures everything once through."""
    with workers() as columns:
        environment = harness.describe_environment(("numpy", "torch", "jax", "shardtensor")) | {"rounds": str(rounds)}
        pairs = itertools.product(ROWS, columns)
        samplers = {(row.name, c): functools.partial(columns[c].sample, row.name) for row, c in pairs}
        cells = harness.interleave(samplers, rounds, "kernels")
    return Table(TITLE, environment, tuple(columns), ROWS, cells)


if __name__ == "__main__":
    harness.run("kernels", "What fused kernels cost.", measure, 25, 5)
