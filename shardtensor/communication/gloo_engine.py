"""The engine over Gloo, by torch.distributed: processes are started separately, and find each other by an address."""

from __future__ import annotations

import contextlib
import datetime
import os
import secrets
import socket
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from importlib import import_module
from queue import SimpleQueue
from typing import Any, NoReturn

from shardtensor.communication.between_processes.lifelines import Lifelines
from shardtensor.communication.engine_protocol import Bytes, Engine, LateError, Launch, LostError
from shardtensor.errors import ArgumentError, BackendError
from shardtensor.tracebacks import warn_caller

_CHUNK = 1 << 30
"""Bytes of one message."""

_SIGNS = 3.0
"""Seconds within which the other processes give a sign of life."""

_CHECKS = 0.5
"""Seconds between two checks of whether another process has told that it makes no more calls."""

_NOTICED = 1.0
"""Seconds within which process 0 tells that a process has been lost."""

_CONNECTED = 5.0
"""Seconds within which a process connects to process 0, which answers others already."""

_POLL = 0.02
"""Seconds between two checks of the other processes while they start."""


class GlooEngine(Engine):
    """The engine over Gloo.

    Process 0 runs a store of keys at the address (torch's `TCPStore`), by which the processes find each other. Calls of
    Gloo cannot be interrupted, so that one thread makes them, while the caller waits for it and can receive signals.
    """

    name = "gloo"
    launchers = frozenset({"address", "torchrun", "slurm"})

    def __init__(self, store: Any, lifelines: Lifelines, launch: Launch, address: str, deadline: float) -> None:
        dist = import_module("torch.distributed")
        self.process_index, self.process_count = launch.process_index, launch.process_count
        self._store, self._lifelines = store, lifelines
        self._thread, self._side = _Thread(), _Thread()
        options = dist.ProcessGroupGloo._Options()
        # By default, Gloo uses the address of this host's name, which other hosts may not be able to reach.
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=_own_address(address))]
        options._timeout = _until(deadline)
        self._group = self._call(
            lambda: dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), *launch[:2], options), deadline
        )

    @classmethod
    def start(cls, launch: Launch | None, timeout: float) -> GlooEngine:
        """See `Engine`."""
        try:
            dist = import_module("torch.distributed")
        except ImportError:
            raise BackendError("engine 'gloo' needs PyTorch: `pip install 'shardtensor[torch]'`") from None
        if launch is None or launch.address is None:
            raise ArgumentError(
                "engine 'gloo' needs the address of process 0, the number of processes and the number of this "
                "process, such as initialize('10.0.0.1:8476', num_processes=4, process_id=2)"
            )
        refused = _wrong_number(launch)
        # A process that is refused tells the others, if process 0 is there already.
        deadline = time.monotonic() + (min(timeout, _SIGNS) if refused else timeout)
        host, port = host_and_port(launch.address)
        is_first, thread = launch.process_index == 0, _Thread()
        starting = thread.submit(lambda: dist.TCPStore(host, port, None, is_first, _until(deadline), False))
        try:
            store = _result(starting, deadline)
        except _StoreError as error:
            raise (ArgumentError(refused) if refused else _unreachable(launch, is_first, error)) from error
        rendezvous = _Rendezvous(_Calls(store, thread, deadline), launch, deadline)
        rendezvous.join()
        lifelines = rendezvous.lifelines()
        try:
            engine = cls(store, lifelines, launch, host, deadline)
            rendezvous.all_connected()
        except BaseException as error:
            lifelines.leave()
            if not isinstance(error, LateError | LostError):
                raise
            raise LateError(
                f"the processes of {launch.process_count} have come, but one of them did not connect to the others in "
                f"time, or has ended: {error}"
            ) from error
        return engine

    def agree(self, record: bytes, deadline: float) -> list[bytes]:
        """See `Engine`."""
        torch = import_module("torch")
        own = torch.frombuffer(bytearray(record), dtype=torch.uint8)
        records = [torch.empty_like(own) for _ in range(self.process_count)]
        self._call(lambda: self._group.allgather([records], [own]).wait(_until(deadline)), deadline)
        return [r.numpy().tobytes() for r in records]

    def exchange(self, outgoing: Mapping[int, Bytes], incoming: Mapping[int, Bytes], deadline: float) -> None:
        """See `Engine`."""

        def run() -> None:
            works = [self._group.recv([part], k, 0) for k, message in incoming.items() for part in _parts(message)]
            works += [self._group.send([part], k, 0) for k, message in outgoing.items() for part in _parts(message)]
            for work in works:
                work.wait(_until(deadline))

        if outgoing or incoming:
            self._call(run, deadline)

    def broadcast(self, message: Bytes, root: int, deadline: float) -> None:
        """See `Engine`."""

        def run() -> None:
            for part in _parts(message):
                self._group.broadcast(part, root).wait(_until(deadline))

        self._call(run, deadline)

    def absent(self) -> list[int]:
        """See `Engine`."""
        if lost := self._lifelines.wait(_NOTICED):
            return lost
        deadline = time.monotonic() + _SIGNS
        others = [k for k in range(self.process_count) if k != self.process_index]

        def find() -> list[int]:
            missing = others
            self._store.set(f"here/{self.process_index}", b"")
            while missing and time.monotonic() < deadline:
                missing = [k for k in missing if not self._store.check([f"here/{k}"])]
                time.sleep(_POLL)
            return missing

        finding = _Thread().submit(find)  # The engine's own thread may hang in the call that failed.
        if wait([finding], _SIGNS + 1).done and finding.exception() is None:
            return finding.result()  # type: ignore[no-any-return]
        return [0] if self.process_index else []  # The store itself does not answer: it is in process 0.

    def notify(self, message: str) -> None:
        """See `Engine`."""
        self._side.submit(lambda: self._store.set(f"notice/{self.process_index}", message))

    def notices(self) -> dict[int, str]:
        """See `Engine`."""
        if 0 in self._lifelines.wait(_POLL):  # The store has gone, too: torch would print warnings.
            return {}
        reading = self._side.submit(self._read_notices)
        wait([reading], 1)  # The store has gone with process 0, or does not answer.
        return reading.result() if reading.done() and reading.exception() is None else {}

    def _read_notices(self) -> dict[int, str]:
        others = [k for k in range(self.process_count) if k != self.process_index]
        return {k: self._store.get(f"notice/{k}").decode() for k in others if self._store.check([f"notice/{k}"])}

    def close(self, deadline: float) -> None:
        """See `Engine`."""
        # The store ends with process 0, which therefore waits until the others have left.
        try:
            self._call(lambda: self._leave(deadline), deadline)
        finally:
            self._lifelines.leave()

    def _leave(self, deadline: float) -> None:
        self._group.shutdown()
        self._group = None
        left = self._store.add("left", 1)
        while self.process_index == 0 and left < self.process_count and time.monotonic() < deadline:
            time.sleep(_POLL)
            left = self._store.add("left", 0)
        self._store = None

    def linger(self, seconds: float) -> None:
        """See `Engine`. Process 0 has the store, and tells the others which process is lost."""
        if self.process_index == 0:
            self._lifelines.wait_for_ends(self.process_count - 1, seconds)

    def abort(self, status: int) -> NoReturn:
        """See `Engine`. Gloo closes the connections, so that the other processes receive an error."""
        self._lifelines.leave()
        os._exit(status)

    def _call(self, function: Callable[[], Any], deadline: float) -> Any:
        """Returns the result of a call of Gloo, made by the engine's thread."""
        calling = self._thread.submit(function)
        reading: Future[dict[int, str]] | None = None
        # Gloo's own time limit is the same; a little later than it, the call is given up.
        while not wait([calling], min(_CHECKS, max(deadline + 1 - time.monotonic(), 0))).done:
            if time.monotonic() > deadline + 1:
                raise LateError
            if self._lifelines.lost:
                raise LostError
            if reading is None:
                reading = self._side.submit(self._read_notices)
            elif reading.done():
                if reading.exception() is None and reading.result():
                    raise LostError
                reading = None
        # The error of the call is not raised here by waiting for it: signal handlers may raise the same classes.
        error = calling.exception()
        if isinstance(error, RuntimeError):
            kind = LateError if "imed out" in str(error) or time.monotonic() > deadline else LostError
            raise kind(str(error)) from None
        return calling.result()


