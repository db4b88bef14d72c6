"""Starts the processes of one job on this host: ``shardtensor launch -n 4 train.py``."""

from __future__ import annotations

import contextlib
import os
import re
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
from types import FrameType
from typing import Any, NamedTuple

from shardtensor.communication.between_processes.difference import processes_text
from shardtensor.communication.between_processes.forgotten import PARENT
from shardtensor.errors import ArgumentError, BackendError
from shardtensor.host.trusted_paths import distrust
from shardtensor.job_output import Lines

GRACE = 12.0
"""Seconds between the first process that ends with an error and the end of the others, which print their own."""

TIMED_OUT = 124
"""The exit status of a job that was ended because it took too long, as of the program `timeout`."""

_POLL = 0.02
"""Seconds between two checks of whether a job is over."""

_LINE_END = re.compile(rb"\r?\n|\r(?!\Z)")
"""What ends a line: also a carriage return, after which bars of progress are drawn again, unless it is the last byte of
those that have been read, since a newline may follow.
"""

_PATIENCE = 5.0
"""Seconds, after a signal and the end of the job, until this process ends although nothing reads its output."""

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

    Each line that a process prints is prefixed by its number, and a traceback that several processes print at about the
    same time is printed once, prefixed by the numbers of all of them. When one process ends with an error, the others
    are ended after a few seconds, and the last line names the processes that ended with an error. Nothing of the job is
    left when this function ends, however it does; a signal that ends this process ends the job first, and then waits
    some seconds for whatever reads the output.

    Args:
        command: the program and its arguments.
        processes: the number of processes.
        engine: ``"mpi"``, which runs ``mpiexec``, or ``"gloo"``; by default "mpi" where mpi4py and mpiexec are
            installed.
        timeout: seconds after which all processes are ended, with the exit status `TIMED_OUT`, 124; None for no limit.
        environ: environment variables that are set for the processes.
        output: called with each line of output. An error that it raises ends the job.

    Returns:
        0 if all processes ended without an error; otherwise the exit status of the first one that failed, and 128 plus
        the number of the signal for a process that a signal ended.

    Raises:
        ArgumentError: there is no such engine or program, or ``processes`` is less than 1.
        BackendError: mpiexec is not installed, or other users can replace temporary files.
        SystemExit: SIGTERM or SIGHUP has ended the job; the status is 128 plus the number of the signal.
        KeyboardInterrupt: Ctrl-C has ended the job.
    """
    if processes < 1:
        raise ArgumentError(f"launch: the number of processes is {processes}; it must be at least 1")
    mpiexec = find_mpiexec()
    engine = engine or ("mpi" if mpiexec and find_spec("mpi4py") else "gloo")
    if engine not in ("mpi", "gloo"):
        raise ArgumentError(f"launch: engine is {engine!r}; wanted 'mpi' or 'gloo'")
    if engine == "mpi" and mpiexec is None:
        raise BackendError("launch: there is no mpiexec; `pip install 'shardtensor[mpi-local]'` brings one")
    base = {k: v for k, v in os.environ.items() if not k.startswith(_LAUNCHERS_VARIABLES)} | dict(environ or {})
    if shutil.which(command[0], path=base.get("PATH")) is None:
        raise ArgumentError(f"launch: {command[0]!r} is no program; wanted a Python file (.py) or an executable")
    base.pop(PARENT, None)
    with _Signals() as signals, tempfile.TemporaryDirectory(prefix="shardtensor-launch-") as folder:
        _check_trusted(folder)
        with _Guardian(folder) as guardian:
            lines = Lines(output)
            watch = _Watch(timeout, signals, lines, guardian)
            if engine == "mpi":
                status = _run_mpi(_mpi_command(mpiexec or "", processes), command, base, folder, processes, watch)
            else:
                status = _run_gloo(command, base, processes, watch)
            if signals.received:
                line = f"shardtensor launch: ended by {signal.Signals(signals.received).name}"
                writer = threading.Thread(target=lines.write, args=(line,), daemon=True)  # This may block.
                writer.start()
                signals.join(writer)
        if lines.error is not None:
            raise lines.error
    if signals.received == signal.SIGINT:
        raise KeyboardInterrupt
    if signals.received:
        raise SystemExit(128 + signals.received)
    return status


def find_mpiexec() -> str | None:
    """Returns the path of the mpiexec beside this Python, where wheels of MPI install it, else of that in PATH."""
    beside = str(Path(sys.executable).parent)
    return shutil.which("mpiexec", path=beside) or shutil.which("mpiexec")


def free_port() -> int:
    """Returns a port of this host that no program uses at the moment."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def _mpi_command(mpiexec: str, processes: int) -> list[str]:
    version = subprocess.run([mpiexec, "--version"], capture_output=True, text=True, check=False).stdout
    if "Open MPI" in version or "OpenRTE" in version:
        # By default, Open MPI refuses more processes than cores, and binds all threads of a process to one core.
        return [mpiexec, "--oversubscribe", "--bind-to", "none", "-n", str(processes)]
    return [mpiexec, "-n", str(processes)]


