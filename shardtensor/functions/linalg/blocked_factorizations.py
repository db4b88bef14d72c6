"""Factorizations of square matrices that are split over devices, panel by panel.

The matrices are split by columns: those that are split otherwise are transferred first, n² (1 - 1/P) elements of rows.
A panel is up to 128 columns that one device holds. In turn, the owner of each panel factorizes it and sends it to all
devices, and each device updates its columns to the right of the panel (the right-looking algorithms of LAPACK; J. Choi,
J. Dongarra, S. Ostrouchov, A. Petitet, D. Walker, R. C. Whaley, Design and implementation of the ScaLAPACK LU, QR and
Cholesky factorization routines, Scientific Programming 5, 1996). LU factorizations choose pivots by rows, as LAPACK
does: a panel has whole columns, so that the search is local, and the order of the rows is sent with the panel. The
right-hand sides of equations are updated like further columns, so that the factor L is not stored; then the panels of U
are sent from right to left.

For matrices of n rows on P devices, with panels of w columns that begin at the columns j::

    cholesky                 (P - 1) itemsize (n² + Σ w²) / 2
    slogdet, det             (P - 1) (itemsize (n² + Σ w²) / 2 + 8 Σ (n - j))
    solve, inv               (P - 1) (itemsize (n² + Σ w²) + 8 Σ (n - j))

A device holds a copy of its columns, a panel, and temporary arrays of up to 16 MiB. The last device has the most work,
1.5 times the mean. Stacks of matrices are factorized together.

Where devices share a host memory, LAPACK factorizes the one buffer: its results differ in rounding.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from shardtensor.core import operator
from shardtensor.errors import LinearAlgebraError
from shardtensor.functions.algorithms.distributed import with_host_function
from shardtensor.functions.algorithms.shards import MeshCommunicator, Shards
from shardtensor.functions.linalg.elimination import (
    adjoint,
    diagonal_mask,
    factorized,
    has_zero,
    ordered,
    product,
    triangle,
)
from shardtensor.functions.linalg.panels import (
    Along,
    Panel,
    begins,
    by_columns,
    chunks,
    is_large,
    owns,
    panels,
    rows_of,
    same,
)
from shardtensor.functions.linalg.tsqr import factor_dtype
from shardtensor.sharding.layout import NamedSharding, Shape
from shardtensor.sharding.spec import P
from shardtensor.tensor.operands import HostAval
from shardtensor.tensor.tensor import ArrayLike, ShardedTensor
from shardtensor.tensor.value import Aval, aval


def is_blocked(x: Any) -> bool:
    """Whether x is a tensor of square matrices with more than 1,024 rows that are split, and no other dimension can
    take the split.
    """
    return is_large(x) and x.shape[-1] == x.shape[-2]


# -- operators -------------------------------------------------------------------------------------


@operator(operands=("x",), error_name="cholesky", tags=("internal",))
def blocked_cholesky(x: ArrayLike, /) -> ShardedTensor:
    """Returns the Cholesky factors of matrices, of which the lower triangle is read, split by columns.

    >>> from shardtensor.functions.linalg.blocked_factorizations import blocked_cholesky
    >>> blocked_cholesky(st.asarray([[4.0, 0.0], [2.0, 5.0]])).tolist()
    [[2.0, 0.0], [1.0, 2.0]]
    """


@operator(operands=("x",), error_name="inv", tags=("internal",))
def blocked_inv(x: ArrayLike, /) -> ShardedTensor:
    """Returns the inverses of matrices, split by columns.

    >>> from shardtensor.functions.linalg.blocked_factorizations import blocked_inv
    >>> blocked_inv(st.asarray([[2.0, 0.0], [0.0, 4.0]])).tolist()
    [[0.5, 0.0], [0.0, 0.25]]
    """


@operator(operands=("x",), error_name="slogdet", tags=("internal",))
def blocked_slogdet(x: ArrayLike, /) -> tuple[ShardedTensor, ShardedTensor]:
    """Returns the signs of determinants and the logarithms of their absolute values, replicated.

    >>> from shardtensor.functions.linalg.blocked_factorizations import blocked_slogdet
    >>> [a.item() for a in blocked_slogdet(st.asarray([[0.0, 1.0], [1.0, 0.0]]))]
    [-1.0, 0.0]
    """


@operator(operands=("x1", "x2"), error_name="solve", tags=("internal",))
def blocked_solve(x1: ArrayLike, x2: ArrayLike, /) -> ShardedTensor:
    """Returns the solutions of equations whose right-hand sides are the columns of x2, a stack like x1.

    They are replicated if they have no more elements than the columns of x1 on one device, and otherwise split by
    columns.

    >>> from shardtensor.functions.linalg.blocked_factorizations import blocked_solve
    >>> blocked_solve(st.asarray([[2.0, 0.0], [0.0, 4.0]]), st.asarray([[2.0], [8.0]])).tolist()
    [[1.0], [2.0]]
    """


# -- layouts, and results --------------------------------------------------------------------------


def _with_right_sides(x1: Aval, x2: Aval | HostAval) -> list[NamedSharding]:
    (left,) = by_columns(x1)
    parts = math.prod([left.mesh.shape[a] for a in left.spec.chains_of(x1.ndim)[-1]])
    fits = x2.shape[-1] * parts <= x1.shape[-1]
    return [left, left.with_spec(_stack(x1, left)) if fits else left]


def _stack(x: Aval, sharding: NamedSharding) -> P:
    """Returns the spec of the dimensions of the stack."""
    return P(*sharding.spec.chains_of(x.ndim)[:-2])


def _square(x: Aval) -> Aval:
    return aval(x.shape, factor_dtype(x.dtype), x.sharding, x.committed)


def _determinants(x: Aval) -> tuple[Aval, Aval]:
    sharding, dtype = x.sharding.with_spec(_stack(x, x.sharding)), factor_dtype(x.dtype)
    real = np.dtype(dtype.char.lower())
    return tuple([aval(x.shape[:-2], kind, sharding, x.committed) for kind in (dtype, real)])  # type: ignore[return-value]


def _solutions(x1: Aval, x2: Aval) -> Aval:
    return aval(x2.shape, _common(x1, x2), x2.sharding, x1.committed or x2.committed)


def _common(x1: Aval, x2: Aval) -> np.dtype[Any]:
    return np.result_type(factor_dtype(x1.dtype), factor_dtype(x2.dtype))


# -- Cholesky factorizations -----------------------------------------------------------------------


@with_host_function(blocked_cholesky, np.linalg.cholesky, _square, by_columns)
def _cholesky(x: Shards, along: Along) -> Shards:
    value = x.value
    comm, n, dtype = along(value.ndim - 1), value.shape[-1], factor_dtype(value.dtype)
    work = x.copied(dtype)
    for panel in panels(value):
        factor = functools.partial(_cholesky_panel, panel)
        columns = work.map(factor, owns(comm, panel), shape=rows_of(n - panel.begin, panel.width), dtype=dtype)
        sent = comm.broadcast(columns.arrays, panel.owner)
        work = work.map(functools.partial(_subtract_products, panel), sent, begins(value), shape=same, dtype=dtype)
    return work.assembled(_square(value))


def _cholesky_panel(panel: Panel, xp: Any, x: Any, owns: bool) -> Any:
    """Returns the factor's columns from the diagonal on, which replace those of the matrix; None on other devices."""
    if not owns:
        return None
    columns = x[..., panel.begin :, panel.local]
    top = xp.linalg.cholesky(xp.asarray(columns[..., : panel.width, :], copy=True))
    factor = (
        adjoint(xp, xp.linalg.solve(top, adjoint(xp, columns[..., panel.width :, :])))
        if panel.end < x.shape[-2]
        else None
    )
    factor = top if factor is None else xp.concat([top, factor], axis=-2)
    x[..., : panel.begin, panel.local] = 0
    x[..., panel.begin :, panel.local] = factor
    return factor


