"""The monoids that combine the partial results of a reduction over a sharded dimension.

A monoid defines the state that each shard computes (given its position), how two states merge, and how the result is
computed from the last state. Merging is associative; states are always merged along a fixed tree (see
`shardtensor.communication.all_reduce`), so that the same mesh gives the same bits.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardtensor.errors import ArgumentTypeError
from shardtensor.functions.building.own_kernels import own_kernel
from shardtensor.host.summation_order import empty_like
from shardtensor.sharding.rules import reduced_axes
from shardtensor.sharding.shard_context import ShardContext
from shardtensor.tracebacks import warn_caller

Partial = Callable[..., Any]  # (xp, context, *arrays, **params) -> state
Merge = Callable[[Any, Any, Any], Any]  # (xp, state, state) -> state
Finish = Callable[..., Any]  # (xp, context, state, **params) -> array


def _finished(xp: Any, context: ShardContext, state: Any, **params: Any) -> Any:
    return state


@dataclass(frozen=True, slots=True)
class Monoid:
    """The combination of the partial results of shards.

    Attributes:
        merge: merges two states, ``merge(xp, left, right)``, where the shard of the left one precedes in mesh order.
        partial: computes the state of a shard, ``partial(xp, context, *arrays, **params)``; None: the state is the
            operator's result on the shard.
        finish: computes the result from the last state, ``finish(xp, context, state, **params)``.
        exact: the kinds of result dtype (NumPy's letters) for which the result does not depend on how the elements are
            grouped, so that the operator may run once over the whole array where devices share one memory.
        reduces: the name of the ufunc whose reduction gives the states (of a mean, before the division) and merges
            them; `Backend.all_reduce` may merge integer states by it. Empty if there is none.
        together: merges states stacked along a new first dimension, ``together(xp, *arrays, dtype)``, in any order; for
            the kinds of ``exact``. None if there is no such function.
        several: whether computing the state of a shard passes over its elements several times.
        adds: whether the states are arrays of the result's dtype, which are added.
    """

    merge: Merge
    partial: Partial | None = None
    finish: Finish = _finished
    exact: str = ""
    reduces: str = ""
    together: Callable[..., Any] | None = None
    several: bool = False
    adds: bool = False


# -- mean and variance: Chan, Golub & LeVeque, "Updating formulae and a pairwise algorithm for computing sample
# variances" (1979)


def _count(context: ShardContext, axis: int | tuple[int, ...] | None) -> int:
    box = context.boxes[0]
    return math.prod(box[a][1] - box[a][0] for a in reduced_axes(axis, len(box)))


def _widened(xp: Any, x: Any) -> Any:
    """Casts x to the precision in which NumPy accumulates: float16 to float32, integers and bools to float64; durations
    are integers.
    """
    if getattr(x.dtype, "kind", "") == "m" or (xp is np and x.dtype.char in "fdFD"):
        return x
    if xp.isdtype(x.dtype, ("bool", "integral")):
        return xp.asarray(x, dtype=xp.float64)
    return xp.asarray(x, dtype=xp.float32) if xp.finfo(x.dtype).bits == 16 else x


def _mean_partial(
    xp: Any, context: ShardContext, x: Any, *, axis: Any = None, dtype: Any = None, keepdims: bool = False
) -> Any:
    x = _widened(xp, x) if dtype is None else xp.asarray(x, dtype=context.dtype)
    total = xp.sum(x, axis=axis, dtype=None if dtype is None else context.dtype, keepdims=keepdims)
    return total, _count(context, axis)


def _mean_merge(xp: Any, a: Any, b: Any) -> Any:
    return xp.add(a[0], b[0]), a[1] + b[1]


def _mean_finish(xp: Any, context: ShardContext, state: Any, **params: Any) -> Any:
    total, count = state
    if context.dtype == np.float16:  # A larger number of elements would be infinite.
        total = xp.asarray(total, dtype=xp.float32)
    return xp.asarray(xp.divide(total, count), dtype=context.dtype)


def var_partial(
    xp: Any, context: ShardContext, x: Any, *, axis: Any = None, correction: float = 0.0, keepdims: bool = False
) -> Any:
    """Returns the number of elements of a shard along ``axis``, their mean, and the sum of the squared deviations."""
    x, axes = _widened(xp, x), reduced_axes(axis, x.ndim)
    # A mean over all elements is kept as a scalar, which NumPy subtracts faster than an array of one element.
    mean = xp.mean(x, axis=axis, keepdims=len(axes) < x.ndim)
    if (spread := own_kernel(xp, "squared_deviations", x, mean, axis=axis, keepdims=keepdims)) is not None:
        return _count(context, axis), *_reshaped(xp, mean, spread)
    if squared := _fused(xp, x, _squared_deviation):
        return _count(context, axis), *_reshaped(xp, mean, xp.sum(squared(x, mean), axis=axis, keepdims=keepdims))
    # NumPy writes into memory from the pool: allocating as much new memory would cost more than the sums.
    deviation = xp.subtract(x, mean, out=empty_like(x)) if xp is np else xp.subtract(x, mean)
    # Arrays of the host have the same bits in shared and in separate memories.
    spread = _sums_in_one_pass(deviation, axes, keepdims) if isinstance(deviation, np.ndarray) else None
    if spread is None:
        spread = xp.sum(_squared(xp, deviation), axis=axis, keepdims=keepdims)
    return _count(context, axis), *_reshaped(xp, mean, spread)


def _reshaped(xp: Any, mean: Any, spread: Any) -> tuple[Any, Any]:
    return xp.reshape(mean, spread.shape), spread


def _fused(xp: Any, x: Any, make: Callable[[Any], Callable[..., Any]]) -> Callable[..., Any] | None:
    """Returns ``make(xp)``, a function of elementwise functions, as one kernel for real numbers of the dtype of ``x``;
    None if the library has no such kernels.
    """
    # NumPy takes microseconds to say that it lacks a function.
    return _kernel(xp, make) if xp is not np and hasattr(xp, "fuse") and xp.isdtype(x.dtype, "real floating") else None


@functools.lru_cache(64)
def _kernel(xp: Any, make: Callable[[Any], Callable[..., Any]]) -> Callable[..., Any]:
    kernel: Callable[..., Any] = xp.fuse(make(xp))
    return kernel


def _squared_deviation(xp: Any) -> Callable[..., Any]:
    def squared_deviation(x: Any, mean: Any) -> Any:
        deviation = xp.subtract(x, mean)
        return xp.multiply(deviation, deviation)

    return squared_deviation


def _moment_products(xp: Any) -> Callable[..., Any]:
    def moment_products(mean: Any, other_mean: Any, share: Any, weight: Any) -> Any:
        delta = xp.subtract(other_mean, mean)
        return xp.multiply(delta, share), xp.multiply(xp.multiply(delta, delta), weight)

    return moment_products


def _moment_sums(xp: Any) -> Callable[..., Any]:
    def moment_sums(mean: Any, shift: Any, spread: Any, other_spread: Any, squares: Any) -> Any:
        return xp.add(mean, shift), xp.add(xp.add(spread, other_spread), squares)

    return moment_sums


_ROW = 1 << 12
"""The greatest number of elements whose squares are added sequentially, in the partial sums that fit into the registers
of a core.
"""


def _sums_in_one_pass(x: Any, axes: tuple[int, ...], keepdims: bool) -> Any:
    """Computes sums of squares of a NumPy array of real numbers in one pass, along its last dimensions: pairwise those
    of rows of `_ROW` elements. Returns None for other dimensions and dtypes, and if it has no elements.
    """
    kept = x.ndim - len(axes)
    if axes != tuple(range(kept, x.ndim)) or not x.size or x.dtype.char not in "fd":
        return None
    # The bits must not depend on how elements lie: shards are views of a shared memory, or arrays of their own.
    if not x.flags.c_contiguous and (len(axes) > 1 or x.strides[-1] != x.itemsize):
        x = x.copy(order="C")
    lines = x.reshape(*x.shape[:kept], -1)
    end = lines.shape[-1] // _ROW * _ROW
    if lines.shape[-1] <= _ROW:
        sums = np.vecdot(lines, lines)
    else:
        rows, rest = lines[..., :end].reshape(*x.shape[:kept], -1, _ROW), lines[..., end:]
        sums = np.add.reduce(np.vecdot(rows, rows), axis=-1)
        sums = np.add(sums, np.vecdot(rest, rest)) if end < lines.shape[-1] else sums
    return sums.reshape((*x.shape[:kept], *(1,) * len(axes))) if keepdims else sums


def sum_of_squares(x: Any, axes: tuple[int, ...]) -> Any:
    """Computes the sums of the squares of real deviations along the last dimensions of a NumPy array, which remain, as
    for a variance.

    Args:
        x: the deviations.
        axes: the dimensions, numbers from 0.
    """
    sums = _sums_in_one_pass(x, axes, True)
    return np.add.reduce(np.multiply(x, x), axis=axes, keepdims=True) if sums is None else sums


def _squared(xp: Any, x: Any) -> Any:
    """Computes |x|², which is real also for complex x; overwrites a real x of at least one dimension."""
    if xp.isdtype(x.dtype, "complex floating"):
        return xp.add(xp.square(xp.real(x)), xp.square(xp.imag(x)))
    return xp.multiply(x, x, out=x) if x.ndim else xp.square(x)


def _var_merge(xp: Any, a: Any, b: Any) -> Any:
    if not a[0] or not b[0]:  # The mean of an empty shard is NaN and must not be merged.
        return b if b[0] else a
    count = a[0] + b[0]
    if (products := _fused(xp, a[1], _moment_products)) and (sums := _fused(xp, a[1], _moment_sums)):
        # A fused kernel has no weak scalars: these are of the dtype of the arrays.
        share, weight = [a[1].dtype.type(number) for number in (b[0] / count, a[0] * b[0] / count)]
        shift, squares = products(a[1], b[1], share, weight)
        return count, *sums(a[1], shift, a[2], b[2], squares)
    delta = xp.subtract(b[1], a[1])
    mean = xp.add(a[1], xp.multiply(delta, b[0] / count))
    spread = xp.add(xp.add(a[2], b[2]), xp.multiply(_squared(xp, delta), a[0] * b[0] / count))
    return count, mean, spread


def _var_finish(xp: Any, context: ShardContext, state: Any, *, correction: float = 0.0, **params: Any) -> Any:
    count, _, spread = state
    if isinstance(correction, complex) or not hasattr(type(correction), "__rsub__"):
        raise ArgumentTypeError(f"correction is {correction!r:.60}; wanted a real number")
    freedom = max(count - correction, 0.0)
    if not freedom:
        warn_caller("Degrees of freedom <= 0 for slice")
    return xp.asarray(xp.divide(spread, freedom), dtype=context.dtype)


def _std_finish(xp: Any, context: ShardContext, state: Any, **params: Any) -> Any:
    return xp.sqrt(_var_finish(xp, context, state, **params))


# -- argmax and argmin: the state is (value, index in the whole array); the smaller index wins a tie, and NaN wins over
# numbers


def _arg_partial(best: str) -> Partial:
    def partial(xp: Any, context: ShardContext, x: Any, *, axis: int | None = None, keepdims: bool = False) -> Any:
        index = getattr(xp, f"arg{best}")(x, axis=axis, keepdims=keepdims)
        if axis is None:
            value = xp.reshape(x, (-1,))[index]
        elif xp is np:  # NumPy has ``take_along_axis``, which some libraries lack; it avoids reading x again.
            value = np.take_along_axis(x, index if keepdims else np.expand_dims(index, axis), axis)
            value = value if keepdims else np.squeeze(value, axis)
        else:
            value = getattr(xp, best)(x, axis=axis, keepdims=keepdims)
        box, shape = context.boxes[0], context.shapes[0]
        if axis is not None:
            return value, xp.add(index, box[axis][0])
        if all(begin == 0 and end == size for (begin, end), size in zip(box[1:], shape[1:], strict=True)):
            return value, xp.add(index, box[0][0] * math.prod(shape[1:])) if box else index
        whole = xp.zeros_like(index)
        stride = 1
        for (begin, end), size in zip(reversed(box), reversed(shape), strict=True):
            whole = xp.add(whole, xp.multiply(xp.add(xp.remainder(index, end - begin), begin), stride))
            index = xp.floor_divide(index, end - begin)
            stride *= size
        return value, whole

    return partial


def may_be_nan(xp: Any, x: Any) -> bool:
    """Whether elements of an array can be NaN, or NaT."""
    return getattr(x.dtype, "kind", None) in ("m", "M") or xp.isdtype(x.dtype, ("real floating", "complex floating"))


def _arg_merge(better: str) -> Merge:
    def merge(xp: Any, a: Any, b: Any) -> Any:
        (value, index), (other, other_index) = a, b
        tie = xp.equal(other, value)
        wins = getattr(xp, better)(other, value)
        if may_be_nan(xp, value):
            nan, other_nan = xp.isnan(value), xp.isnan(other)
            wins = xp.logical_and(wins | other_nan, xp.logical_not(nan))
            tie = tie | xp.logical_and(nan, other_nan)
        wins = wins | xp.logical_and(tie, xp.less(other_index, index))
        return xp.where(wins, other, value), xp.where(wins, other_index, index)

    return merge


def _arg_together(best: str) -> Callable[..., Any]:
    def together(xp: Any, values: Any, indices: Any, dtype: Any) -> Any:
        value = getattr(xp, best)(values, axis=0)
        is_best = xp.equal(values, value)
        if may_be_nan(xp, values):
            is_best = xp.logical_or(is_best, xp.isnan(values))  # A NaN is the best of all, if there is one.
        return value, xp.min(xp.where(is_best, indices, np.iinfo(np.int64).max), axis=0)

    return together


def _arg_finish(xp: Any, context: ShardContext, state: Any, **params: Any) -> Any:
    return state[1]


# -- diagonals: each shard has a part of a diagonal of the whole array


def _local_diagonal(xp: Any, context: ShardContext, x: Any, offset: int, axis1: int, axis2: int) -> tuple[Any, int]:
    """Returns the elements of a diagonal of the whole array that are in this shard, along the last dimension, and the
    index of the first of them.
    """
    box = context.boxes[0]
    row, column = box[axis1 % len(box)][0], box[axis2 % len(box)][0]
    below = row - column + offset
    return xp.diagonal(x, below, axis1, axis2), max(row, column - offset) - max(-offset, 0)


def diagonal_partial(xp: Any, context: ShardContext, x: Any, *, offset: int, axis1: int, axis2: int) -> Any:
    """Returns the whole diagonal, with the neutral element of addition where another shard has its elements."""
    part, begin = _local_diagonal(xp, context, x, offset, axis1, axis2)
    length, count = context.shape[-1], part.shape[-1]
    if count == length:
        return xp.asarray(part, copy=True)  # It is a view of x.
    # Zero is not neutral: adding it to -0.0 gives 0.0. Adding -0.0 changes nothing.
    kind = context.dtype.kind
    neutral = np.array("NaT", context.dtype)[()] if kind in "mM" else {"f": -0.0, "c": complex(-0.0, -0.0)}.get(kind, 0)
    whole = xp.full((*part.shape[:-1], length), neutral, dtype=x.dtype)
    if count:
        whole[..., begin : begin + count] = part
    return whole


def _diagonal_merge(xp: Any, a: Any, b: Any) -> Any:
    return xp.where(xp.isnat(a), b, a) if getattr(a.dtype, "kind", "") in ("m", "M") else xp.add(a, b)


def trace_partial(
    xp: Any, context: ShardContext, x: Any, *, offset: int, axis1: int, axis2: int, dtype: Any = None
) -> Any:
    """Returns the sum of the elements of a diagonal of the whole array that are in this shard."""
    part, _ = _local_diagonal(xp, context, x, offset, axis1, axis2)
    return xp.sum(part, axis=-1, dtype=dtype)


# -- norms of vectors: the state is (how it is merged, array)

_ADDED, _GREATEST, _LEAST = range(3)


def norm_partial(xp: Any, context: ShardContext, x: Any, *, axis: Any, keepdims: bool, ord: Any) -> Any:
    """Returns the sum of the powers of the absolute values, or the greatest or least of them."""
    if xp.isdtype(x.dtype, ("bool", "integral")):
        x = xp.asarray(x, dtype=xp.float64)
    if ord == math.inf:
        # The greatest of no elements is zero here, which is less than any absolute value.
        empty = 0 in [x.shape[a] for a in reduced_axes(axis, x.ndim)]
        size = (
            xp.sum(xp.abs(x), axis=axis, keepdims=keepdims)
            if empty
            else xp.max(xp.abs(x), axis=axis, keepdims=keepdims)
        )
        return _GREATEST, size
    if ord == -math.inf:
        return _LEAST, xp.min(xp.abs(x), axis=axis, keepdims=keepdims)
    if ord == 0:
        powers = xp.asarray(xp.not_equal(x, 0), dtype=context.dtype)
    elif ord == 2:
        sums = _sums_in_one_pass(x, reduced_axes(axis, x.ndim), keepdims) if isinstance(x, np.ndarray) else None
        if sums is not None:
            return _ADDED, sums
        powers = xp.multiply(x, x) if not xp.isdtype(x.dtype, "complex floating") else _squared(xp, x)
    else:
        powers = xp.abs(x) if ord == 1 else xp.pow(xp.abs(x), ord)
    return _ADDED, xp.sum(powers, axis=axis, keepdims=keepdims)


def _norm_merge(xp: Any, a: Any, b: Any) -> Any:
    return a[0], getattr(xp, ("add", "maximum", "minimum")[a[0]])(a[1], b[1])


def norm_finish(xp: Any, context: ShardContext, state: Any, *, ord: Any, **params: Any) -> Any:
    """Returns the norm, given the state of all elements."""
    size = state[1]
    if ord == 2:
        return xp.sqrt(size)
    return size if ord in (0, 1, math.inf, -math.inf) else xp.pow(size, 1 / ord)


# -- reductions by ufuncs: the state is (position of the name in `FOLDS`, array)

FOLDS = ("bitwise_and", "bitwise_or", "bitwise_xor", "gcd", "hypot", "logaddexp", "logaddexp2", "logical_xor")
"""The associative ufuncs that have a neutral element, and whose reductions are not operators."""


def _fold_partial(xp: Any, context: ShardContext, x: Any, *, ufunc: str, **params: Any) -> Any:
    return FOLDS.index(ufunc), reduced_by(xp, context, x, ufunc=ufunc, **params)


def reduced_by(xp: Any, context: ShardContext | None, x: Any, *, ufunc: str, axis: Any, keepdims: bool) -> Any:
    """Reduces an array of one device by a ufunc in `FOLDS`."""
    axes = reduced_axes(axis, x.ndim)
    if xp is np:
        return np.asarray(getattr(np, ufunc).reduce(x, axis=axes, keepdims=keepdims))
    if ufunc == "logical_xor":
        x = xp.not_equal(x, 0)
    elif context is not None:
        x = xp.asarray(x, dtype=context.dtype)
    x = xp.abs(x) if ufunc in ("gcd", "hypot") else x  # Also where there is only one element.
    kept = tuple([1 if d in axes else n for d, n in enumerate(x.shape)])
    if 0 in [x.shape[d] for d in axes]:
        zero = xp.zeros(kept, dtype=x.dtype)
        neutral = -math.inf if ufunc.startswith("logaddexp") else 0
        x = xp.bitwise_invert(zero) if ufunc == "bitwise_and" else xp.full_like(zero, neutral)
    for d in axes:
        x = folded(xp, getattr(xp, ufunc), x, d)
    return x if keepdims else xp.squeeze(x, axis=axes)


def folded(xp: Any, apply: Callable[[Any, Any], Any], x: Any, axis: int) -> Any:
    """Reduces an array of at least one element along an axis, which remains, by halving it."""
    at = (slice(None),) * axis
    while (count := x.shape[axis]) > 1:
        half = count // 2
        halves = apply(x[(*at, slice(0, 2 * half, 2))], x[(*at, slice(1, 2 * half, 2))])
        x = xp.concat([halves, x[(*at, slice(2 * half, None))]], axis=axis) if count % 2 else halves
    return x


def _fold_merge(xp: Any, a: Any, b: Any) -> Any:
    return a[0], getattr(xp, FOLDS[a[0]])(a[1], b[1])


def _fold_finish(xp: Any, context: ShardContext, state: Any, **params: Any) -> Any:
    return state[1]


def _all_by(name: str) -> Callable[..., Any]:
    """Returns the function that merges all states by a reduction, or in their dtype if it is a sum or a product."""

    def together(xp: Any, states: Any, dtype: Any) -> Any:
        return getattr(xp, name)(states, axis=0, **({"dtype": dtype} if name in ("sum", "prod") else {}))

    return together


def _by(name: str) -> Merge:
    return lambda xp, a, b: getattr(xp, name)(a, b)


def _not_nan(name: str) -> Merge:
    """Returns the merge by an extremum that takes the other state where one is NaN."""

    def merge(xp: Any, a: Any, b: Any) -> Any:
        best = getattr(xp, name)(a, b)
        if not may_be_nan(xp, best):
            return best
        return xp.where(xp.isnan(a), b, xp.where(xp.isnan(b), a, best))

    return merge


MONOIDS: dict[str, Monoid] = {
    "sum": Monoid(_by("add"), exact="biu", reduces="add", together=_all_by("sum"), adds=True),
    "prod": Monoid(_by("multiply"), exact="biu", reduces="multiply", together=_all_by("prod")),
    "max": Monoid(_by("maximum"), exact="biu", reduces="maximum", together=_all_by("max")),
    "min": Monoid(_by("minimum"), exact="biu", reduces="minimum", together=_all_by("min")),
    "any": Monoid(_by("logical_or"), exact="b", together=_all_by("any")),
    "all": Monoid(_by("logical_and"), exact="b", together=_all_by("all")),
    "mean": Monoid(_mean_merge, _mean_partial, _mean_finish, reduces="add"),
    "var": Monoid(_var_merge, var_partial, _var_finish, several=True),
    "std": Monoid(_var_merge, var_partial, _std_finish, several=True),
    "argmax": Monoid(
        _arg_merge("greater"), _arg_partial("max"), _arg_finish, exact="biufc", together=_arg_together("max")
    ),
    "nanmax": Monoid(_not_nan("maximum"), exact="biufc"),
    "nanmin": Monoid(_not_nan("minimum"), exact="biufc"),
    "fold": Monoid(_fold_merge, _fold_partial, _fold_finish),
    "argmin": Monoid(
        _arg_merge("less"), _arg_partial("min"), _arg_finish, exact="biufc", together=_arg_together("min")
    ),
    "diagonal": Monoid(_diagonal_merge, diagonal_partial, exact="biufcmM"),
    "trace": Monoid(_by("add"), trace_partial, exact="biu", adds=True),
    "vector_norm": Monoid(_norm_merge, norm_partial, norm_finish, several=True),
}
"""The monoids by the names that ``@operator(..., combine=name)`` accepts."""


def element_bytes(name: str, value: Any, source: Any, params: dict[str, Any]) -> int:
    """Returns the size in bytes of a monoid's state for one element of the result, measured on a sample. ``value`` and
    ``source`` are the avals of result and operand, of which the numbers of dimensions and the dtypes are used.
    """
    if not MONOIDS[name].partial:
        return int(value.dtype.itemsize)
    return state_bytes(sample_state(name, value, [source], params))


def numbers_in_state(name: str, value: Any, source: Any, params: dict[str, Any]) -> int:
    """Returns how many Python numbers there are in a monoid's state, beside its arrays; see `element_bytes`."""
    if not MONOIDS[name].partial:
        return 0
    state = sample_state(name, value, [source], params)
    return sum(type(part) in (int, float) for part in state) if isinstance(state, tuple) else 0


def sample_state(name: str, value: Any, sources: Sequence[Any], params: dict[str, Any]) -> Any:
    """Returns the state that a monoid with states of its own computes from operands with one element each; see
    `element_bytes`.
    """
    partial, shapes = MONOIDS[name].partial, [(1,) * source.ndim for source in sources]
    assert partial is not None
    context = ShardContext.everywhere((1,) * value.ndim, shapes, value.dtype)
    with np.errstate(all="ignore"):
        samples = [np.ones(shape, source.dtype) for shape, source in zip(shapes, sources, strict=True)]
        return partial(np, context, *samples, **params)


def state_bytes(state: Any) -> int:
    """Returns the size in bytes of the arrays in a state."""
    if isinstance(state, tuple):
        return sum(map(state_bytes, state))
    return 0 if type(state) in (int, float) else int(state.nbytes)
