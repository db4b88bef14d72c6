"""Statistical and utility functions (chapters of the standard): reductions, declared.

What holds for all: ``axis`` is None (all dimensions), an integer or a tuple, negative ones counted from the end; the
layout of the dimensions that stay is kept. A reduction over a sharded dimension combines the shards' results in mesh
order, so that the same mesh gives the same bits; the result is then replicated along the mesh axes that split it.
Errors: AxisError for an axis that is not there or occurs twice, ShapeError where a result of no elements is not
defined, TypeError for dtypes that the function does not take.
"""

from __future__ import annotations

import numpy.typing as npt

from shardtensor.core import operator
from shardtensor.sharding.rules import extremum, reduction
from shardtensor.tensor.tensor import ArrayLike, ShardedTensor

Axis = int | tuple[int, ...] | None


@operator(reduction, combine="all")
def all(x: ArrayLike, /, *, axis: Axis = None, keepdims: bool = False) -> ShardedTensor:
    """Whether every element is true (nonzero); true of no elements.

    >>> st.all(st.asarray([[True, False], [True, True]]), axis=1).tolist()
    [False, True]
    """


@operator(reduction, combine="any")
def any(x: ArrayLike, /, *, axis: Axis = None, keepdims: bool = False) -> ShardedTensor:
    """Whether some element is true (nonzero); false of no elements.

    >>> st.any(st.asarray([[0, 0], [0, 2]]), axis=1).tolist()
    [False, True]
    """


@operator(extremum, combine="max")
def max(x: ArrayLike, /, *, axis: Axis = None, keepdims: bool = False) -> ShardedTensor:
    """The greatest element; NaN if there is one.

    >>> st.max(st.asarray([[1, 5], [3, 2]]), axis=0).tolist()
    [3, 5]
    """


@operator(reduction, combine="mean")
def mean(x: ArrayLike, /, *, axis: Axis = None, keepdims: bool = False) -> ShardedTensor:
    """The arithmetic mean: float64 for integers and bools, else of x's dtype (float16 is summed in float32); NaN of
    no elements.

    >>> st.mean(st.asarray([[1.0, 2.0], [3.0, 6.0]]), axis=0).tolist()
    [2.0, 4.0]
    """


@operator(extremum, combine="min")
def min(x: ArrayLike, /, *, axis: Axis = None, keepdims: bool = False) -> ShardedTensor:
    """The least element; NaN if there is one.

    >>> st.min(st.asarray([[1, 5], [3, 2]]), axis=1, keepdims=True).tolist()
    [[1], [2]]
    """


@operator(reduction, combine="prod")
def prod(
    x: ArrayLike, /, *, axis: Axis = None, dtype: npt.DTypeLike | None = None, keepdims: bool = False
) -> ShardedTensor:
    """The product; 1 of no elements. Integers narrower than 64 bits are multiplied in 64, unless ``dtype`` says
    otherwise.

    >>> st.prod(st.asarray([2, 3, 4])).item()
    24
    """


@operator(reduction, combine="std")
def std(x: ArrayLike, /, *, axis: Axis = None, correction: float = 0.0, keepdims: bool = False) -> ShardedTensor:
    """The standard deviation: the square root of `var`, in x's unit.

    >>> st.std(st.asarray([1.0, 3.0, 5.0, 7.0]) * 2, correction=0.0).item() ** 2
    20.000000000000004
    """


@operator(reduction, combine="sum")
def sum(
    x: ArrayLike, /, *, axis: Axis = None, dtype: npt.DTypeLike | None = None, keepdims: bool = False
) -> ShardedTensor:
    """The sum; 0 of no elements. Integers narrower than 64 bits are added in 64, unless ``dtype`` says otherwise.

    >>> x = st.arange(6, device=st.make_mesh((4,), ("x",))).reshape(3, 2)
    >>> st.sum(x, axis=0).tolist(), st.sum(x).item()
    ([6, 9], 15)
    """


@operator(reduction, combine="var")
def var(x: ArrayLike, /, *, axis: Axis = None, correction: float = 0.0, keepdims: bool = False) -> ShardedTensor:
    """The mean squared distance from the mean, Σ|x - x̄|² / (n - correction); real for complex x; in the square of
    x's unit.

    Shards' variances are merged as Chan, Golub and LeVeque do (1979), so that nothing cancels.

    >>> st.var(st.asarray([1.0, 3.0, 5.0, 7.0])).item(), st.var(st.asarray([1.0, 3.0]), correction=1).item()
    (5.0, 2.0)
    """
