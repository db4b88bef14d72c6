"""Several processes: the utilities; and every fault of one process is an error in all, within the time limit."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import shardtensor as st
from shardtensor import distributed, launcher
from shardtensor.backend import registry
from shardtensor.backend.protocol import hardware_shares
from shardtensor.communication import gloo_engine, mpi_engine
from shardtensor.communication.between_processes.launchers import first_host, found_launches
from shardtensor.communication.engine_protocol import Launch
from shardtensor.errors import ArgumentError, BackendError, DistributedError
from tests.communication.faults import DIFFERENT
from tests.communication.lone_errors import SEVERAL
from tests.communication.outputs import of_each
from tests.communication.test_engines import NO_GLOO, NO_MPI
from tests.conftest import NO_GPU
from tests.layouts import mesh_of
from tests.timing import within

FAULTS = Path(__file__).with_name("faults.py")
LONE_ERRORS = Path(__file__).with_name("lone_errors.py")
ENGINES = {"mpi": NO_MPI, "gloo": NO_GLOO}
FULL = pytest.mark.full
SHAPE = r"process_allgather\(float64\[{}\]\)"
GATHER = SHAPE.format(3)


def launch(engine: str, processes: int, *command: str, limit: float = 60) -> tuple[int, str]:
    """The exit status and the output of a job of Python processes, as if each had printed its own lines."""
    if ENGINES[engine]:
        pytest.skip(ENGINES[engine])
    lines: list[str] = []
    root = str(Path(__file__).parents[2])
    environ = {"PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH", "")]))}
    environ["SHARDTENSOR_NUM_DEVICES"] = os.environ.get("SHARDTENSOR_NUM_DEVICES", "2")
    status = launcher.launch(
        [sys.executable, *command], processes, engine, timeout=limit, environ=environ, output=lines.append
    )
    text = "\n".join(of_each(lines))
    assert status != 124, f"the job was ended after {limit} s: {text}"
    return status, text


# -- GPUs ------------------------------------------------------------------------------------------


class Rows:
    """A job in which each process sees these GPUs."""

    def __init__(self, rows: list[list[str]], here: int) -> None:
        self.rows, self.engine = rows, SimpleNamespace(process_index=here)

    def gather_texts(self, call: str, text: str) -> list[str]:
        assert json.loads(text) == self.rows[self.engine.process_index]
        return [json.dumps(row) for row in self.rows]


def divided(rows: list[list[str]], here: int, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    monkeypatch.setattr(registry, "default_hardware", lambda: ("cupy", rows[here]))
    monkeypatch.delitem(hardware_shares, "cupy", raising=False)
    distributed._divide_hardware(Rows(rows, here))  # type: ignore[arg-type]
    return hardware_shares.pop("cupy", [])


@pytest.mark.parametrize(
    ("rows", "shares"),
    [
        ([["a0", "a1"], ["a0", "a1"]], [[0], [1]]),
        ([["a0", "a1"], ["b0", "b1"]], [[0, 1], [0, 1]]),
        ([["a0", "a1", "a2", "a3"]] * 2 + [["b0", "b1", "b2", "b3"]] * 2, [[0, 1], [2, 3], [0, 1], [2, 3]]),
        ([["a1"], ["a0"]], [[0], [0]]),
        ([[], []], [[], []]),
    ],
)
def test_processes_of_a_host_divide_its_gpus(
    rows: list[list[str]], shares: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert [divided(rows, here, monkeypatch) for here in range(len(rows))] == shares


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([["a0"], ["b0"], ["a0"]], "processes 0, 2 would share GPU a0: they see 1 and 1 GPUs"),
        ([["a0", "a1", "a2"]] * 2, "processes 0, 1 would share GPU a0: they see 3 and 3 GPUs"),
        ([["a0", "a1"], ["a1"]], "processes 0, 1 would share GPU a1: they see 2 and 1 GPUs"),
    ],
)
def test_gpus_that_would_be_shared_are_an_error(
    rows: list[list[str]], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for here in range(len(rows)):
        with pytest.raises(ArgumentError, match=f"{message}.*CUDA_VISIBLE_DEVICES.*SHARDTENSOR_SHARE_GPUS=1"):
            divided(rows, here, monkeypatch)


@pytest.mark.skipif(not NO_GPU, reason="the double of CuPy is used where there is no GPU")
@pytest.mark.parametrize(
    ("processes", "share", "found"),
    [
        (2, "", ["[0] GPUs [0]", "[1] GPUs [1]"]),
        pytest.param(3, "", ["would share GPU"], marks=FULL),
        pytest.param(2, "1", ["[0] GPUs [0, 1]", "[1] GPUs [0, 1]"], marks=FULL),
    ],
)
def test_each_process_uses_its_gpus(
    processes: int, share: str, found: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHARDTENSOR_BACKEND", "cupy")
    monkeypatch.setenv("SHARDTENSOR_NUM_DEVICES", "2")
    monkeypatch.setenv("SHARDTENSOR_SHARE_GPUS", share)
    status, text = launch("mpi", processes, str(Path(__file__).with_name("gpus_program.py")))
    assert (status == 0) == (processes == 2), text
    assert all(line in text for line in found), text


# -- faults ----------------------------------------------------------------------------------------

AT = r"\S*faults\.py:\d+"
GATHERS = rf"process(es)? [\d, ]* (is|are) at {AT} process_allgather"

MESSAGES = {
    "raises": rf"process LAST failed at {AT}, and the others did not: {GATHERS}; ValueError: no such file nor",
    "exits": f"process LAST has ended without an exception, and {GATHERS}; all processes have to make the same calls",
    "other_order": rf"the processes call sync_global_devices with different arguments: .*{AT} sync_global_devices\('a'\)",
    "other_shape": rf"call process_allgather with different arguments: .*process LAST: {AT} {SHAPE.format(4)}",
    "other_dtype": rf"call process_allgather with different arguments: .*{AT} {GATHER}",
    "extra_call": rf"make different calls: .*process LAST: {AT} assert_equal",
    "missing_call": f"process LAST has ended without an exception, and {GATHERS}; all processes have to make the same calls",
    "killed": "process LAST has ended or cannot be reached",
    "killed_in_a_collective": "process LAST has ended or cannot be reached",
    "killed_while_idle": "process LAST has ended or cannot be reached",
    "killed_while_computing": "process LAST has ended or cannot be reached",
    "stopped": f"process LAST did not reach {AT} process_allgather within 2 s",
    "interrupted": rf"process LAST failed at {AT}, and the others did not: {GATHERS}; KeyboardInterrupt",
    "late": f"process LAST did not reach {AT} process_allgather within 2 s",
    "error_is_handled": rf"make different calls: .*process LAST: {AT} sync_global_devices",
    "reads_an_element": rf"process LAST failed at {AT}, and the others did not: process(es)? [\d, ]* (is|are) at {AT} sum; "
    "NotAddressableError: float: this process does not hold the element",
    "reads_all_elements": rf"make different calls: .*process LAST: greater before {AT} any",
    "many_calls": rf"make different calls: .*process LAST: {AT} sync_global_devices",
}
"""What every process that can still print has to print; LAST is the number of the process in which the fault is."""

KILLED = {"killed", "killed_in_a_collective", "killed_while_idle", "killed_while_computing"}
"""Faults in which the system ends the last process."""

SILENT = {*KILLED, "stopped", "interrupted"}
"""Faults in which the last process itself prints something else, or nothing."""

TOGETHER = 3
"""Jobs that run at the same time: they wait most of the time."""

CASES = [(event, engine, n) for event in MESSAGES for engine in ENGINES for n in (2, 3, 4)]
RARE = {*DIFFERENT, *KILLED, "reads_all_elements"} - {"killed"}
FEW = [(event, engine, n) for event, engine, n in CASES if (engine, n) == ("mpi", 2) and event not in RARE]
FEW.append(("killed_in_a_collective", "gloo", 2))


def test_an_array_for_each_device_is_given_once() -> None:
    mesh = mesh_of((2,), "checked")
    first, second = st.shard(np.arange(4), devices=mesh.local_devices)
    make = functools.partial(
        st.distributed.make_array_from_single_device_arrays, (4,), st.NamedSharding(mesh, st.P("x"))
    )
    assert make([second, first]).tolist() == [0, 1, 2, 3]
    for arrays in ([first, first, second], [first, second, second.copy()]):
        with pytest.raises(st.ArgumentError, match=r"there are two arrays on checked:\d; wanted one on each"):
            make(arrays)
    with pytest.raises(st.ArgumentTypeError, match="arrays is a generator; wanted a list"):
        make(x for x in (first, second))


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(FEW, id="few"),
        *(pytest.param([case], id="-".join(map(str, case)), marks=FULL) for case in CASES if case not in FEW),
    ],
)
def test_a_fault_of_one_process_ends_all_within_the_time_limit(cases: list[tuple[str, str, int]]) -> None:
    if reason := ENGINES[cases[0][1]]:
        pytest.skip(reason)
    with ThreadPoolExecutor(TOGETHER) as threads:
        list(threads.map(lambda case: end_all_within_the_time_limit(*case), cases))


def end_all_within_the_time_limit(event: str, engine: str, processes: int) -> None:
    status, text = launch(engine, processes, str(FAULTS), event)
    assert status != 0
    assert "done" not in text or event in ("late", "missing_call")  # The last process may have come to its end.
    last = processes - 1
    message = MESSAGES[event].replace("LAST", str(last))
    if event in KILLED and engine == "mpi":  # mpiexec ends all processes at once.
        assert "signal 9" in text
        return
    if event in KILLED:  # None is named that ends because of it.
        assert set(re.findall("process.* ended or cannot be reached", text)) == {
            f"process {last} has ended or cannot be reached"
        }
        assert text.rpartition("\n")[2].startswith(f"shardtensor launch: process {last} ended by signal 9 (SIGKILL); ")
    speakers = range(last if event in SILENT | {"late"} else processes)
    for k in speakers:
        assert re.search(rf"\[{k}\].*({message})", text), f"process {k} does not say {message!r}:\n{text}"
    if event == "raises":
        assert re.search(rf"\[{last}\].*ValueError: no such file", text)


def test_calls_that_differ_are_named_in_each_process() -> None:
    status, text = launch("mpi", 2, str(FAULTS), "catch_each")
    assert status == 0, text
    for event, k in itertools.product(DIFFERENT, range(2)):
        message = MESSAGES[event].replace("LAST", "1")
        assert re.search(rf"^\[{k}\] {event}: .*({message})", text, re.M), f"process {k}, {event}: {text}"


RAISED = r"\S*lone_errors\.py:\d+"
OTHERS = rf"process(es)? [\d, ]* (is|are) at {RAISED} \w+; "

LONE = {
    "index_along_an_axis": r"IndexingError in take_along_axis .*index \d+ is out of bounds",
    "power_of_integers": "ValueError in pow .*Integers to negative integer powers are not allowed",
    "in_place": "ValueError in pow .*Integers to negative integer powers are not allowed",
    "compiled": "ValueError in pow .*Integers to negative integer powers are not allowed",
    "floating_point": "FloatingPointError in log .*divide by zero",
    "in_a_map": "ValueError in shard_map .*negative rows",
    "callback": "FileNotFoundError in make_array_from_callback .*part 3",
    "index_along_an_axis-end": r"IndexingError in take_along_axis .*index \d+ is out of bounds",
}


@pytest.mark.parametrize(
    ("event", "engine", "processes"),
    [
        pytest.param(
            event,
            engine,
            n,
            id=f"{event}-{engine}-{n}",
            marks=() if (engine, n) == ("mpi", 2) and event not in SEVERAL else FULL,
        )
        for event in LONE
        for engine in ENGINES
        for n in (2, 3)
    ],
)
def test_an_error_that_one_process_handles_is_an_error_of_all(event: str, engine: str, processes: int) -> None:
    status, text = launch(engine, processes, str(LONE_ERRORS), event)
    assert status not in (0, 124), text
    assert "done" not in text
    assert not re.search(r"the sum is \d", text)
    last = processes - 1
    assert [line[:3] for line in text.splitlines() if "handles" in line] == [f"[{last}]"]
    kind, _, rest = LONE[event].partition(" .*")
    for k in range(processes):
        message = rf"\[{k}\].*process {last} raised {kind} at {RAISED}, and the others did not: {OTHERS}{rest}"
        assert re.search(message, text), f"process {k} does not say {message!r}:\n{text}"


def test_several_errors_that_one_process_handles_are_errors_of_all() -> None:
    status, text = launch("mpi", 2, str(LONE_ERRORS), "catch_each")
    assert status == 0, text
    alone = [line[:3] for line in text.splitlines() if re.search("handles (?!ShapeError|NaNError)", line)]
    assert alone == ["[1]"] * len(SEVERAL), text
    # An error that all processes handle leaves them in step.
    assert all(text.count(part) == 2 for part in ("handles ShapeError", "handles NaNError", "done")), text
    assert text.count("the sum is") == 4, text
    assert re.findall(r"NaNError (.*) at index .* on (\w+)", text) == [("log: the result has a NaN", "numpy")] * 2, text
    for event, k in itertools.product(SEVERAL, range(2)):
        kind, _, rest = LONE[event].partition(" .*")
        message = rf"process 1 raised {kind} at {RAISED}, and the others did not: {OTHERS}{rest}"
        assert re.search(rf"^\[{k}\] {event}: .*{message}", text, re.M), f"process {k}, {event}: {text}"


@pytest.mark.full
@pytest.mark.parametrize("engine", ENGINES)
def test_an_error_that_all_processes_handle_leaves_them_in_step(engine: str) -> None:
    status, text = launch(engine, 2, str(LONE_ERRORS), "in_all")
    assert status == 0, text
    assert all(text.count(part) == 2 for part in ("handles ShapeError", "the sum is", "done"))


def test_messages_that_mpiexec_reads_late_are_not_lost() -> None:
    """It drops what it has not read yet when a process aborts, so MPI is finalized first."""
    if NO_MPI:
        pytest.skip(NO_MPI)
    mpiexec = launcher.find_mpiexec()
    assert mpiexec
    command = [mpiexec, "-prepend-rank", "-n", "2", sys.executable, str(FAULTS), "unread"]
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("PMI", "HYDI", "OMPI"))}
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(FAULTS.parents[2]), os.environ.get("PYTHONPATH", "")]))
    ended = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60, env=environ, check=False
    )
    status, text = ended.returncode, ended.stdout
    assert status == 1
    for k in range(2):
        assert re.search(rf"\[{k}\].*process 1 has ended without an exception, and process 0 is at", text), text


@pytest.mark.parametrize("engine", [pytest.param(e, marks=() if e == "mpi" else FULL) for e in ENGINES])
def test_much_output_does_not_block_a_process(engine: str) -> None:
    status, text = launch(engine, 2, str(FAULTS), "prints_much")
    assert status == 0
    assert text.count("done") == 2


def test_lines_are_written_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONUNBUFFERED", "1")
    code = (
        "import sys; from shardtensor import distributed as d; d.initialize(); "
        "print(sys.stdout.line_buffering, sys.stdout.write_through)"
    )
    status, text = launch("mpi", 2, "-c", code)
    assert status == 0, text
    assert sorted(text.splitlines()) == ["[0] True False", "[1] True False"]


@pytest.mark.parametrize("engine", [pytest.param(e, marks=() if e == "mpi" else FULL) for e in ENGINES])
def test_two_threads_in_calls_that_concern_several_processes_are_an_error(engine: str) -> None:
    status, text = launch(engine, 2, str(FAULTS), "two_threads")
    assert status != 0
    assert re.search(r"\[1\].*another thread is in a call that concerns several processes", text)


# -- starts ----------------------------------------------------------------------------------------

START = (
    "from shardtensor import distributed as d; d.initialize({}); print('connected', d.process_index()); d.shutdown()"
)


@pytest.fixture
def port() -> int:
    if NO_GLOO:
        pytest.skip(NO_GLOO)
    return launcher.free_port()


def start(*arguments: str) -> list[tuple[int, str]]:
    """The exit status and the output of processes that are started by hand, each with arguments of initialize."""
    environ = {k: v for k, v in os.environ.items() if not k.startswith("SHARDTENSOR_")}
    running = [
        subprocess.Popen(
            [sys.executable, "-c", START.format(a)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env=environ,
        )
        for a in arguments
    ]  # fmt: skip
    ended = []
    for process in running:
        try:
            text, _ = process.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()
            text, _ = process.communicate()
            text = f"ended after a minute: {text}"
        ended.append((process.returncode, text))
    return ended


@pytest.mark.full
def test_processes_that_are_started_by_hand_find_each_other_again_and_again(port: int) -> None:
    for _ in range(2):  # The port is free again after the first job.
        ended = start(*(f"'127.0.0.1:{port}', 2, {k}" for k in range(2)))
        assert [(status, text.strip()) for status, text in ended] == [(0, "connected 0"), (0, "connected 1")]


@pytest.mark.full
def test_a_process_that_never_comes_is_named(port: int) -> None:
    for status, text in start(*(f"'127.0.0.1:{port}', 3, {k}, initialization_timeout=8" for k in (0, 2))):
        assert status == 1
        assert "processes [1] of 3 have not come" in text


def test_process_0_gives_up_while_another_one_waits() -> None:
    class Ending:
        """A store with processes 0 and 2, which ends with process 0 when it has been asked ten times."""

        asked = 0

        def add(self, key: str, number: int) -> int:
            return number

        def set(self, key: str, value: str) -> None:
            pass

        def check(self, keys: list[str]) -> bool:
            self.asked += 1
            if self.asked > 10:
                raise RuntimeError("Failed to recv, got 0 bytes.")
            return keys[0] in ("count/0", "count/2")

    deadline = time.monotonic() + 60
    store = gloo_engine._Calls(Ending(), gloo_engine._Thread(), deadline)
    waiting = gloo_engine._Rendezvous(store, Launch(2, 3, "10.0.0.1:8476", "the call"), deadline)
    with pytest.raises(TimeoutError, match=r"it has ended or failed already, and processes \[1\] of 3 have not come"):
        waiting.join()


@pytest.mark.full
@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        (("2, 1", "2, 1", "2, 0"), "two processes have the number 1 of 2"),
        (("2, 0", "2, 2"), "process_id is 2; wanted a number from 0 to 1"),
        (("2, 0", "3, 1", "3, 2"), "process 0 has num_processes=2, and process 1 has 3"),
    ],
    ids=["taken", "out of range", "other number"],
)
def test_numbers_of_processes_that_contradict_each_other(port: int, numbers: tuple[str, ...], message: str) -> None:
    ended = start(*(f"'127.0.0.1:{port}', {n}, initialization_timeout=20" for n in numbers))
    # A process that starts after the others have ended finds no job.
    late = [status for status, _ in ended].count(0) == 2 and any(
        "it has ended or failed already" in t for _, t in ended
    )
    assert late or any(message in text for _, text in ended), ended
    assert all("Error: initialize: " in text for status, text in ended if status)
    assert [status for status, _ in ended].count(0) in (0, 2), (
        "either all have failed, or those that belong together ran"
    )


@pytest.mark.full
def test_a_port_in_use_is_an_error_of_process_0(port: int) -> None:
    with socket.create_server(("127.0.0.1", port)):
        ((status, text),) = start(f"'127.0.0.1:{port}', 2, 0, initialization_timeout=8")
    assert status == 1
    assert f"cannot open port {port}" in text


LIMITED = """
import os, sys, time
import torch.distributed
from shardtensor import distributed as d
address, folder, *limits = sys.argv[1:]
children = []
for limit in limits:  # They have imported torch together, which takes a second.
    if (child := os.fork()) == 0:
        for number in (1, 2):
            os.dup2(os.open(os.path.join(folder, limit), os.O_CREAT | os.O_WRONLY | os.O_APPEND), number)
        break
    children.append(child)
