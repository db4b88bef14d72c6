"""Programs in processes of their own: new ones, and forks of one process that has imported the library.

All of them run in the root folder of the project, with only those of the SHARDTENSOR variables that are given.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from types import CodeType

from tests import draws

ROOT = Path(__file__).parents[1]

VARIABLES = {"SHARDTENSOR_NUM_DEVICES": "8", "SHARDTENSOR_BACKEND": "numpy"}
"""The variables of most programs."""

Ended = subprocess.CompletedProcess[str]
"""How a program has ended: its status, output and errors."""

WITHOUT_PLUGINS = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
"""A variable of programs that run pytest: the plugins of libraries that happen to be installed import these libraries."""

LAPTOP = "import os; os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])\n"
"""The beginning of a script that has two cores, and so two devices if it does not set their number."""

OPTIONS = ("-X", "faulthandler", "-W", "error")


def run_script(text: str, *arguments: str, stdin: str = "", seconds: float = 60, **variables: str) -> Ended:
    """Runs a script; warnings are errors in it.

    Its process has imported NumPy and the library in the fast tier, and nothing in the full tier; `new_process` serves
    scripts about imports, and those with variables that Python or NumPy reads.

    Args:
        text: the script.
        arguments: its arguments.
        stdin: its input.
        seconds: the time after which it is killed, which is an error.
        variables: the SHARDTENSOR variables that it has, and changes of others.
    """
    if draws.all_of_them:
        return new_process(*OPTIONS, "-c", text, *arguments, stdin=stdin, seconds=seconds, **variables)
    return _server().run([text, arguments, _environment(variables)], stdin, seconds)


def new_process(
    *command: str, stdin: str | bytes = "", seconds: float = 300, cwd: Path = ROOT, **variables: str
) -> Ended:
    """Runs Python with a command line in a new process, which has these variables."""
    done = subprocess.run(
        [sys.executable, *command], input=stdin if isinstance(stdin, bytes) else stdin.encode(), cwd=cwd,
        env=_environment(variables), capture_output=True, timeout=seconds, check=False,
    )  # fmt: skip
    return Ended(command, done.returncode, done.stdout.decode(), done.stderr.decode())


def output_of(ended: Ended) -> str:
    """Returns the output of a program that must have succeeded."""
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def close() -> None:
    """Ends the process that forks for scripts; without this call it ends when this process does."""
    if _server.cache_info().currsize:
        _server().close()
        _server.cache_clear()


def _environment(variables: dict[str, str]) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SHARDTENSOR_")}
    return kept | {"PYTHONIOENCODING": "utf-8"} | variables


class _Server:
    """A process whose children run scripts. It ends when its socket is closed."""

    def __init__(self) -> None:
        self.socket, theirs = socket.socketpair()
        with theirs:
            code = f"exec(__import__('tests.scripts').scripts._serve({theirs.fileno()}))"  # It leaves no other names.
            self.process = subprocess.Popen(
                [sys.executable, *OPTIONS, "-c", code], env=_environment({}), cwd=ROOT, pass_fds=[theirs.fileno()]
            )

    def run(self, given: list[object], stdin: str, seconds: float) -> Ended:
        with contextlib.ExitStack() as stack:
            files = [stack.enter_context(tempfile.TemporaryFile("w+", encoding="utf-8")) for _ in range(4)]
            for file, content in zip(files, (json.dumps(given), stdin), strict=False):
                file.write(content)
                file.seek(0)
            socket.send_fds(self.socket, [b"x"], [file.fileno() for file in files])
            child, code = self.number(60), None
            try:
                code = self.number(seconds)
            finally:
                if code is None:
                    os.kill(child, signal.SIGKILL)
                    self.number(60)
            for file in files:
                file.seek(0)
            return Ended(given, code, files[2].read(), files[3].read())

    def number(self, seconds: float) -> int:
        """Returns the next number that the process sends: of a child, or the status with which it ended."""
        if not select.select([self.socket], [], [], seconds)[0]:
            raise TimeoutError(f"a script has not ended within {seconds} s")
        sent = b""
        while not sent.endswith(b"\n"):
            if not (more := self.socket.recv(1)):
                raise ChildProcessError("the process that forks for scripts has ended")
            sent += more
        return int(sent)

    def close(self) -> None:
        self.socket.close()
        self.process.wait(60)


_server = functools.cache(_Server)


def _serve(number: int) -> CodeType:
    """Forks for each script; in the child, which ends as any other process does, returns the script's code.

    The objects of the library are frozen, which makes the end cheaper; scripts about the end call ``gc.unfreeze``.
    """
    import shardtensor as st

    for name in st.__all__:
        getattr(st, name)  # Modules that are imported on first use.
    asked = socket.socket(fileno=number)
    gc.collect()
    gc.freeze()
    while files := socket.recv_fds(asked, 1, 4)[1]:
        if child := os.fork():
            asked.send(b"%d\n" % child)
            for file in files:
                os.close(file)
            asked.send(b"%d\n" % os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
            continue
        asked.close()
        for own, file in enumerate(files[1:]):
            os.dup2(file, own)
            os.close(file)
        with open(files[0], encoding="utf-8") as file:
            text, sys.argv[1:], environment = json.load(file)
        os.environ.clear()
        os.environ.update(environment)
        return compile(text, "<string>", "exec", dont_inherit=True)
    asked.close()
    sys.exit()
