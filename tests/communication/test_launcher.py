"""`shardtensor launch`: whatever ends it, its processes end and nothing stays on disk; and it names who has failed."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shardtensor import launcher
from shardtensor.errors import ArgumentError
from tests.communication.test_engines import NO_GLOO, NO_MPI
from tests.timing import within

ENGINES = [
    pytest.param("mpi", marks=pytest.mark.skipif(bool(NO_MPI), reason=NO_MPI)),
    pytest.param("gloo", marks=pytest.mark.skipif(bool(NO_GLOO), reason=NO_GLOO)),
]
ROOT = Path(__file__).parents[2]
NUMBER = (
    "import os, sys, time, signal\n"
    "k = int(next(os.environ[v] for v in ('SHARDTENSOR_PROCESS_ID', 'PMI_RANK', 'OMPI_COMM_WORLD_RANK') "
    "if v in os.environ))\n"
)
ENDLESS = f"{NUMBER}while True:\n    print('line', flush=True)\n    time.sleep(0.05)\n"


class Job:
    """A launcher that is started as a command, and what it leaves behind.

    Attributes:
        folder: the temporary folder of its processes, which also marks them.
        command: the launcher's command line.
        environ: its environment.
    """

    def __init__(self, folder: Path, engine: str, program: str) -> None:
        self.folder = folder / "tmp"
        self.folder.mkdir()
        script = folder / "script.py"
        script.write_text(program)
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
        self.environ = {**os.environ, "TMPDIR": str(self.folder), "PYTHONPATH": path, "SHARDTENSOR_NUM_DEVICES": "1"}
        self.command = [sys.executable, "-m", "shardtensor", "launch", "-n", "2", "--engine", engine, str(script)]

    def start(self, **options: Any) -> subprocess.Popen[str]:
        """Starts the launcher, and waits for its first line."""
        return subprocess.Popen(
            self.command, env=self.environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options
        )

    def left(self) -> list[str]:
        """The command lines of the processes that run, and the files that there are."""
        return [*processes_of(self.folder), *map(str, self.folder.iterdir())]

    def assert_nothing_is_left(self, seconds: float = 5) -> None:
        deadline = time.monotonic() + seconds
        while (left := self.left()) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert left == []


def processes_of(folder: Path) -> list[str]:
    """The command lines of the processes that have this temporary folder."""
    mark, found = f"TMPDIR={folder}".encode(), []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark in (path / "environ").read_bytes().split(b"\0"):
                found.append((path / "cmdline").read_text().replace("\0", " "))
    return found


@pytest.fixture
def endless(tmp_path: Path, engine: str) -> Iterator[tuple[Job, subprocess.Popen[str]]]:
    """A job that prints lines for ever."""
    job = Job(tmp_path, engine, ENDLESS)
    with job.start() as process:
        try:
            assert process.stdout
            assert process.stdout.readline().endswith("] line\n")
            yield job, process
        finally:
            process.kill()


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGKILL])
def test_a_signal_that_ends_the_launcher_ends_the_job(
    endless: tuple[Job, subprocess.Popen[str]], number: signal.Signals
) -> None:
    job, process = endless
    process.send_signal(number)
    printed, errors = process.communicate(timeout=20)
    assert process.returncode == (-number if number == signal.SIGKILL else 128 + number)
    assert errors == ""
    if number != signal.SIGKILL:
        assert printed.splitlines()[-1] == f"shardtensor launch: ended by {number.name}"
    job.assert_nothing_is_left()


@pytest.mark.parametrize("engine", ENGINES)
def test_a_launcher_that_is_stopped_goes_on(endless: tuple[Job, subprocess.Popen[str]]) -> None:
    job, process = endless
    process.send_signal(signal.SIGTSTP)
    time.sleep(0.2)
    process.send_signal(signal.SIGCONT)
    assert process.stdout
    for _ in range(20):
        assert process.stdout.readline().endswith("] line\n")
    process.terminate()
    assert process.wait(timeout=20) == 128 + signal.SIGTERM
    job.assert_nothing_is_left()


@pytest.mark.parametrize("engine", ENGINES)
def test_processes_that_outlive_those_of_the_job_are_ended(engine: str, tmp_path: Path) -> None:
    job = Job(tmp_path, engine, "import subprocess; subprocess.Popen(['sleep', '60'])\n")
    done = subprocess.run(job.command, env=job.environ, stdout=subprocess.PIPE, timeout=30, check=False)
    assert (done.returncode, done.stdout) == (0, b"")
    job.assert_nothing_is_left()


@pytest.mark.parametrize("engine", ENGINES)
def test_they_are_ended_if_the_launcher_is_killed(engine: str, tmp_path: Path) -> None:
    job = Job(tmp_path, engine, f"import subprocess; subprocess.Popen(['sleep', '60'])\n{ENDLESS}")
    with job.start() as process:
        assert process.stdout
        process.stdout.readline()
        process.kill()
    job.assert_nothing_is_left()


@pytest.mark.parametrize("engine", ENGINES)
def test_output_that_nothing_reads_ends_the_job(endless: tuple[Job, subprocess.Popen[str]]) -> None:
    job, process = endless
    assert process.stdout
    assert process.stderr
    process.stdout.close()
    assert process.wait(timeout=20) == 128 + signal.SIGPIPE
    assert process.stderr.read() == ""
    job.assert_nothing_is_left()


def test_a_signal_ends_a_launcher_whose_output_is_not_read(tmp_path: Path) -> None:
    job = Job(tmp_path, "gloo", f"print('x' * 200_000, flush=True)\n{ENDLESS}")
    code = "import sys; from shardtensor import cli, launcher; launcher._PATIENCE = 1; sys.exit(cli.main(sys.argv[1:]))"
    job.command[1:3] = ["-c", code]
    with job.start() as process:
        assert process.stdout
        process.stdout.read(1)
        time.sleep(0.3)  # The pipe, which holds 65,536 bytes, is full.
        process.terminate()
        assert process.wait(timeout=20) == -signal.SIGTERM
        job.assert_nothing_is_left()


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("redirection", "status", "message"),
    [(">/dev/full", 1, "shardtensor: [Errno 28] No space left on device\n"), (">&-", 0, "")],
)
def test_output_that_cannot_be_written(
    engine: str, redirection: str, status: int, message: str, tmp_path: Path
) -> None:
    job = Job(tmp_path, engine, f"{NUMBER}print('line')\n")
    ended = subprocess.run(
        ["/bin/sh", "-c", f'exec "$@" {redirection}', "sh", *job.command],
        env=job.environ, stderr=subprocess.PIPE, text=True, timeout=30, check=False,
    )  # fmt: skip
    assert (ended.returncode, ended.stderr) == (status, message)
    job.assert_nothing_is_left()


@pytest.mark.parametrize("engine", ENGINES)
def test_lines_that_end_with_carriage_returns(engine: str) -> None:
    """Bars of progress are drawn over the ones before; the next line may begin in another read."""
    program = "import os, time\nfor part in (b'\\r0%\\r50', b'%\\r', b'\\n\\nb\\r\\nc\\r'): os.write(1, part); time.sleep(0.1)"
    lines: list[str] = []
    assert launcher.launch([sys.executable, "-c", program], 1, engine, timeout=50, output=lines.append) == 0
    assert lines == [f"[0] {text}" for text in ("", "0%", "50%", "", "b", "c")]


@pytest.mark.parametrize("engine", ENGINES)
def test_an_error_of_the_function_that_receives_lines_ends_the_job(engine: str) -> None:
    def output(line: str) -> None:
        raise LookupError(line)

    with within(15), pytest.raises(LookupError, match=r"\[[01]\] line"):
        launcher.launch([sys.executable, "-c", ENDLESS], 2, engine, timeout=50, output=output)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("code", "status", "line"),
    [
        ("if k == 1: os._exit(7)", 7, "process 1 ended with exit status 7"),
        ("if k == 1: os.kill(os.getpid(), signal.SIGSEGV)", 139, "process 1 ended by signal 11 (SIGSEGV)"),
        ("if k == 1: os._exit(-1)", 255, "process 1 ended with exit status 255"),
        ("sys.exit(3)", 3, "processes 0-1 ended with exit status 3"),
        ("sys.exit(0)", 0, ""),
    ],
)
def test_the_last_line_names_the_processes_that_ended_with_an_error(
    engine: str, code: str, status: int, line: str
) -> None:
    wait = "" if "sys.exit" in code else "time.sleep(0.5)"
    lines: list[str] = []
    program = f"{NUMBER}{code}\n{wait}"
    assert launcher.launch([sys.executable, "-c", program], 2, engine, timeout=50, output=lines.append) == status
    found = "".join(lines[-1:])
    if engine == "mpi" and "0-1" in line:  # mpiexec ends the others after the first.
        wanted = [line, *(line.replace("processes 0-1", f"process {k}") for k in "01")]
        assert found.removeprefix("shardtensor launch: ") in wanted
    else:
        assert found == (f"shardtensor launch: {line}" if line else "")


@pytest.mark.parametrize(("code", "status"), [("os._exit(3)", 3), ("os.kill(os.getpid(), signal.SIGKILL)", 137)])
def test_the_status_of_a_job_of_mpi_is_that_of_the_first_process_that_exits_with_an_error(
    code: str, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MPICH ends with status 9 if it has killed the others before they ended, as this mpiexec always does."""
    mpiexec = tmp_path / "mpiexec"
    mpiexec.write_text('#!/bin/sh\nif [ $# -gt 2 ]; then shift 2; PMI_RANK=0 PMI_SIZE=1 "$@"; exit 9; fi\n')
    mpiexec.chmod(0o755)
    monkeypatch.setattr(launcher, "find_mpiexec", lambda: str(mpiexec))
    program = f"import os, signal; {code}"
    assert launcher.launch([sys.executable, "-c", program], 1, "mpi", timeout=50, output=print) == status


