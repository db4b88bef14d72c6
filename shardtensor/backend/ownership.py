"""Whether an array is referenced by anything else."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from shardtensor.backend.device import HostArray
from shardtensor.host import blockwise as passes
from shardtensor.host import memory_pool as pool
from shardtensor.host.memory_pool import owner_of as owner_of


def read_only(array: HostArray) -> HostArray:
    """A view of a host array that cannot be made writable: it sees the memory through a read-only buffer. A view whose
    base is the array itself could get its flag back.
    """
    given: Any = np.asarray(array)  # one element may have become a scalar
    if given.dtype.kind not in "mM":
        return np.asarray(memoryview(given).toreadonly())
    numbers: Any = given.view(np.int64)  # buffers have no times
    return np.asarray(memoryview(numbers).toreadonly()).view(given.dtype)


def copied(array: HostArray) -> HostArray:
    """A copy of a host array in row-major order, in memory that has been used before if it is large."""
    return passes.copied(array)


def is_alone(array: HostArray, holders: int) -> bool:
    """Whether references to a host array are the ``holders`` that the caller knows of and no more, and none but its own
    to what holds its memory. What is not NumPy's own memory (a mapped file, a foreign buffer) is never alone.
    """
    if type(array) is not np.ndarray or references(array) > holders + FRAME:
        return False
    owner = array.base
    if owner is None:
        return True
    lent = type(owner) is pool.Lease
    ours = lent or (type(owner) is np.ndarray and (owner.base is None or type(owner.base) is pool.Lease))
    return ours and references(owner) <= 2


def references(x: object) -> int:
    """How many references there are to an object that a variable of the caller's holds, that one included. Without end
    where counts mean nothing (no reference counting, no GIL).
    """
    return sys.getrefcount(x) - _ASKING


def _measure() -> tuple[int, int]:
    """What asking for a count adds to it, and what one more function that an object is handed through adds. Measured
    rather than assumed: versions of Python differ.
    """
    if not hasattr(sys, "getrefcount") or not getattr(sys, "_is_gil_enabled", lambda: True)():
        return -sys.maxsize, 0
    probe = object()

    def through(x: object) -> int:
        return references(x)

    return references(probe) - 1, through(probe) - references(probe)


_ASKING = 0
_ASKING, FRAME = _measure()
"""`FRAME`: how many references a function's parameter adds to those that its caller has."""
