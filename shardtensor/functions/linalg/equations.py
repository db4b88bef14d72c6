"""Declarations of the linear algebra extension of the array API standard, `shardtensor.linalg`, except for those with
several results: see `shardtensor.functions.linalg.decompositions`.

Common to all of them:

- The last two dimensions are those of matrices, the others those of a stack of matrices. A stack keeps its sharding,
  and each device computes its own matrices. A split of the dimensions of the matrices moves to a dimension of the
  stack (an all-to-all). If there is none, the matrices are gathered, except for:

  - tall matrices whose rows are split, with at least as many on each device as there are columns, and wide ones whose
    columns are, in functions of their singular values: see `shardtensor.functions.linalg.tsqr`;
  - square matrices of more than 1,024 rows in `cholesky`, `solve`, `inv`, `det` and `slogdet`: their split moves to the
    columns, and so is that of the result: see `shardtensor.functions.linalg.blocked_factorizations`;
  - matrices of more than 1,024² elements in `qr`, likewise: see `shardtensor.functions.linalg.blocked_qr`.
- The dtype is that of NumPy: float64 for integers and bools, otherwise the precision of the operands.

Raises:
    ShapeError: an operand has fewer than two dimensions, or shapes do not fit.
    ArgumentTypeError: the function does not take the dtype; NumPy's LAPACK has no float16.
    LinAlgError: a matrix is not square, it is singular, or a decomposition does not exist or does not converge. Not on
        CuPy, whose results have NaN there, except for split matrices of more than 1,024 rows that are singular.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from shardtensor.core import implements, operator
from shardtensor.errors import ArgumentError, ArgumentTypeError, LinearAlgebraError, ShapeError
from shardtensor.functions.building.monoids import norm_finish, norm_partial
from shardtensor.functions.linalg.elimination import adjoint
from shardtensor.functions.linalg.tsqr import is_tall, is_wide, small_factor, tall_qr
from shardtensor.functions.standard.data_types import astype
from shardtensor.functions.standard.elementwise import abs as absolute
from shardtensor.functions.standard.elementwise import conj, not_equal, sqrt, square
from shardtensor.functions.standard.linear_algebra import matmul
from shardtensor.functions.standard.manipulation import matrix_transpose
from shardtensor.functions.standard.statistical import any as any_of
from shardtensor.functions.standard.statistical import max as greatest
from shardtensor.functions.standard.statistical import min as least
from shardtensor.functions.standard.statistical import sum as sum_over
from shardtensor.sharding.layout import Shape
from shardtensor.sharding.rules import extremum, reduction
from shardtensor.sharding.shard_context import ShardContext
from shardtensor.tensor.operands import shape_of
from shardtensor.tensor.tensor import ArrayLike, ShardedTensor

_DERIVATIVES = "of_linalg"

# -- shapes and dtypes -----------------------------------------------------------------------------


def check_matrices(name: str, shape: Shape) -> None:
    """Raises an error of NumPy's class unless the shape is that of matrices."""
    if len(shape) < 2:
        raise LinearAlgebraError(f"{name} has shape {shape}; wanted at least two dimensions")


def check_square(name: str, shape: Shape) -> None:
    """Raises an error of NumPy's class unless the shape is that of square matrices."""
    check_matrices(name, shape)
    if shape[-1] != shape[-2]:
        raise LinearAlgebraError(f"{name} has shape {shape}; wanted square matrices, of equal last dimensions")


def lapack_dtype(*dtypes: np.dtype[Any], real: bool = False) -> np.dtype[Any]:
    """Returns the dtype in which NumPy's LAPACK computes; its real counterpart if ``real``.

    Raises:
        ArgumentTypeError: it does not compute with these dtypes.
    """
    kinds = [np.dtype(float) if dtype.kind in "biu" else dtype for dtype in dtypes]
    for dtype in kinds:
        if dtype.char not in "fdFD":
            raise ArgumentTypeError(f"array type {dtype.name} is unsupported in linalg")
    common = np.result_type(*kinds)
    return np.dtype(common.char.lower()) if real else common


def _first(x: Any, *others: Any, **params: Any) -> Any:
    return np.empty((), lapack_dtype(x.dtype))


