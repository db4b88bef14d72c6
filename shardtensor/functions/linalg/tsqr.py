"""QR factorizations of tall matrices whose rows are split over devices, by a tree.

Each device factorizes its rows. Then, in each round, every second device that still has a factor R sends it to the
device before, which factorizes both together; the last one has R of the whole matrix. The factors Q of these rounds are
multiplied in the opposite order, on the way back to the devices, so that each device computes its rows of Q (J. Demmel,
L. Grigori, M. Hoemmen, J. Langou, Communication-optimal parallel and sequential QR and LU factorizations, SIAM Journal
on Scientific Computing 34, 2012).

For n columns on P devices, P - 1 factors of n x n elements are sent on the way to the first device, as many on the way
back, and R to all the others::

    bytes = 3 (P - 1) n² itemsize        2 (P - 1) n² itemsize without Q

A device holds a few of these factors besides its rows and those of Q. Up to 64 KiB, the first device receives all rows,
and computes the same factors with the same bits. The signs of R's rows are those that the tree gives: they differ from
LAPACK's, which are not unique either.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from shardtensor.core import operator
from shardtensor.functions.algorithms.distributed import Whole, distributed
from shardtensor.functions.algorithms.first_device import is_few
from shardtensor.functions.algorithms.shards import Kernel, MeshCommunicator, Shards
from shardtensor.functions.standard.manipulation import matrix_transpose
from shardtensor.sharding.layout import Shape
from shardtensor.sharding.spec import P
from shardtensor.tensor.tensor import ArrayLike, ShardedTensor
from shardtensor.tensor.value import Aval, aval

_BLOCK = 1 << 16
"""Elements of the blocks of rows that NumPy factorizes one after the other, which stay in the cache."""


def is_tall(x: Any) -> bool:
    """Whether x is a tensor of matrices with split rows, of which each device has at least as many as x has columns.

    The rows are not split if another dimension can take the split, so that each device has whole matrices.
    """
    return _is_long(x, -2, -1)


def is_wide(x: Any) -> bool:
    """Whether x is a tensor whose transposed matrices are tall; see `is_tall`."""
    return _is_long(x, -1, -2)


def _is_long(x: Any, along: int, across: int) -> bool:
    """Whether x is a tensor of matrices that are split along one dimension, of which each device has at least as many
    elements as the other dimension has.
    """
    return isinstance(x, ShardedTensor) and _is_long_of(x._aval, along, across)


@functools.lru_cache(1024)
def _is_long_of(x: Aval, along: int, across: int) -> bool:
    """Returns `_is_long` of a tensor of that aval."""
    if not is_factorized(x) or not splits_matrices(x):
        return False
    chains = x.sharding.spec.chains_of(x.ndim)
    parts = math.prod([x.sharding.mesh.shape[a] for a in chains[along]])
    return parts > 1 and not chains[across] and x.shape[along] // parts >= x.shape[across] > 0


def is_factorized(x: Any) -> bool:
    """Whether x is a tensor, or the aval of one, of matrices of a dtype that LAPACK factorizes."""
    return isinstance(x, (ShardedTensor, Aval)) and x.ndim >= 2 and is_solvable(x.dtype)


def is_solvable(dtype: np.dtype[Any]) -> bool:
    """Whether LAPACK computes with the dtype."""
    return dtype.char in "fdFD" or dtype.kind in "biu"


def splits_matrices(x: ShardedTensor | Aval) -> bool:
    """Whether the last two dimensions are split, and no other dimension can take the split."""
    *stack, rows, columns = x.sharding.spec.chains_of(x.ndim)
    parts = math.prod([x.sharding.mesh.shape[a] for a in (*rows, *columns)])
    return parts > 1 and all(chain or size < parts for chain, size in zip(stack, x.shape, strict=False))


def small_factor(x: Any) -> Any:
    """Returns R of tall matrices, or of wide ones transposed, which has the same singular values; None of others."""
    return tall_r(x) if is_tall(x) else tall_r(matrix_transpose(x)) if is_wide(x) else None


def factor_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Returns the dtype in which LAPACK factorizes."""
    return np.dtype(np.float64) if dtype.kind in "biu" else dtype


