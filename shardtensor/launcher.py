"""Starts the processes of one job on this host: ``shardtensor launch -n 4 train.py``."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import IO

from shardtensor.errors import ArgumentError, BackendError

GRACE = 12.0
"""Seconds between the first process that ends with an error and the end of the others, which print their own."""

_POLL = 0.02
"""Seconds between two looks at whether a job is over."""

_LAUNCHERS_VARIABLES = ("PMI_", "PMIX_", "OMPI_", "HYDI_", "HYDRA_", "MPI_LOCAL", "SHARDTENSOR_PROCESS_ID")
"""How the variables begin that another launcher has set for this process. The new job must not see them."""


def launch(
    command: Sequence[str],
    processes: int,
    engine: str | None = None,
    *,
    timeout: float | None = None,
    environ: Mapping[str, str] | None = None,
    output: Callable[[str], object] = print,
) -> int:
    """Runs a command in several processes of this host, and returns the exit status of the job.

    Each line that a process prints is prefixed by its number. When one process ends with an error, the others are ended
    after a few seconds.

    Args:
        command: the program and its arguments.
        processes: the number of processes.
        engine: ``"mpi"``, which runs ``mpiexec``, or ``"gloo"``; by default "mpi" where mpi4py and mpiexec are
            installed.
        timeout: seconds after which all processes are ended, with the exit status 124; None for no limit.
        environ: environment variables that are set for the processes.
        output: called with each line of output.

    Returns:
        0 if all processes ended without an error; otherwise the exit status of the first one that failed, and 128 plus
        the number of the signal for a process that a signal ended.

    Raises:
        ArgumentError: there is no such engine, or ``processes`` is less than 1.
        BackendError: mpiexec is not installed.
    """
    if processes < 1:
        raise ArgumentError(f"launch: the number of processes is {processes}; wanted a number from 1 on")
    mpiexec = find_mpiexec()
    engine = engine or ("mpi" if mpiexec and find_spec("mpi4py") else "gloo")
    if engine not in ("mpi", "gloo"):
        raise ArgumentError(f"launch: engine is {engine!r}; wanted 'mpi' or 'gloo'")
    base = {k: v for k, v in os.environ.items() if not k.startswith(_LAUNCHERS_VARIABLES)} | dict(environ or {})
    if engine == "mpi":
        if mpiexec is None:
            raise BackendError("launch: there is no mpiexec; `pip install 'shardtensor[mpi-local]'` brings one")
        with _Pipes(processes, output) as pipes:
            command = _mpi_command(mpiexec, processes, pipes.connected(command))
            return _run([(command, base, "")], timeout, pipes.write)
    else:
        address = f"127.0.0.1:{free_port()}"
        names = {"SHARDTENSOR_COORDINATOR_ADDRESS": address, "SHARDTENSOR_NUM_PROCESSES": str(processes)}
        jobs = [
            (list(command), {**base, **names, "SHARDTENSOR_PROCESS_ID": str(k)}, f"[{k}] ") for k in range(processes)
        ]
    return _run(jobs, timeout, output)


def find_mpiexec() -> str | None:
    """Returns the path of the mpiexec beside this Python, where wheels of MPI install it, else of that in PATH."""
    beside = str(Path(sys.executable).parent)
    return shutil.which("mpiexec", path=beside) or shutil.which("mpiexec")


def free_port() -> int:
    """Returns a port of this host that no program uses at the moment."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def _mpi_command(mpiexec: str, processes: int, command: Sequence[str]) -> list[str]:
    version = subprocess.run([mpiexec, "--version"], capture_output=True, text=True, check=False).stdout
    if "Open MPI" in version or "OpenRTE" in version:
        # By default, Open MPI refuses more processes than cores, and binds all threads of a process to one core.
        return [mpiexec, "--oversubscribe", "--bind-to", "none", "-n", str(processes), *command]
    return [mpiexec, "-n", str(processes), *command]


