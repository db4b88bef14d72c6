"""Programs on two hosts: two network namespaces with their own addresses, connected by one link.

Creating namespaces requires the rights of root; without them the tests are skipped.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shardtensor.launcher import find_mpiexec, free_port
from tests.communication.test_engines import NO_GLOO, NO_MPI

pytestmark = pytest.mark.full
ROOT = Path(__file__).parents[2]
PROGRAM = Path(__file__).with_name("hosts_program.py")
ENGINES = [
    pytest.param("mpi", marks=pytest.mark.skipif(bool(NO_MPI), reason=NO_MPI)),
    pytest.param("gloo", marks=pytest.mark.skipif(bool(NO_GLOO), reason=NO_GLOO)),
]
LIMIT = 180.0
RATE = 20_000_000
"""Bits per second of the slow link."""
ADDRESSES = ("10.213.7.1", "10.213.7.2")
AGENT = """#!/bin/sh
# What mpiexec calls in place of ssh: options, an address, and the words of a command for the shell of that host.
while [ "${1#-}" != "$1" ]; do shift; done
case $1 in %s) host=%s ;; *) host=%s ;; esac
shift
exec ip netns exec $host sh -c "$*"
"""


class Hosts:
    """Two network namespaces and the link between them."""

    def __init__(self, folder: Path) -> None:
        self.names = tuple(f"st{os.getpid()}{letter}" for letter in "ab")
        self.links = tuple(f"l{name}" for name in self.names)
        self.folder = folder
        self.agent = folder / "agent.sh"
        self.agent.write_text(AGENT % (ADDRESSES[0], *self.names))
        self.agent.chmod(self.agent.stat().st_mode | stat.S_IXUSR)

    def __enter__(self) -> Hosts:
        try:
            for name in self.names:
                ip("netns", "add", name)
            ip("link", "add", self.links[0], "type", "veth", "peer", "name", self.links[1])
            for name, link, address in zip(self.names, self.links, ADDRESSES, strict=True):
                ip("link", "set", link, "netns", name)
                ip("-n", name, "addr", "add", f"{address}/24", "dev", link)
                ip("-n", name, "link", "set", link, "up")
                ip("-n", name, "link", "set", "lo", "up")
        except subprocess.CalledProcessError as error:
            self.__exit__()
            pytest.skip(f"network namespaces cannot be made here: {error.stderr.strip()}")
        return self

    def __exit__(self, *_: object) -> None:
        for name in self.names:  # Its end of the link ends with a namespace.
            with contextlib.suppress(subprocess.CalledProcessError):
                ip("netns", "delete", name)

    def slow_down(self) -> None:
        """Limits the link to 20 Mbit/s, in both directions."""
        for name, link in zip(self.names, self.links, strict=True):
            limit = ("rate", str(RATE), "burst", "32k", "latency", "400ms")
            run("tc", "-n", name, "qdisc", "add", "dev", link, "root", "tbf", *limit)

    def take_down(self) -> None:
        """Cuts the link."""
        ip("-n", self.names[0], "link", "set", self.links[0], "down")

    @contextlib.contextmanager
    def job(self, engine: str, event: str, each: int = 1) -> Iterator[list[Path]]:
        """Starts the program on both hosts, by one mpiexec or by a command for each process, and returns the files in
        which the processes write.

        Args:
            engine, event: see `hosts_program`.
            each: the number of processes of each host.
        """
        program = [sys.executable, str(PROGRAM), event, str(self.folder), str(2 * each)]
        if engine == "mpi":
            mpiexec = find_mpiexec()
            assert mpiexec
            launcher = ["-launcher", "ssh", "-launcher-exec", str(self.agent), "-hosts", ",".join(ADDRESSES)]
            commands = {self.names[0]: [[mpiexec, *launcher, "-n", str(2 * each), "-ppn", str(each), *program]]}
        else:
            address = f"{ADDRESSES[0]}:{free_port()}"
            numbers = {name: range(each * k, each * (k + 1)) for k, name in enumerate(self.names)}
            commands = {name: [[*program, address, str(k)] for k in own] for name, own in numbers.items()}
        environ = {k: v for k, v in os.environ.items() if not k.startswith(("PMI", "HYDI", "OMPI", "SHARDTENSOR"))}
        environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), environ.get("PYTHONPATH", "")]))
        # UCX, on which some MPIs stand, finds that both namespaces are of one machine, and uses shared memory.
        environ["UCX_TLS"] = "tcp"
        environ["RES_OPTIONS"] = "timeout:1 attempts:1"  # No server of names can be reached from here.
        running = [
            subprocess.Popen(["ip", "netns", "exec", name, *command], env=environ, start_new_session=True)
            for name, own in commands.items()
            for command in own
        ]
        try:
            yield [self.folder / f"{k}.txt" for k in range(2 * each)]
        finally:
            for number in self.processes():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(number, signal.SIGKILL)
            for process in running:
                process.wait()

    def processes(self, program: str = "") -> list[int]:
        """The processes on both hosts whose command line contains ``program``."""
        found = []
        for name in self.names:
            for number in run("ip", "netns", "pids", name).split():
                with contextlib.suppress(OSError):
                    if program in Path(f"/proc/{number}/cmdline").read_text():
                        found.append(int(number))
        return found


def run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def ip(*arguments: str) -> None:
    run("ip", *arguments)


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        pytest.skip(f"there is no {missing[0]} here, which makes network namespaces")
    with Hosts(tmp_path) as made:
        yield made


def wait_until(condition: Callable[[], bool], texts: list[Path], limit: float = LIMIT) -> None:
    end = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < end, [text.read_text() for text in texts if text.exists()]
        time.sleep(0.1)


def contain(texts: list[Path], *words: str) -> bool:
    return all(text.exists() and any(word in text.read_text() for word in words) for text in texts)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("prepare", "each"), [(None, 1), (None, 2), (Hosts.slow_down, 1)], ids=["fast", "two processes on each", "slow"]
)
def test_two_hosts_exchange(engine: str, prepare: Callable[[Hosts], None] | None, each: int, hosts: Hosts) -> None:
    if prepare:
        prepare(hosts)
    begin = time.monotonic()
    with hosts.job(engine, "core", each) as texts:
        wait_until(lambda: not hosts.processes(PROGRAM.name) and time.monotonic() > begin + 1, texts)
    assert contain(texts, "done"), [text.read_text() for text in texts]
    links = [link for link in hosts.links for _ in range(each)]
    for text, link in zip(texts, links, strict=True):  # Each process has the link of its own host only.
        assert [other in text.read_text() for other in hosts.links] == [other == link for other in hosts.links]
    if prepare:  # 8 MiB in each direction.
        assert time.monotonic() - begin > 8 * 2**20 * 8 / RATE


@pytest.mark.parametrize("engine", ENGINES)
def test_a_link_that_goes_down_is_an_error_on_both_hosts(engine: str, hosts: Hosts) -> None:
    with hosts.job(engine, "down") as texts:
        wait_until(lambda: contain(texts, "exchanged"), texts)
        hosts.take_down()
        wait_until(lambda: contain(texts, " within 3 s", "has ended or cannot be reached"), texts)
        wait_until(lambda: not hosts.processes(PROGRAM.name), texts)
    assert not contain(texts[:1], "done")
