"""The cost of large arrays on a CPU, compared with the peers: operators, reductions, products, reshards; and scaling.

``python benchmarks/cpu.py [--quick] [--out DIR] [--label LABEL]``; README.md says how to read the tables and charts.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import collectives
import cpu_curves
import harness
import machine
import peers
import tables
from collectives import check_equal, checksums_of
from cpu_cases import FULL, GIB, GROUP, KIB, MIB, Sizes
from cpu_curves import Point
from harness import DEVICES, JAX_2, JAX_8, NUMPY, PROJECT, Worker
from tables import Best, Cells, Row, Table, Target

TITLE = f"On a CPU: float32, rows over {DEVICES} logical devices, eager; JAX (n): jit on n CPU devices"
CURVES = f"Scaling: time per element; over sizes on {DEVICES} logical devices, then over numbers of devices"
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
    curves: int = 5


QUICK = Effort(large=1, heavy=1, curves=1)


class Measurer(collectives.Measurer, Protocol):
    """A `Worker`, or its replacement in a test."""

    def restart(self) -> None:
        """Starts the worker's process again if it has ended."""


Start = Callable[[Sizes], AbstractContextManager[Mapping[str, Measurer]]]
"""A function that starts workers for operands of given sizes; it returns a context manager with the workers by column.
"""


# -- the table -------------------------------------------------------------------------------------


Workers: TypeAlias = contextlib.AbstractContextManager[dict[str, Worker]]


def _start(module: str, columns: Mapping[str, harness.Library], sizes: Sizes) -> Workers:
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
    return _start("cpu_cases", columns, sizes)


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


# -- the curves ------------------------------------------------------------------------------------

CURVE_TITLES = {
    "add": "x + y",
    "sum": "x.sum()",
    "sum0": "x.sum(axis=0)",
    "sin": "sin(x)",
    "matmul": "x @ y",
    "reshard": "rows → columns",
    "contraction": "x @ y, contraction split",
}


def start_curve_workers(sizes: Sizes) -> Workers:
    """Starts the worker of each column of the curves; a context manager that ends them."""
    columns: dict[str, harness.Library] = {
        PROJECT: ("shardtensor", "shardtensor_curves", harness.logical_devices(max(sizes.devices))),
        NUMPY: ("numpy", "numpy_curves", {}),
    }
    return _start("cpu_curves", columns, sizes)


def measure_curves(effort: Effort, sizes: Sizes = FULL, start: Start = start_curve_workers) -> Table:
    """Measures the time per element at all points."""
    points = cpu_curves.points(sizes)
    environment = machine.describe_environment(("numpy", "shardtensor")) | {
        "element": "an element of a square operand; of a product, a multiplication",
        "rounds": str(effort.curves),
    }
    cells: Cells = {}
    with start(sizes) as workers:
        for operands, group in itertools.groupby(sorted(points, key=lambda p: p.operands), lambda p: p.operands):
            samplers = {(p.name, c): per_element(workers[c], p) for p, c in itertools.product(group, workers)}
            cells |= harness.interleave(samplers, effort.curves, f"{operands[0]}² over {operands[1]}")
    rows = tuple(Row(point.name, point_title(point)) for point in points)
    return Table(CURVES, environment, tuple(workers), rows, cells)


def per_element(worker: Measurer, point: Point) -> harness.Sampler:
    """Returns a sampler of the time per element at a point."""
    return lambda: worker.sample(point.name) / point.elements


def point_title(point: Point) -> str:
    """Returns the title of a point's row."""
    return f"{CURVE_TITLES[point.function]}, {size_text(point.nbytes)}, on {point.devices}"


