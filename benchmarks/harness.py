"""The part that all benchmarks share: worker processes, interleaved rounds, and tables of the results.

Each library is measured in a process of its own (`Worker`), because environment variables and the number of JAX's
devices are fixed when a process starts. The workers of all libraries exist at the same time, and `interleave` samples
them in turn, so that other load on the machine affects all of them alike.

The scripts that import this module define the rows of their tables and the cases that are measured.

Run as a program, this file is a worker: ``python harness.py MODULE:FUNCTION WARM_UP``.
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
"""A call to measure. When it returns, the work is done, not merely queued."""
Sampler = Callable[[], float]
"""A function that measures once and returns the result. It may raise `NotMeasured`."""
Key = TypeVar("Key", bound=Hashable)
Effort = TypeVar("Effort")

PROJECT, NUMPY, JAX_8, JAX_2 = "shardtensor", "NumPy", "JAX (8)", "JAX (2)"
DEVICES = 8

NOT_APPLICABLE = "–"

RESULTS = Path(__file__).parent / "results"
PAGE_WIDTH = 1000
"""The width of a page in characters. No table is as wide, so that none is cut."""

SAMPLE_SECONDS = 5e-3
"""The least duration of a sample: far above the resolution of the clock and the cost of refilling caches that other
processes have evicted, but short enough that load on the machine affects few samples.
"""

WARM_UP = 0.2
"""The seconds after which idle cores are awake, and the threads of other processes' BLAS and OpenMP no longer spin."""

ANSWER_LIMIT = 120.0
"""The seconds after which a worker that has not answered is killed."""

# Values for another machine can halve the speed of NumPy's matrix product.
_TUNING = ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE")


class NotMeasured(Exception):
    """A cell could not be measured; the message is the reason, which the table shows instead of a figure."""


# -- processes -------------------------------------------------------------------------------------


def child_environment(**changes: str) -> dict[str, str]:
    """Returns the environment variables for a process that measures: this process's with ``changes``."""
    return {name: value for name, value in os.environ.items() if name not in _TUNING} | changes


def is_installed(package: str) -> bool:
    """Whether ``package`` can be imported; the package is not imported."""
    return importlib.util.find_spec(package) is not None


class Worker:
    """A process that measures the cases of one library; a context manager that ends the process on exit.

    If the library is not installed, or the process has ended, every request raises `NotMeasured` with the reason.

    Args:
        package: the package that the cases need.
        cases: ``module:function`` of this folder; the process calls the function, which returns the cases by name.
        environment: environment variables for the process.
        warm_up: the seconds for which a case runs before it is sampled.
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
        with contextlib.suppress(NotMeasured):  # _problem has the reason, and every request raises it again
            self._names = self._answer(ANSWER_LIMIT)

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.close()

    def restart(self) -> None:
        """Starts the process again if it has ended: programs on JAX's virtual devices deadlock at times."""
        if self._problem and self._installed:
            self._closing.close()
            self._problem = ""
            self._start()

    def sample(self, case: str) -> float:
        """Returns the seconds per call of a case, over as many calls as take `SAMPLE_SECONDS`."""
        return float(self._request("sample", case, ANSWER_LIMIT))

    def call(self, case: str, limit: float = ANSWER_LIMIT) -> Any:
        """Calls a case once and returns its result, transferred as JSON; after ``limit`` seconds the process is killed.

        Raises:
            NotMeasured: the process was killed or has ended, or its library has no such case.
        """
        return self._request("call", case, limit)

    def _request(self, verb: str, case: str, limit: float) -> Any:
        if self._problem:
            raise NotMeasured(self._problem)
        if case not in self._names:
            raise NotMeasured(NOT_APPLICABLE)
        with contextlib.suppress(BrokenPipeError):  # the process has ended: _answer finds no line and reports why
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
        self._problem = f"none in {limit:.0f} s" if expired.is_set() else self._exit_reason()
        raise NotMeasured(self._problem)

    def _exit_reason(self) -> str:
        """Returns how the process ended. After an exception, prints its traceback; a signal in native code has none."""
        status = self._process.wait()
        if status < 0:
            return "aborted" if status == -signal.SIGABRT else f"killed by {signal.Signals(-status).name}"
        self._errors.seek(0)
        print(self._errors.read(), file=sys.stderr)
        return "failed"


Library: TypeAlias = tuple[str, str, Mapping[str, str]]
"""The first arguments of `Worker`: the package, ``module:function`` of the cases, and environment variables."""


@contextlib.contextmanager
def start_workers(columns: Mapping[str, Library], warm_up: float = 0.0) -> Iterator[dict[str, Worker]]:
    """Starts a worker for each column; a context manager that ends all of them on exit."""
    with contextlib.ExitStack() as stack:
        yield {column: stack.enter_context(Worker(*library, warm_up)) for column, library in columns.items()}


