"""Blockwise loops over host arrays: elementwise functions, copies and casts. Long ones run in several threads.

Large results are allocated in the memory pool (see `shardtensor.host.memory_pool`). The division into blocks depends
only on the shape of the result and the memory layout of the operands, not on the number of threads, so that results are
bitwise independent of that number.
"""

from __future__ import annotations

import builtins
import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import as_strided

from shardtensor.host import memory_pool
from shardtensor.host.fp_errors import FloatingPointErrors
from shardtensor.host.signals import Interrupts
from shardtensor.host.summation_order import memory_order
from shardtensor.host.threads import each

HostArray: TypeAlias = npt.NDArray[Any]
Function: TypeAlias = Callable[..., Any]
"""An elementwise function of arrays and scalars that writes its result into the array ``out=``."""

LONG = 200e-6
"""The seconds of work from which it pays to wake a thread."""

BYTE = 30e-12
"""The seconds that reading or writing one byte of memory takes."""

_CACHED_BYTE = 7e-12
"""The same where all bytes are in the cache that the cores share."""

_CACHE = 1 << 25
"""The bytes up to which the operands and the result of a function are mostly in that cache: results are written to
memory that earlier results, which were freed, have left there.
"""


def seconds_of(nbytes: int) -> float:
    """Returns the seconds that reading or writing so many bytes takes."""
    return nbytes * (BYTE if nbytes > _CACHE else _CACHED_BYTE)


_SLOW = {
    **dict.fromkeys(("sqrt", "divide", "reciprocal", "copysign", "clip", "round", "where", "sign"), 0.5e-9),
    **dict.fromkeys(("exp", "exp2", "log", "log10", "tanh", "sin", "cos", "hypot"), 1e-9),
    **dict.fromkeys(("expm1", "log1p", "log2", "cbrt", "tan", "sinh", "cosh"), 3e-9),
    **dict.fromkeys(("asinh", "arcsinh", "atan", "arctan", "atan2", "arctan2"), 3e-9),
    **dict.fromkeys(("floor_divide", "remainder", "logaddexp"), 6e-9),
    **dict.fromkeys(("pow", "power", "nextafter"), 10e-9),
    **dict.fromkeys(("asin", "arcsin", "acos", "arccos", "acosh", "arccosh", "atanh", "arctanh"), 10e-9),
}
"""The seconds per element of functions whose computation takes longer than the memory traffic. The figures are rough,
between those of processors on which NumPy computes with long vectors and of others: they only decide whether threads
are woken.
"""

_SLOWEST = max(_SLOW.values())
"""The seconds per element of the slowest functions."""

_BLOCK = 1 << 20
"""The maximum number of elements of a block: large enough that the overhead of NumPy calls and of switching the GIL is
negligible.
"""

_LEAST = 1 << 16
"""The minimum number of elements of a block, except in smaller arrays."""

_TILE = 256
"""The number of rows and of columns of a block whose operands have different dimension orders in memory. The blocks of
all operands then fit into the cache of a core.
"""

_STEP = 1 << 12
"""The sizes of blocks of contiguous arrays are multiples of this number of elements, so that the blocks begin at cache
lines.
"""


def elementwise(
    function: Function,
    arrays: Sequence[Any],
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    params: Mapping[str, Any] = MappingProxyType({}),
) -> HostArray:
    """Returns the result of an elementwise function as a new array, with the same dimension order in memory that NumPy
    would choose.

    Args:
        function: see `Function`.
        arrays: the operands: scalars, and arrays that broadcast to ``shape``.
        shape: the shape of the result.
        dtype: the dtype of the result.
        params: the other arguments of the function, by name.

    Raises:
        DeviceMemoryError: the host does not have enough free memory.
    """
    if all(a.flags.c_contiguous for a in arrays if isinstance(a, np.ndarray)):
        out = memory_pool.empty(shape, dtype)
    else:
        order = _order(arrays, shape)
        out = memory_pool.empty(tuple([shape[d] for d in order]), dtype).transpose(np.argsort(order))
    into(out, function, arrays, params=params)
    return out


