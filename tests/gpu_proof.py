"""Runs everything that needs a GPU, and keeps what it prints and measures.

    python -m tests.gpu_proof [--out DIR] [--minutes 25] [--only NAME,NAME]

The steps run one after the other, in the order in which their results matter, and a step that fails or takes too long
does not stop the others. DIR has the output of each step in NAME.log, the results of the benchmark, and ``summary.txt``,
which is written again after each step. The exit status is 0 if all steps succeeded.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]

SECONDS_TO_END = 20
"""How long an interrupted step may take to print what it has found, before it is killed."""


class Step(NamedTuple):
    """A program of the proof.

    Attributes:
        name: the name of the step and of its log.
        arguments: those of Python.
        minutes: how long it may run.
        variables: further environment variables.
    """

    name: str
    arguments: Sequence[str]
    minutes: float
    variables: tuple[tuple[str, str], ...] = ()


def steps(out: Path) -> list[Step]:
    """Returns all steps; benchmarks write their results to a directory."""
    pytest = ["-m", "pytest", "-m", "gpu", "-v", "--tb=short", "-p", "no:cacheprovider"]
    pytest += ["-p", "no:benchmark"]  # pytest-benchmark, where it is installed, warns beside pytest-xdist.
    if importlib.util.find_spec("xdist"):
        pytest += ["-n", str(min(os.cpu_count() or 1, 8))]  # Compiling kernels takes most of the time.
    benchmark = ["benchmarks/gpu.py", "--out", str(out)]
    return [
        Step("info", ["-m", "shardtensor", "info"], 1),
        Step("demo", ["-m", "shardtensor", "demo", "--backend", "cupy"], 2, (("SHARDTENSOR_NUM_DEVICES", "8"),)),
        Step("quick", [*benchmark, "--quick", "--label", "quick"], 4),
        Step("tests", [*pytest, "tests/backends/test_gpu.py", "tests/interpreters/jit"], 10),
        Step("memory", ["-m", "tests.gpu_memory"], 4),
        Step("benchmark", benchmark, 8),
    ]


def run(step: Step, out: Path, seconds: float) -> str:
    """Runs a step for so many seconds at most, and returns how it ended."""
    environment = os.environ | {"PYTHONUNBUFFERED": "1", "COLUMNS": "160"} | dict(step.variables)
    with (out / f"{step.name}.log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, *step.arguments],
            cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
        try:
            status = process.wait(seconds)
        except subprocess.TimeoutExpired:
            os.kill(process.pid, signal.SIGINT)  # pytest then prints the failures up to here.
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(SECONDS_TO_END)
            return "took too long"
        finally:
            _kill_group(process)
    return "succeeded" if status == 0 else f"exit status {status}"


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """Ends a program and those that it started, if there are any left."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()


def prove(todo: Sequence[Step], out: Path, minutes: float) -> bool:
    """Runs steps within a number of minutes, and writes the summary; returns whether all of them succeeded."""
    out.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + 60 * minutes
    lines: list[str] = []
    for step in todo:
        begin = time.monotonic()
        seconds = min(60 * step.minutes, end - begin)
        ended = run(step, out, seconds) if seconds > 0 else "not run: no time was left"
        lines.append(f"{step.name:<10} {time.monotonic() - begin:6.0f} s  {ended}")
        print(lines[-1], flush=True)
        (out / "summary.txt").write_text("\n".join(lines) + "\n")
    return all(line.endswith("succeeded") for line in lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program, and returns the exit status."""
    parser = argparse.ArgumentParser(description="Runs everything that needs a GPU.")
    parser.add_argument(
        "--out", type=Path, default=Path("gpu-proof"), metavar="DIR", help="the directory of the results"
    )
    parser.add_argument("--minutes", type=float, default=25, metavar="N", help="the time for all steps")
    parser.add_argument("--only", metavar="NAME,NAME", help="only these steps")
    options = parser.parse_args(argv)
    out = options.out.resolve()
    todo = steps(out)
    if options.only:
        names = options.only.split(",")
        if unknown := set(names) - {step.name for step in todo}:
            parser.error(f"--only: there is no step {sorted(unknown)}; the steps are {[step.name for step in todo]}")
        todo = [step for step in todo if step.name in names]
    return 0 if prove(todo, out, options.minutes) else 1


if __name__ == "__main__":
    sys.exit(main())
