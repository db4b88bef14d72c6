"""The part that all benchmarks share: worker processes, interleaved rounds, and tables of the results.

Each library is measured in a process of its own (`Worker`), because environment variables and the number of JAX's
devices are fixed when a process starts, and because the peers may need another Python (`peers`). The workers of all
libraries exist at the same time, and `interleave` samples them in turn, so that other load on the machine affects all
of them alike.

The scripts that import this module define the rows of their tables and the cases that are measured. The workers of
peers import them, too: here and at the top of a script with their cases, only modules of Python and of this folder are
imported.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import functools
import importlib.metadata
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
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeAlias, TypeVar

import peers
from peers import MISSING, PeerError

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

WARM_UP = 0.2
"""The seconds after which idle cores are awake, and the threads of other processes' BLAS and OpenMP no longer spin."""

ANSWER_LIMIT = 120.0
"""The seconds after which a worker that has not answered is killed."""

CLOSING_LIMIT = 5.0
"""The seconds in which a worker that has closed its output has to end."""

WORKER = Path(__file__).with_name("worker.py")


class NotMeasured(Exception):
    """A cell could not be measured; the message is the reason, which the table shows instead of a figure."""


# -- processes -------------------------------------------------------------------------------------


class Worker:
    """A process that measures the cases of one library; a context manager that ends the process on exit.

    If the library is not installed, or the process has ended, every request raises `NotMeasured` with the reason. What
    the process printed before is then printed here.

    Args:
        package: the package that the cases need; a peer's process is on the Python of the peers.
        cases: ``module:function`` of this folder; the process calls the function, which returns the cases by name.
        environment: environment variables for the process.
        warm_up: the seconds for which a case runs before it is sampled.

    Attributes:
        cases: the names of the cases.
    """

    def __init__(
        self, package: str, cases: str, environment: Mapping[str, str] | None = None, warm_up: float = 0.0
    ) -> None:
        self._package, self._maker, self._warm_up = package, cases, warm_up
        self._changes = dict(environment or {})
        self._start()

    def _start(self) -> None:
        self.cases: tuple[str, ...] = ()
        self._problem = ""
        self._closing = contextlib.ExitStack()
        try:
            self._start_on(peers.of(self._package))
            names = self._answer(ANSWER_LIMIT)
        except PeerError as error:
            self._failure("no Python", str(error))
        except NotMeasured:
            return  # _problem has the reason, and every request raises it again
        else:
            self._problem = MISSING if names is None else ""
            self.cases = tuple(names or ())

    def _start_on(self, path: str) -> None:
        arguments = [str(WORKER), self._package, self._maker, str(self._warm_up)]
        environment = peers.environment(path, PYTHONIOENCODING="utf-8", **self._changes)
        with contextlib.ExitStack() as stack:
            self._errors: IO[bytes] = stack.enter_context(tempfile.TemporaryFile())
            self._process = stack.enter_context(peers.start(path, arguments, environment, self._errors.fileno()))
            stack.callback(peers.kill, self._process)
            self._closing = stack.pop_all()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.close()

    def restart(self) -> None:
        """Starts the process again if it has ended: programs on JAX's virtual devices deadlock at times."""
        if self._problem not in ("", MISSING):
            self._closing.close()
            self._start()

    def sample(self, case: str) -> float:
        """Returns the seconds per call of a case, over as many calls as take 5 ms (`worker.SAMPLE_SECONDS`)."""
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
        if case not in self.cases:
            raise NotMeasured(NOT_APPLICABLE)
        with contextlib.suppress(BrokenPipeError):  # the process has ended: _answer finds no line and reports why
            self._process.stdin.write(json.dumps([verb, case]).encode() + b"\n")
            self._process.stdin.flush()
        return self._answer(limit)

    def _answer(self, limit: float) -> Any:
        expired = threading.Event()

        def stop() -> None:
            expired.set()
            peers.kill(self._process)

        watchdog = threading.Timer(limit, stop)
        watchdog.start()
        try:
            line = self._process.stdout.readline()
        finally:
            watchdog.cancel()
        if expired.is_set():
            raise self._failure(f"none in {limit:.0f} s")
        if not line:
            raise self._failure(self._exit_reason(), self._printed())
        try:
            return json.loads(line)
        except ValueError:
            peers.kill(self._process)
            raise self._failure("failed", f"it answered {line[:200]!r} instead of JSON") from None

    def _failure(self, problem: str, details: str = "") -> NotMeasured:
        """Returns the exception that this request and all later ones raise, and prints its details."""
        self._problem = problem
        if details:
            print(f"{self._package} ({self._maker}): {details}", file=sys.stderr)
        return NotMeasured(problem)

    def _exit_reason(self) -> str:
        """Returns how the process ended, of which nothing can be read any more."""
        try:
            status = self._process.wait(CLOSING_LIMIT)
        except subprocess.TimeoutExpired:
            peers.kill(self._process)
            return "failed"
        if status < 0:
            return "aborted" if status == -signal.SIGABRT else f"killed by {signal.Signals(-status).name}"
        return "failed"

    def _printed(self) -> str:
        """Returns the end of what the process printed: after an exception, its traceback."""
        self._errors.seek(0)
        return self._errors.read().decode(errors="replace")[-10_000:]


