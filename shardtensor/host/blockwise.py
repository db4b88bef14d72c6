"""Passes over host arrays: functions of elements, copies and casts, block by block, by several threads if it is long.

A result is written into memory that has been used before (see `shardtensor.host.memory_pool`). How it is cut depends on
its shape and the operands' layout alone, never on the number of threads, so that they cannot change a bit of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import as_strided

from shardtensor.host import memory_pool as pool
from shardtensor.host.fp_errors import Complaints
from shardtensor.host.signals import Interrupts
from shardtensor.host.threads import each

HostArray: TypeAlias = npt.NDArray[Any]
Function: TypeAlias = Callable[..., Any]
"""Of arrays and scalars, element by element, into ``out=``."""

LONG = 200e-6
"""Seconds of work from which waking a thread pays."""

BYTE = 30e-12
"""Seconds that it takes to read or write one byte of memory."""

_SLOW = {
    **dict.fromkeys(("sqrt", "divide", "reciprocal", "copysign", "clip", "round", "where", "sign"), 0.5e-9),
    **dict.fromkeys(("exp", "log", "log2", "log10", "tanh", "sin", "cos", "hypot", "expm1", "log1p"), 2e-9),
    **dict.fromkeys(("floor_divide", "remainder", "logaddexp"), 6e-9),
    **dict.fromkeys(("tan", "sinh", "cosh", "pow", "power", "nextafter"), 10e-9),
    **dict.fromkeys(("asin", "acos", "atan", "atan2", "arcsin", "arccos", "arctan", "arctan2"), 10e-9),
    **dict.fromkeys(("asinh", "acosh", "atanh", "arcsinh", "arccosh", "arctanh"), 10e-9),
}
"""Seconds for one element where computing takes longer than moving it: rough, to decide whether threads are woken."""

_SLOWEST = max(_SLOW.values())
"""The most of these."""

_BLOCK = 1 << 20
"""The most elements at a time: long enough that calls of NumPy and turns of the interpreter's lock do not show."""

_LEAST = 1 << 16
"""The fewest, of arrays that have so many."""

_TILE = 256
"""Rows and columns of a block whose operands lie in different orders, so that all of them fit into a core's cache."""

_STEP = 1 << 12
"""Blocks of arrays without gaps are multiples of this: they begin where lines of the cache do."""


def elementwise(function: Function, arrays: Sequence[Any], shape: tuple[int, ...], dtype: np.dtype[Any]) -> HostArray:
    """A new array of what a function gives of arrays that broadcast to a shape, and of scalars; laid out as NumPy does.

    Raises:
        DeviceMemoryError: there is no memory for it.
    """
    order = _order(arrays, shape)
    out = pool.empty(tuple([shape[d] for d in order]), dtype)
    if order != tuple(range(len(shape))):
        out = out.transpose(np.argsort(order))
    into(out, function, arrays)
    return out


def into(out: HostArray, function: Function, arrays: Sequence[Any], *, breaks: bool = True) -> None:
    """Writes what a function gives of arrays and scalars into ``out``, to which they broadcast.

    Args:
        out: shares no memory with the arrays, or is one of them.
        function: see `Function`.
        arrays: the operands.
        breaks: whether Ctrl-C may leave ``out`` half written.
    """
    if out.size * _SLOWEST < LONG:  # to look closer would take longer than to write one element
        function(*arrays, out=out)
        return
    name = getattr(function, "__name__", "")
    operands = [a for a in arrays if _is_array(a)]
    traffic = out.nbytes + sum(a.nbytes for a in operands)
    fastest = {_fastest(a) for a in (out, *operands) if a.shape == out.shape} - {None}
    mixed = len(fastest) > 1 and out.size > _LEAST
    short = max(traffic * BYTE, out.size * _SLOW.get(name, 0.0)) < LONG
    if (short and not mixed) or (function is _cast and _drops(out, arrays[0])):
        function(*arrays, out=out)
        return
    arrays = [a.reshape(()) if _is_array(a) and a.size == 1 else a for a in arrays]
    arrays = [np.broadcast_to(a, out.shape) if _is_array(a) else a for a in arrays]
    order = sorted(range(out.ndim), key=lambda d: -abs(out.strides[d]))
    lined = [a.transpose(order) if _is_array(a) else a for a in (out, *arrays)]
    if all(a.flags.c_contiguous for a in lined if _is_array(a)):
        lined = [a.reshape(-1) if _is_array(a) else a for a in lined]
    blocks = _Blocks(lined[0].shape, _sides(lined[0].shape, [order.index(d) for d in fastest if d is not None]))

    def work(k: int) -> None:
        here = blocks[k]
        target, *parts = [a[here] if _is_array(a) else a for a in lined]
        try:
            function(*parts, out=target)
        except MemoryError:
            if breaks:
                raise
            pool.free_cache()  # half of a value is worse than to try again
            function(*parts, out=target)

    with Interrupts(), Complaints(name):
        each(work, len(blocks), breaks=breaks)


