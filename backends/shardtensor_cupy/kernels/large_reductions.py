"""Reductions of large arrays by kernels that divide every dimension among blocks.

CuPy divides a reduction among blocks only by the elements of its result, unless CUB computes it: a variance of a whole
array runs in one block, as do sums along all but the last dimensions where few elements remain.

Adjacent dimensions are merged to groups. A launch reduces one group: *rows*, whose elements follow each other in
memory, by threads along them; or *columns*, beside which another group remains, by threads along that. Blocks divide
the reduced group into chunks, whose results the last block of those that have the same columns merges.

The order in which elements are merged depends on the dtype, and on the sizes of the reduced dimensions and of those
that follow them: neither on the dimensions before them, nor on addresses, nor on the GPU. So does the choice between
these kernels and CuPy's. Parts of one buffer that belong to different devices may therefore be reduced at once.
"""

from __future__ import annotations

import itertools
import math
import operator
import threading
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.lib.array_utils import normalize_axis_tuple

from shardtensor_cupy.kernels.reduction_kernels import MOST, PACK, THREADS, Variant

__all__ = ["LEAST", "Reductions", "axes_of"]

LEAST = 1 << 12
"""The number of elements of the reduced dimensions and of those that follow them from which on these kernels are used.
"""

_SHORTEST = 1 << 8
"""The least number of elements of rows that are reduced before other dimensions are."""

_EACH = 8
"""The number of packs that a thread reads at least where a group is divided into chunks."""

_CHUNKS = 2048
"""The maximum number of chunks of rows."""

_CHUNKS_OF_COLUMNS = 512
"""The maximum number of chunks of columns."""

_LANES = 8
"""The number of threads of a block along columns, unless there are few columns."""

_COUNTERS = 1 << 12
"""The least number of counters of blocks for a stream."""

_STREAMS = 64
"""The number of streams whose counters are kept."""

_OF_THREAD = 2
"""The pointer that stands for another stream in each thread."""

_LAYOUTS = 256
"""The number of shapes, strides and alignments that are kept."""

_OPTIONS = ("--std=c++17",)

_FLOATS = ("float16", "float32", "float64")


class _Dimension(NamedTuple):
    """One dimension of an array, or several that are one in memory, with a step in bytes."""

    reduced: bool
    size: int
    step: int


class _Group(NamedTuple):
    """Adjacent dimensions to be reduced, and those around them.

    Attributes:
        before: the dimensions before it: at most two.
        size: the number of its elements for each element of those around it.
        step: from one to the next; for rows in pieces from one piece to the next.
        piece: the number of adjacent elements of a row; the number of all of them where the row is one piece.
        after: the number of elements behind it, each of which is adjacent to the next.
        rows: whether there are none behind it.
        aligned_to: a number of bytes, a multiple of which is the address of the first element.
    """

    before: Sequence[_Dimension]
    size: int
    step: int
    piece: int
    after: int
    rows: bool
    aligned_to: int


class _Launch(NamedTuple):
    """A launch.

    Attributes:
        kernel, blocks: the kernel, and the number of blocks.
        sizes: its arguments from the sizes on, except for the divisor.
        shape, dtype: those of its result.
        partial: the number of results of chunks; 0 where there is one chunk only.
        counters: the number of counters of blocks that it needs.
    """

    kernel: Any
    blocks: tuple[int]
    sizes: tuple[Any, ...]
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    partial: tuple[int]
    counters: int


class _Plan(NamedTuple):
    """The launches, the shape of the result, and whether the array is copied to row-major order before."""

    launches: Sequence[_Launch]
    shape: tuple[int, ...]
    copied: bool


