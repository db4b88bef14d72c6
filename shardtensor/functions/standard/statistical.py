"""Declarations of the statistical and utility functions (chapters of the array API standard): reductions.

Common to all of them:

- ``axis`` is None (all dimensions), an integer or a tuple of integers; negative ones count from the end.
- With ``keepdims``, the reduced dimensions remain, with size 1.
- ``where``, an array of bools that broadcasts to x's shape, selects the elements that are reduced.
- ``initial``, a scalar, is combined with each result, as one more element. An extremum needs it if ``where`` is given
  or there are no elements.
- ``out_sharding`` is the sharding of the result: a NamedSharding, or a P on the mesh in use (see `st.set_mesh`). Where
  a reduced dimension is sharded, it chooses the collective that combines the partial results: an all-reduce for a
  replicated result, a reduce-scatter for one that the same mesh axes split; none for a `sum` that is unreduced along
  them. Other layouts are reached by a further transfer, which is explicit.
- The remaining dimensions keep their sharding. A reduction over a sharded dimension leaves partial results along the
  mesh axes that shard it. They are combined along a fixed tree, so that the same mesh gives the same bits, and the
  result is replicated along those axes.

Raises:
    AxisError: x has no such axis, or an axis occurs twice.
    ShapeError: the reduced dimensions have no elements, and the function has no value for none (`max` and `min`).
    ArgumentTypeError: the function is not defined for x's dtype, or ``where`` is not an array of bools.
    ArgumentError: an extremum has ``where``, but not ``initial``; both ``correction`` and ``ddof`` are given.
"""

from __future__ import annotations

import numpy.typing as npt

from shardtensor.core import implements, operator
from shardtensor.functions.statistics import masked_reductions as _options
from shardtensor.sharding.layout import Where
from shardtensor.sharding.rules import extremum, reduction
from shardtensor.tensor.tensor import ArrayLike, ShardedTensor

_DERIVATIVES = "of_reductions"

_Axis = int | tuple[int, ...] | None
_Where = Where | None

_WHERE = ("where",)
_SPREAD = ("where", "dtype", "ddof")
_BOTH = ("initial", "where")


@operator(reduction, combine="all", options=_WHERE)
def all(
    x: ArrayLike, /, axis: _Axis = None, *, keepdims: bool = False, where: ArrayLike = True, out_sharding: _Where = None
) -> ShardedTensor:
    """Tests whether all elements along ``axis`` are true (nonzero, NaN included).

    The result has dtype bool. It is True where there are no elements.

    >>> st.all(st.asarray([[True, False], [True, True]]), axis=1).tolist()
    [False, True]
    """


@operator(reduction, combine="any", options=_WHERE)
def any(
    x: ArrayLike, /, axis: _Axis = None, *, keepdims: bool = False, where: ArrayLike = True, out_sharding: _Where = None
) -> ShardedTensor:
    """Tests whether any element along ``axis`` is true (nonzero, NaN included).

    The result has dtype bool. It is False where there are no elements.

    >>> st.any(st.asarray([[0, 0], [0, 2]]), axis=1).tolist()
    [False, True]
    """


@operator(extremum, combine="max", options=_BOTH)
def max(
    x: ArrayLike,
    /,
    axis: _Axis = None,
    *,
    keepdims: bool = False,
    initial: ArrayLike | None = None,
    where: ArrayLike = True,
    out_sharding: _Where = None,
) -> ShardedTensor:
    """Returns the greatest element along ``axis``, or NaN if any element is NaN.

    The result has x's dtype. Complex numbers are ordered by their real parts, then by their imaginary parts.

    >>> st.max(st.asarray([[1, 5], [3, 2]]), axis=0).tolist()
    [3, 5]
    """


@operator(reduction, combine="mean", options=_WHERE, tags=("linear",))
def mean(
    x: ArrayLike,
    /,
    axis: _Axis = None,
    dtype: npt.DTypeLike | None = None,
    *,
    keepdims: bool = False,
    where: ArrayLike = True,
    out_sharding: _Where = None,
) -> ShardedTensor:
    """Returns the arithmetic mean along ``axis``; NaN where there are no elements.

    ``dtype`` is the dtype of the sum and of the result. By default it is float64 for integers and bools, otherwise x's
    dtype, and float16 is accumulated in float32.

    >>> st.mean(st.asarray([[1.0, 2.0], [3.0, 6.0]]), axis=0).tolist()
    [2.0, 4.0]
    """


