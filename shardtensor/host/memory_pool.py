"""A memory pool: the host memory of large arrays is reused.

New memory is slow: the kernel clears each page when it is first touched, which takes longer than most operators take to
fill it. When the last array in the memory of a large result is deallocated, the pool therefore keeps the memory for the
next result.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections import deque
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from shardtensor.errors import ArgumentError, DeviceMemoryError
from shardtensor.host.fork import in_children
from shardtensor.host.limits import memory
from shardtensor.host.signals import raise_later
from shardtensor.host.units import readable

POOLED_FROM = 1 << 19
"""The minimum size in bytes of memory that the pool keeps. The C library reuses smaller memory itself."""

_KEPT = 8 * POOLED_FROM
"""The size in bytes of memory that is allocated and freed once. glibc returns free memory to the system above a
threshold of 128 KiB, so that temporary arrays would get new pages in each call. The threshold rises to twice the size
of the largest memory that was freed so far.
"""

np.empty(_KEPT, np.uint8)

_CHECKED_FROM = 1 << 28
"""The minimum size in bytes of new memory for which the free memory of the host is checked first. The check takes a
fraction of the time of touching that much memory.
"""

_LINE = 64
"""The size in bytes of a cache line. Buffers are aligned to it."""


class CacheInfo(NamedTuple):
    """Statistics of the memory pool of the host, as `cache_info` returns them.

    >>> isinstance(st.cache_info(), st.CacheInfo)
    True

    Attributes:
        used: the number of bytes of pooled memory that is in use by arrays.
        cached: the number of bytes that are free for reuse.
        limit: the maximum of ``cached``.
        hits: the number of allocations that reused memory.
        misses: the number of allocations that needed new memory.
    """

    used: int
    cached: int
    limit: int
    hits: int
    misses: int


class _Buffer(np.ndarray):
    """The bytes of one buffer.

    It is a subclass, because NumPy skips the base of a new array if the base of that base is a plain ndarray: arrays
    would refer to the buffer instead of the `Lease`.
    """

    __slots__ = ()


class Lease(np.ndarray):
    """The bytes of one buffer while arrays use them. It is the ``base`` of the arrays, and returns the buffer to the
    pool when it is deallocated.
    """

    __slots__ = ("buffer",)

    buffer: _Buffer

    def __del__(self) -> Any:
        try:
            buffer = getattr(self, "buffer", None)  # A view of a lease has no such attribute.
            if buffer is not None and _pool is not None:  # Globals may be None while the interpreter shuts down.
                _pool.take_back(self, buffer)
        except BaseException as error:  # A signal handler may raise here, and Python only prints such exceptions.
            _pool.forget(self)
            return raise_later(error)
        return None


class Pool:
    """The buffers that are free for reuse, by capacity, with the most recently used capacity last.

    Arrays may be deallocated at any point: in other threads, in the middle of these methods, in signal handlers. So
    there is no lock, and no two counts have to be consistent: each step is atomic in CPython, and a buffer that is lost
    between two steps is only freed.
    """

    def __init__(self) -> None:
        self._idle: dict[int, deque[_Buffer]] = {}
        self._leased: dict[int, int] = {}  # the capacity of each lease, by the lease's id()
        self._hits = self._misses = 0
        self._limit: int | None = None

    @property
    def limit(self) -> int:
        """The maximum number of cached bytes: by default a quarter of the memory that this process may use, or 1 GiB
        where that is unknown.
        """
        if self._limit is None:
            available = memory()
            self._limit = available[1] // 4 if available else 1 << 30
        return self._limit

    @limit.setter
    def limit(self, nbytes: int) -> None:
        self._limit = nbytes
        self._shrink(nbytes)

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        """Returns an uninitialized array in row-major order.

        Raises:
            DeviceMemoryError: the host does not have enough free memory.
        """
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes < POOLED_FROM or dtype.hasobject:
            return np.empty(shape, dtype)
        capacity = _capacity(nbytes)
        buffer = self._reused(capacity)
        if buffer is None:
            buffer = self._new(capacity)
            self._misses += 1
        else:
            self._hits += 1
        lease: Lease = buffer.view(Lease)
        lease.buffer = buffer
        self._leased[id(lease)] = capacity
        return np.ndarray(shape, dtype, lease)

    def _reused(self, capacity: int) -> _Buffer | None:
        idle = self._idle.pop(capacity, None)
        if idle is None:
            return None
        self._idle[capacity] = idle  # moves the capacity to the end
        try:
            return idle.pop()
        except IndexError:
            return None

    def _new(self, capacity: int) -> _Buffer:
        self._limit = self.limit  # The default is computed here, because `take_back` may run at any point.
        reserve(capacity)
        try:
            raw = np.empty(capacity + _LINE, np.uint8)
        except MemoryError:
            self.free()
            raw = np.empty(capacity + _LINE, np.uint8)
        start = -raw.__array_interface__["data"][0] % _LINE
        return raw[start : start + capacity].view(_Buffer)

    def take_back(self, lease: Lease, buffer: _Buffer) -> None:
        """Caches the buffer of a lease that no array uses any more, if the limit allows it."""
        capacity, limit = buffer.size, self._limit or 0
        self.forget(lease)
        if capacity <= limit:
            idle = self._idle.pop(capacity, None) or deque()
            idle.append(buffer)
            self._idle[capacity] = idle  # moves the capacity to the end
            self._shrink(limit)

    def forget(self, lease: Lease) -> None:
        """Counts the memory of a lease as unused; its buffer is freed."""
        self._leased.pop(id(lease), None)

    @property
    def _cached(self) -> int:
        return sum([capacity * len(idle) for capacity, idle in self._idle.copy().items()])

    def _shrink(self, nbytes: int) -> None:
        """Frees buffers until at most ``nbytes`` are cached, those of the least recently used capacities first."""
        cached = self._cached
        for capacity, idle in self._idle.copy().items():
            while cached > nbytes and idle:
                with contextlib.suppress(IndexError):  # Another thread may take the last buffer meanwhile.
                    idle.popleft()
                cached -= capacity
            if cached <= nbytes:
                return
            self._idle.pop(capacity, None)

    def restart(self) -> None:
        """Forgets all buffers: those that are free for reuse are freed."""
        self._idle, self._leased = {}, {}

    def free(self) -> None:
        """Frees all cached buffers."""
        self._shrink(0)

    def info(self) -> CacheInfo:
        """Returns the statistics of the pool."""
        return CacheInfo(sum(self._leased.copy().values()), self._cached, self.limit, self._hits, self._misses)


def _capacity(nbytes: int) -> int:
    """Returns the capacity of a buffer for ``nbytes``: one of a few sizes for each power of two, so that arrays of
    nearly the same size can reuse a buffer.
    """
    step = 1 << max(nbytes.bit_length() - 4, 12)
    return -(-nbytes // step) * step


_pool = Pool()


@in_children
def _restart() -> None:
    """Replaces the pool's containers in the child of a fork if there is no GIL: another thread of the parent may have
    held their locks, which are never released here.
    """
    if not getattr(sys, "_is_gil_enabled", lambda: True)():
        _pool.restart()


def empty(shape: tuple[int, ...], dtype: Any) -> npt.NDArray[Any]:
    """Returns an uninitialized host array in row-major order, in memory of the pool if it is large.

    Raises:
        DeviceMemoryError: the host does not have enough free memory.
    """
    return _pool.empty(shape, np.dtype(dtype))


def is_addressable(shape: tuple[int, ...], dtype: np.dtype[Any]) -> bool:
    """Whether addresses reach all bytes of an array; those without elements have sizes as well, as for NumPy."""
    return dtype.itemsize * math.prod([n for n in shape if n]) <= sys.maxsize


def check_addressable(shape: tuple[int, ...], dtype: np.dtype[Any], caller: str = "") -> None:
    """Checks that a result `is_addressable`.

    Raises:
        DeviceMemoryError: it is not. The message names ``caller``, which operators leave to dispatch.
    """
    if not is_addressable(shape, dtype):
        nbytes = readable(dtype.itemsize * math.prod([n for n in shape if n]))
        raise DeviceMemoryError(
            f"{caller and f'{caller}: '}the result needs {nbytes}, for {dtype} of shape {shape}, and no machine has as "
            "much memory; work on smaller parts"
        )


def reserve(nbytes: int) -> None:
    """Checks that the host has ``nbytes`` of free memory for a result, and frees the cached memory if it has not.

    Raises:
        DeviceMemoryError: the host does not have enough free memory.
    """
    if nbytes < _CHECKED_FROM or (available := memory()) is None or nbytes <= available[0]:
        return
    _pool.free()
    free, total = memory() or available
    if nbytes > free:
        raise DeviceMemoryError(
            f"the result needs {readable(nbytes)} of host memory, and {readable(free)} of {readable(total)} are "
            "free; delete arrays, or work on smaller parts"
        )


def out_of_memory(caller: str, error: MemoryError) -> DeviceMemoryError:
    """Returns the error for an operator in which a library failed to allocate host memory."""
    available = memory()
    free = f"; {readable(available[0])} of {readable(available[1])} of host memory are free" if available else ""
    return DeviceMemoryError(
        f"{caller}: {str(error) or 'there is no memory left'}{free}; delete arrays, or work on smaller parts"
    )


def owner_of(array: npt.NDArray[Any]) -> Any:
    """Returns the object that owns an array's memory. Arrays that share memory have the same owner.

    A read-only view that the library has returned, and views of it, have a memoryview between them and the owner (see
    `shardtensor.backend.exclusive_memory.read_only`).
    """
    while True:
        base: Any = array.base
        if base is None or type(base) is Lease:
            return array
        if type(base) is np.ndarray and isinstance(base.base, memoryview):
            base = base.base
        if not isinstance(base, memoryview) or not isinstance(base.obj, np.ndarray):
            return base
        array = base.obj


def free_cache() -> None:
    """Releases the cached host memory to the operating system.

    >>> st.free_cache()
    >>> st.cache_info().cached
    0
    """
    _pool.free()


def cache_info() -> CacheInfo:
    """Returns how much host memory large results use, how much is cached for reuse, and how often it was reused.

    Memory of deallocated results is cached, since allocating new memory takes longer than most operators take to fill
    it: by default up to a quarter of the memory that this process may use (see `set_cache_limit`).

    >>> st.cache_info()._fields
    ('used', 'cached', 'limit', 'hits', 'misses')
    """
    return _pool.info()


def set_cache_limit(nbytes: int) -> None:
    """Sets the maximum number of bytes of host memory that are cached for reuse; 0 disables caching. The default is a
    quarter of the memory that this process may use.

    Raises:
        ArgumentError: nbytes is negative or not an integer.

    >>> limit = st.cache_info().limit
    >>> st.set_cache_limit(1 << 30)
    >>> st.cache_info().limit
    1073741824
    >>> st.set_cache_limit(limit)
    """
    if type(nbytes) is not int or nbytes < 0:
        raise ArgumentError(f"set_cache_limit: nbytes is {nbytes!r}; wanted an integer, 0 or more")
    _pool.limit = nbytes