def _check_trusted(folder: str) -> None:
    if (reason := distrust(folder)) is not None:
        raise BackendError(
            f"launch: the folder for temporary files, {tempfile.gettempdir()}, cannot be trusted: {reason}; set TMPDIR "
            "to a folder in which no other user can replace files"
        )


# -- what ends a job -------------------------------------------------------------------------------


class _Signals:
    """A context in which signals that would end this process are noted instead, so that the job is ended first.

    Handlers of the program that calls `launch` stay, and so does a signal that is ignored, as SIGHUP under nohup.

    Attributes:
        received: the number of the first signal, or 0.
    """

    _DEFAULTS = (signal.SIG_DFL, signal.default_int_handler)

    def __init__(self) -> None:
        self.received = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> _Signals:
        if threading.current_thread() is threading.main_thread():  # Others receive no signals.
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                if signal.getsignal(number) in self._DEFAULTS:
                    self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = self.received or number

    def join(self, thread: threading.Thread) -> None:
        """Waits for a thread; after a signal only for a while: then the signal ends this process by its default action,
        and the guardian removes what is left.
        """
        patience = _PATIENCE
        while thread.is_alive():
            thread.join(_POLL)
            if self.received:
                patience -= _POLL
            if patience < 0:
                signal.signal(self.received, signal.SIG_DFL)
                os.kill(os.getpid(), self.received)


class _Guardian:
    """A shell that ends the processes of the job and removes its folder if this process is killed, by SIGKILL too: it
    notices that nothing holds the other end of its standard input any more.

    Args:
        folder: the folder of the job.
    """

    _COMMAND = """
        groups=
        while read -r group; do groups="$groups -$group"; done
        for group in $groups; do kill -s TERM -- $group; done
        sleep 1
        for group in $groups; do kill -s KILL -- $group; done
        rm -rf "$0"
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def __enter__(self) -> _Guardian:
        self._shell = subprocess.Popen(
            ["/bin/sh", "-c", self._COMMAND, self._folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._shell.kill()
        self._shell.communicate()

    def guard(self, group: int) -> None:
        """Adds a process group to those that are ended."""
        assert self._shell.stdin
        with contextlib.suppress(BrokenPipeError):  # It was killed itself: the job goes on without it.
            self._shell.stdin.write(f"{group}\n".encode())
            self._shell.stdin.flush()


class _Watch(NamedTuple):
    """What can end a job, other than its processes.

    Attributes:
        timeout: seconds after which it is ended; None for no limit.
        signals: the signals that this process has received.
        lines: receives the output.
        guardian: ends the job if this process is killed.
    """

    timeout: float | None
    signals: _Signals
    lines: Lines
    guardian: _Guardian


# -- jobs ------------------------------------------------------------------------------------------


class _Command(NamedTuple):
    """A command that is run: its words, its environment, and the number of its process; None if it starts several."""

    words: Sequence[str]
    environ: Mapping[str, str]
    process: int | None


def _run_gloo(command: Sequence[str], base: Mapping[str, str], processes: int, watch: _Watch) -> int:
    """Runs a command in processes that find each other by an address, and returns the exit status of the job."""
    address = f"127.0.0.1:{free_port()}"
    names = {**base, "SHARDTENSOR_COORDINATOR_ADDRESS": address, "SHARDTENSOR_NUM_PROCESSES": str(processes)}
    commands = [_Command(command, {**names, "SHARDTENSOR_PROCESS_ID": str(k)}, k) for k in range(processes)]
    if processes > 1:
        commands[0].environ[PARENT] = str(os.getpid())  # type: ignore[index]
    ended: list[tuple[int, int]] = []
    status = _run(commands, [], watch, ended)
    if failed := _failures(ended):
        watch.lines.write(failed)
    return status


_WRAPPER = """
    k="${PMI_RANK-$OMPI_COMM_WORLD_RANK}"
    if [ ! -p "$0/$k" ]; then exec "$@"; fi
    echo "-$$" >>"$0/groups"
    if [ "$k" = 0 ] && [ "${PMI_SIZE-$OMPI_COMM_WORLD_SIZE}" != 1 ]; then export PARENT=$$; fi
    "$@" >"$0/$k" 2>&1
    status=$?
    echo "$k $status" >>"$0/ended"
    exit $status
