"""Transformations whose states are moments of the gradients, with the dtype and layout of the parameters."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy.typing as npt

from shardtensor.core import hinted
from shardtensor.functions.standard.data_types import astype
from shardtensor.functions.standard.elementwise import sign, sqrt
from shardtensor.optim.parameter_trees import (
    count_of,
    expect_state,
    for_leaves,
    incremented,
    like,
    mapped_to,
    moments,
    placed,
)
from shardtensor.optim.transformations import GradientTransformation


class TraceState(NamedTuple):
    """The state of `trace`.

    Attributes:
        trace: the sums of gradients, a tree like the parameters.
    """

    trace: Any


class EmaState(NamedTuple):
    """The state of `ema`.

    Attributes:
        count: the number of steps, an int32 tensor without dimensions.
        ema: the means of gradients, a tree like the parameters.
    """

    count: Any
    ema: Any


class ScaleByAdamState(NamedTuple):
    """The state of `scale_by_adam`.

    Attributes:
        count: the number of steps, an int32 tensor without dimensions.
        mu: the means of gradients, a tree like the parameters.
        nu: the means of their squares, a tree like the parameters.
    """

    count: Any
    mu: Any
    nu: Any


class ScaleByLionState(NamedTuple):
    """The state of `scale_by_lion`.

    Attributes:
        count: the number of steps, an int32 tensor without dimensions.
        mu: the means of gradients, a tree like the parameters.
    """

    count: Any
    mu: Any


def correction(decay: Any, count: Any) -> Any:
    """Returns the function of a leaf that returns the factor which makes a mean over so many steps, from zeros on,
    unbiased. It is computed once in a step, in float64.
    """
    return for_leaves(1 / (1 - decay ** astype(count, "float64")))


@hinted
def trace(
    decay: float, nesterov: bool = False, accumulator_dtype: npt.DTypeLike | None = None
) -> GradientTransformation:
    """Returns a transformation that adds up gradients: ``trace = gradient + decay * trace``, the momentum of `sgd`.

    The sums have the layout of the parameters.

    Args:
        decay: the factor of the sum before.
        nesterov: whether the update is ``gradient + decay * trace``, with the new sum.
        accumulator_dtype: the dtype of the sums, if it is not that of the parameters.

    Raises:
        ArgumentError: ``update`` gets gradients of another structure than the state; ShapeError, of other shapes.
        ArgumentTypeError: ``init`` gets parameters that are no floating-point numbers.

    >>> momentum = st.optim.trace(0.5)
    >>> state = momentum.init([st.ones(2)])
    >>> for _ in range(2):
    ...     updates, state = momentum.update([st.ones(2)], state)
    >>> updates[0].tolist()
    [1.5, 1.5]
    """
    caller = "optim.trace"

    def step(g: Any, t: Any) -> tuple[Any, Any]:
        g = placed(g, t)
        new = g + decay * t
        return g + decay * new if nesterov else new, like(new, t)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, TraceState]:
        expect_state(caller, state, TraceState)
        updates, new = mapped_to(2, caller, step, {"gradients": updates, "state.trace": state.trace})
        return updates, TraceState(new)

    return GradientTransformation(lambda params: TraceState(moments(caller, params, accumulator_dtype)), update)


@hinted
def ema(decay: float, debias: bool = True, accumulator_dtype: npt.DTypeLike | None = None) -> GradientTransformation:
    """Returns a transformation whose updates are exponential moving averages of the gradients.

    The means have the layout of the parameters.

    Args:
        decay: the factor of the mean before; that of a gradient is ``1 - decay``.
        debias: whether updates are divided by ``1 - decay**count``.
        accumulator_dtype: the dtype of the means, if it is not that of the parameters.

    Raises:
        ArgumentError: ``update`` gets gradients of another structure than the state; ShapeError, of other shapes.
        ArgumentTypeError: ``init`` gets parameters that are no floating-point numbers.

    >>> mean = st.optim.ema(0.5)
    >>> mean.update([st.ones(2)], mean.init([st.ones(2)]))[0][0].tolist()
    [1.0, 1.0]
    """
    caller = "optim.ema"

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, EmaState]:
        expect_state(caller, state, EmaState)
        count = incremented(state.count)
        factor = correction(decay, count) if debias else None

        def step(g: Any, m: Any) -> tuple[Any, Any]:
            new = (1 - decay) * placed(g, m) + decay * m
            return new if factor is None else new * factor(new), like(new, m)

        updates, new = mapped_to(2, caller, step, {"gradients": updates, "state.ema": state.ema})
        return updates, EmaState(count, new)

    return GradientTransformation(
        lambda params: EmaState(count_of(params), moments(caller, params, accumulator_dtype)), update
    )


@hinted
def scale_by_adam(
    b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8, eps_root: float = 0.0,
    mu_dtype: npt.DTypeLike | None = None, *, nesterov: bool = False,
) -> GradientTransformation:  # fmt: skip
    """Returns a transformation that divides the mean of the gradients by the root of the mean of their squares.

    D. P. Kingma, J. Ba, Adam: A Method for Stochastic Optimization, 2015; with ``nesterov=True``, T. Dozat,
    Incorporating Nesterov Momentum into Adam, 2016. The means have the layout of the parameters.

    Args:
        b1: the decay of the mean of gradients.
        b2: the decay of the mean of squares.
        eps: the number that is added to the root.
        eps_root: the number that is added under the root.
        mu_dtype: the dtype of the mean of gradients, if it is not that of the parameters.
        nesterov: whether the mean of gradients is that of the next step, with the gradient in place of the next one.

    Raises:
        ArgumentError: ``update`` gets gradients of another structure than the state; ShapeError, of other shapes.
        ArgumentTypeError: ``init`` gets parameters that are no floating-point numbers.

    >>> adam = st.optim.scale_by_adam()
    >>> updates, state = adam.update([st.asarray([3.0, -0.1])], adam.init([st.ones(2)]))
    >>> np.round(updates[0], 6).tolist(), int(state.count)
    ([1.0, -1.0], 1)
    """
    caller = "optim.scale_by_adam"

    def init(params: Any) -> ScaleByAdamState:
        return ScaleByAdamState(count_of(params), moments(caller, params, mu_dtype), moments(caller, params))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, ScaleByAdamState]:
        expect_state(caller, state, ScaleByAdamState)
        count = incremented(state.count)
        of_gradient, of_squares = correction(b1, count), correction(b2, count)
        of_mean = correction(b1, count + 1) if nesterov else of_gradient

        def step(g: Any, m: Any, v: Any) -> tuple[Any, Any, Any]:
            g = placed(g, m)
            mean = (1 - b1) * g + b1 * m
            squares = (1 - b2) * (g * g) + b2 * v
            hat = mean * of_mean(mean)
            if nesterov:
                hat = b1 * hat + (1 - b1) * (g * of_gradient(g))
            below = squares * of_squares(squares)
            return hat / (sqrt(below + eps_root if eps_root else below) + eps), like(mean, m), like(squares, v)

        trees = {"gradients": updates, "state.mu": state.mu, "state.nu": state.nu}
        updates, mu, nu = mapped_to(3, caller, step, trees)
        return updates, ScaleByAdamState(count, mu, nu)

    return GradientTransformation(init, update)


@hinted
def scale_by_lion(b1: float = 0.9, b2: float = 0.99, mu_dtype: npt.DTypeLike | None = None) -> GradientTransformation:
    """Returns a transformation whose updates are signs of a mean of the gradients.

    X. Chen et al., Symbolic Discovery of Optimization Algorithms, 2023. The means have the layout of the parameters.

    Args:
        b1: the decay of the mean of which the update is the sign.
        b2: the decay of the mean that the state keeps.
        mu_dtype: the dtype of the means, if it is not that of the parameters.

    Raises:
        ArgumentError: ``update`` gets gradients of another structure than the state; ShapeError, of other shapes.
        ArgumentTypeError: ``init`` gets parameters that are no floating-point numbers.

    >>> lion = st.optim.scale_by_lion()
    >>> lion.update([st.asarray([3.0, -0.1])], lion.init([st.ones(2)]))[0][0].tolist()
    [1.0, -1.0]
    """
    caller = "optim.scale_by_lion"

    def step(g: Any, m: Any) -> tuple[Any, Any]:
        g = placed(g, m)
        return sign((1 - b1) * g + b1 * m), like((1 - b2) * g + b2 * m, m)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, ScaleByLionState]:
        expect_state(caller, state, ScaleByLionState)
        updates, mu = mapped_to(2, caller, step, {"gradients": updates, "state.mu": state.mu})
        return updates, ScaleByLionState(incremented(state.count), mu)

    return GradientTransformation(
        lambda params: ScaleByLionState(count_of(params), moments(caller, params, mu_dtype)), update
    )
