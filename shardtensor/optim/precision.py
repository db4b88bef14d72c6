"""Precision: losses in a narrow dtype, and the scale that keeps their gradients in its range."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from shardtensor.core import hinted
from shardtensor.errors import ArgumentError, ArgumentTypeError, type_text
from shardtensor.functions.placement.conversion import asarray
from shardtensor.functions.standard.data_types import astype, isdtype
from shardtensor.functions.standard.elementwise import isfinite, logical_and, maximum, minimum
from shardtensor.functions.standard.searching import where
from shardtensor.functions.standard.statistical import all
from shardtensor.optim.parameter_trees import (
    aligned,
    count_of,
    expect_state,
    for_leaves,
    incremented,
    like,
    mapped,
)
from shardtensor.optim.transformations import GradientTransformation, expect_transformation
from shardtensor.tensor import pytree
from shardtensor.tensor.operands import dtype_of, is_data, sharded_dtype
from shardtensor.tensor.tensor import ShardedTensor


@hinted
def mixed_precision(
    compute: npt.DTypeLike = "bfloat16", params: npt.DTypeLike | None = "float32",
    output: npt.DTypeLike | None = "float32",
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:  # fmt: skip
    """Returns a decorator of losses and models, which then compute in another dtype than their parameters have.

    P. Micikevicius et al., Mixed Precision Training, 2018. All floating-point arrays among the arguments are converted
    to ``compute`` before the function is called, and those among its results to ``output``. Gradients are those of the
    parameters as they are given, in their dtype and layout. Numbers of Python, integers and keys stay as they are.
    float16 needs `shardtensor.optim.dynamic_loss_scaling`, too; bfloat16 has the range of float32.

    Args:
        compute: the dtype of the computation.
        params: the dtype that the floating-point arrays of the first argument must have, so that steps are not rounded
            to a narrow dtype; None permits any.
        output: the dtype of the results; None leaves them.

    Raises:
        ArgumentTypeError: a dtype is none of real floating-point numbers, or, when the function is called, a parameter
            has another dtype than ``params``.

    >>> @st.mixed_precision(compute="float16")
    ... def loss(w, x):
    ...     assert w.dtype == x.dtype == st.float16
    ...     return (x @ w).mean()
    >>> value, gradient = st.value_and_grad(loss)(st.ones(3, dtype="float32"), st.ones((8, 3)))
    >>> value.dtype, gradient.dtype
    (dtype('float32'), dtype('float32'))
    """
    narrow, kept, last = [
        _float_dtype(name, dtype) for name, dtype in (("compute", compute), ("params", params), ("output", output))
    ]

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        if not callable(function):
            raise ArgumentTypeError(
                f"mixed_precision: the decorated object is {type_text(function)}; wanted a function: "
                "st.mixed_precision(compute=...)(loss)"
            )

        @functools.wraps(function)
        def computed(*args: Any, **kwargs: Any) -> Any:
            if kept is not None and args:
                _check_params(args[0], kept)
            new_args, new_kwargs = pytree.map_leaves(lambda x: _converted(x, narrow), (args, kwargs))
            return pytree.map_leaves(lambda x: _converted(x, last), function(*new_args, **new_kwargs))

        return computed

    return decorate


def _float_dtype(name: str, dtype: npt.DTypeLike | None) -> np.dtype[Any] | None:
    if dtype is None and name != "compute":
        return None
    try:
        found = None if dtype is None else sharded_dtype(dtype)
    except ArgumentTypeError:
        found = None
    if found is None or not isdtype(found, "real floating"):
        is_function = callable(dtype) and not isinstance(dtype, type)
        given, usage = (
            (type_text(dtype), ": st.mixed_precision('bfloat16')(loss)") if is_function else (repr(dtype), "")
        )
        raise ArgumentTypeError(
            f"mixed_precision: {name} is {given}; wanted a dtype of floating-point numbers, such as 'bfloat16'{usage}"
        )
    return found


def _is_floating_array(x: Any) -> bool:
    is_array = isinstance(x, (ShardedTensor, np.ndarray, np.generic)) or is_data(x)
    return is_array and bool(isdtype(dtype_of(x), "real floating"))


def _check_params(params: Any, dtype: np.dtype[Any]) -> None:
    for path, x in zip(pytree.paths(params, "params"), pytree.leaves(params), strict=True):
        if _is_floating_array(x) and dtype_of(x) != dtype:
            raise ArgumentTypeError(
                f"mixed_precision: {path} has the dtype {dtype_of(x)}; wanted {dtype}, which params= gives "
                "(params=None permits any)"
            )


def _converted(x: Any, dtype: np.dtype[Any] | None) -> Any:
    return x if dtype is None or not _is_floating_array(x) else astype(asarray(x), dtype, copy=False)


class LossScaleState(NamedTuple):
    """The state of `dynamic_loss_scaling`.

    Attributes:
        scale: the factor of the loss in the next step, a float32 tensor without dimensions.
        count: the number of steps since the factor changed, an int32 tensor without dimensions.
        skipped: the number of steps that changed no parameters, likewise.
        inner_state: the state of the optimizer.
    """

    scale: Any
    count: Any
    skipped: Any
    inner_state: Any


@hinted
def dynamic_loss_scaling(
    inner: GradientTransformation, initial_scale: float = 2.0**15, period: int = 2000, factor: float = 2.0
) -> GradientTransformation:
    """Returns an optimizer for gradients of a loss that is multiplied by ``state.scale``, as float16 needs it.

    P. Micikevicius et al., Mixed Precision Training, 2018, section 3.2. The gradients are divided by the scale. If one
    of them is infinite or NaN, the step changes neither parameters nor the state of ``inner``, and the scale is divided
    by ``factor``, down to 1; after ``period`` steps without that, it is multiplied by ``factor``, up to 2**24. Nothing
    is read on the host.

    Args:
        inner: the optimizer.
        initial_scale: the first scale.
        period: the number of steps.
        factor: the factor of the scale, more than 1.

    Raises:
        ArgumentError: ``factor`` is not more than 1, or ``period`` or ``initial_scale`` less than 1.
        ArgumentTypeError: ``inner`` is no optimizer.

    >>> optimizer = st.optim.dynamic_loss_scaling(st.optim.sgd(0.5), initial_scale=1024)
    >>> w, x = st.ones(3), st.ones((8, 3))
    >>> state = optimizer.init(w)
    >>> scaled, grads = st.value_and_grad(lambda w: (x @ w).mean() * state.scale)(w)
    >>> float(scaled / state.scale)
    3.0
    >>> updates, state = optimizer.update(grads, state, w)
    >>> st.optim.apply_updates(w, updates).tolist()
    [0.5, 0.5, 0.5]
    """
    caller = "optim.dynamic_loss_scaling"
    expect_transformation(caller, "inner", inner)
    if not factor > 1 or period < 1 or initial_scale < 1:
        raise ArgumentError(
            f"{caller}: initial_scale is {initial_scale!r}, period {period!r} and factor {factor!r}; wanted at least "
            "1, at least 1, and more than 1"
        )

    def init(params: Any) -> LossScaleState:
        scale = astype(count_of(params), "float32") + initial_scale  # on the mesh of the parameters
        return LossScaleState(scale, count_of(params), count_of(params), inner.init(params))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, LossScaleState]:
        expect_state(caller, state, LossScaleState)
        inverse = for_leaves(1 / state.scale)
        grads = mapped(caller, lambda g: g * inverse(g), {"gradients": updates})
        finite = _are_finite(caller, grads)
        # Infinities must not reach the inner optimizer: 0 * inf in its sums is NaN.
        known = mapped(caller, lambda g: where(finite, g, 0), {"gradients": grads})
        updates, after = inner.update(known, state.inner_state, params)
        updates = mapped(caller, lambda u: where(finite, u, 0), {"updates": updates})
        kept = mapped(
            caller,
            lambda new, old: like(where(finite, new, old), old),
            {"the new state": after, "state.inner_state": state.inner_state},
        )
        grown = logical_and(finite, state.count + 1 >= period)
        scale = where(finite, where(grown, minimum(state.scale * factor, 2.0**24), state.scale), state.scale / factor)
        count = where(logical_and(finite, ~grown), incremented(state.count), 0)
        skipped = where(finite, state.skipped, incremented(state.skipped))
        return updates, LossScaleState(
            like(maximum(scale, 1.0), state.scale), like(count, state.count), like(skipped, state.skipped), kept
        )

    return GradientTransformation(init, update)


def _are_finite(caller: str, tree: Any) -> Any:
    """Returns whether all elements of a tree are finite, a tensor without dimensions."""
    rows, _ = aligned(caller, {"gradients": tree})
    result = asarray(True)
    for (leaf,) in rows:
        result = logical_and(result, all(isfinite(leaf)))
    return result
