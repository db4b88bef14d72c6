"""Runs programs in forks of one new process that has imported the library, and done nothing else.

Each of them finds the state of a process of its own, and their start takes milliseconds instead of tenths of a second.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, NamedTuple

ROOT = Path(__file__).parents[1]


class Program(NamedTuple):
    """A program.

    Attributes:
        code: its code.
        variables: all SHARDTENSOR variables that it has, and changes of others.
        arguments: what it finds in ``sys.argv``.
    """

    code: str
    variables: Mapping[str, str] = {}
    arguments: Sequence[str] = ("-c",)


class Ended(NamedTuple):
    """The exit status of a program, and what it has printed."""

    status: int
    out: str
    err: str


def run_each(programs: Sequence[Program], limit: float = 300) -> list[Ended]:
    """Runs programs one after the other, in the root folder of the project, and returns how they have ended."""
    command = [sys.executable, "-m", "tests.forks"]
    environ = {k: v for k, v in os.environ.items() if not k.startswith("SHARDTENSOR_")}
    done = subprocess.run(
        command,
        input=json.dumps(programs),
        cwd=ROOT,
        env=environ,
        capture_output=True,
        text=True,
        timeout=limit,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [Ended(*ended) for ended in json.loads(done.stdout)]


def _run(program: Program) -> Ended:
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        if (child := os.fork()) == 0:
            _be(program, out, err)
        _, status = os.waitpid(child, 0)
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode(program.variables.get("PYTHONIOENCODING", "utf-8")))
    return Ended(os.waitstatus_to_exitcode(status), *texts)


def _be(program: Program, out: IO[bytes], err: IO[bytes]) -> None:
    """Ends this process, a child, as the interpreter ends after a program."""
    os.environ.update(program.variables)
    sys.argv = list(program.arguments)
    encoding = program.variables.get("PYTHONIOENCODING", "utf-8")
    for file, number, name in ((out, 1, "stdout"), (err, 2, "stderr")):
        os.dup2(file.fileno(), number)
        setattr(sys, name, io.TextIOWrapper(open(number, "wb", closefd=False), encoding, line_buffering=number == 2))  # noqa: SIM115
    status = 0
    try:
        exec(compile(program.code, "<string>", "exec"), {"__name__": "__main__"})
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else bool(error.code)
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.exit(status)


def main() -> None:
    import shardtensor  # noqa: F401 - what the programs have in common

    given = [Program(*program) for program in json.load(sys.stdin)]
    sys.stdin.close()
    ended = [_run(program) for program in given]
    json.dump(ended, sys.stdout)


if __name__ == "__main__":
    main()
