"""How costs grow with sizes, devices, shapes, processes, and the length of programs: curves and their exponents.

``python benchmarks/scaling.py [--quick] [--out DIR] [--label LABEL]``; README.md says how to read them.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import harness
import machine
import scaling_cases
from cpu import Start, Workers, start_columns
from cpu_cases import FULL, GIB, KIB, MIB, Sizes
from harness import DEVICES, NUMPY, PROJECT
from report import FASTER, SLOWER
from scaling_cases import COUNTED, Point
from tables import Cell, Cells, Row, Table, Target

TITLE = f"Scaling: time per element, equation or call; over sizes on {DEVICES} logical devices, then over other counts"
GROWTH_TITLE = "Growth: the exponents of the time over the upper half of each curve; 1 is linear, 0 is constant"
LINEAR = 1.1
"""The exponent up to which a cost counts as linear."""

JOB_LIMIT = 120.0
"""The seconds after which a job of several processes is stopped."""

TITLES = {
    "add": "x + y",
    "sum": "x.sum()",
    "sum0": "x.sum(axis=0)",
    "sin": "sin(x)",
    "matmul": "x @ y",
    "reshard": "rows → columns",
    "contraction": "x @ y, contraction split",
    "plan": "plan of rows → columns, a piece",
    "trace": "trace, an equation",
    "run": "call of a program, an equation",
    "shapes": "x + y in several shapes, a call",
    "pmap": "pmap of x + 1, a call",
    "psum": "psum of scalars in a map, a call",
    "processes": "sum of 8 bytes, a call",
}
AXES = {
    "plan": "simulated devices",
    "trace": "equations",
    "run": "equations",
    "shapes": "shapes",
    "pmap": "logical devices",
    "psum": "logical devices",
    "processes": "processes",
}


@dataclass(frozen=True)
class Mark:
    """A point of a curve that is measured.

    Attributes:
        x: its coordinate.
        case: the name of its case.
        units: the number of elements, equations or calls by which its time is divided.
        work: the amount to which a linear cost is proportional.
    """

    x: int
    case: str
    units: int
    work: int

    @property
    def row(self) -> str:
        """The name of its row: curves over sizes and over devices have cases in common."""
        return self.case if self.units == 1 else f"{self.case}, divided"

    def figure(self, cell: Cell) -> Cell:
        """Returns the cell of its row, given that of the calls of its case."""
        return dataclasses.replace(cell, samples=tuple([seconds / self.units for seconds in cell.samples]))


@dataclass(frozen=True)
class Curve:
    """How the time of one function grows.

    Attributes:
        title: the name of the function.
        axis: the name of the coordinate.
        marks: the points, from the smallest on.
    """

    title: str
    axis: str
    marks: tuple[Mark, ...]

    def exponent(self, table: Table, column: str) -> float | None:
        """Returns the slope of the logarithm of the time over that of the work, for the upper half of the points.

        None if fewer than two of them have a figure.
        """
        figures = ((mark, table.cells.get((mark.row, column), Cell()).median) for mark in self.marks)
        times = [(mark.work, figure * mark.units) for mark, figure in figures if figure]
        upper = times[-max((len(times) + 1) // 2, 2) :]
        if len({work for work, _ in upper}) < 2:
            return None
        import numpy as np  # here, because the peers' Python may lack it

        return float(np.polyfit(*np.log2(upper).T, 1)[0])


def curves(sizes: Sizes) -> list[Curve]:
    """Returns all curves: over sizes, over devices, and over what `scaling_cases.COUNTED` counts."""
    by_size, by_devices = scaling_cases.points_by_size(sizes), scaling_cases.points_by_devices(sizes)
    found = [
        Curve(TITLES[function], "bytes of an operand", _marks(by_size, function, lambda p: (p.nbytes, p.elements)))
        for function in scaling_cases.BY_SIZE
    ]
    for nbytes, function in itertools.product(sizes.ends, scaling_cases.BY_DEVICES):
        points = [point for point in by_devices if point.nbytes == nbytes]
        marks = _marks(points, function, lambda point: (point.devices, 1))
        found.append(Curve(f"{TITLES[function]}, {size_text(nbytes)}", "logical devices", marks))
    for function, counts in {**COUNTED, "processes": lambda sizes: sizes.processes}.items():
        marks = tuple([Mark(n, f"{function} {n}", *_amounts(function, n)) for n in counts(sizes)])
        found.append(Curve(TITLES[function], AXES[function], marks))
    return found


def _marks(points: Iterable[Point], function: str, of: Callable[[Point], tuple[int, int]]) -> tuple[Mark, ...]:
    """Returns the marks of a function's points; ``of`` returns the coordinate of a point, and its units."""
    pairs = [(point, *of(point)) for point in points if point.function == function]
    return tuple([Mark(x, point.name, units, units if units > 1 else x) for point, x, units in pairs])