class _Thread:
    """A thread that makes one call after the other.

    It is a daemon: a call that hangs does not keep the process from ending. An executor of `concurrent.futures` takes
    no calls any more when the interpreter shuts down, which is when a process leaves its job.
    """

    def __init__(self) -> None:
        self._calls: SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = SimpleQueue()  # fork: no job in children
        threading.Thread(target=self._work, name="shardtensor-gloo", daemon=True).start()

    def submit(self, function: Callable[[], Any]) -> Future[Any]:
        """Returns the future result of a call."""
        future: Future[Any] = Future()
        self._calls.put((function, future))
        return future

    def _work(self) -> None:
        while True:
            function, future = self._calls.get()
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)


class _StoreError(Exception):
    """A store of torch has raised an error, or does not answer."""


class _Calls:
    """The calls of a store, made by a thread: they cannot be interrupted, and block while the store does not answer."""

    def __init__(self, store: Any, thread: _Thread, deadline: float) -> None:
        self._store, self._thread, self._deadline = store, thread, deadline

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._store, name)
        return lambda *arguments: _result(self._thread.submit(lambda: method(*arguments)), self._deadline)


def _result(calling: Future[Any], deadline: float) -> Any:
    """Returns the result of a call of a store in a thread.

    Raises:
        _StoreError: the call has failed, or has not returned some seconds after the deadline. Torch keeps its limit to
            a second or two only, and a thread that returns from it while the interpreter ends aborts the process.
    """
    if not wait([calling], max(deadline + 2.5 - time.monotonic(), 0)).done:
        raise _StoreError("timed out")
    if isinstance(error := calling.exception(), (RuntimeError, ValueError)):
        raise _StoreError(str(error)) from error
    return calling.result()


