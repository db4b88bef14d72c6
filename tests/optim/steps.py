"""Shared by the tests of optimizers: parameters, gradients, and many steps of an optimizer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

import shardtensor as st

SHAPES = {"b": (5,), "m": (3, 4), "s": (), "w": (7, 5)}
"""The shapes of parameters; none of them can be divided by eight or by four and two."""

STEPS = 100


def start(dtype: str = "float64") -> dict[str, Any]:
    """The first parameters."""
    rng = np.random.default_rng(1)
    return {name: rng.standard_normal(shape).astype(dtype) for name, shape in SHAPES.items()}


def gradients(dtype: str = "float64", steps: int = STEPS) -> Iterator[dict[str, Any]]:
    """The part of the gradients of each step that does not depend on the parameters, of which 0.1 is the other part."""
    rng = np.random.default_rng(2)
    for _ in range(steps):
        yield {name: np.asarray(rng.standard_normal(shape)).astype(dtype) for name, shape in SHAPES.items()}


def placed(arrays: Any, sharding: Any) -> Any:
    """Arrays on devices: matrices in a layout, others replicated."""
    whole = st.NamedSharding(sharding.mesh, st.P())
    return {name: st.device_put(x, sharding if np.ndim(x) == 2 else whole) for name, x in arrays.items()}


def step_of(optimizer: Any) -> Any:
    """One step of an optimizer, with gradients that depend on the parameters."""

    def step(params: Any, state: Any, noise: Any) -> Any:
        grads = st.tree.map(lambda g, p: g + 0.1 * p, noise, params)
        updates, state = optimizer.update(grads, state, params)
        return st.optim.apply_updates(params, updates), state

    return step


def trained(
    optimizer: Any, sharding: Any, dtype: str = "float64", steps: int = STEPS, jit: bool = True
) -> tuple[Any, Any]:
    """The parameters and the state after many steps."""
    params = placed(start(dtype), sharding)
    state = optimizer.init(params)
    step = st.jit(step_of(optimizer), donate_argnums=(0, 1), executor="numpy") if jit else step_of(optimizer)
    for noise in gradients(dtype, steps):
        params, state = step(params, state, placed(noise, sharding))
    return params, state


def layouts(backend: str = "numpy") -> list[Any]:
    """A layout of matrices on one device, on eight, and on two by four."""
    found = []
    for shape, names, spec in (((1,), ("x",), ("x",)), ((8,), ("x",), ("x",)), ((2, 4), ("x", "y"), ("x", "y"))):
        devices = st.devices(backend)[: int(np.prod(shape))]
        found.append(st.NamedSharding(st.make_mesh(shape, names, devices=devices), st.P(*spec)))
    return found