@operator(operands=("x",), error_name="qr", tags=("internal",))
def tall_qr(x: ArrayLike, /) -> tuple[ShardedTensor, ShardedTensor]:
    """Returns Q, in x's sharding, and R, replicated, of matrices with split rows: see `is_tall`.

    >>> from shardtensor.functions.linalg.tsqr import tall_qr
    >>> [abs(a).round(6).tolist() for a in tall_qr(st.asarray([[3.0]] * 4))]
    [[[0.5], [0.5], [0.5], [0.5]], [[6.0]]]
    """


@operator(operands=("x",), error_name="qr", tags=("internal",))
def tall_r(x: ArrayLike, /) -> ShardedTensor:
    """Returns R of `tall_qr` without computing Q.

    >>> from shardtensor.functions.linalg.tsqr import tall_r
    >>> abs(tall_r(st.asarray([[3.0]] * 4))).round(6).tolist()
    [[6.0]]
    """


def _qr_of_whole(value: Aval) -> Whole | None:
    if not (is_few(value) and _is_long_of(value, -2, -1)):
        return None
    dtype, parts = factor_dtype(value.dtype), _parts(value)

    def compute(xp: Any, x: Any) -> tuple[Any, Any]:
        local, rounds, r = _up_at_once(xp, x, parts, _factorized)
        factor = xp.eye(r.shape[-1], dtype=dtype)[None]
        for q in reversed(rounds):
            n, left = q.shape[-1], factor[..., q.shape[-3] :, :, :]
            product = _of_each(xp, xp.matmul, q, factor[..., : q.shape[-3], :, :])
            product = xp.reshape(product, (*product.shape[:-3], -1, n, n))
            factor = xp.concat([product, left], axis=-3) if left.shape[-3] else product
        products = [
            _of_each(xp, xp.matmul, q, factor[..., begin:end, :, :])
            for (begin, end, _), (q, _) in zip(parts, local, strict=True)
        ]
        rows = [xp.reshape(product, (*x.shape[:-2], -1, x.shape[-1])) for product in products]
        return rows[0] if len(rows) == 1 else xp.concat(rows, axis=-2), r

    q = aval(value.shape, dtype, value.sharding, value.committed)
    return Whole((q, _aval_of_r(value, dtype)), compute, (value.ndim - 2,))


def _r_of_whole(value: Aval) -> Whole | None:
    if not (is_few(value) and _is_long_of(value, -2, -1)):
        return None
    parts = _parts(value)
    return Whole(
        _aval_of_r(value, factor_dtype(value.dtype)),
        lambda xp, x: _up_at_once(xp, x, parts, _triangular)[2],
        (value.ndim - 2,),
    )


@distributed(tall_qr, whole=_qr_of_whole)
def _tall_qr(x: Shards, along: Callable[[int], MeshCommunicator]) -> tuple[Shards, Shards]:
    comm, dtype = along(x.value.ndim - 2), factor_dtype(x.value.dtype)
    local, rounds, r = _up(x, comm, dtype, _factorized)
    factor = r.map(lambda xp, r: xp.eye(r.shape[-1], dtype=r.dtype), shape=_square, dtype=dtype)
    for step, merges, merged in reversed(rounds):
        product = merged.map(_multiplied, factor.arrays, shape=_square, dtype=dtype, tuples=True, only=merges)
        sources = [k - step if k % (2 * step) == step else None for k in range(comm.size)]
        sent = comm.permute(product.item(1), sources, zeros=False)
        factor = factor.where(merges, product.item(0).arrays)
        factor = factor.where([sources[k] is not None for k in comm.index], sent)
    q = aval(x.value.shape, dtype, x.value.sharding, x.value.committed)
    return local.make(q, _times, local.arrays, factor.arrays), _replicated(r, comm, dtype)