def _both(x1: Any, x2: Any) -> Any:
    return np.empty((), lapack_dtype(x1.dtype, np.asarray(x2).dtype))


def _real(x: Any, *others: Any, **params: Any) -> Any:
    return np.empty((), lapack_dtype(x.dtype, real=True))


def _count(x: Any, *others: Any, **params: Any) -> Any:
    lapack_dtype(x.dtype)
    return np.empty((), np.int64)


def _square(right: str) -> Callable[..., str]:
    def rule(shapes: Sequence[Shape], **params: Any) -> str:
        check_square("x", shapes[0])
        return f"... i! j! -> {right}"

    return rule


def _of_library(function: Callable[..., Any]) -> None:
    """Implements an operator by the function of its name in the extension of a backend's namespace."""
    name = function.__name__

    @implements(function, "kernel")
    def kernel(xp: Any, context: ShardContext, *arrays: Any, **params: Any) -> Any:
        if 0 in context.local_shape:  # Not every library takes stacks of no matrices.
            return xp.zeros(context.local_shape, dtype=context.dtype)
        return getattr(xp.linalg, name)(*[inexact(xp, x) for x in arrays], **params)


def inexact(xp: Any, x: Any) -> Any:
    """Casts integers and bools to float64, which NumPy does itself."""
    return x if xp is np or not xp.isdtype(x.dtype, ("bool", "integral")) else xp.asarray(x, dtype=xp.float64)


SPECTRAL = "the singular values and eigenvalues of square matrices are those of whole matrices, of up to 4,096 rows"

_GATHERED = 1 << 12
"""The number of rows and columns up to which split matrices are gathered for their singular values or eigenvalues."""


def gathered(x: Any) -> Any:
    """Returns NotImplemented, the result of a composition, with which the operator gathers matrices that are split.

    Raises:
        ArgumentError: they have more than 4,096 rows and columns.
    """
    if isinstance(x, ShardedTensor) and x.ndim >= 2 and min(x.shape[-2:]) > _GATHERED:
        *stack, rows, columns = x.sharding.spec.chains_of(x.ndim)
        parts = math.prod([x.sharding.mesh.shape[a] for a in (*rows, *columns)])
        if parts > 1 and all(chain or size == 1 for chain, size in zip(stack, x.shape, strict=False)):
            raise ArgumentError(
                f"x has shape {x.shape} and its matrices are split over {parts} devices; matrices of more than "
                f"{_GATHERED} rows and columns are not gathered implicitly: st.reshard(x, "
                "st.NamedSharding(x.sharding.mesh, st.P())) gives every device all of x, if its memory is large enough"
            )
    return NotImplemented


# -- operators ------------------------------------------------------------------------------------


@operator(_square("... i j"), operands=("x",), dtype=_first)
def cholesky(x: ArrayLike, /, *, upper: bool = False) -> ShardedTensor:
    """Computes the Cholesky factor L of symmetric or Hermitian positive-definite matrices, x = L Lᴴ.

    Args:
        x: a tensor or an array of shape (..., n, n), of which only the lower triangle is read.
        upper: whether the result is the upper-triangular factor U with x = Uᴴ U, from the upper triangle of x.

    Raises:
        LinAlgError: a matrix is not positive definite, or not square.

    >>> st.linalg.cholesky(st.asarray([[4.0, 2.0], [2.0, 5.0]])).tolist()
    [[2.0, 0.0], [1.0, 2.0]]
    """


@implements(cholesky, "kernel")
def _cholesky(xp: Any, context: ShardContext, x: Any, *, upper: bool) -> Any:
    if 0 in x.shape:
        return xp.zeros(context.local_shape, dtype=context.dtype)
    x = inexact(xp, x)
    return adjoint(xp, xp.linalg.cholesky(adjoint(xp, x))) if upper else xp.linalg.cholesky(x)


@operator(_square("..."), operands=("x",), dtype=_first)
def det(x: ArrayLike, /) -> ShardedTensor:
    """Computes the determinants of square matrices: shape (...) for x of shape (..., n, n).

    Raises:
        LinAlgError: the matrices are not square.

    >>> round(st.linalg.det(st.asarray([[1.0, 2.0], [3.0, 4.0]])).item(), 9)
    -2.0
    """