class _Pipes:
    """A named pipe for each process, to which it writes its output.

    mpiexec passes output on in pieces of some kilobytes, so that longer lines of several processes would be mixed.

    Args:
        processes: the number of processes.
        output: called with each line, after the number of its process.
    """

    _COMMAND = 'p="$0/${PMI_RANK-$OMPI_COMM_WORLD_RANK}"; if [ -p "$p" ]; then exec "$@" >"$p" 2>&1; fi; exec "$@"'
    """What the shell runs in each process: the program, with its output connected to the pipe."""

    def __init__(self, processes: int, output: Callable[[str], object]) -> None:
        self._processes = processes
        self._output = output
        self._lock = threading.Lock()  # fork: the launcher's process runs no user code.
        self._is_over = threading.Event()  # fork: likewise.

    def __enter__(self) -> _Pipes:
        self._folder = tempfile.TemporaryDirectory(prefix="shardtensor-launch-")
        self._ends: list[tuple[int, int]] = []
        for k in range(self._processes):
            path = os.path.join(self._folder.name, str(k))
            os.mkfifo(path)
            # This process keeps an end to write to, too: without any, the pipe would end before its process begins.
            self._ends.append((os.open(path, os.O_RDONLY | os.O_NONBLOCK), os.open(path, os.O_WRONLY)))
        self._readers = [threading.Thread(target=self._copy, args=(k,)) for k in range(self._processes)]
        for reader in self._readers:
            reader.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        for reader in self._readers:
            reader.join()
        for ends in self._ends:
            for end in ends:
                os.close(end)
        self._folder.cleanup()

    def connected(self, command: Sequence[str]) -> list[str]:
        """Returns the command that runs a command with its output connected to the pipe of its process."""
        return ["/bin/sh", "-c", self._COMMAND, self._folder.name, *command]

    def write(self, line: str) -> None:
        """Passes a line on."""
        with self._lock:
            self._output(line)

    def _copy(self, k: int) -> None:
        """Passes on what process ``k`` writes, until the job is over and nothing is left in its pipe."""
        rest = b""
        while True:
            is_over = self._is_over.is_set()
            if select.select([self._ends[k][0]], [], [], 0 if is_over else _POLL)[0]:
                *lines, rest = (rest + os.read(self._ends[k][0], 1 << 16)).split(b"\n")
            elif is_over:
                lines, rest = [rest] if rest else [], b""
            else:
                continue
            for line in lines:
                self.write(f"[{k}] {line.decode(errors='replace')}")
            if is_over and not lines and not rest:
                return


def _run(
    jobs: Sequence[tuple[Sequence[str], Mapping[str, str], str]],
    timeout: float | None,
    output: Callable[[str], object],
) -> int:
    """Runs commands at the same time, and returns the exit status of the first that fails."""
    deadline = time.monotonic() + timeout if timeout is not None else float("inf")
    lock = threading.Lock()  # fork: likewise.
    with _started(jobs) as running:
        readers = [
            threading.Thread(target=_copy_lines, args=(process.stdout, prefix, output, lock))
            for process, (_, _, prefix) in zip(running, jobs, strict=True)
        ]
        for reader in readers:
            reader.start()
        failed = 0
        while any(process.poll() is None for process in running):
            if not failed and (failed := _first_failure(running)):
                deadline = min(deadline, time.monotonic() + GRACE)
            if time.monotonic() > deadline:
                failed = failed or 124
                break
            time.sleep(0.01)
        failed = failed or _first_failure(running)
    for reader in readers:
        reader.join()
    return failed


@contextlib.contextmanager
def _started(
    jobs: Sequence[tuple[Sequence[str], Mapping[str, str], str]],
) -> Iterator[list[subprocess.Popen[str]]]:
    """Starts commands, each in a process group of its own, and leaves none of their processes behind."""
    running: list[subprocess.Popen[str]] = []
    try:
        for command, environ, _ in jobs:
            process = subprocess.Popen(
                command,
                env=dict(environ),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                start_new_session=True,
            )
            running.append(process)
        yield running
    finally:
        for process in running:
            _end(process)


def _end(process: subprocess.Popen[str]) -> None:
    """Ends a process and those that it has started; mpiexec passes SIGTERM on, and a stopped one only gets SIGKILL."""
    for number, seconds in ((signal.SIGTERM, 2), (signal.SIGKILL, None)):
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(seconds)
    with contextlib.suppress(ProcessLookupError):  # Those that outlive the process that started them.
        os.killpg(process.pid, signal.SIGKILL)


def _first_failure(running: Sequence[subprocess.Popen[str]]) -> int:
    statuses = [process.poll() or 0 for process in running]
    failed = next((status for status in statuses if status), 0)
    return 128 - failed if failed < 0 else failed


def _copy_lines(stream: IO[str] | None, prefix: str, output: Callable[[str], object], lock: threading.Lock) -> None:
    assert stream is not None
    for line in stream:
        with lock:
            output(prefix + line.rstrip("\n"))
    stream.close()
