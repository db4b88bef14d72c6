"""The time of a step of training on one host, compared with JAX and PyTorch, and of AdamW with its memory traffic.

``python benchmarks/training.py [--quick] [--out DIR] [--label LABEL]``; README.md says how to read the tables.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import harness
import machine
import training_cases
from harness import JAX_8, Worker
from tables import Cell, Cells, Row, Table, Target

TITLE = "Training under jit on one host; (n): on n logical or virtual devices of the CPU"
OURS, ONE, JAX_1, TORCH, TRAFFIC = "jit (8)", "jit (1)", "JAX (1)", "torch.compile", "memory traffic"
COLUMNS = (OURS, ONE, JAX_8, JAX_1, TORCH, TRAFFIC)
ONE_TITLE = "Training under jit on one device of one host"

SIZES = training_cases.SIZES
STEP = f"GPT, {SIZES.layers} layers of {SIZES.width}, {SIZES.batch} × {SIZES.length} tokens"


def _rows(targets: Mapping[str, tuple[Target, ...]]) -> tuple[Row, ...]:
    titles = {
        "step": STEP,
        "products": "… its matrix products only",
        "rest": "… without these",
        "zero 1": "… ZeRO 1",
        "zero 2": "… ZeRO 2",
        "zero 3": "… ZeRO 3",
        "adamw": "AdamW, 10 000 000 parameters",
        "leaves": f"… in {SIZES.leaves} leaves",
    }
    return tuple([Row(name, title, targets.get(name, ())) for name, title in titles.items()])


ROWS = _rows({"step": (Target(1.0, JAX_8),), "adamw": (Target(1.2, TRAFFIC),), "leaves": (Target(1.2, TRAFFIC),)})
ONE_ROWS = tuple(
    [row for row in _rows({"step": (Target(1.25, TORCH),), "rest": (Target(1.1, TORCH),)}) if "zero" not in row.name]
)


@dataclass(frozen=True)
class Effort:
    """The numbers of measurements.

    Attributes:
        rounds: the rounds of all rows.
    """

    rounds: int


def start_workers(group: str) -> contextlib.AbstractContextManager[Mapping[str, Worker]]:
    """Starts the worker of each column, with the cases of a group of rows; a context manager that ends them."""
    columns: dict[str, harness.Library] = {
        OURS: ("shardtensor", "shardtensor_cases", harness.logical_devices(8)),
        ONE: ("shardtensor", "shardtensor_cases", harness.logical_devices(1)),
        JAX_8: ("jax", "jax_cases", harness.virtual_devices(8)),
        JAX_1: ("jax", "jax_cases", harness.virtual_devices(1)),
        TORCH: ("torch", "torch_cases", {}),
        TRAFFIC: ("numpy", "traffic_cases", {}),
    }
    return harness.start_group("training_cases", columns, "TRAINING_GROUP", group)


Start = Callable[[str], contextlib.AbstractContextManager[Mapping[str, Worker]]]


def check_equal(workers: Mapping[str, Worker]) -> None:
    """Checks that the first step of all libraries has the same loss; every program is compiled by this.

    Raises:
        AssertionError: they differ; names the losses.
    """
    losses = {}
    for column, worker in workers.items():
        with contextlib.suppress(harness.NotMeasured):
            losses[column] = worker.call("step")
    known = [x for x in losses.values() if x is not None]
    assert all(math.isclose(x, known[0], rel_tol=1e-4) for x in known), losses


def measure(effort: Effort, start: Start) -> Cells:
    """Measures all rows, after checking that the losses of all libraries are equal.

    Args:
        effort: the numbers of measurements.
        start: starts the workers of a group; it returns a context manager with the workers by column.
    """
    cells: Cells = {}
    for group, names in training_cases.GROUPS.items():
        with start(group) as workers:
            if group == "step":
                check_equal(workers)
            cells |= harness.sample_cases(names, workers, effort.rounds, group)
    return cells | without_products(cells)


def without_products(cells: Cells) -> Cells:
    """Returns the times of steps without those of their matrix products."""
    found: Cells = {}
    for column in COLUMNS:
        step, products = cells.get(("step", column)), cells.get(("products", column))
        if step is not None and products is not None and step.median and products.median:
            found["rest", column] = Cell((step.median - products.median,))
    return found


def make_tables(cells: Cells, effort: Effort) -> tuple[Table, Table]:
    """Returns two tables: on eight devices, and on one."""
    environment = machine.describe_environment(("numpy", "torch", "jax", "shardtensor"))
    environment |= {"rounds": str(effort.rounds)}
    return (
        Table(TITLE, environment, COLUMNS, ROWS, cells, (ONE, TRAFFIC)),
        Table(ONE_TITLE, environment, (ONE, JAX_1, TORCH, TRAFFIC), ONE_ROWS, cells, (TRAFFIC,)),
    )


if __name__ == "__main__":
    options = harness.arguments("training", "The time of a step of training.")
    effort = Effort(3) if options.quick else Effort(15)
    tables = make_tables(measure(effort, start_workers), effort)
    for name, table in zip(("training", "training_one"), tables, strict=True):
        harness.report(table, options.out, harness.labelled(name, options.label))
