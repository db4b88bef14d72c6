"""Host memory that is used again.

New memory costs its pages: the kernel clears each when it is first touched, which takes longer than most operators
take to fill it. So what a large result leaves behind, when the last array in it is gone, is kept for the next one.
"""

from __future__ import annotations

import contextlib
import math
from collections import deque
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from shardtensor.errors import ArgumentError, DeviceMemoryError
from shardtensor.host.limits import memory
from shardtensor.host.units import readable

POOLED_FROM = 1 << 19
"""Bytes from which memory is worth keeping: below, the C library keeps it as well."""

_ASKED_FROM = 1 << 28
"""Bytes of new memory from which the host is asked whether it has them: it takes a fraction of touching them."""

_LINE = 64
"""Bytes of a line of the cache, at whose multiples buffers begin."""


class CacheInfo(NamedTuple):
    """What `cache_info` says.

    >>> isinstance(st.cache_info(), st.CacheInfo)
    True

    Attributes:
        used: bytes of kept memory that hold arrays.
        cached: bytes that wait to be used again.
        limit: the most bytes that may wait.
        hits: how many results were written into memory that had waited.
        misses: how many needed new memory.
    """

    used: int
    cached: int
    limit: int
    hits: int
    misses: int


class _Buffer(np.ndarray):
    """The bytes of one buffer. A class of its own, so that NumPy does not look for the owner behind a `Lease`."""

    __slots__ = ()


class Lease(np.ndarray):
    """The bytes of one buffer while arrays lie in them: it is their ``base``, and gives the buffer back at its end."""

    __slots__ = ("buffer",)

    buffer: _Buffer

    def __del__(self) -> None:
        buffer = getattr(self, "buffer", None)  # a view of a lease has none
        if buffer is not None and _pool is not None:  # at the end of the interpreter
            _pool.take_back(self, buffer)


class Pool:
    """Buffers that wait to be used again, by capacity; those of the capacity used last come last.

    Arrays die anywhere: in other threads, in the middle of these methods, in signal handlers. So there is no lock, and
    no count that has to fit another: each step is one of the interpreter's own, and what is lost between two of them
    is memory that is freed.
    """

    def __init__(self) -> None:
        self._idle: dict[int, deque[_Buffer]] = {}
        self._lent: dict[int, int] = {}  # the capacities of leases, by their identity
        self._hits = self._misses = 0
        self._limit: int | None = None

    @property
    def limit(self) -> int:
        """The most bytes that may wait: a quarter of the host's memory unless somebody said otherwise."""
        if self._limit is None:
            said = memory()
            self._limit = said[1] // 4 if said else 1 << 30
        return self._limit

    @limit.setter
    def limit(self, nbytes: int) -> None:
        self._limit = nbytes
        self._shrink(nbytes)

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        """An array in row-major order whose elements are whatever was there.

        Raises:
            DeviceMemoryError: the host has not got so much memory.
        """
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes < POOLED_FROM or dtype.hasobject:
            return np.empty(shape, dtype)
        capacity = _capacity(nbytes)
        buffer = self._waiting(capacity)
        if buffer is None:
            buffer = self._new(capacity)
            self._misses += 1
        else:
            self._hits += 1
        lease: Lease = buffer.view(Lease)
        lease.buffer = buffer
        self._lent[id(lease)] = capacity
        return np.ndarray(shape, dtype, lease)

    def _waiting(self, capacity: int) -> _Buffer | None:
        waiting = self._idle.pop(capacity, None)
        if waiting is None:
            return None
        self._idle[capacity] = waiting  # now the last one
        try:
            return waiting.pop()
        except IndexError:
            return None

    def _new(self, capacity: int) -> _Buffer:
        self._limit = self.limit  # asked for here, and not where an array happens to die
        self.reserve(capacity)
        try:
            raw = np.empty(capacity + _LINE, np.uint8)
        except MemoryError:
            self.free()
            raw = np.empty(capacity + _LINE, np.uint8)
        start = -raw.__array_interface__["data"][0] % _LINE
        return raw[start : start + capacity].view(_Buffer)

    def reserve(self, nbytes: int) -> None:
        """Makes sure that the host has so many bytes, at the cost of what waits.

        Raises:
            DeviceMemoryError: it has not.
        """
        if nbytes < _ASKED_FROM or (said := memory()) is None or nbytes <= said[0]:
            return
        self.free()
        free, total = memory() or said
        if nbytes > free:
            raise DeviceMemoryError(
                f"the result needs {readable(nbytes)} of host memory, and {readable(free)} of {readable(total)} are "
                "free; delete arrays, or work on smaller parts"
            )

    def take_back(self, lease: Lease, buffer: _Buffer) -> None:
        """Keeps a buffer in which no array lies any more, unless there are enough."""
        capacity, limit = buffer.size, self._limit or 0
        self._lent.pop(id(lease), None)
        if capacity <= limit:
            waiting = self._idle.pop(capacity, None) or deque()
            waiting.append(buffer)
            self._idle[capacity] = waiting  # now the last one
            self._shrink(limit)

    @property
    def _cached(self) -> int:
        return sum([capacity * len(waiting) for capacity, waiting in list(self._idle.items())])

    def _shrink(self, nbytes: int) -> None:
        """Lets go of buffers until no more than that many bytes wait: first those of capacities long not wanted."""
        cached = self._cached
        for capacity, waiting in list(self._idle.items()):
            while cached > nbytes and waiting:
                with contextlib.suppress(IndexError):  # another thread was quicker
                    waiting.popleft()
                cached -= capacity
            if cached <= nbytes:
                return
            self._idle.pop(capacity, None)

    def free(self) -> None:
        """Lets go of all that waits."""
        self._shrink(0)

    def info(self) -> CacheInfo:
        """How much there is, and what it was good for."""
        return CacheInfo(sum(list(self._lent.values())), self._cached, self.limit, self._hits, self._misses)