else:
    print(*children, flush=True)
    print(*(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children))
    sys.exit()
begin = time.monotonic()
try:
    d.initialize(address, 2, 1, initialization_timeout=float(limit))
finally:
    print("seconds", time.monotonic() - begin, flush=True)
"""


@pytest.mark.parametrize(
    "answers", [pytest.param(True, id="silent server"), pytest.param(False, id="process 0 not started", marks=FULL)]
)
def test_initialize_keeps_its_limit_and_can_be_interrupted(port: int, answers: bool, tmp_path: Path) -> None:
    server = socket.create_server(("127.0.0.1", port)) if answers else contextlib.nullcontext()
    environ = {k: v for k, v in os.environ.items() if not k.startswith("SHARDTENSOR_")}
    command = [sys.executable, "-c", LIMITED, f"127.0.0.1:{port}", str(tmp_path), "2", "60"]
    with server, subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ) as parent:
        assert parent.stdout
        _, interrupted = map(int, parent.stdout.readline().split())
        time.sleep(1)
        os.kill(interrupted, signal.SIGINT)
        statuses, _ = parent.communicate(timeout=30)
    errors = {limit: (tmp_path / limit).read_text().splitlines() for limit in ("2", "60")}
    assert statuses.split() == ["1", str(-signal.SIGINT)], errors
    (seconds,) = [line.split()[1] for line in errors["2"] if line.startswith("seconds ")]  # torch may print, too.
    assert float(seconds) < 6
    wanted = (
        f"Error: initialize: process 0 does not answer at 127.0.0.1:{port}: it has not been started, it has ended or "
        "failed already, or the port is closed"
    )
    assert any(line.endswith(wanted) for line in errors["2"])  # A line about hidden frames may follow.
    assert "KeyboardInterrupt" in errors["60"]


RUNNING = """
import sys, time
from shardtensor import distributed as d
d.initialize(sys.argv[1], 2, int(sys.argv[2]), initialization_timeout=30)
print("connected", flush=True)
sys.stdin.readline()
d.shutdown()
"""


@pytest.mark.full
def test_a_second_job_on_the_port_of_one_that_runs(port: int) -> None:
    address = f"127.0.0.1:{port}"
    running = [
        subprocess.Popen(
            [sys.executable, "-c", RUNNING, address, str(k)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for k in range(2)
    ]
    try:
        for process in running:
            assert process.stdout
            assert process.stdout.readline() == "connected\n"
        (first, other) = start(*(f"'{address}', 2, {k}, initialization_timeout=20" for k in range(2)))
        assert first[0] == other[0] == 1
        assert f"cannot open port {port}" in first[1]
        assert f"at {address}, a job is running already" in other[1]
    finally:  # The first job has not noticed any of it.
        for process in running:
            assert process.stdin
            process.stdin.write("\n")
            process.stdin.flush()
        for process in running:
            process.communicate(timeout=30)
        assert [process.returncode for process in running] == [0, 0]


UNLIKE = """
import importlib.metadata, os
k = int(next(os.environ[v] for v in ("SHARDTENSOR_PROCESS_ID", "PMI_RANK") if v in os.environ))
{}
from shardtensor import distributed as d
d.initialize(timeout=20)
"""


@pytest.mark.parametrize(
    ("code", "message"),
    [
        pytest.param(
            "os.environ['SHARDTENSOR_NUM_DEVICES'] = str(2 + k)",
            "process 1 has 3 devices of backend 'numpy', and process 0 has 2 of 'numpy'",
            id="devices",
        ),
        pytest.param(
            "os.environ['SHARDTENSOR_BACKEND'] = ['numpy', 'checked'][k]",
            r"process 1 has \d+ devices of backend 'checked', and process 0 has \d+ of 'numpy'",
            id="backends",
            marks=FULL,
        ),
        pytest.param(
            "importlib.metadata.version = lambda name, known=importlib.metadata.version: ['0.9', known(name)][k]",
            r"process 1 has version \S+ of shardtensor, and process 0 has 0\.9",
            id="versions",
            marks=FULL,
        ),
        pytest.param(
            "import shardtensor\nif k: shardtensor.zeros(3)",
            "process 1 has used devices of numpy already",
            id="used",
            marks=FULL,
        ),
    ],
)
@pytest.mark.parametrize("engine", [pytest.param(e, marks=() if e == "mpi" else FULL) for e in ENGINES])
def test_processes_that_are_unlike_each_other(engine: str, code: str, message: str) -> None:
    status, text = launch(engine, 2, "-c", UNLIKE.format(code))
    assert status == 1
    for k in range(2):
        assert re.search(rf"\[{k}\].*Error: initialize: {message}", text), text


@pytest.mark.full
def test_a_host_name_that_does_not_resolve(port: int) -> None:
    ((status, text),) = start(f"'no-such-host.invalid:{port}', 2, 1, initialization_timeout=8")
    assert status == 1
    assert "'no-such-host.invalid' of process 0 does not resolve" in text


@pytest.mark.parametrize("address", ["localhost", "localhost:", ":80", "localhost:http", "localhost:70000"])
def test_an_address_without_a_valid_port(address: str) -> None:
    from shardtensor.communication.gloo_engine import host_and_port

    with pytest.raises(ArgumentError, match="wanted 'host:port'"):
        host_and_port(address)


def test_some_of_the_three_arguments_are_missing() -> None:
    with pytest.raises(ArgumentError, match="initialize: num_processes, process_id missing"):
        st.distributed.initialize("localhost:80")


def test_a_process_that_no_launcher_has_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {})
    with pytest.raises(ArgumentError, match=r"not started by a known launcher; .*, pass three arguments"):
        st.distributed.initialize()
    monkeypatch.setattr(os, "environ", {"SHARDTENSOR_COORDINATOR_ADDRESS": "127.0.0.1:80"})
    wanted = (
        "initialize: SHARDTENSOR_COORDINATOR_ADDRESS is set, but not SHARDTENSOR_NUM_PROCESSES and SHARDTENSOR_PROC"
    )
    with pytest.raises(ArgumentError, match=wanted):
        st.distributed.initialize()


def test_a_number_that_no_process_has_is_refused_though_process_0_does_not_answer(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    monkeypatch.setattr(gloo_engine, "_SIGNS", 0.2)
    with pytest.raises(ArgumentError, match="process_id is 9; wanted a number from 0 to 3"):
        st.distributed.initialize(f"127.0.0.1:{port}", num_processes=4, process_id=9)


def test_the_time_limit_of_the_environment_is_that_of_the_start_too(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    monkeypatch.setenv("SHARDTENSOR_TIMEOUT", "0.2")
    with pytest.raises(DistributedError, match="process 0 does not answer"):
        st.distributed.initialize(f"127.0.0.1:{port}", num_processes=4, process_id=1)


def test_launchers_that_contradict_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    both = {"PMI_RANK": "1", "PMI_SIZE": "2", "RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "h"}
    monkeypatch.setattr(os, "environ", both)
    with pytest.raises(ArgumentError, match=r"the launcher of MPI \(process 1 of 2\) and torchrun \(process 3 of 4\)"):
        st.distributed.initialize()


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, {"mpi": (1, 2, None)}),
        ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "3"}, {"mpi": (0, 3, None)}),
        ({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "7"}, {"torchrun": (1, 2, "h:7")}),
        (
            {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "n[3-4]", "SLURM_JOB_ID": "5"},
            {"slurm": (1, 2, "n3:20005")},
        ),
        (
            {
                "JOB_COMPLETION_INDEX": "2", "SHARDTENSOR_NUM_PROCESSES": "4",
                "SHARDTENSOR_COORDINATOR_ADDRESS": "job-0.net:80",
            },
            {"address": (2, 4, "job-0.net:80")},
        ),
        ({"SLURM_PROCID": "0"}, {}),
    ],
)  # fmt: skip
def test_what_launchers_leave_in_the_environment(environ: dict[str, str], expected: dict[str, object]) -> None:
    assert {kind: launch[:3] for kind, launch in found_launches(environ).items()} == expected


SLURM = {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NODELIST": "n[3-4]", "SLURM_JOB_ID": "5"}
REMEDIES = r"srun has started 4 processes.*knows 1,.*srun --mpi=pmix.*srun --mpi=pmi2.*initialize\(engine=\"gloo\"\)"


@pytest.mark.skipif(bool(NO_MPI), reason=NO_MPI)
def test_srun_that_does_not_pass_numbers_to_this_mpi_is_an_error_with_remedies() -> None:
    """The library of MPI then starts each process as a job of one process."""
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("PMI", "HYDI", "OMPI"))} | SLURM
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(FAULTS.parents[2]), os.environ.get("PYTHONPATH", "")]))
    command = [sys.executable, "-c", "from shardtensor import distributed as d; d.initialize()"]
    ended = subprocess.run(command, env=environ, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert ended.returncode == 1
    assert re.search(f"BackendError: engine 'mpi': {REMEDIES}", ended.stderr), ended.stderr


def test_variables_of_pmi_that_the_library_of_mpi_does_not_read() -> None:
    launch, library = Launch(1, 4, None, "the launcher of MPI"), "Open MPI"
    assert re.search(REMEDIES, mpi_engine._mismatch(launch, library, 1, {"PMI_RANK": "1", "PMI_SIZE": "4", **SLURM}))
    other = mpi_engine._mismatch(launch, library, 1, {"PMI_RANK": "1", "PMI_SIZE": "4"})
    assert re.search("the launcher of MPI says that there are 4.*Open MPI.*belongs to another MPI", other)
    assert "srun" not in other


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("a", "a"), ("a,b", "a"), ("n[07-09,12],g", "n07"), ("g3,n[1-2]", "g3"), ("n[1-2]-ib", "n1-ib")],
)
def test_the_first_host_of_a_list_of_slurm(nodes: str, first: str) -> None:
    assert first_host(nodes) == first


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), "soon"])
def test_a_time_limit_that_is_no_positive_number(timeout: object) -> None:
    for name in ("timeout", "initialization_timeout"):
        with pytest.raises(ArgumentError, match=f"{name} is .*; wanted a positive number of seconds"):
            st.distributed.initialize(engine="local", **{name: timeout})  # type: ignore[arg-type]


def test_an_engine_that_is_not_installed() -> None:
    with pytest.raises(
        ArgumentError, match=r"no engine named 'smoke'; installed are \['gloo', 'local', 'mpi', 'nccl'\]"
    ):
        st.distributed.initialize(engine="smoke")


# -- utilities -------------------------------------------------------------------------------------

UTILITIES = """
import numpy as np
from shardtensor import distributed as d

