"""The engine of a program that runs in one process."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NoReturn

from shardtensor.communication.engine_protocol import Bytes, Engine, Launch


class LocalEngine(Engine):
    """The engine of one process: there are no other processes to send to, and it takes the same path as the others."""

    name = "local"
    process_index = 0
    process_count = 1

    @classmethod
    def start(cls, launch: Launch | None, timeout: float) -> LocalEngine:
        """See `Engine`."""
        return cls()

    def agree(self, record: bytes, deadline: float) -> list[bytes]:
        """See `Engine`."""
        return [record]

    def exchange(self, outgoing: Mapping[int, Bytes], incoming: Mapping[int, Bytes], deadline: float) -> None:
        """See `Engine`."""

    def broadcast(self, message: Bytes, root: int, deadline: float) -> None:
        """See `Engine`."""

    def absent(self) -> list[int]:
        """See `Engine`."""
        return []

    def close(self, deadline: float) -> None:
        """See `Engine`."""

    def abort(self, status: int) -> NoReturn:
        """See `Engine`."""
        os._exit(status)
