"""Scans: each element of the result combines the elements up to it, by an associative function."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from shardtensor.functions.algorithms.distributed import Whole
from shardtensor.functions.algorithms.first_device import GATHERED
from shardtensor.functions.algorithms.shards import MeshCommunicator, Shards
from shardtensor.host.fp_errors import FloatingPointErrors
from shardtensor.sharding.equal_parts import Runs, equal_runs
from shardtensor.sharding.layout import Shape
from shardtensor.tensor.value import Aval, aval

Functions = Callable[[Any], tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]]
"""Returns the reduction, the cumulative function and the function of two arrays of a namespace: ``reduce(x, axis=,
dtype=, keepdims=)``, ``accumulate(x, axis=, dtype=)`` and ``combine(x, y, out=)``. Those of NumPy are the methods of a
ufunc, and the ufunc.
"""


def scan(
    x: Shards, comm: MeshCommunicator, axis: int, functions: Functions, *, dtype: Any, loop: np.dtype[Any] | None
) -> Shards:
    """Returns the shards of a cumulative function along a dimension.

    Each device reduces its part, all devices receive these totals, and each accumulates its part after the totals of
    the parts before it: P devices send P (P - 1) totals of each line (G. E. Blelloch, Prefix Sums and Their
    Applications, 1990, section 1.2). The grouping of the elements depends on the mesh only.

    Args:
        x: the shards of the operand.
        comm: the communicator along the dimension.
        axis: the dimension.
        functions: the associative function.
        dtype: the dtype of the result.
        loop: the dtype in which the functions compute; None for their own choice.
    """
    if comm.size == 1:
        return _accumulated(x, functions, axis, loop, [None] * len(comm.index), comm.index, dtype)

    def total(xp: Any, array: Any) -> Any:
        return functions(xp)[0](array, axis=axis, dtype=loop, keepdims=True)

    def among(count: int) -> Callable[[Shape], Shape]:
        return lambda shape: (*shape[:axis], count, *shape[axis + 1 :])

    gathered = comm.all_gather(x.map(total, shape=among(1), dtype=dtype), axis)
    filled = np.flatnonzero(np.diff(x.value.grid.offsets[axis])).tolist()
    if len(filled) < comm.size:  # Parts without elements, which may be between others, have no total.

        def of_filled(xp: Any, totals: Any) -> Any:
            return xp.take(totals, xp.asarray(filled, dtype=xp.int64), axis=axis)

        gathered = list(x.of(gathered).map(of_filled, shape=among(len(filled)), dtype=dtype).arrays)
    index = np.searchsorted(filled, comm.index).tolist()
    return _accumulated(x, functions, axis, loop, gathered, index, dtype)


def _accumulated(
    x: Shards,
    functions: Functions,
    axis: int,
    loop: np.dtype[Any] | None,
    totals: Sequence[Any],
    index: Sequence[int],
    dtype: Any,
) -> Shards:
    """Returns the shards of the result, given for each device the totals of the parts with elements, and how many of
    them precede its own.
    """
    if x.value.backend.on_host:
        return x.fill(functools.partial(_accumulate_into, functions, axis, loop), totals, index, dtype=dtype)
    part = functools.partial(_accumulate_part, functions, axis, loop)
    value = aval(x.value.shape, np.dtype(dtype), x.value.sharding, x.value.committed)
    return x.map(part, totals, index, shape=lambda shape: shape, dtype=dtype).assembled(value)


def scan_of_whole(
    value: Aval, axis: int, functions: Functions, *, dtype: Any, exact: str, loop: Any = None
) -> Whole | None:
    """Returns what computes the bits of `scan` of all elements; None if they are many, or nothing does.

    Args:
        value: the aval of the operand.
        axis, functions, dtype, loop: see `scan`.
        exact: the kinds of the dtypes whose results do not depend on the grouping of the elements.
    """
    runs, is_split = None, value.grid.counts[axis] > 1
    most = _FEW_ON_DEVICES if not value.backend.on_host else GATHERED if is_split else _FEW_BYTES
    if value.memory is not None and value.nbytes > most:
        return None
    if is_split and dtype.kind not in exact:
        runs = equal_runs(value.grid, axis)
        parts = value.grid.counts[axis] if value.size else 0
        if not runs or sum(n for *_, n in runs) != min(parts, value.shape[axis]):
            return None

    def compute(xp: Any, x: Any) -> Any:
        with FloatingPointErrors("accumulate"):
            if runs:
                return _accumulate_parts(functions, runs, axis, loop, xp, x)
            return functions(xp)[1](x, axis=axis, dtype=loop)

    return Whole(aval(value.shape, dtype, value.sharding, value.committed), compute, (axis,))


def _accumulate_into(
    functions: Functions,
    axis: int,
    loop: np.dtype[Any] | None,
    xp: Any,
    out: Any,
    array: Any,
    totals: Any,
    index: int,
) -> None:
    """Writes the result for the part that ``index`` others precede along ``axis``, given the totals of all parts."""
    _accumulate(functions(xp)[2], array, axis, loop, out, _offset(functions, axis, loop, xp, totals, index))


def _accumulate_part(
    functions: Functions, axis: int, loop: np.dtype[Any] | None, xp: Any, array: Any, totals: Any, index: int
) -> Any:
    """Returns what `_accumulate_into` writes, on a device."""
    _, accumulate, combine = functions(xp)
    sums, offset = accumulate(array, axis=axis, dtype=loop), _offset(functions, axis, loop, xp, totals, index)
    if offset is not None:
        combine(sums, offset, out=sums)
    return sums


def _offset(functions: Functions, axis: int, loop: np.dtype[Any] | None, xp: Any, totals: Any, index: int) -> Any:
    """Returns the total of the parts before one of them; None for the first part."""
    if not index:
        return None
    before = (slice(None),) * axis
    earlier = functions(xp)[1](totals[(*before, slice(index))], axis=axis, dtype=loop)
    return earlier[(*before, slice(-1, None))]


def _accumulate(ufunc: Any, array: Any, axis: int, loop: np.dtype[Any] | None, out: Any, offset: Any) -> None:
    """Computes ``ufunc.accumulate`` into ``out``, and applies the ufunc to it and ``offset``, unless that is None.

    NumPy walks along the axis for one line after the other. Where the lines are columns of long rows, that takes 40
    times as long as adding one row after the other. Otherwise it is called for blocks of many lines, or for each line
    if they are few and long, because it only then releases Python's lock, so that other threads compute meanwhile.
    """
    at, length = (slice(None),) * axis, array.shape[axis]
    lines = array.size // max(length, 1)
    if axis < array.ndim - 1 and lines >= _ROW and length:
        out[(*at, 0)] = array[(*at, 0)]
        for i in range(1, length):
            ufunc(out[(*at, i - 1)], array[(*at, i)], out=out[(*at, i)])
        if offset is not None:
            ufunc(out, offset, out=out)
        return
    parts: list[Any] = [(...,)]
    if lines <= _LINES < length:
        others = [n for d, n in enumerate(array.shape) if d != axis]
        parts = [(*line[:axis], slice(None), *line[axis:]) for line in np.ndindex(*others)]
    elif axis and lines:
        step = max(_BLOCK, (_LINES + 1) * length) * len(array) // array.size + 1
        parts = [(slice(i, i + step),) for i in range(0, len(array), step)]
    for part in parts:
        along = 0 if len(part) == array.ndim else axis  # A part is one line, or has all dimensions.
        ufunc.accumulate(array[part], axis=along, dtype=loop, out=out[part])
        if offset is not None:
            ufunc(out[part], offset[part], out=out[part])


def _accumulate_parts(
    functions: Functions, runs: Runs, axis: int, loop: np.dtype[Any] | None, xp: Any, whole: Any
) -> Any:
    """Computes what the algorithm does, for all shards at once: the dimension is divided into parts and their elements.

    Args:
        functions, axis, loop: see `scan`.
        runs: the parts of the axis.
        xp: the namespace of the array.
        whole: all elements.
    """
    reduce, accumulate, combine = functions(xp)
    reshape = np.ndarray.reshape if xp is np else xp.reshape  # The function calls the method.
    before = (slice(None),) * axis
    parts = []
    for begin, end, count in runs:
        x = whole[(*before, slice(begin, end))]
        parts.append(reshape(x, (*x.shape[:axis], count, -1, *x.shape[axis + 1 :])))
    totals = [reduce(x, axis=axis + 1, dtype=loop) for x in parts]
    offsets = accumulate(totals[0] if len(totals) == 1 else xp.concat(totals, axis=axis), axis=axis, dtype=loop)
    out = []
    first = 0
    for x in parts:
        sums = accumulate(x, axis=axis + 1, dtype=loop)
        skipped, end = int(first == 0), first + x.shape[axis]  # Nothing precedes the first part.
        later = sums[(*before, slice(skipped, None))]
        combine(later, offsets[(*before, slice(first + skipped - 1, end - 1), None)], out=later)
        out.append(reshape(sums, (*x.shape[:axis], -1, *x.shape[axis + 2 :])))
        first = end
    return out[0] if len(out) == 1 else xp.concat(out, axis=axis)


_FEW_BYTES = 1 << 14
"""The size of operands up to which the calls for single shards take longer than the elements."""

_FEW_ON_DEVICES = 1 << 20
"""The same for devices other than the host, where each call is a launch."""

_ROW = 1 << 9
"""Elements of a row from which the call of a ufunc takes less time than its elements."""

_LINES = 500
"""The number of lines up to which NumPy keeps Python's lock while it accumulates."""

_BLOCK = 1 << 16
"""Elements of a block of lines, which stays in the cache."""
