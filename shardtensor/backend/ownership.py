"""Ownership of host arrays: reference counts, exclusive memory and read-only views."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from shardtensor.backend.device import HostArray
from shardtensor.host import memory_pool


def read_only(array: HostArray) -> HostArray:
    """Returns a view of a host array that cannot be made writable.

    The view accesses the memory through a read-only buffer. If the base of the view were the array itself, its
    ``writeable`` flag could be set again.
    """
    # Indexing may have turned a single element into a NumPy scalar.
    given: Any = array if type(array) is np.ndarray else np.asarray(array)
    if given.dtype.kind not in "mM":
        return np.asarray(memoryview(given).toreadonly())
    numbers: Any = given.view(np.int64)  # The buffer protocol has no datetime dtypes.
    return np.asarray(memoryview(numbers).toreadonly()).view(given.dtype)


def is_alone(array: HostArray, holders: int) -> bool:
    """Whether a host array and its memory are exclusive to the caller.

    That is the case if the array has at most ``holders`` references, those that the caller knows of, and the object
    that owns its memory is referenced only by the array. Memory that NumPy did not allocate (a mapped file, a foreign
    buffer) is never exclusive.
    """
    if type(array) is not np.ndarray or references(array) > holders + FRAME:
        return False
    owner = array.base
    if owner is None:
        return True
    leased = type(owner) is memory_pool.Lease
    ours = leased or (type(owner) is np.ndarray and (owner.base is None or type(owner.base) is memory_pool.Lease))
    return ours and references(owner) <= 2


def references(x: object) -> int:
    """Returns the number of references to an object, including the one held by the caller's variable.

    The number is larger than any count where reference counts are meaningless (no reference counting, or no GIL).
    """
    return sys.getrefcount(x) - _OWN


def _measure() -> tuple[int, int]:
    """Returns the references that `references` itself adds to a count, and those that a function's parameter adds.

    Both are measured because they differ between versions of Python.
    """
    if not hasattr(sys, "getrefcount") or not getattr(sys, "_is_gil_enabled", lambda: True)():
        return -sys.maxsize, 0
    probe = object()

    def through(x: object) -> int:
        return references(x)

    return references(probe) - 1, through(probe) - references(probe)


_OWN = 0
_OWN, FRAME = _measure()
"""`FRAME`: the number of references that a function's parameter adds to those of its caller."""
