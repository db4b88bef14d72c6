"""The operator that adds elements at given places: the transpose of selecting elements by index arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from shardtensor.core import implements, operator
from shardtensor.sharding.layout import Shape, Where
from shardtensor.sharding.shard_context import ShardContext
from shardtensor.tensor.tensor import ArrayLike, ShardedTensor


def _scatter_rule(shapes: Sequence[Shape], *, size: int) -> tuple[str, Shape]:
    at, values = shapes
    lead = [f"n{d}" for d in range(len(at))]
    rest = [f"d{d}" for d in range(len(values) - len(at))]
    return f"{' '.join(lead)}, {' '.join(lead + rest)} -> {' '.join(['rows', *rest])}", (size, *values[len(at) :])


@operator(
    _scatter_rule,
    operands=("at", "values"),
    combine="sum",
    dtype=lambda at, values, **params: values,
    blocks=False,
)
def scatter_add(at: ArrayLike, values: ArrayLike, /, *, size: int, out_sharding: Where | None = None) -> ShardedTensor:
    """Adds rows at given places of an array of zeros, which has ``size`` rows.

    The order of the additions depends on the mesh only.

    Args:
        at: the places, which are not negative.
        values: the rows: an array that has the dimensions of ``at`` before its own.
        size: the number of rows of the result.

    >>> from shardtensor.functions.scatter import scatter_add
    >>> scatter_add(st.asarray([2, 0, 2]), st.asarray([1.0, 2.0, 4.0]), size=3).tolist()
    [2.0, 0.0, 5.0]
    """


@implements(scatter_add, "kernel")
def _scatter_add(xp: Any, context: ShardContext | None, at: Any, values: Any, *, size: int) -> Any:
    rest = tuple(values.shape[len(at.shape) :])
    count = int(np.prod(at.shape))
    at, values = xp.reshape(at, (count,)), xp.reshape(values, (count, *rest))
    if xp is np:
        return _added_on_host(at, values, size)
    # A product adds the rows of equal places. Differences of running sums, which are smaller, would lose bits.
    hot = xp.astype(xp.expand_dims(xp.arange(size), axis=1) == xp.expand_dims(at, axis=0), values.dtype)
    return xp.reshape(xp.matmul(hot, xp.reshape(values, (count, int(np.prod(rest))))), (size, *rest))


def _added_on_host(at: Any, values: Any, size: int) -> Any:
    """Adds segments of equal places, which takes a tenth of the time of `numpy.add.at`."""
    made = np.zeros((size, *values.shape[1:]), values.dtype)
    if not values.size:
        return made
    order = np.argsort(at, kind="stable")
    places = at[order]
    begins = np.flatnonzero(np.concatenate([[True], places[1:] != places[:-1]]))
    made[places[begins]] = np.add.reduceat(values[order], begins, axis=0)
    return made