""".replace("PARENT", PARENT)
"""What the shell runs in each process of MPI: the program, with its output connected to a pipe, because mpiexec passes
output on in pieces of some kilobytes, so that longer lines of several processes would be mixed. mpiexec does not tell
which process has ended with an error, so the shell notes it, and its number: MPICH starts each process in a group of
its own, in which other processes may be left when mpiexec has ended.
"""


def _run_mpi(
    mpiexec: Sequence[str],
    command: Sequence[str],
    base: Mapping[str, str],
    folder: str,
    processes: int,
    watch: _Watch,
) -> int:
    """Runs a command by mpiexec, and returns the exit status of the job."""
    words = [*mpiexec, "/bin/sh", "-c", _WRAPPER, folder, *command]
    with contextlib.ExitStack() as opened:
        opened.callback(_end_groups, Path(folder, "groups"))
        pipes = []
        for k in range(processes):
            path = os.path.join(folder, str(k))
            os.mkfifo(path)
            # This process keeps an end to write to, too: without any, the pipe would end before its process begins.
            pipes.append((os.open(path, os.O_RDONLY | os.O_NONBLOCK), k))
            opened.callback(os.close, pipes[-1][0])
            opened.callback(os.close, os.open(path, os.O_WRONLY))
        status = _run([_Command(words, base, None)], pipes, watch, [])
    record = Path(folder, "ended")
    rows = [line.split() for line in record.read_text().splitlines()] if record.exists() else []
    # The shell reports a signal as 128 plus its number; greater numbers are statuses, of `sys.exit(-1)` for example.
    ended = [(int(k), 128 - int(n) if 128 < int(n) < 128 + signal.NSIG else int(n)) for k, n in rows]
    if status and (failed := _failures(ended)):
        watch.lines.write(failed)
    # MPICH kills the others after the first that fails, and its own status may be that of a process it has killed.
    first = next((code for _, code in ended if code), 0)
    return _exit_status(first) if first and status not in (0, TIMED_OUT) else status


def _end_groups(record: Path) -> None:
    """Ends what is left of the process groups in a file that `_WRAPPER` has written. Where the shell leads no group,
    there is none of its number.
    """
    for number in record.read_text().split() if record.exists() else ():
        with contextlib.suppress(ProcessLookupError):
            os.killpg(-int(number), signal.SIGKILL)


def _failures(ended: Sequence[tuple[int, int]]) -> str:
    """Returns a line that names the processes that have ended with an error by themselves, the first one first, but
    those that a signal has ended before all others: these may end sooner, before the system reports the first.

    Args:
        ended: the numbers of processes, and their exit statuses, or the negative numbers of the signals that have ended
            them.
    """
    groups: dict[str, list[int]] = {}
    for k, status in sorted(ended, key=lambda one: one[1] >= 0):
        if status < 0:
            name = signal.Signals(-status).name if -status in set(signal.Signals) else "of no name"
            groups.setdefault(f"ended by signal {-status} ({name})", []).append(k)
        elif status:
            groups.setdefault(f"ended with exit status {status}", []).append(k)
    parts = [f"{processes_text(ks)} {how}" for how, ks in groups.items()]
    return f"shardtensor launch: {'; '.join(parts)}" if parts else ""


def _run(
    commands: Sequence[_Command], pipes: Sequence[tuple[int, int]], watch: _Watch, ended: list[tuple[int, int]]
) -> int:
    """Runs commands at the same time, and returns the exit status of the first that fails.

    Args:
        commands: the commands.
        pipes: more pipes with output, and the numbers of their processes.
        watch: what else can end the job.
        ended: receives the numbers and statuses of the commands that have ended by themselves, in the order of their
            ends.
    """
    deadline = time.monotonic() + watch.timeout if watch.timeout is not None else float("inf")
    status = 0
    with _started(commands, watch.guardian) as running, contextlib.ExitStack() as readers:
        over, other_end = os.pipe()  # All readers notice at once that its other end is closed.
        readers.callback(os.close, over)
        until = readers.enter_context(contextlib.ExitStack())
        until.callback(os.close, other_end)
        for process, command in zip(running, commands, strict=True):
            assert process.stdout
            readers.enter_context(_copied(process.stdout.fileno(), command.process, over, until, watch))
        for pipe in pipes:
            readers.enter_context(_copied(*pipe, over, until, watch))
        try:
            while True:
                left = [k for k, process in enumerate(running) if process.poll() is None]
                known = [k for k, _ in ended]
                new = [(k, p.returncode) for k, p in enumerate(running) if k not in left and k not in known]
                if left and any(code < 0 for _, code in new):  # It cannot print this itself.
                    watch.lines.write(_failures([(k, code) for k, code in new if code < 0]))
                ended += new
                if not status and (status := next((code for _, code in ended if code), 0)):
                    deadline = min(deadline, time.monotonic() + GRACE)
                if not left or watch.signals.received or watch.lines.error:
                    break
                if time.monotonic() > deadline:
                    if not status:
                        watch.lines.write(f"shardtensor launch: the job was ended after {watch.timeout:g} s")
                        status = TIMED_OUT
                    elif len(commands) > 1:  # mpiexec is one command for all processes.
                        watch.lines.write(
                            f"shardtensor launch: {processes_text(left)} did not end and had to be killed"
                        )
                    break
                time.sleep(0.01)
        finally:
            _end(running)
    return _exit_status(status)


def _exit_status(status: int) -> int:
    """Returns the exit status of a process as shells report it: 128 plus the number of a signal."""
    return 128 - status if status < 0 else status


@contextlib.contextmanager
def _started(commands: Sequence[_Command], guardian: _Guardian) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Starts commands, each in a process group of its own, and ends all of their processes."""
    running: list[subprocess.Popen[bytes]] = []
    try:
        for command in commands:
            process = subprocess.Popen(
                command.words,
                env=dict(command.environ),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            running.append(process)
            guardian.guard(process.pid)
        yield running
    finally:
        _end(running)
        for process in running:
            assert process.stdout
            process.stdout.close()


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Ends processes and those that they have started. All receive SIGTERM before any has ended, since the others would
    print an error about that, and only once, since a handler may be saving a file; a stopped one only gets SIGKILL.
    """
    for number, seconds in ((signal.SIGTERM, 2.0), (signal.SIGKILL, float("inf"))):
        left = [process for process in processes if process.poll() is None]
        for process in left:
            _signal(process, number)  # mpiexec passes SIGTERM on.
        deadline = time.monotonic() + seconds
        while any(process.poll() is None for process in left) and time.monotonic() < deadline:
            time.sleep(0.01)
    for process in processes:
        _signal(process, signal.SIGKILL)  # Those that outlive the process that started them.


def _signal(process: subprocess.Popen[bytes], number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


@contextlib.contextmanager
def _copied(end: int, process: int | None, over: int, until: contextlib.ExitStack, watch: _Watch) -> Iterator[None]:
    """A context in which a thread passes on the lines that are written to a pipe, at its end what is left in it; this
    closes ``until``, and with it the other end of the pipe ``over``.
    """
    if process is not None:
        watch.lines.open(process)
    reader = threading.Thread(target=_copy, args=(end, process, over, watch.lines))
    reader.start()
    try:
        yield
    finally:
        until.close()
        watch.signals.join(reader)


def _copy(end: int, process: int | None, over: int, lines: Lines) -> None:
    """Passes on what a process writes to a pipe until it ends, or until the job is over and nothing is left in it: a
    process that outlives the job may hold the other end.
    """
    rest, was_over = b"", False
    while True:
        ready = select.select([end], [], [], 0)[0] if was_over else select.select([end, over], [], [], _POLL)[0]
        if end in ready:
            data = os.read(end, 1 << 16)
            *whole, rest = _LINE_END.split(rest + data)
            for line in whole:
                _pass_on(line, process, lines)
            if data:
                continue
            break
        if was_over:
            break
        was_over = over in ready  # What was written before is looked for once more.
        lines.check()
    if rest := rest.removesuffix(b"\r"):
        _pass_on(rest, process, lines)
    if process is not None:
        lines.close(process)


def _pass_on(line: bytes, process: int | None, lines: Lines) -> None:
    text = line.decode(errors="replace")
    if process is None:
        lines.write(text)
    else:
        lines.read(process, text)