@pytest.mark.skipif(bool(NO_GLOO), reason=NO_GLOO)
def test_processes_that_do_not_end_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "GRACE", 0.3)
    lines: list[str] = []
    program = f"{NUMBER}if k == 1: os._exit(7)\ntime.sleep(50)"
    assert launcher.launch([sys.executable, "-c", program], 3, "gloo", timeout=50, output=lines.append) == 7
    assert lines == [
        "shardtensor launch: processes 0, 2 did not end and had to be killed",
        "shardtensor launch: process 1 ended with exit status 7",
    ]


@pytest.mark.skipif(bool(NO_GLOO), reason=NO_GLOO)
def test_all_processes_are_told_to_end_once_and_at_the_same_time() -> None:
    """Otherwise those that still run print errors about the end of the first one, and a handler interrupts itself."""
    lines: list[str] = []
    program = (
        f"{NUMBER}def end(*_):\n    print('told', time.monotonic(), flush=True)\n"
        "    for _ in range(10 * (1 + k)): time.sleep(0.05)\n    os._exit(0)\n"
        "signal.signal(signal.SIGTERM, end)\nprint('runs', flush=True)\ntime.sleep(50)"
    )

    def output(line: str) -> None:
        lines.append(line)
        if sum(one.endswith("runs") for one in lines) == 2 and line.endswith("runs"):
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(SystemExit):
        launcher.launch([sys.executable, "-c", program], 2, "gloo", timeout=50, output=output)
    first, other = (float(line.split()[2]) for line in sorted(lines) if "told" in line)
    assert abs(first - other) < 0.8


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("command", [".", "exit", "no-such-program", "/no/such/program"])
def test_a_command_that_is_no_program_is_refused(engine: str, command: str) -> None:
    with pytest.raises(ArgumentError, match=f"'{command}' is no program; wanted a Python file"):
        launcher.launch([command], 2, engine, output=print)


