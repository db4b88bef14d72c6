"""What runs on a CPU: operators, reductions, products and moves of large arrays beside the peers, and how they scale.

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
from collectives import agree, known
from cpu_cases import FULL, GIB, GROUP, KIB, MIB, Sizes
from cpu_curves import Point
from harness import DEVICES, JAX_2, JAX_8, NUMPY, PROJECT, Best, Cells, Row, Table, Target, Worker

TITLE = f"On a CPU: float32, rows over {DEVICES} logical devices, eager; JAX (n): jit on n CPU devices"
CURVES = f"How costs grow: time per element; over sizes on {DEVICES} logical devices, then over their number"
JAX_1, LIMIT, TORCH, DASK, NUMBA = "JAX (1)", "limit", "PyTorch", "Dask", "Numba"
PEERS = (NUMPY, JAX_1, JAX_2, JAX_8, TORCH, DASK, NUMBA)
PEER, JAX, SPLIT = Best("best peer", PEERS), Best("best JAX", PEERS[1:4]), Best("best JAX (2, 8)", (JAX_2, JAX_8))
WIDTH = 230  # nine columns of figures

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
    Row("peak", "x + y + z, peak of memory", (Target(2),), "results"),
    Row("growth", "growth, 100 000 operators", (Target(1),), "MiB"),
    Row("idle", "CPU used in 1 s of sleep", (Target(0.01),)),
)
ROWS = (*LARGE, *HEAVY, *ONCE)


@dataclass(frozen=True)
class Effort:
    """How many rounds each kind of row gets."""

    large: int = 5
    heavy: int = 5
    curves: int = 5


QUICK = Effort(large=1, heavy=1, curves=1)


class Measurer(collectives.Measurer, Protocol):
    """A `Worker`, or what stands in for one in a test."""

    def again(self) -> None:
        """Starts its process anew where that has ended."""


Start = Callable[[Sizes], AbstractContextManager[Mapping[str, Measurer]]]
"""Starts workers, by column, that end with the ``with``."""


# -- the table -------------------------------------------------------------------------------------


WARM_UP = 0.2
"""Seconds: until cores that slept are awake, and threads of others' BLAS and OpenMP look for work no more."""


Workers: TypeAlias = contextlib.AbstractContextManager[dict[str, Worker]]


def started(module: str, columns: Mapping[str, harness.Library], sizes: Sizes) -> Workers:
    """Starts, for each column, a worker with cases of a module for operands of these sizes."""
    return harness.started(
        {
            column: (package, f"{module}:{cases}", {**environment, **sizes.as_environment()})
            for column, (package, cases, environment) in columns.items()
        },
        WARM_UP,
    )


def workers(sizes: Sizes) -> Workers:
    """Starts, for each column, a worker with the cases of a library."""
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
    return started("cpu_cases", columns, sizes)


def measure(effort: Effort, sizes: Sizes = FULL, start: Start = workers) -> Table:
    """Measures everything once through, once all libraries have shown that they compute the same."""
    environment = harness.describe_environment(("numpy", "jax", "torch", "dask", "numba", "shardtensor"))
    cells: Cells = {}
    with start(sizes) as found:
        environment |= {
            "BLAS": found[NUMPY].call("blas"),
            "limit": f"copies, reads and sums in {harness.usable_cores()} threads; NumPy's products",
            "rounds": f"{effort.large}; options, products and Jacobi {effort.heavy}; the last three rows 1",
        }
        agree({column: told for column, worker in found.items() if (told := known(worker))})
        for rows, rounds in (LARGE, effort.large), (HEAVY, effort.heavy):
            # Those that share operands together: for others, a worker would make new ones each time.
            for operands, group in itertools.groupby(sorted(rows, key=group_of), group_of):
                cells |= harness.sample_cases([row.name for row in group], found, rounds, operands)
                for worker in found.values():
                    worker.again()
    with start(sizes) as fresh:  # In new processes, whose memory has not been used before.
        for row, (column, worker) in itertools.product(ONCE, fresh.items()):
            cells |= harness.call_once(worker, column, row.name, (row.name,))
    return Table(TITLE, environment, tuple(found), ROWS, cells)


def group_of(row: Row) -> str:
    """The name of a row's operands."""
    return GROUP[row.name]


# -- the curves ------------------------------------------------------------------------------------

WORDS = {
    "add": "x + y",
    "sum": "x.sum()",
    "sum0": "x.sum(axis=0)",
    "sin": "sin(x)",
    "matmul": "x @ y",
    "reshard": "rows → columns",
    "contraction": "x @ y, contraction split",
}


def curve_workers(sizes: Sizes) -> Workers:
    """Starts, for each column, a worker for the curves."""
    columns: dict[str, harness.Library] = {
        PROJECT: ("shardtensor", "shardtensor_curves", harness.logical_devices(max(sizes.devices))),
        NUMPY: ("numpy", "numpy_curves", {}),
    }
    return started("cpu_curves", columns, sizes)


