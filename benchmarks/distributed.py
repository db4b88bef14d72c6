"""The cost of functions that need whole dimensions: sorting, scans, transforms, linear algebra, stencils, index arrays.

``python benchmarks/distributed.py [--quick] [--out DIR] [--label LABEL]``; README.md says how to read the table.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import harness
import machine
from distributed_cases import FULL, GROUP, Sizes
from harness import DEVICES, JAX_2, JAX_8, NUMPY, PROJECT, NotMeasured
from tables import Best, Cells, Row, Table, Target

TITLE = f"Whole dimensions: rows over {DEVICES} logical devices of one host, eager; JAX (n): jit on n CPU devices"
SCIPY, TORCH, DASK, CUPYNUMERIC = "SciPy", "PyTorch", "Dask", "cuPyNumeric"
JAX = Best("best JAX", (JAX_2, JAX_8))
LIMIT, TALL_LIMIT = 8.0, 40.0
"""The time limits of a call in seconds; a case that exceeds its limit has no figure."""

LEGATE_MEMORY = 8192
"""The memory of cuPyNumeric's arrays in MiB."""

PARTS: dict[str, tuple[Row, ...]] = {
    "squares": (
        Row("sort split", "sort along the split axis, 4096²", (Target(0.35, NUMPY), Target(0.15, JAX))),
        Row("sort other", "sort along the other axis, 4096²", (Target(0.6, NUMPY),)),
    ),
    "scans": (
        Row("scan split", "cumulative sum, split axis", (Target(0.5, NUMPY),)),
        Row("scan other", "cumulative sum, other axis", (Target(0.6, NUMPY),)),
    ),
    "transforms": (
        Row("rfft rows", "rfft along rows, 4096²", (Target(1.1, SCIPY),)),
        Row("rfft split", "rfft along the split axis", (Target(1.5, SCIPY),)),
        Row("fft line", "fft of one line, 16 Mi", (Target(1.3, SCIPY), Target(1.0, TORCH))),
    ),
    "lines": (
        Row("sort line", "sort, 16 Mi", (Target(0.8, NUMPY),)),
        Row("argsort line", "argsort, stable, 16 Mi", (Target(0.7, NUMPY),)),
        Row("median", "median, 16 Mi", (Target(0.5, NUMPY),)),
        Row("percentile", "three percentiles, 16 Mi", (Target(0.5, NUMPY),)),
        Row("histogram", "histogram of 256 bins, 16 Mi", (Target(0.5, NUMPY),)),
    ),
    "sets": (
        Row("searchsorted", "searchsorted, 16 Mi in 1 Mi", (Target(0.7, NUMPY), Target(1.0, JAX))),
        Row("unique", "unique, 16 Mi int32", (Target(0.9, NUMPY),)),
        Row("take", "x[idx], 16 Mi from 16 Mi", (Target(0.7, NUMPY),)),
    ),
    "tall": (
        Row("qr", "qr, (1 Mi, 32)", (Target(0.6, NUMPY),)),
        Row("svd", "svd, (1 Mi, 32)", (Target(0.6, NUMPY),)),
        Row("lstsq", "lstsq, (60 000, 32)", (Target(1.0, NUMPY),)),
    ),
    "matrices": (
        Row("matmul", "x @ y on a 2 × 4 mesh, 4096³", (Target(1.1, NUMPY),)),
        Row("cholesky", "cholesky, 4096²", (Target(1.1, NUMPY),)),
        Row("solve", "solve, 4096²", (Target(1.1, NUMPY),)),
    ),
    "stencils": (Row("overlap", "map_overlap, Jacobi × 50, 4096²", (Target(0.5, JAX), Target(0.6, NUMPY))),),
    "tiny": tuple(
        Row(f"tiny {name}", f"{name}, tiny", (Target(500e-6), Target(100e-6), Target(0.3, JAX_8)))
        for name in (
            "sort", "argsort", "searchsorted", "unique", "scan", "median", "histogram", "fft", "matmul", "qr", "solve",
            "overlap", "take",
        )
    ),
}  # fmt: skip
"""The rows in parts that can be measured separately; each part takes about a minute."""


@dataclass(frozen=True)
class Effort:
    """The number of rounds for each kind of row."""

    large: int = 3
    tall: int = 2
    tiny: int = 40


