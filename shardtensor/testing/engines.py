"""The conformance suite of engines: each test runs a small program in several processes."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np

from shardtensor.backend import HostArray, load
from shardtensor.communication.between_processes.launchers import engine_and_launch, load_engine
from shardtensor.communication.between_processes.processes import JOB
from shardtensor.engine import ArrivalError, DeviceEngine, Engine, LateError, LostError
from shardtensor.launcher import launch

LIMIT = 60.0
"""Seconds after which the processes of a test are ended."""

SOON = 2.0
"""Seconds within which calls that fail have to fail."""


class EngineTests:
    """The conformance tests of an engine: a pytest class, to be subclassed.

    Attributes:
        engine: the name of the engine.
        launcher: how processes are started: ``"gloo"`` gives them an address, and ``"mpi"`` runs mpiexec.
        kills_all: whether the launcher ends all processes as soon as one is killed.
        module: the module that runs the programs below in each process; another one calls `main` of this one.

    >>> from shardtensor.testing import EngineTests
    >>> class TestMine(EngineTests):
    ...     engine = "mine"
    """

    engine: str = ""
    launcher: str = "gloo"
    kills_all: bool = False
    module: str = __name__

    def run(self, programs: str, processes: int) -> tuple[int, list[str]]:
        """Runs one of the programs below, or several, and returns the exit status and the lines of output."""
        lines: list[str] = []
        command = [sys.executable, "-m", self.module, self.engine, *programs.split()]
        return launch(command, processes, self.launcher, timeout=LIMIT, output=lines.append), lines

    def passes(self, program: str, processes: int) -> None:
        """Asserts that a program ends without an error, and prints ``ok`` in every process."""
        status, lines = self.run(program, processes)
        answers = [f"[{k}] ok" for k in range(processes)]
        assert (status, sorted(lines)) == (0, answers), f"engine {self.engine!r}: {program} printed {lines}"

    def test_agree_returns_the_records_of_all_processes_in_order(self) -> None:
        """`Engine.agree`."""
        self.passes("agree", 3)

    def test_messages_of_any_size_arrive_unchanged(self) -> None:
        """`Engine.exchange` between all pairs of processes."""
        self.passes("exchange", 3)

    def test_every_process_can_broadcast(self) -> None:
        """`Engine.broadcast` from each process."""
        self.passes("broadcast", 3)

    def test_messages_that_cross_do_not_block_each_other(self) -> None:
        """Two processes send 16 MiB to each other at the same time, from read-only memory."""
        self.passes("cross", 2)

    def test_arrays_of_devices_arrive_unchanged(self) -> None:
        """`DeviceEngine.exchange_arrays`, where the engine has it."""
        if issubclass(load_engine(self.engine), DeviceEngine):
            self.passes("arrays", 3)

    def test_arrays_that_do_not_arrive_are_an_error_where_they_are_read(self) -> None:
        """Deadlines of `DeviceEngine.exchange_arrays`, where the engine has it."""
        if not issubclass(load_engine(self.engine), DeviceEngine):
            return
        lines = self.run("late_arrays", 3)[1]
        assert {"[0] ok", "[2] ok"} <= set(lines), f"engine {self.engine!r}: late_arrays printed {lines}"

    def test_a_process_that_does_not_come_is_a_timeout_that_names_it(self) -> None:
        """Deadlines, and `Engine.absent`."""
        lines = self.run("late", 3)[1]
        assert {"[0] ok", "[2] ok"} <= set(lines), f"engine {self.engine!r}: late printed {lines}"

    def test_a_process_that_is_killed_is_an_error_in_the_others(self) -> None:
        """A lost connection, and `Engine.absent`, unless the launcher ends the others."""
        status, lines = self.run("killed", 3)
        assert status in (128 + signal.SIGKILL, signal.SIGKILL)
        assert self.kills_all or {"[0] ok", "[2] ok"} <= set(lines), f"engine {self.engine!r} printed {lines}"

    def test_errors_of_signal_handlers_are_passed_on(self) -> None:
        """A handler that raises errors of the classes that engines derive theirs from, while an engine waits."""
        lines = self.run("handler", 4)[1]
        answers = {"[0] ok", "[1] ok", "[2] ok"}
        assert answers <= set(lines), f"engine {self.engine!r}: handler printed {lines}"

    def test_a_notice_ends_the_wait_of_the_others(self) -> None:
        """`Engine.notify` and `Engine.notices`, where the engine has them."""
        lines = self.run("notice", 3)[1]
        assert {"[0] ok", "[2] ok"} <= set(lines), f"engine {self.engine!r}: notice printed {lines}"

    def test_abort_ends_the_process_with_the_status(self) -> None:
        """`Engine.abort`."""
        status, lines = self.run("abort", 2)
        assert status == 3, f"engine {self.engine!r}: abort ended with {status} and printed {lines}"

    def test_exit_ends_all_processes_with_the_status(self) -> None:
        """`Engine.exit`; the launcher passes on what they have printed."""
        status, lines = self.run("exit", 2)
        is_right = status == 3 and {"[0] ok", "[1] ok"} <= set(lines)
        assert is_right, f"engine {self.engine!r}: exit ended with {status} and printed {lines}"


def _say_ok() -> None:
    sys.stdout.write("ok\n")  # In one write, so that lines of several processes are not mixed.
    sys.stdout.flush()


def _soon() -> float:
    return time.monotonic() + SOON


def _later() -> float:
    return time.monotonic() + LIMIT


def _agree(engine: Engine) -> None:
    for round in range(20):
        records = engine.agree(bytes([engine.process_index, round]) * 40, _later())
        assert records == [bytes([k, round]) * 40 for k in range(engine.process_count)], records


def _exchange(engine: Engine) -> None:
    own, count = engine.process_index, engine.process_count
    rng = np.random.default_rng(0)  # The same in all processes.
    for largest in (1, 100, 1 << 16, 3 << 20):
        sizes = rng.integers(0, largest + 1, (count, count))
        content = [[rng.integers(0, 256, n, np.uint8) for n in row] for row in sizes]
        outgoing = {k: m for k, m in enumerate(content[own]) if k != own and m.size}
        incoming = {k: np.zeros(sizes[k, own], np.uint8) for k in range(count) if k != own and sizes[k, own]}
        engine.exchange(outgoing, incoming, _later())
        for k, message in incoming.items():
            assert np.array_equal(message, content[k][own]), (k, largest)


def _broadcast(engine: Engine) -> None:
    for root in range(engine.process_count):
        for size in (1, 1000, 1 << 20):
            message = np.full(size, engine.process_index, np.uint8)
            engine.broadcast(message, root, _later())
            assert (message == root).all(), (root, size)


def _cross(engine: Engine) -> None:
    other = 1 - engine.process_index
    message = np.full(16 << 20, engine.process_index, np.uint8)
    message.flags.writeable = False
    received = np.zeros_like(message)
    engine.exchange({other: message}, {other: received}, _later())
    assert (received == other).all()


def _arrays(engine: DeviceEngine) -> None:
    own, count = engine.process_index, engine.process_count
    backend = load(engine.device_backend)
    device = backend.devices()[0]

    def content(sender: int, receiver: int, round: int) -> list[HostArray]:
        dtypes = [np.dtype(letter) for letter in "bhdF"[: (sender + 2 * receiver + round) % 5]]
        return [np.arange(1 + 1000 * round + n).astype(dtype) + sender for n, dtype in enumerate(dtypes)]

    others = [k for k in range(count) if k != own]
    for round in range(6):
        with backend.on(device):
            sent = {k: [backend.from_host(a, device) for a in content(own, k, round)] for k in others}
            received = {k: [backend.xp.zeros(a.shape, dtype=a.dtype) for a in content(k, own, round)] for k in others}
            outgoing, incoming = ({k: a for k, a in arrays.items() if a} for arrays in (sent, received))
            engine.exchange_arrays(outgoing, incoming, _later())
            del sent, outgoing  # What is on its way does not depend on who holds it.
            doubled = {k: [a + a for a in arrays] for k, arrays in received.items()}
            for k, arrays in doubled.items():
                for array, right in zip(arrays, content(k, own, round), strict=True):
                    assert np.array_equal(backend.to_host(array, device), right + right), (k, round)


def _late_arrays(engine: DeviceEngine) -> None:
    if engine.process_index == 1:
        time.sleep(SOON + 15)  # The launcher ends it before.
    backend = load(engine.device_backend)
    device, begin = backend.devices()[0], time.monotonic()
    with backend.on(device):
        arrays = {k: [backend.from_host(np.zeros(100), device)] for k in range(3) if k != engine.process_index}
        into = {k: [backend.xp.zeros((100,), dtype=np.dtype(np.float64))] for k in arrays}

        def read() -> None:
            engine.exchange_arrays(arrays, into, _soon())
            backend.to_host(into[1][0], device)

        _raises((ArrivalError, LateError), read)
    assert time.monotonic() - begin < SOON + 1.5
    _raises((ArrivalError,), lambda: engine.agree(b"x", _soon()))
    _end_without_1(engine)


def _late(engine: Engine) -> None:
    if engine.process_index == 1:
        time.sleep(SOON + 15)  # The launcher ends it before.
    begin = time.monotonic()
    _raises((LateError,), lambda: engine.agree(b"x", _soon()))
    assert time.monotonic() - begin < SOON + 1.5
    _end_without_1(engine)


def _end_without_1(engine: Engine) -> None:
    assert engine.absent() == [1]
    _say_ok()
    time.sleep(4)  # The other process prints, too.
    os._exit(1)


def _killed(engine: Engine) -> None:
    if engine.process_index == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    _raises((LateError, LostError), lambda: engine.agree(b"x", _soon()))
    _end_without_1(engine)


def _handler(engine: Engine) -> None:
    if engine.process_index == 3:
        time.sleep(SOON + 15)  # The launcher ends it before.
    raised = (TimeoutError, ConnectionError, RuntimeError)[engine.process_index]("of the handler")

    def handler(number: int, frame: Any) -> None:
        raise raised

    signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    caught: BaseException | None = None
    try:
        engine.agree(b"x", _later())
    except type(raised) as error:
        caught = error
    assert caught is raised
    _say_ok()
    time.sleep(SOON)  # The other processes print, too.
    os._exit(1)


def _notice(engine: Engine) -> None:
    if type(engine).notify is Engine.notify:  # The engine has no notices.
        _say_ok()
        os._exit(1)
    if engine.process_index == 1:
        engine.notify("no such file")
        engine.absent()
        time.sleep(SOON)
        os._exit(1)
    begin = time.monotonic()
    _raises((LostError,), lambda: engine.agree(b"x", _later()))
    assert time.monotonic() - begin < SOON + 1.5
    assert engine.notices() == {1: "no such file"}
    assert engine.absent() == []
    _say_ok()
    time.sleep(1)  # The other process prints, too.
    os._exit(1)


def _abort(engine: Engine) -> None:
    engine.abort(3)


def _exit(engine: Engine) -> None:
    _say_ok()
    engine.agree(b"x", _later())
    engine.exit(3)


def _raises(kinds: tuple[type[Exception], ...], function: Callable[[], Any]) -> None:
    try:
        function()
    except kinds:
        return
    raise AssertionError(f"no error, but wanted one of {kinds}")


def _lose(error: ArrivalError) -> NoReturn:
    raise error


def main(name: str, *programs: str) -> None:
    """Runs programs on the engine of that name."""
    JOB.was_requested = True  # The processes are connected here, without st.distributed.initialize.
    kind, start = engine_and_launch(name, None, None, None)
    engine = kind.start(start, LIMIT)
    if isinstance(engine, DeviceEngine):
        engine.join_devices(_lose, str, _later())
    for program in programs:
        globals()[f"_{program}"](engine)
    engine.agree(b"end", _later())
    engine.close(_later())
    _say_ok()


if __name__ == "__main__":
    main(*sys.argv[1:])
