"""`Lines`: the output of the processes of a job. Each line has the number of its process; a traceback that several
processes print is passed on once.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from shardtensor.communication.between_processes.difference import grouped, numbers_text

HELD = 2.0
"""Seconds that a traceback is held back, until other processes have printed theirs."""

_PRINTED = 0.5
"""Seconds within which a process prints a traceback, and what belongs to it; lines that follow later do not."""

_MOST = 1 << 22
"""The number of characters that are held back."""

_BEGIN = re.compile(
    r"Traceback \(most recent call last\):$"
    r"|  \+ Exception Group Traceback "
    r'|  File ".*", line \d+$'  # A syntax error of the program has no other first line.
    r"|shardtensor\.errors\.DistributedError: "
)
"""The first line of a traceback."""

_HIDDEN = re.compile(r"^\(\d+ frames? of shardtensor (?:is|are) hidden; (.*) to see (?:it|them)\)$")
"""The line below a shortened traceback, with a number that may differ between processes that raise the same error."""


class _Held(NamedTuple):
    """The lines of a process that are held back, from the first one of a traceback on."""

    since: float
    lines: list[str]


class Lines:
    """Passes on the lines of several processes, each with the number of its process, and keeps the first error of the
    function that receives them.

    A traceback, and what its process prints just after it, is held back for a moment: until the process goes on, all
    others have printed one too, or `HELD` is over. Where several processes print the
    same one it is passed on once, with the numbers of all of them, and so are the last lines where only these are the
    same: the message of an error that has other places in each process.

    Args:
        output: receives the lines.
        clock: returns the time in seconds.

    Attributes:
        error: the first error of ``output``; lines are dropped afterwards, so that no process waits until they are
            read.
    """

    def __init__(self, output: Callable[[str], object], clock: Callable[[], float] = time.monotonic) -> None:
        self.error: BaseException | None = None
        self._output, self._clock = output, clock
        self._lock = threading.Lock()  # fork: the launcher's process runs no user code.
        self._open: set[int] = set()
        self._held: dict[int, _Held] = {}
        self._size = 0  # The number of characters in it.

    def write(self, line: str) -> None:
        """Passes on a line of the launcher, or of the program that has started the processes."""
        with self._lock:
            self._write(line)

    def open(self, process: int) -> None:
        """Adds a process, of which lines will be read."""
        with self._lock:
            self._open.add(process)

    def read(self, process: int, line: str) -> None:
        """Passes on or holds back a line that a process has printed."""
        with self._lock:
            complete = self._complete()
            if process in complete and not line.startswith(" "):
                self._release(complete)
            if process not in self._held:
                if not _BEGIN.match(line):
                    self._write(f"[{process}] {line}")
                    return
                self._held[process] = _Held(self._clock(), [])
            self._held[process].lines.append(_HIDDEN.sub(r"(frames of shardtensor are hidden; \1 to see them)", line))
            self._size += len(line)
            if self._size > _MOST:
                self._release(list(self._held))

    def close(self, process: int) -> None:
        """Removes a process, of which all lines have been read."""
        with self._lock:
            self._open.discard(process)
            if not self._open:
                self._release(list(self._held))

    def check(self) -> None:
        """Passes on what has been held back long enough, or until all processes have printed a traceback."""
        if not self._held:
            return
        with self._lock:
            complete = self._complete()
            now = self._clock()
            if self._open <= set(complete) or any(now - held.since > HELD for held in self._held.values()):
                self._release(complete)

    def _complete(self) -> list[int]:
        """Returns the processes whose tracebacks are complete. The lock is held."""
        if not self._held:
            return []
        now = self._clock()
        return [k for k, held in self._held.items() if now - held.since > _PRINTED]

    def _release(self, some: Iterable[int]) -> None:
        """Passes on the held lines of some processes. The lock is held."""
        held = {k: self._held.pop(k) for k in some}
        self._size = sum(len(line) for h in self._held.values() for line in h.lines)
        for processes in grouped({k: tuple(h.lines[-1:]) for k, h in held.items()}).values():
            alike = grouped({k: tuple(held[k].lines) for k in processes})
            common = _common_end(list(alike)) if len(alike) > 1 else 0
            for lines, some in alike.items():
                self._write_from(some, lines[: len(lines) - common])
            self._write_from(processes, held[processes[0]].lines[len(held[processes[0]].lines) - common :])

    def _write_from(self, processes: Iterable[int], lines: Iterable[str]) -> None:
        for line in lines:
            self._write(f"[{numbers_text(processes)}] {line}")

    def _write(self, line: str) -> None:
        if self.error is None:
            try:
                self._output(line)
            except BaseException as error:  # Raised by `launch`, once the job has ended.
                self.error = error


def _common_end(blocks: Sequence[Sequence[str]]) -> int:
    """Returns the number of last lines that all blocks share, without those of the stack, which are indented."""
    count = 0
    for lines in zip(*map(reversed, blocks), strict=False):
        if len(set(lines)) > 1 or lines[0].startswith(" "):
            break
        count += 1
    return count
