"""Optimizers, with the names and the protocol of optax, on pytrees of tensors.

An optimizer is a `GradientTransformation`: ``init(params)`` returns a state, ``update(grads, state, params)`` returns
updates and the next state, and `apply_updates` adds the updates to the parameters. `transformations` has the protocol,
`parameter_trees` the one loop over leaves, which all transformations call and which compares structures and shapes,
`learning_rates` the schedules. `moments`, `clipping`, `factored_moments` and `orthogonalization` are the parts of which
`optimizers` has chains, and `masking` applies them to some of the parameters. `zero_layouts` has the layouts that
divide all of it over devices, `precision` narrow dtypes.

States have the layout and dtype of the parameters, and counts, rates and norms are tensors without dimensions: nothing
is read on the host, so that gradient and step can be one program of `shardtensor.jit`. Transformations are composed of
operators, pytrees and each other; this package may not import `shardtensor.interpreters`, and only the public API
imports it.

>>> optimizer = st.optim.adamw(1e-3)
>>> params = {"w": st.ones((4, 2)), "b": st.zeros(2)}
>>> state = optimizer.init(params)
>>> @st.jit
... def step(params, state, x):
...     loss, grads = st.value_and_grad(lambda p: ((x @ p["w"] + p["b"]) ** 2).mean())(params)
...     updates, state = optimizer.update(grads, state, params)
...     return st.optim.apply_updates(params, updates), state, loss
>>> params, state, loss = step(params, state, st.ones((8, 4)))
>>> float(loss), int(state[0].count)
(16.0, 1)
"""

# ruff: noqa: I001 - `name as name` marks a public name for type checkers; one statement imports all of a module

import typing as _typing

from shardtensor.exports import exported as _exported
from shardtensor.hints import missing as _missing
from shardtensor.optim.clipping import (
    clip as clip,
    clip_by_block_rms as clip_by_block_rms,
    clip_by_global_norm as clip_by_global_norm,
    global_norm as global_norm,
    scale_by_param_block_rms as scale_by_param_block_rms,
)
from shardtensor.optim.factored_moments import (
    FactoredState as FactoredState,
    scale_by_factored_rms as scale_by_factored_rms,
)
from shardtensor.optim.learning_rates import (
    ScaleByScheduleState as ScaleByScheduleState,
    constant_schedule as constant_schedule,
    cosine_decay_schedule as cosine_decay_schedule,
    exponential_decay as exponential_decay,
    linear_schedule as linear_schedule,
    piecewise_constant_schedule as piecewise_constant_schedule,
    scale as scale,
    scale_by_learning_rate as scale_by_learning_rate,
    scale_by_schedule as scale_by_schedule,
    warmup_cosine_decay_schedule as warmup_cosine_decay_schedule,
)
from shardtensor.optim.masking import (
    MaskedNode as MaskedNode,
    MaskedState as MaskedState,
    MultiTransformState as MultiTransformState,
    masked as masked,
    multi_transform as multi_transform,
)
from shardtensor.optim.moments import (
    EmaState as EmaState,
    ScaleByAdamState as ScaleByAdamState,
    ScaleByLionState as ScaleByLionState,
    TraceState as TraceState,
    ema as ema,
    scale_by_adam as scale_by_adam,
    scale_by_lion as scale_by_lion,
    trace as trace,
)
from shardtensor.optim.optimizers import (
    adafactor as adafactor,
    adam as adam,
    adamw as adamw,
    add_decayed_weights as add_decayed_weights,
    lion as lion,
    muon as muon,
    sgd as sgd,
)
from shardtensor.optim.orthogonalization import (
    MuonState as MuonState,
    orthogonalize_via_newton_schulz as orthogonalize_via_newton_schulz,
    scale_by_muon as scale_by_muon,
    scale_by_shape as scale_by_shape,
)
from shardtensor.optim.precision import (
    LossScaleState as LossScaleState,
    dynamic_loss_scaling as dynamic_loss_scaling,
)
from shardtensor.optim.transformations import (
    EmptyState as EmptyState,
    GradientTransformation as GradientTransformation,
    apply_updates as apply_updates,
    chain as chain,
    identity as identity,
    set_to_zero as set_to_zero,
    stateless as stateless,
)
from shardtensor.optim.zero_layouts import ZeroShardings as ZeroShardings, zero as zero

if not _typing.TYPE_CHECKING:  # Type checkers take the names of the imports.
    __all__ = _exported(globals())

    def __getattr__(name: str) -> _typing.Any:
        raise _missing(__name__, name)

    def __dir__() -> list[str]:
        return __all__