def _subtract_products(panel: Panel, xp: Any, x: Any, factor: Any, first: int) -> Any:
    """Updates the lower triangle of the columns to the right of a panel."""
    for columns in chunks(x, panel.end - first):
        row = first + columns.start - panel.begin
        right = adjoint(xp, factor[..., row : row + columns.stop - columns.start, :])
        part = x[..., panel.begin + row :, columns]
        x[..., panel.begin + row :, columns] = xp.subtract(part, xp.matmul(factor[..., row:, :], right))
    return x


# -- LU factorizations -----------------------------------------------------------------------------


class _Factors(NamedTuple):
    """The upper triangles U of matrices, below which are remains; of each panel, the diagonal of U on each device, and
    the number of exchanges of rows.
    """

    upper: Shards
    diagonals: Sequence[Shards]
    exchanges: Sequence[Shards]


@with_host_function(blocked_slogdet, np.linalg.slogdet, _determinants, by_columns)
def _slogdet(x: Shards, along: Along) -> tuple[Shards, Shards]:
    with np.errstate(all="ignore"):
        dtype = factor_dtype(x.value.dtype)
        factors = _eliminate(x.copied(dtype), (), along(x.value.ndim - 1), dtype)
        determinants = factors.diagonals[0].map(
            product, _on_each(factors.diagonals), _on_each(factors.exchanges), shape=_without_last, dtype=dtype
        )
        sign, logarithm = _determinants(x.value)
        signs = determinants.make(sign, _set_item(0), determinants.arrays)
        return signs, determinants.make(logarithm, _set_item(1), determinants.arrays)


