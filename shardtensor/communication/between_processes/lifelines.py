"""`Lifelines`: how the processes of a job learn at once that one of them has been killed.

Each process has a connection to process 0, over which nothing is sent as long as all is well. The operating system
closes the connections of a process that ends, however it does. A process that leaves sends a message first; if there
was none, process 0 tells all others that the process is lost. So it is known which process was lost first, and a
process that ends because of it is not reported.
"""

from __future__ import annotations

import contextlib
import hmac
import selectors
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable

from shardtensor.host.fork import in_children

_NUMBER = struct.Struct("<i")
"""The number of a lost process, as process 0 sends it."""

_LEFT = -1
"""The message of process 0 before it leaves; the others send their own number."""

_TOKEN = 16
"""Bytes of the token that a process sends before its number: connections of other programs do not have it."""

_ALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
"""Seconds without an answer of the other host's system after which a connection is closed: about 25."""

_PAUSE = 0.1
"""Seconds until process 0 tries again to accept a connection: it may have reached the limit of open files."""


class Lifelines:
    """The connections of this process: to process 0, or in that one to all others.

    A process without a connection neither learns of lost processes nor is found to be lost.

    Args:
        process: the number of this process.

    Attributes:
        lost: the processes that have ended without leaving, in the order in which process 0 has noticed it.
    """

    def __init__(self, process: int) -> None:
        self.lost: list[int] = []
        self._process = process
        self._changed = threading.Condition()  # fork: no job in children
        self._ended = 0  # The number of processes whose connections have been closed.
        self._sockets: set[socket.socket] = set()
        self._processes: dict[socket.socket, int] = {}  # The processes at the other ends.
        self._is_leaving = False
        self._has_sent = threading.Event()  # fork: likewise
        _ALL.add(self)

    @classmethod
    def listening(cls, token: bytes, count: int, address: str, seconds: float) -> tuple[Lifelines, int]:
        """Returns those of process 0, and the port to which the others connect. It is open until all have, or for that
        time.

        Args:
            token: secret bytes, which the other processes send.
            count: the number of processes of the job.
            address: the address of this host to listen on.
            seconds: for how long.
        """
        lifelines = cls(0)
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listener = socket.create_server((address, 0), family=family)
        lifelines._sockets.add(listener)
        deadline = time.monotonic() + seconds
        lifelines._start(lambda: lifelines._serve(listener, token, count, deadline))
        return lifelines, int(listener.getsockname()[1])

    @classmethod
    def connecting(cls, process: int, token: bytes, address: tuple[str, int], seconds: float) -> Lifelines:
        """Returns those of another process.

        Raises:
            OSError: process 0 cannot be reached at this address in time.
        """
        lifelines = cls(process)
        connection = socket.create_connection(address, seconds)
        lifelines._sockets.add(connection)
        connection.settimeout(None)
        _keep_alive(connection)
        _send(connection, token + _NUMBER.pack(process))
        lifelines._processes[connection] = 0
        lifelines._start(lambda: lifelines._listen(connection))
        return lifelines

    def wait(self, seconds: float) -> list[int]:
        """Returns the processes that are lost, once there are some, or after that time."""
        with self._changed:
            self._changed.wait_for(lambda: self.lost, seconds)
            return sorted(self.lost)

    def wait_for_ends(self, count: int, seconds: float) -> None:
        """In process 0: waits until that many other processes have ended, or for that time."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended >= count, seconds)

    def leave(self) -> None:
        """Tells the other end that this process is not lost, and closes the connections."""
        self._is_leaving = True
        for connection in list(self._processes):
            with contextlib.suppress(OSError):  # The other end has gone.
                _send(connection, _NUMBER.pack(_LEFT if self._process == 0 else self._process))
        for connection in list(self._sockets):
            with contextlib.suppress(OSError):  # Likewise.
                connection.shutdown(socket.SHUT_RDWR)  # This wakes the thread, which closes them.
        self._has_sent.set()

    def forget(self) -> None:
        """Only closes the connections; in the child of a fork, since they would outlive the parent."""
        for connection in list(self._sockets):
            connection.close()

    def _start(self, function: Callable[[], None]) -> None:
        def run() -> None:
            function()
            if self._is_leaving:
                self._has_sent.wait()
            self.forget()

        threading.Thread(target=run, name="shardtensor-lifeline", daemon=True).start()

    def _note(self, process: int) -> None:
        if not self._is_leaving:
            with self._changed:
                self.lost.append(process)
                self._changed.notify_all()

    def _listen(self, connection: socket.socket) -> None:
        """Notes the processes that process 0 reports as lost, until it leaves or is lost itself."""
        while (number := _number(_received(connection, _NUMBER.size, socket.MSG_WAITALL))) is not None:
            if number == _LEFT:
                return
            self._note(number)
        self._note(0)

    def _serve(self, listener: socket.socket, token: bytes, count: int, deadline: float) -> None:
        """Accepts the connections of the other processes, and reports those that are closed."""
        with selectors.DefaultSelector() as selector:
            selector.register(listener, selectors.EVENT_READ, b"")
            while self._sockets and not self._is_leaving:
                is_open = listener in self._sockets
                for key, _ in selector.select(max(deadline - time.monotonic(), 0) if is_open else None):
                    connection = key.fileobj
                    assert isinstance(connection, socket.socket)
                    if connection is listener:
                        self._accept(listener, selector)
                    elif data := _received(connection, 64):
                        selector.modify(connection, selectors.EVENT_READ, key.data + data)
                        self._identify(connection, key.data + data, token, selector)
                    else:
                        self._end(connection, key.data, selector)
                if is_open and (len(self._processes) + self._ended == count - 1 or time.monotonic() > deadline):
                    for other in self._sockets.difference(self._processes):  # Those of other programs, too.
                        self._close(other, selector)

    def _accept(self, listener: socket.socket, selector: selectors.BaseSelector) -> None:
        try:
            connection, _ = listener.accept()
        except OSError:
            if not self._is_leaving:
                time.sleep(_PAUSE)
            return
        _keep_alive(connection)
        self._sockets.add(connection)
        selector.register(connection, selectors.EVENT_READ, b"")

    def _identify(
        self, connection: socket.socket, received: bytes, token: bytes, selector: selectors.BaseSelector
    ) -> None:
        """Notes the process of a connection, or closes that of another program."""
        if not hmac.compare_digest(received[:_TOKEN], token[: len(received)]):
            self._close(connection, selector)
        elif (number := _number(received[_TOKEN : _TOKEN + _NUMBER.size])) is not None:
            self._processes[connection] = number

    def _end(self, connection: socket.socket, received: bytes, selector: selectors.BaseSelector) -> None:
        """Closes a connection, and tells the others of a process that has ended without leaving."""
        number = self._processes.pop(connection, None)
        self._close(connection, selector)
        if number is None:
            return
        with self._changed:
            self._ended += 1
            self._changed.notify_all()
        if len(received) > _TOKEN + _NUMBER.size or self._is_leaving:  # It has left.
            return
        self._note(number)
        for other in self._processes:
            with contextlib.suppress(OSError):  # It has ended, too: this is noticed next.
                _send(other, _NUMBER.pack(number))

    def _close(self, connection: socket.socket, selector: selectors.BaseSelector) -> None:
        selector.unregister(connection)
        self._sockets.discard(connection)
        connection.close()


_ALL: weakref.WeakSet[Lifelines] = weakref.WeakSet()


@in_children
def _forget() -> None:
    for lifelines in list(_ALL):
        lifelines.forget()


def _keep_alive(connection: socket.socket) -> None:
    """Lets the connection end if the other host is switched off."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _ALIVE.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _send(connection: socket.socket, message: bytes) -> None:
    """Sends a message; where the other end has gone this is an error and not the signal SIGPIPE, which a program may
    have set to end it.
    """
    connection.sendall(message, getattr(socket, "MSG_NOSIGNAL", 0))


def _received(connection: socket.socket, size: int, flags: int = 0) -> bytes:
    """Returns what the other end has sent; nothing once it has closed the connection."""
    try:
        return connection.recv(size, flags)
    except OSError:
        return b""


def _number(data: bytes) -> int | None:
    return _NUMBER.unpack(data)[0] if len(data) == _NUMBER.size else None
