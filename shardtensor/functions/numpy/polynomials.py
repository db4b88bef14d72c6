"""NumPy's functions of polynomials, which are 1-d arrays of coefficients, that of the highest power first.

The points at which a polynomial is evaluated, and those to which it is fitted, may be sharded: `polyval` is
elementwise, and `polyfit` solves a least-squares problem (`shardtensor.linalg.lstsq`). Coefficients are few.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from shardtensor.core import call, composition, named, recorded
from shardtensor.errors import ArgumentError, ArgumentTypeError, ShapeError
from shardtensor.functions.linalg.decompositions import eigvals
from shardtensor.functions.linalg.matrix_functions import lstsq
from shardtensor.functions.numpy.comparisons import array_like
from shardtensor.functions.numpy.differences import convolve_part
from shardtensor.functions.numpy.selection import trim_zeros
from shardtensor.functions.standard.data_types import astype, result_type
from shardtensor.functions.standard.elementwise import add, divide, multiply, sqrt, square, subtract
from shardtensor.functions.standard.joining import concat
from shardtensor.functions.standard.manipulation import broadcast_to, expand_dims, flip
from shardtensor.functions.standard.repetition import devices_of, on_host
from shardtensor.functions.standard.scans import cumulative_prod
from shardtensor.functions.standard.statistical import sum as _sum
from shardtensor.host.units import counted
from shardtensor.sequences import as_list, check_no_iterator
from shardtensor.tensor.operands import shape_of
from shardtensor.tensor.tensor import ArrayLike, ShardedTensor
from shardtensor.tracebacks import warn_caller


def _coefficients(x: Any, caller: str) -> Any:
    array = array_like(x, caller)
    return call("atleast_1d", array)


@composition(fused=True)
def polyval(p: ArrayLike, x: ArrayLike) -> ShardedTensor:
    """Evaluates a polynomial at each element of x, by Horner's rule.

    The result has x's shape and sharding.

    Args:
        p: the coefficients.
        x: a tensor, an array, a list or a scalar.

    >>> st.polyval([3, 0, 1], st.asarray([5, 2])).tolist()
    [76, 13]
    """
    check_no_iterator(p, "polyval: p")
    coefficients, points = array_like(p, "polyval"), call("asarray", array_like(x, "polyval"))
    result: Any = call("zeros_like", points)
    for k in range(shape_of(coefficients)[0]):
        result = add(multiply(result, points), coefficients[k])
    return result  # type: ignore[no-any-return]


def _aligned(caller: str, a1: Any, a2: Any, combine: Callable[[Any, Any], Any]) -> Any:
    """Combines two polynomials, of which the shorter one gets leading zeros."""
    x, y = [_coefficients(a, caller) for a in (a1, a2)]
    count = max(shape_of(x)[0], shape_of(y)[0])
    return combine(*[call("pad", a, ((count - shape_of(a)[0], 0),)) for a in (x, y)])


@composition()
def polyadd(a1: ArrayLike, a2: ArrayLike) -> ShardedTensor:
    """Returns the sum of two polynomials.

    >>> st.polyadd(st.asarray([1, 2]), [9, 5, 4]).tolist()
    [9, 6, 6]
    """
    return _aligned("polyadd", a1, a2, add)  # type: ignore[no-any-return]


@composition()
def polysub(a1: ArrayLike, a2: ArrayLike) -> ShardedTensor:
    """Returns the difference of two polynomials.

    >>> st.polysub(st.asarray([2, 10, -2]), [3, 10, -4]).tolist()
    [-1, 0, 2]
    """
    return _aligned("polysub", a1, a2, subtract)  # type: ignore[no-any-return]


def _product(a1: Any, a2: Any) -> Any:
    """Computes `polymul` of host arrays."""
    factors = [np.trim_zeros(np.atleast_1d(a), "f") for a in (a1, a2)]
    factors = [a if a.size else np.zeros(1, a.dtype) for a in factors]
    short, long = sorted([a.astype(np.result_type(*factors), copy=False) for a in factors], key=len)
    return np.convolve(long, short)


@composition(_product)
def polymul(a1: ArrayLike, a2: ArrayLike) -> ShardedTensor:
    """Returns the product of two polynomials: the convolution of their coefficients (see `shardtensor.convolve`).

    Leading zeros are removed first, so that `eval_shape` cannot infer the result.

    Raises:
        ShapeError: one of them has more dimensions than one.

    >>> st.polymul(st.asarray([1, 2, 3]), [9, 5, 1]).tolist()
    [9, 23, 38, 17, 3]
    """
    polynomials = [_coefficients(a, "polymul") for a in (a1, a2)]
    for name, a in zip(("a1", "a2"), polynomials, strict=True):
        if len(shape_of(a)) > 1:
            raise ShapeError(f"polymul: {name} has {counted(len(shape_of(a)), 'dimension')}; wanted one")
    factors: list[Any] = [trim_zeros(a, "f") for a in polynomials]
    factors = [a if shape_of(a)[0] else np.zeros(1, result_type(a)) for a in factors]
    dtype = result_type(*factors)
    short, long = sorted([astype(a, dtype, copy=False) for a in factors], key=lambda a: shape_of(a)[0])
    absent = shape_of(short)[0] - 1
    return convolve_part(long, short, before=absent, behind=absent)


@composition()
def poly(seq_of_zeros: ArrayLike) -> ShardedTensor:
    """Returns the coefficients of the polynomial with these roots, or of the characteristic polynomial of a matrix.

    The roots are few: they are read on the host, which multiplies their factors one after the other.

    Args:
        seq_of_zeros: the roots, of at most one dimension, or a square matrix, whose eigenvalues are the roots.

    Raises:
        ShapeError: it is neither.
        ConcretizationError: the elements are not known.

    >>> st.poly(st.asarray([2.0, -1.0])).tolist()
    [1.0, -1.0, -2.0]
    """
    zeros = array_like(seq_of_zeros, "poly")
    shape = shape_of(zeros)
    if len(shape) == 2 and shape[0] == shape[1] > 0:
        zeros = eigvals(zeros)
    elif len(shape) > 1:
        raise ShapeError(f"poly: seq_of_zeros has shape {shape}; wanted one dimension, or a square matrix")
    return _from_host(np.poly(on_host(zeros)), zeros)


@composition()
def roots(p: ArrayLike) -> ShardedTensor:
    """Returns the roots of a polynomial, as `numpy.roots`: the eigenvalues of its companion matrix, and zeros.

    The coefficients are few: they are read on the host, which computes the roots.

    Args:
        p: the coefficients, of at most one dimension.

    Raises:
        ShapeError: p has more than one dimension.
        ConcretizationError: the elements are not known.

    >>> sorted(st.roots(st.asarray([1.0, -1.0, -2.0])).round(6).tolist())
    [-1.0, 2.0]
    """
    coefficients = array_like(p, "roots")
    if len(shape_of(coefficients)) > 1:
        raise ShapeError(f"roots: p has {counted(len(shape_of(coefficients)), 'dimension')}; wanted one")
    return _from_host(np.roots(on_host(coefficients)), coefficients)


@composition()
def polydiv(u: ArrayLike, v: ArrayLike) -> tuple[ShardedTensor, ShardedTensor]:
    """Returns the quotient and the remainder of two polynomials.

    The coefficients are few: they are read on the host, which computes those of the results one after the other.

    Args:
        u: the dividend, of at most one dimension.
        v: the divisor, likewise.

    Raises:
        ShapeError: one of them has more dimensions.
        ConcretizationError: the elements are not known.

    >>> [part.tolist() for part in st.polydiv(st.asarray([3.0, 5.0, 2.0]), [2.0, 1.0])]
    [[1.5, 1.75], [0.25]]
    """
    polynomials = [array_like(a, "polydiv") for a in (u, v)]
    for name, a in zip("uv", polynomials, strict=True):
        if len(shape_of(a)) > 1:
            raise ShapeError(f"polydiv: {name} has {counted(len(shape_of(a)), 'dimension')}; wanted one")
    quotient, rest = [_from_host(part, *polynomials) for part in np.polydiv(*map(on_host, polynomials))]
    return quotient, rest


def _from_host(array: Any, *operands: Any) -> ShardedTensor:
    """Returns a host array as a tensor on the devices of the first tensor among the operands."""
    where = next((devices_of(x) for x in operands if isinstance(x, ShardedTensor)), None)
    return call("asarray", array, device=where)  # type: ignore[no-any-return]


@composition()
def polyder(p: ArrayLike, m: int = 1) -> ShardedTensor:
    """Returns the m-th derivative of a polynomial.

    Raises:
        ArgumentError: ``m`` is negative.

    >>> st.polyder(st.asarray([1, 1, 1, 1])).tolist()
    [3, 2, 1]
    """
    if m < 0:
        raise ArgumentError(f"polyder: m is {m}; wanted a number from 0 on")
    coefficients = _coefficients(p, "polyder")
    for _ in range(m):
        powers = np.arange(shape_of(coefficients)[0] - 1, 0, -1)
        coefficients = multiply(call("getitem", coefficients, slice(0, len(powers))), powers)
    return call("asarray", coefficients)  # type: ignore[no-any-return]


@composition()
def polyint(p: ArrayLike, m: int = 1, k: Any = None) -> ShardedTensor:
    """Returns the m-th integral of a polynomial.

    Args:
        p: the coefficients.
        m: how often it is integrated.
        k: the constants of integration, in their order: a list, or one number for all; zeros by default.

    Raises:
        ArgumentError: ``m`` is negative, or there are too few constants.

    >>> st.polyint(st.asarray([3.0, 2.0, 1.0])).tolist()
    [1.0, 1.0, 1.0, 0.0]
    """
    if m < 0:
        raise ArgumentError(f"polyint: m is {m}; wanted a number from 0 on")
    constants = np.atleast_1d(np.zeros(m) if k is None else as_list(k, "polyint: k") if np.iterable(k) else k)
    constants = np.full(m, constants[0]) if len(constants) == 1 and m > 1 else constants
    if len(constants) < m:
        raise ArgumentError(f"polyint: k has {counted(len(constants), 'constant')}; wanted {m}, or one for all")
    coefficients = _coefficients(p, "polyint")
    for constant in constants[:m]:
        coefficients = concat([divide(coefficients, np.arange(shape_of(coefficients)[0], 0, -1)), constant.reshape(1)])
    return call("asarray", coefficients)  # type: ignore[no-any-return]


@composition()
def vander(x: ArrayLike, N: int | None = None, increasing: bool = False) -> ShardedTensor:
    """Returns the matrix of the powers of each element of x, in its rows.

    The rows are split as x is. No data moves.

    Args:
        x: a tensor, an array or a list of one dimension.
        N: the number of powers, from 0 on; by default that of the elements.
        increasing: whether the powers increase from left to right.

    Raises:
        ShapeError: x does not have one dimension, or ``N`` is negative.

    >>> st.vander(st.asarray([1, 2, 3]), 3).tolist()
    [[1, 1, 1], [4, 2, 1], [9, 3, 1]]
    """
    vector: Any = array_like(x, "vander")
    if len(shape_of(vector)) != 1:
        raise ShapeError(f"vander: x has {counted(len(shape_of(vector)), 'dimension')}; wanted one")
    if N is not None and N < 0:
        raise ShapeError(f"vander: N is {N}; wanted a number from 0 on")
    count = shape_of(vector)[0]
    dtype = np.promote_types(result_type(vector), int)
    columns = expand_dims(astype(vector, dtype), axis=1)
    parts = [call("ones_like", columns)]
    powers = (count if N is None else N) - 1
    if powers > 0:
        parts.append(cumulative_prod(broadcast_to(columns, (count, powers)), axis=1, dtype=dtype))
    matrix = concat(parts if powers >= 0 else [call("getitem", columns, (slice(None), slice(0)))], axis=1)
    return matrix if increasing else flip(matrix, axis=1)


@named
def polyfit(
    x: ArrayLike, y: ArrayLike, deg: int, rcond: float | None = None, full: bool = False, w: ArrayLike | None = None
) -> Any:
    """Fits a polynomial of degree ``deg`` to points, by least squares.

    Args:
        x: the coordinates, of one dimension.
        y: the values, of one dimension, or in each column those of another polynomial.
        deg: the degree.
        rcond: the least singular value that counts, relative to the greatest; by default the number of points times
            the dtype's ``eps``.
        full: whether the residuals, the rank, the singular values and ``rcond`` follow in the result. Without them, a
            rank that does not exceed the degree is a RankWarning, as in NumPy.
        w: a weight for each point, by which the distance is multiplied.

    Raises:
        ArgumentError: ``deg`` is negative.
        ArgumentTypeError: there are no points, or the shapes do not agree, as in NumPy.

    >>> st.polyfit(st.asarray([0.0, 1.0, 2.0]), [1.0, 3.0, 5.0], 1).round(6).tolist()
    [2.0, 1.0]
    """
    points, values = [_float(array_like(a, "polyfit")) for a in (x, y)]
    if deg < 0:
        raise ArgumentError(f"polyfit: deg is {deg}; wanted a number from 0 on")
    count, dims = shape_of(points), len(shape_of(values))
    if len(count) != 1 or not count[0]:
        raise ArgumentTypeError(f"polyfit: x has shape {count}; wanted one dimension, and at least one element")
    if dims not in (1, 2) or shape_of(values)[0] != count[0]:
        raise ArgumentTypeError(f"polyfit: y has shape {shape_of(values)}; wanted {count}, or columns of that size")
    rtol = count[0] * float(np.finfo(result_type(points)).eps) if rcond is None else rcond
    weights = None if w is None else _float(array_like(w, "polyfit"))
    if weights is not None and shape_of(weights) != count:
        raise ArgumentTypeError(f"polyfit: w has shape {shape_of(weights)}; wanted {count}")
    powers, scale = _scaled_powers(points, deg, weights)
    if weights is not None:
        values = multiply(values, weights if dims == 1 else expand_dims(weights, axis=1))
    coefficients, residuals, rank, singular = lstsq(powers, values, rtol)
    coefficients = divide(coefficients, scale if dims == 1 else expand_dims(scale, axis=1))
    if full:
        return coefficients, residuals, rank, singular, rtol
    if rank <= deg:
        warn_caller("Polyfit may be poorly conditioned", np.exceptions.RankWarning)
    return coefficients


@composition(recorded)
def _scaled_powers(points: Any, deg: int, weights: Any) -> tuple[Any, Any]:
    """Returns the weighted powers of points, in columns of norm 1, and the norms by which they are divided."""
    powers = vander(points, deg + 1)
    if weights is not None:
        powers = multiply(powers, expand_dims(weights, axis=1))
    scale = sqrt(_sum(square(powers), axis=0))
    return divide(powers, scale), scale


def _float(x: Any) -> Any:
    """Returns an argument of `polyfit` as an array of real or complex numbers.

    Raises:
        ArgumentTypeError: it is a scalar.
    """
    if not hasattr(x, "shape"):
        raise ArgumentTypeError(f"polyfit: got {x!r:.60}; wanted arrays")
    return x if result_type(x).kind in "fc" else astype(x, np.float64)
