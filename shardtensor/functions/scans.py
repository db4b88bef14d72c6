"""Cumulative sums and products, and differences."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from shardtensor.backend.registry import array_backend
from shardtensor.core import call as _call
from shardtensor.core import implements, operator
from shardtensor.errors import ArgumentError, AxisError, ShapeError
from shardtensor.functions.algorithms.distributed import distributed
from shardtensor.functions.algorithms.sample_sort import is_short
from shardtensor.functions.algorithms.shards import MeshCommunicator as _MeshCommunicator
from shardtensor.functions.algorithms.shards import Shards as _Shards
from shardtensor.functions.comparisons import array_like as _array_like
from shardtensor.functions.creation import ones as _ones
from shardtensor.functions.creation import zeros as _zeros
from shardtensor.functions.elementwise import not_equal as _not_equal
from shardtensor.functions.elementwise import subtract as _subtract
from shardtensor.functions.joining import concat as _concat
from shardtensor.functions.manipulation import broadcast_to as _broadcast_to
from shardtensor.functions.manipulation import reshape as _reshape
from shardtensor.sharding.equal_parts import Runs, equal_runs
from shardtensor.sharding.rules import normalize_axis
from shardtensor.tensor.methods import cumulative as _cumulative
from shardtensor.tensor.operands import dtype_of, shape_of, sharded_dtype
from shardtensor.tensor.tensor import ArrayLike, ShardedTensor
from shardtensor.tensor.value import Aval, aval


@operator(ufunc="accumulate")
def cumulative_sum(
    x: ArrayLike, /, *, axis: int | None = None, dtype: npt.DTypeLike | None = None, include_initial: bool = False
) -> ShardedTensor:
    """Computes the cumulative sum of elements along an axis: element i of the result is the sum of elements 0 to i.

    The result has x's shape and sharding. Each device computes the cumulative sums of its shard; where the axis is
    sharded, the totals of the shards are gathered along it, and the total of the shards before is added to each shard:
    P devices send P (P - 1) sums of each line. Up to 64 KiB, the first device of one process receives all elements,
    computes the same bits and sends the others their parts, unless the sums are not of integers and another dimension
    is split, too. The rounding of floating-point sums depends on the mesh only.

    Args:
        x: a tensor or an array.
        axis: the dimension; it may be None if x has one dimension, and negative ones count from the end.
        dtype: the dtype of the result; by default that of `sum`.
        include_initial: whether a zero precedes the sums, so that the dimension is one longer.

    Raises:
        AxisError: x has no such axis, or ``axis`` is None and x does not have one dimension.

    >>> st.cumulative_sum(st.arange(1, 6)).tolist()
    [1, 3, 6, 10, 15]
    >>> st.cumulative_sum(st.ones((2, 3)), axis=1, include_initial=True).tolist()
    [[0.0, 1.0, 2.0, 3.0], [0.0, 1.0, 2.0, 3.0]]
    """


@operator(ufunc="accumulate")
def cumulative_prod(
    x: ArrayLike, /, *, axis: int | None = None, dtype: npt.DTypeLike | None = None, include_initial: bool = False
) -> ShardedTensor:
    """Computes the cumulative product of elements along an axis: element i of the result is the product of elements 0
    to i.

    Shape, sharding and errors are those of `cumulative_sum`.

    Args:
        x: a tensor or an array.
        axis, dtype: see `cumulative_sum`; the default dtype is that of `prod`.
        include_initial: whether a one precedes the products, so that the dimension is one longer.

    >>> st.cumulative_prod(st.arange(1, 6)).tolist()
    [1, 2, 6, 24, 120]
    """


class _Scan(NamedTuple):
    """A cumulative function.

    Attributes:
        function: the operator.
        reduction: the name of its reduction, which is that of the cumulative function without "cum".
        ufunc: the ufunc that it applies.
        initial: makes the array of what precedes the first elements: `zeros` or `ones`.
    """

    function: Callable[..., Any]
    reduction: str
    ufunc: np.ufunc
    initial: Callable[..., Any]

    def of(self, xp: Any) -> tuple[Callable[..., Any], ...]:
        """The reduction, the cumulative function and the ufunc of a namespace; NumPy's are methods of the ufunc."""
        if xp is np:
            return self.ufunc.reduce, self.ufunc.accumulate, self.ufunc
        return getattr(xp, self.reduction), getattr(xp, f"cum{self.reduction}"), getattr(xp, self.ufunc.__name__)

    def dtype(self, value: Aval, wanted: Any) -> np.dtype[Any]:
        """Returns the dtype of the result."""
        if wanted is not None:
            return sharded_dtype(wanted)
        return getattr(np, self.reduction)(np.ones(1, value.dtype)).dtype  # type: ignore[no-any-return]

    def composed(self, x: Any, axis: int | None, dtype: Any, include_initial: bool) -> Any:
        """Converts operands for which NumPy has no loop, and joins what precedes the first elements to the result."""
        if axis is None and not shape_of(x):  # NumPy takes a scalar for one element.
            return self.function(_reshape(x, (1,)), axis=0, dtype=dtype, include_initial=include_initial)
        given, wanted = dtype_of(x).kind, None if dtype is None else np.dtype(dtype).kind
        if wanted and given != wanted and (wanted == "b" or given == "m"):
            x = _call("astype", x, dtype)  # NumPy's loops of bools take no numbers, and those of numbers no durations.
            return self.function(x, axis=axis, dtype=dtype, include_initial=include_initial)
        if not include_initial:
            return NotImplemented
        sums = self.function(x, axis=axis, dtype=dtype)
        along = _axis(axis, sums.ndim)
        first = (*sums.shape[:along], 1, *sums.shape[along + 1 :])
        if isinstance(sums, ShardedTensor):
            before = self.initial(first, dtype=sums.dtype, device=sums.sharding if sums.committed else None)
        else:  # In a mapped function, arrays are those of the backend.
            backend = array_backend(sums)
            before = self.initial(first, dtype=backend.dtype_of(sums) if backend else sums.dtype)
        return _concat([before, sums], axis=along)

    def on_device(self, xp: Any, context: None, x: Any, *, axis: int | None, dtype: Any, include_initial: bool) -> Any:
        """Computes the cumulative function in a mapped function."""
        return getattr(xp, f"cum{self.reduction}")(x, axis=_axis(axis, x.ndim), dtype=dtype)

    def is_short(self, value: Aval, *, axis: int | None, dtype: Any, include_initial: bool) -> bool:
        """Whether the first device computes the result for all others."""
        return is_short(value, axes=(_axis(axis, value.ndim),))

    def at_once(
        self, value: Aval, *, axis: int | None, dtype: Any, include_initial: bool
    ) -> tuple[Aval, Callable[[Any, Any], Any]] | None:
        """Returns the aval of the result, and the function that computes it of all elements; see `distributed`."""
        d = _axis(axis, value.ndim)
        made = aval(value.shape, self.dtype(value, dtype), value.sharding, value.committed)
        if value.grid.counts[d] == 1 or made.dtype.kind in "iu":
            return made, lambda xp, whole: self.of(xp)[1](whole, axis=d, dtype=_loop(made.dtype))
        runs = equal_runs(value.grid, d)
        parts = value.grid.counts[d] if value.size else 0
        if not runs or sum(n for *_, n in runs) != min(parts, value.shape[d]):
            return None
        return made, functools.partial(_accumulate_parts, self.of, runs, d, _loop(made.dtype))

    def of_parts(
        self,
        x: _Shards,
        along: Callable[[int], _MeshCommunicator],
        *,
        axis: int | None,
        dtype: Any,
        include_initial: bool,
    ) -> _Shards:
        """The algorithm: each device has the totals of all parts, and accumulates its part after those before it."""
        d = _axis(axis, x.value.ndim)
        comm, result = along(d), self.dtype(x.value, dtype)
        loop = _loop(result)
        accumulate = functools.partial(self._accumulate_part, d, loop)
        if comm.size == 1:
            return x.fill(accumulate, [None] * len(comm.index), comm.index, dtype=result)

        def total(xp: Any, array: Any) -> Any:
            return self.of(xp)[0](array, axis=d, dtype=loop, keepdims=True)

        totals = x.map(total, shape=lambda shape: (*shape[:d], 1, *shape[d + 1 :]), dtype=result)
        return x.fill(accumulate, comm.all_gather(totals, d), comm.index, dtype=result)

    def _accumulate_part(
        self, axis: int, loop: np.dtype[Any] | None, xp: Any, out: Any, array: Any, totals: Any, index: int
    ) -> None:
        """Writes the result for the part of that index along ``axis``, given the totals of all parts."""
        _, accumulate, combine = self.of(xp)
        before, offset = (slice(None),) * axis, None
        if index:
            earlier = accumulate(totals[(*before, slice(index))], axis=axis, dtype=loop)
            offset = earlier[(*before, slice(-1, None))]
        if xp is np:
            _accumulate(self.ufunc, array, axis, out, offset)
            return
        out[...] = accumulate(array, axis=axis, dtype=loop)
        if offset is not None:
            combine(out, offset, out=out)