QUICK = Effort(large=1, tall=1, tiny=3)


# -- the run ---------------------------------------------------------------------------------------


def start_workers(tiny: bool, sizes: Sizes = FULL) -> contextlib.AbstractContextManager[dict[str, Any]]:
    """Starts the worker of each column, with the cases of large or of tiny arrays; a context manager that ends them."""
    backend = "separate" if tiny else "numpy"  # See separate_memories.py, which this process does not import.
    columns: dict[str, harness.Library] = {
        PROJECT: ("shardtensor", "shardtensor_cases", harness.logical_devices(DEVICES, backend)),
        NUMPY: ("numpy", "numpy_cases", {}),
        JAX_8: ("jax", "jax_cases", harness.virtual_devices(8)),
    }
    if not tiny:
        columns |= {
            SCIPY: ("scipy", "scipy_cases", {}),
            JAX_2: ("jax", "jax_cases", harness.virtual_devices(2)),
            TORCH: ("torch", "torch_cases", {}),
            DASK: ("dask", "dask_cases", {}),
            CUPYNUMERIC: ("cupynumeric", "cupynumeric_cases", legate()),
        }
    kind = "tiny_" if tiny else ""
    return harness.start_workers(
        {
            column: (package, f"distributed_cases:{kind}{cases}", {**environment, **sizes.as_environment()})
            for column, (package, cases, environment) in columns.items()
        }
    )


def legate() -> dict[str, str]:
    """Returns the environment variables with which cuPyNumeric runs on CPUs, also where it finds a GPU."""
    return {"LEGATE_AUTO_CONFIG": "0", "LEGATE_CONFIG": f"--cpus {machine.usable_cores()} --sysmem {LEGATE_MEMORY}"}


def sampler(worker: Any, name: str, limit: float) -> harness.Sampler:
    """Returns a sampler for a case that times itself; the first call of the case is not counted."""
    calls = iter((2,))

    def sample() -> float:
        try:
            for _ in range(next(calls, 1)):
                seconds = float(worker.call(name, limit))
        except NotMeasured:
            worker.restart()
            raise
        return seconds

    return sample


def measure_part(part: str, effort: Effort, workers: Mapping[str, Any]) -> Cells:
    """Measures the rows of a part."""
    if part == "tiny":
        return harness.sample_cases([row.name for row in PARTS[part]], workers, effort.tiny, part)
    cells: Cells = {}
    rounds, limit = (effort.tall, TALL_LIMIT) if part == "tall" else (effort.large, LIMIT)
    for operands, group in itertools.groupby(PARTS[part], lambda row: GROUP[row.name]):
        pairs = itertools.product(group, workers)
        samplers = {(row.name, column): sampler(workers[column], row.name, limit) for row, column in pairs}
        cells |= harness.interleave(samplers, rounds, operands)
    return cells


def make_table(cells: Cells, effort: Effort) -> Table:
    """Returns the table of all parts."""
    environment = machine.describe_environment(
        ("numpy", "scipy", "jax", "torch", "dask", "cupynumeric", "shardtensor")
    ) | {
        "rounds": f"large arrays {effort.large}, tall matrices {effort.tall}, tiny arrays {effort.tiny}",
        "tiny": "8 devices with separate memories on the host (separate_memories.py); JAX is eager",
    }
    rows = tuple(itertools.chain.from_iterable(PARTS.values()))
    columns = (PROJECT, NUMPY, SCIPY, JAX_8, JAX_2, TORCH, DASK, CUPYNUMERIC)
    return Table(TITLE, environment, columns, rows, cells)


def measure(effort: Effort, sizes: Sizes = FULL) -> Table:
    """Measures the whole table."""
    cells: Cells = {}
    for part in PARTS:
        with start_workers(part == "tiny", sizes) as workers:
            cells |= measure_part(part, effort, workers)
    return make_table(cells, effort)


def main() -> None:
    """Runs the program: reads the command line, measures, prints and saves."""
    options = harness.arguments("distributed", "The cost of functions that need whole dimensions.")
    table = measure(QUICK if options.quick else Effort())
    harness.report(table, options.out, harness.labelled("distributed", options.label))


if __name__ == "__main__":
    main()