d.initialize(timeout=20)
own, count = d.process_index(), d.process_count()
tree = {"w": np.arange(6.0).reshape(2, 3) + own, "b": [np.float32(own), np.array([], bool)]}
one = d.broadcast_one_to_all(tree)
assert one["w"].tolist() == [[0, 1, 2], [3, 4, 5]] and one["b"][0].dtype == np.float32 and one["b"][1].shape == (0,)
other = d.broadcast_one_to_all(tree, is_source=own == count - 1)
assert other["w"][0, 0] == count - 1 == other["b"][0]
days = d.process_allgather(np.datetime64("2020-01-01") + np.arange(own + 2), tiled=True)
assert len(days) == sum(range(2, count + 2)) and days.dtype == "datetime64[D]"
stacked = d.process_allgather((np.full((2, 2), own), own))
assert stacked[0].shape == (count, 2, 2) and stacked[1].tolist() == list(range(count))
strided = d.process_allgather(np.arange(8).reshape(2, 4).T[:, ::-1] + own)
assert (strided[count - 1] == np.arange(8).reshape(2, 4).T[:, ::-1] + count - 1).all()
big = d.process_allgather(np.full(700_000, own), tiled=True)
assert (big.reshape(count, -1) == np.arange(count)[:, None]).all()
d.assert_equal({"nan": np.full(3, np.nan)})
for tree, message in ((np.arange(3) + own, "in_tree is not the same in process 0 and in process"), ([1, 2, own], "in_tree[2] is not"), ([0] * own, "array")):
    try:
        d.assert_equal(tree, "ours")
    except AssertionError as error:
        assert count > 1 and str(error).startswith("ours: ") and message in str(error), error
    else:
        assert count == 1