def test_a_process_that_outlives_the_job_does_not_hold_it_up() -> None:
    code = "import subprocess; subprocess.Popen(['sleep', '20'], start_new_session=True)"
    with within(10):
        assert launcher.launch([sys.executable, "-c", code], 1, "gloo", timeout=50, output=print) == 0


@pytest.mark.parametrize("engine", ENGINES)
def test_a_traceback_that_all_processes_print_is_printed_once(engine: str, tmp_path: Path) -> None:
    """They wait for one another: on a busy machine the last one starts late."""
    lines: list[str] = []
    program = (
        f"{NUMBER}print('line', k, flush=True)\nopen({str(tmp_path)!r} + f'/{{k}}', 'w').close()\n"
        f"while len(os.listdir({str(tmp_path)!r})) < 3: time.sleep(0.01)\n"
        "time.sleep(0.2 * k)\nraise ValueError('no rows')"
    )
    assert launcher.launch([sys.executable, "-c", program], 3, engine, timeout=50, output=lines.append) == 1
    assert sorted(lines[:3]) == [f"[{k}] line {k}" for k in range(3)]
    assert [line for line in lines if "rows" in line] == ["[0-2] ValueError: no rows"]
    assert sum("Traceback" in line for line in lines) == 1


FORGOTTEN = "this program did not call st.distributed.initialize()"
WORKER = "subprocess.run([sys.executable, '-c', 'import shardtensor as st; st.zeros(3)'], check=True)"


@pytest.mark.parametrize(
    ("engine", "code", "count"),
    [
        pytest.param("mpi", "import shardtensor as st; st.zeros(3)", 1, id="forgotten"),
        pytest.param("mpi", "import shardtensor as st; st.distributed.initialize(); st.zeros(3)", 0, id="called"),
        pytest.param("mpi", "import shardtensor as st; st.process_count()", 1, id="counted"),
        pytest.param("mpi", f"import subprocess, sys; {WORKER}", 0, id="worker"),
        pytest.param("gloo", "import shardtensor as st; st.zeros(3)", 1, id="forgotten-gloo"),
        pytest.param("gloo", "import shardtensor", 0, id="not used", marks=pytest.mark.full),
        pytest.param("gloo", f"import subprocess, sys; {WORKER}", 0, id="worker-gloo", marks=pytest.mark.full),
    ],
)
def test_a_program_that_forgets_initialize(engine: str, code: str, count: int) -> None:
    if NO_MPI and engine == "mpi":
        pytest.skip(NO_MPI)
    lines: list[str] = []
    environ = {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))}
    command = [sys.executable, "-c", code]
    assert launcher.launch(command, 2, engine, timeout=60, environ=environ, output=lines.append) == 0
    assert "\n".join(lines).count(f"[0] shardtensor: {FORGOTTEN}") == count == len(lines)