@operator(_square("... i"), operands=("x",), dtype=_real, gathers=SPECTRAL)
def eigvalsh(x: ArrayLike, /) -> ShardedTensor:
    """Computes the eigenvalues of symmetric or Hermitian matrices in ascending order: shape (..., n).

    Args:
        x: a tensor or an array of shape (..., n, n), of which only the lower triangle is read.

    Raises:
        LinAlgError: the matrices are not square, or the computation does not converge.

    >>> st.linalg.eigvalsh(st.asarray([[3.0, 0.0], [0.0, 1.0]])).tolist()
    [1.0, 3.0]
    """


@operator(_square("... i j"), operands=("x",), dtype=_first)
def inv(x: ArrayLike, /) -> ShardedTensor:
    """Computes the inverses of square matrices.

    Raises:
        LinAlgError: a matrix is singular, or not square.

    >>> st.linalg.inv(st.asarray([[2.0, 0.0], [0.0, 4.0]])).tolist()
    [[0.5, 0.0], [0.0, 0.25]]
    """


def _rank_rule(shapes: Sequence[Shape]) -> str:
    check_matrices("x", shapes[0])
    return "... i! j!, ... -> ..."


@operator(_rank_rule, operands=("x", "rtol"), dtype=_count, gathers=SPECTRAL)
def matrix_rank(x: ArrayLike, /, *, rtol: ArrayLike | None = None) -> ShardedTensor:
    """Counts the singular values of matrices that are greater than ``rtol`` times the greatest one: shape (...).

    Args:
        x: a tensor or an array of shape (..., m, n); of one with fewer dimensions, the rank is 1 unless all is zero.
        rtol: the relative tolerance, a number or an array that broadcasts to the shape of the result; by default
            max(m, n) times the machine epsilon of x's dtype.

    >>> st.linalg.matrix_rank(st.asarray([[1.0, 2.0], [2.0, 4.0]])).item()
    1
    """


@implements(matrix_rank, "composite")
def _rank_of_parts(x: Any, rtol: Any) -> Any:
    if len(shape_of(x)) < 2:
        return astype(any_of(not_equal(x, 0)), np.int64)
    factor = small_factor(x)
    return gathered(x) if factor is None else matrix_rank(factor, rtol=_tolerance(x, rtol))


def _tolerance(x: Any, rtol: Any) -> Any:
    """Returns ``rtol``, or its default for the matrices x."""
    return max(x.shape[-2:]) * float(np.finfo(lapack_dtype(x.dtype)).eps) if rtol is None else rtol


def _cutoff(xp: Any, x: Any, values: Any, rtol: Any) -> Any:
    """Returns the limit of singular values that count as zero, with a last dimension of size 1."""
    limit = max(x.shape[-2:]) * float(xp.finfo(values.dtype).eps) if rtol is None else rtol
    limit = limit[..., None] if getattr(limit, "ndim", 0) else limit
    return xp.multiply(xp.max(values, axis=-1, keepdims=True), limit)


@implements(matrix_rank, "kernel")
def _matrix_rank(xp: Any, context: ShardContext, x: Any, rtol: Any) -> Any:
    if 0 in x.shape:
        return xp.zeros(context.local_shape, dtype=context.dtype)
    values = xp.linalg.svdvals(inexact(xp, x))
    return xp.sum(xp.greater(values, _cutoff(xp, x, values, rtol)), axis=-1, dtype=context.dtype)


def _pinv_rule(shapes: Sequence[Shape]) -> str:
    check_matrices("x", shapes[0])
    return "... i! j!, ... -> ... j i"


@operator(_pinv_rule, operands=("x", "rtol"), dtype=_first, gathers=SPECTRAL)
def pinv(x: ArrayLike, /, *, rtol: ArrayLike | None = None) -> ShardedTensor:
    """Computes the Moore-Penrose pseudo-inverses of matrices: shape (..., n, m) for x of shape (..., m, n).

    Args:
        x: a tensor or an array of at least two dimensions.
        rtol: singular values up to ``rtol`` times the greatest one count as zero; see `matrix_rank`.

    >>> st.linalg.pinv(st.asarray([[2.0, 0.0], [0.0, 0.0]])).tolist()
    [[0.5, 0.0], [0.0, 0.0]]
    """