try:
    d.broadcast_one_to_all(0, is_source=True)
except ValueError as error:
    assert count > 1 and f"is_source is true in {count} processes" in str(error)
else:
    assert count == 1
d.shutdown()
assert not d.is_initialized()
print("passed")
"""


@pytest.mark.parametrize(
    ("engine", "processes"),
    [pytest.param(e, n, marks=() if (e, n) == ("mpi", 3) else FULL) for e in ENGINES for n in (1, 2, 3, 4)],
)
def test_utilities(engine: str, processes: int) -> None:
    status, text = launch(engine, processes, "-c", UTILITIES)
    assert (status, text.count("passed")) == (0, processes), text


def test_one_process_is_a_job_too() -> None:
    st.distributed.initialize(engine="local")
    try:
        assert st.distributed.is_initialized()
        with pytest.raises(DistributedError, match="initialized already"):
            st.distributed.initialize(engine="local")
        assert st.distributed.process_allgather(np.arange(2)).tolist() == [[0, 1]]
        with pytest.raises(st.ArgumentTypeError, match=r"in_tree\['a'\] is an array of objects"):
            st.distributed.process_allgather({"a": np.array([None])})
        st.distributed.sync_global_devices("here")
    finally:
        st.distributed.shutdown()
    assert not st.distributed.is_initialized()
    st.distributed.shutdown()  # Has no effect.


def test_utilities_need_a_job() -> None:
    with pytest.raises(DistributedError, match=r"process_allgather: call st\.distributed\.initialize first"):
        st.distributed.process_allgather(0)


# -- the launcher ----------------------------------------------------------------------------------


def test_the_launcher_ends_all_processes_and_leaves_none_behind(tmp_path: Path) -> None:
    if NO_GLOO and NO_MPI:
        pytest.skip(NO_MPI)
    program = "import os, sys, time; open(sys.argv[1] + str(os.getpid()), 'w'); time.sleep(60)"
    lines: list[str] = []
    command = [sys.executable, "-c", program, str(tmp_path / "pid")]
    with within(20):
        assert launcher.launch(command, 2, "gloo", timeout=1, output=lines.append) == 124
    numbers = [int(path.name.removeprefix("pid")) for path in tmp_path.iterdir()]
    assert len(numbers) == 2
    for number in numbers:
        with pytest.raises(ProcessLookupError):
            os.kill(number, 0)
    assert threading.active_count() < 50


def test_the_launcher_prefixes_lines_and_returns_the_first_status() -> None:
    program = "import os, sys; k = int(os.environ['SHARDTENSOR_PROCESS_ID']); print('this is', k); sys.exit(7 * k)"
    lines: list[str] = []
    assert launcher.launch([sys.executable, "-c", program], 2, "gloo", timeout=30, output=lines.append) == 7
    assert sorted(lines[:-1]) == ["[0] this is 0", "[1] this is 1"]


LONG = """
import os
k = next(os.environ[v] for v in ("SHARDTENSOR_PROCESS_ID", "PMI_RANK", "OMPI_COMM_WORLD_RANK") if v in os.environ)
for _ in range(30):
    print(k * 70_000)
