"""The cases of `cpu.py`: computations on a CPU with shardtensor and its peers, each in its fastest form."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import random
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import harness
import machine
from harness import DEVICES, Case

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
SIZES = "BENCHMARK_SIZES"

ROWS, COLUMNS, WHOLE, PARTS, AS_IS = "rows", "columns", "whole", "parts", "as it is"
"""The layouts of operands: split by rows or by columns, replicated, a list with one array per device, or unchanged."""

RATE, VOLATILITY = 0.03, 0.2


@dataclass(frozen=True)
class Sizes:
    """The sizes of all operands; the tests use smaller ones.

    Attributes:
        pair: the elements of each operand of x + y.
        chain: the elements of 2*sin(x) + 1; an eighth of them in float64.
        options: the number of options that are priced.
        square: the side of the array for reductions and reshards; softmax and layer norm use half as many columns.
        matrix: the side of matrices that are multiplied, and of grids.
        examples: the rows of a layer's input.
        features: the columns of a layer's input.
        block: the side of the matrix on each device that the maps multiply.
        steps: the number of steps of Jacobi's method.
        operators: the number of small operators in the measurement of growth.
        curve: the bytes of an operand at the points of a curve over size.
        multiplied: how many of these sizes, from the smallest on, have a matrix product.
        devices: the numbers of devices at the points of a curve over devices.
        ends: the bytes of an operand for the curves over devices.
        simulated: the numbers of devices, which do not exist, between which a copy is planned.
        equations: the numbers of equations of programs.
        shapes: the numbers of shapes for which an operator is called in turn.
        processes: the numbers of processes of a job.
    """

    pair: int = 2**25
    chain: int = 2**26
    options: int = 2**24
    square: int = 8192
    matrix: int = 4096
    examples: int = 65536
    features: int = 512
    block: int = 1024
    steps: int = 50
    operators: int = 100_000
    curve: Sequence[int] = tuple(KIB << k for k in range(0, 21, 2))
    multiplied: int = 9
    devices: Sequence[int] = (1, 2, 4, 8, 16, 32, 64)
    ends: Sequence[int] = (64 * KIB, 64 * MIB)
    simulated: Sequence[int] = (1, 4, 16, 64, 256, 1024, 4096)
    equations: Sequence[int] = (10, 100, 1000, 10_000)
    shapes: Sequence[int] = (1, 8, 64, 512, 4096)
    processes: Sequence[int] = (1, 2, 4, 8)

    @classmethod
    def from_environment(cls) -> Sizes:
        """Returns the sizes that the parent process passed in the environment."""
        return cls(**json.loads(os.environ.get(SIZES, "{}")))

    def as_environment(self) -> dict[str, str]:
        """Returns the environment variable that passes the sizes to a process."""
        return {SIZES: json.dumps(dataclasses.asdict(self))}


FULL = Sizes()
TINY = Sizes(
    pair=1024, chain=2048, options=512, square=64, matrix=32, examples=64, features=16, block=8, steps=5,
    operators=200, curve=(KIB, 4 * KIB), multiplied=1, devices=(1, 2, 8), ends=(KIB, 4 * KIB),
    simulated=(1, 4), equations=(5, 10), shapes=(1, 8), processes=(1, 2),
)  # fmt: skip


# -- operands --------------------------------------------------------------------------------------

GROUP = {
    "add": "pair",
    "three": "pair",
    "sin": "chain",
    "astype": "chain",
    "double": "double",
    "options": "options",
    **dict.fromkeys(("sum", "sum0", "sum1", "mean", "max", "argmax", "var", "reshard", "replicate"), "square"),
    "alias": "host",
    "matmul": "matrices",
    "contraction": "split",
    "layer": "layer",
    "maps": "blocks",
    "softmax": "half",
    "norm": "half",
    "transpose": "grids",
    "jacobi": "grid",
}
"""The group of each case; the cases of a group have the same operands."""


def arrays(sizes: Sizes, group: str) -> Iterator[tuple[Any, str]]:
    """Yields the operands of a group, equal for all libraries, each with its layout."""
    import numpy as np

    generator = np.random.default_rng(0)
    side, half, features = sizes.matrix, (sizes.square, sizes.square // 2), sizes.features

    def uniform(*shape: int) -> Any:
        return generator.random(shape, dtype=np.float32)

    def normal(*shape: int) -> Any:
        return generator.standard_normal(shape, dtype=np.float32)

    match group:
        case "pair":
            yield from [(uniform(sizes.pair), ROWS) for _ in range(3)]
        case "chain":
            yield uniform(sizes.chain), ROWS
        case "double":
            yield generator.random(sizes.chain // 8), ROWS
        case "options":  # prices, strikes and years for which the computation has no subnormal numbers
            yield from [(low + width * uniform(sizes.options), ROWS) for low, width in ((80, 40), (80, 40), (0.5, 2))]
        case "square":
            yield uniform(sizes.square, sizes.square), ROWS
        case "host":
            yield aligned(uniform(sizes.square, sizes.square)), AS_IS
        case "matrices":
            yield from [(normal(side, side), layout) for layout in (ROWS, WHOLE)]
        case "split":
            yield from [(normal(side, side), layout) for layout in (COLUMNS, ROWS)]
        case "layer":
            yield normal(sizes.examples, features), ROWS
            yield normal(features, features) / np.float32(math.sqrt(features)), WHOLE
            yield normal(features), WHOLE
        case "blocks":
            yield normal(DEVICES, sizes.block, sizes.block) * np.float32(2 / math.sqrt(sizes.block)), PARTS
        case "half":
            yield normal(*half), ROWS
        case "grids":
            yield from [(uniform(side, side), ROWS) for _ in range(2)]
        case "grid":  # values in [1, 2), whose means are never subnormal
            yield 1 + uniform(side, side), ROWS
            yield sizes.steps, AS_IS
        case _:
            raise ValueError(group)


def aligned(array: Any) -> Any:
    """Returns a copy that is aligned to cache lines: JAX aliases no other host array."""
    import numpy as np

    line = 64
    memory = np.empty(array.nbytes + line, np.uint8)
    copy = memory[-memory.ctypes.data % line :][: array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


class Cases(Mapping[str, Case]):
    """Cases by name. The operands of one group of cases are in memory at a time, those of the case read last.

    Args:
        functions: the function of each case, called with the operands.
        group: returns the group of a case.
        make_operands: returns the operands of a group.
        without_operands: further cases, which have no operands.
    """

    def __init__(
        self,
        functions: Mapping[str, Callable[..., Any]],
        group: Callable[[str], Hashable],
        make_operands: Callable[[Any], Sequence[Any]],
        without_operands: Mapping[str, Case],
    ) -> None:
        self._functions, self._group, self._make_operands = functions, group, make_operands
        self._without_operands = without_operands
        self._held: tuple[Hashable, Sequence[Any]] = None, ()

    def __getitem__(self, name: str) -> Case:
        if name in self._without_operands:
            return self._without_operands[name]
        group = self._group(name)
        if group != self._held[0]:
            self._held = None, ()  # frees the old operands before the new ones are made
            self._held = group, self._make_operands(group)
        return functools.partial(self._functions[name], *self._held[1])

    def __iter__(self) -> Iterator[str]:
        yield from self._functions
        yield from self._without_operands

    def __len__(self) -> int:
        return len(self._functions) + len(self._without_operands)


def library_cases(
    functions: Mapping[str, Callable[..., Any]],
    place: Callable[[Any, str], Any],
    without_operands: Mapping[str, Case] | None = None,
    compared_only: Mapping[str, Callable[..., Any]] | None = None,
) -> Cases:
    """Returns the cases of a library, and with them ``checksums`` and, where possible, ``peak`` and ``idle``.

    Args:
        functions: the function of each case, called with the operands.
        place: converts a NumPy array into the library's operand with a given layout.
        without_operands: cases that have no operands.
        compared_only: functions of which only the checksum is computed, because they measure nothing.
    """

    def maker(sizes: Sizes) -> Callable[[str], Sequence[Any]]:
        return lambda group: [place(array, layout) for array, layout in arrays(sizes, group)]

    others = dict(without_operands or {})
    cases = Cases(functions, GROUP.__getitem__, maker(Sizes.from_environment()), others)
    compared = {**functions, **(compared_only or {})}
    others["checksums"] = lambda: checksums(Cases(compared, GROUP.__getitem__, maker(TINY), {}))
    if "three" in functions:
        others["peak"] = lambda: {"peak": peak(cases["three"])}
    if "add" in functions:
        others["idle"] = lambda: {"idle": idle(cases["add"])}
    return cases


# -- what all libraries run ------------------------------------------------------------------------


def expressions(xp: Any) -> dict[str, Callable[..., Any]]:
    """Returns the functions whose source code is the same for NumPy, shardtensor and most other libraries."""

    def softmax(x: Any) -> Any:
        e = xp.exp(x - x.max(axis=1, keepdims=True))
        return e / e.sum(axis=1, keepdims=True)

    def norm(x: Any) -> Any:
        return (x - x.mean(axis=1, keepdims=True)) / xp.sqrt(x.var(axis=1, keepdims=True) + 1e-5)

    return {
        "add": lambda x, y, z: x + y,
        "three": lambda x, y, z: x + y + z,
        "sin": lambda x: 2 * xp.sin(x) + 1,
        "double": lambda x: 2 * xp.sin(x) + 1,
        "astype": lambda x: x.astype("float64"),
        "options": functools.partial(black_scholes, xp),
        "sum": lambda x: x.sum(),
        "sum0": lambda x: x.sum(axis=0),
        "sum1": lambda x: x.sum(axis=1),
        "mean": lambda x: x.mean(),
        "max": lambda x: x.max(),
        "argmax": lambda x: x.argmax(),
        "var": lambda x: x.var(),
        "matmul": lambda x, y: x @ y,
        "contraction": lambda x, y: x @ y,
        "layer": lambda x, w, b: 1 / (1 + xp.exp(-(x @ w + b))),
        "softmax": softmax,
        "norm": norm,
        "transpose": lambda x, y: x.T + y,
    }


def black_scholes(xp: Any, price: Any, strike: Any, years: Any) -> Any:
    """Returns the prices of European call options by the Black-Scholes formula."""
    spread = VOLATILITY * xp.sqrt(years)
    d = (xp.log(price / strike) + (RATE + VOLATILITY**2 / 2) * years) / spread
    return price * normal_cdf(xp, d) - strike * xp.exp(-RATE * years) * normal_cdf(xp, d - spread)


def normal_cdf(xp: Any, x: Any) -> Any:
    """Returns the normal distribution function (Abramowitz and Stegun, 26.2.17), because NumPy has no erf."""
    u = 1 / (1 + 0.2316419 * xp.abs(x))
    powers = 0.31938153 + u * (-0.356563782 + u * (1.781477937 + u * (-1.821255978 + u * 1.330274429)))
    above = 0.39894228 * xp.exp(-0.5 * x * x) * u * powers
    return xp.where(x > 0, 1 - above, above)


def jacobi(u: Any, steps: int) -> Any:
    """Runs steps of Jacobi's method for Laplace's equation with fixed values on the border, in place."""
    for _ in range(steps):
        u[1:-1, 1:-1] = 0.25 * (u[:-2, 1:-1] + u[2:, 1:-1] + u[1:-1, :-2] + u[1:-1, 2:])
    return u


def checksums(cases: Mapping[str, Case]) -> dict[str, float]:
    """Returns a checksum of the result of each case, by which the libraries are compared."""
    import numpy as np

    sums = {}
    for name in cases:
        result = cases[name]()
        parts = result if isinstance(result, list) else [result]
        flat = np.concatenate([np.ravel(np.asarray(part)).astype(np.float64) for part in parts])
        # Elements have different weights, so that elements in the wrong place change the sum.
        sums[name] = float(flat @ np.cos(np.arange(flat.size)))
    return sums


def peak(call: Case) -> float | None:
    """Returns the largest growth of memory during the first call, as a multiple of the result's size.

    It is rounded to hundredths, because Python itself allocates some pages, too. None if the operating system (not
    Linux) does not report it.
    """
    try:
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak that VmHWM reports
    except OSError:
        return None
    before = harness.resident_bytes() or 0
    result = call()
    lines = Path("/proc/self/status").read_text().splitlines()
    highest = next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))
    return round((highest * KIB - before) / int(result.nbytes), 2)


def idle(call: Case) -> float:
    """Returns the CPU seconds, over all cores, that the process uses in one second of sleep after a call."""
    call()
    started = time.process_time()
    time.sleep(1)
    return time.process_time() - started


def growth(xp: Any, place: Callable[[Any, str], Any]) -> dict[str, float | None]:
    """Returns the largest growth of the process in MiB while small operators run, chosen at random."""
    import numpy as np

    choose = random.Random(0).choice
    shapes = [(rows, columns) for rows in (1, 8, 20, 64) for columns in (1, 5, 32)]
    operands = [place(np.ones(shape, np.float32), ROWS) for shape in shapes]
    operators: list[Callable[[Any], Any]] = [
        lambda x: x + x,
        lambda x: 2 * x,
        lambda x: x.T + 1,
        lambda x: x[1:],
        lambda x: x.sum(),
        lambda x: x.mean(axis=0),
        lambda x: x @ x.T,
        xp.exp,
    ]
    for operator in operators:  # plans and compiled code that are made once do not count as growth
        for operand in operands:
            operator(operand)
    many = Sizes.from_environment().operators
    return {"growth": harness.repeat_call(lambda: choose(operators)(choose(operands)), many, lambda last: None)[1]}


# -- the cases, each function in a process of its own ----------------------------------------------


def shardtensor_cases() -> Cases:
    """Returns the cases of shardtensor, eager, on the numpy backend."""
    import numpy as np

    import shardtensor as st

    place = placement(DEVICES)
    columns, whole, mesh = place.sharding(COLUMNS), place.sharding(WHOLE), place.mesh

    def maps(parts: Any) -> Any:
        def squared(a: Any) -> Any:
            return np.tanh(a @ a)

        return st.pmap(squared, st.pmap(squared, parts))

    functions = expressions(st) | {
        "reshard": lambda x: st.device_put(x, columns),
        "replicate": lambda x: st.device_put(x, whole),
        "alias": lambda h: st.asarray(h, device=mesh, copy=False),
        "maps": maps,
        "jacobi": jacobi,
    }
    return library_cases(functions, place, {"growth": lambda: growth(st, place)})


class Placement:
    """A function that puts operands on the first ``devices`` devices.

    Attributes:
        mesh: these devices, along one axis.
    """

    def __init__(self, devices: int) -> None:
        import shardtensor as st

        self._st = st
        self.mesh = st.make_mesh((devices,), ("d",), devices=st.devices()[:devices])

    def sharding(self, layout: str) -> Any:
        """Returns the sharding of a layout."""
        axes = {ROWS: ("d",), COLUMNS: (None, "d"), WHOLE: ()}[layout]
        return self._st.NamedSharding(self.mesh, self._st.P(*axes))

    def __call__(self, array: Any, layout: str) -> Any:
        """Returns the operand with this layout for a NumPy array."""
        if layout == AS_IS:
            return array
        if layout == PARTS:
            return self._st.shard(array.reshape(-1, array.shape[-1]))
        return self._st.device_put(array, self.sharding(layout))


placement = functools.cache(Placement)


def numpy_cases() -> Cases:
    """Returns the cases of NumPy."""
    import numpy as np

    def place(array: Any, layout: str) -> Any:
        return list(array) if layout == PARTS else array

    def maps(parts: list[Any]) -> list[Any]:
        for _ in range(2):
            parts = [np.tanh(a @ a) for a in parts]
        return parts

    without_operands = {"blas": machine.blas_kernel, "growth": lambda: growth(np, place)}
    # One array is never resharded: there is nothing to measure, but the other libraries' results are compared with it.
    unchanged = dict.fromkeys(("reshard", "replicate", "alias"), lambda x: x)
    return library_cases(expressions(np) | {"maps": maps, "jacobi": jacobi}, place, without_operands, unchanged)


def limit_cases() -> Cases:
    """Returns the cases that measure the limits of the machine, with results in memory that has been used before.

    They are copies, reads and sums in as many threads as there are cores, and the matrix products of NumPy's BLAS.
    """
    import numpy as np

    cores = machine.usable_cores()
    pool = ThreadPoolExecutor(cores)
    warm = functools.lru_cache(1)(np.ones)

    def divided(call: Callable[..., Any], *operands: Any) -> None:
        list(pool.map(call, *[np.array_split(operand, cores) for operand in operands]))

    def copy(x: Any, *_: Any) -> None:
        divided(np.copyto, warm(x.shape, x.dtype), x)

    def read(x: Any) -> None:
        divided(np.sum, x)

    def add(x: Any, y: Any, *_: Any) -> None:
        divided(np.add, x, y, warm(x.shape, x.dtype))

    def multiply(x: Any, y: Any, *_: Any) -> None:
        np.matmul(x, y, out=warm((len(x), y.shape[1]), x.dtype))

    def multiply_twice(x: Any) -> None:
        for _ in range(2):
            np.matmul(x, x, out=warm(x.shape, x.dtype))

    functions: dict[str, Callable[..., Any]] = {
        "add": add,
        "transpose": add,
        "astype": lambda x: divided(np.copyto, warm(x.shape, "float64"), x),
        **dict.fromkeys(("sin", "double", "softmax", "norm", "reshard"), copy),
        **dict.fromkeys(("sum", "sum0", "sum1", "mean", "max", "argmax", "var"), read),
        **dict.fromkeys(("matmul", "contraction", "layer"), multiply),
        "maps": multiply_twice,
    }
    sizes = Sizes.from_environment()
    return Cases(functions, GROUP.__getitem__, lambda group: [array for array, _ in arrays(sizes, group)], {})


def jax_cases() -> Cases:
    """Returns the cases of JAX, compiled, on the CPU devices that its flags set. Every case waits for its result."""
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    devices = jax.device_count()
    mesh = jax.make_mesh((devices,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    specs = {ROWS: PartitionSpec("d"), COLUMNS: PartitionSpec(None, "d"), WHOLE: PartitionSpec()}
    shardings = {layout: NamedSharding(mesh, spec) for layout, spec in (specs | {PARTS: specs[ROWS]}).items()}
    xp = jax.numpy

    def place(array: Any, layout: str) -> Any:
        if layout == AS_IS:
            return array
        with jax.enable_x64(array.dtype.itemsize == 8):
            return jax.block_until_ready(jax.device_put(array, shardings[layout]))

    def squared(a: Any) -> Any:
        return xp.tanh(a @ a)

    def scattered(x: Any, y: Any) -> Any:
        return jax.lax.psum_scatter(x @ y, "d", tiled=True)

    def jacobi_steps(u: Any, steps: int) -> Any:
        return jax.lax.fori_loop(0, steps, lambda _, u: jacobi_block(jax, u, devices), u)

    def mapped(f: Any, *layouts: str) -> Any:
        return jax.shard_map(f, mesh=mesh, in_specs=tuple(specs[layout] for layout in layouts), out_specs=specs[ROWS])

    compiled = {name: jax.jit(f) for name, f in expressions(xp).items()} | {
        "contraction": jax.jit(mapped(scattered, COLUMNS, ROWS)),
        "layer": jax.jit(lambda x, w, b: jax.nn.sigmoid(x @ w + b)),
        "softmax": jax.jit(functools.partial(jax.nn.softmax, axis=1)),
        "maps": jax.jit(lambda a: jax.vmap(squared)(jax.vmap(squared)(a))),
        "jacobi": jax.jit(lambda u, steps: mapped(lambda u: jacobi_steps(u, steps), ROWS)(u), static_argnums=1),
        "alias": lambda h: jax.device_put(h, shardings[ROWS], may_alias=True),
    }
    if devices == DEVICES:
        each = jax.pmap(squared)
        compiled["maps"] = lambda a: each(each(a))
    if devices > 1:  # on one device these would do nothing
        compiled["reshard"] = lambda x: jax.device_put(x, shardings[COLUMNS])
        compiled["replicate"] = jax.jit(lambda x: x, out_shardings=shardings[WHOLE])

    def blocking(name: str, call: Any) -> Callable[..., Any]:
        def wide(*operands: Any) -> Any:
            with jax.enable_x64(True):
                return jax.block_until_ready(call(*operands))

        return wide if name in ("double", "astype") else lambda *operands: jax.block_until_ready(call(*operands))

    return library_cases({name: blocking(name, call) for name, call in compiled.items()}, place)


def jacobi_block(jax: Any, u: Any, devices: int) -> Any:
    """Returns a step of Jacobi's method on the rows of one device, after exchanging halo rows with its neighbours."""
    xp, rows = jax.numpy, len(u)
    above = jax.lax.ppermute(u[-1:], "d", [(k, k + 1) for k in range(devices - 1)])
    below = jax.lax.ppermute(u[:1], "d", [(k + 1, k) for k in range(devices - 1)])
    tall = xp.concatenate([above, u, below])
    new = 0.25 * (tall[:-2, 1:-1] + tall[2:, 1:-1] + u[:, :-2] + u[:, 2:])
    row = jax.lax.axis_index("d") * rows + xp.arange(rows)[:, None]
    edge = (row == 0) | (row == devices * rows - 1)
    return u.at[:, 1:-1].set(xp.where(edge, u[:, 1:-1], new))


