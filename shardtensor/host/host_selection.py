"""Selection of the elements of given ranks from lines of host arrays, where NaN is greater than all numbers.

A sample shows between which elements those of the ranks are: the few elements between these bounds are copied, the
others are only counted, and NumPy partitions the copies (R. W. Floyd and R. L. Rivest, "Algorithm 489: The algorithm
SELECT for finding the i-th smallest of n elements", CACM 18, 1975). That reads a long line once, in blocks that stay in
the cache, in threads. Where the bounds turn out to be wrong, NumPy partitions the whole line.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from shardtensor.host.threads import each

_SELECTED_FROM = 1 << 20
"""Floats of a line from which a sample saves time."""

_INTEGERS_FROM = 1 << 22
"""Integers of a line from which a sample saves time: NumPy partitions them faster than floats."""

_WINDOWS = 16
"""The most ranks apart from each other for which all elements are compared with bounds around each of them."""

_DEVIATIONS = 3.5
"""Standard deviations of the rank of a sample's element that are between a rank and its bounds."""

_KEPT = 4
"""The least quotient of the elements of a line and those of them that are copied."""

_BLOCK = 1 << 19
"""Bytes of a block of a line, which stays in the cache while it is compared with all bounds."""

_ROWS = 1 << 19
"""Elements of a block of rows that a thread partitions."""

_SORTED_UP_TO = 32
"""Elements of a row up to which sorting it takes no longer than partitioning it and looking for its greatest one."""

_REPEATED_FROM = 1 << 14
"""Elements of a row from which a sample shows whether one of them is repeated often."""

_SAMPLE = 256
"""Elements of that sample."""

_MULTIPLIER = 2654435769
"""The golden ratio's fraction of 32 bits."""

_BITS = (1 << 32) - 1
"""The bits of a hash."""


