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
import dataclasses
import functools
import itertools
import json
import math
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, TypeAlias, TypeVar

import machine
import peers
from peers import MISSING, PeerError
from tables import NOT_APPLICABLE, Cell, Cells, Table

Case = Callable[[], Any]
"""A call to measure. When it returns, the work is done, not merely queued."""
Sampler = Callable[[], float]
"""A function that measures once and returns the result. It may raise `NotMeasured`."""
Key = TypeVar("Key", bound=Hashable)
Effort = TypeVar("Effort")

PROJECT, NUMPY, JAX_8, JAX_2 = "shardtensor", "NumPy", "JAX (8)", "JAX (2)"
DEVICES = 8

RESULTS = Path(__file__).parent / "results"

WARM_UP = 0.2
"""The seconds after which idle cores are awake, and the threads of other processes' BLAS and OpenMP no longer spin."""

ANSWER_LIMIT = 120.0
"""The seconds after which a worker that has not answered is killed."""

CLOSING_LIMIT = 5.0
"""The seconds in which a worker that has closed its output has to end."""

WORKER = Path(__file__).with_name("worker.py")

AGAINST = "SHARDTENSOR_BENCHMARKS_AGAINST"
"""The environment variable with the path of a checkout of another commit, which `run.py` makes for ``--against``."""

NOT_IDLE = "THE MACHINE WAS NOT IDLE"

_OTHERS = machine.OtherProcesses()  # from here on: a script imports this module when it starts


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

    def sample(self, case: str, limit: float = ANSWER_LIMIT) -> float:
        """Returns the seconds per call of a case, over as many calls as take 5 ms (`worker.SAMPLE_SECONDS`).

        Raises:
            NotMeasured: as in `call`; the limit is for all of these calls, and those before that warm up.
        """
        return float(self._request("sample", case, limit))

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
    """Starts a worker for each column; a context manager that ends all of them on exit.

    With the environment variable `AGAINST`, there is one more column: the cases of the first one with the shardtensor
    of another commit.
    """
    columns = dict(columns)
    if before := os.environ.get(AGAINST):
        package, cases, environment = next(iter(columns.values()))
        path = os.pathsep.join((before, os.path.join(before, "backends")))
        columns[earlier(before)] = (package, cases, {**environment, "PYTHONPATH": path})
    with contextlib.ExitStack() as stack:
        yield {column: stack.enter_context(Worker(*library, warm_up)) for column, library in columns.items()}


def earlier(checkout: str) -> str:
    """Returns the title of the column of the shardtensor in a checkout, whose folder has the name of its commit."""
    return f"at {Path(checkout).name}"


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


LEAST_ROUNDS = 5
"""The rounds that are made however long they take."""


def interleave(
    samplers: Mapping[Key, Sampler], rounds: int, description: str, seconds: float = math.inf
) -> dict[Key, Cell]:
    """Calls every sampler once per round, in a new order each time, so that noise affects all of them alike.

    A sampler that raises `NotMeasured` is not called again; its cell has the problem. A run that is interrupted after
    the first round ends there: its cells have the samples until then.

    Args:
        samplers: the samplers by the keys of their cells.
        rounds: the number of rounds.
        description: the label of the progress bar.
        seconds: the time after which no round begins, except the first `LEAST_ROUNDS`.
    """
    end = time.monotonic() + seconds
    samples: dict[Key, list[float]] = {key: [] for key in samplers}
    problems: dict[Key, str] = {}
    shuffle = random.Random(0).shuffle
    from pages import track  # here, because pages needs Rich, which the Python of the peers may lack

    for done in track(rounds, description):
        if done >= LEAST_ROUNDS and time.monotonic() > end:
            break
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


def sample_cases(
    names: Iterable[str],
    workers: Mapping[str, Worker],
    rounds: int,
    description: str,
    limit: float = ANSWER_LIMIT,
    seconds: float = math.inf,
) -> Cells:
    """Samples the named cases in all workers, interleaved, and returns their cells; a case has the name of its row.

    A case whose sample takes more than ``limit`` seconds has no figure; its process is started again for the others.
    ``seconds``: see `interleave`.
    """

    def sample(name: str, worker: Worker) -> float:
        try:
            return worker.sample(name, limit)
        except NotMeasured:
            if limit < ANSWER_LIMIT:
                worker.restart()
            raise

    pairs = itertools.product(names, workers)
    return interleave(
        {(n, c): functools.partial(sample, n, workers[c]) for n, c in pairs}, rounds, description, seconds
    )


def call_once(worker: Worker, column: str, case: str, rows: Iterable[str], limit: float = ANSWER_LIMIT) -> Cells:
    """Calls a case once and returns the cells of several rows: the case returns their figures by name."""
    try:
        figures = worker.call(case, limit)
    except NotMeasured as reason:
        return {(row, column): Cell(problem=str(reason)) for row in rows}
    return {(row, column): Cell(() if figures[row] is None else (figures[row],)) for row in rows}


# -- the program of a table ---------------------------------------------------------------------------


def report(table: Table, directory: Path, name: str) -> None:
    """Prints a table and saves it as ``name.txt`` and ``name.json``, when the workers have ended."""
    from pages import page, show  # here, because pages needs Rich, which the Python of the peers may lack

    others = str(_OTHERS) if _OTHERS.is_idle() else f"{_OTHERS}: {NOT_IDLE}"
    facts = {**table.environment, "other processes": others}
    if before := os.environ.get(AGAINST):
        facts["against"] = Path(before).name
        table = table.with_earlier(earlier(before))
    table = dataclasses.replace(table, environment=facts)
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
    """Returns the options; a Python of the peers that cannot be run is an error of the command line.

    From here on, SIGTERM ends the program as an exception does, so that the workers end with it.
    """
    options = parser.parse_args(argv)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
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
