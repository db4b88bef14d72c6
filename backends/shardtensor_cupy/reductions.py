"""Reductions of large arrays by kernels that divide every dimension among blocks.

CuPy divides a reduction among blocks only by the elements of its result, unless CUB computes it: a variance of a whole
array runs in one block, as do sums along all but the last dimensions where few elements remain.

Adjacent dimensions are merged to groups. A launch reduces one group: *rows*, whose elements follow each other in
memory, by threads along them; or *columns*, beside which another group remains, by threads along that. Blocks divide
the reduced group into chunks, whose results a second launch merges.

The order in which elements are merged depends on the dtype, and on the sizes of the reduced dimensions and of those
that follow them: neither on the dimensions before them, nor on addresses, nor on the GPU. So does the choice between
these kernels and CuPy's. Parts of one buffer that belong to different devices may therefore be reduced at once.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import numpy as np

from shardtensor.sharding.rules import reduced_axes
from shardtensor_cupy.reduction_kernels import MOST, PACK, THREADS, Variant

__all__ = ["Reductions"]

LEAST = 1 << 12
"""The number of elements of the reduced dimensions and of those that follow them from which on these kernels are used.
"""

_SHORTEST = 1 << 8
"""The least number of elements of rows that are reduced before other dimensions are."""

_EACH = 8
"""The number of packs that a thread reads at least where a group is divided into chunks."""

_CHUNKS = 2048
"""The maximum number of chunks of a group."""

_LANES = 8
"""The number of threads of a block along columns, unless there are few columns."""

_LANES_OF_CHUNKS = 32
"""The same where the results of chunks are merged, of which there are few."""

_LAYOUTS = 256
"""The number of shapes, strides and alignments that are kept."""

_OPTIONS = ("--std=c++17",)

_FLOATS = ("float16", "float32", "float64")


class _Group(NamedTuple):
    """Adjacent dimensions that are one in memory, with a step in bytes."""

    reduced: bool
    size: int
    step: int


class _Rows(NamedTuple):
    """A group to be reduced, and those around it.

    Attributes:
        before: the groups before it.
        size, step: its own.
        after: the number of elements behind it, each of which is adjacent to the next.
        aligned_to: a number of bytes, a multiple of which is the address of the first element.
    """

    before: Sequence[_Group]
    size: int
    step: int
    after: int
    aligned_to: int


class _Launch(NamedTuple):
    kernel: Any
    blocks: tuple[int]
    sizes: tuple[Any, ...]
    shape: tuple[int, ...]
    dtype: np.dtype[Any]


class _Plan(NamedTuple):
    launches: Sequence[_Launch]
    shape: tuple[int, ...]


class Reductions:
    """Reduces arrays on the current GPU.

    Args:
        cupy: the module.
    """

    def __init__(self, cupy: Any) -> None:
        self._empty, self._compile = cupy.empty, cupy.RawKernel
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
        """Returns a reduction as a new array; None where CuPy's own kernels have to compute it: for few elements, and
        for arrays whose dimensions are more than a few groups in memory.

        Args:
            operation: ``"sum"``, ``"squares"``, ``"nansum"``, ``"numbers"`` (the number of elements that are not NaN),
                ``"max"`` or ``"min"``.
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
        launches, shape = plan
        last = launches[-1]
        for launch in launches:
            made = self._empty(shape if launch is last else launch.shape, launch.dtype)
            arrays = (x, made) if means is None else (x, means, made)
            launch.kernel(
                launch.blocks, (THREADS,), (*arrays, *launch.sizes, total.type(divisor if launch is last else 1))
            )
            x, means = made, None
        return made

    def takes(self, parts: Any, axis: Any) -> bool:
        """Whether sums of floats along dimensions except for the first are computed here in such a way that each part
        along the first dimension has the bits that it would have alone.
        """
        if parts.dtype.name not in _FLOATS or not parts.size:
            return False
        steps = [step for n, step in zip(parts.shape[1:], parts.strides[1:], strict=True) if n > 1]
        if not steps or steps[-1] != parts.itemsize:  # The order of dimensions would depend on that of the parts.
            return False
        axes = reduced_axes(axis, parts.ndim)
        groups = _groups(parts.shape, parts.strides, [d in axes for d in range(parts.ndim)])
        return _are_supported(groups, parts.itemsize)

    def _plan(
        self, operation: str, x: Any, axis: Any, keepdims: bool, total: np.dtype[Any], result: np.dtype[Any]
    ) -> _Plan | None:
        axes = reduced_axes(axis, x.ndim)
        order = _memory_order(x, axes) if x.size else ()
        groups = _groups([x.shape[d] for d in order], [x.strides[d] for d in order], [d in axes for d in order])
        if not _are_supported(groups, x.itemsize):
            return None
        launches: list[_Launch] = []
        source, aligned_to = x.dtype, math.gcd(x.data.ptr, PACK)
        while groups:
            at = max([n for n, group in enumerate(groups) if group.reduced])
            before, group, after = groups[:at], groups[at], groups[at + 1 :]
            more = any([other.reduced for other in before])
            if more and operation == "squares":
                return None  # A value of this launch would belong to several means.
            rows = _Rows(before, group.size, group.step, after[0].size if after else 1, aligned_to)
            launches += self._launches(operation, rows, source, total, total if more else result)
            operation = operation if operation in ("max", "min") else "sum"
            source, aligned_to, groups = total, PACK, _contiguous([*before, *after], total.itemsize) if more else []
        if any(launch.blocks[0] >= 1 << 31 for launch in launches):
            return None
        kept = [1 if d in axes else n for d, n in enumerate(x.shape) if keepdims or d not in axes]
        return _Plan(launches, tuple(kept))

    def _launches(
        self, operation: str, rows: _Rows, source: np.dtype[Any], total: np.dtype[Any], result: np.dtype[Any]
    ) -> list[_Launch]:
        """Returns the launches that reduce one group."""
        most = min(PACK // source.itemsize, MOST)
        if rows.after == 1 and rows.step == source.itemsize:
            pack, lanes, together = most, 0, THREADS * most
        else:
            pack = math.gcd(rows.after, most)
            lanes = together = _lanes(rows.size // _EACH, _LANES, rows.after // pack)
        chunk = together * max(_EACH, -(-rows.size // (together * _CHUNKS)))
        chunks = -(-rows.size // chunk)
        whole = chunks == 1
        first = self._launch(operation, rows, (source, total, result if whole else total), pack, lanes, chunk)
        if whole:
            return [first]
        outer = math.prod([group.size for group in rows.before])
        step = rows.after * total.itemsize
        between = _Rows([_Group(False, outer, chunks * step)], chunks, step, rows.after, PACK)
        operation = operation if operation in ("max", "min") else "sum"
        pack, lanes = PACK // total.itemsize, 0
        if rows.after > 1:
            pack = math.gcd(rows.after, pack)
            lanes = _lanes(chunks // 2, _LANES_OF_CHUNKS, rows.after // pack)
        return [first, self._launch(operation, between, (total, total, result), pack, lanes, chunks)]

    def _launch(
        self,
        operation: str,
        rows: _Rows,
        dtypes: tuple[np.dtype[Any], np.dtype[Any], np.dtype[Any]],
        pack: int,
        lanes: int,
        chunk: int,
    ) -> _Launch:
        """Returns the launch that reduces chunks of a group; see `Variant`."""
        source, total, result = dtypes
        before, size, step, after, aligned_to = rows
        outer, chunks = math.prod([group.size for group in before]), -(-size // chunk)
        # A group of one element has no step that matters.
        steps = [group.step for group in before if group.size > 1] + ([step] if lanes else [])
        aligned = not any(n % (pack * source.itemsize) for n in (aligned_to, *steps))
        variant = Variant(operation, source.name, total.name, result.name, pack, aligned, lanes)
        if variant not in self._kernels:
            self._kernels[variant] = self._compile(variant.text(), variant.name, options=_OPTIONS)
        tiles = -(-after // (pack * (THREADS // lanes))) if lanes else 1
        first, second = [*before, _Group(False, 1, 0), _Group(False, 1, 0)][:2]
        sizes = [second.size, first.step, second.step, size, chunk, chunks, *([step, after, tiles] if lanes else [])]
        return _Launch(
            self._kernels[variant],
            (outer * chunks * tiles,),
            tuple(map(np.int64, sizes)),
            (outer * chunks * after,),
            result,
        )


def _memory_order(x: Any, axes: Sequence[int]) -> Sequence[int]:
    """Returns the dimensions of an array in an order in which the elements along the last one are adjacent, if there is
    one that does not permute the dimensions of the result.
    """
    wide = [d for d, n in enumerate(x.shape) if n > 1]
    if wide and x.strides[wide[-1]] != x.itemsize:
        order = sorted(wide, key=lambda d: -x.strides[d])
        kept = [d for d in order if d not in axes]
        if kept == sorted(kept):
            return order
    return wide


def _groups(shape: Sequence[int], strides: Sequence[int], reduced: Sequence[bool]) -> list[_Group]:
    groups: list[_Group] = []
    for n, step, yes in zip(shape, strides, reduced, strict=True):
        if groups and groups[-1].reduced == yes and groups[-1].step == n * step:
            groups[-1] = _Group(yes, groups[-1].size * n, step)
        elif n > 1:
            groups.append(_Group(yes, n, step))
    return groups


def _contiguous(groups: Sequence[_Group], itemsize: int) -> list[_Group]:
    """Returns groups of an array that is in row-major order."""
    sizes = [group.size for group in groups]
    steps = [itemsize * math.prod(sizes[n + 1 :]) for n in range(len(sizes))]
    return _groups(sizes, steps, [group.reduced for group in groups])


def _are_supported(groups: Sequence[_Group], itemsize: int) -> bool:
    """Whether the kernels reduce an array of these groups."""
    reduced = [n for n, group in enumerate(groups) if group.reduced]
    if not reduced or any([group.step <= 0 for group in groups]):
        return False
    before, after = groups[: reduced[-1]], groups[reduced[-1] + 1 :]
    if len(before) > 2 or len(after) > 1 or any([group.step != itemsize for group in after]):
        return False
    if math.prod([group.size for group in groups[reduced[0] :]]) < LEAST:
        return False
    return len(reduced) == 1 or math.prod([group.size for group in groups[reduced[-1] :]]) >= _SHORTEST


def _lanes(wanted: int, most: int, packs: int) -> int:
    """Returns the number of threads of a block along columns, a power of two: about as many as wanted, and as many more
    as would have no pack beside the others.
    """
    lanes = 1 << (min(max(wanted, 1), most).bit_length() - 1)
    beside = 1 << (packs - 1).bit_length()
    return max(lanes, THREADS // min(beside, THREADS))
