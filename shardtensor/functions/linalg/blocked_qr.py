"""QR factorizations of matrices that are split over devices and are not tall, panel by panel.

The matrices are split by columns, as in `shardtensor.functions.linalg.blocked_factorizations`. The owner of a panel of
w columns factorizes its rows below the earlier panels, and makes of their factor a block reflector: an orthogonal
matrix that has this factor as its first columns. It sends the reflector to all devices, and they apply it to their
columns to the right of the panel. Q is the product of the reflectors, which are sent again and applied in the opposite
order to the columns of the identity matrix that each device has (right-looking, as LAPACK's xGEQRF and xORGQR; J. Choi,
J. Dongarra, S. Ostrouchov, A. Petitet, D. Walker, R. C. Whaley, Design and implementation of the ScaLAPACK LU, QR and
Cholesky factorization routines, Scientific Programming 5, 1996).

A reflector is composed of functions that every library has (R. Schreiber, B. Parlett, Block reflectors: theory and
computation, SIAM Journal on Numerical Analysis 25, 1988). Let V have orthonormal columns, Z K be the polar
decomposition of its upper square, and S = -Z. With W = V - [S; 0]::

    (I - W (I + K)^-1 Wᴴ) diag(S, I) = [V ...]

The first factor is a reflection, and the eigenvalues of I + K are between 1 and 2, so that nothing is cancelled, and no
pivots are needed. V and S are sent.

For matrices of m rows whose panels of w columns, of the first min(m, n) columns, begin at the columns j, P devices send

    bytes = 2 (P - 1) itemsize Σ (m - j + w) w

besides the elements that change devices where the matrices are not split by columns. A device holds a copy of its
columns, its reflectors, a panel, and temporary arrays of up to 16 MiB.

Where devices share a host memory, LAPACK factorizes the one buffer: its results differ in rounding and in signs.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from shardtensor.core import operator
from shardtensor.functions.algorithms.distributed import with_host_function
from shardtensor.functions.algorithms.shards import Shards
from shardtensor.functions.linalg.elimination import adjoint, diagonal_mask
from shardtensor.functions.linalg.panels import (
    Along,
    Panel,
    begins,
    by_columns,
    chunks,
    owns,
    panels,
    rows_of,
    same,
)
from shardtensor.functions.linalg.tsqr import factor_dtype
from shardtensor.tensor.tensor import ArrayLike, ShardedTensor
from shardtensor.tensor.value import Aval, aval


@operator(operands=("x",), error_name="qr", tags=("internal",))
def blocked_qr(x: ArrayLike, /, *, complete: bool) -> tuple[ShardedTensor, ShardedTensor]:
    """Returns Q and R, split by columns, of matrices; if ``complete``, Q is square.

    >>> from shardtensor.functions.linalg.blocked_qr import blocked_qr
    >>> q, r = blocked_qr(st.asarray([[0.0, 2.0], [3.0, 4.0]]), complete=False)
    >>> (q @ r).round(6).tolist()
    [[0.0, 2.0], [3.0, 4.0]]
    """


def _factors(x: Aval, *, complete: bool) -> tuple[Aval, Aval]:
    *stack, rows, columns = x.shape
    inner, dtype = rows if complete else min(rows, columns), factor_dtype(x.dtype)
    shapes = (*stack, rows, inner), (*stack, inner, columns)
    return tuple([aval(shape, dtype, x.sharding, x.committed) for shape in shapes])  # type: ignore[return-value]


def _of_whole(x: Any, *, complete: bool) -> Sequence[Any]:
    return tuple(np.linalg.qr(x, mode="complete" if complete else "reduced"))


@with_host_function(blocked_qr, _of_whole, _factors, by_columns)
def _qr(x: Shards, along: Along, *, complete: bool) -> tuple[Shards, Shards]:
    value = x.value
    comm, (rows, columns), dtype = along(value.ndim - 1), value.shape[-2:], factor_dtype(value.dtype)
    q, r = _factors(value, complete=complete)
    count = min(rows, columns)
    steps = [p._replace(end=min(p.end, count)) for p in panels(value) if p.begin < count]
    reflectors = []
    with np.errstate(all="ignore"):
        work = x.copied(dtype)
        for panel in steps:
            shape = rows_of(rows - panel.begin + panel.width, panel.width)
            reflector = work.map(functools.partial(_panel, panel), owns(comm, panel), shape=shape, dtype=dtype)
            reflectors.append(reflector.arrays)
            sent, apply = comm.broadcast(reflector.arrays, panel.owner), functools.partial(_applied, panel, True)
            work = work.map(apply, sent, begins(value), shape=same, dtype=dtype)
        product = work.make(q, _write_identity, begins(q))
        for panel, mine in zip(reversed(steps), reversed(reflectors), strict=True):
            sent, apply = comm.broadcast(mine, panel.owner), functools.partial(_applied, panel, False)
            product.map(apply, sent, begins(q), shape=same, dtype=dtype)
    cut = functools.partial(_first_rows, r.shape[-2])
    upper = work.map(cut, shape=lambda shape: (*shape[:-2], r.shape[-2], shape[-1]), dtype=dtype)
    return product, upper.assembled(r)


# -- on one device ---------------------------------------------------------------------------------


def _panel(panel: Panel, xp: Any, x: Any, owned: bool) -> Any:
    """Replaces the columns of a panel by those of R, and returns V on top of S; None on other devices."""
    if not owned:
        return None
    q, r = xp.linalg.qr(xp.asarray(x[..., panel.begin :, panel.local], copy=True))
    x[..., panel.begin : panel.end, panel.local] = r
    x[..., panel.end :, panel.local] = 0
    top = q[..., : panel.width, :]
    # LAPACK's SVD raises an error where there is NaN, which reaches the result with V.
    left, _, right = xp.linalg.svd(xp.where(xp.isfinite(top), top, 0), full_matrices=False)
    return xp.concat([q, xp.negative(xp.matmul(left, right))], axis=-2)


def _applied(panel: Panel, forward: bool, xp: Any, x: Any, reflector: Any, first: int) -> Any:
    """Multiplies columns by the orthogonal matrix of a panel; if ``forward``, those to the right of the panel by its
    adjoint; otherwise those from the panel on.
    """
    width = panel.width
    v, s = reflector[..., :-width, :], reflector[..., -width:, :]
    top = v[..., :width, :]
    inner = xp.linalg.inv(xp.subtract(diagonal_mask(xp, width), xp.matmul(adjoint(xp, s), top)))
    w = xp.concat([xp.subtract(top, s), v[..., width:, :]], axis=-2)
    left = xp.matmul(w, inner)
    for columns in chunks(x, (panel.end if forward else panel.begin) - first):
        part = xp.asarray(x[..., panel.begin :, columns], copy=True)
        if not forward:
            part[..., :width, :] = xp.matmul(s, part[..., :width, :])
        part = xp.subtract(part, xp.matmul(left, xp.matmul(adjoint(xp, w), part)))
        if forward:
            part[..., :width, :] = xp.matmul(adjoint(xp, s), part[..., :width, :])
        x[..., panel.begin :, columns] = part
    return x


def _write_identity(xp: Any, out: Any, first: int) -> None:
    rows, columns = xp.arange(out.shape[-2]), xp.arange(out.shape[-1])
    out[...] = xp.asarray(xp.equal(rows[:, None], xp.add(columns, first)), dtype=out.dtype)


def _first_rows(count: int, xp: Any, x: Any) -> Any:
    return x if count == x.shape[-2] else xp.asarray(x[..., :count, :], copy=True)
