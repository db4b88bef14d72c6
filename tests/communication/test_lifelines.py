"""A process whose connections are closed without a word is lost; one that leaves is not. All ends are in one process."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator

import pytest

from shardtensor.communication.lifelines import Lifelines

TOKEN = bytes(range(16))


class Job:
    """The lifelines of four processes."""

    def __init__(self) -> None:
        first, self.port = Lifelines.listening(TOKEN)
        self.all = [first, *(self.connected(k) for k in range(1, 4))]
        wait_until(lambda: len(first._sockets) == 4)

    def connected(self, process: int) -> Lifelines:
        return Lifelines.connecting(process, TOKEN, ("127.0.0.1", self.port), 5)

    def kill(self, process: int) -> None:
        """Closes the connections of a process as the system does when the process ends."""
        victim = self.all[process]
        victim._is_leaving = True  # Its thread says nothing more.
        for connection in list(victim._sockets):
            connection.shutdown(socket.SHUT_RDWR)
        victim._said.set()


def wait_until(condition: object, seconds: float = 5) -> None:
    deadline = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.fixture
def job() -> Iterator[Job]:
    made = Job()
    yield made
    for lifelines in made.all:
        lifelines.leave()


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
    wait_until(lambda: len(job.all[0]._sockets) == 3)
    job.all[0].leave()
    assert [job.all[k].wait(0.1) for k in range(3)] == [[]] * 3


def test_process_0_waits_until_the_others_have_ended(job: Job) -> None:
    begin = time.monotonic()
    job.all[0].wait_alone(0.05)
    assert time.monotonic() - begin >= 0.05
    for k in (1, 3):
        job.all[k].leave()
    job.kill(2)
    job.all[0].wait_alone(5)
    assert time.monotonic() - begin < 4


@pytest.mark.parametrize("data", [b"", b"GET / HTTP/1.1\r\n\r\n", TOKEN[:8], TOKEN, b"x" * 16 + b"\2\0\0\0"])
def test_strangers_are_not_taken_for_processes(job: Job, data: bytes) -> None:
    with socket.create_connection(("127.0.0.1", job.port)) as stranger:
        stranger.sendall(data)
    with socket.create_connection(("127.0.0.1", job.port)) as silent:
        job.kill(1)
        assert job.all[0].wait(5) == [1]
        assert job.all[3].wait(5) == [1]
        silent.close()


def test_connections_are_closed_in_children(job: Job) -> None:
    """A child would otherwise keep the connection of a parent that is killed open."""
    child = os.fork()
    if not child:
        os._exit(0 if all(s.fileno() == -1 for lifelines in job.all for s in lifelines._sockets) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert job.all[1].wait(0.05) == []
