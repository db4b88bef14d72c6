"""The cost of random numbers: large arrays of each distribution, permutations, and tiny arrays.

``python benchmarks/random_numbers.py [--quick] [--out DIR] [--label LABEL]``; README.md says how to read the table.
(A file random.py would hide Python's module of that name from all scripts of this folder.)
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import harness
import machine
import tables
from harness import DEVICES, JAX_2, NUMPY, PROJECT, Case, Worker
from tables import Best, Row, Table, Target

TITLE = f"Random numbers: arrays over {DEVICES} logical devices of one host; JAX is jitted, (2): over 2 CPU devices"
JAX = "JAX"
BEST = Best("best JAX", (JAX, JAX_2))
AS_NUMPY = Target(1.0, NUMPY)

LARGE = (
    Row("uniform float32", "uniform float32, 4 M", (AS_NUMPY, Target(0.7, BEST))),
    Row("uniform float64", "uniform float64, 4 M", (AS_NUMPY, Target(0.7, BEST))),
    Row("normal float32", "normal float32, 4 M", (AS_NUMPY, Target(1.0, BEST))),
    Row("normal float64", "normal float64, 4 M", (AS_NUMPY, Target(1.0, BEST))),
    Row("exponential float64", "exponential float64, 4 M", (AS_NUMPY,)),
    Row("integers", "integers below 1000, 4 M", (AS_NUMPY,)),
    Row("bernoulli", "bernoulli, 4 M", (AS_NUMPY,)),
    Row("gamma", "gamma of 2.5, 256 Ki", (AS_NUMPY,)),
    Row("poisson", "poisson of 4, 256 Ki", (AS_NUMPY,)),
    Row("binomial", "binomial of 100 and 0.3, 256 Ki", (AS_NUMPY,)),
    Row("choice", "choice of 256 Ki numbers, 256 Ki", (AS_NUMPY,)),
    Row("permutation", "permutation, 256 Ki", (AS_NUMPY,)),
)
SMALL = (
    Row("tiny uniform", "uniform, 8", (Target(1.0, NUMPY, more=20e-6),)),
    Row("tiny normal", "normal, 8", (Target(1.0, NUMPY, more=20e-6),)),
    Row("tiny integers", "integers, 8", (Target(1.0, NUMPY, more=20e-6),)),
)


@dataclass(frozen=True)
class Sizes:
    """The numbers of elements: of large arrays, of large arrays of slow distributions, and of tiny arrays."""

    large: int = 1 << 22
    medium: int = 1 << 18
    small: int = 8


SIZES = Sizes()


# -- the cases, each function in a process of its own ----------------------------------------------


def shardtensor_cases(sizes: Sizes = SIZES) -> dict[str, Case]:
    """Returns the cases of shardtensor, eager, on the numpy backend; each call uses a new key."""
    import shardtensor as st

    draw, mesh = st.random, st.make_mesh((DEVICES,), ("d",))
    keys = itertools.cycle(st.random.split(st.random.key(0), 1000))
    n, some, few, to = (sizes.large,), (sizes.medium,), (sizes.small,), {"device": mesh}
    return {
        **{f"uniform {d}": lambda d=d: draw.uniform(next(keys), n, dtype=d, **to) for d in ("float32", "float64")},
        **{f"normal {d}": lambda d=d: draw.normal(next(keys), n, dtype=d, **to) for d in ("float32", "float64")},
        "exponential float64": lambda: draw.exponential(next(keys), n, **to),
        "integers": lambda: draw.integers(next(keys), 0, 1000, n, **to),
        "bernoulli": lambda: draw.bernoulli(next(keys), 0.3, n, **to),
        "gamma": lambda: draw.gamma(next(keys), 2.5, some, **to),
        "poisson": lambda: draw.poisson(next(keys), 4.0, some, **to),
        "binomial": lambda: draw.binomial(next(keys), 100, 0.3, some, **to),
        "choice": lambda: draw.choice(next(keys), sizes.medium, some, **to),
        "permutation": lambda: draw.permutation(next(keys), sizes.medium, **to),
        "tiny uniform": lambda: draw.uniform(next(keys), few, **to),
        "tiny normal": lambda: draw.normal(next(keys), few, **to),
        "tiny integers": lambda: draw.integers(next(keys), 0, 1000, few, **to),
    }


def numpy_cases(sizes: Sizes = SIZES) -> dict[str, Case]:
    """Returns the cases of NumPy's default generator, whose numbers depend on its state."""
    import numpy as np

    draw = np.random.default_rng(0)
    n, some, few = sizes.large, sizes.medium, sizes.small
    return {
        **{f"uniform {d}": lambda d=d: draw.random(n, dtype=d) for d in ("float32", "float64")},
        **{f"normal {d}": lambda d=d: draw.standard_normal(n, dtype=d) for d in ("float32", "float64")},
        "exponential float64": lambda: draw.standard_exponential(n),
        "integers": lambda: draw.integers(0, 1000, n),
        "bernoulli": lambda: draw.random(n) < 0.3,
        "gamma": lambda: draw.standard_gamma(2.5, some),
        "poisson": lambda: draw.poisson(4.0, some),
        "binomial": lambda: draw.binomial(100, 0.3, some),
        "choice": lambda: draw.choice(some, some),
        "permutation": lambda: draw.permutation(some),
        "tiny uniform": lambda: draw.random(few),
        "tiny normal": lambda: draw.standard_normal(few),
        "tiny integers": lambda: draw.integers(0, 1000, few),
    }