Library: TypeAlias = tuple[str, str, Mapping[str, str]]
"""The first arguments of `Worker`: the package, ``module:function`` of the cases, and environment variables."""


@contextlib.contextmanager
def start_workers(columns: Mapping[str, Library], warm_up: float = 0.0) -> Iterator[dict[str, Worker]]:
    """Starts a worker for each column; a context manager that ends all of them on exit."""
    with contextlib.ExitStack() as stack:
        yield {column: stack.enter_context(Worker(*library, warm_up)) for column, library in columns.items()}


def start_group(
    module: str, columns: Mapping[str, Library], variable: str, group: str
) -> contextlib.AbstractContextManager[dict[str, Worker]]:
    """Starts a worker for each column, with the cases of a group of rows; a context manager that ends them.

    Args:
        module: the module of this folder that has the cases.
        columns: as in `start_workers`, but with the function of the module only.
        variable: the environment variable by which the module knows the group.
        group: the group.
    """
    return start_workers(
        {
            column: (package, f"{module}:{cases}", {**environment, variable: group})
            for column, (package, cases, environment) in columns.items()
        },
        0.05,
    )


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


def import_seconds(package: str, bytecode: str) -> float:
    """Returns the seconds that ``import package`` takes in a new process, without the start of Python itself.

    Args:
        package: the name of the package.
        bytecode: a folder for compiled modules, which the first import fills. Without it, a library whose installer
            did not compile it might be compiled in each process.
    """
    # -P removes the current folder from the search path: an installed program does not have it there either.
    code = f"import time; t = time.perf_counter(); import {package}; print(time.perf_counter() - t)"
    changes = {"PYTHONPYCACHEPREFIX": bytecode, "PYTHONDONTWRITEBYTECODE": ""}
    try:
        if not peers.is_installed(package):
            raise NotMeasured(MISSING)
        return float(peers.run(peers.of(package), ["-P", "-c", code], limit=ANSWER_LIMIT, **changes))
    except PeerError as error:
        print(f"import {package}: {error}", file=sys.stderr)
        raise NotMeasured("failed") from error


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
    from pages import track  # here, because pages needs Rich, which the Python of the peers may lack

    for _ in track(rounds, description):
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
            print("interrupted: the samples until here are reported", file=sys.stderr)
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
    """Returns the facts on which figures depend: the kind of machine (not its name), the date, and the versions of
    Python and of packages: those that run on this Python, and then the peers, with the NumPy that they use.
    """
    packages = tuple(packages)
    ours = [name for name in packages if name not in peers.LIBRARIES]
    return {
        "CPU": f"{_cpu_model()}, {usable_cores()} cores usable",
        "memory": _memory(),
        "Python": platform.python_version(),
        **{name: _version(name) for name in ours},
        **_peers_versions(tuple([name for name in packages if name not in ours])),
        "date": datetime.date.today().isoformat(),
    }


