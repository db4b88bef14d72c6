"""`Lifelines`: how the processes of a job learn at once that one of them has been killed.

Each process has a connection to process 0, over which nothing is sent as long as all is well. The operating system
closes the connections of a process that ends, however it does. A process that leaves says so before; of one that has
not, process 0 tells all others. So it is known which process was lost first, and none is blamed that ends because of
it.
"""

from __future__ import annotations

import contextlib
import hmac
import selectors
import socket
import struct
import threading
import weakref
from collections.abc import Callable

from shardtensor.host.fork import in_children

_NUMBER = struct.Struct("<i")
"""The number of a lost process, as process 0 sends it."""

_LEFT = -1
"""What process 0 sends before it leaves itself; the others send their own number."""

_TOKEN = 16
"""Bytes of the token that a process sends before its number, so that no stranger is taken for a process."""

_ALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
"""Seconds without an answer of the other host's system after which a connection is closed: about 25."""


class Lifelines:
    """The connections of this process: to process 0, or in that one to all others.

    Args:
        process: the number of this process.
        token: the same bytes in all processes of the job.

    Attributes:
        lost: the processes that have ended without leaving, in the order in which process 0 has noticed it.
    """

    def __init__(self, process: int, token: bytes) -> None:
        self.lost: list[int] = []
        self._process, self._token = process, token
        self._changed = threading.Condition()  # fork: no job in children
        self._sockets: set[socket.socket] = set()
        self._is_leaving = False
        self._said = threading.Event()  # fork: likewise
        _ALL.add(self)

    @classmethod
    def listening(cls, token: bytes) -> tuple[Lifelines, int]:
        """Returns those of process 0, and the port to which the others connect."""
        made = cls(0, token)
        if socket.has_dualstack_ipv6():
            listener = socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
        else:
            listener = socket.create_server(("", 0))
        made._sockets.add(listener)
        made._start(lambda: made._serve(listener))
        return made, int(listener.getsockname()[1])

    @classmethod
    def connecting(cls, process: int, token: bytes, address: tuple[str, int], seconds: float) -> Lifelines:
        """Returns those of another process.

        Raises:
            OSError: process 0 cannot be reached at this address in time.
        """
        made = cls(process, token)
        connection = socket.create_connection(address, seconds)
        connection.settimeout(None)
        _keep_alive(connection)
        connection.sendall(token + _NUMBER.pack(process))
        made._sockets.add(connection)
        made._start(lambda: made._listen(connection))
        return made

    def wait(self, seconds: float) -> list[int]:
        """Returns the processes that are lost, once there are some, or after that time."""
        with self._changed:
            self._changed.wait_for(lambda: self.lost, seconds)
            return sorted(self.lost)

    def wait_alone(self, seconds: float) -> None:
        """In process 0: waits until all other processes have ended, or for that time."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._sockets) == 1, seconds)

    def leave(self) -> None:
        """Says that this process ends, and closes its connections: it is not lost."""
        self._is_leaving = True
        connections = list(self._sockets)
        for connection in connections:
            with contextlib.suppress(OSError):  # It is the one that listens, or the other end has gone.
                connection.sendall(_NUMBER.pack(_LEFT if self._process == 0 else self._process))
        for connection in connections:
            with contextlib.suppress(OSError):  # Likewise.
                connection.shutdown(socket.SHUT_RDWR)  # This wakes the thread, which closes them.
        self._said.set()

    def forget(self) -> None:
        """Closes the connections without a word; in the child of a fork, since they would outlive the parent."""
        for connection in list(self._sockets):
            connection.close()

    def _start(self, function: Callable[[], None]) -> None:
        def run() -> None:
            function()
            if self._is_leaving:
                self._said.wait()
            self.forget()

        threading.Thread(target=run, name="shardtensor-lifeline", daemon=True).start()

    def _note(self, process: int) -> None:
        if not self._is_leaving:
            with self._changed:
                self.lost.append(process)
                self._changed.notify_all()

    def _listen(self, connection: socket.socket) -> None:
        """Waits for what process 0 says, or for its end."""
        while (number := _number(_received(connection, _NUMBER.size))) is not None:
            if number == _LEFT:
                return
            self._note(number)
        self._note(0)

    def _serve(self, listener: socket.socket) -> None:
        """Waits for the other processes, and for what each says, or for its end."""
        with selectors.DefaultSelector() as selector:
            selector.register(listener, selectors.EVENT_READ)
            peers: dict[socket.socket, bytes] = {}  # What each has said.
            while not self._is_leaving:
                for key, _ in selector.select():
                    if key.fileobj is listener:
                        self._accept(listener, selector, peers)
                        continue
                    connection = key.fileobj
                    assert isinstance(connection, socket.socket)
                    data = _received(connection, 64, whole=False)
                    peers[connection] += data
                    if not data or not self._is_known(peers[connection]):
                        selector.unregister(connection)
                        self._end(connection, peers.pop(connection), peers)

    def _accept(
        self, listener: socket.socket, selector: selectors.BaseSelector, peers: dict[socket.socket, bytes]
    ) -> None:
        try:
            connection, _ = listener.accept()
        except OSError:  # This process leaves, or the other one has gone.
            return
        _keep_alive(connection)
        peers[connection] = b""
        self._sockets.add(connection)
        selector.register(connection, selectors.EVENT_READ)

    def _is_known(self, said: bytes) -> bool:
        """Whether a process begins as one of the job does."""
        return hmac.compare_digest(said[:_TOKEN], self._token[: len(said)])

    def _end(self, connection: socket.socket, said: bytes, peers: dict[socket.socket, bytes]) -> None:
        """Tells the others of a process that has ended without leaving."""
        with self._changed:
            self._sockets.discard(connection)
            self._changed.notify_all()
        connection.close()
        number = _number(said[_TOKEN : _TOKEN + _NUMBER.size])
        has_left = len(said) > _TOKEN + _NUMBER.size
        if number is None or has_left or self._is_leaving or not self._is_known(said):
            return
        self._note(number)
        for other in peers:
            with contextlib.suppress(OSError):  # It has ended, too: this is noticed next.
                other.sendall(_NUMBER.pack(number))


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


def _received(connection: socket.socket, size: int, whole: bool = True) -> bytes:
    """Returns what the other end has sent; nothing once it has closed the connection."""
    try:
        return connection.recv(size, socket.MSG_WAITALL if whole else 0)
    except OSError:
        return b""


def _number(data: bytes) -> int | None:
    return _NUMBER.unpack(data)[0] if len(data) == _NUMBER.size else None
