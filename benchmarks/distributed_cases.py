"""The cases of `distributed.py`: functions that need whole dimensions, with shardtensor and its peers."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import harness
import machine
from cpu_cases import Cases, jacobi_block
from harness import DEVICES

SIZES = "BENCHMARK_SIZES"
SETTLING = 0.1
"""The seconds for which the process is busy before each call, until the threads of other libraries are idle."""


@dataclass(frozen=True)
class Sizes:
    """The sizes of all operands; the tests use smaller ones.

    Attributes:
        side: the side of square arrays.
        line: the elements of arrays with one dimension.
        table: the elements of the sorted array that is searched.
        tall: the rows and columns of a tall matrix.
        steps: the number of steps of Jacobi's method.
    """

    side: int = 4096
    line: int = 2**24
    table: int = 2**20
    tall: tuple[int, int] = (2**22, 32)
    steps: int = 50

    @classmethod
    def from_environment(cls) -> Sizes:
        """Returns the sizes that the parent process passed in the environment."""
        sizes = json.loads(os.environ.get(SIZES, "{}"))
        return cls(**{name: tuple(size) if isinstance(size, list) else size for name, size in sizes.items()})

    def as_environment(self) -> dict[str, str]:
        """Returns the environment variable that passes the sizes to a process."""
        return {SIZES: json.dumps(dataclasses.asdict(self))}


FULL = Sizes()
TINY = Sizes(side=32, line=256, table=32, tall=(64, 4), steps=2)

GROUP = {
    **dict.fromkeys(("sort split", "sort other", "scan split", "scan other", "rfft rows", "rfft split"), "square"),
    **dict.fromkeys(("sort line", "argsort line", "median", "percentile", "histogram"), "line"),
    "searchsorted": "table",
    "unique": "integers",
    "fft line": "complex",
    "matmul": "matrices",
    **dict.fromkeys(("qr", "svd"), "tall"),
    **dict.fromkeys(("cholesky", "solve"), "definite"),
    "overlap": "square",
    "take": "positions",
}
"""The group of each case; the cases of a group have the same operands."""


def operands(sizes: Sizes, group: str) -> list[Any]:
    """Returns the operands of a group, equal for all libraries."""
    import numpy as np

    generator = np.random.default_rng(0)
    n, line = sizes.side, sizes.line

    def normal(*shape: int) -> Any:
        return generator.standard_normal(shape, dtype=np.float32)

    match group:
        case "square":
            return [normal(n, n)]
        case "line":
            return [generator.random(line, dtype=np.float32)]
        case "table":
            return [np.sort(normal(sizes.table)), normal(line)]
        case "integers":
            return [generator.integers(0, line // 16, line, dtype=np.int32)]
        case "complex":
            return [(normal(line) + 1j * normal(line)).astype(np.complex64)]
        case "matrices":
            return [normal(n, n), normal(n, n)]
        case "tall":
            return [normal(*sizes.tall)]
        case "definite":
            square = normal(n, n)
            return [square @ square.T / n + np.eye(n, dtype=np.float32), normal(n)]
        case "positions":
            return [normal(line), generator.integers(0, line, line)]
        case _:
            raise ValueError(group)


def timed(call: Callable[..., Any]) -> Callable[..., float]:
    """Returns a case that measures one call and returns its seconds; ``call`` waits for its result."""

    @functools.wraps(call)
    def case(*operands: Any) -> float:
        until = time.perf_counter() + SETTLING
        while time.perf_counter() < until:
            pass
        begin = time.perf_counter()
        call(*operands)
        return time.perf_counter() - begin

    return case


def library_cases(functions: Mapping[str, Callable[..., Any]], place: Callable[[str, Any], Any]) -> Cases:
    """Returns the cases of a library.

    Args:
        functions: the function of each case, called with the operands.
        place: converts a NumPy array into the library's operand, from a group and the array.
    """
    sizes = Sizes.from_environment()

    def make_operands(group: str) -> Sequence[Any]:
        return [place(group, array) for array in operands(sizes, group)]

    return Cases({name: timed(f) for name, f in functions.items()}, GROUP.__getitem__, make_operands, {})


def expressions(xp: Any) -> dict[str, Callable[..., Any]]:
    """Returns the functions whose source code is the same for NumPy, JAX and shardtensor."""
    return {
        "sort split": lambda x: xp.sort(x, axis=0),
        "sort other": lambda x: xp.sort(x, axis=1),
        "sort line": xp.sort,
        "argsort line": lambda x: xp.argsort(x, stable=True),
        "searchsorted": xp.searchsorted,
        "unique": xp.unique,
        "scan split": lambda x: xp.cumsum(x, axis=0),
        "scan other": lambda x: xp.cumsum(x, axis=1),
        "median": xp.median,
        "percentile": lambda x: xp.percentile(x, percentiles()),
        "histogram": lambda x: xp.histogram(x, 256, (0, 1)),
        "rfft rows": lambda x: xp.fft.rfft(x, axis=1),
        "rfft split": lambda x: xp.fft.rfft(x, axis=0),
        "fft line": xp.fft.fft,
        "matmul": lambda x, y: x @ y,
        "qr": xp.linalg.qr,
        "svd": lambda x: xp.linalg.svd(x, full_matrices=False),
        "cholesky": lambda x, b: xp.linalg.cholesky(x),
        "solve": xp.linalg.solve,
        "take": lambda x, i: x[i],
    }


@functools.cache
def percentiles() -> Any:
    """Returns the percentiles that are computed."""
    import numpy as np

    return np.asarray([1.0, 25.0, 99.0], np.float32)


def stencil(tall: Any) -> Any:
    """Returns a step of Jacobi's method on a block with a halo of one element."""
    return 0.25 * (tall[:-2, 1:-1] + tall[2:, 1:-1] + tall[1:-1, :-2] + tall[1:-1, 2:])


