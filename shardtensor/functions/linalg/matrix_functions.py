"""Linear algebra functions that are composed of operators: norms, powers and products of matrices, least squares.

They run wherever these operators do, and gather nothing that these do not: norms and powers of split matrices are
computed from partial results, except for those that need singular values.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from shardtensor.backend.small_floats import is_small_float, promoted
from shardtensor.core import call, composition, hinted, implements, named, operator, recorded
from shardtensor.errors import ArgumentError, ArgumentTypeError, LinearAlgebraError, ShapeError, type_text
from shardtensor.functions.linalg.blocked_factorizations import (
    blocked_cholesky,
    blocked_inv,
    blocked_slogdet,
    blocked_solve,
    is_blocked,
)
from shardtensor.functions.linalg.decompositions import SlogdetResult, slogdet, svd
from shardtensor.functions.linalg.equations import (
    check_matrices,
    check_square,
    cholesky,
    cond,
    det,
    inv,
    solve,
    svdvals,
    vector_norm,
)
from shardtensor.functions.linalg.tsqr import factor_dtype, is_solvable, is_tall, tall_r
from shardtensor.functions.numpy import products
from shardtensor.functions.standard.creation import zeros_like
from shardtensor.functions.standard.data_types import astype
from shardtensor.functions.standard.elementwise import abs as absolute
from shardtensor.functions.standard.elementwise import (
    add,
    conj,
    divide,
    equal,
    exp,
    greater,
    isnan,
    logical_or,
    multiply,
    square,
    subtract,
)
from shardtensor.functions.standard.joining import concat
from shardtensor.functions.standard.linear_algebra import matmul
from shardtensor.functions.standard.manipulation import broadcast_to, expand_dims, matrix_transpose, moveaxis, reshape
from shardtensor.functions.standard.searching import where
from shardtensor.functions.standard.statistical import any as any_of
from shardtensor.functions.standard.statistical import max as greatest
from shardtensor.functions.standard.statistical import min as least
from shardtensor.functions.standard.statistical import sum as sum_over
from shardtensor.host.units import counted
from shardtensor.sequences import as_list, as_tuple
from shardtensor.sharding.rules import normalize_axes
from shardtensor.tensor.operands import dtype_of, shape_of
from shardtensor.tensor.tensor import ArrayLike, ShardedTensor

_DERIVATIVES = "of_linalg"

# -- the standard's products and diagonals, along the last dimensions ------------------------------


@hinted
def cross(x1: ArrayLike, x2: ArrayLike, /, *, axis: int = -1) -> ShardedTensor:
    """Computes the cross products of vectors of three elements along ``axis``; see `shardtensor.cross`.

    >>> st.linalg.cross(st.asarray([1, 2, 3]), st.asarray([4, 5, 6])).tolist()
    [-3, 6, -3]
    """
    return products.cross(x1, x2, axis=axis)


@hinted
def diagonal(x: ArrayLike, /, *, offset: int = 0) -> ShardedTensor:
    """Returns the diagonals of matrices, the last two dimensions; see `shardtensor.diagonal`.

    >>> st.linalg.diagonal(st.asarray([[1, 2, 3], [4, 5, 6]]), offset=1).tolist()
    [2, 6]
    """
    return products.diagonal(x, offset, -2, -1)


@hinted
def trace(x: ArrayLike, /, *, offset: int = 0, dtype: Any = None) -> ShardedTensor:
    """Computes the sum of each diagonal of matrices, the last two dimensions; see `shardtensor.trace`.

    >>> st.linalg.trace(st.asarray([[1, 2], [3, 4]])).item()
    5
    """
    return products.trace(x, offset, -2, -1, dtype)


@hinted
def outer(x1: ArrayLike, x2: ArrayLike, /) -> ShardedTensor:
    """Computes the products of all elements of a vector with all elements of another; both keep their sharding.

    Raises:
        ShapeError: an operand does not have one dimension.

    >>> st.linalg.outer(st.asarray([1, 2]), st.asarray([10, 20, 30])).tolist()
    [[10, 20, 30], [20, 40, 60]]
    """
    for name, x in (("x1", x1), ("x2", x2)):
        if len(shape_of(x)) != 1:
            raise ShapeError(f"outer: {name} has {counted(len(shape_of(x)), 'dimension')}; wanted one")
    return products.outer(x1, x2)


# -- norms -----------------------------------------------------------------------------------------


@hinted
def matrix_norm(x: ArrayLike, /, *, keepdims: bool = False, ord: float | str | None = "fro") -> ShardedTensor:
    """Computes norms of matrices, the last two dimensions of x.

    The Frobenius norm, and those of sums of rows and columns, are partial results where a dimension of the matrices is
    sharded; those of singular values need the whole matrices (see `svdvals`).

    Args:
        x: a tensor or an array of at least two dimensions.
        keepdims: whether the dimensions of the matrices remain, with size 1.
        ord: "fro" or None (Frobenius), "nuc" (the sum of the singular values), 2 and -2 (the greatest and the least of
            them), 1 and -1 (the greatest and the least sum of absolute values of a column), inf and -inf (of a row).

    Raises:
        ArgumentError: ``ord`` is none of these.

    >>> st.linalg.matrix_norm(st.asarray([[3.0, 0.0], [0.0, 4.0]])).item()
    5.0
    """
    check_matrices("matrix_norm: x", shape_of(x))
    if ord is None or ord == "fro":
        return vector_norm(x, axis=(-2, -1), keepdims=keepdims)
    if ord in ("nuc", 2, -2):
        values, best = svdvals(x), sum_over if ord == "nuc" else greatest if ord == 2 else least
        if best is greatest and not shape_of(values)[-1]:
            best = sum_over  # The greatest of no singular values is zero.
        size = best(values, axis=-1)
    elif ord in (1, -1, np.inf, -np.inf):
        along = -2 if abs(ord) == 1 else -1
        sums = vector_norm(x, axis=along, ord=1)
        size = vector_norm(sums, axis=-1, ord=np.inf) if ord in (1, np.inf) else least(sums, axis=-1)
    else:
        raise ArgumentError(f"matrix_norm: ord is {ord!r}; wanted 'fro', 'nuc', 1, -1, 2, -2, inf or -inf")
    return expand_dims(size, axis=(-2, -1)) if keepdims else size


@named
def norm(
    x: ArrayLike, /, ord: float | str | None = None, axis: int | tuple[int, ...] | None = None, keepdims: bool = False
) -> ShardedTensor:
    """Computes NumPy's norms: of vectors along one axis, of matrices along two; by default of all elements.

    Args:
        x: a tensor or an array.
        ord: the kind of norm (see `vector_norm` and `matrix_norm`); None is the root of the sum of squares.
        axis: one dimension or two; None means all dimensions, of which there are one or two unless ``ord`` is None.
        keepdims: whether the reduced dimensions remain, with size 1.

    Raises:
        ArgumentError: there is no such norm of vectors or of matrices, or ``axis`` has more than two dimensions.

    >>> st.linalg.norm(st.asarray([[3.0, 0.0], [0.0, 4.0]])).item()
    5.0
    """
    ndim = len(shape_of(x))
    if axis is None and ord is None:
        return vector_norm(x, keepdims=keepdims)
    axes = normalize_axes(tuple(range(ndim)) if axis is None else axis, ndim)
    if len(axes) == 1:
        return vector_norm(x, axis=axes[0], keepdims=keepdims, ord=2 if ord is None else ord)  # type: ignore[arg-type]
    if len(axes) != 2:
        raise ArgumentError(f"norm: axis is {axis}, of {counted(len(axes), 'dimension')}; wanted one or two")
    size = matrix_norm(moveaxis(x, axes, (-2, -1)), ord="fro" if ord == "f" else ord)
    return expand_dims(size, axis=tuple(sorted(axes))) if keepdims else size


@implements(cond, "composite")
def _cond(x: Any, p: Any) -> Any:
    check_matrices("x", shape_of(x))
    if 0 in shape_of(x)[-2:]:
        raise LinearAlgebraError(f"x has shape {shape_of(x)}, of matrices without elements; wanted some")
    return _condition(x, p)


@composition(recorded, error_name="cond")
def _condition(x: Any, p: Any) -> Any:
    if p in (None, 2, -2):
        values = svdvals(x)
        size, other = [call("getitem", values, (..., k)) for k in ((-1, 0) if p == -2 else (0, -1))]
        singular = equal(other, 0)
        size = divide(size, where(singular, 1, other))
    else:
        check_square("x", shape_of(x))
        singular = equal(slogdet(x).sign, 0)
        regular = where(expand_dims(singular, axis=(-2, -1)), np.eye(shape_of(x)[-1], dtype=dtype_of(x)), x)
        size = multiply(matrix_norm(x, ord=p), matrix_norm(inv(regular), ord=p))
    size = where(logical_or(singular, isnan(size)), np.inf, size)
    return where(any_of(isnan(x), axis=(-2, -1)), np.nan, size)


# -- split matrices ---------------------------------------------------------------------------------


@implements(cholesky, "composite")
def _cholesky(x: Any, upper: bool) -> Any:
    if not is_blocked(x):
        return NotImplemented
    return _adjoint(blocked_cholesky(_adjoint(x))) if upper else blocked_cholesky(x)


def _adjoint(x: Any) -> Any:
    return conj(matrix_transpose(x)) if dtype_of(x).kind == "c" else matrix_transpose(x)


@implements(inv, "composite")
def _inv(x: Any) -> Any:
    return blocked_inv(x) if is_blocked(x) else NotImplemented


@implements(slogdet, "composite")
def _slogdet(x: Any) -> Any:
    return SlogdetResult(*blocked_slogdet(x)) if is_blocked(x) else NotImplemented


@implements(det, "composite")
def _det(x: Any) -> Any:
    if not is_blocked(x):
        return NotImplemented
    sign, logarithm = blocked_slogdet(x)
    return multiply(sign, exp(logarithm))


@implements(solve, "composite")
def _solve(x1: Any, x2: Any) -> Any:
    shape, right = shape_of(x1), shape_of(x2)
    if not is_blocked(x1) or not is_solvable(dtype_of(x2)) or not right:
        return NotImplemented
    if right[max(len(right) - 2, 0)] != shape[-1]:
        return NotImplemented  # The operator raises the error.
    if len(right) == 1:
        return reshape(solve(x1, reshape(x2, (*right, 1))), (*shape[:-2], *right))
    if len(shape) == 2 < len(right):  # The matrix is factorized once, for all right-hand sides of the stack.
        columns = moveaxis(x2, -2, 0)
        solutions = solve(x1, reshape(columns, (shape[-1], math.prod(right) // shape[-1])))
        return moveaxis(reshape(solutions, shape_of(columns)), 0, -2)
    stack = np.broadcast_shapes(shape[:-2], right[:-2])
    if stack == shape[:-2] == right[:-2]:
        return blocked_solve(x1, x2)
    return solve(*[broadcast_to(x, (*stack, *shape_of(x)[-2:])) for x in (x1, x2)])


# -- products --------------------------------------------------------------------------------------


@hinted
def matrix_power(x: ArrayLike, n: int, /) -> ShardedTensor:
    """Computes the n-th power of square matrices: by repeated `matmul`; of their inverse if n is negative.

    Args:
        x: a tensor or an array of shape (..., m, m).
        n: an integer.

    Raises:
        LinAlgError: the matrices are not square; n is negative and one is singular.
        ArgumentTypeError: n is not an integer.

    >>> st.linalg.matrix_power(st.asarray([[1, 1], [0, 1]]), 5).tolist()
    [[1, 5], [0, 1]]
    """
    check_square("matrix_power: x", shape_of(x))
    try:
        rest = int(n.__index__())
    except AttributeError:
        raise ArgumentTypeError(f"matrix_power: n is {type_text(n)}; wanted an integer") from None
    if rest < 0:
        x, rest = inv(x), -rest
    if not rest:
        return add(zeros_like(x), np.eye(shape_of(x)[-1], dtype=dtype_of(x)))
    result, factor = None, x
    while True:
        if rest & 1:
            result = factor if result is None else matmul(result, factor)
        rest >>= 1
        if not rest:
            return result  # type: ignore[return-value]
        factor = matmul(factor, factor)


def multi_dot(arrays: Sequence[ArrayLike], /) -> ShardedTensor:
    """Multiplies matrices in the order of the fewest multiplications.

    Args:
        arrays: at least two tensors or arrays of two dimensions; the first and the last one may be vectors.

    Raises:
        ShapeError: there are fewer than two operands, or shapes do not fit.

    >>> st.linalg.multi_dot([st.ones((2, 3)), st.ones((3, 4)), st.ones(4)]).tolist()
    [12.0, 12.0]
    """
    arrays = as_list(arrays, "multi_dot: arrays")
    shapes = [shape_of(x) for x in arrays]
    if len(arrays) < 2:
        raise ShapeError(f"multi_dot: {counted(len(arrays), 'array is', 'arrays are')} given; wanted at least two")
    for k, shape in enumerate(shapes):
        if len(shape) != 2 and not (len(shape) == 1 and k in (0, len(shapes) - 1)):
            raise LinearAlgebraError(f"multi_dot: array {k} has shape {shape}; wanted a matrix")
    first = (1, *shapes[0]) if len(shapes[0]) == 1 else shapes[0]
    last = (*shapes[-1], 1) if len(shapes[-1]) == 1 else shapes[-1]
    sizes = (first[-2], *[shape[0] for shape in shapes[1:-1]], last[0], last[1])
    splits = _best_splits(sizes)

    def product(i: int, j: int) -> Any:
        if i == j:
            return arrays[i]
        k = splits[i, j]
        return matmul(product(i, k), product(k + 1, j))

    return product(0, len(arrays) - 1)  # type: ignore[no-any-return]


@functools.lru_cache(256)
def _best_splits(sizes: tuple[int, ...]) -> dict[tuple[int, int], int]:
    """Returns for each run of matrices, from i to j, the last one of its left factor; matrix k is sizes[k] x
    sizes[k + 1].
    """
    count = len(sizes) - 1
    costs, splits = {(i, i): 0 for i in range(count)}, {}
    for length in range(1, count):
        for i in range(count - length):
            j = i + length
            options = {k: costs[i, k] + costs[k + 1, j] + sizes[i] * sizes[k + 1] * sizes[j + 1] for k in range(i, j)}
            splits[i, j] = min(options, key=options.__getitem__)
            costs[i, j] = options[splits[i, j]]
    return splits


@named
def lstsq(
    a: ArrayLike, b: ArrayLike, /, rcond: float | None = None
) -> tuple[ShardedTensor, ShardedTensor, int, ShardedTensor]:
    """Solves a y = b in the least-squares sense, by the singular value decomposition of a.

    Args:
        a: a tensor or an array of shape (m, n).
        b: one of shape (m,) or (m, k).
        rcond: singular values up to ``rcond`` times the greatest one count as zero; by default max(m, n) times the
            machine epsilon, and once the epsilon for -1.

    Returns:
        NumPy's tuple: the solution of least norm, of shape (n,) or (n, k); the sums of squared residuals, of shape (1,)
        or (k,), or of no elements if the rank is less than n or m <= n; the rank; the singular values of a.

    Raises:
        LinAlgError: the shapes do not fit.
        ConcretizationError: the elements of a, on which the shape of the residuals depends, are unknown.

    >>> st.linalg.lstsq(st.asarray([[1.0, 0.0], [0.0, 2.0]]), st.asarray([1.0, 4.0]))[0].tolist()
    [1.0, 2.0]
    """
    shape, right = shape_of(a), shape_of(b)
    if len(shape) != 2 or len(right) not in (1, 2) or right[0] != shape[0]:
        raise LinearAlgebraError(f"lstsq: a has shape {shape} and b {right}; wanted (m, n), and (m,) or (m, k)")
    if any(map(is_small_float, dtypes := [dtype_of(a), dtype_of(b)])):  # Operators compute in float32, too.
        a, b = [astype(x, np.float32) if is_small_float(dtype) else x for x, dtype in zip((a, b), dtypes, strict=True)]
        solution, residuals, rank, values = lstsq(a, b, rcond)
        small = promoted(dtypes, "lstsq")
        if small is None:
            return solution, residuals, rank, values
        return astype(solution, small), astype(residuals, small), rank, astype(values, small)
    columns = reshape(b, (right[0], 1)) if len(right) == 1 else b
    solution, rank_found, values = _least_squares(a, columns, rcond)
    rank = int(rank_found)
    residuals = _residuals(a, columns, solution, rank == shape[1] < shape[0])
    return reshape(solution, (shape[1],)) if len(right) == 1 else solution, residuals, rank, values


@operator(operands=("a", "b"), error_name="lstsq", tags=("internal",))
def least_squares(
    a: ArrayLike, b: ArrayLike, /, *, rcond: float | None
) -> tuple[ShardedTensor, ShardedTensor, ShardedTensor]:
    """Returns the solution of `lstsq`, the rank and the singular values.

    >>> from shardtensor.functions.linalg.matrix_functions import least_squares
    >>> [x.tolist() for x in least_squares(st.eye(2), st.ones((2, 1)), rcond=None)]
    [[[1.0], [1.0]], 2, [1.0, 1.0]]
    """


@implements(least_squares, "composite")
def _by_singular_values(a: Any, b: Any, rcond: float | None) -> tuple[Any, Any, Any]:
    longest, factor = max(shape_of(a)), _factor_of_both(a, b)
    if factor is not None:
        n = shape_of(a)[1]
        a, b = call("getitem", factor, (slice(n), slice(n))), call("getitem", factor, (slice(n), slice(n, None)))
    left, values, rows = svd(a, full_matrices=False)
    epsilon = float(np.finfo(dtype_of(values)).eps)
    limit = epsilon * (1 if rcond == -1 else longest) if rcond in (None, -1) else rcond
    large = greater(values, multiply(vector_norm(values, ord=np.inf), limit))
    factors = where(large, divide(1, where(large, values, 1)), 0)
    scaled = multiply(expand_dims(factors, axis=1), matmul(conj(matrix_transpose(left)), b))
    return matmul(conj(matrix_transpose(rows)), scaled), sum_over(large), values


def _factor_of_both(a: Any, b: Any) -> Any:
    """Returns R of the matrix of the columns of a and those of b, if a is tall and b has few columns: the first rows of
    R have a's factor, and in the columns of b what Q is multiplied by otherwise, so that Q is not computed. None of
    others.
    """
    n, k, dtype = shape_of(a)[1], shape_of(b)[1], dtype_of(a)
    if 2 * k > n or not (is_tall(a) and is_solvable(dtype_of(b))):
        return None
    if factor_dtype(np.result_type(dtype, dtype_of(b))) != factor_dtype(dtype):  # The singular values have a's dtype.
        return None
    both = concat([a, b], axis=1)
    return tall_r(both) if is_tall(both) else None


@composition(recorded)
def _least_squares(a: Any, b: Any, rcond: float | None) -> tuple[Any, Any, Any]:
    return least_squares(a, b, rcond=rcond)


@composition(recorded)
def _residuals(a: Any, columns: Any, solution: Any, are_defined: bool) -> Any:
    """Returns the sums of squared residuals; no elements where they are not defined."""
    if are_defined:
        return sum_over(square(absolute(subtract(columns, matmul(a, solution)))), axis=0)
    return call("getitem", sum_over(absolute(solution), axis=0), (slice(0),))


# -- tensors as matrices ---------------------------------------------------------------------------


@composition(recorded)
def tensorsolve(a: ArrayLike, b: ArrayLike, /, axes: Sequence[int] | None = None) -> ShardedTensor:
    r"""Solves the linear equations ``tensordot(a, y, y.ndim) = b`` for y, by `solve`.

    Args:
        a: a tensor or an array of shape (\*b.shape, \*y.shape), with as many elements of y as of b.
        b: a tensor or an array.
        axes: dimensions of a that are moved to the end first.

    Raises:
        LinAlgError: the shapes do not fit, or the equations have no unique solution.

    >>> st.linalg.tensorsolve(2 * st.eye(4).reshape(2, 2, 4), st.ones((2, 2))).tolist()
    [0.5, 0.5, 0.5, 0.5]
    """
    if axes is not None:
        axes = as_tuple(axes)
        a = moveaxis(a, tuple(axes), tuple(range(-len(axes), 0)))
    shape, size = shape_of(a)[len(shape_of(b)) :], math.prod(shape_of(b))
    if math.prod(shape) != size:
        raise LinearAlgebraError(
            f"tensorsolve: b has {counted(size, 'element')} and the solution {math.prod(shape)}; wanted equal"
        )
    return reshape(solve(reshape(a, (size, size)), reshape(b, (size,))), shape)


@composition(recorded)
def tensorinv(a: ArrayLike, /, ind: int = 2) -> ShardedTensor:
    """Computes the inverse y of a with respect to `tensordot`: ``tensordot(y, a, ind)`` is the identity.

    Args:
        a: a tensor or an array whose first ``ind`` dimensions have as many elements as the others.
        ind: the number of dimensions that are the last ones of the result.

    Raises:
        ArgumentError: ``ind`` is not positive.
        LinAlgError: the numbers of elements differ, or there is no inverse.

    >>> st.linalg.tensorinv(2 * st.eye(4).reshape(2, 2, 4)).shape
    (4, 2, 2)
    """
    if ind <= 0:
        raise ArgumentError(f"tensorinv: ind is {ind}; wanted a positive number of dimensions")
    shape = shape_of(a)
    size = math.prod(shape[ind:])
    if math.prod(shape[:ind]) != size:
        raise LinearAlgebraError(
            f"tensorinv: a has shape {shape}; wanted {counted(size, 'element')} in the first "
            f"{counted(ind, 'dimension')}"
        )
    return reshape(inv(reshape(a, (size, size))), (*shape[ind:], *shape[:ind]))