def size_text(nbytes: int) -> str:
    """Returns a number of bytes in KiB, MiB or GiB."""
    unit, name = next((unit, name) for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")) if nbytes >= unit)
    return f"{nbytes // unit} {name}"


# -- charts ----------------------------------------------------------------------------------------

FASTER, SLOWER, PLAIN = "#2a7f62", "#c44536", "#888888"
MAX_RATIO = 100.0
"""The ratio at which bars end, in both directions: an operator that moves no data is faster by any factor."""


def chart(table: Table, path: Path) -> None:
    """Draws shardtensor's time divided by the best peer's, one bar for each row in which a peer has a figure."""
    from matplotlib.figure import Figure

    bars = []
    for row in (*LARGE, *HEAVY):
        ours, best = table.cell(row, PROJECT).median, table.least(row, PEERS)
        if ours is not None and best is not None:
            bars.append((row.title, ours / best[0], best[1]))
    figure = Figure(figsize=(9, 1.2 + 0.3 * len(bars)), layout="constrained")
    axes = figure.subplots()
    axes.set_xscale("log", subs=[])
    for y, (_, ratio, peer) in enumerate(bars):
        end = min(max(ratio, 1 / MAX_RATIO), MAX_RATIO)
        text = f"{ratio:.2g}" if end == ratio else f"{'<' if ratio < end else '>'} {end:g}"
        axes.barh(y, end - 1, left=1, color=FASTER if ratio <= 1 else SLOWER)
        axes.annotate(
            f"{text} × {peer}", (end, y), (-4 if ratio <= 1 else 4, 0), textcoords="offset points",
            ha="right" if ratio <= 1 else "left", va="center", fontsize=8,
        )  # fmt: skip
    axes.axvline(1, color="black", linewidth=0.8)
    axes.margins(x=0.3)
    axes.set_yticks(range(len(bars)), [title for title, _, _ in bars])
    axes.invert_yaxis()
    axes.set_xlabel("time of shardtensor over that of the best peer: left of 1, shardtensor is faster")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)


def chart_curves(table: Table, path: Path, sizes: Sizes = FULL) -> None:
    """Draws the time per element over size and over the number of devices, NumPy's with dashed lines."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(16, 7), layout="constrained")
    above, below = figure.subfigures(2, 1, squeeze=False)[:, 0]
    by_size, by_devices = cpu_curves.points_by_size(sizes), cpu_curves.points_by_devices(sizes)
    for axes, function in zip(above.subplots(1, len(cpu_curves.BY_SIZE)), cpu_curves.BY_SIZE, strict=True):
        selected = [point for point in by_size if point.function == function]
        for column, color, dashes in ((PROJECT, FASTER, "-"), (NUMPY, PLAIN, "--")):
            xs, ys = curve(table, column, selected, lambda point: point.nbytes)
            axes.plot(xs, ys, dashes, color=color, marker=".", label=column)
        label_axes(axes, CURVE_TITLES[function], "bytes of an operand")
    for axes, function in zip(below.subplots(1, len(cpu_curves.BY_DEVICES)), cpu_curves.BY_DEVICES, strict=True):
        for nbytes, color in zip(sizes.ends, (FASTER, SLOWER), strict=True):
            selected = [point for point in by_devices if (point.function, point.nbytes) == (function, nbytes)]
            xs, ys = curve(table, PROJECT, selected, lambda point: point.devices)
            axes.plot(xs, ys, color=color, marker=".", label=size_text(nbytes))
            for y in curve(table, NUMPY, selected[:1], lambda point: point.devices)[1]:
                axes.axhline(y, linestyle="--", color=color, label=f"{size_text(nbytes)}, {NUMPY}")
        label_axes(axes, CURVE_TITLES[function], "logical devices")
    figure.savefig(path)


def curve(
    table: Table, column: str, points: Sequence[Point], coordinate: Callable[[Point], int]
) -> tuple[list[int], list[float]]:
    """Returns the coordinates and the figures of the points that have a figure."""
    figures = {coordinate(point): table.cells.get((point.name, column), tables.Cell()).median for point in points}
    measured = {x: figure for x, figure in figures.items() if figure is not None}
    return list(measured), list(measured.values())


def label_axes(axes: Any, title: str, xlabel: str) -> None:
    """Sets the scales and the labels of a diagram."""
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_title(title, fontsize=10)
    axes.set_xlabel(xlabel)
    axes.set_ylabel("seconds per element")
    axes.legend(fontsize=7)


# -- the run ---------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None, sizes: Sizes = FULL) -> None:
    """Runs the program: measures both tables, prints, saves and draws them."""
    options = harness.arguments("cpu", "The cost of large arrays on a CPU, and its scaling.", argv)
    effort = QUICK if options.quick else Effort()
    name, curves_name = (harness.labelled(table_name, options.label) for table_name in ("cpu", "scaling"))
    can_draw = peers.is_installed("matplotlib")
    table = measure(effort, sizes)
    harness.report(table, options.out, name)
    if can_draw:
        chart(table, options.out / f"{name}.svg")
    scaling = measure_curves(effort, sizes)
    harness.report(scaling, options.out, curves_name)
    if can_draw:
        chart_curves(scaling, options.out / f"{curves_name}.svg", sizes)
    else:
        print("No charts: matplotlib is not installed.")


if __name__ == "__main__":
    main()
