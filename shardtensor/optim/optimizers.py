"""The optimizers: chains of transformations, with the arguments of optax."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from shardtensor.core import hinted
from shardtensor.optim.clipping import clip_by_block_rms, scale_by_param_block_rms
from shardtensor.optim.factored_moments import scale_by_factored_rms
from shardtensor.optim.learning_rates import ScaleByScheduleState, scale, scale_by_learning_rate, scale_by_schedule
from shardtensor.optim.masking import masked, multi_transform
from shardtensor.optim.moments import ema, scale_by_adam, scale_by_lion, trace
from shardtensor.optim.orthogonalization import NS_COEFFS, Coefficients, scale_by_muon, scale_by_shape
from shardtensor.optim.parameter_trees import expect_params, expect_state, for_leaves, incremented, mapped
from shardtensor.optim.transformations import GradientTransformation, chain, identity, stateless
from shardtensor.tensor.pytree import flattened


@hinted
def add_decayed_weights(weight_decay: Any = 0.0, mask: Any = None) -> GradientTransformation:
    """Returns a transformation that adds a multiple of the parameters to the gradients.

    Args:
        weight_decay: the factor: a number, a tensor without dimensions, or a schedule.
        mask: which parameters decay, as in `masked`; None is for all.

    Raises:
        ArgumentTypeError: ``update`` gets no parameters.
        ArgumentError: ``update`` gets gradients of another structure than the parameters; ShapeError, of other shapes.

    >>> decay = st.optim.add_decayed_weights(0.5)
    >>> params = [st.ones(2)]
    >>> decay.update([st.zeros(2)], decay.init(params), params)[0][0].tolist()
    [0.5, 0.5]
    """
    caller = "optim.add_decayed_weights"

    def decayed(updates: Any, params: Any, factor: Any) -> Any:
        expect_params(caller, params)
        if type(factor) in (int, float) and factor == 0:
            return updates
        number = for_leaves(factor)
        return mapped(caller, lambda g, p: g + number(p) * p, {"gradients": updates, "params": params})

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, ScaleByScheduleState]:
        expect_state(caller, state, ScaleByScheduleState)
        after = ScaleByScheduleState(incremented(state.count))
        return decayed(updates, params, weight_decay(state.count)), after

    if callable(weight_decay):
        one = GradientTransformation(scale_by_schedule(weight_decay).init, update)
    else:
        one = stateless(lambda updates, params: decayed(updates, params, weight_decay))
    return one if mask is None else masked(one, mask)


@hinted
def sgd(
    learning_rate: Any, momentum: float | None = None, nesterov: bool = False,
    accumulator_dtype: npt.DTypeLike | None = None,
) -> GradientTransformation:  # fmt: skip
    """Returns stochastic gradient descent, which may have momentum.

    I. Sutskever et al., On the importance of initialization and momentum in deep learning, 2013. The state has the
    layout of the parameters.

    Args:
        learning_rate: a number, a tensor without dimensions, or a schedule.
        momentum: the decay of the sum of gradients; None for none. See `trace`.
        nesterov: whether the momentum is Nesterov's.
        accumulator_dtype: the dtype of the sum, if it is not that of the parameters.

    Raises:
        ArgumentTypeError: ``learning_rate`` is none of these.

    >>> optimizer = st.optim.sgd(0.1, momentum=0.9)
    >>> params = {"w": st.ones(2)}
    >>> updates, state = optimizer.update({"w": st.ones(2)}, optimizer.init(params))
    >>> st.optim.apply_updates(params, updates)["w"].tolist()
    [0.9, 0.9]
    """
    first = identity() if momentum is None else trace(momentum, nesterov, accumulator_dtype)
    return chain(first, scale_by_learning_rate(learning_rate))


@hinted
def adam(
    learning_rate: Any, b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8, eps_root: float = 0.0,
    mu_dtype: npt.DTypeLike | None = None, *, nesterov: bool = False,
) -> GradientTransformation:  # fmt: skip
    """Returns Adam.

    D. P. Kingma, J. Ba, Adam: A Method for Stochastic Optimization, 2015. The state has the layout of the parameters.

    Args:
        learning_rate: a number, a tensor without dimensions, or a schedule.
        b1: see `scale_by_adam`, as for the arguments after it.
        b2: the decay of the mean of squares.
        eps: the number that is added to the root.
        eps_root: the number that is added under the root.
        mu_dtype: the dtype of the mean of gradients, if it is not that of the parameters.
        nesterov: whether the momentum is Nesterov's.

    Raises:
        ArgumentTypeError: ``learning_rate`` is none of these.

    >>> optimizer = st.optim.adam(0.1)
    >>> params = {"w": st.ones(2)}
    >>> updates, state = optimizer.update({"w": st.asarray([3.0, -3.0])}, optimizer.init(params))
    >>> np.round(st.optim.apply_updates(params, updates)["w"], 6).tolist()
    [0.9, 1.1]
    """
    return chain(
        scale_by_adam(b1, b2, eps, eps_root, mu_dtype, nesterov=nesterov), scale_by_learning_rate(learning_rate)
    )


@hinted
def adamw(
    learning_rate: Any, b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8, eps_root: float = 0.0,
    mu_dtype: npt.DTypeLike | None = None, weight_decay: Any = 1e-4, mask: Any = None, *, nesterov: bool = False,
) -> GradientTransformation:  # fmt: skip
    """Returns Adam with weight decay: each step subtracts a multiple of the parameters, too.

    I. Loshchilov, F. Hutter, Decoupled Weight Decay Regularization, 2019. ``update`` needs the parameters. Under
    `shardtensor.jit`, the step of a leaf is one pass over its elements.

    Args:
        learning_rate: a number, a tensor without dimensions, or a schedule.
        b1: see `scale_by_adam`, as for the four arguments after it.
        b2: the decay of the mean of squares.
        eps: the number that is added to the root.
        eps_root: the number that is added under the root.
        mu_dtype: the dtype of the mean of gradients, if it is not that of the parameters.
        weight_decay: the decay of the parameters in a step, divided by the learning rate: a number, or a schedule.
        mask: which parameters decay, as in `masked`; None is for all.
        nesterov: whether the momentum is Nesterov's.

    Raises:
        ArgumentTypeError: ``learning_rate`` is none of these; ``update`` gets no parameters.

    >>> optimizer = st.optim.adamw(st.optim.linear_schedule(0.1, 0.0, 100), weight_decay=0.01)
    >>> params = {"w": st.ones(2)}
    >>> updates, state = optimizer.update({"w": st.asarray([3.0, -3.0])}, optimizer.init(params), params)
    >>> np.round(st.optim.apply_updates(params, updates)["w"], 6).tolist()
    [0.899, 1.099]
    """
    return chain(
        scale_by_adam(b1, b2, eps, eps_root, mu_dtype, nesterov=nesterov),
        add_decayed_weights(weight_decay, mask),
        scale_by_learning_rate(learning_rate),
    )


@hinted
def lion(
    learning_rate: Any, b1: float = 0.9, b2: float = 0.99, mu_dtype: npt.DTypeLike | None = None,
    weight_decay: Any = 1e-3, mask: Any = None,
) -> GradientTransformation:  # fmt: skip
    """Returns Lion, whose steps are the signs of means of gradients, and which decays weights as `adamw` does.

    X. Chen et al., Symbolic Discovery of Optimization Algorithms, 2023. The state has the layout of the parameters.

    Args:
        learning_rate: a number, a tensor without dimensions, or a schedule.
        b1: see `scale_by_lion`, as for the two arguments after it.
        b2: the decay of the mean that the state keeps.
        mu_dtype: the dtype of the means, if it is not that of the parameters.
        weight_decay: the decay of the parameters in a step, divided by the learning rate: a number, or a schedule.
        mask: which parameters decay, as in `masked`; None is for all.

    Raises:
        ArgumentTypeError: ``learning_rate`` is none of these; ``update`` gets no parameters.

    >>> optimizer = st.optim.lion(0.1)
    >>> params = {"w": st.zeros(2)}
    >>> updates, state = optimizer.update({"w": st.asarray([3.0, -0.1])}, optimizer.init(params), params)
    >>> updates["w"].tolist()
    [-0.1, 0.1]
    """
    return chain(
        scale_by_lion(b1, b2, mu_dtype), add_decayed_weights(weight_decay, mask), scale_by_learning_rate(learning_rate)
    )


@hinted
def adafactor(
    learning_rate: Any = None, min_dim_size_to_factor: int = 128, decay_rate: float = 0.8, decay_offset: int = 0,
    multiply_by_parameter_scale: bool = True, clipping_threshold: float | None = 1.0, momentum: float | None = None,
    dtype_momentum: npt.DTypeLike = np.float32, weight_decay_rate: Any = None, eps: float = 1e-30,
    factored: bool = True, weight_decay_mask: Any = None,
) -> GradientTransformation:  # fmt: skip
    """Returns Adafactor, whose state for a matrix is a vector for its rows and one for its columns.

    N. Shazeer, M. Stern, Adafactor: Adaptive Learning Rates with Sublinear Memory Cost, 2018. ``update`` needs the
    parameters. The layout of a vector is that of its parameter without the other dimension.

    Args:
        learning_rate: a number, a tensor without dimensions, or a schedule; None is for 1.
        min_dim_size_to_factor: see `scale_by_factored_rms`, as for the two arguments after it.
        decay_rate: the exponent of the decay.
        decay_offset: the count of the first step.
        multiply_by_parameter_scale: whether updates are multiplied by the root mean square of the parameter.
        clipping_threshold: the limit of the root mean square of a leaf's update; None for none.
        momentum: the decay of a mean of the updates; None for none.
        dtype_momentum: the dtype of that mean.
        weight_decay_rate: the decay of the parameters in a step: a number, or a schedule; None for none.
        eps: the number that is added to squares.
        factored: whether matrices have vectors.
        weight_decay_mask: which parameters decay, as in `masked`; None is for all.

    Raises:
        ArgumentTypeError: ``learning_rate`` is none of these; ``update`` gets no parameters.

    >>> optimizer = st.optim.adafactor(0.1)
    >>> params = {"w": st.ones(2)}
    >>> updates, state = optimizer.update({"w": st.asarray([3.0, -3.0])}, optimizer.init(params), params)
    >>> np.round(updates["w"], 6).tolist()
    [-0.1, 0.1]
    """
    parts = [scale_by_factored_rms(factored, decay_rate, decay_offset, min_dim_size_to_factor, eps)]
    if clipping_threshold is not None:
        parts.append(clip_by_block_rms(clipping_threshold))
    parts.append(scale_by_learning_rate(learning_rate, flip_sign=False))
    if multiply_by_parameter_scale:
        parts.append(scale_by_param_block_rms())
    if momentum is not None:
        parts.append(ema(momentum, debias=False, accumulator_dtype=dtype_momentum))
    if weight_decay_rate is not None:
        parts.append(add_decayed_weights(weight_decay_rate, weight_decay_mask))
    return chain(*parts, scale(-1))


@hinted
def muon(
    learning_rate: Any, ns_coeffs: Coefficients | tuple[Coefficients, ...] = NS_COEFFS, ns_steps: int = 5,
    beta: float = 0.95, eps: float = 1e-8, weight_decay: Any = 0.0, weight_decay_mask: Any = None,
    mu_dtype: npt.DTypeLike | None = None, *, nesterov: bool = True, adaptive: bool = False, adam_b1: float = 0.9,
    adam_b2: float = 0.999, adam_eps_root: float = 0.0, adam_weight_decay: Any = 0.0, adam_learning_rate: Any = None,
    consistent_rms: float | None = None,
) -> GradientTransformation:  # fmt: skip
    """Returns Muon for matrices, and `adamw` for other parameters.

    K. Jordan et al., Muon: An optimizer for hidden layers in neural networks, 2024. ``update`` needs the parameters.
    The state and the updates have the layout of the parameters; products of split matrices transfer as
    `shardtensor.matmul` does.

    Args:
        learning_rate: a number, a tensor without dimensions, or a schedule.
        ns_coeffs: see `orthogonalize_via_newton_schulz`.
        ns_steps: the number of steps of the iteration.
        beta: the decay of the means of gradients.
        eps: the number that is added to norms, and for other parameters to the root.
        weight_decay: the decay of matrices in a step, divided by the learning rate: a number, or a schedule.
        weight_decay_mask: which matrices decay: a function that returns a mask as in `masked`; None is for all.
        mu_dtype: the dtype of the means, if it is not that of the parameters.
        nesterov: whether the momentum is Nesterov's.
        adaptive: see `scale_by_muon`.
        adam_b1: the decay of the mean of gradients, for other parameters.
        adam_b2: the decay of the mean of squares.
        adam_eps_root: the number that is added under the root.
        adam_weight_decay: the decay of other parameters.
        adam_learning_rate: the learning rate of other parameters; None for that of matrices.
        consistent_rms: see `scale_by_shape`.

    Raises:
        ArgumentError: there are less coefficients than steps.
        ArgumentTypeError: ``learning_rate`` is none of these; ``update`` gets no parameters.

    >>> optimizer = st.optim.muon(0.1)
    >>> params = {"w": st.ones((4, 4)), "b": st.ones(4)}
    >>> optimizer.init(params).inner_states["adam"].inner_state[0].nu["b"].shape
    (4,)
    """
    of_matrices = chain(
        scale_by_muon(ns_coeffs, ns_steps, beta, eps, mu_dtype, nesterov=nesterov, adaptive=adaptive),
        scale_by_shape(consistent_rms),
        add_decayed_weights(weight_decay, weight_decay_mask),
        scale_by_learning_rate(learning_rate),
    )
    of_others = adamw(
        learning_rate if adam_learning_rate is None else adam_learning_rate,
        adam_b1, adam_b2, eps, adam_eps_root, mu_dtype, adam_weight_decay, nesterov=nesterov,
    )  # fmt: skip
    return multi_transform({"muon": of_matrices, "adam": of_others}, _labels)


def _labels(params: Any) -> Any:
    leaves, structure = flattened(params, None, none_is_leaf=True)
    return structure.unflatten(["muon" if getattr(leaf, "ndim", 0) == 2 else "adam" for leaf in leaves])
