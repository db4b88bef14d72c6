"""Sorting of host arrays: blocks of lines are sorted in threads, and so are the parts of one long line.

The order is NumPy's: NaN is greater than all numbers, and complex numbers are ordered by their real parts, then by
their imaginary parts. All functions return new arrays.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from shardtensor.host import memory_pool
from shardtensor.host.host_selection import partition
from shardtensor.host.threads import each, num_threads

_BLOCK = 1 << 17
"""Elements of a block of lines, which stays in the cache while it is sorted."""

_COLUMNS = 64
"""The least number of columns that are sorted together: those of a few cache lines."""

_TILE = 32
"""Rows of a tile that is transposed."""

_SHORT = 1 << 12
"""Elements up to which NumPy's stable algorithm takes less time than all steps around another one."""

_DIVIDED_FROM = 1 << 16
"""Elements from which sorting is divided over threads."""

_RANGES = 16
"""The number of ranges into which the elements of one long line are distributed before their indices are sorted."""

_SAMPLES = 1 << 6
"""Elements of a sample for each of these ranges."""

_COUNTED = 1 << 16
"""The number of integers from the least to the greatest one up to which indices are sorted by counting."""

_COUNTED_FROM = 1 << 10
"""The length of a line from which counting takes less time than comparisons."""

_PART = 1 << 14
"""Random words in a part that is sorted by itself, at most: its indices and digits stay in a core's first caches."""

_PIECES = 64
"""Pieces of random words, at most, that are divided into parts, each of which is put together of all pieces."""

_INDEX = np.uint64((1 << 32) - 1)
"""The bits of a word that hold an index."""


def sort(x: Any, axis: int, *, descending: bool = False, stable: bool = True) -> Any:
    """Returns the elements of an array in order along ``axis``; with ``stable``, equal ones keep their order."""
    if descending:  # Equal elements, which are reversed twice, keep their order.
        return np.ascontiguousarray(np.flip(sort(np.flip(x, axis), axis, stable=stable), axis))
    if _is_long_line(x, axis) and x.dtype.kind in "iuf" and x.dtype != np.float16:
        result = _sorted_line(x.reshape(-1)).reshape(x.shape)
        if stable and x.dtype.kind == "f":
            _order_zeros(x, result, axis)
        return result

    def in_place(block: Any, at: int, out: Any) -> None:
        np.copyto(out, block)
        _sort(out, block, at, stable)

    return _by_lines(x, axis, x.dtype, in_place)


def argsort(x: Any, axis: int, *, descending: bool = False, stable: bool = True) -> Any:
    """Returns the indices, of dtype int64, that sort an array along ``axis``.

    Integers of a short range are counted. Other elements of up to four bytes are sorted together with their indices, as
    words of which they are the upper half: NumPy sorts words up to ten times as fast as indices.
    """
    n = x.shape[axis]
    if x.size <= _SHORT:
        if not descending:
            return np.argsort(x, axis=axis, stable=stable)
        back = (slice(None),) * axis + (slice(None, None, -1),)
        return n - 1 - np.argsort(x[back], axis=axis, stable=stable)[back]
    if n >= _COUNTED_FROM and (least := least_of_short_range(x, _COUNTED)) is not None:

        def counted(block: Any, at: int) -> Any:
            numbers = distances(block, least).astype(np.uint16)
            return np.argsort(np.invert(numbers) if descending else numbers, axis=at, kind="stable")

        return _by_lines(x, axis, np.dtype(np.int64), _into(counted))
    if x.dtype.itemsize <= 4 and x.dtype.kind in "biuf" and n <= 1 << 32:
        if _is_long_line(x, axis):
            return _indices_of(_sorted_line(_words(x.reshape(-1), -1, descending))).reshape(x.shape)

        def in_words(block: Any, at: int) -> Any:
            words = _words(block, at, descending)
            words.sort(axis=at)
            return _indices_of(words)

        return _by_lines(x, axis, np.dtype(np.int64), _into(in_words))
    if descending:
        return n - 1 - np.flip(argsort(np.flip(x, axis), axis, stable=stable), axis)
    if stable and x.dtype.kind in "iuf" and 0 < n <= 1 << 32:
        if n == x.size >= 2 * _BLOCK:
            return _indices_of_line(x.reshape(-1)).reshape(x.shape)
        return _by_lines(x, axis, np.dtype(np.int64), _into(_stable_argsort))
    return _by_lines(x, axis, np.dtype(np.int64), _into(lambda block, at: np.argsort(block, axis=at, stable=stable)))