def elements_of_ranks(lines: Any, ranks: list[int]) -> Any:
    """Returns the elements that are at the given places, which are in ascending order, of each row of a matrix in
    order. The elements are real numbers.
    """
    rows, size = lines.shape
    elements = np.empty((rows, len(ranks)), lines.dtype)
    if not elements.size:
        return elements
    kind = lines.dtype.kind
    if size < (_SELECTED_FROM if kind == "f" else _INTEGERS_FROM) or kind not in "iuf":
        step = max(_ROWS // size, 1)
        each(lambda k: _partition(lines, ranks, elements, slice(k * step, (k + 1) * step)), -(-rows // step))
        return elements
    if rows > 1:
        lines = np.ascontiguousarray(lines)  # A pass over one row would read the cache lines of several ones.
    for k in range(rows):
        if not _select(lines[k], ranks, elements[k]):
            _partition(lines, ranks, elements, slice(k, k + 1))
    return elements


# -- by bounds from a sample -----------------------------------------------------------------------


class _Cut(NamedTuple):
    """A place between the sorted elements of a line: that in front of all elements of a value, or behind them."""

    value: Any
    behind: bool


class _Window(NamedTuple):
    """The least and the greatest of neighbouring elements, among which those of some ranks probably are."""

    least: Any
    greatest: Any

    def has(self, before: _Cut, behind: _Cut) -> bool:
        """Whether the elements between two cuts, which are not all equal, are in the window."""
        return bool(before.value != behind.value and self.least <= before.value and behind.value <= self.greatest)


def _select(line: Any, ranks: Sequence[int], out: Any) -> bool:
    """Computes the elements of the ranks of a long line, and returns whether their bounds were right."""
    last, wide = line.size - 1, np.dtype(np.float32) if line.dtype == np.float16 else line.dtype
    found = _cuts(line, [rank for rank in ranks if rank != last], wide)
    if found is None:
        return False
    cuts, is_kept = found
    toggles = [a != b for a, b in itertools.pairwise([False, *is_kept, False])]  # where copied elements begin and end
    step = max(_BLOCK // wide.itemsize, 1)
    begins = range(0, line.size, step)
    counts, greatest = np.zeros((len(begins), len(cuts)), np.int64), np.zeros(len(begins), wide)
    is_greatest_read = wide.kind == "f" or last in ranks
    kept: list[Any] = [None] * len(begins)
    most = line.size // _KEPT
    left = [most]

    def compare(k: int) -> None:
        if left[0] < 0:
            return
        # NumPy compares elements of two bytes, and those that are not adjacent, more slowly than it copies them.
        block = np.ascontiguousarray(line[begins[k] : begins[k] + step], wide)
        if is_greatest_read:
            greatest[k] = block.max()  # NaN if any element is.
        words = np.zeros(-(-block.size // 8), np.uint64)
        between, precede = words.view(np.bool_)[: block.size], np.empty(block.shape, np.bool_)
        for number, cut in enumerate(cuts):
            (np.less_equal if cut.behind else np.less)(block, cut.value, out=precede)  # false for NaN
            counts[k, number] = np.count_nonzero(precede)
            if toggles[number]:
                np.bitwise_xor(between, precede, out=between)
        kept[k] = _few(block, words) if any(toggles) else block[:0]
        left[0] -= kept[k].size  # Where threads write at once, more blocks are compared, and the result is the same.

    each(compare, len(begins))
    if any(few is None for few in kept) or sum(few.size for few in kept) > most:
        return False
    totals, at_last = counts.sum(axis=0).tolist(), greatest.max()
    copied = [
        after - before if keep else 0 for (before, after), keep in zip(itertools.pairwise(totals), is_kept, strict=True)
    ]
    places, among = [], []
    for place, rank in enumerate(ranks):
        number = bisect.bisect_right(totals, rank) - 1
        if rank == last or (number == len(is_kept) and cuts[number] == _ends(wide)[1]):
            out[place] = at_last
        elif not 0 <= number < len(is_kept):
            return False
        elif cuts[number].value == cuts[number + 1].value:
            out[place] = cuts[number].value
        elif is_kept[number]:
            places.append(place)
            among.append(sum(copied[:number]) + rank - totals[number])
        else:
            return False
    if places:
        few = np.concatenate(kept)[None]
        partition(few, among)
        out[places] = few[0, among]
    return True


def _few(block: Any, words: Any) -> Any:
    """Returns the elements of a block where the bytes of words of eight of them are true.

    NumPy takes longer to find few bytes among all than to copy the eight elements of each word that is not zero.
    """
    if block.size % 8:
        return block.take(np.flatnonzero(words.view(np.bool_)[: block.size]))
    at = np.flatnonzero(words)
    return block.reshape(-1, 8).take(at, axis=0).reshape(-1).take(np.flatnonzero(words.take(at).view(np.bool_)))


def _cuts(line: Any, ranks: Sequence[int], wide: Any) -> tuple[list[_Cut], list[bool]] | None:
    """Returns the cuts by which the elements of the ranks are bounded, and between which of them elements are copied;
    None if the ranks are too many, or the elements too similar.

    An element that is repeated often has a cut on both sides, so that it is counted and not copied.
    """
    if not ranks:
        return [], []
    size, count = line.size, math.ceil(line.size ** (2 / 3))
    sample = np.sort(line[_places(size, count)].astype(wide))
    numbers = count - int(np.count_nonzero(sample != sample)) if wide.kind == "f" else count
    (least, greatest), cuts, windows, total = _ends(wide), set(), [], 0
    for begin, end, margin in _ranges(ranks, size, count):
        total += end - begin
        begin = min(begin, numbers - 1)
        window = _Window(sample[begin] if begin >= 0 else least.value, sample[end] if end < numbers else greatest.value)
        windows.append(window)
        cuts |= {_Cut(window.least, False), _Cut(window.greatest, True)}
        for value in window:
            first, behind = [int(np.searchsorted(sample[:numbers], value, side=side)) for side in ("left", "right")]
            if behind - first > margin:
                cuts |= {_Cut(value, False), _Cut(value, True)}
    if len(windows) > _WINDOWS or total * _KEPT > count:
        return None
    in_order = sorted(cuts)
    return in_order, [any(w.has(*pair) for w in windows) for pair in itertools.pairwise(in_order)]


def _ends(dtype: Any) -> tuple[_Cut, _Cut]:
    """Returns the cuts in front of all numbers of a dtype, and behind them."""
    if dtype.kind == "f":
        return _Cut(dtype.type(-math.inf), False), _Cut(dtype.type(math.inf), True)
    limits = np.iinfo(dtype)
    return _Cut(dtype.type(limits.min), False), _Cut(dtype.type(limits.max), True)


def _places(size: int, count: int) -> Any:
    """Returns the places of a sample: one in each of ``count`` ranges, where a multiplicative hash (Knuth, "The Art of
    Computer Programming", volume 3, section 6.4) has it, so that no period of the elements is that of the sample.
    """
    numbers = np.arange(count)
    hashes = numbers * _MULTIPLIER & _BITS
    return numbers * size // count + (hashes * (size // count) >> 32)


def _ranges(ranks: Sequence[int], size: int, count: int) -> list[tuple[int, int, int]]:
    """Returns the first and the last place in a sample between which the elements of ranks probably are, in ascending
    order, and how far the ranks are from these places at least. Ranges that overlap are one.
    """
    found: list[tuple[int, int, int]] = []
    for rank in ranks:
        share = rank / size
        margin = math.ceil(_DEVIATIONS * (math.sqrt(count * share * (1 - share)) + 1))
        begin, end = int(share * count) - margin, int(share * count) + margin
        if found and begin <= found[-1][1]:
            begin, _, least = found.pop()
            margin = min(margin, least)
        found.append((begin, end, margin))
    return found


# -- by partitions ---------------------------------------------------------------------------------


def _partition(lines: Any, ranks: list[int], out: Any, rows: slice) -> None:
    """Computes the elements of the ranks of some rows."""
    last, is_narrow = lines.shape[1] - 1, lines.dtype == np.float16  # See `partition`.
    if last < _SORTED_UP_TO:
        copied = lines[rows].copy(order="C")
        copied.sort(axis=1, stable=is_narrow or None)
        out[rows] = copied.take(ranks, axis=1)
        return
    copied = lines[rows].astype(np.float32 if is_narrow else lines.dtype, order="C")
    partition(copied, [rank for rank in ranks if rank != last])
    out[rows] = copied.take(ranks, axis=1)
    if ranks[-1] == last:  # The greatest element takes one pass, and is NaN if any element is.
        out[rows, -1] = copied.max(axis=1)


def partition(lines: Any, ranks: list[int]) -> None:
    """Rearranges rows so that the elements of the ranks are in their places. The dtype is not float16, of which NumPy
    leaves long arrays unsorted on some processors (2.4.6).

    NumPy takes five times as long to partition by several ranks as by one of them after the other; and it sorts rows in
    less time than it partitions them by an element that is repeated often.
    """
    if not ranks:
        return
    middle = len(ranks) // 2
    while ranks[middle : middle + 2] == [ranks[middle], ranks[middle] + 1]:
        middle += 1
    rank, first = ranks[middle], middle
    if lines.shape[1] >= _REPEATED_FROM and _is_repeated(lines, rank):
        lines.sort(axis=1)
        return
    lines.partition(rank, axis=1)
    if middle and ranks[middle - 1] == rank - 1:  # It is the greatest of those in front, which takes one pass.
        first, front = middle - 1, lines[:, :rank]
        at = front.argmax(axis=1)[:, None]  # the first NaN, if there is one
        greatest = np.take_along_axis(front, at, axis=1)
        np.put_along_axis(front, at, front[:, -1:], axis=1)
        front[:, -1:] = greatest
    partition(lines[:, : ranks[first]], ranks[:first])
    partition(lines[:, rank + 1 :], [other - rank - 1 for other in ranks[middle + 1 :]])


def _is_repeated(lines: Any, rank: int) -> bool:
    """Whether an element around a rank is probably that of a fifth of all ranks, in any row: it is in a sample."""
    sample = np.sort(lines[:, :: max(lines.shape[1] // _SAMPLE, 1)], axis=1)
    count = sample.shape[1]
    at, near = rank * count // lines.shape[1], count // 32
    for place in max(at - near, 0), at, min(at + near, count - 1):
        if np.any(np.count_nonzero(sample == sample[:, place, None], axis=1) * 5 > count):
            return True
    return False