def start_default_workers(module: str) -> contextlib.AbstractContextManager[dict[str, Worker]]:
    """Starts workers for shardtensor, NumPy, and JAX on eight and on two devices; a context manager.

    Their cases are ``shardtensor_cases``, ``numpy_cases`` and ``jax_cases`` of a module of this folder.
    """
    return start_workers(
        {
            PROJECT: ("shardtensor", f"{module}:shardtensor_cases", logical_devices(DEVICES)),
            NUMPY: ("numpy", f"{module}:numpy_cases", {}),
            JAX_8: ("jax", f"{module}:jax_cases", virtual_devices(8)),
            JAX_2: ("jax", f"{module}:jax_cases", virtual_devices(2)),
        }
    )


def logical_devices(devices: int, backend: str = "numpy") -> dict[str, str]:
    """Returns the environment variables that give shardtensor this number of devices of a backend."""
    return {"SHARDTENSOR_NUM_DEVICES": str(devices), "SHARDTENSOR_BACKEND": backend}


def virtual_devices(devices: int) -> dict[str, str]:
    """Returns the environment variables that make JAX present the CPU as this number of devices."""
    return {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"}


def run_worker(cases: str, warm_up: float) -> None:
    """Runs the loop of a `Worker` process: reads one request per line and writes one answer per line, both JSON."""
    answers, sys.stdout = sys.stdout, sys.stderr  # output that a library prints must not be read as an answer
    module, _, function = cases.partition(":")
    by_name: Mapping[str, Case] = getattr(importlib.import_module(module), function)()
    counts: dict[str, int] = {}

    def sample(name: str) -> float:
        timer = timeit.Timer(by_name[name])
        calls = counts.get(name) or counts.setdefault(name, _calls_per_sample(timer))
        until = time.perf_counter() + warm_up
        timer.timeit(calls // 10 + 1)  # refills caches that other processes have evicted
        while time.perf_counter() < until:
            timer.timeit(1)
        return timer.timeit(calls) / calls

    verbs: dict[str, Callable[[str], Any]] = {"sample": sample, "call": lambda name: by_name[name]()}
    print(json.dumps(list(by_name)), file=answers, flush=True)
    for line in sys.stdin:
        verb, name = json.loads(line)
        print(json.dumps(verbs[verb](name)), file=answers, flush=True)


def _calls_per_sample(timer: timeit.Timer) -> int:
    """Returns a number of calls that take at least `SAMPLE_SECONDS`."""
    timer.timeit(1)  # the first call may compile
    calls = 1
    while timer.timeit(calls) < SAMPLE_SECONDS:
        calls *= 2
    return calls


def import_seconds(package: str, bytecode: str) -> float:
    """Returns the seconds that ``import package`` takes in a new process, without the start of Python itself.

    Args:
        package: the name of the package.
        bytecode: a folder for compiled modules, which the first import fills. Without it, a library whose installer
            did not compile it might be compiled in each process.
    """
    if not is_installed(package):
        raise NotMeasured("not installed")
    code = f"import time; t = time.perf_counter(); import {package}; print(time.perf_counter() - t)"
    # -P removes the current folder from the search path: an installed program does not have it there either.
    command = [sys.executable, "-P", "-c", code]
    environment = child_environment(PYTHONPYCACHEPREFIX=bytecode, PYTHONDONTWRITEBYTECODE="")
    return float(subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout)


def resident_bytes() -> int | None:
    """Returns the resident memory of this process, or None if the operating system (not Linux) does not report it."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")


def repeat_call(call: Case, times: int, wait: Callable[[Any], Any]) -> tuple[float, float | None]:
    """Calls a function many times, keeps only the last result, and waits for it.

    Returns:
        The seconds, and the largest growth of the process meanwhile in MiB; None for the growth if the operating system
        does not report it.
    """
    wait(call())
    before = resident_bytes()
    largest = before
    begin = time.perf_counter()
    for i in range(times):
        last = call()
        if largest is not None and not i % 1000:
            largest = max(largest, resident_bytes())
    wait(last)
    seconds = time.perf_counter() - begin
    return seconds, None if largest is None else (largest - before) / 2**20


# -- rounds ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cell:
    """The measurement for one row and one column.

    Attributes:
        samples: the measured values, in seconds or in the unit of the row; empty if nothing could be measured.
        problem: the reason why there are no samples.
    """

    samples: tuple[float, ...] = ()
    problem: str = NOT_APPLICABLE

    @property
    def median(self) -> float | None:
        """The median of the samples, which the table shows; None without samples."""
        return statistics.median(self.samples) if self.samples else None

    @property
    def quartiles(self) -> tuple[float, float] | None:
        """The first and third quartile of the samples; None for fewer than four samples."""
        if len(self.samples) < 4:
            return None
        low, _, high = statistics.quantiles(self.samples, method="inclusive")
        return low, high


Cells: TypeAlias = dict[tuple[str, str], Cell]
"""Cells by the names of their row and column."""


def interleave(samplers: Mapping[Key, Sampler], rounds: int, description: str) -> dict[Key, Cell]:
    """Calls every sampler once per round, in a new order each time, so that noise affects all of them alike.

    A sampler that raises `NotMeasured` is not called again; its cell has the problem. A run that is interrupted after
    the first round ends there: its cells have the samples until then.

    Args:
        samplers: the samplers by the keys of their cells.
        rounds: the number of rounds.
        description: the label of the progress bar.
    """
    samples: dict[Key, list[float]] = {key: [] for key in samplers}
    problems: dict[Key, str] = {}
    shuffle = random.Random(0).shuffle
    console = Console(stderr=True)
    for _ in track(range(rounds), description, console=console, transient=True, disable=not console.is_terminal):
        order = [key for key in samplers if key not in problems]
        shuffle(order)
        try:
            for key in order:
                try:
                    samples[key].append(samplers[key]())
                except NotMeasured as reason:
                    problems[key] = str(reason)
        except KeyboardInterrupt:
            if not all(samples[key] or key in problems for key in samplers):
                raise
            console.print("interrupted: the samples until here are reported")
            break
    return {k: Cell(problem=problems[k]) if k in problems else Cell(tuple(values)) for k, values in samples.items()}


def sample_cases(names: Iterable[str], workers: Mapping[str, Worker], rounds: int, description: str) -> Cells:
    """Samples the named cases in all workers, interleaved, and returns their cells; a case has the name of its row."""
    pairs = list(itertools.product(names, workers))
    return interleave({(name, c): functools.partial(workers[c].sample, name) for name, c in pairs}, rounds, description)


def call_once(worker: Worker, column: str, case: str, rows: Iterable[str], limit: float = ANSWER_LIMIT) -> Cells:
    """Calls a case once and returns the cells of several rows: the case returns their figures by name."""
    try:
        figures = worker.call(case, limit)
    except NotMeasured as reason:
        return {(row, column): Cell(problem=str(reason)) for row in rows}
    return {(row, column): Cell(() if figures[row] is None else (figures[row],)) for row in rows}


# -- the machine -----------------------------------------------------------------------------------


def describe_environment(packages: Iterable[str]) -> dict[str, str]:
    """Returns the facts on which figures depend: the kind of machine (not its name), versions, and the date."""
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
    """Returns the number of cores that this process may use."""
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
    """Returns a description of NumPy's BLAS in this process, with the kernel that it selected for the CPU."""
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
    """The smallest figure of a row in several columns; columns without a figure are ignored."""

    title: str
    columns: tuple[str, ...]

    def __str__(self) -> str:
        return self.title


@dataclass(frozen=True)
class Target:
    """An upper limit for shardtensor's figure.

    Attributes:
        at_most: the limit in the unit of the row, or, if ``of`` is given, a factor.
        of: the column, or the best of several columns, whose figure times ``at_most`` is the limit.
        more: seconds added to the limit.
    """

    at_most: float
    of: str | Best | None = None
    more: float = 0.0


@dataclass(frozen=True)
class Row:
    """One line of a table.

    Attributes:
        name: the name of the case.
        title: the text in the table.
        targets: the limits for shardtensor's figure.
        unit: the unit of the figures: ``"s"``, which is scaled for printing, or another one, which is not.
    """

    name: str
    title: str
    targets: tuple[Target, ...] = ()
    unit: str = "s"


@dataclass(frozen=True)
class Table:
    """All measurements of one run.

    Attributes:
        title: the headline.
        environment: the facts on which the figures depend, by name.
        columns: the columns; the first one is shardtensor's, with which the others are compared.
        rows: the lines of the table.
        cells: the measurements; a missing cell does not apply.
    """

    title: str
    environment: Mapping[str, str]
    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    cells: Cells

    def cell(self, row: Row, column: str) -> Cell:
        """Returns the measurement of a row and a column."""
        return self.cells.get((row.name, column), Cell())

    def least(self, row: Row, columns: Iterable[str]) -> tuple[float, str] | None:
        """Returns the smallest figure of a row in some columns, and its column; None if none has a figure."""
        figures = [(median, column) for column in columns if (median := self.cell(row, column).median) is not None]
        return min(figures, default=None)

    def meets(self, row: Row, target: Target) -> bool | None:
        """Whether shardtensor's figure meets a target; None if a figure that is needed to decide it is missing."""
        figure = self.cell(row, self.columns[0]).median
        reference: float | None = 1.0
        if target.of is not None:
            best = self.least(row, target.of.columns if isinstance(target.of, Best) else (target.of,))
            reference = None if best is None else best[0]
        return None if figure is None or reference is None else figure <= target.at_most * reference + target.more

    def verdicts(self) -> list[bool | None]:
        """Returns `meets` for each target of each row."""
        return [self.meets(row, target) for row in self.rows for target in row.targets]

    def summary(self) -> str:
        """Returns a sentence with the numbers of targets that are met, missed and not checked."""
        verdicts = self.verdicts()
        if not verdicts:
            return "No targets."
        counts = [f"{verdicts.count(verdict)} {word}" for verdict, word in _VERDICTS.items()]
        return f"{len(verdicts)} targets: {', '.join(counts)}."

    def spread(self) -> float | None:
        """Returns the typical spread of the samples of a cell; None if no cell has enough of them.

        It is the interquartile range divided by the median, of which the median over all cells is taken.
        """
        cells = [cell for cell in self.cells.values() if cell.quartiles and cell.median]
        shares = [(cell.quartiles[1] - cell.quartiles[0]) / cell.median for cell in cells]
        return statistics.median(shares) if shares else None

    def as_json(self) -> dict[str, Any]:
        """Returns all figures and their quartiles, in seconds or the unit of the row, for JSON."""
        return {
            "title": self.title,
            "environment": dict(self.environment),
            "rows": [
                {
                    "name": row.name,
                    "title": row.title,
                    "unit": row.unit,
                    "cells": {column: _cell_json(self.cell(row, column)) for column in self.columns},
                    "targets": [{"target": _target_text(t, row.unit), "met": self.meets(row, t)} for t in row.targets],
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
            targets = "\n".join(_target_text(target, row.unit) for target in row.targets)
            verdicts = Text("\n").join(_verdict_text(self.meets(row, target)) for target in row.targets)
            grid.add_row(Text(row.title), *figures, targets, verdicts)
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
        figure = _quantity(cell.median, row.unit)
        if column == self.columns[0] or row.unit != "s" or not ours:
            return figure
        return f"{figure} {_digits(cell.median / ours):>5}×"


_VERDICTS = {True: "met", False: "missed", None: "not checked"}
_STYLES = {True: "green", False: "bold red", None: "yellow"}


def _verdict_text(verdict: bool | None) -> Text:
    return Text(_VERDICTS[verdict], _STYLES[verdict])


def _cell_json(cell: Cell) -> dict[str, Any]:
    if cell.median is None:
        return {"problem": cell.problem}
    return {"median": cell.median, "quartiles": cell.quartiles, "samples": len(cell.samples)}


def _target_text(target: Target, unit: str) -> str:
    if not target.of:
        return "≤ {:g} {}".format(*_scaled(target.at_most, unit))
    more = " + {:g} {}".format(*_scaled(target.more, unit)) if target.more else ""
    return f"≤ {target.at_most:g} × {target.of}{more}"


def _quantity(value: float, unit: str) -> str:
    """Returns a value with three digits and a unit of suitable size."""
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
    """Returns a number rounded to three digits (99.95 to 100), never with an exponent."""
    return f"{number:.{0 if number >= 99.95 else 1 if number >= 9.995 else 2}f}"


def report(table: Table, directory: Path, name: str) -> None:
    """Prints a table and saves it as ``name.txt`` and ``name.json``."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # the encoding of redirected output may lack ≤ and ×
    Console(width=PAGE_WIDTH).print(table)
    page = io.StringIO()
    Console(file=page, width=PAGE_WIDTH, no_color=True, force_terminal=False).print(table)
    text = "\n".join(line.rstrip() for line in page.getvalue().splitlines())
    directory.mkdir(parents=True, exist_ok=True)
    (directory / f"{name}.txt").write_text(f"{text}\n", "utf-8")
    (directory / f"{name}.json").write_text(json.dumps(table.as_json(), indent=1, ensure_ascii=False) + "\n", "utf-8")


def run(name: str, description: str, measure: Callable[[Effort], Table], full: Effort, quick: Effort) -> None:
    """Runs the program of a table: reads the command line, measures, prints and saves."""
    options = arguments(name, description)
    report(measure(quick if options.quick else full), options.out, labelled(name, options.label))


def arguments(name: str, description: str, argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Returns the options of the command line: ``quick``, ``out`` and ``label``."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="few rounds: a check that it runs, no figures to quote")
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="DIR", help="the directory of the results")
    parser.add_argument("--label", metavar="LABEL", help=f"save as {name}-LABEL; names the kind of machine")
    return parser.parse_args(argv)


def labelled(name: str, label: str | None) -> str:
    """Returns the name of a table's files, without their endings."""
    return f"{name}-{label}" if label else name


if __name__ == "__main__":
    run_worker(sys.argv[1], float(sys.argv[2]))