def _capacity(nbytes: int) -> int:
    """The capacity of a buffer for so many bytes: of a few sizes for each power of two, so that arrays of nearly the
    same size can follow one another.
    """
    step = 1 << max(nbytes.bit_length() - 4, 12)
    return -(-nbytes // step) * step


_pool = Pool()


def empty(shape: tuple[int, ...], dtype: Any) -> npt.NDArray[Any]:
    """An array of host memory in row-major order, its elements unset: of memory that is kept, if it is large.

    Raises:
        DeviceMemoryError: the host has not got so much memory.
    """
    return _pool.empty(shape, np.dtype(dtype))


def reserve(nbytes: int) -> None:
    """Makes sure that the host has so many bytes for a result, at the cost of memory that waits to be used again.

    Raises:
        DeviceMemoryError: it has not.
    """
    _pool.reserve(nbytes)


def out_of_memory(caller: str, error: MemoryError) -> DeviceMemoryError:
    """The error for an operator whose libraries got no memory of the host."""
    said = memory()
    free = f"; {readable(said[0])} of {readable(said[1])} of host memory are free" if said else ""
    return DeviceMemoryError(
        f"{caller}: {str(error) or 'there is no memory left'}{free}; delete arrays, or work on smaller parts"
    )


def owner_of(array: npt.NDArray[Any]) -> Any:
    """What holds an array's memory: of arrays in one piece of memory the same object. Those that left the library as
    read-only views, and views of them, have a buffer in between (see `shardtensor.backend.read_only`).
    """
    base: Any = array.base
    if base is None or type(base) is Lease:
        return array
    if type(base) is np.ndarray and isinstance(base.base, memoryview):
        base = base.base
    if isinstance(base, memoryview) and isinstance(base.obj, np.ndarray):
        return owner_of(base.obj)
    return base


def free_cache() -> None:
    """Gives the memory that waits for the next large results on the host back to the system.

    >>> st.free_cache()
    >>> st.cache_info().cached
    0
    """
    _pool.free()


def cache_info() -> CacheInfo:
    """How much host memory large results use, how much waits for the next ones, and how often it was used again.

    Memory of results that are gone is kept up to a limit (`set_cache_limit`), since new memory costs more time than
    most operators need to fill it.

    >>> st.cache_info()._fields
    ('used', 'cached', 'limit', 'hits', 'misses')
    """
    return _pool.info()


def set_cache_limit(nbytes: int) -> None:
    """Sets how many bytes of host memory may wait for the next large results: 0 for none. The default is a quarter of
    the memory that this process can have.

    Raises:
        ArgumentError: nbytes is negative or no integer.

    >>> limit = st.cache_info().limit
    >>> st.set_cache_limit(1 << 30)
    >>> st.cache_info().limit
    1073741824
    >>> st.set_cache_limit(limit)
    """
    if type(nbytes) is not int or nbytes < 0:
        raise ArgumentError(f"set_cache_limit: nbytes is {nbytes!r}; wanted a whole number of bytes, 0 or more")
    _pool.limit = nbytes
