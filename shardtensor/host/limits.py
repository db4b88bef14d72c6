"""The resources of the host that this process may use: cores and memory, limited by its affinity mask and its control
groups.
"""

from __future__ import annotations

import functools
import math
import os
import threading
from collections.abc import Callable, Iterator

from shardtensor.errors import BackendError
from shardtensor.host.fork import in_children

_GROUPS = "/sys/fs/cgroup"


_native_id: Callable[[], int] = getattr(threading, "get_native_id", threading.get_ident)
"""Returns the operating system's id of the calling thread. ``threading.get_ident`` is not used, because gevent patches
it to return the id of a greenlet.
"""

_main_thread = getattr(threading.main_thread(), "native_id", threading.main_thread().ident)


def in_main_thread() -> bool:
    """Returns whether the calling thread is the main thread, which runs signal handlers."""
    return _native_id() == _main_thread


@in_children
def _become_main() -> None:
    """Updates the main thread's id in the child of a fork: the thread that forked is the main thread, with a new id."""
    global _main_thread
    _main_thread = _native_id()


def count_from_environment(name: str, most: int) -> int | None:
    """Returns the value of the environment variable ``name`` as an integer from 1 to ``most``; None if it is not set.

    Raises:
        BackendError: the variable has another value.
    """
    text = os.environ.get(name)
    if text is None:
        return None
    digits = text.lstrip("0") if text.isascii() and text.isdigit() else ""
    # The length is checked first, since int() rejects very long strings.
    if not digits or len(digits) > len(str(most)) or int(digits) > most:
        shown = repr(text) if len(text) <= _SHOWN else f"{text[:_SHOWN]!r}…"
        raise BackendError(
            f"{name} is {shown}; wanted an integer from 1 to {most:,}: set it before the program starts, or unset it"
        )
    return int(digits)


_SHOWN = 60
"""The maximum number of characters of a variable's value in an error message."""


def usable_cores() -> int:
    """Returns the number of cores that this process may keep busy: those in its affinity mask, or fewer if a control
    group limits its CPU time.
    """
    try:
        allowed = len(os.sched_getaffinity(0))
    except AttributeError:  # Only some operating systems have affinity masks.
        allowed = os.cpu_count() or 1
    return min(allowed, _granted_cores() or allowed)


@functools.cache
def _granted_cores() -> int | None:
    """Returns the CPU time that the control groups grant, in cores and rounded up; None if they do not limit it."""
    granted = []
    for group in _groups():
        quota, _, period = _read(f"{group}/cpu.max").partition(" ")  # cgroup version 2
        if not period:
            quota, period = _read(f"{group}/cpu.cfs_quota_us"), _read(f"{group}/cpu.cfs_period_us")  # cgroup version 1
        if quota.isdigit() and period.isdigit() and int(period):
            granted.append(max(math.ceil(int(quota) / int(period)), 1))
    return min(granted, default=None)


def memory() -> tuple[int, int] | None:
    """Returns (free, total) bytes of memory: what this process can still allocate, and its maximum. Swap space counts,
    and so do the limits of control groups. Returns None where the operating system does not report it.
    """
    info = dict(line.split(":") for line in _read("/proc/meminfo").splitlines())
    if "MemAvailable" not in info:
        return None
    free, total = (sum(int(info[n].split()[0]) << 10 for n in names if n in info) for names in _COUNTED)
    for group, most, current in _limited_memory():
        used = _read(f"{group}/{current}")
        if used.isdigit():
            caches = dict(line.split() for line in _read(f"{group}/memory.stat").splitlines())
            # Cached files count as free, because the kernel reclaims them.
            free = min(free, most - int(used) + int(caches.get("inactive_file", 0)))
            total = min(total, most)
    return max(free, 0), total


_COUNTED = (("MemAvailable", "SwapFree"), ("MemTotal", "SwapTotal"))


@functools.cache
def _limited_memory() -> list[tuple[str, int, str]]:
    """Returns, for each control group that limits memory, its folder, its limit in bytes, and the name of the file that
    contains its current usage.
    """
    files = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))
    limits = [(group, _read(f"{group}/{most}"), current) for group in _groups() for most, current in files]
    return [(group, int(most), current) for group, most, current in limits if most.isdigit() and int(most) < _NO_LIMIT]


_NO_LIMIT = 1 << 60
"""Limits from this number of bytes mean no limit: cgroup version 1 reports nearly the largest 64-bit integer then."""


def _groups() -> Iterator[str]:
    """Yields the folders of the control groups of this process, the innermost first."""
    for line in _read("/proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        roots = [f"{_GROUPS}/{name}" for name in controllers.split(",")] if controllers else [_GROUPS]
        names = [name for name in path.split("/") if name]
        for root in roots:
            yield from ("/".join([root, *names[:n]]) for n in range(len(names), -1, -1))


def _read(path: str | os.PathLike[str]) -> str:
    """Returns the stripped text of a file of the kernel; an empty string if it cannot be read."""
    try:
        with open(path, encoding="utf-8") as file:
            return file.read().strip()
    except OSError:
        return ""
