"""The cost, on large arrays, of functions of NumPy that need more than one pass over their elements.

``python benchmarks/functions.py [--quick] [--out DIR] [--label LABEL]``; README.md says how to read the table.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import harness
import machine
import tables
from harness import DEVICES, JAX_2, NUMPY, PROJECT, Case, Worker
from tables import Row, Table, Target

TITLE = (
    f"Functions of NumPy: float64 arrays over {DEVICES} logical devices of one host; JAX is jitted, over 2 CPU devices"
)

AS_NUMPY = (Target(1.1, NUMPY),)
PRODUCTS = (
    Row("einsum", "einsum of three matrices, 1024²", AS_NUMPY),
    Row("matmul", "x @ y, 2000²", AS_NUMPY),
    Row("cholesky", "cholesky, 1000²", AS_NUMPY),
    Row("rows", "einsum('ij,ij->i'), 2000²", AS_NUMPY),
    Row("kron", "kron of (1000, 4) and (4, 1000)", AS_NUMPY),
)
PASSES = (
    Row("median", "median, 16 M", (Target(1.05, NUMPY),)),
    Row("percentile", "percentiles 5, 50 and 95, 16 M", (Target(1.05, NUMPY),)),
    Row("histogram", "histogram of 100 bins, 16 M", (Target(1.05, NUMPY),)),
    Row("bincount", "bincount of 1000 numbers, 16 M", (Target(1.05, NUMPY),)),
    Row("weights", "bincount with weights, 16 M", AS_NUMPY),
    Row("unique", "unique of 1000 numbers, 16 M", (Target(1.05, NUMPY),)),
    Row("inverse", "unique with inverse, 16 M", AS_NUMPY),
    Row("argsort", "argsort, 4 M", AS_NUMPY),
    Row("lexsort", "lexsort of two keys, 4 M", AS_NUMPY),
    Row("argmax", "argmax(axis=1), 2000²", AS_NUMPY),
    Row("add.at", "np.add.at, 1000 sums of 16 M", AS_NUMPY),
    Row("mask", "x[mask], half of 16 M", (Target(1.3, NUMPY),)),
    Row("nonzero", "nonzero, half of 16 M", (Target(1.3, NUMPY),)),
)


@dataclass(frozen=True)
class Sizes:
    """The sides of the matrices and the number of elements of the other arrays; a quarter of them is sorted."""

    side: int = 1024
    square: int = 2000
    large: int = 1 << 24


SIZES = Sizes()


# -- the cases, each library in a process of its own -----------------------------------------------


def _operands(sizes: Sizes) -> dict[str, Any]:
    import numpy as np

    rng = np.random.default_rng(0)
    side, n = sizes.side, sizes.large
    return {
        "a": rng.normal(size=(side, side)),
        "b": rng.normal(size=(side, side // 8)),
        "c": rng.normal(size=(side // 8, side)),
        "x": rng.normal(size=n),
        "k": rng.integers(0, 1000, n),
        "m": rng.random(n) < 0.5,
        "s": rng.normal(size=(sizes.square, sizes.square)),
        "p": _positive_definite(rng.normal(size=(sizes.square // 2, sizes.square // 2))),
        "u": rng.normal(size=(sizes.square // 2, 4)),
        "v": rng.normal(size=(4, sizes.square // 2)),
    }


def _positive_definite(x: Any) -> Any:
    import numpy as np

    return x @ x.T + np.eye(len(x))


def shardtensor_cases(sizes: Sizes = SIZES) -> dict[str, Case]:
    """Returns the cases of shardtensor, eager, on the numpy backend. Operands are split by their first dimension."""
    import shardtensor as st

    split = st.NamedSharding(st.make_mesh((DEVICES,), ("d",)), st.P("d"))
    return _cases(st, {name: st.device_put(x, split) for name, x in _operands(sizes).items()}, optimize=True)


def numpy_cases(sizes: Sizes = SIZES) -> dict[str, Case]:
    """Returns the cases of NumPy."""
    import numpy as np

    return _cases(np, _operands(sizes), optimize=True)


def _cases(xp: Any, operands: Mapping[str, Any], **options: Any) -> dict[str, Case]:
    import numpy as np

    a, b, c, x, k, m, s, p, u, v = [operands[name] for name in "abcxkmspuv"]
    some, few = x[: x.size // 4], k[: x.size // 4]

    def add_at() -> Any:
        sums = xp.zeros(1000)
        np.add.at(sums, k, x)
        return sums

    return {
        "matmul": lambda: s @ s,
        "cholesky": lambda: xp.linalg.cholesky(p),
        "rows": lambda: xp.einsum("ij,ij->i", s, s),
        "kron": lambda: xp.kron(u, v),
        "weights": lambda: xp.bincount(k, weights=x, minlength=1000),
        "inverse": lambda: np.unique(k, return_inverse=True),
        "argsort": lambda: np.argsort(some),
        "lexsort": lambda: np.lexsort((some, few)),
        "argmax": lambda: s.argmax(axis=1),
        "add.at": add_at,
        "einsum": lambda: xp.einsum("ij,jk,kl->il", a, b, c, **options),
        "median": lambda: xp.median(x),
        "percentile": lambda: xp.percentile(x, [5, 50, 95]),
        "histogram": lambda: xp.histogram(x, 100, (-5.0, 5.0)),
        "bincount": lambda: xp.bincount(k, minlength=1000),
        "unique": lambda: xp.unique(k),
        "mask": lambda: x[m],
        "nonzero": lambda: xp.nonzero(m),
    }


def jax_cases(sizes: Sizes = SIZES) -> dict[str, Case]:
    """Returns the cases of JAX, jitted, over its CPU devices. jit rejects functions whose shapes depend on elements."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    jax.config.update("jax_enable_x64", True)
    split = NamedSharding(Mesh(np.array(jax.devices()), ("d",)), PartitionSpec("d"))
    a, b, c, x, k, _, s, p, u, v = [jax.device_put(y, split) for y in _operands(sizes).values()]
    some, few = x[: x.size // 4], k[: x.size // 4]

    def case(function: Any, *operands: Any) -> Case:
        jitted = jax.jit(function)
        return lambda: jax.block_until_ready(jitted(*operands))

    return {
        "einsum": case(lambda *y: jnp.einsum("ij,jk,kl->il", *y, optimize=True), a, b, c),
        "median": case(jnp.median, x),
        "percentile": case(lambda y: jnp.percentile(y, jnp.array([5.0, 50.0, 95.0])), x),
        "histogram": case(lambda y: jnp.histogram(y, 100, (-5.0, 5.0)), x),
        "bincount": case(lambda y: jnp.bincount(y, length=1000), k),
        "weights": case(lambda y, w: jnp.bincount(y, w, length=1000), k, x),
        "matmul": case(jnp.matmul, s, s),
        "cholesky": case(jnp.linalg.cholesky, p),
        "rows": case(lambda y: jnp.einsum("ij,ij->i", y, y), s),
        "kron": case(jnp.kron, u, v),
        "argsort": case(jnp.argsort, some),
        "lexsort": case(lambda y, z: jnp.lexsort((y, z)), some, few),
        "argmax": case(lambda y: jnp.argmax(y, axis=1), s),
        "add.at": case(lambda y, w: jnp.zeros(1000).at[y].add(w), k, x),
    }


# -- the run ---------------------------------------------------------------------------------------


def start_workers() -> contextlib.AbstractContextManager[dict[str, Worker]]:
    """Starts the worker of each column; a context manager that ends them."""
    return harness.start_workers(
        {
            PROJECT: ("shardtensor", "functions:shardtensor_cases", harness.logical_devices(DEVICES)),
            NUMPY: ("numpy", "functions:numpy_cases", {}),
            JAX_2: ("jax", "functions:jax_cases", harness.virtual_devices(2)),
        },
        harness.WARM_UP,  # OpenBLAS's threads spin for 25 ms after a product: longer than a sample of the next process.
    )


LIMIT = 40.0
"""The seconds after which a sample ends without a figure; it has at least three calls."""


@dataclass(frozen=True)
class Effort:
    """The number of rounds for each kind of row."""

    products: int = 15
    passes: int = 4


QUICK = Effort(products=3, passes=2)


def measure(effort: Effort) -> Table:
    """Measures the whole table."""
    with start_workers() as workers:
        return measure_with(effort, workers)


def measure_with(effort: Effort, workers: Mapping[str, Any]) -> Table:
    """Measures the whole table with these workers."""
    environment = machine.describe_environment(("numpy", "jax", "shardtensor")) | {
        "rounds": f"products {effort.products}, others {effort.passes}",
    }
    cells: tables.Cells = {}
    for rows, rounds, description in (PRODUCTS, effort.products, "products"), (PASSES, effort.passes, "large arrays"):
        cells |= harness.sample_cases([row.name for row in rows], workers, rounds, description, LIMIT)
    return Table(TITLE, environment, tuple(workers), (*PRODUCTS, *PASSES), cells)


if __name__ == "__main__":
    harness.run("functions", "The cost of functions of NumPy on large arrays.", measure, Effort(), QUICK)
