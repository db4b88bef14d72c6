"""File systems whose operations fail, or end the process."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Collection
from typing import Any

from shardtensor.files.atomic import BESIDE, Disk

OPERATIONS = ("create", "write", "flush", "close", "make_folder", "rename", "remove_file", "remove_empty_folder")


class Faulty(Disk):
    """Fails at one operation, or at all from it on, and does not flush, which takes time.

    Args:
        at: the number of the operation, of those with the names in ``only``.
        error: called with the path; what it returns is raised, if it is an error.
        lasts: whether all operations of these names fail from then on.
        only: the names of the operations.
        most: the bytes that are written at once.

    Attributes:
        log: the names and paths of the operations.
        failed: those that have failed.
    """

    def __init__(
        self, at: int, error: Callable[[str], BaseException | None], *, lasts: bool = False,
        only: Collection[str] = OPERATIONS, most: int = 1 << 30,
    ) -> None:  # fmt: skip
        self.at, self.error, self.lasts, self.only, self.most = at, error, lasts, only, most
        self.log: list[tuple[str, str]] = []
        self.failed: list[tuple[str, str]] = []
        self.paths: dict[int, str] = {}
        self.count = 0
        self.lock = threading.Lock()

    def _pass(self, name: str, path: str) -> None:
        with self.lock:  # Several threads write.
            self.log.append((name, path))
            if name not in self.only:
                return
            self.count += 1
            count = self.count
        if count - 1 == self.at or (self.lasts and count > self.at):
            error = self.error(path)
            if error is not None:
                self.failed.append((name, path))
                raise error

    def create(self, path: str) -> int:
        self._pass("create", path)
        descriptor = super().create(path)
        self.paths[descriptor] = path
        return descriptor

    def write(self, descriptor: int, data: memoryview) -> int:
        self._pass("write", self.paths[descriptor])
        return super().write(descriptor, data[: self.most])

    def flush(self, descriptor: int) -> None:
        self._pass("flush", os.readlink(f"/proc/self/fd/{descriptor}"))

    def close(self, descriptor: int) -> None:
        path = self.paths.pop(descriptor)  # Before another thread gets the same number.
        super().close(descriptor)
        self._pass("close", path)

    def make_folder(self, path: str) -> None:
        self._pass("make_folder", path)
        super().make_folder(path)

    def rename(self, path: str, new: str) -> None:
        self._pass("rename", path)
        super().rename(path, new)

    def remove_file(self, path: str) -> None:
        self._pass("remove_file", path)
        super().remove_file(path)

    def remove_empty_folder(self, path: str) -> None:
        self._pass("remove_empty_folder", path)
        super().remove_empty_folder(path)


def is_leftover(name: str) -> bool:
    """Whether a name is one of those for what is not complete, moved aside or being deleted."""
    return BESIDE.fullmatch(name) is not None


def raises(number: int) -> Callable[[str], OSError]:
    """Returns a function that returns an error of the system without the name of a file."""
    return lambda path: OSError(number, os.strerror(number))


def kills(path: Any) -> None:
    """Kills the process."""
    os.kill(os.getpid(), signal.SIGKILL)
