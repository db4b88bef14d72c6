"""Ownership of host arrays: exclusive memory and read-only views."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from shardtensor.backend.device import HostArray
from shardtensor.host import fork, memory_pool


def read_only(array: HostArray) -> HostArray:
    """Returns a view of a host array that cannot be made writable."""
    return lend(array)[0]


def lend(array: HostArray) -> tuple[HostArray, weakref.ref[Any]]:
    """Returns a view of a host array that cannot be made writable, and its lease (see `Backend.lend`).

    The view accesses the memory through a read-only buffer. If the base of the view were the array itself, its
    ``writeable`` flag could be set again. A view of a view that was lent has that one's buffer and lease: otherwise the
    chain of bases would grow with each map of a map's result, and NumPy deallocates such a chain recursively.
    """
    # Indexing may have turned a single element into a NumPy scalar.
    host: Any = array if type(array) is np.ndarray else np.asarray(array)
    base = host.base
    if base is not None and (type(base) is not np.ndarray or base.base is not None):  # The common cases take no call.
        lender = lender_of(host)
        if lender is not None:
            return host.view(), weakref.ref(lender)
    owner = host.view()
    try:
        return np.asarray(memoryview(owner).toreadonly()), weakref.ref(owner)
    except ValueError:  # The buffer protocol has no times and no small floats.
        owner = host.view(f"i{host.itemsize}")
        return np.asarray(memoryview(owner).toreadonly()).view(host.dtype), weakref.ref(owner)


def lender_of(array: HostArray) -> HostArray | None:
    """Returns the array whose memory a host array accesses through a read-only buffer, as `lend` returns it; None if it
    accesses its memory otherwise.
    """
    base: Any = array.base
    if type(base) is np.ndarray:  # NumPy skips all bases between a view and the array that refers to the buffer.
        base = base.base
    lender: Any = base.obj if type(base) is memoryview and base.readonly else None
    return lender if type(lender) is np.ndarray else None


def is_exclusive(held: list[Any], others: int = 0) -> bool:
    """Whether a host array that user code made, the only item of a list, and its memory are reachable only through the
    list.

    Memory that NumPy did not allocate (a mapped file, a foreign buffer) is never exclusive. False is always a correct
    answer: what is not exclusive is copied.

    Args:
        held: a list with the array. The caller has no variable for the array: how such a variable counts depends on the
            version of Python.
        others: the number of further references to the array, in containers or attributes, that the caller knows of.
    """
    # As `references`, in less time: the result of every mapped function passes here.
    if type(held[0]) is not np.ndarray or not (_counts or _test_counts())[0]:
        return False
    if sys.getrefcount(held[0]) > 2 + others:
        return False
    if held[0].base is None:
        return bool(held[0].flags.owndata)
    return memory_of(held[0]) is not None and references([held[0].base]) <= 2


def memory_of(array: HostArray) -> int | None:
    """Identifies the memory of a host array: the same number for all arrays that share it, as long as one exists.

    None if neither NumPy nor the pool of the library allocated the memory: other objects may write to it.
    """
    owner = memory_pool.owner_of(array)
    ours = type(owner) is np.ndarray and (owner.flags.owndata or type(owner.base) is memory_pool.Lease)
    return id(owner) if ours else None


def make_writable(array: HostArray) -> bool:
    """Makes an array, whose memory nothing else holds, writable; False if it is a view of a read-only buffer."""
    owner: Any = array.base
    if type(owner) is np.ndarray:
        if owner.base is not None and type(owner.base) is not memory_pool.Lease:
            return False
        owner.flags.writeable = True
    elif owner is not None and type(owner) is not memory_pool.Lease:
        return False
    array.flags.writeable = True
    return True


def references(held: Sequence[Any]) -> int:
    """Returns the number of references to the first item of a list or tuple, with the one that the list holds.

    The number is larger than any count where reference counts are meaningless on this interpreter.
    """
    # The item is counted on the interpreter's stack, too, where every version of Python holds a reference of its own.
    return sys.getrefcount(held[0]) - 1 if (_counts or _test_counts())[0] else sys.maxsize


_counts: list[bool] = []
"""Whether reference counts tell on this interpreter whether an object is held elsewhere; empty until the first use."""


_testing = fork.lock()
"""Held during the test, which uses a global variable. It is reentrant, since finalizers may call the library."""


def _test_counts() -> list[bool]:
    with _testing:
        if not _counts:
            try:
                _counts.append(hasattr(sys, "getrefcount") and counts_are_right())
            except RuntimeError:  # No thread can be started now, which the test needs: arrays are copied until then.
                return [False]
    return _counts


_seen: Any = None


def counts_are_right(count: Callable[[Any], int] = lambda held: sys.getrefcount(held[0]) - 1) -> bool:
    """Whether ``count``, a function of a list, finds each kind of reference to the first item, and no others.

    The references are those that `is_exclusive` has to find: a local variable, a global one, an argument, a closure, a
    container, a view, and a variable of another thread.
    """
    global _seen
    here = np.empty(2)
    _seen = in_container = np.empty(2)
    holders: list[Any] = [[in_container], None]
    del in_container
    in_closure, argument = np.empty(2), np.empty(2)
    base = np.empty(2)
    view = base[1:]
    alone = [
        count([np.empty(2)]) == 1,
        count([np.empty(2)[1:]]) == 1,
        count([view.base]) == 3,  # the variable, the view and the list
        _of_argument(count, argument) > 1,
        (lambda: count([in_closure]))() > 1,
        count([here]) == 2,
    ]
    del base
    alone.append(count([view.base]) == 2)
    held = [_seen]
    holders[1] = held
    alone.append(count(held) == 3)  # the global variable and two containers
    _seen = None
    alone.append(count(held) == 2)
    holders[0].clear()
    alone.append(count(held) == 1)
    return all(alone) and _finds_threads(count)


def _of_argument(count: Callable[[Any], int], x: Any) -> int:
    return count([x])


def _finds_threads(count: Callable[[Any], int]) -> bool:
    """Whether ``count`` finds a reference that a variable of another thread holds, until that thread is done."""
    held: list[Any] = []
    ready, counted = threading.Event(), threading.Event()  # fork: only this call has them.

    def hold() -> None:
        mine = np.empty(2)
        held.append(mine)
        ready.set()
        counted.wait()
        del mine

    thread = threading.Thread(target=hold, daemon=True)
    thread.start()
    ready.wait()
    during = count(held)
    counted.set()
    thread.join()
    return during == 2 and count(held) == 1
