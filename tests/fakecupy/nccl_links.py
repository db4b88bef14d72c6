"""The connections of a simulated NCCL between processes: each is a socket, and messages have a length before them.

What a process sends is copied when its GPU comes to it; what it receives is kept until its GPU comes to it. A peer that
ends is found out only by those that wait for a message of it, who then wait until they abort, as the real library does.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import struct
import threading
from queue import SimpleQueue
from typing import Any

from .errors import NcclError

ID = 128
_HEAD = struct.Struct(
    "<H16s"
)  # in a unique id: the port of rank 0, and a random number that identifies the communicator
_HELLO = struct.Struct("<16sHH")  # of a rank to another one: that number, the rank, and its own port
_LENGTH = struct.Struct("<Q")
_REMOTE_ERROR = 6

_roots: dict[bytes, socket.socket] = {}


def unique_id() -> tuple[int, ...]:
    """Returns a new name of a communicator, as signed characters: this process is its rank 0."""
    root = socket.create_server(("127.0.0.1", 0))
    token = secrets.token_bytes(16)
    _roots[token] = root
    return tuple(b - 256 if b > 127 else b for b in _HEAD.pack(root.getsockname()[1], token).ljust(ID, b"\0"))


class Links:
    """The connections of one rank to all others; creating them waits until all ranks have come.

    Attributes:
        error: why a message does not come.
        ended: is set by `abort` and `destroy`.
    """

    def __init__(self, count: int, unique: tuple[int, ...], rank: int) -> None:
        port, token = _HEAD.unpack(bytes(b & 255 for b in unique)[: _HEAD.size])
        self.error: BaseException | None = None
        self.ended = threading.Event()
        self._peers: dict[int, socket.socket] = {}
        self._inboxes: dict[int, SimpleQueue[bytes | None]] = {}
        self._outboxes: dict[int, SimpleQueue[bytes | None]] = {}
        self._senders: list[threading.Thread] = []
        if rank == 0:
            self._accept(_roots.pop(token), token, count)
        else:
            self._connect(port, token, count, rank)
        for peer, connection in self._peers.items():
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._inboxes[peer], self._outboxes[peer] = SimpleQueue(), SimpleQueue()
            threading.Thread(target=self._read, args=(peer,), daemon=True).start()
            self._senders.append(threading.Thread(target=self._write, args=(peer,), daemon=True))
            self._senders[-1].start()

    def _accept(self, root: socket.socket, token: bytes, count: int) -> None:
        ports = {}
        with root:
            while len(self._peers) < count - 1:
                connection = root.accept()[0]
                sent, peer, port = _HELLO.unpack(_exactly(connection, _HELLO.size))
                if sent == token:
                    self._peers[peer], ports[peer] = connection, port
        table = b"".join(ports[peer].to_bytes(2, "little") for peer in range(1, count))
        for connection in self._peers.values():
            connection.sendall(table)

    def _connect(self, port: int, token: bytes, count: int, rank: int) -> None:
        with socket.create_server(("127.0.0.1", 0)) as own:
            hello = _HELLO.pack(token, rank, own.getsockname()[1])
            first = self._peers[0] = socket.create_connection(("127.0.0.1", port))
            first.sendall(hello)
            table = _exactly(first, 2 * (count - 1))
            for peer in range(1, rank):
                at = int.from_bytes(table[2 * peer - 2 : 2 * peer], "little")
                self._peers[peer] = socket.create_connection(("127.0.0.1", at))
                self._peers[peer].sendall(hello)
            while len(self._peers) < count - 1:
                connection = own.accept()[0]
                self._peers[_HELLO.unpack(_exactly(connection, _HELLO.size))[1]] = connection

    def _read(self, peer: int) -> None:
        connection, inbox = self._peers[peer], self._inboxes[peer]
        with contextlib.suppress(OSError):
            while head := _exactly(connection, _LENGTH.size):
                inbox.put(_exactly(connection, _LENGTH.unpack(head)[0]))
        inbox.put(None)

    def _write(self, peer: int) -> None:
        with contextlib.suppress(OSError):  # The peer has ended; the sender gets no error.
            while (message := self._outboxes[peer].get()) is not None:
                self._peers[peer].sendall(_LENGTH.pack(len(message)) + message)

    def send(self, peer: int, message: bytes) -> None:
        """Sends a message, without waiting for the peer."""
        self._outboxes[peer].put(message)

    def receive(self, peer: int, nbytes: int) -> bytes | None:
        """Returns the next message of a peer; None when the communicator is aborted while it does not come, or has
        another length than this process expects.
        """
        message = self._inboxes[peer].get()
        if message is not None and len(message) == nbytes:
            return message
        if message is None and not self.ended.is_set():
            # CuPy knows the numbers up to 5, and looks this one up in a table.
            self.error = KeyError(_REMOTE_ERROR)
        self.ended.wait()
        return None

    def check(self) -> None:
        if self.ended.is_set():
            raise NcclError(4, "the communicator is destroyed")
        if self.error is not None:
            raise self.error

    def close(self, abort: bool) -> None:
        """Disconnects this rank. Without ``abort``, what it has sent arrives."""
        for outbox in self._outboxes.values():
            outbox.put(None)
        if not abort:
            for sender in self._senders:
                sender.join()
        self.ended.set()
        for connection in self._peers.values():
            with contextlib.suppress(OSError):  # The peer has closed it.
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()


def _exactly(connection: socket.socket, size: int) -> bytes:
    """Returns so many bytes; fewer, or none, if the connection ends before."""
    parts: list[Any] = []
    while size and (part := connection.recv(min(size, 1 << 20))):
        parts.append(part)
        size -= len(part)
    return b"".join(parts) if not size else b""