@distributed(tall_r, whole=_r_of_whole)
def _tall_r(x: Shards, along: Callable[[int], MeshCommunicator]) -> Shards:
    comm, dtype = along(x.value.ndim - 2), factor_dtype(x.value.dtype)
    return _replicated(_up(x, comm, dtype, _triangular)[2], comm, dtype)


def _up(
    x: Shards, comm: MeshCommunicator, dtype: np.dtype[Any], factorize: Kernel
) -> tuple[Shards, list[tuple[int, list[bool], Shards]], Shards]:
    """Returns the factors of each device's rows, of which the last one that ``factorize`` returns is R; for each round
    of the tree, the distance of the devices, which of them receive a factor R, and the factors Q and R of these; and R
    of each device, which is that of the whole matrix on the first one.
    """
    local = x.map(factorize, shape=_square, dtype=dtype, tuples=True)
    r = local.item(-1)
    rounds, step = [], 1
    while step < comm.size:
        sources = [k + step if k % (2 * step) == 0 and k + step < comm.size else None for k in range(comm.size)]
        merges = [sources[k] is not None for k in comm.index]
        received = comm.permute(r, sources, zeros=False)
        merged = r.map(_merged, received, shape=_square, dtype=dtype, tuples=True, only=merges)
        rounds.append((step, merges, merged))
        r = r.where(merges, merged.item(-1).arrays)
        step *= 2
    return local, rounds, r


def _replicated(r: Shards, comm: MeshCommunicator, dtype: np.dtype[Any]) -> Shards:
    """Returns the R of the first device on every device."""
    return r.of(comm.broadcast(r.arrays, 0)).assembled(_aval_of_r(r.value, dtype))


def _aval_of_r(x: Aval, dtype: np.dtype[Any]) -> Aval:
    *chains, _, _ = x.sharding.spec.chains_of(x.ndim)
    return aval(_square(x.shape), dtype, x.sharding.with_spec(P(*chains)), x.committed)


# -- shapes of results -----------------------------------------------------------------------------


def _square(shape: Shape) -> Shape:
    return (*shape[:-2], shape[-1], shape[-1])


# -- all parts on one device -----------------------------------------------------------------------


def _parts(x: Aval) -> list[tuple[int, int, int]]:
    """Returns the ranges of devices that have equally many rows, at most two, each with this number."""
    sizes = np.diff(x.grid.offsets[-2]).tolist()
    ends = [*[k for k in range(1, len(sizes)) if sizes[k] != sizes[k - 1]], len(sizes)]
    return [(begin, end, sizes[begin]) for begin, end in itertools.pairwise([0, *ends])]


def _up_at_once(
    xp: Any, x: Any, parts: Sequence[tuple[int, int, int]], factorize: Kernel
) -> tuple[list[tuple[Any, ...]], list[Any], Any]:
    """Returns the factors of the rows of each range of devices, as stacks of matrices; for each round of the tree, the
    stack of the factors Q; and R of the whole matrix.
    """
    local, at = [], 0
    for begin, end, rows in parts:
        some = x[..., at : at + (end - begin) * rows, :]
        at += (end - begin) * rows
        stack = xp.reshape(some, (*x.shape[:-2], end - begin, rows, x.shape[-1]))
        local.append(_of_each(xp, functools.partial(factorize, xp), stack))
    stacks, rounds = [factors[-1] for factors in local], list[Any]()
    r = stacks[0] if len(stacks) == 1 else xp.concat(stacks, axis=-3)
    n = r.shape[-1]
    while (count := r.shape[-3]) > 1:
        pairs, left = count // 2, r[..., count - count % 2 :, :, :]
        q, r = _of_each(xp, xp.linalg.qr, xp.reshape(r[..., : 2 * pairs, :, :], (*r.shape[:-3], pairs, 2 * n, n)))
        rounds.append(q)
        r = xp.concat([r, left], axis=-3) if count % 2 else r
    return local, rounds, r[..., 0, :, :]