def _is_array(operand: Any) -> bool:
    """Whether an operand has dimensions; what has none is the same everywhere."""
    return isinstance(operand, np.ndarray) and operand.ndim > 0


def _drops(out: HostArray, array: Any) -> bool:
    """Whether a cast drops imaginary parts, of which NumPy warns: once, if it is asked once."""
    return getattr(array, "dtype", out.dtype).kind == "c" != out.dtype.kind


def copy_into(out: HostArray, array: Any, *, breaks: bool = False) -> None:
    """Writes an array, or a scalar, that broadcasts to ``out`` and shares no memory with it, converted to its dtype."""
    into(out, _cast, (array,), breaks=breaks)


def copied(array: HostArray) -> HostArray:
    """A copy of an array in row-major order."""
    if array.nbytes < pool.POOLED_FROM or array.dtype.hasobject:
        return np.array(array, order="C", subok=False)
    out = pool.empty(array.shape, array.dtype)
    copy_into(out, array, breaks=True)
    return out


def as_dtype(array: HostArray, dtype: np.dtype[Any]) -> HostArray:
    """An array of that dtype, laid out alike: itself if it is one."""
    return array if array.dtype == dtype else elementwise(_cast, (array,), array.shape, dtype)


def _cast(array: Any, *, out: HostArray) -> None:
    np.copyto(out, array, casting="unsafe")


def _where(condition: Any, x1: Any, x2: Any, *, out: HostArray) -> None:
    out[...] = np.where(condition, x1, x2)


_cast.__name__, _where.__name__ = "cast", "where"  # as NumPy names them
FUNCTIONS: dict[str, Function] = {"clip": np.clip, "round": np.round, "where": _where, "astype": _cast}
"""Functions of elements that are no ufuncs, by the name of the operator."""


# -- how arrays are cut ----------------------------------------------------------------------------


class _Blocks:
    """The blocks of an array with sides of at most the sizes given: as indices, in row-major order."""

    def __init__(self, shape: Sequence[int], sides: Sequence[int]) -> None:
        self._shape = shape
        self._sides = sides
        self._counts = [-(-n // side) for n, side in zip(shape, sides, strict=True)]

    def __len__(self) -> int:
        return math.prod(self._counts)

    def __getitem__(self, k: int) -> tuple[slice, ...]:
        index = []
        for count, side in zip(reversed(self._counts), reversed(self._sides), strict=True):
            k, i = divmod(k, count)
            index.append(slice(i * side, (i + 1) * side))
        return tuple(reversed(index))


def _sides(shape: tuple[int, ...], fastest: Sequence[int]) -> list[int]:
    """The sides of a block: whole runs of the last dimensions; or, where operands lie in several orders, tiles of the
    dimensions along which they do, and as much of the others as fits.
    """
    if len(shape) == 1:
        return [-(-_most(shape[0]) // _STEP) * _STEP]
    sides = [1] * len(shape)
    left = _most(math.prod(shape))
    if len(fastest) > 1:
        left = _TILE ** len(fastest)
        for k, d in enumerate(sorted(fastest, key=lambda d: shape[d])):  # what a short one leaves goes to longer ones
            sides[d] = max(min(shape[d], round(left ** (1 / (len(fastest) - k)))), 1)
            left //= sides[d]
    for d in reversed(range(len(shape))):
        if sides[d] == 1:
            sides[d] = max(min(shape[d], left), 1)
            left //= sides[d]
    return sides


def _most(size: int) -> int:
    """Elements of a block of an array of so many."""
    return max(min(_BLOCK, size // 16), _LEAST)


def _fastest(array: HostArray) -> int | None:
    """The dimension along which neighbours lie next to one another: the last one that does, of several; None of an
    array that is one element repeated.
    """
    moving = [d for d in range(array.ndim) if array.shape[d] > 1 and array.strides[d]]
    return max(moving, key=lambda d: (-abs(array.strides[d]), d), default=None)


def _order(arrays: Sequence[Any], shape: tuple[int, ...]) -> tuple[int, ...]:
    """The order of dimensions in memory of what NumPy gives of arrays."""
    operands = [a for a in arrays if _is_array(a)]
    if all(a.flags.c_contiguous for a in operands):
        return tuple(range(len(shape)))
    # NumPy says so itself, of arrays of two elements a side that are never read.
    small = [as_strided(_NOTHING, [min(n, 2) for n in a.shape], a.strides) for a in operands]
    flags: Any = [["readonly"]] * len(small) + [["writeonly", "allocate"]]
    given: Any = [*small, None]
    made = np.nditer(given, ["zerosize_ok"], flags, [None] * len(small) + ["b"]).operands[-1]
    return tuple(sorted(range(len(shape)), key=lambda d: -abs(made.strides[d])))


_NOTHING = np.empty(1, "b")


# -- floating-point errors -------------------------------------------------------------------------
