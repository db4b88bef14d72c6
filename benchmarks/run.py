"""Runs every benchmark, each in a process of its own, and writes the page of all figures (`report`).

``python benchmarks/run.py [TABLE ...] [--again] [--against COMMIT] [--quick] [--out DIR] [--peer-python PATH]``. Tables
that have been measured at this commit are not measured again, so that a run that was stopped goes on where it was.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import harness
import machine
import peers
import report

LIMIT = 20 * 60.0
"""The seconds after which a benchmark is stopped; none of its figures are kept then."""

STOPPING_SECONDS = 30.0
"""The seconds in which a benchmark has to end its workers."""

IDLE_SECONDS = 3.0
"""The seconds during which other processes are observed before a benchmark starts."""


@dataclass(frozen=True)
class Benchmark:
    """A script of this folder.

    Attributes:
        name: the name of the script, without its ending.
        tables: the names of the tables that it writes.
    """

    name: str
    tables: tuple[str, ...]


BENCHMARKS = (
    Benchmark("cpu", ("cpu",)),
    Benchmark("jit", ("jit", "jit_numpy")),
    Benchmark("distributed", ("distributed",)),
    Benchmark("collectives", ("collectives",)),
    Benchmark("processes", ("processes",)),
    Benchmark("training", ("training", "training_one")),
    Benchmark("gradients", ("gradients", "gradients_eager")),
    Benchmark("checkpoint", ("checkpoint",)),
    Benchmark("functions", ("functions",)),
    Benchmark("random_numbers", ("random_numbers",)),
    Benchmark("writes", ("writes",)),
    Benchmark("overhead", ("overhead",)),
    Benchmark("tiny_functions", ("tiny_functions",)),
    Benchmark("slower", ("slower",)),
    Benchmark("scaling", ("growth", "scaling")),
)
"""All benchmarks for machines without a GPU."""

TABLES = tuple([name for benchmark in BENCHMARKS for name in benchmark.tables])


def is_measured(benchmark: Benchmark, folder: Path, commit: str, against: str | None) -> bool:
    """Whether a folder has all tables of a benchmark, of this commit and, if given, beside an earlier one."""
    for name in benchmark.tables:
        try:
            table = json.loads((folder / f"{name}.json").read_text("utf-8"))
        except (OSError, ValueError):
            return False
        if table["environment"].get("commit") != commit or (against and table["environment"].get("against") != against):
            return False
    return True


def measure(benchmark: Benchmark, arguments: Sequence[str]) -> str:
    """Runs a benchmark.

    Returns:
        The reason why it has no figures, or the empty string.
    """
    script = Path(__file__).parent / f"{benchmark.name}.py"
    with subprocess.Popen([sys.executable, str(script), *arguments], start_new_session=True) as process:
        try:
            status = process.wait(LIMIT)
        except subprocess.TimeoutExpired:
            return f"stopped after {LIMIT / 60:.0f} minutes"
        finally:
            stop(process)  # also when this program is interrupted
    return f"ended with the status {status}" if status else ""


def stop(process: subprocess.Popen[bytes]) -> None:
    """Ends a benchmark that has not ended, with its workers, which are sessions of their own."""
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOPPING_SECONDS)
        peers.kill(process)


@contextlib.contextmanager
def checkout(commit: str | None) -> Iterator[str | None]:
    """Checks a commit out into a folder whose name is its hash; a context manager that removes it.

    The benchmarks find it by the environment variable `harness.AGAINST`.

    Raises:
        subprocess.CalledProcessError: there is no such commit.
    """
    if commit is None:
        yield None
        return
    name = machine.git("rev-parse", "--short=8", "--verify", f"{commit}^{{commit}}")
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, name)
        machine.git("worktree", "add", "--detach", path, name)
        os.environ[harness.AGAINST] = path
        try:
            yield name
        finally:
            del os.environ[harness.AGAINST]
            machine.git("worktree", "remove", "--force", path)


def warn_unless_idle() -> None:
    """Prints a warning if other processes use more of the machine than `machine.IDLE`."""
    others = machine.OtherProcesses()
    time.sleep(IDLE_SECONDS)
    if not others.is_idle():
        print(f"the machine is not idle: other processes use {others}", file=sys.stderr)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Returns the options of the command line."""
    names = [benchmark.name for benchmark in BENCHMARKS]
    parser = harness.make_parser("every benchmark", "Runs every benchmark, and writes the page of all figures.")
    parser.add_argument("names", nargs="*", metavar="TABLE", help=f"only these: {', '.join(names)}")
    parser.add_argument("--again", action="store_true", help="also what has been measured at this commit")
    parser.add_argument(
        "--against", metavar="COMMIT", help="measure the shardtensor of an earlier commit beside this one"
    )
    options = harness.parse(parser, argv)
    if unknown := [name for name in options.names if name not in names]:
        parser.error(f"there is no benchmark {unknown[0]!r}; there are {', '.join(names)}")
    if options.label:
        parser.error("--label is an option of the single benchmarks; use --out DIR")
    if options.quick and options.out == harness.RESULTS:
        parser.error("figures of few rounds are not kept as results: give --out DIR with --quick")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program; returns the exit status: 1 if a benchmark has no figures."""
    options = parse(argv)
    selected = [benchmark for benchmark in BENCHMARKS if not options.names or benchmark.name in options.names]
    arguments = ["--out", str(options.out), *(["--quick"] if options.quick else [])]
    problems = {}
    with checkout(options.against) as against:
        for number, benchmark in enumerate(selected, 1):
            label = f"{benchmark.name} ({number} of {len(selected)})"
            if not options.again and is_measured(benchmark, options.out, machine.commit(), against):
                print(f"{label}: measured already", file=sys.stderr)
                continue
            warn_unless_idle()
            begin = time.monotonic()
            problem = measure(benchmark, arguments)
            print(f"{label}: {problem or 'measured'}, {time.monotonic() - begin:.0f} s", file=sys.stderr)
            if problem:
                problems[benchmark.name] = problem
            report.write(options.out, TABLES)
    report.write(options.out, TABLES)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
