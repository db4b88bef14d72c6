"""The cases of `cpu.py`: what is measured on a CPU, with this library and its peers, each in its best form."""

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
from harness import DEVICES, Case

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
SIZES = "BENCHMARK_SIZES"

ROWS, COLUMNS, WHOLE, PARTS, AS_IS = "rows", "columns", "whole", "parts", "as it is"
"""How an operand lies: split along an axis, whole on each device, one array for each device, or not placed at all."""

RATE, VOLATILITY = 0.03, 0.2


@dataclass(frozen=True)
class Sizes:
    """How large everything is. Tests take less.

    Attributes:
        pair: elements of each operand of x + y.
        chain: elements of 2*sin(x)+1; of float64, an eighth.
        options: how many are priced.
        square: side of the array that is reduced and moved; softmax and layer norm take half as many columns.
        matrix: side of the matrices that are multiplied, and of the grid.
        examples: rows that go through a layer.
        features: columns of them.
        block: side of the matrix that each device maps.
        steps: of Jacobi's method.
        operators: how many small ones run in a row.
        curve: bytes of an operand, along a curve; `multiplied` of them are multiplied.
        multiplied: see there.
        devices: their numbers, along a curve, for operands of `ends` bytes.
        ends: see there.
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

    @classmethod
    def told(cls) -> Sizes:
        """Those that this process was started with."""
        return cls(**json.loads(os.environ.get(SIZES, "{}")))

    def as_environment(self) -> dict[str, str]:
        """The variable that tells a process."""
        return {SIZES: json.dumps(dataclasses.asdict(self))}


FULL = Sizes()
TINY = Sizes(
    pair=1024, chain=2048, options=512, square=64, matrix=32, examples=64, features=16, block=8, steps=5,
    operators=200, curve=(KIB, 4 * KIB), multiplied=1, devices=(1, 2, 8), ends=(KIB, 4 * KIB)
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
"""By case, the operands that it shares with others."""


def arrays(sizes: Sizes, group: str) -> Iterator[tuple[Any, str]]:
    """The operands of a group, the same for all, and how each lies."""
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
        case "options":  # prices, strikes and years for which no tail of the distribution is subnormal
            yield from [(low + width * uniform(sizes.options), ROWS) for low, width in ((80, 40), (80, 40), (0.5, 2))]
        case "square":
            yield uniform(sizes.square, sizes.square), ROWS
        case "host":
            yield aligned(uniform(sizes.square, sizes.square)), AS_IS
        case "matrices":
            yield from [(normal(side, side), how) for how in (ROWS, WHOLE)]
        case "split":
            yield from [(normal(side, side), how) for how in (COLUMNS, ROWS)]
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
        case "grid":  # of normal numbers, and so are all means of them
            yield 1 + uniform(side, side), ROWS
            yield sizes.steps, AS_IS
        case _:
            raise ValueError(group)


def aligned(array: Any) -> Any:
    """A copy that begins where a cache line does: JAX takes no other as it is."""
    import numpy as np

    line = 64
    room = np.empty(array.nbytes + line, np.uint8)
    found = room[-room.ctypes.data % line :][: array.nbytes].view(array.dtype).reshape(array.shape)
    found[...] = array
    return found


class Cases(Mapping[str, Case]):
    """Cases by name. Asking for one makes its operands, unless the one before had the same; no others are in memory.

    Args:
        functions: of the operands, by name of the case.
        group: which operands a case has.
        made: these operands.
        alone: cases that have none.
    """

    def __init__(
        self,
        functions: Mapping[str, Callable[..., Any]],
        group: Callable[[str], Hashable],
        made: Callable[[Any], Sequence[Any]],
        alone: Mapping[str, Case],
    ) -> None:
        self._functions, self._group, self._made, self._alone = functions, group, made, alone
        self._held: tuple[Hashable, Sequence[Any]] = None, ()

    def __getitem__(self, name: str) -> Case:
        if name in self._alone:
            return self._alone[name]
        group = self._group(name)
        if group != self._held[0]:
            self._held = None, ()  # gone before others are made
            self._held = group, self._made(group)
        return functools.partial(self._functions[name], *self._held[1])

    def __iter__(self) -> Iterator[str]:
        yield from self._functions
        yield from self._alone

    def __len__(self) -> int:
        return len(self._functions) + len(self._alone)


def library(
    functions: Mapping[str, Callable[..., Any]],
    place: Callable[[Any, str], Any],
    alone: Mapping[str, Case] | None = None,
    answered: Mapping[str, Callable[..., Any]] | None = None,
) -> Cases:
    """The cases of a library.

    Args:
        functions: by name of the case.
        place: an operand as the library has it, from NumPy's, and how it lies.
        alone: cases that have no operands.
        answered: functions that only answer.
    """

    def made(sizes: Sizes) -> Callable[[str], Sequence[Any]]:
        return lambda group: [place(array, how) for array, how in arrays(sizes, group)]

    found = dict(alone or {})
    cases = Cases(functions, GROUP.__getitem__, made(Sizes.told()), found)
    known = {**functions, **(answered or {})}
    found["answers"] = lambda: answers(Cases(known, GROUP.__getitem__, made(TINY), {}))
    if "three" in functions:
        found["peak"] = lambda: {"peak": peak(cases["three"])}
    if "add" in functions:
        found["idle"] = lambda: {"idle": idle(cases["add"])}
    return cases


# -- what all libraries run ------------------------------------------------------------------------


def expressions(xp: Any) -> dict[str, Callable[..., Any]]:
    """What is written alike with arrays of NumPy, of this library, and of most others."""

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
    """What European calls are worth."""
    spread = VOLATILITY * xp.sqrt(years)
    d = (xp.log(price / strike) + (RATE + VOLATILITY**2 / 2) * years) / spread
    return price * normal_below(xp, d) - strike * xp.exp(-RATE * years) * normal_below(xp, d - spread)


def normal_below(xp: Any, x: Any) -> Any:
    """The share of a normal distribution below x (Abramowitz and Stegun, 26.2.17), since NumPy has no erf."""
    u = 1 / (1 + 0.2316419 * xp.abs(x))
    powers = 0.31938153 + u * (-0.356563782 + u * (1.781477937 + u * (-1.821255978 + u * 1.330274429)))
    above = 0.39894228 * xp.exp(-0.5 * x * x) * u * powers
    return xp.where(x > 0, 1 - above, above)


def jacobi(u: Any, steps: int) -> Any:
    """Steps towards the values inside that the values at the border determine, in place."""
    for _ in range(steps):
        u[1:-1, 1:-1] = 0.25 * (u[:-2, 1:-1] + u[2:, 1:-1] + u[1:-1, :-2] + u[1:-1, 2:])
    return u


def answers(cases: Mapping[str, Case]) -> dict[str, float]:
    """One number from the result of each case, by which the libraries can be compared."""
    import numpy as np

    found = {}
    for name in cases:
        result = cases[name]()
        parts = result if isinstance(result, list) else [result]
        flat = np.concatenate([np.ravel(np.asarray(part)).astype(np.float64) for part in parts])
        found[name] = float(flat @ np.cos(np.arange(flat.size)))  # weights, so that elements at wrong places show
    return found


def peak(call: Case) -> float | None:
    """How far memory rises during the first call above what it was before, in units of the result and no finer than
    hundredths, since Python takes some pages, too; None where the operating system does not say.
    """
    try:
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    except OSError:
        return None
    before = harness.resident_bytes() or 0
    result = call()
    lines = Path("/proc/self/status").read_text().splitlines()
    highest = next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))
    return round((highest * KIB - before) / int(result.nbytes), 2)


def idle(call: Case) -> float:
    """Seconds of all cores that the process uses in a second of sleep, after a call."""
    call()
    started = time.process_time()
    time.sleep(1)
    return time.process_time() - started


def growth(xp: Any, place: Callable[[Any, str], Any]) -> dict[str, float | None]:
    """By how much the process grows during small operators, one chosen after the other by chance."""
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
    for operator in operators:  # what is planned or compiled once is no growth
        for operand in operands:
            operator(operand)
    many = Sizes.told().operators
    return {"growth": harness.repeated(lambda: choose(operators)(choose(operands)), many, lambda last: None)[1]}


# -- the cases, each function in a process of its own ----------------------------------------------


def shardtensor_cases() -> Cases:
    """The library itself, eager, on the numpy backend."""
    import numpy as np

    import shardtensor as st

    place = placing(DEVICES)
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
    return library(functions, place, {"growth": lambda: growth(st, place)})


class Placing:
    """Puts operands on the first devices.

    Attributes:
        mesh: these devices, along one axis.
    """

    def __init__(self, devices: int) -> None:
        import shardtensor as st

        self._st = st
        self.mesh = st.make_mesh((devices,), ("d",), devices=st.devices()[:devices])

    def sharding(self, how: str) -> Any:
        """Of arrays that lie so."""
        axes = {ROWS: ("d",), COLUMNS: (None, "d"), WHOLE: ()}[how]
        return self._st.NamedSharding(self.mesh, self._st.P(*axes))

    def __call__(self, array: Any, how: str) -> Any:
        """The library's own, of NumPy's."""
        if how == AS_IS:
            return array
        if how == PARTS:
            return self._st.shard(array.reshape(-1, array.shape[-1]))
        return self._st.device_put(array, self.sharding(how))


placing = functools.cache(Placing)


def numpy_cases() -> Cases:
    """Plain NumPy."""
    import numpy as np

    def place(array: Any, how: str) -> Any:
        return list(array) if how == PARTS else array

    def maps(parts: list[Any]) -> list[Any]:
        for _ in range(2):
            parts = [np.tanh(a @ a) for a in parts]
        return parts

    alone = {"blas": harness.blas_kernel, "growth": lambda: growth(np, place)}
    moved = dict.fromkeys(("reshard", "replicate", "alias"), lambda x: x)  # which one array has no need of
    return library(expressions(np) | {"maps": maps, "jacobi": jacobi}, place, alone, moved)


def limit_cases() -> Cases:
    """What the machine allows, into memory that has been used before: copies, reads and sums by as many threads as
    there are cores, and the matrix products of NumPy's BLAS.
    """
    import numpy as np

    cores = harness.usable_cores()
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
    sizes = Sizes.told()
    return Cases(functions, GROUP.__getitem__, lambda group: [array for array, _ in arrays(sizes, group)], {})


def jax_cases() -> Cases:
    """JAX, compiled, on as many CPU devices as its flags ask for. Every case waits for its result."""
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    devices = jax.device_count()
    mesh = jax.make_mesh((devices,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    specs = {ROWS: PartitionSpec("d"), COLUMNS: PartitionSpec(None, "d"), WHOLE: PartitionSpec()}
    lies = {how: NamedSharding(mesh, spec) for how, spec in specs.items()} | {PARTS: NamedSharding(mesh, specs[ROWS])}
    xp = jax.numpy

    def place(array: Any, how: str) -> Any:
        if how == AS_IS:
            return array
        with jax.enable_x64(array.dtype.itemsize == 8):
            return jax.block_until_ready(jax.device_put(array, lies[how]))

    def squared(a: Any) -> Any:
        return xp.tanh(a @ a)

    def scattered(x: Any, y: Any) -> Any:
        return jax.lax.psum_scatter(x @ y, "d", tiled=True)

    def halved(u: Any, steps: int) -> Any:
        return jax.lax.fori_loop(0, steps, lambda _, u: jacobi_block(jax, u, devices), u)

    def mapped(f: Any, *split: str) -> Any:
        return jax.shard_map(f, mesh=mesh, in_specs=tuple(specs[how] for how in split), out_specs=specs[ROWS])

    compiled = {name: jax.jit(f) for name, f in expressions(xp).items()} | {
        "contraction": jax.jit(mapped(scattered, COLUMNS, ROWS)),
        "layer": jax.jit(lambda x, w, b: jax.nn.sigmoid(x @ w + b)),
        "softmax": jax.jit(functools.partial(jax.nn.softmax, axis=1)),
        "maps": jax.jit(lambda a: jax.vmap(squared)(jax.vmap(squared)(a))),
        "jacobi": jax.jit(lambda u, steps: mapped(lambda u: halved(u, steps), ROWS)(u), static_argnums=1),
        "alias": lambda h: jax.device_put(h, lies[ROWS], may_alias=True),
    }
    if devices == DEVICES:
        each = jax.pmap(squared)
        compiled["maps"] = lambda a: each(each(a))
    if devices > 1:  # between several there is something to move
        compiled["reshard"] = lambda x: jax.device_put(x, lies[COLUMNS])
        compiled["replicate"] = jax.jit(lambda x: x, out_shardings=lies[WHOLE])

    def waited(name: str, call: Any) -> Callable[..., Any]:
        def wide(*operands: Any) -> Any:
            with jax.enable_x64(True):
                return jax.block_until_ready(call(*operands))

        return wide if name in ("double", "astype") else lambda *operands: jax.block_until_ready(call(*operands))

    return library({name: waited(name, call) for name, call in compiled.items()}, place)


def jacobi_block(jax: Any, u: Any, devices: int) -> Any:
    """A step of Jacobi's method on the rows of one device, once the neighbours have sent theirs."""
    xp, rows = jax.numpy, len(u)
    above = jax.lax.ppermute(u[-1:], "d", [(k, k + 1) for k in range(devices - 1)])
    below = jax.lax.ppermute(u[:1], "d", [(k + 1, k) for k in range(devices - 1)])
    tall = xp.concatenate([above, u, below])
    new = 0.25 * (tall[:-2, 1:-1] + tall[2:, 1:-1] + u[:, :-2] + u[:, 2:])
    row = jax.lax.axis_index("d") * rows + xp.arange(rows)[:, None]
    edge = (row == 0) | (row == devices * rows - 1)
    return u.at[:, 1:-1].set(xp.where(edge, u[:, 1:-1], new))