print(k, end="")
"""


@pytest.mark.parametrize("engine", ENGINES)
def test_long_lines_of_several_processes_are_not_mixed(engine: str) -> None:
    if engine == "mpi" and NO_MPI:
        pytest.skip(NO_MPI)
    lines: list[str] = []
    assert launcher.launch([sys.executable, "-c", LONG], 3, engine, timeout=50, output=lines.append) == 0
    wanted = [f"[{k}] {str(k) * n}" for k in range(3) for n in [70_000] * 30 + [1]]  # A pipe holds 65,536 bytes.
    assert sorted(lines) == sorted(wanted)


@pytest.mark.parametrize(("processes", "engine"), [(0, None), (2, "smoke")])
def test_the_launcher_refuses(processes: int, engine: str | None) -> None:
    with pytest.raises(ArgumentError, match=r"wanted|must be at least 1"):
        launcher.launch(["true"], processes, engine)


def test_the_launcher_leaves_no_pipes_and_threads_where_threads_are_limited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if NO_MPI:
        pytest.skip(NO_MPI)
    before, start, started = threading.active_count(), threading.Thread.start, []

    def only_one(thread: threading.Thread) -> None:
        if started:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(threading.Thread, "start", only_one)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        launcher.launch(["true"], 2, "mpi")
    assert threading.active_count() == before
    assert not list(tmp_path.iterdir())


def test_the_launcher_makes_no_pipes_where_other_users_can_replace_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if NO_MPI:
        pytest.skip(NO_MPI)
    tmp_path.chmod(0o777)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(BackendError, match=r"other users may write to .*; set TMPDIR"):
        launcher.launch(["true"], 2, "mpi")
    assert not list(tmp_path.iterdir())


CHILD = """
import multiprocessing, os, signal, sys
import numpy as np, shardtensor as st
st.distributed.initialize()
k, devices = st.distributed.process_index(), st.distributed.local_devices()
x, local = st.ones(8), st.make_mesh((len(devices),), ("x",), devices=devices)
y = st.device_put(np.arange(8.0), st.NamedSharding(local, st.P("x")))