def into(
    out: HostArray,
    function: Function,
    arrays: Sequence[Any],
    *,
    breaks: bool = True,
    params: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """Writes the result of an elementwise function into ``out``.

    Args:
        out: the array for the result. It shares no memory with the operands, or is one of them.
        function: see `Function`.
        arrays: the operands: scalars, and arrays that broadcast to the shape of ``out``.
        breaks: whether an exception of a signal handler, such as KeyboardInterrupt, may leave ``out`` half written.
        params: the other arguments of the function, by name.
    """
    if out.size * _SLOWEST < LONG:  # For small arrays, the checks below would take longer than the function.
        function(*arrays, out=out, **params)
        return
    name, operands = getattr(function, "__name__", ""), [a for a in arrays if isinstance(a, np.ndarray) and a.ndim]
    traffic = sum([a.nbytes for a in operands], out.nbytes)
    alike = [a for a in (out, *operands) if a.shape == out.shape]
    straight = all(a.flags.c_contiguous for a in alike)
    fastest = set() if straight else {_fastest(a) for a in alike} - {None}
    mixed = len(fastest) > 1 and out.size > _LEAST
    short = max(seconds_of(traffic), out.size * _SLOW.get(name, 0.0)) < LONG
    if (short and not mixed) or (function is cast and _drops(out, arrays[0])):
        function(*arrays, out=out, **params)
        return
    arrays = [a.reshape(()) if _is_array(a) and a.size == 1 else a for a in arrays]
    arrays = [np.broadcast_to(a, out.shape) if _is_array(a) else a for a in arrays]
    order = sorted(range(out.ndim), key=lambda d: -abs(out.strides[d]))
    lined = [a.transpose(order) if _is_array(a) else a for a in (out, *arrays)]
    if all(a.flags.c_contiguous for a in lined if _is_array(a)):
        lined = [a.reshape(-1) if _is_array(a) else a for a in lined]
    blocks = Blocks(lined[0].shape, _sides(lined[0].shape, [order.index(d) for d in fastest if d is not None]))

    def work(k: int) -> None:
        here = blocks[k]
        target, *parts = [a[here] if _is_array(a) else a for a in lined]
        try:
            function(*parts, out=target, **params)
        except MemoryError:
            if breaks:
                raise
            memory_pool.free_cache()  # The block is tried again, since `out` must not stay half written.
            function(*parts, out=target, **params)

    with Interrupts(), FloatingPointErrors(name):
        each(work, len(blocks), breaks=breaks)


def _is_array(operand: Any) -> bool:
    """Returns whether an operand has dimensions. Operands without dimensions are the same in every block."""
    return isinstance(operand, np.ndarray) and operand.ndim > 0


def _drops(out: HostArray, array: Any) -> bool:
    """Returns whether a cast discards imaginary parts. NumPy emits a warning for each such call, so that the cast is
    not divided into blocks.
    """
    return getattr(array, "dtype", out.dtype).kind == "c" != out.dtype.kind


def copy_into(out: HostArray, array: Any, *, breaks: bool = False) -> None:
    """Copies an array or a scalar into ``out``, converted to the dtype of ``out``.

    Args:
        out: the array to write.
        array: an array that broadcasts to the shape of ``out`` and shares no memory with it, or a scalar. It may have
            more dimensions than ``out`` if the first ones have size 1, as in assignments.
        breaks: whether an exception of a signal handler, such as KeyboardInterrupt, may leave ``out`` half written.
    """
    if isinstance(array, np.ndarray) and array.ndim > out.ndim:
        array = array.reshape(array.shape[array.ndim - out.ndim :])
    straight = out.flags.c_contiguous and (not isinstance(array, np.ndarray) or array.flags.c_contiguous)
    # A copy of 1 MiB evicts code from the caches: little is executed.
    if straight and seconds_of(2 * out.nbytes) < LONG:
        cast(array, out=out)
    else:
        into(out, cast, (array,), breaks=breaks)


def copied(array: HostArray) -> HostArray:
    """Returns a copy of an array in row-major order; a large copy reuses memory from the memory pool."""
    if array.nbytes < memory_pool.POOLED_FROM or array.dtype.hasobject:
        return np.array(array, order="C", subok=False)
    out = memory_pool.empty(array.shape, array.dtype)
    copy_into(out, array, breaks=True)
    return out


def copied_in_order(array: HostArray) -> HostArray:
    """Returns a copy of an array whose dimensions have the same order in memory, in which NumPy adds elements."""
    order = memory_order(array)
    return copied(array.transpose(order)).transpose(np.argsort(order))


def as_dtype(array: HostArray, dtype: np.dtype[Any]) -> HostArray:
    """Returns the array converted to ``dtype``, in the same dimension order; the array itself if it has that dtype."""
    return array if array.dtype == dtype else elementwise(cast, (array,), array.shape, dtype)


def cast(array: Any, *, out: HostArray, **params: Any) -> None:
    """Copies ``array`` into ``out``, converted to its dtype. NumPy's warnings call the operation by this name, too. The
    parameters of `astype` are ignored, since ``out`` has the dtype.
    """
    np.copyto(out, array, casting="unsafe")


def round(x: Any, *, out: HostArray, decimals: int = 0) -> None:
    """As ``numpy.round``, into ``out``, where NumPy raises an error for integers that are rounded to tens."""
    if out.dtype.kind in "iu" and decimals < 0:
        out[...] = np.round(x, decimals)
    else:
        np.round(x, decimals, out=out)


_WORDS = {size: np.dtype(f"u{size}") for size in (1, 2, 4, 8)}
"""The dtype of the bits of an element, by its size."""

_LEAST_MASKED = 1 << 14
"""The minimum number of elements for which masks take less time than NumPy's function."""

_SELECTED = 1 << 17
"""The bytes that `where` selects at a time: its scratch memory stays in a cache."""


def where(condition: Any, x1: Any, x2: Any, *, out: HostArray) -> None:
    """As ``numpy.where``, into ``out``, which may be an operand.

    The bits of the elements are masked, without a branch: NumPy's takes ten times as long where the processor
    mispredicts it, as it does for random conditions. Where a condition is the same for many neighbours, as that of NaN
    mostly is, they are copied.
    """
    word = _WORDS.get(out.dtype.itemsize)
    others = [x for x in (x1, x2) if isinstance(x, np.ndarray) and x.dtype != out.dtype]
    if out.size < _LEAST_MASKED or word is None or out.dtype.hasobject or others or not out.ndim:
        out[...] = np.where(condition, x1, x2)
        return
    operands = [x if isinstance(x, np.ndarray) else np.asarray(x, out.dtype) for x in (x1, x2)]
    chosen = np.broadcast_to(np.asarray(condition, bool), out.shape)
    if (same := _same_everywhere(chosen)) is not None:
        np.copyto(out, operands[0 if same else 1])
        return
    a, b = (np.broadcast_to(x, out.shape).view(word) for x in operands)
    target = out.view(word)
    rows = max(_SELECTED * len(out) // out.nbytes, 1)
    scratch = np.empty((2, min(rows, len(out)), *out.shape[1:]), word)
    for begin in range(0, len(out), rows):
        here = slice(begin, begin + rows)
        if (same := _same_everywhere(chosen[here])) is not None:
            np.copyto(target[here], (a if same else b)[here])
            continue
        mask, bits = scratch[:, : len(out) - begin]
        np.copyto(mask, chosen[here])
        np.negative(mask, out=mask)
        np.bitwise_xor(a[here], b[here], out=bits)
        np.bitwise_and(bits, mask, out=bits)
        np.bitwise_xor(bits, b[here], out=target[here])


def _same_everywhere(condition: HostArray) -> bool | None:
    """Returns the condition if it is the same for all elements; None otherwise."""
    first = bool(condition[(0,) * condition.ndim])
    differ = not condition.all() if first else condition.any()  # Both end at the first element that differs.
    return None if differ else first


def repeated(x: HostArray, size: int) -> HostArray:
    """Returns the elements of an array, which is not empty, in row-major order and again from the first one on, up to
    ``size``, as `numpy.resize` does. That one joins as many arrays as there are repetitions.
    """
    flat = x.reshape(-1)
    if flat.size >= size:
        return flat[:size].copy()
    if flat.size < _STEP:  # NumPy copies short rows far more slowly than long ones.
        flat = np.tile(flat, min(_STEP, size) // flat.size + 1)
    out, count = memory_pool.empty((size,), x.dtype), size // flat.size
    whole = count * flat.size
    copy_into(out[:whole].reshape(count, flat.size), flat, breaks=True)
    out[whole:] = flat[: size - whole]
    return out


# -- division into blocks --------------------------------------------------------------------------


class Blocks:
    """The blocks of an array of the given shape, as a sequence of indices in row-major order.

    Each block has at most the size ``sides[d]`` in dimension d.
    """

    def __init__(self, shape: Sequence[int], sides: Sequence[int]) -> None:
        self._shape = shape
        self._sides = sides
        self._counts = [-(-n // side) for n, side in zip(shape, sides, strict=True)]

    def __len__(self) -> int:
        return math.prod(self._counts)

    def __getitem__(self, k: int) -> tuple[slice, ...]:
        # Most arrays have one dimension here, which `unravel_index` would take as long for as a short function.
        index: Sequence[Any] = (k,) if len(self._counts) == 1 else np.unravel_index(k, self._counts)
        return tuple([slice(i * side, (i + 1) * side) for i, side in zip(index, self._sides, strict=True)])


_ROWS = 1 << 16
"""Elements of index arrays by which one thread selects rows at a time."""


def select(x: HostArray, index: tuple[Any, ...]) -> HostArray:
    """Returns ``x[index]``, of an index that contains arrays, as a new array. Long arrays of integers, which index the
    first dimensions, select in threads.

    Raises:
        IndexError: an index is out of bounds.
    """
    block: tuple[int, ...] = ()
    for e in index:
        if (
            not isinstance(e, np.ndarray)
            or e.size < 2 * _ROWS
            or e.dtype.kind not in "iu"
            or block not in ((), e.shape)
        ):
            return np.asarray(x[index])
        block = e.shape
    flat = [np.ascontiguousarray(e).reshape(-1) for e in index]
    out = memory_pool.empty((*block, *x.shape[len(index) :]), x.dtype)
    rows = out.reshape(math.prod(block), *x.shape[len(index) :])

    taken = len(flat) == 1 and x.flags.c_contiguous  # `take` copies other arrays.

    def work(k: int) -> None:
        part = slice(k * _ROWS, (k + 1) * _ROWS)
        if taken:
            _take(x, flat[0][part], rows[part])
        else:
            rows[part] = x[tuple([e[part] for e in flat])]

    each(work, -(-len(rows) // _ROWS))
    return out


def _take(x: HostArray, index: HostArray, out: HostArray) -> None:
    """Writes the rows of an array that an index array selects to ``out``.

    NumPy's `take` checks each index as it reads it, and takes longer for that than two passes over an index array in
    the cache. Its mode for indices within the bounds that may be negative is "wrap".

    Raises:
        IndexError: an index is out of bounds.
    """
    if index.min() < -len(x) or index.max() >= len(x):
        raise IndexError(_out_of_bounds(index, len(x)))
    np.take(x, index.astype(np.intp, copy=False), axis=0, out=out, mode="wrap")


def _out_of_bounds(index: HostArray, size: int) -> str:
    """Returns NumPy's message about the first index that is out of bounds."""
    wrong = index[(index < -size) | (index >= size)][0]
    return f"index {wrong} is out of bounds for axis 0 with size {size}"


def _sides(shape: tuple[int, ...], fastest: Sequence[int]) -> list[int]:
    """Returns the size of a block in each dimension.

    A block extends over the last dimensions as far as its number of elements allows. Where the operands have different
    dimension orders in memory, it is a tile in the dimensions of ``fastest``, and extends over the others likewise.

    Args:
        shape: the shape of the array.
        fastest: the dimensions with the smallest strides, one for each dimension order.
    """
    if len(shape) == 1:
        return [-(-_most(shape[0]) // _STEP) * _STEP]
    sides = [1] * len(shape)
    left = _most(math.prod(shape))
    if len(fastest) > 1:
        left = _TILE ** len(fastest)
        for k, d in enumerate(sorted(fastest, key=lambda d: shape[d])):  # A short dimension leaves more to longer ones.
            sides[d] = max(min(shape[d], builtins.round(left ** (1 / (len(fastest) - k)))), 1)
            left //= sides[d]
    for d in reversed(range(len(shape))):
        if sides[d] == 1:
            sides[d] = max(min(shape[d], left), 1)
            left //= sides[d]
    return sides


def _most(size: int) -> int:
    """Returns the maximum number of elements of a block of an array with ``size`` elements."""
    return max(min(_BLOCK, size // 16), _LEAST)


def _fastest(array: HostArray) -> int | None:
    """Returns the dimension with the smallest stride, the last of several; None if the array repeats one element."""
    moving = [d for d in range(array.ndim) if array.shape[d] > 1 and array.strides[d]]
    return max(moving, key=lambda d: (-abs(array.strides[d]), d), default=None)


def _order(arrays: Sequence[Any], shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the dimension order in memory, from the largest stride to the smallest, of NumPy's result."""
    operands = [a for a in arrays if _is_array(a)]
    # NumPy chooses the order for operands with the same strides and sizes of at most two, which are never read.
    small = [as_strided(_NOTHING, [min(n, 2) for n in a.shape], a.strides) for a in operands]
    flags: Any = [["readonly"]] * len(small) + [["writeonly", "allocate"]]
    inputs: Any = [*small, None]
    result = np.nditer(inputs, ["zerosize_ok"], flags, [None] * len(small) + ["b"]).operands[-1]
    return tuple(sorted(range(len(shape)), key=lambda d: -abs(result.strides[d])))


_NOTHING = np.empty(1, "b")
