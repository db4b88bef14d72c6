"""A process whose connections are closed, and that has not left, is lost. All ends are in one process."""

from __future__ import annotations

import errno
import os
import signal
import socket
import time
from collections.abc import Iterator
from unittest import mock

import pytest

from shardtensor.communication.between_processes.lifelines import Lifelines
from shardtensor.communication.engine_protocol import Launch
from shardtensor.communication.gloo_engine import GlooEngine, _Rendezvous

TOKEN = bytes(range(16))


class Job:
    """The lifelines of four processes.

    Args:
        count: how many of them are connected.
        seconds: how long the port is open.
    """

    def __init__(self, count: int = 4, seconds: float = 20) -> None:
        first, self.port = Lifelines.listening(TOKEN, 4, "127.0.0.1", seconds)
        self.all = [first]
        for k in range(1, count):
            self.connect(k)

    def connect(self, process: int) -> None:
        self.all.append(Lifelines.connecting(process, TOKEN, ("127.0.0.1", self.port), 5))
        wait_until(lambda: len(self.all[0]._processes) == process)

    def kill(self, process: int) -> None:
        """Closes the connections of a process as the system does when the process ends."""
        victim = self.all[process]
        victim._is_leaving = True  # Its thread sends nothing more.
        for connection in list(victim._sockets):
            connection.shutdown(socket.SHUT_RDWR)
        victim._has_sent.set()

    def leave(self) -> None:
        for lifelines in self.all:
            lifelines.leave()


def wait_until(condition: object, seconds: float = 5) -> None:
    deadline = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.fixture
def job() -> Iterator[Job]:
    made = Job()
    yield made
    made.leave()


def test_a_process_that_is_killed_is_known_to_all_others_at_once(job: Job) -> None:
    job.kill(2)
    assert [job.all[k].wait(5) for k in (0, 1, 3)] == [[2]] * 3
    job.all[1].leave()  # Those that end because of it are not lost.
    job.kill(3)
    wait_until(lambda: job.all[0].lost == [2, 3])
    assert job.all[0].wait(5) == [2, 3]


def test_process_0_that_is_killed_is_known_to_all_others(job: Job) -> None:
    job.kill(0)
    assert [job.all[k].wait(5) for k in (1, 2, 3)] == [[0]] * 3


def test_processes_that_leave_are_not_lost(job: Job) -> None:
    job.all[3].leave()
    wait_until(lambda: len(job.all[0]._processes) == 2)
    job.all[0].leave()
    assert [job.all[k].wait(0.1) for k in range(3)] == [[]] * 3


def test_process_0_waits_until_the_others_have_ended(job: Job) -> None:
    begin = time.monotonic()
    job.all[0].wait_for_ends(3, 0.05)
    assert time.monotonic() - begin >= 0.05
    for k in (1, 3):
        job.all[k].leave()
    job.kill(2)
    job.all[0].wait_for_ends(3, 5)
    assert time.monotonic() - begin < 4


@pytest.mark.parametrize("data", [b"", b"GET / HTTP/1.1\r\n\r\n", TOKEN[:8], TOKEN, b"x" * 16 + b"\2\0\0\0"])
def test_other_programs_that_connect_are_not_taken_for_processes(data: bytes) -> None:
    job = Job(3)
    with socket.create_connection(("127.0.0.1", job.port)) as stranger:
        stranger.sendall(data)
    with socket.create_connection(("127.0.0.1", job.port)):
        job.kill(1)
        assert job.all[0].wait(5) == [1]
        assert job.all[2].wait(5) == [1]
        job.all[2].leave()
        begin = time.monotonic()
        job.all[0].wait_for_ends(2, 5)
        assert time.monotonic() - begin < 4
    job.leave()


def is_refused(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 5).close()
    except ConnectionRefusedError:
        return True
    return False


@pytest.mark.parametrize("is_complete", [True, False])
def test_a_silent_connection_is_closed_once_all_processes_have_come_or_in_time(is_complete: bool) -> None:
    job = Job(3, 20 if is_complete else 0.3)
    with socket.create_connection(("127.0.0.1", job.port), 5) as silent:
        if is_complete:
            job.connect(3)
        assert silent.recv(1) == b""
    wait_until(lambda: is_refused(job.port))  # The connection is closed a moment before the port.
    job.kill(2)
    assert job.all[1].wait(5) == [2]
    job.leave()


def test_process_0_does_not_spin_while_it_cannot_accept_connections() -> None:
    job = Job(1)
    with mock.patch.object(socket.socket, "accept", side_effect=OSError(errno.EMFILE, "")) as accept:
        with socket.create_connection(("127.0.0.1", job.port)):
            wait_until(lambda: accept.called)
            time.sleep(0.15)
        assert accept.call_count < 5
    job.connect(1)  # It goes on.
    job.leave()


def test_leaving_does_not_raise_sigpipe() -> None:
    """A program may let the signal end it, as programs in pipes do."""
    child = os.fork()
    if not child:
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        Job(3).leave()  # The port is still open.
        connection, other = socket.socketpair()
        other.close()
        lost = Lifelines(1)
        lost._processes[connection] = 0
        lost.leave()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_connections_are_closed_in_children(job: Job) -> None:
    """A child would otherwise keep the connection of a parent that is killed open."""
    child = os.fork()
    if not child:
        os._exit(0 if all(s.fileno() == -1 for lifelines in job.all for s in lifelines._sockets) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert job.all[1].wait(0.05) == []


class Store(dict[str, str]):
    """A store of keys, of which none is missing."""

    def set(self, key: str, value: str) -> None:
        self[key] = value

    def get(self, key: str) -> bytes:  # type: ignore[override]
        return self[key].encode()


def lifelines(store: Store, process: int, address: str) -> Lifelines:
    return _Rendezvous(store, Launch(process, 2, address, "the call"), time.monotonic() + 5).lifelines()


def test_processes_connect_to_the_own_address_of_process_0() -> None:
    """The address of the store may be one that forwards its port only."""
    store = Store()
    first = lifelines(store, 0, "127.0.0.1:8476")
    other = lifelines(store, 1, "192.0.2.1:8476")  # Reserved for documentation: no host has it.
    time.sleep(0.5)  # Process 0 accepts the connection in a thread, long before a job ends.
    first.leave()
    assert other.wait(0.05) == []
    other.leave()


def test_a_process_that_cannot_connect_goes_on_without() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.warns(RuntimeWarning, match=f"process 1 cannot connect to process 0 at 127.0.0.1:{port}"):
        other = lifelines(Store(lifelines=f"127.0.0.1 {port} {TOKEN.hex()}"), 1, "127.0.0.1:8476")
    assert other.wait(0.01) == []
    other.leave()


@pytest.mark.parametrize("failing", ["__init__", "all_connected"])
def test_a_start_that_fails_leaves(failing: str) -> None:
    owner = GlooEngine if failing == "__init__" else _Rendezvous
    with (
        mock.patch("shardtensor.communication.gloo_engine.import_module"),
        mock.patch.object(_Rendezvous, "join"),
        mock.patch.object(_Rendezvous, "lifelines") as made,
        mock.patch.object(GlooEngine, "__init__", return_value=None),
        mock.patch.object(owner, failing, side_effect=KeyboardInterrupt),
        pytest.raises(KeyboardInterrupt),
    ):
        GlooEngine.start(Launch(0, 2, "127.0.0.1:8476", "the call"), 5)
    made.return_value.leave.assert_called_once_with()
