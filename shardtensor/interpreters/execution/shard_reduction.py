"""Partial sums, products and extrema of all shards in one pass, where devices share one memory.

A C-contiguous array that is split only along its first dimension is reshaped to (parts, rows of a part, other
dimensions). Reducing the second dimension then gives the partial results of all shards in one or two calls of NumPy
(part sizes differ by at most one) instead of one call per shard. NumPy reduces each part by the same inner loop as a
separate array, and the parts are combined in mesh order, so the result is bit-identical to that of the general plan.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from shardtensor.communication.transfer import OperandTransfer, whole_array
from shardtensor.core import Operands
from shardtensor.sharding.layout import Grid
from shardtensor.sharding.rules import reduced_axes
from shardtensor.tensor.storage import Storage
from shardtensor.tensor.tensor import ShardedTensor, tensor
from shardtensor.tensor.value import Aval, whole_of

_UFUNCS = {"sum": np.add, "mean": np.add, "prod": np.multiply, "max": np.maximum, "min": np.minimum}


def partial_sums(
    name: str, value: Aval, params: dict[str, Any], move: OperandTransfer | None, general: Callable[[Operands], Any]
) -> Callable[[Operands], Any]:
    """Returns a plan that reduces by a ufunc in one pass, or the ``general`` plan where that is not possible.

    Args:
        name: the name of the reduction; sum, mean, prod, max and min of float32 and float64 can run in one pass.
        value: the aval of the result.
        params: the operator's parameters by name.
        move: the transfer of the operand; None for a scalar.
        general: the plan that reduces shard by shard.
    """
    ufunc = _UFUNCS.get(name)
    if ufunc is None or move is None or not move.stays or move.source.dtype not in ("f4", "f8"):
        return general  # Complex products are rounded differently in vectorized loops than one by one.
    source = move.source
    assert isinstance(source, Aval)  # Only a tensor can stay in its layout.
    grid = source.grid
    gone = reduced_axes(params.get("axis"), source.ndim)
    by_rows = 0 in gone and all(count == 1 for count in grid.counts[1:]) and _in_order(grid)
    if not by_rows or params.get("dtype") not in (None, source.dtype):
        return general
    runs = _runs(grid.offsets[0].tolist())
    axes = tuple(a + 1 for a in gone)
    rest = source.shape[1:]
    keepdims = params["keepdims"]
    count = source.size // max(value.size, 1) if name == "mean" else 0

    def plan(operands: Operands) -> ShardedTensor:
        (x,) = operands
        whole = x._storage.array
        if whole is None:
            whole = whole_array(x, name)
        if not whole.flags.c_contiguous:
            return general(operands)  # type: ignore[no-any-return]
        sums = [ufunc.reduce(whole[a:b].reshape(n, -1, *rest), axis=axes, keepdims=keepdims) for a, b, n in runs]
        total = _accumulated(ufunc, sums[0] if len(sums) == 1 else np.concatenate(sums))
        if keepdims:
            total = total.reshape(value.shape)
        return tensor(value, Storage(whole_of(total / count if count else total, value)))

    return plan


def _accumulated(ufunc: np.ufunc, parts: np.ndarray[Any, Any]) -> Any:
    """Combines ``parts`` along their first dimension, one after the other.

    ``ufunc.reduce`` over the first of two dimensions in row-major order does this many times faster than
    ``ufunc.accumulate``. Over a single dimension it sums pairwise, so ``accumulate`` is used there.
    """
    rows = parts.reshape(len(parts), -1)
    if rows.shape[1] == 1:
        return ufunc.accumulate(parts, axis=0)[-1]
    return ufunc.reduce(rows, axis=0).reshape(parts.shape[1:])


def _in_order(grid: Grid) -> bool:
    """Whether mesh order, in which partial results are combined, is the order of the parts of the first dimension."""
    return bool(np.all(np.diff(grid.parts[grid.owners(), 0]) > 0))


def _runs(bounds: Sequence[int]) -> list[tuple[int, int, int]]:
    """Returns (begin, end, number of parts) for each run of consecutive non-empty parts of equal size."""
    sizes = [b - a for a, b in itertools.pairwise(bounds)]
    runs, begin = [], 0
    for size, group in itertools.groupby(sizes):
        number = len(list(group))
        if size:
            runs.append((begin, begin + size * number, number))
        begin += size * number
    return runs