class _Rendezvous:
    """The start of the processes: each announces itself in the store, and waits for the others."""

    def __init__(self, store: Any, launch: Launch, deadline: float) -> None:
        self.store, self.launch, self.deadline = store, launch, deadline
        self._missing = list(range(launch.process_count))

    def join(self) -> None:
        """Announces this process, and waits until all have."""
        try:
            self._announce()
            self._wait()
        except _StoreError as error:  # The store is in process 0, which may be stopped, or whose time limit has passed.
            missing = [k for k in self._missing if k not in (0, self.launch.process_index)]
            others = f", and processes {missing} of {self.launch.process_count} have not come" if missing else ""
            raise LateError(
                f"process 0 does not answer any more: it has ended or failed already{others}; start all of them again"
            ) from error

    def _announce(self) -> None:
        index, count = self.launch[:2]
        if reason := _wrong_number(self.launch):
            self._refuse(reason)
        if self.store.add(f"taken/{index}", 1) > 1:
            self._refuse(f"two processes have the number {index} of {count}; give each its own process_id")
        self.store.set(f"count/{index}", str(count))

    def _wait(self) -> None:
        count = self.launch.process_count
        while self._missing:
            self._check_refused()
            self._missing = [k for k in self._missing if not self.store.check([f"count/{k}"])]
            if time.monotonic() > self.deadline:
                raise LateError(
                    f"processes {self._missing} of {count} have not come; start them, or pass another "
                    "initialization_timeout"
                )
            if self._missing:
                time.sleep(_POLL)
        counts = [int(self.store.get(f"count/{k}")) for k in range(count)]
        if wrong := [k for k, n in enumerate(counts) if n != counts[0]]:
            self._refuse(f"process 0 has num_processes={counts[0]}, and process {wrong[0]} has {counts[wrong[0]]}")

    def lifelines(self) -> Lifelines:
        """Connects this process to process 0, so that each learns which one is killed.

        Process 0 publishes its own address and a port, since the address of the store may be one that forwards a single
        port. A process that cannot connect there goes on with the signs of life of `GlooEngine.absent`.
        """
        process, count = self.launch[:2]
        seconds = max(self.deadline - time.monotonic(), 1)
        try:
            if process == 0:
                host = _own_address(host_and_port(self.launch.address or "")[0])
                token = secrets.token_bytes(16)
                lifelines, port = Lifelines.listening(token, count, host, seconds)
                self.store.set("lifelines", f"{host} {port} {token.hex()}")
                return lifelines
            host, number, digits = self.store.get("lifelines").decode().split()
        except _StoreError as error:
            raise LateError(f"process 0 does not answer any more: {error}; start all of them again") from error
        address = host, int(number)
        try:
            return Lifelines.connecting(process, bytes.fromhex(digits), address, min(seconds, _CONNECTED))
        except OSError as error:
            warn_caller(
                f"initialize: process {process} cannot connect to process 0 at {host}:{number} ({error}), so that it "
                "takes some seconds to find out which process has been killed; open the ports of the hosts to each "
                "other"
            )
            return Lifelines(process)

    def all_connected(self) -> None:
        """Registers that this process is connected: one that comes later is not of this job."""
        self.store.set("started", b"")

    def _check_refused(self) -> None:
        if self.store.check(["refused"]):
            raise ArgumentError(self.store.get("refused").decode())

    def _refuse(self, reason: str) -> NoReturn:
        """Raises an error here, and in the processes that still wait for others."""
        if self.store.check(["started"]):
            raise ArgumentError(f"at {self.launch.address}, a job is running already: {reason}; use another port")
        with contextlib.suppress(_StoreError):  # The store has gone if process 0 has raised its own error.
            self.store.set("refused", reason)
        raise ArgumentError(reason)


