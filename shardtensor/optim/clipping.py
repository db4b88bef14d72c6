"""Transformations that limit updates, by elements and by norms."""

from __future__ import annotations

from typing import Any

import numpy as np

from shardtensor.core import hinted
from shardtensor.functions.placement.conversion import asarray
from shardtensor.functions.standard.data_types import astype, result_type
from shardtensor.functions.standard.elementwise import clip as clipped
from shardtensor.functions.standard.elementwise import maximum, sqrt
from shardtensor.functions.standard.searching import where
from shardtensor.functions.standard.statistical import mean, sum
from shardtensor.optim.parameter_trees import aligned, expect_params, for_leaves, mapped
from shardtensor.optim.transformations import GradientTransformation, stateless


@hinted
def clip(max_delta: float) -> GradientTransformation:
    """Returns a transformation that limits each element to the range from ``-max_delta`` to ``max_delta``.

    Args:
        max_delta: the limit.

    >>> limit = st.optim.clip(1.0)
    >>> limit.update([st.asarray([3.0, -0.5])], limit.init([st.ones(2)]))[0][0].tolist()
    [1.0, -0.5]
    """
    return stateless(
        lambda updates, params: mapped(
            "optim.clip", lambda g: clipped(g, -max_delta, max_delta), {"gradients": updates}
        )
    )


@hinted
def global_norm(updates: Any) -> Any:
    """Returns the Euclidean norm of all elements of a tree.

    Args:
        updates: a tree of floating-point tensors, in any layouts; None is no leaf.

    Returns:
        A tensor without dimensions, in the dtype of the leaves, at least float32. Each device adds the squares of its
        own elements; no elements are read.

    >>> float(st.optim.global_norm({"w": st.asarray([3.0]), "b": st.asarray([4.0])}))
    5.0
    """
    rows, _ = aligned("optim.global_norm", {"updates": updates})
    squares = [sum(_squares(leaf)) for (leaf,) in rows]
    total = squares[0] if squares else asarray(0.0)
    for other in squares[1:]:
        total = total + other
    return sqrt(total)


def _squares(x: Any) -> Any:
    """Returns the squares of elements, for sums: in float32 if they have less, because float16 ends at 65504."""
    wide = astype(x, result_type(x.dtype, np.float32), copy=False)
    return wide * wide


@hinted
def clip_by_global_norm(max_norm: Any) -> GradientTransformation:
    """Returns a transformation that scales all gradients by one number, so that their norm has a limit.

    R. Pascanu, T. Mikolov, Y. Bengio, On the difficulty of training Recurrent Neural Networks, 2012.

    Args:
        max_norm: the limit of `global_norm`, a number or a tensor without dimensions.

    >>> limit = st.optim.clip_by_global_norm(1.0)
    >>> updates, _ = limit.update([st.asarray([3.0, 4.0])], limit.init([st.ones(2)]))
    >>> np.round(updates[0], 3).tolist()
    [0.6, 0.8]
    """

    def update(updates: Any, params: Any) -> Any:
        norm = global_norm(updates)
        is_small = norm < max_norm
        factor = for_leaves(where(is_small, 1.0, max_norm / where(is_small, 1.0, norm)))  # The norm may be 0.
        return mapped("optim.clip_by_global_norm", lambda g: g * factor(g), {"gradients": updates})

    return stateless(update)


@hinted
def clip_by_block_rms(threshold: float) -> GradientTransformation:
    """Returns a transformation that limits the root of the mean square of each leaf.

    Args:
        threshold: the limit.

    >>> limit = st.optim.clip_by_block_rms(1.0)
    >>> limit.update([st.asarray([3.0, -3.0])], limit.init([st.ones(2)]))[0][0].tolist()
    [1.0, -1.0]
    """

    def limited(g: Any) -> Any:
        return g / for_leaves(maximum(_rms(g) / threshold, 1.0))(g)

    return stateless(lambda updates, params: mapped("optim.clip_by_block_rms", limited, {"gradients": updates}))


def _rms(x: Any) -> Any:
    squares = _squares(x)
    return sqrt(mean(squares) if x.size else sum(squares))  # The mean of no elements would be NaN.


@hinted
def scale_by_param_block_rms(min_scale: float = 1e-3) -> GradientTransformation:
    """Returns a transformation that multiplies each leaf by the root of the mean square of its parameter.

    Args:
        min_scale: the least factor.

    Raises:
        ArgumentTypeError: ``update`` gets no parameters.

    >>> scaled = st.optim.scale_by_param_block_rms()
    >>> params = [st.asarray([2.0, -2.0])]
    >>> scaled.update([st.ones(2)], scaled.init(params), params)[0][0].tolist()
    [2.0, 2.0]
    """
    caller = "optim.scale_by_param_block_rms"

    def update(updates: Any, params: Any) -> Any:
        expect_params(caller, params)
        return mapped(
            caller,
            lambda g, p: g * for_leaves(maximum(_rms(p), min_scale))(g),
            {"gradients": updates, "params": params},
        )

    return stateless(update)