def _amounts(function: str, count: int) -> tuple[int, int]:
    """Returns the units and the work of a counted function. Each device sends a piece to each other one in a plan."""
    if function == "plan":
        return count**2, count**2
    return (count, count) if function in ("trace", "run", "shapes") else (1, count)


def size_text(nbytes: int) -> str:
    """Returns a number of bytes in KiB, MiB or GiB."""
    unit, name = next((unit, name) for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")) if nbytes >= unit)
    return f"{nbytes // unit} {name}"


# -- the run -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Effort:
    """The number of rounds."""

    rounds: int = 5


QUICK = Effort(1)


def start_workers(sizes: Sizes) -> Workers:
    """Starts the worker of each column of the curves; a context manager that ends them."""
    columns: dict[str, harness.Library] = {
        PROJECT: ("shardtensor", "shardtensor_cases", harness.logical_devices(max(sizes.devices))),
        NUMPY: ("numpy", "numpy_cases", {}),
    }
    return start_columns("scaling_cases", columns, sizes)


def measure(effort: Effort, sizes: Sizes = FULL, start: Start = start_workers) -> tuple[Table, Table]:
    """Measures all curves; returns the table of their points and that of their exponents."""
    found = curves(sizes)
    environment = machine.describe_environment(("numpy", "mpich", "shardtensor")) | {
        "element": "an element of a square operand; of a product, a multiplication",
        "rounds": str(effort.rounds),
    }
    calls: Cells = {}
    with start(sizes) as workers:
        for group in scaling_cases.groups(sizes):
            pairs = itertools.product(group, workers)
            samplers = {(case, column): functools.partial(workers[column].sample, case) for case, column in pairs}
            calls |= harness.interleave(samplers, effort.rounds, group[0])
    calls |= {(f"processes {n}", PROJECT): _job(n, effort.rounds) for n in sizes.processes}
    marks = [mark for curve in found for mark in curve.marks]
    columns = (PROJECT, NUMPY)
    cells = {(m.row, c): m.figure(calls[m.case, c]) for m in marks for c in columns if (m.case, c) in calls}
    rows = [Row(mark.row, f"{curve.title}, {_coordinate(curve, mark)}") for curve in found for mark in curve.marks]
    table = Table(TITLE, environment, columns, tuple(rows), cells)
    return table, exponents(table, found)


def exponents(table: Table, found: Sequence[Curve]) -> Table:
    """Returns the table of the exponents of curves."""
    rows, cells = [], {}
    for curve in found:
        title = f"{curve.title}, over {curve.axis}"
        rows.append(Row(title, title, (Target(LINEAR),), ""))
        for column in table.columns:
            exponent = curve.exponent(table, column)
            cells[title, column] = Cell(() if exponent is None else (max(exponent, 0.0),))
    return Table(GROWTH_TITLE, table.environment, table.columns, tuple(rows), cells, table.columns[1:])


def _coordinate(curve: Curve, mark: Mark) -> str:
    return size_text(mark.x) if curve.axis.startswith("bytes") else f"{mark.x} {curve.axis}"


def _job(count: int, rounds: int) -> Cell:
    """Returns the times of a sum of 8 bytes in a job of this number of processes, one device each."""
    from shardtensor import launcher

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "samples.json"
        command = [sys.executable, __file__, "--inside", str(rounds), str(path)]
        environ = {"SHARDTENSOR_NUM_DEVICES": "1", "OMP_NUM_THREADS": "1"}
        lines: list[str] = []
        if launcher.launch(command, count, "mpi", timeout=JOB_LIMIT, environ=environ, output=lines.append):
            print("\n".join(lines), file=sys.stderr)
            return Cell(problem="failed")
        return Cell(tuple(json.loads(path.read_text())))


def _inside(rounds: int, path: str) -> None:
    """Measures a sum in one of the processes of a job; process 0 writes the times."""
    import shardtensor as st

    st.distributed.initialize()
    count = st.distributed.process_count()
    x = st.ones(count * 8, device=st.NamedSharding(st.make_mesh((count,), ("d",)), st.P("d")))
    samples = []
    for turn in range(rounds + 1):
        st.distributed.sync_global_devices(str(turn))
        begin = time.perf_counter()
        for _ in range(100):
            x.sum()
        samples.append((time.perf_counter() - begin) / 100)
    if st.distributed.process_index() == 0:
        Path(path).write_text(json.dumps(samples[1:]))  # the first turn makes plans
    st.distributed.shutdown()


# -- charts ------------------------------------------------------------------------------------------------------------

WIDTH = 5
"""The number of diagrams in a line."""

PLAIN = "#888888"


def draw(table: Table, path: Path, found: Sequence[Curve]) -> None:
    """Draws all curves, NumPy's with dashed lines, each with shardtensor's exponent."""
    from matplotlib.figure import Figure

    lines = -(-len(found) // WIDTH)
    figure = Figure(figsize=(3.2 * WIDTH, 2.8 * lines), layout="constrained")
    grid = figure.subplots(lines, WIDTH, squeeze=False)
    for axes in grid.flat[len(found) :]:
        axes.set_axis_off()
    for axes, curve in zip(grid.flat, found, strict=False):
        exponent = curve.exponent(table, PROJECT)
        is_linear = exponent is None or exponent <= LINEAR
        for column, color, dashes in ((PROJECT, FASTER if is_linear else SLOWER, "-"), (NUMPY, PLAIN, "--")):
            figures = [(mark.x, table.cells.get((mark.row, column), Cell()).median) for mark in curve.marks]
            measured = [(x, seconds) for x, seconds in figures if seconds is not None]
            if measured:
                axes.plot(*zip(*measured, strict=True), dashes, color=color, marker=".", label=column)
        text = "" if exponent is None else f"\nexponent {max(exponent, 0.0):.2f}"
        axes.set(title=curve.title + text, xlabel=curve.axis, ylabel="seconds", yscale="log")
        axes.set_xscale("log", base=2)
        axes.title.set_fontsize(9)
        axes.legend(fontsize=7)
    figure.savefig(path)


def main(argv: Sequence[str] | None = None, sizes: Sizes = FULL) -> None:
    """Runs the program: measures all curves, prints, saves and draws them."""
    options = harness.arguments("scaling", "How costs grow.", argv)
    points, growth = measure(QUICK if options.quick else Effort(), sizes)
    name, growth_name = (harness.labelled(table, options.label) for table in ("scaling", "growth"))
    harness.report(points, options.out, name)
    harness.report(growth, options.out, growth_name)
    draw(points, options.out / f"{name}-curves.svg", curves(sizes))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--inside"]:
        _inside(int(sys.argv[2]), sys.argv[3])
    else:
        main()
