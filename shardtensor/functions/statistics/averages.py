"""NumPy's statistics that are composed of reductions: weighted averages, covariances and ranges.

Reductions over split dimensions combine the partial results of the devices; the dimensions that remain keep their
sharding.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import numpy.typing as npt

from shardtensor.core import call, composition, named, recorded
from shardtensor.errors import ArgumentError, ArgumentTypeError, ShapeError
from shardtensor.functions.numpy.comparisons import array_like, iscomplexobj
from shardtensor.functions.standard.creation import zeros
from shardtensor.functions.standard.data_types import astype, result_type
from shardtensor.functions.standard.elementwise import conj, divide, equal, imag, multiply, real, sqrt, subtract
from shardtensor.functions.standard.joining import concat
from shardtensor.functions.standard.linear_algebra import matmul
from shardtensor.functions.standard.manipulation import (
    broadcast_to,
    expand_dims,
    matrix_transpose,
    permute_dims,
    reshape,
    squeeze,
)
from shardtensor.functions.standard.repetition import on_host
from shardtensor.functions.standard.statistical import any as _any
from shardtensor.functions.standard.statistical import max as _max
from shardtensor.functions.standard.statistical import mean as _mean
from shardtensor.functions.standard.statistical import min as _min
from shardtensor.functions.standard.statistical import sum as _sum
from shardtensor.host.units import counted
from shardtensor.sequences import as_tuple, check_no_iterator
from shardtensor.sharding.rules import normalize_axes
from shardtensor.tensor.operands import shape_of
from shardtensor.tensor.tensor import ArrayLike, ShardedTensor, lacks_elements
from shardtensor.tracebacks import warn_caller

_Axis = int | tuple[int, ...] | None


@composition()
def ptp(a: ArrayLike, axis: _Axis = None, *, keepdims: bool = False) -> ShardedTensor:
    """Returns the difference of the greatest and the least element along ``axis``.

    Args:
        a: a tensor, an array or a list.
        axis: None (all dimensions), an integer or a tuple of integers.
        keepdims: whether the reduced dimensions remain, with size 1.

    >>> st.ptp(st.asarray([[4, 9], [2, 10]]), axis=1).tolist()
    [5, 8]
    """
    array = array_like(a, "ptp")
    return subtract(_max(array, axis=axis, keepdims=keepdims), _min(array, axis=axis, keepdims=keepdims))


@named
def average(
    a: ArrayLike,
    axis: _Axis = None,
    weights: ArrayLike | None = None,
    returned: bool = False,
    *,
    keepdims: bool = False,
) -> Any:
    """Returns the weighted average along ``axis``.

    Args:
        a: a tensor, an array or a list.
        axis: None (all dimensions), an integer or a tuple of integers.
        weights: the weights of the elements: of a's shape, or of the shape of the dimensions ``axis``, in that order;
            by default all are equal.
        returned: whether the sums of the weights follow in the result, which is then a tuple.
        keepdims: whether the reduced dimensions remain, with size 1.

    Raises:
        ZeroDivisionError: weights add up to zero, where that is known.
        ArgumentTypeError: ``weights`` has another shape than a, and there is no ``axis``.
        ShapeError: the shapes do not agree.

    >>> st.average(st.asarray([1.0, 2.0, 6.0]), weights=[3, 1, 0]).item()
    1.25
    """
    array: Any = array_like(a, "average")
    shape = shape_of(array)
    axis = as_tuple(axis)
    axes = None if axis is None else normalize_axes(axis, len(shape))
    if weights is None:
        result = _mean(array, axis=axes, keepdims=keepdims)
        count = np.prod([shape[d] for d in (range(len(shape)) if axes is None else axes)])
        return (result, call("full_like", result, int(count))) if returned else result
    check_no_iterator(weights, "average: weights")
    heavy = _weights(array_like(weights, "average"), shape, axes)
    narrow = (np.float64,) if result_type(array).kind in "biu" else ()
    dtype = np.result_type(result_type(array), result_type(heavy), *narrow)
    scale = _sum(heavy, axis=axes, dtype=dtype, keepdims=keepdims)
    zero = _any(equal(scale, 0))
    if not lacks_elements(zero) and bool(zero):
        raise ZeroDivisionError("average: the weights add up to zero; wanted another sum, by which to divide")
    total = _sum(multiply(array, astype(heavy, dtype, copy=False)), axis=axes, dtype=dtype, keepdims=keepdims)
    result = divide(total, scale)
    return (result, broadcast_to(scale, shape_of(result))) if returned else result


def _weights(weights: Any, shape: tuple[int, ...], axes: tuple[int, ...] | None) -> Any:
    """Returns weights that broadcast to an array of that shape."""
    weight_shape = shape_of(weights)
    if weight_shape == shape:
        return weights
    if axes is None:
        raise ArgumentTypeError(
            f"average: weights has shape {weight_shape} and a {shape}; wanted an axis, or equal shapes"
        )
    if weight_shape != tuple([shape[d] for d in axes]):
        raise ShapeError(f"average: weights has shape {weight_shape}; wanted that of a along axis {axes}")
    ordered = permute_dims(weights, tuple(np.argsort(axes).tolist()))
    return broadcast_to(reshape(ordered, tuple([n if d in axes else 1 for d, n in enumerate(shape)])), shape)


@named
def cov(
    m: ArrayLike,
    y: ArrayLike | None = None,
    rowvar: bool = True,
    bias: bool = False,
    ddof: int | None = None,
    fweights: ArrayLike | None = None,
    aweights: ArrayLike | None = None,
    *,
    dtype: npt.DTypeLike | None = None,
) -> ShardedTensor:
    """Returns the covariance matrix of variables.

    Where the observations are split, each device multiplies its own, and the products are added.

    Args:
        m: the variables, in rows, and their observations, in columns; one dimension is one variable.
        y: more variables, with the same observations.
        rowvar: whether the variables are in rows; otherwise they are in columns.
        bias: whether the sum is divided by the number of observations, otherwise by one less; ``ddof`` overrides it.
        ddof: the number by which the divisor is less than the number of observations.
        fweights: how often each observation counts: integers, which are read on the host.
        aweights: weights of the observations, which are read on the host.
        dtype: the dtype of the result, at least float64 by default.

    Raises:
        ShapeError: m or y has more than two dimensions, or the numbers of observations or of their weights differ.
        ArgumentTypeError: ``fweights`` are not integers.
        ArgumentError: weights are negative.

    >>> st.cov(st.asarray([[0.0, 1.0, 2.0], [2.0, 1.0, 0.0]])).tolist()
    [[1.0, -1.0], [-1.0, 1.0]]
    """
    if ddof is not None and ddof != int(ddof):
        raise ArgumentError(f"cov: ddof is {ddof}; wanted an integer")
    parts = [array_like(x, "cov") for x in (m, y) if x is not None]
    for name, part in zip("my", parts, strict=False):
        if len(shape_of(part)) > 2:
            raise ShapeError(f"cov: {name} has {counted(len(shape_of(part)), 'dimension')}; wanted one or two")
    if dtype is None:
        dtype = _at_least_double(*[result_type(part) for part in parts])
    in_rows = [rowvar or (k == 1 and shape_of(part)[:1] == (1,)) for k, part in enumerate(parts)]
    sizes = [_numbers(shape_of(part), rows) for part, rows in zip(parts, in_rows, strict=True)]
    variables, count = sizes[0]
    if not variables:
        return zeros((0, 0))
    if sizes[-1][1] != count:
        raise ShapeError(f"cov: y has {counted(sizes[-1][1], 'observation')}; wanted as many as m has, {count}")
    weights = _observation_weights(fweights, aweights, count)
    freedom = (0 if bias else 1) if ddof is None else int(ddof)
    divisor = _divisor(count, weights, aweights, freedom)
    factor = 1 / divisor if divisor else math.inf
    return _covariance(parts, in_rows, weights, factor, dtype)


@functools.lru_cache(1024)
def _at_least_double(*dtypes: Any) -> np.dtype[Any]:
    """Returns the dtype to which dtypes are promoted, float64 at least."""
    return np.result_type(*dtypes, np.float64)


def _numbers(shape: tuple[int, ...], rowvar: bool) -> tuple[int, ...]:
    """Returns the numbers of variables and of observations of an argument of `cov`."""
    if len(shape) < 2:
        return 1, math.prod(shape)
    return shape if rowvar else shape[::-1]


@composition(recorded)
def _covariance(parts: list[Any], in_rows: list[bool], weights: Any, factor: float, dtype: Any) -> ShardedTensor:
    """Returns the sums of products of the deviations of variables, multiplied by a factor."""
    variables = [_variables(part, rows, dtype) for part, rows in zip(parts, in_rows, strict=True)]
    observed = variables[0] if len(variables) == 1 else concat(variables, axis=0)
    centered = subtract(observed, average(observed, 1, weights, keepdims=True))
    other = centered if weights is None else multiply(centered, weights)
    with np.errstate(divide="ignore", invalid="ignore"):
        right = matrix_transpose(other)
        product = multiply(matmul(centered, conj(right) if iscomplexobj(right) else right), factor)
    single = tuple([d for d in (0, 1) if shape_of(product)[d] == 1])
    return squeeze(product, axis=single) if single else product


def _variables(x: Any, rowvar: bool, dtype: Any) -> Any:
    """Returns an argument of `cov` with the variables in rows."""
    cast = astype(x, dtype, copy=False)
    if len(shape_of(x)) < 2:
        return reshape(cast, (1, -1))
    return cast if rowvar else matrix_transpose(cast)


def _observation_weights(fweights: Any, aweights: Any, count: int) -> Any:
    """Returns the weights of observations as a host array, or None."""
    product = None
    for name, argument in (("fweights", fweights), ("aweights", aweights)):
        if argument is None:
            continue
        weights = on_host(argument).astype(np.float64)
        if weights.ndim > 1 or weights.shape != (count,):
            raise ShapeError(f"cov: {name} has shape {weights.shape}; wanted ({count},), one for each observation")
        if name == "fweights" and not np.all(weights == np.around(weights)):
            raise ArgumentTypeError("cov: fweights are not integers; wanted how often each observation counts")
        if np.any(weights < 0):
            raise ArgumentError(f"cov: {name} has negative elements; wanted weights from 0 on")
        product = weights if product is None else product * weights
    return product


def _divisor(count: int, weights: Any, aweights: Any, ddof: int) -> float:
    """Returns the number by which sums of products are divided, 0 where there are too few observations."""
    total = count if weights is None else weights.sum()
    lost = ddof * (weights * on_host(aweights)).sum() / total if aweights is not None and ddof else ddof
    divisor = float(total - lost)
    if divisor <= 0:
        warn_caller("Degrees of freedom <= 0 for slice")
        return 0.0
    return divisor


@named
def corrcoef(
    x: ArrayLike, y: ArrayLike | None = None, rowvar: bool = True, *, dtype: npt.DTypeLike | None = None
) -> ShardedTensor:
    """Returns the correlation coefficients of variables: their covariances, divided by both standard deviations.

    Arguments, sharding and errors are those of `cov`.

    >>> st.corrcoef(st.asarray([[0.0, 1.0, 2.0], [2.0, 1.0, 0.0]])).tolist()
    [[1.0, -1.0], [-1.0, 1.0]]
    """
    return _correlation(cov(x, y, rowvar, dtype=dtype))  # type: ignore[no-any-return]


@composition(recorded)
def _correlation(matrix: Any) -> Any:
    """Returns covariances, divided by both standard deviations."""
    if not shape_of(matrix):
        return divide(matrix, matrix)  # One variable: 1, or NaN where it is constant.
    spread = sqrt(real(call("diagonal", matrix)))
    scaled = divide(divide(matrix, expand_dims(spread, axis=1)), expand_dims(spread, axis=0))
    if not iscomplexobj(scaled):
        return _clipped(scaled)
    return call("add", _clipped(real(scaled)), multiply(_clipped(imag(scaled)), 1j))


def _clipped(x: Any) -> Any:
    return call("clip", x, -1, 1)
