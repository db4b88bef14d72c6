"""What the benchmarks share: processes that measure, rounds that interleave them, and tables of what came out.

The columns of every table are the same four (`workers`); what its rows measure is the business of its own script.

Each library is measured in a process of its own (`Worker`), because environment variables and the number of JAX's
devices are fixed when a process starts. The workers of all libraries are alive together, and `interleave` asks them in
turn, so that a busy moment of the machine falls on all alike.

Run as a program, this file is a worker: ``python harness.py MODULE:FUNCTION``.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import functools
import importlib
import importlib.metadata
import importlib.util
import io
import itertools
import json
import os
import platform
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import timeit
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from rich import box
from rich.console import Console, Group
from rich.padding import Padding
from rich.progress import track
from rich.table import Table as RichTable
from rich.text import Text

Case = Callable[[], Any]
"""One thing to measure: when it returns, the work is done, not merely queued."""
Sampler = Callable[[], float]
"""Measures once. May raise `NoFigure`."""
Key = TypeVar("Key", bound=Hashable)
Effort = TypeVar("Effort")

PROJECT, NUMPY, JAX_8, JAX_2 = "shardtensor", "NumPy", "JAX (8)", "JAX (2)"
DEVICES = 8

NOT_APPLICABLE = "–"

RESULTS = Path(__file__).parent / "results"
WIDTH = 120

# Long against the clock and against caches that the other processes have emptied; short against a noisy moment.
SAMPLE_SECONDS = 5e-3
ANSWER_LIMIT = 120.0

# A tuning for another machine can halve the speed of NumPy's matrix product.
_TUNING = ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE")


class NoFigure(Exception):
    """A cell has no figure; the message stands in its place."""


# -- processes -------------------------------------------------------------------------------------


def child_environment(**changes: str) -> dict[str, str]:
    """The environment variables of a process that measures."""
    return {name: value for name, value in os.environ.items() if name not in _TUNING} | changes


def is_installed(package: str) -> bool:
    """Whether ``package`` can be imported, which this does not do."""
    return importlib.util.find_spec(package) is not None


class Worker:
    """A process that measures the cases of one library. Used in a ``with``, at whose end the process ends.

    Once the process is gone, or where the library is not installed, every request raises `NoFigure` with the reason.

    Args:
        package: what must be installed for the cases.
        cases: ``module:function`` of this folder; the function gives the cases by name. It is called in the process.
        environment: variables to set for the process.
        warm_up: seconds for which a case runs before it is sampled.
    """

    def __init__(
        self, package: str, cases: str, environment: Mapping[str, str] | None = None, warm_up: float = 0.0
    ) -> None:
        self._command = [sys.executable, __file__, cases, str(warm_up)]
        self._environment = child_environment(PYTHONIOENCODING="utf-8", **(environment or {}))
        self._names: list[str] = []
        self._installed = is_installed(package)
        self._problem = "" if self._installed else "not installed"
        self._closing = contextlib.ExitStack()
        if self._installed:
            self._start()

    def _start(self) -> None:
        with contextlib.ExitStack() as stack:
            self._errors = stack.enter_context(tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace"))
            self._process = stack.enter_context(
                subprocess.Popen(
                    self._command,
                    env=self._environment,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=self._errors,
                    encoding="utf-8",
                )
            )
            stack.callback(self._process.kill)
            self._closing = stack.pop_all()
        with contextlib.suppress(NoFigure):  # the reason is kept, and every request repeats it
            self._names = self._answer(ANSWER_LIMIT)

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.close()

    def again(self) -> None:
        """Starts the process anew where it has ended: JAX's virtual devices deadlock at times."""
        if self._problem and self._installed:
            self._closing.close()
            self._problem = ""
            self._start()

    def sample(self, case: str) -> float:
        """Seconds per call of a case, over as many calls as fill `SAMPLE_SECONDS`."""
        return float(self._ask("sample", case, ANSWER_LIMIT))

    def call(self, case: str, limit: float = ANSWER_LIMIT) -> Any:
        """What one call of a case returns, as JSON carries it; over ``limit`` seconds, the process is killed."""
        return self._ask("call", case, limit)

    def _ask(self, verb: str, case: str, limit: float) -> Any:
        if self._problem:
            raise NoFigure(self._problem)
        if case not in self._names:
            raise NoFigure(NOT_APPLICABLE)
        with contextlib.suppress(BrokenPipeError):  # then there is no answer either
            print(json.dumps([verb, case]), file=self._process.stdin, flush=True)
        return self._answer(limit)

    def _answer(self, limit: float) -> Any:
        expired = threading.Event()

        def stop() -> None:
            expired.set()
            self._process.kill()

        watchdog = threading.Timer(limit, stop)
        watchdog.start()
        try:
            line = self._process.stdout.readline()
        finally:
            watchdog.cancel()
        if line:
            return json.loads(line)
        self._problem = f"none in {limit:.0f} s" if expired.is_set() else self._last_words()
        raise NoFigure(self._problem)

    def _last_words(self) -> str:
        """How the process ended. The traceback of an exception is shown; native code that crashes has none worth it."""
        status = self._process.wait()
        if status < 0:
            return "aborted" if status == -signal.SIGABRT else f"killed by {signal.Signals(-status).name}"
        self._errors.seek(0)
        print(self._errors.read(), file=sys.stderr)
        return "failed"


