"""The cost of programs of `shardtensor.jit` on one host, compared with the compilers of other libraries.

``python benchmarks/jit.py [--quick] [--out DIR] [--label LABEL]``; README.md says how to read the tables.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import harness
import jit_cases
import machine
import peers
from harness import JAX_2, JAX_8, NUMPY, Worker
from tables import Best, Cell, Cells, Row, Table, Target

TITLE = "Programs of jit; JAX (n): jit on n virtual CPU devices; results are dropped, except in the column C, kept"
PLAIN_TITLE = "Programs of jit without a compiler"
C, KEPT, BLOCKS, EAGER = "C", "C, kept", "jit on NumPy", "eager"
TORCH, JAX_1, NUMBA, MLX, TINYGRAD = "torch.compile", "JAX (1)", "Numba", "MLX", "tinygrad"
JAX = Best("best JAX", (JAX_1, JAX_2, JAX_8))
PEERS = Best("best peer", (NUMPY, TORCH, NUMBA, MLX, TINYGRAD, *JAX.columns))

ROWS = (
    Row("sin4", "2 sin x + 1, 64M f32", (Target(0.4, PEERS),)),
    Row("sin8", "2 sin x + 1, 8M f64", (Target(0.4, PEERS),)),
    Row("black4", "Black-Scholes, 16M f32", (Target(1.0, PEERS),)),
    Row("black8", "Black-Scholes, 16M f64", (Target(0.85, PEERS),)),
    Row("softmax", "softmax, 8192 × 4096 f32", (Target(0.9, PEERS),)),
    Row("norm", "layer norm, 8192 × 4096 f32", (Target(0.65, PEERS),)),
    Row("chain", "ten cheap operators, 16M f32", (Target(1.0, PEERS),)),
    Row("jacobi", "Jacobi 4096² f64, 50 steps", (Target(0.8, NUMBA),)),
    Row("layer", "sigmoid(x w + b), 65536 × 512", (Target(0.95, JAX),)),
    Row("step", "training step, batch 4096", (Target(0.95, JAX),)),
    Row("maps", "two pmaps of tanh(a a)", (Target(1.0, JAX),)),
    Row("sum", "sum, 8192² f32", (Target(1.0, PEERS),)),
    Row("mean", "mean, 8192² f32", (Target(1.05, PEERS),)),
    Row("max", "max, 8192² f32", (Target(1.0, PEERS),)),
    Row("var", "var, 8192² f32", (Target(1.05, PEERS),)),
    Row("tiny", "cached call, 8 shards of 4", (Target(1.0, NUMPY, 10e-6), Target(10e-6), Target(0.1, JAX_8))),
)

ONCE = (
    Row("trace", "trace, per equation", (Target(50e-6),)),
    Row("first", "8 kernels compiled", (Target(0.5),)),
    Row("disk", "8 kernels from disk", (Target(20e-3),)),
)

FUSED = ("black4", "black8", "softmax", "norm", "chain", "jacobi", "layer")
"""The rows in which jit fuses more than two operators into one kernel."""

PLAIN = tuple(
    dataclasses.replace(row, targets=(Target(0.8 if row.name in FUSED else 1.05, EAGER),))
    for row in ROWS
    if row.name != "tiny"
)


@dataclass(frozen=True)
class Effort:
    """The numbers of measurements.

    Attributes:
        rounds: the rounds of rows that take milliseconds; fewer if they take more than `GROUP_SECONDS`.
        heavy: the rounds of rows that take longer.
        once: the number of new processes for rows that can be measured only once in a process.
    """

    rounds: int
    heavy: int
    once: int


HEAVY = ("grid",)

LIMIT, HEAVY_LIMIT = 6.0, 20.0
"""The seconds after which a sample, also one of the groups in `HEAVY`, ends without a figure; it has at least three
calls."""

GROUP_SECONDS = 40.0
"""The seconds after which no round of a group begins, so that the table takes less than 20 minutes."""


def start_workers(group: str) -> contextlib.AbstractContextManager[Mapping[str, Worker]]:
    """Starts the worker of each column, with the cases of a group of rows; a context manager that ends them."""
    ours = harness.logical_devices(8)
    columns: dict[str, harness.Library] = {
        C: ("shardtensor", "c_cases", ours),
        KEPT: ("shardtensor", "kept_cases", ours),
        BLOCKS: ("shardtensor", "blocked_cases", ours),
        EAGER: ("shardtensor", "eager_cases", ours),
        NUMPY: ("numpy", "numpy_cases", {}),
        TORCH: ("torch", "torch_cases", {}),
        JAX_8: ("jax", "jax_cases", harness.virtual_devices(8)),
        JAX_2: ("jax", "jax_cases", harness.virtual_devices(2)),
        JAX_1: ("jax", "jax_cases", harness.virtual_devices(1)),
        NUMBA: ("numba", "numba_cases", {}),
        MLX: ("mlx", "mlx_cases", {}),
        TINYGRAD: ("tinygrad", "tinygrad_cases", {"DEV": "CPU"}),
    }
    return harness.start_workers(
        {
            column: (package, f"jit_cases:{cases}", {**environment, "JIT_GROUP": group})
            for column, (package, cases, environment) in columns.items()
        },
        0.05,
    )


def check_equal(group: str, workers: Mapping[str, Worker]) -> Cells:
    """Compares the means of all libraries' results with NumPy's; every program is compiled by this.

    Returns:
        A cell without a figure for each peer whose mean differs.

    Raises:
        AssertionError: one of shardtensor's means differs; names the row and the means.
    """
    wrong: Cells = {}
    for name in jit_cases.GROUPS[group]:
        means = {}
        for column, worker in workers.items():
            with contextlib.suppress(harness.NotMeasured):
                means[column] = worker.call(f"mean {name}")
        differ = {c for c, mean in means.items() if not math.isclose(mean, means[NUMPY], rel_tol=1e-3, abs_tol=1e-6)}
        assert differ <= {TORCH, NUMBA, MLX, TINYGRAD, *JAX.columns}, (name, means)
        wrong |= {(name, column): Cell(problem="wrong result") for column in differ}
    return wrong


def measure_group(group: str, workers: Mapping[str, Worker], effort: Effort) -> Cells:
    """Measures the rows of a group."""
    rounds, limit = (effort.heavy, HEAVY_LIMIT) if group in HEAVY else (effort.rounds, LIMIT)
    return harness.sample_cases(jit_cases.GROUPS[group], workers, rounds, group, limit, GROUP_SECONDS)


def measure_once(effort: Effort) -> Cells:
    """Measures the rows that can be measured only once in a process, each time in a new process."""

    def seconds(code: str, cache: str) -> float:
        environment = peers.environment(sys.executable, XDG_CACHE_HOME=cache, SHARDTENSOR_NUM_DEVICES="8")
        done = subprocess.run([sys.executable, "-c", code], env=environment, check=True, stdout=subprocess.PIPE)
        return float(done.stdout.split()[0])

    samples: dict[str, list[float]] = {row.name: [] for row in ONCE}
    for _ in range(effort.once):
        with tempfile.TemporaryDirectory() as cache:
            samples["trace"].append(seconds(jit_cases.TRACE, cache))
            samples["first"].append(seconds(jit_cases.FIRST, cache))
            samples["disk"].append(seconds(jit_cases.FIRST, cache))
    return {(name, C): Cell(tuple(values)) for name, values in samples.items()}


def make_tables(cells: Cells, effort: Effort) -> tuple[Table, Table]:
    """Returns two tables: programs with a compiler, and without."""
    packages = ("numpy", "torch", "jax", "numba", "mlx", "tinygrad", "shardtensor")
    environment = machine.describe_environment(packages) | {
        "rounds": f"{effort.rounds}, fewer where they take {GROUP_SECONDS:g} s; Jacobi {effort.heavy}; "
        f"the last three rows {effort.once}"
    }
    columns = (C, KEPT, EAGER, NUMPY, TORCH, JAX_8, JAX_2, JAX_1, NUMBA, MLX, TINYGRAD)
    return (
        Table(TITLE, environment, columns, ROWS + ONCE, cells, (KEPT, EAGER)),
        Table(PLAIN_TITLE, environment, (BLOCKS, EAGER, NUMPY), PLAIN, cells, (EAGER,)),
    )


def measure(effort: Effort, start: Callable[..., contextlib.AbstractContextManager[Mapping[str, Worker]]]) -> Cells:
    """Measures all rows, after checking that the results of all libraries are equal.

    Args:
        effort: the numbers of measurements.
        start: starts the workers of a group; it returns a context manager with the workers by column.
    """
    cells: Cells = {}
    for group in jit_cases.GROUPS:
        with start(group) as workers:
            wrong = check_equal(group, workers)
            cells |= measure_group(group, workers, effort) | wrong
    return cells | measure_once(effort)


if __name__ == "__main__":
    options = harness.arguments("jit", "The cost of programs of jit.")
    effort = Effort(3, 2, 1) if options.quick else Effort(15, 5, 5)
    tables = make_tables(measure(effort, start_workers), effort)
    for name, table in zip(("jit", "jit_numpy"), tables, strict=True):
        harness.report(table, options.out, harness.labelled(name, options.label))