def _declare(scan: _Scan) -> None:
    implements(scan.function, "composite")(scan.composed)
    implements(scan.function, "kernel")(scan.on_device)
    distributed(scan.function, small=scan.at_once, few=scan.is_short)(scan.of_parts)


def _axis(axis: int | None, ndim: int) -> int:
    if axis is None and ndim != 1:
        raise AxisError(f"axis is None, and x has {ndim} dimensions; wanted an axis")
    return normalize_axis(0 if axis is None else axis, ndim)


def _loop(dtype: np.dtype[Any]) -> np.dtype[Any] | None:
    """Returns the dtype that selects NumPy's loop; None for durations, whose unit a loop does not have."""
    return None if dtype.kind == "m" else dtype


def _accumulate(ufunc: np.ufunc, array: Any, axis: int, out: Any, offset: Any) -> None:
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
        ufunc.accumulate(array[part], axis=along, dtype=_loop(out.dtype), out=out[part])
        if offset is not None:
            ufunc(out[part], offset[part], out=out[part])


def cumsum(
    a: ArrayLike, axis: int | None = None, dtype: npt.DTypeLike | None = None, out: ShardedTensor | None = None
) -> ShardedTensor:
    """Computes the cumulative sum along an axis; of the flattened array by default. See `cumulative_sum`.

    >>> st.cumsum(st.ones((2, 2))).tolist(), st.cumsum(st.ones((2, 2)), 0).tolist()
    ([1.0, 2.0, 3.0, 4.0], [[1.0, 1.0], [2.0, 2.0]])
    """
    return _cumulative("cumulative_sum", _array_like(a, "cumsum"), axis, dtype, out)  # type: ignore[no-any-return]