# -- values ----------------------------------------------------------------------------------------


def _sort(out: Any, x: Any, axis: int, stable: bool) -> None:
    """Sorts ``out``, which is a copy of x, along an axis."""
    # NumPy's other algorithm leaves long arrays of float16 unsorted on some processors (2.4.6).
    if x.dtype.kind == "c" or x.dtype == np.float16:
        out.sort(axis=axis, stable=stable or x.dtype == np.float16)
        return
    # NumPy's other algorithms are up to ten times as fast. The only real numbers that are equal and differ are zeros.
    out.sort(axis=axis)
    if stable and x.dtype.kind == "f":
        _order_zeros(x, out, axis)


def _order_zeros(x: Any, result: Any, axis: int) -> None:
    """Writes the zeros of x, which differ in their signs, into the sorted array in the order that they have in x."""
    if _has_negative_zeros(result):
        lines, ordered = np.moveaxis(x, axis, -1), np.moveaxis(result, axis, -1)
        ordered[ordered == 0] = lines[lines == 0]


def _has_negative_zeros(x: Any) -> bool:
    """Whether an array, which is sorted if it has one dimension, has several zeros, and -0.0 among them."""
    if x.ndim == 1:
        zero = x.dtype.type(0)  # NumPy would convert the whole array to float64 to find an int in it.
        zeros = x[np.searchsorted(x, zero) : np.searchsorted(x, zero, side="right")]
        return zeros.size > 1 and bool(np.signbit(zeros).any())
    if x.size and x.dtype.itemsize <= 8:  # Of all bits, those of -0.0 are the least integer.
        bits = x.view(f"i{x.dtype.itemsize}")
        if bits.min() != np.iinfo(bits.dtype).min:
            return False
    return bool(np.count_nonzero(x == 0) > 1)  # NumPy counts bools several times as fast as numbers.


def _is_long_line(x: Any, axis: int) -> bool:
    return bool(x.shape[axis] == x.size >= _DIVIDED_FROM and num_threads() > 1)