def torch_cases() -> Cases:
    """Returns the cases of PyTorch, eager, with its own functions for softmax, layer norm, and the like."""
    import torch

    def place(array: Any, layout: str) -> Any:
        return array if isinstance(array, int) else torch.from_numpy(array)

    def maps(a: Any) -> Any:
        for _ in range(2):
            a = torch.tanh(a @ a)
        return a

    functions = expressions(torch) | {
        "astype": lambda x: x.to(torch.float64),
        "var": lambda x: x.var(correction=0),
        "layer": lambda x, w, b: torch.sigmoid(torch.addmm(b, x, w)),
        "softmax": lambda x: torch.softmax(x, 1),
        "norm": lambda x: torch.nn.functional.layer_norm(x, x.shape[1:], eps=1e-5),
        "maps": maps,
        "jacobi": jacobi,
    }
    return library_cases(functions, place)


def dask_cases() -> Cases:
    """Returns the cases of Dask, with arrays of eight chunks, computed by its threads."""
    import dask.array as da

    def place(array: Any, layout: str) -> Any:
        split = {ROWS: 0, COLUMNS: 1}.get(layout)
        chunks = tuple(n // DEVICES if k == split else n for k, n in enumerate(array.shape))
        return da.from_array(array, chunks=chunks, name=False)

    def computed(f: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *operands: f(*operands).compute()

    return library_cases({name: computed(f) for name, f in expressions(da).items()}, place)


def numba_cases() -> Cases:
    """Returns the cases of Numba: loops that it compiles and divides among threads."""
    import numba
    import numpy as np

    compiled = numba.njit(parallel=True)

    @compiled
    def chain(x: Any) -> Any:
        one, two = x.dtype.type(1), x.dtype.type(2)
        result = np.empty_like(x)
        for i in numba.prange(x.size):
            result[i] = two * np.sin(x[i]) + one
        return result

    @compiled
    def step(u: Any, new: Any) -> None:
        quarter = u.dtype.type(0.25)
        for i in numba.prange(1, u.shape[0] - 1):
            for j in range(1, u.shape[1] - 1):
                new[i, j] = quarter * (u[i - 1, j] + u[i + 1, j] + u[i, j - 1] + u[i, j + 1])

    def run_steps(u: Any, steps: int) -> Any:
        new = u.copy()
        for _ in range(steps):
            step(u, new)
            u, new = new, u
        return u

    return library_cases({"sin": chain, "double": chain, "jacobi": run_steps}, lambda array, layout: array)