@operator(extremum, combine="min", options=_BOTH)
def min(
    x: ArrayLike,
    /,
    axis: _Axis = None,
    *,
    keepdims: bool = False,
    initial: ArrayLike | None = None,
    where: ArrayLike = True,
    out_sharding: _Where = None,
) -> ShardedTensor:
    """Returns the least element along ``axis``, or NaN if any element is NaN.

    The result has x's dtype. Complex numbers are ordered by their real parts, then by their imaginary parts.

    >>> st.min(st.asarray([[1, 5], [3, 2]]), axis=1, keepdims=True).tolist()
    [[1], [2]]
    """


@operator(reduction, combine="prod", options=_BOTH)
def prod(
    x: ArrayLike,
    /,
    axis: _Axis = None,
    dtype: npt.DTypeLike | None = None,
    *,
    keepdims: bool = False,
    initial: ArrayLike | None = None,
    where: ArrayLike = True,
    out_sharding: _Where = None,
) -> ShardedTensor:
    """Returns the product of the elements along ``axis``; 1 where there are no elements.

    ``dtype`` is the dtype of the computation and of the result. By default it is x's dtype, except that bools and
    integers narrower than 64 bits are multiplied as 64-bit integers.

    >>> st.prod(st.asarray([2, 3, 4])).item()
    24
    """


@operator(reduction, combine="std", options=_SPREAD)
def std(
    x: ArrayLike,
    /,
    axis: _Axis = None,
    *,
    correction: float = 0.0,
    keepdims: bool = False,
    where: ArrayLike = True,
    dtype: npt.DTypeLike | None = None,
    ddof: float | None = None,
    out_sharding: _Where = None,
) -> ShardedTensor:
    """Returns the standard deviation along ``axis``: the square root of `var`.

    Arguments and dtype are those of `var`.

    >>> st.std(st.asarray([1.0, 3.0, 5.0, 7.0]) * 2, correction=0.0).item() ** 2
    20.000000000000004
    """


@operator(reduction, combine="sum", options=_BOTH, tags=("linear",))
def sum(
    x: ArrayLike,
    /,
    axis: _Axis = None,
    dtype: npt.DTypeLike | None = None,
    *,
    keepdims: bool = False,
    initial: ArrayLike | None = None,
    where: ArrayLike = True,
    out_sharding: _Where = None,
) -> ShardedTensor:
    """Returns the sum of the elements along ``axis``; 0 where there are no elements.

    ``dtype`` is the dtype of the computation and of the result. By default it is x's dtype, except that bools and
    integers narrower than 64 bits are added as 64-bit integers.

    >>> x = st.arange(6, device=st.make_mesh((4,), ("x",))).reshape(3, 2)
    >>> st.sum(x, axis=0).tolist(), st.sum(x).item()
    ([6, 9], 15)
    """


@operator(reduction, combine="var", options=_SPREAD)
def var(
    x: ArrayLike,
    /,
    axis: _Axis = None,
    *,
    correction: float = 0.0,
    keepdims: bool = False,
    where: ArrayLike = True,
    dtype: npt.DTypeLike | None = None,
    ddof: float | None = None,
    out_sharding: _Where = None,
) -> ShardedTensor:
    """Returns the variance along ``axis``: Σ|x - x̄|² / (n - correction), with n elements and their mean x̄.

    The result is real, also for complex x, and has dtype float64 for integers and bools, otherwise the precision of x
    (float16 is accumulated in float32). ``dtype`` is another floating-point dtype for the computation and the result;
    a complex one, which complex x needs, makes the result complex, too. The partial results of shards are merged by
    the algorithm of Chan, Golub and LeVeque (1979), which avoids cancellation. ``ddof`` is NumPy's name of
    ``correction``.

    >>> st.var(st.asarray([1.0, 3.0, 5.0, 7.0])).item(), st.var(st.asarray([1.0, 3.0]), correction=1).item()
    (5.0, 2.0)
    """


implements(all, "extended")(_options.logical("all", True))
implements(any, "extended")(_options.logical("any", False))
implements(max, "extended")(_options.extremum_of("max", "maximum"))
implements(min, "extended")(_options.extremum_of("min", "minimum"))
implements(mean, "extended")(_options.masked_mean)
implements(prod, "extended")(_options.sum_of("prod", "multiply", 1))
implements(std, "extended")(_options.spread_of("std", _options.masked_std))
implements(sum, "extended")(_options.sum_of("sum", "add", 0))
implements(var, "extended")(_options.spread_of("var", _options.masked_var))