def _wrong_number(launch: Launch) -> str:
    index, count = launch[:2]
    if 0 <= index < count:
        return ""
    return f"process_id is {index}; wanted a number from 0 to {count - 1}, one less than num_processes"


def host_and_port(address: str) -> tuple[str, int]:
    """Splits an address.

    Raises:
        ArgumentError: it is not of the form ``host:port``.
    """
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise ArgumentError(f"the address of process 0 is {address!r}; wanted 'host:port', such as '10.0.0.1:8476'")
    return host.strip("[]"), int(port)


def _unreachable(launch: Launch, is_first: bool, error: Exception) -> Exception:
    host, port = host_and_port(launch.address or "")
    resolving = _Thread().submit(lambda: socket.getaddrinfo(host, port))
    if wait([resolving], _SIGNS).done and isinstance(reason := resolving.exception(), OSError):
        return ArgumentError(f"the host name {host!r} of process 0 does not resolve: {reason}")
    if is_first and "imed out" not in str(error):
        return ArgumentError(
            f"process 0 cannot open port {port} of this host: another program, or another job, uses it, or {host} is "
            f"not this host; choose another port ({str(error).splitlines()[0]})"
        )
    return LateError(
        f"process 0 does not answer at {launch.address}: it has not been started, it has ended or failed already, or "
        "the port is closed"
    )


def _own_address(host: str) -> str:
    """Returns the address of this host that other hosts reach it by: that of its connection to process 0."""
    family, _, _, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as s:
        s.connect(target)  # Sends nothing.
        return str(s.getsockname()[0])


def _parts(message: Bytes) -> list[Any]:
    torch = import_module("torch")
    with warnings.catch_warnings():  # torch has no read-only tensors and warns of it; these are only read.
        warnings.simplefilter("ignore", UserWarning)
        return [torch.from_numpy(message[k : k + _CHUNK]) for k in range(0, len(message), _CHUNK)]


def _until(deadline: float) -> datetime.timedelta:
    return datetime.timedelta(seconds=max(deadline - time.monotonic(), 1e-3))
