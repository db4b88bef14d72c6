"""Counts of integers: NumPy's `bincount`.

Where x is sharded, each device counts the elements of its shard, and the counts are added along a fixed tree. The
result is replicated.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from shardtensor.backend.registry import array_backend
from shardtensor.communication.transfer import whole_array
from shardtensor.core import call, implements, operator
from shardtensor.errors import ArgumentError, ArgumentTypeError, ShapeError
from shardtensor.functions.algorithms.first_device import runs_whole
from shardtensor.functions.building.own_kernels import own_kernel
from shardtensor.host.memory_pool import check_addressable
from shardtensor.host.units import counted
from shardtensor.sharding.layout import Shape
from shardtensor.sharding.shard_context import ShardContext
from shardtensor.sharding.spec import P
from shardtensor.tensor.operands import dtype_of, integer_from, shape_of
from shardtensor.tensor.tensor import ArrayLike, ShardedTensor, tensor_of
from shardtensor.tensor.value import aval


@operator(operands=("x", "weights"))
def bincount(x: ArrayLike, /, weights: ArrayLike | None = None, minlength: int = 0) -> ShardedTensor:
    """Returns for each integer from 0 on how many elements of x it equals, or the sum of the weights of these elements.

    The result has the size ``max(x) + 1``, at least ``minlength``, and dtype int64, with weights float64. It is
    replicated. The size depends on the elements, so that `eval_shape` cannot infer the result.

    Args:
        x: a tensor or a host array of one dimension, of integers that are not negative.
        weights: numbers, of x's shape.
        minlength: the least size of the result.

    Raises:
        ArgumentTypeError: x has another dtype than integers.
        ArgumentError: an element of x, or ``minlength``, is negative.
        ShapeError: x does not have one dimension, or ``weights`` has another shape.
        ConcretizationError: the elements of x are not known.

    >>> st.bincount(st.asarray([1, 3, 1]), minlength=5).tolist()
    [0, 2, 0, 1, 0]
    """


def _bins_rule(shapes: Sequence[Shape], *, length: int) -> tuple[str, Shape]:
    weights = shapes[1]
    return f"k, {'k' if weights else ''} -> bins", (length,)


def _weighted_dtype(x: Any, weights: Any = None, *others: Any, **params: Any) -> Any:
    return np.zeros(1, np.int64 if weights is None else np.float64)


@operator(
    _bins_rule,
    operands=("x", "weights"),
    combine="sum",
    dtype=_weighted_dtype,
    tags=("unblocked",),
    error_name="bincount",
)
def counts_of_integers(x: ArrayLike, /, weights: ArrayLike | None = None, *, length: int) -> ShardedTensor:
    """Returns `bincount` of integers below ``length``, as an array of that size.

    >>> from shardtensor.functions.statistics.counts import counts_of_integers
    >>> counts_of_integers(st.asarray([1, 3, 1]), length=4).tolist()
    [0, 2, 0, 1]
    """


@implements(counts_of_integers, "kernel")
def _counts_of_integers(xp: Any, context: ShardContext | None, x: Any, weights: Any, *, length: int) -> Any:
    if weights is None and (counts := own_kernel(xp, "counts_below", x, length)) is not None:
        return counts
    x = xp.asarray(x, dtype=np.dtype("int64"))
    if not x.shape[0]:
        return xp.zeros((length,), dtype=np.dtype("int64" if weights is None else "float64"))
    if weights is not None:
        weights = xp.asarray(weights, dtype=np.dtype("float64"))
    if xp is not np:
        return xp.bincount(x, weights, length)
    try:
        return np.bincount(x, weights, length)
    except ValueError:
        raise _refusal(x, length) from None


def _refusal(x: Any, length: int) -> ArgumentError:
    """Returns the error for numbers that NumPy does not count.

    Raises:
        DeviceMemoryError: they are too large for an array with a count of each.
    """
    if x.size and x.min() >= 0:
        check_addressable((max(length, int(x.max()) + 1),), np.dtype("int64"))
    return ArgumentError(_NEGATIVE)


_NEGATIVE = "x has negative elements; wanted integers from 0 on"


@implements(bincount, "small")
def _counts_on_host(x: Any, weights: Any, minlength: int) -> Any:
    # The sums of weights are those of shards.
    return NotImplemented if weights is not None else np.bincount(x, None, minlength)


@implements(bincount, "composite")
def _bincount(x: Any, weights: Any, minlength: int) -> Any:
    if len(shape_of(x)) != 1:
        raise ShapeError(f"x has {counted(len(shape_of(x)), 'dimension')}; wanted one")
    if weights is not None and dtype_of(weights).kind not in "biuf":
        raise ArgumentTypeError(f"weights have dtype {dtype_of(weights)}; wanted real numbers")
    if weights is not None and shape_of(weights) != shape_of(x):
        raise ShapeError(f"weights has shape {shape_of(weights)}; wanted x's shape, {shape_of(x)}")
    minlength = integer_from(0, minlength, "minlength")
    kind = dtype_of(x).kind
    if kind not in "biu":
        raise ArgumentTypeError(f"x has dtype {dtype_of(x)}; wanted integers")
    length = minlength
    if shape_of(x)[0]:
        if weights is None and runs_whole(x):
            return _counts_of_whole(x, minlength)
        # NumPy itself looks for negative elements.
        checked = x._aval.backend.on_host if isinstance(x, ShardedTensor) else not array_backend(x)
        if kind == "i" and not checked and int(call("min", x)) < 0:
            raise ArgumentError(_NEGATIVE)
        length = max(length, int(call("max", x)) + 1)
    else:
        weights = None  # As in NumPy, the sums of no weights are integers.
    return counts_of_integers(x, weights, length=length)


def _counts_of_whole(x: ShardedTensor, minlength: int) -> ShardedTensor:
    """Returns `bincount` of a tensor in one memory of the host: NumPy finds the size of the result in the same pass."""
    try:
        counts = np.bincount(np.asarray(whole_array(x, "bincount"), np.int64), None, minlength)
    except ValueError:
        raise _refusal(whole_array(x, "bincount"), minlength) from None
    value = aval(counts.shape, counts.dtype, x.sharding.with_spec(P()), x.committed)
    return tensor_of(value, (counts,), ([],))