def measure_curves(effort: Effort, sizes: Sizes = FULL, start: Start = curve_workers) -> Table:
    """The times per element at all points."""
    points = cpu_curves.points(sizes)
    environment = harness.describe_environment(("numpy", "shardtensor")) | {
        "element": "of an operand, a square; of a product, a multiplication",
        "rounds": str(effort.curves),
    }
    cells: Cells = {}
    with start(sizes) as found:
        for operands, group in itertools.groupby(sorted(points, key=lambda p: p.operands), lambda p: p.operands):
            samplers = {(p.name, c): per_element(found[c], p) for p, c in itertools.product(group, found)}
            cells |= harness.interleave(samplers, effort.curves, f"{operands[0]}² over {operands[1]}")
    rows = tuple(Row(point.name, point_title(point)) for point in points)
    return Table(CURVES, environment, tuple(found), rows, cells)


def per_element(worker: Measurer, point: Point) -> harness.Sampler:
    """Samples a point."""
    return lambda: worker.sample(point.name) / point.elements


def point_title(point: Point) -> str:
    """What a reader sees."""
    return f"{WORDS[point.what]}, {size_of(point.nbytes)}, on {point.devices}"


def size_of(nbytes: int) -> str:
    """So many bytes, in the unit that suits them."""
    unit, name = next((unit, name) for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")) if nbytes >= unit)
    return f"{nbytes // unit} {name}"


# -- charts ----------------------------------------------------------------------------------------

FASTER, SLOWER, PLAIN = "#2a7f62", "#c44536", "#888888"
LONGEST = 100.0  # a bar, either way: what moves nothing is ahead of all measure


def chart(table: Table, path: Path) -> None:
    """How long shardtensor takes, over the best peer: one bar for each row that has one."""
    from matplotlib.figure import Figure

    bars = []
    for row in (*LARGE, *HEAVY):
        ours, best = table.cell(row, PROJECT).median, table.least(row, PEERS)
        if ours is not None and best is not None:
            bars.append((row.title, ours / best[0], best[1]))
    figure = Figure(figsize=(9, 1.2 + 0.3 * len(bars)), layout="constrained")
    axes = figure.subplots()
    axes.set_xscale("log", subs=[])
    for place, (_, ratio, peer) in enumerate(bars):
        end = min(max(ratio, 1 / LONGEST), LONGEST)
        said = f"{ratio:.2g}" if end == ratio else f"{'<' if ratio < end else '>'} {end:g}"
        axes.barh(place, end - 1, left=1, color=FASTER if ratio <= 1 else SLOWER)
        axes.annotate(
            f"{said} × {peer}", (end, place), (-4 if ratio <= 1 else 4, 0), textcoords="offset points",
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
    """Time per element over size, and over the number of devices; NumPy's dashed."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(16, 7), layout="constrained")
    above, below = figure.subfigures(2, 1, squeeze=False)[:, 0]
    by_size, by_devices = cpu_curves.points_by_size(sizes), cpu_curves.points_by_devices(sizes)
    for axes, what in zip(above.subplots(1, len(cpu_curves.BY_SIZE)), cpu_curves.BY_SIZE, strict=True):
        chosen = [point for point in by_size if point.what == what]
        for column, color, dashes in ((PROJECT, FASTER, "-"), (NUMPY, PLAIN, "--")):
            xs, ys = line(table, column, chosen, lambda point: point.nbytes)
            axes.plot(xs, ys, dashes, color=color, marker=".", label=column)
        named(axes, WORDS[what], "bytes of an operand")
    for axes, what in zip(below.subplots(1, len(cpu_curves.BY_DEVICES)), cpu_curves.BY_DEVICES, strict=True):
        for nbytes, color in zip(sizes.ends, (FASTER, SLOWER), strict=True):
            chosen = [point for point in by_devices if (point.what, point.nbytes) == (what, nbytes)]
            xs, ys = line(table, PROJECT, chosen, lambda point: point.devices)
            axes.plot(xs, ys, color=color, marker=".", label=size_of(nbytes))
            for y in line(table, NUMPY, chosen[:1], lambda point: point.devices)[1]:
                axes.axhline(y, linestyle="--", color=color, label=f"{size_of(nbytes)}, {NUMPY}")
        named(axes, WORDS[what], "logical devices")
    figure.savefig(path)


def line(
    table: Table, column: str, points: Sequence[Point], over: Callable[[Point], int]
) -> tuple[list[int], list[float]]:
    """The figures that there are, and where they belong."""
    figures = {over(point): table.cells.get((point.name, column), harness.Cell()).median for point in points}
    found = {x: figure for x, figure in figures.items() if figure is not None}
    return list(found), list(found.values())


def named(axes: Any, title: str, over: str) -> None:
    """Says what a curve shows."""
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_title(title, fontsize=10)
    axes.set_xlabel(over)
    axes.set_ylabel("seconds per element")
    axes.legend(fontsize=7)


# -- the run ---------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None, sizes: Sizes = FULL) -> None:
    """The program: measures both tables, prints, saves and draws them."""
    options = harness.arguments("cpu", "What runs on a CPU, and how it scales.", argv)
    effort = QUICK if options.quick else Effort()
    name, curves = (harness.labelled(what, options.label) for what in ("cpu", "scaling"))
    drawn = harness.is_installed("matplotlib")
    table = measure(effort, sizes)
    harness.report(table, options.out, name, WIDTH)
    if drawn:
        chart(table, options.out / f"{name}.svg")
    grown = measure_curves(effort, sizes)
    harness.report(grown, options.out, curves)
    if drawn:
        chart_curves(grown, options.out / f"{curves}.svg", sizes)
    else:
        print("No charts: matplotlib is not installed.")


if __name__ == "__main__":
    main()