def child():
    signal.alarm(20)
    calls = [
        lambda: st.distributed.sync_global_devices("a"), lambda: x + x, lambda: float(x.sum()), st.distributed.shutdown,
        st.distributed.initialize, lambda: st.distributed.process_allgather(1),
    ]
    for call in calls:
        try:
            call()
        except st.DistributedError as error:
            assert f"was forked from process {k} of a job" in str(error), error
        else:
            raise AssertionError("no error")
    y[2] = 5
    assert float(y.sum()) == 31
    assert st.pmap(lambda a: a + 1, [1, 2], devices=devices[:2]) == [2, 3]

for end in sys.argv[1:]:
    if not (pid := os.fork()):
        child()
        if end == "grandchild" and (pid := os.fork()):
            os._exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        child()
        if end == "exception":
            raise ValueError("of the child")
        sys.exit(3) if end == "exit" else os._exit(3)
    print(end, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
if len(sys.argv) < 3:
    print(float(x.sum()))
    sys.exit()
worker = multiprocessing.get_context("fork").Process(target=child)
worker.start()
worker.join()
print(worker.exitcode, float(x.sum()))
"""


@pytest.mark.parametrize(
    ("engine", "ends"),
    [
        ("mpi", ["_exit", "grandchild", "exit", "exception"]),
        pytest.param("gloo", ["exit"], marks=FULL),
        pytest.param("gloo", ["_exit", "grandchild", "exit", "exception"], marks=FULL),
    ],
    ids=["mpi", "gloo", "gloo, all"],
)
def test_the_child_of_a_fork_does_not_belong_to_the_job(engine: str, ends: list[str]) -> None:
    status, text = launch(engine, 2, "-c", CHILD, *ends)
    assert status == 0, text
    total = "0 8.0" if len(ends) > 1 else "8.0"
    for line in [*(f"{end} {1 if end == 'exception' else 3}" for end in ends), total]:
        assert text.count(f"] {line}") == 2, text