Library: TypeAlias = tuple[str, str, Mapping[str, str]]
"""What a `Worker` needs: the package, ``module:function`` of its cases, and its environment."""


@contextlib.contextmanager
def started(columns: Mapping[str, Library], warm_up: float = 0.0) -> Iterator[dict[str, Worker]]:
    """Starts a worker for each column; all of them end at the end of the ``with``."""
    with contextlib.ExitStack() as stack:
        yield {column: stack.enter_context(Worker(*library, warm_up)) for column, library in columns.items()}


def workers(module: str) -> contextlib.AbstractContextManager[dict[str, Worker]]:
    """Starts, for each column, a worker with the cases of a library: the functions ``shardtensor_cases``,
    ``numpy_cases`` and ``jax_cases`` of a module of this folder.
    """
    return started(
        {
            PROJECT: ("shardtensor", f"{module}:shardtensor_cases", logical_devices(DEVICES)),
            NUMPY: ("numpy", f"{module}:numpy_cases", {}),
            JAX_8: ("jax", f"{module}:jax_cases", virtual_devices(8)),
            JAX_2: ("jax", f"{module}:jax_cases", virtual_devices(2)),
        }
    )


def logical_devices(devices: int, backend: str = "numpy") -> dict[str, str]:
    """Returns the variables with which shardtensor has so many devices of a backend."""
    return {"SHARDTENSOR_NUM_DEVICES": str(devices), "SHARDTENSOR_BACKEND": backend}


