"""Quantiles of the elements that are not NaN, of lines that no other dimension can split.

Each device sorts its part of a line, so that NaN comes last, and the devices add the numbers of elements that are not
NaN. The ranks of the elements beside the quantiles follow from the sum, and these elements are selected by few messages
(see `shardtensor.functions.algorithms.ranks`). Along a line of P devices, the numbers take ``8 * L * P *
(P - 1)`` bytes for L lines. If there are as many lines as devices or more, each device receives its share of whole
lines instead (an all-to-all).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from shardtensor.core import operator
from shardtensor.functions.algorithms.distributed import with_host_function
from shardtensor.functions.algorithms.ranks import lines_along, of_one_line, row_of
from shardtensor.functions.algorithms.sample_sort import Order
from shardtensor.functions.algorithms.shards import MeshCommunicator, Shards
from shardtensor.functions.statistics.quantile_methods import (
    MEDIAN,
    Result,
    interpolated,
    is_weak,
    places,
    quantile_dtype,
    quantiles_of_lines,
)
from shardtensor.sharding.layout import Shape, offsets
from shardtensor.sharding.spec import P
from shardtensor.tensor.tensor import ArrayLike, ShardedTensor
from shardtensor.tensor.value import Aval, aval

_INT = np.dtype("int64")


@operator(error_name="nanquantile", tags=("internal",))
def nan_quantiles(
    x: ArrayLike, /, *, q: tuple[float, ...], width: str, axes: tuple[int, ...], method: str
) -> ShardedTensor:
    """Returns the quantiles of the elements along ``axes`` that are not NaN; NaN where there are none.

    The first dimension of the result has an item for each quantile. It is replicated along the mesh axes that split
    ``axes``; the other dimensions keep their sharding.

    Args:
        x: a tensor of floating-point numbers.
        q: the quantiles, from 0 to 1.
        width: their dtype, or "int" or "float" if they do not widen that of the elements.
        axes: the dimensions to reduce.
        method: how to interpolate.

    >>> from shardtensor.functions.statistics.nan_quantiles import nan_quantiles
    >>> x = st.asarray([3.0, float("nan"), 1.0])
    >>> nan_quantiles(x, q=(0.5, 1.0), width="float64", axes=(0,), method="linear").tolist()
    [2.0, 3.0]
    """


def _result(value: Aval, *, q: tuple[float, ...], width: str, axes: Any, method: str) -> Aval:
    chains = value.sharding.spec.chains_of(value.ndim)
    rest = [d for d in range(value.ndim) if d not in axes]
    sharding = value.sharding.with_spec(P(None, *[chains[d] for d in rest]))
    shape = (len(q), *[value.shape[d] for d in rest])
    return aval(shape, quantile_dtype(value.dtype, width, method), sharding, value.committed)


def _of_whole(x: Any, *, q: tuple[float, ...], width: str, axes: tuple[int, ...], method: Any) -> Any:
    dtype = quantile_dtype(x.dtype, width, method)
    if method == MEDIAN:
        return np.asarray(np.nanmedian(x, axis=axes), dtype)[None]
    if is_weak(width):
        results = [np.nanquantile(x, number, axis=axes, method=method) for number in q]
        return np.stack([np.asarray(a, dtype) for a in results])
    # NumPy takes the dtype of the first line, which is another one if all its elements are NaN.
    wide = np.asarray(x, dtype)
    return np.ascontiguousarray(np.nanquantile(wide, np.asarray(q, width), axis=axes, method=method))


@with_host_function(nan_quantiles, _of_whole, _result)
def _nan_quantiles(
    x: Shards,
    along: Callable[..., MeshCommunicator],
    *,
    q: tuple[float, ...],
    width: str,
    axes: tuple[int, ...],
    method: str,
) -> Shards:
    value = _result(x.value, q=q, width=width, axes=axes, method=method)
    comm, dtype = along(axes), x.value.dtype
    lines, sizes = lines_along(x, comm, axes)
    numbers = [a.shape[0] for a in lines.arrays]
    shapes = [value.grid.shape(k) for k in range(len(numbers))]

    def shaped(shape: Shape) -> Shape:
        return (len(q), *shape[1:])

    if max(numbers) >= comm.size:
        whole = comm.ragged_all_to_all(lines, [offsets(n, (comm.size,)) for n in numbers], 0, 1)

        def of_lines(xp: Any, array: Any) -> Any:
            context = Result((len(q), array.shape[0]), value.dtype)
            return quantiles_of_lines(xp, context, array, list(q), width, 1, method, True)

        result = whole.map(of_lines, shape=lambda shape: (len(q), shape[0]), dtype=value.dtype)
        gathered = result.of(comm.all_gather(result, 1))
        back = gathered.map(lambda xp, a, shape: xp.reshape(a, shape), shapes, shape=shaped, dtype=value.dtype)
        return back.assembled(value)

    ordered = lines.map(Order(stable=False).apply, shape=lambda shape: shape, dtype=dtype)
    counts = ordered.map(_numbers, shape=lambda shape: (shape[0], 1), dtype=_INT)
    sums = counts.of(comm.all_gather(counts, 1))
    totals = [np.sum(a, axis=1) for a in sums.to_host([np.full((n, 1), sum(sizes)) for n in numbers])]
    beside = [places(np, total[:, None], np.asarray([q]), width, method) for total in totals]
    picks = []
    for number in range(max(numbers)):
        run = ordered.map(row_of, [number] * len(numbers), shape=lambda shape: shape[1:], dtype=dtype)
        ranks = [
            [*lower[number].tolist(), *upper[number].tolist()] if number < len(lower) else [0] * 2 * len(q)
            for lower, upper, _ in beside
        ]
        picks.append(of_one_line(comm, run, sizes, ranks).arrays)

    def between(xp: Any, array: Any, total: Any, weights: Any, shape: Shape, *rows: Any) -> Any:
        elements = xp.stack(rows)[: array.shape[0]]
        none = xp.asarray((total == 0).tolist(), dtype=np.dtype("bool"))[:, None]
        if weights is not None:
            weights = xp.reshape(xp.asarray(weights.tolist(), dtype=weights.dtype), (array.shape[0], len(q)))
        lower, upper = elements[:, : len(q)], elements[:, len(q) :]
        return interpolated(xp, Result(shape, value.dtype), lower, upper, weights, width, method, none)

    distances = [w for _, _, w in beside]
    result = lines.map(between, totals, distances, shapes, *picks, shape=shaped, dtype=value.dtype)
    return result.assembled(value)


def _numbers(xp: Any, lines: Any) -> Any:
    """Returns for each row how many elements are not NaN."""
    return xp.sum(xp.astype(xp.logical_not(xp.isnan(lines)), _INT), axis=1, keepdims=True)