def _sorted_line(x: Any) -> Any:
    """Returns an array of one dimension in order, by a sample sort whose samples are as large as x.

    Each thread partitions every T-th element into T parts of equal sizes, and then sorts what all threads have of one
    part. Of elements in any order, the parts of all threads have about the same bounds, so that few elements are in
    two neighbouring parts, which are sorted again.
    """
    count, line, out = num_threads(), memory_pool.empty(x.shape, x.dtype), memory_pool.empty(x.shape, x.dtype)
    slices = [x[k::count] for k in range(count)]
    pieces = np.split(line, np.cumsum([part.size for part in slices[:-1]]))
    cuts = [[piece.size * j // count for j in range(count + 1)] for piece in pieces]
    bounds = np.sum(cuts, axis=0).tolist()

    def divide(k: int) -> None:
        np.copyto(pieces[k], slices[k])
        partition(pieces[k][None], cuts[k][1:-1])

    def order(k: int) -> None:
        parts = [piece[cut[k] : cut[k + 1]] for piece, cut in zip(pieces, cuts, strict=True)]
        np.concatenate(parts, out=out[bounds[k] : bounds[k + 1]]).sort()

    each(divide, count)
    each(order, count)
    for begin, end in itertools.pairwise(bounds[1:]):
        first, last = out[begin], out[begin - 1]
        if last > first or (last != last and first == first):  # NaN is greater than all numbers.
            low = np.searchsorted(out[:begin], first, side="right")
            high = begin + np.searchsorted(out[begin:end], last)
            out[low:high].sort()
    return out


# -- indices ---------------------------------------------------------------------------------------


def _words(x: Any, axis: int, descending: bool) -> Any:
    """Returns words whose order is that of the elements, and of their indices along an axis where they are equal."""
    keys = keys_of(x)
    if descending:
        np.invert(keys, out=keys)
    words = keys.astype(np.uint64)
    words <<= np.uint64(32)
    shape = [1] * x.ndim
    shape[axis] = x.shape[axis]
    words |= np.arange(x.shape[axis], dtype=np.uint64).reshape(shape)
    return words


def keys_of(x: Any) -> Any:
    """Returns unsigned integers of four bytes, or of eight, whose order is that of the elements."""
    size = max(x.dtype.itemsize, 4)
    unsigned, signed, real = [np.dtype(f"{kind}{size}") for kind in "uif"]
    if x.dtype.kind in "bu":
        return x.astype(unsigned)
    last = 8 * size - 1
    sign = unsigned.type(1 << last)
    if x.dtype.kind == "i":
        return x.astype(signed).view(unsigned) ^ sign
    numbers = x.astype(real) + real.type(0)  # -0.0 and 0.0 are equal.
    bits = numbers.view(unsigned)
    # The order of negative numbers is the reverse of that of their bits.
    keys = bits ^ ((bits.view(signed) >> last).view(unsigned) | sign)
    keys[np.isnan(numbers)] = np.iinfo(unsigned).max  # All NaN are equal.
    return keys


def _indices_of(words: Any) -> Any:
    np.bitwise_and(words, _INDEX, out=words)
    return words.view(np.int64)


def least_of_short_range(x: Any, most: int) -> int | None:
    """Returns the least of integers if the greatest one is less than ``most`` above it; None for other arrays."""
    if x.dtype.kind not in "iu" or not x.size:
        return None
    flat = x.reshape(-1) if x.flags.c_contiguous else x
    for some in (flat[: len(flat) // 64], x):  # A few elements show that most ranges are long.
        if some.size and int(some.max()) - int(some.min()) >= most:
            return None
    return int(x.min())


def distances(x: Any, least: int) -> Any:
    """Returns the distances of integers from the least one, which int64 can hold."""
    return np.subtract(x, x.dtype.type(least), dtype=np.int64, casting="unsafe")


def _indices_of_line(x: Any) -> Any:
    """Returns the indices that sort an array of one dimension, with those of equal elements in order.

    The elements are distributed over ranges, whose bounds are those of a sample, in blocks in threads; then the indices
    of each range are sorted in a thread. NumPy takes half the time for parts that stay in a cache.
    """
    sample = np.sort(x[:: x.size // (_RANGES * _SAMPLES) or 1])
    bounds = sample[[sample.size * k // _RANGES for k in range(1, _RANGES)]]
    begins = range(0, x.size, _BLOCK)
    grouped, out = [memory_pool.empty(x.shape, np.dtype(np.int64)) for _ in range(2)]
    counts = np.empty((len(begins), _RANGES), np.int64)

    def distribute(k: int) -> None:
        block = slice(begins[k], begins[k] + _BLOCK)
        ranges = np.zeros(x[block].shape, np.uint8)
        for bound in bounds:
            ranges += ~(x[block] < bound)  # NaN is in the last range.
        np.add(np.argsort(ranges, kind="stable"), begins[k], out=grouped[block])
        counts[k] = np.bincount(ranges, minlength=_RANGES)

    each(distribute, len(begins))
    cuts = np.cumsum(counts, axis=1) + np.asarray(begins)[:, None]
    ends = np.cumsum(counts.sum(axis=0))

    def order(k: int) -> None:
        pieces = [grouped[end - count : end] for end, count in zip(cuts[:, k], counts[:, k], strict=True)]
        index = np.concatenate(pieces)
        if index.size:
            out[ends[k] - index.size : ends[k]] = index[_stable_argsort(x[index], 0)]

    each(order, _RANGES)
    return out


def _stable_argsort(x: Any, axis: int) -> Any:
    """Returns the indices that sort real numbers: those of equal elements are put in order afterwards, because NumPy's
    other algorithm is several times as fast as its stable one.
    """
    order = np.argsort(x, axis=axis)
    ordered = np.moveaxis(np.take_along_axis(x, order, axis), axis, -1)
    new = ordered[..., 1:] != ordered[..., :-1]
    if x.dtype.kind == "f":
        new &= ~np.isnan(ordered[..., :-1])  # All that follows NaN is NaN.
    if new.all():
        return order
    words = np.zeros(ordered.shape, np.uint64)
    np.cumsum(new, axis=-1, out=words[..., 1:])
    words <<= np.uint64(32)
    words |= np.moveaxis(order, axis, -1).view(np.uint64)
    words.sort(axis=-1)
    return np.moveaxis(_indices_of(words), -1, axis)


# -- random words ----------------------------------------------------------------------------------


def random_order(words: Any, count: int) -> Any:
    """Returns the first ``count`` of the indices that sort random words of int64. Equal words keep their order.

    The highest bits of random words divide them into parts of about the same size, which stay in a core's cache. NumPy
    sorts a part by 16 bits in linear time, so that two times are several times as fast as a sort of words.
    """
    n = words.size
    if n <= _SHORT:
        return np.argsort(words, stable=True)[:count]
    keys, bits = words.view(np.uint64) ^ np.uint64(1 << 63), min((n // _PART).bit_length(), 16)
    length = max(_PART, -(-n // _PIECES))
    pieces = range(0, n, length)
    divided, origins = memory_pool.empty((n,), keys.dtype), memory_pool.empty((n,), np.dtype(np.int64))
    ends = np.zeros((len(pieces), (1 << bits) + 1), np.int64)

    def divide(k: int) -> None:
        begin = pieces[k]
        piece = keys[begin : begin + length]
        digits = _digits(piece, 64 - bits, bits)
        order = np.argsort(digits, stable=True)
        np.cumsum(np.bincount(digits, minlength=1 << bits), out=ends[k, 1:])
        ends[k] += begin
        np.take(piece, order, out=divided[begin : begin + length], mode="clip")
        np.add(order, begin, out=origins[begin : begin + length])

    def sort(k: int) -> None:
        slices = [slice(*bounds) for bounds in ends[:, k : k + 2].tolist()]
        part = np.concatenate([divided[s] for s in slices])
        order = np.argsort(_digits(part, 32 - bits, 16), stable=True)
        order = order.take(np.argsort(_digits(part, 48 - bits, 16).take(order), stable=True))
        ordered = part.take(order)
        if (ordered[1:] < ordered[:-1]).any():  # Some differ in their lower bits only.
            order = np.argsort(part, stable=True)
        result[begins[k] : begins[k + 1]] = np.concatenate([origins[s] for s in slices]).take(order)

    each(divide, len(pieces))
    begins = (ends - ends[:, :1]).sum(axis=0)
    parts = int(np.searchsorted(begins, count))
    result = memory_pool.empty((int(begins[parts]),), np.dtype(np.int64))
    each(sort, parts)
    return result[:count]


def _digits(words: Any, shift: int, bits: int) -> Any:
    """Returns 16 bits of unsigned words, or all that the shift leaves, in the smallest dtype."""
    return (words >> np.uint64(shift)).astype(np.uint8 if bits <= 8 else np.uint16)


# -- lines -----------------------------------------------------------------------------------------


_ByLines = Callable[[Any, int, Any], None]
"""``function(x, axis, out)`` computes a block of lines along an axis into ``out``."""


def _into(function: Callable[[Any, int], Any]) -> _ByLines:
    """Returns the function that writes the array that a function returns."""

    def write(block: Any, axis: int, out: Any) -> None:
        out[...] = function(block, axis)

    return write


def _by_lines(x: Any, axis: int, dtype: np.dtype[Any], function: _ByLines) -> Any:
    """Returns what a function computes of each line along an axis by itself, block by block in threads."""
    if x.size < _DIVIDED_FROM:
        small = np.empty(x.shape, dtype)
        function(x, axis, small)
        return small
    x, n = np.ascontiguousarray(x), x.shape[axis]
    before, after = math.prod(x.shape[:axis]), math.prod(x.shape[axis + 1 :])
    cube, out = x.reshape(before, n, after), memory_pool.empty(x.shape, dtype)
    whole_rows = n * after <= _BLOCK
    rows = max(_BLOCK // (n * after), 1) if whole_rows else 1
    columns = after if whole_rows else max(_BLOCK // n, min(_COLUMNS, after))
    blocks = [(a, b) for a in range(0, before, rows) for b in range(0, after, columns)]
    into = out.reshape(cube.shape)

    def work(k: int) -> None:
        a, b = blocks[k]
        index = (slice(a, a + rows), slice(None), slice(b, b + columns))
        if after == 1:
            function(cube[index], 1, into[index])
        else:  # NumPy walks along lines whose elements are not adjacent far more slowly than it copies them.
            part = cube[index]
            block, output = [np.empty((part.shape[0], part.shape[2], n), kind) for kind in (x.dtype, dtype)]
            _transpose(part, block.transpose(0, 2, 1))
            function(block, 2, output)
            _transpose(output.transpose(0, 2, 1), into[index])

    each(work, len(blocks))
    return out


def _transpose(source: Any, target: Any) -> None:
    """Copies an array to one in another memory order by tiles along its second dimension, which stay in the cache."""
    for begin in range(0, source.shape[1], _TILE):
        target[:, begin : begin + _TILE] = source[:, begin : begin + _TILE]


def order_of_numbers(x: Any) -> Any:
    """Returns indices that sort an array of one dimension of real numbers."""
    if x.dtype.itemsize > 4:
        return np.argsort(x)
    words = _words(x, 0, False)
    words.sort()
    return _indices_of(words)