def _peers_versions(names: tuple[str, ...]) -> dict[str, str]:
    """Returns the versions of peers, and of their Python and NumPy; ``unknown`` if their Python cannot be run."""
    if not names:
        return {}
    try:
        found = peers.versions(peers.python(), (*names, "numpy"))
    except PeerError as error:
        print(error, file=sys.stderr)
        found = dict.fromkeys((*names, "Python", "numpy"), "unknown")
    return {"peers' Python": found["Python"], "peers' numpy": found["numpy"]} | {name: found[name] for name in names}


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return MISSING


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
        counts = [f"{verdicts.count(verdict)} {word}" for verdict, word in VERDICTS.items()]
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
                    "targets": [{"target": target_text(t, row.unit), "met": self.meets(row, t)} for t in row.targets],
                }
                for row in self.rows
            ],
            "spread": self.spread(),
            "summary": self.summary(),
        }


VERDICTS = {True: "met", False: "missed", None: "not checked"}


def _cell_json(cell: Cell) -> dict[str, Any]:
    if cell.median is None:
        return {"problem": cell.problem}
    return {"median": cell.median, "quartiles": cell.quartiles, "samples": len(cell.samples)}


def target_text(target: Target, unit: str) -> str:
    """Returns the text of a target for a row with figures of this unit."""
    if not target.of:
        return "≤ {:g} {}".format(*_scaled(target.at_most, unit))
    more = " + {:g} {}".format(*_scaled(target.more, unit)) if target.more else ""
    return f"≤ {target.at_most:g} × {target.of}{more}"


def quantity(value: float, unit: str) -> str:
    """Returns a value with three digits and a unit of suitable size."""
    number, unit = _scaled(value, unit)
    return f"{digits(number)} {unit}"


def _scaled(value: float, unit: str) -> tuple[float, str]:
    if unit != "s":
        return value, unit
    for scale, name in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns")):
        if value >= scale:
            return value / scale, name
    return value / 1e-12, "ps"


def digits(number: float) -> str:
    """Returns a number rounded to three digits (99.95 to 100), never with an exponent."""
    return f"{number:.{0 if number >= 99.95 else 1 if number >= 9.995 else 2}f}"


def report(table: Table, directory: Path, name: str) -> None:
    """Prints a table and saves it as ``name.txt`` and ``name.json``."""
    from pages import page, show  # here, because pages needs Rich, which the Python of the peers may lack

    show(table)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / f"{name}.txt").write_text(page(table), "utf-8")
    (directory / f"{name}.json").write_text(json.dumps(table.as_json(), indent=1, ensure_ascii=False) + "\n", "utf-8")


def run(name: str, description: str, measure: Callable[[Effort], Table], full: Effort, quick: Effort) -> None:
    """Runs the program of a table: reads the command line, measures, prints and saves."""
    options = arguments(name, description)
    report(measure(quick if options.quick else full), options.out, labelled(name, options.label))


def arguments(name: str, description: str, argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Returns the options of the command line: ``quick``, ``out``, ``label`` and ``peer_python``."""
    return parse(make_parser(name, description), argv)


def make_parser(name: str, description: str) -> argparse.ArgumentParser:
    """Returns a parser of the options that all benchmarks have, to which others can be added; see `parse`."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="few rounds: a check that it runs, no figures to quote")
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="DIR", help="the directory of the results")
    parser.add_argument("--label", metavar="LABEL", help=f"save as {name}-LABEL; names the kind of machine")
    parser.add_argument(
        peers.OPTION, metavar="PATH", help=f"the Python of the peers (default: ${peers.VARIABLE}, or this Python)"
    )
    return parser


def parse(parser: argparse.ArgumentParser, argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Returns the options; a Python of the peers that cannot be run is an error of the command line."""
    options = parser.parse_args(argv)
    if options.peer_python is not None:
        os.environ[peers.VARIABLE] = options.peer_python  # for all processes that are started from here
    if os.environ.get(peers.VARIABLE):
        try:
            peers.versions(peers.python(), ())
        except PeerError as error:
            parser.error(str(error))
    return options


def labelled(name: str, label: str | None) -> str:
    """Returns the name of a table's files, without their endings."""
    return f"{name}-{label}" if label else name