def cumprod(
    a: ArrayLike, axis: int | None = None, dtype: npt.DTypeLike | None = None, out: ShardedTensor | None = None
) -> ShardedTensor:
    """Computes the cumulative product along an axis; of the flattened array by default. See `cumulative_prod`.

    >>> st.cumprod(st.asarray([[1, 2], [3, 4]])).tolist()
    [1, 2, 6, 24]
    """
    return _cumulative("cumulative_prod", _array_like(a, "cumprod"), axis, dtype, out)  # type: ignore[no-any-return]


def _accumulate_parts(
    functions: Callable[[Any], tuple[Callable[..., Any], ...]],
    runs: Runs,
    axis: int,
    dtype: np.dtype[Any] | None,
    xp: Any,
    whole: Any,
) -> Any:
    """Computes what the algorithm does, for all shards at once: the dimension is divided into parts and their elements.

    Args:
        functions: returns the reduction, the cumulative function and the ufunc of a namespace.
        runs: the parts of the axis.
        axis, dtype: see `cumulative_sum`.
        xp: the namespace of the array.
        whole: all elements.
    """
    reduce, accumulate, combine = functions(xp)
    before = (slice(None),) * axis
    parts = []
    for begin, end, count in runs:
        x = whole[(*before, slice(begin, end))]
        parts.append(xp.reshape(x, (*x.shape[:axis], count, -1, *x.shape[axis + 1 :])))
    totals = [reduce(x, axis=axis + 1, dtype=dtype) for x in parts]
    offsets = accumulate(totals[0] if len(totals) == 1 else xp.concat(totals, axis=axis), axis=axis, dtype=dtype)
    out = []
    first = 0
    for x in parts:
        sums = accumulate(x, axis=axis + 1, dtype=dtype)
        skipped, end = int(first == 0), first + x.shape[axis]  # Nothing precedes the first part.
        later = sums[(*before, slice(skipped, None))]
        combine(later, offsets[(*before, slice(first + skipped - 1, end - 1), None)], out=later)
        out.append(xp.reshape(sums, (*x.shape[:axis], -1, *x.shape[axis + 2 :])))
        first = end
    return out[0] if len(out) == 1 else xp.concat(out, axis=axis)