def _of_each(xp: Any, function: Kernel, *stacks: Any) -> Any:
    """Returns what a function computes of each matrix of stacks, as stacks. Only NumPy's functions compute each matrix
    of a stack with the same bits as alone.
    """
    if isinstance(stacks[0], np.ndarray):
        return function(*stacks)
    results = [function(*[stack[..., k, :, :] for stack in stacks]) for k in range(stacks[0].shape[-3])]
    if not isinstance(results[0], tuple):
        return xp.stack(results, axis=-3)
    return tuple([xp.stack(column, axis=-3) for column in zip(*results, strict=True)])


# -- on one device ---------------------------------------------------------------------------------


def _factorized(xp: Any, x: Any) -> tuple[Any, ...]:
    """Returns factors Q, from left to right, and R. NumPy's are those of blocks of rows, and of their stacked R."""
    if xp is not np:
        return tuple(xp.linalg.qr(x if xp.isdtype(x.dtype, ("real floating", "complex floating")) else _wide(xp, x)))
    blocks, rest = _blocks(x)
    if blocks is None:
        return tuple(np.linalg.qr(x))
    q, r = np.linalg.qr(blocks)
    return q, *np.linalg.qr(np.concatenate([r.reshape(-1, x.shape[-1]), rest]))


def _triangular(xp: Any, x: Any) -> tuple[Any, ...]:
    """Returns R of `_factorized`, of the same bits, in a tuple. The array API has no mode without Q."""
    if xp is not np:
        return _factorized(xp, x)[-1:]
    blocks, rest = _blocks(x)
    if blocks is None:
        return (np.linalg.qr(x, mode="r"),)
    r: Any = np.linalg.qr(blocks, mode="r")
    return (np.linalg.qr(np.concatenate([r.reshape(-1, x.shape[-1]), rest]), mode="r"),)


def _blocks(x: Any) -> tuple[Any, Any]:
    """Returns the rows of a matrix as a stack of blocks, and the rows that are left, which are fewer than those of a
    block and are factorized together with the factors R; None instead of one block, and of those of several matrices.
    """
    (rows, columns), count = x.shape[-2:], max(1, x.shape[-2] // max(_BLOCK // x.shape[-1], 2 * x.shape[-1]))
    if count == 1 or x.ndim > 2:
        return None, x
    end = count * (rows // count)
    return x[:end].reshape(count, -1, columns), x[end:]


def _wide(xp: Any, x: Any) -> Any:
    return xp.asarray(x, dtype=xp.float64)


def _times(xp: Any, out: Any, factors: tuple[Any, ...], last: Any) -> None:
    """Writes the product of the factors Q of a device's rows and of the last factor."""
    *blocks, q, _ = factors
    if not blocks:
        out[...] = xp.matmul(q, last)
        return
    q, (block,), columns = np.matmul(q, last), blocks, last.shape[-1]
    count, length = block.shape[:2]
    inner, end = q[: count * columns].reshape(count, columns, columns), count * length
    np.matmul(block, inner, out=out[:end].reshape(count, length, columns))
    out[end:] = q[count * columns :]


def _merged(xp: Any, r: Any, other: Any) -> tuple[Any, ...]:
    """Returns Q and R of two factors R, one on top of the other."""
    return tuple(xp.linalg.qr(xp.concat([r, other], axis=-2)))


def _multiplied(xp: Any, merged: tuple[Any, ...], factor: Any) -> tuple[Any, Any]:
    """Returns the upper and the lower half of Q times the factor."""
    product, n = xp.matmul(merged[0], factor), factor.shape[-1]
    return product[..., :n, :], xp.asarray(product[..., n:, :], copy=True)