class Reductions:
    """Reduces arrays on the current GPU.

    Args:
        cupy: the module.
    """

    def __init__(self, cupy: Any) -> None:
        self._empty, self._compile, self._contiguous = cupy.empty, cupy.RawKernel, cupy.ascontiguousarray
        self._zeros, self._stream = cupy.zeros, cupy.cuda.get_current_stream
        self._counters: dict[Hashable, Any] = {}
        self._kernels: dict[Variant, Any] = {}
        self._plans: dict[Hashable, _Plan | None] = {}

    def __call__(
        self,
        operation: str,
        x: Any,
        axis: Any,
        keepdims: bool,
        total: np.dtype[Any],
        result: np.dtype[Any],
        divisor: float = 1,
        means: Any = None,
    ) -> Any:
        """Returns a reduction as a new array; None where CuPy's own kernels have to compute it: for few elements, short
        rows, arrays that repeat elements, and where dimensions that are not adjacent are reduced for ``"squares"``.

        Arrays of other strides than the kernels can read are copied first.

        Args:
            operation: ``"sum"``, ``"squares"``, ``"max"`` or ``"min"``.
            x: the array.
            axis, keepdims: see NumPy.
            total: the dtype in which elements are merged.
            result: the dtype of the result.
            divisor: a number by which the result is divided, in the dtype ``total``.
            means: for ``"squares"``, the sum of the squared deviations from the mean: an array in row-major order of
                dtype ``total``, with an element for each of the result.
        """
        key = operation, x.shape, x.strides, x.dtype, axis, keepdims, total, result, x.data.ptr % PACK
        try:
            plan = self._plans[key]
        except KeyError:
            if len(self._plans) >= _LAYOUTS:
                self._plans.clear()
            plan = self._plans[key] = self._plan(operation, x, axis, keepdims, total, result)
        if plan is None:
            return None
        launches, shape, copied = plan
        if copied:
            x = self._contiguous(x)
        last = launches[-1]
        for launch in launches:
            out = self._empty(shape if launch is last else launch.shape, launch.dtype)
            arrays = (x, out) if means is None else (x, means, out)
            if launch.counters:
                arrays += self._empty(launch.partial, total), self._counted(x, launch.counters)
            launch.kernel(
                launch.blocks, (THREADS,), (*arrays, *launch.sizes, total.type(divisor if launch is last else 1))
            )
            x, means = out, None
        return out

    def _counted(self, x: Any, count: int) -> Any:
        """Returns counters, which are zero, for launches on the current stream, one of which runs at a time."""
        stream = self._stream().ptr
        key = x.data.device_id, stream, threading.get_ident() if stream == _OF_THREAD else 0
        counters = self._counters.get(key)
        if counters is None or counters.size < count:
            if len(self._counters) >= _STREAMS:
                self._counters.clear()
            counters = self._zeros((max(_COUNTERS, count),), np.uint32)
            self._counters[key] = counters
        return counters

    def takes(self, shape: Sequence[int], axes: Sequence[int]) -> bool:
        """Whether sums of floats in arrays of a shape along some dimensions are computed here."""
        return _is_supported([(d in axes, n) for d, n in enumerate(shape) if n > 1])

    def _plan(
        self, operation: str, x: Any, axis: Any, keepdims: bool, total: np.dtype[Any], result: np.dtype[Any]
    ) -> _Plan | None:
        axes = axes_of(axis, x.ndim)
        dimensions = [_Dimension(d in axes, n, x.strides[d]) for d, n in enumerate(x.shape) if n > 1]
        if not x.size or not all(d.step for d in dimensions) or not _is_supported([d[:2] for d in dimensions]):
            return None
        if operation == "squares" and sum([reduced for reduced, _ in _runs([d[:2] for d in dimensions])]) > 1:
            return None  # A value of the first launch would belong to several means.
        kept = tuple([1 if d in axes else n for d, n in enumerate(x.shape) if keepdims or d not in axes])
        dtypes, copied = (x.dtype, total, result), False
        launches = self._of_dimensions(operation, dimensions, dtypes, math.gcd(x.data.ptr, PACK))
        if launches is None:
            copied, launches = (
                True,
                self._of_dimensions(operation, _in_row_major_order(dimensions, x.itemsize), dtypes, PACK),
            )
        if launches is None or any(launch.blocks[0] >= 1 << 31 for launch in launches):
            return None
        return _Plan(launches, kept, copied)

    def _of_dimensions(
        self,
        operation: str,
        dimensions: Sequence[_Dimension],
        dtypes: tuple[np.dtype[Any], np.dtype[Any], np.dtype[Any]],
        aligned_to: int,
    ) -> list[_Launch] | None:
        """Returns the launches that reduce an array of these dimensions, the last adjacent ones first; None where the
        kernels do not read arrays of such strides.
        """
        source, total, result = dtypes
        launches: list[_Launch] = []
        while True:
            end = 1 + max([n for n, d in enumerate(dimensions) if d.reduced])
            begin = 1 + max([n for n, d in enumerate(dimensions[:end]) if not d.reduced], default=-1)
            before, after = dimensions[:begin], dimensions[end:]
            more = any(d.reduced for d in before)
            group = _group(before, dimensions[begin:end], after, source.itemsize, aligned_to)
            if group is None:
                return None
            launches.append(self._launch(operation, group, source, total, total if more else result))
            if not more:
                return launches
            operation = operation if operation in ("max", "min") else "sum"
            source, aligned_to = total, PACK
            dimensions = _in_row_major_order([*before, *after], total.itemsize)

    def _launch(
        self, operation: str, group: _Group, source: np.dtype[Any], total: np.dtype[Any], result: np.dtype[Any]
    ) -> _Launch:
        pack, lanes = min(PACK // source.itemsize, MOST), 0
        if not group.rows:
            pack = math.gcd(group.after, pack)
            lanes = _lanes(group.size // _EACH, group.after // pack)
        size, together = group.size, lanes or THREADS * pack
        chunk = together * max(_EACH, -(-size // (together * (_CHUNKS_OF_COLUMNS if lanes else _CHUNKS))))
        chunks, outer = -(-size // chunk), math.prod([d.size for d in group.before])
        broken = group.rows and group.piece < size
        # A dimension of one element has no step that matters.
        steps = [d.step for d in group.before if d.size > 1] + ([group.step] if lanes or broken else [])
        steps += [group.piece * source.itemsize] if broken else []
        aligned = not any(n % (pack * source.itemsize) for n in (group.aligned_to, *steps))
        variant = Variant(
            operation, source.name, total.name, result.name, pack, aligned, lanes, broken, chunked=chunks > 1
        )
        if variant not in self._kernels:
            self._kernels[variant] = self._compile(variant.text(), variant.name, options=_OPTIONS)
        tiles = -(-group.after // (pack * (THREADS // lanes))) if lanes else 1
        none = _Dimension(False, 1, 0)
        first, second = [*group.before, none, none][:2]
        inner = group.piece if group.rows else group.after
        sizes = [second.size, first.step, second.step, size, chunk, chunks, inner, group.step, tiles]
        return _Launch(
            self._kernels[variant],
            (outer * chunks * tiles,),
            tuple(map(np.int64, sizes)),
            (outer * group.after,),
            result,
            (outer * chunks * group.after if chunks > 1 else 0,),
            outer * tiles if chunks > 1 else 0,
        )


def axes_of(axis: Any, ndim: int) -> tuple[int, ...]:
    """Returns the numbers of reduced dimensions from 0 on; None stands for all."""
    return tuple(range(ndim)) if axis is None else tuple(normalize_axis_tuple(axis, ndim))


def _in_row_major_order(dimensions: Sequence[_Dimension], itemsize: int) -> list[_Dimension]:
    """Returns dimensions of an array that is in row-major order."""
    sizes = [d.size for d in dimensions]
    return [_Dimension(d.reduced, d.size, itemsize * math.prod(sizes[n + 1 :])) for n, d in enumerate(dimensions)]


def _merged(dimensions: Sequence[_Dimension]) -> list[_Dimension]:
    """Returns adjacent dimensions, each of which is one in memory."""
    merged: list[_Dimension] = []
    for reduced, n, step in dimensions:
        if merged and merged[-1].step == n * step:
            merged[-1] = _Dimension(reduced, merged[-1].size * n, step)
        else:
            merged.append(_Dimension(reduced, n, step))
    return merged


def _runs(dimensions: Sequence[tuple[bool, int]]) -> list[tuple[bool, int]]:
    """Returns whether adjacent dimensions are reduced, and the number of their elements."""
    runs = itertools.groupby(dimensions, operator.itemgetter(0))
    return [(reduced, math.prod([n for _, n in run])) for reduced, run in runs]


def _is_supported(dimensions: Sequence[tuple[bool, int]]) -> bool:
    """Whether the kernels reduce arrays with such dimensions, given whether they are reduced and their sizes."""
    runs = _runs(dimensions)
    while runs and not runs[0][0]:
        runs = runs[1:]
    if math.prod([n for _, n in runs]) < LEAST or not runs:
        return False
    last = runs[-2:] if not runs[-1][0] else runs[-1:]
    return len(last) == len(runs) or math.prod([n for _, n in last]) >= _SHORTEST


def _group(
    before: Sequence[_Dimension],
    own: Sequence[_Dimension],
    after: Sequence[_Dimension],
    itemsize: int,
    aligned_to: int,
) -> _Group | None:
    """Returns the group of the dimensions ``own``; None where the kernels do not read it."""
    before, own, columns = _merged(before), _merged(own), _merged(after)
    if any(d.step < 0 for d in (*before, *own, *columns)) or len(before) > 2:
        return None
    size, last = math.prod([d.size for d in own]), own[-1]
    if columns:
        if len(own) > 1 or len(columns) > 1 or columns[0].step != itemsize:
            return None
        return _Group(before, size, last.step, size, columns[0].size, False, aligned_to)
    if len(own) == 1 and last.step == itemsize:
        return _Group(before, size, 0, size, 1, True, aligned_to)
    if len(own) == 1:
        own = [last, _Dimension(True, 1, itemsize)]
    if len(own) > 2 or own[1].step != itemsize or size >= 1 << 31:
        return None
    return _Group(before, size, own[0].step, own[1].size, 1, True, aligned_to)


def _lanes(count: int, packs: int) -> int:
    """Returns the number of threads of a block along columns, a power of two: about ``count``, or as many more as
    would have no pack beside the others.
    """
    lanes = 1 << (min(max(count, 1), _LANES).bit_length() - 1)
    beside = 1 << (packs - 1).bit_length()
    return max(lanes, THREADS // min(beside, THREADS))
