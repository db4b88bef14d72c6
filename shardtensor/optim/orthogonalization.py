"""Muon's updates: gradients whose singular values are made nearly equal, by products only."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy.typing as npt

from shardtensor.core import hinted
from shardtensor.errors import ArgumentError, ShapeError
from shardtensor.functions.standard.elementwise import sqrt
from shardtensor.functions.standard.manipulation import matrix_transpose
from shardtensor.functions.standard.statistical import sum
from shardtensor.host.units import counted
from shardtensor.optim.moments import correction
from shardtensor.optim.parameter_trees import (
    count_of,
    expect_state,
    incremented,
    like,
    mapped,
    mapped_to,
    moments,
    placed,
)
from shardtensor.optim.transformations import GradientTransformation, stateless

Coefficients = tuple[float, float, float]

NS_COEFFS: Coefficients = (3.4445, -4.7750, 2.0315)
"""The coefficients of K. Jordan, which make small singular values grow the most, and keep none at exactly 1."""


class MuonState(NamedTuple):
    """The state of `scale_by_muon`.

    Attributes:
        count: the number of steps, an int32 tensor without dimensions.
        mu: the means of gradients, a tree like the parameters.
    """

    count: Any
    mu: Any


@hinted
def orthogonalize_via_newton_schulz(
    x: Any, ns_coeffs: Coefficients | tuple[Coefficients, ...] = NS_COEFFS, ns_steps: int = 5, eps: float = 1e-8
) -> Any:
    """Returns a matrix with nearly the singular vectors of x, and singular values near 1.

    Each step of the iteration of Newton and Schulz computes ``a x + (b x xᵀ + c (x xᵀ)²) x``, after a division by the
    Frobenius norm. K. Jordan et al., Muon: An optimizer for hidden layers in neural networks, 2024.

    Args:
        x: a matrix, split in any way.
        ns_coeffs: the numbers a, b and c, or such numbers for each step.
        ns_steps: the number of steps, if ``ns_coeffs`` are those of all; otherwise the last so many are taken.
        eps: the number that is added to the norm.

    Returns:
        A matrix of the shape, dtype and layout of x. Its products transfer as `shardtensor.matmul` does.

    Raises:
        ShapeError: x is no matrix.
        ArgumentError: there are less coefficients than steps, or not three of each.

    >>> x = st.optim.orthogonalize_via_newton_schulz(st.asarray([[3.0, 1.0], [0.0, 0.1]]))
    >>> bool(st.all(st.abs(st.linalg.svdvals(x) - 1) < 0.4))
    True
    """
    caller = "optim.orthogonalize_via_newton_schulz"
    if x.ndim != 2:
        raise ShapeError(f"{caller}: x has the shape {x.shape}; wanted a matrix")
    steps = _coefficients(caller, ns_coeffs, ns_steps)
    is_tall = x.shape[0] > x.shape[1]
    y = matrix_transpose(x) if is_tall else x
    y = y / (sqrt(sum(y * y)) + eps)
    for a, b, c in steps:
        gram = y @ matrix_transpose(y)
        y = a * y + (b * gram + c * (gram @ gram)) @ y
    return like(matrix_transpose(y) if is_tall else y, x)


def _coefficients(caller: str, given: Any, steps: int) -> list[Coefficients]:
    rows = [tuple(given)] * steps if not isinstance(given[0], (tuple, list)) else [*map(tuple, given)]
    if len(rows) < steps or {*map(len, rows)} - {3}:
        raise ArgumentError(
            f"{caller}: ns_coeffs is {given}; wanted three numbers, or three for each of {counted(steps, 'step')}"
        )
    return rows[len(rows) - steps :]


@hinted
def scale_by_muon(
    ns_coeffs: Coefficients | tuple[Coefficients, ...] = NS_COEFFS, ns_steps: int = 5, beta: float = 0.95,
    eps: float = 1e-8, mu_dtype: npt.DTypeLike | None = None, *, nesterov: bool = True, adaptive: bool = False,
) -> GradientTransformation:  # fmt: skip
    """Returns a transformation whose updates are orthogonalized means of the gradients, for matrices.

    K. Jordan et al., Muon: An optimizer for hidden layers in neural networks, 2024; J. Bernstein, L. Newhouse, Old
    Optimizer, New Norm: An Anthology, 2024. Means and updates have the layout of the parameters.

    Args:
        ns_coeffs: see `orthogonalize_via_newton_schulz`.
        ns_steps: the number of steps of the iteration.
        beta: the decay of the means.
        eps: the number that is added to the norm.
        mu_dtype: the dtype of the means, if it is not that of the parameters.
        nesterov: whether the mean is that of the next step, with the gradient in place of the next one.
        adaptive: whether updates are multiplied by the sum of their products with the means.

    Raises:
        ShapeError: a parameter is no matrix, or ``update`` gets gradients of other shapes.
        ArgumentError: there are less coefficients than steps; ``update`` gets gradients of another structure.
        ArgumentTypeError: ``init`` gets parameters that are no floating-point numbers.

    >>> muon = st.optim.scale_by_muon()
    >>> params = {"w": st.ones((2, 3))}
    >>> updates, state = muon.update({"w": st.asarray([[1.0, 0.0, 0.0], [0.0, 2.0, 0.0]])}, muon.init(params))
    >>> bool(st.all(st.abs(st.linalg.svdvals(updates["w"]) - 1) < 0.4))
    True
    """
    caller = "optim.scale_by_muon"
    _coefficients(caller, ns_coeffs, ns_steps)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, MuonState]:
        expect_state(caller, state, MuonState)
        count = incremented(state.count)
        of_gradient = correction(beta, count)
        of_mean = correction(beta, count + 1) if nesterov else of_gradient

        def step(g: Any, m: Any) -> tuple[Any, Any]:
            g = placed(g, m)
            new = (1 - beta) * g + beta * m
            hat = new * of_mean(new)
            if nesterov:
                hat = beta * hat + (1 - beta) * (g * of_gradient(g))
            ortho = orthogonalize_via_newton_schulz(hat, ns_coeffs, ns_steps, eps)
            return sum(hat * ortho) * ortho if adaptive else ortho, like(new, m)

        updates, mu = mapped_to(2, caller, step, {"gradients": updates, "state.mu": state.mu})
        return updates, MuonState(count, mu)

    return GradientTransformation(lambda params: MuonState(count_of(params), moments(caller, params, mu_dtype)), update)


@hinted
def scale_by_shape(consistent_rms: float | None = None) -> GradientTransformation:
    """Returns a transformation that multiplies matrices by a function of their shapes.

    J. Liu et al., Muon is Scalable for LLM Training, 2025.

    Args:
        consistent_rms: with m rows and n columns, the factor is ``sqrt(max(m, n))`` times this number; if it is None,
            ``sqrt(max(1, n / m))``.

    >>> shape = st.optim.scale_by_shape()
    >>> shape.update([st.ones((1, 4))], shape.init([st.ones((1, 4))]))[0][0].tolist()
    [[2.0, 2.0, 2.0, 2.0]]
    """

    def factor(m: int, n: int) -> float:
        return math.sqrt(max(1, n / max(m, 1))) if consistent_rms is None else math.sqrt(max(m, n)) * consistent_rms

    return stateless(
        lambda updates, params: mapped("optim.scale_by_shape", lambda g: factor(*g.shape) * g, {"gradients": updates})
    )