def shardtensor_cases() -> Cases:
    """Returns the cases of shardtensor, eager."""
    import shardtensor as st

    rows = st.NamedSharding(st.make_mesh((DEVICES,), ("d",)), st.P("d"))
    blocks = st.NamedSharding(st.make_mesh((2, DEVICES // 2), ("a", "b")), st.P("a", "b"))

    def overlap(u: Any) -> Any:
        for _ in range(Sizes.from_environment().steps):
            u = st.map_overlap(stencil, u, depth=1, boundary=0)
        return u

    def place(group: str, array: Any) -> Any:
        return st.device_put(array, blocks if group == "matrices" else rows)

    return library_cases({**expressions(st), "overlap": overlap}, place)


def numpy_cases() -> Cases:
    """Returns the cases of NumPy."""
    import numpy as np

    def overlap(u: Any) -> Any:
        for _ in range(Sizes.from_environment().steps):
            u = stencil(np.pad(u, 1))
        return u

    return library_cases({**expressions(np), "overlap": overlap}, lambda group, array: array)


def scipy_cases() -> Cases:
    """Returns the cases of SciPy: its transforms, in as many threads as there are cores."""
    import scipy.fft

    workers = machine.usable_cores()
    functions = {
        "rfft rows": lambda x: scipy.fft.rfft(x, axis=1, workers=workers),
        "rfft split": lambda x: scipy.fft.rfft(x, axis=0, workers=workers),
        "fft line": lambda x: scipy.fft.fft(x, workers=workers),
    }
    return library_cases(functions, lambda group, array: array)


def torch_cases() -> Cases:
    """Returns the cases of PyTorch, eager."""
    import torch

    functions = {
        "sort split": lambda x: torch.sort(x, dim=0),
        "sort other": lambda x: torch.sort(x, dim=1),
        "sort line": torch.sort,
        "argsort line": lambda x: torch.argsort(x, stable=True),
        "searchsorted": torch.searchsorted,
        "unique": torch.unique,
        "scan split": lambda x: torch.cumsum(x, 0),
        "scan other": lambda x: torch.cumsum(x, 1),
        "median": torch.median,
        "histogram": lambda x: torch.histc(x, 256, 0, 1),
        "rfft rows": lambda x: torch.fft.rfft(x, dim=1),
        "rfft split": lambda x: torch.fft.rfft(x, dim=0),
        "fft line": torch.fft.fft,
        "matmul": torch.matmul,
        "qr": torch.linalg.qr,
        "svd": lambda x: torch.linalg.svd(x, full_matrices=False),
        "cholesky": lambda x, b: torch.linalg.cholesky(x),
        "solve": torch.linalg.solve,
        "take": lambda x, i: x[i],
    }

    def overlap(u: Any) -> Any:
        for _ in range(Sizes.from_environment().steps):
            u = stencil(torch.nn.functional.pad(u, (1, 1, 1, 1)))
        return u

    return library_cases({**functions, "overlap": overlap}, lambda group, array: torch.from_numpy(array))


def jax_cases() -> Cases:
    """Returns the cases of JAX, compiled, on the CPU devices that its flags set; results keep the layout."""
    import jax
    from jax.sharding import PartitionSpec

    devices = jax.device_count()
    axis_types = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((devices,), ("d",), axis_types=axis_types[:1])
    rows = jax.sharding.NamedSharding(mesh, PartitionSpec("d"))
    grid = jax.make_mesh((2, devices // 2), ("a", "b"), axis_types=axis_types)
    blocks = jax.sharding.NamedSharding(grid, PartitionSpec("a", "b"))

    def place(group: str, array: Any) -> Any:
        return jax.device_put(array, blocks if group == "matrices" else rows)

    def overlap(u: Any) -> Any:
        def steps(u: Any) -> Any:
            return jax.lax.fori_loop(0, Sizes.from_environment().steps, lambda _, u: jacobi_block(jax, u, devices), u)

        return jax.shard_map(steps, mesh=mesh, in_specs=PartitionSpec("d"), out_specs=PartitionSpec("d"))(u)

    laid_out = {"sort split", "sort other", "sort line", "argsort line", "scan split", "scan other", "take"}
    eager = {"unique", "qr", "svd"}  # The size of unique's result depends on the elements, so that jit rejects it.
    compiled = {"overlap": jax.jit(overlap)}
    for name, function in expressions(jax.numpy).items():
        if name not in eager:
            compiled[name] = jax.jit(function, out_shardings=rows) if name in laid_out else jax.jit(function)
    compiled["unique"] = jax.numpy.unique
    if devices == 2:  # Eight copies of a tall matrix do not fit into the memory of a small machine.
        compiled |= {name: jax.jit(expressions(jax.numpy)[name]) for name in ("qr", "svd")}

    def blocking(call: Any) -> Callable[..., Any]:
        return lambda *operands: jax.block_until_ready(call(*operands))

    return library_cases({name: blocking(call) for name, call in compiled.items()}, place)


# -- tiny arrays -----------------------------------------------------------------------------------


def tiny_expressions(xp: Any, place: Callable[[Any], Any], overlap: Callable[[Any], Any]) -> dict[str, harness.Case]:
    """Returns the cases on arrays of a few elements."""
    import numpy as np

    generator = np.random.default_rng(0)
    x, tall = place(generator.random(32, dtype=np.float32)), place(generator.random((32, 2), dtype=np.float32))
    square, table = place(np.eye(8, dtype=np.float32) * 3 + 1), place(np.arange(16, dtype=np.float32))
    indices = place(generator.integers(0, 32, 32))
    functions = expressions(xp)
    return {
        "tiny sort": lambda: functions["sort line"](x),
        "tiny argsort": lambda: functions["argsort line"](x),
        "tiny searchsorted": lambda: functions["searchsorted"](table, x),
        "tiny unique": lambda: functions["unique"](x),
        "tiny scan": lambda: xp.cumsum(x, axis=0),
        "tiny median": lambda: functions["median"](x),
        "tiny histogram": lambda: functions["histogram"](x),
        "tiny fft": lambda: functions["fft line"](x),
        "tiny matmul": lambda: functions["matmul"](square, square),
        "tiny qr": lambda: functions["qr"](tall),
        "tiny solve": lambda: functions["solve"](square, square[0]),
        "tiny overlap": lambda: overlap(x),
        "tiny take": lambda: functions["take"](x, indices),
    }


def tiny_shardtensor_cases() -> dict[str, harness.Case]:
    """Returns the tiny cases of shardtensor, on the default backend, whose devices have separate memories."""
    import shardtensor as st

    rows = st.NamedSharding(st.make_mesh((DEVICES,), ("d",)), st.P("d"))

    def overlap(x: Any) -> Any:
        return st.map_overlap(lambda block: block[:-2] + block[2:], x, depth=1, boundary=0)

    return tiny_expressions(st, lambda array: st.device_put(array, rows), overlap)


def tiny_numpy_cases() -> dict[str, harness.Case]:
    """Returns the tiny cases of NumPy."""
    import numpy as np

    def overlap(x: Any) -> Any:
        tall = np.pad(x, 1)
        return tall[:-2] + tall[2:]

    return tiny_expressions(np, lambda array: array, overlap)


def tiny_jax_cases() -> dict[str, harness.Case]:
    """Returns the tiny cases of JAX, eager."""
    import jax

    mesh = jax.make_mesh((jax.device_count(),), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("d"))

    def overlap(x: Any) -> Any:
        tall = jax.numpy.pad(x, 1)
        return tall[:-2] + tall[2:]

    cases = tiny_expressions(jax.numpy, lambda array: jax.device_put(array, rows), overlap)
    return {name: lambda call=call: jax.block_until_ready(call()) for name, call in cases.items()}