@implements(pinv, "composite")
def _tall_pinv(x: Any, rtol: Any) -> Any:
    """Multiplies the pseudo-inverse of the small factor R of tall matrices by the conjugate transpose of Q."""
    if is_wide(x):
        return matrix_transpose(_tall_pinv(matrix_transpose(x), rtol))
    if not is_tall(x):
        return gathered(x)
    q, r = tall_qr(x)
    adjoint = matrix_transpose(conj(q) if q.dtype.kind == "c" else q)
    return matmul(pinv(r, rtol=_tolerance(x, rtol)), adjoint)


@implements(pinv, "kernel")
def _pinv(xp: Any, context: ShardContext, x: Any, rtol: Any) -> Any:
    if 0 in x.shape:
        return xp.zeros(context.local_shape, dtype=context.dtype)
    left, values, right = xp.linalg.svd(inexact(xp, x), full_matrices=False)
    large = xp.greater(values, _cutoff(xp, x, values, rtol))
    factors = xp.where(large, xp.divide(1, xp.where(large, values, 1)), 0)
    return xp.matmul(xp.multiply(adjoint(xp, right), factors[..., None, :]), adjoint(xp, left))


def _solve_rule(shapes: Sequence[Shape]) -> str:
    check_square("x1", shapes[0])
    if not shapes[1]:
        raise ShapeError("x2 has no dimensions; wanted a vector or matrices")
    if len(shapes[1]) == 1:
        return "... i! j!, j! -> ... i" if shapes[1][0] == shapes[0][-1] else "... i! j!, i! -> ... j"
    return "... i! j!, ... j! k -> ... i k"


@operator(_solve_rule, operands=("x1", "x2"), dtype=_both)
def solve(x1: ArrayLike, x2: ArrayLike, /) -> ShardedTensor:
    """Solves the systems of linear equations x1 y = x2 for y, of x2's shape after broadcasting.

    A split of x2's last dimension, that of several right-hand sides, stays where it is. Where x1 has more than 1,024
    rows and is split, the right-hand sides are split like its columns, or replicated if they have no more elements than
    the columns of x1 on one device.

    Args:
        x1: a tensor or an array of shape (..., n, n).
        x2: a tensor or an array of shape (..., n, k), or one vector of shape (n,).

    Raises:
        LinAlgError: a matrix is singular, or not square.
        ShapeError: the shapes do not fit.

    >>> st.linalg.solve(st.asarray([[2.0, 0.0], [0.0, 4.0]]), st.asarray([2.0, 8.0])).tolist()
    [1.0, 2.0]
    """


@implements(solve, "kernel")
def _solve(xp: Any, context: ShardContext, x1: Any, x2: Any) -> Any:
    if xp is np:
        return np.linalg.solve(x1, x2)
    if 0 in context.local_shape:
        return xp.zeros(context.local_shape, dtype=context.dtype)
    right = x2[:, None] if x2.ndim == 1 else x2
    # Some libraries do not broadcast, or take a stack of vectors for matrices.
    stack = np.broadcast_shapes(tuple(x1.shape[:-2]), tuple(right.shape[:-2]))
    left, right = [xp.broadcast_to(a, (*stack, *a.shape[-2:])) for a in (x1, right)]
    solutions = xp.linalg.solve(inexact(xp, left), inexact(xp, right))
    return solutions[..., 0] if x2.ndim == 1 else solutions


def _singular_rule(shapes: Sequence[Shape]) -> tuple[str, Shape]:
    check_matrices("x", shapes[0])
    return "... i! j! -> ... k", (*shapes[0][:-2], min(shapes[0][-2:]))


@operator(_singular_rule, operands=("x",), dtype=_real, gathers=SPECTRAL)
def svdvals(x: ArrayLike, /) -> ShardedTensor:
    """Computes the singular values of matrices in descending order: shape (..., min(m, n)) for x of (..., m, n).

    Raises:
        LinAlgError: the computation does not converge.

    >>> st.linalg.svdvals(st.asarray([[3.0, 0.0], [0.0, 4.0]])).tolist()
    [4.0, 3.0]
    """