def virtual_devices(devices: int) -> dict[str, str]:
    """The variables by which JAX takes the CPU for so many devices."""
    return {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"}


def serve(cases: str, warm_up: float) -> None:
    """The life of a `Worker`: reads a request per line, writes an answer per line, both JSON."""
    answers, sys.stdout = sys.stdout, sys.stderr  # what a library prints must not be taken for an answer
    module, _, function = cases.partition(":")
    named: Mapping[str, Case] = getattr(importlib.import_module(module), function)()
    counts: dict[str, int] = {}

    def sample(name: str) -> float:
        timer = timeit.Timer(named[name])
        calls = counts.get(name) or counts.setdefault(name, _calls_that_fill_a_sample(timer))
        until = time.perf_counter() + warm_up
        timer.timeit(calls // 10 + 1)  # brings back to the caches what other processes have driven out
        while time.perf_counter() < until:
            timer.timeit(1)
        return timer.timeit(calls) / calls

    verbs: dict[str, Callable[[str], Any]] = {"sample": sample, "call": lambda name: named[name]()}
    print(json.dumps(list(named)), file=answers, flush=True)
    for line in sys.stdin:
        verb, name = json.loads(line)
        print(json.dumps(verbs[verb](name)), file=answers, flush=True)


def _calls_that_fill_a_sample(timer: timeit.Timer) -> int:
    timer.timeit(1)  # the first call may compile
    calls = 1
    while timer.timeit(calls) < SAMPLE_SECONDS:
        calls *= 2
    return calls


def import_seconds(package: str, bytecode: str) -> float:
    """How long ``import package`` takes in a fresh process; the start of Python itself does not count.

    Args:
        package: what is imported.
        bytecode: a folder for compiled modules, which the first import fills. Otherwise a library that no installer has
            compiled might be compiled again each time.
    """
    if not is_installed(package):
        raise NoFigure("not installed")
    code = f"import time; t = time.perf_counter(); import {package}; print(time.perf_counter() - t)"
    # -P: without the current folder, which is no part of an installed program, on the search path.
    command = [sys.executable, "-P", "-c", code]
    environment = child_environment(PYTHONPYCACHEPREFIX=bytecode, PYTHONDONTWRITEBYTECODE="")
    return float(subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout)


def resident_bytes() -> int | None:
    """The memory that this process has in RAM, where the operating system (Linux) says so."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")


def repeated(call: Case, times: int, wait: Callable[[Any], Any]) -> tuple[float, float | None]:
    """Calls many times, keeping only the last result, for which it then waits: seconds, and by how many MiB the process
    grew at most meanwhile, where the operating system says so.
    """
    wait(call())
    before = resident_bytes()
    most = before
    started = time.perf_counter()
    for i in range(times):
        last = call()
        if most is not None and not i % 1000:
            most = max(most, resident_bytes())
    wait(last)
    seconds = time.perf_counter() - started
    return seconds, None if most is None else (most - before) / 2**20


# -- rounds ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cell:
    """What was measured for one row and one column.

    Attributes:
        samples: in seconds, or in the unit of the row.
        problem: why there is no figure.
    """

    samples: tuple[float, ...] = ()
    problem: str = NOT_APPLICABLE

    @property
    def median(self) -> float | None:
        """The figure, or None."""
        return statistics.median(self.samples) if self.samples else None

    @property
    def quartiles(self) -> tuple[float, float] | None:
        """Between which values the middle half of the samples lies; None where there are too few."""
        if len(self.samples) < 4:
            return None
        low, _, high = statistics.quantiles(self.samples, method="inclusive")
        return low, high


Cells: TypeAlias = dict[tuple[str, str], Cell]
"""By name of the row and column."""


def interleave(samplers: Mapping[Key, Sampler], rounds: int, what: str) -> dict[Key, Cell]:
    """Samples everything once per round, in a new order each time, so that noise hits all alike.

    What raises `NoFigure` gets a cell with that problem, and is not asked again.
    """
    samples: dict[Key, list[float]] = {key: [] for key in samplers}
    problems: dict[Key, str] = {}
    shuffle = random.Random(0).shuffle
    console = Console(stderr=True)
    for _ in track(range(rounds), what, console=console, transient=True, disable=not console.is_terminal):
        order = [key for key in samplers if key not in problems]
        shuffle(order)
        for key in order:
            try:
                samples[key].append(samplers[key]())
            except NoFigure as reason:
                problems[key] = str(reason)
    return {k: Cell(problem=problems[k]) if k in problems else Cell(tuple(taken)) for k, taken in samples.items()}


def sample_cases(names: Iterable[str], workers: Mapping[str, Worker], rounds: int, what: str) -> Cells:
    """Samples these cases in all workers, interleaved; the names are those of rows."""
    pairs = list(itertools.product(names, workers))
    return interleave({(name, c): functools.partial(workers[c].sample, name) for name, c in pairs}, rounds, what)


def call_once(worker: Worker, column: str, case: str, rows: Iterable[str], limit: float = ANSWER_LIMIT) -> Cells:
    """The cells of some rows from one call of a case, which gives their figures by name."""
    try:
        found = worker.call(case, limit)
    except NoFigure as reason:
        return {(row, column): Cell(problem=str(reason)) for row in rows}
    return {(row, column): Cell(() if found[row] is None else (found[row],)) for row in rows}


# -- the machine -----------------------------------------------------------------------------------


def describe_environment(packages: Iterable[str]) -> dict[str, str]:
    """What the figures depend on: the kind of machine and the versions, and nothing that names the place."""
    versions = {name: _version(name) for name in packages}
    return {
        "CPU": f"{_cpu_model()}, {usable_cores()} cores usable",
        "memory": _memory(),
        "Python": platform.python_version(),
        **versions,
        "date": datetime.date.today().isoformat(),
    }


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(models, "") or platform.processor() or platform.machine()


def usable_cores() -> int:
    """How many cores this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on this operating system
        return os.cpu_count() or 1


def _memory() -> str:
    try:
        return f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB"
    except (AttributeError, ValueError):  # not on this operating system
        return "unknown"


def blas_kernel() -> str:
    """Which BLAS NumPy calls in this process, and which of its kernels that chose for the CPU."""
    import numpy as np

    built = np.show_config(mode="dicts")["Build Dependencies"]["blas"]
    try:
        from threadpoolctl import threadpool_info
    except ImportError:
        return f"{built['name']} {built['version']}, kernel unknown (threadpoolctl is not installed)"
    for library in threadpool_info():
        if library["user_api"] == "blas":
            kernel = library.get("architecture", "unknown")
            return f"{library['internal_api']} {library['version']}, kernel {kernel}, {library['num_threads']} threads"
    return f"{built['name']} {built['version']}, kernel unknown"


# -- the table -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Best:
    """The least figure that a row has in some columns; those without one do not count."""

    title: str
    columns: tuple[str, ...]

    def __str__(self) -> str:
        return self.title


@dataclass(frozen=True)
class Target:
    """What shardtensor's figure should not exceed: ``at_most``, or that many times the figure of the column ``of``, or
    the best of several, and ``more`` seconds.
    """

    at_most: float
    of: str | Best | None = None
    more: float = 0.0


@dataclass(frozen=True)
class Row:
    """One line of a table.

    Attributes:
        name: of the case.
        title: what a reader sees.
        unit: ``"s"``, or another one, which is printed as it is.
    """

    name: str
    title: str
    targets: tuple[Target, ...] = ()
    unit: str = "s"


@dataclass(frozen=True)
class Table:
    """Everything that was measured in one run.

    Attributes:
        columns: the first one is shardtensor's, to which the others are compared.
        cells: a missing one does not apply.
    """

    title: str
    environment: Mapping[str, str]
    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    cells: Cells

    def cell(self, row: Row, column: str) -> Cell:
        """What was measured there."""
        return self.cells.get((row.name, column), Cell())

    def least(self, row: Row, columns: Iterable[str]) -> tuple[float, str] | None:
        """The least figure of a row in these columns, and whose it is; None where there is none."""
        figures = [(median, column) for column in columns if (median := self.cell(row, column).median) is not None]
        return min(figures, default=None)

    def meets(self, row: Row, target: Target) -> bool | None:
        """Whether shardtensor does; None where a figure is missing that decides it."""
        figure = self.cell(row, self.columns[0]).median
        measure: float | None = 1.0
        if target.of is not None:
            best = self.least(row, target.of.columns if isinstance(target.of, Best) else (target.of,))
            measure = None if best is None else best[0]
        return None if figure is None or measure is None else figure <= target.at_most * measure + target.more

    def verdicts(self) -> list[bool | None]:
        """`meets` of all targets."""
        return [self.meets(row, target) for row in self.rows for target in row.targets]

    def summary(self) -> str:
        """The targets, counted."""
        verdicts = self.verdicts()
        if not verdicts:
            return "No targets."
        counts = [f"{verdicts.count(verdict)} {word}" for verdict, word in _WORDS.items()]
        return f"{len(verdicts)} targets: {', '.join(counts)}."

    def spread(self) -> float | None:
        """The width of the middle half of a cell's samples, as a share of its median: the median over all cells."""
        cells = [cell for cell in self.cells.values() if cell.quartiles and cell.median]
        shares = [(cell.quartiles[1] - cell.quartiles[0]) / cell.median for cell in cells]
        return statistics.median(shares) if shares else None

    def as_json(self) -> dict[str, Any]:
        """All figures, with their quartiles, in seconds or the unit of the row."""
        return {
            "title": self.title,
            "environment": dict(self.environment),
            "rows": [
                {
                    "name": row.name,
                    "title": row.title,
                    "unit": row.unit,
                    "cells": {column: _cell_json(self.cell(row, column)) for column in self.columns},
                    "targets": [{"target": _promise(t, row.unit), "met": self.meets(row, t)} for t in row.targets],
                }
                for row in self.rows
            ],
            "spread": self.spread(),
            "summary": self.summary(),
        }

    def __rich__(self) -> Group:
        grid = RichTable("", *self.columns, "target", "", box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
        for column in grid.columns:
            column.no_wrap = True
        for column in grid.columns[1 : 1 + len(self.columns)]:
            column.justify = "right"
        for row in self.rows:
            figures = [self._figure(row, column) for column in self.columns]
            promises = "\n".join(_promise(target, row.unit) for target in row.targets)
            marks = Text("\n").join(_mark(self.meets(row, target)) for target in row.targets)
            grid.add_row(Text(row.title), *figures, promises, marks)
        facts = "\n".join(f"{name}: {value}" for name, value in self.environment.items())
        notes = [f"n×: this figure over {self.columns[0]}'s. –: does not apply."]
        if (spread := self.spread()) is not None:
            notes.append(f"The middle half of a cell's samples typically spans {spread:.0%} of its median.")
        parts = [Text(self.title, "bold"), Text(facts), grid, Text("\n".join(notes)), Text(self.summary(), "bold")]
        return Group(*(Padding(part, (0, 0, 1, 0), expand=False) for part in parts[:-1]), parts[-1])

    def _figure(self, row: Row, column: str) -> str:
        cell, ours = self.cell(row, column), self.cell(row, self.columns[0]).median
        if cell.median is None:
            return cell.problem
        said = _quantity(cell.median, row.unit)
        if column == self.columns[0] or row.unit != "s" or not ours:
            return said
        return f"{said} {_digits(cell.median / ours):>5}×"


_WORDS = {True: "met", False: "missed", None: "not checked"}
_STYLES = {True: "green", False: "bold red", None: "yellow"}


def _mark(verdict: bool | None) -> Text:
    return Text(_WORDS[verdict], _STYLES[verdict])


def _cell_json(cell: Cell) -> dict[str, Any]:
    if cell.median is None:
        return {"problem": cell.problem}
    return {"median": cell.median, "quartiles": cell.quartiles, "samples": len(cell.samples)}


def _promise(target: Target, unit: str) -> str:
    if not target.of:
        return "≤ {:g} {}".format(*_scaled(target.at_most, unit))
    more = " + {:g} {}".format(*_scaled(target.more, unit)) if target.more else ""
    return f"≤ {target.at_most:g} × {target.of}{more}"


def _quantity(value: float, unit: str) -> str:
    """Three digits and a unit that suits them."""
    number, unit = _scaled(value, unit)
    return f"{_digits(number)} {unit}"


def _scaled(value: float, unit: str) -> tuple[float, str]:
    if unit != "s":
        return value, unit
    for scale, name in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns")):
        if value >= scale:
            return value / scale, name
    return value / 1e-12, "ps"


def _digits(number: float) -> str:
    """Three of them, rounded (99.95 is 100), never as a power of ten."""
    return f"{number:.{0 if number >= 99.95 else 1 if number >= 9.995 else 2}f}"


def report(table: Table, directory: Path, name: str, width: int = WIDTH) -> None:
    """Prints a table, and saves it as ``name.txt``, of so many columns of text, and ``name.json``."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a redirected output's encoding may lack ≤ and ×
    Console(width=max(Console().width, width)).print(table)
    page = io.StringIO()
    Console(file=page, width=width, no_color=True, force_terminal=False).print(table)
    text = "\n".join(line.rstrip() for line in page.getvalue().splitlines())
    directory.mkdir(parents=True, exist_ok=True)
    (directory / f"{name}.txt").write_text(f"{text}\n", "utf-8")
    (directory / f"{name}.json").write_text(json.dumps(table.as_json(), indent=1, ensure_ascii=False) + "\n", "utf-8")


def run(name: str, what: str, measure: Callable[[Effort], Table], full: Effort, quick: Effort) -> None:
    """The program of a table: reads the command line, measures, prints and saves."""
    options = arguments(name, what)
    report(measure(quick if options.quick else full), options.out, labelled(name, options.label))


def arguments(name: str, what: str, argv: Sequence[str] | None = None) -> argparse.Namespace:
    """What the command line says: ``quick``, ``out`` and ``label``."""
    parser = argparse.ArgumentParser(description=what)
    parser.add_argument("--quick", action="store_true", help="few rounds: to see that it runs, not to quote")
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="DIR", help="where the results go")
    parser.add_argument("--label", metavar="LABEL", help=f"saved as {name}-LABEL: what kind of machine, not which one")
    return parser.parse_args(argv)


def labelled(name: str, label: str | None) -> str:
    """What the files of a table are called."""
    return f"{name}-{label}" if label else name


if __name__ == "__main__":
    serve(sys.argv[1], float(sys.argv[2]))
