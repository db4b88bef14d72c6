"""Searches in host arrays that are in order: many elements are searched for together, in threads."""

from __future__ import annotations

from typing import Any

import numpy as np

from shardtensor.host import memory_pool
from shardtensor.host.host_sorting import keys_of, order_of_numbers
from shardtensor.host.threads import each

_BLOCK = 1 << 17
"""Elements of a block that is put in order, which stays in the cache."""

_DIVIDED_FROM = 1 << 16
"""Elements from which a search is divided over threads."""

_SEARCHED_IN_ORDER = 1 << 18
"""Bytes of an array from which it is searched for elements in order, so that branches and caches are predicted well."""

_SEARCHED = 1 << 15
"""Elements that are searched for at a time, which stay in the cache."""

_BUCKETS = 1 << 20
"""The greatest number of buckets of a table that is searched."""


def searchsorted(x1: Any, x2: Any, side: str) -> Any:
    """Returns for each element of x2 the index in x1, which is in order, before which it is inserted.

    NumPy's search mispredicts a branch in every second step. Many elements are searched for together, without branches
    (`_Table`). Where x1 has more of them, NumPy searches blocks of elements that are in order, several times as fast as
    others.
    """
    if x2.size < _DIVIDED_FROM or not x2.flags.c_contiguous:
        return np.searchsorted(x1, x2, side=side)  # type: ignore[call-overload]
    out, flat = memory_pool.empty(x2.shape, np.dtype(np.int64)), x2.reshape(-1)
    into, dtype = out.reshape(-1), np.result_type(x1.dtype, x2.dtype)
    if 0 < x1.size <= x2.size and dtype.kind in "biuf" and dtype.itemsize <= 8:
        table = _Table(x1.astype(dtype, copy=False), side)

        def find(k: int) -> None:
            part = slice(k * _SEARCHED, (k + 1) * _SEARCHED)
            table.find(flat[part].astype(dtype, copy=False), into[part])

        each(find, -(-x2.size // _SEARCHED))
        return out
    in_order = x1.nbytes >= _SEARCHED_IN_ORDER and x2.dtype.kind in "biuf"

    def work(k: int) -> None:
        part = slice(k * _BLOCK, (k + 1) * _BLOCK)
        keys, positions = flat[part], into[part]
        if not in_order or bool((keys[1:] >= keys[:-1]).all()):
            positions[...] = np.searchsorted(x1, keys, side=side)  # type: ignore[call-overload]
            return
        order = order_of_numbers(keys)
        positions[order] = np.searchsorted(x1, keys[order], side=side)  # type: ignore[call-overload]

    each(work, -(-x2.size // _BLOCK))
    return out


class _Table:
    """Real numbers in order that are searched by bisection, in one step for many elements after the other.

    The elements are mapped to integers of the same order, whose leading bits are the number of a bucket. The bucket of
    an element is where its search begins, so that there are as many steps as the size of the largest bucket has bits:
    of n elements, at most one more than without buckets.

    Args:
        x: the numbers, at least one.
        side: "left" or "right": see `searchsorted`.
    """

    def __init__(self, x: Any, side: str) -> None:
        keys = keys_of(x)
        # Of elements that are not in order, the results are undefined, but the buckets are not more than these.
        self._least, self._greatest, self._size = keys.min(), keys.max(), keys.size
        bits = int(self._greatest - self._least).bit_length() - min(_BUCKETS, keys.size).bit_length()
        self._shift = keys.dtype.type(max(bits, 0))
        counts = np.zeros(int(self._buckets(self._greatest)) + 1, np.intp)
        for begin in range(0, keys.size, 4 * _BUCKETS):  # Numbers of buckets take more memory than the keys.
            counts += np.bincount(self._buckets(keys[begin : begin + 4 * _BUCKETS]), minlength=counts.size)
        self._starts = np.append(0, np.cumsum(counts))
        self._steps = int(counts.max()).bit_length()
        # The steps that begin in the last bucket compare with elements behind it.
        absent = np.full(1 << self._steps, np.iinfo(keys.dtype).max, keys.dtype)
        self._keys, self._precedes = np.append(keys, absent), np.less if side == "left" else np.less_equal

    def _buckets(self, keys: Any) -> Any:
        numbers = (np.clip(keys, self._least, self._greatest) - self._least) >> self._shift
        return numbers.astype(np.intp)

    def find(self, x: Any, out: Any) -> None:
        """Writes the indices before which elements are inserted to ``out``."""
        keys = keys_of(x)
        others, precedes, steps = np.empty_like(keys), np.empty(keys.shape, bool), np.empty(keys.shape, np.intp)
        self._starts.take(self._buckets(keys), out=out, mode="clip")
        for bit in reversed(range(self._steps)):
            np.add(out, (1 << bit) - 1, out=steps)
            self._keys.take(steps, out=others, mode="clip")
            self._precedes(others, keys, out=precedes)
            np.multiply(precedes, 1 << bit, out=steps)
            np.add(out, steps, out=out)
        np.minimum(out, self._size, out=out)  # The greatest elements do not precede what is behind all of them.
