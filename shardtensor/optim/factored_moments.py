"""The second moments of Adafactor: for matrices, means of rows and of columns instead of all elements."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from shardtensor.core import hinted
from shardtensor.errors import ShapeError
from shardtensor.functions.standard.creation import zeros, zeros_like
from shardtensor.functions.standard.data_types import astype
from shardtensor.functions.standard.elementwise import sqrt
from shardtensor.functions.standard.manipulation import expand_dims
from shardtensor.functions.standard.statistical import mean
from shardtensor.optim.parameter_trees import (
    aligned,
    count_of,
    expect_params,
    expect_state,
    floating,
    for_leaves,
    incremented,
    like,
    mapped_to,
    unzipped,
)
from shardtensor.optim.transformations import GradientTransformation
from shardtensor.sharding.layout import NamedSharding
from shardtensor.sharding.spec import PartitionSpec
from shardtensor.tensor.tensor import ShardedTensor


class FactoredState(NamedTuple):
    """The state of `scale_by_factored_rms`. Moments that a parameter does not have are one zero.

    Attributes:
        count: the number of steps, an int32 tensor without dimensions.
        v_row: for each factored parameter, the means of squares along its longest dimension.
        v_col: for each factored parameter, the means along the dimension that is the second longest.
        v: for each other parameter, the means of the squares of each element.
    """

    count: Any
    v_row: Any
    v_col: Any
    v: Any


def _power(count: Any, exponent: Any) -> Any:
    return 1 - (astype(count, "float64") + 1) ** -exponent


@hinted
def scale_by_factored_rms(
    factored: bool = True, decay_rate: float = 0.8, step_offset: int = 0, min_dim_size_to_factor: int = 128,
    epsilon: float = 1e-30, decay_rate_fn: Callable[[Any, Any], Any] = _power,
) -> GradientTransformation:  # fmt: skip
    """Returns a transformation that divides gradients by the root of a mean of their squares, which for matrices is the
    product of a vector for the rows and one for the columns.

    N. Shazeer, M. Stern, Adafactor: Adaptive Learning Rates with Sublinear Memory Cost, 2018. A vector has the layout
    of its parameter without the other dimension; its means along a split dimension are combined by an all-reduce.

    Args:
        factored: whether matrices have vectors.
        decay_rate: the exponent of the decay of the means, ``1 - (count + 1)**-decay_rate``.
        step_offset: the count of the first step, where another training has been before.
        min_dim_size_to_factor: the size that the two longest dimensions of a factored parameter have at least.
        epsilon: the number that is added to squares.
        decay_rate_fn: another function of the count, less the offset, and of ``decay_rate`` that returns the decay.

    Raises:
        ArgumentError: ``update`` gets gradients of another structure than the state; ShapeError, of other shapes.
        ArgumentTypeError: ``init`` gets parameters that are no floating-point numbers, or ``update`` gets none.

    >>> rms = st.optim.scale_by_factored_rms(min_dim_size_to_factor=2)
    >>> params = [st.ones((4, 2))]
    >>> rms.init(params).v_row[0].shape, rms.init(params).v_col[0].shape
    ((2,), (4,))
    """
    caller = "optim.scale_by_factored_rms"
    least = min_dim_size_to_factor if factored else math.inf

    def init(params: Any) -> FactoredState:
        trees = {"params": floating(caller, params)}
        return FactoredState(count_of(params), *mapped_to(3, caller, lambda p: _moments(p, least), trees))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, FactoredState]:
        expect_state(caller, state, FactoredState)
        expect_params(caller, params)
        aligned(caller, {"gradients": updates, "params": params})
        trees = {"gradients": updates, "state.v_row": state.v_row, "state.v_col": state.v_col, "state.v": state.v}
        rows, structure = aligned(caller, trees, equal_shapes=False)
        averaged = _averages(caller, decay_rate_fn(state.count - step_offset, decay_rate))
        results = [_step(*row, least=least, epsilon=epsilon, averaged=averaged) for row in rows]
        updates, *moments = unzipped(4, structure, results)
        return updates, FactoredState(incremented(state.count), *moments)

    return GradientTransformation(init, update)


def _dimensions(x: Any, least: float) -> tuple[int, int] | None:
    """Returns the second longest and the longest dimension; None for a parameter that is not factored."""
    if x.ndim < 2:
        return None
    *_, second, longest = np.argsort(x.shape).tolist()
    return (second, longest) if x.shape[second] >= least else None


def _averages(caller: str, decay: Any) -> Callable[[Any, Any], Any]:
    """Returns the function of a mean and of new values that returns the next mean."""
    old, new = for_leaves(decay), for_leaves(1 - decay)

    def averaged(before: Any, values: Any) -> Any:
        if before.shape != values.shape:
            raise ShapeError(
                f"{caller}: a moment of the state has the shape {before.shape}; wanted {values.shape}, as init returns "
                "it for these parameters"
            )
        return like(old(before) * before + new(before) * values, before)

    return averaged


def _step(
    g: Any, row: Any, col: Any, v: Any, *, least: float, epsilon: float, averaged: Callable[[Any, Any], Any]
) -> tuple[Any, Any, Any, Any]:
    """Returns the update of a leaf, and its next moments."""
    squares = g * g + epsilon
    if (dims := _dimensions(g, least)) is None:
        v = averaged(v, squares)
        return g / sqrt(v), row, col, v
    second, longest = dims
    row = averaged(row, mean(squares, axis=longest))
    col = averaged(col, mean(squares, axis=second))
    of_rows = 1 / sqrt(row / mean(row, axis=second - (second > longest), keepdims=True))
    scaled = g * expand_dims(of_rows, axis=longest) * expand_dims(1 / sqrt(col), axis=second)
    return scaled, row, col, v


def _moments(p: Any, least: float) -> tuple[Any, Any, Any]:
    if (dims := _dimensions(p, least)) is None:
        return _zero(p), _zero(p), zeros_like(p)
    return _zeros_without(p, dims[1]), _zeros_without(p, dims[0]), _zero(p)


def _zero(p: Any) -> Any:
    """Returns one zero, which all devices of a parameter have."""
    return zeros((1,), dtype=p.dtype, device=_layout(p, ()))


def _zeros_without(p: Any, axis: int) -> Any:
    """Returns zeros of the shape and the layout of a parameter without one of its dimensions."""
    parts = [*p.sharding.spec, *[None] * p.ndim][: p.ndim] if isinstance(p, ShardedTensor) else []
    layout = _layout(p, [part for number, part in enumerate(parts) if number != axis])
    return zeros(p.shape[:axis] + p.shape[axis + 1 :], dtype=p.dtype, device=layout)


def _layout(p: Any, parts: Sequence[Any]) -> NamedSharding | None:
    """Returns a layout on the mesh of a parameter; None in a map, where arrays have none."""
    return NamedSharding(p.sharding.mesh, PartitionSpec(*parts)) if isinstance(p, ShardedTensor) else None
