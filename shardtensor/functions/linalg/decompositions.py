"""Declarations of the decompositions of matrices with several results: a part of `shardtensor.linalg`.

Shapes, dtypes, sharding and errors are those of `shardtensor.functions.linalg.equations`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from shardtensor.core import implements, operator
from shardtensor.errors import ArgumentError
from shardtensor.functions.algorithms.several_results import Result, several_results
from shardtensor.functions.linalg.blocked_qr import blocked_qr
from shardtensor.functions.linalg.equations import (
    SPECTRAL,
    check_matrices,
    check_square,
    gathered,
    inexact,
    lapack_dtype,
)
from shardtensor.functions.linalg.panels import is_large
from shardtensor.functions.linalg.tsqr import is_tall, is_wide, tall_qr
from shardtensor.functions.standard.linear_algebra import matmul
from shardtensor.functions.standard.manipulation import matrix_transpose
from shardtensor.sharding.layout import Shape
from shardtensor.tensor.tensor import ArrayLike, ShardedTensor

_DERIVATIVES = "of_linalg"


class EigResult(NamedTuple):
    """The result of `eig`."""

    eigenvalues: ShardedTensor
    eigenvectors: ShardedTensor


class EighResult(NamedTuple):
    """The result of `eigh`."""

    eigenvalues: ShardedTensor
    eigenvectors: ShardedTensor


class QRResult(NamedTuple):
    """The result of `qr`."""

    Q: ShardedTensor
    R: ShardedTensor


class SlogdetResult(NamedTuple):
    """The result of `slogdet`."""

    sign: ShardedTensor
    logabsdet: ShardedTensor


class SVDResult(NamedTuple):
    """The result of `svd`."""

    U: ShardedTensor
    S: ShardedTensor
    Vh: ShardedTensor


@operator(operands=("x",), gathers=SPECTRAL)
def eig(x: ArrayLike, /) -> EigResult:
    """Computes the eigenvalues and the right eigenvectors of square matrices: (..., n) and (..., n, n), both complex.

    Column i of the eigenvectors belongs to eigenvalue i. (NumPy's result is real if all eigenvalues are; the dtype of
    this one does not depend on the elements, as in the standard.)

    Raises:
        LinAlgError: the matrices are not square, or the computation does not converge.

    >>> sorted(st.linalg.eig(st.asarray([[2.0, 0.0], [0.0, 3.0]])).eigenvalues.tolist(), key=abs)
    [(2+0j), (3+0j)]
    """


def _eig_results(shape: Shape, dtype: np.dtype[Any]) -> Sequence[Result]:
    check_square("x", shape)
    result_dtype = np.result_type(lapack_dtype(dtype), np.complex64)
    return ((shape[-1],), result_dtype), (shape[-2:], result_dtype)


@several_results(eig, EigResult, _eig_results)
def _eig(xp: Any, context: None, x: Any) -> Sequence[Any]:
    return [_as_complex(xp, a) for a in xp.linalg.eig(inexact(xp, x))]


def _as_complex(xp: Any, x: Any) -> Any:
    return xp.asarray(x, dtype=xp.result_type(x.dtype, xp.complex64))


@operator(operands=("x",), gathers=SPECTRAL)
def eigvals(x: ArrayLike, /) -> ShardedTensor:
    """Computes the eigenvalues of square matrices: shape (..., n), complex (see `eig`), in no particular order.

    Raises:
        LinAlgError: the matrices are not square, or the computation does not converge.

    >>> sorted(st.linalg.eigvals(st.asarray([[2.0, 0.0], [0.0, 3.0]])).tolist(), key=abs)
    [(2+0j), (3+0j)]
    """


@several_results(eigvals, lambda values: values, lambda shape, dtype: _eig_results(shape, dtype)[:1])
def _eigvals(xp: Any, context: None, x: Any) -> Sequence[Any]:
    return (_as_complex(xp, xp.linalg.eigvals(inexact(xp, x))),)


@operator(operands=("x",), gathers=SPECTRAL)
def eigh(x: ArrayLike, /) -> EighResult:
    """Computes the eigenvalues, in ascending order, and the eigenvectors of symmetric or Hermitian matrices.

    Column i of the eigenvectors, which are orthonormal, belongs to eigenvalue i.

    Args:
        x: a tensor or an array of shape (..., n, n), of which only the lower triangle is read.

    Raises:
        LinAlgError: the matrices are not square, or the computation does not converge.

    >>> st.linalg.eigh(st.asarray([[3.0, 0.0], [0.0, 1.0]])).eigenvalues.tolist()
    [1.0, 3.0]
    """


def _eigh_results(shape: Shape, dtype: np.dtype[Any]) -> Sequence[Result]:
    check_square("x", shape)
    return ((shape[-1],), lapack_dtype(dtype, real=True)), (shape[-2:], lapack_dtype(dtype))


@several_results(eigh, EighResult, _eigh_results)
def _eigh(xp: Any, context: None, x: Any) -> Sequence[Any]:
    return xp.linalg.eigh(inexact(xp, x))  # type: ignore[no-any-return]


@operator(operands=("x",))
def qr(x: ArrayLike, /, *, mode: str = "reduced") -> QRResult:
    """Computes the QR factorization x = Q R of matrices of shape (..., m, n).

    Of tall matrices whose rows are split, with at least n rows on each device, Q is split as x and R is replicated; its
    signs are those of `shardtensor.functions.linalg.tsqr`. Other split matrices of more than 1,024² elements are
    factorized panel by panel, and Q and R are split by columns: see `shardtensor.functions.linalg.blocked_qr`.

    Args:
        x: a tensor or an array of at least two dimensions.
        mode: "reduced" gives Q of shape (..., m, k) and R of shape (..., k, n), where k is min(m, n); "complete" gives
            a square Q of shape (..., m, m), and R of x's shape.

    Raises:
        ArgumentError: ``mode`` is neither.

    >>> q, r = st.linalg.qr(st.ones((4, 2)))
    >>> q.shape, r.shape
    ((4, 2), (2, 2))
    """


def _qr_results(shape: Shape, dtype: np.dtype[Any], *, mode: str) -> Sequence[Result]:
    check_matrices("x", shape)
    if mode not in ("reduced", "complete"):
        raise ArgumentError(f"mode is {mode!r}; wanted 'reduced' or 'complete'")
    rows, columns = shape[-2:]
    inner, result_dtype = min(rows, columns) if mode == "reduced" else rows, lapack_dtype(dtype)
    return ((rows, inner), result_dtype), ((inner, columns), result_dtype)


@implements(qr, "composite")
def _split_qr(x: Any, mode: str) -> Any:
    if mode == "reduced" and is_tall(x):
        return QRResult(*tall_qr(x))
    if mode in ("reduced", "complete") and is_large(x):
        return QRResult(*blocked_qr(x, complete=mode == "complete"))
    return NotImplemented


@several_results(qr, QRResult, _qr_results)
def _qr(xp: Any, context: None, x: Any, *, mode: str) -> Sequence[Any]:
    return xp.linalg.qr(inexact(xp, x), mode=mode)  # type: ignore[no-any-return]


@operator(operands=("x",))
def slogdet(x: ArrayLike, /) -> SlogdetResult:
    """Computes the sign and the natural logarithm of the absolute value of the determinants of square matrices.

    The sign of a singular matrix is 0, and the logarithm minus infinity.

    Raises:
        LinAlgError: the matrices are not square.

    >>> st.linalg.slogdet(st.asarray([[1.0, 0.0], [0.0, -1.0]]))[0].item()
    -1.0
    """


def _slogdet_results(shape: Shape, dtype: np.dtype[Any]) -> Sequence[Result]:
    check_square("x", shape)
    return ((), lapack_dtype(dtype)), ((), lapack_dtype(dtype, real=True))


@several_results(slogdet, SlogdetResult, _slogdet_results)
def _slogdet(xp: Any, context: None, x: Any) -> Sequence[Any]:
    return xp.linalg.slogdet(inexact(xp, x))  # type: ignore[no-any-return]


@operator(operands=("x",), gathers=SPECTRAL)
def svd(x: ArrayLike, /, *, full_matrices: bool = True) -> SVDResult:
    """Computes the singular value decomposition x = U diag(S) Vh of matrices of shape (..., m, n).

    S, of shape (..., k) where k is min(m, n), is in descending order. Without ``full_matrices``, tall matrices whose
    rows are split are not gathered: U is split as x (see `qr`); likewise Vh of wide matrices whose columns are split.

    Args:
        x: a tensor or an array of at least two dimensions.
        full_matrices: whether U and Vh are square, of shape (..., m, m) and (..., n, n); otherwise they have shape
            (..., m, k) and (..., k, n).

    Raises:
        LinAlgError: the computation does not converge.

    >>> st.linalg.svd(st.asarray([[3.0, 0.0], [0.0, 4.0]])).S.tolist()
    [4.0, 3.0]
    """


def _svd_results(shape: Shape, dtype: np.dtype[Any], *, full_matrices: bool) -> Sequence[Result]:
    check_matrices("x", shape)
    (rows, columns), result_dtype = shape[-2:], lapack_dtype(dtype)
    inner = min(rows, columns)
    left, right = ((rows, rows), (columns, columns)) if full_matrices else ((rows, inner), (inner, columns))
    return (left, result_dtype), ((inner,), lapack_dtype(dtype, real=True)), (right, result_dtype)


@implements(svd, "composite")
def _tall_svd(x: Any, full_matrices: bool) -> Any:
    """Decomposes the small factor R of tall matrices; those of split columns are transposed tall ones."""
    if full_matrices:
        return gathered(x)
    if is_tall(x):
        q, r = tall_qr(x)
        left, values, right = svd(r, full_matrices=False)
        return SVDResult(matmul(q, left), values, right)
    if is_wide(x):
        right, values, left = _tall_svd(matrix_transpose(x), False)
        return SVDResult(matrix_transpose(left), values, matrix_transpose(right))
    return gathered(x)


@several_results(svd, SVDResult, _svd_results)
def _svd(xp: Any, context: None, x: Any, *, full_matrices: bool) -> Sequence[Any]:
    return xp.linalg.svd(inexact(xp, x), full_matrices=full_matrices)  # type: ignore[no-any-return]


for _function in (eig, eigh, eigvals):
    implements(_function, "composite")(gathered)