@with_host_function(blocked_solve, np.linalg.solve, _solutions, _with_right_sides)
def _solve(x1: Shards, x2: Shards, along: Along) -> Shards:
    dtype, value = _common(x1.value, x2.value), _solutions(x1.value, x2.value)
    return _solved(x1.copied(dtype), x2.copied(dtype), along(x1.value.ndim - 1), dtype).assembled(value)


@with_host_function(blocked_inv, np.linalg.inv, _square, by_columns)
def _inv(x: Shards, along: Along) -> Shards:
    dtype = factor_dtype(x.value.dtype)
    work = x.copied(dtype)
    identity = work.map(_identity, begins(x.value), shape=same, dtype=dtype)
    return _solved(work, identity, along(x.value.ndim - 1), dtype).assembled(_square(x.value))


def _solved(x: Shards, right: Shards, comm: MeshCommunicator, dtype: np.dtype[Any]) -> Shards:
    """Returns the solutions of equations, in the memory of the right-hand sides."""
    with np.errstate(all="ignore"):
        factors = _eliminate(x, (right,), comm, dtype)
        columns = _on_each(factors.diagonals)
        zero = factors.diagonals[0].map(has_zero, columns, shape=lambda shape: (), dtype=bool)
        if any(map(bool, zero.to_host([False]))):
            raise LinearAlgebraError("Singular matrix")
        for panel in reversed(panels(x.value)):
            upper = factors.upper.map(
                functools.partial(_upper_panel, panel),
                owns(comm, panel),
                shape=rows_of(panel.end, panel.width),
                dtype=dtype,
            )
            sent = comm.broadcast(upper.arrays, panel.owner)
            right = right.map(functools.partial(_substitute, panel), sent, shape=same, dtype=dtype)
    return right


def _eliminate(work: Shards, right: Sequence[Shards], comm: MeshCommunicator, dtype: np.dtype[Any]) -> _Factors:
    """Factorizes matrices in their memory, and updates right-hand sides in theirs."""
    value, n = work.value, work.value.shape[-2]
    diagonals, exchanges = [], []
    for panel in panels(value):
        factor = functools.partial(_lu_panel, panel)
        shape = rows_of(n - panel.begin, panel.width)
        results = work.map(factor, owns(comm, panel), shape=shape, dtype=dtype)
        lu = comm.broadcast(results.map(_item(0), shape=same, dtype=dtype).arrays, panel.owner)
        order = comm.broadcast(results.map(_item(1), shape=_without_last, dtype=np.int64).arrays, panel.owner)
        update = functools.partial(_eliminate_rows, panel)
        work = work.map(functools.partial(update, False), lu, order, begins(value), shape=same, dtype=dtype)
        for some in right:
            some.map(functools.partial(update, True), lu, order, begins(value), shape=same, dtype=dtype)
        diagonal, number = functools.partial(_diagonal_of, panel), functools.partial(_exchanges, panel)
        diagonals.append(work.map(diagonal, lu, shape=_row_of(panel.width), dtype=dtype))
        exchanges.append(work.map(number, order, shape=lambda shape: shape[:-2], dtype=np.int64))
    return _Factors(work, diagonals, exchanges)