def jax_cases(sizes: Sizes = SIZES) -> dict[str, Case]:
    """Returns the cases of JAX, jitted, over its CPU devices; each call uses a new key and waits for its result."""
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    jax.config.update("jax_enable_x64", True)
    draw, place = jax.random, NamedSharding(Mesh(np.array(jax.devices()), ("d",)), PartitionSpec("d"))
    keys = itertools.cycle(list(jax.random.split(jax.random.key(0), 1000)))

    def case(function: Any) -> Case:
        jitted = jax.jit(function, out_shardings=place)
        return lambda: jitted(next(keys)).block_until_ready()

    n, some, few = (sizes.large,), (sizes.medium,), (sizes.small,)
    return {
        **{f"uniform {d}": case(lambda k, d=d: draw.uniform(k, n, d)) for d in ("float32", "float64")},
        **{f"normal {d}": case(lambda k, d=d: draw.normal(k, n, d)) for d in ("float32", "float64")},
        "exponential float64": case(lambda k: draw.exponential(k, n, "float64")),
        "integers": case(lambda k: draw.randint(k, n, 0, 1000, "int64")),
        "bernoulli": case(lambda k: draw.bernoulli(k, 0.3, n)),
        "gamma": case(lambda k: draw.gamma(k, 2.5, some, "float64")),
        "poisson": case(lambda k: draw.poisson(k, 4.0, some)),
        "binomial": case(lambda k: draw.binomial(k, 100, 0.3, some)),
        "choice": case(lambda k: draw.choice(k, sizes.medium, some)),
        "permutation": case(lambda k: draw.permutation(k, sizes.medium)),
        "tiny uniform": case(lambda k: draw.uniform(k, few, "float64")),
        "tiny normal": case(lambda k: draw.normal(k, few, "float64")),
        "tiny integers": case(lambda k: draw.randint(k, few, 0, 1000, "int64")),
    }


# -- the run ---------------------------------------------------------------------------------------


def start_workers() -> contextlib.AbstractContextManager[dict[str, Worker]]:
    """Starts the worker of each column; a context manager that ends them."""
    return harness.start_workers(
        {
            PROJECT: ("shardtensor", "random_numbers:shardtensor_cases", harness.logical_devices(DEVICES)),
            NUMPY: ("numpy", "random_numbers:numpy_cases", {}),
            JAX: ("jax", "random_numbers:jax_cases", harness.virtual_devices(1)),
            JAX_2: ("jax", "random_numbers:jax_cases", harness.virtual_devices(2)),
        }
    )


@dataclass(frozen=True)
class Effort:
    """The number of rounds for each kind of row."""

    small: int = 150
    large: int = 15


QUICK = Effort(small=20, large=3)


def measure(effort: Effort) -> Table:
    """Measures the whole table."""
    with start_workers() as workers:
        return measure_with(effort, workers)


def measure_with(effort: Effort, workers: Mapping[str, Any]) -> Table:
    """Measures the whole table with these workers."""
    environment = machine.describe_environment(("numpy", "jax", "shardtensor")) | {
        "rounds": f"large arrays {effort.large}, tiny ones {effort.small}",
    }
    cells: tables.Cells = {}
    for rows, rounds, description in (LARGE, effort.large, "large arrays"), (SMALL, effort.small, "tiny arrays"):
        cells |= harness.sample_cases([row.name for row in rows], workers, rounds, description)
    return Table(TITLE, environment, tuple(workers), (*LARGE, *SMALL), cells)


if __name__ == "__main__":
    harness.run("random_numbers", "The cost of random numbers.", measure, Effort(), QUICK)
