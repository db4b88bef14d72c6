"""What this process may use of its host: cores and memory, as its affinity mask and its control groups allow."""

from __future__ import annotations

import functools
import math
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from shardtensor.errors import BackendError
from shardtensor.host.fork import in_children

_GROUPS = Path("/sys/fs/cgroup")


_native_id: Callable[[], int] = getattr(threading, "get_native_id", threading.get_ident)
"""The thread's number in the operating system: gevent replaces ``threading.get_ident`` by the number of a greenlet."""

_main_thread = getattr(threading.main_thread(), "native_id", threading.main_thread().ident)


def in_main_thread() -> bool:
    """Whether this is the thread that runs the handlers of signals."""
    return _native_id() == _main_thread


@in_children
def _become_main() -> None:
    """In the child of a fork: the thread that forked is the main thread, and has another number than in the parent."""
    global _main_thread
    _main_thread = _native_id()


def count_from_environment(name: str, most: int) -> int | None:
    """A whole number from 1 to ``most`` that an environment variable holds; None where it is not set.

    Raises:
        BackendError: the variable holds something else.
    """
    given = os.environ.get(name)
    if given is None:
        return None
    digits = given.lstrip("0") if given.isascii() and given.isdigit() else ""
    if not digits or len(digits) > len(str(most)) or int(digits) > most:  # Python refuses to read very long numbers
        shown = repr(given) if len(given) <= _SHOWN else f"{given[:_SHOWN]!r}…"
        raise BackendError(
            f"{name} is {shown}; wanted a whole number from 1 to {most:,}: set it before the start, or leave it unset"
        )
    return int(digits)


_SHOWN = 60
"""As many characters of a variable's value are in an error."""


def usable_cores() -> int:
    """How many cores this process may keep busy: those it may run on; fewer where a control group limits its time."""
    try:
        allowed = len(os.sched_getaffinity(0))
    except AttributeError:  # not on this operating system
        allowed = os.cpu_count() or 1
    return min(allowed, _granted_cores() or allowed)


@functools.cache
def _granted_cores() -> int | None:
    """How many cores' time the control groups grant, part of a core counted as one; None where they do not limit it."""
    granted = []
    for group in _groups():
        quota, _, period = _read(group / "cpu.max").partition(" ")  # version 2
        if not period:
            quota, period = _read(group / "cpu.cfs_quota_us"), _read(group / "cpu.cfs_period_us")  # version 1
        if quota.isdigit() and period.isdigit() and int(period):
            granted.append(max(math.ceil(int(quota) / int(period)), 1))
    return min(granted, default=None)


def memory() -> tuple[int, int] | None:
    """Bytes (free, total) of memory that this process can still get, and could get at most; None where nobody says."""
    said = dict(line.split(":") for line in _read("/proc/meminfo").splitlines())
    if "MemAvailable" not in said:
        return None
    free, total = (sum(int(said[n].split()[0]) << 10 for n in names if n in said) for names in _COUNTED)
    for group, most, current in _limited_memory():
        used = _read(group / current)
        if used.isdigit():
            caches = dict(line.split() for line in _read(group / "memory.stat").splitlines())
            free = min(free, most - int(used) + int(caches.get("inactive_file", 0)))  # files can be read again
            total = min(total, most)
    return max(free, 0), total


_COUNTED = (("MemAvailable", "SwapFree"), ("MemTotal", "SwapTotal"))


@functools.cache
def _limited_memory() -> list[tuple[Path, int, str]]:
    """The control groups that limit memory: the folder, the limit, and the file that says what is used."""
    files = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))
    said = [(group, _read(group / most), current) for group in _groups() for most, current in files]
    return [(group, int(most), current) for group, most, current in said if most.isdigit() and int(most) < _NO_LIMIT]


_NO_LIMIT = 1 << 60
"""Version 1 writes a limit where there is none: nearly the largest number."""


def _groups() -> Iterator[Path]:
    """The folders of the control groups that this process is in, innermost first."""
    for line in _read("/proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        roots = [_GROUPS / name for name in controllers.split(",")] if controllers else [_GROUPS]
        for root in roots:
            inner = root / path.lstrip("/")
            yield from (folder for folder in (inner, *inner.parents) if folder.is_relative_to(root))


def _read(path: Path | str) -> str:
    """The text of one of the kernel's files; nothing where there is none."""
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""