@operator(operands=("x",), gathers=SPECTRAL)
def cond(x: ArrayLike, /, p: float | str | None = None) -> ShardedTensor:
    """Computes the condition number of matrices in the norm ``p``: shape (...) for x of shape (..., m, n).

    Args:
        x: a tensor or an array of at least two dimensions; of square matrices, unless p is None, 2 or -2.
        p: a norm of `matrix_norm`; None is that of the greatest singular value. The condition number of singular
            matrices is infinite then.

    Raises:
        LinAlgError: the matrices have no elements; one is singular, with another p.

    >>> st.linalg.cond(st.asarray([[4.0, 0.0], [0.0, 2.0]])).item()
    2.0
    """


@implements(svdvals, "composite")
def _tall_svdvals(x: Any) -> Any:
    factor = small_factor(x)
    return gathered(x) if factor is None else svdvals(factor)


implements(eigvalsh, "composite")(gathered)


for _function in (det, eigvalsh, inv, svdvals):
    _of_library(_function)


def _norm_rule(shapes: Sequence[Shape], *, axis: Any = None, keepdims: bool = False, ord: Any = 2) -> str:
    if isinstance(ord, str) or not np.isscalar(ord):
        raise ArgumentError(f"ord is {ord!r}; wanted a number for norms of vectors")
    return (extremum if ord == -np.inf else reduction)(shapes, axis=axis, keepdims=keepdims)


def _norm_dtype(x: Any, **params: Any) -> Any:
    size = np.abs(x)
    return np.sqrt(size) if size.dtype.kind == "f" else np.add(size, 0.0)


@operator(_norm_rule, combine="vector_norm", dtype=_norm_dtype)
def vector_norm(
    x: ArrayLike, /, *, axis: int | tuple[int, ...] | None = None, keepdims: bool = False, ord: float = 2
) -> ShardedTensor:
    """Computes norms of vectors: by default the square root of the sum of the squares of the absolute values.

    Where a reduced dimension is sharded, each device computes the norm of its part, and the partial results are
    combined along a fixed tree.

    Args:
        x: a tensor or an array.
        axis: the dimension of the vectors, or several, whose elements form one vector; None means all.
        keepdims: whether the reduced dimensions remain, with size 1.
        ord: the exponent p of (Σ|x|ᵖ)^(1/p); infinity gives the greatest absolute value, minus infinity the least one,
            and 0 the number of elements that are not zero.

    Raises:
        ArgumentError: ``ord`` is not a number.
        ShapeError: ``ord`` is minus infinity, and there are no elements.

    >>> st.linalg.vector_norm(st.asarray([3.0, 4.0])).item()
    5.0
    """


@implements(vector_norm, "composite")
def _short_norm(x: Any, axis: Any, keepdims: bool, ord: Any) -> Any:
    """Combines sums or greatest elements, which takes less time than the partial norm of each device if there are few
    elements.
    """
    if not isinstance(x, ShardedTensor) or x.size > _FEW or not any(x.sharding.spec) or ord not in _SHORT:
        return NotImplemented
    if not x.size or x.dtype.kind not in "fc":
        return NotImplemented
    if ord == 2:
        powers = square(absolute(x)) if x.dtype.kind == "c" else square(x)
        return sqrt(sum_over(powers, axis=axis, keepdims=keepdims))
    reduce = sum_over if ord == 1 else greatest if ord > 0 else least
    return reduce(absolute(x), axis=axis, keepdims=keepdims)


_FEW = 1 << 12
"""The number of elements up to which norms are composed of other operators."""

_SHORT = (1, 2, np.inf, -np.inf)


@implements(vector_norm, "kernel")
def _vector_norm(xp: Any, context: ShardContext, x: Any, *, axis: Any, keepdims: bool, ord: Any) -> Any:
    params = {"axis": axis, "keepdims": keepdims, "ord": ord}
    return norm_finish(xp, context, norm_partial(xp, context, x, **params), **params)