def torch_cases() -> Cases:
    """PyTorch, eager, with its own functions where it has them in one piece."""
    import torch

    def place(array: Any, how: str) -> Any:
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
    return library(functions, place)


def dask_cases() -> Cases:
    """Dask's arrays of eight chunks, computed by its threads."""
    import dask.array as da

    def place(array: Any, how: str) -> Any:
        cut = {ROWS: 0, COLUMNS: 1}.get(how)
        chunks = tuple(n // DEVICES if k == cut else n for k, n in enumerate(array.shape))
        return da.from_array(array, chunks=chunks, name=False)

    def computed(f: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *operands: f(*operands).compute()

    return library({name: computed(f) for name, f in expressions(da).items()}, place)


def numba_cases() -> Cases:
    """Loops that Numba compiles, and divides among threads."""
    import numba
    import numpy as np

    compiled = numba.njit(parallel=True)

    @compiled
    def chain(x: Any) -> Any:
        one, two = x.dtype.type(1), x.dtype.type(2)
        found = np.empty_like(x)
        for i in numba.prange(x.size):
            found[i] = two * np.sin(x[i]) + one
        return found

    @compiled
    def step(u: Any, new: Any) -> None:
        quarter = u.dtype.type(0.25)
        for i in numba.prange(1, u.shape[0] - 1):
            for j in range(1, u.shape[1] - 1):
                new[i, j] = quarter * (u[i - 1, j] + u[i + 1, j] + u[i, j - 1] + u[i, j + 1])

    def steps_of(u: Any, steps: int) -> Any:
        new = u.copy()
        for _ in range(steps):
            step(u, new)
            u, new = new, u
        return u

    return library({"sin": chain, "double": chain, "jacobi": steps_of}, lambda array, how: array)
