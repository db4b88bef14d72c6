"""Scripts in processes of their own. In the fast tier they are forks of one process that has imported the library."""

from __future__ import annotations

import contextlib
import functools
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import draws

ROOT = Path(__file__).parents[1]

VARIABLES = {"SHARDTENSOR_NUM_DEVICES": "8", "SHARDTENSOR_BACKEND": "numpy", "PYTHONWARNINGS": "error"}
"""The environment of most scripts."""

SERVER = """
import gc, os, socket, sys
import numpy as np
import shardtensor as st
for name in st.__all__:
    getattr(st, name)  # Modules that are imported on first use.
asked = socket.socket(fileno=int(sys.argv[1]))
gc.collect()
gc.freeze()
text = None
while text is None and (files := socket.recv_fds(asked, 1, 4)[1]):
    if child := os.fork():
        asked.send(b"%d\\n" % child)
        asked.send(b"%d\\n" % os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    else:
        asked.close()
        for number, file in enumerate(files[1:]):
            os.dup2(file, number)
        text = open(files[0], closefd=False).read()
    for file in files:
        os.close(file)
if text is not None:
    del asked, child, file, files, name, number
    exec(compile(text, "<string>", "exec"))
"""
"""Forks for each script; the child has the script's files as its input, output and errors, and ends as any other process.

The objects of the library are frozen, which makes the end cheaper; scripts about the end call ``gc.unfreeze``.
"""


class Server:
    """A process whose children run scripts."""

    def __init__(self, variables: tuple[tuple[str, str], ...]) -> None:
        self.socket, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-X", "faulthandler", "-c", SERVER, str(theirs.fileno())],
                env={**os.environ, **dict(variables)}, cwd=ROOT, pass_fds=[theirs.fileno()],
            )  # fmt: skip

    def run(self, text: str, stdin: str, seconds: float) -> subprocess.CompletedProcess[str]:
        with contextlib.ExitStack() as stack:
            files = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(4)]
            for file, content in zip(files, (text, stdin), strict=False):
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
            return subprocess.CompletedProcess([text], code, files[2].read(), files[3].read())

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


@functools.cache
def server(*variables: tuple[str, str]) -> Server:
    made = Server(variables)
    servers.append(made)
    return made


servers: list[Server] = []


@pytest.fixture(scope="session", autouse=True)
def close_servers() -> Iterator[None]:
    """Ends the processes that fork for scripts; modules of tests with scripts import this fixture."""
    yield
    while servers:
        servers.pop().close()
    server.cache_clear()


def run_script(text: str, stdin: str = "", seconds: float = 60, **variables: str) -> Any:
    """Runs a script with these variables in its environment, and returns its status, output and errors.

    The process has imported NumPy and the library in the fast tier, and nothing in the full tier.
    """
    if not draws.all_of_them and hasattr(os, "fork"):
        return server(*sorted(variables.items())).run(text, stdin, seconds)
    return subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", text], input=stdin, env={**os.environ, **variables}, cwd=ROOT,
        capture_output=True, text=True, timeout=seconds, check=False,
    )  # fmt: skip