_ROW = 1 << 9
"""Elements of a row from which the call of a ufunc takes less time than its elements."""

_LINES = 500
"""The number of lines up to which NumPy keeps Python's lock while it accumulates."""

_BLOCK = 1 << 16
"""Elements of a block of lines, which stays in the cache."""

_declare(_Scan(cumulative_sum, "sum", np.add, _zeros))
_declare(_Scan(cumulative_prod, "prod", np.multiply, _ones))


# -- differences -----------------------------------------------------------------------------------


@operator(operands=("x", "prepend", "append"))
def diff(
    x: ArrayLike, /, n: int = 1, axis: int = -1, *, prepend: ArrayLike | None = None, append: ArrayLike | None = None
) -> ShardedTensor:
    """Computes the ``n``-th differences along an axis: the first ones are ``x[i + 1] - x[i]``, for bools whether they
    differ.

    The result has x's dtype, and the size of ``axis`` is ``n`` less. It is sharded as x; along a sharded ``axis``, each
    device receives the elements at the boundary of its shard.

    Args:
        x: a tensor or an array of at least one dimension.
        n: how often differences are taken; with 0, x is returned. As in NumPy, programs give it by position, too.
        axis: the dimension.
        prepend: values that precede x along ``axis``: a scalar, or an array of x's shape in the other dimensions.
        append: values that follow x, likewise.

    Raises:
        AxisError: x has no such axis.
        ArgumentError: ``n`` is negative.
        ShapeError: x is 0-d, or ``prepend`` or ``append`` does not fit.

    >>> st.diff(st.asarray([1, 4, 9, 16])).tolist(), st.diff(st.asarray([1, 4, 9, 16]), n=2, prepend=0).tolist()
    ([3, 5, 7], [2, 2, 2])
    """


@implements(diff, "composite")
def _diff(x: Any, prepend: Any, append: Any, n: int, axis: int) -> Any:
    if n < 0:
        raise ArgumentError(f"n is {n}; wanted a number from 0 on")
    shape = shape_of(x)
    if not shape:
        raise ShapeError("x is 0-d; wanted at least one dimension")
    along = normalize_axis(axis, len(shape))
    if not n:
        return x
    line = (*shape[:along], 1, *shape[along + 1 :])
    ends = [y if y is None or len(shape_of(y)) else _broadcast_to(np.asarray(y), line) for y in (prepend, append)]
    if prepend is not None or append is not None:
        x = _concat([y for y in (ends[0], x, ends[1]) if y is not None], axis=along)
    before = (slice(None),) * along
    for _ in range(n):
        later, earlier = [_call("getitem", x, (*before, part)) for part in (slice(1, None), slice(None, -1))]
        x = (_not_equal if str(x.dtype).endswith("bool") else _subtract)(later, earlier)
    return x


@implements(diff, "small")
def _small_diff(x: Any, prepend: Any, append: Any, n: int, axis: int) -> Any:
    ends = {name: end for name, end in (("prepend", prepend), ("append", append)) if end is not None}
    return np.diff(x, n, axis, **ends) if n else np.array(x)
