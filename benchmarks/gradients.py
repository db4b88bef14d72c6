"""The cost of gradients on one host, eager and under jit, compared with JAX, PyTorch and gradients by hand.

``python benchmarks/gradients.py [--quick] [--out DIR] [--label LABEL]``; README.md says how to read the tables.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import gradient_cases
import harness
import machine
from harness import JAX_8, NUMPY, Worker
from tables import Best, Cell, Cells, Row, Table, Target

TITLE = "Gradients under jit, over 8 logical devices of one host; JAX (n): jit on n virtual CPU devices"
EAGER_TITLE = "Gradients in eager mode, over 8 logical devices of one host"
JIT, EAGER, TORCH, COMPILED, JAX_1 = "jit", "eager", "PyTorch", "torch.compile", "JAX (1)"
JAX = Best("best JAX", (JAX_1, JAX_8))

TITLES = {
    "large": "MLP, 4096 × 512, 3 layers",
    "small": "MLP, 64 × 32, 3 layers",
    "block": "transformer block, 16 × 128 × 256",
    "embedding": "embedding, 16384 of 50 000 × 128",
    "slices": "200 slices of 1 000 000",
}
FORWARD = ("large", "small", "block")
"""The rows of which the loss alone is measured, too."""


def _rows(targets: Mapping[str, tuple[Target, ...]]) -> tuple[Row, ...]:
    rows = []
    for name, title in TITLES.items():
        rows.append(Row(name, title, targets.get(name, ())))
        if name in FORWARD:
            rows.append(Row(f"{name} forward", "… the loss only"))
            rows.append(Row(f"{name} ratio", "… gradient / loss", targets.get(f"{name} ratio", ()), "×"))
    return tuple(rows)


PEAK = Row("peak", "peak memory, 30 × (tanh, × 0.9) of 16 MiB", (), "MiB")
ROWS = (*_rows({"large": (Target(1.1, JAX),), "small": (Target(0.3, JAX_8),), "block": (Target(1.1, JAX),)}), PEAK)
EAGER_ROWS = (
    *_rows({"large ratio": (Target(3.0),), "small": (Target(2e-3),)}),
    Row("recording", "recording, per operator", (Target(10e-6),)),
    Row("peak", PEAK.title, (Target((gradient_cases.LINKS + 2) * 16.0 + 8.0),), "MiB"),  # and the process itself
    Row("remat", "… recomputed in 5 parts", (), "MiB"),
)


@dataclass(frozen=True)
class Effort:
    """The numbers of measurements.

    Attributes:
        rounds: the rounds of all rows but those of memory.
        memory: the number of new processes for each figure of memory.
    """

    rounds: int
    memory: int


def start_workers(group: str) -> contextlib.AbstractContextManager[Mapping[str, Worker]]:
    """Starts the worker of each column, with the cases of a group of rows; a context manager that ends them."""
    ours = harness.logical_devices(8)
    columns: dict[str, harness.Library] = {
        JIT: ("shardtensor", "jit_cases", ours),
        EAGER: ("shardtensor", "eager_cases", ours),
        JAX_8: ("jax", "jax_cases", harness.virtual_devices(8)),
        JAX_1: ("jax", "jax_cases", harness.virtual_devices(1)),
        TORCH: ("torch", "torch_cases", {}),
        COMPILED: ("torch", "compiled_cases", {}),
        NUMPY: ("numpy", "numpy_cases", {}),
    }
    return harness.start_group("gradient_cases", columns, "GRADIENTS_GROUP", group)


Start = Callable[[str], contextlib.AbstractContextManager[Mapping[str, Worker]]]


def check_equal(name: str, workers: Mapping[str, Worker]) -> None:
    """Checks that all libraries compute the same loss and the same gradients; every program is compiled by this.

    Raises:
        AssertionError: they differ; names the row and the sums.
    """
    sums = {}
    for column, worker in workers.items():
        with contextlib.suppress(harness.NotMeasured):
            sums[column] = worker.call(f"checksum {name}")
    first = next(iter(sums.values()), 0.0)
    assert all(math.isclose(x, first, rel_tol=1e-3, abs_tol=1e-6) for x in sums.values()), (name, sums)


def measure(effort: Effort, start: Start) -> Cells:
    """Measures all rows, after checking that the results of all libraries are equal.

    Args:
        effort: the numbers of measurements.
        start: starts the workers of a group; it returns a context manager with the workers by column.
    """
    cells: Cells = {}
    for group, names in gradient_cases.GROUPS.items():
        with start(group) as workers:
            check_equal(group, workers)
            cells |= harness.sample_cases(names, workers, effort.rounds, group)
    with start("recording") as workers:
        columns = [column for column in (EAGER, TORCH) if column in workers]
        samplers = {("recording", column): functools.partial(workers[column].call, "recording") for column in columns}
        cells |= harness.interleave(samplers, effort.rounds, "recording")
    return cells | ratios(cells) | measure_memory(effort, start)


def ratios(cells: Cells) -> Cells:
    """Returns how many times as long as its loss each gradient takes."""
    found: Cells = {}
    for (name, column), cell in cells.items():
        forward = cells.get((f"{name} forward", column))
        if forward is not None and cell.median is not None and forward.median:
            found[f"{name} ratio", column] = Cell((cell.median / forward.median,))
    return found


def measure_memory(effort: Effort, start: Start) -> Cells:
    """Measures the rows of memory, each figure in a process of its own: the peak of a process never falls."""
    found: dict[tuple[str, str], list[float]] = {}
    problems: dict[tuple[str, str], str] = {}
    for name in gradient_cases.MEMORY:
        for _ in range(effort.memory):
            with start("memory") as workers:
                for column, worker in workers.items():
                    try:
                        figure = worker.call(name)
                    except harness.NotMeasured as reason:
                        problems[name, column] = str(reason)
                    else:
                        found.setdefault((name, column), []).extend([] if figure is None else [figure])
    return {key: Cell(tuple(found.get(key, ())), problem) for key, problem in problems.items()} | {
        key: Cell(tuple(samples)) for key, samples in found.items()
    }


def make_tables(cells: Cells, effort: Effort) -> tuple[Table, Table]:
    """Returns two tables: gradients under jit, and in eager mode."""
    packages = ("numpy", "torch", "jax", "shardtensor")
    environment = machine.describe_environment(packages) | {"rounds": f"{effort.rounds}; memory {effort.memory}"}
    return (
        Table(TITLE, environment, (JIT, JAX_8, JAX_1, COMPILED, NUMPY), ROWS, cells),
        Table(EAGER_TITLE, environment, (EAGER, TORCH, NUMPY), EAGER_ROWS, cells),
    )


if __name__ == "__main__":
    options = harness.arguments("gradients", "The cost of gradients.")
    effort = Effort(3, 1) if options.quick else Effort(15, 3)
    tables = make_tables(measure(effort, start_workers), effort)
    for name, table in zip(("gradients", "gradients_eager"), tables, strict=True):
        harness.report(table, options.out, harness.labelled(name, options.label))
