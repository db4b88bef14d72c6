"""Schedules, which are functions of the count of steps, and the transformations that scale by numbers and schedules."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from shardtensor.core import hinted
from shardtensor.errors import ArgumentError, ArgumentTypeError
from shardtensor.functions.placement.conversion import asarray
from shardtensor.functions.standard.data_types import astype
from shardtensor.functions.standard.elementwise import clip, cos, floor, maximum, minimum
from shardtensor.functions.standard.searching import where
from shardtensor.optim.parameter_trees import count_of, expect_state, for_leaves, incremented, kind_text, mapped
from shardtensor.optim.transformations import GradientTransformation, identity, stateless
from shardtensor.tensor.tensor import ShardedTensor

Schedule = Callable[[Any], Any]
"""A function of the count of steps, an integer without dimensions, that returns a number or a tensor of none."""


def _at_least_1(caller: str, name: str, steps: int) -> None:
    if steps < 1:
        raise ArgumentError(f"{caller}: {name} is {steps}; wanted at least 1")


# -- schedules -------------------------------------------------------------------------------------


@hinted
def constant_schedule(value: Any) -> Schedule:
    """Returns a schedule that has one value.

    Args:
        value: the value.

    >>> st.optim.constant_schedule(0.1)(7)
    0.1
    """
    return lambda count: value


@hinted
def linear_schedule(init_value: float, end_value: float, transition_steps: int, transition_begin: int = 0) -> Schedule:
    """Returns a schedule that changes linearly from one value to another.

    Args:
        init_value: the value until ``transition_begin``.
        end_value: the value from ``transition_begin + transition_steps`` on.
        transition_steps: the number of steps in which it changes.
        transition_begin: the step from which on it changes.

    Returns:
        A function of the count, which returns a tensor without dimensions, on the mesh of the count.

    Raises:
        ArgumentError: ``transition_steps`` is less than 1.

    >>> rate = st.optim.linear_schedule(1.0, 0.0, transition_steps=4)
    >>> [float(rate(count)) for count in (0, 1, 4, 9)]
    [1.0, 0.75, 0.0, 0.0]
    """
    _at_least_1("optim.linear_schedule", "transition_steps", transition_steps)

    def schedule(count: Any) -> Any:
        done = clip(_float(count) - transition_begin, 0, transition_steps)
        return (init_value - end_value) * (1 - done / transition_steps) + end_value

    return schedule


def _float(count: Any) -> ShardedTensor:
    return astype(asarray(count), "float64")


@hinted
def cosine_decay_schedule(init_value: float, decay_steps: int, alpha: float = 0.0, exponent: float = 1.0) -> Schedule:
    """Returns a schedule that decays as half a period of a cosine.

    I. Loshchilov, F. Hutter, SGDR: Stochastic Gradient Descent with Warm Restarts, 2017.

    Args:
        init_value: the first value.
        decay_steps: the number of steps in which it decays.
        alpha: the last value as a fraction of the first.
        exponent: the power of the cosine, which is between 0 and 1.

    Returns:
        A function of the count, which returns a tensor without dimensions, on the mesh of the count.

    Raises:
        ArgumentError: ``decay_steps`` is less than 1.

    >>> rate = st.optim.cosine_decay_schedule(1.0, decay_steps=100, alpha=0.1)
    >>> [round(float(rate(count)), 3) for count in (0, 50, 100, 200)]
    [1.0, 0.55, 0.1, 0.1]
    """
    _at_least_1("optim.cosine_decay_schedule", "decay_steps", decay_steps)

    def schedule(count: Any) -> Any:
        cosine = 0.5 * (1 + cos(minimum(_float(count), decay_steps) * (math.pi / decay_steps)))
        return init_value * ((1 - alpha) * cosine**exponent + alpha)

    return schedule


@hinted
def warmup_cosine_decay_schedule(
    init_value: float, peak_value: float, warmup_steps: int, decay_steps: int, end_value: float = 0.0,
    exponent: float = 1.0,
) -> Schedule:  # fmt: skip
    """Returns a schedule that grows linearly, and then decays as half a period of a cosine.

    Args:
        init_value: the first value.
        peak_value: the value after ``warmup_steps``.
        warmup_steps: the number of steps in which it grows; 0 for none.
        decay_steps: the number of all steps, with those of the warmup.
        end_value: the value after ``decay_steps``.
        exponent: the power of the cosine, as in `cosine_decay_schedule`.

    Returns:
        A function of the count, which returns a tensor without dimensions, on the mesh of the count.

    Raises:
        ArgumentError: ``decay_steps`` is not more than ``warmup_steps``.

    >>> rate = st.optim.warmup_cosine_decay_schedule(0.0, 1.0, warmup_steps=10, decay_steps=110)
    >>> [round(float(rate(count)), 3) for count in (0, 5, 10, 60, 110)]
    [0.0, 0.5, 1.0, 0.5, 0.0]
    """
    caller = "optim.warmup_cosine_decay_schedule"
    _at_least_1(caller, "decay_steps - warmup_steps", decay_steps - warmup_steps)
    alpha = end_value / peak_value if peak_value else 0.0
    decay = cosine_decay_schedule(peak_value, decay_steps - warmup_steps, alpha, exponent)
    if warmup_steps == 0:
        return decay
    _at_least_1(caller, "warmup_steps", warmup_steps)
    warmup = linear_schedule(init_value, peak_value, warmup_steps)
    return lambda count: where(_float(count) < warmup_steps, warmup(count), decay(_float(count) - warmup_steps))


@hinted
def piecewise_constant_schedule(
    init_value: float, boundaries_and_scales: Mapping[int, float] | None = None
) -> Schedule:
    """Returns a schedule that is multiplied by a factor at each of some steps.

    Args:
        init_value: the first value.
        boundaries_and_scales: for each step from which on it has another value, the factor.

    Returns:
        A function of the count, which returns a tensor without dimensions, on the mesh of the count.

    Raises:
        ArgumentError: a factor is negative.

    >>> rate = st.optim.piecewise_constant_schedule(1.0, {100: 0.5, 200: 0.5})
    >>> [float(rate(count)) for count in (99, 100, 200)]
    [1.0, 0.5, 0.25]
    """
    factors = sorted((boundaries_and_scales or {}).items())
    for step, factor in factors:
        if factor < 0:
            raise ArgumentError(
                f"optim.piecewise_constant_schedule: the factor at step {step} is {factor}; wanted none below 0"
            )

    def schedule(count: Any) -> Any:
        value: Any = init_value
        for step, factor in factors:
            value = where(asarray(count) < step, value, value * factor)
        return value

    return schedule


@hinted
def exponential_decay(
    init_value: float, transition_steps: int, decay_rate: float, transition_begin: int = 0, staircase: bool = False,
    end_value: float | None = None,
) -> Schedule:  # fmt: skip
    """Returns a schedule that is multiplied by a factor in each span of steps.

    Args:
        init_value: the value until ``transition_begin``.
        transition_steps: the number of steps in a span.
        decay_rate: the factor, which is positive.
        transition_begin: the step from which on it changes.
        staircase: whether it changes at the end of a span only.
        end_value: the limit: the least value if the factor is less than 1, otherwise the largest.

    Returns:
        A function of the count, which returns a tensor without dimensions, on the mesh of the count.

    Raises:
        ArgumentError: ``transition_steps`` is less than 1, or ``decay_rate`` is not positive.

    >>> rate = st.optim.exponential_decay(1.0, transition_steps=10, decay_rate=0.25)
    >>> [float(rate(count)) for count in (0, 5, 10)]
    [1.0, 0.5, 0.25]
    """
    caller = "optim.exponential_decay"
    _at_least_1(caller, "transition_steps", transition_steps)
    if not decay_rate > 0:
        raise ArgumentError(f"{caller}: decay_rate is {decay_rate}; wanted a positive number")

    def schedule(count: Any) -> Any:
        spans = maximum(_float(count) - transition_begin, 0) / transition_steps
        value = init_value * decay_rate ** (floor(spans) if staircase else spans)
        if end_value is None:
            return value
        return maximum(value, end_value) if decay_rate < 1 else minimum(value, end_value)

    return schedule


# -- transformations -------------------------------------------------------------------------------


class ScaleByScheduleState(NamedTuple):
    """The state of `scale_by_schedule`.

    Attributes:
        count: the number of steps, an int32 tensor without dimensions.
    """

    count: Any


@hinted
def scale(step_size: Any) -> GradientTransformation:
    """Returns a transformation that multiplies by a number.

    Args:
        step_size: a number, or a tensor without dimensions.

    >>> st.optim.scale(2.0).update([st.ones(2)], st.optim.EmptyState())[0][0].tolist()
    [2.0, 2.0]
    """
    return stateless(lambda updates, params: _scaled("optim.scale", updates, step_size))


def _scaled(caller: str, updates: Any, factor: Any) -> Any:
    number = for_leaves(factor)
    return mapped(caller, lambda g: number(g) * g, {"gradients": updates})


@hinted
def scale_by_schedule(step_size_fn: Schedule) -> GradientTransformation:
    """Returns a transformation that multiplies by a function of the count of steps.

    Args:
        step_size_fn: the function: a schedule, or any function of an int32 tensor without dimensions.

    >>> halving = st.optim.scale_by_schedule(lambda count: 0.5**count)
    >>> state = halving.init([st.ones(2)])
    >>> for _ in range(3):
    ...     updates, state = halving.update([st.ones(2)], state)
    >>> updates[0].tolist(), int(state.count)
    ([0.25, 0.25], 3)
    """
    caller = "optim.scale_by_schedule"

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, ScaleByScheduleState]:
        expect_state(caller, state, ScaleByScheduleState)
        scaled = _scaled(caller, updates, step_size_fn(state.count))
        return scaled, ScaleByScheduleState(incremented(state.count))

    return GradientTransformation(lambda params: ScaleByScheduleState(count_of(params)), update)


@hinted
def scale_by_learning_rate(learning_rate: Any, *, flip_sign: bool = True) -> GradientTransformation:
    """Returns a transformation that multiplies by a learning rate, with the sign of a descent.

    Args:
        learning_rate: a number, a tensor without dimensions, or a schedule. None is for no scaling.
        flip_sign: whether the factor is the negative rate.

    Raises:
        ArgumentTypeError: ``learning_rate`` is none of these.

    >>> st.optim.scale_by_learning_rate(0.5).update([st.ones(2)], st.optim.EmptyState())[0][0].tolist()
    [-0.5, -0.5]
    """
    if learning_rate is None:
        return identity()
    sign = -1 if flip_sign else 1
    if callable(learning_rate):
        return scale_by_schedule(lambda count: sign * learning_rate(count))
    if not isinstance(learning_rate, (int, float)) and getattr(learning_rate, "shape", None) != ():
        raise ArgumentTypeError(
            f"optim.scale_by_learning_rate: learning_rate is {kind_text(learning_rate)}; wanted a number, a tensor "
            "without dimensions, or a function of the count of steps (the parameters are the argument of init)"
        )
    return scale(sign * learning_rate)