def _lu_panel(panel: Panel, xp: Any, x: Any, owns: bool) -> Any:
    """Returns L and U of a panel in one array, and the order of the rows; U replaces its columns of the matrix."""
    if not owns:
        return None
    lu, order = factorized(xp, x[..., panel.begin :, panel.local])
    x[..., panel.begin : panel.end, panel.local] = lu[..., : panel.width, :]
    return lu, order


def _eliminate_rows(panel: Panel, right: bool, xp: Any, x: Any, lu: Any, order: Any, first: int) -> Any:
    """Exchanges the rows of the columns to the right of a panel, or of all columns of right-hand sides, and subtracts
    multiples of the panel's rows from those below.
    """
    lower = xp.where(diagonal_mask(xp, panel.width), 1, triangle(xp, lu[..., : panel.width, :], lower=True))
    for columns in chunks(x, 0 if right else panel.end - first):
        rows = ordered(xp, x[..., panel.begin :, columns], order)
        top = xp.linalg.solve(lower, rows[..., : panel.width, :])
        x[..., panel.begin : panel.end, columns] = top
        if panel.end < x.shape[-2]:
            rest = xp.matmul(lu[..., panel.width :, :], top)
            x[..., panel.end :, columns] = xp.subtract(rows[..., panel.width :, :], rest)
    return x


def _upper_panel(panel: Panel, xp: Any, x: Any, owns: bool) -> Any:
    """Returns the columns of U down to the diagonal of a panel."""
    return x[..., : panel.end, panel.local] if owns else None


def _substitute(panel: Panel, xp: Any, x: Any, upper: Any) -> Any:
    """Computes the solutions at the rows of a panel, and subtracts their multiples from the rows above."""
    corner = triangle(xp, upper[..., panel.begin :, :], lower=False)
    for columns in chunks(x, 0):
        solution = xp.linalg.solve(corner, x[..., panel.begin : panel.end, columns])
        x[..., panel.begin : panel.end, columns] = solution
        if panel.begin:
            above = x[..., : panel.begin, columns]
            x[..., : panel.begin, columns] = xp.subtract(above, xp.matmul(upper[..., : panel.begin, :], solution))
    return x


# -- on one device ---------------------------------------------------------------------------------


def _identity(xp: Any, x: Any, first: int) -> Any:
    """Returns the columns of identity matrices from the given one on."""
    numbers = xp.arange(x.shape[-2])
    ones = xp.equal(numbers[:, None], xp.add(numbers[: x.shape[-1]], first))
    return xp.asarray(xp.broadcast_to(xp.asarray(ones, dtype=x.dtype), x.shape), copy=True)


def _diagonal_of(panel: Panel, xp: Any, x: Any, lu: Any) -> Any:
    """Returns the diagonal of a panel of U."""
    return xp.sum(xp.where(diagonal_mask(xp, panel.width), lu[..., : panel.width, :], 0), axis=-2)


def _exchanges(panel: Panel, xp: Any, x: Any, order: Any) -> Any:
    """Returns the number of exchanges of neighbours that give an order of rows, in which those that are not pivots of
    the panel ascend: for each pivot, the rows before it that were not chosen earlier.
    """
    pivots = order[..., : panel.width]
    numbers = xp.arange(panel.width)
    before = xp.logical_and(xp.less(pivots[..., None, :], pivots[..., :, None]), xp.less(numbers, numbers[:, None]))
    earlier = xp.sum(xp.asarray(before, dtype=np.dtype(np.int64)), axis=(-2, -1))
    return xp.subtract(xp.sum(pivots, axis=-1), earlier)


# -- arguments of kernels for each device, and shapes of what they return --------------------------


def _item(number: int) -> Callable[[Any, Any], Any]:
    return lambda xp, items: None if items is None else items[number]


def _set_item(number: int) -> Callable[..., None]:
    def kernel(xp: Any, out: Any, items: Any) -> None:
        out[...] = items[number]

    return kernel


def _on_each(some: Sequence[Shards]) -> list[tuple[Any, ...]]:
    """Returns the arrays of several shards on each device."""
    return list(zip(*[shards.arrays for shards in some], strict=True))


def _without_last(shape: Shape) -> Shape:
    return shape[:-1]


def _row_of(columns: int) -> Callable[[Shape], Shape]:
    return lambda shape: (*shape[:-2], columns)
