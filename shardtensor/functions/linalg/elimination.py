"""Kernels of factorizations of matrices, on one device, composed of functions that every library has."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

_BASE = 8
"""Columns of a panel that are eliminated one by one; more are divided into halves."""


def factorized(xp: Any, x: Any) -> tuple[Any, Any]:
    """Returns L and U in one array, and the order of the rows, recursively (S. Toledo, Locality of reference in LU
    decomposition with partial pivoting, SIAM Journal on Matrix Analysis and Applications 18, 1997).
    """
    half = x.shape[-1] // 2
    if x.shape[-1] <= _BASE:
        return _eliminated(xp, x)
    left, order = factorized(xp, x[..., :half])
    right = ordered(xp, x[..., half:], order)
    lower = xp.where(diagonal_mask(xp, half), 1, triangle(xp, left[..., :half, :], lower=True))
    top = xp.linalg.solve(lower, right[..., :half, :])
    rest = xp.subtract(right[..., half:, :], xp.matmul(left[..., half:, :], top))
    rest, later = factorized(xp, rest)
    rows = [[left[..., :half, :], top], [ordered(xp, left[..., half:, :], later), rest]]
    below = xp.take_along_axis(order[..., half:], later, axis=-1)
    lu = xp.concat([xp.concat(row, axis=-1) for row in rows], axis=-2)
    return lu, xp.concat([order[..., :half], below], axis=-1)


def _eliminated(xp: Any, x: Any) -> tuple[Any, Any]:
    """Returns L and U of a few columns, and the order of the rows. Rows stay where they are until all pivots are found:
    those that are pivots first, and the others in their order.
    """
    x = xp.asarray(x, copy=True)
    *stack, count, width = x.shape
    numbers = xp.arange(count)
    free = xp.ones((*stack, count), dtype=np.dtype(bool))
    key = xp.add(xp.zeros((*stack, count), dtype=np.dtype(np.int64)), xp.add(numbers, width))
    for c in range(width):
        column = x[..., c]
        size = xp.where(free, xp.abs(column), -1)
        chosen = xp.argmax(xp.where(xp.isnan(size), math.inf, size), axis=-1, keepdims=True)
        row = xp.take_along_axis(x, chosen[..., None], axis=-2)
        chosen = xp.equal(numbers, chosen)
        free, key = xp.logical_and(free, xp.logical_not(chosen)), xp.where(chosen, c, key)
        pivot = row[..., c]
        factors = xp.divide(column, xp.where(xp.equal(pivot, 0), 1, pivot))
        rest = x[..., c + 1 :]
        update = xp.subtract(rest, xp.multiply(factors[..., None], row[..., c + 1 :]))
        x[..., c + 1 :] = xp.where(free[..., None], update, rest)
        x[..., c] = xp.where(free, factors, column)
    order = xp.argsort(key, axis=-1)
    return ordered(xp, x, order), order


def ordered(xp: Any, x: Any, order: Any) -> Any:
    """Returns the rows of matrices in an order."""
    if order.ndim == 1:
        return xp.take(x, order, axis=0)
    return xp.take_along_axis(x, xp.broadcast_to(order[..., None], x.shape), axis=-2)


def diagonal_mask(xp: Any, count: int) -> Any:
    """Returns a square mask of the diagonal."""
    numbers = xp.arange(count)
    return xp.equal(numbers[:, None], numbers)


def triangle(xp: Any, x: Any, *, lower: bool) -> Any:
    """Returns square matrices with zeros, also for NaN, above the diagonal, or else below it."""
    numbers = xp.arange(x.shape[-1])
    compare = xp.greater_equal if lower else xp.less_equal
    return xp.where(compare(numbers[:, None], numbers), x, 0)


def adjoint(xp: Any, x: Any) -> Any:
    """Returns the conjugate transposes of matrices."""
    x = xp.matrix_transpose(x)
    return xp.conj(x) if xp.isdtype(x.dtype, "complex floating") else x


def has_zero(xp: Any, diagonal: Any, diagonals: Sequence[Any]) -> Any:
    """Whether a part of a diagonal has a zero."""
    return xp.any(xp.equal(xp.concat(list(diagonals), axis=-1), 0))


def product(xp: Any, diagonal: Any, diagonals: Sequence[Any], exchanges: Sequence[Any]) -> tuple[Any, Any]:
    """Returns the sign of the product of a diagonal, and the logarithm of its absolute value."""
    values = xp.concat(list(diagonals), axis=-1)
    size = xp.abs(values)
    zero = xp.any(xp.equal(size, 0), axis=-1)
    if xp.isdtype(values.dtype, "complex floating"):
        signs = xp.divide(values, xp.where(xp.equal(size, 0), 1, size))
    else:
        signs = xp.where(xp.less(values, 0), xp.full_like(values, -1), 1)
    parity = xp.remainder(xp.sum(xp.stack(list(exchanges), axis=-1), axis=-1), 2)
    sign = xp.multiply(xp.prod(signs, axis=-1), xp.asarray(xp.subtract(1, xp.multiply(parity, 2)), dtype=values.dtype))
    return xp.where(zero, 0, sign), xp.sum(xp.log(size), axis=-1)
