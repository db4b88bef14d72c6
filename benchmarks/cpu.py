"""The cost of large arrays on a CPU, compared with the peers: operators, reductions, products, reshards.

``python benchmarks/cpu.py [--quick] [--out DIR] [--label LABEL]``; README.md says how to read the table.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import collectives
import harness
import machine
from collectives import check_equal, checksums_of
from cpu_cases import FULL, GROUP, Sizes
from harness import DEVICES, JAX_2, JAX_8, NUMPY, PROJECT, Worker
from tables import Best, Cells, Row, Table, Target

TITLE = f"On a CPU: float32, rows over {DEVICES} logical devices, eager; JAX (n): jit on n CPU devices"
JAX_1, LIMIT, TORCH, DASK, NUMBA = "JAX (1)", "limit", "PyTorch", "Dask", "Numba"
PEERS = (NUMPY, JAX_1, JAX_2, JAX_8, TORCH, DASK, NUMBA)
PEER, JAX, SPLIT = Best("best peer", PEERS), Best("best JAX", PEERS[1:4]), Best("best JAX (2, 8)", (JAX_2, JAX_8))

AS_PEER = (Target(1.05, PEER),)
LARGE = (
    Row("add", "x + y, 128 MiB", (Target(1.15, LIMIT),)),
    Row("three", "x + y + z, 128 MiB"),
    Row("sin", "2*sin(x) + 1, 64 Mi", (Target(0.75, NUMPY),)),
    Row("double", "2*sin(x) + 1, 8 Mi float64"),
    Row("astype", "float32 → float64, 64 Mi"),
    Row("transpose", "x.T + y, 4096²"),
    Row("sum", "x.sum(), 8192²", AS_PEER),
    Row("sum0", "x.sum(axis=0), 8192²", AS_PEER),
    Row("sum1", "x.sum(axis=1), 8192²", AS_PEER),
    Row("mean", "x.mean(), 8192²", AS_PEER),
    Row("max", "x.max(), 8192²", AS_PEER),
    Row("argmax", "x.argmax(), 8192²", AS_PEER),
    Row("var", "x.var(), 8192²", (Target(1.05, JAX),)),
    Row("softmax", "softmax, (8192, 4096)", (Target(1.3, JAX),)),
    Row("norm", "layer norm, (8192, 4096)", (Target(1.3, JAX),)),
    Row("layer", "sigmoid(x @ w + b)", (Target(1, JAX),)),
    Row("maps", "two pmaps of tanh(a @ a)", (Target(1, JAX),)),
    Row("reshard", "rows → columns, 256 MiB", (Target(50e-6),)),
    Row("alias", "host → rows, 256 MiB, aliased", (Target(50e-6),)),
    Row("replicate", "rows → whole, 256 MiB", (Target(0.25, SPLIT),)),
)
HEAVY = (
    Row("options", "Black-Scholes, 16 Mi"),
    Row("matmul", "x @ y, 4096³", AS_PEER),
    Row("contraction", "x @ y, contraction split", (Target(0.8, SPLIT),)),
    Row("jacobi", "Jacobi, 4096², 50 steps", (Target(0.4, JAX), Target(1, NUMPY))),
)
ONCE = (
    Row("peak", "x + y + z, peak memory", (Target(2),), "results"),
    Row("growth", "growth, 100 000 operators", (Target(1),), "MiB"),
    Row("idle", "CPU used in 1 s of sleep", (Target(0.01),)),
)
ROWS = (*LARGE, *HEAVY, *ONCE)


@dataclass(frozen=True)
class Effort:
    """The number of rounds for each kind of row."""

    large: int = 5
    heavy: int = 5


QUICK = Effort(large=1, heavy=1)


class Measurer(collectives.Measurer, Protocol):
    """A `Worker`, or its replacement in a test."""

    def restart(self) -> None:
        """Starts the worker's process again if it has ended."""


Start = Callable[[Sizes], AbstractContextManager[Mapping[str, Measurer]]]
"""A function that starts workers for operands of given sizes; it returns a context manager with the workers by column.
"""


# -- the table -------------------------------------------------------------------------------------


Workers: TypeAlias = contextlib.AbstractContextManager[dict[str, Worker]]


def start_columns(module: str, columns: Mapping[str, harness.Library], sizes: Sizes) -> Workers:
    """Starts the workers of these columns, with cases of a module for operands of these sizes; a context manager."""
    return harness.start_workers(
        {
            column: (package, f"{module}:{cases}", {**environment, **sizes.as_environment()})
            for column, (package, cases, environment) in columns.items()
        },
        harness.WARM_UP,
    )


def start_workers(sizes: Sizes) -> Workers:
    """Starts the worker of each column of the table; a context manager that ends them."""
    columns: dict[str, harness.Library] = {
        PROJECT: ("shardtensor", "shardtensor_cases", harness.logical_devices(DEVICES)),
        LIMIT: ("numpy", "limit_cases", {}),
        NUMPY: ("numpy", "numpy_cases", {}),
        JAX_1: ("jax", "jax_cases", harness.virtual_devices(1)),
        JAX_2: ("jax", "jax_cases", harness.virtual_devices(2)),
        JAX_8: ("jax", "jax_cases", harness.virtual_devices(8)),
        TORCH: ("torch", "torch_cases", {}),
        DASK: ("dask", "dask_cases", {}),
        NUMBA: ("numba", "numba_cases", {}),
    }
    return start_columns("cpu_cases", columns, sizes)


def measure(effort: Effort, sizes: Sizes = FULL, start: Start = start_workers) -> Table:
    """Measures the whole table, after checking that the results of all libraries are equal."""
    environment = machine.describe_environment(("numpy", "jax", "torch", "dask", "numba", "shardtensor"))
    cells: Cells = {}
    with start(sizes) as workers:
        environment |= {
            "BLAS": workers[NUMPY].call("blas"),
            "limit": f"copies, reads and sums in {machine.usable_cores()} threads; NumPy's products",
            "rounds": f"{effort.large}; options, products and Jacobi {effort.heavy}; the last three rows 1",
        }
        check_equal(checksums_of(workers))
        for rows, rounds in (LARGE, effort.large), (HEAVY, effort.heavy):
            # Rows with the same operands are measured together, so that a worker makes the operands only once.
            for operands, group in itertools.groupby(sorted(rows, key=group_of), group_of):
                cells |= harness.sample_cases([row.name for row in group], workers, rounds, operands)
                for worker in workers.values():
                    worker.restart()
    with start(sizes) as new_workers:  # These rows need processes whose memory has not been used before.
        for row, (column, worker) in itertools.product(ONCE, new_workers.items()):
            cells |= harness.call_once(worker, column, row.name, (row.name,))
    return Table(TITLE, environment, tuple(workers), ROWS, cells, (LIMIT,))


def group_of(row: Row) -> str:
    """Returns the group of a row, whose rows have the same operands."""
    return GROUP[row.name]


# -- the run ---------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None, sizes: Sizes = FULL) -> None:
    """Runs the program: measures both tables, prints, saves and draws them."""
    options = harness.arguments("cpu", "The cost of large arrays on a CPU.", argv)
    table = measure(QUICK if options.quick else Effort(), sizes)
    harness.report(table, options.out, harness.labelled("cpu", options.label))


if __name__ == "__main__":
    main()
